"""`PlannedModule`: a module run by a plan. In a step its parameters are arrays, of which each device has its shards.

    inputs      the batch sharded over the mode's axes of tokens, dim 1 over the axis of the sequence
    attention   over a sharded sequence: `fs.tensor.attention` on the shards
    sums        a partial sum is reduced at once, so the layers between two pairs run as on one device; with
                sequence_mode="megatron" it is reduced and scattered over tokens, and gathered before the next pair

Outside of a step, where no axis is known, the module runs on full parameters.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from fshard.array.communicate import state
from fshard.array.dispatch import DIRECT, constrain
from fshard.errors import LayoutError
from fshard.mesh.layout import Layout, Mesh, P, flatten, unflatten
from fshard.mesh.layout.sharded import Sharded
from fshard.tensor.joined import Joined
from fshard.tensor.layer_plans import LayerPlans
from fshard.tensor.sequence import attention, zigzag
from fshard.transforms.module.functionalize import module_function


class _Shard(NamedTuple):
    """The global shape of a parameter or a part of one, its layout, and the shape of a device's shard."""

    shape: tuple[int, ...]
    layout: Layout
    local: tuple[int, ...]


class PlannedModule:
    """The functions of `fs.functionalize(module, plan=plan)`."""

    def __init__(self, plan: LayerPlans, module: nn.Module, *, in_place: bool = False, **options: Any) -> None:
        self.plan = plan
        self.takes_positions = "position_ids" in inspect.signature(module.forward).parameters
        hooks = _token_hooks(plan, module) if plan.how == "megatron" else []
        adapt = partial(_forward_by, plan)
        self._apply, params, self.buffers = module_function(module, adapt=adapt, in_place=in_place, **options)
        for hook in hooks if not in_place else ():  # the function's copies of the module have them
            hook.remove()
        self._known: dict[Mesh, dict[str, tuple[int, list[_Shard]]]] = {}
        self.params = plan.split(params)

    def apply(self, params: Mapping[str, Any], buffers: Mapping[str, Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run the module: on arrays in a step, on full tensors elsewhere."""
        mesh = self.plan.own_mesh()
        if mesh is None:
            return self._apply(self.plan.joined(params), buffers, *args, **kwargs)
        arrays = self._arrays(params, mesh)
        if self.plan.how == "zigzag":
            kwargs = self._with_positions(args, kwargs)
        args, kwargs = sharded_inputs(self.plan, (args, dict(kwargs)), mesh)
        with running(self.plan):
            output, after = self._apply(arrays, buffers, *args, **kwargs)
        if written := [name for name, x in after.items() if x is not buffers[name]]:
            raise LayoutError(
                f"a planned module must not write buffers, as BatchNorm does in training; got {', '.join(written)}. Call "
                "eval() on these layers, or leave the module unplanned."
            )
        return output, after

    def _arrays(self, params: Mapping[str, Any], mesh: Mesh) -> dict[str, Any]:
        """Return the parameters as arrays, of which a device has its shards; raise with all of other shapes."""
        known = self._known.get(mesh)
        if known is None:
            self.plan.check_sizes(mesh)
            known = self._known[mesh] = {name: self._shards(name, mesh) for name in params}
        wrong, made = list[str](), dict[str, Any]()
        for name, x in params.items():
            dim, shards = known[name]
            arrays = list[Sharded]()
            for own, shard in zip(x if isinstance(x, tuple) else (x,), shards, strict=True):
                wrong += [] if tuple(own.shape) == shard.local else [f"{name} {shard.local}, got {tuple(own.shape)}"]
                arrays.append(Sharded(shard.shape, shard.layout, (own,)))
                cast("Any", arrays[-1]).step = getattr(own, "step", None)  # that of lazy parameters
            made[name] = arrays[0] if len(arrays) == 1 else Joined(arrays, dim)
        if wrong:
            raise LayoutError(
                f"parameters must have the shapes of a device's shards: {'; '.join(wrong)}. Shard them by "
                f"fs.fsdp(..., within=plan.rules), and give the step local={self.plan.axes}."
            )
        return made

    def _shards(self, name: str, mesh: Mesh) -> tuple[int, list[_Shard]]:
        """Return the dim along which a parameter has parts, and shapes and layout of each."""
        parts, dim = self.plan.parts_of(name)
        shape, layout = self.plan.shapes[name], Layout(mesh, self.plan.spec(name))
        shapes = [(*shape[:dim], length, *shape[dim + 1 :]) for length in parts] if len(parts) > 1 else [shape]
        return dim, [_Shard(each, layout, layout.local_shape(each, 0)) for each in shapes]

    def _with_positions(self, args: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Give the positions of tokens that are in zigzag order."""
        if not self.takes_positions:
            raise LayoutError(
                'sequence_mode="zigzag" reorders tokens, so the module must take position_ids; it does not.'
            )
        if kwargs.get("position_ids") is not None:
            return {**kwargs}
        like = next(x for x in flatten((args, dict(kwargs)))[0] if isinstance(x, Tensor) and x.ndim > 1)
        positions = torch.arange(like.shape[1], device=like.device).expand(like.shape[0], -1)
        return {**kwargs, "position_ids": positions}


def _token_hooks(plan: LayerPlans, module: nn.Module) -> list[Any]:
    """Add hooks that gather all tokens for layers sharded by columns, and scatter them after those by rows."""

    def gathered(part: nn.Module, args: Any) -> Any:
        x = args[0]
        return (constrain(x, P(x.spec.dims(x.ndim)[0])), *args[1:]) if isinstance(x, Sharded) else None

    def scattered(part: nn.Module, args: Any, y: Any) -> Any:
        return constrain(y, P(y.spec.dims(y.ndim)[0], plan.sequence)) if isinstance(y, Sharded) else None

    names = {id(x): name for name, x in module.named_parameters()}
    hooks = list[Any]()
    for part in module.modules():
        layer = plan.layers.get(names.get(id(getattr(part, "weight", None)), ""))
        if layer is not None:
            is_table = isinstance(part, nn.Embedding)
            hooks += [part.register_forward_pre_hook(gathered)] if is_table or layer.style != "row" else []
            hooks += [part.register_forward_hook(scattered)] if is_table or layer.style == "row" else []
    return hooks


@contextmanager
def running(plan: LayerPlans) -> Generator[None]:
    """Run operations of a plan: plain tensors are equal on all devices, and partial sums are reduced at once."""
    before = state.constants, state.reduces, state.plan
    state.constants, state.reduces, state.plan = True, plan.how != "megatron", plan
    try:
        yield
    finally:
        state.constants, state.reduces, state.plan = before


def _forward_by(plan: LayerPlans, module: nn.Module) -> Callable[..., Any]:
    """Return the forward of a module inside that runs by a plan, also when a backward runs it again, as checkpoints do."""
    own, reference = vars(module).get("forward"), weakref.ref(module)

    def forward(*args: Any, **kwargs: Any) -> Any:
        part: Any = reference()
        with nullcontext() if state.plan is plan else running(plan):
            return type(part).forward(part, *args, **kwargs) if own is None else own(*args, **kwargs)

    return forward


def _attention(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> Any:  # fmt: skip
    """Attend over a sharded sequence on the devices' shards; else by the operation's own rule."""
    plan, arrays = state.plan, (query, key, value)
    if (
        plan is None
        or plan.sequence is None
        or plan.how == "megatron"
        or not all(isinstance(x, Sharded) and x.ndim == 4 for x in arrays)
    ):
        return NotImplemented
    if attn_mask is not None or dropout_p:
        if plan.how == "gather":
            return NotImplemented
        found = "a mask" if attn_mask is not None else f"dropout_p={dropout_p}"
        raise LayoutError(
            f'sequence_mode="{plan.how}" takes full or causal attention without dropout; got {found}. Leave '
            'attention_mask out, or use sequence_mode="gather".'
        )
    heads = query.spec.dims(4)[1] if key.shape[1] == query.shape[1] else key.spec.dims(4)[1]
    batch = tuple(axis for axis in query.spec.dims(4)[0] if axis != plan.sequence)
    spec = P(batch, tuple(axis for axis in heads if axis != plan.sequence), plan.sequence)
    q, k, v = (constrain(x, spec).shards[0] for x in arrays)
    out = attention(q, k, v, plan.sequence, plan.how, causal=is_causal, scale=scale)
    return Sharded((*query.shape[:-1], value.shape[-1]), query.layout.with_spec(spec), (out,))


DIRECT["scaled_dot_product_attention"] = _attention


def sharded_inputs(plan: LayerPlans, given: Any, mesh: Mesh) -> Any:
    """Return the inputs of a module as arrays: dim 0 over the axes of the mode's tokens, dim 1 over the sequence's."""
    leaves, structure = flatten(given)
    batch = tuple(axis for axis in plan.mode.tokens if axis in mesh.axis_names)
    wrong: list[str] = []

    def put(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        tokens = plan.sequence if x.ndim > 1 else None
        spec = P(batch if x.ndim else (), tokens)
        layout = Layout(mesh, spec)
        n = mesh.shape[plan.sequence] if plan.sequence else 1
        factor = 2 * n if plan.how == "zigzag" else n
        if tokens and x.shape[1] % factor:
            wrong.append(f"{tuple(x.shape)} has {x.shape[1]} tokens, which must be a multiple of {factor}")
            return x
        layout.check(tuple(x.shape), "an input")
        if tokens and plan.how == "zigzag":
            x = zigzag(x, n)
        return constrain(Sharded(tuple(x.shape), Layout(mesh), (x,)), spec)

    arrays = [put(x) for x in leaves]
    if wrong:
        raise LayoutError(f"inputs of a plan over {plan.sequence!r}: {'; '.join(wrong)}.")
    return unflatten(structure, arrays)
