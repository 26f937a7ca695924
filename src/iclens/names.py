"""Names that a user may have mistyped."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: object, known: Iterable[str], prefix: str = "") -> str:
    """`; did you mean 'known'?`, to end a message with; empty where nothing known is near."""
    close = difflib.get_close_matches(str(name), list(known), n=1, cutoff=0.5)
    return f"; did you mean {prefix + close[0]!r}?" if close else ""


def unknown(kind: str, name: object, known: Iterable[str]) -> str:
    """The message for a name that is not among the few `known`."""
    known = list(known)
    near = nearest(name, known)
    joined = f"{near} Expected" if near else "; expected"
    return f"unknown {kind} {str(name)!r}{joined} one of {', '.join(known)}"
