"""The run of a program in one process: what it trains, recorded as full tensors on the CPU."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fshard.errors import PromiseError
from fshard.mesh.layout import PyTree, flatten, unflatten
from fshard.rounding import bound_of, largest
from fshard.testing.programs.parameters import (
    Tensors,
    frozen_names,
    full_tensors,
    gathered,
    has_flat_parameters,
    local_batch_norm,
    named_parameters,
    sync_hint,
    tied_names,
)
from fshard.testing.programs.precision import (
    LOWER,
    Sends,
    watched_sends,
    widen,
)
from fshard.testing.programs.uses import RunMode, Uses
from fshard.testing.verdicts import float64_by_default

Program = Callable[
    [int, "ProgramWorld"], tuple[Any, Callable[[Any, Any], Any], Any, Callable[[], object]]
]


class ProgramWorld(int):
    """The number of processes, with their mesh.

    `world.mesh["model"]` is torch's DeviceMesh of an axis.
    """

    mesh: DeviceMesh


class RankStep(NamedTuple):
    """One step of a process.

    Args:
        loss: None where the process has none.
        grads: before `step()`.
        params: after it.
        given: the gradients that an optimizer of torch was given.
        kept: the parameters whose gradients were not 0 when the step began.
        backwards: the number of backward calls.
        call_rows: the rows of each call of an outermost module, of scripts.
        sends: the number of elements that `step()` has sent.
        reduced_later: the parameters that `step()` has changed after an optimizer had, or that an
            optimizer has which communicates itself.
    """

    loss: float | None
    grads: Tensors
    params: Tensors
    given: Tensors
    kept: frozenset[str]
    backwards: int
    call_rows: Sequence[int] = ()
    sends: int = 0
    reduced_later: frozenset[str] = frozenset()


class RankRecord(NamedTuple):
    """The training of one process: full tensors, or its own shards of those sharded by hand.

    Args:
        batches: of this process: the leaves of the batch of each step, or of one for all steps.
        steps: one after another.
        start: the parameters before the first step, frozen ones too.
        frozen: the parameters that require no gradient.
        tied: other names of parameters, with their first ones.
        order: the parameters in the order in which the forward uses them.
        computed_in: the lowest dtypes of activations, parameters, buffers and batches.
        rounded_in: those of other tensors.
        sent_in: those of tensors that are sent.
        sync_hint: where a reduction by a wrapper of the model may have been lost.
        batch_norm: the first BatchNorm that takes statistics of this process alone.
    """

    batches: Sequence[PyTree]
    steps: Sequence[RankStep] = ()
    start: Mapping[str, Tensor] = {}
    frozen: frozenset[str] = frozenset()
    tied: Mapping[str, str] = {}
    order: Sequence[str] = ()
    computed_in: frozenset[torch.dtype] = frozenset()
    rounded_in: frozenset[torch.dtype] = frozenset()
    sent_in: frozenset[torch.dtype] = frozenset()
    sync_hint: str = ""
    batch_norm: str = ""

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
        copies = [_leaf_copies(batch) for batch in run.batches]
        start = full_tensors(run.model)
        frozen = frozen_names(run.model)
        tied = tied_names(run.model)
        records: list[RankStep] = []
        for i in range(steps):
            torch.manual_seed(run.seed)  # so that a loss that draws differs too
            if clears_gradients:
                _clear_gradients(run.model)
            batch = own_batches[min(i, len(own_batches) - 1)]
            with _naming_missing_axes(axes):
                records.append(_record_of_step(run, _copied(batch)))
    return RankRecord(
        batches=copies,
        steps=records,
        start=start,
        frozen=frozen,
        tied=tied,
        order=run.uses.names(),
        computed_in=frozenset(run.watch.in_forward | _dtypes_of(run.model, run.batches)),
        rounded_in=frozenset(run.watch.elsewhere),
        sent_in=frozenset(run.sends.dtypes),
        sync_hint=sync_hint(run.model),
        batch_norm=local_batch_norm(run.model),
    )


def batches_alone(
    program: Program, axes: Mapping[str, int], steps: int, seed: int
) -> list[list[Any]]:
    """Return the leaves of the batches that a program makes in this process."""
    run = _begun(program, axes, steps, seed)
    with run.stack:
        return [_leaf_copies(batch) for batch in run.batches]


def _record_of_step(run: _BegunProgram, batch: PyTree) -> RankStep:
    """Run one step, and record what it does."""
    run.watch.backwards = 0
    optimizer_grads = _OptimizerGradients(run.model, run.sends)
    before = _versions_of_gradients(run.model)
    kept = [name for name, (grad, _) in before.items() if _local(grad).any()]
    with optimizer_grads:
        run.watch.uses = run.uses
        loss = loss_of(run.loss_fn(run.model, batch))
        run.watch.uses = None
        can_be_differentiated = isinstance(loss, Tensor) and loss.requires_grad
        if can_be_differentiated and not _has_taken_gradients(run, before):
            cast("Tensor", loss).backward()
        if isinstance(loss, Tensor):
            loss = loss.item()
        grads = full_tensors(run.model, gradients=True)

        sends_before = run.sends.elements
        run.step()
        sends = run.sends.elements - sends_before
        reduced_later = optimizer_grads.reduced_later()
    return RankStep(
        loss=None if loss is None else float(loss),
        grads=grads,
        params=full_tensors(run.model),
        given=optimizer_grads.full(),
        kept=frozenset(kept),
        backwards=run.watch.backwards,
        sends=sends,
        reduced_later=reduced_later,
    )


# -- the parts of a program ------------------------------------------------------------------------


class _BegunProgram(NamedTuple):
    """A program that has begun, in float64 and watched until its stack is left."""

    stack: ExitStack
    watch: RunMode
    uses: Uses
    sends: Sends
    seed: int
    model: Any
    loss_fn: Callable[[Any, Any], Any]
    batches: list[PyTree]
    step: Callable[[], object]


def _begun(program: Program, axes: Mapping[str, int], steps: int, seed: int) -> _BegunProgram:
    """Call the program, in the modes in which all of it runs."""
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    rank = dist.get_rank()
    world = ProgramWorld(dist.get_world_size())
    world.mesh = mesh
    watch = RunMode()
    sends = Sends()
    with ExitStack() as stack:
        stack.enter_context(float64_by_default())
        stack.enter_context(watched_sends(sends))
        stack.enter_context(watch)
        stack.enter_context(watch.counted_backwards())
        stack.enter_context(any_comm_hook())
        own_seed = 1000 * seed + rank  # so that what is not seeded by the program differs
        torch.manual_seed(own_seed)
        with _naming_missing_axes(axes):
            result = program(rank, world)
        model, loss_fn, batch, step = _parts(result)
        batches = _batches_of(batch, steps)
        _widen_all(model, batches)
        return _BegunProgram(
            stack.pop_all(), watch, Uses(model), sends, own_seed, model, loss_fn, batches, step
        )
    raise AssertionError  # for the type checker: an ExitStack may swallow exceptions


class MissingAxisError(PromiseError):
    """A program needs an axis of its mesh that the command did not name."""


@contextmanager
def _naming_missing_axes(axes: Mapping[str, int]) -> Generator[None]:
    """Name the axis that the mesh has not, if a program needs one."""
    try:
        yield
    except KeyError as error:
        missing = [name for name in axes_needed_by(error) if name not in axes]
        if not missing:
            raise
        axis = missing[0]
        text = f"the program asks for axis {axis!r}: add {axis}=1 to --mesh."
        raise MissingAxisError(text) from None


def axes_needed_by(error: KeyError) -> list[str]:
    """Return the axes that a program takes of a DeviceMesh, if it raised for one that it has not."""
    for pattern in (r"Invalid mesh_dim_names? (.*?) specified", r"Mesh dimension '(.*?)' does not"):
        found = re.search(pattern, str(error))
        if found is not None:
            return re.findall(r"\w+", found[1])
    return []


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

    It may be a number, a dict that has "loss", an object with `.loss` as those of Hugging Face, or
    a tuple with the loss first.
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
    is_tree = isinstance(batch, Tensor | Mapping | list | tuple)
    if is_tree or not isinstance(batch, Iterable):
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


def _has_taken_gradients(run: _BegunProgram, before: Versions) -> bool:
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


def may_reduce_gradients(optimizer: torch.optim.Optimizer) -> bool:
    """Return True unless an optimizer is one of torch: those take gradients as they are.

    ZeroRedundancyOptimizer communicates, but sends parameters.
    """
    return not type(optimizer).__module__.startswith("torch.")


class _OptimizerGradients:
    """Keeps the gradients that optimizers of torch are given, each at its first step.

    It keeps what they have made of parameters too, to see whether `step()` changes that.
    """

    def __init__(self, model: Any, sends: Sends) -> None:
        self._sends = sends
        self._sends_before: dict[int, int] = {}
        self._updated: Tensors = {}
        self._reduced_later: set[str] = set()
        self._params: dict[str, Tensor] = {}
        if not has_flat_parameters(model):
            self._params = dict(named_parameters(model))
        self._grads: Tensors = {}

    def __enter__(self) -> None:
        self._hooks = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._sends_before[id(optimizer)] = self._sends.elements
        for name, x in self._params_of(optimizer).items():
            if x.grad is not None and name not in self._grads:
                self._grads[name] = x.grad.detach().clone()

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        has_sent = self._sends.elements > self._sends_before[id(optimizer)]
        updated = self._params_of(optimizer)
        if has_sent and may_reduce_gradients(optimizer):
            self._reduced_later.update(updated)
        for name, x in updated.items():
            self._updated[name] = _local(x).detach().clone()

    def _params_of(self, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        ids = {id(x) for group in optimizer.param_groups for x in group["params"]}
        return {name: x for name, x in self._params.items() if id(x) in ids}

    def reduced_later(self) -> frozenset[str]:
        """Return the parameters that are changed after an optimizer has, or that it may reduce."""
        names = set(self._reduced_later)
        for name, updated in self._updated.items():
            now = _local(self._params[name]).detach()
            bound = bound_of(now, 0.0, torch.float64)
            if largest(now - updated) > bound:
                names.add(name)
        return frozenset(names)

    def full(self) -> Tensors:
        """Return the gradients as full tensors, after the step: then all processes take part."""
        return gathered(self._grads, self._params)
