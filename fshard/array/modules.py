"""`shard_module`: a module whose parameters are global arrays. It runs unchanged on arrays. `lift` is for torch.func."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from fnmatch import fnmatchcase
from typing import Any

import torch
from einops._backends import TorchBackend  # einops has no public registration of backends
from torch import Tensor, nn
from torch.utils import _pytree as torch_trees

from fshard.array.communicate import with_spec
from fshard.array.mode import with_equal_tensors
from fshard.errors import LayoutError
from fshard.mesh.layout import Layout, Mesh, P
from fshard.mesh.layout.sharded import ArrayNode, Sharded, typeof
from fshard.mesh.reshard.device_put import device_put

Rules = Mapping[str, P] | Callable[[str, Tensor], P]
"""Patterns of parameters' names and their specs, the first that matches counts; or a function of name and tensor."""


def shard_module(module: nn.Module, rules: Rules, *, mesh: Mesh) -> nn.Module:
    """Replace a module's parameters and buffers by arrays on a mesh, in place, and return it.

    In its forward, plain tensors that it makes (positions, masks) count as replicated.

    Args:
        module: any module. Its forward gets arrays.
        rules: `{"*.up.weight": P("model"), "*.down.weight": P(None, "model")}`; a tensor that no pattern matches is
            replicated. Patterns are those of the shell. Or a function of a name and a tensor.
        mesh: the devices.

    >>> import torch, fshard as fs
    >>> from fshard import P
    >>> mesh = fs.make_mesh({"data": 2, "model": 2})
    >>> model = fs.array.shard_module(torch.nn.Linear(4, 6), {"weight": P("model"), "bias": P("model")}, mesh=mesh)
    >>> fs.typeof(model.weight), fs.typeof(model(fs.array.ones(8, 4, layout=fs.Layout(mesh, P("data")))))
    (f32[6@model, 4], f32[8@data, 6@model])
    """
    arrays: dict[int, Any] = {}
    used: set[str] = set()
    for prefix, submodule in module.named_modules():
        for held in (submodule._parameters, submodule._buffers):  # pyright: ignore[reportPrivateUsage]
            for name, x in held.items():
                if x is None or isinstance(x, Sharded):
                    continue
                if id(x) not in arrays:  # tied ones stay tied
                    path = f"{prefix}.{name}" if prefix else name
                    array = device_put(
                        {path: x.detach()}, Layout(mesh, _spec_of(path, x, rules, used))
                    )[path]
                    arrays[id(x)] = array.requires_grad_() if x.requires_grad else array, x
                held[name] = arrays[id(x)][0]
    unused = [] if callable(rules) else [pattern for pattern in rules if pattern not in used]
    if unused:
        raise LayoutError(
            f"rules must match names of {type(module).__name__}; {unused} match none. See named_parameters()."
        )
    forwards: list[AbstractContextManager[None]] = []  # those in progress: a module may call itself

    def enter(*_: Any) -> None:
        forwards.append(with_equal_tensors())
        forwards[-1].__enter__()

    def leave(*_: Any) -> None:
        forwards.pop().__exit__(None, None, None)

    module.register_forward_pre_hook(enter)
    module.register_forward_hook(leave, always_call=True)
    return module


def inspect(module: nn.Module) -> str:
    """Return a table of a module's parameters and buffers: name, type with layout, elements on one device.

    >>> import torch, fshard as fs
    >>> from fshard import P
    >>> mesh = fs.make_mesh({"model": 2})
    >>> print(fs.array.inspect(fs.array.shard_module(torch.nn.Linear(4, 6), {"weight": P("model")}, mesh=mesh)))
    weight  f32[6@model, 4]  12
    bias    f32[6]            6
    total                    18
    """
    named = [*module.named_parameters(), *module.named_buffers()]
    rows = [
        (name, str(typeof(x)), x.shards[0].numel() if isinstance(x, Sharded) else x.numel())
        for name, x in named
    ]
    rows.append(("total", "", sum(count for *_, count in rows)))
    first, second, third = (max(len(str(row[column])) for row in rows) for column in range(3))
    return "\n".join(
        f"{name:{first}}  {kind:{second}}  {count:{third}}" for name, kind, count in rows
    )


def _spec_of(path: str, x: Tensor, rules: Rules, used: set[str]) -> P:
    if callable(rules):
        return rules(path, x)
    matching = [pattern for pattern in rules if fnmatchcase(path, pattern)]
    used.update(matching)
    return rules[matching[0]] if matching else P()


class ShardedBackend(TorchBackend):
    """Lets einops' patterns work on arrays: einops finds it among the subclasses of its backends."""

    framework_name = "fshard"

    def is_appropriate_type(self, tensor: object) -> bool:
        return isinstance(tensor, Sharded)


def clip_grad_norm_(parameters: Iterable[Any], max_norm: float, norm_type: float = 2.0) -> Any:
    """Scale the gradients of arrays in place so that their total norm is at most `max_norm`; return the norm.

    torch.nn.utils.clip_grad_norm_ takes plain tensors only.
    """
    grads = [x.grad for x in parameters if x.grad is not None]
    if not grads:
        return torch.tensor(0.0)
    norm = torch.linalg.vector_norm(
        torch.stack([torch.linalg.vector_norm(g, norm_type) for g in grads]), norm_type
    )
    for g in grads:
        g.mul_(torch.clamp(max_norm / (norm + 1e-6), max=1.0))
    return norm


def lift(transform: Callable[..., Any]) -> Callable[..., Any]:
    """Let a transform of torch.func take functions of arrays, and trees of them: it sees their shards.

    It works for `grad`, `vjp`, `jvp` and `linearize`; `vmap`, and so `hessian`, do not map over arrays. Tangents and
    cotangents may have any layout: they are resharded to that of their array. Unreduced arrays are reduced.

    >>> import torch, fshard as fs
    >>> x = fs.array.ones(4, layout=fs.Layout(fs.make_mesh({"data": 2}), fs.P("data")))
    >>> fs.unshard(fs.array.lift(torch.func.grad)(lambda x: fs.unshard((x**2).sum()))(x))
    tensor([2., 2., 2., 2.])
    """
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
    """Return a tree of tangents in the layouts of the arrays of another tree; torch raises if the trees differ."""
    leaves, structure = torch_trees.tree_flatten(arrays)
    tangent_leaves, tangent_structure = torch_trees.tree_flatten(tangents)
    if tangent_structure != structure:
        return tangents
    resharded = [
        _resharded_tangent(leaf, tangent) if isinstance(leaf, Sharded) else tangent
        for leaf, tangent in zip(leaves, tangent_leaves, strict=True)
    ]
    return torch_trees.tree_unflatten(resharded, structure)


def _resharded_tangent(array: Sharded, tangent: Any) -> Any:
    if not isinstance(tangent, Sharded):
        return tangent
    if tangent.shape != array.shape or tangent.mesh != array.mesh:
        return tangent
    spec = array.spec.replace(unreduced=None)
    moved = with_spec(tangent, spec, "lift")
    return Sharded(moved.shape, array.layout.with_spec(spec), moved.shards)  # in its unit


def _reduced(x: Sharded) -> Sharded:
    """Return an array whose cotangent has its own layout: that of an unreduced one is replicated."""
    return with_spec(x, x.spec.replace(unreduced=None), "lift") if x.spec.unreduced else x


def _lifted(tree: Any, *, to_nodes: bool) -> Any:
    """Replace the arrays of a tree by nodes, or nodes by arrays; the arguments of functions in it are replaced back."""

    def convert(x: Any) -> Any:
        if callable(x):
            return lambda *args, **kwargs: _lifted(apply(x, (args, kwargs)), to_nodes=to_nodes)
        if isinstance(x, ArrayNode):
            x.array.check()  # vmap gives shards of fewer dims
            return x.array
        return ArrayNode(_reduced(x)) if to_nodes and isinstance(x, Sharded) else x

    def apply(function: Callable[..., Any], inputs: Any) -> Any:
        args, kwargs = _lifted(inputs, to_nodes=not to_nodes)
        return function(*args, **kwargs)

    return torch_trees.tree_map(convert, tree, is_leaf=lambda x: isinstance(x, ArrayNode))
