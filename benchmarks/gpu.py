"""Measure exactness, then speed, on one GPU: random-weight models by shape; the table comes last.

    python benchmarks/gpu.py [--quick] [--json FILE] [--models NAME ...] [--minutes 8]

Runs from a checkout in which nothing is installed but torch, triton, transformers and numba. Each part of a model is a
process of its own with a limit (`rounds/limited.py`), and the file is written after each: a part that fails or hangs
is reported, and the others go on. What matters most comes first, for the 8B model before all others; a part whose turn
comes after the time is up is "not run".
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
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
from samebit.benchmarks.gpu_profile import profiles  # noqa: E402
from samebit.benchmarks.rounds import results_file  # noqa: E402
from samebit.benchmarks.rounds.command_line import benchmark_parser  # noqa: E402
from samebit.benchmarks.rounds.limited import emit, run_limited  # noqa: E402
from samebit.benchmarks.workloads import models  # noqa: E402
from samebit.kernels import bind  # noqa: E402

_QWEN = {"vocab_size": 151936, "num_key_value_heads": 8, "head_dim": 128}
SHAPES: dict[str, dict[str, Any]] = {
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
    "qwen3-0.6b": {
        **_QWEN, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "qwen3-1.7b": {
        **_QWEN, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
}  # fmt: skip
"""Lists the models by shape, in the order of their turns. The second is Nemotron-H-8B-like: 24 Mamba, 4 attention and
24 MLP layers."""

EXPERTS = "experts of qwen3-30b-a3b"
"""Stands for a model where the part is one layer."""

PARTS = {
    "exactness": measure.exactness, "decode": measure.decode, "recurrent": measure.recurrent,
    "profile": profiles, "prefill": measure.prefill, "cache": measure.cache, "control": measure.control,
}  # fmt: skip
"""Lists the parts that take one model."""

BESIDE_INEXACT = {"training": measure.training, "tax": measure.tax}
"""Lists the parts that take the same model bound with ``exact=False`` too."""

HUGGING_FACE = "hugging_face"

FIRST = ("exactness", "decode", "training", "recurrent")
"""Is done of every model before the rest is done of any."""

LIMITS = {"exactness": 150.0, "decode": 170.0, "training": 120.0, HUGGING_FACE: 90.0}
"""Holds the seconds that a part may take, `LIMIT` if it is not here."""

LIMIT = 90.0
LEAST = 15.0
"""No part is begun with fewer seconds left."""


@dataclass(frozen=True)
class Item:
    """Describes one process: a part of a model."""

    model: str
    part: str

    def __str__(self) -> str:
        return self.model if self.model == EXPERTS else f"{self.model} {self.part}"


def items(names: list[str]) -> list[Item]:
    """Return all parts in the order of their turns. (Peers that may hang come last.)"""
    first = [Item(name, part) for name in names for part in FIRST if part != "recurrent" or _is_hybrid(name)]
    later = [Item(name, part) for name in names for part in (*PARTS, *BESIDE_INEXACT) if part not in FIRST]
    return [*first, Item(EXPERTS, "layer"), *later, *(Item(name, HUGGING_FACE) for name in names)]


def _is_hybrid(name: str) -> bool:
    return "layers_block_type" in SHAPES[name]


@dataclass
class Report:
    """Collects figures and failures so far; writes and prints each as it comes."""

    meta: dict[str, Any]
    file: Path | None = None
    figures: dict[str, measure.Figure] = field(default_factory=dict)
    troubles: dict[str, str] = field(default_factory=dict)

    def take(self, item: Item, figure: measure.Figure) -> None:
        self.figures[f"{item}: {figure.name}"] = figure
        print(f"{item}: {figure.name}: {figure.value:,.4g} {figure.unit}", flush=True)
        self.save()

    def fail(self, item: Item, trouble: str) -> None:
        self.troubles[str(item)] = trouble
        print(f"{item}: {trouble}", flush=True)
        self.save()

    def save(self) -> None:
        """Write the file anew, so that a run that is cut short leaves what it had."""
        if self.file is None:
            return
        metrics = {n: {"value": f.value, "min": f.value, "max": f.value} for n, f in self.figures.items()}
        content = {"meta": {**self.meta, "troubles": self.troubles}, "metrics": metrics}
        self.file.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self.file.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(content, indent=2) + "\n")
        os.replace(unfinished, self.file)

    def table(self) -> None:
        print(f"\n{'figure':<72}{'value':>14}")
        for name, figure in self.figures.items():
            print(f"{name:<72}{figure.value:>14,.4g} {figure.unit}")
        for name, trouble in self.troubles.items():
            print(f"{name:<72}{trouble}")


def run_all(turns: list[Item], report: Report, minutes: float, more: list[str]) -> None:
    """Run each in its process, until the time is up. ``more``: options that go on to it."""
    ends = time.monotonic() + 60 * minutes
    for item in turns:
        left = ends - time.monotonic()
        if left < LEAST:
            report.fail(item, "not run: the time was up")
            continue
        command = [sys.executable, str(Path(__file__).resolve()), "--item", item.model, item.part, *more]
        limit = min(LIMITS.get(item.part, LIMIT), left)
        trouble = run_limited(command, limit, lambda found, item=item: report.take(item, measure.Figure(**found)))
        if trouble is not None:
            report.fail(item, trouble)


def made(shape: dict[str, Any], sizes: measure.Sizes, device: str) -> PreTrainedModel:
    """Return a random bfloat16 model on the device, unbound; of float32 weights nothing would be left but the room."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            if "layers_block_type" in shape:
                return models.build_hybrid(shape, sizes.max_model_len).to(torch.bfloat16)
            return models.build(shape, torch.bfloat16, sizes.max_model_len)
    finally:
        torch.set_default_dtype(before)


def measured(item: Item, shape: dict[str, Any], sizes: measure.Sizes, device: str) -> Iterator[measure.Figure]:
    """Measure one part, in this process.

    Raises:
        ValueError: there is no such part.
    """
    if item.part in PARTS:
        return PARTS[item.part](bind(made(shape, sizes, device)), sizes, device)
    if item.part in BESIDE_INEXACT:
        inexact = bind(made(shape, sizes, device), exact=False)
        return BESIDE_INEXACT[item.part](bind(made(shape, sizes, device)), inexact, sizes, device)
    if item.part == HUGGING_FACE:
        return measure.hugging_face(bind(made(shape, sizes, device)), made(shape, sizes, device), sizes, device)
    raise ValueError(f"part {item.part!r}; allowed: {', '.join((*PARTS, *BESIDE_INEXACT, HUGGING_FACE))}")


def run_item(item: Item, sizes: measure.Sizes, device: str) -> None:
    """Measure one part and print its figures, in the process that is its own."""
    found = (
        experts(QWEN3_30B_A3B, sizes, device)
        if item.model == EXPERTS
        else measured(item, SHAPES[item.model], sizes, device)
    )
    for figure in found:
        emit(**asdict(figure))


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="fewer sequences, once; without --models, the smallest alone"
    )
    parser.add_argument("--models", nargs="+", choices=SHAPES)
    parser.add_argument("--minutes", type=float, default=7.5, help="all parts end by then (default 7.5)")
    parser.add_argument(
        "--item", nargs=2, metavar=("MODEL", "PART"), help="one part, in this process, as lines of JSON"
    )
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error(f"torch {torch.__version__} sees no CUDA device")
    sizes = measure.Sizes()
    if args.quick:
        sizes = replace(sizes, sequences=(1, 16), repeats=1, new_tokens=16, training=(2, 512))
    if args.item:
        run_item(Item(*args.item), sizes, "cuda")
        return
    meta = results_file.describe(
        gpu=torch.cuda.get_device_name(), triton=__import__("triton").__version__, sizes=asdict(sizes)
    )
    report = Report(meta, args.json)
    names = ["qwen3-0.6b"] if args.quick else list(SHAPES)
    run_all(items(args.models or names), report, args.minutes, ["--quick"] if args.quick else [])
    report.table()
    print(f"{meta['gpu']}, torch {torch.__version__}, triton {meta['triton']}, commit {meta['commit']}, {meta['date']}")


if __name__ == "__main__":
    main()
