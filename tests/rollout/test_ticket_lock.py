"""The fair lock."""

from __future__ import annotations

import threading
from collections import Counter

import pytest

from samebit.rollout.ticket_lock import TicketLock


def wait_until_queued(lock: TicketLock, count: int) -> None:
    """Until `count` threads stand in the queue (they were started, so they will)."""
    tick = threading.Event()
    for _ in range(10_000):
        if lock.num_waiting >= count:
            return
        tick.wait(0.001)
    raise AssertionError(f"only {lock.num_waiting} of {count} threads are waiting")


def test_the_lock_is_handed_over_in_the_order_of_asking() -> None:
    lock = TicketLock()
    order: list[int] = []

    def take(index: int) -> None:
        with lock:
            order.append(index)

    threads = [threading.Thread(target=take, args=(index,)) for index in range(8)]
    with lock:
        for count, thread in enumerate(threads, 1):
            thread.start()
            wait_until_queued(lock, count)
    for thread in threads:
        thread.join(20)
    assert order == list(range(8))


def test_a_thread_that_comes_back_stands_behind_those_who_wait() -> None:
    """Greedy loops on every side: between two turns of one, each of the others has had its turn."""
    lock = TicketLock()
    turns: list[int] = []
    start = threading.Barrier(4)

    def loop(index: int) -> None:
        start.wait(20)
        for _ in range(200):
            with lock:
                turns.append(index)
                if len(turns) < 700:
                    wait_until_queued(lock, 3 if len(turns) < 600 else 0)

    threads = [threading.Thread(target=loop, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert Counter(turns) == dict.fromkeys(range(4), 200)
    assert all(sorted(turns[i : i + 4]) == [0, 1, 2, 3] for i in range(4, 500, 4))


def test_one_that_requeues_stands_behind_those_who_wait_and_before_those_who_come() -> None:
    lock = TicketLock()
    order: list[str] = []

    def take(name: str) -> None:
        with lock:
            order.append(name)
            if name == "waits":
                late.start()
                wait_until_queued(lock, 2)

    waits, late = (threading.Thread(target=take, args=(name,)) for name in ("waits", "late"))
    with lock:
        lock.requeue()
        assert lock.held_by_me, "nobody waits"
        waits.start()
        wait_until_queued(lock, 1)
        lock.requeue()
        order.append("requeued")
    for thread in (waits, late):
        thread.join(20)
    assert order == ["waits", "requeued", "late"]
    with pytest.raises(RuntimeError, match="does not hold"):
        lock.requeue()


def test_asking_twice_raises_and_does_not_hang() -> None:
    lock = TicketLock()
    with lock:
        assert lock.held_by_me
        with pytest.raises(RuntimeError, match="holds the lock already"):
            lock.acquire()
    assert not lock.held_by_me


def test_only_the_holder_may_release() -> None:
    lock = TicketLock()
    with pytest.raises(RuntimeError, match="does not hold"):
        lock.release()


def test_an_exception_in_the_block_releases() -> None:
    lock = TicketLock()
    with pytest.raises(KeyError), lock:
        raise KeyError
    done = threading.Event()

    def take() -> None:
        with lock:
            done.set()

    threading.Thread(target=take).start()
    assert done.wait(20)
