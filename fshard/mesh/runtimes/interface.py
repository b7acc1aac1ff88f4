"""Choose how gloo connects processes: on which network interface, and when.

gloo takes the address that the host's name resolves to. On many machines that is a loopback address
(127.0.1.1 on Debian), which processes of other machines cannot reach. Then the interface is chosen
that reaches the meeting point.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
from contextlib import suppress
from ipaddress import ip_address

VARIABLE = "GLOO_SOCKET_IFNAME"
"""The environment variable that names the interface of gloo."""
LAZY = "TORCH_GLOO_LAZY_INIT"
"""The environment variable by which gloo connects two processes when they first communicate."""
MANY = 128
"""Processes beyond which two of them are connected only when they first communicate.

With all connected each has a socket for each other one, in each group: the usual limit is 1,024
open files. Up to this number all are connected at the start, which finds a wrong interface there.
"""
_SIOCGIFADDR = 0x8915
"""The request of ioctl for an interface's address. Its row has the name, then the socket address.

    bytes    0 .. 15    16, 17    18, 19    20 .. 23
             name       family    port      IPv4 address
"""


def choose_interface(address: str, port: int) -> None:
    """Set GLOO_SOCKET_IFNAME to the interface that reaches an address.

    Not if it is set, or if other machines can reach what the host's name resolves to.
    """
    if os.environ.get(VARIABLE) or not _is_loopback(_address_of(socket.gethostname())):
        return
    local_address = _address_towards(address, port)
    if local_address is None or _is_loopback(local_address):
        return  # all processes are on this machine
    name = interface_of(local_address)
    if name is not None:
        os.environ[VARIABLE] = name


def reachable_address() -> str:
    """Return the address at which gloo of other machines reaches this one."""
    name = os.environ.get(VARIABLE)
    if name:
        address = _address_of_interface(name)
        if address is not None:
            return address
    return _address_of(socket.gethostname()) or "127.0.0.1"


def gloo_connects_late() -> bool:
    """Return True if gloo connects two processes when they first communicate."""
    return os.environ.get(LAZY, "0") not in ("", "0")


def choose_connections(world: int) -> None:
    """Let gloo connect two processes when they first communicate, if there are many in the world.

    Groups inherit it from the environment. Sums of small tensors, such as those in which the
    processes agree on a step, then need few connections: see `gloo.reduce`.
    """
    if world > MANY:
        os.environ.setdefault(LAZY, "1")


def _address_of(host: str) -> str | None:
    with suppress(OSError):
        return socket.gethostbyname(host)
    return None


def _is_loopback(address: str | None) -> bool:
    """Return True for an address that only this machine can reach.

    True also for no address: then gloo takes a loopback one.
    """
    return address is None or ip_address(address).is_loopback


def _address_towards(address: str, port: int) -> str | None:
    """Return the local address of packets to another one.

    A UDP socket sends nothing to connect.
    """
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as end:
        end.connect((address, port))
        return end.getsockname()[0]
    return None


def interface_of(address: str) -> str | None:
    """Return the name of the interface with an IPv4 address, on Linux."""
    if sys.platform != "linux":
        return None
    for _, name in socket.if_nameindex():
        if _address_of_interface(name) == address:
            return name
    return None


def _address_of_interface(name: str) -> str | None:
    """Return the IPv4 address of an interface, on Linux; None if it has none."""
    if sys.platform != "linux":
        return None
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as end:
        row = struct.pack("256s", name.encode()[:15])
        with suppress(OSError):  # it has no address
            row = fcntl.ioctl(end.fileno(), _SIOCGIFADDR, row)
            return socket.inet_ntoa(row[20:24])
    return None
