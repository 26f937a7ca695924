"""Real faults under a sweep: hosts cut off, a full and a read-only disk, a folder removed."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from sweeping import BASE, EARLY, ICLENS, Sweep, results

from iclens.lab.recipe import SweepConfig
from iclens.lab.store import Run, open_run

pytestmark = pytest.mark.slow
needs_root = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("ip"), reason="makes network namespaces and mounts"
)
A, B = "10.77.0.1", "10.77.0.2"


def sh(command: str) -> None:
    subprocess.run(command.split(), check=True)


@pytest.fixture
def hosts():
    """Two network namespaces with a cable between them; yields what runs a command in one."""
    names = [f"iclens-{side}-{os.getpid()}" for side in "ab"]
    started: list[subprocess.Popen] = []

    def start(host: int, *command: str, **options) -> subprocess.Popen:
        inside = ["ip", "netns", "exec", names[host], *command]
        started.append(subprocess.Popen(inside, start_new_session=True, **options))
        return started[-1]

    try:
        for name in names:
            sh(f"ip netns add {name}")
        sh(f"ip -n {names[0]} link add cable type veth peer name cable netns {names[1]}")
        for name, address in zip(names, (A, B), strict=True):
            sh(f"ip -n {name} addr add {address}/24 dev cable")
            sh(f"ip -n {name} link set cable up")
            sh(f"ip -n {name} link set lo up")
        yield start, names
    finally:
        for process in started:
            with contextlib.suppress(psutil.NoSuchProcess):
                for child in psutil.Process(process.pid).children(recursive=True):
                    child.kill()
            process.kill()
            process.wait()
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False)


@needs_root
def test_a_host_that_is_cut_off_in_the_middle_of_a_cell(hosts, undisturbed, tmp_path) -> None:
    start, names = hosts
    python = [sys.executable, "-m"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    ttl = os.environ | {"DASK_DISTRIBUTED__SCHEDULER__WORKER_TTL": "8s"}
    address = f"tcp://{A}:8786"
    scheduler = ["distributed.cli.dask_scheduler", "--host", A, "--no-dashboard"]
    start(0, *python, *scheduler, env=ttl, **quiet)
    worker = ["distributed.cli.dask_worker", address, "--nthreads", "1", "--memory-limit", "0"]
    for host, here in enumerate((A, B)):
        start(host, *python, *worker, "--no-dashboard", "--host", here, **quiet)
    (tmp_path / "r.toml").write_text(BASE.to_toml())
    log = open(tmp_path / "log", "wb")  # noqa: SIM115
    command = [*ICLENS, "run", "r.toml", "--out", "run", "--scheduler", address]
    parent = start(0, *command, cwd=tmp_path, stdout=log, stderr=log)
    end = time.monotonic() + 120
    while not all((tmp_path / "run" / "cells" / piece).exists() for piece in EARLY):
        assert parent.poll() is None, (tmp_path / "log").read_text()
        assert time.monotonic() < end, (tmp_path / "log").read_text()
        time.sleep(0.05)
    sh(f"ip -n {names[1]} link set cable down")
    assert parent.wait(240) == 0, (tmp_path / "log").read_text()
    log.close()
    assert results(Run(tmp_path / "run")) == results(undisturbed)


PLANTED = """
from iclens.lab import work
work.run_cell = lambda cell, **callbacks: None
"""


def test_two_thousand_cells_are_scheduled_at_little_cost(tmp_path, capsys) -> None:
    """Cells whose training is nothing: what is left is the overhead of each."""
    (tmp_path / "sitecustomize.py").write_text(PLANTED)
    recipe = dataclasses.replace(BASE, sweep=SweepConfig(chains=(2,), seeds=tuple(range(2000))))
    begun = time.monotonic()
    sweep = Sweep(tmp_path, recipe, PYTHONPATH=str(tmp_path))
    parent = psutil.Process(sweep.process.pid)
    memory = []
    while sweep.process.poll() is None:
        with contextlib.suppress(psutil.NoSuchProcess):
            memory.append(parent.memory_info().rss / 2**20)
        time.sleep(0.2)
    seconds = time.monotonic() - begun
    told = sweep.told()
    assert sweep.process.returncode == 0
    assert told.count(" is done\n") == 2000, told[-2000:]
    with capsys.disabled():
        print(f"\n2,000 cells: {1e3 * seconds / 2000:.1f} ms each, {max(memory):.0f} MiB")
    assert seconds / 2000 < 0.05
    assert max(memory) < 1024


@pytest.fixture
def disk(tmp_path):
    """A file system of 400 KiB; yields its folder and what mounts it again with options."""
    folder = tmp_path / "disk"
    folder.mkdir()
    sh(f"mount -t tmpfs -o size=400k tmpfs {folder}")
    try:
        yield folder, lambda options: sh(f"mount -o remount,{options} {folder}")
    finally:
        sh(f"umount -l {folder}")


@needs_root
def test_a_full_and_a_read_only_disk(disk, tmp_path) -> None:
    folder, remount = disk
    small = dataclasses.replace(
        BASE, train=dataclasses.replace(BASE.train, steps=50, evaluations=2)
    )
    (tmp_path / "r.toml").write_text(small.to_toml())
    command = [*ICLENS, "run", "r.toml", "--out", "disk/run"]

    def run(*more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*command, *more], cwd=tmp_path, capture_output=True, text=True)

    first = run("--sweep.chains", "2")
    told = first.stdout + first.stderr
    before = {p: p.read_bytes() for p in (folder / "run" / "cells").glob("*/*") if p.is_file()}
    assert (folder / "run" / "cells" / "chains=2,seed=0" / "done.json").exists(), told
    (folder / "ballast").write_bytes(
        bytes(max(0, os.statvfs(folder).f_bavail * os.statvfs(folder).f_bsize - 12_000))
    )
    full = run("--sweep.chains", "2", "16", "32")
    assert full.returncode == 1, full.stderr
    assert "No space left on device" in full.stderr
    assert "Traceback" not in full.stderr
    assert {path: path.read_bytes() for path in before} == before
    remount("ro")
    locked = run()
    assert locked.returncode == 2
    assert "Read-only file system" in locked.stderr
    assert "Traceback" not in locked.stderr


def test_a_folder_that_is_removed_during_the_run(tmp_path) -> None:
    train = dataclasses.replace(BASE.train, steps=20_000)  # so that neither cell ends before
    sweep = Sweep(tmp_path, dataclasses.replace(BASE, train=train))
    sweep.wait_for(*(f"chains={k},seed=0/pieces/40.safetensors" for k in (2, 4)))
    shutil.rmtree(sweep.path, ignore_errors=True)
    assert sweep.end() in (1, 2)
    told = sweep.told()
    assert "No such file or directory" in told or "no run at" in told
    assert "Traceback" not in told
    assert not sweep.path.exists() or not list(sweep.path.glob("cells/*/done.json"))


@pytest.mark.parametrize("kind", ["truncated", "flipped", "missing"])
def test_a_damaged_cell_is_found_by_status_and_computed_again(tmp_path, kind) -> None:
    recipe = dataclasses.replace(
        BASE, train=dataclasses.replace(BASE.train, steps=50, evaluations=2)
    )
    assert Sweep(tmp_path, recipe).end() == 0
    run = open_run(tmp_path / "run")
    before = results(run)
    path = run.cells[1].path / "curves.nc"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.unlink()
    if kind != "missing":
        path.write_bytes(content if kind == "flipped" else content[:-7])
    status = subprocess.run(
        [*ICLENS, "status", str(run.path)], capture_output=True, text=True, check=True
    )
    assert "chains=4,seed=0              damaged" in status.stdout
    sweep = Sweep(tmp_path, recipe)
    assert sweep.end() == 0
    assert "chains=4,seed=0 was damaged (curves.nc" in sweep.told()
    assert results(run) == before
    assert (Path(run.path) / "cells" / "chains=4,seed=0.damaged-1").is_dir()
