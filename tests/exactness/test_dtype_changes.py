"""A model whose dtype changes after `bind` is exact where it can be served, and a clear error where it can not."""

import pytest
import torch

from samebit.kernels import BindingError, bind, token_logprobs
from samebit.rollout import RolloutConfig, RolloutWorker, SamplingParams, WorkerStateError

from .compare import assert_matches_trainer
from .families import make_model

CONFIG = RolloutConfig(num_blocks=32, max_num_seqs=4, max_model_len=128)
PARAMS = SamplingParams(max_tokens=8, ignore_eos=True)


def test_moved_between_bind_and_worker_is_exact() -> None:
    model = bind(make_model("Qwen3")).to(torch.bfloat16)
    with RolloutWorker(model, config=CONFIG) as worker:
        assert_matches_trainer(model, worker.generate([[5, 6, 7]], PARAMS), [PARAMS])


def test_moved_under_a_living_worker_fails_with_the_cause() -> None:
    model = make_model("Qwen3")
    with RolloutWorker(model, config=CONFIG) as worker:
        worker.generate([[5, 6, 7]], PARAMS)
        model.to(torch.bfloat16)
        with pytest.raises(WorkerStateError, match="changed its dtype"):
            worker.generate([[5, 6, 7]], PARAMS)


def test_changed_inside_an_update_it_is_named_there_and_restored_it_is_exact() -> None:
    model = make_model("Qwen3")
    with RolloutWorker(model, config=CONFIG) as worker:
        named = r"embed_tokens\.weight was .* float32, and is .* bfloat16"
        with pytest.raises(WorkerStateError, match=named), worker.weight_update():
            model.to(torch.bfloat16)
        model.to(torch.float32)
        worker.receive_weights()
        assert_matches_trainer(model, worker.generate([[5, 6, 7]], PARAMS), [PARAMS])


def test_a_correction_of_another_shape_is_named_at_the_end_of_the_update() -> None:
    model = make_model("Glm4Moe")
    name, router = next((one, part) for one, part in model.named_modules() if hasattr(part, "e_score_correction_bias"))
    right = router.e_score_correction_bias
    with RolloutWorker(model, config=CONFIG) as worker:
        with pytest.raises(WorkerStateError, match=rf"{name}\.e_score_correction_bias was"), worker.weight_update():
            router.e_score_correction_bias = torch.zeros(len(right) + 1)
        router.e_score_correction_bias = right
        worker.receive_weights()
        assert_matches_trainer(model, worker.generate([[5, 6, 7]], PARAMS), [PARAMS])


def test_half_is_refused_although_the_model_was_bound_before() -> None:
    model = bind(make_model("Qwen3")).half()
    with pytest.raises(BindingError, match="float16"):
        bind(model)


@pytest.mark.parametrize("start", [1, 5])
def test_positions_that_the_rollout_would_not_have_are_refused(start: int) -> None:
    model = bind(make_model("Qwen3"))
    with pytest.raises(ValueError, match="must start at position 0"):
        token_logprobs(model, torch.tensor([[5, 6, 7]]), position_ids=torch.arange(start, start + 3)[None])
