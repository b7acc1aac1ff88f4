"""The links of messages over NCCL, which ignores tags: two ranks have one queue for all that they send and receive.

A device starts to receive ahead of its computation. In one queue that would block its next send, which the other end
may need first:

    rank 0   recv B0 (ahead), send F0           F0 is behind B0
    rank 1   recv F0, send B0                   B0 needs F0

So messages to higher ranks have one group, those to lower ranks another. A queue then has the messages of one rank to
one other, and both start them in the same order. The groups are not bound to a device, as those of collectives are:
all ranks of a bound group share one queue.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch.distributed import ProcessGroup

from fshard.mesh.runtimes.link import NcclLink


def direction(sender: int, receiver: int) -> str:
    """Return the direction of messages between two ranks."""
    return "up" if receiver > sender else "down"


class MessageLinks:
    """The links of one rank's messages, by direction; indices in them are ranks of the world."""

    def __init__(self, rank: int, device_type: str, make_group: Callable[[str], ProcessGroup]) -> None:
        self._rank, self._device_type = rank, device_type
        groups = {name: make_group(f"messages {name}") for name in ("up", "down")}
        self._links = {name: NcclLink(pg, rank, pg.size(), {}) for name, pg in groups.items()}
        self._connected: set[tuple[int, int]] = set()

    def link(self, sender: int, receiver: int) -> NcclLink:
        """Return the link of the messages from one rank to another."""
        return self._links[direction(sender, receiver)]

    def connect(self, members: Sequence[int], pairs: Iterable[tuple[int, int]]) -> None:
        """Send a byte between members, from index to index, unless one has been sent. Both ends of a pair call it.

        NCCL connects two ranks in their first call, which blocks the host until the other end makes its own: if all
        members of a ring send before they receive, none would. All ranks take pairs in one order, disjoint ones first.
        """
        for pair in sorted(pairs, key=lambda pair: (min(pair) % 2, *sorted(pair), pair)):
            sender, receiver = route = members[pair[0]], members[pair[1]]
            if self._rank in route and sender != receiver and route not in self._connected:
                self._connected.add(route)
                byte, pg = torch.zeros(1, dtype=torch.uint8, device=self._device_type), self.link(*route).pg
                work = pg.send([byte], receiver, 0) if self._rank == sender else pg.recv([byte], sender, 0)
                work.wait()
