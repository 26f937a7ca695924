"""What commands print for programs."""

import math
from json import dumps
from typing import Any

import numpy as np


def as_json(value: Any) -> str:
    """JSON, in which what is not finite is null."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: plain(inner) for name, inner in value.items()}
        if isinstance(value, list | tuple | np.ndarray):
            return [plain(inner) for inner in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return dumps(plain(value), allow_nan=False)
