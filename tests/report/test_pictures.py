"""The pictures are well-formed, and show what the predictors really predict."""

from __future__ import annotations

import re
from collections import Counter
from itertools import combinations, pairwise
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from conftest import write_run
from iclens.lab.recipe import Diversity, Recipe, SweepConfig, TaskConfig
from iclens.lab.store import open_run
from iclens.phases import PHASES
from iclens.report.pictures import CHAINS, SEQUENCE, phase_picture, recognised, task_picture
from iclens.report.reading import Reading
from iclens.transformer import TransformerConfig

SVG = "{http://www.w3.org/2000/svg}"
COLOUR = re.compile(r"none|currentColor|var\(--(ink|muted|rule|raised|G1|G2|M1|M2)\)")


def checked(svg: ElementTree.Element) -> ElementTree.Element:
    """A picture that has a label, no ids, no script and no colours of its own."""
    assert svg.get("role") == "img"
    assert len(svg.get("aria-label", "")) > 20
    left, top, width, height = map(float, svg.get("viewBox", "").split())
    for element in svg.iter():
        assert element.tag.removeprefix(SVG) in ("svg", "path", "rect", "circle", "text")
        assert element.get("id") is None
        for name in ("fill", "stroke"):
            assert COLOUR.fullmatch(element.get(name, "none"))
        if element.tag == f"{SVG}text":
            assert left <= float(element.get("x", "")) <= width
            assert top + 8 <= float(element.get("y", "")) <= height - 2
    return svg


def bars(svg: ElementTree.Element) -> np.ndarray:
    """Heights of the bars, as shares of their sum."""
    heights = [float(r.get("height", "")) for r in svg.iter(f"{SVG}rect") if r.get("class")]
    return np.array(heights) / sum(heights)


def expected(phase: str) -> list[float]:
    """By walking through the example, without arrays."""
    states = SEQUENCE.tolist()
    if phase == "G1":
        return [Counter(states)[state] / len(states) for state in range(3)]
    following = Counter(b for a, b in pairwise(states) if a == states[-1])
    if phase == "G2":
        return [following[state] / following.total() for state in range(3)]
    weights = []
    for transition, stationary in zip(CHAINS.transition, CHAINS.stationary, strict=True):
        weight = 1.0
        for place, state in enumerate(states):
            before = states[place - 1]
            weight *= stationary[state] if phase == "M1" or not place else transition[before, state]
        weights.append(weight)
    rows = CHAINS.transition[:, states[-1]]
    return [
        sum(w * row[state] for w, row in zip(weights, rows, strict=True)) / sum(weights)
        for state in range(3)
    ]


@pytest.mark.parametrize("phase", PHASES)
def test_bars_are_what_a_phase_predicts(phase: str) -> None:
    svg = checked(ElementTree.fromstring(phase_picture(phase)))
    np.testing.assert_allclose(bars(svg), expected(phase), atol=1e-3)
    assert svg.get("style") == f"color: var(--{phase})"
    assert svg.get("aria-label", "").startswith(f"{phase}: ")


def test_pictures_differ_only_in_what_is_used() -> None:
    """One sequence in all; G2 uses what followed the current state, and only that."""
    sequences = {}
    for phase in PHASES:
        circles = list(ElementTree.fromstring(phase_picture(phase)).iter(f"{SVG}circle"))
        states, mark = circles[: len(SEQUENCE)], circles[len(SEQUENCE) :]
        assert [circle.get("cx") for circle in mark] == [states[-1].get("cx")]
        sequences[phase] = [circle.get("fill") == "currentColor" for circle in states]
    followers = [False, *(SEQUENCE[:-1] == SEQUENCE[-1]).tolist()]
    assert sequences == {p: followers if p == "G2" else [True] * len(SEQUENCE) for p in PHASES}


def test_the_two_memories_recognise_different_chains() -> None:
    """So that no two of the four predictions look alike."""
    assert recognised("M1").argmax() != recognised("M2").argmax()
    for one, other in combinations(PHASES, 2):
        assert np.abs(np.subtract(expected(one), expected(other))).sum() > 0.3


def test_what_is_no_phase_is_refused() -> None:
    with pytest.raises(ValueError, match="expected one of G1, G2, M1, M2, got 'none'"):
        phase_picture("none")


def pictures(html: str) -> list[ElementTree.Element]:
    """The four pictures of the task, all of it well-formed."""
    root = ElementTree.fromstring(html.replace("&nbsp;", " "))
    assert (root.tag, root.get("class")) == ("ol", "task")
    assert [[child.tag for child in item] for item in root] == [["figure"]] * 4
    assert all(item.find("figure/figcaption/b") is not None for item in root)
    return [checked(svg) for svg in root.iter(f"{SVG}svg")]


def run_of(
    path: Path,
    states: int = 4,
    chains: tuple[Diversity, ...] = (2, 8),
    model: TransformerConfig | None = None,
) -> Reading:
    recipe = Recipe(
        task=TaskConfig(states=states),
        model=model or TransformerConfig(),
        sweep=SweepConfig(chains=chains),
    )
    path.mkdir()
    (path / "recipe.toml").write_text(recipe.to_toml(), encoding="utf-8")
    return Reading(open_run(path))


@pytest.mark.parametrize("states", [2, 12, 13, 30, 40])
def test_the_task_at_any_number_of_states(tmp_path: Path, states: int) -> None:
    reading = run_of(tmp_path / "run", states)
    html = task_picture(reading)
    chains, sequence, _, prediction = pictures(html)
    texts = [text.text for text in sequence.iter(f"{SVG}text")]
    current = int(texts[texts.index("now") - 1] or "")
    first = reading.run.cell(8).chain_set
    assert first is not None
    np.testing.assert_allclose(bars(prediction), first.transition[0, current], atol=1e-3)
    numbers = [text for text in prediction.iter(f"{SVG}text") if (text.text or "").isdigit()]
    assert len(numbers) == (states if states <= 12 else 0)
    assert f"C = {states} states" in html.replace("&nbsp;", " ")
    assert ("first 30 states" in chains.get("aria-label", "")) == (states > 30)
    assert len(html) < 100_000


def test_the_sequence_is_possible(tmp_path: Path) -> None:
    _, sequence, _, _ = pictures(task_picture(run_of(tmp_path / "run")))
    states = [t.text for t in sequence.iter(f"{SVG}text") if (t.text or "").isdigit()]
    assert len(states) == 13
    assert set(states) <= {"0", "1", "2", "3"}


@pytest.mark.parametrize(
    ("chains", "text", "shown", "more"),
    [
        ((1,), "A single chain", 1, False),
        ((1, 3), "here 3,", 3, False),
        ((8, "infinite"), "here 8,", 3, True),
        (("infinite",), "Fresh chains", 3, True),
    ],
)
def test_the_chains(
    tmp_path: Path, chains: tuple[Diversity, ...], text: str, shown: int, more: bool
) -> None:
    html = task_picture(run_of(tmp_path / "run", chains=chains))
    texts = [element.text for element in pictures(html)[0].iter(f"{SVG}text")]
    assert text in html
    assert texts == [f"chain {k + 1}" for k in range(shown)] + ["…"] * more


@pytest.mark.parametrize(
    ("model", "blocks"),
    [
        (TransformerConfig(), ["att1", "mlp1", "att2", "mlp2"]),
        (TransformerConfig(attention_only=True), ["att1", "att2"]),
        (TransformerConfig(layers=1, heads=2), ["att1", "2 heads", "mlp1"]),
        (TransformerConfig(layers=5), ["att1", "mlp1", "…", "mlp5"]),
        (TransformerConfig(layers=9, attention_only=True), ["att1", "att2", "…", "att9"]),
    ],
)
def test_the_model(tmp_path: Path, model: TransformerConfig, blocks: list[str]) -> None:
    html = task_picture(run_of(tmp_path / "run", model=model))
    texts = [element.text for element in pictures(html)[2].iter(f"{SVG}text")]
    assert texts == [*blocks, "embed", "out", "width D = 32"]
    assert ("MLPs of width" in html) != model.attention_only


def test_a_hostile_name_is_not_in_it(tmp_path: Path) -> None:
    path = write_run(tmp_path / "<script>alert(1)<!--&", chains=(2,), seeds=(0,))
    html = task_picture(Reading(open_run(path)))
    assert len(pictures(html)) == 4
    assert "script" not in html
