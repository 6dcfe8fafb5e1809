"""Every kernel compiles for an H100, with a GPU or without: the interpreter takes what the compiler does not. Under
`make soak` with every tile configuration in the file.

And there is one of a layer: training, decode, and sequences that share blocks run the same compiled kernel. Those of
routed experts keep all in registers. Products of large layers read sixteen bytes at once wherever the layer's sizes
allow it. Logits of sixteen bits are summed in the order of float32's.
Attention at heads of 128 takes few instructions a tile of keys, and keeps all in registers.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SHARED_MEMORY = 227 * 1024
"""Bytes that a program may have on an H100."""

CAMPAIGN = "SAMEBIT_SOAK_CASES" in os.environ

LOOP = 560
"""Instructions of attention for a tile of 64 keys, at 64 rows and heads of 128."""

STACK = 512
"""Bytes of a thread that a scan or delta rule may keep outside of registers: its state must not be among them."""


@pytest.mark.soak
def test_kernels_compile_for_an_h100() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("compile_kernels.py")
    done = subprocess.run(
        [sys.executable, "-P", str(script)] if sys.version_info >= (3, 11) else [sys.executable, str(script)],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    kernels = json.loads(done.stdout.splitlines()[-1])
    assert len({kernel["name"] for kernel in kernels}) == 49
    of_layers = [kernel for kernel in kernels if (kernel["name"], kernel["part"]) == ("_attend_items", "attentions")]
    assert len(of_layers) == 4, "one of each of the attention layers"
    of_qwen = [
        next(kernel for kernel in kernels if kernel["name"] == name) for name in ("_attend_items", "_of_queries")
    ]
    assert [(kernel["loop"] <= LOOP, kernel["stack"]) for kernel in of_qwen] == [(True, 0)] * 2, of_qwen
    assert [kernel for kernel in kernels if kernel["shared"] > SHARED_MEMORY] == []
    scans = [kernel for kernel in kernels if kernel["name"] in ("_scan_head", "_rule_head", "_walk_back", "_of_chunk")]
    assert [kernel for kernel in scans if kernel["stack"] > STACK] == []
    latents = [kernel for kernel in kernels if kernel["part"] == "latents"]
    assert sum(kernel["name"] == "_attend_items" for kernel in latents) == (4 if CAMPAIGN else 1), "one of each layer"
    allowed = STACK if CAMPAIGN else 0  # of DeepSeek's sizes in bfloat16; float32 takes some
    assert [kernel for kernel in latents if kernel["stack"] > allowed] == []
    sparse = [kernel for kernel in kernels if kernel["part"] == "sparse"]
    layers = 2 if CAMPAIGN else 1
    for name in ("_score_keys", "_choose_row", "_attend_chosen"):
        assert sum(kernel["name"] == name for kernel in sparse) == layers, f"one {name} of each layer, for all calls"
    assert [kernel for kernel in sparse if kernel["stack"] > allowed] == []
    dense = [kernel for kernel in kernels if kernel["part"] == "large_layers"]
    assert len(dense) == 9 + 2, "three products a layer, and an activation both ways"
    assert [kernel for kernel in dense if kernel["narrow loads"]] == []
    assert [kernel for kernel in dense if kernel["name"] == "_multiply" and not kernel["wide copies"]] == []
    of_logits = [kernel for kernel in kernels if kernel["part"] == "narrow_logits"]
    sums = [kernel["layouts"] for kernel in of_logits if kernel["name"] == "_chunk_sums"]
    assert len(sums) == 4, "two vocabularies, in float32 and in bfloat16"
    assert sums[0::2] == sums[1::2], "the same order of a sum in both dtypes"
    experts = [kernel for kernel in kernels if kernel["part"] in ("routers", "qwen_experts", "other_experts")]
    assert [kernel for kernel in experts if kernel["stack"]] == []
    large = [kernel for kernel in experts if kernel["part"] == "qwen_experts"]
    assert [kernel for kernel in large if kernel["narrow loads"]] == []
    products = [kernel for kernel in large if kernel["name"] in ("_multiply_items", "_sum_products")]
    assert len(products) == 8, "two with each tile, and four gradients"
    assert [kernel for kernel in products if not kernel["wide copies"]] == []
