"""TRL's GRPO and RLOO run with samebit: no token of several steps has another log-probability in the trainer."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("trl", reason="TRL is not installed: pip install 'samebit[trl]'")

import trl
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, MixtralConfig, MixtralForCausalLM
from trl.trainer.utils import add_fused_lm_head

from samebit.kernels.binding.families.family import BindingError
from samebit.kernels.binding.trainer.training import token_scores
from samebit.recipes import tiny_model
from samebit.recipes.accuracy import models
from samebit.rollout import RolloutConfig, SamplingParams
from samebit.rollout.integrations.trl import GRPOTrainer, RLOOTrainer, fused_forward
from samebit.rollout.integrations.trl.agreement import COMPARED, DIFFERENCE, DIFFERING, OF_TRL

from ...campaign import first_of
from .trl_model import END, byte_tokenizer, with_end_tokens

pytestmark = pytest.mark.usefixtures("offline")

END_ID = byte_tokenizer().eos_token_id
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 1}}\n</tool_call>' + END
PROMPTS = ["1", "2+3", "a longer one, of another length", "7-5+9="]
CASES: dict[str, tuple[type, dict[str, Any], dict[str, Any]]] = {
    "GRPO: reference, twice over, filters": (
        GRPOTrainer,
        {"beta": 0.1, "num_iterations": 2, "temperature": 0.7, "top_k": 20, "repetition_penalty": 1.1},
        {},
    ),
    "GRPO: a part at a time, entropy": (
        GRPOTrainer,
        {"steps_per_generation": 4, "gradient_accumulation_steps": 2, "entropy_coef": 0.01, "pad_to_multiple_of": 8},
        {},
    ),
    "GRPO: truncated samples masked, reference follows": (
        GRPOTrainer,
        {
            "mask_truncated_completions": True,
            "generation_kwargs": {"logit_bias": {END_ID: 5.0}},
            "beta": 0.1,
            "sync_ref_model": True,
            "ref_model_sync_steps": 1,
        },
        {},
    ),
    "GRPO: bfloat16": (GRPOTrainer, {"bf16": True, "model_init_kwargs": {"dtype": "bfloat16"}, "beta": 0.1}, {}),
    "GRPO: LoRA": (GRPOTrainer, {"beta": 0.1}, {"peft_config": LoraConfig(r=4, target_modules="all-linear")}),
    "RLOO": (RLOOTrainer, {"beta": 0.1, "gradient_accumulation_steps": 2, "num_iterations": 2}, {}),
    "RLOO: LoRA": (RLOOTrainer, {"beta": 0.1}, {"peft_config": LoraConfig(r=3, target_modules=["q_proj", "v_proj"])}),
    "GRPO": (GRPOTrainer, {}, {}),
}
"""Lists runs; those behind the sixth combine what those before them have, and are for `make soak`."""


def reward(completions: list[str], **_: Any) -> list[float]:
    return [len(set(text)) / 10 for text in completions]


def config(kind: type, out: Path, **options: Any) -> Any:
    given = {
        "output_dir": str(out),
        "max_steps": 3,
        "per_device_train_batch_size": 4,
        "num_generations": 2,
        "max_completion_length": 13,
        "learning_rate": 1e-3,
        "bf16": False,
        "use_cpu": True,
        "report_to": [],
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    return {GRPOTrainer: trl.GRPOConfig, RLOOTrainer: trl.RLOOConfig}[kind](**{**given, **options})


def trainer(kind: type, folder: Path, out: Path, options: dict[str, Any] | None = None, **more: Any) -> Any:
    data = Dataset.from_dict({"prompt": PROMPTS * 6})
    return kind(str(folder), reward, config(kind, out, **(options or {})), train_dataset=data, **more)


def steps(trained: Any) -> Iterator[dict[str, float]]:
    """Yield what was logged of each step, without the summary of the run."""
    yield from (row for row in trained.state.log_history if "loss" in row)


@pytest.mark.soak
@pytest.mark.parametrize("case", first_of([*CASES], 6))
def test_no_token_differs(case: str, folder: Path, tmp_path: Path) -> None:
    kind, options, more = CASES[case]
    trained = trainer(kind, folder, tmp_path, options, **more)
    before = copy.deepcopy(trained.model.state_dict())
    trained.train()
    assert trained.agreement.compared > 3 * 4
    assert trained.agreement.differing == 0
    assert trained.agreement.probs_diff_max == 0.0
    logged = list(steps(trained))
    compared = [row for row in logged if COMPARED in row]
    assert len(compared) >= len(logged) / 2
    assert all(row[DIFFERENCE] == row[OF_TRL] == row[DIFFERING] == 0.0 for row in compared)
    if "beta" in options:
        assert logged[0]["kl"] == 0.0, "the reference model is the policy at first, bit for bit"
        assert logged[-1]["kl"] != 0.0
    after = trained.model.state_dict()
    assert any(not torch.equal(before[name], after[name]) for name in before), "nothing was learned"
    assert trained.worker.weight_version >= 4


def test_what_travels_with_a_batch_is_where_the_batch_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """What travels with a batch is where the batch is, on a GPU too ("meta" stands for one; TRL was not run on one)."""
    batch = {"completion_mask": torch.ones(2, 3, device="meta")}
    monkeypatch.setattr(trl.RLOOTrainer, "_generate_and_score_completions", lambda self, inputs: dict(batch))
    trained: Any = object.__new__(RLOOTrainer)
    vars(trained).update(
        _computed=[], _sampled=[[0.5], [0.25, 0.5]],
        worker=SimpleNamespace(weight_version=3), agreement=SimpleNamespace(add=lambda *_: None),
    )  # fmt: skip
    monkeypatch.setattr(RLOOTrainer, "_old_logprobs", lambda self, output: None)
    sent = trained._generate_and_score_completions([])
    assert {name: str(one.device) for name, one in sent.items()} == dict.fromkeys(sent, "meta")
    assert len(sent) == 4


def test_a_step_sees_what_the_one_before_has_learned(folder: Path, tmp_path: Path) -> None:
    """A step sees what the one before has learned: the worker generates with the weights after each step, so that a
    greedy answer is another one, and evaluation agrees.
    """
    data = Dataset.from_dict({"prompt": PROMPTS})
    trained = trainer(GRPOTrainer, folder, tmp_path, {"learning_rate": 0.1, "eval_strategy": "no"}, eval_dataset=data)
    prompt = trained.processing_class(PROMPTS[2])["input_ids"]
    before = trained.worker.generate([prompt])[0].samples[0]
    trained.train()
    after = trained.worker.generate([prompt])[0].samples[0]
    assert before.logprobs != after.logprobs
    counted = trained.agreement.compared
    trained.evaluate()
    assert trained.agreement.compared > counted
    assert trained.agreement.differing == 0


@pytest.mark.parametrize(("kind", "times"), [(GRPOTrainer, 1), (RLOOTrainer, 2)], ids=["GRPO", "RLOO"])
def test_an_evaluation_has_metrics_of_its_own(kind: type, times: int, folder: Path, tmp_path: Path) -> None:
    """An evaluation between two entries of training has metrics of its own, and training has all of its. times: how
    often a token is compared.
    """
    options = {
        "max_steps": 2, "logging_steps": 2, "eval_strategy": "steps", "eval_steps": 1,
        "generation_kwargs": {"logit_bias": {END_ID: -100.0}},
    }  # fmt: skip
    trained = trainer(kind, folder, tmp_path, options, eval_dataset=Dataset.from_dict({"prompt": PROMPTS}))
    trained.train()
    (step,) = steps(trained)
    evaluations = [row for row in trained.state.log_history if "eval_loss" in row]
    assert step[COMPARED] == 2 * 4 * 13 * times
    first, second = (row[f"eval_{COMPARED}"] for row in evaluations)
    assert first == second == (trained.agreement.compared - step[COMPARED]) / 2
    for name in (COMPARED, DIFFERENCE, DIFFERING, OF_TRL):
        assert name in step
        assert f"eval_{name}" not in step
        assert not any(name in row for row in evaluations)
        assert all(f"eval_{name}" in row for row in evaluations)


def test_a_checkpoint_goes_on(folder: Path, tmp_path: Path) -> None:
    options = {"save_strategy": "steps", "save_steps": 2, "max_steps": 2}
    trainer(GRPOTrainer, folder, tmp_path, options).train()
    again = trainer(GRPOTrainer, folder, tmp_path, {**options, "max_steps": 4})
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert again.state.global_step == 4
    assert again.agreement.compared > 0
    assert again.agreement.differing == 0
    assert again.worker.stats()["untold_updates"] == 0


def test_one_bit_is_noticed(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One bit is noticed: a rollout function of the user's own is compared too, here with numbers next to the true
    ones.
    """

    def rollout(prompts: list[str], trained: Any) -> dict[str, Any]:
        prompt_ids = [trained.processing_class(prompt)["input_ids"] for prompt in prompts]
        samples = [output.samples[0] for output in trained.worker.generate(prompt_ids)]
        logprobs = [torch.tensor(sample.logprobs) for sample in samples]
        logprobs[0] = torch.nextafter(logprobs[0], torch.tensor(-torch.inf))
        first.append(len(logprobs[0]))
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": [sample.token_ids for sample in samples],
            "logprobs": [values.tolist() for values in logprobs],
        }

    first: list[int] = []
    trained = trainer(GRPOTrainer, folder, tmp_path, {"max_steps": 1}, rollout_func=rollout)
    trained.train()
    assert trained.agreement.differing == sum(first)
    assert 0 < trained.agreement.probs_diff_max < 1e-6
    assert trained.agreement.compared > trained.agreement.differing
    assert "another log-probability in the trainer" in caplog.text


def test_a_rollout_function_may_report_no_logprobs(folder: Path, tmp_path: Path) -> None:
    """A rollout function may report no log-probabilities: TRL trains as it does without its vLLM, and nothing is
    compared.
    """

    def rollout(prompts: list[str], trained: Any) -> dict[str, Any]:
        prompt_ids = [trained.processing_class(prompt)["input_ids"] for prompt in prompts]
        outputs = trained.worker.generate(prompt_ids)
        completions = [output.samples[0].token_ids for output in outputs]
        return {"prompt_ids": prompt_ids, "completion_ids": completions, "logprobs": None}

    trained = trainer(GRPOTrainer, folder, tmp_path, rollout_func=rollout)
    trained.train()
    assert len(list(steps(trained))) == 3
    assert trained.agreement.compared == 0


@pytest.mark.parametrize("labels", ["some", "none"])
def test_scores_are_near_those_of_trls_own_head(labels: str, folder: Path, tmp_path: Path) -> None:
    trained = trainer(GRPOTrainer, folder, tmp_path, {"temperature": 0.7})
    plain = AutoModelForCausalLM.from_pretrained(folder)
    add_fused_lm_head(plain, temperature=0.7, outputs=("log_probs", "entropy"))
    ids = torch.randint(0, 256, (3, 11), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    mask[1, 8:] = 0
    wanted = ids.masked_fill(mask == 0, -100)
    wanted[:, : 11 if labels == "none" else 6] = -100
    inputs = {"input_ids": ids, "attention_mask": mask, "labels": wanted, "fused_lm_head": True}
    ours, theirs = trained.model(**inputs), plain(**inputs)
    torch.testing.assert_close(ours.log_probs, theirs.log_probs, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours.entropy, theirs.entropy, rtol=1e-4, atol=1e-5)
    for model, scores in ((trained.model, ours), (plain, theirs)):
        (scores.log_probs.sum() + 0.3 * scores.entropy.sum()).backward()
        grads = [parameter.grad for parameter in model.parameters()]
        assert all(grad is not None or (labels == "none" and model is plain) for grad in grads)
    if labels == "some":
        for mine, other in zip(trained.model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, other.grad, rtol=1e-3, atol=1e-3)
    assert trained.model(input_ids=ids).logits.shape == (3, 11, len(byte_tokenizer()))


REFUSED: dict[str, dict[str, Any]] = {
    "use_vllm": {"use_vllm": True},
    "use_transformers_continuous_batching": {"use_transformers_continuous_batching": True},
    "cache_implementation": {"cache_implementation": "static"},
    "cast_lm_head_to_fp32": {"cast_lm_head_to_fp32": True},
    "use_liger_kernel": {"use_liger_kernel": True},
    "torch_compile": {"torch_compile": True},
    "neftune_noise_alpha": {"neftune_noise_alpha": 5.0},
    "use_kernels": {"model_init_kwargs": {"use_kernels": True}},
    "bf16=True": {"bf16": True},
    "fp16_full_eval=True": {"fp16_full_eval": True},
    "bf16_full_eval=True": {"bf16_full_eval": True},
    "optim=": {"optim": "schedule_free_adamw"},
    "temperature=0.0": {"temperature": 0.0},
    "generation_kwargs": {"generation_kwargs": {"num_beams": 2}},
    "top_p": {"top_p": 1.5},
    "structured_outputs": {"generation_kwargs": {"structured_outputs": {"regex": "a+"}}},
    "vllm_gpu_memory_utilization=0.7": {"vllm_gpu_memory_utilization": 0.7},
}


@pytest.mark.parametrize("name", REFUSED)
def test_options_are_refused_by_name(name: str, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=name):
        trainer(GRPOTrainer, folder, tmp_path, REFUSED[name])


@pytest.mark.parametrize("kind", [GRPOTrainer, RLOOTrainer])
def test_completions_keep_to_the_expression_that_trl_names(kind: type, folder: Path, tmp_path: Path) -> None:
    """Completions keep to `vllm_structured_outputs_regex`, and the log-probabilities are the trainer's bits."""
    rewarded: list[str] = []

    def noted(completions: list[str], **_: object) -> list[float]:
        rewarded.extend(completions)
        return [float(text.count("a")) for text in completions]

    asked = config(kind, tmp_path, max_steps=2, vllm_structured_outputs_regex="[ab]{3}")
    trained = kind(str(folder), noted, asked, train_dataset=Dataset.from_dict({"prompt": PROMPTS * 6}))
    trained.train()
    assert rewarded
    assert all(re.fullmatch("[ab]{3}", text) for text in rewarded)
    assert all(step[COMPARED] > 0 and step[DIFFERING] == 0 for step in steps(trained))


def test_mixed_precision_of_a_launcher_is_refused_by_name(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launcher's bf16 with a model in float32 is refused, as `bf16=True` is, which it stands for."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    with pytest.raises(ValueError, match=r"ACCELERATE_MIXED_PRECISION=bf16, .* with parameters of torch\.float32"):
        trainer(GRPOTrainer, folder, tmp_path)
    trainer(GRPOTrainer, folder, tmp_path, {"model_init_kwargs": {"dtype": "bfloat16"}})


@pytest.mark.parametrize(
    "adapter", [{"use_dora": True}, {"lora_dropout": 0.1}, {"bias": "all"}], ids=lambda given: str(given)
)
def test_adapters_that_are_not_exact_are_refused_by_name(adapter: dict[str, Any], folder: Path, tmp_path: Path) -> None:
    with pytest.raises(BindingError, match="(?i)" + next(iter(adapter)).removeprefix("use_").removeprefix("lora_")):
        trainer(GRPOTrainer, folder, tmp_path, peft_config=LoraConfig(r=2, target_modules=["q_proj"], **adapter))


def mixtral(tokenizer: Any) -> MixtralForCausalLM:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    return MixtralForCausalLM(MixtralConfig(vocab_size=len(tokenizer), num_hidden_layers=1, **sizes))


def test_mixed_precision_of_a_model_that_was_loaded_with_routers_in_float32(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    model = mixtral(tokenizer).to(torch.bfloat16)
    router = model.get_parameter("model.layers.0.mlp.gate.weight")
    router.data = router.data.float()
    data = Dataset.from_dict({"prompt": PROMPTS})
    options = config(GRPOTrainer, tmp_path, bf16=True, router_aux_loss_coef=0.0)
    with pytest.raises(ValueError, match=r"bf16=True, .*parameters of torch\.bfloat16, torch\.float32 "):
        GRPOTrainer(model, reward, options, train_dataset=data, processing_class=tokenizer)
    model._keep_in_fp32_modules_strict = {"gate.weight"}
    GRPOTrainer(model, reward, options, train_dataset=data, processing_class=tokenizer)


def test_a_loss_of_routers_is_refused_by_name(tmp_path: Path) -> None:
    options = config(GRPOTrainer, tmp_path)
    tokenizer = byte_tokenizer()
    model = mixtral(tokenizer)
    data = Dataset.from_dict({"prompt": PROMPTS})
    with pytest.raises(ValueError, match=r"router_aux_loss_coef=0\.0"):
        GRPOTrainer(model, reward, options, train_dataset=data, processing_class=tokenizer)


def test_the_worker_is_as_asked_for(folder: Path, tmp_path: Path) -> None:
    asked = RolloutConfig(max_num_seqs=3, block_size=8, seed=5)
    trained = trainer(GRPOTrainer, folder, tmp_path, {"max_steps": 1}, rollout_config=asked)
    assert trained.worker.config.max_num_seqs == 3
    trained.train()
    assert trained.agreement.differing == 0


def test_a_model_in_memory_with_states(tmp_path: Path) -> None:
    """A model in memory with states is trained: a hybrid with Mamba layers, and a tokenizer that puts a token in front
    of every prompt.
    """
    tokenizer = tiny_model.build_tokenizer()
    tokenizer.padding_side = "left"
    model = tiny_model.build_model(tokenizer, 0, "hybrid", hidden_size=32, intermediate_size=32)
    data = Dataset.from_dict({"prompt": ["7-5+9=", "1+1="] * 4})
    trained = GRPOTrainer(
        model, reward, config(GRPOTrainer, tmp_path, max_steps=2), train_dataset=data, processing_class=tokenizer
    )
    trained.train()
    assert trained.agreement.compared > 0
    assert trained.agreement.differing == 0


def test_attention_that_chooses_its_tokens(tmp_path: Path) -> None:
    """A model whose attention chooses its tokens, a GLM-5 that reads 9 of up to 32, is trained; what its indexers know
    stays as it is.
    """
    tokenizer = tiny_model.build_tokenizer()
    tokenizer.padding_side = "left"
    model = models.build("dsa", tokenizer, top_k=9)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    data = Dataset.from_dict({"prompt": ["7-5+9=", "1+1+2+3+4-5-6-7="] * 4})
    trained = GRPOTrainer(
        model, reward, config(GRPOTrainer, tmp_path, max_steps=2), train_dataset=data, processing_class=tokenizer
    )
    trained.train()
    assert trained.agreement.compared > 0
    assert trained.agreement.differing == 0
    after = trained.model.state_dict()
    same = {name for name in before if torch.equal(before[name], after[name])}
    assert same == {name for name in before if ".indexer." in name}


def test_the_folder_is_one_that_anybody_reads(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": "1+1"}], tokenize=False, add_generation_prompt=True
    )
    assert rendered == "<|im_start|>user\n1+1<|im_end|>\n<|im_start|>assistant\n"


class Adder:
    """Is an environment: its task is in `reset`, its tool adds, and it owns a reward."""

    def reset(self, **_: Any) -> str:
        self.calls = 0
        return "1+1"

    def add(self, a: int, b: int) -> int:
        """
        Add two numbers.

        Args:
            a: The first.
            b: The second.

        Returns:
            The sum.
        """
        self.calls += 1
        return a + b

    def get_reward(self) -> float:
        return float(self.calls)


def called_first(trained: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], list[int]]:
    """Make the first answer of each prompt a call of the tool; return its tokens, and how many prompts a turn had."""
    call_ids = trained.processing_class(CALL)["input_ids"]
    sample, turns = trained._sample, []

    def first_a_call(prompt_ids: list[list[int]]) -> Any:
        turns.append(len(prompt_ids))
        if len(turns) % 2:
            scores = trained.worker.generate(
                [prompt + call_ids for prompt in prompt_ids], SamplingParams(max_tokens=1, prompt_logprobs=0)
            )
            logprobs = [score.prompt_logprobs[-len(call_ids) :] for score in scores]
            return [list(call_ids) for _ in prompt_ids], logprobs
        return sample(prompt_ids)

    monkeypatch.setattr(trained, "_sample", first_a_call)
    return call_ids, turns


def test_tools_and_environments(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tools and environments work: what a tool says is attended to, and not compared."""
    data = Dataset.from_dict({"prompt": [[{"role": "user", "content": "What is it? "}]] * 8})
    options = config(GRPOTrainer, tmp_path, max_completion_length=140, max_steps=2, max_tool_calling_iterations=1)
    trained = GRPOTrainer(str(folder), None, options, train_dataset=data, environment_factory=Adder)
    call_ids, turns = called_first(trained, monkeypatch)
    trained.train()
    assert turns == [4, 4, 4, 4], "each was sampled, called, and sampled again"
    logged = list(steps(trained))
    assert all(row["rewards/Adder/mean"] == row["tools/call_frequency"] == 1.0 for row in logged)
    assert trained.agreement.compared > 8 * len(call_ids)
    assert trained.agreement.differing == 0


@pytest.mark.parametrize("kind", [GRPOTrainer, RLOOTrainer])
def test_end_tokens_outside_the_vocabulary(
    kind: type, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Samples end at the model's other end tokens where some are outside the vocabulary, as in generation configs of
    cut-down models.
    """
    model = with_end_tokens(folder, tmp_path / "model", [END_ID, 151645, -1])
    trained = trainer(kind, model, tmp_path, {"max_steps": 1, "generation_kwargs": {"logit_bias": {END_ID: 100.0}}})
    trained.train()
    (step,) = steps(trained)
    assert step["completions/mean_terminated_length"] == step["completions/max_length"] == 1.0
    assert trained.agreement.compared > 0
    assert "the trainer's list of end tokens names 151645, -1, outside the vocabulary" in caplog.text


def test_a_tokenizer_without_end_token_is_refused(folder: Path, tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="the tokenizer has no eos_token"):
        trainer(GRPOTrainer, folder, tmp_path, processing_class=tokenizer)


@pytest.mark.parametrize("kind", [GRPOTrainer, RLOOTrainer])
def test_entropies_are_computed_for_the_loss_alone(
    kind: type, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Entropies are computed for the loss alone, not with the log-probabilities of the reference model, nor with those
    from before the steps.
    """
    asked: list[tuple[bool, bool]] = []

    def noted(*given: Any, with_entropy: bool, **more: Any) -> Any:
        asked.append((torch.is_grad_enabled(), with_entropy))
        return token_scores(*given, with_entropy=with_entropy, **more)

    monkeypatch.setattr(fused_forward, "token_scores", noted)
    options = {"beta": 0.1, "steps_per_generation": 2, "max_steps": 2}
    trained = trainer(kind, folder, tmp_path, options, peft_config=LoraConfig(r=2, target_modules=["q_proj"]))
    trained.train()
    assert set(asked) == {(False, False), (True, True)}, "with a gradient is the loss"
    assert trained.agreement.differing == 0
