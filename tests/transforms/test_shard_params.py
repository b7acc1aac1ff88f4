"""Rules among rules, and units that nobody has named."""

import pytest
import torch

import fshard as fs
from fshard import P
from fshard.mesh.layout import flatten


def lying(params, rules):
    mesh = fs.make_mesh({"data": 2})
    leaves, _ = flatten(fs.shard_params(params, rules, mesh=mesh))
    return [(str(fs.typeof(x)), x.layout.unit) for x in leaves]


def blocks(n):
    return [{"w": torch.ones(4, 4)} for _ in range(n)]


W = "f32[4, 4]"
FLAT = f"{W}{{flat:data}}"
TREE = {"blocks": blocks(2), "head": torch.ones(4, 4)}
ONE_EACH = [(FLAT, "blocks[0]"), (FLAT, "blocks[1]"), (W, "head")]


@pytest.mark.parametrize(
    "rules",
    [
        {"blocks": fs.fsdp("data"), "head": P()},
        {"blocks[*].w": fs.fsdp("data"), "**": P()},
        lambda path, leaf: P() if path == "head" else fs.fsdp("data"),
    ],
    ids=["tree", "patterns", "function"],
)
def test_fsdp_combines_with_other_rules(rules):
    assert lying(TREE, rules) == ONE_EACH


def test_units_by_size_of_two_rules_differ():
    rules = {"blocks": fs.fsdp("data", unit=1), "head": fs.fsdp("data", unit=2)}
    assert lying(TREE, rules) == [(FLAT, "unit 0"), (FLAT, "unit 1"), (FLAT, "unit 0 of rule 1")]


def test_nested_rules_with_errors_raise():
    with pytest.raises(
        ValueError, match='fsdp: no leaf is in a unit "zz". The leaves are head; a pattern begins where'
    ):
        lying(TREE, {"blocks": P(), "head": fs.fsdp("data", unit="zz")})
    with pytest.raises(ValueError) as error:
        lying(TREE, {"blocks": fs.fsdp("nope"), "head": P()})
    wrong = 'Layout with P.flat("nope"): Mesh(data=2; virtual, cpu) has no axis "nope". Its axes are "data".'
    assert str(error.value) == f"shard_params: blocks[0].w, blocks[1].w: {wrong}"


def test_default_unit_is_a_repeated_block():
    def units(params):
        return [unit for _, unit in lying(params, fs.fsdp("data"))]

    emb, head = torch.ones(4, 4), torch.ones(4)
    assert units({"emb": emb, "blocks": blocks(3), "head": head}) == [
        "blocks[0]",
        "blocks[1]",
        "blocks[2]",
        "emb",
        "head",
    ]
    assert units((emb, blocks(3), head)) == ["0", "1[0]", "1[1]", "1[2]", "2"]
    assert units((blocks(2), blocks(3))) == ["0[0]", "0[1]", "1[0]", "1[1]", "1[2]"]
    model = torch.nn.Sequential(
        torch.nn.Embedding(4, 4), torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(2)])
    )
    assert units(fs.functionalize(model)[1]) == ["0", "1[0]", "1[0]", "1[1]", "1[1]"]
    assert units({"blocks": [{"mlp": blocks(2)}, {"mlp": blocks(2)}]}) == ["blocks[0]"] * 2 + ["blocks[1]"] * 2
    assert units({"blocks": blocks(1)}) == ["blocks[0]"]
