"""The recorded cases: small float64 parameters, one optimizer, a few steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Shapes = Mapping[str, tuple[int, ...]]

#: Two of each shape, so that stacks have several blocks.
PLAIN: Shapes = {"v": (7,), "w": (7,), "A": (5, 6), "B": (5, 6), "T": (3, 4, 2)}
CONV: Shapes = {"K": (4, 3, 2, 2), "L": (4, 3, 2, 2), "b": (4,), "c": (4,)}
MATRICES: Shapes = {"A": (5, 7), "B": (5, 7), "C": (7, 5), "v": (5,)}
#: Large enough for the products of the BLAS library.
WIDE: Shapes = {"A": (9, 11), "B": (9, 11)}
ODD: Shapes = {"s": (), "r": (1, 5), "t": (3, 1, 2), "u": (2, 3, 2, 1, 2), "v": (5,)}
#: (W, b) and (X, d) are joint where the case says so.
PAIRS: Shapes = {"W": (4, 5), "b": (4,), "X": (4, 5), "d": (4,), "A": (3, 4), "v": (5,)}


@dataclass(frozen=True)
class Case:
    """One run: `options` are the optimizer's; the rest is what happens around it."""

    name: str
    optimizer: str
    shapes: Shapes
    options: Mapping[str, Any]
    steps: int = 15
    #: step -> options that are set in every group before it
    changes: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    #: parameter -> options of a group of its own
    own: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    #: parameter -> form of its curvature, see `trajectories.Given`; "" for all others
    curvature: Mapping[str, str | None] = field(default_factory=dict)
    #: (weight, bias) pairs that are one matrix
    joint: tuple[tuple[str, str], ...] = ()
    tensor_lr: bool = False
    channels_last: bool = False


B = 32
MOVES = {4: {"batch_size": 20}, 7: {"lr": 0.02}, 10: {"batch_size": 48, "lr": 0.03}}
MIXED = {"v": "diagonal", "A": "kronecker", "B": "outer", "T": "kronecker-merged"}  # w: none

#: IF-Shampoo as in the paper.
PAPER = {
    "structure": "dense",
    "block_size": None,
    "update_every": 1,
    "factor_norm": "frobenius",
    "init_scale": 1.0,
    "max_update_rms": None,
}


def _structure(structure: Any, shapes: Shapes = MATRICES, **options: Any) -> Case:
    name = structure if isinstance(structure, str) else "mixed"
    basic = {"lr": 0.02, "batch_size": B, "precond_lr": 0.2, "damping": 1e-3, "update_every": 1}
    options = {**basic, "structure": structure, **options}
    return Case(f"IFShampoo {name.replace(':', ' ')}", "IFShampoo", shapes, options)


DIAGONAL = [
    Case("RFRMSprop", "RFRMSprop", PLAIN, {"lr": 0.02, "batch_size": B, "weight_decay": 0.01}),
    Case(
        "RFRMSprop changes",
        "RFRMSprop",
        ODD,
        {"lr": 0.05, "batch_size": B, "momentum": 0.0, "precond_lr": 0.1},
        changes=MOVES,
    ),
    Case(
        "RFRMSprop curvature",
        "RFRMSprop",
        PLAIN,
        {"lr": 0.02, "batch_size": B, "precond_lr": 0.1},
        curvature=MIXED,
    ),
    Case(
        "RFRMSprop joint",
        "RFRMSprop",
        PAIRS,
        {"lr": 0.02, "batch_size": B, "precond_lr": 0.1, "momentum": 0.5},
        curvature={"W": "kronecker", "X": "outer", "A": "diagonal"},
        joint=(("W", "b"), ("X", "d")),
    ),
    Case("RFAdagrad", "RFAdagrad", CONV, {"lr": 0.3, "batch_size": B, "weight_decay": 0.01}),
    Case(
        "RFAdagrad tensor lr",
        "RFAdagrad",
        ODD,
        {"lr": 0.2, "batch_size": B, "momentum": 0.8, "damping": 0.01},
        changes=MOVES,
        tensor_lr=True,
    ),
    Case("RFAdamW", "RFAdamW", PLAIN, {"lr": 0.05, "batch_size": B, "weight_decay": 0.02}),
    Case(
        "RFAdamW tensor lr",
        "RFAdamW",
        CONV,
        {"lr": 0.05, "batch_size": B, "betas": (0.8, 0.95), "damping": 0.01},
        changes=MOVES,
        tensor_lr=True,
        channels_last=True,
    ),
]

#: The full-matrix rules of the paper.
BARE = {"precond_lr": 0.1, "momentum": 0.0, "nesterov": False, "safeguard": False}

FULL = [
    *[
        Case(
            f"{optimizer}{form and ' '}{form} gamma {gamma}{' damped' if damping else ''}",
            optimizer,
            shapes,
            {
                **BARE,
                "lr": 0.2,
                "batch_size": B,
                "gamma": float(gamma),
                "damping": damping,
                "momentum": 0.5 * gamma,
                "block_size": block_size,
                "update_every": 1 + gamma if damping else 1,
                **({"form": form} if form else {}),
            },
        )
        for optimizer, form in (
            ("RFFullAdagrad", ""),
            ("IFFullAdagrad", "factor"),
            ("IFFullAdagrad", "covariance"),
        )
        for gamma, damping, shapes, block_size in (
            (0, 0.0, {"A": (5, 6), "B": (5, 6), "v": (7,)}, None),
            (0, 0.02, {"T": (3, 4, 2), "U": (3, 4, 2), "v": (7,)}, 9),
            (1, 0.0, {"A": (5, 6), "B": (5, 6), "v": (7,)}, 8),
            (1, 0.02, {"K": (4, 3, 2, 2), "v": (7,), "w": (7,)}, None),
        )
    ],
    Case(
        "IFFullAdagrad gradient start",
        "IFFullAdagrad",
        PLAIN,
        {
            **BARE,
            "lr": 0.5,
            "batch_size": B,
            "gamma": 1.0,
            "init_scale": "gradient",
            "riemannian_momentum": 0.4,
            "max_update_rms": 0.02,
            "factor_norm": "frobenius",
            "block_size": 12,
        },
        changes=MOVES,
    ),
    Case(
        "IFFullAdagrad covariance unbounded",
        "IFFullAdagrad",
        {"A": (5, 6), "v": (7,)},
        {
            **BARE,
            "lr": 0.1,
            "batch_size": 2,
            "form": "covariance",
            "factor_norm": None,
            "precond_lr": 0.02,
        },
    ),
    *[
        Case(
            f"{optimizer}{form and ' '}{form} curvature",
            optimizer,
            PLAIN if joint == () else PAIRS,
            {
                **BARE,
                "lr": 0.1,
                "batch_size": B,
                "gamma": gamma,
                "block_size": 14,
                "weight_decay": 0.01,
                **({"form": form} if form else {}),
            },
            curvature=given,
            joint=joint,
        )
        for optimizer, form, gamma, given, joint in (
            ("RFFullAdagrad", "", 1.0, MIXED, ()),
            ("IFFullAdagrad", "factor", 1.0, {"": "kronecker-mixed"}, ()),
            ("IFFullAdagrad", "covariance", 0.0, {"W": "outer", "A": "diagonal"}, (("W", "b"),)),
        )
    ],
]

RF_SHAMPOO = [
    Case("RFShampoo", "RFShampoo", PLAIN, {"lr": 0.03, "batch_size": B, "block_size": 4}),
    Case(
        "RFShampoo conv",
        "RFShampoo",
        CONV,
        {
            "lr": 0.03,
            "batch_size": B,
            "block_size": 3,
            "update_every": 3,
            "momentum": 0.0,
            "weight_decay": 0.02,
            "max_update_rms": 0.2,
        },
        changes=MOVES,
        channels_last=True,
    ),
    Case(
        "RFShampoo sum",
        "RFShampoo",
        WIDE,
        {
            "lr": 0.05,
            "batch_size": B,
            "gamma": 0.0,
            "update_every": 1,
            "update_rms": 0.2,
            "weight_decay": 0.1,
            "damping": 0.01,
        },
        steps=12,
    ),
    Case(
        "RFShampoo curvature",
        "RFShampoo",
        PLAIN,
        {"lr": 0.03, "batch_size": B, "block_size": 4, "precond_lr": 0.3},
        curvature=MIXED,
    ),
    Case(
        "RFShampoo joint",
        "RFShampoo",
        PAIRS,
        {"lr": 0.03, "batch_size": B, "update_every": 1},
        curvature={"W": "outer", "A": "kronecker-merged", "v": "diagonal"},
        joint=(("W", "b"), ("X", "d")),
    ),
]

IF_SHAMPOO = [
    Case("IFShampoo", "IFShampoo", PLAIN, {"lr": 0.03, "batch_size": B}, steps=20),
    Case(
        "IFShampoo paper",
        "IFShampoo",
        CONV,
        {"lr": 0.03, "batch_size": B, "precond_lr": 0.5, "weight_decay": 0.01, **PAPER},
    ),
    Case(
        "IFShampoo blocks",
        "IFShampoo",
        {**CONV, "A": (7, 5)},
        {
            "lr": 0.02,
            "batch_size": B,
            "block_size": 3,
            "update_every": 3,
            "riemannian_momentum": 0.5,
            "max_update_rms": 0.02,
        },
        changes=MOVES,
        channels_last=True,
    ),
    Case(
        "IFShampoo wide",
        "IFShampoo",
        WIDE,
        {
            "lr": 0.05,
            "batch_size": B,
            "update_every": 1,
            "precond_lr": 0.3,
            "damping": 1e-5,
            "update_rms": 0.2,
            "weight_decay": 0.1,
            "momentum": 0.8,
        },
        changes=MOVES,
        tensor_lr=True,
        steps=12,
    ),
    Case(
        "IFShampoo wide blocks",
        "IFShampoo",
        {"A": (23, 10), "B": (10, 23)},
        {"lr": 0.05, "batch_size": B, "precond_lr": 0.3, "block_size": 12},
        steps=12,
    ),
    Case(
        "IFShampoo logarithmic",
        "IFShampoo",
        ODD,
        {
            "lr": 0.02,
            "batch_size": B,
            "update_every": "logarithmic:4",
            "gamma": 0.0,
            "init_scale": 0.8,
            "momentum": 0.0,
            "factor_norm": None,
            "precond_lr": 0.01,
        },
        steps=24,
    ),
    Case(
        "IFShampoo groups",
        "IFShampoo",
        PLAIN,
        {"lr": 0.02, "batch_size": B, "block_size": 4, "max_update_rms": None},
        own={
            "A": {"update_every": 3, "precond_lr": 0.4, "structure": "lower_triangular"},
            "v": {"lr": 0.01, "momentum": 0.0, "weight_decay": 0.1, "structure": "dense"},
        },
    ),
    _structure("dense", init_scale=0.4, factor_norm=None, precond_lr=0.05, block_size=4),
    _structure("diagonal", riemannian_momentum=0.3),
    _structure("block_diagonal:3", factor_norm="frobenius", riemannian_momentum=0.3),
    _structure("lower_triangular", init_scale=0.5, block_size=4),
    _structure("upper_triangular", update_every=2, max_update_rms=0.05),
    _structure("hierarchical:2", riemannian_momentum=0.6, weight_decay=0.05),
    _structure("lower_toeplitz", update_rms=0.3),
    _structure("upper_toeplitz", factor_norm="frobenius", init_scale=0.7, block_size=4),
    _structure(
        {1: "dense", 2: ("hierarchical:3", "diagonal"), 3: "block_diagonal:2"}, PLAIN, block_size=6
    ),
    *[
        Case(
            f"IFShampoo curvature {form}",
            "IFShampoo",
            shapes,
            {"lr": 0.02, "batch_size": B, "precond_lr": 0.2, "update_every": 1, **options},
            curvature={"": form},
        )
        for form, shapes, options in (
            ("outer", PLAIN, {"block_size": 4, "riemannian_momentum": 0.3}),
            ("diagonal", CONV, {"init_scale": 1.0, "block_size": 3, "update_every": 2}),
            ("kronecker", CONV, {"factor_norm": "frobenius"}),
            ("kronecker-merged", CONV, {"block_size": 3, "structure": "lower_triangular"}),
            ("kronecker-mixed", MATRICES, {"structure": "hierarchical:2"}),
        )
    ],
    Case(
        "IFShampoo curvature mixed",
        "IFShampoo",
        PLAIN,
        {"lr": 0.02, "batch_size": B, "block_size": 4},
        curvature=MIXED,
        changes=MOVES,
    ),
    Case(
        "IFShampoo joint",
        "IFShampoo",
        PAIRS,
        {"lr": 0.02, "batch_size": B, "precond_lr": 0.2, "max_update_rms": 0.3},
        curvature={"W": "kronecker", "X": "outer", "v": "diagonal"},
        joint=(("W", "b"), ("X", "d")),
    ),
]

CASES = [*DIAGONAL, *FULL, *RF_SHAMPOO, *IF_SHAMPOO]
