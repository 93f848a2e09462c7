"""Values to colours for the tokens of a report: a light tint, so that text on it stays readable.

Guarantees: any float has a colour, whatever a run recorded. Not covered: which scale a view has (`rollouts.py`).
"""

from __future__ import annotations

import math

DEEPEST = 0.65
"""Share of the full colour at the ends of a scale; the rest is white."""


class Scale:
    """Values to colours: diverging around a centre, or from white upwards.

    Example: `Scale(-0.5, 0.5, centre=0.0).color(0.2)` is `"#f5d3bd"` or near it.
    """

    def __init__(self, low: float, high: float, *, centre: float | None = None, log: bool = False) -> None:
        self.low, self.high, self.centre, self.log = low, high, centre, log

    def color(self, value: float) -> str:
        """Hex colour; values beyond the ends have the colour of the end, those that are no number none."""
        if not math.isfinite(value):
            return "#ffffff"
        inner = math.log(max(value, 1e-9)) if self.log else value
        share = (inner - self.low) / ((self.high - self.low) or 1.0)
        share = min(1.0, max(0.0, share))
        if self.centre is None:
            return _blend((58, 125, 68), share * DEEPEST)
        side = 2 * share - 1
        return _blend((200, 100, 30) if side > 0 else (27, 108, 168), abs(side) * DEEPEST)

    def at(self, share: float) -> float:
        """The value at a share of the scale."""
        inner = self.low + share * (self.high - self.low)
        return math.exp(inner) if self.log else inner

    def marks(self) -> tuple[str, str, str]:
        """Labels of the low end, the centre (empty without one) and the high end."""
        middle = "" if self.centre is None else f"{self.at(0.5):.3g}"
        return f"{self.at(0):.3g}", middle, f"{self.at(1):.3g}"


def _blend(color: tuple[int, int, int], share: float) -> str:
    return "#" + "".join(f"{round(255 + (part - 255) * share):02x}" for part in color)
