"""Which of several processes this is: by the variables that launchers really set, and by any
others.
"""

import math
import os
import socket
import time
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import fshard as fs
from fshard.mesh.runtimes import launchers
from fshard.mesh.runtimes.launchers import (
    LAUNCHERS,
    PORTS,
    ProcessInfo,
    each_its_own,
    launched,
    process_count,
    process_index,
    process_info,
    read_variables,
    time_limit,
)
from fshard.mesh.runtimes.process import ProcessWorld
from tests.helpers.processes import run_processes


def by_hand(rank, world, address, port):
    return dict(
        zip(
            ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
            (rank, world, address, port),
            strict=True,
        )
    )


TORCHRUN = {
    **by_hand("5", "8", "gpu1", "29500"), "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1",
    "ROLE_RANK": "5", "TORCHELASTIC_RUN_ID": "none",
}  # fmt: skip
JOB = {
    "SLURM_JOB_ID": "4242",
    "SLURM_JOB_NODELIST": "gpu[01-02]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_NNODES": "2",
}
# What a batch script sees under `sbatch --ntasks 8`: one process, though SLURM_NTASKS is 8.
BATCH = {
    **JOB, "SLURM_NTASKS": "8", "SLURM_NPROCS": "8", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0",
    "SLURM_TASKS_PER_NODE": "4(x2)", "SLURM_GTIDS": "0", "SLURM_TASK_PID": "99",
}  # fmt: skip
SALLOC = {**JOB, "SLURM_NTASKS": "8", "SLURM_NPROCS": "8", "SLURM_TASKS_PER_NODE": "4(x2)"}
SRUN = {
    **BATCH, "SLURM_STEP_ID": "0", "SLURM_STEPID": "0", "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)", "SLURM_STEP_NODELIST": "gpu[01-02]", "SLURM_PROCID": "6",
    "SLURM_LOCALID": "2", "SLURM_NODEID": "1",
}  # fmt: skip
PTY = {**SRUN, "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1",
       "SLURM_STEP_NODELIST": "gpu01", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}  # fmt: skip
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "OMPI_COMM_WORLD_NODE_RANK": "1",
    "PMIX_RANK": "1", "PMIX_NAMESPACE": "3034185729",
}  # fmt: skip
OPEN_MPI_OF_ONE = {
    **OPEN_MPI, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
}  # fmt: skip
HYDRA = {
    "PMI_RANK": "3",
    "PMI_SIZE": "4",
    "PMI_FD": "9",
    "MPI_LOCALRANKID": "3",
    "MPI_LOCALNRANKS": "4",
}
HYDRA_OF_TWO_MACHINES = {**HYDRA, "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}

LIMITS = ["abc", "-1", "0", "nan"]
DERIVED = 0
"""A port that follows from the job."""
VARIABLES = {  # the rank that the variables give; or None; or words of the error
    # launchers and what they set
    "torchrun": (TORCHRUN, ProcessInfo(5, 8, 1, "gpu1", 29500, "torchrun")),
    "torchrun of one": (by_hand("0", "1", "localhost", "1"), ProcessInfo(0, 1, 0, "localhost", 1, "torchrun")),
    "on one machine": (by_hand("1", "2", "localhost", "29"), ProcessInfo(1, 2, 1, "localhost", 29, "torchrun")),
    "a pod for each process": (by_hand("1", "2", "job-0", "23"), ProcessInfo(1, 2, 0, "job-0", 23, "torchrun")),
    "srun on 2 nodes": (SRUN, ProcessInfo(6, 8, 2, "gpu01", DERIVED, "SLURM")),
    "srun, ports and hosts given": (
        {**SRUN, "MASTER_ADDR": "head", "MASTER_PORT": "7000", "WORLD_SIZE": "8"},
        ProcessInfo(6, 8, 2, "head", 7000, "SLURM"),
    ),
    "srun on 1 node": (
        {**SRUN, "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NODELIST": "gpu02",
         "SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_NODEID": "0"},
        ProcessInfo(1, 2, 1, "127.0.0.1", DERIVED, "SLURM"),
    ),
    "srun --mpi=pmi2": ({**SRUN, "PMI_RANK": "6", "PMI_SIZE": "8"}, ProcessInfo(6, 8, 2, "gpu01", DERIVED, "MPI")),
    "torchrun in srun": ({**SRUN, **TORCHRUN}, ProcessInfo(5, 8, 1, "gpu1", 29500, "torchrun")),
    "mpirun on 2 nodes of a job, whose helpers srun has started": (
        {**SRUN, **OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1",
         "MASTER_ADDR": "gpu01"},
        ProcessInfo(1, 4, 1, "gpu01", DERIVED, "Open MPI"),
    ),
    "Open MPI": (OPEN_MPI, ProcessInfo(1, 4, 1, "127.0.0.1", DERIVED, "Open MPI")),
    "Open MPI on several, told where": (
        {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "MASTER_ADDR": "gpu7", "MASTER_PORT": "7000"},
        ProcessInfo(1, 4, 1, "gpu7", 7000, "Open MPI"),
    ),
    "MPICH": (HYDRA, ProcessInfo(3, 4, 3, "127.0.0.1", DERIVED, "MPI")),
    "MPICH on several, told where": (
        {**HYDRA_OF_TWO_MACHINES, "MASTER_ADDR": "gpu7", "MASTER_PORT": "7000"},
        ProcessInfo(3, 4, 1, "gpu7", 7000, "MPI"),
    ),
    # one process, which no launcher has started
    "nothing": ({}, None),
    "only where to meet": ({"MASTER_ADDR": "gpu1", "MASTER_PORT": "29500"}, None),
    "sbatch": (BATCH, None),
    "salloc": (SALLOC, None),
    "sbatch of newer versions, its step numbered": ({**BATCH, "SLURM_STEP_ID": "4294967291"}, None),
    "salloc, its shell a step": (
        {**SALLOC, "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, None,
    ),
    # what cannot be
    "half-set": ({"RANK": "1"}, "RANK is set, but WORLD_SIZE is not"),
    "half-set the other way": ({"PMI_SIZE": "2"}, "PMI_SIZE is set, but PMI_RANK is not"),
    "nowhere to meet": (
        {"RANK": "0", "WORLD_SIZE": "2"}, "it was started by torchrun; missing: MASTER_ADDR, MASTER_PORT.",
    ),
    "no number": ({**TORCHRUN, "WORLD_SIZE": "-2"}, "WORLD_SIZE=-2 is no integer from 1"),
    "no port": ({**TORCHRUN, "MASTER_PORT": "tcp://a:80"}, "MASTER_PORT=tcp://a:80 is no integer from 1 to 65535"),
    "too large": ({**TORCHRUN, "RANK": "8"}, "RANK=8 is no integer from 0 to 7"),
    "MPI on several machines": (HYDRA_OF_TWO_MACHINES, "it was started by MPI; missing: MASTER_ADDR, MASTER_PORT."),
}  # fmt: skip


@pytest.mark.parametrize("kind", VARIABLES)
def test_variables_give_rank_or_none_or_raise(kind):
    variables, expected = VARIABLES[kind]
    if isinstance(expected, str):
        with pytest.raises(fs.errors.MeshError) as error:
            read_variables(variables, parent=1234)
        assert expected in str(error.value)
        assert str(error.value).endswith('make_mesh(..., runtime="virtual").')
        return
    info = read_variables(variables, parent=1234)
    if expected is not None and expected.port == DERIVED:
        assert info.port in PORTS
        expected = replace(expected, port=info.port)
    assert info == expected and (info is None or info.is_one_of_several)


@pytest.mark.parametrize("variables", [PTY, OPEN_MPI_OF_ONE], ids=["srun --pty", "mpirun -n 1"])
def test_launched_single_slurm_or_mpi_process_is_false(variables, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert process_info() is None and not launched()
    assert (process_index(), process_count(), process_count(default=8)) == (0, 1, 8)
    assert fs.make_mesh({"data": 4}).runtime == "virtual"


@pytest.mark.parametrize(
    ("variables", "options", "text"),
    [
        ({}, {"runtime": "process"}, "missing: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, {}, "missing: MASTER_ADDR, MASTER_PORT"),
        ({"WORLD_SIZE": "4"}, {}, "WORLD_SIZE is set, but RANK is not"),
        *[
            (
                TORCHRUN | {"FSHARD_TIMEOUT": value},
                {},
                "FSHARD_TIMEOUT must be a positive number .*",
            )
            for value in LIMITS
        ],
    ],
)
def test_make_mesh_with_incomplete_environment_raises(variables, options, text, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(fs.errors.MeshError, match=text):
        fs.make_mesh({"data": 4}, **options)
    assert fs.make_mesh({"data": 4}, runtime="virtual").runtime == "virtual"


# -- any variables ---------------------------------------------------------------------------------

NAMES = sorted({name for names in LAUNCHERS.values() for name in names if name} | {
    "MASTER_ADDR", "MASTER_PORT", "SLURM_STEP_ID", "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NODELIST", "SLURM_NODEID",
})  # fmt: skip


@given(
    st.dictionaries(
        st.sampled_from(NAMES),
        st.sampled_from(["0", "1", "2", "4", "", "x", "a[1-", "2(x2),1", "²"]),
    )
)
def test_read_variables_any_values_return_or_raise_mesh_error(variables):
    try:
        info = read_variables(variables, parent=7)
    except fs.errors.MeshError:
        return
    if info is not None:
        assert 0 <= info.rank < info.world and 0 <= info.local_rank < info.world
        assert info.address and 0 < info.port < 65536


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(1, 10**7), st.integers(0, 50)
)
def test_slurm_step_processes_agree_on_meeting_point(tasks, job, step):
    """A step of any shape: all have different numbers, and meet at one host and port."""
    n = sum(tasks)
    nodes = f"n[0-{len(tasks) - 1}]" if len(tasks) > 1 else "n0"
    variables = {
        "SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step), "SLURM_STEP_NUM_TASKS": str(n),
        "SLURM_STEP_TASKS_PER_NODE": ",".join(map(str, tasks)), "SLURM_STEP_NODELIST": nodes,
    }  # fmt: skip
    positions = [(node, local) for node, count in enumerate(tasks) for local in range(count)]
    infos = []
    for rank, position in enumerate(positions):
        numbers = zip(
            ("SLURM_PROCID", "SLURM_NODEID", "SLURM_LOCALID"),
            map(str, (rank, *position)),
            strict=True,
        )
        infos.append(read_variables({**variables, **dict(numbers)}))
    address = "127.0.0.1" if len(tasks) == 1 else "n0"
    port = infos[0].port
    expected = [
        ProcessInfo(rank, n, local, address, port, "SLURM")
        for rank, (_, local) in enumerate(positions)
    ]
    assert infos == expected and port in PORTS


def test_default_port_of_two_jobs_differs():
    ports = {read_variables({**OPEN_MPI, "PMIX_NAMESPACE": str(job)}).port for job in range(100)}
    assert len(ports) > 95


# -- real worlds -----------------------------------------------------------------------------------


def as_started_by(kind):
    """Forget what torchrun sets, be a process of another launcher, and sum over the world."""
    rank = int(os.environ["RANK"])
    for name in (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    ):
        os.environ.pop(name, None)
    del os.environ["TORCHELASTIC_USE_AGENT_STORE"]  # process 0 keeps the store
    os.environ.update({name: value.format(rank) for name, value in WORLDS[kind].items()})
    mesh = fs.make_mesh({"data": process_count(default=5)})
    total = fs.run(lambda: fs.psum(torch.tensor(1 + fs.mesh.process_index()), "data"), mesh=mesh)[0]
    return process_info().launcher == kind, mesh.runtime, process_index(), total.item()


WORLDS = {
    "SLURM": {"SLURM_PROCID": "{}", "SLURM_LOCALID": "{}", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_ID": "3",
              "SLURM_JOB_ID": f"{os.getppid()}", "SLURM_STEP_NODELIST": "n1", "SLURM_STEP_TASKS_PER_NODE": "2"},
    "Open MPI": {"OMPI_COMM_WORLD_RANK": "{}", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "{}",
                 "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": f"prterun-{os.getppid()}@1"},
    "MPI": {"PMI_RANK": "{}", "PMI_SIZE": "2", "MPI_LOCALRANKID": "{}", "MPI_LOCALNRANKS": "2"},
}  # fmt: skip


@pytest.mark.parametrize("kind", WORLDS)
def test_make_mesh_under_each_launcher_sums_ranks(kind):
    assert run_processes(as_started_by, 2, kind) == [
        (True, "process", rank, 3) for rank in range(2)
    ]


def ask_whose_gpus(gpus):
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False
    )
    return [
        each_its_own(each[fs.mesh.process_index()], dist.PrefixStore(each, store), 2)
        for each in gpus
    ]


def test_each_its_own_shared_gpu_is_false_everywhere():
    assert run_processes(ask_whose_gpus, 2, ["ab", "aa", "ba"]) == [[True, False, True]] * 2


def take_another_backend():
    """Join by a backend that is not gloo: the world must treat it as it treats NCCL."""
    import torch.testing._internal.distributed.fake_pg  # noqa: F401  # registers "fake"

    first_calls, all_reduce = [], dist.all_reduce
    dist.all_reduce = lambda x, *, group: first_calls.append(
        (x.numel(), dist.get_process_group_ranks(group))
    )
    try:
        mesh = fs.make_mesh({"a": 2, "b": 2, "c": 1}, device="cpu")
    finally:
        dist.all_reduce = all_reduce
    world = ProcessWorld.of(mesh)
    kinds = {type(transport).__name__ for transport in world._transports.values()}
    return world.backend, kinds, world._staged, world.are_near((0, 1, 2, 3)), first_calls


def test_fshard_backend_replaces_the_chosen_one_and_connects_groups():
    results = run_processes(take_another_backend, 4, environment={"FSHARD_BACKEND": "fake"})
    for rank, (*kind, first_calls) in enumerate(results):
        assert kind == ["fake", {"Nccl"}, False, False]
        assert first_calls == [
            (1, [rank % 2, rank % 2 + 2]),
            (1, [rank // 2 * 2, rank // 2 * 2 + 1]),
        ]


GPUS = {  # the local rank, the GPUs' identities, FSHARD_BACKEND; the expected backend, GPU and warning
    "a GPU each": ("1", ["a", "b"], "", "cpu:gloo,cuda:nccl", 1, None),
    "local rank unknown": (
        "",
        ["a", "a"],
        "",
        "gloo",
        None,
        "Process 1 has local rank 0 and GPU 0",
    ),
    "an override": ("1", ["a", "a"], "nccl", "cpu:gloo,cuda:nccl", 1, None),
}


@pytest.mark.parametrize("kind", GPUS)
def test_meet_all_on_gpus_binds_the_gpu_or_warns(kind, monkeypatch, recwarn):
    """Process 1 of 2 on a machine with 4 GPUs, which do not exist."""
    local_rank, gpus, override, backend, bound, warning = GPUS[kind]
    variables = {
        **by_hand("1", "2", "gpu1", "1"),
        "LOCAL_RANK": local_rank,
        "FSHARD_BACKEND": override,
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    store = dist.HashStore()
    current = [0]
    calls = []
    launchers.each_its_own(gpus[0], dist.PrefixStore("meeting 7", store), 1)
    for module, name, replacement in (
        (launchers, "_meetings", iter([7])),
        (launchers, "_connect_store", lambda *_: (store, 1, 2)),
        (torch.cuda, "device_count", lambda: 4),
        (torch.cuda, "set_device", current.append),
        (torch.cuda, "current_device", lambda: current[-1]),
        (torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid=gpus[1])),
        (dist, "is_nccl_available", lambda: True),
        (dist, "init_process_group", lambda *args, **options: calls.append((args, options))),
    ):
        monkeypatch.setattr(module, name, replacement)
    launchers.meet_all("cuda", timedelta(seconds=7))
    (((chosen,), options),) = calls
    assert (chosen, options["timeout"].total_seconds()) == (backend, 7)
    assert options["device_id"] == (None if bound is None else torch.device("cuda", bound))
    assert [warning in str(entry.message) for entry in recwarn] == [True] * (warning is not None)


def meet_at(port):
    os.environ.update(MASTER_PORT=str(port), FSHARD_TIMEOUT="1", RANK="1", WORLD_SIZE="2")
    began = time.monotonic()
    with pytest.raises(fs.errors.MeshError, match="did not meet the others at 127.0.0.1"):
        fs.make_mesh({"data": 2})
    return time.monotonic() - began


def test_make_mesh_silent_program_on_the_port_raises():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert run_processes(meet_at, 1, silent.getsockname()[1])[0] < 5


def test_time_limit_of_infinity_is_thirty_days():
    assert time_limit(2.5).total_seconds() == 2.5 and time_limit(math.inf).days == 30


def test_a_store_that_does_not_answer_is_an_exceeded_limit():
    """`Members` knows it from a lost process by the text, as it does for torch's own errors."""
    with pytest.raises(dist.DistNetworkError, match="Timed out: no store answered there"):
        launchers.store_within(lambda: time.sleep(0.3), timedelta(seconds=0.05))
