"""`iclens doctor`: what works is found to work; each injected fault is named, with its mending."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from iclens import cli
from iclens.cli import checkup, selftest

TOLD = "\n".join(json.dumps({"name": n, "ok": True, "found": "well"}) for n in checkup.CHECKS)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """A self-test that finds all well, for the tests of other things."""
    monkeypatch.setattr(checkup, "SELFTEST", (sys.executable, "-c", f"print('''{TOLD}''')"))
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)


def examine(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code = cli.dispatch(["doctor", "--json", *arguments])
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] == (code == 0)
    return code, {check["name"]: check for check in found["checks"]}


def problems(checks: dict[str, Any]) -> list[str]:
    return [name for name, check in checks.items() if check["advice"]]


def test_all_is_well(capsys, tmp_path) -> None:
    code, checks = examine(capsys, "--run", str(tmp_path))
    assert (code, problems(checks)) == (0, [])
    assert checks["jax"]["found"] == metadata.version("jax")
    assert {"jaxlib", "cores", "memory", "locks", "disk", "sbatch", "report"} <= set(checks)
    assert not list(tmp_path.iterdir())
    assert cli.dispatch(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "ok       jax              " in out
    assert out.endswith("0 problems. In a bug report, paste all of this.\n")


def test_a_missing_and_an_outdated_package(capsys, monkeypatch) -> None:
    real = metadata.version

    def version(name: str) -> str:
        if name == "tomlkit":
            raise metadata.PackageNotFoundError(name)
        return {"scipy": "0.19"}.get(name) or real(name)

    monkeypatch.setattr(metadata, "version", version)
    code, checks = examine(capsys)
    assert (code, problems(checks)) == (1, ["scipy", "tomlkit"])
    assert checks["tomlkit"]["found"] == "not installed"
    assert checks["tomlkit"]["advice"].startswith("pip install 'tomlkit>=")
    assert checks["scipy"]["found"].startswith("0.19, expected >=")


def test_iclens_itself_is_not_installed(capsys, monkeypatch) -> None:
    def requires(name: str) -> list[str]:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", requires)
    code, checks = examine(capsys)
    assert (code, problems(checks)) == (1, ["versions"])


def test_a_cache_that_cannot_be_written(capsys, monkeypatch, tmp_path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "file" / "cache"))
    code, checks = examine(capsys)
    assert (code, problems(checks)) == (1, ["compile cache"])
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "cache"))
    code, checks = examine(capsys)
    assert (code, checks["compile cache"]["found"]) == (0, str(tmp_path / "cache"))


def test_a_folder_without_locks_room_or_existence(capsys, monkeypatch, tmp_path) -> None:
    code, checks = examine(capsys, "--run", str(tmp_path / "nowhere"))
    assert (code, problems(checks)) == (1, ["locks", "disk"])
    monkeypatch.setattr("fcntl.flock", lambda file, how: None)
    monkeypatch.setattr(checkup, "LEAST_DISK", 2**80)
    monkeypatch.setattr(checkup, "LEAST_MEMORY", 2**80)
    code, checks = examine(capsys, "--run", str(tmp_path))
    assert (code, problems(checks)) == (1, ["memory", "locks", "disk"])
    assert checks["locks"]["found"].endswith("a lock that is held is given again")


@pytest.mark.parametrize(
    ("child", "name", "found"),
    [
        ("raise SystemExit('it died')", "device", "ended with code 1: it died"),
        (f"print('''{TOLD.replace('true', 'false', 1)}''')", "device", "well"),
        (f"print('''{TOLD.splitlines()[0]}'''); import os; os.abort()", "predictors", "code -6"),
        ("import time; time.sleep(60)", "device", "was not done in 1 s"),
    ],
)
def test_a_self_test_that_fails_dies_or_hangs(capsys, monkeypatch, child, name, found) -> None:
    monkeypatch.setattr(checkup, "SELFTEST", (sys.executable, "-c", child))
    monkeypatch.setattr(checkup, "SELFTEST_SECONDS", 1 if "sleep" in child else 60)
    code, checks = examine(capsys)
    assert (code, problems(checks)) == (1, [name])
    assert found in checks[name]["found"]


def test_a_broken_jax_is_told(tmp_path) -> None:
    (tmp_path / "jax.py").write_text("raise ImportError('jaxlib is from another age')")
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    ended = subprocess.run(
        [sys.executable, "-m", "iclens.cli", "doctor", "--run", str(tmp_path)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 1
    assert (
        "PROBLEM  device           ended with code 1: ImportError: jaxlib is from" in ended.stdout
    )
    assert "Traceback" not in ended.stdout + ended.stderr


def test_no_names_are_told(monkeypatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    monkeypatch.setattr("getpass.getuser", lambda: "ada")
    text = "/home/ada/runs, /scratch/ada/x, /scratch/ada2, ada"
    assert checkup.without_names(text) == "~/runs, /scratch/USER/x, /scratch/ada2, ada"


def test_brute_force_tells_a_wrong_predictor(monkeypatch) -> None:
    assert selftest.predictors() == "2-Gen and 2-Mem are those of brute force"
    right = selftest._two_mem
    monkeypatch.setattr(selftest, "_two_mem", lambda context, chains: right(context[1:], chains))
    with pytest.raises((ArithmeticError, IndexError)):
        selftest.predictors()
    wrong = selftest.reference_predictors
    monkeypatch.setattr(selftest, "_two_mem", right)
    monkeypatch.setattr(
        selftest, "reference_predictors", lambda *all: wrong(*all) | {"2-Gen": wrong(*all)["1-Gen"]}
    )
    with pytest.raises(ArithmeticError, match="2-Gen misses brute force by"):
        selftest.predictors()


@pytest.mark.slow
def test_the_self_test_itself(capfd, monkeypatch, tmp_path: Path) -> None:
    selftest.main()
    told = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert [check["name"] for check in told] == list(checkup.CHECKS)
    assert all(check["ok"] for check in told), told
    # A training that depends on where it was interrupted is found.
    real = selftest.run_cell

    def forgetful(cell, **more) -> None:
        real(cell, **more)
        if "again" in str(cell.path):
            (cell.path / "curves.nc").write_bytes(b"")

    monkeypatch.setattr(selftest, "run_cell", forgetful)
    selftest.main()
    told = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert [check["name"] for check in told if not check["ok"]] == ["resume"]
