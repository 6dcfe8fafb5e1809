"""Let a trainer compute log-probabilities: a differentiable forward of the bound model."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from samebit.kernels.binding.binding import Binding, checked_binding_of, is_bound
from samebit.kernels.binding.trainer.logprob_request import Scores, Scoring, use_scoring
from samebit.kernels.binding.vision.given import GivenImages
from samebit.kernels.binding.vision.rows import text_positions
from samebit.kernels.binding.wrapped import positions_of_text
from samebit.kernels.layout.forward_context import ForwardContext, training_context, use_context
from samebit.kernels.ops.score_arguments import (
    check_ids,
    check_in_vocabulary,
    check_no_tangents,
    check_not_compiled,
    check_temperatures,
    temperatures_of,
)


def token_logprobs(
    model: nn.Module,
    input_ids: torch.Tensor,
    *,
    attention_mask: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    temperature: float | torch.Tensor = 1.0,
    pixel_values: torch.Tensor | None = None,
    image_grid_thw: torch.Tensor | None = None,
    mm_token_type_ids: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the log-probability of every token given those before it, equal bit for bit to the rollout worker's.

    Padding is taken out before the forward: only real tokens are computed, and only rows that predict one
    reach the head. Of many logits only a part is in memory at once, in the backward too (`logprob_head`).

    Args:
        model: bound (see `samebit.kernels.bind`), or a DistributedDataParallel of one, whose ranks then share the mean
            of their gradients.
        input_ids: ``[B, T]`` integers.
        attention_mask: ``[B, T]``, above 0 for tokens, else 0; left or right padding.
        position_ids: ``[B, T]`` or ``[1, T]`` integers; a new sequence starts wherever they do not go up by one (packed
            batches). Families that are wrapped with vision also take three or four of them, alike: those of text.
        temperature: a positive number, or a tensor that broadcasts to ``[B, T - 1]``.
        pixel_values: ``[patches, width]``, those of all images in the order of the tokens, for a model that computes
            images; None for text.
        image_grid_thw: ``[images, 3]``, the patches of each image in time, height and width.
        mm_token_type_ids: ``[B, T]``, 1 for tokens of images and 0 for others; None where all placeholders are such
            tokens, none of them sampled.

    Returns:
        ``[B, T - 1]`` float32: entry t is the log-probability of token t + 1, and 0 where t + 1 is padding
        or begins a sequence.

    Raises:
        ValueError: a model that is not bound, shapes that do not match, ids outside the vocabulary, a temperature that
            is not positive and finite; images that are not those of the tokens; results that FSDP2 has cast to another
            dtype (``output_dtype``); a call inside of a function that torch.compile compiles, or of a level of
            forward-mode differentiation.
        TypeError: ids or positions that are no integers, a mask that is no tensor.
        BindingError: the model's modules are not those that were bound, by name.
    """
    scores = token_scores(
        model,
        input_ids,
        attention_mask=attention_mask,
        position_ids=position_ids,
        temperature=temperature,
        pixel_values=pixel_values,
        image_grid_thw=image_grid_thw,
        mm_token_type_ids=mm_token_type_ids,
    )
    return cast(torch.Tensor, scores.log_probs)


def token_scores(
    model: nn.Module,
    input_ids: torch.Tensor,
    *,
    attention_mask: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    temperature: float | torch.Tensor = 1.0,
    wanted: torch.Tensor | None = None,
    with_entropy: bool = False,
    forward: Callable[..., Any] | None = None,
    pixel_values: torch.Tensor | None = None,
    image_grid_thw: torch.Tensor | None = None,
    mm_token_type_ids: torch.Tensor | None = None,
) -> Scores:
    """Return what `token_logprobs` returns, of some of the tokens, and the entropies if wanted.

    Args:
        wanted: ``[B, T - 1]`` bool on any device, the tokens to score; None for all. Other rows do not reach the head.
        with_entropy: return the entropy of the distribution that each token was scored in, too.
        forward: the model's bound forward, from inside a forward that was put around it (`wrap_forward`).

    Returns:
        ``[B, T - 1]`` float32 each, 0 where nothing was scored. A forward runs in any case: other ranks may wait in it.

    Raises:
        ValueError, TypeError, BindingError: as `token_logprobs`, and for a mask of another shape.
    """
    check_not_compiled("token_logprobs")
    check_no_tangents("token_logprobs")
    binding = _binding_of_replica(model)
    check_ids("input_ids", input_ids)
    if input_ids.dim() != 2:
        raise ValueError(f"input_ids must be [B, T], got shape {tuple(input_ids.shape)}")
    input_ids = input_ids.long()  # torch has no least of unsigned numbers
    check_in_vocabulary("input_ids", input_ids, binding.vocab_size)
    batch, width = input_ids.shape
    temperatures = temperatures_of(temperature, (batch, max(width - 1, 0)), input_ids.device, axes="[B, T - 1]")
    given = pixel_values, image_grid_thw, mm_token_type_ids
    images = GivenImages.of(binding.images, *given, binding.why_no_images)
    of_text = position_ids
    if images is not None:
        of_text = text_positions(position_ids)
    elif binding.family.wrapped:
        of_text = positions_of_text(position_ids, attention_mask)
    layout = training_context((batch, width), attention_mask, of_text, input_ids.device)
    if images is not None:
        layout = replace(layout, images=images.rows_of(input_ids, position_ids, layout))
    rows, predicts = (part.to(input_ids.device) for part in _token_rows(layout))
    if wanted is not None:
        predicts = predicts & _before(wanted, (batch, width)).to(rows.device)[rows]
    log_probs, entropy = (torch.zeros(batch, width, dtype=torch.float32, device=input_ids.device) for _ in range(2))
    if not bool(predicts.any()):
        any_ids = input_ids.new_zeros(1, 2) if images is None else images.alone().to(input_ids.device)
        of_images = {} if images is None else images.arguments
        others = token_scores(model, any_ids, with_entropy=with_entropy, forward=forward, **of_images)
        return _of_nothing(log_probs[:, 1:], others)
    tokens = input_ids.reshape(-1)
    packed, packed_layout = _packed(tokens, layout, rows)
    of_images = {} if images is None else images.arguments
    targets = rows[predicts] + 1
    temperatures = torch.nn.functional.pad(temperatures, (1, 0), value=1.0).reshape(-1)
    scoring = Scoring(tokens[targets], temperatures[targets], with_entropy)
    check_temperatures(scoring.temperatures)
    with torch.cuda.device_of(packed), use_context(packed_layout), use_scoring(scoring):
        call = model if forward is None else forward
        scores = call(input_ids=packed, logits_to_keep=predicts.nonzero().squeeze(1), **of_images)
    scores.check_float32()

    def placed(out: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return out.view(-1).index_put((targets,), values).view(batch, width)[:, 1:]

    return Scores(placed(log_probs, scores.log_probs), placed(entropy, scores.entropy) if with_entropy else None)


def _binding_of_replica(model: nn.Module) -> Binding:
    """Return the binding of a model, or of that in a DistributedDataParallel: it is this that a trainer calls, as its
    forward prepares the reduction of the gradients."""
    if not isinstance(model, DistributedDataParallel):
        return checked_binding_of(model)
    if not is_bound(model.module):
        raise ValueError(
            f"DistributedDataParallel holds a {type(model.module).__name__}, which is not bound: build it around what "
            "samebit.kernels.bind(model) returned"
        )
    return checked_binding_of(model.module)


def _of_nothing(zeros: torch.Tensor, others: Scores) -> Scores:
    """Return these zeros as scores, with the graph of others, of which they have none: other ranks wait in the
    collectives of this forward and its backward, and every parameter has a gradient, of zero."""

    def summed(values: torch.Tensor | None) -> torch.Tensor | None:
        return None if values is None else zeros + values[:, :0].sum()

    return Scores(summed(others.log_probs), summed(others.entropy))


def _before(wanted: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """Return for each of the rows whether the token after it is wanted."""
    batch, width = shape
    if tuple(wanted.shape) != (batch, max(width - 1, 0)) or wanted.dtype != torch.bool:
        raise ValueError(
            f"wanted must be bool of shape {(batch, max(width - 1, 0))} ([B, T - 1]), got {wanted.dtype} of "
            f"{tuple(wanted.shape)}"
        )
    return torch.nn.functional.pad(wanted, (0, 1)).reshape(-1)


def _token_rows(layout: ForwardContext) -> tuple[torch.Tensor, torch.Tensor]:
    """Tell which rows hold a token, and which of those are followed by another token of their sequence."""
    starts = torch.from_numpy(layout.row_start).long()
    lengths = torch.from_numpy(layout.lengths).long()
    within = torch.arange(int(lengths.sum()), device="cpu")
    rows = torch.repeat_interleave(starts - (lengths.cumsum(0) - lengths), lengths) + within
    predicts = torch.ones(len(rows), dtype=torch.bool, device="cpu")
    predicts[lengths.cumsum(0) - 1] = False
    return rows, predicts


def _packed(tokens: torch.Tensor, layout: ForwardContext, rows: torch.Tensor) -> tuple[torch.Tensor, ForwardContext]:
    """Return the N tokens without their padding as ``[1, N]``, and their layout."""
    ends = layout.lengths.cumsum()
    packed = ForwardContext(
        positions=layout.positions[rows],
        row_start=(ends - layout.lengths).astype(layout.lengths.dtype),
        lengths=layout.lengths,
        starts=layout.starts,
        table_rows=layout.table_rows,
        block_tables=layout.block_tables,
        block_size=layout.block_size,
        images=None if layout.images is None else layout.images.of_rows(rows.cpu()),
    )
    return tokens[rows][None], packed
