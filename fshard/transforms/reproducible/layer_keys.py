"""Keys of random draws for the layers of a module.

In a functionalized module each layer has its own key, so its masks do not change when another layer
is removed or draws more:

    key of a call = (key of the slice, "blocks.1.dropout", number of earlier calls of that layer)

The key is the generator's seed, and a caller that continues gets a new one. So a checkpoint, which
restores the state and runs a block again, thereby identifies the call that it repeats, and gets the
same key.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch import nn

from fshard.randomness import key_now, random_state, turned
from fshard.transforms.module.compiled import COMPILED_CALL, Unsharding, call_compiled, is_compiled

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
        keys: those of earlier calls, by the key of the caller and the layer: a recomputation finds
            its own.
    """

    def __init__(self, key: int, keys: dict[tuple[int, str], int]) -> None:
        self._key = key
        self._keys = keys
        self._counts: dict[str, int] = {}

    def key(self, name: str, begun_by: int) -> int:
        """Return the key of a call of a layer by one that draws by a key."""
        key = self._keys.get((begun_by, name))
        if key is None:
            count = self._counts.get(name, 0)
            self._counts[name] = count + 1
            key = turned(self._key, name, count)
            self._keys[begun_by, name] = key
        return key


class Layers:
    """The forwards of a replica's modules.

    They are adapted or compiled ones, and those that draw by a key of their own.

    Args:
        modules: with their names, each before those inside of it.
        adapt: returns another forward for a path and its module, None for its own.
        unsharding: `with_unsharded_params`, for compiled modules.
    """

    def __init__(
        self,
        modules: Iterable[tuple[str, nn.Module]],
        adapt: Callable[[str, nn.Module], Callable[..., Any] | None],
        unsharding: Unsharding,
    ) -> None:
        self._modules = [*modules]
        self._adapt = adapt
        self._unsharding = unsharding
        self._calls: list[Calls] = []  # at most one; a list, which the forwards refer to
        self._is_entered = False
        self._keys: dict[tuple[int, str], int] = {}
        self._compiled = self._compiled_names()
        self._replacements = self._replace()

    def _compiled_names(self) -> list[str]:
        return [name for name, module in self._modules if is_compiled(module)]

    def _replace(self) -> list[Replacement]:
        """Return the attributes to replace in a call: Note [Compiled modules]."""
        replacements: list[Replacement] = []
        for name, module in self._modules:
            attributes = vars(module)
            adapted = self._adapt(name, module)
            key = "forward"
            call = adapted or attributes.get("forward")
            if is_compiled(module):
                key = COMPILED_CALL
                call = partial(call_compiled, self._unsharding, module, attributes[COMPILED_CALL])
            draws = isinstance(module, _DRAWING) or not _is_of_torch(module)
            if draws and not self._is_inside_graph(name):
                call = partial(_seeded_forward, self._calls, weakref.ref(module), call, name)
            if call is not attributes.get(key):
                replacements.append(Replacement(attributes, key, call))
        return replacements

    def _is_inside_graph(self, name: str) -> bool:
        """Return True if a module is inside of a compiled one."""
        outer = [compiled for compiled in self._compiled if compiled != name]
        return any(compiled == "" or name.startswith(f"{compiled}.") for compiled in outer)

    def enter(self, key: int | None) -> None:
        """Install the forwards for a call of the module; with a key, layers draw by their names."""
        if len(self._keys) > _MAX_CACHED_KEYS:
            self._keys.clear()
        self._calls[:] = [] if key is None else [Calls(key, self._keys)]
        if self._is_entered:
            return
        self._is_entered = True
        compiled = self._compiled_names()  # a module may be compiled between two steps
        if compiled != self._compiled:
            self._compiled = compiled
            self._replacements = self._replace()
        for replacement in self._replacements:
            replacement.install()

    def leave(self) -> None:
        """Put the modules' own forwards back."""
        self._is_entered = False
        self._keys.clear()
        for replacement in self._replacements:
            replacement.remove()


def _is_of_torch(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.nn.")


class Replacement:
    """An attribute of a module that has another value in a call.

    Args:
        attributes: of the module.
        key: of the attribute.
        call: its value in a call.
    """

    def __init__(self, attributes: dict[str, Any], key: str, call: Any) -> None:
        self._attributes = attributes
        self._key = key
        self._call = call
        self._is_own = key in attributes  # else the class has the attribute
        self._original = attributes.get(key)

    def install(self) -> None:
        """Set the attribute for a call."""
        self._attributes[self._key] = self._call

    def remove(self) -> None:
        """Set the attribute to its value outside of calls."""
        if self._is_own:
            self._attributes[self._key] = self._original
        else:
            self._attributes.pop(self._key, None)


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
    forward = original or partial(type(layer).forward, layer)
    begun_by = key_now()
    if begun_by is None or not calls:
        return forward(*args, **kwargs)
    before = random_state()
    key = calls[0].key(name, begun_by)
    before.begin(key)
    try:
        return forward(*args, **kwargs)
    finally:
        before.set(key ^ 1)  # a new seed: it distinguishes later draws from earlier ones
