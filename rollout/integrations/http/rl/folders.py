"""Find a folder that a caller names, where the operator lets callers read.

Invariant: it lies below the root, whatever links and dots its name has.
"""

from __future__ import annotations

import errno
from pathlib import Path

from samebit.rollout.integrations.http.errors import ApiError


def below(root: str | None, folder: str, param: str) -> Path:
    """Return a folder below the root. param: the field that names it.

    Raises:
        ApiError: there is no root, or no such folder below it.
    """
    if root is None:
        raise ApiError(403, f"{param} names a folder below --weight-root, which is not set", param=param)
    if "\0" in folder:
        raise ApiError(400, f"{param} has a null byte, which no folder's name has", param=param)
    top = Path(root).resolve()
    path = (top / folder).resolve()
    if not path.is_relative_to(top):
        raise ApiError(403, "the folder is not below --weight-root", param=param)
    if not _is_folder(path):
        raise ApiError(404, "there is no such folder below --weight-root", param=param)
    return path


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        return False
