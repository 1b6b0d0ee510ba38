"""Models of PyTorch: recursive ones recorded and batched, and graphs compiled for inference."""

try:
    import torch as torch
except ImportError as error:
    raise ImportError(
        "soapstone.torch: no torch found, needed: pip install 'soapstone[torch]'"
    ) from error
