"""A draft model is asked for as much as it is right."""

from samebit.rollout.drafts.trust import MOST_REST, Trust


def test_a_model_that_is_right_is_asked_for_as_many_as_may_be() -> None:
    trust = Trust.begin(5)
    assert trust.asked(10) == 5
    trust.learn(2, 5, 13)
    assert trust.asked(13) == 3, "as many as were right, and one more"
    trust.learn(3, 3, 17)
    assert trust.asked(17) == 5, "twice as many, up to the limit"


def test_chance_ends_no_trust_and_wrong_guesses_do() -> None:
    trust = Trust.begin(5)
    for asked in (2, 1):
        trust.learn(0, 5, 10)
        assert trust.asked(10) == asked
    trust.learn(0, 1, 11)
    assert (trust.asked(12), trust.asked(13)) == (0, 1)
    trust.learn(1, 1, 14)
    assert trust.asked(14) == 2


def test_of_many_tokens_the_model_is_asked_about_few_where_it_is_never_right() -> None:
    trust, made = Trust.begin(7), list[int]()
    for num_tokens in range(1000):
        count = trust.asked(num_tokens)
        if count:
            made.append(count)
            trust.learn(0, count, num_tokens + 1)
    assert sum(made) < 40
    assert len(made) < 10 + 1000 / MOST_REST
