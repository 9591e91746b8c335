"""What all figures share: the style of a paper, files in three formats, and SVG inside a page."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from markupsafe import Markup, escape

from rootfree_lab.files.durable import replace_file
from rootfree_lab.report.palette import variables

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMN, TEXT = 3.4, 6.8  # inches: a column of a two-column paper, and its full width
FORMATS = ("png", "svg", "pdf")
LONGEST = 34  # characters of a label in a figure

STYLE = Path(__file__).with_name("paper.mplstyle")


@contextmanager
def style() -> Iterator[None]:
    """Draw and save inside this; nothing of the caller's matplotlib changes."""
    from matplotlib.style import context

    with context(["default", STYLE]), warnings.catch_warnings():
        # A label in a script that the font lacks shows boxes; the page has it in full.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        yield


def save(figure: Figure, stem: Path, formats: Sequence[str] | None = None) -> list[Path]:
    """Write a figure in all formats, without dates: the same records give the same files."""
    files = []
    _settle(figure)
    for ending in formats or FORMATS:
        # Not with_suffix: a name may contain a dot.
        file = stem.parent / f"{stem.name}.{ending}"
        draw = partial(figure.savefig, dpi=300, format=ending, metadata=_no_metadata(ending))
        replace_file(file, draw)
        files.append(file)
    return files


def inline(figure: Figure, *, name: str, description: str) -> Markup:
    """A figure as an SVG element whose colours follow the page: light, dark or printed."""
    _settle(figure)
    buffer = BytesIO()
    figure.savefig(
        buffer, format="svg", facecolor="none", edgecolor="none", metadata=_no_metadata("svg")
    )
    text = buffer.getvalue().decode("utf-8")
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", text, flags=re.DOTALL)
    found = re.search(r'viewBox="([^"]*)"[^>]*>(.*)</svg>', text, flags=re.DOTALL)
    if found is None:
        raise RuntimeError("matplotlib wrote an SVG without a viewBox")
    box, body = found.groups()
    # One page, many figures: every id gets the figure's name.
    body = re.sub(r'\bid="', f'id="{name}-', body)
    body = re.sub(r'\bxlink:href="#', f'href="#{name}-', body)
    body = re.sub(r"url\(#", f"url(#{name}-", body)
    replaced = variables()
    body = re.sub(r"#[0-9a-f]{6}\b", lambda match: replaced.get(match[0], match[0]), body)
    # Hundredths of a point are enough, and halve the page.
    body = re.sub(
        r'\bd="[^"]*"|translate\([^)]*\)',
        lambda place: re.sub(r"\d+\.\d{3,}", lambda n: f"{float(n[0]):.2f}", place[0]),
        body,
    )
    body = re.sub(r"\n\s*", "\n", body)
    start = f'<svg viewBox="{box}" role="img" aria-label="{escape(description)}">'
    return Markup(f"{start}{body}</svg>")


def _settle(figure: Figure) -> None:
    """Lay the figure out once, not once a format: that takes longer than drawing it."""
    if figure.get_layout_engine() is not None:
        figure.draw_without_rendering()
        figure.set_layout_engine("none")


def short(label: str) -> str:
    """A label that fits into a figure."""
    return label if len(label) <= LONGEST else f"{label[: LONGEST - 1].rstrip()}…"


def _no_metadata(ending: str) -> dict[str, None]:
    keys = {
        "png": ("Software",),
        "svg": ("Date", "Creator", "Type", "Format"),
        "pdf": ("CreationDate", "Creator", "Producer"),
    }
    return dict.fromkeys(keys[ending])
