"""Serve a tiny model with a tokenizer of bytes, in a thread of the test's process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import torch
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from samebit.rollout.integrations.http.service import Service
from samebit.rollout.integrations.http.serving import Server, load, open_sockets
from samebit.rollout.integrations.http.settings import read_setup

from ...patience import HANG

CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
TEMPLATE = (
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NAME = "tiny"


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes with one merge, ChatML's special tokens, and a token that is a whole tool call."""
    alphabet = sorted(ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*alphabet, "ab"])}
    backend = Tokenizer(BPE(vocabulary, [("a", "b")]))
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = ByteDecoder()
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    backend.add_tokens([AddedToken(CALL, normalized=False)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def build_folder(folder: Path, seed: int = 0) -> Path:
    """Write a model folder."""
    tokenizer = byte_tokenizer()
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=48,
        intermediate_size=100,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        max_position_embeddings=2048,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@dataclass(frozen=True)
class Served:
    """Holds a running server, and clients of it."""

    service: Service
    folder: Path
    server: Server
    base: str
    control: str
    client: openai.OpenAI
    http: httpx.Client

    def post(self, path: str, body: object, **more: object) -> httpx.Response:
        return self.http.post(self.base + path, json=body, **more)

    def command(self, path: str, body: object = None, **more: object) -> httpx.Response:
        return self.http.post(self.control + path, json=body, **more)


@contextmanager
def serving(folder: Path, *flags: str, environment: dict[str, str] | None = None) -> Iterator[Served]:
    """Serve a folder for the length of the block."""
    own = ("--port", "0", "--control-port", "0", "--served-model-name", NAME, "--num-threads", "1")
    setup = read_setup([str(folder), *own, *flags], environment or {})
    sockets = open_sockets(setup.settings)
    service = load(setup)
    server = Server(service, sockets)
    thread = threading.Thread(target=server.run)
    thread.start()
    base = f"http://127.0.0.1:{server.port}"
    control = base if sockets.control is None else f"http://127.0.0.1:{sockets.control.getsockname()[1]}"
    try:
        with (
            openai.OpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0) as client,
            httpx.Client(timeout=HANG) as http,
        ):
            yield Served(service, folder, server, base, control, client, http)
    finally:
        server.stop()
        thread.join()
        service.worker.close()
