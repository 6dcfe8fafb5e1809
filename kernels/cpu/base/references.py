"""Count references to memory only where some is made.

Numba counts the references to an array's memory at each assignment, argument and field of a named tuple, by atomic
instructions that LLVM moves nothing across. A part of a kernel hardly ever needs that: what it is given, its caller
holds until it returns.

Invariants
----------
* A part owns memory if it allocates, or calls what gives it some. It counts as Numba does, and gives what it returns.
* Any other part borrows. It counts nothing, and what it returns is lent: to that a caller adds a reference of its own,
  which it drops in the end, unless it borrows too and counts nothing.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from llvmlite import ir
from numba.core.codegen import CodeLibrary
from numba.core.imputils import user_function
from numba.core.runtime import rtsys

_COUNTING = ("NRT_incref", "NRT_decref")
_MAKES_NONE = (*_COUNTING, "NRT_Free")  # of what describes an exception


def refers(target: Any, kind: Any) -> bool:
    """Return whether values of a Numba type refer to memory that can be counted."""
    return bool(target.data_model_manager[kind].contains_nrt_meminfo())


def allocates(module: ir.Module) -> bool:
    """Return whether a function that Numba has lowered makes memory that is counted."""
    return any(name.startswith("NRT_") and name not in _MAKES_NONE for _, _, name in _calls(module))


def any_allocates(libraries: Iterable[CodeLibrary]) -> bool:
    """Return whether some of Numba's own functions, which stand in libraries, make such memory."""
    return any("@NRT_MemInfo_" in str(library._final_module) for library in libraries if library is not rtsys.library)


def stop_counting(module: ir.Module) -> None:
    """Take all counting out of a function that Numba has lowered."""
    for instructions, instruction, name in list(_calls(module)):
        if name in _COUNTING:
            instructions.remove(instruction)


def call_that_counts(described: Any, library: CodeLibrary) -> Any:
    """Make the call of a function that lends what it returns, for callers that count."""
    call = user_function(described, [library])

    def call_and_count(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        returned = call(context, builder, signature, values)
        context.nrt.incref(builder, signature.return_type, returned)
        return returned

    call_and_count.signature, call_and_count.libs = call.signature, call.libs  # type: ignore[attr-defined]
    return call_and_count


def _calls(module: ir.Module) -> Iterator[tuple[list[ir.Instruction], ir.Instruction, str]]:
    """Find the calls of functions that have a name: the instructions of a block, the call and the name."""
    for function in module.functions:
        for block in function.blocks:
            for instruction in block.instructions:
                if isinstance(instruction, ir.CallInstr) and isinstance(instruction.callee, ir.Function):
                    yield block.instructions, instruction, instruction.callee.name
