"""Checkpoints of runs: a file each and, where several processes train, a folder beside it that they write together.

    writer = Writer("out/run", ranks)
    writer.save("last.pt", content, weights, step)      # each process writes its part, while training goes on
    writer.wait()                                       # now it is on the disk
    saved = read_checkpoint("out/run/last.pt")          # a dict; what is in the folder is there as meta tensors
    saved = read_tensors("out/run/last.pt", saved, like)    # with them, on any number of processes, sharded or not
    to_one_file("out/run/last.pt")                      # what torch.load alone can read

The file last.pt names its folder, last-STEP.parts, in the format of torch.distributed.checkpoint. It is written after
the folder, which it replaces by another only then, so that at any moment it goes with a folder that is whole.
"""

import contextlib
import glob
import itertools
import os
import shutil
import warnings
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.tensor import DTensor, distribute_tensor

from data.common import UserError, atomic_write, user_errors
from data.weights import read_file


def walk(value, use, where=""):
    """A value of dicts, lists and tensors, with use(where, tensor) in place of each tensor; where: its keys, with /."""
    if isinstance(value, dict):
        return {key: walk(part, use, f"{where}/{key}") for key, part in value.items()}
    if isinstance(value, list):
        return [walk(part, use, f"{where}/{i}") for i, part in enumerate(value)]
    return use(where, value) if isinstance(value, torch.Tensor) else value


class Writer:
    """Writes the checkpoints of a run."""

    def __init__(self, folder, ranks):
        self.folder, self.ranks, self.jobs = folder, ranks, {}  # name -> a Future
        # dcp.async_save has a thread for each call; two at once, of best and last, would mix up their messages
        self.thread = ThreadPoolExecutor(max_workers=1)
        if ranks.rank == 0:
            for name in ("last.pt", "best.pt"):
                path = os.path.join(folder, name)
                kept = read_checkpoint(path).get("parts") if os.path.exists(path) else None
                remove_parts(path, but=kept)  # of a run that was killed while it wrote

    def save(self, name, content, weights, step):
        """Save a dict as `name`. To be called on all ranks; `weights`, another dict, is what may be sharded.

        The weights may change as soon as this returns. Before, it waits for the last one of that name to be written.
        """
        path = os.path.join(self.folder, name)
        if self.ranks.size == 1:
            with told_errors(path), atomic_write(path) as file:  # whole or not at all, whenever the run is killed
                torch.save(content | self.ranks.whole(weights), file)
            remove_parts(path)  # of a run that more processes began
            return
        tensors = {}

        def put_aside(where, tensor):
            tensors[where] = tensor.detach()
            return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")

        content = content | walk(weights, put_aside)
        if name in self.jobs:
            self.jobs[name].result()
        content["parts"] = self.ranks.first_decides(lambda: self._new_folder(f"{os.path.splitext(name)[0]}-{step}"))
        self.jobs[name] = self.thread.submit(self._write, path, content, BlockingAsyncStager().stage(tensors))

    def _new_folder(self, stem):
        """A name that is free; a step may be saved again, by a run that was killed and goes on."""
        names = itertools.chain([f"{stem}.parts"], (f"{stem}-{i}.parts" for i in itertools.count(2)))
        return next(name for name in names if not os.path.exists(os.path.join(self.folder, name)))

    def _write(self, path, content, tensors):
        folder = os.path.join(self.folder, content["parts"])
        try:
            with told_errors(path):
                dcp.save(tensors, checkpoint_id=folder, process_group=self.ranks.writers)
                if self.ranks.rank == 0:
                    with atomic_write(path) as file:
                        torch.save(content, file)
        except UserError:
            if self.ranks.rank == 0:  # no other knows whether the file names it already
                shutil.rmtree(folder, ignore_errors=True)
            raise
        if self.ranks.rank == 0:
            remove_parts(path, but=content["parts"])

    def check(self):
        """Raise what went wrong in the background."""
        for job in self.jobs.values():
            if job.done():
                job.result()

    def wait(self):
        """Return once all is written, or raise."""
        for job in self.jobs.values():
            job.result()


@contextlib.contextmanager
def told_errors(path):
    """A file that cannot be written, as on a full disk, is told in one line."""
    try:
        yield
    except (OSError, RuntimeError, CheckpointException) as error:  # torch's own writer has RuntimeErrors
        reason = [line for line in str(error).splitlines() if "Error" in line or "fail" in line] or [str(error)]
        raise UserError(f"could not write {path} ({reason[-1].strip()[:150]}); is the disk full? What was saved before "
                        "is whole: make room and go on with --init_from resume") from None


def remove_parts(path, but=None):
    """Remove the folders of a checkpoint, except that of the name `but`."""
    for folder in glob.glob(glob.escape(os.path.splitext(path)[0]) + "-*.parts"):
        if os.path.basename(folder) != but:
            shutil.rmtree(folder)


def read_checkpoint(path):
    """A checkpoint as a dict; UserError if the file is missing, truncated or something else."""
    if not os.path.exists(path):
        raise UserError(f"{path}: no such file or folder; name a run's folder, or a checkpoint")
    with user_errors():
        saved = read_file(path, "give a file that train.py wrote")
    if not isinstance(saved, dict):
        raise UserError(f"{path}: holds a {type(saved).__name__}, not a checkpoint; give a file that train.py wrote")
    return saved


def read_tensors(path, saved, like=lambda where: None):
    """What read_checkpoint returned, or part of it, with tensors as a program holds them.

    like(where): the tensor that goes with a path of walk's, or None; where FSDP has sharded it, so is what is returned,
    and of the folder each process reads its share only.
    """
    wanted = {}

    def take(where, value):
        ours = like(where)
        sharded = isinstance(ours, DTensor) and ours.shape == value.shape
        if value.is_meta:
            new = torch.empty_like(ours, dtype=value.dtype) if sharded else torch.empty_like(value, device="cpu")
            return wanted.setdefault(where, new)
        return distribute_tensor(value, ours.device_mesh, ours.placements, src_data_rank=None) if sharded else value

    saved = walk(saved, take)
    if wanted:
        folder = os.path.join(os.path.dirname(path), saved["parts"])
        if not os.path.exists(os.path.join(folder, ".metadata")):
            now = read_checkpoint(path).get("parts")
            raise UserError(f"{folder}, a part of {path}, is missing; " + (
                "copy it from where the run was" if now == saved["parts"] else "its run has saved it anew; try again"))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # "assuming the intent is to load in a single process": so it is
                dcp.load(wanted, checkpoint_id=folder, no_dist=True)
        except (Exception, CheckpointException) as error:  # the latter is none; foreign bytes break it in any way
            raise UserError(f"{folder}: not a readable part of {path} ({type(error).__name__}); copy both from where "
                            "the run was") from None
    return saved


def to_one_file(path):
    """Put a checkpoint and its folder, if it has one, into one file of the same name. Returns whether it had one."""
    saved = read_checkpoint(path)
    if not saved.get("parts"):
        return False
    saved = read_tensors(path, saved)
    parts = saved.pop("parts")
    with atomic_write(path) as file:
        torch.save(saved, file)
        file.flush()
        os.fsync(file.fileno())  # before the look at what is there, since it may take long
        if read_checkpoint(path).get("parts") != parts:
            raise UserError(f"{path}: its run has saved it anew meanwhile; try again")
    shutil.rmtree(os.path.join(os.path.dirname(path), parts))
    return True
