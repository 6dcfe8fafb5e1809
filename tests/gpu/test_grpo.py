"""The recipe trains on a GPU, and no token differs, with the worker on the trainer's module and on a copy."""

import json
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

for package in ("reasoning_gym", "tensorboard", "matplotlib", "tqdm", "rich"):
    pytest.importorskip(package, reason="the recipes are not installed")

from samebit.recipes import grpo  # noqa: E402
from samebit.recipes.settings import OnPolicy  # noqa: E402


@pytest.mark.parametrize("sync", ["shared", "copy"])
def test_every_sampled_token_has_the_trainers_bits(sync: str, tmp_path: Path) -> None:
    grpo.run(
        OnPolicy(
            out=tmp_path, device="cuda", sync=sync, steps=3, prompts=8, samples=8, max_tokens=24, held_out=16,
            eval_every=3, warmup_cap=10, warmup_mixed=2, max_num_seqs=64, kv_cache_gb=0.2, lr=1e-3,
        )
    )  # fmt: skip
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["step"] > 0]
    assert len(steps) == 3
    for row in steps:
        assert row["training/tokens_compared"] >= 64
        assert row["training/tokens_differing"] == 0
