"""The evidence: what is claimed follows from the records, and the committed page is up to date."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lab.report.fake_records import record, write
from rootfree_lab.cli.app import app
from rootfree_lab.evidence import claims
from rootfree_lab.evidence.outcomes import Case, outcome, topics
from rootfree_lab.evidence.sensitivity import looks, points
from rootfree_lab.evidence.write import Judged, render, write_evidence
from rootfree_lab.report.records import ReportError, read

ROOT = Path(__file__).parents[3]
CASES = sum(len(topic.cases) for topic in topics())
CASE = Case("swin_micro_cifar10", "transformer", "Swin", None, {}, {})


@pytest.mark.skipif(not (ROOT / "results").is_dir(), reason="results/ is in the repository alone")
def test_the_committed_page_is_what_the_records_give():
    """After a change of results/: run `rootfree evidence`."""
    text, plots = render(ROOT / "results", "evidence")
    assert (ROOT / "docs" / "evidence.md").read_text(encoding="utf-8") == text
    drawn = {f"evidence/{file.name}" for file in (ROOT / "docs" / "evidence").glob("*.svg")}
    assert drawn == set(plots)
    for address, plot in plots.items():
        assert (ROOT / "docs" / address).read_text(encoding="utf-8").endswith(plot.sign)


def test_every_small_config_is_a_case():
    configs = {path.stem for path in (ROOT / "configs" / "small").glob("*.toml")}
    cases = [case.config for topic in topics() for case in topic.cases]
    assert len(set(cases)) == len(cases)
    starts = {"vit_pretrain_cifar10", "laptop_vit_pretrain_fashion"}  # of the fine-tuning
    studies = {"vit_length_cifar10"}  # that a note tells of
    assert set(cases) == configs - starts - studies
    assert [topic.letter for topic in topics()] == list("abcdefghijk")


def test_claims_are_about_kinds_that_there_are():
    kinds = {case.kind for topic in topics() for case in topic.cases}
    assert {kind for claim in claims.CLAIMS for kind in claim.kinds} == kinds


def finals(errors: dict[str, list[float]], **changes):
    """Runs that end with these test errors in percent, a seed each."""
    for label, values in errors.items():
        for seed, error in enumerate(values):
            final = {"train_loss": 0.1, "test_loss": 0.2, "test_error": error / 100}
            yield record(label, seed=seed, final=final, optimizer=label, **changes)


def judge(tmp_path, judged: claims.Judge, runs, **repeated):
    """`repeated`: runs in another precision, by its name."""
    for suffix, found in {
        "": runs,
        **{f"_{name}": runs for name, runs in repeated.items()},
    }.items():
        write(tmp_path / f"{CASE.config}{suffix}" / "final" / "records.jsonl", list(found))
    found = outcome(tmp_path, CASE)
    assert found is not None
    return judged(found)


@pytest.mark.parametrize(
    ("own", "other", "word"),
    [
        ([10.0, 10.0], [9.6, 9.6], "holds"),
        ([10.2, 10.2], [9.6, 9.6], "fails"),
        ([10.0, 10.4], [9.6, 9.8], "holds (within the spread over seeds)"),
        ([10.3, 10.5], [9.6, 9.8], "fails (within the spread over seeds)"),
        ([10.2], [9.6], "fails (one seed, so no spread is known)"),
    ],
)
def test_within_points(tmp_path, own, other, word):
    verdict = judge(tmp_path, claims.at_most("A", "B", 0.5), finals({"A": own, "B": other}))
    assert verdict.word == word


def test_below_is_strict_and_missing_runs_are_no_verdict(tmp_path):
    below = claims.at_most("A", "B", strict=True)
    assert not judge(tmp_path, below, finals({"A": [9, 9], "B": [9, 9]})).holds
    assert judge(tmp_path, claims.at_most("A", "B"), finals({"A": [9, 9], "B": [9, 9]})).holds
    assert judge(tmp_path, below, finals({"A": [9, 9]})) is None
    both = claims.below_all("A", ("B", "C"))
    assert judge(tmp_path, both, finals({"A": [5], "B": [6], "C": [7]})).holds
    assert not judge(tmp_path, both, finals({"A": [5], "B": [6], "C": [4]})).holds


def test_a_mean_over_survivors_is_in_doubt(tmp_path):
    runs = list(finals({"A": [5, 5, 5], "B": [9, 9, 9]}))
    runs[1]["completed"] = False
    verdict = judge(tmp_path, claims.at_most("A", "B"), runs)
    assert verdict.word == "holds (seeds failed: A 1 of 3)"


@pytest.mark.parametrize(
    ("name", "own", "inside", "outside", "others"),
    [
        ("RF-RMSProp and SGD", "RFRMSprop", 10.49, 10.51, {"SGD": 10}),
        ("RF-RMSProp below AdamW", "RFRMSprop", 9.99, 10, {"AdamW": 10}),
        ("RF-RMSProp and AdamW", "RFRMSprop", 10.69, 10.71, {"AdamW": 10}),
        ("Fast-start RF-RMSProp and AdamW", claims.FAST, 10.69, 10.71, {"AdamW": 10}),
        ("IF-Shampoo and Shampoo", "IFShampoo", 8.69, 8.71, {"Shampoo": 8}),
        ("IF-Shampoo below diagonal methods", "IFShampoo", 8.9, 9.1, {"AdamW": 10, "RFRMSprop": 9}),
        ("Best error", "IFShampoo", 8.9, 9.1, {"AdamW": 9}),
    ],
)
def test_the_bars_of_the_claims(tmp_path, name, own, inside, outside, others):
    (claim,) = [claim for claim in claims.CLAIMS if claim.name == name]
    for error, holds in ((inside, True), (outside, False)):
        runs = finals({label: [value] for label, value in ({own: error} | others).items()})
        assert judge(tmp_path, claim.judge, runs).holds is holds


@pytest.mark.parametrize(("held", "word"), [(7, "**holds**"), (6, "**fails**")])
def test_a_share_of_the_cases(held, word):
    (claim,) = [claim for claim in claims.CLAIMS if claim.name == "Best error"]
    verdicts = [claims.Verdict(number < held, "", "") for number in range(10)]
    assert Judged(claim, [(CASE, v) for v in verdicts]).word == f"{word}: {held} of 10 cases"
    waiting = Judged(claim, [*((CASE, v) for v in verdicts), (CASE, None)])
    assert waiting.word == f"{word} so far: {held} of 10 cases"
    assert Judged(claim, [(CASE, None)]).word == "not run yet"


def test_not_beyond_the_spread(tmp_path):
    close = claims.not_beyond_spread("A", ("B", "C"))
    others = {"B": [9.0, 9.2], "C": [20.0, 21.0]}  # B: 9.1 ± 0.14
    assert judge(tmp_path, close, finals({"A": [9.2, 9.4]} | others)).holds
    assert not judge(tmp_path, close, finals({"A": [9.5, 9.7]} | others)).holds
    assert "one seed" in judge(tmp_path, close, finals({"A": [9.0]} | others)).word


def timed(label, milliseconds, **changes):
    return [
        record(label, seed=seed, steps=1000, seconds={"optimizer": milliseconds}, **changes)
        for seed in (0, 1)
    ]


def test_a_fifth_of_the_step_on_a_gpu(tmp_path):
    fifth = claims.cheaper("IFShampoo", "Shampoo", 5)
    gpu = {"versions": {"device": "NVIDIA H200"}}
    for own, holds in ((1.9, True), (2.1, False)):
        runs = [*timed("IFShampoo", own, **gpu), *timed("Shampoo", 10.0, **gpu)]
        assert judge(tmp_path, fifth, runs).holds is holds
    assert judge(tmp_path, claims.on_gpu, runs)
    assert not judge(tmp_path, claims.on_gpu, timed("IFShampoo", 1.0))
    (told,) = (claim for claim in claims.CLAIMS if claim.name == "IF-Shampoo's step")
    assert told.applies is claims.on_gpu


def test_costs_on_a_cpu_say_so(tmp_path):
    """The ratio of two steps, and of what the optimizers keep; the peak is the process's."""
    memory = {"Shampoo": 60, "IFShampoo": 40}
    runs = [
        run
        for label, milliseconds in (("Shampoo", 10.0), ("IFShampoo", 4.0))
        for run in timed(label, milliseconds, optimizer=label)
    ]
    for run in runs:
        run["memory"] = {"peak_bytes": 1000, "state_bytes": memory[run["label"]]}
    write(tmp_path / "laptop_shampoo_cost_vit" / "final" / "records.jsonl", runs)
    text, _ = render(tmp_path, "page")
    assert "| Smaller ViT, both every 2 steps | – | 2.5 × on a CPU | 1.5 × | – |" in text
    assert "| GCViT | 2.7 × | not run yet | not run yet | not run yet |" in text
    assert "| **4.00** ± 0.00 | **40.0** |" in text


def in_bf16(errors):
    for run in finals(errors):
        run["config"]["train"]["autocast"] = "bf16"
        yield run


def test_bf16_is_compared_with_fp32(tmp_path):
    """Whichever of the two a case ran in, and which its repeat."""
    same = claims.same_without_autocast(0.3)
    own = {"RFRMSprop": [10.0, 10.0], "IFShampoo": [8.0, 8.0]}
    near, far = ({"RFRMSprop": [9.8, 9.8], "IFShampoo": [error] * 2} for error in (7.8, 7.6))
    assert judge(tmp_path / "none", same, in_bf16(own)) is None
    for number, (fp32, word) in enumerate([(near, "holds"), (far, "fails")]):
        a, b = (tmp_path / f"{name} {number}" for name in ("repeated in fp32", "in bf16"))
        assert judge(a, same, in_bf16(own), fp32=finals(fp32)).word == word
        assert judge(b, same, finals(fp32), bf16=in_bf16(own)).word == word
        assert "8 ± 0 %" in judge(b, same, finals(fp32), bf16=in_bf16(own)).told
    assert judge(tmp_path / "better", same, finals(own), bf16=in_bf16(far)).word == "holds"


def test_doubts_about_bf16_are_those_of_the_methods_that_decide(tmp_path):
    same = claims.same_without_autocast(0.3)
    fp32 = {"RFRMSprop": [9.0, 11.0], "IFShampoo": [8.0, 8.0]}
    near, far = ({"RFRMSprop": [10.0, 10.0], "IFShampoo": [error] * 2} for error in (8.1, 9.0))
    assert (
        judge(tmp_path, same, finals(fp32), bf16=in_bf16(near)).word == f"holds ({claims.WITHIN})"
    )
    assert judge(tmp_path, same, finals(fp32), bf16=in_bf16(far)).word == "fails"
    runs = list(in_bf16(near))
    runs[-1]["completed"] = False
    assert (
        "seeds failed: IFShampoo 1 of 2"
        in judge(tmp_path, same, finals({"IFShampoo": [8.0, 8.0]}), bf16=runs).word
    )


def test_claims_that_are_about_some_cases_alone(tmp_path):
    runs = list(finals({"AdamW": [9.0], "IFWhitening": [8.0]}))
    write(tmp_path / CASE.config / "final" / "records.jsonl", runs)
    found = outcome(tmp_path, CASE)
    assert claims.has_matrix_method(found)
    write(tmp_path / CASE.config / "final" / "records.jsonl", runs[:1])
    found = outcome(tmp_path, CASE)
    assert not claims.has_matrix_method(found)


def test_the_better_matrix_method_is_first(tmp_path):
    first = claims.matrix_first(lambda found, label: found.value(label))
    others = {"AdamW": [9, 9], "Muon": [8, 8]}
    assert judge(
        tmp_path, first, finals({"IFShampoo": [9, 9], "IFWhitening": [7, 7]} | others)
    ).holds
    assert not judge(tmp_path, first, finals({"IFShampoo": [8.5, 8.5]} | others)).holds


def falling(label, losses, seed=0):
    curve = [
        {"step": n, "seconds": 10.0 * n, "train_loss": loss} for n, loss in enumerate(losses, 1)
    ]
    return record(label, seed=seed, curve=curve, final={"train_loss": losses[-1]}, optimizer=label)


def test_time_to_adamw_s_loss(tmp_path):
    first = claims.matrix_first(lambda found, label: found.seconds_to_reference(label), "s")
    adamw = falling("AdamW", [4, 3, 2])
    assert judge(tmp_path, first, [adamw, falling("IFShampoo", [3, 2, 1])]).holds
    verdict = judge(tmp_path, first, [adamw, falling("IFShampoo", [4, 3, 2.5])])
    assert (verdict.holds, verdict.told) == (False, "no run gets there")
    late = [falling("IFShampoo", [3, 2, 1]), falling("IFShampoo", [4, 3, 2.5], seed=1)]
    assert not judge(tmp_path, first, [adamw, *late]).holds  # one seed of two gets there


def test_only_the_last_settings_of_an_optimizer_count(tmp_path):
    old, new = (list(finals({"A": [error] * 2, "B": [9, 9]})) for error in (20, 5))
    for run in new:
        run["config"]["optimizer"]["lr"] = 0.7
    verdict = judge(tmp_path, claims.at_most("A", "B"), [*old, *new])
    assert verdict.told.startswith("5 ")


def trial(label, lr, error, **changes):
    run = record(label, final={"test_error": error, "train_loss": 1.0, "test_loss": 1.0}, **changes)
    run["config"]["optimizer"] = {"name": label.split()[0], "lr": lr}
    return run


def test_points_of_a_search(tmp_path):
    runs, _ = read(write(tmp_path / "records.jsonl", [
        trial("A 1.0", 0.1, 0.25), trial("A 1.1", 0.01, math.nan), trial("B 2.0", 0.0, 0.5),
        trial("B 2.1", 0.2, 0.5, completed=False),
    ]))  # fmt: skip
    assert points(runs, "lr", "test_error") == [
        ("A 1.0", 0.1, 25.0, True), ("B 2.1", 0.2, 50.0, False),
    ]  # fmt: skip
    assert points(runs, "damping", "test_error") == []


def test_a_page_of_partial_results(tmp_path):
    results = tmp_path / "results"
    (results / "empty_folder").mkdir(parents=True)
    runs = finals({"SGD": [20.0, 20.4], "AdamW": [21.0, 21.2], "RFRMSprop": [20.2, 20.3]})
    write(results / "resnet34_cifar10" / "final" / "records.jsonl", list(runs))
    switch = finals({"IFShampoo": [9.0, 9.2], "IFWhitening": [8.0, 8.2]})
    write(results / "swin_micro_cifar10" / "final" / "records.jsonl", list(switch))
    searched = [trial("AdamW 1.0", 0.1, 0.3), trial("AdamW 1.1", 0.2, 0.2)]
    write(results / "gcvit_micro_cifar10" / "records.jsonl", searched)
    write(results / "my_search" / "records.jsonl", searched[:1])
    write(results / "my_network" / "final" / "records.jsonl", list(finals({"a|b": [1.0]})))
    (results / "my_network" / "note.md").write_text("A note of mine.\n", encoding="utf-8")
    page = tmp_path / "docs" / "page.md"
    assert write_evidence(results, page) == 2
    text = page.read_text(encoding="utf-8")
    assert f"**3 of {CASES + 2} cases have been run.**" in text  # unknown ones count
    assert "within 0.5 points of SGD's. | **holds** so far: 1 of 1 cases" in text
    assert "| AdamW | 24.85 | 21.1 ± 0.14 | 23.30 | not run yet |" in text
    assert "The final runs are missing; the search has 2 trials." in text
    assert "(page/gcvit_micro_cifar10.svg)" in text
    assert (tmp_path / "docs" / "page" / "gcvit_micro_cifar10.svg").is_file()
    assert "### `my_network`" in text
    assert "### `my_search`" in text
    assert r"| a\|b | 1.00 |" in text
    assert "A note of mine." in text
    assert "| Swin | 9.1 ± 0.14 % | 8.1 ± 0.14 % | yes |" in text
    assert "| GCViT | – | – | not run yet |" in text
    assert "| ResNet-34 | – |" not in text  # it was run without either


def test_half_a_record_is_refused(tmp_path):
    results = tmp_path / "results"
    write(results / "digits_cnn" / "final" / "records.jsonl", [record()], tail='{"lab')
    with pytest.raises(ReportError, match="line 2: cut off in the middle"):
        render(results, "evidence")


def test_command(tmp_path):
    (tmp_path / "results").mkdir()
    page = tmp_path / "evidence.md"
    run = CliRunner().invoke
    result = run(app, ["evidence", str(tmp_path / "results"), "--out", str(page)])
    assert result.exit_code == 0, result.output
    assert f"**0 of {CASES} cases have been run.**" in page.read_text(encoding="utf-8")
    result = run(app, ["evidence", str(tmp_path / "no"), "--out", str(page)])
    assert result.exit_code == 2
    assert "there is no folder" in result.output


def test_an_optimizer_looks_the_same_in_every_plot():
    one = looks(["AdamW", "SOAP", "IFWhitening", "RMSprop"])
    other = looks(["IFWhitening", "Muon", "AdamW"])
    assert (one["AdamW"], one["IFWhitening"]) == (other["AdamW"], other["IFWhitening"])
    assert len(set(one.values())) == 4
    assert list(other) == ["IFWhitening", "Muon", "AdamW"]
    many = [f"entry {i}" for i in range(12)]
    assert len(set(looks(many).values())) == 12
