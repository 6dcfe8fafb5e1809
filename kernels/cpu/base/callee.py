"""Let kernels call a kernel that is compiled by itself.

The call of a whole layer runs matrix products and attention, which are kernels of their own too, each several times
longer than the code between them. As parts they would be optimised, and kept on disk, again in every layer's kernel. So
a kernel calls another one at its address, which costs nothing beside what it computes.

Invariants
----------
* Object code calls a kernel by a name, made of the kernel and of the types of its arguments, which is the same in every
  process. The name is defined before such code is linked: when it is compiled, and when it is loaded from Numba's
  cache, which first compiles or loads the kernels that it calls.
* Compiled code calls the same machine code as Python does, so the bits are the same.

A kernel that is chosen only as the call is made is called at an address among the caller's numbers (`call_at`).
"""

from collections.abc import Callable
from copy import copy
from functools import partial
from importlib import import_module
from typing import Any

import llvmlite.binding
from numba.core import cgutils, types
from numba.core.codegen import JITCodeLibrary
from numba.core.funcdesc import default_mangler, qualifying_prefix
from numba.core.registry import CPUDispatcher
from numba.core.sigutils import normalize_signature
from numba.extending import intrinsic

from samebit.kernels.cpu.base.part import OPTIONS, without_values

_callees: dict[tuple[str, str], "Callee"] = {}


class Callee(CPUDispatcher):  # type: ignore[misc]  # Numba has no types
    """Lets compiled code call a kernel."""

    def __init__(self, kernel: CPUDispatcher) -> None:
        super().__init__(kernel.py_func, targetoptions=OPTIONS)
        self._kernel = kernel
        _callees[_place(kernel.py_func)] = self

    def compile(self, sig: Any) -> Any:
        """Compile or load the kernel, name its address, and tell callers of it, under a key of their own."""
        args, _ = normalize_signature(sig)
        if args not in self.overloads:
            self._kernel.compile(args)
            compiled = self._kernel.overloads[args]
            described = copy(compiled.fndesc)
            described.mangled_name = "callee." + default_mangler(qualifying_prefix(*_place(self.py_func)), args)
            llvmlite.binding.add_symbol(described.mangled_name, _address(compiled))
            on_loading = partial(_name, *_place(self.py_func), args)
            library = _Named(self.targetctx.codegen(), described.mangled_name, on_loading)
            named = compiled._replace(entry_point=object(), fndesc=described, library=library)
            self.targetctx.insert_user_function(named.entry_point, described, [library])
            self.overloads[args] = named
        return self.overloads[args].entry_point

    def get_call_template(self, args: tuple[Any, ...], kws: dict[str, Any]) -> Any:
        """Type a call as that of a part."""
        return super().get_call_template(*without_values(args, kws))


class _Named(JITCodeLibrary):  # type: ignore[misc]
    """Stands where a part's library does: it brings nothing to link, but has callers name the address as they load."""

    def __init__(self, codegen: Any, name: str, on_loading: Callable[[], None]) -> None:
        super().__init__(codegen, name)
        self._reload_init.add(on_loading)
        self._finalized = True

    def _get_module_for_linking(self) -> Any:
        return self._final_module


def address_of(kernel: CPUDispatcher, args: tuple[types.Type, ...]) -> int:
    """Return where a kernel for arguments of these types is, compiled or loaded before; it stays there."""
    if args not in kernel.overloads:
        kernel.compile(args)
    return _address(kernel.overloads[args])


@intrinsic
def call_at(typingctx: Any, address: Any, arguments: Any) -> Any:
    """Call the kernel at an `address_of` these arguments, a tuple; what it raises, the caller raises."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        convention = context.call_conv
        kernel = convention.get_function_type(types.none, arguments.types).as_pointer()
        values = cgutils.unpack_tuple(builder, args[1])
        callee = builder.inttoptr(args[0], kernel)
        status, _ = convention.call_function(builder, callee, types.none, arguments.types, values)
        with cgutils.if_unlikely(builder, status.is_error):
            convention.return_status_propagate(builder, status)
        return context.get_dummy_value()

    return types.void(types.int64, arguments), generate


def _address(compiled: Any) -> int:
    address: int = compiled.library.get_pointer_to_function(compiled.fndesc.llvm_func_name)
    return address


def _place(function: Callable[..., Any]) -> tuple[str, str]:
    return function.__module__, function.__qualname__


def _name(module: str, function: str, args: tuple[types.Type, ...]) -> None:
    """Name the address of a kernel for arguments of these types."""
    import_module(module)
    _callees[module, function].compile(args)
