"""The environment: all that measured times and compiled code depend on beside their sources.

It is a mapping of texts, so that a key can be explained. Two computers with equal environments may
share their times: the name under which a processor is sold is no part of it, its features are.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType

from soapstone.system import processor_identity

VARIABLE = "SOAPSTONE_CACHE"


class CacheWarning(UserWarning):
    """A cache cannot be used as it should; the message names file and cause."""


# Variables that change what libraries compile or run, and of these the ones that do not.
_SETTINGS = ("NUMBA_", "ONEDNN_", "DNNL_", "SOAPSTONE_CHECKED")
_NO_SETTINGS = ("CACHE", "DEBUG", "VERBOSE", "NUM_THREADS", "WARNINGS", "DISABLE_PERFORMANCE")
# What Linux calls features of x86-64 that LLVM calls otherwise, of those that are asked for.
_FLAGS = {
    "bmi": "bmi1",
    "lzcnt": "abm",
    "avx512bf16": "avx512_bf16",
    "avx512vnni": "avx512_vnni",
    "avx512vp2intersect": "avx512_vp2intersect",
}


def folder() -> Path:
    """Return the folder of all caches: SOAPSTONE_CACHE, or soapstone's in the user's cache."""
    named = os.environ.get(VARIABLE)
    if named:
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "soapstone"


@cache
def environment() -> Mapping[str, str]:
    """Return this process's environment: processor, its features, cores, versions, settings."""
    processor = _processor()
    found = {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": processor["name"],
        "features": processor["features"],
        "cores": str(os.cpu_count() or 1),
        **_versions_used(),
        "llvm": processor["llvm"],
        **settings(),
    }
    return MappingProxyType(found)


def settings() -> dict[str, str]:
    """Return the variables that change what libraries compile or run."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(_SETTINGS) and not any(word in name for word in _NO_SETTINGS)
    }


def identity() -> Mapping[str, str]:
    """Return what the environment follows from: no LLVM is imported for it, where the system tells
    what the processor is.
    """
    processor = processor_identity()
    if not processor:
        return environment()
    cores = str(os.cpu_count() or 1)
    return {"processor": processor, "cores": cores, **_versions_used(), **settings()}


@cache
def features() -> frozenset[str]:
    """Return the processor's features, under LLVM's names: all, or those that are asked for."""
    told = processor_identity().partition("flags")[2].partition("\n")[0]
    flags = told.partition(":")[2].split()
    if not flags:
        return frozenset(environment()["features"].split())
    return frozenset({*flags, *(name for name, flag in _FLAGS.items() if flag in flags)})


def _versions_used() -> dict[str, str]:
    return {
        "python": f"{sys.implementation.name} {sys.version_info[0]}.{sys.version_info[1]}",
        **{name: installed(name) for name in ("soapstone", "numpy", "numba", "llvmlite")},
    }


def _processor() -> dict[str, str]:
    """Return the processor as LLVM sees it, and LLVM's version."""
    from soapstone.cache.answers import Answers

    identity = processor_identity()
    kept = Answers("processor", lambda: digest(identity, installed("llvmlite")), __file__)
    found: dict[str, str] = kept.answer("processor", _seen, keep=lambda: bool(identity))
    kept.save()
    return found


def _seen() -> dict[str, str]:
    from llvmlite import binding

    features = binding.get_host_cpu_features()
    return {
        "name": binding.get_host_cpu_name(),
        "features": " ".join(sorted(name for name, has in features.items() if has)),
        "llvm": ".".join(str(part) for part in binding.llvm_version_info),
    }


def installed(package: str) -> str:
    """Return the version of an installed package, or "none"."""
    found = _versions().get(package.replace("-", "_").lower())
    if found is not None:
        return found
    from importlib.metadata import PackageNotFoundError, version  # which imports much

    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


@cache
def _versions() -> Mapping[str, str | None]:
    """Return the versions of packages by the folders that installers write beside them.

    Where a package has two in one place, it is left to `importlib.metadata` which one counts.
    """
    found: dict[str, str | None] = {}
    for place in sys.path:
        here: dict[str, str | None] = {}
        with contextlib.suppress(OSError):
            for name in os.listdir(place or os.curdir):
                if name.endswith(".dist-info"):
                    package, _, version = name.removesuffix(".dist-info").rpartition("-")
                    package = package.replace("-", "_").lower()
                    here[package] = version if package not in here else None
        found = {**here, **found}
    return found


def digest(*parts: str) -> str:
    """Return the hash of some texts, by which keys and folders are named."""
    return hashlib.sha256("\n".join(parts).encode("utf-8", "surrogatepass")).hexdigest()[:32]


def key(of: Mapping[str, str]) -> str:
    """Return the key of an environment."""
    return digest(json.dumps(dict(of), sort_keys=True))
