"""`Watcher`: what a script trains, seen from torch's own hooks.

    forward of an outermost module     its parameters have their names, and start values
    backward                           a part of the loss of the next step
    before optimizer.step()            gradients
    after optimizer.step()             parameters

Steps inside of a step, as those of ZeroRedundancyOptimizer, are part of the outer one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from fshard.mesh.layout import flatten, unflatten
from fshard.testing.programs.loaders import Reader
from fshard.testing.programs.record import Tensors, full_tensors
from fshard.testing.programs.substitutions import OnCpu


class Finished(BaseException):
    """Ends a script that has made its steps. No `except Exception` catches it."""


class Start(NamedTuple):
    """What the one process begins with, and the learning rates that it takes.

    Args:
        params: values of trained parameters by name: the one is taken that has the right shape.
        others: values of frozen parameters and buffers.
        rates: the learning rates of each step.
    """

    params: Mapping[str, Sequence[Tensor]]
    others: Mapping[str, Sequence[Tensor]]
    rates: list[list[float]]


class Watcher:
    """Watches the training in this process.

    Args:
        steps: after so many of the first optimizer the script ends.
        mode: under which it runs.
        reader: of its batches.
        start: in the one process, what the other processes began with.
    """

    def __init__(self, steps: int, mode: OnCpu, reader: Reader, start: Start | None) -> None:
        self.losses: list[float | None] = []
        self.grads: list[Tensors] = []
        self.params: list[Tensors] = []
        self.start: Tensors = {}
        self.others: Tensors = {}
        self.rates: list[list[float]] = []
        self.counts: list[int] = []
        self.kept_gradients: list[str] = []

        self._steps = steps
        self._reader = reader
        self._given = start
        self._depth = 0
        self._in_step = 0
        self._roots: list[tuple[str, nn.Module]] = []
        self._optimizers: list[Optimizer] = []
        self._first_steps = 0
        self._loss: float | None = None
        self._is_first_backward = True
        mode.before_backward = self._before_backward
        mode.after_backward = self._after_backward
        mode.before_function = self._before_function

    def hooks(self) -> list[RemovableHandle]:
        """Register the hooks of steps, which are for all optimizers."""
        return [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]

    # -- forward -----------------------------------------------------------------------------------

    def call(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return the call of a module, for all modules."""

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self._depth or not torch.is_grad_enabled():
                return original(module, *args, **kwargs)
            self._depth += 1
            try:
                with torch._C.DisableTorchFunction():
                    self._see(module)
                    args, kwargs = self._inputs((args, kwargs))
                return original(module, *args, **kwargs)
            finally:
                self._depth -= 1

        return call

    def _see(self, module: nn.Module) -> None:
        """Note an outermost module that has parameters, with the values that they begin with."""
        has_parameters = any(p.requires_grad for p in module.parameters())
        if not has_parameters or any(module is root for _, root in self._roots):
            return
        known = self._ids()
        if all(id(p) in known for p in module.parameters()):
            return  # an inner module of one that was seen

        params = full_tensors(module)
        others = _others(module)
        prefix = self._prefix(module, [*params, *others])
        self._roots.append((prefix, module))
        if self._given is not None:
            _copy_in(module, prefix, self._given)
            params = full_tensors(module)
        for name, x in params.items():
            self.start[prefix + name] = x
        for name, x in others.items():
            self.others[prefix + name] = x

    def _prefix(self, module: nn.Module, names: Sequence[str]) -> str:
        """Return what tells the parameters of a module from those of another one."""
        if not any(name in self.start for name in names):
            return ""
        inner: Any = module
        while isinstance(getattr(inner, "module", None), nn.Module):
            inner = inner.module
        name = type(inner).__name__.removeprefix("FSDP")
        prefix = f"{name}."
        number = 1
        while any(prefix + each in self.start for each in names):
            number += 1
            prefix = f"{name} {number}."
        return prefix

    def _ids(self) -> set[int]:
        return {id(p) for _, root in self._roots for p in root.parameters()}

    def _inputs(self, given: Any) -> Any:
        leaves, structure = flatten(given)
        return unflatten(structure, [self._input(x) for x in leaves])

    def _input(self, x: Any) -> Any:
        is_data = isinstance(x, Tensor) and x.ndim > 0 and not x.requires_grad
        if not is_data or isinstance(x, DTensor | nn.Parameter):
            return x
        return self._reader.input(x)

    def _before_function(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[Sequence[Any], dict[str, Any]]:
        """Replace data that a script itself takes together with the output of a model."""
        if self._depth or self._in_step or not torch.is_grad_enabled():
            return args, kwargs
        if not self._roots or self._reader.has_loader():
            return args, kwargs
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        with torch._C.DisableTorchFunction():
            has_output = any(x.requires_grad and x.grad_fn is not None for x in tensors)
            if len(tensors) < 2 or not has_output:
                return args, kwargs
            inputs = [self._input(x) for x in args]
            return inputs, {name: self._input(x) for name, x in kwargs.items()}

    # -- backward ----------------------------------------------------------------------------------

    def _before_backward(self, loss: Any) -> None:
        """Add a loss to that of the step, and see whether gradients are left from the last one."""
        self._depth += 1  # what is computed again in a backward is no model of its own
        if isinstance(loss, list | tuple) and len(loss) == 1:
            loss = loss[0]
        with torch._C.DisableTorchFunction():
            if isinstance(loss, Tensor) and loss.numel() == 1:
                full = loss.full_tensor() if isinstance(loss, DTensor) else loss
                self._loss = (self._loss or 0.0) + float(full.detach())
            if self._is_first_backward and len(self._optimizers) < 2:
                self._is_first_backward = False
                self.kept_gradients += self._nonzero_gradients()

    def _after_backward(self) -> None:
        self._depth -= 1

    def _nonzero_gradients(self) -> list[str]:
        names: list[str] = []
        for prefix, root in self._roots:
            for name, param in root.named_parameters():
                grad = param.grad
                local = grad.to_local() if isinstance(grad, DTensor) else grad
                if local is not None and bool(local.any()):
                    names.append(prefix + name)
        return names

    # -- steps -------------------------------------------------------------------------------------

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._in_step += 1
        if self._in_step > 1:
            return
        if all(optimizer is not each for each in self._optimizers):
            self._optimizers.append(optimizer)
        is_first = optimizer is self._optimizers[0]
        if is_first and self._first_steps == self._steps:
            raise Finished

        with torch._C.DisableTorchFunction():
            self._set_rates(optimizer)
            self.losses.append(self._loss)
            self._loss = None
            self._is_first_backward = True
            self.counts.append(self._reader.count())
            self.grads.append(self._gradients_of(optimizer))

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._in_step -= 1
        if self._in_step:
            return
        with torch._C.DisableTorchFunction():
            params = dict(self.start)
            for prefix, root in self._roots:
                params.update({prefix + name: x for name, x in full_tensors(root).items()})
            self.params.append({name: params[name] for name in self.start})

        if optimizer is not self._optimizers[0]:
            return
        self._first_steps += 1
        # Others may step after it in the same turn: a single step does not tell.
        is_only_one = self._steps > 1 and len(self._optimizers) == 1
        if is_only_one and self._first_steps == self._steps:
            raise Finished

    def _set_rates(self, optimizer: Optimizer) -> None:
        """Take the learning rates of the processes: they may depend on the number of these."""
        step = len(self.rates)
        if self._given is not None and step < len(self._given.rates):
            for group, rate in zip(optimizer.param_groups, self._given.rates[step], strict=False):
                group["lr"] = rate
        self.rates.append([float(group.get("lr", 0.0)) for group in optimizer.param_groups])

    def _gradients_of(self, optimizer: Optimizer) -> Tensors:
        """Return the gradients of the parameters that an optimizer updates."""
        updated: set[int] = set()
        for group in optimizer.param_groups:
            updated.update(map(id, group["params"]))
        grads: Tensors = {}
        for prefix, root in self._roots:
            own = any(id(p) in updated for p in root.parameters())
            if own:
                full = full_tensors(root, gradients=True)
                grads.update({prefix + name: x for name, x in full.items()})
        return grads


# -- values that a run begins with -----------------------------------------------------------------


def _others(module: nn.Module) -> Tensors:
    """Return frozen parameters and buffers."""
    tensors: Tensors = {}
    for name, x in (*module.named_parameters(), *module.named_buffers()):
        if not x.requires_grad and not x.is_meta:
            full = x.full_tensor() if isinstance(x, DTensor) else x
            tensors[without_wrappers(name)] = full.detach().clone()
    return tensors


def _copy_in(module: nn.Module, prefix: str, start: Start) -> None:
    """Begin with the values of the processes."""
    values = {**start.others, **start.params}
    for name, x in (*module.named_parameters(), *module.named_buffers()):
        local = x.to_local() if isinstance(x, DTensor) else x
        for value in values.get(prefix + without_wrappers(name), ()):
            if value.shape == local.shape:
                with torch.no_grad():
                    local.copy_(value)


def without_wrappers(name: str) -> str:
    """Return the name that a parameter has in the model itself."""
    from fshard.testing.programs import record

    return record._without_wrappers(name)
