"""Kimi-Linear, which holds recurrent states and latents, is exact in what `test_delta_families` does not ask of it.

Transformers has it from 5.23 on (`make test-next`).
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from samebit.kernels import BindingError, bind
from samebit.kernels.binding.binding import binding_of
from samebit.rollout import RolloutConfig, RolloutWorker, SamplingParams
from samebit.rollout.audit import audit as check
from samebit.weight_sync import WeightMismatchError

from .compare import assert_matches_trainer, assert_same_samples, budget, run
from .families import bound_model, make_model, token_ids
from .gradients import assert_equal, gradients, hugging_face
from .layouts import LAYOUTS
from .test_layouts import checkpointing

pytest.importorskip("transformers.models.kimi_linear", reason="Kimi-Linear: transformers 5.23 has it")

FAMILY = "KimiLinear"
SEQUENCES = token_ids(1, 2, 17, 70, 16)
PARAMS = SamplingParams(max_tokens=20, seed=3, ignore_eos=True)
DENSE = {"mlp_layer_types": ["dense"] * 3}


def test_memory_of_a_block_and_of_a_state() -> None:
    """A block holds one row of latents a token of one layer; a state has the states of two layers, and the windows of
    their convolutions.
    """
    binding = binding_of(bound_model(FAMILY, torch.bfloat16))
    assert binding.kv_layout.bytes_per_block(1, torch.bfloat16) == 2 * (50 + 7)
    assert binding.state_layout is not None
    state, window = 4 * 3 * 20 * 32, 2 * 2 * 3 * 3 * 20
    assert binding.state_layout.bytes_per_checkpoint(torch.bfloat16) == 2 * (state + window)


def test_groups_followers_preemption_and_few_states() -> None:
    model = bound_model(FAMILY, torch.bfloat16)
    stem, other = token_ids(130, 66, seed=5)
    prompts = [stem, stem, stem[:128], [*stem[:100], *other[:3]], other]
    wanted = [SamplingParams(n=3, max_tokens=70, seed=number, ignore_eos=True) for number in range(5)]
    few = {"num_blocks": 7, "max_model_len": 210, "state_cache_gb": budget(model, 3)}
    outputs, stats = run(model, prompts, wanted, max_num_seqs=12, max_num_batched_tokens=70, **few)
    assert stats["preemptions"] > 0
    assert stats["prefill_tokens_skipped"] > 0
    assert stats["state_forks"] > 0
    assert stats["state_misses_evicted"] > 0
    assert_matches_trainer(model, outputs, wanted)
    roomy, _ = run(model, prompts, wanted, enable_prefix_caching=False)
    assert_same_samples(outputs, roomy)


def test_updates_and_sleep_in_between() -> None:
    """Nothing that is derived from a weight, in a state, a latent or a layer, outlives an update or a sleep."""
    model = make_model(FAMILY)
    prompt = token_ids(70)
    with RolloutWorker(model, config=RolloutConfig(max_model_len=200)) as worker:
        before = worker.generate(prompt, PARAMS)
        with worker.weight_update(), torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith(("kv_b_proj.weight", "A_log", "conv1d.weight")):
                    parameter.mul_(1.5)
        after = worker.generate(prompt, PARAMS)
        assert after[0].num_cached_tokens == worker.stats()["states_used"] - 1 == 0
        assert after[0].samples[0].logprobs != before[0].samples[0].logprobs
        assert_matches_trainer(model, after, [PARAMS])
        worker.sleep("kv_cache")
        worker.wake_up()
        assert_same_samples(worker.generate(prompt, PARAMS), after)


def test_published_folders_and_updates_from_them(tmp_path: Path) -> None:
    """Published folders load and update a worker: they hold experts, convolutions and parts of the forget gate in their
    own way, and a config that lists layers from 1.

    The first layer attends: its queries have another width than those of the layers with convolutions.
    """
    model = bind(make_model(FAMILY, layer_types=["full_attention", "linear_attention", "linear_attention"]))
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    published = (
        "layers.1.self_attn.k_conv1d.weight", "layers.1.self_attn.A_log", "layers.1.self_attn.f_b_proj.weight",
        "layers.2.block_sparse_moe.experts.14.w3.weight", "layers.2.block_sparse_moe.gate.e_score_correction_bias",
    )  # fmt: skip
    assert {f"model.{name}" for name in published} <= stored.keys()
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    for name in ("layer_types", "mlp_layer_types", "linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim"):
        del config[name]
    config |= {"first_k_dense_replace": 1, "mla_use_nope": True, "rope_theta": 10000.0}
    config["linear_attn_config"] = {
        "full_attn_layers": [1], "kda_layers": [2, 3], "head_dim": 20, "num_heads": 3, "short_conv_kernel_size": 3,
    }  # fmt: skip
    path.write_text(json.dumps(config))
    with RolloutWorker(tmp_path) as worker:
        assert_matches_trainer(model, worker.generate(SEQUENCES, PARAMS), [PARAMS] * 5)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)
        for source in (dict(model.state_dict()), {name: tensor * 0.5 for name, tensor in stored.items()}):
            if "model.layers.1.self_attn.A_log" in source:  # buffers stayed what they were
                source |= {name: tensor for name, tensor in stored.items() if name.endswith("correction_bias")}
            worker.receive_weights(source)
            assert_matches_trainer(model, worker.generate(SEQUENCES, PARAMS), [PARAMS] * 5)
        for missing in ("layers.1.self_attn.q_conv1d.weight", "layers.2.block_sparse_moe.experts.3.w2.weight"):
            with pytest.raises(WeightMismatchError, match=f"1 missing: model.{missing}"):
                worker.receive_weights({name: tensor for name, tensor in stored.items() if not name.endswith(missing)})


@pytest.mark.parametrize("changes", [{}, {"q_lora_rank": 41, "attention_bias": True}])
def test_gradients_are_as_near_float64_as_hugging_faces(changes: dict[str, object]) -> None:
    """Gradients of dense layers, where no router decides otherwise, are as near float64 as Hugging Face's. (Its own are
    near its float64, not ours.)
    """
    sequences = token_ids(1, 2, 50)
    mine, theirs = bind(make_model(FAMILY, **DENSE, **changes)), make_model(FAMILY, **DENSE, **changes)
    exact = make_model(FAMILY, **DENSE, **changes).double()
    found = gradients(mine, LAYOUTS["left padded"], sequences)
    other, oracle = (gradients(model, hugging_face, sequences) for model in (theirs, exact))
    for name, expected in oracle.items():
        of_mine, of_theirs = ((one[name] - expected).norm() / expected.norm() for one in (found, other))
        assert of_mine < max(1e-5, of_theirs), name


def test_checkpointing_changes_no_bit() -> None:
    """Checkpointing changes no bit: a layer that attends has no rotary tables, which carry the layout in other
    families; its mask does.
    """
    model = bind(make_model(FAMILY, torch.bfloat16))
    expected = gradients(model, LAYOUTS["packed"], SEQUENCES)
    for reentrant in (False, True):
        with checkpointing(model, reentrant):
            assert_equal(gradients(model, LAYOUTS["packed"], SEQUENCES), expected)


def test_adapters_on_layers_of_both_kinds() -> None:
    targets = ["q_proj", "f_b_proj", "g_a_proj", "kv_a_proj_with_mqa", "o_proj"]
    adapters = LoraConfig(r=4, target_modules=targets, init_lora_weights=False)
    model = bind(get_peft_model(make_model(FAMILY), adapters))
    outputs, _ = run(model, SEQUENCES, [PARAMS] * 5)
    assert_matches_trainer(model, outputs, [PARAMS] * 5)


@pytest.mark.soak
def test_samebit_check_passes(tmp_path: Path) -> None:
    make_model(FAMILY, torch.bfloat16).save_pretrained(tmp_path)
    rows = list(check.check_model(tmp_path, new_tokens=8))
    assert [row.name for row in rows if row.promised and (row.differing or not row.tokens)] == []
    assert sum(row.name.startswith("states: ") for row in rows) == 2
    assert sum(row.name.startswith("routing: ") for row in rows) == 1


def test_the_row_beside_transformers_holds_roundings_alone(tmp_path: Path) -> None:
    make_model(FAMILY, moe_intermediate_size=56).save_pretrained(tmp_path)  # a width for torch's grouped product
    row = next(iter(check.check_model(tmp_path)))
    assert row.tokens
    assert row.max_abs_diff < 1e-3


def test_what_is_refused() -> None:
    with pytest.raises(BindingError, match=r"an adapter on model\.layers\.1\.self_attn\.kv_b_proj, which is not bound"):
        bind(get_peft_model(make_model(FAMILY), LoraConfig(r=4, target_modules=["kv_b_proj"])))
    model = make_model(FAMILY)
    model.model.layers[2].self_attn.o_norm.activation = "silu"
    with pytest.raises(BindingError, match=r"layers\.2\.self_attn\.o_norm has the gate 'silu' \(exact: sigmoid\)"):
        bind(model)
    with pytest.raises(BindingError, match=r"layers\.0\.self_attn has the activation 'gelu'"):
        bind(make_model(FAMILY, hidden_act="gelu"))
    with pytest.raises(BindingError, match=r"attention_dropout=0\.1"):
        bind(make_model(FAMILY, attention_dropout=0.1))
    with pytest.raises(
        ValueError, match=r"num_speculative_tokens=2, but .* Kimi Delta Attention, .*; allowed for it: 0"
    ):
        RolloutWorker(bound_model(FAMILY), config=RolloutConfig(num_speculative_tokens=2))


def test_corrections_that_its_class_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker keeps corrections as the folder has them, which its class rounds before transformers 5.24; a trainer's
    class has to be told there, and does the same then.
    """
    model = make_model(FAMILY, torch.bfloat16)
    model.save_pretrained(tmp_path, save_original_format=False)  # experts together, as the module has them
    with RolloutWorker(tmp_path) as worker:
        outputs = worker.generate(SEQUENCES, PARAMS)
    if not type(model)._keep_in_fp32_modules_strict:
        with pytest.raises(BindingError, match=r"correction_bias is torch\.bfloat16; .* Kimi-Linear's does not"):
            bind(AutoModelForCausalLM.from_pretrained(tmp_path))
        monkeypatch.setattr(type(model), "_keep_in_fp32_modules_strict", ["e_score_correction_bias"])
    assert_matches_trainer(bind(AutoModelForCausalLM.from_pretrained(tmp_path)), outputs, [PARAMS] * 5)
