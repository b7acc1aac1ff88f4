"""What a loss was made of: which calls of a model, whose outputs are marked in autograd's graph; and what beside them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_leaves  # it knows the outputs of other libraries' modules
from torch.utils.weak import WeakIdKeyDictionary

from fshard.errors import ModuleError
from fshard.mesh.differentiate import transformed

_MARK = "fshard: a call"
_originals = WeakIdKeyDictionary()
"""The names of parameters of which others, that lie as a plugin says, are trained."""


@dataclass(eq=False)
class Calls:
    """A model's calls since its last step.

    Args:
        counted: what the batch of each counts for.
        before: of other models, whose outputs these were given.
        passed: whether another optimizer's backward has gone through them.
    """

    counted: list[Any] = field(default_factory=list[Any])
    before: list[Calls] = field(default_factory=list["Calls"])
    passed: bool = False

    def follow(self, inputs: Any) -> None:
        """Note of whose calls the inputs of one were made."""
        self.before += [calls for calls in _behind(inputs) if calls is not self and calls not in self.before]

    def tell(self, loss: Tensor) -> None:
        """Let others know of a backward that gives gradients to these alone."""
        seen, left = {self}, [self, *_behind(loss)]
        while left:
            calls = left.pop()
            left += [before for before in calls.before if before not in seen]
            seen |= {calls, *calls.before}
            calls.passed |= calls is not self

    def refuse_passed(self) -> None:
        """Raise if the gradients of these are not all there."""
        if self.passed:
            raise ModuleError(
                "a loss that was gone back through with another optimizer has used this model too, and this one's gradient of "
                "it was not taken. Make one module of both models, or drop what is not wanted: optimizer.zero_grad()."
            )


def _behind(outputs: Any) -> Iterator[Calls]:
    """Give whose calls tensors were made of; what these were made of is not looked at."""
    ends = [x for x in tree_leaves(outputs) if isinstance(x, Tensor) and x.requires_grad]
    seen, left = set[Any](), [get_gradient_edge(x).node for x in ends]
    while left:
        node: Any = left.pop()
        if node is not None and node not in seen:
            seen.add(node)
            if _MARK in node.metadata:
                yield node.metadata[_MARK][0]
            else:
                left += [before for before, _ in node.next_functions]


def marked(output: Any, owner: object, number: int) -> list[Any]:
    """Mark what the call of some number has returned; return what has to be kept as long as the marks are to last."""
    kept: list[Any] = []
    for x in tree_leaves(output):
        if isinstance(x, Tensor) and x.requires_grad:
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
    found, seen, left = set[int](), set[Any](), [_node(loss)]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        whose, number = node.metadata.get(_MARK, (None, 0))
        if whose is owner:
            found.add(number)
        else:
            left += [before for before, _ in node.next_functions]
    return sorted(found)


def _node(x: Tensor) -> Any:
    return x.grad_fn or get_gradient_edge(x).node


def refuse_backward(*given: Any) -> None:
    """Raise: what has come here is a backward of torch's own; a hook too."""
    raise ModuleError(
        "loss.backward() has come to parameters that lie as a plugin says, and knows nothing of the other devices: write "
        "booster.backward(loss, optimizer). Gradients of inputs alone are torch.autograd.grad(loss, inputs)."
    )


def note_originals(module: nn.Module) -> None:
    """Note that others are trained in the place of a module's parameters."""
    for name, x in module.named_parameters():
        _originals[x] = name


def refuse_originals(loss: Any, outputs: Any = ()) -> None:
    """Raise if a loss was made of noted parameters, beside a model's outputs: what it asks of them, nobody would do."""
    if not isinstance(loss, Tensor) or not loss.requires_grad or transformed():
        return
    given = [outputs] if type(outputs) is Tensor else tree_leaves(outputs)
    seen: set[Any] = {_node(x) for x in given if isinstance(x, Tensor) and x.requires_grad}
    names, left = set[str](), [_node(loss)]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if _MARK not in node.metadata:
            names |= {_originals[variable]} if variable is not None and variable in _originals else set()
            left += [before for before, _ in node.next_functions]
    if names:
        raise ModuleError(
            f"the loss uses {', '.join(sorted(names))} beside what the model has returned. These are the parameters that were "
            "given, and not those that are trained, which lie as the plugin says: compute it inside forward."
        )
