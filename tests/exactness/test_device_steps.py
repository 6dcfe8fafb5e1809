"""A bound model on a device asks it for nothing, and sends it nothing: a CUDA graph can record neither.

Tensors on "meta", which hold no values, stand in for a GPU's, and operations that compute nothing for its kernels: what
waits for a value raises, as does what mixes devices.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from samebit.kernels import bind
from samebit.kernels.binding.binding import binding_of
from samebit.kernels.binding.trainer.logprob_request import Scoring, use_scoring
from samebit.kernels.layout import device
from samebit.kernels.layout.device_layout import layout_parts
from samebit.kernels.layout.forward_context import ForwardContext, training_context, use_context
from samebit.kernels.layout.lora.adapters import RowAdapters
from samebit.kernels.ops import dispatch

from .families import DELTAS, DIFFERENT_HYBRIDS, FAMILIES, HYBRIDS, KIMI, SPARSE, make_model
from .lora import add, lora_config, make_peft
from .no_kernels import NoKernels

META = torch.device("meta")
NAMES = tuple(dict.fromkeys((*FAMILIES, *SPARSE, *DIFFERENT_HYBRIDS, *HYBRIDS, *DELTAS)))


class OnlyOnTheDevice(TorchDispatchMode):
    """Raises where an operation reads on the host and writes to the device; single numbers travel with a launch."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **kwargs or {})
        given = [part for part in args if isinstance(part, torch.Tensor) and part.is_cpu]
        copies = "copy" in str(function)
        if isinstance(out, torch.Tensor) and out.is_meta and any(part.dim() or copies for part in given):
            raise AssertionError(f"{function} sends {[list(part.shape) for part in given]} to the device")
        return out


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "on_gpu", lambda tensor: tensor.is_meta)
    monkeypatch.setattr(dispatch, "_gpu", NoKernels)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: False)  # which knows no "meta"


def on_meta(name: str) -> PreTrainedModel:
    model: PreTrainedModel = moved(make_model(name, torch.bfloat16))
    return model


def moved(model: Any) -> Any:
    """Move the bound model, its angles' frequencies and queries' factors too: those are sent once, before a graph is
    recorded.
    """
    model = bind(model).to(META)
    for module in model.modules():
        facts = module.__dict__.get("samebit")
        for kind in getattr(facts, "frequencies", {}):
            facts.on(META, kind)
        factors = getattr(facts, "query_factors", None)
        if factors is not None:
            factors.on(META)
    return model


def step(
    model: nn.Module, lengths: tuple[int, ...], starts: tuple[int, ...],
    adapters: RowAdapters = RowAdapters.all_through(None),  # noqa: B008 (it is frozen)
) -> ForwardContext:  # fmt: skip
    """Lay out a step of these sequences, with a row of padding behind them; its layout has been sent."""
    binding, counts = binding_of(model), np.array(lengths, np.int32)
    numbers = np.arange(len(lengths), dtype=np.int32)
    host = ForwardContext(
        positions=torch.zeros(sum(lengths) + 1, dtype=torch.int64), row_start=(np.cumsum(counts) - counts),
        lengths=counts, starts=np.array(starts, np.int32), table_rows=numbers,
        block_tables=np.stack([2 * numbers + 1, 2 * numbers + 2], axis=1), block_size=64, adapters=adapters,
    )  # fmt: skip
    arrays = {"positions": host.positions.numpy(), **layout_parts(host, host.work)}
    states = binding.state_layout and binding.state_layout.allocate(4, torch.bfloat16, 0, META)
    return replace(
        host.as_sent({name: torch.from_numpy(array).to(META) for name, array in arrays.items()}),
        pages=binding.kv_layout.allocate(8, 64, torch.bfloat16, META), states=states or None,
    )  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_step_waits_for_nothing_and_sends_nothing(name: str) -> None:
    model = on_meta(name)
    kept = torch.empty(3, dtype=torch.int64, device=META)
    for lengths, starts in (((1, 1, 1), (9, 5, 70)), ((4, 1, 2), (0, 5, 0))):
        context = step(model, lengths, starts)
        ids = torch.empty(1, context.num_rows, dtype=torch.int64, device=META)
        with torch.no_grad(), use_context(context), OnlyOnTheDevice():
            assert model(input_ids=ids, logits_to_keep=kept).logits.shape[:2] == (1, 3)


def test_rows_of_adapters_are_sent_once_for_all_layers() -> None:
    model = make_peft("Qwen3", torch.bfloat16)
    add(model, "other", lora_config(2))
    moved(model)
    adapters = binding_of(model).adapters
    assert adapters is not None
    rows = (torch.tensor([0]), torch.tensor([1, 2]))
    context = step(model, (1, 2), (9, 0), RowAdapters(tuple(zip(adapters.adapters.values(), rows, strict=True))))
    ids = torch.empty(1, context.num_rows, dtype=torch.int64, device=META)
    with torch.no_grad(), use_context(context), OnlyOnTheDevice():
        assert model(input_ids=ids).logits.shape[:2] == (1, 4)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in KIMI])
def test_a_training_call_and_its_gradients_stay_on_the_device(name: str) -> None:
    """A training call and its gradients stay on the device, but for those of Kimi Delta Attention, which are torch
    operations that wait.
    """
    model, context = on_meta(name).train(), training_context((2, 7), None, None, META)
    ids, kept = (torch.empty(shape, dtype=torch.int64, device=META) for shape in ((1, 14), (12,)))
    scoring = Scoring(torch.empty_like(kept), torch.empty(12, device=META), with_entropy=True)
    with use_context(context), use_scoring(scoring), OnlyOnTheDevice():
        scores = model(input_ids=ids, logits_to_keep=kept)
        (scores.log_probs + scores.entropy).sum().backward()
    assert all(one.grad.is_meta for one in model.parameters() if one.grad is not None)
