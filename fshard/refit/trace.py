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
from dataclasses import dataclass
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
from fshard.mesh.layout.arithmetic import strides, unravel
from fshard.refit.leaves import named_leaves
from fshard.refit.numbers import CONSTANT, UNWRITTEN, ElementNumbers, Weight
from fshard.refit.origins import Origins, SourceBox, numbers_of, origins_of
from fshard.refit.recorder import LoadRecorder

Names = str | Sequence[str]
Target = nn.Module | Mapping[str, Tensor]
_SHOWN = 8
"""Errors have the names of so many leaves at most."""


@dataclass(frozen=True)
class TargetLeaf:
    """One parameter or buffer of a target, and the origins of its elements.

    Args:
        name: in the target.
        shape: of its tensor.
        dtype: of its tensor.
        origins: the boxes of sources that its elements are copied from, as arrays.
        tied_to: the name of the first leaf with the same memory; else the name of this one.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    origins: Origins
    tied_to: str

    @property
    def unwritten(self) -> int:
        """The number of elements that the loader does not write."""
        written = int(self.origins.sizes.sum()) + self.origins.constant_count
        return prod(self.shape) - written


@dataclass(frozen=True)
class Trace:
    """The origin of each element of a target: see `trace`.

    Args:
        weights: the sources that were given to the loader.
        targets: the parameters and buffers of the target that the loader writes, by name.
        numbering: the numbers of the sources' elements.
    """

    weights: Sequence[Weight]
    targets: Mapping[str, TargetLeaf]
    numbering: ElementNumbers

    def boxes(self, name: str) -> Iterator[SourceBox]:
        """Yield the boxes of one target leaf: what is copied from where."""
        return self.targets[name].origins.boxes(self.numbering.ranges, self.weights)

    def numbers(self, name: str) -> Tensor:
        """Return the number of each element of one target leaf: see `fshard.refit.numbers`."""
        leaf = self.targets[name]
        return numbers_of(leaf.origins, leaf.shape, self.numbering)

    @torch.no_grad()
    def copy(self, weights: Mapping[str, Tensor], into: Target) -> None:
        """Write full weights into a target, as the loader does: same elements, same casts.

        Elements that the loader does not write, or sets without a source, stay as they are.
        """
        tensors = dict(named_tensors(into))
        for name, leaf in self.targets.items():
            if leaf.tied_to != name:
                continue
            x = tensors[name].detach()
            for box in self.boxes(name):
                x[box.target].copy_(box.read(weights[box.source]))

    def check(self, expected: Trace) -> None:
        """Raise unless another trace maps the same elements, of sources with the same names.

        Such as the trace of a reference loader, of another engine, or of the first load of this
        one. The error has, for each parameter that differs, the first element.
        """
        errors: list[str] = []
        for name in dict.fromkeys([*expected.targets, *self.targets]):
            errors += _differences(name, self, expected)
        if errors:
            raise RefitError(f"refit: a trace must be the expected one; {_listed(errors)}.")

    def __repr__(self) -> str:
        boxes = sum([len(leaf.origins.target) for leaf in self.targets.values()])
        return f"Trace({len(self.weights)} weights -> {len(self.targets)} targets, {boxes} boxes)"


def trace(
    load: Callable[..., Any],
    names: PyTree,
    into: Target | None = None,
    *,
    unused: Names = (),
    kept: Names = (),
) -> Trace:
    """Run a loader on element numbers, and return the origin of each element of its target.

    The loader is run once, in this thread, and `into` keeps its values. Moves and casts of any
    kind are followed: views, cat, stack, permutations, indices, padding, copies and rebinding. An
    operation that computes with weights raises with its line. Memory: at most the numbers of one
    weight and of the parameters that it is loaded into, 8 bytes an element, and 1 GiB.

    Args:
        load: `load_weights(iterable of (name, tensor))`; or `load_state_dict(state_dict)`: a
            function whose first argument is called `state_dict` is given a dict.
        names: the sources: a tree of tensors, arrays, or objects with a shape and a dtype. Such as
            parameters of `fs.shard_params`, or a module. Names are paths, joined by dots.
        into: the target: a module, or a dict of tensors; by default the module whose method `load`
            is.
        unused: names of sources that need not reach the target; `*` is any text.
        kept: names of parameters whose elements the loader need not write; `*` is any text.

    >>> import torch, fshard as fs
    >>> engine = torch.nn.Linear(2, 4, bias=False)
    >>> def load_weights(weights):
    ...     loaded = dict(weights)
    ...     engine.weight.data.copy_(torch.cat([loaded["q"].t(), loaded["k"]]))
    >>> traced = fs.refit.trace(load_weights, {"q": torch.ones(2, 2), "k": torch.ones(2, 2)}, engine)
    >>> for box in traced.boxes("weight"):
    ...     print(box.target, box.source, box.begin, box.along)
    (slice(0, 2, None), slice(0, 2, None)) q (0, 0) (1, 0)
    (slice(2, 4, None), slice(0, 2, None)) k (0, 0) (0, 1)
    """
    target = _target_of(load, into)
    weights = weights_of(names)
    numbering = ElementNumbers(weights)
    before = dict(named_tensors(target))
    for name, x in before.items():
        if is_traceable_wrapper_subclass(x):
            kind = type(x).__name__
            raise RefitError(
                f"refit.trace: {name} of the target must be a plain tensor; got a {kind}. Trace "
                "the loader of the local tensors of each rank."
            )

    recorder = LoadRecorder(numbering, [*before.values()])
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
        raise
    finally:
        restore()

    result = Trace(weights, leaves, numbering)
    errors = _unused_errors(result, _listed_names(unused))
    errors += _unwritten_errors(result, _listed_names(kept))
    if errors:
        raise RefitError(f"refit.trace: {_listed(errors)}.")
    return result


def check_ranks(traces: Sequence[Trace]) -> None:
    """Raise unless every element of the sources reaches a rank: the traces are of all ranks.

    A rank of an engine with tensor parallelism loads a part of most weights. A part that no rank
    loads is lost, such as where all ranks load the first one.

    >>> import torch, fshard as fs
    >>> half = {"w": torch.zeros(2)}
    >>> def load(weights):
    ...     half["w"].copy_(dict(weights)["w"][:2])
    >>> fs.refit.check_ranks([fs.refit.trace(load, {"w": torch.ones(4)}, half)] * 2)
    Traceback (most recent call last):
    fshard.errors.RefitError: refit: every element must reach a rank; w[2] reaches none.
    """
    errors: list[str] = []
    for source, weight in enumerate(traces[0].weights):
        reached = torch.zeros(weight.shape, dtype=torch.bool)
        for traced in traces:
            _mark_reached(reached, traced, source)
        if not reached.all():
            first = (~reached.view(-1)).nonzero()[0].item()
            errors.append(f"{_element(weight.name, weight.shape, int(first))} reaches none")
    if errors:
        raise RefitError(f"refit: every element must reach a rank; {_listed(errors)}.")


# -- the call of the loader -------------------------------------------------------------------------------------------


def weights_of(names: PyTree) -> list[Weight]:
    """Return the sources in a tree; tied ones are one source with several names."""
    by_key: dict[Any, Weight] = {}
    for leaf in named_leaves(names):
        x = leaf.value
        shape = getattr(x, "shape", None)
        dtype = getattr(x, "dtype", None)
        if shape is None or not isinstance(dtype, torch.dtype):
            raise RefitError(
                f"refit.trace: {leaf.name} of names must have a shape and a dtype; got a "
                f"{type(x).__name__}. Give tensors, on the device meta if there are none yet."
            )
        key = _tie_key(x)
        known = by_key.get(key)
        names_of_x = (leaf.name,) if known is None else (*known.names, leaf.name)
        by_key[key] = Weight(names_of_x, tuple(shape), dtype)
    return [*by_key.values()]


def _tie_key(x: Any) -> Any:
    """Return a key that is equal for tied weights alone."""
    if isinstance(x, Tensor):
        storage = x.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]
        return storage, x.storage_offset(), tuple(x.shape), x.stride()
    return tie_key(x) if is_array(x) else id(x)


def _target_of(load: Callable[..., Any], into: Target | None) -> Target:
    target = inspect.getattr_static(load, "__self__", None) if into is None else into
    if into is None and inspect.ismethod(load):
        target = load.__self__
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


def named_tensors(target: Target) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a target, tied ones under each name."""
    if not isinstance(target, nn.Module):
        yield from target.items()
        return
    yield from target.named_parameters(remove_duplicate=False)
    yield from target.named_buffers(remove_duplicate=False)


def _restoring(target: Target) -> Callable[[], None]:
    """Return a function that gives a target its tensors again, where a loader replaced them.

    Elements need not be copied, since none is written.
    """
    if not isinstance(target, nn.Module):
        entries = [(target, dict(target))]
    else:
        entries: list[tuple[Any, dict[str, Any]]] = []
        for module in target.modules():
            for tensors in (module._parameters, module._buffers):  # pyright: ignore[reportPrivateUsage]
                entries.append((tensors, dict(tensors)))
    memory = [(x, x.data) for _, tensors in entries for x in tensors.values() if x is not None]

    def restore() -> None:
        for x, data in memory:
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


# -- errors -----------------------------------------------------------------------------------------------------------


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
            errors.append(
                f"{_element(weight.name, weight.shape, 0)} must reach the target; the loader drops "
                f"{weight.name}. Name it in unused= if that is meant"
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
        element = _element(name, leaf.shape, int(unwritten))
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


def _listed(errors: Sequence[str]) -> str:
    more = len(errors) - _SHOWN
    suffix = f"; and {more} more" if more > 0 else ""
    return "; ".join(errors[:_SHOWN]) + suffix


def _element(name: str, shape: Sequence[int], position: int) -> str:
    """Return an element in words: w[2, 0]."""
    index = unravel(position, [*shape])
    return f"{name}[{', '.join(map(str, index))}]" if shape else name


def _differences(name: str, actual: Trace, expected: Trace) -> list[str]:
    """Return how a target leaf differs between two traces, in at most one error."""
    leaf = actual.targets.get(name)
    other = expected.targets.get(name)
    if leaf is None or other is None:
        which = "missing" if leaf is None else "not expected"
        return [f"{name} is {which}"]
    if (leaf.shape, leaf.dtype) != (other.shape, other.dtype):
        return [f"{name} must be {other.dtype} of {other.shape}; got {leaf.dtype} of {leaf.shape}"]
    numbers = actual.numbers(name).view(-1)
    expected_numbers = _translated(expected, name, actual)
    wrong = (numbers != expected_numbers).nonzero()
    if len(wrong) == 0:
        return []
    position = int(wrong[0])
    element = _element(name, leaf.shape, position)
    got = _origin(actual, int(numbers[position]))
    wanted = _origin(expected, int(expected.numbers(name).view(-1)[position]))
    return [f"{element} must be {wanted}; got {got}, and {len(wrong) - 1} more elements differ"]


def _translated(expected: Trace, name: str, actual: Trace) -> Tensor:
    """Return the numbers of a leaf in the numbering of another trace; -3 where it has none."""
    numbers = expected.numbers(name).view(-1)
    indices = expected.numbering.range_indices(numbers)
    firsts: dict[Any, int] = {}
    for range_ in actual.numbering.ranges:
        firsts[actual.weights[range_.source], range_.dtypes] = range_.first

    result = numbers.clone()
    for index in indices.unique().tolist():
        if index < 0:
            continue
        range_ = expected.numbering.ranges[index]
        first = firsts.get((expected.weights[range_.source], range_.dtypes))
        is_in_range = indices == index
        shifted = numbers - range_.first + (first or 0)
        result[is_in_range] = -3 if first is None else shifted[is_in_range]
    return result


def _origin(traced: Trace, number: int) -> str:
    """Return the origin of an element with a number, in words."""
    if number < 0:
        return "a constant" if number == CONSTANT else "as before the load"
    index = int(traced.numbering.range_indices(torch.tensor([number])))
    range_ = traced.numbering.ranges[index]
    weight = traced.weights[range_.source]
    casts = "".join([f" as {dtype}" for dtype in range_.dtypes[1:]]).replace("torch.", "")
    return _element(weight.name, weight.shape, number - range_.first) + casts


def _mark_reached(reached: Tensor, traced: Trace, source: int) -> None:
    """Set the elements of a source that reach a rank."""
    steps = torch.tensor(strides(reached.shape))
    for leaf in traced.targets.values():
        for box in leaf.origins.boxes(traced.numbering.ranges, traced.weights):
            if box.source != traced.weights[source].name:
                continue
            position = (torch.tensor(box.begin, dtype=torch.int64) * steps).sum()
            for side, dim, step in zip(box.target, box.along, box.steps, strict=True):
                jump = step * int(steps[dim]) if dim >= 0 else 0
                position = position[..., None] + torch.arange(side.stop - side.start) * jump
            reached.view(-1)[position.reshape(-1)] = True
