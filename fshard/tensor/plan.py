"""`tensor_parallel`: a plan of which layers of a model are sharded, found by following dims through it.

The model runs unchanged: inside a step its parameters are arrays of the devices along the axes, and each operation is
done on their shards (`fshard.array`). So any plan computes the same; a good one sends little.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fshard.array.dispatch import constrain
from fshard.array.mode import running
from fshard.errors import LayoutError
from fshard.experts.transformers import shard_experts
from fshard.mesh.layout import (
    Axes,
    P,
    as_axes,
    as_written,
    flatten,
    flatten_with_paths,
    map_leaves,
    unflatten,
)
from fshard.mesh.layout.make import make_mesh
from fshard.mesh.layout.sharded import Sharded
from fshard.mesh.reshard.device_put import unshard
from fshard.tensor.follow import USE_MODULE, follow
from fshard.tensor.joined import concatenated
from fshard.tensor.layer_plans import LayerPlans, SequenceMode, decide, override
from fshard.tensor.modes import abstract_mode
from fshard.tensor.run import (
    PlannedModule,
    sharded_inputs,
    validate_no_backward_hooks,
)
from fshard.transforms.patterns import named, parts_of
from fshard.transforms.shard_params import shard_params
from fshard.transforms.value_and_grad import value_and_grad

TOLERANCE = 1e-5
"""Of relative errors in a check; models may compute norms in float32."""


@dataclass(frozen=True)
class Plan(LayerPlans):
    """The plan of a model: see `tensor_parallel`. Prints how each layer is sharded, and why."""

    def functionalize(
        self, module: nn.Module, **options: Any
    ) -> tuple[Any, dict[str, Any], dict[str, Any]]:
        """Return what `fs.functionalize` does; parts of a fused weight are leaves of their own."""
        if {name: tuple(x.shape) for name, x in module.named_parameters()} != self.shapes:
            raise LayoutError(
                f"functionalize: plan must be made for {type(module).__name__}; got one of another model."
            )
        planned = PlannedModule(self, module, **options)
        return planned.apply, planned.params, planned.buffers

    def check(
        self, sample: Any, *, tolerance: float = TOLERANCE, ignore: str | Sequence[str] = ()
    ) -> float:
        """Compare loss and gradients on virtual devices with the model in float64; raise with all that differ.

        Return the largest error of a parameter, relative to its largest gradient. Gradients below a millionth of the
        model's largest one count as that: those of biases of keys are 0 but for rounding.

        Args:
            sample: the arguments of the model.
            tolerance: the largest relative error.
            ignore: patterns of names of parameters that are not compared, those of the shell.
        """
        mesh = make_mesh(dict.fromkeys(self.axes, _check_size(self)), runtime="virtual")
        apply, params, buffers = self.functionalize(
            copy.deepcopy(self.model).eval().double().requires_grad_()
        )

        def loss_fn(params: Any, sample: Any) -> Tensor:
            args, kwargs = _arguments(sample)
            output, _ = apply(params, buffers, *args, **kwargs)
            leaves, _ = flatten(dict(output) if isinstance(output, Mapping) else output)
            values = [
                x for x in leaves if isinstance(x, Tensor | Sharded) and x.is_floating_point()
            ]
            return self.full(sum((x * x).mean() for x in values))

        sample = map_leaves(
            lambda x: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x, sample
        )
        leaves, structure = flatten(map_leaves(lambda x: x.detach().requires_grad_(), params))
        value = loss_fn(unflatten(structure, leaves), sample)
        wanted = [value.detach(), *torch.autograd.grad(value, leaves, materialize_grads=True)]
        gradient = value_and_grad(loss_fn, mesh=mesh, batch=P(), local=self.axes)
        rules = self.rules | dict.fromkeys(self.experts, P(self.axes))
        loss, grads = gradient(shard_params(params, rules, mesh=mesh), sample)
        paths, sharded_grads, _ = flatten_with_paths(unshard(grads), none_is_leaf=True)
        least = 1e-6 * max(float(y.abs().max()) for y in wanted) or 1.0
        errors = [
            float((y if x is None else x - y).abs().max()) / max(float(y.abs().max()), least)
            for x, y in zip([loss, *sharded_grads], wanted, strict=True)
        ]
        patterns = [ignore] if isinstance(ignore, str) else [*ignore]
        compared = dict[str, float]()
        names = ["the loss", *(named(parts_of(path)) for path in paths)]
        for path, error in zip(names, errors, strict=True):
            if not any([fnmatchcase(path, pattern) for pattern in patterns]):
                compared[path] = error
        differing = [
            f"{path} by {error:.1e}" for path, error in compared.items() if not error < tolerance
        ]
        if differing:
            raise LayoutError(
                f"the plan must compute what the model does; of {mesh}, these differ: {'; '.join(differing)}. A model "
                "that computes in fewer bits, or draws, needs a larger tolerance=, or ignore= with names of parameters: "
                "tensor_tolerance= and tensor_ignore= of HybridParallelPlugin."
            )
        return max(compared.values(), default=0.0)

    def full(self, x: Any) -> Any:
        """Return a result of the model as a tensor, equal on all devices along the axes."""
        x = concatenated(x)
        return constrain(x, P()).local if isinstance(x, Sharded) else x

    def cross_entropy(self, logits: Any, labels: Tensor, **options: Any) -> Tensor:
        """Return the cross-entropy of (..., classes) logits and (...) labels; sharded logits stay sharded."""
        if not isinstance(logits, Sharded):
            return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), **options)
        with running(self):
            targets = sharded_inputs(self, labels, logits.mesh)
            return self.full(F.cross_entropy(logits.movedim(-1, 1), targets, **options))


def tensor_parallel(
    model: nn.Module,
    *,
    axis: Axes,
    sample: Any,
    mode: str = "1d",
    size: int | None = None,
    sequence: str | None = None,
    sequence_mode: SequenceMode = "gather",
    experts: str | None = None,
    rules: Mapping[str, str] | None = None,
    check: bool = True,
    tolerance: float = TOLERANCE,
    ignore: str | Sequence[str] = (),
) -> Plan:
    """Plan how the layers of a model are sharded over a mesh axis.

    The model runs once on a sample, and the dim that each linear layer produces is followed to the layer that sums over
    it: such a pair is sharded, by columns and by rows; all else stays replicated.

    A module that arrays cannot run, since it calls a `torch.autograd.Function` or an operation without a rule, runs on
    unsharded tensors, and its weights are replicated: the plan prints which and why.

    Args:
        model: any module of linear layers; attention by `scaled_dot_product_attention` or written out.
        axis: the mesh axis, or those of another mode, in the order of `fs.tensor.mode`.
        sample: its arguments: a dict of keywords, a tuple, or one tensor.
        mode: "1d", "2d", "2.5d" or "3d".
        size: the number of devices that share the heads; layers that it does not divide stay replicated. By default a
            step raises for these.
        sequence: an axis that shards the tokens, dim 1 of all inputs.
        sequence_mode: the algorithm of attention: see `fs.tensor.attention`; or "megatron", where `sequence` is the axis
            of the layers: norms and dropout run on shards of tokens, attention on heads.
        experts: an axis that shards the batch and the experts of transformers' models, such as Mixtral: see
            `fs.experts.expert_rules`. Experts, also those of `fs.nn.MoE`, are sharded along the plan's axes too, which all have
            the same tokens; the number of experts must be a multiple of all these devices.
        rules: patterns of weights' names (those of the shell) and their style, instead of the one that is found:
            "column", "row", "words" or "replicated". A fused weight is then one part.
        check: compare the planned model with the model itself, in float64 on a few virtual devices: see `Plan.check`.
        tolerance, ignore: of that check.
    """
    abstract = abstract_mode(mode, as_axes(axis))
    if (sequence_mode == "megatron") != (sequence in abstract.axes):
        wanted = (
            f"one of {as_written(abstract.axes)}"
            if sequence_mode == "megatron"
            else "another axis than the layers'"
        )
        raise ValueError(
            f"sequence must be {wanted} with sequence_mode={sequence_mode!r}; got {sequence!r}."
        )
    if sequence is None and sequence_mode != "gather":
        raise ValueError(
            f"sequence_mode={sequence_mode!r} must have an axis of tokens; got sequence=None."
        )
    for path, module in model.named_modules():
        validate_no_backward_hooks(path, module)
    args, kwargs = _arguments(sample)
    axes = tuple(dict.fromkeys((*as_axes(sequence or ()), *abstract.axes)))
    expert_layers = shard_experts(model, as_axes(experts or ()), axes)
    products, unsharded, operations = follow(model, args, kwargs, expert_layers)
    shapes = {name: tuple(x.shape) for name, x in model.named_parameters()}
    layers, replicated = decide(products, shapes, size)
    if unsharded and not layers and not expert_layers:
        raise LayoutError(
            f"{type(model).__name__} has no layer that can be sharded. {USE_MODULE} Unsharded: {unsharded}"
        )
    if rules:
        layers, replicated = override(layers, replicated, products, rules)
    biases = {p.bias: name for name, p in products.items() if p.bias is not None and name in layers}
    specs = {name: spec for leaves in expert_layers.values() for name, spec in leaves.items()}
    plan = Plan(
        abstract,
        layers,
        shapes,
        biases,
        replicated,
        sequence,
        sequence_mode,
        unsharded,
        operations,
        specs,
        model,
    )
    if check and (layers or specs):
        plan.check(sample, tolerance=tolerance, ignore=ignore)
    return plan


def _check_size(plan: Plan) -> int:
    """Return the smallest number of devices, from 2 on, that can share all layers; 1 if there is none."""
    layers, experts = plan.layers.values(), [plan.shapes[name][0] for name in plan.experts]
    sizes = range(2, 1 + min([*(layer.shared for layer in layers), *experts]))
    fits = (n for n in sizes if not any(count % n ** len(plan.axes) for count in experts))
    return next((n for n in fits if all(layer.fits(n) for layer in layers)), 1)


def _arguments(sample: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return positional and keyword arguments: of a mapping, a tuple, or one value."""
    if isinstance(sample, Mapping):
        return (), dict(sample)
    return (sample if isinstance(sample, tuple) else (sample,)), {}
