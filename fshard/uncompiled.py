"""`uncompiled`: functions that torch.compile calls without tracing them.

fshard's own code is Python around threads, messages and caches: there is nothing to compile, and Dynamo needs many
seconds to find that out. `torch.compiler.disable` does the same, but imports Dynamo when a function is decorated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch.utils._contextlib import _DecoratorContextManager  # pyright: ignore[reportPrivateUsage]

Args = ParamSpec("Args")
Result = TypeVar("Result")
_frames: Any = torch._C._dynamo.eval_frame  # type: ignore[attr-defined]
_set_compiler = _frames.set_eval_frame


class _Uncompiled(_DecoratorContextManager):
    """Run without torch.compile for a while; Dynamo does not look into the decorators of torch either."""

    def __enter__(self) -> None:
        self._before = _set_compiler(None)

    def __exit__(self, *_: object) -> None:
        _set_compiler(self._before)


def uncompiled(function: Callable[Args, Result]) -> Callable[Args, Result]:
    """Return a function that runs without torch.compile, as does all that it calls; the code around it is compiled.

    >>> import torch
    >>> @uncompiled
    ... def is_compiled(x):
    ...     return x + torch.compiler.is_compiling()
    >>> torch.compile(lambda x: is_compiled(x) * 2, backend="eager")(torch.ones(2))
    tensor([2., 2.])
    """
    run: Any = _Uncompiled()(function)
    run._torchdynamo_disable = True  # Dynamo breaks the graph before it
    return run
