"""Options of a step: each is defined in one place, from which keywords, checks and help follow."""

import ast
import inspect
import pydoc
from dataclasses import fields, replace
from pathlib import Path
from textwrap import wrap

import pytest
import torch

import fshard as fs
from fshard import P
from fshard.transforms.options import OPTIONS, Options, StepOptions, Use, plugin_options

PACKAGE = Path(fs.__file__).parent
MESH = fs.make_mesh({"data": 2})
FUNCTIONS = {
    "train_step": (fs.train_step, set()),
    "value_and_grad": (fs.value_and_grad, {Use.UPDATE}),
    "grad": (fs.grad, {Use.UPDATE}),
    "evaluate": (fs.evaluate, {Use.UPDATE, Use.BACKWARD}),
}


def options(**given):
    return Options(mesh=MESH, batch=P("data"), **given)


def keywords(function):
    parameters = inspect.signature(function).parameters.values()
    return [each.name for each in parameters if each.kind is each.KEYWORD_ONLY]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_keywords_of_a_function_are_the_options_of_its_phases(name):
    function, without = FUNCTIONS[name]
    expected = [name for name, option in OPTIONS.items() if not option.uses & without]
    assert keywords(function) == expected


def test_every_option_has_one_description_and_its_type_in_the_signature():
    for name, option in OPTIONS.items():
        assert option.description.endswith("."), name
        assert "Annotated" not in option.annotation, name
    assert [each.name for each in fields(Options)] == [*OPTIONS]


def test_help_of_train_step_describes_each_option_once_on_two_screens():
    text = pydoc.render_doc(fs.train_step, renderer=pydoc.plaintext)
    for name in OPTIONS:
        assert text.count(f"\n        {name}: ") == 1, name
    lines = [row for line in text.splitlines() for row in wrap(line, 120) or [""]]
    assert len(lines) <= 120


@pytest.mark.parametrize("name", ["value_and_grad", "evaluate"])
def test_help_describes_the_options_that_a_function_takes_alone(name):
    function, _ = FUNCTIONS[name]
    text = inspect.getdoc(function)
    described = [name for name in OPTIONS if f"\n    {name}: " in text]
    assert described == keywords(function)


# A function or class with many fields of the same names as options, which are not those of a step.
OTHERS = {
    "booster/plugins.py": "the fields of a plugin, of which it makes a step",
    "pipeline/execution/pipelined.py": "a pipeline as a function, below steps",
}


def option_names(node):
    """Return the options that a signature, a class or a collection of words lists."""
    match node:
        case ast.FunctionDef(args=ast.arguments(args=args, kwonlyargs=more)):
            names = {each.arg for each in [*args, *more]}
        case ast.ClassDef(body=body):
            annotated = [each.target for each in body if isinstance(each, ast.AnnAssign)]
            names = {each.id for each in annotated if isinstance(each, ast.Name)}
        case ast.List(elts=values) | ast.Tuple(elts=values) | ast.Set(elts=values):
            names = {each.value for each in values if isinstance(each, ast.Constant)}
        case _:
            names = set()
    return names & {*OPTIONS}


def test_nothing_but_the_options_themselves_lists_their_names():
    lists = []
    for path in sorted(PACKAGE.rglob("*.py")):
        file = path.relative_to(PACKAGE).as_posix()
        if file == "transforms/options.py" or file in OTHERS:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = option_names(node) - {"mesh", "batch", "schedule", "axis"}
            is_signature = isinstance(node, ast.FunctionDef | ast.ClassDef)
            if len(names) >= (5 if is_signature else 3):
                lists.append((file, node.lineno, sorted(names)))
    assert lists == []


def test_options_name_all_invalid_ones_in_one_error():
    with pytest.raises(ValueError, match=r"accumulate must .* got 0; reduce must .*; bucket must"):
        options(accumulate=0, reduce="fp32", bucket=-1)


def test_a_function_names_itself_in_the_error_of_an_option():
    for name, (function, _) in FUNCTIONS.items():
        arguments = (None, None) if name == "train_step" else (None,)
        with pytest.raises(ValueError, match=f"^{name}: live_units must be an integer >= 1, got 0"):
            function(*arguments, mesh=MESH, batch=P("data"), live_units=0)
        with pytest.raises(TypeError, match=f"^{name} must be given mesh= and batch="):
            function(*arguments)


def test_options_of_the_update_raise_elsewhere():
    with pytest.raises(ValueError, match=r"^value_and_grad has no option donate, precision\. "):
        fs.value_and_grad(None, mesh=MESH, batch=P("data"), donate=True, precision="bf16")


def test_replaced_options_are_completed_again():
    """Derived values stay out of the given ones, so that another choice derives anew."""
    given = options(reproducible=True, precision="fp16", aux="mean", local="data")
    step = StepOptions.of(given, None, caller="train_step")
    assert (step.slices, step.compute, step.reduce) == (8, torch.float16, torch.float32)
    assert step.has_aux and step.local == ("data",)
    plain = replace(given, reproducible=False, precision=None, aux=None, local=())
    step = StepOptions.of(plain, None, caller="train_step")
    assert (step.slices, step.compute, step.reduce) == (None, None, None)
    assert not step.has_aux and step.local == () and step.reduce_once


@pytest.mark.parametrize(
    ("device_type", "expected"), [("cpu", 8 << 20), ("cuda", 25 << 20), ("meta", 25 << 20)]
)
def test_default_bucket_is_that_of_the_devices_of_the_mesh(device_type, expected):
    """A plan, which runs the step on an abstract mesh, has buckets of GPUs."""
    mesh = replace(MESH, device_type=device_type)
    step = fs.train_step(lambda p, x: p.sum(), fs.optim.sgd(0.1), mesh=MESH, batch=P("data"))
    assert step.options.bucket is None
    assert step.replace(mesh=mesh).gradient.options.bucket == expected
    assert step.replace(mesh=mesh, bucket=0).gradient.options.bucket == 0


@pytest.mark.parametrize(
    "options", [{"acumulate": 2}, {"loss": len}, {"recompute": 1}, {"axis": "pipe"}, {"opt": None}]
)
def test_replace_refuses_the_options_that_train_step_refuses(options):
    mesh = fs.make_mesh({"data": 2})
    step = fs.train_step(lambda p, x: p.sum(), fs.optim.sgd(0.1), mesh=mesh, batch=P("data"))
    with pytest.raises(ValueError, match=f"TrainStep.replace has no option {next(iter(options))}"):
        step.replace(**options)
    assert step.replace(accumulate=2).options.accumulate == 2


def test_plugins_take_the_options_that_no_field_of_theirs_is():
    of_losses = {"bucket", "in_flight", "prefetch", "live_units", "reduce", "reduce_once"}
    assert {*plugin_options(in_stages=False)} == of_losses
    of_stages = {"live_units", "reduce", "skips", "inputs", "dynamic"}
    assert {*plugin_options(in_stages=True)} == of_stages


def test_step_is_printed_with_the_options_that_differ_from_their_defaults():
    opt = fs.partition_optimizer(fs.optim.sgd(0.1), mesh=MESH, axis="data", stage=2)
    step = fs.train_step(len, opt, mesh=MESH, batch=P("data"), accumulate=4)
    mesh = f"mesh={MESH!r}"
    assert repr(step) == (
        "TrainStep(loss_fn=<built-in function len>, "
        f"opt=ShardedOptimizer(axis='data', stage=2, {mesh}), "
        f'options=Options({mesh}, batch=P("data"), accumulate=4))'
    )


def test_sharded_optimizer_is_printed_with_the_memories_of_its_state():
    opt = fs.partition_optimizer(
        fs.optim.sgd(0.1), mesh=MESH, axis=("data",), stage=1, state_memory="host"
    )
    assert repr(opt) == (
        f"ShardedOptimizer(axis='data', stage=1, mesh={MESH!r}, state_memory='host')"
    )
