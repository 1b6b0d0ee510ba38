"""What a graph is built for, where that decides how nodes are built.

`run`: for inputs of these shapes. `lasting`: to be extended to other shapes; constants as long as
the inputs, such as masks, are then made by operators, and are no weights. `decoding`: to be a step
whose past lies in buffers; caches of a window's tokens then keep all, which a mask hides.
"""

from __future__ import annotations

from typing import Literal

Purpose = Literal["run", "lasting", "decoding"]
