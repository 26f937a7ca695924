"""The report of a run: one offline page and the figures, made from the saved run alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from iclens.lab.store import Run
else:  # so that importing this package costs nothing
    Run = Any


def write_report(run: Run) -> Path:
    """Write `figures/*.svg` and `report.html` into the folder of a run; returns the page's path.

    A run that was stopped, or has failed or missing cells, gets the page of what there is, which
    says what is missing and how to get it.
    """
    from iclens.report.figures import write_figures
    from iclens.report.page import write_page
    from iclens.report.reading import Reading

    reading = Reading(run)
    write_figures(reading)
    return write_page(reading)
