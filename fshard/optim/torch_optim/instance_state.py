"""The state of an optimizer class of one's own as arrays, which checkpoints store in any layout.

    state[w]    on the owner of w, elsewhere none    {"row": f32[4], "step": 3}
    as arrays   on all devices                       {"row": {"w": f32[4]{at:data=1}},
                                                      "step": {"w": 3}}

Only the device that steps a parameter knows the keys, shapes and numbers of its state. Devices
exchange these, no data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from fshard.errors import OptimizerError
from fshard.mesh.collectives.api import all_gather, pmax
from fshard.mesh.layout import Memory, Mesh
from fshard.mesh.layout.kinds import empty_in
from fshard.mesh.layout.sharded import Sharded
from fshard.mesh.plain_bytes import from_bytes, to_bytes
from fshard.mesh.spmd.run import run_on_devices
from fshard.optim.leaves import assembled_state, is_unsharded, shape_of_shard

ByKey = dict[Any, dict[str, Any]]
"""State by its key, and then by the name of the parameter."""


class InstanceState:
    """The state of an instance as a leaf of the state of training.

    `fs.save` and `fs.restore` take it, as other objects with a `state_dict`.

    Args:
        optimizer: the instance.
        params: its parameters by name, whose shards are the keys of its state; others may be added.

    `memory` is that of the state between steps.
    """

    memory: Memory = "device"

    def __init__(self, optimizer: torch.optim.Optimizer, params: Mapping[str, Sharded]) -> None:
        self.optimizer, self.params = optimizer, params

    def state_dict(self) -> ByKey:
        """Return arrays, and values that are equal on all devices; all devices must call it."""
        states: dict[str, dict[Any, Any]] = {}  # of the parameters that this device steps
        for name, param in self.params.items():
            if param.shards[0].numel():
                states[name] = self.optimizer.state.get(param.shards[0], {})
        by_key = ByKey()
        for (key, name), (shape, dtype, value) in self._agreed_entries(states).items():
            if shape is not None:
                value = self._array(name, shape, dtype, states.get(name, {}).get(key))
            elif dtype is not None:
                value = torch.tensor(value, dtype=dtype)
            by_key.setdefault(key, {})[name] = value
        return by_key

    def _agreed_entries(self, states: Mapping[str, Mapping[Any, Any]]) -> dict[Any, Any]:
        """Return the descriptions of all devices' state, by key and parameter.

        Raises if one cannot be saved, or if devices have different ones.
        """
        entries: dict[tuple[Any, str], Any] = {}
        for name, state in states.items():
            for key, x in state.items():
                entries[key, name] = _entry(self.params[name], x)
        for key in self.optimizer.state:
            if not isinstance(key, Tensor):
                entries[key, "no parameter"] = "must be that of a parameter"

        agreed = dict[tuple[Any, str], Any]()
        errors = dict[str, None]()  # each once, in order
        for row in _gathered(entries, next(iter(self.params.values())).mesh):
            for (key, name), entry in row.items():
                first = agreed.setdefault((key, name), entry)
                if isinstance(entry, str):
                    errors[f"{key!r} of {name} {entry}"] = None
                elif repr(first) != repr(entry):
                    values = f"{first[2]} and {entry[2]}"
                    errors[f"{key!r} of {name} must be equal on all devices; got {values}"] = None
        if errors:
            raise OptimizerError(
                f"{type(self.optimizer).__name__}: this state cannot be saved: "
                f"{'; '.join(errors)}. Keep all else in attributes, or leave out sharding = "
                '"flat": an owner then has full parameters.'
            )
        return agreed

    def state_memory(
        self, name: str, shape: Sequence[int], dtype: torch.dtype
    ) -> Sharded | Tensor | None:
        """Return memory for saved state of a parameter; None if there is no such parameter."""
        if name not in self.params:
            return None
        is_number = not shape and self.params[name].shape
        if is_number:
            return torch.empty((), dtype=dtype)
        return self._array(name, tuple(shape), dtype, None)

    def _array(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, shard: Tensor | None
    ) -> Sharded:
        """Return state with this device's tensor, or new memory.

        State of a split parameter has the shape of the parameter.
        """
        param = self.params[name]
        has_shape_of_shard = shape == param.shape or not is_unsharded(param)
        like = shape_of_shard(param) if has_shape_of_shard else torch.empty(shape, device="meta")
        stored = None if shard is None else shard.detach()
        array = assembled_state(param, [stored, like.to(dtype)])
        (x,) = array.shards
        if shard is None:
            x = empty_in(self.memory, x.shape, x.dtype, param.mesh.device_type)
        return Sharded(array.shape, array.layout.with_memory(self.memory), (x,))

    def load_state_dict(self, state_dict: ByKey) -> None:
        """Replace the state by what `state_dict` returns, whose memory it takes."""
        # As torch: the count of steps is on the host, unless a kernel reads it.
        moves_step = False
        for group in self.optimizer.param_groups:
            moves_step |= bool(group.get("fused") or group.get("capturable"))

        def local(key: Any, x: Any, device: torch.device) -> Any:
            if isinstance(x, Tensor) and (moves_step or key != "step"):
                return x.to(device)
            return x.shards[0] if isinstance(x, Sharded) else x

        for name, param in self.params.items():
            (shard,) = param.shards
            self.optimizer.state.pop(shard, None)
            state: dict[Any, Any] = {}
            for key, x in state_dict.items():
                if name in x:
                    state[key] = local(key, x[name], shard.device)
            if state and shard.numel():
                self.optimizer.state[shard] = state


def _entry(param: Sharded, x: Any) -> tuple[tuple[int, ...] | None, torch.dtype | None, Any] | str:
    """Describe state by its global shape, its dtype and, for a number, its value.

    Or return why it cannot be saved.
    """
    if x is None or isinstance(x, int | float | str):
        return None, None, x
    if not isinstance(x, Tensor):
        return f"must be a tensor, a number, a string or None; got a {type(x).__name__}"
    local = param.shards[0].shape
    if x.shape == local:
        return param.shape, x.dtype, None
    if x.ndim == 0:
        return None, x.dtype, x.item()
    if not is_unsharded(param):
        return (
            f"must have the shape of the shard, {tuple(local)}, or of a number; "
            f"got {tuple(x.shape)}"
        )
    return tuple(x.shape), x.dtype, None


def _gathered(x: Any, mesh: Mesh) -> list[Any]:
    """Return the object that each device of a mesh has."""
    data = torch.frombuffer(bytearray(to_bytes(x)), dtype=torch.uint8)

    def gather(_: int) -> Tensor:
        longest = int(pmax(torch.tensor([len(data)]), mesh.axis_names))
        return all_gather(pad(data, (0, longest - len(data))), mesh.axis_names)

    (rows,) = run_on_devices(mesh, gather)
    return [from_bytes(row.numpy().tobytes().rstrip(b"\0")) for row in rows.view(mesh.size, -1)]
