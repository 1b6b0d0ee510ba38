"""Compiled functions that only other compiled functions call: parts of these, and nothing alone.

Numba optimises every function and makes machine code of it, and then again as a part of whatever
calls it, and of what calls that. A part is typed and lowered once, and optimised where it is
needed: in the function that Python, or a native program, calls.

A part has no environment, which exceptions with arguments that are not constant would need.
"""

from __future__ import annotations

from typing import Any

from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler


class LinkedLibrary(JITCodeLibrary):  # type: ignore[misc, unused-ignore]
    """The code of a function as other libraries link it."""

    def _optimize_final_module(self) -> None:
        """Leave that to whom it is linked into."""

    def _finalize_final_module(self) -> None:
        """Be complete, without a place in memory."""
        self._finalize_dynamic_globals()
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        """Return 0: there is no machine code of it."""
        self._ensure_finalized()
        return 0

    @property
    def codegen(self) -> Any:
        """Itself, where an environment is to be set."""
        return self

    def set_env(self, name: str, environment: Any) -> None:
        """Do nothing: where there is no machine code, there is nothing to point there."""


class LinkedCompiler(Compiler):  # type: ignore[misc, unused-ignore]
    """Numba's compiler, into a `LinkedLibrary`."""

    def compile_extra(self, func: Any) -> Any:
        """Return what is compiled of a function."""
        if self.state.library is None:
            codegen = self.state.targetctx.codegen()
            self.state.library = LinkedLibrary(codegen, func.__qualname__)
        return super().compile_extra(func)
