"""Stand in for vLLM's policy, but compute nothing: it speaks the same lines of JSON, and no library is loaded.

Each completion is a token that follows from its seed, and the end token, reported with -1 each. With an argument it
misbehaves: "few", "short", "silent".
"""

from __future__ import annotations

import sys
from pathlib import Path

from samebit.benchmarks.engines.messages import own_stdout
from samebit.benchmarks.engines.policy_messages import Draw, Drawn, serve_policy


class StandIn:
    """Draws nothing."""

    versions = {"stand-in": "1"}  # noqa: RUF012

    def __init__(self, fault: str) -> None:
        self._fault = fault

    def load(self, folder: str) -> None:
        if not Path(folder).is_dir():
            sys.exit(f"no folder {folder}")

    def draw(self, draw: Draw) -> Drawn:
        sys.stdout.write("this is no message\n")
        count = len(draw.prompts) * draw.samples - (self._fault == "few")
        tokens = [[7 + (draw.seed + i) % 5, *(draw.ends if self._fault != "short" else [])] for i in range(count)]
        logprobs = [[-1.0] * (len(one) - (self._fault == "silent")) for one in tokens]
        return Drawn(tokens, logprobs, [True] * count)


if __name__ == "__main__":
    serve_policy(StandIn(sys.argv[1]), own_stdout())
