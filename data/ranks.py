"""Several processes that train one model together, as torchrun starts them: a rank each.

    torchrun --nproc_per_node 8 train.py ... --parallel ddp         each rank holds the model, gradients are averaged
    torchrun --nproc_per_node 8 train.py ... --parallel fsdp        each rank holds a share of every weight (FSDP2)

    ranks = Ranks.join(torch.device("cuda"), minutes=10)            # one rank of one, without torchrun
    step = ranks.wrap(model, "ddp", torch.bfloat16)
    loss, metrics, carry = step(batch, carry)           # model.step, whose backward pass then also talks to the others

torch.distributed does the work; here is what a training script must know of it. A batch is the same for any number of
ranks: each takes its rows of it, in order. So its loss is a mean over what the others count, too: a part's loss times
its count is what goes backward, and the sum over ranks is divided by the sum of the counts.
"""

import contextlib
import datetime
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

IGNORE = -100  # the label of what is not scored


class Step(nn.Module):
    """A model whose forward is its step, which is where DDP has its hooks."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, batch, carry):
        return self.model.step(batch, carry)


@dataclass
class Ranks:
    """This process among those that train together."""

    rank: int = 0
    size: int = 1

    @classmethod
    def join(cls, device, minutes):
        """Join the processes that torchrun started, if it did and they are not joined yet.

        device: a torch.device. minutes: how long a rank waits for the others before it ends with an error.
        """
        size = int(os.environ.get("WORLD_SIZE", 1))
        if size > 1 and not dist.is_initialized():
            wait = datetime.timedelta(minutes=minutes)
            if device.type == "cuda":  # else all of this machine's would meet on its first card
                torch.cuda.set_device(device)
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=wait)
        return cls(int(os.environ["RANK"]), size) if size > 1 else cls()

    @staticmethod
    def leave():
        """Say goodbye to the other processes, if there are any."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def first_decides(self, function):
        """What the first rank's call of `function` returns or raises, on all ranks. It is small and can be pickled."""
        found = [None, None]
        if self.rank == 0:
            try:
                found[0] = function()
            except Exception as error:  # told to all, or they would wait
                found[1] = error
        if self.size > 1:
            dist.broadcast_object_list(found, 0)
        if found[1] is not None:
            raise found[1]
        return found[0]

    @contextlib.contextmanager
    def first_goes_ahead(self):
        """The first rank runs the body alone, then the others do: it prepares files that they find."""
        if self.size > 1 and self.rank:
            dist.barrier()
        yield
        if self.size > 1 and not self.rank:
            dist.barrier()

    def shares(self, batch, parts):
        """This rank's rows of a batch, in `parts` parts: an iterable of dicts of tensors.

        Part i of all ranks together is chunk i of the batch, rows in order. Where there are too few rows, as of packed
        texts, a rank takes one that is not scored.
        """
        rows = len(next(iter(batch.values())))
        for chunk in torch.arange(rows).tensor_split(parts):
            mine = chunk.tensor_split(self.size)[self.rank]
            part = {name: values[mine if len(mine) else slice(1)] for name, values in batch.items()}
            if len(mine) or self.size > 1:  # alone, a part without rows is left out
                yield part if len(mine) else part | {"labels": torch.full_like(part["labels"], IGNORE)}

    def wrap(self, model, kind, dtype):
        """model.step as a function, whose backward passes leave the mean of all ranks' gradients in the parameters.

        kind: "ddp" or "fsdp", which shards, in place, each of `model.parts_to_compile()`, its blocks, and what is left.
        dtype: in which FSDP gathers weights; gradients are summed in float32.
        """
        if self.size == 1:
            return model.step
        if kind == "ddp":  # some steps leave a parameter out, such as a branch that nothing was sent to
            return DistributedDataParallel(Step(model), broadcast_buffers=False, find_unused_parameters=True,
                                           gradient_as_bucket_view=True)
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
        for part in [*model.parts_to_compile(), model]:
            fully_shard(part, mp_policy=policy)
        for method in ("step", "evaluate", "stream", "solve"):
            if hasattr(model, method):
                register_fsdp_forward_method(model, method)
        return model.step

    @contextlib.contextmanager
    def syncs(self, step, now):
        """In its body, backward passes exchange gradients with other ranks only if `now`. step: what wrap returned."""
        model = getattr(step, "__self__", None)  # of a bound method
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(now)
        with contextlib.nullcontext() if model is not None or now else step.no_sync():
            yield

    def scale_gradients(self, parameters, factor):
        """From what backward passes left to the sum over all ranks, times `factor`.

        Where the gradients are means over ranks, that is; sparse ones, which neither DDP nor FSDP knows of, are still
        this rank's: their rows are gathered.
        """
        for parameter in parameters:
            if parameter.grad is None:
                continue
            if parameter.grad.is_sparse and self.size > 1:
                parameter.grad = self._gathered(parameter.grad)
                parameter.grad *= factor
            else:
                parameter.grad *= factor * self.size

    def _gathered(self, grad):
        """The sum over ranks of sparse gradients (N, C), each with as many rows, which may repeat."""
        ids, rows = self.gather(grad._indices()[0]), self.gather(grad._values())
        return torch.sparse_coo_tensor(ids[None], rows, grad.shape)

    def sum(self, values):
        """The sum over ranks of a list of numbers or scalar tensors, as a list of floats."""
        if self.size == 1 or not values:
            return [float(value) for value in values]
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        total = torch.stack([torch.as_tensor(value, dtype=torch.float64, device=device) for value in values])
        dist.all_reduce(total)
        return total.tolist()

    def whole(self, state):
        """A state, of dicts, lists and tensors, with all of each tensor that FSDP shards. To be called on all ranks."""
        if isinstance(state, dict):
            return {name: self.whole(value) for name, value in state.items()}
        if isinstance(state, list):
            return [self.whole(value) for value in state]
        return state.full_tensor() if isinstance(state, DTensor) else state

    def gather(self, value):
        """Tensors (n, ...), n the same on all ranks, or a dict of them -> (ranks * n, ...), in their order.

        What is no tensor stays as it is.
        """
        if isinstance(value, dict):
            return {name: self.gather(part) for name, part in value.items()}
        if self.size == 1 or not isinstance(value, torch.Tensor):
            return value
        whole = value.new_empty(self.size * len(value), *value.shape[1:])
        dist.all_gather_into_tensor(whole, value.contiguous())
        return whole

    def deal(self, gathered, parts):
        """A list of what `gather` returned for each part -> this rank's rows of each of `parts` parts.

        Parts and ranks may be others than they were: the rows are in order, and are dealt out as `shares` does. What is
        None, as in a model without a carry, stays so.
        """
        if None in gathered:
            return [None] * parts

        def dealt(values, part):
            if isinstance(values[0], dict):
                return {name: dealt([value[name] for value in values], part) for name in values[0]}
            if not isinstance(values[0], torch.Tensor):
                return values[0]
            return torch.cat(values).tensor_split(parts)[part].tensor_split(self.size)[self.rank]

        return [dealt(gathered, part) for part in range(parts)]

    def all_objects(self, value):
        """[the value of each rank], which can be pickled."""
        found = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(found, value)
        return found


def shard_states(optimizer, state):
    """The state_dict of an optimizer over whole parameters -> the same over its own, which FSDP may have sharded."""
    params = [p for group in optimizer.param_groups for p in group["params"]]

    def sharded(parameter, value):
        if not (isinstance(parameter, DTensor) and isinstance(value, torch.Tensor) and value.shape == parameter.shape):
            return value
        return distribute_tensor(value.to(parameter.device), parameter.device_mesh, parameter.placements)

    states = {i: {name: sharded(params[i], value) for name, value in values.items()}
              for i, values in state["state"].items()}
    return {**state, "state": states}
