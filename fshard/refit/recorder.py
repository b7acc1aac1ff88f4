"""Follow the elements of source weights through the operations of a loader.

    w = cat([q, k])           the same operation is run on the numbers of q and k
    x = w.t()[:2]             a view has the storage of w, and so its numbers
    param.data[2:4].copy_(x)  the numbers of x are written to the shadow of the parameter

A parameter of the target is not written itself: it keeps its values. Operations that compute with
elements of a source raise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fshard.errors import RefitError
from fshard.refit.numbers import CONSTANT, UNWRITTEN, ElementNumbers, Shadows
from fshard.source import call_site

# Operations that move elements, with the arguments that have these. They are run on numbers too.
_MOVES: Mapping[str, tuple[str, ...]] = {
    "_pin_memory": ("self",),
    "_to_copy": ("self",),
    "_unsafe_view": ("self",),
    "as_strided_scatter": ("self", "src"),
    "cat": ("tensors",),
    "channel_shuffle": ("self",),
    "clone": ("self",),
    "constant_pad_nd": ("self",),
    "diagonal_scatter": ("self", "src"),
    "embedding": ("weight",),
    "expand_copy": ("self",),
    "flip": ("self",),
    "gather": ("self",),
    "index": ("self",),
    "index_copy": ("self", "source"),
    "index_put": ("self", "values"),
    "index_select": ("self",),
    "masked_fill": ("self",),
    "masked_scatter": ("self", "source"),
    "masked_select": ("self",),
    "narrow_copy": ("self",),
    "native_channel_shuffle": ("self",),
    "permute_copy": ("self",),
    "pixel_shuffle": ("self",),
    "pixel_unshuffle": ("self",),
    "repeat": ("self",),
    "roll": ("self",),
    "rot90": ("self",),
    "scatter": ("self", "src"),
    "select_scatter": ("self", "src"),
    "slice_copy": ("self",),
    "slice_scatter": ("self", "src"),
    "split_copy": ("self",),
    "split_with_sizes_copy": ("self",),
    "stack": ("tensors",),
    "t_copy": ("self",),
    "take": ("self",),
    "transpose_copy": ("self",),
    "unbind_copy": ("self",),
    "unfold_copy": ("self",),
    "view_copy": ("self",),
    "where": ("self", "other"),
}
# The same in place: they write numbers to the shadow of `self`.
_MOVES_IN_PLACE: Mapping[str, tuple[str, ...]] = {
    "_index_put_impl_": ("self", "values"),
    "index_copy_": ("self", "source"),
    "index_fill_": ("self",),
    "index_put_": ("self", "values"),
    "masked_fill_": ("self",),
    "masked_scatter_": ("self", "source"),
    "scatter_": ("self", "src"),
}
_FILLS = frozenset({"fill_", "zero_", "normal_", "uniform_", "random_", "bernoulli_"})
_VALUES = frozenset({"value"})
"""Arguments that are constants."""
_DROPPED = frozenset({"dtype", "layout", "device", "pin_memory", "memory_format", "non_blocking"})
"""Arguments that choose the memory of a result, not its elements."""
_METADATA = frozenset({"is_pinned", "is_same_size", "set_"})
_LIKE = frozenset({"empty_like", "new_empty", "new_empty_strided"})
_CONSTANTS_LIKE = frozenset(
    {"zeros_like", "ones_like", "full_like", "rand_like", "randn_like"}
    | {"new_zeros", "new_ones", "new_full"}
)
_READS = frozenset({"numpy", "__array__", "tolist", "__dlpack__", "__reduce_ex__"})
"""Methods that read elements without an operation of torch."""


class LoadRecorder(TorchDispatchMode):
    """The numbers of all tensors while a loader runs.

    Args:
        numbering: of the sources.
        targets: the tensors that the loader writes; they keep their values.
    """

    def __init__(self, numbering: ElementNumbers, targets: Sequence[Tensor]) -> None:
        super().__init__()
        self.numbering = numbering
        self.shadows = Shadows()
        self.error: RefitError | None = None
        for x in targets:
            if self.shadows.find(x) is None:
                self.shadows.add(x).is_target = True

    def weight(self, source: int) -> Tensor:
        """Return a new tensor in the place of a source, whose elements have its numbers."""
        weight = self.numbering.weights[source]
        x = torch.empty(weight.shape, dtype=weight.dtype, device="cpu")
        self.shadows.add(x, self.numbering.ranges[source].first, step=1)
        return x

    def numbers(self, x: Tensor) -> Tensor:
        """Return the numbers of a tensor's elements, to read or to write."""
        shadow = self.shadows.find(x)
        if shadow is not None and shadow.itemsize != x.itemsize:
            self._refuse("view", [x], "is read as bytes")
        return self.shadows.view(x)

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.has_kernel_for_dispatch_key(torch.DispatchKey.CompositeImplicitAutograd):
            # In inference mode such operations arrive here before they are made of others.
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result

        self.shadows.trim()
        schema = func._schema  # pyright: ignore[reportPrivateUsage]
        names = [argument.name for argument in schema.arguments]
        arguments = dict(zip(names, args, strict=False)) | kwargs
        name = schema.name.removeprefix("aten::")
        if name == "copy_":
            result = self._copy(func, arguments, arguments["src"])
        elif name == "fill_" and isinstance(arguments["value"], Tensor):
            result = self._copy(func, arguments, arguments["value"])
        elif name == "_foreach_copy_":
            result = self._copy_each(arguments)
        elif name in _FILLS:
            result = self._fill(func, arguments)
        elif name in _MOVES and "out" not in arguments:
            result = self._move(func, name, arguments)
        elif name in _MOVES_IN_PLACE:
            result = self._move_in_place(func, name, arguments)
        else:
            result = self._other(func, name, arguments)
        return result

    # -- writes ---------------------------------------------------------------------------------------------------

    def _copy(self, func: OpOverload, arguments: dict[str, Any], source: Tensor) -> Any:
        """Write the numbers of a tensor to another one."""
        x = arguments["self"]
        is_known = self.shadows.find(source) is not None or self.shadows.find(x) is not None
        if is_known:
            numbers = self.numbers(source)
            if source.dtype != x.dtype:
                numbers = self.numbering.cast(numbers, x.dtype)
            self._written(x).copy_(numbers)
        return self._run_write(func, arguments, x)

    def _copy_each(self, arguments: dict[str, Any]) -> None:
        with self:
            for x, source in zip(arguments["self"], arguments["src"], strict=True):
                x.copy_(source)

    def _fill(self, func: OpOverload, arguments: dict[str, Any]) -> Any:
        x = arguments["self"]
        self._written(x).fill_(CONSTANT)
        return self._run_write(func, arguments, x)

    def _move_in_place(self, func: OpOverload, name: str, arguments: dict[str, Any]) -> Any:
        self._check_arguments(func, arguments, _MOVES_IN_PLACE[name])
        x = arguments["self"]
        self._written(x)  # it has a shadow from here on
        func(**self._replaced(arguments, _MOVES_IN_PLACE[name], x.dtype))
        return self._run_write(func, arguments, x)

    def _written(self, x: Tensor) -> Tensor:
        """Return the numbers of a tensor that is written."""
        if self.shadows.find(x) is None:
            self.shadows.add(x)
        return self.numbers(x)

    def _run_write(self, func: OpOverload, arguments: dict[str, Any], x: Tensor) -> Any:
        """Run an operation that writes a tensor, unless that is a target: it keeps its values."""
        shadow = self.shadows.find(x)
        if shadow is not None and shadow.is_target:
            return x
        return func(**arguments)

    # -- other operations -----------------------------------------------------------------------------------------

    def _move(self, func: OpOverload, name: str, arguments: dict[str, Any]) -> Any:
        """Run an operation, and run it on numbers."""
        self._check_arguments(func, arguments, _MOVES[name])
        result = func(**arguments)
        moved = [*_tensors([arguments.get(data) for data in _MOVES[name]])]
        if all(self.shadows.find(x) is None for x in moved):
            return result

        results = [*_tensors([result])]
        replaced = self._replaced(arguments, _MOVES[name], results[0].dtype)
        if name == "_to_copy":
            numbers = [replaced["self"]]
        else:
            numbers = [*_tensors([func(**replaced)])]
        for x, numbers_of_x in zip(results, numbers, strict=True):
            is_view = any(_share_storage(x, source) for source in moved)
            if not is_view:
                self.shadows.add(x)
                self.numbers(x).copy_(numbers_of_x)
        return result

    def _replaced(
        self, arguments: dict[str, Any], moved: Sequence[str], dtype: torch.dtype
    ) -> dict[str, Any]:
        """Return arguments with numbers in the place of elements, and without a memory."""

        def numbers(x: Tensor) -> Tensor:
            result = self.numbers(x)
            return result if x.dtype == dtype else self.numbering.cast(result, dtype)

        replaced: dict[str, Any] = {}
        for name, value in arguments.items():
            if name in _DROPPED:
                continue
            if name in moved:
                replaced[name] = _mapped(numbers, value)
            elif name in _VALUES:
                replaced[name] = torch.tensor(CONSTANT) if isinstance(value, Tensor) else CONSTANT
            else:
                replaced[name] = _mapped(Tensor.cpu, value)  # an index
        return replaced

    def _check_arguments(
        self, func: OpOverload, arguments: dict[str, Any], moved: Sequence[str]
    ) -> None:
        """Raise if an operation adds elements, or if an index or a mask is of a source."""
        others = [value for name, value in arguments.items() if name not in moved]
        others = [x for x in _tensors(others) if self._has_sources(x)]
        is_sum = arguments.get("accumulate") or "reduce" in arguments
        if is_sum:
            everything = _tensors([*arguments.values()])
            others += [x for x in everything if self._has_sources(x)]
        if others:
            self._refuse(str(func), others)

    def _other(self, func: OpOverload, name: str, arguments: dict[str, Any]) -> Any:
        """Run an operation that does not move elements; raise if it computes with them."""
        schema = func._schema  # pyright: ignore[reportPrivateUsage]
        given = [*_tensors([*arguments.values()])]
        is_view = bool(schema.returns) and all(
            returned.alias_info is not None and not returned.alias_info.is_write
            for returned in schema.returns
        )
        is_read_as_bytes = name == "view" and "dtype" in arguments
        if name in _METADATA or (is_view and not is_read_as_bytes):
            result = func(**arguments)
            if name == "lift_fresh" and self.shadows.find(result) is None:
                self.shadows.add(result, CONSTANT)  # torch.tensor(...)
            return result

        result_is_constant = name in _CONSTANTS_LIKE
        if name in _LIKE or result_is_constant:
            given = []
        carriers = [x for x in given if self._has_sources(x)]
        if carriers:
            self._refuse(str(func), carriers)
        for x in _mutated(func, arguments):
            shadow = self.shadows.find(x)
            if shadow is not None and shadow.is_target:
                self._refuse_write(str(func))
            if shadow is not None:
                self.numbers(x).fill_(UNWRITTEN)

        result = func(**arguments)
        is_made_of_constants = all(self._is_constant(x) for x in given)
        is_empty = name in _LIKE or name.startswith("empty")
        if is_made_of_constants and not is_empty:
            for x in _tensors([result]):
                if self.shadows.find(x) is None and x.layout == torch.strided:
                    self.shadows.add(x, CONSTANT)
        return result

    def _has_sources(self, x: Tensor) -> bool:
        if self.shadows.find(x) is None or x.numel() == 0:
            return False
        return bool(self.shadows.view(x).max() >= 0) if self._same_size(x) else True

    def _same_size(self, x: Tensor) -> bool:
        shadow = self.shadows.find(x)
        return shadow is not None and shadow.itemsize == x.itemsize

    def _is_constant(self, x: Tensor) -> bool:
        if self.shadows.find(x) is None or not self._same_size(x):
            return False
        return bool((self.shadows.view(x) == CONSTANT).all())

    # -- errors ---------------------------------------------------------------------------------------------------

    def _refuse(self, operation: str, tensors: Sequence[Tensor], reason: str = "") -> None:
        """Raise for an operation that reads elements of sources."""
        names: list[str] = []
        for x in tensors:
            shadow = self.shadows.find(x)
            if shadow is not None:
                names += self.numbering.sources_in(shadow.numbers)
        given = ", ".join([*dict.fromkeys(names)][:5]) or "a target"
        reason = reason or f"is an argument of {operation}"
        self._raise(
            f"refit.trace: the loader must only move and cast weights; {given} {reason} at "
            f"{call_site()}. Compute before the weights are sent, or after they are loaded."
        )

    def _refuse_write(self, operation: str) -> None:
        self._raise(
            f"refit.trace: the loader must only copy to the target; got {operation} at "
            f"{call_site()}. Compute after the weights are loaded."
        )

    def _raise(self, text: str) -> None:
        # A loader may catch it: `load_state_dict` does, and raises another.
        error = RefitError(text)
        self.error = self.error or error
        raise error

    def reads(self) -> TorchFunctionMode:
        """Return the mode that raises for reads of elements without an operation of torch."""
        return _Reads(self)

    def check_read(self, name: str, x: Tensor) -> None:
        """Raise if a method reads elements of sources."""
        if self._has_sources(x):
            self._refuse(f"Tensor.{name}", [x])


class _Reads(TorchFunctionMode):
    """Raise where `Tensor.numpy` and others read elements of sources."""

    def __init__(self, recorder: LoadRecorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _READS and args and isinstance(args[0], Tensor):
            self.recorder.check_read(name, args[0])
        return func(*args, **(kwargs or {}))


def _tensors(values: Sequence[Any]) -> Iterator[Tensor]:
    """Yield the tensors among values and lists of them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _mapped(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Return a value with a function of its tensors in their place."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, list | tuple):
        return [_mapped(function, item) for item in value]
    return value


def _mutated(func: OpOverload, arguments: Mapping[str, Any]) -> Iterator[Tensor]:
    """Yield the tensors that an operation writes."""
    schema = func._schema  # pyright: ignore[reportPrivateUsage]
    for argument in schema.arguments:
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        if is_written:
            yield from _tensors([arguments.get(argument.name)])


def _share_storage(x: Tensor, other: Tensor) -> bool:
    if x.layout != torch.strided or other.layout != torch.strided:
        return False
    return x.untyped_storage()._cdata == other.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]
