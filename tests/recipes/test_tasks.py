"""Problems, their working and the reward are as the tasks say."""

import re

import pytest

from samebit.recipes.chain_sum import held_out_problems, problem_sets, working
from samebit.recipes.problem import Problem, reward, shows_working

ELEVEN = Problem("7-5+9=", "11")


@pytest.mark.parametrize("completion", ["11", "+11", "011", " 11 ", "[7-5=2;2+9=11]11", "[1]2]11"])
def test_right_answers_earn_one(completion: str) -> None:
    assert reward(completion, True, ELEVEN) == 1.0


@pytest.mark.parametrize("completion", ["12", "1", "111", "", "11]", "[7-5=2;2+9=11", "[7-5=2;2+9=11]", "11 apples"])
def test_wrong_answers_earn_nothing(completion: str) -> None:
    assert reward(completion, True, ELEVEN) == 0.0


def test_an_answer_that_was_cut_off_earns_nothing() -> None:
    assert reward("11", False, ELEVEN) == 0.0


def test_answers_may_be_words() -> None:
    problem = Problem("The sky is", "blue")
    assert reward("blue", True, problem) == 1.0
    assert reward("[I look up]blue", True, problem) == 1.0
    assert reward("bluer", True, problem) == 0.0


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("1,000", "1000"),
        ("1000", "+1,000.00"),
        ("-1,234,567.5", "-1234567.50"),
        ("1e3", "1,000"),
        ("-inf", "-Infinity"),
    ],
)
def test_commas_between_thousands_are_no_part_of_a_number(text: str, answer: str) -> None:
    assert reward(text, True, Problem("", answer)) == 1.0


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        *[("A C", "A, C"), ("123", "1,2,3"), ("12", "1,2"), ("34", "3,4"), ("1000", "1,0,00"), ("10000", "1,0000")],
        *[("1,", ","), ("x", ","), ("1.000", "1,000"), ("snan", "nan"), ("1,,000", "1000")],
    ],
)
def test_other_commas_are_a_part_of_the_answer(text: str, answer: str) -> None:
    assert reward(text, True, Problem("", answer)) == 0.0
    assert reward(answer, True, Problem("", answer)) == 1.0


def test_shows_working() -> None:
    assert shows_working("[7-5=2]2")
    assert not shows_working("2")
    assert not shows_working("[2")


def test_working_of_a_sum_with_a_negative_partial_result() -> None:
    assert working("7-5+9=") == "[7-5=2;2+9=11]"
    assert working("3-5+9-1=") == "[3-5=-2;-2+9=7;7-1=6]"


def test_working_leads_to_the_answer_of_every_problem() -> None:
    sets = problem_sets(seed=0, training=500, held_out=100)
    for problem in sets.training + sets.held_out:
        assert re.fullmatch(r"\d([+-]\d){2,4}=", problem.prompt)
        assert working(problem.prompt).endswith(f"={problem.answer}]")


def test_held_out_prompts_are_common_to_all_seeds_and_never_trained_on() -> None:
    first, second = (problem_sets(seed, training=3000, held_out=200) for seed in (0, 1))
    held_out = {problem.prompt for problem in first.held_out}
    assert first.held_out == second.held_out
    assert len(held_out) == 200
    assert first.training != second.training
    assert len(first.training) == 3000
    assert held_out.isdisjoint(problem.prompt for problem in first.training + second.training)


def test_questions_in_words_have_the_same_answers() -> None:
    short, words = held_out_problems(20), held_out_problems(20, "question")
    assert [problem.answer for problem in short] == [problem.answer for problem in words]
    assert all(problem.prompt.startswith("State the final answer") for problem in words)
