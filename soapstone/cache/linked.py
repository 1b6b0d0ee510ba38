"""Compiled functions that only other compiled functions call: parts of these, and nothing alone.

Numba optimises every function and makes machine code of it, and then again as a part of whatever
calls it, and of what calls that. A part is typed and lowered once, and optimised where it is
needed: in the function that Python, or a native program, calls.

A part has no environment, which exceptions with arguments that are not constant would need.
"""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType
from typing import Any

from llvmlite import ir
from numba.core import sigutils, typed_passes, untyped_passes
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler, Flags, compile_extra
from numba.core.compiler_lock import global_compiler_lock
from numba.core.compiler_machinery import PassManager
from numba.core.registry import cpu_target

from soapstone.garbage_collection import paused

_PASSES = (
    *(untyped_passes.TranslateByteCode, untyped_passes.FixupArgs, untyped_passes.IRProcessing),
    *(untyped_passes.GenericRewrites, untyped_passes.DeadBranchPrune),
    *(untyped_passes.ReconstructSSA, typed_passes.NopythonTypeInference),
    *(typed_passes.PreLowerStripPhis, typed_passes.NoPythonSupportedFeatureValidation),
    *(typed_passes.IRLegalization, typed_passes.NativeLowering, typed_passes.NoPythonBackend),
)
_LITERAL = frozenset(("literally", "literal_unroll"))  # of Numba's


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


class QuietCompiler(Compiler):  # type: ignore[misc, unused-ignore]
    """Numba's compiler, without collections: what it leaves behind is let go of later, at once."""

    def compile_extra(self, func: Any) -> Any:
        """Return what is compiled of a function."""
        with paused():
            return super().compile_extra(func)


class LinkedCompiler(QuietCompiler):
    """Numba's compiler, into a `LinkedLibrary`."""

    def define_pipelines(self) -> list[Any]:
        """Return the passes that kernels need, or all of Numba's for one that may need others.

        After most of its passes Numba looks at the whole function again. The code is the same: what
        is left out is for functions inside of functions, `with`, literal arguments, whole arrays.
        """
        code = self.state.func_id.code
        inner = any(isinstance(each, CodeType) for each in code.co_consts)
        if inner or not _LITERAL.isdisjoint(code.co_names):
            found: list[Any] = super().define_pipelines()
            return found
        few = PassManager("kernel")
        for each in _PASSES:
            few.add_pass(each, each.__name__)
        few.finalize()
        return [few]

    def compile_extra(self, func: Any) -> Any:
        """Return what is compiled of a function."""
        if self.state.library is None:
            codegen = self.state.targetctx.codegen()
            self.state.library = LinkedLibrary(codegen, func.__qualname__)
        return super().compile_extra(func)


def object_code(function: Callable[..., Any], signature: str, name: str) -> bytes:
    """Return the object file of a function of C, and of all that it calls but the system's.

    It has one symbol that others see, `name`: none of what is linked into one object file is taken
    for what is in another. A status that Numba's code returns for a raised error is not looked at.

    Raises:
        TypeError: it calls functions that only Numba's runtime has.
    """
    arguments, returned = sigutils.normalize_signature(signature)
    context, flags = cpu_target.target_context, Flags()
    cpu_target.options.parse_as_flags(flags, {"nopython": True, "error_model": "numpy"})
    flags.no_cpython_wrapper = flags.no_cfunc_wrapper = flags.no_compile = True
    with global_compiler_lock:
        made = compile_extra(
            cpu_target.typing_context,
            context,
            function,
            arguments,
            returned,
            flags,
            {},
            pipeline_class=LinkedCompiler,
        )
        module = context.create_module(name)
        kinds = [context.get_value_type(kind) for kind in arguments]
        outer = ir.Function(module, ir.FunctionType(context.get_value_type(returned), kinds), name)
        builder = ir.IRBuilder(outer.append_basic_block())
        shape = context.call_conv.get_function_type(returned, arguments)
        inner = ir.Function(module, shape, made.fndesc.llvm_func_name)
        _, answer = context.call_conv.call_function(builder, inner, returned, arguments, outer.args)
        if isinstance(outer.ftype.return_type, ir.VoidType):
            builder.ret_void()
        else:
            builder.ret(answer)
        library = made.library
        library.add_ir_module(module)
        library.finalize()
        whole = library._final_module
        for each in (*whole.functions, *whole.global_variables):
            if not each.is_declaration and each.name != name:
                each.linkage = "internal"
        JITCodeLibrary._optimize_final_module(library)
        whole.verify()
        missing = [
            each.name
            for each in (*whole.functions, *whole.global_variables)
            if each.is_declaration and each.name.startswith(("numba_", "NRT_"))
        ]
        if missing:
            raise TypeError(
                f"{function.__qualname__}: calls {', '.join(missing)} of Numba's runtime; kernels"
                " may not allocate, nor raise errors that are made when they run"
            )
        code: bytes = context.codegen()._tm.emit_object(whole)
    return code
