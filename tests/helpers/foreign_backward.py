"""Backwards in a thread of their own, as autograd runs the nodes of an accelerator, where no
accelerator is.

Autograd runs CUDA nodes in *device threads*: C++ hands them its own thread-local state (grad mode,
autocast, modes, hooks), but Python's thread-locals and context variables are empty there.
`set_multithreading_enabled(False)` makes it use the calling thread. FSHARD_FOREIGN_BACKWARD=1 runs
all tests and their processes so: see conftest.py.
"""

import sys
import threading
from _thread import start_new_thread
from contextlib import contextmanager
from functools import update_wrapper

import torch
from torch.autograd import Variable

from fshard.mesh.collectives.autograd import transformed
from fshard.mesh.runtimes.thread_state import ThreadState

VARIABLE = "FSHARD_FOREIGN_BACKWARD"
_thread = threading.local()


class ForeignEngine:
    """Autograd's engine; a backward runs in a new thread, unless multithreading is off."""

    def __init__(self, engine):
        self.engine, self.backwards = engine, 0

    def __getattr__(self, name):
        return getattr(self.engine, name)

    def run_backward(self, *args, **kwargs):
        stays = getattr(_thread, "is_foreign", False)  # a nested backward runs in the same thread
        if (
            stays or transformed() or not torch._C._is_multithreading_enabled()
        ):  # torch.func's state is C++'s own
            return self.engine.run_backward(*args, **kwargs)
        self.backwards += 1
        state = ThreadState.capture("cpu")
        results = []
        errors = []

        def body():
            _thread.is_foreign = True
            undo = state.set()
            torch._C._set_multithreading_enabled(True)
            try:
                results.append(self.engine.run_backward(*args, **kwargs))
            except BaseException as error:
                errors.append(error)
            finally:
                undo()

        ended = threading.Lock()
        ended.acquire()
        start_new_thread(lambda: (body(), ended.release()), ())  # Python does not know it
        ended.acquire()
        if errors:
            raise errors[0]
        return results[0]


def install():
    """Replace the engine; return the new one."""
    engine = Variable._execution_engine
    if not isinstance(engine, ForeignEngine):
        _set(engine := ForeignEngine(engine))
    return engine


@contextmanager
def foreign_backward():
    """Replace the engine within the context."""
    before = Variable._execution_engine
    try:
        yield install()
    finally:
        _set(before)


def _set(engine):
    Variable._execution_engine = engine
    if module := sys.modules.get("fshard.pipeline.execution.split_backward"):
        module._engine = engine.run_backward


class Foreign:
    """A function that installs the engine first, in whatever process it is called."""

    def __init__(self, function):
        update_wrapper(self, function)  # also copies attributes
        self.function = function

    def __call__(self, *args, **kwargs):
        install()
        return self.function(*args, **kwargs)

    def __reduce__(self):
        return Foreign, (self.function,)
