"""Keep verl from looking for value heads in a TRL that has none, which ends every run where TRL is installed.

verl 0.9.1 imports TRL's model with a value head while it builds any model, if there is a TRL
(`verl.models.transformers.monkey_patch`, `verl.utils.model`); TRL 1.16 has none. Such a TRL counts as none.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path


def ignore_trl_without_them() -> None:
    """Replace verl's question whether there is a TRL; doing it twice is doing it once."""
    from verl.models.transformers import monkey_patch
    from verl.utils import model

    for owner in (monkey_patch, model):
        owner.is_trl_available = trl_has_value_heads


def trl_has_value_heads() -> bool:
    """Look for the files of TRL's value heads: to import them gives a warning that they are experimental."""
    found = find_spec("trl")
    if found is None or found.origin is None:
        return False
    folder = Path(found.origin).parent
    return (folder / "experimental" / "ppo").is_dir() or (folder / "models" / "modeling_value_head.py").is_file()
