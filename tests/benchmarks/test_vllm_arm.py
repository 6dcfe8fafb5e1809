"""The study's arm in which vLLM samples follows its protocol, and weights that are not the trainer's void a run."""

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from samebit.benchmarks.engines.commands import VLLM_PYTHON, Limits, Vllm
from samebit.benchmarks.engines.policy_messages import Draw, Drawn, answered
from samebit.benchmarks.engines.process import Command, started
from samebit.benchmarks.mismatch_study import figure, study, vllm_sampler
from samebit.benchmarks.mismatch_study.arms import ARMS
from samebit.benchmarks.mismatch_study.freshness import Freshness, StaleEngineError, prove_reload
from samebit.benchmarks.mismatch_study.untied import save_untied
from samebit.benchmarks.mismatch_study.vllm_sampler import VllmSampler
from samebit.recipes import report, sampling, tiny_model
from samebit.recipes.settings import OnPolicy
from samebit.rollout import RolloutConfig, RolloutWorker, SamplingParams

from ..campaign import long

STAND_IN = Path(__file__).with_name("stand_in_policy.py")
PARAMS = SamplingParams(n=2, max_tokens=3)
END = 2


@contextmanager
def stand_in(fault: str = "none") -> Iterator[VllmSampler]:
    with started(Command(Path(sys.executable), (str(STAND_IN), fault))) as engine:
        yield VllmSampler(engine, tiny_model.build_tokenizer(), (END,), seed=1)


def test_a_draw_and_new_weights_go_over_the_pipes(tmp_path: Path) -> None:
    with stand_in() as sampler:
        first = sampler.generate([[5, 6], [7]], PARAMS)
        sampler.load(tmp_path, version=4)
        second = sampler.generate([[5, 6], [7]], PARAMS)
    assert [group.prompt_token_ids for group in first] == [[5, 6], [7]]
    samples = [sample for group in first for sample in group.samples]
    assert len({sample.token_ids[0] for sample in samples}) == 4, "each completion has numbers of its own"
    assert [sample.logprobs for sample in samples] == [[-1.0, -1.0]] * 4
    assert [sample.finish_reason for sample in samples] == ["stop"] * 4
    vocabulary = tiny_model.build_tokenizer()
    assert [sample.text for sample in samples] == [vocabulary.decode(sample.token_ids[0]) for sample in samples]
    assert first[0].samples[0].weight_versions == [(0, 2, 0)]
    assert second[0].samples[0].weight_versions == [(0, 2, 4)]
    others = [sample for group in second for sample in group.samples]
    assert [sample.token_ids for sample in samples] != [sample.token_ids for sample in others], "and each draw"


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("few", "gave 3 completions, asked for 4"),
        ("short", r"gave 1 log-probabilities of \[\d+\], ended: True"),
        ("silent", r"gave 1 log-probabilities of \[\d+, 2\], ended: True"),
    ],
)
def test_an_answer_that_was_not_asked_for_is_refused(fault: str, message: str) -> None:
    with stand_in(fault) as sampler, pytest.raises(RuntimeError, match=message):
        sampler.generate([[5, 6], [7]], PARAMS)


@pytest.mark.parametrize(
    "params", [replace(PARAMS, top_p=0.5), replace(PARAMS, seed=1), replace(PARAMS, max_tokens=None)]
)
def test_params_that_do_not_travel_are_refused(params: SamplingParams) -> None:
    with stand_in() as sampler, pytest.raises(ValueError, match="n, temperature and max_tokens alone"):
        sampler.generate([[5]], params)


def test_a_step_is_held_against_a_just_built_engine() -> None:
    def row(mean: float) -> dict[str, float]:
        return {"training/rollout_logprobs_diff_mean": mean}

    check = Freshness()
    for step, mean in enumerate((0.003, 0.006, 0.001), 1):
        check(step, row(mean))
    with pytest.raises(StaleEngineError, match=r"step 1: .* engine is 0\.2: it does not compute this policy"):
        Freshness()(1, row(0.2))
    for mean in (0.0061, float("nan")):
        with pytest.raises(StaleEngineError, match=rf"step 4: .* is {mean:.3g}, .* was 0.003: the run is void"):
            check(4, row(mean))


class Bfloat16Policy:
    """Samples with a worker of samebit's in bfloat16. loads: how often it does as it is told when it should load."""

    versions = {"in": "process"}  # noqa: RUF012

    def __init__(self, folder: str, loads: float) -> None:
        self._loads = loads
        self._worker = self._built(folder)

    def load(self, folder: str) -> None:
        if self._loads > 0:
            self.build(folder)
        self._loads -= 1

    def draw(self, draw: Draw) -> Drawn:
        params = SamplingParams(
            n=draw.samples, max_tokens=draw.max_tokens, temperature=draw.temperature, seed=draw.seed,
            ignore_eos=not draw.ends,
        )  # fmt: skip
        outputs = self._worker.generate(draw.prompts, params)
        samples = [sample for out in outputs for sample in out.samples]
        return Drawn(
            [sample.token_ids for sample in samples],
            [sample.logprobs for sample in samples],
            [sample.finish_reason == "stop" for sample in samples],
        )

    def build(self, folder: str) -> None:
        self._worker.close()
        self._worker = self._built(folder)

    def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        return answered(self, message)

    def close(self) -> None:
        self._worker.close()

    def _built(self, folder: str) -> RolloutWorker:
        return RolloutWorker(folder, config=RolloutConfig(dtype="bfloat16", kv_cache_gb=0.05, max_num_seqs=16))


@pytest.fixture
def arm_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Put a worker of this process into vLLM's place; `arm_of(loads)`. Arms draw no pictures of their own."""
    monkeypatch.setattr(report, "figure", lambda rows, path: None)
    monkeypatch.setattr(sampling, "reward", lambda text, *_: float(len(text) % 2))

    def put(loads: float) -> None:
        @contextmanager
        def opened(command: Command) -> Iterator[Bfloat16Policy]:
            policy = Bfloat16Policy(command.args[2], loads)
            yield policy
            policy.close()

        monkeypatch.setattr(vllm_sampler, "started", opened)

    return put


def settings(out: Path, steps: int) -> OnPolicy:
    return OnPolicy(
        out=out, steps=steps, prompts=4, samples=4, max_tokens=12, held_out=4, eval_every=4, warmup_cap=2,
        warmup_mixed=1, save_every=2, max_num_seqs=16, kv_cache_gb=0.05, lr=1e-3,
    )  # fmt: skip


HERE = Vllm(Path(sys.executable))


def test_the_arm_ends_goes_on_and_is_shown(tmp_path: Path, arm_of: Callable[[float], None]) -> None:
    arm_of(math.inf)
    arms = [ARMS[name] for name in ("exact", "vllm-truncated")]
    study.run(settings(tmp_path, 2), arms, HERE)
    study.run(settings(tmp_path, 3), arms, HERE)
    runs = figure.read(tmp_path)
    for name, rows in runs.items():
        assert [row["step"] for row in rows] == [0, 1, 2, 3]
        assert (sum(row["training/tokens_differing"] for row in rows[1:]) == 0) == (name == "exact")
        assert all(row["perf/time_update"] >= row["perf/time_sync"] > 0 for row in rows[1:])
    assert runs["exact"][0]["val/accuracy"] == runs["vllm-truncated"][0]["val/accuracy"], "one policy, one judge"
    assert all(row["sync/sent_bytes"] > 100_000 for row in runs["vllm-truncated"][1:])
    assert (tmp_path / "study.png").read_bytes().startswith(b"\x89PNG")
    table = figure.seconds_table(tmp_path)
    assert [column.header for column in table.columns] == ["arm", *figure.PARTS, "step"]
    assert list(table.columns[0].cells) == ["exact", "vllm-truncated"]
    sampled = sorted(row["perf/time_generate"] for row in runs["exact"][1:])[1]
    assert next(table.columns[1].cells) == f"{sampled:.2f}"


@pytest.mark.parametrize(
    ("loads", "message"),
    [(0, "draws other bits than one that was built of them"), (1, "step 2: .* that of a just built engine was")],
)
def test_stale_weights_void_the_run(loads: int, message: str, tmp_path: Path, arm_of: Callable[[float], None]) -> None:
    arm_of(loads)
    with pytest.raises(StaleEngineError, match=message):
        study.run(settings(tmp_path, 3), [ARMS["vllm-clipped"]], HERE)


def test_a_proof_needs_other_weights_before() -> None:
    class Constant:
        def ask(self, message: dict[str, Any]) -> dict[str, Any]:
            return {}

    with pytest.raises(StaleEngineError, match="other weights gave the same bits"):
        prove_reload(Constant(), Path())


def test_an_untied_folder_is_the_same_model(tmp_path: Path) -> None:
    tokenizer = tiny_model.build_tokenizer()
    policy = tiny_model.build_model(tokenizer, 0)
    save_untied(policy, tokenizer, tmp_path)
    again, _ = tiny_model.load(tmp_path)
    assert policy.config.tie_word_embeddings
    assert not again.config.tie_word_embeddings
    ids = torch.arange(4, 20)[None]
    assert torch.equal(policy(ids).logits, again(ids).logits)
    assert torch.equal(again.lm_head.weight, policy.lm_head.weight)
    save_untied(policy, tokenizer, tmp_path, factor=0.5)
    assert torch.equal(tiny_model.load(tmp_path)[0].lm_head.weight, 0.5 * policy.lm_head.weight)


def test_nothing_starts_without_vllm(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="`make bench-vllm` sets its environment up"):
        study.run(settings(tmp_path / "out", 3), [ARMS["vllm-clipped"]], Vllm(tmp_path / "python"))
    assert not (tmp_path / "out").exists()


def test_nothing_starts_with_a_model_that_vllm_refuses(tmp_path: Path) -> None:
    given = replace(settings(tmp_path / "out", 3), architecture="gdn")
    with pytest.raises(ValueError, match=r"vLLM cannot sample with --architecture gdn .* torchvision"):
        study.run(given, [ARMS["vllm-clipped"]], HERE)
    assert not (tmp_path / "out").exists()


def test_vllm_is_told_the_limits(tmp_path: Path) -> None:
    command = study.VLLM.policy(tmp_path, "bfloat16", Limits(0.5, 64, 4096))
    assert command.args[2:] == (
        *(str(tmp_path), "--dtype", "bfloat16", "--kv-gb", "0.5", "--sequences", "64", "--step-tokens", "4096"),
    )
    assert command.environment["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0", "a new engine in a process that is there"


@long
@pytest.mark.skipif(not VLLM_PYTHON.exists(), reason="vLLM is not installed: make bench-vllm")
@pytest.mark.parametrize("architecture", ["dense", "moe"])
def test_vllm_itself(tmp_path: Path, architecture: str) -> None:
    given = replace(settings(tmp_path, 3), architecture=architecture)
    study.run(given, [ARMS["vllm-truncated"]])
    rows = figure.read(tmp_path)["vllm-truncated"]
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert all(row["training/tokens_differing"] > 0 for row in rows[1:])
