"""Bad configurations of the Booster: one error each, that names all that is wrong, before anything is laid anywhere."""

import copy
import pickle
import re
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fshard as fs

MESH = fs.make_mesh({"data": 2, "pipe": 2})


def model():
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


BAD = {
    "precision": (lambda: fs.DDPPlugin(precision="fp8"), 'DDPPlugin: precision is "bf16", "fp16" or None, not .fp8.'),
    "unused": (lambda: fs.DDPPlugin(unused="none"), 'unused is "skip" or "zero"'),
    "mesh": (lambda: fs.DDPPlugin(mesh={"data": 2}), "mesh is a Mesh or None, not {'data': 2}"),
    "axis": (lambda: fs.DDPPlugin(mesh=MESH, axis="rows"), 'axis=: .* has no axis "rows"'),
    "axis twice": (lambda: fs.DDPPlugin(mesh=MESH, axis=("data", "data")), "twice"),
    "seed": (lambda: fs.DDPPlugin(seed=-1), "seed is a whole number from 0 on, not -1"),
    "options": (lambda: fs.DDPPlugin(options={"buckt": 1}), "options has 'buckt'; it may have bucket, in_flight"),
    "slices": (lambda: fs.DDPPlugin(reproducible=True, slices=0), "slices is a whole number from 1 on"),
    "slices that do not divide": (
        lambda: fs.DDPPlugin(mesh=MESH, reproducible=True, slices=6),
        "6 slices are not 1, 2, 4, ... for each of 4 devices",
    ),
    "reproducible batchnorm": (
        lambda: fs.DDPPlugin(reproducible=True, sync_batchnorm=True),
        "computes slices by themselves, sync_batchnorm=True all devices together",
    ),
    "options that are no dict": (lambda: fs.DDPPlugin(options=["bucket"]), r"options is a dict, not \['bucket'\]"),
    "slices of nothing": (lambda: fs.DDPPlugin(slices=4), "slices= has no meaning without reproducible=True"),
    "slices of stages": (
        lambda: fs.HybridParallelPlugin(pipeline=2, reproducible=True, slices=4),
        "slices= has no meaning .* and none for stages",
    ),
    "one stage": (
        lambda: fs.HybridParallelPlugin(microbatches=4, recompute="always", sample=torch.ones(2)),
        "microbatches=, sample=, recompute= has no meaning without stages: pipeline=1",
    ),
    "stage 0": (lambda: fs.ZeroPlugin(stage=0), "stage is 1 or 2, not 0: stage 0 is DDPPlugin, stage 3 FSDPPlugin"),
    "stage 3": (lambda: fs.ZeroPlugin(stage=3), "stage is 1 or 2, not 3"),
    "stage True": (lambda: fs.ZeroPlugin(stage=True), "stage is 1 or 2, not True"),
    "shard axis": (lambda: fs.FSDPPlugin(mesh=MESH, shard_axis="rows"), 'shard_axis=: .* has no axis "rows"'),
    "shard axis elsewhere": (
        lambda: fs.FSDPPlugin(mesh=MESH, axis="data", shard_axis="pipe"),
        "shard_axis pipe does not cut the batch",
    ),
    "zero stage": (lambda: fs.HybridParallelPlugin(zero_stage=4), "zero_stage is 0, 1, 2 or 3, not 4"),
    "pipeline 0": (lambda: fs.HybridParallelPlugin(pipeline=0), "pipeline is a whole number from 1 on, not 0"),
    "pipeline of another size": (
        lambda: fs.HybridParallelPlugin(mesh=MESH, pipeline=4),
        'pipeline=4, but "pipe" of .* has 2 devices',
    ),
    "no pipeline axis": (
        lambda: fs.HybridParallelPlugin(mesh=fs.make_mesh({"data": 2}), pipeline=2),
        'pipeline=2, but "pipe" of .* has no devices',
    ),
    "a mesh for stages": (
        lambda: fs.HybridParallelPlugin(mesh={"pipe": 2}, pipeline=2),
        "mesh is a Mesh or None, not {'pipe': 2}",
    ),
    "unit": (lambda: fs.FSDPPlugin(unit=0), "unit is a string, a list, a whole number from 1 on or None, not 0"),
    "an axis that is no name": (lambda: fs.DDPPlugin(axis=3), "axis is a string, a list or None, not 3"),
    "a bucket": (lambda: fs.ZeroPlugin(options={"bucket": -1}), "bucket is a whole number from 0 on, not -1"),
    "a dtype": (lambda: fs.DDPPlugin(options={"reduce": "fp32"}), "reduce is a dtype or None, not .fp32."),
    "balance": (lambda: fs.HybridParallelPlugin(pipeline=2, balance="even"), "there is no balance='even'"),
    "sizes": (
        lambda: fs.HybridParallelPlugin(pipeline=2, balance=[1, 2, 3]),
        r"balance=\[1, 2, 3\] is not a number of layers, at least 1, for each of 2 stages",
    ),
    "balance that is measured": (
        lambda: fs.HybridParallelPlugin(pipeline=2, balance="time"),
        "balance=.time. is measured. Give a microbatch",
    ),
    "stages along the batch": (
        lambda: fs.HybridParallelPlugin(pipeline=2, pipeline_axis="data"),
        'pipeline_axis="data" is the axis of the batch',
    ),
    "nothing is gathered": (
        lambda: fs.DDPPlugin(options={"prefetch": 2, "live_units": 1}),
        r"options=\['live_units', 'prefetch'\] have no meaning where nothing is gathered: stage 0",
    ),
    "recompute": (
        lambda: fs.HybridParallelPlugin(pipeline=2, recompute="sometimes"),
        "recompute is .* or a whole number from 1 on, not .sometimes.",
    ),
    "chunks of nothing": (lambda: fs.HybridParallelPlugin(pipeline=2, chunks=0), "chunks is a whole number from 1 on"),
    "pipeline axis": (lambda: fs.HybridParallelPlugin(pipeline=2, pipeline_axis=3), "pipeline_axis is a string, not 3"),
    "schedule": (lambda: fs.HybridParallelPlugin(pipeline=2, schedule="1b1f"), "There is no schedule .1b1f."),
    "microbatches": (
        lambda: fs.HybridParallelPlugin(pipeline=2, microbatches=0),
        "microbatches is a whole number from 1 on, not 0",
    ),
    "chunks": (
        lambda: fs.HybridParallelPlugin(pipeline=2, schedule="zbv", chunks=4),
        "zbv lays 8 stages on 4 devices, not on 2: change chunks=4",
    ),
    "stages and batchnorm": (
        lambda: fs.HybridParallelPlugin(pipeline=2, sync_batchnorm=True),
        "sync_batchnorm=True has no meaning for stages",
    ),
    "all at once": (
        lambda: fs.FSDPPlugin(precision="fp8", unused="no", seed=-1, mesh=MESH, shard_axis="rows", options={"a": 1}),
        "precision is .*; unused is .*; seed is .*; options has 'a'.*; shard_axis=: .*rows",
    ),
    "no plugin": (lambda: fs.Booster(plugin="ddp"), "takes a plugin, .* not 'ddp'"),
    "outside": (
        lambda: fs.Booster(fs.DDPPlugin(mesh=MESH)).boost(model()),
        r"a loop must run as one device of .*\. Call it inside of fs.run\(main, mesh=mesh\), or under torchrun",
    ),
    "no optimizer": (lambda: fs.Booster().boost(model(), "adamw"), "boost: str is no pair of init and update"),
    "a class": (lambda: fs.Booster().boost(model(), torch.optim.SGD), "SGD is no pair of init and update"),
    "another model's optimizer": (
        lambda: fs.Booster().boost(model(), torch.optim.SGD(model().parameters(), lr=0.1)),
        r"SGD: in param_groups\[0\] are tensors that are no parameters of the model",
    ),
    "an optimizer with a search": (lambda: boosted(torch.optim.LBFGS), "LBFGS.*calls the loss function several times"),
    "no indices": (
        lambda: fs.Booster().prepare_dataloader(iter([]), 0, sampler=[1]),
        "the dataset has no indices; batch_size is a whole number from 1 on, not 0; sampler= is decided here",
    ),
    "a sampler": (
        lambda: fs.Booster().boost(model(), dataloader=DataLoader(TensorDataset(torch.ones(4)), sampler=[0, 1])),
        "the dataloader draws by list",
    ),
    "an option that loaders lack": (
        lambda: fs.Booster().prepare_dataloader(TensorDataset(torch.ones(4)), 2, shufle=True),
        "torch's DataLoader has no option shufle",
    ),
    "a function": (
        lambda: fs.Booster().boost(model),
        "boost: the model is a module, not function: for a function there is",
    ),
    "the optimizer that was": (lambda: not_boosted(), "optimizer must be what boost has returned; got SGD"),
    "torch's backward": (
        lambda: by_torch(),
        r"loss.backward\(\) has come to sharded parameters.* Write booster.backward\(loss, optimizer\).",
    ),
    "no step": (lambda: fs.Booster().step((), ()), "step comes after state = booster.init"),
    "a state of another": (lambda: fs.Booster().step(other(), ()), "step comes after state = booster.init"),
    "torch's clipping": (
        lambda: clipped_by_torch(),
        r"its parameters have no .grad. Clip them by booster.clip_grad_norm\(optimizer, max_norm\)",
    ),
    "saved as it is": (
        lambda: with_optimizer()[1].state_dict(),
        r"Call model.unwrap\(\).state_dict\(\) on all devices",
    ),
    "loaded afterwards": (lambda: with_optimizer()[1].load_state_dict({}), "Load before the model is boosted"),
    "no pipeline": (lambda: piped(), "the model must be cut into stages, by HybridParallelPlugin"),
    "no memory": (
        lambda: fs.Booster().boost(nn.Sequential(*(nn.Linear(2, 2, device="meta") for _ in range(2)))),
        r"0.weight, 0.bias, 1.weight and 1 more of the model have no memory.* fs.lazy\(Block, config\)",
    ),
    "no forward": (lambda: unforwarded(), "the model must be called after the last step"),
    "no loss": (lambda: losing(torch.ones(())), "does not depend on the model"),
    "many losses": (lambda: losing(None), r"got one of shape \(5, 2\)"),
    "a loss that is no tensor": (lambda: losing(1.0), "the loss must be a tensor .*; got 1.0"),
    "a norm of words": (
        lambda: by_norm("1", "two"),
        "clip_grad_norm: max_norm is a number, not '1'; norm_type is a number, not 'two'",
    ),
    "a norm below zero": (
        lambda: by_norm(-1.0, 0),
        "clip_grad_norm: max_norm=-1.0 has to lie between 0 and inf; norm_type=0 has to be above 0",
    ),
    "a value of words": (lambda: by_value("1"), "clip_grad_value: clip_value is a number, not '1'"),
    "the model that was": (
        lambda: fs.Booster().execute_pipeline(iter([]), model(), nn.MSELoss()),
        "model must be what boost has returned; got Sequential",
    ),
    "no criterion": (
        lambda: without_criterion((torch.ones(2, 3), torch.ones(2, 2))),
        "without a criterion a batch is a dict of the model's arguments, not a tuple. Give one to init",
    ),
    "no loss of its own": (
        lambda: without_criterion({"input": torch.ones(2, 3)}),
        "without a criterion a model must return its loss, as .loss of its output; got a Tensor",
    ),
    "no criterion for stages": (
        lambda: in_two_stages(iter, None),
        "without a criterion a model must return its loss, as .loss of its output; got a Tensor",
    ),
    "no iterator": (
        lambda: in_two_stages(list, nn.MSELoss()),
        "data_iter must be an iterator, iter\\(dataloader\\); got list",
    ),
    "no gradients": (lambda: unstepped(), "there are no gradients. Call the model, then booster.backward"),
}


def boosted(cls):
    one = model()
    return fs.Booster().boost(one, cls(one.parameters()))


def piped():
    one, *_ = fs.Booster().boost(model())
    fs.Booster().execute_pipeline(iter([]), one, nn.MSELoss())


def with_optimizer():
    one = model()
    booster = fs.Booster()
    one, opt, *_ = booster.boost(one, torch.optim.SGD(one.parameters(), lr=0.1))
    return booster, one, opt


def other():
    one = model()
    return fs.Booster().init(one, torch.optim.SGD(one.parameters(), lr=0.1), nn.MSELoss())


def not_boosted():
    one = model()
    opt = torch.optim.SGD(one.parameters(), lr=0.1)
    booster = fs.Booster()
    one, *_ = booster.boost(one, opt)
    booster.backward(one(torch.ones(5, 3)).mean(), opt)


def by_torch():
    booster, one, opt = with_optimizer()
    booster.backward(one(torch.ones(5, 3)).mean(), opt)
    opt.step()
    one(torch.ones(5, 3)).mean().backward()
    opt.step()


def clipped_by_torch():
    booster, one, opt = with_optimizer()
    booster.backward(one(torch.ones(5, 3)).mean(), opt)
    nn.utils.clip_grad_norm_(one.parameters(), 1.0)


def unforwarded():
    booster, _, opt = with_optimizer()
    booster.backward(torch.ones((), requires_grad=True), opt)


def losing(loss):
    booster, one, opt = with_optimizer()
    output = one(torch.ones(5, 3))
    booster.backward(output if loss is None else loss, opt)


def by_norm(*how):
    booster, _, opt = with_optimizer()
    booster.clip_grad_norm(opt, *how)


def by_value(limit):
    booster, _, opt = with_optimizer()
    booster.clip_grad_value(opt, limit)


def without_criterion(batch):
    one = model()
    booster = fs.Booster()
    booster.step(booster.init(one, sgd(one)), batch)


def in_two_stages(given, criterion):
    def main():
        one = model()
        booster = fs.Booster(fs.HybridParallelPlugin(pipeline=2, microbatches=1))
        one, opt, *_ = booster.boost(one, sgd(one))
        booster.execute_pipeline(given([(torch.ones(2, 3), torch.ones(2, 2))]), one, criterion, opt)

    fs.run(main, mesh=fs.make_mesh({"data": 1, "pipe": 2}))


def unstepped():
    with_optimizer()[2].step()


@pytest.mark.parametrize("name", BAD)
def test_a_bad_configuration_is_one_error(name):
    bad, message = BAD[name]
    with pytest.raises(fs.FshardError, match=message):
        fs.run(bad, mesh=fs.make_mesh({"data": 1})) if name in INSIDE else bad()


INSIDE = {*[*BAD][[*BAD].index("no optimizer") :]} - {"no step", "no criterion for stages", "no iterator"}


@given(
    precision=st.sampled_from([None, "bf16", "fp8"]),
    stage=st.integers(-1, 4),
    seed=st.integers(-2, 2),
    slices=st.integers(-1, 9),
    reproducible=st.booleans(),
    sync=st.booleans(),
)
def test_any_plugin_is_made_or_names_all_that_is_wrong(precision, stage, seed, slices, reproducible, sync):
    mesh = fs.make_mesh({"data": 2})
    general = [precision == "fp8", seed < 0, slices < 1, reproducible and sync]
    uneven = reproducible and slices > 0 and slices not in (2, 4, 8)
    idle = slices != 8 and not reproducible
    count = sum(general) + uneven + idle + (stage not in (1, 2))
    how = {"precision": precision, "stage": stage, "seed": seed, "slices": slices, "reproducible": reproducible}
    with pytest.raises(fs.LayoutError) if count else nullcontext() as found:
        fs.ZeroPlugin(mesh=mesh, sync_batchnorm=sync, **how)
    assert not count or str(found.value).count(";") + 1 == count


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, pickle.dumps])
def test_a_boosted_optimizer_that_is_copied_is_one_error_and_harms_no_other(copied):
    def main(act):
        booster, one, opt = with_optimizer()
        act(opt)
        booster.backward(one(torch.ones(5, 3)).mean(), opt)
        opt.step()

    mesh = fs.make_mesh({"data": 1})
    with pytest.raises(fs.OptimizerError, match=r"a boosted optimizer is sharded, so it cannot be copied or pickled"):
        fs.run(main, copied, mesh=mesh)
    fs.run(main, lambda opt: None, mesh=mesh)


def sgd(one):
    return torch.optim.SGD(one.parameters(), lr=0.1)


MISGIVEN = {
    "words": (
        lambda g: (g.one, g.opt, "mse", 3, "sched"),
        "boost: criterion is called, 'mse' cannot be; dataloader is iterated, 3 cannot be; lr_scheduler has a step(), "
        "'sched' has none.",
    ),
    "swapped": (
        lambda g: (g.one, g.opt, nn.MSELoss(), g.steps, [1]),
        "boost: dataloader is iterated, StepLR cannot be; lr_scheduler has a step(), list has none.",
    ),
    "a scheduler of another": (
        lambda g: (g.one, g.opt, nn.MSELoss(), None, g.foreign),
        "boost: lr_scheduler writes into another optimizer: StepLR is to be made of this one.",
    ),
    "a row of schedulers of another": (
        lambda g: (g.other, sgd(g.other), nn.MSELoss(), None, g.row),
        "boost: lr_scheduler writes into another optimizer: SequentialLR is to be made of this one.",
    ),
    "everything": (
        lambda g: (model, nn.MSELoss(), g.opt, None, g.opt.param_groups),
        "boost: the model is a module, not function: for a function there is fs.train_step; MSELoss is no pair of init and "
        "update. Write fs.optim.adamw(...), or make one of a class of torch: fs.optim.from_torch(torch.optim.RMSprop, lr=...); "
        "criterion is called, SGD cannot be; lr_scheduler has a step(), list has none.",
    ),
}


class Five:
    """What boost may be given."""

    def __init__(self):
        self.one, self.other = model(), model()
        self.opt = sgd(self.one)
        self.steps = torch.optim.lr_scheduler.StepLR(self.opt, 1)
        self.row = torch.optim.lr_scheduler.SequentialLR(
            self.opt, [self.steps, torch.optim.lr_scheduler.StepLR(self.opt, 2)], [1]
        )
        self.foreign = torch.optim.lr_scheduler.StepLR(sgd(self.other), 1)


@pytest.mark.parametrize("name", MISGIVEN)
def test_what_boost_cannot_take_is_named_at_once(name):
    give, message = MISGIVEN[name]
    with pytest.raises(fs.ModuleError) as found:
        fs.run(lambda: fs.Booster().boost(*give(Five())), mesh=fs.make_mesh({"data": 1}))
    assert str(found.value) == message


def test_schedulers_of_any_maker_are_taken():
    class Third:
        def step(self):
            pass

    def main():
        given, third = Five(), Third()
        *_, row = fs.Booster().boost(given.one, given.opt, nn.MSELoss(), [1], given.row)
        *_, last = fs.Booster().boost(given.other, sgd(given.other), None, None, third)
        return row is given.row, last is third

    assert fs.run(main, mesh=fs.make_mesh({"data": 1})) == [(True, True)]


BOOSTED = "the model has been boosted already, perhaps by another device: each device makes its own, inside of main"
TWICE = {
    "both": (lambda b, m, o: b.boost(m, o), f"boost: {BOOSTED}; the optimizer has been boosted already"),
    "the model": (lambda b, m, o: fs.Booster(fs.FSDPPlugin()).boost(m), f"boost: {BOOSTED}"),
    "its structure": (lambda b, m, o: b.boost(m.module), f"boost: {BOOSTED}"),
    "the optimizer": (lambda b, m, o: b.boost(model(), o), "boost: the optimizer has been boosted already"),
    "a new optimizer": (lambda b, m, o: b.boost(m, sgd(m)), f"boost: {BOOSTED}"),
    "to begin with": (lambda b, m, o: b.init(m, sgd(m), nn.MSELoss()), f"init: {BOOSTED}"),
    "a lazy one": (
        lambda b, m, o: b.boost(nn.Sequential(nn.LazyLinear(3)), sgd(model())),
        "boost: 0.weight, 0.bias of the model has no shape yet: run it once on an example first",
    ),
}


@pytest.mark.parametrize("name", TWICE)
def test_what_was_boosted_before_or_has_no_shape_is_told(name):
    act, message = TWICE[name]
    with pytest.raises(fs.ModuleError, match=re.escape(message)):
        fs.run(lambda: act(*with_optimizer()), mesh=fs.make_mesh({"data": 1}))


OFFENDERS = {
    "precision": ("fp8", "precision is"),
    "unused": ("none", "unused is"),
    "seed": (-1, "seed is"),
    "axis": (("data", 3), "found 3"),
    "sync_batchnorm": (True, "sync_batchnorm=True has no meaning for stages"),
    "slices": (0, "slices is"),
    "options": (
        {"buckt": 1, "reduce": "fp32", "dynamic": 3},
        "'buckt'; .*; reduce is .*; dynamic is|reduce is .*; dynamic is",
    ),
    "zero_stage": (4, "zero_stage is"),
    "pipeline": (0, "pipeline is"),
    "microbatches": ("4", "microbatches is"),
    "schedule": ("1f2b", 'no schedule "1f2b"; did you mean'),
    "chunks": (0, "chunks is"),
    "balance": ("even", "no balance='even'"),
    "blocks": (3, "blocks is"),
    "recompute": (True, "recompute is"),
    "pipeline_axis": (3, "pipeline_axis is"),
}


@given(names=st.sets(st.sampled_from([*OFFENDERS]), min_size=1), mesh=st.sampled_from([None, MESH]))
def test_stages_name_all_that_is_wrong(names, mesh):
    with pytest.raises(fs.LayoutError) as found:
        fs.HybridParallelPlugin(
            **{"pipeline": 2, "mesh": mesh} | {name: value for name, (value, _) in OFFENDERS.items() if name in names}
        )
    told = str(found.value)
    missing = [name for name in names if not re.search(OFFENDERS[name][1], told)]
    assert not missing, told
    others = [name for name in {*OFFENDERS} - names if re.search(OFFENDERS[name][1], told)]
    assert {*others} <= ({"slices"} if "slices" in names else set()), told


@pytest.mark.parametrize("balance", [3, None, ["a", "b"], [1, True], [1, 0], [1.0, 1]])
def test_a_balance_is_a_word_or_numbers(balance):
    with pytest.raises(fs.LayoutError, match="balance"):
        fs.HybridParallelPlugin(pipeline=2, balance=balance)


def trained():
    one = model()
    return fs.Booster().boost(one, torch.optim.SGD(one.parameters(), lr=0.1))[0]


def lone(cls):
    one = model()
    return {"model": one, "optimizer": cls(one.parameters())}


ADVICE = {
    "model": ({"model": None}, "model is a Module, not None"),
    "a class": ({"model": nn.Linear}, "model is a Module, not <class"),
    "no shapes": ({"model": nn.LazyLinear(2)}, "model has no shapes before its first call: weight, bias"),
    "mesh": ({"mesh": {"data": 2}}, "mesh is a Mesh, not {'data': 2}"),
    "memory": ({"memory": "80GB"}, "memory is a whole number from 1 on, not '80GB'"),
    "no memory": ({"memory": 0}, "memory is a whole number from 1 on, not 0"),
    "bytes": ({"memory": True}, "memory is a whole number from 1 on, not True"),
    "no activations": ({"activations": None}, "activations is a whole number from 0 on, not None"),
    "negative activations": ({"activations": -1}, "activations is a whole number from 0 on, not -1"),
    "an optimizer": ({"optimizer": "adamw"}, "str is no pair of init and update"),
    "no optimizer": ({"optimizer": 0}, "int is no pair of init and update"),
    "an optimizer of another": (
        {"optimizer": torch.optim.SGD(model().parameters())},
        "SGD: in param_groups.0. are tensors that are no parameters of the model",
    ),
    "an optimizer with a search": (
        lone(torch.optim.LBFGS),
        "torch.optim.LBFGS cannot step on shards.*calls the loss function several times",
    ),
    "an option": ({"unitt": 3, "why": "so"}, "there is no unitt=, why=; there are axis=, balance=, .*zero_stage="),
    "precision": ({"precision": "fp8"}, "precision is .*not 'fp8'"),
    "axis": ({"axis": "rows"}, 'axis=: Mesh.* has no axis "rows"'),
    "slices": ({"slices": 4}, "slices= has no meaning without reproducible=True"),
    "options": ({"options": {"buckt": 1}}, "options has 'buckt'"),
    "unit": ({"unit": 0}, "unit is .*, not 0"),
    "stage": ({"stage": 3}, "stage is 1 or 2, not 3"),
    "shard axis": ({"shard_axis": "rows"}, 'shard_axis=: .* has no axis "rows"'),
    "schedule": ({"schedule": "1b1f"}, 'There is no schedule "1b1f"'),
    "microbatches": ({"microbatches": "4"}, "microbatches is a whole number from 1 on, not '4'"),
    "zero stage": ({"zero_stage": 4}, "zero_stage is 0, 1, 2 or 3, not 4"),
    "pipeline": ({"pipeline": 0}, "pipeline is a whole number from 1 on, not 0"),
}
FITTING = {"model": model(), "mesh": MESH, "memory": 10**9}


@pytest.mark.parametrize("name", ADVICE)
def test_a_question_that_cannot_be_answered_is_one_error(name):
    asked, told = ADVICE[name]
    with pytest.raises(fs.LayoutError, match=f"^auto_plugin: {told}"):
        fs.auto_plugin(**FITTING | asked)


OF_A_MODEL_AND_A_MESH = {"no shapes", "an optimizer of another", "an optimizer with a search", "axis", "shard axis"}


@given(names=st.sets(st.sampled_from([*{*ADVICE} - OF_A_MODEL_AND_A_MESH]), min_size=1))
def test_all_that_is_wrong_with_a_question_is_told(names):
    chosen = {frozenset(ADVICE[name][0]): name for name in sorted(names)}  # of several about one thing the last
    with pytest.raises(fs.LayoutError) as found:
        fs.auto_plugin(**FITTING | {key: x for name in chosen.values() for key, x in ADVICE[name][0].items()})
    told = str(found.value)
    assert told.startswith("auto_plugin: ")
    assert not [name for name in chosen.values() if not re.search(ADVICE[name][1], told)], told


def test_a_boosted_model_is_not_asked_about():
    with pytest.raises(fs.LayoutError, match="auto_plugin: model is boosted already: ask before that"):
        fs.run(lambda: fs.auto_plugin(trained(), MESH, 10**9), mesh=fs.make_mesh({"data": 1}))
