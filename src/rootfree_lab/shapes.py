"""Parameter shapes of well-known models: what an optimizer step costs depends on nothing else."""

from __future__ import annotations

Shapes = list[tuple[int, ...]]


def vit_b(layers: int = 12) -> Shapes:
    """ViT-B/16, 86.4 million parameters with its 12 layers."""
    block: Shapes = [
        (2304, 768), (2304,), (768, 768), (768,), (3072, 768), (3072,), (768, 3072), (768,),
        (768,), (768,), (768,), (768,),
    ]  # fmt: skip
    rest: Shapes = [(768, 3, 16, 16), (768,), (768,), (768,), (1000, 768), (1000,)]
    return block * layers + rest


def tiny() -> Shapes:
    """A matrix, a vector and a convolution: for trying the command out."""
    return [(64, 32), (64,), (8, 4, 3, 3)]


SHAPE_SETS = {"vit_b": vit_b, "vit_b_third": lambda: vit_b(layers=4), "tiny": tiny}
