"""Exercises of the notebook "Memory"."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import fshard as fs
from fshard.testing.grading import (
    Exercise,
    WrongAnswer,
    as_function,
    is_same,
    loss_and_gradient,
)


def _grade_host(answer: Any) -> None:
    function = as_function(answer, "answer(mesh)")
    for n in (2, 3):
        mesh = fs.make_mesh({"data": n})
        layout = function(mesh)
        if not isinstance(layout, fs.Layout):
            raise WrongAnswer("The answer must return a layout, `fs.Layout(mesh, ...)`.")
        with fs.memory.limit() as used:
            array = fs.device_put(torch.ones(12), layout)
        if used.now("device") > 0:
            raise WrongAnswer(
                f"It is in the memory of the device, {used.now('device')} bytes of each. The third"
                " argument of a `Layout` is the kind of memory."
            )
        if used.now("host") == 0:
            raise WrongAnswer('It is in neither memory. The kind is "host".')
        if array.shards[0].numel() > 12 // n:
            raise WrongAnswer(f"Each host of {n} devices stores all elements. Shard them.")


HOST = Exercise(
    "memory.host",
    'Return the layout of a vector that is sharded over the axis "data" of `mesh`, and is stored in'
    " the memory of the host.",
    "answer(mesh)",
    (
        "A layout is a mesh, a spec, and a kind of memory.",
        '`fs.Layout(mesh, P("data"), ...)`.',
    ),
    "Offloading is a layout, too: `fs.reshard` moves an array there and back, and a ledger counts.",
    _grade_host,
)


def _plain(x: Tensor) -> Tensor:
    return torch.tanh(x) * 2 + 1


def _grade_in_place(answer: Any) -> None:
    function = as_function(answer, "answer(x)")
    for length in (1000, 4000):
        x = torch.linspace(-1, 1, length)
        given = x.clone()
        with fs.memory.limit() as used:
            y = function(given)
            peak = used.peak() - x.nbytes
        if not isinstance(y, Tensor):
            raise WrongAnswer("The answer must return a tensor.")
        if not torch.equal(given, x):
            raise WrongAnswer(
                "The argument itself is changed in place. Begin with an operation that makes a new"
                " tensor; from then on it is yours to change."
            )
        if not is_same(y, _plain(x)):
            raise WrongAnswer("The values are not `torch.tanh(x) * 2 + 1`.")
        if peak > 1.5 * x.nbytes:
            raise WrongAnswer(
                f"Beside {x.nbytes} bytes of x the peak is {peak}: while a product is made, its"
                " operand"
                " is there, too. Change your own tensors in place: `mul_`, `add_`, or `out=`."
            )


IN_PLACE = Exercise(
    "memory.in_place",
    "Compute `torch.tanh(x) * 2 + 1` such that, beside `x`, never more than one tensor of its size"
    " exists. The caller's `x` stays as it is.",
    "answer(x)",
    (
        "Which tensors exist while `* 2` runs? Its operand and its result.",
        "`y = torch.tanh(x)` is a new tensor, that no one else has.",
        "`y.mul_(2).add_(1)`.",
    ),
    "An optimizer's update is such an expression: with three temporaries it doubles the peak.",
    _grade_in_place,
)

_LAYERS, _ROWS, _WIDTH = 6, 64, 8


def _layer(w: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(torch.tanh(torch.tanh(x @ w) @ w) @ w)


def _stack(weights: Tensor, x: Tensor) -> Tensor:
    for w in weights:
        x = _layer(w, x)
    return x.square().mean()


def _grade_recompute(answer: Any) -> None:
    function = as_function(answer, "answer(weights, x, layer)")
    for rows in (_ROWS, 2 * _ROWS):
        draw = torch.Generator().manual_seed(rows)
        weights = torch.randn(_LAYERS, _WIDTH, _WIDTH, generator=draw) / 2
        x = torch.randn(rows, _WIDTH, generator=draw)
        expected = loss_and_gradient(_stack, weights, x)
        with fs.memory.limit() as used:
            actual = loss_and_gradient(lambda w, x: function(w, x, _layer), weights, x)
        peak = used.peak()
        if not is_same(actual[0], expected[0]):
            raise WrongAnswer(
                "The loss is another one: apply all layers in order, then `.square().mean()`."
            )
        if not is_same(actual[1], expected[1]):
            raise WrongAnswer(
                "The loss is right and the gradient is not. Detached, or under `no_grad`, a layer"
                " saves nothing, and has no gradient either. Recompute instead."
            )
        one = rows * _WIDTH * 4
        saved = (_LAYERS + 8) * one
        if peak > saved:
            raise WrongAnswer(
                f"The peak is {peak / one:.1f} activations: all three of each of {_LAYERS}"
                " layers are"
                " saved for the backward. Keep the input of each layer alone."
            )


RECOMPUTE = Exercise(
    "memory.recompute",
    "`layer(w, x)` saves three activations for its backward. Write the loss of a stack of them, one"
    " for each `w` of `weights`: `.square().mean()` of the last result, such that of each layer"
    " only"
    " the input is saved, and the rest is computed again in the backward.",
    "answer(weights, x, layer)",
    (
        "`fs.remat(function)` is the function that saves its arguments alone.",
        "Wrap the layer, not the stack: else all is computed again at once, and saved then.",
        "`for w in weights: x = fs.remat(layer)(w, x)`.",
    ),
    "A third more computation for a fraction of the memory: how long models are trained at all.",
    _grade_recompute,
)

EXERCISES = (HOST, IN_PLACE, RECOMPUTE)
