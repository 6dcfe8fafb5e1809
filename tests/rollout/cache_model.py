"""The cache as it should be, written for reading: the oracle of `CacheManager`.

A block is an object with a count of owners and, while it can be hit, its name: the salt and all tokens up to
its end. Everything else follows from looking names up in a dictionary.
"""

from __future__ import annotations

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

    def names(self, block_size: int, count: int) -> list[Name]:
        return [(self.salt, tuple(self.tokens[: (i + 1) * block_size])) for i in range(count)]


@dataclass(eq=False)
class HeldPrompt:
    blocks: list[ModelBlock]
    users: int
    stands: bool = True


class CacheModel:
    def __init__(self, num_blocks: int, block_size: int, slots: int, policy: str) -> None:
        self.block_size = block_size
        self.slots = slots
        self.policy = policy
        self.blank = num_blocks
        self.kept: list[ModelBlock] = []
        self.named: dict[Name, ModelBlock] = {}
        self.running: list[ModelSequence] = []
        self.held: list[HeldPrompt] = []

    @property
    def free(self) -> int:
        return self.blank + len(self.kept)

    def admit(self, sequence: ModelSequence, headroom: int) -> bool:
        hits: list[ModelBlock] = []
        for name in sequence.names(self.block_size, len(sequence.tokens) // self.block_size):
            if name not in self.named:
                break
            hits.append(self.named[name])
        fresh = -(-len(sequence.tokens) // self.block_size) - len(hits)
        taken = fresh + sum(block.owners == 0 for block in hits)
        if len(self.running) == self.slots or max(fresh, taken) > self.free - headroom:
            return False
        for block in hits:
            self._claim(block)
        sequence.blocks = hits + self._allocate(fresh)
        sequence.running = sequence.publishes = True
        start = len(hits) * self.block_size
        if sequence.held and sequence.held.stands and len(sequence.held.blocks) == len(hits) + 1:
            start = len(sequence.tokens) - 1
        sequence.computed = min(start, len(sequence.tokens) - 1)
        self.running.append(sequence)
        self.leave(sequence)
        return True

    def append(self, sequence: ModelSequence, total: int) -> bool:
        missing = -(-total // self.block_size) - len(sequence.blocks)
        if missing > self.free:
            return False
        sequence.blocks += self._allocate(max(missing, 0))
        return True

    def publish(self, sequence: ModelSequence) -> None:
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
            else:
                self._claim(first)
                sequence.blocks[number] = first
                self._give_back([own])

    def hold(self, leader: ModelSequence, length: int, samples: list[ModelSequence]) -> None:
        blocks = leader.blocks[: -(-length // self.block_size)]
        for block in blocks:
            block.owners += 1
        held = HeldPrompt(blocks, len(samples))
        self.held.append(held)
        for sample in samples:
            sample.held = held

    def leave(self, sequence: ModelSequence) -> None:
        held, sequence.held = sequence.held, None
        if held is not None:
            held.users -= 1
            if held.users == 0 and held.stands:
                self.drop(held)

    def drop(self, held: HeldPrompt) -> None:
        held.stands = False
        self.held.remove(held)
        self._give_back(held.blocks[::-1])

    def drop_all(self) -> None:
        for held in list(self.held):
            self.drop(held)

    def release(self, sequence: ModelSequence) -> None:
        self.running.remove(sequence)
        self._give_back(sequence.blocks[::-1])
        sequence.blocks = []
        sequence.running = False
        sequence.computed = 0

    def clear(self) -> None:
        self.drop_all()
        for block in self.named.values():
            block.name = None
        self.named = {}
        self.blank += len(self.kept)
        self.kept = []
        for sequence in self.running:
            sequence.publishes = False

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
