"""`ModuleSlots`: the entries of a boosted module that the loop may write to between calls.

    model.module.temperature.fill_(2.0)         a buffer takes effect: in the next forward, step,
                                                state_dict or save
    model.module.center = center                so does another tensor in its place
    model.module[2].weight = nn.Parameter(w)    a parameter that is replaced, tied or added raises

Between calls the slot of a buffer holds one tensor, that of the module before `boost`, so that
references to it stay valid. A call runs on copies; that tensor gets a lazy copy of the result,
whose memory is copied at the first write: so any write of the loop is seen, also one through
`.data`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fshard.copying import lazy_copy, untouched
from fshard.errors import ModuleError
from fshard.transforms.module.replica import GradientState, ModuleSlot, Placeholder

_is_cow: Any = torch._C._is_cow_tensor  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]

_BOUND = (
    "Its gradient would be lost, since the optimizer steps on the parameters that were boosted. "
    "Tie, replace and add parameters and layers before boost, or boost again from model.unwrap() "
    "with a new optimizer."
)
"""The way out of errors of parameters that are not those of the optimizer."""


class ModuleSlots:
    """The slots of a module's buffers and parameters, and what the last call left in them.

    Args:
        module: whose parameters are placeholders.
        buffers: the names of its buffers; a frozen parameter may be declared as one.
        has_copies: True if layers run in copies of their containers, as in stages; then no layer
            may be exchanged.
    """

    def __init__(self, module: nn.Module, buffers: set[str], *, has_copies: bool) -> None:
        self._has_copies = has_copies
        self._buffers = list[ModuleSlot]()
        self._params = list[ModuleSlot]()
        first_names = dict[int, str]()
        for name, x in (*module.named_parameters(), *module.named_buffers()):
            first_names.setdefault(id(x), name)
        modules: list[Any] = [*module.modules()]
        for submodule in modules:
            for entries in (submodule._parameters, submodule._buffers):
                for key, x in entries.items():
                    if x is not None:
                        name = first_names[id(x)]
                        slots = self._buffers if name in buffers else self._params
                        slots.append(ModuleSlot(entries, key, name))

        self._placeholders = [entries[key] for entries, key, _ in self._params]
        self.gradients = GradientState()
        for placeholder in self._placeholders:
            placeholder.gradients = self.gradients
        self._in_use = self._placeholders  # what the last call has put into the slots
        # The children and the number of parameters of each module, as `boost` has found them.
        self._containers = [(x._modules, dict(x._modules)) for x in modules if x._modules]
        self._sizes = [(x._parameters, len(x._parameters)) for x in modules]

        # The tensor that the slots of each buffer hold between calls.
        self._tensors = dict[str, Tensor]()
        for entries, key, name in self._buffers:
            if not isinstance(entries[key], Placeholder):
                self._tensors.setdefault(name, entries[key])
        # What `leave` has last been given, and the states of the tensors since: see `_state`.
        self._values = dict[str, Any]()
        self._states = dict[str, tuple[int, bool]]()

    # -- parameters -------------------------------------------------------------------------------

    def validate_params(self) -> None:
        """Raise if the loop has bound, added or replaced parameters."""
        slots = zip(self._params, self._placeholders, self._in_use, strict=True)
        for (entries, key, name), placeholder, in_use in slots:
            x = entries.get(key)
            if x is not placeholder and x is not in_use:
                raise ModuleError(
                    f"the parameter {name} was bound to another after boost. {_BOUND}"
                )
        for entries, size in self._sizes:
            if len(entries) > size:
                *_, key = entries
                raise ModuleError(f"the parameter {key} was added after boost. {_BOUND}")
        for index, (children, before) in enumerate(self._containers):
            if children != before:
                self._validate_children(children, before)
                self._containers[index] = children, dict(children)

    def _validate_children(self, children: Mapping[str, Any], before: Mapping[str, Any]) -> None:
        """Raise if other layers have parameters; those without run in place."""
        for key, child in children.items():
            if child is None or child is before.get(key):
                continue
            has_params = any(True for _ in child.parameters())
            if has_params or self._has_copies:
                raise ModuleError(f"the layer {key} was added or replaced after boost. {_BOUND}")

    def record_params(self) -> None:
        """Record the parameters that a call has left in their slots."""
        self._in_use = [entries.get(key) for entries, key, _ in self._params]

    def release_params(self) -> None:
        """Drop what was recorded: the step is over, and the slots hold placeholders again."""
        self._in_use = self._placeholders

    # -- buffers ----------------------------------------------------------------------------------

    def written(self) -> dict[str, Tensor]:
        """Return copies of the buffers that the loop has written to, or bound to others, since the last call."""
        written = dict[str, Tensor]()
        bound = dict[str, Tensor]()
        for entries, key, name in self._buffers:
            x = entries.get(key)
            if isinstance(x, Placeholder):  # a declared parameter, between steps
                continue
            if not isinstance(x, Tensor):
                raise ModuleError(
                    f"the buffer {name} must be a tensor; got {x}, after boost. "
                    "Remove it before boost."
                )
            if x is not self._tensors.get(name):
                bound[name] = lazy_copy(x.detach())
            elif _state(x) != self._states.get(name):
                written[name] = lazy_copy(x.detach())
        return written | bound  # of a buffer with two names, the one that was bound

    def leave(self, values: Mapping[str, Any]) -> None:
        """Put the values of buffers into their slots, where the loop finds them."""
        with torch.no_grad():
            for entries, key, name in self._buffers:
                if isinstance(entries.get(key), Placeholder):
                    continue
                value = values.get(name)
                if isinstance(value, Tensor):
                    entries[key] = self._tensor(name, value)

    def _tensor(self, name: str, value: Tensor) -> Tensor:
        """Return the tensor of a buffer's slot, with a value."""
        x = self._tensors.get(name)
        if x is not None and value is self._values.get(name) and _state(x) == self._states[name]:
            return x
        copy = lazy_copy(value.detach())
        if not untouched(copy):
            # Memory that is not torch's was copied at once, and a write to it would not be seen.
            copy = lazy_copy(copy)
        if x is not None and _fits(x, copy):
            x.data = copy
        else:
            x = copy
            self._tensors[name] = copy
        self._values[name] = value
        self._states[name] = _state(x)
        return x


def _state(x: Tensor) -> tuple[int, bool]:
    """Return what a write to a tensor changes.

    That is the version; a write through `.data` leaves it, and ends that the copy is untouched.
    """
    try:
        version = x._version
    except RuntimeError:  # tensors of inference mode have none
        version = 0
    return version, _is_cow(x)


def _fits(x: Tensor, copy: Tensor) -> bool:
    """Return True if a tensor can get the memory of another."""
    is_plain = type(x) is Tensor and not x.requires_grad and x.is_inference() == copy.is_inference()
    return is_plain and (x.dtype, x.device) == (copy.dtype, copy.device)
