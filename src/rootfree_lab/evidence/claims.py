"""The claims, each a sentence and a predicate on the outcome of one case."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from rootfree_lab.evidence.outcomes import Outcome, in_bf16, step_milliseconds
from rootfree_lab.report.statistics import Summary

WITHIN, ONE_SEED = "within the spread over seeds", "one seed, so no spread is known"
RF, IF, WHITE = "RFRMSprop", "IFShampoo", "IFWhitening"
FAST = f"{RF}, fast start"  # the library's default start; RF has the paper's


@dataclass(frozen=True)
class Verdict:
    """Whether a claim holds for a case, why that is in doubt (empty: it is not), and numbers."""

    holds: bool
    doubt: str
    told: str

    @property
    def word(self) -> str:
        word = "holds" if self.holds else "fails"
        return f"{word} ({self.doubt})" if self.doubt else word


Quantity = Callable[[Outcome, str], Summary | None]
Judge = Callable[[Outcome], Verdict | None]  # None: the runs that it needs are not there


@dataclass(frozen=True)
class Claim:
    """A sentence about the cases of some kinds; it holds if `share` of them do."""

    name: str
    sentence: str
    kinds: tuple[str, ...]
    judge: Judge
    share: float = 1.0
    applies: Callable[[Outcome], bool] = lambda outcome: True  # whether it is about a case that ran


def _against(own: str, others: Sequence[str], decide: Callable[..., Verdict]) -> Judge:
    """What `decide` says of `own` beside the best of `others` that was run."""

    def judge(outcome: Outcome) -> Verdict | None:
        a, b = outcome.value(own), _best(map(outcome.value, others))
        if a is None or b is None:
            return None
        return _failures(decide(a, b, _pair(a, b, outcome.unit)), outcome, (own, *others))

    return judge


def at_most(own: str, other: str, allowed: float = 0.0, *, strict: bool = False) -> Judge:
    """`own` ends at most `allowed` above `other`; `strict`: below."""
    return _against(own, (other,), partial(_compared, allowed=allowed, strict=strict))


def below_all(own: str, others: Sequence[str]) -> Judge:
    """`own` ends below each of `others` that was run; at least one was."""
    return _against(own, others, partial(_compared, strict=True))


def not_beyond_spread(own: str, others: Sequence[str]) -> Judge:
    """`own` is not above the best of `others` by more than the deviations of both."""

    def decide(a: Summary, b: Summary, told: str) -> Verdict:
        spread = _spread(a, b)
        known = math.isfinite(spread)
        holds = a.mean - b.mean <= (spread if known else 0.0)
        return Verdict(holds, "" if known else ONE_SEED, told)

    return _against(own, others, decide)


def matrix_first(quantity: Quantity, unit: str | None = None) -> Judge:
    """The better of IF-Shampoo and IF-Whitening is below every other optimizer of the case."""

    def judge(outcome: Outcome) -> Verdict | None:
        rest = [label for label in outcome.labels if label not in (IF, WHITE)]
        a = _best(quantity(outcome, label) for label in (IF, WHITE) if label in outcome.labels)
        b = _best(quantity(outcome, label) for label in rest)
        if b is None:
            return None
        if a is None:  # who does not reach AdamW's loss is slower than who does
            return Verdict(False, "", "no run gets there")
        where = " on a CPU" if outcome.experiment.on_cpu else ""
        pair = _pair(a, b, outcome.unit if unit is None else f" {unit}{where}")
        return _failures(_compared(a, b, pair, strict=True), outcome, outcome.labels)

    return judge


def cheaper(own: str, other: str, factor: float) -> Judge:
    """An optimizer step of `own` takes at most 1/`factor` of that of `other`."""

    def judge(outcome: Outcome) -> Verdict | None:
        a, b = outcome.of(own, step_milliseconds), outcome.of(other, step_milliseconds)
        if a is None or b is None:
            return None
        told = f"{a.mean:.3g} ms against {b.mean:.3g} ms, {b.mean / a.mean:.1f} ×"
        return _compared(Summary(factor * a.mean, factor * a.deviation, a.count), b, told)

    return judge


def same_without_autocast(allowed: float) -> Judge:
    """Every root-free method's error in bf16 is at most `allowed` above its error in fp32."""

    def judge(outcome: Outcome) -> Verdict | None:
        if outcome.repeated is None:
            return None
        other = replace(outcome, experiment=outcome.repeated)
        bf16, fp32 = (outcome, other) if in_bf16(outcome.experiment) else (other, outcome)
        found = []
        for label in (RF, IF, WHITE):
            a, b = bf16.value(label), fp32.value(label)
            if a is not None and b is not None:
                told = f"{label} {_pair(a, b, outcome.unit)}"
                verdict = _compared(a, b, told, allowed=allowed)
                found.append(_failures(verdict, bf16, (label,)))
        if not found:
            return None
        failing = [verdict for verdict in found if not verdict.holds]
        doubts = [verdict.doubt for verdict in failing or found]
        sure = bool(failing) and not all(doubts)  # one method fails beyond doubt
        return Verdict(
            not failing,
            "" if sure else next(filter(None, doubts), ""),
            "; ".join(verdict.told for verdict in found),
        )

    return judge


def has_matrix_method(outcome: Outcome) -> bool:
    """Whether IF-Shampoo or IF-Whitening is among the optimizers of a case."""
    return any(label in outcome.labels for label in (IF, WHITE))


def on_gpu(outcome: Outcome) -> bool:
    """Whether a case was run on a GPU."""
    return not outcome.experiment.on_cpu


def _best(values: Iterable[Summary | None]) -> Summary | None:
    known = [value for value in values if value is not None]
    return min(known, key=lambda value: value.mean, default=None)


def _failures(verdict: Verdict, outcome: Outcome, labels: Sequence[str]) -> Verdict:
    """The verdict, in doubt where seeds failed: a mean over the others is too favourable."""
    failed = [
        f"{group.label} {group.failed} of {len(group.runs)}"
        for group in outcome.experiment.groups
        if group.failed and group.label in labels
    ]
    return replace(verdict, doubt=f"seeds failed: {', '.join(failed)}") if failed else verdict


def _compared(
    a: Summary, b: Summary, told: str, *, allowed: float = 0.0, strict: bool = False
) -> Verdict:
    room, spread = b.mean + allowed - a.mean, _spread(a, b)
    doubt = WITHIN if abs(room) <= spread else "" if math.isfinite(spread) else ONE_SEED
    return Verdict(room > 0 if strict else room >= 0, doubt, told)


def _spread(a: Summary, b: Summary) -> float:
    return a.deviation + b.deviation


def _pair(a: Summary, b: Summary, unit: str) -> str:
    return f"{told(a, unit)} against {told(b, unit)}"


def told(value: Summary, unit: str = "") -> str:
    """Mean and deviation in words."""
    spread = f" ± {value.deviation:.2g}" if math.isfinite(value.deviation) else ""
    return f"{value.mean:.4g}{spread}{unit}"


NETWORKS = ("cnn", "transformer", "other", "peers")  # the kinds of cases that train a network


def _of_rmsprop(own: str, name: str) -> tuple[Claim, ...]:
    """The claims about RF-RMSProp, with one of its starts."""
    return (
        Claim(f"{name} and SGD", f"On CNNs, {name}'s test error is within 0.5 points of SGD's.",
              ("cnn",), at_most(own, "SGD", 0.5)),
        Claim(f"{name} below AdamW", f"On CNNs, {name}'s test error is below AdamW's.",
              ("cnn",), at_most(own, "AdamW", strict=True)),
        Claim(f"{name} and AdamW",
              f"On transformers, {name}'s test error is within 0.7 points of AdamW's.",
              ("transformer",), at_most(own, "AdamW", 0.7)),
        Claim(f"{name} elsewhere",
              f"{name} is not above the better of SGD and AdamW by more than the spread over "
              "seeds.",
              ("other",), not_beyond_spread(own, ("SGD", "AdamW"))),
        Claim(f"{name}, convex",
              f"On convex problems, {name} is not above RMSprop by more than the spread over "
              "seeds.",
              ("convex",), not_beyond_spread(own, ("RMSprop",))),
    )  # fmt: skip


CLAIMS = (
    *_of_rmsprop(RF, "RF-RMSProp"),
    *_of_rmsprop(FAST, "Fast-start RF-RMSProp"),
    Claim("IF-Shampoo below diagonal methods",
          "On transformers, IF-Shampoo's test error is below AdamW's and RF-RMSProp's.",
          ("transformer",), below_all(IF, ("AdamW", RF, FAST))),
    Claim("IF-Shampoo and Shampoo",
          "On transformers, IF-Shampoo's test error is within 0.7 points of Shampoo's.",
          ("transformer",), at_most(IF, "Shampoo", 0.7)),
    Claim("IF-Shampoo's step", "On a GPU, a step of IF-Shampoo costs at most a fifth of Shampoo's.",
          ("transformer", "cost"), cheaper(IF, "Shampoo", 5), applies=on_gpu),
    Claim("bf16", "With bf16 autocast the test error is within 0.3 points of fp32.",
          ("cnn", "transformer"), same_without_autocast(0.3)),
    Claim("Convex, sum",
          "On convex problems, RF-AdaGrad is not above Adagrad by more than the spread over seeds.",
          ("convex",), not_beyond_spread("RFAdagrad", ("Adagrad",))),
    Claim("Convex, full matrix",
          "On convex problems, RF full-matrix AdaGrad is not above the one with the root by more "
          "than the spread over seeds.",
          ("convex",), not_beyond_spread("RFFullAdagrad", ("FullAdagrad",))),
    Claim("Original scheme, zero start",
          "With a constant rate, RMSprop is below RF-RMSProp that starts at zero.", ("original",),
          at_most("RMSprop, constant", "RF-RMSProp, constant, zero start", strict=True)),
    Claim("Original scheme, no B",
          "With a constant rate, RMSprop is below RF-RMSProp that leaves B out.", ("original",),
          at_most("RMSprop, constant", "RF-RMSProp, constant, no B", strict=True)),
    Claim("Modern scheme", "With step decay, RF-RMSProp is not above RMSprop.", ("original",),
          at_most("RF-RMSProp, step decay", "RMSprop, step decay")),
    Claim("Best error",
          "The better of IF-Shampoo and IF-Whitening ends below every other optimizer in at least "
          "70 % of the cases that have one of them.",
          NETWORKS, matrix_first(lambda outcome, label: outcome.value(label)), share=0.7,
          applies=has_matrix_method),
    Claim("Best time",
          "The better of IF-Shampoo and IF-Whitening reaches AdamW's final training loss in less "
          "time than every other optimizer in at least 70 % of the cases that have one of them.",
          NETWORKS, matrix_first(lambda outcome, label: outcome.seconds_to_reference(label),
                                 unit="s"), share=0.7, applies=has_matrix_method),
)  # fmt: skip
