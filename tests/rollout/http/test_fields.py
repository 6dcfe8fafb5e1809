"""Every field that OpenAI's client can send is honoured or refused by name, and docs/serve.md says which."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
from openai.resources import completions
from openai.resources.chat import completions as chats

from samebit.rollout.integrations.http.openai.requests import ChatRequest, CompletionRequest

from .served import Served

DOCS = Path(__file__).resolve().parents[3] / "docs" / "serve.md"
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
ASKED = {"/v1/completions": {"prompt": "hi", "max_tokens": 1}, "/v1/chat/completions": CHAT}
TAKEN = {"/v1/completions": CompletionRequest, "/v1/chat/completions": ChatRequest}
SENT = {"/v1/completions": completions.Completions, "/v1/chat/completions": chats.Completions}
REFUSED = "refused, as is all else"
OF_THE_CLIENT = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}


def rows() -> dict[str, set[str]]:
    """Return the fields of each row of the table."""
    lines = DOCS.read_text().split("| fields |")[1].split("\n\n")[0].splitlines()[2:]
    return {line.split("|")[1].strip(): set(re.findall(r"`([a-z_]+)`", line)) for line in lines}


@pytest.mark.parametrize("path", ASKED)
def test_a_field_that_is_not_taken_is_refused_by_name(served: Served, path: str) -> None:
    """Fields of OpenAI's client that are not taken, and those that the table says are refused, are refused by name."""
    sent = inspect.signature(SENT[path].create).parameters.keys() - OF_THE_CLIENT
    assert len(sent) > 15
    for name in sorted((sent | rows()[REFUSED]) - TAKEN[path].model_fields.keys()):
        answer = served.post(path, {**ASKED[path], name: None})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)
        assert answer.json()["error"]["message"] == f"there is no field '{name}'; nothing that is passed is ignored"


def test_the_table_of_fields_is_whole() -> None:
    """Each field that is taken stands in the table, and none that is refused is taken."""
    found = rows()
    assert found.keys() == {"on both", "of a completion", "of a chat", REFUSED}
    both, completion, chat = (found[name] for name in ("on both", "of a completion", "of a chat"))
    assert both | completion == CompletionRequest.model_fields.keys() | {"include_usage"}
    assert both | chat == ChatRequest.model_fields.keys() | {"include_usage"}
