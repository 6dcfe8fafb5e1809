"""The rows of the warm-up hold what they should, and the right tokens are taught."""

import pytest
import torch

from samebit.recipes.lessons import Lesson, Rows, rows
from samebit.recipes.tiny_model import build_tokenizer

LESSONS = [Lesson("1+2=", "3"), Lesson("7-5+9=", "[7-5=2;2+9=11]11"), Lesson("4+4=", "8"), Lesson("0-1=", "-1")]
TOKENIZER = build_tokenizer()


def taught_texts(batch: Rows) -> list[str]:
    return [
        TOKENIZER.decode(ids[1:][marks], skip_special_tokens=False)
        for ids, marks in zip(batch.input_ids, batch.taught, strict=True)
    ]


def test_a_row_of_one_lesson_teaches_its_answer() -> None:
    batch = rows(LESSONS, TOKENIZER)
    assert taught_texts(batch) == [lesson.answer + "<eos>" for lesson in LESSONS]
    lengths = batch.attention_mask.sum(1).tolist()
    for ids, length, lesson in zip(batch.input_ids, lengths, LESSONS, strict=True):
        assert TOKENIZER.decode(ids[:length]) == f"<bos>{lesson.prompt}{lesson.answer}<eos>"
        assert ids[length:].unique().tolist() in ([], [TOKENIZER.pad_token_id])


@pytest.mark.parametrize(
    ("row_tokens", "lessons_in_rows"), [(13, [1, 1, 1, 1]), (14, [1, 1, 2]), (31, [2, 2]), (45, [4])]
)
def test_as_many_lessons_as_fit_share_a_row(row_tokens: int, lessons_in_rows: list[int]) -> None:
    """Lessons of 6, 23, 6 and 7 tokens share rows as they fit, with one token for the beginning of a row."""
    batch = rows(LESSONS, TOKENIZER, row_tokens)
    assert [text.count("<eos>") for text in taught_texts(batch)] == lessons_in_rows
    assert "".join(taught_texts(batch)) == "".join(lesson.answer + "<eos>" for lesson in LESSONS)
    assert batch.input_ids.shape == batch.attention_mask.shape
    assert batch.taught.dtype == torch.bool
