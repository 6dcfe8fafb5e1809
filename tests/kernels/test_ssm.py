"""The convolution and the scan of Mamba2: near the oracle, the same bits by any route through the states, gradients."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from samebit.kernels import reference
from samebit.kernels.context import ForwardContext, training_context
from samebit.kernels.conv import causal_conv
from samebit.kernels.ssd import scan
from samebit.kernels.states import SSMOptions, SSMShape, StateLayout, StateMemory

from .helpers import DTYPES, THREADS, assert_near, leaves, threads

LENGTHS = (1, 2, 3, 4, 63, 64, 65, 130)


@dataclass(frozen=True)
class Case:
    """Sizes of a layer and its chunk."""

    heads: int
    head_dim: int
    groups: int
    state_size: int
    taps: int
    chunk: int
    dt_limits: tuple[float, float] = (0.0, float("inf"))

    @property
    def shape(self) -> SSMShape:
        return SSMShape(self.heads, self.head_dim, self.groups, self.state_size, self.taps)

    @property
    def options(self) -> SSMOptions:
        return SSMOptions(0, self.chunk, self.groups, self.state_size, self.dt_limits)


CASES = (
    Case(4, 24, 2, 100, 4, 64),
    Case(18, 16, 2, 24, 4, 16),
    Case(3, 129, 1, 7, 2, 128, (0.01, 0.5)),
    Case(2, 64, 1, 128, 3, 256),
)


@dataclass
class Layer:
    """Inputs of T rows and the layer's parameters."""

    x: torch.Tensor
    dt: torch.Tensor
    weight: torch.Tensor
    conv_bias: torch.Tensor
    decay_rate: torch.Tensor
    dt_bias: torch.Tensor
    skip: torch.Tensor

    @property
    def parameters(self) -> tuple[torch.Tensor, ...]:
        return self.decay_rate, self.dt_bias, self.skip

    def run(self, context: ForwardContext, options: SSMOptions) -> torch.Tensor:
        convolved = causal_conv(self.x, self.weight, self.conv_bias, context, options)
        return scan(convolved, self.dt, *self.parameters, context, options)

    def rows(self, rows: np.ndarray, padding: int) -> "Layer":
        x, dt = (
            torch.cat([part[rows], part.new_full((padding, part.shape[1]), torch.nan)]) for part in (self.x, self.dt)
        )
        return replace(self, x=x, dt=dt)

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.x, self.dt, self.weight, self.conv_bias, *self.parameters


@pytest.fixture(autouse=True)
def _poison() -> Iterator[None]:
    """In this mode torch fills what `torch.empty` returns with NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def layer_of(case: Case, dtype: torch.dtype, lengths: tuple[int, ...] = LENGTHS) -> Layer:
    torch.manual_seed(case.head_dim)
    total, shape = sum(lengths), case.shape
    joined = torch.randn(total, shape.conv_width + shape.heads).to(dtype)  # as a projection gives them
    return Layer(
        x=joined[:, : shape.conv_width],
        dt=joined[:, shape.conv_width :],
        weight=torch.randn(shape.conv_width, 1, shape.taps).to(dtype),
        conv_bias=torch.randn(shape.conv_width).to(dtype),
        decay_rate=-torch.rand(shape.heads) * 4,
        dt_bias=torch.randn(shape.heads) - 2,
        skip=torch.randn(shape.heads),
    )


def packed_context(lengths: tuple[int, ...] = LENGTHS) -> ForwardContext:
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    return training_context((1, sum(lengths)), None, positions)


def oracle(case: Case, layer: Layer) -> torch.Tensor:
    shape = case.shape
    sizes = [shape.inner, shape.groups * shape.state_size, shape.groups * shape.state_size]
    out = []
    for x, dt in zip(layer.x.split(LENGTHS), layer.dt.split(LENGTHS), strict=True):
        parts = reference.causal_conv(x, layer.weight, layer.conv_bias).split(sizes, -1)
        heads, b, c = (
            part.unflatten(-1, (n, -1))
            for part, n in zip(parts, (shape.heads, shape.groups, shape.groups), strict=True)
        )
        out.append(reference.ssm_scan(heads, b, c, dt, *layer.parameters, case.dt_limits).flatten(1))
    return torch.cat(out)


def memory(case: Case, dtype: torch.dtype, slots: int, checkpoints: int = 0) -> StateMemory:
    """State memory that holds NaN everywhere."""
    states = StateLayout(1, case.shape, case.chunk).allocate(slots, dtype, checkpoints)
    for part in (*states.layers, *states.checkpoints):
        for tensor in vars(part).values():
            tensor.fill_(torch.nan)
    return states


def step_context(
    counts: list[int], starts: list[int], slots: list[int], states: StateMemory, padding: int = 0,
    captures: list[tuple[int, int, int]] | None = None,
) -> ForwardContext:  # fmt: skip
    ends = np.cumsum(counts)
    return ForwardContext(
        positions=torch.zeros(int(ends[-1]) + padding, dtype=torch.int64),
        row_start=(ends - counts).astype(np.int32),
        lengths=np.array(counts, np.int32),
        starts=np.array(starts, np.int32),
        table_rows=np.array(slots, np.int32),
        block_tables=np.zeros((1, 1), np.int32),
        block_size=64,
        states=states,
        captures=np.array(captures or [], np.int32).reshape(-1, 3),
    )


def through_states(
    case: Case, layer: Layer, next_count: Callable[[int, int], int], padding: int = 0,
    lengths: tuple[int, ...] = LENGTHS,
) -> torch.Tensor:  # fmt: skip
    """The layer in steps: in each, sequence s computes its next ``next_count(s, done)`` tokens."""
    states = memory(case, layer.x.dtype, len(lengths) + 1)
    offsets = np.cumsum((0, *lengths))
    out = torch.empty(len(layer.x), case.shape.inner, dtype=layer.x.dtype)
    done = [0] * len(lengths)
    while any(have < length for have, length in zip(done, lengths, strict=True)):
        active = [s for s in np.random.default_rng(sum(done)).permutation(len(lengths)) if done[s] < lengths[s]]
        counts = [min(next_count(s, done[s]), lengths[s] - done[s]) for s in active]
        rows = np.concatenate([offsets[s] + done[s] + np.arange(n) for s, n in zip(active, counts, strict=True)])
        context = step_context(counts, [done[s] for s in active], [s + 1 for s in active], states, padding)
        result = layer.rows(rows, padding).run(context, case.options)
        assert not result[len(rows) :].any(), "padding rows must be zero"
        out[rows] = result[: len(rows)]
        for s, n in zip(active, counts, strict=True):
            done[s] += n
    return out


ROUTES: dict[str, Callable[[int, int], int]] = {
    "whole": lambda sequence, done: 1000,
    "token by token": lambda sequence, done: 1,
    "chunks": lambda sequence, done: (1, 7, 64, 3, 17, 2)[(sequence + done) % 6],
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_route_through_the_states_gives_the_training_bits(case: Case, dtype: torch.dtype) -> None:
    layer = layer_of(case, dtype)
    expected = layer.run(packed_context(), case.options)
    assert_near(expected, oracle(case, layer), 4)
    for number, route in enumerate(ROUTES):
        with threads(THREADS[number % len(THREADS)]):
            got = through_states(case, layer, ROUTES[route], padding=number % 3)
        assert torch.equal(got, expected), route


@settings(max_examples=25, deadline=None)
@given(lengths=st.lists(st.integers(1, 70), min_size=1, max_size=4).map(tuple), seed=st.integers(0, 2**16))
def test_any_chunking_of_any_lengths(lengths: tuple[int, ...], seed: int) -> None:
    case = CASES[1]
    layer = layer_of(case, torch.float32, lengths)
    rng = np.random.default_rng(seed)
    got = through_states(case, layer, lambda sequence, done: int(rng.integers(1, 40)), int(rng.integers(3)), lengths)
    assert torch.equal(got, layer.run(packed_context(lengths), case.options))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_bits_do_not_depend_on_layout_or_threads(case: Case) -> None:
    layer = layer_of(case, torch.float32)
    expected = layer.run(packed_context(), case.options)
    width = max(LENGTHS) + 3
    mask = torch.zeros(len(LENGTHS), width, dtype=torch.int64)
    for row, length in enumerate(LENGTHS):
        mask[row, width - length :] = 1  # left padding
    real = mask.flatten().bool()
    padded = replace(
        layer,
        x=torch.full((mask.numel(), layer.x.shape[1]), torch.nan),
        dt=torch.full((mask.numel(), case.heads), torch.nan),
    )
    padded.x[real], padded.dt[real] = layer.x, layer.dt
    for number in THREADS:
        with threads(number):
            out = padded.run(training_context(mask.shape, mask, None), case.options)
            assert torch.equal(out[real], expected)
            assert not out[~real].any()
            with torch.no_grad():
                assert torch.equal(layer.run(packed_context(), case.options), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_checkpoints_and_copies_continue_with_the_same_bits(dtype: torch.dtype) -> None:
    case, length = CASES[1], 77
    layer = layer_of(case, dtype, (length,))
    expected = layer.run(packed_context((length,)), case.options)
    states = memory(case, dtype, slots=3, checkpoints=5)
    calls = [(0, 40), (40, 41), (41, 64), (64, 70)]  # the third ends on a boundary
    captures = {0: [(0, 16, 0), (0, 32, 1)], 2: [(0, 48, 2), (0, 64, 3)]}
    for number, (start, end) in enumerate(calls):
        context = step_context([end - start], [start], [1], states, captures=captures.get(number))
        got = layer.rows(np.arange(start, end), 0).run(context, case.options)
        assert torch.equal(got, expected[start:end])
    states.take_checkpoint(1, 4)

    def go_on(slot: int, start: int) -> None:
        rows = np.arange(start, length)
        context = step_context([len(rows)], [start], [slot], states)
        assert torch.equal(layer.rows(rows, 0).run(context, case.options), expected[start:])

    for checkpoint, start in enumerate((16, 32, 48, 64, 64)):
        states.restore_checkpoint(checkpoint, 2)
        go_on(2, start)
    states.copy_slot(1, 0)
    go_on(0, 70)
    go_on(1, 70)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_are_near_the_oracle(case: Case, dtype: torch.dtype) -> None:
    layer = layer_of(case, dtype)
    upstream = torch.randn(sum(LENGTHS), case.shape.inner).to(dtype)
    exact = leaves(*(part.double() for part in layer.tensors()))
    oracle(case, Layer(*exact)).backward(upstream.double())
    mine = leaves(*layer.tensors())
    Layer(*mine).run(packed_context(), case.options).backward(upstream)
    for found, wanted in zip(mine, exact, strict=True):
        assert_near(found.grad.to(dtype), wanted.grad, 8)  # bfloat16: its rounding in between


def test_what_does_not_fit_is_named() -> None:
    case = CASES[0]
    layer = layer_of(case, torch.float32)
    with pytest.raises(ValueError, match="rows, the context 3"):
        layer.run(packed_context((3,)), case.options)
    with pytest.raises(TypeError, match="then three float32"):
        replace(layer, dt=layer.dt.bfloat16()).run(packed_context(), case.options)
    states = memory(case, torch.bfloat16, 1)
    context = step_context([sum(LENGTHS)], [0], [0], states)
    with pytest.raises(TypeError, match="changed its dtype"):
        layer.run(context, case.options)
    with pytest.raises(ValueError, match="captures"):
        step_context([5], [0], [0], states, captures=[(0, 64, 0)])
    context = step_context([60], [0], [0], memory(case, torch.float32, 1, 1), captures=[(0, 5, 0)])
    with pytest.raises(ValueError, match="chunk"):
        layer.rows(np.arange(60), 0).run(context, case.options)


def test_bytes_are_those_of_the_tensors() -> None:
    layout = StateLayout(3, CASES[0].shape, 64)
    states = layout.allocate(2, torch.bfloat16, 5)
    for parts, count, size in (
        (states.layers, 2, layout.bytes_per_slot(torch.bfloat16)),
        (states.checkpoints, 5, layout.bytes_per_checkpoint(torch.bfloat16)),
    ):
        assert sum(t.nbytes for part in parts for t in vars(part).values()) == count * size
    assert [len(part.state) for part in states.layers] == [2, 2, 2]
    assert all(
        a < b
        for a, b in pairwise((0, layout.bytes_per_checkpoint(torch.bfloat16), layout.bytes_per_slot(torch.bfloat16)))
    )
