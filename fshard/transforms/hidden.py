"""Modules that are no submodules, in a plain list say: what a forward writes to their tensors is kept by nobody.

    self.teacher = [teacher]                            neither parameters nor buffers of the model, and shared by all calls
    object.__setattr__(self, "teacher", teacher)

Without slices a call is a step's only one on its device, and such a teacher goes on as in torch.  In reproducible mode each
slice would write to it, on a device that has few of them fewer times than on one that has all, in stages each microbatch: that
is told.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from fshard.copying import held_apart

Apply = Callable[..., Any]


def hidden(module: nn.Module) -> dict[str, list[Tensor]]:
    """Return the tensors of modules that are no submodules, by the attributes that lead to them.

    >>> layer = nn.Linear(1, 1)
    >>> layer.teacher = [nn.Linear(1, 1, bias=False)]
    >>> [(name, len(tensors)) for name, tensors in hidden(layer).items()]
    [('teacher', 1)]
    """
    own = {id(x) for x in (*module.parameters(), *module.buffers())}
    found = dict[str, list[Tensor]]()
    for name, part in held_apart(module):
        tensors = [x for x in (*part.parameters(), *part.buffers()) if id(x) not in own and not x.is_inference()]
        found.setdefault(name, []).extend(tensors)
    return {name: tensors for name, tensors in found.items() if tensors}


def watched(apply: Apply, module: nn.Module) -> Apply:
    """Return a module as a function that warns once of what its forward writes to hidden modules.

    Values are compared in the first call, as `.data` counts no writes; after it, who writes otherwise is seen still.
    """
    inner = hidden(module)
    if not inner:
        return apply
    first = [True]

    @wraps(apply)
    def run(*args: Any, **kwargs: Any) -> Any:
        values = {name: [x.detach().clone() for x in xs] for name, xs in inner.items() if first}
        versions = {name: [x._version for x in xs] for name, xs in inner.items()}
        first.clear()
        output = apply(*args, **kwargs)
        written = [name for name, xs in inner.items() if [x._version for x in xs] != versions[name]]
        written += [name for name, xs in values.items() if not all(map(torch.equal, xs, inner.get(name, xs)))]
        if written:
            _warn(type(module).__name__, list(dict.fromkeys(written)))
            inner.clear()  # it is told once
        return output

    return run


def _warn(title: str, names: list[str]) -> None:
    told = ", ".join(f"{title}.{name}" for name in names)
    warnings.warn(
        f"{told} leads to modules that are no submodules, and a forward has written to their tensors: in reproducible mode "
        "once for each slice, in stages once for each microbatch, not once for a step, and not alike on all devices. Make them "
        "submodules, frozen by requires_grad_(False), or write to them outside of forward.",
        stacklevel=3,
    )
