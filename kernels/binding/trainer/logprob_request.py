"""Ask a bound model for log-probabilities, and for entropies if wanted, instead of logits.

An installed variable rather than an argument: FSDP2 casts every floating-point tensor among a module's arguments to the
dtype it computes in, and temperatures would be rounded.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from transformers.utils.generic import ModelOutput

from samebit.kernels.ops.score_arguments import (
    check_ids,
    check_in_vocabulary,
    check_temperatures,
    temperatures_of,
)


@dataclass(frozen=True, eq=False)
class Scoring:
    """Names the token to score in each row that reaches the head.

    Attributes:
        token_ids: int64, of any shape with as many elements as there are rows; the shape of the scores.
        temperatures: float32, the same shape and device.
        with_entropy: whether the entropy of each row is wanted too.
    """

    token_ids: torch.Tensor
    temperatures: torch.Tensor
    with_entropy: bool = False

    @staticmethod
    def of(
        token_ids: torch.Tensor, temperature: float | torch.Tensor, vocab_size: int, *, with_entropy: bool = False
    ) -> "Scoring":
        """Check what is asked for. ``temperature`` is positive, a number or a tensor that broadcasts to the shape of
        ``token_ids``.

        Raises:
            ValueError: ids outside the vocabulary, a temperature that is not positive or of another shape.
            TypeError: ids that are no integers.
        """
        check_ids("token_ids", token_ids)
        token_ids = token_ids.long()
        check_in_vocabulary("token_ids", token_ids, vocab_size)
        temperatures = temperatures_of(temperature, token_ids.shape, token_ids.device)
        check_temperatures(temperatures)
        return Scoring(token_ids, temperatures, with_entropy)


@dataclass
class Scores(ModelOutput):
    """Holds log-probabilities and entropies, float32, of the shape of the scored ids.

    A `ModelOutput`, so that FSDP2 finds its tensors; and these are no views, which its hooks do not take.
    """

    log_probs: torch.Tensor | None = None
    entropy: torch.Tensor | None = None

    def check_float32(self) -> None:
        """Check that nothing has cast them on their way out of the model.

        Raises:
            ValueError: something has.
        """
        for name, values in self.items():
            if values.dtype is not torch.float32:
                raise ValueError(
                    f"{name} came out of the model as {values.dtype}, rounded: FSDP2 casts what a module returns where "
                    "its MixedPrecisionPolicy has an output_dtype (Accelerate's, with mixed_precision, has one); "
                    "allowed: output_dtype=None"
                )


_installed: ContextVar[Scoring | None] = ContextVar("samebit_scoring", default=None)


def installed_scoring() -> Scoring | None:
    """Return what the running forward is to score, if anything."""
    return _installed.get()


@contextmanager
def use_scoring(scoring: Scoring | None) -> Iterator[None]:
    """Run bound causal language models with `Scores` as their output; with None, with logits."""
    token = _installed.set(scoring)
    try:
        yield
    finally:
        _installed.reset(token)
