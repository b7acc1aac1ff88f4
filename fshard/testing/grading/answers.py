"""Call an answer, on one device or on each device of a mesh, and count bytes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import torch
from optree import tree_leaves, tree_map
from torch import Tensor

import fshard as fs
from fshard.testing.grading.sameness import is_same
from fshard.testing.grading.words import shown

Answer = Callable[..., Any]
"""The learner's function."""


class WrongAnswer(Exception):
    """A mistake in an answer; its text names the mistake and where to look."""


class PerDevice(list[Any]):
    """A value for each device of a mesh, in mesh order."""


def check_function(answer: Any, form: str) -> None:
    """Raise `WrongAnswer` unless the answer is a function of as many arguments as its form has."""
    if not callable(answer) or isinstance(answer, type):
        raise WrongAnswer(f"The answer must be a function, `{form}`; got {shown(answer)}.")
    if inspect.iscoroutinefunction(answer) or inspect.isgeneratorfunction(answer):
        raise WrongAnswer("The answer must be a plain function: `def` with `return`.")

    names = form.removeprefix("answer(").removesuffix(")").split(", ")
    try:
        inspect.signature(answer).bind(*names)
    except ValueError:
        return  # a builtin without a signature
    except TypeError:
        raise WrongAnswer(
            f"The answer is called as `{form}`, with {len(names)} arguments; "
            f"yours is `{inspect.signature(answer)}`."
        ) from None


def call(answer: Answer, *args: Any) -> Any:
    """Call an answer with copies of its arguments, and check that it leaves them as they are."""
    values: Any = args
    copies: Any = tree_map(_copied, values, none_is_leaf=True)
    result = answer(*copies)
    for value, before in zip(copies, args, strict=True):
        if not is_same(value, before):
            raise WrongAnswer(
                "The answer changes one of its arguments in place, and the caller's value with "
                "it. Make a new value: `x = x + 1`, not `x += 1` or `x.add_(1)`."
            )
    return result


def _copied(x: Any) -> Any:
    if isinstance(x, Tensor) and not isinstance(x, fs.Sharded):
        return x.detach().clone().requires_grad_(x.requires_grad)
    return x


def on_devices(answer: Answer, mesh: fs.Mesh, *values: Any) -> PerDevice:
    """Call an answer on each device of a mesh; return the results in mesh order.

    Args:
        answer: a function of one device's values.
        mesh: virtual devices.
        values: arrays, of which a device gets its shard, lists with a value for each device, and
            values that all devices get.
    """

    def on_device() -> Any:
        number = fs.axis_index(mesh.axis_names)
        local_values = [_of_device(value, number) for value in values]
        return call(answer, *local_values)

    return PerDevice(fs.run(on_device, mesh=mesh))


def _of_device(value: Any, number: int) -> Any:
    if isinstance(value, fs.Sharded):
        return value.shards[number]
    if isinstance(value, PerDevice):
        return value[number]
    return value


def loss_and_gradient(answer: Answer, weight: Tensor, *args: Any) -> tuple[Any, Any]:
    """Call an answer that returns a loss; return it and its gradient with respect to `weight`."""
    leaf = weight.detach().clone().requires_grad_()
    loss = answer(leaf, *args)
    if not isinstance(loss, Tensor) or loss.shape != ():
        raise WrongAnswer("The answer must return a loss: a tensor of one number.")
    if not loss.requires_grad:
        raise WrongAnswer("The loss has no gradient: does it use its first argument, undetached?")

    (gradient,) = torch.autograd.grad(loss, leaf, allow_unused=True)
    if gradient is None:
        raise WrongAnswer("The loss does not depend on its first argument.")
    return loss.detach(), gradient


def sent(run: Callable[[], Any]) -> Fraction:
    """Return the bytes that a device sends in a run."""
    with fs.ledger() as comm:
        run()
    return Fraction(comm.bytes())


def stored(tree: Any) -> int:
    """Return the bytes that a device stores of the arrays of a tree."""
    leaves = tree_leaves(tree, namespace="fshard")
    return sum(x.shards[0].nbytes for x in leaves if isinstance(x, fs.Sharded))
