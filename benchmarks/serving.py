"""Measure what HTTP costs, and whether a crowd of streams loses anything. The server is a process of its own.

step_tax: seconds of a step behind the server, 64 requests at once that are not streamed, over those of a worker without
one; step_cpu_tax: CPU seconds of the threads that compute instead, which other work on the machine changes less;
batch_tax: seconds of the whole batch, from the first request to the last answer. us_per_chunk: CPU time of the thread
that answers, with streams less without, for the same tokens, a chunk. crowd_lost, crowd_doubled, crowd_hung: of the
concurrent streams, those whose tokens are not, or more than, the ones of the worker, or that do not end.

Beside vLLM's server, where vLLM is installed, both with as many threads, in turns, asked by one client:
ratio_vs_vllm_whole, ratio_vs_vllm_streamed: tokens a second of samebit over vLLM's; ratio_vs_vllm_first_chunk: vLLM's
seconds to the first chunk over samebit's; the crowd's figures of each, of which lost and doubled count tokens alone.
"""

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from samebit.benchmarks.engines import commands, http_servers
from samebit.benchmarks.engines.http_servers import Answers, CompletionServer, ready, reserved_port
from samebit.benchmarks.rounds import results_file
from samebit.benchmarks.rounds.turns import REST, Spread, spread
from samebit.benchmarks.workloads import models
from samebit.kernels.openmp import process_environment
from samebit.rollout import RolloutConfig, RolloutWorker, SamplingParams

ENVIRONMENT = process_environment(1)
CONFIG = RolloutConfig(max_num_seqs=64, num_threads=1, kv_cache_gb=0.25)
PATH = "/inference/v1/generate"
HANGS = http_servers.HANGS
PARTS = ("http", "vllm")


@dataclass(frozen=True)
class Sizes:
    requests: int = 64
    prompt: int = 32
    tokens: int = 96
    crowd: int = 500
    crowd_tokens: int = 48
    rounds: int = 5


@dataclass(frozen=True)
class Cost:
    """Holds what a batch took: seconds, those of a step and its CPU, CPU seconds of the thread that answers, chunks."""

    seconds: float
    step_seconds: float
    step_cpu_seconds: float
    cpu_seconds: float
    chunks: int


def measure(folder: Path, sizes: Sizes) -> dict[str, Spread]:
    """Return every figure; the contestants take turns."""
    with RolloutWorker(folder, config=CONFIG) as worker, serving(folder) as server:
        expected = direct(worker, sizes)[1]
        for stream in (False, True):
            server.batch(sizes, expected, stream=stream)
        step, step_cpu, batch, chunk = [], [], [], []
        for _ in range(sizes.rounds):
            alone = direct(worker, sizes)[0]
            plain = server.batch(sizes, expected, stream=False)
            streamed = server.batch(sizes, expected, stream=True)
            step.append(plain.step_seconds / alone.step_seconds)
            step_cpu.append(plain.step_cpu_seconds / alone.step_cpu_seconds)
            batch.append(plain.seconds / alone.seconds)
            chunk.append(1e6 * (streamed.cpu_seconds - plain.cpu_seconds) / streamed.chunks)
        crowd = server.crowd(worker, sizes)
    taxes = {"step_tax": spread(step), "step_cpu_tax": spread(step_cpu), "batch_tax": spread(batch)}
    return {**taxes, "us_per_chunk": spread(chunk), **crowd}


def prompt(number: int, length: int) -> list[int]:
    return [(7 * number + 13 * place) % 97 for place in range(length)]


def direct(worker: RolloutWorker, sizes: Sizes) -> tuple[Cost, list[list[int]]]:
    """Run the batch without a server; also what it sampled."""
    worker.reset_prefix_cache()
    before, cpu, began = worker.stats(), _computing_cpu(os.getpid()), time.perf_counter()
    params = [SamplingParams(max_tokens=sizes.tokens, seed=number) for number in range(sizes.requests)]
    outputs = worker.generate([prompt(number, sizes.prompt) for number in range(sizes.requests)], params)
    seconds, after = time.perf_counter() - began, worker.stats()
    steps = after["steps"] - before["steps"]
    step_cpu = (_computing_cpu(os.getpid()) - cpu) / steps
    cost = Cost(seconds, (after["step_seconds"] - before["step_seconds"]) / steps, step_cpu, 0.0, 0)
    return cost, [output.samples[0].token_ids for output in outputs]


class Server:
    """Asks a server that runs."""

    def __init__(self, process: subprocess.Popen[bytes], base: str, control: str) -> None:
        self._process = process
        self._base = base
        self._control = control

    def batch(self, sizes: Sizes, expected: list[list[int]], *, stream: bool) -> Cost:
        """Run the batch, and check what came."""
        httpx.post(f"{self._control}/reset_prefix_cache").raise_for_status()
        pid = self._process.pid
        before, cpu, computing, began = self._stats(), _cpu(pid, pid), _computing_cpu(pid), time.perf_counter()
        answers = asyncio.run(self._ask(sizes.requests, sizes.prompt, sizes.tokens, stream=stream))
        seconds, after = time.perf_counter() - began, self._stats()
        cpu, computing = _cpu(pid, pid) - cpu, _computing_cpu(pid) - computing
        if [ids for ids, _ in answers] != expected:
            raise RuntimeError("the server did not give the worker's tokens")
        steps = after["steps"] - before["steps"]
        step_seconds = (after["step_seconds"] - before["step_seconds"]) / steps
        return Cost(seconds, step_seconds, computing / steps, cpu, sum(chunks for _, chunks in answers))

    def crowd(self, worker: RolloutWorker, sizes: Sizes) -> dict[str, Spread]:
        """Run many streams at once; tell how many lost or doubled a token, or did not end."""
        params = [SamplingParams(max_tokens=sizes.crowd_tokens, seed=number) for number in range(sizes.crowd)]
        prompts = [prompt(number, sizes.prompt) for number in range(sizes.crowd)]
        expected = [output.samples[0].token_ids for output in worker.generate(prompts, params)]
        began = time.perf_counter()
        answers = asyncio.run(self._ask(sizes.crowd, sizes.prompt, sizes.crowd_tokens, stream=True))
        seconds = time.perf_counter() - began
        pairs = [(ids, wanted) for (ids, _), wanted in zip(answers, expected, strict=True)]
        counts = {
            "crowd_hung": sum(ids is None for ids, _ in pairs),
            "crowd_lost": sum(ids is not None and ids != wanted and len(ids) <= len(wanted) for ids, wanted in pairs),
            "crowd_doubled": sum(ids is not None and len(ids) > len(wanted) for ids, wanted in pairs),
            "crowd_tokens_per_second": sizes.crowd * sizes.crowd_tokens / seconds,
        }
        return {name: spread([float(value)]) for name, value in counts.items()}

    async def _ask(
        self, requests: int, length: int, tokens: int, *, stream: bool
    ) -> list[tuple[list[int] | None, int]]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=self._base, limits=limits, timeout=HANGS) as client:
            asked = [self._one(client, number, length, tokens, stream=stream) for number in range(requests)]
            return await asyncio.gather(*asked)

    async def _one(
        self, client: httpx.AsyncClient, number: int, length: int, tokens: int, *, stream: bool
    ) -> tuple[list[int] | None, int]:
        """Return the tokens of a request, None if it does not end, and in how many chunks they came."""
        body: dict[str, Any] = {
            "token_ids": prompt(number, length),
            "sampling_params": {"max_tokens": tokens, "seed": number, "ignore_eos": True},
            "stream": stream,
        }
        try:
            if not stream:
                answer = await client.post(PATH, json=body)
                answer.raise_for_status()
                return answer.json()["choices"][0]["token_ids"], 1
            ids: list[int] = []
            chunks = 0
            async with client.stream("POST", PATH, json=body) as events:
                events.raise_for_status()
                async for line in events.aiter_lines():
                    if line.startswith("data: {"):
                        ids += json.loads(line[6:])["choices"][0]["token_ids"]
                        chunks += 1
            return ids, chunks
        except httpx.TimeoutException:
            return None, 0

    def _stats(self) -> dict[str, float]:
        text = httpx.get(f"{self._base}/metrics").text
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        return {one.name.removeprefix("samebit_").removesuffix("_total"): one.value for one in samples}


def _cpu(pid: int, thread: int) -> float:
    """Return the CPU seconds of a thread; the main one, which answers, has the number of its process."""
    return int(Path(f"/proc/{pid}/task/{thread}/schedstat").read_text().split()[0]) / 1e9


def _computing_cpu(pid: int) -> float:
    """Return the CPU seconds of all threads but the main one."""
    threads = (int(path.name) for path in Path(f"/proc/{pid}/task").iterdir())
    return sum(_cpu(pid, thread) for thread in threads if thread != pid)


@contextmanager
def serving(folder: Path) -> Iterator[Server]:
    """Start a server in a process of its own."""
    flags = ["--max-num-seqs", str(CONFIG.max_num_seqs), "--num-threads", "1", "--kv-cache-gb", str(CONFIG.kv_cache_gb)]
    with reserved_port() as port, reserved_port() as inner:
        ports = ["--port", str(port), "--control", "loopback", "--control-port", str(inner)]
        command = [sys.executable, "-m", "samebit.rollout.cli", "serve", str(folder), *flags, *ports]
        process = subprocess.Popen(command, env={**os.environ, **ENVIRONMENT})
        try:
            base = f"http://127.0.0.1:{port}"
            if not ready(process, f"{base}/readiness"):
                raise RuntimeError(f"the server ended with exit code {process.returncode}")
            yield Server(process, base, f"http://127.0.0.1:{inner}")
        finally:
            process.terminate()
            process.wait()


def beside_vllm(model: commands.Model, vllm: commands.Vllm, sizes: Sizes) -> dict[str, Spread]:
    """Return the figures of both servers; they take turns, after a rest, and the first one changes from round to
    round."""
    settings = commands.Serving("measured", CONFIG.max_num_seqs, 0.25, vllm.threads)
    starts = {
        "samebit": partial(commands.samebit_server, model, serving=settings),
        "vllm": partial(vllm.server, model, serving=settings),
    }
    with ExitStack() as stack:
        servers = {
            name: stack.enter_context(http_servers.serving(start, settings.name)) for name, start in starts.items()
        }
        _round(servers, 0, sizes)
        rounds = [_round(servers, number, sizes) for number in range(1, sizes.rounds + 1)]
        crowds = {name: crowd(server, sizes) for name, server in servers.items()}
    found = _ratios(rounds)
    for name, counts in crowds.items():
        found |= _of_server(name, [one[name] for one in rounds], sizes)
        found |= {f"crowd_{what}_{name}": spread([value]) for what, value in counts.items()}
    return found


def _round(servers: dict[str, CompletionServer], number: int, sizes: Sizes) -> dict[str, dict[str, Answers]]:
    """Ask each server for a batch whole, then each for one streamed; prompts are new each time, the same for all."""
    names = list(servers) if number % 2 else list(reversed(servers))
    answers: dict[str, dict[str, Answers]] = {name: {} for name in names}
    for offset, way in enumerate(("whole", "streamed")):
        prompts = _random_prompts(2 * number + offset, sizes.requests, sizes.prompt)
        for name in names:
            time.sleep(REST)
            found = servers[name].ask(prompts, sizes.tokens, stream=way == "streamed")
            found.check(sizes.tokens)
            answers[name][way] = found
    return answers


def _random_prompts(seed: int, count: int, length: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [draw.choices(range(models.SHAPES["5m"]["vocab_size"]), k=length) for _ in range(count)]


def _ratios(rounds: list[dict[str, dict[str, Answers]]]) -> dict[str, Spread]:
    """Return vLLM's seconds over samebit's, round by round."""
    pairs = [(one["vllm"], one["samebit"]) for one in rounds]
    ratios = {way: [theirs[way].seconds / ours[way].seconds for theirs, ours in pairs] for way in ("whole", "streamed")}
    ratios["first_chunk"] = [
        theirs["streamed"].first_chunk() / ours["streamed"].first_chunk() for theirs, ours in pairs
    ]
    return {f"ratio_vs_vllm_{what}": spread(values) for what, values in ratios.items()}


def _of_server(name: str, rounds: list[dict[str, Answers]], sizes: Sizes) -> dict[str, Spread]:
    """Return the figures of one server."""
    tokens = sizes.requests * sizes.tokens
    speeds = {way: [tokens / one[way].seconds for one in rounds] for way in ("whole", "streamed")}
    found = {f"tokens_per_second_{way}_{name}": spread(values) for way, values in speeds.items()}
    return found | {f"first_chunk_seconds_{name}": spread([one["streamed"].first_chunk() for one in rounds])}


def crowd(server: CompletionServer, sizes: Sizes) -> dict[str, float]:
    """Run many streams at once; tell how many have too few tokens, too many, or did not end."""
    prompts = _random_prompts(10**6, sizes.crowd, sizes.prompt)
    answers = server.ask(prompts, sizes.crowd_tokens, stream=True)
    ended = [one.tokens for one in answers.each if not one.hung]
    return {
        "hung": len(answers.each) - len(ended),
        "lost": sum(tokens < sizes.crowd_tokens for tokens in ended),
        "doubled": sum(tokens > sizes.crowd_tokens for tokens in ended),
        "tokens_per_second": sum(one.tokens for one in answers.each) / answers.seconds,
    }


def _where_installed(folder: Path, vllm: commands.Vllm, sizes: Sizes) -> dict[str, Spread]:
    """Return the figures beside vLLM; none, and one line that says why, where it is missing."""
    try:
        vllm.check()
    except FileNotFoundError as error:
        print(f"left out: {error}")
        return {}
    return beside_vllm(commands.Model(folder, "float32", 512), vllm, sizes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="of the batches (5)")
    parser.add_argument("--quick", action="store_true", help="few requests, one round")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, metavar="NAME", help="http, vllm (both)")
    parser.add_argument(
        "--vllm-python", type=Path, default=commands.VLLM_PYTHON, metavar="FILE",
        help="the Python that has vLLM; without it its part is left out",
    )  # fmt: skip
    parser.add_argument(
        "--server-threads", choices=commands.SERVER_THREADS, default=commands.SERVER_THREADS[0],
        help="of both servers of that part; auto: vLLM's own default, a core is kept free (the default)",
    )  # fmt: skip
    options = parser.parse_args()
    sizes = Sizes(8, 8, 12, 24, 6, 1) if options.quick else Sizes(rounds=options.rounds)
    figures: dict[str, Spread] = {}
    with tempfile.TemporaryDirectory() as folder:
        models.build(models.SHAPES["5m"], models.DTYPES["fp32"], 512).save_pretrained(folder)
        if "http" in options.parts:
            figures |= measure(Path(folder), sizes)
        if "vllm" in options.parts:
            figures |= _where_installed(Path(folder), commands.Vllm(options.vllm_python, options.server_threads), sizes)
    for name, one in figures.items():
        print(f"{name:<36}{one.value:>10.3f}  ({one.min:.3f} to {one.max:.3f})")
    if options.json is not None:
        results_file.write(options.json, results_file.describe(sizes=vars(sizes)), figures)


if __name__ == "__main__":
    main()
