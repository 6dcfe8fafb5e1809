"""Define the micro-kernels of the bfloat16 matrix product for processors with tile instructions (AMX), in assembly.

A tile is sixteen rows of 64 bytes. ``tdpbf16ps`` adds to sixteen outputs by sixteen rows of ``x`` the products of
thirty-two inputs, pair after pair in float32: an output depends on its own weights and its own row, ascending. Whether
the running sums stay in their tile or go through memory changes no bit.

Intel 64 and IA-32 Architectures Software Developer's Manual, chapter "Programming with Intel AMX".
"""

import ctypes
import platform
import sys
from functools import cache
from typing import Any

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic

from samebit.kernels.cpu.base.vectors import dispatch, pointer_to

TILE_INPUTS = 32
"""Count of inputs that one instruction takes."""

TILE_OUTPUTS = 16

VECTORS = 4
"""The tiles of sixteen rows that are summed at a time."""

_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18
_CONFIGURATION = bytes([1, 0, *[0] * 14, *[64, 0] * 8, *[0] * 16, *[16] * 8, *[0] * 8])
"""Selects palette 1, eight tiles of sixteen rows of 64 bytes."""


@cache
def available() -> bool:
    """Return whether Numba compiles for such a processor and the system lets this process use its tiles."""
    features = cpu_target.target_context.codegen().magic_tuple()[-1].split(",")
    if not ("+amx-bf16" in features and sys.platform == "linux" and platform.machine() == "x86_64"):
        return False
    binding.initialize_native_asmparser()
    refused: int = ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA)
    return refused == 0


def _emit(builder: Any, text: str, constraints: str, arguments: list[Any]) -> None:
    function_type = ir.FunctionType(ir.VoidType(), [argument.type for argument in arguments])
    clobbered = "~{memory},~{dirflag},~{fpsr},~{flags}"
    constraints = f"{constraints},{clobbered}" if constraints else clobbered
    builder.call(ir.InlineAsm(function_type, text, constraints, side_effect=True), arguments)


@intrinsic
def configure_tiles(typingctx: Any) -> Any:
    """Take the tiles, before the first product of a thread; `release_tiles` gives them back."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        shape = ir.Constant(ir.ArrayType(ir.IntType(8), 64), bytearray(_CONFIGURATION))
        stored = cgutils.global_constant(builder, "tile_configuration", shape)
        _emit(builder, "ldtilecfg ($0)", "r", [builder.bitcast(stored, ir.IntType(8).as_pointer())])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def release_tiles(typingctx: Any) -> Any:
    """Give the tiles back: a thread that holds them is slower to switch."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _emit(builder, "tilerelease", "", [])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def add_tile_products(
    typingctx: Any,
    vectors: Any,
    steps: Any,
    panel: Any,
    panel_at: Any,
    width: Any,
    weights: Any,
    weights_at: Any,
    weights_stride: Any,
    sums: Any,
    sums_at: Any,
) -> Any:
    """Add to ``sums[j, 16 v + lane]`` the products of ``weight[j, i]`` and row ``16 v + lane`` of the panel.

    j is below 16, i below ``32 * steps``, v below ``vectors`` (1 to `VECTORS`). ``panel[p, row]`` are the inputs 2 p
    and 2 p + 1 of a row in 32 bits; rows of it and of the sums are ``width`` apart, those of the weight
    ``weights_stride``.
    """
    i64 = types.int64
    signature = types.void(i64, i64, panel, i64, i64, weights, i64, i64, sums, i64)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        many, count, panel_array, panel_from, step, weight, weight_from, weight_step, sums_array, sums_from = args
        index = many.type
        arguments = [
            pointer_to(context, builder, sums, sums_array, sums_from),
            pointer_to(context, builder, weights, weight, weight_from),
            pointer_to(context, builder, panel, panel_array, panel_from),
            builder.mul(step, index(4)),
            builder.mul(weight_step, index(2)),
            count,
            builder.mul(step, index(4 * TILE_INPUTS // 2)),
        ]

        def emit(vector_count: int) -> None:
            _emit(builder, _products(vector_count), "r,r,r,r,r,r,r,~{rax},~{rcx},~{rdx}", arguments)

        dispatch(builder, [(many, tuple(range(1, VECTORS + 1)))], emit)
        return context.get_dummy_value()

    return signature, generate


def _products(vectors: int) -> str:
    """Take $0 sums, $1 weights, $2 panel, $3 and $4 bytes between their rows, $5 steps, $6 bytes of a step of the
    panel."""
    places = [f"{64 * v}" if v else "" for v in range(vectors)]
    lines = ["movq $1, %rax", "movq $2, %rcx", "movq $5, %rdx"]
    lines += [f"tileloadd {place}($0,$3,1), %tmm{v}" for v, place in enumerate(places)]
    lines += ["1:", "tileloadd (%rax,$4,1), %tmm4"]
    for v, place in enumerate(places):
        lines += [f"tileloadd {place}(%rcx,$3,1), %tmm{5 + v % 3}", f"tdpbf16ps %tmm{5 + v % 3}, %tmm4, %tmm{v}"]
    lines += ["addq $$64, %rax", "addq $6, %rcx", "decq %rdx", "jnz 1b"]
    lines += [f"tilestored %tmm{v}, {place}($0,$3,1)" for v, place in enumerate(places)]
    return "\n".join(lines)
