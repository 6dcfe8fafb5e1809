"""The weights of a vision tower that is bound travel, are checked and noticed as those of text; a text model is sent
none of them, and none are left behind that may be old."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from torch import Tensor, nn
from transformers import PreTrainedModel

from samebit.kernels import BindingError, bind, image_features
from samebit.kernels.binding import binding_of
from samebit.rollout import RolloutConfig, RolloutWorker, SamplingParams
from samebit.rollout.errors import AdapterError
from samebit.weight_sync import (
    BroadcastReceiver,
    BroadcastSender,
    NonFiniteWeightError,
    SharedMemoryReceiver,
    SharedMemorySender,
    SyncReport,
    WeightMismatchError,
    WeightStream,
    apply_weights,
    connected_store,
    gloo_group,
    listening_store,
)

from ..patience import HANG
from .compare import assert_matches_trainer
from .families import make_model, make_wrapped, token_ids
from .lora import wake

TOWER = "model.visual."
WEIGHT = "model.visual.blocks.0.attn.qkv.weight"
SEQUENCES = token_ids(40, 3, 70)
FEW = SamplingParams(max_tokens=4, seed=5, ignore_eos=True)
CONFIG = RolloutConfig(block_size=64)
GRID = torch.tensor([[1, 4, 6]])
PIXELS = torch.randn(24, 96, generator=torch.Generator().manual_seed(0))
FAMILIES = pytest.mark.parametrize("family", ["Qwen2", "Qwen3", "Qwen3_5"])
BOTH = pytest.mark.parametrize("name", [WEIGHT, "model.language_model.layers.0.mlp.down_proj.weight"])


def trainer(family: str = "Qwen2") -> PreTrainedModel:
    """Return a model that computes text and images, always with the same weights."""
    model = bind(make_wrapped(family))
    assert binding_of(model).images is not None
    return model


def text_model(family: str = "Qwen2") -> PreTrainedModel:
    return bind(make_model(family))


@torch.no_grad()
def stepped(model: PreTrainedModel) -> PreTrainedModel:
    """Return a trainer after a step."""
    for parameter in model.parameters():
        parameter.mul_(0.5)
    return model


@torch.no_grad()
def step(model: nn.Module, name: str) -> None:
    """Take a step on one parameter alone."""
    model.get_parameter(name).mul_(0.5)


def features(model: nn.Module) -> Tensor:
    return image_features(model, PIXELS, GRID)


def of_text(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in model.state_dict().items() if not name.startswith(TOWER)}


def num_bytes(tensors: dict[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def assert_same_weights(ours: nn.Module, theirs: nn.Module) -> None:
    """Check all weights, and what images become."""
    other = theirs.state_dict()
    assert [name for name, tensor in ours.state_dict().items() if not torch.equal(tensor, other[name])] == []
    assert torch.equal(features(ours), features(theirs))


def assert_same_text(ours: nn.Module, theirs: nn.Module) -> None:
    """Check the weights of a text model against those inside of one with vision."""
    own = {name.replace(".language_model.", "."): tensor for name, tensor in of_text(theirs).items()}
    assert [name for name, tensor in ours.state_dict().items() if not torch.equal(tensor, own[name])] == []


class Link:
    """Links two ends over shared memory, with the sender in another thread."""

    def __init__(self) -> None:
        self.sender = SharedMemorySender(timeout=HANG)
        self.end = SharedMemoryReceiver(self.sender.address, timeout=HANG)

    def sync(self, receive: Callable[[object], SyncReport], weights: object, **options: Any) -> tuple[Any, SyncReport]:
        with ThreadPoolExecutor(1) as other:
            sent = other.submit(self.sender.send, weights, **options)
            received = receive(self.end)
        return sent.result(), received


@pytest.fixture
def link() -> Iterator[Link]:
    both = Link()
    yield both
    both.end.close()
    both.sender.close()


# -- in place --------------------------------------------------------------------------------------


@BOTH
def test_a_step_that_the_worker_is_told_of(name: str) -> None:
    model = trainer()
    with RolloutWorker(model, config=CONFIG) as worker:
        worker.generate(SEQUENCES, FEW)
        before = worker.receive_weights(verify=True).digest
        with worker.weight_update() as update:
            step(model, name)
        assert update.report is not None
        assert update.report.changed == (name,)
        assert worker.generate(SEQUENCES, FEW)[2].num_cached_tokens == 0
        assert worker.receive_weights(verify=True).digest != before
        assert worker.stats()["untold_updates"] == 0


@BOTH
def test_a_step_that_the_worker_is_not_told_of(name: str) -> None:
    model = trainer()
    with RolloutWorker(model, config=CONFIG) as worker:
        for count in (0, 1, 2):
            cold, warm = (worker.generate(SEQUENCES, FEW)[2] for _ in range(2))
            assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, 64)
            assert worker.stats()["untold_updates"] == worker.weight_version == count
            step(model, name)


@BOTH
def test_no_number_is_found(name: str) -> None:
    model = trainer()
    with RolloutWorker(model, config=CONFIG) as worker:
        with torch.no_grad():
            model.get_parameter(name)[0, 0] = float("nan")
        with pytest.raises(NonFiniteWeightError, match=f"NaN or infinity in {name}"):
            worker.receive_weights(verify=True)


# -- what travels ----------------------------------------------------------------------------------


@FAMILIES
def test_every_way_of_an_update_brings_the_tower(family: str, tmp_path: Path, link: Link) -> None:
    """Each way writes and reads back every tensor, with one digest."""
    first, second, model = trainer(family), stepped(trainer(family)), trainer(family)
    first.save_pretrained(tmp_path / "first")
    second.save_pretrained(tmp_path / "second")
    state = second.state_dict()
    digests = set()
    with RolloutWorker(model, config=CONFIG) as worker:

        def receive(source: object) -> SyncReport:
            return worker.receive_weights(source, verify=True)

        ways = [lambda: receive(tmp_path / "second"), lambda: receive(state), lambda: receive(second)]
        ways += [lambda: receive(WeightStream.of(second)), lambda: receive(WeightStream.of(state))]
        ways += [lambda: link.sync(receive, second)[1], lambda: link.sync(receive, state)[1]]
        for way in ways:
            report = way()
            assert report.changed_tensors == report.tensors == len(dict(second.named_parameters()))
            assert_same_weights(model, second)
            digests.add(report.digest)
            worker.receive_weights(tmp_path / "first")
            assert_same_weights(model, first)
        worker.load_state_dict(state)
        assert_same_weights(model, second)
    assert len(digests) == 1


def test_a_trainer_that_is_not_bound_sends_its_tower(link: Link) -> None:
    """Whoever computes gradients by Hugging Face's own forward has nothing bound."""
    theirs, same = stepped(make_wrapped("Qwen2")), stepped(trainer())
    ours = trainer()
    apply_weights(ours, WeightStream.of(theirs), verify=True)
    assert_same_weights(ours, same)
    ours = trainer()
    link.sync(lambda end: apply_weights(ours, end, verify=True), theirs)
    assert_same_weights(ours, same)
    text = text_model()
    link.sync(lambda end: apply_weights(text, end, verify=True), theirs)
    assert_same_text(text, same)


def test_a_delta_brings_a_step_on_the_tower(link: Link) -> None:
    ours, theirs = trainer(), stepped(trainer())
    for number in range(3):
        sent, received = link.sync(lambda end: apply_weights(ours, end, verify=True), theirs, delta=True)
        assert_same_weights(ours, theirs)
        assert sent.delta is (number > 0)
        assert sent.digest == received.digest
        assert received.changed == ((WEIGHT,) if number else tuple(dict(theirs.named_parameters())))
        step(theirs, WEIGHT)


@FAMILIES
@pytest.mark.parametrize("delta", [False, True])
def test_a_text_model_is_sent_no_tower(link: Link, family: str, delta: bool) -> None:
    """What a module sends to a text model over a link has no tensor of vision, and a step on the tower alone is no
    change of it."""
    ours, theirs = text_model(family), stepped(trainer(family))
    for number in range(3):
        sent, received = link.sync(lambda end: apply_weights(ours, end, verify=True), theirs, delta=delta)
        assert_same_text(ours, theirs)
        assert sent.delta is (delta and number > 0)
        assert sent.digest == received.digest
        assert sent.dense_bytes == num_bytes(of_text(theirs))
        assert sent.sent_bytes == (0 if sent.delta else sent.dense_bytes)
        step(theirs, WEIGHT)


def test_a_receiver_that_computes_images_comes_to_a_text_model(link: Link) -> None:
    """The next of two receivers needs what the base of a delta has not: all is sent, and then the tower is in it."""
    theirs, text, images = stepped(trainer()), text_model(), trainer()
    link.sync(lambda end: apply_weights(text, end), theirs, delta=True)
    apply_weights(images, of_text(theirs), partial=True)
    for number in range(2):
        sent, _ = link.sync(lambda end: apply_weights(images, end), theirs, delta=True)
        assert sent.delta is (number > 0)
        assert_same_weights(images, theirs)
        step(theirs, WEIGHT)


def test_one_receiver_of_a_broadcast_computes_images_and_one_does_not() -> None:
    theirs, models = stepped(trainer()), [trainer(), text_model()]
    store = listening_store("127.0.0.1")

    def receive(rank: int) -> None:
        group = gloo_group(connected_store("127.0.0.1", store.port), rank, 3, timeout=HANG)
        for _ in range(2):
            apply_weights(models[rank - 1], BroadcastReceiver(0, group, timeout=HANG), verify=True)

    with ThreadPoolExecutor(2) as threads:
        received = [threads.submit(receive, rank) for rank in (1, 2)]
        with BroadcastSender(gloo_group(store, 0, 3, timeout=HANG), timeout=HANG) as sender:
            sent = []
            for _ in range(2):
                step(theirs, WEIGHT)
                sent.append(sender.send(theirs, delta=True).sent_bytes)
        for one in received:
            one.result(HANG)
    assert sent == [num_bytes(theirs.state_dict())] * 2
    assert_same_weights(models[0], theirs)
    assert_same_text(models[1], theirs)


def test_a_stream_for_text_has_no_tower() -> None:
    ours, theirs = text_model(), stepped(trainer())
    stream = WeightStream.of(theirs, images=False)
    assert stream.specs.keys() == dict(theirs.named_parameters()).keys() & of_text(theirs).keys()
    assert stream.of_images == ()
    apply_weights(ours, stream, verify=True)
    assert_same_text(ours, theirs)


# -- what is refused -------------------------------------------------------------------------------


@FAMILIES
def test_an_update_without_the_tower_is_refused_unless_it_is_partial(link: Link, family: str) -> None:
    model, second = trainer(family), stepped(trainer(family))
    tower = [name for name in model.state_dict() if name.startswith(TOWER)]
    before = features(model)
    refused = rf"nothing was written; {len(tower)} missing of the vision tower, .*partial=True"
    with RolloutWorker(model, config=CONFIG) as worker:
        for source in (of_text(second), WeightStream.of(of_text(second))):
            with pytest.raises(WeightMismatchError, match=refused) as caught:
                worker.receive_weights(source)
            assert all(name in str(caught.value) for name in tower)
        assert_same_weights(model, trainer(family))
        worker.receive_weights(of_text(second), partial=True)
        assert torch.equal(features(model), before)
        stepped(second)
        link.sync(lambda end: worker.receive_weights(end, partial=True), of_text(second))
        assert torch.equal(features(model), before)
        assert_matches_trainer(second, worker.generate(SEQUENCES, FEW), [FEW] * len(SEQUENCES))


def test_some_of_the_tower_is_an_error_that_names_the_rest() -> None:
    model, state = trainer(), stepped(trainer()).state_dict()
    del state[WEIGHT]
    with pytest.raises(WeightMismatchError, match=rf"1 missing of the vision tower, [^;]*: {WEIGHT}$"):
        apply_weights(model, state)
    with pytest.raises(WeightMismatchError, match=r"1 missing: lm_head\.weight; 1 missing of the vision tower"):
        apply_weights(model, {name: tensor for name, tensor in state.items() if name != "lm_head.weight"})
    with pytest.raises(WeightMismatchError, match=r"nothing was written; \d+ missing of the vision tower"):
        apply_weights(model, text_model())
    assert_same_weights(model, trainer())


def test_a_tensor_of_vision_without_a_place_is_named() -> None:
    model = trainer()
    unknown = f"{TOWER}blocks.7.norm1.weight"
    with pytest.raises(WeightMismatchError, match=rf"1 unknown: {unknown}$"):
        apply_weights(model, {**model.state_dict(), unknown: torch.zeros(32)})
    apply_weights(text_model(), {**model.state_dict(), unknown: torch.zeros(32)})


# -- adapters --------------------------------------------------------------------------------------

ALL = LoraConfig(r=3, target_modules="all-linear")
THROUGH = SamplingParams(max_tokens=4, seed=5, ignore_eos=True, adapter="policy")


def adapted(*, tower: bool) -> PeftModel:
    """Return a trainer with an adapter on all linear layers, bound; with `tower`, one that changes the tower too."""
    model = get_peft_model(make_wrapped("Qwen2"), ALL)
    wake(model)
    for name, parameter in model.named_parameters():
        if not tower and TOWER in name and ".lora_B." in name:
            nn.init.zeros_(parameter)
    return bind(model)


def test_an_adapter_that_changes_the_tower_is_refused_by_name(tmp_path: Path) -> None:
    moving, still = adapted(tower=True), adapted(tower=False)
    moving.save_pretrained(tmp_path)
    tensors = get_peft_model_state_dict(moving)
    refused = r"the adapter 'policy' changes model\.visual\.blocks\.0\..*, which images go through"
    with RolloutWorker(trainer(), config=CONFIG) as worker:
        for source in (tensors, WeightStream.of(tensors), tmp_path):
            with pytest.raises(AdapterError, match=refused):
                worker.load_adapter("policy", source, config=ALL)
        assert "policy" not in worker.adapters
        config = LoraConfig(r=3, target_modules=["q_proj"])
        with pytest.raises(WeightMismatchError, match=r"\d+ unknown: .*visual"):
            worker.load_adapter("policy", tensors, config=config)
        without = {name: tensor for name, tensor in tensors.items() if TOWER not in name}
        for source in (get_peft_model_state_dict(still), without):
            worker.load_adapter("policy", source, config=ALL)
            assert_matches_trainer(still, worker.generate(SEQUENCES, THROUGH), [THROUGH] * len(SEQUENCES))
    with RolloutWorker(text_model(), config=CONFIG) as worker:
        worker.load_adapter("policy", tensors, config=ALL)


def test_a_model_with_adapters_in_its_tower_is_bound_for_text() -> None:
    model = adapted(tower=True)
    assert binding_of(model).images is None
    with pytest.raises(ValueError, match=r"^pixel_values, image_grid_thw: .*text alone, because visual\.blocks\.0\."):
        model(torch.tensor([[5, 6]]), pixel_values=PIXELS, image_grid_thw=GRID)


def test_an_adapter_that_comes_into_a_bound_tower_is_refused() -> None:
    model = get_peft_model(make_wrapped("Qwen2"), LoraConfig(r=3, target_modules=["q_proj"]))
    assert binding_of(bind(model)).images is not None
    model.add_adapter("more", LoraConfig(r=3, target_modules=["q_proj", "qkv"]))
    with pytest.raises(BindingError, match=r"visual\.blocks\.0\.attn\.qkv"):
        bind(model)
