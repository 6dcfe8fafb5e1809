"""The benchmarks run from end to end on a model of a few thousand parameters and write what README.md says."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3MoeConfig

from samebit.benchmarks import (
    cache_growth,
    decode_step,
    drafts,
    fleet,
    gpu,
    gpu_experts,
    hybrid,
    images,
    latent,
    lora,
    lora_step,
    moe,
    prefix_cache,
    rollout,
    routing_mismatch,
    scheduler,
    state_budgets,
    tile_search,
    tune_tiles,
)
from samebit.benchmarks import gpu_figures as gpu_measure
from samebit.benchmarks.contestants import expert_layers
from samebit.benchmarks.contestants import huggingface as peers
from samebit.benchmarks.contestants import recurrent_cpu as recurrent
from samebit.benchmarks.rounds import limited
from samebit.benchmarks.rounds import machine_noise as neighbours
from samebit.benchmarks.rounds import turns as alternate
from samebit.benchmarks.workloads import models, workload
from samebit.kernels import bind
from samebit.rollout import RolloutWorker

from ..campaign import long
from ..patience import HANG

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"

TINY = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "tie_word_embeddings": True,
}


def test_rollout_writes_every_figure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(models.SHAPES, "5m", TINY)
    monkeypatch.setattr(rollout, "Workload", lambda: workload.Workload(2, 3, 20, 24))
    target, picture = tmp_path / "out.json", tmp_path / "out.png"
    monkeypatch.setattr(sys, "argv", ["rollout.py", "--quick", "--json", str(target), "--plot", str(picture)])
    rollout.main()
    content = json.loads(target.read_text())
    names = {"ratio_vs_hf_generate_5m", "exact_tax", "engine_overhead_share", "step_over_floor"}
    if peers.continuous_available():
        names.add("ratio_vs_hf_continuous_tuned_5m")
    assert names <= set(content["metrics"])
    for value in content["metrics"].values():
        assert 0 < value["min"] <= value["value"] <= value["max"] < math.inf
    assert {"device", "versions", "commit", "command", "threads", "omp_wait_policy"} <= set(content["meta"])
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_guesses_are_measured_by_n_grams_and_by_a_draft_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guesses of each kind are measured. The draft model is right of all greedy answers: the model's other layers add
    nothing."""
    seen: list[dict[str, float]] = []
    close = RolloutWorker.close
    monkeypatch.setattr(RolloutWorker, "close", lambda self: seen.append(self.stats()) or close(self))
    monkeypatch.setitem(models.SHAPES, "5m", TINY)
    sizes = drafts.Sizes(groups=((1, 2, 20),), rounds=1, cases=("again", "draft_right"))
    metrics = drafts.measure(sizes, "5m", "bf16")
    assert list(metrics) == ["5m_bf16_again_1x2", "5m_bf16_draft_right_1x2"]
    assert all(0 < figure.min <= figure.value <= figure.max for figure in metrics.values())
    by_model = seen[-2:]
    assert max(one["draft_tokens"] for one in by_model) > 20
    assert [one["draft_tokens"] for one in by_model] == [one["draft_tokens_accepted"] for one in by_model]


def test_a_wrong_number_of_tokens_is_refused() -> None:
    work = workload.Workload(prompts=1, samples=2, prompt_tokens=4, new_tokens=3)
    work.check("good", [[1, 2, 3], [1, 2, 4]], vocab_size=5)
    for outputs in ([[1, 2, 3]], [[1, 2, 3], [1, 2]], [[1, 2, 3], [1, 2, 5]], [[1, 2, 3], [1, 2, 3]]):
        with pytest.raises(RuntimeError, match="bad: "):
            work.check("bad", outputs, vocab_size=5)


def test_disturbed_rounds_are_dropped() -> None:
    calibration = alternate.Calibration(size=8, repeats=1)
    calibration.seconds = [1.0, 1.1, 0.9, 1.2, 1.0, 1.0]
    rounds = [
        alternate.Round(0, {"a": 2.0, "b": 1.0}, [1.0, 1.1]),
        alternate.Round(1, {"a": 9.0, "b": 1.0}, [0.9, 1.2]),
        alternate.Round(2, {"a": 4.0, "b": 1.0}, [1.0, 1.0]),
    ]
    steady = alternate.kept(rounds, calibration)
    assert [one.number for one in steady] == [0, 2]
    assert alternate.ratio(steady, "a", "b") == alternate.Spread(3.0, 2.0, 4.0)
    assert [one.number for one in alternate.kept(rounds[1:2], calibration)] == [1]
    rounds[2].others.append(0.5)
    assert [one.number for one in alternate.kept(rounds, calibration)] == [0]


def test_other_processes_are_seen() -> None:
    crowd = neighbours.Neighbours()
    code = "import time; end = time.time() + 1\nwhile time.time() < end: pass"
    subprocess.run([sys.executable, "-c", code], check=True)
    cores = os.cpu_count() or 1
    assert crowd.share() > 0.5 / cores


def test_who_begins_changes() -> None:
    order: list[str] = []

    def turn(name: str) -> Any:
        return lambda number: order.append(f"{name}{number}") or 1.0

    calibration = alternate.Calibration(size=8, repeats=1)
    alternate.alternate({"a": turn("a"), "b": turn("b")}, 2, calibration)
    assert order == ["a0", "b0", "b1", "a1"]
    assert len(calibration.seconds) == 4


def test_scheduler_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "STEPS", 20)
    metrics = scheduler.measure(few=1, many=50, repetitions=2)
    assert set(metrics) == {"schedule_growth", "schedule_us_1_waiting", "schedule_us_50_waiting"}
    assert all(0 < value.min <= value.value <= value.max for value in metrics.values())


def test_prefix_cache_figures() -> None:
    sizes = prefix_cache.Sizes(
        requests=4, shared=48, own_mean=10, outputs=(2, 5), groups=2, samples=3, group_prompt=33, group_output=5,
        conversations=2, turns=3, turn_input=5, turn_output=20, unshared_output=4,
    )  # fmt: skip
    model = models.build(TINY, models.DTYPES["fp32"], sizes.longest)
    metrics = prefix_cache.measure(model, sizes, rounds=1)
    assert set(metrics) == {
        "speedup_over_ideal_out2", "requests_per_second_gain_out2", "speedup_over_ideal_out5",
        "requests_per_second_gain_out5", "first_wave_hit_ratio", "group_prefill_ratio", "multi_turn_skip_ratio",
        "no_share_ratio",
    }  # fmt: skip
    assert metrics["first_wave_hit_ratio"].value == 3 / 4
    assert metrics["group_prefill_ratio"].value == 1
    assert metrics["multi_turn_skip_ratio"].value == 1


def test_hybrid_figures() -> None:
    shape = {
        **models.HYBRID, "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "mamba_num_heads": 3,
        "mamba_head_dim": 20, "ssm_state_size": 17, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
    }  # fmt: skip
    sizes = hybrid.Sizes(
        conversations=2, turns=3, first_prompt=70, turn_input=5, turn_output=70, requests=4, shared=100, own=3
    )
    steps = {
        "exact_over_recurrent": decode_step.Sizes(decode_step.SSMShape(3, 20, 1, 17, 4), 1, (1, 2), 1),
        "exact_over_recurrent_delta": decode_step.Sizes(decode_step.DeltaShape(1, 2, 20, 17, 4), 1, (2,), 1),
    }
    delta = {
        **models.DELTA, "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "full_attention_interval": 2, "linear_num_key_heads": 1, "linear_num_value_heads": 2,
        "linear_key_head_dim": 20, "linear_value_head_dim": 17, "num_attention_heads": 2, "num_key_value_heads": 1,
        "head_dim": 16,
    }  # fmt: skip
    built = {
        "hybrid": models.build_hybrid(shape, sizes.longest), "gdn": models.build_delta(delta, sizes.longest)
    }  # fmt: skip
    metrics = hybrid.measure(built, sizes, workload.Workload(2, 3, 20, 24), steps, rounds=1)
    assert set(metrics) == {
        "exact_over_recurrent_1", "exact_over_recurrent_2", "exact_over_recurrent_1_scan_alone",
        "exact_over_recurrent_2_scan_alone", "exact_over_recurrent_delta_2",
        "exact_over_recurrent_delta_2_scan_alone", "multi_turn_computed_over_ideal", "multi_turn_ttft_gain",
        "multi_turn_ttft_ms", "first_wave_hit_ratio_unaligned", "ratio_vs_hf_generate_hybrid",
        "tokens_per_second_samebit_hybrid", "tokens_per_second_hf_generate_hybrid",
        "multi_turn_computed_over_ideal_gdn", "multi_turn_ttft_gain_gdn", "multi_turn_ttft_ms_gdn",
        "first_wave_hit_ratio_unaligned_gdn", "ratio_vs_hf_generate_gdn", "tokens_per_second_samebit_gdn",
        "tokens_per_second_hf_generate_gdn",
    }  # fmt: skip
    assert all(0 < value.min <= value.value <= value.max < math.inf for value in metrics.values())
    for kind in ("", "_gdn"):
        assert metrics[f"first_wave_hit_ratio_unaligned{kind}"].value == 3 / 4
        assert metrics[f"multi_turn_computed_over_ideal{kind}"].value == 1


def test_hybrid_goes_on_with_the_parts_that_are_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    target, name = tmp_path / "out.json", "exact_over_recurrent_delta"
    monkeypatch.setattr(hybrid, "STEPS", {name: decode_step.DeltaShape(1, 2, 20, 17, 4)})
    monkeypatch.setattr(hybrid, "MODELS", {})
    monkeypatch.setattr(sys, "argv", ["hybrid.py", "--quick", "--json", str(target)])
    hybrid.main()
    written = json.loads(target.read_text())
    assert list(written["meta"]["parts"]) == [name]
    assert set(written["metrics"]) == {f"{name}_{n}{end}" for n in (1, 16, 64) for end in ("", "_scan_alone")}
    hybrid.main()
    assert json.loads(target.read_text()) == written


@pytest.mark.parametrize(("head_dim", "groups"), [(24, 1), (64, 2), (129, 4)])
def test_the_recurrent_peer_computes_the_recurrence(head_dim: int, groups: int) -> None:
    """What decode steps are measured against computes the scan of Mamba2, in float32, near the float64 oracle."""
    from ..kernels.reference import ssm_scan

    shape = decode_step.SSMShape(4, head_dim, groups, 33, 4)
    peer = recurrent.Recurrence.empty(shape, 2)
    torch.manual_seed(0)
    tokens, sizes = 9, [shape.inner, groups * 33, groups * 33]
    xbc, dt = torch.randn(tokens, 2, sum(sizes)), torch.randn(tokens, 2, 4)
    rate, bias, skip = -torch.rand(4), torch.randn(4), torch.randn(4)
    slots = torch.tensor([1, 0], dtype=torch.int32)
    found = torch.stack([peer.step(xbc[t], dt[t], rate, bias, skip, slots) for t in range(tokens)])
    for row in range(2):
        x, b, c = (
            part.unflatten(-1, (count, -1))
            for part, count in zip(xbc[:, row].split(sizes, -1), (4, groups, groups), strict=True)
        )
        expected = ssm_scan(x, b, c, dt[:, row], rate, bias, skip, (0.0, math.inf)).flatten(1)
        torch.testing.assert_close(found[:, row], expected.float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("key_heads", "decays"), [(2, 4), (4, 80)])
def test_the_recurrent_peer_of_the_delta_rule_computes_it(key_heads: int, decays: int) -> None:
    """What decode steps are measured against computes the delta rule, in float32, near the float64 oracle."""
    from ..kernels.reference import delta_rule

    shape = decode_step.DeltaShape(key_heads, 4, 20, 150, 4, by_channel=decays > 4)
    peer = decode_step.DeltaRecurrence.empty(shape, 2)
    torch.manual_seed(0)
    qkv, decay, beta = torch.randn(5, 2, shape.conv_width), -torch.rand(5, 2, decays), torch.rand(5, 2, 4)
    slots = torch.tensor([1, 0], dtype=torch.int32)
    found = torch.stack([peer.step(qkv[t], decay[t], beta[t], slots) for t in range(5)])
    for row in range(2):
        sizes, counts = [20 * key_heads, 20 * key_heads, 600], (key_heads, key_heads, 4)
        q, k, v = (x.unflatten(-1, (n, -1)) for x, n in zip(qkv[:, row].split(sizes, -1), counts, strict=True))
        expected = delta_rule(q, k, v, decay[:, row], beta[:, row]).flatten(1)
        torch.testing.assert_close(found[:, row], expected.float(), rtol=1e-4, atol=1e-4)


@long
def test_cache_growth_figures() -> None:
    sizes = cache_growth.Sizes(
        small_pool=50, large_pool=200, prompt=640, evicted=20, repetitions=1, states=9, followers=3, held=70
    )
    metrics = cache_growth.measure(sizes)
    assert set(metrics) == {"admission_ms_640", "admission_uncached_ms_640", "eviction_growth", "clear_ms_200"}
    assert all(value.min > 0 for value in metrics.values())


@long
def test_weight_sync_figures(tmp_path: Path) -> None:
    target = tmp_path / "out.json"
    command = [
        sys.executable,
        str(FOLDER / "weight_sync.py"),
        "--megabytes",
        "1",
        "--rounds",
        "1",
        "--steps",
        "2",
        "--warmup",
        "20",
        "--json",
        str(target),
    ]
    subprocess.run(command, check=True, cwd=tmp_path, timeout=HANG, capture_output=True)
    metrics = json.loads(target.read_text())["metrics"]
    names = {
        "same_process_over_memcpy",
        "shm_over_memcpy",
        "gloo_over_broadcast",
        "same_module_ms",
        "delta_bytes_over_dense",
        "sleep_wake_ms",
        "peak_extra_buckets",
    }
    assert names <= set(metrics)
    assert all(0 < value["min"] <= value["value"] <= value["max"] < math.inf for value in metrics.values())
    assert metrics["delta_bytes_over_dense_one_percent"]["value"] < 0.05
    curve = [metrics[f"delta_bytes_over_dense_lr{rate}"]["value"] for rate in ("1e-06", "1e-05", "1e-04")]
    assert curve == sorted(curve)
    assert curve[1] == metrics["delta_bytes_over_dense"]["value"] < 0.3


def test_gpu_measures_a_model_on_the_cpu_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = gpu_measure.Sizes((1, 2), prompt=8, training=(2, 8), new_tokens=3, prefill_rows=16, max_model_len=128,
                              repeats=1)  # fmt: skip
    parts = [part for part in (*gpu.PARTS, *gpu.BESIDE_INEXACT) if part not in ("recurrent", "profile")]
    report = gpu.Report({"gpu": "none"}, tmp_path / "new" / "out.json")
    for part in parts:
        item = gpu.Item("tiny", part)
        for figure in gpu.measured(item, TINY, sizes, "cpu"):
            report.take(item, figure)
    assert report.figures["tiny exactness: exactness: tokens compared"].value == 63
    assert report.figures["tiny exactness: exactness: tokens that differ"].value == 0
    assert report.figures["tiny training: training step"].value > 0
    with pytest.raises(RuntimeError, match="the model is not on a GPU"):
        list(gpu.measured(gpu.Item("tiny", "profile"), TINY, sizes, "cpu"))
    layer = Qwen3MoeConfig(hidden_size=64, moe_intermediate_size=32, num_experts=5, num_experts_per_tok=2)
    found = {figure.name: figure.value for figure in gpu_experts.experts(layer, sizes, "cpu")}
    assert found["rows of 16 that differ alone"] == 0
    assert found["2 rows, over grouped_mm"] > 0
    gpu.run_all([gpu.Item("tiny", "decode")], report, 0.0, [])
    report.table()
    assert "not run: the time was up" in capsys.readouterr().out
    written = json.loads((tmp_path / "new" / "out.json").read_text())
    assert written["meta"]["troubles"] == {"tiny decode": "not run: the time was up"}
    assert list(written["metrics"]) == list(report.figures), "written as they came"
    with pytest.raises(ValueError, match="part 'decoding'; allowed: exactness, decode"):
        gpu.measured(gpu.Item("tiny", "decoding"), TINY, sizes, "cpu")


def test_what_stays_reserved_is_beyond_each_weight_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What stays reserved counts a head that is the embedding once; a stand-in is the allocator of a GPU here."""
    sizes = gpu_measure.Sizes((1,), prompt=8, training=(2, 8), new_tokens=3, prefill_rows=16, max_model_len=128,
                              repeats=1)  # fmt: skip
    model, worker_of = bind(models.build(TINY, torch.float32, 128)), gpu_measure.worker_of
    assert model.lm_head.weight is model.get_input_embeddings().weight
    storages = {part.data_ptr(): part.nbytes for part in (*model.state_dict().values(), *model.buffers())}
    monkeypatch.setattr(gpu_measure, "worker_of", lambda model, sizes, count, device: worker_of(model, sizes, 4, "cpu"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: sum(storages.values()) + 2**30)
    *_, reserved = gpu_measure.control(model, sizes, "cuda")
    assert (reserved.name, reserved.value) == ("reserved memory beyond the weights while kv_cache sleeps", 1.0)


def test_gpu_begins_with_what_matters_most() -> None:
    turns = [str(item) for item in gpu.items(list(gpu.SHAPES))]
    assert turns[:3] == ["qwen3-8b exactness", "qwen3-8b decode", "qwen3-8b training"]
    assert turns[-4:] == [f"{name} hugging_face" for name in gpu.SHAPES], "what may hang comes last"
    assert len(turns) == len(set(turns)) == 4 * 9 + 2
    assert [turn for turn in turns if "recurrent" in turn] == ["nemotron-h-8b recurrent"]


@pytest.mark.soak
def test_a_part_that_hangs_or_crashes_costs_itself_alone(capfd: pytest.CaptureFixture[str]) -> None:
    """What a part has found before it hangs or crashes is kept, and the processes that it started end with it."""

    def outcome(script: str, seconds: float) -> tuple[list[Any], str | None]:
        found: list[Any] = []
        return found, limited.run_limited([sys.executable, "-c", script], seconds, found.append)

    line = 'import os, sys, time; print("RESULT {\\"value\\": 3}"); '
    assert outcome(line + 'print("loud" * 100000)', 60) == ([{"value": 3}], None)
    assert outcome(line + "os._exit(7)", 60) == ([{"value": 3}], "failed: exit code 7")
    assert outcome(line + "os.abort()", 60) == ([{"value": 3}], "failed: exit code -6")
    stubborn = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); "
    assert outcome(stubborn + line + "os.fork(); time.sleep(600)", 5) == ([{"value": 3}], "stopped: 5 s were over")
    assert "loud" in capfd.readouterr().out


def test_the_recurrent_peer_of_a_gpu_computes_the_recurrence() -> None:
    """The GPU's recurrence, in Triton's interpreter, is near the CPU's; and both are measured on the same steps."""
    pytest.importorskip("triton")
    from samebit.benchmarks.contestants.recurrent_cuda import recurrent_step

    shape = decode_step.SSMShape(4, 20, 2, 17, 4)
    peer = recurrent.Recurrence.empty(shape, 3)
    states = torch.zeros(3, 4, 17, 20)
    torch.manual_seed(0)
    rate, bias, skip = -torch.rand(4), torch.randn(4), torch.randn(4)
    slots = torch.tensor([2, 0], dtype=torch.int32)
    for _ in range(3):
        step = torch.randn(2, shape.conv_width), torch.randn(2, 4), rate, bias, skip, slots
        torch.testing.assert_close(recurrent_step(*step, states, shape), peer.step(*step), rtol=1e-5, atol=1e-5)
    layout = gpu_measure.StateLayout(4, shape, 64)
    for run in gpu_measure._scan_steps(layout, shape, 2, "cpu"):
        run()


def test_the_tuner_takes_the_fastest_tiles_whose_bits_are_equal() -> None:
    search = tile_search
    fast = next(search.wide_tiles())
    slow, unequal, other = list(search.narrow_tiles())[:3]
    times = {
        slow: {16: 7.0, 64: 7.0, 128: 8.0, 256: 9.0, 512: 9.9, 1024: 20.0},
        fast: {4096: 1.0, 16: 10.0, 64: 10.0, 128: 10.0, 256: 10.0, 512: 10.0, 1024: 10.0},
        unequal: {16: 1.0, 64: 1.0, 128: 1.0, 256: 1.0, 512: 1.0, 1024: 1.0},
        other: {16: 6.0, 64: 6.9, 128: 9.0, 256: 11.0, 512: 11.0, 1024: 11.0},
    }  # fmt: skip

    def measured(tile: Any, counts: Any) -> dict[int, float] | None:
        return {rows: times[tile][rows] for rows in counts} if set(counts) <= set(times.get(tile, ())) else None

    def equal(wide: Any, rung: Any) -> bool:
        assert wide == fast, "each rung is compared with the tile for many rows"
        return rung.tile != unequal

    entry = search.tuned_layer(4096, 1024, "bfloat16", measured, equal)
    assert entry.tile == fast
    assert entry.few == (search.Rung(16, other), search.Rung(256, slow)), "by at least two per cent"
    assert entry.fits(4096, 1024, "bfloat16")
    assert not entry.fits(4096, 1025, "bfloat16")
    alone = search.tuned_layer(4096, 1024, "bfloat16", measured, lambda wide, rung: False)
    assert (alone.tile, alone.few) == (fast, ())
    with pytest.raises(ValueError, match=r"none of \d+ candidates compiles and fits"):
        search.tuned_layer(4096, 1024, "bfloat16", lambda tile, counts: None, equal)


def test_the_tuner_knows_the_layers_of_a_model_and_keeps_what_it_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tune, search = tune_tiles, tile_search
    layers, heads = tune.sizes_of([tune.shape_config("qwen3-8b"), tune.shape_config("nemotron-h-8b")])
    assert {(4096, 1024), (4096, 4096), (4096, 12288), (12288, 4096), (4096, 151936)} <= set(layers)
    assert {(4096, 6144), (4096, 24576)} <= set(layers), "what q, k and v are in one launch; gate and up"
    assert heads == [search.Heads(32, 8, 128)]
    turns = tune.commands([tune.shape_config("qwen3-8b"), tune.shape_config("nemotron-h-8b")])
    assert ["--heads", "32", "8", "128"] in turns[:8], "the first model's first"
    assert ["--layer", "4096", "12288"] in turns[:8]
    assert turns.count(["--layer", "4096", "4096"]) == 1
    assert len(turns) == len(layers) + len(heads)
    path, device = tmp_path / "tiles.json", torch.device("cpu")
    tile = search.MatmulTile(64, 128, 64, 4, 4)
    found = [search.MatmulEntry(("bfloat16",), tile, (), search.Sizes(size, size)) for size in (100, 200)]
    monkeypatch.setattr(tune, "measured_on", lambda: "nothing")
    for entry in found:
        tune.keep(path, device, matmul=entry)
    default = tune.read_tiles(path)["default"]
    assert default.tuned == "nothing"
    assert default.matmul[:2] == (found[1], found[0])
    assert default.matmul[2:] == tune.tiles.families()["default"].matmul


def test_the_tuner_does_not_take_a_broken_gpu_for_a_tile_that_does_not_fit() -> None:
    """A tile that does not fit is passed over; an illegal address, after which every launch fails, ends the search."""

    def too_large() -> dict[int, float]:
        raise tune_tiles.OutOfResources(300_000, 232_448, "shared memory")

    def broken() -> dict[int, float]:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    assert tune_tiles.fitting(too_large) is None
    with pytest.raises(RuntimeError, match="illegal memory access"):
        tune_tiles.fitting(broken)


FEW_EXPERTS = models.EXPERTS | {
    "vocab_size": 97, "hidden_size": 32, "moe_intermediate_size": 16, "num_experts": 8, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
}  # fmt: skip


@long
def test_moe_figures() -> None:
    comparison = moe.Comparison()
    comparison.calibration = alternate.Calibration(size=8)
    sizes = moe.Sizes(rows=(3, 20), few=4, many=32, turn_rows=20, rounds=1)
    metrics = moe.measure(FEW_EXPERTS, workload.Workload(2, 3, 20, 8), sizes, 1, comparison)
    of_layers = ("layer_over_grouped_mm", "layer_ms", "layer_growth", "layer_growth_same_experts", "grouped_mm_growth")
    of_rollouts = (
        "ratio_vs_hf_generate_moe", "exact_tax_moe", "tokens_per_second_samebit_moe",
        "tokens_per_second_samebit_inexact_moe", "tokens_per_second_hf_generate_moe",
    )  # fmt: skip
    names = {*of_rollouts, *(f"{name}_{rows}" for name in of_layers for rows in (3, 20))}
    assert set(metrics) == {f"{name}{suffix}" for name in names for suffix in ("", "_bf16")}
    assert all(0 < value.min <= value.value <= value.max < math.inf for value in metrics.values())
    assert len(comparison.rounds) == 2 * (2 * 4 + 1)
    assert comparison.disturbed <= len(comparison.rounds)


def test_layers_that_compute_something_else_are_not_compared() -> None:
    layers = expert_layers.ExpertLayers(FEW_EXPERTS, torch.float32)
    layers.check(7)
    with torch.no_grad():
        layers._theirs[1].gate.weight.neg_()
    with pytest.raises(RuntimeError, match="a layer of experts is off by "):
        layers.check(7)


def test_routing_mismatch_figures() -> None:
    metrics = routing_mismatch.measure(FEW_EXPERTS, routing_mismatch.Sizes(4, 20, 6, 2, 8))
    assert len(metrics) == 2 * (2 * 6 + 1)
    assert all(0 <= value.value <= 1000 for value in metrics.values())
    assert all(value.value == 0 for name, value in metrics.items() if name.startswith("samebit"))
    found = routing_mismatch.shares("x", np.array([[[[1, 2]], [[3, 4]]]]), np.array([[[[2, 1]], [[3, 5]]]]))
    assert [value.value for value in found.values()] == [250, 500]


def test_state_budgets_writes_every_figure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    few = state_budgets.Budgets(conversations=2, turns=2, checkpoints_each=(0.5, 2.0))
    monkeypatch.setattr(state_budgets, "Budgets", lambda: few)
    monkeypatch.setattr(sys, "argv", ["state_budgets.py", "--json", str(tmp_path / "out.json")])
    state_budgets.main()
    found = {name: one["value"] for name, one in json.loads((tmp_path / "out.json").read_text())["metrics"].items()}
    assert found["skip_ratio_with_2.0_checkpoints_each"] == 1.0 > found["skip_ratio_with_0.5_checkpoints_each"]
    assert found["evicted_misses_with_2.0_checkpoints_each"] == 0 < found["evicted_misses_with_0.5_checkpoints_each"]


def test_lora_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(models.SHAPES, "5m", TINY)
    sizes = lora.Sizes(shape="5m", rank=2, sequences=(1, 3), new_tokens=2, rounds=1)
    metrics = lora.measure(sizes, "fp32")
    titles = ("decode_tax", "shared_decode_tax", "mixed_decode_tax", "prefill_tax")
    assert metrics.keys() == {f"{title}_{count}" for title in titles for count in (1, 3)}


def test_figures_of_a_step_that_trains_an_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(models.SHAPES, "5m", TINY)
    sizes = lora_step.Sizes("5m", rank=2, prompts=2, samples=2, prompt_tokens=3, new_tokens=2, rounds=1)
    metrics = lora_step.measure(sizes)
    assert metrics["lora_gib"].value < metrics["full_gib"].value / 2
    assert {f"{name}_{part}" for name in ("full", "lora") for part in lora_step.PARTS} < metrics.keys()


def test_fleet_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """The router skips what one cache would, shares the load evenly, and leaves a full replica (on one seed)."""
    monkeypatch.setattr(fleet, "SEEDS", range(1))
    metrics = fleet.prefixes()
    assert metrics["skipped_of_one_cache_router"].value >= 0.95
    assert metrics["load_over_even_router"].value <= 1.2
    assert metrics["skipped_of_one_cache_random"].value < 0.9
    monkeypatch.setattr(fleet, "POLICIES", ("router", "least_loaded", "sticky"))
    limited = fleet.one_at_its_limit()
    assert limited["throughput_of_best_router"].value >= 0.9
    assert limited["throughput_of_best_sticky"].value < 0.5
    assert limited["share_that_left_the_limited_replica"].value > 0.5
    many = fleet.many(1600)
    assert many["requests_64_replicas"].value == 1600
    assert many["shadow_blocks_64_replicas"].value > 0


@long
def test_image_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"hidden_size": 40, "num_heads": 2, "intermediate_size": 30, "depth": 2, "fullatt_block_indexes": [1]}
    monkeypatch.setattr(images, "VISION", {**images.VISION, **small})
    sizes = images.Sizes(grid=(4, 6), prompts=2, samples=2, text=5, new_tokens=3, rounds=1)
    metrics = images.measure(sizes, alternate.Calibration(size=8))
    assert set(metrics) == {
        f"{name}_{dtype}"
        for name in ("tower_over_hf", "tower_backward_over_hf", "tower_ms", "ratio_vs_hf_generate")
        for dtype in ("fp32", "bf16")
    }


@long
def test_latent_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latent, "SHAPES", {"small": latent.Heads(2, 16, 4, 6, 8)})
    monkeypatch.setattr(latent, "SPARSE", latent.Sparse(latent.Heads(2, 16, 4, 6, 8), 2, 8, 16))
    sizes = latent.Sizes(
        sequences=2, length=20, repeats=1, rounds=1, requests=1, shared=33, own=3, layers=1, long=40, long_sequences=2
    )
    metrics = latent.measure(sizes, alternate.Calibration(size=8))
    of_decode = {f"decode_{name}_small_{dtype}" for name in ("gain", "ms") for dtype in ("fp32", "bf16")}
    of_sparse = {f"sparse_{name}_{dtype}" for name in ("over_dense", "over_work", "ms") for dtype in ("fp32", "bf16")}
    assert set(metrics) == {*of_decode, *of_sparse, "ttft_gain", "ttft_gain_over_ideal", "ttft_cached_ms"}
    assert all(0 < value.min <= value.value <= value.max < math.inf for value in metrics.values())
