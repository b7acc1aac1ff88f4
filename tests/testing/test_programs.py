"""`certify_program`: right programs are accepted, published mistakes found at their causes; errors; the
command.
"""

import json
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fshard.command import main
from fshard.errors import PromiseError
from fshard.launching import pool
from fshard.testing import certify_program
from fshard.testing.programs.precision import Sends, watched_sends
from fshard.testing.programs.source import program_named
from tests.helpers.sampled import thorough
from tests.testing import programs
from tests.testing.programs import RIGHT, WRONG, ddp, mlp, rows_of, square, updates


@pytest.mark.parametrize("name", RIGHT)
def test_right_programs_are_accepted(certified, name):
    program, axes, options = RIGHT[name]
    certificate = certified(program, axes, **options)
    assert certificate.ok and len(certificate.rows) > 1
    assert certificate.steps == 3 and "It does not see" in str(certificate).replace("\n", " ")


@pytest.mark.parametrize("name", WRONG)
def test_published_mistakes_are_found(certified, name):
    program, axes, leaf, reason = WRONG[name]
    certificate = certified(program, axes, check=False)
    assert certificate.first.verdict == "DIVERGENT" and certificate.first.step == 0
    (row,) = (row for row in certificate.rows if row.leaf == leaf)
    assert row.verdict == "DIVERGENT" and row.step == 0
    assert reason in row.reason
    with pytest.raises(AssertionError, match="the sharded run is not the run on one device"):
        certificate.check()


@pytest.mark.parametrize("name", programs.UNREDUCED)
@pytest.mark.parametrize("steps", [1, thorough(2)])
def test_equal_changes_prove_no_reduction(certified, name, steps):
    program = partial(programs.large_gradients, **programs.UNREDUCED[name])
    certificate = certified(program, {"data": 2}, steps=steps, check=False)
    assert certificate.first.verdict == "DIVERGENT" and certificate.first.step == 0
    assert "it is not reduced along data" in certificate.first.reason


def test_methods_of_process_groups_are_restored_as_they_were():
    before = dict(vars(dist.ProcessGroup))
    with watched_sends(Sends()):
        assert vars(dist.ProcessGroup)["allgather"] is not before["allgather"]
    assert all(vars(dist.ProcessGroup)[name] is value for name, value in before.items())


def test_several_meshes_and_wrappers_of_names(certified):
    certificate = certified(ddp, [{"data": 2}, {"data": 4}], steps=1)
    assert [row.stage for row in certificate.rows] == ["data=2"] * 5 + ["data=4"] * 5
    assert {row.leaf for row in certificate.rows} == {
        "loss",
        "0.weight",
        "0.bias",
        "2.weight",
        "2.bias",
    }


@pytest.mark.parametrize(
    ("name", "leaf"),
    [
        ("times the rank", "2.weight"),
        ("detached router", "router.weight"),
        ("norm without experts", "experts.3"),
        ("frozen on one", "0.bias"),
        ("swapped", "experts.3"),
    ],
)
def test_the_first_leaf_is_that_of_the_backward(certified, name, leaf):
    """The layer that is used last has its gradient first; a gradient comes before the change."""
    program, axes, *_ = WRONG[name]
    assert certified(program, axes, check=False).first.leaf == leaf


def test_gradients_are_named_before_changes_under_adam(certified):
    rows = certified(partial(programs.scaled, by=programs.times_all), {"data": 2}, check=False).rows
    assert {row.subject for row in rows if row.leaf != "loss"} == {"gradient"}


def test_values_are_printed_until_they_differ(certified):
    first = certified(programs.off_by_little, {"data": 2}, check=False).first
    value, _, other = first.reason.partition(": ")[2].partition("]: ")[2].partition(" instead of ")
    assert value != other.partition(" ")[0] and float(value) == pytest.approx(
        float(other.partition(" ")[0]), rel=1e-6
    )


def test_what_is_accepted_is_said(certified):
    share = certified(programs.share_of_the_mean, {"data": 2})
    assert "each rank returns a share of the loss: 1 / the size of data" in share.rows[0].reason
    reduced = certified(programs.reduced_in_step, {"data": 2})
    assert "step() changes gradients; what the optimizer is given agrees" in reduced.rows[1].reason
    low = certified(RIGHT["fully_shard, bf16"][0], {"data": 2})
    assert low.notes == ("Bounds are those of torch.bfloat16, in which it computes or sends.",)


@pytest.mark.parametrize(
    ("program", "axes", "note"),
    [
        (programs.tensor_parallel, {"model": 2}, "Batches are equal along model, so its ranks"),
        (programs.dtensors, {"data": 2}, "Batches are equal along data, so its ranks"),
    ],
)
def test_equal_batches_are_said(certified, program, axes, note):
    certificate = certified(program, axes, same=[*axes])
    assert any(note in text for text in certificate.notes)
    assert note in " ".join(str(certificate).split())
    assert note in json.loads(certificate.json())["notes"][0]


@pytest.mark.parametrize("axis", ["data", *map(thorough, ("dp", "fsdp", "shard"))])
def test_equal_batches_along_an_axis_of_data_are_a_row(certified, axis):
    program = partial(programs.equal_rows, axis=axis)
    certificate = certified(program, {axis: 2}, steps=1, check=False)
    assert certificate.first.leaf == "batches" and not certificate.ok
    assert f"batches are equal along {axis}: each rank reads the same rows" in str(
        certificate.first.reason
    )
    assert f"--same {axis}" in certificate.first.reason
    assert certified(program, {axis: 2}, steps=1, same=(axis,)).ok


@pytest.mark.parametrize(
    ("program", "axes", "leaf", "reason"),
    [
        (
            programs.never_synchronized,
            {"data": 2},
            "2.weight",
            "set_requires_gradient_sync(False) was not followed by True",
        ),
        (
            partial(programs.large_gradients, mode="no_sync"),
            {"data": 2},
            "weight",
            "was each backward under no_sync()",
        ),
        (
            programs.no_sum_over_model,
            {"data": 2, "model": 2},
            "first.weight",
            "differs along model, where the sum over model is that of one process",
        ),
        (
            partial(programs.no_sum_over_model, is_averaged=False),
            {"data": 2, "model": 2},
            "first.weight",
            "the mean over data and the sum over model is that of one process",
        ),
        (
            programs.clipped_by_own_norms,
            {"data": 2},
            "2.weight",
            "times 0.998 on rank 1; all gradients have one factor per rank",
        ),
        (
            programs.padded,
            {"data": 2},
            "loss",
            "; a mean of means? Do ranks have different numbers of tokens? The mean by elements of "
            "leaf 2 of the batch that are not 0 is that of one process",
        ),
    ],
)
def test_causes_are_named(certified, program, axes, leaf, reason):
    certificate = certified(program, axes, steps=2, check=False)
    assert reason in certificate.first.reason and certificate.first.leaf == leaf
    assert str(certificate).startswith(f"first: {leaf}, step ")
    assert "zero_grad" not in str(certificate)


def test_a_factor_of_the_loss_is_no_mean_of_means(certified):
    first = certified(programs.larger_loss, {"data": 2}, steps=1, check=False).first
    assert first.leaf == "loss" and first.reason.endswith(", 1.5 times")
    assert "mean of means" not in first.reason


def test_leaves_with_one_reason_are_one_row_of_the_table_alone(certified):
    certificate = certified(programs.clipped_by_own_norms, {"data": 2}, steps=1, check=False)
    assert len(json.loads(certificate.json())["rows"]) == len(certificate.rows) == 5
    assert "3 leaves: 2.bias, " in " ".join(str(certificate).split())


def test_a_rank_that_keeps_gradients_is_named(certified):
    first = certified(programs.not_zeroed_on_one, {"data": 2}, check=False).first
    assert first.step == 1 and "it was not 0 when the step began on rank 1" in first.reason


def unequal_rows(rank, world):
    """Means of unequal parts: their mean is not that of all."""
    model, loss, _, step = ddp(rank, world)
    x, y = programs.data()
    return (
        model,
        loss,
        (x, y) if world == 1 else tuple(v[:3] if rank == 0 else v[3:] for v in (x, y)),
        step,
    )


def own_gradients(rank, world):
    """Gradients that are not reduced."""
    model = mlp()
    return model, square, rows_of(world.mesh), updates(model)


@pytest.mark.parametrize("program", [unequal_rows, own_gradients])
def test_other_mistakes_are_found(certified, program):
    with pytest.raises(AssertionError, match="step 0: the gradient"):
        certified(program, {"data": 2})


# -- errors ----------------------------------------------------------------------------------------


def unseeded(rank, world):
    model = nn.Linear(4, 3)
    return model, square, rows_of(world.mesh), updates(model)


def draws(rank, world):
    model = nn.Sequential(mlp(), nn.Dropout(0.5))
    return model, square, rows_of(world.mesh), updates(model)


def draws_without_a_loss(rank, world):
    model = nn.Sequential(mlp(), nn.Dropout(0.5))
    loss = lambda model, batch: square(model, batch).backward()  # noqa: E731
    return model, loss, rows_of(world.mesh), updates(model)


def draws_in_step(rank, world):
    model = mlp()

    def step():
        for x in model.parameters():
            x.data += torch.randn_like(x)
            x.grad = None

    return model, square, rows_of(world.mesh), step


def returns_three(rank, world):
    return nn.Linear(4, 3), 1, 2


def returns_a_text(rank, world):
    model = mlp()
    return model, lambda model, batch: "loss", rows_of(world.mesh), updates(model)


def numbers_without_rows(rank, world):
    """The batch of one process is no batch of all, and has no number for all."""
    model = mlp()
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(rank))
    return model, lambda model, batch: model(batch[0]).mean(), (x, 1.0 + rank), updates(model)


def ends(rank, world):
    if rank == 1:
        raise ZeroDivisionError("in the program")
    return ddp(rank, world)


def trains_nothing(rank, world):
    model = mlp().requires_grad_(False)
    return model, square, rows_of(world.mesh), lambda: None


def other_widths(rank, world):
    model, _, (x, y), step = ddp(rank, world)
    return (
        model,
        lambda model, batch: model(batch[0][:, :4]).sum(),
        (torch.cat([x, x[:, :rank]], 1), y),
        step,
    )


@pytest.mark.parametrize(
    ("program", "error", "text"),
    [
        (
            unseeded,
            PromiseError,
            "two runs must begin alike; got other values of weight, bias. Call torch.manual_seed",
        ),
        (draws, PromiseError, "the loss draws random numbers"),
        (ends, ZeroDivisionError, "in the program"),
        (trains_nothing, PromiseError, "must train parameters"),
        (other_widths, ValueError, "along data the batches of processes must differ in rows only"),
        (
            programs.unlike_shards,
            PromiseError,
            "must be shards of those in one process.* parts of w",
        ),
        (
            programs.keeps_gradients,
            PromiseError,
            "gradients must be 0 when a step begins; got those",
        ),
        (programs.keeps_and_detaches, PromiseError, "gradients must be 0 when a step begins"),
        (
            programs.moves_nothing,
            PromiseError,
            "step\\(\\) must update parameters; got the same ones",
        ),
        (partial(programs.by_loader, rows=8), PromiseError, "batch for each of 3 steps; got 1"),
        (
            returns_three,
            TypeError,
            r"must return \(model, loss, batch, step\).*got \(Linear, int, int\)",
        ),
        (returns_a_text, TypeError, "must return a number, None, a dict with 'loss'"),
        (draws_in_step, PromiseError, "must update alike when it is repeated; got other values"),
        (draws_without_a_loss, PromiseError, "the loss draws random numbers"),
        (numbers_without_rows, ValueError, r"got 1.0 and 2.0. Give numbers that differ as tensors"),
    ],
)
def test_what_cannot_be_certified_raises(certified, program, error, text, monkeypatch):
    """The next program runs in the same processes."""
    monkeypatch.setattr(pool, "GRACE", 1.0)  # seconds that the peers of a failed process have
    with pytest.raises(error, match=text):
        certified(program, {"data": 2})


@pytest.mark.parametrize(
    "arguments",
    [
        {"meshes": []},
        {"meshes": {"data": 2}, "steps": 0},
        {"meshes": {"data": 2}, "dtype": torch.int8},
    ],
)
def test_invalid_arguments_raise(arguments):
    with pytest.raises(
        ValueError, match="certify_program: a mesh, steps >= 1 and a dtype of torch.float64"
    ):
        certify_program(ddp, **arguments)


# -- the command -----------------------------------------------------------------------------------

FILE = """
import torch
from torch import nn

def program(rank, world):
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(3, 1))
    opt = torch.optim.SGD(model.parameters(), 0.1)
    x = torch.randn(8, 3).chunk(world)[rank]
    return model, lambda model, x: model(x).square().mean(), x, lambda: (opt.step(), opt.zero_grad())

def mistaken(rank, world):
    model, loss, x, step = program(rank, world)
    return model, lambda model, x: world * loss(model, x), x, step
"""


OTHER = """
from functools import partial
def three(rank, world, model): return 1
def none(): return 1
def by_words(rank, *, world): return 1
def three_with_default(rank, world, model=None): return 1
def any_number(*args): return 1
made = partial(three, model=1)
"""


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["{}/train.py"], "must be FILE:NAME, such as train.py:program, of a function"),
        (["{}/train.py:"], "Name the function, as train.py:program"),
        (["{}/missing.py:program"], "got no file"),
        (["{}:program"], "got no file"),
        (["train.py:program"], "got no file 'train.py'"),
        (["{}/train.py:other"], "got no function 'other' in"),
        (["{}/other.py:three"], "got three(rank, world, model). Write def three(rank, world)"),
        (["{}/other.py:none"], "got none(). Write def none(rank, world)"),
        (["{}/other.py:by_words"], "got by_words(rank)"),
        (["{}/text.py:program"], "must be a Python file; got"),
        (["{}/train.py:program", "--split", "context"], "a split must be like context=1"),
        (["{}/train.py:program", "--json", "{}/none/a.json"], "--json must be a file in a folder"),
        (["{}/train.py:program", "--html", "{}/none/a.html"], "--html must be a file in a folder"),
        (["{}/train.py:program", "--lr", "3"], "got --lr 3"),
        (["{}/train.py:program", "--parts", "*.qkv=a"], "parts must be like *.qkv.bias=64,16,16"),
    ],
)
def test_the_command_refuses_other_forms_in_one_line(
    tmp_path, capsys, monkeypatch, arguments, text
):
    """No process has started by then."""
    monkeypatch.setattr(pool, "start", None)
    (tmp_path / "train.py").write_text(FILE)
    (tmp_path / "other.py").write_text(OTHER)
    (tmp_path / "text.py").write_text("this is no Python")
    arguments = [argument.format(tmp_path) for argument in arguments]
    assert main(["certify", *arguments, "--mesh", "data=2"]) == 2
    error = capsys.readouterr().err
    assert text in error and error.count("\n") == 1


@pytest.mark.parametrize("name", ["three_with_default", "any_number", "made"])
def test_programs_that_take_two_arguments_are_named(tmp_path, name):
    (tmp_path / "other.py").write_text(OTHER)
    assert program_named(f"{tmp_path}/other.py:{name}").name == name


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"splits": {"context": 1}},
            "splits must be dims from 0 by axes of the mesh; got context=1",
        ),
        ({"splits": {"data": 7}}, "splits must be dims of batches; got data=7"),
        ({"same": ["context"]}, "same must be axes of the mesh; got 'context', and axes data"),
        ({"parts": {"*.qkv": (2, 2)}}, r"parts must be of parameters; got '\*.qkv'"),
        (
            {"parts": {"*.bias": (900, 99)}},
            r"parts of '\*.bias' must have all \d+ rows of \d.bias; got 900, 99, which are 999",
        ),
    ],
)
def test_options_that_fit_nothing_raise(certified, options, text):
    with pytest.raises(ValueError, match=text):
        certified(ddp, {"data": 2}, **options)


def test_programs_that_no_other_process_can_import_raise(certified):
    def made(rank, world):
        return ddp(rank, world)

    with pytest.raises(TypeError, match="must be a function at the top of a file.*made"):
        certified(made, {"data": 2})


IN_LOSS = """
from torch import nn

def averaged(mesh, x):
    return x / mesh.get_group("data").size()

def program(rank, world):
    model = nn.Linear(3, 1)
    return model, lambda model, x: averaged(world.mesh, model(x)).mean(), torch.ones(4, 3), lambda: 0
"""


@pytest.mark.parametrize(
    "text",
    [
        "def program(rank, world):\n    return world.mesh['data'], 1, 2, 3\n",
        f"import torch\n{IN_LOSS}",
    ],
    ids=["program", "helper of the loss"],
)
def test_an_axis_that_the_mesh_has_not_is_one_line(tmp_path, capsys, text):
    file = tmp_path / "train.py"
    file.write_text(text)
    assert main(["certify", f"{file}:program", "--mesh", "model=2"]) == 2
    error = capsys.readouterr().err
    assert "the program asks for axis 'data': add data=1 to --mesh" in error
    assert error.count("\n") == 1


def test_the_command_prints_the_certificate(tmp_path, capsys):
    (tmp_path / "train.py").write_text(FILE)
    out, page = tmp_path / "out.json", tmp_path / "out.html"
    assert (
        main(
            [
                "certify",
                f"{tmp_path}/train.py:mistaken",
                "--mesh",
                "data=2",
                "--steps",
                "1",
                "--json",
                str(out),
                "--html",
                str(page),
            ]
        )
        == 1
    )
    table = capsys.readouterr().out
    result = json.loads(out.read_text())
    assert "is 2 times" in table and not result["ok"]
    assert "First failure: <code>loss</code>" in page.read_text()
    assert [(row["mesh"], row["leaf"], row["verdict"]) for row in result["rows"]] == [
        ("data=2", name, "DIVERGENT") for name in ("loss", "weight", "bias")
    ]
    for arguments in (
        ["train.py:program", "--mesh", "data"],
        ["train.py:other", "--mesh", "data=1"],
    ):
        assert main(["certify", f"{tmp_path}/{arguments[0]}", *arguments[1:]]) == 2
    assert "a mesh must be like data=2,model=4; got 'data'" in capsys.readouterr().err
    (tmp_path / "beside.py").write_text("from train import program\n")
    assert main(["certify", f"{tmp_path}/beside.py:program", "--mesh", "data=2"]) == 0
