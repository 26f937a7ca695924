"""Small drawings that explain the phases and the task, as inline SVG.

They need no script, and take their colours from the page's variables, so that they follow its
scheme; `currentColor` is the phase's.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import jax
import numpy as np
from jaxtyping import Float, Int

from iclens.chains import ChainSet
from iclens.phases import PHASES
from iclens.report.reading import Reading, diversity_text, walk

LETTERS = "abc"
SEQUENCE = np.array([LETTERS.index(letter) for letter in "baaacbccc"])
"""What all four phases are shown on; the last state is the current one."""
CHAINS = ChainSet(
    np.array(
        [
            [[1, 3, 6], [4, 3, 3], [6, 2, 2]],
            [[5, 4, 1], [8, 1, 1], [1, 6, 3]],
            [[2, 5, 3], [2, 7, 1], [5, 4, 1]],
        ]
    )
    / 10
)
"""A set of three chains that is remembered: frequencies and pairs point to different ones."""
SHOWN_CHAINS = 3
SHOWN_STATES = 13
"""States of the sequence that are shown before the one to predict."""
NUMBERED = 12
"""States up to which bars are numbered."""
LARGEST_GRID = 30
"""States up to which a transition matrix is drawn whole."""
LARGEST_SET = 2**24
"""Probabilities in a chain set up to which it is drawn again for its picture."""

Probabilities = Float[np.ndarray, " state"]
Number = int | float
Point = tuple[Number, Number]


# --- the four phases


def pair_counts() -> Int[np.ndarray, "state state"]:
    """How often each state of the example is followed by each."""
    counts = np.zeros((len(LETTERS), len(LETTERS)), int)
    np.add.at(counts, (SEQUENCE[:-1], SEQUENCE[1:]), 1)
    return counts


def recognised(phase: str) -> Float[np.ndarray, " chain"]:
    """The posterior over the example's chains, from frequencies (M1) or from pairs (M2)."""
    if phase == "M1":
        log_weight = np.log(CHAINS.stationary) @ np.bincount(SEQUENCE)
    else:
        log_weight = np.log(CHAINS.stationary[:, SEQUENCE[0]])
        log_weight += (pair_counts() * np.log(CHAINS.transition)).sum((1, 2))
    weight = np.exp(log_weight - log_weight.max())
    return weight / weight.sum()


def prediction(phase: str) -> Probabilities:
    """What a phase predicts after the example, without pseudo-counts."""
    if phase in ("M1", "M2"):
        return recognised(phase) @ CHAINS.transition[:, SEQUENCE[-1]]
    counts = np.bincount(SEQUENCE) if phase == "G1" else pair_counts()[SEQUENCE[-1]]
    return counts / counts.sum()


def phase_picture(phase: str) -> str:
    """What a phase uses of a sequence, in its colour, and what it predicts from it.

    Raises `ValueError` for what is no phase.
    """
    if phase not in PHASES:
        raise ValueError(f"expected one of {', '.join(PHASES)}, got {phase!r}")
    current, last = int(SEQUENCE[-1]), len(SEQUENCE) - 1
    followers = [place + 1 for place in range(last) if SEQUENCE[place] == current]
    used = {"G2": followers}.get(phase, list(range(last + 1)))
    arcs = {"G2": [place - 1 for place in followers], "M2": list(range(last))}.get(phase, [])
    at = [11 + 19 * place for place in range(last)] + [19 * last + 14]
    drawn = [_arc(at[place], at[place + 1], 25) for place in arcs]
    for place, state in enumerate(SEQUENCE.tolist()):
        tone = _TONE if place in used else _PLAIN
        drawn.append(f'<circle cx="{at[place]}" cy="36" r="8.5" {tone}/>')
        drawn.append(_text(at[place], 40, LETTERS[state]))
    ring = 'fill="none" stroke="var(--ink)" stroke-width="1.4"'
    drawn.append(f'<circle cx="{at[last]}" cy="36" r="11" {ring}/>')
    drawn.append(_text(at[last], 60, "now", "quiet"))
    frequencies = _counted(np.bincount(SEQUENCE))
    basis = {
        "G1": frequencies,
        "G2": f"after {LETTERS[current]}: {_counted(pair_counts()[current])}",
        "M1": frequencies,
        "M2": f"{last} pairs",
    }[phase]
    drawn.append(_text(4, 82, basis, "start"))
    if phase in ("M1", "M2"):
        weight = recognised(phase)
        drawn += [_arrow((78, 78), (92, 78)), _cards(int(weight.argmax()), 97, 66)]
        drawn.append(_arrow((184, 78), (200, 68)))
    else:
        drawn.append(_arrow((184, 36), (200, 44)))
    bars = prediction(phase)
    drawn.append(_bars(bars, (204, 256), (8, 74), 0.75, 'fill="currentColor"', list(LETTERS)))
    told = ", ".join(f"{letter} {p:.2f}" for letter, p in zip(LETTERS, bars, strict=True))
    what = {
        "G1": f"all states are counted: {basis}",
        "G2": f"the states that followed the current one are counted, {basis}",
        "M1": f"a chain of the set is recognised by how often each state occurs: {basis}",
        "M2": f"a chain of the set is recognised by its {basis} of successive states",
    }[phase]
    label = (
        f"{phase}: of the states {' '.join(LETTERS[state] for state in SEQUENCE)}, {what}; "
        f"the prediction is {told}."
    )
    return _svg(92, label, drawn, f"var(--{phase})")


def _counted(counts: Int[np.ndarray, " state"]) -> str:
    counted = zip(LETTERS, counts.tolist(), strict=True)
    return ", ".join(f"{letter} {count}" for letter, count in counted if count)


def _cards(picked: int, left: Number, top: Number) -> str:
    """The chains of the example as cards; of the one that is picked, the current state's row."""
    size, row = 24, int(SEQUENCE[-1])
    drawn = []
    for number, transition in enumerate(CHAINS.transition):
        x = left + (size + 5) * number
        frame = 'stroke="var(--muted)"'
        if number == picked:
            frame = 'stroke="currentColor" stroke-width="2"'
            drawn.append(
                f'<rect x="{x}" y="{top + size / 3 * row:.1f}" width="{size}" '
                f'height="{size / 3:.1f}" fill="currentColor" fill-opacity=".3" {frame}/>'
            )
        drawn.append(_grid(transition, x, top, size, frame))
    return "".join(drawn)


# --- the task


def task_picture(reading: Reading) -> str:
    """What a run's models are trained on, what they are, and what they predict: a list of four.

    The chains are those of the run's largest finite K, or drawn afresh where it has none.
    """
    task, model = reading.run.recipe.task, reading.run.recipe.model
    chains, count = _shown_chains(reading)
    sequence = walk(np.random.default_rng(0), chains, np.zeros(1, int), SHOWN_STATES)[0]
    current = int(sequence[-1])
    true_row = chains.transition[0, current]
    kept = f"A set of K chains, here {count}"
    if count == "1":
        kept = "A single chain"
    elif count == "∞":
        kept = "Fresh chains without end"
    elif chains.weights.min() < chains.weights.max():
        kept += ", some met more often than others"
    heads = f"{model.heads} head{'s' * (model.heads > 1)}"
    mlp = "" if model.attention_only else f", MLPs of width F = {model.mlp_width:,}"
    return _list(
        (
            f"Chains: K = {count}",
            f"{kept}, on C = {task.states} states; a row is what may follow a state, fuller where "
            "more probable.",
            _chains_picture(chains, count),
        ),
        (
            "A sequence",
            f"The model sees up to N = {task.context} states that chain 1 went through; which "
            "comes next?",
            _sequence_picture(sequence),
        ),
        (
            "The model",
            f"{model.layers} layer{'s' * (model.layers > 1)} of attention ({heads} each){mlp}; "
            f"all read from and write to a stream of width D = {model.width}.",
            _model_picture(reading),
        ),
        (
            "Its prediction",
            f"At its best, after state {current}: that row of chain 1; dashes are the "
            f"uniform 1/{task.states}.",
            _prediction_picture(true_row, current),
        ),
    )


def _list(*entries: tuple[str, str, str]) -> str:
    items = "".join(
        f"<li><figure>{picture}<figcaption><b>{number}. {escape(title)}</b> "
        f"{escape(caption).replace(' = ', '&nbsp;=&nbsp;')}</figcaption></figure></li>"
        for number, (title, caption, picture) in enumerate(entries, 1)
    )
    return f'<ol class="task">{items}</ol>'


def _shown_chains(reading: Reading) -> tuple[ChainSet, str]:
    """The chains to draw from, the first of which are shown, and K as text."""
    task = reading.run.recipe.task
    finite = [cell for cell in reading.run.cells if cell.chains != "infinite"]
    finite.sort(key=lambda cell: float(cell.chains))
    # Where there is a choice, a set of very many large chains is not drawn again for a picture.
    light = [cell for cell in finite if float(cell.chains) * task.states**2 <= LARGEST_SET]
    cell = next(iter(light[-1:] or finite), None)
    if cell is not None and cell.chain_set is not None:
        return cell.chain_set, diversity_text(cell.chains)
    prior = reading.run.cells[0].prior
    return prior.sample(jax.random.key(0), SHOWN_CHAINS), "∞"


def _chains_picture(chains: ChainSet, count: str) -> str:
    shown = chains.transition[:SHOWN_CHAINS, :LARGEST_GRID, :LARGEST_GRID]
    more = count == "∞" or chains.count > len(shown)
    size = 68
    drawn = []
    for number, transition in enumerate(shown):
        x = 4 + (size + 10) * number
        drawn.append(_grid(transition, x, 24, size, 'stroke="var(--rule)"'))
        drawn.append(_text(x + size / 2, 110, f"chain {number + 1}", "quiet"))
    if more:
        drawn.append(_text(248, 62, "…"))
    part = f" (their first {LARGEST_GRID} states)" if chains.states > LARGEST_GRID else ""
    label = f"Transition matrices of {len(shown)} of {count} chains{part}, as grids of shades."
    return _svg(120, label, drawn)


def _sequence_picture(sequence: Int[np.ndarray, " position"]) -> str:
    """Two rows of circles, the state to predict at their end."""
    drawn = []
    columns = (len(sequence) + 2) // 2
    for place, text in enumerate([*map(str, sequence.tolist()), "?"]):
        row, column = divmod(place, columns)
        x, y = 20 + 36.5 * column, 34 + 50 * row
        if column:
            drawn.append(_arrow((x - 21.5, y), (x - 16.5, y)))
        now = place == len(sequence) - 1
        edge = f'stroke="var(--{"ink" if now else "muted"})" stroke-width="{2 if now else 1}"'
        dashes = ' stroke-dasharray="3 3"' if text == "?" else ""
        drawn.append(f'<circle cx="{x}" cy="{y}" r="14" fill="var(--raised)" {edge}{dashes}/>')
        drawn.append(_text(x, y + 4.5, text, "large"))
        if now:
            drawn.append(_text(x, y + 29, "now", "quiet"))
    told = " ".join(map(str, sequence.tolist()))
    return _svg(120, f"States of a sequence: {told}, and a question mark.", drawn)


def _model_picture(reading: Reading) -> str:
    """Blocks that read from the residual stream and write back to it, from left to right."""
    model = reading.run.recipe.model
    blocks = [
        f"{kind}{layer}"
        for layer in range(1, model.layers + 1)
        for kind in ("att", "mlp")[: 1 if model.attention_only else 2]
    ]
    if len(blocks) > 4:
        blocks = [*blocks[:2], "…", blocks[-1]]
    stream, top, wide, high = 88, 30, 34, 22
    pitch = 172 / len(blocks)
    drawn = [_line((44, stream), (213, stream), 2)]
    for place, name in enumerate(blocks):
        middle = 44 + pitch * (place + 0.5)
        if name == "…":
            drawn.append(_text(middle, top + 15, name))
            continue
        x = middle - wide / 2
        drawn.append(_arrow((x + 7, stream), (x + 7, top + high)))
        drawn.append(_arrow((x + wide - 7, top + high), (x + wide - 7, stream - 1)))
        several = name.startswith("att") and model.heads > 1
        for behind in (6, 3, 0) if several else (0,):  # a sheet for each head, three at most
            drawn.append(_block(x + behind, top - behind, wide, high))
        drawn.append(_text(middle, top + 15, name))
        if several:
            drawn.append(_text(middle, top - 12, f"{model.heads} heads", "quiet"))
    drawn += [_block(1, stream - 11, 45, high), _text(23.5, stream + 4, "embed")]
    drawn += [_arrow((205, stream), (220, stream)), _block(220, stream - 11, 36, high)]
    drawn += [_text(238, stream + 4, "out"), _text(130, 112, f"width D = {model.width}", "quiet")]
    parts = ", ".join(name for name in blocks if name != "…")
    label = f"The model: embedding, {parts} beside a residual stream, and the unembedding (out)."
    return _svg(120, label, drawn)


def _prediction_picture(row: Probabilities, current: int) -> str:
    names = list(map(str, range(len(row)))) if len(row) <= NUMBERED else []
    highest = float(max(row.max(), 1 / len(row)))
    drawn = [_bars(row, (30, 256), (14, 98), highest, 'fill="var(--muted)"', names)]
    level = 98 - 84 / len(row) / highest
    drawn.append(
        f'<path d="M30 {level:.1f}H256" stroke="var(--ink)" stroke-width="1.3" '
        'stroke-dasharray="4 3" fill="none"/>'
    )
    drawn.append(_text(26, min(level + 4, 98), f"1/{len(row)}", "end"))
    most = int(row.argmax())
    label = (
        f"Probabilities of the {len(row)} states after state {current}; the most probable is "
        f"{most} with {row[most]:.2f}, beside the uniform 1/{len(row)}."
    )
    return _svg(120, label, drawn)


# --- shapes

_TONE = 'fill="currentColor" fill-opacity=".28" stroke="currentColor" stroke-width="1.4"'
_PLAIN = 'fill="var(--raised)" stroke="var(--muted)" stroke-opacity=".6"'


def _svg(height: int, label: str, drawn: Sequence[str], colour: str = "var(--ink)") -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="picture" viewBox="0 0 260 {height}" '
        f'role="img" aria-label="{escape(label)}" style="color: {colour}">{"".join(drawn)}</svg>'
    )


def _text(x: Number, y: Number, text: str, kind: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}">{escape(text)}</text>'


def _line(start: Point, end: Point, width: Number = 1.2) -> str:
    (x, y), (to_x, to_y) = start, end
    return (
        f'<path d="M{x:g} {y:g}L{to_x:g} {to_y:g}" stroke="var(--muted)" stroke-width="{width}" '
        'fill="none"/>'
    )


def _arrow(start: Point, end: Point) -> str:
    """A line with a head, drawn as a path: a marker would need an id."""
    along = np.subtract(end, start) / np.hypot(*np.subtract(end, start))
    across = np.array([-along[1], along[0]])
    corners = [np.array(end), *(end - 5 * along + side * across for side in (2.6, -2.6))]
    head = "L".join(f"{x:.1f} {y:.1f}" for x, y in corners)
    stop = np.array(end) - 4 * along
    return _line(start, (float(stop[0]), float(stop[1]))) + (
        f'<path d="M{head}Z" fill="var(--muted)"/>'
    )


def _arc(start: Number, end: Number, y: Number) -> str:
    """From above a state to above the next one, in the phase's colour."""
    return (
        f'<path d="M{start + 2:g} {y}C{start + 4:g} {y - 17} {end - 6:g} {y - 17} {end - 3:g} '
        f'{y - 3}" stroke="currentColor" stroke-width="1.5" fill="none"/>'
        f'<path d="M{end - 1:g} {y + 2}l-5.5 -4.2l5.2 -2Z" fill="currentColor"/>'
    )


def _block(x: Number, y: Number, width: Number, height: Number) -> str:
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" '
        'fill="var(--raised)" stroke="var(--muted)"/>'
    )


def _bars(
    values: Probabilities,
    span: Point,
    heights: Point,
    highest: Number,
    fill: str,
    names: Sequence[str],
) -> str:
    """Bars from left to right within a span; `highest` is as high as there is room."""
    (left, right), (top, bottom) = span, heights
    pitch = (right - left) / len(values)
    drawn = [f'<path d="M{left} {bottom}H{right}" stroke="var(--muted)" fill="none"/>']
    for place, value in enumerate(values.tolist()):
        high = (bottom - top) * value / highest
        drawn.append(
            f'<rect class="pillar" x="{left + pitch * (place + 0.14):.2f}" y="{bottom - high:.2f}" '
            f'width="{0.72 * pitch:.2f}" height="{high:.2f}" {fill}/>'
        )
        if names:
            drawn.append(_text(round(left + pitch * (place + 0.5), 1), bottom + 14, names[place]))
    return "".join(drawn)


def _grid(
    transition: Float[np.ndarray, "state state"], x: Number, y: Number, size: Number, frame: str
) -> str:
    """A matrix as squares, the fuller the more probable, of ten shades up to its largest."""
    side = size / len(transition)
    shade = np.rint(10 * transition / transition.max()).astype(int)
    drawn = []
    for level in range(1, 11):
        squares = "".join(
            f"M{x + side * column:.1f} {y + side * row:.1f}h{side:.1f}v{side:.1f}h-{side:.1f}z"
            for row, column in np.argwhere(shade == level).tolist()
        )
        if squares:
            drawn.append(
                f'<path d="{squares}" fill="var(--ink)" fill-opacity="{0.085 * level:.2f}"/>'
            )
    drawn.append(f'<rect x="{x}" y="{y}" width="{size}" height="{size}" fill="none" {frame}/>')
    return "".join(drawn)
