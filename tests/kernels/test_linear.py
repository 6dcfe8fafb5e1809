"""A row of the linear layer has its own bits, whatever is multiplied beside it, wherever, and by how many threads."""

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from samebit.kernels.binding.attached import attach
from samebit.kernels.binding.lora.forwards import linear_forward
from samebit.kernels.cpu import linear as cpu_linear
from samebit.kernels.cpu.transpose import transposed
from samebit.kernels.ops.linear import linear, linears

from ..forks import python
from .helpers import DTYPES, THREADS, threads

SHAPES = [(1, 1), (5, 7), (100, 129), (129, 100), (256, 256), (1000, 33), (2500, 300)]
ROWS = (1, 2, 3, 7, 16, 17, 48, 64, 65, 130, 300)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_a_row_has_the_same_bits_among_any_number_of_rows(
    inputs: int, outputs: int, biased: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(inputs)
    x, weight = torch.randn(300, inputs).to(dtype), torch.randn(outputs, inputs).to(dtype)
    bias = torch.randn(outputs).to(dtype) if biased else None
    alone = torch.cat([linear(row, weight, bias) for row in x.split(1)])
    for number in THREADS:
        with threads(number):
            for rows in ROWS:
                assert torch.equal(linear(x[-rows:], weight, bias), alone[-rows:])


@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_linear_is_near_the_float64_oracle(inputs: int, outputs: int) -> None:
    torch.manual_seed(inputs)
    x, weight, bias = torch.randn(70, inputs), torch.randn(outputs, inputs), torch.randn(outputs)
    oracle = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    assert (linear(x, weight, bias) - oracle).abs().max() < 4e-7 * inputs**0.5 * 4


@pytest.mark.parametrize("rows", [1, 63, 64, 65, 300])
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_gradients_are_near_float64_and_do_not_depend_on_threads(
    inputs: int, outputs: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """samebit's own gradients are near float64 and the same by any number of threads. They are taken without AVX-512
    too, where otherwise torch's products would be.
    """
    monkeypatch.setattr(cpu_linear, "REGISTERS", 32)
    torch.manual_seed(inputs)
    x, weight = torch.randn(rows, 2 * inputs)[:, inputs:], torch.randn(outputs, inputs)  # a part of a wider matrix
    grad = torch.randn(outputs, rows).T
    found = [gradients(x, weight, grad, number) for number in THREADS]
    wide = gradients(x.double(), weight.double(), grad.double(), 1, torch.nn.functional.linear)
    for of_one, *others, oracle in zip(*found, wide, strict=True):
        assert all(torch.equal(of_one, other) for other in others)
        assert (of_one - oracle).norm() < 1e-6 * oracle.norm()


@pytest.mark.usefixtures("nan_in_empty")
@pytest.mark.parametrize("shape", [(0, 5), (1, 1), (1, 40), (15, 16), (16, 17), (100, 129), (1030, 1040)])
def test_a_matrix_is_turned_over(shape: tuple[int, int]) -> None:
    """A matrix of any size is turned over, also a part of a wider one; one that lies so already is not copied."""
    matrix, wide = torch.randn(shape), torch.randn(shape[0], shape[1] + 3)[:, 2:-1]
    for number in THREADS:
        with threads(number):
            for given in (matrix, wide):
                assert torch.equal(transposed(given), given.t())
                assert transposed(given).is_contiguous()
    turned = torch.randn(shape).t()
    assert transposed(turned).data_ptr() == turned.data_ptr()


def gradients(
    x: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor, number: int, layer: Callable[..., torch.Tensor] = linear
) -> tuple[torch.Tensor, ...]:
    """Return the gradients of x and weight."""
    given = x.detach().requires_grad_(), weight.detach().requires_grad_()
    with threads(number):
        return torch.autograd.grad(layer(*given), given, grad)


@pytest.mark.parametrize("inputs", [1, 5, 15, 16, 17, 31, 100, 129, 1000])
def test_few_rows_have_the_bits_they_have_among_many(inputs: int, arithmetic: torch.dtype) -> None:
    torch.manual_seed(inputs)
    dtype = arithmetic
    x = torch.randn(130, 2 * inputs).to(dtype)[:, 1 : 1 + inputs]
    for outputs in (1, 5, 15, 16, 17, 31, 100, 129, 1000):
        weight, bias = torch.randn(outputs, inputs).to(dtype), torch.randn(outputs).to(dtype)
        for added in (None, bias):
            among_many = linear(x, weight, added)
            for number in (1, 2):
                with threads(number):
                    for rows in (1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 24, 25, 33, 41, 49, 57):
                        assert torch.equal(linear(x[-rows:], weight, added), among_many[-rows:])


_AT_THE_END_OF_MEMORY = """
import ctypes, mmap
import samebit.kernels
import torch
from samebit.kernels.cpu.gemm import amx_tiles, dots_vectors
from samebit.kernels.layout.options import ExpertOptions, ExpertWeights
from samebit.kernels.ops.experts.routed import routed_experts
from samebit.kernels.ops.linear import linear
amx_tiles.available = lambda: False
pairs = dots_vectors.available()
pages = mmap.mmap(-1, 17 * mmap.PAGESIZE)
last = ctypes.addressof(ctypes.c_char.from_buffer(pages)) + 16 * mmap.PAGESIZE
assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(last), mmap.PAGESIZE, 0) == 0, 'neither read nor written'

def experts(x, down, transposed):  # one of them, whose second product has the weight
    up = torch.ones(1, *down.shape[:0:-1], dtype=x.dtype)
    ids, one = torch.zeros(len(x), 1, dtype=torch.int32), torch.ones(len(x), 1)
    return routed_experts(x, ids, one, ExpertWeights(up, down), ExpertOptions("relu2", "plain", transposed))

for dtype, used in ((torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, pairs)):
    dots_vectors.available = lambda: used
    for outputs, inputs in ((1, 1), (3, 7), (15, 8), (16, 17), (17, 31), (33, 129)):
        begin = 16 * mmap.PAGESIZE - outputs * inputs * dtype.itemsize
        weight = torch.frombuffer(pages, dtype=dtype, count=outputs * inputs, offset=begin).view(outputs, inputs)
        weight.copy_(torch.randn(outputs, inputs))
        for rows in (1, 2, 3, 8, 9, 20, 65):
            x = torch.randn(rows, inputs).to(dtype)
            assert torch.equal(linear(x, weight), linear(x, weight.clone()))
            for transposed in (False, True):
                y = torch.randn(rows, inputs if transposed else outputs).to(dtype)
                assert torch.equal(experts(y, weight[None], transposed), experts(y, weight.clone()[None], transposed))
print("read no further")
"""


def test_nothing_is_read_beyond_the_weight(tmp_path: Path) -> None:
    found = subprocess.run(
        [*python(), "-c", _AT_THE_END_OF_MEMORY], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "read no further"


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_infinity_stay_in_their_row(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(40, 129).to(dtype), torch.randn(77, 129).to(dtype)
    clean = linear(x, weight)
    x[3, 0], x[4, 128], x[5, 7] = torch.nan, torch.inf, -torch.inf
    found = linear(x, weight)
    assert found[3].isnan().all()
    assert not found[4:6].isfinite().any()
    assert torch.equal(found[6:], clean[6:])
    assert torch.equal(found[:3], clean[:3])


@pytest.mark.usefixtures("_plain_processor")
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_bfloat16_without_instructions_for_it_is_float32_rounded_once(inputs: int, outputs: int) -> None:
    torch.manual_seed(inputs)
    x, weight, bias = (torch.randn(shape).bfloat16() for shape in ((70, inputs), (outputs, inputs), (outputs,)))
    x[3, 0], x[4, 0], x[5, 0] = torch.nan, torch.inf, -torch.inf
    exact = linear(x.float(), weight.float(), bias.float()).bfloat16()
    found = linear(x, weight, bias)
    assert torch.equal(found.isnan(), exact.isnan())
    assert torch.equal(found.nan_to_num(nan=7.0), exact.nan_to_num(nan=7.0)), "infinities too"


@pytest.mark.parametrize("dtype", DTYPES)
def test_operands_may_lie_anywhere(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    joined, wide = torch.randn(37, 3, 2 * 129 + 1).to(dtype), torch.randn(2 * 77, 300).to(dtype)
    x, weight = joined[..., 5 : 5 + 129], wide[::2, 3 : 3 + 129]
    expected = linear(x.contiguous(), weight.contiguous())
    assert torch.equal(linear(x, weight), expected)
    assert torch.equal(linear(x.transpose(0, 1), weight), expected.transpose(0, 1))
    assert torch.equal(linear(x, weight.T.contiguous().T), expected)
    assert linear(x[:0], weight).shape == (0, 3, 77)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 3, 7, 64])
def test_rows_may_overlap(rows: int, dtype: torch.dtype) -> None:
    """Rows may overlap: those of an expanded tensor are one row, and a turned column's next row begins at the next
    element.
    """
    torch.manual_seed(rows)
    value, upstream = torch.randn(1, 1030).to(dtype), torch.randn(rows, 77).to(dtype)
    weight = torch.randn(77, 1030).to(dtype).requires_grad_()
    turned = value.clone().reshape(1030, 1).t()
    whole = value.repeat(rows, 1)
    expected = linear(whole, weight)
    for x in (value.expand(rows, -1), turned.expand(rows, -1), turned)[: 3 if rows == 1 else 2]:
        assert torch.equal(linear(x, weight), expected)
        (found,) = torch.autograd.grad(linear(x, weight), weight, upstream)
        (wanted,) = torch.autograd.grad(linear(whole, weight), weight, upstream)
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_are_near_the_float64_oracle(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    values = [torch.randn(shape).to(dtype) for shape in ((3, 21, 100), (129, 100), (129,))]
    mine = [value.clone().requires_grad_() for value in values]
    exact = [value.double().requires_grad_() for value in values]
    upstream = torch.randn(3, 21, 129).to(dtype)
    linear(*mine).backward(upstream)
    torch.nn.functional.linear(*exact).backward(upstream.double())
    for a, b in zip(mine, exact, strict=True):
        assert (a.grad - b.grad).norm() < {torch.float32: 1e-6, torch.bfloat16: 1e-2}[dtype] * b.grad.norm()


@pytest.mark.usefixtures("_plain_processor")
def test_gradients_in_bfloat16_are_those_in_float32_where_there_are_no_instructions_for_it() -> None:
    """Gradients in bfloat16 are those in float32, rounded, where the processor has no instructions for bfloat16: torch
    takes up to a hundred times as long to multiply it there.
    """
    torch.manual_seed(1)
    x, weight, grad = (torch.randn(shape).bfloat16() for shape in ((7, 100), (129, 100), (7, 129)))
    found = gradients(x, weight, grad, 1)
    exact = gradients(x.float(), weight.float(), grad.float(), 1)
    assert all(torch.equal(one, other.bfloat16()) for one, other in zip(found, exact, strict=True))


def test_only_the_gradients_that_are_asked_for() -> None:
    x, weight = torch.randn(5, 8), torch.randn(20, 8, requires_grad=True)
    linear(x, weight).sum().backward()
    assert x.grad is None
    assert torch.allclose(weight.grad, x.sum(0).expand(20, 8), atol=1e-5)
    with torch.no_grad():
        assert not linear(x, weight).requires_grad


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"x is \[2, 5\], weight \[3, 4\], bias None; allowed: \[\.\.\., K\], \[N, K\]"
    ):
        linear(torch.ones(2, 5), torch.ones(3, 4))
    with pytest.raises(ValueError, match=r"bias \[4\]"):
        linear(torch.ones(2, 4), torch.ones(3, 4), torch.ones(4))


@pytest.mark.parametrize(
    ("x", "weight"),
    [(torch.float64, torch.float64), (torch.float16, torch.float16), (torch.float32, torch.bfloat16)],
)
def test_dtypes_that_are_not_exact_are_refused(x: torch.dtype, weight: torch.dtype) -> None:
    with pytest.raises(TypeError, match=f"x is {x}, weight {weight}, bias None; allowed: all alike, of torch.float32"):
        linear(torch.ones(2, 4, dtype=x), torch.ones(3, 4, dtype=weight))


_DIGEST = """
import hashlib, sys
import samebit.kernels
import torch
from torch import nn
from samebit.kernels.cpu.gemm.many_rows_vectors import VECTORS
from samebit.kernels.ops.linear import linear, linears
print(VECTORS)
for name in sys.argv[1:]:
    torch.manual_seed(0)
    x, weight, bias = (torch.randn(shape).to(getattr(torch, name)) for shape in ((83, 301), (129, 301), (129,)))
    out = torch.cat([linear(rows, weight, bias).float() for rows in (x, x[:5])])
    print(hashlib.sha256(out.numpy().tobytes()).hexdigest())
"""


@pytest.mark.usefixtures("_plain_processor")
def test_the_bits_do_not_depend_on_the_vectors_of_the_processor(tmp_path: Path) -> None:
    digests = []
    for dtype in DTYPES:
        torch.manual_seed(0)
        x, weight, bias = (torch.randn(shape).to(dtype) for shape in ((83, 301), (129, 301), (129,)))
        out = torch.cat([linear(rows, weight, bias).float() for rows in (x, x[:5])])
        digests.append(hashlib.sha256(out.numpy().tobytes()).hexdigest())
    environment = {
        **os.environ, "NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx2,+fma", "NUMBA_CACHE_DIR": str(tmp_path)
    }  # fmt: skip
    found = subprocess.run(
        [sys.executable, "-c", _DIGEST, *(str(dtype).removeprefix("torch.") for dtype in DTYPES)],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.split() == ["1", *digests]


def bound(inputs: int, outputs: int, bias: bool = True) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias)
    attach(layer, linear_forward)
    return layer


@pytest.mark.parametrize("inputs", [100, 129, 256, 1000, 1030])
@pytest.mark.parametrize("outputs", [(3,), (1, 2, 3), (5, 7, 300), (256, 128, 128), (600, 13)])
def test_layers_of_one_input_have_the_bits_of_each_by_itself(inputs: int, outputs: tuple[int, ...]) -> None:
    torch.manual_seed(inputs)
    layers = [bound(inputs, width, bias=number != 1) for number, width in enumerate(outputs)]
    for number in THREADS:
        with threads(number), torch.no_grad():
            for rows in (1, 2, 3, 7, 64, 65, 300):
                x = torch.randn(rows, inputs)
                for product, layer in zip(linears(x, layers), layers, strict=True):
                    assert torch.equal(product, linear(x, layer.weight, layer.bias))


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_through_layers_of_one_input_have_the_bits_of_calls_of_each(dtype: torch.dtype) -> None:
    """Layers of one input in one call have the gradients of a call of each: of the input, of all weights and biases,
    and where only some of them are wanted.
    """
    torch.manual_seed(0)
    layers = [bound(100, width, bias=number != 1).to(dtype) for number, width in enumerate((129, 7, 33))]
    for frozen in ((), (0,), (0, 1, 2)):
        for number, layer in enumerate(layers):
            layer.requires_grad_(number not in frozen)
        x, found = torch.randn(3, 7, 100).to(dtype), []
        upstream = [torch.randn(3, 7, layer.out_features).to(dtype) for layer in layers]
        for call in (linears, lambda given, modules: [module(given) for module in modules]):
            given = x.clone().requires_grad_()
            torch.autograd.backward(call(given, layers), upstream)
            parts = [part for layer in layers for part in layer.parameters()]
            found.append([given.grad, *(part.grad for part in parts)])
            for part in parts:
                part.grad = None
        for one, other in zip(*found, strict=True):
            assert one is other is None or torch.equal(one, other)


def test_layers_of_one_input_are_called_when_they_do_more() -> None:
    """Layers are called one by one where they do more: hooks, adapters in their place, other dtypes; and torch's own
    too.
    """
    torch.manual_seed(0)
    layers = [bound(20, width) for width in (30, 40)]
    x, heard = torch.randn(5, 20), []
    handle = layers[1].register_forward_hook(lambda *_: heard.append(1))
    with torch.no_grad():
        linears(x, layers)
        assert heard == [1]
        handle.remove()
        adapted = nn.Sequential(layers[0], nn.Linear(30, 8))
        assert linears(x, [adapted, layers[1]])[0].shape == (5, 8)
        assert linears(x.bfloat16(), [layer.bfloat16() for layer in layers])[0].dtype == torch.bfloat16
    layers[1].register_full_backward_hook(lambda *_: heard.append(2))
    products = linears(x.requires_grad_(), [layer.float() for layer in layers])
    assert all(product.requires_grad for product in products)
    torch.autograd.backward(products, [torch.ones_like(product) for product in products])
    assert heard == [1, 2]
    unbound = nn.Linear(20, 3)
    product = linears(x.detach(), [bound(20, 3), unbound])[1]
    assert torch.equal(product, nn.functional.linear(x, unbound.weight, unbound.bias))
