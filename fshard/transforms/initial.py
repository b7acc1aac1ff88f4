"""`init_params`: parameters that are born sharded.

The function that makes them runs on tensors without memory, which says what it makes and by which operations (`History`).
Then each leaf is made in real memory by what led to it, cut, and let go.  So no device ever holds the whole model, and the
numbers are the ones that the function would have drawn by itself.

    run without memory     a = empty(..), normal_(a), b = zeros(..), c = a[0], ...
    repeat                 a ──────────────┐ last touched: cut it, let it go       b ──┐ cut, let go
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from fshard.errors import LayoutError
from fshard.mesh.mesh import Mesh
from fshard.mesh.placing import device_put
from fshard.mesh.tree import PyTree, flatten_with_paths, unflatten
from fshard.transforms.history import History, noted
from fshard.transforms.patterns import Choice, named, parts_of
from fshard.transforms.randomness import drawing_from, random_state
from fshard.transforms.rules import Rules, layouts_of


def init_params(
    init_fn: Callable[[], PyTree], rules: Rules, *, mesh: Mesh, seed: int | None = None, frozen: Choice = None
) -> PyTree:
    """Return the parameters that `init_fn()` makes, laid out by rules, without holding all of them at once.

    Args:
        init_fn: makes a tree of tensors out of draws and constants: any function of torch.nn.init, a module's
            constructor, and what it does to them then.  A value that it looks at, `x.item()` say, is made at once.
        rules: see `shard_params`.
        mesh: the devices.
        frozen: which are not to be trained: see `shard_params`.
        seed: draw as after `torch.manual_seed(seed)`, and leave the generator as it was; None: draw from it as it is.

    Nothing is sent: every process draws all numbers and keeps its pieces.  A draw is made twice, the first time to know where
    the next one begins.

    >>> import torch, fshard as fs
    >>> mesh = fs.make_mesh({"data": 4})
    >>> params = fs.init_params(lambda: {"w": torch.randn(2, 2), "b": torch.zeros(2)}, fs.fsdp("data"), mesh=mesh, seed=0)
    >>> fs.typeof(params["w"]), torch.equal(fs.unshard(params["w"]), torch.randn(2, 2, generator=torch.manual_seed(0)))
    (f32[2, 2]{flat:data}, True)
    """
    with drawing_from(random_state()) if seed is not None else nullcontext():
        if seed is not None:
            torch.manual_seed(seed)
        history, made = _run(init_fn)
        paths, leaves, structure = flatten_with_paths(made)
        foreign = [named(parts_of(path)) for path, leaf in zip(paths, leaves, strict=True) if not history.made(leaf)]
        if foreign:
            raise LayoutError(
                f"init_params: {', '.join(foreign)} was not made by the function. Lay it out with fs.shard_params."
            )
        layouts = layouts_of(made, rules, mesh, frozen, "init_params")
        placed: dict[int, Any] = {}

        def place(number: int, x: Tensor) -> None:
            placed[number] = device_put(x, layouts[number])

        with torch.no_grad():
            history.repeat(leaves, place)
    first = {id(leaf): number for number, leaf in reversed([*enumerate(leaves)])}  # a tied leaf is one
    return unflatten(structure, [placed[first[id(leaf)]] for leaf in leaves])


def _run(init_fn: Callable[[], PyTree]) -> tuple[History, PyTree]:
    """Run the function on tensors without memory."""
    try:
        return noted(init_fn)
    except (RuntimeError, TypeError) as error:
        raise LayoutError(
            f"init_params: the function cannot be run without memory ({str(error).strip().splitlines()[0]}). "
            "If it has to, call it and lay its result out with fs.shard_params."
        ) from error
