"""A kernel's items are shared out among threads."""

import os
import threading

import numpy as np
import pytest

from .counting_kernel import kernel


def test_each_item_is_computed_once_whatever_the_threads() -> None:
    for items in (0, 1, 2, 3, 7, 129):
        for threads in (1, 2, 3, 16):
            counts = np.zeros(130)
            kernel(threads, items, 0.5, counts, -1)
            assert np.array_equal(counts[:items], 0.5 * np.arange(1, items + 1))
            assert not counts[items:].any()


def test_an_item_that_raises_is_known_to_the_caller() -> None:
    counts = np.zeros(8)
    for threads in (1, 2):
        with pytest.raises(MemoryError, match="no memory for a kernel's scratch"):
            kernel(threads, 8, 1.0, counts, 5)
    kernel(2, 8, 1.0, counts, -1)


def test_a_forked_child_computes_what_takes_one_thread() -> None:
    """A forked child computes what takes one thread, or has one item, in a loop of the caller: OpenMP ends a forked
    child that starts its threads.
    """
    kernel(2, 8, 1.0, np.zeros(8), -1)
    child = os.fork()
    if child == 0:
        equal = False
        try:
            counts = np.zeros(8)
            kernel(1, 8, 1.0, counts, -1)
            kernel(16, 1, 1.0, counts, -1)
            equal = np.array_equal(counts, [2.0, *range(2, 9)])
        finally:  # whatever was raised: the child must not go on with pytest
            os._exit(0 if equal else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_a_kernel_of_few_items_ends_no_threads() -> None:
    """A kernel of few items ends no threads: libgomp ends those that a smaller team leaves over, and the next kernel
    would start them again.
    """
    started: list[set[str]] = []

    def compute() -> None:
        for items in (8, 3, 8, 2, 8):
            kernel(4, items, 1.0, np.zeros(8), -1)
            started.append({thread for thread in os.listdir("/proc/self/task") if int(thread) > newest})

    kernel(1, 1, 1.0, np.zeros(8), -1)
    newest = max(map(int, os.listdir("/proc/self/task")))
    thread = threading.Thread(target=compute)
    thread.start()
    thread.join()
    assert set.union(*started) == started[0]
