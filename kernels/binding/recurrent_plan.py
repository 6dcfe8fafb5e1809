"""Say what finding out about the recurrent layers of a model has in common, whichever kind they are."""

from abc import ABC, abstractmethod

from torch import nn

from samebit.kernels.binding.attached import Attachment
from samebit.kernels.layout.states.memory import StateLayout, StateShape


class RecurrentPlan(ABC):
    """Decides the facts of the recurrent layers, in the order of the traversal."""

    def __init__(self, chunk: int) -> None:
        self.chunk = chunk
        self.shapes: list[StateShape] = []
        self.inside: set[str] = set()

    def state_layout(self) -> StateLayout | None:
        """Return the layout of the states of the layers found so far; None without any."""
        return StateLayout(len(self.shapes), self.shapes[0], self.chunk) if self.shapes else None

    def computes(self, name: str) -> bool:
        """Return whether a bound layer computes what the module of this name would."""
        return name in self.inside

    @abstractmethod
    def is_mixer(self, module: nn.Module) -> bool:
        """Return whether this module is what a recurrent layer of the family has in place of attention."""

    @abstractmethod
    def mixer(self, name: str, module: nn.Module) -> Attachment:
        """Plan one such module.

        Raises:
            BindingError: something in it that is not exact, by name.
        """
