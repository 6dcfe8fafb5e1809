"""One engine without threads commits what it should, ends samples as it should, and fails as it should."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from samebit.rollout.engine.engine import Engine
from samebit.rollout.errors import NonFiniteLogitsError
from samebit.rollout.outputs import request_output
from samebit.rollout.requests.request import Request
from samebit.rollout.requests.stop_strings import StopStringMatcher
from samebit.rollout.requests.stopping import as_token_ids

Make = Callable[..., Engine]
MakeRequest = Callable[..., Request]
Oracle = Callable[..., list[int]]


def run(engine: Engine) -> list[Request]:
    finished: list[Request] = []
    while engine.has_work:
        finished += engine.step()
    return finished


def test_an_output_carries_tokens_logprobs_versions_and_events(
    make_engine: Make, make_request: MakeRequest, oracle: Oracle
) -> None:
    engine = make_engine()
    engine.add(make_request("a", [1, 2, 3], max_tokens=4, n=2, temperature=0.5))
    engine.step()
    engine.step()
    engine.weights_changed(5)
    (request,) = run(engine)
    output = request_output(request, None)
    assert (output.request_id, output.prompt_token_ids, output.num_cached_tokens) == ("a", [1, 2, 3], 0)
    for index, sample in enumerate(output.samples):
        assert sample.token_ids == oracle([1, 2, 3], index, 4)
        assert sample.logprobs == (-np.array(sample.token_ids, np.float32) / 3).tolist()
        assert sample.raw_logprobs == (-np.array(sample.token_ids, np.float32) / 7).tolist()
        assert sample.weight_versions == [(0, 2, 0), (2, 4, 5)]
        assert sample.kv_versions == [(0, 4, 0), (4, 6, 5)]
        assert (sample.finish_reason, sample.stop_reason, sample.text) == ("length", None, None)
    assert output.samples[0].token_ids != output.samples[1].token_ids
    names = [event.name for event in output.events if event.sample in (0, None)]
    assert names == ["added", "scheduled", "first_token", "finished"]
    times = [event.time for event in output.events]
    assert times == sorted(times)


def test_recomputed_kv_is_recorded_under_the_new_weights(make_engine: Make, make_request: MakeRequest) -> None:
    engine = make_engine()
    engine.add(make_request("a", [1, 2, 3], max_tokens=4))
    engine.step()
    engine.step()
    engine.preempt_all()
    engine.weights_changed(1)
    (request,) = run(engine)
    sample = request_output(request, None).samples[0]
    assert sample.weight_versions == [(0, 2, 0), (2, 4, 1)]
    assert sample.kv_versions == [(0, 6, 1)]
    assert [event.name for event in request.shared.events] == [
        *("added", "scheduled", "first_token", "preempted", "scheduled", "finished")
    ]


def test_rows_with_nan_fail_their_request_and_no_other(
    make_engine: Make, make_request: MakeRequest, oracle: Oracle
) -> None:
    engine = make_engine()
    engine.runner.nan_ids = {"bad"}
    for name in ("good", "bad", "fine"):
        engine.add(make_request(name, [1, 2], max_tokens=3, n=2))
    ended = run(engine)
    assert [request.request_id for request in ended] == ["bad", "good", "fine"]
    assert isinstance(ended[0].error, NonFiniteLogitsError)
    assert "'bad'" in str(ended[0].error)
    assert "NaN" in str(ended[0].error)
    for request in ended[1:]:
        assert request.error is None
        assert request.sequences[1].output_ids.tolist() == oracle([1, 2], 1, 3)
    assert engine.cache.pool.num_free == engine.cache.pool.num_blocks
    assert (engine.counters.requests.failed, engine.counters.requests.finished) == (1, 2)


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
def test_a_long_sample_has_both_scores_of_each_token(
    make_engine: Make, make_request: MakeRequest, temperature: float
) -> None:
    """A sample of more tokens than there is room for at first has both scores of each token, which are the same where
    the report is at temperature 1.
    """
    engine = make_engine(max_model_len=256)
    engine.add(make_request("a", [1, 2, 3], max_tokens=150, temperature=temperature))
    (request,) = run(engine)
    (sample,) = request_output(request, None).samples
    tokens = np.array(sample.token_ids, np.float32)
    assert len(tokens) == 150
    assert sample.logprobs == (-tokens / 3).tolist()
    assert sample.raw_logprobs == ((-tokens / 7).tolist() if temperature == 0.5 else sample.logprobs)


@pytest.mark.parametrize("preempt", [False, True])
def test_prompt_logprobs_are_whole_after_chunks_and_preemption(
    make_engine: Make, make_request: MakeRequest, preempt: bool
) -> None:
    engine = make_engine(max_num_batched_tokens=8)
    prompt = list(range(20, 40))
    engine.add(make_request("a", prompt, max_tokens=3, prompt_logprobs=0, n=2))
    engine.step()
    if preempt:
        engine.preempt_all()
    (request,) = run(engine)
    assert request_output(request, None).prompt_logprobs == [None, *(-float(token) for token in prompt[1:])]
    assert not request.sequences[1].prompt_logprobs_wanted


def test_prompt_logprobs_are_not_asked_for_again_once_whole(make_engine: Make, make_request: MakeRequest) -> None:
    engine = make_engine()
    request = make_request("a", [5, 6, 7], max_tokens=3, prompt_logprobs=0)
    engine.add(request)
    assert request.sequences[0].prompt_logprobs_wanted
    engine.step()
    engine.preempt_all()
    assert not request.sequences[0].prompt_logprobs_wanted


def test_a_one_token_prompt_has_nothing_to_score(make_engine: Make, make_request: MakeRequest) -> None:
    engine = make_engine()
    engine.add(make_request("a", [5], max_tokens=2, prompt_logprobs=0))
    (request,) = run(engine)
    assert request_output(request, None).prompt_logprobs == [None]


def test_end_tokens_stop_tokens_and_ignore_eos(make_engine: Make, make_request: MakeRequest, oracle: Oracle) -> None:
    prompt = [3, 1]
    whole = oracle(prompt, 0, 8)
    assert len(set(whole)) == 8, "the test needs distinct tokens"
    engine = make_engine()
    engine.add(make_request("eos", prompt, max_tokens=8, eos=(99, whole[2])))
    engine.add(make_request("stop", prompt, max_tokens=8, stop_token_ids=[whole[4]]))
    engine.add(make_request("ignore", prompt, max_tokens=8, ignore_eos=True, eos=(whole[2],)))
    engine.add(make_request("both", prompt, max_tokens=8, ignore_eos=True, eos=(whole[1],), stop_token_ids=[whole[1]]))
    engine.add(make_request("min", prompt, max_tokens=8, min_tokens=5, eos=(whole[2], whole[5])))
    got = {r.request_id: request_output(r, None).samples[0] for r in run(engine)}
    assert (got["eos"].token_ids, got["eos"].finish_reason, got["eos"].stop_reason) == (whole[:3], "stop", None)
    assert (got["stop"].token_ids, got["stop"].stop_reason) == (whole[:5], whole[4])
    assert (got["ignore"].token_ids, got["ignore"].finish_reason) == (whole, "length")
    assert (got["both"].token_ids, got["both"].stop_reason) == (whole[:2], whole[1])
    assert got["min"].token_ids == whole[:6]


def test_the_ids_to_mask_before_min_tokens(make_request: MakeRequest) -> None:
    both = make_request("a", [1], eos=(7, 8), stop_token_ids=[8, 9])
    assert both.shared.end_ids == {7, 8, 9}
    assert make_request("a", [1], eos=(7, 8), stop_token_ids=[8, 9], ignore_eos=True).shared.end_ids == {8, 9}


def test_an_eos_setting_may_be_absent_one_or_many() -> None:
    assert [as_token_ids(value) for value in (None, 2, [2, 3])] == [(), (2,), (2, 3)]


class ByteTokenizer:
    """Decodes one token as one byte, so that a character may straddle tokens."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return bytes(token_ids).decode("utf-8", errors="replace")


def push_all(matcher: StopStringMatcher, text: str, search_from: int = 0) -> list[str | None]:
    return [matcher.push(byte, search=index >= search_from) for index, byte in enumerate(text.encode())]


def test_a_stop_string_over_several_tokens_cuts_the_text() -> None:
    matcher = StopStringMatcher(ByteTokenizer(), ("END", "zz"))
    assert push_all(matcher, "abEND") == [None, None, None, None, "END"]
    assert matcher.text == "ab"


def test_the_first_match_in_the_text_wins() -> None:
    matcher = StopStringMatcher(ByteTokenizer(), ("c", "abc"))
    assert push_all(matcher, "xabc")[-1] == "abc"
    assert matcher.text == "x"


def test_a_character_in_halves_is_held_back_and_not_lost() -> None:
    matcher = StopStringMatcher(ByteTokenizer(), ("é!",))
    assert push_all(matcher, "aé") == [None, None, None]
    assert matcher.text == "aé"
    assert matcher.push(ord("!"), search=True) == "é!"
    assert matcher.text == "a"
    cut = StopStringMatcher(ByteTokenizer(), ("x",))
    push_all(cut, "a")
    cut.push("é".encode()[0], search=True)
    assert cut.text == "a"
    cut.flush()
    assert cut.text == "a\ufffd"


def test_no_match_is_looked_for_before_min_tokens() -> None:
    matcher = StopStringMatcher(ByteTokenizer(), ("b",))
    assert push_all(matcher, "abcb", search_from=2) == [None, None, None, "b"]
    assert matcher.text == "abc"


def test_a_match_from_before_min_tokens_is_not_found_beside_a_longer_stop_string() -> None:
    matcher = StopStringMatcher(ByteTokenizer(), ("b", "bcdef"))
    assert push_all(matcher, "abcdb", search_from=2) == [None, None, None, None, "b"]
    assert matcher.text == "abcd"
    longer = StopStringMatcher(ByteTokenizer(), ("b", "bcdef"))
    assert push_all(longer, "abcdef", search_from=2)[-1] == "bcdef", "it ends behind min_tokens"
    assert longer.text == "a"


def test_a_stop_string_ends_the_sample_with_its_text(
    make_engine: Make, make_request: MakeRequest, oracle: Oracle
) -> None:
    class Letters:
        def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
            return "".join(f"<{token}>" for token in token_ids)

    whole = oracle([3, 1], 0, 8)
    engine = make_engine()
    request = make_request("a", [3, 1], max_tokens=8, stop=[f"{whole[2]}><{whole[3]}"])
    request.sequences[0].sampled.matcher = StopStringMatcher(Letters(), request.params.stop_strings)
    engine.add(request)
    run(engine)
    sample = request_output(request, Letters()).samples[0]
    assert sample.token_ids == whole[:4]
    assert sample.text == f"<{whole[0]}><{whole[1]}><"
    assert (sample.finish_reason, sample.stop_reason) == ("stop", f"{whole[2]}><{whole[3]}")
