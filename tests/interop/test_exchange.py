"""The commands `export` and `import`, and what becomes of a run with an imported model."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from iclens import cli
from iclens.circuits.interventions import contrast, edge_effects
from iclens.interop.checkpoints import read_checkpoint
from iclens.interop.export import export_model
from iclens.interop.files import load_model
from iclens.interop.imports import import_checkpoint
from iclens.lab.cell import evaluate
from iclens.lab.files import checksum, tree_to_arrays
from iclens.lab.store import open_run
from iclens.transformer import Transformer, TransformerConfig

CIRCUIT = TransformerConfig(width=4, layers=1, circuit=("embed->att1.0.v", "att1.0->out"))


def call(*arguments: object) -> int:
    return cli.dispatch([str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def exported(tiny_run, tmp_path_factory) -> Path:
    """The last model of K = 2 of the tiny run, as a folder for TransformerLens."""
    folder = tmp_path_factory.mktemp("exported") / "lens"
    assert (
        call("export", tiny_run.path, "--chains", 2, "--to", "transformer-lens", "--out", folder)
        == 0
    )
    return folder


@pytest.fixture(scope="module")
def imported(exported: Path, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("imported") / "back"
    assert call("import", exported, "--out", path, "--chains", exported / "chains.npz") == 0
    return path


def test_export_writes_the_checkpoint_that_is_asked_for(tiny_run, tmp_path, capsys) -> None:
    cell = tiny_run.cell(16)
    step = cell.steps[3]
    asked = ["export", tiny_run.path, "--chains", 16, "--step", step]
    assert call(*asked, "--to", "safetensors", "--out", tmp_path / "a" / "model.safetensors") == 0
    printed = capsys.readouterr().out
    assert f"wrote   {tmp_path / 'a' / 'model.safetensors'}" in printed
    loaded = load_model(tmp_path / "a" / "model.safetensors")
    for name, array in tree_to_arrays(cell.model(step)).items():
        assert np.array_equal(array, tree_to_arrays(loaded)[name])
    assert call(*asked, "--to", "torch", "--out", tmp_path / "port") == 0
    assert {path.name for path in (tmp_path / "port").iterdir()} == {
        "model.py",
        "model.safetensors",
        "chains.npz",
    }
    port = (tmp_path / "port" / "model.py").read_text()
    assert "iclens" not in re.findall(r"^(?:from|import) (\w+)", port, re.M)
    assert "from model import load" in capsys.readouterr().out


def test_export_says_what_transformer_lens_lacks(tiny_run, tmp_path, capsys) -> None:
    folder = tmp_path / "lens"
    call("export", tiny_run.path, "--chains", 2, "--to", "transformer-lens", "--out", folder)
    printed = capsys.readouterr().out
    assert "TransformerLens has no learned bias per lag" in printed
    assert "load_bridge" in printed
    assert "--to torch" in printed
    assert {path.name for path in folder.iterdir()} == {
        "config.json",
        "model.safetensors",
        "chains.npz",
    }


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (["--chains", 3, "--to", "torch"], "--chains: expected one of 2, 16, 256, got '3'"),
        (["--to", "torch"], "--chains: expected one of 2, 16, 256, got none"),
        (["--chains", 2, "--to", "torch", "--step", "all"], "expected a step or 'last', got 'all'"),
        (["--chains", 2, "--to", "torch", "--step", 5], "expected a step with a checkpoint"),
        (["--chains", 2, "--to", "torch", "--seed", 5], "has no cell with chains = 2 and seed = 5"),
    ],
)
def test_what_there_is_not_is_not_exported(tiny_run, tmp_path, capsys, more, told) -> None:
    assert call("export", tiny_run.path, "--out", tmp_path / "out", *more) == 2
    assert told in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_what_other_tools_cannot_express_is_refused(tmp_path: Path) -> None:
    model = Transformer(CIRCUIT, 3, 6, key=jax.random.key(0))
    for target in ("transformer-lens", "torch"):
        with pytest.raises(ValueError, match=r"sub-circuit .* use --to safetensors"):
            export_model(model, target, tmp_path / "out")
    export_model(model, "safetensors", tmp_path / "model.safetensors")
    assert load_model(tmp_path / "model.safetensors").config == CIRCUIT


def test_nothing_is_written_over(tmp_path: Path) -> None:
    model = Transformer(TransformerConfig(width=4), 3, 6, key=jax.random.key(0))
    (tmp_path / "mine").mkdir()
    mine = tmp_path / "mine" / "model.py"
    mine.write_text("mine")
    for out in (tmp_path / "mine", mine):
        with pytest.raises(ValueError, match="exists: expected the name of a new file"):
            export_model(model, "safetensors", out)
        for target in ("torch", "transformer-lens"):
            with pytest.raises(ValueError, match="exists: expected the name of a new folder"):
                export_model(model, target, out)
    assert mine.read_text() == "mine"
    assert list((tmp_path / "mine").iterdir()) == [mine]
    (tmp_path / "empty").mkdir()
    export_model(model, "torch", tmp_path / "empty")


@pytest.mark.slow
def test_an_imported_model_is_measured_and_traced_as_its_original(tiny_run, imported: Path) -> None:
    cell, original = open_run(imported).cell(2), tiny_run.cell(2)
    assert np.array_equal(cell.chain_set.transition, original.chain_set.transition)
    there = original.curves.isel(step=-1)
    sets = original.evaluation_sets
    found = evaluate(cell.model(), sets["id"], sets["ood"])
    for name in ("loss", "distance", "induction"):
        np.testing.assert_allclose(found[name], there[name], atol=1e-5)
    assert cell.steps == [0]
    assert cell.curves.phase.values.tolist() == [there.phase.item()]
    assert np.isnan(cell.curves.train_loss).all()
    effects = []
    for each in (cell, original):
        on = contrast("resample", each.chain_set, sequences=8, context=16, key=jax.random.key(0))
        effects.append(edge_effects(each.model(), on).kl)
    np.testing.assert_allclose(effects[0], effects[1], atol=1e-6)
    assert np.max(effects[0]) > 1e-3


@pytest.mark.slow
def test_an_imported_run_says_where_it_is_from(exported: Path, imported: Path, capsys) -> None:
    run = open_run(imported)
    assert run.imported == {
        "file": str(exported / "model.safetensors"),
        "sha256": checksum(exported / "model.safetensors"),
    }
    assert call("status", imported) == 0
    printed = capsys.readouterr().out
    assert re.search(r"chains=2,seed=0 +imported +step 0 \w\d\n1 imported\n$", printed)
    page = (imported / "report.html").read_text()
    assert "1 model, imported from model.safetensors" in page
    assert ", trained elsewhere, predicts the next state" in page
    assert call("phases", imported, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["cells"][0]["outcome"] == "imported"
    assert found["thresholds"]["K2*"]["bracket"] is None


@pytest.mark.slow
def test_an_imported_model_is_not_trained(imported: Path, capsys) -> None:
    before = checksum(imported / "cells" / "chains=2,seed=0" / "done.json")
    recipe = imported / "recipe.toml"
    assert call("run", recipe, "--out", imported, "--sweep.chains", 1, "--workers", 0) == 2
    assert "was imported from" in capsys.readouterr().err
    assert call("cell", imported, 0) == 2
    assert "was imported from" in capsys.readouterr().err
    assert checksum(imported / "cells" / "chains=2,seed=0" / "done.json") == before


@pytest.mark.slow
def test_a_run_is_not_imported_into(exported: Path, imported: Path, tiny_run, capsys) -> None:
    assert call("import", exported, "--out", imported, "--chains", exported / "chains.npz") == 2
    assert "has a model already" in capsys.readouterr().err
    assert call("import", exported, "--out", tiny_run.path) == 2
    assert "has another recipe" in capsys.readouterr().err


@pytest.mark.slow
def test_an_import_that_was_interrupted_is_done_again(
    exported: Path, tmp_path, monkeypatch
) -> None:
    import iclens.interop.imports as module

    def stop(*arguments: object, **more: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, "finish", stop)
        with pytest.raises(KeyboardInterrupt):
            import_checkpoint(exported, tmp_path / "out")
    run = import_checkpoint(exported, tmp_path / "out")
    assert run.cell("infinite").status == "done"
    assert run.cell("infinite").chain_set is None


def test_chains_must_fit_the_model(exported: Path, tmp_path: Path, capsys) -> None:
    np.save(tmp_path / "four.npy", np.full((2, 4, 4), 0.25))
    asked = ["import", exported, "--out", tmp_path / "out", "--chains"]
    assert call(*asked, tmp_path / "four.npy") == 2
    assert "task.states: expected 4" in capsys.readouterr().err
    assert call(*asked, tmp_path / "none.npy") == 2
    assert "none.npy" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_flags_reach_the_checkpoint(exported: Path, tmp_path: Path, capsys) -> None:
    shutil.copy(exported / "model.safetensors", tmp_path)
    asked = ["import", tmp_path / "model.safetensors", "--out", tmp_path / "out"]
    for flag, value in (("norm", "rms"), ("activation", "relu"), ("eps", "1e-6")):
        assert call(*asked) == 2
        assert f"expected --{flag}" in capsys.readouterr().err
        asked += [f"--{flag}", value]
    assert call(*asked, "--positions", "none") == 2
    assert "--positions: the checkpoint says 'relative', got 'none'" in capsys.readouterr().err
    assert read_checkpoint(exported).config.positions == "relative"
