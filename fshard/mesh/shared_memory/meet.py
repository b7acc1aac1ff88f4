"""Find the other processes of this machine that can read each other's memory."""

from __future__ import annotations

import ctypes
import os
import secrets
import socket
import struct
import sys
import zlib
from array import array
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fshard.mesh.shared_memory import rings
from fshard.mesh.shared_memory.peers import Peer, Peers


def meet(timeout: timedelta) -> Peers:
    """Find the other processes of this machine; a collective of the world.

    Returns none if one of them may not read the memory of another.
    """
    rank, libc = dist.get_rank(), _libc()
    token = torch.tensor(
        [secrets.randbits(62)]
    )  # a process that can read this can read this process's memory
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        table = _all_gather(
            [_machine_id() if libc is not None else 0, os.getpid(), int(token), token.data_ptr()]
        )
        names = [f"\0fshard-{pid}-{secret}" for _, pid, secret, _ in table]
        local_ranks = [peer for peer, row in enumerate(table) if row[0] == table[rank][0] != 0]
        if local_ranks:
            listener.bind(names[rank])
            listener.listen(len(local_ranks))
            listener.settimeout(timeout.total_seconds())
        can_read = len(local_ranks) > 1 and _can_read(
            libc, table[local_ranks[local_ranks.index(rank) - 1]]
        )
        verdicts = _all_gather([can_read])  # from now on, all listen
        if not local_ranks or not all(verdicts[peer][0] for peer in local_ranks):
            return Peers({}, timeout)
        ends: dict[int, socket.socket] = {}
        for peer in local_ranks:
            if peer > rank:
                ends[table[peer][1]] = end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                end.connect(names[peer])
        awaited = {table[peer][1] for peer in local_ranks if peer < rank}
        while awaited:
            end, _ = listener.accept()
            pid, _, _ = struct.unpack(
                "3i", end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            )
            if pid in awaited:  # any process may connect
                awaited.remove(pid)
                ends[pid] = end
    peers = {
        peer: Peer(peer, table[peer][1], ends[table[peer][1]], libc)
        for peer in local_ranks
        if peer != rank
    }
    return Peers(peers, timeout, libc)


def _all_gather(numbers: list[int]) -> list[list[int]]:
    """All-gather a row of numbers among all processes of the world."""
    row = torch.tensor(numbers, dtype=torch.int64)
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, row)
    return [row.tolist() for row in rows]


def _can_read(libc: Any, row: list[int]) -> bool:
    """Return True if this process can read the token of another, whose row of the table this is."""
    _, pid, token, address = row
    value = array("q", [0])
    target, source = array("q", [value.buffer_info()[0], 8]), array("q", [address, 8])
    count = libc.process_vm_readv(pid, target.buffer_info()[0], 1, source.buffer_info()[0], 1, 0)
    return count == 8 and value[0] == token


def _libc() -> Any:
    """Return the C library if it can read other processes' memory and is to do so."""
    if sys.platform != "linux" or os.environ.get("FSHARD_DIRECT", "1") == "0":
        return None
    libc: Any = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "process_vm_readv") or not rings.are_supported(libc):
        return None
    word = ctypes.c_ulong
    libc.process_vm_readv.restype = ctypes.c_ssize_t
    libc.process_vm_readv.argtypes = [
        ctypes.c_int,
        ctypes.c_void_p,
        word,
        ctypes.c_void_p,
        word,
        word,
    ]
    with suppress(
        OSError
    ):  # permit siblings to read this process's memory, where Yama permits only parents
        if Path("/proc/sys/kernel/yama/ptrace_scope").read_text().strip() == "1":
            set_ptracer, any_process = 0x59616D61, ctypes.c_ulong(-1)
            libc.prctl(set_ptracer, any_process, 0, 0, 0)
    return libc


def _machine_id() -> int:
    """Return a number that is equal for the processes that can meet: on one machine, in one container, of one user."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        spaces = [os.readlink(f"/proc/self/ns/{space}") for space in ("pid", "net", "user")]
    except OSError:
        return 0
    return 1 + zlib.crc32(repr((boot, spaces, os.getuid())).encode())
