"""For VERL_USE_EXTERNAL_MODULES: servers write down what they answered, and one dies in an update of its weights.

Environment: SPY_FOLDER, where it is written, a file a server; SPY_LAST_UPDATE, the number of the update in which it
dies.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
from pathlib import Path

from samebit.rollout.handle import RequestHandle
from samebit.rollout.outputs import RequestOutput
from samebit.weight_sync import BroadcastReceiver
from samebit.weight_sync.link import Answer

FOLDER = Path(os.environ["SPY_FOLDER"])
LAST = int(os.environ["SPY_LAST_UPDATE"])
DIED = "died"

_answer, _result = BroadcastReceiver.answer, RequestHandle.result_async
_updates = itertools.count(1)


def answer(self: BroadcastReceiver, given: Answer) -> Answer:
    """All have agreed, the weights come: the first server that is so far dies here."""
    decided = _answer(self, given)
    if next(_updates) == LAST and not (FOLDER / DIED).exists():
        (FOLDER / DIED).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return decided


async def result(self: RequestHandle) -> RequestOutput:
    output = await _result(self)
    turn = {
        "server": os.getpid(),
        "prompt": output.prompt_token_ids,
        "tokens": output.samples[0].token_ids,
        "cached": output.num_cached_tokens,
    }
    with (FOLDER / f"{os.getpid()}.jsonl").open("a") as file:
        file.write(json.dumps(turn) + "\n")
    return output


BroadcastReceiver.answer = answer  # type: ignore[method-assign]
RequestHandle.result_async = result  # type: ignore[method-assign]
