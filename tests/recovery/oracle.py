"""Run a program of which nothing is lost: on one mesh, or moved to another by a checkpoint."""

import torch

import fshard as fs


class Alone:
    """A run that keeps nothing."""

    latest = None

    def __init__(self, mesh):
        self.mesh = mesh

    def save(self, step, tree, **options):
        pass


class Stopped(Exception):
    pass


class OnDisk:
    """A run that keeps its steps in a folder, and stops after some."""

    def __init__(self, mesh, folder, end=None):
        self.mesh = mesh
        self.end = end
        self.folder = fs.Checkpoints(folder)

    @property
    def latest(self):
        return self.folder.latest

    def restore(self, tree, **options):
        return self.folder.restore(tree, **options)

    def save(self, step, tree, **options):
        self.folder.save(step, tree)
        if step == self.end:
            raise Stopped


def undisturbed(make_mesh, program, count=4):
    """Return what a program ends with on one mesh of virtual devices."""
    torch.manual_seed(3)
    return program(Alone(make_mesh(tuple(range(count)))))


def moved(make_mesh, program, folder, step, counts):
    """Return what a program ends with if it moves to another mesh after a step; None: before any.

    Args:
        counts: the number of devices at first, and then.
    """
    torch.manual_seed(3)
    before, after = [make_mesh(tuple(range(count))) for count in counts]
    if step is None:
        return program(Alone(after))
    try:
        program(OnDisk(before, folder, step))
    except Stopped:
        return program(OnDisk(after, folder))
    raise AssertionError("the program has not reached the step")
