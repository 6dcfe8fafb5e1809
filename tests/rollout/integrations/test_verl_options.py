"""What samebit makes of verl's options is right, and what it refuses, it refuses before anything is started."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch

pytest.importorskip("verl", reason="verl is not installed: pip install 'samebit[verl]'")
pytest.importorskip("transfer_queue", reason="TransferQueue is not installed: pip install 'samebit[verl]'")

import omegaconf.base
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from verl.utils.config import omega_conf_to_dataclass, validate_config
from verl.utils.profiler import ProfilerConfig
from verl.workers.config import CheckpointEngineConfig, FSDPEngineConfig, MtpConfig, PrometheusConfig, ServerConfig
from verl.workers.config import RolloutConfig as VerlRolloutConfig

from samebit.benchmarks.verl_matrix import cases
from samebit.recipes import verl_grpo
from samebit.recipes.verl_grpo.launch import Run
from samebit.rollout import RolloutConfig
from samebit.rollout.errors import ModelLoadError
from samebit.rollout.integrations.verl import options, run_check
from samebit.rollout.integrations.verl.options import (
    AdapterOption,
    check_trainer,
    server_options,
    warn_about_the_rest,
)
from samebit.rollout.integrations.verl.run_check import check_options, check_run
from samebit.rollout.integrations.verl.server.replica import gpu_environment
from samebit.rollout.integrations.verl.server.requests import sampling_params
from samebit.rollout.integrations.verl.trainer import exactness

from ...forks import python
from ...patience import HANG

CONFIGS = Path(str(inspect.getfile(verl_grpo))).parent
FOLDER = {"path": "folder", "tokenizer_path": None}
MODEL = {"use_fused_kernels": True, "fused_kernel_options": {"impl_backend": "samebit"}}
ENGINE = FSDPEngineConfig(strategy="fsdp2")


@pytest.fixture(scope="module", autouse=True)
def interpolations_parsed_once() -> Iterator[None]:
    """Let OmegaConf parse each interpolation once: again whenever it is resolved takes half of a look at a
    configuration.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(omegaconf.base, "parse", cache(omegaconf.base.parse))
        yield


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with what is looked for of a model before anything is started."""
    (tmp_path / "tokenizer.json").touch()
    return tmp_path


@cache
def recipe(name: str, *groups: str) -> Any:
    """Return a configuration of the recipe as it stands, with other files of verl in the place of its groups."""
    with initialize_config_dir(str(CONFIGS), version_base=None):
        return compose(name, list(groups))


def composed(folder: Path | str, *changes: str, name: str = "tiny") -> Any:
    """Return the same with these options; one that verl does not know needs a `+` in front, as for Hydra."""
    groups = [change for change in changes if change.startswith("model_engine=")]
    config = recipe(name, *groups).copy()
    for change in (f"actor_rollout_ref.model.path={folder}", *changes):
        if change not in groups:
            OmegaConf.set_struct(config, not change.startswith("+"))
            config.merge_with_dotlist([change.lstrip("+")])
    return config


def usual(**changes: Any) -> Any:
    """Return verl's options, as its own yaml file has them where that matters."""
    given = {"name": "samebit", "tensor_model_parallel_size": 1, "max_num_seqs": 256, "dtype": "float32"}
    return VerlRolloutConfig(**{**given, **changes})


def test_folders_that_are_not_there_are_named_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"no such model folder: .*/missing$"):
        check_run(composed(tmp_path / "missing"))
    config = composed(tmp_path)
    with pytest.raises(ModelLoadError, match="has no tokenizer"):
        check_run(config)
    words = tmp_path / "words"
    config.actor_rollout_ref.model.tokenizer_path = str(words)
    with pytest.raises(ModelLoadError, match=r"no such model folder: .*words"):
        check_run(config)
    words.mkdir()
    (words / "tokenizer.json").touch()
    check_run(config)
    check_run(composed("hdfs://host/model"))


def test_a_name_of_the_hub_becomes_the_folder_of_one_commit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name of the hub becomes the folder of one commit, before trainer or servers read the configuration."""
    snapshot = folder / "hub" / "models--org--name" / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    refs = snapshot.parent.parent / "refs"
    refs.mkdir()
    (refs / "v1").write_text(snapshot.name)
    (snapshot / "tokenizer.json").touch()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(folder / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    config = composed("org/name", "+actor_rollout_ref.rollout.custom.revision=v1")
    check_run(config)
    assert config.actor_rollout_ref.model.path == str(snapshot)
    check_run(config)
    with pytest.raises(ModelLoadError, match="hf download org/other"):
        check_run(composed("org/other"))


def test_another_rollout_is_not_looked_at(tmp_path: Path) -> None:
    config = composed(tmp_path / "missing", "actor_rollout_ref.actor.strategy=fsdp")
    config.actor_rollout_ref.rollout.name = "vllm"
    check_run(config)


ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
PARAM_DTYPE = "fsdp_config.mixed_precision.param_dtype"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("actor_rollout_ref.model.use_fused_kernels=False", "use_fused_kernels=True"),
        ("actor_rollout_ref.model.fused_kernel_options.impl_backend=torch", "impl_backend=samebit"),
        ("+actor_rollout_ref.model.override_config.rms_norm_eps=1e-2", r"model\.override_config\.rms_norm_eps"),
        (
            "+actor_rollout_ref.model.override_config.model_config.rope_theta=9",
            r"model\.override_config\.model_config\.rope_theta",
        ),
        ("actor_rollout_ref.model.hf_config_path=/elsewhere", "model.hf_config_path=/elsewhere"),
        ("actor_rollout_ref.model.trust_remote_code=True", "model.trust_remote_code=True"),
        ("actor_rollout_ref.model.use_liger=True", "model.use_liger=True"),
        ("actor_rollout_ref.model.lora.merge=True", r"model\.lora\.merge=True \(merged weights are another policy"),
        ("actor_rollout_ref.model.tiled_mlp.enabled=True", "model.tiled_mlp.enabled=True"),
        (f"{ACTOR}.strategy=fsdp", r"strategy=fsdp \(use fsdp2\)"),
        (f"{ACTOR}.ulysses_sequence_parallel_size=2", "ulysses_sequence_parallel_size > 1"),
        (f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size=2", "ulysses_sequence_parallel_size > 1"),
        (f"{ACTOR}.fsdp_config.qat.enable=True", "qat.enable=True"),
        (f"{ACTOR}.fsdp_config.offload_policy=True", "offload_policy=True on a CPU"),
        ("distillation.enabled=True", "distillation.enabled=True"),
        (f"+{ROLLOUT}.checkpoint_engine.engine_kwargs.samebit.buckets=3", r"engine_kwargs\.samebit\.buckets"),
        (f"{ROLLOUT}.quantization=fp8", r"rollout\.quantization=fp8 .* null"),
        ("actor_rollout_ref.model.lora.rank=8", r"model\.lora\.rank > 0"),
        ("actor_rollout_ref.model.lora_adapter_path=/adapter", "lora_adapter_path without model.lora_rank"),
        (f"+{ROLLOUT}.custom.images=1", "images must be True or False, got 1"),
        ("actor_rollout_ref.model.enable_activation_offload=True", "enable_activation_offload=True on a CPU"),
        (f"{ACTOR}.calculate_sum_pi_squared=True", "actor.calculate_sum_pi_squared=True"),
        ("algorithm.adv_estimator=gae", "adv_estimator=gae, verl's default.*set algorithm.adv_estimator=grpo"),
        ("critic.enable=True", "critic.enable=True trains a critic"),
        ("algorithm.adv_estimator=optimal_token_baseline", "adv_estimator=optimal_token_baseline needs logits"),
        ("model_engine=veomni", r"ref\.strategy=veomni.*set model_engine=dp"),
        ("model_engine=megatron", r"ref\.strategy=megatron.*set model_engine=dp"),
        ("model_engine=torchtitan", r"ref\.strategy=torchtitan.*set model_engine=dp"),
        (f"{ROLLOUT}.temperature=0", r"rollout\.temperature=0.*val_kwargs\.temperature=0"),
        (f"{ROLLOUT}.temperature=1e-6", r"rollout\.temperature must be 0 \(greedy\) or at least 0\.0001"),
        (f"{ROLLOUT}.top_p=0", r"rollout\.top_p must be"),
        (f"++{ROLLOUT}.repetition_penalty=-1", r"rollout\.repetition_penalty must be"),
        (f"++{ROLLOUT}.custom=5", r"rollout\.custom must be a mapping of options, got 5"),
        (f"{ROLLOUT}.response_length=0", r"rollout\.response_length must be an int of at least 1"),
        (f"{ROLLOUT}.n=0", r"rollout\.n must be an int from 1 to 16384"),
        (f"{ROLLOUT}.val_kwargs.top_k=-7", r"rollout\.val_kwargs\.top_k must be"),
        (f"{ROLLOUT}.max_model_len=32", r"max_model_len=32 leaves no room .* rollout\.prompt_length=32"),
        ("actor_rollout_ref.model.path=null", r"model\.path must be a folder or a name of the hub, got None"),
        ("actor_rollout_ref.model.path=''", r"model\.path must be a folder or a name of the hub, got ''"),
        ("trainer.n_gpus_per_node=2", r"has 2 workers.* told of 1: set \+\+ray_kwargs\.ray_init\.num_gpus=2"),
    ],
)
def test_what_a_trainer_or_server_would_refuse_is_refused_at_the_start(folder: Path, change: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        check_run(composed(folder, change))


def test_images_go_with_all_weights_on_a_cpu(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = f"+{ROLLOUT}.custom.images=True"
    found = check_options(composed(folder, asked))
    assert found is not None
    assert found.worker.images
    config = composed(folder, asked)
    check_run(config)
    assert config.actor_rollout_ref.model.fused_kernel_options == {"impl_backend": "samebit", "images": True}
    with pytest.raises(ValueError, match=r"custom\.images=True does not go with model\.lora_rank=8"):
        check_run(composed(folder, asked, "actor_rollout_ref.model.lora_rank=8"))
    monkeypatch.setattr(options, "get_device_name", lambda: "cuda")
    with pytest.raises(ValueError, match=r"custom\.images=True does not go with a device that is no CPU \(cuda"):
        check_run(composed(folder, asked))


def test_an_adapters_base_model_is_the_servers_where_they_read_it_themselves(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An adapter's base model that the trainer rounds is refused where servers read it from the folder in float32."""
    lora, read = "actor_rollout_ref.model.lora_rank=8", f"{ROLLOUT}.load_format=safetensors"
    narrow = f"{ACTOR}.fsdp_config.model_dtype=bf16"
    apart = ("+rollout.nnodes=1", f"{ROLLOUT}.checkpoint_engine.backend=samebit")
    for changes in ((read,), apart):
        with pytest.raises(ValueError, match="model_dtype=bf16 rounds the trainer's"):
            check_run(composed(folder, lora, narrow, *changes))
        check_run(composed(folder, lora, *changes))
    check_run(composed(folder, lora, narrow))
    check_run(composed(folder, lora, narrow, read, f"{ACTOR}.{PARAM_DTYPE}=bf16", f"{ROLLOUT}.dtype=bfloat16"))
    with caplog.at_level(logging.WARNING):
        check_run(composed(folder, lora, read))
        assert "load_format" not in caplog.text
        check_run(composed(folder, read))
    assert "has no use for: rollout.load_format=safetensors" in caplog.text


def test_a_repetition_penalty_is_said_to_be_for_loops_that_ask_for_none(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        check_run(composed(folder, f"++{ROLLOUT}.repetition_penalty=1.3"))
    assert "rollout.repetition_penalty=1.3 has an effect only in an agent loop of yours" in caplog.text


def test_the_engine_of_a_reference_policy_is_checked_where_there_is_one(folder: Path) -> None:
    reference = "actor_rollout_ref.ref"
    for option, says in (
        (f"{reference}.strategy=fsdp", r"actor_rollout_ref\.ref: .*strategy=fsdp \(use fsdp2\)"),
        (f"{reference}.fsdp_config.qat.enable=True", r"actor_rollout_ref\.ref: .*qat\.enable=True"),
        (f"{reference}.ulysses_sequence_parallel_size=2", r"actor_rollout_ref\.ref: .*ulysses"),
        (f"{reference}.fsdp_config.offload_policy=True", "offload_policy=True on a CPU"),
    ):
        check_run(composed(folder, option))
        with pytest.raises(ValueError, match=says):
            check_run(composed(folder, option, f"{ACTOR}.use_kl_loss=True"))
    check_run(composed(folder, "algorithm.use_kl_in_reward=True"))


@pytest.mark.parametrize("asked", [f"{ACTOR}.use_kl_loss=True", "algorithm.use_kl_in_reward=True"])
def test_a_reference_policy_computes_in_the_dtype_of_the_actor(folder: Path, asked: str) -> None:
    dtype, reference = "fsdp_config.mixed_precision.param_dtype", "actor_rollout_ref.ref"
    verls = f"{reference}.fsdp_config.mixed_precision=null"
    narrow = (f"{ACTOR}.{dtype}=bf16", f"{ROLLOUT}.dtype=bfloat16")
    says = r"actor computes in fp32 .* policy in bf16 .*; set \+\+actor_rollout_ref\.ref\.fsdp_config.*=fp32$"
    check_run(composed(folder, verls))
    with pytest.raises(ValueError, match=says):
        check_run(composed(folder, verls, asked))
    with pytest.raises(ValueError, match=r"actor computes in bf16 .* policy in float32 "):
        check_run(composed(folder, f"{reference}.{dtype}=float32", asked, *narrow))
    check_run(composed(folder, verls, asked, *narrow))
    check_run(composed(folder, verls, asked, "actor_rollout_ref.model.lora_rank=8"))
    for changes, expected in (((), "fp32"), (narrow, "bf16")):
        config = composed(folder, asked, *changes)
        check_run(config)
        assert config.actor_rollout_ref.ref.fsdp_config.mixed_precision.param_dtype == expected


def test_a_reward_model_is_not_served_by_samebit(folder: Path) -> None:
    """A reward model is not served by samebit, whatever serves the policy."""
    model = "reward.reward_model"
    config = composed(folder, f"{model}.enable=True", f"{model}.rollout.name=samebit")
    for policy in ("samebit", "vllm"):
        config.actor_rollout_ref.rollout.name = policy
        with pytest.raises(ValueError, match=r"reward_model\.rollout\.name=samebit: verl asks .* over HTTP"):
            check_run(config)
    check_run(composed(folder, f"{model}.enable=True", f"{model}.rollout.name=vllm"))
    check_run(composed(folder, f"{model}.rollout.name=samebit"))


def test_validation_may_be_greedy_or_sampled(folder: Path) -> None:
    for temperature in (0, 0.5):
        check_run(composed(folder, f"{ROLLOUT}.val_kwargs.temperature={temperature}", f"{ROLLOUT}.val_kwargs.n=3"))


def test_slots_are_counted_where_ray_is_started_here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = "trainer.n_gpus_per_node=4"
    check_run(composed(folder, few, "ray_kwargs.ray_init.num_gpus=4"))
    check_run(composed(folder, few, "+ray_kwargs.ray_init.address=auto"))
    apart = cases.MODES["separate_async"] | {"ray_kwargs.ray_init.num_gpus": 1}
    with pytest.raises(ValueError, match="has 2 workers"):
        check_run(composed(folder, *(f"++{name}={value}" for name, value in apart.items())))
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    check_run(composed(folder, few))


@pytest.mark.parametrize("mode", list(cases.MODES))
def test_the_runs_of_the_matrix_go_together(folder: Path, mode: str) -> None:
    given = {**cases.settings(4), **cases.MODES[mode], **cases.DTYPES["bf16"], "actor_rollout_ref.model.path": folder}
    with initialize_config_dir(str(CONFIGS), version_base=None):
        check_run(compose("tiny", [word for word in Run(folder, folder, given).command() if word.startswith("++")]))


def test_an_accelerator_that_is_no_gpu_is_refused_at_the_start(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exactness, "get_device_name", lambda: "npu")
    with pytest.raises(ValueError, match=r"a device that is neither a CPU nor an NVIDIA GPU \(npu\)"):
        check_run(composed(folder))


def test_an_adapter_reaches_the_servers(folder: Path) -> None:
    """An adapter reaches the servers with the trainer's options of it; and every request goes through it."""
    model = "actor_rollout_ref.model"
    config = composed(folder, f"{model}.lora_rank=8", f"{model}.lora_alpha=4", f"{model}.target_modules=[q_proj]")
    check_run(config)
    rollout = omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
    made = server_options(rollout, config.actor_rollout_ref.model, 0, "server")
    fields = {"r": 8, "lora_alpha": 4, "target_modules": ["q_proj"], "exclude_modules": None}
    assert made.adapter == AdapterOption(fields, None)
    assert sampling_params({}, 1, made, room=1, eos=()).adapter == "policy"
    config = composed(folder, f"{model}.lora_rank=8", f"{model}.lora_adapter_path=/adapter")
    check_run(config)
    made = server_options(rollout, config.actor_rollout_ref.model, 0, "server")
    assert made.adapter is not None
    assert made.adapter.folder == "/adapter"
    with pytest.raises(ValueError, match="target_parameters"):
        check_run(composed(folder, f"{model}.lora_rank=8", f"++{model}.target_parameters=[w]"))
    assert sampling_params({}, 1, server_options(rollout, FOLDER, 0, ""), room=1, eos=()).adapter is None


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let verl say that the device is a GPU; there is none."""
    for module in (exactness, options, run_check):
        monkeypatch.setattr(module, "get_device_name", lambda: "cuda")


@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize("name", ["qwen3_8b_8gpu", "nemotron_h_8b_8gpu"])
def test_a_server_on_a_gpu_takes_its_share_and_tests_itself(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A server on a GPU takes its share and tests itself. Its own process makes the worker's options: that of the
    trainer's loop may see no GPU.
    """
    rollout = "actor_rollout_ref.rollout"
    config = composed(folder, f"{rollout}.gpu_memory_utilization=0.4", f"{rollout}.enforce_eager=True", name=name)
    made = check_options(config)
    assert made is not None
    assert not caplog.text, "both have a meaning there"
    assert made.worker.device == "cpu"
    with pytest.raises(ValueError, match=r"torch .* sees no CUDA device here"):
        made.worker_config()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    worker = made.worker_config()
    assert (worker.device, worker.gpu_memory_utilization, worker.enforce_eager) == ("cuda", 0.4, True)
    assert worker.tests_itself
    assert (worker.dtype, worker.seed) == (made.worker.dtype, made.worker.seed)
    config = composed(folder, f"++{rollout}.custom.kv_cache_gb=3", f"{rollout}.gpu_memory_utilization=0.4", name=name)
    made = check_options(config)
    assert made is not None
    assert "gpu_memory_utilization=0.4" in caplog.text, "custom sizes the pool"
    assert (made.worker_config().gpu_memory_utilization, made.worker_config().kv_cache_gb) == (None, 3)
    offloaded = composed(folder, "actor_rollout_ref.actor.fsdp_config.offload_policy=True", name=name)
    with pytest.raises(ValueError, match=r"offload_policy=True on a GPU \(weights are gathered there; use"):
        check_options(offloaded)


def test_a_server_sees_the_gpu_of_its_worker_alone() -> None:
    seen = gpu_environment("cuda", ["5"])
    assert seen == {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "5"}
    assert gpu_environment("cpu", ["5"]) == {}, "Ray's slots are no GPUs"
    with pytest.raises(ValueError, match="the worker beside a server has the GPUs 1, 2; allowed: one"):
        gpu_environment("cuda", ["1", "2"])


def test_the_models_own_config_and_verls_own_attention_are_fine(folder: Path) -> None:
    changes = (
        f"actor_rollout_ref.model.hf_config_path={folder}",
        "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
        "+actor_rollout_ref.model.override_config.attention_dropout=0.0",
        "+actor_rollout_ref.model.override_config.model_config={}",
    )
    check_run(composed(folder, *changes))


def test_servers_apart_get_their_weights_over_samebits_transport(folder: Path) -> None:
    backend = f"{ROLLOUT}.checkpoint_engine.backend"
    v1, experimental = "trainer.v1.trainer_mode=separate_async", "+rollout.nnodes=1"
    for apart in (v1, experimental):
        with pytest.raises(ValueError, match=r"backend=naive with servers of their own \(use samebit\)"):
            check_run(composed(folder, apart))
        with pytest.raises(ValueError, match="backend=nccl"):
            check_run(composed(folder, apart, f"{backend}=nccl"))
        check_run(composed(folder, apart, f"{backend}=samebit"))
    check_run(composed(folder, v1, "trainer.use_v1=False"))


def test_options_reach_the_worker(caplog: pytest.LogCaptureFixture) -> None:
    given = usual(
        max_num_seqs=32,
        max_num_batched_tokens=16,
        max_model_len=200,
        enable_prefix_caching=False,
        seed=5,
        custom={
            "block_size": 32,
            "num_threads": 1,
            "num_cpus": 2,
            "sync_timeout": 9,
            "routed_experts": True,
            "num_speculative_tokens": 5,
            "prompt_lookup_min": 2,
            "speculative_step_tokens": 9,
            "speculative_history_tokens": 0,
            "draft_model": "small",
            "draft_revision": "v1",
            "draft_cache_gb": 0.5,
        },
        gpu_memory_utilization=0.7,
        enforce_eager=True,
        engine_kwargs={"vllm": {"x": 1}},
    )
    with caplog.at_level(logging.WARNING):
        made = server_options(given, FOLDER, 3, "server")
        assert not caplog.text
        warn_about_the_rest(given, ENGINE)
    assert made.worker == RolloutConfig(
        max_num_seqs=32,
        max_num_batched_tokens=32,
        max_model_len=200,
        enable_prefix_caching=False,
        dtype="float32",
        seed=8,
        block_size=32,
        num_threads=1,
        num_speculative_tokens=5,
        prompt_lookup_min=2,
        speculative_step_tokens=9,
        speculative_history_tokens=0,
        draft_model="small",
        draft_revision="v1",
        draft_cache_gb=0.5,
    )
    assert (made.num_cpus, made.sync_timeout, made.response_length, made.traces) == (2, 9.0, 512, None)
    assert made.routed_experts
    for name in ("gpu_memory_utilization=0.7", "enforce_eager=True", "engine_kwargs.vllm"):
        assert f"rollout.{name}" in caplog.text
    assert "rollout.max_num_batched_tokens=16 is raised to rollout.max_num_seqs=32" in caplog.text


VERLS_OWN = {
    *("_target_", "name", "mode", "nnodes", "n_gpus_per_node", "checkpoint_manager_class", "router_config_path"),
    *("temperature", "top_k", "top_p", "n", "val_kwargs", "agent", "multi_turn", "trace"),
    *("log_prob_micro_batch_size", "log_prob_micro_batch_size_per_gpu", "log_prob_use_dynamic_bsz"),
    *("log_prob_max_token_len_per_gpu", "calculate_log_probs", "moe_load_balance_metrics_interval"),
}
"""Names what verl's trainer and agent loops read, and a server is not told or told with each request."""

OTHER: dict[str, Any] = {
    "quantization": "fp8",
    "quantization_config_file": "file",
    "dtype": "bfloat16",
    "standalone_gpu_memory_utilization": 0.3,
    "cudagraph_capture_sizes": [1],
    "max_model_len": 300,
    "engine_kwargs": {"vllm": {"x": 1}},
    "custom": {"block_size": 32},
    "profiler": ProfilerConfig(tool="nsys", enable=True, all_ranks=True, save_path="traces"),
    "layer_name_map": {"a": "b"},
    "limit_images": 1,
    "mtp": MtpConfig(enable_rollout=True),
    "qat": {"enable": True},
    "server": {"timeout": 5.0},
    "prometheus": PrometheusConfig(enable=True),
    "checkpoint_engine": CheckpointEngineConfig(update_weights_bucket_megabytes=7),
    "disaggregation": {"enabled": True},
}
"""Holds another value of each option that is no number, text or switch."""


def what_becomes_of(name: str, value: object, caplog: pytest.LogCaptureFixture) -> str:
    caplog.clear()
    try:
        given = usual(**{name: value})
        made = server_options(given, FOLDER, 0, "server")
    except (ValueError, AssertionError):
        return "refused"
    with caplog.at_level(logging.WARNING):
        warn_about_the_rest(given, ENGINE)
    if f"rollout.{name}" in caplog.text:
        return "named"
    return "silent" if made == server_options(usual(), FOLDER, 0, "server") else "honoured"


def another(name: str, usual: Any) -> Any:
    if name in OTHER:
        return OTHER[name]
    if isinstance(usual, bool):
        return not usual
    return f"other {usual}" if isinstance(usual, str) else usual + 1


def test_no_option_of_verl_is_dropped_silently(caplog: pytest.LogCaptureFixture) -> None:
    defaults = vars(usual())
    assert set(defaults) >= VERLS_OWN
    asked = set(defaults) - VERLS_OWN
    became = {name: what_becomes_of(name, another(name, defaults[name]), caplog) for name in sorted(asked)}
    assert {name for name, result in became.items() if result == "silent"} == set()
    assert became["seed"] == became["free_cache_engine"] == became["custom"] == "honoured"
    assert became["quantization"] == became["data_parallel_size"] == became["disaggregation"] == "refused"


def test_options_inside_others_are_named(caplog: pytest.LogCaptureFixture) -> None:
    for name in set(vars(ServerConfig())) - VERLS_OWN:
        assert what_becomes_of("server", ServerConfig(**{name: 7}), caplog) == "named"
        assert f"rollout.server.{name}=7" in caplog.text
    bucket = CheckpointEngineConfig(backend="samebit", update_weights_bucket_megabytes=7)
    assert what_becomes_of("checkpoint_engine", bucket, caplog) == "silent", "the size of a broadcast's bucket"


def test_usual_options_need_no_warning(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        check_run(composed(folder))
        assert not caplog.text
        named = ("rollout.server.timeout=5", "rollout.do_sample=False", "actor.fsdp_config.entropy_checkpointing=True")
        chunks = "actor.fsdp_config.entropy_from_logits_with_chunking=True"
        given = ("server.timeout=5", "do_sample=False")
        entropy = (f"{ACTOR}.entropy_checkpointing=True", f"actor_rollout_ref.{chunks}")
        check_run(composed(folder, *(f"++{ROLLOUT}.{option}" for option in given), *entropy))
    (record,) = caplog.records
    assert record.message == f"rollout.name=samebit has no use for: {', '.join((named[1], named[0], named[2], chunks))}"


def test_the_profiler_is_checked_for_all_servers() -> None:
    """The profiler is checked for all servers, of which the look at a run sees only the first."""

    def traces(rank: int, **options: Any) -> Path | None:
        profiler = ProfilerConfig(enable=True, ranks=[1], save_path="traces", **options)
        return server_options(usual(profiler=profiler), FOLDER, rank, "server").traces

    with pytest.raises(ValueError, match=r"rollout\.profiler\.tool=torch, not 'nsys'"):
        traces(0, tool="nsys")
    assert (traces(0, tool="torch"), traces(1, tool="torch")) == (None, Path("traces"))


def test_a_wrong_name_is_known_before_anything_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = Run.command
    monkeypatch.setattr(Run, "command", lambda run: [*python(), *command(run)[1:]])
    run = Run(tmp_path, tmp_path, {"actor_rollout_ref.rollout.custom.blocksize": 16})
    process = run.start()
    assert process.wait(HANG) != 0, "most of it are verl's imports"
    said = run.log.read_text()
    assert "unknown in rollout.custom: blocksize; samebit knows block_size" in said
    assert "ray init" not in said


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"custom": {"blocksize": 16}}, "unknown in rollout.custom: blocksize; samebit knows block_size"),
        ({"custom": {"block_size": 5}}, "block_size must be a power of two"),
        ({"custom": {"num_cpus": 0}}, "rollout.custom.num_cpus"),
        ({"custom": {"routed_experts": 1}}, r"rollout\.custom\.routed_experts must be True or False, got 1"),
        ({"enable_rollout_routing_replay": True}, r"routing_replay=True \(there is nothing to replay: .* the same exp"),
        ({"custom": {"sync_timeout": -1}}, r"rollout\.custom\.sync_timeout: .* a positive number of seconds, got -1"),
        ({"tensor_model_parallel_size": 2}, "rollout.tensor_model_parallel_size=2"),
        ({"quantization": "fp8"}, r"rollout\.quantization=fp8 \(.*: null\)"),
        ({"dtype": "float16"}, "rollout.dtype must be one of"),
        *[
            ({name: value}, rf"rollout\.{name} must be an int of at least 1, got ")
            for name in ("max_num_seqs", "max_num_batched_tokens", "prompt_length", "response_length")
            for value in (None, "x", 0)
        ],
        ({"data_parallel_size": "two"}, r"rollout\.data_parallel_size must be an int of at least 1, got 'two'"),
        ({"ignore_eos": "no"}, r"rollout\.ignore_eos must be True or False, got 'no'"),
        ({"seed": None}, r"rollout\.seed must be an int, got None"),
        ({"custom": 5}, r"rollout\.custom must be a mapping of options, got 5"),
        ({"custom": "block_size"}, r"rollout\.custom must be a mapping"),
    ],
)
def test_wrong_options_are_refused_by_name(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        server_options(usual(**changes), FOLDER, 0, "server")


@pytest.mark.parametrize(
    ("dtype", "model", "precision", "says"),
    [
        ("float32", {}, {"param_dtype": "fp32"}, "impl_backend=samebit"),
        ("float32", {**MODEL, "use_fused_kernels": False}, {"param_dtype": "fp32"}, "use_fused_kernels=True"),
        ("float32", MODEL, None, "computes in bf16"),
        ("bfloat16", MODEL, {"param_dtype": "fp32"}, "computes in fp32"),
    ],
)
def test_a_trainer_that_would_differ_is_refused(
    dtype: str, model: Mapping[str, Any], precision: Mapping[str, Any] | None, says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        check_trainer(dtype, model, precision)
    check_trainer("float32", MODEL, {"param_dtype": "fp32"})
    check_trainer("bfloat16", MODEL, None)


@pytest.mark.parametrize("name", ["qwen3_8b_8gpu", "nemotron_h_8b_8gpu"])
def test_the_configuration_for_gpus_is_one_that_verl_accepts(
    name: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = composed(folder, name=name)
    validate_config(config=config, use_reference_policy=False, use_critic=False)
    check_run(config)
    assert not caplog.text
    OmegaConf.resolve(config.actor_rollout_ref)
    rollout = omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
    made = server_options(rollout, config.actor_rollout_ref.model, 0, "server")
    assert config.trainer.n_gpus_per_node == 8
    assert made.worker.dtype == "bfloat16"
    config.actor_rollout_ref.rollout.dtype = "float32"
    with pytest.raises(ValueError, match="both must be bfloat16 or both float32"):
        check_run(config)
