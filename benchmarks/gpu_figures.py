"""Measure the figures of benchmarks/gpu.py: each part is a generator of figures of one model."""

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch.nn import functional as F
from transformers import PreTrainedModel

from samebit.benchmarks.contestants.huggingface import LIKE_SAMEBIT, hf_continuous
from samebit.benchmarks.workloads.workload import Workload
from samebit.kernels import token_logprobs
from samebit.kernels.binding.binding import binding_of
from samebit.kernels.layout.forward_context import ForwardContext
from samebit.kernels.layout.grids import KV_CHUNK, SCAN_CHUNK
from samebit.kernels.layout.options import SSMOptions
from samebit.kernels.layout.states.mamba import SSMShape
from samebit.kernels.layout.states.memory import StateLayout
from samebit.kernels.ops.linear import linear
from samebit.kernels.ops.ssd import scan
from samebit.rollout import RolloutConfig, RolloutWorker, SamplingParams
from samebit.rollout.runner.cuda_recorder import CudaRecorder


@dataclass(frozen=True)
class Figure:
    """Holds one line of the table."""

    name: str
    value: float
    unit: str


@dataclass(frozen=True)
class Sizes:
    """Sets the size of a measurement: sequences at once, in the order of their turns; tokens of a prompt, new tokens;
    sequences and tokens of a training call."""

    sequences: tuple[int, ...] = (64, 1, 256, 16, 128)
    prompt: int = 512
    training: tuple[int, int] = (2, 4096)
    new_tokens: int = 64
    prefill_rows: int = 4096
    max_model_len: int = 4096
    repeats: int = 3


def seconds(run: Callable[[], object], device: str, repeats: int) -> float:
    """Return the median of some runs, after one that is not counted."""
    found = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        found.append(time.perf_counter() - began)
    return statistics.median(found[1:])


def exactness(model: PreTrainedModel, sizes: Sizes, device: str) -> Iterator[Figure]:
    """Count tokens that differ between a worker's report and the training forward, with graphs and without."""
    prompts = prompts_of(model, (1, 2, 63, 64, 65, sizes.prompt, 3 * sizes.prompt // 2))
    params = [SamplingParams(seed=index, max_tokens=sizes.new_tokens, ignore_eos=True) for index in range(len(prompts))]
    tokens, differing = 0, 0
    for budget, eager in ((sizes.max_model_len, False), (96, False), (96, True)):
        changes = {"max_num_batched_tokens": budget, "enforce_eager": eager}
        with worker_of(model, sizes, len(prompts), device, **changes) as worker:
            outputs = worker.generate(prompts, params)
        for out in outputs:
            ids = torch.tensor([out.prompt_token_ids + out.samples[0].token_ids], device=device)
            own = torch.tensor(out.samples[0].logprobs)
            with torch.no_grad():
                expected = token_logprobs(model, ids)[0, -len(own) :].cpu()
            tokens, differing = tokens + len(own), differing + int((own != expected).sum())
    yield Figure("exactness: tokens compared", tokens, "")
    yield Figure("exactness: tokens that differ", differing, "")


def decode(model: PreTrainedModel, sizes: Sizes, device: str) -> Iterator[Figure]:
    """Measure output tokens per second, and the bytes that a step has to read over the bandwidth of a copy."""
    copied = bandwidth(device)
    yield Figure("bandwidth of a copy", copied / 1e9, "GB/s")
    for count in sizes.sequences:
        step = _decode_step(model, sizes, count, device)
        needed = weight_bytes(model) + count * (sizes.prompt + sizes.new_tokens // 2) * kv_bytes(model)
        yield Figure(f"decode, {count} sequences", count / step, "tokens/s")
        yield Figure(f"decode, {count} sequences: of the bandwidth", needed / step / copied, "")


def recurrent(model: PreTrainedModel, sizes: Sizes, device: str) -> Iterator[Figure]:
    """Compare a decode step of one Mamba layer's scan with the plain recurrence.

    The steps take turns over a chunk's positions, and over more states than a cache holds.
    """
    layout = binding_of(model).state_layout
    if layout is None or not isinstance(layout.shape, SSMShape):
        return
    for count in sizes.sequences:
        ours, theirs = _scan_steps(layout, layout.shape, count, device)
        exact, plain = (seconds(recorded(run, device), device, sizes.repeats) for run in (ours, theirs))
        yield Figure(f"exact scan over the recurrent step, {count} sequences", exact / plain, "x")


def prefill(model: PreTrainedModel, sizes: Sizes, device: str) -> Iterator[Figure]:
    """Compare the exact matrix product of the MLP's size with torch's."""
    rows, inner, outer = sizes.prefill_rows, model.config.hidden_size, model.config.intermediate_size
    x = torch.randn(rows, inner, device=device).to(model.dtype)
    weight = torch.randn(outer, inner, device=device).to(model.dtype)
    operations = 2e-12 * rows * inner * outer
    with torch.no_grad():
        ours = seconds(lambda: linear(x, weight), device, sizes.repeats)
        theirs = seconds(lambda: F.linear(x, weight), device, sizes.repeats)
    yield Figure(f"matrix product {rows} x {inner} x {outer}", operations / ours, "TFLOP/s")
    yield Figure("the same, torch", operations / theirs, "TFLOP/s")


def tax(model: PreTrainedModel, inexact: PreTrainedModel, sizes: Sizes, device: str) -> Iterator[Figure]:
    """Compare a decode step with torch's products, norms and activations in the same engine, at 64 sequences."""
    count = min(64, max(sizes.sequences))
    exact = _decode_step(model, sizes, count, device)
    other = _decode_step(inexact, sizes, count, device, exact=False)
    yield Figure(f"exactness tax, decode of {count} sequences", exact / other, "x")


def training(model: PreTrainedModel, inexact: PreTrainedModel, sizes: Sizes, device: str) -> Iterator[Figure]:
    """Compare forward and backward of a batch of log-probabilities, exact and not, both with gradient checkpointing."""
    ids = torch.randint(0, model.config.vocab_size, sizes.training, device=device)
    for each in (model, inexact):
        each.train()
        each.gradient_checkpointing_enable()

    def step(own: PreTrainedModel) -> None:
        token_logprobs(own, ids).sum().backward()
        own.zero_grad()

    ours, theirs = (seconds(lambda own=own: step(own), device, sizes.repeats) for own in (model, inexact))
    yield Figure("training step", ours * 1e3, "ms")
    yield Figure("exactness tax, training step", ours / theirs, "x")


def hugging_face(model: PreTrainedModel, plain: PreTrainedModel, sizes: Sizes, device: str) -> Iterator[Figure]:
    """Compare the output tokens per second of continuous batching with ours, prefill included."""
    count = min(64, max(sizes.sequences))
    workload = Workload(prompts=count, samples=1, prompt_tokens=sizes.prompt, new_tokens=sizes.new_tokens)
    run = hf_continuous(plain, workload, LIKE_SAMEBIT)
    prompts = prompts_of(model, (sizes.prompt,) * count)
    run(prompts, 4)
    theirs, _ = run(prompts, sizes.new_tokens)
    with worker_of(model, sizes, count, device) as worker:
        ours = seconds(lambda: worker.generate(prompts, sampled(sizes.new_tokens)), device, 1)
    yield Figure(f"Hugging Face continuous batching, {count} sequences", count * sizes.new_tokens / theirs, "tokens/s")
    yield Figure("samebit, the same requests", count * sizes.new_tokens / ours, "tokens/s")


def cache(model: PreTrainedModel, sizes: Sizes, device: str) -> Iterator[Figure]:
    """Compare the time of a request whose prompt is cached with one whose prompt is not."""
    prompts = prompts_of(model, (sizes.max_model_len - 64,) * (sizes.repeats + 1))
    with worker_of(model, sizes, 4, device) as worker:
        cold = [_timed(worker, prompt) for prompt in prompts]
        warm = [_timed(worker, prompt) for prompt in prompts]
    yield Figure(f"first token of {len(prompts[0])} tokens, not cached", statistics.median(cold[1:]) * 1e3, "ms")
    yield Figure("the same, cached", statistics.median(warm[1:]) * 1e3, "ms")


def control(model: PreTrainedModel, sizes: Sizes, device: str) -> Iterator[Figure]:
    """Measure an update from a state dict on the host, and sleep and wake of the KV memory."""
    state = {name: part.detach().cpu() for name, part in model.state_dict().items()}
    with worker_of(model, sizes, 4, device) as worker:
        worker.generate(prompts_of(model, (8,)), sampled(2))
        yield Figure("load_state_dict from the host", seconds(lambda: worker.load_state_dict(state), device, 1), "s")

        def nap() -> None:
            worker.sleep(["kv_cache"])
            worker.wake_up()

        yield Figure("sleep and wake_up, kv_cache", seconds(nap, device, sizes.repeats) * 1e3, "ms")
        if device == "cuda":
            worker.sleep(["kv_cache"])
            weights = sum(part.nbytes for part in (*model.parameters(), *model.buffers()))  # tied ones once
            kept = torch.cuda.memory_reserved() - weights
            yield Figure("reserved memory beyond the weights while kv_cache sleeps", kept / 2**30, "GiB")


def _scan_steps(
    layout: StateLayout, shape: SSMShape, count: int, device: str
) -> tuple[Callable[[], None], Callable[[], None]]:
    """Make equally many decode steps of `count` sequences: ours, and those of the recurrence."""
    from samebit.benchmarks.contestants.recurrent_cuda import recurrent_step

    chunk = SCAN_CHUNK
    slots = count * max(chunk, -(-64 // count))
    memory = replace(layout, num_layers=1).allocate(slots, torch.bfloat16, 1, device)
    plain = torch.zeros(slots, shape.heads, shape.state_size, shape.head_dim, device=device)
    xbc = torch.randn(count, shape.conv_width, device=device).bfloat16()
    dt = torch.randn(count, shape.heads, device=device).bfloat16()
    rate, bias, skip = -torch.rand(shape.heads, device=device), *torch.randn(2, shape.heads, device=device)
    options = SSMOptions(0, layout.chunk, shape.groups, shape.state_size)
    rows = np.arange(count, dtype=np.int32)
    contexts = [
        ForwardContext(
            positions=torch.full((count,), layout.chunk + first // count % chunk, device=device),
            row_start=rows, lengths=np.ones(count, np.int32),
            starts=np.full(count, layout.chunk + first // count % chunk, np.int32),
            table_rows=first + rows, block_tables=np.zeros((slots, 2), np.int32), block_size=layout.chunk,
            states=memory,
        )
        for first in range(0, slots, count)
    ]  # fmt: skip
    places = [torch.arange(first, first + count, dtype=torch.int32, device=device) for first in range(0, slots, count)]

    def ours() -> None:
        for context in contexts:
            scan(xbc, dt, rate, bias, skip, context, options)

    def theirs() -> None:
        for place in places:
            recurrent_step(xbc, dt, rate, bias, skip, place, plain, shape)

    return ours, theirs


def recorded(run: Callable[[], object], device: str) -> Callable[[], object]:
    """Return a call without the host's cost of launching it, on a GPU."""
    with torch.no_grad():
        return CudaRecorder(torch.device("cuda", torch.cuda.current_device()))(run) if device == "cuda" else run


def worker_of(model: PreTrainedModel, sizes: Sizes, count: int, device: str, **changes: int | bool) -> RolloutWorker:
    """Make a worker for this many sequences."""
    fields = {"max_num_batched_tokens": max(2048, count), **changes}
    config = RolloutConfig(
        device=device, max_num_seqs=count, max_model_len=sizes.max_model_len,
        block_size=binding_of(model).ssm_chunk or KV_CHUNK, num_blocks=_blocks(model, sizes, count), **fields,
    )  # fmt: skip
    return RolloutWorker(model, config=config)


def _blocks(model: PreTrainedModel, sizes: Sizes, count: int) -> int:
    block = binding_of(model).ssm_chunk or KV_CHUNK
    longest = sizes.max_model_len if count <= 8 else sizes.prompt + sizes.new_tokens + 2
    return (count + 1) * -(-longest // block)


def _decode_step(model: PreTrainedModel, sizes: Sizes, count: int, device: str, exact: bool = True) -> float:
    """Return the seconds of a step of this many sequences: a long run minus the run that makes two tokens."""
    prompts = prompts_of(model, (sizes.prompt,) * count)
    with worker_of(model, sizes, count, device, exact=exact) as worker:
        worker.generate(prompts, sampled(2))  # compiles, and fills the prefix cache
        short = seconds(lambda: worker.generate(prompts, sampled(2)), device, sizes.repeats)
        long = seconds(lambda: worker.generate(prompts, sampled(2 + sizes.new_tokens)), device, sizes.repeats)
    return (long - short) / sizes.new_tokens


def _timed(worker: RolloutWorker, prompt: list[int]) -> float:
    began = time.perf_counter()
    worker.generate([prompt], sampled(1))
    return time.perf_counter() - began


def sampled(new_tokens: int) -> SamplingParams:
    """Ask for this many tokens, whatever they are."""
    return SamplingParams(max_tokens=new_tokens, ignore_eos=True)


def prompts_of(model: PreTrainedModel, lengths: tuple[int, ...]) -> list[list[int]]:
    """Make random prompts of these lengths, the same each time."""
    generator = torch.Generator().manual_seed(sum(lengths))
    vocab = model.config.vocab_size
    return [torch.randint(0, vocab, (length,), generator=generator).tolist() for length in lengths]


def bandwidth(device: str) -> float:
    """Return the bytes per second that a copy reads and writes."""
    source = torch.empty(1 << (30 if device == "cuda" else 24), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / seconds(lambda: target.copy_(source), device, 5)


def weight_bytes(model: PreTrainedModel) -> int:
    """Return the bytes that a step reads: everything but a separate embedding."""
    tied = model.config.tie_word_embeddings
    own = 0 if tied else model.get_input_embeddings().weight.nbytes
    return sum(part.nbytes for part in model.parameters()) - own


def kv_bytes(model: PreTrainedModel) -> int:
    """Return the bytes of one token over all attention layers."""
    return binding_of(model).kv_layout.bytes_per_block(1, model.dtype)
