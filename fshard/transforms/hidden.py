"""Modules that are no submodules, in a plain list say: what a forward writes to their tensors is kept by nobody.

    self.teacher = [teacher]                            neither parameters nor buffers of the model, and shared by all calls
    object.__setattr__(self, "teacher", teacher)

Large containers and arrays, which all calls share, are watched as well.

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

from fshard.copying import CONTAINERS, MANY, held_apart
from fshard.transforms.holders import INTERNAL, are_same

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
        tensors = [
            x
            for x in (*part.parameters(), *part.buffers())
            if id(x) not in own and not x.is_inference() and not x.is_meta
        ]
        found.setdefault(name, []).extend(tensors)
    return {name: tensors for name, tensors in found.items() if tensors}


def large(module: nn.Module) -> dict[str, Any]:
    """Return the attributes that are large containers or arrays, of which calls have no copies.

    >>> layer = nn.Linear(1, 1)
    >>> layer.words, layer.few = [*range(5000)], [1]
    >>> [*large(layer)]
    ['words']
    """
    return {
        f"{path}.{key}".removeprefix("."): x
        for path, part in module.named_modules()
        for key, x in vars(part).items()
        if key not in INTERNAL and (_is_array(x) or (isinstance(x, CONTAINERS) and len(x) > MANY))
    }


def _is_array(x: Any) -> bool:
    return type(x).__module__ == "numpy" and getattr(x, "nbytes", 0) > 1 << 16 and x.ndim > 0


def _entries(x: Any) -> list[Any]:
    """Return what a container holds, or an array."""
    if _is_array(x):
        return [x.tobytes()]
    return [*x.keys(), *x.values()] if isinstance(x, dict) else [*x]


def watched(apply: Apply, module: nn.Module) -> Apply:
    """Return a module as a function that warns once of what its forward writes to hidden modules.

    Values are compared in the first call, as `.data` counts no writes; after it, who writes otherwise is seen still.
    """
    inner, shared = hidden(module), large(module)
    if not inner and not shared:
        return apply
    first = [True]

    @wraps(apply)
    def run(*args: Any, **kwargs: Any) -> Any:
        values = {name: [x.detach().clone() for x in xs] for name, xs in inner.items() if first}
        versions = {name: [x._version for x in xs] for name, xs in inner.items()}
        sizes = {name: len(x) for name, x in shared.items()}
        entries = {name: _entries(x) for name, x in shared.items() if first}
        first.clear()
        output = apply(*args, **kwargs)
        written = [name for name, xs in inner.items() if [x._version for x in xs] != versions[name]]
        written += [name for name, xs in values.items() if not all(map(torch.equal, xs, inner.get(name, xs)))]
        if written:
            _warn_of_hidden(type(module).__name__, list(dict.fromkeys(written)))
            inner.clear()  # it is told once
        changed = [name for name, x in shared.items() if len(x) != sizes[name]]
        changed += [name for name, was in entries.items() if not are_same(_entries(shared[name]), was)]
        if changed:
            _warn_of_large(type(module).__name__, list(dict.fromkeys(changed)))
            shared.clear()
        return output

    return run


def _warn_of_large(title: str, names: list[str]) -> None:
    _warn(
        title,
        names,
        "was changed by a forward, and is so large that all calls share it: in reproducible mode it is changed once for each "
        "slice, in stages once for each microbatch, not once for a step. Change it outside of forward, in model.module, or "
        "keep a buffer.",
    )


def _warn_of_hidden(title: str, names: list[str]) -> None:
    _warn(
        title,
        names,
        "leads to modules that are no submodules, and a forward has written to their tensors: in reproducible mode once for "
        "each slice, in stages once for each microbatch, not once for a step, and not alike on all devices. Make them "
        "submodules, frozen by requires_grad_(False), or write to them outside of forward.",
    )


def _warn(title: str, names: list[str], what: str) -> None:
    warnings.warn(f"{', '.join(f'{title}.{name}' for name in names)} {what}", stacklevel=4)
