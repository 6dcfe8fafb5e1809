"""The server of the plugin for verl works without Ray: requests, aborts, memory, versions, and what it refuses."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

pytest.importorskip("verl", reason="verl is not installed: pip install 'samebit[verl]'")

from verl.workers.rollout.replica import RolloutMode, TokenOutput

from samebit.recipes import tiny_model
from samebit.rollout import RequestError, RolloutConfig, WorkerStateError
from samebit.rollout.async_worker import AsyncWorker
from samebit.rollout.integrations.ray import SharedMemoryAt
from samebit.rollout.integrations.verl.names import ADAPTER
from samebit.rollout.integrations.verl.options import AdapterOption, ServerOptions
from samebit.rollout.integrations.verl.server.server import SamebitServer
from samebit.rollout.integrations.verl.server.steps import MOST_VERSIONS
from samebit.weight_sync import SharedMemorySender, SyncBrokenError, WeightStream

from ...patience import HANG
from ..held_steps import held_steps
from .verl_model import save_model

PARAMS = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}
OPTIONS = ServerOptions(
    name="server",
    model="",
    tokenizer="",
    worker=RolloutConfig(dtype="float32", max_num_seqs=8, block_size=16),
    prompt_length=20,
    response_length=12,
    repetition_penalty=1.0,
    ignore_eos=True,
    frees_memory=True,
    num_cpus=1,
    sync_timeout=HANG,
    routed_experts=False,
    traces=None,
)


def serve(
    folder: Path,
    check: Callable[[SamebitServer], Awaitable[None]],
    *,
    mode: RolloutMode = RolloutMode.HYBRID,
    **options: Any,
) -> None:
    """Run `check` on the event loop of a server."""

    async def main() -> None:
        server = SamebitServer()
        await server.load(replace(OPTIONS, **{"model": str(folder), "tokenizer": str(folder), **options}), mode)
        try:
            await asyncio.wait_for(check(server), HANG)
        finally:
            await server.close()

    asyncio.run(main())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


def test_tokens_in_tokens_out(folder: Path) -> None:
    async def check(server: SamebitServer) -> None:
        ask = [server.generate([1, 5, 6], dict(PARAMS), "same") for _ in range(4)]
        outputs: list[TokenOutput] = await asyncio.gather(*ask)
        assert all(len(out.token_ids) == len(out.log_probs) == 12 for out in outputs)
        assert {out.stop_reason for out in outputs} == {"completed"}
        assert len({tuple(out.token_ids) for out in outputs}) == 4, "equal prompts, also under one id, differ"
        fields = {"global_steps": 0, "min_global_steps": 0, "max_global_steps": 0}
        assert fields.items() <= outputs[0].extra_fields.items()
        short = await server.generate([1] * 30, {**PARAMS, "logprobs": False}, "b")
        assert len(short.token_ids) == 2, "prompt and response fit into what verl has room for"
        assert short.log_probs is None
        assert len((await server.generate([1] * 30, {**PARAMS, "max_tokens": 5}, "c")).token_ids) == 5
        long = await server.generate([1] * 250, {**PARAMS, "max_tokens": 100}, "d")
        assert len(long.token_ids) == 6, "and into the model"
        stats = await server.stats()
        assert stats["requests_finished"] == 7
        assert stats["generation_seconds"] > 0

    serve(folder, check)


def test_which_experts_computed_each_token(tmp_path: Path, folder: Path) -> None:
    """The server tells which experts computed each token, in the layout of verl's router replay: all tokens but the
    last.
    """
    save_model(tmp_path, architecture="moe")

    async def check(server: SamebitServer) -> None:
        for _ in range(2):
            out: TokenOutput = await server.generate([1, 5, 6], dict(PARAMS), "a")
            assert out.routed_experts.shape == (3 + 12 - 1, 2, 4)
            assert bool((out.routed_experts[:, 1, 1:] > out.routed_experts[:, 1, :-1]).all())
        asking = asyncio.create_task(server.generate([1, 5], {**PARAMS, "max_tokens": 200}, "b"))
        await asyncio.sleep(0)
        await server.abort_all_requests()
        out = await asking
        assert out.routed_experts is None or len(out.routed_experts) == 2 + len(out.token_ids) - 1

    serve(tmp_path, check, routed_experts=True)
    with pytest.raises(ValueError, match=r"custom\.routed_experts=True, but .* has no routed experts"):
        serve(folder, check, routed_experts=True)


def test_the_end_of_a_response_is_the_models_or_the_tokenizers(folder: Path, tmp_path: Path) -> None:
    model, tokenizer = tiny_model.load(folder)
    tokenizer.eos_token = "="  # sampled soon
    tiny_model.save(model, tokenizer, tmp_path)

    async def check(server: SamebitServer) -> None:
        outputs = await asyncio.gather(*(server.generate([1], {**PARAMS, "max_tokens": 200}, "a") for _ in range(4)))
        ends = {model.config.eos_token_id, tokenizer.eos_token_id}
        assert len(ends) == 2
        assert all(out.token_ids[-1] in ends and not ends & set(out.token_ids[:-1]) for out in outputs)
        assert tokenizer.eos_token_id in {out.token_ids[-1] for out in outputs}

    serve(tmp_path, check, ignore_eos=False)


def test_an_end_token_outside_the_vocabulary_ends_nothing(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An end token outside the vocabulary, as tokenizers of cut-down models have them, ends nothing."""
    model, tokenizer = tiny_model.load(folder)
    tokenizer.add_special_tokens({"eos_token": "<over>"})
    tiny_model.save(model, tokenizer, tmp_path)

    async def check(server: SamebitServer) -> None:
        assert (await server.generate([1, 5], dict(PARAMS), "a")).stop_reason == "completed"

    serve(tmp_path, check, ignore_eos=False)
    assert f"the tokenizer's eos_token_id names {tokenizer.eos_token_id}, outside the vocabulary" in caplog.text


def test_several_turns_hit_the_prefix_cache(folder: Path) -> None:
    async def check(server: SamebitServer) -> None:
        first = await server.generate(list(range(4, 20)) * 3, {**PARAMS, "max_tokens": 30}, "a")
        turn = list(range(4, 20)) * 3 + first.token_ids + [7, 8]
        second = await server.generate(turn, {**PARAMS, "max_tokens": 30}, "a")
        assert first.extra_fields["num_cached_tokens"] == 0
        assert second.extra_fields["num_cached_tokens"] == 64, "prompt and response of the first turn, whole blocks"
        await server.clear_kv_cache()
        third = await server.generate(turn, {**PARAMS, "max_tokens": 30}, "a")
        assert third.extra_fields["num_cached_tokens"] == 0

    serve(folder, check)


def test_aborted_requests_come_back_with_what_they_have(folder: Path) -> None:
    async def check(server: SamebitServer) -> None:
        long = {**PARAMS, "max_tokens": 240}
        with held_steps(server._worker) as steps:
            running = [
                asyncio.create_task(server.generate([1, 4, index], dict(long), f"r{index}")) for index in range(4, 7)
            ]
            while (await server.stats())["running"] < 3:
                await asyncio.sleep(0.01)
            steps.release()
            while (await server.stats())["output_tokens"] < 3:
                await asyncio.sleep(0.01)
            told = await server.abort_all_requests()
            parts = [await task for task in running]
        assert told["aborted_count"] == len(told["request_ids"]) == 3
        assert all(out.stop_reason == "aborted" and 0 < len(out.token_ids) < 240 for out in parts)
        assert all(len(out.token_ids) == len(out.log_probs) for out in parts)
        waiting = asyncio.create_task(server.generate([1, 5], dict(PARAMS), "w"))
        await asyncio.sleep(0.05)
        assert not waiting.done(), "who comes now waits"
        await server.resume_generation()
        assert (await waiting).stop_reason == "completed"

    serve(folder, check)


def test_a_server_that_leaves_turns_requests_away(folder: Path) -> None:
    async def check(server: SamebitServer) -> None:
        await server.set_global_steps(version=0, global_steps=7)
        await server.abort_all_requests()
        waiting = asyncio.create_task(server.generate([1, 5], dict(PARAMS), "w"))
        await asyncio.sleep(0.05)
        await server.abort_all_requests(reject_request=True)
        for out in (await waiting, await server.generate([1, 5], dict(PARAMS), "x")):
            assert (out.token_ids, out.stop_reason, out.extra_fields["global_steps"]) == ([], "aborted", 7)
        await server.resume_generation()
        assert (await server.generate([1, 5], dict(PARAMS), "y")).stop_reason == "completed"

    serve(folder, check)


def test_weights_come_between_sleep_and_wake_and_name_their_step(folder: Path) -> None:
    model, _ = tiny_model.load(folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.01)

    async def check(server: SamebitServer) -> None:
        greedy = {**PARAMS, "temperature": 0, "max_tokens": 12}
        before = await server.generate([1, 5], dict(greedy), "a")
        await server.sleep()
        with pytest.raises(WorkerStateError, match="asleep"):
            await server.generate([1, 5], dict(greedy), "b")
        await server.wake_up(["weights"])
        with SharedMemorySender(timeout=HANG) as sender:
            sent = asyncio.create_task(asyncio.to_thread(sender.send, model))
            report = await server.receive_weights(SharedMemoryAt(sender.address))
            await sent
        await server.set_global_steps(report.version, 3)
        await server.wake_up(["kv_cache"])
        after = await server.generate([1, 5], dict(greedy), "c")
        assert after.log_probs != before.log_probs
        assert (before.extra_fields["global_steps"], after.extra_fields["global_steps"]) == (0, 3)
        stats = await server.stats()
        assert stats["syncs"] == 1
        assert stats["sync_bytes"] >= sum(p.numel() * 4 for p in model.parameters())
        await server.release_kv_cache()
        await server.resume_kv_cache()
        again = await server.generate([1, 5], dict(greedy), "d")
        assert (again.token_ids, again.log_probs) == (after.token_ids, after.log_probs)

    serve(folder, check)


def test_an_adapter_comes_alone_and_names_its_step(folder: Path) -> None:
    """An adapter comes alone and names its step; the model under it survives the sleep: no update brings it again."""
    fields = {"r": 3, "lora_alpha": 6, "target_modules": ["q_proj"]}
    model = get_peft_model(tiny_model.load(folder)[0], LoraConfig(**fields))
    matrices = {name: tensor for name, tensor in model.state_dict().items() if ".lora_" in name}

    async def check(server: SamebitServer) -> None:
        greedy = {**PARAMS, "temperature": 0, "max_tokens": 12}
        with pytest.raises(RequestError, match="adapter='policy' is not known"):
            await server.generate([1, 5], dict(greedy), "early")
        seen = []
        with SharedMemorySender(timeout=HANG) as sender:
            for step in (3, 4):
                await server.sleep()
                await server.wake_up(["weights"])
                sent = asyncio.create_task(asyncio.to_thread(sender.send, matrices))
                report = await server.load_adapter(ADAPTER, SharedMemoryAt(sender.address), autocast=False)
                await sent
                await server.set_global_steps(report.version, step)
                await server.wake_up(["kv_cache"])
                seen.append(await server.generate([1, 5], dict(greedy), f"step {step}"))
                for tensor in matrices.values():
                    tensor += 0.1
        assert [one.extra_fields["global_steps"] for one in seen] == [3, 4]
        assert seen[0].log_probs != seen[1].log_probs
        assert (await server.stats())["syncs"] == 2
        assert await server.steps_of_weights() == {4}

    serve(folder, check, adapter=AdapterOption(fields, None))


def test_a_response_across_an_update_names_both_steps(folder: Path) -> None:
    model, _ = tiny_model.load(folder)

    async def check(server: SamebitServer) -> None:
        await server.set_global_steps(version=0, global_steps=4)
        with held_steps(server._worker) as steps:
            long = asyncio.create_task(server.generate([1, 5], {**PARAMS, "max_tokens": 240}, "a"))
            steps.release(3)
            while (await server.stats())["output_tokens"] < 3:
                await asyncio.sleep(0.01)
            server._worker.pause()
        with SharedMemorySender(timeout=HANG) as sender:
            sent = asyncio.create_task(asyncio.to_thread(sender.send, model))
            report = await server.receive_weights(SharedMemoryAt(sender.address))
            await sent
        await server.set_global_steps(report.version, 5)
        server._worker.resume()
        spans = (await long).extra_fields
        assert (spans["min_global_steps"], spans["max_global_steps"], spans["global_steps"]) == (4, 5, 5)

    serve(folder, check)


def test_the_steps_of_the_oldest_versions_are_forgotten_and_no_old_response_seems_new(folder: Path) -> None:
    """The steps of the oldest versions are forgotten, and no old response seems new. Else the table would grow, and be
    gone through, for as long as a run lasts.
    """

    async def check(server: SamebitServer) -> None:
        for version in range(MOST_VERSIONS + 5):
            await server.set_global_steps(version, global_steps=10 + version)
        old = await server.generate([1, 5], dict(PARAMS), "of version 0")
        await server.abort_all_requests(reject_request=True)
        new = await server.generate([1, 5], dict(PARAMS), "turned away")
        steps = [out.extra_fields["global_steps"] for out in (old, new)]
        assert steps == [10 + 5, 10 + MOST_VERSIONS + 4]
        assert old.extra_fields["min_global_steps"] == 10 + 5

    serve(folder, check)


def test_a_resumed_run_draws_other_random_numbers_than_the_run_before(folder: Path) -> None:
    """A resumed run draws other random numbers than the run before: the trainer notes the step that it goes on from
    before it asks for anything; it is 0 in a run from the start.
    """
    drawn: dict[int | None, list[list[int]]] = {}
    seeded: list[list[int]] = []

    async def draw(server: SamebitServer, step: int | None) -> None:
        if step is not None:
            await server.set_global_steps(version=0, global_steps=step)
        drawn[step] = [(await server.generate([1, 5, 6], dict(PARAMS), "a")).token_ids for _ in range(3)]
        seeded.append((await server.generate([1, 5, 6], {**PARAMS, "seed": 3}, "a")).token_ids)
        if step:
            await server.set_global_steps(version=1, global_steps=step + 1)
            drawn[step].append((await server.generate([1, 5, 6], dict(PARAMS), "a")).token_ids)

    for step in (None, 0, 7, 8):
        serve(folder, partial(draw, step=step))
    assert drawn[0] == drawn[None]
    resumed = [*drawn[0], *drawn[7], *drawn[8]]
    assert len(set(map(tuple, resumed))) == len(resumed) == 11
    assert seeded == [seeded[0]] * 4
    again = drawn[7]
    serve(folder, partial(draw, step=7))
    assert drawn[7] == again, "the random numbers follow from the seed and the step"


def test_weights_that_the_next_update_brings_are_not_kept_asleep(folder: Path) -> None:
    """Weights that the next update brings are not kept asleep, where trainer and server share their resources.
    Elsewhere they are, and come back.
    """

    async def forgets(server: SamebitServer) -> None:
        await server.sleep()
        await server.wake_up()
        with pytest.raises(WorkerStateError, match="weights incomplete"):
            await server.generate([1, 5], dict(PARAMS), "a")

    async def keeps(server: SamebitServer) -> None:
        greedy = {**PARAMS, "temperature": 0}
        before = await server.generate([1, 5], dict(greedy), "a")
        await server.sleep()
        await server.wake_up()
        after = await server.generate([1, 5], dict(greedy), "b")
        assert (after.token_ids, after.log_probs) == (before.token_ids, before.log_probs)

    serve(folder, forgets)
    serve(folder, keeps, mode=RolloutMode.COLOCATED)


def test_memory_that_shall_not_be_freed_is_not(folder: Path) -> None:
    async def check(server: SamebitServer) -> None:
        await server.sleep()
        await server.release_kv_cache()
        assert (await server.generate([1, 5], dict(PARAMS), "a")).stop_reason == "completed"

    serve(folder, check, frees_memory=False)


def test_it_knows_whose_weights_it_has(folder: Path) -> None:
    """The server knows whose weights it has: a step that changed no bit has the weights of the step before as well."""
    model, _ = tiny_model.load(folder)

    async def sync(server: SamebitServer, step: int) -> None:
        with SharedMemorySender(timeout=HANG) as sender:
            sent = asyncio.create_task(asyncio.to_thread(sender.send, model))
            report = await server.receive_weights(SharedMemoryAt(sender.address))
            await sent
        await server.set_global_steps(report.version, step)

    async def check(server: SamebitServer) -> None:
        await sync(server, 0)
        await sync(server, 1)
        assert await server.steps_of_weights() == {0, 1}
        with torch.no_grad():
            next(model.parameters())[0, 0] += 1
        await sync(server, 2)
        assert await server.steps_of_weights() == {2}

    serve(folder, check)


def test_an_update_that_is_cut_off_is_an_error_and_the_next_one_heals(folder: Path) -> None:
    model, _ = tiny_model.load(folder)

    def cut_off() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(WeightStream.of(model).tensors())[:3]
        raise RuntimeError("the trainer ran out of memory")

    async def check(server: SamebitServer) -> None:
        stream = WeightStream(WeightStream.of(model).specs, cut_off())
        with SharedMemorySender(timeout=HANG) as sender:
            received = asyncio.create_task(server.receive_weights(SharedMemoryAt(sender.address)))
            with pytest.raises(RuntimeError, match="out of memory"):
                await asyncio.to_thread(sender.send, stream)
        with pytest.raises(SyncBrokenError):
            await received
        with SharedMemorySender(timeout=HANG) as sender:
            sent = asyncio.create_task(asyncio.to_thread(sender.send, model))
            await server.receive_weights(SharedMemoryAt(sender.address))
            await sent
        assert (await server.generate([1, 5], dict(PARAMS), "a")).stop_reason == "completed"

    serve(folder, check)


def test_servers_with_resources_of_their_own_never_sleep(folder: Path) -> None:
    async def check(server: SamebitServer) -> None:
        await server.sleep()
        assert (await server.generate([1, 5], dict(PARAMS), "a")).stop_reason == "completed"

    serve(folder, check, mode=RolloutMode.STANDALONE)


def test_weights_come_with_what_a_ray_worker_says() -> None:
    """Weights come with what a `RayWorker` says, as it calls either actor."""
    for call in ("receive_weights", "load_adapter"):
        ours, theirs = (_parameters(vars(actor)[call]) for actor in (SamebitServer, AsyncWorker))
        assert "options" in ours
        assert ours == theirs


def _parameters(method: Any) -> dict[str, inspect.Parameter]:
    """Return a method's parameters without the one that Ray adds to the methods of a class that it has made an actor
    of.
    """
    return {name: one for name, one in inspect.signature(method).parameters.items() if not name.startswith("_ray")}


def test_what_breaks_the_worker_ends_the_watch(folder: Path) -> None:
    async def check(server: SamebitServer) -> None:
        watch = asyncio.create_task(server.watch())
        await asyncio.sleep(0.6)
        assert not watch.done()
        await server.check_usable()
        server._worker._engine.step = lambda: 1 / 0  # type: ignore[method-assign]
        with pytest.raises(WorkerStateError, match="ZeroDivisionError"):
            await server.generate([1, 5], dict(PARAMS), "a")
        with pytest.raises(WorkerStateError, match="ZeroDivisionError"):
            await server.check_usable()
        with pytest.raises(WorkerStateError, match="ZeroDivisionError"):
            await watch

    serve(folder, check)


def test_a_trace_is_written_when_verl_profiles(folder: Path, tmp_path: Path) -> None:
    async def check(server: SamebitServer) -> None:
        await server.start_profile(role="rollout")
        await server.generate([1, 5], dict(PARAMS), "a")
        await server.stop_profile()
        (path,) = tmp_path.glob("server-*.json")
        names = {event.get("name", "") for event in json.loads(path.read_text())["traceEvents"]}
        assert "aten::empty_like" in names  # memory of a step: its kernels are not torch's, from token ids to logits

    serve(folder, check, traces=tmp_path)


@pytest.mark.parametrize(
    ("prompt", "params", "extra", "says"),
    [
        ([1], {"temprature": 1.0}, {}, "unknown sampling parameters: temprature"),
        ([1], {"temperature": -1.0}, {}, "temperature"),
        ([1], {}, {"image_data": ["pixels"]}, "text only"),
        ([1], {}, {"priority": 3}, "priority must be 0"),
        ([1] * 256, {}, {}, "no room"),
        ([], {}, {}, "empty"),
    ],
)
def test_a_wrong_request_is_refused(
    folder: Path, prompt: list[int], params: dict[str, Any], extra: dict[str, Any], says: str
) -> None:
    async def check(server: SamebitServer) -> None:
        with pytest.raises((RequestError, ValueError), match=says):
            await server.generate(prompt, params, "a", **extra)
        assert (await server.generate([1], {}, "b")).stop_reason == "completed"

    serve(folder, check)


def test_a_folder_without_tokenizer_is_named(folder: Path, tmp_path: Path) -> None:
    model, _ = tiny_model.load(folder)
    model.save_pretrained(tmp_path)

    async def check(server: SamebitServer) -> None:
        raise AssertionError("it was loaded")

    with pytest.raises(ValueError, match="no tokenizer"):
        serve(tmp_path, check)

    async def fine(server: SamebitServer) -> None:
        assert (await server.generate([1, 5], dict(PARAMS), "a")).stop_reason == "completed"

    serve(tmp_path, fine, tokenizer=str(folder))
