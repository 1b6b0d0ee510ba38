"""What is kept on disk between runs, and the one key under which all of it is kept.

Measured times and choices are in one SQLite file (`store`), compiled functions in folders of
Numba's (`compiled`). Both are valid for one environment (`environment`: processor, libraries) and
one state of the sources that made them (`sources`). Every other package may import this one.
"""

from soapstone.cache.report import Cache, caches

__all__ = ["Cache", "caches"]
