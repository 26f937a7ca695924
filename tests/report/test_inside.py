"""The models that run in the page: what they say is what Python says."""

from __future__ import annotations

import math
import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from playwright.sync_api import Page

from conftest import Open, until, write_run
from iclens.lab.store import Run, open_run
from iclens.predictors import reference_predictors
from iclens.report.page import write_page
from iclens.report.payload import SHOWN_SEQUENCES, kept_steps
from iclens.report.reading import Reading
from iclens.transformer import forward


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
    return {
        name: np.asarray(jnp.exp(value - jnp.log(jnp.exp(value).sum(-1, keepdims=True))))[0, -1]
        for name, value in logits.items()
    }


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


@pytest.mark.parametrize("chains", [2, 16, "infinite"])
def test_predictions_are_those_of_the_saved_model(
    open_page: Open, first_release: Run, chains: object
) -> None:
    for step in (0, 110, 600):
        page = at(open_page, first_release, chains, step)
        until(page, f"document.getElementById('inside-note').innerText == 'Model at step {step}.'")
        agrees(page, first_release, chains, step)


def test_a_sequence_is_chosen_and_edited(open_page: Open, first_release: Run) -> None:
    page = at(open_page, first_release, 2, 600)
    options = page.locator("#choose-sequence option").all_inner_texts()
    assert options[0] == "chain 1, a sequence"
    assert options[-1] == "fresh chain 4 (OOD)"
    before = shown_predictions(page)
    page.locator("#choose-sequence").select_option("fresh chain 4 (OOD)")
    assert shown_predictions(page) != before
    agrees(page, first_release, 2, 600)
    for typed in ("0", "0120 1201, 2", "0" * 16):
        page.locator("#states").fill(typed)
        assert page.locator("#states-fault").inner_text() == ""
        states = [int(digit) for digit in re.sub(r"\D", "", typed)]
        np.testing.assert_allclose(
            shown_predictions(page)["model"],
            expected_predictions(first_release, 2, 600, states)["model"],
            atol=0.003,
        )


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("0130", "State 3: expected a whole number from 0 to 2, got 3"),
        ("01<img src=x>", "State 3: expected a whole number from 0 to 2, got <"),
        ("", "Expected at least one state"),
        ("0" * 17, "Expected at most 16 states, the model's context; got 17"),
    ],
)
def test_wrong_states_are_told_and_nothing_is_lost(
    open_page: Open, first_release: Run, typed: str, message: str
) -> None:
    page = at(open_page, first_release, 2, 600)
    before = shown_predictions(page)
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
    for chains, shown in ((2, 2), (16, 8)):
        page = at(open_page, first_release, chains, 600)
        page.wait_for_selector("#plane circle", state="attached")
        assert page.locator("#plane circle").count() == shown * SHOWN_SEQUENCES
        titles = {circle.text_content() for circle in page.locator("#plane circle").all()}
        assert titles == {f"chain {chain + 1}" for chain in range(shown)}


def test_the_circuit_follows_the_step(open_page: Open, first_release: Run) -> None:
    trace = Reading(first_release).traces["chains=2,seed=0"]
    for step in (7, 600):
        page = at(open_page, first_release, 2, step)
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
        until(page, "document.querySelectorAll('#plane circle').length > 0")
        page.wait_for_timeout(300)
        seen.add(page.locator("#plane").inner_html())
    assert len(seen) == 4
    page.locator("#choose-chains").select_option("∞")
    page.wait_for_selector("#predictions tbody tr:nth-child(3)")
    until(page, "document.querySelectorAll('#predictions tbody tr').length == 3")
    assert list(shown_predictions(page)) == ["model", "1-Gen", "2-Gen"]


def test_checkpoints_that_fit_are_kept(saved_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reading = Reading(open_run(saved_run))
    monkeypatch.setattr("iclens.report.payload.WEIGHTS_BYTES", 10_000_000)
    everything = kept_steps(reading)
    size = sum(a[0].size for n, a in reading.run.cells[0].checkpoints.items() if n != "step")
    for cell in reading.run.cells:
        assert sorted(everything[cell.name]) == cell.steps
    monkeypatch.setattr("iclens.report.payload.WEIGHTS_BYTES", 2 * size * 20)
    monkeypatch.setattr("iclens.report.payload.WEIGHTS_BYTES_A_CELL", 0)
    few = kept_steps(reading)
    assert sum(map(len, few.values())) == 20
    for cell in reading.run.cells:
        assert few[cell.name][0] == cell.steps[-1]  # each cell has its last


def test_a_page_without_room_says_so(
    open_page: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WEIGHTS_BYTES", "WEIGHTS_BYTES_A_CELL", "CHAINS_BYTES"):
        monkeypatch.setattr(f"iclens.report.payload.{name}", 0)
    page = open_page(write_page(Reading(open_run(write_run(tmp_path / "run", (8,), (0,))))))
    until(page, "document.getElementById('inside-note').innerText.includes('no parameters')")
    assert page.locator("#inside").is_hidden()


def test_chain_sets_that_do_not_fit_are_left_out(
    open_page: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("iclens.report.payload.CHAINS_BYTES", 4 * 16 * 8)
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
