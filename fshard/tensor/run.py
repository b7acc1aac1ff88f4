"""`PlannedModule`: a module run by a plan. In a step its parameters are arrays of shards.

    inputs      the batch is sharded over the mode's axes of tokens, dim 1 over the axis of the
                sequence
    attention   over a sharded sequence: `fs.tensor.attention` on the shards
    sums        a partial sum is reduced at once, so the layers between two pairs run as on one
                device; with sequence_mode="megatron" it is reduced and scattered over tokens, and
                gathered before the next pair

Outside of a step, where no axis is known, the module runs on full parameters.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import cache, partial
from typing import Any, NamedTuple

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


class ParameterArrays(NamedTuple):
    """The arrays of one parameter on one device: one, or one for each part of a fused weight.

    Args:
        dim: along which it has parts.
        layout: of each array.
        shapes: of the arrays.
        local_shapes: of the device's shards.
    """

    dim: int
    layout: Layout
    shapes: list[Shape]
    local_shapes: list[Shape]


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
        if not in_place:
            for hook in hooks:  # the function's copies of the module have them
                hook.remove()
        self._parameter_arrays: dict[tuple[Mesh, int], dict[str, ParameterArrays]] = {}
        self.params = plan.split(params)

    def apply(
        self, params: Mapping[str, Any], buffers: Mapping[str, Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        """Run the module: on arrays in a step, on full tensors elsewhere."""
        mesh = self.plan.mesh_of_arrays()
        if mesh is None:
            return self._apply(self.plan.joined(params), buffers, *args, **kwargs)
        arrays = self._arrays(params, mesh)
        args, kwargs = sharded_inputs(self.plan, (args, dict(kwargs)), mesh)
        with running(self.plan):
            output, new_buffers = self._apply(arrays, buffers, *args, **kwargs)

        # Buffers are full tensors outside of the module. BatchNorm in training returns new ones,
        # with the statistics of all tokens.
        for name, x in new_buffers.items():
            if x is not buffers[name]:
                new_buffers[name] = self.plan.full(x).detach()
        return output, new_buffers

    def _arrays(self, params: Mapping[str, Any], mesh: Mesh) -> dict[str, Any]:
        """Return the parameters as arrays, of which a device has its shards."""
        (device,) = local_devices(mesh)
        arrays_of_params = self._parameter_arrays.get((mesh, device))
        if arrays_of_params is None:
            arrays_of_params = self._plan_arrays(params, mesh, device)
            self._parameter_arrays[mesh, device] = arrays_of_params

        arrays: dict[str, Any] = {}
        step = None
        for name, x in params.items():
            planned = arrays_of_params.get(name)
            if planned is None:  # of an expert, which the module uses as it is stored
                arrays[name] = x
                continue
            shards = x if isinstance(x, tuple) else (x,)
            self._validate_shards(name, shards, planned.local_shapes)
            parts: list[Sharded] = []
            for shape, shard in zip(planned.shapes, shards, strict=True):
                shard.is_in_array = True  # see `LazyParam`
                parts.append(Sharded(shape, planned.layout, (shard,)))

            array: Any = parts[0] if len(parts) == 1 else Joined(parts, planned.dim)
            if step is None:
                step = getattr(shards[0], "step", None)
                if step is not None:
                    array.step = step  # where `functionalize` looks for the step of lazy parameters
            arrays[name] = array
        return arrays

    def _validate_shards(
        self, name: str, shards: tuple[Any, ...], local_shapes: list[Shape]
    ) -> None:
        """Raise if the shards of a parameter have other shapes than the plan gives a device."""
        with _without_lazy_params():
            is_sharded_so = [tuple(shard.shape) for shard in shards] == local_shapes
        if not is_sharded_so:
            shapes = " and ".join([str(tuple(shard.shape)) for shard in shards])
            raise LayoutError(
                f"parameters must have the shapes of a device's shards; {name} has {shapes}. Shard "
                "them by fs.fsdp(..., within=plan.rules), and give the step "
                f"local={self.plan.axes}."
            )

    def _plan_arrays(
        self, params: Mapping[str, Any], mesh: Mesh, device: int
    ) -> dict[str, ParameterArrays]:
        """Return the arrays of all parameters that the plan shards or replicates."""
        self.plan.check_sizes(mesh)
        planned: dict[str, ParameterArrays] = {}
        for name in params:
            if name in self.plan.experts:
                continue
            lengths, dim = self.plan.parts_of(name)
            shape = self.plan.shapes[name]
            shapes = [shape]
            if len(lengths) > 1:
                shapes = [(*shape[:dim], length, *shape[dim + 1 :]) for length in lengths]
            layout = _layout(mesh, self.plan.spec(name))
            local_shapes = [layout.local_shape(shape, device) for shape in shapes]
            planned[name] = ParameterArrays(dim, layout, shapes, local_shapes)
        return planned


@cache
def _layout(mesh: Mesh, spec: P) -> Layout:
    """Return one layout for all parameters of a spec.

    So operations of equal blocks are planned once.
    """
    return Layout(mesh, spec)


def _token_hooks(plan: LayerPlans, module: nn.Module) -> list[Any]:
    """Add the hooks of sequence_mode="megatron", and return their handles.

    They gather all tokens for layers sharded by columns, and scatter them after those by rows. A
    table is both: it takes all tokens, and what it returns is a partial sum.
    """

    def gather(layer: nn.Module, args: Any) -> Any:
        x = args[0]
        if not isinstance(x, Sharded):
            return None
        batch_axes = x.spec.dims(x.ndim)[0]
        return constrain(x, P(batch_axes)), *args[1:]

    def scatter(layer: nn.Module, args: Any, y: Any) -> Any:
        if not isinstance(y, Sharded):
            return None
        batch_axes = y.spec.dims(y.ndim)[0]
        # Where heads do not divide the axis, attention may have sharded the samples along it.
        other_axes = tuple([axis for axis in batch_axes if axis != plan.sequence])
        return constrain(y, P(other_axes or None, plan.sequence))

    names = {id(x): name for name, x in module.named_parameters()}
    hooks: list[Any] = []
    for submodule in module.modules():
        weight = getattr(submodule, "weight", None)
        layer = plan.layers.get(names.get(id(weight), ""))
        if layer is None:
            continue
        is_table = isinstance(submodule, nn.Embedding)
        if is_table or layer.style != "row":
            hooks.append(submodule.register_forward_pre_hook(gather))
        if is_table or layer.style == "row":
            hooks.append(submodule.register_forward_hook(scatter))
    return hooks


def validate_no_backward_hooks(path: str, module: nn.Module) -> None:
    """Raise if a module, or all modules, have backward hooks.

    torch calls them for tensors, not for arrays.
    """
    typed_module: Any = module
    hooks = typed_module._backward_hooks or typed_module._backward_pre_hooks
    hooks_of_all = _modules._global_backward_hooks or _modules._global_backward_pre_hooks
    if hooks or hooks_of_all:
        raise ModuleError(
            f"{path or 'the model'} ({type(module).__name__}) must have no backward hooks, since "
            "its layers are sharded by a plan and the hooks would not be called; got a hook of a "
            "backward. Register it on the model that boost returned; or register a forward hook "
            "that calls output.register_hook(f): f gets the gradient."
        )


def _forward_by(plan: LayerPlans, path: str, module: nn.Module) -> Callable[..., Any]:
    """Return the forward of an inner module that runs by a plan.

    A backward that runs the module again, as checkpoints do, calls it too.
    """
    override = vars(module).get("forward")
    reference = weakref.ref(module)  # the module will have the function, which would be a cycle

    def forward(*args: Any, **kwargs: Any) -> Any:
        target: Any = reference()
        validate_no_backward_hooks(path, target)
        module_forward = override
        if module_forward is None:
            module_forward = partial(type(target).forward, target)

        is_running = array_mode().plan is plan  # not where a backward runs it again
        with nullcontext() if is_running else running(plan):
            is_unsharded = path != "" and path in plan.unsharded
            mesh = plan.mesh_of_arrays() if is_unsharded else None
            if mesh is None:
                return module_forward(*args, **kwargs)
            return run_unsharded(mesh, target, module_forward, args, kwargs)

    return forward


def _attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Attend over a sharded sequence on the devices' shards; else by the operation's own rule.

    NotImplemented calls for that rule.
    """
    plan = array_mode().plan
    if not isinstance(plan, LayerPlans) or plan.sequence is None:
        return NotImplemented
    if plan.sequence_mode == "megatron":  # attention gets all tokens
        return NotImplemented
    if not all(isinstance(x, Sharded) and x.ndim == 4 for x in (query, key, value)):
        return NotImplemented
    if attn_mask is not None or dropout_p:
        if plan.sequence_mode == "gather":
            return NotImplemented
        unsupported = "a mask" if attn_mask is not None else f"dropout_p={dropout_p}"
        raise LayoutError(
            f'sequence_mode="{plan.sequence_mode}" takes full or causal attention without dropout; '
            f'got {unsupported}. Leave attention_mask out, or use sequence_mode="gather".'
        )

    # Fewer kv heads than heads may be sharded over fewer devices; then q is like them.
    has_equal_heads = key.shape[1] == query.shape[1]
    head_axes = query.spec.dims(4)[1] if has_equal_heads else key.spec.dims(4)[1]
    batch_axes = query.spec.dims(4)[0]
    spec = P(
        tuple([axis for axis in batch_axes if axis != plan.sequence]),
        tuple([axis for axis in head_axes if axis != plan.sequence]),
        plan.sequence,
    )
    q, k, v = [constrain(x, spec).shards[0] for x in (query, key, value)]
    out = attention(q, k, v, plan.sequence, plan.sequence_mode, causal=is_causal, scale=scale)
    shape = (*query.shape[:-1], value.shape[-1])
    return Sharded(shape, query.layout.with_spec(spec), (out,))


DIRECT["scaled_dot_product_attention"] = _attention


def sharded_inputs(plan: LayerPlans, inputs: Any, mesh: Mesh) -> Any:
    """Return the inputs of a module as arrays.

    Dim 0 is sharded over the axes of the mode's tokens, dim 1 over the sequence's. The result of an
    earlier stage, which has arrays, is unchanged.
    """
    paths, leaves, structure = flatten_with_paths(inputs)
    if any(isinstance(x, Sharded) for x in leaves):
        return inputs
    with collected("inputs of a planned module") as attempt:
        for number, (path, x) in enumerate(zip(paths, leaves, strict=True)):
            if not isinstance(x, Tensor):
                continue
            batch_axes = plan.mode.tokens if x.ndim > 0 else ()
            sequence_axis = plan.sequence if x.ndim > 1 else None
            spec = P(batch_axes, sequence_axis)
            if "" in plan.unsharded and not spec.axes and not x.is_floating_point():
                continue  # a plain tensor is equal on all devices
            if mesh.is_varying:
                x = enter_loss(x, mesh)
            with attempt(path):
                leaves[number] = constrain(Sharded(tuple(x.shape), Layout(mesh), (x,)), spec)
    return unflatten(structure, leaves)
