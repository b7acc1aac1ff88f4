"""`tensor_parallel`: a plan of which layers of a model are sharded, found by following its dims.

The model runs unchanged: inside a step its parameters are arrays of the devices along the axes, and
each operation is done on their shards (`fshard.array`). So any plan computes the same; a good one
sends little.

    follow   the model runs once; each dim carries the weights that produced it
    decide   pairs of layers are sharded by columns and by rows; all else is replicated
    check    the planned model is compared with the model, in float64 on virtual devices
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
    Mesh,
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
from fshard.mesh.spmd.scope import outside
from fshard.tensor.decide import decide, override
from fshard.tensor.follow import USE_MODULE, follow
from fshard.tensor.joined import concatenated
from fshard.tensor.layer_plans import LayerPlans, SequenceMode
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


@dataclass(frozen=True, repr=False)
class Plan(LayerPlans):
    """The plan of a model: see `tensor_parallel`. Prints how each layer is sharded, and why."""

    def functionalize(
        self, module: nn.Module, **options: Any
    ) -> tuple[Any, dict[str, Any], dict[str, Any]]:
        """Return what `fs.functionalize` does; parts of a fused weight are leaves of their own."""
        if {name: tuple(x.shape) for name, x in module.named_parameters()} != self.shapes:
            raise LayoutError(
                f"functionalize: plan must be made for {type(module).__name__}; got one of another "
                "model."
            )
        planned = PlannedModule(self, module, **options)
        return planned.apply, planned.params, planned.buffers

    def check(
        self, sample: Any, *, tolerance: float = TOLERANCE, ignore: str | Sequence[str] = ()
    ) -> float:
        """Compare loss and gradients on virtual devices with those of the model in float64.

        Raises one error with all that differ. Returns the largest error of a parameter, relative to
        its largest gradient.

        Args:
            sample: the arguments of the model.
            tolerance: the largest relative error.
            ignore: patterns of names of parameters that are not compared, those of the shell.
        """
        with outside():  # on virtual devices of its own, also inside of fs.run
            mesh, errors = self._errors(sample)
        patterns = [ignore] if isinstance(ignore, str) else list(ignore)
        differing: list[str] = []
        largest = 0.0
        for name, error in errors.items():
            if any([fnmatchcase(name, pattern) for pattern in patterns]):
                continue
            largest = max(largest, error)
            if not error < tolerance:  # nan too
                differing.append(f"{name} by {error:.1e}")
        if differing:
            raise LayoutError(
                f"the plan must compute what the model does; of {mesh}, these differ: "
                f"{'; '.join(differing)}. A model that computes in fewer bits, or draws, needs a "
                "larger tolerance=, or ignore= with names of parameters: tensor_tolerance= and "
                "tensor_ignore= of HybridParallelPlugin."
            )
        return largest

    def _errors(self, sample: Any) -> tuple[Mesh, dict[str, float]]:
        """Return the mesh of a check, and the errors of the loss and of each parameter by name."""
        mesh = make_mesh(dict.fromkeys(self.axes, _check_size(self)), runtime="virtual")
        apply, params, buffers = self.functionalize(_float64_copy(self.model))

        def loss_fn(params: Any, sample: Any) -> Tensor:
            args, kwargs = _arguments(sample)
            output, _ = apply(params, buffers, *args, **kwargs)
            leaves, _ = flatten(dict(output) if isinstance(output, Mapping) else output)
            values = [
                x for x in leaves if isinstance(x, Tensor | Sharded) and x.is_floating_point()
            ]
            return self.full(sum((x * x).mean() for x in values))

        # Outside of a step the planned model runs on full tensors.
        sample = map_leaves(_as_float64, sample)
        leaves, structure = flatten(map_leaves(lambda x: x.detach().requires_grad_(), params))
        loss = loss_fn(unflatten(structure, leaves), sample)
        grads = torch.autograd.grad(loss, leaves, materialize_grads=True)

        gradient = value_and_grad(loss_fn, mesh=mesh, batch=P(), local=self.axes)
        rules = self.rules | dict.fromkeys(self.experts, P(self.axes))
        sharded_loss, sharded_grads = gradient(shard_params(params, rules, mesh=mesh), sample)
        paths, full_grads, _ = flatten_with_paths(unshard(sharded_grads), none_is_leaf=True)

        names = ["the loss", *[named(parts_of(path)) for path in paths]]
        errors = _relative_errors([sharded_loss, *full_grads], [loss.detach(), *grads])
        return mesh, dict(zip(names, errors, strict=True))

    def full(self, x: Any) -> Any:
        """Return a result of the model as a tensor, equal on all devices along the axes."""
        x = concatenated(x)
        return constrain(x, P()).local if isinstance(x, Sharded) else x

    def cross_entropy(self, logits: Any, labels: Tensor, **options: Any) -> Tensor:
        """Return the cross-entropy of (..., classes) logits and (...) labels.

        Sharded logits stay sharded.
        """
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

    The model runs once on a sample, and the dim that each linear layer produces is followed to the
    layer that sums over it: such a pair is sharded, by columns and by rows; all else stays
    replicated.

    A module that arrays cannot run, since it calls a `torch.autograd.Function` or an operation
    without a rule, runs on unsharded tensors, and its weights are replicated: the plan prints which
    and why.

    Args:
        model: any module of linear layers; attention by `scaled_dot_product_attention` or written
            out.
        axis: the mesh axis, or those of another mode, in the order of `fs.tensor.mode`.
        sample: its arguments: a dict of keywords, a tuple, or one tensor.
        mode: "1d", "2d", "2.5d" or "3d".
        size: the number of devices that share the heads; layers that it does not divide stay
            replicated. By default a step raises for these.
        sequence: an axis that shards the tokens, dim 1 of all inputs.
        sequence_mode: the algorithm of attention: see `fs.tensor.attention`; or "megatron", where
            `sequence` is the axis of the layers: norms and dropout run on shards of tokens,
            attention on heads.
        experts: an axis that shards the batch and the experts of transformers' models, such as
            Mixtral: see `fs.experts.expert_rules`. Experts, also those of `fs.nn.MoE`, are sharded
            along the plan's axes too, which all have the same tokens; the number of experts must be
            a multiple of all these devices.
        rules: patterns of weights' names (those of the shell) and their style, instead of the one
            that is found: "column", "row", "words" or "replicated". A fused weight is then one
            part.
        check: compare the planned model with the model itself, in float64 on a few virtual devices:
            see `Plan.check`.
        tolerance, ignore: of that check.
    """
    abstract = abstract_mode(mode, as_axes(axis))
    _validate_sequence(sequence, sequence_mode, abstract.axes)
    for path, module in model.named_modules():
        validate_no_backward_hooks(path, module)

    args, kwargs = _arguments(sample)
    sequence_axes = as_axes(sequence or ())
    axes = tuple(dict.fromkeys((*sequence_axes, *abstract.axes)))
    expert_layers = shard_experts(model, as_axes(experts or ()), axes)
    expert_specs: dict[str, P] = {}
    for specs in expert_layers.values():
        expert_specs.update(specs)

    with outside():  # on a virtual device of its own, also inside of fs.run
        products, unsharded, operations = follow(model, args, kwargs, expert_layers)
    shapes = {name: tuple(x.shape) for name, x in model.named_parameters()}
    layers, replicated = decide(products, shapes, size)
    if unsharded and not layers and not expert_layers:
        raise LayoutError(
            f"{type(model).__name__} has no layer that can be sharded. {USE_MODULE} "
            f"Unsharded: {unsharded}"
        )
    if rules:
        layers, replicated = override(layers, replicated, products, rules)
    # By the key, so the bias of a tied table, whose key is "name (linear)", is replicated. No
    # reason known.
    biases: dict[str, str] = {}
    for key, product in products.items():
        if product.bias is not None and key in layers:
            biases[product.bias] = key

    plan = Plan(
        mode=abstract,
        layers=layers,
        shapes=shapes,
        biases=biases,
        replicated=replicated,
        sequence=sequence,
        sequence_mode=sequence_mode,
        unsharded=unsharded,
        operations=operations,
        experts=expert_specs,
        model=model,
    )
    if check and (layers or expert_specs):
        plan.check(sample, tolerance=tolerance, ignore=ignore)
    return plan


def _validate_sequence(
    sequence: str | None, sequence_mode: SequenceMode, axes: tuple[str, ...]
) -> None:
    """Raise unless the axis of tokens is one that its mode allows, with layers on these axes."""
    is_megatron = sequence_mode == "megatron"
    if is_megatron != (sequence in axes):
        wanted = f"one of {as_written(axes)}" if is_megatron else "another axis than the layers'"
        raise ValueError(
            f"sequence must be {wanted} with sequence_mode={sequence_mode!r}; got {sequence!r}."
        )
    if sequence is None and sequence_mode != "gather":
        raise ValueError(
            f"sequence_mode={sequence_mode!r} must have an axis of tokens; got sequence=None."
        )


def _relative_errors(actual: Sequence[Any], expected: Sequence[Tensor]) -> list[float]:
    """Return the largest error of each tensor, relative to its largest element.

    Gradients below a millionth of the model's largest one count as that: those of biases of keys
    are 0 but for rounding. An actual value of None is 0.
    """
    sizes = [float(x.abs().max()) for x in expected]
    least = 1e-6 * max(sizes) or 1.0
    errors: list[float] = []
    for x, y, size in zip(actual, expected, sizes, strict=True):
        difference = y if x is None else x - y
        errors.append(float(difference.abs().max()) / max(size, least))
    return errors


def _float64_copy(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model).eval().double().requires_grad_()


def _as_float64(x: Any) -> Any:
    """Return a floating tensor in float64; anything else unchanged."""
    return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x


def _check_size(plan: Plan) -> int:
    """Return the smallest number of devices, from 2 on, that can share all layers, or 1.

    It is that of each axis, so experts, which all axes shard, must be a multiple of its power.
    """
    layers = plan.layers.values()
    expert_counts = [plan.shapes[name][0] for name in plan.experts]
    largest = min([*[layer.shared for layer in layers], *expert_counts])
    for n in range(2, largest + 1):
        devices = n ** len(plan.axes)
        is_shared_by_experts = not any(count % devices for count in expert_counts)
        if is_shared_by_experts and all(layer.fits(n) for layer in layers):
            return n
    return 1


def _arguments(sample: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return positional and keyword arguments, from a mapping, a tuple, or one value."""
    if isinstance(sample, Mapping):
        return (), dict(sample)
    if isinstance(sample, tuple):
        return sample, {}
    return (sample,), {}
