"""Whatever the user supplies and the generation thread calls may raise: the other requests go on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from samebit.rollout import stats
from samebit.rollout.errors import TokenizerError, WorkerStateError
from samebit.rollout.sampling_params import SamplingParams

from ...patience import HANG

MakeWorker = Callable[..., tuple[Any, Any]]
Oracle = Callable[..., list[int]]
STOP = SamplingParams(max_tokens=5, stop="\u2028\N{SNOWMAN}")


class Panic(BaseException):
    """Stands for what extensions in Rust raise: no `Exception`."""


class FaultyTokenizer:
    """Decodes well until it sees a token of `bad`; then it does `fault`."""

    def __init__(self, bad: set[int], fault: Callable[[], Any]) -> None:
        self.bad = bad
        self.fault = fault

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> Any:
        assert skip_special_tokens
        return self.fault() if self.bad & set(token_ids) else "".join(map(chr, token_ids))


def raising(error: BaseException) -> Callable[[], Any]:
    def fault() -> Any:
        raise error

    return fault


FAULTS: dict[str, tuple[Callable[[], Any], str]] = {
    "an error": (raising(KeyError(7)), "raised KeyError"),
    "a panic": (raising(Panic("borrowed")), "raised Panic"),
    "an exit": (raising(SystemExit(3)), "raised SystemExit"),
    "None": (lambda: None, "to a NoneType; allowed: a str"),
    "bytes": (lambda: b"ab", "to a bytes; allowed: a str"),
    "a list": (lambda: ["a"], "to a list; allowed: a str"),
}


@pytest.mark.parametrize("run_ahead", [False, True])
@pytest.mark.parametrize("which", FAULTS)
def test_a_tokenizer_that_fails_fails_its_own_request(
    make_worker: MakeWorker, oracle: Oracle, which: str, run_ahead: bool
) -> None:
    fault, says = FAULTS[which]
    theirs = oracle([1], 0, 5)
    mine = next(start for start in range(2, 90) if oracle([start], 0, 5)[2] not in (*theirs, *oracle([start], 0, 2)))
    worker, _ = make_worker(tokenizer=FaultyTokenizer({oracle([mine], 0, 5)[2]}, fault), run_ahead=run_ahead)
    good, bad, plain = worker.submit_all([[1], [mine], [1]], [STOP, STOP, SamplingParams(max_tokens=5)])
    with pytest.raises(TokenizerError, match=says) as caught:
        bad.result(HANG)
    assert repr(bad.request_id) in str(caught.value)
    assert (caught.value.__cause__ is None) == ("to a" in says)
    assert good.result(HANG).samples[0].token_ids == plain.result(HANG).samples[0].token_ids == theirs
    assert worker.generate([[1]], STOP)[0].samples[0].text == "".join(map(chr, theirs)), "the worker goes on"
    counters = worker.stats()
    assert (counters["requests_failed"], counters["running"], counters["waiting"]) == (1, 0, 0)
    assert counters["blocks_free"] == counters["blocks_total"]


def test_a_tokenizer_that_fails_at_the_end_of_a_sample(make_worker: MakeWorker) -> None:
    """A tokenizer may fail at the end of a sample: at the last token the text that was held back is decoded once more,
    outside of any search.
    """
    calls = iter(["\ufffd"] * 4)

    class Late:
        def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
            return next(calls)

    worker, _ = make_worker(tokenizer=Late())
    with pytest.raises(TokenizerError, match="raised StopIteration"):
        worker.generate([[1]], SamplingParams(max_tokens=1, n=3, stop="x"))
    assert worker.stats()["blocks_free"] == worker.stats()["blocks_total"]
    assert len(worker.submit([1], SamplingParams(max_tokens=3)).request_id) > 0
    worker.check_usable()


def test_a_group_of_samples_fails_as_one(make_worker: MakeWorker, oracle: Oracle) -> None:
    worker, _ = make_worker(tokenizer=FaultyTokenizer({oracle([1], 2, 1)[0]}, raising(ValueError("no"))))
    with pytest.raises(TokenizerError, match="sample 2"):
        worker.generate([[1]], SamplingParams(max_tokens=4, n=4, stop="x"))
    assert worker.stats()["blocks_free"] == worker.stats()["blocks_total"]


def test_a_text_that_can_not_be_decoded_is_named_without_stop_strings_too(make_worker: MakeWorker) -> None:
    worker, _ = make_worker(tokenizer=FaultyTokenizer(set(range(200)), raising(ZeroDivisionError())))
    with pytest.raises(TokenizerError, match="raised ZeroDivisionError") as caught:
        worker.generate([[1]], SamplingParams(max_tokens=2))
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize("stop", [None, "\N{SNOWMAN}"])
def test_a_prompt_that_can_not_be_decoded_fails_no_sample(
    make_worker: MakeWorker, oracle: Oracle, stop: str | None
) -> None:
    """A prompt that can not be decoded, as by a tokenizer that does not know the token that sequences begin with, fails
    no sample.
    """
    ids = oracle([1], 0, 5)
    assert 1 not in ids
    worker, _ = make_worker(tokenizer=FaultyTokenizer({1}, raising(KeyError(1))))
    (sample,) = worker.generate([[1]], SamplingParams(max_tokens=5, stop=stop))[0].samples
    assert (sample.token_ids, sample.text) == (ids, "".join(map(chr, ids)))


class Raising(logging.Handler):
    """Raises, as a user's handler does that does not catch its own errors."""

    def emit(self, record: logging.LogRecord) -> None:
        raise OSError("the log's disk is full")


@pytest.fixture
def broken_log() -> Iterator[None]:
    handler = Raising()
    names = (
        "samebit.rollout.stats",
        "samebit.rollout.control.generation_thread",
        "samebit.rollout.control.weights.worker_weights",
    )
    for name in names:
        logging.getLogger(name).addHandler(handler)
    logging.getLogger(names[0]).setLevel(logging.INFO)
    yield
    for name in names:
        logging.getLogger(name).removeHandler(handler)
    logging.getLogger(names[0]).setLevel(logging.NOTSET)


@pytest.mark.usefixtures("broken_log")
def test_a_log_that_raises_breaks_nobody(
    make_worker: MakeWorker, oracle: Oracle, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(stats, "LOG_SECONDS", 0.0)
    worker, runner = make_worker()
    assert worker.generate([[1]], SamplingParams(max_tokens=3))[0].samples[0].token_ids == oracle([1], 0, 3)
    assert "the log's disk is full" in capsys.readouterr().err
    runner.fail_with = ArithmeticError("the step")
    handles = worker.submit_all([[1], [2]], SamplingParams(max_tokens=3))
    for handle in handles:
        with pytest.raises(WorkerStateError, match="the step"):
            handle.result(HANG)


@pytest.mark.usefixtures("broken_log")
def test_a_log_that_raises_leaves_the_weights_complete(
    make_worker: MakeWorker, oracle: Oracle, capsys: pytest.CaptureFixture[str]
) -> None:
    """A log that raises leaves the weights complete: it is told of an update that changes nothing while that is
    written.
    """
    worker, _ = make_worker()
    weights = {name: tensor.clone() for name, tensor in worker.module.state_dict().items()}
    assert worker.receive_weights(weights).changed == ()
    assert "the log's disk is full" in capsys.readouterr().err
    assert worker.generate([[1]], SamplingParams(max_tokens=3))[0].samples[0].token_ids == oracle([1], 0, 3)


def test_a_callback_that_raises_at_the_end_of_a_request_breaks_nobody(make_worker: MakeWorker, oracle: Oracle) -> None:
    worker, _ = make_worker()
    worker.pause()
    handles = worker.submit_all([[1], [2]], SamplingParams(max_tokens=3))
    called: list[int] = []
    for handle in handles:
        handle._delivery.when_done(raising(RuntimeError("a user's callback")))
        handle._delivery.when_done(lambda: called.append(1))
    worker.resume()
    assert [handle.result(HANG).samples[0].token_ids for handle in handles] == [oracle([1], 0, 3), oracle([2], 0, 3)]
    assert worker.generate([[3]], SamplingParams(max_tokens=3))[0].samples[0].token_ids == oracle([3], 0, 3)
    assert called == [1, 1], "those behind one that raised are called"


def test_a_call_in_a_callback_of_the_generation_thread_is_refused_for_what_it_is(make_worker: MakeWorker) -> None:
    worker, _ = make_worker()
    worker.pause()
    handle = worker.submit([1], SamplingParams(max_tokens=3))
    refused: list[str] = []

    def call() -> None:
        with pytest.raises(WorkerStateError) as caught:
            worker.submit([2], SamplingParams(max_tokens=1))
        refused.append(str(caught.value))

    handle.when_done(call)
    worker.resume()
    handle.result(HANG)
    worker.generate([[3]], SamplingParams(max_tokens=3))
    assert ["in a callback of when_done or after_steps" in one for one in refused] == [True]
