"""Modules as the stages of a pipeline, with recomputation of activations.

    recompute        kept per microbatch until its backward     recomputed
    "never"          saved tensors                              nothing
    "always"         the stage's input                          the stage
    "except_last"    the same, but saved tensors of the last    the stage, except for the last
    n, a number      the input of every n-th layer              n layers at a time

With a backward in two halves, I recomputes, and computes the gradients of recomputed layers'
weights too: W has nothing left to do for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from fshard.copying import copied
from fshard.errors import PolicyError
from fshard.mesh.layout import PyTree
from fshard.pipeline.execution.leaves import ByMicrobatch, Stage, map_tensors
from fshard.pipeline.split.block_stage import wrap_blocks
from fshard.transforms.module.functionalize import functionalize
from fshard.transforms.module.remat import Policy, remat
from fshard.transforms.options import Recompute


def stage_functions(
    stages: Sequence[nn.Module | Stage],
    recompute: Recompute = "never",
    *,
    microbatches: int | None = None,
    policy: str | Policy = "nothing",
) -> tuple[list[Stage], list[PyTree]]:
    """Return stages as functions of (params, x), for `pipelined`, and the parameters of each.

    Args:
        stages: modules, as from `split_stages`; functions are unchanged, and have None as
            parameters.
        recompute: which activations are recomputed: of no microbatch ("never"), of each ("always"),
            of all but the last ("except_last"), or of every n layers of an `nn.Sequential` (1 for a
            module split by its blocks).
        microbatches: of a step, for "except_last".
        policy: which results are saved nevertheless: see `fs.remat`.

    >>> import torch, fshard as fs
    >>> schedule = fs.pipeline_schedule("1f1b", stages=2, microbatches=2)
    >>> stages = fs.pipeline.split_stages([nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1)], 2)
    >>> functions, params = stage_functions(stages, "except_last", microbatches=2)
    >>> mesh = fs.make_mesh({"pipe": 2})
    >>> step = fs.pipeline.pipelined(functions, schedule, lambda y, x: y.mean(), mesh=mesh)
    >>> [[*tree] for tree in step(params, torch.ones(2, 3, 2)).gradients]
    [['0.weight', '0.bias'], ['2.weight', '2.bias']]
    """
    _validate_recompute(stages, recompute, microbatches)
    modules = in_groups(stages, recompute, policy) if isinstance(recompute, int) else stages
    functions: list[Stage] = []
    params: list[PyTree] = []
    for number, stage in enumerate(modules):
        function, stage_params = _stage_function(number, stage)
        functions.append(function)
        params.append(stage_params)
    if isinstance(recompute, int) or recompute == "never":
        return functions, params

    last = (microbatches or 0) - 1
    saved_microbatch = last if recompute == "except_last" else None
    by_microbatch: list[Stage] = []
    for function in functions:
        by_microbatch.append(_recomputed_except(function, saved_microbatch, policy))
    return by_microbatch, params


def _recomputed_except(
    function: Stage, saved_microbatch: int | None, policy: str | Policy
) -> ByMicrobatch:
    """Return a stage that is recomputed, except for one microbatch."""
    recomputed = _recomputed(function, policy, 1)
    return ByMicrobatch(lambda number: function if number == saved_microbatch else recomputed)


def _validate_recompute(
    stages: Sequence[object], recompute: Recompute, microbatches: int | None
) -> None:
    errors: list[str] = []
    is_count = isinstance(recompute, int) and not isinstance(recompute, bool) and recompute > 0
    if not is_count and recompute not in ("never", "always", "except_last"):
        errors.append(
            'recompute must be "never", "always", "except_last" or a number of layers; '
            f"got {recompute!r}"
        )
    if recompute == "except_last" and not microbatches:
        errors.append('"except_last" needs to know how many there are: microbatches=')
    if isinstance(recompute, int):
        are_modules = [isinstance(stage, nn.Module) for stage in stages]
        functions = [str(number) for number, is_module in enumerate(are_modules) if not is_module]
        if functions:
            errors.append(f"stage {', '.join(functions)} is a function, which has no layers")
    if errors:
        raise PolicyError(f"stage_functions: {'; '.join(errors)}.")


def _stage_function(number: int, stage: nn.Module | Stage) -> tuple[Stage, PyTree]:
    if not isinstance(stage, nn.Module):
        return stage, None
    apply, params, buffers = functionalize(stage)

    def run(params: PyTree, x: PyTree, **skips: PyTree) -> PyTree:
        y, after = apply(params, buffers, x, **skips)
        changed = [name for name, buffer in after.items() if buffer is not buffers.get(name)]
        if changed:
            raise PolicyError(
                f"stage_functions: stage {number} changes its buffers {', '.join(changed)}, which "
                "a function of parameters does not keep. Let train_step remember them, "
                "has_buffers=True, or use what they are, module.eval()."
            )
        return y

    return run, params


def _recomputed(
    function: Callable[..., Any], policy: str | Policy, fixed: int = 0
) -> Callable[..., Any]:
    """Recompute a function from its arguments.

    It may modify them in place, except the `fixed` first ones: each run gets copies.
    """

    def on_copies(*args: Any, **kwargs: Any) -> Any:
        copied_args, copied_kwargs = map_tensors(torch.clone, (args[fixed:], kwargs))
        return function(*args[:fixed], *copied_args, **copied_kwargs)

    return remat(on_copies, policy)


# -- groups of layers ------------------------------------------------------------------------------


class Grouped(nn.Sequential):
    """Layers that are recomputed n at a time."""

    def __init__(self, layers: nn.Sequential, size: int, policy: str | Policy) -> None:
        super().__init__()
        vars(self)["_modules"] = vars(layers)["_modules"]  # under their own names

        def call_in_sequence(layers: Sequence[nn.Module], x: Any) -> Any:
            for layer in layers:
                x = layer(x)
            return x

        self._size = size
        self._run = _recomputed(call_in_sequence, policy, 1)

    def forward(self, input: Any) -> Any:
        """Call them."""
        layers = [*self]
        for begin in range(0, len(layers), self._size):
            input = self._run(layers[begin : begin + self._size], input)
        return input


def in_groups(
    stages: Sequence[nn.Module | Stage],
    size: int,
    policy: str | Policy = "nothing",
    *,
    in_place: bool = False,
) -> list[nn.Module]:
    """Return modules like these whose layers are recomputed n at a time.

    `in_place` changes blocks of the stages themselves.
    """
    _validate_recompute(stages, size, None)
    modules: list[nn.Module] = []
    for stage in cast("Sequence[nn.Module]", stages):
        if type(stage) is nn.Sequential:
            modules.append(Grouped(stage, size, policy))
            continue
        module = stage
        if not in_place:
            shared = {id(x): x for x in (*stage.parameters(), *stage.buffers())}
            module = copied(stage, shared)
        has_blocks = size == 1 and wrap_blocks(module, partial(_recomputed, policy=policy))
        if not has_blocks:
            raise PolicyError(
                f"stage_functions: groups of {size} layers need an nn.Sequential; for "
                f"{type(stage).__name__} single blocks work, if it was split by them: recompute=1. "
                'All of a stage is "always".'
            )
        modules.append(module)
    return modules
