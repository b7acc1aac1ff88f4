"""Random draws that depend on a key, and on nothing else: not on the device, and not on what was drawn before.

Dropout that is keyed by (seed, step, slice), and in a functionalized module by the layer too (see `layers`), draws the same
masks on 1 device as on 8.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from operator import index
from typing import Any

import torch
from torch import Tensor

_WithoutTransforms: Any = torch._C._DisableFuncTorch  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]


@contextmanager
def keyed_random(seed: int, *key: int | str) -> Generator[None]:
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
    with drawing_from(State(())):
        _seed(folded(seed, *key))
        yield


@dataclass(frozen=True)
class State:
    """The states of some generators; no tree, so that no transform looks at them."""

    of: tuple[tuple[torch.Generator, Tensor], ...]

    def set(self) -> None:
        """Let the generators go on from here."""
        for generator, own in self.of:
            generator.set_state(own)


def random_state(*others: torch.Generator) -> State:
    """Return the states of the generators that the calling thread draws from, and of others."""
    return State(tuple((generator, generator.get_state()) for generator in (*_generators(), *others)))


@contextmanager
def drawing_from(state: State) -> Generator[None]:
    """Set generators to a state, and put all of them back afterwards."""
    before = random_state(*(generator for generator, _ in state.of))
    state.set()
    try:
        yield
    finally:
        before.set()


@contextmanager
def drawing_by(key: int) -> Generator[None]:
    """Draw by a key; afterwards go on as before, but by a key that tells what comes now from what came before."""
    before = random_state()
    _seed(key)
    try:
        yield
    finally:
        _call_seed(before, key ^ 1)


@contextmanager
def keyed_apart(seed: int, *key: int | str, part: int) -> Generator[None]:
    """Draw as `keyed_random` does in the first of several parts; others draw something else, but layers what they would there.

    >>> def draw(part):
    ...     with keyed_apart(17, 0, part=part):
    ...         return torch.rand(()).item(), key_now()
    >>> with keyed_random(17, 0):
    ...     first = torch.rand(()).item(), key_now()
    >>> first == draw(0), first[0] == draw(1)[0], first[1] == draw(1)[1]
    (True, False, True)
    """
    with keyed_random(seed, *key, *([f"part {part}"] if part else [])):
        if part:
            _call_seed(random_state(), folded(seed, *key))
        yield


def drawn_key() -> int:
    """Draw the key of a step from torch's default generator."""
    return int(torch.randint(1 << 62, ()).item())


def key_now() -> int | None:
    """Return the key that the calling thread draws by; None if it draws by no key."""
    seed = torch.default_generator.initial_seed()
    return seed if seed >> 48 == _MARK else None


def _call_seed(state: State, key: int) -> None:
    """Go on from a state, but call its seed something else: on a CPU nothing is drawn from that any more."""
    with _WithoutTransforms():  # torch.func would make a tensor without memory of it
        words: Any = state.of[0][1].numpy().view("uint64")
    words[0] = key  # where torch keeps the seed
    state.set()


def _seed(key: int) -> None:
    for generator in _generators():
        generator.manual_seed(key)


def _generators() -> list[torch.Generator]:
    """Return the generators that the calling thread draws from."""
    if not torch.cuda.is_initialized():  # then no tensor is there yet
        return [torch.default_generator]
    return [torch.default_generator, torch.cuda.default_generators[torch.cuda.current_device()]]


_MARK = 0xF5A2
"""What the seeds begin with that are keys."""


def folded(*key: int | str) -> int:
    """Return a key of 64 bits in which every part of what it is made of, and its place, count."""
    parts = [part if isinstance(part, str) else index(part) for part in key]  # 3 is 3, whoever counts
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=6).digest()
    return _MARK << 48 | int.from_bytes(digest, "little")
