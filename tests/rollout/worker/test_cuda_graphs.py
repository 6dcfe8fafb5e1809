"""Graphs are made for the right steps, and recorded anew for the right reasons; nothing is recorded here."""

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from samebit.kernels.layout import device
from samebit.kernels.layout.memory_pool import WHOLE_GPU
from samebit.rollout.config import RolloutConfig
from samebit.rollout.runner import cuda_pool_size
from samebit.rollout.runner.cuda_graphs import StepGraphs, _Watched
from samebit.rollout.runner.cuda_recorder import CudaRecorder
from samebit.rollout.runner.cuda_step_arrays import StepArrays
from samebit.rollout.runner.forward import forward_for


def test_whatever_a_replay_would_not_compute_is_noticed() -> None:
    """Whatever a replay would not compute is noticed: a parameter that moved; and what a graph can not see: hooks,
    another module, another forward.
    """
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    inner: Any = model[1]
    hooks: list[Any] = []

    def replaced_data() -> None:
        model[0].weight.data = model[0].weight.data.clone()

    def replaced_parameter() -> None:
        inner[0].bias = nn.Parameter(torch.ones(2))

    def replaced_module() -> None:
        inner[0] = nn.Linear(2, 2)

    def wrapped_forward() -> None:
        plain = inner.forward
        inner.forward = lambda x: plain(x)

    def hooked() -> None:
        hooks.append(inner[0].register_forward_hook(lambda module, given, out: out))

    def hooked_before() -> None:
        hooks.append(inner[0].register_forward_pre_hook(lambda module, given: given))

    def unhooked() -> None:
        hooks.pop().remove()

    changes = (
        replaced_data, replaced_parameter, replaced_module, wrapped_forward, hooked, hooked_before, unhooked,
    )  # fmt: skip
    watched = _Watched(model)
    assert watched.changed(), "the first look"
    for change in changes:
        assert not watched.changed()
        change()
        assert watched.changed(), change.__name__


def test_graphs_of_decodes_of_every_size_are_recorded_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs of decodes of every size are recorded as a worker starts, and not while it serves. The first is of as many
    sequences as it runs: the others, which are smaller, find room in the memory that it took.
    """
    sizes = []
    monkeypatch.setattr(StepGraphs, "_recorded", lambda self, model, room, context: sizes.append(room))
    arrays: Any = SimpleNamespace(room=lambda size, block_size: (size.rows, size.sequences))
    context: Any = SimpleNamespace(adapters=None, block_size=64)
    sizes_of_steps = {"max_rows": 512, "max_sequences": 40, "max_head_rows": 64}
    graphs, model = StepGraphs(torch.device("cpu"), **sizes_of_steps), nn.Linear(1, 1)
    for _ in range(2):
        graphs.record_decodes(model, arrays, context)
    assert sizes == [(size, size) for size in (40, 32, 24, 16, 8, 4, 2, 1)]


def test_a_step_with_guesses_has_a_graph_where_one_sequence_runs_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token is drawn from each row of a guess: a graph has room for as many as a step is filled up to."""
    monkeypatch.setattr(device, "on_gpu", lambda tensor: True)
    monkeypatch.setattr(
        StepGraphs, "_recorded", lambda self, model, room, context: SimpleNamespace(places=room.by_name())
    )
    config = RolloutConfig(max_num_seqs=1, num_speculative_tokens=5)
    forward: Any = forward_for(torch.zeros(1), config)
    rows, context = np.zeros(6, np.int64), SimpleNamespace(adapters=None, block_size=64, lengths=[6])
    arrays = StepArrays(
        token_ids=rows, sources=rows, head_rows=rows, draw_rows=rows, temperatures=np.ones(6, np.float32),
        keys=np.zeros((6, 2), np.uint32), counters=np.zeros((6, 4), np.uint32),
        layout={"tables": np.zeros((1, 2), np.int32), "sequences": np.zeros(6, np.int32)},
    )  # fmt: skip
    graph = forward.graphs.fitting(nn.Linear(1, 1), arrays, context)
    assert graph is not None
    assert len(graph.places["head_rows"]) == 16, "what a step is filled up to on a CPU"


def test_the_memory_that_torch_keeps_is_given_back_between_recordings(
    make_worker: Callable[..., tuple[Any, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a graph is recorded torch gives nothing back, and does not say so. With stand-ins for CUDA."""
    happened: list[tuple[str, bool]] = []

    def note(what: str) -> None:
        happened.append((what, WHOLE_GPU.locked()))

    def stream(device: torch.device) -> Any:
        return SimpleNamespace(device=device, wait_stream=lambda other: None)

    for name, stand_in in {
        "Stream": stream,
        "current_stream": stream,
        "stream": nullcontext,
        "device": nullcontext,
        "graph": lambda graph, **_: nullcontext(),
        "graph_pool_handle": lambda: None,
        "CUDAGraph": lambda: SimpleNamespace(replay=None),
        "is_initialized": lambda: True,
        "empty_cache": lambda: note("emptied"),
        "mem_get_info": lambda device: (60, 80),
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(cuda_pool_size, "_step_bytes", lambda *_: 0)
    CudaRecorder(torch.device("cuda", 0))(lambda: note("recorded"))
    make_worker()[0].sleep()
    cuda_pool_size.kv_cache_bytes(nn.Linear(1, 1), 0.5, 1, 1, 0)
    assert happened == [("recorded", True), ("recorded", True), ("emptied", True), ("emptied", True)]
    assert not WHOLE_GPU.locked()
