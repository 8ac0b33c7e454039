"""Several processes that train one model together, as torchrun starts them: a rank each.

    torchrun --nproc_per_node 8 train.py ... --parallel ddp         each rank holds the model, gradients are averaged
    torchrun --nproc_per_node 8 train.py ... --parallel fsdp        each rank holds a share of every weight (FSDP2)
    python train.py ... --offload                                   one, which holds the weights in CPU memory (FSDP2)

    ranks = Ranks.join(torch.device("cuda"), torch.bfloat16, minutes=10, kind="fsdp")   # without torchrun, one of one
    model = ranks.spread(make)                          # make() on the first rank; of the model each gets its share
    step = ranks.wrap(model)
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
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard,
                                    register_fsdp_forward_method)
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

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
    device: torch.device = torch.device("cpu")
    dtype: torch.dtype = torch.float32  # in which FSDP gathers weights; gradients are summed in float32
    mesh: DeviceMesh | None = None  # what FSDP shards over; None: each rank holds the model
    offload: bool = False  # FSDP keeps weights, gradients and optimizer states in CPU memory
    writers: dist.ProcessGroup | None = None  # for messages of the thread that writes checkpoints

    @classmethod
    def join(cls, device, dtype, minutes, kind="ddp", offload=False, alone=False):
        """Join the processes that torchrun started, if it did; they stay joined for another call.

        minutes: how long a rank waits for the others before it ends with an error. kind: "ddp" or "fsdp"; offload is
        fsdp, also of one process. alone: whatever torchrun started, this process works by itself.
        """
        size = 1 if alone else int(os.environ.get("WORLD_SIZE", 1))
        sharded = offload or kind == "fsdp" and size > 1
        if size == 1 and not sharded:
            return cls(device=device, dtype=dtype)
        rank = int(os.environ["RANK"]) if size > 1 else 0
        if not dist.is_initialized():
            if device.type == "cuda":  # else all of this machine's would meet on its first card
                torch.cuda.set_device(device)
            store = {} if size > 1 else dict(store=dist.HashStore(), rank=0, world_size=1)
            dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
                                    timeout=datetime.timedelta(minutes=minutes), **store)
        mesh = init_device_mesh(device.type, (size,)) if sharded else None
        writers = dist.new_group(backend="gloo", timeout=datetime.timedelta(minutes=minutes)) if size > 1 else None
        return cls(rank, size, device, dtype, mesh, offload, writers)

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

    def portion(self, number):
        """(first, end) of this rank's portion of a number of batches to score.

        All of them, where there are too few, or FSDP has the ranks go in step.
        """
        if self.mesh is not None or number < self.size:
            return 0, number
        return tuple(number * rank // self.size for rank in (self.rank, self.rank + 1))

    def shard(self, model):
        """Have FSDP2 shard a model on the meta device, by its blocks, and allocate this rank's share, to fill later."""
        policy = MixedPrecisionPolicy(param_dtype=self.dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
        on_cuda = self.device.type == "cuda"
        offload = CPUOffloadPolicy(pin_memory=on_cuda) if self.offload else OffloadPolicy()
        how = dict(mesh=self.mesh, mp_policy=policy, offload_policy=offload)
        looped = model.looped_parts()  # stay gathered until the backward pass is over
        for part in model.parts_to_compile():
            fully_shard(part, reshard_after_forward=part not in looped, **how)
        for part in looped:
            part.set_reshard_after_backward(False)
        fully_shard(model, **how)
        for method in ("step", "evaluate", "stream", "solve"):
            if hasattr(model, method):
                register_fsdp_forward_method(model, method)
        model.to_empty(device="cpu" if self.offload else self.device)
        for module in model.modules():  # what is no parameter is small, and stays where it is used
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, torch.empty_like(buffer, device=self.device))
        return model

    @torch.no_grad()
    def spread(self, make):
        """The model that make() returns. Sharded, the first rank alone makes it, on the CPU, and sends each its share.

        To be called on all ranks, with a function that takes no arguments.
        """
        if self.mesh is None:
            return make().to(self.device)
        made = []

        def make_first():
            made.append(make())
            tensors = [*made[0].named_parameters(), *made[0].named_buffers()]
            return type(made[0]), made[0].config, {name: tensor.dtype for name, tensor in tensors}

        Model, config, dtypes = self.first_decides(make_first)
        with torch.device("meta"):
            model = Model(config)
        for name, parameter in model.named_parameters():
            parameter.data = parameter.data.to(dtypes[name])
        self.shard(model)
        whole = dict([*made[0].named_parameters(), *made[0].named_buffers()]) if made else {}
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            value = whole[name].detach() if made else torch.empty(tensor.shape, dtype=dtypes[name])
            value = value.to(self.device)
            if isinstance(tensor, DTensor):
                tensor.to_local().copy_(distribute_tensor(value, tensor.device_mesh, tensor.placements).to_local())
            else:
                if self.size > 1:
                    dist.broadcast(value, 0)
                tensor.copy_(value)
        return model.train(made[0].training if made else True)

    def averaged(self, model, rule):
        """An AveragedModel of a model from `spread`, sharded alike. rule: its multi_avg_fn."""
        if self.mesh is None:
            return AveragedModel(model, multi_avg_fn=rule)
        with torch.device("meta"):  # FSDP has no deepcopy
            averaged = AveragedModel(type(model)(model.config), multi_avg_fn=rule)
        self.shard(averaged.module)
        averaged.n_averaged = torch.zeros((), dtype=torch.long, device=self.device)
        with torch.no_grad():
            for ours, theirs in ((averaged.module.parameters(), model.parameters()),
                                 (averaged.module.buffers(), model.buffers())):
                for new, old in zip(ours, theirs):
                    new.copy_(old)
        return averaged

    def wrap(self, model):
        """model.step as a function, whose backward passes leave the mean of all ranks' gradients in the parameters."""
        if self.size == 1 or self.mesh is not None:
            return model.step
        # no step leaves a parameter out: branches and experts are stacked, nested passes run on no tokens too
        return DistributedDataParallel(Step(model), broadcast_buffers=False, gradient_as_bucket_view=True)

    @contextlib.contextmanager
    def syncs(self, step, now):
        """In its body, a forward and backward pass; DDP exchanges gradients only if `now`. step: what wrap returned.

        FSDP always does, or each rank would hold whole gradients.
        """
        model = getattr(step, "__self__", None)  # of a bound method
        with contextlib.nullcontext() if model is not None or now else step.no_sync():
            yield
        if isinstance(model, FSDPModule):
            for part in model.looped_parts():
                part.reshard()

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
        total = torch.stack([torch.as_tensor(value, dtype=torch.float64, device="cpu") for value in values])
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
