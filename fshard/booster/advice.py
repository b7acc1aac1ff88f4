"""`auto_plugin`: the simplest plugin with which a model fits, by the bytes of the fullest device.

For each candidate, simplest first:

1. shard parameters and optimizer state on an abstract mesh as the plugin does: layouts give the bytes per device;
2. add the bytes of a step: unsharded parameters, gradients, activations;
3. return the first plugin whose fullest device fits; if there is none, raise with the table.

fits on one device                       DDPPlugin
the optimizer's state does not           ZeroPlugin(stage=1), then stage=2
parameters do not                        FSDPPlugin
unsharded units or activations do not    HybridParallelPlugin: fewer layers on each device
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from fractions import Fraction
from math import ceil, prod
from typing import Any, NamedTuple

import torch
from torch import nn

from fshard.booster.arrangement import Arrangement
from fshard.booster.plugins import DDPPlugin, FSDPPlugin, HybridParallelPlugin, Plugin, ZeroPlugin
from fshard.errors import FshardError, LayoutError
from fshard.mesh.layout import Mesh, PyTree, as_axes, flatten, flatten_with_paths
from fshard.mesh.layout.sharded import Sharded, key_of
from fshard.optim.leaves import trainable
from fshard.optim.rules.adam import adamw
from fshard.optim.torch_instances import NOTHING, OptimizerSource, optimizer_source
from fshard.pipeline.schedule.schedule import Schedule
from fshard.transforms.options import integer, must_be, unknown
from fshard.transforms.patterns import unit_of
from fshard.transforms.shard_params import shard_params
from fshard.transforms.stages.plan import shard_stages


class Budget(NamedTuple):
    """Bytes of one device. All-gathers and reductions in flight are not counted: a unit or two.

    Args:
        parameters: stored.
        copies: for use. Of sharded units the largest that are unsharded at a time; of a sharded stage all. Of replicated
            parameters those in another dtype.
        gradients: unsharded where they are reduced once a step: stages 0 and 1 of ZeRO, pipelines, and reproducible mode,
            which has several trees of them. Else shards, and the largest unit unsharded.
        state: of the optimizer.
        activations: of the microbatches that a pipeline's device holds concurrently, else of the device's part of the batch.
    """

    parameters: int
    copies: int
    gradients: int
    state: int
    activations: int

    @property
    def total(self) -> int:
        """The sum of all five."""
        return sum(self)


def auto_plugin(
    model: nn.Module, mesh: Mesh, memory: int, *, optimizer: Any = None, activations: int = 0, **options: Any
) -> Plugin:
    """Return the simplest plugin with which each device needs at most `memory` bytes; its `why` is the table of
    candidates.

    Args:
        model: any module, which may be lazy or on the meta device: nothing is allocated.
        mesh: the devices. For stages they are rearranged, along "data" and "pipe".
        memory: bytes of each device.
        optimizer: for its state; None: AdamW.
        activations: bytes for a device's part of a batch on this mesh, without recomputation. Stages divide them, and a
            device holds those of as many microbatches as its schedule needs.
        options: of plugins, such as precision: each plugin gets those that it has. Stages of a model that is no
            `nn.Sequential` need `blocks` and `sample`. Defaults: `zero_stage` 1 or 3, two microbatches per stage.

    >>> import torch, fshard as fs
    >>> model = torch.nn.Sequential(*(torch.nn.Linear(100, 100, device="meta") for _ in range(8)))
    >>> plugin = fs.auto_plugin(model, fs.make_mesh({"data": 4}), memory=700_000)
    >>> type(plugin).__name__, plugin.stage
    ('ZeroPlugin', 2)
    >>> print(plugin.why)
    bytes a device           parameters         copies      gradients          state    activations       together  of 700,000
    DDP, stage 0                323,200              0        323,200        646,400              0      1,292,800  too much
    Zero, stage 1               323,200              0        323,200        161,600              0        808,000  too much
    Zero, stage 2               323,200              0        121,200        161,600              0        606,000  fits
    """
    wrong = must_be("model", "a Module", model, isinstance(model, nn.Module))  # pyright: ignore[reportUnnecessaryIsInstance]
    wrong += must_be("mesh", "a Mesh", mesh, isinstance(mesh, Mesh))  # pyright: ignore[reportUnnecessaryIsInstance]
    wrong += integer("memory", memory) + integer("activations", activations, 0)
    wrong += unknown("auto_plugin", options, sorted({name for kind in _KINDS for name in _names(kind)}))
    candidates = [] if wrong else [*_candidates(mesh, options)]
    made = [_made(kind, usual, options) for _, kind, usual in candidates]
    for name, x in options.items():  # invalid if each plugin that has it rejects it, alone and with the others
        its = [at for at, (_, kind, _) in enumerate(candidates) if name in _names(kind)]
        alone = [_made(*candidates[at][1:], {name: x}) for at in its if isinstance(made[at], FshardError)]
        refused = [str(one).rstrip(".") for one in alone if isinstance(one, FshardError)]
        wrong += refused[:1] if len(refused) == len(its) else []
    if wrong:
        raise LayoutError(f"auto_plugin: {'; '.join(dict.fromkeys(wrong))}.")
    source = optimizer_source(
        adamw() if optimizer is None else optimizer, dict(model.named_parameters()), "auto_plugin"
    )
    axes = as_axes(options.get("axis") or mesh.axis_names)
    batch = activations * prod(size for axis, size in mesh.axes if axis in axes)
    titles = "".join(f"{title:>15}" for title in (*Budget._fields, "together"))
    rows, shown = [f"{'bytes a device':20}{titles}  of {memory:,}"], set[str]()
    for (name, *_), plugin in zip(candidates, made, strict=True):
        try:
            if isinstance(plugin, FshardError):
                raise plugin
            held = budget(plugin.arranged(_abstract(plugin, mesh)), model, source, batch)
        except FshardError as error:
            reason = " ".join(str(error).split())
            rows += [f"{name:20}  {reason}"] if reason not in shown else []
            shown.add(reason)
            continue
        fits, sizes = held.total <= memory, "".join(f"{size:>15,}" for size in (*held, held.total))
        rows.append(f"{name:20}{sizes}  {'fits' if fits else 'too much'}")
        if fits:
            return replace(plugin, why="\n".join(rows))
    raise LayoutError("auto_plugin: this model fits in no way:\n" + "\n".join(rows))


# -- candidates ---------------------------------------------------------------------------------------------------------

_KINDS = (DDPPlugin, ZeroPlugin, FSDPPlugin, HybridParallelPlugin)


def _candidates(mesh: Mesh, options: Mapping[str, Any]) -> Iterator[tuple[str, type[Plugin], dict[str, Any]]]:
    """Yield the plugins, simplest first: the name of the row, the class, and its default options."""
    yield "DDP, stage 0", DDPPlugin, {"mesh": mesh}
    for stage in [options["stage"]] if "stage" in options else [1, 2]:
        yield f"Zero, stage {stage}", ZeroPlugin, {"mesh": mesh, "stage": stage}
    yield "FSDP, stage 3", FSDPPlugin, {"mesh": mesh}
    divisors = [count for count in range(2, mesh.size + 1) if mesh.size % count == 0]
    for count in [options["pipeline"]] if "pipeline" in options else divisors:
        for stage in [options["zero_stage"]] if "zero_stage" in options else [1, 3]:
            usual = {"pipeline": count, "microbatches": 2 * count, "zero_stage": stage}
            yield f"Hybrid, stage {stage} x {count}", HybridParallelPlugin, usual


def _made(kind: type[Plugin], usual: Mapping[str, Any], options: Mapping[str, Any]) -> Plugin | FshardError:
    """Make a plugin of the options that it has; return the error if it refuses them."""
    try:
        return kind(**{**usual, **{name: x for name, x in options.items() if name in _names(kind)}})
    except FshardError as error:
        return error


def _names(kind: type[Plugin]) -> set[str]:
    return {one.name for one in fields(kind)} - {"mesh", "why"}


def _abstract(plugin: Plugin, mesh: Mesh) -> Mesh:
    """Return an abstract mesh of as many devices; stages have their own axis."""
    if not isinstance(plugin, HybridParallelPlugin):
        return Mesh(mesh.axes, "abstract", "meta")
    if mesh.size % plugin.pipeline:
        raise LayoutError(f"pipeline={plugin.pipeline} does not divide the {mesh.size} devices there are")
    axes = (("data", mesh.size // plugin.pipeline), (plugin.pipeline_axis, plugin.pipeline))
    return Mesh(axes, "abstract", "meta")


# -- counting -----------------------------------------------------------------------------------------------------------


def budget(how: Arrangement, model: nn.Module, source: OptimizerSource, activations: int = 0) -> Budget:
    """Count the bytes of the fullest device.

    Args:
        how: layouts and options, on an abstract mesh.
        model: the model; frozen parameters have no gradients.
        source: the optimizer and its parameters.
        activations: bytes for the entire batch and model.

    >>> import fshard as fs
    >>> mesh = fs.make_mesh({"data": 4}, runtime="abstract")
    >>> model = nn.Sequential(nn.Linear(100, 10, bias=False), nn.Linear(10, 10, bias=False).requires_grad_(False))
    >>> source = optimizer_source(adamw(), dict(model.named_parameters()), "budget")
    >>> budget(fs.DDPPlugin().arranged(mesh), model, source)
    Budget(parameters=4400, copies=0, gradients=4000, state=8000, activations=0)
    >>> budget(fs.ZeroPlugin(stage=1, precision="bf16").arranged(mesh), model, source)
    Budget(parameters=4400, copies=2200, gradients=4000, state=2000, activations=0)
    """
    schedule: Schedule | None = how.options.get("schedule")
    parts = [model] if how.cut is None else how.cut(model)
    trees = [source.trained(dict(part.named_parameters())) for part in parts]
    if schedule is None:
        params: list[PyTree] = [shard_params(trees[0], how.rules, mesh=how.mesh)]
        state, placement, here = how.partition(source.now()).init(params[0]), (0,), [dict[str, int]()]
    else:
        axis = how.options["axis"]
        params = shard_stages(trees, how.rules, mesh=how.mesh, schedule=schedule, axis=axis)
        state, placement = how.partition(source.now()).init(params), schedule.placement
        here = [{axis: place} for place in range(schedule.devices)]
    rest, kept, found = _leaves(params), _leaves(state), list[Budget]()
    for place, held in enumerate(_activations(how, schedule, activations)):
        used = [(f"stage {i}" if schedule else "", params[i]) for i, at in enumerate(placement) if at == place]
        owners = [here[place] | layout.place for layout in {leaf.layout for leaf in (*rest, *kept)}]
        fullest = [here[place], *(owner for owner in owners if here[place].items() <= owner.items())]
        for device in {how.mesh.index(coordinates) for coordinates in fullest}:
            copies, gradients = _in_use(how, used, device)
            found.append(Budget(_bytes(rest, device), copies, gradients, _bytes(kept, device), held))
    return max(found, key=lambda one: one.total)


def _activations(how: Arrangement, schedule: Schedule | None, total: int) -> list[int]:
    """Return the bytes of activations at each coordinate along the pipeline."""
    part = Fraction(total, prod(how.mesh.shape[axis] for axis in how.axes))
    if schedule is None:
        return [ceil(part)]
    one = part / schedule.stages / schedule.microbatches
    return [ceil(x) for x in schedule.simulate(activation=one).peak_activations] if total else [0] * schedule.devices


def _leaves(tree: PyTree) -> list[Sharded]:
    """Return the leaves of a tree, each tied one once."""
    leaves = flatten(tree, sharded_is_leaf=True)[0]
    return [*{key_of(x): x for x in leaves if isinstance(x, Sharded)}.values()]


def _bytes(leaves: Sequence[Sharded], device: int) -> int:
    return sum(prod(x.layout.local_shape(x.shape, device)) * x.dtype.itemsize for x in leaves)


def _in_use(how: Arrangement, used: Sequence[tuple[str, PyTree]], device: int) -> tuple[int, int]:
    """Count the bytes of copies and gradients of parameters that a device uses: trees of them, and the stage of each."""
    schedule, trees, compute = how.options.get("schedule"), how.options["reproducible"], how.options["compute"]
    devices, gradient_layout = prod(how.mesh.shape[axis] for axis in how.axes), how.partition(NOTHING).gradients
    turns = schedule.microbatches if schedule is not None else how.options["slices"] // devices if trees else 1
    once = how.stage < 2 or schedule is not None or trees
    unsharded, reduced, converted, gradients = Counter[str](), Counter[str](), 0, 0
    for stage, tree in used:
        paths, leaves, _ = flatten_with_paths(tree, sharded_is_leaf=True)
        for path, x in {key_of(x): (path, x) for path, x in zip(paths, leaves, strict=True)}.values():
            size, unit = prod(x.shape), stage or x.layout.unit or unit_of(path)
            dtype = compute if compute is not None and x.dtype.is_floating_point else x.dtype
            if prod(x.layout.local_shape(x.shape, device)) < size:
                unsharded[unit] += size * dtype.itemsize
            elif dtype is not x.dtype:
                converted += size * dtype.itemsize
            if not trainable(x):
                continue
            dtype = how.options["reduce"] or dtype
            if turns > 1 or trees:
                dtype = torch.promote_types(dtype, torch.float32)
            own = size if once else prod(gradient_layout(x.layout).local_shape(x.shape, 0))
            gradients += own * torch.promote_types(dtype, x.dtype).itemsize
            reduced[unit] += size * dtype.itemsize if own < size else 0
    live = how.options.get("live_units", 2) if how.options.get("reshard_after_forward", True) else None
    copies = converted + sum(size for _, size in unsharded.most_common(live))
    return copies, gradients * (turns.bit_length() if trees else 1) + max(reduced.values(), default=0)
