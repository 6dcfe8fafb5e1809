"""Choose the next token: logit processing, counter-based random numbers, inverse-CDF sampling.

Contract: a row's choice depends on that row's logits, parameters and counter alone. Processing changes the
choice, never the reported log-probability, which comes from the unprocessed logits.
"""

import numpy as np
import numpy.typing as npt
import torch

from samebit.kernels.layout import device
from samebit.kernels.layout.options import Filters
from samebit.kernels.layout.shape_checks import check_dtype, check_host, check_shape
from samebit.kernels.layout.transfer import indices, sent
from samebit.kernels.ops.dispatch import operations_for, whole_calls

_RULED_OUT = float("-inf")


def uniforms(keys: torch.Tensor, counters: torch.Tensor) -> torch.Tensor:
    """Compute a uniform number in [0, 1) with 53 bits for each row, from Philox4x32-10 (Salmon et al. 2011).

    Args:
        keys: ``[T, 2]`` uint32.
        counters: ``[T, 4]`` uint32.

    Returns:
        ``[T]`` float64 on the device of the counters, the same bits on each.
    """
    check_shape("keys", keys, len(counters), 2)
    check_shape("counters", counters, len(counters), 4)
    if not device.on_gpu(counters):
        for name, part in (("keys", keys), ("counters", counters)):
            check_host(name, part)
            check_dtype(name, part, torch.uint32)
    return operations_for(counters).uniforms(keys, counters)


def draw(logits: torch.Tensor, temperatures: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Sample one token a row from softmax(logits / temperature); greedy (lowest id on ties) at temperature 0.

    Args:
        logits: ``[T, V]`` float32, contiguous; -inf rules a token out.
        temperatures: ``[T]`` float32, not negative.
        uniform: ``[T]`` float64 in [0, 1).

    Returns:
        ``[T]`` int64 on the device of the logits; -1 for a row from which nothing can be drawn.
    """
    if logits.dim() != 2:
        raise ValueError(f"logits has the shape {list(logits.shape)}; allowed: [R, V]")
    check_shape("temperatures", temperatures, len(logits))
    check_shape("uniform", uniform, len(logits))
    if not device.on_gpu(logits):
        for name, part in (("logits", logits), ("temperatures", temperatures), ("uniform", uniform)):
            check_host(name, part)
            check_dtype(name, part, torch.float64 if name == "uniform" else torch.float32)
    return operations_for(logits).draw(logits, temperatures, uniform)


def sample(
    logits: torch.Tensor, temperatures: torch.Tensor, keys: torch.Tensor, counters: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Draw one token a row and score it, in one call where the device has such a call; None elsewhere.

    Args:
        logits: ``[T, V]`` float32, contiguous.
        temperatures, keys, counters: as in `draw` and `uniforms`.

    Returns:
        ``[T]`` int64, what `draw` chooses by the numbers of `uniforms`, 0 for its -1; and ``[3, T]`` float64: what it
        chooses, its log-probability by `logprobs.logprobs_of_rows` (at temperature 1 for 0), and that at temperature 1.
    """
    calls = whole_calls(logits)
    if calls is None:
        return None
    check_shape("logits", logits, len(counters), logits.size(-1))
    check_shape("temperatures", temperatures, len(counters))
    check_shape("keys", keys, len(counters), 2)
    check_shape("counters", counters, len(counters), 4)
    for name, part in (("logits", logits), ("temperatures", temperatures)):
        check_host(name, part)
        check_dtype(name, part, torch.float32)
    for name, part in (("keys", keys), ("counters", counters)):
        check_host(name, part)
        check_dtype(name, part, torch.uint32)
    return calls.sample(logits, temperatures, keys, counters)


def penalize_repetition(row: torch.Tensor, seen: torch.Tensor, penalty: float) -> None:
    """Divide the logits ``row[seen]`` by the penalty where positive, multiply them where negative; in place.

    Keskar et al. 2019; ``row``: ``[V]``, ``seen``: int64 ids of prompt and output.
    """
    picked = row[seen]
    row[seen] = torch.where(picked > 0, picked / penalty, picked * penalty)


def penalize_counts(
    row: torch.Tensor, ids: npt.NDArray[np.int64], counts: npt.NDArray[np.int64], presence: float, frequency: float
) -> None:
    """Take ``presence + frequency * count`` from the logits of the tokens that were sampled, in place (OpenAI's API).

    ``row``: ``[V]``, ``ids``: of the output, each once, ``counts``: how often each was sampled.
    """
    values = -(np.float32(presence) + np.float32(frequency) * counts.astype(np.float32))
    parts = sent({"ids": ids, "values": values}, row.device)
    row[parts["ids"]] += parts["values"]


def add_bias(row: torch.Tensor, bias: dict[int, float]) -> None:
    """Add ``bias[id]`` to the logits of these ids, in place; ``row``: ``[V]``."""
    parts = sent(
        {"ids": np.array(list(bias), np.int64), "values": np.array(list(bias.values()), np.float32)}, row.device
    )
    row[parts["ids"]] += parts["values"]


def rule_out(row: torch.Tensor, token_ids: tuple[int, ...]) -> None:
    """Make these tokens impossible, in place; ``row``: ``[V]``."""
    row.index_fill_(0, indices(np.array(token_ids, np.int64), row.device), _RULED_OUT)


def keep_likely(logits: torch.Tensor, filters: Filters) -> None:
    """Rule out all but the likely tokens of some rows of ``logits``, ``[R, V]`` float32, contiguous, in place.

    Min-p relative to the likeliest (Nguyen et al. 2024) and top-k first, then top-p of what is left (Holtzman et al.
    2020), as vLLM orders them. Ties are broken by the lower id. At least one token of a row stays.
    """
    if logits.dim() != 2 or not logits.is_contiguous():
        raise ValueError(f"logits has the shape {list(logits.shape)}; allowed: [R, V], contiguous")
    operations_for(logits).keep_likely(logits, filters)
