"""Know the versions of TRL that the trainers were made for: they stand on methods of it that TRL does not promise.

Importing this raises under another one.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

KNOWN_SERIES = ("1.16",)
"""Lists the series (major and minor version) of TRL that the trainers were run with."""


def check_version() -> None:
    """Raise ImportError, which names both versions, unless TRL is one of `KNOWN_SERIES`."""
    known = ", ".join(f"{series}.x" for series in KNOWN_SERIES)
    try:
        found = version("trl")
    except PackageNotFoundError as error:
        raise ImportError(f"samebit.rollout.integrations.trl needs TRL {known}: pip install 'samebit[trl]'") from error
    if ".".join(found.split(".")[:2]) not in KNOWN_SERIES:
        raise ImportError(f"samebit.rollout.integrations.trl was made for TRL {known}, and found TRL {found}")


check_version()
