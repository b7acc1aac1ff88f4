"""Bytes between the devices of a mesh: a row of each to all, and chunks of memory on request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fshard.mesh.collectives.autograd import Bound
from fshard.mesh.collectives.moves import AllGather, Wired
from fshard.mesh.reshard.between import AXIS
from fshard.mesh.reshard.rounds import Parcels
from fshard.mesh.spmd.scope import Group, Pending, require
from fshard.source import call_site

_CALLER = "fs.elastic"


class ShareRequest(NamedTuple):
    """The bytes of a share that a device requests of another one.

    Args:
        holder: the index of the device that has the share.
        owner: the number of the share.
        begin: the first byte.
        size: their number.
    """

    holder: int
    owner: int
    begin: int
    size: int


def start(move: Wired, x: Tensor) -> Pending:
    """Start a collective of all devices of the mesh that the calling code runs on."""
    return Bound(move, group_of_all(), call_site()).start((x,))


def group_of_all() -> Group:
    """Return the group of all devices of the mesh that the calling code runs on."""
    return require(_CALLER).group((AXIS,), _CALLER)


def all_rows(row: Sequence[int]) -> list[list[int]]:
    """Return the numbers of each device, of which all have as many."""
    (rows,) = start(AllGather(0), torch.tensor([row])).wait()
    return rows.tolist()


def all_bytes(content: bytes) -> list[bytes]:
    """Return the bytes of each device."""
    sizes = [size for (size,) in all_rows([len(content)])]
    longest = max(sizes)
    if longest == 0:
        return [b""] * len(sizes)
    padded = bytearray(content.ljust(longest, b"\0"))
    row = torch.frombuffer(padded, dtype=torch.uint8)
    (rows,) = start(AllGather(0), row[None]).wait()
    pairs = zip(rows, sizes, strict=True)
    return [bytes(x[:size].numpy()) for x, size in pairs]


def all_requests(requests: Sequence[ShareRequest]) -> list[list[ShareRequest]]:
    """Return the requests of each device."""
    content = np.array([*requests], np.int64).tobytes()
    result: list[list[ShareRequest]] = []
    for row in all_bytes(content):
        numbers = np.frombuffer(row, np.int64).reshape(-1, len(ShareRequest._fields))
        result.append([ShareRequest(*request) for request in numbers.tolist()])
    return result


def fetch(
    requests: Sequence[ShareRequest], shares: Mapping[int, Tensor], number: int
) -> list[Tensor]:
    """Return chunks of the shares of others; all devices call it, and serve each other.

    Args:
        requests: of this device.
        shares: the bytes that it has, by their owner.
        number: of the call.
    """
    all_wanted = all_requests(requests)
    move = _move_of(all_wanted, number)
    if move is None:
        return []

    # In host memory: a new device has no share whose memory would be that of the others.
    row = torch.empty(move.length, dtype=torch.uint8)
    index = group_of_all().index
    begin = 0
    for wanted in all_wanted:
        for request in wanted:
            if request.holder != index:
                continue
            share = shares[request.owner]
            end = begin + request.size
            row[begin:end] = share[request.begin : request.begin + request.size]
            begin = end
    (received,) = start(move, row).wait()
    return _in_order(requests, received)


def _move_of(all_wanted: Sequence[Sequence[ShareRequest]], number: int) -> Parcels | None:
    """Return the move of all requests; None if there are none."""
    sizes = Counter[tuple[int, int]]()
    for receiver, wanted in enumerate(all_wanted):
        for request in wanted:
            sizes[request.holder, receiver] += request.size
    if not sizes:
        return None
    pairs: list[tuple[int, int, int]] = []
    for (sender, receiver), size in sorted(sizes.items()):
        pairs.append((sender, receiver, size))
    return Parcels(tuple(pairs), "shares", number=number)


def _in_order(requests: Sequence[ShareRequest], received: Tensor) -> list[Tensor]:
    """Return chunks in the order of their requests; they arrive in that of their senders."""
    places = sorted(range(len(requests)), key=lambda place: requests[place].holder)
    sizes = [requests[place].size for place in places]
    parts = received[: sum(sizes)].split(sizes)
    part_of = dict(zip(places, parts, strict=True))
    return [part_of[place] for place in range(len(requests))]
