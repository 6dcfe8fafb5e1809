"""Kernels are launched on the current GPU: a tensor that is on another one is refused before a launch reads it there.

Torch's fake tensors stand in for a GPU's.
"""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

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
