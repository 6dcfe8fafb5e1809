"""Find the adapter that a request goes through.

Invariants
----------
* A request takes its adapter when it is submitted, and ends under it: one that is loaded under the same name later, or
  that name dropped, changes nothing of it.
* An adapter that was loaded is never written to again.
* No two adapters that were loaded under one name have one version, whether the name was dropped in between or not.
* Any thread may ask and change it: each look and each change is one step of the dictionary.
* The names of a shared peft model are peft's, as they were when it was bound last.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from samebit.kernels.binding.binding import binding_of, is_bound
from samebit.kernels.layout.lora.adapters import BASE, Adapter
from samebit.rollout.adapters.layout import AdapterLayout
from samebit.rollout.errors import AdapterError, RequestError

FIRST = "default"
"""Names the adapter of the folder that a worker was built from, as peft does."""

FIRST_NUMBER = (1 << 63) - 1
"""Stands for that adapter in the names of cached blocks, in every process; no process draws it for another."""


@dataclass(frozen=True, eq=False)
class Loaded:
    """Holds an adapter that a worker was given, and how it was laid out."""

    adapter: Adapter
    layout: AdapterLayout


class AdapterRegistry:
    """Holds the adapters of one worker by name."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._loaded: dict[str, Loaded] = {}
        self._last_versions: dict[str, int] = {}
        self._default = self._active()

    def resolve(self, name: str | None) -> Adapter | None:
        """Return the adapter that a request names, None for the model alone.

        Raises:
            RequestError: there is no such adapter.
        """
        wanted = self._default if name is None else name
        if wanted == BASE:
            return None
        loaded = self._loaded.get(wanted)
        if loaded is not None:
            return loaded.adapter
        found = self._of_peft().get(wanted)
        if found is None:
            raise RequestError(f"adapter={wanted!r} is not known; there are {', '.join(self.names())}")
        return found

    def names(self) -> list[str]:
        """Return the names that a request may give."""
        return [BASE, *dict.fromkeys((*self._of_peft(), *self._loaded))]

    def loaded(self, name: str) -> Loaded | None:
        """Return what was loaded under this name, if anything was."""
        return self._loaded.get(name)

    def last_version(self, name: str) -> int:
        """Return the version of what was loaded under this name last, 0 where nothing was."""
        loaded = self._loaded.get(name)
        return self._last_versions.get(name, 0) if loaded is None else loaded.adapter.version

    def check_free(self, name: object) -> str:
        """Return a name that may be loaded.

        Raises:
            AdapterError: it is no name, or names an adapter of the shared peft model, or the model without one.
        """
        if not (isinstance(name, str) and name):
            raise AdapterError(f"an adapter's name must be a non-empty string, got {name!r}")
        if name == BASE or name in self._of_peft():
            raise AdapterError(f"the adapter {name!r} is the model's own, and can not be loaded; give another name")
        return name

    def put(self, loaded: Loaded) -> None:
        """Let requests from now on find this adapter under its name."""
        adapter = loaded.adapter
        if adapter.alias is None:  # a fleet counts the versions of its own names, and takes no name twice here
            self._last_versions[adapter.name] = adapter.version
        self._loaded[adapter.name] = loaded

    def choose(self, name: str) -> None:
        """Send requests that name no adapter through this one."""
        self._default = name

    def drop(self, name: str) -> Adapter:
        """Forget a loaded adapter.

        Raises:
            AdapterError: none was loaded under this name.
        """
        loaded = self._loaded.pop(name, None)
        if loaded is None:
            known = ", ".join(tuple(self._loaded)) or "none"
            raise AdapterError(f"no adapter {name!r} was loaded; loaded are: {known}")
        return loaded.adapter

    def _of_peft(self) -> dict[str, Adapter]:
        adapters = binding_of(self._module).adapters if is_bound(self._module) else None
        return {} if adapters is None else dict(adapters.adapters)

    def _active(self) -> str:
        adapters = binding_of(self._module).adapters if is_bound(self._module) else None
        active = None if adapters is None else adapters.active()
        return BASE if active is None else active.name
