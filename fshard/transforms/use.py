"""What a loss function may say of its parameters: `whole` and `gathered`.  It need not: see `tape`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from typing import Any

from fshard.mesh.tree import PyTree, flatten, unflatten
from fshard.transforms.handle import Handle, wholes
from fshard.transforms.saved import unwatched


def whole(tree: PyTree) -> PyTree:
    """Return a tree with plain tensors in the place of parameters, gathered.

    Outside a loss function there are no handles, and the tree is returned as it is.
    """
    leaves, structure = flatten(tree, sharded_is_leaf=True, none_is_leaf=True)
    return unflatten(structure, [wholes(leaf) for leaf in leaves])


def gathered(fn: Callable[..., Any], *, keep: bool = False) -> Callable[..., Any]:
    """Return a function whose parameters are gathered when it is called and let go when it returns.

    Any loss function works without this mark; a marked block holds its parameters for exactly as long as it runs, and its
    body sees plain tensors.

    Args:
        fn: a function that is called with parameters among its arguments.
        keep: leave what autograd saves in it as it is, instead of gathering parameters again for the backward.

    >>> import torch, fshard as fs
    >>> block = fs.gathered(lambda w, x: torch.relu(x @ w))
    >>> block(torch.eye(2), torch.tensor([-1.0, 2.0]))
    tensor([0., 2.])
    """

    @wraps(fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        leaves, structure = flatten((args, kwargs), sharded_is_leaf=True, none_is_leaf=True)
        units = {id(leaf.unit): leaf.unit for leaf in leaves if type(leaf) is Handle}
        own_args, own_kwargs = unflatten(structure, [wholes(leaf) for leaf in leaves])
        try:
            with unwatched() if keep else nullcontext():
                return fn(*own_args, **own_kwargs)
        finally:
            for unit in units.values():
                if unit.sharded and unit.tape.manner.reshard:
                    unit.release()

    return run


def followed(loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return a loss function as it is to be called with handles: what torch.compile has made takes gathered parameters."""
    return gathered(loss_fn) if hasattr(loss_fn, "_torchdynamo_orig_callable") else loss_fn
