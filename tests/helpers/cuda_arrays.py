"""Arrays of the host as kernels of GPUs take them: in Numba's simulator, or copied to a device."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import config, cuda

from soapstone.ir.tensor import Array
from soapstone.native.memory import address


class There:
    """An array of the host, with all the memory that it is a view of, where kernels see it.

    Attributes:
        array: what a call takes. In the simulator it is the host's memory itself.
    """

    def __init__(self, host: Array) -> None:
        self.array: Any
        self._store = host
        while isinstance(self._store.base, np.ndarray):
            self._store = self._store.base
        if config.ENABLE_CUDASIM:
            from numba.cuda.simulator.cudadrv.devicearray import FakeCUDAArray

            self.array = FakeCUDAArray(host)
        elif not host.size:
            self.array = cuda.device_array(host.shape, host.dtype)
        else:
            self._held = cuda.to_device(self._store.reshape(-1).view(np.uint8))
            first = self._held.__cuda_array_interface__["data"][0]
            away = int(address(host)) - int(address(self._store))
            described = {
                "shape": host.shape,
                "strides": host.strides,
                "typestr": host.dtype.str,
                "data": (first + away, False),
                "version": 3,
            }
            self.array = cuda.from_cuda_array_interface(described, owner=self._held)
            self.array.dtype = host.dtype  # of those that NumPy lacks only the size is described

    def back(self) -> None:
        """Copy all the memory back, once what is enqueued has ended."""
        if not config.ENABLE_CUDASIM and self.array.size:
            flat = self._held.copy_to_host()
            self._store.reshape(-1).view(np.uint8)[...] = flat
