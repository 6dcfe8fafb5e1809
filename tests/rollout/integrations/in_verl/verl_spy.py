"""Let verl's servers write down what they answered, and one die, by VERL_USE_EXTERNAL_MODULES.

Environment: SPY_FOLDER, where it is written, a file a server. SPY_LAST_UPDATE, the number of the update by broadcast in
which it dies; or SPY_LAST_ANSWER, how many answers it gives before it dies with others being generated.

Most processes of verl load nothing of the worker: it spies once one looks for the server's module.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any

SERVER = "samebit.rollout.integrations.verl.server.server"
FOLDER = Path(os.environ["SPY_FOLDER"])
LAST_UPDATE, LAST_ANSWER = (int(os.environ.get(f"SPY_LAST_{what}", 0)) for what in ("UPDATE", "ANSWER"))
DIED = "died"

_updates, _answers = itertools.count(1), itertools.count(1)
_asked: set[str] = set()


def die() -> None:
    """Die, if no other server has."""
    if not (FOLDER / DIED).exists():
        (FOLDER / DIED).touch()
        os.kill(os.getpid(), signal.SIGKILL)


def write(output: Any) -> None:
    turn = {
        "server": os.getpid(),
        "prompt": output.prompt_token_ids,
        "tokens": output.samples[0].token_ids,
        "cached": output.num_cached_tokens,
    }
    with (FOLDER / f"{os.getpid()}.jsonl").open("a") as file:
        file.write(json.dumps(turn) + "\n")


def spy() -> None:
    from samebit.rollout.control.delivery import RequestHandle
    from samebit.weight_sync import BroadcastReceiver

    own_answer, own_result = BroadcastReceiver.answer, RequestHandle.result_async

    def answer(self: Any, given: Any) -> Any:
        """Answer; all have agreed and the weights come: the first server that is so far dies here."""
        decided = own_answer(self, given)
        if next(_updates) == LAST_UPDATE:
            die()
        return decided

    async def result(self: Any) -> Any:
        _asked.add(self.request_id)
        output = await own_result(self)
        _asked.remove(self.request_id)
        write(output)
        if LAST_ANSWER and next(_answers) >= LAST_ANSWER and _asked:
            die()
        return output

    BroadcastReceiver.answer = answer  # type: ignore[method-assign]
    RequestHandle.result_async = result  # type: ignore[method-assign]


class BeforeTheServer(MetaPathFinder):
    """Finds no module, but spies once the server's is looked for."""

    def find_spec(self, name: str, *_: object) -> None:
        if name == SERVER:
            sys.meta_path.remove(self)
            spy()


sys.meta_path.insert(0, BeforeTheServer())
