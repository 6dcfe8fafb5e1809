"""Waiting prompts leave a running chain where a plain search says that they do."""

from hypothesis import given
from hypothesis import strategies as st

from samebit.rollout.cache.checkpoints.leaving_points import LeavingPoints

Tokens = list[int]
prompts = st.lists(st.lists(st.integers(0, 1), max_size=5), max_size=8)


def chain(tokens: Tokens) -> list[bytes]:
    return [bytes(tokens[: end + 1]) for end in range(len(tokens))]


@given(waiting=prompts, gone=prompts, running=st.lists(st.integers(0, 1), max_size=6))
def test_the_blocks_at_which_somebody_leaves(waiting: list[Tokens], gone: list[Tokens], running: Tokens) -> None:
    chains = LeavingPoints()
    for tokens in waiting + gone:
        chains.add_chain(chain(tokens))
    for tokens in gone:
        chains.remove_chain(chain(tokens))
    own = chain(running)
    for number, digest in enumerate(own):
        following = own[number + 1] if number + 1 < len(own) else None
        expected = any(digest in chain(tokens) and following not in chain(tokens) for tokens in waiting)
        assert chains.leaves_behind(digest, following) == expected
    for tokens in waiting:
        chains.remove_chain(chain(tokens))
    assert not chains
