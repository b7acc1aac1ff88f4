"""torch.distributed.pipelining runs our schedules, and comes to the gradients of the whole model."""

import torch
from torch import nn

from fshard.pipeline.schedule.builders import pipeline_schedule
from fshard.pipeline.schedule.communication import with_messages, with_units
from fshard.pipeline.schedule.schedule import Schedule
from fshard.testing.processes import run_processes

NAMES = ("interleaved", "zbv", "v-min", "dualpipe-v")


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(5, 5), nn.Tanh()).double() for _ in range(4)]


def mean_square(output, target):
    return ((output - target) ** 2).mean()


def run_in_torch(schedules, folder):
    """Run each schedule in torch's runtime, and return the gradients of the stages that lie here."""
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    dist.init_process_group("gloo")
    rank, found = dist.get_rank(), {}
    for name, text in schedules.items():
        schedule = Schedule.from_text(text)
        own = [stage for stage, device in enumerate(schedule.placement) if device == rank]
        stages = [PipelineStage(layers()[stage], stage, schedule.stages, torch.device("cpu")) for stage in own]
        runtime = _PipelineScheduleRuntime(stages, schedule.microbatches, loss_fn=mean_square)
        with open(f"{folder}/{name}{rank}.csv", "w") as file:
            file.write(schedule.to_csv())
        runtime._load_csv(file.name, format="compute_comms")
        x = torch.arange(30, dtype=torch.float64).reshape(6, 5) / 30
        runtime.step(*[x] * (0 in own), target=x if 3 in own else None)
        found[name] = [(stage.stage_index, [p.grad for p in stage.submod.parameters()]) for stage in stages]
    dist.destroy_process_group()
    return found


def test_torch_runs_our_csv_with_equal_gradients(tmp_path):
    built = {name: with_messages(with_units(pipeline_schedule(name, stages=4, microbatches=3))) for name in NAMES}
    first, second = run_processes(run_in_torch, 2, {name: s.to_text() for name, s in built.items()}, str(tmp_path))
    x = torch.arange(30, dtype=torch.float64).reshape(6, 5) / 30
    model = nn.Sequential(*layers())
    mean_square(model(x), x).backward()
    for name in NAMES:
        gradients = dict([*first[name], *second[name]])
        for stage, module in enumerate(model):
            torch.testing.assert_close(gradients[stage], [p.grad for p in module.parameters()])
