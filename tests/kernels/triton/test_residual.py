"""A residual and its norm in one launch have the bits of torch's sum and of the norm alone, whoever reads it."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from samebit.kernels.binding.attached import attach
from samebit.kernels.binding.modules import NormFacts, rms_norm_forward
from samebit.kernels.binding.residual import Addend, WaitingSum
from samebit.kernels.layout import device
from samebit.kernels.ops.norm import add_rms_norm, rms_norm
from samebit.kernels.triton import norm

from .gpu import DEVICE, DTYPES, poisoned
from .launches import launches

EPS = 1e-6


@pytest.fixture(autouse=True)
def _without_gradients(on_gpu: None) -> Iterator[None]:
    norm._sums_in_one_launch.cache_clear()
    with torch.no_grad():
        yield
    norm._sums_in_one_launch.cache_clear()


class Norm(nn.Module):
    """Is bound as Hugging Face's norm is."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, device=DEVICE))
        attach(self, rms_norm_forward, NormFacts(EPS, 1.0))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [100, 129, 1000])
def test_one_launch_has_the_bits_of_a_launch_each(width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(width)
    weight = poisoned(torch.randn(width).to(dtype))
    for rows in (1, 2, 3, 7, 70):
        x, y = (poisoned(torch.randn(rows, width).to(dtype)) for _ in range(2))
        total = torch.empty_like(x)
        found = norm.added(x, y, total, weight, EPS, 1.0)
        assert torch.equal(total, x + y)
        assert torch.equal(found, rms_norm(x + y, weight, EPS, 1.0))


def test_it_is_one_launch_where_the_bits_were_seen_to_be_equal(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    x, y, weight = (poisoned(torch.randn(3, 100)) for _ in range(3))
    expected = {True: ["_norm_sums"], False: ["aten.add.out", "_norm_rows"]}
    for equal, names in expected.items():
        monkeypatch.setattr(norm, "added_equal", lambda *_, equal=equal: equal)
        norm._sums_in_one_launch.cache_clear()
        total = torch.empty_like(x)
        with launches() as launched:
            found = add_rms_norm(x, y, total, weight[0], EPS)
        assert launched == names
        assert torch.equal(found, rms_norm(x + y, weight[0], EPS))
        assert torch.equal(total, x + y)
    assert "do not have the bits of a launch each" in caplog.messages[0]


@pytest.mark.usefixtures("all_compared")
def test_another_rounding_of_the_sum_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    given = torch.device(DEVICE), 100, torch.float32, torch.float32
    assert norm.added_equal(*given)
    added = norm.added
    monkeypatch.setattr(norm, "added", lambda x, y, *rest: added(x.bfloat16().float(), y, *rest))
    assert not norm.added_equal(*given)


def test_sums_of_layers_wait_for_their_norms() -> None:
    first, second = Norm(100), Norm(100)
    x, y, z = (torch.randn(1, 3, 100, device=DEVICE) for _ in range(3))
    expected = [second(x + y), second(x + y + z), first(x + y + z)]
    second(x + Addend.of(y))  # compared
    with launches() as launched:
        hidden = x + Addend.of(y)
        assert isinstance(hidden, WaitingSum)
        found = [second(hidden)]
        later = hidden + Addend.of(z)
        found.append(second(later))
        found.append(first(later))
    assert launched == ["_norm_sums", "_norm_sums", "_norm_rows"]
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
        assert type(one) is torch.Tensor
    assert torch.equal(hidden, x + y)
    assert torch.equal(later, x + y + z)


READERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a function": torch.exp,
    "a method": lambda x: x.exp(),
    "a view": lambda x: x[0, :, 3:],
    "a product": lambda x: 2.0 * x,
    "a list": lambda x: torch.stack([x, x]),
    "a keyword": lambda x: torch.add(other=x, input=torch.ones_like(x)),
    "the left of a sum": lambda x: x + 1.0,
    "the right of a sum": lambda x: torch.ones(1, 3, 100, device=DEVICE) + x,
    "a copy": lambda x: torch.empty(1, 3, 100, device=DEVICE).copy_(x),
    "a row that is written": lambda x: x.index_fill_(1, torch.tensor([1], device=DEVICE), 0.0),
    "a linear layer": lambda x: nn.functional.linear(x, torch.eye(100, device=DEVICE)),
    "one more": lambda x: x + Addend.of(torch.ones(1, 3, 100, device=DEVICE)),
    "numpy": lambda x: torch.from_numpy(x.cpu().numpy()),
    "elements": lambda x: torch.tensor(x.tolist()),
}


@pytest.mark.parametrize("name", READERS)
def test_whoever_reads_a_sum_finds_it_added(name: str) -> None:
    x, y = (torch.randn(1, 3, 100, device=DEVICE) for _ in range(2))
    read = READERS[name]
    assert torch.equal(read(x + Addend.of(y)), read(x + y))
    waiting, weight = x + Addend.of(y), Norm(100)
    read(waiting)
    assert torch.equal(weight(waiting), weight(waiting.clone())), "and the norm behind it"


def test_hooks_of_norms_read_sums() -> None:
    module, heard = Norm(100), []
    x, y = (torch.randn(1, 3, 100, device=DEVICE) for _ in range(2))
    module.register_forward_pre_hook(lambda module, given: heard.append(given[0].clone()))
    module.register_forward_pre_hook(lambda module, given: (given[0] * 2,))
    assert torch.equal(module(x + Addend.of(y)), rms_norm((x + y) * 2, module.weight, EPS, 1.0))
    assert torch.equal(heard[0], x + y)


def test_sums_are_computed_at_once_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums are computed at once of other shapes or dtypes, from the other side, of tensors without a version, on the
    CPU.
    """
    x, y = (torch.randn(1, 3, 100, device=DEVICE) for _ in range(2))
    for other in (x[:, :1], x.double(), x.transpose(1, 2).contiguous().transpose(1, 2), 1.0):
        assert not isinstance(other + Addend.of(y), WaitingSum)
        assert torch.equal(other + Addend.of(y), other + y)
    assert type(Addend.of(y) + x) is torch.Tensor
    with torch.inference_mode():
        assert not isinstance(x.clone() + Addend.of(y.clone()), WaitingSum)
    monkeypatch.setattr(device, "on_gpu", lambda tensor: False)
    assert Addend.of(y) is y


def test_a_part_that_is_modified_before_the_sum_is_read_is_an_error() -> None:
    for changed in (0, 1):
        parts = [torch.randn(1, 3, 100, device=DEVICE) for _ in range(2)]
        waiting = parts[0] + Addend.of(parts[1])
        parts[changed].zero_()
        for read in (Norm(100), torch.exp):
            with pytest.raises(RuntimeError, match="modified in place before their sum was read"):
                read(waiting)
        read_first = parts[0] + Addend.of(parts[1])
        expected = read_first.clone()
        parts[changed].add_(1.0)
        assert torch.equal(read_first, expected)
