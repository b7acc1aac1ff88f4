"""`split_stages`: split a sequence of layers, or a module with blocks, into the stages of a pipeline.

    embedding | block block block | block block block | block block head        balance="parameters"

A stage of layers is an `nn.Sequential` of the given layers themselves, under their names.
"""

from __future__ import annotations

import re
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, islice, pairwise
from statistics import median
from typing import Any, Literal, cast, overload

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.nn.parameter import is_lazy

from fshard.errors import LayoutError
from fshard.mesh.layout import PyTree, flatten
from fshard.pipeline.execution.halves import run_backward
from fshard.pipeline.execution.leaves import StageValue, left, map_tensors
from fshard.pipeline.split.blocks import Blocks

Layer = nn.Module | Callable[[Any], Any]
Balance = Literal["uniform", "parameters", "time", "memory"] | str | Sequence[int]
"""The quantity that stages are balanced by: see `split_stages`."""

TIMES = 5
"""Runs of a layer to measure its time."""


class Call(nn.Module):
    """A layer that is a function without parameters."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: PyTree) -> PyTree:
        """Call it."""
        return self.function(x)


@overload
def split_stages(
    layers: nn.Sequential | Iterable[Layer], n: int, balance: Balance = ..., *, sample: PyTree = ..., blocks: None = ...
) -> list[nn.Sequential]: ...


@overload
def split_stages(
    layers: nn.Module, n: int, balance: Balance = ..., *, sample: PyTree, blocks: str | Sequence[str]
) -> list[nn.Module]: ...


def split_stages(
    layers: nn.Module | Iterable[Layer],
    n: int,
    balance: Balance = "uniform",
    *,
    sample: PyTree = None,
    blocks: str | Sequence[str] | None = None,
) -> Any:
    """Return n stages of consecutive layers, such that the largest cost of a stage is minimal.

    Args:
        layers: modules and functions of one value, each of which takes the result of the one before. Or a module whose
            forward calls its `blocks` in sequence.
        n: number of stages.
        balance: the cost: "uniform", the number of layers; "parameters", of a stage (tied ones where they occur first);
            "time", of forward and backward, and "memory", kept for the backward, both measured on the `sample`;
            "type:regex", the number of layers whose class name matches. Or the number of layers of each stage.
        sample: a microbatch, for measuring, and to find the weights that a module with blocks uses around these.
        blocks: path of the blocks of a module, such as "model.layers", or several such paths.

    A stage of a module with blocks is that module without the blocks of the other stages; it shares its tensors. The
    first one's input is the microbatch (a dict by name, a tuple or list by position), and its output the input of the
    next. A later stage runs the code before its blocks without values, except for integer tensors, which are sent.

    >>> mlp = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1))
    >>> [len(stage) for stage in split_stages(mlp, 2)]
    [3, 2]
    >>> [len(stage) for stage in split_stages(mlp, 2, "parameters")]
    [2, 3]
    >>> [name for name, _ in split_stages(mlp, 2, "parameters")[1].named_parameters()]
    ['2.weight', '2.bias', '4.weight', '4.bias']
    >>> encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8, 0, batch_first=True), 3, norm=nn.LayerNorm(8))
    >>> x = torch.ones(1, 4, 8)
    >>> first, second = split_stages(encoder, 2, sample=x, blocks="layers")
    >>> [name for name, _ in second.named_parameters()][-3:], torch.equal(second(first(x)), encoder(x))
    (['layers.2.norm2.bias', 'norm.weight', 'norm.bias'], True)
    """
    if blocks is not None:
        return _of_blocks(layers, n, balance, sample, [blocks] if isinstance(blocks, str) else blocks)
    named = _named(cast(Any, layers))
    _check_count(len(named), n)
    _shape(named, sample)
    rows = iter(named.items())
    sizes = _sizes([*named.values()], n, balance, sample)
    return [nn.Sequential(OrderedDict(islice(rows, size))) for size in sizes]


def _of_blocks(module: object, n: int, balance: Balance, sample: PyTree, paths: Sequence[str]) -> list[nn.Module]:
    """Split a module between its blocks; the code before and after them counts with the first and the last."""
    if not isinstance(module, nn.Module) or sample is None:
        raise LayoutError(
            "split_stages: blocks= are those of a module, which is run once without values: give it, and sample=."
        )
    blocks = Blocks(module, paths, sample)
    _check_count(len(blocks.names), n)
    looked_into = balance in ("parameters", "time", "memory")
    layers = blocks.stages([1] * len(blocks.names)) if looked_into else blocks.blocks
    return blocks.stages(_sizes(layers, n, balance, sample))


def _shape(layers: Mapping[str, nn.Module], sample: PyTree) -> None:
    """Let layers that wait for their first call to have shapes, nn.LazyLinear for one, have it."""
    waiting = [name for name, layer in layers.items() if any(map(is_lazy, layer.parameters()))]
    if waiting and sample is None:
        raise LayoutError(
            f"split_stages: {', '.join(waiting)} have no shapes before a first call. Give a microbatch for that: sample=."
        )
    value = sample
    with torch.no_grad(), torch.random.fork_rng():
        for name in [*layers][: [*layers].index(waiting[-1]) + 1 if waiting else 0]:
            value = layers[name](value)


def _check_count(count: int, n: int) -> None:
    if not 1 <= n <= count:
        raise LayoutError(f"split_stages: {count} layers cannot be split into {n} stages. Give n from 1 to {count}.")


def _named(layers: nn.Sequential | Iterable[Layer]) -> dict[str, nn.Module]:
    names = layers._modules if isinstance(layers, nn.Sequential) else None  # pyright: ignore[reportPrivateUsage]
    if isinstance(layers, Iterable) and isinstance(layers, nn.Module) and (more := _beyond_layers(layers)):
        raise LayoutError(
            f"split_stages: {type(layers).__name__} is more than the row of its layers, no stage of which would have its "
            f"{', '.join(more)}. Make a layer of that (functions are layers, too), or cut a module that contains it between "
            'blocks: sample=x, blocks="layers".'
        )
    if not isinstance(layers, Iterable):
        raise LayoutError(
            f"split_stages cuts a list of layers, found {type(layers).__name__}. Any other module is cut between its blocks: "
            'sample=x, blocks="model.layers".'
        )
    given = [*layers]
    wrong = [f"layers[{place}] is {type(one).__name__}" for place, one in enumerate(given) if not callable(one)]
    if wrong:
        raise LayoutError(f"split_stages takes modules and functions; {', '.join(wrong)}.")
    modules = [one if isinstance(one, nn.Module) else Call(one) for one in given]
    return dict(zip(names or map(str, range(len(modules))), modules, strict=True))


def _beyond_layers(layers: nn.Module) -> list[str]:
    """Return the attributes of a container besides its layers."""
    own = vars(layers)
    rows = (nn.Sequential.forward, nn.Module.forward)
    more = ["forward"] if "forward" in own or type(layers).forward not in rows else []
    hooks = [held for key, held in own.items() if key.endswith("_hooks") and "state_dict" not in key]
    more += ["hooks"] if any(hooks) else []
    return more + [name for kind in ("_parameters", "_buffers") for name in own[kind]]


def check_balance(balance: Balance, n: int, sample: PyTree) -> None:
    """Raise unless a balance is valid for n stages; whether it fits is checked when there are layers."""
    if not isinstance(balance, str):
        sizes: Any = [*balance] if isinstance(balance, Sequence) else balance
        if sizes != [size for size in sizes[:n] if type(size) is int and size > 0]:
            raise LayoutError(
                f"split_stages: balance={sizes!r} is not a number of layers, at least 1, for each of {n} stages."
            )
    elif not balance.startswith("type:") and balance not in _BALANCES:
        raise LayoutError(
            f'split_stages: there is no balance={balance!r}. Write "uniform", "parameters", "time", "memory", "type:regex" or '
            "the number of layers of each stage."
        )
    elif balance in _MEASURED and sample is None:
        raise LayoutError(f'split_stages: balance="{balance}" is measured. Give a microbatch to measure on: sample=.')


_MEASURED = ("time", "memory")
_BALANCES = ("uniform", "parameters", *_MEASURED)


def _sizes(layers: Sequence[nn.Module], n: int, balance: Balance, sample: PyTree) -> Sequence[int]:
    if not isinstance(balance, str):
        sizes = [*balance]
        if len(sizes) != n or sum(sizes) != len(layers) or min(sizes) < 1:
            raise LayoutError(
                f"split_stages: {len(layers)} layers in {n} stages, but balance={sizes} are {len(sizes)} of {sum(sizes)} "
                "layers. Each takes at least one."
            )
        return sizes
    return partition(_costs(layers, balance, sample), n)


def _costs(layers: Sequence[nn.Module], balance: str, sample: PyTree) -> list[float]:
    """Return the cost of each layer."""
    if balance == "uniform":
        return [1.0] * len(layers)
    if balance == "parameters":
        return _parameters(layers)
    if balance.startswith("type:"):
        try:
            pattern = re.compile(balance.removeprefix("type:"), re.IGNORECASE)
        except re.error as error:
            raise LayoutError(f'split_stages: balance="{balance}" is no regular expression: {error}.') from None
        found = [float(pattern.search(type(layer).__name__) is not None) for layer in layers]
        if not any(found):
            raise LayoutError(
                f'split_stages: no layer has a class that matches "{pattern.pattern}"; they are '
                f"{', '.join(sorted({type(layer).__name__ for layer in layers}))}."
            )
        return found
    check_balance(balance, 1, sample)
    if bare := [name for layer in layers for name, x in layer.named_parameters() if x.is_meta]:
        raise LayoutError(
            f'split_stages: balance="{balance}" is measured, and {", ".join(bare[:3])} ({len(bare)} in all) have no memory. '
            'Count instead: balance="parameters", or the number of layers of each stage.'
        )
    states = [map_tensors(torch.clone, layer.state_dict()) for layer in layers]
    try:
        with torch.enable_grad(), torch.random.fork_rng():
            return _seconds(layers, sample) if balance == "time" else _bytes(layers, sample)
    finally:
        for layer, state in zip(layers, states, strict=True):
            layer.load_state_dict(state)  # restore: BatchNorm counts its inputs


def _parameters(layers: Sequence[nn.Module]) -> list[float]:
    known: set[int] = set()
    costs: list[float] = []
    for layer in layers:
        own = {id(x): x.numel() for x in layer.parameters() if id(x) not in known}
        known |= own.keys()
        costs.append(float(sum(own.values())))
    return costs


# -- the best cut ----------------------------------------------------------------------------------------------


def partition(costs: Sequence[float], parts: int) -> list[int]:
    """Return the number of costs in each part, at least one: the largest sum is minimal, then the split is most even.

    Parts are filled from the left up to a bound, initially a lower bound of the optimum. If that takes too many parts,
    some part must also take the cost at which it was closed: the next bound is the smallest of these sums.

    >>> partition([3, 1, 4, 1, 5, 9, 2, 6], 3)
    [5, 1, 2]
    >>> partition([1] * 7, 3)
    [3, 2, 2]
    """
    sums = [0, *accumulate(costs)]
    bound = max(after - before for before, after in pairwise(sums))
    while (raised := _fill(sums, parts, bound)) is not None:
        bound = raised
    return _most_even(sums, parts, bound)


def _fill(sums: Sequence[float], parts: int, bound: float) -> float | None:
    """Return None if these parts suffice within a bound, else the next candidate bound."""
    begin, closed = 0, list[float]()
    for end in range(1, len(sums)):
        if sums[end] - sums[begin] > bound:
            closed.append(sums[end] - sums[begin])
            begin = end - 1
    return min(closed) if len(closed) >= parts else None


def _most_even(sums: Sequence[float], parts: int, bound: float) -> list[int]:
    """Return the parts within a bound whose squares have the least sum; earlier parts take more costs, if that is equal."""
    count = len(sums) - 1
    best: dict[int, tuple[float, list[int]]] = {0: (0, [])}  # of the first costs, in as many parts
    for part in range(1, parts + 1):
        before, best = best, {}
        for end in range(part, count - parts + part + 1):
            for begin in range(end - 1, part - 2, -1):
                own = sums[end] - sums[begin]
                if own > bound:
                    break
                if begin in before and (end not in best or before[begin][0] + own * own < best[end][0]):
                    best[end] = before[begin][0] + own * own, [*before[begin][1], end - begin]
    return best[count][1]


# -- measuring --------------------------------------------------------------------------------------------------


def _seconds(layers: Sequence[nn.Module], sample: PyTree) -> list[float]:
    """Return the seconds of a forward and a backward of each layer, given the result of the one before."""
    value, costs = _begun(sample), list[float]()
    for layer in layers:
        weights = [get_gradient_edge(x) for x in layer.parameters() if x.requires_grad]
        seconds, result = list[float](), value
        for _ in range(TIMES):
            x, inputs = value.copied().entered()
            began = time.perf_counter()
            y = layer(x)
            result, outputs = left(y)
            gs = [torch.ones_like(one) for one in flatten(y)[0] if isinstance(one, Tensor) and one.requires_grad]
            run_backward(outputs, gs, inputs, weights)
            seconds.append(time.perf_counter() - began)
        value = result
        costs.append(median(seconds))
    return costs


def _bytes(layers: Sequence[nn.Module], sample: PyTree) -> list[float]:
    """Return the bytes that a forward of each layer keeps for its backward, without parameters."""
    value, costs = _begun(sample), list[float]()
    kept: dict[int, Tensor] = {}

    def note(x: Tensor) -> Tensor:
        if not isinstance(x, nn.Parameter):
            kept[x.untyped_storage().data_ptr()] = x
        return x

    for layer in layers:
        before = len(kept)
        with saved_tensors_hooks(note, lambda x: x):
            value, _ = left(layer(value.entered()[0]))
        costs.append(float(sum(x.untyped_storage().nbytes() for x in [*kept.values()][before:])))
    return costs


def _begun(sample: PyTree) -> StageValue:
    return StageValue(sample, (False,) * len(flatten(sample, none_is_leaf=True)[0])).copied()
