"""Plates: a figure for papers as SVG and as PDF, and the table behind it."""

from __future__ import annotations

import contextlib
import csv
import io
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from itertools import chain
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import xarray as xr
from matplotlib.figure import Figure

from iclens.lab.files import write_file

COLUMN, PAGE = 3.4, 7.0
"""Widths in inches of one column and of the text block of a two-column paper."""
# Without the day, the same run gives the same bytes.
INKED = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
METADATA = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}


@dataclass(frozen=True)
class Plate:
    """A figure that is drawn when it is wanted."""

    draw: Callable[[], Figure]
    table: Callable[[], xr.Dataset]
    """The numbers that the figure shows."""

    def save(self, path: Path) -> list[Path]:
        """Write `path` with .svg, .pdf and .csv appended; returns these paths."""
        path.parent.mkdir(parents=True, exist_ok=True)
        contents = {}
        with _styled():
            figure = self.draw()
            for kind, metadata in METADATA.items():
                drawn = io.BytesIO()
                figure.savefig(drawn, format=kind, metadata=metadata)
                contents[kind] = drawn.getvalue()
        contents["csv"] = tidy_csv(self.table()).encode()
        paths = []
        for kind, content in contents.items():
            paths.append(path.with_name(f"{path.name}.{kind}"))
            write_file(paths[-1], content)
        return paths

    def image(self, colours: Mapping[str, str]) -> str:
        """The address of the figure as an image, for a page of `colours`, which shows through."""
        ink: Any = dict.fromkeys(INKED, colours["ink"])
        drawn = io.BytesIO()
        with _styled(), matplotlib.rc_context(ink):
            self.draw().savefig(drawn, format="svg", metadata=METADATA["svg"], transparent=True)
        return f"data:image/svg+xml;base64,{b64encode(drawn.getvalue()).decode()}"


@contextlib.contextmanager
def _styled() -> Iterator[None]:
    style = resources.files("iclens.report").joinpath("paper.mplstyle")
    with resources.as_file(style) as file, matplotlib.rc_context(fname=file):
        yield


def save_plates(folder: Path, plates: Mapping[str, Plate]) -> list[Path]:
    """Save plates in a folder under their names; returns the paths of all files."""
    return [path for name, plate in plates.items() for path in plate.save(folder / name)]


def tidy_csv(table: xr.Dataset) -> str:
    """A dataset as CSV, a row for each number: its variable, place on every axis, value and unit.

    An axis has a column for each of its coordinates, or one with the place where it has none.
    Axes that a variable does not have are empty, and so is a unit that is not known.
    """
    columns: dict[str, dict[str, Sequence[object]]] = {}
    for axis, size in table.sizes.items():
        along = {n: c.values.tolist() for n, c in table.coords.items() if c.dims == (axis,)}
        columns[str(axis)] = {str(n): c for n, c in along.items()} or {str(axis): range(size)}
    written = io.StringIO()
    writer = csv.writer(written, lineterminator="\n")
    writer.writerow(["variable", *chain.from_iterable(columns.values()), "value", "unit"])
    for name, variable in table.data_vars.items():
        values, unit = variable.values.ravel().tolist(), variable.attrs.get("units", "")
        for index, value in zip(np.ndindex(variable.shape), values, strict=True):
            at = dict(zip(variable.dims, index, strict=True))
            row = [
                along[at[axis]] if axis in at else ""
                for axis, names in columns.items()
                for along in names.values()
            ]
            writer.writerow([name, *row, value, unit])
    return written.getvalue()
