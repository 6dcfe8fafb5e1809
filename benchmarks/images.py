"""Measure what images cost: a bound vision tower beside Hugging Face's own, and rollouts of prompts with an image
beside Hugging Face's generate.

    python benchmarks/images.py [--json FILE] [--rounds N] [--quick]

README.md in this folder defines each number.
"""

# isort: split
import copy
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedModel, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from samebit.benchmarks.rounds import results_file, table
from samebit.benchmarks.rounds.command_line import benchmark_parser
from samebit.benchmarks.rounds.turns import Calibration, Spread, Turn, alternate, kept, ratio, spread
from samebit.benchmarks.workloads import models
from samebit.kernels import bind
from samebit.rollout import PromptWithImages, RolloutConfig, RolloutWorker, SamplingParams

IMAGE, BEGIN = 2047, 2046
"""The placeholder, and what stands before an image, by which generate counts them: the last of the vocabulary."""

VISION: dict[str, Any] = {
    **{"hidden_size": 1280, "num_heads": 16, "intermediate_size": 3420, "patch_size": 14},
    **{"depth": 4, "fullatt_block_indexes": [3], "window_size": 112},
}
"""Blocks of Qwen2.5-VL's tower, four of 32: three among windows of 64 patches, one among all of an image."""

TEXT: dict[str, Any] = {
    **{"vocab_size": IMAGE + 1, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6},
    **{"num_attention_heads": 8, "num_key_value_heads": 4, "tie_word_embeddings": True},
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]},
    **{"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0},
}
"""The 5.2 M model of the other benchmarks, as a Qwen2."""


@dataclass(frozen=True)
class Sizes:
    """Sets the size of the measurement. `grid`: patches of an image's edges; `text`: tokens beside an image."""

    grid: tuple[int, int] = (32, 32)
    prompts: int = 4
    samples: int = 4
    text: int = 32
    new_tokens: int = 64
    rounds: int = 3


def build(dtype: torch.dtype) -> PreTrainedModel:
    """Build a model with that tower."""
    torch.manual_seed(0)
    vision = {**VISION, "out_hidden_size": TEXT["hidden_size"]}
    config = Qwen2_5_VLConfig(
        text_config=TEXT, vision_config=vision, image_token_id=IMAGE, vision_start_token_id=BEGIN,
        tie_word_embeddings=True,
    )  # fmt: skip
    return Qwen2_5_VLForConditionalGeneration(config).to(dtype).eval()


def images(sizes: Sizes, count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``pixel_values`` and ``image_grid_thw`` of so many random images."""
    height, width = sizes.grid
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randn(count * height * width, 3 * 2 * 14 * 14, generator=generator)
    return pixels, torch.tensor([[1, height, width]] * count)


def towers(theirs: Any, ours: Any, sizes: Sizes) -> dict[str, Turn]:
    """Return the turns of the two towers on one image, forward alone and with the backward."""
    pixels, grid = images(sizes, 1, 0)
    pixels = pixels.to(theirs.dtype)

    def once(model: Any, *, backward: bool) -> Turn:
        def run() -> None:
            with torch.set_grad_enabled(backward):
                features = model.model.visual(pixels, grid_thw=grid).pooler_output
            if backward:
                features.float().sum().backward()

        return _timed(run)

    return {
        f"{name}{suffix}": once(model, backward=bool(suffix))
        for suffix in ("", "_backward")
        for name, model in (("samebit", ours), ("hf", theirs))
    }


def rollouts(theirs: Any, worker: RolloutWorker, sizes: Sizes) -> dict[str, Turn]:
    """Return the turns of a worker and of generate: new prompts each round, with an image each, and samples of all."""
    height, width = sizes.grid
    tokens = [*range(3, 3 + sizes.text), BEGIN, *[IMAGE] * (height * width // 4), 5, 6, 7]
    params = SamplingParams(n=sizes.samples, max_tokens=sizes.new_tokens, ignore_eos=True)

    def samebit(number: int) -> float:
        pixels, grid = images(sizes, sizes.prompts, 1 + number)
        each = zip(pixels.chunk(sizes.prompts), grid.split(1), strict=True)
        asked = [PromptWithImages(tokens, part, one) for part, one in each]
        return _timed(lambda: worker.generate(asked, params))(number)

    def hf(number: int) -> float:
        pixels, grid = images(sizes, sizes.prompts, 1 + number)
        ids = torch.tensor([tokens] * sizes.prompts)
        inputs = {"input_ids": ids, "pixel_values": pixels.to(theirs.dtype), "image_grid_thw": grid}
        kinds = {"attention_mask": torch.ones_like(ids), "mm_token_type_ids": (ids == IMAGE).long()}
        asked = {"do_sample": True, "num_return_sequences": sizes.samples, "max_new_tokens": sizes.new_tokens}
        return _timed(lambda: theirs.generate(**inputs, **kinds, **asked, top_k=0))(number)

    return {"samebit": samebit, "hf": hf}


def _timed(run: Callable[[], object]) -> Turn:
    def once(_: int) -> float:
        began = time.perf_counter()
        run()
        return time.perf_counter() - began

    return once


def measure(sizes: Sizes, calibration: Calibration) -> dict[str, Spread]:
    """Return all figures."""
    metrics: dict[str, Spread] = {}
    for dtype, kind in models.DTYPES.items():
        theirs = build(kind)
        ours = bind(copy.deepcopy(theirs))
        turns = towers(theirs, ours, sizes)
        for turn in turns.values():
            turn(0)  # compiles
        steady = kept(alternate(turns, sizes.rounds, calibration), calibration)
        metrics[f"tower_over_hf_{dtype}"] = ratio(steady, "samebit", "hf")
        metrics[f"tower_backward_over_hf_{dtype}"] = ratio(steady, "samebit_backward", "hf_backward")
        metrics[f"tower_ms_{dtype}"] = spread([1e3 * one.seconds["samebit"] for one in steady])
        with RolloutWorker(ours, config=RolloutConfig(max_model_len=512)) as worker:
            turns = rollouts(theirs, worker, sizes)
            turns["samebit"](-1)
            steady = kept(alternate(turns, sizes.rounds, calibration), calibration)
        metrics[f"ratio_vs_hf_generate_{dtype}"] = ratio(steady, "hf", "samebit")
    return metrics


def main() -> None:
    parser = benchmark_parser(__doc__, rounds=Sizes.rounds, of="each comparison")
    parser.add_argument("--quick", action="store_true", help="two rounds")
    args = parser.parse_args()
    sizes = replace(Sizes(), rounds=2 if args.quick else args.rounds)
    load_before = results_file.load_average()
    metrics = measure(sizes, Calibration())
    table.show(metrics)
    if args.json:
        meta = results_file.describe(sizes=vars(sizes), model={"text": TEXT, "vision": VISION}, load_before=load_before)
        results_file.write(args.json, meta, metrics)


if __name__ == "__main__":
    main()
