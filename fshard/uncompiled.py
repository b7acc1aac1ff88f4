"""What torch.compile calls, and does not look into.

fshard's own code is Python around threads, messages and caches: there is nothing in it to compile, Dynamo needs many seconds
to find that out, and a count that goes up and down it leaves up.  `torch.compiler.disable` would wrap each function, at a
cost for every call; a mark costs nothing.
"""

from __future__ import annotations

from inspect import isfunction
from typing import Any, TypeVar

import torch

Marked = TypeVar("Marked")
_frames: Any = torch._C._dynamo.eval_frame  # type: ignore[attr-defined]
_SKIP: Any = _frames._FrameAction.SKIP
_LEFT_ALONE: Any = _frames._FrameExecStrategy(_SKIP, _SKIP)


def uncompiled(marked: Marked) -> Marked:
    """Mark a function, or all of a class: neither it nor what it calls is compiled, only what stands around it.

    >>> import torch
    >>> @uncompiled
    ... def is_compiled(x):
    ...     return x + torch.compiler.is_compiling()
    >>> torch.compile(lambda x: is_compiled(x) * 2, backend="eager")(torch.ones(2))
    tensor([2., 2.])
    """
    if isinstance(marked, type):
        for member in vars(marked).values():
            uncompiled(getattr(member, "__func__", member))  # of a static or class method
    elif isfunction(marked):
        function: Any = marked
        function._torchdynamo_disable = True  # whoever is compiled stops before it
        _frames.set_code_exec_strategy(function.__code__, _LEFT_ALONE)  # and it is run as it is, with all that it calls
    return marked
