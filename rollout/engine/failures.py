"""Say what a step finds wrong with one request, in words that name it: the others go on; and what it warns of."""

from __future__ import annotations

from samebit.rollout.errors import ImageError, NonFiniteLogitsError, NoTokenLeftError, TokenizerError, WorkerStateError
from samebit.rollout.guard import described, without_frames
from samebit.rollout.requests.images import PromptImage
from samebit.rollout.requests.request import Sequence

UNTOLD = (
    "the parameters of the shared module were changed outside of weight_update(), and this worker was not told: the "
    "weight version went up, the prefix cache was cleared, and requests in flight are computed again. Write "
    "`with worker.weight_update(): optimizer.step()`; not every such change can be noticed. Further ones are counted "
    "(untold_updates of stats()), not logged"
)


def not_finite(sequence: Sequence) -> NonFiniteLogitsError:
    """Return the error of a row whose logits are NaN or infinite."""
    return NonFiniteLogitsError(
        f"request {sequence.shared.request_id!r}: NaN or infinite logits at position {sequence.num_tokens - 1} of "
        f"sample {sequence.sample_index}; the weights or this input drive the model out of range"
    )


def image_not_computed(sequence: Sequence, image: PromptImage, error: Exception) -> ImageError:
    """Return the error of a prompt with an image on which the model's vision raised this."""
    named = ImageError(
        f"request {sequence.shared.request_id!r}: the model raised {described(error)} on the image of the tokens "
        f"{image.start} to {image.start + image.count - 1} of the prompt, {list(image.grid)} patches"
    )
    named.__cause__ = without_frames(error)
    return named


def not_decoded(sequence: Sequence, error: TokenizerError) -> TokenizerError:
    """Return the error of a sample whose text its tokenizer could not make, with its name and cause."""
    named = TokenizerError(f"request {sequence.shared.request_id!r}, sample {sequence.sample_index}: {error}")
    named.__cause__ = error.__cause__
    return named


def never_settled(sequence: Sequence, steps: int) -> WorkerStateError:
    """Return the error of a request whose steps were all computed while weights were written."""
    return WorkerStateError(
        f"request {sequence.shared.request_id!r}: weights were written during {steps} steps in a row, outside of "
        "weight_update(), so nothing that was computed is of one set of weights: by what runs in each forward (a hook "
        "that writes to a parameter or to a persistent buffer), or by another thread"
    )


def nothing_drawn(sequence: Sequence) -> NoTokenLeftError:
    """Return the error of a row of finite logits whose request leaves no token to choose."""
    grammar = sequence.shared.grammar
    constraint = "none" if grammar is None else grammar.why_none_may_follow(sequence.output_ids.tolist())
    return NoTokenLeftError(
        f"request {sequence.shared.request_id!r}: the logits at position {sequence.num_tokens - 1} of sample "
        f"{sequence.sample_index} are finite, but this request's parameters leave no token to choose: logit_bias, "
        f"structured_outputs ({constraint}), or "
        f"min_tokens={sequence.params.min_tokens} with all tokens among those that end a sample"
    )
