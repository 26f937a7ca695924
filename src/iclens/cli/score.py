"""`iclens score`: any model against the references."""

import math
import shlex
import sys
from json import dumps, loads
from pathlib import Path
from typing import Any

import jax
import tyro
import xarray as xr

from iclens import __version__
from iclens.chains import ChainPrior, ChainSet, Prior
from iclens.cli.output import as_json
from iclens.interop.huggingface import Bos, LanguageModel, open_language_model
from iclens.interop.sources import Source, is_language_model, open_source
from iclens.lab.store import is_run, open_run
from iclens.report import write_scores
from iclens.scoring import SETS, score_contexts

CONTEXTS = (16, 32, 64)
"""Context lengths where the model has none of its own."""
LANGUAGE_MODEL_SHUFFLES = 5


def score(arguments: list[str]) -> int:
    """Parse and carry out `iclens score` with its arguments."""

    def command(
        model: str,
        /,
        chains: str | None = None,
        run: Path | None = None,
        seed: int = 0,
        step: str = "last",
        states: int | None = None,
        concentration: float | None = None,
        contexts: tuple[int, ...] = (),
        sequences: int = 512,
        shuffles: int | None = None,
        draw: int = 0,
        tokens: tuple[str, ...] = (),
        token_ids: tuple[int, ...] = (),
        bos: Bos = "tokenizer",
        out: Path | None = None,
        json: bool = False,
    ) -> int:
        """Label any model, of iclens or not, by the references at several context lengths.

        Args:
            model: The folder of a run, python:MODULE:FUNCTION (states -> log-probabilities), a
                .safetensors file that iclens wrote, or the folder of a Hugging Face model.
            chains: File of the chains that may be memorised; or, with a run, K of its cell.
                Without either there are fresh chains only.
            run: Run whose chains may be memorised, where MODEL is not itself a run.
            seed: Seed of the run's cell.
            step: A checkpoint's step, or "last", where MODEL is a run.
            states: Number C of states, where neither the model nor chains say it.
            concentration: Dirichlet concentration of the prior; 1 where no run says it.
            contexts: Context lengths N; where none is given the model's own, or 16, 32 and 64.
            sequences: Sequences drawn from the chains, and from fresh ones, at each N.
            shuffles: Ways to number the states, the first as given, the others random; 5 for
                language models, else 1.
            draw: Number of the draw: another one gives other sequences and orders of states.
            tokens: Texts that stand for the states, each exactly one token of a language model.
            token_ids: The same by their numbers in the vocabulary.
            bos: Whether the beginning-of-sequence token goes first: where the tokenizer puts it by
                itself, always or never.
            out: Folder for score.nc, score.html and figures.
            json: Print JSON, for programs.
        """
        path = Path(model)
        if is_run(path) and run is not None:
            raise ValueError("--run: MODEL is a run, and its own chains are taken")
        if is_language_model(path) and not is_run(path):
            source = open_language_model(path, tokens, token_ids, bos)
        elif tokens or token_ids:
            raise ValueError("--tokens and --token-ids: MODEL is no language model")
        else:
            source = open_source(model, chains, seed, step)
        if step != "last" and not is_run(path):
            raise ValueError("--step: MODEL is no run")
        if not 0 <= draw < 2**32:
            raise ValueError(f"--draw: expected 0 to 2^32 - 1, got {draw}")
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)  # it fails now, or not after long work
        if shuffles is None:
            every = math.factorial(len(source.tokens))  # orders that there are
            shuffles = min(LANGUAGE_MODEL_SHUFFLES, every)
        known, prior, told = _chains(source, chains, run, seed, states, concentration)
        if source.states not in (None, prior.states):
            raise ValueError(f"the model has {source.states} states, the chains {prior.states}")
        scores = score_contexts(
            source.model,
            known,
            prior,
            _contexts(source, contexts),
            sequences=sequences,
            shuffles=shuffles,
            key=jax.random.key(draw),
            on_context=lambda done: print(f"context {done} scored", file=sys.stderr),
        )
        if isinstance(source.model, LanguageModel):
            scores = source.model.add_mass(scores)
            scores = scores.assign_coords(token=("state", list(source.tokens)))
        scores = scores.assign_attrs(
            model=model,
            kind=source.kind,
            facts=dumps(source.facts),
            chain_source=told,
            draw=draw,
            command=shlex.join(["iclens", "score", *arguments]),
            version=__version__,
        )
        if source.prior is None and run is None:
            scores.attrs["prior"] = f"assumed: {scores.attrs['prior']}"
        print(as_json(summary(scores)) if json else describe(scores))
        for written in write_scores(scores, out) if out is not None else ():
            print(f"wrote   {written}", file=sys.stderr if json else sys.stdout)
        return 0

    code: int = tyro.cli(command, args=arguments, prog="iclens score")
    return code


def _chains(
    source: Source,
    chains: str | None,
    run: Path | None,
    seed: int,
    states: int | None,
    concentration: float | None,
) -> tuple[ChainSet | None, Prior, str]:
    """The chains that may be memorised, the prior of fresh ones, and where they are from."""
    if source.prior is not None or run is not None:
        for name, value in (("states", states), ("concentration", concentration)):
            if value is not None:
                raise ValueError(f"--{name}: the run says it, expected none")
        if run is None:
            assert source.prior is not None
            return source.chains, source.prior, "those that the model was trained on"
        cell = open_run(run).chosen(chains, seed)
        return cell.chain_set, cell.prior, f"those of {run}, {cell.name}"
    if seed:
        raise ValueError("--seed: it is that of a run's cell, and there is no run; see --draw")
    counts = {"--states": states, "the model": source.states}
    known, told = None, "fresh chains only"
    if chains is not None:
        if chains.isdigit() or chains == "infinite":
            raise ValueError(f"--chains {chains}: a K needs the run that has it: give --run")
        known, told = ChainSet.from_file(chains), chains
        counts["the chains"] = known.states
    given = {name: count for name, count in counts.items() if count is not None}
    if not given:
        raise ValueError("--states: how many states? Neither the model nor chains say it")
    if len(set(given.values())) > 1:
        found = ", ".join(f"{count} of {name}" for name, count in given.items())
        raise ValueError(f"expected one number of states, got {found}")
    count = next(iter(given.values()))
    return known, ChainPrior(count, 1.0 if concentration is None else concentration), told


def _contexts(source: Source, asked: tuple[int, ...]) -> tuple[int, ...]:
    longest = source.context
    if not asked and longest is not None:
        if not source.tokens:
            return (longest,)
        return tuple(context for context in CONTEXTS if context <= longest) or (longest,)
    if longest is not None and asked and max(asked) > longest:
        raise ValueError(f"--contexts: the model takes at most {longest} states, got {max(asked)}")
    return asked or CONTEXTS


def summary(scores: xr.Dataset) -> dict[str, Any]:
    """Scores as plain data."""
    found = {name: value for name, value in scores.attrs.items() if name != "facts"}
    found |= {
        name: value.item() if hasattr(value, "item") else value for name, value in found.items()
    }
    found["facts"] = loads(scores.attrs["facts"])
    if "token" in scores.coords:
        found["tokens"] = scores.token.values.tolist()
    rows = []
    for context in scores.context.values.tolist():
        here = scores.sel(context=context)
        row: dict[str, Any] = {"context": context}
        for name in ("phase", "phase_ood", "clear", "margin", "margin_error", "separation"):
            row[name] = here[name].item()
        for name in ("distance", "distance_error", "reference_loss", "undefined"):
            row[name] = {kind: _named(here[name].sel(set=kind)) for kind in SETS}
        row |= {
            "loss": {kind: here.loss.sel(set=kind).item() for kind in SETS},
            "composition": _named(here.composition),
            "residual": here.residual.item(),
        }
        if "token_mass" in here:
            row["token_mass"] = here.token_mass.item()
        if "order" in here.coords:
            row["shuffles"] = [
                {
                    "order": one.order.values.tolist(),
                    "phase": one.phase_by_shuffle.item(),
                    "distance": {
                        kind: _named(one.distance_by_shuffle.sel(set=kind)) for kind in SETS
                    },
                    "composition": _named(one.composition_by_shuffle),
                }
                for one in (here.isel(shuffle=place) for place in range(here.sizes["shuffle"]))
            ]
        rows.append(row)
    return {**found, "scores": rows}


def _named(values: xr.DataArray) -> dict[str, float]:
    """By predictor, those that exist."""
    pairs = zip(values.predictor.values.tolist(), values.values.tolist(), strict=True)
    return {name: value for name, value in pairs if value == value}


def describe(scores: xr.Dataset) -> str:
    """Scores as a text to read."""
    about = scores.attrs
    facts = "".join(f", {name} {value}" for name, value in loads(about["facts"]).items())
    lines = [
        f"model   {about['model']}: {about['kind']}{facts}",
        f"chains  {about['chain_source']}: K = {about['chains']}, C = {about['states']}",
        f"prior   {about['prior']}",
        f"drawn   {about['sequences']} sequences of each N, draw {about['draw']}"
        + f", states in {about['shuffles']} orders" * (about["shuffles"] > 1),
    ]
    for context in scores.context.values.tolist():
        here = scores.sel(context=context)
        phase = here.phase.item()
        sure = "" if phase == "none" else f" ({'clear' if here.clear else 'unclear'})"
        shares = _named(here.composition).items()
        composition = ", ".join(f"{name} {share:.0%}" for name, share in shares)
        lines += [
            "",
            f"N = {context}: {phase}{sure}, margin {here.margin.item():.4f} ± "
            f"{here.margin_error.item():.4f} nats; OOD {here.phase_ood.item()}",
            f"  composition {composition}; residual {here.residual.item():z.4f} nats",
        ]
        if "token_mass" in here:
            lines.append(f"  the tokens have {here.token_mass.item():.1%} of the probability")
        if "phase_by_shuffle" in here:
            lines.append(f"  by order of states: {', '.join(here.phase_by_shuffle.values)}")
        names = list(_named(here.distance.sel(set="id")))
        lines.append(f"  {'KL to':6}" + "".join(f"{name:>18}" for name in names))
        for kind in SETS:
            row = here.sel(set=kind, predictor=names)
            cells = [
                f"{distance:z.4f} ± {error:.4f}"
                for distance, error in zip(
                    row.distance.values, row.distance_error.values, strict=True
                )
            ]
            lines.append(f"  {kind.upper():6}" + "".join(f"{cell:>18}" for cell in cells))
    return "\n".join(lines)
