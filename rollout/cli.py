"""Run the console command `samebit`.

What is heavy is imported by the subcommand that needs it, after the process has been set up.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from logging import CRITICAL
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from samebit.rollout.audit.compare import Row

FAILED, UNUSABLE = 1, 2
"""The command exits so where a promise is broken, and where it could not be carried out."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; the exit code. Without `argv` this is the process's own command line."""
    own = argv is None
    given = list(sys.argv[1:] if argv is None else argv)
    if given[:1] == ["serve"]:
        return _serve(given[1:], own)
    return _answer(_parser().parse_args(given), own)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="samebit", description="An RL rollout engine that agrees with its trainer.")
    commands = parser.add_subparsers(title="commands", required=True, dest="command")
    check = commands.add_parser(
        "check",
        help="compare rollout and trainer bit for bit on your model and machine",
        description="Generates from random prompts under many schedules and compares each reported log-probability "
        "with the training forward, bit for bit. Exit code 0: all equal; 1: some differ; 2: can not be checked.",
    )
    _add_model(check, _check)
    check.add_argument(
        "--tokens", type=_positive, metavar="N", help="new tokens a request (32), up to half of the model's length"
    )
    check.add_argument(
        "--ssm-chunk", type=_positive, metavar="N", help="grid of the states of a model with recurrent layers (64)"
    )
    check.add_argument("--images", action="store_true", help="check the whole of a model with vision, and its images")
    bench = commands.add_parser(
        "bench",
        help="measure your model on your machine, or print what a sequence takes of memory",
        description="Generates from random prompts, all at once, and prints output tokens per second and the time to "
        "the first token: median and extremes of three rounds. Exit code 2: the model can not be measured.",
    )
    _add_model(bench, _bench)
    bench.add_argument("--memory", action="store_true", help="bytes of a KV block and of states; nothing is computed")
    bench.add_argument("--requests", type=_positive, default=16, metavar="N", help="requests at once (16)")
    bench.add_argument("--prompt", type=_positive, default=128, metavar="N", help="tokens a prompt (128)")
    bench.add_argument("--tokens", type=_positive, default=64, metavar="N", help="new tokens a request (64)")
    commands.add_parser("serve", help="answer over HTTP: OpenAI's endpoints, vLLM's RL dialect, metrics")
    return parser


def _add_model(command: argparse.ArgumentParser, run: Callable[[argparse.Namespace], int]) -> None:
    """Add the options that all commands about a model have."""
    command.add_argument(
        "model_dir",
        metavar="MODEL",
        help="a Hugging Face model folder, or a name of the Hugging Face hub; no tokenizer is needed",
    )
    command.add_argument("--revision", metavar="REV", help="branch, tag or commit of a name (its main branch)")
    command.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    command.add_argument(
        "--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16"), help="float16: on cuda"
    )
    command.add_argument(
        "--dequantize",
        action="store_true",
        help="take weights that the folder holds quantized (mxfp4, fp8) as bfloat16",
    )
    command.add_argument("--seed", type=_natural, default=0, metavar="N", help="of the random prompts (0)")
    command.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    command.set_defaults(run=run)


def _positive(text: str) -> int:
    return _at_least(1, text)


def _natural(text: str) -> int:
    return _at_least(0, text)


def _at_least(least: int, text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if number < least:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least {least}, got {text!r}")
    return number


def _load_openmp(own: bool) -> None:
    """Load OpenMP before torch does; start over where a process of our own had not said how idle threads wait."""
    with _collecting_no_garbage():
        from samebit.kernels.openmp import ENVIRONMENT
        from samebit.kernels.openmp_runtimes import leave_place

    if own and "OMP_WAIT_POLICY" not in os.environ:
        os.environ.update(ENVIRONMENT | dict(os.environ))
        leave_place()  # or OpenMP would find no other one when it is loaded again
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


@contextmanager
def _collecting_no_garbage() -> Iterator[None]:
    """Let libraries be loaded without a search for garbage among what they make: there is next to none."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _answer(arguments: argparse.Namespace, own: bool) -> int:
    """Run a command about a model; where that can not be, one line says why, below a traceback if not foreseen.

    own: whether the process is the command's alone.
    """
    foreseen: tuple[type[Exception], ...] = (ImportError, OSError, ValueError)
    try:
        _load_openmp(own)
        foreseen += _load_libraries()
        code: int = arguments.run(arguments)
    except foreseen as error:
        return _unusable(arguments.command, str(error))
    except Exception as error:
        traceback.print_exc()
        return _unusable(arguments.command, f"{type(error).__name__}: {error}")
    return code


def _load_libraries() -> tuple[type[Exception], ...]:
    """Load what commands about a model need, and keep it quiet; the errors of it that say what a user can change."""
    with _collecting_no_garbage():
        from safetensors import SafetensorError
        from torch import OutOfMemoryError
        from transformers.utils import logging

        from samebit.rollout.errors import NonFiniteLogitsError, NoTokenLeftError, SelfTestError, WorkerStateError
        from samebit.weight_sync import SyncBrokenError

    logging.disable_progress_bar()
    logging.set_verbosity(CRITICAL)  # what matters of it is in the error
    of_samebit = (NonFiniteLogitsError, NoTokenLeftError, SelfTestError, WorkerStateError, SyncBrokenError)
    return SafetensorError, OutOfMemoryError, *of_samebit


def _unusable(command: str, why: str) -> int:
    sys.stderr.write(f"samebit {command}: {' '.join(why.split())}\n")
    return UNUSABLE


def _check(arguments: argparse.Namespace) -> int:
    with _collecting_no_garbage():
        from samebit.rollout.audit.audit import check_model

    rows: list[Row] = []
    found = check_model(
        arguments.model_dir,
        dtype=arguments.dtype,
        new_tokens=arguments.tokens,
        seed=arguments.seed,
        device=arguments.device,
        ssm_chunk=arguments.ssm_chunk,
        revision=arguments.revision,
        dequantize=arguments.dequantize,
        images=arguments.images,
    )
    try:
        for row in found:
            if not (rows or arguments.json):
                sys.stdout.write(f"{'':<52}{'tokens':>9}{'differing':>11}{'max |diff|':>12}\n")
            rows.append(row)
            if not arguments.json:
                sys.stdout.write(f"{row.name:<52}{row.tokens:>9,}{row.differing:>11,}{row.max_abs_diff:>12.3g}\n")
                sys.stdout.flush()
    except Exception as error:
        if rows and arguments.json:
            _print_report(False, rows, error=f"{type(error).__name__}: {error}")
        raise
    ok = all(row.differing == 0 for row in rows if row.promised)
    if arguments.json:
        _print_report(ok, rows)
    else:
        sys.stdout.write("every bit agrees\n" if ok else "NOT EXACT: see the rows with differing tokens\n")
    return 0 if ok else FAILED


def _print_report(ok: bool, rows: Sequence[Row], **more: str) -> None:
    """Print the rows as JSON; of a check that ended early those that it had found, and ``error`` in ``more``."""
    sys.stdout.write(json.dumps({"ok": ok, "rows": [row.as_json() for row in rows], **more}) + "\n")


def _bench(arguments: argparse.Namespace) -> int:
    with _collecting_no_garbage():
        from samebit.rollout.audit.speed import Load, memory_figures, speed_figures

    load = Load(arguments.requests, arguments.prompt, arguments.tokens, arguments.seed)
    where, dtype, revision = arguments.model_dir, arguments.dtype, arguments.revision
    more = {"dequantize": arguments.dequantize, "device": arguments.device}
    if arguments.memory:
        figures = memory_figures(where, dtype, revision, **more)
    else:
        figures = speed_figures(where, load, dtype, revision, **more)
    if arguments.json:
        metrics = {one.name: {"value": one.value, "min": one.min, "max": one.max} for one in figures}
        sys.stdout.write(json.dumps({"meta": {} if arguments.memory else vars(load), "metrics": metrics}) + "\n")
        return 0
    for one in figures:
        extremes = "" if one.min == one.max else f"  ({one.min:,.0f} to {one.max:,.0f})"
        sys.stdout.write(f"{one.name.replace('_', ' '):<28}{one.value:>14,.0f} {one.unit}{extremes}\n")
    return 0


def _serve(given: Sequence[str], own: bool) -> int:
    """Serve; its many options have a parser of their own (`samebit serve --help`)."""
    try:
        _load_openmp(own)
        with _collecting_no_garbage():
            from samebit.rollout.integrations.http.serving import main as serve
    except (ImportError, OSError) as error:
        return _unusable("serve", str(error))
    return serve(given)


if __name__ == "__main__":
    sys.exit(main())
