"""The run of a program in one process: what it trains, recorded as full tensors on the CPU."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fshard.errors import PromiseError
from fshard.mesh.layout import PyTree, flatten, unflatten
from fshard.testing.programs.precision import (
    LOWER,
    InFloat64,
    Sends,
    autograd,
    noted_sends,
    widen,
)
from fshard.testing.verdicts import float64_by_default

Program = Callable[
    [int, "ProgramWorld"], tuple[Any, Callable[[Any, Any], Any], Any, Callable[[], object]]
]
Tensors = dict[str, Tensor]
_WRAPPERS = re.compile(
    r"(^|\.)(module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module"
    r"|_forward_module|_original_module)(?=\.)"
)


class ProgramWorld(int):
    """The number of processes, with their mesh: `world.mesh["model"]` is torch's DeviceMesh of an axis."""

    mesh: DeviceMesh


class RankRecord(NamedTuple):
    """The training of one process: full tensors, or its own shards of parameters that are sharded by hand.

    Args:
        batches: of this process: the leaves of the batch of each step, or of one for all steps.
        losses: of the steps; None where the process has none.
        start: the parameters before the first step, frozen ones too.
        grads: of each step, before `step()`.
        params: after each step.
        given: the gradients that an optimizer of torch was given, in each step.
        kept: the parameters whose gradients were not 0 when a step began, in each step.
        frozen: the parameters that require no gradient.
        tied: other names of parameters, with their first ones.
        order: the parameters in the order in which the forward uses them.
        backwards: the number of backward calls in each step.
        computed_in: the lowest dtypes of activations, parameters, buffers and batches.
        rounded_in: those of other tensors.
        sent_in: those of tensors that are sent.
        sends_in_step: the number of collectives that `step()` has called, in each step.
    """

    batches: Sequence[PyTree]
    losses: list[float | None]
    start: Tensors
    grads: list[Tensors]
    params: list[Tensors]
    given: Sequence[Tensors] = ()
    kept: Sequence[frozenset[str]] = ()
    frozen: frozenset[str] = frozenset()
    tied: Mapping[str, str] = {}
    order: Sequence[str] = ()
    backwards: Sequence[int] = ()
    computed_in: frozenset[torch.dtype] = frozenset()
    rounded_in: frozenset[torch.dtype] = frozenset()
    sent_in: frozenset[torch.dtype] = frozenset()
    sends_in_step: Sequence[int] = ()

    def batch(self, step: int) -> PyTree:
        """Return the batch of a step."""
        return self.batches[min(step, len(self.batches) - 1)]


def record(
    program: Program,
    axes: Mapping[str, int],
    steps: int,
    seed: int,
    batches: Sequence[Sequence[Any]] | None = None,
    clears_gradients: bool = False,
) -> RankRecord:
    """Run a program in this process.

    Args:
        program: see `certify_program`.
        axes: of the mesh.
        steps: number of steps.
        seed: of what the program does not seed.
        batches: the leaves of the batches of all processes, for the run in one process.
        clears_gradients: set gradients to zero before each step, as `step()` must have done.
    """
    run = _begun(program, axes, steps, seed)
    with run.stack:
        own_batches = run.batches
        if batches is not None:
            own_batches = [
                _with_leaves(own, leaves) for own, leaves in zip(run.batches, batches, strict=True)
            ]
        result = RankRecord(
            batches=[_leaf_copies(batch) for batch in run.batches],
            losses=[],
            start=full_tensors(run.model),
            grads=[],
            params=[],
            given=[],
            kept=[],
            frozen=frozen_names(run.model),
            tied=tied_names(run.model),
            backwards=[],
            sends_in_step=[],
        )
        for i in range(steps):
            torch.manual_seed(run.seed)  # so that a loss that draws differs too
            if clears_gradients:
                _clear_gradients(run.model)
            batch = own_batches[min(i, len(own_batches) - 1)]
            _record_step(run, _copied(batch), result)
    return result._replace(
        order=run.uses.names(),
        computed_in=frozenset(run.watch.in_forward | _dtypes_of(run.model, run.batches)),
        rounded_in=frozenset(run.watch.elsewhere),
        sent_in=frozenset(run.sends.dtypes),
    )


def batches_alone(
    program: Program, axes: Mapping[str, int], steps: int, seed: int
) -> list[list[Any]]:
    """Return the leaves of the batches that a program makes in this process."""
    run = _begun(program, axes, steps, seed)
    with run.stack:
        return [_leaf_copies(batch) for batch in run.batches]


def _record_step(run: _Run, batch: PyTree, result: RankRecord) -> None:
    """Run one step, and add what it does to a record."""
    run.watch.backwards = 0
    optimizer_grads = _OptimizerGradients(run.model)
    before = _versions_of_gradients(run.model)
    kept = [name for name, (grad, _) in before.items() if _local(grad).any()]
    cast("list[frozenset[str]]", result.kept).append(frozenset(kept))
    with optimizer_grads:
        run.watch.uses = run.uses
        loss = loss_of(run.loss_fn(run.model, batch))
        run.watch.uses = None
        can_be_differentiated = isinstance(loss, Tensor) and loss.requires_grad
        if can_be_differentiated and not _has_taken_gradients(run, before):
            cast("Tensor", loss).backward()
        if isinstance(loss, Tensor):
            loss = loss.item()
        result.losses.append(None if loss is None else float(loss))
        result.grads.append(full_tensors(run.model, gradients=True))
        sends_before = run.sends.number
        run.step()
        cast("list[int]", result.sends_in_step).append(run.sends.number - sends_before)
    result.params.append(full_tensors(run.model))
    cast("list[Tensors]", result.given).append(optimizer_grads.full())
    cast("list[int]", result.backwards).append(run.watch.backwards)


# -- the parts of a program ------------------------------------------------------------------------


class _Run(NamedTuple):
    """A program that has begun, in float64 and watched until its stack is left."""

    stack: ExitStack
    watch: _Watch
    uses: Uses
    sends: Sends
    seed: int
    model: Any
    loss_fn: Callable[[Any, Any], Any]
    batches: list[PyTree]
    step: Callable[[], object]


def _begun(program: Program, axes: Mapping[str, int], steps: int, seed: int) -> _Run:
    """Call the program, in the modes in which all of it runs."""
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    rank = dist.get_rank()
    world = ProgramWorld(dist.get_world_size())
    world.mesh = mesh
    watch = _Watch()
    sends = Sends()
    with ExitStack() as stack:
        stack.enter_context(float64_by_default())
        stack.enter_context(noted_sends(sends))
        stack.enter_context(watch)
        stack.enter_context(watch.counted_backwards())
        stack.enter_context(any_comm_hook())
        own_seed = 1000 * seed + rank  # so that what is not seeded by the program differs
        torch.manual_seed(own_seed)
        model, loss_fn, batch, step = _parts(program(rank, world))
        batches = _batches_of(batch, steps)
        _widen_all(model, batches)
        return _Run(
            stack.pop_all(), watch, Uses(model), sends, own_seed, model, loss_fn, batches, step
        )
    raise AssertionError  # for the type checker: an ExitStack may swallow exceptions


@contextmanager
def any_comm_hook() -> Generator[None]:
    """Let DistributedDataParallel take bf16_compress_hook, which it refuses without NCCL."""
    kind = cast("Any", nn.parallel.DistributedDataParallel)
    check = kind._check_comm_hook
    kind._check_comm_hook = lambda *_: None
    try:
        yield
    finally:
        kind._check_comm_hook = check


def _parts(result: Any) -> tuple[Any, Callable[[Any, Any], Any], Any, Callable[[], object]]:
    """Return what a program has returned, if it is a model, a loss, a batch and a step."""
    is_four = isinstance(result, tuple | list) and len(cast("Sequence[Any]", result)) == 4
    if is_four:
        model, loss_fn, batch, step = cast("Sequence[Any]", result)
        is_model = isinstance(model, nn.Module | Mapping)
        if is_model and callable(loss_fn) and callable(step):
            return model, loss_fn, batch, step
    got = type(result).__name__
    if isinstance(result, tuple | list):
        got = f"({', '.join([type(x).__name__ for x in cast('Sequence[Any]', result)])})"
    raise TypeError(
        "certify_program: a program must return (model, loss, batch, step): a module or a dict of "
        f"parameters, loss(model, batch), a batch and step(); got {got}."
    )


def _widen_all(model: Any, batches: Sequence[PyTree]) -> None:
    """Convert what is float32 before the first step, so that no step computes in it."""
    for x in _tensors_of(model, batches):
        widen(x)


def _dtypes_of(model: Any, batches: Sequence[PyTree]) -> set[torch.dtype]:
    """Return the lower dtypes of parameters, buffers and batches."""
    return {x.dtype for x in _tensors_of(model, batches)} & {*LOWER}


def _tensors_of(model: Any, batches: Sequence[PyTree]) -> list[Tensor]:
    tensors = [x for _, x in named_parameters(model)]
    if isinstance(model, nn.Module):
        tensors += model.buffers()
    for batch in batches:
        tensors += [x for x in flatten(_tree_of(batch))[0] if isinstance(x, Tensor)]
    return tensors


def loss_of(result: Any) -> Tensor | float | None:
    """Return the loss of what a loss function has returned.

    It may be a number, a dict that has "loss", an object with `.loss` as those of Hugging Face, or a
    tuple with the loss first.
    """
    loss = result
    if isinstance(result, Mapping):
        loss = cast("Mapping[str, Any]", result).get("loss", result)
    elif isinstance(getattr(result, "loss", None), Tensor):
        loss = result.loss
    elif isinstance(result, tuple | list) and result:
        loss = cast("Sequence[Any]", result)[0]
    if isinstance(loss, DTensor):
        loss = loss.full_tensor()
    is_scalar = isinstance(loss, Tensor) and loss.numel() == 1
    if loss is None or is_scalar or isinstance(loss, int | float):
        return loss
    got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(type(loss))
    raise TypeError(
        "certify_program: loss(model, batch) must return a number, None, a dict with 'loss', an "
        f"object with .loss, or a tuple with the loss first; got {got}."
    )


# -- batches ---------------------------------------------------------------------------------------


def _batches_of(batch: PyTree, steps: int) -> list[PyTree]:
    """Return one batch for all steps, or the first ones of a loader."""
    is_one = isinstance(batch, Tensor | Mapping | list | tuple) or not hasattr(batch, "__iter__")
    if is_one:
        return [batch]
    if isinstance(batch, torch.utils.data.DataLoader):
        batch.num_workers = 0  # this process may have no child processes
    batches = list(islice(batch, steps))
    if len(batches) < steps:
        raise PromiseError(
            f"certify_program: a loader must have a batch for each of {steps} steps; got "
            f"{len(batches)}. Give more data, or fewer steps (--steps {max(len(batches), 1)})."
        )
    return batches


def _tree_of(batch: PyTree) -> PyTree:
    """Return a batch as a tree: a mapping that is no dict, as those of tokenizers, becomes one."""
    if isinstance(batch, Mapping) and not isinstance(batch, dict):
        return dict(cast("Mapping[str, Any]", batch))
    return batch


def _with_leaves(batch: PyTree, leaves: Sequence[Any]) -> PyTree:
    """Return a batch of the same structure with other leaves."""
    _, structure = flatten(_tree_of(batch))
    if structure.num_leaves != len(leaves):
        raise PromiseError(
            "certify_program: batches must have the same structure in processes as in one; got "
            f"{len(leaves)} and {structure.num_leaves} leaves."
        )
    tree = unflatten(structure, list(leaves))
    is_same_type = isinstance(tree, type(batch)) or not isinstance(batch, Mapping)
    return tree if is_same_type else cast("Any", type(batch))(tree)


def _copied(batch: PyTree) -> PyTree:
    """Return a batch in new containers, since a loss may take leaves out of a dict."""
    leaves, _ = flatten(_tree_of(batch))
    return _with_leaves(batch, leaves)


def _leaf_copies(batch: PyTree) -> list[Any]:
    copies: list[Any] = []
    for x in flatten(_tree_of(batch))[0]:
        copies.append(x.detach().clone() if isinstance(x, Tensor) else x)
    return copies


# -- parameters and gradients ----------------------------------------------------------------------


def named_parameters(model: Any) -> list[tuple[str, Tensor]]:
    """Return the parameters of a module or a dict, without the names of wrappers; all names of tied ones."""
    if isinstance(model, nn.Module):
        named: Iterable[tuple[str, Tensor]] = model.named_parameters(remove_duplicate=False)
    else:
        named = dict(model).items()
    return [(without_wrappers(name), x) for name, x in named if isinstance(x, Tensor)]


def frozen_names(model: Any) -> frozenset[str]:
    """Return the names of parameters that require no gradient."""
    with unsharded(model):
        return frozenset([name for name, x in named_parameters(model) if not x.requires_grad])


def tied_names(model: Any) -> dict[str, str]:
    """Return the further names of parameters that have several, with their first ones."""
    first_names: dict[int, str] = {}
    tied: dict[str, str] = {}
    with unsharded(model):
        for name, x in named_parameters(model):
            first = first_names.setdefault(id(x), name)
            if first != name:
                tied[name] = first
    return tied


def full_tensors(model: Any, *, gradients: bool = False) -> Tensors:
    """Return copies of the parameters of a module or a dict, or of their gradients, by name.

    A DTensor is gathered by all its processes, and so are the parameters of
    FullyShardedDataParallel.
    """
    has_original = not has_flat_parameters(model) or _uses_original_parameters(model)
    if gradients and not has_original:
        return _flat_gradients(model)
    with unsharded(model, gradients=gradients):
        tensors: Tensors = {}
        for name, x in named_parameters(model):
            if not gradients:
                tensors[name] = x
            elif x.grad is not None:
                tensors[name] = x.grad
        return gathered(tensors, dict(named_parameters(model)))


def gathered(tensors: Mapping[str, Tensor], params: Mapping[str, Tensor]) -> Tensors:
    """Return full copies of tensors of some parameters; a DTensor that other processes have is 0 here.

    All processes take part, since a process may lack a gradient that others have.
    """
    sharded = [name for name, x in tensors.items() if isinstance(x, DTensor)]
    names_by_rank: list[Any] = [sharded]
    if dist.get_world_size() > 1:
        names_by_rank = [None] * dist.get_world_size()
        dist.all_gather_object(names_by_rank, sharded)

    full: Tensors = {}
    for name, param in params.items():
        x = tensors.get(name)
        if x is None and isinstance(param, DTensor):
            peers = param.device_mesh.mesh.flatten().tolist()
            if any(name in names_by_rank[rank] for rank in peers):
                x = torch.zeros_like(param)
        if x is None:
            continue
        if isinstance(x, DTensor):
            x = x.full_tensor()
        full[name] = x.detach().to_dense() if x.is_sparse else x.detach().clone()
    return full


@contextmanager
def unsharded(model: Any, *, gradients: bool = False) -> Generator[None]:
    """Gather the parameters of FullyShardedDataParallel in the block, if the model has such units."""
    if not has_flat_parameters(model):
        yield
        return
    from torch.distributed.fsdp import FullyShardedDataParallel

    with FullyShardedDataParallel.summon_full_params(model, writeback=False, with_grads=gradients):
        yield


def _uses_original_parameters(model: Any) -> bool:
    from torch.distributed.fsdp import FullyShardedDataParallel

    units: list[Any] = list(FullyShardedDataParallel.fsdp_modules(model))
    return all(unit._use_orig_params for unit in units)


def _flat_gradients(model: nn.Module) -> Tensors:
    """Return full gradients of FullyShardedDataParallel without its original parameters.

    Torch gathers no such gradients. A unit has that of a shard of all its parameters in a row, which
    are padded.
    """
    from torch.distributed.fsdp import FullyShardedDataParallel

    grads: Tensors = {}
    for unit_name, unit in model.named_modules():
        is_unit = isinstance(unit, FullyShardedDataParallel)
        handle = cast("Any", unit)._handle if is_unit else None
        if handle is None or handle.flat_param.grad is None:
            continue
        flat: Any = handle.flat_param
        row = flat.grad.detach().flatten()
        if handle.uses_sharded_strategy:
            shards = row.new_empty(len(row) * handle.world_size)
            dist.all_gather_single(shards, row, group=handle.process_group)
            row = shards[: flat._unpadded_unsharded_size.numel()]

        names = iter(zip(flat._fqns, flat._shapes, strict=True))
        parts = row.split(flat._numels_with_padding)
        for part, is_padding in zip(parts, flat._is_padding_mask, strict=True):
            if not is_padding:
                name, shape = next(names)
                full_name = without_wrappers(f"{unit_name}.{name}".lstrip("."))
                grads[full_name] = part.reshape(shape).clone()
    return grads


def has_flat_parameters(model: Any) -> bool:
    """Return True if a part of the model is in FullyShardedDataParallel, if that has been imported."""
    module = sys.modules.get("torch.distributed.fsdp.fully_sharded_data_parallel")
    if module is None or not isinstance(model, nn.Module):
        return False
    return any(isinstance(x, module.FullyShardedDataParallel) for x in model.modules())


def without_wrappers(name: str) -> str:
    """Return the name that a parameter has in the model itself.

    >>> without_wrappers("module.layers._orig_mod.0.weight")
    'layers.0.weight'
    """
    return _WRAPPERS.sub(r"\1", name).replace("..", ".").lstrip(".")


def _clear_gradients(model: Any) -> None:
    for _, x in named_parameters(model):
        if x.grad is not None:
            with torch.no_grad():
                x.grad.zero_()


Versions = dict[str, tuple[Tensor, int]]
"""Gradients with the number of writes to each."""


def _versions_of_gradients(model: Any) -> Versions:
    versions: Versions = {}
    for name, x in named_parameters(model):
        if x.grad is not None:
            versions[name] = (x.grad, _local(x.grad)._version)
    return versions


def _local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def _has_taken_gradients(run: _Run, before: Versions) -> bool:
    """Return True if the loss has taken gradients itself.

    It has called backward, or a gradient that is not 0 is another than before.
    """
    if run.watch.backwards:
        return True
    for name, x in named_parameters(run.model):
        if x.grad is None:
            continue
        grad, version = before.get(name, (None, 0))
        is_as_before = grad is x.grad and version == _local(x.grad)._version
        if not is_as_before and _local(x.grad).any():
            return True
    return False


class _OptimizerGradients:
    """Keeps the gradients that optimizers of torch are given in the block, each at its first step."""

    def __init__(self, model: Any) -> None:
        self._params: dict[str, Tensor] = {}
        if not has_flat_parameters(model):
            self._params = dict(named_parameters(model))
        self._grads: Tensors = {}

    def __enter__(self) -> None:
        self._hook = register_optimizer_step_pre_hook(self._keep)

    def __exit__(self, *_: object) -> None:
        self._hook.remove()

    def _keep(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        ids = {id(x) for group in optimizer.param_groups for x in group["params"]}
        for name, x in self._params.items():
            if id(x) in ids and x.grad is not None and name not in self._grads:
                self._grads[name] = x.grad.detach().clone()

    def full(self) -> Tensors:
        """Return the gradients as full tensors, after the step: then all processes take part."""
        return gathered(self._grads, self._params)


# -- watching --------------------------------------------------------------------------------------


class Uses:
    """The parameters of a model in the order in which functions of torch first use them."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._names: dict[int, str] = {}
        self._others: dict[int, Tensor] = {}  # with the tensors, so that no id is used again
        self._known: list[Tensor] = []
        self._order: dict[str, None] = {}  # a set in order

    def see(self, arguments: Sequence[Any]) -> None:
        """Note the arguments of a function; its first one counts as used last, as a weight before a bias."""
        names = [self._name_of(x) for x in arguments]
        for name in reversed(names):
            if name is not None:
                self._order.setdefault(name)

    def _name_of(self, x: Any) -> str | None:
        is_candidate = isinstance(x, Tensor) and x.requires_grad and x.is_leaf
        if not is_candidate or id(x) in self._others:
            return None
        if id(x) not in self._names:
            self._learn()
        if id(x) not in self._names:
            self._others[id(x)] = x
        return self._names.get(id(x))

    def _learn(self) -> None:
        """Note the tensors that are parameters now: fully_shard replaces them for the forward."""
        for name, x in named_parameters(self._model):
            if id(x) not in self._names:
                self._names[id(x)] = name
                self._known.append(x)

    def names(self) -> tuple[str, ...]:
        """Return the names in order."""
        return tuple(self._order)


class _Watch(InFloat64):
    """The mode of a run: float64, the number of backward calls, and the order of uses.

    Args:
        uses: notes parameters while a loss runs; None before and after.
        backwards: the number of backward calls.
    """

    def __init__(self) -> None:
        super().__init__()
        self.uses: Uses | None = None
        self.backwards = 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a function of torch."""
        is_attribute = getattr(func, "__name__", "") == "__get__"
        if self.uses is not None and not is_attribute:
            self.uses.see([*args, *(kwargs or {}).values()])
        return super().__torch_function__(func, types, args, kwargs)

    @contextmanager
    def counted_backwards(self) -> Generator[None]:
        """Count the backward calls in the block; torch has no hook for them."""
        engine = autograd._engine_run_backward

        def run(*args: Any, accumulate_grad: bool = False, **kwargs: Any) -> Any:
            self.backwards += accumulate_grad
            return engine(*args, accumulate_grad=accumulate_grad, **kwargs)

        autograd._engine_run_backward = run
        try:
            yield
        finally:
            autograd._engine_run_backward = engine
