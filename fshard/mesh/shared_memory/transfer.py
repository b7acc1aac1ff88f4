"""One collective or message between the processes of a machine: its key, and the steps that it is made of."""

from __future__ import annotations

import ctypes
from collections.abc import Generator, Mapping, Sequence

from fshard.mesh.runtimes.link import CALL, CallInfo
from fshard.mesh.shared_memory.neighbours import INLINE, Need, Neighbour, Neighbours, mismatch
from fshard.mesh.shared_memory.rings import INSIDE, READ, Message

MESSAGE, ANSWER = 4, 3
"""Last bits of a key: a bit that distinguishes messages from collectives, and the value that confirms a read."""


class PeerTransfer:
    """The tensors that the process at `index` of `n` offers to its peers and gets from them.

    The key of a ring's message is the group, the number of the call, its kind (collective or message) and its part.
    """

    __slots__ = ("call", "index", "key", "n", "neighbours", "others", "peers")

    def __init__(
        self,
        neighbours: Neighbours,
        peers: Mapping[int, Neighbour],
        index: int,
        others: Sequence[int],
        key: int,
        call: CallInfo,
    ) -> None:
        self.neighbours, self.peers, self.index, self.others = neighbours, peers, index, others
        self.n, self.key, self.call = len(others) + 1, key, call

    def offer(self, to: int, address: int, size: int, part: int = 0) -> None:
        """Offer a tensor to a process: small ones are sent inline, large ones must stay until they have been read."""
        key, peer, stamp = self.key | part, self.peers[to], self.call.stamp
        message = (key, INSIDE, size, stamp, address) if size <= INLINE else (key, address, size, stamp)
        if not peer.offer(*message):
            self.neighbours.press(peer, message)

    def offer_address(self, to: int, address: int, size: int, part: int = 0) -> None:
        """Offer memory of any size for reading."""
        message = self.key | part, address, size, self.call.stamp
        if not self.peers[to].offer(*message):
            self.neighbours.press(self.peers[to], message)

    def needs(self, *sources: int, part: int = 0) -> list[Need]:
        """Return the conditions to wait for before getting the tensors of these processes."""
        return [(self.peers[source], self.key | part) for source in sources]

    def get(self, source: int, into: int, size: int, part: int = 0) -> None:
        """Get a tensor of a process, which has been offered."""
        address, _, _, place = self._taken(source, size, part)
        if address == INSIDE:
            ctypes.memmove(into, place, size)
        else:
            self.peers[source].read(into, address, size)
            self.confirm(source)

    def address(self, source: int, size: int, part: int = 0) -> int:
        """Return the address that a process has offered for reading."""
        return self._taken(source, size, part)[0]

    def confirm(self, source: int) -> None:
        """Send the confirmation that the tensor of a process has been read."""
        message = self.key | ANSWER, READ, 0, self.call.stamp
        if not self.peers[source].offer(*message):
            self.neighbours.press(self.peers[source], message)

    def settled(self, readers: Sequence[int]) -> Generator[list[Need], None, None]:
        """Wait until these processes have read what was offered to them and is not inline."""
        answers = [(self.peers[reader], self.key | ANSWER) for reader in readers]
        if answers:
            yield answers
        for peer, key in answers:
            del peer.inbox[key]

    def _taken(self, source: int, size: int, part: int) -> Message:
        message = self.peers[source].inbox.pop(self.key | part)
        if (message[2] ^ self.call.stamp) & CALL or message[1] != size:
            raise mismatch(self.call, self.peers[source], message[2])
        return message
