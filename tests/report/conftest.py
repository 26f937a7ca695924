"""A browser, and a saved run with made-up but plausible curves, for tests without training.

Every model is a mixture of the uniform prediction and the four references whose weights move along
training as K demands; distances and losses follow from the mixture.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from iclens.lab.cell import RESULTS, Cell, curves_dataset
from iclens.lab.files import checksum, tree_to_arrays, write_arrays
from iclens.lab.recipe import Diversity, Recipe, SweepConfig, TaskConfig
from iclens.lab.store import Run, open_run
from iclens.phases import position_bins
from iclens.predictors import PREDICTORS
from iclens.report.page import write_page
from iclens.report.reading import Reading
from iclens.training import TrainingConfig

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
Open = Callable[..., Page]

RECIPE = Recipe(task=TaskConfig(states=4, context=48), train=TrainingConfig(steps=6000))
UNIFORM_TO = np.array([0.16, 0.30, 0.34, 0.36])
"""KL(reference || uniform) in nats."""
BETWEEN = {
    "id": [[0, 0.1, 0.2, 0.24], [0.11, 0, 0.17, 0.11], [0.2, 0.16, 0, 0.06], [0.24, 0.12, 0.06, 0]],
    "ood": [[0, 0.12, 0.9, 1.2], [0.12, 0, 1.0, 1.1], [0.8, 0.9, 0, 0.3], [1.1, 1.0, 0.3, 0]],
}
"""KL(reference || a model that is another reference) in nats, by reference, then model."""


def mixture(chains: Diversity, steps: np.ndarray) -> np.ndarray:
    """Weights (step, uniform and the four references) of a model trained on `chains` chains."""
    if chains == "infinite" or chains > 100:
        arrivals = {"1-Gen": 40, "2-Gen": 350}
    elif chains > 40:
        arrivals = {"1-Gen": 50, "2-Gen": 350, "2-Mem": 30_000}
    elif chains > 10:
        arrivals = {"1-Mem": 60, "2-Gen": 330, "2-Mem": 100 * chains}
    else:
        arrivals = {"1-Mem": 50, "2-Mem": 260 + 30 * chains}
    weights = np.zeros((len(steps), 5))
    weights[:, 0] = 1
    for name, arrival in arrivals.items():
        arrived = 1 / (1 + (arrival / np.maximum(steps, 1e-9)) ** 4)
        weights *= 1 - arrived[:, None]
        weights[:, 1 + PREDICTORS.index(name)] += arrived
    return weights


def measurements(chains: Diversity, seed: int, steps: Sequence[int]) -> dict[str, np.ndarray]:
    """What `iclens.lab.cell.evaluate` measures, made up, stacked over steps."""
    count = len(steps)
    rng = np.random.default_rng([seed, 0 if chains == "infinite" else chains])
    weights = mixture(chains, np.array(steps) * (1 + 0.25 * seed))
    noise = 1 + 0.03 * rng.standard_normal((count, 2, 4))
    distance = np.empty((count, 2, 4))
    for index, between in enumerate(BETWEEN.values()):
        to_each = np.concatenate([UNIFORM_TO[None], np.array(between).T + 0.003])
        distance[:, index] = weights @ to_each
    distance *= noise
    losses = np.array([[1.386, 1.27, 1.19, 1.17, 1.12], [1.386, 1.27, 1.19, 1.9, 2.2]])
    if chains == "infinite":
        distance[..., 2:] = np.inf
        losses[0] = losses[1]
    order = np.sort(distance, axis=-1)
    nearest = np.where(weights[:, :1] > 0.5, -1, distance.argmin(-1))
    margin = order[..., 1] - order[..., 0]
    measured = {
        "loss": (weights @ losses.T) * (1 + 0.002 * rng.standard_normal((count, 2))),
        "train_loss": np.concatenate([[np.nan], (weights @ losses[0])[1:]]),
        "distance": distance,
        "distance_binned": np.repeat(distance[..., None], len(position_bins(48)), axis=-1),
        "undefined": np.zeros((count, 2, 4)),
        "composition": (weights[:, :1] + weights[:, 1:]) / (1 + 3 * weights[:, :1]),
        "residual": 0.02 * weights[:, 0] + 0.002,
        "nearest": nearest[:, 0],
        "nearest_ood": nearest[:, 1],
        "margin": margin[:, 0],
        "margin_error": np.full(count, 0.004),
        "separation": np.full(count, 0.09),
        "clear": margin[:, 0] > 0.01,
        "reference_loss": np.repeat(losses[None, :, 1:], count, axis=0),
        "previous": np.full((count, 2, 1), 0.4),
        "previous_chance": np.full(count, 0.03),
        "induction": np.full((count, 2, 1), 0.5),
        "induction_chance": np.full(count, 0.27),
        "uniformity": np.full((count, 2, 1), 0.9),
    }
    if chains == "infinite":
        for name in ("distance", "distance_binned", "undefined", "composition", "reference_loss"):
            axis = 2 if name == "distance_binned" else -1
            measured[name] = np.take(measured[name], [0, 1], axis=axis)
        measured["composition"] /= measured["composition"].sum(-1, keepdims=True)
    return {
        name: array.astype(np.float32) if array.dtype.kind == "f" else array
        for name, array in measured.items()
    }


def write_run(
    path: Path,
    chains: Sequence[Diversity] = (2, 4, 8, 16, 32, 64, 128, 512),
    seeds: Sequence[int] = (0, 1),
    statuses: dict[tuple[Diversity, int], str] | None = None,
    recipe: Recipe = RECIPE,
) -> Path:
    """Save a run whose cells are done, but for those in `statuses`.

    The others are `missing`, `unfinished` (half its evaluations), `failed` (before the first),
    `diverged` (at two thirds of training) or `damaged`.
    """
    recipe = replace(recipe, sweep=SweepConfig(chains=tuple(chains), seeds=tuple(seeds)))
    path.mkdir(parents=True)
    (path / "recipe.toml").write_text(recipe.to_toml(), encoding="utf-8")
    provenance = {"iclens": "0.1.0", "versions": {"jax": "0.10.2"}, "device": "cpu", "code": None}
    (path / "provenance.json").write_text(json.dumps(provenance), encoding="utf-8")
    for count in chains:
        for seed in seeds:
            status = (statuses or {}).get((count, seed), "done")
            write_cell(Cell(path / "cells", recipe, count, seed), status)
    return path


def write_cell(cell: Cell, status: str) -> None:
    """Save one cell with the status that `write_run` explains."""
    if status == "missing":
        return
    cell.path.mkdir(parents=True)
    if status == "failed":
        (cell.path / "error.txt").write_text("MemoryError: 12 GiB <asked> for\n", "utf-8")
        return
    steps = list(cell.recipe.train.evaluation_steps)
    steps = steps[: {"unfinished": len(steps) // 2, "diverged": 2 * len(steps) // 3}.get(status)]
    measured = measurements(cell.chains, cell.seed, steps)
    weights = {
        name: np.stack([(1 + index / len(steps)) * array for index in range(len(steps))])
        for name, array in tree_to_arrays(cell.new_model()).items()
    }
    if status == "diverged":
        for array in weights.values():
            array[-1] = np.nan
        for name, array in measured.items():
            if array.dtype.kind == "f" and name != "reference_loss":
                array[-1] = np.nan
        measured["nearest"][-1], measured["clear"][-1] = -1, False
    if status == "unfinished":
        for index, step in enumerate(steps):
            piece = {f"curves.{name}": array[index] for name, array in measured.items()}
            piece |= {f"model.{name}": array[index] for name, array in weights.items()}
            pieces = cell.path / "pieces"
            pieces.mkdir(exist_ok=True)
            write_arrays(pieces / f"{step}.safetensors", {**piece, "diverged": np.array(-1)})
        return
    outcome = f"diverged at step {steps[-1]}" if status == "diverged" else "finished"
    curves = curves_dataset({**measured, "step": np.array(steps)}, cell.recipe.task.context)
    curves = curves.assign_attrs(chains=cell.chains, seed=cell.seed, outcome=outcome)
    curves.to_netcdf(cell.path / "curves.nc", engine="h5netcdf")
    kept = sorted({0, len(steps) // 2, len(steps) - 1})  # which is enough, and soon written
    checkpoints = {name: array[kept] for name, array in weights.items()}
    write_arrays(
        cell.path / "checkpoints.safetensors", {**checkpoints, "step": np.array(steps)[kept]}
    )
    write_arrays(cell.path / "state.safetensors", {"step": np.array(steps[-1])})
    checksums = {name: checksum(cell.path / name) for name in RESULTS}
    if status == "damaged":
        checksums["curves.nc"] = "0"
    (cell.path / "done.json").write_text(json.dumps({"checksums": checksums}), "utf-8")


@pytest.fixture(scope="session")
def saved_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a complete run of 8 values of K and 2 seeds."""
    return write_run(tmp_path_factory.mktemp("runs") / "demo")


@pytest.fixture(scope="session")
def report(saved_run: Path) -> Path:
    """The page of that run."""
    return write_page(Reading(open_run(saved_run)))


@pytest.fixture(scope="session")
def first_release(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run that the first release made (see tests/data), with its page."""
    path = tmp_path_factory.mktemp("runs") / "first_release"
    shutil.copytree(Path(__file__).parents[1] / "data" / "first_release", path)
    write_page(Reading(open_run(path)))
    return open_run(path)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    executable = next(filter(None, map(shutil.which, BROWSERS)), None)
    if executable is None:
        pytest.skip(f"no browser: none of {', '.join(BROWSERS)} is on the path")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Open]:
    """A function that opens a page offline; at the end, whatever it complained of is an error."""
    complaints: list[str] = []
    contexts = []

    def open_page(path: Path, width: int = 1200, scheme: Any = "light", view: str = "") -> Page:
        context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme, reduced_motion="reduce"
        )
        contexts.append(context)
        context.set_offline(True)
        page = context.new_page()
        page.on("console", lambda message: complaints.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("dialog", lambda dialog: complaints.append(f"dialog: {dialog.message}"))
        page.on(
            "request",
            lambda request: (
                request.url.startswith(("file:", "data:", "blob:"))
                or complaints.append(request.url)
            ),
        )
        page.goto(path.as_uri() + view)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []


def until(page: Page, condition: str) -> None:
    """Wait for a condition; the page forbids `eval`, which playwright's own waiting uses."""
    for _ in range(50):
        if page.evaluate(condition):
            return
        page.wait_for_timeout(100)
    pytest.fail(f"not within 5 s: {condition}")
