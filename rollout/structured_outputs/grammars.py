"""Compile what requests are constrained to, in the callers' threads: `Grammars`.

Invariants
----------
* Who asks for what is compiled already waits for nothing: for no tokenizer that is read, nor another grammar.
* What can not be compiled is refused at submission; the generation thread meets compiled grammars alone.
* A compiled grammar is only ever copied, so requests of equal texts share it.
* What somebody holds is not compiled again, however many others come meanwhile: not what requests that run are
  constrained to, nor those that are prepared and wait.
* Nothing is loaded, and no tokenizer is read, before the first request asks.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from samebit.kernels.layout.grids import ceil_div
from samebit.rollout.checks import shown
from samebit.rollout.errors import RequestError
from samebit.rollout.structured_outputs.params import Kind, StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

Bits = npt.NDArray[np.int32]
"""Holds a bit a token, 32 of them each."""

MOST_KEPT = 64
"""Grammars that are kept for requests to come: those of a training run are few, and each takes memory."""
MOST_CHARACTERS = 1 << 19
"""Characters that their texts have in all; the last one is kept whatever it has. A character takes up to 0.4 kB."""

LONGEST_REASON = 1000
"""Characters of an error of the library that are quoted: it may hold the whole text, and what was called where."""

_MOST_SPELLED = 256
"""Bytes of a text that are looked at for its first token, which is shorter."""
_MARK = b"\xff"
"""Begins the library's name of a token among bytes that have to follow: no text has this byte."""


_PANIC = "PanicException"
"""Names the class of errors that no module of the library exports."""
_GBNF = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
"""Finds a rule of the other format that a grammar may have; Lark has no such line."""


@dataclass(frozen=True, eq=False)
class Start:
    """Holds a text compiled, at its beginning."""

    matcher: LLMatcher

    def copied(self) -> LLMatcher:
        """Return what follows one sample."""
        return self.matcher.deep_copy()


@dataclass(frozen=True, eq=False)
class Words:
    """Holds what is known of a tokenizer. accepting: tokens any of which the library allows where a text may end.
    special: a bit for each of these, and of those that are no text. width: tokens that the library knows."""

    read: LLTokenizer
    accepting: tuple[int, ...]
    special: Bits
    width: int

    @classmethod
    def of(cls, read: LLTokenizer, added: Iterable[int]) -> Words:
        """Return what is known of a tokenizer that was read. added: tokens of which some are no text."""
        width, accepting = read.vocab_size, tuple(read.eos_tokens)
        special = np.zeros(ceil_div(width, 32) * 32, np.bool_)
        special[[token for token in added if token < width and read.is_special_token(token)]] = True
        special[list(accepting)] = True
        return cls(read, accepting, np.packbits(special, bitorder="little").view(np.int32), width)


@dataclass(frozen=True, eq=False)
class Grammar:
    """Holds what a request is constrained to. ending: tokens that end its samples, where the text may end."""

    start: Start
    words: Words
    ending: tuple[int, ...]

    def spelled(self, place: LLMatcher) -> int | None:
        """Return the first token of the text that has to follow; None where no text has to."""
        text = place.compute_ff_bytes()[:_MOST_SPELLED].partition(_MARK)[0].decode(errors="ignore")
        return self.words.read.greedy_tokenize(text)[0] if text else None

    def why_none_may_follow(self, output_ids: list[int]) -> str:
        """Return in a line why no token may follow these of a sample: what the library says, where it has given up."""
        place = self.start.copied()
        place.consume_tokens(output_ids)
        place.compute_bitmask()
        return place.get_error().partition("\n")[0] or "its grammar allows no token that the request does"


class Grammars:
    """Compiles grammars for one tokenizer and the vocabulary of one model."""

    def __init__(self, tokenizer: object, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._compiling = threading.Lock()
        self._words: Words | None = None
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[Kind, str], Start] = OrderedDict()
        self._held: WeakValueDictionary[tuple[Kind, str], Start] = WeakValueDictionary()

    def compiled(self, asked: StructuredOutputsParams, *, ignore_eos: bool, stop_ids: tuple[int, ...]) -> Grammar:
        """Return what a request asks for, compiled; its samples end where the grammar lets them: at the model's end
        tokens and at those of `stop_ids` that are no text, at any of `stop_ids` where there are none. (One that is text
        cuts a sample wherever the grammar has it; behind a whole text it would be one character more.)

        Raises:
            RequestError: it can not be compiled, by its own fault or since this worker can compile none.
        """
        model_ends = () if ignore_eos else self._eos_token_ids
        if not (model_ends or stop_ids):
            raise RequestError(
                f"structured_outputs need a token that ends a sample: the model's are {list(self._eos_token_ids)}, "
                f"ignore_eos={ignore_eos}, and stop_token_ids has none"
            )
        words, start = self._start(*asked.kind_and_text)
        stops = tuple(token for token in stop_ids if token < words.width and words.read.is_special_token(token))
        return Grammar(start, words, (*model_ends, *stops) or stop_ids)

    def has(self, asked: StructuredOutputsParams) -> bool:
        """Return whether what a request asks for is compiled already."""
        return self._found(asked.kind_and_text) is not None

    def _start(self, kind: Kind, text: str) -> tuple[Words, Start]:
        found = self._found((kind, text))
        if found is not None:
            return found
        with self._compiling:  # reading a tokenizer takes seconds, and is done once, as is a text that several ask for
            found = self._found((kind, text))
            if found is not None:
                return found
            words = self._words = self._words or self._read_tokenizer()
            start = Start(_compiled(words.read, kind, text))
            with self._lock:
                self._keep((kind, text), start)
            return words, start

    def _found(self, wanted: tuple[Kind, str]) -> tuple[Words, Start] | None:
        with self._lock:
            start = self._held.get(wanted)
            if start is None or self._words is None:
                return None
            self._keep(wanted, start)
            return self._words, start

    def _keep(self, named: tuple[Kind, str], start: Start) -> None:
        """Keep what was asked for last, and let the oldest go. Under the lock."""
        self._held[named] = self._kept[named] = start
        self._kept.move_to_end(named)
        characters = sum(len(text) for _, text in self._kept)
        while len(self._kept) > MOST_KEPT or (characters > MOST_CHARACTERS and len(self._kept) > 1):
            (_, text), _ = self._kept.popitem(last=False)
            characters -= len(text)

    def _read_tokenizer(self) -> Words:
        try:
            from llguidance.hf import from_tokenizer
        except ImportError as error:
            raise RequestError(
                "structured_outputs need llguidance, which is not installed: pip install 'samebit[structured]'"
            ) from error
        from transformers import PreTrainedTokenizerFast

        tokenizer = self._tokenizer
        if not isinstance(tokenizer, PreTrainedTokenizerFast):
            given = "none" if tokenizer is None else f"a {type(tokenizer).__name__}"
            raise RequestError(
                "structured_outputs need a tokenizer of the kind PreTrainedTokenizerFast, by which the texts of all "
                f"tokens are known; this worker has {given}"
            )
        own = tokenizer.eos_token_id
        known = [token for token in self._eos_token_ids if token < len(tokenizer)]
        ends = known or ([] if own is None else [own])
        if not ends:
            raise RequestError("structured_outputs need an end token, and neither model nor tokenizer names one")
        # Gemma-3 1B's has a token more than there are logits, which no row ever chooses.
        width = max(self._vocab_size, len(tokenizer))
        try:
            read = from_tokenizer(tokenizer, n_vocab=width, eos_token=ends)
        except BaseException as error:  # whatever the library can not read; where it panics that is no Exception
            if not isinstance(error, Exception) and type(error).__name__ != _PANIC:
                raise
            raise RequestError(f"structured_outputs can not read this worker's tokenizer: {error}") from error
        return Words.of(read, tokenizer.added_tokens_decoder)


def _compiled(tokenizer: LLTokenizer, kind: Kind, text: str) -> LLMatcher:
    """Compile a text. Where it allows one continuation, tokens are those that the tokenizer makes of it, be they text
    or not: `matching` spells those that are not."""
    from llguidance import LLMatcher

    try:
        start = LLMatcher(tokenizer, _source(kind, text), log_level=0)
    except ValueError as error:
        raise _refused(kind, text, str(error)) from error
    if start.is_error():
        raise _refused(kind, text, start.get_error())
    return start


def _source(kind: Kind, text: str) -> str:
    """Return a grammar in the library's own format."""
    from llguidance import LLMatcher, grammar_from

    if kind == "json":
        return LLMatcher.grammar_from_json_schema(text)
    if kind == "json_object":
        return LLMatcher.grammar_from_json_schema({"type": "object"})
    if kind == "choice":  # as one terminal: of alternatives of a rule the library follows no more than 2,000
        texts = " | ".join(map(json.dumps, json.loads(text)))
        return grammar_from("lark", f"start: CHOICE\nCHOICE: {texts}")
    return grammar_from("lark", _as_lark(text)) if kind == "grammar" else grammar_from(kind, text)


def _as_lark(text: str) -> str:
    """Return a grammar in Lark's format. The library's own way takes all that has no line `start:` for GBNF, and looks
    for that line, with nothing else running, for 35 s in 65,536 empty ones."""
    from llguidance.gbnf_to_lark import gbnf_to_lark

    if _GBNF.search(text) is None:
        return text
    try:
        return gbnf_to_lark(text)
    except Exception as error:  # whatever its reader stumbles over
        raise ValueError(f"it is no GBNF: {error}") from error


def _refused(kind: Kind, text: str, why: str) -> RequestError:
    said = why if len(why) <= LONGEST_REASON else f"{why[:LONGEST_REASON]}..."
    return RequestError(f"structured_outputs.{kind} can not be compiled: {said}; given: {shown(text)}")
