"""The models that run in the page: what they say is what Python says."""

from __future__ import annotations

import math
import re
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from playwright.sync_api import Page

from conftest import RECIPE, Open, until, write_run
from iclens.lab.files import read_dataset, write_dataset
from iclens.lab.recipe import TaskConfig
from iclens.lab.store import Run, open_run
from iclens.predictors import reference_predictors
from iclens.report.blocks import SHOWN_SEQUENCES, _planes, kept_steps
from iclens.report.page import write_page
from iclens.report.reading import Reading
from iclens.training import TrainingConfig
from iclens.transformer import TransformerConfig, forward


def at(open_page: Open, run: Run, chains: object, step: int) -> Page:
    page = open_page(run.path / "report.html", view=f"#K={chains}&seed=0&step={step}")
    page.wait_for_selector("#predictions tbody tr")
    return page


def shown_predictions(page: Page) -> dict[str, list[float]]:
    """Probabilities that the page shows, by predictor."""
    rows = page.locator("#predictions tbody tr").all()
    return {
        row.locator("th").inner_text(): [
            float(text.strip()) for text in row.locator("td").all_inner_texts()[:-1]
        ]
        for row in rows
    }


def expected_predictions(
    run: Run, chains: object, step: int, states: list[int]
) -> dict[str, list[float]]:
    cell = run.cell(chains, 0)  # type: ignore[arg-type]
    batch = np.array([states])
    logits = {"model": forward(cell.model(step), batch).logits}
    logits |= {n: p(batch) for n, p in reference_predictors(cell.chain_set, cell.prior).items()}
    return {name: np.asarray(jax.nn.softmax(value))[0, -1] for name, value in logits.items()}


def agrees(page: Page, run: Run, chains: object, step: int) -> None:
    states = [int(digit) for digit in page.locator("#states").input_value()]
    shown = shown_predictions(page)
    expected = expected_predictions(run, chains, step, states)
    assert list(shown) == list(expected)
    for name, probabilities in expected.items():
        # Half precision of the parameters, and three digits on the page.
        np.testing.assert_allclose(
            shown[name], probabilities, atol=0.003 if name == "model" else 6e-4
        )


@pytest.mark.parametrize("chains", [16, pytest.param("infinite", marks=pytest.mark.slow)])
def test_predictions_are_those_of_the_saved_model(
    open_page: Open, first_release: Run, chains: object
) -> None:
    page = at(open_page, first_release, chains, 600)
    for step in (600, 0):
        page.locator("#choose-step").fill(str(first_release.cell(2).steps.index(step)))
        until(page, f"document.getElementById('inside-note').innerText == 'Model at step {step}.'")
        agrees(page, first_release, chains, step)


def test_a_sequence_is_chosen_and_edited(open_page: Open, first_release: Run) -> None:
    page = at(open_page, first_release, 2, 600)
    options = page.locator("#choose-sequence option").all_inner_texts()
    assert options[0] == "chain 1, a sequence"
    assert options[-2:] == ["fresh chain 4 (OOD)", "your states"]
    before = shown_predictions(page)
    page.locator("#choose-sequence").select_option("fresh chain 4 (OOD)")
    assert shown_predictions(page) != before
    agrees(page, first_release, 2, 600)
    for typed in ("0120 1201, 2012012", "0" * 16):  # of one length, for which Python compiles once
        page.locator("#states").fill(typed)
        assert page.locator("#states-fault").inner_text() == ""
        states = [int(digit) for digit in re.sub(r"\D", "", typed)]
        np.testing.assert_allclose(
            shown_predictions(page)["model"],
            expected_predictions(first_release, 2, 600, states)["model"],
            atol=0.003,
        )


def test_wrong_states_are_told_and_nothing_is_lost(open_page: Open, first_release: Run) -> None:
    page = at(open_page, first_release, 2, 600)
    before = shown_predictions(page)
    for typed, message in (
        ("0130", "State 3: expected a whole number from 0 to 2, got 3"),
        ("01<img src=x>", "State 3: expected a whole number from 0 to 2, got <"),
        ("", "Expected at least one state"),
        ("0" * 17, "Expected at most 16 states, the model's context; got 17"),
    ):
        page.locator("#states").fill(typed)
        assert page.locator("#states-fault").inner_text() == message
        assert page.locator("#states").get_attribute("aria-invalid") == "true"
        assert shown_predictions(page) == before


def test_attention_is_that_of_the_saved_model(open_page: Open, first_release: Run) -> None:
    page = at(open_page, first_release, 16, 600)
    states = [int(digit) for digit in page.locator("#states").input_value()]
    found = forward(first_release.cell(16).model(600), np.array([states])).attention
    assert page.locator("#attention canvas").count() == 2
    for layer, pattern in enumerate(found):
        bars = page.locator(f"#attention .head:nth-child({layer + 1}) rect").all()
        shown = [float(bar.text_content().split(": ")[1].removesuffix(" %")) for bar in bars]
        np.testing.assert_allclose(shown, 100 * np.asarray(pattern[0, 0, -1]), atol=0.3)
        blue = [place for place, bar in enumerate(bars) if "G2" in bar.get_attribute("fill")]
        assert blue == [n for n in range(1, 16) if states[n - 1] == states[-1]]


def test_task_vectors_have_a_place_for_each_sequence(open_page: Open, first_release: Run) -> None:
    page = at(open_page, first_release, 2, 600)
    for chains, shown in (("2", 2), ("16", 8)):
        page.locator("#choose-chains").select_option(chains)
        points = "document.querySelectorAll('#plane .point').length"
        until(page, f"{points} == {shown * SHOWN_SEQUENCES}")
        numbers = page.locator("#plane .point").all_text_contents()
        assert numbers == [str(c + 1) for c in range(shown) for _ in range(SHOWN_SEQUENCES)]


def test_the_sequence_is_where_its_task_vector_is(open_page: Open, first_release: Run) -> None:
    """The ring of a sequence lies on the point that the library computed for it."""
    page = at(open_page, first_release, 16, 600)
    ring, point = page.locator("#plane .ring"), page.locator("#plane .point").first
    assert page.locator("#choose-sequence option:checked").inner_text() == "chain 1, a sequence"
    for axis, lift in (("x", 0), ("y", 4)):
        place = float(point.get_attribute(axis)) - lift
        assert float(ring.get_attribute(f"c{axis}")) == pytest.approx(place, abs=0.6)
    page.locator("#states").fill("0")
    assert ring.get_attribute("cx") != point.get_attribute("x")


def test_planes_are_the_principal_components_turned_to_the_last() -> None:
    rng = np.random.default_rng(0)
    last = rng.standard_normal((30, 6)) * np.array([4, 2, 0.5, 0.4, 0.3, 0.1])
    turn = np.linalg.qr(rng.standard_normal((6, 6)))[0]
    planes = _planes([last @ turn + 3, last])
    centred = last - last.mean(0)
    u, scale, _ = np.linalg.svd(centred, full_matrices=False)
    np.testing.assert_allclose(np.abs(planes["points"][1]), np.abs(u[:, :2] * scale[:2]), atol=1e-5)
    # A model that is the same but for the directions of its stream has the same picture.
    np.testing.assert_allclose(planes["points"][0], planes["points"][1], atol=1e-5)
    np.testing.assert_allclose(planes["share"][1], scale[:2] ** 2 / (scale**2).sum(), rtol=1e-5)
    for place, phi in enumerate((last @ turn + 3, last)):
        shown = (phi - planes["mean"][place]) @ planes["axes"][place].T
        np.testing.assert_allclose(shown, planes["points"][place], atol=1e-5)
    assert np.all(_planes([np.ones((4, 3))])["points"] == 0)


def test_the_circuit_follows_the_step(open_page: Open, first_release: Run) -> None:
    trace = Reading(first_release).traces["chains=2,seed=0"]
    page = at(open_page, first_release, 2, 600)
    for step in (600, 7):
        page.locator("#choose-step").fill(str(first_release.cell(2).steps.index(step)))
        until(page, f"document.getElementById('trace-note').innerText.includes('step {step}:')")
        here = trace.sel(step=step)
        kept = int(here.circuit.sum())
        note = page.locator("#trace-note").inner_text()
        assert note.startswith(f"Traced at step {step}: {kept} of {trace.sizes['edge']} edges")
        assert page.locator("#circuit path.kept").count() == kept
        words = page.locator("#verdicts li").all_inner_texts()
        assert [word.startswith("yes") for word in words] == here.criterion_holds.values.tolist()
        effects = dict(
            path.text_content().replace("\N{MINUS SIGN}", "-").split(": ")
            for path in page.locator("#circuit path").all()
        )
        for edge, value in zip(trace.edge.values, here.edge_kl.sel(set="id").values, strict=True):
            assert math.isclose(
                float(effects[edge].split()[0]), max(0, value), rel_tol=0.06, abs_tol=1e-9
            )
        cells = page.locator("#edges rect title").count()
        assert cells == trace.sizes["edge"] * trace.sizes["step"]


def test_a_model_that_was_not_traced_says_how(open_page: Open, first_release: Run) -> None:
    page = at(open_page, first_release, 16, 600)
    assert page.locator("#traced").is_hidden()
    command = page.locator("#trace-command").inner_text()
    assert command == f"iclens trace {first_release.path} --chains 16 --seed 0 --step all"


def test_all_of_it_follows_the_slider(open_page: Open, first_release: Run) -> None:
    page = at(open_page, first_release, 2, 600)
    seen = {page.locator("#plane").inner_html()}
    for place in (0, 4, 9):
        page.locator("#choose-step").fill(str(place))
        step = first_release.cell(2).steps[place]
        until(page, f"document.getElementById('inside-note').innerText == 'Model at step {step}.'")
        agrees(page, first_release, 2, step)
        seen.add(page.locator("#plane").inner_html())
    assert len(seen) == 4
    page.locator("#choose-chains").select_option("∞")
    page.wait_for_selector("#predictions tbody tr:nth-child(3)")
    until(page, "document.querySelectorAll('#predictions tbody tr').length == 3")
    assert list(shown_predictions(page)) == ["model", "1-Gen", "2-Gen"]


@pytest.mark.slow
def test_another_model_has_its_own_sequence_until_the_reader_has_one(
    open_page: Open, first_release: Run
) -> None:
    page = at(open_page, first_release, 2, 600)
    first = page.locator("#states").input_value()
    page.locator("#choose-chains").select_option("16")
    until(page, f"document.getElementById('states').value != '{first}'")
    assert page.locator("#choose-sequence option:checked").inner_text() == "chain 1, a sequence"
    agrees(page, first_release, 16, 600)
    typed = "01201201201201" + "01"
    page.locator("#states").fill(typed)
    assert page.locator("#choose-sequence option:checked").inner_text() == "your states"
    page.locator("#choose-chains").select_option("2")
    until(page, "document.querySelectorAll('#plane .point').length == 24")
    assert page.locator("#states").input_value() == typed
    agrees(page, first_release, 2, 600)
    # The address links it.
    address = page.evaluate("location.hash")
    assert address == f"#K=2&seed=0&step=600&states={typed}"
    again = open_page(first_release.path / "report.html", view=address)
    again.wait_for_selector("#predictions tbody tr")
    assert shown_predictions(again) == shown_predictions(page)


SHAPES = {
    "many states": replace(RECIPE, task=TaskConfig(states=12, context=48)),
    "heads, weights": replace(
        RECIPE,
        task=replace(RECIPE.task, weights="dirichlet"),
        model=TransformerConfig(heads=2, positions="rotary", activation="gelu"),
    ),
    "attention only": replace(
        RECIPE,
        model=TransformerConfig(attention_only=True, norm="layer", positions="absolute"),
        train=TrainingConfig(steps=20, evaluations=1),
    ),
    "one layer": replace(
        RECIPE,
        model=TransformerConfig(layers=1),
        train=TrainingConfig(steps=20, evaluations=1),
    ),
    "three layers": replace(RECIPE, model=TransformerConfig(layers=3, norm="none")),
}


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_models_of_other_shapes(open_page: Open, tmp_path: Path, shape: str) -> None:
    recipe = SHAPES[shape]
    run = open_run(write_run(tmp_path / "run", (2,), (0,), recipe=recipe))
    write_page(Reading(run))
    step = run.cell(2).steps[-1]
    page = at(open_page, run, 2, step)
    many = recipe.task.states > 10
    page.locator("#states").fill("0, 11 3 0" if many else "0110")
    states = [0, 11, 3, 0] if many else [0, 1, 1, 0]
    expected = expected_predictions(run, 2, step, states)
    for name, probabilities in shown_predictions(page).items():
        np.testing.assert_allclose(probabilities, expected[name], atol=0.003)
    patterns = page.locator("#attention .head").count()
    assert patterns == recipe.model.heads * recipe.model.layers
    traceable = recipe.model.layers > 1
    assert page.locator("#trace-command").is_visible() == traceable
    assert page.locator("#untraced-never").is_visible() != traceable


@pytest.mark.slow
def test_traces_of_lost_cells_and_of_other_shapes_do_no_harm(
    open_page: Open, first_release: Run, tmp_path: Path
) -> None:
    path = tmp_path / "run"
    shutil.copytree(first_release.path, path)
    circuits = path / "circuits"
    trace = read_dataset(circuits / "chains=2,seed=0,step=all.nc")
    bare = trace.isel(step=[0]).drop_vars(["phase", "clear"])
    write_dataset(circuits / "chains=16,seed=0,step=0.nc", bare)
    write_dataset(circuits / "chains=16,seed=0,step=1.nc", trace.isel(step=[1], criterion=[0]))
    write_dataset(circuits / "chains=infinite,seed=0,step=1.nc", trace.drop_vars("circuit"))
    write_dataset(circuits / "chains=77,seed=0,step=1.nc", trace)  # no cell of this run
    with (path / "cells" / "chains=2,seed=0" / "curves.nc").open("ab") as file:
        file.write(b"x")
    reading = Reading(open_run(path))
    assert set(reading.traces) == {"chains=2,seed=0", "chains=16,seed=0"}
    assert [fault.split(":")[0] for fault in reading.damaged_traces] == [
        "chains=16,seed=0,step=1.nc",
        "chains=infinite,seed=0,step=1.nc",
    ]
    page = open_page(write_page(reading), view="#K=2&seed=0")
    page.wait_for_selector("#circuit path.kept")
    assert page.locator("#inside").is_hidden()
    assert "Traced at step 600" in page.locator("#trace-note").inner_text()


def test_checkpoints_that_fit_are_kept(saved_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reading = Reading(open_run(saved_run))
    monkeypatch.setattr("iclens.report.blocks.WEIGHTS_BYTES", 10_000_000)
    everything = kept_steps(reading)
    size = sum(a[0].size for n, a in reading.run.cells[0].checkpoints.items() if n != "step")
    for cell in reading.run.cells:
        assert sorted(everything[cell.name]) == cell.steps
    monkeypatch.setattr("iclens.report.blocks.WEIGHTS_BYTES", 2 * size * 20)
    monkeypatch.setattr("iclens.report.blocks.WEIGHTS_BYTES_A_CELL", 0)
    few = kept_steps(reading)
    assert sum(map(len, few.values())) == 20
    for cell in reading.run.cells:
        assert few[cell.name][0] == cell.steps[-1]  # each cell has its last


@pytest.mark.slow
def test_a_page_without_room_says_so(
    open_page: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WEIGHTS_BYTES", "WEIGHTS_BYTES_A_CELL", "CHAINS_BYTES"):
        monkeypatch.setattr(f"iclens.report.blocks.{name}", 0)
    page = open_page(write_page(Reading(open_run(write_run(tmp_path / "run", (8,), (0,))))))
    until(page, "document.getElementById('inside-note').innerText.includes('no parameters')")
    assert page.locator("#inside").is_hidden()


@pytest.mark.slow
def test_chain_sets_that_do_not_fit_are_left_out(
    open_page: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("iclens.report.blocks.CHAINS_BYTES", 4 * 16 * 8)
    page = open_page(
        write_page(Reading(open_run(write_run(tmp_path / "run", (8, 64), (0,))))),
        view="#K=64&seed=0",
    )
    page.wait_for_selector("#predictions tbody tr")
    assert list(shown_predictions(page)) == ["model", "1-Gen", "2-Gen"]
    assert "too large for this page" in page.locator("#predictions-note").inner_text()
    page.locator("#choose-chains").select_option("8")
    until(page, "document.querySelectorAll('#predictions tbody tr').length == 5")


@pytest.mark.slow
def test_two_hundred_cells_are_a_small_page_that_is_soon_there(
    open_page: Open, tmp_path: Path
) -> None:
    chains = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
    path = write_page(Reading(open_run(write_run(tmp_path / "run", chains, range(20)))))
    assert path.stat().st_size < 40e6
    page = open_page(path, view="#K=1024&seed=19")
    # The map is there before the rest of the file is.
    drawn = page.evaluate("performance.getEntriesByName('map')[0].startTime")
    assert drawn < 2e3
    assert page.locator("#map .row").count() == 200
    page.wait_for_selector("#predictions tbody tr")
    assert next(iter(shown_predictions(page))) == "model"
