"""Read the tokenizer that a model folder brings."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from transformers import AutoTokenizer

from samebit.rollout.errors import ModelLoadError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def has_tokenizer(folder: Path) -> bool:
    """Return whether a model folder brings a tokenizer."""
    return any((folder / name).is_file() for name in TOKENIZER_FILES)


def folder_tokenizer(*folders: Path) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer of the first of these folders that brings one; None if none does.

    Boundary: a damaged file, or a package that is missing, makes transformers raise errors of any kind.

    Raises:
        ModelLoadError: it can not be read.
    """
    found = next(filter(has_tokenizer, folders), None)
    if found is None:
        return None
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            found, local_files_only=True, trust_remote_code=False
        )
    except MemoryError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())
        raise ModelLoadError(
            f"the tokenizer of {found} can not be read ({type(error).__name__}: {reason}); RolloutWorker takes "
            "another one as tokenizer=..."
        ) from error
    return tokenizer
