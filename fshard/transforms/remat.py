"""`remat`: compute again in backward what is not worth its memory.

    remat(fn, policy)(x)   forward:   x --fn--> y, keeping x and what the policy names
                           backward:  x --fn--> all that fn's derivative needs, then back through it

Under plain autograd this is torch's checkpoint, which runs fn again when backward first asks for a value.  A policy adds
a *region*: its forward keeps the results of some operations, by their number, and when fn runs again they are
handed out instead of being computed.  torch.func knows no such hooks: under its transforms fn is simply called and all is
kept.  A part of fn that itself calls such a transform is marked `fs.gathered(part, keep=True)`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, Literal, ParamSpec, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from fshard.errors import PolicyError
from fshard.mesh.differentiate import transformed
from fshard.mesh.tree import flatten, unflatten
from fshard.transforms.region import Keeping, Region, Replaying, is_on_host, mark

Args = ParamSpec("Args")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Policy:
    """What is kept between forward and backward; `host`: in the host's memory."""

    keep: Literal["everything", "nothing", "dots", "names"]
    names: frozenset[str] = frozenset()
    host: bool = False


def save_names(*names: str) -> Policy:
    """Return the policy that keeps the values marked with these names by `fs.name`.

    >>> save_names("attention").names
    frozenset({'attention'})
    """
    return Policy("names", frozenset(names))


def offload(policy: str | Policy) -> Policy:
    """Return a policy that keeps the same values in the host's memory; parameters stay where they are.

    >>> offload("dots")
    Policy(keep='dots', names=frozenset(), host=True)
    """
    return replace(_policy(policy), host=True)


def name(x: Tensor, label: str) -> Tensor:
    """Return x, and mark it for `remat` with `save_names`.

    What is kept is the result of the operation that made x: that operation is not run again, those before it are.  A
    collective is always run again, on all devices.

    >>> import torch
    >>> def f(x):
    ...     return name(x.sin(), "sine").cos()
    >>> x = torch.zeros(1, requires_grad=True)
    >>> torch.autograd.grad(remat(f, save_names("sine"))(x), x)
    (tensor([-0.]),)
    """
    mark(x, label)
    return x


def remat(fn: Callable[Args, Result], policy: str | Policy = "nothing") -> Callable[Args, Result]:
    """Return the same function, which keeps less for backward and computes the rest again.

    Args:
        fn: any function or module.  Random draws and collectives are repeated as they were, the latter on all devices.
        policy: what is kept, besides the arguments: "nothing", "everything" (that is: no rematerialisation), "dots"
            (results of matrix products and convolutions), `save_names(...)`, or `offload(...)` of one of these.

    >>> import torch
    >>> x = torch.ones(2, requires_grad=True)
    >>> torch.autograd.grad(remat(lambda x: (x * x).sum())(x), x)
    (tensor([2., 2.]),)
    """
    chosen = _policy(policy)

    @wraps(fn, updated=())
    def kept(*args: Args.args, **kwargs: Args.kwargs) -> Result:
        everything = chosen.keep == "everything" and not chosen.host
        if everything or transformed() or not torch.is_grad_enabled():
            return fn(*args, **kwargs)
        return _hooked(fn, chosen, args, kwargs)

    return kept


def _hooked(fn: Callable[..., Any], policy: Policy, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run fn under the hooks of a policy."""
    if policy.keep != "everything":
        return _checkpointed(fn, policy, args, kwargs)
    with saved_tensors_hooks(_to_host, _from_host):
        return fn(*args, **kwargs)


def _policy(policy: str | Policy) -> Policy:
    if isinstance(policy, Policy):
        return policy
    if policy not in ("everything", "nothing", "dots"):
        raise PolicyError(
            f'fs.remat: there is no policy {policy!r}. Write "everything", "nothing", "dots", fs.save_names("a", "b") or '
            "fs.offload(...) around one of these: they say what is kept."
        )
    return Policy(cast(Any, policy))


def _checkpointed(fn: Callable[..., Any], policy: Policy, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run fn in torch's checkpoint.  Only plain tensors are its arguments: it would look into handles."""
    leaves, structure = flatten((args, kwargs), sharded_is_leaf=True, none_is_leaf=True)
    places = [place for place, x in enumerate(leaves) if type(x) in (Tensor, nn.Parameter)]
    tensors = [leaves[place] for place in places]
    for place in places:
        leaves[place] = None  # the checkpoint holds them, in a way that one around it can see

    def body(*xs: Tensor) -> Any:
        own = list(leaves)
        for place, x in zip(places, xs, strict=True):
            own[place] = x
        own_args, own_kwargs = unflatten(structure, own)
        return fn(*own_args, **own_kwargs)

    if policy.keep == "nothing":
        return checkpoint(body, *tensors, use_reentrant=False)
    region = Region(None if policy.keep == "dots" else policy.names, policy.host)
    return checkpoint(body, *tensors, use_reentrant=False, context_fn=lambda: (Keeping(region), Replaying(region)))


def _to_host(x: Tensor) -> Tensor | tuple[torch.device, Tensor]:
    if is_on_host(x) or x.is_leaf:  # parameters and inputs are held by somebody else
        return x
    return x.device, torch.empty_like(x, device="cpu", pin_memory=x.is_cuda).copy_(x, non_blocking=False)


def _from_host(packed: Tensor | tuple[torch.device, Tensor]) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    device, x = packed
    return x.to(device, non_blocking=True)
