"""Ensembles: each member is what it is alone, up to rounding."""

from __future__ import annotations

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from iclens.chains import ChainPrior
from iclens.lab import ensemble
from iclens.lab.ensemble import padded
from iclens.lab.recipe import SweepConfig, load_recipe
from iclens.lab.store import create_run, open_run
from iclens.lab.sweep import run_sweep
from iclens.training import TrainingConfig, initial_state, train, train_ensemble
from iclens.transformer import Transformer, TransformerConfig

TINY = load_recipe("tiny")
RECIPE = dataclasses.replace(
    TINY,
    train=dataclasses.replace(TINY.train, steps=70, evaluations=4),
    evaluation=dataclasses.replace(TINY.evaluation, sequences=16),
    sweep=SweepConfig(chains=(2, 7, "infinite"), seeds=(0, 1)),
)
PRIOR = ChainPrior(3)
SETS = [PRIOR.sample(jax.random.key(k), k) for k in (2, 5, 9)]
CONFIG = TrainingConfig(steps=100, batch=8, evaluations=3)


def members():
    models = [
        Transformer(TransformerConfig(width=8), 3, 10, key=jax.random.key(k)) for k in range(3)
    ]
    return [initial_state(model, CONFIG) for model in models]


KEYS = [jax.random.key(10 + k) for k in range(3)]


def test_filled_up_sets_give_the_same_sequences() -> None:
    for chains in SETS:
        filled = padded(chains, 9)
        assert filled.count == 9
        for a, b in zip(chains.draw(KEYS[0], 500, 6), filled.draw(KEYS[0], 500, 6), strict=True):
            np.testing.assert_array_equal(a, b)
    assert padded(PRIOR, 9) is PRIOR


@pytest.mark.slow
def test_members_are_what_they_are_alone() -> None:
    filled = [padded(chains, 9) for chains in SETS]
    together = list(train_ensemble(members(), filled, CONFIG, keys=KEYS))
    for index, state in enumerate(members()):
        alone = list(train(state, SETS[index], CONFIG, key=KEYS[index]))
        assert [point[index].step for point in together] == [snapshot.step for snapshot in alone]
        for point, snapshot in zip(together, alone, strict=True):
            np.testing.assert_allclose(point[index].train_loss, snapshot.train_loss, atol=1e-5)
            for a, b in zip(
                jax.tree.leaves(point[index].state.model),
                jax.tree.leaves(snapshot.state.model),
                strict=True,
            ):
                np.testing.assert_allclose(a, b, atol=2e-4)
        assert int(together[-1][index].state.step) == 100


@pytest.mark.slow
def test_an_ensemble_goes_on_to_the_same_bits() -> None:
    filled = [padded(chains, 9) for chains in SETS]
    whole = list(train_ensemble(members(), filled, CONFIG, keys=KEYS))
    states = [snapshot.state for snapshot in whole[1]]
    again = list(train_ensemble(states, filled, CONFIG, keys=KEYS))
    assert len(again) == len(whole) - 2
    for a, b in zip(jax.tree.leaves(again[-1]), jax.tree.leaves(whole[-1]), strict=True):
        np.testing.assert_array_equal(a, b)
    with pytest.raises(ValueError, match=r"members at one step, got \[0, 0?"):
        list(train_ensemble([members()[0], states[1]], filled[:2], CONFIG, keys=KEYS[:2]))


@pytest.mark.slow
def test_a_member_that_diverges_stops_no_other() -> None:
    states = members()
    states[1] = eqx.tree_at(lambda s: s.model.embedding, states[1], jnp.full((3, 8), jnp.nan))
    filled = [padded(chains, 9) for chains in SETS]
    points = list(train_ensemble(states, filled, CONFIG, keys=KEYS))
    assert [point[1] is None for point in points] == [False, False, True, True]
    assert points[1][1].diverged == 0
    undisturbed = list(train_ensemble(members(), filled, CONFIG, keys=KEYS))
    for index in (0, 2):
        for a, b in zip(
            jax.tree.leaves(points[-1][index].state),
            jax.tree.leaves(undisturbed[-1][index].state),
            strict=True,
        ):
            np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_cells_of_an_ensemble_are_saved_as_others_are(tmp_path, monkeypatch) -> None:
    alone = create_run(tmp_path / "alone", RECIPE)
    assert run_sweep(alone) == {}
    together = create_run(tmp_path / "together", RECIPE)
    calls = []
    real = ensemble.save_snapshot

    def stop(cell, snapshot):
        calls.append(cell.name)
        if len(calls) == 9:  # in the middle of the third evaluation of the first group
            raise KeyboardInterrupt
        return real(cell, snapshot)

    monkeypatch.setattr(ensemble, "save_snapshot", stop)
    with pytest.raises(KeyboardInterrupt):
        run_sweep(together, ensemble=4)
    monkeypatch.undo()
    events = []
    assert run_sweep(together, ensemble=4, on_event=events.append) == {}
    assert sum(event.kind == "done" for event in events) == 6
    for one, other in zip(open_run(alone.path).cells, open_run(together.path).cells, strict=True):
        assert other.status == "done"
        assert one.curves.attrs == other.curves.attrs
        np.testing.assert_allclose(one.curves.loss, other.curves.loss, atol=2e-4)
        np.testing.assert_allclose(one.curves.distance, other.curves.distance, atol=2e-3)
        np.testing.assert_array_equal(one.curves.phase, other.curves.phase)


@pytest.mark.slow
def test_a_member_that_cannot_be_saved_fails_alone(tmp_path, monkeypatch) -> None:
    run = create_run(tmp_path / "run", dataclasses.replace(RECIPE, sweep=SweepConfig((2, 7), (0,))))
    real = ensemble.save_snapshot

    def full(cell, snapshot):
        if cell.chains == 2 and snapshot.step > 0:
            raise OSError(28, "No space left on device")
        return real(cell, snapshot)

    monkeypatch.setattr(ensemble, "save_snapshot", full)
    failed = run_sweep(run, ensemble=2)
    assert list(failed) == ["chains=2,seed=0"]
    assert "No space left on device" in failed["chains=2,seed=0"]
    assert [cell.status for cell in open_run(run.path).cells] == ["failed", "done"]


@pytest.mark.slow
def test_an_ensemble_that_needs_too_much_memory_is_halved(tmp_path, monkeypatch) -> None:
    recipe = dataclasses.replace(RECIPE, sweep=SweepConfig((2, 3, 5, 7), (0,)))
    pairs = create_run(tmp_path / "pairs", recipe)
    assert run_sweep(pairs, ensemble=2) == {}
    run = create_run(tmp_path / "run", recipe)
    sizes = []

    def small(states, *arguments, **options):
        sizes.append(len(states))
        if len(states) > 2:
            raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")
        return train_ensemble(states, *arguments, **options)

    real = ensemble.begin

    def begin(cell):
        if cell.chains == 5 and sizes:
            raise OSError(28, "No space left on device")
        return real(cell)

    monkeypatch.setattr(ensemble, "train_ensemble", small)
    monkeypatch.setattr(ensemble, "begin", begin)
    failed = run_sweep(run, ensemble=4)
    assert sizes == [4, 2, 1]  # all; half; what is left of the other half
    assert list(failed) == ["chains=5,seed=0"]
    for cell, other in zip(open_run(run.path).cells, open_run(pairs.path).cells, strict=True):
        if cell.chains != 5:
            np.testing.assert_allclose(cell.curves.loss, other.curves.loss, atol=2e-4)
