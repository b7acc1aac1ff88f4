"""Messages in queues without tags, as those of NCCL: the order in which devices start them must not
be a deadlock.

A device's calls are recorded on a virtual mesh and replayed: `send` and `recv` join a queue, and
run when both ends are first in theirs; only `wait` stops a device.
"""

from collections import defaultdict, deque

import pytest
import torch

import fshard as fs
from fshard.mesh.runtimes.virtual import Parcel, VirtualWorld
from fshard.pipeline.execution.pipelined import pipelined
from fshard.pipeline.schedule.builders import BUILDERS, pipeline_schedule
from tests.helpers.processes import run_processes
from tests.mesh.runtimes import nccl_rules

TWO_EACH = {"interleaved", "bfs", "zbv", "v-half", "v-min", "dualpipe-v"}


def calls_of(patch, run, devices):
    """Return the messages of each device in a run, as ("send" or "recv", peer) and ("wait", number
    of the recv).
    """
    rows, numbers = [[] for _ in range(devices)], {}
    send, receive, wait = VirtualWorld.send, VirtualWorld.receive, Parcel.wait

    def spy_send(self, xs, group, to, *call):
        rows[group.index].append(("send", to))
        return send(self, xs, group, to, *call)

    def spy_receive(self, likes, group, source, *call):
        parcel = receive(self, likes, group, source, *call)
        numbers[id(parcel)] = parcel, rows[group.index], len(rows[group.index])
        rows[group.index].append(("recv", source))
        return parcel

    def spy_wait(self):
        _, row, number = numbers[id(self)]
        row.append(("wait", number))
        return wait(self)

    with patch.context() as spies:
        spies.setattr(VirtualWorld, "send", spy_send)
        spies.setattr(VirtualWorld, "receive", spy_receive)
        spies.setattr(Parcel, "wait", spy_wait)
        run()
    return rows


class Replay:
    """The calls of all devices, in queues: `queue_of(sender, receiver)` names that of a message, at
    both ends.
    """

    def __init__(self, rows, queue_of):
        self.rows = rows
        self.queue_of = queue_of
        self.at = [0] * len(rows)
        self.queues = defaultdict(deque)
        self.done = set()

    def queue(self, device, number):
        kind, peer = self.rows[device][number]
        return self.queues[
            device, self.queue_of(*((device, peer) if kind == "send" else (peer, device)))
        ]

    def partner(self, device, number):
        """Return the first call of the peer for this message's direction that is not done, or None."""
        kind, peer = self.rows[device][number]
        match = ("recv" if kind == "send" else "send", device)
        return next(
            (
                i
                for i in range(self.at[peer])
                if self.rows[peer][i] == match and (peer, i) not in self.done
            ),
            None,
        )

    def step(self, device):
        """Let a device call what it can; return True if it did anything."""
        before = self.at[device]
        for number, (kind, what) in [*enumerate(self.rows[device])][before:]:
            if kind == "wait" and (device, what) not in self.done:
                break
            self.at[device] += 1
            if kind != "wait":
                self.queue(device, number).append(number)
        return self.at[device] > before

    def match(self):
        """Run what is first in the queues of both ends."""
        ran = False
        for (device, _), queue in [*self.queues.items()]:
            peer = self.rows[device][queue[0]][1] if queue else None
            partner = self.partner(device, queue[0]) if queue else None
            if partner is not None and self.queue(peer, partner)[0] == partner:
                self.done |= {
                    (device, queue.popleft()),
                    (peer, self.queue(peer, partner).popleft()),
                }
                ran = True
        return ran

    def cycle(self):
        """Run all; return the cycle of a deadlock, a line for each call, or "" if everything ends."""
        while sum([self.step(device) for device in range(len(self.rows))]) + self.match():
            pass
        left = [device for device, row in enumerate(self.rows) if self.at[device] < len(row)]
        if not left:
            assert not any(self.queues.values())
            return ""
        path, call = {}, (left[0], self.rows[left[0]][self.at[left[0]]][1])
        while call not in path:
            path[call], call = self.reason(*call)
        lines = [*path.values()]
        return "\n".join(lines[[*path].index(call) :])

    def reason(self, device, number):
        """Return why a call does not run, in words, and the call that it waits for."""
        kind, peer = self.rows[device][number]
        text = f"device {device}: {kind} {'to' if kind == 'send' else 'from'} {peer}"
        first = self.queue(device, number)[0]
        partner = self.partner(device, number)
        if first != number:
            return f"{text} is behind", (device, first)
        if partner is not None:
            return f"{text} needs", (peer, partner)
        return f"{text} needs one that device {peer} calls after", (
            peer,
            self.rows[peer][self.at[peer]][1],
        )


def one_queue_a_pair(sender, receiver):
    return min(sender, receiver), max(sender, receiver)


def one_queue_a_route(sender, receiver):
    return sender, receiver


def one_queue_a_direction(sender, receiver):
    """Return the queue of a rank's group for messages to higher ranks, or to lower ones."""
    return "up" if receiver > sender else "down"


def scaled(w, x, **skips):
    return w * x + sum(skips.values())


def step_of(name, devices, microbatches, mesh=None, skips=(), **options):
    """Return a step by a schedule, without arguments."""
    stages = devices * (1 + (name in TWO_EACH))
    schedule = pipeline_schedule(name, stages=stages, microbatches=microbatches)
    functions = [
        (lambda w, x, s=s: (w * x, {f"{s}": x})) if (s, s + 2) in skips else scaled
        for s in range(stages)
    ]
    options["skips"] = {f"{s}": (s, t) for s, t in skips}
    mesh = mesh or fs.make_mesh({"pipe": devices})
    step = pipelined(functions, schedule, lambda y, x: y.mean(), mesh=mesh, axis="pipe", **options)
    params = [torch.tensor(1 + 0.1 * stage) for stage in range(stages)]
    return lambda: step(params, [torch.ones(1 + m % 2) for m in range(microbatches)])


def steps_of(name, devices, microbatches, patch, *, steps=3, first=0, **options):
    """Return the messages of a schedule in some steps, from a first one."""
    step = step_of(name, devices, microbatches, **options)
    for _ in range(first):
        step()
    return calls_of(patch, lambda: [step() for _ in range(first, steps)], devices)


@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("name", BUILDERS)
def test_messages_of_schedules_with_a_queue_each_route_cannot_deadlock(monkeypatch, name, devices):
    rows = steps_of(name, devices, 2 * devices + 1, monkeypatch)
    assert Replay(rows, one_queue_a_route).cycle() == ""
    assert Replay(rows, one_queue_a_pair).cycle() != ""


@pytest.mark.parametrize("dynamic", [False, True])
def test_skips_and_loops_with_a_queue_each_route_cannot_deadlock(monkeypatch, dynamic):
    for name in ("1f1b", "interleaved", "v-half"):
        rows = steps_of(name, 4, 4, monkeypatch, skips=[(0, 2), (1, 3)], dynamic=dynamic)
        assert Replay(rows, one_queue_a_route).cycle() == "", name


@pytest.mark.parametrize(
    ("name", "devices", "queue_of"),
    [("1f1b", 2, one_queue_a_pair), ("interleaved", 3, one_queue_a_direction)],
)
def test_fewer_queues_deadlock_in_the_second_step(monkeypatch, name, devices, queue_of):
    """One queue for all messages in a direction is what NCCL has in a group that is bound to a
    device.
    """
    rows = steps_of(name, devices, 2, monkeypatch, steps=2, first=1)
    cycle = Replay(rows, queue_of).cycle()
    assert all(f"device {device}: " in cycle for device in range(devices)) and "behind" in cycle


def around_a_ring(n):
    """Send in both directions of a ring before receiving."""
    me = fs.axis_index("pipe")
    for step in (1, -1):
        fs.send(torch.full((2 + step,), float(me)), "pipe", to=(me + step) % n)
    return [
        fs.recv(torch.empty(2 + step), "pipe", source=(me - step) % n)[0].item() for step in (1, -1)
    ]


def many_messages():
    """Send around rings of 4 and of 2, and run schedules with skips, or on rows of a mesh; return
    the values.
    """
    results = []
    for axes, skips in (({"pipe": 4}, [(0, 2), (1, 3)]), ({"pipe": 2, "data": 2}, [])):
        mesh = fs.make_mesh(axes, device="cpu")
        n = axes["pipe"]
        results.append(fs.run(lambda n=n: around_a_ring(n), mesh=mesh))
        for name, dynamic in (("1f1b", True), ("interleaved", False), ("v-half", False)):
            step = step_of(name, n, 4, mesh, skips, dynamic=dynamic)
            results.append(
                fs.run(lambda step=step: [step().loss.item() for _ in range(3)], mesh=mesh)
            )
    return results


def under_rules_of_nccl():
    return (
        [values for (values,) in many_messages()],
        nccl_rules.counts["host syncs"],
        nccl_rules.violations,
    )


def test_messages_obey_the_rules_of_nccl():
    environment = {"FSHARD_BACKEND": "nccl_rules", "NCCL_RULES_DELAY": "0.0001"}
    results = run_processes(under_rules_of_nccl, 4, environment=environment)
    for values, (of_process, *counts) in zip(
        zip(*many_messages(), strict=True), results, strict=True
    ):
        assert [*values] == of_process and counts == [0, []]
