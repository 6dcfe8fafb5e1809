"""Build the parts of a worker from a model.

Invariants
----------
* No request runs yet, and no thread exists, when the parts are there.
* What the calling thread has chosen for new tensors and launches (`torch.set_default_device`, `torch.cuda.set_device`)
  changes nothing: arrays of the host are on the host, and a model's kernels run on the GPU that it is on.
* Nor does `torch.inference_mode`, which is of one thread: another one, as that which generates, may not write to
  tensors that were made in it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numba
import torch
from torch import nn

from samebit.kernels import bind
from samebit.kernels.binding.binding import binding_of, is_bound
from samebit.kernels.layout.grids import SCAN_CHUNK
from samebit.kernels.layout.images.image_layout import ImageLayout
from samebit.rollout.adapters.base import Base
from samebit.rollout.adapters.loading import AdapterOptions, read_adapter
from samebit.rollout.adapters.registry import FIRST, FIRST_NUMBER, AdapterRegistry
from samebit.rollout.cache import Cache, build_cache
from samebit.rollout.checks import shown
from samebit.rollout.config import RolloutConfig
from samebit.rollout.control.compute_threads import ComputeThreads
from samebit.rollout.control.weights.worker_weights import WorkerWeights
from samebit.rollout.drafts.drafter import Drafter, DraftOptions
from samebit.rollout.engine.draft_model import DraftModel
from samebit.rollout.engine.engine import Engine
from samebit.rollout.memory.pool_sizes import check_room, count_blocks
from samebit.rollout.models.draft import load_draft_model
from samebit.rollout.models.kinds import check_computes_images
from samebit.rollout.models.loading import LoadedModel, load_model, naming
from samebit.rollout.requests.limits import RequestLimits
from samebit.rollout.requests.stopping import known_end_tokens
from samebit.rollout.requests.tokenizer import Tokenizer
from samebit.rollout.runner.cuda_pool_size import kv_cache_bytes
from samebit.rollout.runner.model_runner import ModelRunner
from samebit.rollout.self_test.self_test import self_test
from samebit.weight_sync.in_place.watch import WeightWatch


@dataclass(frozen=True)
class WorkerParts:
    """Holds what a worker is made of.

    config: with the block size that was chosen. has_experts: routed ones, whose choice can be noted.
    dtype: of the weights. images: what the model takes images as; None where it computes text alone, and why.
    """

    config: RolloutConfig
    engine: Engine
    weights: WorkerWeights
    adapters: AdapterRegistry
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    tokenizer: Tokenizer | None
    has_experts: bool
    dtype: torch.dtype
    threads: ComputeThreads
    images: ImageLayout | None = None
    why_no_images: str = ""

    def limits(self) -> RequestLimits:
        """Return what the model and its memory allow a request."""
        cache = self.engine.cache
        return RequestLimits(
            vocab_size=self.engine.runner.vocab_size,
            max_model_len=self.max_model_len,
            block_size=cache.block_size,
            num_blocks=cache.pool.num_blocks,
            has_tokenizer=self.tokenizer is not None,
            has_experts=self.has_experts,
            dtype=self.dtype,
            device=self.config.device,
            images=self.images,
            why_no_images=self.why_no_images,
        )


@torch.inference_mode(False)
def build(model: str | Path | nn.Module, config: RolloutConfig, tokenizer: Tokenizer | None) -> WorkerParts:
    """Load the model, or take the trainer's, bind it, test it where that is asked for, and size its memory."""
    _check_given(config, tokenizer)
    _check_threads(config.num_threads)
    base = Base.of(model, config.revision).resolved()
    if tokenizer is None:
        tokenizer = base.tokenizer()  # before the weights, which take longer to read
    loaded = load_model(base.model, replace(config, revision=base.revision))
    with naming(model):
        _bind(loaded.module, config)
    with torch.device("cpu"), torch.cuda.device_of(loaded.module.get_parameter("lm_head.weight")):
        return _assembled(loaded, base, config, tokenizer)


def _assembled(loaded: LoadedModel, base: Base, config: RolloutConfig, tokenizer: Tokenizer | None) -> WorkerParts:
    """Test a bound model where that is asked for, and give it memory."""
    config = config.with_block_size(binding_of(loaded.module).ssm_chunk)
    self_test(loaded.module, config, loaded.max_model_len)
    runner = ModelRunner(loaded.module, config)
    # before the pages, which take what it leaves of a GPU's memory
    draft = load_draft_model(config, loaded.module, loaded.max_model_len)
    engine = Engine(
        runner,
        _cache(runner, config, loaded.max_model_len, 0 if draft is None else draft.pool_bytes),
        config.max_num_batched_tokens,
        run_ahead=config.runs_ahead,
        drafter=_drafter(runner, config, None if draft is None else draft.model),
        watch=WeightWatch(loaded.module if loaded.shared else None),
    )
    runner.warm_up(engine.cache.tables.rows)
    return WorkerParts(
        config,
        engine,
        WorkerWeights(
            loaded.module,
            shared=loaded.shared,
            users=binding_of(loaded.module).users,
            dequantize=config.dequantize,
            exact=config.exact,
            watch=engine.watch,
        ),
        max_model_len=loaded.max_model_len,
        eos_token_ids=known_end_tokens(loaded.eos_token_ids, runner.vocab_size, "the model's eos_token_id"),
        tokenizer=tokenizer,
        has_experts=runner.shape.routes is not None,
        dtype=runner.shape.dtype,
        adapters=_adapters(loaded.module, base.adapter),
        threads=ComputeThreads(config.num_threads, runner.shape.device),
        images=binding_of(loaded.module).images,
        why_no_images=binding_of(loaded.module).why_no_images,
    )


def _drafter(runner: ModelRunner, config: RolloutConfig, model: DraftModel | None) -> Drafter | None:
    """Return what guesses tokens ahead, None where nobody has asked for it."""
    if not config.num_speculative_tokens:
        return None
    states = runner.shape.states
    return Drafter(
        DraftOptions(
            num_tokens=config.num_speculative_tokens if states is None else states.guesses,
            gram=config.prompt_lookup_min,
            step_tokens=config.decided_step_tokens,
            history_tokens=config.speculative_history_tokens,
            chunk=None if states is None else SCAN_CHUNK,
        ),
        model,
    )


def _check_given(config: object, tokenizer: object) -> None:
    if not isinstance(config, RolloutConfig):
        raise TypeError(f"config must be a RolloutConfig or None, got {shown(config)}")
    if tokenizer is not None and not isinstance(tokenizer, Tokenizer):
        raise TypeError(
            "tokenizer must have a method decode(token_ids, skip_special_tokens=True), as those of transformers have, "
            f"or be None; got {shown(tokenizer)}"
        )


def _cache(runner: ModelRunner, config: RolloutConfig, max_model_len: int, draft_pool: int) -> Cache:
    """Choose how many blocks there are, and build the cache that owns them. draft_pool: bytes of a draft model's."""
    shape = runner.shape
    bytes_per_block = shape.bytes_per_block()
    num_blocks = count_blocks(config, bytes_per_block, max_model_len, _bytes_left(runner, config))
    live_states = shape.bytes_of_live_states(num_blocks)
    cached_states = shape.bytes_of_checkpoints()
    check_room(config, num_blocks, bytes_per_block, live_states, cached_states, draft_pool=draft_pool)
    return build_cache(
        num_blocks=num_blocks,
        block_size=shape.block_size,
        max_num_seqs=config.max_num_seqs,
        max_model_len=max_model_len,
        prefix_caching=config.enable_prefix_caching,
        eviction_policy=config.eviction_policy,
        checkpoints=shape.checkpoint_pool(),
        digest_key=config.digest_key,
    )


def _bytes_left(runner: ModelRunner, config: RolloutConfig) -> int:
    """Return what is left for pages of the share of the device's memory in the config; 0 where it names none."""
    share = config.gpu_share
    if share is None:
        return 0
    logits = config.most_drawn_rows * runner.vocab_size * torch.float32.itemsize
    return kv_cache_bytes(
        runner.model, share, config.max_num_batched_tokens, config.most_drawn_rows,
        runner.shape.bytes_of_states() + logits,
    )  # fmt: skip


def _adapters(module: nn.Module, folder: Path | None) -> AdapterRegistry:
    """Return the module's adapter registry. If the model was loaded from an adapter folder, that adapter is the default
    for requests that name none."""
    registry = AdapterRegistry(module)
    if folder is not None:
        loaded, _ = read_adapter(FIRST, folder, AdapterOptions(number=FIRST_NUMBER), module, registry)
        registry.put(loaded)
        registry.choose(FIRST)
    return registry


def _bind(module: nn.Module, config: RolloutConfig) -> None:
    """Bind the module; one that the trainer has bound keeps the SSM chunk that is recorded on it.

    Raises:
        ModelLoadError: images were asked for, and it computes text alone.
    """
    recorded = binding_of(module).ssm_chunk if is_bound(module) else None
    if recorded is None:
        bind(module, exact=config.exact)
    else:
        bind(module, ssm_chunk=recorded, exact=config.exact)
    if config.images:
        check_computes_images(module)


def _check_threads(num_threads: int | None) -> None:
    most: int = numba.config.NUMBA_NUM_THREADS
    if num_threads is not None and num_threads > most:
        raise ValueError(f"num_threads must be at most {most} (NUMBA_NUM_THREADS of this process), got {num_threads}")
