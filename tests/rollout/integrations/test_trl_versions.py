"""The trainers say which TRL they are for, where there is none or another one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("trl", reason="TRL is not installed: pip install 'samebit[trl]'")

from importlib.metadata import PackageNotFoundError

from samebit.rollout.integrations.trl import versions


@pytest.mark.parametrize(
    ("python", "message"),
    [
        ((3, 10, 13), "needs TRL 1.16.x: it asks for Python 3.11 or newer, and this is 3.10"),
        ((3, 11, 0), "needs TRL 1.16.x: pip install 'samebit[trl]'"),
    ],
    ids=["3.10", "3.11"],
)
def test_a_python_that_has_no_trl_is_named(
    python: tuple[int, int, int], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the extra installs nothing of is not asked for again."""

    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(versions, "version", missing)
    monkeypatch.setattr(versions, "sys", SimpleNamespace(version_info=python))
    with pytest.raises(ImportError) as caught:
        versions.check_version()
    assert str(caught.value).endswith(message)


def test_another_minor_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "version", lambda name: "1.17.0")
    with pytest.raises(ImportError, match=r"made for TRL 1\.16\.x, and found TRL 1\.17\.0"):
        versions.check_version()
