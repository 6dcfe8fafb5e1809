"""The training forward's bits do not depend on layout, checkpointing, autocast, threads or how dtype came about."""

import copy
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from samebit.kernels import bind, token_logprobs
from samebit.kernels.binding.binding import is_bound

from ..kernels.helpers import THREADS, threads
from .families import DTYPES, FAMILIES, bound_model, make_model, paired, token_ids
from .layouts import LAYOUTS, Scores, alone, assert_same_bits, in_turns, packed, padded

SEQUENCES = token_ids(65, 2, 100, 1, 64, 130)


@contextmanager
def checkpointing(model: PreTrainedModel, reentrant: bool) -> Iterator[None]:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.train()
    try:
        yield
    finally:
        model.eval()
        model.gradient_checkpointing_disable()


def detached(scores: Scores) -> Scores:
    return [row.detach() for row in scores]


@pytest.mark.soak
@pytest.mark.parametrize(("family", "dtype"), paired(FAMILIES, DTYPES))
def test_every_layout_gives_the_bits_of_each_sequence_alone(family: str, dtype: torch.dtype) -> None:
    model = bound_model(family, dtype)
    with torch.no_grad():
        expected = alone(model, SEQUENCES, 0.7)
        for layout in in_turns(FAMILIES, family):
            assert_same_bits(layout(model, SEQUENCES, 0.7), expected)
    assert_same_bits(detached(LAYOUTS["packed"](model, SEQUENCES, 0.7)), expected)
    for reentrant in (False, True):
        with checkpointing(model, reentrant):
            assert_same_bits(detached(LAYOUTS["left padded"](model, SEQUENCES, 0.7)), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_autocast_changes_nothing_and_says_so(dtype: torch.dtype) -> None:
    model = bound_model("Gemma2", dtype)
    expected = detached(LAYOUTS["packed"](model, SEQUENCES))
    for name, other in (("packed", torch.bfloat16), ("logits of a left-padded batch", torch.float16)):
        with torch.autocast("cpu", dtype=other), pytest.warns(UserWarning, match="autocast does not change it"):
            scores = LAYOUTS[name](model, SEQUENCES)
        assert_same_bits(detached(scores), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_change_nothing(dtype: torch.dtype) -> None:
    model = bound_model("Llama", dtype)
    results = []
    for count in THREADS:
        with threads(count):
            results.append(detached([*LAYOUTS["packed"](model, SEQUENCES), *alone(model, SEQUENCES)]))
    for result in results:
        assert_same_bits(result, results[0])


@pytest.mark.parametrize("family", FAMILIES)
def test_loaded_in_bfloat16_equals_moved_there(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that is loaded in bfloat16 equals one that is moved there, though `.to(bfloat16)` also truncates rotary
    frequencies and embedding scales.
    """
    model = make_model(family)
    if family == "MiniMaxM2":  # whose class would round its corrections
        monkeypatch.setattr(type(model), "_keep_in_fp32_modules_strict", ["e_score_correction_bias"])
    model.save_pretrained(tmp_path)
    loaded = bind(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16))
    with torch.no_grad():
        assert_same_bits(alone(loaded, SEQUENCES), alone(bound_model(family, torch.bfloat16), SEQUENCES))


def test_a_bound_model_may_be_moved_to_another_dtype() -> None:
    moved = bind(make_model("Gemma3")).to(torch.bfloat16)
    with torch.no_grad():
        assert_same_bits(alone(moved, SEQUENCES), alone(bound_model("Gemma3", torch.bfloat16), SEQUENCES))


def test_a_copy_is_bound_and_independent() -> None:
    model = bind(make_model("Gemma3"))
    expected = detached(alone(model, SEQUENCES))
    with pytest.raises(TypeError, match=r"a bound model is not pickled: pickle or save its state_dict\(\)"):
        pickle.dumps(model)
    twin = copy.deepcopy(model)
    assert is_bound(twin)
    assert_same_bits(detached(alone(twin, SEQUENCES)), expected)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert_same_bits(detached(alone(model, SEQUENCES)), expected)
    assert not torch.equal(alone(twin, SEQUENCES)[0], expected[0])


def test_what_predicts_nothing_scores_zero() -> None:
    model = bound_model("Llama")
    ids, mask = padded(SEQUENCES, left=True)
    scores = token_logprobs(model, ids, attention_mask=mask)
    assert not scores[~(mask[:, 1:] * mask[:, :-1]).bool()].any()
    ids, positions = packed(SEQUENCES)
    scores = token_logprobs(model, ids, position_ids=positions)[0]
    assert scores[torch.tensor([len(s) for s in SEQUENCES]).cumsum(0)[:-1] - 1].count_nonzero() == 0
    assert token_logprobs(model, ids[:, :1]).shape == (1, 0)


@torch.no_grad()
@pytest.mark.parametrize("family", ["Llama", "Bamba", "Mamba2"])
def test_embeddings_stand_in_for_tokens(family: str) -> None:
    model = bound_model(family)
    ids, positions = packed(token_ids(5, 7))
    given = {"inputs_embeds": model.get_input_embeddings()(ids)}
    expected = model(ids, position_ids=positions).logits
    assert torch.equal(model(**given, position_ids=positions).logits, expected)
    assert torch.equal(model(input_ids=None, **given, position_ids=positions).logits, expected)
    assert torch.equal(model(**given).logits, model(ids).logits)


def test_a_temperature_for_each_token() -> None:
    model, (sequence,) = bound_model("Llama"), token_ids(70)
    ids = torch.tensor([sequence])
    temperatures = torch.where(torch.arange(69) % 2 == 0, 1.0, 0.7)[None]
    mixed = token_logprobs(model, ids, temperature=temperatures)
    for temperature in (1.0, 0.7):
        rows = temperatures == torch.tensor(temperature)
        assert torch.equal(mixed[rows], token_logprobs(model, ids, temperature=temperature)[rows])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_ids": torch.zeros(4, dtype=torch.int64)}, r"must be \[B, T\]"),
        ({"input_ids": torch.full((1, 4), 1009)}, "must lie in"),
        ({"input_ids": torch.ones(1, 4, dtype=torch.int64), "attention_mask": torch.ones(1, 5)}, "shape of input_ids"),
        ({"input_ids": torch.ones(1, 4, dtype=torch.int64), "attention_mask": torch.tensor([[1, 0, 1, 1]])}, "holes"),
        ({"input_ids": torch.ones(1, 4, dtype=torch.int64), "temperature": 0.0}, "temperature must be positive"),
    ],
)
def test_bad_input_is_named(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        token_logprobs(bound_model("Llama"), **arguments)
