"""Make the parser of a benchmark's command line, with the options that most benchmarks have."""

import argparse
from collections.abc import Collection
from pathlib import Path


def benchmark_parser(
    doc: str | None, *, rounds: int | None = None, of: str = "", parts: Collection[str] = ()
) -> argparse.ArgumentParser:
    """Return a parser with `--json`, with `--parts` where there are parts, and with `--rounds` where it has a default.

    Args:
        doc: of the benchmark's module.
        rounds: the default.
        of: what the rounds are of.
        parts: their names. Those that the file of `--json` has are spared (`parts_file`).
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    spared = ", and spare the parts that are here" if parts else ""
    parser.add_argument("--json", type=Path, help=f"write the figures here{spared}")
    if parts:
        parser.add_argument("--parts", nargs="+", choices=parts, metavar="NAME", help=f"some of {', '.join(parts)}")
    if rounds is not None:
        parser.add_argument("--rounds", type=_positive, default=rounds, help=f"rounds of {of} (default {rounds})")
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number
