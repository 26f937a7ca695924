"""Where the chains of a run come from: its prior, and the file of chains that it may have."""

from __future__ import annotations

import hashlib
import re
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from iclens.chains import (
    ChainPrior,
    ChainSet,
    DirichletRows,
    DoublyStochasticPrior,
    Prior,
    SparsePrior,
)
from iclens.lab.recipe import Recipe

SAME = 1e-12
"""Relative difference up to which probabilities are the same: rows are divided by their sums."""


def prior_of(recipe: Recipe) -> Prior:
    """The chain prior of a recipe.

    Raises `ValueError` where it is fitted to chains that no law can be fitted to, or `OSError` if
    they cannot be read.
    """
    states, alpha, prior = recipe.task.states, recipe.task.concentration, recipe.prior
    match prior.kind:
        case "sparse":
            return SparsePrior(states, prior.successors, alpha)
        case "block":
            return DirichletRows.blocks(
                states, prior.blocks, concentration=alpha, outside=prior.outside
            )
        case "cyclic":
            return DirichletRows.cyclic(states, concentration=alpha, drift=prior.drift)
        case "doubly-stochastic":
            return DoublyStochasticPrior(states, prior.permutations, alpha)
        case "fitted":
            return _fitted(*_stamp(recipe.task.chains))
        case _:
            return ChainPrior(states, alpha)


def chains_of(recipe: Recipe) -> ChainSet | None:
    """The chains of the file that a recipe names, but for those of weight 0; None if it names none.

    Raises `OSError` if it cannot be read, `ValueError` if it holds no valid chains, was changed
    since a run copied it, or does not agree with the rest of the recipe.
    """
    task = recipe.task
    if not task.chains:
        return None
    chains = _read(*_stamp(task.chains))
    where = f"the {chains.count} chains of {Path(task.chains).name}"
    if chains.states != task.states:
        raise ValueError(
            f"task.states: expected {chains.states}, as {where} have, got {task.states}"
        )
    numbers = [count for count in recipe.sweep.chains if count != "infinite"]
    if numbers and max(numbers) > chains.count:
        raise ValueError(
            f"sweep.chains: expected at most {chains.count}, for {where} are all there are, "
            f"got {max(numbers)}"
        )
    if task.weights == "dirichlet" and len(set(chains.weights.tolist())) > 1:
        raise ValueError(
            f'task.weights: expected "equal", for {where} have their own, got "dirichlet"'
        )
    if recipe.prior.kind == "sparse":
        most = (chains.transition > 0).sum(-1)
        if (wrong := most > recipe.prior.successors).any():
            chain, row = np.argwhere(wrong)[0].tolist()
            raise ValueError(
                f"prior.successors: expected at least {most[chain, row]}, as many as row {row} of "
                f"chain {chain} of {Path(task.chains).name} has, got {recipe.prior.successors}"
            )
    return chains


def saved_chains(recipe: Recipe, folder: Path) -> tuple[Recipe, bytes]:
    """A recipe whose chains are a file in the folder of a run, and the content of that file.

    The file is called by its content, so that it cannot be changed, or taken for another, unseen.
    """
    chains = chains_of(recipe)
    assert chains is not None
    content = chains.to_npz()
    path = folder / f"chains-{hashlib.sha256(content).hexdigest()[:12]}.npz"
    return replace(recipe, task=replace(recipe.task, chains=str(path.resolve()))), content


def chains_difference(saved: Recipe, asked: Recipe) -> str:
    """What differs between the chains of two recipes that both have a file; empty if nothing."""
    one, other = chains_of(saved), chains_of(asked)
    assert one is not None
    assert other is not None
    if one.transition.shape != other.transition.shape:
        return f"{one.count} chains of {one.states} states against {other.count} of {other.states}"
    if (apart := ~np.isclose(one.transition, other.transition, rtol=SAME, atol=0)).any():
        chain, row, column = np.argwhere(apart)[0].tolist()
        values = [float(chains.transition[chain, row, column]) for chains in (one, other)]
        return (
            f"row {row} of chain {chain}, column {column}: {values[0]:.6g} against {values[1]:.6g} "
            f"(and {int(apart.sum()) - 1} more)"
        )
    if not np.allclose(one.weights, other.weights, rtol=SAME, atol=0):
        chain = int(np.abs(one.weights - other.weights).argmax())
        return f"weight of chain {chain}: {one.weights[chain]:g} against {other.weights[chain]:g}"
    if one.labels != other.labels:
        return f"labels: {one.labels} against {other.labels}"
    return ""


def _stamp(path: str) -> tuple[str, int, int]:
    """A file's path, time and size: cells are looked at again and again, files read once."""
    found = Path(path).stat()
    return path, found.st_mtime_ns, found.st_size


@lru_cache(maxsize=4)
def _read(path: str, time: int, size: int) -> ChainSet:
    named = re.fullmatch(r"chains-([0-9a-f]{12})\.npz", Path(path).name)
    if named and not hashlib.sha256(Path(path).read_bytes()).hexdigest().startswith(named[1]):
        raise ValueError(f"{path} was changed since the run began: its content has another name")
    chains = ChainSet.from_file(path)
    met = np.flatnonzero(chains.weights)  # K counts chains that can be met
    return chains if len(met) == chains.count else chains.take(met)


@lru_cache(maxsize=4)
def _fitted(path: str, time: int, size: int) -> DirichletRows:
    try:
        return DirichletRows.fitted(_read(path, time, size))
    except ValueError as error:
        raise ValueError(f'prior.kind = "fitted": {error}') from None
