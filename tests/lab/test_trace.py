"""Traces of a real run: saved, drawn, printed, and compiled once."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import xarray as xr

from iclens import cli
from iclens.circuits import interventions
from iclens.lab.recipe import SweepConfig, load_recipe
from iclens.lab.store import create_run, open_run
from iclens.lab.sweep import run_sweep
from iclens.lab.trace import stretches, summary
from iclens.report.reading import Reading
from iclens.report.sections import circuits

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(tiny_run, tmp_path_factory):
    path = tmp_path_factory.mktemp("traced") / "tiny"
    shutil.copytree(tiny_run.path, path)
    return open_run(path)


def test_a_history_is_traced_saved_drawn_and_compiled_once(run, capsys, monkeypatch) -> None:
    forward, calls = interventions.forward, []
    monkeypatch.setattr(
        interventions, "forward", lambda *a, **k: (calls.append(1), forward(*a, **k))[1]
    )
    assert cli.dispatch(["trace", str(run.path), "--chains", "2", "--step", "7"]) == 0
    traced = len(calls)
    assert cli.dispatch(["trace", str(run.path), "--chains", "2", "--step", "all"]) == 0
    assert len(calls) == traced
    printed = capsys.readouterr().out
    assert "task recognition head: " in printed
    assert "circuit: " in printed
    with xr.open_dataset(run.path / "circuits" / "chains=2,seed=0,step=all.nc") as saved:
        trace = saved.load()
    assert trace.step.values.tolist() == run.cell(2).steps
    assert set(trace.edge_kl.dims) == {"step", "set", "edge"}
    assert trace.phase.values.tolist() == run.cell(2).curves.phase.values.tolist()
    assert np.all(trace.faithfulness >= 0.9 - 1e-6)
    assert np.all(trace.edge_kl > -1e-6)
    figures = run.path / "figures" / "chains=2,seed=0,step=all"
    assert {path.name for path in figures.iterdir()} == {
        f"{name}.{kind}"
        for name in ("circuit", "attention", "task_vectors", "edges")
        for kind in ("svg", "pdf", "csv")
    }
    found = summary(trace)
    assert [here["step"] for here in found["history"]] == run.cell(2).steps
    assert [here["phase"] for here in found["history"]] == trace.phase.values.tolist()
    with xr.open_dataset(run.path / "circuits" / "chains=2,seed=0,step=7.nc") as saved:
        alone = saved.load()
    np.testing.assert_allclose(alone.edge_kl.sel(step=7), trace.edge_kl.sel(step=7), atol=1e-7)


def test_stretches_of_steps_at_which_a_hypothesis_passes() -> None:
    holds = [[0, 1], [1, 1], [1, 1], [1, 0], [0, 1], [1, 1]]
    trace = xr.Dataset(
        {"criterion_holds": (("step", "criterion"), holds)},
        coords={"step": [0, 5, 9, 20, 30, 50], "criterion": ["head: a", "head: b"]},
    )
    assert stretches(trace, "head") == [(5, 9), (50, 50)]
    assert stretches(trace.isel(step=[0]), "head") == []
    assert stretches(trace, "foot") == []  # not tested, not passed


def test_a_model_of_attention_only_and_fresh_chains(tmp_path, capsys) -> None:
    tiny = load_recipe("tiny")
    recipe = replace(
        tiny,
        model=replace(tiny.model, attention_only=True),
        train=replace(tiny.train, steps=64, evaluations=1),
        sweep=SweepConfig(chains=("infinite",)),
    )
    run = create_run(tmp_path / "run", recipe)
    assert run_sweep(run) == {}
    assert cli.dispatch(["trace", str(run.path)]) == 0
    printed = capsys.readouterr().out
    assert "statistical induction head: " in printed
    assert "task recognition head" not in printed
    reading = Reading(open_run(run.path))
    assert "not tested: it needs MLPs" in circuits(reading)


def test_the_trace_as_json(run, capsys) -> None:
    assert cli.dispatch(["trace", str(run.path), "--chains", "256", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["chains"] == 256
    assert found["step"] == 600
    assert set(found["hypotheses"]) == {"statistical induction head", "task recognition head"}
    assert all(v["verdict"] in ("pass", "fail") for v in found["hypotheses"].values())
    assert set(found["circuit"]) <= set(run.recipe.model.edges)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--chains: expected one of 2, 16, 256, got none"),
        (["--chains", "3"], "--chains: expected one of 2, 16, 256, got '3'"),
        (["--chains", "2", "--seed", "9"], "no cell with chains = 2 and seed = 9"),
        (["--chains", "2", "--step", "5"], "expected a step with a checkpoint"),
        (["--chains", "2", "--step", "first"], "expected a step, 'last' or 'all', got 'first'"),
        (["--chains", "2", "--show", "64"], "show: expected sequences from 0 to 63, got [64]"),
        (["--chains", "2", "--epsilon", "2"], "epsilon: expected a number between 0 and 1"),
    ],
)
def test_bad_requests_are_one_message(run, arguments, message, capsys) -> None:
    assert cli.dispatch(["trace", str(run.path), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_cell_without_checkpoints_is_told(run, tmp_path, capsys) -> None:
    shutil.copytree(run.path, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "cells" / "chains=16,seed=0")
    assert cli.dispatch(["trace", str(tmp_path / "run"), "--chains", "16"]) == 2
    assert "is missing: it has no checkpoints" in capsys.readouterr().err
