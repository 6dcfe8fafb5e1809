"""Compile the Triton kernels on a machine without a GPU, for an H100 and others. Run by test_compile.py, in a process
of its own.

The operations run on CPU tensors; each launch compiles its kernel down to machine code and stops there. Prints one
object: of each kernel its name, the shared memory that it asks for, and the stack of a thread, in bytes: what found no
place in registers; loads of two bytes, which are those of elements that were not seen to lie side by side, and
asynchronous copies, of sixteen bytes each; instructions of tensor cores, and those in TF32; those that read a register
which none wrote; how elements are spread over threads, which is the order of a sum; and of attention the instructions
of its longest loop, the one over the keys.

Under `make soak` every kernel in every shape, dtype and tile configuration; otherwise each kernel in a few.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from tempfile import NamedTemporaryFile
from typing import Any

import numpy as np
import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from samebit.kernels.binding.epilogue import unchanged
from samebit.kernels.binding.trainer.logprob_head import scored
from samebit.kernels.binding.trainer.logprob_request import Scoring
from samebit.kernels.layout import device
from samebit.kernels.layout.forward_context import ForwardContext, training_context
from samebit.kernels.layout.kv_pages import KVLayout, LatentLayout, PageLayout, SparseLayout
from samebit.kernels.layout.lora.adapters import LowRank, LowRanks
from samebit.kernels.layout.options import (
    AttentionOptions,
    DeltaOptions,
    ExpertOptions,
    ExpertWeights,
    Filters,
    GatedNormOptions,
    HeadNorms,
    IndexOptions,
    LatentOptions,
    RoutingOptions,
    SSMOptions,
)
from samebit.kernels.layout.states.conv import ConvShape
from samebit.kernels.layout.states.delta import DeltaShape
from samebit.kernels.layout.states.mamba import SSMShape
from samebit.kernels.layout.states.memory import StateLayout
from samebit.kernels.layout.vision.segments import Segments
from samebit.kernels.ops.activation import activated, gated
from samebit.kernels.ops.attention import attention
from samebit.kernels.ops.conv import causal_conv
from samebit.kernels.ops.delta.gates import gates
from samebit.kernels.ops.delta.rule import delta_rule
from samebit.kernels.ops.latent.attention import latent_attention
from samebit.kernels.ops.latent.heads import multiply_heads
from samebit.kernels.ops.latent.selection import choose_keys
from samebit.kernels.ops.linear import linear
from samebit.kernels.ops.logprobs import entropy_from_logits, log_softmax, logprobs_from_logits
from samebit.kernels.ops.norm import gated_rms_norm, layer_norm, rms_norm
from samebit.kernels.ops.rope import RotaryTables, rotate
from samebit.kernels.ops.sampling import keep_likely
from samebit.kernels.ops.segment_attention import segment_attention
from samebit.kernels.ops.ssd import scan
from samebit.kernels.triton import heads as head_proofs
from samebit.kernels.triton.attention import Places
from samebit.kernels.triton.experts.operation import experts_backward, experts_forward
from samebit.kernels.triton.experts.routing import route_backward, route_forward
from samebit.kernels.triton.gradients import delta as delta_gradient
from samebit.kernels.triton.heads import turn_and_write, turned_each
from samebit.kernels.triton.latent import rows as latent_rows
from samebit.kernels.triton.layers.gated import multiply_both
from samebit.kernels.triton.linear import add_low_rank
from samebit.kernels.triton.matmul import multiply, multiply_layers
from samebit.kernels.triton.norm import added
from samebit.kernels.triton.tiles import proved_equal as tile_proofs
from samebit.kernels.triton.tiles import table as tiles
from samebit.kernels.triton.tiles.file import MatmulEntry
from samebit.kernels.triton.vocabulary import sampling

CAMPAIGN = "SAMEBIT_SOAK_CASES" in os.environ


@dataclass(frozen=True)
class Card:
    """Stands for a GPU that there is not. `room`: bytes of shared memory that a program may have."""

    capability: int
    room: int


CARDS = {
    "sm_80": Card(80, 163 * 1024),
    "sm_89": Card(89, 99 * 1024),
    "sm_90": Card(90, 227 * 1024),
    "sm_100": Card(100, 227 * 1024),
    "default": Card(86, 99 * 1024),
}
"""Holds a card for each section of the file of tiles."""


class Driver:
    """Answers what Triton asks a driver for before it compiles."""

    card = CARDS["sm_90"]

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.card.capability, 32)

    def get_current_device(self) -> int:
        return self.card.capability  # each has compiled kernels of its own

    def get_current_stream(self, device: int) -> int:
        return 0


WRITES = ("U", "S2UR", "R2UR", "CS2UR", "VOTEU", "REDUX", "LDCU")
READS_ALONE = ("UISETP", "UPLOP")
"""Lists how instructions of uniform registers begin: they have one as their target, but for those that
set predicates.
"""

LOOPS = ("_attend_items", "_of_queries", "_of_keys")
compiled: dict[int, dict[str, Any]] = {}
launch = JITFunction.run


def compile_only(self: Any, *args: Any, grid: Any, warmup: bool = False, **options: Any) -> None:
    kernel = launch(self, *args, grid=grid, warmup=True, **options)
    if id(kernel) not in compiled:
        hopper = Driver.card.capability == 90
        code = dumped(kernel.asm["cubin"], "-sass") if hopper else ""
        compiled[id(kernel)] = {
            "name": self.fn.__name__,
            "card": Driver.card.capability,
            "shared": kernel.metadata.shared,
            "room": Driver.card.room,
            "stack": stack_of(kernel.asm["cubin"]),
            "loop": longest_loop(code) if hopper and self.fn.__name__ in LOOPS else None,
            "never written": never_written(code),
            "narrow loads": len(re.findall(r"ld\.global\S*\.b16", kernel.asm["ptx"])),
            "wide copies": len(re.findall(r"cp\.async\.cg\.", kernel.asm["ptx"])),
            "products": len(re.findall(r"wgmma\.mma_async|mma\.sync", kernel.asm["ptx"])),
            "in TF32": len(re.findall(r"mma[\w.:]*\.(?:kind::)?tf32\b", kernel.asm["ptx"])),
            "sums": sums_of(kernel.asm["ttgir"]),
            "layouts": sorted(set(re.findall(r"#ttg\.blocked<.*?>", kernel.asm["ttgir"]))),
        }


def sums_of(ttgir: str) -> list[str]:
    """Describe each kind of tile that is summed: its shape, and how its elements are spread over threads."""
    layouts = dict(re.findall(r"(#blocked\d*) = (#ttg\.blocked<.*?>)", ttgir))
    tiles = re.findall(r"\(tensor<(\S+), (#blocked\d*)>\) -> tensor<\S+, #ttg\.slice", ttgir)
    return sorted({f"{shape} {layouts[name]}" for shape, name in tiles})


def stack_of(cubin: bytes) -> int:
    usage = dumped(cubin, "-res-usage")
    found = re.search(r"STACK:(\d+)", usage)
    assert found is not None, usage
    return int(found[1])


def never_written(code: str) -> list[str]:
    """Return the instructions that read a uniform register before any wrote it: ptxas 12.8 loses the lower half of
    descriptors of shared memory that two products of tensor cores read in turn, one with another swizzle.
    """
    written: set[int] = set()
    found = []
    for instruction in re.findall(r"/\*[0-9a-f]{4,6}\*/\s+(.*?);", code):
        name, _, operands = re.sub(r"^@!?U?P\w+\s+", "", instruction.strip()).partition(" ")
        parts = [part.strip() for part in operands.split(",")]
        plain = [part for part in parts if not re.fullmatch(r"U?PT?\d*", part)]
        target = plain[0] if plain and name.startswith(WRITES) and not name.startswith(READS_ALONE) else ""
        taken, given = (2 if re.search(kinds, name) else 1 for kinds in (r"^U.*\.64", r"\.(64|WIDE)"))
        sources = list(parts)
        if re.fullmatch(r"UR\d+", target):
            sources.remove(target)
        else:
            target = ""
        for source in sources:
            for number in map(int, re.findall(r"\bUR(\d+)", source)):
                width = 4 if "gdesc[" in source else 2 if "desc[" in source else taken
                second_alone = width == 4 and source != parts[1]  # of two descriptors, as the first factor is elsewhere
                if not {*range(number + 2 * second_alone, number + width)} <= written:
                    found.append(instruction.strip())
        if target:
            first = int(target[2:])
            written |= {*range(first, first + (4 if ".128" in name else given))}
    return found


def longest_loop(code: str) -> int:
    """Count the instructions from the target of a jump back to the jump, of loops that hold no other."""
    numbered = re.findall(r"/\*([0-9a-f]{4,5})\*/\s+(.*?);", code)
    at = {int(address, 16): number for number, (address, _) in enumerate(numbered)}
    jumps = ((number, re.search(r"BRA.* 0x([0-9a-f]+)$", code.strip())) for number, (_, code) in enumerate(numbered))
    loops = [(at[int(jump[1], 16)], number) for number, jump in jumps if jump and int(jump[1], 16) in at]
    loops = [(first, last) for first, last in loops if first < last]  # a jump to itself ends the code
    inner = [
        (first, last)
        for first, last in loops
        if not any(first <= start and stop <= last for start, stop in loops if (start, stop) != (first, last))
    ]
    return max(last - first + 1 for first, last in inner)


def dumped(cubin: bytes, option: str) -> str:
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, option, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def both_ways(run: Callable[..., torch.Tensor], *shapes: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> None:
    out = run(*(torch.zeros(shape, dtype=dtype, requires_grad=True) for shape in shapes))
    out.backward(torch.ones_like(out))


def rowwise() -> None:
    both_ways(linear, (7, 1024), (512, 1024), (512,))
    both_ways(linear, (7, 100), (77, 100), dtype=torch.float32)
    both_ways(lambda x, w: rms_norm(x, w, 1e-6), (7, 1000), (1000,))
    both_ways(lambda x, w, b: layer_norm(x, w, b, 1e-6), (7, 1000), (1000,), (1000,))
    for first in (True, False):
        options = GatedNormOptions(1e-5, 2, first)
        both_ways(lambda x, g, w, o=options: gated_rms_norm(x, g, w, o), (7, 200), (7, 200), (200,))
    for name in ("silu", "gelu", "gelu_new", "sigmoid"):
        both_ways(lambda gate, up, name=name: gated(name, gate, up), (7, 100), (7, 100))
    tables = RotaryTables(torch.zeros(7, 6), torch.zeros(7, 6), training_context((1, 7), None, None))
    both_ways(lambda x: rotate(x, tables), (7, 3, 50))


def attentions() -> None:
    context = training_context((1, 70), None, None)
    for heads, kv_heads, size, window, softcap, sunk in (
        (16, 8, 128, 0, 0.0, False), (6, 2, 50, 65, 2.0, False), (8, 2, 256, 0, 0.0, False), (64, 8, 64, 128, 0.0, True)
    ):  # fmt: skip
        options = AttentionOptions(0, 1.0, window, softcap)
        shapes = [(70, count, size) for count in (heads, kv_heads, kv_heads)]
        sinks = torch.zeros(heads, requires_grad=True) if sunk else None
        both_ways(lambda q, k, v, o=options, s=sinks: attention(q, k, v, context, o, s), *shapes)
        for count in (1, 3):
            decode = shared_prefix(count, KVLayout(1, kv_heads, size))
            parts = (torch.zeros(count, *shape[1:], dtype=torch.bfloat16) for shape in shapes)
            attention(*parts, decode, options, sinks)


def towers() -> None:
    """Compile what vision towers compute beside layers of language models."""
    for name in ("gelu", "gelu_new", "quick_gelu"):
        both_ways(lambda x, name=name: activated(name, x), (7, 100))
    segments = Segments.of((64, 7))
    for size in (80, 64):
        both_ways(lambda q, k, v: segment_attention(q, k, v, segments, 1.0), *[(71, 16, size)] * 3)


def shared_prefix(count: int, layout: PageLayout, dtype: torch.dtype = torch.bfloat16) -> ForwardContext:
    """Lay out the next token of sequences that begin with the same blocks."""
    sequences = np.arange(count, dtype=np.int32)
    return ForwardContext(
        positions=torch.zeros(count, dtype=torch.int64),
        row_start=sequences,
        lengths=np.ones(count, np.int32),
        starts=np.full(count, 130, np.int32),
        table_rows=sequences,
        block_tables=np.tile(np.arange(1, 17, dtype=np.int32), (count, 1)),
        block_size=64,
        pages=layout.allocate(18, 64, dtype, "cpu"),
    )


def latents() -> None:
    """Compile the sizes of DeepSeek-V2-Lite; under `make soak` those of DeepSeek-V3 and GLM-4.7-Flash, and float32."""
    few = ((torch.bfloat16, 16, 512, 64, 128, 128),)
    more = (
        (torch.bfloat16, 128, 512, 64, 128, 128), (torch.bfloat16, 20, 512, 64, 192, 256),
        (torch.float32, 8, 128, 32, 64, 64),
    )  # fmt: skip
    for dtype, heads, rank, rope, nope, value in few + more if every_shape() else few:
        context, options = training_context((1, 70), None, None), LatentOptions(0, 1.0, rank, rope)
        shapes = (70, heads, rank + rope), (70, rank + rope)
        both_ways(lambda q, c, o=options, t=context: latent_attention(q, c, t, o), *shapes, dtype=dtype)
        both_ways(
            lambda q, w, n=nope: multiply_heads(q[..., :n], w[:, :n], transposed=True), (70, heads, nope + rope),
            (heads, nope + value, rank), dtype=dtype,
        )  # fmt: skip
        both_ways(
            lambda c, w, n=nope: multiply_heads(c, w[:, n:]), (70, heads, rank), (heads, nope + value, rank),
            dtype=dtype,
        )  # fmt: skip
        if dtype is torch.bfloat16:
            for count in (1, 3):
                decode = shared_prefix(count, LatentLayout(1, rank, rope))
                parts = (torch.zeros(count, *shape[1:], dtype=dtype) for shape in shapes)
                latent_attention(*parts, decode, options)


def sparse() -> None:
    """Compile index and attention of DeepSeek-V3.2; under `make soak` sizes that fill no tile, in float32."""
    few = ((torch.bfloat16, 128, 512, 64, 64, 128, 20),)
    more = ((torch.float32, 5, 33, 7, 3, 7, 5),)
    for dtype, heads, rank, rope, index_heads, size, top_k in few + more if every_shape() else few:
        context, index = training_context((1, 70), None, None), IndexOptions(1, index_heads, size, 1.0, top_k)
        options = LatentOptions(0, 1.0, rank, rope)
        parts = (torch.zeros(70, index_heads, size, dtype=dtype), torch.zeros(70, size, dtype=dtype))
        choose_keys(*parts, torch.zeros(70, index_heads), context, index)
        chosen = torch.zeros(70, top_k, dtype=torch.int32)
        both_ways(
            lambda q, c, o=options, t=context, k=chosen: latent_attention(q, c, t, o, k), (70, heads, rank + rope),
            (70, rank + rope), dtype=dtype,
        )  # fmt: skip
        decode = shared_prefix(3, SparseLayout(rank, rope, size, (True,)), dtype)
        parts = (torch.zeros(3, index_heads, size, dtype=dtype), torch.zeros(3, size, dtype=dtype))
        choose_keys(*parts, torch.zeros(3, index_heads), decode, index)
        rows = (torch.zeros(3, *shape, dtype=dtype) for shape in ((heads, rank + rope), (rank + rope,)))
        latent_attention(*rows, decode, options, chosen[:3])


def vocabulary() -> None:
    tokens, temperatures = torch.zeros(3, dtype=torch.int64), torch.ones(3)
    both_ways(lambda logits: logprobs_from_logits(logits, tokens, temperatures), (3, 5000))
    both_ways(lambda logits: entropy_from_logits(logits, temperatures), (3, 5000), dtype=torch.float32)
    asked = Scoring(tokens, temperatures, with_entropy=True)
    both_ways(lambda x, w, b: scored(x, w, b, unchanged, None, asked).log_probs, (3, 64), (5000, 64), (5000,))
    logits = torch.zeros(3, 5000)
    log_softmax(logits, temperatures)
    sampling.draw(logits, temperatures, temperatures.double())
    each = np.ones(2)
    keep_likely(logits, Filters(np.array([0, 2]), 0.7 * each, np.array([50, 0]), 0.9 * each, 0.1 * each))
    sampling.uniforms(torch.zeros(3, 2, dtype=torch.uint32), torch.zeros(3, 4, dtype=torch.uint32))


def mamba() -> None:
    few = (torch.bfloat16, 64, 128), (torch.float32, 80, 200), (torch.bfloat16, 128, 256)
    more = (
        (torch.float16, 64, 128), (torch.float32, 64, 128), (torch.bfloat16, 128, 64), (torch.float32, 128, 256),
    )  # fmt: skip
    for dtype, head_dim, size in few + more if every_shape() else few:
        shape = SSMShape(heads=8, head_dim=head_dim, groups=2, state_size=size, taps=4)
        options = SSMOptions(0, 64, shape.groups, size)
        context = with_states(shape, dtype)
        x, dt = torch.zeros(20, shape.conv_width, dtype=dtype), torch.zeros(20, 8, dtype=dtype)
        x = causal_conv(x, torch.zeros(shape.conv_width, 1, 4, dtype=dtype), None, context, options.layer)
        scan(x, dt, torch.zeros(8), torch.zeros(8), torch.zeros(8), context, options)


def with_states(shape: SSMShape | DeltaShape | ConvShape, dtype: torch.dtype, guesses: int = 0) -> ForwardContext:
    """Lay out two sequences of recurrent layers: one goes on with three tokens, another begins with seventeen."""
    return ForwardContext(
        positions=torch.zeros(20, dtype=torch.int64),
        row_start=np.array([0, 3], np.int32),
        lengths=np.array([3, 17], np.int32),
        starts=np.array([5, 0], np.int32),
        table_rows=np.array([0, 1], np.int32),
        block_tables=np.zeros((2, 2), np.int32),
        block_size=64,
        states=StateLayout(1, shape, 64, guesses).allocate(2, dtype, 1),
    )


def short_convs() -> None:
    """Compile the convolution without silu of LFM2's layers, forward with windows of both sizes, and gradients; then
    the one with silu of a Mamba2, with a window for guesses.
    """
    width, taps = 2048, 3
    for dtype in (torch.bfloat16, torch.float32):
        weight = torch.zeros(width, 1, taps, dtype=dtype)
        for guesses in (0, 7):
            context = with_states(ConvShape(width, taps), dtype, guesses)
            causal_conv(torch.zeros(20, width, dtype=dtype), weight, None, context, 0, silu=False)
        context = training_context((1, 70), None, None)
        both_ways(
            lambda x, w, b, context=context: causal_conv(x, w, b, context, 0, silu=False), (70, width),
            (width, 1, taps), (width,), dtype=dtype,
        )  # fmt: skip
    shape = SSMShape(heads=8, head_dim=64, groups=2, state_size=128, taps=4)
    context, width = with_states(shape, torch.bfloat16, guesses=7), shape.conv_width
    x, weight = (torch.zeros(size, dtype=torch.bfloat16) for size in ((20, width), (width, 1, shape.taps)))
    causal_conv(x, weight, None, context, 0)


def mamba_gradients() -> None:
    context = training_context((1, 70), None, None)
    few = (torch.bfloat16, 8, 64, 2, 128), (torch.float32, 3, 20, 1, 100)
    more = (torch.float32, 8, 64, 2, 128), (torch.bfloat16, 4, 128, 4, 256), (torch.float32, 4, 128, 1, 128)
    for dtype, heads, head_dim, groups, size in few + more if every_shape() else few:
        width, options = heads * head_dim + 2 * groups * size, SSMOptions(0, 64, groups, size)
        both_ways(
            lambda x, w, b: causal_conv(x, w, b, context, 0), (70, width), (width, 1, 4), (width,),
            dtype=dtype,
        )  # fmt: skip
        per_head = [torch.zeros(heads, requires_grad=True) for _ in range(3)]
        both_ways(
            lambda x, dt, o=options, p=per_head: scan(x, dt, *p, context, o), (70, width), (70, heads), dtype=dtype
        )


def small_states() -> None:
    context = training_context((1, 70), None, None)
    few = ((40, 24),)
    more = tuple((head_dim, size) for head_dim in (20, 64, 128) for size in (8, 16, 32, 64))
    for head_dim, size in few + more if CAMPAIGN else few:
        per_head = [torch.zeros(2, requires_grad=True) for _ in range(3)]
        options, width = SSMOptions(0, 64, 1, size), 2 * head_dim + 2 * size
        both_ways(lambda x, dt, o=options, p=per_head: scan(x, dt, *p, context, o), (70, width), (70, 2))


def delta() -> None:
    few = (torch.bfloat16, 4, 8, 128, 128), (torch.float32, 2, 2, 96, 200)
    more = (torch.float16, 4, 8, 128, 128), (torch.float32, 4, 8, 128, 128), (torch.bfloat16, 2, 4, 256, 256)
    kimi = (torch.bfloat16, 8, 8, 128, 128)
    compute_rules((*few, kimi, *more) if every_shape() else (*few, kimi))


def compute_rules(rules: Sequence[tuple[torch.dtype, int, int, int, int]]) -> None:
    for dtype, key_heads, heads, key_dim, value_dim in rules:
        shape = DeltaShape(key_heads, heads, key_dim, value_dim, 4, key_heads == 8)
        context = with_states(shape, dtype)
        options = DeltaOptions(0, 64, key_heads, heads, key_dim, value_dim, shape.by_channel)
        of_decays, of_heads = (torch.zeros(20, width, dtype=dtype) for width in (options.decays, heads))
        decay, beta = gates(of_decays, of_heads, torch.zeros(heads), torch.zeros(options.decays))
        delta_rule(torch.zeros(20, shape.conv_width, dtype=dtype), decay, beta, context, options)


def delta_gradients() -> None:
    few = (torch.bfloat16, 4, 8, 128, 128), (torch.float32, 2, 2, 96, 200)
    more = ((torch.float16, 4, 8, 128, 128),)
    differentiate_rules(few + more if every_shape() else few)


def wide_delta_gradients() -> None:
    """Compile gradients of heads that no model has yet: their state does not fit into registers."""
    differentiate_rules(((torch.bfloat16, 2, 4, 256, 256),))


def differentiate_rules(rules: Sequence[tuple[torch.dtype, int, int, int, int]]) -> None:
    context = training_context((1, 70), None, None)
    for dtype, *sizes in rules:
        options, heads = DeltaOptions(0, 64, *sizes), sizes[1]
        decay, beta = (torch.zeros(70, heads, requires_grad=True) for _ in range(2))
        both_ways(
            lambda qkv, o=options, d=decay, b=beta: delta_rule(qkv, d, b, context, o), (70, options.width), dtype=dtype
        )


def configurations() -> None:
    """Compile all tiles of tiles.json under `make soak`, whatever GPU they are for; otherwise those for an H100."""
    every = tiles.families()
    for name in every if CAMPAIGN else ("sm_90",):
        family = every[name]
        take_tiles_of(name)
        for entry in family.matmul:
            products(entry)
        for entry in family.attention:
            context = training_context((1, 70), None, None)
            shapes = [(70, count, entry.head_dim.most or tiles.LARGEST_HEAD) for count in (16, 8, 8)]
            run = lambda q, k, v, context=context: attention(q, k, v, context, AttentionOptions(0, 1.0, 0, 0.0))  # noqa: E731
            both_ways(run, *shapes, dtype=tiles.DTYPES[entry.dtypes[0]])


def take_tiles_of(name: str) -> None:
    """Compile with the tiles of this section of the file, for its GPU, from now on."""
    Driver.card = CARDS[name]
    latent_rows.shared_memory = delta_gradient.shared_memory = lambda device: Driver.card.room
    tiles.family_name = lambda device: name
    tiles.family.cache_clear()
    tiles.attention_tiles.cache_clear()


def products(entry: MatmulEntry) -> None:
    """Compile forward and gradients of a layer with these tiles."""
    dtype = tiles.DTYPES[entry.dtypes[0]]
    x, weight, grad = (torch.zeros(shape, dtype=dtype) for shape in ((7, 1024), (512, 1024), (7, 512)))
    multiply(x, weight.t(), None, entry.tile)
    multiply(grad, weight, None, entry.tile)
    multiply(grad.t(), x, None, entry.tile)
    for rung in entry.few:
        multiply(x, weight.t(), None, rung.tile)


def large_layers() -> None:
    """Compile forward and gradients of Qwen3-8B's layers; and depths that are no multiple of a tile's."""
    for inputs, outputs in ((4096, 4096), (12288, 4096), (200, 512)):
        both_ways(linear, (7, inputs), (outputs, inputs))
    both_ways(lambda gate, up: gated("silu", gate, up), (7, 12288), (7, 12288))


def joined_layers() -> None:
    """Compile queries, keys and values of Qwen3-8B, its gate and up: with every tile, a layer alone and all of them.

    Under `make soak` with the biases of Qwen2 too, and layers that fill no tile.
    """
    few = ((4096, (4096, 1024, 1024), False), (4096, (12288, 12288), False))
    more = ((3584, (3584, 512, 512), True), (200, (129, 77, 1), True))
    for inputs, outputs, biased in few + more if CAMPAIGN else few:
        x = torch.zeros(7, inputs, dtype=torch.bfloat16)
        weights = [torch.zeros(size, inputs, dtype=torch.bfloat16) for size in outputs]
        biases = [torch.zeros(size, dtype=torch.bfloat16) for size in outputs] if biased else None
        entry = tiles.matmul_tiles(x.device, inputs, sum(outputs), x.dtype)
        for tile in (entry.tile, *(rung.tile for rung in entry.few)):
            multiply(x, weights[0].t(), None if biases is None else biases[0], tile)
            multiply_layers(x, weights, biases, tile, outputs)


def gated_layers() -> None:
    """Compile gate and up of Qwen3-8B: with each of their tiles, without their activation and with it.

    Under `make soak` with all tiles for an H100, with biases, in float16 and float32; then with another activation.
    """
    few = ((torch.bfloat16, False),)
    more = ((torch.bfloat16, True), (torch.float16, False), (torch.float32, False))
    for dtype, biased in few + more if CAMPAIGN else few:
        gate_and_up(dtype, biased, "silu", alone=True)
    if CAMPAIGN:
        gate_and_up(torch.bfloat16, False, "gelu_pytorch_tanh", alone=False)


def gate_and_up(dtype: torch.dtype, biased: bool, activation: str, *, alone: bool) -> None:
    inputs, outputs = 4096, 12288
    x, weight = torch.zeros(7, inputs, dtype=dtype), torch.zeros(outputs, inputs, dtype=dtype)
    biases = [torch.zeros(outputs, dtype=dtype)] * 2 if biased else None
    entry = tiles.matmul_tiles(x.device, inputs, 2 * outputs, dtype)
    others = [one for one in tiles.family(x.device).matmul if one.dtypes == entry.dtypes]
    entries = [entry, *(others if CAMPAIGN else ())]
    for tile in dict.fromkeys(tile for one in entries for tile in (one.tile, *(rung.tile for rung in one.few))):
        if alone:
            multiply_layers(x, [weight, weight], biases, tile, (outputs, outputs))
        for kept in (False, True):  # one compiled kernel
            multiply_both(activation, x, [weight, weight], biases, tile, outputs, kept=kept)


def heads_of_rollouts() -> None:
    """Compile norms, rotation and pages in one launch, then a launch each: of Qwen3-8B, Gemma-3, Llama; and an odd
    size.
    """
    for heads, kv_heads, size, angles, normed, dtype in (
        (32, 8, 128, 64, True, torch.bfloat16), (8, 4, 256, 128, True, torch.bfloat16),
        (32, 8, 128, 64, False, torch.bfloat16), (6, 3, 50, 20, True, torch.float32),
    ):  # fmt: skip
        q, k, v = (torch.zeros(7, count, size, dtype=dtype) for count in (heads, kv_heads, kv_heads))
        norms = HeadNorms(torch.zeros(size, dtype=dtype), torch.zeros(size, dtype=dtype), 1e-6, 0.0) if normed else None
        turns, rows = torch.zeros(7, angles), torch.zeros(7, dtype=torch.int32)
        pages = KVLayout(1, kv_heads, size).allocate(2, 64, dtype, "cpu")[0]
        turn_and_write(q, k, v, (turns, turns), norms, pages, Places(rows, rows, rows, 64))
        turned_each(q, k, (turns, turns), norms)


def adapters() -> None:
    """Compile what adapters of small and usual ranks add to queries, keys and values of Qwen3-8B."""
    x = torch.zeros(7, 4096, dtype=torch.bfloat16)
    for rank in (1, 8, 16):
        downs, ups = torch.zeros(rank, 4096, dtype=x.dtype), torch.zeros(4096, rank, dtype=x.dtype)
        terms = LowRanks(tuple(LowRank(downs, ups[:outputs], 1.0) for outputs in (4096, 1024, 1024)))
        add_low_rank([x.new_zeros(7, len(term.up)) for term in terms.each], x, terms)


def norms_of_sums() -> None:
    """Compile a sum with its norm, then the norm alone: of Qwen3-8B, of an odd width, of a wide model in float32."""
    for width, dtype in ((4096, torch.bfloat16), (1000, torch.bfloat16), (8192, torch.float32)):
        x, weight = torch.zeros(7, width, dtype=dtype), torch.zeros(width, dtype=dtype)
        added(x, x, torch.empty_like(x), weight, 1e-6, 0.0)
        rms_norm(x, weight, 1e-6)


def narrow_logits() -> None:
    """Compile the same numbers of logits in two dtypes: a chunk has to be summed in the same order."""
    tokens, temperatures = torch.zeros(3, dtype=torch.int64), torch.ones(3)
    for vocab in (151936, 5002):
        for dtype in (torch.float32, torch.bfloat16):
            logprobs_from_logits(torch.zeros(3, vocab, dtype=dtype), tokens, temperatures)


def routers() -> None:
    for options, number in (
        (RoutingOptions("softmax", 8, True), 128), (RoutingOptions("sigmoid", 8, True, 2.5, 8, 4), 256),
        (RoutingOptions("softmax", 6, False), 64), (RoutingOptions("softmax_of_chosen", 4, False), 32),
    ):  # fmt: skip
        correction = torch.zeros(number) if options.scores == "sigmoid" else None
        _, weights, saved = route_forward(torch.zeros(7, number), correction, options)
        route_backward(saved, weights, options)


def qwen_experts() -> None:
    """Compile the experts of Qwen3-30B-A3B, with the tile for few rows an expert and that for many."""
    expert_layer(ExpertOptions("silu", "gated"), 2048, 768, 128, 8, torch.bfloat16)


def other_experts() -> None:
    """Compile the experts of gpt-oss-20b: transposed, with biases. Under `make soak` Nemotron's kind, and float32."""
    interleaved = ExpertOptions("silu", "interleaved", True, 7.0, 1.702)
    expert_layer(interleaved, 2880, 2880, 32, 4, torch.bfloat16, biased=True)
    if CAMPAIGN:
        expert_layer(ExpertOptions("relu2", "plain"), 1024, 1856, 128, 6, torch.bfloat16)
        expert_layer(ExpertOptions("gelu", "gated"), 2048, 1024, 64, 8, torch.float32)
        expert_layer(interleaved, 100, 129, 5, 2, torch.float16, biased=True)


def expert_layer(
    options: ExpertOptions, width: int, inner: int, number: int, top_k: int, dtype: torch.dtype, *, biased: bool = False
) -> None:
    """Compute forward with few rows an expert; forward and gradients with many. Nothing of the weights is read or
    written.
    """
    first = inner if options.form == "plain" else 2 * inner
    up, down = (width, first), (inner, width)
    shapes = [(number, *(size if options.transposed else size[::-1])) for size in (up, down)]
    biases = [(number, first), (number, width)] if biased else []
    parts = [torch.zeros(shape, dtype=dtype, requires_grad=True) for shape in shapes + biases]
    for rows in (number, 100 * number):
        x, weights = torch.zeros(rows, width, dtype=dtype), torch.zeros(rows, top_k)
        ids = torch.zeros(rows, top_k, dtype=torch.int32)
        out, saved = experts_forward(x, ids, weights, ExpertWeights(*parts), options, saving=True)
    experts_backward(saved, out, options, (True, True, True, True, biased, biased))


def every_shape() -> bool:
    """Tell whether all shapes are compiled: under `make soak` for an H100; another GPU has a few."""
    return CAMPAIGN and Driver.card.capability == 90


def smaller_cards() -> None:
    """Compile kernels whose tiles are not in the file for an A100 and an RTX 4090, under `make soak`."""
    for name in ("sm_80", "sm_89") if CAMPAIGN else ():
        take_tiles_of(name)
        for part in (latents, sparse, mamba, mamba_gradients, short_convs, delta, delta_gradients):
            part()


def products_of_a_b200() -> None:
    """Compile for a B200 a delta rule, which multiplies in float32 what had 16 bits; under `make soak` more kernels."""
    take_tiles_of("sm_100")
    compute_rules(((torch.bfloat16, 4, 8, 128, 128),))
    parts = rowwise, attentions, latents, mamba, mamba_gradients, delta, delta_gradients, joined_layers, gated_layers
    for part in parts if CAMPAIGN else ():
        part()


if __name__ == "__main__":
    driver.set_active(Driver())
    JITFunction.run = compile_only
    device.on_gpu = lambda tensor: True
    tile_proofs.proved_equal = lambda layer, tile, rung: True  # nothing runs
    tile_proofs.proved_joined = lambda layers, tile: True
    head_proofs.proved_equal = lambda heads: True
    parts = (
        rowwise,
        attentions,
        towers,
        vocabulary,
        mamba,
        mamba_gradients,
        short_convs,
        small_states,
        delta,
        delta_gradients,
        wide_delta_gradients,
        latents,
        sparse,
        configurations,
        large_layers,
        joined_layers,
        gated_layers,
        heads_of_rollouts,
        norms_of_sums,
        narrow_logits,
        routers,
        qwen_experts,
        other_experts,
        adapters,
        smaller_cards,
        products_of_a_b200,
    )
    named = sys.argv[1:]
    found: list[dict[str, Any]] = []
    for part in parts:
        if named and part.__name__ not in named:
            continue
        if named:
            compiled.clear()  # what it shares with the part before counts for both
        take_tiles_of("sm_90")
        before = len(compiled)
        part()
        found += [{**kernel, "part": part.__name__} for kernel in list(compiled.values())[before:]]
    print(json.dumps(found))  # noqa: T201
