"""Start verl's trainer as a user would, and read what it logged."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from samebit.kernels.openmp import process_environment

HERE = Path(__file__).parent
V1 = "verl.trainer.main_ppo"
"""Is verl's own entry, of its trainer modes sync, colocate_async and separate_async."""

_ENVIRONMENT = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # Ray listens on the loopback interface alone
    "RAY_USAGE_STATS_ENABLED": "0",
    "GLOO_SOCKET_IFNAME": "lo",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VERL_LOGGING_LEVEL": "WARN",
}


@dataclass(frozen=True)
class Run:
    """Describes one run of verl.

    data: what `task.build` wrote. out: where its log and metrics go. options: of verl, by their dotted names. entry:
    verl's module for the kind of trainer. words: more options, as a user writes them for Hydra; they win. variables: of
    the environment of all its processes.
    """

    data: Path
    out: Path
    options: Mapping[str, object] = field(default_factory=dict)
    entry: str = V1
    config: str = "tiny"
    num_threads: int = 1
    words: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def log(self) -> Path:
        """Return the file with everything that the run's processes print."""
        return self.out / "log.txt"

    def command(self) -> list[str]:
        """Return verl's command, with the configuration of this folder."""
        entry = [sys.executable, "-m", self.entry, f"--config-path={HERE}", f"--config-name={self.config}"]
        return entry + self.overrides()

    def overrides(self) -> list[str]:
        """Return the options that go to Hydra over that configuration."""
        data = self.data.resolve()
        options = {
            "data.train_files": data / "train.parquet",
            "data.val_files": data / "test.parquet",
            "actor_rollout_ref.model.path": data / "model",
            "reward.custom_reward_function.path": HERE / "reward.py",
            **self.options,
        }
        return [f"++{name}={_written(value)}" for name, value in options.items()] + list(self.words)

    def environment(self) -> dict[str, str]:
        """Return the environment of all processes of the run."""
        own = process_environment(self.num_threads) | _ENVIRONMENT
        own["VERL_FILE_LOGGER_PATH"] = str(self.out.resolve() / "metrics.jsonl")
        inherited = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
        return inherited | own | dict(self.variables)

    def start(self) -> subprocess.Popen[bytes]:
        """Start verl in a new session, so that all its processes can be ended together."""
        self.out.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as log:
            return subprocess.Popen(
                self.command(),
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self.environment(),
                cwd=self.out,
                start_new_session=True,
            )

    def steps(self) -> list[dict[str, Any]]:
        """Return the metrics of each training step, in order."""
        return [row for row in self.rows() if "training/global_step" in row]

    def rows(self) -> list[dict[str, Any]]:
        """Return everything that was logged, with its `step`."""
        path = self.out / "metrics.jsonl"
        entries = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [{"step": entry["step"], **entry["data"]} for entry in entries]


def _written(value: object) -> str:
    """Return a value as Hydra reads it."""
    return json.dumps(value) if isinstance(value, bool | list) or value is None else str(value)
