"""Folders as gpt-oss (mxfp4), DeepSeek-V3 (fp8 in blocks) and Ministral 3 (fp8 with one scale a tensor) are published
load in bfloat16 if asked, or are refused.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from samebit.rollout.config import RolloutConfig
from samebit.rollout.errors import ModelLoadError
from samebit.rollout.models.loading import load_model
from samebit.weight_sync import NonFiniteWeightError, WeightMismatchError, WeightSourceError, apply_weights

from ..exactness.families import make_wrapped
from .expert_models import differing, expert_model, values

MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [8, 16]}
STATIC = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None, "dequantize": False}
FBGEMM = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}
INT4 = {"quant_method": "compressed-tensors", "format": "pack-quantized"}


def compressed(strategy: str, **more: Any) -> dict[str, Any]:
    """Return what a folder of compressed-tensors says whose weights are float8."""
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, **more}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    return {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": groups}


def gpt_oss(seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    """Return a gpt-oss whose widths are made of groups of 32."""
    return expert_model("GptOss", dtype, seed=seed, hidden_size=64, intermediate_size=32)


def deepseek(seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    return expert_model("DeepseekV3", dtype, seed=seed)


def in_mxfp4(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return a checkpoint with random blocks in place of the experts' matrices, every byte and scale among them."""
    generator = torch.Generator().manual_seed(7)
    stored = values(model)
    for name in [name for name in stored if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = stored.pop(name).shape
        blocks = torch.randint(256, (experts, outputs, inputs // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(90, 140, blocks.shape[:3], generator=generator, dtype=torch.uint8)
        blocks.view(-1)[:256] = torch.arange(256)
        scales.view(-1)[:8] = torch.tensor([0, 1, 2, 126, 127, 128, 250, 251])
        stored[f"{name}_blocks"], stored[f"{name}_scales"] = blocks, scales
    return stored


def in_fp8(model: PreTrainedModel, scale: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Return a checkpoint, each expert apart, whose matrices are float8 with a scale for each block of 8 x 16.

    The widths are no multiples of these: blocks at the edge are smaller.
    """
    generator = torch.Generator().manual_seed(7)
    stored = revert_weight_conversion(model, values(model))
    for name, value in list(stored.items()):
        if value.dim() == 2 and "proj" in name:
            scales = torch.rand(-(-value.shape[0] // 8), -(-value.shape[1] // 16), generator=generator) * 1e-2
            stored[name] = (value.float() * 100).to(torch.float8_e4m3fn)
            stored[f"{name}_scale_inv"] = scales.to(scale)
    return stored


def in_float8(
    model: PreTrainedModel, shape: tuple[int | None, ...] = (), scale: torch.dtype = torch.bfloat16, end: str = "_scale"
) -> dict[str, Tensor]:
    """Return a checkpoint whose matrices are float8, the scales of each of a shape (None for its rows) and called
    `end`, with scales of activations beside them."""
    generator = torch.Generator().manual_seed(7)
    stored = revert_weight_conversion(model, values(model))
    for name, value in list(stored.items()):
        if value.dim() == 2 and "proj" in name:
            scales = torch.rand([len(value) if size is None else size for size in shape], generator=generator) * 1e-2
            stored[name] = (value.float() * 100).to(torch.float8_e4m3fn)
            stored[name + end] = scales.to(scale)
            activations = "activation_scale" if end == "_scale_inv" else "input_scale"
            stored[name.removesuffix("weight") + activations] = torch.tensor(0.5)
    return stored


def folder_of(folder: Path, model: PreTrainedModel, stored: dict[str, Tensor], settings: dict[str, Any] | None) -> Path:
    model.config.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    if settings is not None:
        config["quantization_config"] = settings
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: value.contiguous() for name, value in stored.items()}, folder / "model.safetensors")
    return folder


@pytest.fixture
def mxfp4(tmp_path: Path) -> Path:
    return folder_of(tmp_path, gpt_oss(), in_mxfp4(gpt_oss(1)), MXFP4)


@pytest.fixture
def fp8(tmp_path: Path) -> Path:
    return folder_of(tmp_path, deepseek(), in_fp8(deepseek(1)), FP8)


def test_mxfp4_has_the_bits_of_transformers(mxfp4: Path) -> None:
    model, stored = gpt_oss(), in_mxfp4(gpt_oss(1))
    apply_weights(model, mxfp4, dequantize=True)
    found = values(model)
    for name in [name.removesuffix("_blocks") for name in stored if name.endswith("_blocks")]:
        expected = convert_moe_packed_tensors(stored.pop(f"{name}_blocks"), stored.pop(f"{name}_scales"))
        assert torch.equal(found.pop(name), expected)
    assert found.keys() == stored.keys()
    assert all(torch.equal(found[name], value) for name, value in stored.items())


@pytest.mark.parametrize(
    ("dtype", "scale"),
    [
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.bfloat16),
        (torch.float16, torch.float16),
    ],
)
def test_fp8_in_blocks_has_the_bits_of_transformers(dtype: torch.dtype, scale: torch.dtype, tmp_path: Path) -> None:
    """Weights in fp8 are dequantized as transformers does: the product is rounded once, to the parameter's dtype."""
    model, stored = deepseek(dtype=dtype), in_fp8(deepseek(1), scale)
    apply_weights(
        model, folder_of(tmp_path, model, stored, FP8), dequantize=True, cast=dtype != torch.bfloat16, verify=True
    )
    found = revert_weight_conversion(model, values(model))
    for name in [name.removesuffix("_scale_inv") for name in stored if name.endswith("_scale_inv")]:
        value, scales = stored.pop(name), stored.pop(f"{name}_scale_inv")
        rows, columns = (size // block * block for size, block in zip(value.shape, (8, 16), strict=True))
        assert found[name].dtype == dtype
        if rows and columns:  # transformers takes whole blocks only
            whole = value[:rows, :columns], scales[: rows // 8, : columns // 16]
            expected = Fp8Dequantize(None)._dequantize_one(*whole, output_dtype=dtype)
            assert torch.equal(found[name][:rows, :columns], expected)
        spread = scales.float().repeat_interleave(8, 0).repeat_interleave(16, 1)[: value.shape[0], : value.shape[1]]
        assert torch.equal(found.pop(name), (value.float() * spread).to(dtype))
    assert found.keys() == stored.keys()
    assert all(torch.equal(found[name], value.to(found[name].dtype)) for name, value in stored.items())


@pytest.mark.parametrize(
    ("settings", "shape", "end"),
    [
        (STATIC, (), "_scale_inv"),  # as Ministral-3-Instruct is published
        (STATIC, (1,), "_scale"),
        (compressed("tensor"), (1,), "_scale"),
        (compressed("channel"), (None, 1), "_scale"),
        (FBGEMM, (None, 1), "_scale"),
    ],
)
@pytest.mark.parametrize("scale", [torch.bfloat16, torch.float32])
def test_one_scale_a_tensor_or_a_row(
    settings: dict[str, Any], shape: tuple[int | None, ...], end: str, scale: torch.dtype, tmp_path: Path
) -> None:
    """Each number is its value times its scale, rounded once; what stands there for activations is left out."""
    model, stored = deepseek(), in_float8(deepseek(1), shape, scale, end)
    apply_weights(model, folder_of(tmp_path, model, stored, settings), dequantize=True, verify=True)
    found = revert_weight_conversion(model, values(model))
    stored = {name: value for name, value in stored.items() if not name.endswith(("activation_scale", "input_scale"))}
    for name in [name.removesuffix(end) for name in stored if name.endswith(end)]:
        value, scales = stored.pop(name).float(), stored.pop(name + end).float()
        assert torch.equal(found.pop(name), (value * scales).bfloat16())
    assert found.keys() == stored.keys()
    assert all(torch.equal(found[name], value.to(found[name].dtype)) for name, value in stored.items())


def test_blocks_of_compressed_tensors_are_those_of_fp8(tmp_path: Path, fp8: Path) -> None:
    model, expected = deepseek(), deepseek()
    stored = {name.replace("_scale_inv", "_scale"): value for name, value in in_fp8(deepseek(1)).items()}
    settings = compressed("block", block_structure=FP8["weight_block_size"])
    apply_weights(model, folder_of(tmp_path / "compressed", model, stored, settings), dequantize=True)
    apply_weights(expected, fp8, dequantize=True)
    assert differing(model, expected) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="transformers keeps float8 on a GPU")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_ministral_as_published_loads_as_transformers_loads_it(dtype: str, tmp_path: Path) -> None:
    """A Ministral-3 with vision around it, in float8 with one scale a tensor, has the weights that transformers
    gives it."""
    whole = make_wrapped("Ministral3").bfloat16()
    stored = in_float8(whole, (), torch.bfloat16, "_scale_inv")
    stored = {name: value for name, value in stored.items() if "vision" not in name or "activation" not in name}
    settings = {**STATIC, "modules_to_not_convert": ["lm_head"]}
    folder_of(tmp_path, whole, stored, settings)
    kind = type(whole)
    expected = kind.from_pretrained(tmp_path, dtype=getattr(torch, dtype)).model.language_model.state_dict()
    loaded = load_model(tmp_path, RolloutConfig(dequantize=True, dtype=dtype)).module
    found = loaded.model.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.skipif(torch.cuda.is_available(), reason="transformers keeps float8 on a GPU")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_whole_in_float8_loads_as_transformers_loads_it(dtype: str, tmp_path: Path) -> None:
    """A whole model that computes images is published with its text in float8, and its vision plain."""
    whole = make_wrapped("Qwen3").bfloat16()
    plain = revert_weight_conversion(whole, values(whole))
    stored = in_float8(whole, (), torch.bfloat16, "_scale_inv")
    stored = {name: plain.get(name, value) if "visual." in name else value for name, value in stored.items()}
    stored = {name: value for name, value in stored.items() if "visual." not in name or name in plain}
    folder_of(tmp_path, whole, stored, {**STATIC, "modules_to_not_convert": ["lm_head", "model.visual"]})
    expected = type(whole).from_pretrained(tmp_path, dtype=getattr(torch, dtype)).state_dict()
    config = RolloutConfig(images=True, dequantize=True, dtype=dtype)
    found = load_model(tmp_path, config).module.state_dict()
    assert found.keys() == expected.keys()
    assert [name for name, value in expected.items() if not torch.equal(found[name], value)] == []
    with pytest.raises(ModelLoadError, match="dequantize=True"):
        load_model(tmp_path, RolloutConfig(images=True))


@pytest.mark.parametrize("kind", ["mxfp4", "fp8"])
def test_a_model_of_another_dtype_takes_quantized_weights_with_a_cast(
    kind: str, request: pytest.FixtureRequest
) -> None:
    folder: Path = request.getfixturevalue(kind)
    model = (gpt_oss if kind == "mxfp4" else deepseek)(dtype=torch.float32)
    with pytest.raises(WeightMismatchError, match=r"down_proj.*: offered .* bfloat16, the model has .* float32"):
        apply_weights(model, folder, dequantize=True)


@pytest.mark.parametrize("kind", ["mxfp4", "fp8"])
def test_a_worker_is_built_on_request(
    kind: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Routers of DeepSeek-V3 stay float32, as its class asks since transformers 5.24: they are rounded at no place."""
    folder: Path = request.getfixturevalue(kind)
    with pytest.raises(ModelLoadError, match=rf"quantized \(quant_method='{kind}'\); dequantize=True takes them as bf"):
        load_model(folder, RolloutConfig())
    (folder / "generation_config.json").write_text('{"eos_token_id": [5, 7]}')
    if kind == "fp8":
        kept = ["e_score_correction_bias", "gate.weight"]
        monkeypatch.setattr(type(deepseek()), "_keep_in_fp32_modules_strict", kept)
    loaded = load_model(folder, RolloutConfig(dequantize=True))
    make = gpt_oss if kind == "mxfp4" else deepseek
    model, wide = make(), make(dtype=torch.float32)
    for name, tensor in loaded.module.state_dict().items():  # routers
        if name.endswith("gate.weight"):
            model.get_parameter(name).data = model.get_parameter(name).data.to(tensor.dtype)
    apply_weights(model, folder, dequantize=True)
    assert differing(loaded.module, model) == []
    routers = [name for name in model.state_dict() if name.endswith("gate.weight")]
    assert {model.get_parameter(name).dtype for name in routers} == ({torch.float32} if kind == "fp8" else set())
    assert (loaded.eos_token_ids, loaded.module.training, loaded.shared) == ((5, 7), False, False)
    assert "quantization_config" not in loaded.module.config.to_dict()
    apply_weights(wide, folder, dequantize=True, cast=True)
    loaded = load_model(folder, RolloutConfig(dequantize=True, dtype="float32"))
    assert {tensor.dtype for tensor in wide.state_dict().values()} == {torch.float32}
    assert differing(loaded.module, wide) == []


@pytest.mark.parametrize("dequantize", [False, True])
@pytest.mark.parametrize(
    "settings",
    [
        INT4,
        {**FP8, "weight_block_size": [8]},
        {"quant_method": "gptq", "bits": 4},
        {**compressed("tensor"), "format": "nvfp4-pack-quantized"},
        {**compressed("tensor"), "config_groups": {}},
        compressed("token"),
        compressed("tensor", num_bits=4),
        compressed("tensor", symmetric=False),
        compressed("block", block_structure="8x16"),
    ],
)
def test_other_formats_are_refused(settings: dict[str, Any], dequantize: bool, tmp_path: Path) -> None:
    folder_of(tmp_path, deepseek(), values(deepseek()), settings)
    says = rf"quant_method='{settings['quant_method']}'.* be dequantized here; allowed: 'mxfp4'; 'fp8', with"
    with pytest.raises(WeightSourceError, match=says):
        apply_weights(deepseek(), tmp_path, dequantize=dequantize)
    with pytest.raises(ModelLoadError, match=says):
        load_model(tmp_path, RolloutConfig(dequantize=dequantize))


def test_plain_weights_are_taken_with_the_option_too(tmp_path: Path) -> None:
    model = deepseek()
    apply_weights(model, folder_of(tmp_path, model, values(deepseek(1)), None), dequantize=True)
    assert differing(model, deepseek(1)) == []


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("down_proj_scales", None, r"down_proj_blocks .* and .*down_proj_scales None are not mxfp4"),
        ("down_proj_scales", torch.zeros(5, 64, 2, dtype=torch.uint8), r"\[5, 64, 2\] uint8 are not mxfp4"),
        ("down_proj_scales", torch.zeros(5, 64, 1), r"\[5, 64, 1\] float32 are not mxfp4"),
        ("down_proj_blocks", torch.zeros(5, 64, 16, dtype=torch.uint8), r"\[5, 64, 16\] uint8 .* are not mxfp4"),
    ],
)
def test_mxfp4_that_is_none(name: str, value: Tensor | None, says: str, tmp_path: Path) -> None:
    stored = in_mxfp4(gpt_oss())
    stored |= {f"model.layers.1.mlp.experts.{name}": torch.zeros(1) if value is None else value}
    if value is None:
        stored.pop(f"model.layers.1.mlp.experts.{name}")
    with pytest.raises(WeightSourceError, match=says):
        apply_weights(gpt_oss(), folder_of(tmp_path, gpt_oss(), stored, MXFP4), dequantize=True)


def test_fp8_that_is_none(tmp_path: Path) -> None:
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    for scales, says in (
        (None, "None"),
        (torch.zeros(2, 1), r"\[2, 1\] float32"),
        (torch.zeros(2, 2).double(), r"\[2, 2\] float64"),
    ):
        stored = in_fp8(deepseek())
        stored[f"{name}_scale_inv"] = torch.zeros(1) if scales is None else scales
        if scales is None:
            stored.pop(f"{name}_scale_inv")
        expected = rf"{name}_scale_inv {says} are not fp8 in blocks of 8 x 16: .* bfloat16 or float16 \[2, 2\]$"
        with pytest.raises(WeightSourceError, match=expected):
            apply_weights(deepseek(), folder_of(tmp_path, deepseek(), stored, FP8), dequantize=True)


def test_float8_with_other_scales_is_named(tmp_path: Path) -> None:
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    rows = len(in_float8(deepseek())[name])
    both = r"\[\] bfloat16 and .*_scale \[1\] float32"
    for settings, end, scales, says in (
        (
            STATIC,
            "_scale",
            torch.ones(rows, 1),
            rf"_scale \[{rows}, 1\] float32 .* all rows x all columns: .* \[1, 1\]",
        ),
        (STATIC, "_scale", torch.ones(1), rf"_scale_inv {both} are not fp8 in blocks of all rows x all columns"),
        (FBGEMM, "_scale", torch.ones(1), rf"_scale \[1\] float32 .* of 1 x all columns: .* float16 \[{rows}, 1\]$"),
    ):
        stored = in_float8(
            deepseek(), () if settings is STATIC else (None, 1), end="_scale_inv" if "inv" in says else end
        )
        stored[name + end] = scales
        with pytest.raises(WeightSourceError, match=f"{name}{says}"):
            apply_weights(deepseek(), folder_of(tmp_path, deepseek(), stored, settings), dequantize=True)


def test_what_is_missing_or_not_finite_is_named(tmp_path: Path) -> None:
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    stored = in_fp8(deepseek())
    del stored[name], stored[f"{name}_scale_inv"]
    with pytest.raises(WeightMismatchError, match=f"1 missing: {name}$"):
        apply_weights(deepseek(), folder_of(tmp_path, deepseek(), stored, FP8), dequantize=True)
    for scale, low in ((255, 0), (254, 0x77)):  # no number; and 6 times 2**127, which bfloat16 does not hold
        stored = in_mxfp4(gpt_oss())
        stored["model.layers.1.mlp.experts.down_proj_scales"][0] = scale
        stored["model.layers.1.mlp.experts.down_proj_blocks"][0] = low
        with pytest.raises(NonFiniteWeightError, match=r"model\.layers\.1\.mlp\.experts\.down_proj$"):
            apply_weights(gpt_oss(), folder_of(tmp_path, gpt_oss(), stored, MXFP4), dequantize=True)


def test_a_config_that_is_none(tmp_path: Path) -> None:
    folder_of(tmp_path, deepseek(), values(deepseek()), None)
    (tmp_path / "config.json").write_text("[1, 2]")
    with pytest.raises(WeightSourceError, match=r"config\.json is not the config of a model"):
        apply_weights(deepseek(), tmp_path)
