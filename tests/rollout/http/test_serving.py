"""What a server does once, between loading and its first request."""

from __future__ import annotations

import gc

from samebit.rollout.integrations.http.serving import settle


def test_what_was_loaded_is_not_collected_again() -> None:
    """It stays so: what other tests have left would be gone through again."""
    settle()
    assert gc.get_freeze_count() > 100_000
    assert len(gc.get_objects()) < gc.get_freeze_count() // 100
