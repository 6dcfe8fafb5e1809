"""Stand-in replicas in virtual time: they compute nothing, but take as long as if they did, and cache as replicas do.

A replica runs `slots` requests at once, the others wait in order. It computes prompt tokens that it has not cached one
request after the other, at `prefill` tokens a second, and each request's new tokens at `decode` tokens a second. Blocks
are published when they are computed, evicted least recently used first, leaves first; messages take `DELAY`.
"""

import heapq
import itertools
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from samebit.rollout.publishing.journal import CacheJournal, CacheNews
from samebit.rollout.requests.block_digests import ChainHasher

BLOCK = 16
DELAY = 0.05


class Clock:
    """Runs what happens in order of its virtual time."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._count), act))

    def run(self) -> None:
        while self._events:
            self.now, _, act = heapq.heappop(self._events)
            act()


@dataclass(eq=False)
class Turn:
    """Holds a request: the tokens of its prompt and of the answer that it will get, and the digests of both."""

    session: str
    chain: list[bytes]
    prompt: int
    answer: int
    done: Callable[[], None]

    @property
    def prompt_chain(self) -> list[bytes]:
        return self.chain[: self.prompt // BLOCK]


@dataclass(eq=False)
class PacedReplica:
    name: str
    clock: Clock
    slots: int = 16
    prefill: float = 20_000.0
    decode: float = 50.0
    num_blocks: int = 1 << 20
    tell: Callable[[CacheNews], None] | None = None
    skipped: int = 0
    computed: int = 0
    served: int = 0
    running: int = 0
    waiting: deque[Turn] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.blocks: OrderedDict[bytes, None] = OrderedDict()
        self.journal = CacheJournal(1, 0)
        self._prefill_free = 0.0
        self._telling = False

    def submit(self, turn: Turn) -> None:
        self.waiting.append(turn)
        self._begin()

    def hits(self, turn: Turn) -> int:
        """Count the tokens of a prompt that are cached; at least one is computed."""
        count = 0
        for digest in turn.prompt_chain:
            if digest not in self.blocks:
                break
            count += 1
        return min(count * BLOCK, turn.prompt - 1)

    def publish(self, chain: Sequence[bytes]) -> None:
        for digest in chain:
            if digest not in self.blocks:
                self.journal.published(digest)
                self.blocks[digest] = None
        for digest in reversed(chain):
            self.blocks.move_to_end(digest)  # roots last: leaves go first
        while len(self.blocks) > self.num_blocks:
            self.journal.evicted(self.blocks.popitem(last=False)[0])
        if self.tell is not None and not self._telling:
            self._telling = True
            self.clock.after(DELAY, self._tell)

    def _tell(self) -> None:
        self._telling = False
        while self.tell is not None and (news := self.journal.take()) is not None:
            self.tell(news)

    def _begin(self) -> None:
        while self.waiting and self.running < self.slots:
            turn = self.waiting.popleft()
            self.running += 1
            hits = self.hits(turn)
            self.skipped += hits
            self.computed += turn.prompt - hits
            begin = max(self.clock.now, self._prefill_free)
            self._prefill_free = begin + (turn.prompt - hits) / self.prefill
            self.clock.after(self._prefill_free - self.clock.now, lambda turn=turn: self._filled(turn))

    def _filled(self, turn: Turn) -> None:
        self.publish(turn.prompt_chain)
        self.clock.after(turn.answer / self.decode, lambda: self._end(turn))

    def _end(self, turn: Turn) -> None:
        self.publish(turn.chain)
        self.running -= 1
        self.served += 1
        turn.done()
        self._begin()


class Conversations:
    """Holds conversations: a shared system prompt, then turns of a user's and a model's tokens."""

    def __init__(self, systems: int, each: int, turns: int, system: int, user: int, answer: int, seed: int = 0) -> None:
        self.turns, self.user, self.answer, self.system = turns, user, answer, system
        random = np.random.default_rng(seed)
        hasher = ChainHasher(BLOCK)
        length = system + turns * (user + answer)
        self.chains: dict[str, list[bytes]] = {}
        for number in range(systems):
            shared = random.integers(0, 50_000, system)
            for one in range(each):
                tokens = np.concatenate([shared, random.integers(0, 50_000, length - system)])
                self.chains[f"{number}-{one}"] = hasher.prompt(None, tokens).blocks
        self.order = list(self.chains)
        random.shuffle(self.order)

    def turn(self, session: str, number: int, done: Callable[[], None]) -> Turn:
        prompt = self.system + number * (self.user + self.answer) + self.user
        whole = self.chains[session][: (prompt + self.answer) // BLOCK]
        return Turn(session, whole, prompt, self.answer, done)

    def most_skipped(self) -> int:
        """Count the prompt tokens that one cache without limit skips, all turns one after the other."""
        one = PacedReplica("all", Clock())
        skipped = 0
        for number in range(self.turns):
            for session in self.order:
                turn = self.turn(session, number, lambda: None)
                skipped += one.hits(turn)
                one.publish(turn.chain)
        return skipped
