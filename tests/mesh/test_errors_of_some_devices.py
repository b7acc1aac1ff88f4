"""Errors on meshes of some devices name the devices of each side, against the texts they must have."""

import pytest
import torch

import fshard as fs
from fshard import P
from fshard.mesh.spmd.scope import here
from tests.helpers.processes import run_processes

ACTOR, LEARNER = (0, 1), (3, 2)


def meshes():
    fs.make_mesh({"all": 4})
    actor = fs.make_mesh({"data": 2}, devices=ACTOR)
    return actor, fs.make_mesh({"model": 2}, devices=LEARNER)


def number_of_caller():
    scope = here()
    return fs.mesh.process_index() if scope is None else scope.number


def wait_for_each_other():
    """The actor gathers without its second device; the learner waits for weights of the actor."""
    actor, learner = meshes()
    x = fs.device_put(torch.arange(4.0), fs.Layout(actor, P("data")))
    if number_of_caller() == 0:
        fs.unshard(x)
    if learner.is_member:
        fs.reshard(x, fs.Layout(learner, P("model")))


def call_different_collectives():
    actor, _ = meshes()
    if not actor.is_member:
        return
    reduce = fs.psum if number_of_caller() == 0 else fs.pmax
    x = fs.device_put(torch.arange(4.0), fs.Layout(actor, P("data")))
    specs = {"in_specs": P("data"), "out_specs": P()}
    fs.shard_map(lambda x: reduce(x, "data"), mesh=actor, check=False, **specs)(x)


CHECKED = {"FSHARD_CHECK": "1"}


def test_hang_of_two_meshes_in_a_run_names_both_sides():
    with pytest.raises(fs.errors.DeadlockError) as error:
        fs.run(wait_for_each_other, mesh=fs.make_mesh({"all": 4}))
    text = str(error.value)
    assert 'over "data" of devices 0, 1' in text
    assert "data=2 on 0, 1 -> model=2 on 3, 2" in text


def test_hang_of_two_meshes_of_processes_names_both_sides():
    with pytest.raises(fs.errors.DeadlockError) as error:
        run_processes(wait_for_each_other, 4, environment=CHECKED)
    text = str(error.value)
    assert "process 0: waits in all_gather" in text
    assert "over data of processes 0, 1 at" in text
    assert "process 3: waits in reshard(way='data=2 on 0, 1 -> model=2 on 3, 2'" in text


def test_mismatch_on_some_devices_names_the_devices_of_the_group():
    with pytest.raises(fs.errors.MismatchError, match='over "data" of devices 0, 1'):
        fs.run(call_different_collectives, mesh=fs.make_mesh({"all": 4}))


def test_mismatch_on_some_processes_names_their_ranks():
    with pytest.raises(fs.errors.MismatchError, match="over data of processes 0, 1 at"):
        run_processes(call_different_collectives, 4, environment=CHECKED)
