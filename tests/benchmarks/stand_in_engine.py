"""Stand in for vLLM's engine, but compute nothing: it speaks the same lines of JSON, and no library is loaded.

It draws tokens below 90 and reports -1 for each. With a second argument it misbehaves: "dies", "short", "silent".
"""

from __future__ import annotations

import random
import sys

from samebit.benchmarks.engines.messages import Done, Job, own_stdout, serve


class StandIn:
    """Keeps what was computed, so that it can say what a prefix cache would have spared."""

    versions = {"stand-in": "1"}  # noqa: RUF012

    def __init__(self, fault: str) -> None:
        self._fault = fault
        self._known: set[tuple[int, ...]] = set()

    def forget(self) -> None:
        self._known.clear()

    def run(self, job: Job) -> Done:
        sys.stdout.write("this is no message\n")
        if self._fault == "dies":
            sys.exit("a fault of the engine")
        count = job.new_tokens - (self._fault == "short")
        cached = sum(len(prompt) for prompt in job.prompts if tuple(prompt) in self._known)
        self._known |= {tuple(prompt) for prompt in job.prompts}
        sequences = len(job.prompts) * job.samples
        tokens = [random.choices(range(90), k=count) for _ in range(sequences)]
        asked = job.logprobs and self._fault != "silent"
        logprobs = [[-1.0] * count for _ in tokens] if asked else None
        return Done(0.25, tokens, logprobs, cached)


if __name__ == "__main__":
    serve(StandIn(sys.argv[1]), own_stdout())
