"""Log-probabilities made in parts have the bits of those of the class's own logits, and no epilogue is left out."""

import inspect
import itertools
from dataclasses import replace
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Qwen3ForCausalLM

from samebit.kernels import BindingError, bind, logprobs_from_logits, token_logprobs, token_scores
from samebit.kernels.binding.families.family import Family
from samebit.kernels.binding.families.known import FAMILIES as BOUND
from samebit.kernels.binding.trainer import logprob_head as scored_head
from samebit.kernels.ops.logprobs import entropy_from_logits

from ..campaign import CAMPAIGN, in_pairs
from .families import DTYPES, FAMILIES, HYBRIDS, VOCAB, make_model, paired, token_ids
from .gradients import relative_error, take_gradients
from .layouts import padded

IDS, MASK = padded(token_ids(40, 2, 20, 1, 9), left=True)
TEMPERATURES = torch.linspace(0.5, 1.5, 5 * 39).view(5, 39)
CAPPED = "Gemma3, final soft-cap"


@pytest.fixture
def seven_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scored_head, "BYTES_AT_ONCE", 4 * VOCAB * 7)


def model_of(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    changes |= {"final_logit_softcapping": 3.0} if name == CAPPED else {}
    return make_model("Gemma3" if name == CAPPED else name, dtype, **changes)


def scores(model: nn.Module) -> torch.Tensor:
    return token_logprobs(model, IDS, attention_mask=MASK, temperature=TEMPERATURES)


def of_own_logits(model: nn.Module) -> torch.Tensor:
    """Score all logits of the class's own forward."""
    logits = model(input_ids=IDS, attention_mask=MASK).logits[:, :-1]
    found = logprobs_from_logits(logits, IDS[:, 1:], TEMPERATURES)
    return torch.where((MASK[:, 1:] * MASK[:, :-1]).bool(), found, 0.0)


@pytest.mark.soak
@pytest.mark.parametrize(("name", "dtype", "tied"), paired((*FAMILIES, CAPPED, *HYBRIDS), DTYPES, (True, False)))
def test_any_number_of_rows_at_once_gives_the_bits_of_the_models_own_logits(
    name: str, dtype: torch.dtype, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any number of rows at once gives the bits of the model's own logits. Under `make soak` each number with gradients
    and without; otherwise these have two numbers each.
    """
    model = bind(model_of(name, dtype, tie_word_embeddings=tied))
    with torch.no_grad():
        expected = of_own_logits(model)
    for rows, grad in itertools.product((1, 7, 64, 1000), (False, True)):
        if CAMPAIGN or grad == (rows in (7, 1000)):
            monkeypatch.setattr(scored_head, "BYTES_AT_ONCE", 4 * VOCAB * rows)
            with torch.set_grad_enabled(grad):
                assert torch.equal(scores(model).detach(), expected)


EPILOGUES = ("Qwen3", "Gemma2", "GraniteMoeHybrid, dense", "FalconH1", "Mamba2")


@pytest.mark.soak
@pytest.mark.usefixtures("seven_rows")
@pytest.mark.parametrize(("name", "dtype", "tied"), in_pairs(EPILOGUES, DTYPES, (True, False)))
def test_gradients_agree_with_those_of_the_models_own_logits(name: str, dtype: torch.dtype, tied: bool) -> None:
    model = bind(model_of(name, dtype, tie_word_embeddings=tied))
    weights = torch.linspace(-1, 2, TEMPERATURES.numel()).view_as(TEMPERATURES)
    (of_own_logits(model) * weights).sum().backward()
    expected = take_gradients(model)
    (scores(model) * weights).sum().backward()
    for key, grad in take_gradients(model).items():
        assert relative_error(grad, expected[key].double()) < (1e-4 if dtype == torch.float32 else 0.1), key


def test_a_family_must_say_its_epilogue() -> None:
    with pytest.raises(TypeError, match="epilogue"):
        Family("Another")  # type: ignore[call-arg]
    assert len(BOUND) >= 32


def all_logits_are_made(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> bool:
    with monkeypatch.context() as patch:
        patch.setattr(scored_head, "linear", None)
        try:
            scores(model)
        except TypeError:
            return False
        return True


@pytest.mark.usefixtures("seven_rows")
def test_what_stands_between_head_and_logits_is_not_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    class Adapted(nn.Module):
        def __init__(self, base: nn.Module) -> None:
            super().__init__()
            self.base = base

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.base(x) * 0.5

    def halve(module: nn.Module, given: Any, logits: torch.Tensor) -> torch.Tensor:
        return logits * 0.5

    model = bind(make_model("Gemma2"))
    plain = scores(model).detach()
    assert not all_logits_are_made(model, monkeypatch)
    handle = model.lm_head.register_forward_hook(halve)
    hooked = scores(model).detach()
    assert torch.equal(hooked, of_own_logits(model))
    assert not torch.equal(hooked, plain)
    handle.remove()
    model.lm_head = Adapted(model.lm_head)
    with pytest.raises(BindingError, match="lm_head was a Linear, and is another module"):
        scores(model)


@pytest.mark.usefixtures("seven_rows")
def test_hooks_before_the_head_and_on_the_model_run(monkeypatch: pytest.MonkeyPatch) -> None:
    model = bind(make_model("Llama"))
    seen = []
    model.register_forward_hook(lambda module, given, output: seen.append(output.log_probs.shape))
    model.lm_head.register_forward_pre_hook(lambda module, given: (given[0] * 0.5,))
    assert torch.equal(scores(model), of_own_logits(bind(halved_head())))
    assert not all_logits_are_made(model, monkeypatch)
    assert len(seen) == 1


@pytest.mark.usefixtures("seven_rows")
def test_wanted_tokens_alone_are_scored_with_the_entropies_of_the_models_own_logits() -> None:
    model = bind(make_model("Qwen3"))
    wanted = torch.rand(IDS.shape[0], IDS.shape[1] - 1, generator=torch.Generator().manual_seed(0)) < 0.5
    found = token_scores(model, IDS, attention_mask=MASK, temperature=TEMPERATURES, wanted=wanted, with_entropy=True)
    entropies = entropy_from_logits(model(input_ids=IDS, attention_mask=MASK).logits[:, :-1], TEMPERATURES)
    scored = wanted & (MASK[:, 1:] * MASK[:, :-1]).bool()
    assert torch.equal(found.log_probs, torch.where(scored, scores(model), 0.0))
    assert torch.equal(found.entropy, torch.where(scored, entropies, 0.0))


@pytest.mark.parametrize("name", ["log_probs", "entropy"])
def test_scores_that_are_cast_on_their_way_out_are_refused(name: str) -> None:
    model = bind(make_model("Qwen3"))
    model.register_forward_hook(lambda module, given, output: replace(output, **{name: output[name].bfloat16()}))
    with pytest.raises(ValueError, match=rf"{name} came out of the model as torch\.bfloat16"):
        token_scores(model, IDS, with_entropy=True)


def halved_head() -> nn.Module:
    model = make_model("Llama", tie_word_embeddings=False)
    with torch.no_grad():
        model.lm_head.weight.copy_(make_model("Llama").lm_head.weight * 0.5)
    return model


class Halved(Qwen3ForCausalLM):
    """Has a name that `bind` knows, as code in a model's folder may have, and halves its logits."""

    def forward(self, *given: Any, **options: Any) -> Any:
        output = super().forward(*given, **options)
        output.logits = output.logits / 2
        return output


Halved.__name__ = "Qwen3ForCausalLM"


def test_another_class_of_the_same_name_keeps_its_epilogue() -> None:
    plain = make_model("Qwen3")
    other = Halved(plain.config).eval()
    other.load_state_dict(plain.state_dict())
    assert torch.equal(scores(bind(other)), of_own_logits(other))
    assert not torch.equal(scores(other), scores(bind(plain)))


@pytest.mark.parametrize("as_method", [True, False])
def test_a_forward_that_was_replaced_before_binding_stays(as_method: bool) -> None:
    model = make_model("Qwen3")
    own = model.forward

    def halved(*given: Any, **options: Any) -> Any:
        output = own(*given, **options)
        output.logits = output.logits / 2
        return output

    model.forward = (
        MethodType(lambda self, *given, **options: halved(*given, **options), model) if as_method else halved
    )
    assert torch.equal(scores(bind(model)), of_own_logits(model))
    assert not torch.equal(scores(model), scores(bind(make_model("Qwen3"))))


@pytest.mark.parametrize("name", ["Llama", "Mamba2"])
def test_a_bound_forward_names_the_arguments_of_its_class(name: str) -> None:
    """A bound forward names the arguments of its class: transformers' trainer drops the columns of a data set that are
    not among them.
    """
    assert inspect.signature(bind(make_model(name)).forward) == inspect.signature(make_model(name).forward)


def test_a_model_that_is_not_exact_is_scored_too() -> None:
    model = bind(make_model("Llama"), exact=False)
    assert torch.allclose(scores(model), scores(bind(make_model("Llama"))), atol=1e-4)
