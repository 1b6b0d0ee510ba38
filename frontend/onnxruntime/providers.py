"""The providers of ONNX Runtime that there are here, and those that a session is given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from soapstone.errors import warn
from soapstone.frontend.onnxruntime.errors import InvalidArgument

CPU, GPU = "CPUExecutionProvider", "CUDAExecutionProvider"
Provider = str | tuple[str, Mapping[str, Any]]


def get_available_providers() -> list[str]:
    """Return the providers of sessions here: a GPU's where there is one, and the CPU's."""
    from soapstone.runtime import Machine

    try:
        Machine.local(gpus=1)
    except Exception:  # no driver, no package for it, or no such GPU
        return [CPU]
    return [GPU, CPU]


def get_device() -> str:
    """Return "GPU" where sessions may use one, else "CPU"."""
    return "GPU" if GPU in get_available_providers() else "CPU"


def chosen_providers(
    providers: Sequence[Provider] | None, provider_options: Sequence[Mapping[str, Any]] | None
) -> dict[str, Mapping[str, Any]]:
    """Return the providers of a session, of which the first runs it, and their options."""
    if isinstance(providers, str) or not isinstance(providers, Sequence | None):
        raise InvalidArgument(f"providers: {providers!r} found, a list of names needed")
    options = list(provider_options or [{}] * len(providers or ()))
    if len(options) != len(providers or ()):
        raise InvalidArgument(
            f"provider_options: {len(options)} found, {len(providers or ())} needed, as providers"
        )
    available = [CPU] if providers is None else get_available_providers()
    chosen: dict[str, Mapping[str, Any]] = {}
    for provider, of in zip(providers or (), options):
        pair = provider if isinstance(provider, tuple) else (provider, of)
        if len(pair) != 2 or not isinstance(pair[0], str):
            raise InvalidArgument(f"providers: {provider!r} found, a name or a pair needed")
        name, given = pair
        if name not in available:
            have = ", ".join(available)
            warn(f"provider {name!r} is not available; {have} are")
        elif name not in chosen:
            chosen[name] = given
            vain = [str(key) for key in given if (name, key) != (CPU, "precision")]
            if vain:
                warn(f"options of {name} change nothing: {', '.join(vain)}")
    chosen.setdefault(CPU, {})
    return chosen
