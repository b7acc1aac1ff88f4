"""The collectives as data: definition, transpose and bytes of each.

A *move* is a linear map from the tensors of a group's devices before it to those after it. Its
reference is written on a plain list of per-device tensors; the virtual runtime executes it and the
tests compare the other runtimes with it. A move also defines its wire format, in rows of equal
size, and the bytes it sends.

Legend: n devices in the group, x the tensor of one, xs those of all.
U unreduced, R replicated, V sharded or varying.

    move                     before     after         transpose
    Psum                     U          R             Pvary
    Pvary                    R          V             Psum                      (free)
    AllGather                V          V             PsumScatter
    PsumScatter              U          V             AllGather
    AllGather(replicated)    V          R             Take
    Take                     R          V             AllGather(replicated)     (free)
    Broadcast                V          R             Pick
    Pick                     R          V             Broadcast                 (free)
    Summand                  R          U             Same                      (free)
    Same (fs.replicated)     U or V     R             Summand                   (free)
    Permute, AllToAll, Rows  V          V             themselves, reversed

The transpose holds for cotangents of these types: that of an R is equal on all devices. Where each
device has a loss of its own, it is not, and the backward of a move is its *adjoint*: the transpose
of `meaning`, which looks at no types. They differ where an R is involved: the adjoint of a Psum is
a Psum, that of a Pvary itself.

If only some devices of a group differentiate, their extra collectives would be matched with the
next ones of the other devices: a silently wrong sum. Therefore the *purpose* of a call (values,
tangents or cotangents) is part of what devices must agree on.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from typing import Any, ClassVar, Literal, Protocol, cast, get_args

import torch
from torch import Tensor

from fshard.mesh.layout.arithmetic import Combine, tree_of, tree_sum

WireKind = Literal["reduce", "gather", "scatter", "exchange", "permute", "broadcast", "parts"]
"""Wire formats: rows of equal size in six patterns, and `parts` of any size.

Every runtime implements exactly these.
"""


def _bytes_sent_per_byte(wire: WireKind, n: int) -> Fraction:
    """Return the bytes that each of n devices sends per byte that it has.

    It is the number of the bandwidth-optimal algorithm, whatever a transport does.
    """
    if wire == "gather":  # around a ring, each device passes a row on n - 1 times
        return Fraction(n - 1)
    if wire in ("scatter", "exchange"):  # n - 1 of the n rows that a device has
        return Fraction(n - 1, n)
    if wire == "reduce":  # a scatter, and a gather of the row that a device has then
        return Fraction(2 * (n - 1), n)
    raise AssertionError(f"{wire} has bytes of its own")


class Move:
    """The definition of a collective: its meaning, its transpose and its cost."""

    name: ClassVar[str]

    def meaning(self, xs: list[Tensor]) -> list[Tensor]:
        """Return the tensors of all devices after the move, from those before it."""
        raise NotImplementedError

    def transposed(self) -> Move:
        """Return the move that carries cotangents back."""
        raise NotImplementedError

    def adjoint(self) -> Move:
        """Return the move that carries back cotangents that differ where values are equal."""
        return self.transposed()

    def batched(self) -> Move:
        """Return the same move on tensors with one more leading dim."""
        return self


def describe(move: Move) -> str:
    """Return the name and options of a move: psum, all_gather(dim=1)."""
    if isinstance(move, Extreme):  # the name has the option
        return move.name

    options: list[str] = []
    for option in fields(cast("Any", move)):
        value = getattr(move, option.name)
        if option.repr and value is not False:
            options.append(f"{option.name}={value!r}")
    return f"{move.name}({', '.join(options)})" if options else move.name


class Wired(Move):
    """A move that sends rows of equal size.

    By default each device sends its full tensor, and all send equally much.
    """

    wire: ClassVar[WireKind]
    has_one_line: ClassVar[bool] = True
    """False if devices may call it in different lines of the program, as those of two meshes."""

    @property
    def keeps_rows(self) -> bool:
        """True if the memory of a result is that of the received rows, one after another."""
        return False

    def pack(self, x: Tensor, n: int) -> Tensor:
        """Pack a tensor for the wire: (elements,), or (n, elements) with a row per device."""
        x = plain(x)
        return x if x.ndim == 1 else x.reshape(-1)

    def unpack(self, rows: Tensor, shape: torch.Size, n: int) -> Tensor:
        """Unpack the received rows, given the shape of the input."""
        return rows if rows.shape == shape else rows.reshape(shape)

    def sent(self, size: int, index: int | None, n: int) -> Fraction:
        """Return the bytes that the device at `index` sends if it has `size` bytes.

        With None, return the most that any device sends.
        """
        return size * _bytes_sent_per_byte(self.wire, n)


def plain(x: Tensor) -> Tensor:
    """Return a tensor whose memory holds its values: a lazy conjugate or negative is computed."""
    if x.is_conj() or x.is_neg():
        return x.resolve_conj().resolve_neg()
    return x


def is_plain(x: Tensor) -> bool:
    """Return True if a tensor is contiguous, without lazy conjugation or negation."""
    return x.is_contiguous() and not x.is_conj() and not x.is_neg()


def _split_rows(x: Tensor, dim: int, n: int) -> Tensor:
    """Split `dim` into n shards, each a row. (..., n*k, ...) -> (n, elements)"""
    x = plain(x)
    if dim == 0 and x.numel():  # the rows are in order already, mostly a view
        return x.reshape(n, -1)
    return x.unflatten(dim, (n, -1)).movedim(dim, 0).reshape(n, -1)


def _shard_shape(shape: torch.Size, dim: int, n: int) -> list[int]:
    return [length // n if axis == dim else length for axis, length in enumerate(shape)]


def _concat_rows(rows: Tensor, shard: Sequence[int], dim: int, n: int) -> Tensor:
    """Concatenate rows along `dim`. (n, elements) -> (..., n*k, ...)"""
    if dim == 0:
        return rows.reshape(n * shard[0], *shard[1:])
    return rows.reshape(n, *shard).movedim(0, dim).flatten(dim, dim + 1)


@dataclass(frozen=True)
class Psum(Wired):
    """Sum over the devices.

    device 0  [1 2]   =>  [4 6]         (<= the cotangent passes through)
    device 1  [3 4]       [4 6]
    """

    name = "psum"
    wire: ClassVar[WireKind] = "reduce"

    def meaning(self, xs: list[Tensor]) -> list[Tensor]:
        return [tree_sum(xs)] * len(xs)

    def transposed(self) -> Move:
        return Pvary()

    def adjoint(self) -> Move:
        return Psum()


@dataclass(frozen=True)
class Extreme(Wired):
    """Take the largest (or smallest) over the devices, element by element.

    Not linear: see `pmax` in `collectives/api.py`.

    device 0  [1 9]   =>  [3 9]
    device 1  [3 4]       [3 9]
    """

    largest: bool
    wire: ClassVar[WireKind] = "reduce"

    @property
    def name(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return "pmax" if self.largest else "pmin"

    def meaning(self, xs: list[Tensor]) -> list[Tensor]:
        return [tree_of(xs, combining(self))] * len(xs)


def combining(move: Move) -> Combine:
    """Return the function that combines two tensors in a reduction."""
    if isinstance(move, Extreme):
        return torch.maximum if move.largest else torch.minimum
    return torch.add


@dataclass(frozen=True)
class PsumScatter(Wired):
    """Sum over the devices, and leave each with its shard along `dim`.

    device 0  [1 2]   =>  [4]           (<= all_gather)
    device 1  [3 4]       [6]
    """

    dim: int
    name = "psum_scatter"
    wire: ClassVar[WireKind] = "scatter"

    def meaning(self, xs: list[Tensor]) -> list[Tensor]:
        # Copies: a view has the strides of the full sum, and would keep it alive.
        return [shard.clone() for shard in tree_sum(xs).chunk(len(xs), self.dim)]

    def transposed(self) -> Move:
        return AllGather(self.dim)

    def batched(self) -> PsumScatter:
        return replace(self, dim=self.dim + 1)

    def pack(self, x: Tensor, n: int) -> Tensor:
        return _split_rows(x, self.dim, n)

    def unpack(self, rows: Tensor, shape: torch.Size, n: int) -> Tensor:
        return rows if len(shape) == 1 else rows.reshape(_shard_shape(shape, self.dim, n))


@dataclass(frozen=True)
class AllGather(Wired):
    """Concatenate the devices' shards along `dim`, everywhere.

    device 0  [1]     =>  [1 2]         (<= psum_scatter; with `replicated`: take the own shard)
    device 1  [2]         [1 2]
    """

    dim: int
    replicated: bool = False
    name = "all_gather"
    wire: ClassVar[WireKind] = "gather"

    def meaning(self, xs: list[Tensor]) -> list[Tensor]:
        full = torch.cat(xs, self.dim)
        return [full for _ in xs]

    def transposed(self) -> Move:
        return Take(self.dim) if self.replicated else PsumScatter(self.dim)

    def adjoint(self) -> Move:
        return PsumScatter(self.dim)

    def batched(self) -> AllGather:
        return replace(self, dim=self.dim + 1)

    @property
    def keeps_rows(self) -> bool:
        return self.dim == 0

    def unpack(self, rows: Tensor, shape: torch.Size, n: int) -> Tensor:
        return _concat_rows(rows, shape, self.dim, n)


@dataclass(frozen=True)
class AllToAll(Wired):
    """Split `split` into a shard per device, and concatenate the received ones along `concat`.

    device 0  [1 2]   =>  [1 3]         (<= the same with split and concat exchanged)
    device 1  [3 4]       [2 4]
    """

    split: int
    concat: int
    name = "all_to_all"
    wire: ClassVar[WireKind] = "exchange"

    def meaning(self, xs: list[Tensor]) -> list[Tensor]:
        n = len(xs)
        shard_length = xs[0].shape[self.split] // n
        to_dim = self.split + 1  # since `stack` adds a leading dim
        shards = torch.stack(xs).unflatten(to_dim, (n, shard_length))  # (from, ..., to, shard, ...)

        results: list[Tensor] = []
        for received in shards.unbind(to_dim):  # (from, ..., shard, ...)
            in_order = received.movedim(0, self.concat).flatten(self.concat, self.concat + 1)
            results.append(in_order.clone())  # where it is a view, it would keep `shards` alive
        return results

    def transposed(self) -> Move:
        return AllToAll(self.concat, self.split)

    def batched(self) -> AllToAll:
        return AllToAll(self.split + 1, self.concat + 1)

    @property
    def keeps_rows(self) -> bool:
        return self.concat == 0

    def pack(self, x: Tensor, n: int) -> Tensor:
        return _split_rows(x, self.split, n)

    def unpack(self, rows: Tensor, shape: torch.Size, n: int) -> Tensor:
        return _concat_rows(rows, _shard_shape(shape, self.split, n), self.concat, n)


class NewBuffer(Protocol):
    """A function that makes an uninitialised tensor."""

    def __call__(self, shape: tuple[int, ...], /, *, dtype: torch.dtype) -> Tensor: ...


class PartsMove(Wired):
    """A move that sends each device a part of any size.

    A buffer may have several tensors that are moved alike.
    """

    name = "all_to_all"
    wire: ClassVar[WireKind] = "parts"

    def parcels(self, x: Tensor, index: int) -> dict[int, Tensor]:
        """Return the flat tensors that a device sends to others."""
        raise NotImplementedError

    def expected(self, x: Tensor, index: int) -> dict[int, int]:
        """Return the number of elements that a device receives from others."""
        raise NotImplementedError

    def incoming(self, x: Tensor, index: int, empty: NewBuffer) -> dict[int, Tensor]:
        """Return tensors for what a device receives from others.

        They are adjacent, in the order of the senders. `empty` makes memory for them.
        """
        sizes = self.expected(x, index)
        buffer = empty((sum(sizes.values()),), dtype=x.dtype)
        sources = sorted(sizes)
        parts = buffer.split([sizes[source] for source in sources])
        return dict(zip(sources, parts, strict=True))

    def unpacked(self, x: Tensor, index: int, arrived: Mapping[int, Tensor]) -> Tensor:
        """Return the buffer of a device after the move.

        `x` is the buffer before it, `arrived` has what other devices have sent.
        """
        raise NotImplementedError

    def meaning(self, xs: list[Tensor]) -> list[Tensor]:
        xs = [plain(x).contiguous() for x in xs]
        sent = [self.parcels(x, index) for index, x in enumerate(xs)]

        results: list[Tensor] = []
        for index, x in enumerate(xs):
            arrived = {source: sent[source][index] for source in self.expected(x, index)}
            results.append(self.unpacked(x, index, arrived))
        return results


@dataclass(frozen=True)
class Rows(PartsMove):
    """Send `counts[source][to]` rows of `width` elements.

    Devices have rows in the order of destinations before the move, of sources after it. With counts
    [[1, 1], [0, 3]]:

    device 0  [1 2 . .]   =>  [1 . . .]         (<= the same with the counts transposed)
    device 1  [3 4 5 .]       [2 3 4 5]

    Buffers have the rows of the fullest device, before or after: here 4. What is beyond the rows of
    a device has no meaning. Under vmap a buffer has a leading dim.
    """

    counts: tuple[tuple[int, ...], ...]
    width: int

    @property
    def length(self) -> int:
        """The rows of a buffer."""
        columns = zip(*self.counts, strict=True)
        return max(1, *map(sum, self.counts), *map(sum, columns))  # sent, received

    def transposed(self) -> Rows:
        return Rows(tuple(zip(*self.counts, strict=True)), self.width)

    def _as_rows(self, x: Tensor) -> Tensor:
        """Return a view of a buffer. (...) -> (vmapped, rows, width)"""
        count = -1 if x.numel() else 0  # torch infers no length from an empty tensor
        return x.view(count, self.length, self.width)

    def parcels(self, x: Tensor, index: int) -> dict[int, Tensor]:
        counts = self.counts[index]
        rows = self._as_rows(x).narrow(1, 0, sum(counts))
        parcels: dict[int, Tensor] = {}
        for to, parcel in enumerate(rows.split(counts, 1)):
            if to != index and parcel.numel():
                parcels[to] = parcel.reshape(-1)
        return parcels

    def expected(self, x: Tensor, index: int) -> dict[int, int]:
        # Empty parcels are neither sent nor received: `parcels` has the same condition.
        elements_of_row = len(self._as_rows(x)) * self.width
        elements: dict[int, int] = {}
        for source, counts in enumerate(self.counts):
            count = counts[index] * elements_of_row
            if source != index and count:
                elements[source] = count
        return elements

    def unpacked(self, x: Tensor, index: int, arrived: Mapping[int, Tensor]) -> Tensor:
        before = self._as_rows(x)
        after = torch.zeros_like(before)
        counts = [row[index] for row in self.counts]
        first_kept = sum(self.counts[index][:index])  # before the rows for this device itself

        sections = after.narrow(1, 0, sum(counts)).split(counts, 1)
        for source, rows in enumerate(sections):
            if source == index:
                rows.copy_(before.narrow(1, first_kept, counts[index]))
            elif source in arrived:
                rows.copy_(arrived[source].view(rows.shape))
        return after.view(x.shape)

    def sent(self, size: int, index: int | None, n: int) -> Fraction:
        rows = [sum(counts) - counts[source] for source, counts in enumerate(self.counts)]
        count = max(rows) if index is None else rows[index]
        return Fraction(size, self.length) * count


@dataclass(frozen=True)
class Permute(Wired):
    """Send along `pairs` of (source, destination); a device that receives nothing gets zeros.

    device 0  [1]     =>  [0]           (<= the pairs reversed)      pairs ((0, 1),)
    device 1  [2]         [1]
    """

    pairs: tuple[tuple[int, int], ...]
    name = "ppermute"
    wire: ClassVar[WireKind] = "permute"

    def meaning(self, xs: list[Tensor]) -> list[Tensor]:
        source = {to: xs[origin] for origin, to in self.pairs}
        results: list[Tensor] = []
        for index, x in enumerate(xs):
            results.append(source[index] if index in source else torch.zeros_like(x))
        return results

    def transposed(self) -> Move:
        return Permute(tuple([(to, origin) for origin, to in self.pairs]))

    def sent(self, size: int, index: int | None, n: int) -> Fraction:
        for origin, to in self.pairs:
            if origin != to and index in (None, origin):
                return Fraction(size)
        return Fraction(0)


@dataclass(frozen=True)
class Broadcast(Wired):
    """Copy the value of the device at index `source` to all.

    device 0  [1]     =>  [1]           (<= the source takes the cotangent, the others zeros)
    device 1  [2]         [1]

    Counted as a chain from the source: every device but the last sends it once.
    """

    source: int
    name = "broadcast"
    wire: ClassVar[WireKind] = "broadcast"

    def meaning(self, xs: list[Tensor]) -> list[Tensor]:
        return [xs[self.source] for _ in xs]

    def transposed(self) -> Move:
        return Pick(self.source)

    def adjoint(self) -> Move:
        raise _without_adjoint("fs.broadcast")

    def sent(self, size: int, index: int | None, n: int) -> Fraction:
        if index is None:
            sends = n > 1
        else:
            sends = (index - self.source) % n != n - 1  # the device before the source is the last
        return Fraction(size) if sends else Fraction(0)


class Alone(Move):
    """A move without communication: a function of each device's own tensor."""

    def local(self, x: Tensor, index: int, n: int) -> Tensor:
        """Return the result on the device at `index` of `n`; the identity by default."""
        return x

    def meaning(self, xs: list[Tensor]) -> list[Tensor]:
        return [self.local(x, index, len(xs)) for index, x in enumerate(xs)]


@dataclass(frozen=True)
class Pvary(Alone):
    """Convert a replicated value to a varying one: its cotangents are summed."""

    name = "pvary"

    def transposed(self) -> Move:
        return Psum()

    def adjoint(self) -> Move:
        return Pvary()


@dataclass(frozen=True)
class Take(Alone):
    """Take the own shard along `dim` of a replicated value."""

    dim: int
    name = "take"

    def local(self, x: Tensor, index: int, n: int) -> Tensor:
        length = x.shape[self.dim] // n
        return x.narrow(self.dim, index * length, length)

    def transposed(self) -> Move:
        return AllGather(self.dim, replicated=True)

    def adjoint(self) -> Move:
        raise _without_adjoint('the gradient of fs.all_gather(to="replicated")')

    def batched(self) -> Take:
        return Take(self.dim + 1)


@dataclass(frozen=True)
class Pick(Alone):
    """Keep a replicated value on one device, zeros on the others."""

    source: int
    name = "pick"

    def local(self, x: Tensor, index: int, n: int) -> Tensor:
        return x if index == self.source else torch.zeros_like(x)

    def transposed(self) -> Move:
        return Broadcast(self.source)

    def adjoint(self) -> Move:
        return self


@dataclass(frozen=True)
class Summand(Alone):
    """Convert a replicated value to an unreduced one: zeros on all devices but the first."""

    name = "summand"

    def local(self, x: Tensor, index: int, n: int) -> Tensor:
        return x if index == 0 else torch.zeros_like(x)

    def transposed(self) -> Move:
        return Same()

    def adjoint(self) -> Move:
        return self


@dataclass(frozen=True)
class Same(Alone):
    """Declare a value that is equal on all devices as replicated; the transpose of `Summand`."""

    name = "same"

    def transposed(self) -> Move:
        return Summand()

    def adjoint(self) -> Move:
        return self


def _without_adjoint(what: str) -> ValueError:
    return ValueError(
        f"{what}: in the loss of a loop it must not depend on the model, since each device has a "
        "loss of its own. Take it from fs.all_gather(x, axis), whose result is varying."
    )


Purpose = Literal["values", "tangents", "cotangents"]
PURPOSES: tuple[Purpose, ...] = get_args(Purpose)
UNEVEN = (
    " One is for {}, the other for {}: what some devices of a group differentiate, all must. Where "
    "there is nothing to differentiate, let the argument depend on what is: add 0 * x."
)


SAME_MESSAGES = (
    " Cotangents of the messages between two devices return in one order, so both devices must "
    "differentiate the same messages in the same order: call backward once for all of them on "
    "both, or once for each."
)
FORGOTTEN_TOKEN = (
    " Add the token of each fs.send whose message the receiver differentiates to the value that the "
    "sender differentiates."
)
AWAITED_COTANGENTS = SAME_MESSAGES + (
    " Cotangents are sent where the backward of the receiver reaches the result of fs.recv. "
    "torch.autograd.grad and fs.value_and_grad leave that out unless `like` depends on what they "
    "differentiate by: add 0 * x of that to it, or call backward. Leave out the token of a message "
    "that the receiver does not differentiate."
)


def named(name: str, purpose: Purpose, number: int | None = None) -> str:
    """Return a collective's name with its purpose, unless that is values: psum for tangents.

    `number` is that of the message whose cotangents these are.
    """
    if purpose == "values":
        return name
    text = f"{name} for {purpose}"
    return text if number is None else f"{text} of message {number}"


def uneven(purpose: Purpose, peer_purpose: Purpose) -> str:
    """Return the message for two calls with different purposes, empty if they have the same."""
    return "" if purpose == peer_purpose else UNEVEN.format(purpose, peer_purpose)


def unreceived_text(lines: Sequence[str], purposes: Collection[Purpose]) -> str:
    """Return the text of the error for messages that no device has received, a line for each."""
    text = "\n  ".join(["Messages were sent but never received:", *lines])
    return f"{text}\n{FORGOTTEN_TOKEN.strip()}" if "cotangents" in purposes else text


def uneven_messages(purpose: Purpose, peer_purpose: Purpose) -> str:
    """Return the way out for two messages that differ, by their purposes; empty if unknown."""
    if "cotangents" in (purpose, peer_purpose):
        return SAME_MESSAGES + FORGOTTEN_TOKEN
    return uneven(purpose, peer_purpose)
