"""timm's factory, groups and schedulers with the optimizers of this library."""

from __future__ import annotations

import pytest
import torch

import rootfree
from integrations.needs import needs

pytestmark = [pytest.mark.slow, needs("timm")]


@pytest.fixture(scope="module")
def timm():
    import timm
    import timm.optim
    import timm.scheduler

    names = rootfree.timm.register()
    ours = {name for name in rootfree.__all__ if name.startswith(("RF", "IF"))}
    assert set(names) == {name.lower() for name in ours}
    assert set(names) <= set(timm.optim.list_optimizers())
    return timm


def vit(timm):
    torch.manual_seed(0)
    options = {"img_size": 16, "patch_size": 8, "embed_dim": 8, "depth": 2, "num_heads": 2}
    return timm.models.VisionTransformer(**options, num_classes=5)


def step(model, optimizer):
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(torch.randn(4, 3, 16, 16)), torch.arange(4))
    loss.backward()
    optimizer.step()


def test_layer_decay_and_weight_decay_filtering(timm):
    model = vit(timm)
    options = {"lr": 1e-2, "weight_decay": 0.1, "layer_decay": 0.5}
    optimizer = timm.optim.create_optimizer_v2(model, "ifwhitening", **options)
    assert type(optimizer) is rootfree.IFWhitening
    for group in optimizer.param_groups:
        assert all((p.ndim > 1) >= (group["weight_decay"] > 0) for p in group["params"])
    assert {group["weight_decay"] for group in optimizer.param_groups} == {0.0, 0.1}
    scheduler = timm.scheduler.CosineLRScheduler(optimizer, t_initial=10)
    step(model, optimizer)
    scheduler.step(0)
    rates = {group["lr"] for group in optimizer.param_groups}
    assert rates == {1e-2 * group["lr_scale"] for group in optimizer.param_groups}
    assert min(rates) == pytest.approx(1e-2 * 0.5**3)  # stem, two blocks, head


def test_every_name_makes_its_class_and_takes_a_step(timm):
    for name in (each for each in rootfree.__all__ if each.startswith(("RF", "IF"))):
        method = getattr(rootfree, name)
        B = {"batch_size": 4} if "batch_size" in method.options else {}
        model = vit(timm)
        optimizer = timm.optim.create_optimizer_v2(
            model, name.lower(), lr=1e-3, eps=1e-8, foreach=True, **B
        )
        assert type(optimizer) is method
        before = model.head.weight.clone()
        step(model, optimizer)
        assert not torch.equal(before, model.head.weight)


def test_the_fallback_of_hybrid_optimizers_is_adamw(timm):
    options = {"fallback_list": ("head.*", "pos_embed"), "lr": 1e-2, "weight_decay": 0.1}
    make, model = timm.optim.create_optimizer_v2, vit(timm)
    optimizer = make(model, "ifwhitening", companion_lr=5e-3, **options)
    left = [group for group in optimizer.param_groups if group.get("companion") == "adamw"]
    assert {id(p) for group in left for p in group["params"]} == {
        id(p) for p in (model.pos_embed, *model.head.parameters())
    }
    assert {(group["lr"], group["betas"]) for group in left} == {(5e-3, (0.9, 0.95))}
    plain = make(model, "ifwhitening", **options).param_groups
    assert {group["lr"] for group in plain if group.get("companion")} == {2e-3}
    step(model, optimizer)
    # A diagonal method takes every parameter itself.
    assert make(model, "rfadamw", batch_size=4, **options).param_groups


def test_groups_from_the_modules_and_lookahead(timm):
    model = vit(timm)
    optimizer = timm.optim.create_optimizer_v2(
        model, "lookahead_ifshampoo", param_group_fn=rootfree.parameter_groups
    )
    roles = {group["role"] for group in optimizer.param_groups}
    assert {"hidden", "head", "vector"} <= roles
    rootfree.track_batch_size(model, optimizer)  # looks through Lookahead
    step(model, optimizer)
    assert optimizer.param_groups[0]["batch_size"] == 4
