"""Hear the calls of modules: who listens has them called one by one."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


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
