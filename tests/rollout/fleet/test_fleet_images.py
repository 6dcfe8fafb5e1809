"""A fleet refuses prompts with images by name, before anything is sent."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from samebit.rollout import PromptWithImages, RequestError

from .local_fleet import LocalFleet

PROMPT = PromptWithImages([1, 2, 3], torch.zeros(4, 6), torch.tensor([[1, 2, 2]]))


def test_a_fleet_takes_no_images() -> None:
    with LocalFleet(1) as local:
        fleet: Any = local.fleet
        for call, given in ((fleet.submit, PROMPT), (fleet.submit_all, [[1], PROMPT]), (fleet.generate, [[1], PROMPT])):
            with pytest.raises(RequestError, match=r"got a PromptWithImages, .*allowed here: a list"):
                call(given)
        assert not local.busy()
