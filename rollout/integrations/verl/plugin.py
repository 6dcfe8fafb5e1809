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
from importlib.metadata import version

logger = logging.getLogger(__name__)

NAME = "samebit"
KNOWN_VERSIONS = ("0.9.1",)
"""The versions of verl that the plugin was run with."""

_HERE = "samebit.rollout.integrations.verl"


def load() -> None:
    """Register. What fails here is an error of the import, which verl hides at the level DEBUG: so it is said first."""
    try:
        register()
    except Exception as error:
        logger.error("samebit's plugin for verl failed to load, and verl will not know rollout.name=samebit: %r", error)
        raise


def register() -> None:
    """Platform, rollout and replica; engines and transports follow when they are asked for (`replacements`)."""
    _check_version(version("verl"))
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


def _check_version(found: str) -> None:
    if found not in KNOWN_VERSIONS:
        logger.warning(
            "samebit's plugin was made for verl %s, and this is verl %s: it may not work",
            ", ".join(KNOWN_VERSIONS),
            found,
        )
