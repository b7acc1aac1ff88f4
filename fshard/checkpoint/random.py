"""`RandomState`: the states of random generators, as one array with a row of bytes for each device."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from fshard.errors import CheckpointError
from fshard.mesh.layout import Layout, P
from fshard.mesh.layout.mesh import Mesh
from fshard.mesh.layout.sharded import Sharded
from fshard.mesh.runtimes.launchers import process_count, process_index
from fshard.mesh.spmd.scope import here
from fshard.transforms.reproducible.randomness import folded

_ROOM = 8192
"""Bytes for the text of a state of Python or numpy, which has up to 625 numbers of 32 bits."""


class RandomState:
    """The states of the generators of torch (on the CPU and the current GPU), numpy and Python, and of `generators`.

    Each device saves its own. Restored on more devices, the others are seeded by a row and their number, so that they draw
    other numbers; unless all of several rows are equal, as those of a generator that shuffles alike on all devices.

    >>> state = RandomState()
    >>> saved, drawn = state.state_dict(), torch.rand(2)
    >>> state.load_state_dict(saved)
    >>> torch.equal(torch.rand(2), drawn)
    True
    """

    takes_any_shape = True  # load_state_dict gets the rows of all devices

    def __init__(self, *generators: torch.Generator | np.random.Generator | random.Random) -> None:
        self._given = [_generator(one) for one in generators]

    def _generators(self) -> dict[str, _Generator]:
        """Return all generators by place and kind; the current GPU may be another than before."""
        gpu, hidden = torch.cuda, (np.random.mtrand, random)
        near = [gpu.current_device()] if gpu.is_available() else []  # initialises the generators of GPUs
        own = [torch.default_generator, hidden[0]._rand, hidden[1]._inst]  # pyright: ignore
        found = [*map(_generator, own), *self._given, *[_generator(gpu.default_generators[one]) for one in near]]
        return {f"{place}.{one.kind}": one for place, one in enumerate(found)}

    def state_dict(self) -> dict[str, Any]:
        """Return the number of bytes of each state, and the rows."""
        states, mesh = {name: _as_bytes(one.get()) for name, one in self._generators().items()}, _devices()[0]
        rows: Any = torch.cat([*states.values()])[None]
        if mesh is not None:
            rows = Sharded((mesh.size, rows.numel()), Layout(mesh, P("device")), (rows,))
        return {"sizes": [[name, len(state)] for name, state in states.items()], "rows": rows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set all generators; that of a GPU if both sides have one."""
        own, rows, device = self._generators(), state["rows"], _devices()[1]
        if isinstance(rows, Sharded):  # as it was returned
            rows, device = rows.shards[0], 0
        sizes = dict(state["sizes"])
        saved, wanted = ([name for name in names if not name.endswith("cuda")] for names in (sizes, own))
        if saved != wanted:
            raise CheckpointError(f"RandomState must have the generators {', '.join(saved)}; got {', '.join(wanted)}.")
        for name, column in zip(sizes, rows.split([*sizes.values()], 1), strict=True):
            row, is_common = column[device % len(column)].clone(), bool((column == column[0]).all())
            if name in own and (device < len(column) or (is_common and len(column) > 1)):
                own[name].set(row if name.endswith(("cpu", "cuda")) else json.loads(row.numpy().tobytes()))
            elif name in own:
                own[name].seed(folded(row.numpy().tobytes().hex(), device, name) >> 1)


class _Generator(NamedTuple):
    """A generator by three functions: get and set its state, bytes or a value of JSON; seed it."""

    kind: str
    get: Callable[[], Any]
    set: Callable[[Any], Any]
    seed: Callable[[int], Any]


def _generator(one: Any) -> _Generator:
    if isinstance(one, torch.Generator):
        return _Generator(one.device.type, one.get_state, one.set_state, one.manual_seed)
    if isinstance(one, random.Random):
        return _Generator("Random", one.getstate, lambda x: one.setstate((x[0], tuple(x[1]), x[2])), one.seed)
    if isinstance(one, np.random.RandomState):
        get = partial(one.get_state, legacy=False)
        return _Generator("RandomState", get, one.set_state, lambda seed: one.seed(seed % (1 << 32)))
    if isinstance(one, np.random.Generator):
        bits: Any = one.bit_generator
        put = partial(setattr, bits, "state")
        return _Generator(type(bits).__name__, lambda: bits.state, put, lambda seed: put(type(bits)(seed).state))
    raise TypeError(f"RandomState: generators must be of torch, numpy or Python; got {type(one).__name__}.")


def _as_bytes(state: Any) -> Tensor:
    if isinstance(state, Tensor):
        return state
    text = json.dumps(state, default=lambda x: x.tolist(), separators=(",", ":"))
    return torch.frombuffer(bytearray(text.encode().ljust(_ROOM)), dtype=torch.uint8)


def _devices() -> tuple[Mesh | None, int]:
    """Return the mesh of all devices, None if the caller is no device of several, and its number."""
    scope = here()
    if scope is not None:
        return Mesh((("device", scope.mesh.root_size),), scope.mesh.runtime, "cpu"), scope.device
    if dist.is_initialized():
        return Mesh((("device", process_count()),), "process", "cpu"), process_index()
    return None, 0
