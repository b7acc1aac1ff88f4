"""Find the origin of each element of an engine's parameters, by the engine's own loader.

    load_weights(iterable)                the loader, called once
        q_proj, k_proj, v_proj       ->   tensors that have element numbers in the place of values
        qkv_proj.narrow(...).copy_(q)     numbers are copied; the engine keeps its values
    Trace                                 qkv_proj[0:4] is q_proj[4:8], ...

The map is exact: it is not derived from names or shapes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fshard.checkpoint.names import is_array, tie_key
from fshard.errors import RefitError
from fshard.mesh.layout import PyTree
from fshard.refit.leaves import named_leaves
from fshard.refit.numbers import UNWRITTEN, ElementNumbers, Weight, storage_key
from fshard.refit.origins import Origins, origins_of
from fshard.refit.recorder import LoadRecorder
from fshard.refit.traced import Target, TargetLeaf, Trace, element_text, listed, named_tensors

Names = str | Sequence[str]


def trace(
    load: Callable[..., Any],
    names: PyTree,
    into: Target | None = None,
    *,
    unused: Names = (),
    kept: Names = (),
) -> Trace:
    """Run a loader on element numbers, and return the origin of each element of its target.

    The loader is run once, in this thread; `into` keeps its values. Moves and casts of any kind are
    followed: views, cat, stack, permutations, indices, padding, copies and rebinding. An operation
    that computes with weights raises with its line. Elements that are written where no operation
    of torch is seen, as by other threads or kernels, count as not written, which raises too.

    Memory: a weight at a time, its numbers and those of the parameters that it is loaded into, of
    8 bytes an element, and 1 GiB.

    Args:
        load: `load_weights(iterable of (name, tensor))`; or `load_state_dict(state_dict)`: a
            function whose first argument is called `state_dict` is given a dict.
        names: the sources: a tree of tensors or arrays, whose values do not matter, or a module.
            Names are paths, joined by dots.
        into: the target: a module, or a dict of tensors; by default the module whose method `load`
            is.
        unused: names of sources that need not reach the target; `*` is any text.
        kept: names of parameters whose elements the loader need not write; `*` is any text.

    >>> import torch, fshard as fs
    >>> engine = torch.nn.Linear(2, 4, bias=False)
    >>> def load_weights(weights):
    ...     loaded = dict(weights)
    ...     engine.weight.data.copy_(torch.cat([loaded["q"].t(), loaded["k"]]))
    >>> names = {"q": torch.ones(2, 2), "k": torch.ones(2, 2)}
    >>> traced = fs.refit.trace(load_weights, names, engine)
    >>> for box in traced.boxes("weight"):
    ...     print(box)
    [0:2, 0:2] from q[0:2, 0:2], dims (1, 0)
    [2:4, 0:2] from k[0:2, 0:2]
    """
    target = _target_of(load, into)
    weights = weights_of(names)
    numbering = ElementNumbers(weights)
    tensors = dict(named_tensors(target))
    for name, x in tensors.items():
        if not isinstance(x, Tensor) or is_traceable_wrapper_subclass(x):
            kind = type(x).__name__
            raise RefitError(
                f"refit.trace: {name} of the target must be a plain tensor; got a {kind}. Trace "
                "the loader of the local tensors of each rank."
            )

    recorder = LoadRecorder(numbering, [*tensors.values()])
    restore = _restoring(target)
    try:
        with torch.no_grad(), recorder.reads(), recorder:
            _call(load, recorder, weights)
        if recorder.error is not None:
            raise recorder.error
        leaves = _read_targets(target, recorder)
    except Exception as error:
        if recorder.error is not None and error is not recorder.error:
            raise recorder.error from error
        if isinstance(error, TypeError) and "dict-like" in str(error):
            error.add_note(
                "Weights are an iterable of pairs: model.load_state_dict(dict(weights))."
            )
        raise
    finally:
        restore()

    result = Trace(weights, leaves, numbering)
    errors = _unused_errors(result, _listed_names(unused))
    errors += _unwritten_errors(result, _listed_names(kept))
    if errors:
        raise RefitError(f"refit.trace: {listed(errors)}.")
    return result


# -- the call of the loader ------------------------------------------------------------------------


def weights_of(names: PyTree) -> list[Weight]:
    """Return the sources in a tree; tied ones are one source with several names."""
    by_key: dict[Any, Weight] = {}
    for leaf in named_leaves(names):
        x = leaf.value
        if not is_array(x):
            raise RefitError(
                f"refit.trace: {leaf.name} of names must be a tensor or an array; got a "
                f"{type(x).__name__}. Give tensors on the device meta if there are none yet."
            )
        key = _tie_key(x)
        earlier = by_key.get(key, Weight((), tuple(x.shape), x.dtype))
        by_key[key] = earlier._replace(names=(*earlier.names, leaf.name))
    return [*by_key.values()]


def _tie_key(x: Any) -> Any:
    """Return a key that is equal for tied weights alone."""
    if isinstance(x, Tensor):
        return storage_key(x), x.storage_offset(), tuple(x.shape), x.stride()
    return tie_key(x)


def _target_of(load: Callable[..., Any], into: Target | None) -> Target:
    target = getattr(load, "__self__", None) if into is None else into
    if not isinstance(target, nn.Module | Mapping):
        raise RefitError(
            "refit.trace: into must be a module or a dict of tensors; got "
            f"{type(target).__name__}. Give the module that the loader writes."
        )
    return target


def _call(load: Callable[..., Any], recorder: LoadRecorder, weights: Sequence[Weight]) -> None:
    """Call the loader with an iterable, or with a dict."""

    def named_weights() -> Iterator[tuple[str, Tensor]]:
        for source, weight in enumerate(weights):
            for name in weight.names:
                # Without a variable: the loader alone has it, so its memory is freed early.
                yield name, recorder.weight(source)

    parameters = [*inspect.signature(load).parameters]
    takes_dict = parameters[:1] == ["state_dict"]
    load(dict(named_weights()) if takes_dict else named_weights())


def _restoring(target: Target) -> Callable[[], None]:
    """Return a function that gives a target its tensors again, where a loader replaced them.

    Elements need not be copied, since none is written.
    """
    if not isinstance(target, nn.Module):
        entries = [(target, dict(target))]
    else:
        entries: list[tuple[Any, dict[str, Any]]] = []
        for module in target.modules():
            parameters = module._parameters  # pyright: ignore[reportPrivateUsage]
            buffers = module._buffers  # pyright: ignore[reportPrivateUsage]
            entries += [(parameters, dict(parameters)), (buffers, dict(buffers))]
    memory: list[tuple[Tensor, Tensor]] = []
    for _, tensors in entries:
        memory += [(x, x.data) for x in tensors.values() if x is not None]

    def restore() -> None:
        for x, data in memory:
            if _tie_key(x) != _tie_key(data) or x.dtype != data.dtype:
                x.data = data
        for tensors, before in entries:
            are_replaced = len(tensors) != len(before)
            for name, x in before.items():
                are_replaced |= tensors.get(name) is not x
            if are_replaced:
                tensors.clear()  # and filled again in the old order
                tensors.update(before)

    return restore


def _read_targets(target: Target, recorder: LoadRecorder) -> dict[str, TargetLeaf]:
    """Return the leaves of a target after the load, with the origins of their elements."""
    computed = _computed_buffers(target)
    leaves: dict[str, TargetLeaf] = {}
    all_origins: dict[str, Origins] = {}
    firsts: dict[Any, str] = {}
    for name, x in named_tensors(target):
        first = firsts.setdefault(_tie_key(x), name)
        if first == name:
            numbers = recorder.numbers(x.detach())
            origins = origins_of(numbers, recorder.numbering)
            all_origins[name] = origins
            recorder.shadows.trim()
        else:
            origins = all_origins[first]
        leaf = TargetLeaf(name, tuple(x.shape), x.dtype, origins, first)
        is_computed = name in computed and leaf.unwritten == prod(leaf.shape)
        if not is_computed:
            leaves[name] = leaf
    return leaves


# -- errors ----------------------------------------------------------------------------------------


def _listed_names(names: Names) -> Sequence[str]:
    return [names] if isinstance(names, str) else names


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _unused_errors(traced: Trace, allowed: Sequence[str]) -> list[str]:
    """Return an error for each source of which no element reaches the target."""
    used: set[int] = set()
    for leaf in traced.targets.values():
        for index in np.unique(leaf.origins.range_index).tolist():
            used.add(traced.numbering.ranges[index].source)
    errors: list[str] = []
    for source, weight in enumerate(traced.weights):
        is_allowed = any(_matches(name, allowed) for name in weight.names)
        if source not in used and not is_allowed and prod(weight.shape) > 0:
            element = element_text(weight.name, weight.shape, 0)
            errors.append(
                f"{element} must reach the target; the loader drops {weight.name}. Name it in "
                "unused= if that is meant"
            )
    return errors


def _unwritten_errors(traced: Trace, allowed: Sequence[str]) -> list[str]:
    """Return an error for each parameter with elements that the loader does not write."""
    errors: list[str] = []
    for name, leaf in traced.targets.items():
        is_tied = leaf.tied_to != name
        if is_tied or leaf.unwritten == 0 or _matches(name, allowed):
            continue
        unwritten = (traced.numbers(name).view(-1) == UNWRITTEN).nonzero()[0]
        element = element_text(name, leaf.shape, int(unwritten))
        errors.append(
            f"{element} must be written; the loader writes no more than "
            f"{prod(leaf.shape) - leaf.unwritten} of {prod(leaf.shape)} elements. Name it in "
            "kept= if the others are not of a weight"
        )
    return errors


def _computed_buffers(target: Target) -> set[str]:
    """Return the names of buffers that are in no state dict: modules compute them themselves."""
    if not isinstance(target, nn.Module):
        return set()
    stored = target.state_dict(keep_vars=True).keys()
    return {name for name, _ in target.named_buffers(remove_duplicate=False)} - stored
