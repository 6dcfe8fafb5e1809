"""Ask for samples that keep to a schema, an expression, a choice or a grammar, of a model that writes none of them."""

from __future__ import annotations

import json
import pickle
import re
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from samebit.kernels import token_logprobs
from samebit.recipes import tiny_model
from samebit.rollout import (
    NoTokenLeftError,
    RequestError,
    RequestOutput,
    RolloutConfig,
    RolloutWorker,
    SamplingParams,
    StructuredOutputsParams,
)

from ..http.served import byte_tokenizer
from ..tiny_llama import byte_fallback_tokenizer, smallest

TOKENIZER = byte_tokenizer()
END = TOKENIZER.convert_tokens_to_ids("<|im_end|>")
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "maximum": 99, "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
LARK = 'start: "<" digit ("," digit)~2 ">"\ndigit: /[0-9]/\n'


def endless_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer that names no end token."""
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = None
    return tokenizer


def policy(**changes: object) -> LlamaForCausalLM:
    """Return a model of random weights, whose logits are wider than the tokenizer."""
    sizes = {"vocab_size": len(TOKENIZER) + 7, "max_position_embeddings": 512, "eos_token_id": END}
    return smallest(3, **{**sizes, **changes})


def asked(seed: int = 0, n: int = 1, **kind: Any) -> SamplingParams:
    return SamplingParams(max_tokens=200, seed=seed, n=n, structured_outputs=StructuredOutputsParams(**kind))


@pytest.fixture(scope="module")
def worker() -> Iterator[RolloutWorker]:
    with RolloutWorker(policy(), tokenizer=TOKENIZER, config=RolloutConfig(num_blocks=64, block_size=16)) as one:
        yield one


def texts(worker: RolloutWorker, params: SamplingParams, prompt: tuple[int, ...] = (1, 2, 3)) -> list[str]:
    [output] = worker.generate([list(prompt)], params)
    assert {sample.finish_reason for sample in output.samples} == {"stop"}
    return [sample.text for sample in output.samples]


def test_each_kind_is_kept_to(worker: RolloutWorker) -> None:
    """A sample is what its grammar allows, whole, and ends by itself."""
    for text in texts(worker, asked(n=4, json=SCHEMA)) + texts(worker, asked(n=2, json=json.dumps(SCHEMA))):
        read = json.loads(text)
        assert set(read) == {"name", "age"}
        assert len(read["name"]) <= 5
        assert 0 <= read["age"] <= 99
    assert all(re.fullmatch("[ab]{3}-[0-9]{2}", one) for one in texts(worker, asked(n=4, regex="[ab]{3}-[0-9]{2}")))
    assert set(texts(worker, asked(n=8, choice=["yes", "no"]))) == {"yes", "no"}
    assert all(re.fullmatch("<[0-9],[0-9],[0-9]>", one) for one in texts(worker, asked(n=3, grammar=LARK)))


HEADS = ("start: ", "?start: ", "!start: ", "start[capture]: ", "// a ::= b\nstart: ", "\n" * 50_000 + "root ::= ")


@pytest.mark.parametrize("head", HEADS, ids=str.strip)
def test_a_grammar_is_lark_however_its_first_rule_begins_and_gbnf_where_it_has_such_rules(
    worker: RolloutWorker, head: str
) -> None:
    assert set(texts(worker, asked(n=8, grammar=f'{head}"a" | "b"\n'))) == {"a", "b"}


def test_a_grammar_without_a_first_rule_is_refused_in_larks_words(worker: RolloutWorker) -> None:
    with pytest.raises(RequestError, match=r"structured_outputs\.grammar can not be compiled: no start rule found"):
        worker.submit([1], asked(grammar='other: "a"\n'))


def test_a_choice_may_have_any_character(worker: RolloutWorker) -> None:
    choices = ["a\x7fb", "\x00", "\t\n\r", '"\\', "\u2028\ufeff", "\U0001f600", "".join(map(chr, range(0x80, 0x100)))]
    for one in choices:
        params = SamplingParams(max_tokens=400, structured_outputs=StructuredOutputsParams(choice=[one]))
        [output] = worker.generate([[1]], params)
        assert TOKENIZER.decode(output.samples[0].token_ids[:-1]) == one


@pytest.mark.parametrize("name", ["im_start", "im_end"])
def test_the_text_of_a_special_token_is_spelled(worker: RolloutWorker, name: str) -> None:
    """What a sample is constrained to may have the text of a special token, which the sample spells, however that is
    written. The token itself is no text: it ended the sample there, or nothing was left behind it."""
    word, bare = f"<|{name}|>", f"|{name}|"
    for kind, said in (
        ({"choice": [f"a{word}b"]}, f"a{word}b"),
        ({"json": {"enum": [f"a{word}b"]}}, f'"a{word}b"'),
        ({"regex": f"a{re.escape(word)}b{{3}}"}, f"a{word}bbb"),
        ({"grammar": f'start: "{word}" x\nx: "b"'}, f"{word}b"),
        ({"grammar": f'%llguidance {{"no_initial_skip": true}}\nstart: "{word}b"'}, f"{word}b"),
        ({"json": f'{{"enum": ["a\\u003c{bare}\\u003eb"]}}'}, f'"a{word}b"'),
        ({"regex": f"a[<]{re.escape(bare)}\\x3eb"}, f"a{word}b"),
        ({"grammar": f'start: "<" "|{name[:2]}" "{name[2:]}|>" "\\u003c{bare}>b"'}, f"{word}{word}b"),
    ):
        assert texts(worker, asked(**kind)) == [said]


def test_any_object_is_json(worker: RolloutWorker) -> None:
    """An object of any fields can be read, where it came to its end."""
    bias = {TOKENIZER.convert_tokens_to_ids(character): 9.0 for character in '"}'}
    params = SamplingParams(
        max_tokens=300, seed=1, n=4, logit_bias=bias, structured_outputs=StructuredOutputsParams(json_object=True)
    )
    [output] = worker.generate([[4, 5]], params)
    ended = [sample.text for sample in output.samples if sample.finish_reason == "stop"]
    assert ended
    assert all(isinstance(json.loads(text), dict) for text in ended)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("more", [{}, {"top_k": 3}, {"repetition_penalty": 1.3}, {"min_p": 0.2}])
def test_what_is_reported_is_the_trainers(worker: RolloutWorker, temperature: float, more: dict[str, float]) -> None:
    """The log-probability is that of the unconstrained logits, bit for bit, the end token's too."""
    params = SamplingParams(
        max_tokens=100, seed=5, n=2, temperature=temperature, structured_outputs=StructuredOutputsParams(json=SCHEMA),
        **more,
    )  # fmt: skip
    [output] = worker.generate([[7, 8, 9]], params)
    for sample in output.samples:
        ids = torch.tensor([output.prompt_token_ids + sample.token_ids])
        expected = token_logprobs(worker.module, ids, temperature=temperature or 1.0)[0, 2:]
        assert torch.equal(expected.detach(), torch.tensor(sample.logprobs))
        assert sample.token_ids[-1] == END


def tokens_of(output: RequestOutput) -> list[list[int]]:
    return [sample.token_ids for sample in output.samples]


KINDS: list[dict[str, Any]] = [
    {"json": SCHEMA},
    {"regex": "[ab]{9}c*"},
    {"choice": ["yes", "no"]},
    {"grammar": LARK},
    {},
]


@given(data=st.data())
def test_the_same_tokens_alone_and_in_any_batch(alone: dict[int, list[list[int]]], data: st.DataObject) -> None:
    """A constrained request has the same tokens alone and beside others, under preemption too."""
    order = data.draw(st.lists(st.sampled_from(range(len(KINDS))), min_size=1, max_size=6))
    blocks, budget = data.draw(st.integers(14, 24)), data.draw(st.integers(8, 40))
    config = RolloutConfig(num_blocks=blocks, block_size=8, max_num_batched_tokens=budget, max_num_seqs=8)
    with RolloutWorker(policy(), tokenizer=TOKENIZER, config=config) as tight:
        outputs = tight.generate([[1, 2, 3]] * len(order), [batched(kind) for kind in order])
    assert [tokens_of(one) for one in outputs] == [alone[kind] for kind in order]


def batched(kind: int) -> SamplingParams:
    constraint = StructuredOutputsParams(**KINDS[kind]) if KINDS[kind] else None
    return SamplingParams(n=2, seed=11 + kind, max_tokens=40, structured_outputs=constraint)


@pytest.fixture(scope="module")
def alone(worker: RolloutWorker) -> dict[int, list[list[int]]]:
    return {kind: tokens_of(worker.generate([[1, 2, 3]], batched(kind))[0]) for kind in range(len(KINDS))}


def test_a_worker_that_runs_ahead_waits_for_what_is_constrained(alone: dict[int, list[list[int]]]) -> None:
    """A worker that runs ahead draws no token of a grammar before it has read the one before."""
    config = RolloutConfig(num_blocks=64, block_size=16, async_scheduling=True)
    with RolloutWorker(policy(), tokenizer=TOKENIZER, config=config) as ahead:
        outputs = ahead.generate([[1, 2, 3]] * len(KINDS), [batched(kind) for kind in range(len(KINDS))])
        assert [tokens_of(one) for one in outputs] == list(alone.values())
        [free] = ahead.generate([[1, 2, 3]], batched(len(KINDS) - 1))
        assert ahead.stats()["steps_ahead"] > 0
    assert tokens_of(free) == alone[len(KINDS) - 1]


def test_a_sample_goes_on_over_an_update_of_the_weights(worker: RolloutWorker) -> None:
    """A constrained sample goes on over an update of the weights, and is still what its grammar allows."""
    handle = worker.submit([1, 2, 3], asked(regex="[ab]{150}"))
    next(iter(handle))
    with worker.weight_update():
        pass
    assert re.fullmatch("[ab]{150}", handle.result().samples[0].text)


@pytest.mark.parametrize("count", [1, 2, 5000])
def test_a_choice_of_any_number_of_texts_is_kept_to(worker: RolloutWorker, count: int) -> None:
    """One of very many texts is chosen, with whatever characters are in them."""
    choice = [f'{chr(97 + number % 26)}{number}|"é\\😀\n/' for number in range(count)]
    assert set(texts(worker, asked(n=4, choice=choice))) <= set(choice)
    texts_with_one_beginning = ["a", "ab", "abc"]
    assert set(texts(worker, asked(n=32, choice=texts_with_one_beginning))) == set(texts_with_one_beginning)


@pytest.mark.parametrize("logits", [200, 224, 250])
def test_a_tokenizer_may_have_tokens_that_the_model_has_no_logit_of(logits: int) -> None:
    """Gemma-3 1B's has: the tokens that are left are chosen from, and the model's end token may be one of no text."""
    assert logits < len(TOKENIZER)
    with RolloutWorker(policy(vocab_size=logits, eos_token_id=5), tokenizer=TOKENIZER) as narrow:
        assert re.fullmatch("[ab]{5}", texts(narrow, asked(regex="[ab]{5}"))[0].strip(TOKENIZER.decode([5])))
    wide = len(TOKENIZER) + 7
    with RolloutWorker(policy(vocab_size=wide, eos_token_id=wide - 1), tokenizer=TOKENIZER) as padded:
        [output] = padded.generate([[1]], asked(regex="[ab]{5}"))
    assert output.samples[0].token_ids[-1] == wide - 1


def test_a_grammar_that_becomes_too_large_fails_by_the_librarys_reason(worker: RolloutWorker) -> None:
    """A grammar of thousands of optional properties can be compiled, and not followed."""
    names = {f"{chr(97 + number % 26)}{number}": {"type": "integer"} for number in range(600)}
    schema = {"type": "object", "properties": names, "additionalProperties": False}
    with pytest.raises(NoTokenLeftError, match=r"structured_outputs \(.*items; max is 2000"):
        worker.generate([[1]], asked(json=schema))


def test_end_tokens_that_the_request_names_end_it(worker: RolloutWorker) -> None:
    """A request that ignores the model's end tokens ends by those that it names, as TRL asks."""
    constraint = StructuredOutputsParams(regex="ab")
    other = TOKENIZER.convert_tokens_to_ids("<|im_start|>")
    params = SamplingParams(max_tokens=20, ignore_eos=True, stop_token_ids=[other], structured_outputs=constraint)
    [output] = worker.generate([[1]], params)
    assert output.samples[0].token_ids[-1] == other
    with pytest.raises(RequestError, match="need a token that ends a sample"):
        worker.submit([1], SamplingParams(ignore_eos=True, structured_outputs=constraint))


def test_nothing_left_fails_that_request_alone(worker: RolloutWorker) -> None:
    """A request whose grammar ends before its min_tokens fails by name, and others go on."""
    other = worker.submit([1, 2], asked(regex="[ab]{50}"))
    params = SamplingParams(min_tokens=9, structured_outputs=StructuredOutputsParams(regex="ab"))
    with pytest.raises(NoTokenLeftError, match="structured_outputs"):
        worker.generate([[1]], params)
    assert len(other.result().samples[0].text) == 50


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ({"json": {"type": "poem"}}, "json can not be compiled: .*poem"),
        ({"json": {"not": {"type": "string"}}}, "json can not be compiled: .*not"),
        ({"regex": "a(("}, "regex can not be compiled: .*unclosed group"),
        ({"grammar": "start: nothing"}, "grammar can not be compiled"),
        ({"grammar": "root ::= ("}, "grammar can not be compiled: it is no GBNF: "),
    ],
)
def test_what_can_not_be_compiled_is_refused_at_submission(
    worker: RolloutWorker, kind: dict[str, Any], says: str
) -> None:
    """What can not be compiled is refused by its cause when it is submitted."""
    with pytest.raises(RequestError, match=f"(?s)structured_outputs.{says}"):
        worker.submit([1], asked(**kind))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, "exactly one of"),
        ({"regex": "a", "choice": ["b"]}, "exactly one of"),
        ({"choice": []}, "list of non-empty strings"),
        ({"regex": ""}, "non-empty string"),
        ({"json_object": False}, "must be True or None"),
        ({"json": "{"}, "is no JSON"),
        ({"json": {"a": object()}}, "is no JSON"),
        ({"json": "[1]"}, "text of a JSON object"),
    ],
)
def test_parameters_are_checked(given: dict[str, Any], says: str) -> None:
    """Exactly one kind is taken, of its type."""
    with pytest.raises(ValueError, match=says):
        StructuredOutputsParams(**given)


def test_parameters_are_copies_that_travel() -> None:
    """A caller's later change does not reach in, and what is pickled is equal."""
    schema: dict[str, Any] = {"type": "object"}
    params = SamplingParams(structured_outputs=StructuredOutputsParams(json=schema))
    schema["type"] = "string"
    assert params.structured_outputs == StructuredOutputsParams(json={"type": "object"})
    assert pickle.loads(pickle.dumps(params)) == params
    with pytest.raises(ValueError, match="structured_outputs must be StructuredOutputsParams or None"):
        SamplingParams(structured_outputs={"regex": "a"})  # type: ignore[arg-type]


class Decoder:
    """Is a tokenizer that is none of transformers'."""

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        return "".join(map(chr, token_ids))


@pytest.mark.parametrize(
    ("tokenizer", "says"),
    [
        (Decoder(), "need a tokenizer of the kind PreTrainedTokenizerFast, .* this worker has a Decoder"),
        (tiny_model.build_tokenizer(), "can not read this worker's tokenizer: can't determine decoder type"),
        (byte_fallback_tokenizer("<0xZZ>"), "can not read this worker's tokenizer: "),
        (endless_tokenizer(), "need an end token, and neither model nor tokenizer names one"),
    ],
)
def test_tokenizers_that_tell_too_little_are_refused_by_name(tokenizer: Any, says: str) -> None:
    """A tokenizer that does not tell the texts of all tokens, or no end, is refused for what is constrained alone."""
    with RolloutWorker(policy(eos_token_id=None), tokenizer=tokenizer) as one:
        params = SamplingParams(stop_token_ids=[4], structured_outputs=StructuredOutputsParams(regex="a"))
        with pytest.raises(RequestError, match=f"structured_outputs {says}"):
            one.submit([1], params)
        assert one.generate([[1]], SamplingParams(max_tokens=3))


def test_a_worker_that_can_compile_none_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request is refused by name without tokenizer, and without the library; others run."""
    with RolloutWorker(policy()) as bare, pytest.raises(RequestError, match="this worker has none"):
        bare.submit([1], asked(regex="a"))
    for name in [name for name in sys.modules if name.split(".")[0] == "llguidance"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with RolloutWorker(policy(), tokenizer=TOKENIZER) as without:
        with pytest.raises(RequestError, match=r"samebit\[structured\]"):
            without.submit([1], asked(regex="a"))
        assert without.generate([[1]], SamplingParams(max_tokens=3))
