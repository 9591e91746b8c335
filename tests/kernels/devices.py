"""Where the kernels run: on the GPU if there is one, in Triton's interpreter otherwise."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

tl = pytest.importorskip("triton.language")

from triton.runtime import interpreter  # noqa: E402

from rootfree.kernels.launch import launch  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
_cast = interpreter.InterpreterBuilder.cast_impl
_patch = interpreter._patch_lang


def _rounding_cast(self, source, target):
    """Triton's interpreter cuts off the bits that bf16 has not; a GPU rounds to nearest."""
    if source.dtype.scalar == tl.float32 and target.scalar == tl.bfloat16:
        bits = torch.tensor(source.data).bfloat16().view(torch.int16).numpy().view("uint16")
        return interpreter.TensorHandle(bits, target.scalar)
    return _cast(self, source, target)


def _patch_once(fn):
    """Triton's interpreter looks at its whole language again at every call of a device function."""
    languages = [v for v in fn.__globals__.values() if v is tl or v is tl.core]
    if any(tl.core.is_builtin(language.load) for language in languages):
        return _patch(fn)
    return interpreter._LangPatchScope()


interpreter.InterpreterBuilder.cast_impl = _rounding_cast
interpreter._patch_lang = _patch_once
# As compiled kernels do: sums of integers are not done twice to see whether they overflow.
interpreter.interpreter_builder.options = replace(
    interpreter.interpreter_builder.options, sanitize_overflow=False
)
EPS = torch.finfo(torch.bfloat16).eps  # spacing of bf16 numbers just above one: 2⁻⁷


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal draws, the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(*shape, dtype=dtype, device=DEVICE)


def run(kernel, programs: int, *arguments, **constants) -> None:
    """Launch without a site: Triton looks at every argument."""
    launch(kernel, programs, *arguments, **constants)


def close(got: Tensor, expected: Tensor, *, rtol: float, atol: float = 0.0) -> None:
    """Equal within tolerances, as float64; the absolute one is relative to the largest entry."""
    expected = expected.double()
    largest = expected[expected.isfinite()].abs().amax().item() if expected.numel() else 0.0
    torch.testing.assert_close(got.double(), expected, rtol=rtol, atol=atol * largest)


def unaligned(t: Tensor) -> Tensor:
    """A copy of t that starts one element into its memory."""
    room = torch.empty(t.numel() + 1, dtype=t.dtype, device=t.device)
    view = room[1:].view(t.shape)
    view.copy_(t)
    return view
