"""Fixtures: a real run of the smallest recipe."""

from __future__ import annotations

import pytest

from iclens.lab.recipe import load_recipe
from iclens.lab.store import Run, create_run
from iclens.lab.sweep import run_sweep


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory) -> Run:
    """The preset `tiny`, run once for all tests; they must not change it."""
    run = create_run(tmp_path_factory.mktemp("runs") / "tiny", load_recipe("tiny"))
    assert run_sweep(run) == {}
    return run
