"""The gates and the delta rule are near the oracle, with the same bits by any route through states, gradients too."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from samebit.kernels.cpu.base import small_tiles
from samebit.kernels.cpu.delta import panels
from samebit.kernels.layout.forward_context import training_context
from samebit.kernels.layout.grids import LANES
from samebit.kernels.layout.states.delta import DeltaShape
from samebit.kernels.layout.states.mamba import SSMShape
from samebit.kernels.layout.states.memory import StateLayout
from samebit.kernels.ops.delta.gates import gates
from samebit.kernels.ops.delta.rule import delta_rule

from .delta_layer import Case, Layer, layer_of, oracle, through_states
from .helpers import DTYPES, THREADS, assert_near, leaves, memory, threads
from .mamba_layer import step_context
from .routes import ROUTES, left_padding, packed_context, padded

pytestmark = pytest.mark.usefixtures("nan_in_empty")

LENGTHS = (1, 2, 3, 15, 16, 17, 50, 97)

CASES = (
    Case(DeltaShape(key_heads=2, value_heads=4, key_dim=24, value_dim=40, taps=4), 64),
    Case(DeltaShape(key_heads=3, value_heads=3, key_dim=7, value_dim=129, taps=2), 16, 2.0),
    Case(DeltaShape(key_heads=1, value_heads=4, key_dim=100, value_dim=16, taps=3), 64),
    Case(DeltaShape(key_heads=2, value_heads=2, key_dim=20, value_dim=33, taps=3, by_channel=True), 16),
)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_route_through_the_states_gives_the_training_bits(case: Case, dtype: torch.dtype) -> None:
    layer = layer_of(case, dtype, LENGTHS)
    expected = layer.run(packed_context(LENGTHS), case)
    assert_near(expected, oracle(case, layer, LENGTHS), 4)
    for number, route in enumerate(ROUTES):
        with threads(THREADS[number % len(THREADS)]):
            got = through_states(case, layer, LENGTHS, ROUTES[route], padding=number % 3)
        assert torch.equal(got, expected), route


@pytest.mark.parametrize(("rows", "wide", "panel"), [(5, 16, 32), (7, 144, 32), (3, 48, 128), (4, 384, 128)])
def test_a_state_that_is_read_panel_by_panel_is_read_in_one_stream(rows: int, wide: int, panel: int) -> None:
    places: list[int] = []
    columns = 0
    while columns < wide:
        first, stride, vectors = panels.place_in_panel.py_func(columns, rows, wide, panel)
        places += [first + n * stride + lane for n in range(rows) for lane in range(vectors * LANES)]
        columns += vectors * LANES
    assert places == list(range(rows * wide))


@pytest.mark.parametrize("at_once", [4, 16])
@pytest.mark.parametrize(("rows", "columns"), [(1, 8), (2, 8), (4, 4), (4, 1), (2, 1)])
def test_the_pieces_of_a_tile_have_each_column_once_and_sums_for_the_registers(
    rows: int, columns: int, at_once: int
) -> None:
    parts = small_tiles.pieces(rows, columns, at_once)
    assert [column for part in parts for column in part] == list(range(columns))
    assert max(rows * len(part) for part in parts) <= at_once
    assert len(parts) == -(-rows * columns // at_once)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_heads_that_forget_fast(case: Case) -> None:
    """Heads that forget fast, by e**-5 to e**-90 a token, stay near the oracle: what is left of a token passes through
    all sizes that a float32 can have.
    """
    layer = layer_of(case, torch.float32, LENGTHS)
    layer = replace(layer, dt_bias=layer.dt_bias + 9)
    expected = layer.run(packed_context(LENGTHS), case)
    assert_near(expected, oracle(case, layer, LENGTHS), 4)
    for route in ROUTES.values():
        assert torch.equal(through_states(case, layer, LENGTHS, route), expected)


@pytest.mark.parametrize("case", [CASES[0], CASES[-1]], ids=str)
def test_what_has_decayed_to_next_to_nothing_is_nothing(case: Case) -> None:
    """What has decayed to next to nothing counts as nothing: products of it would be subnormal, which some processors
    compute many times slower.
    """
    tokens = 40
    qkv, beta = torch.randn(tokens, case.shape.conv_width), torch.zeros(tokens, case.shape.value_heads)
    beta[0] = 1.0
    decay = torch.full((tokens, case.options.decays), -61.0)
    out = delta_rule(qkv, decay, beta, packed_context([tokens]), case.options)
    assert out[0].all()
    assert not out[1:].any()
    assert delta_rule(qkv, decay * torch.nan, beta, packed_context([tokens]), case.options)[1:].isnan().all()


def test_channels_that_decay_a_little_each_token_end_as_nothing() -> None:
    """A channel that loses e**-10 a token ends as nothing, before its numbers, below e**-60, become subnormal."""
    case, tokens = CASES[-1], 12
    qkv, beta = torch.randn(tokens, case.shape.conv_width), torch.zeros(tokens, case.shape.value_heads)
    beta[0] = 1.0
    decay = torch.full((tokens, case.options.decays), -10.0)
    out = delta_rule(qkv, decay, beta, packed_context([tokens]), case.options)
    assert out[:5].any(1).all()
    assert not out[7:].any()


@pytest.mark.parametrize("case", [CASES[0], CASES[-1]], ids=str)
def test_what_has_decayed_to_next_to_nothing_has_no_gradient(case: Case) -> None:
    tokens = 80
    qkv = torch.randn(tokens, case.shape.conv_width, requires_grad=True)
    beta = torch.rand(tokens, case.shape.value_heads, requires_grad=True)
    decay = torch.zeros(tokens, case.options.decays)
    decay[40] = -61.0
    out = delta_rule(qkv, decay, beta, packed_context([tokens]), case.options)
    for part in torch.autograd.grad(out[40:].sum(), (qkv, beta)):
        assert part[41:].any()
        assert not part[:40].any()


@settings(max_examples=25, deadline=None)
@given(lengths=st.lists(st.integers(1, 50), min_size=1, max_size=4).map(tuple), seed=st.integers(0, 2**16))
def test_any_chunking_of_any_lengths(lengths: tuple[int, ...], seed: int) -> None:
    case = CASES[seed % len(CASES)]
    layer = layer_of(case, torch.float32, lengths)
    rng = np.random.default_rng(seed)
    got = through_states(
        case, layer, lengths, lambda sequence, done: int(rng.integers(1, 40)), padding=int(rng.integers(3))
    )
    assert torch.equal(got, layer.run(packed_context(lengths), case))


def test_bits_do_not_depend_on_layout_or_threads() -> None:
    case = CASES[0]
    layer = layer_of(case, torch.float32, LENGTHS)
    expected = layer.run(packed_context(LENGTHS), case)
    mask = left_padding(LENGTHS)
    real = mask.flatten().bool()
    spread = Layer(*(padded(part, mask) for part in layer.tensors[:3]), *layer.tensors[3:])
    for number in THREADS:
        with threads(number):
            out = spread.run(training_context(mask.shape, mask, None), case)
            assert torch.equal(out[real], expected)
            assert not out[~real].any()
            with torch.no_grad():
                assert torch.equal(layer.run(packed_context(LENGTHS), case), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_checkpoints_and_copies_continue_with_the_same_bits(dtype: torch.dtype) -> None:
    case, length = CASES[1], 77
    layer = layer_of(case, dtype, (length,))
    expected = layer.run(packed_context((length,)), case)
    states = memory(case, dtype, slots=3, checkpoints=5)
    calls = [(0, 40), (40, 41), (41, 64), (64, 70)]  # the third ends on a boundary
    captures = {0: [(0, 16, 0), (0, 32, 1)], 2: [(0, 48, 2), (0, 64, 3)]}
    for number, (start, end) in enumerate(calls):
        context = step_context([end - start], [start], [1], states, captures=captures.get(number, ()))
        got = layer.rows(np.arange(start, end)).run(context, case)
        assert torch.equal(got, expected[start:end])
    states.take_checkpoints([(1, 4)])

    def go_on(slot: int, start: int) -> None:
        rows = np.arange(start, length)
        context = step_context([len(rows)], [start], [slot], states)
        assert torch.equal(layer.rows(rows).run(context, case), expected[start:])

    for checkpoint, start in enumerate((16, 32, 48, 64, 64)):
        states.restore_checkpoints([(checkpoint, 2)])
        go_on(2, start)
    states.copy_slots([(1, 0)])
    go_on(0, 70)
    go_on(1, 70)


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        (CASES[0], torch.bfloat16),
        (CASES[1], torch.float32),
        (CASES[2], torch.float32),
        (CASES[3], torch.float32),
        (CASES[3], torch.bfloat16),
    ],
    ids=str,
)
def test_gradients_are_near_the_oracle(case: Case, dtype: torch.dtype) -> None:
    lengths = (1, 17, 70)  # the last one goes on in a second chunk of the gradients
    layer = layer_of(case, dtype, lengths)
    upstream = torch.randn(sum(lengths), case.shape.inner).to(dtype)
    exact = leaves(*(part.double() for part in layer.tensors))
    oracle(case, Layer(*exact), lengths).backward(upstream.double())
    mine = leaves(*layer.tensors)
    Layer(*mine).run(packed_context(lengths), case).backward(upstream)
    for found, wanted in zip(mine, exact, strict=True):
        assert_near(found.grad.to(dtype), wanted.grad, 8)  # bfloat16: its rounding in between


class _Products(TorchDispatchMode):
    """Notes which matrix products of float32 are torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        single = any(isinstance(arg, torch.Tensor) and arg.dtype is torch.float32 for arg in args)
        if single and (name.endswith("mm") or "solve" in name):
            self.found.add(name)
        return func(*args, **kwargs or {})


def test_gradients_by_channel_do_not_depend_on_how_torch_multiplies() -> None:
    """A trainer may let torch multiply float32 in TF32; on a CPU, in bfloat16."""
    case, lengths = Case(DeltaShape(2, 2, key_dim=64, value_dim=64, taps=3, by_channel=True), 16), (70, 70)
    options, rows = case.options, sum(lengths)
    torch.manual_seed(0)
    given = torch.randn(rows, case.shape.conv_width), -torch.rand(rows, options.decays), torch.rand(rows, 2)
    upstream, products = torch.randn(rows, case.shape.inner), _Products()

    def gradients() -> list[torch.Tensor]:
        found = leaves(*given)
        with products:
            delta_rule(*found, packed_context(lengths), options).backward(upstream)
        return [one.grad for one in found]

    before = torch.get_float32_matmul_precision()
    expected = gradients()
    torch.set_float32_matmul_precision("medium")
    try:
        found = gradients()
    finally:
        torch.set_float32_matmul_precision(before)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert not products.found


def test_padding_rows_reach_no_gradient() -> None:
    case = CASES[0]
    rows, heads = sum(LENGTHS), case.shape.value_heads
    torch.manual_seed(0)
    mask = left_padding(LENGTHS)
    real = mask.flatten().bool()
    given = torch.randn(rows, case.shape.conv_width), -torch.rand(rows, heads), torch.rand(rows, heads)
    upstream = torch.randn(rows, case.shape.inner)
    expected, found = leaves(*given), leaves(*(padded(part, mask) for part in given))
    delta_rule(*expected, packed_context(LENGTHS), case.options).backward(upstream)
    context = training_context(mask.shape, mask, None)
    delta_rule(*found, context, case.options).backward(padded(upstream, mask))
    for one, other in zip(found, expected, strict=True):
        assert not one.grad[~real].any(), "of padding rows"
        assert_near(one.grad[real], other.grad)


def test_what_does_not_fit_is_named() -> None:
    case = CASES[0]
    layer = layer_of(case, torch.float32, LENGTHS)
    convolved, heads = layer.qkv.contiguous(), case.shape.value_heads
    decay, beta = gates(layer.a, layer.b, layer.a_log, layer.dt_bias)
    context = packed_context(LENGTHS)
    with pytest.raises(ValueError, match="rows, the context 3"):
        delta_rule(convolved, decay, beta, packed_context((3,)), case.options)
    with pytest.raises(ValueError, match="key heads that divide the value heads"):
        replace(case.options, key_heads=3)
    with pytest.raises(ValueError, match=r"qkv is .* allowed: \[T, 256\]"):
        delta_rule(convolved[:, 1:], decay, beta, context, case.options)
    with pytest.raises(ValueError, match="beta has the shape"):
        delta_rule(convolved, decay, beta[:, 1:], context, case.options)
    with pytest.raises(TypeError, match="allowed: float32"):
        delta_rule(convolved, decay.double(), beta, context, case.options)
    with pytest.raises(TypeError, match="float16"):
        delta_rule(convolved.half(), decay, beta, context, case.options)
    with pytest.raises(ValueError, match="a_log has the shape"):
        gates(layer.a, layer.b, layer.a_log[1:], layer.dt_bias)
    with pytest.raises(TypeError, match="two alike"):
        gates(layer.a, layer.b.bfloat16(), layer.a_log, layer.dt_bias)
    with pytest.raises(ValueError, match=r"two alike, \[T, H\]"):
        gates(layer.a, layer.b[:, : heads - 1], layer.a_log, layer.dt_bias)


def test_states_that_do_not_fit_are_named() -> None:
    case = CASES[0]
    layer = layer_of(case, torch.float32, (60,))
    other_dtype = step_context([60], [0], [0], memory(case, torch.bfloat16, 1))
    with pytest.raises(TypeError, match="changed its dtype"):
        layer.run(other_dtype, case)
    context = step_context([60], [0], [0], memory(case, torch.float32, 1, 1), captures=[(0, 5, 0)])
    decay, beta = gates(layer.a, layer.b, layer.a_log, layer.dt_bias)
    convolved = layer.qkv.contiguous()
    with pytest.raises(ValueError, match="chunk"):
        delta_rule(convolved, decay, beta, context, case.options)
    context = step_context([60], [0], [2], memory(case, torch.float32, 1))
    with pytest.raises(ValueError, match="slot 2 is to be read; the layer has 1"):
        delta_rule(convolved, decay, beta, context, case.options)
    whole = memory(case, torch.float32, 2)
    fewer_tails = replace(whole, layers=(replace(whole.layers[0], tail_k=whole.layers[0].tail_k[:1]),))
    with pytest.raises(ValueError, match="slot 1 is to be read; the layer has 1"):
        delta_rule(convolved, decay, beta, step_context([60], [0], [1], fewer_tails), case.options)
    other = replace(case.shape, key_heads=4, value_heads=4, key_dim=8)
    context = step_context([60], [0], [0], memory(replace(case, shape=other), torch.float32, 1))
    with pytest.raises(ValueError, match="the layer's state has the shape"):
        delta_rule(convolved, decay, beta, context, case.options)
    mamba = StateLayout(1, SSMShape(4, 24, 2, 8, 4), 64).allocate(1, torch.float32)
    with pytest.raises(TypeError, match="SSMStates; allowed: DeltaStates"):
        delta_rule(convolved, decay, beta, step_context([60], [0], [0], mamba), case.options)


def test_bytes_are_those_of_the_tensors() -> None:
    layout = StateLayout(3, CASES[0].shape, 64)
    states = layout.allocate(2, torch.bfloat16, 5)
    slot, checkpoint = layout.bytes_per_slot(torch.bfloat16), layout.bytes_per_checkpoint(torch.bfloat16)
    for parts, count, size in ((states.layers, 2, slot), (states.checkpoints, 5, checkpoint)):
        assert sum(tensor.nbytes for part in parts for tensor in vars(part).values()) == count * size
    assert all(a < b for a, b in pairwise((0, checkpoint, slot)))
