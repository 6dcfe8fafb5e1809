"""Tell compiled code which team its thread computes with, by a function that returns a thread-local address.

Numba can not compile thread-local variables. A key of pthreads is known to one process alone, while object code is
cached for others. So compiled code calls a function by its name, `NAME`, and each process defines that function.
"""

import ctypes
from functools import cache
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir

NAME = "samebit_team"
"""Names the function: it takes no arguments and returns the address of the calling thread's team, 0 for none."""

TYPE = ir.FunctionType(ir.IntType(64), [])


def set_team(address: int) -> None:
    """Make this the team of the calling thread, 0 for none."""
    libc, key, _ = _place()
    libc.pthread_setspecific(key, ctypes.c_void_p(address))


def name_function() -> None:
    """Define the function, before object code that calls it is loaded."""
    _place()


@cache
def _place() -> tuple[ctypes.CDLL, ctypes.c_uint, Any]:
    """Define the function; return libc, the key of the thread-local address, and what owns the function's code."""
    libc, key = ctypes.CDLL(None), ctypes.c_uint()
    if libc.pthread_key_create(ctypes.byref(key), None) != 0:
        raise MemoryError("no thread-local place is left for a team of threads (pthread_key_create)")
    module = ir.Module(NAME)
    builder = ir.IRBuilder(ir.Function(module, TYPE, NAME).append_basic_block())
    getter = ir.FunctionType(ir.IntType(64), [ir.IntType(32)]).as_pointer()
    address = ctypes.cast(libc.pthread_getspecific, ctypes.c_void_p).value
    get = builder.inttoptr(ir.Constant(ir.IntType(64), address), getter)
    builder.ret(builder.call(get, [ir.Constant(ir.IntType(32), key.value)]))
    machine = llvm.Target.from_default_triple().create_target_machine()
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(str(module)), machine)
    engine.finalize_object()
    llvm.add_symbol(NAME, engine.get_function_address(NAME))
    return libc, key, engine
