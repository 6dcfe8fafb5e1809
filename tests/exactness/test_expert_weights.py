"""Models with routed experts come from folders, and are updated in every way: each token has the trainer's bits."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from samebit.kernels import BindingError, bind, token_logprobs
from samebit.rollout import RolloutConfig, RolloutWorker, SamplingParams
from samebit.rollout.errors import ModelLoadError
from samebit.weight_sync import (
    BroadcastReceiver,
    BroadcastSender,
    SharedMemoryReceiver,
    SharedMemorySender,
    WeightMismatchError,
    WeightStream,
    connected_store,
    gloo_group,
    listening_store,
)

from ..patience import HANG
from ..weight_sync.expert_models import differing
from .families import make_model, token_ids

FEW = SamplingParams(max_tokens=7, seed=5, ignore_eos=True)
PROMPTS = token_ids(40, 3)
IN_PARTS = {"Qwen3Moe": torch.bfloat16, "Glm4MoeLite": torch.bfloat16, "NemotronH, experts": torch.float32}
"""Lists families whose checkpoints hold each expert apart; the second and the third have correction biases."""


def halved(model: PreTrainedModel) -> PreTrainedModel:
    """Return a trainer after a step, with other weights and other correction biases."""
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.mul_(0.5)
    return model


def check(worker: RolloutWorker, model: PreTrainedModel) -> None:
    """Check that every sampled token has the trainer's log-probability, bit for bit."""
    for output in worker.generate(PROMPTS, FEW):
        (sample,) = output.samples
        ids = torch.tensor([output.prompt_token_ids + sample.token_ids])
        assert torch.equal(torch.tensor(sample.logprobs), token_logprobs(model, ids)[0, -7:])


@pytest.mark.parametrize("family", IN_PARTS)
def test_from_a_folder_and_by_every_way_of_an_update(family: str, tmp_path: Path) -> None:
    model = bind(make_model(family, IN_PARTS[family]))
    model.save_pretrained(tmp_path / "first")
    stored = load_file(tmp_path / "first" / "model.safetensors")
    assert any(".experts.14." in name for name in stored)
    config = RolloutConfig(enable_prefix_caching=True, block_size=64)
    with RolloutWorker(tmp_path / "first", config=config) as worker:
        state = model.state_dict()
        assert {name: tensor.dtype for name, tensor in worker.module.state_dict().items()} == {
            name: tensor.dtype for name, tensor in state.items()
        }
        check(worker, model)
        halved(model).save_pretrained(tmp_path / "second")
        parts = load_file(tmp_path / "second" / "model.safetensors")
        for source in (tmp_path / "second", model.state_dict(), WeightStream.of(parts), parts, model):
            report = worker.receive_weights(source, verify=True)
            assert report.changed_tensors == len(worker._weights.manifest.ties)
            check(worker, model)
            worker.receive_weights(tmp_path / "first")
        with SharedMemorySender() as sender, SharedMemoryReceiver(sender.address) as receiver:
            for step in range(2):
                weights = halved(model) if step else model
                sending = threading.Thread(target=sender.send, args=(weights,), kwargs={"delta": True})
                sending.start()
                worker.receive_weights(receiver)
                sending.join()
                check(worker, model)


def test_by_broadcast_from_a_trainer_in_float32() -> None:
    """Parameters of a trainer in float32 are cast for their way, whole and as differences; the biases that changed are
    not.
    """
    trainer, (reference, served) = make_model("Glm4Moe"), (make_model("Glm4Moe", torch.bfloat16) for _ in range(2))
    for parameter in (*reference.parameters(), *served.parameters()):
        parameter.data = parameter.data.bfloat16()  # routers too: there are no differences of what is widened
    bind(reference)
    store = listening_store("127.0.0.1")
    with ThreadPoolExecutor(1) as other, RolloutWorker(served) as worker:
        joining = other.submit(gloo_group, connected_store("127.0.0.1", store.port), 1, 2, timeout=HANG)
        with BroadcastSender(gloo_group(store, 0, 2, timeout=HANG), bucket_bytes=1 << 16, timeout=HANG) as sender:
            link = BroadcastReceiver(0, joining.result(), timeout=HANG)
            for step in range(2):
                reference.load_state_dict(halved(trainer).state_dict())
                sending = other.submit(sender.send, trainer, dtype=torch.bfloat16, delta=True)
                report = worker.receive_weights(link, verify=True)
                assert sending.result().delta == bool(step)
                assert any(name.endswith("e_score_correction_bias") for name in report.changed or ())
                assert differing(worker.module, reference) == []
                check(worker, reference)


def test_a_folder_that_lacks_a_piece_of_an_expert(tmp_path: Path) -> None:
    """A folder that lacks a piece of an expert is refused by the piece's name. transformers would take experts 0, 1, 3,
    4 for four in a row, or say that some shape does not fit.
    """
    make_model("Qwen3Moe").save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    stored = load_file(path)
    gone = stored.pop("model.layers.2.mlp.experts.3.up_proj.weight")
    save_file(stored, path, metadata={"format": "pt"})
    says = r"can not be loaded: .*1 missing: model\.layers\.2\.mlp\.experts\.3\.up_proj\.weight$"
    with pytest.raises(ModelLoadError, match=says):
        RolloutWorker(tmp_path)
    stored["model.layers.2.mlp.experts.15.up_proj.weight"] = gone
    save_file(stored, path, metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"1 unknown: model\.layers\.2\.mlp\.experts\.15\.up_proj\.weight"):
        RolloutWorker(tmp_path)


def test_a_correction_bias_that_was_rounded_is_refused_everywhere() -> None:
    rounded = make_model("Glm4Moe").to(torch.bfloat16)
    with pytest.raises(BindingError, match=r"e_score_correction_bias is torch\.bfloat16; exact is torch\.float32"):
        bind(rounded)
    with RolloutWorker(make_model("Glm4Moe", torch.bfloat16)) as worker:
        for source in (rounded, rounded.state_dict(), WeightStream.of(rounded)):
            with pytest.raises(WeightMismatchError, match="1 of another dtype, and a buffer, which is never cast"):
                worker.receive_weights(source, cast=True)
        worker.generate(PROMPTS, FEW)


@pytest.mark.parametrize("family", ["Glm4Moe", "DeepseekV3", "NemotronH, experts"])
def test_routers_that_their_class_keeps_in_float32(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker has what `from_pretrained` gives a trainer, and takes what a trainer has that was moved to bfloat16.

    Classes ask for their routers' weights in float32 since transformers 5.24.
    """
    moved = make_model(family, torch.bfloat16)
    monkeypatch.setattr(type(moved), "_keep_in_fp32_modules_strict", ["e_score_correction_bias", "gate.weight"])
    make_model(family).save_pretrained(tmp_path)
    trainer = bind(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16))
    routers = [name for name, _ in trainer.named_parameters() if name.endswith("gate.weight")]
    assert {trainer.get_parameter(name).dtype for name in routers} == {torch.float32}
    for source in (tmp_path, trainer):
        with RolloutWorker(source, config=RolloutConfig(dtype="bfloat16")) as worker:
            assert differing(worker.module, trainer) == []
            check(worker, trainer)
    for name in routers:
        moved.get_parameter(name).data = moved.get_parameter(name).data.bfloat16()
    with RolloutWorker(tmp_path, config=RolloutConfig(dtype="bfloat16")) as worker:
        assert worker.receive_weights(moved).casts == tuple(f"{name}: bfloat16 -> float32" for name in routers)
        check(worker, bind(moved))


@pytest.mark.parametrize("family", ["Glm4Moe", "NemotronH, experts"])
def test_correction_biases_that_were_published_in_bfloat16_are_widened(family: str, tmp_path: Path) -> None:
    """Correction biases that were published in bfloat16 are widened, which keeps every value, as transformers does for
    a trainer.
    """
    make_model(family).to(torch.bfloat16).save_pretrained(tmp_path)
    trainer = bind(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16))
    widened = sorted(name for name, tensor in trainer.state_dict().items() if tensor.dtype == torch.float32)
    assert any(name.endswith("e_score_correction_bias") for name in widened)
    with RolloutWorker(tmp_path) as worker:
        assert differing(worker.module, trainer) == []
        check(worker, trainer)
        worker.receive_weights(halved(trainer))
        trainer = bind(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16))
        casts = worker.receive_weights(tmp_path).casts
        assert sorted(casts) == [f"{name}: bfloat16 -> float32" for name in widened]
        check(worker, trainer)
