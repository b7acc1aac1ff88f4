"""`certify_program`: does a program of plain torch.distributed train as on one device?

The program runs in processes, one for each device of a mesh, and in one process with the batches of
all:

    certify ─> record      in each process: the batch, losses, gradients and parameters of steps
            ─> compare     leaf by leaf, in the order of the model; which factor, which other leaf

Both run in float64, so a difference that rounding does not explain is a mistake.

A script, which has no such function, `certify_script` runs from its first line:

    script ─> substitutions    gloo and CPUs for NCCL and GPUs, while it runs
           ─> watch            parameters, gradients and losses, by hooks of torch
           ─> loaders          batches, recorded in processes and joined for the one
"""

from fshard.testing.programs.certify import certify_program
from fshard.testing.programs.record import ProgramWorld
from fshard.testing.programs.script import certify_script

__all__ = ["ProgramWorld", "certify_program", "certify_script"]
