"""Reward samples, in a process that TRL starts."""

from __future__ import annotations

from typing import Any


def variety(completions: list[Any], **_: Any) -> list[float]:
    """Return the share of a sample's characters that are not there twice."""
    texts = [messages[0]["content"] for messages in completions]
    return [len(set(text)) / max(1, len(text)) for text in texts]
