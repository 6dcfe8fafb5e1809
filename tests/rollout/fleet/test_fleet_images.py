"""A fleet and an actor refuse prompts with images by name, before anything is sent."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from samebit.rollout import PromptWithImages, RequestError

from .local_fleet import LocalFleet

PROMPT = PromptWithImages([1, 2, 3], torch.zeros(4, 6), torch.tensor([[1, 2, 2]]))


def refuses_images(worker: Any) -> None:
    for call, given in ((worker.submit, PROMPT), (worker.submit_all, [[1], PROMPT]), (worker.generate, [[1], PROMPT])):
        with pytest.raises(RequestError, match=r"got a PromptWithImages, .*allowed here: a list"):
            call(given)


def test_a_fleet_takes_no_images() -> None:
    with LocalFleet(1) as local:
        refuses_images(local.fleet)
        assert not local.busy()


def test_an_actor_takes_no_images() -> None:
    pytest.importorskip("ray")
    from samebit.rollout.integrations.ray import RayWorker

    refuses_images(RayWorker(None))
