"""The convolution and the scan in Triton: near the oracle by several routes through the states, and their gradients."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from samebit.kernels import device, reference
from samebit.kernels.context import ForwardContext, training_context
from samebit.kernels.conv import causal_conv
from samebit.kernels.ssd import scan
from samebit.kernels.states import SSMOptions, SSMShape, StateLayout, StateMemory

from .gpu import DEVICE, assert_near

LENGTHS = (1, 3, 17, 49)
BLOCK = 32


@pytest.fixture(autouse=True)
def _triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "on_gpu", lambda tensor: True)


@dataclass(frozen=True)
class Case:
    shape: SSMShape
    dt_limits: tuple[float, float] = (0.0, float("inf"))

    @property
    def options(self) -> SSMOptions:
        return SSMOptions(0, 16, self.shape.groups, self.shape.state_size, self.dt_limits)


CASES = (
    (Case(SSMShape(heads=4, head_dim=24, groups=2, state_size=100, taps=4)), torch.bfloat16),
    (Case(SSMShape(heads=5, head_dim=16, groups=1, state_size=24, taps=4)), torch.float32),
    (Case(SSMShape(heads=2, head_dim=33, groups=1, state_size=7, taps=2), (0.01, 0.5)), torch.float32),
)


@dataclass
class Layer:
    x: torch.Tensor
    dt: torch.Tensor
    weight: torch.Tensor
    conv_bias: torch.Tensor
    decay_rate: torch.Tensor
    dt_bias: torch.Tensor
    skip: torch.Tensor

    def run(self, context: ForwardContext, options: SSMOptions) -> torch.Tensor:
        convolved = causal_conv(self.x, self.weight, self.conv_bias, context, options)
        return scan(convolved, self.dt, self.decay_rate, self.dt_bias, self.skip, context, options)

    def moved(self) -> "Layer":
        """On the device, x and dt as parts of one matrix."""
        joined = torch.cat([self.x, self.dt], dim=1).to(DEVICE)
        width = self.x.shape[1]
        rest = {name: part.to(DEVICE) for name, part in vars(self).items() if name not in ("x", "dt")}
        return Layer(x=joined[:, :width], dt=joined[:, width:], **rest)

    def rows(self, rows: np.ndarray, padding: int) -> "Layer":
        x, dt = (
            torch.cat([part[rows], part.new_full((padding, part.shape[1]), torch.nan)]) for part in (self.x, self.dt)
        )
        return replace(self, x=x, dt=dt)


def layer_of(case: Case, dtype: torch.dtype) -> Layer:
    torch.manual_seed(case.shape.head_dim)
    shape, total = case.shape, sum(LENGTHS)
    return Layer(
        x=torch.randn(total, shape.conv_width).to(dtype),
        dt=torch.randn(total, shape.heads).to(dtype),
        weight=torch.randn(shape.conv_width, 1, shape.taps).to(dtype),
        conv_bias=torch.randn(shape.conv_width).to(dtype),
        decay_rate=-torch.rand(shape.heads) * 4,
        dt_bias=torch.randn(shape.heads) - 2,
        skip=torch.randn(shape.heads),
    )


def oracle(case: Case, layer: Layer) -> torch.Tensor:
    shape = case.shape
    sizes = [shape.inner, shape.groups * shape.state_size, shape.groups * shape.state_size]
    out = []
    for x, dt in zip(layer.x.split(LENGTHS), layer.dt.split(LENGTHS), strict=True):
        parts = reference.causal_conv(x, layer.weight, layer.conv_bias).split(sizes, -1)
        counts = (shape.heads, shape.groups, shape.groups)
        heads, b, c = (part.unflatten(-1, (n, -1)) for part, n in zip(parts, counts, strict=True))
        parameters = layer.decay_rate, layer.dt_bias, layer.skip
        out.append(reference.ssm_scan(heads, b, c, dt, *parameters, case.dt_limits).flatten(1))
    return torch.cat(out)


def memory(case: Case, dtype: torch.dtype, slots: int, checkpoints: int) -> StateMemory:
    """State memory that holds NaN everywhere."""
    states = StateLayout(1, case.shape, 16).allocate(slots, dtype, checkpoints)
    moved = [replace(part, **{n: x.fill_(torch.nan).to(DEVICE) for n, x in vars(part).items()}) for part in
             (*states.layers, *states.checkpoints)]  # fmt: skip
    return StateMemory(layers=(moved[0],), checkpoints=(moved[1],))  # type: ignore[arg-type]


def step_context(
    counts: list[int], starts: list[int], slots: list[int], states: StateMemory, captures: list[tuple[int, int, int]]
) -> ForwardContext:
    """With one row of padding."""
    ends = np.cumsum(counts)
    return ForwardContext(
        positions=torch.zeros(int(ends[-1]) + 1, dtype=torch.int64, device=DEVICE),
        row_start=(ends - counts).astype(np.int32),
        lengths=np.array(counts, np.int32),
        starts=np.array(starts, np.int32),
        table_rows=np.array(slots, np.int32),
        block_tables=np.zeros((len(LENGTHS) + 2, 1 + max(LENGTHS) // BLOCK), np.int32),
        block_size=BLOCK,
        states=states,
        captures=np.array(captures, np.int32).reshape(-1, 3),
    )


def through_states(case: Case, layer: Layer, next_count: Callable[[int, int], int]) -> torch.Tensor:
    """The layer in steps: in each, sequence s computes its next ``next_count(s, done)`` tokens."""
    states = memory(case, layer.x.dtype, len(LENGTHS) + 1, 0)
    offsets = np.cumsum((0, *LENGTHS))
    out = torch.empty(len(layer.x), case.shape.inner, dtype=layer.x.dtype)
    done = [0] * len(LENGTHS)
    while any(have < length for have, length in zip(done, LENGTHS, strict=True)):
        active = [s for s in np.random.default_rng(sum(done)).permutation(len(LENGTHS)) if done[s] < LENGTHS[s]]
        counts = [min(next_count(s, done[s]), LENGTHS[s] - done[s]) for s in active]
        rows = np.concatenate([offsets[s] + done[s] + np.arange(n) for s, n in zip(active, counts, strict=True)])
        context = step_context(counts, [done[s] for s in active], [s + 1 for s in active], states, [])
        result = layer.rows(rows, 1).moved().run(context, case.options).cpu()
        assert not result[len(rows) :].any(), "padding rows must be zero"
        out[rows] = result[: len(rows)]
        for s, n in zip(active, counts, strict=True):
            done[s] += n
    return out


def whole(sequence: int, done: int) -> int:
    return 1000


def chunks(sequence: int, done: int) -> int:
    return (1, 7, 16, 3, 17, 2)[(sequence + done) % 6]


@pytest.mark.parametrize(("case", "dtype"), CASES, ids=str)
def test_every_route_through_the_states_is_near_the_oracle(case: Case, dtype: torch.dtype) -> None:
    layer = layer_of(case, dtype)
    expected = oracle(case, layer)
    assert_near(through_states(case, layer, whole), expected, 4)
    assert_near(through_states(case, layer, chunks), expected, 4)


def test_a_checkpoint_continues_where_it_was_taken() -> None:
    case, dtype = CASES[1]
    layer = layer_of(case, dtype)
    first = sum(LENGTHS[:-1])
    expected = oracle(case, layer)[first:]
    states = memory(case, dtype, slots=3, checkpoints=2)

    def run(start: int, end: int, slot: int, captures: list[tuple[int, int, int]]) -> torch.Tensor:
        rows = layer.rows(np.arange(first + start, first + end), 1).moved()
        context = step_context([end - start], [start], [slot], states, captures)
        return rows.run(context, case.options)[:-1]

    run(0, 40, 1, [(0, 16, 0)])
    states.take_checkpoint(1, 1)  # as of token 32, the last block boundary
    states.restore_checkpoint(0, 2)
    assert_near(run(16, 49, 2, []), expected[16:], 4)
    states.restore_checkpoint(1, 2)
    assert_near(run(32, 49, 2, []), expected[32:], 4)
    assert_near(run(40, 49, 1, []), expected[40:], 4)


@pytest.mark.parametrize(("case", "dtype"), CASES, ids=str)
def test_gradients_are_near_the_oracle(case: Case, dtype: torch.dtype) -> None:
    layer = layer_of(case, dtype)
    mine = Layer(**{name: part.to(DEVICE, copy=True).requires_grad_() for name, part in vars(layer).items()})
    exact = Layer(**{name: part.double().requires_grad_() for name, part in vars(layer).items()})
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    context = replace(training_context((1, sum(LENGTHS)), None, positions), positions=positions[0].to(DEVICE))
    out, expected = mine.run(context, case.options), oracle(case, exact)
    assert_near(out, expected, 4)
    upstream = torch.randn(out.shape).to(dtype)
    out.backward(upstream.to(DEVICE))
    expected.backward(upstream.double())
    for name, part in vars(mine).items():
        gradient = vars(exact)[name].grad
        assert part.grad is not None, name
        assert_near(part.grad.to(dtype), gradient, 16 if dtype == torch.float32 else 8)
