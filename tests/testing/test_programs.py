"""`certify_program`: 20 right programs are accepted, ten published mistakes found; errors; the
command.
"""

import json

import pytest
import torch
from torch import nn

from fshard.command import main
from fshard.errors import PromiseError
from fshard.launching import pool
from fshard.testing import certify_program
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
    (row,) = (row for row in certificate.rows if row.leaf == leaf)
    assert row.verdict == "DIVERGENT" and row.step == 0 and reason in row.reason
    with pytest.raises(AssertionError, match="the sharded run is not the run on one device"):
        certificate.check()


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


def ends(rank, world):
    if rank == 1:
        raise ZeroDivisionError("in the program")
    return ddp(rank, world)


def trains_nothing(rank, world):
    model = mlp().requires_grad_(False)
    return model, square, rows_of(world.mesh), lambda: None


def other_start(rank, world):
    model = mlp()
    if world > 1:
        model[0].bias.data += 1
    return model, square, rows_of(world.mesh), updates(model)


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
        (other_start, PromiseError, r"on mesh data=2 .* got other .* 0.bias"),
        (other_widths, ValueError, "must differ in rows only"),
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
    assert main(["certify", f"{tmp_path}/train.py:program", "--mesh", "data=2"]) == 0
