"""TRL's GRPO and RLOO train models with vision on prompts with images: no token has another log-probability in the
trainer, and the tower learns."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl", reason="TRL is not installed: pip install 'samebit[trl]'")

from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForImageTextToText, AutoProcessor, AutoTokenizer
from trl.experimental.async_grpo import AsyncGRPOConfig

from samebit.rollout import PromptWithImages, SamplingParams
from samebit.rollout.integrations.trl import GRPOTrainer, RLOOTrainer
from samebit.rollout.integrations.trl.agreement import COMPARED, DIFFERING
from samebit.rollout.integrations.trl.async_grpo import AsyncGRPOTrainer
from samebit.rollout.requests.prompt_with_images import GivenPrompt

from .test_trl import config, steps
from .trl_model import END
from .trl_vision_model import PLACEHOLDER, picture, vision_folder, vision_tokenizer

pytestmark = pytest.mark.usefixtures("offline")

PLACEHOLDER_ID = vision_tokenizer().convert_tokens_to_ids(PLACEHOLDER)
QUESTIONS = ["What is it?", "What is it?", "And without?", "Which of the two is larger?"]
PICTURES = [[picture(16, 24, 0)], [picture(16, 24, 1)], [], [picture(8, 8, 2), picture(40, 20, 3)]]
"""Have two prompts whose tokens are the same, and one without images."""

CASES: dict[str, tuple[type, dict[str, Any]]] = {
    "GRPO: parts without images, a reference": (
        GRPOTrainer,
        {"steps_per_generation": 8, "gradient_accumulation_steps": 4, "per_device_train_batch_size": 1, "beta": 0.1},
    ),
    "GRPO: bfloat16, sampled placeholders": (
        GRPOTrainer,
        {
            "bf16": True,
            "model_init_kwargs": {"dtype": "bfloat16"},
            "pad_to_multiple_of": 8,
            "shuffle_dataset": False,
            "generation_kwargs": {"logit_bias": {PLACEHOLDER_ID: 5.0}},
        },
    ),
    "RLOO: twice over": (RLOOTrainer, {"beta": 0.1, "num_iterations": 2}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a small random Qwen2.5-VL."""
    return vision_folder(tmp_path_factory.mktemp("qwen2_5_vl"), "Qwen2")


def data(count: int = 3) -> Dataset:
    """Return prompts with an image or two, and with none."""
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    return Dataset.from_list(
        [{"prompt": chat, "images": own} for chat, own in zip(chats, PICTURES, strict=True)] * count
    )


def reward(completions: list[Any], **_: Any) -> list[float]:
    return [len(set(messages[0]["content"])) / 10 for messages in completions]


def trainer(kind: type, folder: Path, out: Path, options: dict[str, Any] | None = None, **more: Any) -> Any:
    given = config(kind, out, **{"per_device_train_batch_size": 8, **(options or {})})
    return kind(str(folder), args=given, **{"reward_funcs": reward, "train_dataset": data(), **more})


@pytest.mark.parametrize("case", CASES)
def test_no_token_differs(case: str, folder: Path, tmp_path: Path) -> None:
    kind, options = CASES[case]
    placeholders: list[int] = []
    given: list[int] = []

    def noted(completions: list[Any], completion_ids: list[list[int]], images: list[Any], **_: Any) -> list[float]:
        placeholders.extend(ids.count(PLACEHOLDER_ID) for ids in completion_ids)
        given.append(len({one.tobytes() for own in images for one in own}))
        return reward(completions)

    trained = trainer(kind, folder, tmp_path, options, reward_funcs=noted)
    before = copy.deepcopy(trained.model.state_dict())
    trained.train()
    assert trained.agreement.compared > 3 * 8
    assert trained.agreement.differing == 0
    logged = list(steps(trained))
    compared = [row for row in logged if COMPARED in row]
    assert compared
    assert all(row[DIFFERING] == 0.0 for row in compared)
    after = trained.model.state_dict()
    towers = [name for name in before if ".visual." in name]
    assert any(not torch.equal(before[name], after[name]) for name in towers), "the tower has learned nothing"
    if "beta" in options:
        assert logged[0]["kl"] == 0.0, "the reference model is the policy at first, bit for bit"
        assert logged[-1]["kl"] != 0.0
    assert len(given) > 1
    assert trained.worker.stats()["images_computed"] == sum(given), "with the weights of each step, once a step"
    if "generation_kwargs" in options:
        assert sum(placeholders) > 0, "sampled ones are text"


def test_an_adapter_of_the_text_trains(folder: Path, tmp_path: Path) -> None:
    adapter = LoraConfig(r=3, target_modules=r".*language_model.*\.(q_proj|o_proj|up_proj)")
    trained = trainer(GRPOTrainer, folder, tmp_path, {"beta": 0.1, "max_steps": 2}, peft_config=adapter)
    trained.train()
    assert trained.agreement.compared > 0
    assert trained.agreement.differing == 0


def test_a_column_of_one_image(folder: Path, tmp_path: Path) -> None:
    """A column `image` is taken, in evaluation too."""
    given = Dataset.from_list([row | {"image": picture(8, 16, seed)} for seed, row in enumerate(data(1))])
    given = given.remove_columns("images")
    trained = trainer(GRPOTrainer, folder, tmp_path, {"max_steps": 1}, train_dataset=given, eval_dataset=given)
    trained.train()
    trained.evaluate()
    assert trained.agreement.compared > 0
    assert trained.agreement.differing == 0
    assert trained.state.log_history[-1][f"eval_{COMPARED}"] > 0


class Camera:
    """Is an environment whose tool takes pictures."""

    def reset(self, **_: Any) -> None:
        self.taken = 0

    def look(self) -> list[dict[str, Any]]:
        """
        Take a picture.

        Returns:
            The picture.
        """
        self.taken += 1
        return [{"type": "text", "text": "here: "}, {"type": "image", "image": picture(16, 8 * self.taken, self.taken)}]

    def get_reward(self) -> float:
        return float(self.taken)


CALL = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>' + END


def called_twice(trained: Any, monkeypatch: pytest.MonkeyPatch) -> list[list[GivenPrompt]]:
    """Make the first two turns of each conversation a call of the tool; return the prompts of each turn."""
    ids, sample, turns = trained._tokenizer(CALL)["input_ids"], trained._sample, []

    def behind(prompt: GivenPrompt) -> GivenPrompt:
        if isinstance(prompt, PromptWithImages):
            return replace(prompt, token_ids=prompt.token_ids + ids)
        return prompt + ids

    def calls_first(prompts: list[GivenPrompt]) -> Any:
        turns.append(prompts)
        if len(turns) % 3 == 0:
            return sample(prompts)
        scores = trained.worker.generate(list(map(behind, prompts)), SamplingParams(max_tokens=1, prompt_logprobs=0))
        return [list(ids) for _ in prompts], [score.prompt_logprobs[-len(ids) :] for score in scores]

    monkeypatch.setattr(trained, "_sample", calls_first)
    return turns


@pytest.mark.parametrize("prompts", ["with images", "of text"])
def test_tools_that_answer_with_images(prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tools may answer with images. No placeholder is sampled then: TRL takes any behind a prompt for one of theirs."""
    folder = vision_folder(tmp_path / "model", "Qwen3")
    options = config(
        GRPOTrainer, tmp_path, per_device_train_batch_size=8, max_completion_length=300, max_steps=1,
        max_tool_calling_iterations=2, generation_kwargs={"logit_bias": {PLACEHOLDER_ID: 1000.0}},
    )  # fmt: skip
    given = data() if prompts == "with images" else data().remove_columns("images")
    trained = GRPOTrainer(str(folder), None, options, train_dataset=given, environment_factory=Camera)
    turns = called_twice(trained, monkeypatch)
    trained.train()
    assert len(turns) == 3
    assert all(isinstance(prompt, PromptWithImages) for turn in turns[1:] for prompt in turn)
    assert trained.agreement.compared > 8 * 2 * len(trained._tokenizer(CALL)["input_ids"])
    assert trained.agreement.differing == 0


def test_a_processor_for_a_model_that_computes_text_alone_is_refused_by_name(folder: Path, tmp_path: Path) -> None:
    model = AutoModelForImageTextToText.from_pretrained(folder)
    model.model.visual.merger.mlp[1] = torch.nn.Softplus()
    processor = AutoProcessor.from_pretrained(folder, padding_side="left")
    options = config(GRPOTrainer, tmp_path)
    said = r"processing_class=WithoutVideos \(this model computes text alone, because .* a Softplus"
    with pytest.raises(ValueError, match=said):
        GRPOTrainer(model, reward, options, train_dataset=data(), processing_class=processor)


@pytest.mark.parametrize("kind", [GRPOTrainer, RLOOTrainer])
def test_padding_on_the_right_is_refused_by_name(kind: type, folder: Path, tmp_path: Path) -> None:
    processor = AutoProcessor.from_pretrained(folder, padding_side="right")
    with pytest.raises(ValueError, match="padding_side='right' of the processor's tokenizer"):
        trainer(kind, folder, tmp_path, processing_class=processor)


@pytest.mark.parametrize("kind", [GRPOTrainer, RLOOTrainer])
def test_images_that_nothing_reads_are_refused_by_name(kind: type, folder: Path, tmp_path: Path) -> None:
    """Images beside a tokenizer, and videos beside any, are refused by name."""
    trained = trainer(kind, folder, tmp_path, processing_class=AutoTokenizer.from_pretrained(folder))
    with pytest.raises(ValueError, match="8 images, of which the processing_class has made no pixel_values and no im"):
        trained.train()
    with pytest.raises(ValueError, match="does not go with pixel_values_videos: prompts hold text and images"):
        trained._generate_single_turn([[1, 2]], None, {"pixel_values_videos": torch.ones(4, 96)})


def test_images_in_async_grpo_are_refused_by_name(folder: Path, tmp_path: Path) -> None:
    options = AsyncGRPOConfig(output_dir=str(tmp_path), bf16=False, use_cpu=True)
    with pytest.raises(ValueError, match="the column 'images' of train_dataset"):
        AsyncGRPOTrainer(str(folder), reward, options, data())
    processor, of_text = AutoProcessor.from_pretrained(folder), data().remove_columns("images")
    with pytest.raises(ValueError, match=r"processing_class=WithoutVideos \(AsyncGRPO is of text alone"):
        AsyncGRPOTrainer(str(folder), reward, options, of_text, processing_class=processor)
