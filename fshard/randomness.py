"""Random draws that depend only on a key: not on the device, and not on earlier draws.

Dropout seeded by (seed, step, slice) draws the same masks on 1 device as on 8. The key is the seed
of torch's generator, which torch stores with the generator's state, so code inside can read it:

    key = folded(17, 3)         0xF5A2 and 48 bits of a digest of (17, 3)
    turned(key, "blocks.1")     another key with the same prefix, for one part of the program

Keys of layers are those of `transforms/reproducible/layer_keys.py`, keys of an optimizer's leaves
those of `optim/per_device/draws.py`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import AbstractContextManager, ContextDecorator
from ctypes import c_uint64
from functools import lru_cache
from operator import index
from typing import Any

import torch

_C: Any = torch._C  # pyright: ignore[reportPrivateUsage]


def keyed_random(seed: int, *key: int | str) -> AbstractContextManager[None]:
    """Draw from torch's default generators by a key: the draws depend on nothing else.

    The generators of the CPU and the current CUDA device are restored after. Contexts may be
    nested.

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
    return seeded_by(folded(seed, *key))


def seeded_by(key: int) -> AbstractContextManager[None]:
    """Draw all random numbers by a key, as `folded` or `turned` returns it."""
    return _KeyedRandom(key)


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
    if index == 0:
        return _KeyedRandom(key)
    # Layers turn the key that is reported, so they draw alike in all parts.
    return _KeyedRandom(turned(key, index), reported=key)


class DrawState:
    """The states of some generators; no tree, so that no transform looks at them."""

    __slots__ = ("_states", "generators")

    def __init__(self, generators: Sequence[torch.Generator]) -> None:
        self.generators = generators
        self._states = [generator.get_state() for generator in generators]

    def begin(self, key: int) -> None:
        """Let the generators draw by a key from now on."""
        for generator in self.generators:
            generator.manual_seed(key)

    def set(self, key: int | None = None) -> None:
        """Let the generators continue from here.

        With a key, the CPU's generator reports it as its seed; what it draws does not change, since
        nothing is drawn from a seed.
        """
        if key is not None:
            # The seed is the first number of torch's state.
            seed = c_uint64.from_address(self._states[0].data_ptr())
            seed.value = key
        for generator, state in zip(self.generators, self._states, strict=True):
            generator.set_state(state)


def random_state(*generators: torch.Generator) -> DrawState:
    """Return the states of the calling thread's generators, and of others."""
    return DrawState((*_generators(), *generators) if generators else _generators())


class _KeyedRandom(ContextDecorator):
    """Draw by a key, and restore after; `reported` is reported as the key of these draws."""

    __slots__ = ("_before", "_key", "_reported")

    def __init__(self, key: int, reported: int | None = None) -> None:
        self._key = key
        self._reported = reported

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
    """Draw the key of a step, or of another call, from torch's default generator."""
    # Within a transform of torch.func a draw would be batched, or raise.
    with _C._DisableFuncTorch():
        return int(torch.randint(1 << 62, ()).item())


def key_now() -> int | None:
    """Return the key that the calling thread draws by; None if it draws by no key."""
    seed = torch.default_generator.initial_seed()
    return seed if seed >> 48 == _MARK else None


def has_drawn(generator: torch.Generator) -> bool:
    """Return True if a generator has drawn since it was seeded."""
    seeded = torch.Generator(generator.device).manual_seed(generator.initial_seed())
    return not torch.equal(seeded.get_state(), generator.get_state())


def _generators() -> tuple[torch.Generator, ...]:
    """Return the generators that the calling thread draws from."""
    if not torch.cuda.is_initialized():  # then no tensor is there yet
        return (torch.default_generator,)
    return torch.default_generator, torch.cuda.default_generators[torch.cuda.current_device()]


_MARK = 0xF5A2
"""The prefix of seeds that are keys."""

_BITS = 48
"""The bits of a key behind the prefix: 16 + 48 are the 64 of a seed."""

_MULTIPLIER = 0x9E3779B97F4B
"""An odd number, which has an inverse modulo 2^48: no two keys are turned to one."""


def folded(*key: int | str) -> int:
    """Return a 64-bit key in which every component and its position count."""
    components = [item if isinstance(item, str) else index(item) for item in key]
    return _MARK << _BITS | _digest(*components)


def turned(key: int, *parts: int | str) -> int:
    """Return another key for each of a few parts, whose order counts.

    Parts are numbers and strings that occur with many keys, so their digests are cached.

    >>> key = folded(17, 3)
    >>> turned(key, "blocks.1", 0) == turned(key, "blocks.1", 0) != turned(key, "blocks.1", 1)
    True
    >>> key == turned(turned(key, "a"), "a")
    False
    >>> turned(turned(key, "a"), "b") == turned(turned(key, "b"), "a")
    False
    """
    # By ^ alone two equal parts would cancel, and the order of parts would not count.
    mixed = (key ^ _cached_digest(*parts)) * _MULTIPLIER
    return _MARK << _BITS | mixed % (1 << _BITS)


def _digest(*parts: int | str) -> int:
    digest = hashlib.blake2b(repr([*parts]).encode(), digest_size=_BITS // 8).digest()
    return int.from_bytes(digest, "little")


# A digest takes little time, but more than there is between products of matrices.
_cached_digest = lru_cache(maxsize=1 << 16, typed=True)(_digest)
