"""Every kernel compiles for an H100, with a GPU or without: the interpreter takes what the compiler does not. Under
`make soak` with every tile configuration in the file, for the GPU that it is for, and fits the shared memory of that,
but for `TOO_LARGE`; so do those whose tiles are not in the file, for an A100 and an RTX 4090.

And there is one of a layer: training, decode, and sequences that share blocks run the same compiled kernel. Those of
routed experts keep all in registers. Products of large layers read sixteen bytes at once wherever the layer's sizes
allow it. Float32 is not multiplied in TF32, for a B200 neither. Logits of sixteen bits are summed in the order of
float32's. Attention at heads of 128 takes few instructions a tile of keys, and keeps all in registers.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ...campaign import CAMPAIGN
from .compile_kernels import never_written

TOO_LARGE = {(86, "_of_queries"), (86, "_of_keys"), (89, "_of_queries"), (89, "_of_keys"), (80, "_of_keys")}
"""Says which GPU does not hold which kernel: all are gradients of attention, of float32 heads of 256 elements."""

SCRIPT = Path(__file__).with_name("compile_kernels.py")

LOOP = 560
"""Limits the instructions of attention for a tile of 64 keys, at 64 rows and heads of 128."""

STACK = 512
"""Limits the bytes of a thread that a scan or delta rule keeps outside of registers: its state must not
be among them.
"""


def compiled(*parts: str) -> list[dict[str, Any]]:
    """Return what compile_kernels.py found of these parts, or of all if none is named."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, *(["-P"] if sys.version_info >= (3, 11) else []), str(SCRIPT), *parts]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    kernels: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return kernels


Few = Callable[[str], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def few() -> Few:
    """Return what was found of a part that compiles soon. One process compiles them all."""
    parts = (
        "routers", "joined_layers", "gated_layers", "heads_of_rollouts", "norms_of_sums", "small_states",
        "products_of_a_b200",
    )  # fmt: skip
    kernels = compiled(*parts)
    return lambda part: [kernel for kernel in kernels if kernel["part"] == part]


def test_routers_compile_for_an_h100(few: Few) -> None:
    """Routers compile for an H100: `make test` has to see it where a compiler does not."""
    kernels = few("routers")
    assert kernels
    assert [kernel for kernel in kernels if kernel["stack"] or kernel["shared"] > kernel["room"]] == []


LOADED = """
    /*0010*/  ULDC.64 UR4, c[0x0][0x258] ;
    /*0020*/  UIADD3 UR8, UP0, UR4, 0x2, URZ ;
    /*0030*/  UIADD3.X UR9, UR5, -0x7fffffe0, URZ, UP0, !UPT ;
    /*0040*/  UIADD3.64 UR6, UR8, 0x40, URZ ;
"""
INSTRUCTIONS = (
    ("HGMMA.64x16x16.F32.BF16 R48, gdesc[UR4], RZ, !UPT", False),
    ("HGMMA.64x16x16.F32.BF16 R48, gdesc[UR8], RZ, !UPT", True),
    ("HGMMA.64x64x16.F32.BF16 R88, R120, gdesc[UR6], R88", False),
    ("HGMMA.64x64x16.F32.BF16 R88, R120, gdesc[UR8], R88", True),
    ("UIADD3 UR10, UP0, UR13, 0x2, URZ", True),
    ("@!P1 LDS.64 R6, [R12+UR13]", True),
    ("UMOV UR13, UR9", False),
)


@pytest.mark.parametrize(("instruction", "lost"), INSTRUCTIONS)
def test_a_register_that_none_wrote_is_seen(instruction: str, lost: bool) -> None:
    found = never_written(f"{LOADED}    /*0050*/  {instruction} ;")
    assert found == ([instruction] if lost else [])


def test_no_kernel_reads_a_register_that_none_wrote(few: Few) -> None:
    """No kernel reads a register that none wrote, as ptxas 12.8 makes it do with two products of tensor cores without a
    loop between them, of small states.
    """
    kernels = [kernel for part in ("small_states", "joined_layers", "gated_layers") for kernel in few(part)]
    assert {"_of_head", "_multiply_layers", "_multiply_gated"} <= {kernel["name"] for kernel in kernels}
    assert [kernel for kernel in kernels if kernel["never written"]] == []


def test_float32_is_not_multiplied_in_tf32_for_a_b200(few: Few) -> None:
    """Float32 that had 16 bits is multiplied as float32: for a B200 Triton 3.6 and 3.7 would take TF32 for it, if they
    saw what it was.
    """
    kernels = few("products_of_a_b200")
    assert {"_gates", "_rule_head", "_append_tokens"} <= {kernel["name"] for kernel in kernels}
    assert [kernel for kernel in kernels if kernel["in TF32"] and kernel["name"] != "_scan_head"] == []


def test_layers_that_share_a_launch_compile_to_what_a_layer_alone_does(few: Few) -> None:
    """Layers that share a launch have one loop for all of them: as many instructions of tensor cores and copies as a
    layer alone, and no more stack.
    """
    kernels = few("joined_layers")
    alone, joined = (
        [kernel for kernel in kernels if kernel["name"] == name] for name in ("_multiply", "_multiply_layers")
    )
    assert len(alone) == len(joined) == (15 if CAMPAIGN else 9)
    for one, other in zip(alone, joined, strict=True):
        for what in ("products", "wide copies", "shared", "stack"):
            assert one[what] == other[what], (what, one, other)
        assert other["narrow loads"] <= one["narrow loads"]
    assert [kernel for kernel in joined[:9] if kernel["narrow loads"] or kernel["stack"]] == []


def test_gate_and_up_with_their_activation_compile_to_what_they_do_without(few: Few) -> None:
    """Gate and up have the same loop with their activation as without: as many instructions of tensor cores and copies.
    What is behind it has room in registers.
    """
    kernels = few("gated_layers")
    products, activated = (
        [kernel for kernel in kernels if kernel["name"] == name] for name in ("_multiply_layers", "_multiply_gated")
    )
    assert (len(products), len(activated)) == ((22, 29) if CAMPAIGN else (4, 4))
    for one, other in zip(products, activated, strict=False):  # another activation needs no other products
        for what in ("products", "wide copies", "shared"):
            assert one[what] == other[what], (what, one, other)
    assert [kernel for kernel in activated if kernel["stack"]] == []
    assert all(kernel["products"] and kernel["wide copies"] and not kernel["narrow loads"] for kernel in activated[:4])


def test_heads_are_summed_in_the_order_of_their_norms(few: Few) -> None:
    """Heads are summed as by their norms alone in one launch with rotation and pages: the same elements in the same
    threads.
    """
    kernels = few("heads_of_rollouts")
    names = [kernel["name"] for kernel in kernels]
    first = [place for place, name in enumerate(names) if name == "_turn_and_write"]
    assert len(first) == 4
    for start, end, normed in zip(first, [*first[1:], None], (True, True, False, True), strict=True):
        joined, *apart = kernels[start:end]
        sums = [kernel["sums"] for kernel in apart if kernel["name"] == "_norm_rows"]
        assert sums == ([joined["sums"]] if normed else [])
        assert len(joined["sums"]) == normed
    assert [kernel for kernel in kernels if kernel["stack"]] == []
    assert kernels[0]["narrow loads"] == 0, "of Qwen3-8B"


def test_norms_of_sums_are_summed_in_the_order_of_norms(few: Few) -> None:
    kernels = few("norms_of_sums")
    assert [kernel["name"] for kernel in kernels] == ["_norm_sums", "_norm_rows"] * 3
    for of_sum, alone in zip(kernels[::2], kernels[1::2], strict=True):
        assert of_sum["sums"] == alone["sums"]
        assert len(alone["sums"]) == 1
        assert of_sum["narrow loads"] == alone["narrow loads"]
    assert [kernel for kernel in kernels if kernel["stack"]] == []


@pytest.mark.soak
@pytest.mark.skipif(not CAMPAIGN, reason="make soak: compiles for minutes")
def test_kernels_compile_for_an_h100() -> None:
    kernels = compiled()
    assert len({kernel["name"] for kernel in kernels}) == 58
    assert [kernel for kernel in kernels if kernel["never written"]] == []
    of_layers = [kernel for kernel in kernels if (kernel["name"], kernel["part"]) == ("_attend_items", "attentions")]
    assert len(of_layers) == 4, "one of each of the attention layers"
    forward, of_queries, of_keys = (
        next(kernel for kernel in kernels if kernel["name"] == name)
        for name in ("_attend_items", "_of_queries", "_of_keys")
    )
    assert [kernel["stack"] for kernel in (forward, of_queries, of_keys)] == [0, 0, 0], "of a Qwen3"
    assert [kernel["loop"] <= LOOP for kernel in (forward, of_queries)] == [True, True], (forward, of_queries)
    assert of_keys["loop"] <= 2 * LOOP, "of 128 rows"
    too_large = {(kernel["card"], kernel["name"]) for kernel in kernels if kernel["shared"] > kernel["room"]}
    assert too_large == TOO_LARGE
    names = "_scan_head", "_rule_head", "_walk_back", "_of_chunk"
    scans = [kernel for kernel in kernels if kernel["card"] == 90 and kernel["name"] in names]
    assert [kernel for kernel in scans if kernel["stack"] > STACK and kernel["part"] != "wide_delta_gradients"] == []
    convolutions = [kernel["name"] for kernel in kernels if kernel["part"] == "short_convs"]
    assert convolutions.count("_convolve_row") == 2, "one of each dtype, for training and windows of both sizes"
    moved = [kernel for kernel in kernels if kernel["name"] == "_move_window"]
    assert [kernel for kernel in moved if len(kernel["layouts"]) != 1] == [], "who writes a channel is who read it"
    in_tf32 = {kernel["name"] for kernel in kernels if kernel["in TF32"]}
    assert in_tf32 == {"_scan_head"}, "where it is asked for, in three products, for what TF32 holds exactly"
    latents = [kernel for kernel in kernels if kernel["part"] == "latents"]
    assert sum(kernel["name"] == "_attend_items" for kernel in latents) == 4, "one of each layer"
    assert [kernel for kernel in latents if kernel["stack"] > STACK] == [], "of DeepSeek's sizes, in float32"
    sparse = [kernel for kernel in kernels if kernel["part"] == "sparse"]
    for name, many in {"_score_keys": 2, "_choose_row": 1, "_attend_chosen": 2}.items():
        assert sum(kernel["name"] == name for kernel in sparse) == many, f"{name}: one of each layer, for all calls"
    assert [kernel for kernel in sparse if kernel["stack"] > STACK] == []
    recent = [kernel for kernel in kernels if kernel["part"] in ("delta", "delta_gradients", "latents", "sparse")]
    assert [kernel for kernel in recent if kernel["narrow loads"] > 1] == [], "an element a thread, of a single head"
    gates = [kernel for kernel in recent if kernel["name"] == "_gates"]
    assert [kernel for kernel in gates if kernel["narrow loads"]] == []
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
