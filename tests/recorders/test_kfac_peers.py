"""KFAC against curvlinops and singd on the same batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recorders.networks import labels, normal, relative, seeded
from rootfree.recorders import KFACRecorder

N, CLASSES = 6, 3
TOLERANCE = 1e-12  # float64, sums of under a thousand terms


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, CLASSES))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1, stride=2),
        nn.ReLU(),
        nn.Conv2d(3, 4, (2, 3), padding="same", dilation=2, bias=False),
        nn.Flatten(),
        nn.Linear(4 * 9, CLASSES),
    )


class Tokens(nn.Module):
    """A linear layer shared over five tokens, whose average is classified."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(4, 6)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.shared(x)).mean(1))


NETWORKS = {"mlp": (mlp, (5,)), "cnn": (cnn, (2, 5, 6)), "tokens": (Tokens, (5, 4))}


def our_factors(
    model: nn.Module, x: Tensor, loss: str, **options: Any
) -> dict[str, tuple[Tensor, ...]]:
    recorder = KFACRecorder(model, loss=loss, **options)
    with recorder:
        outputs = model(x)
        value = {
            "cross_entropy": lambda: nn.functional.cross_entropy(outputs, labels(N, CLASSES)),
            "mse": lambda: nn.functional.mse_loss(outputs, normal(N, CLASSES, seed=5)),
        }[loss]()
        recorder.backward(value, outputs)
    recorder.check(list(model.parameters()))
    B = N * CLASSES if loss == "mse" else N
    return {
        name: recorder.of(m.weight, batch_size=B).factors
        for name, m in model.named_modules()
        if isinstance(m, (nn.Linear, nn.Conv2d))
    }


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("loss", ["cross_entropy", "mse"])
@pytest.mark.parametrize("fisher", ["empirical", "type-2"])
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_product_of_factors_is_that_of_curvlinops(
    network: str, loss: str, fisher: str, sharing: str
) -> None:
    curvlinops = pytest.importorskip("curvlinops")
    make, shape = NETWORKS[network]
    model, x = seeded(make), normal(N, *shape)
    ours = our_factors(model, x, loss, fisher=fisher, sharing=sharing)
    y = labels(N, CLASSES) if loss == "cross_entropy" else normal(N, CLASSES, seed=5)
    theirs = curvlinops.KFACLinearOperator(
        model,
        nn.CrossEntropyLoss() if loss == "cross_entropy" else nn.MSELoss(),
        [p for p in model.parameters() if p.requires_grad],
        [(x, y)],
        fisher_type=fisher,
        kfac_approx=sharing,
        separate_weight_and_bias=False,
        check_deterministic=False,
    )
    theirs.compute_kronecker_factors()
    for name, (G, A) in ours.items():
        mine = torch.kron(G, A)
        other = torch.kron(theirs._gradient_covariances[name], theirs._input_covariances[name])
        assert relative(mine, other) < TOLERANCE, name


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_factors_are_those_of_singd(network: str, sharing: str) -> None:
    pytest.importorskip("singd")
    from singd.optim.utils import process_grad_output, process_input

    make, shape = NETWORKS[network]
    model, x = seeded(make), normal(N, *shape)
    ours = our_factors(model, x, "cross_entropy", sharing=sharing)
    seen: dict[str, tuple[Tensor, Tensor]] = {}

    def remember(name: str, module: nn.Module, args: Any, output: Tensor) -> None:
        output.register_hook(
            lambda g: seen.__setitem__(
                name,
                (
                    process_input(args[0].detach(), module, sharing),
                    process_grad_output(g.detach(), module, "batch", sharing),
                ),
            )
        )

    for name, module in model.named_modules():
        if name in ours:
            module.register_forward_hook(lambda m, a, o, name=name: remember(name, m, a, o))
    nn.functional.cross_entropy(model(x), labels(N, CLASSES)).backward()
    for name, (G, A) in ours.items():
        a, g = seen[name]
        assert relative(A, a.mT @ a) < TOLERANCE
        assert relative(G, g.mT @ g) < TOLERANCE
