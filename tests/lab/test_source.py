"""Runs whose chains come from a file, and runs of other priors."""

from __future__ import annotations

import dataclasses
import pickle
import re
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from iclens.chains import ChainPrior, ChainSet, DirichletRows
from iclens.lab.cell import Cell
from iclens.lab.recipe import load_recipe
from iclens.lab.source import chains_of, prior_of
from iclens.lab.store import create_run, open_run, record_provenance
from iclens.lab.studies import context_recipes

CHAINS = ChainSet(
    ChainPrior(3).sample(jax.random.key(0), 6).transition, [1, 2, 1, 2, 1, 2], ("ä", "b", "火")
)
RECIPE = """
[task]
states = 3
context = 16
chains = "data/own.npz"
[prior]
kind = "fitted"
[model]
width = 16
[train]
steps = 150
evaluations = 3
[evaluation]
sequences = 16
[sweep]
chains = [2, 6]
"""


@pytest.fixture
def own(tmp_path) -> Path:
    """A recipe with its chains in a folder beside it."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "own.npz").write_bytes(CHAINS.to_npz())
    (tmp_path / "own.toml").write_text(RECIPE)
    return tmp_path / "own.toml"


def edited(own: Path, *changes: tuple[str, str]) -> Path:
    text = own.read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    own.write_text(text)
    return own


def test_a_run_has_its_chains_and_can_be_moved(own, tmp_path) -> None:
    run = create_run(tmp_path / "run", load_recipe(own))
    shutil.rmtree(own.parent / "data")
    record_provenance(run, {})
    assert str(tmp_path) not in (run.path / "provenance.json").read_text()
    moved = tmp_path / "elsewhere" / "moved"
    moved.parent.mkdir()
    run.path.rename(moved)
    cells = open_run(moved).cells
    assert [cell.chains for cell in cells] == [2, 6]
    np.testing.assert_allclose(cells[1].chain_set.transition, CHAINS.transition, rtol=1e-15)
    np.testing.assert_allclose(cells[1].chain_set.weights, CHAINS.weights, rtol=1e-15)
    assert cells[1].chain_set.labels == CHAINS.labels
    again = create_run(moved, load_recipe(moved / "recipe.toml"))  # as the command to go on does
    assert [path.name for path in again.path.glob("*.npz")] == [
        Path(load_recipe(moved / "recipe.toml").task.chains).name
    ]
    assert pickle.loads(pickle.dumps(cells[0])).chain_set.count == 2


def test_fewer_chains_are_drawn_from_the_file_by_the_cells_key(own, tmp_path) -> None:
    recipe = load_recipe(own)
    drawn = [Cell(tmp_path, recipe, 2, seed).chain_set for seed in range(8)]
    for chains in drawn:
        which = [
            int(np.flatnonzero(np.isclose(CHAINS.transition, matrix).all((1, 2)))[0])
            for matrix in chains.transition
        ]
        assert which == sorted(set(which))
        np.testing.assert_allclose(
            chains.weights, CHAINS.weights[which] / CHAINS.weights[which].sum()
        )
    assert len({chains.transition.tobytes() for chains in drawn}) > 1
    again = Cell(tmp_path, recipe, 2, 0).chain_set
    np.testing.assert_array_equal(again.transition, drawn[0].transition)


def test_other_chains_in_the_same_run_are_refused_with_the_difference(own, tmp_path) -> None:
    create_run(tmp_path / "run", load_recipe(own))
    create_run(tmp_path / "run", load_recipe(own))  # the same again are not
    other = CHAINS.transition.copy()
    other[2, 1] = [0.2, 0.3, 0.5]
    path = own.parent / "data" / "own.npz"
    for chains, message in (
        (ChainSet(other, CHAINS.weights, CHAINS.labels), "row 1 of chain 2, column 0: "),
        (ChainSet(CHAINS.transition, labels=CHAINS.labels), "weight of chain 0: 0.111111 against"),
        (ChainSet(CHAINS.transition, CHAINS.weights), "labels: ('ä', 'b', '火') against None"),
        (ChainSet(np.concatenate([other, other])), "6 chains of 3 states against 12 of 3"),
    ):
        path.write_bytes(chains.to_npz())
        with pytest.raises(ValueError, match=re.escape(message)):
            create_run(tmp_path / "run", load_recipe(own))
    none = edited(own, ('chains = "data/own.npz"', ""), ('"fitted"', '"dirichlet"'))
    with pytest.raises(ValueError, match=r"task\.chains: 'chains-[0-9a-f]{12}\.npz' against ''"):
        create_run(tmp_path / "run", load_recipe(none))


def test_a_changed_file_of_a_run_is_found(own, tmp_path) -> None:
    run = create_run(tmp_path / "run", load_recipe(own))
    path = Path(load_recipe(run.path / "recipe.toml").task.chains)
    path.write_bytes(ChainPrior(3).sample(jax.random.key(1), 6).to_npz())
    with pytest.raises(ValueError, match="was changed since the run began"):
        open_run(run.path).cells[0].chain_set  # noqa: B018


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([("states = 3", "states = 4")], "task.states: expected 3, as the 6 chains of own.npz ha"),
        ([("[2, 6]", "[2, 7, 'infinite']")], "sweep.chains: expected at most 6, for the 6 chains"),
        ([("[prior]", 'weights = "dirichlet"\n[prior]')], 'task.weights: expected "equal", for'),
        (
            [('"fitted"', '"sparse"')],
            "prior.successors: expected at least 3, as many as row 0 of chain 0 of own.npz has",
        ),
        ([("own.npz", "own.csv")], "No such file"),
        ([("own.npz", "bad.npz")], "it is no readable .npz file"),
        ([("own.npz", "zero.json")], 'prior.kind = "fitted": to fit a prior: expected positive'),
    ],
)
def test_chains_that_do_not_fit_are_refused_before_anything_is_written(
    own, tmp_path, changes, message
) -> None:
    (own.parent / "data" / "bad.npz").write_bytes(b"PK")
    (own.parent / "data" / "zero.json").write_text(
        "[[[0, 0.5, 0.5], [1, 0, 0], [1, 0, 0]], [[0, 0.5, 0.5], [1, 0, 0], [1, 0, 0]],"
        "[[0, 0.5, 0.5], [1, 0, 0], [1, 0, 0]], [[0, 0.5, 0.5], [1, 0, 0], [1, 0, 0]],"
        "[[0, 0.5, 0.5], [1, 0, 0], [1, 0, 0]], [[0, 0.5, 0.5], [1, 0, 0], [1, 0, 0]]]"
    )
    with pytest.raises((ValueError, OSError), match=re.escape(message)):
        create_run(tmp_path / "run", load_recipe(edited(own, *changes)))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([('"data/own.npz"', '"own.pkl"')], "task.chains: expected a file that ends in .npy"),
        ([('chains = "data/own.npz"', "")], 'prior.kind = "fitted": expected task.chains'),
        ([('"fitted"', '"sparse"\nsuccessors = 4')], "prior.successors: expected at most task.st"),
        ([('"fitted"', '"block"\nblocks = 4')], "prior.blocks: expected at most task.states = 3"),
        ([('"fitted"', '"fittet"')], "got 'fittet'; did you mean 'fitted'?"),
    ],
)
def test_a_recipe_that_cannot_be_is_refused(own, changes, message) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        load_recipe(edited(own, *changes))


def test_every_kind_of_prior_is_built(own) -> None:
    kinds = ("dirichlet", "sparse", "block", "cyclic", "doubly-stochastic")
    for kind in kinds:
        recipe = load_recipe(own)
        task = dataclasses.replace(recipe.task, chains="", concentration=0.5)
        prior = dataclasses.replace(recipe.prior, kind=kind)
        built = prior_of(dataclasses.replace(recipe, task=task, prior=prior))
        assert built.states == 3
        assert ("approximates" in built.two_gen) == (kind == "doubly-stochastic")
    fitted = prior_of(load_recipe(own))
    np.testing.assert_array_equal(
        fitted.pseudo_counts, DirichletRows.fitted(chains_of(load_recipe(own))).pseudo_counts
    )


def test_the_theory_refuses_other_priors() -> None:
    recipe = load_recipe("context")
    other = dataclasses.replace(recipe, prior=dataclasses.replace(recipe.prior, kind="cyclic"))
    with pytest.raises(ValueError, match=r"wants prior\.kind = 'dirichlet'.* got 'cyclic'"):
        context_recipes(other, (8, 16, 32))
