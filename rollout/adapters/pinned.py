"""Find the commits that names of the hub stand for, once for all who read them: a server and its worker, a fleet.

Invariants
----------
* What was found is what is read from then on, also by a replica that is started again after a branch has moved on.
* A folder stays as it is, and so does a path that is not here: other nodes may have it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from samebit.rollout.adapters.base import Base
from samebit.rollout.adapters.layout import CONFIG_FILE
from samebit.rollout.models.hub import commit_of, is_name, model_folder


@dataclass(frozen=True)
class Pinned:
    """Says what to load: a model, or an adapter in the place of one.

    revision: of the model, or of the one under the adapter; a commit where that is a name. adapter: the commit of an
    adapter that was given by its name.
    """

    model: str | Path
    revision: str | None
    adapter: str | None = None

    @classmethod
    def of(cls, given: str | Path, revision: str | None) -> Pinned:
        """Find what is given as a model. revision: of a name, or of the model under a folder's adapter.

        Raises:
            AdapterError: an adapter whose config does not say which model it is for, or which is for changed weights.
            ModelLoadError: a name that is not known, or not to be reached.
        """
        if is_name(given):
            folder = model_folder(given, revision)
            base, commit = Base.of(folder, None), folder.name
            return cls(given, commit) if base.adapter is None else cls(given, _under(base), commit)
        if given and (Path(given) / CONFIG_FILE).is_file():
            return cls(given, _under(Base.of(given, revision)))
        return cls(given, revision)

    def here(self) -> tuple[str | Path, str | None]:
        """Return the model and the revision that a worker of this process takes.

        Raises:
            ModelLoadError: an adapter's commit is not in the cache, and not to be reached.
        """
        if self.adapter is None:
            return self.model, self.revision
        return model_folder(self.model, self.adapter, "adapter"), self.revision


def _under(base: Base) -> str | None:
    """Return the commit of the model under an adapter; of a path the revision as it is."""
    return commit_of(base.model, base.revision) if is_name(base.model) else base.revision
