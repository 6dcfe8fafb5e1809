"""Plays peers of a link, and makes messages that nobody would send: mutations of valid ones."""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

from hypothesis import strategies as st
from torch import nn

from samebit.weight_sync import SharedMemoryReceiver, SharedMemorySender, apply_weights
from samebit.weight_sync.transports.channel import Channel
from samebit.weight_sync.transports.endpoint import Endpoint, connect
from samebit.weight_sync.transports.shared_buckets import SharedBuckets
from samebit.weight_sync.transports.shared_memory import SharedFile
from samebit.weight_sync.wire.patience import Patience

from ..patience import HANG

BUCKET = 1024
DEEP = b"[" * 100_000
EVIL: list[Any] = [
    None, True, False, -1, 0, 1, 2, 7, 1 << 63, (1 << 64) - 1, 1 << 64, 10**30, 0.5, float("nan"), float("inf"), "",
    "\ud800", "\U0001f600" * 400, "\0", "x" * 5000, [], {}, [[]], [None], [0] * 100, {"kind": "Free"}, [[[[[[]]]]]],
]  # fmt: skip


def nodes(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value in a JSON tree, its own first."""
    yield path
    children = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, child in children:
        yield from nodes(child, (*path, key))


def changed(tree: Any, path: tuple[Any, ...], act: str, value: Any) -> Any:
    """Return the tree with one value replaced, removed, or joined by another."""
    if not path:
        return value
    holder = tree
    for key in path[:-1]:
        holder = holder[key]
    last = path[-1]
    if act == "remove":
        del holder[last]
    elif act == "add" and isinstance(holder, list):
        holder.insert(last, value)
    elif act == "add":
        holder[f"{last}?"] = value
    else:
        holder[last] = value
    return tree


@st.composite
def mutated(draw: st.DrawFn, messages: list[bytes]) -> bytes:
    """Draws one of the valid messages, changed in its JSON once or twice, or in its bytes."""
    content = draw(st.sampled_from(messages))
    if draw(st.booleans()):
        tree = json.loads(content)
        for _ in range(draw(st.integers(1, 2))):
            path = draw(st.sampled_from(list(nodes(tree))))
            value = deepcopy(draw(st.sampled_from(EVIL)))
            tree = changed(tree, path, draw(st.sampled_from(["replace", "remove", "add"])), value)
        return json.dumps(tree).encode()
    begin, end = sorted(draw(st.tuples(*2 * [st.integers(0, len(content))])))
    filling = [b"", b"\xff", b"\xed\xa0\x80", b"9" * 5000, DEEP, b"\0", b"1e999", b"\xef\xbb\xbf", b"NaN"]
    return content[:begin] + draw(st.sampled_from(filling) | st.binary(max_size=8)) + content[end:]


def framed(content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + content


class RawSender(Channel):
    """Stands at the sender's end of a connection to this receiver, and says what the test wants."""

    def __init__(self, connected: socket.socket, receiver: SharedMemoryReceiver) -> None:
        super().__init__(connected, Patience(HANG))
        self.raw = connected
        self.receiver = receiver
        self.memory = SharedBuckets.create(BUCKET)

    def hand_over(self) -> None:
        self.send(SharedFile(), self.memory.descriptor)


@contextmanager
def receiving_from_a_stranger(model: nn.Module, *, timeout: float = HANG) -> Iterator[tuple[RawSender, Any]]:
    """Gives a raw sender, and the future of the `apply_weights` that listens to it."""
    endpoint = Endpoint()
    with endpoint, SharedMemoryReceiver(endpoint.address, timeout=timeout) as end, ThreadPoolExecutor(1) as other:
        received = other.submit(apply_weights, model, end)
        stranger = RawSender(endpoint.accept(time.monotonic() + HANG), end)
        try:
            yield stranger, received
        finally:
            stranger.close()


@contextmanager
def sending_to_a_stranger(sender: SharedMemorySender, model: nn.Module) -> Iterator[tuple[Channel, socket.socket, Any]]:
    """Gives a raw receiver, its socket, and the future of the `send` that talks to it."""
    with ThreadPoolExecutor(1) as other:
        sent = other.submit(sender.send, model)
        connected = connect(sender.address, HANG)
        stranger = Channel(connected, Patience(HANG))
        try:
            yield stranger, connected, sent
        finally:
            stranger.close()
