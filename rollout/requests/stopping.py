"""Decide when a sample ends: at an end token, a stop string, or its length."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from collections.abc import Sequence as Items

from samebit.rollout.requests.request import Sequence

logger = logging.getLogger(__name__)


def end_of_sample(sequence: Sequence, token: int, new: int) -> bool:
    """Apply the stop rules after `token` was appended, the last of `new` ones; tell whether one ended the sequence.

    Raises:
        TokenizerError: the text can not be searched; the sequence is not finished.
    """
    shared, matcher = sequence.shared, sequence.sampled.matcher
    if matcher is None and new < shared.max_new_tokens and token not in shared.end_ids:
        return False
    free_to_stop = new > sequence.params.min_tokens
    ends = free_to_stop and token in shared.end_ids
    stop_string = None if matcher is None or ends else matcher.push(token, search=free_to_stop)
    if not ends and stop_string is None and new < shared.max_new_tokens:
        return False
    if matcher is not None and stop_string is None:
        matcher.flush()
    if ends:
        sequence.finish("stop", token if token in sequence.params.stop_ids else None)
    elif stop_string is not None:
        sequence.finish("stop", stop_string)
    else:
        sequence.finish("length", None)
    return True


def as_token_ids(value: int | Items[int] | None) -> tuple[int, ...]:
    """Return a config's `eos_token_id`, which may be absent, an int or a list, as a tuple."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, Items) else (value,)


def known_end_tokens(named: Iterable[int], vocab_size: int, source: str) -> tuple[int, ...]:
    """Return those end tokens that a model can sample; configs of cut-down models name others too, which are logged.

    source: what names them.
    """
    named = tuple(named)
    known = tuple(token for token in named if 0 <= token < vocab_size)
    if len(known) < len(named):
        others = ", ".join(str(token) for token in named if token not in known)
        logger.warning(
            "%s names %s, outside the vocabulary (0 to %d): no sample ends there",
            source, others, vocab_size - 1,
        )  # fmt: skip
    return known
