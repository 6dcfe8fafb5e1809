"""The accuracy recipe asks its task, gives an indexer its lessons, and compares two runs bit by bit."""

from dataclasses import replace

import pytest
import torch

from samebit.kernels import bind
from samebit.recipes import tiny_model
from samebit.recipes.accuracy.answers import answer, compare
from samebit.recipes.accuracy.indexer import indexers, scores, teach_indexers
from samebit.recipes.accuracy.models import build
from samebit.recipes.accuracy.task import Task
from samebit.rollout import RolloutConfig

TOKENIZER = tiny_model.build_tokenizer()


def test_no_problem_is_asked_that_is_shown_or_trained_on() -> None:
    task = Task.draw(held_out=40, examples=3)
    sets = [{problem.prompt for problem in part} for part in (task.held_out, task.examples, task.training)]
    assert [len(sets[0]), len(sets[1])] == [40, 3]
    assert len(sets[0] | sets[1] | sets[2]) == sum(map(len, sets))
    first, *others = task.prompts(TOKENIZER)
    assert all(one[: len(first) - 6] == first[:-6] for one in others)
    assert TOKENIZER.decode(first[-6:]) == task.held_out[0].prompt
    with pytest.raises(ValueError, match="9000 problems to ask and 3 examples"):
        Task.draw(held_out=9000, examples=3)


def test_cache_on_and_off_answer_alike_and_a_difference_is_counted() -> None:
    task = Task.draw(held_out=6, examples=2)
    model = bind(build("dsa", TOKENIZER, top_k=11))
    prompts = task.prompts(TOKENIZER)
    config = RolloutConfig(max_num_seqs=4, max_num_batched_tokens=64)
    on, off = (answer(model, prompts, replace(config, enable_prefix_caching=caching)) for caching in (True, False))
    assert on.hit_rate() > 0.5
    assert off.skipped() == 0
    same = compare(on, off)
    assert (same.answers, same.tokens, same.logprobs) == (0, 0, 0)
    sample = on.outputs[2].samples[0]
    sample.token_ids[-1] += 1
    changed = compare(on, off)
    assert (changed.answers, changed.tokens, changed.logprobs) == (1, 1, 0)
    assert on.accuracy(TOKENIZER, task.held_out) == 0.0


def test_an_indexer_learns_what_dense_attention_reads_and_nothing_else_moves() -> None:
    task = Task.draw(held_out=4, examples=2)
    model = build("dsa", TOKENIZER, top_k=1000)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    first = teach_indexers(model, task.batches(TOKENIZER, 4, 48), steps=1)
    last = teach_indexers(model, task.batches(TOKENIZER, 4, 48), steps=30)
    assert last < first
    moved = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert moved == {name for name in before if ".indexer." in name}


def test_the_scores_taught_are_those_that_choose() -> None:
    model = build("dsa", TOKENIZER, top_k=5)
    found = []

    def note(indexer: torch.nn.Module, args: tuple[torch.Tensor, ...], chosen: torch.Tensor) -> None:
        x, low_rank, (cos, sin) = args[:3]
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        mine = scores(indexer, x, low_rank, cos, sin).masked_fill(later, float("-inf")).topk(5).indices
        found.append(torch.equal(mine[:, 5:].sort().values, chosen[:, 5:].sort().values))

    for indexer in indexers(model):
        indexer.register_forward_hook(note)
    model(torch.arange(4, 18).repeat(2)[None])
    assert found == [True] * 3


def test_another_model_is_refused() -> None:
    with pytest.raises(ValueError, match="'gqa'; allowed: mla, dsa"):
        build("gqa", TOKENIZER)
