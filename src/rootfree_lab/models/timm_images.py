"""Image models of timm, at full size, with stems for small images, and in miniature.

timm's networks are made for 224 pixels: their stems shrink the image fourfold before the first
block. In images of at most 64 pixels that would leave nothing to look at, so there

    ResNet, DenseNet     start with a 3×3 convolution of stride 1, without pooling,
    VGG                  (which has no such stem) has 1×1 maps where its classifier wants 7×7,
    Swin, FocalNet       take patches of 2×2 pixels instead of 4×4,
    GCViT                does not stride in its first convolution,
    ViT                  takes patches of 4×4 instead of 16×16.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from rootfree_lab.config.reading import ConfigError
from rootfree_lab.data import Dataset
from rootfree_lab.torchvision_shim import make_importable

_SMALL = 64  # pixels a side


def _small(data: Dataset) -> bool:
    return max(data.shape[1:]) <= _SMALL


def _common(data: Dataset, **options: Any) -> dict[str, Any]:
    """What every constructor of timm takes; options that were not given keep timm's defaults."""
    given = {key: value for key, value in options.items() if value is not None}
    return {"in_chans": data.shape[0], "num_classes": data.classes, **given}


def _sides(name: str, data: Dataset, *, least: int = 1, multiple: int = 1) -> tuple[int, int]:
    _, height, width = data.shape
    if min(height, width) < least or height % multiple or width % multiple:
        raise ConfigError(
            f"the model {name!r} needs images with sides of at least {least} pixels that are "
            f"multiples of {multiple}, got {height}x{width}"
        )
    return height, width


def _timm(module: str = "") -> Any:
    make_importable()
    return importlib.import_module(f"timm{module}")


def _create(name: str, **options: Any) -> Any:
    return _timm().create_model(name, pretrained=False, **options)


def _first_convolution(data: Dataset, width: int) -> nn.Conv2d:
    convolution = nn.Conv2d(data.shape[0], width, 3, padding=1, bias=False)
    nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")
    return convolution


# -- convolutional networks ------------------------------------------------------------------------


def _resnet(model: Any, data: Dataset) -> nn.Module:
    if _small(data):
        model.conv1 = _first_convolution(data, model.conv1.out_channels)
        model.maxpool = nn.Identity()
    return model  # type: ignore[no-any-return]


def _resnet_of_timm(depth: int) -> Callable[..., nn.Module]:
    def build(data: Dataset, *, drop_rate: float | None = None) -> nn.Module:
        return _resnet(_create(f"resnet{depth}", **_common(data, drop_rate=drop_rate)), data)

    build.__name__ = f"resnet{depth}"
    return build


resnet18, resnet34, resnet50 = map(_resnet_of_timm, (18, 34, 50))


def resnet_micro(data: Dataset) -> nn.Module:
    """A ResNet with one block in each of four stages, at most 32 channels."""
    timm = _timm(".models.resnet")
    sizes = {"layers": (1, 1, 1, 1), "channels": (8, 16, 24, 32)}
    return _resnet(timm.ResNet(timm.BasicBlock, **sizes, **_common(data)), data)


def _vgg(model: Any, data: Dataset, hidden: int, drop_rate: float | None) -> nn.Module:
    from timm.models.vgg import ConvMlp

    kernel = 1 if _small(data) else 7
    inputs = model.pre_logits.fc1.in_channels
    model.pre_logits = ConvMlp(inputs, hidden, kernel, drop_rate=drop_rate or 0.0)
    return model  # type: ignore[no-any-return]


def vgg16_bn(data: Dataset, *, drop_rate: float | None = None) -> nn.Module:
    """VGG-16 with batch normalisation; 34 million parameters on CIFAR-100."""
    _sides("vgg16_bn", data, least=32)
    model = _create("vgg16_bn", **_common(data, drop_rate=drop_rate))
    if not _small(data):
        return model  # type: ignore[no-any-return]
    return _vgg(model, data, 4096, drop_rate)


def vgg_micro(data: Dataset) -> nn.Module:
    """Three convolutions with batch normalisation and a classifier of 32 units."""
    _sides("vgg_micro", data, least=8)
    layers = [8, "M", 16, "M", 32, "M"]
    model: Any = _timm(".models.vgg").VGG(layers, norm_layer=nn.BatchNorm2d, **_common(data))
    # The head reads as many channels as the classifier has units: 4096 in timm's constructor.
    model = _vgg(model, data, 32, None)
    model.head.fc = nn.Linear(32, data.classes)
    return model  # type: ignore[no-any-return]


def _densenet(model: Any, data: Dataset) -> nn.Module:
    if _small(data):
        model.features.conv0 = _first_convolution(data, model.features.conv0.out_channels)
        model.features.pool0 = nn.Identity()
    return model  # type: ignore[no-any-return]


def densenet121(data: Dataset, *, drop_rate: float | None = None) -> nn.Module:
    """DenseNet-121."""
    return _densenet(_create("densenet121", **_common(data, drop_rate=drop_rate)), data)


def densenet_micro(data: Dataset) -> nn.Module:
    """Two dense blocks of two layers that grow by 8 channels."""
    kind = _timm(".models.densenet").DenseNet
    return _densenet(kind(growth_rate=8, block_config=(2, 2), **_common(data)), data)


# -- transformers and their kin --------------------------------------------------------------------


def _swin_options(name: str, data: Dataset) -> dict[str, Any]:
    patch, window = (2, 4) if _small(data) else (4, 7)
    sides = _sides(name, data, least=8 * patch, multiple=patch)
    return {"img_size": sides, "patch_size": patch, "window_size": window}


def swin_tiny(data: Dataset, *, drop_path_rate: float | None = None) -> nn.Module:
    """Swin-T; windows of 7×7 patches, of 4×4 in small images."""
    options = _common(data, drop_path_rate=drop_path_rate, **_swin_options("swin_tiny", data))
    return _create("swin_tiny_patch4_window7_224", **options)  # type: ignore[no-any-return]


def _two_stages(channels: int) -> dict[str, Any]:
    """Two blocks with `channels`, then two with twice as many; heads of 16 to 32 channels."""
    heads = max(1, channels // 32)
    return {"embed_dim": channels, "depths": (2, 2), "num_heads": (heads, 2 * heads)}


def swin_micro(data: Dataset, *, channels: int = 16) -> nn.Module:
    """Swin with two stages of two blocks, 16 and 32 channels if nothing else is said."""
    options = _common(data, **_swin_options("swin_micro", data), **_two_stages(channels))
    kind = _timm(".models.swin_transformer").SwinTransformer
    return kind(drop_path_rate=0.0, **options)  # type: ignore[no-any-return]


def _gcvit(name: str, data: Dataset, create: Callable[..., Any], **options: Any) -> nn.Module:
    if not _small(data):
        sides = _sides(name, data, least=64, multiple=32)
        return create(img_size=sides, **_common(data, **options))  # type: ignore[no-any-return]
    height, width = _sides(name, data, least=16, multiple=16)
    # The sizes of the maps are worked out from a stem that shrinks fourfold; ours shrinks twofold.
    model = create(
        img_size=(2 * height, 2 * width),
        window_ratio=(16, 16, 16, 32),
        **_common(data, **options),
    )
    model.stem.conv1.stride = (1, 1)
    return model  # type: ignore[no-any-return]


def gcvit_xxtiny(data: Dataset, *, drop_path_rate: float | None = None) -> nn.Module:
    """GCViT-XXT."""

    create = partial(_create, "gcvit_xxtiny")
    return _gcvit("gcvit_xxtiny", data, create, drop_path_rate=drop_path_rate)


def gcvit_micro(data: Dataset, *, channels: int = 16) -> nn.Module:
    """GCViT with two stages of a local and a global block, 16 and 32 channels by default."""
    kind = _timm(".models.gcvit").GlobalContextVit
    return _gcvit("gcvit_micro", data, kind, **_two_stages(channels))


def _focalnet(name: str, model: Any, data: Dataset) -> nn.Module:
    _sides(name, data, least=16 if _small(data) else 32)
    if _small(data):
        model.stem.proj = nn.Conv2d(data.shape[0], model.stem.proj.out_channels, 2, stride=2)
    return model  # type: ignore[no-any-return]


def focalnet_tiny_srf(data: Dataset, *, drop_path_rate: float | None = None) -> nn.Module:
    """FocalNet-T with small receptive fields."""
    options = _common(data, drop_path_rate=drop_path_rate)
    return _focalnet("focalnet_tiny_srf", _create("focalnet_tiny_srf", **options), data)


def focalnet_micro(data: Dataset, *, channels: int = 16) -> nn.Module:
    """FocalNet with one block in each of three stages, 16 to 64 channels by default."""
    model = _timm(".models.focalnet").FocalNet(
        embed_dim=channels,
        depths=(1, 1, 1),
        focal_levels=(2, 2, 2),
        focal_windows=(3, 3, 3),
        drop_path_rate=0.0,
        **_common(data),
    )
    return _focalnet("focalnet_micro", model, data)


def _vit(size: str) -> Callable[..., nn.Module]:
    """12 blocks of width 192 (tiny), 384 (small) or 768 (base)."""
    name = f"vit_{size}"

    def build(
        data: Dataset, *, patch: int | None = None, drop_path_rate: float | None = None
    ) -> nn.Module:
        patch = patch or (4 if _small(data) else 16)
        sides = _sides(name, data, least=patch, multiple=patch)
        return _create(  # type: ignore[no-any-return]
            f"{name}_patch16_224",
            **_common(data, img_size=sides, patch_size=patch, drop_path_rate=drop_path_rate),
        )

    build.__name__ = name
    return build


vit_tiny, vit_small, vit_base = map(_vit, ("tiny", "small", "base"))
