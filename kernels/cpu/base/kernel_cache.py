"""Keep kernels on disk for as long as the sources that they are made of stay as they are.

Numba looks at the file of the kernel alone. But a kernel takes in functions and constants of the modules that its own
imports, of those that these import, and so on: after an update of one of them the next process would run the old code
in some kernels and the new code in others.
"""

import hashlib
import inspect
import re
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from numba import config
from numba.core.caching import FunctionCache, IndexDataCacheFile

_IMPORT = re.compile(r"^(?:from|import) +([\w.]+)(?: +import +(\([^)]*\)|.*))?", re.MULTILINE)


@cache
def _imported(file: str, packages: tuple[str, ...]) -> frozenset[str]:
    """Return the files of the modules of some packages that a file imports at its top."""
    names = {
        name
        for parent, items in _IMPORT.findall(Path(file).read_text())
        for name in (parent, *(f"{parent}.{item}" for item in re.findall(r"\w+", items)))
        if name.partition(".")[0] in packages
    }
    return frozenset(str(sys.modules[name].__file__) for name in names & sys.modules.keys())


@cache
def _hashed(file: str) -> bytes:
    """Return a digest of a file, which is read once."""
    return hashlib.sha256(Path(file).read_bytes()).digest()


def sources_of(function: Callable[..., None]) -> bytes:
    """Return a digest of all that a function can be made of: its file, and those of its package and ours behind it; and
    of its module's name, which its machine code looks up."""
    packages = ("samebit", function.__module__.partition(".")[0])
    first = inspect.getfile(function)
    files, new = {first}, [first]
    while new:
        found = _imported(new.pop(), packages) - files
        files |= found
        new.extend(found)
    return hashlib.sha256(b"".join([function.__module__.encode(), *sorted(map(_hashed, files))])).digest()


class _Index(IndexDataCacheFile):  # type: ignore[misc]  # Numba has no types
    """Lists what is on disk of one kernel: nothing, if the index names a class or a module of older sources."""

    def _load_index(self) -> Any:
        try:
            return super()._load_index()
        except (AttributeError, ImportError):
            return {}


class KernelCache(FunctionCache):  # type: ignore[misc]  # Numba has no types
    """Keeps the machine code of a kernel, by types of its arguments and by processor.

    Raises:
        OSError: it can be kept nowhere.
    """

    def __init__(self, function: Callable[..., None]) -> None:
        try:
            super().__init__(function)
        except RuntimeError as error:
            raise OSError(
                f"no folder to keep the compiled code of {inspect.getfile(function)} in: neither the __pycache__ "
                f"beside it nor the user's cache folder can be written, NUMBA_CACHE_DIR={config.CACHE_DIR!r}; "
                "set NUMBA_CACHE_DIR to a folder that can be written"
            ) from error
        self._cache_file = _Index(self.cache_path, self._impl.filename_base, sources_of(function))
