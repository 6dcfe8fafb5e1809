"""The training engine of verl computes with samebit's forward: its log-probabilities are the rollout worker's, bit for
bit.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch import distributed as dist
from torch._dynamo.utils import counters
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe

pytest.importorskip("verl", reason="verl is not installed: pip install 'samebit[verl]'")

from verl.trainer.config import CheckpointConfig
from verl.utils import fsdp_utils, tensordict_utils
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig

from samebit.kernels import bind
from samebit.rollout import RequestOutput, RolloutConfig, RolloutWorker, SampleOutput, SamplingParams
from samebit.rollout.integrations.verl import patches as replacements
from samebit.rollout.integrations.verl.names import ADAPTER
from samebit.rollout.integrations.verl.options import AdapterOption
from samebit.rollout.integrations.verl.server.adapters import adapter_config
from samebit.rollout.integrations.verl.trainer import engine as engines
from samebit.rollout.integrations.verl.trainer.fused_forward import give_logprobs
from samebit.rollout.integrations.verl.trainer.lora import bind_adapted
from samebit.rollout.integrations.verl.trainer.routing import COMPARED, DIFFERING

from ...campaign import CAMPAIGN
from .verl_model import save_model, save_sparse_model, save_wrapped_model

PROMPTS = [[1], [1, 5, 6, 7], list(range(4, 20)) * 2]
TEMPERATURE = 0.7
NAMES = {"float32": "fp32", "bfloat16": "bf16"}
PACKINGS: dict[str, dict[str, Any]] = {
    "padded": {"use_remove_padding": False, "micro_batch_size_per_gpu": 6},
    "padded, one by one": {"use_remove_padding": False, "micro_batch_size_per_gpu": 1},
    "packed": {"micro_batch_size_per_gpu": 6},
    "packed, two by two": {"micro_batch_size_per_gpu": 2},
    "dynamic": {"use_dynamic_bsz": True, "max_token_len_per_gpu": 100},
}


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def configs(folder: Path, dtype: str, **options: Any) -> tuple[HFModelConfig, FSDPEngineConfig]:
    name = NAMES[dtype]
    options = {"use_fused_kernels": True, "fused_kernel_options": {"impl_backend": "samebit"}, **options}
    model = HFModelConfig(path=str(folder), **options)
    precision = {"param_dtype": name, "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    return model, FSDPEngineConfig(
        strategy="fsdp2", model_dtype="fp32", mixed_precision=precision, use_fused_kernels=True
    )


def build(model: HFModelConfig, engine: FSDPEngineConfig) -> engines.SamebitEngine:
    optimizer = FSDPOptimizerConfig(lr=1e-2, total_training_steps=4, lr_warmup_steps_ratio=0.0)
    built = engines.SamebitEngine(model, engine, optimizer, CheckpointConfig())
    built.initialize()
    return built


def batch(outputs: list[RequestOutput], **options: Any) -> Any:
    """Return sampled sequences as verl's trainer hands them to its engine."""
    sequences = [torch.tensor(out.prompt_token_ids + s.token_ids) for out in outputs for s in out.samples]
    masks = [
        torch.tensor([0.0] * len(out.prompt_token_ids) + [1.0] * len(s.token_ids))
        for out in outputs
        for s in out.samples
    ]
    tensors = {
        "input_ids": _nested(sequences),
        "position_ids": _nested([torch.arange(len(sequence)) for sequence in sequences]),
        "loss_mask": _nested(masks),
    }
    defaults = {
        "use_remove_padding": True,
        "use_dynamic_bsz": False,
        "use_fused_kernels": True,
        "temperature": TEMPERATURE,
        "calculate_entropy": True,
        "pad_token_id": 0,
    }
    return tensordict_utils.get_tensordict(tensors, {**defaults, **options})


def _nested(parts: list[Tensor]) -> Tensor:
    return torch.nested.as_nested_tensor(parts, layout=torch.jagged)


def responses(engine: engines.SamebitEngine, outputs: list[RequestOutput], **options: Any) -> dict[str, Tensor]:
    """Return what the engine says of all sampled tokens, in order."""
    with engine.eval_mode():
        found = engine.infer_batch(batch(outputs, **options))["model_output"]
    samples = [(len(out.prompt_token_ids), len(s.token_ids)) for out in outputs for s in out.samples]
    return {
        name: torch.cat([row[p - 1 : p - 1 + length] for (p, length), row in zip(samples, rows.unbind(), strict=True)])
        for name, rows in found.items()
    }


def sampled(worker: RolloutWorker, adapter: str | None = None) -> tuple[list[RequestOutput], Tensor]:
    outputs = worker.generate(PROMPTS, SamplingParams(n=2, temperature=TEMPERATURE, max_tokens=40, adapter=adapter))
    return outputs, torch.tensor([x for out in outputs for s in out.samples for x in s.logprobs])


@pytest.mark.filterwarnings("error:.*autocast")
@pytest.mark.soak
@pytest.mark.parametrize(
    ("dtype", "tied", "checkpointing"),
    product(NAMES, *2 * [[True, False]]) if CAMPAIGN else [("float32", True, True), ("bfloat16", False, False)],
)
def test_the_engine_gives_the_workers_log_probabilities(
    tmp_path: Path, dtype: str, tied: bool, checkpointing: bool
) -> None:
    folder = save_model(tmp_path, tied=tied)
    model, options = configs(folder, dtype, enable_gradient_checkpointing=checkpointing)
    engine = build(model, options)
    with RolloutWorker(folder, config=RolloutConfig(dtype=dtype, max_num_seqs=8)) as worker:
        for step in range(2):
            outputs, reported = sampled(worker)
            for packing in PACKINGS.values():
                found = responses(engine, outputs, **packing)
                assert torch.equal(found["log_probs"], reported), (step, packing)
                assert bool((found["entropy"] > 0).all())
                alone = responses(engine, outputs, calculate_entropy=False, **packing)
                assert torch.equal(alone["log_probs"], reported)
                assert "entropy" not in alone
            with engine.train_mode():
                engine.train_batch(batch(outputs, micro_batch_size_per_gpu=2), loss_function=_loss)
            stream = engine.get_per_tensor_param()[0]
            assert {str(spec.dtype) for spec in stream.specs.values()} == {f"torch.{dtype}"}
            report = worker.receive_weights(stream)
            assert report.changed_tensors == report.tensors, "every weight was trained, and is the worker's now"
            assert bool(report.casts) == (dtype == "bfloat16")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_routed_experts_are_the_rollouts(tmp_path: Path, dtype: str) -> None:
    """Routed experts are the rollout's, also after the correction bias has changed, which travels as the forward uses
    it: in float32.
    """
    folder = save_model(tmp_path, architecture="moe")
    engine = build(*configs(folder, dtype))
    router = engine.module.get_submodule("model.layers.1.mlp.gate")
    asked = SamplingParams(n=2, temperature=TEMPERATURE, max_tokens=40, return_routed_experts=True)
    with RolloutWorker(folder, config=RolloutConfig(dtype=dtype, max_num_seqs=8)) as worker:
        for _ in range(2):
            outputs = worker.generate(PROMPTS, asked)
            reported = torch.tensor([x for out in outputs for s in out.samples for x in s.logprobs])
            for packing in PACKINGS.values():
                given = batch(outputs, **packing)
                given["routed_experts"] = _nested([_whole_length(out, s) for out in outputs for s in out.samples])
                with engine.eval_mode():
                    found = engine.infer_batch(given)["model_output"]
                tokens = sum(len(out.prompt_token_ids) + len(s.token_ids) - 1 for out in outputs for s in out.samples)
                assert int(found[COMPARED].values().sum()) == 4 * tokens, "one layer, four experts a token"
                assert int(found[DIFFERING].values().sum()) == 0
                assert torch.equal(responses(engine, outputs, **packing)["log_probs"], reported)
            with engine.train_mode():
                engine.train_batch(batch(outputs, micro_batch_size_per_gpu=2), loss_function=_loss)
            router.e_score_correction_bias += torch.linspace(-0.1, 0.1, 16)
            stream = engine.get_per_tensor_param()[0]
            report = worker.receive_weights(stream)
            assert report.changed_tensors == report.tensors
            taken = worker.module.state_dict()["model.layers.1.mlp.gate.e_score_correction_bias"]
            assert torch.equal(taken, router.e_score_correction_bias)
            assert not torch.equal(taken, taken.bfloat16().float())
        given["routed_experts"].values()[:, 1] += 1
        with engine.eval_mode():
            assert int(engine.infer_batch(given)["model_output"][DIFFERING].values().sum()) > tokens


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_attention_that_chooses_its_tokens(tmp_path: Path, dtype: str) -> None:
    """Attention that chooses its tokens, a GLM-5's, checkpointed, has the bits; an update changes all weights but those
    of the indexers, which have no gradient.
    """
    folder = save_sparse_model(tmp_path)
    engine = build(*configs(folder, dtype, enable_gradient_checkpointing=True))
    with RolloutWorker(folder, config=RolloutConfig(dtype=dtype, max_num_seqs=8)) as worker:
        for _ in range(2):
            outputs, reported = sampled(worker)
            for packing in PACKINGS.values():
                assert torch.equal(responses(engine, outputs, **packing)["log_probs"], reported), packing
            with engine.train_mode():
                engine.train_batch(batch(outputs, micro_batch_size_per_gpu=2), loss_function=_loss)
            stream = engine.get_per_tensor_param()[0]
            report = worker.receive_weights(stream)
            assert set(report.changed) == {name for name in stream.specs if ".indexer." not in name}


def _whole_length(out: RequestOutput, sample: SampleOutput) -> Tensor:
    """Return routed experts as verl hands them to the trainer: zeros behind what was computed."""
    assert sample.routed_experts is not None
    missing = len(out.prompt_token_ids) + len(sample.token_ids) - len(sample.routed_experts)
    return torch.nn.functional.pad(torch.from_numpy(sample.routed_experts), (0, 0, 0, 0, 0, missing))


def test_filling_up_and_compilation_change_no_bit(tmp_path: Path) -> None:
    """Filling up and compilation change no bit; verl's own entropy, which it compiles, is not asked."""
    folder = save_model(tmp_path)
    model, options = configs(folder, "float32")
    engine = build(model, replace(options, use_torch_compile=True, pad_to_length=True, pad_to_length_bucket=64))
    assert engine.pad_to_length
    counters.clear()
    with RolloutWorker(folder, config=RolloutConfig(dtype="float32")) as worker:
        outputs, reported = sampled(worker)
    for name in ("packed", "packed, two by two", "dynamic"):
        assert torch.equal(responses(engine, outputs, **PACKINGS[name])["log_probs"], reported), name
    assert not counters["stats"]


@pytest.mark.parametrize(("dtype", "checkpointing"), [("float32", True), ("bfloat16", False)])
def test_an_adapter_is_trained_and_sampled_unmerged(tmp_path: Path, dtype: str, checkpointing: bool) -> None:
    """An adapter is trained and sampled unmerged, as verl drives the engine with `lora_rank`: the base goes once, then
    A and B alone, in the forward's dtype.
    """
    folder = save_model(tmp_path, tied=False)
    model, options = configs(
        folder, dtype, lora_rank=3, enable_gradient_checkpointing=checkpointing, exclude_modules=".*k_proj"
    )
    engine = build(model, options)
    asked = AdapterOption.of(model)
    assert asked is not None
    with RolloutWorker(folder, config=RolloutConfig(dtype=dtype, max_num_seqs=8)) as worker:
        stream, said = engine.get_per_tensor_param(layered_summon=False, base_sync_done=False)
        assert said["r"] == 3
        assert worker.receive_weights(stream).changed_tensors == 0, "the base is the folder's, and stays it"
        config: Any = adapter_config(asked)
        for version in (1, 2, 3):
            stream, _ = engine.get_per_tensor_param()
            assert {str(spec.dtype) for spec in stream.specs.values()} == {f"torch.{dtype}"}
            assert not [name for name in stream.specs if "k_proj" in name]
            report = worker.load_adapter(ADAPTER, stream, config=config, autocast=False)
            assert report.version == version
            outputs, reported = sampled(worker, ADAPTER)
            for packing in PACKINGS.values():
                assert torch.equal(responses(engine, outputs, **packing)["log_probs"], reported), (version, packing)
            alone, unadapted = sampled(worker)
            with engine.disable_adapter():
                assert torch.equal(responses(engine, alone, **PACKINGS["packed"])["log_probs"], unadapted)
            assert torch.equal(responses(engine, alone, **PACKINGS["packed"])["log_probs"], unadapted) == (version == 1)
            with engine.train_mode():
                engine.train_batch(batch(outputs, micro_batch_size_per_gpu=2), loss_function=_loss)
            config = None


def _loss(model_output: dict[str, Tensor], data: Any, dp_group: Any) -> tuple[Tensor, dict[str, float]]:
    return -model_output["log_probs"].values().sum() - 0.1 * model_output["entropy"].values().sum(), {}


def test_a_reference_policy_needs_no_accelerator(tmp_path: Path) -> None:
    folder = save_model(tmp_path)
    model, options = configs(folder, "float32")
    engine = build(model, replace(options, forward_only=True))
    with RolloutWorker(folder, config=RolloutConfig(dtype="float32")) as worker:
        outputs, reported = sampled(worker)
    assert torch.equal(responses(engine, outputs, micro_batch_size_per_gpu=6)["log_probs"], reported)
    assert engine.engine_config.forward_only


def test_weights_that_are_kept_for_old_log_probabilities_are_a_copy(tmp_path: Path) -> None:
    replacements.replace_snapshot()
    engine = build(*configs(save_model(tmp_path), "float32"))
    shards, layout = fsdp_utils.fsdp2_sharded_save_to_cpu(engine.module)
    (name, parameter), *_ = engine.module.named_parameters()
    before = parameter.full_tensor().clone()
    with torch.no_grad():
        parameter.add_(1)
    assert torch.equal(shards[name][0], before)
    fsdp_utils.fsdp2_sharded_load_from_cpu(engine.module, shards, layout)
    assert torch.equal(parameter.full_tensor(), before)


def test_without_samebit_the_engine_is_verls(tmp_path: Path) -> None:
    override = {"attn_implementation": "sdpa"}
    model, options = configs(
        save_model(tmp_path), "float32", use_fused_kernels=False, fused_kernel_options={}, override_config=override
    )
    options.use_fused_kernels = False
    # What is not looked at, its entropy, needs no C++ compiler then.
    engine = build(model, replace(options, use_torch_compile=False))
    assert not engine.exact
    with RolloutWorker(tmp_path, config=RolloutConfig(dtype="float32")) as worker:
        outputs, reported = sampled(worker)
    logprobs = responses(engine, outputs, micro_batch_size_per_gpu=6, use_fused_kernels=False)["log_probs"]
    assert not torch.equal(logprobs, reported), "verl's own arithmetic is not samebit's: the other tests would be idle"
    assert torch.allclose(logprobs, reported, atol=1e-3)


@pytest.mark.parametrize(
    ("options", "engine_options", "says"),
    [
        ({"use_fused_kernels": False}, {}, "use_fused_kernels=False"),
        ({"use_liger": True}, {}, "use_liger"),
        ({"lora_rank": 8, "lora": {"merge": True}}, {}, "lora.merge=True"),
        ({"lora_rank": 8, "target_parameters": ["w"]}, {}, "target_parameters"),
        ({"lora_adapter_path": "/adapter"}, {}, "lora_adapter_path without model.lora_rank"),
        ({}, {"strategy": "fsdp"}, "strategy=fsdp"),
        ({}, {"ulysses_sequence_parallel_size": 2}, "ulysses"),
        ({}, {"mixed_precision": {"param_dtype": "fp16"}}, "fp16"),
        ({"override_config": {"rms_norm_eps": 1e-2}}, {}, r"model\.override_config\.rms_norm_eps"),
        ({"override_config": {"model_config": {"rope_theta": 9.0}}}, {}, r"override_config\.model_config\.rope_theta"),
        ({"trust_remote_code": True}, {}, "trust_remote_code=True"),
    ],
)
def test_what_is_not_exact_is_refused_by_name(
    tmp_path: Path, options: dict[str, Any], engine_options: dict[str, Any], says: str
) -> None:
    model, engine = configs(save_model(tmp_path), "float32", **options)
    with pytest.raises(ValueError, match=says):
        build(model, replace(engine, **engine_options))


def test_a_config_of_another_folder_is_refused(tmp_path: Path) -> None:
    folder, other = save_model(tmp_path / "model"), save_model(tmp_path / "other")
    with pytest.raises(ValueError, match=f"model.hf_config_path={other}"):
        build(*configs(folder, "float32", hf_config_path=str(other)))
    assert build(*configs(folder, "float32", hf_config_path=str(folder))).exact


def test_a_class_that_the_servers_do_not_know_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A class that the servers do not know is refused, as `model.external_lib` may register one: of the same name,
    which is all that `bind` asks, with other logits.
    """

    class Halved(Qwen3ForCausalLM):
        def forward(self, *given: Any, **options: Any) -> Any:
            output = super().forward(*given, **options)
            output.logits = output.logits / 2
            return output

    Halved.__name__ = "Qwen3ForCausalLM"
    monkeypatch.setitem(AutoModelForCausalLM._model_mapping._extra_content, Qwen3Config, Halved)
    with pytest.raises(ValueError, match=rf"Qwen3ForCausalLM is of {__name__}.*model\.external_lib"):
        build(*configs(save_model(tmp_path), "float32"))


def test_the_labels_and_what_is_computed_are_those_asked_for(tmp_path: Path) -> None:
    engine = build(*configs(save_model(tmp_path), "float32"))
    ids = torch.tensor([[1, 4, 5]])
    plain = engine.module(input_ids=ids, temperature=TEMPERATURE)
    assert plain.entropy is None
    same = engine.module(input_ids=ids, temperature=TEMPERATURE, shift_labels=ids.roll(-1, 1), with_entropy=True)
    assert torch.equal(same.log_probs, plain.log_probs)
    assert same.entropy.shape == ids.shape
    others = engine.module(input_ids=ids, temperature=TEMPERATURE, shift_labels=torch.tensor([[4, 7, 1]]))
    assert (others.log_probs == plain.log_probs).tolist() == [[True, False, True]]


def test_logits_are_not_handed_out_silently(tmp_path: Path) -> None:
    engine = build(*configs(save_model(tmp_path), "float32"))
    with pytest.raises(ValueError, match="use_fused_kernels"):
        engine.module(input_ids=torch.tensor([[1, 4, 5]]))


@pytest.mark.parametrize("adapted", [False, True])
def test_a_copy_of_the_trainers_model_computes_with_its_own_weights(adapted: bool, tmp_path: Path) -> None:
    model: Any = Qwen3ForCausalLM.from_pretrained(save_model(tmp_path))
    if adapted:
        model = bind_adapted(get_peft_model(model, LoraConfig(r=4, target_modules="all-linear")))
    else:
        model = give_logprobs(bind(model))
    ids = torch.tensor([[1, 4, 5]])
    expected = model(input_ids=ids, temperature=TEMPERATURE).log_probs.detach()
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    assert torch.equal(twin(input_ids=ids, temperature=TEMPERATURE).log_probs, expected)


def test_scores_that_fsdp2_casts_are_refused_by_name(tmp_path: Path) -> None:
    model: Any = give_logprobs(bind(Qwen3ForCausalLM.from_pretrained(save_model(tmp_path, tied=False))))
    fully_shard(model.lm_head, mp_policy=MixedPrecisionPolicy(output_dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"log_probs came out of the model as torch\.bfloat16, rounded: FSDP2"):
        model(input_ids=torch.tensor([[1, 4, 5]]), temperature=TEMPERATURE)


@pytest.fixture
def classes_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the forwards of Qwen3.5's classes back, which verl replaces for good."""
    for module in (modeling_qwen3_5, modeling_qwen3_5_moe):
        for name in ("Model", "DecoderLayer", "GatedDeltaNet", "ForConditionalGeneration"):
            kind = next(
                found for key, found in vars(module).items() if key.startswith("Qwen3_5") and key.endswith(name)
            )
            monkeypatch.setattr(kind, "forward", kind.forward)


@pytest.mark.usefixtures("classes_stay")
def test_a_model_that_is_wrapped_with_vision(tmp_path: Path) -> None:
    """A model that is wrapped with vision, as Qwen3.5 is published, has the bits; verl would let the vision tower run
    idle, and gives positions four times.
    """
    folder = save_wrapped_model(tmp_path)
    engine = build(*configs(folder, "bfloat16"))
    assert type(engine.module).__name__ == "FSDPQwen3_5ForConditionalGeneration"
    with RolloutWorker(folder, config=RolloutConfig(dtype="bfloat16", max_num_seqs=8)) as worker:
        for _ in range(2):
            outputs, reported = sampled(worker)
            for packing in ("padded", "packed"):
                assert torch.equal(responses(engine, outputs, **PACKINGS[packing])["log_probs"], reported), packing
            stream, _ = engine.get_per_tensor_param()
            assert not [name for name in stream.specs if "visual" in name]
            worker.receive_weights(stream)
