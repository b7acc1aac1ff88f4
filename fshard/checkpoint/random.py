"""`RandomState`: the states of random generators, as one array with a row of bytes for each device."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

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
        self._given = generators
        if wrong := [type(one).__name__ for one in generators if not isinstance(one, _KINDS)]:
            raise TypeError(f"RandomState: generators must be of torch, numpy or Python; got {', '.join(wrong)}.")

    def _generators(self) -> dict[str, Any]:
        """Return the generators by kind and place."""
        hidden: Any = np.random.mtrand, random
        near = [torch.cuda.default_generators[torch.cuda.current_device()]] if torch.cuda.is_available() else []
        own = [torch.default_generator, hidden[0]._rand, hidden[1]._inst, *self._given, *near]
        return {f"{place}.{_kind(one)}": one for place, one in enumerate(own)}

    def state_dict(self) -> dict[str, Any]:
        """Return the number of bytes of each state, and the rows."""
        states = {name: _bytes_of(one) for name, one in self._generators().items()}
        rows: Any = torch.frombuffer(bytearray(b"".join(states.values())), dtype=torch.uint8)[None]
        if (mesh := _devices()[0]) is not None:
            rows = Sharded((mesh.size, rows.numel()), Layout(mesh, P("device")), (rows,))
        return {"sizes": [[name, len(state)] for name, state in states.items()], "rows": rows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set all generators; that of a GPU if both sides have one."""
        own, rows, device = self._generators(), state["rows"], _devices()[1]
        if isinstance(rows, Sharded):  # as it was returned
            rows, device = rows.shards[0], 0
        saved, wanted = ([name for name in names if not name.endswith("cuda")] for names in (dict(state["sizes"]), own))
        if saved != wanted:
            raise CheckpointError(f"RandomState must have the generators {', '.join(saved)}; got {', '.join(wanted)}.")
        columns = rows.split([size for _, size in state["sizes"]], 1)
        for (name, _), column in zip(state["sizes"], columns, strict=True):
            is_common = len(column) > 1 and bool((column == column[0]).all())
            data = column[device % len(column)].numpy().tobytes()
            if name in own and (device < len(column) or is_common):
                _set(own[name], data)
            elif name in own:
                _seed(own[name], folded(data.hex(), device, name) >> 1)


_KINDS = (torch.Generator, np.random.Generator, random.Random)


def _devices() -> tuple[Mesh | None, int]:
    """Return the mesh of all devices, None if the caller is no device of several, and its number."""
    scope = here()
    if scope is not None:
        return Mesh((("device", scope.mesh.root_size),), scope.mesh.runtime, "cpu"), scope.device
    if dist.is_initialized():
        return Mesh((("device", process_count()),), "process", "cpu"), process_index()
    return None, 0


def _kind(one: Any) -> str:
    return one.device.type if isinstance(one, torch.Generator) else type(getattr(one, "bit_generator", one)).__name__


def _bytes_of(one: Any) -> bytes:
    if isinstance(one, torch.Generator):
        return one.get_state().numpy().tobytes()
    state = one.getstate() if isinstance(one, random.Random) else _numpy(one)[0]()
    return json.dumps(state, default=lambda x: x.tolist(), separators=(",", ":")).encode().ljust(_ROOM)


def _numpy(one: Any) -> Any:
    """Return functions that get and set a state of numpy."""
    if isinstance(one, np.random.Generator):
        return lambda: one.bit_generator.state, lambda state: setattr(one.bit_generator, "state", state)
    return lambda: one.get_state(legacy=False), one.set_state


def _set(one: Any, data: bytes) -> None:
    if isinstance(one, torch.Generator):
        one.set_state(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    elif isinstance(one, random.Random):
        version, words, gauss = json.loads(data)
        one.setstate((version, tuple(words), gauss))
    else:
        _numpy(one)[1](json.loads(data, object_hook=_with_arrays))


def _with_arrays(state: dict[str, Any]) -> dict[str, Any]:
    return {name: np.array(x, np.uint64) if isinstance(x, list) else x for name, x in state.items()}


def _seed(one: Any, seed: int) -> None:
    if isinstance(one, torch.Generator):
        one.manual_seed(seed)
    elif isinstance(one, np.random.Generator):
        one.bit_generator.state = type(one.bit_generator)(seed).state
    else:
        one.seed(seed % (1 << 32))
