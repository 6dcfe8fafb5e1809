"""Compute the arithmetic of samebit: kernels whose bits depend on a sequence alone, and `bind`, which puts them to use.

Three rules hold for every kernel (docs/exactness.md): a row's result depends on that row and its own
prefix; a reduction over the sequence walks a grid anchored at position 0; trainer and rollout run the
same functions.

The way down, each floor importing only those below it: `binding` puts `ops` into a Hugging Face model; `ops` checks and
calls, through `ops.dispatch` alone, `cpu` or `triton`, which know nothing of each other; both read `layout`.
`openmp` sets up threads before torch is loaded, `openmp_runtimes` knows which processors these are bound to, `team` has
threads for a worker's kernels. Imports nothing of `samebit.rollout` or `samebit.weight_sync`.

Axis letters, here and in all kernels:

    T  tokens, the rows of a call         H  heads
    S  sequences of a call                G  query heads a KV head
    B  tokens of a block of the cache     D  head size of attention
    C  tokens of a chunk of a grid        P  head size of a Mamba layer
    V  tokens of the vocabulary           N  state size of a Mamba layer

Local letters, in these meanings; a docstring says which one it takes:

    K  inputs of a matrix; size of a key of Gated DeltaNet; taps of a convolution; tokens chosen for a row
    N  outputs of a matrix; tiles or pieces of a call
    W  width of a row; of a latent with its rotated key; of a table of blocks
    R  angles of a head, half of what is rotated; width of a latent; rows of logits
    r  rank of an adapter
    E  experts of a layer; in attention, size of a value where it is not D
    I  width of an expert; M work items
    P  pairs of a row and an expert, or other pairs; P_t, in a recurrent layer, the product of decays up to token t
    G  groups, of heads or of rows
    S  in formulas of recurrent layers, the state, E its gradient; L_t the sum of decays up to token t, F what is left
       of a token at its chunk's end

A public name is loaded when it is first asked for: kernels need no transformers, which takes as long to load as all
the rest.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if __name__ == "kernels":
    # In the root of a checkout transformers finds this folder when it looks for a package called `kernels`. It asks for
    # a version, and takes this for one that is too old.
    __version__ = "0"
else:
    from samebit.kernels import openmp  # noqa: F401  (before torch)

    if TYPE_CHECKING:
        from samebit.kernels.binding.binding import bind
        from samebit.kernels.binding.families.family import BindingError
        from samebit.kernels.binding.trainer.training import token_logprobs, token_scores
        from samebit.kernels.binding.vision.features import image_features
        from samebit.kernels.ops.logprobs import logprobs_from_logits

    __all__ = ["BindingError", "bind", "image_features", "logprobs_from_logits", "token_logprobs", "token_scores"]

_HOMES = {
    "BindingError": "binding.families.family",
    "bind": "binding.binding",
    "image_features": "binding.vision.features",
    "logprobs_from_logits": "ops.logprobs",
    "token_logprobs": "binding.trainer.training",
    "token_scores": "binding.trainer.training",
}
"""Names the module of each public name, which is loaded when the name is first asked for."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return vars(import_module(f"{__name__}.{_HOMES[name]}"))[name]


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
