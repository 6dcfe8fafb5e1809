"""Say how a server is set up: a flag wins over a variable of the environment, and that over the file.

Invariants
----------
* Every setting has one name, written `max_waiting` in the file, `SAMEBIT_SERVE_MAX_WAITING` in the environment and
  `--max-waiting` on the command line. A name that is not known is an error in each of the three, but for variables
  that Kubernetes makes of the name of a Service.
* A setting of yes and no is a switch on the command line, `--resubmit` or `--no-resubmit`, as those of vLLM are.
* Secrets are no flags: other users of the machine can read a command line.
"""

from __future__ import annotations

import argparse
import os
import re
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from samebit.rollout.config import RolloutConfig
from samebit.rollout.fleet.options import FleetOptions

PREFIX = "SAMEBIT_SERVE_"
SECRETS = ("api_key", "control_token")
MOST_PROMPTS = 1 << 16
"""Limits what `max_prompts` may be: more are refused before each is looked at."""
CONTROLS = ("off", "loopback", "token")
_WORDS = {"true": True, "false": False}
_OF_KUBERNETES = re.compile(r"_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)")


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """Holds what the server itself needs to know; the worker's part is a `RolloutConfig`.

    Raises:
        ValueError: a value that is not allowed, by name.
    """

    host: str = field(default="127.0.0.1", metadata={"help": "address to listen at"})
    port: int = field(default=8000, metadata={"help": "port to listen at; 0 for any free one"})
    served_model_name: str | None = field(default=None, metadata={"help": "name of the model in requests (MODEL)"})
    api_key: str | None = field(default=None, metadata={"help": "bearer token that /v1 asks for"})
    control: str = field(default="off", metadata={"help": "where control endpoints are: off, loopback or token"})
    control_port: int = field(default=8001, metadata={"help": "port at 127.0.0.1 of --control loopback"})
    control_token: str | None = field(default=None, metadata={"help": "bearer token of --control token"})
    weight_root: str | None = field(default=None, metadata={"help": "folder below which weight folders may lie"})
    tool_call_parser: str | None = field(default=None, metadata={"help": "how tool calls are read: hermes, template"})
    chat_template: str | None = field(default=None, metadata={"help": "file with a template to use for the model's"})
    replicas: int = field(default=1, metadata={"help": "workers behind this front, in actors of Ray; 1 for none"})
    replica_cpus: int | None = field(default=None, metadata={"help": "cores a replica (an even share)"})
    ray_address: str | None = field(default=None, metadata={"help": "a running Ray cluster (one of its own)"})
    resubmit: bool = field(default=False, metadata={"help": "requests of a dead replica go to another"})
    max_restarts: int | None = field(
        default=None, metadata={"help": f"starts in a row of a dead replica ({FleetOptions.max_restarts})"}
    )
    max_waiting: int = field(default=1024, metadata={"help": "samples that may wait; more are answered 429"})
    max_n: int = field(default=128, metadata={"help": "samples a prompt"})
    max_prompts: int = field(default=256, metadata={"help": "prompts a request"})
    max_logprobs: int = field(default=20, metadata={"help": "alternatives a token"})
    max_alternatives: int = field(default=1 << 23, metadata={"help": "alternatives of all tokens of a request"})
    max_stops: int = field(default=16, metadata={"help": "stop strings a request"})
    max_grammar_bytes: int = field(default=1 << 16, metadata={"help": "bytes of what a sample is constrained to"})
    max_body_bytes: int = field(default=16 << 20, metadata={"help": "bytes of a request"})
    max_body_values: int = field(
        default=1 << 20, metadata={"help": "numbers, texts, lists and objects of a request; more stop all streams"}
    )
    max_sessions: int = field(default=1024, metadata={"help": "conversations whose token ids are kept"})
    request_seconds: float | None = field(default=None, metadata={"help": "a request is ended after so long"})
    stall_seconds: float = field(
        default=60.0, metadata={"help": "a stream that its client does not read is ended after so long"}
    )
    shutdown_seconds: int = field(default=30, metadata={"help": "running requests may take so long at the end"})
    otlp_traces_endpoint: str | None = field(
        default=None, metadata={"help": "collector that gets traces, as http://localhost:4318/v1/traces"}
    )
    ssl_certfile: str | None = field(default=None, metadata={"help": "certificate, for TLS"})
    ssl_keyfile: str | None = field(default=None, metadata={"help": "its key"})

    def __post_init__(self) -> None:
        for one in fields(self):
            _check_kind(one, vars(self)[one.name])
        for name in ("port", "control_port"):
            if not 0 <= vars(self)[name] <= 65535:
                raise ValueError(f"{name} must be from 0 to 65535, got {vars(self)[name]}")
        for name in (
            "max_n",
            "max_prompts",
            "max_stops",
            "max_grammar_bytes",
            "max_body_bytes",
            "max_body_values",
            "shutdown_seconds",
            "replicas",
        ):
            if vars(self)[name] < 1:
                raise ValueError(f"{name} must be at least 1, got {vars(self)[name]}")
        for name in ("max_waiting", "max_logprobs", "max_alternatives", "max_sessions"):
            if vars(self)[name] < 0:
                raise ValueError(f"{name} must not be negative, got {vars(self)[name]}")
        for name in ("request_seconds", "stall_seconds"):
            if vars(self)[name] is not None and not vars(self)[name] > 0:
                raise ValueError(f"{name} must be above 0, got {vars(self)[name]}")
        if self.max_prompts > MOST_PROMPTS:
            raise ValueError(f"max_prompts must be at most {MOST_PROMPTS}, got {self.max_prompts}")
        if self.replica_cpus is not None and self.replica_cpus < 1:
            raise ValueError(f"replica_cpus must be at least 1, got {self.replica_cpus}")
        if self.max_restarts is not None and self.max_restarts < 0:
            raise ValueError(f"max_restarts must not be negative, got {self.max_restarts}")
        for name in ("replica_cpus", "ray_address", "resubmit", "max_restarts"):
            given = vars(self)[name]
            if self.replicas == 1 and given not in (None, "") and given is not False:
                raise ValueError(f"{name} is for several replicas, and replicas is 1")
        if self.control not in CONTROLS:
            raise ValueError(f"control must be one of {', '.join(CONTROLS)}, got {self.control!r}")
        if self.control == "token" and not self.control_token:
            raise ValueError(f"control='token' needs {PREFIX}CONTROL_TOKEN, or control_token in the file")
        if self.control == "loopback" and self.port == self.control_port != 0:
            raise ValueError(f"port and control_port must be two with control='loopback', got {self.port} for both")
        if self.api_key == "":
            raise ValueError("api_key must not be empty: leave it out to ask for none")
        for name in SECRETS:
            if not _can_be_sent(vars(self)[name] or ""):
                raise ValueError(
                    f"{name} must be printable ASCII without white space around it, or no client can send it (a secret "
                    "that was made with `echo` ends in a line break: use `echo -n`)"
                )
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise ValueError("ssl_certfile and ssl_keyfile are given together")


def _can_be_sent(secret: str) -> bool:
    """Return whether a client can send it in a header as it is."""
    return secret.isascii() and secret.isprintable() and secret == secret.strip()


@dataclass(frozen=True)
class Setup:
    """Holds a whole command line: which model, served how."""

    model: str
    settings: ServeSettings
    worker: RolloutConfig


def read_setup(argv: Sequence[str], environment: Mapping[str, str] | None = None) -> Setup:
    """Return what command line, environment and file say together.

    Raises:
        ValueError: a name or a value that is not allowed, or a file that can not be read.
        SystemExit: the command line is no command line, as argparse has it.
    """
    flags = vars(_parser().parse_args(_as_switches(argv)))
    model, file = flags.pop("model"), flags.pop("config", None)
    given = {
        **({} if file is None else _from_file(Path(file))),
        **_from_environment(os.environ if environment is None else environment),
        **flags,
    }
    own = {one.name for one in fields(ServeSettings)}
    return Setup(
        model,
        ServeSettings(**{name: value for name, value in given.items() if name in own}),
        RolloutConfig(**{name: value for name, value in given.items() if name not in own}),
    )


def _all_fields() -> dict[str, Field[Any]]:
    every = {one.name: one for kind in (ServeSettings, RolloutConfig) for one in fields(kind)}
    del every["digest_key"]  # a fleet draws its own
    return every


def _kind(one: Field[Any]) -> type:
    """Return the plain type of a setting."""
    owner = ServeSettings if one in fields(ServeSettings) else RolloutConfig
    hint = typing.get_type_hints(owner)[one.name]
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    plain = [option for option in options if option in (str, int, float, bool)]
    return float if plain == [int, float] else typing.cast(type, plain[0])


def _check_kind(one: Field[Any], value: object) -> None:
    kind = _kind(one)
    if value is None and one.default is None:
        return
    if isinstance(value, bool) != (kind is bool) or not isinstance(value, (int, float) if kind is float else kind):
        shown = "..." if one.name in SECRETS else repr(value)
        raise ValueError(f"{one.name} must be of type {kind.__name__}, got {shown}")


def _from_text(one: Field[Any], text: str) -> Any:
    kind = _kind(one)
    if kind is not bool:
        return kind(text)
    if text.lower() not in _WORDS:
        raise ValueError(f"{one.name} must be true or false, got {text!r}")
    return _WORDS[text.lower()]


def _from_flag(one: Field[Any], text: str) -> Any:
    try:
        return _from_text(one, text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be of type {_kind(one).__name__}, got {text!r}") from error


def _flag(one: Field[Any]) -> str:
    return f"--{one.name.replace('_', '-')}"


def _as_switches(argv: Sequence[str]) -> list[str]:
    """Write `--x true` and `--x=false`, with the words of file and environment, as the switches `--x` and `--no-x`."""
    switches = {_flag(one) for one in _all_fields().values() if _kind(one) is bool}
    taken: list[str] = []
    for text in argv:
        flag, _, word = text.rpartition("=")
        if not flag and word.lower() in _WORDS and taken and taken[-1] in switches:
            flag = taken.pop()
        if flag in switches and word.lower() in _WORDS:
            taken.append(flag if _WORDS[word.lower()] else flag.replace("--", "--no-", 1))
        else:
            taken.append(text)
    return taken


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="samebit serve",
        description="Serve a model over HTTP. Each setting can also stand in the environment (--max-n: "
        f"{PREFIX}MAX_N) and in the file (max_n).",
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("model", metavar="MODEL", help="a Hugging Face model folder, or a name of its hub")
    parser.add_argument("--config", metavar="FILE", help="settings in YAML or JSON")
    server = parser.add_argument_group("server")
    worker = parser.add_argument_group("worker (RolloutConfig)", "docs/reference.md says what each means")
    for one in _all_fields().values():
        if one.name in SECRETS:
            continue
        group = server if one in fields(ServeSettings) else worker
        default = "" if one.default is None else f" ({one.default})"
        said = f"{one.metadata.get('help', '')}{default}".strip().replace("%", "%%")
        kind = _kind(one)
        if kind is bool:
            group.add_argument(_flag(one), dest=one.name, action=argparse.BooleanOptionalAction, help=said)
        else:
            of_type = partial(_from_flag, one)
            group.add_argument(_flag(one), dest=one.name, type=of_type, metavar=kind.__name__.upper(), help=said)
    return parser


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    known = _all_fields()
    given: dict[str, Any] = {}
    linked = _service_links(environment)
    for variable, text in environment.items():
        if variable.startswith(PREFIX) and variable not in linked:
            name = variable[len(PREFIX) :].lower()
            if name not in known:
                raise ValueError(f"{variable} is set, and there is no such setting; see samebit serve --help")
            try:
                given[name] = _from_text(known[name], text)
            except ValueError as error:
                shown = "..." if name in SECRETS else repr(text)
                raise ValueError(f"{variable} must be of type {_kind(known[name]).__name__}, got {shown}") from error
    return given


def _service_links(environment: Mapping[str, str]) -> set[str]:
    """Return the variables that tell of Services of Kubernetes: it sets them in each pod beside a Service, and for one
    called `samebit-serve`, or `samebit-serve-control`, they begin as the settings do."""
    end, found = "_SERVICE_HOST", set[str]()
    services = {name.removesuffix(end) for name in environment if name.endswith(end)}
    for service in services:
        if f"{service}_SERVICE_PORT" not in environment:
            continue
        rest = {name: name.removeprefix(service) for name in environment if name.startswith(service)}
        found.update(name for name in rest if _OF_KUBERNETES.fullmatch(rest[name]))
        found.update(name for name in rest if rest[name] == "_PORT" and "://" in environment[name])
    return found


def _from_file(path: Path) -> dict[str, Any]:
    try:
        given = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:  # its text quotes the line, in which a secret may stand
        mark = error.problem_mark if isinstance(error, yaml.MarkedYAMLError) else None
        where = "" if mark is None else f", line {mark.line + 1}, column {mark.column + 1}"
        raise ValueError(f"the settings in {path} are not YAML{where}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"the settings in {path} can not be read: {' '.join(str(error).split())}") from error
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise ValueError(f"{path} must hold names and values, got a {type(given).__name__}")
    unknown = [str(name) for name in given if name not in _all_fields()]
    if unknown:
        raise ValueError(f"{path} has {', '.join(unknown)}, which are no settings; see samebit serve --help")
    return given
