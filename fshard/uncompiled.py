"""`uncompiled`: functions that torch.compile calls without tracing them.

fshard's own code is Python around threads, messages and caches: there is nothing to compile, and
Dynamo needs many seconds to find that out. `torch.compiler.disable` does the same, but imports
Dynamo when a function is decorated.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar
from weakref import WeakSet

import torch

Args = ParamSpec("Args")
Result = TypeVar("Result")
_frames: Any = torch._C._dynamo.eval_frame  # type: ignore[attr-defined]
_set_compiler = _frames.set_eval_frame
_ACTION = _frames._FrameAction
_SKIP_FRAME = _frames._FrameExecStrategy(_ACTION.SKIP, _ACTION.DEFAULT)
_SKIP_FRAME_AND_CALLEES = _frames._FrameExecStrategy(_ACTION.SKIP, _ACTION.SKIP)


def uncompiled(function: Callable[Args, Result], *, warning: str = "") -> Callable[Args, Result]:
    """Return a function that runs without torch.compile, as does all that it calls.

    The code around it is compiled. With a warning it is a method, which warns where compiled code
    calls it: once for each object.

    >>> import torch
    >>> @uncompiled
    ... def is_compiled(x):
    ...     return x + torch.compiler.is_compiling()
    >>> torch.compile(lambda x: is_compiled(x) * 2, backend="eager")(torch.ones(2))
    tensor([2., 2.])
    """
    marked: Any = function
    if warning:
        marked = _warns_once(function, warning)
    else:
        _frames.set_code_exec_strategy(marked.__code__, _SKIP_FRAME_AND_CALLEES)
    marked._torchdynamo_disable = True  # Dynamo breaks the graph before it
    return marked


def _warns_once(function: Callable[Args, Result], warning: str) -> Callable[Args, Result]:
    warned = WeakSet[Any]()  # objects whose method has warned

    @wraps(function)
    def run(*args: Args.args, **kwargs: Args.kwargs) -> Result:
        # The compiler of the caller, which is taken out while the method runs.
        compiler = _set_compiler(None)
        if compiler and args[0] not in warned:
            warned.add(args[0])
            warnings.warn(warning, stacklevel=2)
        try:
            return function(*args, **kwargs)
        finally:
            _set_compiler(compiler)

    wrapper: Any = run
    _frames.set_code_exec_strategy(wrapper.__code__, _SKIP_FRAME)
    return wrapper
