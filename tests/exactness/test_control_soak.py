"""Give thousands of control commands from four threads to a loaded worker: every token can be accounted for.

Checked bit for bit, for every request that was submitted:

* A token whose context and itself are of one version: with the trainer's `token_logprobs` on these weights, at the
  sampling temperature and at 1; and a fresh request that goes on from there samples the same tokens (requests of one
  sample).
* A token over a mixture of weights ("keep"): with `Replay`, at temperature 1.
* `weight_versions`, `context_versions`, `kv_versions`: with what the journal of the worker's steps says.

A case is `COMMANDS` commands that take the lock (so neither `stats` nor `abort`) and were carried out;
SAMEBIT_SOAK_CASES sets the number of cases. Weights come from this process and over links, whole and in part, as a
delta, read back or not.
"""

from __future__ import annotations

import faulthandler
import itertools
import os
import random
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from samebit.kernels import bind
from samebit.rollout import RequestOutput, RolloutConfig, RolloutWorker, SampleOutput, SamplingParams, WorkerStateError
from samebit.weight_sync import WeightStream

from ..rollout.worker.lock_log import LockLog
from .families import make_model, token_ids
from .layouts import LAYOUTS
from .replay import Journal, Replay, Span
from .soak_links import links

COMMANDS = 20
CASES = int(os.environ.get("SAMEBIT_SOAK_CASES", "8"))
THREADS = 4
LOAD = 12
"""Counts the requests in flight."""
WITHOUT_LOCK = ("stats", "abort")
WEIGHTS = 4
"""Sets of them. The last two differ in the first parameter alone."""
MAX_LEN = 192
PATIENCE = 300 + 0.5 * COMMANDS * CASES
"""Is the number of seconds after which whoever still runs is stuck."""
GUESSES = {"num_speculative_tokens": 3, "speculative_step_tokens": 36, "draft_cache_gb": 2**-10}
STEMS = token_ids(150, 150, 150, seed=3)
REFUSALS = (
    "the weights are asleep",
    "needs a worker that generates",
    "can not keep the weights: they were discarded",
    "the worker is asleep",
    "they were discarded by sleep",
)


class Soak:
    """Holds the worker, its weights by number, and what is known of both."""

    def __init__(
        self, family: str, dtype: torch.dtype, while_asleep: str, folder: Path, drafting: bool = False
    ) -> None:
        self.models = [bind(_weights(family, dtype, number)) for number in range(WEIGHTS)]
        self.models[0].save_pretrained(folder)
        chunk = 64 if family == "NemotronH" else 4
        config = RolloutConfig(
            block_size=chunk,
            num_blocks=3 * MAX_LEN // chunk,
            max_model_len=MAX_LEN,
            max_num_seqs=6,
            max_num_batched_tokens=40,
            while_asleep=while_asleep,
            async_scheduling=while_asleep == "wait",
            **(GUESSES | {"draft_model": folder} if drafting else {}),
        )
        self.block_size = chunk
        self.worker = RolloutWorker(folder, config=config)
        self.journal = Journal(self.worker)
        self.lock_log = LockLog(self.worker)
        self.weights_of_version = {0: 0}
        self.done = Counter[str]()
        self.refused = Counter[str]()
        self.ways = Counter[str]()
        self.handles: list[Any] = []
        self.params: list[SamplingParams] = []
        self.links = links(timeout=PATIENCE)
        self._counting = threading.Lock()
        self._updates = threading.Semaphore(THREADS)
        self._alone = threading.Lock()

    def took_the_lock(self) -> int:
        """Count the commands that were carried out with the lock."""
        with self._counting:
            return sum(count for name, count in self.done.items() if name not in WITHOUT_LOCK)

    def count(self, what: str) -> None:
        with self._counting:
            self.ways[what] += 1

    def act(self, name: str, call: Callable[[], Any]) -> Any:
        """Give one command; one that is refused says why, and counts apart."""
        try:
            result = call()
        except WorkerStateError as error:
            if not any(text in str(error) for text in REFUSALS):
                raise
            with self._counting:
                self.refused[name] += 1
            return None
        with self._counting:
            self.done[name] += 1
        return result

    def update(self, rng: random.Random) -> Any:
        """Send all weights, beside the updates of the other threads."""
        number = rng.randrange(WEIGHTS)
        link = rng.choice(self.links)
        with self._updates:
            if rng.random() < 0.4 and link.free.acquire(blocking=False):
                try:
                    report, _ = link.update(self.models[number], lambda end: self._receive(rng, end))
                finally:
                    link.free.release()
                self.count(link.name if report is not None else f"{link.name}, refused")
            else:
                report = self._update_from_here(rng, self.models[number])
            return self._note(report, number)

    def update_alone(self, rng: random.Random) -> None:
        """Update what builds on the weights that are there: no other update comes in between, but any other command."""
        with ExitStack() as stack:
            stack.enter_context(self._alone)
            for _ in range(THREADS):
                stack.enter_context(self._updates)
            if rng.random() < 0.5:
                self._update_part(rng)
            else:
                self._update_by_delta(rng)

    def _update_part(self, rng: random.Random) -> None:
        """Update from one of the last two sets to the other."""
        now = self.weights_of_version[self.worker.weight_version]
        if now < WEIGHTS - 2:
            now = WEIGHTS - 2
            if self._note(self._update_from_here(rng, self.models[now]), now) is None:
                return
        number = 2 * WEIGHTS - 3 - now
        part = dict([next(self.models[number].named_parameters())])
        if self._note(self._receive(rng, part, partial=True), number) is not None:
            self.count("partial")

    def _update_by_delta(self, rng: random.Random) -> None:
        """Send two updates over one link: what the second can build on is what the first has brought."""
        link = rng.choice(self.links)
        with link.free:
            for number in rng.sample(range(WEIGHTS), 2):
                report, sent = link.update(self.models[number], lambda end: self._receive(rng, end), delta=True)
                if self._note(report, number) is not None:
                    self.count(f"{link.name}, {'delta' if sent.delta else 'base of a delta'}")

    def _update_from_here(self, rng: random.Random, model: Any) -> Any:
        whole = model.state_dict()
        if rng.random() < 0.2:
            return self.act("load_state_dict", lambda: self.worker.load_state_dict(whole))
        return self._receive(rng, rng.choice((whole, model, WeightStream.of(model))))

    def _receive(self, rng: random.Random, source: Any, *, partial: bool = False) -> Any:
        (mode,) = rng.choices(("keep", "recompute", "wait", "abort"), (12, 9, 8, 1))
        verify = rng.random() < 0.3
        options = {"in_flight": mode, "partial": partial, "verify": verify}
        return self.act(f"update {mode}", lambda: self.worker.receive_weights(source, **options))

    def _note(self, report: Any, number: int) -> Any:
        if report is not None:
            assert report.version not in self.weights_of_version, "two updates with one version"
            self.weights_of_version[report.version] = number
        return report

    def sleep(self, rng: random.Random, between: Callable[[], None]) -> None:
        tags = rng.choice((["weights"], ["kv_cache"], ["weights", "kv_cache"], ["kv_cache", "weights"]))
        level = 2 if "weights" in tags and rng.random() < 0.4 else 1
        with self._updates if level == 2 else nullcontext():  # what is discarded is no base of a delta
            self.act(f"sleep {level}", lambda: self.worker.sleep(tags, level=level))
        between()
        for tag in rng.sample(tags, len(tags)):
            self.act("wake_up", lambda tag=tag: self.worker.wake_up(tag))
            between()
        while level == 2 and self.update(rng) is None:
            self.act("wake_up", lambda: self.worker.wake_up("weights"))

    def command(self, rng: random.Random, between: Callable[[], None]) -> None:
        kind = rng.random()
        if kind < 0.45:
            self.update(rng)
        elif kind < 0.50:
            self.update_alone(rng)
        elif kind < 0.60:
            self.sleep(rng, between)
        elif kind < 0.70:
            self.act("pause", self.worker.pause)
            between()
            self.act("resume", self.worker.resume)
        elif kind < 0.82:
            self.act("reset", self.worker.reset_prefix_cache)
        elif kind < 0.86:
            known = [handle.request_id for handle in self.handles[-LOAD:]]
            self.act("abort", lambda: self.worker.abort([rng.choice([*known, "nobody"])]))
        else:
            stats = self.act("stats", self.worker.stats)
            assert 0 <= stats["blocks_free"] <= stats["blocks_total"]

    def commander(self, seed: int) -> None:
        rng = random.Random(seed)

        def between() -> None:
            if rng.random() < 0.3:
                self.act("reset", self.worker.reset_prefix_cache)

        while self.took_the_lock() < COMMANDS * CASES:
            self.command(rng, between)
            if rng.random() < 0.2:
                self.let_it_work(rng.randrange(1, 40))

    def let_it_work(self, steps: int) -> None:
        """Wait for so many steps, or a moment: it may be asleep."""
        counters = self.worker._engine.counters
        until, deadline = counters.steps + steps, time.monotonic() + 0.2
        while counters.steps < until and time.monotonic() < deadline:
            time.sleep(0.001)

    def feeder(self, stop: threading.Event) -> None:
        """Feed prompts that extend common stems, and answers of earlier requests."""
        rng = random.Random(99)
        slots = [None] * LOAD
        while not stop.is_set():
            for index, handle in enumerate(slots):
                if handle is None or handle.done:
                    slots[index] = self._submit(rng)
            stop.wait(0.001)

    def _submit(self, rng: random.Random) -> Any:
        prompt = [*rng.choice(STEMS)[: rng.choice((1, 2, 3, 15, 40, 63, 64, 65, 100, 130))], rng.randrange(3, 900)]
        ended = [handle for handle in self.handles[-2 * LOAD :] if handle.done]
        if ended and rng.random() < 0.4:
            out = rng.choice(ended).result(0)
            prompt = [*out.prompt_token_ids, *out.samples[0].token_ids, 7][:140]
        params = SamplingParams(
            n=rng.choice((1, 1, 1, 2)),
            temperature=rng.choice((1.0, 1.0, 0.7, 0.0)),
            seed=rng.randrange(1 << 40),
            max_tokens=rng.choice((1, 4, 16, 40)),
            ignore_eos=rng.random() < 0.5,
            prompt_logprobs=rng.choice((None, None, None, 0)),
        )
        try:
            handle = self.worker.submit(prompt, params)
        except WorkerStateError as error:
            if not any(text in str(error) for text in REFUSALS):
                raise
            return None
        self.handles.append(handle)
        self.params.append(params)
        return handle


def _weights(family: str, dtype: torch.dtype, number: int) -> Any:
    model = make_model(family, dtype, hidden_size=100, intermediate_size=129, vocab_size=1009)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 - 0.1 * min(number, WEIGHTS - 2))
        if number == WEIGHTS - 1:
            next(model.parameters()).mul_(0.9)
    return model


@contextmanager
def ends(threads: list[threading.Thread]) -> Iterator[None]:
    """Start the threads; check that they end without an error, in time."""
    errors: list[Any] = []
    hook, threading.excepthook = threading.excepthook, errors.append
    for thread in threads:
        thread.start()
    try:
        yield
        for thread in threads:
            thread.join(PATIENCE)
        if any(thread.is_alive() for thread in threads):
            faulthandler.dump_traceback(sys.__stderr__)
            raise AssertionError("a deadlock: see the stacks of all threads")
    finally:
        threading.excepthook = hook
    assert not errors, errors


@pytest.mark.soak
@pytest.mark.parametrize(
    ("family", "dtype", "while_asleep", "drafting"),
    [
        ("Qwen3", torch.float32, "raise", False),
        ("NemotronH", torch.bfloat16, "wait", False),
        ("Qwen3", torch.float32, "raise", True),
    ],
)
def test_commands_under_load(
    family: str, dtype: torch.dtype, while_asleep: str, drafting: bool, tmp_path: Path
) -> None:
    """What is loaded is also the draft model, where there is one: it goes on with these weights, whatever comes."""
    soak = Soak(family, dtype, while_asleep, tmp_path, drafting)
    with soak.worker as worker:
        run(soak)
        worker.wake_up()
        worker.resume()
        while soak.update(random.Random(0)) is None:
            worker.wake_up()
        outputs = [handle.result(PATIENCE) for handle in soak.handles]
        for link in soak.links:
            link.close()
        stats = worker.stats()
    assert soak.took_the_lock() >= COMMANDS * CASES, "commands that were carried out"
    assert {"shared memory", "gloo"} <= soak.ways.keys()
    assert_none_lost(soak, outputs, stats)
    if drafting:
        assert 0 < stats["draft_tokens_accepted"] < stats["draft_tokens"]
        assert stats["draft_blocks_free"] == stats["draft_blocks_total"]
    soak.journal.settle()
    soak.lock_log.assert_fair()
    tokens = check_against_oracles(soak, outputs)
    commands = f"{dict(soak.done)}, refused {dict(soak.refused)}, {dict(soak.ways)}"
    print(f"\n{family}: {commands}; {len(outputs)} requests, {tokens}; {stats}")  # noqa: T201


def run(soak: Soak) -> None:
    stop = threading.Event()
    feeder = threading.Thread(target=soak.feeder, args=(stop,), name="feeder", daemon=True)
    with ends([feeder]):
        with ends([threading.Thread(target=soak.commander, args=(n,), daemon=True) for n in range(THREADS)]):
            pass
        stop.set()


def assert_none_lost(soak: Soak, outputs: list[RequestOutput], stats: dict[str, float]) -> None:
    """Check that each request ended once, each token was counted once, each update has one version."""
    assert len({out.request_id for out in outputs}) == len(outputs) == len(soak.handles)
    assert stats["requests_finished"] + stats["requests_aborted"] == len(outputs)
    assert stats["requests_failed"] == stats["running"] == stats["waiting"] == 0
    assert stats["output_tokens"] == sum(len(sample.token_ids) for out in outputs for sample in out.samples)
    assert stats["blocks_free"] == stats["blocks_total"]
    assert sorted(soak.weights_of_version) == list(range(int(stats["weight_version"]) + 1))
    for out, params in zip(outputs, soak.params, strict=True):
        for sample in out.samples:
            assert sample.finish_reason in ("abort", "length", "stop")
            assert sample.finish_reason != "length" or len(sample.token_ids) == params.max_tokens


def check_against_oracles(soak: Soak, outputs: list[RequestOutput]) -> dict[str, int]:
    """Return the count of tokens that each oracle has checked."""
    replay = Replay(
        {version: soak.models[number] for version, number in soak.weights_of_version.items()}, MAX_LEN, soak.block_size
    )
    counts = Counter[str]()
    uniform: dict[tuple[int, float], list[tuple[RequestOutput, SampleOutput, list[int]]]] = defaultdict(list)
    for out, params in zip(outputs, soak.params, strict=True):
        for sample in out.samples:
            origins = soak.journal.origins.get((out.request_id, sample.index), [])
            origins = origins[: len(sample.token_ids)]  # one more was drawn in a step that ran ahead of the end
            _check_versions(soak, out, sample, origins)
            mixed: dict[Any, list[int]] = defaultdict(list)
            alike: dict[int, list[int]] = defaultdict(list)
            for index, origin in enumerate(origins):
                if origin.oldest == origin.version:
                    alike[soak.weights_of_version[origin.version]].append(index)
                else:
                    mixed[origin.shared, origin.context].append(index)
            for number, tokens in alike.items():
                uniform[number, params.temperature or 1.0].append((out, sample, tokens))
            counts["mixtures"] += _check_mixtures(replay, out, sample, mixed)
    for (number, temperature), group in uniform.items():
        counts["trainer"] += _check_with_trainer(soak.models[number], temperature, group)
    counts["fresh requests"] = _check_with_fresh_requests(soak, outputs)
    assert counts["mixtures"] + counts["trainer"] == sum(len(s.token_ids) for out in outputs for s in out.samples)
    counts["recomputed samples"] = len(soak.journal.recomputed)
    return dict(counts)


def _versions(spans: list[tuple[int, int, int]]) -> list[int]:
    return [version for start, end, version in spans for _ in range(start, end)]


def _check_versions(soak: Soak, out: RequestOutput, sample: SampleOutput, origins: list[Any]) -> None:
    """Check that what the sample says of itself is what was done."""
    assert _versions(sample.weight_versions) == [origin.version for origin in origins]
    assert _versions(sample.context_versions) == [origin.oldest for origin in origins]
    computed = soak.journal.kv.get((out.request_id, sample.index), ())
    if not computed and sample.kv_versions:  # another sample has computed the prompt for it, and it never ran
        prompt = _versions(sample.kv_versions)
        assert len(prompt) == len(out.prompt_token_ids)
        assert [min(prompt)] * len(sample.token_ids) == _versions(sample.context_versions)
        return
    if sample.finish_reason == "stop":  # which a step that ran ahead of it did not know
        computed = _up_to(computed, len(out.prompt_token_ids) + len(sample.token_ids) - 1)
    assert sample.kv_versions in ([], list(computed)), "of the last time that it was computed"
    if sample.finish_reason != "abort" and computed:
        assert sample.kv_versions == list(computed)


def _up_to(spans: tuple[Span, ...], stop: int) -> tuple[Span, ...]:
    return tuple((start, min(end, stop), version) for start, end, version in spans if start < stop)


def _check_mixtures(replay: Replay, out: RequestOutput, sample: SampleOutput, mixed: dict[Any, list[int]]) -> int:
    """Check all tokens of a life by one replay: the longest context begins with all the others."""
    start = len(out.prompt_token_ids)
    ids = out.prompt_token_ids + sample.token_ids
    left = dict(mixed)
    while left:
        shared, longest = max(left, key=lambda life: life[1][-1][1])
        scores = replay.scores(ids[: longest[-1][1] + 1], longest, shared)
        for life in [life for life in left if life[0] == shared and _begins(longest, life[1])]:
            for index in left.pop(life):
                found = torch.tensor(sample.raw_logprobs[index])
                assert torch.equal(found, scores[start + index - 1]), (out.request_id, index, life)
    return sum(map(len, mixed.values()))


def _begins(longer: tuple[Any, ...], shorter: tuple[Any, ...]) -> bool:
    """Tell whether `longer` goes on from `shorter`."""
    *whole, (start, end, version) = shorter
    count = len(shorter)
    return longer[: count - 1] == tuple(whole) and longer[count - 1][::2] == (start, version) and end <= longer[-1][1]


def _check_with_trainer(model: Any, temperature: float, group: list[Any]) -> int:
    checked = 0
    for batch in [group[i : i + 50] for i in range(0, len(group), 50)]:
        ids = [out.prompt_token_ids + sample.token_ids for out, sample, _ in batch]
        with torch.no_grad():
            hot = LAYOUTS["packed"](model, ids, temperature)
            raw = hot if temperature == 1.0 else LAYOUTS["packed"](model, ids, 1.0)
        for (out, sample, tokens), row, raw_row in zip(batch, hot, raw, strict=True):
            places = torch.tensor(tokens) + len(out.prompt_token_ids) - 1
            picked = torch.tensor(tokens)
            where = (out.request_id, sample.index, tokens)
            assert torch.equal(torch.tensor(sample.logprobs)[picked], row[places]), where
            assert torch.equal(torch.tensor(sample.raw_logprobs)[picked], raw_row[places]), where
            checked += len(tokens)
    return checked


def _check_with_fresh_requests(soak: Soak, outputs: list[RequestOutput]) -> int:
    """Check each run of tokens over one version: a request for its context, with the same seed, goes on
    with the same.
    """
    wanted: dict[int, list[tuple[list[int], SamplingParams, SampleOutput, int]]] = defaultdict(list)
    for out, params in zip(outputs, soak.params, strict=True):
        if params.n > 1:
            continue
        (sample,) = out.samples
        versions = list(zip(_versions(sample.weight_versions), _versions(sample.context_versions), strict=True))
        start = 0
        for (version, context), run_of in itertools.groupby(versions):
            length = len(list(run_of))
            if version == context:
                fresh = replace(params, max_tokens=length, prompt_logprobs=None)
                prompt = out.prompt_token_ids + sample.token_ids[:start]
                wanted[soak.weights_of_version[version]].append((prompt, fresh, sample, start))
            start += length
    checked = 0
    for number, asked in wanted.items():
        config = RolloutConfig(max_model_len=MAX_LEN, enable_prefix_caching=False)
        with RolloutWorker(soak.models[number], config=config) as worker:
            fresh = worker.generate([prompt for prompt, *_ in asked], [params for _, params, *_ in asked])
        for out, (_, params, sample, start) in zip(fresh, asked, strict=True):
            (again,) = out.samples
            end = start + params.max_tokens
            assert again.token_ids == sample.token_ids[start:end]
            assert torch.equal(torch.tensor(again.logprobs), torch.tensor(sample.logprobs[start:end]))
            checked += len(again.token_ids)
    return checked
