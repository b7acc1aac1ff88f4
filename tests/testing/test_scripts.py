"""`certify_script`: training scripts as their users have them, for GPUs and NCCL, are accepted
without an edit, and a mistake in each is found with its cause.
"""

import json
from pathlib import Path

import pytest
import torch

from fshard.command import main
from fshard.errors import PromiseError
from fshard.testing import certify_script
from fshard.torch_collectives import Recording
from tests.helpers.sampled import thorough

SCRIPTS = Path(__file__).parent / "scripts"
DATA = {"data": 2}
NOT_REDUCED = "not reduced"

# By script and arguments: the mesh, and the arguments in one process.
RIGHT = {
    "ddp": (DATA, None),
    "ddp_spawn": (DATA, None),
    "fsdp2": (DATA, None),
    "accelerated": (DATA, None),
    "accelerated --split": (DATA, None),
    "accelerated --dispatch": (DATA, None),
    "accelerated --dispatch --split": (DATA, None),
    "trainer": (DATA, None),
    "fabric": (DATA, None),
    "get_batch": (DATA, None),
    "tensor_parallel": ({"dp": 2, "tp": 2}, ["--tp", "1"]),
    "two_optimizers": (DATA, None),
    "pipeline": ({"pipe": 2}, None),
}
# By script and arguments: the first leaf that diverges, and its reason.
WRONG = {
    "ddp --bug scaled": "2 times that of one device: the size of data",
    "ddp --bug unwrapped": "begins differently on ranks 0 and 1",
    "ddp_spawn sync": NOT_REDUCED,
    "fsdp2 --bug tokens": "the gradient first differs at",
    "accelerated --bug unwrapped": NOT_REDUCED,
    "accelerated --bug unwrapped --dispatch --split": NOT_REDUCED,
    "trainer --bug": "the gradient first differs at",
    "fabric sync": NOT_REDUCED,
    "get_batch sync": "the gradient",
    "two_optimizers --kept": "call zero_grad() in each step",
    "pipeline --bug clip": "the gradient that the optimizer is given",
}


# Those beside, with one side of each of their choices, fail with the same cause.
SELDOM = {
    "accelerated --split",
    "accelerated --dispatch",
    "accelerated --bug unwrapped",
    "ddp_spawn",
    "ddp_spawn sync",
    "fabric sync",
}


def sampled(commands):
    """Return the scripts to run: some in a thorough run alone."""
    return [thorough(name) if name in SELDOM else name for name in commands]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("command", sampled(RIGHT))
def test_scripts_are_accepted_without_an_edit(command):
    axes, alone = RIGHT[command]
    name, *arguments = command.split()
    certificate = certify_script(SCRIPTS / f"{name}.py", axes, arguments, alone=alone, timeout=300)
    assert certificate.check().steps == 2 and len(certificate.rows) > 2
    assert "The script ran on CPUs over gloo, in float64" in certificate.unseen


@pytest.mark.timeout(400)
@pytest.mark.parametrize("command", sampled(WRONG))
def test_mistakes_of_scripts_are_found_with_their_cause(command):
    name, *arguments = command.split()
    axes, _ = RIGHT[name]
    certificate = certify_script(SCRIPTS / f"{name}.py", axes, arguments, timeout=300)
    assert certificate.first is not None
    reasons = [row.reason for row in certificate.rows if row.verdict == "DIVERGENT"]
    assert any(WRONG[command] in reason for reason in reasons), certificate


@pytest.mark.timeout(400)
def test_debug_model_of_torchtitan_is_accepted():
    pytest.importorskip("torchtitan")
    arguments = ["--tp", "2"]
    axes = {"data": 2, "tp": 2}
    certify_script(SCRIPTS / "titan.py", axes, arguments, alone=["--tp", "1"], timeout=300).check()


# -- what the caption says -------------------------------------------------------------------------

LOADED = """
import os, sys
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
dist.init_process_group("nccl")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
data = TensorDataset(torch.randn(16, 3))
sampler = DistributedSampler(data) if "--sampler" in sys.argv else None
model = DistributedDataParallel(nn.Linear(3, 1).cuda(), device_ids=[0])
rate = eval(os.environ.get("RATE", "0.1"))
opt = torch.optim.SGD(model.parameters(), rate)
for (x,) in DataLoader(data, 4, sampler=sampler):
    opt.zero_grad()
    model(x.cuda()).square().mean().backward()
    opt.step()
"""


LARGE = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.rand(16, 6) + 0.1)
model = DistributedDataParallel(nn.Linear(6, 1, bias=False))
called = model if "right" in sys.argv else model.module
opt = torch.optim.Adam(model.parameters(), 1e-3)
for (x,) in DataLoader(data, 4, sampler=DistributedSampler(data, shuffle=False)):
    opt.zero_grad()
    (called(x) - 1e6).square().mean().backward()
    dist.all_reduce(torch.ones(1))
    opt.step()
"""


@pytest.mark.parametrize("steps", [1, thorough(2)])
def test_equal_changes_of_a_script_prove_no_reduction(tmp_path, steps):
    file = tmp_path / "train.py"
    file.write_text(LARGE)
    assert certify_script(file, DATA, ["right"], steps=steps).ok
    first = certify_script(file, DATA, ["module"], steps=steps).first
    assert first is not None and "it is not reduced along data" in first.reason


def loaded(tmp_path, *arguments, **options):
    file = tmp_path / "train.py"
    file.write_text(LOADED)
    return certify_script(file, DATA, arguments, **options)


def test_equal_batches_along_data_are_warned_of(tmp_path):
    first = loaded(tmp_path).first
    assert first is not None and "batches are equal along data" in first.reason
    assert loaded(tmp_path, same=["data"]).ok
    assert not loaded(tmp_path, "--sampler").notes


def test_rows_that_several_ranks_read_are_warned_of(tmp_path):
    file = tmp_path / "train.py"
    drawn = "generator=torch.Generator().manual_seed(rank), shuffle=True"
    file.write_text(LOADED.replace("sampler=sampler", drawn))

    (note,) = certify_script(file, DATA).notes

    rows = {}
    for rank in range(2):
        order = torch.randperm(16, generator=drawn_by_loader(rank))
        rows[rank] = set(order[:8].tolist())  # two steps of 4 rows
    repeated = len(rows[0] & rows[1])
    assert note == (
        f"WARNING: {repeated} of {len(rows[0] | rows[1])} rows are read by several ranks. Is the data "
        "set divided, as by a DistributedSampler?"
    )


def test_step_that_a_rank_leaves_out_is_named(tmp_path):
    """The other rank has made its steps, and is waited for in the next backward."""
    file = tmp_path / "train.py"
    assert LOADED.count("opt.step()") == 1
    file.write_text(LOADED.replace("opt.step()", "if rank == 0: opt.step()"))
    first = certify_script(file, DATA, timeout=40).first
    assert "the ranks have made [2, 0] steps of optimizers" in first.reason
    assert "rank 1, which others have left, ended by" in first.reason


def drawn_by_loader(rank):
    """The generator of a loader, which has drawn the seed of its workers first."""
    generator = torch.Generator().manual_seed(rank)
    torch.empty((), dtype=torch.int64).random_(generator=generator)
    return generator


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("sys.exit('usage\\nno data')", "no data"),
        thorough("print('bad config'); sys.exit(3)", "bad config"),
    ],
)
def test_the_last_line_of_a_script_that_exits_is_its_error(tmp_path, line, said):
    file = tmp_path / "train.py"
    file.write_text(f"import sys\n{line}\n")
    with pytest.raises(PromiseError, match=f"SystemExit: {said}\n"):
        certify_script(file, DATA)


# By the parts of a batch: the line that makes them, and what is said of the one process.
PARTS = {
    "halves": ("zip(x.chunk(2), y.chunk(2))", ""),
    "parts of 4 rows": (
        "zip(x.split(4), y.split(4))",
        "the one process calls backward 4 times in a step, each rank 2 times",
    ),
    "4 rows and the rest": (
        "[(x[:4], y[:4]), (x[4:], y[4:])]",
        "each rank cuts its batch into parts of 4, 4 rows, the one process into parts of 4, 12",
    ),
}

ACCUMULATED = """
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randn(32, 5), torch.randn(32, 2))
model = DistributedDataParallel(nn.Linear(5, 2))
opt = torch.optim.AdamW(model.parameters(), 1e-2)
for x, y in DataLoader(data, 8, sampler=DistributedSampler(data)):
    opt.zero_grad()
    for a, b in PARTS:
        (nn.functional.mse_loss(model(a), b) / 2).backward()
    opt.step()
"""


@pytest.mark.parametrize("name", PARTS)
def test_batches_that_the_one_process_cuts_otherwise_prove_nothing(tmp_path, name):
    line, said = PARTS[name]
    file = tmp_path / "train.py"
    file.write_text(ACCUMULATED.replace("PARTS", line))

    certificate = certify_script(file, DATA)

    if not said:
        assert certificate.ok, certificate
        return
    (row,) = certificate.rows
    assert (row.leaf, row.verdict) == ("microbatches", "INCONCLUSIVE")
    assert said in row.reason
    assert "--alone" in row.reason


def test_batches_that_are_drawn_alike_are_warned_of(tmp_path):
    text = (SCRIPTS / "get_batch.py").read_text()
    replaced = {
        "1337 + seed_offset)": "1337)\nnp.random.seed(0)",
        " and master_process:": ":",  # an evaluation draws, too
    }
    for old, new in replaced.items():
        assert text.count(old) == 1
        text = text.replace(old, new)
    file = tmp_path / "train.py"
    file.write_text(text)
    certificate = certify_script(file, DATA)
    assert "batches are equal along data" in str(certificate)
    assert certify_script(file, DATA, same=["data"]).ok


@pytest.mark.parametrize(
    ("rate", "note"),
    [
        ("0.1 * world", "at step 0 it is 0.2 in 2, and the script sets 0.1 in one"),
        ("0.1 / (1 + rank)", "at step 0 0.1 on rank 0 and 0.05 on rank 1"),
    ],
)
def test_learning_rates_that_depend_on_processes_are_said(tmp_path, monkeypatch, rate, note):
    monkeypatch.setenv("RATE", rate)
    certificate = loaded(tmp_path, "--sampler")
    (shown,) = certificate.notes
    assert note in shown
    assert certificate.ok == ("world" in rate)


SCHEDULED = """
import os
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
dist.init_process_group("nccl")
world = dist.get_world_size()
torch.manual_seed(0)
data = TensorDataset(torch.randn(24, 3))
model = DistributedDataParallel(nn.Linear(3, 1).cuda())
opt = torch.optim.AdamW(model.parameters(), 0.1)
schedule = torch.optim.lr_scheduler.OneCycleLR(opt, 0.1, total_steps=20)
for (x,) in DataLoader(data, 4, sampler=DistributedSampler(data)):
    opt.zero_grad()
    model(x.cuda()).square().mean().backward()
    opt.step()
    for _ in range(world):
        schedule.step()
"""


def test_options_that_a_schedule_sets_are_those_of_the_processes(tmp_path):
    """OneCycleLR sets betas, too; accelerate steps a schedule once for each process."""
    file = tmp_path / "train.py"
    file.write_text(SCHEDULED)

    certificate = certify_script(file, DATA)

    assert certificate.ok, certificate
    (note,) = certificate.notes
    assert note.startswith("The learning rate depends on the number of processes: at step 1")


def test_options_that_depend_on_processes_are_in_the_notes(tmp_path):
    file = tmp_path / "train.py"
    file.write_text(SCHEDULED.replace("schedule.step()", "opt.param_groups[0]['eps'] /= 10"))
    (note,) = certify_script(file, DATA).check().notes
    assert "The option eps depends on the number of processes: at step 1 it is 1e-10 in 2" in note
    assert "the script sets 1e-09 in one" in note


def test_script_that_ends_early_is_judged_by_its_steps(tmp_path):
    certificate = loaded(tmp_path, "--sampler", steps=5)
    assert certificate.check().steps == 2
    assert "The script ended after 2 of 5 steps." in certificate.notes


def test_steps_that_the_one_process_does_not_reach_are_no_pass():
    certificate = certify_script(SCRIPTS / "pipeline.py", {"pipe": 2}, ["--bug", "output"])
    assert certificate.steps == 1 and not certificate.ok
    row = certificate.first
    assert (row.leaf, row.verdict, row.step) == ("steps", "INCONCLUSIVE", 1)
    assert "pipeline.py:57 raised in the one process: UnboundLocalError" in row.reason
    assert "--alone" in row.reason and "FILE:NAME" in row.reason
    assert all(row.verdict == "EXACT" for row in certificate.rows[:-1])


# -- updates by other tensors ----------------------------------------------------------------------

ZERO = """
import sys
import torch
import torch.distributed as dist
from torch import nn
bug = sys.argv[1]
dist.init_process_group("nccl")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(42)
model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3)).cuda()
params = list(model.parameters())
flat = nn.utils.parameters_to_vector(params).detach()
flat = torch.cat([flat, flat.new_zeros(-len(flat) % world)])
size = len(flat) // world
shard = nn.Parameter(flat[rank * size : (rank + 1) * size].clone())
opt = torch.optim.SGD([shard], 0.1, momentum=0.9)
draw = torch.Generator().manual_seed(rank)
for step in range(5):
    x = torch.randn(4, 6, generator=draw).cuda()
    y = torch.randint(0, 3, (4,), generator=draw).cuda()
    nn.functional.cross_entropy(model(x), y).backward()
    grads = torch.cat([p.grad.flatten() for p in params])
    grads = torch.cat([grads, grads.new_zeros(size * world - len(grads))])
    shard.grad = torch.empty_like(shard)
    if bug == "local":
        shard.grad.copy_(grads[rank * size : (rank + 1) * size])
    else:
        dist.reduce_scatter_tensor(shard.grad, grads)
        if bug != "sum":
            shard.grad /= world
    opt.step()
    out = torch.empty(size * world, device="cuda")
    dist.all_gather_into_tensor(out, shard.detach())
    nn.utils.vector_to_parameters(out[: sum(p.numel() for p in params)], params)
    model.zero_grad()
"""


@pytest.mark.parametrize(
    ("bug", "reason"),
    [
        ("none", ""),
        ("sum", "step 0: the change of the parameter is 2 times that of one device"),
        ("local", "step 0: the gradient differs along data, where the mean over data is that of"),
    ],
)
def test_updates_of_shards_in_tensors_of_no_module_are_judged(tmp_path, bug, reason):
    """Hand-written ZeRO-1: the optimizer updates a flat shard, which is gathered into parameters later."""
    file = tmp_path / "train.py"
    file.write_text(ZERO)

    certificate = certify_script(file, DATA, [bug])

    assert certificate.steps == 2
    assert certificate.ok == (not reason), certificate
    if reason:
        assert certificate.first is not None and reason in certificate.first.reason


# -- FullyShardedDataParallel ----------------------------------------------------------------------

FULLY_SHARDED = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
dist.init_process_group("nccl")
rank = dist.get_rank()
torch.cuda.set_device(rank)
torch.manual_seed(0)
model = FullyShardedDataParallel(
    nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)),
    device_id=rank,
    use_orig_params=True,
    mixed_precision=MixedPrecision(torch.bfloat16, torch.float32, torch.bfloat16),
)
opt = torch.optim.AdamW(model.parameters(), 0.01)
data = TensorDataset(torch.randn(16, 6))
for (x,) in DataLoader(data, 4, sampler=DistributedSampler(data)):
    opt.zero_grad()
    model(x.cuda()).square().mean().backward()
    if sys.argv[1] == "all":
        model.clip_grad_norm_(0.05)
    else:
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    opt.step()
"""


@pytest.mark.parametrize("norm", ["all", "shards"])
def test_fully_sharded_data_parallel_computes_in_float64_on_cpus(tmp_path, norm):
    file = tmp_path / "train.py"
    file.write_text(FULLY_SHARDED)

    certificate = certify_script(file, DATA, [norm])

    assert certificate.ok == (norm == "all"), certificate
    if norm == "shards":
        assert "times that of one device" in certificate.first.reason


# -- BatchNorm -------------------------------------------------------------------------------------

CONVOLUTION = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
dist.init_process_group("nccl")
torch.manual_seed(0)
layers = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2)
model = nn.Sequential(*layers).cuda()
if sys.argv[1] == "all":
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
model = DistributedDataParallel(model, device_ids=[0])
opt = torch.optim.SGD(model.parameters(), 0.1)
data = TensorDataset(torch.randn(16, 3, 6, 6), torch.randn(16, 2))
for x, y in DataLoader(data, 4, sampler=DistributedSampler(data)):
    opt.zero_grad()
    nn.functional.mse_loss(model(x.cuda()), y.cuda()).backward()
    opt.step()
"""


@pytest.mark.parametrize("statistics", ["all", thorough("each")])
def test_batch_norm_must_take_statistics_of_all_rows(tmp_path, statistics):
    """The one process has torch's own BatchNorm of all rows."""
    file = tmp_path / "train.py"
    file.write_text(CONVOLUTION)

    certificate = certify_script(file, DATA, [statistics])

    assert certificate.ok == (statistics == "all"), certificate
    if statistics == "each":
        assert "BatchNorm '1' takes the mean and variance of the rows" in certificate.first.reason


# -- collectives -----------------------------------------------------------------------------------


def test_recorded_collectives_are_those_of_the_steps(tmp_path, capsys):
    file = tmp_path / "train.py"
    file.write_text(LOADED)
    out = tmp_path / "steps.json"
    words = ["certify", "--run", str(file), "--mesh", "data=2", "--record", str(out)]
    assert main([*words, "--", "--sampler"]) == 0
    recording = Recording.load(out)
    assert recording.program == "train.py --sampler" and recording.axes == DATA
    assert not recording.mismatch()
    for calls in recording.ranks:
        # Weights and bias in float64, reduced in the backward of each of two steps.
        reduced = [call for call in calls if call.collective == "all_reduce"]
        assert [call.bytes for call in reduced] == [32, 32]
        assert all("train.py:18 in <module>" in call.line for call in reduced)
    page = tmp_path / "page.html"
    assert main(["explore", str(out), "--out", str(page)]) == 0
    assert "all_reduce" in page.read_text()


def test_recording_of_several_meshes_is_refused():
    with pytest.raises(ValueError, match="record must be of one mesh; got 2"):
        certify_script(__file__, [DATA, DATA], record="steps.json")


# -- errors ----------------------------------------------------------------------------------------

LINEAR = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
class Noisy(nn.Linear):
    def forward(self, x):
        return super().forward(x + torch.rand_like(x))
dist.init_process_group("nccl")
model = DistributedDataParallel(nn.Linear(3, 1).cuda(), device_ids=[0])
opt = torch.optim.SGD(model.parameters(), 0.1)
x = torch.rand(4, 3) if "--seed" not in sys.argv else torch.ones(4, 3)
"""
STEP = "model(x).sum().backward()\nopt.step()"
ERRORS = {
    "no step": (LINEAR, "must step an optimizer of torch.optim; got no step"),
    "raises": (
        LINEAR + "raise KeyError('no data')",
        r"train.py:14 raised in rank \d of 2: KeyError",
    ),
    "draws": (
        LINEAR.replace("nn.Linear(3, 1)", "Noisy(3, 1)") + STEP,
        "must draw nothing in its steps",
    ),
    "asks for a GPU": (
        LINEAR.replace("dist.init", "assert torch.cuda.is_available()\ndist.init"),
        r"train.py:10 raised in rank \d of 2: AssertionError: assert torch.cuda.is_available\(\). "
        "This run has no GPUs",
    ),
    "exits": (LINEAR + "sys.exit(3)", "raised in rank . of 2: SystemExit: 3"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_scripts_that_cannot_be_judged_raise_one_line(tmp_path, name):
    text, message = ERRORS[name]
    file = tmp_path / "train.py"
    file.write_text(text)
    with pytest.raises(PromiseError, match=message):
        certify_script(file, DATA)


def test_generators_of_a_gpu_draw_on_the_cpu(tmp_path):
    file = tmp_path / "train.py"
    draw = """
draw = torch.Generator(device="cuda").manual_seed(0)
assert isinstance(draw, torch.Generator) and isinstance(torch.default_generator, torch.Generator)
x = torch.rand(4, 3, generator=draw, device="cuda")
"""
    file.write_text(LINEAR + draw + STEP)
    certify_script(file, DATA, steps=1, same=["data"]).check()


def test_fixture_takes_the_path_of_a_script(certified, tmp_path):
    file = tmp_path / "train.py"
    file.write_text(LINEAR + STEP)
    assert certified(str(file), DATA, args=["--seed"], steps=1, same=["data"]).ok
    file.write_text(LINEAR + STEP.replace("sum()", "sum().mul(1 + dist.get_rank())"))
    with pytest.raises(AssertionError, match="train.py"):
        certified(file, DATA, args=["--seed"], steps=1)


def test_command_runs_a_script_with_its_arguments(tmp_path, capsys):
    file = tmp_path / "train.py"
    file.write_text(LINEAR + "assert sys.argv[1:] == ['--seed', '1']\n" + STEP)
    out = tmp_path / "out.json"
    words = ["certify", "--run", str(file), "--mesh", "data=2", "--steps", "1", "--json", str(out)]
    words += ["--same", "data"]
    assert main([*words, "--", "--seed", "1"]) == 0
    shown = capsys.readouterr().out
    assert "EXACT" in shown and "Batches are equal along data" in shown
    assert json.loads(out.read_text())["ok"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([__file__], "certify the script as it is: --run test_scripts.py"),
        (["absent.py:program"], "got no file 'absent.py'"),
        (["--run", "absent.py"], "--run must name a script; got no file 'absent.py'"),
        ([], "must be FILE:NAME or --run FILE; got neither"),
        (["a.py:f", "--run", "b.py"], "got a.py:f and b.py"),
        ([f"{__file__}:" + "absent" * 2], "got no function 'absentabsent'"),
        ([f"{__file__}:one_argument"], "got one_argument(rank)"),
        (["--run", __file__, "--steps", "0"], "--steps must be >= 1; got 0"),
        ([f"{__file__}:one_argument", "--", "--lr", "1"], "arguments of a script need --run"),
        (["--run", __file__, "--lr", "3"], "Arguments of the script stand behind --"),
        (["--run", __file__, "--html", "absent/a.html"], "--html must be a file in a folder that"),
        (["--run", __file__, "--split", "context"], "a split must be like context=1"),
        ([f"{__file__}:one_argument", "--record", "out.json"], "--record needs --run FILE"),
        (["--run", __file__, "--mesh", "data=4", "--record", "x"], "needs one --mesh; got 2"),
    ],
)
def test_command_lines_that_say_nothing_end_with_one_line(capsys, words, message):
    index = words.index("--") if "--" in words else len(words)
    assert main(["certify", *words[:index], "--mesh", "data=2", *words[index:]]) == 2
    written = capsys.readouterr().err
    assert message in written and written.count("\n") == 1


def one_argument(rank):
    """No program: it takes no world."""
