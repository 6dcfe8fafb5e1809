"""The gated activation of two layers of one input has the bits of the layers' calls and of the activation."""

import pytest
import torch
from torch import nn

from samebit.kernels.binding.attached import attach
from samebit.kernels.binding.lora.forwards import linear_forward
from samebit.kernels.ops.activation import ACTIVATIONS, gated
from samebit.kernels.ops.layers.gated import gated_linears


def gate_and_up(inputs: int, outputs: int, dtype: torch.dtype = torch.float32, *, bias: bool = True) -> list[nn.Linear]:
    modules = [nn.Linear(inputs, outputs, bias).to(dtype) for _ in range(2)]
    for module in modules:
        attach(module, linear_forward)
    return modules


def each(activation: str, x: torch.Tensor, modules: list[nn.Linear]) -> torch.Tensor:
    gate, up = modules
    return gated(activation, gate(x), up(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_results_and_gradients_have_the_bits_of_calls_of_each(activation: str, dtype: torch.dtype) -> None:
    """Two layers in one call have the results and gradients of a call of each: of the input, of weights and biases, and
    where not all are wanted.
    """
    torch.manual_seed(0)
    modules = gate_and_up(100, 129, dtype)
    for frozen in (None, *modules):
        for module in modules:
            module.requires_grad_(module is not frozen)
        x, upstream, found = torch.randn(3, 7, 100), torch.randn(3, 7, 129).to(dtype), []
        for call in (gated_linears, each):
            given = x.to(dtype).requires_grad_()
            with torch.no_grad():
                alone = call(activation, given, modules)
            out = call(activation, given, modules)
            out.backward(upstream)
            parts = [part for module in modules for part in module.parameters()]
            found.append([alone, out, given.grad, *(part.grad for part in parts)])
            for part in parts:
                part.grad = None
        for one, other in zip(*found, strict=True):
            assert one is other is None or torch.equal(one, other)


def test_modules_are_called_where_a_hook_could_tell() -> None:
    torch.manual_seed(0)
    modules, heard = gate_and_up(20, 30, bias=False), []
    x = torch.randn(5, 20)
    plain = gated_linears("silu", x, modules)
    handle = modules[1].register_forward_hook(lambda *_: heard.append(1))
    assert torch.equal(gated_linears("silu", x, modules), plain)
    assert heard == [1]
    handle.remove()
    unbound = nn.Linear(20, 30)
    assert torch.equal(gated_linears("silu", x, [modules[0], unbound]), each("silu", x, [modules[0], unbound]))


def test_what_is_not_exact_is_refused() -> None:
    modules = gate_and_up(20, 30)
    with pytest.raises(ValueError, match="'tanh' is not exact"):
        gated_linears("tanh", torch.randn(5, 20), modules)
    with pytest.raises(ValueError, match=r"gate is \[5, 30\] and up \[5, 7\]"):
        gated_linears("silu", torch.randn(5, 20), [modules[0], gate_and_up(20, 7)[0]])
    with pytest.raises(ValueError, match=r"x is \[5, 21\]"):
        gated_linears("silu", torch.randn(5, 21), modules)
    assert gated_linears("silu", torch.randn(0, 20), modules).shape == (0, 30)
