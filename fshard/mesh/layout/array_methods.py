"""`ArrayMethods`: the operators and tensor methods of a global array.

`fshard.array` computes them.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor

from fshard.errors import LayoutError


def _operator(method: Any) -> Any:
    def operator(self: ArrayMethods, *args: Any, **kwargs: Any) -> Any:
        return self.operations(method, (self, *args), kwargs)

    return operator


class ArrayMethods:
    """The base of `Sharded`.

    `operations` computes torch's functions and methods, and attributes by name.
    """

    operations: ClassVar[Any]
    """A function of (torch's function, args, kwargs), which `fshard.array` sets."""
    shape: tuple[int, ...]
    version: int = 0
    """The number of in-place changes so far."""
    sums: Any = MappingProxyType[Any, Any]({})
    """Reduced shards of an unreduced array, which several operations need."""
    viewed: Any = None
    """The array that this one is a view of, its version then, the operation and its arguments."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(getattr(kind, "computes_on_arrays", False) for kind in types):
            return NotImplemented  # a wrapper of arrays takes them apart
        return cls.operations(func, args, kwargs or {})

    def __getattr__(self, name: str) -> Any:
        """Return a method or an attribute that tensors have.

        Methods become those of the class when they are first used, so that later uses do not get
        here. A donated array has no shards any more, so each use of them gets here and raises.
        """
        if name == "shards":
            raise LayoutError(
                f"an array must not be donated to be used; got {self!r}, whose memory has the "
                "results of a step. Use what the step returned, or copy before it: "
                "fs.device_put(x, x.layout)."
            )
        method = None if name.startswith("_") else getattr(Tensor, name, None)
        if method is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if not callable(method):
            return self.operations(name, (self,), {})
        setattr(ArrayMethods, name, _operator(method))
        return getattr(self, name)

    @property
    def _version(self) -> int:
        return self.version

    @property
    def grad(self) -> Any:
        """The gradient, in the layout of this array; None before a backward."""
        return self.operations("grad", (self,), {})

    @grad.setter
    def grad(self, value: Any) -> None:
        self.operations("grad", (self, value), {})

    def check_view(self) -> None:
        """Raise if this is a view of an array that was changed in place since."""
        if self.viewed is None:
            return
        source, version, *_ = self.viewed
        if source.is_donated:
            raise LayoutError(
                f"{self!r} is a view of an array that was donated to a step since. "
                "Copy it before the step: x.clone()."
            )
        if source.version != version:
            raise LayoutError(
                f"{self!r} is a view of an array that was changed in place since. "
                "Take the view again."
            )
        source.check_view()

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return self.operations(Tensor.__array__, (self, *args), kwargs)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a 0-d array")
        return self.shape[0]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.operations(torch.unbind, (self,), {}))

    def __str__(self) -> str:
        return self.operations("str", (self,), {})

    __hash__ = object.__hash__  # by identity: `__eq__` compares elements

    # Only operators: Python looks them up in the class, without `__getattr__`.
    __add__ = _operator(Tensor.add)
    __radd__ = _operator(Tensor.add)
    __iadd__ = _operator(Tensor.add_)
    __sub__ = _operator(Tensor.sub)
    __rsub__ = _operator(torch.rsub)
    __isub__ = _operator(Tensor.sub_)
    __mul__ = _operator(Tensor.mul)
    __rmul__ = _operator(Tensor.mul)
    __imul__ = _operator(Tensor.mul_)
    __truediv__ = _operator(Tensor.div)
    __rtruediv__ = _operator(Tensor.__rtruediv__)
    __itruediv__ = _operator(Tensor.div_)
    __floordiv__ = _operator(Tensor.floor_divide)
    __rfloordiv__ = _operator(Tensor.__rfloordiv__)
    __ifloordiv__ = _operator(Tensor.floor_divide_)
    __mod__ = _operator(Tensor.remainder)
    __rmod__ = _operator(Tensor.__rmod__)
    __imod__ = _operator(Tensor.remainder_)
    __pow__ = _operator(Tensor.pow)
    __rpow__ = _operator(Tensor.__rpow__)
    __ipow__ = _operator(Tensor.pow_)
    __matmul__ = _operator(Tensor.matmul)
    __neg__ = _operator(Tensor.neg)
    __pos__ = _operator(Tensor.positive)
    __abs__ = _operator(Tensor.abs)

    __eq__ = _operator(Tensor.eq)
    __ne__ = _operator(Tensor.ne)
    __lt__ = _operator(Tensor.lt)
    __le__ = _operator(Tensor.le)
    __gt__ = _operator(Tensor.gt)
    __ge__ = _operator(Tensor.ge)

    __and__ = _operator(Tensor.__and__)
    __or__ = _operator(Tensor.__or__)
    __xor__ = _operator(Tensor.__xor__)
    __iand__ = _operator(Tensor.bitwise_and_)
    __ior__ = _operator(Tensor.bitwise_or_)
    __ixor__ = _operator(Tensor.bitwise_xor_)
    __invert__ = _operator(torch.bitwise_not)

    __getitem__ = _operator(Tensor.__getitem__)
    __setitem__ = _operator(Tensor.__setitem__)
    __bool__ = _operator(Tensor.__bool__)
    __float__ = _operator(Tensor.__float__)
    __int__ = _operator(Tensor.__int__)
    __index__ = _operator(Tensor.__index__)
    __format__ = _operator(Tensor.__format__)
    __dlpack__ = _operator(Tensor.__dlpack__)
    __dlpack_device__ = _operator(Tensor.__dlpack_device__)
