"""A worker behind calls keeps links open to few senders, and none to one that was given up."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from samebit.weight_sync import (
    BroadcastSender,
    PeerLostError,
    SharedMemoryReceiver,
    SharedMemorySender,
    SyncRefusedError,
    connected_store,
    gloo_group,
    listening_store,
)
from samebit.weight_sync.transports import addresses
from samebit.weight_sync.transports.addresses import MOST_IDLE, BroadcastGroup, SharedMemoryAt, Sources
from samebit.weight_sync.wire.link import Answer, ReceiverLink

from ..patience import HANG

WEIGHTS = {"weight": torch.zeros(3)}


def num_open(links: list[SharedMemoryReceiver]) -> int:
    """Count those that hold a socket, and memory of a sender: also of one that is gone."""
    for link in links:
        assert (link._channel is None) == (link._memory is None) == link._closed
    return sum(link._channel is not None for link in links)


def refuse(link: object) -> None:
    """Answer what is announced next."""
    assert isinstance(link, ReceiverLink)
    link.listen()
    link.answer(Answer(refused="not now"))


def refused(sources: Sources, sender: SharedMemorySender) -> SharedMemoryReceiver:
    """Let a sender offer its weights, and refuse them: the link, which is returned, stays open."""
    with ThreadPoolExecutor(1) as other:
        sent = other.submit(sender.send, WEIGHTS)
        with sources.opened(SharedMemoryAt(sender.address, HANG)) as link:
            refuse(link)
        with pytest.raises(SyncRefusedError, match="not now"):
            sent.result()
    assert isinstance(link, SharedMemoryReceiver)
    return link


def small_sender() -> SharedMemorySender:
    return SharedMemorySender(bucket_bytes=1 << 16, timeout=HANG)


def test_one_sender_after_another_leaves_few_links_open() -> None:
    sources, links, counts = Sources(), [], []
    for _ in range(20):
        with small_sender() as sender:
            links.append(refused(sources, sender))
        counts.append(num_open(links))
    assert counts == [*range(1, MOST_IDLE + 1), *[MOST_IDLE + 1] * (20 - MOST_IDLE)]
    sources.close()
    assert num_open(links) == 0


def test_a_link_that_an_update_uses_is_not_closed_for_another() -> None:
    sources, senders = Sources(), [small_sender() for _ in range(6)]
    with ThreadPoolExecutor(1) as other:
        sent = other.submit(senders[0].send, WEIGHTS)
        with sources.opened(SharedMemoryAt(senders[0].address, HANG)) as used:
            for sender in senders[1:]:
                refused(sources, sender)
            refuse(used)
        with pytest.raises(SyncRefusedError, match="not now"):
            sent.result()
    for sender in senders:
        refused(sources, sender)  # one whose link was closed is called again
        sender.close()
    sources.close()


def test_a_sender_that_called_on_a_line_which_made_room_is_taken_on_another() -> None:
    """A sender that called on a line which made room for others is taken on another: it had announced before the line
    was closed, and got no answer there.
    """
    sources = Sources()
    with ThreadPoolExecutor(2) as other, ExitStack() as stack:
        first, *waiting = [stack.enter_context(small_sender()) for _ in range(MOST_IDLE + 2)]
        idle, *_ = [refused(sources, sender) for sender in waiting]
        sent = other.submit(waiting[0].send, WEIGHTS)
        wait_for_message(idle)
        refused(sources, first)
        assert idle._closed
        taken = other.submit(refuse_next, sources, waiting[0])
        with pytest.raises(SyncRefusedError, match="not now"):
            sent.result()
        taken.result()
    sources.close()


def wait_for_message(link: SharedMemoryReceiver) -> None:
    """Wait until there is something to receive, and leave it there."""
    assert link._channel is not None
    connected = link._channel._socket
    connected.settimeout(HANG)
    assert connected.recv(1, socket.MSG_PEEK)


def refuse_next(sources: Sources, sender: SharedMemorySender) -> None:
    with sources.opened(SharedMemoryAt(sender.address, HANG)) as link:
        refuse(link)


def test_a_sender_that_was_given_up_may_send_to_another_receiver() -> None:
    first, second = Sources(), Sources()
    with small_sender() as sender:
        refused(first, sender)
        first.forget(SharedMemoryAt(sender.address, HANG))
        first.forget(SharedMemoryAt("nobody"))
        refused(second, sender)
    second.close()


def test_an_update_whose_link_is_given_up_ends() -> None:
    sources = Sources()
    with small_sender() as sender, ThreadPoolExecutor(1) as other:
        address = SharedMemoryAt(sender.address, HANG)
        with sources.opened(address) as link:
            assert isinstance(link, ReceiverLink)
            waiting = other.submit(link.listen)
            sources.forget(address)
            with pytest.raises(PeerLostError):
                waiting.result()
        with sources.opened(address) as another:
            assert another is not link
    sources.close()


def test_a_group_that_waits_for_its_ranks_holds_up_no_other_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group that waits for its ranks, as its sender is late, holds up no other link: an update comes over another
    one, and what is open can be closed.
    """
    sources, store, joining = Sources(), listening_store("127.0.0.1"), threading.Event()

    def connect(*place: Any, **options: Any) -> Any:
        joining.set()
        return connected_store(*place, **options)

    def receive() -> None:
        with sources.opened(BroadcastGroup("127.0.0.1", store.port, 1, 2, HANG)) as link:
            refuse(link)

    monkeypatch.setattr(addresses, "connected_store", connect)
    with ThreadPoolExecutor(1) as other, small_sender() as sender:
        received = other.submit(receive)
        assert joining.wait(HANG)
        link = refused(sources, sender)
        sources.close()
        assert num_open([link]) == 0
        late = BroadcastSender(gloo_group(store, 0, 2, timeout=HANG), timeout=HANG)
        with pytest.raises(SyncRefusedError, match="not now"):
            late.send(WEIGHTS)
        received.result()
