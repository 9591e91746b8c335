"""A line and marker beside a label in the page, drawn as the figures draw them."""

from __future__ import annotations

from rootfree_lab.report.markup import Markup, tag
from rootfree_lab.report.palette import Style

# Outlines around the centre (15, 6), by the letters that matplotlib has for them.
_OUTLINES = {
    "o": "M15 2.5a3.5 3.5 0 1 1 0 7a3.5 3.5 0 1 1 0-7z",
    "s": "M11.8 2.8h6.4v6.4h-6.4z",
    "^": "M15 2l4 7.5h-8z",
    "D": "M15 1.5l4.5 4.5l-4.5 4.5l-4.5-4.5z",
    "v": "M15 10l4-7.5h-8z",
    "P": "M13.6 2h2.8v2.6h2.6v2.8h-2.6v2.6h-2.8v-2.6h-2.6v-2.8h2.6z",
    "X": "M12.5 2l2.5 2.2l2.5-2.2l1.6 1.6l-2.2 2.4l2.2 2.4l-1.6 1.6l-2.5-2.2l-2.5 2.2"
    "l-1.6-1.6l2.2-2.4l-2.2-2.4z",
}


def swatch(style: Style | None) -> Markup:
    """The sign of a style; an empty place for a method that no figure shows."""
    if style is None:
        return tag("svg", class_="swatch", viewBox="0 0 30 12", aria_hidden="true")
    colour = f"var(--c{style.index})"
    dashes = None if style.dash == "-" else "5 2.5"
    line = tag("path", d="M1 6h28", stroke=colour, stroke_width="1.8", stroke_dasharray=dashes)
    marker = tag("path", d=_OUTLINES[style.marker], fill=colour)
    return tag("svg", line, marker, class_="swatch", viewBox="0 0 30 12", aria_hidden="true")
