"""The adapter that is trained on the bound module is the adapter that samples."""

import copy
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from samebit.kernels import BindingError, bind, token_logprobs
from samebit.kernels.ops.linear import linear
from samebit.rollout import AdapterError, RolloutConfig, RolloutWorker, SamplingParams, WorkerStateError

from ..patience import HANG
from .compare import assert_matches_trainer, assert_same_samples
from .families import CAMPAIGN, DTYPES, make_model, token_ids
from .gradients import relative_error
from .lora import FAMILIES, add, config_for, lora_config, make_peft, wake

CONFIG = {"num_blocks": 64, "max_model_len": 160, "max_num_seqs": 8, "max_num_batched_tokens": 40}
PROMPTS = token_ids(70, 1, 33)
IDS = torch.tensor(token_ids(45, 45))
RANKS = (1, 4, 8, 16, 64, 100)
CASES = [
    ("Qwen3", 1, torch.float32),
    ("Qwen3", 100, torch.bfloat16),
    ("NemotronH, experts", 16, torch.float32),
    ("Qwen3Moe", 4, torch.bfloat16),
]
if CAMPAIGN:
    CASES = list(itertools.product(FAMILIES, RANKS, DTYPES))


def params(count: int = 3, **changes: Any) -> list[SamplingParams]:
    return [
        SamplingParams(n=1 + (index == 0), max_tokens=9, seed=index, ignore_eos=True, **changes)
        for index in range(count)
    ]


@pytest.fixture(scope="module")
def policy() -> PeftModel:
    """Give a bound model with two adapters; tests leave it as it is."""
    model = make_peft("Qwen3")
    add(model, "ref", lora_config(3, use_rslora=True, target_modules=["q_proj", "down_proj"]))
    bind(model)
    return model


@pytest.fixture(scope="module")
def worker(policy: PeftModel) -> Iterator[RolloutWorker]:
    with RolloutWorker(policy, config=RolloutConfig(**CONFIG)) as worker:
        yield worker


@pytest.mark.soak
@pytest.mark.parametrize(("family", "rank", "dtype"), CASES)
def test_a_worker_reports_what_the_trainer_computes(family: str, rank: int, dtype: torch.dtype) -> None:
    model = make_peft(family, dtype, config_for(family, rank, whole=CAMPAIGN))
    assert {w.dtype for name, w in model.named_parameters() if "lora" in name} == {torch.float32}
    with RolloutWorker(model, config=RolloutConfig(**CONFIG)) as worker:
        found = worker.generate(PROMPTS, params())
        assert assert_matches_trainer(model, found, params()) == 36
        assert_same_samples(worker.generate(PROMPTS[:1], params(1)), found[:1])
        with model.disable_adapter():
            assert_matches_trainer(model, worker.generate(PROMPTS, params(adapter="__base__")), params())


def test_adapters_of_the_models_dtype() -> None:
    """Adapters may have the model's dtype: under verl with FSDP2 A and B are bfloat16 too."""
    model = make_peft("Qwen3", torch.bfloat16, lora_config(4), autocast_adapter_dtype=False)
    assert {w.dtype for w in model.parameters()} == {torch.bfloat16}
    with RolloutWorker(model, config=RolloutConfig(**CONFIG)) as worker:
        assert_matches_trainer(model, worker.generate(PROMPTS, params()), params())


def test_near_pefts_own_forward() -> None:
    """Log-probabilities and gradients of A and B are near those of peft's own forward."""
    model = make_peft("Qwen3")
    logits = model(input_ids=IDS).logits.log_softmax(-1)
    expected = logits[:, :-1].gather(-1, IDS[:, 1:, None])[..., 0]
    gradients = _gradients(model, expected)
    bind(model)
    found = token_logprobs(model, IDS)
    assert relative_error(found, expected) < 1e-5
    for name, gradient in _gradients(model, found).items():
        assert relative_error(gradient, gradients[name]) < 1e-4, name


@pytest.mark.parametrize(("family", "reentrant"), [("Qwen3", True), ("NemotronH, experts", False)])
def test_checkpointing_recomputes_under_the_adapter_of_the_forward(family: str, reentrant: bool) -> None:
    """Checkpointing recomputes under the adapter of the forward, whatever peft's flags say when the backward runs."""
    model = bind(make_peft(family))
    expected = _gradients(model, token_logprobs(model, IDS))
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    scores = token_logprobs(model, IDS)
    layers = [module for module in model.modules() if type(module).__name__ == "Linear" and hasattr(module, "lora_A")]
    for layer in layers:
        layer._disable_adapters = True  # disable_adapter() would also take the gradients of what is recomputed
    found = _gradients(model, scores)
    assert {name: torch.equal(gradient, expected[name]) for name, gradient in found.items()} == dict.fromkeys(
        expected, True
    )


@pytest.mark.soak
def test_updates_in_place_of_an_adapter() -> None:
    """An adapter is updated in place: nothing travels, nothing cached is hit again, every token is exact, and the base
    stays what it was.
    """
    model = make_peft("Qwen3")
    base = bind(make_model("Qwen3", num_hidden_layers=2))
    optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=1e-2)
    with RolloutWorker(model, config=RolloutConfig(**CONFIG)) as worker:
        before = worker.generate(PROMPTS, params())
        for version in range(1, 51 if CAMPAIGN else 4):
            optimizer.zero_grad()
            token_logprobs(model, IDS).mean().neg().backward()
            with worker.weight_update() as update:
                optimizer.step()
            assert update.report.version == version
            assert all("lora_" in name for name in update.report.changed)
            assert worker.stats()["blocks_cached"] == 0
            found = worker.generate(PROMPTS, params())
            assert_matches_trainer(model, found, params())
        assert found[0].samples[0].logprobs != before[0].samples[0].logprobs
    with model.disable_adapter(), torch.no_grad():
        assert torch.equal(token_logprobs(model, IDS), token_logprobs(base, IDS))


def test_the_rounded_weights_of_an_adapter_that_was_merged_are_taken_when_told() -> None:
    """The rounded weights that peft leaves when it unmerges an adapter are taken when a worker is told; nobody notices
    peft's write, and without an update the cache would be hit.
    """
    model = make_peft("Qwen3")
    with RolloutWorker(model, config=RolloutConfig(**CONFIG)) as worker:
        worker.generate(PROMPTS, params())
        weight = model.get_parameter("base_model.model.model.layers.0.mlp.up_proj.base_layer.weight")
        before = weight.clone()
        model.merge_adapter()
        model.unmerge_adapter()
        assert not torch.equal(weight, before)
        worker.receive_weights()
        found = worker.generate(PROMPTS, params())
        assert [output.num_cached_tokens for output in found] == [0] * len(PROMPTS)
        assert_matches_trainer(model, found, params())


def test_what_a_worker_keeps_of_an_adapter_ends_with_the_update() -> None:
    """What a worker keeps of an adapter ends with the update, also with a write that torch does not count, as a fused
    optimizer's, and a hook on what is kept.
    """
    model = make_peft("Qwen3")
    with RolloutWorker(model, config=RolloutConfig(**CONFIG, enable_prefix_caching=False)) as worker:
        before = worker.generate(PROMPTS, params())
        with worker.weight_update(), torch.no_grad():
            for name, weight in model.named_parameters():
                if "lora_" in name:
                    weight.data.mul_(1.5)
        found = worker.generate(PROMPTS, params())
        assert_matches_trainer(model, found, params())
        assert found[0].samples[0].logprobs != before[0].samples[0].logprobs
        up = model.get_submodule("base_model.model.model.layers.0.mlp.down_proj.lora_B.default")
        up.register_forward_hook(lambda module, inputs, out: out * 2)
        assert_matches_trainer(model, worker.generate(PROMPTS, params()), params())


@pytest.mark.parametrize(
    "place", ["mlp.down_proj", "mlp.down_proj.base_layer", "self_attn.q_proj", "self_attn.k_proj.lora_A.default"]
)
def test_a_hook_counts_from_its_registration_on(place: str) -> None:
    """A hook counts from its registration on, though a worker has found out before what its layers multiply by."""
    model = make_peft("Qwen3", config=lora_config(4))
    with RolloutWorker(model, config=RolloutConfig(**CONFIG, enable_prefix_caching=False)) as worker:
        before = worker.generate(PROMPTS, params())
        module = model.get_submodule(f"base_model.model.model.layers.0.{place}")
        handle = module.register_forward_hook(lambda module, inputs, out: out * 2)
        found = worker.generate(PROMPTS, params())
        assert found[0].samples[0].logprobs != before[0].samples[0].logprobs
        assert_matches_trainer(model, found, params())
        handle.remove()
        assert_same_samples(worker.generate(PROMPTS, params()), before)


def test_switches_of_the_trainer_reach_no_request_in_flight(policy: PeftModel, worker: RolloutWorker) -> None:
    wanted = params(2) + params(1, adapter="ref")
    expected = worker.generate(PROMPTS, wanted)
    worker.reset_prefix_cache()
    stop, switched = threading.Event(), threading.Event()

    def switch() -> None:
        while not stop.is_set():
            with policy.disable_adapter():
                policy.set_adapter("ref")
                switched.set()
            policy.set_adapter("default")

    thread = threading.Thread(target=switch)
    thread.start()
    try:
        assert switched.wait(HANG)
        found = [worker.generate(PROMPTS, wanted) for _ in range(3)]
    finally:
        stop.set()
        thread.join(HANG)
    for outputs in found:
        assert_same_samples(outputs, expected)


def test_who_listens_to_a_base_layer_keeps_what_it_gave() -> None:
    """Who listens to a base layer keeps what it gave: the adapter's part is added in place, but not where somebody may
    hold the result.
    """
    model = bind(make_peft("Qwen3", config=lora_config(4)))
    base, heard = model.get_submodule("base_model.model.model.layers.0.mlp.down_proj.base_layer"), []
    base.register_forward_hook(lambda module, inputs, out: heard.append((inputs[0], out)))
    with torch.no_grad():
        token_logprobs(model, IDS)
        ((x, out),) = heard
        assert torch.equal(out, linear(x, base.weight))


def test_rows_of_several_adapters(policy: PeftModel, worker: RolloutWorker) -> None:
    """Each request of a batch with several adapters has the samples that it has alone, and shares no cached token with
    another adapter's.
    """
    worker.reset_prefix_cache()
    prompt = PROMPTS[0]
    wanted = [SamplingParams(max_tokens=9, seed=1, adapter=name) for name in (None, "ref", "__base__", "default")]
    outputs = worker.generate([prompt] * 4, wanted)
    assert [(output.adapter, output.adapter_version) for output in outputs] == [
        ("default", 0), ("ref", 0), (None, None), ("default", 0)
    ]  # fmt: skip
    assert len({tuple(output.samples[0].logprobs) for output in outputs}) == 3
    for output, one in zip(outputs, wanted, strict=True):
        worker.reset_prefix_cache()
        (alone,) = worker.generate([prompt], one)
        assert alone.num_cached_tokens == 0
        assert_same_samples([alone], [output])
    (other,) = worker.generate([prompt], SamplingParams(max_tokens=1, adapter="ref"))
    assert other.num_cached_tokens == 0
    assert_matches_trainer(policy, [outputs[0], outputs[3]], [wanted[0], wanted[3]])
    policy.set_adapter("ref")
    assert_matches_trainer(policy, [outputs[1]], [wanted[1]])
    policy.set_adapter("default")
    with policy.disable_adapter():
        assert_matches_trainer(policy, [outputs[2]], [wanted[2]])


def test_a_copy_of_a_bound_model_has_adapters_of_its_own(policy: PeftModel) -> None:
    twin = copy.deepcopy(policy)
    with torch.no_grad():
        expected = token_logprobs(policy, IDS)
        assert torch.equal(token_logprobs(twin, IDS), expected)
        wake(twin, seed=7)
        assert not torch.equal(token_logprobs(twin, IDS), expected)
        assert torch.equal(token_logprobs(policy, IDS), expected)


def test_what_merge_and_unload_gives_says_what_becomes_of_it(policy: PeftModel) -> None:
    with pytest.raises(BindingError, match=r"merge_and_unload\(\) gave is to be saved and loaded"):
        token_logprobs(copy.deepcopy(policy).merge_and_unload(), IDS)


def test_adapters_that_come_and_go_after_bind(policy: PeftModel) -> None:
    model = copy.deepcopy(policy)
    with RolloutWorker(model, config=RolloutConfig(**CONFIG)) as worker:
        expected = worker.generate(PROMPTS, params())
        model.merge_adapter()
        with pytest.raises(BindingError, match=r"default is merged into .*unmerge_adapter"):
            worker.generate(PROMPTS, params())
        with pytest.raises(BindingError, match="is merged"):
            token_logprobs(model, IDS)
        model.unmerge_adapter()
        worker.pause()
        handle = worker.submit(PROMPTS[0], SamplingParams(max_tokens=8))
        model.merge_adapter()
        worker.resume()
        with pytest.raises(WorkerStateError, match="is merged into"):
            handle.result()
    model = copy.deepcopy(policy)
    with RolloutWorker(model, config=RolloutConfig(**CONFIG)) as worker:
        add(model, "other", lora_config(2))
        with pytest.raises(BindingError, match=r"'other' was added after bind: call samebit.kernels.bind again"):
            worker.generate(PROMPTS, params())
        bind(model)
        assert_same_samples(worker.generate(PROMPTS, params()), expected)
        other = worker.generate(PROMPTS, params(adapter="other"))
        model.set_adapter("other")
        assert_matches_trainer(model, other, params())
        model.set_adapter("default")
        model.delete_adapter("other")
        with pytest.raises(BindingError, match="'other' was deleted after bind"):
            worker.generate(PROMPTS, params())
        bind(model)
        assert worker.adapters == ["__base__", "default", "ref"]
        with worker.weight_update():
            wake(model, seed=5)
        assert_matches_trainer(model, worker.generate(PROMPTS, params()), params())
        layer = model.get_submodule("base_model.model.model.layers.0.self_attn.q_proj")
        layer.scale_layer(2.0)
        with pytest.raises(BindingError, match=r"was bound with the scale 2.0, and has 4.0"):
            token_logprobs(model, IDS)


def test_untold_writes_to_an_adapter_that_came_after_bind_are_noticed(policy: PeftModel) -> None:
    """Untold writes to an adapter that came after `bind` are noticed: from the first request through it on, which may
    fill the prefix cache, its weights are watched like the others.
    """
    model = copy.deepcopy(policy)
    asked = params(adapter="other")
    with RolloutWorker(model, config=RolloutConfig(**CONFIG)) as worker:
        add(model, "other", lora_config(2))
        bind(model)
        model.set_adapter("other")
        assert_matches_trainer(model, worker.generate(PROMPTS, asked), asked)
        assert worker.stats()["untold_updates"] == 0
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if ".other." in name:
                    weight += 0.05
        assert_matches_trainer(model, worker.generate(PROMPTS, asked), asked)
        assert worker.stats()["untold_updates"] == 1


@pytest.mark.parametrize("told", ["in place", "by a state dict"])
def test_an_update_after_an_adapter_went_reaches_all_workers_on_the_module(policy: PeftModel, told: str) -> None:
    model = copy.deepcopy(policy)
    config = RolloutConfig(**CONFIG)
    with RolloutWorker(model, config=config) as first, RolloutWorker(model, config=config) as second:
        second.generate(PROMPTS, params())
        model.set_adapter("default")
        model.delete_adapter("ref")
        bind(model)
        if told == "in place":
            with first.weight_update():
                wake(model, seed=5)
        else:
            first.receive_weights({name: value + 0.25 for name, value in model.get_base_model().state_dict().items()})
        assert (first.weight_version, second.weight_version) == (1, 1)
        assert_matches_trainer(model, second.generate(PROMPTS, params()), params())
        assert second.stats()["untold_updates"] == 0


@pytest.mark.parametrize("changes", [{}, {"lora_alpha": 12, "target_modules": ["q_proj", "down_proj"]}])
def test_an_adapter_that_is_replaced_under_its_own_name(changes: dict[str, Any], policy: PeftModel) -> None:
    """An adapter that is replaced under its own name is another one: nothing cached of the old one is hit, and a
    request that has begun ends under that.
    """
    model = copy.deepcopy(policy)
    with RolloutWorker(model, config=RolloutConfig(**CONFIG)) as worker:
        before = worker.generate(PROMPTS, params())
        worker.pause()
        begun = worker.submit(PROMPTS[0], params()[0])
        model.delete_adapter("default")
        add(model, "default", lora_config(5, **changes))
        model.set_adapter("default")
        said = "the adapter 'default' was replaced after bind: call samebit.kernels.bind again"
        for compute in (
            lambda: worker.generate(PROMPTS, params()),
            lambda: model(IDS),
            lambda: token_logprobs(model, IDS),
        ):
            with pytest.raises(BindingError, match=said):
                compute()
        bind(model)
        worker.resume()
        assert worker.adapters == ["__base__", "ref", "default"]
        assert_same_samples([begun.result()], before[:1])
        found = worker.generate(PROMPTS, params())
        assert found[0].num_cached_tokens == 0
        assert found[0].samples[0].logprobs != before[0].samples[0].logprobs
        assert_matches_trainer(model, found, params())
        with worker.weight_update():
            wake(model, seed=5)
        assert_matches_trainer(model, worker.generate(PROMPTS, params()), params())


REFUSED: dict[str, tuple[Callable[[], LoraConfig], str]] = {
    "dora": (
        lambda: lora_config(use_dora=True),
        "a variant of LoRA .DoraLinearVariant. on model.layers.0.*exact is LoRA without one",
    ),
    "bias of the adapter": (lambda: lora_config(lora_bias=True), "lora_bias=True.*exact: False"),
    "biases": (lambda: lora_config(bias="lora_only"), "bias='lora_only'"),
    "copies of layers": (
        lambda: lora_config(layer_replication=[(0, 1), (0, 1)]),
        r"copies of layers into the model \(layer_replication=.*\), which disable_adapter.*; exact is None",
    ),
    "dropout": (lambda: lora_config(lora_dropout=0.1), "lora_dropout=0.1.*exact: 0.0"),
    "embeddings": (lambda: lora_config(target_modules=["embed_tokens"]), "embed_tokens is a .*lora.layer.Embedding"),
    "modules to save": (lambda: lora_config(modules_to_save=["lm_head"]), "lm_head is a .*ModulesToSaveWrapper"),
    "head": (lambda: lora_config(target_modules=["lm_head"]), "an adapter on lm_head"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_is_not_exact_is_refused_by_name(case: str) -> None:
    make, said = REFUSED[case]
    model = get_peft_model(make_model("Qwen3", num_hidden_layers=1), make())
    with pytest.raises(BindingError, match=said):
        bind(model)
    with pytest.raises(BindingError, match=said):
        RolloutWorker(model, config=RolloutConfig(**CONFIG))


def test_adapters_of_experts_are_refused() -> None:
    experts = lora_config(target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj"])
    with pytest.raises(BindingError, match=r"mlp.experts is a .*ParamWrapper .*no target_parameters"):
        bind(get_peft_model(make_model("Qwen3Moe"), experts))


@pytest.mark.parametrize("target", ["all-linear", ["q_proj", "gate_proj", "up_proj", "down_proj"]])
@pytest.mark.parametrize("family", ["Qwen3Moe", "DeepseekV3"])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_what_peft_makes_of_all_layers_around_experts_is_refused_with_what_to_name(
    family: str, target: str | list[str]
) -> None:
    config = lora_config(target_modules=target)
    says = (
        r'target_parameters, which peft makes of target_modules="all-linear" too.*name layers of the attention .*q_proj'
    )
    with pytest.raises(BindingError, match=f"exactly: {says}.*ParamWrapper"):
        bind(get_peft_model(make_model(family), copy.deepcopy(config)))
    with (
        RolloutWorker(make_model(family), config=RolloutConfig(**CONFIG)) as worker,
        pytest.raises(AdapterError, match=f"exactly: {says}.*ParamWrapper"),
    ):
        worker.load_adapter("new", {}, config=config)


def test_matrices_of_a_dtype_that_is_not_exact_are_refused() -> None:
    model = make_peft("Qwen3")
    model.get_submodule("base_model.model.model.layers.1.mlp.up_proj").lora_A.bfloat16()
    with pytest.raises(BindingError, match=r"on model.layers.1.mlp.up_proj are torch.bfloat16 and torch.float32"):
        bind(model)


def test_two_active_adapters_are_refused(policy: PeftModel) -> None:
    policy.base_model.set_adapter(["default", "ref"])
    try:
        with pytest.raises(BindingError, match="default, ref are active at once"):
            token_logprobs(policy, IDS)
    finally:
        policy.set_adapter("default")


def _gradients(model: PeftModel, scores: torch.Tensor) -> dict[str, torch.Tensor]:
    scores.sum().backward()
    found = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad()
    assert all("lora_" in name for name in found)
    return found
