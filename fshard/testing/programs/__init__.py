"""`certify_program`: does a program of plain torch.distributed train as on one device?

The program runs in processes, one for each device of a mesh, and in one process with the batches of
all:

    certify ─> record      in each process: the batch, losses, gradients and parameters of steps
            ─> compare     leaf by leaf, in the order of the backward
                losses         which number of the losses of ranks is that of one process
                unreduced      gradients that ranks have of their own
                causes         what the numbers of a divergence show

Both run in float64, so a difference that rounding does not explain is a mistake.
"""

from fshard.testing.programs.certify import certify_program
from fshard.testing.programs.record import ProgramWorld

__all__ = ["ProgramWorld", "certify_program"]
