"""Describe the cache as it should be, written for reading: the oracle of `PrefixCache` and of `NoPrefixCache`.

A block is an object with a count of owners and, while it can be hit, its name: the salt and all tokens up to
its end. Everything else follows from looking names up in a dictionary.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

Name = tuple[str | None, tuple[int, ...]]


@dataclass(eq=False)
class ModelBlock:
    owners: int = 1
    name: Name | None = None


@dataclass(eq=False)
class ModelSequence:
    salt: str | None
    tokens: list[int]
    blocks: list[ModelBlock] = field(default_factory=list)
    running: bool = False
    computed: int = 0
    publishes: bool = False
    held: HeldPrompt | None = None
    group: HeldPrompt | None = None
    renews: bool = False

    def names(self, block_size: int, count: int) -> list[Name]:
        return [(self.salt, tuple(self.tokens[: (i + 1) * block_size])) for i in range(count)]


@dataclass(eq=False)
class HeldPrompt:
    """Holds a prompt for samples. users: samples that have not begun. running: those that run and have the prompt.
    keeper: the one of them in whose last block of the prompt the held end stands.
    """

    length: int
    users: int
    blocks: list[ModelBlock] = field(default_factory=list)
    running: list[ModelSequence] = field(default_factory=list)
    keeper: ModelSequence | None = None
    stands: bool = False
    renewed_by: ModelSequence | None = None


class CacheModel:
    """Models a cache. `shares`: False for one without prefix caching, which publishes nothing."""

    def __init__(self, num_blocks: int, block_size: int, slots: int, policy: str, *, shares: bool = True) -> None:
        self.shares = shares
        self.block_size = block_size
        self.slots = slots
        self.policy = policy
        self.blank = num_blocks
        self.kept: list[ModelBlock] = []
        self.named: dict[Name, ModelBlock] = {}
        self.running: list[ModelSequence] = []
        self.held: list[HeldPrompt] = []
        self.alone: list[HeldPrompt] = []
        self.led: dict[Name, ModelSequence] = {}
        self.followers: dict[ModelSequence, Name | HeldPrompt] = {}

    @property
    def free(self) -> int:
        return self.blank + len(self.kept)

    def awaited(self, sequence: ModelSequence) -> int | None:
        """Return how many blocks there will be of what it needs, if that saves tokens."""
        names, hits = self._names(sequence), len(self._hits(sequence))
        held = sequence.held
        if held and held.renewed_by and self._start(sequence, hits) < held.length:
            return -(-held.length // self.block_size)
        end = hits
        while end < len(names) and names[end] in self.led:
            end += 1
        saves = min(end * self.block_size, len(sequence.tokens) - 1) > self._start(sequence, hits)
        return end if end > hits and saves else None

    def follow(self, sequence: ModelSequence, num_blocks: int) -> None:
        held = sequence.held
        self.followers[sequence] = held if held and held.renewed_by else self._names(sequence)[num_blocks - 1]

    def resign(self, sequence: ModelSequence) -> list[ModelSequence]:
        """Let it publish nothing more; return who waited for what it led."""
        names: set[Name | HeldPrompt] = {name for name, leader in self.led.items() if leader is sequence}
        if sequence.group and sequence.group.renewed_by is sequence:
            names.add(sequence.group)
        return [follower for name in names for follower in self._wake(name)]

    def admit(self, sequence: ModelSequence, headroom: int) -> bool:
        hits = self._hits(sequence)
        fresh = -(-len(sequence.tokens) // self.block_size) - len(hits)
        taken = fresh + sum(block.owners == 0 for block in hits)
        if len(self.running) == self.slots or max(fresh, taken) > self.free - headroom:
            return False
        for block in hits:
            self._claim(block)
        sequence.blocks = hits + self._allocate(fresh)
        sequence.running, sequence.publishes = True, self.shares
        sequence.computed = self._start(sequence, len(hits))
        self.running.append(sequence)
        if not self.shares:
            return True
        for name in self._names(sequence)[len(hits) :]:
            self.led.setdefault(name, sequence)
        self._join_group(sequence, len(hits))
        return True

    def _join_group(self, sequence: ModelSequence, hits: int) -> None:
        """Take the prompt of its group from a sample that runs or what is held, or let it hold the prompt again."""
        group = sequence.group
        if group and group.stands and (hits * self.block_size >= group.length or self._end_is_held(sequence, hits)):
            group.running.append(sequence)
        self.leave(sequence)
        if group and group.users and not group.stands and group.renewed_by is None:
            group.renewed_by = sequence
            sequence.renews = True

    def _renew(self, sequence: ModelSequence) -> list[ModelSequence]:
        """Note that it has computed the prompt of its group again."""
        group = sequence.group
        if not sequence.renews or group is None or sequence.computed < group.length:
            return []
        sequence.renews = False
        if group.users and not group.stands and sequence.publishes:
            self._hold(group, sequence)
        return self._wake(group) if group.renewed_by is sequence else []

    def append(self, sequence: ModelSequence, total: int) -> bool:
        missing = -(-total // self.block_size) - len(sequence.blocks)
        if missing > self.free:
            return False
        sequence.blocks += self._allocate(max(missing, 0))
        return True

    def publish(self, sequence: ModelSequence) -> list[ModelSequence]:
        """Publish what it has computed; return who waited for that."""
        woken: list[ModelSequence] = []
        names = sequence.names(self.block_size, sequence.computed // self.block_size)
        for number, name in enumerate(names):
            own = sequence.blocks[number]
            if not sequence.publishes or own.name is not None:
                continue
            first = self.named.get(name)
            if first is None:
                own.name = name
                self.named[name] = own
            elif own.owners > 1:
                sequence.publishes = False
                woken += self.resign(sequence)
                continue
            else:
                self._claim(first)
                sequence.blocks[number] = first
                self._give_back([own])
            woken += self._wake(name)
        return woken + self._renew(sequence)

    def hold(self, leader: ModelSequence, length: int, samples: list[ModelSequence]) -> None:
        held = HeldPrompt(length, len(samples))
        self._hold(held, leader)
        leader.group = held
        for sample in samples:
            sample.held = sample.group = held

    def _hold(self, held: HeldPrompt, leader: ModelSequence) -> None:
        held.blocks = leader.blocks[: -(-held.length // self.block_size)]
        for block in held.blocks:
            block.owners += 1
        held.stands, held.keeper, held.running = True, leader, [leader]
        self.held.append(held)

    def leave(self, sequence: ModelSequence) -> None:
        self.followers.pop(sequence, None)
        held, sequence.held = sequence.held, None
        if held is not None:
            held.users -= 1
            if held.users == 0 and held.stands:
                self.drop(held)

    def make_room(self) -> bool:
        """Give up the last of the prompts whose keeper has stopped: it stands in a running sample's block, or ends."""
        if not self.alone:
            return False
        held = self.alone.pop()
        if held.running:
            held.keeper = held.running[0]
            own = held.keeper.blocks[len(held.blocks) - 1]
            self._claim(own)
            self._give_back([held.blocks.pop()])
            held.blocks.append(own)
        else:
            self.drop(held)
        return True

    def drop(self, held: HeldPrompt) -> None:
        held.stands, held.keeper, held.running = False, None, []
        self.held.remove(held)
        if held in self.alone:
            self.alone.remove(held)
        self._give_back(held.blocks[::-1])

    def drop_all(self) -> None:
        for held in list(self.held):
            self.drop(held)

    def release(self, sequence: ModelSequence) -> list[ModelSequence]:
        self.running.remove(sequence)
        sequence.renews = False
        group = sequence.group
        if group and sequence in group.running:
            group.running.remove(sequence)
            if group.keeper is sequence:
                group.keeper = None
                self.alone.append(group)
        self._give_back(sequence.blocks[::-1])
        sequence.blocks = []
        sequence.running = False
        sequence.computed = 0
        return self.resign(sequence)

    def clear(self) -> list[ModelSequence]:
        self.drop_all()
        for block in self.named.values():
            block.name = None
        self.named = {}
        self.blank += len(self.kept)
        self.kept = []
        for sequence in self.running:
            sequence.publishes = False
            if sequence.group and sequence.group.renewed_by is sequence:
                sequence.group.renewed_by = None
        self.led = {}
        woken, self.followers = list(self.followers), {}
        return woken

    def _names(self, sequence: ModelSequence) -> list[Name]:
        return sequence.names(self.block_size, len(sequence.tokens) // self.block_size)

    def _hits(self, sequence: ModelSequence) -> list[ModelBlock]:
        hits = itertools.takewhile(lambda name: name in self.named, self._names(sequence))
        return [self.named[name] for name in hits]

    def _start(self, sequence: ModelSequence, hits: int) -> int:
        """Return where it goes on behind so many hits."""
        last = len(sequence.tokens) - 1
        if sequence.group and self._end_is_held(sequence, hits):
            return min(sequence.group.length, last)
        return min(hits * self.block_size, last)

    def _end_is_held(self, sequence: ModelSequence, hits: int) -> bool:
        group = sequence.group
        return group is not None and group.stands and len(group.blocks) == hits + 1

    def _wake(self, name: Name | HeldPrompt) -> list[ModelSequence]:
        if isinstance(name, HeldPrompt):
            name.renewed_by = None
        else:
            self.led.pop(name, None)
        woken = [follower for follower, awaited in self.followers.items() if awaited == name]
        for follower in woken:
            del self.followers[follower]
        return woken

    def _claim(self, block: ModelBlock) -> None:
        if block.owners == 0:
            self.kept.remove(block)
        block.owners += 1

    def _allocate(self, count: int) -> list[ModelBlock]:
        for _ in range(count - self.blank):
            gone = self.kept.pop(0)
            assert gone.name is not None
            del self.named[gone.name]
            self.blank += 1
        self.blank -= count
        return [ModelBlock() for _ in range(count)]

    def _give_back(self, blocks: list[ModelBlock]) -> None:
        for block in blocks:
            block.owners -= 1
            if block.owners == 0 and block.name is not None and self.policy == "lru":
                self.kept.append(block)
            elif block.owners == 0:
                self.blank += 1
                if block.name is not None:
                    del self.named[block.name]
