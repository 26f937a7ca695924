"""Recipes, cells and runs: strict, atomic, resumable bit for bit, never destructive."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import jax
import numpy as np
import pytest
import tomlkit
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.stats import kstest

from iclens import cli, revision
from iclens.chains import ChainSet
from iclens.lab.cell import PURPOSES, RESULTS, Cell, run_cell
from iclens.lab.files import arrays_to_tree, read_arrays, tree_to_arrays, write_arrays, write_file
from iclens.lab.recipe import Recipe, SweepConfig, load_recipe, parse_recipe, presets
from iclens.lab.store import create_run, hold, open_run, record_provenance
from iclens.lab.sweep import run_sweep
from iclens.predictors import memorising

TINY = load_recipe("tiny")
SHORT = dataclasses.replace(
    TINY,
    train=dataclasses.replace(TINY.train, steps=200, evaluations=8),
    evaluation=dataclasses.replace(TINY.evaluation, sequences=16),
    sweep=SweepConfig(chains=(4,)),
)


# --- recipes


@pytest.mark.parametrize("name", presets())
def test_presets_round_trip_through_toml(name) -> None:
    recipe = load_recipe(name)
    text = recipe.to_toml()
    assert parse_recipe(text).to_toml() == text
    assert parse_recipe(text).difference(recipe) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[train]\nstepz = 3", "r: unknown key 'train.stepz'; did you mean 'train.steps'?"),
        ("[tran]\nsteps = 3", "r: unknown key 'tran'; did you mean 'train'?"),
        ("[train]\nsteps = 48.7", "r: train.steps: expected a whole number, got 48.7"),
        ("[train]\nsteps = true", "r: train.steps: expected a whole number, got True"),
        ("[train]\nlearning_rate = '1e-4'", "r: train.learning_rate: expected a number, got '1e"),
        ("[model]\nnorm = 'rmss'", "expected 'rms' or 'layer' or 'none', got 'rmss'; did you"),
        ("[model]\nactivation = 'gelo'", "'relu' or 'gelu', got 'gelo'; did you mean 'gelu'?"),
        ("[model]\nattention_only = 1", "model.attention_only: expected true or false, got 1"),
        ("[sweep]\nchains = [2, 'infinit']", "or 'infinite', got 'infinit'; did you mean 'infin"),
        ("[sweep]\nchains = []", "sweep.chains: expected at least one value, got none"),
        ("[sweep]\nchains = [0]", "sweep.chains: expected 1 to 2^32 - 1, got 0"),
        ("[sweep]\nseeds = [1, 1]", "sweep.seeds: expected no value twice"),
        ("[sweep]\nchains = 3", "sweep.chains: expected a list, got 3"),
        ("task = 3", "r: task: expected a table of keys, got 3"),
        ("[task]\nconcentration = nan", "task.concentration: expected a positive number, got nan"),
        ("[task", "r: not valid TOML"),
    ],
)
def test_a_bad_recipe_is_one_clear_error(text, message) -> None:
    with pytest.raises(ValueError, match=r"^r: ") as error:
        parse_recipe(text, where="r")
    assert message in str(error.value)


TABLES = st.fixed_dictionaries(
    {
        "task": st.fixed_dictionaries(
            {
                "states": st.integers(2, 20),
                "context": st.integers(2, 10**6),
                "weights": st.sampled_from(["equal", "dirichlet"]),
                "concentration": st.floats(0, exclude_min=True, allow_infinity=False),
            }
        ),
        "model": st.fixed_dictionaries(
            {
                "width": st.sampled_from([8, 16, 64]),
                "heads": st.sampled_from([1, 2, 4]),
                "hidden": st.integers(1, 99),
                "activation": st.sampled_from(["relu", "gelu"]),
                "attention_only": st.booleans(),
                "positions": st.sampled_from(["relative", "absolute", "rotary", "none"]),
                "norm": st.sampled_from(["rms", "layer", "none"]),
                "layers": st.integers(1, 4),
            }
        ),
        "prior": st.fixed_dictionaries(
            {
                "kind": st.sampled_from(["dirichlet", "cyclic", "doubly-stochastic"]),
                "successors": st.integers(2, 99),
                "drift": st.floats(0, exclude_min=True, allow_infinity=False),
            }
        ),
        "evaluation": st.fixed_dictionaries({"sequences": st.integers(2, 10**6)}),
        "cluster": st.fixed_dictionaries(
            {
                "kind": st.sampled_from(["local", "slurm"]),
                "queue": st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=20),
                "memory": st.sampled_from(["4 GiB", "512MB", "1.5 TB"]),
                "directives": st.lists(
                    st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=20), max_size=3
                ),
            }
        ),
        "train": st.fixed_dictionaries(
            {
                "steps": st.integers(1, 10**9),
                "optimizer": st.sampled_from(["adam", "adamw", "sgd"]),
                "learning_rate": st.floats(0, exclude_min=True, allow_infinity=False),
                "beta1": st.floats(0, 1, exclude_max=True),
            }
        ),
        "sweep": st.fixed_dictionaries(
            {
                "chains": st.lists(
                    st.integers(1, 10**9) | st.just("infinite"), min_size=1, max_size=4, unique=True
                ),
                "seeds": st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=3, unique=True),
                "refine": st.booleans(),
                "ratio": st.floats(1, 100, exclude_min=True),
            }
        ),
    }
)


@settings(deadline=None)  # a busy machine is slow
@given(TABLES)
def test_any_recipe_round_trips_through_toml(table) -> None:
    recipe = parse_recipe(tomlkit.dumps(table))
    text = recipe.to_toml()
    assert parse_recipe(text).to_toml() == text
    written = tomllib.loads(text)
    for section, keys in table.items():
        assert keys == {key: written[section][key] for key in keys}


KEYS = [(section, key) for section, table in tomllib.loads(TINY.to_toml()).items() for key in table]


@settings(deadline=None)
@given(st.sampled_from(KEYS), st.sampled_from(["misspelt", -1, 0.5, "nonsense", [[]], {"a": 1}]))
def test_any_single_damage_is_one_error_that_names_the_key(place, damage) -> None:
    section, key = place
    table = tomllib.loads(TINY.to_toml())
    if damage == "misspelt":
        table[section][key + "s"] = table[section].pop(key)
    else:
        assume(not (damage == 0.5 and isinstance(table[section][key], float)))
        assume(not (damage == "nonsense" and key in ("queue", "account")))  # any text will do
        table[section][key] = damage
    with pytest.raises(ValueError, match=r"^r: ") as error:
        parse_recipe(tomlkit.dumps(table), where="r")
    message = str(error.value)
    assert f"{section}.{key}" in message
    assert message.count(", got ") + message.count("unknown key") == 1


def test_an_unknown_preset_names_the_nearest() -> None:
    with pytest.raises(ValueError, match="unknown preset 'quik'; did you mean 'quick'"):
        load_recipe("quik")
    with pytest.raises(ValueError, match=r"'no\.toml' cannot be read"):
        load_recipe("no.toml")


# --- files


def test_a_transposed_array_is_saved_as_it_reads(tmp_path) -> None:
    array = np.arange(6.0).reshape(2, 3).T
    write_arrays(tmp_path / "a", {"x": array, "zero": np.float32(2)})
    loaded = read_arrays(tmp_path / "a")
    np.testing.assert_array_equal(loaded["x"], array)
    assert loaded["zero"].shape == ()


def test_a_write_that_fails_leaves_the_old_file_and_no_rubbish(tmp_path, monkeypatch) -> None:
    write_file(tmp_path / "a", b"old")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_file(tmp_path / "a", b"new")
    assert (tmp_path / "a").read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a"]


def test_arrays_of_another_shape_are_named() -> None:
    tree = {"model": [np.zeros(3), np.zeros((2, 2))]}
    arrays = tree_to_arrays(tree)
    assert set(arrays) == {"model.0", "model.1"}
    arrays["model.1"] = np.zeros(4)
    with pytest.raises(ValueError, match=r"model\.1: expected shape \(2, 2\) .* got shape \(4,\)"):
        arrays_to_tree(tree, arrays)


# --- cells


def results(cell: Cell) -> dict[str, bytes]:
    return {name: (cell.path / name).read_bytes() for name in (*RESULTS, "done.json")}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Cell:
    cell = Cell(tmp_path_factory.mktemp("cells"), SHORT, 4, 0)
    run_cell(cell)
    return dataclasses.replace(cell)


@pytest.mark.parametrize(
    "after",
    [1, pytest.param(4, marks=pytest.mark.slow), pytest.param(9, marks=pytest.mark.slow)],
)
def test_a_cell_stopped_after_any_piece_ends_with_the_same_bytes(
    undisturbed, tmp_path, monkeypatch, after
) -> None:
    cell = Cell(tmp_path, SHORT, 4, 0)
    from iclens.lab import cell as module

    written = []

    def stop(path: Path, arrays) -> None:
        if len(written) == 2 * after - 1:  # between a piece and its state
            raise KeyboardInterrupt
        written.append(path)
        write_arrays(path, arrays)

    with monkeypatch.context() as patch:
        patch.setattr(module, "write_arrays", stop)
        with pytest.raises(KeyboardInterrupt):
            run_cell(cell)
    cell = dataclasses.replace(cell)
    assert cell.status == "unfinished"
    assert cell.curves is not None
    assert cell.curves.attrs["outcome"] in ("unfinished", "finished")
    run_cell(cell)
    cell = dataclasses.replace(cell)
    assert cell.status == "done"
    assert results(cell) == results(undisturbed)


def test_a_finished_cell_gives_its_models_back(undisturbed) -> None:
    assert undisturbed.steps == list(SHORT.train.evaluation_steps)
    start = undisturbed.new_model()
    for a, b in zip(jax.tree.leaves(undisturbed.model(0)), jax.tree.leaves(start), strict=True):
        np.testing.assert_array_equal(a, b)
    assert not np.array_equal(undisturbed.model().embedding, start.embedding)
    with pytest.raises(ValueError, match=r"one of 0, 1, .*; got 3"):
        undisturbed.model(3)


def test_curves_have_units_and_every_reference(undisturbed) -> None:
    curves = undisturbed.curves
    assert curves.attrs["outcome"] == "finished"
    assert list(curves.predictor.values) == ["1-Gen", "2-Gen", "1-Mem", "2-Mem"]
    assert curves.distance.attrs["units"] == "nats"
    assert curves.step.attrs["units"] == "optimizer steps"
    np.testing.assert_allclose(curves.composition.sum("predictor"), 1, atol=1e-4)
    assert float(curves.loss[-1, 0]) < float(curves.loss[0, 0])
    assert curves.induction.dims == ("step", "layer", "head")
    assert np.all((curves.induction >= 0) & (curves.induction <= 1))


@pytest.mark.slow
def test_infinitely_many_chains_have_no_memorising_references(tmp_path) -> None:
    cell = Cell(tmp_path, SHORT, "infinite", 0)
    run_cell(cell)
    curves = dataclasses.replace(cell).curves
    assert np.isnan(curves.distance.sel(predictor="2-Mem")).all()
    assert np.isfinite(curves.distance.sel(predictor="2-Gen")).all()
    assert curves.attrs["chains"] == "infinite"


def test_a_diverged_cell_is_done_and_says_so(tmp_path) -> None:
    train = dataclasses.replace(SHORT.train, optimizer="sgd", learning_rate=1e30)
    cell = Cell(tmp_path, dataclasses.replace(SHORT, train=train), 4, 0)
    run_cell(cell)
    cell = dataclasses.replace(cell)
    assert cell.status == "done"
    assert cell.curves.attrs["outcome"].startswith("diverged at step ")
    assert str(cell.curves.phase[-1].values) == "none"


def test_no_two_purposes_cells_or_seeds_share_a_key() -> None:
    keys = [
        tuple(jax.random.key_data(Cell(Path(), SHORT, chains, seed).key(purpose)).tolist())
        for chains in (1, 2, "infinite")
        for seed in (0, 1)
        for purpose in PURPOSES
    ]
    assert len(set(keys)) == len(keys)


def test_weights_are_drawn_uniformly_from_the_simplex_and_nothing_else_changes() -> None:
    task = dataclasses.replace(SHORT.task, weights="dirichlet")
    weighted = dataclasses.replace(SHORT, task=task)
    cells = [Cell(Path(), weighted, 3, seed) for seed in range(40)]
    weights = np.array([cell.chain_set.weights for cell in cells])
    # Of the flat law of three each weight has the distribution function 1 - (1 - w)^2.
    for column in (1 - (1 - weights) ** 2).T:
        assert kstest(column, "uniform").pvalue > 1e-3
    plain = Cell(Path(), SHORT, 3, 0)
    np.testing.assert_allclose(plain.chain_set.transition, cells[0].chain_set.transition)
    np.testing.assert_array_equal(plain.chain_set.weights, np.full(3, 1 / 3))
    index = cells[0].chain_set.sample(jax.random.key(0), 10_000, 1)[1]
    np.testing.assert_allclose(np.bincount(index, minlength=3) / 10_000, weights[0], atol=0.02)


def test_weights_reach_the_evaluation(tmp_path) -> None:
    task = dataclasses.replace(SHORT.task, weights="dirichlet")
    cell = Cell(tmp_path, dataclasses.replace(SHORT, task=task), 4, 0)
    on = cell.evaluation_sets["id"]
    two_mem = np.asarray(on.references[3])
    expected = memorising(cell.chain_set, points=2)(on.states)[:, : two_mem.shape[1]]
    np.testing.assert_allclose(two_mem, expected, atol=1e-5)
    equal = memorising(ChainSet(cell.chain_set.transition), points=2)(on.states)
    assert not np.allclose(two_mem, equal[:, : two_mem.shape[1]], atol=1e-2)


@pytest.mark.parametrize("kind", ["truncated", "flipped"])
@pytest.mark.parametrize("name", ["pieces/0.safetensors", "state.safetensors"])
def test_a_damaged_file_of_an_unfinished_cell_is_found_too(
    undisturbed, tmp_path, monkeypatch, name, kind
) -> None:
    run = create_run(tmp_path / "run", SHORT)
    monkeypatch.setattr(
        "iclens.lab.cell.checksum", lambda path: 1 / 0
    )  # the last thing before done
    assert len(run_sweep(run)) == 1
    monkeypatch.undo()
    cell = run.cells[0]
    assert cell.status == "failed"
    path = cell.path / name
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content if kind == "flipped" else content[:-7])
    assert open_run(run.path).cells[0].status == "damaged"
    events = []
    assert run_sweep(run, on_event=heard(events)) == {}
    assert events == ["set aside", "start", "done"]
    assert results(cell) == results(undisturbed)


# --- runs

LOUD = ("skip", "start", "wait", "set aside", "done", "fail")


def heard(events: list[str]):
    """A listener that keeps what happened, but for steps and labels."""
    return lambda event: events.append(event.kind) if event.kind in LOUD else None


@pytest.mark.parametrize("kind", ["truncated", "flipped", "missing"])
def test_a_damaged_cell_is_set_aside_and_computed_again(tmp_path, kind) -> None:
    run = create_run(tmp_path / "run", SHORT)
    run_sweep(run)
    cell = run.cells[0]
    before = results(cell)
    path = cell.path / "checkpoints.safetensors"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.unlink()
    if kind != "missing":
        path.write_bytes(content if kind == "flipped" else content[:-7])
    damaged = open_run(run.path).cells[0]
    assert damaged.status == "damaged"
    assert "checkpoints.safetensors" in damaged.error
    events = []
    assert run_sweep(run, on_event=heard(events)) == {}
    assert events == ["set aside", "start", "done"]
    assert results(cell) == before
    assert (run.path / "cells" / "chains=4,seed=0.damaged-1" / "done.json").exists()


def test_done_cells_are_skipped_and_new_ones_added(tmp_path) -> None:
    create_run(tmp_path / "run", SHORT)
    run_sweep(open_run(tmp_path / "run"))
    more = dataclasses.replace(SHORT, sweep=SweepConfig(chains=(2,), seeds=(0,)))
    run = create_run(tmp_path / "run", more)
    events = []
    run_sweep(
        run,
        on_event=lambda event: (
            events.append((event.cell, event.kind)) if event.kind in LOUD else None
        ),
    )
    names = ["chains=4,seed=0", "chains=2,seed=0"]
    assert events == [(names[0], "skip"), (names[1], "start"), (names[1], "done")]


def test_another_recipe_or_another_folder_is_refused(tmp_path) -> None:
    create_run(tmp_path / "run", SHORT)
    with pytest.raises(ValueError, match="200 against 600"):
        create_run(tmp_path / "run", TINY)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    with pytest.raises(ValueError, match="is not a run"):
        create_run(tmp_path / "mine", SHORT)
    with pytest.raises(ValueError, match="no run at"):
        open_run(tmp_path / "mine")


def test_a_failing_cell_is_reported_and_the_others_finish(tmp_path, monkeypatch) -> None:
    from iclens.lab import work

    def fail_on_two(cell: Cell, **callbacks) -> None:
        if cell.chains == 2:
            raise RuntimeError("planted")
        run_cell(cell, **callbacks)

    monkeypatch.setattr(work, "run_cell", fail_on_two)
    run = create_run(tmp_path / "run", dataclasses.replace(SHORT, sweep=SweepConfig(chains=(2, 4))))
    failed = run_sweep(run)
    assert list(failed) == ["chains=2,seed=0"]
    assert "planted" in failed["chains=2,seed=0"]
    assert [cell.status for cell in run.cells] == ["failed", "done"]
    assert "planted" in run.cells[0].error


def test_a_full_disk_stops_no_other_cell_and_is_told(tmp_path, monkeypatch) -> None:
    from iclens.lab import cell, work

    def full(path, content) -> None:
        if "chains=2" in str(path):
            raise OSError(28, "No space left on device")
        write_file(path, content)

    monkeypatch.setattr("iclens.lab.files.write_file", full)
    monkeypatch.setattr(cell, "write_file", full)
    monkeypatch.setattr(work, "write_file", full)
    run = create_run(tmp_path / "run", dataclasses.replace(SHORT, sweep=SweepConfig(chains=(2, 4))))
    failed = run_sweep(run)
    assert "No space left on device" in failed["chains=2,seed=0"]
    assert [cell.status for cell in run.cells] == ["unfinished", "done"]


def test_a_recipe_that_was_edited_after_training_is_refused(tmp_path) -> None:
    run = create_run(tmp_path / "run", SHORT)
    record_provenance(run, {})
    path = run.path / "recipe.toml"
    text = path.read_text()
    path.write_text(text.replace("steps = 200", "steps = 300"))
    with pytest.raises(ValueError, match=r"changed after .* train.steps: 200 against 300"):
        open_run(run.path)
    path.write_text("# mine\n" + text)
    create_run(run.path, SHORT)
    assert path.read_text().startswith("# mine\n")


@pytest.mark.parametrize("content", ["", "[]", '{"invocations": 3}', '{"invocations": ["a"]}'])
def test_a_damaged_provenance_is_named(tmp_path, content) -> None:
    run = create_run(tmp_path / "run", SHORT)
    (run.path / "provenance.json").write_text(content)
    with pytest.raises(ValueError, match=r"provenance\.json is damaged"):
        open_run(run.path)


def test_the_revision_is_that_of_this_code_or_none(tmp_path, monkeypatch) -> None:
    found = revision.revision()
    assert found is None or len(found.removesuffix("-dirty")) == 40
    monkeypatch.setattr(revision, "__file__", str(tmp_path / "revision.py"))
    assert revision.revision() is None
    monkeypatch.setenv("PATH", str(tmp_path))  # no git
    assert revision.revision() is None


def test_what_a_killed_process_leaves_is_taken_up_and_removed(undisturbed, tmp_path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".recipe.toml.123").write_text("[tas")
    run = create_run(tmp_path / "run", SHORT)
    cell = run.cells[0]
    shutil.copytree(undisturbed.path, cell.path)
    (cell.path / ".state.safetensors.123").write_bytes(b"half")
    (cell.path / "pieces").mkdir()
    assert run_sweep(run) == {}
    assert {path.name for path in cell.path.iterdir()} == {*RESULTS, "done.json"}


def test_a_cell_is_damaged_if_its_marker_is(undisturbed, tmp_path) -> None:
    shutil.copytree(undisturbed.path, tmp_path / undisturbed.name)
    cell = dataclasses.replace(undisturbed, folder=tmp_path)
    (cell.path / "done.json").write_text("null")
    assert cell.status == "damaged"
    with pytest.raises(ValueError, match="is damaged: it has no checkpoints"):
        cell.model()


def test_a_run_is_held_by_one_process_at_a_time(tmp_path) -> None:
    run = create_run(tmp_path / "run", SHORT)
    more = dataclasses.replace(SHORT, sweep=SweepConfig(chains=(7,)))
    with hold(run):
        with pytest.raises(ValueError, match="another process is working"):
            run_sweep(run)
        with pytest.raises(ValueError, match="another process is working"):
            create_run(run.path, more)
    assert open_run(run.path).recipe.sweep.chains == (4,)


def test_provenance_names_versions_and_random_numbers(tiny_run) -> None:
    invocation = tiny_run.provenance["invocations"][0]
    assert invocation["versions"]["jax"] == jax.__version__
    assert "fry" in invocation["random_numbers"]


# --- the command line


@pytest.mark.parametrize(
    ("sent", "renames"),
    [
        ("SIGKILL", 3),
        ("SIGKILL", 8),
        ("SIGINT", 5),
    ],
)
@pytest.mark.slow
def test_kill_nine_and_again_ends_with_the_same_bytes(undisturbed, tmp_path, sent, renames) -> None:
    """A signal between the writing of a file and its renaming, of a state or of a piece."""
    (tmp_path / "r.toml").write_text(SHORT.to_toml())
    dies = (
        "import os, signal, sys\n"
        "from iclens import cli\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # ignored in the background
        "replace, left = os.replace, int(sys.argv.pop())\n"
        "def replace_or_die(*paths):\n"
        "    global left\n"
        "    left -= 'cells' in str(paths[1])\n"
        f"    os.kill(os.getpid(), signal.{sent}) if left < 0 else None\n"
        "    replace(*paths)\n"
        "os.replace = replace_or_die\n"
        "cli.main()\n"
    )
    command = ["run", "r.toml", "--out", "run", "--workers", "0"]
    killed = subprocess.run(
        [sys.executable, "-c", dies, *command, str(renames)], cwd=tmp_path, capture_output=True
    )
    if sent == "SIGINT":
        assert killed.returncode == 130
        assert b"To go on: iclens run run/recipe.toml --out run" in killed.stderr
        assert b"Traceback" not in killed.stderr
    else:
        assert killed.returncode == -signal.SIGKILL, killed.stderr
    cell = open_run(tmp_path / "run").cells[0]
    assert cell.status == "unfinished"
    assert cell.steps == list(SHORT.train.evaluation_steps)[: (renames + 1) // 2]
    command = ["run", str(tmp_path / "r.toml"), "--out", str(tmp_path / "run"), "--workers", "0"]
    assert cli.dispatch(command) == 0
    assert results(cell) == results(undisturbed)


def test_phases_as_json(tiny_run, capsys) -> None:
    assert cli.dispatch(["phases", str(tiny_run.path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [cell["chains"] for cell in found["cells"]] == [2, 16, 256]
    assert found["cells"][0]["phases"][-1] == "M2"
    assert set(found["thresholds"]) == {"K1*", "K2*"}


def test_status_tells_what_is_missing(tiny_run, tmp_path, capsys) -> None:
    shutil.copytree(tiny_run.path, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "cells" / "chains=16,seed=0")
    assert cli.dispatch(["status", str(tmp_path / "run")]) == 0
    out = capsys.readouterr().out
    assert "chains=16,seed=0             missing" in out
    assert "to go on: iclens run" in out


@pytest.mark.slow
def test_the_plan_names_cells_steps_time_and_memory(capsys) -> None:
    assert cli.dispatch(["run", "tiny", "--plan", "--sweep.chains", "2", "4"]) == 0
    out = capsys.readouterr().out
    assert "cells   2" in out
    assert "steps   1200" in out
    assert "MiB" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rum"], "unknown command 'rum'; did you mean 'run'?"),
        (["run", "quik"], "did you mean 'quick'?"),
        (["phases", "nowhere"], "no run at 'nowhere'"),
        (["run", "tiny", "--model.heads", "3"], "expected a divisor of model.width"),
    ],
)
def test_what_a_user_can_mend_is_one_message_and_code_two(arguments, message, capsys) -> None:
    try:
        code = cli.dispatch(arguments)
    except SystemExit as exit:
        code = exit.code
    assert code == 2
    captured = capsys.readouterr()
    assert message in captured.err + captured.out
    assert "Traceback" not in captured.err


def test_help_is_quick_and_imports_nothing_heavy() -> None:
    code = (
        "import sys; from iclens import cli; cli.dispatch(['--help']); "
        "sys.exit(any(m in sys.modules for m in ('jax', 'tyro', 'xarray', 'plotly')))"
    )
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL).returncode == 0


def test_a_default_recipe_is_valid() -> None:
    assert parse_recipe("").difference(Recipe()) == []
