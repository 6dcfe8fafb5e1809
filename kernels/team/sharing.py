"""Share out the items of a kernel's call among the threads of a team, in compiled code.

The items of a call are cut into one range a thread. A thread takes the items of its own range from the first on, which
are neighbours in memory, and then steals the last ones of other ranges. So the others compute what a late thread has
not begun, and the caller waits only for items that have been begun. (OpenMP waits for each thread of a team, also for
one that has no work or has not woken up yet.)

Invariants
----------
* An item is taken by a compare-and-exchange of its range's word, so exactly one thread takes it.
* The caller returns when all items are computed. So a call lasts as long as a thread holds an item of it, and what a
  thread reads of a call after it has taken an item belongs to that call.
* A late thread finds ranges that are empty, or those of the next call, in which it may take part.
* An item shares out no work itself.

A team is an array of 64-bit words; words that different threads write lie `LINE` bytes apart. For Linux on x86-64.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from llvmlite import ir
from numba import cfunc, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

LINE = 128
"""Bytes between what different threads write: two cache lines, as processors fetch them in pairs."""

SHARE, SIZE = 0, 8
CALLS, SLEEPING, FUNCTION, RANGES = LINE, 2 * LINE, 3 * LINE, 4 * LINE
DATA, THREADS, ENDED = FUNCTION + 8, FUNCTION + 16, FUNCTION + 24
"""Offsets into a team's memory, in bytes. SHARE: the address of `_share`. SIZE: the count of threads. CALLS: the count
of calls, which idle threads watch. SLEEPING: how many threads sleep. FUNCTION, DATA: the call's function of an item,
and its data. THREADS: the most threads that the call may have. ENDED: whether the team has ended. RANGES: a line a
thread, its range of items and how many items of the call it has computed."""

SPINS = 4000
"""How often a thread that waits looks before it sleeps: for as long as the gaps within a step last (see `openmp`)."""

_COMPUTED = 8
_HALF = 32
_FIRST = (1 << _HALF) - 1
_FUTEX, _WAIT, _WAKE = 202, 128, 129  # of this process alone
_MANY = 1 << 30

_I64, _BYTES = ir.IntType(64), ir.IntType(8).as_pointer()
_NOTHING = ir.FunctionType(ir.VoidType(), [])
ITEM = ir.FunctionType(ir.VoidType(), [_BYTES.as_pointer(), _I64.as_pointer(), _I64.as_pointer(), _BYTES])
"""The type of a function that computes an item: its number as an address, two that are not read, and the data."""


_system_call = types.ExternalFunction("syscall", types.int64(*(types.int64,) * 7))
_yield_processor = types.ExternalFunction("sched_yield", types.int32())


def _word(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, _I64.as_pointer())


@intrinsic
def _load(typingctx: Any, address: Any) -> Any:
    """Read a word atomically; what its writer had written before it is visible then."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(_word(builder, args[0]), "seq_cst", 8)

    return types.int64(types.int64), generate


@intrinsic
def _store(typingctx: Any, address: Any, value: Any) -> Any:
    """Write a word atomically, after all that was written before."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store_atomic(args[1], _word(builder, args[0]), "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def _add(typingctx: Any, address: Any, number: Any) -> Any:
    """Add to a word atomically."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.atomic_rmw("add", _word(builder, args[0]), args[1], "seq_cst")
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def _exchange(typingctx: Any, address: Any, seen: Any, new: Any) -> Any:
    """Write ``new`` to a word if it still is ``seen`` (compare and exchange); tell whether it was."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        done = builder.cmpxchg(_word(builder, args[0]), args[1], args[2], "seq_cst")
        return builder.extract_value(done, 1)

    return types.boolean(types.int64, types.int64, types.int64), generate


@intrinsic
def _pause(typingctx: Any) -> Any:
    """Tell the processor that this is a loop that waits."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pause = cgutils.get_or_insert_function(builder.module, _NOTHING, "llvm.x86.sse2.pause")
        builder.call(pause, [])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def _compute(typingctx: Any, function: Any, item: Any, data: Any) -> Any:
    """Call a function for an item as Numba's ``parallel_for`` does: the item's number is passed as an address."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        function, item, data = args
        with builder.goto_entry_block():
            base = builder.alloca(_BYTES)
        builder.store(builder.inttoptr(item, _BYTES), base)
        nothing = ir.Constant(_I64.as_pointer(), None)
        call = builder.inttoptr(function, ITEM.as_pointer())
        builder.call(call, [base, nothing, nothing, builder.inttoptr(data, _BYTES)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


_part: Callable[[Callable[..., Any]], Any] = njit


@_part
def _take_first(at: int) -> Any:
    """Take the first item of the range at an address; -1 for none."""
    while True:
        seen = _load(at)
        first, end = seen & _FIRST, seen >> _HALF
        if first >= end:
            return -1
        if _exchange(at, seen, seen + 1):
            return first


@_part
def _take_last(at: int) -> Any:
    """Take the last item of the range at an address; -1 for none."""
    while True:
        seen = _load(at)
        first, end = seen & _FIRST, seen >> _HALF
        if first >= end:
            return -1
        if _exchange(at, seen, seen - (1 << _HALF)):
            return end - 1


@_part
def _take_part(team: int, me: int) -> None:
    """Compute items of the current call until none is left to take."""
    threads = _load(team + THREADS)
    if me >= threads:
        return
    for turn in range(threads):
        at = team + RANGES + LINE * ((me + turn) % threads)
        item = _take_first(at) if turn == 0 else _take_last(at)
        while item >= 0:
            _compute(_load(team + FUNCTION), item, _load(team + DATA))
            _add(team + RANGES + LINE * me + _COMPUTED, 1)
            item = _take_first(at) if turn == 0 else _take_last(at)


@_part
def _computed(team: int) -> Any:
    """Return how many items of the call are computed."""
    total = 0
    for thread in range(_load(team + SIZE)):
        total += _load(team + RANGES + LINE * thread + _COMPUTED)
    return total


@_part
def _call(team: int) -> None:
    """Announce a call, and wake the threads that sleep."""
    _add(team + CALLS, 1)
    if _load(team + SLEEPING) > 0:
        _system_call(_FUTEX, team + CALLS, _WAKE, _MANY, 0, 0, 0)


def _share(team: int, function: int, data: int, items: int, threads: int) -> None:
    """Have the first ``threads`` threads of a team, the caller's among them, call a function for each item number."""
    _store(team + FUNCTION, function)
    _store(team + DATA, data)
    _store(team + THREADS, threads)
    for thread in range(_load(team + SIZE)):
        _store(team + RANGES + LINE * thread + _COMPUTED, 0)
    for thread in range(threads):
        first, end = items * thread // threads, items * (thread + 1) // threads
        _store(team + RANGES + LINE * thread, end << _HALF | first)
    _call(team)
    _take_part(team, 0)
    looked = 0
    while _computed(team) < items:
        looked += 1
        if looked < SPINS:
            _pause()
        else:
            _yield_processor()


def _serve(team: int, me: int) -> None:
    """Take part in each call, as thread ``me`` of a team, until the team ends."""
    seen = 0
    while _load(team + ENDED) == 0:
        looked = 0
        while _load(team + CALLS) == seen:
            looked += 1
            if looked < SPINS:
                _pause()
            else:
                _add(team + SLEEPING, 1)
                _system_call(_FUTEX, team + CALLS, _WAIT, seen, 0, 0, 0)
                _add(team + SLEEPING, -1)
        seen = _load(team + CALLS)
        _take_part(team, me)


def _end(team: int) -> None:
    """Have the other threads of a team return from `_serve`."""
    _store(team + ENDED, 1)
    _call(team)


@dataclass(frozen=True)
class Functions:
    """Holds the address of `_share`, which compiled code calls, and the others for Python: they release the GIL."""

    share: int
    serve: Callable[[int, int], None]
    end: Callable[[int], None]


@cache
def functions() -> Functions:
    """Compile the functions, or load them from Numba's cache."""
    share, serve, end = (
        cfunc(types.void(*(types.int64,) * count), cache=True)(function)
        for function, count in ((_share, 5), (_serve, 2), (_end, 1))
    )
    return Functions(share.address, serve.ctypes, end.ctypes)
