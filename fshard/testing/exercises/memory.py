"""Exercises of the notebook "Memory"."""

from __future__ import annotations

import torch
from torch import Tensor

import fshard as fs
from fshard.testing.grading import Answer, Exercise, WrongAnswer, is_same, loss_and_gradient

__all__ = ["EXERCISES"]


# -- a vector in the memory of the host -----------------------------------------------------------


def grade_host(answer: Answer) -> None:
    for n in (2, 3):
        layout = answer(fs.make_mesh({"data": n}))
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
    name="memory.host",
    question=(
        'Return the layout of a vector that is sharded over the axis "data" of `mesh`, and is'
        " stored in the memory of the host."
    ),
    form="answer(mesh)",
    hints=(
        "A layout is a mesh, a spec, and a kind of memory.",
        '`fs.Layout(mesh, P("data"), ...)`.',
    ),
    why=(
        "Offloading is a layout, too: `fs.reshard` moves an array there and back, and a ledger"
        " counts."
    ),
    grade=grade_host,
)


# -- an expression in place -----------------------------------------------------------------------


def grade_in_place(answer: Answer) -> None:
    for length in (1000, 4000):
        x = torch.linspace(-1, 1, length)
        argument = x.clone()
        with fs.memory.limit() as used:
            y = answer(argument)
            peak = used.peak() - x.nbytes

        if not isinstance(y, Tensor):
            raise WrongAnswer("The answer must return a tensor.")
        if not torch.equal(argument, x):
            raise WrongAnswer(
                "The argument itself is changed in place. Begin with an operation that makes a new"
                " tensor; from then on it is yours to change."
            )
        if not is_same(y, torch.tanh(x) * 2 + 1):
            raise WrongAnswer("The values are not `torch.tanh(x) * 2 + 1`.")
        if peak > 1.5 * x.nbytes:
            raise WrongAnswer(
                f"Beside {x.nbytes} bytes of x the peak is {peak}: while a product is made, its"
                " operand is there, too. Change your own tensors in place: `mul_`, `add_`, or"
                " `out=`."
            )


IN_PLACE = Exercise(
    name="memory.in_place",
    question=(
        "Compute `torch.tanh(x) * 2 + 1` such that, beside `x`, never more than one tensor of its"
        " size exists. The caller's `x` stays as it is."
    ),
    form="answer(x)",
    hints=(
        "Which tensors exist while `* 2` runs? Its operand and its result.",
        "`y = torch.tanh(x)` is a new tensor, that no one else has.",
        "`y.mul_(2).add_(1)`.",
    ),
    why="An optimizer's update is such an expression: with three temporaries it doubles the peak.",
    grade=grade_in_place,
)


# -- activations that are computed again ----------------------------------------------------------

LAYERS, ROWS, WIDTH = 6, 64, 8


def layer(w: Tensor, x: Tensor) -> Tensor:
    """Compute three activations, which autograd saves for the backward."""
    return torch.tanh(torch.tanh(torch.tanh(x @ w) @ w) @ w)


def loss_of_stack(weights: Tensor, x: Tensor) -> Tensor:
    for w in weights:
        x = layer(w, x)
    return x.square().mean()


def grade_recompute(answer: Answer) -> None:
    def loss_of_answer(weights: Tensor, x: Tensor) -> Tensor:
        return answer(weights, x, layer)

    for rows in (ROWS, 2 * ROWS):
        draw = torch.Generator().manual_seed(rows)
        weights = torch.randn(LAYERS, WIDTH, WIDTH, generator=draw) / 2
        x = torch.randn(rows, WIDTH, generator=draw)
        expected_loss, expected_gradient = loss_and_gradient(loss_of_stack, weights, x)
        with fs.memory.limit() as used:
            loss, gradient = loss_and_gradient(loss_of_answer, weights, x)
        peak = used.peak()

        if not is_same(loss, expected_loss):
            raise WrongAnswer(
                "The loss is another one: apply all layers in order, then `.square().mean()`."
            )
        if not is_same(gradient, expected_gradient):
            raise WrongAnswer(
                "The loss is right and the gradient is not. Detached, or under `no_grad`, a layer"
                " saves nothing, and has no gradient either. Recompute instead."
            )
        activation_bytes = rows * WIDTH * 4
        if peak > (LAYERS + 8) * activation_bytes:
            raise WrongAnswer(
                f"The peak is {peak / activation_bytes:.1f} activations: all three of each of"
                f" {LAYERS} layers are saved for the backward. Keep the input of each layer alone."
            )


RECOMPUTE = Exercise(
    name="memory.recompute",
    question=(
        "`layer(w, x)` saves three activations for its backward. Write the loss of a stack of them,"
        " one for each `w` of `weights`: `.square().mean()` of the last result, such that of each"
        " layer only the input is saved, and the rest is computed again in the backward."
    ),
    form="answer(weights, x, layer)",
    hints=(
        "`fs.remat(function)` is the function that saves its arguments alone.",
        "Wrap the layer, not the stack: else all is computed again at once, and saved then.",
        "`for w in weights: x = fs.remat(layer)(w, x)`.",
    ),
    why=(
        "A third more computation for a fraction of the memory: how long models are trained at all."
    ),
    grade=grade_recompute,
)

EXERCISES = (HOST, IN_PLACE, RECOMPUTE)
