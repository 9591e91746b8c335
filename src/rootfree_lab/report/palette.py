"""One colour, marker and dash for each method, the same in every figure and table of a report."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

# Okabe and Ito's colours, which people with any colour vision tell apart (without their yellow,
# too pale for a line), and lighter ones of the same hues for a dark page.
LIGHT = ("#0072b2", "#d55e00", "#009e73", "#1b1f24", "#e69f00", "#56b4e9", "#cc79a7")
DARK = ("#3987d6", "#f07a2b", "#1fb58a", "#e8eaed", "#f2b63c", "#8fd0ff", "#e08cc0")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
Dash = Literal["-"] | tuple[float, Sequence[float]]
DASHES: tuple[Dash, ...] = ("-", (0, (4, 1.6)))

# The rest of a figure. Each colour occurs once in this file, so that a page can replace it by a
# variable of its style sheet.
INK, MUTED, GRID, PAPER = "#24292e", "#5c6570", "#dfe3e8", "#fefefe"
PARTS = {  # of a step; the optimizer's share is what the figure is about
    "data": ("Data", "#c9d1da"),
    "forward": ("Forward", "#9fb0c2"),
    "backward": ("Backward", "#71879d"),
    "optimizer": ("Optimizer", "#b3400b"),
}
DARK_PARTS = {
    "data": "#3a434d",
    "forward": "#566473",
    "backward": "#7a8ca0",
    "optimizer": "#f58a52",
}

# Variables of the page's style sheet, by day (and on paper) and by night.
DAY = {
    **{f"c{number}": colour for number, colour in enumerate(LIGHT)},
    **{f"part-{part}": colour for part, (_, colour) in PARTS.items()},
    "ink": INK, "muted": MUTED, "grid": GRID, "paper": "#ffffff", "page": "#ffffff",
    "raised": "#f4f6f8", "line": "#b4bcc6", "chosen": "#e3ebf5", "link": "#0b5cad",
    "warn": "#a8360a",
}  # fmt: skip
NIGHT = {
    **{f"c{number}": colour for number, colour in enumerate(DARK)},
    **{f"part-{part}": colour for part, colour in DARK_PARTS.items()},
    "ink": "#e4e7eb", "muted": "#9aa4b0", "grid": "#2b3138", "paper": "#14171b", "page": "#14171b",
    "raised": "#1d2228", "line": "#4b545f", "chosen": "#26364a", "link": "#79b8ff",
    "warn": "#ff9c6b",
}  # fmt: skip

MOST_DRAWN = len(LIGHT) * len(DASHES)


@dataclass(frozen=True)
class Style:
    """How a method is drawn."""

    index: int  # of the colour
    marker: str
    dash: Dash

    @property
    def colour(self) -> str:
        return LIGHT[self.index]


def handles(looks: Mapping[str, Style], text: Callable[[str], str] = str, **how: Any) -> list[Any]:
    """An entry of a legend for each label."""
    from matplotlib.lines import Line2D

    return [
        Line2D([], [], color=look.colour, marker=look.marker, label=text(label),
               **{"linestyle": look.dash, **how})
        for label, look in looks.items()
    ]  # fmt: skip


def styles(labels: Iterable[str]) -> dict[str, Style]:
    """A style for each label, in order; after the colours are used up they return dashed."""
    return {
        label: Style(
            index=number % len(LIGHT),
            marker=MARKERS[number % len(MARKERS)],
            dash=DASHES[number // len(LIGHT) % len(DASHES)],
        )
        for number, label in enumerate(dict.fromkeys(labels))
    }


def variables() -> dict[str, str]:
    """The style sheet's variable for each colour of a figure."""
    named = {INK: "ink", MUTED: "muted", GRID: "grid", PAPER: "paper"}
    named |= {colour: f"c{number}" for number, colour in enumerate(LIGHT)}
    named |= {colour: f"part-{part}" for part, (_, colour) in PARTS.items()}
    return {colour: f"var(--{name})" for colour, name in named.items()}
