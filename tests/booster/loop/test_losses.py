"""Losses of loops beyond a mean over samples: weighted, of several backwards, and of several
models.
"""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional

import fshard as fs
from fshard.errors import ModuleError
from tests.booster.loops import PLUGINS, Loop, assert_close, mesh_of, on_devices

DRAW = torch.Generator().manual_seed(1)
X = torch.randn(8, 3, dtype=torch.float64, generator=DRAW)
Z = torch.randn(8, 2, dtype=torch.float64, generator=DRAW)
PADDED = torch.tensor([-100, -100, -100, 1, 0, 1, -100, 0])
REPLICATED_OR_SHARDED = ["ddp", "zero 1", "zero 2", "fsdp"]


def net(inputs=3, outputs=2):
    layers = nn.Linear(inputs, 5), nn.Tanh(), nn.Linear(5, outputs)
    return nn.Sequential(*layers).double()


def sgd(module):
    return torch.optim.SGD(module.parameters(), lr=0.5)


def backward(loop, loss, **options):
    """Take the gradient of a loss for a loop's model; torch's is that for all models."""
    if loop.booster is None:
        loss.backward(retain_graph=options.get("retain_graph", False))
    else:
        loop.booster.backward(loss, loop.opt, **options)


def compare(body, makes, plugin, n):
    """Compare the states of loops of several models with those of one device."""

    def run(chosen):
        loops = [Loop(make, chosen, sgd) for make in makes]
        body(*loops)
        return [loop.state() for loop in loops]

    expected = run(None)
    for states in fs.run(lambda: run(PLUGINS[plugin]()), mesh=mesh_of(PLUGINS[plugin](), n)):
        for state, each in zip(states, expected, strict=True):
            assert_close([state], each)


@pytest.fixture(params=[(plugin, n) for plugin in REPLICATED_OR_SHARDED for n in (2, 4)], ids=str)
def devices(request):
    return request.param


# -- weights ---------------------------------------------------------------------------------------


def test_backward_of_padded_labels_weighted_by_tokens_is_that_of_one_device(devices):
    """The first of four devices has no label at all: its loss is nan, and its weight 0."""

    def body(loop):
        for _ in range(2):
            for shift in (0, 1):  # accumulated, as torch does
                labels = loop.part(PADDED.roll(-shift))
                loss = functional.cross_entropy(loop.model(loop.part(X)), labels)
                backward(loop, loss / 2, weight=(labels != -100).sum())
            loop.step()

    compare(body, [net], *devices)


def test_microbatches_with_counts_have_one_mean_over_all_tokens(devices):
    """The second microbatch has other padding: on one device that is one loss of both."""
    labels = [PADDED, PADDED.roll(1).masked_fill(torch.arange(8) < 5, -100)]

    def body(loop):
        mean = (lambda x: x) if loop.booster is None else loop.booster.mean
        parts = [loop.part(x) for x in labels]
        counts = [float(mean((x != -100).sum().double())) for x in parts]
        for part, count in zip(parts, counts, strict=True):
            loss = functional.cross_entropy(loop.model(loop.part(X)), part)
            backward(loop, loss * count / sum(counts), weight=(part != -100).sum())
        loop.step()

    compare(body, [net], *devices)
    alone = Loop(net, optimizer=sgd)
    expected = Loop(net, optimizer=sgd)
    body(alone)
    outputs = expected.model(torch.cat([X, X]))
    functional.cross_entropy(outputs, torch.cat(labels)).backward()
    expected.step()
    assert_close([alone.state()], expected.state())


def test_backward_with_weights_of_uneven_batches_is_the_mean_over_tokens():
    """A device with fewer samples may have more tokens."""
    data = torch.utils.data.TensorDataset(X[:7], PADDED[:7])

    def body(loop):
        for inputs, labels in loop.loader:
            loss = functional.cross_entropy(loop.model(inputs), labels, ignore_index=-100)
            backward(loop, loss, weight=float((labels != -100).sum()))
            loop.step()
        return loop.state()

    def run(plugin):
        loader = torch.utils.data.DataLoader(data, 7)
        return body(Loop(net, plugin, sgd, loader=loader))

    assert_close(fs.run(lambda: run(fs.FSDPPlugin()), mesh=fs.make_mesh({"data": 3})), run(None))


def weighted_on_processes():
    """Return the state after weighted steps on checked samples of a stream, of which the loop
    counts the tokens.
    """

    class Rows(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter([*zip(X, PADDED, strict=True)])

    class Counting(nn.Linear):
        def __init__(self):
            super().__init__(3, 2, dtype=torch.float64)
            self.register_buffer("tokens", torch.zeros((), dtype=torch.float64))

    booster = fs.Booster(fs.FSDPPlugin(), check="loss")
    loader = torch.utils.data.DataLoader(Rows(), 8)
    loop = Loop(Counting, booster, sgd, loader=loader)
    for inputs, labels in loop.loader:
        tokens = (labels != -100).sum()
        backward(loop, loop.criterion(loop.model(inputs), labels), weight=tokens)
        loop.model.module.tokens += booster.mean(tokens.double())
        loop.step()
        with booster.parameters(loop.model) as shards:
            for shard in shards.values():
                shard.clamp_(-0.5, 0.5)
    return loop.state()


def test_weights_streams_buffers_and_shards_on_processes_are_those_of_devices(two):
    expected = fs.run(weighted_on_processes, mesh=fs.make_mesh({"data": 2}))
    assert float(expected[0]["tokens"]) == 2.0
    assert_close(two.run(weighted_on_processes), expected[0])


@pytest.mark.parametrize("mesh", [{"pipe": 2}, {"data": 2, "pipe": 2}], ids=str)
def test_stages_weighted_by_tokens_are_those_of_one_device(mesh):
    def main():
        loop = Loop(net, PLUGINS["stages"](), sgd)
        batch = iter([(X, PADDED)])
        result = loop.booster.execute_pipeline(
            batch,
            loop.model,
            functional.cross_entropy,
            loop.opt,
            weight=lambda microbatch: (microbatch[1] != -100).sum(),
        )
        loop.step()
        return loop.state(), result["loss"]

    alone = Loop(net, optimizer=sgd)
    loss = functional.cross_entropy(alone.model(X), PADDED)
    loss.backward()
    alone.step()
    for state, value in fs.run(main, mesh=fs.make_mesh(mesh)):
        assert_close([state], alone.state())
        torch.testing.assert_close(value.detach(), loss.detach())


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (-1, "weight must be one finite number of at least 0; got -1"),
        (float("inf"), "got inf"),
        ("tokens", "got 'tokens'"),
        (torch.ones(2), "weight must be one finite number"),
        (0, "above 0 on one device at least; got 0 on all"),
    ],
    ids=str,
)
def test_backward_with_an_invalid_weight_raises(weight, message):
    with pytest.raises(ValueError, match=message):
        on_devices(
            lambda loop: backward(loop, loop.model(X).mean(), weight=weight),
            fs.DDPPlugin(),
            2,
            net,
            sgd,
        )


def test_backward_with_a_weight_in_reproducible_mode_raises():
    with pytest.raises(ValueError, match="weight must be None with reproducible=True"):
        on_devices(
            lambda loop: backward(loop, loop.model(X).mean(), weight=1),
            fs.DDPPlugin(reproducible=True),
            2,
            net,
            sgd,
        )


# -- collectives -----------------------------------------------------------------------------------


def pmean(loop, x):
    return x if loop.booster is None else fs.pmean(x, "data")


def psum(loop, x):
    return x if loop.booster is None else fs.psum(x, "data")


def spread(loop, output):
    """Return the mean distance of samples to the mean of all devices' samples."""
    return (output - pmean(loop, output.mean(0))).pow(4).mean()


def marked_spread(loop, output):
    mean = output.mean(0)
    if loop.booster is not None:
        mean = fs.pvary(fs.pmean(mean, "data"), "data")
    return (output - mean).pow(4).mean()


def distance_to_maximum(loop, output):
    maximum = output.amax(0)
    if loop.booster is not None:
        maximum = fs.pmax(maximum, "data")
    return (output - maximum).square().mean()


def contrastive(loop, output, **to):
    """Return the loss of each sample of this device, which is to be found among those of all
    devices.
    """
    others, first = output, 0
    if loop.booster is not None:
        others = fs.all_gather(output, "data", **to)
        first = fs.axis_index("data") * len(output)
    return functional.cross_entropy(output @ others.T, torch.arange(len(output)) + first)


COLLECTIVE_LOSSES = {
    "the mean of all": lambda loop, output: pmean(loop, output.square().mean()),
    "a sum over the mean of all": lambda loop, output: (
        pmean(loop, output.exp().mean(0)).log().sum()
    ),
    "the sum of all": lambda loop, output: psum(loop, output.square().sum() / len(X)),
    "the sum of all, of a tree": lambda loop, output: psum(loop, [output.sum() / 8])[0].square(),
    "distances to the mean": spread,
    "distances to the marked mean": marked_spread,
    "distances to the maximum": distance_to_maximum,
    "contrastive": contrastive,
    "contrastive, replicated": partial(contrastive, to="replicated"),
}


def test_a_loss_with_a_mean_over_devices_is_that_of_one_device(devices):
    def body(loop):
        for is_last in (False, True):
            loop.backward(spread(loop, loop.model(loop.part(X))) / 2, sync=is_last)
        loop.step()

    compare(body, [net], *devices)


@pytest.mark.parametrize("plugin", ["zero 1", "fsdp"])
@pytest.mark.parametrize("loss", COLLECTIVE_LOSSES.values(), ids=COLLECTIVE_LOSSES)
def test_a_loss_with_collectives_is_that_of_one_device(loss, plugin):
    def body(loop):
        for shift in (0, 1):
            loop.backward(loss(loop, loop.model(loop.part(X.roll(shift)))))
            loop.step()

    compare(body, [net], plugin, 4)


def test_a_loss_with_collectives_of_a_tensor_parallel_model_is_that_of_one_device():
    """Along the axes of layers a mean is that of equal values."""

    def body(loop):
        output = loop.model(loop.part(X))
        mean = output.mean(0)
        if loop.booster is not None:
            mean = fs.pmean(mean, ("data", "model"))
        loop.backward((output - mean).pow(4).mean())
        loop.step()
        return loop.state()

    plugin = fs.HybridParallelPlugin(tensor=2, zero_stage=1, sample=X[:2])
    mesh = fs.make_mesh({"data": 2, "model": 2})
    states = fs.run(lambda: body(Loop(net, plugin, sgd)), mesh=mesh)
    assert_close(states, body(Loop(net, optimizer=sgd)))


def test_checked_collectives_of_a_loss_may_have_other_cotangents_on_each_device():
    def body(loop):
        loop.backward(spread(loop, loop.model(loop.part(X))))
        loop.step()
        return loop.state()

    states = fs.run(
        lambda: body(Loop(net, fs.FSDPPlugin(), sgd)), mesh=fs.make_mesh({"data": 2}), check=True
    )
    assert_close(states, body(Loop(net, optimizer=sgd)))


def test_a_collective_over_an_axis_of_replicas_averages_their_losses():
    """Devices along an axis that the plugin does not name have losses of their own: the objective
    is their mean.
    """

    def main():
        loop = Loop(net, fs.FSDPPlugin(axis="data"), sgd)
        scale = 1 + fs.axis_index("replica")
        loss = loop.model(loop.part(X)).square().mean() * scale
        loop.backward(fs.pmean(loss, "replica"))
        loop.step()
        return loop.state()

    expected = Loop(net, optimizer=sgd)
    expected.backward(expected.model(X).square().mean() * 1.5)
    expected.step()
    assert_close(fs.run(main, mesh=fs.make_mesh({"data": 2, "replica": 2})), expected.state())


def test_penalties_on_gradients_through_a_sum_over_devices_are_those_of_one_device():
    def body(loop):
        x = loop.part(X).clone().requires_grad_()
        output = loop.model(x)
        total = psum(loop, output.square().sum())
        (gradient,) = torch.autograd.grad(total, x, create_graph=True)
        loop.backward(output.mean() + gradient.square().sum(1).mean())
        loop.step()

    compare(body, [net], "fsdp", 4)


def test_samples_of_weight_0_count_in_the_losses_of_other_devices():
    """The first of four devices has no label, but its samples are compared with those of the
    others.
    """
    is_labelled = PADDED != -100

    def body(loop):
        output = loop.model(loop.part(X))
        is_anchor = loop.part(is_labelled)
        others = output if loop.booster is None else fs.all_gather(output, "data")
        losses = (output @ others.T).logsumexp(1)
        count = is_anchor.sum()
        backward(loop, (losses * is_anchor).sum() / count.clamp(min=1), weight=count)
        loop.step()

    compare(body, [net], "fsdp", 4)


@pytest.mark.parametrize(
    ("rows", "loss"),
    [(7, spread), (3, contrastive), (3, spread)],
    ids=["7 rows", "contrastive", "3 rows"],
)
def test_collectives_over_uneven_batches_raise(rows, loss):
    data = torch.utils.data.TensorDataset(X[:rows])

    def body(loop):
        for (inputs,) in loop.loader:
            loop.backward(loss(loop, loop.model(inputs)))

    with pytest.raises(ValueError, match="Give batches of a multiple of 4"):
        on_devices(body, fs.FSDPPlugin(), 4, net, loader=torch.utils.data.DataLoader(data, rows))


def test_a_maximum_over_devices_without_samples_is_that_of_one_device():
    def body(loop):
        for (inputs,) in loop.loader:
            loop.backward(distance_to_maximum(loop, loop.model(inputs)))
            loop.step()
        return loop.state()

    def run(plugin):
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X[:3]), 3)
        return body(Loop(net, plugin, sgd, loader=loader))

    assert_close(fs.run(lambda: run(fs.FSDPPlugin()), mesh=fs.make_mesh({"data": 4})), run(None))


def test_collectives_of_a_reproducible_loss_raise():
    def body(loop):
        loop.backward(spread(loop, loop.model(loop.part(X))))

    with pytest.raises(ValueError, match="leave reproducible=True out"):
        on_devices(body, fs.DDPPlugin(reproducible=True), 2, net)


def test_a_broadcast_in_a_loss_raises_and_names_all_gather():
    def body(loop):
        output = loop.model(loop.part(X))
        loop.backward((output - fs.broadcast(output[0], "data", source=0)).square().mean())

    with pytest.raises(ValueError, match=r"Take it from fs.all_gather\(x, axis\)"):
        on_devices(body, fs.FSDPPlugin(), 2, net)


def spread_on_processes():
    """Return the state after a step on a mean over devices."""

    def main():
        loop = Loop(net, fs.FSDPPlugin(), sgd)
        loop.backward(spread(loop, loop.model(loop.part(X))))
        loop.step()
        return loop.state()

    return fs.run(main, mesh=fs.make_mesh({"data": 2}))[0]


def test_a_loss_with_a_mean_over_processes_is_that_of_one_device(two):
    expected = Loop(net, optimizer=sgd)
    expected.backward(spread(expected, expected.model(X)))
    expected.step()
    assert_close(two.run(spread_on_processes), expected.state())


# -- several backwards, several models -------------------------------------------------------------


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(3, 4).double()
        self.actor = nn.Linear(4, 2).double()
        self.critic = nn.Linear(4, 1).double()

    def forward(self, x):
        hidden = self.trunk(x).tanh()
        return self.actor(hidden), self.critic(hidden)[:, 0]


def advantages(values, states):
    return states.sum(1) - values


def policy_loss(logits, advantage):
    return -(logits.log_softmax(-1)[:, 0] * advantage).mean()


def test_two_backwards_through_one_graph_add_up(devices):
    def body(loop):
        for _ in range(2):
            states = loop.part(X)
            logits, values = loop.model(states)
            advantage = advantages(values, states)
            backward(loop, policy_loss(logits, advantage.detach()), retain_graph=True)
            backward(loop, advantage.square().mean())
            loop.step()

    compare(body, [ActorCritic], *devices)


def test_two_backwards_through_one_graph_in_reproducible_mode_add_up():
    def body(loop):
        output = loop.model(loop.part(X))
        backward(loop, output.mean(), retain_graph=True)
        backward(loop, output.square().mean())
        loop.step()
        return loop.state()

    plugin = fs.FSDPPlugin(reproducible=True)
    assert_close(on_devices(body, plugin, 2, net, sgd), body(Loop(net, optimizer=sgd)))


def test_one_loss_trains_two_models(devices):
    """Each optimizer has its backward; in torch one backward gives both their gradients."""

    def body(actor, critic):
        for _ in range(2):
            states = actor.part(X)
            advantage = advantages(critic.model(states)[:, 0], states)
            loss = policy_loss(actor.model(states), advantage) + advantage.square().mean()
            if actor.booster is not None:
                backward(actor, loss, retain_graph=True)
            backward(critic, loss)
            actor.step()
            critic.step()

    compare(body, [net, lambda: net(outputs=1)], *devices)


def test_a_loss_through_a_discriminator_trains_the_generator_alone(devices):
    def body(generator, critic):
        for _ in range(2):
            fake = generator.model(generator.part(Z))
            real = functional.softplus(-critic.model(critic.part(X))).mean()
            critic.opt.zero_grad()
            backward(critic, real + functional.softplus(critic.model(fake.detach())).mean())
            critic.step()
            backward(generator, functional.softplus(-critic.model(fake)).mean())
            generator.step()

    compare(body, [lambda: net(2, 3), lambda: net(outputs=1)], *devices)


def test_a_second_backward_without_a_retained_graph_raises():
    def body(loop):
        loss = loop.model(X).square().mean()
        backward(loop, loss)
        backward(loop, loss)

    with pytest.raises(RuntimeError, match="retain_graph=True"):
        on_devices(body, fs.DDPPlugin(), 2, net, sgd)


# -- shards of parameters, between steps -----------------------------------------------------------


def clamp(loop, bound):
    if loop.booster is None:
        with torch.no_grad():
            for x in loop.model.parameters():
                x.clamp_(-bound, bound)
        return
    with loop.booster.parameters(loop.model) as shards:
        for name, shard in shards.items():
            if shard.numel() % 2:
                shard.clamp_(-bound, bound)
            else:
                shards[name] = shard.clamp(-bound, bound)


@pytest.mark.parametrize("plugin", [*REPLICATED_OR_SHARDED, "stages"])
def test_clamped_shards_are_those_of_one_device(plugin):
    def body(loop):
        for bound in (0.3, 0.2):
            loop.step(loop.part(X), loop.part(X.sum(1).gt(0).long()))
            clamp(loop, bound)

    compare(body, [net], plugin, 4)


def test_a_critic_that_another_loss_has_used_may_be_clamped(devices):
    def body(generator, critic):
        for _ in range(2):
            backward(generator, -critic.model(generator.model(generator.part(Z))).mean())
            generator.step()
            clamp(critic, 0.1)

    compare(body, [lambda: net(2, 3), lambda: net(outputs=1)], *devices)


@pytest.mark.parametrize("plugin", [*REPLICATED_OR_SHARDED])
def test_an_average_of_parameters_is_a_second_model(plugin):
    """It is sharded as the first one is, is called, and has a state_dict."""

    def body(student):
        teacher = Loop(net, student.booster, sgd)
        for _ in range(3):
            with torch.no_grad():
                labels = teacher.model(student.part(X)).softmax(-1)
            backward(student, functional.cross_entropy(student.model(student.part(X)), labels))
            student.step()
            follow(teacher, student)
        return teacher.state()

    assert_close(on_devices(body, PLUGINS[plugin](), 2, net, sgd), body(Loop(net, optimizer=sgd)))


def follow(teacher, student):
    """Move the parameters of the teacher towards those of the student."""
    if teacher.booster is None:
        with torch.no_grad():
            for mean, x in zip(teacher.model.parameters(), student.model.parameters(), strict=True):
                mean.lerp_(x, 0.1)
        return
    parameters = teacher.booster.parameters
    with parameters(teacher.model) as means, parameters(student.model) as shards:
        for name, mean in means.items():
            mean.lerp_(shards[name], 0.1)


def test_noise_on_shards_is_equal_on_replicas():
    def body(loop):
        with loop.booster.parameters(loop.model) as shards:
            for shard in shards.values():
                shard.add_(torch.randn_like(shard))
        return loop.state()

    first, second = on_devices(body, fs.DDPPlugin(), 2, net, sgd)
    assert_close([second], first, 0)


def within_a_step(loop):
    backward(loop, loop.model(X).mean())
    loop.booster.parameters(loop.model).__enter__()


def of_another_shape(loop):
    with loop.booster.parameters(loop.model) as shards:
        shards["0.bias"] = torch.zeros(1)


def unknown(loop):
    with loop.booster.parameters(loop.model) as shards:
        shards["bias"] = torch.zeros(1)


def of_a_module(loop):
    loop.booster.parameters(loop.module).__enter__()


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (within_a_step, "must have no gradients"),
        (of_another_shape, r"0.bias must be a tensor of shape \(5,\); got \(1,\)"),
        (unknown, "added or removed are bias"),
        (of_a_module, "must be what boost has returned; got Sequential"),
    ],
)
def test_parameters_misused_raise(act, message):
    with pytest.raises(ModuleError, match=message):
        on_devices(act, fs.DDPPlugin(), 2, net, sgd)


def test_writing_a_parameter_between_steps_raises_and_names_parameters():
    def body(loop):
        with torch.no_grad():
            for x in loop.model.parameters():
                x.data.clamp_(-0.1, 0.1)

    with pytest.raises(ModuleError, match=r"with booster.parameters\(model\) as shards"):
        on_devices(body, fs.FSDPPlugin(), 2, net, sgd)


def test_an_attribute_of_the_module_raises_and_names_it():
    class Named(nn.Linear):
        def generate(self, x):
            return self(x)

    def body(loop):
        with pytest.raises(
            AttributeError, match=r"That of the module is model.module.generate.*un"
        ):
            loop.model.generate(X)
        with pytest.raises(AttributeError, match="has no attribute 'unknown'"):
            _ = loop.model.unknown
        with pytest.raises(ModuleError, match=r"model.unwrap\(\).generate"):
            loop.model.module.generate(X)
        return loop.model.unwrap().generate(X)

    def make():
        return Named(3, 2, dtype=torch.float64)

    expected = Loop(make, optimizer=sgd).module(X)
    for output in on_devices(body, fs.FSDPPlugin(), 2, make, sgd):
        torch.testing.assert_close(output, expected)
