"""A module's structure, with tensors that have everything but memory in the place of its parameters and buffers; and back.

They are one number, not a number, expanded: so whoever asks a parameter for its shape, dtype or device is told the truth,
and whoever computes with it by mistake sees it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from inspect import isdatadescriptor
from typing import Any

import torch
from torch import Tensor, nn

from fshard.copying import copied, slots_of, unlike
from fshard.errors import ModuleError
from fshard.transforms.handle import KNOWN
from fshard.transforms.holders import tensors_of
from fshard.transforms.kept import is_nothing, put
from fshard.transforms.lazy import forget_recipes

NONE: Mapping[int, Tensor] = {}


def skeleton(module: nn.Module, near: torch.device | None = None, drawn: Mapping[int, Tensor] = NONE) -> nn.Module:
    """Return a copy of a module whose parameters and buffers have no memory; what is tied stays tied.

    Args:
        module: which is copied.
        near: where tensors of lazy layers will be; None: they stay without memory.
        drawn: what their plain attributes hold, by the ids of what stands for it.

    >>> bare = skeleton(nn.Linear(2, 3))
    >>> bare.weight, bare.weight.device, bare.weight.untyped_storage().nbytes()
    (Hollow(float32[3, 2]), device(type='cpu'), 4)
    """
    hollow = lru_cache(_nothing)

    def nothing(x: Tensor) -> Tensor:
        return hollow(x.dtype, near if near is not None and x.is_meta else x.device).expand(x.shape)

    bare: dict[int, Any] = {id(x): Hollow(nothing(x), requires_grad=x.requires_grad) for x in module.parameters()}
    bare |= {id(x): nothing(x).as_subclass(Bare) for x in module.buffers()}
    bare |= {**_computed(module), **drawn}
    slots = [f"{path}.{key}".removeprefix(".") for path, part in module.named_modules() for key, _ in slots_of(part)]
    if slots:
        raise ModuleError(
            f"{type(module).__name__} cannot be copied: {', '.join(slots)} stands in __slots__, which torch's modules do not "
            "copy. Keep it in a plain attribute."
        )
    if strange := unlike(module):
        raise ModuleError(
            f"{type(module).__name__} cannot be copied: {'; '.join(strange)}, and a copy would not find its own there. Keep "
            "them by names: a dict of strings, and self.get_parameter(name) or self.get_submodule(name) in forward."
        )
    try:
        return forget_recipes(copied(module, bare))
    except ModuleError:
        raise
    except Exception as error:
        raise ModuleError(
            f"{type(module).__name__} cannot be copied: {error}. Boosting keeps a copy of a module's structure: keep what "
            "cannot be copied outside of it, or give it a __deepcopy__."
        ) from error


def _computed(module: nn.Module) -> dict[int, Tensor]:
    """Return what a forward has left in attributes, as weight_norm does, without its graph, with which torch copies nothing."""
    found = (x for part in module.modules() for held in vars(part).values() for x in tensors_of(held))
    return {id(x): x.detach() for x in found if x.grad_fn is not None}


_T: Any = Tensor
_C: Any = torch._C  # pyright: ignore[reportPrivateUsage]
_VALUES = {"H", "T", "mH", "mT", "real", "imag", "data", "grad", "_grad"}
_ABOUT = KNOWN | {
    *(
        getattr(_T, name).__get__
        for name, x in vars(_C.TensorBase).items()
        if isdatadescriptor(x) and name not in _VALUES
    ),
    *(_T.requires_grad.__set__, _T.requires_grad_, _T.stride, _T.storage_offset, _T.is_contiguous, _T.is_inference),
    *(_T.untyped_storage, _T.__hash__, _T.type, _T.is_shared, torch.is_floating_point, torch.is_complex, torch.numel),
    *(torch.empty_like, torch.zeros_like, torch.ones_like, torch.full_like, torch.rand_like, torch.randn_like),
    *(_T.new, _T.new_empty, _T.new_zeros, _T.new_ones, _T.new_full, _T.new_tensor, _T.is_same_size, _T.is_signed),
    *(_T.data_ptr, torch.result_type, torch.is_same_size, torch.is_signed),
}
"""What can be told of a parameter, or made like it, without its values."""


_LIKE = {_T.to, _T.type_as, _T.expand_as, _T.view_as, _T.reshape_as}
"""What makes a tensor like another."""


class Bare(Tensor):
    """A buffer without memory: whoever looks for it, or writes to it, is told where it is."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Raise if values are asked for, or given."""
        with _C.DisableTorchFunctionSubclass():
            if func in _ABOUT:
                return func(*args, **(kwargs or {}))
            if func in _LIKE and not isinstance(args[0], Bare):
                return func(*args, **(kwargs or {}))
            if func in (_T.detach, _T.data.__get__):
                return func(*args).as_subclass(type(args[0]))
        raise ModuleError(
            "parameters and buffers of a boosted model have no values here: they lie as the plugin says. What is made of them, "
            "a penalty say, belongs into forward, and weight decay into the optimizer. model.unwrap() is a copy with values, "
            "and fs.optim.ema(opt, decay) keeps an average. They are set before the model is boosted, and a buffer that a loop "
            "reads is taken before."
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raise: nobody could make it again."""
        raise ModuleError(
            "parameters of a boosted model have no values to be saved: model.unwrap() is a copy with values."
        )

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"{type(self).__name__}({str(self.dtype).removeprefix('torch.')}{list(self.shape)})"


class Hollow(Bare, nn.Parameter):
    """A parameter without memory, nor gradient."""

    def _gradient(self, *given: Any) -> Any:
        """Raise: torch's own clipping, say, would find none, and do nothing."""
        raise ModuleError(
            "a boosted model's gradients are not at its parameters: booster.clip_grad_norm(optimizer, max_norm) and "
            "booster.clip_grad_value clip them, optimizer.zero_grad() drops them, optimizer.grads are they, as they lie. "
            'In the place of a GradScaler is the plugin\'s precision="fp16", or an optimizer fs.optim.loss_scaled(opt). Nor is '
            "such a model converted: that comes before boosting."
        )

    grad = property(_gradient, _gradient, _gradient)  # pyright: ignore[reportAssignmentType]

    def _hook(self, hook: Any) -> Any:
        """Raise: nobody would call it."""
        raise ModuleError(
            "hooks of a boosted model's parameters are not called: its gradients are not made there. optimizer.grads are they."
        )

    register_hook = register_post_accumulate_grad_hook = _hook


def _nothing(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full((), torch.nan if dtype.is_floating_point or dtype.is_complex else 0, dtype=dtype, device=device)


def written_to(bare: nn.Module) -> Callable[[], bool]:
    """Return what says whether anybody has written numbers to a skeleton's tensors, which have one for all of a dtype.

    It is asked in every call, so it looks at the host's alone: a GPU would have to be waited for.
    """
    with _C.DisableTorchFunctionSubclass():
        every = {x.untyped_storage().data_ptr(): x for x in (*bare.parameters(), *bare.buffers()) if x.is_cpu}
        ones = [x.detach().as_strided((), ()) for x in every.values() if x.is_floating_point() or x.is_complex()]
    return lambda: not all(x.isnan() for x in ones)


def filled(bare: nn.Module, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> nn.Module:
    """Return a copy of a skeleton with these tensors in it.

    >>> filled(skeleton(nn.Linear(1, 1)), {"weight": torch.ones(1, 1), "bias": torch.ones(1)}, {})(torch.ones(1))
    tensor([2.], grad_fn=<ViewBackward0>)
    """
    given: dict[int, Any] = {**_computed(bare)}
    for name, x in bare.named_parameters():
        given[id(x)] = nn.Parameter(params[name].detach(), requires_grad=x.requires_grad)
    known = dict(bare.named_buffers())
    for name, x in known.items():
        given[id(x)] = None if is_nothing(buffers[name]) else buffers[name]
    module = copied(bare, given)
    put(module, {name: x for name, x in buffers.items() if name not in known})
    return module
