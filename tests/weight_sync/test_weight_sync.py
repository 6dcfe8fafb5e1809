"""Weights that may be offered are written, and others are refused."""

from __future__ import annotations

import json
import os
import re
import socket
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from samebit.weight_sync import (
    Manifest,
    NonFiniteWeightError,
    PeerLostError,
    SharedMemorySender,
    TensorSpec,
    WeightMismatchError,
    WeightSourceError,
    WeightStream,
    apply_weights,
    open_source,
)

from ..exactness.families import make_model
from ..noted_stream import noted_stream
from ..patience import HANG

INDEX = "model.safetensors.index.json"


class Model(nn.Module):
    """Has a tied pair, a persistent integer buffer, and a derived buffer that is in no state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.proj = nn.Linear(4, 3)
        self.lm_head = nn.Linear(4, 6, bias=False)
        self.lm_head.weight = self.embed.weight
        self.register_buffer("steps", torch.zeros(2, dtype=torch.int64))
        self.register_buffer("derived", torch.ones(5), persistent=False)


def new_weights(model: nn.Module, *, leave_out: tuple[str, ...] = ("lm_head.weight",)) -> dict[str, Tensor]:
    """Return other values than the model's, under every name but those left out."""
    return {name: tensor.clone() + 1 for name, tensor in model.state_dict().items() if name not in leave_out}


def copy_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_unchanged(model: nn.Module, before: dict[str, Tensor]) -> None:
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


# -- tensors without values ------------------------------------------------------------------------


def test_meta_tensors_are_named_and_nothing_is_written() -> None:
    model = Model()
    before = copy_of(model)
    offered = new_weights(model)
    offered["proj.bias"] = offered["proj.bias"].to("meta")
    offered["steps"] = offered["steps"].to("meta")
    for give in (apply_weights, WeightStream.of):
        arguments = (model, offered) if give is apply_weights else (offered,)
        with pytest.raises(
            WeightSourceError, match=r"'meta' and hold no values: (steps, proj\.bias|proj\.bias, steps)$"
        ):
            give(*arguments)
    assert_unchanged(model, before)


def test_a_module_on_meta_gives_no_weights() -> None:
    model = Model()
    before = copy_of(model)
    with pytest.raises(WeightSourceError, match=r"hold no values: .*embed\.weight, proj\.weight, proj\.bias"):
        apply_weights(model, Model().to("meta"))
    assert_unchanged(model, before)


def test_sparse_tensors_are_named() -> None:
    model = Model()
    offered = new_weights(model)
    offered["proj.weight"] = offered["proj.weight"].to_sparse()
    with pytest.raises(WeightSourceError, match=r"these tensors are not dense: proj.weight \(torch.sparse_coo\)"):
        apply_weights(model, offered)


# -- manifest --------------------------------------------------------------------------------------


def test_a_manifest_lists_parameters_persistent_buffers_and_ties() -> None:
    manifest = Manifest.of(Model())
    assert set(manifest.specs) == {"embed.weight", "proj.weight", "proj.bias", "lm_head.weight", "steps"}
    assert manifest.specs["proj.weight"] == TensorSpec("proj.weight", (3, 4), torch.float32)
    assert ("embed.weight", "lm_head.weight") in manifest.ties
    assert len(manifest.ties) == 4


def test_a_tie_by_storage_is_seen_too() -> None:
    model = Model()
    model.lm_head.weight = nn.Parameter(model.embed.weight.data)
    assert ("embed.weight", "lm_head.weight") in Manifest.of(model).ties
    model.lm_head.weight = nn.Parameter(model.embed.weight.data.clone())
    assert ("lm_head.weight",) in Manifest.of(model).ties


def test_every_fault_is_named_in_one_error() -> None:
    model = Model()
    before = copy_of(model)
    offered = new_weights(model, leave_out=("lm_head.weight", "embed.weight"))
    offered["proj.weight"] = torch.zeros(4, 3)
    offered["proj.bias"] = torch.zeros(3, dtype=torch.int32)
    offered["steps"] = torch.zeros(2)
    offered["proj.scale"] = torch.zeros(1)
    with pytest.raises(WeightMismatchError) as caught:
        apply_weights(model, offered)
    text = str(caught.value)
    assert "1 unknown: proj.scale" in text
    assert "1 missing: embed.weight or lm_head.weight" in text
    assert "proj.weight: offered [4, 3] float32, the model has [3, 4] float32" in text
    assert "proj.bias: offered [3] int32, the model has [3] float32" in text
    assert "steps: offered [2] float32, the model has [2] int64" in text
    assert_unchanged(model, before)


def test_nothing_offered_is_not_a_full_update() -> None:
    with pytest.raises(WeightMismatchError, match="offers no tensors"):
        apply_weights(Model(), {})


# -- apply -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["embed.weight", "lm_head.weight"])
def test_one_name_of_a_tied_pair_is_enough(given: str) -> None:
    model = Model()
    other = {"embed.weight": "lm_head.weight", "lm_head.weight": "embed.weight"}[given]
    offered = new_weights(model, leave_out=(other,))
    report = apply_weights(model, offered)
    assert torch.equal(model.embed.weight, offered[given])
    assert model.embed.weight is model.lm_head.weight
    assert report.tensors == 4


def test_both_names_of_a_tied_pair_must_agree() -> None:
    model = Model()
    before = copy_of(model)
    offered = new_weights(model, leave_out=())
    assert apply_weights(model, offered).changed_tensors == 4
    offered = {name: tensor.clone() + 1 for name, tensor in before.items()}
    offered["lm_head.weight"][0, 0] += 1
    with pytest.raises(WeightMismatchError, match=r"embed\.weight and lm_head\.weight"):
        apply_weights(model, offered)


def test_the_tensors_of_the_module_stay_the_same_objects() -> None:
    model = Model().train()
    addresses = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    model.proj.weight.grad = torch.ones(3, 4)
    report = apply_weights(model, new_weights(model), version=3)
    assert {name: tensor.data_ptr() for name, tensor in model.state_dict().items()} == addresses
    assert model.training
    assert model.proj.weight.requires_grad
    assert torch.equal(model.proj.weight.grad, torch.ones(3, 4))
    assert report.version == 3
    assert report.bytes == 4 * (24 + 12 + 3) + 8 * 2
    assert report.seconds >= 0


def test_the_report_counts_changed_bits_only() -> None:
    model = Model()
    nn.init.zeros_(model.proj.bias)
    same = copy_of(model)
    report = apply_weights(model, same)
    assert (report.changed_tensors, report.bytes, report.tensors) == (0, 0, 4)
    same["proj.bias"] = -same["proj.bias"]
    assert apply_weights(model, same).changed == ("proj.bias",), "-0.0 has other bits than 0.0"


def test_numbers_that_need_a_scale_are_not_cast() -> None:
    with pytest.raises(WeightMismatchError, match=r"can not be cast: proj\.bias: offered \[3\] float8_e4m3fn"):
        apply_weights(Model(), {"proj.bias": torch.zeros(3).to(torch.float8_e4m3fn)}, partial=True)


def test_a_cast_is_asked_for_and_reported() -> None:
    model = Model()
    before = copy_of(model)
    offered = new_weights(model)
    offered["proj.weight"] = offered["proj.weight"].to(torch.bfloat16)
    with pytest.raises(WeightMismatchError, match=r"1 of another dtype .*cast=True\): proj\.weight: offered \["):
        apply_weights(model, offered)
    assert_unchanged(model, before)
    report = apply_weights(model, offered, cast=True)
    assert report.casts == ("proj.weight: bfloat16 -> float32",)
    assert torch.equal(model.proj.weight, offered["proj.weight"].float())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite_are_refused_before_the_first_byte(bad: float) -> None:
    model = Model()
    before = copy_of(model)
    offered = new_weights(model)
    offered["proj.weight"][2, 3] = bad
    offered["proj.bias"][0] = bad
    with pytest.raises(NonFiniteWeightError, match=r"proj\.weight, proj\.bias"):
        apply_weights(model, offered)
    assert_unchanged(model, before)


def test_a_value_that_overflows_in_the_cast_is_refused() -> None:
    model = Model().half()
    offered = {
        name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in copy_of(model).items()
    }
    offered["proj.bias"][1] = 1e5
    with pytest.raises(NonFiniteWeightError, match=r"proj\.bias"):
        apply_weights(model, offered, partial=True, cast=True)


def test_partial_writes_what_is_given_and_still_refuses_the_unknown() -> None:
    model = Model()
    before = copy_of(model)
    report = apply_weights(model, {"proj.bias": torch.full((3,), 9.0)}, partial=True)
    assert report.changed == ("proj.bias",)
    assert torch.equal(model.proj.weight, before["proj.weight"])
    with pytest.raises(WeightMismatchError, match="unknown: nose"):
        apply_weights(model, {"nose": torch.zeros(1)}, partial=True)
    assert apply_weights(model, {}, partial=True).tensors == 0


# -- sources ---------------------------------------------------------------------------------------


def save_sharded(folder: Path, tensors: dict[str, Tensor]) -> None:
    names = sorted(tensors)
    shards = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, members in shards.items():
        save_file({name: tensors[name] for name in members}, folder / file)
    weight_map = {name: file for file, members in shards.items() for name in members}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.mark.parametrize("kind", ["module", "dict", "folder", "path string", "sharded"])
def test_every_kind_of_source_gives_the_same_weights(kind: str, tmp_path: Path) -> None:
    donor, model = Model(), Model()
    offered = new_weights(donor)
    donor.load_state_dict(offered, strict=False)
    if kind == "sharded":
        save_sharded(tmp_path, offered)
    else:
        save_file(offered, tmp_path / "model.safetensors")
    source = {"module": donor, "dict": offered, "path string": str(tmp_path)}.get(kind, tmp_path)
    report = apply_weights(model, source)
    assert report.changed_tensors == 4
    assert_unchanged(model, copy_of(donor))


def test_the_single_file_of_a_folder_is_read_and_nothing_beside_it(tmp_path: Path) -> None:
    """A folder's single file is what counts, as for transformers: the index and the shards beside it are of an earlier
    save.
    """
    model = Model()
    old = new_weights(model)
    new = {name: tensor + 1 for name, tensor in old.items()}
    save_sharded(tmp_path, old)
    save_file(new, tmp_path / "model.safetensors")
    apply_weights(model, tmp_path)
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in new.items())


@pytest.mark.parametrize("wrong", [None, 3, [torch.zeros(1)], b"folder"])
def test_other_sources_are_a_type_error_that_says_what_is_allowed(wrong: object) -> None:
    with pytest.raises(TypeError, match=r"a dict of tensors, an nn\.Module or a folder"):
        open_source(wrong)


def test_the_names_of_a_checkpoint(tmp_path: Path) -> None:
    """Names of a checkpoint find their module: Nemotron-H's begin with "backbone.", the module's with "model."."""
    model, other = (make_model("NemotronH", torch.float32) for _ in range(2))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    stored = {re.sub(r"^model\.", "backbone.", name): tensor for name, tensor in model.state_dict().items()}
    assert stored.keys() != model.state_dict().keys()
    save_file({name: tensor.clone() for name, tensor in stored.items()}, tmp_path / "model.safetensors")
    for source in (stored, tmp_path):
        assert apply_weights(other, source).changed_tensors > 0
        assert all(torch.equal(tensor, other.state_dict()[name]) for name, tensor in model.state_dict().items())
        apply_weights(other, {name: tensor / 2 for name, tensor in stored.items()})
    twice = {**stored, "model.norm_f.weight": stored["backbone.norm_f.weight"]}
    with pytest.raises(WeightMismatchError, match=r"backbone\.norm_f\.weight and model\.norm_f\.weight are both"):
        apply_weights(other, twice)


def test_a_dict_with_something_else_in_it_names_it() -> None:
    with pytest.raises(TypeError, match=r"weight 'a' is a list"):
        open_source({"a": [1.0]})
    with pytest.raises(TypeError, match="names are strings, got 3"):
        open_source({3: torch.zeros(1)})


def test_a_folder_that_can_not_be_read_says_why(tmp_path: Path) -> None:
    with pytest.raises(WeightSourceError, match="no such folder"):
        open_source(tmp_path / "nowhere")
    with pytest.raises(WeightSourceError, match=r"no \*\.safetensors"):
        open_source(tmp_path)
    torch.save({"a": torch.zeros(1)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(WeightSourceError, match=r"no \*\.safetensors"):
        open_source(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not a safetensors file at all")
    with pytest.raises(WeightSourceError, match="not a readable safetensors file"):
        open_source(tmp_path)


def test_a_truncated_file_changes_nothing(tmp_path: Path) -> None:
    model = Model()
    before = copy_of(model)
    path = tmp_path / "model.safetensors"
    save_file(new_weights(model), path)
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(WeightSourceError, match="not a readable safetensors file"):
        apply_weights(model, tmp_path)
    assert_unchanged(model, before)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "is not a safetensors index"),
        ("{}", "is not a safetensors index"),
        ('{"weight_map": ["a"]}', "is not a safetensors index"),
        ('{"weight_map": {"a": "../a.safetensors"}}', "not a plain file name"),
        ('{"weight_map":' + "[" * 100_000, "is not a safetensors index"),
        ('{"weight_map":' * 50_000, "is not a safetensors index"),
        ('{"weight_map": {"a": ' + "9" * 5000 + "}}", "is not a safetensors index"),
        ('{"weight_map": {"a": 3}}', "is not a safetensors index"),
        ('{"weight_map": {"a": ["shard.safetensors"]}}', "is not a safetensors index"),
        ('{"weight_map": {"\\ud800": "shard.safetensors"}}', "is not a safetensors index"),
        ('{"weight_map": {"a": "\\ud800.safetensors"}}', "is not a safetensors index"),
        ('{"weight_map": {"a": "\\u0000"}}', "which is missing"),
        ('{"weight_map": {"a": "' + "x" * 5000 + '"}}', "which is missing"),
        ('{"weight_map": {"a": ".."}}', "which is missing"),
        ('{"weight_map": {"a": "gone.safetensors"}}', "which is missing"),
        ('{"weight_map": {"ghost": "shard.safetensors"}}', "has no tensor ghost"),
    ],
)
def test_a_wrong_index_says_what_is_wrong(content: str, says: str, tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "shard.safetensors")
    (tmp_path / INDEX).write_text(content)
    with pytest.raises(WeightSourceError, match=says):
        apply_weights(Model(), tmp_path)


@pytest.mark.parametrize("content", [b"\xff\xfe", b"\xed\xa0\x80", b""])
def test_an_index_that_is_no_text(content: bytes, tmp_path: Path) -> None:
    (tmp_path / INDEX).write_bytes(content)
    with pytest.raises(WeightSourceError, match="is not a safetensors index"):
        open_source(tmp_path)


def test_a_folder_or_a_pipe_with_the_name_of_a_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(WeightSourceError, match=r"model\.safetensors is not a file"):
        open_source(tmp_path)


def test_a_name_that_can_not_travel_is_refused_where_it_is_given() -> None:
    with pytest.raises(ValueError, match=r"the name 'a.ud800' of a weight is not valid Unicode"):
        WeightStream.of({"a\ud800": torch.zeros(1)})


def test_one_name_in_two_files_is_refused(tmp_path: Path) -> None:
    for file in ("a.safetensors", "b.safetensors"):
        save_file({"x": torch.zeros(1)}, tmp_path / file)
    with pytest.raises(WeightSourceError, match=r"x is in both a\.safetensors and b\.safetensors"):
        open_source(tmp_path)


# -- a link ----------------------------------------------------------------------------------------


def test_a_sender_that_waits_for_a_receiver_ends_when_it_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    sender = SharedMemorySender(timeout=HANG)
    listener, accept, waits = sender.link._endpoint._listener, socket.socket.accept, threading.Event()

    def noted(one: socket.socket) -> tuple[socket.socket, object]:
        if one is listener:
            waits.set()
        return accept(one)

    def close() -> None:
        assert waits.wait(HANG)
        sender.close()

    monkeypatch.setattr(socket.socket, "accept", noted)
    closing = threading.Thread(target=close)
    closing.start()
    with pytest.raises(PeerLostError, match="closed before a receiver connected"):
        sender.send(Model())
    closing.join(HANG)


def test_a_stream_that_does_not_fit_is_gone_through_without_a_worker_too() -> None:
    """A stream that does not fit is read to its end, because other ranks may be gathering the same tensors."""
    gathered: list[str] = []
    with pytest.raises(WeightMismatchError):
        apply_weights(nn.Linear(2, 3), noted_stream({"weight": torch.zeros(3, 2), "other": torch.zeros(3)}, gathered))
    assert gathered == ["weight", "other"]
