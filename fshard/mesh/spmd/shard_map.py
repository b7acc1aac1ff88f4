"""`shard_map`: run a function once per device, on local tensors. All of fshard is built on it.

    global arrays --in_specs--> local tensors --f, on every device--> local tensors --out_specs--> global arrays

An axis that a spec does not name promises equality along it. In a checked call such values are compared, forward and
backward, and gradients are audited (`gradient_audit`). The plan of a call is cached by structure, shapes and layouts,
so later calls only move tensors.

# Note [First calls are checked]
By default the first call of each plan is checked, and the first that autograd records: a wrong program is wrong the
first time. A check needs collectives, so all devices of a mesh must decide alike. They do: plans depend on what is
equal on all devices (structure, global shapes, layouts, whether a gradient is recorded), and a call counts once it has
succeeded, which a broken promise prevents on all devices. Processes that call differently get a `MismatchError`: a
check pairs only with a check.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import numpy as np
from torch import Tensor

from fshard.errors import LayoutError, MeshError, MismatchError
from fshard.mesh.collectives.autograd import Tensors, apply, recorded, transformed
from fshard.mesh.layout import Axes, Mesh, PyTree, Structure, require_mesh, unflatten
from fshard.mesh.layout.sharded import Sharded
from fshard.mesh.runtimes.thread_state import batches_nested
from fshard.mesh.runtimes.watch import watching
from fshard.mesh.spmd.call_plan import ArgumentRecipe, PlannedTensor, Recipes, ResultRecipe
from fshard.mesh.spmd.global_inputs import compare_inputs
from fshard.mesh.spmd.gradient_audit import Audit
from fshard.mesh.spmd.outer_autograd import run_mapped
from fshard.mesh.spmd.run import inside, local_devices, resolve_mesh, without_values
from fshard.source import Site, call_site
from fshard.uncompiled import uncompiled


@uncompiled
def shard_map(
    f: Callable[..., PyTree] | None = None,
    *,
    mesh: Mesh | None = None,
    in_specs: PyTree = None,
    out_specs: PyTree,
    axes: Axes | None = None,
    check: bool | None = None,
) -> Callable[..., PyTree]:
    """Return a function of global arrays that runs `f` once per device, on local tensors.

    Args:
        f: a pure function of local tensors; it may call collectives over `axes`. Without it, return a decorator.
        mesh: the devices; by default those of `fs.use_mesh`. Some axes of a mesh, `mesh["data"]`, mean the full mesh with
            `axes="data"`.
        in_specs: a P for all arguments, or a tuple with one per argument (keywords last); each may be a tree of Ps that is
            a prefix of its argument. None, the default: a `Sharded` keeps its spec. A Layout counts as its spec. Arguments
            that are not tensors are passed on unchanged, numbers with the spec P() or None only.
        out_specs: a P, or a tree of Ps that is a prefix of the result.
        axes: the axes that f is mapped over, by default all. The others are left to a `shard_map` inside f.
        check: compare by value where equality is promised, forward and backward, and audit gradients at the first call that
            autograd records, which runs f twice more per device. Default: at the first call of each kind (structure,
            shapes and layouts of arguments), or at all calls with FSHARD_CHECK=1. True: at all calls. False: never. A new
            mapped function is checked again: make it once, outside of loops.

    Arguments are plain tensors (the global value, the same on every process) or `Sharded`, which are resharded if
    their layout differs. Results are `Sharded`. Random draws inside f are equal on all devices; see `fs.keyed_random`.
    To compile, compile f: `shard_map(torch.compile(f), ...)`.

    >>> import torch, fshard as fs
    >>> from fshard import P
    >>> mesh = fs.make_mesh({"data": 2, "model": 2})
    >>> def matmul(a, b):
    ...     return fs.psum(a @ b, "model")
    >>> dot = fs.shard_map(matmul, mesh=mesh, in_specs=(P("data", "model"), P("model")), out_specs=P("data"))
    >>> fs.unshard(dot(torch.ones(4, 6), torch.ones(6, 2)))[0]
    tensor([6., 6.])
    """
    if f is None:
        return partial(shard_map, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axes=axes, check=check)
    mesh = require_mesh("shard_map", mesh)
    if not callable(f):
        raise TypeError(f"shard_map: f must be a function of local tensors; got {type(f).__name__}.")
    mapped = mesh.axis_names if axes is None else mesh.check_axes(axes, "shard_map(axes=)")
    name = getattr(f, "__name__", type(f).__name__)
    recipes = Recipes(f, name, in_specs, out_specs, mapped)

    @wraps(f, updated=())
    @uncompiled
    def on_mesh(*args: Any, **kwargs: Any) -> PyTree:
        own = resolve_mesh(mesh)
        _refuse_mapped_again(name, own, mapped)
        recipe, leaves = recipes.of_arguments(own, args, kwargs)  # (1)
        return _call(recipes, recipe, leaves, own, check)

    return on_mesh


def _refuse_mapped_again(name: str, mesh: Mesh, mapped: tuple[str, ...]) -> None:
    outer = inside(mesh)
    if outer is not None and outer.own and outer.notice is not None:
        raise MeshError(
            f"shard_map of {name} in a loss function of value_and_grad, which runs once per device of {outer.mesh} already. "
            f"Call {name} itself there, on the device's own shard."
        )
    if outer is not None and not outer.mapped_axes.isdisjoint(mapped):
        again = ", ".join(axis for axis in mapped if axis in outer.mapped_axes)
        raise MeshError(
            f"shard_map of {name}: axis {again} is already mapped by the shard_map around it. "
            f"Give that one axes=(...) without it, or this one a mesh of the other axes."
        )
    if outer is not None and outer.mapped_axes and (mesh.parent or mesh.axes) != (outer.mesh.parent or outer.mesh.axes):
        raise MeshError(
            f"shard_map of {name} runs on {mesh} inside one on {outer.mesh}: its devices differ along axes that are mapped "
            f"there. Give it some of the other axes, mesh[...] of the same mesh."
        )


def _call(recipes: Recipes, recipe: ArgumentRecipe, leaves: list[Any], mesh: Mesh, check: bool | None) -> PyTree:
    """Shard the arguments, run f on every device, and assemble the results."""
    site = call_site()
    given = [_tensors(leaves[entry.index]) for entry in recipe.entries]
    versions = [[x._version for x in xs] for xs in given]
    followed = transformed() or recorded(tuple([x for xs in given for x in xs]))
    columns = recipe.shards(leaves, site, recorded=followed)  # (2)
    scope = inside(mesh)
    caller: object = scope or recipe
    audited = followed and not batches_nested()  # the vmap of autograd shows no plain tensor
    is_first = check is not False and recipe.checked.get(caller, -1) < audited and not (scope and scope.own)
    audits = is_first and audited and bool(recipe.entries) and mesh.size > 1 and mesh.runtime != "abstract"
    checked = bool(check or (check is None and watching()) or (is_first and not audits))
    if (checked or audits) and not batches_nested():
        values = [(entry.path, leaves[entry.index]) for entry in recipe.entries if entry.layout.spec.axes]
        sharded = {path: (x,) for path, x in values if isinstance(x, Tensor)}
        compare_inputs(f"shard_map of {recipes.name}", mesh, sharded)
    outputs = _Outputs(recipes, mesh, site, checked)

    def program(device: int, xs: Tensors) -> Tensors:
        if audits:
            apply(audit, xs)
        if checked:
            xs = tuple([entry.checked(x, site) for x, entry in zip(xs, recipe.entries, strict=True)])
        return outputs.take(device, on_shards(xs))

    def on_shards(xs: Tensors) -> PyTree:
        own = list(leaves)
        for x, entry in zip(xs, recipe.entries, strict=True):
            own[entry.index] = x
        return recipe.call(recipes.f, own)

    audit = Audit(recipes, recipe, on_shards, site)
    shards = run_mapped(mesh, program, columns, mapped=recipes.mapped, checked=checked)
    changed = [
        entry.path
        for entry, xs, before in zip(recipe.entries, given, versions, strict=True)
        if [x._version for x in xs] != before
    ]
    if changed:
        raise ValueError(
            f"{recipes.name} changed its argument {', '.join(changed)} in place. Arguments belong to the caller, and all "
            "devices get the same plain tensor. Work on a copy: x = x.clone()."
        )
    results = outputs.assemble(shards)  # (7)
    if is_first:
        recipe.checked[caller] = audited
    return results


def _tensors(value: Tensor | Sharded) -> list[Tensor]:
    """Return the tensors that f must not change, as far as torch counts changes."""
    if isinstance(value, Sharded):
        value.check()
    return [x for x in (value.shards if isinstance(value, Sharded) else (value,)) if not x.is_inference()]


def _same(x: Any, y: Any) -> bool:
    """Return True if two devices return equal values; NaN equals NaN."""
    if isinstance(x, np.ndarray) or isinstance(y, np.ndarray):
        return type(x) is type(y) and (x.dtype, x.shape, x.tobytes()) == (y.dtype, y.shape, y.tobytes())
    return x is y or x == y or (x != x and y != y)


class _Outputs:
    """The results of the devices: tensors travel as shards, all else must be the same everywhere."""

    def __init__(self, recipes: Recipes, mesh: Mesh, site: Site, checked: bool) -> None:
        self.site = site
        self.recipes = recipes
        self.mesh = mesh
        self.checked = checked
        self.taken: dict[int, tuple[ResultRecipe, Structure, list[Any]]] = {}

    def take(self, device: int, result: PyTree) -> Tensors:
        """Take one device's result apart; raise if it is not like those of others."""
        recipe, structure, leaves = self.recipes.of_results(self.mesh, result)
        tensors = tuple([leaves[entry.index] for entry in recipe.entries])
        if self.mesh.runtime == "abstract":
            tensors = tuple(map(without_values, tensors))
        if self.checked:
            pairs = zip(tensors, recipe.entries, strict=True)
            tensors = tuple([entry.checked(x, self.site) for x, entry in pairs])
        for entry in recipe.entries:
            leaves[entry.index] = Tensor
        self.taken[device] = recipe, structure, leaves
        first, (_, known, values) = next(iter(self.taken.items()))
        if structure != known or not all(map(_same, values, leaves)):
            raise MismatchError(
                f"shard_map of {self.recipes.name}: devices {first} and {device} return different trees or values: "
                f"{values} in {known}, and {leaves} in {structure}. What is no tensor must be the same."
            )
        return tensors

    def assemble(self, shards: list[Tensors]) -> PyTree:
        """Put the devices' results together."""
        recipe, structure, others = next(iter(self.taken.values()))
        leaves = list(others)
        may_differ = recipe.uneven or len(self.taken) > 1
        for entry, own in zip(recipe.entries, shards, strict=True):
            if may_differ:
                self._check_shards(own, entry)
            leaves[entry.index] = Sharded(entry.shape, entry.layout, own)
        return unflatten(structure, leaves)

    def _check_shards(self, own: Tensors, entry: PlannedTensor) -> None:
        """Raise unless the devices' shards have one dtype and form one global shape."""
        if len({x.dtype for x in own}) > 1:
            raise LayoutError(
                f"shard_map of {self.recipes.name}: result{entry.path} has another dtype on some devices: "
                f"{', '.join(sorted({str(x.dtype) for x in own}))}."
            )
        if all(x.shape == own[0].shape for x in own) and not (entry.layout.spec.is_flat or entry.layout.spec.at):
            return
        wrong = [
            f"device {self.mesh.coordinates(device)} returns {tuple(x.shape)} instead of {shape}"
            for device, x in zip(local_devices(self.mesh), own, strict=True)
            if tuple(x.shape) != (shape := entry.layout.local_shape(entry.shape, device))
        ]
        if wrong:
            raise LayoutError(
                f"shard_map of {self.recipes.name}: result{entry.path} does not make up a tensor of shape {entry.shape} "
                f"as {entry.layout.spec}: {'; '.join(wrong)}."
            )
