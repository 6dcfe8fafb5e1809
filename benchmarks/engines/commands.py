"""Say how each engine is started, with the threads and the environment that suit it."""

from __future__ import annotations

import os
import sys
from ctypes.util import find_library
from dataclasses import dataclass
from pathlib import Path

from samebit.benchmarks.engines.process import ROOT, Command
from samebit.kernels.openmp import process_environment

VLLM_PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
VLLM_THREADS = ("all", "auto", "in-process")
SERVER_THREADS = ("auto", "all")
"""How servers use the cores: "auto", vLLM's own default, keeps one free for all that does not compute."""
_ALLOCATORS = ("tcmalloc_minimal", "tcmalloc")
_ENGINES = "samebit.benchmarks.engines"
_VLLM_SERVER = "vllm.entrypoints.openai.api_server"
_OF_OPENMP = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "NUMBA_THREADING_LAYER", "NUMBA_NUM_THREADS")


@dataclass(frozen=True)
class Model:
    """Names a model's folder, the dtype that it is computed in (float32 or bfloat16) and its longest sequence."""

    folder: Path
    dtype: str
    max_len: int

    @property
    def args(self) -> tuple[str, ...]:
        return (str(self.folder), "--dtype", self.dtype)

    def limited(self, step_tokens: int | None) -> tuple[str, ...]:
        """Return the arguments with the most tokens of a sequence, and of a step where one is given."""
        step = () if step_tokens is None else ("--step-tokens", str(step_tokens))
        return (*self.args, "--max-len", str(self.max_len), *step)


@dataclass(frozen=True)
class Serving:
    """Holds what a server is told beside its model: its name, sequences at once, memory for KV, use of the cores."""

    name: str
    max_num_seqs: int
    kv_gb: float
    threads: str


@dataclass(frozen=True)
class Limits:
    """Holds what an engine that samples for a trainer is told: memory for KV, samples at once, tokens of a step."""

    kv_gb: float
    sequences: int
    step_tokens: int


@dataclass(frozen=True)
class Vllm:
    """Says where vLLM is installed and how it uses the cores.

    threads: "all" binds a thread to each core; "auto" is its own default, which keeps one core free for its
        scheduler; "in-process" runs scheduler and model in one process, with a thread on each core. Each with what it
        asks for preloaded.
    """

    python: Path = VLLM_PYTHON
    threads: str = "all"

    def check(self) -> None:
        """Raise FileNotFoundError unless its environment is there."""
        if not self.python.exists():
            raise FileNotFoundError(f"no vLLM at {self.python}: `make bench-vllm` sets its environment up")

    def preloads(self) -> list[str]:
        """Return the libraries that it asks to have preloaded, as far as they are installed."""
        openmp = self.python.absolute().parent.parent / "lib" / "libiomp5.so"
        allocators = filter(None, map(find_library, _ALLOCATORS))
        return [*([str(openmp)] if openmp.exists() else []), *list(allocators)[:1]]

    def command(self, model: Model, step_tokens: int | None = None, kv_gb: float = 2.0) -> Command:
        args = ("-m", f"{_ENGINES}.vllm_engine", *model.limited(step_tokens), "--kv-gb", str(kv_gb))
        return self._command(args)

    def policy(self, folder: Path, dtype: str, limits: Limits) -> Command:
        """Return the command of an engine that samples for a trainer."""
        of_step = ("--sequences", str(limits.sequences), "--step-tokens", str(limits.step_tokens))
        memory = ("--kv-gb", str(limits.kv_gb))
        return self._command(("-m", f"{_ENGINES}.vllm_policy", str(folder), "--dtype", dtype, *memory, *of_step))

    def server(self, model: Model, port: int, serving: Serving) -> Command:
        """Return the command of its HTTP server, which neither tokenizes nor writes a line for each request."""
        limits = ("--max-num-seqs", str(serving.max_num_seqs), "--max-model-len", str(model.max_len))
        memory = ("--kv-cache-memory-bytes", str(int(serving.kv_gb * 2**30)))
        address = ("--host", "127.0.0.1", "--port", str(port), "--served-model-name", serving.name)
        quiet = ("--skip-tokenizer-init", "--disable-uvicorn-access-log")
        args = ("-m", _VLLM_SERVER, "--model", *model.args, *limits, *memory, *address, *quiet)
        return self._command(args)

    def _command(self, args: tuple[str, ...]) -> Command:
        cores = sorted(os.sched_getaffinity(0))
        listed = ",".join(map(str, cores))
        bound = {
            "all": {"VLLM_CPU_OMP_THREADS_BIND": listed},
            "auto": {},
            "in-process": {
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                "OMP_NUM_THREADS": str(len(cores)),
                "KMP_AFFINITY": f"granularity=fine,explicit,proclist=[{listed}]",
                "KMP_BLOCKTIME": "5",
                "KMP_TPAUSE": "0",
            },
        }[self.threads]
        python = self.python.absolute()  # processes start in folders of their own
        environment = {**bound, "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
        if preloads := self.preloads():
            environment["LD_PRELOAD"] = ":".join(preloads)
        return Command(python, args, environment, _OF_OPENMP)


def samebit(model: Model, step_tokens: int | None = None) -> Command:
    return _own("samebit_engine", model.limited(step_tokens))


def samebit_server(model: Model, port: int, serving: Serving) -> Command:
    """Return the command of `samebit serve`, which gets as many threads as vLLM's server."""
    cores = len(os.sched_getaffinity(0))
    threads = cores if serving.threads == "all" else max(1, cores - 1)
    limits = ("--max-num-seqs", str(serving.max_num_seqs), "--max-model-len", str(model.max_len))
    memory = ("--kv-cache-gb", str(serving.kv_gb), "--num-threads", str(threads))
    address = ("--port", str(port), "--served-model-name", serving.name)
    args = ("-m", "samebit.rollout.cli", "serve", *model.args, *limits, *memory, *address)
    return Command(Path(sys.executable), args, process_environment(threads))


def hugging_face(model: Model) -> Command:
    return _own("huggingface_engine", model.args)


def _own(name: str, args: tuple[str, ...]) -> Command:
    """Return the command of an engine of this environment, with a thread on each core."""
    environment = process_environment(len(os.sched_getaffinity(0)))
    return Command(Path(sys.executable), ("-m", f"{_ENGINES}.{name}", *args), environment)
