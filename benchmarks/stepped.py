"""An engine without threads, that a benchmark steps by hand."""

import numpy as np
from transformers import PreTrainedModel
from workload import Tokens

from samebit.rollout import RolloutConfig, SamplingParams
from samebit.rollout.cache import CacheManager
from samebit.rollout.engine import Engine
from samebit.rollout.request import Request
from samebit.rollout.runner import ModelRunner


def engine_for(model: PreTrainedModel, sequences: int, max_len: int, *, prefix_caching: bool = True) -> Engine:
    """With slots and blocks for so many sequences of `max_len` tokens; the model is bound already."""
    config = RolloutConfig(max_num_seqs=sequences, enable_prefix_caching=prefix_caching).with_block_size(None)
    runner = ModelRunner(model, config)
    cache = CacheManager(
        num_blocks=sequences * -(-max_len // runner.block_size),
        block_size=runner.block_size,
        max_num_seqs=sequences,
        max_model_len=max_len,
        prefix_caching=prefix_caching,
    )
    return Engine(runner, cache, config.max_num_batched_tokens)


def add(engine: Engine, prompts: Tokens, samples: int, new_tokens: int) -> None:
    """Queue some samples of each prompt; none of them stops early."""
    params = SamplingParams(n=samples, temperature=1.0, max_tokens=new_tokens, ignore_eos=True)
    for number, prompt in enumerate(prompts):
        ids = np.array(prompt, np.int64)
        engine.add(Request(f"prompt-{number}", ids, params, ordinal=number, max_new_tokens=new_tokens))
