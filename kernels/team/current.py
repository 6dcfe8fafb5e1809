"""Tell compiled code which team its thread computes with: a thread-local address, behind a name that object code bears.

Numba can not compile thread-local variables, and a key of pthreads is known to this process alone, while object code is
kept for others too. So a function of this process returns the address, and has the same name in all.
"""

import ctypes
from functools import cache
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir

NAME = "samebit_team"
"""The function: of no arguments, returns the address of the calling thread's team, 0 for none."""

TYPE = ir.FunctionType(ir.IntType(64), [])


def set_team(address: int) -> None:
    """Make this the team of the calling thread, 0 for none."""
    libc, key, _ = _place()
    libc.pthread_setspecific(key, ctypes.c_void_p(address))


def name_function() -> None:
    """Make the function known, before object code that bears its name is loaded."""
    _place()


@cache
def _place() -> tuple[ctypes.CDLL, ctypes.c_uint, Any]:
    """Return libc, the key under which each thread keeps the address, and what holds the function."""
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
