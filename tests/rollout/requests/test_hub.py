"""Names of the Hugging Face hub are found in a cache folder laid out as huggingface_hub's, with no network."""

from __future__ import annotations

import errno
import json
import shutil
import socket
from contextlib import closing
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from huggingface_hub import snapshot_download
from transformers import LlamaForCausalLM

from samebit.rollout.cli import main
from samebit.rollout.config import RolloutConfig
from samebit.rollout.errors import AdapterError, ModelLoadError
from samebit.rollout.integrations.http.serving import load
from samebit.rollout.integrations.http.settings import read_setup
from samebit.rollout.models import hub
from samebit.rollout.models.hub import model_folder
from samebit.rollout.models.loading import load_model
from samebit.rollout.sampling_params import SamplingParams
from samebit.rollout.worker import RolloutWorker

from ..tiny_llama import byte_fallback_tokenizer, smallest

NAME = "samebit-tests/tiny-llama"
ADAPTER = "samebit-tests/adapter"
FIRST, SECOND = "a" * 40, "b" * 40


class Cache:
    """Writes the cache of one user: blobs, and snapshots and refs that name them."""

    def __init__(self, folder: Path, name: str = NAME) -> None:
        self.repo = folder / f"models--{name.replace('/', '--')}"

    def add(self, commit: str, files: Path, ref: str) -> Path:
        """Add a snapshot of these files, which the branch or tag `ref` then points at."""
        snapshot = self.repo / "snapshots" / commit
        for folder in (self.repo / "blobs", self.repo / "refs", snapshot):
            folder.mkdir(parents=True, exist_ok=True)
        for file in files.iterdir():
            blob = self.repo / "blobs" / f"{commit}-{file.name}"
            shutil.copyfile(file, blob)
            (snapshot / file.name).symlink_to(Path("../../blobs") / blob.name)
        (self.repo / "refs" / ref).write_text(commit)
        return snapshot


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return two folders with other weights."""
    folders = []
    for seed in range(2):
        folders.append(tmp_path_factory.mktemp("model"))
        smallest(seed).save_pretrained(folders[-1])
    return folders


@pytest.fixture
def cache(tmp_path: Path, models: list[Path], monkeypatch: pytest.MonkeyPatch) -> Cache:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    cache = Cache(tmp_path / "hub")
    cache.add(FIRST, models[0], "v1")
    cache.add(SECOND, models[1], "main")
    return cache


def test_a_name_is_the_folder_of_one_commit(cache: Cache, models: list[Path]) -> None:
    folder = model_folder(NAME)
    assert folder == cache.repo / "snapshots" / SECOND
    cache.add("c" * 40, models[0], "main")
    assert model_folder(NAME) != folder, "the branch has moved on, and what was resolved before has not"
    assert model_folder(NAME, "v1") == model_folder(NAME, FIRST) == cache.repo / "snapshots" / FIRST


def test_a_worker_takes_a_name_and_a_revision(cache: Cache, models: list[Path]) -> None:
    for revision, folder in ((None, models[1]), ("v1", models[0])):
        with RolloutWorker(NAME, config=RolloutConfig(revision=revision)) as worker:
            wanted = LlamaForCausalLM.from_pretrained(folder).model.norm.weight
            assert torch.equal(worker.module.model.norm.weight, wanted)
            head = LlamaForCausalLM.from_pretrained(folder).lm_head.weight
            assert torch.equal(worker.module.lm_head.weight, head)
            assert len(worker.generate([[1, 2]])) == 1


@pytest.mark.parametrize(("revision", "number"), [(None, 1), ("v1", 0), (FIRST, 0)])
def test_a_draft_model_is_taken_in_its_revision(
    cache: Cache, models: list[Path], revision: str | None, number: int
) -> None:
    """A draft model that is given by its name is the one of its revision, whatever the model's: greedily, it guesses
    what the model of that revision goes on with."""
    for model, right in ((models[number], True), (models[1 - number], False)):
        config = RolloutConfig(
            num_speculative_tokens=3, prompt_lookup_min=40, draft_model=NAME, draft_revision=revision
        )
        with RolloutWorker(model, config=config) as worker:
            worker.generate([[1, 2]], SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True))
            stats = worker.stats()
        assert stats["draft_tokens"] > 0
        assert (stats["draft_tokens"] == stats["draft_tokens_accepted"]) == right


@pytest.fixture
def adapter(tmp_path: Path) -> dict[str, Any]:
    """Save an adapter in the folder "adapter"; return its config, which a test may change."""
    peft = pytest.importorskip("peft")
    peft.get_peft_model(smallest(), peft.LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained("adapter")
    config: dict[str, Any] = json.loads(Path("adapter/adapter_config.json").read_text())
    return config


@pytest.mark.parametrize(("revision", "number"), [(None, 1), ("v1", 0), (FIRST, 0)])
@pytest.mark.parametrize("by_name", [False, True])
def test_an_adapter_brings_its_model_in_the_revision_that_it_names(
    cache: Cache, models: list[Path], adapter: dict[str, Any], revision: str | None, number: int, by_name: bool
) -> None:
    Path("adapter/adapter_config.json").write_text(
        json.dumps({**adapter, "base_model_name_or_path": NAME, "revision": revision})
    )
    Cache(cache.repo.parent, "samebit-tests/adapter").add("d" * 40, Path("adapter"), "v2")
    given, config = ("samebit-tests/adapter", RolloutConfig(revision="v2")) if by_name else ("adapter", RolloutConfig())
    with RolloutWorker(given, config=config) as worker:
        wanted = LlamaForCausalLM.from_pretrained(models[number]).lm_head.weight
        assert torch.equal(worker.module.lm_head.weight, wanted)
        assert worker.adapters == ["__base__", "default"]
        assert worker.generate([[1, 2]])[0].adapter == "default"


def test_a_worker_loads_an_adapter_by_its_name_and_revision(cache: Cache, models: list[Path]) -> None:
    """A worker loads an adapter by its name and revision, here of two versions. A revision of what is no name is
    refused, and nothing is known of the adapter.
    """
    peft, name = pytest.importorskip("peft"), "samebit-tests/adapter"
    hub = Cache(cache.repo.parent, name)
    for number, ref in enumerate(("v1", "main")):
        config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
        torch.manual_seed(number)
        peft.get_peft_model(smallest(), config).save_pretrained(ref)
        hub.add(str(number) * 40, Path(ref), ref)
    params = SamplingParams(max_tokens=4, temperature=0.0, adapter="policy")
    with RolloutWorker(str(models[0])) as worker:
        for revision, folder in ((None, "main"), ("v1", "v1")):
            worker.load_adapter("policy", name, revision=revision)
            [by_name] = worker.generate([[1, 2, 3]], params)
            worker.load_adapter("policy", folder)
            [by_folder] = worker.generate([[1, 2, 3]], params)
            assert by_name.samples[0].logprobs == by_folder.samples[0].logprobs
        for source in ("v1", dict[str, torch.Tensor]()):
            with pytest.raises((ModelLoadError, AdapterError), match="revision='v1' is for a name"):
                worker.load_adapter("other", source, revision="v1")
        with pytest.raises(AdapterError, match="revision must be a branch, tag or commit, or None, got 3"):
            worker.load_adapter("other", name, revision=3)  # type: ignore[arg-type]
        with pytest.raises(ModelLoadError, match=r"no such adapter folder: nowhere; .* `hf download nowhere`"):
            worker.load_adapter("other", "nowhere")
        with pytest.raises(ModelLoadError, match=r"^no such adapter folder: no/where/at/all$"):
            worker.load_adapter("other", "no/where/at/all")
        assert worker.adapters == ["__base__", "policy"]


def test_bench_takes_an_adapter(cache: Cache, adapter: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    config = {**adapter, "base_model_name_or_path": NAME, "revision": "v1"}
    Path("adapter/adapter_config.json").write_text(json.dumps(config))
    assert main(["bench", "adapter", "--memory"]) == 0
    assert "kv block" in capsys.readouterr().out
    assert main(["bench", "adapter", "--requests", "2", "--prompt", "3", "--tokens", "2"]) == 0
    assert "output tokens per second" in capsys.readouterr().out


@pytest.mark.parametrize("own", [False, True])
def test_a_server_of_an_adapter_has_the_tokenizer_of_its_folder_or_of_its_model(
    cache: Cache, adapter: dict[str, Any], own: bool
) -> None:
    """A server of an adapter has the tokenizer of its folder, or of its model in the revision that it is told."""
    Path("adapter/adapter_config.json").write_text(json.dumps({**adapter, "base_model_name_or_path": NAME}))
    for folder, name in ((cache.repo / "snapshots" / FIRST, "of the model"), (Path("adapter"), "of the adapter")):
        tokenizer = byte_fallback_tokenizer()
        tokenizer.chat_template = name
        if own or folder != Path("adapter"):
            tokenizer.save_pretrained(folder)
    service = load(read_setup(["adapter", "--revision", "v1", "--num-threads", "1"], {}))
    with closing(service.worker):
        assert service.need_tokenizer().chat_template == ("of the adapter" if own else "of the model")
        assert service.adapters == ["default"]


@pytest.fixture
def moving(cache: Cache, models: list[Path], adapter: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """List the names whose main branch was looked for: each time it moves on, to the other model. There is an adapter
    too, as a folder and as a name.
    """
    Path("adapter/adapter_config.json").write_text(json.dumps({**adapter, "base_model_name_or_path": NAME}))
    caches = {NAME: (cache, models[0]), ADAPTER: (Cache(cache.repo.parent, ADAPTER), Path("adapter"))}
    caches[ADAPTER][0].add("d" * 40, Path("adapter"), "main")
    asked: list[str] = []

    def download(name: str, *, revision: str | None = None, **options: Any) -> str:
        found = str(snapshot_download(name, revision=revision, **options))
        if revision is None:
            asked.append(name)
            of_name, files = caches[name]
            of_name.add(f"{len(asked):040}", files, "main")
        return found

    monkeypatch.setattr(hub, "snapshot_download", download)
    return asked


@pytest.mark.parametrize("given", [NAME, "adapter", ADAPTER])
def test_a_server_reads_one_commit(cache: Cache, models: list[Path], moving: list[str], given: str) -> None:
    tokenizer = byte_fallback_tokenizer()
    tokenizer.chat_template = "of the commit"
    tokenizer.save_pretrained(cache.repo / "snapshots" / SECOND)
    service = load(read_setup([given, "--num-threads", "1"], {}))
    with closing(service.worker):
        assert isinstance(service.worker, RolloutWorker)
        assert service.need_tokenizer().chat_template == "of the commit"
        wanted = LlamaForCausalLM.from_pretrained(models[1]).lm_head.weight
        assert torch.equal(service.worker.module.lm_head.weight, wanted)
    assert moving == ([ADAPTER, NAME] if given == ADAPTER else [NAME])


@pytest.mark.parametrize("given", [NAME, "adapter", ADAPTER])
def test_bench_reads_one_commit(moving: list[str], given: str) -> None:
    assert main(["bench", given, "--requests", "1", "--prompt", "3", "--tokens", "2"]) == 0
    assert moving == ([ADAPTER, NAME] if given == ADAPTER else [NAME])


def test_an_adapter_of_a_model_that_is_not_there_says_what_to_get(cache: Cache, adapter: dict[str, Any]) -> None:
    for base, revision, says in (
        ("samebit-tests/none", None, "hf download samebit-tests/none`"),
        (NAME, "v9", f"hf download {NAME} --revision v9`"),
    ):
        changes = {"base_model_name_or_path": base, "revision": revision}
        Path("adapter/adapter_config.json").write_text(json.dumps({**adapter, **changes}))
        with pytest.raises(ModelLoadError, match=says):
            RolloutWorker("adapter")


def test_the_command_line_takes_names(cache: Cache, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", NAME, "--memory", "--revision", "v1"]) == 0
    assert "kv block" in capsys.readouterr().out
    for command in ("check", "bench"):
        assert main([command, "samebit-tests/other"]) == 2
        said = capsys.readouterr()
        assert "hf download samebit-tests/other" in said.err
        assert (said.err.count("\n"), said.out) == (1, "")
        assert main([command, NAME, "--revision", "v9"]) == 2
        assert f"hf download {NAME} --revision v9" in capsys.readouterr().err


def test_a_commit_in_the_cache_is_taken_where_the_hub_is_not_reached(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit in the cache is taken where the hub is not reached: huggingface_hub asks for a commit's list of files,
    and passes on what its HTTP client raises.
    """
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # it does not listen
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{nobody.getsockname()[1]}")
        assert model_folder(NAME, FIRST) == cache.repo / "snapshots" / FIRST
        with pytest.raises(ModelLoadError, match=rf"could not be fetched \(.*: run `hf download {NAME} --revision ccc"):
            model_folder(NAME, "c" * 40)


def test_a_download_that_fails_half_way_says_why(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(name: str, **options: Any) -> str:
        raise OSError(errno.ENOSPC, "No space left\non device")

    monkeypatch.setattr(hub, "snapshot_download", full)
    with pytest.raises(
        ModelLoadError, match=r"\(OSError: \[Errno 28\] No space left on device\): run `hf download tiny`"
    ):
        model_folder("tiny")


@pytest.mark.parametrize(
    "typo", ["./qwen", "/no/where", "~/model", "a/b/c", "model/", "...", "a b", "-x/y", Path("org/name")]
)
def test_what_is_written_as_a_path_is_no_name(cache: Cache, typo: str | Path) -> None:
    with pytest.raises(ModelLoadError, match=r"^no such model folder: [^;]*$"):
        model_folder(typo)


def test_an_empty_text_is_not_the_current_folder(
    cache: Cache, models: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(models[0])
    assert model_folder(".") == Path()
    with pytest.raises(ModelLoadError, match="no such model folder: ''; it is an empty text"):
        RolloutWorker("")


def test_a_folder_that_is_called_like_a_name_comes_first(cache: Cache, models: list[Path]) -> None:
    shutil.copytree(models[0], NAME)
    assert model_folder(NAME) == Path(NAME)
    with pytest.raises(ModelLoadError, match="revision='v1' is for a name"):
        load_model(NAME, RolloutConfig(revision="v1"))
    with pytest.raises(ModelLoadError, match="and this is a module"):
        load_model(LlamaForCausalLM.from_pretrained(NAME), RolloutConfig(revision="v1"))


def test_a_word_may_be_a_folder_or_a_name(cache: Cache) -> None:
    with pytest.raises(ModelLoadError, match=r"no such model folder: tiny; .* `hf download tiny`"):
        model_folder("tiny")


def test_a_snapshot_without_weights_says_so(cache: Cache) -> None:
    for file in (cache.repo / "snapshots" / SECOND).glob("*.safetensors"):
        file.unlink()
    with pytest.raises(ModelLoadError, match=r"hf download|has no weights"):
        load_model(NAME, RolloutConfig())
