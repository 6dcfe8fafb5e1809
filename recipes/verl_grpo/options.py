"""Look at verl's options as a user writes them, before anything is built or started.

Invariants
----------
* They are Hydra's words (`NAME=VALUE`, `+NAME=VALUE`, `~NAME`, `model_engine=...`) and reach verl as they were written.
* An option that verl does not know is added only where it is written with a `+` in front.
"""

from dataclasses import replace
from difflib import get_close_matches

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import ConfigCompositionException, HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from samebit.recipes.verl_grpo.launch import HERE, Run
from samebit.rollout.integrations.verl.run_check import check_options


class OptionError(ValueError):
    """An option is wrong; one line says why."""


def checked(run: Run) -> DictConfig:
    """Return the configuration that verl will compose of these options.

    Raises:
        OptionError: a word that is no option, an option that verl does not know, or one that samebit refuses.
    """
    config = _composed(run)
    try:
        check_options(config)
    except (ValueError, AssertionError, HydraException, OmegaConfBaseException) as error:
        raise OptionError(_line(error)) from error
    return config


def _composed(run: Run) -> DictConfig:
    for word in run.words:
        name, equals, _ = word.lstrip("+~").partition("=")
        if not name or not (equals or word.startswith("~")):
            raise OptionError(f"{word!r} is no option: write NAME=VALUE")
    with initialize_config_dir(str(HERE), version_base=None):
        try:
            return compose(run.config, run.overrides())
        except ConfigCompositionException as error:
            base = compose(run.config, replace(run, words=()).overrides())
            raise OptionError(_unknown(run.words, base) or _line(error)) from error
        except (HydraException, OmegaConfBaseException, ValueError) as error:
            raise OptionError(_line(error)) from error


def _unknown(words: tuple[str, ...], config: DictConfig) -> str | None:
    """Name the options that are not there, each with the one that is nearest to it; None if all are."""
    known = _names(OmegaConf.to_container(config, resolve=False))
    said = []
    for option in OverridesParser.create().parse_overrides(list(words)):
        name = option.key_or_group
        if not (option.is_add() or option.is_force_add()) and name not in known:
            near = get_close_matches(name, known, n=1)
            said.append(f"verl has no option {name}" + (f", but {near[0]}" if near else ""))
    return f"{'; '.join(said)} (write +NAME=VALUE to add one all the same)" if said else None


def _names(content: object, prefix: str = "") -> list[str]:
    """Return all options with their dots, sections too."""
    if not isinstance(content, dict):
        return []
    names = []
    for key, value in content.items():
        names += [f"{prefix}{key}", *_names(value, f"{prefix}{key}.")]
    return names


def _line(error: Exception) -> str:
    """Return the message without its line breaks."""
    return " ".join(str(error).split())
