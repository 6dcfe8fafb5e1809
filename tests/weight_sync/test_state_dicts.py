"""A state dict is taken alike by every way in: what has no place is left out, a tied weight comes once, with one
digest; and whatever happens before an answer, the sender gets one."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from samebit.weight_sync import (
    BroadcastReceiver,
    BroadcastSender,
    SendReport,
    SharedMemoryReceiver,
    SharedMemorySender,
    SyncRefusedError,
    SyncReport,
    WeightMismatchError,
    WeightStream,
    apply_weights,
    connected_store,
    gloo_group,
    listening_store,
)
from samebit.weight_sync.wire import receiver

from ..patience import HANG

BUCKET = 1024


def llama(seed: int, *, tied: bool) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 24, "intermediate_size": 20, "num_attention_heads": 2, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=61, tie_word_embeddings=tied, **sizes))


def with_frequencies(model: nn.Module) -> dict[str, Tensor]:
    """Return a state dict with frequencies, as older versions of transformers saved it: one larger than a bucket, in
    the middle and at the end.
    """
    (first, tensor), *rest = model.state_dict().items()
    names = [f"model.layers.{layer}.self_attn.rotary_emb.inv_freq" for layer in (0, 1)]
    return {first: tensor, names[0]: torch.rand(300), **dict(rest), names[1]: torch.rand(300)}


def assert_equal(ours: nn.Module, theirs: nn.Module) -> None:
    other = theirs.state_dict()
    assert [name for name, tensor in ours.state_dict().items() if not torch.equal(tensor, other[name])] == []


def num_bytes(tensors: dict[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


class Link:
    """Links two ends over shared memory, with the sender in another thread."""

    def __init__(self) -> None:
        self.sender = SharedMemorySender(bucket_bytes=BUCKET, timeout=HANG)
        self.end = SharedMemoryReceiver(self.sender.address, timeout=HANG)

    def sync(self, model: nn.Module, weights: object, **options: Any) -> tuple[SendReport, SyncReport]:
        with ThreadPoolExecutor(1) as other:
            sent = other.submit(self.sender.send, weights, **options)
            received = apply_weights(model, self.end, verify=True)
        return sent.result(), received


@pytest.fixture
def link() -> Iterator[Link]:
    both = Link()
    yield both
    both.end.close()
    both.sender.close()


def test_what_has_no_place_is_left_out_of_every_way(link: Link) -> None:
    trainer = llama(1, tied=False)
    weights = with_frequencies(trainer)
    reports = []
    for seed, source in enumerate((weights, WeightStream.of(weights)), 2):
        model = llama(seed, tied=False)
        reports.append(apply_weights(model, source, verify=True))
        assert_equal(trainer, model)
    for seed, delta in enumerate((False, True, True), 4):
        model = llama(seed, tied=False)
        sent, received = link.sync(model, weights, delta=delta)
        assert_equal(trainer, model)
        assert not sent.delta, "no receiver has what it left out, so there is no base"
        assert sent.sent_bytes == received.sent_bytes == received.dense_bytes == num_bytes(weights)
        reports.append(received)
    assert {report.tensors for report in reports} == {len(trainer.state_dict())}
    assert len({report.digest for report in reports}) == 1


def test_what_is_unknown_is_named_without_what_is_left_out(link: Link) -> None:
    weights = {**with_frequencies(llama(1, tied=False)), "model.gate": torch.zeros(1)}
    model = llama(2, tied=False)
    for source in (weights, WeightStream.of(weights)):
        with pytest.raises(WeightMismatchError, match=r"nothing was written; 1 unknown: model\.gate$"):
            apply_weights(model, source)
    with ThreadPoolExecutor(1) as other:
        sent = other.submit(link.sender.send, weights)
        with pytest.raises(WeightMismatchError, match=r"1 unknown: model\.gate$"):
            apply_weights(model, link.end)
        with pytest.raises(SyncRefusedError, match=r"1 unknown: model\.gate$"):
            sent.result()


def test_a_dict_with_nothing_that_has_a_place_is_not_a_full_update() -> None:
    only = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.rand(3)}
    for source in (only, WeightStream.of(only)):
        with pytest.raises(WeightMismatchError, match="the source offers no tensors"):
            apply_weights(llama(1, tied=False), source)


def test_a_tied_weight_of_a_dict_travels_once_with_one_digest(link: Link) -> None:
    trainer = llama(1, tied=True)
    once = num_bytes(dict(trainer.named_parameters()))
    assert num_bytes(trainer.state_dict()) > once
    digests = set()
    for seed, source in enumerate((trainer, trainer.state_dict(), WeightStream.of(trainer.state_dict())), 2):
        model = llama(seed, tied=True)
        digests.add(apply_weights(model, source, verify=True).digest)
        assert_equal(trainer, model)
    for seed, weights in enumerate((trainer, trainer.state_dict()), 5):
        model = llama(seed, tied=True)
        sent, received = link.sync(model, weights)
        assert_equal(trainer, model)
        assert sent.sent_bytes == sent.dense_bytes == received.sent_bytes == received.dense_bytes == once
        assert sent.tensors == received.tensors == len(list(trainer.parameters()))
        digests |= {sent.digest, received.digest}
    assert len(digests) == 1


@torch.no_grad()
def step(model: LlamaForCausalLM) -> None:
    model.model.embed_tokens.weight[3] *= 2


@pytest.mark.parametrize("tied", [True, False])
def test_a_delta_of_a_tied_dict(link: Link, tied: bool) -> None:
    """A delta has each tied weight once; a receiver that does not tie it has it, and its base, under both names."""
    trainer, model = llama(1, tied=True), llama(2, tied=tied)
    link.sync(model, trainer.state_dict(), delta=True)
    for weights in (trainer.state_dict(), trainer if tied else trainer.state_dict()):
        step(trainer)
        sent, received = link.sync(model, weights, delta=True)
        assert_equal(trainer, model)
        assert sent.delta
        assert sent.digest == received.digest
        assert 0 < sent.sent_bytes < 2000
    assert received.changed == tuple(["model.embed_tokens.weight", "lm_head.weight"][: 1 if tied else 2])


def test_a_receiver_that_is_not_tied_takes_a_tied_dict(link: Link) -> None:
    trainer = llama(1, tied=True)
    for seed, source in enumerate((trainer.state_dict(), WeightStream.of(trainer.state_dict()), link), 2):
        model = llama(seed, tied=False)
        if source is link:
            assert link.sync(model, trainer.state_dict())[0].sent_bytes == num_bytes(trainer.state_dict())
        else:
            apply_weights(model, source, verify=True)
        assert_equal(trainer, model)


def test_equal_tensors_of_different_memory_both_travel(link: Link) -> None:
    trainer, model = llama(1, tied=True), llama(2, tied=True)
    weights = {name: tensor.clone() for name, tensor in trainer.state_dict().items()}
    assert link.sync(model, weights)[0].sent_bytes == num_bytes(weights)
    assert_equal(trainer, model)


def test_one_receiver_of_a_broadcast_is_tied_and_one_is_not() -> None:
    trainer, models = llama(1, tied=True), [llama(2, tied=True), llama(3, tied=False)]
    store = listening_store("127.0.0.1")

    def receive(rank: int) -> None:
        group = gloo_group(connected_store("127.0.0.1", store.port), rank, 3, timeout=HANG)
        for _ in range(2):
            apply_weights(models[rank - 1], BroadcastReceiver(0, group, timeout=HANG), verify=True)

    with ThreadPoolExecutor(2) as threads:
        received = [threads.submit(receive, rank) for rank in (1, 2)]
        with BroadcastSender(gloo_group(store, 0, 3, timeout=HANG), bucket_bytes=BUCKET, timeout=HANG) as sender:
            for _ in range(2):
                step(trainer)
                sent = sender.send(trainer.state_dict(), delta=True)
                assert sent.dense_bytes == num_bytes(trainer.state_dict())
        for one in received:
            one.result(HANG)
    assert sent.delta, "both have it under both names"
    for model in models:
        assert_equal(trainer, model)


@pytest.mark.parametrize("error", [LookupError, KeyboardInterrupt])
def test_an_error_before_the_answer_is_the_answer(
    link: Link, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(device: torch.device) -> str:
        raise error("no such package")

    trainer, model = llama(1, tied=True), llama(2, tied=True)
    with ThreadPoolExecutor(1) as other, monkeypatch.context() as patched:
        patched.setattr(receiver, "arithmetic_of", fail)
        sent = other.submit(link.sender.send, trainer)
        with pytest.raises(error, match="no such package"):
            apply_weights(model, link.end)
        with pytest.raises(SyncRefusedError, match=f"^{error.__name__}: no such package$"):
            sent.result()
    link.sync(model, trainer)
    assert_equal(trainer, model)
