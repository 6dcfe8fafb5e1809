"""Measure a fleet's router: what it lets replicas skip, how even it loads them, what it costs.

    python benchmarks/fleet.py [--json FILE] [--requests 100000]

The router is the real one; the replicas are stand-ins in virtual time (`contestants/paced_replicas.py`), so the shares
and throughputs are the same on every machine. Only the microseconds are of this one.
"""

import gc
import os
import random
import statistics
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from samebit.benchmarks.contestants.paced_replicas import BLOCK, Clock, Conversations, PacedReplica, Turn
from samebit.benchmarks.rounds import results_file, table
from samebit.benchmarks.rounds.command_line import benchmark_parser
from samebit.benchmarks.rounds.turns import Spread, spread
from samebit.rollout.fleet.options import RouterOptions
from samebit.rollout.fleet.routing.places import Ticket
from samebit.rollout.fleet.routing.router import Prompt, Router
from samebit.rollout.publishing.journal import CacheNews, CacheSnapshot
from samebit.rollout.requests.block_digests import ChainHasher

POLICIES = ("router", "least_loaded", "sticky", "round_robin", "random")
SEEDS = range(5)


class Front:
    """Sends turns to replicas by one of the policies."""

    def __init__(self, replicas: list[PacedReplica], policy: str, seed: int) -> None:
        self.replicas = {replica.name: replica for replica in replicas}
        self.policy = policy
        self.router = Router(BLOCK, RouterOptions(beta=0.0 if policy == "sticky" else RouterOptions().beta))
        self.microseconds: list[float] = []
        self._random = random.Random(seed)
        self._sent = 0
        for replica in replicas:
            self.router.add(replica.name, replica.slots)
            self.router.replace(replica.name, CacheSnapshot(1, 0, 0, list(replica.blocks)))
            replica.journal.snapshot([])
            replica.tell = self._listener(replica.name)

    def send(self, turn: Turn) -> None:
        names = list(self.replicas)
        self._sent += 1
        if self.policy == "router":
            began = time.perf_counter()
            ticket = self.router.route(Prompt(turn.prompt_chain, turn.prompt, session=turn.session))
            self.microseconds.append(1e6 * (time.perf_counter() - began))
            self._submit(turn, ticket)
            return
        if self.policy == "least_loaded":
            name = min(names, key=lambda one: (self._load(one), self._random.random()))
        elif self.policy == "round_robin":
            name = names[self._sent % len(names)]
        elif self.policy == "sticky":
            name = names[hash_of(turn.session) % len(names)]
        else:
            name = self._random.choice(names)
        self.replicas[name].submit(turn)

    def _load(self, name: str) -> int:
        return self.replicas[name].running + len(self.replicas[name].waiting)

    def _submit(self, turn: Turn, ticket: Ticket) -> None:
        done = turn.done

        def ended() -> None:
            self.router.done(ticket)
            done()

        turn.done = ended
        self.replicas[ticket.replica].submit(turn)

    def _listener(self, name: str) -> Callable[[CacheNews], None]:
        def tell(news: CacheNews) -> None:
            if not self.router.apply(name, news):
                raise RuntimeError(f"replica {name} and the router are out of step")

        return tell


def hash_of(text: str) -> int:
    return int.from_bytes(text.encode(), "little") * 2654435761 >> 7


@dataclass(frozen=True)
class Outcome:
    """Says how a run went. skipped: prompt tokens. load: requests of the busiest replica over the mean."""

    skipped: int
    computed: int
    load: float
    seconds: float
    requests: int
    front: Front


def play(
    talks: Conversations, replicas: list[PacedReplica], clock: Clock, policy: str, seed: int, at_once: int | None = None
) -> Outcome:
    """Hold all conversations, at most `at_once` at a time; a turn follows the one before it."""
    front, draws = Front(replicas, policy, seed), random.Random(seed)
    waiting = list(reversed(talks.order))

    def begin() -> None:
        if waiting:
            session = waiting.pop()
            clock.after(draws.random(), lambda: say(session, 0))

    def say(session: str, number: int) -> None:
        def done() -> None:
            if number + 1 < talks.turns:
                clock.after(0.2 * draws.random(), lambda: say(session, number + 1))
            else:
                begin()

        front.send(talks.turn(session, number, done))

    for _ in range(at_once or len(waiting)):
        begin()
    clock.run()
    served = [replica.served for replica in replicas]
    if sum(served) != len(talks.order) * talks.turns:
        raise RuntimeError(f"{sum(served)} of {len(talks.order) * talks.turns} requests were served")
    return Outcome(
        sum(replica.skipped for replica in replicas),
        sum(replica.computed for replica in replicas),
        max(served) * len(served) / sum(served),
        clock.now,
        sum(served),
        front,
    )


def prefixes() -> dict[str, Spread]:
    """Measure 8 system prompts x 8 conversations x 4 turns over 4 replicas."""
    found: dict[str, Spread] = {}
    for policy in POLICIES:
        shares, loads = [], []
        for seed in SEEDS:
            clock, talks = Clock(), Conversations(8, 8, 4, system=512, user=64, answer=64, seed=seed)
            replicas = [PacedReplica(str(number), clock) for number in range(4)]
            outcome = play(talks, replicas, clock, policy, seed)
            shares.append(outcome.skipped / talks.most_skipped())
            loads.append(outcome.load)
        found[f"skipped_of_one_cache_{policy}"] = spread(shares)
        found[f"load_over_even_{policy}"] = spread(loads)
    return found


def one_at_its_limit() -> dict[str, Spread]:
    """Measure 4 replicas of which one runs a quarter of the others, and has had all sessions so far:
    they have to move.
    """
    speeds: dict[str, list[float]] = {policy: [] for policy in POLICIES}
    moved = []
    for seed in SEEDS:
        for policy in POLICIES:
            clock, talks = Clock(), Conversations(8, 40, 4, system=512, user=64, answer=64, seed=seed)
            slots = [4, 16, 16, 16]
            replicas = [PacedReplica(str(number), clock, slots=slots[number]) for number in range(4)]
            for chain in talks.chains.values():
                replicas[0].publish(chain[: 512 // BLOCK])
            outcome = play(talks, replicas, clock, policy, seed, at_once=64)
            speeds[policy].append(outcome.requests / outcome.seconds)
            if policy == "router":
                moved.append(1 - replicas[0].served / outcome.requests)
    best = [max(speeds[policy][number] for policy in POLICIES) for number in range(len(SEEDS))]
    return {
        **{
            f"throughput_of_best_{policy}": spread([one / top for one, top in zip(speeds[policy], best, strict=True)])
            for policy in POLICIES
        },
        "share_that_left_the_limited_replica": spread(moved),
    }


def many(requests: int) -> dict[str, Spread]:
    """Measure 64 replicas."""
    clock, talks = Clock(), Conversations(200, max(1, requests // 800), 4, system=1024, user=64, answer=64)
    replicas = [PacedReplica(str(number), clock, num_blocks=4_000) for number in range(64)]
    outcome = play(talks, replicas, clock, "router", 0, at_once=1_500)
    ideal, stats = talks.most_skipped(), outcome.front.router.stats()
    return {
        "requests_64_replicas": spread([float(outcome.requests)]),
        "skipped_of_one_cache_64_replicas": spread([outcome.skipped / ideal]),
        "load_over_even_64_replicas": spread([outcome.load]),
        "shadow_blocks_64_replicas": spread([stats["router_shadow_blocks"]]),
        "route_us_64_replicas": _quartiles(outcome.front.microseconds),
    }


def _quartiles(values: list[float]) -> Spread:
    low, middle, high = statistics.quantiles(values, n=4)
    return Spread(middle, low, high)


def costs() -> dict[str, Spread]:
    """Measure microseconds of a 2,048-token prompt over 64 replicas that all have its first half, and
    bytes of a block.
    """
    found: dict[str, Spread] = {}
    chain_of = [os.urandom(16) for _ in range(64)]
    for cached in (10_000, 1_000_000):
        router = Router(BLOCK)
        for number in range(64):
            router.add(str(number), 64)
            own = [os.urandom(16) for _ in range(cached // 64)]
            router.replace(str(number), CacheSnapshot(1, 0, 0, chain_of + own))
        seconds, live = [], []
        gc.collect()
        for _ in range(2_000):
            prompt = Prompt(chain_of + [os.urandom(16) for _ in range(64)], 2048, group=os.urandom(16))
            began = time.perf_counter()
            live.append(router.route(prompt))
            seconds.append(1e6 * (time.perf_counter() - began))
            if len(live) > 1_000:
                router.done(live.pop(0), computed=False)
        found[f"route_us_{cached}_blocks"] = _quartiles(seconds)
    hasher, tokens = ChainHasher(BLOCK), np.random.default_rng(0).integers(0, 50_000, 2048)
    found["digest_us_a_block"] = _quartiles([_timed(lambda: hasher.prompt(None, tokens)) / 128 for _ in range(200)])
    found["shadow_bytes_a_block"] = spread([_bytes_a_block()])
    return found


def _timed(act: Callable[[], object]) -> float:
    began = time.perf_counter()
    act()
    return 1e6 * (time.perf_counter() - began)


def _bytes_a_block() -> float:
    """Count the bytes of the digest itself, as it arrives, and of its place in the shadow."""
    count = 100_000
    router = Router(BLOCK)
    router.add("0", 64)
    gc.collect()
    tracemalloc.start()
    router.replace("0", CacheSnapshot(1, 0, 0, [os.urandom(16) for _ in range(count)]))
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return used / count


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--requests", type=int, default=100_000, help="over 64 replicas (100,000)")
    args = parser.parse_args()
    metrics = {**prefixes(), **one_at_its_limit(), **costs(), **many(args.requests)}
    table.show(metrics)
    if args.json:
        results_file.write(args.json, results_file.describe(seeds=len(SEEDS), block=BLOCK), metrics)


if __name__ == "__main__":
    main()
