"""Find the other processes of this machine that can read each other's memory."""

from __future__ import annotations

import ctypes
import os
import secrets
import socket
import struct
import sys
import time
import zlib
from array import array
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fshard.mesh.shared_memory import rings
from fshard.mesh.shared_memory.peers import Peer, Peers

_LOOK = 0.05
"""Seconds between two looks whether the processes that are waited for are there."""


def meet(timeout: timedelta, raise_if_lost: Callable[[], None] = lambda: None) -> Peers:
    """Find the other processes of this machine; a collective of the world.

    `raise_if_lost` is called while this process waits for others, and raises to end that. Returns
    none if one of them may not read the memory of another. The processes meet in four steps:

        1. all-gather a table: machine, process, and a random token with its address
        2. each reads the token of its local predecessor, which a process may or may not permit
        3. all-gather whether it could: from then on, all listen
        4. each connects to the local processes of higher ranks, and accepts those of lower ranks
    """
    rank = dist.get_rank()
    libc = _libc()
    # A process that can read this can read this process's memory.
    token = torch.tensor([secrets.randbits(62)])
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        machine = machine_id() if libc is not None else 0
        table = all_gather([machine, os.getpid(), int(token), token.data_ptr()])
        local_ranks: list[int] = []
        if machine:
            local_ranks = [peer for peer, row in enumerate(table) if row[0] == machine]
            listener.bind(_socket_name(table[rank]))
            listener.listen(len(local_ranks))
            listener.settimeout(_LOOK)

        can_read = False
        if len(local_ranks) > 1:
            predecessor = local_ranks[local_ranks.index(rank) - 1]
            can_read = _can_read(libc, table[predecessor])
        verdicts = all_gather([can_read])
        if not local_ranks or not all(verdicts[peer][0] for peer in local_ranks):
            return Peers({}, timeout)
        rows = {peer: table[peer] for peer in local_ranks}
        ends = _connect(listener, rank, rows, timeout.total_seconds(), raise_if_lost)

    peers: dict[int, Peer] = {}
    for peer, end in ends.items():
        _, pid, _, _ = table[peer]
        peers[peer] = Peer(peer, pid, end, libc)
    return Peers(peers, timeout, libc)


def _connect(
    listener: socket.socket,
    rank: int,
    rows: dict[int, list[int]],
    limit: float,
    raise_if_lost: Callable[[], None],
) -> dict[int, socket.socket]:
    """Connect this process to the others of its machine, whose rows of the table these are."""
    ends: dict[int, socket.socket] = {}
    awaited: dict[int, int] = {}  # ranks by process
    for peer, row in rows.items():
        if peer > rank:
            ends[peer] = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            ends[peer].connect(_socket_name(row))
        elif peer < rank:
            _, pid, _, _ = row
            awaited[pid] = peer

    deadline = time.monotonic() + limit
    while awaited:
        try:
            end, _ = listener.accept()
        except TimeoutError:
            raise_if_lost()
            if time.monotonic() > deadline:
                raise
            continue
        credentials = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        pid, _, _ = struct.unpack("3i", credentials)
        if pid in awaited:  # any process may connect
            ends[awaited.pop(pid)] = end
    return {peer: ends[peer] for peer in rows if peer != rank}


def _socket_name(row: list[int]) -> str:
    """Return the name of a process's socket, in Linux's namespace without files."""
    _, pid, token, _ = row
    return f"\0fshard-{pid}-{token}"


def all_gather(numbers: list[int]) -> list[list[int]]:
    """All-gather a row of numbers among all processes of the world."""
    row = torch.tensor(numbers, dtype=torch.int64)
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, row)
    return [row.tolist() for row in rows]


def _can_read(libc: Any, row: list[int]) -> bool:
    """Return True if this process can read the token of another, whose row of the table this is."""
    _, pid, token, address = row
    value = array("q", [0])
    target = array("q", [value.buffer_info()[0], 8])
    source = array("q", [address, 8])
    count = libc.process_vm_readv(pid, target.buffer_info()[0], 1, source.buffer_info()[0], 1, 0)
    return count == 8 and value[0] == token


def _libc() -> Any:
    """Return the C library if it can read other processes' memory and is to do so."""
    if sys.platform != "linux" or os.environ.get("FSHARD_DIRECT", "1") == "0":
        return None
    libc: Any = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "process_vm_readv") or not rings.are_supported(libc):
        return None

    address, word = ctypes.c_void_p, ctypes.c_ulong
    libc.process_vm_readv.restype = ctypes.c_ssize_t
    libc.process_vm_readv.argtypes = [ctypes.c_int, address, word, address, word, word]
    # Where Yama permits only parents to read a process's memory, permit siblings to read this
    # one's.
    with suppress(OSError):
        if Path("/proc/sys/kernel/yama/ptrace_scope").read_text().strip() == "1":
            set_ptracer = 0x59616D61
            any_process = ctypes.c_ulong(-1)
            libc.prctl(set_ptracer, any_process, 0, 0, 0)
    return libc


def file_system_id() -> int:
    """Return a number that is equal for processes of a machine that see the same files, 0 for none.

    These are files in memory, which any process of the user may write.
    """
    try:
        space = os.readlink("/proc/self/ns/mnt")
    except OSError:
        return 0
    can_write = os.access("/dev/shm", os.W_OK | os.X_OK)
    return 1 + zlib.crc32(space.encode()) if can_write else 0


def machine_id() -> int:
    """Return a number that is equal for the processes that can meet, 0 where that is unknown.

    They are on one machine, in one container, of one user.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        spaces = [os.readlink(f"/proc/self/ns/{space}") for space in ("pid", "net", "user")]
    except OSError:
        return 0
    return 1 + zlib.crc32(repr((boot, spaces, os.getuid())).encode())
