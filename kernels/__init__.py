"""What the arithmetic is: kernels whose bits depend on a sequence alone, and `bind`, which puts them to use.

Three rules hold for every kernel (docs/exactness.md): a row's result depends on that row and its own
prefix; a reduction over the sequence walks a grid anchored at position 0; trainer and rollout run the
same functions.
"""

from . import openmp  # noqa: F401  (before torch)

# isort: split
from .binding import bind
from .families import BindingError
from .logprobs import logprobs_from_logits
from .token_logprobs import token_logprobs

__all__ = ["BindingError", "bind", "logprobs_from_logits", "token_logprobs"]
