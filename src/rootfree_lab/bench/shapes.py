"""Parameter shapes of well-known models: what an optimizer step costs depends on nothing else."""

from __future__ import annotations

from collections.abc import Callable

from rootfree_lab.config.reading import check_names

Shapes = list[tuple[int, ...]]


def vit_b(layers: int = 12) -> Shapes:
    """ViT-B/16, 86.4 million parameters with its 12 layers."""
    block: Shapes = [
        (2304, 768), (2304,), (768, 768), (768,), (3072, 768), (3072,), (768, 3072), (768,),
        (768,), (768,), (768,), (768,),
    ]  # fmt: skip
    rest: Shapes = [(768, 3, 16, 16), (768,), (768,), (768,), (1000, 768), (1000,)]
    return block * layers + rest


def gpt1b() -> Shapes:
    """The 16 blocks of a gated transformer of width 2048, 822 million parameters."""
    attention: Shapes = [(2048, 2048)] * 4
    mlp: Shapes = [(5632, 2048), (5632, 2048), (2048, 5632)]
    norms: Shapes = [(2048,), (2048,)]
    return (attention + mlp + norms) * 16


def resnet34() -> Shapes:
    """ResNet-34 with 100 classes: 4-D convolutions and batch norms, 21.3 million parameters."""

    def convolution(inputs: int, outputs: int, kernel: int) -> Shapes:
        return [(outputs, inputs, kernel, kernel), (outputs,), (outputs,)]

    shapes = convolution(3, 64, 7)
    inputs = 64
    for outputs, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            shapes += convolution(inputs, outputs, 3) + convolution(outputs, outputs, 3)
            if block == 0 and inputs != outputs:  # the way around the block changes its width
                shapes += convolution(inputs, outputs, 1)
            inputs = outputs
    return [*shapes, (100, 512), (100,)]


def tiny() -> Shapes:
    """A matrix, a vector and a convolution: for trying the command out."""
    return [(64, 32), (64,), (8, 4, 3, 3)]


SHAPE_SETS: dict[str, Callable[[], Shapes]] = {
    "vit_b": vit_b,
    "gpt1b": gpt1b,
    "resnet34": resnet34,
    "vit_b_third": lambda: vit_b(layers=4),
    "tiny": tiny,
}


def shapes_of(name: str) -> Shapes:
    """The shapes of a set."""
    check_names("--shapes: the parameter set", [name], SHAPE_SETS)
    return SHAPE_SETS[name]()
