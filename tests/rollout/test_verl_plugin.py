"""What the plugin tells verl, how it fails, and whether verl still has what it replaces."""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verl", reason="verl is not installed: pip install 'samebit[verl]'")
pytest.importorskip("transfer_queue", reason="TransferQueue is not installed: pip install 'samebit[verl]'")

import numpy as np
import psutil
import ray
import torch
import transfer_queue
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from verl import DataProto
from verl.checkpoint_engine.base import CheckpointEngineRegistry, CheckpointEngineWorker
from verl.plugin.platform import PlatformRegistry, get_platform
from verl.utils import device, distributed, fsdp_utils
from verl.utils.config import omega_conf_to_dataclass, validate_config
from verl.utils.debug import metrics as verl_metrics
from verl.utils.profiler import ProfilerConfig
from verl.workers.config import CheckpointEngineConfig, MtpConfig, PrometheusConfig, ServerConfig
from verl.workers.config import RolloutConfig as VerlRolloutConfig
from verl.workers.engine import EngineRegistry
from verl.workers.rollout.base import get_rollout_class
from verl.workers.rollout.replica import RolloutReplica, get_rollout_replica_class

from samebit.recipes import verl_grpo
from samebit.recipes.verl_grpo.launch import Run
from samebit.rollout import RolloutConfig, WorkerLostError
from samebit.rollout.errors import ModelLoadError
from samebit.rollout.integrations.verl import checkpoint, engine, plugin, replacements, replica
from samebit.rollout.integrations.verl.adapter import SamebitRollout
from samebit.rollout.integrations.verl.gate import Gate
from samebit.rollout.integrations.verl.metrics import of_servers, on_policy, on_policy_of
from samebit.rollout.integrations.verl.options import check_run, check_trainer, server_options, warn_about_the_rest
from samebit.rollout.integrations.verl.server import SamebitServer
from samebit.weight_sync import WeightStream

CONFIGS = Path(str(inspect.getfile(verl_grpo))).parent
FOLDER = {"path": "folder", "tokenizer_path": None}
MODEL = {"use_fused_kernels": True, "fused_kernel_options": {"impl_backend": "samebit"}}


def options(**changes: Any) -> Any:
    """verl's, as its own yaml file has them where that matters."""
    usual = {"name": "samebit", "tensor_model_parallel_size": 1, "max_num_seqs": 256, "dtype": "float32"}
    return VerlRolloutConfig(**{**usual, **changes})


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        cwd="/",
    )


def test_verl_knows_samebit() -> None:
    assert get_rollout_class("samebit", "async") is SamebitRollout
    assert get_rollout_replica_class("samebit") is replica.SamebitReplica
    assert PlatformRegistry.get("cpu") is not None
    assert get_platform().device_name == "cpu"
    engine.register()
    checkpoint.register()
    assert EngineRegistry.get_engine_cls("language_model", "fsdp2") is engine.SamebitEngine
    assert CheckpointEngineRegistry.get("samebit") is checkpoint.SamebitCheckpointEngine
    plugin.register()  # again


def test_an_unknown_version_of_verl_is_a_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with caplog.at_level(logging.WARNING):
        plugin.load()
        assert not caplog.records
        monkeypatch.setattr(plugin, "_version", lambda: "7.1")
        plugin.load()
    assert "made for verl 0.9.1, and this is verl 7.1" in caplog.text


def test_a_failure_to_load_is_seen(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """verl hides the exception of a plugin; the log does not. In another version of verl there is none."""
    monkeypatch.delattr("verl.workers.rollout.replica")
    monkeypatch.setitem(sys.modules, "verl.workers.rollout.replica", None)
    with caplog.at_level(logging.ERROR):
        with pytest.raises(ImportError):
            plugin.load()
        assert "samebit's plugin for verl failed to load" in caplog.text
        caplog.clear()
        monkeypatch.setattr(plugin, "_version", lambda: "7.1")
        plugin.load()
    (record,) = caplog.records
    assert "made for verl 0.9.1, and this is verl 7.1: ModuleNotFoundError" in record.message


def test_what_moved_in_another_version_of_verl_is_said_with_that_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "_version", lambda: "7.1")
    monkeypatch.setitem(sys.modules, "verl.experimental.fully_async_policy.message_queue", None)
    with pytest.raises(ImportError, match=r"made for verl 0\.9\.1; verl 7\.1 .*message_queue"):
        replacements.replace_trainer_functions()


def test_the_plugin_is_light() -> None:
    code = "import sys, samebit.rollout; assert not {'torch', 'numba', 'transformers'} & set(sys.modules)"
    done = python(code)
    assert done.returncode == 0, done.stderr


def test_verl_still_has_what_is_replaced() -> None:
    from verl.experimental.fully_async_policy.message_queue import MessageQueueClient
    from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    for _ in range(2):
        replacements.replace_start()
        replacements.replace_snapshot()
        replacements.replace_trainer_functions()
    expected = {
        device.auto_set_device: ["config"],
        fsdp_utils.fsdp2_sharded_save_to_cpu: ["model"],
        verl_metrics.calculate_debug_metrics: ["data"],
        MessageQueueClient.get_sample: ["self"],
        distributed.initialize_global_process_group_ray: ["timeout_second", "backend"],
        ReplayBuffer._sync_metadata_from_transfer_queue: ["self"],
        PPOTrainer._compute_metrics: ["self", "batch", "metrics", "timing_raw", "global_steps", "epoch"],
    }
    for function, parameters in expected.items():
        assert list(inspect.signature(function).parameters) == parameters
        assert not hasattr(function.__wrapped__, "__wrapped__"), "it was replaced once"
        assert function.__name__ in (replacements.__doc__ or ""), "the list of replacements names it"
    listed = [line for line in (replacements.__doc__ or "").splitlines() if line.startswith("* `")]
    assert len(listed) == len(expected)


def test_rank_0_listens_on_one_address(monkeypatch: pytest.MonkeyPatch) -> None:
    def listening() -> set[str]:
        sockets = psutil.Process().net_connections("inet")
        return {f"{one.laddr.ip} {one.laddr.port}" for one in sockets if one.status == psutil.CONN_LISTEN}

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, value in {**place, "GLOO_SOCKET_IFNAME": "lo"}.items():
        monkeypatch.setenv(name, value)
    before = listening()
    distributed.initialize_global_process_group_ray(timeout_second=9)
    try:
        assert torch.distributed.get_world_size() == 1
        torch.distributed.all_reduce(torch.ones(1))
        new = listening() - before
    finally:
        torch.distributed.destroy_process_group()
    assert any(address.endswith(f" {port}") for address in new)
    assert all("127.0.0.1" in address for address in new), new


def test_the_server_has_every_method_that_verl_calls() -> None:
    called = [name for name in vars(RolloutReplica) if f"server.{name}.remote" in inspect.getsource(RolloutReplica)]
    assert len(called) >= 9
    for name in ("generate", *called):
        assert inspect.iscoroutinefunction(vars(SamebitServer)[name]), name


def test_a_model_folder_without_tokenizer_is_named_at_the_start(tmp_path: Path) -> None:
    with initialize_config_dir(str(CONFIGS), version_base=None):
        config = compose("tiny", [f"actor_rollout_ref.model.path={tmp_path}"])
    with pytest.raises(ModelLoadError, match="has no tokenizer"):
        check_run(config)
    (tmp_path / "tokenizer.json").touch()
    check_run(config)
    config.actor_rollout_ref.model.use_fused_kernels = False
    with pytest.raises(ValueError, match="use_fused_kernels=True"):
        check_run(config)
    config.actor_rollout_ref.rollout.name = "vllm"
    check_run(config)


def test_options_reach_the_worker(caplog: pytest.LogCaptureFixture) -> None:
    given = options(
        max_num_seqs=32,
        max_num_batched_tokens=16,
        max_model_len=200,
        enable_prefix_caching=False,
        seed=5,
        custom={"block_size": 32, "num_threads": 1, "num_cpus": 2, "sync_timeout": 9},
        gpu_memory_utilization=0.7,
        enforce_eager=True,
        engine_kwargs={"vllm": {"x": 1}},
    )
    with caplog.at_level(logging.WARNING):
        made = server_options(given, FOLDER, 3, "server")
        assert not caplog.text
        warn_about_the_rest(given)
    assert made.worker == RolloutConfig(
        max_num_seqs=32,
        max_num_batched_tokens=32,
        max_model_len=200,
        enable_prefix_caching=False,
        dtype="float32",
        seed=8,
        block_size=32,
        num_threads=1,
    )
    assert (made.num_cpus, made.sync_timeout, made.response_length, made.traces) == (2, 9.0, 512, None)
    for name in ("gpu_memory_utilization=0.7", "enforce_eager=True", "engine_kwargs.vllm"):
        assert f"rollout.{name}" in caplog.text
    assert "rollout.max_num_batched_tokens=16 is raised to rollout.max_num_seqs=32" in caplog.text


VERLS_OWN = {
    *("_target_", "name", "mode", "nnodes", "n_gpus_per_node", "checkpoint_manager_class", "router_config_path"),
    *("temperature", "top_k", "top_p", "do_sample", "n", "val_kwargs", "agent", "multi_turn", "trace"),
    *("log_prob_micro_batch_size", "log_prob_micro_batch_size_per_gpu", "log_prob_use_dynamic_bsz"),
    *("log_prob_max_token_len_per_gpu", "calculate_log_probs", "moe_load_balance_metrics_interval"),
}
"""What verl's trainer and agent loops read, and a server is not told or told with each request."""

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
"""Another value of each option that is no number, text or switch."""


def what_becomes_of(name: str, value: object, caplog: pytest.LogCaptureFixture) -> str:
    caplog.clear()
    try:
        given = options(**{name: value})
        made = server_options(given, FOLDER, 0, "server")
    except (ValueError, AssertionError):
        return "refused"
    with caplog.at_level(logging.WARNING):
        warn_about_the_rest(given)
    if f"rollout.{name}" in caplog.text:
        return "named"
    return "silent" if made == server_options(options(), FOLDER, 0, "server") else "honoured"


def another(name: str, usual: Any) -> Any:
    if name in OTHER:
        return OTHER[name]
    if isinstance(usual, bool):
        return not usual
    return f"other {usual}" if isinstance(usual, str) else usual + 1


def test_no_option_of_verl_is_dropped_silently(caplog: pytest.LogCaptureFixture) -> None:
    usual = vars(options())
    assert set(usual) >= VERLS_OWN
    asked = set(usual) - VERLS_OWN
    became = {name: what_becomes_of(name, another(name, usual[name]), caplog) for name in sorted(asked)}
    assert {name for name, result in became.items() if result == "silent"} == set()
    assert became["seed"] == became["free_cache_engine"] == became["custom"] == "honoured"
    assert became["quantization"] == became["data_parallel_size"] == became["disaggregation"] == "refused"


def test_options_inside_others_are_named(caplog: pytest.LogCaptureFixture) -> None:
    for name in set(vars(ServerConfig())) - VERLS_OWN:
        assert what_becomes_of("server", ServerConfig(**{name: 7}), caplog) == "named"
        assert f"rollout.server.{name}=7" in caplog.text
    bucket = CheckpointEngineConfig(backend="samebit", update_weights_bucket_megabytes=7)
    assert what_becomes_of("checkpoint_engine", bucket, caplog) == "silent", "the size of a broadcast's bucket"


def test_usual_options_need_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), initialize_config_dir(str(CONFIGS), version_base=None):
        check_run(compose("tiny"))
        assert not caplog.text
        check_run(compose("tiny", ["+actor_rollout_ref.rollout.server.timeout=5"]))
    assert "no use for: rollout.server.timeout=5" in caplog.text


def test_a_wrong_name_is_known_before_anything_is_started(tmp_path: Path) -> None:
    run = Run(tmp_path, tmp_path, {"actor_rollout_ref.rollout.custom.blocksize": 16})
    process = run.start()
    assert process.wait(120) != 0, "most of it are verl's imports"
    said = run.log.read_text()
    assert "unknown in rollout.custom: blocksize; samebit knows block_size" in said
    assert "ray init" not in said


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"custom": {"blocksize": 16}}, "unknown in rollout.custom: blocksize; samebit knows block_size"),
        ({"custom": {"block_size": 5}}, "block_size must be a power of two"),
        ({"custom": {"num_cpus": 0}}, "rollout.custom.num_cpus"),
        ({"custom": {"generate_with": "magic"}}, "rollout.custom.generate_with"),
        ({"custom": {"sync_timeout": -1}}, "timeout must be a positive number"),
        ({"tensor_model_parallel_size": 2}, "rollout.tensor_model_parallel_size=2"),
        ({"quantization": "fp8"}, "rollout.quantization=fp8"),
        ({"dtype": "float16"}, "rollout.dtype must be one of"),
    ],
)
def test_wrong_options_are_refused_by_name(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        server_options(options(**changes), FOLDER, 0, "server")


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


def test_dead_servers_stop_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    fine, dead = (SimpleNamespace(failure=cause, server_address="a") for cause in (None, RuntimeError("why it died")))
    dead.is_policy = False
    monkeypatch.setattr(replica, "_launched", [fine])
    replica.check_servers()
    monkeypatch.setattr(replica, "_launched", [fine, dead])
    with pytest.raises(WorkerLostError, match="a is lost: why it died"):
        replica.check_servers()


def test_servers_of_a_reward_model_are_watched_and_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their weights are of no step of the trainer, and their requests no samples."""

    def server(*, is_policy: bool) -> SimpleNamespace:
        numbers = {"requests_finished": 1.0 if is_policy else 100.0}
        handle = SimpleNamespace(
            stats=SimpleNamespace(remote=lambda: numbers),
            steps_of_weights=SimpleNamespace(remote=lambda: {3, 4} if is_policy else {0}),
        )
        return SimpleNamespace(is_policy=is_policy, server_handle=handle, seen={}, failure=None)

    monkeypatch.setattr(replica.ray, "get", lambda values: values)
    monkeypatch.setattr(replica, "_launched", [server(is_policy=True), server(is_policy=False), server(is_policy=True)])
    assert replica.server_metrics()["samebit/requests_finished"] == 2.0
    assert replica.weights_in_servers() == {3, 4}


def test_counters_of_servers_are_summed_and_counted_from_the_last_step() -> None:
    before = [{"requests_finished": 3.0, "blocks_free": 9.0}, {}]
    now = [
        {"requests_finished": 5.0, "blocks_free": 7.0, "prefill_tokens_skipped": 3.0, "prefill_tokens_computed": 1.0},
        {"requests_finished": 1.0, "blocks_free": 7.0},
    ]
    found = of_servers(before, now)
    assert found["samebit/requests_finished"] == 3.0
    assert found["samebit/blocks_free"] == 14.0
    assert found["samebit/prefix_hit_rate"] == 0.75


def test_only_samples_of_the_trained_weights_are_compared() -> None:
    """Four trajectories of two tokens: fresh, older, across an update, fresh and different in one token."""
    tensors = {
        "rollout_log_probs": torch.tensor([[-1.0, -2.0], [-1.0, 0.0], [-1.0, -2.0], [-1.0, -2.5]]),
        "old_log_probs": torch.tensor([[-1.0, -2.0], [-9.0, 0.0], [-9.0, -2.0], [-1.0, -2.0]]),
        "response_mask": torch.tensor([[1, 1], [1, 0], [1, 1], [1, 1]]),
    }
    span = {"min_global_steps": [3, 2, 2, 3], "max_global_steps": [3, 2, 3, 3]}
    data = DataProto.from_dict(tensors, {name: np.array(steps, dtype=object) for name, steps in span.items()})
    assert on_policy_of(data, {3}) == {
        "samebit/on_policy/trajectories": 2,
        "samebit/on_policy/tokens": 4,
        "samebit/on_policy/tokens_differing": 1,
        "samebit/on_policy/logprobs_diff_max": 0.5,
    }
    assert on_policy_of(data, {2, 3})["samebit/on_policy/tokens_differing"] == 2
    assert on_policy_of(data, set()) == {"samebit/on_policy/trajectories": 0}


def test_tokens_that_were_not_sampled_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several turns: what a tool says has no log-probability in the rollout, and one in the trainer."""
    rows = {
        "response_mask": [[1, 1, 0], [1, 0, 0, 1]],
        "rollout_log_probs": [[-1.0, -2.0, 0.0], [-1.0, 0.0, 0.0, -2.5]],
        "old_log_probs": [[-1.0, -2.0, -5.0], [-1.0, -6.0, -7.0, -2.0]],
    }
    asked: dict[str, Any] = {}

    def get(**request: Any) -> dict[str, torch.Tensor]:
        asked.update(request)
        found = {name: [torch.tensor(row) for row in rows[name]] for name in request["select_fields"]}
        return {name: torch.nested.as_nested_tensor(row, layout=torch.jagged) for name, row in found.items()}

    monkeypatch.setattr(transfer_queue, "kv_batch_get", get)
    span = {"min_global_steps": 2, "max_global_steps": 2}
    tags = [span, {**span, "min_global_steps": 1}, span, {**span, "is_padding": True}]
    batch = SimpleNamespace(keys=["a", "b", "c", "d"], tags=tags, partition_id="train")
    assert on_policy(batch, 3) == {
        "samebit/on_policy/trajectories": 2,
        "samebit/on_policy/tokens": 4,
        "samebit/on_policy/tokens_differing": 1,
        "samebit/on_policy/logprobs_diff_max": 0.5,
    }
    assert (asked["keys"], asked["partition_id"]) == (["a", "c"], "train")
    rows["response_mask"] = [[0, 0, 0], [0, 0, 0, 0]]
    nothing = on_policy(batch, 3)
    assert (nothing["samebit/on_policy/tokens"], nothing["samebit/on_policy/logprobs_diff_max"]) == (0, 0)
    assert on_policy(batch, 9) == {"samebit/on_policy/trajectories": 0}


def test_the_end_of_the_data_is_not_the_end_of_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    async def nothing(self: object) -> None: ...

    get = replacements._check_servers_at_the_end(nothing)
    assert asyncio.run(get(None)) is None
    monkeypatch.setattr(replica, "_launched", [SimpleNamespace(failure=RuntimeError("why"), server_address="a")])
    with pytest.raises(WorkerLostError, match="a is lost: why"):
        asyncio.run(get(None))


def test_nobody_is_inside_a_closed_gate() -> None:
    async def check() -> None:
        gate = Gate()
        assert await gate.enter("a")
        assert await gate.enter("b")
        aborted: list[str] = []
        closing = asyncio.create_task(gate.close(reject=False, abort=aborted.extend))
        await asyncio.sleep(0)
        assert aborted == ["a", "b"]
        gate.leave("a")
        await asyncio.sleep(0)
        assert not closing.done()
        gate.leave("b")
        assert await closing == ["a", "b"]
        late = asyncio.create_task(gate.enter("c"))
        await asyncio.sleep(0)
        gate.open()
        assert await late
        gate.leave("c")

    asyncio.run(asyncio.wait_for(check(), 5))


def test_a_server_that_is_missing_strands_no_rank_of_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gathering a sharded tensor is a collective, here a barrier of two threads."""
    together = threading.Barrier(2, timeout=10)
    tensors = {name: torch.zeros(3) for name in ("a", "b")}

    def gathered() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors.items():
            together.wait()
            yield name, tensor

    def stream() -> WeightStream:
        return WeightStream(WeightStream.of(tensors).specs, gathered())

    async def update() -> list[Any]:
        ranks = [checkpoint.SamebitCheckpointEngine(1 << 20, is_master=master) for master in (True, False)]
        said = [engine.prepare() for engine in ranks] + [{"timeout": 0.5}]
        placed, _ = checkpoint.SamebitCheckpointEngine.build_topology(2, 1, said)
        for rank in range(2):
            ranks[rank].init_process_group(**{name: values[rank] for name, values in placed.items()})
        sent = (engine.send_weights(stream()) for engine in ranks)
        return await asyncio.gather(*sent, return_exceptions=True)

    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    missing, other = asyncio.run(update())
    assert isinstance(missing, RuntimeError)
    assert not isinstance(missing, threading.BrokenBarrierError)
    assert other == {}


def test_where_ranks_meet_for_an_update() -> None:
    said = [{"host": "h", "port": 1, "timeout": 300.0}, {"timeout": 300.0}, *[{"timeout": 9.0}] * 3]
    trainer, servers = checkpoint.SamebitCheckpointEngine.build_topology(2, 3, said)
    assert trainer == {"rank": [0, -1], "size": [4, 4], "host": ["h", "h"], "port": [1, 1], "timeout": [9.0, 9.0]}
    assert servers == {"rank": [1, 2, 3], "size": [4] * 3, "host": ["h"] * 3, "port": [1] * 3, "timeout": [9.0] * 3}


def test_servers_of_their_own_wait_as_long_as_the_options_say(monkeypatch: pytest.MonkeyPatch) -> None:
    def begin(self: Any, rollout_config: Any) -> None:
        self.checkpoint_engine = checkpoint.SamebitCheckpointEngine(1 << 20)

    monkeypatch.setattr(CheckpointEngineWorker, "__init__", begin)
    made = checkpoint.SamebitCheckpointWorker(options(custom={"sync_timeout": 9}))
    assert made.checkpoint_engine.prepare() == {"timeout": 9.0}


@pytest.mark.parametrize("name", ["qwen3_8b_8gpu", "nemotron_h_8b_8gpu"])
def test_the_configuration_for_gpus_is_one_that_verl_accepts(name: str, caplog: pytest.LogCaptureFixture) -> None:
    with initialize_config_dir(str(CONFIGS), version_base=None):
        config = compose(name)
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
