"""A cache reads and writes those fields of a request and its sequences that `contract` names."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

from samebit.rollout.engine.engine import Engine
from samebit.rollout.requests.request import KVHistory, Request, Schedule, Sequence
from samebit.rollout.requests.shared import Shared

READ = {
    Request: {"prompt", "prompt_digests", "params", "adapter_number", "images", "sequences"},
    Shared: {"error"},
    Sequence: {
        "shared",
        "slot",
        "token_ids",
        "num_tokens",
        "num_prompt_tokens",
        "num_computed",
        "schedule",
        "prompt_logprobs_wanted",
        "resume_at",
    },
    Schedule: {"num_ahead"},
    KVHistory: set(),
}
WRITTEN = {
    Request: set(),
    Shared: set(),
    Sequence: {"slot", "num_computed"},
    Schedule: set(),
    KVHistory: {"write_from"},
}


def note_accesses(monkeypatch: pytest.MonkeyPatch, owner: type, read: set[str], written: set[str]) -> None:
    """Collect the names that code of the cache reads and writes, itself or through a method that it calls."""

    def by_the_cache(depth: int) -> bool:
        return sys._getframe(depth).f_globals["__name__"].startswith("samebit.rollout.cache")

    def get(self: object, name: str) -> Any:
        if by_the_cache(2):
            read.add(name)
        return object.__getattribute__(self, name)

    def put(self: object, name: str, value: object) -> None:
        if by_the_cache(2) or by_the_cache(3):
            written.add(name)
        object.__setattr__(self, name, value)

    monkeypatch.setattr(owner, "__getattribute__", get)
    monkeypatch.setattr(owner, "__setattr__", put)


@pytest.mark.parametrize(
    "options",
    [{"prefix_caching": False}, {}, {"recurrent": True, "num_checkpoints": 4, "num_held": 1}],
    ids=["none", "attention", "recurrent"],
)
def test_a_cache_touches_the_fields_that_its_contract_names(
    make_engine: Callable[..., Engine],
    make_request: Callable[..., Request],
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
) -> None:
    engine = make_engine(num_blocks=12, max_num_seqs=3, max_num_batched_tokens=16, **options)
    requests = [
        make_request("group", list(range(9)), n=3, max_tokens=6),
        make_request("scored", list(range(14)), max_tokens=6, prompt_logprobs=0),
        make_request("long", [*range(8), *range(40, 50)], max_tokens=12),
        make_request("gone", list(range(9)), max_tokens=6),
    ]
    read: dict[type, set[str]] = {owner: set() for owner in READ}
    written: dict[type, set[str]] = {owner: set() for owner in READ}
    for owner in READ:
        note_accesses(monkeypatch, owner, read[owner], written[owner])
    for request in requests:
        engine.add(request)
    for step in range(100):
        if step == 4:
            engine.abort(["gone"])
            engine.preempt_all()
        engine.step()
    assert not engine.has_work
    nothing_shared = {**{owner: set() for owner in READ}, Sequence: {"slot"}}
    assert written == (nothing_shared if "prefix_caching" in options else WRITTEN)
    if "recurrent" in options:
        assert read == READ
    else:
        assert all(read[owner] <= READ[owner] for owner in READ)
