"""Ask a user's tokenizer for text.

Invariant: whatever a tokenizer raises, or gives instead of text, is a `TokenizerError`.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from samebit.rollout.errors import TokenizerError


@runtime_checkable
class Tokenizer(Protocol):
    """Names the one method that is asked of a tokenizer."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> Any:
        """Return the text of a list of ids (transformers declares more, for lists of lists)."""


def decoded(tokenizer: Tokenizer, token_ids: list[int], *, skip_special: bool = True) -> str:
    """Return the text of these tokens, or raise `TokenizerError`.

    Boundary: a tokenizer in Rust panics with a BaseException, one in Python may leave with SystemExit. An interrupt is
    not the tokenizer's.
    """
    try:
        text: object = tokenizer.decode(token_ids, skip_special_tokens=skip_special)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise TokenizerError(
            f"the tokenizer raised {type(error).__name__} while it decoded {_few(token_ids)}"
        ) from error
    if not isinstance(text, str):
        raise TokenizerError(f"the tokenizer decoded {_few(token_ids)} to a {type(text).__name__}; allowed: a str")
    return text


def _few(token_ids: list[int]) -> str:
    return f"{token_ids}" if len(token_ids) <= 8 else f"{len(token_ids)} tokens, the last {token_ids[-8:]}"
