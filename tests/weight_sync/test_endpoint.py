"""A link is made with nobody but the right process at its other end, and removes nothing else on the way to it."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import socket
import stat
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from torch import nn

from samebit.weight_sync import (
    PeerLostError,
    SharedMemoryReceiver,
    SharedMemorySender,
    SyncBrokenError,
    SyncTimeoutError,
    apply_weights,
)
from samebit.weight_sync.transports.channel import Channel
from samebit.weight_sync.transports.endpoint import Endpoint, connect
from samebit.weight_sync.transports.shared_memory import SharedFile
from samebit.weight_sync.wire.patience import Patience

from ..patience import HANG

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs to become another user")


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a temporary directory of this test, with a short name, as a socket's path has to be short."""
    folder = Path(tempfile.mkdtemp(prefix="D"))
    folder.chmod(0o755)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def left_behind(folder: Path, mode: int = 0o700) -> Path:
    """Return a socket that nobody listens at any more, in a folder of its own."""
    folder.mkdir()
    folder.chmod(mode)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(folder / "link"))
    return folder / "link"


# -- what is removed -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["file", "empty file", "folder", "pipe", "link to a file", "link to a socket"])
@pytest.mark.parametrize("inside", ["samebit-link-1", "mine"])
def test_an_address_that_is_no_socket_is_left_alone(temporary: Path, kind: str, inside: str) -> None:
    folder = temporary / inside
    folder.mkdir(mode=0o700)
    place = folder / "model.safetensors"
    if kind == "folder":
        place.mkdir()
    elif kind == "pipe":
        os.mkfifo(place)
    elif kind == "link to a file":
        (folder / "other").write_bytes(b"weights")
        place.symlink_to(folder / "other")
    elif kind == "link to a socket":
        place.symlink_to(left_behind(temporary / "samebit-link-2"))
    else:
        place.write_bytes(b"" if kind == "empty file" else b"weights")
    before = sorted((path, os.lstat(path).st_ino) for path in temporary.rglob("*"))
    with SharedMemoryReceiver(str(place), timeout=5) as end, pytest.raises(PeerLostError, match="no sender at"):
        end.listen()
    assert sorted((path, os.lstat(path).st_ino) for path in temporary.rglob("*")) == before


def test_what_a_dead_sender_left_is_removed_and_nothing_else(temporary: Path) -> None:
    dead = left_behind(temporary / "samebit-link-1")
    other = left_behind(temporary / "mine")
    full = left_behind(temporary / "samebit-link-2")
    (full.parent / "notes").write_text("of somebody")
    (temporary / "samebit-link-3").symlink_to(left_behind(temporary / "yours").parent)
    for address in (dead, other, full, temporary / "samebit-link-3" / "link"):
        with SharedMemoryReceiver(str(address), timeout=5) as end, pytest.raises(PeerLostError, match="no sender at"):
            end.listen()
    assert not dead.parent.exists()
    assert other.exists()
    assert full.exists()
    assert (temporary / "samebit-link-3" / "link").exists()


@pytest.mark.parametrize("address", ["", ".", "/", "\0", "\ud800", "x" * 5000, "/dev/null", "/proc/self/fd"])
def test_an_address_that_can_be_none(address: str) -> None:
    with SharedMemoryReceiver(address, timeout=5) as end, pytest.raises(PeerLostError, match="no sender at"):
        end.listen()


def test_a_new_sender_sweeps_what_dead_ones_left(temporary: Path) -> None:
    (temporary / "samebit-link-empty").mkdir(mode=0o700)
    dead = [left_behind(temporary / f"samebit-link-{number}").parent for number in range(3)]
    dead.append(temporary / "samebit-link-empty")
    kept = [
        left_behind(temporary / "samebit-link-open", mode=0o755).parent,
        left_behind(temporary / "samebit-check-1").parent,
        left_behind(temporary / "samebit-link-full").parent,
        temporary / "samebit-link-file",
        temporary / "samebit-link-to",
    ]
    (kept[2] / "notes").write_text("of somebody")
    kept[3].write_text("a file")
    kept[4].symlink_to(left_behind(temporary / "elsewhere").parent)
    listening = temporary / "samebit-link-alive"
    listening.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as alive:
        alive.bind(str(listening / "link"))
        alive.listen()
        with Endpoint() as first, Endpoint() as second:
            assert not any(path.exists() for path in dead)
            assert all(path.exists() for path in [*kept, kept[4] / "link", listening / "link"])
            for endpoint in (first, second):
                connect(endpoint.address, 5).close()
    assert not any(Path(endpoint.address).parent.exists() for endpoint in (first, second))


def test_a_sender_that_was_killed_is_swept(temporary: Path) -> None:
    child = os.fork()
    if child == 0:
        _ = Endpoint()
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert len(list(temporary.iterdir())) == 1
    with Endpoint() as own:
        assert [str(path) for path in temporary.iterdir()] == [str(Path(own.address).parent)]


def test_the_end_of_a_forked_child_removes_nothing(temporary: Path) -> None:
    with Endpoint() as own:
        child = os.fork()
        if child == 0:
            own.close()
            os._exit(0)
        os.waitpid(child, 0)
        assert Path(own.address).exists()


def test_senders_that_are_made_at_once_do_not_sweep_each_other(temporary: Path) -> None:
    def make(_: int) -> None:
        with Endpoint() as own:
            connect(own.address, 5).close()
            own.accept(time.monotonic() + 5).close()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(make, range(80)))
    assert not list(temporary.iterdir())


def test_a_temporary_directory_of_a_long_name(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link works under a temporary directory whose name is far longer than the 107 bytes of a socket's address."""
    deep = temporary.joinpath(*["of a job on a cluster" * 5] * 5)
    deep.mkdir(parents=True)
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    model, trainer = nn.Linear(3, 5), nn.Linear(3, 5)
    with (
        SharedMemorySender(timeout=HANG) as sender,
        SharedMemoryReceiver(sender.address, timeout=HANG) as end,
        ThreadPoolExecutor(1) as other,
    ):
        sent = other.submit(sender.send, trainer)
        apply_weights(model, end)
        assert sent.result().tensors == 2
    assert model.weight.equal(trainer.weight)
    assert not list(deep.iterdir())


@pytest.mark.parametrize("seconds", [1e10, 1.7e308])
def test_a_timeout_may_be_as_long_as_it_likes(seconds: float) -> None:
    model, trainer = nn.Linear(3, 5), nn.Linear(3, 5)
    with (
        SharedMemorySender(timeout=seconds) as sender,
        SharedMemoryReceiver(sender.address, timeout=seconds) as end,
        ThreadPoolExecutor(1) as other,
    ):
        sent = other.submit(sender.send, trainer)
        try:
            apply_weights(model, end)
        except BaseException:
            sender.close()  # it would wait for ever
            raise
        assert sent.result().tensors == 2
    assert model.weight.equal(trainer.weight)


@contextmanager
def no_more_open_files() -> Iterator[None]:
    """Let this process open no file beside those that it has."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.open("/", os.O_RDONLY)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_sender_that_can_open_no_more_files_says_so() -> None:
    with SharedMemorySender(timeout=1e-3) as sender:
        with pytest.raises(SyncTimeoutError):
            sender.send(nn.Linear(3, 5))  # it has its memory now
        sender.link.patience = Patience(HANG)
        connect(sender.address, HANG).close()
        with no_more_open_files(), pytest.raises(PeerLostError, match=r"can connect: .*Too many open files"):
            sender.send(nn.Linear(3, 5))


def test_a_receiver_without_room_for_the_sender_s_file_says_so() -> None:
    ours, theirs = socket.socketpair()
    with closing(Channel(ours, Patience(HANG))) as channel, closing(Channel(theirs, Patience(HANG))) as other:
        other.send(SharedFile(), theirs.fileno())
        with no_more_open_files(), pytest.raises(SyncBrokenError, match="this process has too many open"):
            channel.receive(SharedFile)


# -- who is there ----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [0o755, 0o710, 0o701, 0o777])
def test_a_folder_that_others_may_enter_is_refused_by_both_ends(mode: int) -> None:
    with SharedMemorySender(timeout=5) as sender, SharedMemoryReceiver(sender.address, timeout=5) as end:
        Path(sender.address).parent.chmod(mode)
        with pytest.raises(PeerLostError, match=f"with mode {mode:o}; a link's is"):
            end.listen()
        with pytest.raises(PeerLostError, match=f"with mode {mode:o}; a link's is"):
            sender.send(nn.Linear(1, 1))


def test_another_user_s_folder_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A socket in another user's folder is refused; here this process is taken for another user's."""
    with SharedMemorySender(timeout=5) as sender, SharedMemoryReceiver(sender.address, timeout=5) as end:
        here = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: here + 1)
        with pytest.raises(PeerLostError, match=f"is not a socket of user {here + 1}"):
            end.listen()
        monkeypatch.undo()
        assert stat.S_ISSOCK(os.lstat(sender.address).st_mode)


@as_root
def test_what_another_user_left_is_not_touched(temporary: Path) -> None:
    place = left_behind(temporary / "samebit-link-1")
    os.chown(place.parent, NOBODY, NOBODY)
    with Endpoint():
        assert place.exists()
    os.chown(place.parent, 0, 0)
    os.chown(place, NOBODY, NOBODY)
    with (
        Endpoint(),
        SharedMemoryReceiver(str(place), timeout=5) as end,
        pytest.raises(PeerLostError, match="no sender"),
    ):
        end.listen()
    assert place.exists()


def in_a_child_of_another_user(act: object) -> None:
    child = os.fork()
    if child == 0:
        os.setuid(NOBODY)
        act()  # type: ignore[operator]
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


@as_root
def test_a_listener_of_another_user_is_refused(temporary: Path) -> None:
    """A link is refused where another user's process listens, though folder and socket are this user's."""
    folder = temporary / "samebit-link-1"
    folder.mkdir()
    folder.chmod(0o777)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "link"))
        folder.chmod(0o700)
        in_a_child_of_another_user(listener.listen)
        refused = pytest.raises(PeerLostError, match=f"the process at the other end is of user {NOBODY}")
        with SharedMemoryReceiver(str(folder / "link"), timeout=5) as end, refused:
            end.listen()


@as_root
def test_a_receiver_of_another_user_is_refused_and_the_next_one_served(caplog: pytest.LogCaptureFixture) -> None:
    model, trainer = nn.Linear(3, 5), nn.Linear(3, 5)
    with SharedMemorySender(timeout=HANG) as sender, SharedMemoryReceiver(sender.address, timeout=HANG) as end:
        folder = Path(sender.address).parent
        folder.chmod(0o755)
        os.chmod(sender.address, 0o777)
        with socket.socket(socket.AF_UNIX) as stranger:
            in_a_child_of_another_user(lambda: stranger.connect(sender.address))
            folder.chmod(0o700)
            receiving = threading.Thread(target=apply_weights, args=(model, end))
            receiving.start()
            sender.send(trainer)
            receiving.join(HANG)
            assert stranger.recv(1) == b"", "it was hung up on, and given nothing"
    assert model.weight.equal(trainer.weight)
    assert f"is of user {NOBODY}" in caplog.text
