"""Run a server: load the model, listen, answer until a signal, and end in order.

Invariants
----------
* The ports are taken before the model is loaded: a port in use is known at once.
* What a name of the hub stands for is found once: the tokenizer is that of the weights, in each replica.
* At SIGTERM or SIGINT no connection is taken any more; what runs may end within `shutdown_seconds`, and the worker is
  closed last. A command that still waits for a trainer ends with the process.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import socket
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from logging import config as logging_config
from types import FrameType
from typing import TYPE_CHECKING

import torch
import uvicorn
from safetensors import SafetensorError

from samebit.rollout.adapters.base import Base
from samebit.rollout.adapters.pinned import Pinned
from samebit.rollout.async_worker import read_for_grammars
from samebit.rollout.errors import NonFiniteLogitsError, SelfTestError, WorkerStateError
from samebit.rollout.fleet.fleet import Fleet
from samebit.rollout.fleet.options import FleetOptions
from samebit.rollout.integrations.http.app import Doors, create_app
from samebit.rollout.integrations.http.middleware import BoundedHead
from samebit.rollout.integrations.http.openai.prompts import read_template
from samebit.rollout.integrations.http.openai.tools import check_parser
from samebit.rollout.integrations.http.service import Service
from samebit.rollout.integrations.http.settings import ServeSettings, Setup, read_setup
from samebit.rollout.worker import RolloutWorker

if TYPE_CHECKING:
    from samebit.rollout.integrations.http.tracing import Tracing

logger = logging.getLogger(__name__)

ENDING = (signal.SIGINT, signal.SIGTERM)
UNUSABLE = 2
_FORESEEN = (
    ImportError, OSError, ValueError, SafetensorError, torch.OutOfMemoryError, NonFiniteLogitsError, SelfTestError,
    WorkerStateError,
)  # fmt: skip
"""Says what a user can change; anything else has a traceback above its line."""
BACKLOG = 2048
KEEP_ALIVE_SECONDS = 75
"""How long a connection may be idle: longer than clients keep one (httpx 5 s, aiohttp 15 s), or one would send its next
request on a connection that is being closed, and a POST is not sent again."""


def main(argv: Sequence[str]) -> int:
    """Serve until a signal; the exit code."""
    _set_up_logging()
    signal.signal(signal.SIGTERM, _ended)
    try:
        setup = read_setup(argv)
        sockets = open_sockets(setup.settings)
        service = _loaded(setup, sockets)
    except _FORESEEN as error:
        return _unusable(str(error))
    except Exception as error:  # boundary: whatever it was, it could not be served, and the traceback says where
        traceback.print_exc()
        return _unusable(f"{type(error).__name__}: {error}")
    settle()
    with closing(service.worker), _noting_signals():
        Server(service, sockets).run()
    return 0


def _unusable(why: str) -> int:
    sys.stderr.write(f"samebit serve: {' '.join(why.split())}\n")
    return UNUSABLE


def settle() -> None:
    """Take what was imported and loaded out of the garbage collector's sight: going through it stops all requests, for
    0.4 s a time with 770,000 objects (measured with Ray imported). What is not used any more is freed all the same,
    but for cycles.
    """
    gc.collect()
    gc.freeze()


def _loaded(setup: Setup, sockets: Sockets) -> Service:
    """Load, and listen no longer if that fails."""
    try:
        return load(setup)
    except BaseException:
        for one in sockets.all:
            one.close()
        raise


@contextmanager
def _noting_signals() -> Iterator[None]:
    """Log what ends the server, for the length of the block; a signal after it ends the process."""
    for one in ENDING:
        signal.signal(one, _noted)
    try:
        yield
    finally:
        for one in ENDING:
            signal.signal(one, _ended)


def _ended(number: int, _: FrameType | None) -> None:
    """End the process at once, also as the first of a container, which the signal's default action does not end."""
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)
    os._exit(128 + number)


def _noted(number: int, _: FrameType | None) -> None:
    """Log the signal that ended the server, which uvicorn raises again when it has ended."""
    logger.info("ended by signal %d", number)


def load(setup: Setup) -> Service:
    """Load model and tokenizer. Raises ValueError for what can not be served."""
    pinned = Pinned.of(setup.model, setup.worker.revision)
    model, revision = pinned.here()
    tokenizer = Base.of(model, revision).tokenizer()
    one = setup.settings.replicas == 1
    name = setup.settings.served_model_name or setup.model
    tracing = tracing_of(setup.settings.otlp_traces_endpoint, name)
    check_parser(setup.settings.tool_call_parser, tokenizer)
    template = read_template(setup.settings.chat_template, tokenizer)
    config = replace(setup.worker, revision=revision)
    worker = RolloutWorker(model, config=config, tokenizer=tokenizer) if one else fleet_of(setup, pinned)
    read_for_grammars(worker)
    return Service(worker, setup.settings, name, tokenizer, tracing, template)


def tracing_of(endpoint: str | None, name: str) -> Tracing | None:
    """Return the tracing of requests, None where it is off. Raises ValueError if OpenTelemetry is not installed."""
    if endpoint is None:
        return None
    try:
        from samebit.rollout.integrations.http.tracing import tracing_to

        return tracing_to(endpoint, name)
    except ImportError as error:
        raise ValueError(f"otlp_traces_endpoint={endpoint!r}: {error}") from error


def fleet_of(setup: Setup, model: Pinned) -> Fleet:
    """Start the replicas of a setup's model, on a running Ray cluster or on one of this process alone.

    Raises:
        ValueError: Ray is not installed, its cluster is too small, or the model can not be served.
    """
    try:
        from samebit.rollout.integrations.ray.local import connect
        from samebit.rollout.integrations.ray.room import even_share
    except ImportError as error:
        raise ValueError(f"replicas={setup.settings.replicas}: {error}") from error
    fleets, asked = connect(setup.settings.ray_address), setup.settings.max_restarts
    return fleets.start(
        model,
        replicas=setup.settings.replicas,
        config=setup.worker,
        options=FleetOptions(
            resubmit=setup.settings.resubmit, max_restarts=FleetOptions.max_restarts if asked is None else asked
        ),
        num_cpus=setup.settings.replica_cpus or even_share(setup.settings.replicas),
        structured_outputs=True,  # each reads its own tokenizer for them, as one worker does here
    )


@dataclass(frozen=True)
class Sockets:
    """Holds the listening sockets; `control` is that of --control loopback."""

    public: socket.socket
    control: socket.socket | None

    @property
    def all(self) -> list[socket.socket]:
        return [self.public] if self.control is None else [self.public, self.control]


def open_sockets(settings: ServeSettings) -> Sockets:
    """Listen. Raises OSError for an address that is in use."""
    public = _listening(settings.host, settings.port)
    try:
        inner = settings.control == "loopback"
        return Sockets(public, _listening("127.0.0.1", settings.control_port) if inner else None)
    except OSError:
        public.close()
        raise


def _listening(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server(
            (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=BACKLOG
        )
    except OSError as error:
        raise OSError(f"can not listen at {host}:{port}: {error.strerror or error}") from error


class Server:
    """Answers requests on sockets that listen."""

    def __init__(self, service: Service, sockets: Sockets) -> None:
        settings = service.settings
        control = None if sockets.control is None else sockets.control.getsockname()[:2]
        self.app: Doors = create_app(service, control)
        self._service = service
        self._sockets = sockets
        self._server = uvicorn.Server(
            uvicorn.Config(
                self.app,
                http=BoundedHead,
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=settings.shutdown_seconds,
                ssl_certfile=settings.ssl_certfile,
                ssl_keyfile=settings.ssl_keyfile,
            )
        )

    @property
    def port(self) -> int:
        """Return the port that the server listens at."""
        port: int = self._sockets.public.getsockname()[1]
        return port

    def run(self) -> None:
        """Serve until a signal, or `stop`."""
        for one in self._sockets.all:
            host, port = one.getsockname()[:2]
            logger.info("%s is served at %s:%d", self._service.model.name, host, port)
        self._server.run(self._sockets.all)

    def stop(self) -> None:
        """End `run`, from any thread."""
        self._server.should_exit = True


def _set_up_logging() -> None:
    logging_config.dictConfig(
        {
            "version": 1,
            "disable_existing_loggers": False,
            "formatters": {"line": {"format": "%(asctime)s %(levelname)s %(name)s: %(message)s"}},
            "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "line"}},
            "root": {"level": "WARNING", "handlers": ["stderr"]},
            "loggers": {"samebit": {"level": "INFO"}, "uvicorn": {"level": "WARNING"}},
        }
    )
