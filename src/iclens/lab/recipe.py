"""Recipes: the complete description of a run, read strictly from TOML and written back whole."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

import cattrs
import tomlkit

from iclens.names import nearest, unknown
from iclens.training import TrainingConfig
from iclens.transformer import TransformerConfig

Config = TypeVar("Config")
ABOUT_CELLS = ("sweep", "cluster")
"""Sections that say which cells there are and where they are trained, and nothing of any one."""
Diversity = int | Literal["infinite"]
"""Data diversity K: a number of chains, or fresh chains without end."""


CHAIN_FILES = (".npy", ".npz", ".csv", ".json")
"""Endings of files of chains."""


@dataclass(frozen=True)
class TaskConfig:
    """The sequences to predict."""

    states: int = 4
    """Number C of states."""
    context: int = 48
    """Context length N."""
    concentration: float = 1.0
    """Dirichlet concentration alpha of the rows of the chain prior."""
    weights: Literal["equal", "dirichlet"] = "equal"
    """How often sequences come from each of K chains: equally often (those of a file as often as it
    says), or by weights that are drawn once, uniformly from all that sum to 1 (the flat Dirichlet
    law)."""
    chains: str = ""
    """File of M chains that the training sets of K <= M are taken from, as `ChainSet.from_file`
    reads it; its path is relative to the recipe's file.  Empty: they are drawn from the prior."""

    def __post_init__(self) -> None:
        if self.states < 2:
            raise ValueError(f"task.states: expected at least 2, got {self.states}")
        if self.context < 2:
            raise ValueError(f"task.context: expected at least 2, got {self.context}")
        if not 0 < self.concentration < float("inf"):
            raise ValueError(
                f"task.concentration: expected a positive number, got {self.concentration}"
            )
        if self.chains and Path(self.chains).suffix.lower() not in CHAIN_FILES:
            raise ValueError(
                f"task.chains: expected a file that ends in {', '.join(CHAIN_FILES)}, "
                f"got {self.chains!r}"
            )


@dataclass(frozen=True)
class PriorConfig:
    """The chain prior: the law of fresh chains and, without a file, of the training sets."""

    kind: Literal["dirichlet", "sparse", "block", "cyclic", "doubly-stochastic", "fitted"] = (
        "dirichlet"
    )
    """Rows all alike; few successors of each state; blocks of states; a drift round a ring;
    mixtures of permutations; fitted to the chains of `task.chains`."""
    successors: int = 2
    """Of `sparse`: states that can follow a state."""
    blocks: int = 2
    """Of `block`: number of blocks."""
    outside: float = 0.1
    """Of `block`: pseudo-count of states outside the own block; those in it have the
    concentration."""
    drift: float = 5.0
    """Of `cyclic`: pseudo-count of the next state on the ring; others have the concentration."""
    permutations: int = 3
    """Of `doubly-stochastic`: permutations in a mixture; their weights have the concentration."""

    def __post_init__(self) -> None:
        for name in ("successors", "blocks", "permutations"):
            if (value := getattr(self, name)) < 2:
                raise ValueError(f"prior.{name}: expected at least 2, got {value}")
        for name in ("outside", "drift"):
            if not 0 < (value := getattr(self, name)) < float("inf"):
                raise ValueError(f"prior.{name}: expected a positive number, got {value}")


@dataclass(frozen=True)
class EvaluationConfig:
    """The evaluation sets."""

    sequences: int = 512
    """Sequences in each of the ID and the OOD set."""

    def __post_init__(self) -> None:
        if self.sequences < 2:
            raise ValueError(f"evaluation.sequences: expected at least 2, got {self.sequences}")


@dataclass(frozen=True)
class SweepConfig:
    """The cells: every K with every seed, or those of them that the thresholds need."""

    chains: tuple[Diversity, ...] = (2, 8, 32, 128, 512)
    """Values of the data diversity K; "infinite" draws a fresh chain for every sequence."""
    seeds: tuple[int, ...] = (0,)
    """Seeds, from 0 to 2^32 - 1."""
    refine: bool = False
    """Whether only those K are trained, of `chains` and then between them, that narrow the brackets
    of K1* and K2*."""
    ratio: float = 1.25
    """Where K refines: how far apart, as a factor, the ends of a bracket may stay."""

    def __post_init__(self) -> None:
        for name in ("chains", "seeds"):
            values = getattr(self, name)
            if not values:
                raise ValueError(f"sweep.{name}: expected at least one value, got none")
            if len(set(values)) != len(values):
                raise ValueError(f"sweep.{name}: expected no value twice, got {list(values)}")
        if wrong := [k for k in self.chains if k != "infinite" and not 1 <= k < 2**32]:
            raise ValueError(f"sweep.chains: expected 1 to 2^32 - 1, got {wrong[0]}")
        if not 1 < self.ratio < float("inf"):
            raise ValueError(f"sweep.ratio: expected a number above 1, got {self.ratio}")
        if wrong := [seed for seed in self.seeds if not 0 <= seed < 2**32]:
            raise ValueError(f"sweep.seeds: expected 0 to 2^32 - 1, got {wrong[0]}")


@dataclass(frozen=True)
class ClusterConfig:
    """Where cells are trained; it decides nothing about the results."""

    kind: Literal["local", "slurm"] = "local"
    """Processes on this machine, or jobs of SLURM (extra `slurm`)."""
    jobs: int = 1
    """Jobs at a time."""
    cores: int = 1
    """Cores of a job: as many cells are trained in it."""
    memory: str = "4 GiB"
    """Memory of a job."""
    walltime: str = "04:00:00"
    """After which a job ends; another one goes on with its cells."""
    queue: str = ""
    """Partition; the default one where it is empty."""
    account: str = ""
    """Account; the default one where it is empty."""
    directives: tuple[str, ...] = ()
    """Further lines for the batch system, such as "--exclusive"."""

    def __post_init__(self) -> None:
        for name in ("jobs", "cores"):
            if getattr(self, name) < 1:
                raise ValueError(f"cluster.{name}: expected at least 1, got {getattr(self, name)}")
        for name, form, example in (
            ("memory", r"\d+(\.\d+)? ?[kMGT]i?B", "4 GiB"),
            ("walltime", r"(\d+-)?\d+:\d\d:\d\d", "04:00:00"),
        ):
            if not re.fullmatch(form, value := getattr(self, name)):
                raise ValueError(f"cluster.{name}: expected a text like {example!r}, got {value!r}")


@dataclass(frozen=True)
class Recipe:
    """All that decides the results of a run, and where it is done."""

    task: TaskConfig = field(default_factory=TaskConfig)
    prior: PriorConfig = field(default_factory=PriorConfig)
    model: TransformerConfig = field(default_factory=TransformerConfig)
    train: TrainingConfig = field(default_factory=TrainingConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    sweep: SweepConfig = field(default_factory=SweepConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)

    def __post_init__(self) -> None:
        of = {"sparse": "successors", "block": "blocks"}.get(self.prior.kind)
        if of and (value := getattr(self.prior, of)) > self.task.states:
            raise ValueError(
                f"prior.{of}: expected at most task.states = {self.task.states}, got {value}"
            )
        if self.prior.kind == "fitted" and not self.task.chains:
            raise ValueError(
                'prior.kind = "fitted": expected task.chains, a file of chains, got none'
            )

    def to_toml(self) -> str:
        """The recipe as TOML with every default filled in.

        A file of chains is named without its folder: a run has it beside its recipe.
        """
        model = dataclasses.replace(self.model, hidden=self.model.mlp_width)
        task = dataclasses.replace(self.task, chains=Path(self.task.chains).name)
        return tomlkit.dumps(_plain(dataclasses.replace(self, model=model, task=task)))

    def difference(self, other: Recipe) -> list[str]:
        """What differs between this recipe and another, a line for each key.

        The sweep, to which cells can be added, and the cluster may differ.
        """
        mine, theirs = tomllib.loads(self.to_toml()), tomllib.loads(other.to_toml())
        return [
            f"{section}.{key}: {value!r} against {theirs[section][key]!r}"
            for section, table in mine.items()
            for key, value in table.items()
            if section not in ABOUT_CELLS and value != theirs[section][key]
        ]


def presets() -> list[str]:
    """Names of the recipes that come with the package."""
    folder = resources.files("iclens").joinpath("recipes")
    return sorted(entry.name[:-5] for entry in folder.iterdir() if entry.name.endswith(".toml"))


def load_recipe(name: str | Path) -> Recipe:
    """Read a preset by its name, or a recipe by the path of its TOML file.

    A file of chains is looked for beside the recipe's own.

    Raises `ValueError` with the file, the key, what was expected and what was found.
    """
    path = Path(name)
    if path.suffix == ".toml" or path.is_file():
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"recipe {str(path)!r} cannot be read: {error}") from None
    elif str(name) in presets():
        text = resources.files("iclens").joinpath("recipes", f"{name}.toml").read_text("utf-8")
    else:
        raise ValueError(f"{unknown('preset', name, presets())}, or the path of a .toml file")
    recipe = parse_recipe(text, where=str(name))
    if not recipe.task.chains:
        return recipe
    chains = str((path.parent / recipe.task.chains).resolve())
    return dataclasses.replace(recipe, task=dataclasses.replace(recipe.task, chains=chains))


def parse_recipe(text: str, where: str = "recipe") -> Recipe:
    """Read a recipe from TOML text; `where` names it in errors.  Raises as `load_recipe` does."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{where}: not valid TOML: {error}") from None
    for section, content in table.items():
        if not isinstance(content, dict):
            raise ValueError(f"{where}: {section}: expected a table of keys, got {content!r}")
    return structure(table, Recipe, where)


def structure(table: object, kind: type[Config], where: str) -> Config:
    """A dataclass from a table of its keys, nothing coerced; `where` names it in errors.

    Raises `ValueError` with the key, what was expected and what was found.
    """
    try:
        return _converter().structure(table, kind)
    except cattrs.BaseValidationError as error:
        messages = cattrs.transform_error(error, format_exception=_explain)
        raise ValueError("; ".join(f"{where}: {_place_first(line)}" for line in messages)) from None


def _place_first(line: str) -> str:
    """Turn cattrs' `message @ $.section.key` around, unless the message names the key itself."""
    message, _, path = line.rpartition(" @ $")
    key = path.lstrip(".")
    return f"{key}: {message}" if key and not message.startswith(("unknown key", key)) else message


def _converter() -> cattrs.Converter:
    """A converter that coerces nothing (cattrs alone turns 48.7 into 48 and True into 1)."""
    converter = cattrs.Converter(forbid_extra_keys=True)
    for kind in (int, float, str, bool):
        converter.register_structure_hook(kind, _strict)
    converter.register_structure_hook_func(_is_choice, _strict)
    converter.register_structure_hook_func(
        lambda kind: getattr(kind, "__origin__", None) is tuple,
        lambda value, kind: _strict_list(converter, value, kind),
    )
    return converter


def _strict_list(converter: cattrs.Converter, value: Any, kind: Any) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise TypeError(f"expected a list, got {value!r}")
    return tuple(converter.structure(entry, get_args(kind)[0]) for entry in value)


def _is_choice(kind: Any) -> bool:
    return get_origin(kind) in (Literal, Union, UnionType)


def _strict(value: Any, kind: Any) -> Any:
    options = [
        choice
        for member in (get_args(kind) if get_origin(kind) in (Union, UnionType) else [kind])
        for choice in (get_args(member) if get_origin(member) is Literal else [member])
    ]
    for option in options:
        if isinstance(option, str):
            if value == option:
                return value
        elif option is float and type(value) is int:
            return float(value)
        elif type(value) is option:
            return value
    words = [repr(option) for option in options if isinstance(option, str)]
    kinds = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
    expected = " or ".join([kinds[option] for option in options if option in kinds] + words)
    near = nearest(value, [o for o in options if isinstance(o, str)])
    raise TypeError(f"expected {expected}, got {value!r}{near}")


def _explain(error: BaseException, kind: Any) -> str:
    if isinstance(error, cattrs.ForbiddenExtraKeysError):
        sections: dict[Any, str] = {
            f.default_factory: f"{f.name}." for f in dataclasses.fields(Recipe)
        }
        prefix = sections.get(error.cl, "")
        known = [f.name for f in dataclasses.fields(error.cl)]
        return "; ".join(
            f"unknown key {prefix + key!r}{nearest(key, known, prefix)}"
            for key in sorted(error.extra_fields)
        )
    return str(error)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    return list(value) if isinstance(value, tuple) else value
