"""A sample of TRL's trainers ends where the model's length does, and so does a conversation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl", reason="TRL is not installed: pip install 'samebit[trl]'")

from datasets import Dataset

from samebit.rollout import RequestError, RolloutConfig, SamplingParams
from samebit.rollout.integrations.trl import GRPOTrainer, RLOOTrainer
from samebit.rollout.outputs import RequestOutput

from .test_trl import CALL, PROMPTS, Adder, called_first, config, steps, trainer
from .test_trl_async import trainer as async_trainer
from .trl_model import byte_tokenizer

pytestmark = pytest.mark.usefixtures("offline")

THOUGHTFUL = "<think>\n\n</think>\n\n" + CALL
"""Is how the template that TRL trains with renders the call."""

LONGEST = max(len(prompt) for prompt in PROMPTS)


def up_to_the_call(content: str, call: str) -> int:
    """Return how many tokens a conversation has up to the end of the tool's call."""
    prompt = [{"role": "user", "content": content}]
    ids = byte_tokenizer().apply_chat_template(
        prompt, tools=[Adder().add], add_generation_prompt=True, return_dict=False
    )
    return len(ids) + len(byte_tokenizer()(call)["input_ids"])


@pytest.mark.parametrize("kind", [GRPOTrainer, RLOOTrainer])
def test_a_sample_ends_with_the_models_length(kind: type, folder: Path, tmp_path: Path) -> None:
    """A sample ends with the model's length, also where more tokens were asked for at least."""
    longest = RolloutConfig(max_model_len=LONGEST + 9)
    trained = trainer(kind, folder, tmp_path, {"generation_kwargs": {"min_tokens": 12}}, rollout_config=longest)
    trained.train()
    assert max(row["completions/max_length"] for row in steps(trained)) == 13.0, "behind a short prompt, as asked for"
    assert min(row["completions/min_length"] for row in steps(trained)) == 9.0
    assert trained.agreement.compared > 0
    assert trained.agreement.differing == 0


def test_a_prompt_without_room_for_a_token_is_refused(folder: Path, tmp_path: Path) -> None:
    trained = trainer(GRPOTrainer, folder, tmp_path, rollout_config=RolloutConfig(max_model_len=LONGEST))
    with pytest.raises(RequestError, match=f"the prompt has {LONGEST} tokens; at most {LONGEST - 1} are allowed"):
        trained.train()


def test_a_tool_that_leaves_no_room_ends_its_conversation(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = Dataset.from_dict({"prompt": [[{"role": "user", "content": "What is it? "}]] * 8})
    options = config(GRPOTrainer, tmp_path, max_completion_length=140, max_steps=2)
    longest = RolloutConfig(max_model_len=up_to_the_call("What is it? 1+1", CALL) + 2)
    trained = GRPOTrainer(
        str(folder), None, options, train_dataset=data, environment_factory=Adder, rollout_config=longest
    )
    call_ids, turns = called_first(trained, monkeypatch)
    trained.train()
    assert turns == [4, 0, 4, 0]
    assert trained.agreement.compared >= 8 * len(call_ids)
    assert trained.agreement.differing == 0


def test_an_async_sample_ends_with_the_models_length(folder: Path, tmp_path: Path) -> None:
    prompt = [{"role": "user", "content": "another one"}]
    ids = byte_tokenizer().apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
    longest = RolloutConfig(max_model_len=len(ids) + 5)
    trained = async_trainer(folder, tmp_path, rollout_config=longest)
    trained.train()
    rows = [row for row in trained.state.log_history if "loss" in row]
    assert len(rows) == 4
    assert max(row["sample/forwarded_tokens_max"] for row in rows) <= longest.max_model_len
    assert trained.agreement.compared > 0
    assert trained.agreement.differing == 0


@dataclass(frozen=True)
class Finished:
    """Is a request that has ended before it began."""

    request_id: str
    output: RequestOutput

    async def result_async(self) -> RequestOutput:
        return self.output


def test_an_async_tool_that_leaves_no_room_ends_its_conversation(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    longest = RolloutConfig(max_model_len=up_to_the_call("another one", THOUGHTFUL) + 2)
    trained = async_trainer(folder, tmp_path, {"max_inflight_tasks": 4}, tools=[Adder().add], rollout_config=longest)
    call_ids = trained.processing_class(THOUGHTFUL)["input_ids"]

    def call(prompt: list[int], _: SamplingParams) -> Any:
        scored = SamplingParams(max_tokens=1, prompt_logprobs=0)
        output = trained.worker.generate([prompt + call_ids], scored)[0]
        logprobs = output.prompt_logprobs[-len(call_ids) :]
        sample = replace(output.samples[0], token_ids=list(call_ids), logprobs=logprobs, finish_reason="stop")
        return Finished(output.request_id, replace(output, samples=[sample]))

    def reward(completions: list[Any], completion_ids: list[list[int]], **_: Any) -> list[float]:
        assert all([message["role"] for message in messages] == ["assistant", "tool"] for messages in completions)
        assert all(ids == call_ids for ids in completion_ids)
        return [1.0] * len(completions)

    monkeypatch.setattr(trained.worker, "submit", call)
    trained.rollout_worker.attach(trained.worker, trained.rollout_worker._params, reward_funcs=[reward])
    trained.train()
    rows = [row for row in trained.state.log_history if "loss" in row]
    assert all(row["tools/call_frequency"] == 1.0 for row in rows)
    assert max(row["sample/forwarded_tokens_max"] for row in rows) <= longest.max_model_len - 2
    assert trained.agreement.compared > 0
    assert trained.agreement.differing == 0
