"""`Checkpoints`: a folder of checkpoints by step, of which some are kept.

Here is `keep=2, best="loss"` after steps 0 to 3 with the losses 0.5, 0.2, 0.4 and 0.3:

    folder/1/index.json, ...    the smallest loss
    folder/2/index.json, ...    the last two
    folder/3/index.json, ...
    folder/stop-A               of run A, while its processes agree on their last save after SIGTERM

A save is made in the background if the caller does not wait for it.
"""

from __future__ import annotations

import atexit
import errno
import os
import signal
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from math import isnan, nan
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch

from fshard.checkpoint.files import LOCK, FolderLockedError, disk, locked_folder
from fshard.checkpoint.index import INDEX, read_index
from fshard.checkpoint.names import mesh_of_some
from fshard.checkpoint.restore import restore
from fshard.checkpoint.save import ended_saves, meet, next_token, run_token, snapshot, write
from fshard.checkpoint.snapshot import TreeSnapshot, as_device_of
from fshard.checkpoint.source import explain_absence
from fshard.errors import CheckpointError, LostProcessError
from fshard.mesh.layout import Mesh, PyTree
from fshard.tables import Table, TableCell, TableColumn, Tabular
from fshard.transforms.options import integer


class Checkpoints(Tabular):
    """A folder with a checkpoint for each saved step. All processes make one, and call it alike.

    SIGTERM after the first save: the next `save` of any folder is made, whatever `every` is, and
    ends the process. With several processes it is the one after, which all make. A second SIGTERM,
    or one after `wait()`, ends it at once.

    A run that continues from an earlier step keeps the later checkpoints of the run before.

    Prints as a table of the saved steps, with their bytes and metrics.

    Args:
        path: the folder, which is made.
        keep: number of the last checkpoints to keep.
        keep_every: steps that this divides are kept too.
        best: a metric, "aux.loss" in a tree of them; the checkpoint where it is smallest is kept
            too. "-accuracy": where it is largest.
        every: `save` saves at steps that this divides.
        timeout: seconds to wait for other processes.

    >>> import tempfile, torch
    >>> folder = Checkpoints(tempfile.mkdtemp(), keep=2, best="loss")
    >>> for step, loss in enumerate([0.5, 0.2, 0.4, 0.3]):
    ...     folder.save(step, {"w": torch.ones(3) * step}, wait=False, metrics={"loss": loss})
    >>> folder.wait()
    >>> folder.steps, folder.latest, folder.restore({"w": torch.zeros(3)}, step=1)
    ([1, 2, 3], 3, {'w': tensor([1., 1., 1.])})
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        keep: int = 3,
        keep_every: int | None = None,
        best: str | None = None,
        every: int = 1,
        timeout: float = 600,
    ) -> None:
        errors = integer("keep", keep) + integer("every", every)
        if keep_every is not None:
            errors += integer("keep_every", keep_every)
        if errors:
            raise ValueError(f"Checkpoints: {'; '.join(errors)}.")

        self.path = Path(path).absolute()
        self.keep = keep
        self.keep_every = keep_every
        self.best = best
        self.every = every
        self._timeout = timeout
        self._callers: set[int] = set()  # threads that are in `save`
        self._metrics: dict[int, Mapping[str, float]] = {}  # by step, as far as they are read

        self._is_first_writer = False
        # The save in the background, its mesh if that is of some devices, what it has raised, and
        # the memory that it writes from.
        self._mesh: Mesh | None = None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._staging: dict[int, torch.Tensor] = {}

    def reopened(self) -> Checkpoints:
        """Return another one of the same folder and options, which waits for no save of this one."""
        return Checkpoints(
            self.path,
            keep=self.keep,
            keep_every=self.keep_every,
            best=self.best,
            every=self.every,
            timeout=self._timeout,
        )

    @property
    def steps(self) -> list[int]:
        """The steps of all checkpoints, read from the folder."""
        names = os.listdir(self.path) if self.path.is_dir() else []
        steps: list[int] = []
        for name in names:
            if _is_step(name) and (self.path / name / INDEX).is_file():
                steps.append(int(name))
        return sorted(steps)

    @property
    def latest(self) -> int | None:
        """The last step that is saved, read from the folder; None without any."""
        return max(self.steps, default=None)

    def table(self) -> Table:
        """Return the saved steps, with their bytes and metrics, read from the folder."""
        indices = {step: read_index(self.path / str(step)) for step in self.steps}
        metrics = list[str]()
        for index in indices.values():
            metrics += [name for name in index.metrics if name not in metrics]
        columns = [TableColumn("step", "count"), TableColumn("saved, bytes", "bytes")]
        columns += [TableColumn(name) for name in metrics]
        table = Table(columns, lead=f"checkpoints in {self.path}")
        for step, index in indices.items():
            size = sum([writer.size for writer in index.writers])
            values = list[TableCell]()
            for name in metrics:
                value = index.metrics.get(name)
                values.append(TableCell(value, "" if value is None else f"{value:.6g}"))
            table.add(step, size, *values)
        return table

    def restore(self, target: PyTree = None, *, step: int | None = None, **options: Any) -> Any:
        """Return the checkpoint of a step, by default the last.

        See `fs.restore` for the target and the options.
        """
        self._join()
        if step is None:
            step = self.latest
        if step is None:
            raise CheckpointError(f"{self.path} has no checkpoint: {explain_absence(self.path)}.")
        return restore(self.path / str(step), target, **options)

    def save(
        self,
        step: int,
        tree: PyTree,
        *,
        wait: bool = True,
        metrics: Mapping[str, Any] | None = None,
    ) -> None:
        """Save a tree as the checkpoint of a step: see `fs.save`.

        With `wait=False` the tree is copied to the host, and written beside training; only the
        thread that writes waits for copies from a GPU. The next save waits for it; its errors are
        raised then, or by `wait()`. A process that exits writes it to the end first.
        """
        errors = integer("step", step, 0)
        if errors:
            raise ValueError(f"Checkpoints.save: {errors[0]}.")
        caller = threading.get_ident()
        if caller in self._callers:
            raise CheckpointError(
                f"{self.path} must not be saved while this thread saves there; got a save that "
                "interrupts it, as from the handler of a signal. Set a flag in the handler and "
                "save after the step: on SIGTERM that is done for you."
            )
        self._callers.add(caller)
        try:
            self._save(step, tree, wait, metrics)
        finally:
            self._callers.discard(caller)

    def _save(self, step: int, tree: PyTree, wait: bool, metrics: Mapping[str, Any] | None) -> None:
        termination.listen(self)
        is_last = self._ends_at(step)
        if step % self.every and not is_last:
            return

        self._join()
        mesh = mesh_of_some(tree)
        is_writer = mesh is None or mesh.is_member
        if is_writer:
            self._mesh = mesh
            with as_device_of(mesh):
                self._save_here(step, tree, wait or is_last, metrics)
        if is_last:
            # If all have written, all have read the marker. Processes outside of a mesh may not
            # have read it yet: then it stays.
            if run_token() and self._is_first_writer and mesh is None:
                disk.unlink(self._marker())
            termination.end()

    def _save_here(
        self, step: int, tree: PyTree, wait: bool, metrics: Mapping[str, Any] | None
    ) -> None:
        """Save the shares of the devices held here."""
        token = next_token()
        content = snapshot(self.path / str(step), token, tree, metrics)
        self._is_first_writer = 0 in content.shares
        if metrics:
            self._validate_metrics(content.index.metrics)
        if wait:
            self._write(step, content, token)
            return
        with torch.no_grad():
            content = content.staged(self._staging)
        self._start_write(step, content, token)

    def _validate_metrics(self, metrics: Mapping[str, float]) -> None:
        """Raise if metrics are without the one that is `best`."""
        if self.best is None or self.best.removeprefix("-") in metrics:
            return
        names = ", ".join(metrics) or "no numbers"
        raise ValueError(
            f"Checkpoints.save: metrics must have {self.best!r}, which is `best`; got {names}."
        )

    def wait(self) -> None:
        """Wait until what was saved last is on the disk; raise its errors.

        From now on SIGTERM acts as before.
        """
        self._join()
        termination.ignore(self)

    def _join(self) -> None:
        """Wait for the save in the background; raise its errors."""
        if self._thread is not None:
            with as_device_of(self._mesh):
                meet()  # so that all devices have begun to write
        self._join_here()

    def _join_here(self) -> None:
        """Wait for the thread of this device alone; raise its errors."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error = self._error
            self._error = None  # raised once
            raise error

    def _join_at_exit(self) -> None:
        """Print the errors of the last save, but not of a virtual device that was killed in it.

        Without meeting other devices: virtual ones have ended, and a world of processes may have
        been left, in which the mesh is none any more.
        """
        with suppress(LostProcessError):
            self._join_here()

    def _start_write(self, *arguments: Any) -> None:
        if self._thread is None:
            atexit.register(self._join_at_exit)
        self._thread = threading.Thread(
            target=self._write_in_background, args=arguments, name="fshard checkpoint"
        )
        self._thread.start()

    def _write_in_background(self, *arguments: Any) -> None:
        with suppress(OSError, AttributeError):  # training is to have the processor
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        try:
            with torch.no_grad():
                self._write(*arguments)
        except BaseException as error:
            self._error = error

    def _write(self, step: int, content: TreeSnapshot, token: str) -> None:
        content.wait()
        write(self.path / str(step), content, token, self._timeout)
        if 0 in content.shares:
            self._metrics[step] = content.index.metrics
            self._remove_before(step)

    def _remove_before(self, latest: int) -> None:
        """Remove checkpoints before the latest that are not to be kept, and incomplete ones."""
        steps = [step for step in self.steps if step <= latest]
        retained = set(steps[-self.keep :])
        if self.keep_every is not None:
            retained |= {step for step in steps if step % self.keep_every == 0}
        if self.best is not None:
            retained |= self._best_step(steps, self.best)
        for name in sorted(os.listdir(self.path)):
            if not _is_step(name) or not (self.path / name).is_dir():
                continue
            # A run that continues from an earlier step leaves the later checkpoints as they are.
            if int(name) < latest and int(name) not in retained:
                remove(self.path / name)

    def _best_step(self, steps: Sequence[int], best: str) -> set[int]:
        """Return the first step with the best value; none if no step has one."""
        name = best.removeprefix("-")
        sign = -1 if best.startswith("-") else 1
        values: list[tuple[float, int]] = []
        for step in steps:
            if step not in self._metrics:
                self._metrics[step] = read_index(self.path / str(step)).metrics
            value = sign * self._metrics[step].get(name, nan)
            if not isnan(value):
                values.append((value, step))
        return {min(values)[1]} if values else set()

    # Note [The last save of several processes]
    # SIGTERM may reach processes before and after the same call of `save`. So the first that has it
    # leaves a marker with the step that it saves now, and trains on; all processes read the marker at
    # the next step, which is the last for all of them.

    def _ends_at(self, step: int) -> bool:
        """Return True if this save is the last: see Note [The last save of several processes]."""
        if not run_token():
            return termination.is_pending
        marker = self._marker()
        if marker.exists():
            return step > int(marker.read_text())
        if termination.is_pending:
            disk.make_folder(self.path)
            aside = marker.with_suffix(f".{os.getpid()}")
            aside.write_text(str(step))
            aside.rename(marker)  # so that it is never read without its text
        return False

    def _marker(self) -> Path:
        return self.path / f"stop-{run_token()}"


class Termination:
    """The handler of SIGTERM, one for all folders of a process.

    The first save after the signal is the last.
    """

    def __init__(self) -> None:
        self.is_pending = False
        self._folders = WeakSet[Checkpoints]()
        self._previous: Any = signal.SIG_DFL

    def listen(self, folder: Checkpoints) -> None:
        """Note SIGTERM from now on, if this is the main thread."""
        # Python sets handlers in the main thread alone.
        is_main_thread = threading.current_thread() is threading.main_thread()
        if folder in self._folders or not is_main_thread:
            return
        if signal.getsignal(signal.SIGTERM) != self._handle:
            previous = signal.signal(signal.SIGTERM, self._handle)
            self._previous = previous or signal.SIG_DFL  # None: not set by Python
        self._folders.add(folder)

    def _handle(self, *_: Any) -> None:
        """Handle SIGTERM; the next signal is handled as before."""
        self.is_pending = True
        signal.signal(signal.SIGTERM, self._previous)

    def ignore(self, folder: Checkpoints) -> None:
        """Handle SIGTERM as before, when no folder listens."""
        if folder not in self._folders:
            return
        self._folders.remove(folder)
        # A handler that was set after this one stays.
        if not self._folders and signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, self._previous)

    def end(self) -> None:
        """End the process, as SIGTERM does without a folder."""
        self.is_pending = False
        self._folders.clear()
        signal.signal(signal.SIGTERM, self._previous)
        os.kill(os.getpid(), signal.SIGTERM)


termination = Termination()


def _is_step(name: str) -> bool:
    return name.isdecimal() and name == str(int(name))


def remove(path: Path) -> None:
    """Remove a checkpoint: its index first, so that it is none from then on.

    Files that `fs.save` has not written stay, and what a link names.
    """
    if path.is_symlink():
        disk.unlink(path)
        return
    try:
        with locked_folder(path, 0):  # else a save that ends meanwhile would lose its files
            names = {*os.listdir(path)} - {LOCK}
            if INDEX in names:
                disk.unlink(path / INDEX)
                disk.fsync_folder(path)
            files = ended_saves(path)
            for name in files:
                disk.unlink(path / name)
    except FolderLockedError:  # another job commits there, or removes it
        return

    if names <= {INDEX, *files}:
        try:
            disk.remove_folder(path)
        except OSError as error:
            is_in_use = error.errno in (errno.ENOTEMPTY, errno.EEXIST)  # another job saves there
            if not is_in_use:
                raise
