"""Share out the items of a kernel among threads.

For a ``prange`` Numba compiles the loop's body, two wrappers and the function around them, each with everything beneath
it, and a serial kernel would come on top. Here a kernel is compiled once, without ``parallel``. It hands a function of
one item to what starts the threads: to its thread's team, if it has one (see `team`), else to ``parallel_for``, which a
``prange`` would call, with Numba's pool and settings (see `openmp`).

Invariants
----------
* One thread, or one item, is a plain loop of the caller, which wakes no pool. So small work costs no start of threads,
  and a forked child, in which OpenMP must not run, may compute it.
* A kernel with fewer items than threads starts all the same: libgomp would end the threads that it does not need, and
  start new ones for the next kernel.
* An item shares out no work itself.
"""

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.core.typing import signature
from numba.extending import intrinsic

from samebit.kernels.team import current
from samebit.kernels.team.sharing import ITEM, SHARE, SIZE

current.name_function()

_BYTES = ir.IntType(8).as_pointer()
_ADDRESS = ir.IntType(types.intp.bitwidth)
_SHARE = ir.FunctionType(ir.VoidType(), [_ADDRESS] * 5)
_PARALLEL_FOR = ir.FunctionType(ir.VoidType(), [_BYTES] * 5 + [_ADDRESS] * 3)


@intrinsic
def share_out(typing: Any, function: Any, items: Any, threads: Any, arguments: Any) -> Any:
    """Call ``function(item, *arguments)`` for each of ``items`` numbers; a thread's items are neighbours.

    Args:
        typing: Numba's.
        function: compiled, returns nothing.
        items: their number.
        threads: the most threads that take items, the caller among them.
        arguments: a tuple; what it refers to is the caller's to hold.

    Raises:
        MemoryError: an item raised; what it raised is lost.
    """
    given = (types.intp, *(types.unliteral(argument) for argument in arguments.types))
    called = function.get_call_type(typing, given, {})

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        _, items, threads, arguments = values
        compiled = function.dispatcher.get_compile_result(called)
        context.add_linking_libs([compiled.library])
        state = cgutils.pack_struct(builder, [ir.Constant(_ADDRESS, 0), arguments])
        place = cgutils.alloca_once_value(builder, state)
        item = _item_function(context, builder.module, compiled.fndesc, place.type)
        one_of_either = [builder.icmp_signed("<=", number, ir.Constant(_ADDRESS, 1)) for number in (items, threads)]
        with builder.if_else(builder.or_(*one_of_either)) as (one, several):
            with several:
                _start_threads(builder, item, items, threads, place)
            with one:
                _loop(builder, item, items, place)
        failed = builder.load(cgutils.gep_inbounds(builder, place, 0, 0))
        with cgutils.if_unlikely(builder, builder.icmp_signed("!=", failed, ir.Constant(_ADDRESS, 0))):
            context.call_conv.return_user_exc(builder, MemoryError, ("no memory for a kernel's scratch",))
        return context.get_dummy_value()

    return signature(types.void, function, types.intp, types.intp, arguments), generate


def _start_threads(builder: Any, item: Any, items: Any, threads: Any, state: Any) -> None:
    """Have the team of the thread, or the pool where it has none of that many, call ``item`` for each number."""
    find = cgutils.get_or_insert_function(builder.module, current.TYPE, current.NAME)
    team = builder.call(find, [])
    size = cgutils.alloca_once_value(builder, ir.Constant(_ADDRESS, 0))
    with builder.if_then(cgutils.is_not_null(builder, team)):
        builder.store(_word_of(builder, team, SIZE), size)
    with builder.if_else(builder.icmp_signed("<=", threads, builder.load(size)), likely=True) as (by_team, by_pool):
        with by_team:
            share = builder.inttoptr(_word_of(builder, team, SHARE), _SHARE.as_pointer())
            addresses = [builder.ptrtoint(place, _ADDRESS) for place in (item, state)]
            builder.call(share, [team, *addresses, items, threads])
        with by_pool:
            _start_pool(builder, item, items, threads, state)


def _word_of(builder: Any, team: Any, place: int) -> Any:
    return builder.load(builder.inttoptr(builder.add(team, ir.Constant(_ADDRESS, place)), _ADDRESS.as_pointer()))


def _start_pool(builder: Any, item: Any, items: Any, threads: Any, state: Any) -> None:
    """Have the pool call ``item`` for each number; the address of an item is its number."""
    start = cgutils.get_or_insert_function(builder.module, _PARALLEL_FOR, "numba_parallel_for")
    none, one = ir.Constant(_ADDRESS, 0), ir.Constant(_ADDRESS, 1)
    count = cgutils.alloca_once_value(builder, items)
    bases = cgutils.alloca_once_value(builder, ir.Constant(_BYTES, None))
    step = cgutils.alloca_once_value(builder, one)
    operands = [builder.bitcast(operand, _BYTES) for operand in (item, bases, count, step, state)]
    builder.call(start, [*operands, none, one, threads])


def _loop(builder: Any, item: Any, items: Any, state: Any) -> None:
    """Call ``item`` for each number, one after the other."""
    base = cgutils.alloca_once(builder, _BYTES)
    nothing = ir.Constant(_ADDRESS.as_pointer(), None)
    with cgutils.for_range(builder, items) as loop:
        builder.store(builder.inttoptr(loop.index, _BYTES), base)
        builder.call(item, [base, nothing, nothing, builder.bitcast(state, _BYTES)])


def _item_function(context: Any, module: Any, described: Any, place: Any) -> Any:
    """Make what ``parallel_for`` calls for an item, whose number is its first address, with the state's as its data."""
    function = ir.Function(module, ITEM, module.get_unique_name("shared_out_item"))
    function.linkage = "internal"
    builder = ir.IRBuilder(function.append_basic_block())
    bases, _, _, data = function.args
    state = builder.bitcast(data, place)
    arguments = builder.load(cgutils.gep_inbounds(builder, state, 0, 1))
    item = builder.ptrtoint(builder.load(bases), _ADDRESS)
    values = [item, *cgutils.unpack_tuple(builder, arguments)]
    callee = context.declare_function(module, described)
    status, _ = context.call_conv.call_function(builder, callee, described.restype, described.argtypes, values)
    with cgutils.if_unlikely(builder, status.is_error):
        builder.store(ir.Constant(_ADDRESS, 1), cgutils.gep_inbounds(builder, state, 0, 0))
    builder.ret_void()
    return function
