"""Records as the benchmark writes them, with round numbers."""

from __future__ import annotations

from rootfree_lab.bench.ceilings import Ceilings
from rootfree_lab.bench.record import (
    Environment,
    IterationRecord,
    IterationRow,
    StepRecord,
    StepRow,
)
from rootfree_lab.bench.timing import Spread

ENVIRONMENT = Environment(
    device="A Device", threads=2, date="2026-01-02", versions={"torch": "2.11", "rootfree": "0.1"}
)


def step_record(parameters: str = "vit_b", **changes: object) -> StepRecord:
    rows = [
        StepRow(
            "torch AdamW fused", "torch", 1, ms=Spread(1.0, 0.9, 1.1, 20), ratio=1.0,
            state_bytes_per_parameter=8.0, temporary_bytes=0, bytes_moved=2.4e9, flops=0.0,
            terabytes_per_second=2.4, teraflops_per_second=0.0, floor_ms=0.6, times_floor=1.7,
        ),
        StepRow(
            "IFShampoo T=2", "rootfree", 2, ms=Spread(4.0, 3.9, 4.2, 20), ratio=4.0,
            refresh_ms=6.0, plain_ms=2.0, device_ms=3.8, state_bytes_per_parameter=12.2,
            temporary_bytes=123_000_000, bytes_moved=3e9, flops=2e12, terabytes_per_second=0.75,
            teraflops_per_second=500.0, matmul_dtype="bfloat16", floor_ms=2.5, times_floor=1.6,
            note="parameters were no longer finite",
        ),
        StepRow("SOAP T=10", "peer", 10, failure="out of memory"),
        StepRow(
            "sirfshampoo bf16 T=2", "peer", 2, ms=Spread(80.0, 79.0, 81.0, 20), ratio=80.0,
            refresh_ms=100.0, plain_ms=60.0, state_bytes_per_parameter=20.2,
        ),
    ]  # fmt: skip
    fields: dict[str, object] = {
        "parameters": parameters,
        "count": 86_400_000,
        "tensors": 150,
        "dtype": "float32",
        "reference": "torch AdamW fused",
        "arrangement": "all together",
        "settings": {"turns": 20, "seconds": 20.0},
        "environment": ENVIRONMENT,
        "ceilings": Ceilings(copy=4.24, bf16=806.0, fp32=51.0),
        "rows": rows,
    }
    return StepRecord(**{**fields, **changes})  # type: ignore[arg-type]


def iteration_record() -> IterationRecord:
    rows = [
        IterationRow(
            "torch AdamW fused", "torch", 1, ms=Spread(100.0, 99.0, 101.0, 20), ratio=1.0,
            forward_ms=30.0, backward_ms=68.0, optimizer_ms=1.0, peak_bytes=10_000_000_000,
        ),
        IterationRow(
            "IFShampoo T=2", "rootfree", 2, ms=Spread(105.0, 104.0, 106.0, 20), ratio=1.05,
            forward_ms=30.0, backward_ms=68.0, optimizer_ms=6.0, peak_bytes=None,
        ),
        IterationRow("torch Muon", "torch", 1, failure="out of memory"),
    ]  # fmt: skip
    return IterationRecord(
        model="vit_base_patch16_224",
        count=86_567_656,
        batch=128,
        autocast="bfloat16",
        reference="torch AdamW fused",
        settings={"turns": 20, "seconds": 20.0},
        environment=ENVIRONMENT,
        rows=rows,
    )
