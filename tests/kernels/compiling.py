"""Compiles the kernels that steps launch for a GPU (sm_90), on a machine that has none.

Prints how many there were, and the kernels that no step here launched. Steps run on a CPU and
nothing is computed: each launch is compiled, and leaves its results as they are.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import nn
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

import rootfree
from rootfree.kernels import triton_kernels  # noqa: F401  before kernels count as interpreted
from rootfree.kernels.finite import FiniteLook

H100 = GPUTarget("cuda", 90, 32)
NAMES = {
    torch.float32: "fp32", torch.float64: "fp64", torch.bfloat16: "bf16", torch.bool: "i1",
    torch.int16: "i16", torch.int32: "i32", torch.int64: "i64",
}  # fmt: skip
DIVISIBLE = [["tt.divisibility", 16]]
SHAPES = [(48, 64), (24, 16, 8), (7,)]  # KFAC has the odd sizes
bf16 = torch.bfloat16
METHODS: list[Callable[..., Any]] = [
    lambda ps: rootfree.IFShampoo(ps, batch_size=8, block_size=64, matmul_dtype=bf16, fused=True),
    lambda ps: rootfree.IFShampoo(
        ps, batch_size=8, matmul_dtype=bf16, factor_dtype=bf16, state_dtype=bf16,
        factor_norm="spectral", update_rms=0.2, fused=True,
    ),
    lambda ps: rootfree.IFWhitening(ps, matmul_dtype=bf16, fused=True),
    lambda ps: rootfree.RFRMSprop(ps, batch_size=8, fused=True),
    lambda ps: rootfree.RFAdamW(ps, batch_size=8, state_dtype=bf16, fused=True),
]  # fmt: skip

compiled: dict[Any, int] = {}


def compile_launch(self: JITFunction, *args: Any, grid: Any, warmup: bool, **given: Any) -> None:
    """What Triton does before it launches: it looks at the arguments, and compiles."""
    values = dict(zip(self.arg_names, args, strict=False)) | given
    options = {name: value for name, value in given.items() if name not in self.arg_names}
    types: dict[str, str] = {}
    constants: dict[tuple[int], Any] = {}
    attributes: dict[tuple[int], Any] = {}
    for i, parameter in enumerate(self.params):
        value, kind = values[parameter.name], "constexpr"
        if isinstance(value, torch.Tensor):
            kind = "*" + NAMES[value.dtype]
            divisible = value.data_ptr() % 16 == 0
        elif parameter.is_constexpr or value == 1:
            constants[i,], divisible = value, False
        else:
            kind = "i32" if isinstance(value, int) else "fp32"
            divisible = isinstance(value, int) and value % 16 == 0
        types[parameter.name] = kind
        if divisible:
            attributes[i,] = DIVISIBLE
    switches = [value for value in constants.values() if type(value) is not int]
    key = (self.__name__, str(types), str(switches))  # sizes make no other code, only more of it
    if key not in compiled:
        source = ASTSource(self, types, constexprs=constants, attrs=attributes)
        compiled[key] = len(triton.compile(source, target=H100, options=options).asm["cubin"])


def steps() -> None:
    for make in METHODS:
        params = [nn.Parameter(torch.randn(shape)) for shape in SHAPES]
        optimizer = make(params)
        for _ in range(2):
            for p in params:
                p.grad = torch.randn_like(p)
            optimizer.step()
    model = nn.Linear(40, 33)
    recorder = rootfree.KFACRecorder(model)
    optimizer = rootfree.IFShampoo(
        model.parameters(), batch_size=8, curvature=recorder, matmul_dtype=bf16, fused=True
    )
    with recorder:
        nn.functional.cross_entropy(model(torch.randn(8, 40)), torch.arange(8)).backward()
    optimizer.step()
    FiniteLook()([torch.randn(7), torch.randn(7, dtype=bf16)])


if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"  # now steps take tensors of a CPU
    JITFunction.run = compile_launch
    steps()
    assert all(compiled.values())
    kernels = {
        name
        for module in [*sys.modules.values()]
        if module.__name__.startswith("rootfree.kernels")
        for name, value in vars(module).items()
        if isinstance(value, JITFunction) and name.endswith("_kernel")
    }
    missing = sorted(kernels - {name for name, *_ in compiled})
    print(f"{len(compiled)} compiled of {len(kernels)} kernels; not launched: {missing}")
