"""The report of a run: one offline page and the figures, made from the saved run alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from iclens.interrupts import held_back

if TYPE_CHECKING:
    from iclens.lab.store import Run
else:  # so that importing this package costs nothing
    Run = Any


def write_report(run: Run) -> Path:
    """Write the figures, also of `theory/`, and `report.html` of a run; returns the page's path.

    A run that was stopped, or has failed or missing cells, gets the page of what there is, which
    says what is missing and how to get it.
    """
    with held_back():
        from iclens.report.figures import write_figures
        from iclens.report.page import write_page
        from iclens.report.reading import Reading
        from iclens.report.theory import write_theory_figures

    reading = Reading(run)
    write_figures(reading)
    write_theory_figures(run.path / "theory")
    return write_page(reading)
