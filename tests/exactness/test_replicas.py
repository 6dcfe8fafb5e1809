"""A bound model is exact under DistributedDataParallel, and in units of FSDP2, with gloo."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from samebit.kernels import BindingError, bind, token_logprobs
from samebit.rollout import RolloutConfig, RolloutWorker, SamplingParams

from ..forked import run_ranks
from ..patience import HANG
from .families import bound_model, make_model

SCRIPT = Path(__file__).with_name("ddp_rank.py")
IDS = torch.zeros(1, 4, dtype=torch.int64)


def test_ranks_that_score_other_tokens_have_the_mean_of_their_gradients(tmp_path: Path) -> None:
    codes, said = run_ranks(SCRIPT, 2, tmp_path, "2", patience=HANG)
    assert codes == [0, 0], said
    assert said.count("all went well") == 2


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.FileStore(f"{tmp_path}/store", 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_nobody_is_sent_to_what_replicas_hold() -> None:
    """No error tells to call what replicas hold, as a call of that would leave the ranks' gradients as they are."""
    compiled = torch.compile(DistributedDataParallel(bound_model("Llama")))
    with pytest.raises(ValueError, match="OptimizedModule is not bound, but what it wraps is: give its _orig_mod"):
        token_logprobs(compiled, IDS)
    for model in (torch.compile(bound_model("Llama")), make_model("Llama")):
        says = f"DistributedDataParallel holds a {type(model).__name__}, which is not bound: build it around what "
        with pytest.raises(ValueError, match=says):
            token_logprobs(DistributedDataParallel(model), IDS)


@pytest.mark.usefixtures("one_rank")
def test_a_worker_takes_the_model_that_replicas_hold() -> None:
    model = bound_model("Llama")
    replicas = DistributedDataParallel(model)
    with pytest.raises(ValueError, match=r"a Hugging Face causal language model \(.*\), got DistributedDataParallel"):
        RolloutWorker(replicas)
    with RolloutWorker(replicas.module, config=RolloutConfig(num_blocks=8)) as worker:
        sample = worker.generate([[5, 6, 7]], SamplingParams(max_tokens=4))[0].samples[0]
    scores = token_logprobs(replicas, torch.tensor([[5, 6, 7, *sample.token_ids]]))
    assert scores[0, 2:].tolist() == list(sample.logprobs)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("policy", "rounds"),
    [
        (MixedPrecisionPolicy(param_dtype=torch.bfloat16), True),
        (MixedPrecisionPolicy(output_dtype=torch.bfloat16), True),
        (MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False), False),
        (MixedPrecisionPolicy(), False),
    ],
)
def test_units_that_round_a_residual_stream_of_float32_are_refused(policy: MixedPrecisionPolicy, rounds: bool) -> None:
    """Units that would round a residual stream of float32 are refused: Mamba2's log-probabilities would be neither
    those of a bfloat16 model nor those of a float32 one.
    """
    dtype = torch.float32 if policy.param_dtype is None else torch.bfloat16
    whole = bind(make_model("Mamba2").to(dtype))
    expected = token_logprobs(whole, IDS)
    model = bind(make_model("Mamba2"))
    for layer in model.backbone.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=policy.param_dtype))
    if rounds:
        with pytest.raises(
            BindingError, match=r"stream of this model is float32, and \w+ is sharded with Mixed.*rounds"
        ):
            token_logprobs(model, IDS)
    else:
        assert torch.equal(token_logprobs(model, IDS), expected)
