"""Run a program in several processes that do not end with each other: `fshard run --elastic`.

torchrun ends all processes as soon as one has died. Here the others go on: a program in
`fs.elastic` forms a smaller mesh of them.

    parent   store, which outlives every process           exit code
               | variables        ^ output      ^ end          ^
    0..n-1     +--> program ------+-------------+--------------+
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait

from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from fshard.launching.ends import End, first_failure, in_words, write_loss
from fshard.launching.meeting import serve_store, variables_of, variables_of_all
from fshard.launching.shown import STREAMS, Shown
from fshard.mesh.runtimes.launchers import failure_key

PATIENCE = 30.0
"""Seconds for processes to end after a signal, as torchrun gives them."""
_LOOK = 0.1
"""Seconds between two looks at the processes, of which output is no sign."""

# A process that starts with this is killed by the kernel with its parent, and becomes the program.
# It is not in a fork of the parent, which has threads: Python code there may hang.
_DIE_WITH_PARENT = """
import ctypes, os, signal, sys
set_death_signal = 1
ctypes.CDLL(None).prctl(set_death_signal, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]):  # the parent has ended before
    sys.exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""


@dataclass(frozen=True)
class _Running:
    """One process, and its two streams."""

    rank: int
    process: subprocess.Popen[bytes]
    shown: tuple[Shown, ...]


@dataclass(frozen=True)
class _Signal:
    number: int
    time: float


def run_program(words: Sequence[str], n: int) -> int:
    """Run a command line in `n` processes of this machine; return the exit code of the run.

    That is 0 for a success, see Note [Runs that lose processes], else the code of the process that
    makes it a failure. SIGINT and SIGTERM are passed on; a second one, or a process that is there
    30 s later, ends them all. After a signal the code is 0 only if all ended with 0 at the signal.
    On Linux the processes end with this one, however it ends.
    """
    store = serve_store()
    threads = os.environ.get("OMP_NUM_THREADS") or "1"
    variables = variables_of_all(n, "nccl", {"OMP_NUM_THREADS": threads})
    environment = {**os.environ, **variables, "MASTER_PORT": str(store.port)}

    running: list[_Running] = []
    with _recorded_signals() as signals:
        try:
            for rank in range(n):
                running.append(_start(rank, words, environment))
            ends = _watch(running, n, signals, store)
        finally:
            for one in running:
                _kill(one)

    if signals:
        first = signals[0]
        # How a process ended before the signal is no answer to it.
        answers = [end.code for end in ends if end.ended >= first.time]
        return 128 + first.number if any(answers) else 0
    failure = first_failure(ends)
    return 0 if failure is None else failure.shell_code


def _start(rank: int, words: Sequence[str], environment: dict[str, str]) -> _Running:
    shows: list[Shown] = []
    writers: list[int] = []
    for stream in STREAMS:
        reader, writer = os.pipe()
        writers.append(writer)
        shows.append(Shown(Connection(reader, writable=False), stream, f"[{rank}] "))
    command = [*words]
    if sys.platform == "linux":
        command = [sys.executable, "-IS", "-c", _DIE_WITH_PARENT, str(os.getpid()), *words]
    try:
        process = subprocess.Popen(
            command,
            env={**environment, **variables_of(rank)},
            stdout=writers[0],
            stderr=writers[1],
            # Ctrl-C in a terminal reaches the parent alone, which passes it on, once.
            start_new_session=True,
        )
    finally:
        # With the parent's copies open, no pipe would end with the process.
        for writer in writers:
            os.close(writer)
    return _Running(rank, process, tuple(shows))


# -- watching --------------------------------------------------------------------------------------


def _watch(running: list[_Running], n: int, signals: list[_Signal], store: TCPStore) -> list[End]:
    """Show output until all have ended, and pass signals on; remove from `running` what ended."""
    ends: list[End] = []
    is_passed = False
    while running:
        _show_output(running)
        now = time.monotonic()
        for one in running:
            one.process.poll()
        ended = [one for one in running if one.process.returncode is not None]
        for one in ended:
            running.remove(one)
            # What its own child processes write later is not shown: they might never end.
            for show in one.shown:
                show.close()
        for one in ended:
            code = one.process.returncode
            ended_at = now
            key = failure_key(one.rank)
            if code > 0 and store.check([key]):
                ended_at = float(store.get(key))  # since then the others run without it
            ends.append(End(one.rank, ended_at, code))
            if code != 0:
                write_loss(f"process {one.rank} of {n} {in_words(code)}", len(running))

        is_first = bool(signals) and not is_passed
        if is_first:
            is_passed = True
            for one in running:
                one.process.send_signal(signals[0].number)
        is_late = bool(signals) and now > signals[0].time + PATIENCE
        if len(signals) > 1 or is_late:
            for one in running:
                _kill_group(one)
    return ends


def _show_output(running: Sequence[_Running]) -> None:
    """Wait for output, not for long, and display it."""
    shows: list[Shown] = []
    for one in running:
        shows += [show for show in one.shown if show.open]
    ready = wait([show.pipe for show in shows], _LOOK)
    for show in shows:
        if show.pipe in ready:
            show.pump()


def _kill(one: _Running) -> None:
    _kill_group(one)
    one.process.wait()
    for show in one.shown:
        show.close()


def _kill_group(one: _Running) -> None:
    """Kill a process with its child processes, as torchrun does."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(one.process.pid, signal.SIGKILL)


@contextlib.contextmanager
def _recorded_signals() -> Generator[list[_Signal]]:
    """Yield a list to which SIGINT and SIGTERM are added as they arrive, and do nothing else."""
    signals: list[_Signal] = []

    def note(number: int, _: object) -> None:
        signals.append(_Signal(number, time.monotonic()))

    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, note) for number in numbers]
    try:
        yield signals
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
