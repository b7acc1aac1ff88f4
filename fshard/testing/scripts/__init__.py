"""`certify_script`: does a training script, run as it is, train in processes as in one?

script ─> run            in each process: the script from its first line, with
            substitutions    gloo and CPUs for NCCL and GPUs
            watch            parameters, gradients and losses, by hooks of torch
            loaders          batches
       ─> joining        the batches of the processes, for the one
       ─> programs       compares the runs, as those of `certify_program`
"""

from fshard.testing.scripts.script import certify_script

__all__ = ["certify_script"]
