"""The operator declarations, a folder a family; importing this package registers them all.

Every module of a family is imported, so a new operator is a new file and nothing else.
"""

from __future__ import annotations

import importlib
import pkgutil

from soapstone.ir.spec import declared_names

for _family in pkgutil.iter_modules(__path__):
    if _family.ispkg:
        _package = importlib.import_module(f"{__name__}.{_family.name}")
        for _module in pkgutil.iter_modules(_package.__path__):
            importlib.import_module(f"{_package.__name__}.{_module.name}")

DECLARED = declared_names()  # programs may add others
