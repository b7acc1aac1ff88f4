"""`StepRecorder`: what one device does in a step of the abstract mesh, in order.

    Operation          of torch: its operations, the bytes that it reads and writes
    CollectiveStart    with the bytes of the ledger; `CollectiveWait` is where the result is needed
    Copy               between two memories, beside the computation

The program itself runs, on tensors without values: nothing here knows a model, a stage of ZeRO or
an order of units.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from fshard.memory.limit import CountStorages, counted
from fshard.memory.usage import MemoryUsage
from fshard.mesh.collectives.ledger import Ledger, writing_to
from fshard.mesh.layout import Memory, dtype_name
from fshard.mesh.layout.counting import MEMORIES, LedgerRow, Purpose, counting, without_counters
from fshard.mesh.runtimes.abstract import Mail
from fshard.source import Site

_ops: Any = torch.ops.aten
_torch: Any = torch  # these two names have no public ones
_current_node = _torch._C._current_autograd_node
_next_sequence_number = _torch.autograd._get_sequence_nr

_WITHOUT_TRAFFIC = {
    _ops.empty,
    _ops.empty_like,
    _ops.empty_strided,
    _ops.new_empty,
    _ops.new_empty_strided,
    _ops.lift_fresh,
    _ops.set_,
    _ops.resize_,
    _ops._unsafe_view,
    _ops.promote_types,
}
"""Operations that are no views for torch, and neither read nor write an element, or run on no device."""

PURPOSES: tuple[Purpose, ...] = get_args(Purpose)
"""The purposes of memory, in the order of `Operation.memory`."""


class Operation(NamedTuple):
    """An operation of torch.

    Args:
        name: such as "mm".
        unit: of parameters that was used last, "begin" or "update".
        dtype: of its arguments, by the short name of layouts: "bf16".
        flops: of matrix products, convolutions and attention, half of it if it is causal; 0 for
            others.
        traffic: the bytes of its arguments and results.
        memory: the bytes in device memory after it, by `PURPOSES`.
        peak: the most bytes since the operation before it, with those that collectives will write.
    """

    name: str
    unit: str
    dtype: str
    flops: int
    traffic: int
    memory: tuple[int, ...] = ()
    peak: int = 0


def dtype_of_products(operations: Iterable[Operation]) -> str:
    """Return the dtype of most operations of products: peaks differ by it.

    >>> dtype_of_products([Operation("mm", "", "bf16", 8, 4), Operation("mm", "", "f32", 2, 4)])
    'bf16'
    """
    flops = Counter[str]()
    for event in operations:
        flops[event.dtype] += event.flops
    return max(flops, key=lambda name: flops[name], default="f32")


class CollectiveStart(NamedTuple):
    """A collective begins.

    Args:
        row: of the ledger.
        sent: bytes that a device sends.
        is_started: True if it runs until a `CollectiveWait`.
    """

    row: LedgerRow
    sent: float
    is_started: bool


class CollectiveWait(NamedTuple):
    """The result of a started collective is needed, which is the event of this number."""

    start: int


class Copy(NamedTuple):
    """Bytes are copied between two memories."""

    source: Memory
    target: Memory
    size: int


class MessageSend(NamedTuple):
    """A message of a stage to another device, and its bytes."""

    to: int
    sent: float


class MessageWait(NamedTuple):
    """The next message of another device is needed."""

    source: int


Event = Operation | CollectiveStart | CollectiveWait | Copy | MessageSend | MessageWait


class TracedMail(Mail):
    """Messages that are written into the lists of events of both devices."""

    def __init__(self, events: Mapping[int, list[Event]]) -> None:
        super().__init__()
        self._events = events

    def put(self, source: int, to: int, xs: tuple[Tensor, ...]) -> None:
        size = sum(x.nbytes for x in xs)
        self._events[source].append(MessageSend(to, float(size)))
        super().put(source, to, xs)

    def get(self, source: int, to: int) -> tuple[Tensor, ...]:
        self._events[to].append(MessageWait(source))
        return super().get(source, to)


@dataclass(repr=False)
class TracedLedger(Ledger):
    """A ledger that writes its calls into a list of events too, but for messages."""

    events: list[Event] = field(default_factory=list[Event])

    def record(self, device: int, row: LedgerRow, sent: Fraction) -> None:
        super().record(device, row, sent)
        is_message = row.collective == "send"  # `TracedMail` writes it, with its receiver
        if not is_message:
            self.events.append(CollectiveStart(row, float(sent), is_started=False))

    def record_move(self, device: int, source: Memory, target: Memory, count: int) -> None:
        super().record_move(device, source, target, count)
        self.events.append(Copy(source, target, count))


class StepRecorder(CountStorages):
    """Write the operations of a step, and the waits for collectives, into a list of events.

    Memory is counted too.
    """

    def __init__(self, usage: MemoryUsage, events: list[Event]) -> None:
        super().__init__(usage)
        self._events = events
        # The index of the start of each collective under way, by the identity of its delivery.
        self._starts = dict[int, int]()
        # The line of the forward of each node of the graph, by its sequence number.
        self._lines = dict[int, Site]()

    def _site(self, default: Site | None) -> Site:
        """Return the line of the layer, which in a backward is that of its forward.

        There is no frame of the layer in a backward, so the sequence numbers of torch's graph lead
        to its line: an operation of a forward runs when its node has just taken the last number.
        """
        node: Any = _current_node()
        # With gradients it is a forward that a backward runs again.
        if node is not None and not torch.is_grad_enabled():
            return self._lines.get(node._sequence_nr()) or super()._site(default)
        site = super()._site(default)
        self._lines.setdefault(_next_sequence_number() - 1, site)
        return site

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        is_counted = result is not NotImplemented and self in counting().counters
        packet = func.overloadpacket
        named = kwargs or {}
        is_run = is_counted and not func.is_view and packet not in _WITHOUT_TRAFFIC
        # torch launches nothing for results without elements, such as shards of other stages.
        if is_run and _has_elements(result, (*args, *named.values())):
            flops = 0
            if packet in flop_registry:
                flops = flop_registry[packet](*args, **named, out_val=result)
                if _is_causal(func, args, named):
                    flops //= 2  # kernels skip the blocks of pairs that no token sees
            self._add(packet.__name__, (*args, *named.values()), result, flops)
        return result

    def _add(self, name: str, args: Sequence[Any], result: Any, flops: int) -> None:
        tensors = [*_tensors(args), *_tensors((result,))]
        # A tensor that is read and written in place is one traffic of its bytes.
        sizes = {id(x): x.nbytes for x in tensors}
        dtype = next((x.dtype for x in tensors if x.is_floating_point()), torch.int64)
        timeline = self.usage.timeline
        unit = timeline[-1].name if timeline else "begin"
        memory = tuple([self.usage.purposes[purpose] for purpose in PURPOSES])
        traffic = sum(sizes.values())
        peak = max(self.usage.highest, sum(memory))
        self.usage.highest = 0
        self._events.append(Operation(name, unit, dtype_name(dtype), flops, traffic, memory, peak))

    def reserve(self, delivery: object, xs: Sequence[Tensor], count: int) -> None:
        super().reserve(delivery, xs, count)
        # Only a started collective reserves memory, and the ledger has just written its row.
        last = self._events[-1] if self._events else None
        if isinstance(last, CollectiveStart):
            self._events[-1] = last._replace(is_started=True)
            self._starts[id(delivery)] = len(self._events) - 1

    def deliver(self, delivery: object, results: Sequence[Tensor]) -> None:
        super().deliver(delivery, results)
        index = self._starts.pop(id(delivery), None)
        if index is not None:
            self._events.append(CollectiveWait(index))


def _is_causal(func: Any, args: Sequence[Any], named: Mapping[str, Any]) -> bool:
    """Return True for attention in which a token sees only earlier ones and itself."""
    for argument, value in zip(func._schema.arguments, args, strict=False):
        if argument.name == "is_causal":
            return bool(value)
    return bool(named.get("is_causal", False))


def _has_elements(result: Any, arguments: Sequence[Any]) -> bool:
    """Return True if an operation computes an element; one in place may return nothing."""
    tensors = _tensors((result,)) or _tensors(arguments)
    return not tensors or any([x.numel() > 0 for x in tensors])


def _tensors(values: Sequence[Any]) -> list[Tensor]:
    tensors = list[Tensor]()
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, list | tuple):
            tensors += _tensors(value)
    return tensors


@contextmanager
def recording(events: list[Event]) -> Generator[tuple[MemoryUsage, TracedLedger]]:
    """Record what runs inside the block: memory, the ledger, and all events into a list."""
    usage = MemoryUsage(dict.fromkeys(MEMORIES))
    comm = TracedLedger(events=events)
    recorder = StepRecorder(usage, comm.events)
    with writing_to([comm]), without_counters(), counted(usage, recorder):
        yield usage, comm
