"""The ends of processes, and the outcome of a run that has lost some of them."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class End:
    """The end of one process, or of its work: which, when, and its exit code.

    A process that leaves an elastic run by an error has ended then.

    The code is negative for a process that a signal has ended, as in `subprocess`.
    """

    rank: int
    ended: float
    code: int = 0

    @property
    def shell_code(self) -> int:
        """The exit code as a shell gives it, which is never negative."""
        return 128 - self.code if self.code < 0 else self.code


def in_words(code: int) -> str:
    """Return how a process ended.

    >>> in_words(3), in_words(-9)
    ('ended with exit code 3', 'was killed by SIGKILL')
    """
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:  # a signal of the operating system without a name
        name = f"signal {-code}"
    return f"was killed by {name}"


# Note [Runs that lose processes]
# Survivors of an elastic run go on, so a process that dies does not make its run a failure. The run
# is a success if a process has succeeded, and each of the others
#
#     was killed by a signal: machines, and those who empty them, end processes so; or
#     ended with an error while another was running, which succeeded after that.
#
# If the error is after the last success, no process has gone on in its place: its last work, such
# as writing a checkpoint, is not done, and the run has failed.
def first_failure(ends: Sequence[End]) -> End | None:
    """Return the end that makes a run a failure, or None. See Note [Runs that lose processes].

    >>> first_failure([End(0, 5.0), End(1, 2.0, 1), End(2, 9.0, -9)])
    >>> first_failure([End(0, 5.0), End(1, 6.0, 1)])
    End(rank=1, ended=6.0, code=1)
    """
    successes = [end.ended for end in ends if end.code == 0]
    failures = [end for end in ends if end.code != 0]
    failures.sort(key=lambda end: end.ended)
    if not successes and failures:
        return failures[0]
    for end in failures:
        is_after_all = end.ended >= max(successes)
        if end.code > 0 and is_after_all:
            return end
    return None


def write_loss(loss: str, running: int) -> None:
    """Write a line: "process 2 of 4 was killed by SIGKILL; 3 are running."."""
    others = "1 is" if running == 1 else f"{running} are"
    if sys.stderr is not None:
        sys.stderr.write(f"{loss}; {others} running.\n")
        sys.stderr.flush()
