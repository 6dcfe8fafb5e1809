"""The plugin tells verl what it should, fails as it should, and verl still has what it replaces; its metrics and
transports work.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import pytest

pytest.importorskip("verl", reason="verl is not installed: pip install 'samebit[verl]'")
pytest.importorskip("transfer_queue", reason="TransferQueue is not installed: pip install 'samebit[verl]'")

import numpy as np
import psutil
import ray
import torch
import transfer_queue
from verl import DataProto
from verl.checkpoint_engine.base import CheckpointEngineRegistry, CheckpointEngineWorker
from verl.plugin.platform import PlatformRegistry, get_platform
from verl.utils import device, distributed, fsdp_utils
from verl.utils.debug import metrics as verl_metrics
from verl.workers.config import RolloutConfig as VerlRolloutConfig
from verl.workers.engine import EngineRegistry
from verl.workers.rollout.base import get_rollout_class
from verl.workers.rollout.replica import RolloutReplica, get_rollout_replica_class

from samebit.benchmarks.engines.http_servers import reserved_port
from samebit.rollout import WorkerLostError, WorkerStateError
from samebit.rollout.integrations.verl import patches as replacements
from samebit.rollout.integrations.verl import plugin, value_heads, versions
from samebit.rollout.integrations.verl.server import checkpoint_engine, launched, replica
from samebit.rollout.integrations.verl.server.gate import Gate
from samebit.rollout.integrations.verl.server.metrics import of_servers, on_policy, on_policy_of
from samebit.rollout.integrations.verl.server.server import SamebitServer
from samebit.rollout.integrations.verl.trainer import engine
from samebit.rollout.integrations.verl.trainer.rollout import SamebitRollout
from samebit.weight_sync import SyncTimeoutError, WeightStream

from ...forks import python
from ...patience import HANG, wait_until


def run(command: list[str], code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*command, "-c", code], capture_output=True, text=True, timeout=HANG, cwd="/")


def test_verl_knows_samebit() -> None:
    assert get_rollout_class("samebit", "async") is SamebitRollout
    assert get_rollout_replica_class("samebit") is replica.SamebitReplica
    assert PlatformRegistry.get("cpu") is not None
    assert get_platform().device_name == "cpu"
    engine.register()
    checkpoint_engine.register()
    assert EngineRegistry.get_engine_cls("language_model", "fsdp2") is engine.SamebitEngine
    assert CheckpointEngineRegistry.get("samebit") is checkpoint_engine.SamebitCheckpointEngine
    plugin.register()  # again


def test_an_unknown_version_of_verl_is_a_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with caplog.at_level(logging.WARNING):
        plugin.load()
        assert not caplog.records
        monkeypatch.setattr(versions, "found_version", lambda: "7.1")
        plugin.load()
    assert "made for verl 0.9.1, and this is verl 7.1" in caplog.text


def test_a_failure_to_load_is_seen(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure to load is seen: verl hides the exception of a plugin; the log does not. In another version of verl
    there is none.
    """
    monkeypatch.delattr("verl.workers.rollout.replica")
    monkeypatch.setitem(sys.modules, "verl.workers.rollout.replica", None)
    with caplog.at_level(logging.ERROR):
        with pytest.raises(ImportError):
            plugin.load()
        assert "samebit's plugin for verl failed to load" in caplog.text
        caplog.clear()
        monkeypatch.setattr(versions, "found_version", lambda: "7.1")
        plugin.load()
    (record,) = caplog.records
    assert "made for verl 0.9.1, and this is verl 7.1: ModuleNotFoundError" in record.message


_FORKS = """
import os, sys, tensordict, transformers.modeling_utils  # what takes long of verl's own imports

def in_a_fork(work, **variables):
    sys.stdout.flush()
    if os.fork() == 0:
        os.environ.update(variables)
        work()
        sys.stdout.flush()
        os._exit(0)
    assert os.wait()[1] == 0

def import_without_replicas():
    sys.modules["verl.workers.rollout.replica"] = None
    import verl
    print("verl goes on")

def say_whether_it_is_known():
    import verl, verl.workers.rollout.base as base
    print(("samebit", "async") in base._ROLLOUT_REGISTRY)

assert "verl" not in sys.modules
in_a_fork(import_without_replicas)
for modules in ("", "samebit.rollout.integrations.verl"):
    in_a_fork(say_whether_it_is_known, VERL_USE_EXTERNAL_PLUGINS="none", VERL_USE_EXTERNAL_MODULES=modules)
"""


def test_what_verl_does_with_the_plugin_while_it_is_imported() -> None:
    """A process of verl finds the plugin, swallows the exception of one that fails to load, and goes on; where it looks
    for none, it knows the one that is named.
    """
    done = run(python(), _FORKS)
    assert (done.returncode, done.stdout) == (0, "verl goes on\nFalse\nTrue\n"), done.stderr
    assert "samebit's plugin for verl failed to load, and verl will not know rollout.name=samebit" in done.stderr
    assert "verl.workers.rollout.replica" in done.stderr


def test_what_moved_in_another_version_of_verl_is_said_with_that_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "found_version", lambda: "7.1")
    monkeypatch.setitem(sys.modules, "verl.experimental.fully_async_policy.message_queue", None)
    with pytest.raises(ImportError, match=r"made for verl 0\.9\.1; verl 7\.1 .*message_queue"):
        replacements.replace_trainer_functions()


def test_the_plugin_is_light() -> None:
    code = "import sys, samebit.rollout; assert not {'torch', 'numba', 'transformers'} & set(sys.modules)"
    done = run([sys.executable], code)
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

    before = listening()
    with reserved_port() as port:
        place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        for name, value in {**place, "GLOO_SOCKET_IFNAME": "lo"}.items():
            monkeypatch.setenv(name, value)
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


def test_dead_servers_stop_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    fine, dead = (SimpleNamespace(failure=cause, server_address="a") for cause in (None, RuntimeError("why it died")))
    dead.is_policy = False
    monkeypatch.setattr(launched, "_launched", [fine])
    launched.check_servers()
    monkeypatch.setattr(launched, "_launched", [fine, dead])
    with pytest.raises(WorkerLostError, match="a is lost: why it died"):
        launched.check_servers()


def test_copies_of_a_replica_watch_its_server_once_and_count_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server is watched once in a process, and counted once: fully_async with dynamic resources makes copies of all
    replicas at each step, to ask for their names.
    """
    died, asked = threading.Event(), []

    def wait_for(call: str) -> None:
        asked.append(call)
        assert died.wait(HANG)
        raise RuntimeError("why it died")

    numbers = {"requests_finished": 1.0}
    handle = SimpleNamespace(
        watch=SimpleNamespace(remote=lambda: "watch"), stats=SimpleNamespace(remote=lambda: numbers)
    )
    monkeypatch.setattr(launched, "_launched", WeakSet())
    monkeypatch.setattr(launched, "wait_for", wait_for)
    monkeypatch.setattr(launched.ray, "get", lambda values: values)
    state = {"_server_handle": handle, "_server_address": "a", "is_reward_model": False, "is_teacher_model": False}
    copies = [replica.SamebitReplica.__new__(replica.SamebitReplica) for _ in range(3)]
    for one in copies:
        one.__setstate__(state)
    assert "server" in copies[0].__getstate__()
    assert copies[0].__getstate__()["server"] is None
    wait_until(lambda: asked)
    assert launched.server_metrics()["samebit/requests_finished"] == 1.0
    launched.check_servers()
    gone = weakref.ref(copies.pop(0))
    del one
    copies[1:] = []
    assert gone() is None, "the watch holds no replica"
    died.set()
    wait_until(lambda: copies[0].server.failure is not None)
    assert asked == ["watch"]
    with pytest.raises(WorkerLostError, match="a is lost: why it died"):
        launched.check_servers()


def answering(answer: Exception | None) -> SimpleNamespace:
    """Return a replica whose watch has told nothing yet. Its server says that it is well, or ends the call with an
    error.
    """
    handle = SimpleNamespace(check_usable=SimpleNamespace(remote=lambda: answer))
    return SimpleNamespace(failure=None, server_address="a", server_handle=handle)


def take(answer: Exception | None, timeout: float | None = None) -> None:
    assert timeout is not None
    if answer is not None:
        raise answer


@pytest.mark.parametrize("cause", [WorkerLostError("its process died"), WorkerStateError("its engine broke")])
def test_where_a_group_failed_the_servers_are_asked(monkeypatch: pytest.MonkeyPatch, cause: Exception) -> None:
    """The servers are asked where a group failed: verl's sync trainer would go on with what other groups have, before
    the watch of a dead server tells of it.
    """
    read: list[str] = []
    failed: dict[str, set[str]] = {"train": set()}
    buffer = SimpleNamespace(failure_keys=failed)
    synchronise = replacements._check_servers_first(lambda self: read.append("states"))
    monkeypatch.setattr(launched, "wait_for", take)
    monkeypatch.setattr(launched, "_launched", [answering(None), answering(cause)])
    synchronise(buffer)
    failed["train"].add("a group")
    with pytest.raises(WorkerLostError, match=f"a is lost: {cause}") as raised:
        synchronise(buffer)
    assert raised.value.__cause__ is cause
    monkeypatch.setattr(launched, "_launched", [answering(None), answering(TimeoutError("busy"))])
    synchronise(buffer)
    assert len(read) == 3, "what fails for another reason is verl's to decide about"


def test_servers_of_a_reward_model_are_watched_and_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers of a reward model are watched and not counted: their weights are of no step of the trainer, and their
    requests no samples.
    """

    def server(*, is_policy: bool) -> SimpleNamespace:
        numbers = {"requests_finished": 1.0 if is_policy else 100.0}
        handle = SimpleNamespace(
            stats=SimpleNamespace(remote=lambda: numbers),
            steps_of_weights=SimpleNamespace(remote=lambda: {3, 4} if is_policy else {0}),
        )
        return SimpleNamespace(is_policy=is_policy, server_handle=handle, seen={}, failure=None)

    monkeypatch.setattr(launched.ray, "get", lambda values: values)
    monkeypatch.setattr(
        launched, "_launched", [server(is_policy=True), server(is_policy=False), server(is_policy=True)]
    )
    assert launched.server_metrics()["samebit/requests_finished"] == 2.0
    assert launched.weights_in_servers() == {3, 4}


def test_counters_of_servers_are_summed_and_counted_from_the_last_step() -> None:
    before = [{"requests_finished": 3.0, "blocks_free": 9.0, "weight_version": 3.0}, {}]
    now = [
        {"requests_finished": 5.0, "blocks_free": 7.0, "prefill_tokens_skipped": 3.0, "prefill_tokens_computed": 1.0},
        {"requests_finished": 1.0, "blocks_free": 7.0},
    ]
    now[0]["weight_version"], now[1]["weight_version"] = 5.0, 4.0
    found = of_servers(before, now)
    assert found["samebit/weight_version"] == 4.0
    assert found["samebit/requests_finished"] == 3.0
    assert found["samebit/blocks_free"] == 14.0
    assert found["samebit/prefix_hit_rate"] == 0.75


def test_only_samples_of_the_trained_weights_are_compared() -> None:
    """Only samples of the trained weights are compared, of four trajectories of two tokens: fresh, older, across an
    update, fresh and different in one token.
    """
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


def test_log_probabilities_are_compared_by_their_bits() -> None:
    zeros = {"rollout_log_probs": torch.tensor([[0.0, -0.0]]), "old_log_probs": torch.tensor([[-0.0, -0.0]])}
    step = np.array([3], dtype=object)
    names = {"min_global_steps": step, "max_global_steps": step}
    data = DataProto.from_dict({**zeros, "response_mask": torch.ones(1, 2)}, names)
    assert on_policy_of(data, {3})["samebit/on_policy/tokens_differing"] == 1


def test_tokens_that_were_not_sampled_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens that were not sampled are not compared: what a tool says in several turns has no log-probability in the
    rollout, and one in the trainer.
    """
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
    monkeypatch.setattr(launched, "_launched", [SimpleNamespace(failure=RuntimeError("why"), server_address="a")])
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

    asyncio.run(asyncio.wait_for(check(), HANG))


def test_a_server_that_is_missing_strands_no_rank_of_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that is missing strands no rank of the trainer: gathering a sharded tensor is a collective, here a
    barrier of two threads.
    """
    together = threading.Barrier(2, timeout=HANG)
    tensors = {name: torch.zeros(3) for name in ("a", "b")}

    def gathered() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors.items():
            together.wait()
            yield name, tensor

    def stream() -> WeightStream:
        return WeightStream(WeightStream.of(tensors).specs, gathered())

    async def update() -> list[Any]:
        ranks = [checkpoint_engine.SamebitCheckpointEngine(1 << 20, is_master=master) for master in (True, False)]
        said = [engine.prepare() for engine in ranks] + [{"timeout": 0.5}]
        placed, _ = checkpoint_engine.SamebitCheckpointEngine.build_topology(2, 1, said)
        for rank in range(2):
            ranks[rank].init_process_group(**{name: values[rank] for name, values in placed.items()})
        sent = (engine.send_weights(stream()) for engine in ranks)
        return await asyncio.gather(*sent, return_exceptions=True)

    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    missing, other = asyncio.run(update())
    assert isinstance(missing, RuntimeError)
    assert not isinstance(missing, threading.BrokenBarrierError)
    assert other == {}


@pytest.mark.parametrize(("servers", "bucket_bytes", "error"), [(1, 1 << 20, SyncTimeoutError), (0, 0, ValueError)])
def test_why_a_broadcast_does_not_begin_is_what_is_raised(
    servers: int, bucket_bytes: int, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Why a broadcast does not begin is what is raised: a server is missing, or the sender refuses its size; the
    weights, which can not be gathered either, are gone through.
    """
    gathered: list[str] = []

    def failing() -> Iterator[tuple[str, torch.Tensor]]:
        gathered.append("a")
        raise RuntimeError("a rank of the trainer has died")
        yield

    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    sender = checkpoint_engine.SamebitCheckpointEngine(bucket_bytes, is_master=True)
    sender.init_process_group(rank=0, size=1 + servers, **{**sender.prepare(), "timeout": 0.5})
    with pytest.raises(error):
        asyncio.run(sender.send_weights(WeightStream(WeightStream.of({"a": torch.zeros(3)}).specs, failing())))
    assert gathered == ["a"]


def test_where_ranks_meet_for_an_update() -> None:
    said = [{"host": "h", "port": 1, "timeout": 300.0}, {"timeout": 300.0}, *[{"timeout": 9.0}] * 3]
    trainer, servers = checkpoint_engine.SamebitCheckpointEngine.build_topology(2, 3, said)
    assert trainer == {"rank": [0, -1], "size": [4, 4], "host": ["h", "h"], "port": [1, 1], "timeout": [9.0, 9.0]}
    assert servers == {"rank": [1, 2, 3], "size": [4] * 3, "host": ["h"] * 3, "port": [1] * 3, "timeout": [9.0] * 3}


def test_servers_of_their_own_wait_as_long_as_the_options_say(monkeypatch: pytest.MonkeyPatch) -> None:
    def begin(self: Any, rollout_config: Any) -> None:
        self.checkpoint_engine = checkpoint_engine.SamebitCheckpointEngine(1 << 20)

    monkeypatch.setattr(CheckpointEngineWorker, "__init__", begin)
    made = checkpoint_engine.SamebitCheckpointWorker(VerlRolloutConfig(name="samebit", custom={"sync_timeout": 9}))
    assert made.checkpoint_engine.prepare() == {"timeout": 9.0}


def test_a_trl_without_value_heads_counts_as_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A TRL without value heads counts as none: verl imports them while it builds any model, wherever TRL is installed,
    and TRL 1.16 has none.
    """
    from verl.models.transformers import monkey_patch

    value_heads.ignore_trl_without_them()
    (tmp_path / "trl" / "experimental").mkdir(parents=True)
    (tmp_path / "trl" / "__init__.py").touch()
    found = SimpleNamespace(origin=str(tmp_path / "trl" / "__init__.py"))
    monkeypatch.setattr(value_heads, "find_spec", lambda _: found)
    assert monkey_patch.is_trl_available() is False
    (tmp_path / "trl" / "experimental" / "ppo").mkdir()
    assert monkey_patch.is_trl_available() is True
    monkeypatch.setattr(value_heads, "find_spec", lambda _: None)
    assert monkey_patch.is_trl_available() is False
