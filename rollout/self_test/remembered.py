"""Remember where the self-test has passed: for a processor or GPU, versions, kernels, shapes and config of a model, and
what was tried with it.

Invariant: a file says by its name alone what has passed, and holds nothing that is read again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from llvmlite.binding import get_host_cpu_features, get_host_cpu_name

from samebit import kernels
from samebit.kernels.binding.binding import binding_of

logger = logging.getLogger(__name__)

_DRIVER = Path("/sys/module/nvidia/version")
_COMPUTES = (Path(kernels.__file__).parent, Path(__file__).parent.with_name("runner"), Path(__file__).parent)
"""Folders whose code computes the rows that are compared."""

_VERSIONS = ("torch", "triton", "transformers", "numba", "llvmlite", "numpy")


def key_of(model: Any, tried: Mapping[str, object]) -> str:
    """Return the digest of all that the bits of a model's rows could depend on, but for the values of its weights.

    model: a bound one. tried: what the test computes with it, and how.
    """
    shapes = {name: [list(part.shape), str(part.dtype)] for name, part in model.state_dict(keep_vars=True).items()}
    parameter = next(model.parameters())
    facts: dict[str, Any] = {
        "device": _gpu(parameter.device) if parameter.is_cuda else [get_host_cpu_name(), dict(get_host_cpu_features())],
        "versions": {name: _version(name) for name in _VERSIONS},
        "sources": [_digest_of_sources(folder) for folder in _COMPUTES],
        "class": type(model).__name__,
        "shapes": shapes,
        "config": model.config.get_text_config().to_json_string(),  # which leaves names and paths out
        "ssm_chunk": binding_of(model).ssm_chunk,
        "tried": dict(tried),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def has_passed(key: str) -> bool:
    """Return whether this has passed on this machine before, as far as it can be seen."""
    try:
        return (_folder() / key).exists()
    except (OSError, RuntimeError):
        return False


def remember(key: str) -> None:
    """Note that this has passed; where there is no place for it, the next start tests again."""
    try:
        folder = _folder()
        folder.mkdir(parents=True, exist_ok=True)
        (folder / key).touch()
    except (OSError, RuntimeError) as error:
        logger.warning("that the self-test passed could not be noted: %s", error)


def _folder() -> Path:
    """Return where it is noted; raises RuntimeError for a user who has no home."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "samebit" / "self_test"


def _gpu(where: torch.device) -> list[object]:
    properties = torch.cuda.get_device_properties(where)
    driver = _DRIVER.read_text().strip() if _DRIVER.exists() else ""
    return [properties.name, properties.major, properties.minor, torch.version.cuda, driver]


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _digest_of_sources(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted([*folder.rglob("*.py"), *folder.rglob("*.json")]):
        digest.update(str(path.relative_to(folder)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()
