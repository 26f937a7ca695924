"""Models by name: each source, and what is said where a name leads nowhere."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest
import xarray as xr

from iclens.chains import ChainPrior
from iclens.cli import dispatch
from iclens.interop.files import save_model
from iclens.interop.sources import open_source, python_function
from iclens.lab.store import Run
from iclens.scoring import score, score_contexts

MODULE = """
import numpy as np

def uniform(states):
    return np.full((*states.shape, 3), -np.log(3))

def logits(states):
    return np.ones((*states.shape, 3))

def fails(states):
    return states["x"]

width = 3
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "mine_of_tests.py").write_text(MODULE)
    (tmp_path / "lacks_of_tests.py").write_text("import no_such_library")
    (tmp_path / "leaves_of_tests.py").write_text("raise SystemExit(3)")
    (tmp_path / "broken_of_tests.py").write_text("def f(:\n")
    yield tmp_path
    for name in [name for name in sys.modules if "_of_tests" in name]:
        del sys.modules[name]


def test_a_function_of_a_module_in_this_folder(here: Path) -> None:
    found = open_source("python:mine_of_tests:uniform")
    assert found.model(np.zeros((2, 5), int)).shape == (2, 5, 3)
    assert (found.states, found.context, found.chains) == (None, None, None)
    inside = here / "package_of_tests"
    inside.mkdir()
    (inside / "part.py").write_text("f = len")
    assert python_function("python:package_of_tests.part:f") is len


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("python:mine", "expected python:MODULE:FUNCTION"),
        ("python::f", "expected python:MODULE:FUNCTION"),
        ("python:mime_of_tests:f", "no module 'mime_of_tests' .*did you mean 'mine_of_tests'"),
        ("python:mine_of_tests:unifrm", "has no 'unifrm'; did you mean 'uniform'"),
        ("python:mine_of_tests.part:f", "cannot be imported: ModuleNotFoundError"),
        ("python:mine_of_tests:width", "expected a function .* got int"),
        ("python:lacks_of_tests:f", "ModuleNotFoundError: .*no_such_library.*line 1"),
        ("python:leaves_of_tests:f", "cannot be imported: SystemExit: 3"),
        ("python:broken_of_tests:f", "cannot be imported: SyntaxError"),
        ("python:..:f", "no module"),
        ("nowhere", "there is no such file or folder"),
        (".", "the folder has neither a recipe.toml nor a config.json"),
        ("mine_of_tests.py", "got another file"),
    ],
)
def test_names_that_lead_nowhere(here: Path, name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        open_source(name)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("python:mine_of_tests:uniform", "--states: how many states?"),
        ("python:mine_of_tests:uniform --chains 16", "a K needs the run that has it"),
        ("python:mine_of_tests:uniform --chains no.npz", "no.npz"),
        ("python:mine_of_tests:uniform --states 3 --seed 1", "--seed: .*there is no run"),
        ("python:mine_of_tests:uniform --states 3 --step 7", "--step: MODEL is no run"),
        ("python:mine_of_tests:uniform --states 1", "expected at least 2 states, got 1"),
        ("python:mine_of_tests:uniform --states 3 --concentration 0", "expected a positive number"),
        ("python:mine_of_tests:uniform --states 3 --tokens a b", "MODEL is no language model"),
        ("python:mine_of_tests:uniform --run no/run", "no run at 'no/run'"),
        ("python:mine_of_tests:uniform --states 3 --contexts 8 8", "expected different lengths"),
        ("python:mine_of_tests:uniform --states 3 --shuffles 7", "orders of 3 states, got 7"),
        ("python:mine_of_tests:uniform --states 3 --shuffles 0", "expected at least 1, got 0"),
        ("language --tokens a b", "torch and transformers.*the extra interop"),
        ("language", "give --tokens or --token-ids"),
    ],
)
def test_requests_that_cannot_be_met_are_one_message(
    here: Path, capsys: pytest.CaptureFixture[str], arguments: str, message: str
) -> None:
    (here / "language").mkdir()
    (here / "language" / "config.json").write_text("{}")
    assert dispatch(["score", *arguments.split()]) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert len(error.strip().splitlines()) == 1
    with pytest.raises(ValueError, match=message):
        raise ValueError(error)


def told(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict:
    assert dispatch(["score", *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.slow
@pytest.mark.parametrize(("function", "message"), [("logits", "if these are"), ("fails", "IndexE")])
def test_a_model_that_fails_is_one_message(
    here: Path, capsys: pytest.CaptureFixture[str], function: str, message: str
) -> None:
    assert dispatch(["score", f"python:mine_of_tests:{function}", "--states", "3"]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "context 16, ID sequences" in error
    assert "Traceback" not in error


def test_a_checkpoint_on_its_evaluation_set_is_its_curves(tiny_run: Run) -> None:
    chains, step = 16, 600
    cell = tiny_run.cell(chains)
    source = open_source(str(tiny_run.path), str(chains), 0, str(step))
    assert (source.states, source.context) == (3, 16)
    curves = cell.curves.sel(step=step)
    found = score(source.model, cell.evaluation_sets["id"].states, source.chains, source.prior)
    np.testing.assert_allclose(
        list(found.distance.values()), curves.distance.sel(set="id"), atol=2e-6
    )
    np.testing.assert_allclose(list(found.composition.values()), curves.composition, atol=2e-4)
    assert (found.phase, found.clear) == (curves.phase, curves.clear)
    assert found.measurement.margin == pytest.approx(float(curves.margin), abs=2e-6)


@pytest.mark.slow
def test_other_sequences_give_its_curves_within_the_error(tiny_run: Run) -> None:
    for chains in (2, 256):
        source = open_source(str(tiny_run.path), str(chains))
        found = score_contexts(
            source.model,
            source.chains,
            source.prior,
            (16,),
            sequences=512,
            key=jax.random.key(5),
        ).isel(context=0)
        curves = tiny_run.cell(chains).curves.isel(step=-1)
        assert found.phase == curves.phase
        # Curves are of 128 sequences, and have twice the error.
        error = np.hypot(2 * found.distance_error, found.distance_error)
        assert (np.abs(found.distance - curves.distance) < 4 * error).all()


@pytest.mark.slow
def test_a_model_by_each_of_its_names_has_the_same_scores(
    tiny_run: Run, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cell = tiny_run.cell(16)
    save_model(here / "model.safetensors", cell.model(600))
    (here / "chains.npz").write_bytes(cell.chain_set.to_npz())
    (here / "loads_of_tests.py").write_text(
        "import jax\nfrom iclens.interop.files import load_model\n"
        "from iclens.transformer import forward\n"
        "model = load_model('model.safetensors')\n"
        "def predict(states):\n"
        "    return jax.nn.log_softmax(forward(model, jax.numpy.asarray(states)).logits)\n"
    )
    options = ["--sequences", 64, "--draw", 3]
    of_run = ["--run", tiny_run.path, "--chains", 16]
    own = told(capsys, tiny_run.path, "--chains", 16, *options)
    others = [
        told(capsys, "model.safetensors", *of_run, *options),
        told(capsys, "model.safetensors", "--chains", "chains.npz", *options),
        told(capsys, "python:loads_of_tests:predict", *of_run, "--contexts", 16, *options),
    ]
    assert [row["context"] for row in own["scores"]] == [16]
    assert own["facts"] == {"chains K": "16", "seed": "0", "step": "600"}
    for other in others:
        for one, two in zip(own["scores"], other["scores"], strict=True):
            assert one["phase"] == two["phase"]
            for kind in ("id", "ood"):
                assert one["distance"][kind] == pytest.approx(two["distance"][kind], abs=1e-5)
    for arguments, message in (
        ([tiny_run.path, "--chains", 16, "--run", tiny_run.path], "MODEL is a run"),
        ([tiny_run.path, "--chains", 3], "--chains: expected one of 2, 16, 256, got '3'"),
        ([tiny_run.path], "--chains: expected one of 2, 16, 256, got none"),
        ([tiny_run.path, "--chains", 16, "--step", "all"], "expected a step or 'last'"),
        ([tiny_run.path, "--chains", 16, "--states", 3], "--states: the run says it"),
        (["model.safetensors", "--contexts", 17], "takes at most 16 states, got 17"),
        (["model.safetensors", "--states", 4], "got 4 of --states, 3 of the model"),
    ):
        assert dispatch(["score", *map(str, arguments)]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.slow
def test_what_is_printed_is_what_is_saved_and_the_command_repeats_it(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chains = ChainPrior(3).sample(jax.random.key(0), 4)
    (here / "chains.npz").write_bytes(chains.to_npz())
    given = ["python:mine_of_tests:uniform", "--chains", "chains.npz", "--contexts", "8"]
    given += ["--sequences", "16", "--shuffles", "2"]
    assert dispatch(["score", *given, "--out", "a b"]) == 0
    text = capsys.readouterr().out
    assert "N = 8: none, margin" in text
    assert f"wrote   {Path('a b') / 'score.html'}" in text
    saved = xr.load_dataset(here / "a b" / "score.nc", engine="h5netcdf")
    again = shlex.split(saved.attrs["command"])
    assert again == ["iclens", "score", *given, "--out", "a b"]
    found = told(capsys, *again[2:-2])
    assert found["chain_source"] == "chains.npz"
    (row,) = found["scores"]
    of_8 = saved.sel(context=8)
    assert row["margin"] == float(of_8.margin)
    assert row["distance_error"]["ood"]["2-Mem"] == float(
        of_8.distance_error.sel(set="ood", predictor="2-Mem")
    )
    assert [shuffle["phase"] for shuffle in row["shuffles"]] == ["none", "none"]
