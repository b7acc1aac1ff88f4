"""The named schedules, a few lines each, and `pipeline_schedule`, which makes one by name.

Most are a path and a number of activations: see `paths`. In the drawings F, B, I and W are of a
device's first stage, f, b, i and w of its second; each takes a tick, B two, and a dot is an idle
tick.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from itertools import pairwise
from typing import NamedTuple

from fshard.pipeline.schedule.actions import Action, Kind
from fshard.pipeline.schedule.paths import Placement, schedule_along_path, schedule_by_time
from fshard.pipeline.schedule.schedule import Schedule
from fshard.pipeline.schedule.weights import (
    advance_forwards,
    advance_gradient,
    swap_gradients,
    with_weights,
)


def pipeline_schedule(
    name: str, *, stages: int, microbatches: int, devices: int | None = None
) -> Schedule:
    """Return a schedule by its name.

    On p devices, where F, I and W of a device's stages take 1 each, and the activations of a
    microbatch on them are 1:

        name          stages            bubble                   peak activations
        gpipe         p                 3 (p - 1)                all microbatches
        1f1b          p                 3 (p - 1)                p
        interleaved   v p, in loops     3 (p - 1) / v            p + (p - 1) / v ***
        bfs           v p, in loops     3 (p - 1) / v            all microbatches
        zb-h1         p                 p - 1                    p
        zb-h2         p                 p - 1 *                  2 p - 1
        zbv           2 p, in a V       (p - 1) / 2 *            p
        v-half        2 p, in a V       3 (p - h) - (1/2) **     h = (p + 2) // 2
        v-min         2 p, in a V       3 (p - h) - (1/2) **     h = (p + 4) // 3
        dualpipe-v    2 p, in a V       (p - 1) / 2              p + (1/2)

    For 2 p microbatches and more; fewer may have a larger bubble. * No device is idle between its
    first and last action. ** For p >= 3; no schedule in a V with this peak has a smaller bubble.
    *** If p divides the microbatches.

    Args:
        name: one of these.
        stages: number of stages, at least 1.
        microbatches: number of microbatches, at least 1.
        devices: number of devices. In loops, any number up to that of the stages, which are
            assigned round-robin; default: half as many as stages, rounded up. All others have only one number
            that fits.

    >>> print(pipeline_schedule("1f1b", stages=2, microbatches=3).to_text())
    1f1b: 3 microbatches, stages on devices 0 1
    0F0 0F1 0B0 0F2 0B1 0B2
    1F0 1B0 1F1 1B1 1F2 1B2
    >>> pipeline_schedule("interleaved", stages=8, microbatches=4).placement
    (0, 1, 2, 3, 0, 1, 2, 3)
    >>> pipeline_schedule("zbv", stages=8, microbatches=4).placement
    (0, 1, 2, 3, 3, 2, 1, 0)
    """
    if name not in BUILDERS:
        close_names = get_close_matches(str(name).lower(), BUILDERS, n=1)
        hint = f'; did you mean "{close_names[0]}"?' if close_names else "."
        raise ValueError(
            f'There is no schedule "{name}"{hint} name must be one of {", ".join(BUILDERS)}.'
        )
    numbers = {"stages": stages, "microbatches": microbatches}
    if devices is not None:
        numbers["devices"] = devices
    for argument, number in numbers.items():
        if not isinstance(number, int) or isinstance(number, bool):
            raise TypeError(f"{argument} must be an integer; got {number!r}.")
        if number < 1:
            raise ValueError(f"{argument} must be at least 1; got {number}.")

    choose_placement, build = BUILDERS[name]
    placement = choose_placement(name, stages, devices)
    return build(name, placement, microbatches)


def gpipe(name: str, placement: Placement, microbatches: int) -> Schedule:
    """Do all forwards, then all backwards: the simplest, and each device holds all microbatches.

    device 0   F0 F1 F2 F3 .  .  .  .  .  .  B0 -- B1 -- B2 -- B3 --
    device 1   .  F0 F1 F2 F3 .  .  .  B0 -- B1 -- B2 -- B3 --
    device 2   .  .  F0 F1 F2 F3 B0 -- B1 -- B2 -- B3 --
    """
    return breadth_first(name, placement, microbatches)  # of one stage per device


def breadth_first(name: str, placement: Placement, microbatches: int) -> Schedule:
    """Take all microbatches through a device's first stage, then all through its second, and back.

    This is GPipe in loops. Each stage is unsharded once for the forwards and once for the backwards
    (Lamy-Poirier, "Breadth-First Pipeline Parallelism").

    device 0   F0 F1 F2 f0 f1 f2 .  .  .  .  .  .  b0 -- b1 -- b2 -- B0 -- B1 -- B2 --
    device 1   .  F0 F1 F2 f0 f1 f2 .  .  .  b0 -- b1 -- b2 -- B0 -- B1 -- B2 --
    device 2   .  .  F0 F1 F2 f0 f1 f2 b0 -- b1 -- b2 -- B0 -- B1 -- B2 --
    """

    def forward(stage: int, m: int) -> tuple[int, int, int]:
        return (0, stage, m)

    def backward(stage: int, m: int) -> tuple[int, int, int]:
        return (1, -stage, m)

    return schedule_by_time(name, placement, microbatches, forward, backward, Kind.B)


def one_forward_one_backward(name: str, placement: Placement, microbatches: int) -> Schedule:
    """Do a backward as soon as there is one: stage s holds at most stages - s microbatches.

    It is no faster than GPipe.

    device 0   F0 F1 F2 .  .  .  .  B0 -- F3 B1 -- F4 B2 -- .  B3 -- .  B4 --
    device 1   .  F0 F1 .  .  B0 -- F2 B1 -- F3 B2 -- F4 B3 -- .  B4 --
    device 2   .  .  F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 -- F4 B4 --
    """
    return schedule_along_path(name, placement, microbatches, legs=(1, 2), backward=Kind.B)


def interleaved(name: str, placement: Placement, microbatches: int) -> Schedule:
    """Interleaved 1F1B: with v stages per device, the bubble is v times smaller.

    Microbatches run in groups, of as many as there are devices or a few more (or of all, if there
    are fewer). A group runs through
    a device's first stage, then through its second, which it reaches after a loop over all devices
    (Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters"). Legs are of
    2 and 4 ticks: that has a higher peak than 1 and 2, and tolerates slower messages.

    device 0   F0 F1 F2 f0 f1 f2 .  .  .  .  b0 -- .  b1 -- .  b2 -- B0 -- B1 -- B2 --
    device 1   .  F0 F1 F2 f0 f1 f2 .  b0 -- .  b1 -- .  b2 -- B0 -- B1 -- B2 --
    device 2   .  .  F0 F1 F2 f0 b0 -- f1 b1 -- f2 b2 -- B0 -- B1 -- B2 --
    """
    devices = max(placement) + 1
    loops = -(-len(placement) // devices)
    groups = _group_microbatches(microbatches, devices)

    def position(loop: int, m: int) -> int:
        """Return how many forwards precede one on its device: `loop` is the number of its stage.

        With microbatches 0 1 2 in one group, 3 4 in the next, and two stages:
        F0 F1 F2 f0 f1 f2 F3 F4 f3 f4, so that f4, of loop 1, has position 9 = 2 * 3 + 1 * 2 + 1.
        """
        group = groups[m]
        of_earlier_groups = loops * group.start
        of_earlier_loops = loop * len(group)
        return of_earlier_groups + of_earlier_loops + m - group.start

    # A forward and a backward take three ticks together, so each position has three.
    def forward(stage: int, m: int) -> int:
        loop, device = divmod(stage, devices)
        return 2 * device + 3 * position(loop, m)

    first_backward = forward(loops * devices - 1, 0) + 1

    def backward(stage: int, m: int) -> int:
        loop, device = divmod(stage, devices)
        devices_after = devices - 1 - device
        return first_backward + 4 * devices_after + 3 * position(loops - 1 - loop, m)

    return schedule_by_time(name, placement, microbatches, forward, backward, Kind.B)


def _group_microbatches(microbatches: int, devices: int) -> list[range]:
    """Return the group of each microbatch, of at least as many as devices, if there are enough.

    Groups differ by at most one; the larger ones are first.

    >>> _group_microbatches(5, devices=2)
    [range(0, 3), range(0, 3), range(0, 3), range(3, 5), range(3, 5)]
    """
    count = max(1, microbatches // devices)
    begins = [-(-group * microbatches // count) for group in range(count + 1)]  # rounded up
    groups: list[range] = []
    for begin, end in pairwise(begins):
        group = range(begin, end)
        groups += [group] * len(group)
    return groups


def zero_bubble_h1(name: str, placement: Placement, microbatches: int) -> Schedule:
    """Defer the weight gradients of 1F1B: a third of the bubble, and no higher largest peak.

    Each device holds as many activations as the first one does, where in 1F1B later ones hold
    fewer.

    device 0   F0 F1 F2 F3 .  .  .  I0 W0 F4 I1 W1 I2 W2 I3 W3 I4 W4
    device 1   .  F0 F1 F2 .  .  I0 F3 I1 W0 F4 I2 W1 I3 W2 I4 W3 W4
    device 2   .  .  F0 F1 .  I0 F2 I1 F3 I2 W0 F4 I3 W1 I4 W2 W3 W4
    device 3   .  .  .  F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 W2 W3 W4
    """
    path = schedule_along_path(name, placement, microbatches, legs=(1, 2))
    return with_weights(path, limit=len(placement))


def zero_bubble_h2(name: str, placement: Placement, microbatches: int) -> Schedule:
    """Run as many forwards ahead as there is time for: no bubble once a device has begun.

    The peak is 2 p - 1 on p devices, where that of 1F1B is p.

    device 0   F0 F1 F2 F3 F4 I0 W0 F5 I1 I2 W1 W2 I3 I4 W3 W4 I5 W5
    device 1   .  F0 F1 F2 I0 F3 I1 F4 I2 W0 F5 I3 I4 W1 W2 I5 W3 W4 W5
    device 2   .  .  F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 F5 I5 W1 W2 W3 W4 W5
    """
    path = schedule_along_path(name, placement, microbatches, legs=(2, 4))
    return with_weights(path, limit=2 * len(placement) - 1)


def zero_bubble_v(name: str, placement: Placement, microbatches: int) -> Schedule:
    """Zero bubble in a V: no device is idle once it has begun.

    The peak is that of the first device of 1F1B. The last stage is on the same device as the first,
    so backwards begin where forwards do.

    device 0   F0 F1 F2 F3 F4 f0 i0 w0 f1 i1 w1 f2 i2 I0 w2 W0 f3 i3 I1 w3 W1 f4 i4 I2 w4 I3 W2 I4 W3 W4
    device 1   .  F0 F1 F2 f0 F3 f1 i0 w0 f2 i1 I0 w1 F4 W0 f3 i2 I1 w2 W1 f4 i3 I2 i4 I3 w3 I4 W2 w4 W3 W4
    device 2   .  .  F0 f0 F1 f1 F2 f2 i0 I0 w0 F3 W0 f3 i1 I1 w1 F4 W1 f4 i2 I2 i3 I3 i4 I4 w2 W2 w3 W3 w4 W4
    """
    devices = max(placement) + 1
    path = schedule_along_path(name, placement, microbatches, legs=(4, 2, 4, 2))
    return with_weights(path, limit=2 * devices, rules=(advance_forwards,))


def v_half(name: str, placement: Placement, microbatches: int) -> Schedule:
    """V-half: a path half as long as zbv's has half its peak, and half the bubble of 1F1B.

    device 0   F0 F1 F2 .  .  f0 i0 w0 .  .  f1 i1 I0 w1 F3 W0 f2 i2 I1 w2 W1 f3 i3 I2 w3 W2 .  I3 W3
    device 1   .  F0 F1 F2 f0 .  .  i0 w0 f1 I0 W0 i1 w1 f2 F3 I1 W1 i2 w2 f3 .  I2 i3 W2 w3 I3 W3
    device 2   .  .  F0 f0 F1 f1 .  .  i0 I0 w0 F2 W0 f2 i1 I1 w1 F3 W1 f3 i2 I2 w2 W2 i3 I3 w3 W3
    """
    devices = max(placement) + 1
    # Found by search: others have a larger bubble, or leave no time for messages.
    pauses = () if devices % 2 else (0, 2, 3)
    path = schedule_along_path(name, placement, microbatches, (2, 1, 2, 1), pauses)
    # (p + 2) // 2 microbatches, on both stages of a device.
    limit = 2 * ((devices + 2) // 2)
    return with_weights(path, limit, rules=(swap_gradients, advance_forwards))


def v_min(name: str, placement: Placement, microbatches: int) -> Schedule:
    """V-min: the shortest path in a V has a third of zbv's peak.

    Its bubble is about two thirds of that of 1F1B.

    device 0   F0 F1 F2 .  .  .  .  f0 i0 w0 .  .  f1 i1 w1 I0 F3 W0 .  f2 i2 I1 w2 W1 .  f3 i3 I2 w3 W2 .  .  .  I3 W3
    device 1   .  F0 F1 F2 .  .  f0 .  .  i0 w0 f1 .  .  I0 i1 W0 w1 f2 F3 I1 i2 W1 w2 f3 .  I2 i3 W2 w3 .  .  I3 W3
    device 2   .  .  F0 F1 .  f0 .  f1 .  .  i0 w0 F2 I0 W0 .  i1 f2 w1 I1 F3 W1 i2 f3 w2 I2 W2 .  i3 w3 .  I3 W3
    device 3   .  .  .  F0 f0 F1 f1 .  .  .  .  i0 I0 w0 F2 W0 f2 i1 I1 w1 W1 F3 f3 i2 I2 w2 W2 .  .  i3 I3 w3 W3
    """
    devices = max(placement) + 1
    # Found by search, as for v-half.
    pauses = (0, 1) if devices % 3 == 1 else (0, 3)
    path = schedule_along_path(name, placement, microbatches, (1, 1, 1, 1), pauses)
    limit = 2 * ((devices + 4) // 3)
    return with_weights(path, limit, rules=(advance_gradient, advance_forwards))


def dualpipe_v(name: str, placement: Placement, microbatches: int) -> Schedule:
    """Run forwards of one stage beside backwards of the other: one computes while the other sends.

    Eight steps, as DeepSeek published them; W is the oldest weight gradient that is left. Fewer
    microbatches than two for each device are the first ones of a longer schedule.

    device 0   F0 F1 F2 f0 i0 w0 f1 F3 b1 -- f2 B0 -- F4 b2 -- f3 B1 -- b3 -- f4 .  B2 -- b4 -- I3 W3 I4 W4
    device 1   .  F0 f0 F1 f1 F2 b0 -- f2 B0 -- F3 b1 -- f3 B1 -- F4 b2 -- f4 B2 -- b3 -- B3 -- i4 I4 w4 W4
    """
    devices = max(placement) + 1
    total = max(microbatches, 2 * devices)

    def exists(action: Action) -> bool:
        # An odd number of stages has no second one on device 0.
        m = action.microbatch or 0
        return action.stage < len(placement) and m < microbatches

    rows: list[list[Action]] = []
    for device in range(devices):
        after = devices - 1 - device
        drain = ["B1", "B0"] * (device + 1)
        words: list[str] = []
        words += ["F0"] * (2 * after)  # step 1
        words += ["F0", "F1"] * (device + 1)  # step 2
        words += ["I1", "W", "F1"] * after  # step 3
        words += ["F0", "B1", "F1", "B0"] * (total - 2 * devices + device + 1)  # step 4
        words += ["B1", "F1", "B0"] * after  # step 5
        words += drain[: device + 1]  # step 6, with full backwards
        words += [word.replace("B", "I") for word in drain[device + 1 :]]  # and with split ones
        words += ["W", "I0"] * after  # step 7
        words += ["W"] * (device + 1)  # step 8
        row = _actions_of_words(words, stages=(device, 2 * devices - 1 - device))
        rows.append([action for action in row if exists(action)])
    return Schedule(name, placement, microbatches, tuple(map(tuple, rows)))


def _actions_of_words(words: Iterable[str], stages: tuple[int, int]) -> list[Action]:
    """Return the actions of a device, each the next microbatch of its first or second stage.

    >>> [str(action) for action in _actions_of_words(["F0", "F1", "I1", "W"], stages=(0, 3))]
    ['0F0', '3F0', '3I0', '3W0']
    """
    row: list[Action] = []
    weights = deque[Action]()
    count = Counter[tuple[bool, int]]()  # of the forwards and backwards of each stage
    for word in words:
        if word == "W":
            row.append(weights.popleft())
            continue

        kind = Kind(word[0])
        stage = stages[int(word[1])]
        is_forward = kind is Kind.F
        action = Action(kind, stage, count[is_forward, stage])
        count[is_forward, stage] += 1
        row.append(action)
        if kind is Kind.I:
            weights.append(action._replace(kind=Kind.W))
    return row


# -- placements ------------------------------------------------------------------------------------


def _place_one_each(name: str, stages: int, devices: int | None) -> Placement:
    """Place one stage on each device."""
    if devices not in {None, stages}:
        raise ValueError(
            f"devices must be equal to stages={stages} for {name}, which has one stage on each "
            f'device; got {devices}. Schedules with several stages on a device are "interleaved" and "bfs".'
        )
    return tuple(range(stages))


def _place_in_loops(name: str, stages: int, devices: int | None) -> Placement:
    """Place the stages on the devices round-robin."""
    if devices is None:
        devices = (stages + 1) // 2
    if devices > stages:
        raise ValueError(f"devices must be at most stages={stages} for {name}; got {devices}.")
    return tuple([stage % devices for stage in range(stages)])


def _place_in_v(name: str, stages: int, devices: int | None) -> Placement:
    """Place two stages on each device in a V; of an odd number the first device has one."""
    half = (stages + 1) // 2
    if devices is not None and devices != half:
        raise ValueError(
            f"devices must be {half} for {name} with stages={stages}, two stages on each device; "
            f"got {devices}. For {devices} devices give stages={2 * devices - 1} or {2 * devices}."
        )
    forth = range(half)
    back = reversed(forth)
    return (*forth, *back)[:stages]


class Builder(NamedTuple):
    """A placement of stages on devices, and the rows of actions for it."""

    choose_placement: Callable[[str, int, int | None], Placement]
    build: Callable[[str, Placement, int], Schedule]


BUILDERS = {
    "gpipe": Builder(_place_one_each, gpipe),
    "1f1b": Builder(_place_one_each, one_forward_one_backward),
    "interleaved": Builder(_place_in_loops, interleaved),
    "bfs": Builder(_place_in_loops, breadth_first),
    "zb-h1": Builder(_place_one_each, zero_bubble_h1),
    "zb-h2": Builder(_place_one_each, zero_bubble_h2),
    "zbv": Builder(_place_in_v, zero_bubble_v),
    "v-half": Builder(_place_in_v, v_half),
    "v-min": Builder(_place_in_v, v_min),
    "dualpipe-v": Builder(_place_in_v, dualpipe_v),
}
"""All schedules by name."""
