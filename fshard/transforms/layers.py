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
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch import nn

from fshard.transforms.randomness import drawing_by, folded, key_now

_DRAWING = (
    nn.modules.dropout._DropoutNd,  # pyright: ignore[reportPrivateUsage]
    nn.FractionalMaxPool2d,
    nn.FractionalMaxPool3d,
    nn.MultiheadAttention,
    nn.RNNBase,
    nn.RReLU,
)
"""The modules of torch that draw in their own forward."""


class Layers:
    """Gives keys to the calls of a module's parts in one call of it."""

    def __init__(self, key: int) -> None:
        self._key = key
        self._calls: Counter[str] = Counter()
        self._known: dict[tuple[int, str], int] = {}

    def enter(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        """Let modules draw by their names."""
        for name, module in modules:
            if isinstance(module, _DRAWING) or not type(module).__module__.startswith("torch.nn."):
                own = vars(module).get("forward")
                module.__dict__["forward"] = partial(self._forward, weakref.ref(module), own, name)

    def _forward(
        self, module: weakref.ref[Any], own: Callable[..., Any] | None, name: str, /, *args: Any, **kwargs: Any
    ) -> Any:
        layer: Any = module()
        run: Callable[..., Any] = partial(type(layer).forward, layer) if own is None else own
        begun_by = key_now()
        if begun_by is None:  # run again by somebody who has not kept the generator's state
            return run(*args, **kwargs)
        key = self._known.get((begun_by, name))
        if key is None:
            key = self._known[begun_by, name] = folded(self._key, name, self._calls[name])
            self._calls[name] += 1
        with drawing_by(key):
            return run(*args, **kwargs)
