"""Random draws that depend only on a key: not on the device, and not on earlier draws.

Dropout seeded by (seed, step, slice) draws the same masks on 1 device as on 8. In a functionalized module each layer
has its own key, so its masks do not change when another layer is removed or draws more:

    key of a call = (key of the slice, "blocks.1.dropout", number of earlier calls of that layer)

The key is the generator's seed, which torch stores with the generator's state; a caller that continues gets a new one.
So a checkpoint, which restores the state and runs a block again, thereby identifies the call that it repeats, and gets
the same key.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ContextDecorator
from ctypes import c_uint64
from functools import lru_cache, partial
from operator import index
from typing import Any

import torch
from torch import nn


def keyed_random(seed: int, *key: int | str) -> AbstractContextManager[None]:
    """Draw all random numbers of torch's default generators from a state that depends only on the key.

    The generators of the CPU and the current CUDA device are restored after. Contexts may be nested.

    >>> import torch
    >>> step, slice = 3, 0
    >>> with keyed_random(17, step, slice):
    ...     a = torch.rand(2)
    >>> with keyed_random(17, step, slice):
    ...     b = torch.rand(2)
    >>> with keyed_random(17, step, slice, "blocks.1"):
    ...     c = torch.rand(2)
    >>> torch.equal(a, b), torch.equal(a, c)
    (True, False)
    """
    return _KeyedRandom(folded(seed, *key))


def keyed_apart(key: int, index: int) -> AbstractContextManager[None]:
    """Draw by a key in the first of several parts; the others draw differently, except in layers.

    >>> key = folded(17, 0)
    >>> def draw(part):
    ...     with keyed_apart(key, part):
    ...         return torch.rand(()).item(), key_now()
    >>> with keyed_random(17, 0):
    ...     first = torch.rand(()).item(), key_now()
    >>> first == draw(0), first[0] == draw(1)[0], first[1] == draw(1)[1]
    (True, False, True)
    """
    return _KeyedRandom(turned(key, index), key) if index else _KeyedRandom(key)


class DrawState:
    """The states of some generators; no tree, so that no transform looks at them."""

    __slots__ = ("_states", "generators")

    def __init__(self, generators: Sequence[torch.Generator]) -> None:
        self.generators = generators
        self._states = [*map(torch.Generator.get_state, generators)]

    def begin(self, key: int) -> None:
        """Let the generators draw by a key from now on."""
        for generator in self.generators:
            generator.manual_seed(key)

    def set(self, key: int | None = None) -> None:
        """Let the generators go on from here, the CPU's by another name, if a key is given: nothing is drawn from a seed."""
        if key is not None:
            c_uint64.from_address(
                self._states[0].data_ptr()
            ).value = key  # offset of the seed in torch's state
        for generator, state in zip(self.generators, self._states, strict=True):
            generator.set_state(state)


def random_state(*generators: torch.Generator) -> DrawState:
    """Return the states of the calling thread's generators, and of others."""
    return DrawState((*_generators(), *generators) if generators else _generators())


class _KeyedRandom(ContextDecorator):
    """Draw by a key, and restore after; `reported` is reported as the key of these draws."""

    __slots__ = ("_before", "_key", "_reported")

    def __init__(self, key: int, reported: int | None = None) -> None:
        self._key, self._reported = key, reported

    def _recreate_cm(self) -> _KeyedRandom:
        return type(self)(self._key, self._reported)

    def __enter__(self) -> None:
        self._before = random_state()
        self._before.begin(self._key)
        if self._reported is not None:
            random_state().set(self._reported)

    def __exit__(self, *_: object) -> None:
        self._before.set()


class drawing_from:
    """Set generators to a state, and put all of them back afterwards."""

    __slots__ = ("_before", "_state")

    def __init__(self, state: DrawState) -> None:
        self._state = state

    def __enter__(self) -> None:
        self._before = random_state(*self._state.generators)
        self._state.set()

    def __exit__(self, *_: object) -> None:
        self._before.set()


def drawn_key() -> int:
    """Draw the key of a step from torch's default generator."""
    return int(torch.randint(1 << 62, ()).item())


def key_now() -> int | None:
    """Return the key that the calling thread draws by; None if it draws by no key."""
    seed = torch.default_generator.initial_seed()
    return seed if seed >> 48 == _MARK else None


def _generators() -> tuple[torch.Generator, ...]:
    """Return the generators that the calling thread draws from."""
    if not torch.cuda.is_initialized():  # then no tensor is there yet
        return (torch.default_generator,)
    return torch.default_generator, torch.cuda.default_generators[torch.cuda.current_device()]


_MARK = 0xF5A2
"""The prefix of seeds that are keys."""

_BITS = 48

_MULTIPLIER = 0x9E3779B97F4B
"""An odd number: no two keys are turned to one."""


def folded(*key: int | str) -> int:
    """Return a 64-bit key in which every component and its position count."""
    return _MARK << _BITS | _digest(
        *(item if isinstance(item, str) else index(item) for item in key)
    )


def turned(key: int, *parts: int | str) -> int:
    """Return another key for each of a few parts, numbers and strings that come again for many keys; their order counts.

    >>> key = folded(17, 3)
    >>> turned(key, "blocks.1", 0) == turned(key, "blocks.1", 0) != turned(key, "blocks.1", 1)
    True
    >>> key == turned(turned(key, "a"), "a"), turned(turned(key, "a"), "b") == turned(turned(key, "b"), "a")
    (False, False)
    """
    return _MARK << _BITS | (key ^ _cached_digest(*parts)) * _MULTIPLIER % (1 << _BITS)


def _digest(*parts: int | str) -> int:
    digest = hashlib.blake2b(repr([*parts]).encode(), digest_size=_BITS // 8).digest()
    return int.from_bytes(digest, "little")


_cached_digest = lru_cache(maxsize=1 << 16, typed=True)(
    _digest
)  # a digest is soon made, but not among products of matrices


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
