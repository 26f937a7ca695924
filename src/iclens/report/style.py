"""One look for the page and the figures: a colour for each phase, and their blends."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float

from iclens.phases import PHASES

PHASE_COLOURS = {"G1": "#3a9cd4", "G2": "#4356d6", "M1": "#c68413", "M2": "#c02a46"}
"""Hue tells generalising (blue) from memorising (red), depth one-point (light) from two-point.

Told apart in protanopia and deuteranopia, and at a contrast of at least 3 on the light and on the
dark background, so that a curve has the same colour everywhere.
"""
LIGHT = {
    "surface": "#ffffff",
    "ink": "#1b1f24",
    "muted": "#5b636d",
    "none": "#d5d9de",
    "rule": "#dfe3e7",
    "raised": "#f6f7f9",
}
DARK = {
    "surface": "#111418",
    "ink": "#e8eaed",
    "muted": "#a2abb5",
    "none": "#3d434b",
    "rule": "#2b3037",
    "raised": "#191d22",
}
"""Background, text, secondary text, cells of a model without a phase, rules, raised areas."""

# Ottosson's OKLab: linear-light sRGB -> cone responses -> (cube root) -> lightness and two hues.
_RGB_TO_LMS = np.array(
    [
        [0.4122214708, 0.5363325363, 0.0514459929],
        [0.2119034982, 0.6806995451, 0.1073969566],
        [0.0883024619, 0.2817188376, 0.6299787005],
    ]
)
_LMS_TO_LAB = np.array(
    [
        [0.2104542553, 0.7936177850, -0.0040720468],
        [1.9779984951, -2.4285922050, 0.4505937099],
        [0.0259040371, 0.7827717662, -0.8086757660],
    ]
)


def srgb(colour: str) -> Float[np.ndarray, "rgb=3"]:
    """Red, green and blue in [0, 1] of a colour written `#rrggbb`."""
    return np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255


def linear_light(rgb: Float[np.ndarray, "*axes rgb=3"]) -> Float[np.ndarray, "*axes rgb=3"]:
    """Undo the transfer curve of sRGB (IEC 61966-2-1)."""
    return np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)


def contrast(one: str, other: str) -> float:
    """Contrast ratio of two colours, 1 to 21 (WCAG 2): text wants 4.5, lines and areas 3."""
    luminance = [linear_light(srgb(c)) @ np.array([0.2126, 0.7152, 0.0722]) for c in (one, other)]
    return float((max(luminance) + 0.05) / (min(luminance) + 0.05))


def text_on(phase: str) -> str:
    """The colour of text on a phase's colour."""
    colours = (LIGHT["surface"], LIGHT["ink"])
    return max(colours, key=lambda colour: contrast(colour, PHASE_COLOURS[phase]))


def oklab(linear: Float[np.ndarray, "*axes rgb=3"]) -> Float[np.ndarray, "*axes lab=3"]:
    """Linear-light sRGB in OKLab, where equal distances look about equally far apart."""
    return np.cbrt(linear @ _RGB_TO_LMS.T) @ _LMS_TO_LAB.T


def blend(composition: Float[np.ndarray, "step predictor=4"]) -> list[str]:
    """The phase colours mixed by composition, linearly in OKLab, as `#rrggbb`.

    A reference that does not exist (NaN) has no weight.
    """
    corners = oklab(linear_light(np.stack([srgb(PHASE_COLOURS[phase]) for phase in PHASES])))
    lms = (np.nan_to_num(composition) @ corners) @ np.linalg.inv(_LMS_TO_LAB).T
    linear = np.clip(lms**3 @ np.linalg.inv(_RGB_TO_LMS).T, 0, 1)
    rgb = np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)
    return ["#{:02x}{:02x}{:02x}".format(*row) for row in np.rint(255 * rgb).astype(int).tolist()]
