"""Measure the mismatch of many kinds of runs, as verl does (`make verl-matrix`); it must be 0 everywhere.

Every run starts verl anew. What was run is kept in `OUT/NAME` and not run again; the table is written after each run,
so that it can be interrupted and taken up again.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from samebit.benchmarks.verl_matrix.cases import PROMPTS, SAMPLES, SAVED, Case, cases, settings
from samebit.recipes.verl_grpo import task
from samebit.recipes.verl_grpo.launch import HERE, Run
from samebit.recipes.verl_grpo.mismatch import worst

NOT_RUN, FAILED, ENDED_EARLY, NOTHING_COMPARED = "not run", "failed", "ended early", "nothing compared"

TRAJECTORIES = "samebit/on_policy/trajectories"
FRESH = ("samebit/on_policy/tokens", "samebit/on_policy/tokens_differing")


@dataclass(frozen=True)
class Result:
    """Holds the result of one run; `state` is empty when it did all its steps, and something was compared.

    learned: steps with a gradient, which moved the weights. stale: steps with older trajectories. mismatch: the largest
    of all other steps, None without such steps. tokens, differing: those of trajectories sampled under the weights that
    were trained. commit: the code that ran.
    """

    name: str
    state: str = ""
    steps: int = 0
    learned: int = 0
    stale: int = 0
    mismatch: float | None = None
    tokens: int = 0
    differing: int = 0
    commit: str = "unknown"

    @property
    def is_bad(self) -> bool:
        """Return whether the run ended, but proves nothing, or found a difference."""
        return self.state not in ("", NOT_RUN) or bool(self.mismatch) or self.differing > 0


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what is missing, and write the table."""
    parser = argparse.ArgumentParser(prog="benchmarks/verl_matrix/matrix.py", description=__doc__, allow_abbrev=False)
    parser.add_argument("--steps", type=int, default=20, help="of each run")
    parser.add_argument("--out", type=Path, default=Path("runs/verl-matrix"), help="what was run")
    parser.add_argument("--only", nargs="*", default=[], help="names of runs, or parts of them; all if none are given")
    given = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))
    console = Console()
    given.out.mkdir(parents=True, exist_ok=True)
    for name, case in cases().items():
        wanted = not given.only or any(part in name for part in given.only)
        if wanted and read(given.out / name, name, case.logged(given.steps)).state:
            console.print(f"{name} ...", highlight=False)
            run(prepared(name, case, given.out, given.steps))
        console.print(line(read(given.out / name, name, case.logged(given.steps))), highlight=False)
        (given.out / "matrix.md").write_text(table(given.out, given.steps))
    bad = [result.name for result in results(given.out, given.steps) if result.is_bad]
    if bad:
        sys.exit(f"error: not run to the end, or rollout and trainer differ: {', '.join(bad)}")


def prepared(name: str, case: Case, out: Path, steps: int) -> Run:
    """Return the run, after preparing what it starts from."""
    data = out / ("data" if case.architecture == "dense" else f"data-{case.architecture}")
    data.mkdir(parents=True, exist_ok=True)
    task.build(data, training=512, held_out=16, warm=True, architecture=case.architecture)
    options = {**settings(steps), **case.settings(steps)}
    if case.resumes is not None:
        saved = out / case.resumes / "checkpoint" / f"global_step_{SAVED}"
        options |= {"trainer.resume_mode": "resume_path", "trainer.resume_from_path": saved.resolve()}
    options = {"trainer.default_local_dir": "checkpoint", **options}
    return Run(data, out / name, options, case.entry, num_threads=case.num_threads)


def run(run: Run) -> None:
    """Let it run to its end, whatever that is; if this program is ended, so is the run."""
    shutil.rmtree(run.out, ignore_errors=True)
    process = run.start()
    try:
        code = process.wait()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
    (run.out / "commit").write_text(_commit())
    (run.out / "exit").write_text(str(code))


def _commit() -> str:
    """Return samebit's commit, with "-dirty" if files differ from it; "unknown" for an installed package."""
    words = ["git", "describe", "--always", "--exclude=*", "--abbrev=7", "--dirty"]
    try:
        return subprocess.run(words, cwd=HERE, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def results(out: Path, steps: int) -> list[Result]:
    """Return the results of all runs, each of this many steps."""
    return [read(out / name, name, case.logged(steps)) for name, case in cases().items()]


def read(folder: Path, name: str, steps: int) -> Result:
    """Return the result of a run that should have logged this many steps."""
    if not (folder / "exit").exists():
        return Result(name, NOT_RUN)
    rows = Run(folder, folder).steps()
    if (folder / "exit").read_text() != "0":
        return Result(name, FAILED)
    fresh = [row for row in rows if row[TRAJECTORIES] == PROMPTS * SAMPLES]
    tokens = int(_total(rows, FRESH[0]))
    return Result(
        name,
        state=ENDED_EARLY if len(rows) < steps else "" if tokens else NOTHING_COMPARED,
        steps=len(rows),
        learned=sum(row["actor/grad_norm"] > 0 for row in rows),
        stale=len(rows) - len(fresh),
        mismatch=worst(fresh),
        tokens=tokens,
        differing=int(_total(rows, FRESH[1])),
        commit=(folder / "commit").read_text(),
    )


def _total(rows: Sequence[dict[str, Any]], name: str) -> float:
    return float(sum(row.get(name, 0.0) for row in rows))


def line(result: Result) -> str:
    """Return the result's line of the table."""
    if result.state:
        return f"| {result.name} | {result.state} | | | | | | |"
    mismatch = "-" if result.mismatch is None else result.mismatch
    numbers = (result.steps, result.learned, result.stale, mismatch, f"{result.tokens:,}", result.differing)
    return f"| {result.name} | {' | '.join(map(str, numbers))} | {result.commit} |"


def table(out: Path, steps: int) -> str:
    """Return the table of all runs, in Markdown."""
    return "\n".join(_lines(out, steps)) + "\n"


def _lines(out: Path, steps: int) -> Iterator[str]:
    yield f"Runs of {steps} steps. Mismatch: the largest of verl's `training/rollout_probs_diff_max` and the absolute"
    yield "`rollout_corr/rollout_rs_token_k1_max` and `_min`, over the steps without trajectories of older weights (-"
    yield "where every step has some)."
    yield "Tokens: of trajectories sampled under the weights that their step trains, each compared bit by bit."
    yield ""
    yield "| run | steps | that learned | with older trajectories | mismatch | tokens | that differ | commit |"
    yield "|---|---|---|---|---|---|---|---|"
    for result in results(out, steps):
        yield line(result)


if __name__ == "__main__":
    main()
