"""`split_stages`: split a list of layers, or a module with blocks, into the stages of a pipeline.

    embedding | block block block | block block block | block block head      balance="parameters"

A stage of layers is an `nn.Sequential` of the given layers themselves, under their names.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any, cast, overload

from torch import nn

from fshard.mesh.layout import PyTree
from fshard.pipeline.split.balance import Balance, stage_sizes
from fshard.pipeline.split.blocks import Blocks

Layer = nn.Module | Callable[[Any], Any]


class Call(nn.Module):
    """A layer that is a function without parameters."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: PyTree) -> PyTree:
        """Call the function."""
        return self.function(x)


@overload
def split_stages(
    layers: nn.Sequential | Iterable[Layer],
    n: int,
    balance: Balance = ...,
    *,
    sample: PyTree = ...,
    blocks: None = ...,
) -> list[nn.Sequential]: ...


@overload
def split_stages(
    layers: nn.Module,
    n: int,
    balance: Balance = ...,
    *,
    sample: PyTree,
    blocks: str | Sequence[str],
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
        layers: modules and functions of one value, each of which takes the result of the one
            before. Or a module whose forward calls each of its `blocks` once.
        n: number of stages.
        balance: the cost: "uniform", the number of layers; "parameters", of a stage (tied ones
            where they occur first); "time", of forward and backward, and "memory", kept for the
            backward, both measured on the `sample`; "type:regex", the number of layers whose class
            name matches. Or the number of layers of each stage.
        sample: a microbatch, for measuring, and to find the weights that a module with blocks uses
            around these.
        blocks: path of the blocks of a module, such as "model.layers", or several such paths.

    A stage of a module with blocks is that module without the blocks of the other stages; it shares
    its tensors. The first one's input is the microbatch (a dict by name, a tuple or list by
    position), and its output the input of the next, with the tensors that a later stage uses:
    inputs, arguments and results of blocks, and what is computed around them. A later stage runs
    the code before its blocks without values, except for integer tensors, which are sent.

    >>> import torch
    >>> widths = [nn.Linear(8, 8), nn.Linear(8, 64), nn.Linear(64, 1)]
    >>> mlp = nn.Sequential(widths[0], nn.ReLU(), widths[1], nn.ReLU(), widths[2])
    >>> [len(stage) for stage in split_stages(mlp, 2)]
    [3, 2]
    >>> [len(stage) for stage in split_stages(mlp, 2, "parameters")]
    [2, 3]
    >>> [name for name, _ in split_stages(mlp, 2, "parameters")[1].named_parameters()]
    ['2.weight', '2.bias', '4.weight', '4.bias']
    >>> layer = nn.TransformerEncoderLayer(8, 2, 8, 0, batch_first=True)
    >>> encoder = nn.TransformerEncoder(layer, 3, norm=nn.LayerNorm(8))
    >>> x = torch.ones(1, 4, 8)
    >>> first, second = split_stages(encoder, 2, sample=x, blocks="layers")
    >>> [name for name, _ in second.named_parameters()][-3:]
    ['layers.2.norm2.bias', 'norm.weight', 'norm.bias']
    >>> torch.equal(second(first(x)), encoder(x))
    True
    """
    if blocks is None:
        return _split_layers(cast(Any, layers), n, balance, sample)
    if not isinstance(layers, nn.Module):
        raise TypeError(
            f"layers must be a module to be split between its blocks=; got {type(layers).__name__}."
        )
    if sample is None:
        raise ValueError(
            "blocks= must come with a microbatch, on whose shapes the module is run once. "
            "Give sample=."
        )
    paths = [blocks] if isinstance(blocks, str) else blocks
    return _split_between_blocks(layers, n, balance, sample, paths)


def _split_layers(
    layers: nn.Sequential | Iterable[Layer], n: int, balance: Balance, sample: PyTree
) -> list[nn.Sequential]:
    named_layers = _named_layers(layers)
    sizes = stage_sizes([*named_layers.values()], n, balance, sample)
    remaining = iter(named_layers.items())
    return [nn.Sequential(OrderedDict(islice(remaining, size))) for size in sizes]


def _split_between_blocks(
    module: nn.Module, n: int, balance: Balance, sample: PyTree, paths: Sequence[str]
) -> list[nn.Module]:
    split = Blocks(module, paths, sample)
    measured = split.blocks
    if balance in ("parameters", "time", "memory"):
        # The cost of code before and after the blocks counts with the first and the last one, so
        # stages of one block are measured.
        measured = split.stages([1] * len(split.names))
    return split.stages(stage_sizes(measured, n, balance, sample))


def _named_layers(layers: nn.Sequential | Iterable[Layer]) -> dict[str, nn.Module]:
    """Return the layers by name, functions as modules."""
    if isinstance(layers, nn.Module):
        _validate_plain(layers)
        named = vars(layers)["_modules"]
    else:
        named = dict(enumerate(layers))

    modules: dict[str, nn.Module] = {}
    errors: list[str] = []
    for name, layer in named.items():
        if not callable(layer):
            errors.append(f"layers[{name}] is {type(layer).__name__}")
        modules[str(name)] = layer if isinstance(layer, nn.Module) else Call(layer)
    if errors:
        raise TypeError(f"layers must be modules and functions; got {', '.join(errors)}.")
    return modules


def _validate_plain(layers: nn.Module) -> None:
    """Raise if a module does more than call layers one after the other: no stage would do it."""
    attributes = vars(layers)
    extras: list[str] = []
    if type(layers) not in (nn.Sequential, nn.ModuleList) or "forward" in attributes:
        extras.append("forward")
    if _has_hooks(attributes):
        extras.append("hooks")
    extras += [*attributes["_parameters"], *attributes["_buffers"]]
    if extras:
        raise TypeError(
            "layers must be a list of layers or a plain nn.Sequential; "
            f"got {type(layers).__name__} with its own {', '.join(extras)}, which no stage would "
            'have. Split it between its blocks: sample=x, blocks="model.layers".'
        )


def _has_hooks(attributes: dict[str, Any]) -> bool:
    for name, hooks in attributes.items():
        is_of_call = name.endswith("_hooks") and "state_dict" not in name
        if is_of_call and hooks:
            return True
    return False
