"""Results that autograd records, with the backward of a differentiable program.

    forward     step(inputs) ─> results           on detached tensors, as always
    backward    program(inputs), with the draws of the step, and its vjp

So inputs that require grad cost nothing in a step, and a second derivative costs a run of the
program. A backward with `create_graph=True` is differentiable again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function

from fshard.mesh.collectives.autograd import Tensors, recorded
from fshard.mesh.layout import PyTree, flatten, unflatten
from fshard.mesh.layout.sharded import Sharded, flatten_shards
from fshard.optim.leaves import firsts_of, like, shards_of
from fshard.randomness import DrawState, random_state


@dataclass(frozen=True)
class RecordedInputs:
    """Inputs of a step that require grad, with the random state that the step begins in."""

    inputs: PyTree
    random: DrawState

    @staticmethod
    def of(*inputs: PyTree) -> RecordedInputs | None:
        """Return the inputs; None if autograd records none of them."""
        for leaf in flatten([*inputs])[0]:
            if isinstance(leaf, Sharded | Tensor) and recorded(shards_of(leaf)):
                return RecordedInputs([*inputs], random_state())
        return None

    def attach(self, program: Callable[..., PyTree], results: PyTree) -> PyTree:
        """Return results whose derivatives are those of a differentiable program of the inputs.

        The program runs in the backward. Where there was no result, None, it may have one.
        """
        leaves, structure = flatten_shards(self.inputs)
        tensors = {id(x): x for x in leaves if isinstance(x, Tensor)}  # tied ones once
        result_leaves, result_structure = flatten(results, none_is_leaf=True)
        firsts = firsts_of(result_leaves)
        distinct = sorted({*firsts})
        present = [index for index in distinct if result_leaves[index] is not None]

        def rerun(*xs: Tensor) -> Tensors:
            """Return the shards of the results, from the tensors among the inputs."""
            values = dict(zip(tensors, xs, strict=True))
            inputs = unflatten(structure, [values.get(id(x), x) for x in leaves])
            return _shards(flatten(program(*inputs), none_is_leaf=True)[0], present)

        outputs = _shards(result_leaves, present)
        attached = iter(_Rerun.apply(rerun, self.random, outputs, *tensors.values()))
        for index in present:
            leaf = result_leaves[index]
            shards = [next(attached) for _ in shards_of(leaf)]
            result_leaves[index] = like(leaf, shards)
        return unflatten(result_structure, [result_leaves[first] for first in firsts])


def _shards(leaves: Sequence[Any], indices: Sequence[int]) -> Tensors:
    """Return the shards of some leaves."""
    shards: list[Tensor] = []
    for index in indices:
        shards += shards_of(leaves[index])
    return tuple(shards)


class _Rerun(Function):
    """Forward: results that are there already.

    Backward: that of a program that computes them again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rerun: Callable[..., Tensors],
        random: DrawState,
        outputs: Tensors,
        *inputs: Tensor,
    ) -> Tensors:
        ctx.rerun, ctx.random = rerun, random
        ctx.save_for_backward(*inputs)
        ctx.set_materialize_grads(False)
        return tuple([x.detach() for x in outputs])

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Any, ...]:
        inputs: Tensors = ctx.saved_tensors
        needs = ctx.needs_input_grad[3:]
        targets = [index for index, need in enumerate(needs) if need]
        used = [index for index, g in enumerate(cotangents) if g is not None]

        def of_targets(*values: Tensor) -> Tensors:
            xs = [*inputs]
            for index, x in zip(targets, values, strict=True):
                xs[index] = x
            outputs = ctx.rerun(*xs)
            return tuple([outputs[index] for index in used])

        before = random_state()
        ctx.random.set()  # the draws are those of the step
        try:
            pull: Any = torch.func.vjp(of_targets, *[inputs[index] for index in targets])[1]
        finally:
            before.set()

        gradients: list[Tensor | None] = [None] * len(inputs)
        pulled = pull(tuple([cotangents[index] for index in used]))
        for index, gradient in zip(targets, pulled, strict=True):
            gradients[index] = gradient
        return None, None, None, *gradients
