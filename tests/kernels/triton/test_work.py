"""The rows that share the keys of one work item are found from the block tables alone."""

import os

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from samebit.kernels.layout import attention_work
from samebit.kernels.layout.attention_work import AttentionWork, names_of_items, room_for_items, room_for_slots
from samebit.kernels.layout.forward_context import ForwardContext

BLOCK = 16

CASES = int(os.environ.get("SAMEBIT_SOAK_CASES", "25"))


def context(tables: list[list[int]], starts: list[int], lengths: list[int] | None = None) -> ForwardContext:
    counts = np.array(lengths or [1] * len(starts), np.int32)
    width = max(map(len, tables)) + 2
    return ForwardContext(
        positions=torch.zeros(int(counts.sum()), dtype=torch.int64), row_start=np.cumsum(counts) - counts,
        lengths=counts, starts=np.array(starts, np.int32), table_rows=np.arange(len(starts), dtype=np.int32),
        block_tables=np.array([row + [7] * (width - len(row)) for row in tables], np.int32), block_size=BLOCK,
    )  # fmt: skip


def prefixes(call: ForwardContext, tokens: int = 16) -> list[tuple[list[int], int]]:
    """Return for each item with several sequences which they are, and the keys that are read for all of them."""
    work = AttentionWork.of(call)
    arrays = work.items(tokens)
    some, pieces = (arrays[name] for name in names_of_items(tokens))
    done = {int(sequence): int(since) for sequence, _, _, _, since, *_ in pieces if since}
    found = []
    for leader, first, count, oldest, since, until, *_ in some.tolist():
        members = work.order[first : first + count].tolist()
        assert leader == members[0]
        assert since == 0
        assert oldest == min(call.starts[member] for member in members)
        assert [done.pop(member) for member in members] == [until] * count
        found.append((members, until))
    assert not done, "a sequence goes on from keys that nobody has read"
    return found


def table(*blocks: range | int) -> list[int]:
    return [n for part in blocks for n in ([part] if isinstance(part, int) else part)]


PROMPT = range(100, 110)  # of 160 tokens


def test_whole_tiles_that_lie_before_every_sequences_new_token_are_shared() -> None:
    assert prefixes(context([table(PROMPT, 1), table(PROMPT, 2)], [160, 165])) == [([0, 1], 128)]
    assert prefixes(context([table(PROMPT, 1), table(PROMPT, 2)], [127, 165])) == [([0, 1], 64)]
    assert prefixes(context([table(PROMPT, 1), table(PROMPT, 2)], [128, 165])) == [([0, 1], 128)]
    assert prefixes(context([table(PROMPT, 1), table(PROMPT, 2)], [63, 165])) == []
    assert prefixes(context([table(range(1, 4), 20, 21), table(range(1, 4), 30, 31)], [70, 70])) == []


def test_equal_blocks_behind_different_ones_are_not_shared() -> None:
    assert prefixes(context([table(1, range(50, 60)), table(2, range(50, 60))], [170, 170])) == []
    assert prefixes(context([table(range(50, 54), 1, PROMPT), table(range(50, 54), 2, PROMPT)], [240, 240])) == [
        ([0, 1], 64)
    ]


def test_members_of_a_group_need_not_be_neighbours_and_singles_are_left_alone() -> None:
    other = range(200, 206)
    tables = [table(PROMPT, 1), table(other, 2), table(PROMPT, 3), table(range(300, 310)), table(other, 4)]
    assert prefixes(context(tables, [161, 100, 165, 150, 101])) == [([0, 2], 128), ([1, 4], 64)]
    assert prefixes(context(tables, [161, 99, 165, 150, 100], [1, 2, 1, 9, 1])) == [([0, 2], 128)]


def test_a_system_prompt_of_all_does_not_shorten_what_each_group_shares() -> None:
    system = range(1, 5)
    tables = [table(system, range(start, start + 6), 50 + member) for start in (20, 30) for member in (0, 1, 2)]
    tables.append(table(system, range(40, 48)))
    call = context(tables, [170] * 7)
    assert prefixes(call) == [([0, 1, 2], 128), ([3, 4, 5], 128)]


def test_groups_are_cut_to_the_rows_of_an_item() -> None:
    call = context([table(PROMPT, n) for n in range(1, 18)], [161] * 17)
    assert [len(members) for members, _ in prefixes(call)] == [16]
    assert [len(members) for members, _ in prefixes(call, 4)] == [4, 4, 4, 4]
    assert [len(members) for members, _ in prefixes(call, 3)] == [3, 3, 3, 3, 3, 2]
    assert prefixes(call, 1) == []


def test_every_row_is_finished_once_and_there_is_room_in_a_graph() -> None:
    call = context([table(PROMPT, n) for n in range(1, 8)], [161, 30, 161, 70, 161, 0, 161], [1, 5, 1, 1, 1, 40, 1])
    work = AttentionWork.of(call)
    rows = work.queries()[:, 0]
    assert sorted(rows) == list(range(len(call.positions)))
    for tokens in (1, 3, 16):
        arrays = work.items(tokens)
        pieces = arrays[names_of_items(tokens)[1]]
        finished = [row for _, first, count, *_ in pieces for row in rows[first : first + count]]
        assert sorted(finished) == list(range(len(call.positions)))
        for name, array in arrays.items():
            room = room_for_items(name, len(rows), len(call.lengths), 500)
            assert len(array) <= len(room)
            assert not room.any()
    assert not len(room_for_items(names_of_items(16)[0], 64, 1, 512)), "one sequence shares with nobody"


def walked(call: ForwardContext, tokens: int = 16) -> list[list[tuple[int, int]]]:
    """Return the keys that are walked for each sequence of one new token: by what is kept, in its order, then by its
    piece.
    """
    work = AttentionWork.of(call)
    some, pieces = (work.items(tokens)[name] for name in names_of_items(tokens))
    kept = {}
    for _, first, count, oldest, since, until, slot, stride in some.tolist():
        assert until <= oldest, "an item that keeps its softmax ends no row"
        for member in range(count):
            place = slot + member * stride
            assert place not in kept, "two softmaxes in one slot"
            kept[place] = (int(work.order[first + member]), since, until)
    assert max(kept, default=0) < room_for_slots(len(call.lengths), call.block_tables.shape[1] * BLOCK)
    assert len(some) <= len(
        room_for_items(names_of_items(tokens)[0], 1000, len(call.lengths), int(call.starts.max()) + 1)
    )
    found = {}
    for sequence, _, _, _, since, until, slot, number in pieces.tolist():
        before = [kept.pop(place) for place in range(slot, slot + number)]
        assert all(one == sequence for one, *_ in before)
        found[sequence] = [(first, last) for _, first, last in before] + [(since, until)]
    assert not kept, "nobody begins with it"
    return [found[sequence] for sequence in range(len(found))]


def test_long_sequences_are_cut_into_splits() -> None:
    call = context([table(range(1, 90)), table(range(101, 190)), table(range(201, 290))], [511, 512, 1100])
    assert walked(call) == [[(0, 512)], [(0, 512), (512, 513)], [(0, 512), (512, 1024), (1024, 1101)]]


def test_a_sequence_of_several_tokens_is_walked_by_its_pieces() -> None:
    assert walked(context([table(range(1, 90))], [1100], [3])) == [[(0, 1103)]]


def test_splits_that_are_shared_are_walked_once_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = range(1, 43)  # 672 tokens
    call = context([table(shared, range(100 * n, 100 * n + 50)) for n in (1, 2, 3)], [680, 1030, 1100])
    assert walked(call) == [
        [(0, 512), (512, 681)], [(0, 512), (512, 1024), (1024, 1031)], [(0, 512), (512, 1024), (1024, 1101)]
    ]  # fmt: skip
    monkeypatch.setattr(attention_work, "PARTS", 2)
    assert walked(call) == [[(0, 512), (512, 640), (640, end)] for end in (681, 1031, 1101)]


@pytest.mark.parametrize("limit", ["SLOTS", "PARTS"])
def test_the_longest_are_split_first(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call = context([table(range(100 * n, 100 * n + 90)) for n in (1, 2, 3)], [600, 1300, 1100])
    monkeypatch.setattr(attention_work, limit, 4)
    assert [len(keys) for keys in walked(call)] == [1, 3, 3]
    monkeypatch.setattr(attention_work, limit, 3)
    assert [len(keys) for keys in walked(call)] == [1, 3, 1]


def test_the_longest_is_split_however_many_splits_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    call = context([table(range(100 * n, 100 * n + 90)) for n in (1, 2, 3)], [600, 1300, 1100])
    monkeypatch.setattr(attention_work, "PARTS", 1)
    assert [len(keys) for keys in walked(call)] == [1, 3, 1]


@settings(max_examples=4 * CASES, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2100)), min_size=1, max_size=12), st.integers(1, 16),
    st.integers(0, 20), st.integers(0, 20),
)  # fmt: skip
def test_every_key_is_walked_once(sequences: list[tuple[int, int]], tokens: int, parts: int, slots: int) -> None:
    tables = [table(range(1 + 40 * group, 41 + 40 * group), range(500 + 100 * n, 595 + 100 * n)) for n, (group, _) in
              enumerate(sequences)]  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_work, "PARTS", parts)
        patch.setattr(attention_work, "SLOTS", slots)
        found = walked(context(tables, [start for _, start in sequences]), tokens)
    for (_, start), keys in zip(sequences, found, strict=True):
        assert [first for first, _ in keys] == [0, *(last for _, last in keys[:-1])]
        assert keys[-1][1] == start + 1
        assert all(first % 512 == 0 for first, _ in keys[:-1])
        assert all(first // 512 == (last - 1) // 512 for first, last in keys[1:-1])
