"""What the arithmetic is: kernels whose bits depend on a sequence alone, and `bind`, which puts them to use.

Three rules hold for every kernel (docs/exactness.md): a row's result depends on that row and its own
prefix; a reduction over the sequence walks a grid anchored at position 0; trainer and rollout run the
same functions.

The way down, each floor importing only those below it: `binding` puts `ops` into a Hugging Face model; `ops` checks and
calls, through `ops.dispatch` alone, `cpu` or `triton`, which know nothing of each other; both read `layout`.

Axis letters, here and in all kernels:

    T  tokens, the rows of a call         H  heads
    S  sequences of a call                G  query heads a KV head
    B  tokens of a block of the cache     D  head size of attention
    C  tokens of a chunk of a grid        P  head size of a Mamba layer
    V  tokens of the vocabulary           N  state size of a Mamba layer

Where layers are matrices, K are the inputs and N the outputs; W is the width of a row, R the angles of a head. E are
the experts of a layer, I the width of one.
"""

if __name__ == "kernels":
    # In the root of a checkout transformers finds this folder when it looks for a package called `kernels`. It asks for
    # a version, and takes this for one that is too old.
    __version__ = "0"
else:
    from samebit.kernels import openmp  # noqa: F401  (before torch)

    # isort: split
    from samebit.kernels.binding.binding import bind
    from samebit.kernels.binding.families import BindingError
    from samebit.kernels.binding.trainer.training import token_logprobs
    from samebit.kernels.ops.logprobs import logprobs_from_logits

    __all__ = ["BindingError", "bind", "logprobs_from_logits", "token_logprobs"]
