"""A setting comes from a flag, the environment or a file, in this order, and a wrong one is named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from samebit.rollout import SelfTestError, WorkerLostError
from samebit.rollout.cli import main
from samebit.rollout.integrations.http import serving
from samebit.rollout.integrations.http.settings import read_setup


def test_flags_win_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("max_n: 1\nmax_waiting: 1\nport: 1\nmax_num_seqs: 5\ncontrol_token: abc\n")
    setup = read_setup(
        ["model", "--config", str(file), "--max-n", "3", "--kv-cache-gb", "0.5", "--enable-prefix-caching", "false"],
        {"SAMEBIT_SERVE_MAX_N": "2", "SAMEBIT_SERVE_MAX_WAITING": "2", "SAMEBIT_SERVE_API_KEY": "key", "HOME": "/"},
    )
    settings, worker = setup.settings, setup.worker
    assert (setup.model, settings.max_n, settings.max_waiting, settings.port) == ("model", 3, 2, 1)
    assert (settings.api_key, settings.control_token) == ("key", "abc")
    assert (worker.max_num_seqs, worker.kv_cache_gb, worker.enable_prefix_caching) == (5, 0.5, False)


@pytest.mark.parametrize(
    ("flags", "environment", "file", "says"),
    [
        ([], {"SAMEBIT_SERVE_MAX_NN": "1"}, "", "SAMEBIT_SERVE_MAX_NN is set, and there is no such setting"),
        ([], {"SAMEBIT_SERVE_PORT": "a"}, "", "SAMEBIT_SERVE_PORT must be of type int, got 'a'"),
        ([], {}, "max_nn: 1", "has max_nn, which are no settings"),
        ([], {}, "max_n: many", "max_n must be of type int, got 'many'"),
        ([], {}, "- 1", "must hold names and values"),
        ([], {}, "a: [", "are not YAML, line 1, column 5$"),
        ([], {}, "port: 1\napi_key: @s3cret", "are not YAML, line 2, column 10$"),
        (["--port", "70000"], {}, "", "port must be from 0 to 65535, got 70000"),
        (["--max-n", "0"], {}, "", "max_n must be at least 1, got 0"),
        (["--max-prompts", "65537"], {}, "", "max_prompts must be at most 65536, got 65537"),
        (["--max-grammar-bytes", "0"], {}, "", "max_grammar_bytes must be at least 1, got 0"),
        (["--max-body-values", "0"], {}, "", "max_body_values must be at least 1, got 0"),
        (["--max-alternatives", "-1"], {}, "", "max_alternatives must not be negative, got -1"),
        (["--replicas", "0"], {}, "", "replicas must be at least 1, got 0"),
        (["--replicas", "2", "--replica-cpus", "0"], {}, "", "replica_cpus must be at least 1, got 0"),
        (["--ray-address", "auto"], {}, "", "ray_address is for several replicas, and replicas is 1"),
        (["--resubmit", "true"], {}, "", "resubmit is for several replicas"),
        (["--max-restarts", "0"], {}, "", "max_restarts is for several replicas"),
        (["--replicas", "2", "--max-restarts", "-1"], {}, "", "max_restarts must not be negative, got -1"),
        ([], {}, "digest_key: x", "has digest_key, which are no settings"),
        (["--max-waiting", "-1"], {}, "", "max_waiting must not be negative, got -1"),
        (["--stall-seconds", "0"], {}, "", "stall_seconds must be above 0, got 0.0"),
        (["--control", "open"], {}, "", "control must be one of off, loopback, token"),
        (["--control", "token"], {}, "", "needs SAMEBIT_SERVE_CONTROL_TOKEN"),
        (["--ssl-certfile", "a"], {}, "", "are given together"),
        (["--control", "loopback", "--port", "8001"], {}, "", "port and control_port must be two .* got 8001 for both"),
        ([], {"SAMEBIT_SERVE_API_KEY": ""}, "", "api_key must not be empty"),
        ([], {}, "api_key: ''", "api_key must not be empty"),
        ([], {"SAMEBIT_SERVE_API_KEY": "secret\n"}, "", "api_key must be printable ASCII without white space"),
        ([], {"SAMEBIT_SERVE_CONTROL_TOKEN": "s\u00e9cret"}, "", "control_token must be printable ASCII"),
        ([], {}, "api_key: 12345678", "api_key must be of type str, got [.]{3}$"),
        ([], {}, "control_token: 12345678", "control_token must be of type str, got [.]{3}$"),
        (["--max-num-seqs", "0"], {}, "", "max_num_seqs must be an int of at least 1"),
    ],
)
def test_a_wrong_setting_is_named(
    tmp_path: Path, flags: list[str], environment: dict[str, str], file: str, says: str
) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(file)
    with pytest.raises(ValueError, match=says):
        read_setup(["model", "--config", str(path), *flags], environment)


LINKS = {
    "SAMEBIT_SERVE_SERVICE_HOST": "10.0.0.7",
    "SAMEBIT_SERVE_SERVICE_PORT": "8000",
    "SAMEBIT_SERVE_SERVICE_PORT_HTTP": "8000",
    "SAMEBIT_SERVE_PORT": "tcp://10.0.0.7:8000",
    "SAMEBIT_SERVE_PORT_8000_TCP": "tcp://10.0.0.7:8000",
    "SAMEBIT_SERVE_PORT_8000_TCP_PROTO": "tcp",
    "SAMEBIT_SERVE_PORT_8000_TCP_PORT": "8000",
    "SAMEBIT_SERVE_PORT_8000_TCP_ADDR": "10.0.0.7",
}
"""What Kubernetes sets in a pod beside a Service called samebit-serve."""


def test_services_of_kubernetes_are_no_settings() -> None:
    """Services of Kubernetes are no settings; a variable that no Service explains is refused as ever."""
    control = {name.replace("SERVE", "SERVE_CONTROL", 1): text for name, text in LINKS.items()}
    settings = read_setup(["model"], {**LINKS, **control, "SAMEBIT_SERVE_MAX_N": "3"}).settings
    assert (settings.port, settings.control_port, settings.max_n) == (8000, 8001, 3)
    assert read_setup(["model"], {**LINKS, "SAMEBIT_SERVE_PORT": "9000"}).settings.port == 9000
    for name, text in LINKS.items():
        with pytest.raises(ValueError, match=f"{name} "):
            read_setup(["model"], {name: text})
    with pytest.raises(ValueError, match="SAMEBIT_SERVE_SERVICE_NAME is set, and there is no such setting"):
        read_setup(["model"], {**LINKS, "SAMEBIT_SERVE_SERVICE_NAME": "a"})


def test_two_listeners_at_any_port_get_two() -> None:
    settings = read_setup(["model", "--control", "loopback", "--port", "0", "--control-port", "0"], {}).settings
    assert settings.port == settings.control_port == 0


@pytest.mark.parametrize(
    ("flag", "text", "says"),
    [
        ("--port", "x", "error: argument --port: must be of type int, got 'x'\n"),
        ("--resubmit", "yes", "error: unrecognized arguments: yes\n"),
    ],
)
def test_a_flag_of_another_type_is_named(flag: str, text: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "model", flag, text])
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "enforce_eager", "self_test"),
    [
        (["model"], False, None),
        (["--enforce-eager", "model", "--no-self-test"], True, False),
        (["--self-test", "model", "--no-enforce-eager"], False, True),
        (["--enforce-eager", "true", "model", "--self-test", "False"], True, False),
        (["--enforce-eager=false", "model", "--self-test=true"], False, True),
        (["--no-self-test", "--enforce-eager", "model"], True, False),
    ],
)
def test_a_setting_of_yes_and_no_is_a_switch(flags: list[str], enforce_eager: bool, self_test: bool | None) -> None:
    """A setting of yes and no is a switch: it takes the word for it, as environment and file have it, and never the
    model that stands behind it.
    """
    setup = read_setup(flags, {})
    assert (setup.model, setup.worker.enforce_eager, setup.worker.self_test) == ("model", enforce_eager, self_test)


def test_a_switch_wins_over_the_environment_and_a_word_is_left_to_other_flags() -> None:
    environment = {"SAMEBIT_SERVE_ENFORCE_EAGER": "true", "SAMEBIT_SERVE_DEQUANTIZE": "true"}
    setup = read_setup(["model", "--no-enforce-eager", "--served-model-name", "true", "--revision=false"], environment)
    assert (setup.worker.enforce_eager, setup.worker.dequantize) == (False, True)
    assert (setup.settings.served_model_name, setup.worker.revision) == ("true", "false")


def test_the_command_ends_with_one_line_for_what_it_can_not_serve(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", str(tmp_path / "nothing"), "--port", "0"]) == 2
    assert "samebit serve: no such model folder" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["serve", "model", "--api-key", "secrets-are-no-flags"])


@pytest.mark.parametrize(
    "error",
    [
        SelfTestError("row 3 differs in layer 1"),
        WorkerLostError("replica 2 ended while it loaded"),
        torch.OutOfMemoryError("tried to allocate 200.00 GiB"),
    ],
)
def test_a_model_that_can_not_be_served_ends_the_command_with_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    def load(_: object) -> None:
        raise error

    monkeypatch.setattr(serving, "load", load)
    assert main(["serve", "model", "--port", "0"]) == 2
    assert capsys.readouterr().err == f"samebit serve: {error}\n"


def test_what_was_not_foreseen_has_a_traceback_above_the_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was not foreseen has a traceback above the line, and the exit code that `samebit check` has for it."""

    def load(_: object) -> None:
        raise RuntimeError("odd")

    monkeypatch.setattr(serving, "load", load)
    assert main(["serve", "model", "--port", "0"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("Traceback")
    assert said.endswith("\nsamebit serve: RuntimeError: odd\n")
