"""Trace what a server computes, for `start_profile` and `stop_profile`."""

from __future__ import annotations

from pathlib import Path

from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile


class Tracing:
    """Runs torch's profiler over all threads of the process; one trace file a use, in `folder`. None: tracing is
    off."""

    def __init__(self, folder: Path | None, name: str) -> None:
        self._folder = folder
        self._name = name
        self._count = 0
        self._running: profile | None = None

    def start(self) -> None:
        """Start tracing, unless it is off or running."""
        if self._folder is not None and self._running is None:
            everywhere = _ExperimentalConfig(profile_all_threads=True)
            self._running = profile(activities=[ProfilerActivity.CPU], experimental_config=everywhere)
            self._running.start()

    def stop(self) -> Path | None:
        """Write the trace, if there is one; where."""
        if self._folder is None or self._running is None:
            return None
        running, self._running = self._running, None
        running.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{self._name}-{self._count}.json"
        self._count += 1
        running.export_chrome_trace(str(path))
        return path
