"""A residual and its norm in one launch have the values and gradients of torch's sum and the norm in training.

The interpreter truncates to bfloat16, where a GPU and torch round: there sums are of numbers that it holds.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from samebit.kernels.binding.residual import Addend, WaitingSum
from samebit.kernels.triton import norm

from .gpu import DEVICE
from .launches import launches
from .test_residual import Norm


@pytest.fixture(autouse=True)
def _nothing_known(on_gpu: None) -> Iterator[None]:
    norm._sums_in_one_launch.cache_clear()
    yield
    norm._sums_in_one_launch.cache_clear()


class Whole(torch.autograd.Function):
    """Rounds to integers, whose sums bfloat16 holds; its gradient is that of its input."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


class Layer(nn.Module):
    """Has two norms, each of a sum, as a layer of Hugging Face's between two others."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.first, self.second = Norm(width).to(dtype), Norm(width).to(dtype)
        self.adds: Callable[[torch.Tensor], torch.Tensor] = Addend.of

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = x + self.adds(Whole.apply(self.first(x)))
        return hidden + self.adds(Whole.apply(self.second(hidden)))


class Model(nn.Module):
    """Has layers and the norm behind the last; ``around`` calls one."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(width)
        self.layers = nn.ModuleList([Layer(width, dtype) for _ in range(2)])
        self.norm = Norm(width).to(dtype)

    def forward(self, x: torch.Tensor, around: Callable[..., torch.Tensor] | None = None) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x) if around is None else around(layer, x)
        return self.norm(x)

    def apart(self) -> "Model":
        for layer in self.layers:
            layer.adds = lambda x: x
        return self


def given(width: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randint(-60, 60, (1, 7, width), device=DEVICE).to(dtype)


def gradients(model: nn.Module, x: torch.Tensor, **how: Any) -> list[torch.Tensor]:
    """Return the result, and gradients of the rows and of all weights."""
    x = x.clone().requires_grad_()
    model.zero_grad()
    out = model(x, **how)
    out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out))
    return [out, *(part.grad for part in (x, *model.parameters()))]


def assert_equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
        assert type(one) is torch.Tensor


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [100, 129])
def test_values_and_gradients_have_the_bits_of_a_launch_each(
    width: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(norm, "added_equal", lambda *_: True)
    model, x = Model(width, dtype), given(width, dtype)
    with launches() as names:
        found = gradients(model, x)
    assert [names.count(name) for name in ("_norm_sums", "_norm_rows", "aten.add.Tensor")] == [4, 1, 4]
    with launches() as apart:
        expected = gradients(model.apart(), x)
    assert [apart.count(name) for name in ("_norm_sums", "_norm_rows", "aten.add.Tensor")] == [0, 5, 8]
    assert_equal(found, expected)


AROUND: dict[str, Callable[..., torch.Tensor]] = {
    "reentrant": lambda layer, x: checkpoint(layer, x, use_reentrant=True),
    "not reentrant": lambda layer, x: checkpoint(layer, x, use_reentrant=False),
    "saved elsewhere": lambda layer, x: saved_as_copies(layer, x),
}


def saved_as_copies(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Copy at once what is saved, as `save_on_cpu` and offloading do."""
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda saved: saved):
        return layer(x)


@pytest.mark.parametrize("name", AROUND)
def test_gradients_that_are_computed_again_or_from_copies(name: str) -> None:
    model, x = Model(100, torch.float32), given(100)
    found = gradients(model, x, around=AROUND[name])
    assert_equal(found, gradients(model.apart(), x))


class Untouched(torch.autograd.Function):
    """Reads nothing; torch itself makes a view of what it hands on."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return grad * 2.0 + x


def untouched_and_copied(x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda saved: saved):
        return Untouched.apply(x)


def unseen(x: torch.Tensor) -> torch.Tensor:
    """Call torch as its own code for other classes of tensors does."""
    with torch._C.DisableTorchFunctionSubclass():
        return torch.exp(x)


def weighed(x: torch.Tensor) -> torch.Tensor:
    x.register_hook(lambda grad: grad * 3.0)
    return x


def written(x: torch.Tensor) -> torch.Tensor:
    return x.mul_(2.0)


def written_in_a_view(x: torch.Tensor) -> torch.Tensor:
    x[:, 1:3].mul_(2.0)
    return x


READERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a function": torch.exp,
    "a method": lambda x: x.exp(),
    "a square": lambda x: x * x,
    "a view": lambda x: x[:, :, :50].repeat(1, 1, 2),
    "no gradient": lambda x: x.detach() * x,
    "a function that reads nothing": Untouched.apply,
    "a function that reads nothing, saved as a copy": untouched_and_copied,
    "a function that Python does not see": unseen,
    "a hook of its gradient": weighed,
    "written": written,
    "a view that is written": written_in_a_view,
    "one more": lambda x: x + Addend.of(torch.ones(1, 7, 100, device=DEVICE)),
    "elements": lambda x: x * x.tolist()[0][2][3],
    "text": lambda x: x * float(repr(x).split("[[[")[1].split(",")[0]),
}


@pytest.mark.parametrize("name", READERS)
def test_gradients_flow_through_whatever_reads_a_sum(name: str) -> None:
    """Gradients flow through whatever reads a sum before its norm does, such as a hook of the norm; and the norm, and
    who comes behind it, read the same.
    """
    found = []
    for adds in (Addend.of, lambda x: x):
        torch.manual_seed(0)
        second = Norm(100)
        second.register_forward_pre_hook(lambda module, args: (READERS[name](args[0]),))
        x, y = (torch.randn(1, 7, 100, device=DEVICE).requires_grad_() for _ in range(2))
        hidden = x * 1.5 + adds(y * 0.5)
        if adds is Addend.of:
            assert isinstance(hidden, WaitingSum)
            assert hidden.parts is not None
        out = second(hidden)
        loss = (out * torch.arange(100, device=DEVICE)).sum() + (hidden * hidden).sum()
        found.append([loss, *torch.autograd.grad(loss, (x, y, second.weight))])
    assert_equal(*found)


def test_modules_with_hooks_that_take_and_change_gradients() -> None:
    found = []
    for adds in (Addend.of, lambda x: x):
        model = Model(100, torch.float32)
        for layer in model.layers:
            layer.adds = adds
        heard: list[torch.Tensor] = []
        for module in model.modules():
            module.register_forward_hook(lambda module, args, out, heard=heard: heard.append(out.detach().clone()))
            module.register_full_backward_hook(lambda module, given, out: (given[0] * 2.0,))
        found.append(gradients(model, given(100)) + heard)
    assert_equal(*found)


def test_a_graph_that_is_kept_and_gradients_of_sums() -> None:
    """What is kept of a sum, its gradient too, is what is kept of torch's; a second backward adds the same."""
    found = []
    for adds in (Addend.of, lambda x: x):
        torch.manual_seed(0)
        second = Norm(100)
        x, y = (torch.randn(1, 7, 100, device=DEVICE).requires_grad_() for _ in range(2))
        hidden = x + adds(y)
        out = second(hidden)
        hidden.retain_grad()
        out.square().sum().backward(retain_graph=True)
        once = [part.grad.clone() for part in (x, y, hidden)]
        out.square().sum().backward()
        found.append([*once, x.grad, y.grad, hidden.grad])
    assert_equal(*found)


def test_a_sum_that_is_modified_behind_its_norm_is_an_error_as_of_torchs() -> None:
    for adds in (Addend.of, lambda x: x):
        x = torch.randn(1, 7, 100, device=DEVICE).requires_grad_()
        hidden = x * 1.0 + adds(x * 2.0)
        out = Norm(100)(hidden)
        hidden.mul_(2.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_only_what_needs_a_gradient_gets_one() -> None:
    x = torch.randn(1, 7, 100, device=DEVICE)
    frozen = Norm(100).requires_grad_(False)
    assert not frozen(x + Addend.of(x)).requires_grad
    weight_alone = Norm(100)
    weight_alone(x + Addend.of(x)).sum().backward()
    expected = Norm(100)
    expected.load_state_dict(weight_alone.state_dict())
    expected(x + x).sum().backward()
    assert torch.equal(weight_alone.weight.grad, expected.weight.grad)
    for leaf in (0, 1):
        parts = [x.clone(), x.clone()]
        parts[leaf].requires_grad_()
        out = frozen(parts[0] + Addend.of(parts[1]))
        [gradient] = torch.autograd.grad(out.square().sum(), [parts[leaf]])
        parts = [x.clone(), x.clone()]
        parts[leaf].requires_grad_()
        out = frozen(parts[0] + parts[1])
        assert torch.equal(gradient, torch.autograd.grad(out.square().sum(), [parts[leaf]])[0])


def test_gradients_under_fsdp2() -> None:
    """Gradients are the same under FSDP2, where a sharded layer is called with a sum and returns one; some layers are
    sharded, in a group of one process.
    """
    model, x = Model(100, torch.float32), given(100)
    expected = gradients(Model(100, torch.float32).apart(), x)
    dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh(DEVICE, (1,))
        fully_shard(model.layers[1], mesh=mesh)
        fully_shard(model, mesh=mesh)
        found = gradients(model, x)
        whole = [part.full_tensor() if isinstance(part, DTensor) else part for part in found]
    finally:
        dist.destroy_process_group()
    assert_equal(whole, expected)
