"""`init_params`: parameters that are born sharded.

The function that makes them runs twice: first on tensors without memory, which says what it makes and by which
operations; then these operations are done again, one after the other, in real memory.  A tensor is cut, and let go, as
soon as no later operation touches its memory.  So no device ever holds the whole model, and the numbers are the ones
that the function would have drawn by itself.

    run without memory     a = empty(..), normal_(a), b = zeros(..), c = a[0], ...
    repeat                 a ──────────────┐ last touched: cut it, let it go       b ──┐ cut, let go
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from fshard.errors import LayoutError
from fshard.mesh.mesh import Mesh
from fshard.mesh.placing import device_put
from fshard.mesh.tree import PyTree, flatten_with_paths, unflatten
from fshard.transforms.rules import Choice, Rules, layouts_of, named, parts_of

_tree: Any = optree


def init_params(
    init_fn: Callable[[], PyTree], rules: Rules, *, mesh: Mesh, seed: int | None = None, frozen: Choice = None
) -> PyTree:
    """Return the parameters that `init_fn()` makes, laid out by rules, without holding all of them at once.

    Args:
        init_fn: makes a tree of tensors, drawing from torch's default generator or from constants.  It must not look at
            values: no `.item()`, no branch on a tensor.
        rules: see `shard_params`.
        mesh: the devices.
        frozen: which are not to be trained: see `shard_params`.
        seed: draw as after `torch.manual_seed(seed)`, and leave the generator as it was; None: draw from it as it is.

    Nothing is sent: every process draws all numbers and keeps its pieces.

    >>> import torch, fshard as fs
    >>> mesh = fs.make_mesh({"data": 4})
    >>> params = fs.init_params(lambda: {"w": torch.randn(2, 2), "b": torch.zeros(2)}, fs.fsdp("data"), mesh=mesh, seed=0)
    >>> fs.typeof(params["w"]), torch.equal(fs.unshard(params["w"]), torch.randn(2, 2, generator=torch.manual_seed(0)))
    (f32[2, 2]{flat:data}, True)
    """
    recording = _Recording()
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), recording:
            made = init_fn()
    except (RuntimeError, TypeError) as error:
        raise LayoutError(
            f"init_params: the function cannot be run without memory ({str(error).strip().splitlines()[0]}). "
            "If it has to look at values, call it and lay its result out with fs.shard_params."
        ) from error
    paths, leaves, structure = flatten_with_paths(made)
    foreign = [
        named(parts_of(path)) for path, leaf in zip(paths, leaves, strict=True) if not isinstance(leaf, FakeTensor)
    ]
    if foreign:
        raise LayoutError(
            f"init_params: {', '.join(foreign)} was not made by the function. Lay it out with fs.shard_params."
        )
    layouts = layouts_of(made, rules, mesh, frozen)
    placed: dict[int, Any] = {}

    def place(number: int, x: Tensor) -> None:
        placed[number] = device_put(x.detach(), layouts[number])

    state = torch.get_rng_state()
    if seed is not None:
        torch.manual_seed(seed)
    try:
        with torch.no_grad():
            recording.repeat(leaves, place)
    finally:
        if seed is not None:
            torch.set_rng_state(state)
    first = {id(leaf): number for number, leaf in reversed([*enumerate(leaves)])}  # a tied leaf is one
    return unflatten(structure, [placed[first[id(leaf)]] for leaf in leaves])


class _Operation(NamedTuple):
    """What was done: on which tensors, without memory, and what came out."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: list[FakeTensor]


class _Recording(TorchDispatchMode):
    """Notes all operations on tensors without memory."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[_Operation] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        results = [x for x in _tree.tree_leaves(out) if isinstance(x, FakeTensor)]
        if results:
            self.operations.append(_Operation(func, args, kwargs or {}, results))
        return out

    def repeat(self, leaves: Sequence[FakeTensor], place: Callable[[int, Tensor], None]) -> None:
        """Do all operations in real memory; hand over each leaf as soon as nothing more will be done to it."""
        last = {
            _storage(x): turn
            for turn, operation in enumerate(self.operations)
            for x in _tree.tree_leaves((operation.args, operation.kwargs, operation.results))
            if isinstance(x, FakeTensor)
        }
        ends: dict[int, list[int]] = {}
        for storage, turn in last.items():
            ends.setdefault(turn, []).append(storage)
        wanted: dict[int, dict[int, int]] = {}
        for number, leaf in reversed([*enumerate(leaves)]):
            wanted.setdefault(_storage(leaf), {})[id(leaf)] = number
        real: dict[int, Tensor] = {}  # of each memory, any tensor in it
        for turn, operation in enumerate(self.operations):
            args, kwargs = _tree.tree_map(lambda x: _real(x, real), (operation.args, operation.kwargs))
            out = [x for x in _tree.tree_leaves(operation.func(*args, **kwargs)) if isinstance(x, Tensor)]
            for fake, x in zip(operation.results, out, strict=True):
                real.setdefault(_storage(fake), x)
            for storage in ends.get(turn, ()):
                for number in wanted.get(storage, {}).values():
                    place(number, _real(leaves[number], real))
                real.pop(storage, None)


def _storage(x: Tensor) -> int:
    return x.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]


def _real(x: Any, real: dict[int, Tensor]) -> Any:
    """Return the tensor in real memory that stands for one without."""
    if not isinstance(x, FakeTensor):
        return x
    base = real[_storage(x)]
    return (
        base.as_strided(x.size(), x.stride(), int(x.storage_offset())) if base.dtype == x.dtype else base.view(x.dtype)
    )
