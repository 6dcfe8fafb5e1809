"""Measure in turns: each contestant runs once a round, and rounds on a disturbed machine are dropped.

A fixed GEMM is timed before every turn, and what other processes use is watched during it. A round counts
only if each of its calibrations is within `TOLERANCE` of the median of the whole run and others had less
than `NEIGHBOURS` of the machine in every turn; figures are made of ratios within a round, so that what slows
the machine for minutes cancels.
"""

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from samebit.benchmarks.rounds.machine_noise import Neighbours

TOLERANCE = 0.15
NEIGHBOURS = 0.1
REST = 1.0
"""Seconds before a turn where others are processes of their own: vLLM's worker is busy for .3 s behind its answer."""


@dataclass(frozen=True)
class Spread:
    """Holds median and extremes of one figure over the rounds."""

    value: float
    min: float
    max: float


def spread(values: list[float]) -> Spread:
    return Spread(statistics.median(values), min(values), max(values))


class Calibration:
    """Knows the machine's speed over time: a GEMM that has nothing to do with any contestant."""

    def __init__(self, size: int = 512, repeats: int = 15) -> None:
        self._a = torch.rand(size, size)
        self._b = torch.rand(size, size)
        self._repeats = repeats
        self.seconds: list[float] = []
        self._once()

    def measure(self) -> float:
        """Return the median seconds of one GEMM now, and remember them."""
        seconds = statistics.median(self._once() for _ in range(self._repeats))
        self.seconds.append(seconds)
        return seconds

    def steady(self, seconds: float) -> bool:
        return self.deviation(seconds) <= TOLERANCE

    def deviation(self, seconds: float) -> float:
        """Return how far this is from the median of the whole run, as a share of it."""
        median = statistics.median(self.seconds)
        return abs(seconds - median) / median

    def _once(self) -> float:
        began = time.perf_counter()
        torch.mm(self._a, self._b)
        return time.perf_counter() - began


@dataclass
class Round:
    """Holds the seconds of each contestant in one round, and what the machine was like: calibrations, others' share."""

    number: int
    seconds: dict[str, float] = field(default_factory=dict)
    calibrations: list[float] = field(default_factory=list)
    others: list[float] = field(default_factory=list)


Turn = Callable[[int], float]
"""A contestant takes its turn in the round of this number: run once, check the result, return the seconds."""


def alternate(
    turns: dict[str, Turn],
    rounds: int,
    calibration: Calibration,
    own_seconds: Callable[[], float] = time.process_time,
    rest: float = 0.0,
) -> list[Round]:
    """Run each contestant once a round; the first one changes from round to round.

    Args:
        turns: the contestants.
        rounds: how many to run.
        calibration: measured before each turn.
        own_seconds: returns the CPU time of all contestants.
        rest: seconds before each turn, in which those in other processes end what they do behind their answer.
    """
    names = list(turns)
    measured = []
    for number in range(rounds):
        result = Round(number)
        first = number % len(names)
        for name in names[first:] + names[:first]:
            gc.collect()
            time.sleep(rest)
            result.calibrations.append(calibration.measure())
            neighbours = Neighbours(own_seconds)
            result.seconds[name] = turns[name](number)
            result.others.append(neighbours.share())
        measured.append(result)
    return measured


def kept(rounds: list[Round], calibration: Calibration) -> list[Round]:
    """Return the steady rounds; if none is steady, the least disturbed one."""
    steady = [one for one in rounds if is_steady(one, calibration)]
    return steady or [min(rounds, key=lambda one: max([*map(calibration.deviation, one.calibrations), *one.others]))]


def is_steady(one: Round, calibration: Calibration) -> bool:
    return all(map(calibration.steady, one.calibrations)) and all(share < NEIGHBOURS for share in one.others)


def ratio(rounds: list[Round], over: str, under: str) -> Spread:
    """Return the seconds of `over` per second of `under`, round by round."""
    return spread([one.seconds[over] / one.seconds[under] for one in rounds])
