"""`--data` reads both formats, and its errors name the file, the row and the cause."""

import json
import re
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pytest
from pyarrow import parquet

from samebit.recipes import prompt_file
from samebit.recipes.problem import Problem, reward

ROWS = [{"prompt": f"{i}+1=", "answer": str(i + 1), "level": i} for i in range(10)]


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_both_formats_give_the_same_problems(tmp_path: Path) -> None:
    jsonl = write_jsonl(tmp_path / "rows.jsonl", ROWS)
    parquet.write_table(pa.Table.from_pylist(ROWS), tmp_path / "rows.parquet")
    expected = [Problem(row["prompt"], row["answer"]) for row in ROWS]
    assert prompt_file.load(jsonl) == expected
    assert prompt_file.load(tmp_path / "rows.parquet") == expected


def test_a_text_may_have_separators_of_lines_that_json_leaves_as_they_are(tmp_path: Path) -> None:
    row = {"prompt": "a\u2028b\u2029c\u0085d", "answer": "e"}
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{json.dumps(row, ensure_ascii=False)}\n" * 2, encoding="utf-8")
    assert prompt_file.load(path) == [Problem(row["prompt"], "e")] * 2


def test_held_out_prompts_are_not_trained_on_even_when_rows_repeat(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", ROWS + ROWS)
    first, second = (prompt_file.problem_sets(path, seed, held_out=400) for seed in (0, 1))
    assert len({problem.prompt for problem in first.held_out}) == 2
    assert first.held_out == second.held_out
    assert len(first.training) == 16
    assert first.training != second.training
    assert {p.prompt for p in first.held_out}.isdisjoint(p.prompt for p in first.training)


@pytest.mark.parametrize(
    ("name", "rows", "message"),
    [
        (
            "rows.jsonl",
            [{"prompt": "a", "answers": "b"}],
            r"row 1: no column 'answer' \(there are 'prompt', 'answers'\)",
        ),
        ("rows.jsonl", [ROWS[0], {"prompt": "a", "answer": 3}], "row 2: 'answer' is 3, not a text"),
        ("rows.jsonl", [{"prompt": "", "answer": "b"}], "row 1: 'prompt' is '', not a text"),
        ("rows.jsonl", [{"prompt": "a", "answer": " "}], "row 1: 'answer' is ' ', not a text"),
        ("rows.jsonl", [["a", "b"]], "row 1: not an object"),
        ("rows.jsonl", [], "no rows"),
        ("rows.csv", [], "unknown kind of file '.csv'"),
    ],
)
def test_unusable_rows_are_named(tmp_path: Path, name: str, rows: list[Any], message: str) -> None:
    path = write_jsonl(tmp_path / name, rows)
    with pytest.raises(ValueError, match=message) as caught:
        prompt_file.load(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(("answer", "mark"), [("[1, 2]", "]"), ("five ]\n", "]"), ("so \\boxed{5}", "}")])
def test_answers_that_nothing_could_earn_are_named(tmp_path: Path, answer: str, mark: str) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [ROWS[0], {"prompt": "a", "answer": answer}])
    said = f"{path}, row 2: no completion could earn the answer {answer.strip()!r}, which ends with {mark!r}"
    with pytest.raises(ValueError, match=f"^{re.escape(said)}.* another mark by --answer-after"):
        prompt_file.load(path, answer_after=mark)
    assert prompt_file.load(path, answer_after="####")[1] == Problem("a", answer.strip())


@pytest.mark.parametrize("answer", ["so [1, 2] = 3", "3", " [2]3 "])
def test_an_answer_that_holds_the_mark_can_be_earned(tmp_path: Path, answer: str) -> None:
    problems = prompt_file.load(write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "a", "answer": answer}]))
    assert reward(answer, True, problems[0]) == 1.0


def test_broken_json_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a", "answer": "b"}\n{"prompt": \n', encoding="utf-8")
    with pytest.raises(ValueError, match=r"row 2: not JSON"):
        prompt_file.load(path)


def test_a_missing_file_and_missing_parquet_columns_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none\.jsonl: no such file"):
        prompt_file.load(tmp_path / "none.jsonl")
    parquet.write_table(pa.table({"question": ["a"], "reply": ["b"]}), tmp_path / "rows.parquet")
    with pytest.raises(ValueError, match=r"no column 'prompt', 'answer' \(there are 'question', 'reply'\)"):
        prompt_file.load(tmp_path / "rows.parquet")


def test_a_data_set_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """A data set of the hub is read as GSM8K has it: other names, and an answer that follows its working."""
    rows = [{"question": f"{i} apples", "answer": f"one by one\n#### {i}", "level": 1} for i in range(5)]

    def load_dataset(name: str, config: str | None, split: str) -> datasets.Dataset:
        if name != "openai/gsm8k":
            raise ValueError("no such data set")
        assert (config, split) == ("main", "test")
        return datasets.Dataset.from_list(rows)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    found = prompt_file.load("openai/gsm8k:main", ("question", "answer"), "test", "####")
    assert found == [Problem(f"{i} apples", str(i)) for i in range(5)]
    with pytest.raises(ValueError, match=r"no column 'prompt' \(there are 'question', 'answer', 'level'\)"):
        prompt_file.load("openai/gsm8k:main", split="test")
    with pytest.raises(ValueError, match="nowhere: no such file, and as a data set of the hub: no such data set"):
        prompt_file.load("nowhere")


@pytest.mark.parametrize(
    ("source", "asked"),
    [
        ("simplescaling/s1K-1.1", ("simplescaling/s1K-1.1", None)),
        ("wikimedia/wikipedia:20220301.en", ("wikimedia/wikipedia", "20220301.en")),
    ],
)
def test_names_of_the_hub_have_dots(
    source: str, asked: tuple[str, str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def load_dataset(name: str, config: str | None, split: str) -> datasets.Dataset:
        assert (name, config) == asked
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert len(prompt_file.load(source)) == len(ROWS)


@pytest.mark.parametrize("source", ["rows.csv", "data/rows.jsonl.gz", "rows.json"])
def test_other_files_are_looked_for_nowhere(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets, "load_dataset", None)
    with pytest.raises(ValueError, match=r"unknown kind of file '\.\w+', expected \.parquet or \.jsonl"):
        prompt_file.load(source)


def test_too_few_prompts_to_hold_any_out(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", ROWS[:4])
    with pytest.raises(ValueError, match="4 different prompts are too few"):
        prompt_file.problem_sets(path, seed=0, held_out=400)
