"""Turn a problem's text into the tokens that a model is asked with."""

from dataclasses import dataclass
from typing import cast

from transformers import PreTrainedTokenizerFast

from samebit.recipes.problem import MARKER, Problem


@dataclass(frozen=True)
class Style:
    """Says how problems are put, and where an answer begins.

    chat: as a user's message in the tokenizer's chat template. instruction: a text that follows each problem.
    answer_after: the last of these in a completion, behind which the answer stands.
    """

    chat: bool = False
    instruction: str = ""
    answer_after: str = MARKER

    def prompt_ids(self, tokenizer: PreTrainedTokenizerFast, problem: Problem) -> list[int]:
        """Return the tokens of a prompt."""
        if not self.chat:
            return cast(list[int], tokenizer(self.text(problem)).input_ids)
        message = {"role": "user", "content": self.text(problem)}
        ids = tokenizer.apply_chat_template([message], add_generation_prompt=True, return_dict=False)
        return cast(list[int], ids)

    def text(self, problem: Problem) -> str:
        """Return the problem as it is put."""
        return f"{problem.prompt}\n{self.instruction}" if self.instruction else problem.prompt
