"""Waiting for other processes, and whether one is there no more."""

import os
import time


def gone(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def wait_until(happened, seconds=60.0):
    """Return as soon as `happened()` is true; raise after so many seconds.

    A test that waits for what another process does, not for as long as this may take, is neither
    slow on a quiet machine nor wrong on a busy one.
    """
    end = time.monotonic() + seconds
    while not happened():
        if time.monotonic() > end:
            raise TimeoutError(f"{happened} was not true within {seconds:g} s")
        time.sleep(0.01)
