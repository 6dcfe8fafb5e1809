"""Make supervised rows: problems with the answers to learn, one after the other, as worked examples stand in a
prompt."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerFast

from samebit.recipes.tiny_model import pad_id


@dataclass(frozen=True)
class Lesson:
    """Holds a question, and the text that answers it; `<eos>` ends each."""

    prompt: str
    answer: str


@dataclass(frozen=True)
class Rows:
    """Holds rows, padded to the longest; entry t of `taught` is about token t+1."""

    input_ids: Tensor  # [B, T]
    attention_mask: Tensor  # [B, T]
    taught: Tensor  # [B, T-1] bool: of an answer, or its end

    def on(self, device: torch.device) -> "Rows":
        """Return the rows on a device."""
        return Rows(**{name: part.to(device) for name, part in vars(self).items()})


def rows(lessons: Sequence[Lesson], tokenizer: PreTrainedTokenizerFast, row_tokens: int = 0) -> Rows:
    """Return all lessons in order, as many in a row as fit into `row_tokens`, but at least one."""
    ids, taught = [], []
    for packed in _packed([_Tokens.of(lesson, tokenizer) for lesson in lessons], row_tokens):
        row = [tokenizer.bos_token_id, *(token for one in packed for token in (*one.prompt, *one.answer))]
        ids.append(torch.tensor(row))
        marks = [mark for one in packed for mark in (*[False] * len(one.prompt), *[True] * len(one.answer))]
        taught.append(torch.tensor(marks))
    mask = [torch.ones_like(row) for row in ids]
    padding = pad_id(tokenizer)
    return Rows(
        pad_sequence(ids, batch_first=True, padding_value=padding),
        pad_sequence(mask, batch_first=True),
        pad_sequence(taught, batch_first=True),
    )


@dataclass(frozen=True)
class _Tokens:
    """Holds the tokens of one lesson."""

    prompt: list[int]
    answer: list[int]

    @classmethod
    def of(cls, lesson: Lesson, tokenizer: PreTrainedTokenizerFast) -> "_Tokens":
        prompt, answer = tokenizer([lesson.prompt, lesson.answer], add_special_tokens=False).input_ids
        return cls(prompt, [*answer, tokenizer.eos_token_id])

    def __len__(self) -> int:
        return len(self.prompt) + len(self.answer)


def _packed(lessons: Sequence[_Tokens], row_tokens: int) -> Iterator[list[_Tokens]]:
    row: list[_Tokens] = []
    used = 1
    for lesson in lessons:
        if row and used + len(lesson) > row_tokens:
            yield row
            row, used = [], 1
        row.append(lesson)
        used += len(lesson)
    yield row
