"""The trainer hears in time of kill -9 of a worker's process in the middle of generate, and another takes over."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from samebit.rollout import RolloutWorker
from samebit.weight_sync import PeerLostError, SharedMemorySender, SyncTimeoutError

from ...forks import python
from ...patience import HANG
from ..tiny_llama import tiny
from .worker_process import CONFIG, samples

SCRIPT = Path(__file__).with_name("worker_process.py")
SHORT = 1.0


class WorkerProcesses:
    """Runs one worker after the other, as forks of one process."""

    def __init__(self, folder: Path, address: str) -> None:
        self._parent = subprocess.Popen(
            [*python(), str(SCRIPT), str(folder), address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=folder,
        )
        self._worker = 0

    def start(self) -> None:
        self._worker = self.ask("start")

    def tell(self, command: str) -> None:
        assert self._parent.stdin is not None
        print(command, file=self._parent.stdin, flush=True)

    def answer(self) -> Any:
        assert self._parent.stdout is not None
        return json.loads(self._parent.stdout.readline())

    def ask(self, command: str) -> Any:
        self.tell(command)
        return self.answer()

    def kill(self) -> None:
        os.kill(self._worker, signal.SIGKILL)
        assert self.answer() == -signal.SIGKILL

    def end(self) -> None:
        self._parent.communicate()
        assert self._parent.returncode == 0


def test_a_worker_process_is_killed_while_it_generates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker process that is killed while it generates, as the trainer waits for it or before a sync, harms no later
    one: the third process has all weights, and the right ones.
    """
    trainer = tiny(1)
    tiny(2).save_pretrained(tmp_path)
    with SharedMemorySender(timeout=2 * HANG) as sender, ThreadPoolExecutor(1) as beside:
        worker = WorkerProcesses(tmp_path, sender.address)

        def synced() -> Any:
            worker.tell("receive")
            report = sender.send(trainer, delta=True)
            assert worker.answer() == 1
            return report

        worker.start()
        synced()
        assert worker.ask("begin") > 0
        announced, listen = threading.Event(), sender.link._next

        def listen_from_now() -> object:
            announced.set()
            return listen()

        monkeypatch.setattr(sender.link, "_next", listen_from_now)
        sending = beside.submit(sender.send, trainer, delta=True)
        assert announced.wait(HANG)
        assert not sending.done(), "it waits for a worker that is in generate"
        began = time.monotonic()
        worker.kill()
        with pytest.raises(PeerLostError, match="the other side"):
            sending.result(HANG)
        assert time.monotonic() - began < HANG

        worker.start()
        assert not synced().delta
        assert worker.ask("begin") > 0
        worker.kill()
        sender.link.patience.seconds = SHORT
        with pytest.raises(SyncTimeoutError, match="no receiver connected"):
            sender.send(trainer, delta=True)

        sender.link.patience.seconds = 2 * HANG
        worker.start()
        report = synced()
        assert not report.delta, "all of it"
        assert report.sent_bytes == report.dense_bytes
        with RolloutWorker(trainer, config=CONFIG) as local:
            assert worker.ask("samples") == samples(local)
        worker.kill()
        worker.end()
