"""A step that a rollout computes in one call, from token ids to logits, has the bits of its modules, and gives way to
who listens to them."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from samebit.kernels import bind
from samebit.kernels.binding.binding import binding_of
from samebit.kernels.layout.forward_context import ForwardContext, use_context
from samebit.kernels.layout.lora.adapters import KeptTerms, RowAdapters
from samebit.rollout import RolloutConfig, RolloutWorker, SamplingParams

from ..campaign import in_turns
from .compare import assert_same_samples, run
from .families import DTYPES, VOCAB, bound_model, make_model, paired, token_ids
from .listening import listening

pytestmark = pytest.mark.usefixtures("rooms_with_an_end")

EMBEDDING, NORM, HEAD = ENDS = ("model.embed_tokens", "model.norm", "lm_head")
ROWS = 7
IDS = [5, 0, VOCAB - 1, 5, 77, 1, 2]
KEPT = {"all": 0, "some": [6, 1, 4], "one twice": [3, 3], "none": [], "all by number": list(range(ROWS))}
PARAMS = SamplingParams(max_tokens=4, ignore_eos=True)


class Steps:
    """Computes first steps of one sequence of a model, in memory of their own."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model, self.adapters = model, RowAdapters.all_through(None, KeptTerms())
        self.dtype = model.get_parameter("lm_head.weight").dtype

    def logits(self, ids: list[int], kept: int | list[int]) -> torch.Tensor:
        """Return logits of the rows that are kept, 0 for all."""
        logits: torch.Tensor = self.outputs(ids, kept).logits
        return logits

    @torch.no_grad()
    def outputs(self, ids: list[int], kept: int | list[int], **asked: bool) -> Any:
        """Return what the model returns, more where that is asked for."""
        context = ForwardContext(
            positions=torch.arange(len(ids)), row_start=np.zeros(1, np.int32), starts=np.zeros(1, np.int32),
            lengths=np.array([len(ids)], np.int32), table_rows=np.zeros(1, np.int32),
            block_tables=np.ones((1, 1), np.int32), block_size=64, adapters=self.adapters,
            pages=binding_of(self.model).kv_layout.allocate(2, 64, self.dtype),
        )  # fmt: skip
        rows = torch.tensor(kept, dtype=torch.int64) if isinstance(kept, list) else kept
        with use_context(context):
            return self.model(input_ids=torch.tensor([ids]), logits_to_keep=rows, **asked)


def assert_alike(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.dtype is expected.dtype is torch.float32
    assert torch.equal(found, expected)


@pytest.mark.parametrize("kept", KEPT.values(), ids=KEPT)
@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        *paired(("Llama", "Qwen2", "Qwen3", "Mistral"), DTYPES),
        *in_turns(("Gemma2", "Gemma3", "Granite", "StableLm"), DTYPES, every=True),
    ],
)
def test_a_step_in_one_call_gives_the_logits_of_the_modules(
    family: str, dtype: torch.dtype, kept: int | list[int]
) -> None:
    steps = Steps(bound_model(family, dtype))
    at_once = steps.logits(IDS, kept)
    with listening(steps.model, [], NORM):
        one_by_one = steps.logits(IDS, kept)
    assert_alike(at_once, one_by_one)


@pytest.mark.parametrize("width", [48, 200, 1100])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_head_with_a_bias_and_more_rows_than_a_tile(
    dtype: torch.dtype, width: int, layers_of_calls: list[int]
) -> None:
    model = make_model("Qwen3", dtype, hidden_size=width, tie_word_embeddings=False, vocab_size=61)
    model.lm_head = nn.Linear(width, 61, dtype=dtype)
    steps = Steps(bind(model))
    ids = [(7 * row) % 61 for row in range(50)]
    at_once = steps.logits(ids, 0)
    assert layers_of_calls == [4]
    with listening(model, [], NORM):
        assert_alike(at_once, steps.logits(ids, 0))


@pytest.mark.parametrize("name", ENDS)
def test_who_listens_to_what_is_around_the_layers_hears_each_call(name: str, layers_of_calls: list[int]) -> None:
    model, prompts = bound_model("Qwen3"), token_ids(3, 130)
    params = [SamplingParams(n=2, seed=1, max_tokens=8, ignore_eos=True)] * 2
    at_once, _ = run(model, prompts, params)
    assert set(layers_of_calls) == {4}  # two layers between embedding and head
    layers_of_calls.clear()
    heard: list[str] = []
    with listening(model, heard, name):
        one_by_one, _ = run(model, prompts, params)
    assert len(heard) == len(layers_of_calls)
    assert set(layers_of_calls) == {2}
    assert_same_samples(one_by_one, at_once)


@pytest.mark.parametrize("family", ["Qwen3", "Qwen3Moe"])
def test_who_once_asked_for_more_leaves_later_steps_in_one_call(family: str, layers_of_calls: list[int]) -> None:
    """Who once asked for more leaves later steps in one call: transformers leaves its hooks on the modules, which do
    nothing in any other call.
    """
    steps = Steps(bind(make_model(family)))
    asked = {"output_hidden_states": True, **({"output_router_logits": True} if family == "Qwen3Moe" else {})}
    collected = [name.removeprefix("output_") for name in asked]
    expected, at_once = steps.logits(IDS, 0), [*layers_of_calls]
    assert len(at_once) == 1
    for _ in range(2):
        outputs = steps.model(torch.tensor([IDS]), **asked), steps.outputs(IDS, 0, **asked)
        for name in collected:
            of_trainer, of_step = (output[name] for output in outputs)
            assert len(of_trainer) == len(of_step) > 0
            assert all(map(torch.equal, of_trainer, of_step))
        layers_of_calls.clear()
        assert_alike(steps.logits(IDS, 0), expected)
        assert layers_of_calls == at_once


@pytest.mark.parametrize("name", ["model", "model.rotary_emb", "lm_head"])
def test_a_hook_before_a_call_is_called(name: str) -> None:
    steps = Steps(bound_model("Qwen3"))
    at_once, heard = steps.logits(IDS, 0), []
    handle = steps.model.get_submodule(name).register_forward_pre_hook(lambda *_: heard.append(1))
    one_by_one = steps.logits(IDS, 0)
    handle.remove()
    assert heard == [1]
    assert_alike(one_by_one, at_once)


@pytest.mark.parametrize("name", ENDS)
def test_a_forward_that_is_replaced_between_two_steps_runs_from_then_on(name: str) -> None:
    model = make_model("Qwen3")
    heard: list[int] = []
    with RolloutWorker(model, config=RolloutConfig(num_blocks=32, max_num_seqs=4, max_model_len=128)) as worker:
        module = model.get_submodule(name)
        own = module.forward

        def replaced(x: torch.Tensor) -> torch.Tensor:
            heard.append(1)
            result: torch.Tensor = own(x)
            return result

        worker.after_steps(lambda: setattr(module, "forward", replaced))
        worker.generate([[5, 6, 7]], PARAMS)
    assert heard


def _of_other_memory(module: Any) -> None:
    module.weight.data = module.weight.data * 2  # torch does not count it


def _of_another_parameter(module: Any) -> None:
    module.weight = nn.Parameter(module.weight.detach() * 2)


@pytest.mark.parametrize("change", [_of_other_memory, _of_another_parameter])
@pytest.mark.parametrize("name", ENDS)
def test_a_weight_that_changed_between_two_steps_is_read(name: str, change: Callable[[Any], None]) -> None:
    steps = Steps(bind(make_model("Qwen3", tie_word_embeddings=False)))
    before = steps.logits(IDS, 0)
    change(steps.model.get_submodule(name))
    after = steps.logits(IDS, 0)
    assert not torch.equal(after, before)
    with listening(steps.model, [], NORM):
        assert_alike(after, steps.logits(IDS, 0))


def test_a_factor_on_embeddings_that_changed_between_two_steps_is_read(layers_of_calls: list[int]) -> None:
    steps = Steps(bind(make_model("Granite")))
    before = steps.logits(IDS, 0)
    steps.model.get_submodule("model").embedding_multiplier = 7.5
    after = steps.logits(IDS, 0)
    assert layers_of_calls == [4, 4]
    assert not torch.equal(after, before)
    with listening(steps.model, [], NORM):
        assert_alike(after, steps.logits(IDS, 0))


@pytest.mark.parametrize("family", ["Gemma", "Gemma3"])
def test_who_listens_to_a_scaled_embedding_hears_each_call(family: str, layers_of_calls: list[int]) -> None:
    steps, heard = Steps(bound_model(family)), []
    at_once = steps.logits(IDS, 0)
    with listening(steps.model, heard, EMBEDDING):
        one_by_one = steps.logits(IDS, 0)
    assert heard == [EMBEDDING]
    assert layers_of_calls == [4, 2]
    assert_alike(one_by_one, at_once)


def test_an_embedding_that_got_a_longest_norm_scales_its_rows() -> None:
    steps = Steps(bind(make_model("Qwen3")))
    before, embedding = steps.logits(IDS, 0), steps.model.get_submodule(EMBEDDING)
    weight = embedding.weight.detach().clone()
    embedding.max_norm = 0.01
    after = steps.logits(IDS, 0)
    embedding.max_norm = None
    with torch.no_grad():
        embedding.weight.copy_(weight)
    assert not torch.equal(after, before)


@pytest.mark.parametrize(
    ("ids", "kept"),
    [([5, VOCAB], 0), ([5, -1], 0), ([5, 6], [2]), ([5, 6], [0, -1])],
    ids=["token", "token below 0", "row", "row below 0"],
)
def test_a_number_out_of_range_is_refused(ids: list[int], kept: int | list[int]) -> None:
    steps = Steps(bound_model("Qwen3"))
    expected = steps.logits([5, 6], 0)
    with pytest.raises(IndexError):
        steps.logits(ids, kept)
    assert_alike(steps.logits([5, 6], 0), expected)


def test_autocast_is_warned_of_and_changes_nothing() -> None:
    steps = Steps(bound_model("Qwen3"))
    expected = steps.logits(IDS, 0)
    with torch.autocast("cpu"), pytest.warns(UserWarning, match="autocast does not change it"):
        found = steps.logits(IDS, 0)
    assert_alike(found, expected)
