"""A process group for CPU tensors with the rules of NCCL: what is wrong there raises here, as text,
within seconds.

Importing this module registers the backend "nccl_rules". All ranks send their operations to a hub,
a thread of rank 0, which plays the devices of all: see nccl_hub.py. The rules:

    order       Operations of a communicator are paired by their order. Tags are ignored.
    queues      A communicator is a queue on each of its ranks: an operation starts when all before it have completed.
                A send or receive has a communicator of its two ranks, on which both directions share the queue. A batch
                uses the group's, and so does everything in an eager group, as with torch's `device_id`.
    rendezvous  The first operation of a communicator blocks the host until all its ranks make theirs. If eager,
                making the group does. All groups are eager if NCCL_RULES_EAGER=1; beside gloo those are that have both
                backends, as the library binds those to their device.
    results     are NaN (bytes 0xFF) from the start until `work.wait()`, in the thread that started the operation.
    inputs      must not change between start and wait, nor may results be written.
    host        `wait(timeout)` blocks the host on NCCL, so it raises. `is_completed()` completes nothing. `wait` of a
                send returns at once, whether it is received or not: see `is_completed`.
    time        Completions are delayed at random: their order between communicators depends on NCCL_RULES_SEED.
    tensors     Strided ones, dtypes that NCCL lacks and host tensors (see `host`) are refused. Extremes drop NaN. The
                order of a sum depends on the number of operations before it.
    beside gloo With `fake_device`, and its BACKEND in place of "nccl_rules", only tensors of `fakegpu` are those of GPUs.
                Groups with both backends pass tensors of the host to real gloo; groups for messages refuse them.
    worlds      Each default group has a hub of its own, in its rank 0: processes may leave a world and form another.
    deaths      A process that is killed is reported to those that wait for it; with NCCL_RULES_DEATHS=unseen to none, as
                with NCCL on one machine. What waits for it never completes, that of rank 0 included. `abort` ends it: then
                the device goes on, with NaN for results.
    deadlocks   are reported to all ranks: the cycle, or all open operations after NCCL_RULES_STALL seconds of silence.

With `hold()`, `wait` returns at once and nothing completes until `release()`: a step that returns
has blocked the host nowhere. But sums in float64 complete: among them are those of rows in host
memory, whose link would be gloo, and the host waits for the other hosts there, not for the device.
`counts["sums in float64"]` is their number. So do operations that `hold` is told of, whose results
the host must read; `counts["reads"]` is the number of these. `counts` has launches, waits, host
synchronisations, polls and rendezvous.
"""

from __future__ import annotations

import os
import pickle
import threading
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import update_wrapper, wraps
from itertools import accumulate, count
from multiprocessing.connection import Client
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from tests.mesh.runtimes import fake_device
from tests.mesh.runtimes.nccl_hub import (
    QUIET,
    Hub,
    Op,
    array_of,
    bytes_of,
    deaths_are_unseen,
)

counts: Counter[str] = Counter()
"""Launches by name, and "launches", "waits", "host syncs", "polls", "rendezvous", "aborts", "on
gloo" of this process.
"""
violations: list[str] = []
"""The texts of all rule errors of this process, in case that the library has suppressed some."""

_hosts: weakref.WeakSet[Any] = weakref.WeakSet()
_state: dict[str, Any] = {
    "engine": None,
    "held": None,
    "is_read": None,
    "backend": "",
    "blocked": 0,
}


class RuleError(AssertionError):
    """A use that is wrong on NCCL."""


def host(x: Tensor) -> Tensor:
    """Mark the memory of a tensor as host memory, which is refused; return the tensor."""
    _hosts.add(x.untyped_storage())
    return x


def hold(is_read: Callable[[Op], bool] = lambda op: False) -> None:
    """Complete nothing until `release`: `wait` returns at once, as on NCCL, and the results stay
    NaN.

    Operations that `is_read` is true for complete: the host reads their results.
    """
    _state["held"], _state["is_read"] = [], is_read


def release() -> None:
    """Complete the operations started since `hold`.

    Their results are not written: their memory may have other uses.
    """
    works, _state["held"] = _state["held"] or [], None
    for work in works:
        work.is_held = False


def is_blocked() -> bool:
    """Return True if the main thread waits for an operation, as the compute stream would, or did
    not because of `hold`.
    """
    return _state["blocked"] > 0 or bool(_state["held"])


def communicators() -> list[tuple[str, tuple[int, ...]]]:
    """Return the channel ("" of a group) and the ranks of each communicator of this process."""
    return [(channel, members) for (_, channel), members in _state["engine"].comms.items()]


def _violate(text: str, kind: type[Exception] = RuleError) -> NoReturn:
    if kind is RuleError:
        violations.append(text)
    raise kind(text)


def _stream() -> int:
    """Return the stream of this thread; a thread of autograd uses that of the forward: see
    foreign_backward.py.
    """
    is_of_autograd = threading.current_thread().name == "foreign backward"
    return threading.main_thread().ident or 0 if is_of_autograd else threading.get_ident()


class Engine:
    """The connection of a process to the hub."""

    def __init__(self, rank: int, address: str) -> None:
        self.rank = rank
        self.connection = Client(address)
        self.lock = threading.Lock()
        self.connection.send(rank)
        self.ids = count(1)
        self.works = dict[int, Work]()
        self.failure = ("", "")
        self.is_aborted = False
        self.groups: set[NcclRules] = set()
        self.comms: dict[tuple[str, str], tuple[int, ...]] = {}
        self.names: Counter[str] = Counter()
        threading.Thread(target=self.read, name="nccl_rules reader", daemon=True).start()

    def tell(self, kind: str, content: Any) -> None:
        with self.lock, suppress(OSError):
            self.connection.send_bytes(pickle.dumps((kind, content)))

    def read(self) -> None:
        with suppress(EOFError, OSError, TypeError, ValueError):
            while True:
                kind, *content = pickle.loads(self.connection.recv_bytes())
                if kind == "done":
                    self.works.pop(content[0]).complete(content[1])
                else:
                    self.break_down(*content)
        if not deaths_are_unseen():
            self.break_down(
                "remote", "NCCL: a remote process has exited: rank 0, which has the hub."
            )

    def abort(self) -> None:
        """End all operations without their results."""
        self.is_aborted = True
        _state["held"] = None
        self.break_down("remote", "NCCL communicator was aborted")

    def break_down(self, kind: str, text: str) -> None:
        self.failure = self.failure if self.failure[0] else (kind, text)
        for work in [*self.works.values()]:
            work.complete({})

    def raise_failure(self) -> None:
        kind, text = self.failure
        if kind:
            _violate(text, RuleError if kind == "rules" else dist.DistBackendError)

    def block(self, work: Work, timeout: timedelta) -> None:
        """Wait for an operation; only the main thread's waits are reasons for deadlocks."""
        if not work.event.wait(QUIET / 2):
            is_main = _stream() == threading.main_thread().ident
            if is_main:
                self.tell("block", work.op.id)
                _state["blocked"] += 1
            in_time = work.event.wait(timeout.total_seconds())
            if is_main:
                _state["blocked"] -= 1
                self.tell("go on", None)
            if not in_time:
                text = f"Watchdog caught collective operation timeout: {work.op} ran for {timeout}."
                _violate(text, dist.DistBackendError)
        if deaths_are_unseen() and self.is_aborted:
            return  # no wait raises on NCCL
        if work.results is None or self.failure[0]:
            self.raise_failure()

    def close(self, group: NcclRules) -> None:
        self.groups.discard(group)
        if not self.groups:
            self.tell("leave", None)  # the hub closes the connection, which ends the reader


class Work(dist._Work):  # pyright: ignore[reportPrivateUsage]  # the only class that torch lets Python derive from
    """An operation that was started."""

    def __init__(
        self, group: NcclRules, op: Op, inputs: Sequence[Tensor], outputs: dict[int, Tensor]
    ) -> None:
        super().__init__()
        self.group = group
        self.op = op
        self.event = threading.Event()
        self.stream = _stream()
        self.results: dict[int, bytes] | None = None
        self.inputs, self.outputs = inputs, outputs
        self.is_held = _state["held"] is not None
        if self.is_held and op.name == "all_reduce" and op.signature[0] == torch.float64:
            self.is_held = False
            counts["sums in float64"] += 1
        elif self.is_held and _state["is_read"](op):
            self.is_held = False
            counts["reads"] += 1
        if self.is_held:
            _state["held"].append(self)
        for x in outputs.values():
            array_of(x)[...] = 0xFF
        self.digests = [zlib.crc32(array_of(x)) for x in (*inputs, *outputs.values())]

    def complete(self, results: dict[int, bytes]) -> None:
        self.results = results
        self.event.set()

    def is_completed(self) -> bool:
        counts["polls"] += 1
        is_completed = self.event.is_set() and not self.is_held
        if is_completed:
            self._check()
        return is_completed

    def is_success(self) -> bool:
        return self.is_completed()

    def wait(self, timeout: timedelta | None = None) -> bool:
        if timeout:
            counts["host syncs"] += 1
            _violate(f"wait({timeout}) blocks the host until {self.op} has completed; call wait().")
        if _stream() != self.stream:
            _violate(
                f"{self.op} was started in one thread and is waited for in another, which has other streams."
            )
        counts["waits"] += 1
        if self.is_held or not self.outputs:
            self.let_go()  # the host goes on: there is no result that it could read too early
        else:
            self.finish()
        return True

    def finish(self) -> None:
        """Block until it has completed, and write the results."""
        self.group.engine.block(self, self.group.timeout)
        outputs, results = self.outputs, self.results or {}
        self.let_go()
        for i in results:
            array_of(outputs[i])[...] = np.frombuffer(results[i], np.uint8)

    def let_go(self) -> None:
        """Check the tensors and forget them, as NCCL does when a stream waits."""
        self._check()
        self.inputs, self.outputs, self.digests = (), {}, []

    def synchronize(self) -> None:
        self.wait()

    def _check(self) -> None:
        """Raise if an input, or a result, has changed since the start."""
        for x, digest in zip((*self.inputs, *self.outputs.values()), self.digests, strict=True):
            if zlib.crc32(array_of(x)) != digest:
                _violate(f"{self.op}: a tensor {[*x.shape]} was written between start and wait.")


def _device_type() -> str:
    return fake_device.NAME if fake_device.is_installed() else "cpu"


INTEGERS = {torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64}
FLOATS = {
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
}
DTYPES = INTEGERS | FLOATS
"""The dtypes of torch's map for NCCL."""


def _check_tensors(xs: Sequence[Tensor]) -> None:
    for x in xs:
        if x.device.type != _device_type() or x.untyped_storage() in _hosts:
            _violate("No backend type associated with device type cpu: NCCL takes tensors of GPUs.")
        if x.dtype not in DTYPES:
            _violate(f"Input tensor data type is not supported for NCCL process group: {x.dtype}")
        if not x.is_contiguous() or x.is_sparse:
            _violate("Tensors must be contiguous")


def _reduction(op: Any, dtype: torch.dtype) -> str:
    name = str(op.op if hasattr(op, "op") else op).split(".")[-1]
    if name not in ("SUM", "AVG", "PRODUCT", "MIN", "MAX") or (
        name == "AVG" and dtype == torch.bool
    ):
        _violate(f"Cannot use ReduceOp.{name} with NCCL")
    if "float8" in str(dtype):
        _violate("Unsupported Float8 type for NCCL reduction")
    return "MAX" if dtype == torch.bool and name == "SUM" else name


class NcclRules(dist.ProcessGroup):
    """A group; ranks in messages to the hub are those of the world."""

    def __init__(
        self,
        engine: Engine,
        name: str,
        members: tuple[int, ...],
        timeout: timedelta,
        gloo: Any,
    ) -> None:
        super().__init__(members.index(engine.rank), len(members))
        self.engine, self.name, self.members, self.timeout = engine, name, members, timeout
        engine.names[name] += 1
        self.label = name if engine.names[name] == 1 else f"{name}#{engine.names[name]}"
        self.gloo = gloo  # for tensors of the host, where the device is another
        self.is_eager = gloo is not None or os.environ.get("NCCL_RULES_EAGER") == "1"
        self.batch: list[tuple[int, Tensor, bool]] | None = None
        engine.groups.add(self)
        if self.is_eager:
            self.meet("", members)

    @property
    def group_name(self) -> str:
        return self.name

    @property
    def _device_types(self) -> list[torch.device]:
        kinds = [_device_type()] if self.gloo is None else ["cpu", _device_type()]
        return [torch.device(kind) for kind in kinds]

    def getBackendName(self) -> str:
        return "nccl_rules"

    def meet(self, channel: str, members: tuple[int, ...]) -> tuple[str, str]:
        """Make a communicator, at its first use: the host waits for all its ranks."""
        comm = (self.label, channel)
        if comm not in self.engine.comms:
            counts["rendezvous"] += 1
            op = Op(next(self.engine.ids), self.engine.rank, comm, members, "rendezvous")
            work = self.post(op, [], {})
            work.is_held = False
            work.finish()
            self.engine.comms[comm] = members
        return comm

    def post(self, op: Op, inputs: Sequence[Tensor], outputs: dict[int, Tensor]) -> Work:
        work = self.engine.works[op.id] = Work(self, op, inputs, outputs)
        # In this order: a thread that aborts sets the failure, then ends all works. One that began
        # in between would never end.
        self.engine.raise_failure()
        self.engine.tell("post", op)
        return work

    def launch(
        self,
        name: str,
        signature: tuple[Any, ...],
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        rows: Sequence[Tensor] | None = None,
    ) -> Work:
        """Start a collective; `rows` are the parts of the inputs, if they are not the inputs
        themselves.
        """
        _check_tensors([*inputs, *outputs])
        if self.batch is not None:
            _violate(f"{name} in a batch of messages")
        comm = self.meet("", self.members)
        counts[name] += 1
        counts["launches"] += 1
        data = [bytes_of(x) for x in (inputs if rows is None else rows)]
        sizes = [x.nbytes for x in outputs]
        op = Op(
            next(self.engine.ids),
            self.engine.rank,
            comm,
            self.members,
            name,
            signature,
            data,
            sizes,
        )
        in_place = {x.data_ptr() for x in outputs}
        return self.post(
            op, [x for x in inputs if x.data_ptr() not in in_place], dict(enumerate(outputs))
        )

    # -- collectives -------------------------------------------------------------------------------

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> Work:
        reduction = _reduction(opts.reduceOp if opts else dist.ReduceOp.SUM, tensors[0].dtype)
        sizes = [x.numel() for x in tensors]
        return self.launch("all_reduce", (tensors[0].dtype, reduction, *sizes), tensors, tensors)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Sequence[Tensor], opts: Any) -> Work:
        signature = (
            tensors[0].dtype,
            _reduction(opts.reduceOp, tensors[0].dtype),
            tensors[0].numel(),
            opts.rootRank,
        )
        return self.launch(
            "reduce", signature, tensors, tensors if self.rank() == opts.rootRank else []
        )

    def broadcast(self, tensors: Sequence[Tensor], opts: Any) -> Work:
        signature = tensors[0].dtype, tensors[0].numel(), opts.rootRank
        return self.launch(
            "broadcast", signature, tensors if self.rank() == opts.rootRank else [], tensors
        )

    def allgather(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> Work:
        return self.launch("all_gather", (inputs[0].dtype, inputs[0].numel()), inputs, outputs[0])

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        if output.numel() != input.numel() * self.size():
            _violate("output tensor size must be equal to world_size times input tensor size")
        _check_tensors([output, input])
        return self.allgather(
            [[*output.view(-1).chunk(self.size())] if output.numel() else [output] * self.size()],
            [input],
        )

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        _check_tensors([output, input])
        rows = [*input.view(-1).chunk(self.size())] if input.numel() else [input] * self.size()
        return self._reduce_scatter(output, [input], rows, opts)

    def reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any = None
    ) -> Work:
        return self._reduce_scatter(outputs[0], inputs[0], inputs[0], opts)

    def _reduce_scatter(
        self, output: Tensor, inputs: Sequence[Tensor], rows: Sequence[Tensor], opts: Any
    ) -> Work:
        if sum([x.numel() for x in inputs]) != output.numel() * self.size():
            _violate("input tensor must be the same size as output size times world size")
        reduction = _reduction(opts.reduceOp if opts else dist.ReduceOp.SUM, output.dtype)
        return self.launch(
            "reduce_scatter", (output.dtype, reduction, output.numel()), inputs, [output], rows
        )

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_sizes: Sequence[int],
        input_sizes: Sequence[int],
        opts: Any = None,
    ) -> Work:
        _check_tensors([output, input])
        parts = [
            _split(x, sizes, self.size())
            for x, sizes in ((output, output_sizes), (input, input_sizes))
        ]
        return self.launch("all_to_all", (input.dtype,), [input], parts[0], parts[1])

    def alltoall(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Work:
        return self.launch("all_to_all", (inputs[0].dtype,), inputs, outputs)

    def scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any
    ) -> Work:
        signature = outputs[0].dtype, outputs[0].numel(), opts.rootRank
        return self.launch("scatter", signature, inputs[0] if inputs else [], outputs)

    def gather(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any
    ) -> Work:
        signature = inputs[0].dtype, inputs[0].numel(), opts.rootRank
        return self.launch("gather", signature, inputs, outputs[0] if outputs else [])

    def barrier(self, opts: Any = None) -> Work:
        counts["host syncs"] += 1
        return self.allreduce([torch.ones(1, device=_device_type())])

    # torch's older names
    _allgather_base = allgather_into_tensor = all_gather_single
    _reduce_scatter_base = reduce_scatter_tensor = reduce_scatter_single
    alltoall_base = all_to_all_single

    # -- messages ----------------------------------------------------------------------------------

    def send(self, tensors: Sequence[Tensor], to: int, tag: int = 0) -> Work | None:
        return self._message(tensors[0], to, True)

    def recv(self, tensors: Sequence[Tensor], source: int, tag: int = 0) -> Work | None:
        return self._message(tensors[0], source, False)

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int = 0) -> Work:
        _violate("ProcessGroupNCCL does not support recvAnysource")

    def _message(self, x: Tensor, peer: int, is_send: bool) -> Work | None:
        _check_tensors([x])
        if self.batch is not None:
            self.batch.append((peer, x, is_send))
            return None
        if peer == self.rank():
            _violate(
                "Cannot send to or receive from itself outside a batch: it would wait for itself."
            )
        return self._messages([(peer, x, is_send)], is_batch=False)

    def _messages(self, messages: Sequence[tuple[int, Tensor, bool]], *, is_batch: bool) -> Work:
        channel, members = "", self.members
        if not (is_batch or self.is_eager):
            members = tuple(sorted([self.engine.rank, self.members[messages[0][0]]]))
            channel = f"pair {members}"
        comm = self.meet(channel, members)
        counts.update(["send" if is_send else "receive" for *_, is_send in messages])
        counts["launches"] += 1
        coded = [
            (self.members[to], x.nbytes, bytes_of(x) if is_send else None)
            for to, x, is_send in messages
        ]
        op = Op(next(self.engine.ids), self.engine.rank, comm, members, "messages", messages=coded)
        received = {i: x for i, (_, x, is_send) in enumerate(messages) if not is_send}
        return self.post(op, [x for _, x, is_send in messages if is_send], received)

    def start_batch(self) -> None:
        """Collect sends and receives."""
        self.batch = []

    def end_batch(self) -> Work:
        """Start what was collected, as one operation of the group."""
        messages, self.batch = self.batch or [], None
        return self._messages(messages, is_batch=True)

    # -- leaving -----------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Wait for all operations of the group, as NCCL does."""
        try:
            for work in [work for work in [*self.engine.works.values()] if work.group is self]:
                self.engine.block(work, self.timeout)
        finally:
            self.engine.close(self)

    def abort(self) -> None:
        """End all operations of the group, whose waits raise."""
        counts["aborts"] += 1
        self.engine.abort()
        self.engine.close(self)
        if self.gloo is not None:
            self.gloo.abort()


def _split(x: Tensor, sizes: Sequence[int], n: int) -> list[Tensor]:
    """Split the first dim in parts of these sizes, or in equal ones."""
    if not sizes and x.shape[0] % n:
        _violate("Tensor's dim 0 does not divide equally across group size")
    if sizes and sum(sizes) != x.shape[0]:
        _violate("Split sizes doesn't match total dim 0 size")
    ends = [*accumulate(sizes or [x.shape[0] // n] * n)]
    return [x[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def _route(name: str) -> None:
    """Let a method pass tensors of the host to gloo, in a group that has it."""
    method = getattr(NcclRules, name)

    @wraps(method)
    def routed(self: NcclRules, *args: Any, **kwargs: Any) -> Any:
        is_on_host = any(isinstance(x, Tensor) and x.is_cpu for x in tree_leaves(args))
        if self.gloo is not None and is_on_host:
            counts["on gloo"] += 1
            return getattr(self.gloo, name)(*args, **kwargs)
        return method(self, *args, **kwargs)

    setattr(NcclRules, name, routed)


for _name in ("send", "recv", "recv_anysource", "broadcast", "allreduce", "allgather"):
    _route(_name)


def _create(options: Any, _: Any = None) -> NcclRules:
    members = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
    if not dist.is_initialized():
        if options.group_rank == 0:
            options.store.set("nccl_rules", Hub(options.group_size).listener.address)
        _state["engine"] = Engine(options.group_rank, options.store.get("nccl_rules").decode())
    gloo = None
    if ":" in _state["backend"]:
        store = dist.PrefixStore("gloo", options.store)
        gloo = dist.ProcessGroupGloo(store, options.group_rank, options.group_size, options.timeout)
    return NcclRules(_state["engine"], options.group_id, members, options.timeout, gloo)


_new_group_by_torch = dist.distributed_c10d._new_process_group_helper


def _new_group(*args: Any, **kwargs: Any) -> Any:
    """Make a group as torch does; note its backends, which `_create` is not given."""
    _state["backend"] = str(args[3])
    return _new_group_by_torch(*args, **kwargs)


dist.distributed_c10d._new_process_group_helper = _new_group

_set_timeout_by_torch = dist.distributed_c10d._set_pg_timeout


def _set_timeout(timeout: timedelta, group: Any = None) -> None:
    """Set the time limit of a group, as torch does for its own classes."""
    pg: Any = group or dist.group.WORLD
    if not isinstance(pg, NcclRules):
        _set_timeout_by_torch(timeout, group)
        return
    pg.timeout = timeout
    if pg.gloo is not None:
        pg.gloo._set_default_timeout(timeout)


dist.distributed_c10d._set_pg_timeout = _set_timeout


class Ruled:
    """A function that raises if it has broken a rule, even where the error was suppressed.

    A process that receives it imports this module, which registers the backend.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        update_wrapper(self, function)  # also copies attributes
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        violations.clear()
        result = self.function(*args, **kwargs)
        if violations:
            raise RuleError("\n".join(["Suppressed errors:", *violations]))
        return result

    def __reduce__(self) -> tuple[type[Ruled], tuple[Callable[..., Any]]]:
        return Ruled, (self.function,)


_batch_by_torch = dist.batch_isend_irecv


def _batch_isend_irecv(ops: list[dist.P2POp]) -> list[dist.Work]:
    """Batch messages as for NCCL; torch does so for its own classes only."""
    group: Any = ops[0].group or dist.group.WORLD
    if not isinstance(group, NcclRules):
        return _batch_by_torch(ops)
    group.start_batch()
    for op in ops:
        peer = {"group_dst" if op.op is dist.isend else "group_src": op.group_peer}
        op.op(op.tensor, group=group, tag=op.tag, **peer)
    return [group.end_batch()]


dist.batch_isend_irecv = _batch_isend_irecv
dist.Backend.register_backend(
    "nccl_rules", _create, extended_api=True, devices=["cpu", fake_device.NAME]
)
