"""Which rows share the keys of one work item, found from the block tables alone."""

import numpy as np
import torch

from samebit.kernels.layout.attention_work import AttentionWork, names_of_items, room_for_items
from samebit.kernels.layout.forward_context import ForwardContext

BLOCK = 16


def context(tables: list[list[int]], starts: list[int], lengths: list[int] | None = None) -> ForwardContext:
    counts = np.array(lengths or [1] * len(starts), np.int32)
    width = max(map(len, tables)) + 2
    return ForwardContext(
        positions=torch.zeros(int(counts.sum()), dtype=torch.int64), row_start=np.cumsum(counts) - counts,
        lengths=counts, starts=np.array(starts, np.int32), table_rows=np.arange(len(starts), dtype=np.int32),
        block_tables=np.array([row + [7] * (width - len(row)) for row in tables], np.int32), block_size=BLOCK,
    )  # fmt: skip


def prefixes(call: ForwardContext, tokens: int = 16) -> list[tuple[list[int], int]]:
    """Of each item with several sequences: which, and the keys that are read for all of them."""
    work = AttentionWork.of(call)
    arrays = work.items(tokens)
    some, pieces = (arrays[name] for name in names_of_items(tokens))
    done = {int(sequence): int(since) for sequence, *_, since, _ in pieces if since}
    found = []
    for leader, first, count, oldest, since, until in some.tolist():
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
            room = room_for_items(name, len(rows), len(call.lengths))
            assert len(array) <= len(room)
            assert not room.any()
    assert not len(room_for_items(names_of_items(16)[0], 64, 1)), "one sequence shares with nobody"
