"""Tell verl about samebit when it imports the plugin.

Invariants
----------
* verl's own `__init__` may be running: only its modules without heavy imports of their own are touched.
* verl swallows the exception of a plugin (and the one of a module in VERL_USE_EXTERNAL_MODULES ends it): it is logged
  too.
* Loading twice is loading once.
"""

from __future__ import annotations

import logging

from samebit.rollout.integrations.verl import versions
from samebit.rollout.integrations.verl.names import NAME

logger = logging.getLogger(__name__)

_HERE = "samebit.rollout.integrations.verl"


def load() -> None:
    """Register. What fails here is an error of the import, which verl hides at the level DEBUG: so it is said first.

    In a version of verl that the plugin was not made for it is only said: the rest of verl works without samebit.
    """
    found = versions.found_version()
    if found not in versions.KNOWN_VERSIONS:
        logger.warning(
            "samebit's plugin was made for verl %s, and this is verl %s: it may not work", versions.KNOWN, found
        )
    try:
        register()
    except Exception as error:
        logger.error(
            "samebit's plugin for verl failed to load, and verl will not know rollout.name=samebit: it was made for "
            "verl %s, and this is verl %s: %r",
            versions.KNOWN,
            found,
            error,
        )
        if found in versions.KNOWN_VERSIONS:
            raise


def register() -> None:
    """Register platform, rollout and replica; engines and transports follow when they are asked for (`patches`)."""
    from verl.plugin.platform import PlatformRegistry

    from samebit.rollout.integrations.verl.platform import CPUPlatform

    if PlatformRegistry.get("cpu") is None:
        PlatformRegistry.register(platform="cpu")(CPUPlatform)
    from samebit.rollout.integrations.verl.patches import replace_start

    replace_start()
    from verl.workers.rollout import base, replica

    base._ROLLOUT_REGISTRY[(NAME, "async")] = f"{_HERE}.trainer.rollout.SamebitRollout"
    replica.RolloutReplicaRegistry.register(NAME, _replica_class)


def _replica_class() -> type:
    """Load the replica, in the process of the trainer's loop."""
    from samebit.rollout.integrations.verl.server.replica import SamebitReplica

    return SamebitReplica
