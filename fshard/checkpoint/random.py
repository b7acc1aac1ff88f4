"""`RandomState`: the states of random generators, as one array with a row of bytes for each device.

sizes      0.cpu    1.RandomState    2.Random      bytes of each state, equal on all devices
row 0      ....     ....             ....          of device 0
row 1      ....     ....             ....          of device 1
"""

from __future__ import annotations

import json
import pickle
import random
from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fshard.checkpoint.form import calling_device
from fshard.errors import CheckpointError
from fshard.mesh.layout import Layout, P
from fshard.mesh.layout.sharded import Sharded
from fshard.randomness import folded

_ROOM = 8192
"""Bytes for the text of a state of Python or numpy, which has up to 625 numbers of 32 bits."""


class RandomState:
    """The states of the generators of torch, numpy and Python, and of `generators`.

    Those of torch are on the CPU and the current GPU. Each device saves its own. Restored on more
    devices, a generator that was in one state on all, or on the one that there was, is in this
    state on all: devices draw alike until they are seeded differently. If there were several
    states, the other devices are seeded by a row and their number, so that they draw other numbers.

    >>> state = RandomState()
    >>> saved, drawn = state.state_dict(), torch.rand(2)
    >>> state.load_state_dict(saved)
    >>> torch.equal(torch.rand(2), drawn)
    True
    """

    def __init__(self, *generators: torch.Generator | np.random.Generator | random.Random) -> None:
        self._extra = [*map(_generator, generators)]

    def __repr__(self) -> str:
        """Return the kinds of the generators, without the one of a GPU, which this would begin."""
        kinds = ["torch", "numpy", "Python", *[generator.kind for generator in self._extra]]
        return f"RandomState({', '.join(kinds)})"

    def _generators(self) -> dict[str, _Generator]:
        """Return all generators by number and kind; the current GPU may be another than before."""
        numpy_generator: Any = np.random.mtrand._rand  # pyright: ignore
        python_generator: Any = random._inst  # pyright: ignore
        shared = (torch.default_generator, numpy_generator, python_generator)
        generators = [*map(_generator, shared), *self._extra]
        if torch.cuda.is_available():
            index = torch.cuda.current_device()  # initialises the generators of GPUs
            generators.append(_generator(torch.cuda.default_generators[index]))
        by_name: dict[str, _Generator] = {}
        for number, generator in enumerate(generators):
            by_name[f"{number}.{generator.kind}"] = generator  # several may be of one kind
        return by_name

    def now(self) -> Callable[[], None]:
        """Return a function that sets the generators of this process to their present states."""
        generators = [*self._generators().values()]
        states = [generator.get() for generator in generators]

        def set_again() -> None:
            for generator, state in zip(generators, states, strict=True):
                generator.set(state)

        return set_again

    def state_dict(self) -> dict[str, Any]:
        """Return the number of bytes of each state, and the rows."""
        states = {name: _as_bytes(x.get()) for name, x in self._generators().items()}
        rows: Any = torch.cat([*states.values()])[None]
        mesh, _ = calling_device()
        if mesh is not None:
            layout = Layout(mesh, P("device"))
            rows = Sharded((mesh.size, rows.numel()), layout, (rows,))
        sizes = [[name, len(state)] for name, state in states.items()]
        return {"sizes": sizes, "rows": rows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set all generators; that of a GPU if both sides have one."""
        generators = self._generators()
        rows = state["rows"]
        _, device = calling_device()
        if isinstance(rows, Sharded):
            # As `state_dict` has returned it: this device's row alone.
            rows = rows.shards[0]
            device = 0

        sizes = dict(state["sizes"])
        saved = _names_without_gpu(sizes)
        current = _names_without_gpu(generators)
        if saved != current:
            raise CheckpointError(
                f"RandomState must have the generators {', '.join(saved)}; "
                f"got {', '.join(current)}."
            )
        for name, column in zip(sizes, rows.split([*sizes.values()], 1), strict=True):
            if name not in generators:  # of a GPU
                continue
            # Cloned: torch ends the process by a fault if a state is a view of a larger tensor.
            row = column[device % len(column)].clone()
            is_common = bool((column == column[0]).all())
            if device < len(column) or is_common:
                generators[name].set(_from_bytes(row, name))
            else:
                # Shifted, since torch's seed would else have the mark of a key: see `key_now`.
                seed = folded(row.numpy().tobytes().hex(), device, name) >> 1
                generators[name].seed(seed)


def _names_without_gpu(names: Iterable[str]) -> list[str]:
    return [name for name in names if not name.endswith("cuda")]


class _Generator(NamedTuple):
    """A generator by three functions: get and set its state, bytes or a value of JSON; seed it."""

    kind: str
    get: Callable[[], Any]
    set: Callable[[Any], Any]
    seed: Callable[[int], Any]


def _generator(x: Any) -> _Generator:
    if isinstance(x, torch.Generator):
        return _Generator(x.device.type, x.get_state, x.set_state, x.manual_seed)
    if isinstance(x, random.Random):
        return _Generator("Random", x.getstate, partial(_set_python_state, x), x.seed)
    if isinstance(x, np.random.RandomState):
        get_state = partial(x.get_state, legacy=False)
        return _Generator("RandomState", get_state, x.set_state, partial(_seed_legacy_numpy, x))
    if isinstance(x, np.random.Generator):
        bits: Any = x.bit_generator
        kind = type(bits).__name__
        get_state = partial(getattr, bits, "state")
        set_state = partial(setattr, bits, "state")
        return _Generator(kind, get_state, set_state, partial(_seed_numpy, bits))
    raise TypeError(
        f"RandomState: generators must be of torch, numpy or Python; got {type(x).__name__}."
    )


def _set_python_state(generator: random.Random, state: Any) -> None:
    version, numbers, gauss_next = state
    generator.setstate((version, tuple(numbers), gauss_next))  # JSON has lists, no tuples


def _seed_legacy_numpy(generator: np.random.RandomState, seed: int) -> None:
    generator.seed(seed % (1 << 32))  # the most that it takes


def _seed_numpy(bits: Any, seed: int) -> None:
    bits.state = type(bits)(seed).state


def _as_bytes(state: Any) -> Tensor:
    """Return a state as bytes: those of torch are, others become JSON of one length."""
    if isinstance(state, Tensor):
        return state
    return torch.frombuffer(bytearray(_as_json(pickle.dumps(state))), dtype=torch.uint8)


# In a run that saves each step, most generators have drawn nothing since the last save. The text of
# one takes five times as long as its pickle, which is equal for equal states alone.
@lru_cache(maxsize=16)
def _as_json(pickled: bytes) -> bytes:
    """Return the JSON of a pickled state, of one length."""
    state = pickle.loads(pickled)
    text = json.dumps(state, default=lambda x: x.tolist(), separators=(",", ":"))
    return text.encode().ljust(_ROOM)


def _from_bytes(row: Tensor, name: str) -> Any:
    """Return the state of a generator, by its name, from its bytes."""
    is_of_torch = name.endswith(("cpu", "cuda"))
    return row if is_of_torch else json.loads(row.numpy().tobytes())
