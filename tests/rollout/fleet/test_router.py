"""A router sends requests where it should, and knows what caches elsewhere hold."""

from __future__ import annotations

import pytest

from samebit.rollout import NoReplicaError
from samebit.rollout.fleet.options import FleetOptions, RouterOptions
from samebit.rollout.fleet.routing.router import Prompt, Router
from samebit.rollout.publishing.journal import CacheJournal, CacheNews, CacheSnapshot

BLOCK = 16


def chain(name: str, length: int) -> list[bytes]:
    """Return a chain of digests; two that begin alike share their names' beginning."""
    return [f"{name}{i}".encode() for i in range(length)]


def prompt(digests: list[bytes], **more: object) -> Prompt:
    return Prompt(digests, len(digests) * BLOCK + 5, **more)


def router_of(*names: str, limit: int = 8, **options: object) -> Router:
    router = Router(BLOCK, RouterOptions(**options))
    for name in names:
        router.add(name, limit)
        router.replace(name, CacheSnapshot(1, 0, 0, []))
    return router


def publish(router: Router, name: str, digests: list[bytes], sequence: int = 1) -> None:
    assert router.apply(name, CacheNews(1, 0, sequence, digests, []))


def test_it_goes_where_most_of_its_prompt_is_cached() -> None:
    router = router_of("a", "b", "c")
    publish(router, "b", chain("x", 4))
    publish(router, "c", chain("x", 9))
    ticket = router.route(prompt(chain("x", 12)))
    assert (ticket.replica, ticket.matched) == ("c", 9)


def test_of_equals_the_least_recently_used_one() -> None:
    router = router_of("a", "b", "c")
    seen = []
    for _ in range(6):
        ticket = router.route(prompt([]))
        seen.append(ticket.replica)
        router.done(ticket)
    assert seen == ["a", "b", "c"] * 2


def test_load_weighs_against_the_cache() -> None:
    router = router_of("a", "b", limit=100)
    publish(router, "a", chain("x", 10))
    placed = [router.route(prompt(chain("x", 10) + chain(f"{i}", 10))).replica for i in range(60)]
    assert placed[0] == "a"
    assert placed.count("b") > 10, "load must move some away"
    alone = router_of("a", "b", limit=100, beta=0)
    publish(alone, "a", chain("x", 10))
    assert {alone.route(prompt(chain("x", 10) + chain(f"{i}", 10))).replica for i in range(60)} == {"a"}


def test_full_replicas_come_last() -> None:
    router = router_of("a", "b", limit=2, beta=0)
    publish(router, "a", chain("x", 10))
    assert [router.route(prompt(chain("x", 10))).replica for _ in range(5)] == ["a", "a", "b", "b", "a"]


def test_followers_go_where_the_prompt_is_being_computed() -> None:
    router = router_of("a", "b", "c")
    leader = router.route(prompt(chain("x", 10)))
    assert [router.route(prompt(chain("x", 10) + chain(str(i), 1))).replica for i in range(3)] == [leader.replica] * 3
    assert router.matched(leader.replica, chain("x", 10)) == 10


def test_what_a_failed_request_was_to_publish_is_not_promised() -> None:
    router = router_of("a", "b")
    ticket = router.route(prompt(chain("x", 10)))
    router.done(ticket, computed=False)
    assert router.matched(ticket.replica, chain("x", 10)) == 0


def test_what_a_request_was_to_publish_is_promised_until_two_messages_later() -> None:
    router = router_of("a")
    ticket = router.route(prompt(chain("x", 4)))
    publish(router, "a", chain("x", 2), 1)
    router.done(ticket)
    publish(router, "a", [], 2)
    assert router.matched("a", chain("x", 4)) == 4
    publish(router, "a", [], 3)
    assert router.matched("a", chain("x", 4)) == 2


def test_a_group_stays_together_until_it_is_too_large() -> None:
    router = router_of("a", "b", "c", limit=100, max_group=4)
    tickets = [router.route(prompt([], group=b"g")) for _ in range(10)]
    names = [ticket.replica for ticket in tickets]
    assert [len(set(names[:4])), len(set(names[4:8])), len(set(names[8:]))] == [1, 1, 1]
    assert len({names[0], names[4], names[8]}) == 3
    for ticket in tickets:
        router.done(ticket)
        router.done(ticket)  # the second time counts nothing
    assert set(router.loads().values()) == {0}
    assert router.stats()["router_groups"] == 0


def test_a_session_stays_unless_its_replica_is_saturated() -> None:
    router = router_of("a", "b", limit=8)
    first = router.route(prompt([], session="s"))
    router.done(first)
    for _ in range(3):
        router.done(router.route(prompt([])))
    again = router.route(prompt([], session="s"))
    assert again.replica == first.replica
    router.done(again)
    other = "b" if first.replica == "a" else "a"
    router.close(other, "busy", "not now")
    filling = [router.route(prompt([])) for _ in range(8)]
    router.reopen(other, "busy")
    assert {ticket.replica for ticket in filling} == {first.replica}
    assert router.route(prompt([], session="s")).replica == other
    assert router.stats()["router_sessions_moved"] == 1


def test_sessions_leave_a_replica_that_is_far_above_the_mean() -> None:
    router = router_of("a", "b", "c", "d", limit=64, overload=1.5)
    first = router.route(prompt([], session="s"))
    for other in {"a", "b", "c", "d"} - {first.replica}:
        router.close(other, "busy", "not now")
    for _ in range(30):
        router.route(prompt([]))
    for other in {"a", "b", "c", "d"} - {first.replica}:
        router.reopen(other, "busy")
    assert router.route(prompt([], session="s")).replica != first.replica


def test_sessions_are_bounded() -> None:
    router = router_of("a", max_sessions=3)
    for number in range(10):
        router.route(prompt([], session=str(number)))
    assert router.stats()["router_sessions"] == 3


def test_closed_replicas_get_nothing_and_say_why() -> None:
    router = router_of("a", "b")
    router.close("a", "dead", "its process died")
    assert {router.route(prompt([])).replica for _ in range(4)} == {"b"}
    router.close("b", "behind", "its weights are of version 1")
    router.close("b", "silent", "it does not answer")
    with pytest.raises(NoReplicaError, match="a: its process died; b: its weights are of version 1 and it does not"):
        router.route(prompt([]))
    router.reopen("b", "silent")
    with pytest.raises(NoReplicaError):
        router.route(prompt([]))
    router.reopen("b", "behind")
    assert router.route(prompt([])).replica == "b"


def test_without_replicas_nothing_is_routed() -> None:
    router = router_of("a")
    router.remove("a")
    with pytest.raises(NoReplicaError, match="there is none"):
        router.route(prompt([]))
    with pytest.raises(ValueError, match="there is no replica 'a'; there are none"):
        router.close("a", "x", "y")


def test_the_end_of_a_request_at_a_replica_that_is_gone_counts_nothing() -> None:
    router = router_of("a", "b")
    ticket = router.route(prompt(chain("x", 3)))
    router.remove(ticket.replica)
    router.add(ticket.replica, 8)
    router.done(ticket)
    assert router.loads() == {"a": 0, "b": 0}


def test_a_gap_forgets_all_and_asks_for_a_snapshot() -> None:
    router = router_of("a")
    publish(router, "a", chain("x", 4))
    assert not router.apply("a", CacheNews(1, 0, 3, [], []))
    assert router.matched("a", chain("x", 4)) == 0
    assert not router.apply("a", CacheNews(1, 0, 4, chain("x", 4), []))
    router.replace("a", CacheSnapshot(1, 0, 4, chain("x", 3)))
    assert router.matched("a", chain("x", 4)) == 3
    publish(router, "a", chain("x", 4)[3:], 5)
    assert router.matched("a", chain("x", 4)) == 4


def test_messages_that_come_twice_change_nothing() -> None:
    router = router_of("a")
    publish(router, "a", chain("x", 4), 1)
    assert router.apply("a", CacheNews(1, 0, 2, [], chain("x", 4)[3:]))
    assert router.apply("a", CacheNews(1, 0, 1, chain("x", 4), []))
    router.replace("a", CacheSnapshot(1, 0, 0, chain("x", 4)))
    assert router.matched("a", chain("x", 4)) == 3


def test_an_epoch_begins_empty_and_a_new_life_too() -> None:
    router = router_of("a")
    publish(router, "a", chain("x", 4), 1)
    assert router.apply("a", CacheNews(1, 1, 2, chain("y", 2), []))
    assert router.matched("a", chain("x", 4)) == 0
    assert router.matched("a", chain("y", 2)) == 2
    assert not router.apply("a", CacheNews(2, 0, 1, [], []))
    assert router.matched("a", chain("y", 2)) == 0
    router.replace("a", CacheSnapshot(2, 0, 1, chain("z", 1)))
    router.replace("a", CacheSnapshot(1, 9, 9, chain("y", 2)))  # of the life before
    assert (router.matched("a", chain("y", 2)), router.matched("a", chain("z", 1))) == (0, 1)


def test_the_shadow_is_bounded() -> None:
    router = router_of("a", "b", max_shadow_blocks=10)
    publish(router, "a", chain("x", 8))
    publish(router, "b", chain("x", 8))
    assert router.stats()["router_shadow_blocks"] == 10
    assert router.stats()["router_shadow_refused"] == 6
    assert router.matched("b", chain("x", 8)) == 2
    router.route(prompt(chain("z", 5)))
    assert router.apply("a", CacheNews(1, 0, 2, [], chain("x", 8)))
    publish(router, "b", chain("x", 8)[2:], 2)
    assert router.matched("b", chain("x", 8)) == 8


def test_a_journal_that_is_not_read_is_bounded_and_shows_the_gap() -> None:
    journal = CacheJournal(1, 0, most=4)
    router = router_of("a")
    for digest in chain("x", 6):
        journal.published(digest)
    news = journal.take()
    assert news is not None
    assert len(news.published) <= 4
    assert not router.apply("a", news)
    router.replace("a", journal.snapshot(chain("x", 6)))
    journal.evicted(chain("x", 6)[5])
    news = journal.take()
    assert news is not None
    assert router.apply("a", news)
    assert router.matched("a", chain("x", 6)) == 5


def test_a_long_message_comes_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("samebit.rollout.publishing.journal.MOST_IN_A_MESSAGE", 3)
    journal, router = CacheJournal(1, 0), router_of("a")
    journal.cleared(1)
    for digest in chain("x", 8):
        journal.published(digest)
    parts = []
    while (news := journal.take()) is not None:
        parts.append(news)
        assert router.apply("a", news)
    assert [len(part.published) for part in parts] == [3, 3, 2]
    assert router.matched("a", chain("x", 8)) == 8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beta": -1}, "beta must be a number of at least 0, got -1"),
        ({"beta": True}, "beta"),
        ({"beta": float("inf")}, "beta"),
        ({"overload": 0.5}, "overload must be a number of at least 1, got 0.5"),
        ({"max_group": 0}, "max_group must be an int of at least 1, got 0"),
        ({"max_sessions": 0}, "max_sessions"),
        ({"max_shadow_blocks": "many"}, "max_shadow_blocks must be an int of at least 1, got 'many'"),
    ],
)
def test_bad_options_of_a_router(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RouterOptions(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"router": 3}, "router must be RouterOptions, got 3"),
        ({"resubmit": 1}, "resubmit must be True or False, got 1"),
        ({"max_restarts": -1}, "max_restarts must be an int of at least 0, got -1"),
        ({"restart_seconds": 0}, "restart_seconds must be a number of at least 0 and above 0, got 0"),
        ({"restart_seconds": 61}, "restart_seconds must be at most 60, got 61"),
        ({"well_seconds": "long"}, "well_seconds must be a number of at least 0 and above 0, got 'long'"),
        ({"silent_seconds": 0}, "silent_seconds must be a number of at least 2 and above 0, got 0"),
    ],
)
def test_bad_options_of_a_fleet(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FleetOptions(**options)


def test_a_replica_is_added_once_and_can_run_something() -> None:
    router = router_of("a")
    with pytest.raises(ValueError, match="there is a replica 'a' already"):
        router.add("a", 3)
    with pytest.raises(ValueError, match="at least 1 sample at once, got 0"):
        router.add("b", 0)
