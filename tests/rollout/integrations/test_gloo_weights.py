"""A trainer's weights come over gloo, through a client of four calls; what the server refuses raises at once."""

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
from ...weight_sync.expert_models import expert_model
from ..http.served import Served, build_folder, byte_tokenizer, serving

IDS = list(range(12))


class Client:
    """Asks a server as the clients of trainers do."""

    def __init__(self, http: httpx.Client, url: str) -> None:
        self._http = http
        self._url = url

    def _post(self, path: str, body: dict[str, Any] | None = None) -> None:
        self._http.post(self._url + path, json=body).raise_for_status()

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._post("/init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        self._post("/start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._post("/update_weights", {"update_info": update_info})

    def finish_weight_update(self) -> None:
        self._post("/finish_weight_update")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(build_folder(tmp_path_factory.mktemp("model")), "--control", "loopback") as one:
        yield one


@pytest.mark.parametrize(("part_bytes", "seed"), [(1, 1), (10_000, 2), (1 << 28, 3)])
def test_what_is_sampled_then_has_the_bits_of_what_was_sent(
    served: Served, part_bytes: int, seed: int, tmp_path: Path
) -> None:
    other = bind(AutoModelForCausalLM.from_pretrained(build_folder(tmp_path / "other", seed=seed), dtype=torch.float32))
    before = served.service.worker.weight_version
    weights = GlooWeights(Client(served.http, served.control), part_bytes=part_bytes)
    weights.init_weight_transfer()
    for version in (1, 2):
        weights.send_weights(other.named_parameters())
        assert served.service.worker.weight_version == before + version
    weights.destroy()
    check(served, other)


def test_a_state_dict_has_the_buffers_and_ties_that_an_update_covers(tmp_path: Path) -> None:
    """A state dict has the buffers and ties that an update covers: `named_parameters()` lacks a correction bias, which
    is a buffer, and tied weights come under each of their names.
    """
    tokenizer = byte_tokenizer()
    folders = {}
    for seed in (0, 1):
        folders[seed] = tmp_path / str(seed)
        sizes = {"vocab_size": len(tokenizer), "head_dim": 8, "tie_word_embeddings": True}
        expert_model("Glm4Moe", torch.float32, seed=seed, **sizes).save_pretrained(folders[seed])
        tokenizer.save_pretrained(folders[seed])
    other = bind(AutoModelForCausalLM.from_pretrained(folders[1], dtype=torch.float32))
    with serving(folders[0], "--control", "loopback") as served:
        weights = GlooWeights(Client(served.http, served.control), timeout=HANG)
        weights.init_weight_transfer()
        with pytest.raises(httpx.HTTPStatusError, match="409"):
            weights.send_weights(other.named_parameters())
        weights.init_weight_transfer()
        weights.send_weights(other.state_dict().items())
        assert served.service.worker.weight_version == 1
        check(served, other)


def test_what_is_cast_is_logged_once_for_each_pair_of_dtypes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def told() -> list[str]:
        return [one.getMessage() for one in caplog.records if "were cast" in one.getMessage()]

    folder = build_folder(tmp_path / "model")
    state = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    with serving(folder, "--control", "loopback", "--dtype", "bfloat16", "--weight-root", str(tmp_path)) as served:
        weights = GlooWeights(Client(served.http, served.control))
        weights.init_weight_transfer()
        weights.send_weights({name: tensor.bfloat16() for name, tensor in state.items()}.items())
        assert told() == []
        for _ in range(2):
            weights.send_weights(state.items())
        assert served.command("/update_weights", {"weight_dir": "model"}).status_code == 200  # it holds float32
        (line,) = told()
        assert f"{len(state)} tensors of an update were cast, float32 -> bfloat16, " in line
        weights.send_weights({name: tensor.half() for name, tensor in state.items()}.items())
        assert "float16 -> bfloat16" in told()[1]
        assert len(told()) == 2
        assert served.service.worker.weight_version == 5


def check(served: Served, model: torch.nn.Module) -> None:
    """Check that the server's log-probabilities are those of this model, bit for bit."""
    asked = {"token_ids": IDS, "sampling_params": {"max_tokens": 8, "logprobs": 0, "ignore_eos": True}}
    (choice,) = served.post("/inference/v1/generate", asked).json()["choices"]
    expected = token_logprobs(model, torch.tensor([IDS + choice["token_ids"]]))[0, -8:].tolist()
    assert [one["logprob"] for one in choice["logprobs"]["content"]] == expected


def test_what_is_refused_raises_and_ends_the_transfer(served: Served) -> None:
    """What the server refuses raises and ends the transfer: nobody waits for the other side, and the next update begins
    with a new transfer.
    """
    before = served.service.worker.weight_version
    weights = GlooWeights(Client(served.http, served.control), timeout=HANG)
    with pytest.raises(RuntimeError, match="init_weight_transfer"):
        weights.send_weights([])
    weights.init_weight_transfer()
    with pytest.raises(httpx.HTTPStatusError, match="409"):
        weights.send_weights([("nothing.weight", torch.zeros(3))])
    assert served.service.worker.weight_version == before
    with pytest.raises(RuntimeError, match="init_weight_transfer"):
        weights.send_weights([])
    refusing = GlooWeights(Client(served.http, served.base), timeout=HANG)  # no control here
    with pytest.raises(httpx.HTTPStatusError, match="404"):
        refusing.init_weight_transfer()
    state = AutoModelForCausalLM.from_pretrained(served.folder).state_dict()
    weights.init_weight_transfer()
    weights.send_weights(state.items())
    assert served.service.worker.weight_version == before + 1
