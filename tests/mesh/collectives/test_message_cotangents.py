"""Cotangents of messages reach their messages, or raise; the oracle is the serial program in plain torch."""

import re
from queue import SimpleQueue
from random import Random
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fshard as fs
from fshard.errors import DeadlockError, LostProcessError, MismatchError
from fshard.mesh.runtimes.process import ProcessWorld, leave
from fshard.mesh.spmd.scope import require
from tests.helpers.processes import HAS_RULES, run_processes

pytestmark = pytest.mark.filterwarnings(
    "ignore:`torch.jit.script` is deprecated:DeprecationWarning"
)

DTYPES = {
    "f64": {"x": torch.float64},
    "f32": {"x": torch.float32},
    "both": {"x": torch.float64, "y": torch.float32},
}


TOKEN = "Add the token of each fs.send"
"""Of the way out in errors."""


class Message(NamedTuple):
    """A message of a program: the sender multiplies its state by `factor`, the receiver adds it."""

    source: int
    to: int
    kind: str
    factor: int
    is_token_early: bool  # the token is added to the state, and not to the loss
    place: int  # of the token among the summands of the loss


class Program(NamedTuple):
    """A program of devices that send messages in this order, and differentiate once each."""

    devices: int
    messages: tuple[Message, ...]
    forgotten: frozenset[int] = frozenset()


@st.composite
def programs(draw):
    devices = draw(st.integers(2, 3))
    messages = []
    for _ in range(draw(st.integers(1, 6))):
        source = draw(st.integers(0, devices - 1))
        to = (source + draw(st.integers(1, devices - 1))) % devices
        kind = draw(st.sampled_from(sorted(DTYPES)))
        factor = draw(st.integers(2, 5))
        messages.append(
            Message(source, to, kind, factor, draw(st.booleans()), draw(st.integers(0, 9)))
        )
    return Program(devices, tuple(messages))


def start_of(device):
    return torch.tensor([1.0, 2.0, -1.0], dtype=torch.float64) + device


def payload_of(message, state):
    return {name: state.to(dtype) * message.factor for name, dtype in DTYPES[message.kind].items()}


def received_by(state, payload):
    """Return the next state of a receiver: weighted by its own, so that cotangents differ."""
    return state + (1 + state / 8) * sum(x.double() for x in payload.values())


def loss_of(state):
    return state.square().sum() / 16


def serial_gradients(program):
    starts = [start_of(device).requires_grad_() for device in range(program.devices)]
    states = list(starts)
    for message in program.messages:
        payload = payload_of(message, states[message.source])
        states[message.to] = received_by(states[message.to], payload)
    total = sum(loss_of(state) for state in states)
    return list(torch.autograd.grad(total, starts))


def device_gradient(program):
    device = fs.axis_index("d")
    start = start_of(device).requires_grad_()
    state = start * 1
    tokens = []
    for number, message in enumerate(program.messages):
        if message.source == device:
            token = fs.send(payload_of(message, state), "d", to=message.to)
            if number in program.forgotten:
                continue
            if message.is_token_early:
                state = state + token
            else:
                tokens.insert(message.place % (len(tokens) + 1), token)
        elif message.to == device:
            like = {
                name: torch.empty(3, dtype=dtype, requires_grad=True)
                for name, dtype in DTYPES[message.kind].items()
            }
            state = received_by(state, fs.recv(like, "d", source=message.source))
    tokens.insert(len(tokens) // 2, loss_of(state))
    sum(tokens).backward()
    return start.grad


def mesh_gradients(program, **options):
    return fs.run(device_gradient, program, mesh=fs.make_mesh({"d": program.devices}, **options))


@given(programs())
@settings(max_examples=60)
def test_cotangents_of_one_backward_equal_serial(program):
    torch.testing.assert_close(mesh_gradients(program), serial_gradients(program))


@given(programs(), st.data())
@settings(max_examples=60)
def test_forgotten_token_raises(program, data):
    numbers = st.integers(0, len(program.messages) - 1)
    forgotten = data.draw(st.frozensets(numbers, min_size=1))
    with pytest.raises(MismatchError, match=TOKEN):
        mesh_gradients(program._replace(forgotten=forgotten))


def drawn_programs(devices, count):
    """Draw programs by a seed, so that all processes have the same."""
    rng = Random(devices)
    drawn = []
    for _ in range(count):
        messages = []
        for _ in range(rng.randint(2, 6)):
            source, to = rng.sample(range(devices), 2)
            kind, factor = rng.choice(sorted(DTYPES)), rng.randint(2, 5)
            messages.append(
                Message(source, to, kind, factor, rng.random() < 0.5, rng.randint(0, 9))
            )
        drawn.append(Program(devices, tuple(messages)))
    return drawn


def gradients_of_programs(devices):
    return [mesh_gradients(program)[0] for program in drawn_programs(devices, 12)]


@pytest.mark.parametrize("devices", [2, 4])
def test_cotangents_between_processes_equal_serial(devices, two, four):
    pool = two if devices == 2 else four
    expected = [serial_gradients(program) for program in drawn_programs(devices, 12)]
    for device, gradients in enumerate(pool.run(gradients_of_programs, devices)):
        torch.testing.assert_close(gradients, [of_all[device] for of_all in expected])


# -- several backwards -----------------------------------------------------------------------------


X = torch.tensor([1.0, 2.0])
BACKWARDS = {
    "once": [(0, 1, 2)],
    "each": [(0,), (1,), (2,)],
    "each, last first": [(2,), (1,), (0,)],
    "some": [(1,), (0, 2)],
    "twice": [(0, 1, 2), (0, 1, 2)],
    "some again": [(0, 1), (1, 2)],
}
"""The messages that each backward of a device differentiates."""


def differentiate_three(orders):
    """Send three messages of equal shapes; return the gradients of the sender."""
    order = orders[fs.axis_index("d")]
    if fs.axis_index("d") == 0:
        xs = [X.clone().requires_grad_() for _ in range(3)]
        values = [fs.send(x, "d", to=1) for x in xs]
    else:
        like = torch.empty(2, requires_grad=True)
        values = [(10.0**n * fs.recv(like, "d", source=0)).sum() for n in range(3)]
    for numbers in order:
        sum(values[number] for number in numbers).backward(retain_graph=True)
    return [x.grad for x in xs] if fs.axis_index("d") == 0 else None


def gradients_of_three(kinds, **options):
    orders = [BACKWARDS[kind] for kind in kinds]
    return fs.run(differentiate_three, orders, mesh=fs.make_mesh({"d": 2}, **options))[0]


def expected_gradients(kind):
    counts = [sum(number in numbers for numbers in BACKWARDS[kind]) for number in range(3)]
    return [count * 10.0**number * torch.ones(2) for number, count in enumerate(counts)]


@pytest.mark.parametrize("kind", BACKWARDS)
def test_equal_backwards_at_both_ends_are_right(kind):
    torch.testing.assert_close(gradients_of_three((kind, kind)), expected_gradients(kind))


UNEQUAL = [("once", "each"), ("each", "once"), ("some", "each"), ("each", "each, last first")]


@pytest.mark.parametrize("kinds", UNEQUAL)
def test_unequal_backwards_raise_with_both_messages(kinds):
    with pytest.raises(MismatchError) as error:
        gradients_of_three(kinds)
    text = str(error.value)
    assert re.search(r"expects recv of f32\[2\] for cotangents of message \d \(received at", text)
    assert re.search(r"received f32\[2\] for cotangents of message \d \(sent at", text)
    assert "call backward once for all of them on both, or once for each" in text and TOKEN in text


def error_of_three(kinds):
    """Return the error of a process; None if it has none."""
    try:
        gradients_of_three(kinds, timeout=1)
        leave()
    except (MismatchError, LostProcessError) as error:
        return f"{type(error).__name__}: {error}"


def test_unequal_backwards_of_processes_raise(link):
    # NCCL sends no stamps: there numbers are compared under FSHARD_CHECK=1 only.
    environment = {**link, "FSHARD_CHECK": "1" if HAS_RULES else "0"}
    sender_error, _ = run_processes(error_of_three, 2, ("once", "each"), environment=environment)
    assert sender_error.startswith("MismatchError"), sender_error
    assert "for cotangents of message 3 of float32[2]" in sender_error
    assert "call backward once for all of them on both, or once for each" in sender_error


def test_messages_under_the_rules_of_nccl_are_right_or_raise_if_checked():
    """No stamps are sent there: numbers are compared under FSHARD_CHECK=1 only."""
    from tests.mesh.runtimes.nccl_rules import Ruled  # registers a backend

    backend = {"FSHARD_BACKEND": "nccl_rules"}
    expected = [serial_gradients(program) for program in drawn_programs(2, 12)]
    rows = run_processes(Ruled(gradients_of_programs), 2, 2, environment=backend)
    for device, gradients in enumerate(rows):
        torch.testing.assert_close(gradients, [of_all[device] for of_all in expected])

    checked = {**backend, "FSHARD_CHECK": "1"}
    sender_error, _ = run_processes(Ruled(error_of_three), 2, ("once", "each"), environment=checked)
    assert sender_error.startswith("MismatchError") and TOKEN in sender_error
    assert sender_error.count("for cotangents of message") == 2


def test_token_forgotten_in_a_step_raises_in_the_next():
    def main():
        for step in range(2):
            x = X.clone().requires_grad_()
            if fs.axis_index("d") == 0:
                tokens = [fs.send(x * n, "d", to=1) for n in (1, 2)]
                tokens[1 - step].backward()
            else:
                like = torch.empty(2, requires_grad=True)
                sum(fs.recv(like, "d", source=0).sum() * n for n in (1, 10)).backward()

    with pytest.raises(MismatchError, match="message 3.*received.*message 1") as error:
        fs.run(main, mesh=fs.make_mesh({"d": 2}))
    send_line = main.__code__.co_firstlineno + 4
    assert f"test_message_cotangents.py:{send_line} in <listcomp>) sent by" in str(error.value)
    assert TOKEN in str(error.value)


@pytest.mark.parametrize("unused", [0, 1])
def test_message_that_only_the_sender_differentiates_raises(unused):
    def main():
        x = X.clone().requires_grad_()
        if fs.axis_index("d") == 0:
            sum(fs.send(x, "d", to=1) for _ in range(2)).backward()
        else:
            ys = [fs.recv(x, "d", source=0) for _ in range(2)]
            ys[1 - unused].sum().backward()

    with pytest.raises((MismatchError, DeadlockError), match="for cotangents of message") as error:
        fs.run(main, mesh=fs.make_mesh({"d": 2}))
    assert ("fs.recv" if unused == 0 else TOKEN) in str(error.value)


def test_pruned_receive_is_reported_with_the_way_out():
    """`torch.autograd.grad` of a weight alone runs no backward of `recv`."""

    def main(names_like):
        x = X.clone().requires_grad_()
        if fs.axis_index("d") == 0:
            fs.send(x, "d", to=1).backward()
            return x.grad
        w = torch.ones(2, requires_grad=True)
        loss = (fs.recv(x, "d", source=0) * w * 3).sum()
        return torch.autograd.grad(loss, [w, x] if names_like else [w])[0]

    mesh = fs.make_mesh({"d": 2})
    gradients = fs.run(main, True, mesh=mesh)
    torch.testing.assert_close(gradients, [torch.full((2,), 3.0), 3 * X])
    receive_line = main.__code__.co_firstlineno + 6
    line = rf"\(received at \S+test_message_cotangents.py:{receive_line} in main\)"
    with pytest.raises(DeadlockError, match=f"for cotangents of message 1 {line} from") as error:
        fs.run(main, False, mesh=mesh)
    assert "unless `like` depends on what they differentiate by" in str(error.value)


# -- other derivatives -----------------------------------------------------------------------------


def test_tangents_and_their_cotangents_keep_apart():
    """Reverse over forward: each message has a tangent, and both have cotangents."""

    def main():
        x = X.clone().requires_grad_()

        def stage(x):
            if fs.axis_index("d") == 0:
                return fs.send(x**3, "d", to=1) + fs.send(x**2, "d", to=1)
            y, z = [fs.recv(x, "d", source=0) for _ in range(2)]
            return (y.sin() * z).sum()

        direction = torch.ones(2, requires_grad=True)  # else no tangent of `like` requires grad
        value, tangent = torch.func.jvp(stage, (x,), (direction,))
        (value + 3 * tangent).backward()
        return x.grad

    def serial(x):
        value, tangent = torch.func.jvp(
            lambda x: ((x**3).sin() * x**2).sum(), (x,), (torch.ones(2),)
        )
        return value + 3 * tangent

    expected = torch.func.grad(serial)(X)
    torch.testing.assert_close(fs.run(main, mesh=fs.make_mesh({"d": 2}))[0], expected)


@pytest.mark.parametrize("transform", ["grad", "vjp"])
def test_messages_under_torch_func_equal_serial(transform):
    def stage(x):
        if fs.axis_index("d") == 0:
            return sum(fs.send(x * n, "d", to=1) for n in (1, 2, 3)) + x.sum()
        return sum((fs.recv(x, "d", source=0) ** n).sum() for n in (1, 2, 3))

    def main():
        if transform == "grad":
            return torch.func.grad(stage)(X)
        value, pull = torch.func.vjp(stage, X)
        return pull(torch.ones_like(value))[0]

    serial = torch.func.grad(lambda x: sum(((x * n) ** n).sum() for n in (1, 2, 3)) + x.sum())
    torch.testing.assert_close(fs.run(main, mesh=fs.make_mesh({"d": 2}))[0], serial(X))


def test_rematerialised_messages_equal_serial():
    """Both ends send and receive again in the backward, under numbers of their own."""

    def main():
        x = X.clone().requires_grad_()
        if fs.axis_index("d") == 0:
            run = fs.remat(lambda x: fs.send(x.sin(), "d", to=1) + x.cos().sum())
        else:
            run = fs.remat(lambda x: fs.recv(x, "d", source=0).sin().sum())
        (run(x) + 10 * run(x)).backward()
        return x.grad

    x = X.clone().requires_grad_()
    (11 * x.sin().sin().sum() + 11 * x.cos().sum()).backward()
    torch.testing.assert_close(fs.run(main, mesh=fs.make_mesh({"d": 2}))[0], x.grad)


def test_cotangents_of_cotangents_keep_apart():
    """A derivative by the weights of the cotangents is the tangent: the trick of two backwards."""

    def main():
        x = X.clone().requires_grad_()
        if fs.axis_index("d") == 0:
            weights = torch.ones(3, requires_grad=True)
            tokens = sum(
                fs.send(x * n, "d", to=1) * w for n, w in zip((1, 2, 3), weights, strict=True)
            )
            (gradient,) = torch.autograd.grad(tokens, x, create_graph=True)
            torch.autograd.grad((gradient * X).sum(), weights)
            return gradient.detach()
        seeds = [torch.ones(2, requires_grad=True) for _ in range(3)]
        ys = [fs.recv(x, "d", source=0) for _ in range(3)]
        value = sum((y * seed).sum() for y, seed in zip(ys, seeds, strict=True))
        (zeros,) = torch.autograd.grad(value, x, create_graph=True)
        return torch.stack(torch.autograd.grad(zeros.sum(), seeds))

    gradient, tangents = fs.run(main, mesh=fs.make_mesh({"d": 2}))
    torch.testing.assert_close(gradient, torch.full((2,), 6.0))
    torch.testing.assert_close(tangents, torch.stack([X * n for n in (1, 2, 3)]))


# -- messages that a thread listens for ------------------------------------------------------------


def differentiate_after_listening():
    """Listen for a first message, as a parameter server does; differentiate a second one."""
    mesh = fs.make_mesh({"d": 2})

    def main():
        x = torch.ones(2, requires_grad=True)
        if fs.axis_index("d") == 1:
            fs.send(torch.ones(2), "d", to=0)
            fs.send(x, "d", to=0).backward()
            return x.grad.tolist()

        arrived = SimpleQueue()
        group = require("a test").group(("d",), "a test")
        ProcessWorld.of(mesh).listen(torch.ones(2), group, 1, arrived)
        arrived.get(timeout=20)
        y = fs.recv(x, "d", source=1)
        (3 * y).sum().backward()
        return None

    return fs.run(main, mesh=mesh)[0]


def test_message_that_a_thread_listened_for_counts_at_both_ends(two):
    assert two.run(differentiate_after_listening) == [None, [3.0, 3.0]]
