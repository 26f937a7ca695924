"""Sweeps on workers: any number of them, whatever dies, ends with the same bytes."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import time

import psutil
import pytest
from distributed import Client, LocalCluster
from sweeping import BASE, EARLY, ICLENS, Sweep, results

from iclens.lab import cluster
from iclens.lab.cell import RESULTS
from iclens.lab.cluster import VERSION, _fault, remote_client, run_on
from iclens.lab.recipe import ClusterConfig, SweepConfig
from iclens.lab.store import Run, create_run, open_run
from iclens.lab.sweep import in_order, run_sweep
from iclens.lab.work import Event


def test_order_of_work_is_coarse_first(tmp_path) -> None:
    recipe = dataclasses.replace(BASE, sweep=SweepConfig((2, 4, 8, 16, "infinite"), (0, 1)))
    order = [(c.chains, c.seed) for c in in_order(create_run(tmp_path / "run", recipe).cells)]
    assert order[:5] == [("infinite", 0), (8, 0), (2, 0), (16, 0), (4, 0)]
    assert order[5:] == [("infinite", 1), (8, 1), (2, 1), (16, 1), (4, 1)]


@pytest.mark.slow
def test_two_workers_end_with_the_bytes_of_one(undisturbed, tmp_path) -> None:
    run = create_run(tmp_path / "run", BASE)
    events = []
    assert run_sweep(run, workers=2, on_event=events.append) == {}
    assert results(run) == results(undisturbed)
    kinds = {name: [e.kind for e in events if e.cell == name] for name in ("chains=2,seed=0", "")}
    assert kinds[""] == ["dashboard"]
    assert kinds["chains=2,seed=0"][0] == "start"
    assert kinds["chains=2,seed=0"][-1] == "done"
    labels = [e.detail for e in events if e.kind == "phase" and e.cell == "chains=2,seed=0"]
    assert labels == open_run(run.path).cells[0].curves.phase.values.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("victims", [1, 2], ids=["one", "both"])
def test_killed_workers_cost_nothing_that_was_saved(undisturbed, tmp_path, victims) -> None:
    sweep = Sweep(tmp_path)
    sweep.wait_for(*EARLY)
    for worker in sweep.workers()[:victims]:
        worker.kill()
    assert sweep.end() == 0, sweep.told()
    assert results(Run(sweep.path)) == results(undisturbed)


@pytest.mark.slow
def test_a_killed_parent_leaves_no_worker_and_nothing_is_lost(undisturbed, tmp_path) -> None:
    sweep = Sweep(tmp_path)
    sweep.wait_for(*EARLY)
    workers = sweep.workers()
    assert len(workers) == 2
    sweep.process.kill()
    sweep.end()
    _, alive = psutil.wait_procs(workers, timeout=10)
    assert not alive
    run = open_run(sweep.path)
    assert {cell.status for cell in run.cells} == {"unfinished"}
    saved = {cell.name: cell.steps[-1] for cell in run.cells}
    events = []
    assert run_sweep(run, workers=2, on_event=events.append) == {}
    for name, step in saved.items():  # it goes on after what was saved
        again = [event.steps for event in events if event.cell == name and event.kind == "phase"]
        # Killed between a point and the state after it, a cell does that one point again.
        steps = BASE.train.evaluation_steps
        assert again in ([s for s in steps if s > step], [s for s in steps if s >= step])
    assert results(run) == results(undisturbed)


@pytest.mark.slow
def test_an_interrupt_ends_within_seconds_and_says_how_to_go_on(undisturbed, tmp_path) -> None:
    sweep = Sweep(tmp_path)
    sweep.wait_for(*EARLY)
    workers = sweep.workers()
    begun = time.monotonic()
    os.killpg(sweep.process.pid, signal.SIGINT)  # as a terminal does
    assert sweep.end(20) == 130
    assert time.monotonic() - begun < 10
    assert "To go on: iclens run run/recipe.toml --out run" in sweep.told()
    assert "Traceback" not in sweep.told()
    _, alive = psutil.wait_procs(workers, timeout=5)
    assert not alive
    assert Sweep(tmp_path).end() == 0
    assert results(Run(sweep.path)) == results(undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 0])
def test_an_interrupt_at_any_time_ends_within_seconds(tmp_path, workers) -> None:
    """While modules are imported, workers start, cells compile and train, the page is written."""
    for after in (0.3, 0.8, 1.3, 1.7, 2.1, 2.5, 3.5, 6):
        sweep = Sweep(tmp_path, workers=workers)
        time.sleep(after)
        begun = psutil.Process(sweep.process.pid).children(recursive=True)
        os.killpg(sweep.process.pid, signal.SIGINT)
        assert sweep.end(10) == 130, sweep.told()
        assert "stopped" in sweep.told()
        assert "Traceback" not in sweep.told()
        assert not psutil.wait_procs(begun, timeout=5)[1]
        sweep.log.unlink()


PLANTED = """
import os, signal
from iclens.lab import work
run_cell = work.run_cell
def planted(cell, **callbacks):
    if cell.chains == 2:
        {fault}
    run_cell(cell, **callbacks)
work.run_cell = planted
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("raise RuntimeError('planted')", "RuntimeError: planted"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "the cell was given up: 4 workers died at it"),
    ],
    ids=["fails", "kills"],
)
def test_a_cell_that_fails_or_kills_its_worker_stops_no_other(
    undisturbed, tmp_path, fault, message
) -> None:
    (tmp_path / "sitecustomize.py").write_text(PLANTED.format(fault=fault))
    sweep = Sweep(tmp_path, PYTHONPATH=str(tmp_path))
    assert sweep.end() == 1
    assert f"failed: chains=2,seed=0: {message}" in sweep.told()
    bad, good = open_run(sweep.path).cells
    assert (bad.status, good.status) == ("failed", "done")
    assert message in bad.error
    kept = {name: content for name, content in results(undisturbed).items() if "=4" in name}
    assert {
        f"{good.name}/{n}": (good.path / n).read_bytes() for n in (*RESULTS, "done.json")
    } == kept


@pytest.mark.slow
def test_two_commands_on_one_run(undisturbed, tmp_path) -> None:
    sweep = Sweep(tmp_path)
    sweep.wait_for(EARLY[0])
    second = Sweep(tmp_path)
    assert second.end() == 2
    assert "another process is working on the run" in second.told()
    assert sweep.end() == 0
    assert results(Run(sweep.path)) == results(undisturbed)


@pytest.mark.slow
def test_cells_of_an_array_share_the_store(undisturbed, tmp_path) -> None:
    (tmp_path / "r.toml").write_text(BASE.to_toml())
    create = [*ICLENS, "run", "r.toml", "--out", "run", "--create"]
    told = subprocess.run(create, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert "iclens cell run INDEX    (0 to 1)" in told
    jobs = [
        subprocess.Popen([*ICLENS, "cell", "run", index], cwd=tmp_path, stderr=subprocess.PIPE)
        for index in ("0", "1", "1")  # one of them twice
    ]
    waited = [job.communicate(timeout=240)[1].decode() for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0, 0], waited
    assert any(": wait" in text for text in waited)
    run = open_run(tmp_path / "run")
    assert results(run) == results(undisturbed)
    assert len(run.provenance["invocations"]) == 3
    wrong = subprocess.run([*ICLENS, "cell", "run", "2"], cwd=tmp_path, capture_output=True)
    assert wrong.returncode == 2
    assert b"expected an index from 0 to 1, got 2" in wrong.stderr


@pytest.mark.slow
def test_status_of_a_running_sweep(tmp_path) -> None:
    long = dataclasses.replace(
        BASE,
        train=dataclasses.replace(BASE.train, steps=10**6, evaluations=1000, spacing="linear"),
    )
    sweep = Sweep(tmp_path, long)
    sweep.wait_for(*(piece.replace("/4.", "/4000.") for piece in EARLY))
    told = subprocess.run(
        [*ICLENS, "status", str(sweep.path)], capture_output=True, text=True, check=True
    ).stdout
    sweep.process.kill()
    sweep.end()
    assert "running    step" in told
    assert "left at" in told


@pytest.mark.slow
def test_a_scheduler_that_is_not_there_is_one_message(tmp_path) -> None:
    (tmp_path / "r.toml").write_text(BASE.to_toml())
    found = subprocess.run(
        [*ICLENS, "run", "r.toml", "--out", "run", "--scheduler", "tcp://127.0.0.1:1"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert found.returncode == 2
    assert "tcp://127.0.0.1:1" in found.stderr
    assert "Traceback" not in found.stderr


def test_a_worker_that_does_not_fit_trains_nothing(tmp_path, monkeypatch) -> None:
    run = create_run(tmp_path / "run", BASE)
    told = []
    monkeypatch.setattr(cluster, "work", lambda cell, tell: None)
    monkeypatch.setattr(cluster, "use_one_thread", lambda: None)
    with LocalCluster(
        n_workers=1, threads_per_worker=2, processes=False, dashboard_address=None
    ) as workers:
        with (
            pytest.raises(ValueError, match="has 2 threads: start workers with --nthreads 1"),
            remote_client(workers.scheduler_address, run.path),
        ):
            pass

        def add_another(event: Event) -> None:
            told.append(event)
            if event.kind == "notice":
                workers.new_spec["options"]["nthreads"] = 1
                workers.scale(2)

        with Client(workers, set_as_default=False) as client:  # as if the first had come later
            assert run_on(client, run.cells, add_another) == {}
            faults = client.run(_fault, run.path, "iclens 0.0")
    notices = [event.detail for event in told if event.kind == "notice"]
    assert len(notices) == 1
    assert all("has 2 threads" in notice and "it is retired" in notice for notice in notices)
    assert [event.kind for event in told if event.cell] == ["done", "done"]
    assert all(f"has {VERSION}, this is iclens 0.0" in told for told in faults.values())
    with (
        LocalCluster(
            n_workers=1, threads_per_worker=1, processes=False, dashboard_address=None
        ) as workers,
        pytest.raises(ValueError, match="it is gone, or on no file system of all workers"),
        remote_client(workers.scheduler_address, tmp_path / "elsewhere"),
    ):
        pass


def test_where_a_run_is_done_is_no_part_of_what_it_is(tmp_path) -> None:
    create_run(tmp_path / "run", BASE)
    there = dataclasses.replace(BASE, cluster=ClusterConfig(kind="slurm", jobs=3))
    run = create_run(tmp_path / "run", there)
    assert run.recipe.cluster.jobs == 3
    assert json.dumps(BASE.difference(there)) == "[]"
