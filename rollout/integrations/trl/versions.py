"""Know the versions of TRL that the trainers were made for: they stand on methods of it that TRL does not promise.

Importing this raises under another one.
"""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, version

KNOWN_SERIES = ("1.16",)
"""Lists the series (major and minor version) of TRL that the trainers were run with."""

OLDEST_PYTHON = (3, 11)
"""Is the oldest Python that these take. On an older one `samebit[trl]` is installed without TRL."""


def check_version() -> None:
    """Raise ImportError, which names both versions, unless TRL is one of `KNOWN_SERIES`; on a Python that has none of
    them it names that."""
    known = ", ".join(f"{series}.x" for series in KNOWN_SERIES)
    try:
        found = version("trl")
    except PackageNotFoundError as error:
        raise ImportError(f"samebit.rollout.integrations.trl needs TRL {known}: {_remedy()}") from error
    if ".".join(found.split(".")[:2]) not in KNOWN_SERIES:
        raise ImportError(f"samebit.rollout.integrations.trl was made for TRL {known}, and found TRL {found}")


def _remedy() -> str:
    if sys.version_info >= OLDEST_PYTHON:
        return "pip install 'samebit[trl]'"
    oldest, this = (".".join(map(str, one)) for one in (OLDEST_PYTHON, sys.version_info[:2]))
    return f"it asks for Python {oldest} or newer, and this is {this}"


check_version()
