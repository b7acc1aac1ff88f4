"""The messages of a device: in which memory their tensors and headers lie.

The meta device stands for a GPU.
"""

from collections import deque
from types import SimpleNamespace

import pytest
import torch

from fshard.pipeline.execution.mailbox import Mailbox
from fshard.pipeline.execution.route import Message, Wire
from fshard.pipeline.schedule.actions import Kind
from fshard.source import call_site


class Line:
    """A world of two devices whose messages are put into a queue; it records on what device each
    was expected.
    """

    def __init__(self):
        self.messages = deque()
        self.received = []

    def current(self):
        return self

    def send(self, xs, group, to, site, purpose, number):
        self.messages.append(xs)

    def receive(self, likes, group, source, site):
        self.received.append([x.device.type for x in likes])
        return SimpleNamespace(wait=self.messages.popleft)


def boxes_of(line, messages, device):
    return [
        Mailbox(
            SimpleNamespace(index=index, world=line),
            call_site(),
            torch.device(device),
            {1 - index: messages * index},
            ["key", "key"],
            {},
        )
        for index in range(2)
    ]


def two_messages():
    return [Message(Kind.F, Wire(0, 1), microbatch) for microbatch in range(2)]


@pytest.mark.parametrize("values", [(1, True), (1, 1.0), (0.0, -0.0), (True, 1)], ids=str)
def test_value_of_another_microbatch_that_compares_equal_raises(values):
    line = Line()
    messages = two_messages()
    sender, _ = boxes_of(line, messages, "cpu")
    sender.send(messages[0], 1, ([torch.ones(3), values[0]], "description"))
    with pytest.raises(ValueError, match="dynamic=True"):
        sender.send(messages[1], 1, ([torch.ones(3), values[1]], "description"))


def test_headers_and_host_tensors_stay_in_host_memory():
    line = Line()
    messages = two_messages()
    boxes = boxes_of(line, messages, "meta")
    content = [torch.ones(3), torch.empty(2, device="meta"), torch.zeros(1), "word"], "description"
    for message in messages:
        boxes[0].send(message, 1, content)
        (x, y, z, word), _ = boxes[1].receive(message, 0)
        assert (x.tolist(), y.shape, y.is_meta, z.tolist(), word) == (
            [1.0] * 3,
            (2,),
            True,
            [0.0],
            "word",
        )
    header, buffers = [["cpu"], ["cpu"]], [["cpu", "cpu"], ["meta"]]
    assert line.received == header + 2 * buffers
