"""Markov chains: finite sets of them, the prior that they are drawn from, and sequences.

`T[a, b]` is the probability that b follows a, so that rows sum to 1, and pi = pi T is the
stationary law.  Zero-probability transitions are legal everywhere, and are never drawn.
"""

from iclens.chains.families import birth_death as birth_death
from iclens.chains.families import cyclic as cyclic
from iclens.chains.families import doubly_stochastic as doubly_stochastic
from iclens.chains.families import two_state as two_state
from iclens.chains.priors import ChainPrior as ChainPrior
from iclens.chains.priors import DirichletRows as DirichletRows
from iclens.chains.priors import Prior as Prior
from iclens.chains.sampling import _cumulative as _cumulative
from iclens.chains.sampling import walk as walk
from iclens.chains.sets import ChainSet as ChainSet
from iclens.chains.stationary import log_stationary as _log_stationary  # noqa: F401
from iclens.chains.stationary import stationary_distribution as stationary_distribution
from iclens.chains.structured import DoublyStochasticPrior as DoublyStochasticPrior
from iclens.chains.structured import SparsePrior as SparsePrior
