"""iclens: which algorithm a transformer runs in its context, and which circuit carries it out."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from iclens.chains import ChainPrior as ChainPrior
    from iclens.chains import ChainSet as ChainSet
    from iclens.chains import DirichletRows as DirichletRows
    from iclens.chains import DoublyStochasticPrior as DoublyStochasticPrior
    from iclens.chains import Prior as Prior
    from iclens.chains import SparsePrior as SparsePrior
    from iclens.circuits.graph import Graph as Graph
    from iclens.circuits.interventions import attribution as attribution
    from iclens.circuits.interventions import contrast as contrast
    from iclens.circuits.interventions import edge_effects as edge_effects
    from iclens.circuits.interventions import mask_effects as mask_effects
    from iclens.circuits.interventions import node_masks as node_masks
    from iclens.circuits.interventions import tabulate as tabulate
    from iclens.circuits.roles import hypotheses as hypotheses
    from iclens.circuits.roles import measure_roles as measure_roles
    from iclens.circuits.roles import probe as probe
    from iclens.circuits.search import Circuit as Circuit
    from iclens.circuits.search import find_circuit as find_circuit
    from iclens.interop.export import export_model as export_model
    from iclens.interop.files import load_model as load_model
    from iclens.interop.files import save_model as save_model
    from iclens.interop.imports import import_checkpoint as import_checkpoint
    from iclens.interop.transformer_lens import load_bridge as load_bridge
    from iclens.interop.unsaid import Unsaid as Unsaid
    from iclens.lab.recipe import Recipe as Recipe
    from iclens.lab.recipe import load_recipe as load_recipe
    from iclens.lab.store import Run as Run
    from iclens.lab.store import open_run as open_run
    from iclens.lab.trace import trace_cell as trace_cell
    from iclens.phases import PhaseMap as PhaseMap
    from iclens.predictors import PREDICTORS as PREDICTORS
    from iclens.predictors import reference_predictors as reference_predictors
    from iclens.scoring import Score as Score
    from iclens.scoring import score as score
    from iclens.scoring import score_contexts as score_contexts
    from iclens.training import TrainingConfig as TrainingConfig
    from iclens.training import initial_state as initial_state
    from iclens.training import train as train
    from iclens.transformer import Edges as Edges
    from iclens.transformer import Transformer as Transformer
    from iclens.transformer import TransformerConfig as TransformerConfig
    from iclens.transformer import forward as forward

# Public names by module; imported on first use, so that `iclens --help` does not wait for jax.
_PUBLIC = {
    "iclens.chains": (
        "ChainPrior",
        "ChainSet",
        "DirichletRows",
        "DoublyStochasticPrior",
        "Prior",
        "SparsePrior",
    ),
    "iclens.predictors": ("PREDICTORS", "reference_predictors"),
    "iclens.transformer": ("Edges", "Transformer", "TransformerConfig", "forward"),
    "iclens.training": ("TrainingConfig", "initial_state", "train"),
    "iclens.phases": ("PhaseMap",),
    "iclens.scoring": ("Score", "score", "score_contexts"),
    "iclens.circuits.graph": ("Graph",),
    "iclens.circuits.interventions": (
        "attribution",
        "contrast",
        "edge_effects",
        "mask_effects",
        "node_masks",
        "tabulate",
    ),
    "iclens.circuits.roles": ("hypotheses", "measure_roles", "probe"),
    "iclens.circuits.search": ("Circuit", "find_circuit"),
    "iclens.interop.export": ("export_model",),
    "iclens.interop.files": ("load_model", "save_model"),
    "iclens.interop.imports": ("import_checkpoint",),
    "iclens.interop.transformer_lens": ("load_bridge",),
    "iclens.interop.unsaid": ("Unsaid",),
    "iclens.lab.recipe": ("Recipe", "load_recipe"),
    "iclens.lab.store": ("Run", "open_run"),
    "iclens.lab.trace": ("trace_cell",),
}
_HOME = {name: module for module, names in _PUBLIC.items() for name in names}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'iclens' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return [*_HOME, "__version__"]
