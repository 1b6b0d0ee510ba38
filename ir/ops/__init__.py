"""The operator declarations, a folder a family: `load` imports those of an operator, or all.

Every module of a family has declarations, so a new operator is a new file and nothing else. What is
to be known of operators before they are used is kept, once a process has imported all: others
import those that they use.
"""

from __future__ import annotations

import importlib
from functools import cache
from pathlib import Path
from typing import Any

from soapstone.cache.answers import Answers, state_of
from soapstone.cache.sources import contents
from soapstone.ir import spec


def load(operator: str | None = None) -> None:
    """Import what declares an operator, if one of the package is called so, or all of them."""
    if operator is None:
        _all()
    elif operator in declared():
        importlib.import_module(declared()[operator])


def declared() -> dict[str, str]:
    """Return the names of the package's operators, each with the module that declares it."""
    found: dict[str, str] = _known("modules")
    return found


def of_onnx() -> dict[str, str]:
    """Return the package's first operator for each of ONNX, by its domain, a colon and its name."""
    found: dict[str, str] = _known("onnx")
    return found


def having(field: str) -> list[str]:
    """Return the names of the package's operators of which a field is not empty: see `spec`."""
    return list(_known(field))


@cache
def _known(what: str) -> Any:
    found = _answers().answer(what, lambda: _asked()[what])
    _answers().save()
    return found


@cache
def _answers() -> Answers:
    """Return what processes saw of the operators with these sources."""
    place = Path(spec.__file__).parent
    return Answers("operators", lambda: state_of(place), __file__, contents)


def ship(place: Path) -> None:
    """Write what is known of operators, for a package whose `machine_code` a folder is to be."""
    _answers().ship(_asked(), place)


@cache
def _all() -> tuple[str, ...]:
    """Import all modules of all families; return their names, in order."""
    import pkgutil  # few processes ask

    found = []
    for family in pkgutil.iter_modules(__path__):
        if family.ispkg:
            package = importlib.import_module(f"{__name__}.{family.name}")
            found += [
                f"{package.__name__}.{m.name}" for m in pkgutil.iter_modules(package.__path__)
            ]
    for module in found:
        importlib.import_module(module)
    return tuple(found)


@cache
def _asked() -> dict[str, Any]:
    """Return what is known of all operators, in the order of their modules."""
    order = {module: place for place, module in enumerate(_all())}
    own = [(order[home], each) for each, home in spec.homes() if home in order]
    specs = [each for _, each in sorted(own, key=lambda pair: pair[0])]
    homes = {each.name: home for each, home in spec.homes()}
    onnx: dict[str, str] = {}
    for each in specs:
        if each.onnx_entry is not None:
            onnx.setdefault(f"{each.onnx_entry.domain}:{each.onnx_entry.name}", each.name)
    return {
        "modules": {each.name: homes[each.name] for each in specs},
        "onnx": onnx,
        "formula": sorted(each.name for each in specs if each.formula is not None),
        "chooses": sorted(each.name for each in specs if each.chooses),
    }
