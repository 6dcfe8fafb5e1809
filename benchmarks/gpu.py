"""Exactness, then speed, on one GPU: random-weight models by shape; the table comes last.

    python benchmarks/gpu.py [--quick] [--json FILE] [--models NAME ...] [--minutes 8]

Runs from a checkout in which nothing is installed but torch, triton, transformers and numba. A part that fails is
reported with its error and the others go on; a part whose turn comes after the time is up is "not run".
"""

import argparse
import json
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

if find_spec("samebit") is None:  # a bare machine: the checkout itself is enough
    sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from transformers import PreTrainedModel  # noqa: E402

from samebit.benchmarks import gpu_figures as measure  # noqa: E402
from samebit.benchmarks.gpu_experts import QWEN3_30B_A3B, experts  # noqa: E402
from samebit.benchmarks.rounds import results_file  # noqa: E402
from samebit.benchmarks.workloads import models  # noqa: E402
from samebit.kernels import bind  # noqa: E402

_QWEN = {"vocab_size": 151936, "num_key_value_heads": 8, "head_dim": 128}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        **_QWEN, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "qwen3-1.7b": {
        **_QWEN, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": {
        **_QWEN, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
    "nemotron-h-8b": {
        "vocab_size": 131072, "hidden_size": 4096, "intermediate_size": 21504, "mamba_num_heads": 128,
        "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": False,
        "layers_block_type": ["mamba", "mlp"] * 3 + ["mamba", "attention", "mlp"]
        + (["mamba", "mlp"] * 4 + ["mamba", "attention", "mlp"]) * 3 + ["mamba", "mlp"] * 5,
    },
}  # fmt: skip
"""The last is Nemotron-H-8B-like: 24 Mamba, 4 attention and 24 MLP layers."""


class Report:
    """Figures and failures so far; prints each as it comes."""

    def __init__(self, minutes: float) -> None:
        self.ends = time.monotonic() + 60 * minutes
        self.figures: dict[str, measure.Figure] = {}
        self.troubles: dict[str, str] = {}

    def run(self, name: str, part: Iterator[measure.Figure]) -> None:
        """Take the figures of one part, unless the time is up."""
        if time.monotonic() > self.ends:
            self.troubles[name] = "not run: the time was up"
            return
        try:
            for figure in part:
                self.figures[f"{name}: {figure.name}"] = figure
                print(f"{name}: {figure.name}: {figure.value:,.4g} {figure.unit}", flush=True)
        except Exception as error:  # one part's failure must not cost the others' figures
            traceback.print_exc()
            self.troubles[name] = f"failed: {type(error).__name__}: {' '.join(str(error).split())[:200]}"

    def table(self) -> None:
        print(f"\n{'figure':<72}{'value':>14}")
        for name, figure in self.figures.items():
            print(f"{name:<72}{figure.value:>14,.4g} {figure.unit}")
        for name, trouble in self.troubles.items():
            print(f"{name:<72}{trouble}")


def made(shape: dict[str, Any], sizes: measure.Sizes, device: str) -> PreTrainedModel:
    """Return a random bfloat16 model on the device, unbound."""
    with torch.device(device):
        if "layers_block_type" in shape:
            return models.build_hybrid(shape, sizes.max_model_len).to(torch.bfloat16)
        return models.build(shape, torch.bfloat16, sizes.max_model_len)


def measure_model(name: str, shape: dict[str, Any], sizes: measure.Sizes, device: str, report: Report) -> None:
    """Measure all parts. At most two models exist at once, each in its own call, so that its memory is released."""
    model = bind(made(shape, sizes, device))
    for part in (
        measure.exactness, measure.decode, measure.recurrent, measure.prefill, measure.cache, measure.control,
    ):  # fmt: skip
        report.run(f"{name} {part.__name__}", part(model, sizes, device))
    _beside_inexact(name, model, shape, sizes, device, report)
    report.run(f"{name} hugging_face", measure.hugging_face(model, made(shape, sizes, device), sizes, device))


def _beside_inexact(
    name: str, model: PreTrainedModel, shape: dict[str, Any], sizes: measure.Sizes, device: str, report: Report
) -> None:
    inexact = bind(made(shape, sizes, device), exact=False)
    for part in (measure.tax, measure.training):
        report.run(f"{name} {part.__name__}", part(model, inexact, sizes, device))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--quick", action="store_true", help="the smallest model, 1 and 16 sequences, once")
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--minutes", type=float, default=7.5, help="no part begins after this time (default 7.5)")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error(f"torch {torch.__version__} sees no CUDA device")
    sizes = measure.Sizes()
    if args.quick:
        sizes = replace(sizes, sequences=(1, 16), repeats=1, new_tokens=16)
    report = Report(args.minutes)
    report.run("experts of qwen3-30b-a3b", experts(QWEN3_30B_A3B, sizes, "cuda"))
    for name in args.models[:1] if args.quick else args.models:
        measure_model(name, SHAPES[name], sizes, "cuda", report)
        torch.cuda.empty_cache()
    meta = results_file.describe(
        gpu=torch.cuda.get_device_name(), triton=__import__("triton").__version__, sizes=asdict(sizes),
        troubles=report.troubles,
    )  # fmt: skip
    if args.json:
        metrics = {n: {"value": f.value, "min": f.value, "max": f.value} for n, f in report.figures.items()}
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({"meta": meta, "metrics": metrics}, indent=2) + "\n")
    report.table()
    print(f"{meta['gpu']}, torch {torch.__version__}, triton {meta['triton']}, commit {meta['commit']}, {meta['date']}")


if __name__ == "__main__":
    main()
