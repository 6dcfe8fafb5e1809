"""A worker in an actor of Ray has the results of one in this process, weights over every link, and dies in time."""

from __future__ import annotations

import asyncio
import importlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import distributed as dist
from transformers import LlamaForCausalLM

ray = pytest.importorskip("ray")

from samebit.rollout import (  # noqa: E402
    AdapterError,
    ModelLoadError,
    NoTokenLeftError,
    PromptWithImages,
    RequestError,
    RequestIdInUseError,
    RolloutConfig,
    RolloutWorker,
    SamplingParams,
    StructuredOutputsParams,
    WorkerLostError,
    WorkerStateError,
    integrations,
)
from samebit.rollout.integrations.ray import (  # noqa: E402
    BroadcastFrom,
    BroadcastGroup,
    RayWorker,
    SharedMemoryAt,
    wait_for,
)
from samebit.weight_sync import (  # noqa: E402
    BroadcastSender,
    NonFiniteWeightError,
    PeerLostError,
    SharedMemorySender,
    WeightMismatchError,
    WeightStream,
    gloo_group,
    listening_store,
)
from samebit.weight_sync.transports.addresses import Sources  # noqa: E402

from ...exactness.images import make_model_with_images, with_images  # noqa: E402
from ...forks import CLIENT  # noqa: E402
from ...noted_stream import noted_stream  # noqa: E402
from ...patience import HANG, wait_until  # noqa: E402
from ..http.served import build_folder  # noqa: E402
from ..tiny_llama import tiny  # noqa: E402

CONFIG = RolloutConfig(max_num_seqs=8, num_blocks=200, seed=3)
PROMPTS = [[1], [2, 3, 4], list(range(5, 22))]
PARAMS = SamplingParams(n=2, max_tokens=9, temperature=0.7)
LONG = SamplingParams(max_tokens=1900, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny(0).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def worker(cluster: None, folder: Path) -> Iterator[RayWorker]:
    with RayWorker.start(folder, config=CONFIG, num_cpus=2) as remote:
        yield remote


@pytest.fixture
def local(folder: Path) -> Iterator[RolloutWorker]:
    with RolloutWorker(folder, config=CONFIG) as here:
        yield here


def seeded(seed: int) -> SamplingParams:
    return SamplingParams(n=2, max_tokens=9, temperature=0.7, seed=seed)


def drawn(outputs: list[Any]) -> list[tuple[list[int], list[float]]]:
    """Return tokens and log-probabilities, to be compared bit for bit (they are float32 values)."""
    return [(sample.token_ids, sample.logprobs) for output in outputs for sample in output.samples]


def serves(worker: RayWorker, weights: LlamaForCausalLM) -> bool:
    """Tell whether it generates what a worker on these weights does, bit for bit."""
    with RolloutWorker(weights, config=CONFIG) as here:
        return drawn(worker.generate(PROMPTS, seeded(5))) == drawn(here.generate(PROMPTS, seeded(5)))


def test_prompts_with_images(cluster: None, tmp_path: Path) -> None:
    """A whole model in an actor takes images in every call, large ones too, and a trainer's weights with the tower."""
    trainer = make_model_with_images("Qwen2")
    trainer.save_pretrained(tmp_path)
    prompts: list[Any] = [[1, 2, 3]]
    for sizes in ([(4, 6)], [(16, 20), (2, 2)]):
        one = with_images(sizes, seed=3)
        prompts.append(PromptWithImages(one.token_ids, one.pixel_values, one.image_grid_thw))
    config = replace(CONFIG, images=True)
    with RayWorker.start(tmp_path, config=config) as remote, RolloutWorker(trainer, config=config) as here:
        for _ in range(2):
            expected = here.generate(prompts, seeded(5))
            assert drawn(remote.generate(prompts, seeded(5))) == drawn(expected)
            assert drawn(asyncio.run(remote.generate_async(prompts, seeded(5)))) == drawn(expected)
            handles = remote.submit_all(prompts, seeded(5))
            assert drawn([handle.result(HANG) for handle in handles]) == drawn(expected)
            with here.weight_update(), torch.no_grad():
                trainer.get_parameter("model.visual.blocks.0.attn.qkv.weight").mul_(0.5)
            remote.receive_weights(trainer)
        wrong = replace(prompts[1], token_ids=[1])
        with pytest.raises(RequestError, match="placeholders"):
            remote.submit(wrong).result(HANG)


def test_adapters_are_loaded_and_dropped(worker: RayWorker, local: RolloutWorker, tmp_path: Path) -> None:
    """Adapters are loaded and dropped: a dict goes through shared memory, a folder is opened there; a request names one
    as in this process.
    """
    worker.receive_weights(tiny(0))
    config = LoraConfig(r=3, target_modules=["q_proj", "up_proj"])
    model = get_peft_model(tiny(0), config)
    for scale in (0.1, 0.2):
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if ".lora_B." in name:
                    weight.fill_(scale)
        matrices = {name: tensor for name, tensor in model.state_dict().items() if ".lora_" in name}
        sent, here = (one.load_adapter("a", matrices, config=config) for one in (worker, local))
        assert (sent.version, sent.digest) == (here.version, here.digest)
        expected = local.generate(PROMPTS, replace(seeded(1), adapter="a"))
        found = worker.generate(PROMPTS, replace(seeded(1), adapter="a"))
        assert drawn(found) == drawn(expected) != drawn(worker.generate(PROMPTS, seeded(1)))
        assert [one.adapter_version for one in found] == [sent.version] * 3
    model.save_pretrained(tmp_path)
    worker.load_adapter("b", tmp_path)
    assert worker.adapters == ["__base__", "a", "b"]
    assert drawn(worker.generate(PROMPTS, replace(seeded(1), adapter="b"))) == drawn(expected)
    for name in ("a", "b"):
        worker.drop_adapter(name, in_flight="abort")
    with pytest.raises(RequestError, match="adapter='a' is not known; there are __base__"):
        worker.generate(PROMPTS, replace(seeded(1), adapter="a"))
    with pytest.raises(AdapterError, match="in_flight must be one of"):
        worker.load_adapter("a", matrices, config=config, in_flight="keep")
    with pytest.raises(AdapterError, match="is new, and nothing says which layers"):
        worker.load_adapter("a", matrices)


def test_the_stream_of_an_adapter_that_is_not_sent_is_gone_through() -> None:
    """The stream of an adapter that is not sent is read to its end: the trainer's other ranks gather it too, and would
    wait.
    """
    gathered: list[str] = []
    with pytest.raises(AdapterError, match="in_flight must be one of"):
        RayWorker(None).load_adapter("a", noted_stream({"lora_A": torch.zeros(2)}, gathered), in_flight="keep")
    assert gathered == ["lora_A"]


def test_every_way_to_ask_gives_what_a_local_worker_gives(worker: RayWorker, local: RolloutWorker) -> None:
    worker.receive_weights(tiny(0))
    expected = drawn(local.generate(PROMPTS, seeded(1)))
    assert drawn(worker.generate(PROMPTS, seeded(1))) == expected
    handles = [worker.submit(prompt, seeded(1)) for prompt in PROMPTS]
    assert drawn([handle.result(HANG) for handle in handles]) == expected
    assert all(handle.done for handle in handles)
    assert drawn([handle.result(HANG) for handle in worker.submit_all(PROMPTS, seeded(1))]) == expected
    bad, good = worker.submit_all([[], PROMPTS[0]], [seeded(1)] * 2)
    with pytest.raises(RequestError, match="the prompt is empty"):
        bad.result(HANG)
    assert drawn([good.result(HANG)]) == expected[:2]
    with pytest.raises(RequestError, match="3 prompts, but 1 params"):
        worker.submit_all(PROMPTS, [seeded(1)])

    async def at_once() -> list[Any]:
        whole = [worker.generate_async(PROMPTS, seeded(1)) for _ in range(8)]
        return [*await asyncio.gather(*whole), [await worker.submit(PROMPTS[0], seeded(1)).result_async()]]

    *every, single = asyncio.run(at_once())
    assert [drawn(outputs) for outputs in every] == [expected] * 8
    assert drawn(single) == expected[:2]


def test_constrained_requests_are_those_of_a_local_worker(cluster: None, tmp_path: Path) -> None:
    """Constrained requests have the tokens and log-probabilities of a worker in this process; one that is refused, or
    has no token left, ends with that worker's error and the others go on.
    """
    folder = build_folder(tmp_path)
    constraint = StructuredOutputsParams(regex="[cd]{9}|no")
    params = replace(seeded(2), max_tokens=20, structured_outputs=constraint)
    unfit = replace(params, structured_outputs=StructuredOutputsParams(regex="a(("))
    with RolloutWorker(folder, config=CONFIG) as here, RayWorker.start(folder, config=CONFIG) as remote:
        expected = here.generate(PROMPTS, params)
        assert {one.text[0] for output in expected for one in output.samples} <= set("cdn")
        refused, empty, good = remote.submit_all([PROMPTS[0]] * 3, [unfit, replace(params, min_tokens=15), params])
        with pytest.raises(RequestError, match=r"structured_outputs\.regex can not be compiled"):
            refused.result(HANG)
        with pytest.raises(NoTokenLeftError, match="structured_outputs"):
            empty.result(HANG)
        assert drawn([good.result(HANG)]) == drawn(expected[:1])
        assert drawn(remote.generate(PROMPTS, params)) == drawn(expected)


def test_errors_arrive_as_they_are(worker: RayWorker, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="prompt 1: the prompt is empty"):
        worker.generate([[1], []])
    with pytest.raises(RequestError, match="vocabulary"):
        worker.submit([1000]).result(HANG)
    with pytest.raises(ValueError, match="tags must be of"):
        worker.sleep("wheels")
    with pytest.raises(TypeError, match="not from RolloutConfig"):
        worker.receive_weights(CONFIG)
    with pytest.raises(WorkerStateError, match="has its own weights"):
        worker.receive_weights()
    with pytest.raises(ModelLoadError, match="no such model folder"):
        RayWorker.start(tmp_path / "nowhere")


def test_requests_can_be_cancelled(worker: RayWorker) -> None:
    worker.pause()
    handle = worker.submit([1], LONG)
    with pytest.raises(TimeoutError):
        handle.result(0.1)
    other = worker.submit([2], LONG, request_id="mine")
    handle.cancel()
    worker.abort("mine")
    worker.resume()
    assert {h.result(HANG).samples[0].finish_reason for h in (handle, other)} == {"abort"}

    async def impatient() -> None:
        await asyncio.wait_for(worker.generate_async([[1]] * 3, LONG), 0.1)

    with pytest.raises(asyncio.TimeoutError):
        asyncio.run(impatient())
    wait_until(lambda: not worker.stats()["running"])


def test_an_id_that_is_no_text_is_refused_by_the_result(worker: RayWorker) -> None:
    handle = worker.submit([1], PARAMS, request_id=["mine"])  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="mine"):
        handle.result(HANG)


def test_a_cancel_ends_no_other_request_of_the_id(worker: RayWorker) -> None:
    first = worker.submit([1], PARAMS, request_id="mine")
    first.result(HANG)
    worker.pause()
    try:
        second = worker.submit([1], PARAMS, request_id="mine")
        third = worker.submit([1], PARAMS, request_id="mine")
        first.cancel()
        third.cancel()
    finally:
        worker.resume()
    with pytest.raises(RequestIdInUseError):
        third.result(HANG)
    assert second.result(HANG).samples[0].finish_reason == "length"


def test_an_await_that_is_cancelled_cancels_the_request(worker: RayWorker) -> None:
    worker.pause()
    try:
        handle = worker.submit([1], LONG)
        with pytest.raises(asyncio.TimeoutError):
            asyncio.run(asyncio.wait_for(handle.result_async(), 0.1))
    finally:
        worker.resume()
    assert handle.result(HANG).samples[0].finish_reason == "abort"


@pytest.mark.parametrize("by_id", [False, True])
def test_a_large_request_can_be_cancelled_at_once(worker: RayWorker, by_id: bool) -> None:
    """A large request can be cancelled at once. Arguments of more than 100 KiB go another way, and the cancel overtakes
    them, as it does so long a prompt.
    """
    worker.pause()
    try:
        handle = worker.submit([1], replace(LONG, cache_salt="x" * 200_000))
        worker.abort(handle.request_id) if by_id else handle.cancel()
    finally:
        worker.resume()
    assert handle.result(HANG).samples[0].finish_reason == "abort"


def test_a_paused_actor_with_ten_thousand_requests_can_be_resumed(cluster: None, folder: Path) -> None:
    full = RayWorker.start(folder, config=CONFIG)
    try:
        full.pause()
        first, *_ = full.submit_all([[1]] * 10_000, PARAMS)
        wait_for(full.actor.resume.remote(), HANG)
        assert first.result(HANG).samples[0].finish_reason == "length"
    finally:
        ray.kill(full.actor)  # `close` would wait as `resume` does


def test_an_interrupt_of_the_wait_aborts_its_requests(worker: RayWorker) -> None:
    returned = threading.Event()

    def interrupt_once_they_wait() -> None:
        try:
            wait_until(lambda: returned.is_set() or worker.stats()["waiting"] == 2)
        finally:
            if not returned.is_set():  # whatever happened here: nothing else ends that wait
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's job in the background ignores it
    worker.pause()
    try:
        with ThreadPoolExecutor(1) as other:
            interrupting = other.submit(interrupt_once_they_wait)
            try:
                with pytest.raises(KeyboardInterrupt):
                    worker.generate([[1], [2]], LONG)
            finally:
                returned.set()
            interrupting.result(HANG)
        wait_until(lambda: not worker.stats()["waiting"])
    finally:
        signal.signal(signal.SIGINT, before)
        worker.resume()


def test_the_process_is_set_up_before_torch_loads(worker: RayWorker) -> None:
    state = worker.health(HANG)
    assert state.pid != os.getpid()
    assert state.trouble is None
    started = ray.get(worker.actor.__ray_call__.remote(lambda actor: os.environ[CLIENT]))  # by Ray, for the fork
    environment = Path(f"/proc/{started}/environ").read_bytes().split(b"\0")
    for expected in (b"OMP_WAIT_POLICY=passive", b"GOMP_SPINCOUNT=4000", b"OMP_NUM_THREADS=2", b"NUMBA_NUM_THREADS=2"):
        assert expected in environment


def test_reading_the_version_waits_like_every_other_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading the version waits like every other call: an actor that is busy has not died."""
    client, limits = importlib.import_module(RayWorker.__module__), []

    def waited(reference: Any, timeout: float | None = None) -> Any:
        limits.append(timeout)
        return reference

    monkeypatch.setattr(client, "wait_for", waited)
    told = client.Health(pid=1, weight_version=7, trouble=None)
    assert RayWorker(SimpleNamespace(health=SimpleNamespace(remote=lambda: told))).weight_version == 7
    assert limits == [None]


def test_weights_from_this_process_go_through_shared_memory(worker: RayWorker) -> None:
    version = worker.weight_version
    report = worker.receive_weights(tiny(1), verify=True)
    assert (report.version, report.verified) == (version + 1, True)
    assert report.sent_bytes == report.dense_bytes > 0
    assert report.casts == ()
    assert serves(worker, tiny(1))
    with pytest.raises(WeightMismatchError, match="of another dtype"):
        worker.receive_weights(WeightStream.of(tiny(1), dtype=torch.bfloat16))
    casts = worker.receive_weights(WeightStream.of(tiny(1), dtype=torch.bfloat16), cast=True).casts
    assert {"model.norm.weight: float32 -> bfloat16", "model.norm.weight: bfloat16 -> float32"} <= set(casts)
    saved = {**tiny(2).state_dict(), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(16)}
    assert worker.load_state_dict(saved).version == version + 3
    assert serves(worker, tiny(2))


def test_weights_that_are_refused_or_break_off(worker: RayWorker) -> None:
    worker.receive_weights(tiny(1))
    with pytest.raises(WeightMismatchError, match=r"missing: .*q_proj"):
        worker.receive_weights({"model.norm.weight": torch.ones(64)})
    assert serves(worker, tiny(1))
    bad = tiny(2)
    with torch.no_grad():
        bad.model.norm.weight[3] = torch.nan
    with pytest.raises(NonFiniteWeightError, match=r"model\.norm\.weight"):
        worker.receive_weights(bad)
    assert serves(worker, tiny(1)), "the first bucket said that the sender broke off"


def test_weights_over_links_that_the_actor_opens(worker: RayWorker, folder: Path, tmp_path: Path) -> None:
    worker.receive_weights(str(folder))
    assert serves(worker, tiny(0))
    with SharedMemorySender() as sender, ThreadPoolExecutor(1) as other:
        for seed in (4, 5):
            sent = other.submit(sender.send, tiny(seed), delta=True)
            assert worker.receive_weights(SharedMemoryAt(sender.address)).digest == sent.result().digest
            assert serves(worker, tiny(seed))
    store = f"file://{tmp_path / 'store'}"
    with ThreadPoolExecutor(1) as other:
        joined = other.submit(worker.join_group, store, 2, 1)
        dist.init_process_group("gloo", init_method=store, world_size=2, rank=0)
        joined.result()
        sent = other.submit(BroadcastSender().send, tiny(6))
        assert worker.receive_weights(BroadcastFrom(0)).digest == sent.result().digest
    dist.destroy_process_group()
    assert serves(worker, tiny(6))


def test_a_link_stays_open_until_an_update_fails_or_its_group_is_done() -> None:
    sources = Sources()

    def opened(source: object) -> object:
        with sources.opened(source) as link:
            return link

    link = opened(SharedMemoryAt("nobody"))
    assert opened(SharedMemoryAt("nobody")) is link
    assert opened(SharedMemoryAt("another")) is not link
    with pytest.raises(TimeoutError), sources.opened(SharedMemoryAt("nobody")):
        raise TimeoutError
    assert opened(SharedMemoryAt("nobody")) is not link
    store = listening_store("127.0.0.1")
    with ThreadPoolExecutor(1) as other:
        trainer = other.submit(gloo_group, store, 0, 2)
        group = opened(BroadcastGroup("127.0.0.1", store.port, rank=1, size=2, timeout=HANG))
        trainer.result()
    with pytest.raises(PeerLostError, match="closed"):
        group.listen()


def test_a_broadcast_over_the_device_of_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    addresses = importlib.import_module(BroadcastFrom.__module__)
    monkeypatch.setattr(addresses, "BroadcastReceiver", lambda *place, **options: made.append((place, options)))
    BroadcastFrom(3, timeout=7, device="cuda").open()
    assert made == [((3,), {"timeout": 7, "device": "cuda"})]


def test_weights_on_the_gpu_of_the_actor_go_through_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights on the GPU of the actor go through its memory. Stand-ins for both ends of CUDA IPC tell which are made,
    where, and for how long.
    """
    client, addresses = (importlib.import_module(kind.__module__) for kind in (RayWorker, BroadcastFrom))
    made: list[Any] = []

    class Sender:
        def __init__(self, timeout: float) -> None:
            self.address, self.timeout = "there", timeout

        def send(self, stream: WeightStream) -> None:
            made.append((self.timeout, list(stream.specs)))

    class Actor:
        def remote(self, link: object, **options: object) -> object:
            return made.append((link, options))

    monkeypatch.setattr(client, "CudaIpcSender", Sender)
    monkeypatch.setattr(client, "wait_for", lambda reference: "report")
    actor = SimpleNamespace(receive_weights=Actor(), load=SimpleNamespace(remote=lambda *_: None))
    monkeypatch.setattr(client, "start_actor", lambda *_, **options: actor)
    on_gpu = RayWorker.start("folder", sync_timeout=9, device="cuda")
    for _ in range(2):
        assert on_gpu.receive_weights({"weight": torch.zeros(3)}, partial=True) == "report"
    assert made == [(addresses.CudaIpcAt("there", 9), {"partial": True}), (9, ["weight"])] * 2
    monkeypatch.setattr(addresses, "CudaIpcReceiver", lambda *place, **options: made.append((place, options)))
    addresses.CudaIpcAt("there", 9).open()
    assert made[-1] == (("there",), {"timeout": 9})
    with pytest.raises(ValueError, match=r"device must be .*'cpu'.*'cuda'.*got 'gpu'"):
        RayWorker.start("folder", device="gpu")


def test_memory_and_control(worker: RayWorker) -> None:
    worker.receive_weights(tiny(1))
    worker.sleep()
    assert "asleep" in str(worker.health(HANG).trouble)
    with pytest.raises(WorkerStateError, match="asleep"):
        worker.generate([[1]])
    worker.wake_up()
    worker.reset_prefix_cache()
    assert worker.stats()["blocks_cached"] == 0
    assert serves(worker, tiny(1))


def test_a_killed_actor_is_an_error_at_all_callers(cluster: None, folder: Path) -> None:
    worker = RayWorker.start(folder, config=CONFIG, name="doomed")
    sender = SharedMemorySender(timeout=2 * HANG)

    def stop_after_some_steps(actor: Any) -> None:
        """Let the actor make some steps and no more: no request ends, and no update that waits for them is written."""
        import threading

        runner, left = actor._loaded._engine.runner, threading.Semaphore(20)
        launch = runner.launch
        runner.launch = lambda *args: left.acquire() and launch(*args)

    ray.get(worker.actor.__ray_call__.remote(stop_after_some_steps))
    with ThreadPoolExecutor(8) as threads:
        worker.pause()
        waiting: list[Future[Any]] = [
            threads.submit(worker.generate, [[1]] * 8, LONG),
            threads.submit(asyncio.run, worker.generate_async([[1]] * 8, LONG)),
            threads.submit(worker.submit([1], LONG).result),
            threads.submit(worker.receive_weights, SharedMemoryAt(sender.address)),
        ]
        worker.resume()
        wait_until(lambda: worker.stats()["output_tokens"] >= 50)
        waiting.append(threads.submit(worker.receive_weights, tiny(1), in_flight="wait"))
        wait_until(lambda: worker._sender is not None)
        assert worker.stats()["running"] > 0
        os.kill(worker.health(HANG).pid, signal.SIGKILL)
        for future in waiting:
            with pytest.raises(WorkerLostError, match="actor died"):
                future.result(HANG)
    for call in (worker.health, worker.stats, lambda: worker.generate([[1]]), lambda: worker.receive_weights(tiny(1))):
        with pytest.raises(WorkerLostError):
            call()
    worker.close()
    sender.close()


def test_without_ray_the_import_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"pip install 'samebit\[ray\]'"):
        importlib.reload(sys.modules["samebit.rollout.integrations.ray"])
    importlib.reload(integrations)
