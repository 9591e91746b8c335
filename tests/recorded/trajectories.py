"""Runs of the recorded cases, and what they gave when they were recorded.

They were recorded with the version before the redesign of the step, and are recorded anew, with
`python -m recorded.trajectories` in the folder of the tests, only when a method is changed on
purpose.

All inputs are small integers over a power of two, so that they are the same on every machine.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import rootfree
from recorded.cases import CASES, Case
from recorded.probe import probe

FILE = Path(__file__).with_name("trajectories.json")


def numbers(shape: tuple[int, ...], salt: int) -> Tensor:
    """Multiples of 1/128 in [-1, 1], by a formula."""
    values = [((i * i * 7919 + i * 1047 + salt * 15485) % 257 - 128) / 128
              for i in range(salt * 31, salt * 31 + math.prod(shape))]  # fmt: skip
    return torch.tensor(values, dtype=torch.float64).reshape(shape)


class Given:
    """Curvature in a given form for each parameter; all but "outer" without the gradient."""

    def __init__(self, case: Case, params: Mapping[str, Tensor]) -> None:
        self.pairs = [(params[weight], params[bias]) for weight, bias in case.joint]
        self.forms = {p: case.curvature.get(n, case.curvature.get("")) for n, p in params.items()}
        self.salts = {p: 100 * i for i, p in enumerate(params.values())}
        self.refreshes = 0

    def joint(self) -> Sequence[tuple[Tensor, Tensor]]:
        return self.pairs

    def check(self, params: Sequence[Tensor]) -> None:
        pass

    def used(self) -> None:
        self.refreshes += 1

    def of(self, p: Tensor, *, batch_size: int) -> Any:
        form, salt, shape = self.forms[p], self.salts[p] + self.refreshes, tuple(p.shape)
        joint = any(p is weight for weight, _ in self.pairs)
        if joint:
            shape = (shape[0], math.prod(shape[1:]) + 1)
        if form is None:
            return None
        if form == "diagonal":
            return rootfree.DiagonalCurvature(4 * numbers(shape, salt))
        if form == "outer":
            V = numbers((3, *shape), salt)
            if not joint:
                assert p.grad is not None
                V[0] += batch_size / 8 * p.grad
            return rootfree.SumOfOuterProducts(V)
        axes = (shape[0], math.prod(shape[1:])) if form == "kronecker-merged" else shape
        factors = []
        for n, d in enumerate(axes):
            R = numbers((d, d), salt + 7 * n)
            factors.append(R @ R.mT)  # exact, in whatever order it is summed
        if form == "kronecker-mixed":
            factors[0] = factors[0].diagonal().clone()
        return rootfree.KroneckerCurvature(tuple(factors), axes)


def run(case: Case) -> dict[str, Tensor]:
    """The parameters after the case's steps."""
    params = {
        name: torch.nn.Parameter(_laid_out(case, numbers(shape, i)))
        for i, (name, shape) in enumerate(case.shapes.items())
    }
    optimizer = _optimizer(case, params)
    losses = [
        (p, 0.5 + numbers(p.shape, 20 + i).abs(), numbers(p.shape, 40 + i))
        for i, p in enumerate(params.values())
    ]
    for step in range(case.steps):
        for name, value in case.changes.get(step, {}).items():
            for group in optimizer.param_groups:
                if isinstance(group[name], Tensor):
                    group[name].fill_(value)
                else:
                    group[name] = value
        for i, (p, slope, target) in enumerate(losses):
            noise = numbers(p.shape, 60 + i + 9 * step) / 4
            p.grad = _laid_out(case, slope * (p.detach() - target) + noise)
        optimizer.step()
    return {name: p.detach() for name, p in params.items()}


def _laid_out(case: Case, values: Tensor) -> Tensor:
    four = case.channels_last and values.dim() == 4
    return values.contiguous(memory_format=torch.channels_last) if four else values


_SHAMPOO = {"nesterov": False, "decoupled_weight_decay": False, "max_update_rms": 1.0}
_SHAMPOO["rate_by_rank"] = False
#: Defaults from when the trajectories were recorded that are others now.
DEFAULTS_THEN: dict[str, dict[str, Any]] = {
    "RFRMSprop": {"max_update": None, "nesterov": False, "fast_start": False},
    "RFAdagrad": {"max_update": None},
    "RFAdamW": {"max_update": None, "nesterov": False, "fast_start": False},
    "RFShampoo": {"lr": 1e-3, "factor_norm": None, "init_scale": 1.0, **_SHAMPOO},
    "IFShampoo": {"lr": 1e-3, **_SHAMPOO},
}


def _optimizer(case: Case, params: Mapping[str, Tensor]) -> rootfree.RootFreeOptimizer:
    options = {**DEFAULTS_THEN.get(case.optimizer, {}), **case.options}
    if case.tensor_lr:
        options["lr"] = torch.tensor(options["lr"], dtype=torch.float64)
    if case.curvature:
        options["curvature"] = Given(case, params)
    groups: list[dict[str, Any]] = [{"params": [p for n, p in params.items() if n not in case.own]}]
    groups += [{"params": [params[name]], **own} for name, own in case.own.items()]
    optimizer: rootfree.RootFreeOptimizer = getattr(rootfree, case.optimizer)(groups, **options)
    return optimizer


@contextmanager
def one_thread() -> Iterator[None]:
    """The order of sums must not depend on the number of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def record() -> None:
    """Write the file anew."""
    with one_thread():
        results = {
            case.name: {
                name: " ".join(value.hex() for value in p.flatten().tolist())
                for name, p in run(case).items()
            }
            for case in CASES
        }
        content = {"probe": probe(), "cases": results}
    FILE.write_text(json.dumps(content, indent=1) + "\n")


def read() -> tuple[str, dict[str, dict[str, Tensor]]]:
    """The probe of the machine that recorded, and the recorded parameters of each case."""
    content = json.loads(FILE.read_text())
    shapes = {case.name: case.shapes for case in CASES}
    cases = {
        case: {
            name: torch.tensor(
                [float.fromhex(value) for value in text.split()], dtype=torch.float64
            ).reshape(shapes[case][name])
            for name, text in params.items()
        }
        for case, params in content["cases"].items()
    }
    return content["probe"], cases


if __name__ == "__main__":
    record()
