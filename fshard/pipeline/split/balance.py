"""The costs of layers, and the split with the smallest largest cost of a stage."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from math import inf
from statistics import median
from typing import Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks

from fshard.mesh.layout import PyTree
from fshard.mesh.layout.sharded import flatten_shards
from fshard.pipeline.execution.leaves import as_output, first_value, map_tensors
from fshard.pipeline.execution.split_backward import run_backward

Balance = Literal["uniform", "parameters", "time", "memory"] | str | Sequence[int]
"""The quantity that stages are balanced by: see `split_stages`."""

_MEASURED = ("time", "memory")
_BALANCES = ("uniform", "parameters", *_MEASURED)
_RUNS = 5
"""Runs of a layer to measure its time, of which the median counts."""


def check_balance(balance: Balance, n: int, sample: PyTree) -> None:
    """Raise unless a balance is valid for n stages.

    Whether it fits the layers is checked when there are layers.
    """
    if not isinstance(balance, str):
        sizes = [*balance]
        are_positive = all([type(size) is int and size > 0 for size in sizes])
        if len(sizes) != n or not are_positive:
            raise ValueError(
                f"balance must be a number of layers, at least 1, for each of {n} stages; "
                f"got {sizes}."
            )
    elif not balance.startswith("type:") and balance not in _BALANCES:
        raise ValueError(
            'balance must be "uniform", "parameters", "time", "memory", "type:regex" or the number '
            f"of layers of each stage; got {balance!r}."
        )
    elif balance in _MEASURED and sample is None:
        raise ValueError(f'balance="{balance}" must have a microbatch to measure on. Give sample=.')


def stage_sizes(
    layers: Sequence[nn.Module], n: int, balance: Balance, sample: PyTree
) -> Sequence[int]:
    """Return the number of layers of each stage."""
    if not 1 <= n <= len(layers):
        raise ValueError(f"n must be from 1 to the number of layers, {len(layers)}; got {n}.")
    check_balance(balance, n, sample)
    if isinstance(balance, str):
        return partition(_layer_costs(layers, balance, sample), n)
    if sum(balance) != len(layers):
        raise ValueError(f"balance must add up to {len(layers)} layers; got {[*balance]}.")
    return balance


# -- the costs of layers ---------------------------------------------------------------------------


def _layer_costs(layers: Sequence[nn.Module], balance: str, sample: PyTree) -> list[float]:
    """Return the cost of each layer."""
    if balance == "uniform":
        return [1.0] * len(layers)
    if balance == "parameters":
        return _parameter_counts(layers)
    if balance.startswith("type:"):
        return _class_matches(layers, balance)

    _validate_measurable(layers, balance)
    states = [map_tensors(torch.clone, layer.state_dict()) for layer in layers]
    try:
        with torch.enable_grad(), torch.random.fork_rng():
            if balance == "time":
                return _measured_seconds(layers, sample)
            return _saved_bytes(layers, sample)
    finally:
        for layer, state in zip(layers, states, strict=True):
            layer.load_state_dict(state)  # BatchNorm, for one, counts its inputs


def _parameter_counts(layers: Sequence[nn.Module]) -> list[float]:
    """Return the number of elements of each layer; tied parameters count where they occur first."""
    counted: set[int] = set()
    costs: list[float] = []
    for layer in layers:
        count = 0
        for x in layer.parameters():
            if id(x) not in counted:
                counted.add(id(x))
                count += x.numel()
        costs.append(float(count))
    return costs


def _class_matches(layers: Sequence[nn.Module], balance: str) -> list[float]:
    """Return 1 for each layer whose class matches "type:regex", 0 for others."""
    pattern = re.compile(balance.removeprefix("type:"), re.IGNORECASE)
    names = [type(layer).__name__ for layer in layers]
    costs = [float(pattern.search(name) is not None) for name in names]
    if not any(costs):
        raise ValueError(
            f"balance must match the class of a layer, {', '.join(sorted(set(names)))}; "
            f"got {balance!r}."
        )
    return costs


def _validate_measurable(layers: Sequence[nn.Module], balance: str) -> None:
    meta: list[str] = []
    for layer in layers:
        meta += [name for name, x in layer.named_parameters() if x.is_meta]
    if meta:
        raise ValueError(
            f'balance="{balance}" must have parameters with memory; got meta tensors: '
            f'{", ".join(meta[:3])} ({len(meta)} in all). Count instead: balance="parameters".'
        )


def _measured_seconds(layers: Sequence[nn.Module], sample: PyTree) -> list[float]:
    """Return the seconds of a forward and a backward of each layer.

    Its input is the result of the layer before it.
    """
    value = first_value(sample)
    costs: list[float] = []
    for layer in layers:
        weights = [get_gradient_edge(x) for x in layer.parameters() if x.requires_grad]
        seconds: list[float] = []
        result = value
        for _ in range(_RUNS):
            x, inputs = value.copied().as_input()
            start = time.perf_counter()
            y = layer(x)
            result, outputs = as_output(y)
            run_backward(outputs, _ones_like_outputs(y), inputs, weights)
            seconds.append(time.perf_counter() - start)
        value = result
        costs.append(median(seconds))
    return costs


def _ones_like_outputs(y: PyTree) -> list[Tensor]:
    gs: list[Tensor] = []
    for x in flatten_shards(y)[0]:
        if isinstance(x, Tensor) and x.requires_grad:
            gs.append(torch.ones_like(x))
    return gs


def _saved_bytes(layers: Sequence[nn.Module], sample: PyTree) -> list[float]:
    """Return the bytes that a forward of each layer saves for its backward, without parameters.

    A storage counts once, for the first layer that saves it.
    """
    saved: dict[int, Tensor] = {}  # by address; tensors are kept, so that no address is used again

    def pack(x: Tensor) -> Tensor:
        if not isinstance(x, nn.Parameter):
            saved[x.untyped_storage().data_ptr()] = x
        return x

    value = first_value(sample)
    costs: list[float] = []
    for layer in layers:
        count_before = len(saved)
        with saved_tensors_hooks(pack, lambda x: x):
            x, _ = value.as_input()
            value, _ = as_output(layer(x))
        newly_saved = [*saved.values()][count_before:]
        total = sum([x.untyped_storage().nbytes() for x in newly_saved])
        costs.append(float(total))
    return costs


# -- the best split --------------------------------------------------------------------------------


def partition(costs: Sequence[float], parts: int) -> list[int]:
    """Return the number of costs in each part, at least one.

    The largest sum is minimal; of all such splits, this is the most even one.

    >>> partition([3, 1, 4, 1, 5, 9, 2, 6], 3)
    [5, 1, 2]
    >>> partition([1] * 7, 3)
    [3, 2, 2]
    """
    sums = [0, *accumulate(costs)]
    largest, _ = _best_partition(sums, parts, inf, max)

    def add_square(squares: float, cost: float) -> float:
        return squares + cost * cost  # their sum is least where costs are most even

    _, sizes = _best_partition(sums, parts, largest, add_square)
    return sizes


def _best_partition(
    sums: Sequence[float], parts: int, bound: float, add: Callable[[float, float], float]
) -> tuple[float, list[int]]:
    """Return the least score of parts whose costs are within a bound, and their sizes.

    `sums` are the costs added up, from 0; `add` adds the cost of a part to the score of the parts
    before it. Of splits with one score, the one whose earlier parts take more costs is returned.

    Dynamic programming: the best split of the first `end` costs into so many parts is a best split
    of the first `begin` costs into one part less, and one more part.
    """
    count = len(sums) - 1
    best: dict[int, tuple[float, list[int]]] = {0: (0, [])}  # by the number of first costs
    for number in range(1, parts + 1):
        before = best
        best = {}
        fewest = number  # each part has at least one cost, and so have the parts after this one
        most = count - parts + number
        for end in range(fewest, most + 1):
            for begin in range(end - 1, fewest - 2, -1):
                cost = sums[end] - sums[begin]
                if cost > bound:
                    break  # an earlier begin costs more
                if begin not in before:
                    continue
                score_before, sizes_before = before[begin]
                score = add(score_before, cost)
                if end not in best or score < best[end][0]:
                    best[end] = score, [*sizes_before, end - begin]
    return best[count]
