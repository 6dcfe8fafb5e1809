"""Give a sender an address, where its receiver finds it: a socket in a folder that only one user may enter.

Invariants
----------
* Both ends are of one user. A folder that another could enter, and a peer of another user, are refused by either end.
* A living sender holds a lock on its folder; a folder whose lock is free and whose socket refuses is a dead one's.
* Only a dead socket of this user is removed, with its folder `samebit-link-*` of this user: never through a symbolic
  link, and nothing else.
"""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import stat
import struct
import tempfile
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from samebit.weight_sync.closing import Closing

logger = logging.getLogger(__name__)

_PREFIX = "samebit-link-"
_NAME = "link"
_CREDENTIALS = struct.Struct("3i")


class Endpoint(Closing):
    """Holds a socket that listens at `address`, for processes of this user."""

    def __init__(self) -> None:
        sweep()
        self._path, self._folder = _locked_folder()
        self._remove = weakref.finalize(self, _remove_own, self._path, self._folder, os.getpid())
        self.address = str(self._path / _NAME)
        self._closed = False
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(_inside(self._folder, _NAME))
        self._listener.listen()

    @property
    def closed(self) -> bool:
        return self._closed

    def accept(self, deadline: float) -> socket.socket:
        """Wait for a process of this user to connect.

        Raises:
            TimeoutError: none did by the deadline.
            PermissionError: the folder was opened to others.
            OSError: the endpoint was closed.
        """
        while True:
            _check_owner(self._path, os.fstat(self._folder))
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            self._listener.settimeout(left)
            connected, _ = self._listener.accept()
            try:
                _check_peer(connected)
            except PermissionError as error:
                logger.warning("refused a connection to %s: %s", self.address, error)
                connected.close()
            else:
                return connected

    def close(self) -> None:
        self._closed = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # ends a wait for a receiver, which closing alone does not
        self._listener.close()
        self._remove()


def connect(address: str, timeout: float) -> socket.socket:
    """Return a connection to the `Endpoint` at this address; what a dead sender left there is removed.

    Raises:
        PermissionError: the folder, the socket or the process that listens is not this user's alone.
        OSError, ValueError: nothing listens there.
    """
    path = Path(address)
    _check_socket(address, os.lstat(address))
    with _own_folder(path.parent) as folder:
        try:
            return _connected(folder, path.name, timeout)
        except ConnectionRefusedError:
            if path.parent.name.startswith(_PREFIX):
                _remove_dead(path.parent)
            raise


def sweep() -> None:
    """Remove what this user's dead senders left in the temporary directory."""
    with suppress(OSError):
        for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
            _remove_dead(folder)


def _locked_folder() -> tuple[Path, int]:
    """Make a folder; return it with the descriptor that holds its lock."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        with suppress(FileNotFoundError):
            folder = _open_folder(path)
            if _lock(folder) and os.path.samestat(os.lstat(path), os.fstat(folder)):
                return path, folder
            os.close(folder)  # a sweep came between


def _lock(folder: int) -> bool:
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        logger.debug("no locks in the temporary directory: a sweep gets none either, and leaves all folders alone")
    return True


def _open_folder(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def _remove_own(path: Path, folder: int, owner: int) -> None:
    if os.getpid() == owner:
        with suppress(OSError):
            os.unlink(_NAME, dir_fd=folder)
        with suppress(OSError):
            os.rmdir(path)
    os.close(folder)


def _remove_dead(path: Path) -> None:
    with suppress(OSError), _own_folder(path) as folder:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        names = os.listdir(folder)
        if all(_is_dead(folder, name) for name in names):
            for name in names:
                os.unlink(name, dir_fd=folder)
            os.rmdir(path)


def _is_dead(folder: int, name: str) -> bool:
    try:
        _check_socket(name, os.stat(name, dir_fd=folder, follow_symlinks=False))
        _connected(folder, name, timeout=1.0).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False


def _connected(folder: int, name: str, timeout: float) -> socket.socket:
    connecting = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connecting.settimeout(timeout)
        connecting.connect(_inside(folder, name))
        _check_peer(connecting)
    except BaseException:
        connecting.close()
        raise
    return connecting


def _inside(folder: int, name: str) -> str:
    """Return a path into an open folder, whatever its own leads to by now; short, as that of a socket has to be."""
    return f"/proc/self/fd/{folder}/{name}"


@contextmanager
def _own_folder(path: Path) -> Iterator[int]:
    """Open a folder. Raises `PermissionError` unless it is this user's alone."""
    folder = _open_folder(path)
    try:
        _check_owner(path, os.fstat(folder))
        yield folder
    finally:
        os.close(folder)


def _check_owner(path: Path, found: os.stat_result) -> None:
    mode = stat.S_IMODE(found.st_mode)
    if found.st_uid != os.geteuid() or mode & 0o077:
        raise PermissionError(
            f"the folder {path} is of user {found.st_uid} with mode {mode:o}; a link's is of user {os.geteuid()}, 700"
        )


def _check_socket(name: str, found: os.stat_result) -> None:
    if not stat.S_ISSOCK(found.st_mode) or found.st_uid != os.geteuid():
        raise PermissionError(f"{name} is not a socket of user {os.geteuid()}")


def _check_peer(connected: socket.socket) -> None:
    given = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(given)
    if user != os.geteuid():
        raise PermissionError(f"the process at the other end is of user {user}, not of {os.geteuid()}")
