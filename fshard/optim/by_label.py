"""Different optimizers for different parameters: `masked` and `by_label`.

An optimizer gets None in place of a parameter that it skips, and None for its gradient, and has no
state for it.

    params   {"w": x, "bias": y}      labels {"w": "matrix", "bias": "vector"}
    "matrix" gets {"w": x, "bias": None};  "vector" gets {"w": None, "bias": y};  results are merged
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import optree

from fshard.errors import OptimizerError
from fshard.memory.state import Update
from fshard.mesh.layout import PyTree
from fshard.optim.contract import Optimizer, is_optimizer, no_updates, step_of
from fshard.optim.leaves import Leaf, Leaves, trainable
from fshard.optim.nesting import inner_optimizer
from fshard.optim.sharding import Sharding, labelled_sharding

NOTHING = Optimizer(
    init=lambda params: (),
    update=lambda grads, state, params: (grads, state),
    sharding="flat",
    takes="arrays",
)
"""Trains nothing: it has no state, and passes gradients on."""
_FROZEN = Optimizer(
    init=lambda params: (),
    update=lambda grads, state, params: (no_updates(grads), state),
    step=lambda grads, state, params: (params, state),
    sharding="flat",
    takes="arrays",
)
"""A writer that changes no parameter."""


def masked(opt: Optimizer, mask: PyTree | Callable[[str, Leaf], bool]) -> Optimizer:
    """Apply an optimizer or a transformation to some of the parameters.

    opt(grad) where mask, else 0 or grad: an optimizer does not change the others, and a
    transformation passes their gradients on.

    Args:
        opt: the optimizer or transformation.
        mask: a tree of bools that is a prefix of the parameters, or a function of path
            (`["blocks"][0]["w"]`) and leaf.

    >>> import torch, fshard.optim as optim
    >>> opt = masked(optim.sgd(0.5), {"w": True, "b": False})
    >>> params = {"w": torch.ones(1), "b": torch.ones(1)}
    >>> opt.step(params, opt.init(params), params)[0]
    {'w': tensor([0.5000]), 'b': tensor([1.])}
    """
    _check_no_optimizers(mask, "masked: mask must be bools", "masked(opt, mask)")
    opt = inner_optimizer(opt, "masked")
    # A transformation passes the other gradients on; an optimizer leaves the others unchanged.
    of_others = NOTHING if opt.step is None else _FROZEN
    return by_label({True: opt, False: of_others}, mask, every=False)


def by_label(
    opts: Mapping[Any, Optimizer],
    labels: PyTree | Callable[[str, Leaf], Any],
    *,
    every: bool = True,
) -> Optimizer:
    """Apply to each parameter the optimizer of its label: opts[label](grad).

    The state is a dict by label. Each label's parameters are sharded as its optimizer's are.

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
    _check_no_optimizers(labels, "by_label: labels must be labels", "by_label(opts, labels)")
    if not isinstance(opts, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(
            f"by_label: opts must be a dict of optimizers by label; got {type(opts).__name__}."
        )
    opts = {label: inner_optimizer(opt, "by_label") for label, opt in opts.items()}

    def init(params: PyTree) -> PyTree:
        leaves = Leaves.of(params)
        leaf_labels = leaves.chosen(labels)
        _validate_labels(leaves, leaf_labels, opts, every)
        state: dict[Any, PyTree] = {}
        for label, opt in opts.items():
            state[label] = opt.init(_only(leaves, leaves.leaves, leaf_labels, label))
        return state

    def merged(updates: dict[Any, Update]) -> Update:
        """Return the update that runs that of each label on its parameters, and merges results."""

        def run(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
            leaves = Leaves.of(params)
            leaf_labels = leaves.chosen(labels)
            gradients = leaves.beside(grads, "grads")
            results: list[Leaf] = [None] * len(leaf_labels)
            after: dict[Any, PyTree] = {}
            for label, update in updates.items():
                grads_of_label = _only(leaves, gradients, leaf_labels, label)
                params_of_label = _only(leaves, leaves.leaves, leaf_labels, label)
                result, after[label] = update(grads_of_label, state[label], params_of_label)
                for i, x in enumerate(leaves.beside(result, f"the results of {label!r}")):
                    if leaf_labels[i] == label:
                        results[i] = x
            return leaves.rebuild(results), after

        return run

    step = None
    if any(opt.step is not None for opt in opts.values()):
        step = merged({label: step_of(opt) for label, opt in opts.items()})
    shardings: dict[Any, Sharding] = {label: opt.sharding for label, opt in opts.items()}
    return Optimizer(
        init=init,
        update=merged({label: opt.update for label, opt in opts.items()}),
        step=step,
        sharding=labelled_sharding(shardings, lambda params: params.chosen(labels)),
        takes="arrays",
    )


def _check_no_optimizers(prefix: PyTree, requirement: str, order: str) -> None:
    """Raise if optimizers were given where labels are: the arguments are swapped."""
    if callable(prefix):
        return
    leaves = optree.tree_leaves(prefix, is_leaf=is_optimizer, none_is_leaf=True)
    if any(map(is_optimizer, leaves)):
        raise OptimizerError(
            f"{requirement} of parameters; got an optimizer. The order is {order}."
        )


def _only(params: Leaves, leaves: list[Leaf], leaf_labels: list[Any], label: Any) -> PyTree:
    """Return the tree of the leaves of one label, None in place of the others."""
    pairs = zip(leaves, leaf_labels, strict=True)
    return params.rebuild([leaf if key == label else None for leaf, key in pairs])


def _validate_labels(
    params: Leaves, leaf_labels: list[Any], opts: Mapping[Any, Optimizer], every: bool
) -> None:
    """Raise unless each parameter has an optimizer, ties one; with `every`, each label is used."""
    paths = params.paths
    leaves = params.leaves
    rows = zip(leaf_labels, paths, leaves, strict=True)
    used = {label: path for label, path, leaf in rows if leaf is not None}

    errors: list[str] = []
    for label, path in used.items():
        if label not in opts:
            errors.append(f"params{path} is labelled {label!r}")
    if every and used:
        errors += [f"no parameter is labelled {label!r}" for label in opts if label not in used]
    for i, first in enumerate(params.firsts):
        if leaf_labels[i] != leaf_labels[first] and trainable(leaves[i]):
            errors.append(
                f"params{paths[first]} and params{paths[i]} are one (tied), labelled "
                f"{leaf_labels[first]!r} and {leaf_labels[i]!r}"
            )
    if errors:
        raise OptimizerError(
            f"by_label has optimizers for {', '.join(map(repr, opts))}, but "
            f"{' and '.join(errors)}. Every parameter needs one optimizer, and every optimizer a "
            "parameter."
        )
