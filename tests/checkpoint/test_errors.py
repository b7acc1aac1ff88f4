"""Errors name all offenders, and the fix."""

import ast
import copy
import errno

import pytest
import torch

import fshard as fs
from fshard import P
from fshard.checkpoint import files
from fshard.errors import CheckpointError


def tree(**more):
    return {"a": torch.ones(2), "b": torch.zeros(3, dtype=torch.int64), "steps": 3, **more}


@pytest.fixture
def folder(tmp_path):
    fs.save(tmp_path / "run", tree(), metrics={"loss": 1})
    return tmp_path / "run"


def message(call, *args, **options):
    with pytest.raises(CheckpointError) as error:
        call(*args, **options)
    return str(error.value)


RESTORES = {
    "all differences": (
        {"target": {"a": torch.ones(4), "b": torch.zeros(3), "new": torch.ones(1), "other": 5}},
        "missing in the checkpoint: new, other. unexpected in the checkpoint: steps. a must have shape (4,); got (2,); "
        "b must have dtype f32; got i64 (cast=True converts it). Give only=",
    ),
    "arrays and values": (
        {"target": tree(a=1, steps=torch.ones(1))},
        "a must be a value; got an array; steps must be an array; got a value.",
    ),
    "no such name": ({"only": "c"}, "only='c' matches no leaf. The names begin with a, b, steps."),
    "no such patterns": (
        {"target": tree(), "only": ["a", "sate.**", "p*"]},
        "only='sate.**', 'p*' matches no leaf. The names begin with a, b, steps.",
    ),
    "one name for arrays": (
        {"rename": {"a": "x", "b": "x"}},
        "a name of its own; got a and b to x.",
    ),
    "one name for a value": (
        {"rename": lambda name: "b" if name == "steps" else name},
        "got b and steps to b.",
    ),
}


@pytest.mark.parametrize("case", RESTORES)
def test_unfit_restore_names_all_leaves_and_writes_nothing(case, folder):
    options, text = RESTORES[case]
    before = copy.deepcopy(options.get("target"))
    assert text in message(fs.restore, folder, **options)
    assert before is None or all(
        torch.equal(torch.as_tensor(x), torch.as_tensor(before[name]))
        for name, x in options["target"].items()
    )


@pytest.mark.parametrize("rules", [fs.fsdp("data"), P("data")])
def test_rules_without_a_mesh_raise(rules, folder):
    with pytest.raises(ValueError, match="mesh must be that of the rules; got None"):
        fs.restore(folder, rules)


def test_not_strict_returns_the_differences(folder):
    target = {"a": torch.zeros(4), "b": torch.ones(3, dtype=torch.int64), "new": 5}
    restored, differences = fs.restore(folder, target, strict=False)
    assert (differences.missing, differences.unexpected, differences.misshaped) == (
        ("new",),
        ("steps",),
        ("a must have shape (4,); got (2,)",),
    )
    assert (
        restored["a"].tolist() == [0] * 4
        and restored["b"].tolist() == [0] * 3
        and restored["new"] == 5
    )


def test_not_strict_leaves_objects_that_are_not_stored(folder):
    params = [torch.ones(1, requires_grad=True)]
    opt = torch.optim.SGD(params, lr=0.5)
    _, differences = fs.restore(folder, {"opt": opt}, strict=False)
    assert differences.missing == ("opt",) and opt.param_groups[0]["lr"] == 0.5


def test_cast_converts_dtypes(folder):
    target = tree(a=torch.zeros(2, dtype=torch.bfloat16), b=torch.ones(3, dtype=torch.float64))
    restored = fs.restore(folder, target, cast=True)
    assert (
        restored["a"].tolist() == [1, 1]
        and restored["b"].tolist() == [0, 0, 0]
        and restored["b"].dtype == torch.float64
    )


def test_state_of_another_optimizer_is_named(tmp_path):
    params = {"w": torch.ones(3)}
    fs.save(tmp_path, {"params": params, "state": fs.optim.adamw(0.1).init(params)})
    text = message(
        fs.restore,
        tmp_path,
        {"params": params, "state": fs.optim.sgd(0.1, momentum=0.9).init(params)},
    )
    assert (
        "missing in the checkpoint: state.momentum_buffer.w" in text
        and "state.exp_avg.w, state.exp_avg_sq.w" in text
    )
    assert "the state is of another optimizer" in text


ADAM = fs.optim.adam(0.1)
SCALED = fs.optim.loss_scaled(ADAM)


def nested(*names):
    """Return functions that put a state at a path of a tree, and take it from there."""

    def put(state):
        for name in reversed(names):
            state = {name: state}
        return state

    def take(tree):
        for name in names:
            tree = tree[name]
        return tree

    return put, take


@pytest.mark.parametrize("names", [(), ("state",), ("run", "opt")], ids=str)
@pytest.mark.parametrize("is_scaled", [True, False], ids=["with scale", "without scale"])
def test_checkpoint_with_another_loss_scale_names_the_way_that_restores_it(
    names, is_scaled, tmp_path
):
    stored, wanted = (SCALED, ADAM) if is_scaled else (ADAM, SCALED)
    put, take = nested(*names)
    params = {"w": torch.ones(3)}
    expected = stored.step({"w": torch.ones(3)}, stored.init(params), params)[1]
    fs.save(tmp_path, put(expected))
    target = put(wanted.init({"w": torch.ones(3)}))

    text = message(fs.restore, tmp_path, target)
    assert "loss_scaled" in text and "strict=False" in text and "another optimizer" not in text
    renaming = ast.literal_eval(text[text.index("rename=") + 7 : text.index(" and strict")])
    restored, differences = fs.restore(tmp_path, target, rename=renaming, strict=False)

    actual = take(restored)
    if is_scaled:
        torch.testing.assert_close(actual, expected["inner"], rtol=0, atol=0)
        assert not differences.missing
    else:
        torch.testing.assert_close(actual["inner"], expected, rtol=0, atol=0)
        assert actual["scale"] == 2.0**16 and not differences.unexpected


def test_leaves_that_cannot_be_saved_are_all_named(tmp_path):
    leaves = {
        "float8": torch.ones(2).to(torch.float8_e4m3fnuz),
        "sparse": torch.ones(2).to_sparse(),
        "meta": torch.ones(2, device="meta"),
        "set": {1, 2},
        "deep": [{"object": object()}],
    }
    text = message(fs.save, tmp_path / "x", leaves)
    for name in [*leaves, "deep.0.object"]:
        assert f"{name} " in text or name == "deep", name
    assert "must be a value of JSON; got set" in text
    assert not (tmp_path / "x").exists()


def test_arrays_on_other_devices_are_named(tmp_path):
    x, y = (fs.device_put(torch.ones(4), fs.Layout(fs.make_mesh({"data": n}))) for n in (2, 4))
    text = message(fs.save, tmp_path, {"a": x, "b": y})
    assert (
        "all arrays must be on the same devices" in text and "data=2" in text and "data=4" in text
    )


def test_arrays_made_outside_of_run_raise(tmp_path):
    """They would be those of the first device, on all."""
    mesh = fs.make_mesh({"data": 2})
    x = fs.device_put(torch.arange(4), fs.Layout(mesh, P("data")))
    fs.save(tmp_path / "a", {"x": x})
    for act in (
        lambda: fs.save(tmp_path / "b", {"x": x}),
        lambda: fs.restore(tmp_path / "a", {"x": x}),
    ):
        with pytest.raises(
            fs.errors.LayoutError, match="was made outside of fs.run and is used inside"
        ):
            fs.run(act, mesh=mesh)


def test_no_checkpoint_names_explain_absence_instead(folder):
    top = folder.parent
    assert f"{top} is no checkpoint: it has the checkpoints run." in message(fs.restore, top)
    assert f"it does not exist; {top} has run." in message(fs.restore, top / "x" / "y")
    (top / "empty").mkdir()
    assert "it has no index.json, but nothing" in message(fs.restore, top / "empty")
    (folder / "index.json").unlink()
    assert "it has no index.json, but " in message(fs.restore, folder)


@pytest.mark.parametrize(
    ("code", "method"),
    [
        (errno.ENOSPC, "write"),
        (errno.EROFS, "make_folder"),
        (errno.EROFS, "open_new"),
        (errno.EIO, "fsync"),
    ],
)
def test_disk_that_fails_is_named(code, method, tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(
            code, {errno.ENOSPC: "full", errno.EROFS: "read-only", errno.EIO: "broken"}[code]
        )

    monkeypatch.setattr(files.disk, method, refuse)
    text = message(fs.save, tmp_path / "new", tree())
    assert f"{tmp_path / 'new'}" in text and (
        "cannot write: " in text or "cannot be made: " in text
    )
    assert {errno.ENOSPC: "full", errno.EROFS: "read-only", errno.EIO: "broken"}[code] in text


def test_file_in_the_place_of_a_folder_is_named(tmp_path):
    (tmp_path / "x").write_text("")
    assert f"{tmp_path / 'x'} cannot be made: " in message(fs.save, tmp_path / "x", tree())
    assert "cannot be read" in message(fs.restore, tmp_path / "x")


def test_devices_with_other_values_are_named(tmp_path):
    def main():
        fs.save(tmp_path, {"steps": int(fs.axis_index("data") == 2)}, timeout=5)

    text = message(fs.run, main, mesh=fs.make_mesh({"data": 4}))
    assert (
        "have other names, shapes, layouts or values than device" in text
        and not (tmp_path / "index.json").exists()
    )


UNEQUAL = {
    "plain": lambda device: torch.full((6,), float(device)),
    "norm": lambda device: {
        "running_mean": torch.full((2,), float(device)),
        "running_var": torch.ones(2),
    },
    "array": lambda device: fs.Sharded(
        (4,), fs.Layout(devices(2)), (torch.tensor([0, 0, 0, device]),)
    ),
    "generator": lambda device: torch.Generator().manual_seed(device).get_state(),
}


def devices(n):
    return fs.make_mesh({"data": n})


@pytest.mark.parametrize("case", UNEQUAL)
def test_arrays_that_differ_between_devices_are_named(case, tmp_path):
    def main():
        leaf = UNEQUAL[case](int(fs.axis_index("data")))
        return message(
            fs.save,
            tmp_path,
            {"same": torch.ones(2), case: leaf, "sharded": torch.ones(1)},
            timeout=20,
        )

    for text in fs.run(main, mesh=devices(2)):
        name = "norm.running_mean" if case == "norm" else case
        assert f"got others of {name} on devices 0, 1." in text
    assert not (tmp_path / "index.json").exists()


def test_replicas_are_compared_within_their_group(tmp_path):
    """Devices of one shard of a mesh of two axes; shards of other devices differ."""
    mesh = fs.make_mesh({"data": 2, "model": 2})
    x = fs.device_put(torch.arange(4.0), fs.Layout(mesh, P("model")))
    fs.save(tmp_path / "equal", {"x": x})
    x.shards[3][0] = 7
    assert "x on devices 1, 3" in message(fs.save, tmp_path / "other", {"x": x})
