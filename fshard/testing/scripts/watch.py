"""`Watcher`: what a script trains, seen from torch's own hooks.

    forward of an outermost module     its parameters have their names, and start values
    backward                           a part of the loss of the next step; gradients
    before optimizer.step()            the gradients that it is given
    after optimizer.step()             parameters

Steps inside of a step, as those of ZeroRedundancyOptimizer, are part of the outer one.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunction  # pyright: ignore[reportPrivateUsage]
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from fshard.mesh.layout import PyTree, flatten, unflatten
from fshard.testing.programs.parameters import (
    Tensors,
    full_tensors,
    has_flat_parameters,
    local_batch_norm,
    named_parameters,
    sync_hint,
    tied_names,
    unsharded,
    without_wrappers,
)
from fshard.testing.programs.precision import Sends, widen
from fshard.testing.programs.record import RankRecord, RankStep, may_reduce_gradients
from fshard.testing.programs.uses import Uses
from fshard.testing.scripts.devices import OnCpu
from fshard.testing.scripts.draws import Draws
from fshard.testing.scripts.loaders import Reader
from fshard.torch_collectives import RecordedCall


class Finished(BaseException):
    """Ends a script that has made its steps. No `except Exception` catches it."""


Options = list[dict[str, tuple[float, ...]]]
"""The numbers of each group of an optimizer by name, as {"lr": (0.1,), "betas": (0.9, 0.95)}."""


class Start(NamedTuple):
    """The values that the one process begins with, and the options that its optimizer takes.

    Args:
        values: of parameters and buffers by name: the one is taken that has the right shape.
        options: of the optimizer in each step.
    """

    values: Mapping[str, Sequence[Tensor]]
    options: Sequence[Options]


class Root(NamedTuple):
    """An outermost module that a script has called, and what its names begin with."""

    prefix: str
    module: nn.Module
    uses: Uses


@dataclass
class _StepSoFar:
    """The work of a script since its last step.

    Args:
        sends_of_backward: the number of elements that had been sent when the last backward ended.
        sends_of_optimizer: the same when the optimizer began.
    """

    loss: float | None = None
    backwards: int = 0
    call_rows: list[int] = field(default_factory=list[int])
    kept: frozenset[str] = frozenset()
    grads: Tensors = field(default_factory=dict[str, Tensor])
    given: Tensors = field(default_factory=dict[str, Tensor])
    sends_of_backward: int = 0
    sends_of_optimizer: int = 0


class Watcher:
    """Watches the training in this process.

    Args:
        steps: after this number of the first optimizer the script ends.
        mode: under which it runs.
        reader: of its batches.
        sends: of the script.
        draws: of the script.
        start: in the one process, what the other processes began with.
        calls: of collectives, as they are recorded.
    """

    def __init__(
        self,
        steps: int,
        mode: OnCpu,
        reader: Reader,
        sends: Sends,
        draws: Draws,
        start: Start | None,
        calls: list[RecordedCall],
    ) -> None:
        self.start: Tensors = {}
        self.buffers: Tensors = {}
        self.options: list[Options] = []
        self.own_options: list[Options] = []
        self.steps_made = 0
        self.counts: list[int] = []
        self._records: list[RankStep] = []
        self._batches: list[PyTree] = []

        self._steps = steps
        self._mode = mode
        self._reader = reader
        self._sends = sends
        self._draws = draws
        self._start_of_all = start
        self._roots: list[Root] = []
        self._tied: dict[str, str] = {}
        self._optimizers: list[Optimizer] = []
        self._depth = 0
        self._depth_of_step = 0
        self._awaits_update = False
        self._calls = calls
        self._number_of_calls = 0
        self._now = _StepSoFar()
        self._taken: dict[int, Tensor] = {}

        reader.before_first = self._begin_steps
        mode.before_backward = self._before_backward
        mode.after_backward = self._after_backward
        mode.before_function = self._before_function

    @contextmanager
    def _aside(self) -> Generator[None]:
        """Let what is computed and sent in the block be none of the script."""
        elements = self._sends.elements
        dtypes = set(self._sends.dtypes)
        number_of_calls = len(self._calls)
        with DisableTorchFunction():
            yield
        self._sends.elements = elements
        self._sends.dtypes = dtypes
        del self._calls[number_of_calls:]

    def hooks(self) -> list[RemovableHandle]:
        """Register the hooks of steps, which are for all optimizers."""
        return [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]

    def has_stepped(self) -> bool:
        """Return True if an optimizer has made a step."""
        return bool(self._records)

    def calls(self) -> list[RecordedCall]:
        """Return the collectives from the first batch to the last step."""
        return self._calls[: self._number_of_calls]

    def record(self) -> RankRecord:
        """Return the training so far."""
        number = len(self._records)
        frozen: set[str] = set()
        order: list[str] = []
        dtypes: set[torch.dtype] = set()
        hint = ""
        batch_norm = ""
        for prefix, module, uses in self._roots:
            named = named_parameters(module)
            frozen.update([prefix + name for name, x in named if not x.requires_grad])
            hint = hint or sync_hint(module)
            batch_norm = batch_norm or local_batch_norm(module)
            order += [prefix + name for name in uses.names()]
            dtypes.update([x.dtype for _, x in named])
        steps = self._records
        if len(self._optimizers) > 1:
            # Each zeroes its own gradients, some time before its backward.
            steps = [step._replace(kept=frozenset()) for step in steps]
        # What is float32 was never used: all else is float64.
        low_dtypes = dtypes & {torch.bfloat16, torch.float16}
        return RankRecord(
            batches=self._batches[:number],
            steps=steps,
            start=self.start,
            frozen=frozenset(frozen),
            tied=self._tied,
            sync_hint=hint,
            batch_norm=batch_norm,
            order=order,
            computed_in=frozenset(self._mode.in_forward | low_dtypes),
            rounded_in=frozenset(self._mode.elsewhere),
            sent_in=frozenset(self._sends.dtypes),
        )

    # -- forward -----------------------------------------------------------------------------------

    def call(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return the call of a module, for all modules."""

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self._depth == 0:
                self._end_update()
            if self._depth or not torch.is_grad_enabled():
                return original(module, *args, **kwargs)
            self._depth += 1
            try:
                with self._aside():
                    self._see(module)
                    args, kwargs = self._inputs((args, kwargs))
                    self._note_rows((args, kwargs))
                return original(module, *args, **kwargs)
            finally:
                self._depth -= 1

        return call

    def _see(self, module: nn.Module) -> None:
        """Note an outermost module that has parameters, with the values that they begin with."""
        known = self._ids_of_parameters()
        is_new = any(p.requires_grad and id(p) not in known for p in module.parameters())
        is_root = any(root.module is module for root in self._roots)
        if is_root or not is_new:
            return
        if not self._roots and not self._reader.has_loader():
            self._begin_steps()
        for x in (*module.parameters(), *module.buffers()):
            widen(x)
        values = full_values(module)
        buffers = _buffers(module)
        prefix = self._prefix(module, [*values])
        if self._start_of_all is not None:
            _copy_in(module, prefix, self._start_of_all)
            values = full_values(module)
        self._roots.append(Root(prefix, module, Uses(module)))
        for name, first in tied_names(module).items():
            self._tied[prefix + name] = prefix + first
        self.start.update({prefix + name: x for name, x in values.items()})
        self.buffers.update({prefix + name: x for name, x in buffers.items()})

    def _begin_steps(self) -> None:
        """End the setup, at the first batch or forward: its collectives belong to no step."""
        self._calls.clear()
        self._draws.begin_steps()

    def _prefix(self, module: nn.Module, names: Sequence[str]) -> str:
        """Return what the names of a module's parameters begin with, so that each is another."""
        if not any(name in self.start for name in names):
            return ""
        inner: Any = module
        while isinstance(getattr(inner, "module", None), nn.Module):
            inner = inner.module
        kind = type(inner).__name__.removeprefix("FSDP")
        prefix = f"{kind}."
        number = 1
        while any(prefix + name in self.start for name in names):
            number += 1
            prefix = f"{kind} {number}."
        return prefix

    def _inputs(self, given: Any) -> Any:
        leaves, structure = flatten(given)
        return unflatten(structure, [self._input(x) for x in leaves])

    def _note_rows(self, given: Any) -> None:
        """Note the rows of a call: of its first tensor that has a dim."""
        for x in flatten(given)[0]:
            if isinstance(x, Tensor) and x.ndim > 0:
                self._now.call_rows.append(len(x))
                return

    def _input(self, x: Any) -> Any:
        is_data = isinstance(x, Tensor) and x.ndim > 0 and not x.requires_grad
        if not is_data or isinstance(x, DTensor | nn.Parameter):
            return x
        return self._reader.input(x)

    def _before_function(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[Sequence[Any], dict[str, Any]]:
        """Note the uses of parameters in the forward of a module.

        Outside of it, replace the data that a script takes together with the output of a model.
        """
        if not torch.is_grad_enabled() or self._depth_of_step or not self._roots:
            return args, kwargs
        if getattr(func, "__name__", "") == "__get__":
            return args, kwargs
        with DisableTorchFunction():
            if self._depth:
                if not self._records:
                    for root in self._roots:
                        root.uses.see([*args, *kwargs.values()])
                return args, kwargs
            if self._reader.has_loader():
                return args, kwargs
            tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
            has_output = any(x.requires_grad and x.grad_fn is not None for x in tensors)
            if len(tensors) < 2 or not has_output:
                return args, kwargs
            inputs = [self._input(x) for x in args]
            return inputs, {name: self._input(x) for name, x in kwargs.items()}

    # -- backward ----------------------------------------------------------------------------------

    def _before_backward(self, loss: Any, is_backward: bool) -> None:
        """Add a loss to that of the step, and see whether gradients are left from the last one."""
        self._depth += 1  # what is computed again in a backward is no model of its own
        if not is_backward:
            return
        if isinstance(loss, list | tuple) and len(loss) == 1:
            loss = loss[0]
        with self._aside():
            if isinstance(loss, Tensor) and loss.numel() == 1:
                full = loss.full_tensor() if isinstance(loss, DTensor) else loss
                self._now.loss = (self._now.loss or 0.0) + float(full.detach())
            if not self._now.backwards:
                self._now.kept = frozenset(self._nonzero_gradients())
            self._now.backwards += 1

    def _after_backward(self, is_backward: bool) -> None:
        self._depth -= 1
        if not is_backward:
            return
        self._now.sends_of_backward = self._sends.elements
        with self._aside():
            self._taken = {}
            for root in self._roots:
                for p in root.module.parameters():
                    if p.grad is not None:
                        self._taken[id(p)] = p.grad.detach().clone()

    def _nonzero_gradients(self) -> list[str]:
        names: list[str] = []
        for prefix, module, _ in self._roots:
            for name, param in named_parameters(module):
                grad = param.grad
                local = grad.to_local() if isinstance(grad, DTensor) else grad
                if local is not None and bool(local.any()):
                    names.append(prefix + name)
        return names

    # -- steps -------------------------------------------------------------------------------------

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._depth_of_step += 1
        if self._depth_of_step > 1:
            return
        if all(optimizer is not each for each in self._optimizers):
            self._optimizers.append(optimizer)
        self._end_update()
        is_first = optimizer is self._optimizers[0]
        if is_first and self.steps_made == self._steps:
            raise Finished

        with self._aside():
            self._set_options(optimizer)
            self._note_reading()
            self._now.grads, self._now.given = self._gradients_of(optimizer)
        self._now.sends_of_optimizer = self._sends.elements

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._depth_of_step -= 1
        if self._depth_of_step:
            return
        now = self._now
        has_sent = self._sends.elements > now.sends_of_optimizer
        may_reduce = has_sent and may_reduce_gradients(optimizer)
        with self._aside():
            params = self._full_params()
        step = RankStep(
            loss=now.loss,
            grads=now.grads,
            params=params,
            given=now.given,
            kept=now.kept,
            backwards=now.backwards,
            call_rows=now.call_rows,
            sends=self._sends.elements - now.sends_of_backward,
            reduced_later=frozenset(now.given) if may_reduce else frozenset(),
        )
        self._records.append(step)
        self._now = _StepSoFar(sends_of_backward=now.sends_of_backward)
        self._number_of_calls = len(self._calls)
        self._awaits_update = self._updates_other_tensors(optimizer)

        if optimizer is not self._optimizers[0]:
            return
        self.steps_made += 1
        if self._has_made_all() and not self._awaits_update:
            raise Finished

    def _has_made_all(self) -> bool:
        """Return True if the only optimizer has made all steps.

        Others may step after it in the same turn: a single step does not show it.
        """
        is_only_one = self._steps > 1 and len(self._optimizers) == 1
        return is_only_one and self.steps_made == self._steps

    def _updates_other_tensors(self, optimizer: Optimizer) -> bool:
        """Return True if an optimizer updates tensors of no module, as a shard of all parameters.

        The script copies them to the parameters after its step.
        """
        return not _ids_of(optimizer) & self._ids_of_parameters()

    def _ids_of_parameters(self) -> set[int]:
        ids: set[int] = set()
        for root in self._roots:
            ids.update(map(id, root.module.parameters()))
        return ids

    def _end_update(self) -> None:
        """Take the parameters of the last step, which its optimizer did not update itself.

        They are updated before the next forward or step of the script.
        """
        if not self._awaits_update:
            return
        self._awaits_update = False
        with self._aside():
            self._records[-1] = self._records[-1]._replace(params=self._full_params())
        if self._has_made_all():
            raise Finished

    def end(self) -> None:
        """End the last update of a script that has ended itself."""
        with suppress(Finished):
            self._end_update()

    def _full_params(self) -> Tensors:
        params = dict(self.start)
        for prefix, module, _ in self._roots:
            params.update({prefix + name: x for name, x in full_values(module).items()})
        return {name: params[name] for name in self.start}

    def _set_options(self, optimizer: Optimizer) -> None:
        """Take the options of the processes: schedules may depend on the number of these."""
        step = len(self.options)
        self.own_options.append(_options(optimizer))
        if self._start_of_all is not None and step < len(self._start_of_all.options):
            options = self._start_of_all.options[step]
            for group, of_group in zip(optimizer.param_groups, options, strict=False):
                for name, values in of_group.items():
                    group[name] = values if isinstance(group.get(name), tuple) else values[0]
        self.options.append(_options(optimizer))

    def _note_reading(self) -> None:
        """Note the batches that were read since the last step."""
        read = self._reader.read.of_training()
        before = self.counts[-1] if self.counts else 0
        self.counts.append(len(read))
        batch: PyTree = read[before:]
        if not batch and self._batches:
            batch = self._batches[-1]  # that of another optimizer
        self._batches.append(flatten(batch)[0])

    def _gradients_of(self, optimizer: Optimizer) -> tuple[Tensors, Tensors]:
        """Return the gradients of what an optimizer updates: after the backward, and now.

        If it updates other tensors than parameters, those of all parameters are the former.
        """
        updated = _ids_of(optimizer)
        of_others = self._updates_other_tensors(optimizer)
        grads: Tensors = {}
        given: Tensors = {}
        for prefix, module, _ in self._roots:
            is_updated = any(id(p) in updated for p in module.parameters())
            if not (is_updated or of_others):
                continue
            for name, x in full_gradients(module, self._taken).items():
                grads[prefix + name] = x
            if of_others:
                continue
            for name, x in full_gradients(module, None).items():
                taken = grads.get(prefix + name)
                if taken is not None and torch.equal(x, taken):
                    x = taken  # which is sent to the parent once
                given[prefix + name] = x
        return grads, given


def _ids_of(optimizer: Optimizer) -> set[int]:
    """Return the ids of the tensors that an optimizer updates."""
    ids: set[int] = set()
    for group in optimizer.param_groups:
        ids.update(map(id, group["params"]))
    return ids


def _options(optimizer: Optimizer) -> Options:
    """Return the numbers in the groups of an optimizer: `lr`, and what else a schedule may set."""
    options: Options = []
    for group in optimizer.param_groups:
        numbers: dict[str, tuple[float, ...]] = {}
        for name, value in group.items():
            if name == "lr":
                numbers[name] = (float(value),)  # it may be a tensor
                continue
            values: Sequence[Any] = value if isinstance(value, tuple) else (value,)
            if all(type(x) in (int, float) for x in values):
                numbers[name] = tuple(values)
        options.append(numbers)
    return options


# -- full values -----------------------------------------------------------------------------------
#
# Only the processes that have a module take part: others, as those of another stage, are elsewhere.


def full_values(module: nn.Module) -> Tensors:
    """Return copies of the parameters of a module."""
    with unsharded(module, gradients=False):
        return {name: _full(x) for name, x in named_parameters(module)}


def full_gradients(module: nn.Module, taken: Mapping[int, Tensor] | None) -> Tensors:
    """Return copies of the gradients of a module: those taken before, or those that are there now.

    A DTensor without a gradient is 0 here, since another process may have one.
    """
    grads: Tensors = {}
    if has_flat_parameters(module):
        return full_tensors(module, gradients=True)
    with unsharded(module, gradients=True):
        for name, x in named_parameters(module):
            grad = x.grad
            if taken is not None and id(x) in taken:
                grad = taken[id(x)]
            if grad is None and isinstance(x, DTensor) and x.requires_grad:
                grad = torch.zeros_like(x)
            if grad is not None:
                grads[name] = _full(grad)
    return grads


def _full(x: Tensor) -> Tensor:
    full = x.full_tensor() if isinstance(x, DTensor) else x
    return full.detach().clone()


def _buffers(module: nn.Module) -> Tensors:
    return {without_wrappers(name): _full(x) for name, x in module.named_buffers()}


def _copy_in(module: nn.Module, prefix: str, start: Start) -> None:
    """Begin with the values of the processes."""
    buffers = [(without_wrappers(name), x) for name, x in module.named_buffers()]
    with torch.no_grad():
        for name, x in (*named_parameters(module), *buffers):
            local = x.to_local() if isinstance(x, DTensor) else x
            for value in start.values.get(prefix + name, ()):
                if value.shape == local.shape:
                    local.copy_(value)
