"""A layer of a decode step launches no more kernels between its neighbours' first ones than are listed here."""

from collections import Counter

import numpy as np
import pytest
import torch

from samebit.kernels import bind
from samebit.kernels.binding.binding import binding_of
from samebit.kernels.binding.residual import Addend
from samebit.kernels.layout.forward_context import ForwardContext, use_context
from samebit.kernels.layout.lora.adapters import RowAdapters

from ...exactness.families import make_model
from .gpu import DEVICE
from .launches import launches

pytestmark = pytest.mark.usefixtures("on_gpu")

LAYER = Counter(
    {
        "_norm_sums": 2,
        "_multiply_layers": 1,
        "_multiply_gated": 1,
        "_multiply": 2,
        "_turn_and_write": 1,
        "_attend_items": 2,
    }
)
"""Counts the launches of a layer of Qwen3, in a step with a group of sequences and room for more rows
than there are.
"""


def decode(layout_of: object) -> ForwardContext:
    """Lay out the next tokens of two sequences that begin with the same block, and of one that does not; and one row
    more.
    """
    sequences = np.arange(3, dtype=np.int32)
    return ForwardContext(
        positions=torch.tensor([70, 80, 9, 0], device=DEVICE),
        row_start=sequences,
        lengths=np.ones(3, np.int32),
        starts=np.array([70, 80, 9], np.int32),
        table_rows=sequences,
        block_tables=np.array([[1, 2], [1, 3], [4, 0]], np.int32),
        block_size=64,
        pages=layout_of.allocate(5, 64, torch.float32, DEVICE),  # type: ignore[attr-defined]
        adapters=RowAdapters.all_through(None),
    )


def computed(layers: int, *, apart: bool = False) -> tuple[torch.Tensor, Counter[str]]:
    """Return hidden states of the tokens, and what was launched; ``apart``: with hooks that listen to all modules."""
    model = bind(make_model("Qwen3", vocab_size=50, hidden_size=64, intermediate_size=100, num_hidden_layers=layers))
    model.to(DEVICE)
    for module in model.modules() if apart else ():
        module.register_forward_hook(lambda module, given, out: None)
    context, ids = decode(binding_of(model).kv_layout), torch.tensor([[5, 6, 7, 0]], device=DEVICE)
    with torch.no_grad(), use_context(context):
        for pages in context.pages or ():
            pages.normal_(generator=torch.Generator(DEVICE).manual_seed(0))
        model.model(ids)  # tiles are compared
        with launches() as names:
            hidden = model.model(ids)[0]
    return hidden[0, :3], Counter(names)


def test_a_layer_of_a_decode_step_launches_so_many_kernels() -> None:
    (_, one), (_, two) = computed(1), computed(2)
    assert two - one == LAYER
    assert LAYER.total() == 9


def test_it_has_the_bits_of_a_launch_each(monkeypatch: pytest.MonkeyPatch) -> None:
    together, _ = computed(2)
    monkeypatch.setattr(Addend, "of", staticmethod(lambda x: x))
    apart, names = computed(2, apart=True)
    assert not {"_multiply_layers", "_multiply_gated", "_norm_sums"} & set(names)
    assert names["_norm_rows"] == 2 * 4 + 1
    assert torch.equal(together, apart)
