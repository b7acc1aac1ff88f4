"""`shard_map`: run a function once per device, on local tensors. All of fshard is built on it.

    global arrays --in_specs--> local tensors
                                     | f, on every device
    global arrays <--out_specs-- local tensors

An axis that a spec does not name promises equality along it. In a checked call such values are
compared, forward and backward, and gradients are audited (`gradient_audit`). The plan of a call is
cached by structure, shapes and layouts, so later calls only move tensors.

# Note [First calls are checked]
By default the first call of each plan is checked, and the first that autograd records: a wrong
program is wrong the first time. Of plans that differ in sizes alone the 1st, 2nd, 4th, 8th, ... is
checked: a cache of keys and values has another size in each call. A check needs collectives, so all
devices of a mesh must decide alike. They do: plans and their numbers depend on what is equal on all
devices (structure, global shapes, layouts, whether a gradient is recorded), and a call counts once
it has succeeded, which a broken promise prevents on all devices. Processes that call differently
get a `MismatchError`: a check pairs only with a check.
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
from fshard.mesh.reshard.device_put import without_aliases
from fshard.mesh.runtimes.thread_state import batches_nested
from fshard.mesh.runtimes.watch import watching
from fshard.mesh.spmd.call_plan import CallPlans, Counts, PlannedTensor, ResultPlan
from fshard.mesh.spmd.global_inputs import compare_inputs
from fshard.mesh.spmd.gradient_audit import Audit
from fshard.mesh.spmd.outer_autograd import run_mapped
from fshard.mesh.spmd.run import (
    error_of_deferred,
    inside,
    local_devices,
    resolve_mesh,
    without_values,
)
from fshard.mesh.spmd.scope import Scope, require
from fshard.randomness import drawn_key, folded, seeded_by, turned
from fshard.source import call_site
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
        f: a pure function of local tensors; it may call collectives over `axes`. Without it, return
            a decorator.
        mesh: the devices; by default those of `fs.use_mesh`. Some axes of a mesh, `mesh["data"]`,
            mean the full mesh with `axes="data"`.
        in_specs: a P for all arguments, or a tuple with one per argument (keywords last); each may
            be a tree of Ps that is a prefix of its argument. None, the default: a `Sharded` keeps
            its spec. A Layout counts as its spec. Arguments that are not tensors are passed on
            unchanged, numbers with the spec P() or None only.
        out_specs: a P, or a tree of Ps that is a prefix of the result.
        axes: the axes that f is mapped over, by default all. The others are left to a `shard_map`
            inside f.
        check: compare by value where equality is promised, forward and backward, and audit
            gradients at the first call that autograd records, which runs f twice more per device.
            Default: at the first call of each kind (structure, shapes and layouts of arguments), or
            at all calls with FSHARD_CHECK=1; of kinds that differ in sizes alone, at the 1st, 2nd,
            4th, 8th, ... True: at all calls. False: never. A new mapped function is checked again:
            make it once, outside of loops.

    Arguments are plain tensors (the global value, the same on every process) or `Sharded`, which
    are resharded if their layout differs. Results are `Sharded`. Random draws inside f differ from
    call to call, and from device to device along the axes that any spec names; along the others
    they are equal. In `fs.keyed_random` f draws by that key. To compile, compile f:
    `shard_map(torch.compile(f), ...)`.

    >>> import torch, fshard as fs
    >>> from fshard import P
    >>> mesh = fs.make_mesh({"data": 2, "model": 2})
    >>> def matmul(a, b):
    ...     return fs.psum(a @ b, "model")
    >>> in_specs = P("data", "model"), P("model")
    >>> dot = fs.shard_map(matmul, mesh=mesh, in_specs=in_specs, out_specs=P("data"))
    >>> fs.unshard(dot(torch.ones(4, 6), torch.ones(6, 2)))[0]
    tensor([6., 6.])
    """
    if f is None:
        return partial(
            shard_map, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axes=axes, check=check
        )
    mesh = require_mesh("shard_map", mesh)
    if not callable(f):
        raise TypeError(
            f"shard_map: f must be a function of local tensors; got {type(f).__name__}."
        )
    error = error_of_deferred("f", f)
    if error:
        raise TypeError(f"shard_map: {error}")
    mapped = mesh.axis_names if axes is None else mesh.check_axes(axes, "shard_map(axes=)")
    name = getattr(f, "__name__", type(f).__name__)
    plans = CallPlans(f, name, in_specs, out_specs, mapped)

    @wraps(f, updated=())  # without the attributes of f, which may be a module
    @uncompiled
    def on_mesh(*args: Any, **kwargs: Any) -> PyTree:
        call = MappedCall(plans, resolve_mesh(mesh), args, kwargs, check)  # (1)
        columns = call.columns()  # (2)
        is_checked = call.is_checked
        results = run_mapped(call.mesh, call.run, columns, mapped=mapped, checked=is_checked)
        return call.assemble(results)  # (7)

    return on_mesh


class MappedCall:
    """One call of a mapped function: arguments, checks, and the results of the devices."""

    def __init__(
        self,
        plans: CallPlans,
        mesh: Mesh,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        check: bool | None,
    ) -> None:
        scope = inside(mesh)
        if scope is not None:
            _validate_outer_scope(plans, mesh, scope)
        self.plans = plans
        self.mesh = mesh
        self.site = call_site()
        self.plan, self.structure, self.leaves = plans.of_arguments(mesh, args, kwargs)
        self._results: dict[int, tuple[ResultPlan, Structure, list[Any]]] = {}

        self._tensors = [_counted_tensors(self.leaves[entry.index]) for entry in self.plan.entries]
        self._versions = [[x._version for x in xs] for xs in self._tensors]
        tensors = tuple([x for xs in self._tensors for x in xs])
        self._is_recorded = transformed() or recorded(tensors)

        self._caller: object = scope or self.plan.family
        # The vmap of autograd shows no plain tensor, which an audit needs.
        self._is_auditable = self._is_recorded and not batches_nested()
        self._is_first = self._is_first_call(check, scope)
        self._is_turn = self._is_first and self._is_turn_of_family()
        self._audit = self._plan_audit()
        is_first_to_check = self._is_turn and self._audit is None  # an audit checks too
        is_always_checked = check is None and watching()
        self.is_checked = bool(check or is_always_checked or is_first_to_check)

        # One key for all devices, and for every run of f in this call, such as those of an audit.
        # On an abstract mesh a draw has no value; under the vmap of autograd nothing can be drawn.
        # Outside of a mesh the key is drawn too, so that all processes draw the same numbers later.
        has_values = mesh.runtime != "abstract" or not mesh.is_member
        has_draws = has_values and not batches_nested()
        self._key = folded(drawn_key()) if has_draws else None

    def _is_first_call(self, check: bool | None, scope: Scope | None) -> bool:
        """Return True if there was no call like it: see Note [First calls are checked]."""
        is_in_loss = scope is not None and bool(scope.varying_axes)
        if check is False or is_in_loss:
            return False
        was_recorded = self.plan.callers.get(self._caller)
        if was_recorded is None:  # there was no call at all
            return True
        return self._is_auditable and not was_recorded

    def _family_counts(self) -> Counts:
        family = self.plan.family
        return family.recorded if self._is_auditable else family.called

    def _is_turn_of_family(self) -> bool:
        """Return True for the first calls number 1, 2, 4, 8, ... of those that differ in sizes."""
        number = self._family_counts().get(self._caller, 0) + 1
        return number & (number - 1) == 0

    def _plan_audit(self) -> Audit | None:
        """Return the audit of the gradients of the call, if this call has one."""
        has_peers = self.mesh.size > 1 and self.mesh.runtime != "abstract"
        if self._is_turn and self._is_auditable and has_peers and self.plan.entries:
            return Audit(self.plans, self.plan, self.apply, self.site)
        return None

    def columns(self) -> list[Tensors]:
        """Return the shards of each argument, on the devices held here.

        In a checked call, raise unless all processes have equal plain tensors, of which each takes
        its shard.
        """
        columns = self.plan.shards(self.leaves, self.site, recorded=self._is_recorded)
        is_compared = self.is_checked or self._audit is not None
        if is_compared and not batches_nested():
            plain: dict[str, Tensors] = {}
            for entry in self.plan.entries:
                x = self.leaves[entry.index]
                if entry.layout.spec.axes and isinstance(x, Tensor):
                    plain[entry.path] = (x,)
            compare_inputs(f"shard_map of {self.plans.name}", self.mesh, plain)
        return columns

    def run(self, device: int, xs: Tensors) -> Tensors:
        """Call the function as one device; return the tensors of the result.

        All else in the result must be the same on all devices.
        """
        if self._audit is not None:
            apply(self._audit, xs)
        if self.is_checked:
            xs = self._checked(xs, self.plan.entries)

        plan, structure, leaves = self.plans.of_results(self.mesh, self.apply(xs))
        tensors = tuple([leaves[entry.index] for entry in plan.entries])
        if self.mesh.runtime == "abstract":
            tensors = tuple([without_values(x) for x in tensors])
        if self.is_checked:
            tensors = self._checked(tensors, plan.entries)

        # What is kept of the result, and compared, has no tensors: `assemble` puts arrays there.
        for entry in plan.entries:
            leaves[entry.index] = Tensor
        self._results[device] = plan, structure, leaves
        self._compare_with_first_device(device)
        return tensors

    def _checked(self, xs: Tensors, entries: tuple[PlannedTensor, ...]) -> Tensors:
        pairs = zip(xs, entries, strict=True)
        return tuple([entry.checked(x, self.site) for x, entry in pairs])

    def _compare_with_first_device(self, device: int) -> None:
        """Raise unless a device's result has the tree and values of the first one's."""
        first, (_, first_structure, values) = next(iter(self._results.items()))
        _, structure, leaves = self._results[device]
        if structure != first_structure or not all(map(_are_equal, values, leaves)):
            raise MismatchError(
                f"shard_map of {self.plans.name}: devices {first} and {device} return different "
                f"trees or values: {values} in {first_structure}, and {leaves} in {structure}. "
                "What is no tensor must be the same."
            )

    def apply(self, xs: Tensors) -> PyTree:
        """Call the function on a device's shards.

        Random draws differ along the axes that any spec names. A repeated call repeats them.
        """
        args, kwargs = self.plan.arguments(self.structure, self.leaves, xs)
        if self._key is None:
            return self.plans.f(*args, **kwargs)

        axes = self.plan.named_axes
        index = require("shard_map").group(axes, "shard_map").index if axes else 0
        with seeded_by(turned(self._key, index)):
            return self.plans.f(*args, **kwargs)

    def assemble(self, columns: list[Tensors]) -> PyTree:
        """Put the results of the devices together."""
        self._validate_unchanged()
        plan, structure, leaves = next(iter(self._results.values()))
        leaves = list(leaves)
        # Devices with one plan return shards of one shape and dtype, unless it is uneven.
        has_one_plan = all(other is plan for other, *_ in self._results.values())
        for entry, shards in zip(plan.entries, columns, strict=True):
            if plan.uneven or not has_one_plan:
                self._validate_shards(shards, entry)
            leaves[entry.index] = Sharded(entry.shape, entry.layout, shards)

        if not transformed():  # torch.func hides storages, and has its own rules for writes
            self._copy_aliases(plan, leaves)
        if self._is_first:
            self.plan.callers[self._caller] = self._is_auditable
            counts = self._family_counts()
            counts[self._caller] = counts.get(self._caller, 0) + 1
        return unflatten(structure, leaves)

    def _validate_unchanged(self) -> None:
        """Raise if the function has written to an argument."""
        entries = self.plan.entries
        for entry, xs, versions in zip(entries, self._tensors, self._versions, strict=True):
            if [x._version for x in xs] != versions:
                raise ValueError(
                    f"{self.plans.name} changed its argument {entry.path} in place. Arguments "
                    "belong to the caller, and all devices get the same plain tensor. Work on a "
                    "copy: x = x.clone()."
                )

    def _copy_aliases(self, plan: ResultPlan, leaves: list[Any]) -> None:
        """Copy results that share memory with an argument: see Note [Results do not alias]."""
        indices = [entry.index for entry in plan.entries]
        arguments = [self.leaves[entry.index] for entry in self.plan.entries]
        distinct = without_aliases([leaves[index] for index in indices], arguments)
        for index, x in zip(indices, distinct, strict=True):
            leaves[index] = x

    def _validate_shards(self, shards: Tensors, entry: PlannedTensor) -> None:
        """Raise unless the devices' shards have one dtype and form one global shape."""
        subject = f"shard_map of {self.plans.name}: result{entry.path}"
        dtypes = {str(x.dtype) for x in shards}
        if len(dtypes) > 1:
            names = ", ".join(sorted(dtypes))
            raise LayoutError(f"{subject} has another dtype on some devices: {names}.")

        for device, x in zip(local_devices(self.mesh), shards, strict=True):
            shape = entry.layout.local_shape(entry.shape, device)
            if tuple(x.shape) != shape:
                raise LayoutError(
                    f"{subject} does not make up a tensor of shape {entry.shape} as "
                    f"{entry.layout.spec}: device {self.mesh.coordinates(device)} returns "
                    f"{tuple(x.shape)} instead of {shape}."
                )


def _validate_outer_scope(plans: CallPlans, mesh: Mesh, outer: Scope) -> None:
    """Raise if the devices of an outer shard_map or loss function cannot run a mapped function."""
    name = plans.name
    if outer.varying_axes and outer.notice is not None:
        raise MeshError(
            f"shard_map of {name} in a loss function of value_and_grad, which runs once per device "
            f"of {outer.mesh} already. Call {name} itself there, on the device's own shard."
        )

    axes = [axis for axis in plans.mapped if axis in outer.mapped]
    if axes:
        raise MeshError(
            f"shard_map of {name}: axis {', '.join(axes)} is already mapped by the shard_map "
            "around it. Give that one axes=(...) without it, or this one a mesh of the other axes."
        )

    full_axes = mesh.parent or mesh.axes
    if outer.mapped and full_axes != (outer.mesh.parent or outer.mesh.axes):
        raise MeshError(
            f"shard_map of {name} runs on {mesh} inside one on {outer.mesh}: its devices differ "
            "along axes that are mapped there. Give it some of the other axes, mesh[...] of the "
            "same mesh."
        )


def _counted_tensors(value: Tensor | Sharded) -> list[Tensor]:
    """Return the tensors that f must not change, as far as torch counts changes."""
    if isinstance(value, Sharded):
        value.check()
        tensors = value.shards
    else:
        tensors = (value,)
    return [x for x in tensors if not x.is_inference()]


def _are_equal(x: Any, y: Any) -> bool:
    """Return True if two devices return equal values; NaN equals NaN."""
    if isinstance(x, np.ndarray) or isinstance(y, np.ndarray):
        if type(x) is not type(y):
            return False
        return (x.dtype, x.shape, x.tobytes()) == (y.dtype, y.shape, y.tobytes())
    return x is y or x == y or (x != x and y != y)
