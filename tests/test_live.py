"""Live logging: what is sent, once each; and no fault of the service disturbs the training."""

from __future__ import annotations

import dataclasses
import shutil
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from iclens import cli
from iclens.cli import live
from iclens.cli.live import LiveLog
from iclens.lab.files import write_arrays
from iclens.lab.recipe import SweepConfig, load_recipe
from iclens.lab.store import Run, create_run, open_run
from iclens.lab.sweep import run_sweep
from iclens.lab.work import Event

TINY = load_recipe("tiny")
SHORT = dataclasses.replace(
    TINY,
    train=dataclasses.replace(TINY.train, steps=200, evaluations=8),
    evaluation=dataclasses.replace(TINY.evaluation, sequences=16),
    sweep=SweepConfig(chains=(4,), seeds=(0, 1)),
)
CALLS = ("Settings", "init", "define_metric", "log", "finish")


class Service:
    """Stands for the module `wandb`: keeps what it is asked for, and fails at one call."""

    def __init__(self, fails: str = "") -> None:
        self.fails, self.asked, self.calls = fails, [], []
        self.logged: dict[str, list[dict[str, Any]]] = {}
        self.ended: list[tuple[str, int]] = []

    def _called(self, name: str) -> None:
        self.calls.append(name)
        if name == self.fails:
            raise RuntimeError(f"{name} is down\nand more")

    def Settings(self, **settings: Any) -> dict[str, Any]:
        self._called("Settings")
        return settings

    def init(self, **asked: Any) -> SimpleNamespace:
        self._called("init")
        self.asked.append(asked)
        rows = self.logged.setdefault(asked["id"], [])

        def log(row: dict[str, Any]) -> None:
            self._called("log")
            rows.append(row)

        def finish(exit_code: int) -> None:
            self._called("finish")
            self.ended.append((asked["id"], exit_code))

        return SimpleNamespace(
            url="https://service/run",
            offline=False,
            summary={},
            log=log,
            finish=finish,
            define_metric=lambda *names, **more: self._called("define_metric"),
        )

    def steps(self, id: str) -> list[int]:
        return [row["step"] for row in self.logged[id] if "phase" in row]


def use(monkeypatch: pytest.MonkeyPatch, service: Service | None) -> None:
    """None in its place is a package that is not installed."""
    monkeypatch.setitem(sys.modules, "wandb", service)


@pytest.fixture
def finished(tmp_path: Path) -> Run:
    """A finished run that a test may write into."""
    shutil.copytree(Path(__file__).parent / "data" / "first_release", tmp_path / "done")
    return open_run(tmp_path / "done")


def sweep(run: Run, said: list[str], project: str = "mine") -> dict[str, str]:
    with LiveLog(run, project, said.append) as log:
        return run_sweep(run, on_event=log.on_event)


@pytest.mark.slow
def test_each_cell_is_a_run_in_the_group_of_its_sweep_and_goes_on(monkeypatch, tmp_path) -> None:
    run, said = create_run(tmp_path / "run", SHORT), []
    use(monkeypatch, service := Service())
    from iclens.lab import cell as module

    written = []

    def stop(path: Path, arrays: Any) -> None:
        written.append(path)
        if len(written) == 7:
            raise KeyboardInterrupt
        write_arrays(path, arrays)

    with monkeypatch.context() as patch:
        patch.setattr(module, "write_arrays", stop)
        with pytest.raises(KeyboardInterrupt):
            sweep(run, said)
    (first,) = {asked["id"] for asked in service.asked}
    assert service.ended == [(first, 1)]
    assert 0 < len(service.steps(first)) < len(SHORT.train.evaluation_steps)

    assert sweep(open_run(run.path), said) == {}
    assert {asked["id"] for asked in service.asked} >= {first}
    assert len(service.logged) == 2
    for asked in service.asked:
        assert (asked["project"], asked["group"]) == ("mine", "run")
        assert (asked["resume"], asked["reinit"]) == ("allow", "create_new")
        assert asked["config"]["task"]["states"] == TINY.task.states
        assert "sweep" not in asked["config"]
        cell = run.cell(asked["config"]["chains"], asked["config"]["seed"])
        assert service.steps(asked["id"]) == list(SHORT.train.evaluation_steps)
        curves = cell.curves
        for row in service.logged[asked["id"]]:
            here = curves.sel(step=row["step"], set="id")
            assert row["loss/id"] == pytest.approx(float(here.loss))
            assert row["distance_id/2-Gen"] == pytest.approx(float(here.distance[1]))
    assert service.ended[1:] == [(asked["id"], 0) for asked in service.asked[1:]]

    before = len(service.calls)
    assert sweep(open_run(run.path), said) == {}
    assert len(service.calls) == before  # all was sent
    assert said == ["Weights & Biases: https://service/run"] * 3


def test_a_run_that_was_trained_without_it_is_sent_at_once(monkeypatch, finished) -> None:
    use(monkeypatch, service := Service())
    assert sweep(finished, []) == {}
    assert len(service.logged) == len(finished.cells)
    for id, rows in service.logged.items():
        assert service.steps(id) == list(finished.recipe.train.evaluation_steps)
        for row in rows:
            assert ("distance_id/2-Mem" in row) == ("infinite" not in id)
            assert all(isinstance(value, str) or np.isfinite(value) for value in row.values())
    sweep(finished, [], "another")
    assert len(service.logged) == 2 * len(finished.cells)


@pytest.mark.parametrize("fails", [*CALLS, "missing", "damaged"])
def test_whatever_fails_is_told_once(monkeypatch, finished, fails) -> None:
    use(monkeypatch, None if fails == "missing" else (service := Service(fails)))
    if fails == "damaged":
        (finished.path / "wandb.json").write_text("{")
    said: list[str] = []
    assert sweep(finished, said) == {}
    told = [line for line in said if "logged" in line]
    assert len(told) == 1
    if fails in CALLS:
        assert told == [
            f"Weights & Biases: nothing more is logged: RuntimeError: {fails} is down. "
            "The training goes on"
        ]
        assert service.calls.count(fails) == 1
    elif fails == "missing":
        assert told == ["Weights & Biases: nothing is logged: install the extra wandb"]


def test_a_failure_of_training_is_sent_too(monkeypatch, tmp_path) -> None:
    run, said = create_run(tmp_path / "run", SHORT), []
    use(monkeypatch, service := Service())
    with LiveLog(run, "mine", said.append) as log:
        log.on_event(Event("chains=4,seed=0", "start"))
        log.on_event(Event("chains=4,seed=0", "fail", detail="Traceback\nValueError: no"))
    assert [code for _, code in service.ended] == [1]


def test_a_service_that_does_not_answer_is_not_waited_for(monkeypatch, finished) -> None:
    use(monkeypatch, service := Service())
    answer = threading.Event()
    monkeypatch.setattr(service, "init", lambda **asked: answer.wait())
    monkeypatch.setattr(live, "CLOSE_SECONDS", 0.2)
    said: list[str] = []
    assert sweep(finished, said) == {}
    answer.set()
    assert said == ["Weights & Biases: not all was sent; the run sends it when it goes on"]


def test_the_command_ends_as_without_it(monkeypatch, finished, capfd) -> None:
    use(monkeypatch, None)
    monkeypatch.setattr("iclens.report.write_report", lambda run: "page")
    command = ["run", str(finished.path / "recipe.toml"), "--out", str(finished.path)]
    assert cli.dispatch([*command, "--workers", "0", "--wandb", "mine"]) == 0
    err = capfd.readouterr().err
    assert err.count("Weights & Biases: nothing is logged: install the extra wandb") == 1
