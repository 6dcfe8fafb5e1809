"""What verl is told about samebit when it imports the plugin.

Invariants
----------
* verl's own `__init__` may be running: only its modules without heavy imports of their own are touched.
* verl swallows the exception of a plugin (and the one of a module in VERL_USE_EXTERNAL_MODULES ends it): it is logged
  too.
* Loading twice is loading once.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version

logger = logging.getLogger(__name__)

NAME = "samebit"
KNOWN_VERSIONS = ("0.9.1",)
"""The versions of verl that the plugin was run with."""

_KNOWN = ", ".join(KNOWN_VERSIONS)

_HERE = "samebit.rollout.integrations.verl"


def load() -> None:
    """Register. What fails here is an error of the import, which verl hides at the level DEBUG: so it is said first.

    In a version of verl that the plugin was not made for it is only said: the rest of verl works without samebit.
    """
    found = _version()
    if found not in KNOWN_VERSIONS:
        logger.warning("samebit's plugin was made for verl %s, and this is verl %s: it may not work", _KNOWN, found)
    try:
        register()
    except Exception as error:
        logger.error(
            "samebit's plugin for verl failed to load, and verl will not know rollout.name=samebit: it was made for "
            "verl %s, and this is verl %s: %r",
            _KNOWN,
            found,
            error,
        )
        if found in KNOWN_VERSIONS:
            raise


@contextmanager
def as_made_for() -> Iterator[None]:
    """What is not where it was in verl is an error that names its version."""
    try:
        yield
    except (ImportError, AttributeError, KeyError) as error:
        raise ImportError(
            f"samebit's plugin was made for verl {_KNOWN}; verl {_version()} is without what it needs: {error!r}"
        ) from error


def register() -> None:
    """Platform, rollout and replica; engines and transports follow when they are asked for (`replacements`)."""
    from verl.plugin.platform import PlatformRegistry

    from samebit.rollout.integrations.verl.platform import CPUPlatform

    if PlatformRegistry.get("cpu") is None:
        PlatformRegistry.register(platform="cpu")(CPUPlatform)
    from samebit.rollout.integrations.verl.replacements import replace_start

    replace_start()
    from verl.workers.rollout import base, replica

    base._ROLLOUT_REGISTRY[(NAME, "async")] = f"{_HERE}.adapter.SamebitRollout"
    replica.RolloutReplicaRegistry.register(NAME, _replica_class)


def _replica_class() -> type:
    """Loaded in the process of the trainer's loop, by the first replica."""
    from samebit.rollout.integrations.verl.replica import SamebitReplica

    return SamebitReplica


def _version() -> str:
    try:
        return version("verl")
    except PackageNotFoundError:
        return "of unknown version"
