"""Draws of a layer that depend on its name and on which of its calls it is, and on nothing that was drawn before.

Where draws are keyed, as in a training step, each module of a functionalized one draws by a key of its own,

    key of a call = (key of the slice, "blocks.1.dropout", how many times that has been called before)

and afterwards the one that called it goes on where it was.  So the masks of a layer stay as they are when another is taken
out before it or draws more.

The key is the seed of the generator, which torch keeps with the generator's state; a caller that goes on is given a new one.
So a checkpoint, which sets the state back and runs a block again, says which call it runs again, and it has the same key.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch import nn

from fshard.transforms.randomness import key_now, random_state, turned

_DRAWING = (
    nn.modules.dropout._DropoutNd,  # pyright: ignore[reportPrivateUsage]
    nn.FractionalMaxPool2d,
    nn.FractionalMaxPool3d,
    nn.MultiheadAttention,
    nn.RNNBase,
    nn.RReLU,
)
"""The modules of torch that draw in their own forward."""


class Calls:
    """The keys of the calls of a module's parts in one call of it."""

    def __init__(self, key: int) -> None:
        self._key = key
        self._counts: dict[str, int] = {}
        self._known: dict[tuple[int, str], int] = {}

    def key(self, name: str, begun_by: int) -> int:
        """Return the key of a call of a layer by one that draws by a key; the same, when it is run again."""
        key = self._known.get((begun_by, name))
        if key is None:
            count = self._counts[name] = self._counts.get(name, -1) + 1
            key = self._known[begun_by, name] = turned(self._key, name, count)
        return key


class Layers:
    """The modules of a replica, each with what calls it by a key of its own."""

    def __init__(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        self._now: list[Calls] = []  # at most one
        self._forwards: list[tuple[dict[str, Any], Callable[..., Any]]] = []
        for name, module in modules:
            if isinstance(module, _DRAWING) or not type(module).__module__.startswith("torch.nn."):
                own = vars(module).get("forward")
                forward = partial(_forward, self._now, weakref.ref(module), own, name)
                self._forwards.append((vars(module), forward))

    def enter(self, key: int) -> None:
        """Let the modules draw by their names in a call of the whole, until their own attributes are put back."""
        self._now[:] = [Calls(key)]
        for attributes, forward in self._forwards:
            attributes["forward"] = forward


def _forward(
    calls: list[Calls],
    module: weakref.ref[Any],
    own: Callable[..., Any] | None,
    name: str,
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    layer: Any = module()
    forward, begun_by = own or partial(type(layer).forward, layer), key_now()
    if begun_by is None:  # run again by somebody who has not kept the generator's state
        return forward(*args, **kwargs)
    before, key = random_state(), calls[0].key(name, begun_by)
    before.begin(key)
    try:
        return forward(*args, **kwargs)
    finally:
        before.set(key ^ 1)  # another than before: that tells what comes now from what came before
