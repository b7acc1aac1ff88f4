"""treescope's record of how an array is sharded, for a `Sharded`.

treescope draws the arrays of any library through an adapter that returns dims, values, and sharding. The sharding is a
neutral record: the shape of a shard, and each device's slices. fshard does not need treescope; it is imported on use.

The record requires equal shapes of shards, so a flat layout has none, and an unreduced array looks replicated.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from fshard.mesh.layout.sharded import Sharded, typeof
from fshard.mesh.reshard.device_put import unshard

_MOST = 1024  # devices: the record lists every one


def treescope_sharding(x: Sharded) -> Any:
    """Return treescope's record of how a tensor is sharded (a `ShardingInfo`), None where it cannot express it.

    Nothing is sent. Needs treescope; `use_treescope` lets it draw the record.

    >>> import torch, fshard as fs
    >>> from fshard import P
    >>> from fshard.explore.treescope_records import treescope_sharding
    >>> x = fs.device_put(torch.zeros(4, 6), fs.Layout(fs.make_mesh({"data": 2}), P("data")))
    >>> treescope_sharding(x).device_index_to_shard_slices
    {0: (slice(0, 2, None), slice(None, None, None)), 1: (slice(2, 4, None), slice(None, None, None))}
    """
    if x.spec.is_flat or x.spec.at or 0 in x.shape or x.mesh.size > _MOST:
        return None
    shard = x.layout.local_shape(x.shape)
    return _of("ndarray_adapters").ShardingInfo(
        shard_shape=shard,
        device_index_to_shard_slices={device: _slices(x, device) for device in range(x.mesh.size)},
        device_type=x.mesh.device_type.upper(),
        fully_replicated=shard == x.shape,
    )


def use_treescope() -> None:
    """Teach treescope to draw `Sharded`: values and sharding where this process holds all shards, else the type.

    Needs treescope.
    """
    parts, registries = _of("rendering_parts"), _of("type_registries")

    def in_one_line(node: Sharded, path: str | None, subtree_renderer: Any) -> Any:
        return parts.build_one_line_tree_node(line=repr(node), path=path)

    registries.NDARRAY_ADAPTER_REGISTRY[Sharded] = ShardedAdapter()
    registries.TREESCOPE_HANDLER_REGISTRY[Sharded] = in_one_line


class ShardedAdapter:
    """The `NDArrayAdapter` of treescope for a `Sharded`."""

    def get_axis_info_for_array_data(self, array: Sharded) -> tuple[Any, ...]:
        info = _of("ndarray_adapters").PositionalAxisInfo
        return tuple(info(dim, length) for dim, length in enumerate(array.shape))

    def get_array_data_with_truncation(self, array: Sharded, mask: Any, edge_items_per_axis: tuple[Any, ...]) -> Any:
        return _of_tensors().get_array_data_with_truncation(unshard(array).detach().cpu(), mask, edge_items_per_axis)

    def get_array_summary(self, array: Sharded, fast: bool) -> str:
        return str(typeof(array))

    def get_numpy_dtype(self, array: Sharded) -> Any:
        return _of_tensors().get_numpy_dtype(array.shards[0])

    def get_sharding_info_for_array_data(self, array: Sharded) -> Any:
        return treescope_sharding(array)

    def should_autovisualize(self, array: Sharded) -> bool:
        """Only where all values are here: drawing must not send anything, as other processes may draw nothing."""
        return len(array.shards) == array.mesh.size and array.mesh.device_type != "meta"


def _of_tensors() -> Any:
    return _of("external.torch_support").TorchTensorAdapter()


def _of(module: str) -> Any:
    """Import a module of treescope, which may not be installed and has no types."""
    return import_module(f"treescope.{module}")


def _slices(x: Sharded, device: int) -> tuple[slice, ...]:
    """Return the slices of a device's shard; an unsharded dim is the full slice."""
    ranges = x.layout.ranges(x.shape, device)
    return tuple(
        slice(None) if (start, stop) == (0, length) else slice(start, stop)
        for (start, stop), length in zip(ranges, x.shape, strict=True)
    )
