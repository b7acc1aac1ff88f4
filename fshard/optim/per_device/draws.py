"""Random draws in an own `update` or `init`: those of one device, in every layout.

An update of plain tensors sees shards. `torch.randn_like(g)` there is the device's shard of the
draw that one device would make for the leaf, which is seeded by the step, the leaf, and the number
of its draws before:

    leaf w, 6 elements      one device draws    [a b c d e f]
                            device 0 gets       [a b c]
                            device 1 gets             [d e f]

The same leaf on other meshes, at owners, in replicas and in pipeline stages has the same draws. So
each device draws for the full leaf, and keeps its shard. The leaf of a draw is that of the
tensor, or of the `shape`, that torch's function is given: a gradient, a parameter, state, or what
was computed from these.

A draw that is like no leaf is the same on all devices. Where they update other shards it must be
one number, `torch.rand(())`: any other size may be that of a shard, in plain numbers. Where they
update other leaves it must be the first of a key, `fs.keyed_random(seed, step)`: there the n-th
draw of one device is not that of another.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Size, Tensor, nn
from torch.overrides import TorchFunctionMode

from fshard.errors import OptimizerError
from fshard.mesh.layout import Layout, Structure, paths_of
from fshard.mesh.layout.sharded import Sharded
from fshard.mesh.reshard.device_put import shard_of
from fshard.optim.leaves import Leaf, Leaves
from fshard.optim.norms import cut_axes
from fshard.optim.sharding import has_owner
from fshard.randomness import drawn_key, folded, has_drawn, seeded_by, turned

_OF_TENSORS = frozenset[Any](
    {
        torch.rand_like,
        torch.randn_like,
        torch.randint_like,
        torch.bernoulli,
        torch.normal,
        torch.Tensor.bernoulli,
        torch.Tensor.bernoulli_,
        torch.Tensor.cauchy_,
        torch.Tensor.exponential_,
        torch.Tensor.geometric_,
        torch.Tensor.log_normal_,
        torch.Tensor.normal_,
        torch.Tensor.random_,
        torch.Tensor.uniform_,
        nn.init.normal_,
        nn.init.trunc_normal_,
        nn.init.uniform_,
    }
)
"""The functions of torch that draw a number for each element of a tensor, from as many bits."""

_OF_SIZES = frozenset[Any]({torch.rand, torch.randn, torch.randint, torch.normal, torch.randperm})
"""The functions of torch that draw a tensor of a given size."""

_DRAWING = _OF_TENSORS | _OF_SIZES

_FIX = (
    "Draw like a tensor of one leaf: torch.randn_like(g), rand_like, bernoulli, normal_, uniform_."
)

_FIX_OF_SEVERAL = f"{_FIX} For several numbers of an element, draw several times."

_FIX_AT_OWNERS = (
    f"{_FIX} For one number that all leaves share: with fs.keyed_random(seed, step): "
    "torch.rand(()), a context for each draw."
)


class UpdateDraws(TorchFunctionMode):
    """The random draws of one device in an own update: in this mode torch's functions draw shards.

    Args:
        params: of all devices.
        updated: the indices of the leaves that any device updates.
        device: the number of this device in the mesh of the leaves.
        key: of the update; the same on all devices.
    """

    def __init__(self, params: Leaves, updated: Sequence[int], device: int, key: int) -> None:
        super().__init__()
        self.key = folded(key)
        self.has_drawn = False
        self._params = params
        self._device = device
        self._updated = [params.leaves[i] for i in updated]
        self._names = names_of(params.structure)
        # By id: the tensor, weakly, or the size, and the index of the leaf that it belongs to.
        self._tensors: dict[int, tuple[Callable[[], Tensor | None], int]] = {}
        self._sizes: dict[int, tuple[Size, int]] = {}
        # By key and leaf: the number of draws.
        self._counts: dict[tuple[int, int | None], int] = {}

    @contextmanager
    def seeded(self) -> Generator[None]:
        """Draw by the key within the context.

        Raise if devices have drawn differently by other functions.
        """
        with seeded_by(self.key):
            with self:
                yield
            is_own_key = torch.default_generator.initial_seed() == self.key
            is_advanced = is_own_key and has_drawn(torch.default_generator)
        if is_advanced and not all(map(_is_full_everywhere, self._updated)):
            raise OptimizerError(
                "an update must draw by functions that draw one number for each element; got "
                "another one, such as dropout, "
                f"multinomial or poisson, whose draws depend on the shards. {_FIX}"
            )

    def follow(self, x: Any, leaf: int | None) -> None:
        """Record that a tensor, or its size, belongs to a leaf."""
        if leaf is None:
            return
        if isinstance(x, Tensor):
            self._tensors[id(x)] = weakref.ref(x), leaf
        elif isinstance(x, Size):
            self._sizes[id(x)] = x, leaf

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():
            # Draws of compiled functions are not divided: `seeded` finds them.
            return func(*args, **kwargs)
        if func not in _DRAWING:
            result = func(*args, **kwargs)
            self._follow_results(args, kwargs, result)
            return result

        self._validate_options(kwargs)
        self.has_drawn = True
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        if func in _OF_TENSORS and tensors:
            example = max(tensors, key=Tensor.numel)
            leaf = self._leaf_of(example)
            size = example.shape
        else:
            example = None
            size = _size_among(args, kwargs)
            leaf = self._leaf_of(size)
        if leaf is None and self._is_at_owners:
            self._validate_at_owners(func)

        with self._seeded_for(leaf):
            if leaf is None or not self._is_shard(size, leaf):
                result = func(*args, **kwargs)
            elif example is None:
                result = self._draw_of_size(func, args, kwargs, size, leaf)
            else:
                result = self._draw_like(func, args, kwargs, example, leaf)
        if leaf is None:
            self._validate_size(func, tuple(result.shape))
        self.follow(result, leaf)
        return result

    # -- the leaf of a draw ------------------------------------------------------------------------

    def _leaf_of(self, x: Any) -> int | None:
        """Return the index of the leaf of a tensor or a size; None if it belongs to none."""
        if isinstance(x, Tensor):
            entry = self._tensors.get(id(x))
            is_same = entry is not None and entry[0]() is x
        else:
            entry = self._sizes.get(id(x))
            is_same = entry is not None and entry[0] is x
        return entry[1] if entry is not None and is_same else None

    def _follow_results(self, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Record that a result belongs to the leaf of the first argument that belongs to one.

        Functions of lists, torch._foreach_add, have a result for each item: it belongs to the leaf
        of that item.
        """
        if isinstance(result, Tensor | Size):
            self.follow(result, self._first_leaf((*args, *kwargs.values())))
        elif isinstance(result, list | tuple):
            lists: list[Any] = []
            for x in args:
                if type(x) in (list, tuple) and len(x) == len(result):
                    lists.append(x)
            for i, x in enumerate(result):
                candidates = [items[i] for items in lists] or args
                self.follow(x, self._first_leaf(candidates))

    def _first_leaf(self, values: Sequence[Any]) -> int | None:
        for x in values:
            leaf = self._first_leaf(x) if type(x) in (list, tuple) else self._leaf_of(x)
            if leaf is not None:
                return leaf
        return None

    def _is_shard(self, size: Sequence[int], leaf: int) -> bool:
        """Return True if a draw of this size for a leaf is a shard of it.

        False if it is drawn as it is.

        As they are, numbers are drawn, state of another shape at an owner, and what has no
        elements.
        """
        param = self._params.leaves[leaf]
        if not isinstance(param, Sharded):
            return tuple(size) == tuple(param.shape)
        if not param.layout.has_any(self._device):
            return False
        local_shape = param.layout.local_shape(param.shape, self._device)
        if tuple(size) == local_shape:
            return True
        if not param.spec.split_axes or not size:
            return False
        raise OptimizerError(
            f"a draw in an update must have the shape of its leaf's shard, {local_shape}, or be "
            f"one number; got {tuple(size)} for {self._names[leaf]}. {_FIX}"
        )

    def _validate_options(self, kwargs: dict[str, Any]) -> None:
        """Raise if a draw has a generator or a result that is given."""
        arrays = [leaf for leaf in self._updated if isinstance(leaf, Sharded)]
        if all(array.mesh.size == 1 for array in arrays):
            return
        for name in ("generator", "out"):
            if kwargs.get(name) is not None:
                raise OptimizerError(
                    "a draw in an update must be of torch's default generator and have no out=; "
                    f"got {name}=. Devices would share it, or have it in different states. Leave "
                    "it out: torch.manual_seed seeds the draws of updates too."
                )

    @property
    def _is_at_owners(self) -> bool:
        """Return True if devices update other leaves."""
        return any(isinstance(leaf, Sharded) and has_owner(leaf.spec) for leaf in self._updated)

    def _validate_at_owners(self, func: Any) -> None:
        """Raise if a draw that is like no leaf may be another one on another device."""
        is_own_key = torch.default_generator.initial_seed() != self.key
        if is_own_key and self._draws_before(None) == 0:
            return
        raise OptimizerError(
            "a draw in an update must be like a tensor of one leaf, or the first of its key, where "
            f"devices update other leaves; got {_name_of(func)}, which belongs to none. "
            f"{_FIX_AT_OWNERS}"
        )

    def _validate_size(self, func: Any, size: tuple[int, ...]) -> None:
        """Raise if a draw that is like no leaf may be meant for a shard."""
        arrays = [leaf for leaf in self._updated if isinstance(leaf, Sharded)]
        split = [array for array in arrays if _is_split(array.layout)]
        if not split:
            return
        if prod(size) == 1:
            # A row of one number may be meant for a shard that has one element; torch.rand(()) not.
            has_such_shard = any(_has_shard_of_one(array.layout, array.shape) for array in split)
            if size == () or not has_such_shard:
                return
        raise OptimizerError(
            "a draw in an update must be like a tensor of one leaf, or one number, torch.rand(()), "
            f"where devices update other shards; got {_name_of(func)} of size {size}, which "
            f"belongs to none. {_FIX_OF_SEVERAL}"
        )

    # -- draws -------------------------------------------------------------------------------------

    @contextmanager
    def _seeded_for(self, leaf: int | None) -> Generator[None]:
        """Draw by the leaf, the number of its draws before, and the current key."""
        key = torch.default_generator.initial_seed()
        count = self._draws_before(leaf)
        self._counts[key, leaf] = count + 1
        name = "" if leaf is None else self._names[leaf]
        with seeded_by(turned(key, name, count)):
            yield
        if key != self.key:
            drawn_key()  # a sign that the next draw is not the first of this key

    def _draws_before(self, leaf: int | None) -> int:
        """Return the number of a leaf's draws by the key of now."""
        generator = torch.default_generator
        key = generator.initial_seed()
        if key != self.key and not has_drawn(generator):  # the context of this key is another one
            for entry in [entry for entry in self._counts if entry[0] == key]:
                del self._counts[entry]
        return self._counts.get((key, leaf), 0)

    def _draw_like(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        example: Tensor,
        leaf: int,
    ) -> Tensor:
        """Call a function of tensors for the full leaf; return this device's shard."""

        def in_full(x: Any) -> Any:
            if not isinstance(x, Tensor) or x.shape != example.shape:
                return x
            full = torch.zeros(self._params.leaves[leaf].shape, dtype=x.dtype, device=x.device)
            self._shard(full, leaf).copy_(x)
            return full

        options = {name: in_full(x) for name, x in kwargs.items()}
        full = func(*map(in_full, args), **options)
        shard = self._shard(full, leaf)
        is_in_place = func.__name__.endswith("_")
        return args[0].copy_(shard) if is_in_place else _alone(shard)

    def _draw_of_size(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        size: Sequence[int],
        leaf: int,
    ) -> Tensor:
        """Call a function of a size for the full leaf; return this device's shard."""
        full_size = tuple(self._params.leaves[leaf].shape)

        def in_full(argument: Any) -> Any:
            return full_size if argument is size else argument

        arguments = [in_full(argument) for argument in args]
        options = {name: in_full(argument) for name, argument in kwargs.items()}
        return _alone(self._shard(func(*arguments, **options), leaf))

    def _shard(self, full: Tensor, leaf: int) -> Tensor:
        """Return a view: this device's shard of a tensor of the shape of a leaf."""
        param = self._params.leaves[leaf]
        return shard_of(full, param.layout, self._device) if isinstance(param, Sharded) else full


@lru_cache(maxsize=64)
def names_of(params: Structure) -> tuple[str, ...]:
    """Return the names by which leaves draw.

    The last parts of their paths, if these differ, so that stages do not count.

    >>> from fshard.mesh.layout import flatten
    >>> names_of(flatten([{"0.weight": 1}, {"2.weight": 1}])[1])
    ('0.weight', '2.weight')
    >>> names_of(flatten([{"w": 1}, {"w": 1}])[1])
    ('[0]["w"]', '[1]["w"]')
    """
    lasts: list[Any] = [path[-1] if path else None for path in params.paths()]
    are_names = all(isinstance(last, str) for last in lasts)
    are_unique = len({*lasts}) == len(lasts)
    return tuple(lasts) if are_names and are_unique else paths_of(params)


def _size_among(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[int]:
    """Return the size among the arguments of a function that draws a tensor: the object itself."""
    for argument in (*args, *kwargs.values()):
        if isinstance(argument, list | tuple):
            return argument
    return [argument for argument in args if type(argument) is int]


def _is_full_everywhere(leaf: Leaf) -> bool:
    """Return True if all devices update the same full leaf."""
    return not isinstance(leaf, Sharded) or not cut_axes(leaf.layout)


def _is_split(layout: Layout) -> bool:
    """Return True if devices hold parts of a tensor; at an owner it is full."""
    return any(layout.mesh.shape[axis] > 1 for axis in layout.spec.split_axes)


@lru_cache(maxsize=4096)
def _has_shard_of_one(layout: Layout, shape: tuple[int, ...]) -> bool:
    """Return True if some device's shard has one element."""
    devices = range(layout.mesh.size)
    return any(prod(layout.local_shape(shape, device)) == 1 for device in devices)


def _name_of(func: Any) -> str:
    return getattr(func, "__name__", str(func))


def _alone(x: Tensor) -> Tensor:
    """Return a tensor with memory of its own: a view would keep the draw for the full leaf."""
    return x.clone() if x._base is not None else x
