"""The report of a run: one offline page and the figures, made from the saved run alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from iclens.interrupts import held_back
from iclens.names import unknown

if TYPE_CHECKING:
    from xarray import Dataset

    from iclens.lab.store import Run
else:  # so that importing this package costs nothing
    Dataset = Run = Any


def write_report(run: Run) -> Path:
    """Write the figures, also of `theory/`, and `report.html` of a run; returns the page's path.

    A run that was stopped, or has failed or missing cells, gets the page of what there is, which
    says what is missing and how to get it.
    """
    with held_back():
        from iclens.report.figures import run_plates
        from iclens.report.page import write_page
        from iclens.report.plates import save_plates
        from iclens.report.reading import Reading
        from iclens.report.theory import theory_plates

    reading = Reading(run)
    save_plates(run.path / "figures", run_plates(reading))
    save_plates(run.path / "theory" / "figures", theory_plates(run.path / "theory"))
    return write_page(reading)


def compare(runs: Sequence[Run], path: Path) -> Path:
    """Write runs side by side, one offline page, to `path`; returns it."""
    with held_back():
        from iclens.report.comparison import write_comparison

    return write_comparison(runs, path)


def write_scores(scores: Dataset, folder: Path) -> list[Path]:
    """Write `score.nc`, `score.html` and figures of scores to a folder; returns the paths.

    `scores` are those of `iclens.score_contexts`; what `iclens score` adds to their attributes is
    told where it is there.
    """
    with held_back():
        from iclens.report.scores import save_scores

    return save_scores(scores, folder)


def figure_names(run: Run) -> list[str]:
    """The figures that can be made of a run: its own, `TRACE/NAME` and `theory/NAME`."""
    return list(_plates(run))


def write_figure(run: Run, name: str, folder: Path | None = None) -> list[Path]:
    """Write one figure as SVG and PDF and the table behind it as CSV; returns the paths.

    They go where the report has them, or into `folder`.  Raises `ValueError`, with the nearest
    name, if the run has no such figure.
    """
    plates = _plates(run)
    if name not in plates:
        raise ValueError(unknown("figure of this run", name, list(plates)))
    place, plate = plates[name]
    saved: list[Path] = plate.save(place if folder is None else folder / name)
    return saved


def _plates(run: Run) -> dict[str, tuple[Path, Any]]:
    """The figures of a run by name: where the report has them, and how they are made."""
    with held_back():
        from iclens.report.circuits import circuit_plates
        from iclens.report.figures import run_plates
        from iclens.report.reading import Reading
        from iclens.report.theory import theory_plates

    figures, theory = run.path / "figures", run.path / "theory"
    found = {name: (figures / name, plate) for name, plate in run_plates(Reading(run)).items()}
    for path in sorted((run.path / "circuits").glob("*.nc")):
        try:
            plates = circuit_plates(path)
        except ValueError:  # it is damaged, and the others are not
            continue
        for name, plate in plates.items():
            found[f"{path.stem}/{name}"] = figures / path.stem / name, plate
    for name, plate in theory_plates(theory).items():
        found[f"theory/{name}"] = theory / "figures" / name, plate
    return found
