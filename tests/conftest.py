"""Fixtures: a real run of the smallest recipe; programs compiled once for all test processes."""

from __future__ import annotations

import os
import tempfile

import pytest

from iclens.lab.files import hold_lock
from iclens.lab.recipe import Recipe, load_recipe
from iclens.lab.store import Run, create_run, open_run
from iclens.lab.sweep import run_sweep


def pytest_configure(config: pytest.Config) -> None:
    """Workers, and the commands that tests start, share what the first of them compiles."""
    if hasattr(config, "workerinput") or "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    cache = tempfile.TemporaryDirectory(prefix="iclens-tests-")
    config.add_cleanup(cache.cleanup)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = cache.name
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.2"


def run_once(tmp_path_factory, name: str, recipe: Recipe, workers: int = 0) -> Run:
    """A run of a recipe for all workers' tests; they must not change it."""
    root = tmp_path_factory.getbasetemp()
    root = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root
    with hold_lock(root / f"{name}.lock", wait=True):
        run = create_run(root / name, recipe)
        assert run_sweep(run, workers=workers) == {}
    return open_run(run.path)


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory) -> Run:
    """The preset `tiny`."""
    return run_once(tmp_path_factory, "tiny", load_recipe("tiny"))


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory) -> Run:
    """Both cells of the sweeps' recipe, one after another in one worker."""
    from sweeping import BASE

    return run_once(tmp_path_factory, "undisturbed", BASE, workers=1)
