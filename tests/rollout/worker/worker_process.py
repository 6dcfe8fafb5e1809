"""Run workers in processes of their own, for test_worker_process.py: `worker_process.py FOLDER ADDRESS`.

The first line on stdin forks a worker, which answers with the number of its process. What follows are commands to it;
each answer is a line of JSON. Its exit code is the last, and the next line forks another.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import numpy as np

from samebit.rollout import RolloutConfig, RolloutWorker, SamplingParams
from samebit.weight_sync import SharedMemoryReceiver

CONFIG = RolloutConfig(max_num_seqs=8, num_blocks=600, seed=3, dtype="float32")
PROMPTS = [[1], [2, 3, 4], list(range(5, 22))]
PARAMS = SamplingParams(max_tokens=40, temperature=0.7, seed=5, ignore_eos=True)
LONG = SamplingParams(max_tokens=1900, ignore_eos=True)


def samples(worker: Any) -> list[list[list[int]]]:
    """Return tokens, and the bits of their log-probabilities."""
    outputs = [output.samples[0] for output in worker.generate(PROMPTS, PARAMS)]
    return [[one.token_ids, np.asarray(one.logprobs, np.float32).view(np.int32).tolist()] for one in outputs]


def begin(worker: Any) -> float:
    """Begin a long generation, in the middle of which this returns."""
    worker.submit_all(PROMPTS, LONG)
    while worker.stats()["output_tokens"] < 50:
        time.sleep(0.001)
    return float(worker.stats()["running"])


def work(folder: str, address: str) -> None:
    with RolloutWorker(folder, config=CONFIG) as worker, SharedMemoryReceiver(address, timeout=900) as end:
        commands = {
            "receive": lambda: worker.receive_weights(end, verify=True).version,
            "samples": lambda: samples(worker),
            "begin": lambda: begin(worker),
        }
        for line in sys.stdin:
            say(commands[line.strip()]())


def say(answer: object) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Load what workers need, and compute nothing."""
    while sys.stdin.readline():
        child = os.fork()
        if child == 0:
            say(os.getpid())
            work(*sys.argv[1:])
            os._exit(0)
        say(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


if __name__ == "__main__":
    main()
