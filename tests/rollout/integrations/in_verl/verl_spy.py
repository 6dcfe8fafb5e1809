"""For VERL_USE_EXTERNAL_MODULES: servers write down what they answered, and one dies.

Environment: SPY_FOLDER, where it is written, a file a server. SPY_LAST_UPDATE, the number of the update by broadcast in
which it dies; or SPY_LAST_ANSWER, how many answers it gives before it dies with others being generated.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
from pathlib import Path

from samebit.rollout.control.delivery import RequestHandle
from samebit.rollout.outputs import RequestOutput
from samebit.weight_sync import BroadcastReceiver
from samebit.weight_sync.wire.link import Answer

FOLDER = Path(os.environ["SPY_FOLDER"])
LAST_UPDATE, LAST_ANSWER = (int(os.environ.get(f"SPY_LAST_{what}", 0)) for what in ("UPDATE", "ANSWER"))
DIED = "died"

_answer, _result = BroadcastReceiver.answer, RequestHandle.result_async
_updates, _answers = itertools.count(1), itertools.count(1)
_asked: set[str] = set()


def die() -> None:
    """Only one server does."""
    if not (FOLDER / DIED).exists():
        (FOLDER / DIED).touch()
        os.kill(os.getpid(), signal.SIGKILL)


def answer(self: BroadcastReceiver, given: Answer) -> Answer:
    """All have agreed, the weights come: the first server that is so far dies here."""
    decided = _answer(self, given)
    if next(_updates) == LAST_UPDATE:
        die()
    return decided


async def result(self: RequestHandle) -> RequestOutput:
    _asked.add(self.request_id)
    output = await _result(self)
    _asked.remove(self.request_id)
    turn = {
        "server": os.getpid(),
        "prompt": output.prompt_token_ids,
        "tokens": output.samples[0].token_ids,
        "cached": output.num_cached_tokens,
    }
    with (FOLDER / f"{os.getpid()}.jsonl").open("a") as file:
        file.write(json.dumps(turn) + "\n")
    if LAST_ANSWER and next(_answers) >= LAST_ANSWER and _asked:
        die()
    return output


BroadcastReceiver.answer = answer  # type: ignore[method-assign]
RequestHandle.result_async = result  # type: ignore[method-assign]
