"""Different optimizers for different parameters: `masked` and `by_label`.

An optimizer gets None in place of a parameter that it skips, and None for its gradient, and has no state for it.

    params   {"w": x, "bias": y}      labels {"w": "matrix", "bias": "vector"}
    "matrix" gets {"w": x, "bias": None};  "vector" gets {"w": None, "bias": y};  their results are merged
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fshard.errors import OptimizerError
from fshard.mesh.layout import PyTree
from fshard.optim.contract import (
    ArrayOptimizer,
    Optimizer,
    Update,
    elementwise_leaves,
    no_updates,
    step_of,
)
from fshard.optim.leaves import Leaf, Leaves, trainable
from fshard.optim.per_device import inner_optimizer

NOTHING = ArrayOptimizer(
    lambda params: (), lambda grads, state, params: (grads, state), elementwise=True
)
"""Trains nothing: it has no state, and passes gradients on."""
_frozen = ArrayOptimizer(
    lambda params: (),
    lambda grads, state, params: (no_updates(grads), state),
    lambda grads, state, params: (params, state),
    elementwise=True,
)


def masked(opt: Optimizer, mask: PyTree | Callable[[str, Leaf], bool]) -> Optimizer:
    """Apply an optimizer or a transformation to some of the parameters: opt(grad) where mask, else 0 or grad.

    An optimizer does not change the others, and a transformation passes their gradients on.

    Args:
        opt: the optimizer or transformation.
        mask: a tree of bools that is a prefix of the parameters, or a function of path (`["blocks"][0]["w"]`) and leaf.

    >>> import torch, fshard.optim as optim
    >>> opt = masked(optim.sgd(0.5), {"w": True, "b": False})
    >>> params = {"w": torch.ones(1), "b": torch.ones(1)}
    >>> opt.step(params, opt.init(params), params)[0]
    {'w': tensor([0.5000]), 'b': tensor([1.])}
    """
    opt = inner_optimizer(opt, "masked")
    return by_label({True: opt, False: NOTHING if opt.step is None else _frozen}, mask, every=False)


def by_label(
    opts: Mapping[Any, Optimizer],
    labels: PyTree | Callable[[str, Leaf], Any],
    *,
    every: bool = True,
) -> Optimizer:
    """Apply to each parameter the optimizer of its label: opts[label](grad); the state is a dict by label.

    Args:
        opts: an optimizer per label.
        labels: a tree of labels that is a prefix of the parameters, or a function of path and leaf.
        every: raise if a label is not used.

    >>> import torch, fshard.optim as optim
    >>> opts = {"fast": optim.sgd(0.5), "slow": optim.sgd(0.25)}
    >>> opt = by_label(opts, lambda path, leaf: "slow" if "b" in path else "fast")
    >>> params = {"w": torch.ones(1), "b": torch.ones(1)}
    >>> opt.step(params, opt.init(params), params)[0]
    {'w': tensor([0.5000]), 'b': tensor([0.7500])}
    """
    if not isinstance(opts, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(
            f"by_label: opts must be a dict of optimizers by label; got {type(opts).__name__}."
        )
    opts = {label: inner_optimizer(opt, "by_label") for label, opt in opts.items()}

    def init(params: PyTree) -> PyTree:
        leaves = Leaves.of(params)
        chosen = leaves.chosen(labels)
        _validate_labels(leaves, chosen, opts, every)
        return {
            label: opt.init(_only(leaves, leaves.leaves, chosen, label))
            for label, opt in opts.items()
        }

    def through(acts: dict[Any, Update]) -> Update:
        def run(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
            leaves = Leaves.of(params)
            chosen, gradients = leaves.chosen(labels), leaves.beside(grads, "grads")
            results, after = [None] * len(chosen), dict[Any, PyTree]()
            for label, act in acts.items():
                trees = [
                    _only(leaves, column, chosen, label) for column in (gradients, leaves.leaves)
                ]
                result, after[label] = act(trees[0], state[label], trees[1])
                result = leaves.beside(result, f"the results of {label!r}")
                results = [
                    x if label == key else y
                    for x, y, key in zip(result, results, chosen, strict=True)
                ]
            return leaves.rebuild(results), after

        return run

    def elementwise(params: PyTree) -> list[bool]:
        by_opt = {label: elementwise_leaves(opt.elementwise, params) for label, opt in opts.items()}
        return [
            label not in by_opt or by_opt[label][i]
            for i, label in enumerate(Leaves.of(params).chosen(labels))
        ]

    flags = [opt.elementwise for opt in opts.values()]
    are_equal = flags in ([True] * len(flags), [False] * len(flags))
    step = through({label: step_of(opt) for label, opt in opts.items()})
    return ArrayOptimizer(
        init,
        through({label: opt.update for label, opt in opts.items()}),
        step if any(opt.step is not None for opt in opts.values()) else None,
        all(flags) if are_equal else elementwise,
    )


def _only(params: Leaves, leaves: list[Leaf], chosen: list[Any], label: Any) -> PyTree:
    """Return the tree of the leaves of one label, None in place of the others."""
    return params.rebuild(
        [leaf if key == label else None for leaf, key in zip(leaves, chosen, strict=True)]
    )


def _validate_labels(
    params: Leaves, chosen: list[Any], opts: Mapping[Any, Optimizer], every: bool
) -> None:
    paths, leaves = params.paths, params.leaves
    used = {
        label: path
        for path, leaf, label in zip(paths, leaves, chosen, strict=True)
        if leaf is not None
    }
    errors = [
        f"params{path} is labelled {label!r}" for label, path in used.items() if label not in opts
    ]
    errors += (
        [f"no parameter is labelled {label!r}" for label in opts if label not in used]
        if every and used
        else []
    )
    errors += [
        f"params{paths[first]} and params{paths[i]} are one (tied), labelled {chosen[first]!r} and {chosen[i]!r}"
        for i, first in enumerate(params.firsts)
        if chosen[i] != chosen[first] and trainable(leaves[i])
    ]
    if errors:
        raise OptimizerError(
            f"by_label has optimizers for {', '.join(map(repr, opts))}, but {' and '.join(errors)}. "
            "Every parameter needs one optimizer, and every optimizer a parameter."
        )
