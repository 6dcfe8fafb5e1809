"""The lock of turns is fair."""

from __future__ import annotations

import threading
from collections import Counter

import pytest

from samebit.rollout.control.turn_lock import TurnLock

from ...patience import HANG, wait_until
from ..inside import num_queued


def no_work() -> bool:
    return False


def wait_until_queued(lock: TurnLock, count: int) -> None:
    """Wait until `count` threads stand in the queue (they were started, so they will)."""
    wait_until(lambda: num_queued(lock) >= count)


def test_the_lock_is_handed_over_in_the_order_of_asking() -> None:
    lock = TurnLock(no_work)
    order: list[int] = []

    def take(index: int) -> None:
        with lock.turn():
            order.append(index)

    threads = [threading.Thread(target=take, args=(index,)) for index in range(8)]
    with lock.turn():
        for count, thread in enumerate(threads, 1):
            thread.start()
            wait_until_queued(lock, count)
    for thread in threads:
        thread.join(HANG)
    assert order == list(range(8))


def test_a_thread_that_comes_back_stands_behind_those_who_wait() -> None:
    """A thread that comes back stands behind those who wait: with greedy loops on every side, each of the others has
    had its turn between two turns of one.
    """
    lock = TurnLock(no_work)
    turns: list[int] = []
    start = threading.Barrier(4)

    def loop(index: int) -> None:
        start.wait(HANG)
        for _ in range(200):
            with lock.turn():
                turns.append(index)
                if len(turns) < 700:
                    wait_until_queued(lock, 3 if len(turns) < 600 else 0)

    threads = [threading.Thread(target=loop, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG)
    assert Counter(turns) == dict.fromkeys(range(4), 200)
    assert all(sorted(turns[i : i + 4]) == [0, 1, 2, 3] for i in range(4, 500, 4))


class Hosted:
    """Holds a lock whose generation is a thread that takes turns when it is told to. `order`: who had the lock."""

    def __init__(self, owed: bool) -> None:
        self.lock = TurnLock(lambda: owed)
        self.order: list[str] = []

    def start(self, name: str) -> threading.Thread:
        """Start a thread that asks for the lock once."""
        turn = self.lock.generation if name == "generation" else self.lock.turn

        def take() -> None:
            with turn():
                self.order.append(name)

        thread = threading.Thread(target=take)
        thread.start()
        return thread


def test_generation_comes_before_the_commands_that_wait() -> None:
    hosted = Hosted(owed=False)
    with hosted.lock.turn():
        threads = [hosted.start("first")]
        wait_until_queued(hosted.lock, 1)
        threads.append(hosted.start("second"))
        wait_until_queued(hosted.lock, 2)
        threads.append(hosted.start("generation"))
        wait_until(lambda: hosted.lock._first is not None)
    for thread in threads:
        thread.join(HANG)
    assert hosted.order == ["generation", "first", "second"]


def test_a_turn_that_is_owed_is_kept_for_generation_that_has_not_asked_yet() -> None:
    hosted = Hosted(owed=True)
    with hosted.lock.turn():
        pass
    threads = []
    for count, name in enumerate(("first", "second"), 1):
        threads.append(hosted.start(name))
        wait_until_queued(hosted.lock, count)
    assert hosted.order == []
    threads += [hosted.start("generation")]
    threads[-1].join(HANG)
    threads += [hosted.start("generation")]
    for thread in threads:
        thread.join(HANG)
    assert hosted.order == ["generation", "first", "generation", "second"]


def test_without_work_the_next_command_gets_it() -> None:
    hosted = Hosted(owed=False)
    with hosted.lock.turn():
        threads = [hosted.start(name) for name in ("first", "second")]
        wait_until_queued(hosted.lock, 2)
    for thread in threads:
        thread.join(HANG)
    assert sorted(hosted.order) == ["first", "second"]
    with hosted.lock.generation():
        assert hosted.lock.held_by_me


def test_asking_twice_raises_and_does_not_hang() -> None:
    lock = TurnLock(no_work)
    with lock.turn():
        assert lock.held_by_me
        with pytest.raises(RuntimeError, match="holds the lock already"), lock.turn():
            pass
        with pytest.raises(RuntimeError, match="holds the lock already"), lock.generation():
            pass
    assert not lock.held_by_me


def test_an_exception_in_the_block_releases() -> None:
    lock = TurnLock(no_work)
    with pytest.raises(KeyError), lock.turn():
        raise KeyError
    done = threading.Event()

    def take() -> None:
        with lock.turn():
            done.set()

    threading.Thread(target=take).start()
    assert done.wait(HANG)
