"""`RandomState`: the states of random generators, as one array with a row of bytes for each device."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fshard.checkpoint.snapshot import calling_device
from fshard.errors import CheckpointError
from fshard.mesh.layout import Layout, Mesh, P
from fshard.mesh.layout.sharded import Sharded
from fshard.randomness import folded

_ROOM = 8192
"""Bytes for the text of a state of Python or numpy, which has up to 625 numbers of 32 bits."""


class RandomState:
    """The states of the generators of torch (on the CPU and the current GPU), numpy and Python, and of `generators`.

    Each device saves its own. Restored on more devices, a generator that was in one state on all, or on the one that there
    was, is in this state on all: devices draw alike until they are seeded differently. If there were several states, the
    other devices are seeded by a row and their number, so that they draw other numbers.

    >>> state = RandomState()
    >>> saved, drawn = state.state_dict(), torch.rand(2)
    >>> state.load_state_dict(saved)
    >>> torch.equal(torch.rand(2), drawn)
    True
    """

    def __init__(self, *generators: torch.Generator | np.random.Generator | random.Random) -> None:
        self._extra = [*map(_generator, generators)]

    def _generators(self) -> dict[str, _Generator]:
        """Return all generators by number and kind; the current GPU may be another than before."""
        numpy_generator, python_generator = np.random.mtrand._rand, random._inst  # pyright: ignore
        shared = map(_generator, (torch.default_generator, numpy_generator, python_generator))
        generators = [*shared, *self._extra]
        if torch.cuda.is_available():
            index = torch.cuda.current_device()  # initialises the generators of GPUs
            generators.append(_generator(torch.cuda.default_generators[index]))
        return {
            f"{number}.{generator.kind}": generator for number, generator in enumerate(generators)
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the number of bytes of each state, and the rows."""
        states = {name: _as_bytes(x.get()) for name, x in self._generators().items()}
        rows: Any = torch.cat([*states.values()])[None]
        runtime, size, _ = calling_device()
        if runtime:
            layout = Layout(Mesh((("device", size),), runtime, "cpu"), P("device"))
            rows = Sharded((size, rows.numel()), layout, (rows,))
        return {"sizes": [[name, len(state)] for name, state in states.items()], "rows": rows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set all generators; that of a GPU if both sides have one."""
        generators, rows, device = self._generators(), state["rows"], calling_device()[2]
        if isinstance(rows, Sharded):  # as it was returned
            rows, device = rows.shards[0], 0
        sizes = dict(state["sizes"])
        saved, wanted = (
            [name for name in names if not name.endswith("cuda")] for names in (sizes, generators)
        )
        if saved != wanted:
            raise CheckpointError(
                f"RandomState must have the generators {', '.join(saved)}; got {', '.join(wanted)}."
            )
        for name, column in zip(sizes, rows.split([*sizes.values()], 1), strict=True):
            row, is_common = column[device % len(column)].clone(), bool((column == column[0]).all())
            if name in generators and (device < len(column) or is_common):
                generators[name].set(
                    row if name.endswith(("cpu", "cuda")) else json.loads(row.numpy().tobytes())
                )
            elif name in generators:
                generators[name].seed(folded(row.numpy().tobytes().hex(), device, name) >> 1)


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
        return _Generator(
            "Random",
            x.getstate,
            lambda state: x.setstate((state[0], tuple(state[1]), state[2])),
            x.seed,
        )
    if isinstance(x, np.random.RandomState):
        get = partial(x.get_state, legacy=False)
        return _Generator("RandomState", get, x.set_state, lambda seed: x.seed(seed % (1 << 32)))
    if isinstance(x, np.random.Generator):
        bits: Any = x.bit_generator
        set_state = partial(setattr, bits, "state")
        seed = lambda seed: set_state(type(bits)(seed).state)  # noqa: E731
        return _Generator(type(bits).__name__, lambda: bits.state, set_state, seed)
    raise TypeError(
        f"RandomState: generators must be of torch, numpy or Python; got {type(x).__name__}."
    )


def _as_bytes(state: Any) -> Tensor:
    if isinstance(state, Tensor):
        return state
    text = json.dumps(state, default=lambda x: x.tolist(), separators=(",", ":"))
    return torch.frombuffer(bytearray(text.encode().ljust(_ROOM)), dtype=torch.uint8)
