"""Know the versions of verl that the plugin was made for, and what is said in another."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version

KNOWN_VERSIONS = ("0.9.1",)
"""Lists the versions of verl that the plugin was run with."""

KNOWN = ", ".join(KNOWN_VERSIONS)


def found_version() -> str:
    """Return the version of verl that is installed."""
    try:
        return version("verl")
    except PackageNotFoundError:
        return "of unknown version"


@contextmanager
def as_made_for() -> Iterator[None]:
    """Turn the failure to find a part of verl where it was into an error that names verl's version."""
    try:
        yield
    except (ImportError, AttributeError, KeyError) as error:
        raise ImportError(
            f"samebit's plugin was made for verl {KNOWN}; verl {found_version()} is without what it needs: {error!r}"
        ) from error
