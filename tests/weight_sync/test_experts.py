"""Routed experts that folders hold apart are written into the tensors that hold them together."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.core_model_loading import Concatenate, MergeModulelist, Transpose, WeightConverter

from samebit.weight_sync import (
    Manifest,
    NonFiniteWeightError,
    SharedMemoryReceiver,
    SharedMemorySender,
    SyncRefusedError,
    SyncReport,
    TensorSpec,
    WeightMismatchError,
    WeightSourceError,
    WeightStream,
    apply_weights,
    folder_names,
)
from samebit.weight_sync.folder_names import FolderNames

from .expert_models import EXPERT_MODELS, IN_PARTS, differing, expert_model, values

BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


def saved(family: str, folder: Path, **options: object) -> dict[str, Tensor]:
    """Save a model as Hugging Face does; return what its files hold."""
    expert_model(family, seed=1).save_pretrained(folder, **options)
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def in_one_piece(tensors: dict[str, Tensor]) -> WeightStream:
    specs = {name: TensorSpec.of(name, tensor) for name, tensor in tensors.items()}
    return WeightStream(specs, iter(list(tensors.items())[::-1]))


def write(folder: Path, tensors: dict[str, Tensor]) -> None:
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("family", EXPERT_MODELS)
def test_save_pretrained_and_back(family: str, tmp_path: Path) -> None:
    """What transformers saved comes back bit for bit: from a sharded folder, a dict and an iterator of its names, and
    under the module's own names.
    """
    donor = expert_model(family, seed=1)
    stored = saved(family, tmp_path, max_shard_size="6KB")
    assert any(".experts.4." in name for name in stored) == (family in IN_PARTS)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    for number, source in enumerate((tmp_path, stored, in_one_piece(stored), values(donor), donor), 2):
        model = expert_model(family, seed=number)
        pointers = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
        report = apply_weights(model, source, verify=True)
        assert differing(model, donor) == []
        assert {name: tensor.data_ptr() for name, tensor in model.state_dict().items()} == pointers
        assert set(report.changed or ()) == set(pointers)
        assert report.bytes == report.dense_bytes == sum(tensor.nbytes for tensor in stored.values())


@pytest.mark.parametrize("family", ["Qwen3Moe", "Mixtral"])
def test_a_matrix_is_written_into_its_slice(family: str) -> None:
    """A matrix of one expert, as a part of an update, changes its own slice and nothing else."""
    names = {
        "Qwen3Moe": ("mlp", "gate_proj", "up_proj", "down_proj"),
        "Mixtral": ("block_sparse_moe", "w1", "w3", "w2"),
    }
    block, gate, up, down = names[family]
    model = expert_model(family)
    expected = values(model)
    rows = expected["model.layers.1.mlp.experts.gate_up_proj"].shape[1] // 2
    for name, live, index in (
        (gate, "gate_up_proj", (3, slice(0, rows))),
        (up, "gate_up_proj", (2, slice(rows, 2 * rows))),
        (down, "down_proj", (4,)),
    ):
        target = expected[f"model.layers.1.mlp.experts.{live}"]
        piece = torch.randn_like(target[index])
        target[index] = piece
        offered = {f"model.layers.1.{block}.experts.{index[0]}.{name}.weight": piece}
        report = apply_weights(model, offered, partial=True)
        assert report.changed == (f"model.layers.1.mlp.experts.{live}",)
        assert [name for name, tensor in model.state_dict().items() if not torch.equal(tensor, expected[name])] == []


def broken(change: Callable[[dict[str, Tensor]], None], family: str = "Qwen3Moe") -> dict[str, Tensor]:
    """Return the tensors of a folder after a change."""
    from transformers.core_model_loading import revert_weight_conversion

    model = expert_model(family, seed=1)
    tensors = {name: tensor.clone() for name, tensor in revert_weight_conversion(model, model.state_dict()).items()}
    change(tensors)
    return tensors


def renumbered(tensors: dict[str, Tensor]) -> None:
    """Number the last expert past the end: the count is right, the places are not."""
    for part in ("gate", "up", "down"):
        prefix = "model.layers.1.mlp.experts."
        tensors[f"{prefix}9.{part}_proj.weight"] = tensors.pop(f"{prefix}4.{part}_proj.weight")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda tensors: tensors.pop("model.layers.1.mlp.experts.3.up_proj.weight"),
            r"1 missing: model\.layers\.1\.mlp\.experts\.3\.up_proj\.weight$",
        ),
        (
            lambda tensors: [tensors.pop(f"model.layers.1.mlp.experts.{n}.up_proj.weight") for n in range(5)],
            r"5 missing: model\.layers\.1\.mlp\.experts\.0\.up_proj\.weight, .*experts\.4\.up_proj\.weight$",
        ),
        (
            lambda tensors: [
                tensors.pop(f"model.layers.1.mlp.experts.{n}.{part}_proj.weight")
                for n in range(5)
                for part in ("gate", "up")
            ],
            r"1 missing: model\.layers\.1\.mlp\.experts\.gate_up_proj$",
        ),
        (renumbered, r"3 unknown: .*experts\.9\.gate_proj\.weight.*3 missing: .*experts\.4\.gate_proj\.weight"),
        (
            lambda tensors: tensors.update(
                {"model.layers.1.mlp.experts.03.up_proj.weight": torch.zeros(11, 18, dtype=torch.bfloat16)}
            ),
            r"1 given twice: .*experts\.0?3\.up_proj\.weight and .*experts\.0?3\.up_proj\.weight are both "
            r"model\.layers\.1\.mlp\.experts\.gate_up_proj$",
        ),
        (
            lambda tensors: tensors.update(
                {"model.layers.1.mlp.experts.down_proj": torch.zeros(5, 18, 11, dtype=torch.bfloat16)}
            ),
            r"1 given twice: .*experts\.\d\.down_proj\.weight and .* are both model\.layers\.1\.mlp\.experts\.d",
        ),
        (
            lambda tensors: tensors.update(
                {"model.layers.1.mlp.experts.2.gate_proj.weight": torch.zeros(12, 18, dtype=torch.bfloat16)}
            ),
            r"1 misshapen: .*experts\.2\.gate_proj\.weight: offered \[12, 18\] bfloat16, the model has \[11, 18\] bf",
        ),
        (
            lambda tensors: tensors.update({"model.layers.1.mlp.experts.2.gate_proj.weight": torch.zeros(11, 18)}),
            r"1 of another dtype .*experts\.2\.gate_proj\.weight: offered \[11, 18\] float32",
        ),
        (
            lambda tensors: tensors.update(
                {f"model.layers.1.mlp.experts.{'9' * 5000}.up_proj.weight": torch.zeros(11, 18)}
            ),
            "1 unknown: ",
        ),
    ],
    ids=["one", "all up", "all of a tensor", "renumbered", "twice", "whole too", "shape", "dtype", "huge number"],
)
@pytest.mark.parametrize("kind", ["dict", "stream", "folder"])
def test_a_piece_that_is_missing_or_doubled_is_named(
    kind: str, change: Callable[[dict[str, Tensor]], None], says: str, tmp_path: Path
) -> None:
    model = expert_model("Qwen3Moe")
    before = values(model)
    tensors = broken(change)
    source: object = {"dict": tensors, "stream": in_one_piece(tensors), "folder": tmp_path}[kind]
    write(tmp_path, tensors)
    with pytest.raises(WeightMismatchError, match=says):
        apply_weights(model, source)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_parts_of_a_tensor_that_came_whole_before_them() -> None:
    whole = {"model.layers.1.mlp.experts.down_proj": torch.zeros(5, 18, 11, dtype=torch.bfloat16)}
    with pytest.raises(WeightMismatchError, match=r"5 given twice: .*experts\.down_proj and .*experts\.0\.down_proj"):
        apply_weights(expert_model("Qwen3Moe"), whole | broken(lambda tensors: None))


def test_a_missing_piece_is_named_as_its_file_names_it() -> None:
    missing = "model.layers.0.block_sparse_moe.experts.2.w3.weight"
    tensors = broken(lambda tensors: tensors.pop(missing), "Mixtral")
    with pytest.raises(WeightMismatchError, match=f"1 missing: {re.escape(missing)}$"):
        apply_weights(expert_model("Mixtral"), tensors)


@pytest.mark.parametrize(
    "operations",
    [
        [MergeModulelist(dim=1)],
        [MergeModulelist(dim=0), Concatenate(dim=2)],
        [MergeModulelist(dim=0), Transpose(1, 2)],
        [MergeModulelist(dim=0), Concatenate(dim=1), Concatenate(dim=1)],
    ],
    ids=["stacked elsewhere", "side by side", "turned over", "twice"],
)
def test_tensors_that_are_put_together_in_another_way_have_no_parts(
    operations: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    rule = WeightConverter(["experts.*.w1.weight", "experts.*.w3.weight"], "experts.gate_up_proj", operations)
    monkeypatch.setattr(folder_names, "get_model_conversion_mapping", lambda module: [rule])
    assert FolderNames.of(expert_model("Qwen3Moe")).fusions == ()


def test_infinities_are_named_by_the_expert() -> None:
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    tensors = broken(lambda tensors: tensors[name].fill_(float("inf")))
    with pytest.raises(NonFiniteWeightError, match=re.escape(name)):
        apply_weights(expert_model("Qwen3Moe"), tensors)


def test_layers_that_only_a_draft_model_has_are_passed_over(tmp_path: Path) -> None:
    """Tensors of a draft model's layers (GLM-4.5 and DeepSeek-V3 ship one more layer) are passed over where the class
    says that it has no use for them.
    """
    names = ("model.layers.46.eh_proj.weight", "model.layers.46.mlp.experts.0.up_proj.weight")
    extra = {name: torch.zeros(3) for name in names}
    donor = expert_model("Glm4Moe", seed=1)
    write(tmp_path, saved("Glm4Moe", tmp_path) | extra)
    model = expert_model("Glm4Moe")
    apply_weights(model, tmp_path)
    assert differing(model, donor) == []
    with pytest.raises(WeightMismatchError, match=r"1 unknown: model\.layers\.45\.eh_proj"):
        apply_weights(model, saved("Glm4Moe", tmp_path) | {"model.layers.45.eh_proj.weight": torch.zeros(3)})


# -- links -----------------------------------------------------------------------------------------


def sent(sources: list[object], model: torch.nn.Module, *, cast: bool = False, **options: object) -> list[SyncReport]:
    """Send each source in turn over shared memory; return the receiver's reports."""
    refused: list[SyncRefusedError] = []

    def send() -> None:
        try:
            for source in sources:
                sender.send(source, **options)
        except SyncRefusedError as error:
            refused.append(error)

    with SharedMemorySender(bucket_bytes=4096) as sender, SharedMemoryReceiver(sender.address) as receiver:
        sending = threading.Thread(target=send)
        sending.start()
        try:
            reports = [apply_weights(model, receiver, cast=cast, verify=True) for _ in sources]
        finally:
            sending.join()
    assert not refused
    return reports


@pytest.mark.parametrize("family", ["Qwen3Moe", "Mixtral", "NemotronH", "GptOss"])
def test_over_shared_memory(family: str, tmp_path: Path) -> None:
    """Weights travel under the module's names, under the folder's names, and as differences of both."""
    donor = expert_model(family, seed=1)
    stored = saved(family, tmp_path)
    model = expert_model(family)
    reports = sent([donor, stored], model)
    assert differing(model, donor) == []
    assert (len(reports[0].changed or ()), reports[1].changed) == (len(donor.state_dict()), ())
    name = next(name for name in stored if "expert" in name and "shared" not in name)
    stored = {name: tensor.clone() for name, tensor in stored.items()}
    stored[name].view(-1)[1] = 7
    again = expert_model(family)
    apply_weights(again, {**stored})
    for sources in ([donor, again], [saved(family, tmp_path), stored]):
        whole, delta = sent(list(sources), expert_model(family), delta=True)
        assert len(delta.changed or ()) == 1
        assert delta.sent_bytes < whole.sent_bytes / 50


# -- dtypes ----------------------------------------------------------------------------------------


def test_a_correction_bias_is_sent_as_the_forward_uses_it() -> None:
    """A trainer with float32 weights sends what its bfloat16 forward computes with, and leaves the bias alone."""
    trainer, model = expert_model("Glm4Moe", torch.float32, seed=1), expert_model("Glm4Moe")
    assert model.state_dict()[BIAS].dtype == torch.float32
    (report,) = sent([trainer], model, dtype=torch.bfloat16)
    assert torch.equal(model.state_dict()[BIAS], trainer.state_dict()[BIAS])
    assert not torch.equal(trainer.state_dict()[BIAS], trainer.state_dict()[BIAS].bfloat16().float())
    name = "model.layers.1.mlp.experts.down_proj"
    assert torch.equal(model.state_dict()[name], trainer.state_dict()[name].bfloat16())
    assert [cast for cast in report.casts if "bias" in cast and "e_score" in cast] == []
    stream = WeightStream.of(trainer, dtype=torch.bfloat16)
    with torch.no_grad():
        trainer.state_dict()[BIAS].add_(0.1)
    apply_weights(model, stream)
    assert torch.equal(model.state_dict()[BIAS], trainer.state_dict()[BIAS])


@pytest.mark.parametrize("kind", ["dict", "stream", "link"])
def test_a_correction_bias_that_was_rounded_is_refused(kind: str) -> None:
    """A rounded correction bias is refused even where casts are allowed: its values are not those that the trainer
    routes by.
    """
    rounded = {name: tensor.bfloat16() for name, tensor in values(expert_model("Glm4Moe", seed=1)).items()}
    model = expert_model("Glm4Moe")
    says = r"1 of another dtype, and a buffer, which is never cast .*e_score_correction_bias: offered \[6\] bfloat16"
    of_kind: dict[str, Callable[[], object]] = {
        "dict": lambda: apply_weights(model, rounded, cast=True),
        "stream": lambda: apply_weights(model, in_one_piece(rounded), cast=True),
        "link": lambda: sent([rounded], model, cast=True),
    }
    with pytest.raises(WeightMismatchError, match=says):
        of_kind[kind]()


def test_a_correction_bias_in_a_folder_may_be_narrower_and_not_wider(tmp_path: Path) -> None:
    stored = saved("Glm4Moe", tmp_path)
    write(tmp_path, stored | {BIAS: stored[BIAS].bfloat16()})
    model = expert_model("Glm4Moe")
    assert apply_weights(model, tmp_path).casts == (f"{BIAS}: bfloat16 -> float32",)
    assert torch.equal(model.state_dict()[BIAS], stored[BIAS].bfloat16().float())
    write(tmp_path, stored | {BIAS: stored[BIAS].double()})
    with pytest.raises(WeightMismatchError, match=r"a buffer, which is never cast .*offered \[6\] float64"):
        apply_weights(model, tmp_path, cast=True)


@pytest.mark.parametrize("kind", ["module", "dict", "stream", "link", "folder"])
def test_a_router_that_its_class_keeps_in_float32_may_come_narrower_and_goes_nowhere_rounded(
    kind: str, tmp_path: Path
) -> None:
    """Since transformers 5.24 classes ask for weights of routers in float32; a trainer in bfloat16 widens its own."""
    trainer, model = expert_model("Glm4Moe", seed=1), expert_model("Glm4Moe")
    model._keep_in_fp32_modules_strict = {"e_score_correction_bias", "gate.weight"}
    name = "model.layers.1.mlp.gate.weight"
    model.get_parameter(name).data = model.get_parameter(name).data.float() + 1e-5
    saved("Glm4Moe", tmp_path)
    of_kind: dict[str, Callable[[], SyncReport]] = {
        "module": lambda: apply_weights(model, trainer),
        "dict": lambda: apply_weights(model, values(trainer)),
        "stream": lambda: apply_weights(model, in_one_piece(values(trainer))),
        "link": lambda: sent([trainer], model)[0],
        "folder": lambda: apply_weights(model, tmp_path),
    }
    assert of_kind[kind]().casts == (f"{name}: bfloat16 -> float32",)
    assert differing(model, trainer) == [name]
    assert torch.equal(model.get_parameter(name), trainer.get_parameter(name).float())
    with pytest.raises(WeightMismatchError, match=rf"1 of another dtype \(send .*{name}: offered \[6, 18\] float32"):
        apply_weights(trainer, model)


def test_a_router_in_float32_is_sent_as_the_forward_uses_it() -> None:
    """A trainer that was loaded in bfloat16 computes with its router in float32; one in float32 is cast as a whole."""
    name, asked = "model.layers.1.mlp.gate.weight", {"e_score_correction_bias", "gate.weight"}
    trainer, model = expert_model("Glm4Moe", torch.float32, seed=1), expert_model("Glm4Moe")
    trainer._keep_in_fp32_modules_strict = model._keep_in_fp32_modules_strict = asked
    model.get_parameter(name).data = model.get_parameter(name).data.float()
    sent([trainer], model, dtype=torch.bfloat16)
    assert torch.equal(model.get_parameter(name), trainer.get_parameter(name).bfloat16().float())
    for parameter in (parameter for other, parameter in trainer.named_parameters() if other != name):
        parameter.data = parameter.data.bfloat16()
    sent([trainer], model, dtype=torch.bfloat16)
    assert differing(model, trainer) == []


def test_the_receivers_dtypes_are_kept() -> None:
    """A gpt-oss with float32 norms keeps their dtype when its sender has everything in bfloat16."""
    trainer, model = expert_model("GptOss", seed=1), expert_model("GptOss")
    norms = [name for name, _ in model.named_parameters() if "norm" in name]
    for name in norms:
        model.get_parameter(name).data = model.get_parameter(name).data.float()
    with pytest.raises(WeightMismatchError, match="5 of another dtype"):
        apply_weights(model, trainer)
    for source in (trainer, values(trainer), in_one_piece(values(trainer))):
        report = apply_weights(model, source, cast=True)
        assert sorted(report.casts) == sorted(f"{name}: bfloat16 -> float32" for name in norms)
    assert {model.get_parameter(name).dtype for name in norms} == {torch.float32}
    assert all(torch.equal(tensor.bfloat16(), trainer.state_dict()[n]) for n, tensor in model.state_dict().items())


def test_a_cast_of_parts_is_reported_once() -> None:
    stored = broken(lambda tensors: [tensors.update({n: t.float()}) for n, t in tensors.items() if "experts" in n])
    report = apply_weights(expert_model("Qwen3Moe"), stored, cast=True)
    layer = "model.layers.1.mlp.experts"
    assert sorted(report.casts) == [f"{layer}.{part}: float32 -> bfloat16" for part in ("down_proj", "gate_up_proj")]


def test_an_announcement_in_parts_is_not_too_long() -> None:
    """The receiver's limit for an announcement counts the names of all parts of each tensor."""
    from samebit.weight_sync.wire.link import Announcement, most_announced
    from samebit.weight_sync.wire.link import encode as encoded

    manifest = Manifest.of(expert_model("Qwen3Moe"))
    parts = tuple(manifest.every_spec())
    assert len(parts) == len(manifest.specs) + 3 * 5
    tensors = tuple(TensorSpec(f"{spec.name}.{n}", spec.shape, spec.dtype) for n, spec in enumerate(parts))
    assert most_announced(parts) > len(encoded(Announcement(tensors))) + (1 << 20)
    assert json.loads(encoded(Announcement(tensors)))["tensors"]


def test_a_folder_of_an_index_lacks_an_expert(tmp_path: Path) -> None:
    """A missing shard is named before anything of its experts is."""
    saved("Qwen3Moe", tmp_path, max_shard_size="6KB")
    next(tmp_path.glob("model-00002-*.safetensors")).unlink()
    with pytest.raises(WeightSourceError, match="which is missing"):
        apply_weights(expert_model("Qwen3Moe"), tmp_path)
