"""Kernels are launched on the current GPU: a tensor that is on another one is refused before a launch reads it there,
and what a trainer calls makes the GPU of its rows the current one.

Torch's fake tensors stand in for a GPU's.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from samebit.kernels.binding.causal_lm import head_forward
from samebit.kernels.binding.modules import DecoderFacts, decoder_forward
from samebit.kernels.binding.trainer import training
from samebit.kernels.binding.trainer.logprob_request import Scores
from samebit.kernels.layout.forward_context import LayoutMask, training_context, use_context
from samebit.kernels.ops import dispatch
from samebit.kernels.ops.linear import linear
from samebit.kernels.ops.logprobs import log_softmax


def test_a_tensor_on_another_gpu_than_the_current_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    told = r"on cuda:1, while this thread's current device is cuda:0, .*device\(1"
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    with FakeTensorMode():
        x, weight = (torch.empty(3, 8, device="cuda:1") for _ in range(2))
        temperatures = torch.empty(3, device="cuda:1")
        for compute in (lambda: linear(x, weight), lambda: log_softmax(x, temperatures)):
            with pytest.raises(ValueError, match=told):
                compute()


class Launched(Exception):
    """Says that the first kernel would have been launched, in its place."""


class Launches:
    """Stands in for a GPU's operations, which are reached where the tensor's GPU is the current one."""

    def __getattr__(self, name: str) -> Any:
        raise Launched(name)


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list whose last number is that of the current GPU."""
    number = [0]

    @contextmanager
    def device_of(tensor: torch.Tensor) -> Iterator[None]:
        number.append(tensor.device.index if tensor.is_cuda else number[-1])
        yield
        number.pop()

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: number[-1])
    monkeypatch.setattr(dispatch, "_gpu", Launches)
    return number


def on_the_second_gpu(*shape: int) -> torch.Tensor:
    with FakeTensorMode():
        return torch.empty(shape, device="cuda:1")


def test_a_bound_decoder_computes_on_the_gpu_of_its_rows(current: list[int]) -> None:
    class Decoder:
        samebit = DecoderFacts(attends=True, masks_by_layer=False, wrapped=False)

        def forward(self, **kwargs: Any) -> int:
            return torch.cuda.current_device()

    with use_context(training_context((1, 3), None, None)):
        assert decoder_forward(Decoder(), input_ids=on_the_second_gpu(1, 3)) == 1
    assert current == [0]


def test_a_bound_head_does_too(current: list[int]) -> None:
    """The head of a bound model, which runs when its decoder is done, is computed on the GPU of its rows."""
    head = SimpleNamespace(weight=on_the_second_gpu(5, 8), bias=None, samebit=None)
    with pytest.raises(Launched, match="multiply"):
        head_forward(head, on_the_second_gpu(3, 8))


def test_all_of_a_scoring_call_is_on_the_gpu_of_its_rows(current: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole scoring call asks for the GPU of its rows as the current one. Here the rows are on the CPU, and it is
    only seen that it was asked for.
    """
    family = SimpleNamespace(wrapped=False)
    monkeypatch.setattr(
        training,
        "checked_binding_of",
        lambda model: SimpleNamespace(vocab_size=9, family=family, images=None, why_no_images=""),
    )

    def forward(**given: Any) -> Scores:
        assert len(current) == 2
        return Scores(torch.zeros(2), None)

    training.token_scores(nn.Module(), torch.zeros(1, 3, dtype=torch.int64), forward=forward)
    assert len(current) == 1


@pytest.mark.parametrize("dimensions", [2, 4])
def test_what_a_model_asks_of_the_mask_is_answered_on_the_host(dimensions: int) -> None:
    """A recurrent model's question whether the mask has padding is answered without a wait for the GPU, which a CUDA
    graph could not record. (transformers before 5.13 ask it, and later ones for Mamba2.)
    """
    mask = LayoutMask.of(training_context((1, 3), None, None, "meta"), dimensions)
    assert mask.is_meta
    assert not torch.all(mask == 1), "some rows are padding, for all that the model knows"
    assert mask in {mask}
