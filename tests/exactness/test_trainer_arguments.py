"""`token_logprobs` refuses arguments that it can not use: it says which, what was given, what is allowed."""

from typing import Any

import numpy as np
import pytest
import torch

from samebit.kernels import token_logprobs

from .families import bound_model

IDS = torch.arange(10).view(2, 5) + 3
RAMP = torch.arange(5)[None]
NAN = float("nan")
POSITIONS = r"position_ids must be a tensor of integers of the shape \[2, 5\] or \[1, 5\], got "
BROADCAST = r"broadcast to \[B, T - 1\], \[2, 4\], got the shape "
NUMBER = r"temperature must be a positive number, or a tensor that broadcasts to \[B, T - 1\], \[2, 4\], got "

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"input_ids": IDS.float()}, "input_ids must be a tensor of integers, as torch.int64, got torch.float32"),
    ({"input_ids": IDS > 4}, "got torch.bool"),
    ({"input_ids": IDS.tolist()}, "got list"),
    ({"input_ids": IDS.to("meta")}, "on the device 'meta'"),
    ({"input_ids": IDS.to_sparse()}, "input_ids is torch.sparse_coo; allowed: a dense tensor"),
    ({"input_ids": (IDS + 1009).to(torch.uint16)}, r"input_ids must lie in \[0, 1009\), got 1012..1021"),
    ({"input_ids": IDS[0]}, r"input_ids must be \[B, T\], got shape \(5,\)"),
    ({"input_ids": IDS - 4}, r"input_ids must lie in \[0, 1009\), got -1..8"),
    ({"position_ids": RAMP[:, :4]}, POSITIONS + r"the shape \[1, 4\]"),
    ({"position_ids": RAMP[0]}, POSITIONS + r"the shape \[5\]"),
    ({"position_ids": RAMP.expand(5, 2, 5)}, POSITIONS + r"the shape \[5, 2, 5\]"),
    ({"position_ids": IDS[:, :1]}, POSITIONS + r"the shape \[2, 1\]"),
    ({"position_ids": RAMP.float()}, POSITIONS + "torch.float32"),
    ({"position_ids": RAMP > 0}, POSITIONS + "torch.bool"),
    ({"position_ids": RAMP.tolist()}, POSITIONS + "list"),
    ({"position_ids": RAMP.to("meta")}, "position_ids is on the device 'meta'"),
    ({"attention_mask": torch.ones(2, 5, device="meta")}, "attention_mask is on the device 'meta'"),
    ({"attention_mask": torch.ones(2, 5).to_sparse()}, "attention_mask is torch.sparse_coo"),
    ({"attention_mask": torch.ones(2, 5) + 0j}, "attention_mask must be of real numbers, got torch.complex64"),
    *[
        (
            {"attention_mask": torch.tensor([[value, 0.0, 0.0, 0.0, 0.0]]).expand(2, 5)},
            r"NaN or numbers below 0 \(a mask",
        )
        for value in (NAN, -float("inf"), torch.finfo(torch.float32).min)
    ],
    ({"attention_mask": torch.ones(2, 4)}, r"attention_mask must have the shape of input_ids, \(2, 5\), got \(2, 4\)"),
    ({"attention_mask": torch.ones(2, 1, 5, 5)}, r"got \(2, 1, 5, 5\)"),
    ({"attention_mask": [[1] * 5] * 2}, "attention_mask must be a tensor of the shape of input_ids, got list"),
    ({"temperature": torch.ones(2, 5)}, BROADCAST + r"\[2, 5\]"),
    ({"temperature": torch.ones(1, 2, 4)}, BROADCAST + r"\[1, 2, 4\]"),
    ({"temperature": torch.ones(0)}, BROADCAST + r"\[0\]"),
    ({"temperature": np.ones(3)}, BROADCAST + r"\[3\]"),
    ({"temperature": torch.ones(2, 4) > 0}, "temperature must be of real numbers, got torch.bool"),
    ({"temperature": torch.ones(2, 4) + 0j}, "temperature must be of real numbers, got torch.complex64"),
    ({"temperature": torch.ones(4, device="meta")}, "temperature is on the device 'meta'"),
    ({"temperature": torch.ones(4).to_sparse()}, "temperature is torch.sparse_coo"),
    ({"temperature": torch.ones(4, requires_grad=True)}, "temperature requires grad, and would get none"),
    *[({"temperature": value}, NUMBER) for value in ("1", True, None, {}, [[1], [1, 2]], 10**400, 1j)],
    *[
        ({"temperature": value}, "temperature must be positive and finite as a float32, got ")
        for value in (0, -1, NAN, float("inf"), 1e39, 1e-50, np.float32("nan"), torch.tensor([1.0, 1.0, 0.0, 1.0]))
    ],
]


@pytest.mark.parametrize(("arguments", "says"), REFUSED, ids=range(len(REFUSED)))
def test_an_argument_that_can_not_be_used_is_named(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises((ValueError, TypeError), match=says):
        token_logprobs(bound_model("Qwen3"), **{"input_ids": IDS, **arguments})


@torch.no_grad()
def test_all_that_say_the_same_give_the_same() -> None:
    model = bound_model("Qwen3")
    expected = token_logprobs(model, IDS, temperature=0.5)
    ones = torch.ones(2, 5)
    same: list[dict[str, Any]] = [
        {"temperature": np.float32(0.5)}, {"temperature": np.full((2, 1), 0.5)}, {"temperature": [0.5] * 4},
        {"temperature": torch.tensor(0.5, dtype=torch.bfloat16)}, {"temperature": torch.full((4,), 0.5)},
        {"attention_mask": ones}, {"attention_mask": ones.bfloat16()}, {"attention_mask": ones.bool()},
        {"position_ids": RAMP}, {"position_ids": RAMP.expand(2, 5).to(torch.uint8)},
        {"input_ids": IDS.int()}, {"input_ids": IDS.to(torch.uint8)}, {"input_ids": IDS.to(torch.uint16)},
        {"attention_mask": ones.to(torch.uint16)}, {"attention_mask": 2 * ones},
    ]  # fmt: skip
    for arguments in same:
        found = token_logprobs(model, **{"input_ids": IDS, "temperature": 0.5, **arguments})
        assert torch.equal(found, expected), arguments


@torch.no_grad()
def test_positions_of_few_bits_do_not_run_on_past_their_greatest() -> None:
    """Positions of few bits do not run on past their greatest: after 255 comes 0 in uint8, which is where a sequence
    begins.
    """
    model, ids = bound_model("Qwen3"), torch.arange(260)[None] + 3
    positions = torch.arange(260)[None] % 256
    expected = token_logprobs(model, ids, position_ids=positions)
    assert torch.equal(token_logprobs(model, ids, position_ids=positions.to(torch.uint8)), expected)


@pytest.mark.parametrize("model", ["Qwen3", None, 5])
def test_what_is_no_model_is_named(model: Any) -> None:
    with pytest.raises(TypeError, match=f"must be a bound Hugging Face model, got {type(model).__name__}"):
        token_logprobs(model, IDS)


def test_a_temperature_of_python_s_is_rounded_once() -> None:
    model, before = bound_model("Qwen3"), torch.get_default_dtype()
    expected = token_logprobs(model, IDS, temperature=torch.tensor(0.7, dtype=torch.float32))
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = token_logprobs(model, IDS, temperature=0.7)
    finally:
        torch.set_default_dtype(before)
    assert torch.equal(found, expected)


def test_nothing_to_score_is_checked_all_the_same() -> None:
    model = bound_model("Qwen3")
    assert token_logprobs(model, IDS[:, :1]).shape == (2, 0)
    assert token_logprobs(model, IDS[:0]).shape == (0, 4)
    with pytest.raises(ValueError, match=r"broadcast to \[B, T - 1\], \[2, 0\], got the shape \[3\]"):
        token_logprobs(model, IDS[:, :1], temperature=torch.ones(3))
