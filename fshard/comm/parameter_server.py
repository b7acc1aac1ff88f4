"""Asynchronous training with one server, replayed or live.

The device at index 0 of an axis is the server, the others are workers. A worker pushes a gradient;
the server applies it and answers with the new parameters, while the other workers compute.

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
"""The shape and dtype in which losses are sent."""

Batches = Callable[[int, int], Any]
"""From a worker and the number of its gradient in this call to a batch."""


@dataclass(frozen=True)
class ParameterServer:
    """Train asynchronously: workers push gradients, and a server applies each at once.

    Call it with parameters, the state of `init` or of the call before, and
    `batches(worker, number)`, the batch of a worker's gradient of this number in this call. It
    returns parameters, state and metrics: the "loss" of each push, and "arrivals". Parameters are
    plain tensors, equal on all devices. A push sends a gradient and 8 bytes, an answer the
    parameters.

    Args:
        gradient: from parameters and a batch to the loss and the gradients. It may call collectives
            along other axes.
        opt: the optimizer of the server.
        arrivals: the pushes, in order.
        mesh: the devices.
        axis: along which the server is at index 0, and worker w at w + 1.
        compensate: lambda of DC-ASGD (Zheng 2017): a gradient g becomes
            g + lambda g g (params - params that it was read at).
        compress: `top_k`, `random_k`, `quantized`, `sign` or a `chain`: what a worker has not sent
            joins its next gradient.
        live: apply pushes as they arrive, within the bound, on processes; each worker pushes as
            often as in `arrivals`. The metric "arrivals" is the log: replayed, it gives the same
            bits.

    >>> import torch, fshard as fs
    >>> arrivals = fs.comm.Arrivals([(0, 0), (1, 0), (0, 1)], bound=1)
    >>> def gradient(w, x):
    ...     return (w - x).square() / 2, w - x
    >>> opt, mesh = fs.optim.sgd(0.5), fs.make_mesh({"node": 3})
    >>> server = fs.comm.parameter_server(gradient, opt, arrivals, mesh=mesh, axis="node")
    >>> w = torch.ones(())
    >>> w, state, metrics = server(w, server.init(w), lambda worker, number: torch.zeros(()))
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
        n = self.mesh.shape[self.axis]
        workers = set(self._counts)
        if not workers or max(workers) > n - 2:
            raise ValueError(
                f"parameter_server: arrivals must be of workers below {n - 1}, since {self.axis} "
                f"has {n} devices and the first is the server; got {sorted(workers)}."
            )
        if self.compress is not None and not isinstance(self.compress.encoding, Encoding):
            raise ValueError(
                "parameter_server: compress must be top_k, random_k, quantized, sign or a chain of "
                "them."
            )
        has_other_axes = self.mesh.size > n
        if self.live and (self.mesh.runtime != "process" or has_other_axes):
            raise MeshError(
                f"parameter_server: live=True needs a mesh of processes along {self.axis} alone."
            )

    def init(self, params: PyTree) -> PyTree:
        """Return the state for the first call.

        It is the optimizer's, the number of pushes, and the total of what workers have not sent.
        """
        unsent = {} if self.compress is None else map_leaves(torch.zeros_like, params)
        return {"opt": self.opt.init(params), "pushes": count_from_zero(), "unsent": unsent}

    def __call__(
        self, params: PyTree, state: PyTree, batches: Batches
    ) -> tuple[PyTree, PyTree, dict[str, Any]]:
        mesh = resolve_mesh(self.mesh)
        return run_on_devices(mesh, lambda _: self._train(params, state, batches))[0]

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
        """Run as one device: the server, or a worker."""
        events = self.arrivals.events
        pushes = int(state["pushes"])
        params, opt_state, unsent = copied((params, state["opt"], state["unsent"]))
        worker = axis_index(self.axis) - 1
        if worker != 0:
            unsent = map_leaves(torch.zeros_like, unsent)  # worker 0 begins with the total

        if worker < 0:
            result = self._serve(params, opt_state, pushes)
        else:
            unsent = self._work(worker, params, unsent, batches, pushes)
            # A broadcast needs the structure and the shapes of its result on all devices.
            losses = _LOSS.repeat(len(events))
            result = (params, opt_state, losses, torch.tensor(events))

        params, opt_state, losses, log = broadcast(result, self.axis)
        next_state = {
            "opt": opt_state,
            "pushes": state["pushes"] + len(events),
            "unsent": psum(unsent, self.axis),
        }
        arrivals = Arrivals(log.tolist(), self.arrivals.bound)
        return params, next_state, {"loss": losses, "arrivals": arrivals}

    def _work(
        self, worker: int, params: PyTree, unsent: PyTree, batches: Batches, pushes: int
    ) -> PyTree:
        """Push the gradients of a worker; return what has not been sent of them."""
        for number in range(self._counts[worker]):
            with torch.enable_grad():
                loss, grads = self.gradient(params, batches(worker, number))
            # The loss first: its arrival makes a push begin, whose gradients the server receives
            # when the push may be applied.
            send(loss.detach().to("cpu", _LOSS.dtype), self.axis, 0)
            grads = map_leaves(Tensor.detach, grads)
            unsent = self._push(grads, unsent, _key(pushes, worker, number))
            params = recv(params, self.axis, 0)
        return unsent

    def _push(self, grads: PyTree, unsent: PyTree, key: str) -> PyTree:
        """Send gradients to the server; return what has not been sent."""
        if self.compress is None:
            send(_encode(grads, key, self._encoding), self.axis, 0)
            return unsent
        target = map_leaves(torch.add, grads, unsent)
        payload = _encode(target, key, self._encoding)
        send(payload, self.axis, 0)
        sent = _decode(payload, target, key, self._encoding)
        return map_leaves(torch.sub, target, sent)

    def _serve(
        self, params: PyTree, opt_state: PyTree, pushes: int
    ) -> tuple[PyTree, PyTree, Tensor, Tensor]:
        """Apply gradients; return parameters, the optimizer's state, losses and events."""
        order = PushOrder(sorted(self._counts), self.arrivals.bound)
        apply = step_of(self.opt)
        like = _encode(params, "", self._encoding)  # the shapes and dtypes of what is sent
        # The parameters that each worker has read. Copies, as a step writes its parameters.
        start = copied(params) if self.compensate else params
        read: dict[int, PyTree] = defaultdict(lambda: start)
        numbers = Counter[int]()  # of the next gradient of each worker
        losses: list[Tensor] = []

        arriving = self._first_come(order) if self.live else self._replayed()
        for worker, loss in arriving:
            payload = recv(like, self.axis, worker + 1)
            key = _key(pushes, worker, numbers[worker])
            grads = _decode(payload, params, key, self._encoding)
            if self.compensate:
                grads = map_leaves(self._compensated, grads, params, read[worker])
            params, opt_state = apply(grads, opt_state, params)
            send(params, self.axis, worker + 1)
            if self.compensate:
                read[worker] = copied(params)
            losses.append(loss)
            numbers[worker] += 1

        events = order.events if self.live else self.arrivals.events
        return params, opt_state, torch.stack(losses), torch.tensor(events)

    def _compensated(self, grad: Tensor, param: Tensor, param_read: Tensor) -> Tensor:
        """Return a gradient at the parameters that were read, about as at today's (DC-ASGD)."""
        return grad + self.compensate * grad * grad * (param - param_read)

    def _replayed(self) -> Iterator[tuple[int, Tensor]]:
        """Yield the worker and the loss of each push, in the order of `arrivals`."""
        for worker, _ in self.arrivals.events:
            yield worker, recv(_LOSS, self.axis, worker + 1)

    def _first_come(self, order: PushOrder) -> Iterator[tuple[int, Tensor]]:
        """Yield the worker and the loss of each push, as they arrive, within the bound.

        It listens to each worker for one loss at a time.
        """
        group = require("parameter_server").group(self.axis, "parameter_server")
        world = cast("ProcessWorld", group.world)
        arrived = SimpleQueue[Any]()  # the rank of a worker in the group, and its loss or an error
        losses: dict[int, Tensor] = {}
        pending = self._counts  # pushes that are still to be applied
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
                del order.versions[worker]  # others need not wait for a worker that has ended


parameter_server = ParameterServer


def _key(pushes: int, worker: int, number: int) -> str:
    """Return the text that seeds the draws of a push, on the worker and on the server."""
    return f"{pushes} {worker} {number}"


def _encode(tree: PyTree, key: str, encoding: Encoding) -> list[Any]:
    """Return the tensors that are sent of each leaf: itself, where they would not be shorter."""
    payloads: list[Any] = []
    for leaf in _flat_leaves(tree, key):
        if not _is_encoded(leaf, encoding):
            payloads.append(leaf.x)
            continue
        index = encoding.indices(leaf)
        payload: Any = leaf.x if index is None else leaf.x[index]
        if encoding.code is not None:
            draws = leaf.generator(encoding.code.seed or 0)
            payload = encoding.code.encode(payload, 1, draws)
        if encoding.is_gathered and index is not None:
            payload = payload, index.to(index_dtype(leaf.x))
        payloads.append(payload)
    return payloads


def _decode(payloads: list[Any], tree: PyTree, key: str, encoding: Encoding) -> PyTree:
    """Return the tree that was sent; its shapes are those of `tree`."""
    leaves, structure = flatten(tree)
    decoded: list[Tensor] = []
    for payload, leaf, x in zip(payloads, _flat_leaves(tree, key), leaves, strict=True):
        if not _is_encoded(leaf, encoding):
            decoded.append(payload.view(x.shape))
            continue
        index = encoding.indices(leaf) if not encoding.is_gathered else None
        if encoding.is_gathered:
            payload, index = payload
            index = index.long()
        if encoding.code is not None:
            numbers = encoding.code.decode(payload)[0, : encoding.count(leaf.x)]
            payload = numbers.to(x.dtype)
        decoded.append(sparse(leaf, index, payload).view(x.shape))
    return unflatten(structure, decoded)


def _is_encoded(leaf: FlatLeaf, encoding: Encoding) -> bool:
    """Return True if a leaf is shorter in this form, in which one of 2 devices would send it."""
    return leaf.x.is_floating_point() and encoding.bytes_sent(leaf.x, 2) < leaf.x.nbytes


def _flat_leaves(tree: PyTree, key: str) -> list[FlatLeaf]:
    paths, leaves, _ = flatten_with_paths(tree)
    pairs = zip(paths, leaves, strict=True)
    return [FlatLeaf(x.reshape(-1), f"{key} {path}") for path, x in pairs]
