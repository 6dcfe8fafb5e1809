"""Run samebit as a contestant."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager

from transformers import PreTrainedModel

from samebit.benchmarks.engines.messages import timed
from samebit.benchmarks.workloads.workload import Run, Timed, Tokens, Workload
from samebit.rollout import RolloutConfig, RolloutWorker, SamplingParams


@contextmanager
def samebit(model: PreTrainedModel, workload: Workload, *, exact: bool) -> Iterator[tuple[Run, RolloutWorker]]:
    """Make a worker on a copy of the model, with the default limits and room for all sequences at once."""
    config = RolloutConfig(exact=exact, max_num_seqs=workload.sequences)
    with RolloutWorker(copy.deepcopy(model), config=config) as worker:

        def run(prompts: Tokens, new_tokens: int) -> Timed:
            params = SamplingParams(n=workload.samples, temperature=1.0, max_tokens=new_tokens, ignore_eos=True)
            return timed(
                lambda: [sample.token_ids for out in worker.generate(prompts, params) for sample in out.samples]
            )

        yield run, worker
