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


_MANY = 1 << 16
"""How many keys are remembered outside of a step, where nothing says when a graph is freed."""


class Calls:
    """The keys of the calls of a module's layers in one call of it.

    Args:
        key: of the call.
        known: the keys of earlier calls, by the key of the caller and the layer: a recomputation finds its own.
    """

    def __init__(self, key: int, known: dict[tuple[int, str], int]) -> None:
        self._key, self._known = key, known
        self._counts: dict[str, int] = {}

    def key(self, name: str, begun_by: int) -> int:
        """Return the key of a call of a layer by one that draws by a key."""
        key = self._known.get((begun_by, name))
        if key is None:
            count = self._counts[name] = self._counts.get(name, -1) + 1
            key = self._known[begun_by, name] = turned(self._key, name, count)
        return key


class Layers:
    """The forwards of a replica's modules: adapted ones, and those that draw by a key of their own.

    Args:
        modules: with their names.
        adapt: returns another forward for a module, None for its own.
    """

    def __init__(
        self,
        modules: Iterable[tuple[str, nn.Module]],
        adapt: Callable[[nn.Module], Callable[..., Any] | None],
    ) -> None:
        self._now: list[Calls] = []  # at most one
        self._forwards: list[tuple[dict[str, Any], Callable[..., Any] | None, Callable[..., Any]]] = []
        self._entered, self._known = False, dict[tuple[int, str], int]()
        for name, module in modules:
            own, adapted = vars(module).get("forward"), adapt(module)
            forward = adapted or own
            if isinstance(module, _DRAWING) or not type(module).__module__.startswith("torch.nn."):
                forward = partial(_forward, self._now, weakref.ref(module), forward, name)
            if forward is not own and forward is not None:
                self._forwards.append((vars(module), own, forward))

    def enter(self, key: int | None) -> None:
        """Install the forwards for a call of the whole, whose layers draw by their names if there is a key."""
        if len(self._known) > _MANY:
            self._known.clear()
        self._now[:] = [] if key is None else [Calls(key, self._known)]
        if not self._entered:
            self._entered = True
            for attributes, _, forward in self._forwards:
                attributes["forward"] = forward

    def leave(self) -> None:
        """Put the modules' own forwards back."""
        self._entered = False
        self._known.clear()
        for attributes, own, _ in self._forwards:
            if own is None:
                attributes.pop("forward", None)
            else:
                attributes["forward"] = own


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
    if begun_by is None or not calls:
        return forward(*args, **kwargs)
    before, key = random_state(), calls[0].key(name, begun_by)
    before.begin(key)
    try:
        return forward(*args, **kwargs)
    finally:
        before.set(key ^ 1)  # another than before: that tells what comes now from what came before
