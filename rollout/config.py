"""`RolloutConfig`: everything that is fixed for the life of a worker.

Invariant: an instance that exists is valid. Each error names the field, the value given and the values
allowed.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace

import torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
EVICTION_POLICIES = ("lru", "ref_zero")
WHILE_ASLEEP = ("raise", "wait")
DEVICES = ("cpu", "cuda")
DEFAULT_BLOCK_SIZE = 16
DEFAULT_KV_CACHE_BYTES = 1 << 30
DEFAULT_STATE_CACHE_BYTES = 1 << 28

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RolloutConfig:
    """How much memory a worker may use and how much it computes in one step.

    block_size: tokens in a KV block, a power of two; None for 16, or for the SSM chunk of a model with Mamba
        layers, which must divide it. No result depends on it.
    num_blocks, kv_cache_gb, gpu_memory_utilization: the size of the KV pool, given in one of the three ways; by default
        enough for `max_num_seqs` sequences of `max_model_len` tokens, but at most 1 GiB. The last, on CUDA alone, is
        the share of the device's memory that may be in use in all, whoever uses it: the pool takes what is left of it
        beside what is in use when the worker is built and what a step needs.
    max_num_seqs: sequences (samples) that run at once.
    max_num_batched_tokens: tokens computed in one step; longer prompts are computed in chunks.
    max_model_len: prompt and output together; None takes the model's own limit.
    enable_prefix_caching: requests share the KV of the tokens they begin with, samples of one request the
        whole prompt. No result depends on it.
    eviction_policy: "lru" keeps the KV that nobody uses until its memory is needed, "ref_zero" only while
        somebody uses it.
    state_cache_gb: memory for cached states of Mamba layers; None for a quarter of a GiB (at least one state), 0 for
        none: then a prefix that is hit saves memory only. Refused for models without such layers.
    dtype: "float32", "bfloat16", on CUDA "float16" too (or the torch dtypes), or "auto"/None for the checkpoint's own.
    device: "cpu", or "cuda" for the process's current CUDA device. A folder is loaded there; a module must be there.
    async_scheduling: launch a decode while the one before it still computes. None for yes on CUDA; on the CPU there is
        no time to gain. No result depends on it.
    enforce_eager: on CUDA, launch a step's kernels one by one instead of replaying CUDA graphs. No result depends on
        it. (On the CPU they always are.)
    num_threads: CPU threads of the generation thread; None leaves the process default.
    seed: base of the random numbers of requests that bring no seed.
    while_asleep: what a request does that comes while the worker sleeps, or after its weights were discarded and before
        others came: "raise" refuses it, "wait" queues it. (Those that came before always wait.)
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
    num_threads: int | None = None
    seed: int = 0
    while_asleep: str = "raise"
    exact: bool = True

    def __post_init__(self) -> None:
        if self.block_size is not None and not _power_of_two(self.block_size):
            raise ValueError(f"block_size must be a power of two (1, 2, 4, ...) or None, got {self.block_size!r}")
        self._check_pool_size()
        self._positive_int("max_num_seqs")
        self._positive_int("max_num_batched_tokens")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens must be at least max_num_seqs ({self.max_num_seqs}): each running "
                f"sequence computes one token a step; got {self.max_num_batched_tokens}"
            )
        if self.max_model_len is not None:
            self._positive_int("max_model_len")
            if self.max_model_len < 2:
                raise ValueError("max_model_len must be at least 2 (one prompt token, one new), got 1")
        if not isinstance(self.enable_prefix_caching, bool):
            raise ValueError(f"enable_prefix_caching must be True or False, got {self.enable_prefix_caching!r}")
        if self.eviction_policy not in EVICTION_POLICIES:
            allowed = " or ".join(map(repr, EVICTION_POLICIES))
            raise ValueError(f"eviction_policy must be {allowed}, got {self.eviction_policy!r}")
        self._check_state_cache()
        if self.num_threads is not None:
            self._positive_int("num_threads")
        if not _is_int(self.seed) or not 0 <= self.seed < 2**63:
            raise ValueError(f"seed must be an int from 0 to 2**63 - 1, got {self.seed!r}")
        if self.while_asleep not in WHILE_ASLEEP:
            allowed = " or ".join(map(repr, WHILE_ASLEEP))
            raise ValueError(f"while_asleep must be {allowed}, got {self.while_asleep!r}")
        for name in ("exact", "enforce_eager"):
            if not isinstance(self.__dict__[name], bool):
                raise ValueError(f"{name} must be True or False, got {self.__dict__[name]!r}")
        if self.async_scheduling is not None and not isinstance(self.async_scheduling, bool):
            raise ValueError(f"async_scheduling must be True, False or None, got {self.async_scheduling!r}")
        if self.device not in DEVICES:
            raise ValueError(f"device must be {' or '.join(map(repr, DEVICES))}, got {self.device!r}")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"device='cuda', but torch {torch.__version__} sees no CUDA device here; allowed: 'cpu'")
        self.torch_dtype()

    def torch_dtype(self) -> torch.dtype | None:
        """The dtype asked for, None for the checkpoint's own."""
        if self.dtype is None or self.dtype == "auto":
            return None
        allowed = self.allowed_dtypes()
        if isinstance(self.dtype, str) and self.dtype in allowed:
            return allowed[self.dtype]
        if isinstance(self.dtype, torch.dtype) and self.dtype in allowed.values():
            return self.dtype
        names = ", ".join(map(repr, ("auto", *allowed)))
        raise ValueError(f"dtype on {self.device!r} must be one of {names}, got {self.dtype!r}")

    def allowed_dtypes(self) -> dict[str, torch.dtype]:
        """What a model may be computed in on the device, by name."""
        return DTYPES if self.device == "cpu" else {**DTYPES, "float16": torch.float16}

    def with_block_size(self, ssm_chunk: int | None) -> RolloutConfig:
        """The same with a block size that suits the model; `ssm_chunk` is None without Mamba layers."""
        if self.block_size is None:
            return replace(self, block_size=DEFAULT_BLOCK_SIZE if ssm_chunk is None else ssm_chunk)
        if ssm_chunk is not None and self.block_size % ssm_chunk:
            raise ValueError(
                f"block_size must be a multiple of the model's SSM chunk ({ssm_chunk}), got {self.block_size}"
            )
        return self

    @property
    def runs_ahead(self) -> bool:
        """Whether a step is launched before the tokens of the one before it are read."""
        return self.device == "cuda" if self.async_scheduling is None else self.async_scheduling

    @property
    def num_held_states(self) -> int:
        """Prompts whose live state is kept for samples that begin later."""
        return max(1, self.max_num_seqs // 4) if self.enable_prefix_caching else 0

    def num_checkpoints(self, bytes_per_checkpoint: int) -> int:
        """States of Mamba layers that are cached, when one takes so many bytes over all layers (0: no such layers)."""
        if bytes_per_checkpoint == 0:
            if self.state_cache_gb is not None:
                raise ValueError(f"state_cache_gb={self.state_cache_gb}, but this model has no Mamba layers")
            return 0
        if not self.enable_prefix_caching:
            return 0
        if self.state_cache_gb is None:
            return max(1, DEFAULT_STATE_CACHE_BYTES // bytes_per_checkpoint)
        if self.state_cache_gb == 0:
            logger.warning("state_cache_gb=0: no state is cached, so a prefix that is hit saves memory, not computing")
            return 0
        count = int(self.state_cache_gb * 2**30) // bytes_per_checkpoint
        if count < 1:
            raise ValueError(
                f"state_cache_gb={self.state_cache_gb} does not hold one state of {bytes_per_checkpoint} bytes; "
                f"at least {_gib(bytes_per_checkpoint)} are needed, or 0 for no cached states"
            )
        return count

    def pool_blocks(self, bytes_per_block: int, max_model_len: int, bytes_left: int = 0) -> int:
        """Blocks in the KV pool of a model whose block takes `bytes_per_block` over all layers.

        bytes_left: for pages, of the share that is `gpu_memory_utilization`.
        """
        if self.block_size is None:
            raise ValueError("the block size is not decided yet: see with_block_size()")
        if self.num_blocks is not None:
            return self.num_blocks
        if self.kv_cache_gb is not None:
            blocks = int(self.kv_cache_gb * 2**30) // max(1, bytes_per_block)
            if blocks < 1:
                raise ValueError(
                    f"kv_cache_gb={self.kv_cache_gb} does not hold one block of {bytes_per_block} bytes "
                    f"(block_size={self.block_size}); at least {_gib(bytes_per_block)} are needed"
                )
            return blocks
        per_sequence = math.ceil(max_model_len / self.block_size)
        if self.gpu_memory_utilization is not None:
            blocks = bytes_left // max(1, bytes_per_block)
            if blocks < per_sequence:
                raise ValueError(
                    f"gpu_memory_utilization={self.gpu_memory_utilization} leaves {_gib(bytes_left)} GiB for pages; "
                    f"one sequence of max_model_len={max_model_len} needs {_gib(per_sequence * bytes_per_block)}"
                )
            return blocks
        affordable = max(DEFAULT_KV_CACHE_BYTES // max(1, bytes_per_block), per_sequence)
        return min(self.max_num_seqs * per_sequence, affordable)

    def _check_pool_size(self) -> None:
        fields = ("num_blocks", "kv_cache_gb", "gpu_memory_utilization")
        given = [f"{name}={self.__dict__[name]}" for name in fields if self.__dict__[name] is not None]
        if len(given) > 1:
            raise ValueError(f"give one of {', '.join(fields)}; got {' and '.join(given)}")
        if self.num_blocks is not None:
            self._positive_int("num_blocks")
        if self.kv_cache_gb is not None and not _positive_number(self.kv_cache_gb):
            raise ValueError(f"kv_cache_gb must be a number above 0, got {self.kv_cache_gb!r}")
        share = self.gpu_memory_utilization
        if share is not None:
            if not _positive_number(share) or share > 1:
                raise ValueError(f"gpu_memory_utilization must be a number above 0 and up to 1, got {share!r}")
            if self.device != "cuda":
                raise ValueError(
                    f"gpu_memory_utilization={share} needs device='cuda', got {self.device!r}; on the CPU give "
                    "kv_cache_gb or num_blocks"
                )

    def _check_state_cache(self) -> None:
        given = self.state_cache_gb
        if given is None:
            return
        if given != 0 and not _positive_number(given):
            raise ValueError(f"state_cache_gb must be a number of at least 0, got {given!r}")
        if not self.enable_prefix_caching:
            raise ValueError(f"state_cache_gb={given} needs enable_prefix_caching=True")

    def _positive_int(self, field: str) -> None:
        value = self.__dict__[field]
        if not _is_int(value) or value < 1:
            raise ValueError(f"{field} must be an int of at least 1, got {value!r}")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _power_of_two(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0 and value & (value - 1) == 0


def _gib(count: int) -> str:
    """GiB that hold so many bytes, to six digits, rounded up."""
    millionths = -(-count * 10**6 // 2**30)
    return f"{millionths // 10**6}.{millionths % 10**6:06d}"


def _positive_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return math.isfinite(value) and value > 0
