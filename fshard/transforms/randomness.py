"""Random draws that depend on a key, and on nothing else: not on the device, and not on what was drawn before.

Dropout that is keyed by (seed, step, slice), and in a functionalized module by the layer too (see `layers`), draws the same
masks on 1 device as on 8.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import AbstractContextManager, ContextDecorator
from ctypes import c_uint64
from functools import lru_cache
from operator import index

import torch


def keyed_random(seed: int, *key: int | str) -> AbstractContextManager[None]:
    """Draw all random numbers of torch's default generators from a state that the key alone determines.

    Their own states, of the CPU and of the current CUDA device, are as before afterwards.  Contexts may be nested.

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
    return _Keyed(folded(seed, *key))


def keyed_apart(key: int, part: int) -> AbstractContextManager[None]:
    """Draw by a key in the first of several parts; others draw something else, but layers what they would there.

    >>> key = folded(17, 0)
    >>> def draw(part):
    ...     with keyed_apart(key, part):
    ...         return torch.rand(()).item(), key_now()
    >>> with keyed_random(17, 0):
    ...     first = torch.rand(()).item(), key_now()
    >>> first == draw(0), first[0] == draw(1)[0], first[1] == draw(1)[1]
    (True, False, True)
    """
    return _Keyed(turned(key, part), key) if part else _Keyed(key)


class State:
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
            c_uint64.from_address(self._states[0].data_ptr()).value = key  # where torch keeps the seed
        for generator, own in zip(self.generators, self._states, strict=True):
            generator.set_state(own)


def random_state(*others: torch.Generator) -> State:
    """Return the states of the generators that the calling thread draws from, and of others."""
    return State((*_generators(), *others) if others else _generators())


class _Keyed(ContextDecorator):
    """Draw by a key, and go on as before afterwards; what is drawn is said to be drawn by the key `told`."""

    __slots__ = ("_before", "_key", "_told")

    def __init__(self, key: int, told: int | None = None) -> None:
        self._key, self._told = key, told

    def _recreate_cm(self) -> _Keyed:
        return type(self)(self._key, self._told)

    def __enter__(self) -> None:
        self._before = random_state()
        self._before.begin(self._key)
        if self._told is not None:
            random_state().set(self._told)

    def __exit__(self, *_: object) -> None:
        self._before.set()


class drawing_from:
    """Set generators to a state, and put all of them back afterwards."""

    __slots__ = ("_before", "_state")

    def __init__(self, state: State) -> None:
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
"""What the seeds begin with that are keys."""

_BITS = 48

_TURN = 0x9E3779B97F4B
"""An odd number: no two keys are turned to one."""


def folded(*key: int | str) -> int:
    """Return a key of 64 bits in which every part of what it is made of, and its place, count."""
    return _MARK << _BITS | _digest(*(part if isinstance(part, str) else index(part) for part in key))


def turned(key: int, *parts: int | str) -> int:
    """Return another key for each of a few parts, numbers and strings that come again for many keys; their order counts.

    >>> key = folded(17, 3)
    >>> turned(key, "blocks.1", 0) == turned(key, "blocks.1", 0) != turned(key, "blocks.1", 1)
    True
    >>> key == turned(turned(key, "a"), "a"), turned(turned(key, "a"), "b") == turned(turned(key, "b"), "a")
    (False, False)
    """
    return _MARK << _BITS | (key ^ _known_digest(*parts)) * _TURN % (1 << _BITS)


def _digest(*parts: int | str) -> int:
    digest = hashlib.blake2b(repr([*parts]).encode(), digest_size=_BITS // 8).digest()
    return int.from_bytes(digest, "little")


_known_digest = lru_cache(maxsize=1 << 16)(_digest)  # a digest is soon made, but not among products of matrices
