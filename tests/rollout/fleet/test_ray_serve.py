"""The server works behind Ray Serve's proxies."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch

ray = pytest.importorskip("ray")
try:
    from ray import serve
except ModuleNotFoundError:  # Ray without the packages of its Serve
    serve = None

from ...patience import HANG  # noqa: E402
from ..http.served import build_folder  # noqa: E402
from .test_ray_fleet import model_of, soak  # noqa: E402

needs_serve = pytest.mark.skipif(serve is None, reason="Ray Serve is not installed")


@pytest.mark.skipif(serve is not None, reason="Ray Serve is installed")
def test_without_serve_the_error_says_what_to_install() -> None:
    with pytest.raises(ImportError, match=r"pip install 'samebit\[ray-serve\]'"):
        import samebit.rollout.integrations.ray.serve  # noqa: F401


@needs_serve
@pytest.mark.parametrize(
    ("settings", "deployment", "says"),
    [
        ({"port": 1}, {}, "port is that of Serve's proxies"),
        ({"api_key": "k"}, {}, "set SAMEBIT_SERVE_API_KEY in the nodes' environment"),
        ({"control": "loopback"}, {}, "use control='token'"),
        ({"max_nn": 1}, {}, "there is no setting 'max_nn'"),
        ({"kv_cache_gb": 8}, {}, r"kv_cache_gb is the worker's: give it as config=RolloutConfig\(kv_cache_gb=\.\.\.\)"),
        ({"max_n": 0}, {}, "max_n must be at least 1"),
        (
            {},
            {"ray_actor_options": {"runtime_env": {"env_vars": {"SAMEBIT_SERVE_API_KEY": "k"}}}},
            "set it on the nodes",
        ),
        ({}, {"num_replicas": 2}, "there is one front"),
    ],
)
def test_what_serve_does_itself_is_refused_by_name(settings: dict, deployment: dict, says: str) -> None:
    from samebit.rollout.integrations.ray.serve import application

    with pytest.raises(ValueError, match=says):
        application("nowhere", settings=settings, **deployment)


@needs_serve
@pytest.mark.parametrize(
    ("replicas", "given", "cores"), [(4, {}, 0), (4, {"runtime_env": {}}, 0), (4, {"num_cpus": 2}, 2), (1, {}, 1)]
)
def test_a_front_takes_no_core_from_its_replicas(replicas: int, given: dict, cores: int) -> None:
    """A front takes no core from its replicas, which may have all of a node; a front that is the worker computes
    itself, and has Serve's one.
    """
    from samebit.rollout.integrations.ray.serve import application

    options = {"ray_actor_options": given} if given else {}
    made = application("nowhere", settings={"replicas": replicas}, **options)
    assert made._bound_deployment.ray_actor_options["num_cpus"] == cores


@pytest.fixture(scope="module")
def token() -> Iterator[str]:
    """Put a token into the environment of a cluster that begins after it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SAMEBIT_SERVE_CONTROL_TOKEN", "secret")
        yield "secret"


@needs_serve
@soak
def test_it_answers_behind_a_proxy_with_the_trainers_bits(
    token: str,
    cluster: None,
    tmp_path: Path,
) -> None:
    """The server answers behind a proxy with the trainer's bits; the replicas have all cores of the cluster, and the
    front none.
    """
    from samebit.kernels import bind, token_logprobs
    from samebit.rollout import RolloutConfig
    from samebit.rollout.integrations.ray.serve import application

    folder = build_folder(tmp_path)
    config = RolloutConfig(max_num_seqs=4, num_blocks=200, num_threads=1)
    settings = {"replicas": 2, "replica_cpus": 2, "control": "token", "served_model_name": "tiny"}
    serve.start(http_options={"host": "127.0.0.1", "port": 8765})
    try:
        serve.run(application(str(folder), config=config, settings=settings))
        with httpx.Client(base_url="http://127.0.0.1:8765", timeout=HANG) as client:
            body = {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 6, "logprobs": 1, "temperature": 0.7}}
            choice = client.post("/inference/v1/generate", json=body).json()["choices"][0]
            scores = torch.tensor([one["logprob"] for one in choice["logprobs"]["content"]])
            assert len(scores) == 6
            with torch.no_grad():
                ids = torch.tensor([[1, 2, 3, *choice["token_ids"]]])
                wanted = token_logprobs(bind(model_of(folder)), ids, temperature=0.7)[0, 2:]
            assert torch.equal(scores, wanted)
            with client.stream("POST", "/inference/v1/generate", json={**body, "stream": True}) as answer:
                events = [line for line in answer.iter_lines() if line]
            assert events[-1] == "data: [DONE]"
            assert len(events) > 3
            assert json.loads(events[0].removeprefix("data: "))
            assert client.get("/is_paused").status_code == 401
            assert client.get("/is_paused", headers={"Authorization": f"Bearer {token}"}).json() == {"is_paused": False}
            assert 'engine="1"' in client.get("/metrics").text
    finally:
        serve.shutdown()
