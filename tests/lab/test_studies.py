"""Studies of the theory, really run at a small size, through the command line."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import xarray as xr

from iclens import cli
from iclens.lab import reduced, studies
from iclens.lab.files import hold_lock, read_dataset, save_result
from iclens.lab.fits import fit_dataset
from iclens.lab.recipe import load_recipe
from iclens.lab.store import create_run, open_run
from iclens.theory.fits import fit_switching


@pytest.mark.slow
def test_coefficients_as_json(capsys) -> None:
    arguments = ["induction", "--states", "3", "--context", "64", "--sequences", "4096", "--json"]
    assert cli.dispatch(["theory", *arguments]) == 0
    found = json.loads(capsys.readouterr().out)
    for name in ("A_beta", "A_J", "c_beta", "c_delta", "J"):
        assert found[name].keys() == {"value", "error"}
    assert found["A_J"]["value"] == pytest.approx(0.0981, abs=0.002)
    assert abs(found["J"]["value"] - found["formula"]["J"]) < 0.3 * found["formula"]["J"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["induction", "--concentration", "-1"], "expected a positive number"),
        (["induction", "--context", "1"], "context: expected at least 2, got 1"),
        (["induction", "--rho", "2"], "rho: expected a number from 0 to 1"),
        (["inductoin"], "unknown command 'inductoin'; did you mean 'induction'? Expected one of"),
        (["fits", "nowhere"], "no run at 'nowhere'"),
        (["context", "--recipe", "tiny"], "sweep.chains = ['infinite']"),
        (["memory", "--chains", "0"], "chains: expected distinct values of at least 2"),
    ],
)
def test_bad_input_is_one_message(arguments, message, tmp_path, capsys) -> None:
    out = ["--out", str(tmp_path)] if arguments[0] in ("context", "memory") else []
    assert cli.dispatch(["theory", *arguments, *out]) == 2
    told = capsys.readouterr().err
    assert message in told
    assert "Traceback" not in told


@pytest.mark.slow
def test_a_run_that_cannot_be_fitted_says_why(tiny_run, tmp_path, capsys) -> None:
    copy = shutil.copytree(tiny_run.path, tmp_path / "tiny")  # what is found is saved in the run
    assert cli.dispatch(["theory", "fits", str(copy), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found.keys() == {"K1*", "K2* (end state)", "switching"}
    assert "refused" in found["switching"]


def test_an_empty_run_is_told(tmp_path, capsys) -> None:
    create_run(tmp_path / "empty", load_recipe("tiny"))
    assert cli.dispatch(["theory", "fits", str(tmp_path / "empty")]) == 2
    assert "has no finished cell" in capsys.readouterr().err


def small(name: str, **sweep):
    recipe = load_recipe(name)
    return replace(
        recipe,
        task=replace(recipe.task, states=3, context=12),
        model=replace(recipe.model, width=8, hidden=16),
        train=replace(recipe.train, steps=120, batch=16, evaluations=12),
        evaluation=replace(recipe.evaluation, sequences=64),
        sweep=replace(recipe.sweep, **sweep),
    )


@pytest.mark.slow
def test_a_race_is_run_and_read(tmp_path) -> None:
    recipe = small("race", chains=(2, 4, 64), seeds=(0,))
    assert studies.run_study(tmp_path, studies.race_recipes(recipe)) == {}
    found = studies.race_result(tmp_path)
    assert found.chains.values.tolist() == [2, 4, 64]
    assert found.recognition_curve.dims == ("run", "step")
    assert all(f"K1* {name}" in found.attrs for name in ("observed", "equal times", "loss at tau"))
    # Of a circuit alone, parameters that no edge leads to stay as they were.
    cell = open_run(tmp_path / "induction").cell("infinite")
    start, end = cell.model(0), cell.model(120)
    np.testing.assert_array_equal(start.mlps[0].weight_in, end.mlps[0].weight_in)
    assert not np.array_equal(start.mlps[1].weight_in, end.mlps[1].weight_in)
    path = save_result(tmp_path, "race", found)
    xr.testing.assert_identical(read_dataset(path), found)
    (tmp_path / "recognition" / "cells" / "chains=4,seed=0" / "done.json").unlink()
    with pytest.raises(ValueError, match=r"the race lacks recognition/chains=4,seed=0: it is"):
        studies.race_result(tmp_path)


@pytest.mark.slow
def test_times_over_contexts_are_run_and_fitted(tmp_path) -> None:
    recipe = small("context", seeds=(0,))
    recipe = replace(
        recipe,
        model=replace(recipe.model, width=16, hidden=64),
        train=replace(recipe.train, steps=3000, batch=32, evaluations=60),
    )
    contexts = (8, 16, 24, 32)
    assert studies.run_study(tmp_path, studies.context_recipes(recipe, contexts)) == {}
    found = studies.context_result(tmp_path)
    assert set(found.context.values.tolist()) <= set(contexts)
    assert found.weight.sum() == pytest.approx(1)
    assert np.all(found.tau > 0)


@pytest.mark.slow
def test_the_memory_model_memorises_few_chains_and_counts_many(tmp_path) -> None:
    """THEORY 2 at C = 5, N = 64, F = 64, a quarter of its steps: the order is the same."""
    study = reduced.MemoryStudy(chains=(8, 512), width=(1, 2, 16), steps=4000)
    found = reduced.memory_result(study)
    memorised = (found.to_2_mem < found.to_2_gen).sel(hidden=64)
    # K2* grows with d: below 8 at d = 1, above at d = 2 and 16.
    assert memorised.sel(chains=8).values.tolist() == [False, True, True]
    assert found.K2.sel(hidden=64, end=1).values.tolist() == [8, 512, 512]
    assert not memorised.sel(chains=512).values.any()
    assert float(found.to_2_mem.sel(chains=8, width=16, hidden=64)) < 0.04
    assert float(found.to_2_gen.sel(chains=512, width=16, hidden=64)) < 0.08
    assert found.readout.sel(chains=8, width=16) > found.readout.sel(chains=512, width=16)


@pytest.mark.slow
def test_fits_of_a_run_are_saved_with_open_ends(tmp_path) -> None:
    run = create_run(tmp_path / "run", load_recipe("tiny"))
    chains = np.repeat([8.0, 12, 16, 20], 2)
    fit = fit_switching(chains, 900 * chains / 8, 1000 * chains / 8, np.tile([0, 1], 4))
    table = fit_dataset(fit)
    path = save_result(run.path, "switching", table)
    loaded = read_dataset(path)
    low, high = loaded.fit.sel(parameter="K2*", part=["profile_low", "profile_high"]).values
    assert low >= 20 * (1 - 1e-6)
    assert high > 20


SMALL = reduced.MemoryStudy(
    states=3, context=10, chains=(2, 4), width=(2,), hidden=(4,), steps=20, batch=8
)


@pytest.mark.slow
def test_a_memory_grid_goes_on_where_it_stopped_and_can_grow() -> None:
    whole = reduced.memory_result(SMALL)
    kept: list[xr.Dataset] = []

    def stop(result: xr.Dataset, name: str) -> None:
        kept.append(result.copy(deep=True))
        if len(kept) == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        reduced.memory_result(SMALL, on_model=stop)
    assert np.isfinite(kept[-1].loss).sum() == 1
    trained: list[str] = []
    again = reduced.memory_result(SMALL, kept[-1], lambda result, name: trained.append(name))
    assert trained == ["K = 4, d = 2, F = 4"]
    xr.testing.assert_identical(again, whole)
    wider = replace(SMALL, width=(1,), chains=(4,))
    more = reduced.memory_result(wider, whole, lambda result, name: trained.append(name))
    assert trained[1:] == ["K = 4, d = 1, F = 4"]
    assert more.width.values.tolist() == [1, 2]
    xr.testing.assert_equal(more.loss.sel(width=2), whole.loss.sel(width=2))
    assert np.isnan(more.loss.sel(width=1, chains=2)).all()
    with pytest.raises(ValueError, match="is of another study: steps 20 there, 30 here"):
        reduced.memory_result(replace(SMALL, steps=30), whole)


@pytest.mark.slow
def test_task_vectors_of_a_run_are_measured_beside(tiny_run, tmp_path, capsys) -> None:
    reduced.run_memory_study(SMALL, tmp_path)
    with hold_lock(tmp_path / ".memory.lock"), pytest.raises(ValueError, match="another process"):
        reduced.run_memory_study(SMALL, tmp_path)
    sizes = ["--states", "3", "--context", "10", "--steps", "20", "--batch", "8"]
    grid = ["--chains", "2", "4", "--width", "2", "--hidden", "4"]
    arguments = [*sizes, *grid, "--out", str(tmp_path), "--beside", str(tiny_run.path)]
    assert cli.dispatch(["theory", "memory", *arguments]) == 0
    assert "is done" not in capsys.readouterr().err  # nothing is trained again
    found = read_dataset(tmp_path / "geometry.nc")
    finite = [cell.chains for cell in tiny_run.cells if cell.chains not in (1, "infinite")]
    assert found.cell_chains.values.tolist() == finite
    assert (found.cell_dimension >= 1 - 1e-6).all()
    assert ((found.cell_readout >= 0) & (found.cell_readout <= 1)).all()
    assert (tmp_path / "figures" / "geometry.svg").is_file()
