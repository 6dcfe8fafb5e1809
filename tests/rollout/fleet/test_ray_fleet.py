"""Replicas in actors of Ray have the bits of one worker and weights for all, and survive deaths."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import huggingface_hub.constants
import openai
import pytest
import torch
from transformers import LlamaForCausalLM

ray = pytest.importorskip("ray")

from ray.util import placement_group, remove_placement_group  # noqa: E402
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy  # noqa: E402

from samebit.kernels import bind, token_logprobs  # noqa: E402
from samebit.rollout import (  # noqa: E402
    ModelLoadError,
    NoTokenLeftError,
    RequestError,
    RolloutConfig,
    SamplingParams,
    StructuredOutputsParams,
    WorkerLostError,
)
from samebit.rollout.adapters.pinned import Pinned  # noqa: E402
from samebit.rollout.fleet.options import FleetOptions  # noqa: E402
from samebit.rollout.integrations.http.service import Service  # noqa: E402
from samebit.rollout.integrations.http.serving import Server, fleet_of, open_sockets  # noqa: E402
from samebit.rollout.integrations.http.settings import ServeSettings, read_setup  # noqa: E402
from samebit.rollout.integrations.ray import RayFleet, room  # noqa: E402
from samebit.rollout.integrations.ray import fleet as ray_fleet  # noqa: E402

from ...patience import HANG, wait_until  # noqa: E402
from ..http.served import NAME, build_folder, byte_tokenizer  # noqa: E402
from ..http.test_streams import ask  # noqa: E402
from ..requests.test_hub import Cache  # noqa: E402
from .test_fleet import as_of_feeds  # noqa: E402

CONFIG = RolloutConfig(max_num_seqs=8, num_blocks=400, seed=3, num_threads=1)
PROMPTS = [[1], [2, 3, 4], list(range(5, 22)), list(range(30, 80))]


def soak(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test that starts processes of its own."""
    few = pytest.mark.skipif("SAMEBIT_SOAK_CASES" not in os.environ, reason="starts a process: make soak")
    return pytest.mark.soak(few(test))


LONG = SamplingParams(max_tokens=1900, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_folder(tmp_path_factory.mktemp("model"))


def model_of(folder: Path, seed: int | None = None) -> LlamaForCausalLM:
    """Return the folder's model, or one of other weights."""
    model = LlamaForCausalLM.from_pretrained(folder)
    if seed is not None:
        torch.manual_seed(seed)
        model = LlamaForCausalLM(model.config)
    return model


@pytest.fixture(scope="module")
def fleet(cluster: None, folder: Path) -> Iterator[RayFleet]:
    with RayFleet.start(folder, replicas=2, config=CONFIG, options=FleetOptions(sync_timeout=30)) as one:
        yield one


def differing(model: torch.nn.Module, outputs: list, temperature: float) -> int:
    """Count the tokens that have another log-probability than the trainer computes."""
    found = 0
    for output in outputs:
        for sample in output.samples:
            ids = torch.tensor([output.prompt_token_ids + sample.token_ids])
            with torch.no_grad():
                scores = token_logprobs(model, ids, temperature=temperature)[0, len(output.prompt_token_ids) - 1 :]
            found += int((scores != torch.tensor(sample.logprobs)).sum())
    return found


def test_its_bits_are_the_trainers_before_and_after_an_update(fleet: RayFleet, folder: Path) -> None:
    params = SamplingParams(n=2, max_tokens=9, temperature=0.7, seed=4)
    outputs = fleet.generate(PROMPTS * 2, params)
    assert differing(bind(model_of(folder)), outputs, 0.7) == 0
    before = [[sample.token_ids for sample in output.samples] for output in outputs]
    new = model_of(folder, 1)
    report = fleet.receive_weights(new)
    assert report.version == fleet.weight_version == 1
    again = fleet.generate(PROMPTS * 2, params)
    assert differing(bind(new), again, 0.7) == 0
    assert [[sample.token_ids for sample in output.samples] for output in again] != before
    assert {span[2] for output in again for sample in output.samples for span in sample.weight_versions} == {1}


def test_a_conversation_is_found_in_the_cache_and_streams(fleet: RayFleet) -> None:
    tokens = list(range(1, 60))
    for turn in range(3):
        handle = fleet.submit(tokens, SamplingParams(max_tokens=20, ignore_eos=True), session="talk")
        streamed = [token for chunk in handle for token in chunk.token_ids]
        output = handle.result(HANG)
        assert streamed == output.samples[0].token_ids
        if turn:
            assert output.num_cached_tokens >= len(tokens) - 32
        tokens = tokens + streamed + [turn]
    assert fleet.stats()["router_sessions_moved"] == 0


def test_constrained_requests_keep_to_their_grammar(fleet: RayFleet, folder: Path) -> None:
    """Constrained requests keep to their grammar with the trainer's bits, whatever fails beside them."""
    fleet.receive_weights(new := model_of(folder, 2))
    fits = SamplingParams(n=2, max_tokens=40, seed=6, structured_outputs=StructuredOutputsParams(regex="[cd]{9}|no"))
    unfit = replace(fits, structured_outputs=StructuredOutputsParams(regex="a(("))
    refused, empty, *others = fleet.submit_all(
        [PROMPTS[0]] * 2 + PROMPTS * 2, [unfit, replace(fits, min_tokens=15), *[fits] * 2 * len(PROMPTS)]
    )
    with pytest.raises(RequestError, match=r"structured_outputs\.regex can not be compiled"):
        refused.result(HANG)
    with pytest.raises(NoTokenLeftError, match="structured_outputs"):
        empty.result(HANG)
    outputs = [handle.result(HANG) for handle in others]
    assert all(re.fullmatch("[cd]{9}|no", one.text or "") for output in outputs for one in output.samples)
    assert differing(bind(new), outputs, 1.0) == 0
    drawn = [[(one.token_ids, one.logprobs) for one in output.samples] for output in outputs]
    assert drawn[: len(PROMPTS)] == drawn[len(PROMPTS) :]


def test_commands_reach_all_actors(fleet: RayFleet) -> None:
    fleet.pause()
    handle = fleet.submit([1, 2], SamplingParams(max_tokens=3))
    fleet.resume()
    assert handle.result(HANG)
    fleet.sleep(level=1)
    fleet.wake_up()
    fleet.reset_prefix_cache()
    assert len(fleet.generate(PROMPTS, SamplingParams(max_tokens=3))) == len(PROMPTS)
    assert fleet.stats()["replicas_open"] == 2


@pytest.mark.parametrize("by_id", [False, True])
def test_a_large_request_can_be_cancelled_at_once(fleet: RayFleet, by_id: bool) -> None:
    """A large request can be cancelled at once. Arguments of more than 100 KiB go another way, and the cancel overtakes
    them, as it does so long a prompt.
    """
    fleet.pause()
    try:
        handle = fleet.submit([1], replace(LONG, cache_salt="x" * 200_000))
        fleet.abort(handle.request_id) if by_id else handle.cancel()
    finally:
        fleet.resume()
    assert handle.result(HANG).samples[0].finish_reason == "abort"


def test_a_server_in_front_of_a_fleet(fleet: RayFleet, folder: Path) -> None:
    """A server in front of a fleet has the bits, streams, sessions, control, and numbers by replica."""
    setup = read_setup([str(folder), "--port", "0", "--control-port", "0", "--control", "loopback"], {})
    service = Service(fleet, setup.settings, NAME, byte_tokenizer())
    server = Server(service, sockets := open_sockets(setup.settings))
    thread = threading.Thread(target=server.run)
    thread.start()
    base, control = (f"http://127.0.0.1:{one.getsockname()[1]}" for one in sockets.all)
    try:
        with (
            openai.OpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0) as client,
            httpx.Client(timeout=HANG) as http,
        ):
            body = {"token_ids": [5] * 40, "sampling_params": {"max_tokens": 9, "logprobs": 0, "ignore_eos": True}}
            choice = http.post(f"{base}/inference/v1/generate", json=body).json()["choices"][0]
            found = [one["logprob"] for one in choice["logprobs"]["content"]]
            exact = fleet.submit([5] * 40 + choice["token_ids"], SamplingParams(max_tokens=1, prompt_logprobs=0))
            assert torch.equal(torch.tensor(found), torch.tensor(exact.result(HANG).prompt_logprobs[40:]))
            asked = {"model": NAME, "prompt": [9] * 50, "max_tokens": 12, "seed": 3}
            whole = client.completions.create(**asked).choices[0].text
            stream = client.completions.create(**asked, stream=True, extra_headers={"X-Session-ID": "talk"})
            assert "".join(chunk.choices[0].text for chunk in stream if chunk.choices) == whole
            assert http.get(f"{base}/health").status_code == http.get(f"{base}/readiness").status_code == 200
            assert http.get(f"{control}/get_world_size").json() == {"world_size": 2}
            assert http.get(f"{control}/get_world_size?include_dp=false").json() == {"world_size": 1}
            shown = http.get(f"{control}/server_info").text
            assert "digest_key" not in shown
            assert http.post(f"{control}/sleep").status_code == 200
            assert http.post(f"{base}/v1/completions", json=asked).status_code == 503
            assert http.get(f"{control}/is_sleeping").json()["is_sleeping"]
            assert http.post(f"{control}/wake_up").status_code == 200
            info = {"init_info": {"backend": "shared_memory", "address": "x"}}
            refused = http.post(f"{control}/init_weight_transfer_engine", json=info)
            assert (refused.status_code, "a fleet has several" in refused.text) == (400, True)
            wait_until(lambda: as_of_feeds(fleet, "running") == 0)
            text = http.get(f"{base}/metrics").text
            for engine in ("0", "1"):
                assert f'samebit_replica_open{{engine="{engine}",model_name="{NAME}"}} 1.0' in text
                assert f'vllm:num_requests_running{{engine="{engine}",model_name="{NAME}"}} 0.0' in text
            assert "samebit_fleet_router_requests_total" in text
            assert bad_request(client).status_code == 400
    finally:
        server.stop()
        thread.join()


def bad_request(client: openai.OpenAI) -> openai.APIStatusError:
    with pytest.raises(openai.APIStatusError) as error:
        client.completions.create(model=NAME, prompt=[10**6], max_tokens=1)
    return error.value


def test_a_client_that_never_reads_holds_up_nobody(fleet: RayFleet) -> None:
    service, taken = Service(fleet, ServeSettings(stall_seconds=0.2), NAME, byte_tokenizer()), []

    async def read_one_piece(message: dict[str, object]) -> None:
        taken.append(message)
        if len(taken) > 2:
            await asyncio.Event().wait()

    body = {"prompt": "a", "max_tokens": 1500, "ignore_eos": True, "stream": True}
    asyncio.run(ask(service, body, read_one_piece))
    assert len(taken) == 3
    assert service.admission.inside == 0
    wait_until(lambda: fleet.stats()["running"] == 0)
    assert len(fleet.generate(PROMPTS, SamplingParams(max_tokens=3))) == len(PROMPTS)


@soak
def test_a_killed_replica_comes_back_with_the_weights_of_the_others(fleet: RayFleet, folder: Path) -> None:
    """A killed replica comes back with the weights of the others, here of another model than the folder's."""
    model = model_of(folder, 5)
    fleet.receive_weights(model)
    handles = [fleet.submit([number], LONG) for number in range(4)]
    pid = next(iter(fleet._crew.members.values())).pid
    wait_until(lambda: as_of_feeds(fleet, "running") == 4)
    os.kill(pid, signal.SIGKILL)
    ended = []
    for handle in handles:
        try:
            ended.append(len(handle.result(HANG).samples[0].token_ids))
        except WorkerLostError as error:
            ended.append(str(error))
    assert sum(isinstance(one, str) for one in ended) == 2
    assert ended.count(1900) == 2
    wait_until(lambda: all(fleet.replicas.values()))
    outputs = [
        fleet.submit([number, 7], SamplingParams(max_tokens=5), session=str(number)).result(HANG) for number in range(6)
    ]
    assert differing(bind(model), outputs, 1.0) == 0
    assert fleet.stats()["replica_restarts"] == 1


def test_a_replica_that_is_started_again_reads_the_commit_that_the_fleet_has_found(
    cluster: None, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replica that is started again reads the commit that the fleet has found: the branch has moved on meanwhile, and
    no update has told the two apart.
    """

    def use_the_cache() -> None:
        huggingface_hub.constants.HF_HUB_CACHE = str(tmp_path / "hub")
        huggingface_hub.constants.HF_HUB_OFFLINE = True

    class WithCache(ray_fleet.FleetActor):
        def __init__(self) -> None:
            super().__init__()
            use_the_cache()

    for constant in ("HF_HUB_CACHE", "HF_HUB_OFFLINE"):
        monkeypatch.setattr(huggingface_hub.constants, constant, getattr(huggingface_hub.constants, constant))
    use_the_cache()
    start = ray_fleet.start_actor
    monkeypatch.setattr(ray_fleet, "start_actor", lambda _, **options: start(WithCache, **options))
    cache, params = Cache(tmp_path / "hub"), SamplingParams(max_tokens=9, temperature=0.7, seed=4)
    cache.add("a" * 40, folder, "main")
    model_of(folder, 1).save_pretrained(tmp_path / "next")
    with RayFleet.start("samebit-tests/tiny-llama", replicas=1, config=CONFIG) as one:
        cache.add("b" * 40, tmp_path / "next", "main")
        os.kill(one._crew.members["0"].pid, signal.SIGKILL)
        wait_until(lambda: one.stats()["replica_restarts"] == 1 and one.replicas["0"])
        assert differing(bind(model_of(folder)), one.generate(PROMPTS, params), 0.7) == 0


def test_bad_fleets_are_named(cluster: None, folder: Path) -> None:
    with pytest.raises(ValueError, match="replicas must be an int of at least 1, got 0"):
        RayFleet.start(folder, replicas=0)
    with pytest.raises(ValueError, match="9 replicas of 1 cores need 9, and the Ray cluster has 4"):
        RayFleet.start(folder, replicas=9)
    with pytest.raises(ValueError, match="leave out name"):
        RayFleet.start(folder, replicas=1, name="mine")


def test_cores_that_others_hold_are_not_waited_for_without_end(
    fleet: RayFleet, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cores that others hold are not waited for without end: Ray would never place the last actor."""
    monkeypatch.setattr(room, "SETTLE_SECONDS", 1)
    wait_until(lambda: ray.available_resources().get("CPU") == 2)
    said = r"3 replicas of 1 cores need 3; of the 4 cores of the Ray cluster others hold 2"
    with pytest.raises(ValueError, match=said):
        RayFleet.start(folder, replicas=3)


def test_only_a_placement_groups_cores_are_not_held_by_others(
    fleet: RayFleet, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "SETTLE_SECONDS", 1)
    wait_until(lambda: ray.available_resources().get("CPU") == 2)
    group = placement_group([{"CPU": 2}])
    try:
        wait_until(lambda: group.wait(1) and "CPU" not in ray.available_resources())
        for strategy in ("SPREAD", "DEFAULT", None):
            with pytest.raises(ValueError, match=r"1 replicas of 1 cores need 1; of the 4 cores .* others hold 4"):
                RayFleet.start(folder, replicas=1, config=CONFIG, scheduling_strategy=strategy)
        with pytest.raises(ValueError, match="others hold 4"):
            RayFleet.start(folder, replicas=1, config=CONFIG, placement_group=None)
        with RayFleet.start(folder, replicas=1, config=CONFIG, placement_group=group) as one:
            assert one.generate([[1]], SamplingParams(max_tokens=2))
        in_group = PlacementGroupSchedulingStrategy(group)
        with RayFleet.start(folder, replicas=1, config=CONFIG, scheduling_strategy=in_group) as one:
            assert one.generate([[1]], SamplingParams(max_tokens=2))
        asked = ray.remote(room.in_a_group)
        for captured in (True, False):  # what starts in a group may place its actors there, or not
            caller = PlacementGroupSchedulingStrategy(group, placement_group_capture_child_tasks=captured)
            inside = asked.options(scheduling_strategy=caller)
            assert ray.get(inside.remote({}), timeout=HANG) is captured
            assert ray.get(inside.remote({"scheduling_strategy": "SPREAD"}), timeout=HANG) is False
    finally:
        remove_placement_group(group)
        wait_until(lambda: ray.available_resources().get("CPU") == 2)


def test_the_cores_of_a_server_are_shared_as_its_cluster_counts_them(
    cluster: None, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cores of a server are shared as its cluster counts them, which has 4; a container's machine, or that of the
    front, may have others.
    """
    asked: list[int] = []

    def start(model: Pinned, *, num_cpus: int, **_: object) -> None:
        asked.append(num_cpus)

    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(RayFleet, "start", start)
    for flags in (["2"], ["3"], ["9"], ["2", "--replica-cpus", "7"]):
        fleet_of(read_setup([str(folder), "--replicas", *flags], {}), Pinned(folder, None))
    assert asked == [2, 1, 1, 7]


def test_replicas_are_counted_by_the_nodes_on_which_they_fit(
    cluster: None, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replicas are counted by the nodes on which they fit, as an actor's cores are those of one node: three nodes of 4
    cores fit three actors of 3, not four.
    """
    nodes = [{"Alive": True, "Resources": {"CPU": 4.0}}] * 3 + [{"Alive": False, "Resources": {"CPU": 64.0}}]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    assert [room.even_share(replicas) for replicas in (1, 2, 3, 4, 6, 7, 12, 13)] == [4, 4, 4, 2, 2, 1, 1, 1]
    said = "4 replicas of 3 cores need 12, and the Ray cluster has 12: its nodes have 4, 4, 4, where 3 of that size fit"
    with pytest.raises(ValueError, match=said):
        room.check_room(4, 3, reserved=True)
    room.check_room(3, 3, reserved=True)


def test_replicas_of_a_server_have_read_their_tokenizers_for_grammars(cluster: None, folder: Path) -> None:
    """Replicas of a server have read their tokenizers for grammars: at the first request of one, streams would stop."""
    ready = SamplingParams(structured_outputs=StructuredOutputsParams(json_object=True))
    flags = ("--replicas", "2", "--replica-cpus", "1", "--num-threads", "1", "--num-blocks", "400")
    with fleet_of(read_setup([str(folder), *flags], {}), Pinned(folder, None)) as one:
        for member in one._crew.members.values():
            prepared = member.port.actor.__ray_call__.remote(lambda side: side.rollout.preparation(ready) is None)
            assert ray.get(prepared, timeout=HANG)


@soak
def test_a_missing_folder_is_named(cluster: None, folder: Path) -> None:
    with pytest.raises(ModelLoadError, match="nowhere"):
        RayFleet.start(folder / "nowhere", replicas=1)
