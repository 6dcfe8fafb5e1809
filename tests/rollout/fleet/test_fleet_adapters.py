"""Every replica of a fleet has its adapters, each request has the bits of one worker, and a death loses none."""

from __future__ import annotations

import asyncio
import copy
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from peft import LoraConfig, get_peft_model

from samebit.rollout import AdapterError, RequestError, RequestOutput, RolloutConfig, RolloutWorker, SamplingParams
from samebit.rollout.adapters.loading import AdapterKeywords
from samebit.rollout.errors import ModelLoadError, NoReplicaError, WorkerLostError
from samebit.rollout.fleet import arrivals
from samebit.rollout.fleet.fleet import Fleet
from samebit.rollout.fleet.options import FleetOptions
from samebit.rollout.fleet.replica import ReplicaSide
from samebit.weight_sync.transports.addresses import Sources

from ...noted_stream import noted_stream
from ...patience import HANG, wait_until
from ..conftest import FakeRunner
from ..requests.test_hub import Cache
from ..tiny_llama import tiny
from .local_fleet import LocalPort

CONFIG = RolloutConfig(max_num_seqs=8, num_blocks=64, block_size=4, max_model_len=64, seed=5)
PROMPTS = [list(range(1, 18)), [3, 1, 4], [7]]


def asked(adapter: str | None) -> SamplingParams:
    return SamplingParams(n=2, max_tokens=6, seed=3, ignore_eos=True, adapter=adapter)


def drawn(outputs: list[RequestOutput]) -> list[tuple[list[int], list[float]]]:
    return [(sample.token_ids, sample.logprobs) for output in outputs for sample in output.samples]


def lora(alpha: int = 6) -> LoraConfig:
    return LoraConfig(r=3, lora_alpha=alpha, target_modules=["q_proj", "down_proj"])


def save_adapter(folder: Path, seed: int, alpha: int = 6) -> Path:
    model = get_peft_model(tiny(0), lora(alpha))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if ".lora_" in name:
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.3)
    model.save_pretrained(folder)
    return folder


class ModelFleet:
    """Holds a fleet whose replicas are workers of this process; each can be killed, and told to refuse a command."""

    def __init__(
        self, folder: Path | None = None, replicas: int = 2, config: RolloutConfig = CONFIG, **options: Any
    ) -> None:
        self.ports: dict[str, LocalPort] = {}
        self._model = tiny(0) if folder is None else folder
        self.refuses: str | None = None
        self.prepare: Callable[[LocalPort], None] | None = None
        self.fleet = Fleet(self._start, replicas, config=config, options=FleetOptions(max_restarts=1, **options))

    def _start(self, name: str, config: RolloutConfig) -> LocalPort:
        worker = RolloutWorker(copy.deepcopy(self._model), config=config)
        port = RefusingPort(ReplicaSide(Sources(), worker), lambda: self.refuses == name)
        if self.prepare is not None:
            self.prepare(port)
        self.ports[name] = port
        return port

    def kill(self, name: str) -> None:
        self.ports[name].kill(self.fleet._crew.background.loop)


class RefusingPort(LocalPort):
    def __init__(self, side: ReplicaSide, refuses: Callable[[], bool]) -> None:
        super().__init__(side, FakeRunner(4))
        self.refuses = refuses

    async def command(self, name: str, *args: Any, **options: Any) -> Any:
        if name == "load_adapter" and self.refuses():
            raise AdapterError("no room")
        return await super().command(name, *args, **options)


@pytest.fixture
def local() -> Iterator[ModelFleet]:
    found = ModelFleet()
    yield found
    found.fleet.close()


def test_requests_of_any_replica_have_the_bits_of_one_worker(local: ModelFleet, tmp_path: Path) -> None:
    fleet, folder = local.fleet, save_adapter(tmp_path / "a", seed=1)
    with RolloutWorker(tiny(0), config=CONFIG) as worker:
        worker.load_adapter("a", folder)
        expected = {name: drawn(worker.generate(PROMPTS, asked(name))) for name in ("a", "__base__")}
    assert expected["a"] != expected["__base__"]
    assert fleet.load_adapter("a", folder).version == 1
    assert fleet.adapters == ["__base__", "a"]
    for _ in range(2):
        for name, samples in expected.items():
            outputs = fleet.generate(PROMPTS, asked(name))
            assert drawn(outputs) == samples
            assert {output.adapter for output in outputs} == {None if name == "__base__" else "a"}
    assert drawn(fleet.generate(PROMPTS, asked(None))) == expected["__base__"]
    assert fleet.stats()["router_matched_tokens"] > 0, "the router finds what was cached under the adapter"
    save_adapter(tmp_path / "b", seed=2)
    assert fleet.load_adapter("a", tmp_path / "b").version == 2
    again = fleet.generate(PROMPTS, asked("a"))
    assert drawn(again) != expected["a"]
    assert [(output.adapter, output.adapter_version) for output in again] == [("a", 2)] * 3
    assert [port.side.worker.adapters for port in local.ports.values()] == [["__base__", "a#1"]] * 2
    fleet.drop_adapter("a")
    assert [port.side.worker.adapters for port in local.ports.values()] == [["__base__"]] * 2
    with pytest.raises(RequestError, match="adapter='a' is not known; there are __base__"):
        fleet.submit(PROMPTS[0], asked("a"))
    with pytest.raises(AdapterError, match="version must be above the adapter's current 2, got 1"):
        fleet.load_adapter("a", folder, version=1)
    assert fleet.load_adapter("a", folder).version == 3
    again = fleet.generate(PROMPTS, asked("a"))
    assert drawn(again) == expected["a"]
    assert [(output.adapter, output.adapter_version) for output in again] == [("a", 3)] * 3


@pytest.mark.parametrize("option", [{"number": 5}, {"alias": "other"}, {"alias": ""}])
def test_what_a_fleet_gives_its_adapters_itself_is_refused(
    option: AdapterKeywords, local: ModelFleet, tmp_path: Path
) -> None:
    with pytest.raises(AdapterError, match=r"no number= and no alias=|alias must be a string"):
        local.fleet.load_adapter("a", save_adapter(tmp_path, seed=1), **option)
    assert local.fleet.adapters == ["__base__"]


def test_guesses_outlast_a_new_version_of_an_adapter(tmp_path: Path) -> None:
    folders = [save_adapter(tmp_path / name, seed=1) for name in "ab"]
    local = ModelFleet(replicas=1, config=replace(CONFIG, num_speculative_tokens=3))
    try:
        drafted, samples = [], []
        for folder in folders:
            local.fleet.load_adapter("policy", folder)
            samples.append(drawn(local.fleet.generate(PROMPTS[:1], asked("policy"))))
            drafted.append(local.fleet.stats()["draft_tokens_accepted"])
    finally:
        local.fleet.close()
    assert samples[0] == samples[1]
    assert drafted[1] > drafted[0], "what the version before answered is guessed from"


def test_a_new_versions_folder_says_its_own_scale(local: ModelFleet, tmp_path: Path) -> None:
    """A new version's folder says its own scale, as on one worker, whatever config= the version before was given."""
    folders = save_adapter(tmp_path / "a", seed=1), save_adapter(tmp_path / "b", seed=1, alpha=60)
    with RolloutWorker(tiny(0), config=CONFIG) as worker:
        for rollout in (worker, local.fleet):
            rollout.load_adapter("a", folders[0], config=lora())
        first = drawn(worker.generate(PROMPTS, asked("a")))
        for rollout in (worker, local.fleet):
            rollout.load_adapter("a", folders[1])
        expected = drawn(worker.generate(PROMPTS, asked("a")))
    assert expected != first
    assert drawn(local.fleet.generate(PROMPTS, asked("a"))) == expected


@pytest.mark.parametrize("name", [None, "default", "__base__"])
def test_the_router_finds_what_is_cached_under_the_adapter_of_the_models_folder(
    name: str | None, tmp_path: Path
) -> None:
    """The router finds what is cached under the adapter of the model's folder, and under the model alone: a
    conversation's second turn is matched by what the replicas say of the first.
    """
    tiny(0).save_pretrained(tmp_path / "base")
    folder = save_adapter(tmp_path / "adapter", seed=1)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": f"{tmp_path}/base"}))
    with ModelFleet(folder).fleet as fleet:
        assert fleet.adapters == ["__base__", "default"]
        params = SamplingParams(max_tokens=12, ignore_eos=True, adapter=name)
        first = fleet.submit(PROMPTS[0], params).result(HANG)
        tokens = PROMPTS[0] + first.samples[0].token_ids
        blocks = (len(tokens) - 1) // CONFIG.block_size
        wait_until(lambda: fleet.stats()["router_shadow_blocks"] == blocks)
        before = fleet.stats()["router_matched_tokens"]
        second = fleet.submit(tokens, params).result(HANG)
        assert fleet.stats()["router_matched_tokens"] - before == blocks * CONFIG.block_size
        assert second.num_cached_tokens == blocks * CONFIG.block_size


def test_what_one_replica_refuses_none_has(local: ModelFleet, tmp_path: Path) -> None:
    fleet, folder = local.fleet, save_adapter(tmp_path / "a", seed=1)
    fleet.load_adapter("a", folder)
    before = drawn(fleet.generate(PROMPTS, asked("a")))
    local.refuses = "1"
    with pytest.raises(AdapterError, match="no room"):
        fleet.load_adapter("a", save_adapter(tmp_path / "b", seed=2))
    assert [port.side.worker.adapters for port in local.ports.values()] == [["__base__", "a#0"]] * 2
    assert drawn(fleet.generate(PROMPTS, asked("a"))) == before
    for error, said, name, source, options in (
        (TypeError, "takes adapters from a folder that every replica can read", "a", {}, {}),
        (AdapterError, "must be a string that is not empty nor the model's own", "__base__", folder, {}),
        (AdapterError, "version must be above the adapter's current 1, got 1", "a", folder, {"version": 1}),
        (AdapterError, "in_flight must be one of", "a", folder, {"in_flight": "keep"}),
        (ModelLoadError, "revision='v1' is for a name of the Hugging Face hub", "a", folder, {"revision": "v1"}),
    ):
        with pytest.raises(error, match=said):
            fleet.load_adapter(name, source, **options)
    with pytest.raises(AdapterError, match="no adapter 'b' was loaded; loaded are: a"):
        fleet.drop_adapter("b")


def test_a_replica_that_is_started_again_has_the_adapters(local: ModelFleet, tmp_path: Path) -> None:
    fleet, folder = local.fleet, save_adapter(tmp_path / "a", seed=1)
    fleet.load_adapter("a", folder)
    before = drawn(fleet.generate(PROMPTS, asked("a")))
    local.kill("0")
    wait_until(lambda: fleet.stats()["replica_restarts"] == 1 and fleet.replicas["0"])
    local.kill("1")
    wait_until(lambda: fleet.stats()["replica_restarts"] == 2 and fleet.replicas["1"])
    assert drawn(fleet.generate(PROMPTS, asked("a"))) == before


@pytest.mark.parametrize("renewed", [False, True])
def test_a_request_goes_on_elsewhere_while_its_adapter_is_there(
    renewed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request goes on elsewhere while its adapter is there. Under a new version it would be another request: it is
    lost, which is no mistake of its caller.
    """
    monkeypatch.setattr(arrivals, "PATIENCE", 0.01)  # nobody need wait for the request that does not come
    folder, taken = save_adapter(tmp_path / "a", seed=1), list[LocalPort]()

    def never_answer_the_first(port: LocalPort) -> None:
        run = port.side.run_followed

        async def answered(prompt: list[int], params: SamplingParams, request_id: str, *numbers: int) -> RequestOutput:
            taken.append(port)
            if len(taken) == 1:
                await asyncio.Event().wait()
            return await run(prompt, params, request_id, *numbers)

        port.side.run_followed = answered

    local = ModelFleet(resubmit=True)
    with local.fleet as fleet:
        fleet.load_adapter("a", folder)
        expected = drawn(fleet.generate(PROMPTS[:1], asked("a")))
        for port in local.ports.values():
            never_answer_the_first(port)
        handle = fleet.submit(PROMPTS[0], asked("a"))
        wait_until(lambda: taken)
        if renewed:
            fleet.load_adapter("a", save_adapter(tmp_path / "b", seed=2))
        taken[0].kill(fleet._crew.background.loop)
        if renewed:
            with pytest.raises(WorkerLostError):
                handle.result(HANG)
        else:
            assert drawn([handle.result(HANG)]) == expected
        stats = fleet.fleet_stats()
        assert (stats["requests_lost"], stats["requests_resubmitted"]) == (renewed, not renewed)


def test_a_replica_that_is_started_again_reads_the_commit_of_a_name_that_the_others_have(
    local: ModelFleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replica that is started again reads the commit of a name that the others have, though the branch has moved on
    meanwhile.
    """
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    fleet, name = local.fleet, "samebit-tests/adapter"
    cache = Cache(tmp_path / "hub", name)
    cache.add("a" * 40, save_adapter(tmp_path / "a", seed=1), "main")
    fleet.load_adapter("a", name)
    before = drawn(fleet.generate(PROMPTS, asked("a")))
    cache.add("b" * 40, save_adapter(tmp_path / "b", seed=2), "main")
    for restarts, replica in enumerate(("0", "1"), 1):
        local.kill(replica)
        member = fleet._crew.members[replica]
        wait_until(lambda: fleet.stats()["replica_restarts"] == restarts and not member.starting)  # noqa: B023
        assert fleet.replicas[replica]
    assert drawn(fleet.generate(PROMPTS, asked("a"))) == before


def test_a_replica_that_comes_back_during_a_load_reads_the_adapter_once(local: ModelFleet, tmp_path: Path) -> None:
    """A replica that comes back during a load reads the adapter once, though it is asked to by the load, as all are,
    and by what brings it to the state of the fleet.
    """
    asked_for = threading.Event()

    def let_both_ask(port: LocalPort) -> None:
        adapters, load = port.side.adapters, port.side.rollout.load_adapter

        async def adapters_as_the_load_begins() -> list[str]:
            names = await adapters()
            asked_for.set()
            await asyncio.to_thread(wait_until, lambda: "load_adapter" in port.commands)
            return names

        def load_once_both_ask(name: str, source: object, **options: Any) -> object:
            wait_until(lambda: port.commands.count("load_adapter") == 2)
            return load(name, source, **options)

        port.side.adapters, port.side.rollout.load_adapter = adapters_as_the_load_begins, load_once_both_ask

    fleet, folder = local.fleet, save_adapter(tmp_path / "a", seed=1)
    local.prepare = let_both_ask
    local.kill("0")
    assert asked_for.wait(HANG)
    assert fleet.load_adapter("a", folder).version == 1
    wait_until(lambda: not fleet._crew.members["0"].starting)
    assert fleet.replicas["0"]
    assert [port.side.worker.adapters for port in local.ports.values()] == [["__base__", "a#0"]] * 2
    fleet.drop_adapter("a")
    assert [port.side.worker.adapters for port in local.ports.values()] == [["__base__"]] * 2


def test_a_replica_that_comes_back_during_a_load_and_reads_another_adapter_fails_the_load(
    local: ModelFleet, tmp_path: Path
) -> None:
    """A replica that comes back during a load and reads another adapter from the folder fails the load: it was dead
    when the others were asked, and has read before they have told what they read.
    """
    fleet, folder = local.fleet, save_adapter(tmp_path / "a", seed=1)
    read, may_answer = threading.Event(), threading.Event()
    load = local.ports["1"].side.rollout.load_adapter

    def load_and_answer_late(name: str, source: object, **options: Any) -> object:
        report = load(name, source, **options)
        read.set()
        assert may_answer.wait(HANG)
        return report

    def change_the_folder(port: LocalPort) -> None:
        assert read.wait(HANG)
        save_adapter(folder, seed=2)

    local.ports["1"].side.rollout.load_adapter = load_and_answer_late
    local.prepare = change_the_folder
    local.kill("0")
    member = fleet._crew.members["0"]
    wait_until(lambda: not member.alive)
    with ThreadPoolExecutor(1) as other:
        loading = other.submit(fleet.load_adapter, "a", folder)
        wait_until(lambda: "load_adapter" in local.ports["0"].commands and not member.starting)
        may_answer.set()
        with pytest.raises(AdapterError, match="the replicas read different adapters"):
            loading.result(HANG)
    assert fleet.adapters == ["__base__"]
    assert [port.side.worker.adapters for port in local.ports.values()] == [["__base__"]] * 2


def test_an_adapter_that_is_dropped_while_a_replica_reads_it_again_is_dropped_there(
    local: ModelFleet, tmp_path: Path
) -> None:
    reading = threading.Event()

    def read_slowly(port: LocalPort) -> None:
        load = port.side.rollout.load_adapter

        def load_once_it_is_forgotten(name: str, source: object, **options: Any) -> object:
            reading.set()
            wait_until(lambda: "forget_adapter" in port.commands)
            return load(name, source, **options)

        port.side.rollout.load_adapter = load_once_it_is_forgotten

    local.fleet.load_adapter("a", save_adapter(tmp_path / "a", seed=1))
    local.prepare = read_slowly
    local.kill("0")
    assert reading.wait(HANG)
    local.fleet.drop_adapter("a")
    wait_until(lambda: not local.fleet._crew.members["0"].starting)
    assert local.fleet.replicas["0"]
    assert [port.side.worker.adapters for port in local.ports.values()] == [["__base__"]] * 2


def test_a_folder_that_has_changed_is_not_read_again(local: ModelFleet, tmp_path: Path) -> None:
    """A folder that has changed, as by a trainer that saves over it, is not read again: the fleet's version is lost
    with its replicas, and nothing else is served.
    """
    fleet, folder = local.fleet, save_adapter(tmp_path / "a", seed=1)
    fleet.load_adapter("a", folder)
    save_adapter(folder, seed=2)
    for name in ("0", "1"):
        local.kill(name)
    wait_until(lambda: str(fleet.trouble()).count("used up") == 2)
    assert all(port._dead for port in local.ports.values())
    with pytest.raises(NoReplicaError, match="max_restarts=1 is used up"):
        fleet.submit(PROMPTS[0], asked("a")).result(HANG)


def test_a_stream_that_is_no_source_is_gone_through(local: ModelFleet) -> None:
    """A stream that is refused is read to its end: the trainer's other ranks gather it too, and would wait."""
    for error, options in ((TypeError, {}), (AdapterError, {"in_flight": "keep"})):
        gathered: list[str] = []
        with pytest.raises(error):
            local.fleet.load_adapter("a", noted_stream({"lora_A": torch.zeros(2)}, gathered), **options)
        assert gathered == ["lora_A"]
