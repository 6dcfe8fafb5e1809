"""The test of itself that a worker makes before it starts passes and is remembered, or names what differs."""

from __future__ import annotations

import logging
import pwd
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from torch import nn

from samebit.kernels.layout.forward_context import installed_context
from samebit.rollout import RolloutConfig, RolloutWorker, SamplingParams
from samebit.rollout.errors import SelfTestError

from .families import bound_model

FAMILIES = ("Gemma3", "NemotronH", "Qwen3Next", "Qwen3Moe")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder in which it is remembered what has passed."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "samebit" / "self_test"


@pytest.fixture
def hooked() -> Iterator[Callable[..., None]]:
    """Spoil what a module of a model gives, for a while."""
    handles = []

    def spoil(module: nn.Module, where: Callable[[int], bool]) -> None:
        def hook(module: nn.Module, given: Any, out: torch.Tensor) -> torch.Tensor:
            return out * (1 + 2**-20) if where(out.shape[-2]) else out

        handles.append(module.register_forward_hook(hook))

    yield spoil
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("name", FAMILIES)
def test_it_passes_and_is_remembered(name: str, cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = RolloutConfig(self_test=True, num_blocks=8, max_num_seqs=2)
    for told in ("have the same bits in a trainer's call, alone and in steps", "passed before"):
        caplog.clear()
        with caplog.at_level(logging.INFO), RolloutWorker(bound_model(name), config=config) as worker:
            worker.generate([[5, 6, 7]], SamplingParams(max_tokens=2))
        [message] = [text for text in caplog.messages if text.startswith("self-test")]
        assert told in message
        assert len(list(cache.iterdir())) == 1


def test_shapes_that_have_not_passed_are_tested(cache: Path) -> None:
    for name in ("Gemma3", "Qwen3"):
        RolloutWorker(bound_model(name), config=RolloutConfig(self_test=True, num_blocks=8)).close()
    assert len(list(cache.iterdir())) == 2


def test_what_was_not_tried_has_not_passed(hooked: Callable[..., None], cache: Path) -> None:
    model = bound_model("Qwen3")
    hooked(model.model.layers[1].mlp.down_proj, lambda rows: rows > 150)
    RolloutWorker(model, config=RolloutConfig(self_test=True, num_blocks=8, max_model_len=8)).close()
    with pytest.raises(SelfTestError, match="each sequence in a call of its own"):
        RolloutWorker(model, config=RolloutConfig(self_test=True, num_blocks=8))
    assert len(list(cache.iterdir())) == 1


@pytest.mark.parametrize(
    ("family", "other"),
    [
        ("Mistral", lambda: (bound_model("Mistral", sliding_window=33), {})),
        ("Gemma2", lambda: (bound_model("Gemma2", attn_logit_softcapping=7.0), {})),
        ("Qwen3", lambda: (bound_model("Qwen3"), {"block_size": 16})),
        ("Bamba", lambda: (bound_model("Bamba", ssm_chunk=16), {"block_size": 64})),
    ],
)
def test_what_the_bits_could_depend_on_is_tested(
    family: str, other: Callable[[], tuple[nn.Module, dict[str, Any]]], cache: Path
) -> None:
    same = {"block_size": 64, "num_blocks": 16, "self_test": True}
    for changes in ({}, {"max_model_len": 200, "max_num_seqs": 2, "num_blocks": 20}):
        RolloutWorker(bound_model(family), config=RolloutConfig(**{**same, **changes})).close()
        assert len(list(cache.iterdir())) == 1
    model, changes = other()
    RolloutWorker(model, config=RolloutConfig(**{**same, **changes})).close()
    assert len(list(cache.iterdir())) == 2


def test_nothing_is_tested_unasked_on_the_cpu(cache: Path) -> None:
    RolloutWorker(bound_model("Qwen3"), config=RolloutConfig(num_blocks=8)).close()
    assert not cache.exists()


def test_a_module_whose_bits_depend_on_the_rows_beside_is_named(hooked: Callable[..., None], cache: Path) -> None:
    model = bound_model("Qwen3")
    hooked(model.model.layers[1].mlp.down_proj, lambda rows: rows > 150)
    with pytest.raises(
        SelfTestError, match=r"\(each sequence in a call of its own\).*layers\.1\.mlp\.down_proj \(Linear"
    ):
        RolloutWorker(model, config=RolloutConfig(self_test=True))
    assert not cache.exists(), "nothing has passed"


def test_a_module_whose_bits_differ_in_steps_is_named(hooked: Callable[..., None]) -> None:
    model = bound_model("NemotronH")
    mixer = next(layer.mixer for layer in model.model.layers if hasattr(layer.mixer, "in_proj"))

    def in_a_decode(rows: int) -> bool:
        context = installed_context()
        return context is not None and context.pages is not None and rows <= 4

    hooked(mixer.in_proj, in_a_decode)
    with pytest.raises(SelfTestError, match=r"\(prompts in pieces, then decodes\).*mixer\.in_proj \(Linear"):
        RolloutWorker(model, config=RolloutConfig(self_test=True))


@pytest.mark.parametrize("cache_home", ["/dev/null", "/" + "x" * 300, None], ids=["file", "unreadable", "no home"])
def test_where_it_can_not_be_noted_the_worker_starts_all_the_same(
    cache_home: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The worker starts all the same where it can not be noted that the test has passed: in a container whose user has
    no home, or none that it may look into.
    """

    def unknown(user: int) -> NoReturn:
        raise KeyError(user)

    if cache_home is None:
        monkeypatch.delenv("HOME")
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(pwd, "getpwuid", unknown)
    else:
        monkeypatch.setenv("XDG_CACHE_HOME", cache_home)
    RolloutWorker(bound_model("Qwen3"), config=RolloutConfig(self_test=True, num_blocks=8)).close()
    assert "could not be noted" in caplog.text


def test_what_it_would_compare_has_to_be_exact() -> None:
    with pytest.raises(ValueError, match=r"self_test=True compares what exact=False gives up; allowed with it: False"):
        RolloutConfig(self_test=True, exact=False)
    with pytest.raises(ValueError, match=r"self_test must be True, False or None, got 'yes'"):
        RolloutConfig(self_test="yes")  # type: ignore[arg-type]
