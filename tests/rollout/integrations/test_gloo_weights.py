"""A trainer's weights over gloo, through a client of four calls; what the server refuses raises at once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from samebit.kernels import bind, token_logprobs
from samebit.rollout.integrations.gloo_weights import GlooWeights

from ...patience import HANG
from ..http.served import Served, build_folder, serving

IDS = list(range(12))


class Client:
    """Asks a server as the clients of trainers do."""

    def __init__(self, url: str) -> None:
        self._url = url

    def _post(self, path: str, body: dict[str, Any] | None = None) -> None:
        httpx.post(self._url + path, json=body, timeout=HANG).raise_for_status()

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._post("/init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        self._post("/start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._post("/update_weights", {"update_info": update_info})

    def finish_weight_update(self) -> None:
        self._post("/finish_weight_update")


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with serving(build_folder(tmp_path / "model"), "--control", "loopback") as one:
        yield one


@pytest.mark.parametrize("part_bytes", [1, 10_000, 1 << 28])
def test_what_is_sampled_then_has_the_bits_of_what_was_sent(served: Served, part_bytes: int, tmp_path: Path) -> None:
    other = bind(AutoModelForCausalLM.from_pretrained(build_folder(tmp_path / "other", seed=1), dtype=torch.float32))
    weights = GlooWeights(Client(served.control), part_bytes=part_bytes)
    weights.init_weight_transfer()
    for version in (1, 2):
        weights.send_weights(other.named_parameters())
        assert served.service.worker.weight_version == version
    asked = {"token_ids": IDS, "sampling_params": {"max_tokens": 8, "logprobs": 0, "ignore_eos": True}}
    (choice,) = served.post("/inference/v1/generate", asked).json()["choices"]
    expected = token_logprobs(other, torch.tensor([IDS + choice["token_ids"]]))[0, -8:].tolist()
    assert [one["logprob"] for one in choice["logprobs"]["content"]] == expected


def test_what_is_refused_raises_and_ends_the_transfer(served: Served) -> None:
    """Nobody waits for the other side; the next update begins with a new transfer."""
    weights = GlooWeights(Client(served.control), timeout=HANG)
    with pytest.raises(RuntimeError, match="init_weight_transfer"):
        weights.send_weights([])
    weights.init_weight_transfer()
    with pytest.raises(httpx.HTTPStatusError, match="409"):
        weights.send_weights([("nothing.weight", torch.zeros(3))])
    assert served.service.worker.weight_version == 0
    with pytest.raises(RuntimeError, match="init_weight_transfer"):
        weights.send_weights([])
    refusing = GlooWeights(Client(served.base), timeout=HANG)  # no control here
    with pytest.raises(httpx.HTTPStatusError, match="404"):
        refusing.init_weight_transfer()
    state = AutoModelForCausalLM.from_pretrained(served.folder).state_dict()
    weights.init_weight_transfer()
    weights.send_weights(state.items())
    assert served.service.worker.weight_version == 1
