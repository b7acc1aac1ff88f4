"""Keys of random draws for the layers of a module.

In a functionalized module each layer has its own key, so its masks do not change when another layer is removed or draws
more:

    key of a call = (key of the slice, "blocks.1.dropout", number of earlier calls of that layer)

The key is the generator's seed, and a caller that continues gets a new one. So a checkpoint, which restores the state and
runs a block again, thereby identifies the call that it repeats, and gets the same key.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch import nn

from fshard.randomness import key_now, random_state, turned

_DRAWING = (
    nn.modules.dropout._DropoutNd,  # pyright: ignore[reportPrivateUsage]
    nn.FractionalMaxPool2d,
    nn.FractionalMaxPool3d,
    nn.MultiheadAttention,
    nn.RNNBase,
    nn.RReLU,
)
"""The modules of torch that draw in their own forward."""


_MAX_CACHED_KEYS = 1 << 16
"""Number of cached keys outside of a step, where the end of a graph is unknown."""


class Calls:
    """The keys of the calls of a module's layers in one call of it.

    Args:
        key: of the call.
        keys: those of earlier calls, by the key of the caller and the layer: a recomputation finds its own.
    """

    def __init__(self, key: int, keys: dict[tuple[int, str], int]) -> None:
        self._key, self._keys = key, keys
        self._counts: dict[str, int] = {}

    def key(self, name: str, begun_by: int) -> int:
        """Return the key of a call of a layer by one that draws by a key."""
        key = self._keys.get((begun_by, name))
        if key is None:
            count = self._counts[name] = self._counts.get(name, -1) + 1
            key = self._keys[begun_by, name] = turned(self._key, name, count)
        return key


class Layers:
    """The forwards of a replica's modules: adapted ones, and those that draw by their own key.

    Args:
        modules: with their names.
        adapt: returns another forward for a path and its module, None for its own.
    """

    def __init__(
        self,
        modules: Iterable[tuple[str, nn.Module]],
        adapt: Callable[[str, nn.Module], Callable[..., Any] | None],
    ) -> None:
        self._calls: list[Calls] = []  # at most one
        self._forwards: list[
            tuple[dict[str, Any], Callable[..., Any] | None, Callable[..., Any]]
        ] = []
        self._is_entered, self._keys = False, dict[tuple[int, str], int]()
        for name, module in modules:
            original, adapted = vars(module).get("forward"), adapt(name, module)
            forward = adapted or original
            if isinstance(module, _DRAWING) or not type(module).__module__.startswith("torch.nn."):
                forward = partial(_seeded_forward, self._calls, weakref.ref(module), forward, name)
            if forward is not original and forward is not None:
                self._forwards.append((vars(module), original, forward))

    def enter(self, key: int | None) -> None:
        """Install the forwards for a call of the module; with a key, layers draw by their names."""
        if len(self._keys) > _MAX_CACHED_KEYS:
            self._keys.clear()
        self._calls[:] = [] if key is None else [Calls(key, self._keys)]
        if not self._is_entered:
            self._is_entered = True
            for attributes, _, forward in self._forwards:
                attributes["forward"] = forward

    def leave(self) -> None:
        """Put the modules' own forwards back."""
        self._is_entered = False
        self._keys.clear()
        for attributes, original, _ in self._forwards:
            if original is None:
                attributes.pop("forward", None)
            else:
                attributes["forward"] = original


def _seeded_forward(
    calls: list[Calls],
    module: weakref.ref[Any],
    original: Callable[..., Any] | None,
    name: str,
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    layer: Any = module()
    forward, begun_by = original or partial(type(layer).forward, layer), key_now()
    if begun_by is None or not calls:
        return forward(*args, **kwargs)
    before, key = random_state(), calls[0].key(name, begun_by)
    before.begin(key)
    try:
        return forward(*args, **kwargs)
    finally:
        before.set(key ^ 1)  # a new seed: it distinguishes later draws from earlier ones
