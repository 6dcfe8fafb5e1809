"""The RL dialect speaks of token ids in and out, pauses, sleep, and weights."""

from __future__ import annotations

import json
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch.distributed import BroadcastOptions
from transformers import AutoModelForCausalLM

from samebit.kernels import bind, token_logprobs
from samebit.rollout.integrations.http.rl.generate import GenerateAnswer
from samebit.weight_sync import (
    SharedMemoryReceiver,
    SharedMemorySender,
    SyncRefusedError,
    WeightStream,
    gloo_group,
    listening_store,
)
from samebit.weight_sync.wire.link import Answer

from ...patience import HANG, wait_until
from ..held_steps import held_steps
from ..inside import engine_of
from .served import Served, build_folder, serving

IDS = list(range(30))


def ask(served: Served, **more: object) -> dict[str, object]:
    sampling = {"max_tokens": 24, "seed": 2, "temperature": 0.9, "logprobs": 2, "ignore_eos": True}
    answer = served.post("/inference/v1/generate", {"token_ids": IDS, "sampling_params": {**sampling, **more}})
    assert answer.status_code == 200, answer.text
    return GenerateAnswer.model_validate(answer.json()).model_dump()


def test_generated_log_probabilities_are_the_trainers_bits(served: Served) -> None:
    answer = ask(served, n=2, prompt_logprobs=1)
    policy = bind(AutoModelForCausalLM.from_pretrained(served.folder, dtype=torch.float32))
    for choice in answer["choices"]:
        scores = token_logprobs(policy, torch.tensor([IDS + choice["token_ids"]]), temperature=0.9)[0]
        content = choice["logprobs"]["content"]
        assert [one["token_id"] for one in content] == choice["token_ids"]
        got = struct.pack(f"{len(content)}f", *[one["logprob"] for one in content])
        assert got == struct.pack(f"{len(content)}f", *scores[-24:].tolist())
        assert choice["weight_versions"][-1]["end"] == 24
        scored = zip(IDS, answer["prompt_logprobs"], strict=True)
        prompt = [None if one is None else one[str(token)]["logprob"] for token, one in scored]
        plain = token_logprobs(policy, torch.tensor([IDS]))[0]  # a prompt is scored at temperature 1
        assert prompt == [None, *plain.tolist()]
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= 0


def test_a_generated_stream_ends_with_the_versions(served: Served) -> None:
    whole = ask(served)["choices"][0]
    body = {
        "token_ids": IDS, "stream": True, "request_id": "streamed", "output_mode": "text", "return_token_ids": True,
        "sampling_params": {"max_tokens": 24, "seed": 2, "temperature": 0.9, "logprobs": 2, "ignore_eos": True},
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    with served.http.stream("POST", f"{served.base}/inference/v1/generate", json=body) as answer:
        events = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert events.pop() == "[DONE]"
    pieces = [json.loads(one) for one in events]
    choices = [choice for piece in pieces for choice in piece["choices"]]
    assert [token for choice in choices for token in choice["token_ids"]] == whole["token_ids"]
    assert choices[-1]["weight_versions"] == whole["weight_versions"]
    assert not any("weight_versions" in choice for choice in choices[:-1])
    assert pieces[0]["prompt_token_ids"] == IDS
    assert pieces[0]["request_id"] == "streamed"
    assert pieces[-1]["usage"]["completion_tokens"] == 24


def test_what_prime_rl_puts_among_the_sampling_parameters_is_taken(served: Served) -> None:
    """The server takes what prime-rl puts among the sampling parameters: its trainer's settings and its salt, and from
    the second turn on where routed experts would begin.
    """
    ids = [9] * 70

    def cached(salt: str, **more: object) -> int:
        sampling = {
            "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "return_token_ids": True, "cache_salt": salt,
            "stop_token_ids": [257], "logprobs": 1, "skip_special_tokens": False, "max_tokens": 4,
            "routed_experts_prompt_start": 69,
        }  # fmt: skip
        answer = served.post("/inference/v1/generate", {"token_ids": ids, "sampling_params": sampling, **more})
        assert answer.status_code == 200, answer.text
        assert answer.json()["prompt_token_ids"] == ids
        return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert (cached("3"), cached("3"), cached("4"), cached("4", cache_salt="4")) == (0, 64, 0, 64)
    for name, inside, beside in (("cache_salt", "3", "4"), ("return_token_ids", True, False)):
        answer = served.post(
            "/inference/v1/generate", {"token_ids": ids, name: beside, "sampling_params": {name: inside}}
        )
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, name), answer.text


def test_what_skyrl_asks_of_the_sampler_is_taken(served: Served) -> None:
    """The server takes what SkyRL asks of the sampler: the ids of a sample have its stop string in any case; where
    texts come too, they end before it.
    """
    letter = served.service.need_tokenizer().convert_tokens_to_ids("q")
    sampling = {
        "min_tokens": 1, "skip_special_tokens": True, "include_stop_str_in_output": True, "max_tokens": 4,
        "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "logprobs": 1, "stop": ["q"],
        "logit_bias": {str(letter): 100},
    }  # fmt: skip
    asked = {"token_ids": IDS, "sampling_params": sampling}
    answer = served.post("/inference/v1/generate", asked)
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    assert (choice["token_ids"], choice["stop_reason"]) == ([letter] * 2, "q")  # the first is within min_tokens
    refused = served.post("/inference/v1/generate", {**asked, "output_mode": "text"})
    assert (refused.status_code, "include_stop_str_in_output" in refused.text) == (400, True), refused.text


@pytest.fixture
def steps(served: Served) -> Iterator[threading.Semaphore]:
    """Give the steps of the server's worker, which wait until they are released (`held_steps`)."""
    with held_steps(served.service.worker) as released:
        yield released


@pytest.fixture
def running(served: Served, steps: threading.Semaphore) -> Iterator[list[dict[str, object]]]:
    """Start a request; its answer is in the list when the test lets it end."""
    answers: list[dict[str, object]] = []
    body = {"token_ids": IDS, "request_id": "long", "sampling_params": {"max_tokens": 1500, "ignore_eos": True}}
    thread = threading.Thread(target=lambda: answers.append(httpx.post(
        f"{served.base}/inference/v1/generate", json=body, timeout=None).json()))  # fmt: skip
    thread.start()
    wait_until(lambda: served.service.worker.stats()["running"] == 1)
    yield answers
    served.command("/resume")
    served.command("/abort_requests", {"request_ids": None})
    thread.join(HANG)


def test_pause_aborts_by_default(served: Served, running: list[dict[str, object]]) -> None:
    assert served.command("/pause").json() == {"status": "paused"}
    wait_until(lambda: running)
    assert running[0]["choices"][0]["finish_reason"] == "abort"
    assert served.http.get(f"{served.control}/is_paused").json() == {"is_paused": True}
    assert served.http.get(f"{served.base}/readiness").status_code == 503
    assert served.http.get(f"{served.base}/health").status_code == 200
    assert served.command("/resume").json() == {"status": "resumed"}
    assert served.http.get(f"{served.base}/readiness").status_code == 200


def test_pause_keeps(served: Served, running: list[dict[str, object]], steps: threading.Semaphore) -> None:
    assert served.command("/pause?mode=keep").status_code == 200
    before = served.service.worker.stats()["steps"]
    assert served.command("/reset_prefix_cache?reset_running_requests=true").json() == {"success": True}
    assert served.service.worker.stats()["steps"] == before
    served.command("/resume")
    steps.release(4)
    wait_until(lambda: served.service.worker.stats()["steps"] > before + 3)
    assert not running
    assert served.command("/abort_requests", {"request_ids": []}).json()["aborted"] == 0
    assert served.command("/abort_requests", {"request_ids": ["long", "unknown"]}).json()["aborted"] == 1
    wait_until(lambda: running)
    assert running[0]["usage"]["completion_tokens"] > 0


def test_a_prompt_whose_scoring_is_aborted_is_no_scored_prompt(served: Served) -> None:
    answers: list[dict[str, object]] = []
    body = {"prompt": IDS, "echo": True, "max_tokens": 0, "logprobs": 0, "request_id": "scored"}
    thread = threading.Thread(target=lambda: answers.append(served.post("/v1/completions", body).json()))
    assert served.command("/pause?mode=keep").status_code == 200
    thread.start()
    wait_until(lambda: "cmpl-scored" in served.service.running)
    assert served.command("/abort_requests", {"request_ids": ["cmpl-scored"]}).json()["aborted"] == 1
    thread.join()
    assert served.command("/resume").status_code == 200
    assert answers[0]["choices"][0]["finish_reason"] == "abort"
    scored = served.post("/v1/completions", body).json()["choices"][0]
    assert (scored["finish_reason"], len(scored["logprobs"]["token_logprobs"])) == ("length", len(IDS))


def test_pause_waits(served: Served, steps: threading.Semaphore) -> None:
    worker = served.service.worker
    body = {"token_ids": IDS, "sampling_params": {"max_tokens": 50, "ignore_eos": True}}
    with ThreadPoolExecutor(2) as others:
        asked = others.submit(served.post, "/inference/v1/generate", body)
        wait_until(lambda: worker.stats()["running"] == 1)
        pausing = others.submit(served.command, "/pause?mode=wait")
        wait_until(lambda: not engine_of(worker).scheduler.admission_open)
        assert not asked.done()
        steps.release(50)
        assert pausing.result(HANG).status_code == 200
        assert asked.result(HANG).json()["choices"][0]["finish_reason"] == "length"
    assert served.command("/resume").status_code == 200


def test_sleep_and_wake_up(served: Served) -> None:
    before = ask(served)
    assert served.command("/sleep?level=1").json()["status"] == "sleeping"
    assert served.http.get(f"{served.control}/is_sleeping").json()["is_sleeping"]
    refused = served.post("/inference/v1/generate", {"token_ids": IDS})
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable")
    assert served.command("/wake_up?tags=weights").json()["status"] == "sleeping"
    assert served.command("/wake_up").json()["status"] == "awake"
    assert ask(served)["choices"] == before["choices"]
    assert served.command("/sleep?level=0").status_code == 200
    assert served.service.worker.paused
    assert served.command("/wake_up").json()["status"] == "awake"
    assert not served.service.worker.paused


def test_waking_up_ends_a_pause_once_nothing_sleeps(served: Served) -> None:
    """Waking up ends a pause once nothing sleeps, by tags too, as in vLLM: else requests would wait for ever behind an
    answer that says "awake".
    """
    worker = served.service.worker
    before = ask(served)
    assert served.command("/pause?mode=keep").status_code == 200
    assert served.command("/sleep?level=2").status_code == 200
    assert served.command("/wake_up?tags=weights").json()["status"] == "sleeping"
    assert worker.paused
    assert served.command("/update_weights", {"weight_dir": served.folder.name}).status_code == 200
    assert served.command("/wake_up?tags=scheduling").json()["status"] == "sleeping"
    assert (worker.paused, worker.sleeping) == (True, ("kv_cache",))
    assert served.command("/wake_up?tags=kv_cache&tags=scheduling").json()["status"] == "awake"
    assert not worker.paused
    assert ask(served)["choices"][0]["token_ids"] == before["choices"][0]["token_ids"]
    assert served.command("/sleep?level=0").status_code == 200
    assert served.command("/wake_up?tags=scheduling").json()["status"] == "awake"
    assert not worker.paused


def test_a_command_has_its_options_in_the_query_or_in_a_body(served: Served, running: list[dict[str, object]]) -> None:
    """A command has its options in the query or in a body, as clients do either: SkyRL pauses by the query and resets
    the cache by a body.
    """
    worker = served.service.worker
    assert served.command("/pause", {"mode": "keep"}).status_code == 200
    for query in ("", "?reset_running_requests=true&reset_external=false"):
        before = worker.stats()["preemptions"]
        assert served.command(f"/reset_prefix_cache{query}", {"reset_running_requests": True}).status_code == 200
        assert worker.stats()["preemptions"] == before + (not query)
    assert served.command("/sleep", {"level": 1, "tags": ["kv_cache"]}).status_code == 200
    assert worker.sleeping == ("kv_cache",)
    assert served.command("/sleep?level=1", {"tags": ["weights"]}).status_code == 200
    assert served.command("/wake_up", {"tags": ["kv_cache"]}).json()["tags_woken"] == ["kv_cache"]
    assert worker.sleeping == ("weights",)
    assert served.command("/wake_up", {"tags": []}).json()["status"] == "awake"
    assert served.command("/resume", {}).status_code == 200
    assert not running


def test_a_pause_that_waits_keeps_no_request_and_so_no_cache(served: Served) -> None:
    """A pause that waits keeps no request and so no cache, whatever mode stands beside the older name for it."""
    ask(served)
    asked = {"mode": "keep", "wait_for_inflight_requests": True}
    assert served.command("/pause", asked).status_code == 200
    assert served.command("/resume", {}).status_code == 200
    assert ask(served)["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        ("/pause?mode=never", None, 400, "mode"),
        ("/pause?mod=keep", None, 400, "no query parameter 'mod'"),
        ("/sleep?level=3", None, 400, "level"),
        ("/sleep?level=0&tags=kv_cache", None, 400, "tags go with level 1 or 2"),
        ("/sleep?level=2&tags=kv_cache", None, 400, "level=2 discards the weights"),
        ("/wake_up?tags=nothing", None, 400, "tags"),
        ("/pause", {"mod": "keep"}, 400, "no field 'mod'"),
        ("/pause", {"mode": "never"}, 400, "mode: "),
        ("/pause?mode=abort", {"mode": "keep"}, 400, "mode is 'abort' in the query and 'keep' in the body"),
        ("/resume", {"mode": "keep"}, 400, "no field 'mode'"),
        ("/sleep", {"level": 3}, 400, "level: "),
        ("/sleep?level=1", {"level": 2}, 400, "level is 1 in the query and 2 in the body"),
        ("/wake_up?tags=weights", {"tags": ["kv_cache"]}, 400, "tags is ['weights'] in the query"),
        ("/reset_prefix_cache", {"reset_external": True}, 400, "there is no external cache"),
        ("/reset_prefix_cache?reset_external=true", None, 400, "there is no external cache"),
        ("/shutdown_weight_transfer_engine", {"a": 1}, 400, "no field 'a'"),
        ("/collective_rpc", {"method": "save"}, 400, "collective_rpc is not offered"),
        ("/v1/load_lora_adapter", {"lora_name": "a"}, 400, "lora_path: Field required"),
        ("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "../.."}, 403, "not below --weight-root"),
        ("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "nowhere"}, 404, "no such folder"),
        ("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "."}, 400, "holds no adapter in peft's format"),
        ("/v1/load_lora_adapter", {"lora_name": "tiny", "lora_path": "."}, 400, "is the model that is served"),
        ("/v1/unload_lora_adapter", {"lora_name": "a"}, 404, "no adapter 'a' was loaded"),
        ("/start_weight_update", None, 409, "there is no transfer"),
        ("/finish_weight_update", None, 409, "no update has been started"),
        ("/init_weight_transfer_engine", {"init_info": {"backend": "nccl", "master_port": 1}}, 400, "init_info"),
        ("/init_weight_transfer_engine", {"init_info": {"ipc_handles_pickled": "gASV"}}, 400, "init_info"),
        ("/update_weights", {}, 400, "either update_info or weight_dir"),
        ("/update_weights", {"update_info": {"names": []}}, 409, "there is no transfer"),
        ("/update_weights", {"weight_dir": "../.."}, 403, "not below --weight-root"),
        ("/update_weights", {"weight_dir": "/etc"}, 403, "not below --weight-root"),
        ("/update_weights", {"weight_dir": "nowhere"}, 404, "no such folder"),
        ("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "a" * 256}, 404, "no such folder"),
        ("/update_weights", {"weight_dir": "a" * 300}, 404, "no such folder"),
        ("/update_weights", {"weight_dir": "a\0b"}, 400, "weight_dir has a null byte"),
        ("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "\0"}, 400, "lora_path has a null byte"),
    ],
)
def test_a_wrong_command_is_named(served: Served, path: str, body: object, status: int, says: str) -> None:
    answer = served.command(path, body)
    assert (answer.status_code, says in answer.json()["error"]["message"]) == (status, True), answer.text


def test_a_trainer_that_is_not_there_is_a_bad_gateway(served: Served) -> None:
    nowhere = {"backend": "shared_memory", "address": "/no/sender"}
    assert served.command("/init_weight_transfer_engine", {"init_info": nowhere}).status_code == 200
    answer = served.command("/update_weights", {"update_info": {}})
    assert answer.status_code == 502
    assert "the transfer broke off: no sender at /no/sender" in answer.json()["error"]["message"]
    assert served.command("/shutdown_weight_transfer_engine").status_code == 200


def test_the_loopback_listener_answers_no_pages(served: Served) -> None:
    for headers in ({"Host": "evil.example"}, {"Origin": "http://evil.example"}):
        assert served.command("/pause", headers=headers).status_code == 403
    assert not served.service.worker.paused


def test_adapters_are_models(served: Served) -> None:
    """Adapters are models: they are loaded from below the root, and a request that names one has the bits of the
    trainer's peft model.
    """
    base = AutoModelForCausalLM.from_pretrained(served.folder, dtype=torch.float32)
    policy = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "up_proj"]))
    with torch.no_grad():
        for name, weight in policy.named_parameters():
            if ".lora_B." in name:
                weight.fill_(0.05)
    folder = served.folder.parent / "adapter"
    policy.save_pretrained(folder)
    bind(policy)
    load = {"lora_name": "mine", "lora_path": "adapter"}
    assert served.command("/v1/load_lora_adapter", load).status_code == 200
    again = served.command("/v1/load_lora_adapter", load)
    assert (again.status_code, "set load_inplace=true" in again.text) == (400, True)
    assert served.command("/v1/load_lora_adapter", {**load, "load_inplace": True}).status_code == 200
    listed = served.client.models.list().data
    assert [(one.id, one.parent, one.root) for one in listed] == [("tiny", None, "tiny"), ("mine", "tiny", "adapter")]
    asked = {"token_ids": IDS, "sampling_params": {"max_tokens": 9, "seed": 2, "logprobs": 0, "ignore_eos": True}}
    answer = served.post("/inference/v1/generate", {**asked, "model": "mine"}).json()
    (choice,) = answer["choices"]
    expected = token_logprobs(policy, torch.tensor([IDS + choice["token_ids"]]))[0, -9:].tolist()
    assert [one["logprob"] for one in choice["logprobs"]["content"]] == expected
    assert answer["model"] == "mine"
    alone = served.post("/inference/v1/generate", {**asked, "model": "tiny"}).json()["choices"]
    assert alone == served.post("/inference/v1/generate", asked).json()["choices"] != answer["choices"]
    streamed = served.client.completions.create(model="mine", prompt="ab", max_tokens=3, seed=1, stream=True)
    text = "".join(piece.choices[0].text for piece in streamed)
    assert text == served.client.completions.create(model="mine", prompt="ab", max_tokens=3, seed=1).choices[0].text
    talk = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
    assert served.client.chat.completions.create(model="mine", **talk).model == "mine"
    assert served.command("/v1/unload_lora_adapter", {"lora_name": "mine"}).status_code == 200
    with pytest.raises(openai.NotFoundError, match="there is no model 'mine' here") as raised:
        served.client.chat.completions.create(model="mine", **talk)
    assert raised.value.code == "model_not_found"


def test_bad_adapters_are_refused_by_name_and_leave_no_trace(served: Served) -> None:
    base = AutoModelForCausalLM.from_pretrained(served.folder, dtype=torch.float32)
    folder = served.folder.parent / "bad-adapter"
    get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj"])).save_pretrained(folder)
    config, tensors = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    good, made = json.loads(config.read_text()), load_file(tensors)
    half = {name: tensor for name, tensor in made.items() if "lora_A" in name}
    wide = {name: torch.zeros(2 * tensor.shape[0], *tensor.shape[1:]) for name, tensor in made.items()}
    cases: list[tuple[int, str, dict[str, object], dict[str, torch.Tensor]]] = [
        (400, "should be a positive integer", {"r": 0}, made),
        (409, "2 missing: ", {}, half),
        (409, "4 misshapen: ", {}, wide),
        (400, "exact are linear layers", {"target_modules": ["lm_head"]}, made),
    ]
    for status, says, changes, written in cases:
        config.write_text(json.dumps(good | changes))
        save_file(written, tensors)
        answer = served.command("/v1/load_lora_adapter", {"lora_name": "bad", "lora_path": "bad-adapter"})
        assert (answer.status_code, says in answer.json()["error"]["message"]) == (status, True), answer.text
    assert [one.id for one in served.client.models.list().data] == ["tiny"]
    with pytest.raises(openai.NotFoundError, match="there is no model 'bad' here"):
        served.client.completions.create(model="bad", prompt="ab", max_tokens=3)


def test_facts(served: Served) -> None:
    assert served.http.get(f"{served.control}/get_world_size").json() == {"world_size": 1}
    info = served.http.get(f"{served.control}/server_info?config_format=json").json()
    assert info["vllm_config"]["model_config"]["max_model_len"] == 2048
    assert info["vllm_config"]["model_config"]["dtype"] == "torch.float32"
    assert info["vllm_config"]["lora_config"]["max_lora_rank"] > 512


def test_weights_come_from_a_folder_over_gloo_and_through_shared_memory(served: Served, tmp_path: Path) -> None:
    """Weights come from a folder, over gloo and through shared memory: each update gives the trainer's bits, and a name
    to what is sampled after it.
    """
    with torch.random.fork_rng():
        folder = build_folder(served.folder.parent / "other", seed=1)
    other = bind(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    state = {name: tensor.clone() for name, tensor in AutoModelForCausalLM.from_pretrained(folder).state_dict().items()}
    before = ask(served)

    assert served.command("/update_weights", {"weight_dir": "other"}).status_code == 200
    assert served.command("/update_weight_version", {"new_version": "step-1"}).json()["success"]
    assert served.http.get(f"{served.control}/weight_info").json() == {"weight_version": "step-1"}
    check(served, other, "step-1")

    back = dict(AutoModelForCausalLM.from_pretrained(served.folder).state_dict())
    store = listening_store("127.0.0.1")
    info = {"backend": "gloo", "master_address": "127.0.0.1", "master_port": store.port}
    made: list[object] = []
    joining = threading.Thread(target=lambda: made.append(gloo_group(store, 0, 2)))
    joining.start()
    assert served.command("/init_weight_transfer_engine", {"init_info": info}).status_code == 200
    joining.join()
    assert served.command("/start_weight_update", {}).status_code == 200
    names = list(back)
    for part in (names[:3], names[3:]):
        sending = threading.Thread(target=broadcast, args=(made[0], [back[name] for name in part]))
        sending.start()
        described = {
            "names": part,
            "dtype_names": ["float32"] * len(part),
            "shapes": [list(back[name].shape) for name in part],
        }
        assert served.command("/update_weights", {"update_info": described}).status_code == 200
        sending.join()
        check(served, other, "step-1")  # an update that is not finished changes nothing
    assert served.command("/finish_weight_update", {"weight_version": "step-2"}).status_code == 200
    after = ask(served)
    assert after["choices"][0]["token_ids"] == before["choices"][0]["token_ids"]
    assert after["choices"][0]["weight_versions"][0]["version"] == "step-2"

    with SharedMemorySender() as sender:
        shared = {"backend": "shared_memory", "address": sender.address}
        assert served.command("/init_weight_transfer_engine", {"init_info": shared}).status_code == 200
        sending = threading.Thread(target=lambda: sender.send(WeightStream.of(state)))
        sending.start()
        assert served.command("/update_weights", {"update_info": {}}).status_code == 200
        sending.join()
        assert served.command("/shutdown_weight_transfer_engine").status_code == 200
    check(served, other, str(served.service.worker.weight_version))

    save_file({"nothing": torch.zeros(1)}, served.folder.parent / "other" / "model.safetensors")
    refused = served.command("/update_weights", {"weight_dir": "other"})
    assert (refused.status_code, "nothing" in refused.json()["error"]["message"]) == (409, True)
    check(served, other, str(served.service.worker.weight_version))
    assert served.command("/update_weights", {"weight_dir": served.folder.name}).status_code == 200


def test_a_transfer_that_is_given_up_hangs_up(served: Served) -> None:
    """A transfer that is given up hangs up, as the sender serves whoever comes next: this server with another timeout,
    or another receiver.
    """
    state = dict(AutoModelForCausalLM.from_pretrained(served.folder).state_dict())
    with ThreadPoolExecutor(1) as other, SharedMemorySender(timeout=HANG) as sender:
        for timeout in (300, 200, 300):
            info = {"backend": "shared_memory", "address": sender.address, "timeout": timeout}
            assert served.command("/init_weight_transfer_engine", {"init_info": info}).status_code == 200
            sent = other.submit(sender.send, WeightStream.of(state))
            assert served.command("/update_weights", {"update_info": {}}).status_code == 200
            sent.result()
        assert served.command("/shutdown_weight_transfer_engine").status_code == 200
        sent = other.submit(sender.send, WeightStream.of(state))
        with SharedMemoryReceiver(sender.address, timeout=HANG) as receiver:
            assert receiver.listen().specs.keys() == state.keys()
            receiver.answer(Answer(refused="not now"))
        with pytest.raises(SyncRefusedError, match="not now"):
            sent.result()


def broadcast(group: torch.distributed.ProcessGroup, tensors: list[torch.Tensor]) -> None:
    options = BroadcastOptions()
    options.rootRank = 0
    for tensor in tensors:
        group.broadcast([tensor.contiguous()], options).wait()


def check(served: Served, policy: torch.nn.Module, version: str) -> None:
    choice = ask(served)["choices"][0]
    scores = token_logprobs(policy, torch.tensor([IDS + choice["token_ids"]]), temperature=0.9)[0, -24:]
    assert [one["logprob"] for one in choice["logprobs"]["content"]] == scores.tolist()
    assert [span["version"] for span in choice["weight_versions"]] == [version]


def test_a_control_token_is_asked_for(served: Served) -> None:
    secrets = {"SAMEBIT_SERVE_CONTROL_TOKEN": "secret", "SAMEBIT_SERVE_API_KEY": "public"}
    with serving(served.folder, "--control", "token", "--num-blocks", "8", environment=secrets) as other:
        assert other.command("/pause").status_code == 401
        assert other.command("/pause", headers={"Authorization": "Bearer public"}).status_code == 401
        assert other.command("/pause", headers={"Authorization": "Bearer secret"}).status_code == 200
        assert other.http.get(f"{other.base}/v1/models").status_code == 401
        assert other.http.get(f"{other.base}/v1/models", headers={"Authorization": "bearer public"}).status_code == 200
        assert other.http.get(f"{other.base}/metrics").status_code == 200
