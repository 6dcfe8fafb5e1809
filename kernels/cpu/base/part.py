"""Compile the functions that kernels call.

Numba optimises every function that it compiles, with all that it calls, and makes machine code of it. A kernel is a
chain of calls, so the last function would be optimised once for each link: attention three times. Numba's own inlining
copies a function's statements to each call, and infers their types and lowers them again there. A part is typed and
lowered to LLVM IR once; its calls are inlined there, and the kernel optimises the whole once.

Invariants
----------
* A part has no machine code of its own. Only compiled code calls it; a call from Python raises TypeError.
* An inlined part stands in place of its calls before LLVM looks at the loops around them.
* A kernel's object code shows other kernels nothing that it was made of. Numba names a function by its module, its
  name, the types of its arguments and a count of the process: two closures of one maker, compiled into kernels by two
  processes, can be of one name, and a process that loads both kernels from the cache would run one body for both.
"""

from collections.abc import Callable
from typing import Any, NoReturn

from llvmlite.binding import Linkage, create_new_module_pass_manager
from numba.core import types
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler
from numba.core.registry import CPUDispatcher

from samebit.kernels.cpu.base.references import NotedCounting, allocates, any_allocates, call_that_counts, refers

OPTIONS = {"nopython": True, "nogil": True, "error_model": "numpy"}


class KernelLibrary(JITCodeLibrary):  # type: ignore[misc]  # Numba has no types
    """Holds a kernel."""

    def add_llvm_module(self, module: Any) -> None:
        """Put the inlined parts in place of their calls, then go on as Numba does."""
        module.data_layout = self._codegen._data_layout
        for library in dict.fromkeys(self._linking_libraries):
            if isinstance(library, _InlinedLibrary):
                module.link_in(library._get_module_for_linking(), preserve=True)
        passes = create_new_module_pass_manager()
        passes.add_always_inliner_pass()
        passes.run(module, self._codegen._pass_builder())
        super().add_llvm_module(module)

    def _optimize_final_module(self) -> None:
        """Do as Numba does, then hide what was linked in (before, LLVM would inline more, and take longer)."""
        super()._optimize_final_module()
        for function in self._final_module.functions:
            if not function.is_declaration and function.linkage == Linkage.linkonce_odr:
                function.linkage = Linkage.internal


class _PartLibrary(KernelLibrary):
    """Holds a part for kernels to link in.

    Attributes:
        owns: whether it owns memory, and so counts references (see `references`).
        gives: whether it owns what it returns.
        counting: where it counts references, if it does.
    """

    owns = gives = False
    counting: NotedCounting

    def add_ir_module(self, module: Any) -> None:
        """Let a part that owns memory count references, then go on as Numba does."""
        parts = [library for library in self._linking_libraries if isinstance(library, _PartLibrary)]
        others = [library for library in self._linking_libraries if not isinstance(library, _PartLibrary)]
        self.owns = allocates(module) or any(part.gives for part in parts) or any_allocates(others)
        if self.owns:
            self.counting.count(module)
        super().add_ir_module(module)

    def _optimize_final_module(self) -> None:
        """Leave it to the kernel."""

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._finalized = True


class _InlinedLibrary(_PartLibrary):
    """Holds a part that is put in place of its calls."""

    def _optimize_functions(self, module: Any) -> None:
        """Leave it to the callers."""


class KernelCompiler(Compiler):  # type: ignore[misc]
    """Compiles a kernel, which inlines its parts.

    Python calls it, and compiled code does: as a function of C, which nobody calls, Numba would optimise it once more.
    """

    def __init__(self, typing: Any, target: Any, library: Any, args: Any, result: Any, flags: Any, names: Any) -> None:
        flags.no_cfunc_wrapper = True
        library = KernelLibrary(target.codegen(), "kernel")
        library.enable_object_caching()
        super().__init__(typing, target, library, args, result, flags, names)


class _PartCompiler(Compiler):  # type: ignore[misc]
    """Ends before machine code is made."""

    def __init__(self, typing: Any, target: Any, library: Any, args: Any, result: Any, flags: Any, names: Any) -> None:
        library = (_InlinedLibrary if flags.forceinline else _PartLibrary)(target.codegen(), "part")
        flags.no_compile = flags.no_cpython_wrapper = flags.no_cfunc_wrapper = True
        super().__init__(typing, target, library, args, result, flags, names)
        self.state.targetctx.nrt = library.counting = NotedCounting(self.state.targetctx, library)


class _Part(CPUDispatcher):  # type: ignore[misc]
    """Compiles a function that compiled code alone calls."""

    def __init__(self, function: Callable[..., Any], *, inlined: bool) -> None:
        super().__init__(function, targetoptions={**OPTIONS, "forceinline": inlined}, pipeline_class=_PartCompiler)

    def add_overload(self, result: Any) -> None:
        """Tell callers where the part is: under a key of its own, as there is no address."""
        result = result._replace(entry_point=object())
        self.overloads[tuple(result.signature.args)] = result
        returns_memory = refers(self.targetctx, result.signature.return_type)
        result.library.gives = returns_memory and result.library.owns
        if returns_memory and not result.library.owns:
            call = call_that_counts(result.fndesc, result.library)
            self.targetctx.insert_func_defn([(call, result.entry_point, call.signature)])
        else:
            self.targetctx.insert_user_function(result.entry_point, result.fndesc, [result.library])

    def get_call_template(self, args: tuple[Any, ...], kws: dict[str, Any]) -> Any:
        """Type a call without the values of its constants.

        Inference takes a variable that begins as a constant for that constant first, and would have the part, and all
        that it calls, compiled for it in vain.
        """
        return super().get_call_template(*without_values(args, kws))

    def _compile_for_args(self, *args: Any, **kws: Any) -> NoReturn:
        raise TypeError(f"{self.py_func.__qualname__} is a part of kernels, which compiled code alone calls")


def without_values(args: tuple[Any, ...], kws: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the types of a call's arguments, those of constants without their values."""
    return tuple(map(types.unliteral, args)), {name: types.unliteral(kind) for name, kind in kws.items()}


def kernel_part(function: Callable[..., Any]) -> Any:
    """Compile a function for kernels, at their first call of it for a signature."""
    return _Part(function, inlined=False)


def inlined_part(function: Callable[..., Any]) -> Any:
    """Do as `kernel_part` for what stands in loops, or is small: it is put in place of each call."""
    return _Part(function, inlined=True)
