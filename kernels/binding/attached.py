"""Give a module another forward than that of its class, and what that needs to know."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MethodType
from typing import Any

from torch import nn


@dataclass(frozen=True, eq=False)
class Attachment:
    """Holds the forward that a module gets, which takes the module first, and what that needs to know."""

    forward: Callable[..., Any]
    facts: Any = None


Attachments = Mapping[nn.Module, Attachment | None]
"""Holds what each module of a model gets; None for one that keeps the forward of its class."""


def attach(module: nn.Module, forward: Callable[..., Any], facts: Any = None) -> None:
    """Replace the forward of this instance."""
    module.__dict__["samebit"] = facts
    module.__dict__["forward"] = MethodType(forward, module)
