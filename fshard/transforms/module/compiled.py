"""Modules that torch.compile has compiled: their parameters are unsharded before the graph runs.

layers[0].compile()                    sets the attribute `_compiled_call_impl`, which a call
                                       of the module prefers
layers[0] = torch.compile(layers[0])   wraps it; `compiled_in_place` makes it the first
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

COMPILED_CALL = "_compiled_call_impl"
"""The attribute of a module that holds its compiled call."""


def is_compiled(module: nn.Module) -> bool:
    """Return True if a call of the module runs a graph."""
    return vars(module).get(COMPILED_CALL) is not None


def compiled_in_place(module: nn.Module) -> nn.Module:
    """Compile all modules in place that `torch.compile(child)` has wrapped.

    So parameters have the names that they have in the model's own code. Returns the module,
    unwrapped too.
    """
    children = [*module.modules()]
    for child in children:
        for name, grandchild in child.named_children():
            setattr(child, name, _unwrapped(grandchild))
    return _unwrapped(module)


def uncompile(module: nn.Module, reason: str) -> None:
    """Let all modules in a module run without their graphs, with a warning that has the reason."""
    compiled = [(name, child) for name, child in module.named_modules() if is_compiled(child)]
    for _, child in compiled:
        setattr(child, COMPILED_CALL, None)
    if compiled:
        names = ", ".join([name or "the model" for name, _ in compiled])
        warnings.warn(f"torch.compile of {names} has no effect: {reason}", stacklevel=4)


def _unwrapped(module: nn.Module) -> nn.Module:
    """Return the module that a result of torch.compile wraps; another module as it is."""
    if "_torchdynamo_orig_callable" not in vars(module):
        return module
    wrapper: Any = module
    inner = wrapper._orig_mod
    setattr(inner, COMPILED_CALL, wrapper.dynamo_ctx(inner._call_impl))
    return inner


Unsharding = Callable[[Callable[..., Any]], Callable[..., Any]]
"""`with_unsharded_params`: returns a function that unshards the parameters in its arguments."""


# Note [Compiled modules]
# A graph cannot contain an all-gather that depends on what is unsharded already. So the compiled
# call of a module is replaced by one that unshards all parameters below it, puts them into their
# slots, and runs the graph on plain tensors. Dynamo guards their shapes and dtypes, not their
# identity, so there is one graph, however often a unit is unsharded again. Autograd saves the
# parameters for the graph's backward as it does those of any operation, so they are resharded in
# between.
#
# Forwards below a compiled module are not replaced: a replaced one would draw by a key of its own,
# which breaks the graph. The compiled module draws by its own key.
def call_compiled(
    unsharding: Unsharding,
    module: nn.Module,
    compiled: Callable[..., Any],
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Call a compiled module with its parameters unsharded: Note [Compiled modules]."""
    slots: list[tuple[dict[str, Any], str]] = []
    children: list[Any] = [*module.modules()]
    for child in children:
        slots += [(child._parameters, key) for key in child._parameters]
    lazy_params = [entries[key] for entries, key in slots]

    def run(*params: Any) -> Any:
        _fill(slots, params)
        return compiled(*args, **kwargs)

    try:
        return unsharding(run)(*lazy_params)
    finally:
        _fill(slots, lazy_params)


def _fill(slots: Sequence[tuple[dict[str, Any], str]], values: Sequence[Any]) -> None:
    for (entries, key), value in zip(slots, values, strict=True):
        entries[key] = value
