"""Count references only in code that allocates memory.

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
from llvmlite.ir.instructions import Comment
from numba.core.codegen import CodeLibrary
from numba.core.imputils import user_function
from numba.core.runtime import rtsys
from numba.core.runtime.context import NRTContext

_MAKES_NONE = ("NRT_incref", "NRT_decref", "NRT_Free")  # the last of what describes an exception


def refers(target: Any, kind: Any) -> bool:
    """Return whether values of a Numba type refer to memory that can be counted."""
    return bool(target.data_model_manager[kind].contains_nrt_meminfo())


def allocates(module: ir.Module) -> bool:
    """Return whether a function that Numba has lowered makes memory that is counted."""
    return any(name.startswith("NRT_") and name not in _MAKES_NONE for name in _calls(module))


def any_allocates(libraries: Iterable[CodeLibrary]) -> bool:
    """Return whether some of Numba's own functions, which stand in libraries, make such memory."""
    return any("@NRT_MemInfo_" in str(library._final_module) for library in libraries if library is not rtsys.library)


class NotedCounting(NRTContext):  # type: ignore[misc]  # Numba has no types
    """Notes where a part counts references, as only what it turned out to call tells whether it does.

    Nearly all parts do not, and the fields that counting takes out of arguments would be a third of what is lowered.
    """

    def __init__(self, context: Any, library: CodeLibrary) -> None:
        super().__init__(context, enabled=True)
        self._library = library
        self._notes: dict[str, tuple[Any, Any, str]] = {}

    def count(self, module: ir.Module) -> None:
        """Count in a function that Numba has lowered, where that was noted."""
        for block in (block for function in module.functions for block in function.blocks):
            for note in [instruction for instruction in block.instructions if isinstance(instruction, Comment)]:
                if note.text in self._notes:
                    builder = ir.IRBuilder(block)
                    builder.position_before(note)
                    super()._call_incref_decref(builder, *self._notes[note.text])

    def _call_incref_decref(self, builder: ir.IRBuilder, kind: Any, value: Any, name: str) -> None:
        """Note the call, or make it for a function of Numba's own that is compiled on the way."""
        if self._context.active_code_library is not self._library:
            super()._call_incref_decref(builder, kind, value, name)
        elif refers(self._context, kind):
            note = f"{name} {len(self._notes)}"
            self._notes[note] = kind, value, name
            builder.comment(note)


def call_that_counts(described: Any, library: CodeLibrary) -> Any:
    """Make the call of a function that lends what it returns, for callers that count."""
    call = user_function(described, [library])

    def call_and_count(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        returned = call(context, builder, signature, values)
        context.nrt.incref(builder, signature.return_type, returned)
        return returned

    call_and_count.signature, call_and_count.libs = call.signature, call.libs  # type: ignore[attr-defined]
    return call_and_count


def _calls(module: ir.Module) -> Iterator[str]:
    """Find the names of the functions that are called."""
    for function in module.functions:
        for block in function.blocks:
            for instruction in block.instructions:
                if isinstance(instruction, ir.CallInstr) and isinstance(instruction.callee, ir.Function):
                    yield instruction.callee.name
