"""Figures and captions of the theory, from the results that the repository keeps."""

from __future__ import annotations

import math
import shutil
from html import unescape
from pathlib import Path

import pytest

from iclens.lab import times
from iclens.lab.files import read_dataset
from iclens.lab.fits import fit_run
from iclens.lab.store import open_run
from iclens.report import write_report
from iclens.report.plates import save_plates
from iclens.report.theory import DRAWINGS, theory_plates

RESULTS = Path(__file__).parents[2] / "docs" / "results"


def with_results(run: Path, folder: Path, names: tuple[str, ...]) -> Path:
    """A copy of a run that has some results of the theory."""
    shutil.copytree(run, folder)
    (folder / "theory").mkdir()
    for name in names:
        shutil.copy(RESULTS / f"{name}.nc", folder / "theory")
    return folder


@pytest.mark.slow
def test_every_result_of_the_repository_is_drawn(tmp_path: Path) -> None:
    assert {path.stem for path in RESULTS.glob("*.nc")} == set(DRAWINGS)
    for path in RESULTS.glob("*.nc"):
        shutil.copy(path, tmp_path)
    saved = save_plates(tmp_path / "figures", theory_plates(tmp_path))
    figures = [path for path in saved if path.suffix == ".svg"]
    assert [path.stem for path in figures] == list(DRAWINGS)
    for path in figures:
        assert path.read_text().count("<path") > 20, path


def test_captions_tell_the_numbers_of_the_files() -> None:
    switching = read_dataset(RESULTS / "switching.nc")
    value, low, high, *_ = switching.fit.sel(parameter="gamma").values
    told = DRAWINGS["switching"].caption(switching)
    assert f"gamma = {value:.2g} ({low:.2g} to {'open' if math.isinf(high) else high})" in told
    race = read_dataset(RESULTS / "race.nc")
    predicted = "{:.3g} ({:.3g} to {:.3g})".format(*race.attrs["K1* loss at tau"])
    assert f"by the loss at that time: {predicted}" in DRAWINGS["race"].caption(race)


@pytest.mark.slow
@pytest.mark.slow
def test_the_page_has_the_results_and_the_commands_of_the_others(
    saved_run: Path, tmp_path: Path
) -> None:
    run = with_results(saved_run, tmp_path / "a run", ("switching", "race"))
    page = write_report(open_run(run)).read_text()
    assert page.count('<img src="data:image/svg+xml;base64,') == 2
    assert "gamma = " in page
    assert f"iclens theory memory --beside '{run}' --out '{run}/theory'" in unescape(page)
    assert f"iclens theory fits '{run}'" in unescape(page)


@pytest.mark.slow
@pytest.mark.slow
def test_a_damaged_result_is_told_in_the_page(saved_run: Path, tmp_path: Path) -> None:
    run = with_results(saved_run, tmp_path / "run", ("switching", "race"))
    broken = run / "theory" / "race.nc"
    broken.write_bytes(broken.read_bytes()[:1000])
    page = write_report(open_run(run)).read_text()
    assert page.count('<img src="data:image/svg+xml;base64,') == 1
    assert "race.nc cannot be read as netCDF" in page


def test_a_switch_to_m2_counts_from_g2_on(saved_run: Path) -> None:
    """In M1, before G2, a model is nearer to 2-Mem than to 2-Gen already."""
    run = open_run(saved_run)
    found = {cell.chains: times.time_to_switch(cell) for cell in run.cells if cell.seed == 0}
    label = {cell.chains: times.time_to_2_mem(cell) for cell in run.cells if cell.seed == 0}
    assert times.visits_g2(run.cell(16))
    assert found[16] == label[16]
    assert found[16][0] > 1000
    assert math.isinf(found[512][1])
    fitted = fit_run(run)
    assert fitted["K2* (end state)"].parameters["threshold"].value > 16
    assert "at 3 values of K" in fitted["switching"]


@pytest.mark.parametrize("name", list(DRAWINGS))
def test_commands_name_subcommands(name: str) -> None:
    from iclens.cli.theory import COMMANDS

    assert DRAWINGS[name].command.split()[0] in COMMANDS
