"""Define a tool that verl's own agent loop calls after every answer, whatever the model wrote: a turn more."""

from __future__ import annotations

from typing import Any

from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser
from verl.tools.function_tool import function_tool

SAYS = "=12;"


@function_tool
def go_on() -> str:
    """Say something to go on from."""
    return SAYS


@ToolParser.register("always")
class Always(ToolParser):
    """Calls the tool in every answer, by `rollout.multi_turn.format=always`."""

    @property
    def stop_token_ids(self) -> list[int]:
        """Return tokens that end a turn soon, so that there is room for another."""
        return [int(token) for token in self.tokenizer.convert_tokens_to_ids(["=", ";"])]

    async def extract_tool_calls(
        self, responses_ids: list[int], tools: list[Any] | None = None
    ) -> tuple[str, list[FunctionCall]]:
        return self.tokenizer.decode(responses_ids), [FunctionCall(name="go_on", arguments="{}")]
