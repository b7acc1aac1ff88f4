"""`shard_module`: a module whose parameters are global arrays. `lift` is for torch.func.

The module's forward runs unchanged on arrays:

    nn.Linear(4, 6)                      weight f32[6, 4]           bias f32[6]
    shard_module(linear, rules, mesh)    weight f32[6@model, 4]     bias f32[6@model]
    linear(x), of x f32[8@data, 4]       f32[8@data, 6@model]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from einops._backends import TorchBackend  # einops has no public registration of backends
from torch import Tensor, nn
from torch.utils import _pytree as torch_trees

from fshard.array.communicate import with_spec
from fshard.array.mode import equal_tensors
from fshard.errors import LayoutError
from fshard.mesh.layout import Layout, Mesh, P
from fshard.mesh.layout.sharded import ArrayNode, Sharded, typeof
from fshard.mesh.reshard.device_put import device_put

Rules = Mapping[str, P] | Callable[[str, Tensor], P]
"""Patterns of parameters' names and their specs, or a function of name and tensor.

The first pattern that matches counts.
"""


def shard_module(module: nn.Module, rules: Rules, *, mesh: Mesh) -> nn.Module:
    """Replace a module's parameters and buffers by arrays on a mesh, in place, and return it.

    In its forward, plain tensors that it makes (positions, masks) count as replicated.

    Args:
        module: any module. Its forward gets arrays.
        rules: `{"*.up.weight": P("model"), "*.down.weight": P(None, "model")}`; a tensor that no
            pattern matches is replicated. Patterns are those of the shell. Or a function of a name
            and a tensor.
        mesh: the devices.

    >>> import torch, fshard as fs
    >>> from fshard import P
    >>> mesh = fs.make_mesh({"data": 2, "model": 2})
    >>> rules = {"weight": P("model"), "bias": P("model")}
    >>> model = fs.array.shard_module(torch.nn.Linear(4, 6), rules, mesh=mesh)
    >>> x = fs.array.ones(8, 4, layout=fs.Layout(mesh, P("data")))
    >>> fs.typeof(model.weight), fs.typeof(model(x))
    (f32[6@model, 4], f32[8@data, 6@model])
    """
    # By the id of a tensor; tied ones stay tied. The tensor is kept, or another could get its id.
    arrays: dict[int, tuple[Any, Tensor]] = {}
    used_patterns: set[str] = set()
    for prefix, submodule in module.named_modules():
        for tensors in (submodule._parameters, submodule._buffers):  # pyright: ignore[reportPrivateUsage]
            for name, x in tensors.items():
                if x is None or isinstance(x, Sharded):
                    continue
                if id(x) not in arrays:
                    path = f"{prefix}.{name}" if prefix else name
                    layout = Layout(mesh, _spec_of(path, x, rules, used_patterns))
                    arrays[id(x)] = _as_array(path, x, layout), x
                tensors[name] = arrays[id(x)][0]

    if not callable(rules):
        unused = [pattern for pattern in rules if pattern not in used_patterns]
        if unused:
            raise LayoutError(
                f"rules must match names of {type(module).__name__}; {unused} match none. See "
                "named_parameters()."
            )
    _take_tensors_for_equal(module)
    return module


def _spec_of(path: str, x: Tensor, rules: Rules, used_patterns: set[str]) -> P:
    """Return the spec of a tensor, and add the patterns that match its name to those in use."""
    if callable(rules):
        return rules(path, x)
    matching = [pattern for pattern in rules if fnmatchcase(path, pattern)]
    used_patterns.update(matching)
    return rules[matching[0]] if matching else P()


def _as_array(path: str, x: Tensor, layout: Layout) -> Any:
    """Return an array of a tensor's values, which is a parameter if the tensor is one."""
    array = device_put({path: x.detach()}, layout)[path]  # in a tree, so that errors have its name
    return array.requires_grad_() if x.requires_grad else array


def _take_tensors_for_equal(module: nn.Module) -> None:
    """Let plain tensors count as equal on all devices in the forward of a module."""
    forwards: list[AbstractContextManager[None]] = []  # those in progress: a module may call itself

    def enter(*_: Any) -> None:
        forwards.append(equal_tensors())
        forwards[-1].__enter__()

    def leave(*_: Any) -> None:
        forwards.pop().__exit__(None, None, None)

    module.register_forward_pre_hook(enter)
    module.register_forward_hook(leave, always_call=True)


def inspect(module: nn.Module) -> str:
    """Return a table of a module's parameters and buffers.

    Its columns are name, type with layout, and elements on one device.

    >>> import torch, fshard as fs
    >>> from fshard import P
    >>> mesh = fs.make_mesh({"model": 2})
    >>> rules = {"weight": P("model")}
    >>> print(fs.array.inspect(fs.array.shard_module(torch.nn.Linear(4, 6), rules, mesh=mesh)))
    weight  f32[6@model, 4]  12
    bias    f32[6]            6
    total                    18
    """
    rows: list[tuple[str, str, int]] = []
    total = 0
    for name, x in (*module.named_parameters(), *module.named_buffers()):
        count = x.shards[0].numel() if isinstance(x, Sharded) else x.numel()
        rows.append((name, str(typeof(x)), count))
        total += count
    rows.append(("total", "", total))

    name_width = max(len(name) for name, _, _ in rows)
    type_width = max(len(kind) for _, kind, _ in rows)
    count_width = len(str(total))
    lines: list[str] = []
    for name, kind, count in rows:
        lines.append(f"{name:{name_width}}  {kind:{type_width}}  {count:{count_width}}")
    return "\n".join(lines)


class ShardedBackend(TorchBackend):
    """Lets einops' patterns work on arrays.

    einops finds it among the subclasses of its backends.
    """

    framework_name = "fshard"

    def is_appropriate_type(self, tensor: object) -> bool:
        return isinstance(tensor, Sharded)


def clip_grad_norm_(parameters: Iterable[Any], max_norm: float, norm_type: float = 2.0) -> Any:
    """Scale the gradients of arrays in place so that their total norm is at most `max_norm`.

    Return the norm. torch.nn.utils.clip_grad_norm_ takes plain tensors only.
    """
    grads = [x.grad for x in parameters if x.grad is not None]
    if not grads:
        return torch.tensor(0.0)
    norms = [torch.linalg.vector_norm(grad, norm_type) for grad in grads]
    norm = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    for grad in grads:
        grad.mul_(torch.clamp(max_norm / (norm + 1e-6), max=1.0))
    return norm


# torch.func.


def lift(transform: Callable[..., Any]) -> Callable[..., Any]:
    """Let a transform of torch.func take functions of arrays, and trees of them.

    It works for `grad`, `vjp`, `jvp` and `linearize`; `vmap`, and so `hessian`, do not map over
    arrays. Tangents and cotangents may have any layout: they are resharded to that of their array.
    Unreduced arrays are reduced.

    >>> import torch, fshard as fs
    >>> x = fs.array.ones(4, layout=fs.Layout(fs.make_mesh({"data": 2}), fs.P("data")))
    >>> fs.unshard(fs.array.lift(torch.func.grad)(lambda x: fs.unshard((x**2).sum()))(x))
    tensor([2., 2., 2., 2.])
    """
    # torch sees the shards: an array becomes a node of torch's trees before the transform, and the
    # function gets the array again.
    #
    #     x -> node of shards -> transform -> node of its tensors -> array -> function
    lifted = _lifted(transform, to_nodes=False)
    aligned = _ALIGNED.get(transform)
    return lifted if aligned is None else aligned(lifted)


def _aligned_jvp(jvp: Callable[..., Any]) -> Callable[..., Any]:
    def transform(func: Any, primals: Any, tangents: Any, **options: Any) -> Any:
        return jvp(func, primals, _resharded_like(primals, tangents), **options)

    return transform


def _aligned_linearize(linearize: Callable[..., Any]) -> Callable[..., Any]:
    def transform(func: Any, *primals: Any) -> Any:
        output, push = linearize(func, *primals)
        return output, lambda *tangents: push(*_resharded_like(primals, tangents))

    return transform


def _aligned_vjp(vjp: Callable[..., Any]) -> Callable[..., Any]:
    def transform(func: Any, *primals: Any, **options: Any) -> Any:
        output, pull, *aux = vjp(func, *primals, **options)

        def aligned_pull(cotangents: Any, **more: Any) -> Any:
            return pull(_resharded_like(output, cotangents), **more)

        return output, aligned_pull, *aux

    return transform


_ALIGNED: dict[Any, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    torch.func.jvp: _aligned_jvp,
    torch.func.linearize: _aligned_linearize,
    torch.func.vjp: _aligned_vjp,
}
"""The transforms that take tangents or cotangents of arrays, and how to reshard these."""


def _resharded_like(arrays: Any, tangents: Any) -> Any:
    """Return a tree of tangents in the layouts of the arrays of another tree.

    If the trees differ, it returns the tangents: torch raises for them.
    """
    leaves, structure = torch_trees.tree_flatten(arrays)
    tangent_leaves, tangent_structure = torch_trees.tree_flatten(tangents)
    if tangent_structure != structure:
        return tangents
    resharded: list[Any] = []
    for leaf, tangent in zip(leaves, tangent_leaves, strict=True):
        resharded.append(_resharded_tangent(leaf, tangent))
    return torch_trees.tree_unflatten(resharded, structure)


def _resharded_tangent(leaf: Any, tangent: Any) -> Any:
    if not isinstance(leaf, Sharded) or not isinstance(tangent, Sharded):
        return tangent
    if tangent.shape != leaf.shape or tangent.mesh != leaf.mesh:
        return tangent
    spec = leaf.spec.replace(unreduced=None)
    resharded = with_spec(tangent, spec, "lift")
    # The layout of the leaf, with its unit: torch compares the layouts of both trees.
    return Sharded(resharded.shape, leaf.layout.with_spec(spec), resharded.shards)


def _lifted(tree: Any, *, to_nodes: bool) -> Any:
    """Replace the arrays of a tree by nodes, or nodes by arrays.

    In the arguments of functions in it, they are replaced back.
    """
    convert = partial(_converted, to_nodes=to_nodes)
    return torch_trees.tree_map(convert, tree, is_leaf=lambda x: isinstance(x, ArrayNode))


def _converted(x: Any, *, to_nodes: bool) -> Any:
    if callable(x):
        return lambda *args, **kwargs: _lifted(
            _called(x, (args, kwargs), to_nodes=to_nodes), to_nodes=to_nodes
        )
    if isinstance(x, ArrayNode):
        x.array.check()  # vmap gives shards of fewer dims
        return x.array
    if to_nodes and isinstance(x, Sharded):
        return ArrayNode(_reduced(x))
    return x


def _called(function: Callable[..., Any], inputs: Any, *, to_nodes: bool) -> Any:
    """Call a function of a tree with its arguments replaced back."""
    args, kwargs = _lifted(inputs, to_nodes=not to_nodes)
    return function(*args, **kwargs)


def _reduced(x: Sharded) -> Sharded:
    """Reduce an unreduced array: its cotangent, which is replicated, would have another layout."""
    if not x.spec.unreduced:
        return x
    return with_spec(x, x.spec.replace(unreduced=None), "lift")
