"""`PlannedModule`: a module run by a plan. In a step its parameters are arrays, of which each device has its shards.

    inputs      the batch sharded over the mode's axes of tokens, dim 1 over the axis of the sequence
    attention   over a sharded sequence: `fs.tensor.attention` on the shards
    sums        a partial sum is reduced at once, so the layers between two pairs run as on one device; with
                sequence_mode="megatron" it is reduced and scattered over tokens, and gathered before the next pair

Outside of a step, where no axis is known, the module runs on full parameters.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from fshard.array.dispatch import DIRECT, constrain
from fshard.array.mode import array_mode, running
from fshard.errors import LayoutError, ModuleError
from fshard.mesh.layout import Layout, Mesh, P, collected, flatten_with_paths, unflatten
from fshard.mesh.layout.sharded import Sharded
from fshard.mesh.reshard.varying import enter_loss
from fshard.mesh.spmd.run import local_devices
from fshard.tensor.joined import Joined
from fshard.tensor.layer_plans import LayerPlans
from fshard.tensor.sequence import attention
from fshard.tensor.unsharded import run_unsharded
from fshard.transforms.module.functionalize import module_function

Shape = tuple[int, ...]
_modules: Any = torch.nn.modules.module
_without_lazy_params: Any = torch._C.DisableTorchFunctionSubclass  # pyright: ignore[reportPrivateUsage]
"""A context in which the attributes of lazy parameters cost no call of Python."""


class PlannedModule:
    """The functions of `fs.functionalize(module, plan=plan)`."""

    def __init__(
        self, plan: LayerPlans, module: nn.Module, *, in_place: bool = False, **options: Any
    ) -> None:
        self.plan: Any = plan
        hooks = _token_hooks(plan, module) if plan.sequence_mode == "megatron" else []
        adapt = partial(_forward_by, plan)
        self._apply, params, self.buffers = module_function(
            module, adapt=adapt, in_place=in_place, **options
        )
        for hook in hooks if not in_place else ():  # the function's copies of the module have them
            hook.remove()
        self._slots: dict[
            tuple[Mesh, int], dict[str, tuple[int, list[tuple[Shape, Layout, Shape]]]]
        ] = {}
        self.params = plan.split(params)

    def apply(
        self, params: Mapping[str, Any], buffers: Mapping[str, Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        """Run the module: on arrays in a step, on full tensors elsewhere."""
        mesh = self.plan.own_mesh()
        if mesh is None:
            return self._apply(self.plan.joined(params), buffers, *args, **kwargs)
        arrays = self._arrays(params, mesh)
        args, kwargs = sharded_inputs(self.plan, (args, dict(kwargs)), mesh)
        with running(self.plan):
            output, after = self._apply(arrays, buffers, *args, **kwargs)
        for (
            name,
            x,
        ) in after.items():  # as BatchNorm in training, which has the statistics of all tokens
            if x is not buffers[name]:
                after[name] = self.plan.full(x).detach()
        return output, after

    def _arrays(self, params: Mapping[str, Any], mesh: Mesh) -> dict[str, Any]:
        """Return the parameters as arrays, of which a device has its shards; raise for one of another shape."""
        (device,) = local_devices(mesh)
        slots = self._slots.get((mesh, device))
        if slots is None:
            self.plan.check_sizes(mesh)
            names = [name for name in params if name not in self.plan.experts]
            slots = self._slots[mesh, device] = {
                name: self._shards(name, mesh, device) for name in names
            }
        arrays, step = dict[str, Any](), None
        for name, x in params.items():
            if name not in slots:
                arrays[name] = x
                continue
            dim, parts = slots[name]
            shards = x if isinstance(x, tuple) else (x,)
            with _without_lazy_params():
                fits = [tuple(shard.shape) for shard in shards] == [local for _, _, local in parts]
            if not fits:
                shapes = " and ".join(str(tuple(shard.shape)) for shard in shards)
                raise LayoutError(
                    f"parameters must have the shapes of a device's shards; {name} has {shapes}. Shard them by "
                    f"fs.fsdp(..., within=plan.rules), and give the step local={self.plan.axes}."
                )
            for shard in shards:
                shard.is_in_array = True
            of_parts = [
                Sharded(shape, layout, (shard,))
                for shard, (shape, layout, _) in zip(shards, parts, strict=True)
            ]
            array: Any = of_parts[0] if len(of_parts) == 1 else Joined(of_parts, dim)
            if step is None and (step := getattr(shards[0], "step", None)) is not None:
                array.step = step  # where `functionalize` looks for the step of lazy parameters
            arrays[name] = array
        return arrays

    def _shards(
        self, name: str, mesh: Mesh, device: int
    ) -> tuple[int, list[tuple[Shape, Layout, Shape]]]:
        """Return the dim along which a parameter has parts; of each part its shape, layout, and the device's shape."""
        parts, dim = self.plan.parts_of(name)
        shape, layout = self.plan.shapes[name], _layout(mesh, self.plan.spec(name))
        shapes = (
            [(*shape[:dim], length, *shape[dim + 1 :]) for length in parts]
            if len(parts) > 1
            else [shape]
        )
        return dim, [(each, layout, layout.local_shape(each, device)) for each in shapes]


@cache
def _layout(mesh: Mesh, spec: P) -> Layout:
    """Return one layout for all parameters of a spec, so that operations of equal blocks are planned once."""
    return Layout(mesh, spec)


def _token_hooks(plan: LayerPlans, module: nn.Module) -> list[Any]:
    """Add hooks that gather all tokens for layers sharded by columns, and scatter them after those by rows."""

    def gathered(layer: nn.Module, args: Any) -> Any:
        x = args[0]
        return (
            (constrain(x, P(x.spec.dims(x.ndim)[0])), *args[1:]) if isinstance(x, Sharded) else None
        )

    def scattered(layer: nn.Module, args: Any, y: Any) -> Any:
        return (
            constrain(y, P(y.spec.dims(y.ndim)[0], plan.sequence))
            if isinstance(y, Sharded)
            else None
        )

    names = {id(x): name for name, x in module.named_parameters()}
    hooks = list[Any]()
    for submodule in module.modules():
        layer = plan.layers.get(names.get(id(getattr(submodule, "weight", None)), ""))
        if layer is not None:
            is_table = isinstance(submodule, nn.Embedding)
            hooks += (
                [submodule.register_forward_pre_hook(gathered)]
                if is_table or layer.style != "row"
                else []
            )
            hooks += (
                [submodule.register_forward_hook(scattered)]
                if is_table or layer.style == "row"
                else []
            )
    return hooks


def validate_no_backward_hooks(path: str, module: nn.Module) -> None:
    """Raise if a module, or all modules, have backward hooks: torch calls them for tensors, not for arrays."""
    of_module: Any = module
    hooks = of_module._backward_hooks or of_module._backward_pre_hooks
    hooks_of_all = _modules._global_backward_hooks or _modules._global_backward_pre_hooks
    if hooks or hooks_of_all:
        raise ModuleError(
            f"{path or 'the model'} ({type(module).__name__}) must have no backward hooks, since its layers are "
            "sharded by a plan and the hooks would not be called; got a hook of a backward. Register it on the model "
            "that boost returned; or register a forward hook that calls output.register_hook(f): f gets the gradient."
        )


def _forward_by(plan: LayerPlans, path: str, module: nn.Module) -> Callable[..., Any]:
    """Return the forward of a module inside that runs by a plan, also when a backward runs it again, as checkpoints do."""
    override, reference = vars(module).get("forward"), weakref.ref(module)

    def forward(*args: Any, **kwargs: Any) -> Any:
        target: Any = reference()
        validate_no_backward_hooks(path, target)
        call = partial(type(target).forward, target) if override is None else override
        with nullcontext() if array_mode().plan is plan else running(plan):
            mesh = plan.own_mesh() if path and path in plan.unsharded else None
            return (
                call(*args, **kwargs)
                if mesh is None
                else run_unsharded(mesh, target, call, args, kwargs)
            )

    return forward


def _attention(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> Any:  # fmt: skip
    """Attend over a sharded sequence on the devices' shards; else by the operation's own rule."""
    plan, arrays = array_mode().plan, (query, key, value)
    if (
        not isinstance(plan, LayerPlans)
        or plan.sequence is None
        or plan.sequence_mode == "megatron"
        or not all(isinstance(x, Sharded) and x.ndim == 4 for x in arrays)
    ):
        return NotImplemented
    if attn_mask is not None or dropout_p:
        if plan.sequence_mode == "gather":
            return NotImplemented
        unsupported = "a mask" if attn_mask is not None else f"dropout_p={dropout_p}"
        raise LayoutError(
            f'sequence_mode="{plan.sequence_mode}" takes full or causal attention without dropout; got {unsupported}. Leave '
            'attention_mask out, or use sequence_mode="gather".'
        )
    heads = query.spec.dims(4)[1] if key.shape[1] == query.shape[1] else key.spec.dims(4)[1]
    batch = tuple(axis for axis in query.spec.dims(4)[0] if axis != plan.sequence)
    spec = P(batch, tuple(axis for axis in heads if axis != plan.sequence), plan.sequence)
    q, k, v = (constrain(x, spec).shards[0] for x in arrays)
    out = attention(q, k, v, plan.sequence, plan.sequence_mode, causal=is_causal, scale=scale)
    return Sharded((*query.shape[:-1], value.shape[-1]), query.layout.with_spec(spec), (out,))


DIRECT["scaled_dot_product_attention"] = _attention


def sharded_inputs(plan: LayerPlans, inputs: Any, mesh: Mesh) -> Any:
    """Return the inputs of a module as arrays: dim 0 over the axes of the mode's tokens, dim 1 over the sequence's.

    The result of an earlier stage, which has arrays, is unchanged.
    """
    paths, leaves, structure = flatten_with_paths(inputs)
    if any(isinstance(x, Sharded) for x in leaves):
        return inputs
    with collected("inputs of a planned module") as attempt:
        for number, (path, x) in enumerate(zip(paths, leaves, strict=True)):
            if isinstance(x, Tensor):
                spec = P(plan.mode.tokens if x.ndim else (), plan.sequence if x.ndim > 1 else None)
                if "" in plan.unsharded and not spec.axes and not x.is_floating_point():
                    continue  # a plain tensor is equal on all devices
                if mesh.is_varying:
                    x = enter_loss(x, mesh)
                with attempt(path):
                    leaves[number] = constrain(Sharded(tuple(x.shape), Layout(mesh), (x,)), spec)
    return unflatten(structure, leaves)
