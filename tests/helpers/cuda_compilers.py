"""Whether CUDA kernels can be compiled here."""

from __future__ import annotations


def compilers(*more: str) -> bool:
    """Return whether NVIDIA's compilers are there, which the extra asks for. more: libraries."""
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib

        for name in ("nvrtc", "nvvm", *more):
            load_nvidia_dynamic_lib(name)
    except Exception:  # no module, or no library, whose error is a class of that module
        return False
    return True
