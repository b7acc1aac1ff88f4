"""What a loss was made of: which calls of a model, whose outputs are marked in autograd's graph; and what beside them.

A backward goes from a loss to the units' anchor.  What does not lead there is not gone through, so in a first step it is looked
for: a reentrant checkpoint, whose backward makes the gradients of all that it runs, and the parameters that were given.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_leaves  # it knows the outputs of other libraries' modules
from torch.utils.checkpoint import CheckpointFunction

from fshard.errors import ModuleError
from fshard.mesh.differentiate import transformed
from fshard.transforms.cut_off import refuse_cut_off
from fshard.transforms.originals import originals_among

_MARK = "fshard: a call"
_REENTRANT: Any = cast("Any", CheckpointFunction)._backward_cls


@dataclass(eq=False)
class Calls:
    """A model's calls since its last step.

    Args:
        counted: what the batch of each counts for.
        before: by which calls the inputs of each were made.
        passed: whether another optimizer's backward has gone through them.
    """

    counted: list[Any] = field(default_factory=list[Any])
    before: list[list[tuple[Calls, int]]] = field(default_factory=list[list[tuple["Calls", int]]])
    passed: bool = False

    def add(self, counted: Any, inputs: Any) -> None:
        """Note a call."""
        self.counted.append(counted)
        self.before.append(_calls_behind(inputs))

    def tell(self, loss: Tensor) -> None:
        """Let others know of a backward that gives gradients to these alone."""
        seen, left = set[tuple[Calls, int]](), _calls_behind(loss)
        while left:
            calls, number = call = left.pop()
            if call not in seen:
                seen.add(call)
                left += calls.before[number]
                calls.passed |= calls is not self

    def refuse_passed(self) -> None:
        """Raise if the gradients of these are not all there."""
        if self.passed:
            raise ModuleError(
                "a loss that was gone back through with another optimizer has used this model too, and this one's gradient of "
                "it was not taken. Make one module of both models, or drop what is not wanted: optimizer.zero_grad()."
            )


def marked(output: Any, owner: object, number: int) -> list[Any]:
    """Mark what the call of some number has returned; return what has to be kept as long as the marks are to last."""
    kept: list[Any] = []
    for x in _moving(output):
        node = _node(x)
        node.metadata[_MARK] = owner, number
        kept += [node] if x.is_leaf else []  # of others the graph itself keeps it
    return kept


def reached(loss: Tensor, owner: object) -> list[int]:
    """Return the numbers of the calls that a loss was made of; what these were made of is not looked at.

    >>> import torch
    >>> x, owner = torch.ones(1, requires_grad=True), object()
    >>> y, z = x * 2, x * 3
    >>> marked((y, z), owner, 0), marked(z, owner, 1)
    ([], [])
    >>> reached(y.sum(), owner), reached((y + z).sum(), owner), reached(x.sum(), owner)
    ([0], [0, 1], [])
    """
    marks = (_mark(node) for node in _behind(loss, lambda node: _mark(node)[0] is owner))
    return sorted({number for whose, number in marks if whose is owner})


def refuse_backward(*given: Any) -> None:
    """Raise: what has come here is a backward of torch's own; a hook too."""
    raise ModuleError(
        "loss.backward() has come to parameters that lie as a plugin says, and knows nothing of the other devices: write "
        "booster.backward(loss, optimizer). Gradients of inputs alone are torch.autograd.grad(loss, inputs)."
    )


def refuse_unreached(output: Any) -> None:
    """Raise if a forward has done what no gradient would come to, though torch's backward would make one."""
    nodes = [*_behind(output)]
    if any(isinstance(node, _REENTRANT) for node in nodes):
        raise ModuleError(
            "a forward runs a reentrant checkpoint, and the gradients of what that computes would be lost. Write "
            "checkpoint(..., use_reentrant=False)."
        )
    if names := originals_among(_variables(nodes)):
        raise ModuleError(
            f"a forward uses {names} of the model that was given, and not of the copy that is trained: it comes to them by a "
            "global variable, say, or by a class made within a function. Keep the module in an attribute."
        )


def look_beside(loss: Any, outputs: Any = ()) -> None:
    """Raise if a loss was made of noted parameters, beside a model's outputs; warn of others, whose gradient nobody gets."""
    if not isinstance(loss, Tensor) or not loss.requires_grad or transformed():
        return
    ends = {*map(_node, _moving(outputs))}
    nodes = [*_behind(loss, lambda node: node in ends or _MARK in node.metadata)]
    refuse_cut_off(nodes)
    variables = _variables(nodes)
    if names := originals_among(variables):
        raise ModuleError(
            f"the loss uses {names} beside what the model has returned. These are the parameters that were "
            "given, and not those that are trained, which lie as the plugin says: compute it inside forward."
        )
    others = [tuple(x.shape) for x in variables if isinstance(x, nn.Parameter)]
    if others:
        warnings.warn(
            f"the loss uses parameters that no boosted model has, of shapes {', '.join(map(str, others))}, and nobody is given "
            "their gradient. Make them a part of the model; if they are not to be trained, say so: requires_grad_(False).",
            stacklevel=2,
        )


# -- graphs -------------------------------------------------------------------------------------------------------------


def _moving(tree: Any) -> list[Tensor]:
    """Return the tensors of a tree that have a graph."""
    leaves = [tree] if type(tree) is Tensor else tree_leaves(tree)
    return [x for x in leaves if isinstance(x, Tensor) and x.requires_grad]


def _node(x: Tensor) -> Any:
    return x.grad_fn or get_gradient_edge(x).node


def _mark(node: Any) -> tuple[Any, int]:
    return node.metadata.get(_MARK, (None, 0))


def _behind(tree: Any, is_end: Callable[[Any], bool] = lambda node: False) -> Iterator[Any]:
    """Yield the nodes of a tree's graph, the ends among them, but not what is behind these."""
    seen, left = set[Any](), [*map(_node, _moving(tree))]
    while left:
        node = left.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            left += [] if is_end(node) else [before for before, _ in node.next_functions]


def _calls_behind(tree: Any) -> list[tuple[Any, int]]:
    """Return which calls tensors were made by, each once; what these were made of is not looked at."""
    marks = (_mark(node) for node in _behind(tree, lambda node: _MARK in node.metadata))
    return [*dict.fromkeys(mark for mark in marks if mark[0] is not None)]


def _variables(nodes: Iterable[Any]) -> list[Tensor]:
    """Return the leaves that nodes give gradients to."""
    return [x for node in nodes if (x := getattr(node, "variable", None)) is not None]
