"""Runs of a comparison, alone or side by side; a failure of one does not end the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rootfree_lab.config.settings import Config
from rootfree_lab.files.durable import NotWritten
from rootfree_lab.files.records import Record, append_record
from rootfree_lab.processes.side_by_side import Channel, Pool
from rootfree_lab.processes.stopping import Interrupted, StopSignals
from rootfree_lab.training.run import failed_record, records_path, train_or_resume
from rootfree_lab.training.watching.measures import is_out_of_memory
from rootfree_lab.training.watching.progress import A_MINUTE, A_MOMENT, Lines, Watcher

_LOOK = 1.0  # seconds between looks at the signals


class CrowdedOut(Exception):  # noqa: N818 (an outcome)
    """The run ran out of memory while others were running."""


def carry_out(
    run: Config, out: Path, stop: StopSignals | None, watcher: Watcher, *, crowded: bool = False
) -> Record:
    """Train a run, from its checkpoint if there is one; a failure is recorded, not raised.

    Two problems are not failures of the run. `NotWritten` is raised if the output folder cannot be
    written, and `CrowdedOut` if the run is `crowded` by others and out of memory.
    """
    try:
        return train_or_resume(run, out=out, stop=stop, watchers=[watcher])
    except (Interrupted, NotWritten):  # a full disk is full for all of them
        raise
    except Exception as error:  # whatever it is, the other runs are still wanted
        if crowded and is_out_of_memory(error):
            raise CrowdedOut from error
        return _note_failure(run, out, error)


def _note_failure(run: Config, out: Path, error: BaseException) -> Record:
    record = failed_record(run, error)
    append_record(records_path(out), record)
    return record


def side_by_side(
    runs: Sequence[Config],
    *,
    out: Path,
    jobs: int,
    stop: StopSignals | None,
    tell: Callable[[Config, str], None],
    live: bool = False,
) -> Iterator[tuple[Config, Record]]:
    """Runs with their records, in the order in which they end.

    A run that is out of memory beside the others is carried out again, alone, when they are done.
    Raises `Interrupted` when `stop` has received a signal and all runs have saved checkpoints. Each
    run tells a line every minute, or twice a second if they are shown `live`.
    """
    every = A_MOMENT if live else A_MINUTE
    waiting, later, asked = list(runs), list[Config](), False
    with Pool(_work, jobs) as pool:
        while waiting or later or pool.running:
            if stop is not None and stop.received is not None and not asked:
                asked, waiting, later = True, [], []
                pool.ask_to_stop()
            while waiting and pool.free:
                pool.submit((waiting.pop(0), out, True, every))
            if later and not pool.running:
                pool.retire_idle()  # alone with all the memory
                pool.submit((later.pop(0), out, False, every))
            for event in pool.events(_LOOK):
                run: Config = event.item[0]
                if event.kind == "told":
                    tell(run, event.content)
                elif event.kind == "died" and asked:
                    continue  # before it could listen
                elif event.kind == "died":
                    yield run, _note_failure(run, out, RuntimeError(event.content))
                elif isinstance(event.content, NotWritten):
                    raise event.content
                elif event.content is CrowdedOut:
                    tell(run, f"{run.title} · no memory; again, alone, later")
                    pool.retire_idle()
                    later.append(run)
                elif event.content is not Interrupted:
                    yield run, event.content
    if asked and stop is not None and stop.received is not None:
        raise Interrupted(stop.received, None)


def _work(item: tuple[Config, Path, bool, float], channel: Channel) -> Any:
    run, out, crowded, every = item
    with StopSignals() as stop:
        try:
            return carry_out(run, out, stop, Lines(channel.tell, every), crowded=crowded)
        except (Interrupted, CrowdedOut) as outcome:
            return type(outcome)
        except NotWritten as error:
            return error
