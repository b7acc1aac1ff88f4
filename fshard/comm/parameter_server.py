"""Asynchronous training with one server, replayed or live.

The device at index 0 of an axis is the server, the others are workers. A worker pushes a gradient; the server applies
it and answers with the new parameters, while the other workers compute.

    server      apply 0 ──> 1        apply 1 ──> 2
    worker 0    push 0 ┘    └─ gradient at version 1
    worker 1         push 1, at version 0 ┘    └─ gradient at version 2
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass
from queue import SimpleQueue
from typing import Any, cast

import torch
from torch import Tensor

from fshard.comm.arrivals import Arrivals, PushOrder
from fshard.comm.compressor import Compressor, FlatLeaf
from fshard.comm.sparse import Encoding, index_dtype, sparse
from fshard.errors import MeshError
from fshard.mesh.collectives.api import axis_index, broadcast, psum
from fshard.mesh.collectives.send_recv import recv, send
from fshard.mesh.layout import Mesh, PyTree, flatten, flatten_with_paths, map_leaves, unflatten
from fshard.mesh.runtimes.process import ProcessWorld
from fshard.mesh.spmd.run import resolve_mesh, run_on_devices
from fshard.mesh.spmd.scope import require
from fshard.optim.contract import Optimizer, copied, step_of
from fshard.optim.leaves import count_from_zero

_LOSS = torch.zeros((), dtype=torch.float64)
Batches = Callable[[int, int], Any]


@dataclass(frozen=True)
class ParameterServer:
    """Train asynchronously: workers push gradients, in the order of `arrivals`, and a server applies each at once.

    Call it with parameters, the state of `init` or of the call before, and `batches(worker, number)`, the batch of a
    worker's gradient of this number in this call. It returns parameters, state and metrics: the "loss" of each push, and
    "arrivals". Parameters are plain tensors, equal on all devices. A push sends a gradient and 8 bytes, an answer the
    parameters.

    Args:
        gradient: from parameters and a batch to the loss and the gradients. It may call collectives along other axes.
        opt: the optimizer of the server.
        arrivals: the pushes.
        mesh: the devices.
        axis: along which the server is at index 0, and worker w at w + 1.
        compensate: lambda of DC-ASGD (Zheng 2017): a gradient g becomes g + lambda g g (params - params that it was read at).
        compress: `top_k`, `random_k`, `quantized`, `sign` or a `chain`: what a worker has not sent joins its next gradient.
        live: apply pushes as they arrive, within the bound, on processes; each worker pushes as often as in `arrivals`. The
            metric "arrivals" is the log: replayed, it gives the same bits.

    >>> import torch, fshard as fs
    >>> arrivals = fs.comm.Arrivals([(0, 0), (1, 0), (0, 1)], bound=1)
    >>> server = fs.comm.parameter_server(
    ...     lambda w, x: ((w - x).square() / 2, w - x), fs.optim.sgd(0.5), arrivals, mesh=fs.make_mesh({"node": 3}), axis="node"
    ... )
    >>> w, state, metrics = server(torch.ones(()), server.init(torch.ones(())), lambda worker, number: torch.zeros(()))
    >>> w, metrics["loss"].tolist()
    (tensor(-0.2500), [0.5, 0.5, 0.125])
    """

    gradient: Callable[[PyTree, Any], tuple[Tensor, PyTree]]
    opt: Optimizer
    arrivals: Arrivals
    _: KW_ONLY
    mesh: Mesh
    axis: str
    compensate: float = 0.0
    compress: Compressor | None = None
    live: bool = False

    def __post_init__(self) -> None:
        self.mesh.check_axes(self.axis, "parameter_server(axis=)")
        n, workers = self.mesh.shape[self.axis], {*self._counts}
        if not workers or max(workers) > n - 2:
            raise ValueError(
                f"parameter_server: arrivals must be of workers below {n - 1}, since {self.axis} has {n} devices and the first "
                f"is the server; got {sorted(workers)}."
            )
        if self.compress is not None and not isinstance(self.compress.encoding, Encoding):
            raise ValueError(
                "parameter_server: compress must be top_k, random_k, quantized, sign or a chain of them."
            )
        if self.live and (self.mesh.runtime != "process" or self.mesh.size > n):
            raise MeshError(
                f"parameter_server: live=True needs a mesh of processes along {self.axis} alone."
            )

    def init(self, params: PyTree) -> PyTree:
        """Return the state: the optimizer's, the number of pushes, and the total of what workers have not sent."""
        unsent = {} if self.compress is None else map_leaves(torch.zeros_like, params)
        return {"opt": self.opt.init(params), "pushes": count_from_zero(), "unsent": unsent}

    def __call__(
        self, params: PyTree, state: PyTree, batches: Batches
    ) -> tuple[PyTree, PyTree, dict[str, Any]]:
        return run_on_devices(
            resolve_mesh(self.mesh), lambda _: self._train(params, state, batches)
        )[0]

    @property
    def _counts(self) -> Counter[int]:
        """The number of pushes of each worker."""
        return Counter([worker for worker, _ in self.arrivals.events])

    @property
    def _encoding(self) -> Encoding:
        return Encoding() if self.compress is None else self.compress.encoding

    @torch.no_grad()
    def _train(
        self, params: PyTree, state: PyTree, batches: Batches
    ) -> tuple[PyTree, PyTree, dict[str, Any]]:
        """Run as one device."""
        worker, events, pushes = (
            axis_index(self.axis) - 1,
            self.arrivals.events,
            int(state["pushes"]),
        )
        params, opt_state, unsent = copied((params, state["opt"], state["unsent"]))
        if worker:
            unsent = map_leaves(torch.zeros_like, unsent)  # worker 0 begins with the total
        result: Any = params, opt_state, _LOSS.repeat(len(events)), torch.tensor(events)
        if worker < 0:
            result = self._serve(params, opt_state, pushes)
        else:
            unsent = self._work(worker, params, unsent, batches, pushes)
        params, opt_state, losses, log = broadcast(result, self.axis)
        state = {
            "opt": opt_state,
            "pushes": state["pushes"] + len(events),
            "unsent": psum(unsent, self.axis),
        }
        return (
            params,
            state,
            {"loss": losses, "arrivals": Arrivals(log.tolist(), self.arrivals.bound)},
        )

    def _work(
        self, worker: int, params: PyTree, unsent: PyTree, batches: Batches, pushes: int
    ) -> PyTree:
        """Push gradients; return what has not been sent of them."""
        for number in range(self._counts[worker]):
            with torch.enable_grad():
                loss, grads = self.gradient(params, batches(worker, number))
            send(loss.detach().to("cpu", _LOSS.dtype), self.axis, 0)
            grads, key = map_leaves(Tensor.detach, grads), f"{pushes} {worker} {number}"
            if self.compress is not None:
                grads = map_leaves(torch.add, grads, unsent)
            payload = _encode(grads, key, self._encoding)
            send(payload, self.axis, 0)
            if self.compress is not None:
                unsent = map_leaves(torch.sub, grads, _decode(payload, grads, key, self._encoding))
            params = recv(params, self.axis, 0)
        return unsent

    def _serve(
        self, params: PyTree, opt_state: PyTree, pushes: int
    ) -> tuple[PyTree, PyTree, Tensor, Tensor]:
        """Apply gradients; return parameters, the optimizer's state, losses and events."""
        start = copied(params) if self.compensate else params
        order, step, losses = (
            PushOrder(sorted(self._counts), self.arrivals.bound),
            step_of(self.opt),
            list[Tensor](),
        )
        like, read, numbers = (
            _encode(params, "", self._encoding),
            defaultdict(lambda: start),
            Counter[int](),
        )
        replayed = (
            (worker, recv(_LOSS, self.axis, worker + 1)) for worker, _ in self.arrivals.events
        )
        for worker, loss in self._first_come(order) if self.live else replayed:
            payload = recv(like, self.axis, worker + 1)
            grads = _decode(payload, params, f"{pushes} {worker} {numbers[worker]}", self._encoding)
            if self.compensate:
                grads = map_leaves(
                    lambda g, x, y: g + self.compensate * g * g * (x - y),
                    grads,
                    params,
                    read[worker],
                )
            params, opt_state = step(grads, opt_state, params)
            send(params, self.axis, worker + 1)
            if self.compensate:
                read[worker] = copied(params)
            losses.append(loss)
            numbers[worker] += 1
        return (
            params,
            opt_state,
            torch.stack(losses),
            torch.tensor(order.events or self.arrivals.events),
        )

    def _first_come(self, order: PushOrder) -> Iterator[tuple[int, Tensor]]:
        """Yield the worker and the loss of each push, as they arrive, within the bound."""
        group, arrived = (
            require("parameter_server").group(self.axis, "parameter_server"),
            SimpleQueue[Any](),
        )
        world, pending, losses = (
            cast("ProcessWorld", group.world),
            self._counts,
            dict[int, Tensor](),
        )
        for worker in pending:
            world.listen(_LOSS, group, worker + 1, arrived)
        while pending.total():
            while (worker := order.take()) is None:
                source, loss = arrived.get()
                if isinstance(loss, BaseException):
                    raise loss
                losses[source - 1] = loss
                order.waiting.append(source - 1)
            yield worker, losses[worker]
            pending[worker] -= 1
            if pending[worker]:
                world.listen(_LOSS, group, worker + 1, arrived)
            else:
                del order.versions[worker]


parameter_server = ParameterServer


def _encode(tree: PyTree, key: str, encoding: Encoding) -> list[Any]:
    """Return the tensors that are sent of each leaf: itself, where they would not be shorter."""
    payloads = list[Any]()
    for leaf in _flat_leaves(tree, key):
        payload = leaf.x
        if _is_encoded(leaf, encoding):
            index, code = encoding.indices(leaf), encoding.code
            payload = leaf.x if index is None else leaf.x[index]
            if code is not None:
                payload = code.encode(payload, 1, leaf.generator(code.seed or 0))
            if encoding.is_gathered and index is not None:
                payload = payload, index.to(index_dtype(leaf.x))
        payloads.append(payload)
    return payloads


def _decode(payloads: list[Any], tree: PyTree, key: str, encoding: Encoding) -> PyTree:
    """Return the tree that was sent; its shapes are those of `tree`."""
    (leaves, structure), decoded = flatten(tree), list[Tensor]()
    for payload, leaf, x in zip(payloads, _flat_leaves(tree, key), leaves, strict=True):
        if _is_encoded(leaf, encoding):
            payload, index = payload if encoding.is_gathered else (payload, encoding.indices(leaf))
            if encoding.code is not None:
                payload = encoding.code.decode(payload)[0, : encoding.count(leaf.x)].to(x.dtype)
            payload = sparse(leaf, None if index is None else index.long(), payload)
        decoded.append(payload.view(x.shape))
    return unflatten(structure, decoded)


def _is_encoded(leaf: FlatLeaf, encoding: Encoding) -> bool:
    return leaf.x.is_floating_point() and encoding.bytes_sent(leaf.x, 2) < leaf.x.nbytes


def _flat_leaves(tree: PyTree, key: str) -> list[FlatLeaf]:
    paths, leaves, _ = flatten_with_paths(tree)
    return [FlatLeaf(x.reshape(-1), f"{key} {path}") for path, x in zip(paths, leaves, strict=True)]
