"""Several machines: two network namespaces with two processes each, shared memory within and gloo
between.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fshard as fs
from fshard import P
from fshard.mesh.runtimes import interface
from fshard.mesh.runtimes.interface import VARIABLE, choose_interface, interface_of
from fshard.mesh.runtimes.process import ProcessWorld
from fshard.mesh.spmd.scope import require

HOSTS = {"fshard0": "10.213.7.1", "fshard1": "10.213.7.2"}
"""The namespaces and their addresses."""


def _ip(words: str) -> bool:
    return subprocess.run(["ip", *words.split()], check=False, capture_output=True).returncode == 0


@pytest.fixture
def hosts():
    """Two network namespaces that are connected by a pair of interfaces."""
    first, second = HOSTS
    lines = [f"netns add {name}" for name in HOSTS]
    lines.append(f"link add fs0 netns {first} type veth peer fs1 netns {second}")
    for index, (name, address) in enumerate(HOSTS.items()):
        lines += [f"-n {name} link set lo up", f"-n {name} addr add {address}/24 dev fs{index}"]
        lines.append(f"-n {name} link set fs{index} up")
    try:
        if not all(map(_ip, lines)):
            pytest.skip("network namespaces are not permitted")
        yield [*HOSTS]
    finally:
        for name in HOSTS:
            _ip(f"netns del {name}")


def train(mesh):
    """Return the parameters after three ZeRO-3 steps."""
    torch.manual_seed(0)
    params = fs.shard_params(
        {"w": torch.randn(24, 40), "v": torch.randn(40, 3)}, fs.fsdp("data"), mesh=mesh
    )
    opt = fs.partition_optimizer(fs.optim.adamw(1e-2), mesh=mesh, axis="data", stage=3)
    loss_fn = lambda p, x: (x @ p["w"]).tanh().matmul(p["v"]).square().mean()  # noqa: E731
    step = fs.train_step(loss_fn, opt, mesh=mesh, batch=P("data"))
    state = opt.init(params)
    for seed in range(3):
        params, state, _ = step(
            params, state, torch.randn(8, 24, generator=torch.Generator().manual_seed(seed))
        )
    return fs.unshard(params)


def test_two_machines_have_the_bits_of_virtual_devices(hosts, tmp_path):
    """The host's name resolves to loopback in the namespaces, so an interface is chosen."""
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    environment |= {
        "WORLD_SIZE": "4",
        "MASTER_ADDR": HOSTS[hosts[0]],
        "MASTER_PORT": "29501",
        "LOCAL_WORLD_SIZE": "2",
        "FSHARD_TIMEOUT": "200",
    }
    programs = []
    for machine, host in enumerate(hosts):
        command = ["ip", "netns", "exec", host, sys.executable, __file__, str(machine), tmp_path]
        program = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
        programs.append(program)
    errors = [program.communicate(timeout=300)[1] for program in programs]
    assert [program.returncode for program in programs] == [0] * 2, "\n".join(errors)
    expected = train(fs.make_mesh({"data": 4}))
    for rank in range(4):
        params, transports = torch.load(tmp_path / str(rank))
        assert transports == ["Gloo", "SharedMemory"]
        assert all(torch.equal(params[name], x) for name, x in expected.items())


def test_interface_is_chosen_where_the_name_is_loopback(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(interface, "_address_towards", lambda address, port: "127.0.0.1")
    choose_interface("localhost", 1)
    assert VARIABLE not in os.environ
    names = {address: f"eth{address[-1]}" for address in HOSTS.values()}
    monkeypatch.setattr(interface, "interface_of", names.get)
    monkeypatch.setattr(interface, "_address_towards", lambda address, port: HOSTS["fshard1"])
    monkeypatch.setattr(interface, "_address_of", lambda host: HOSTS["fshard0"])
    choose_interface("elsewhere", 1)
    assert VARIABLE not in os.environ  # gloo's choice can be reached
    monkeypatch.setattr(interface, "_address_of", lambda host: "127.0.1.1")
    choose_interface("elsewhere", 1)
    assert os.environ.pop(VARIABLE) == "eth2"


@pytest.mark.skipif(sys.platform != "linux", reason="interfaces are looked up on Linux")
def test_interface_of_an_address():
    assert interface_of("127.0.0.1") == "lo" and interface_of("203.0.113.77") is None


def kinds_of_transports():
    mesh = fs.make_mesh({"host": 2, "process": 2})
    world = ProcessWorld.of(mesh)

    def main():
        groups = [require("test").group(axes, "test") for axes in (("host", "process"), "process")]
        return [type(world.transport(group)).__name__ for group in groups]

    return fs.run(main, mesh=mesh)[0]


def run_machine(machine, folder):
    """Run the two processes of a machine, and write what each has trained.

    The second one is forked: the two import torch once.
    """
    child = os.fork()
    local_rank = 0 if child else 1
    rank = 2 * machine + local_rank
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(local_rank)}
    torch.save((train(fs.make_mesh({"data": 4})), kinds_of_transports()), folder / str(rank))
    if child:
        _, status = os.waitpid(child, 0)
        sys.exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    run_machine(int(sys.argv[1]), Path(sys.argv[2]))
