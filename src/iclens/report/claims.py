"""What the paper says, beside what a run shows of it.

The paper is Gibson, Cui and Reddy (2026), arXiv 2604.12151.  Every sentence and verdict is made
from the run's own cells, traces and results of the theory.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import xarray as xr

from iclens.circuits.roles import check_roles
from iclens.lab.recipe import Diversity
from iclens.phases import PHASES, float_diversity
from iclens.report.reading import Reading, between
from iclens.report.theory import DRAWINGS, describe_interval
from iclens.report.verdicts import JUDGED, Judge, Verdict, counted

TWO_POINT = ("G2", "M2")
ONE_POINT = ("G1", "M1")
SHOWN = 6
"""Different sequences of phases that are told one by one."""


@dataclass(frozen=True)
class Finding:
    """A claim, and what a run shows of it."""

    claim: str
    shows: str
    verdict: Verdict
    command: str = ""
    """What to run to measure it, or what is wanting of it; empty where nothing is, or can be."""


def findings(
    reading: Reading, theory: Mapping[str, xr.Dataset | str], traces: Sequence[xr.Dataset]
) -> list[Finding]:
    """Each claim of the paper, with what a run shows of it.

    `theory` has the results that `iclens.report.theory.read_results` finds, `traces` those that
    `iclens.lab.trace` saved.
    """
    found = [
        _passage(reading),
        _threshold(reading, theory, "K1*"),
        _threshold(reading, theory, "K2*"),
        _order(reading),
    ]
    for name, (claim, judge) in JUDGED.items():
        found.append(_of_theory(reading, theory, claim, name, judge))
    return [
        *found,
        _mechanism(reading, traces, "G2", "2-Gen", "statistical induction head"),
        _mechanism(reading, traces, "M2", "2-Mem", "task recognition head"),
    ]


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


# --- the cells of the run


def _finished(reading: Reading) -> list[dict[str, Any]]:
    """The rows of the phase map of cells that were trained to the end and had a clear phase."""
    cells = reading.run.phase_map.cells
    return [cell for cell in cells if cell["outcome"] == "finished" and cell["phases"]]


def _none_finished(claim: str, reading: Reading) -> Finding:
    text = "No cell that was trained to the end has a clear phase."
    return Finding(claim, text, "not measured", _more_cells(reading))


def _more_cells(reading: Reading) -> str:
    """The command that trains what is left to train, if anything is."""
    left = any(cell.status != "done" for cell in reading.run.cells)
    return reading.run.resume_command if left else ""


def _passage(reading: Reading) -> Finding:
    claim = (
        "In training, models pass through four phases, from one-point (G1, M1) to two-point "
        "statistics (G2, M2)."
    )
    cells = _finished(reading)
    if not cells:
        return _none_finished(claim, reading)
    paths = Counter(" → ".join(cell["phases"]) for cell in cells)
    told = ", ".join(f"{path} ({number})" for path, number in paths.most_common(SHOWN))
    rest = sum(paths.values()) - sum(number for _, number in paths.most_common(SHOWN))
    back = sum(
        any(a in TWO_POINT and b in ONE_POINT for a, b in pairwise(cell["phases"]))
        for cell in cells
    )
    risen = sum(
        cell["phases"][0] in ONE_POINT and cell["phases"][-1] in TWO_POINT for cell in cells
    )
    wanting = [phase for phase in PHASES if not any(phase in cell["phases"] for cell in cells)]
    shows = (
        f"{counted(len(cells), 'finished cell')}: {told}{f', {rest} others' if rest else ''}. "
        f"{risen} went from one-point to two-point statistics, {back} from a two-point phase back "
        f"to a one-point phase. "
        + (f"Not seen: {', '.join(wanting)}." if wanting else "All four phases are seen.")
    )
    if back:
        return Finding(claim, shows, "disagrees")
    return Finding(claim, shows, "open" if wanting or risen < len(cells) else "agrees")


def _threshold(
    reading: Reading, theory: Mapping[str, xr.Dataset | str], name: Literal["K1*", "K2*"]
) -> Finding:
    claim = {
        "K1*": "Below a diversity K1*, memory comes without a visit to the induction head (G2).",
        "K2*": "Training ends in memory (M2) below a diversity K2*, and not above it.",
    }[name]
    cells = _finished(reading)
    if not cells:
        return _none_finished(claim, reading)
    threshold = reading.run.phase_map.thresholds[name]
    told = [_sentence(between(name, *(threshold["bracket"] or [None, None]))) + "."]
    mixed = [
        str(entry["seed"])
        for entry in threshold["per_seed"]
        if not _monotone(reading.run.phase_map.outcomes(name, entry["seed"]))
    ]
    if mixed:
        told.append(f"The outcome is not monotone in K for seed {', '.join(mixed)}.")
    # Where neither end is known for any seed, the outcome falls with K in all of them.
    verdict: Verdict = "open" if threshold["bracket"] else "disagrees"
    if threshold["bracket"] and not _open(threshold["bracket"]):
        if name == "K1*":
            side, want = [cell for cell in cells if "G2" not in cell["phases"]], "M2"
            told.append("Of the cells that never visit G2, {} of {} end in M2.")
        else:
            side, want = [cell for cell in cells if cell["phases"][-1] != "M2"], "G2"
            told.append("Of the cells that do not end in M2, {} of {} end in G2.")
        ends = sum(cell["phases"][-1] == want for cell in side)
        told[-1] = told[-1].format(ends, len(side))
        verdict = "agrees" if ends == len(side) and not mixed else "open"
    if name == "K2*":
        last = max(cell["final_step"] for cell in cells)
        told.append(f"This is after {last:,} steps; longer training can only raise it.")
    key, command = name.rstrip("*"), ""
    fit = theory.get(key)
    if isinstance(fit, str):
        told.append(f"The saved fit cannot be read: {fit}.")
        command = _theory_command(reading, key)
    elif fit is not None:
        interval = describe_interval(*fit.fit.values[0, :3].tolist())
        told.append(f"Fitted to {_fitted_to(reading, fit)}: {interval}.")
    return Finding(claim, " ".join(told), verdict, command)


def _fitted_to(reading: Reading, fit: xr.Dataset) -> str:
    """How many runs a fit stands on, and whether some are not cells of this run."""
    places = set(zip(fit.chains.values.tolist(), fit.seed.values.tolist(), strict=True))
    strange = places - {(cell.chains, cell.seed) for cell in reading.run.cells}
    return counted(fit.sizes["run"], "cell") + (" (not all of this run)" if strange else "")


def _open(bracket: Sequence[Diversity | None]) -> bool:
    """Whether an end is open: fresh chains are no number of chains to lie below."""
    return any(end is None or end == "infinite" for end in bracket)


def _monotone(outcomes: Sequence[tuple[int | str, bool]]) -> bool:
    return all(a <= b for (_, a), (_, b) in pairwise(outcomes))


def _order(reading: Reading) -> Finding:
    claim = "K1* is below K2*: between them, models visit the induction head and then remember."
    if not _finished(reading):
        return _none_finished(claim, reading)
    first, second = (
        {entry["seed"]: (entry["low"], entry["high"]) for entry in threshold["per_seed"]}
        for threshold in reading.run.phase_map.thresholds.values()
    )
    before = sum(_at_most(first[seed][1], second[seed][0]) for seed in first)
    shows = " ".join(
        _sentence(between(name, *(threshold["bracket"] or [None, None]))) + "."
        for name, threshold in reading.run.phase_map.thresholds.items()
    )
    # The other order is never certain: longer training can raise K2*, and bring a visit to G2.
    shows += f" K1* is certainly below K2* for {before} of {counted(len(first), 'seed')}."
    return Finding(claim, shows, "agrees" if before == len(first) else "open")


def _at_most(high: Diversity | None, low: Diversity | None) -> bool:
    """Whether a threshold of at most `high` is surely below one above `low`."""
    if high is None or low is None or high == "infinite":
        return False
    return float_diversity(high) <= float_diversity(low)


# --- results of the theory


def _of_theory(
    reading: Reading,
    theory: Mapping[str, xr.Dataset | str],
    claim: str,
    name: str,
    judge: Judge,
) -> Finding:
    """A claim that one result decides."""
    result = theory.get(name, "")
    if isinstance(result, str):
        command = _theory_command(reading, name)
        text = f"The result cannot be read: {result}." if result else "Not computed for this run."
        return Finding(claim, text, "not measured", command)
    shows, verdict = judge(result)
    if name == "switching":
        shows = f"{shows} Fitted to {_fitted_to(reading, result)}."
    return Finding(claim, shows, verdict)


def _theory_command(reading: Reading, name: str) -> str:
    path = reading.run.path
    arguments = DRAWINGS[name].command.format(
        run=shlex.quote(str(path)), out=shlex.quote(str(path / "theory"))
    )
    return f"iclens theory {arguments}"


# --- traces


def _mechanism(
    reading: Reading, traces: Sequence[xr.Dataset], phase: str, reference: str, hypothesis: str
) -> Finding:
    """Whether a hypothesis passes wherever a phase is clear, over all traced checkpoints."""
    claim = f"{reference} is carried out by a {hypothesis}."
    inside: dict[tuple[str, int, int], list[str]] = {}
    outside: dict[tuple[str, int, int], list[str]] = {}
    for trace in traces:
        names = [name for name in trace.criterion.values.tolist() if _is_of(name, hypothesis)]
        if not names or "phase" not in trace:
            continue
        holds = trace.criterion_holds.sel(criterion=names).transpose("step", "criterion").values
        for place, step in enumerate(trace.step.values.tolist()):
            # A checkpoint may be in several traces.
            at = (str(trace.attrs["chains"]), int(trace.attrs["seed"]), int(step))
            clear = bool(trace.clear.values[place]) and trace.phase.values[place] == phase
            failed = [name for name, ok in zip(names, holds[place], strict=True) if not ok]
            (inside if clear else outside)[at] = failed
    if not inside:
        return _not_traced(reading, claim, phase, hypothesis)
    passes = sum(not failed for failed in inside.values())
    elsewhere = sum(not failed for failed in outside.values())
    cells = len({(chains, seed) for chains, seed, _ in inside})
    shows = (
        f"The hypothesis passes at {passes} of {counted(len(inside), 'traced checkpoint')} in "
        f"{phase}, of {counted(cells, 'model')}"
    )
    shows += f"; at {elsewhere} of {len(outside)} in other phases." if outside else "."
    lacking = Counter(name for failed in inside.values() for name in failed)
    if lacking:
        (name, number), *_ = lacking.most_common(1)
        shows += f' Most often wanting ({number}): "{name.partition(": ")[2]}".'
    if passes == len(inside):
        return Finding(claim, shows, "agrees")
    return Finding(claim, shows, "open" if passes else "disagrees")


def _is_of(criterion: str, hypothesis: str) -> bool:
    return criterion.startswith(f"{hypothesis}: ")


def _not_traced(reading: Reading, claim: str, phase: str, hypothesis: str) -> Finding:
    """What to trace: of the cells that end in a phase, or else visit it, the plainest."""
    try:
        check_roles(reading.run.recipe.model)
    except ValueError as error:
        return Finding(claim, f"{_sentence(str(error))}.", "not measured")
    if reading.run.recipe.model.attention_only and hypothesis == "task recognition head":
        text = "These models have no MLPs to encode and decode with."
        return Finding(claim, text, "not measured")
    cells = [cell for cell in _finished(reading) if phase in cell["phases"]]
    if not cells:
        text = f"No finished cell of this run is clearly in {phase} at any time."
        return Finding(claim, text, "not measured", _more_cells(reading))
    ending = [cell for cell in cells if cell["phases"][-1] == phase]
    # Generalising is plainest at many chains; a memory is so where it was not first a count.
    direct = [cell for cell in ending if "G2" not in cell["phases"]] if phase == "M2" else []
    cell = (direct or ending or cells)[-1]
    run, chains, seed = str(reading.run.path), str(cell["chains"]), str(cell["seed"])
    command = ["iclens", "trace", run, "--chains", chains, "--seed", seed, "--step", "all"]
    text = f"No checkpoint in {phase} is traced."
    return Finding(claim, text, "not measured", shlex.join(command))
