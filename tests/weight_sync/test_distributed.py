"""Broadcast to several receivers and from shards, with gloo, in three processes."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("ranks.py")


def test_three_ranks(tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(tmp_path), str(rank)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=tmp_path,
        )
        for rank in range(3)
    ]
    try:
        said = [rank.communicate(timeout=120)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    codes = [rank.returncode for rank in ranks]
    assert codes == [0, 0, -signal.SIGKILL], "\n".join(said)
    assert all("all went well" in text for text in said[:2])
