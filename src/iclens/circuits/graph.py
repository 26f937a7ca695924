"""The graph of a transformer: names of its senders and edges, and masks made from them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Float, Int

from iclens.names import nearest
from iclens.transformer import TransformerConfig


@dataclass(frozen=True)
class Graph:
    """Senders, receivers and edges of any config, by name."""

    config: TransformerConfig

    @property
    def senders(self) -> tuple[str, ...]:
        """`embed`, `pos` where positions are added, `att1.0`, `mlp1`, ... in causal order."""
        return self.config.senders

    @property
    def edges(self) -> tuple[str, ...]:
        """`embed->att1.0.q`, `lag->att1.0`, ... in the order of every mask."""
        return self.config.edges

    @cached_property
    def receivers(self) -> tuple[str, ...]:
        """What edges lead to: `att1.0.q`, `mlp1`, `out`, and `att1.0` for its lag bias."""
        return tuple(dict.fromkeys(edge.split("->")[1] for edge in self.edges))

    @cached_property
    def blocks(self) -> tuple[tuple[int, Int[np.ndarray, " edge"]], ...]:
        """For each block in order, and `out`: senders before it, and the edges into it."""
        before = {name: self._before(name) for name in self.receivers}
        ends = np.array([before[edge.split("->")[1]] for edge in self.edges])
        return tuple((end, np.flatnonzero(ends == end)) for end in sorted(set(ends.tolist())))

    def sender_of(self, receiver: str) -> int | None:
        """The index of the sender that a receiver feeds; None for `out`."""
        if receiver == "out":
            return None
        name = receiver.removesuffix(receiver[-2:]) if receiver[-2:-1] == "." else receiver
        return self.senders.index(receiver if receiver in self.senders else name)

    def index(self, edges: Iterable[str]) -> list[int]:
        """Places of edges by name; `ValueError` with the nearest name for an unknown one."""
        return [_known("edge", edge, self.edges) for edge in edges]

    def mask(
        self, *, keep: Iterable[str] | None = None, cut: Iterable[str] = ()
    ) -> Float[np.ndarray, " edge"]:
        """A mask of 1 for the edges that are kept, all by default, but for those that are cut.

        Raises `ValueError` with the nearest name for an unknown edge.
        """
        mask = np.ones(len(self.edges), np.float32)
        if keep is not None:
            mask[:] = 0
            mask[self.index(keep)] = 1
        mask[self.index(cut)] = 0
        return mask

    def from_sender(self, sender: str) -> list[str]:
        """The edges that leave a sender, `lag` among them.

        Raises `ValueError` with the nearest name for an unknown one.
        """
        origins = [edge.split("->")[0] for edge in self.edges]
        _known("sender", sender, [*self.senders, "lag"])
        return [edge for edge, origin in zip(self.edges, origins, strict=True) if origin == sender]

    def _before(self, receiver: str) -> int:
        sender = self.sender_of(receiver)
        fed = len(self.senders) if sender is None else sender
        return max(end for end in self.config.block_ends if end <= fed)


def _known(kind: str, name: str, names: Sequence[str]) -> int:
    if name not in names:
        raise ValueError(f"unknown {kind} {name!r}{nearest(name, names)}")
    return list(names).index(name)
