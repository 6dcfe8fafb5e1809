"""Workers with weights of their own take adapters by name, alone, while they generate."""

import gc
import json
import re
import warnings
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file, save_file

from samebit.kernels import bind, token_logprobs
from samebit.rollout import (
    AdapterError,
    RequestError,
    RolloutConfig,
    RolloutWorker,
    SamplingParams,
    WorkerStateError,
)
from samebit.rollout.audit.adapters import TrainersAdapter
from samebit.weight_sync import NonFiniteWeightError, SharedMemoryReceiver, SharedMemorySender, WeightMismatchError

from ..noted_stream import noted_stream
from ..patience import HANG
from .compare import assert_matches_trainer, assert_same_samples
from .families import CAMPAIGN, make_model, token_ids
from .lora import FAMILIES, SMALLER, add, config_for, lora_config, make_peft, wake
from .soak_links import links

CONFIG = RolloutConfig(num_blocks=64, max_model_len=160, max_num_seqs=8)
PROMPTS = token_ids(70, 1)
LONG = SamplingParams(max_tokens=60, ignore_eos=True, seed=9, adapter="policy")


def params(name: str | None = "policy") -> list[SamplingParams]:
    return [SamplingParams(max_tokens=8, seed=seed, ignore_eos=True, adapter=name) for seed in (1, 2)]


@pytest.fixture(scope="module")
def policy() -> PeftModel:
    """Give a trainer's model; tests give it other weights."""
    model = make_peft("Qwen3")
    add(model, "ref", lora_config(3, use_rslora=True, rank_pattern={"down_proj": 7}))
    return bind(model)


@pytest.fixture(scope="module")
def worker() -> Iterator[RolloutWorker]:
    """Give a worker on a base model that nobody trains."""
    with RolloutWorker(make_model("Qwen3", num_hidden_layers=2), config=CONFIG) as worker:
        yield worker


@pytest.fixture
def folder(policy: PeftModel, tmp_path: Path) -> Path:
    """Save the adapters of the trainer in peft's format, "ref" in a folder of its own."""
    policy.save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"


def tensors(model: PeftModel, name: str = "default") -> dict[str, torch.Tensor]:
    return {key: tensor for key, tensor in model.state_dict().items() if f".{name}." in key}


def test_every_way_in_gives_the_trainers_bits(policy: PeftModel, worker: RolloutWorker, folder: Path) -> None:
    report = worker.load_adapter("policy", folder)
    num_bytes = sum(4 * tensor.numel() for tensor in tensors(policy).values())
    assert (report.version, report.tensors, report.dense_bytes) == (1, 24, num_bytes)
    worker.load_adapter("ref", folder / "ref")
    assert worker.adapters == ["__base__", "policy", "ref"]
    ref = worker.generate(PROMPTS, params("ref"))
    policy.set_adapter("ref")
    assert_matches_trainer(policy, ref, params())
    policy.set_adapter("default")
    with (
        SharedMemorySender(bucket_bytes=1 << 14, timeout=HANG) as sender,
        SharedMemoryReceiver(sender.address, timeout=HANG) as end,
        ThreadPoolExecutor(1) as other,
    ):
        for version, way in enumerate(("folder", "state dict", "peft's dict", "inner names", "shared memory"), start=2):
            wake(policy, seed=version)
            policy.save_pretrained(folder)
            inner = {key.removeprefix("base_model.model."): tensor for key, tensor in tensors(policy).items()}
            source: Any = {
                "folder": folder,
                "state dict": tensors(policy),
                "peft's dict": get_peft_model_state_dict(policy),
                "inner names": inner,
            }.get(way, end)
            if source is end:
                sent = other.submit(sender.send, tensors(policy))
            report = worker.load_adapter("policy", source)
            assert report.version == version
            assert report.digest is not None
            outputs = worker.generate(PROMPTS, params())
            assert {output.adapter_version for output in outputs} == {version}
            assert_matches_trainer(policy, outputs, params())
        assert sent.result().dense_bytes == num_bytes
    assert_same_samples(worker.generate(PROMPTS, params("ref")), ref)


def test_a_model_whose_layers_lie_elsewhere(tmp_path: Path) -> None:
    """An adapter finds the layers of Mamba2, which are under `backbone`, where others have `model`."""
    config = lora_config(3, target_modules=["in_proj"])
    trainer = bind(make_peft("Mamba2", config=config))
    trainer.save_pretrained(tmp_path)
    with RolloutWorker(make_model("Mamba2"), config=CONFIG) as worker:
        worker.load_adapter("policy", tmp_path)
        assert_matches_trainer(trainer, worker.generate(PROMPTS, params()), params())
    adapted = bind(TrainersAdapter.of(make_model("Mamba2"), tmp_path).model)
    ids = torch.tensor([PROMPTS[-1]])
    assert torch.equal(token_logprobs(adapted, ids), token_logprobs(trainer, ids))


@pytest.mark.soak
@pytest.mark.parametrize("family", FAMILIES if CAMPAIGN else ("Qwen3_5", "Qwen3Next"))
def test_no_layer_of_any_family_leaves_its_adapter_out(family: str) -> None:
    """No layer leaves its adapter out, though rows without gradients multiply several layers at once: in the worker
    those are the base model's own, in the trainer those of peft.
    """
    config = config_for(family, 3)
    trainer = bind(make_peft(family, config=config))
    with RolloutWorker(make_model(family, **SMALLER.get(family, {})), config=CONFIG) as worker:
        worker.load_adapter("policy", tensors(trainer), config=config)
        found = worker.generate(PROMPTS, params())
        assert_matches_trainer(trainer, found, params())


def test_over_broadcast(policy: PeftModel, worker: RolloutWorker, folder: Path) -> None:
    worker.load_adapter("policy", folder)
    wake(policy, seed=20)
    link = links(timeout=HANG)[1]
    link.update(tensors(policy), lambda end: worker.load_adapter("policy", end))
    link.close()
    assert_matches_trainer(policy, worker.generate(PROMPTS, params()), params())


def test_a_new_version_leaves_others_alone(policy: PeftModel, worker: RolloutWorker, folder: Path) -> None:
    """A request that has begun ends under the version that it began with; what is cached of other adapters is hit
    again.
    """
    worker.load_adapter("policy", folder)
    worker.load_adapter("ref", folder / "ref")
    (expected,) = worker.generate(PROMPTS[:1], LONG)
    worker.generate(PROMPTS, params("ref"))
    worker.reset_prefix_cache()
    handles = [worker.submit(PROMPTS[0], one) for one in (LONG, params("ref")[0])]
    next(iter(handles[0]))
    wake(policy, seed=31)
    version = worker.load_adapter("policy", tensors(policy)).version
    late = worker.submit(PROMPTS[0], LONG)
    assert_same_samples([handles[0].result()], [expected])
    assert_matches_trainer(policy, [late.result()], [LONG])
    assert (handles[0].result().adapter_version, late.result().adapter_version) == (version - 1, version)
    assert late.result().num_cached_tokens == 0
    assert worker.generate(PROMPTS[:1], params("ref")[0])[0].num_cached_tokens > 0
    ended = worker.submit(PROMPTS[0], LONG)
    next(iter(ended))
    worker.drop_adapter("policy", in_flight="abort")
    assert ended.result().samples[0].finish_reason == "abort"
    with pytest.raises(RequestError, match="adapter='policy' is not known; there are __base__, ref"):
        worker.generate(PROMPTS, params())
    worker.generate(PROMPTS, params("ref"))


def test_loads_at_once_under_one_name_have_versions_of_their_own(policy: PeftModel, worker: RolloutWorker) -> None:
    source, count = tensors(policy), 16
    with ThreadPoolExecutor(count) as pool:
        loads = [pool.submit(worker.load_adapter, "crowd", source, config=lora_config()) for _ in range(count)]
        versions = [load.result(HANG).version for load in loads]
    assert sorted(versions) == list(range(1, count + 1))
    (output,) = worker.generate(PROMPTS[:1], params("crowd")[:1])
    assert output.adapter_version == count
    worker.drop_adapter("crowd")


def test_nothing_is_left_of_names_that_are_loaded_and_dropped(policy: PeftModel, worker: RolloutWorker) -> None:
    """A name that was loaded and dropped leaves nothing but its last version: a trainer may name each step's adapter
    anew, for days."""
    source = tensors(policy)
    for step in range(3):
        worker.load_adapter(f"step-{step}", source, config=lora_config())
        worker.drop_adapter(f"step-{step}")
    with pytest.raises(WeightMismatchError):
        worker.load_adapter("refused", {}, config=lora_config())
    assert not worker._adapters._turns


def test_a_name_that_was_dropped_goes_on_counting_its_versions(policy: PeftModel, worker: RolloutWorker) -> None:
    """What is loaded under a name that was dropped has another version than all before: two results of one adapter's
    name and version are of the same weights."""
    source = tensors(policy)
    worker.load_adapter("again", source, config=lora_config())
    assert worker.load_adapter("again", source, version=5).version == 5
    worker.drop_adapter("again")
    with pytest.raises(AdapterError, match="version must be above the adapter's current 5, got 5"):
        worker.load_adapter("again", source, config=lora_config(), version=5)
    assert worker.load_adapter("again", source, config=lora_config()).version == 6
    [output] = worker.generate(PROMPTS[:1], params("again")[:1])
    assert (output.adapter, output.adapter_version) == ("again", 6)
    worker.drop_adapter("again")
    assert worker.load_adapter("again", source, config=lora_config(), version=9).version == 9
    worker.drop_adapter("again")


@pytest.mark.parametrize("way", ["dropped", "replaced"])
def test_the_matrices_of_an_adapter_are_freed_when_it_goes(policy: PeftModel, worker: RolloutWorker, way: str) -> None:
    """An adapter that is dropped, or has a new version, gives its memory back at once, and waits for no collection of
    Python's: a trainer may load a version each step.
    """
    gc.collect()
    gc.disable()
    try:
        worker.load_adapter("gone", tensors(policy), config=lora_config())
        [output] = worker.generate(PROMPTS[:1], params("gone")[:1])
        assert output.adapter == "gone"
        loaded = worker._adapters.registry.loaded("gone")
        weights = [weakref.ref(side.weight) for one in loaded.adapter.deltas.values() for side in (one.down, one.up)]
        assert len(weights) == 24
        del loaded
        if way == "replaced":
            worker.load_adapter("gone", tensors(policy))
        else:
            worker.drop_adapter("gone")
        worker.reset_prefix_cache()  # behind the last step
        assert [weight() for weight in weights] == [None] * 24
    finally:
        gc.enable()
        if way == "replaced":
            worker.drop_adapter("gone")


def test_a_worker_from_a_folder_of_peft(policy: PeftModel, folder: Path, tmp_path: Path) -> None:
    make_model("Qwen3", num_hidden_layers=2).save_pretrained(tmp_path / "base")
    config = json.loads((folder / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = str(tmp_path / "base")
    (folder / "adapter_config.json").write_text(json.dumps(config))
    with RolloutWorker(folder, config=CONFIG) as worker:
        assert worker.adapters == ["__base__", "default"]
        assert_matches_trainer(policy, worker.generate(PROMPTS, params(None)), params())
        with policy.disable_adapter():
            assert_matches_trainer(policy, worker.generate(PROMPTS, params("__base__")), params())


def test_an_adapter_may_call_its_model_something_else(worker: RolloutWorker, folder: Path) -> None:
    """An adapter may call its model something else, such as a snapshot's folder: peft has nothing to warn of."""
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": "org/model"}))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        worker.load_adapter("other name", folder)
    worker.drop_adapter("other name")


def begun(way: str) -> LoraConfig:
    return lora_config(init_lora_weights=way)


def test_an_adapter_that_changed_its_model_is_refused_before_that_is_loaded(folder: Path) -> None:
    """An adapter that changed its model is refused before that is looked for: the one that its folder names is not
    there.
    """
    config = json.loads((folder / "adapter_config.json").read_text())
    config |= {"init_lora_weights": "pissa", "base_model_name_or_path": "org/model"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(AdapterError, match="init_lora_weights='pissa' changes the weights of the model"):
        RolloutWorker(folder, config=CONFIG)


@pytest.mark.parametrize("way", ["pissa", "gaussian"])
def test_however_an_adapter_began_that_of_the_trainer_is_served(way: str) -> None:
    model = bind(get_peft_model(make_model("Qwen3", num_hidden_layers=2), begun(way)))
    with RolloutWorker(model, config=CONFIG) as worker:
        assert_matches_trainer(model, worker.generate(PROMPTS, params(None)), params())


def test_bad_adapters_are_refused_and_change_nothing(policy: PeftModel, worker: RolloutWorker, folder: Path) -> None:
    worker.load_adapter("policy", folder)
    before = worker.generate(PROMPTS, params())
    good = get_peft_model_state_dict(policy)
    half = {key: tensor for key, tensor in good.items() if "lora_A" in key}
    broken = {**good, next(iter(good)): torch.full_like(next(iter(good.values())), torch.nan)}
    wide = {key: torch.zeros(2 * tensor.shape[0], *tensor.shape[1:]) for key, tensor in good.items()}
    cases: list[tuple[type[Exception], str, object, dict[str, Any]]] = [
        (WeightMismatchError, "12 missing: .*lora_B", half, {}),
        (WeightMismatchError, "24 misshapen", wide, {}),
        (WeightMismatchError, "1 unknown: lm_head.weight", {**good, "lm_head.weight": torch.zeros(2)}, {}),
        (NonFiniteWeightError, "NaN or infinity", broken, {}),
        (AdapterError, "version must be above the adapter's current", good, {"version": 0}),
        (AdapterError, "in_flight must be one of finish, abort", good, {"in_flight": "keep"}),
        (AdapterError, "must be a positive integer|should be a positive integer", good, {"config": {"r": 0}}),
        (AdapterError, "DoraLinearVariant", good, {"config": lora_config(use_dora=True)}),
        (AdapterError, "lm_head .exact are linear layers", good, {"config": lora_config(target_modules=["lm_head"])}),
        (AdapterError, "Target modules", good, {"config": lora_config(target_modules=["elsewhere"])}),
        (AdapterError, "init_lora_weights='pissa_niter_4' changes", good, {"config": begun("pissa_niter_4")}),
        (AdapterError, "init_lora_weights='olora' changes", good, {"config": begun("olora")}),
        (AdapterError, "copies of layers .*exact is None", good, {"config": lora_config(layer_replication=[[1, 2]])}),
        (AdapterError, "copies of layers .*exact is None", good, {"config": lora_config(layer_replication=[[0, 9]])}),
        (AdapterError, "peft_type='IA3'", good, {"config": {"peft_type": "IA3"}}),
        (
            AdapterError,
            "installed peft knows no rank=3 of the adapter's config; allowed are",
            good,
            {"config": {"rank": 3}},
        ),
    ]
    for error, said, source, options in cases:
        with pytest.raises(error, match=said):
            worker.load_adapter("policy", source, **options)
    with pytest.raises(AdapterError, match="'new' is new, and nothing says which layers"):
        worker.load_adapter("new", good)
    with pytest.raises(AdapterError, match="no adapter 'new' was loaded"):
        worker.drop_adapter("new")
    with pytest.raises(AdapterError, match="'__base__' is the model's own"):
        worker.load_adapter("__base__", folder)
    with pytest.raises(ValueError, match="adapter must be a non-empty string or None"):
        SamplingParams(adapter="")
    with pytest.raises(AdapterError, match="holds no adapter in peft's format"):
        worker.load_adapter("policy", folder.parent)
    save_file({**load_file(folder / "adapter_model.safetensors")}, folder / "second.safetensors")
    with pytest.raises(ValueError, match="is in both"):
        worker.load_adapter("policy", folder)
    assert_same_samples(worker.generate(PROMPTS, params()), before)


OFF = {"some_new_option": None, "merge_weights": False, "enable_lora": [], "notes": "", "newer_still": {}}


def test_a_folder_of_another_peft_may_have_fields_that_are_off(
    policy: PeftModel, worker: RolloutWorker, folder: Path
) -> None:
    path = folder / "adapter_config.json"
    saved = json.loads(path.read_text())
    path.write_text(json.dumps({**saved, **OFF}))
    worker.load_adapter("policy", folder)
    assert_matches_trainer(policy, worker.generate(PROMPTS, params()), params())
    for value in (True, 0, "on", [0], {"a": None}):
        path.write_text(json.dumps({**saved, **OFF, "some_new_option": value}))
        says = re.escape(f"knows no some_new_option={value!r} of the adapter's config")
        with pytest.raises(AdapterError, match=says):
            worker.load_adapter("policy", folder)


@pytest.mark.parametrize(
    ("name", "options", "error"),
    [
        ("new", {}, AdapterError),  # nothing says which layers
        ("", {"config": lora_config()}, AdapterError),
        ("new", {"config": lora_config(), "version": 0}, AdapterError),
        ("new", {"config": lora_config(), "revision": "main"}, AdapterError),
        ("new", {"config": lora_config(), "in_flight": "keep"}, AdapterError),
        ("new", {"config": lora_config(target_modules=["lm_head"])}, AdapterError),
        ("new", {"config": lora_config(3)}, WeightMismatchError),
        ("new", {"colour": "red"}, TypeError),
    ],
)
def test_the_stream_of_an_adapter_that_is_refused_is_gone_through(
    policy: PeftModel, worker: RolloutWorker, name: str, options: dict[str, Any], error: type[Exception]
) -> None:
    """The stream of an adapter that is refused is read to its end: the trainer's other ranks gather it too, and would
    wait.
    """
    gathered: list[str] = []
    with pytest.raises(error):
        worker.load_adapter(name, noted_stream(tensors(policy), gathered), **options)
    assert gathered == [*tensors(policy)]


def test_a_closed_worker_goes_through_the_stream_of_an_adapter(policy: PeftModel) -> None:
    gathered: list[str] = []
    with RolloutWorker(make_model("Qwen3", num_hidden_layers=1), config=CONFIG) as worker:
        pass
    with pytest.raises(WorkerStateError, match="closed"):
        worker.load_adapter("new", noted_stream(tensors(policy), gathered), config=lora_config())
    assert gathered == [*tensors(policy)]
