"""Kernels for CPUs: `load` registers the variants of an operator with `kernels.registry`.

The variant that is expected to be fastest is taken unless another is measured to be clearly faster,
and of equal ones the first; panels come first, since measured warm they tie with what they beat on
cold weights, then oneDNN's.
Numba's compile, or load from its cache, when a call is bound. Which modules register variants of
an operator is kept, once a process has imported all: others import those that they need.
"""

from __future__ import annotations

import importlib
from functools import cache
from pathlib import Path

from soapstone.cache.answers import Answers, state_of
from soapstone.cache.environment import digest
from soapstone.cache.sources import contents
from soapstone.kernels.cpu.onednn import library as onednn
from soapstone.kernels.cpu.openblas import library as openblas
from soapstone.kernels.fallback import report
from soapstone.locks import Lock

_LOADING = Lock()
_LOADED: set[str | None] = set()  # operators, None for all
_FAMILIES = (
    "products.panels",
    "products.nbits",
    "onednn.bfloat16",
    "onednn.convolution",
    "onednn.epilogue",
    "onednn.linear_grad",
    "onednn.matmul",
    "onednn.normalization",
    "onednn.pointwise",
    "onednn.pooling",
    "onednn.quantized",
    "onednn.reorder",
    "onednn.sequences",
    "openblas.matmul",
    "openblas.convolution",
    "elementwise.epilogue",
    "recurrent.layers",
    "recurrent.cells",
    "recurrent.gru",
    "recurrent.linear_attention",
    "attention.variants",
    "attention.few",
    "attention.blocks",
    "attention.rotary",
    "winograd.variants",
    "elementwise.machine",
    "reduction.reduce",
    "reduction.byte_scale",
    "normalization.layer_norm",
    "normalization.batch_norm",
    "normalization.group_norm",
    "pooling.variants",
    "pooling.regions",
    "normalization.response",
    "movement.resize",
    "normalization.rms_norm",
    "movement.variants",
    "movement.windows",
    "products.depthwise",
    "products.grouped",
    "products.blocked",
    "products.pairs",
    "products.quads",
    "normalization.dropout",
    "graphs.spmm",
    "graphs.attention",
    "graphs.segments",
    "indexing.embedding",
    "indexing.embedding_bag",
    "indexing.embedding_grad",
    "indexing.slices",
    "indexing.writing",
    "indexing.elements",
    "indexing.selection",
    "indexing.trees",
    "indexing.scan",
    "reduction.reduce_grad",
    "training.updates",
    "training.cross_entropy",
    "training.ctc",
    "training.labels",
    "training.losses",
    "normalization.softmax",
)


def load(operator: str | None = None) -> None:
    """Register the variants of an operator, or of all operators."""
    from soapstone.kernels import registry

    if operator in _LOADED or None in _LOADED:
        return
    _report()
    with _LOADING:  # workers bind in parallel
        table: dict[str, list[tuple[str, str]]] = _answers().answer("variants", _all)
        _answers().save()
        # Of an operator that a program declares, all that it could be part of.
        wanted = table
        if operator is not None and operator in table:
            wanted = {operator: table[operator]}
        for name, found in wanted.items():
            for module, _ in found:
                importlib.import_module(module)
            registry.arrange(name, "cpu", [variant for _, variant in found])
        _LOADED.add(operator)


def _all() -> dict[str, list[tuple[str, str]]]:
    """Register all variants; return where those of each operator are."""
    from soapstone.kernels import registry

    served = onednn.available()
    there = {"onednn.": served, "openblas.": not served and openblas.available()}
    others = tuple(library for library, serves in there.items() if not serves)
    for family in _FAMILIES:
        if not family.startswith(others):
            importlib.import_module(f"{__name__}.{family}")
    return {  # a program may have imported modules before, of the other library too
        name: sorted(
            (p for p in places if not p[0].removeprefix(f"{__name__}.").startswith(others)),
            key=lambda place: _family_of(place[0]),
        )
        for name, places in registry.homes("cpu").items()
    }


def _family_of(module: str) -> int:
    """Return the number of the family whose module, or one of whose modules, it is."""
    families = enumerate(_FAMILIES)
    return next(n for n, of in families if f"{module}.".startswith(f"{__name__}.{of}."))


@cache
def _answers() -> Answers:
    """Return where variants are, as earlier processes saw it with these sources and libraries."""
    from soapstone.ir import spec
    from soapstone.kernels import registry

    library = "onednn" if onednn.available() else "openblas" if openblas.available() else ""
    places = [Path(module.__file__ or "").parent for module in (registry, spec)]
    return Answers(
        "kernels",
        lambda: digest(library, *map(state_of, places)),
        __file__,
        lambda: digest(library, contents()),
    )


def ship(place: Path) -> None:
    """Write where variants are, for a package whose `machine_code` a folder is to be."""
    _answers().ship({"variants": _all()}, place)


@cache
def _report() -> None:
    """Say that a library is missing."""
    if not onednn.available() and not onednn.disabled():
        report(
            f"oneDNN not found (looked in {', '.join(onednn.candidates())})",
            "products and convolutions by OpenBLAS, slower; see `soapstone doctor`"
            if openblas.available()
            else "nor is OpenBLAS, so products and convolutions are NumPy's, many times slower; "
            "pip install scipy-openblas32",
        )


onednn.Loading().begin()
