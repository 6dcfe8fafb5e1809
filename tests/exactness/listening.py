"""Hear the calls of modules: who listens has them called one by one."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from samebit.rollout import RequestOutput, SamplingParams

from .compare import run


@contextmanager
def listening(model: nn.Module, heard: list[str], *names: str) -> Iterator[None]:
    """Note the name of each of these modules at each of its calls."""
    handles = [
        model.get_submodule(name).register_forward_hook(lambda *_, name=name: heard.append(name)) for name in names
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def one_by_one(
    model: nn.Module, prompts: list[list[int]], params: list[SamplingParams], *names: str
) -> list[RequestOutput]:
    """Run with a listener at each of these modules, so that their layers are computed module by module."""
    heard: list[str] = []
    with listening(model, heard, *names):
        outputs, _ = run(model, prompts, params)
    assert set(heard) == set(names)
    return outputs
