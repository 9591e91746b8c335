"""The pictures of the documentation: `python docs/pictures/draw.py` writes them beside itself.

The matrices are the real ones: packed factors of the library's structures, unpacked.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from rootfree.structures import Structure, make_structure

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


PICTURES = {"structures.svg": structures, "batch_size.svg": batch_size}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        Path(__file__).with_name(name).write_text(draw(), encoding="utf-8")
