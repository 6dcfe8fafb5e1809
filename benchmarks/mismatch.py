"""Compare the log-probabilities that engines report with those of a trainer's forward, on the tokens they sampled.

    make mismatch ARGS="[--parts NAME ...] [--json FILE] [--plot FILE] [--quick] [--folder MODEL]"

Engines: vLLM, Hugging Face's `generate`, TRL (where it is installed) and samebit. A part is a kind of model in a
dtype, as dense_bf16; each is written when it is done, and a file that holds it spares it. Counts need no idle machine.
docs/mismatch.md says what is compared.
"""

import samebit.kernels  # noqa: F401  (before torch: see samebit.kernels.openmp)

# isort: split
import argparse
import importlib.util
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig

from samebit.benchmarks.engines import commands
from samebit.benchmarks.engines.messages import Done, Job, Tokens
from samebit.benchmarks.engines.process import Command, EngineProcess, started
from samebit.benchmarks.rounds import mismatch_report, results_file
from samebit.benchmarks.rounds.parts_file import PartsFile
from samebit.benchmarks.rounds.turns import Spread
from samebit.benchmarks.workloads import mismatch_models, trainers
from samebit.benchmarks.workloads.models import DTYPES

NAMES = {"fp32": "float32", "bf16": "bfloat16"}
OWN = "own"
"""Names, as the kind of model, the folder that was given."""

WITHOUT_VLLM = ("hybrid_fp32",)
"""Parts that vLLM does not compute: its Gated DeltaNet on a CPU takes bfloat16 alone."""


@dataclass(frozen=True)
class Sizes:
    """Sets the sequences that are compared, in tokens; `micro_batch` of them are in a training forward."""

    sequences: int = 64
    prompt: int = 520
    new: int = 64
    micro_batch: int = 4
    chunk: int = 96

    @property
    def longest(self) -> int:
        return self.prompt + self.new


@dataclass(frozen=True)
class Sampled:
    """Holds sequences ``[S, T]``, and what the engine says of their last tokens, ``[S, new]``.

    cached: prompt tokens that a prefix cache spared.
    """

    ids: Tensor
    reported: Tensor
    cached: int = 0


@dataclass(frozen=True)
class Part:
    """Says what is compared: a model's folder in a dtype, and how vLLM is started (None: left out)."""

    folder: Path
    dtype: str
    sizes: Sizes
    vllm: commands.Vllm | None

    @property
    def model(self) -> commands.Model:
        return commands.Model(self.folder, NAMES[self.dtype], self.sizes.longest)

    def prompts(self) -> Tokens:
        vocab_size = AutoConfig.from_pretrained(self.folder).get_text_config().vocab_size
        generator = torch.Generator().manual_seed(0)
        shape = (self.sizes.sequences, self.sizes.prompt)
        ids: Tokens = torch.randint(vocab_size, shape, generator=generator).tolist()
        return ids


def cached_ways(engine: EngineProcess, prompts: Tokens, new: int) -> dict[str, Sampled]:
    """Sample from an engine with a prefix cache: all at once when it is cold, when it is warm, and one by one."""
    jobs = {
        "cold": Job(prompts, new_tokens=new, fresh=True),
        "warm": Job(prompts, new_tokens=new),
        "batch_1": Job(prompts, new_tokens=new, fresh=True, one_by_one=True),
    }
    done = {way: engine.run(job) for way, job in jobs.items()}
    for way in ("cold", "batch_1"):
        if done[way].cached != 0:
            raise RuntimeError(f"{done[way].cached} prompt tokens came from a cache that was told to forget")
    return {way: sampled(prompts, one) for way, one in done.items()}


def sampled(prompts: Tokens, done: Done) -> Sampled:
    """Return the sequences of an answer that has one sample of each prompt."""
    ids = [[*prompt, *tokens] for prompt, tokens in zip(prompts, done.tokens, strict=True)]
    return Sampled(torch.tensor(ids), torch.tensor(done.logprobs, dtype=torch.float64), done.cached or 0)


def sample(part: Part) -> dict[str, Sampled]:
    """Return what each engine sampled in each of its ways, as `vllm_cold`."""
    prompts, new, model = part.prompts(), part.sizes.new, part.model
    found: dict[str, Sampled] = {}
    caching: dict[str, tuple[Command, Command]] = {
        "samebit": (commands.samebit(model), commands.samebit(model, part.sizes.chunk))
    }
    if part.vllm is not None:
        caching["vllm"] = (part.vllm.command(model, kv_gb=1), part.vllm.command(model, part.sizes.chunk, kv_gb=1))
    for name, (whole, chunked) in caching.items():
        with started(whole) as engine:
            ways = cached_ways(engine, prompts, new)
        with started(chunked) as engine:
            ways["chunked"] = sampled(prompts, engine.run(Job(prompts, new_tokens=new)))
        found |= {f"{name}_{way}": one for way, one in ways.items()}
    with started(commands.hugging_face(model)) as engine:
        for way, alone in (("batch", False), ("batch_1", True)):
            job = Job(prompts, new_tokens=new, one_by_one=alone)
            found[f"hf_{way}"] = sampled(prompts, engine.run(job))
    return found


def compare(found: Sampled, score: trainers.Scorer) -> dict[str, float]:
    """Return tokens, those that differ, the mean and largest absolute difference in nats, the k3 estimate of KL, and
    the share of prompt tokens that came from a cache.

    k3 is that of J. Schulman, "Approximating KL Divergence" (2020), of the engine's distribution from the trainer's,
    on the engine's samples: exp(d) - 1 - d, where d is the trainer's log-probability less the engine's.
    """
    reported = found.reported
    difference = score(found.ids)[:, -reported.shape[1] :].double() - reported
    return {
        "tokens": difference.numel(),
        "differ": int((difference != 0).sum()),
        "mean": float(difference.abs().mean()),
        "largest": float(difference.abs().max()),
        "k3": float((difference.expm1() - difference).mean()),
        "cached": found.cached / (len(found.ids) * (found.ids.shape[1] - reported.shape[1])),
    }


def measure(part: Part) -> dict[str, Spread]:
    """Return the figures of one part, as `vllm_cold_vs_bf16_mean`; samebit's are beside samebit's training forward.

    The others' are beside Hugging Face's. In bfloat16 all of them, samebit's too, are also beside Hugging Face's in
    float32: how far bfloat16 itself goes, in each engine. `hf_forward` is Hugging Face's forward, a sequence at a time,
    beside that in micro-batches: what no engine can be blamed for.
    """
    by_way = sample(part)
    own = DTYPES[part.dtype]
    micro_batch = part.sizes.micro_batch
    model = trainers.load(part.folder, own)
    ids = by_way["hf_batch"].ids
    alone = trainers.hugging_face(model, 1)(ids)[:, -part.sizes.new :].double()
    by_way["hf_forward"] = Sampled(ids, alone)
    same = trainers.hugging_face(model, micro_batch)
    ours = {name for name in by_way if name.startswith("samebit")}
    rows = {f"{name}_vs_{part.dtype}": compare(by_way[name], same) for name in by_way.keys() - ours}
    if importlib.util.find_spec("trl"):
        rows |= beside_trl(part, by_way)
    if part.dtype == "bf16":
        wider = trainers.hugging_face(trainers.load(part.folder, torch.float32), micro_batch)
        rows |= {f"{name}_vs_fp32": compare(one, wider) for name, one in by_way.items()}
    bound = trainers.samebit(model, micro_batch)
    rows |= {f"{name}_vs_{part.dtype}": compare(by_way[name], bound) for name in ours}
    return {
        f"{row}_{name}": Spread(value, value, value) for row, found in rows.items() for name, value in found.items()
    }


def beside_trl(part: Part, by_way: dict[str, Sampled]) -> dict[str, dict[str, float]]:
    """Return what TRL's scores give beside `generate` and, where it ran, vLLM, whose difference TRL corrects by."""
    score = trainers.trl(trainers.load(part.folder, DTYPES[part.dtype]), part.sizes.micro_batch)
    engines = {"trl": "hf_batch", "trl_vllm": "vllm_cold"}
    return {f"{row}_vs_{part.dtype}": compare(by_way[way], score) for row, way in engines.items() if way in by_way}


@contextmanager
def folder_of(kind: str, given: Path | None, sizes: Sizes) -> Iterator[Path]:
    """Give the folder of a kind of model: that which was given, or one that is written for as long as it is needed."""
    if given is not None:
        yield given
        return
    with tempfile.TemporaryDirectory() as folder:
        mismatch_models.build(kind, sizes.longest).save_pretrained(folder)
        yield Path(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", metavar="NAME", help="kind_dtype: dense, hybrid, experts; fp32, bf16")
    parser.add_argument("--folder", type=Path, help="a model's folder instead; its parts are own_fp32 and own_bf16")
    parser.add_argument("--json", type=Path, help="write the figures here, and spare the parts that are here")
    parser.add_argument("--plot", type=Path, help="write a picture (PNG) of all figures of the file here")
    parser.add_argument("--markdown", type=Path, help="write the table of all figures of the file here")
    parser.add_argument("--quick", action="store_true", help="an eighth of the sequences")
    parser.add_argument("--vllm", type=Path, default=commands.VLLM_PYTHON, help="the Python that has vLLM")
    parser.add_argument("--vllm-threads", choices=commands.VLLM_THREADS, default=commands.VLLM_THREADS[0])
    parser.add_argument("--without-vllm", action="store_true", help="leave vLLM out")
    args = parser.parse_args()
    kinds = list(mismatch_models.CONFIGS) if args.folder is None else [OWN]
    names = [f"{kind}_{dtype}" for kind in kinds for dtype in DTYPES]
    if unknown := set(args.parts or []) - set(names):
        parser.error(f"--parts: no {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    vllm = None if args.without_vllm else commands.Vllm(args.vllm, args.vllm_threads)
    if vllm is not None:
        vllm.check()
    sizes = Sizes(sequences=8) if args.quick else Sizes()
    done = PartsFile(args.json)
    for name in done.missing(args.parts or names):
        began = time.perf_counter()
        kind, dtype = name.split("_")
        with folder_of(kind, args.folder, sizes) as folder:
            metrics = measure(Part(folder, dtype, sizes, None if name in WITHOUT_VLLM else vllm))
        about = results_file.describe(sizes=vars(sizes), model=str(args.folder or mismatch_models.CONFIGS[kind][1]))
        done.add(name, about, {f"{name}_{metric}": value for metric, value in metrics.items()})
        print(f"{name}: {time.perf_counter() - began:.0f} s")
    report = mismatch_report.rows(done.metrics)
    mismatch_report.show(report)
    if args.plot:
        mismatch_report.plot(args.plot, report)
    if args.markdown:
        args.markdown.write_text(mismatch_report.markdown(report))


if __name__ == "__main__":
    main()
