"""Rewrite the asserts of all files of tests once: where they are new, each process of pytest-xdist would do it, at the
same time as the others, in half of the time that it takes to import them."""

from __future__ import annotations

import pytest
from _pytest.assertion import rewrite

from .order import TESTS

WITH_ASSERTS = ("test_*.py", "conftest.py")


def rewrite_asserts(config: pytest.Config) -> None:
    """Leave pytest's own cache of what is rewritten up to date."""
    state = config.stash[rewrite.assertstate_key]
    for file in (file for pattern in WITH_ASSERTS for file in TESTS.rglob(pattern)):
        cached = rewrite.get_cache_dir(file) / f"{file.stem}{rewrite.PYC_TAIL}"
        if rewrite._read_pyc(file, cached) is None and rewrite.try_makedirs(cached.parent):
            digest, code = rewrite._rewrite_test(file, config)
            rewrite._write_pyc(state, code, digest, cached)
