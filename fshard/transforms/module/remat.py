"""`remat`: recompute in the backward instead of saving.

    remat(fn, policy)(x)   forward:   x --fn--> y, saving x and what the policy names
                           backward:  x --fn--> saved tensors of fn's derivative, then its backward

Under plain autograd this is torch's checkpoint, which runs fn again when the backward first reads a
saved tensor. A policy adds a *region*: its forward keeps the results of some operations, by number,
and the second run of fn returns these instead of computing them. For "dots" matrix products and
convolutions are numbered; for names every operation under a recording grad mode. Operations inside
an autograd Function are not numbered, since on virtual devices the last to arrive computes for all.

    forward    %0 = mm    %1 = sin    %2 = checkpoint_name(%1, "a")    keep {1: %1}
    again      %0 = mm    %1 = kept[1]                 ...

A result that was modified in place since is computed again. torch.func has no such hooks: under its
transforms fn is simply called and all is saved. A part of fn that itself calls such a transform is
marked `fs.with_unsharded_params(part, keep=True)`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, Literal, NamedTuple, ParamSpec, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,  # pyright: ignore[reportPrivateUsage]
)
from torch.utils.checkpoint import checkpoint

from fshard.errors import PolicyError
from fshard.memory.activations import HostCopy, can_leave
from fshard.memory.kinds import note_kept
from fshard.mesh.collectives.autograd import transformed
from fshard.mesh.layout import flatten, unflatten
from fshard.mesh.layout.counting import ActivationMemory
from fshard.mesh.layout.sharded import Sharded
from fshard.mesh.spmd.scope import entered, here

Args = ParamSpec("Args")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Policy:
    """The values that are kept between forward and backward.

    `host`: in host memory, as those of the `offloaded` names.
    """

    keep: Literal["everything", "nothing", "dots", "names"]
    names: frozenset[str] = frozenset()
    host: bool = False
    offloaded: frozenset[str] = frozenset()


def save_names(*names: str, offload: str | Sequence[str] = ()) -> Policy:
    """Return the policy that keeps the values with these names of `fs.nn.checkpoint_name`.

    Those with a name of `offload` are kept in host memory: copied there during the forward, and
    back ahead of their backward. On a mesh of CPUs it is a memory kind of its own, which
    `fs.memory.limit` counts.

    >>> policy = save_names("attention", offload="hidden")
    >>> sorted(policy.names), policy.offloaded
    (['attention', 'hidden'], frozenset({'hidden'}))
    """
    offloaded = frozenset([offload] if isinstance(offload, str) else offload)
    return Policy("names", frozenset(names) | offloaded, offloaded=offloaded)


def offload(policy: str | Policy) -> Policy:
    """Return a policy that keeps the same values in host memory; parameters are not moved.

    >>> offload("dots").host
    True
    """
    return replace(_validated_policy(policy), host=True)


def checkpoint_name(x: Tensor, label: str) -> Tensor:
    """Return x, marked for `remat` with `save_names`.

    The result of the operation that made x is kept: it is not run again, the ones before it are. A
    collective is always run again, on all devices.

    >>> import torch
    >>> def f(x):
    ...     return checkpoint_name(x.sin(), "sine").cos()
    >>> x = torch.zeros(1, requires_grad=True)
    >>> torch.autograd.grad(remat(f, save_names("sine"))(x), x)
    (tensor([-0.]),)
    """
    # An array of a planned module is no tensor of torch: the operations that a mode sees made its
    # shards.
    values = x.shards if isinstance(x, Sharded) else (x,)
    for mode in _get_current_dispatch_mode_stack():  # from the outside in
        if isinstance(mode, NamedValueMode):
            for value in values:
                mode.mark(value, label)
    return x


def remat(fn: Callable[Args, Result], policy: str | Policy = "nothing") -> Callable[Args, Result]:
    """Return the same function, which saves less for backward and recomputes the rest.

    Args:
        fn: any function or module. Random draws and collectives are repeated, the latter on all
            devices.
        policy: what is kept beside the arguments: "nothing", "everything" (no rematerialisation),
            "dots" (results of matrix products and convolutions), `save_names(...)`, or
            `offload(...)` of one of these.

    >>> import torch
    >>> x = torch.ones(2, requires_grad=True)
    >>> torch.autograd.grad(remat(lambda x: (x * x).sum())(x), x)
    (tensor([2., 2.]),)
    """
    policy = _validated_policy(policy)

    @wraps(fn, updated=())
    def call(*args: Args.args, **kwargs: Args.kwargs) -> Result:
        if transformed() or not torch.is_grad_enabled():
            return fn(*args, **kwargs)
        if policy.keep != "everything":
            return _call_checkpointed(fn, policy, args, kwargs)
        if not policy.host:
            return fn(*args, **kwargs)
        with saved_tensors_hooks(_to_host, _from_host):
            return fn(*args, **kwargs)

    return call


def _validated_policy(policy: str | Policy) -> Policy:
    if isinstance(policy, Policy):
        return policy
    if policy not in ("everything", "nothing", "dots"):
        raise PolicyError(
            'fs.remat: policy must be "everything", "nothing", "dots", fs.nn.save_names("a", "b") '
            f"or fs.nn.offload(...) of one of these; got {policy!r}."
        )
    return Policy(cast(Any, policy))


def _call_checkpointed(
    fn: Callable[..., Any], policy: Policy, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run fn in torch's checkpoint, of which plain tensors alone are arguments.

    The checkpoint would look into `LazyParam`s, and so unshard them.
    """
    leaves, structure = flatten((args, kwargs), none_is_leaf=True)
    indices = [index for index, x in enumerate(leaves) if type(x) in (Tensor, nn.Parameter)]
    tensors = [leaves[index] for index in indices]
    for index in indices:
        leaves[index] = None  # the checkpoint holds them, in a way that one around it can see
    scope = here()  # a process may differentiate outside of `run`, where there is none
    is_resumed = scope is not None and scope.mesh.runtime == "process"

    def body(*xs: Tensor) -> Any:
        inputs = list(leaves)
        for index, x in zip(indices, xs, strict=True):
            inputs[index] = x
        args, kwargs = unflatten(structure, inputs)
        with entered(scope) if is_resumed else nullcontext():
            return fn(*args, **kwargs)

    if policy.keep == "nothing":
        return checkpoint(body, *tensors, use_reentrant=False)
    if _is_recomputed():
        return body(*tensors)
    region = _region_of(policy, {} if scope is None else scope.activations)
    return checkpoint(body, *tensors, use_reentrant=False, context_fn=lambda: (region, region))


def _is_recomputed() -> bool:
    """Return True inside of a function that is recomputed itself, whose policy then decides.

    A region there would keep its results from the forward on, though they are computed again. The
    second run answers alike, so both save the same tensors.
    """
    hooks = _C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and hooks[0].__qualname__.startswith(_HOOKS_OF_CHECKPOINT)


def _region_of(policy: Policy, activations: Mapping[str, ActivationMemory]) -> Region:
    """Return the region of a call.

    `activations`: the memories of names by the step's own option, which takes precedence.
    """
    if policy.keep == "dots":
        return Region(None, frozenset(), host=policy.host)
    memories: dict[str, ActivationMemory] = {}
    for name in policy.names:
        is_on_host = policy.host or name in policy.offloaded
        memories[name] = activations.get(name, "host" if is_on_host else "device")
    kept = frozenset([name for name, memory in memories.items() if memory != "recomputed"])
    on_host = frozenset([name for name, memory in memories.items() if memory == "host"])
    return Region(kept, on_host, host=False)


def _to_host(x: Tensor) -> Tensor | HostCopy:
    # Leaves are parameters and inputs, of which others have references: nothing would be freed.
    if x.is_leaf or not can_leave(x):
        return x
    return HostCopy(x)


def _from_host(packed: Tensor | HostCopy) -> Tensor:
    x = packed if isinstance(packed, Tensor) else packed.get()
    if x is None:
        raise RuntimeError(
            "a tensor that the backward needs must not be written to in place; got one that was."
        )
    return x


_C: Any = torch._C  # pyright: ignore[reportPrivateUsage]
_HOOKS_OF_CHECKPOINT = ("_checkpoint_hook", "_recomputation_hook")
"""The classes of torch whose hooks are open while `checkpoint` runs a function, and again."""

_aten: Any = torch.ops.aten
DOTS = frozenset(
    getattr(_aten, op).default
    for op in (
        "mm",
        "addmm",
        "bmm",
        "baddbmm",
        "addbmm",
        "mv",
        "addmv",
        "dot",
        "vdot",
        "convolution",
        "_scaled_mm",
    )
)

ALLOCATIONS = frozenset(
    getattr(_aten, op).default for op in ("empty_like", "empty_strided", "new_empty")
) | {_aten.empty.memory_format}
"""Memory without values: a collective allocates it the first time alone, so it has no number."""


class KeptResult(NamedTuple):
    """A kept result: an alias of it, its version when it was kept, and its name, if it has one."""

    value: Tensor
    version: int
    name: str | None

    def get(self) -> Tensor | None:
        """Return the result, or None if it has been written to."""
        if self.name is not None:
            note_kept(self.name, -self.value.nbytes)
        return _alias(self.value) if self.value._version == self.version else None


class KeptCall(NamedTuple):
    """The results of an operation that are kept; those that are not tensors stay as they are."""

    results: tuple[Any, ...]
    is_tuple: bool

    def get(self) -> Any:
        """Return the results, or None if one of them has been written to."""
        results: list[Any] = []
        for kept in self.results:
            if isinstance(kept, KeptResult | HostCopy):
                results.append(kept.get())
            else:
                results.append(kept)
        for kept, result in zip(self.results, results, strict=True):
            if result is None and kept is not None:
                return None
        return tuple(results) if self.is_tuple else results[0]


class Producer(NamedTuple):
    """The operation that allocated some memory, the version and the strides of its result.

    `memory` is a weak reference: the memory can be freed, and its identity is not reused. `others`:
    what the operation returned beside it, None if the result is all; such as the log-sum-exp of
    attention, without which it would run again.
    """

    memory: StorageWeakRef
    number: int
    version: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    others: tuple[Any, ...] | None


class NamedValueMode(TorchDispatchMode):
    """A mode that gets the values that are named while it is open: see `checkpoint_name`."""

    def mark(self, x: Tensor, label: str) -> None:
        """Use a value with a name."""
        raise NotImplementedError


class Region(NamedValueMode):
    """One call of a rematerialised function.

    It keeps results in its forward, and returns these when it runs again. It keeps dots if `names`
    is None, on the host by `host`; else the results with these names, on the host the `offloaded`
    ones.
    """

    def __init__(
        self, names: frozenset[str] | None, offloaded: frozenset[str], *, host: bool
    ) -> None:
        super().__init__()
        self.names = names
        self._offloaded = offloaded
        self._host = host
        self._state: Literal["forward", "recompute"] = "forward"
        self._number = 0  # of the next operation
        self._kept: dict[int, KeptCall] = {}
        self._producers: dict[int, Producer] = {}

    def __enter__(self) -> Any:
        self._number = 0
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        if self._state == "forward":
            self._producers = {}
            self._state = "recompute"
        super().__exit__(*error)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        has_number = func in DOTS if self.names is None else func not in ALLOCATIONS
        is_numbered = torch.is_grad_enabled() and has_number
        if not is_numbered:
            return func(*args, **(kwargs or {}))
        number = self._number
        self._number += 1
        if self._state == "recompute":
            kept = self._kept.get(number)
            result = None if kept is None else kept.get()
            return func(*args, **(kwargs or {})) if result is None else result
        result = func(*args, **(kwargs or {}))
        if self.names is None:
            kept_result = self._keep(result, None, on_host=self._host)
            self._kept[number] = KeptCall((kept_result,), is_tuple=False)
        else:
            self._record_producer(number, args, result)
        return result

    def _record_producer(self, number: int, args: tuple[Any, ...], result: Any) -> None:
        """Record that an operation allocated the memory of its first result."""
        y: Any = result
        others: tuple[Any, ...] | None = None
        if isinstance(result, tuple) and result:
            y = result[0]
            others = result[1:]
        if not isinstance(y, Tensor) or y.layout != torch.strided:
            return
        memory = _storage_id(y)
        for arg in args:
            if isinstance(arg, Tensor) and _storage_id(arg) == memory:
                return  # a view, or in place
        reference = StorageWeakRef(y.untyped_storage())
        size = tuple(y.shape)
        offset = int(y.storage_offset())
        producer = Producer(reference, number, y._version, size, y.stride(), offset, others)
        self._producers[memory] = producer

    def _keep(self, x: Any, name: str | None, *, on_host: bool) -> Any:
        """Return what is kept of a result."""
        if not isinstance(x, Tensor):
            return x
        if on_host and can_leave(x):
            return HostCopy(_alias(x))
        if name is not None:
            note_kept(name, x.nbytes)
        return KeptResult(_alias(x), x._version, name)

    def mark(self, x: Tensor, label: str) -> None:
        """Keep the result that x is a view of, if the label is one of the region's names.

        One that has been written to in place is recomputed: the write would be repeated on what is
        kept. A second run marks nothing, since it has no producers.
        """
        if not self.names or label not in self.names:
            return
        producer = self._producers.get(_storage_id(x))
        if producer is None or x._version != producer.version:
            return
        on_host = label in self._offloaded
        with torch.no_grad():  # so that these two are not numbered
            result = x.detach().as_strided(producer.size, producer.stride, producer.offset)
            results = (result, *(producer.others or ()))
            kept = tuple([self._keep(value, label, on_host=on_host) for value in results])
            self._kept[producer.number] = KeptCall(kept, is_tuple=producer.others is not None)


def _storage_id(x: Tensor) -> int:
    if x.layout != torch.strided:
        return 0
    return x.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]


def _alias(x: Tensor) -> Tensor:
    """Return another tensor of the same memory and version, below autograd."""
    # A dispatch mode excludes this key, whose kernel lets the result share the version.
    with _C._SetExcludeDispatchKeyGuard(_C.DispatchKey.ADInplaceOrView, False):
        return x.detach()
