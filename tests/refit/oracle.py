"""The oracle of traces: a real load of random weights, compared with a copy by the trace."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

import fshard as fs


def random_weights(
    shapes: Mapping[str, Any], dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Return random weights, of which no two elements are equal with much probability."""
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for name, shape in shapes.items():
        weights[name] = torch.randn(shape, generator=generator).to(dtype)
    return weights


def traced_copy(
    make: Callable[[], tuple[Callable[..., Any], Any]],
    weights: Mapping[str, Tensor],
    **options: Any,
) -> fs.refit.Trace:
    """Compare a load by a trace with a real one, to the bit; return the trace.

    `make` returns a loader and its target, in the same state at each call.
    """
    load, target = make()
    before = {name: x.detach().clone() for name, x in tensors_of(target).items()}
    traced = fs.refit.trace(load, weights, target, **options)
    for name, x in tensors_of(target).items():
        assert torch.equal(x, before[name]), f"{name} was written"

    real_load, real = make()
    takes_dict = real_load.__name__ == "load_state_dict"
    with torch.no_grad():
        real_load(dict(weights) if takes_dict else iter(weights.items()))
    _, copied = make()
    _rebind(copied, traced)
    traced.copy(weights, copied)
    for name, x in tensors_of(real).items():
        actual = tensors_of(copied)[name]
        assert x.shape == actual.shape
        is_constant = torch.zeros(x.shape, dtype=torch.bool)
        if name in traced.targets:
            is_constant = traced.numbers(name) == -2
        torch.testing.assert_close(actual[~is_constant], x[~is_constant], rtol=0, atol=0)
    return traced


def tensors_of(target: Any) -> dict[str, Tensor]:
    """Return the tensors of a module or a dict by name."""
    if not isinstance(target, torch.nn.Module):
        return dict(target)
    parameters = dict(target.named_parameters(remove_duplicate=False))
    return parameters | dict(target.named_buffers(remove_duplicate=False))


def _rebind(target: Any, traced: fs.refit.Trace) -> None:
    """Give parameters that a loader replaces their new shapes and dtypes."""
    for name, x in tensors_of(target).items():
        leaf = traced.targets.get(name)
        if leaf is not None and (tuple(x.shape), x.dtype) != (leaf.shape, leaf.dtype):
            x.data = torch.empty(leaf.shape, dtype=leaf.dtype)
