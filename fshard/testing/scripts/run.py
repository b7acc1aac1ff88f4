"""The run of a script in a process, as torchrun starts it, or in one with the batches of all."""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
import tempfile
import traceback
from collections.abc import Generator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

from torch.distributed import HashStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from fshard.testing.programs.parameters import Tensors
from fshard.testing.programs.precision import Sends, watched_sends
from fshard.testing.programs.record import RankRecord, any_comm_hook, axes_needed_by
from fshard.testing.scripts.devices import OnCpu
from fshard.testing.scripts.draws import Draws
from fshard.testing.scripts.loaders import Batches, EndOfInputs, Reader
from fshard.testing.scripts.replacing import MakeReplacement, Replacements, replaced
from fshard.testing.scripts.substitutions import Place, table
from fshard.testing.scripts.watch import Finished, Options, Start, Watcher
from fshard.testing.verdicts import float64_by_default
from fshard.torch_collectives import RecordedCall, record_collectives

LINES = 20
"""Lines of the output of a script that an error quotes."""


class Script(NamedTuple):
    """A file, and how Python runs it.

    Args:
        path: of the file.
        arguments: of its command line.
        directory: in which it runs.
        steps: after which it ends.
        patience: seconds that one process waits for another in a collective.
        is_recorded: the collectives of its processes are recorded.
    """

    path: str
    arguments: tuple[str, ...]
    directory: str
    steps: int
    patience: float
    is_recorded: bool = False

    @property
    def name(self) -> str:
        """The name of the file."""
        return Path(self.path).name


class ScriptRecord(NamedTuple):
    """The training of a script in one process, and all that it read.

    Args:
        rank: its training.
        batches: what it read.
        buffers: at the start.
        options: of the optimizer in each step.
        own_options: those that the script itself had set.
        counts: the batches that were read before each step.
        steps: of the first optimizer.
        calls: of collectives, if they are recorded.
        ended_by: the error that ended the script in one process after its first steps, if any.
    """

    rank: RankRecord
    batches: Batches
    buffers: Tensors
    options: list[Options]
    own_options: list[Options]
    counts: list[int]
    steps: int
    calls: list[RecordedCall]
    ended_by: str


class ScriptError(RuntimeError):
    """The error of a script, with its place."""


def run_in_processes(script: Script) -> ScriptRecord:
    """Run a script as one of several processes."""
    store = TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
    rank = int(os.environ["RANK"])
    place = Place(rank, int(os.environ["WORLD_SIZE"]), store, script.patience)
    return _run(script, place, Draws(1 + rank), None, None)


def run_alone(script: Script, replayed: Batches, start: Start) -> ScriptRecord:
    """Run a script as the only process, with the batches of all. Its draws differ by the rank."""
    shift = 1000 * int(os.environ["RANK"])
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
    place = Place(0, 1, HashStore(), script.patience)
    return _run(script, place, Draws(1, shift), replayed, start)


def _run(
    script: Script, place: Place, draws: Draws, replayed: Batches | None, start: Start | None
) -> ScriptRecord:
    mode = OnCpu()
    reader = Reader(replayed)
    sends = Sends()
    draws.seed()
    with ExitStack() as stack:
        calls: list[RecordedCall] = []
        if script.is_recorded and not place.is_alone:
            calls = stack.enter_context(record_collectives())
        watcher = Watcher(script.steps, mode, reader, sends, draws, start, calls)
        rows = {**table(place), **draws.table(), **_of_watcher(watcher, reader)}
        stack.enter_context(float64_by_default())
        stack.enter_context(watched_sends(sends))
        stack.enter_context(any_comm_hook())
        output = stack.enter_context(_kept_output())
        stack.enter_context(_as_main(script))
        stack.enter_context(replaced(rows))
        for handle in watcher.hooks():
            stack.callback(handle.remove)
        with mode:
            ended_by = _execute(script, place, watcher, output)
        watcher.end()
        _wait_for_others(place)

    return ScriptRecord(
        watcher.record(),
        reader.read,
        watcher.buffers,
        watcher.options,
        watcher.own_options,
        watcher.counts,
        watcher.steps_made,
        watcher.calls(),
        ended_by,
    )


def _execute(script: Script, place: Place, watcher: Watcher, output: Path) -> str:
    """Run a script to its end or its last step.

    Return the error that has ended it after its first steps in one process, or while it waited for
    a process that has made all its steps; else "".
    """
    try:
        runpy.run_path(script.path, run_name="__main__")
    except (Finished, EndOfInputs):
        pass
    except SystemExit as error:
        if error.code not in (None, 0):
            raise _error(script, place, error, output) from None
    except Exception as error:
        failure = _error(script, place, error, output)
        has_steps = watcher.has_stepped() if place.is_alone else _has_another_ended(place)
        if not has_steps:
            raise failure from None
        return str(failure)
    return ""


def _of_watcher(watcher: Watcher, reader: Reader) -> Replacements:
    """Return the replacements by which a script is watched."""
    rows: dict[str, MakeReplacement] = {
        "torch.nn:Module._call_impl": watcher.call,  # global hooks see no keywords
        "torch.utils.data:DataLoader.__iter__": reader.iterate,
        "torchdata.stateful_dataloader:StatefulDataLoader.__iter__": reader.iterate,
        "torch.utils.data:DataLoader.__len__": reader.length,  # schedules depend on it
    }
    # The one process is the last stage, too.
    for name in ("PipelineScheduleSingle", "PipelineScheduleMulti"):
        rows[f"torch.distributed.pipelining.schedules:{name}.step"] = reader.schedule_step
    return rows


@contextlib.contextmanager
def _as_main(script: Script) -> Generator[None]:
    """Let the process be as Python has it when it begins a script."""
    path = str(Path(script.path).parent)
    before = [*sys.argv], [*sys.path]
    os.environ.update(
        ACCELERATE_USE_CPU="true",
        TORCHELASTIC_RUN_ID="none",
        TORCHELASTIC_RESTART_COUNT="0",
        TORCHELASTIC_MAX_RESTARTS="0",
        GROUP_RANK="0",
        ROLE_RANK=os.environ["RANK"],
        GROUP_WORLD_SIZE="1",
        ROLE_WORLD_SIZE=os.environ["WORLD_SIZE"],
    )
    os.chdir(script.directory)
    sys.argv[:] = [script.path, *script.arguments]
    sys.path.insert(0, path)
    try:
        yield
    finally:
        sys.argv[:], sys.path[:] = before


@contextlib.contextmanager
def _kept_output() -> Generator[Path]:
    """Write what the script writes to a file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "output"
        kept = [os.dup(1), os.dup(2)]
        with path.open("wb") as file:
            for number in (1, 2):
                os.dup2(file.fileno(), number)
        try:
            yield path
        finally:
            _flush()
            for number, copy in zip((1, 2), kept, strict=True):
                os.dup2(copy, number)
                os.close(copy)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


def _error(script: Script, place: Place, error: BaseException, output: Path) -> ScriptError:
    """Return the error of a script as one line, with the end of its output as a note."""
    _flush()
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == script.path]
    where = f"{script.name}:{lines[-1]}" if lines else script.name
    process = "the one process" if place.is_alone else f"rank {place.rank} of {place.size}"
    line = (frames[-1].line if frames else None) or ""
    text = str(error).strip().partition("\n")[0] or line
    if isinstance(error, SystemExit):
        text = _last_line(error, output)
    if isinstance(error, KeyError) and axes_needed_by(error):
        names = ", ".join([repr(name) for name in axes_needed_by(error)])
        text = f"its mesh must have the axes {names}. {text}"
    words = f"{text} {line}".lower()
    if "cuda" in words or "gpu" in words:
        text += (
            ". This run has no GPUs: let the script work where torch.cuda.is_available() is False"
        )
    failure = ScriptError(f"{where} raised in {process}: {type(error).__name__}: {text}")
    written = output.read_text(errors="replace").splitlines()
    trace = "".join(traceback.format_exception(error)).splitlines()
    failure.add_note("\n".join([*written[-LINES:], *trace[-LINES:]]))
    return failure


def _last_line(error: SystemExit, output: Path) -> str:
    """Return the last line of a script that exits: of its text, or of its output."""
    text = str(error.code)
    if isinstance(error.code, int):
        text = output.read_text(errors="replace").strip() or text
    return text.strip().splitlines()[-1]


def _has_another_ended(place: Place) -> bool:
    """Return True if another process has made all its steps, and this one fewer."""
    others = [rank for rank in range(place.size) if rank != place.rank]
    return any([place.store.check([f"end {rank}"]) for rank in others])


def _wait_for_others(place: Place) -> None:
    """Wait until all have ended: one that leaves closes its connections, which others may read."""
    if place.is_alone:
        return
    place.store.set(f"end {place.rank}", b"")
    keys = [f"end {rank}" for rank in range(place.size)]
    with contextlib.suppress(Exception):  # a process that has failed reports it
        place.store.wait(keys, timedelta(seconds=10))
