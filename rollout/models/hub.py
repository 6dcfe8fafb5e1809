"""Find the folder that holds what a user calls a model, or an adapter: a path, or a name of the Hugging Face hub.

Invariants
----------
* A name is resolved once, to the snapshot of one commit; every reader of that folder reads the same files.
* A folder that exists is taken, whatever it is called. What is written as a path is never looked for on the hub.
* Weights come as safetensors only: no pickle is downloaded.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TypeGuard

from huggingface_hub import snapshot_download
from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.utils._validators import validate_repo_id

from samebit.rollout.errors import ModelLoadError

WANTED = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "*.model", "*.txt"]
"""Lists what is fetched: weights, config and tokenizer."""
UNWANTED = ["*/*", "consolidated*.safetensors"]
"""Lists the files that are not fetched: what lies in folders, and copies of the weights under other names."""


def model_folder(model: str | Path, revision: str | None = None, what: str = "model") -> Path:
    """Return the folder of a model; a name's snapshot is downloaded where the cache lacks it.

    revision: a branch, tag or commit of a name. what: it is called so where it is not found.

    Raises:
        ModelLoadError: no such folder; or the name is not known, or not to be reached.
    """
    if not model:  # a path of nothing would be the current folder
        raise ModelLoadError(f"no such {what} folder: {model!r}; it is an empty text")
    folder = Path(model)
    if folder.is_dir():
        if revision is not None:
            raise ModelLoadError(
                f"revision={revision!r} is for a name of the Hugging Face hub, and {folder} is a folder"
            )
        return folder
    if not is_name(model):
        raise ModelLoadError(f"no such {what} folder: {folder}")
    return _snapshot(model, revision, what)


def commit_of(name: str, revision: str | None = None, what: str = "model") -> str:
    """Return the commit that a name stands for now; its snapshot is downloaded where the cache lacks it.

    Raises:
        ModelLoadError: the name is not known, or not to be reached.
    """
    return _snapshot(name, revision, what).name


def is_name(model: object) -> TypeGuard[str]:
    """Tell whether this is looked for on the hub: nothing here is called so, and it is not written as a path."""
    return isinstance(model, str) and _may_be_a_name(model)


def _may_be_a_name(text: str) -> bool:
    if text.startswith(("/", ".", "~")) or text.endswith("/") or os.path.lexists(text):
        return False
    try:
        validate_repo_id(text)
    except HFValidationError:
        return False
    return True


def _snapshot(name: str, revision: str | None, what: str) -> Path:
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=WANTED, ignore_patterns=UNWANTED))
    except (RevisionNotFoundError, GatedRepoError, RepositoryNotFoundError) as error:
        raise _refusal(name, revision, what, error) from error
    except MemoryError:
        raise
    except Exception as error:  # boundary: of a commit, huggingface_hub passes on what its HTTP client raises
        cached = _cached(name, revision)
        if cached is None:
            raise _refusal(name, revision, what, error) from error
        return cached


def _cached(name: str, revision: str | None) -> Path | None:
    """Return what the local cache has, where the hub is not reached."""
    try:
        return Path(snapshot_download(name, revision=revision, local_files_only=True))
    except (OSError, ValueError):
        return None


def _refusal(name: str, revision: str | None, what: str, error: Exception) -> ModelLoadError:
    if isinstance(error, RevisionNotFoundError):
        return ModelLoadError(f"{name} has no revision {revision!r} on the Hugging Face hub")
    get = _download(name, revision)
    if isinstance(error, GatedRepoError):
        return ModelLoadError(f"{name} asks for its terms to be accepted on the Hugging Face hub; then {get}")
    if isinstance(error, RepositoryNotFoundError):
        return ModelLoadError(
            f"no such {what} folder: {name}; and the Hugging Face hub knows no {what} of that name, or shows it to "
            "others"
        )
    cause = f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(".")
    where = "the local cache" if revision is None else f"the local cache at revision {revision!r}"
    return ModelLoadError(
        f"no such {what} folder: {name}; and as a name of the Hugging Face hub it is not in {where} and "
        f"could not be fetched ({cause}): {get} where it can be"
    )


def _download(name: str, revision: str | None) -> str:
    return f"run `hf download {name}{f' --revision {revision}' if revision is not None else ''}`"
