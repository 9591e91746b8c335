"""What docs/distributed.md says about large models is what the plan gives."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rootfree.layout.structured import structured_tiles
from rootfree.placement.boxes import block_boxes, meet, size_of
from rootfree.placement.owners import Block, assign, flops

PAGE = Path(__file__).parents[2] / "docs" / "distributed.md"
# the hidden matrices of a layer, and how many layers
MODELS = {
    "1.1B": (22, [(2048, 2048), (512, 2048), (512, 2048), (2048, 2048), (5632, 2048), (5632, 2048),
                  (2048, 5632)]),
    "70B": (80, [(8192, 8192), (1024, 8192), (1024, 8192), (8192, 8192), (28672, 8192),
                 (28672, 8192), (8192, 28672)]),
}  # fmt: skip


def row(model: str, ranks: int) -> tuple[int, int, str]:
    """MB that a rank sends in a step under FSDP2 in bf16, MB of its fp32 factors, imbalance."""
    layers, shapes = MODELS[model]
    blocks, held, factors = [], {}, 0
    for i, shape in enumerate(layers * shapes):
        rows = -(-shape[0] // ranks)
        held[i] = [
            (r, ((r * rows, min((r + 1) * rows, shape[0])), (0, shape[1])))
            for r in range(-(-shape[0] // rows))
        ]
        for t, (tile, s) in enumerate(structured_tiles(shape, structure="dense", block_size=1024)):
            boxes, cost = block_boxes(tile), flops(tile.sizes, s)
            blocks += [Block(i, t, n, box, cost) for n, box in enumerate(boxes)]
            factors += tile.blocks * sum(4 * d * d for d in tile.sizes)
    owners, load = assign(blocks, held, [0.0] * ranks)
    sent = 0
    for block, owner in zip(blocks, owners, strict=True):
        mine = [meet(box, block.box) for rank, box in held[block.parameter] if rank == owner]
        away = size_of(block.box) - sum(size_of(box) for box in mine if box)
        sent += 2 * 2 * away  # gradients there, directions back
    imbalance = max(load) / (sum(load) / ranks)
    return round(sent / ranks / 1e6), round(factors / ranks / 1e6), f"{imbalance:.2f}"


@pytest.mark.parametrize(("model", "ranks"), [("1.1B", 8), ("1.1B", 64), ("70B", 64)])
def test_the_table_of_the_page(model, ranks):
    found = re.search(rf"^\| {model} on {ranks} \|(.*)\|$", PAGE.read_text("utf-8"), re.MULTILINE)
    assert found is not None
    said = [cell.strip().replace(",", "") for cell in found[1].split("|")]
    sent, factors, imbalance = row(model, ranks)
    assert said == [f"{sent} MB", f"{factors} MB", imbalance]


if __name__ == "__main__":
    for name, count in (("1.1B", 8), ("1.1B", 64), ("70B", 64), ("70B", 1024)):
        print(name, count, row(name, count))
