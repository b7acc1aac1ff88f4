"""An oracle for schedules: run one on numbers, with messages that carry no names, and see whether
the result is right.

Stage s is x -> a[s] * x + s in numbers modulo a prime, the loss's gradient is y - t[m].  Nothing is
clever here: devices take turns, everything that is made must be used up, and a send and a receive
happen together.
"""

from __future__ import annotations

from collections import defaultdict

from fshard.pipeline.schedule.actions import Kind
from fshard.pipeline.schedule.schedule import Schedule

PRIME = 2**31 - 1
SENDS = {Kind.SEND_F: 1, Kind.SEND_B: -1}
RECEIVES = {Kind.RECV_F: -1, Kind.RECV_B: 1}
BACKWARD = {Kind.B, Kind.I, Kind.W}


class Harm(Exception):
    """The run went wrong: it stopped, used what was not there, left something over, or has a wrong
    result.
    """


def weight(stage):
    return pow(7, stage + 2, PRIME)


def sample(microbatch):
    return pow(11, microbatch + 3, PRIME), pow(13, microbatch + 5, PRIME)


def serial(schedule):
    """Return the gradients of all stages and the last outputs, without any schedule."""
    gradients = [0] * schedule.stages
    outputs = []
    for microbatch in range(schedule.microbatches):
        x, target = sample(microbatch)
        inputs = []
        for stage in range(schedule.stages):
            inputs.append(x)
            x = (weight(stage) * x + stage) % PRIME
        outputs.append(x)
        gradient = x - target
        for stage in reversed(range(schedule.stages)):
            gradients[stage] = (gradients[stage] + inputs[stage] * gradient) % PRIME
            gradient = gradient * weight(stage) % PRIME
    return gradients, outputs


def take(box, key, what):
    if key not in box:
        raise Harm(f"no {what} for {key}")
    return box.pop(key)


def put(box, key, value, what):
    if key in box:
        raise Harm(f"{what} for {key} twice")
    box[key] = value


class Machine:
    def __init__(self, schedule: Schedule):
        self.schedule = schedule
        self.at = [0] * schedule.devices
        kinds = {action.kind for row in schedule.rows for action in row}
        self.carried = bool(kinds & {*SENDS, *RECEIVES})
        self.backward = bool(kinds & BACKWARD)
        self.gathers = bool(kinds & {Kind.UNSHARD, Kind.RESHARD})
        self.reduces = Kind.REDUCE in kinds
        self.inputs, self.saved, self.owed, self.unsent = {}, {}, {}, {}
        self.outputs = {}
        self.gathered = set()
        self.gradients = defaultdict(int)
        self.reduced = {}

    def run(self):
        while any(self.step(device) for device in range(self.schedule.devices)):
            pass
        for what in ("inputs", "saved", "owed", "unsent", "gathered"):
            if left := getattr(self, what):
                raise Harm(f"{what} left: {left}")
        if [*self.at] != [*map(len, self.schedule.rows)]:
            raise Harm("deadlock")
        gradients, outputs = serial(self.schedule)
        if self.outputs != dict(enumerate(outputs)):
            raise Harm("wrong outputs")
        actual = self.reduced if self.reduces else self.gradients
        if self.backward and dict(actual) != dict(enumerate(gradients)):
            raise Harm("wrong gradients")

    def current(self, device):
        row = self.schedule.rows[device]
        return row[self.at[device]] if self.at[device] < len(row) else None

    def home(self, stage):
        return self.schedule.placement[stage] if 0 <= stage < self.schedule.stages else None

    def step(self, device):
        """Do the next action of a device; say whether it could be done."""
        action = self.current(device)
        if action is None:
            return False
        kind, stage, microbatch = action
        if self.home(stage) != device:
            raise Harm(f"{action} on device {device}")
        if kind in SENDS:
            return self.meet(device, self.home(stage + SENDS[kind]))
        if kind in RECEIVES:
            return self.meet(self.home(stage + RECEIVES[kind]), device)
        if not self.can_start(action):
            return False
        getattr(self, f"do_{kind.name}")(stage, microbatch)
        self.at[device] += 1
        return True

    def meet(self, source, target):
        if source is None or target is None or source == target:
            raise Harm("a message to or from nobody")
        sent = self.current(source)
        received = self.current(target)
        if (
            sent is None
            or sent.kind not in SENDS
            or self.home(sent.stage + SENDS[sent.kind]) != target
        ):
            return False
        if (
            received is None
            or received.kind not in RECEIVES
            or self.home(received.stage + RECEIVES[received.kind]) != source
        ):
            return False
        value = take(
            self.unsent, (sent.kind in {Kind.SEND_F}, sent.stage, sent.microbatch), "value to send"
        )
        put(
            self.inputs,
            (received.kind is Kind.RECV_F, received.stage, received.microbatch),
            value,
            "input",
        )
        self.at[source] += 1
        self.at[target] += 1
        return True

    def can_start(self, action):
        """Say whether the input is there, where that is not the business of a receive."""
        kind, stage, microbatch = action
        forward = kind is Kind.F
        if kind not in {Kind.F, Kind.B, Kind.I} or (forward and stage == 0):
            return True
        here = self.home(stage)
        there = self.home(stage - 1 if forward else stage + 1)
        return (self.carried and here != there) or (forward, stage, microbatch) in self.inputs

    def hand_on(self, forward, stage, microbatch, value):
        to = stage + 1 if forward else stage - 1
        if self.carried and self.home(to) != self.home(stage):
            put(self.unsent, (forward, stage, microbatch), value, "value to send")
        else:
            put(self.inputs, (forward, to, microbatch), value, "input")

    def use(self, stage):
        if self.gathers and stage not in self.gathered:
            raise Harm(f"stage {stage} not gathered")
        return weight(stage)

    def do_F(self, stage, microbatch):
        if not 0 <= microbatch < self.schedule.microbatches:
            raise Harm("no such microbatch")
        x = (
            sample(microbatch)[0]
            if stage == 0
            else take(self.inputs, (True, stage, microbatch), "input")
        )
        y = (self.use(stage) * x + stage) % PRIME
        if self.backward:
            put(self.saved, (stage, microbatch), x, "activation")
        if stage < self.schedule.stages - 1:
            self.hand_on(True, stage, microbatch, y)
            return
        put(self.outputs, microbatch, y, "output")
        if self.backward:
            put(self.inputs, (False, stage, microbatch), y - sample(microbatch)[1], "gradient")

    def do_I(self, stage, microbatch):
        gradient = take(self.inputs, (False, stage, microbatch), "gradient")
        x = take(self.saved, (stage, microbatch), "activation")
        handed = gradient * self.use(stage) % PRIME
        if stage > 0:
            self.hand_on(False, stage, microbatch, handed)
        put(self.owed, (stage, microbatch), x * gradient, "weight gradient")

    def do_W(self, stage, microbatch):
        self.use(stage)
        product = take(self.owed, (stage, microbatch), "weight gradient")
        self.gradients[stage] = (self.gradients[stage] + product) % PRIME

    def do_B(self, stage, microbatch):
        self.do_I(stage, microbatch)
        self.do_W(stage, microbatch)

    def do_UNSHARD(self, stage, _):
        if stage in self.gathered:
            raise Harm("gathered twice")
        self.gathered.add(stage)

    def do_RESHARD(self, stage, _):
        if stage not in self.gathered:
            raise Harm("not gathered")
        self.gathered.remove(stage)

    def do_REDUCE(self, stage, _):
        if stage not in self.gradients:
            raise Harm("nothing to reduce")
        put(self.reduced, stage, self.gradients[stage], "reduced gradient")


def harm(schedule: Schedule) -> str:
    """Say what goes wrong, or nothing."""
    try:
        Machine(schedule).run()
    except Harm as error:
        return str(error)
    return ""
