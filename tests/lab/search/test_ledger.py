"""Claims: each trial once, whoever works on the search and whoever is killed."""

from __future__ import annotations

import json
import sqlite3

import optuna
import pytest
from filelock import FileLock
from optuna.trial import TrialState

from rootfree_lab.search import attempts, ledger, liveness, storage
from rootfree_lab.search.ledger import Ledger
from rootfree_lab.search.settings import load_entries
from rootfree_lab.search.storage import StorageError, open_storage

ELSEWHERE = "another machine|1|1"


@pytest.fixture
def where(tmp_path) -> str:
    return str(tmp_path / "journal.log")


@pytest.fixture
def make(config_file, where):
    def make(*assignments, storage=where, **options):
        return Ledger(open_storage(storage), "s", load_entries(config_file, assignments), **options)

    return make


def record(value, *, failure=None):
    final = {"test_error": value, "test_loss": 1.0, "train_loss": 1.0}
    made = {"completed": failure is None, "final": final, "curve": [], "identity": "x"}
    return made if failure is None else {**made, "failure": {"kind": failure, "message": "m"}}


def pretend_another(monkeypatch, token=ELSEWHERE):
    monkeypatch.setattr(liveness, "token", lambda: token)


def drain(*ledgers):
    """Claim in turns and conclude at once, until nothing is left; the slots in order."""
    slots = []
    while not all(each.finished() for each in ledgers):
        for each in ledgers:
            claim = each.claim(alone=False)
            if claim is not None:
                slots.append(claim.slot)
                assert each.conclude(claim, record(0.1 + 0.01 * len(slots)))
    return slots


def test_two_processes_share_the_trials(make, monkeypatch):
    here = make()
    pretend_another(monkeypatch)
    slots = drain(here, make())
    assert len(slots) == len(set(slots)) == 10
    # All optimizers at one pace, and the narrowed stage after the wide one.
    assert [slot.stage for slot in slots] == [1] * 6 + [2] * 4
    assert {slot.label for slot in slots[:2]} == {"SGD", "AdamW"}
    assert make().claim(alone=False) is None


def test_a_database_serves_as_well(make, tmp_path, monkeypatch):
    url = f"sqlite:///{tmp_path}/trials.db"
    here = make(storage=url)
    pretend_another(monkeypatch)
    slots = drain(here, make(storage=url))
    assert len(slots) == len(set(slots)) == 10
    assert make(storage=url).finished()


def test_of_two_claims_at_one_moment_one_is_withdrawn(make, monkeypatch):
    first = make()
    pretend_another(monkeypatch)
    second = make()
    storage = second._storage
    add = storage.create_new_trial
    early = []

    def late(study, template):
        if not early:  # the other one is quicker, after this one has looked
            early.append(first.claim(alone=False))
        return add(study, template)

    monkeypatch.setattr(storage, "create_new_trial", late)
    claim = second.claim(alone=False)
    assert early[0] is not None
    assert claim is not None
    assert claim.slot != early[0].slot
    outcomes = [a.outcome for s in second.statuses("SGD") for a in s.attempts]
    assert outcomes.count("withdrawn") == 1


def test_a_claim_that_was_closed_while_it_was_made_is_none(make, monkeypatch):
    here = make()
    add = here._storage.create_new_trial

    def slow(study, template):
        trial = add(study, template)
        other = make()
        (attempt,) = other.statuses("SGD")[0].live
        other.fail(attempt, "abandoned", "it slept")
        return trial

    monkeypatch.setattr(here._storage, "create_new_trial", slow)
    assert here._claim(here.entries["SGD"].slots[0], here.entries["SGD"].space, False) is None
    assert here.claims == {}


def test_fewer_narrowed_trials_than_once(make):
    here = make("search.trials=[1, 2]", "search.measure=test_loss")
    while (claim := here.claim(alone=True)) is not None:
        if claim.slot.number == 1:
            here.fail(claim, "interrupted", "")
            break
        here.conclude(claim, record(0.1))
    fewer = make("search.trials=[1, 1]", "search.measure=test_loss")
    assert all(status.slot.number == 0 for status in fewer.statuses(claim.slot.label))


def test_the_trial_of_a_dead_process_is_taken_over(make, monkeypatch):
    dead = f"{liveness.token().rsplit('|', 1)[0]}|0"  # this process began at another time
    pretend_another(monkeypatch, dead)
    lost = make().claim(alone=False)
    monkeypatch.undo()
    again = make().claim(alone=False)
    assert again is not None
    assert lost is not None
    assert again.slot == lost.slot
    assert again.config == lost.config
    assert again.id != lost.id


@pytest.mark.parametrize("here", [False, True], ids=["elsewhere", "a number used again"])
def test_a_live_process_keeps_its_trial_while_it_beats(make, monkeypatch, here):
    pretend_another(monkeypatch)
    theirs = make()
    lost = theirs.claim(alone=False)
    monkeypatch.undo()
    monkeypatch.setattr(liveness, "is_alive", lambda token: True if here else None)
    ours, clock = make(), [0.0]
    monkeypatch.setattr(ledger.time, "monotonic", lambda: clock[0])
    assert ours.claim(alone=False).slot != lost.slot
    clock[0] += ledger.STALE + 1
    theirs.beat()
    assert ours.claim(alone=False).slot != lost.slot  # it has beaten
    clock[0] += ledger.STALE - 1
    assert ours.claim(alone=False).slot != lost.slot  # not yet silent for long
    clock[0] += 2
    assert ours.claim(alone=False).slot == lost.slot
    # What the other one says now, should it live after all, comes too late.
    assert theirs.report(lost, 1, 2, {"test_error": 0.5}) == "lost"
    assert theirs.conclude(lost, record(0.0)) is False


def test_a_result_whose_process_died_before_it_said_so_counts(make, monkeypatch):
    dead = f"{liveness.token().rsplit('|', 1)[0]}|0"
    pretend_another(monkeypatch, dead)
    theirs = make()
    claim = theirs.claim(alone=False)
    monkeypatch.setattr(theirs._storage, "set_trial_state_values", lambda *_: None)
    theirs.conclude(claim, record(0.25))  # killed just before the state changes
    monkeypatch.undo()
    ours = make()
    assert not any(s.ended for s in ours.statuses(claim.slot.label))
    assert ours.claim(alone=False).slot != claim.slot
    (done,) = [s for s in ours.statuses(claim.slot.label) if s.ended]
    assert done.slot == claim.slot
    assert done.value == 0.25


def test_a_journal_that_was_cut_off_in_a_line_goes_on(make, where):
    first = make()
    claim = first.claim(alone=False)
    first.conclude(claim, record(0.5))
    with open(where, "ab") as file:
        file.write(b'{"op_code": 4, "worker')  # killed while it wrote
    second = make()
    assert second.claim(alone=False).slot != claim.slot
    third = make()
    assert [s.value for s in third.statuses(claim.slot.label) if s.ended] == [0.5]
    with open(where, "rb") as file:
        assert all(isinstance(json.loads(line), dict) for line in file)


def test_the_second_stage_is_around_the_best_and_stays(make):
    here = make("search.trials=[3, 4]")
    values = iter([0.3, 0.1, 0.2])
    for _ in range(3):
        claim = here.claim(alone=False)
        while claim.slot.label != "SGD":
            here.fail(claim, "error", "not in this test")
            claim = here.claim(alone=False)
        here.conclude(claim, record(next(values)))
    best = attempts.best(here.statuses("SGD")).result.settings["lr"]
    narrow = here.space("SGD", 2, here.statuses("SGD"))["lr"]
    wide = here.entries["SGD"].space["lr"]
    assert narrow == wide.narrowed(best, here.entries["SGD"].search.narrow)
    claim = here.claim(alone=False)
    while claim.slot.label != "SGD":
        claim = here.claim(alone=False)
    assert claim.slot.stage == 2
    assert narrow.low <= claim.config.optimizer.options["lr"] <= narrow.high
    here.conclude(claim, record(0.01))
    assert here.space("SGD", 2, here.statuses("SGD"))["lr"] == narrow
    # More narrowed trials are the same search.
    assert len(make("search.trials=[3, 6]").statuses("SGD")) == 9


def test_a_failed_trial_that_is_repeated_later_does_not_move_the_second_stage(make):
    here = make("search.trials=[2, 1]")
    first, second = [
        c for c in (here.claim(alone=False) for _ in range(4)) if c.slot.label == "SGD"
    ]
    here.conclude(first, record(0.3))
    here.fail(second, "error", "a full disk")
    before = here.space("SGD", 2, here.statuses("SGD"))
    again = make("search.trials=[2, 1]", retry_failed=True)
    claim = again._claim(second.slot, again.entries["SGD"].space, False)
    again.conclude(claim, record(0.1))
    assert attempts.best(again.statuses("SGD")).slot == second.slot
    assert again.space("SGD", 2, again.statuses("SGD")) == before


def test_where_no_wide_trial_completes_the_space_stays_wide(make):
    here = make("search.trials=[1, 1]")
    for _ in range(2):
        here.conclude(here.claim(alone=False), record(None, failure="diverged"))
    assert here.space("SGD", 2, here.statuses("SGD")) == here.entries["SGD"].space
    assert here.claim(alone=False).slot.stage == 2


def test_another_search_is_refused(make):
    make()
    with pytest.raises(StorageError, match=r"of 's/SGD' \(it differs in space\.lr\).*--name"):
        make("search.spaces.SGD.lr=[1e-3, 2.0]")
    with pytest.raises(StorageError, match=r"differs in config\.train\.batch_size"):
        make("train.batch_size=16")
    with pytest.raises(StorageError, match="differs in draws"):
        make("search.draws=independent")
    make("train.device=auto", "search.trials=[3, 9]")  # the same search


def test_failed_trials_are_done_unless_they_are_to_be_tried_again(make):
    here = make("search.trials=[1, 0]")
    for _ in range(2):
        here.fail(here.claim(alone=False), "error", "no such file")
    assert here.finished()
    again = make("search.trials=[1, 0]", retry_failed=True)
    assert not again.finished()
    again.fail(again.claim(alone=False), "error", "no such file")
    again.conclude(again.claim(alone=False), record(0.1))
    assert again.finished()  # one failed again


def test_out_of_memory_is_tried_alone_and_then_failed(make):
    here = make("search.trials=[1, 0]")
    crowded, other = here.claim(alone=False), here.claim(alone=False)
    here.fail(crowded, "memory", "CUDA out of memory")
    here.conclude(other, record(0.1))
    assert here.claim(alone=False) is None
    assert not here.finished()
    alone = here.claim(alone=True, crowded_out=True)
    assert alone.slot == crowded.slot
    here.fail(alone, "memory", "CUDA out of memory")
    assert here.finished()
    (failed,) = [s.failure for s in here.statuses(crowded.slot.label)]
    assert failed.message == "CUDA out of memory"


def test_a_trial_whose_process_dies_twice_has_failed(make):
    here = make("search.trials=[1, 0]")
    here.conclude(here.claim(alone=True), record(0.1))
    for _ in range(2):
        assert not here.finished()
        here.fail(here.claim(alone=True), "died", "its process was ended by SIGKILL")
    assert here.finished()


def test_hopeless_trials_are_pruned_late_and_only_then(make):
    here = make("search.trials=[6, 0]", "search.prune_worst=0.25")
    mine = []
    while (claim := here.claim(alone=False)) is not None:
        if claim.slot.label == "SGD":
            mine.append(claim)
    for claim, value in zip(mine[:4], (0.1, 0.2, 0.3, 0.4), strict=True):
        for step in (2, 5, 10):
            assert here.report(claim, step, 10, {"test_error": value}) == "go on"
        here.conclude(claim, record(value))
    bad, good = mine[4:]
    assert here.report(bad, 2, 10, {"test_error": 0.9}) == "go on"  # too early to tell
    assert here.report(bad, 5, 10, {"test_error": 0.9}) == "prune"
    assert here.report(good, 5, 10, {"test_error": 0.3}) == "go on"
    here.conclude(bad, record(0.9, failure="pruned"))
    status = next(s for s in here.statuses("SGD") if s.slot == bad.slot)
    assert status.ended
    assert status.value is None
    assert status.result.outcome == "pruned"
    assert status.result.trial.state == TrialState.PRUNED


@pytest.mark.parametrize("text", ["no journal\nat all\n", '{"a": 1}\n{"b": 2}\n'])
def test_what_is_no_journal_is_left_alone(tmp_path, text):
    path = tmp_path / "notes.txt"
    path.write_text(text)
    with pytest.raises(StorageError, match="is not a journal of Optuna"):
        open_storage(str(path))
    assert path.read_text() == text


def test_a_locked_journal_says_so(make, where, monkeypatch):
    made = make()
    monkeypatch.setattr(storage, "_PATIENCE", 0.05)
    said = pytest.raises(StorageError, match="locked by another")
    with FileLock(f"{where}.flock"), said, storage.in_words(where):
        made.claim(alone=False)


def test_a_locked_database_says_so(make, tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "_PATIENCE", 0.05)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    url = f"sqlite:///{tmp_path}/trials.db"
    made = make(storage=url)
    said = pytest.raises(StorageError, match="locked by another")
    with sqlite3.connect(tmp_path / "trials.db", isolation_level=None) as other:
        other.execute("begin exclusive")
        with said, storage.in_words(url):
            made.claim(alone=False)


def test_a_password_is_not_shown():
    with pytest.raises(StorageError) as error:
        open_storage("nothing://me:secret@host/trials")
    assert "nothing://me@host/trials" in str(error.value)
    assert "secret" not in str(error.value)


def test_two_machines_begin_with_an_empty_database_at_once(tmp_path, monkeypatch):
    """Both make the tables; the later one fails, and finds them when it looks again."""
    real, tries = storage.RDBStorage, []

    def racing(*arguments, **options):
        tries.append(None)
        if len(tries) < 3:
            raise optuna.exceptions.StorageInternalError('type "studydirection" already exists')
        return real(*arguments, **options)

    monkeypatch.setattr(storage, "RDBStorage", racing)
    monkeypatch.setattr(storage.time, "sleep", lambda seconds: None)
    open_storage(f"sqlite:///{tmp_path}/trials.db")
    assert len(tries) == 3

    def broken(*arguments, **options):
        tries.append(None)
        raise optuna.exceptions.StorageInternalError("no such host")

    monkeypatch.setattr(storage, "RDBStorage", broken)
    with pytest.raises(StorageError, match="no such host"):
        open_storage("postgresql://me@host/trials")
    assert len(tries) == 4  # nothing that waiting would mend
