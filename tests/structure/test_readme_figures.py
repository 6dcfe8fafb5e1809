"""README's table of speed says what the files of results say: each cell is computed again from the file it is of."""

from __future__ import annotations

import json
import re
import statistics
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks/results"
COLUMNS = ("AMD EPYC, Zen 4", "AMD EPYC, Zen 3", "Intel Xeon with AMX")


@dataclass(frozen=True)
class Figure:
    """Names a figure of a file: a metric, or the ratio to a peer over all rounds of a part of beside_vllm.py."""

    file: str
    name: str
    peer: str = ""
    more: float = 0.0  # a gain of 3.2 is 4.2 times as much
    inverse: bool = False  # of a ratio of times

    def read(self) -> float:
        """Return the figure."""
        results = json.loads((RESULTS / self.file).read_text())
        if self.peer:
            rounds = results["meta"]["parts"][self.name]["seconds"]
            return float(statistics.median(one[self.peer] / one["samebit"] for one in rounds))
        value = float(results["metrics"][self.name]["value"]) + self.more
        return 1 / value if self.inverse else value


def beside_vllm(processor: str, *parts: str) -> list[Figure]:
    return [Figure(f"beside_vllm-{processor}.json", part, peer="vllm_logprobs") for part in parts]


def over_generate(machine: str, *sizes: str) -> list[Figure]:
    return [Figure(f"rollout-{machine}.json", f"ratio_vs_hf_generate_{size}") for size in sizes]


def of_prefix_cache(machine: str) -> list[Figure]:
    names = ("requests_per_second_gain_out8", "requests_per_second_gain_out128")
    return [Figure(f"prefix_cache-{machine}.json", name, more=1.0) for name in names]


GROUPS = {size: (f"{size}_fp32_groups", f"{size}_bf16_groups") for size in ("5m", "100m")}
OTHERS = ("5m_fp32_shared", "5m_fp32_turns")
HYBRID = "ratio_vs_hf_generate_hybrid"
CELLS: dict[str, tuple[list[Figure], ...]] = {
    "vLLM, both with log-probabilities: 5 M": (
        beside_vllm("zen4", *GROUPS["5m"], "5m_fp32_groups257", "5m_bf16_groups257"),
        beside_vllm("zen3", *GROUPS["5m"]),
    ),
    "the same, 100 M": tuple(beside_vllm(name, *GROUPS["100m"]) for name in ("zen4", "zen3")),
    "the same, 5 M behind 1,024": tuple(beside_vllm(name, *OTHERS) for name in ("zen4", "zen3")),
    "Hugging Face `generate`: 5 M": (
        over_generate("zen4", "5m", "5m_bf16"),
        [],
        over_generate("intel", "5m", "5m_bf16"),
    ),
    "as much, 100 M": (over_generate("zen4", "100m", "100m_bf16"), [], over_generate("intel", "100m", "100m_bf16")),
    "as much, a hybrid": ([Figure("hybrid-zen4.json", HYBRID)], [], [Figure("hybrid-intel.json", HYBRID)]),
    "the same engine, module by module": (
        [Figure("rollout-zen4.json", "exact_tax", inverse=True)],
        [],
        [Figure("rollout-intel.json", "exact_tax", inverse=True)],
    ),
    "itself without the prefix cache": tuple(of_prefix_cache(machine) for machine in ("zen4", "zen3", "intel")),
}


def rows() -> list[list[str]]:
    """Return the cells of each row of README's table of speed."""
    section = (ROOT / "README.md").read_text().partition("## How fast is it?")[2].partition("\n## ")[0]
    return [
        [cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line.startswith("|")
    ]


def test_the_table_has_the_columns_and_rows_that_are_computed_again() -> None:
    header, _, *body = rows()
    assert tuple(header[1:]) == COLUMNS
    assert len(body) == len(CELLS)


@pytest.mark.parametrize("label", CELLS)
def test_a_row_says_what_its_files_say(label: str) -> None:
    [row] = [row for row in rows() if row[0].startswith(label)]
    for cell, figures in zip(row[1:], CELLS[label], strict=False):
        assert re.findall(r"\d+\.\d", cell) == [f"{figure.read():.1f}" for figure in figures], cell
