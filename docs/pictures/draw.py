"""The pictures of the documentation: `python docs/pictures/draw.py` writes them beside itself.

The matrices are the real ones: packed factors of the library's structures, unpacked. The curves are
those of the recorded runs in docs/first_try/tuned.jsonl.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

import torch
from torch import Tensor

from rootfree.structures import Structure, make_structure
from rootfree_lab.bench.first_try.records import read
from rootfree_lab.bench.first_try.tuned import Tuned, tuned

D = 12  # the axis
STRUCTURES = (
    "dense",
    "diagonal",
    "block_diagonal:4",
    "lower_triangular",
    "upper_triangular",
    "hierarchical:3",
    "lower_toeplitz",
    "upper_toeplitz",
)
CELL, GAP, MARGIN = 9, 26, 20
SHADES = ("#c5cae9", "#9fa8da", "#7986cb", "#5c6bc0", "#3949ab")
FILLED, EMPTY, LINE, INK = "#7986cb", "#ffffff", "#e0e0e0", "#37474f"


def factor(structure: Structure) -> Tensor:
    """K (d, d) whose packed numbers are 1, 2, 3, ...: entries of one number are equal."""
    count = math.prod(structure.packed_shape)
    packed = torch.arange(1.0, count + 1, dtype=torch.float64)
    return structure.unpack(packed.view(1, *structure.packed_shape))[0]


def colours(K: Tensor) -> list[list[str]]:
    """A shade for each number, and none where an entry is always zero."""
    numbers = K.to(torch.int64).tolist()
    return [[SHADES[7 * n % len(SHADES)] if n else EMPTY for n in row] for row in numbers]


def mask(M: Tensor) -> list[list[str]]:
    """One colour where M has an entry. The numbers of a factor are positive: nothing cancels."""
    return [[FILLED if entry else EMPTY for entry in row] for row in (M != 0).tolist()]


def grid(cells: Sequence[Sequence[str]], x: int, y: int, *, size: int = CELL) -> list[str]:
    """Squares in rows: one path for all squares of a colour."""
    squares: dict[str, str] = {}
    for i, row in enumerate(cells):
        for j, colour in enumerate(row):
            square = f"M{x + j * size} {y + i * size}h{size}v{size}h-{size}z"
            squares[colour] = squares.get(colour, "") + square
    return [f'<path fill="{c}" stroke="{LINE}" d="{d}"/>' for c, d in sorted(squares.items())]


def text(words: str, x: int, y: int, *, size: int = 13, anchor: str = "start") -> str:
    """A line of text."""
    return (
        f'<text x="{x}" y="{y}" font-family="sans-serif" font-size="{size}" '
        f'text-anchor="{anchor}" fill="{INK}">{words}</text>'
    )


def picture(width: int, height: int, title: str, parts: Sequence[str]) -> str:
    """An SVG file."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" role="img">'
    )
    background = f'<rect width="{width}" height="{height}" fill="#fafafa"/>'
    return "\n".join([head, f"<title>{title}</title>", background, *parts, "</svg>", ""])


def structures() -> str:
    """K and KKᵀ of every structure, two structures a row."""
    side, column, row = D * CELL, 2 * D * CELL + 3 * GAP, D * CELL + 64
    parts = []
    for number, name in enumerate(STRUCTURES):
        structure = make_structure(name, D)
        K = factor(structure)
        x, y = MARGIN + number % 2 * column, MARGIN + number // 2 * row
        parts.append(text(name, x, y + 12))
        parts += grid(colours(K), x, y + 22)
        parts += grid(mask(K @ K.mT), x + side + GAP, y + 22)
        parts.append(text("K", x + side // 2, y + side + 37, size=11, anchor="middle"))
        middle = x + side + GAP + side // 2
        parts.append(text("K Kᵀ", middle, y + side + 37, size=11, anchor="middle"))
    rows = math.ceil(len(STRUCTURES) / 2)
    title = "Factors K of eight structures, and the preconditioners K Kᵀ"
    return picture(2 * column + MARGIN, rows * row + MARGIN, title, parts)


def batch_size() -> str:
    """Three batches: a filled square is a term of the averaged loss."""
    size, y = 18, 62
    images = [[FILLED] * 8]
    lengths = (6, 4, 5)  # tokens of a sequence; the rest is padding
    tokens = [[FILLED] * n + [EMPTY] * (6 - n) for n in lengths]
    parts = [text("images", MARGIN, 28, size=14), text("8 images", MARGIN, 48, size=11)]
    parts += [*grid(images, MARGIN, y, size=size), text("B = 8", MARGIN, y + 38)]
    x = MARGIN + 8 * size + 56
    parts += [text("tokens of a language model", x, 28, size=14)]
    parts += [text("3 sequences, 3 places of padding", x, 48, size=11)]
    parts += [*grid(tokens, x, y, size=size), text(f"B = {sum(lengths)}, not 3", x, y + 74)]
    x += 6 * size + 156
    parts += [text("2 ranks × 3 micro-batches", x, 28, size=14)]
    parts += [text("4 images each, one step", x, 48, size=11)]
    for rank in range(2):
        for part in range(3):
            place = x + part * (4 * size + 8), y + rank * (size + 8)
            parts += grid([[FILLED] * 4], *place, size=size)
    parts.append(text("B = 24, not 4", x, y + 2 * (size + 8) + 20))
    return picture(x + 3 * (4 * size + 8) + MARGIN, 156, "What B counts", parts)


RECORDS = Path(__file__).parents[1] / "first_try" / "tuned.jsonl"
COLOURS = {
    "IFWhitening": "#d55e00",
    "SOAP": "#009e73",
    "Muon": "#0072b2",
    "IFShampoo": "#e69f00",
    "AdamW": "#1b1f24",
}
WIDE, HIGH = 220, 190  # of a panel


def mean_curve(runs: Tuned) -> list[tuple[int, float]]:
    """(step, training loss), the mean over seeds where all have one."""
    curves = [{step: loss for step, loss in run.curve if loss is not None} for run in runs.best]
    steps = sorted(set.intersection(*map(set, curves)))
    return [(step, mean(curve[step] for curve in curves)) for step in steps]


def panel(
    title: str, score: str, found: dict[str, Tuned], x: int, *, least: float, most: float
) -> list[str]:
    """Logarithmic training losses between two limits; beside them the scores at the end."""
    y, bottom = 56, 56 + HIGH

    def height(loss: float) -> float:
        share = math.log(loss / least) / math.log(most / least)
        return bottom - HIGH * min(share, 1.0)

    parts = [text(title, x, 22, size=14), text("training loss", x, 42, size=11)]
    for tick in (0.1, 0.2, 0.5, 1.0, 2.0):
        if least <= tick <= most:
            at = round(height(tick))
            parts.append(f'<path d="M{x} {at}h{WIDE}" stroke="{LINE}"/>')
            parts.append(text(f"{tick:g}", x - 6, at + 4, size=10, anchor="end"))
    parts.append(f'<path d="M{x} {y}v{HIGH}h{WIDE}" fill="none" stroke="{INK}"/>')
    side = x + WIDE + 14
    parts.append(text(score, side, y + 10, size=11))
    ranked = sorted(found, key=lambda name: mean(found[name].scores))
    for place, name in enumerate(ranked):
        curve, last = mean_curve(found[name]), found[name].best[0].steps
        points = " ".join(f"{x + WIDE * s / last:.1f},{height(v):.1f}" for s, v in curve)
        stroke = f'stroke="{COLOURS[name]}" stroke-width="{3 if name == "IFWhitening" else 1.6}"'
        parts.append(f'<polyline fill="none" {stroke} points="{points}"/>')
        final = mean(found[name].scores)
        shown = f"{final:.1%}" if score == "test error" else f"{final:.3f}"
        row = y + 32 + 18 * place
        parts.append(f'<path d="M{side} {row - 4}h16" {stroke}/>')
        parts.append(text(f"{shown} {name}", side + 22, row, size=11))
    parts.append(text(f"{last:,} steps", x + WIDE, bottom + 16, size=10, anchor="end"))
    return parts


def tuned_runs() -> str:
    """Two networks, every optimizer at the best setting tried."""
    found = tuned(read(RECORDS))
    gpt, vit = MARGIN + 24, MARGIN + 24 + WIDE + 180
    titles = ("byte transformer", "validation loss"), ("small ViT, CIFAR-10", "test error")
    parts = panel(*titles[0], found["gpt_sotu"], gpt, least=0.8, most=3.2)
    parts += panel(*titles[1], found["vit_cifar10"], vit, least=0.08, most=2.4)
    title = "Training loss of tuned optimizers, mean over seeds"
    return picture(vit + WIDE + 150, 56 + HIGH + 30, title, parts)


PICTURES = {
    "structures.svg": structures,
    "batch_size.svg": batch_size,
    "tuned.svg": tuned_runs,
}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        Path(__file__).with_name(name).write_text(draw(), encoding="utf-8")
