"""A worker that loads a folder or a name as the whole model computes images with the trainer's bits, whatever way its
weights come."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel

from samebit.kernels import bind, image_features, token_logprobs
from samebit.rollout import PromptWithImages, RolloutConfig, RolloutWorker, SamplingParams
from samebit.rollout.audit import audit
from samebit.rollout.cli import main
from samebit.rollout.errors import ModelLoadError, RequestError
from samebit.rollout.runner.images import features
from samebit.weight_sync import SharedMemoryReceiver, SharedMemorySender, WeightMismatchError, WeightStream

from .compare import assert_matches_trainer
from .families import CAMPAIGN, DTYPES, make_model, make_wrapped, paired, token_ids
from .images import TOWERS, WithImages, joined, make_model_with_images, with_images
from .lora import wake

WHOLE = RolloutConfig(block_size=64, images=True)
GIVEN = (with_images([(4, 6)], 1), with_images([(8, 14), (2, 12)], 4, text=0, ends=30))
PROMPTS = [PromptWithImages(one.token_ids, one.pixel_values, one.image_grid_thw) for one in GIVEN]
SEQUENCES = token_ids(40, 3)
FEW = SamplingParams(n=2, max_tokens=6, seed=5, ignore_eos=True)
TOWERS_WEIGHT = "model.visual.blocks.0.attn.qkv.weight"


def check(worker: RolloutWorker, trainer: nn.Module) -> None:
    """Check what a worker reports of prompts with and without images, in one call, against the trainer."""
    outputs = worker.generate([*PROMPTS, *SEQUENCES], FEW)
    for one, output in zip(GIVEN, outputs, strict=False):
        for sample in output.samples:
            scores = scored(trainer, one, sample.token_ids)
            assert torch.equal(torch.tensor(sample.logprobs), scores)
    assert_matches_trainer(trainer, outputs[len(GIVEN) :], [FEW] * len(SEQUENCES))


def scored(trainer: nn.Module, one: WithImages, new: Sequence[int]) -> torch.Tensor:
    """Return the trainer's log-probabilities of the tokens behind a prompt."""
    kinds = torch.tensor([[*one.kinds, *[0] * len(new)]])
    with torch.no_grad():
        scores = token_logprobs(
            trainer, torch.tensor([[*one.token_ids, *new]]), mm_token_type_ids=kinds, **joined([one])
        )
    return scores[0][len(one.token_ids) - 1 :]


@torch.no_grad()
def halved(trainer: PreTrainedModel) -> PreTrainedModel:
    """Return a trainer after a step."""
    for parameter in trainer.parameters():
        parameter.mul_(0.5)
    return trainer


def saved(name: str, folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Write a model, and return it bound, as that of a trainer."""
    trainer = make_model_with_images(name, dtype)
    trainer.save_pretrained(folder)
    return bind(trainer)


@pytest.mark.parametrize(("name", "dtype"), paired(tuple(TOWERS), DTYPES))
def test_a_folder_and_every_way_of_an_update(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    folder, second = tmp_path / "first", tmp_path / "second"
    trainer = saved(name, folder, dtype)
    with RolloutWorker(folder, config=WHOLE) as worker:
        assert type(worker.module) is type(trainer)
        assert {parameter.dtype for parameter in worker.module.parameters()} == {dtype}
        check(worker, trainer)
        halved(trainer).save_pretrained(second)
        state = trainer.state_dict()
        for source in (second, state, trainer, WeightStream.of(trainer), WeightStream.of(state)):
            report = worker.receive_weights(source, verify=True)
            assert TOWERS_WEIGHT in report.changed
            assert report.changed_tensors == len(worker._weights.manifest.ties)
            check(worker, trainer)
            worker.receive_weights(folder)
        with SharedMemorySender() as sender, SharedMemoryReceiver(sender.address) as receiver:
            for weights in (trainer, state):
                worker.receive_weights(folder)
                sending = threading.Thread(target=sender.send, args=(weights,))
                sending.start()
                worker.receive_weights(receiver)
                sending.join()
                check(worker, trainer)


def test_changes_alone_travel(tmp_path: Path) -> None:
    """A step on the tower alone is sent as what has changed, and is there."""
    trainer = saved("Qwen2", tmp_path)
    weight = trainer.get_parameter(TOWERS_WEIGHT)
    with (
        RolloutWorker(tmp_path, config=WHOLE) as worker,
        SharedMemorySender() as sender,
        SharedMemoryReceiver(sender.address) as receiver,
        ThreadPoolExecutor(1) as thread,
    ):
        for _ in range(2):
            with torch.no_grad():
                weight[:3] *= -1
            sending = thread.submit(sender.send, trainer, delta=True)
            report = worker.receive_weights(receiver, verify=True)
            assert report.changed == (TOWERS_WEIGHT,)
            check(worker, trainer)
        assert sending.result().delta


def test_sleep_keeps_the_tower_or_waits_for_it(tmp_path: Path) -> None:
    trainer = saved("Qwen2", tmp_path)
    with RolloutWorker(tmp_path, config=WHOLE) as worker:
        worker.sleep(("weights",))
        worker.wake_up()
        check(worker, trainer)
        worker.sleep(("weights",), level=2)
        worker.wake_up()
        text = {name: tensor for name, tensor in trainer.state_dict().items() if ".visual." not in name}
        with pytest.raises(WeightMismatchError, match=r"missing of the vision tower.*model\.visual\.blocks\.0"):
            worker.receive_weights(text)
        worker.receive_weights(tmp_path)
        check(worker, trainer)


def rewritten(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    """Write a folder's tensors as `change` makes them of those that are there."""
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path, metadata={"format": "pt"})


@pytest.mark.parametrize(("name", "tied"), [("Qwen2", True), ("Qwen2", False), ("Qwen3", True)])
def test_a_folder_as_published(name: str, tied: bool, tmp_path: Path) -> None:
    """Published folders of Qwen2.5-VL have a flat config and names from before transformers 4.52, those of Qwen3-VL
    neither; whether the head is tied, and which tokens end a text, the whole says. Dropout is for those that train."""
    older = name == "Qwen2"
    model = make_wrapped(name, tied=tied, around={"vision_config": TOWERS[name], "image_token_id": 64})
    model.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text("{}")
    config = json.loads((tmp_path / "config.json").read_text())
    config["eos_token_id"] = [2, 5]
    del config["text_config"]["tie_word_embeddings"]
    config["text_config"]["attention_dropout"] = 0.1
    (tmp_path / "config.json").write_text(json.dumps(flat(config) if older else config))
    rewritten(tmp_path, lambda _: named(model.state_dict(), older=older, tied=tied))
    expected = type(model).from_pretrained(tmp_path)
    with RolloutWorker(tmp_path, config=WHOLE) as worker:
        assert_same_weights(worker.module, expected)
        assert (worker.module.lm_head.weight is worker.module.model.language_model.embed_tokens.weight) is tied
        assert worker.eos_token_ids == (2, 5)
        assert worker.receive_weights(tmp_path, verify=True).changed == ()


def flat(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config with the text model's keys beside those of the whole."""
    text = config["text_config"]
    rope = text.pop("rope_parameters")
    turned = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    own = {key: value for key, value in config.items() if key != "text_config"}
    return {**text, **own, "rope_theta": rope["rope_theta"], "rope_scaling": turned}


def named(state: dict[str, torch.Tensor], *, older: bool, tied: bool) -> dict[str, torch.Tensor]:
    """Return a module's tensors as a folder has them, by their own names or older ones."""
    tensors = {name: tensor.clone() for name, tensor in state.items() if not (tied and name == "lm_head.weight")}
    if not older:
        return tensors
    return {
        name.replace("model.visual.", "visual.").replace(".language_model.", "."): one for name, one in tensors.items()
    }


def assert_same_weights(ours: nn.Module, theirs: nn.Module) -> None:
    other = theirs.state_dict()
    assert [name for name, tensor in ours.state_dict().items() if not torch.equal(tensor, other[name])] == []


def test_experts_with_inputs_before_outputs(tmp_path: Path) -> None:
    """The experts of a published Qwen3-VL have inputs before outputs."""
    trainer = saved("Qwen3Moe", tmp_path)
    rewritten(
        tmp_path,
        lambda stored: {
            name: tensor.mT.contiguous() if ".experts." in name else tensor for name, tensor in stored.items()
        },
    )
    with RolloutWorker(tmp_path, config=WHOLE) as worker:
        assert_same_weights(worker.module, trainer)
        check(worker, trainer)


def test_what_a_folder_lacks_of_the_tower_or_has_beside_it_is_named(tmp_path: Path) -> None:
    saved("Qwen2", tmp_path)
    extra = "model.visual.blocks.9.attn.qkv.weight"

    def changed(stored: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        kept = {name: one for name, one in stored.items() if not TOWERS_WEIGHT.endswith(name)}
        assert len(kept) == len(stored) - 1
        return {**kept, extra: torch.ones(3)}

    rewritten(tmp_path, changed)
    with pytest.raises(ModelLoadError, match=rf"1 unknown: {re.escape(extra)}; 1 missing: {re.escape(TOWERS_WEIGHT)}"):
        RolloutWorker(tmp_path, config=WHOLE)
    with RolloutWorker(tmp_path) as worker, pytest.raises(RequestError, match=r"RolloutConfig\(images=True\)"):
        worker.generate([PROMPTS[0]])


@pytest.mark.parametrize(
    ("name", "says"),
    [("Gemma3", "holds a Gemma3ForConditionalGeneration, which"), ("Qwen2 text", "holds a qwen2, which")],
)
def test_a_folder_without_images_is_refused(name: str, says: str, tmp_path: Path) -> None:
    model = make_model("Qwen2") if name == "Qwen2 text" else make_wrapped(name)
    model.save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match=rf"images=True, and .* {says}.*Qwen2_5_VLForConditionalGeneration"):
        RolloutWorker(tmp_path, config=WHOLE)


def test_what_computes_text_alone_is_refused(tmp_path: Path) -> None:
    trainer = saved("Qwen2", tmp_path)
    with RolloutWorker(trainer, config=WHOLE) as worker:
        check(worker, trainer)
    with pytest.raises(ModelLoadError, match="images=True, and this Qwen2ForCausalLM computes text alone"):
        RolloutWorker(make_model("Qwen2"), config=WHOLE)
    with pytest.raises(ModelLoadError, match="computes text alone with exact=False"):
        RolloutWorker(tmp_path, config=RolloutConfig(images=True, exact=False))
    with pytest.raises(ValueError, match="images=True needs device='cpu', got 'cuda'"):
        RolloutConfig(images=True, device="cuda")
    with pytest.raises(ValueError, match="images must be True or False, got 1"):
        RolloutConfig(images=1)  # type: ignore[arg-type]


def test_a_folder_guesses_for_a_whole_as_its_text_model(tmp_path: Path) -> None:
    trainer = saved("Qwen2", tmp_path)
    config = RolloutConfig(block_size=64, images=True, num_speculative_tokens=3, draft_model=str(tmp_path))
    with RolloutWorker(tmp_path, config=config) as worker:
        check(worker, trainer)
        assert worker.stats()["draft_tokens"] > 0


def test_a_folder_of_an_adapter_loads_its_whole_model(tmp_path: Path) -> None:
    model = make_model_with_images("Qwen2")
    model.save_pretrained(tmp_path / "base")
    model.name_or_path = str(tmp_path / "base")
    trainer = get_peft_model(model, LoraConfig(r=4, target_modules=r".*language_model.*\.(q_proj|down_proj)"))
    wake(trainer)
    trainer.save_pretrained(tmp_path / "adapter")
    bind(trainer)
    with RolloutWorker(tmp_path / "adapter", config=WHOLE) as worker:
        check(worker, trainer)


def without_other_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a check have no rows but those of images and the first two."""
    for part in ("schedules", "temperatures", "prefix_cache", "layouts", "routing", "weights"):
        monkeypatch.setattr(audit._Check, part, lambda self: iter(()))


@pytest.mark.parametrize("name", tuple(TOWERS) if CAMPAIGN else ("Qwen2", "Qwen3_5Moe"))
def test_a_check_of_a_whole_model(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A check with images compares features and prompts with images. Under `make soak` all other rows pass too."""
    if not CAMPAIGN:
        without_other_rows(monkeypatch)
    make_model_with_images(name).save_pretrained(tmp_path)
    assert main(["check", str(tmp_path), "--tokens", "4", "--images", "--json"]) == 0, capsys.readouterr().out
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    found = [rows[one] for one in rows if one.startswith("images: ")]
    assert len(found) == 8
    assert all(row["tokens"] for row in found[1:])
    if not name.endswith("Moe"):  # transformers' grouped products take no odd widths
        assert 0 < found[0]["max_abs_diff"] < 1e-4, "beside transformers' own forward"


def test_a_check_finds_features_that_are_not_the_trainers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_model_with_images("Qwen2").save_pretrained(tmp_path)
    without_other_rows(monkeypatch)
    monkeypatch.setattr(features, "image_features", lambda *given: image_features(*given) * 1.01)
    rows = audit.check_model(tmp_path, new_tokens=4, images=True)
    wrong = [row.name for row in rows if row.promised and row.differing]
    assert wrong == [
        "images: many requests at once, whole prefill",
        "images: one request at a time",
        "images: chunked prefill, 7 tokens a step",
        "images: prefix cache, cold and warm",
        "images: trainer: left padded",
    ]


def test_a_check_with_images_of_a_text_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_model("Qwen2").save_pretrained(tmp_path)
    assert main(["check", str(tmp_path), "--images"]) == 2
    assert "holds a qwen2, which computes text alone" in capsys.readouterr().err
