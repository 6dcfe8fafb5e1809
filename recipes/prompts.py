"""Turn a problem's text into the tokens that a model is asked with."""

from typing import cast

from transformers import PreTrainedTokenizerFast

from samebit.recipes.problem import Problem


def prompt_ids(tokenizer: PreTrainedTokenizerFast, problem: Problem, chat: bool) -> list[int]:
    """Return the tokens of a prompt: as the one message of a user in the tokenizer's chat template, or as it is."""
    if not chat:
        return cast(list[int], tokenizer(problem.prompt).input_ids)
    ids = tokenizer.apply_chat_template(message(problem), add_generation_prompt=True, return_dict=False)
    return cast(list[int], ids)


def message(problem: Problem) -> list[dict[str, str]]:
    """Return the problem as a conversation of one message."""
    return [{"role": "user", "content": problem.prompt}]
