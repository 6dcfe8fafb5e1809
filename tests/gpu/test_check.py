"""`samebit check --device cuda` finds no difference: dense, hybrid, with routed experts, in bfloat16 and float32."""

import json
from pathlib import Path

import pytest
import torch

from samebit.rollout import cli

from ..exactness.families import make_model

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["Qwen3", "Gemma3", "NemotronH", "FalconH1", "Qwen3Moe", "GptOss"])
def test_every_row_of_the_check_is_exact(
    name: str, dtype: torch.dtype, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_model(name, dtype).save_pretrained(tmp_path)
    code = cli.main(["check", str(tmp_path), "--device", "cuda", "--json"])
    printed = capsys.readouterr()
    assert printed.out, printed.err
    report = json.loads(printed.out)
    assert "error" not in report, printed.err
    assert [row for row in report["rows"] if row["differing"]] == []
    assert code == 0


def test_bench_measures_on_the_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_model("Qwen3", torch.bfloat16).save_pretrained(tmp_path)
    options = ("--device", "cuda", "--requests", "2", "--prompt", "5", "--tokens", "4")
    assert cli.main(["bench", str(tmp_path), "--json", *options]) == 0
    assert json.loads(capsys.readouterr().out)["metrics"]["output_tokens_per_second"]["min"] > 0
