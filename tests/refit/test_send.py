"""A refit equals the engine's own loader, or a cast and a new layout, in every version; else nothing changes."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fshard as fs
from fshard import P
from fshard.errors import RefitError
from fshard.mesh.reshard import rounds
from fshard.refit import send
from tests.refit.engine import Rank
from tests.refit.families import FAMILIES

SHAPES = {"a": (9, 6), "b": (7,), "c": (), "d": (4, 2, 3)}
"""Of the arrays that are sent where nothing else is said."""


def _full(version, shapes=SHAPES):
    """Return the full values of a version: of the first, and with few others in the next ones."""
    generator = torch.Generator().manual_seed(0)
    full = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    for number in range(2, version + 1):
        for x in full.values():
            x.view(-1)[number % x.numel()] += number
    return full


def _layouts(mesh, full, specs):
    layouts = {}
    for (name, x), spec in zip(full.items(), specs, strict=True):
        layouts[name] = fs.Layout(mesh, spec if x.ndim else P())
    return layouts


SOURCES = [P.flat("x"), P.flat("x", "y"), P(), P.flat("y", at={"x": 1})]
TARGETS = [P(), P.flat("z"), P(at={"z": 0})]


# -- layouts -------------------------------------------------------------------------------------------------


@given(st.data())
def test_refit_by_layouts_equals_a_cast_of_every_version(data):
    trainer = fs.make_mesh({"x": 2, "y": 2})
    begin = data.draw(st.integers(0, 4), "first device of the engine")
    engine = fs.make_mesh({"z": 3}, devices=range(begin, begin + 3))
    specs = [data.draw(st.sampled_from(SOURCES)) for _ in SHAPES]
    specs = [
        spec.replace(shape=shape) if spec.is_flat else spec
        for spec, shape in zip(specs, SHAPES.values(), strict=True)
    ]
    targets = [data.draw(st.sampled_from(TARGETS)) for _ in SHAPES]
    targets[0] = data.draw(st.sampled_from([*TARGETS, P("z"), P(None, "z")]))
    dtype = data.draw(st.sampled_from([None, torch.bfloat16, torch.float64]))
    delta = data.draw(st.booleans(), "delta")

    def arrays(version):
        full = _full(version)
        return fs.device_put(full, _layouts(trainer, full, specs))

    refit = fs.refit.Refit(arrays(1), _layouts(engine, _full(1), targets), dtype=dtype, delta=delta)
    for version in (1, 2, 3):
        weights = refit.send(version, arrays(version))
        for name, x in _full(version).items():
            expected = x if dtype is None else x.to(dtype)
            assert torch.equal(fs.unshard(weights[name]), expected), (name, version)
    assert refit.version == 3


def test_refit_sends_what_its_plan_says():
    trainer = fs.make_mesh({"x": 4})
    engine = fs.make_mesh({"z": 2}, devices=range(4, 6))
    params = {"w": fs.device_put(torch.randn(8, 6), fs.Layout(trainer, P("x")))}
    refit = fs.refit.Refit(params, fs.Layout(engine, P(None, "z")), dtype=torch.bfloat16)
    with fs.ledger() as comm:
        refit.send(1)
    assert dict(comm.links) == dict(refit.plan.links)
    assert refit.plan.bytes == 8 * 6 * 2


def test_refit_of_a_small_change_sends_a_twentieth():
    trainer = fs.make_mesh({"x": 4})
    engine = fs.make_mesh({"z": 2}, devices=range(4, 6))
    generator = torch.Generator().manual_seed(0)
    full = torch.randn(400, 250, generator=generator).bfloat16()

    def arrays(x):
        return {"w": fs.device_put(x, fs.Layout(trainer, P.flat("x", shape=(400, 250))))}

    refit = fs.refit.Refit(arrays(full), fs.Layout(engine, P(None, "z")), delta=True)
    refit.send(1, arrays(full))
    is_changed = torch.rand(400, 250, generator=generator) < 0.02
    changed = torch.where(is_changed, full + 1, full)
    with fs.ledger() as comm:
        weights = refit.send(2, arrays(changed))
    assert torch.equal(fs.unshard(weights["w"]), changed)
    assert sum(comm.links.values()) <= 0.05 * refit.plan.bytes


@pytest.mark.parametrize("check", [False, True])
def test_refit_of_a_change_after_a_write_of_the_engine_is_full_and_right(check):
    trainer = fs.make_mesh({"x": 4})
    engine = fs.make_mesh({"z": 2}, devices=(4, 5))
    full = torch.randn(8, 6)

    def arrays(x):
        return {"w": fs.device_put(x, fs.Layout(trainer, P.flat("x", shape=(8, 6))))}

    refit = fs.refit.Refit(arrays(full), fs.Layout(engine, P("z")), delta=True, check=check)
    weights = refit.send(1, arrays(full))
    with torch.no_grad():
        weights["w"].mul_(2)
    full[0] += 1
    assert torch.equal(fs.unshard(refit.send(2, arrays(full))["w"]), full)


def test_refit_of_a_change_of_everything_sends_no_more_than_all():
    trainer = fs.make_mesh({"x": 4})
    engine = fs.make_mesh({"z": 2}, devices=(4, 5))
    full = torch.randn(64, 64)

    def arrays(x):
        return {"w": fs.device_put(x, fs.Layout(trainer, P("x")))}

    refit = fs.refit.Refit(arrays(full), fs.Layout(engine, P("z")), delta=True)
    refit.send(1, arrays(full))
    with fs.ledger() as comm:
        weights = refit.send(2, arrays(full + 1))
    assert torch.equal(fs.unshard(weights["w"]), full + 1)
    headers = 8 * len(refit.plan.links)
    assert sum(comm.links.values()) == refit.plan.bytes + headers


def test_refit_of_tied_arrays_sends_them_once_and_keeps_them_tied():
    trainer = fs.make_mesh({"x": 2})
    engine = fs.make_mesh({"z": 2}, devices=(2, 3))
    w = fs.device_put(torch.randn(4, 4), fs.Layout(trainer, P("x")))
    refit = fs.refit.Refit({"head": w, "embed": w}, fs.Layout(engine, P("z")))
    weights = refit.send(1)
    assert weights["head"] is weights["embed"]
    assert refit.plan.bytes == 4 * 4 * 4


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16])
def test_nans_are_no_other_values(source, dtype):
    trainer = fs.make_mesh({"x": 2})
    engine = fs.make_mesh({"z": 2}, devices=(2, 3))
    x = torch.randn(64, 32)
    x.view(torch.int32)[::3] = 0x7F812345  # signalling NaNs with bits of their own
    x[1::3] = -0.0
    x = x.to(source)
    params = {"w": fs.device_put(x, fs.Layout(trainer, P("x")))}
    refit = fs.refit.Refit(params, fs.Layout(engine, P(None, "z")), dtype=dtype)
    actual = fs.unshard(refit.send(1)["w"])
    expected = x.to(dtype or source)
    assert torch.equal(actual.isnan(), expected.isnan())
    assert torch.equal(actual.nan_to_num(), expected.nan_to_num())
    assert torch.equal(actual.signbit()[1::3], expected.signbit()[1::3])


def test_swapped_signs_of_wide_elements_have_another_digest(monkeypatch):
    trainer = fs.make_mesh({"x": 1})
    engine = fs.make_mesh({"z": 1}, devices=(1,))
    x = torch.tensor([1.0, -1.0, 2.0], dtype=torch.float64)
    params = {"a": fs.device_put(x, fs.Layout(trainer))}
    refit = fs.refit.Refit(params, fs.Layout(engine))
    run_rounds = send.run_rounds

    def swapped(rounds, index, old, new, *rest):
        run_rounds(rounds, index, old, new, *rest)
        if index == 1:
            new[0][[0, 1]] = new[0][[1, 0]]

    monkeypatch.setattr(send, "run_rounds", swapped)
    with pytest.raises(RefitError, match="a arrived with other values"):
        refit.send(1)


def test_send_needs_the_new_shards_and_one_round(monkeypatch):
    monkeypatch.setattr(rounds, "ROUND", 64 << 10)
    trainer = fs.make_mesh({"x": 4})
    engine = fs.make_mesh({"z": 2}, devices=(4, 5))
    layout = fs.Layout(trainer, P.flat("x", shape=(1024, 1024)))
    params = {name: fs.device_put(torch.randn(1024, 1024), layout) for name in "ab"}
    refit = fs.refit.Refit(params, fs.Layout(engine, P(None, "z")))
    new_shards = 4 << 20
    digests = 1 << 20  # some rows of numbers of a chunk
    with fs.memory.limit() as memory:
        refit.send(1)
    assert memory.peak() <= new_shards + (64 << 10) + digests


def test_send_of_arrays_that_no_module_has_named_is_a_version():
    trainer = fs.make_mesh({"x": 2})
    engine = fs.make_mesh({"z": 2}, devices=(2, 3))
    params = fs.shard_params({"w": torch.arange(8.0)}, P.flat("x"), mesh=trainer)
    refit = fs.refit.Refit(params, fs.Layout(engine, P("z")))
    weights = refit.send(1, {"w": params["w"] + 1})  # of no unit
    assert torch.equal(fs.unshard(weights["w"]), torch.arange(8.0) + 1)


def test_refit_keeps_no_arrays_of_an_earlier_version_alive():
    trainer = fs.make_mesh({"x": 2})
    engine = fs.make_mesh({"z": 2}, devices=(2, 3))

    def arrays():
        return {"w": fs.device_put(torch.randn(8), fs.Layout(trainer, P("x")))}

    first = arrays()
    refit = fs.refit.Refit(first, fs.Layout(engine, P("z")))
    shard = weakref.ref(first["w"].shards[0])
    refit.send(1)
    refit.send(2, arrays())
    del first
    gc.collect()
    assert shard() is None
    with pytest.raises(RefitError, match="source must be given"):
        refit.send(3)


def test_failed_delta_is_followed_by_a_full_version():
    trainer = fs.make_mesh({"x": 2})
    engine = fs.make_mesh({"z": 2}, devices=(2, 3))
    params = {"w": fs.device_put(torch.arange(8.0), fs.Layout(trainer, P("x")))}
    refit = fs.refit.Refit(params, fs.Layout(engine, P("z")), delta=True)
    weights = refit.send(1, params)
    weights["w"].shards[1].data[2] = 7.5  # a write that torch does not count
    with pytest.raises(RefitError, match="w arrived with other values on device 3"):
        refit.send(2, params)
    assert torch.equal(fs.unshard(refit.send(3, params)["w"]), torch.arange(8.0))


# -- traces --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_refit_by_traces_equals_the_loader_of_every_rank(family, size, delta):
    first = {name: x.detach() for name, x in FAMILIES[family].model().state_dict().items()}
    is_tied = "lm_head.weight" in first and family in ("gpt2", "gemma")
    second = {name: x.clone() for name, x in first.items()}
    for x in second.values():
        x.view(-1)[0] += 1
    if is_tied:
        first.pop("lm_head.weight")
        second.pop("lm_head.weight")

    def program():
        trainer = fs.make_mesh({"x": 2}, devices=range(2))
        engine_mesh = fs.make_mesh({"z": size}, devices=range(1, size + 1))  # one device is in both
        layouts = {
            name: fs.Layout(trainer, P.flat("x", shape=tuple(x.shape))) for name, x in first.items()
        }
        params = fs.device_put(first, layouts)
        engine = traced = None
        if engine_mesh.is_member:
            rank = Rank(fs.axis_index("device") - 1, size)
            engine = FAMILIES[family].engine(rank).to(torch.bfloat16)
            traced = fs.refit.trace(engine.load_weights, params, engine)
        refit = fs.refit.Refit(params, traced, mesh=engine_mesh, into=engine, delta=delta)
        for version, full in enumerate((first, second), 1):
            assert refit.send(version, fs.device_put(full, layouts)) is None
            if engine is not None:
                expected = FAMILIES[family].engine(rank).to(torch.bfloat16)
                expected.load_weights(full.items())
                for (name, x), y in zip(
                    engine.named_parameters(), expected.parameters(), strict=True
                ):
                    assert torch.equal(x, y), (name, version)
        return refit.plan

    plans = fs.run(program, mesh=fs.make_mesh({"device": size + 1}))
    assert plans[0].bytes == plans[-1].bytes  # all devices have one plan


# -- errors --------------------------------------------------------------------------------------------------


def _refit(**options):
    trainer = fs.make_mesh({"x": 2})
    engine = fs.make_mesh({"z": 2}, devices=(2, 3))
    full = {"a": torch.zeros(4, 2), "b": torch.zeros(4)}
    params = fs.device_put(full, fs.Layout(trainer, P("x")))
    return params, fs.refit.Refit(params, fs.Layout(engine, P("z")), **options)


def test_refit_by_layouts_without_a_leaf_names_it():
    params, _ = _refit()
    engine = fs.Layout(fs.make_mesh({"z": 2}, devices=(2, 3)), P("z"))
    with pytest.raises(RefitError, match="has no layout for b"):
        fs.refit.Refit(params, {"a": engine})
    with pytest.raises(RefitError, match="has what the source has not: c"):
        fs.refit.Refit(params, {"a": engine, "b": engine, "c": engine})


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda params: {"a": params["a"]}, "b is missing"),
        (lambda params: params | {"c": params["b"] + 0}, "c was not in it"),
        (lambda params: {"a": params["a"], "d": params["b"]}, "b is missing"),
        (lambda params: params | {"b": params["b"].double()}, "b must be like"),
        (lambda params: params | {"b": fs.reshard(params["b"], P())}, "b must be like"),
        (lambda params: params | {"b": params["a"]}, "b was not tied, and b is tied to a"),
    ],
    ids=["missing", "extra", "renamed", "dtype", "layout", "tied"],
)
def test_send_of_another_tree_names_the_leaf(change, text):
    params, refit = _refit()
    refit.send(1)
    with pytest.raises(RefitError, match=text):
        refit.send(2, change(params))
    assert refit.version == 1


@pytest.mark.parametrize("version", [1, 0, "2", None])
def test_send_of_a_version_that_is_no_later_raises(version):
    _, refit = _refit()
    refit.send(1)
    with pytest.raises(RefitError, match="version must be an integer above"):
        refit.send(version)


def test_second_version_without_arrays_raises():
    params, refit = _refit()
    refit.send(1)
    with pytest.raises(RefitError, match=r"source must be given.*send\(2, params\)"):
        refit.send(2)
    assert refit.send(2, params) is not None


def test_refit_of_sums_names_the_leaf():
    trainer = fs.make_mesh({"x": 2})
    layout = fs.Layout(trainer, P(unreduced="x"))
    x = fs.device_put(torch.ones(4), layout)
    engine = fs.make_mesh({"z": 2}, devices=(2, 3))
    with pytest.raises(RefitError, match="w of the source must have no sums"):
        fs.refit.Refit({"w": x}, fs.Layout(engine))


def test_refit_by_a_trace_outside_of_the_devices_raises():
    params, _ = _refit()
    engine = {"a": torch.zeros(4, 2)}
    traced = fs.refit.trace(lambda ws: engine["a"].copy_(dict(ws)["a"]), params, engine, unused="b")
    with pytest.raises(RefitError, match="in a function of fs.run"):
        fs.refit.Refit(params, traced, mesh=fs.make_mesh({"z": 1}, devices=(2,)), into=engine)


def test_engine_whose_tensors_have_changed_keeps_its_version():
    def program():
        trainer = fs.make_mesh({"x": 1}, devices=(0,))
        mesh = fs.make_mesh({"z": 1}, devices=(1,))
        params = fs.device_put({"a": torch.ones(4)}, fs.Layout(trainer))
        engine = traced = None
        if mesh.is_member:
            engine = {"a": torch.zeros(4)}
            traced = fs.refit.trace(lambda ws: engine["a"].copy_(dict(ws)["a"]), params, engine)
        refit = fs.refit.Refit(params, traced, mesh=mesh, into=engine)
        if engine is not None:
            engine["a"] = torch.zeros(5)
        refit.send(1)

    with pytest.raises(RefitError, match=r"a of the engine must be as it was traced, f32\[4\]"):
        fs.run(program, mesh=fs.make_mesh({"device": 2}))


@pytest.mark.parametrize("element", range(4))
def test_value_that_changes_on_the_way_is_named_and_the_engine_keeps_what_it_has(
    monkeypatch, element
):
    params, refit = _refit()
    before = refit.send(1)
    values = {name: fs.unshard(x) for name, x in before.items()}
    run_rounds = send.run_rounds

    def damaged(rounds, index, old, new, *rest):
        run_rounds(rounds, index, old, new, *rest)
        if index == 3:  # the second device of the engine
            new[0].view(-1)[element] += 1

    monkeypatch.setattr(send, "run_rounds", damaged)
    with pytest.raises(RefitError, match=r"a arrived with other values on device 3") as error:
        refit.send(2, {name: x + 1 for name, x in params.items()})
    assert "All processes keep version 1" in str(error.value)
    assert refit.version == 1
    for name, x in before.items():
        assert torch.equal(fs.unshard(x), values[name])


def test_swapped_elements_have_another_digest(monkeypatch):
    trainer = fs.make_mesh({"x": 1})
    engine = fs.make_mesh({"z": 1}, devices=(1,))
    params = {"a": fs.device_put(torch.arange(6.0), fs.Layout(trainer))}
    refit = fs.refit.Refit(params, fs.Layout(engine))
    run_rounds = send.run_rounds

    def swapped(rounds, index, old, new, *rest):
        run_rounds(rounds, index, old, new, *rest)
        if index == 1:
            new[0][[1, 4]] = new[0][[4, 1]]

    monkeypatch.setattr(send, "run_rounds", swapped)
    with pytest.raises(RefitError, match="a arrived with other values"):
        refit.send(1)
