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
"""Runs of a layer to measure its time."""


def check_balance(balance: Balance, n: int, sample: PyTree) -> None:
    """Raise unless a balance is valid for n stages; whether it fits is checked when there are layers."""
    if not isinstance(balance, str):
        sizes = [*balance]
        if len(sizes) != n or not all(type(size) is int and size > 0 for size in sizes):
            raise ValueError(
                f"balance must be a number of layers, at least 1, for each of {n} stages; got {sizes}."
            )
    elif not balance.startswith("type:") and balance not in _BALANCES:
        raise ValueError(
            f'balance must be "uniform", "parameters", "time", "memory", "type:regex" or the number of layers of each '
            f"stage; got {balance!r}."
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


def _layer_costs(layers: Sequence[nn.Module], balance: str, sample: PyTree) -> list[float]:
    """Return the cost of each layer."""
    if balance == "uniform":
        return [1.0] * len(layers)
    if balance == "parameters":
        return _parameter_counts(layers)
    if balance.startswith("type:"):
        pattern = re.compile(balance.removeprefix("type:"), re.IGNORECASE)
        counts = [float(pattern.search(type(layer).__name__) is not None) for layer in layers]
        if not any(counts):
            names = ", ".join(sorted({type(layer).__name__ for layer in layers}))
            raise ValueError(f"balance must match the class of a layer, {names}; got {balance!r}.")
        return counts
    if meta := [name for layer in layers for name, x in layer.named_parameters() if x.is_meta]:
        raise ValueError(
            f'balance="{balance}" must have parameters with memory; got meta tensors: {", ".join(meta[:3])} ({len(meta)} in '
            'all). Count instead: balance="parameters".'
        )
    states = [map_tensors(torch.clone, layer.state_dict()) for layer in layers]
    try:
        with torch.enable_grad(), torch.random.fork_rng():
            return (
                _measured_seconds(layers, sample)
                if balance == "time"
                else _saved_bytes(layers, sample)
            )
    finally:
        for layer, state in zip(layers, states, strict=True):
            layer.load_state_dict(state)  # restore: BatchNorm counts its inputs


def _parameter_counts(layers: Sequence[nn.Module]) -> list[float]:
    counted: set[int] = set()
    costs: list[float] = []
    for layer in layers:
        sizes = {id(x): x.numel() for x in layer.parameters() if id(x) not in counted}
        counted |= sizes.keys()
        costs.append(float(sum(sizes.values())))
    return costs


def _measured_seconds(layers: Sequence[nn.Module], sample: PyTree) -> list[float]:
    """Return the seconds of a forward and a backward of each layer, given the result of the one before."""
    value, costs = first_value(sample), list[float]()
    for layer in layers:
        weights = [get_gradient_edge(x) for x in layer.parameters() if x.requires_grad]
        seconds, result = list[float](), value
        for _ in range(_RUNS):
            x, inputs = value.copied().as_input()
            began = time.perf_counter()
            y = layer(x)
            result, outputs = as_output(y)
            gs = [
                torch.ones_like(x)
                for x in flatten_shards(y)[0]
                if isinstance(x, Tensor) and x.requires_grad
            ]
            run_backward(outputs, gs, inputs, weights)
            seconds.append(time.perf_counter() - began)
        value = result
        costs.append(median(seconds))
    return costs


def _saved_bytes(layers: Sequence[nn.Module], sample: PyTree) -> list[float]:
    """Return the bytes that a forward of each layer saves for its backward, without parameters."""
    value, costs = first_value(sample), list[float]()
    saved: dict[int, Tensor] = {}

    def pack(x: Tensor) -> Tensor:
        if not isinstance(x, nn.Parameter):
            saved[x.untyped_storage().data_ptr()] = x
        return x

    for layer in layers:
        before = len(saved)
        with saved_tensors_hooks(pack, lambda x: x):
            value, _ = as_output(layer(value.as_input()[0]))
        costs.append(float(sum(x.untyped_storage().nbytes() for x in [*saved.values()][before:])))
    return costs


# -- the best split ---------------------------------------------------------------------------------------------


def partition(costs: Sequence[float], parts: int) -> list[int]:
    """Return the number of costs in each part, at least one: the largest sum is minimal, then the split is most even.

    >>> partition([3, 1, 4, 1, 5, 9, 2, 6], 3)
    [5, 1, 2]
    >>> partition([1] * 7, 3)
    [3, 2, 2]
    """
    sums = [0, *accumulate(costs)]
    largest, _ = _best_partition(sums, parts, inf, max)
    return _best_partition(sums, parts, largest, lambda squares, cost: squares + cost * cost)[1]


def _best_partition(
    sums: Sequence[float], parts: int, bound: float, add: Callable[[float, float], float]
) -> tuple[float, list[int]]:
    """Return the least score of parts within a bound, and their sizes; earlier parts take more costs, if that is equal.

    `add` adds the cost of a part to the score of those before it.
    """
    count = len(sums) - 1
    best: dict[int, tuple[float, list[int]]] = {0: (0, [])}  # of the first costs, in as many parts
    for count_parts in range(1, parts + 1):
        before, best = best, {}
        for end in range(count_parts, count - parts + count_parts + 1):
            for begin in range(end - 1, count_parts - 2, -1):
                cost = sums[end] - sums[begin]
                if cost > bound:
                    break
                if begin in before and (
                    end not in best or add(before[begin][0], cost) < best[end][0]
                ):
                    best[end] = add(before[begin][0], cost), [*before[begin][1], end - begin]
    return best[count]
