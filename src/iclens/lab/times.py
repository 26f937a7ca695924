"""When the cells of a run did what, from their curves."""

from __future__ import annotations

import numpy as np
import xarray as xr

from iclens.lab.cell import Cell
from iclens.lab.store import Run
from iclens.phases import BEYOND, successive_phases
from iclens.theory.race import first_lasting


def curves(cell: Cell) -> xr.Dataset:
    """The curves of a cell that is done."""
    assert cell.curves is not None, cell.status
    return cell.curves


def finished_cells(run: Run) -> list[Cell]:
    return [c for c in run.cells if c.status == "done" and curves(c).attrs["outcome"] == "finished"]


def _distance(cell: Cell, predictor: str) -> np.ndarray:
    found: np.ndarray = curves(cell).distance.sel(set="id", predictor=predictor).values
    return found


def time_to_2_gen(cell: Cell) -> tuple[float, float]:
    """The last evaluation before, and the first from which on 2-Gen is nearer than 1-Gen."""
    return first_lasting(
        curves(cell).step.values, _distance(cell, "2-Gen") < _distance(cell, "1-Gen")
    )


def time_to_2_mem(cell: Cell) -> tuple[float, float]:
    """The same for the label M2."""
    return first_lasting(curves(cell).step.values, curves(cell).phase.values == "M2")


def time_to_switch(cell: Cell) -> tuple[float, float]:
    """The evaluations before and at the first time, from G2 on, that 2-Mem is nearer than 2-Gen.

    From the first clear label G2: in M1, before it, a model is nearer to 2-Mem already.
    """
    begun = int(((curves(cell).phase == "G2") & curves(cell).clear).values.argmax())
    nearer = _distance(cell, "2-Mem") < _distance(cell, "2-Gen")
    return first_lasting(curves(cell).step.values[begun:], nearer[begun:], at_end=False)


def visits_g2(cell: Cell) -> bool:
    """Whether G2 is a clear label at any evaluation."""
    return BEYOND["K1*"](successive_phases(curves(cell))[0])
