"""Draw the pictures of docs/concepts.md, as SVG that follows a light or a dark page.

python docs/words.py
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from importlib import resources
from pathlib import Path

import jax
import numpy as np

from iclens import ChainPrior, contrast
from iclens.phases import PHASES
from iclens.report.pictures import phase_picture
from iclens.report.style import DARK, LIGHT, PHASE_COLOURS

FOLDER = Path(__file__).parent / "pictures"
STATES = 4
FONT = "system-ui, sans-serif"


def style() -> str:
    """Colours by the page's scheme, and the classes of the pictures of the report."""
    plain = resources.files("iclens.report").joinpath("assets", "pictures.css").read_text()
    light, dark = (
        "".join(f"--{name}:{colour};" for name, colour in (colours | PHASE_COLOURS).items())
        for colours in (LIGHT, DARK)
    )
    return (
        f"<style>:root{{{light}}}"
        f"@media (prefers-color-scheme:dark){{:root{{{dark}}}}}"
        f"text{{font-family:{FONT}}}{' '.join(plain.split())}</style>"
    )


def svg(width: int, height: int, drawn: Sequence[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}">{style()}{"".join(drawn)}</svg>\n'
    )


def text(
    x: float, y: float, words: str, *, tone: str = "ink", size: float = 12, at: str = "middle"
) -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" style="font-size:{size}px;text-anchor:{at};fill:var(--{tone})">'
        f"{escape(words)}</text>"
    )


def path(d: str, *, tone: str = "muted", width: float = 1.2, dashed: bool = False) -> str:
    dash = ' stroke-dasharray="4 3"' if dashed else ""
    return f'<path d="{d}" stroke="var(--{tone})" stroke-width="{width}" fill="none"{dash}/>'


def arrow(x: float, y: float, to: float, *, tone: str = "muted") -> str:
    """From left to right, at one height."""
    head = f'<path d="M{to} {y}l-6 -3.5v7z" fill="var(--{tone})"/>'
    return path(f"M{x} {y}H{to - 5}", tone=tone) + head


def box(x: float, y: float, width: float, height: float, words: str, tone: str = "muted") -> str:
    return (
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="4" fill="var(--raised)" '
        f'stroke="var(--{tone})" stroke-width="1.3"/>'
        + text(x + width / 2, y + height / 2 + 4, words)
    )


def circle(x: float, y: float, words: str, tone: str = "muted", fill: str = "raised") -> str:
    return (
        f'<circle cx="{x}" cy="{y}" r="10" fill="var(--{fill})" stroke="var(--{tone})" '
        f'stroke-width="1.4"/>' + text(x, y + 4, words)
    )


def matrix(x: float, y: float, size: float, values: np.ndarray, tone: str = "muted") -> str:
    side = size / len(values)
    squares = "".join(
        f'<rect x="{x + side * b:g}" y="{y + side * a:g}" width="{side:g}" height="{side:g}" '
        f'fill="var(--ink)" fill-opacity="{0.85 * values[a, b] / values.max():.2f}"/>'
        for a, b in np.ndindex(*values.shape)
    )
    frame = f'<rect x="{x}" y="{y}" width="{size}" height="{size}" fill="none" '
    return squares + frame + f'stroke="var(--{tone})" stroke-width="1.5"/>'


def task() -> str:
    """A chain set, one of its chains, a sequence of it, the context and the next state."""
    chains = ChainPrior(STATES).sample(jax.random.key(0), 6)
    states = np.asarray(chains.sample(jax.random.key(1), 1, 13)[0][0])
    picked = int(chains.sample(jax.random.key(1), 1, 13)[1][0])
    drawn = [text(86, 18, "chain set S, K = 6", tone="muted")]
    for number, values in enumerate(chains.transition):
        x, y = 20 + 48 * (number % 3), 30 + 48 * (number // 3)
        drawn.append(matrix(x, y, 38, values, "G2" if number == picked else "muted"))
    drawn += [arrow(166, 74, 198, tone="G2"), text(262, 18, "a chain: T[a, b]", tone="muted")]
    drawn.append(matrix(220, 32, 84, chains.transition[picked], "G2"))
    for state in range(STATES):
        drawn.append(text(212, 47 + 21 * state, str(state), size=11, tone="muted"))
        drawn.append(text(230.5 + 21 * state, 130, str(state), size=11, tone="muted"))
    drawn += [text(262, 146, "next state b", size=11, tone="muted")]
    drawn += [arrow(314, 74, 338, tone="G2"), text(480, 18, "a sequence of it", tone="muted")]
    for place, state in enumerate(states.tolist()):
        x, last = 356 + 23 * place, place == len(states) - 1
        drawn.append(circle(x, 74, "?" if last else str(state), "M2" if last else "muted"))
    drawn.append(path("M346 96v6h274v-6"))
    drawn.append(text(483, 118, f"context: N = {len(states) - 1} states that the model sees"))
    drawn.append(text(640, 52, "next", tone="M2"))
    drawn.append(text(600, 52, "current", tone="muted"))
    return svg(660, 156, drawn)


def graph() -> str:
    """Senders on the residual stream, receivers that read from it; an edge, and one that is cut."""
    senders = ["embed", "att1.0", "mlp1", "att2.0", "mlp2"]
    at = {name: 20 + 124 * place for place, name in enumerate(senders)} | {"out": 640}
    drawn = [arrow(20, 150, 706), text(24, 168, "residual stream", tone="muted", at="start")]
    for name in [*senders, "out"]:
        x, ports = at[name], ["q", "k", "v"] if name.startswith("att") else []
        drawn.append(box(x, 60, 62, 30, name))
        if name != "embed":
            drawn.append(path(f"M{x + 12} 150V{110 if ports else 90}"))
        if name != "out":
            drawn.append(path(f"M{x + 62} 75h14V146"))
            drawn.append(f'<path d="M{x + 76} 150l-3.5 -6h7z" fill="var(--muted)"/>')
        for place, port in enumerate(ports):
            left = x + 2 + 20 * place
            drawn.append(
                f'<rect x="{left}" y="94" width="18" height="16" rx="3" fill="var(--raised)" '
                'stroke="var(--muted)"/>' + text(left + 9, 106, port, size=11)
            )
    key = at["att2.0"] + 31
    drawn.append(
        path(
            f"M{at['att1.0'] + 70} 75C{at['att1.0'] + 90} 215 {key} 225 {key} 114",
            tone="G2",
            width=2,
        )
    )
    drawn.append(f'<path d="M{key} 110l-4 8h8z" fill="var(--G2)"/>')
    drawn.append(text(at["mlp1"] + 20, 214, "edge att1.0->att2.0.k", tone="G2"))
    drawn.append(
        path(
            f"M{at['mlp1'] + 31} 58C{at['mlp1'] + 50} 8 {at['mlp2'] + 10} 8 {at['mlp2'] + 31} 54",
            tone="M2",
            width=2,
            dashed=True,
        )
    )
    drawn.append(f'<path d="M{at["mlp2"] + 32} 60l-6 -7l7 -3z" fill="var(--M2)"/>')
    drawn.append(text(at["att2.0"] + 31, 14, "cut: carries its baseline", tone="M2"))
    drawn.append(text(51, 50, "sender", tone="muted", size=11))
    drawn.append(text(at["out"] + 31, 50, "receiver", tone="muted", size=11))
    return svg(720, 226, drawn)


def baselines() -> str:
    """What the edges that are cut carry: the values on these states."""
    chains = ChainPrior(STATES).sample(jax.random.key(0), 6)
    told = {
        "resample": "another sequence",
        "swap_chain": "another chain, same current state",
        "shuffle": "the states before the current one in another order",
    }
    drawn: list[str] = []

    def row(y: float, name: str, states: np.ndarray | None, words: str) -> None:
        drawn.append(text(96, y + 4, name, at="end"))
        if states is not None:
            for place, state in enumerate(states.tolist()):
                last = place == len(states) - 1
                drawn.append(circle(120 + 23 * place, y, str(state), "G2" if last else "muted"))
        drawn.append(text(392, y + 4, words, tone="muted", at="start"))

    for place, name in enumerate(told):
        on = contrast(name, chains, 2, 12, key=jax.random.key(5))
        assert on.instead is not None
        if not place:
            row(
                18,
                "own",
                np.asarray(on.states[0]),
                "what the model reads; the current state in blue",
            )
        row(52 + 30 * place, name, np.asarray(on.instead[0]), told[name])
    row(142, "mean", None, "the mean value over all sequences, at each position")
    row(166, "zero", None, "zero")
    for y in (142, 166):
        drawn.append(path(f"M110 {y}H383", dashed=True))
    return svg(720, 184, drawn)


PICTURES: dict[str, Callable[[], str]] = {
    "words-task": task,
    "words-graph": graph,
    "words-baselines": baselines,
}


def pictures() -> dict[str, str]:
    """All of them, by name."""
    made = {name: draw() for name, draw in PICTURES.items()}
    for phase in PHASES:
        opening, inner = phase_picture(phase).split(">", 1)
        made[f"words-{phase}"] = f'{opening} width="330">{style()}{inner}\n'
    return made


def main() -> None:
    for name, drawn in pictures().items():
        (FOLDER / f"{name}.svg").write_text(drawn, encoding="utf-8")
        print(FOLDER / f"{name}.svg")


if __name__ == "__main__":
    main()
