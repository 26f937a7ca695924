"""Figures and colours: what can be seen is what was measured, by everyone."""

from __future__ import annotations

import csv
import io
import re
import subprocess
import sys
from importlib import resources
from itertools import combinations, pairwise
from pathlib import Path
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pytest
import xarray as xr

from conftest import write_run
from iclens.cli import dispatch
from iclens.lab.store import open_run
from iclens.phases import PHASES
from iclens.report.figures import run_plates
from iclens.report.plates import COLUMN, PAGE, save_plates, tidy_csv
from iclens.report.reading import Bracket, Reading, StepAxis
from iclens.report.style import (
    DARK,
    LIGHT,
    PHASE_COLOURS,
    blend,
    contrast,
    linear_light,
    oklab,
    srgb,
)

VISION = {
    "trichromat": np.eye(3),
    # Machado, Oliveira and Fernandes (2009), severity 1, on linear-light sRGB.
    "protanope": np.array(
        [
            [0.152286, 1.052583, -0.204868],
            [0.114503, 0.786281, 0.099216],
            [-0.003882, -0.048116, 1.051998],
        ]
    ),
    "deuteranope": np.array(
        [
            [0.367322, 0.860646, -0.227968],
            [0.280085, 0.672501, 0.047413],
            [-0.011820, 0.042940, 0.968881],
        ]
    ),
}


@pytest.mark.parametrize("vision", VISION)
def test_phases_are_told_apart_by_everyone(vision: str) -> None:
    seen = {
        phase: oklab(np.clip(VISION[vision] @ linear_light(srgb(colour)), 0, 1))
        for phase, colour in PHASE_COLOURS.items()
    }
    for one, other in combinations(PHASES, 2):
        # About 0.02 is just noticeable side by side.
        assert np.linalg.norm(seen[one] - seen[other]) > 0.13, (one, other)


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_contrast_meets_level_aa(theme: dict[str, str]) -> None:
    for background in (theme["surface"], theme["raised"]):
        assert contrast(theme["ink"], background) > 4.5
        assert contrast(theme["muted"], background) > 4.5
    for phase, colour in PHASE_COLOURS.items():
        assert contrast(colour, theme["surface"]) > 3, phase
        text = max(contrast(LIGHT["surface"], colour), contrast(LIGHT["ink"], colour))
        assert text > 4.5, phase


def test_blend_keeps_pure_phases_and_lies_between_them() -> None:
    assert blend(np.eye(4)) == [PHASE_COLOURS[phase] for phase in PHASES]
    assert blend(np.array([[0.0, 1.0, np.nan, np.nan]])) == [PHASE_COLOURS["G2"]]
    middle = blend(np.array([[0.5, 0, 0.5, 0]]))[0]
    ends = [oklab(linear_light(srgb(PHASE_COLOURS[phase]))) for phase in ("G1", "M1")]
    between = oklab(linear_light(srgb(middle)))
    np.testing.assert_allclose(between, (ends[0] + ends[1]) / 2, atol=3e-3)


def test_step_axis_tiles_and_keeps_step_zero_apart() -> None:
    axis = StepAxis((0, 12, 30, 100, 6000))
    spans = [axis.edges[step] for step in axis.steps]
    assert axis.range == (spans[0][0], spans[-1][1])
    assert spans[0][1] < spans[1][0]
    for one, next_one in pairwise(spans[1:]):
        assert one[1] == next_one[0]
    for step, (left, right) in zip(axis.steps, spans, strict=True):
        assert left < axis.position(step) < right
    labelled, small = axis.ticks
    assert labelled == [0, 30, 100, 300, 1000, 3000]
    assert not set(labelled) & set(small)


def test_step_axis_of_one_evaluation() -> None:
    axis = StepAxis((0, 1))
    assert axis.range[0] < axis.position(0) < axis.position(1) < axis.range[1]


def test_brackets_touch_where_they_share_a_k() -> None:
    assert Bracket("K1*", 8, 16).touches(Bracket("K2*", 16, 32))
    assert Bracket("K1*", None, 16).touches(Bracket("K2*", 8, None))
    assert not Bracket("K1*", 8, 16).touches(Bracket("K2*", 32, "infinite"))


@pytest.mark.slow
def test_figures_have_their_widths_and_the_same_bytes_twice(saved_run: Path, tmp_path) -> None:
    plates = run_plates(Reading(open_run(saved_run)))
    assert list(plates) == ["phase_map", "distances", "losses"]
    paths = save_plates(tmp_path, plates)
    assert [path.suffix for path in paths] == [".svg", ".pdf", ".csv"] * 3
    first = [path.read_bytes() for path in paths]
    again = save_plates(tmp_path, {"phase_map": plates["phase_map"]})
    assert [path.read_bytes() for path in again] == first[:3]
    for path, width in zip(paths[::3], (COLUMN, PAGE, PAGE), strict=True):
        root = ElementTree.fromstring(path.read_bytes())
        assert float(root.attrib["width"].removesuffix("pt")) == pytest.approx(72 * width)
        text = path.read_text("utf-8")
        # Outlines only: no font has to be found, nothing is loaded, nothing depends on the day.
        assert "<text" not in text
        assert not re.search(r'href="(?!#)', text)
        assert "<dc:date>" not in text
    for path in paths[1::3]:
        content = path.read_bytes()
        assert content.startswith(b"%PDF")
        assert content.count(b"/FontFile2") == content.count(b"/FontDescriptor /")  # embedded
        assert b"/FontFile2" in content


def test_tables_hold_what_the_figures_show(saved_run: Path) -> None:
    run = open_run(saved_run)
    plates = run_plates(Reading(run))
    rows = list(csv.DictReader(io.StringIO(tidy_csv(plates["distances"].table()))))
    assert list(rows[0]) == [
        "variable", "chains", "seed", "step", "set", "predictor", "value", "unit",
    ]  # fmt: skip
    assert {row["unit"] for row in rows} == {"nats"}
    for cell in run.cells:
        read = {
            (int(row["step"]), row["set"], row["predictor"]): float(row["value"])
            for row in rows
            if (row["chains"], int(row["seed"])) == (str(cell.chains), cell.seed)
        }
        shown = cell.curves.distance
        assert len(read) == shown.size
        for (step, kind, predictor), value in read.items():
            expected = float(shown.sel(step=step, set=kind, predictor=predictor))
            assert value == expected or (np.isnan(value) and np.isnan(expected))


def test_a_table_of_axes_with_and_without_coordinates() -> None:
    table = xr.Dataset(
        {"a": (("x", "y"), [[1, 2]], {"units": "nats"}), "b": ((), "text"), "c": ("y", [0.1, 0.2])},
        coords={"y": [5, 7], "name": ("y", ["p", "q, r"])},
    )
    assert list(csv.reader(io.StringIO(tidy_csv(table)))) == [
        ["variable", "x", "y", "name", "value", "unit"],
        ["a", "0", "5", "p", "1", "nats"],
        ["a", "0", "7", "q, r", "2", "nats"],
        ["b", "", "", "", "text", ""],
        ["c", "", "5", "p", "0.1", ""],
        ["c", "", "7", "q, r", "0.2", ""],
    ]


def test_the_style_file_has_the_ink_of_the_page() -> None:
    path = resources.files("iclens.report") / "paper.mplstyle"
    style = matplotlib.rc_params_from_file(path, use_default_template=False)
    inks = {value for key, value in style.items() if key.endswith("color")}
    assert {f"#{ink.lstrip('#')}" for ink in inks} == {LIGHT["ink"]}


def test_figures_of_a_run_with_nothing_saved(tmp_path: Path) -> None:
    run = open_run(write_run(tmp_path / "run", (8,), (0,), {(8, 0): "missing"}))
    (plate,) = save_plates(tmp_path / "figures", run_plates(Reading(run)))[::3]
    assert plate.name == "phase_map.svg"


def test_figures_of_all_kinds_of_cells(tmp_path: Path) -> None:
    statuses = {(8, 0): "diverged", (8, 1): "unfinished", (32, 0): "failed", (32, 1): "damaged"}
    run = open_run(write_run(tmp_path / "run", (8, 32, "infinite"), (0, 1), statuses))
    assert len(save_plates(tmp_path / "figures", run_plates(Reading(run)))) == 9


@pytest.mark.slow
def test_one_figure_by_its_name(saved_run: Path, tmp_path: Path, capsys) -> None:
    assert dispatch(["figure", str(saved_run)]) == 0
    assert capsys.readouterr().out.splitlines()[:3] == ["phase_map", "distances", "losses"]
    assert dispatch(["figure", str(saved_run), "losses", "--out", str(tmp_path / "new")]) == 0
    written = [f"{tmp_path}/new/losses.{kind}" for kind in ("svg", "pdf", "csv")]
    assert capsys.readouterr().out.splitlines() == written
    assert sorted(map(str, (tmp_path / "new").iterdir())) == sorted(written)
    assert dispatch(["figure", str(saved_run), "loses"]) == 2
    assert "did you mean 'losses'?" in capsys.readouterr().err


def test_importing_the_report_loads_no_plotting_library() -> None:
    loaded = "import sys, iclens.report; print({'matplotlib', 'plotly', 'jax'} & {*sys.modules})"
    assert subprocess.check_output([sys.executable, "-c", loaded], text=True) == "set()\n"
