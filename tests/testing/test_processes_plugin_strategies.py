"""The testing kit: real processes, the pytest plugin, the strategies."""

import os
import signal
import subprocess
import sys
import time
from itertools import permutations

import optree
import pytest
import torch
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

import fshard as fs
from fshard import P
from fshard.mesh.layout import flatten
from fshard.testing.processes import Processes, run_processes
from fshard.testing.strategies import (
    DTYPES,
    axis_subsets,
    dyadic,
    layouts,
    meshes,
    shapes_for,
    specs,
)
from tests.ended import gone
from tests.transforms.models import Couple, Pair, models

# -- processes --------------------------------------------------------------------------------------------------


class TwoNumbersError(Exception):
    """An error that pickle cannot make again: it passes one argument on and wants two."""

    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


def rank():
    return int(os.environ["RANK"])


def describe(*args, **kwargs):
    names = ("WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    return rank(), [os.environ[name] for name in names], torch.get_num_threads(), args, kwargs


def total(n):
    return fs.run(lambda: fs.psum(torch.tensor([1.0, rank()]), "data"), mesh=fs.make_mesh({"data": n}))[0]


def fail(n, who, error):
    total(n)
    if rank() == who:
        sys.stderr.write("a last word")
        raise error
    total(n)


def fail_unportably():
    raise TwoNumbersError(1, 2)


def return_a_lambda():
    return lambda: None


def hang(who):
    if rank() == who:
        time.sleep(100)


def die(n, who, how):
    total(n)
    if rank() == who:
        how()
    total(n)


def stop_at_once():
    os._exit(3)


def kill_itself():
    os.kill(os.getpid(), signal.SIGKILL)


def stay_away(n, who):
    total(n)
    if rank() != who:
        total(n)


def send_and_end():
    mesh = fs.make_mesh({"data": 2})

    def device():
        if fs.axis_index("data") == 0:
            fs.send(torch.ones(1 << 20), "data", to=1)
            return None
        time.sleep(0.5)
        return fs.recv(torch.empty(1 << 20), "data", source=0).sum().item()

    return fs.run(device, mesh=mesh)[0]


def leave():
    total(2)
    fs.mesh.runtimes.process.leave()
    return os.getpid()


def identify():
    return os.getpid()


def notes(error):
    return "\n".join(error.value.__notes__)


def test_processes_have_torchrun_variables_and_ordered_results(four):
    expected = [(each, ["4", str(each), "4", "127.0.0.1"], 1, (1,), {"two": 2}) for each in range(4)]
    assert four.run(describe, 1, two=2) == expected


def test_run_processes_ends_its_processes():
    results = run_processes(identify, 2)
    assert len(set(results)) == 2
    assert all(gone(pid) for pid in results)


def test_run_processes_sets_environment():
    assert run_processes(os.getenv, 1, "FSHARD_CHECK", environment={"FSHARD_CHECK": "1"}) == ["1"]


def test_processes_failure_raises_first_with_others_as_notes():
    with Processes(2) as pool:
        with pytest.raises(KeyError, match="oops") as error:
            pool.run(fail, 2, 1, KeyError("oops"))
        again = pool.run(total, 2)  # the pool goes on
    said = notes(error)
    assert "in process 1 of 2:\nTraceback" in said
    assert "in fail\n    raise error" in said
    assert "process 1 wrote to stderr:\na last word" in said
    assert "then process 0 failed:\nLostProcessError" in said, said
    assert [x.tolist() for x in again] == [[2, 1], [2, 1]]


def test_processes_survive_a_failure(link):
    with Processes(2, environment=link) as pool:  # of its own: torch.func.grad keeps gloo's connections open
        before = pool.run(identify)
        with pytest.raises(KeyError):
            pool.run(fail, 2, 0, KeyError("oops"))
        assert pool.run(identify) == before


def test_processes_unpicklable_error_becomes_runtime_error(two):
    with pytest.raises(RuntimeError, match="TwoNumbersError: 1 and 2") as error:
        two.run(fail_unportably)
    assert "in fail_unportably" in notes(error)


def test_processes_unpicklable_result_raises(two):
    with pytest.raises((AttributeError, TypeError, RuntimeError), match="pickle"):
        two.run(return_a_lambda)


def test_processes_unpicklable_function_raises_before_running(two):
    with pytest.raises(AttributeError, match="pickle") as error:
        two.run(lambda: None)
    assert "must be at the top level of a module" in notes(error)


def test_processes_hang_raises_with_stacks():
    with Processes(2, timeout=8) as pool:
        pids = pool.run(identify)
        with pytest.raises(RuntimeError, match="process 1 of 2 did not finish hang within 8 s") as error:
            pool.run(hang, 1)
        assert "in hang" in notes(error)
        assert all(gone(pid) for pid in pids)
        assert [x.tolist() for x in pool.run(total, 2)] == [[2, 1], [2, 1]]


@pytest.mark.parametrize(
    ("how", "words"), [(stop_at_once, "ended with exit code 3"), (kill_itself, "was killed by SIGKILL")]
)
def test_processes_death_is_the_reported_cause(how, words):
    with pytest.raises(RuntimeError, match=f"process 1 of 2 {words}") as error:
        run_processes(die, 2, 2, 1, how)
    assert "then process 0 failed" in notes(error)


def test_collective_with_finished_process_raises():
    with pytest.raises(fs.errors.LostProcessError, match=r"psum of float32\[2\] over data .* cannot end"):
        run_processes(stay_away, 2, 2, 0)
    with pytest.raises(fs.errors.DeadlockError, match="process 0: has finished"):
        run_processes(stay_away, 2, 2, 0, environment={"FSHARD_CHECK": "1"})


def test_message_of_ended_process_arrives():
    assert run_processes(send_and_end, 2) == [None, float(1 << 20)]


def test_processes_function_may_leave_the_group(two):
    first = two.run(leave)
    assert two.run(leave) == first


def test_processes_wrong_arguments_raise():
    with pytest.raises(ValueError, match="at least one process"):
        Processes(0)
    with pytest.raises(ValueError, match="mpi"):
        Processes(1, backend="mpi")


# -- the plugin -------------------------------------------------------------------------------------------------

TESTS = """
import os
import pytest, torch
import fshard as fs
from fshard import P

@pytest.fixture
def costly():
    with open("set-up", "a") as file:
        file.write(str(os.getpid()) + "\\n")

@pytest.mark.mesh(data=2)
def test_marked(mesh, costly):
    assert mesh.runtime == os.environ.get("EXPECTED")
    x = fs.device_put(torch.arange(4.0), fs.Layout(mesh, P("data")))
    total = fs.shard_map(lambda x: fs.psum(x.sum(), "data"), mesh=mesh, in_specs=P("data"), out_specs=P())(x)
    assert fs.unshard(total) == 6

@pytest.mark.mesh(data=2)
@pytest.mark.parametrize("k", [1, 2])
def test_false(mesh, k):
    print("the value is", k)
    assert k == 1, "k is not one"

@pytest.mark.mesh(data=2)
@pytest.mark.xfail(raises=KeyError)
def test_expected(mesh):
    raise KeyError("expected")

@pytest.mark.mesh(data=2)
def test_skipped(mesh):
    pytest.skip("not today")

@pytest.mark.mesh(data=2)
def test_one_device_fails(mesh):
    if os.environ.get("RANK") == "1" or mesh.runtime == "virtual":
        raise ZeroDivisionError("only here")
    fs.run(lambda: fs.psum(torch.ones(2), "data"), mesh=mesh)

def test_plain():
    assert "RANK" not in os.environ
"""


@pytest.mark.parametrize(("runtime", "expected"), [("virtual", "virtual"), ("gloo", "process")])
def test_plugin_runs_tests_on_both_runtimes(pytester, monkeypatch, runtime, expected):
    monkeypatch.setenv("EXPECTED", expected)
    pytester.makepyfile(TESTS)
    run = pytester.runpytest_subprocess if runtime == "gloo" else pytester.runpytest_inprocess
    result = run(f"--mesh-runtime={runtime}", "--strict-markers", "-W", "error", "-rfsx")
    result.assert_outcomes(passed=3, failed=2, xfailed=1, skipped=1)
    result.stdout.fnmatch_lines(
        [
            "*the value is 2*" if runtime == "gloo" else "*assert k == 1*",
            "*ZeroDivisionError: only here*",
            "FAILED*test_false?2?*",
            "FAILED*test_one_device_fails*",
            "SKIPPED*.py:*: not today",
        ]
    )
    assert len((pytester.path / "set-up").read_text().split()) == {"virtual": 1, "gloo": 2}[runtime]


def test_plugin_processes_draw_equal_examples(pytester):
    pytester.makepyfile(
        """
        import pytest, torch
        import fshard as fs
        from hypothesis import given, settings, strategies as st

        @pytest.mark.mesh(data=2)
        def test_drawn(mesh):
            @settings(deadline=None, max_examples=30)
            @given(st.integers())
            def check(k):
                k = torch.tensor([k % 1000])
                assert fs.run(lambda: fs.psum(k, "data"), mesh=mesh)[0] == 2 * k
            check()
        """
    )
    pytester.runpytest_inprocess("--mesh-runtime=gloo").assert_outcomes(passed=1)


def test_plugin_marker_with_unnamed_axis_raises(pytester):
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.mesh(4)
        def test_it(mesh): ...
        """
    )
    result = pytester.runpytest_inprocess()
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*axes have names: write @pytest.mark.mesh(data=4)*"])


def test_plugin_ignores_other_mesh_fixtures(pytester):
    pytester.makepyfile(
        """
        import os, pytest

        @pytest.fixture
        def mesh():
            return "triangles"

        def test_it(mesh):
            assert mesh == "triangles" and "RANK" not in os.environ
        """
    )
    pytester.runpytest_inprocess("--mesh-runtime=gloo").assert_outcomes(passed=1)


@pytest.mark.mesh(data=2, model=2)
def test_plugin_marker_sets_axes(mesh):
    assert dict(mesh.shape) == {"data": 2, "model": 2}


def test_plugin_default_mesh_has_one_axis(mesh):
    assert dict(mesh.shape) == {"data": 4}


def test_plugin_imports_without_hypothesis():
    code = "import sys; sys.modules['hypothesis'] = None; import fshard.testing.plugin"
    subprocess.run([sys.executable, "-c", code], check=True)


# -- strategies -------------------------------------------------------------------------------------------------


@given(st.data())
def test_layouts_strategy_draws_valid_layouts(data):
    mesh = data.draw(meshes())
    shape = data.draw(shapes_for(mesh))
    layout = data.draw(layouts(mesh, shape))
    layout.check(shape)
    x = data.draw(dyadic(shape, data.draw(st.sampled_from(DTYPES[:4]))))
    assert torch.equal(fs.unshard(fs.device_put(x, layout)), x)


@given(st.data())
def test_meshes_strategy_draws_the_requested_size(data):
    limit = data.draw(st.integers(1, 12))
    assert data.draw(meshes(limit)).size <= limit
    exact = data.draw(meshes(size=limit, max_axes=2))
    assert exact.size == limit
    assert len(exact.axis_names) <= 2


@pytest.mark.parametrize(
    "wanted",
    [
        lambda spec: spec.is_flat and len(spec.flat_axes) == 2,
        lambda spec: spec.is_flat and spec.unreduced,
        lambda spec: spec.entries == (("model", "data"),),
        lambda spec: spec.entries == (("data", "model"),),
        lambda spec: spec.entries == (None, "data") and spec.unreduced == ("model",),
        lambda spec: spec == P("model", "data"),
        lambda spec: spec == P(),
        lambda spec: len(spec.unreduced) == 2,
    ],
)
def test_specs_strategy_draws_every_kind(wanted):
    mesh = fs.make_mesh({"data": 2, "model": 2})
    assert wanted(find(specs(mesh, (4, 6)), wanted))


@pytest.mark.parametrize("shape", [(), (0,), (3,), (8, 4), (0, 4)])
def test_shapes_strategy_draws_every_kind(shape):
    mesh = fs.make_mesh({"data": 4, "model": 2})
    assert find(shapes_for(mesh), lambda drawn: drawn == shape) == shape


@given(st.data())
def test_specs_strategy_respects_options(data):
    mesh = data.draw(meshes())
    shape = data.draw(shapes_for(mesh, min_dims=1, max_dims=2))
    spec = data.draw(specs(mesh, shape, flat=False, unreduced=False))
    assert 1 <= len(shape) <= 2
    assert not spec.is_flat and not spec.unreduced


@given(st.data())
def test_axis_subsets_strategy_draws_any_order(data):
    axes = data.draw(axis_subsets(fs.make_mesh({"data": 2, "model": 1, "pipe": 2})))
    assert axes in [order for n in (1, 2, 3) for order in permutations(("data", "model", "pipe"), n)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(data=st.data())
def test_dyadic_sums_are_exact_in_any_order(dtype, data):
    xs = [data.draw(dyadic((2, 8), dtype)) for _ in range(4)] + [data.draw(dyadic((2, 8), dtype)) for _ in range(4)]
    wide = torch.complex128 if dtype.is_complex else torch.float64
    exact = sum(x.to(wide) for x in xs)
    if dtype == torch.bool:
        assert {*torch.stack(xs).unique().tolist()} <= {False, True}
        return
    for order in (range(8), reversed(range(8)), data.draw(st.permutations(range(8)))):
        added = torch.zeros((2, 8), dtype=dtype)
        for place in order:
            added = added + xs[place]
        assert added.dtype == dtype
        assert torch.equal(added.to(wide), exact)


def test_dyadic_shrinks_to_consecutive_numbers():
    assert find(dyadic((4, 5), torch.int64), lambda x: True).flatten().tolist()[:4] == [-8, -7, -6, -5]
    assert find(dyadic((2,)), lambda x: bool((x > 2).any())).tolist() == [0, 2.125]


def test_plugin_invalid_mesh_raises_on_processes(pytester):
    pytester.makepyfile("import pytest\n@pytest.mark.mesh(data=0)\ndef test_it(mesh): pass")
    result = pytester.runpytest_inprocess("--mesh-runtime=gloo")
    result.stdout.fnmatch_lines(["*MeshError: This mesh cannot be made: axis 'data' has size 0*"])


# -- models -----------------------------------------------------------------------------------------------------

MODELS = {
    "tied": lambda leaves, model: len({*map(id, leaves)}) < len(leaves),
    "frozen": lambda leaves, model: any(isinstance(x, torch.nn.Parameter) and not x.requires_grad for x in leaves),
    "unused": lambda leaves, model: 0 in model.loss_fn.uses,
    "used twice": lambda leaves, model: 2 in model.loss_fn.uses,
    "0-d": lambda leaves, model: any(x.ndim == 0 for x in leaves),
    "empty": lambda leaves, model: any(x.numel() == 0 for x in leaves),
    "odd": lambda leaves, model: any(x.numel() > 1 and x.numel() % 2 for x in leaves),
    "mixed dtypes": lambda leaves, model: len({x.dtype for x in leaves if x.is_floating_point()}) > 2,
    "whole numbers": lambda leaves, model: any(x.dtype == torch.int64 for x in leaves),
    "not contiguous": lambda leaves, model: any(not x.is_contiguous() for x in leaves),
    "one number for all": lambda leaves, model: any(x.numel() > 1 and not any(x.stride()) for x in leaves),
    "named tuple": lambda leaves, model: isinstance(model.params["rest"], Pair),
    "dataclass": lambda leaves, model: isinstance(model.params["rest"], Couple),
    "nested": lambda leaves, model: optree.tree_structure(model.params, namespace="fshard").num_nodes > 6,
}


def test_models_strategy_draws_every_awkward_tree():
    seen = set()

    @settings(max_examples=300, phases=[Phase.generate], derandomize=True)
    @given(models())
    def look(model):
        leaves = flatten(model.params)[0]
        assert torch.isfinite(model.loss_fn(model.params, model.batch)).all()
        seen.update(name for name, has in MODELS.items() if has(leaves, model))

    look()
    assert seen == set(MODELS)


@settings(max_examples=30)
@given(models((torch.float32, torch.complex64), samples=3, linear=True))
def test_models_strategy_linear_models_are_linear(model):
    def doubled(x):
        return 2 * x if x.is_floating_point() or x.is_complex() else x

    more = optree.tree_map(doubled, model.params, namespace="fshard")
    zero = optree.tree_map(lambda x: x - x if x.dtype != torch.int64 else x, model.params, namespace="fshard")
    once, twice, none = (model.loss_fn(params, model.batch) for params in (model.params, more, zero))
    torch.testing.assert_close(twice - none, 2 * (once - none))
