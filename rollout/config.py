"""Configure a worker: `RolloutConfig` holds everything that is fixed for its life. `memory.pool_sizes` says what
memory it buys.

Invariant: an instance that exists is valid. Each error names the field, the value given and the values
allowed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from samebit.kernels.layout.grids import KV_CHUNK
from samebit.rollout.checks import (
    as_bool,
    as_int,
    as_name,
    as_number,
    check_bool,
    check_one_of,
    check_positive_int,
    is_positive_number,
    shown,
)
from samebit.rollout.keys.digest_key import DigestKey

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
EVICTION_POLICIES = ("lru", "ref_zero")
WHILE_ASLEEP = ("raise", "wait")
DEVICES = ("cpu", "cuda")
DEFAULT_BLOCK_SIZE = 16
SMALLEST_BLOCK = {"cpu": 1, "cuda": KV_CHUNK}
"""Holds the fewest tokens of a block by device: on a GPU a tile of keys is loaded in one piece."""

DEFAULT_GPU_SHARE = 0.85
DEFAULT_STEP_TOKENS = {"cpu": 16, "cuda": 64}
"""Holds by device up to how many tokens a step is filled with guesses: there it takes hardly longer than with one."""


_OF_DRAFTS = (
    "prompt_lookup_min", "speculative_step_tokens", "speculative_history_tokens", "draft_model", "draft_revision",
    "draft_cache_gb",
)  # fmt: skip

_PLAIN: dict[str, Callable[[object], object]] = {
    **dict.fromkeys(("block_size", "num_blocks", "max_num_seqs", "max_num_batched_tokens", "max_model_len"), as_int),
    **dict.fromkeys(("num_threads", "seed", "num_speculative_tokens", "prompt_lookup_min"), as_int),
    **dict.fromkeys(("speculative_step_tokens", "speculative_history_tokens"), as_int),
    **dict.fromkeys(("kv_cache_gb", "gpu_memory_utilization", "state_cache_gb", "draft_cache_gb"), as_number),
    "draft_model": as_name,
    **dict.fromkeys(
        ("enable_prefix_caching", "async_scheduling", "enforce_eager", "dequantize", "self_test", "exact"), as_bool
    ),
    "images": as_bool,
}
"""Holds the converters that take a field's value as Python's own."""


@dataclass(frozen=True)
class RolloutConfig:
    """Says how much memory a worker may use and how much it computes in one step.

    block_size: tokens in a KV block, a power of two, on CUDA of at least 64; None for the SSM chunk of a model with
        recurrent layers, which must divide it, else for 16, on CUDA at least 64. No result depends on it.
    num_blocks, kv_cache_gb, gpu_memory_utilization: the size of the KV pool, given in one of the three ways; by default
        on the CPU enough for `max_num_seqs` sequences of `max_model_len` tokens, but at most 1 GiB, on CUDA a share of
        .85. The last, on CUDA alone, is the share of the device's memory that may be in use by all processes: the
        pool takes what is left of it beside what is in use when the worker is built and what a step needs.
    max_num_seqs: sequences (samples) that run at once.
    max_num_batched_tokens: tokens computed in one step; longer prompts are computed in chunks.
    max_model_len: prompt and output together; None takes the model's own limit.
    enable_prefix_caching: requests share the KV of the tokens they begin with, samples of one request the
        whole prompt. No result depends on it.
    eviction_policy: "lru" keeps the KV that no request uses until its memory is needed, "ref_zero" only while
        one uses it.
    state_cache_gb: memory for cached states of recurrent layers; None for a quarter of a GiB (at least one state), 0
        for none: then a prefix that is hit saves memory only. Refused for models without such layers.
    dtype: "float32", "bfloat16", on CUDA "float16" too (or the torch dtypes), or "auto"/None for the folder's own.
    device: "cpu", or "cuda". A folder is loaded onto the current CUDA device; a module is on a GPU already, on one.
    async_scheduling: launch a decode while the one before it still computes. None for yes on CUDA; on the CPU there is
        no time to gain. No result depends on it.
    enforce_eager: on CUDA, launch a step's kernels one by one instead of replaying CUDA graphs. No result depends on
        it. (On the CPU they always are.)
    num_speculative_tokens: guess up to so many tokens ahead of each sequence, after n-grams of prompts and outputs, and
        compute them in one step; 0 for none. No result depends on it.
    prompt_lookup_min: tokens that must have stood there before, for a guess of what follows them.
    speculative_step_tokens: only steps of fewer tokens are filled up with guesses, to so many; None for 16, on CUDA 64.
    speculative_history_tokens: so many tokens of outputs are kept, to guess from when their prompts come again. (How
        tokens are guessed: docs/speculation.md.)
    draft_model: a folder or a name of the Hugging Face hub, of a smaller model with the same tokenizer, which guesses
        where no n-gram has come before; None for none. No result depends on it.
    draft_revision: a branch, tag or commit of a draft model that is given by its name on the hub; None for its main
        branch. Refused for a folder.
    draft_cache_gb: memory for its keys and values; None for what the sequences of a step take at their longest, but at
        most 1 GiB.
    num_threads: CPU threads of the generation thread; None for those of the thread that builds the worker.
    seed: base of the random numbers of requests that bring no seed.
    while_asleep: what a request does that comes while the worker sleeps, or after its weights were discarded and before
        new ones came: "raise" refuses it, "wait" queues it. (Those that came before always wait.)
    revision: a branch, tag or commit of a model that is given by its name on the Hugging Face hub; None for its main
        branch. Refused for a folder or a module.
    digest_key: the secret that cached blocks are named with; None for a new one. The workers of a fleet have one key,
        so that its router knows what each has cached. It shows in no repr, and is pickled only to start a replica.
    images: a folder with vision is loaded as the whole model, which takes images, and not as its text model; on the
        CPU. A module takes images if it can, with False too; True refuses one that can not.
    dequantize: take the weights of a folder that holds them quantized (mxfp4, or fp8) as bfloat16; or in the model's
        dtype where the worker is built with `dtype`, or an update says `cast=True`. They are refused otherwise.
    self_test: compare rows of the model, by every way to compute them, before the worker starts (seconds; where that
        has passed before, not again). None for yes on CUDA.
    exact: True keeps the promise of bit-equal log-probabilities. False drops what exactness costs, for
        measuring it.
    """

    block_size: int | None = None
    num_blocks: int | None = None
    kv_cache_gb: float | None = None
    gpu_memory_utilization: float | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    max_model_len: int | None = None
    enable_prefix_caching: bool = True
    eviction_policy: str = "lru"
    state_cache_gb: float | None = None
    dtype: str | torch.dtype | None = None
    device: str = "cpu"
    async_scheduling: bool | None = None
    enforce_eager: bool = False
    num_speculative_tokens: int = 0
    prompt_lookup_min: int = 3
    speculative_step_tokens: int | None = None
    speculative_history_tokens: int = 1 << 26
    draft_model: str | Path | None = None
    draft_revision: str | None = None
    draft_cache_gb: float | None = None
    num_threads: int | None = None
    seed: int = 0
    while_asleep: str = "raise"
    revision: str | None = None
    images: bool = False
    dequantize: bool = False
    self_test: bool | None = None
    digest_key: DigestKey | None = field(default=None, repr=False)
    exact: bool = True

    def __post_init__(self) -> None:
        self._take_plain_values()
        self._check_simple_fields()
        self._check_block_size()
        self._check_pool_size()
        self._check_step_size()
        self._check_drafts()
        self._check_state_cache()
        self._check_digest_key()
        if self.images and self.device != "cpu":
            raise ValueError(
                f"images=True needs device='cpu', got {shown(self.device)}: no GPU has run vision's kernels"
            )
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"device='cuda', but torch {torch.__version__} sees no CUDA device here; allowed: 'cpu'")
        self.torch_dtype()

    def torch_dtype(self) -> torch.dtype | None:
        """Return the dtype asked for, None for the folder's own."""
        if self.dtype is None or self.dtype == "auto":
            return None
        allowed = self.allowed_dtypes()
        if isinstance(self.dtype, str) and self.dtype in allowed:
            return allowed[self.dtype]
        if isinstance(self.dtype, torch.dtype) and self.dtype in allowed.values():
            return self.dtype
        names = ", ".join(map(repr, ("auto", *allowed)))
        raise ValueError(f"dtype on {self.device!r} must be one of {names}, got {shown(self.dtype)}")

    def allowed_dtypes(self) -> dict[str, torch.dtype]:
        """Return the dtypes that a model may be computed in on the device, by name."""
        return DTYPES if self.device == "cpu" else {**DTYPES, "float16": torch.float16}

    def with_block_size(self, ssm_chunk: int | None) -> RolloutConfig:
        """Return the same with a block size that suits the model; `ssm_chunk` is None without recurrent layers."""
        if self.block_size is None:
            usual = DEFAULT_BLOCK_SIZE if ssm_chunk is None else ssm_chunk
            return replace(self, block_size=max(usual, SMALLEST_BLOCK[self.device]))
        if ssm_chunk is not None and self.block_size % ssm_chunk:
            raise ValueError(
                f"block_size must be a multiple of the model's SSM chunk ({ssm_chunk}), got {self.block_size}"
            )
        return self

    @property
    def decided_block_size(self) -> int:
        """Return the tokens of a block.

        Raises:
            ValueError: it depends on the model, and `with_block_size` was not called.
        """
        if self.block_size is None:
            raise ValueError("the block size is not decided yet: see RolloutConfig.with_block_size()")
        return self.block_size

    @property
    def runs_ahead(self) -> bool:
        """Return whether a step is launched before the tokens of the one before it are read."""
        default = self.device == "cuda" and not self.num_speculative_tokens
        return default if self.async_scheduling is None else self.async_scheduling

    @property
    def decided_step_tokens(self) -> int:
        """Return up to how many tokens a step is filled with guesses."""
        given = self.speculative_step_tokens
        return DEFAULT_STEP_TOKENS[self.device] if given is None else given

    @property
    def most_drawn_rows(self) -> int:
        """Return from how many rows of a step tokens are drawn at most: guesses of a sequence are rows too."""
        return max(self.max_num_seqs, self.decided_step_tokens if self.num_speculative_tokens else 0)

    @property
    def tests_itself(self) -> bool:
        """Return whether a worker compares its rows before it starts."""
        return (self.device == "cuda" and self.exact) if self.self_test is None else self.self_test

    @property
    def gpu_share(self) -> float | None:
        """Return the share of the device's memory that the KV pool is sized by; None where it is sized otherwise."""
        if self.device != "cuda" or self.num_blocks is not None or self.kv_cache_gb is not None:
            return None
        return DEFAULT_GPU_SHARE if self.gpu_memory_utilization is None else self.gpu_memory_utilization

    def _check_block_size(self) -> None:
        check_one_of("device", self.device, DEVICES)
        if self.block_size is None:
            return
        if not _power_of_two(self.block_size):
            raise ValueError(f"block_size must be a power of two (1, 2, 4, ...) or None, got {shown(self.block_size)}")
        least = SMALLEST_BLOCK[self.device]
        if self.block_size < least:
            raise ValueError(
                f"block_size on {self.device!r} must be a power of two from {least} on or None, got {self.block_size}"
            )

    def _check_step_size(self) -> None:
        check_positive_int("max_num_seqs", self.max_num_seqs)
        check_positive_int("max_num_batched_tokens", self.max_num_batched_tokens)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens must be at least max_num_seqs ({self.max_num_seqs}): each running "
                f"sequence computes one token a step; got {self.max_num_batched_tokens}"
            )
        if self.max_model_len is not None:
            check_positive_int("max_model_len", self.max_model_len)
            if self.max_model_len < 2:
                raise ValueError("max_model_len must be at least 2 (one prompt token, one new), got 1")

    def _check_drafts(self) -> None:
        for name in ("num_speculative_tokens", "speculative_history_tokens"):
            given = vars(self)[name]
            if as_int(given) is None or given < 0:
                raise ValueError(f"{name} must be an int of at least 0, got {shown(given)}")
        check_positive_int("prompt_lookup_min", self.prompt_lookup_min)
        if self.speculative_step_tokens is not None:
            check_positive_int("speculative_step_tokens", self.speculative_step_tokens)
        given = [name for name in _OF_DRAFTS if vars(self)[name] != vars(RolloutConfig)[name]]
        if given and not self.num_speculative_tokens:
            raise ValueError(
                f"{' and '.join(given)} say how tokens are guessed, and num_speculative_tokens=0 guesses none"
            )
        if self.draft_model is not None and not (isinstance(self.draft_model, str) and self.draft_model):
            raise ValueError(
                "draft_model must be a model folder, a name of the Hugging Face hub or None, got "
                + shown(self.draft_model)
            )
        if self.draft_cache_gb is not None and not is_positive_number(self.draft_cache_gb):
            raise ValueError(f"draft_cache_gb must be a number above 0 or None, got {shown(self.draft_cache_gb)}")
        if self.draft_cache_gb is not None and self.draft_model is None:
            raise ValueError(f"draft_cache_gb={self.draft_cache_gb} is the memory of a draft_model, and none is given")
        if self.draft_revision is not None and self.draft_model is None:
            raise ValueError(f"draft_revision={self.draft_revision!r} is of a draft_model, and none is given")
        if self.num_speculative_tokens and self.async_scheduling:
            raise ValueError(
                f"async_scheduling=True launches a step before the tokens are known that "
                f"num_speculative_tokens={self.num_speculative_tokens} guesses from; allowed with it: False or None"
            )

    def _check_simple_fields(self) -> None:
        """Check the fields whose values depend on no other field, and what self_test may be."""
        check_one_of("eviction_policy", self.eviction_policy, EVICTION_POLICIES)
        check_one_of("while_asleep", self.while_asleep, WHILE_ASLEEP)
        check_bool("enable_prefix_caching", self.enable_prefix_caching)
        check_bool("images", self.images)
        check_bool("dequantize", self.dequantize)
        check_bool("exact", self.exact)
        check_bool("enforce_eager", self.enforce_eager)
        if self.num_threads is not None:
            check_positive_int("num_threads", self.num_threads)
        if as_int(self.seed) is None or not 0 <= self.seed < 2**63:
            raise ValueError(f"seed must be an int from 0 to 2**63 - 1, got {shown(self.seed)}")
        for name, revision in (("revision", self.revision), ("draft_revision", self.draft_revision)):
            if revision is not None and not (isinstance(revision, str) and revision):
                raise ValueError(f"{name} must be a non-empty string or None, got {shown(revision)}")
        for name, given in (("async_scheduling", self.async_scheduling), ("self_test", self.self_test)):
            if given is not None and not isinstance(given, bool):
                raise ValueError(f"{name} must be True, False or None, got {shown(given)}")
        if self.self_test and not self.exact:
            raise ValueError("self_test=True compares what exact=False gives up; allowed with it: False or None")

    def _check_pool_size(self) -> None:
        ways = {
            "num_blocks": self.num_blocks,
            "kv_cache_gb": self.kv_cache_gb,
            "gpu_memory_utilization": self.gpu_memory_utilization,
        }
        given = [f"{name}={value}" for name, value in ways.items() if value is not None]
        if len(given) > 1:
            raise ValueError(f"give one of {', '.join(ways)}; got {' and '.join(given)}")
        if self.num_blocks is not None:
            check_positive_int("num_blocks", self.num_blocks)
        if self.kv_cache_gb is not None and not is_positive_number(self.kv_cache_gb):
            raise ValueError(f"kv_cache_gb must be a number above 0, got {shown(self.kv_cache_gb)}")
        share = self.gpu_memory_utilization
        if share is not None:
            if not is_positive_number(share) or share > 1:
                raise ValueError(f"gpu_memory_utilization must be a number above 0 and up to 1, got {shown(share)}")
            if self.device != "cuda":
                raise ValueError(
                    f"gpu_memory_utilization={share} needs device='cuda', got {shown(self.device)}; on the CPU give "
                    "kv_cache_gb or num_blocks"
                )

    def _check_state_cache(self) -> None:
        given = self.state_cache_gb
        if given is None:
            return
        number = as_number(given)
        if number is None or number < 0:
            raise ValueError(f"state_cache_gb must be a number of at least 0, got {shown(given)}")
        if not self.enable_prefix_caching:
            raise ValueError(f"state_cache_gb={given} needs enable_prefix_caching=True")

    def _check_digest_key(self) -> None:
        if self.digest_key is None:
            return
        if not isinstance(self.digest_key, DigestKey):
            raise ValueError(f"digest_key must be a DigestKey or None, got {type(self.digest_key).__name__}")
        if not self.enable_prefix_caching:
            raise ValueError("digest_key needs enable_prefix_caching=True: without it no block is named")

    def _take_plain_values(self) -> None:
        """Replace NumPy's scalars by Python's; what is neither is left for the checks to name."""
        for name, value in list(vars(self).items()):
            plain = _PLAIN[name](value) if name in _PLAIN else None
            if plain is not None:
                object.__setattr__(self, name, plain)


def _power_of_two(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0 and value & (value - 1) == 0
