"""What a training run takes, before it is started: parameters, memory per GPU, FLOPs, hours, and what would fit.

    python train.py --model huginn --preset paper --dry_run --world_size 8      # seconds, on any machine; no data

    print_budget(configs, Model)        # configs: those of train.py's call, of training, model, use and data

Nothing is estimated that can be watched: the model's own step, backward pass and optimizer run on fake tensors, which
have shapes, dtypes and storages but no bytes (torch's FakeTensorMode), while `Ledger` adds up the storages that are
alive. A machine without the memory, or without a GPU, thus counts to the byte what the code would hold:

    static = weights + gradients + optimizer states + EMA + puzzle embedding table + two carries (the old, the new)
    peak   = static + max(16-bit copies of weights + activations, temporaries of the optimizer's step)

    weights, gradients    float32, 4 bytes each; a frozen base as it is held (--base_dtype), and without gradients
    optimizer states      what is in optimizer.state after a step: 8 bytes per trained weight, with either optimizer
    EMA                   a copy of the model, its frozen weights and buffers too
    carry                 z_H, z_L and the puzzles of the whole batch of a GPU, whatever grad_accum is
    copies                autocast's, that live from a weight's use to the end of the pass or, if saved, to its gradient
    activations           what else is alive at the worst moment of the forward and backward pass of one part

    ddp    everything is held by each of W GPUs, the batch is split
    fsdp   (weights + gradients + states + EMA) / W; the copies are those of the largest block, gathered at a time

    FLOPs  of a language model: its flops(), forward and backward, 6 per weight and token and the attention;
           of HRM: those of all matrix products of a step, counted; recomputed layers are in the time, not in the FLOPs
    time   FLOPs / (W * mfu * 989e12), the H100's dense bfloat16 (67e12 for --dtype float32)

Of a Huginn the memory is that of mean_backprop_depth steps with gradient, the FLOPs those of the mean of its draws. Of
DND the memory is that of selecting all tokens, which happens in the second step, the FLOPs of k_target. All tokens are
taken to be scored. A model of many equal layers is watched with few of them; the others add what one more adds. Float16
stands in for bfloat16, since on a CPU the models have ways of their own for the latter.

Left out: workspaces and temporaries within a kernel, buckets of ddp, what fsdp gathers ahead, --compile (which needs
less), evaluation (--eval_batch_size rows without gradient; a cache), validation time, data loading, communication.
A card counts as full at 95 %, less 1 GiB for the CUDA context.
"""

import dataclasses
import functools
import math
import types
import warnings
import weakref
from dataclasses import dataclass

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from data import arc, maze
from data.show import print_rows
from data.sudoku import parse_box

CARDS = {"H100, 80 GB": 81559 / 1024, "card of 24 GB": 24564 / 1024}  # GiB, as the driver tells
PEAK = {True: 989e12, False: 67e12}  # FLOP/s of an H100, dense: bfloat16, float32
SLOW = 1024  # below this width, kernels are too small to keep an H100 busy
ARC_TASKS = 960  # arc1 and conceptarc, as the paper counts them
FEW = 8  # layers, up to which all of them are watched
GIB = 2**30
aten = torch.ops.aten


# ---- watching


class Ledger(TorchDispatchMode):
    """Counts the bytes of storages that operations make, while they live, and the FLOPs of matrix products.

    own: tensors that do not count. weights: of those, whose casts are told apart as copies. With fake tensors, numbers
    that only data could tell are 0 or False, and a mask in brackets selects everything.
    """

    def __init__(self, own=(), weights=()):
        super().__init__()
        self.own, self.weights = ({t.untyped_storage()._cdata for t in tensors} for tensors in (own, weights))
        self.alive, self.flops = {}, 0  # address of a storage -> (weak reference, bytes, whether it is a copy)
        self.now = self.peak = (0, 0)  # bytes of activations, of copies

    def __torch_dispatch__(self, func, _, args=(), kwargs=None):
        kwargs, fake = kwargs or {}, any(t.__class__.__name__ == "FakeTensor" for t in tree_leaves(args))
        out = self.answer(func, args, kwargs) if fake else None
        out = func(*args, **kwargs) if out is None else out
        is_copy = func is aten._to_copy.default and args[0].untyped_storage()._cdata in self.weights
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided:
                self.enter(tensor.untyped_storage(), is_copy)
        if func._overloadpacket in flop_registry:
            self.flops += flop_registry[func._overloadpacket](*args, **kwargs, out_val=out)
        elif func is aten._scaled_dot_product_flash_attention_for_cpu.default:
            self.flops += sdpa_flop_count(*(t.shape for t in args[:3]))
        elif func is aten._scaled_dot_product_flash_attention_for_cpu_backward.default:
            self.flops += sdpa_backward_flop_count(*(t.shape for t in args[:4]))
        return out

    def answer(self, func, args, kwargs):
        """What fake tensors cannot tell, by shapes; None: they can."""
        if func is aten._local_scalar_dense.default:
            return False if args[0].dtype is torch.bool else 0
        if func is aten.index.Tensor and any(i is not None and i.dtype is torch.bool for i in args[1]):
            mask = args[1][0]
            everything = [torch.zeros(mask.numel(), dtype=torch.long) for _ in mask.shape]
            return func(args[0], everything + list(args[1][1:]))
        if func is aten._grouped_mm.default:  # torch has shapes for it in bfloat16 only
            a, b = args[:2]
            ends = args[2] if len(args) > 2 else kwargs["offs"]
            return a.new_empty(len(a), b.shape[-1]) if b.ndim == 3 else a.new_empty(len(ends), len(a), b.shape[-1])

    def enter(self, storage, is_copy):
        key, size = storage._cdata, storage.nbytes()
        if key not in self.own and key not in self.alive:
            self.alive[key] = weakref.ref(storage, functools.partial(self.leave, key)), size, is_copy
            self.add(size, is_copy)
            self.peak = max(self.peak, self.now, key=sum)

    def leave(self, key, _):
        _, size, is_copy = self.alive.pop(key)
        self.add(-size, is_copy)

    def add(self, size, is_copy):
        self.now = self.now[0] + size * (not is_copy), self.now[1] + size * is_copy


@dataclass
class Watched:
    """Bytes of one part's forward and backward pass."""

    activations: float  # at its worst moment
    copies: float  # then, of weights in 16 bits
    held: float  # of both, between the forward and the backward pass
    flops: float  # of the matrix products


def watch(model, batch, dtype, carry=None):
    """Run a step and its backward pass, gradients being there already as with grad_accum -> Watched.

    model, batch, carry: of fake tensors, or of true ones on a CPU. dtype: of autocast; float32 = none.
    """
    for p in model.parameters():
        p.grad = torch.zeros_like(p) if p.requires_grad else None
    weights = list(model.parameters())
    own = [*weights, *model.buffers(), *batch.values(), *(p.grad for p in weights if p.grad is not None)]
    own += [t for t in tree_leaves(vars(carry)) if isinstance(t, torch.Tensor)] if carry else []
    with Ledger(own, weights) as ledger:
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            loss, _, carry = model.step(batch, carry)
        held = sum(ledger.now)
        loss.backward()
    return Watched(*ledger.peak, held, ledger.flops)


def watch_optimizers(model):
    """Gradients must be there -> bytes of the optimizers' states after a step, and of the most it holds beside."""
    own = [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters() if p.grad is not None)]
    optimizers = model.configure_optimizers(1e-3, 0.1, (0.9, 0.95))
    with Ledger(own) as ledger:
        for optimizer in optimizers:
            optimizer.step()
    tensors = [t for o in optimizers for s in o.state.values() for t in s.values() if isinstance(t, torch.Tensor)]
    states = sum(t.nbytes for t in tensors)
    return states, sum(ledger.peak) - states


# ---- the models, of fake tensors


def build(Model, config):
    """A model in training; call it within FakeTensorMode. Of a frozen base the weights are in base_dtype."""
    with Ledger():
        model = Model(config)
    if getattr(config, "base_dtype", "float32") == "bfloat16":
        for name, parameter in model.named_parameters():
            if name in model.frozen:
                parameter.data = parameter.data.bfloat16()
    if hasattr(config, "mean_recurrence"):
        steps = math.inf if config.random_recurrence else config.mean_recurrence
        with_grad = min(steps, config.mean_backprop_depth)
        model.split_steps = lambda _=None: (int(steps > with_grad), with_grad)  # one without gradient: all hold the same
    if getattr(config, "nested", ()):
        model.nested_pass = types.MethodType(nested_pass, model)
    return model.train()


def nested_pass(self, layer, j, x_v, p, selected, *_):
    """As DND's, with all tokens selected, but without a look at which these are."""
    from kernels import unpack_fuse

    B, T, C = x_v.shape
    x_d = layer(x_v.clone(), self.rotary(torch.arange(T).expand(B, T)))
    return unpack_fuse(x_v, x_d.view(B * T, C), p, self.nesting.beta[j], selected)


def batch_of(config, rows, tokens):
    inputs = torch.zeros(rows, tokens, dtype=torch.long)
    batch = dict(inputs=inputs, labels=torch.zeros_like(inputs))
    return batch | (dict(puzzle_identifiers=inputs[:, 0].clone()) if hasattr(config, "halt_max_steps") else {})


def watch_fake(Model, config, rows, tokens, dtype):
    """Watched, of a step on `rows` rows of as many tokens."""
    with FakeTensorMode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, batch = build(Model, config), batch_of(config, rows, tokens)
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            carry = model.initial_carry(batch) if hasattr(model, "initial_carry") else None
        return watch(model, batch, dtype, carry)


def watch_layers(Model, config, rows, tokens, dtype):
    """watch_fake, but of a Qwen3 with many layers by few: what one more plain, and one more nested layer adds."""
    equal = len({config.has_experts(i) for i in range(config.n_layer)}) == 1 if hasattr(config, "n_kv_head") else False
    if not equal or config.n_layer <= FEW:
        return watch_fake(Model, config, rows, tokens, dtype)

    def few(plain, nested):
        fields = dict(nested_first=plain, nested_last=plain + nested - 1) if config.nested else {}
        one = watch_fake(Model, dataclasses.replace(config, n_layer=plain + nested, **fields), rows, tokens, dtype)
        return np.array(dataclasses.astuple(one))

    nested = len(config.nested)
    least = min(nested, 1)
    first = few(2, least)
    total = first + (config.n_layer - nested - 2) * (few(3, least) - first)
    return Watched(*(total + (nested - 1) * (few(2, 2) - first) if nested else total).tolist())


# ---- the numbers


class Budget:
    """What a call of train.py takes. Sizes are bytes."""

    def __init__(self, configs, Model, world_size=1, parallel="none"):
        self.c, self.config, _, data_config = configs
        self.Model, self.world, self.parallel = Model, world_size, parallel
        self.kind = "hrm" if hasattr(self.config, "halt_max_steps") else "lm"
        self.dtype = torch.float32 if self.c.dtype == "float32" else torch.float16
        self.assumed = []
        if self.kind == "hrm":
            self.config = dataclasses.replace(self.config, **self.puzzles(self.c.data, data_config))
            self.tokens = self.config.seq_len
        else:
            self.tokens = self.text(data_config)
        self.rows = self.rows_of(self.c.grad_accum, world_size)
        self.checkpoint = next((name for name in ("checkpoint_core", "checkpoint_layers")
                                if hasattr(self.config, name)), None)
        self.recomputes = bool(self.checkpoint and getattr(self.config, self.checkpoint))
        self.watched = functools.cache(self._watched)
        with FakeTensorMode():
            self.model = build(Model, self.config)
            self.count_model()

    def puzzles(self, name, data_config):
        """Fields of an HRM's config, which the data would tell."""
        if name == "sudoku":
            rows, columns = parse_box(data_config.box)
            side = rows * columns
            return dict(vocab_size=side + 2, seq_len=side**2, num_puzzle_identifiers=1, box_rows=rows,
                        box_cols=columns)
        ids, side = 1, data_config.size if name == "maze" else data_config.board
        if name == "arc" and self.config.num_puzzle_identifiers > 1:
            ids = self.config.num_puzzle_identifiers
        elif name == "arc":
            ids = ARC_TASKS * (data_config.num_augments + 1)
            self.assumed.append(f"{ids:,} puzzle ids: {ARC_TASKS} tasks, {data_config.num_augments + 1:,} "
                                "transformations each; else give --num_puzzle_identifiers")
        vocab = len(maze.TOKENS) if name == "maze" else arc.VOCAB
        return dict(vocab_size=vocab, seq_len=side**2, num_puzzle_identifiers=ids, box_rows=0, box_cols=0)

    def text(self, data_config):
        """Tokens of a row."""
        by = {name: getattr(data_config, name, 0) for name in ("pack_to", "max_tokens")} | {
            "block_size": self.config.block_size}
        name = next(name for name, value in by.items() if value)
        self.assumed.append(f"rows of {by[name]:,} tokens, as long as --{name} lets them be; a vocabulary of "
                            f"{self.config.vocab_size:,}, else give --vocab_size")
        return by[name]

    def rows_of(self, parts, world):
        """Rows of a part on a GPU; where there are more parts than rows, there will be fewer parts."""
        return -(-self.c.batch_size // (parts * world))

    def _watched(self, rows, recomputes):
        changes = {self.checkpoint: recomputes} if self.checkpoint else {}
        return watch_layers(self.Model, dataclasses.replace(self.config, **changes), rows, self.tokens, self.dtype)

    def count_model(self):
        """Parameters and the static sizes, of the whole model."""
        parameters, buffers = list(self.model.parameters()), list(self.model.buffers())
        self.total = sum(p.numel() for p in parameters)
        for p in parameters:
            p.grad = torch.zeros_like(p) if p.requires_grad else None
        trained = [p for p in parameters if p.requires_grad]
        self.trained = sum(p.numel() for p in trained)
        table = self.model.puzzle_emb.weights if getattr(self.model, "prefix_len", 0) else None
        self.table = 0 if table is None else table.nbytes
        self.weights = sum(t.nbytes for t in parameters + buffers) - self.table
        self.gradients = sum(p.nbytes for p in trained)
        self.states, self.stepping = watch_optimizers(self.model)
        self.ema = sum(t.nbytes for t in parameters + buffers) if self.c.ema else 0
        blocks = [sum(p.numel() for p in part.parameters()) for part in self.model.parts_to_compile()]
        self.block = 2 * max(*blocks, self.total - sum(blocks))  # what fsdp gathers at once: a block, or all the rest

    def carry(self, rows, world):
        """The old carry of all rows of a GPU, and the new one but for the part at work, whose activations hold it."""
        if self.kind != "hrm":
            return 0
        C, positions = self.config.n_embd, self.config.seq_len + self.model.prefix_len
        row = 2 * positions * C * (4 if self.dtype == torch.float32 else 2) + 16 * self.config.seq_len + 17
        return row * (2 * -(-self.c.batch_size // world) - rows)

    def memory(self, rows=None, recomputes=None, parallel=None, world=None):
        """Name -> bytes per GPU. rows of a part, if fewer than asked for: between one row and those, a straight line."""
        rows, recomputes = rows or self.rows, self.recomputes if recomputes is None else recomputes
        parallel, world = parallel or self.parallel, world or self.world
        seen = self.watched(self.rows, recomputes)
        copies, activations = seen.copies, seen.activations
        if rows < self.rows:
            one, share = self.watched(1, recomputes), (rows - 1) / (self.rows - 1)
            copies, activations = (getattr(one, name) + share * (getattr(seen, name) - getattr(one, name))
                                   for name in ("copies", "activations"))
        parts = world if parallel == "fsdp" else 1
        copies = min(copies, self.block) if parts > 1 else copies
        sizes = {"weights": self.weights / parts, "gradients": self.gradients / parts,
                 "optimizer states": self.states / parts, "averaged weights (EMA)": self.ema / parts,
                 "puzzle embeddings": self.table, "carry": self.carry(rows, world), "16-bit copies of weights": copies,
                 "activations": activations}
        more = self.stepping / parts - copies - activations
        return sizes | {"more in the optimizer's step": max(more, 0)}

    def mean_steps(self):
        """Of a Huginn: the mean numbers of steps of its core without and with gradient."""
        c = self.config
        if not c.random_recurrence:
            steps = np.array([c.mean_recurrence])
        else:
            generator, target = np.random.default_rng(0), max(c.mean_recurrence, c.mean_backprop_depth)
            steps = generator.poisson(generator.lognormal(math.log(target) - 1 / 8, 1 / 2, 200_000)) + 1
        with_grad = np.minimum(steps, c.mean_backprop_depth)
        return (steps - with_grad).mean(), with_grad.mean()

    def flops(self):
        """FLOPs of a row, forward and backward, and what recomputing adds."""
        shape, c = (1, self.tokens), self.config
        if self.kind == "hrm":
            return self.watched(self.rows, False).flops / self.rows, 0
        steps = self.mean_steps() if hasattr(c, "mean_recurrence") else ()
        total = self.model.flops(shape, *steps)
        if not self.recomputes:
            return total, 0
        if steps:  # what a step without gradient costs, for each with it
            return total, steps[1] * (self.model.flops(shape, 1, 0) - self.model.flops(shape, 0, 0))
        return total, (total - 6 * self.tokens * c.vocab_size * c.n_embd) / 3

    def applied(self):
        """(what, parameters): those that a token goes through, and how many times over, as far as that differs."""
        c, count = self.config, lambda part: sum(p.numel() for p in part.parameters())
        if self.kind == "hrm":
            levels = {"H": count(self.model.H_level), "L": count(self.model.L_level)}
            looped = sum(levels[level] for level in c.updates) + self.total - sum(levels.values())
            return [("applied per position, a segment", looped)]
        if hasattr(c, "mean_recurrence"):
            core, ends = count(self.model.core_block) + count(self.model.adapter), self.total
            ends -= core
            if hasattr(c, "num_branches"):
                core -= (c.num_branches - 1) * sum(p.numel() for p in self.model.core_block.parameters()
                                                   if p.requires_grad) // c.num_branches
            steps = sum(self.mean_steps())
            return [(f"applied per token, {steps:.1f} steps", round(ends + steps * core))]
        idle = [3 * c.n_embd * c.moe_intermediate_size * (c.num_experts - c.num_experts_per_tok)
                if c.has_experts(i) else 0 for i in range(c.n_layer)]
        found = [("active per token", self.total - sum(idle))] if any(idle) else []
        again = sum(count(self.model.layers[i]) - idle[i] for i in c.nested)
        share = f"{c.k_target:.0%} pass twice" if c.nested else ""
        return found + [(f"applied per token, {share}", round(self.total - sum(idle) + c.k_target * again))] * bool(again)

    # ---- what fits

    def fits(self, room, **how):
        return sum(self.memory(**how).values()) <= room * GIB

    def advice(self, room):
        """What fits into so many GiB, in words."""
        if self.fits(room):
            return "fits"
        found = [self.fewer_rows(room, recomputes) for recomputes in sorted({self.recomputes, bool(self.checkpoint)})]
        if not any(found):
            found = [self.more_gpus(room)]
        return "does not fit; " + ("; or ".join(filter(None, found)) or "nor does one row on 1,024 GPUs with fsdp")

    def fewer_rows(self, room, recomputes):
        """The fewest parts that fit, as flags, with the rows of each."""
        flag = f"--{self.checkpoint} " if recomputes and not self.recomputes else ""
        for parts in range(self.c.grad_accum if flag else self.c.grad_accum + 1, self.c.batch_size + 1):
            rows = self.rows_of(parts, self.world)
            if self.c.batch_size % parts == 0 and self.fits(room, rows=rows, recomputes=recomputes):
                return f"{flag}--grad_accum {parts} would, {rows:,} row{'s' * (rows > 1)} at a time"
        return ""

    def more_gpus(self, room):
        recomputes = bool(self.checkpoint)
        for world in (2**i for i in range(1, 11)):
            if world >= self.world and self.fits(room, rows=1, recomputes=recomputes, parallel="fsdp", world=world):
                flag = f" and --{self.checkpoint}" if recomputes else ""
                return f"fsdp on {world:,} GPUs{flag} would, one row at a time"
        return ""


# ---- the table


def in_words(seconds):
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60), ("s", 1)):
        if seconds >= 2 * size:
            return f"{seconds / size:,.1f} {unit}"
    return f"{1000 * seconds:,.3g} ms"


def check_budget(world_size, mfu, parallel):
    """ValueError, one line, for what cannot be."""
    if not 1 <= world_size <= 2**20:
        raise ValueError(f"--world_size {world_size}: give the number of GPUs, from 1")
    if not 0 < mfu <= 1:
        raise ValueError(f"--mfu {mfu:g}: give the share of the peak FLOP/s that is reached, above 0 and at most 1")
    if parallel not in ("none", "ddp", "fsdp"):
        raise ValueError(f"--parallel {parallel}: choose none, ddp or fsdp")


def print_budget(configs, Model, world_size=1, mfu=0.4, parallel="none"):
    """The tables. parallel: none (with several GPUs, ddp), ddp or fsdp."""
    check_budget(world_size, mfu, parallel)
    parallel = "ddp" if parallel == "none" and world_size > 1 else parallel
    c, b = configs[0], Budget(configs, Model, world_size, parallel)
    wide = "puzzle" if b.kind == "hrm" else "row"
    parts = -(-c.batch_size // (world_size * b.rows))
    print(f"budget of {c.model} on {c.data}, preset {c.preset} | {world_size:,} x H100, parallel {parallel}, "
          f"{'float32' if b.dtype == torch.float32 else 'bfloat16 over float32 weights'} | nothing is trained, no data "
          f"read\nbatch_size {c.batch_size:,}: on each GPU {parts:,} part{'s' * (parts > 1)} of {b.rows:,} {wide}"
          f"{'s' * (b.rows > 1)} of {b.tokens:,} {'cells' if b.kind == 'hrm' else 'tokens'}")
    print("".join(f"assumed: {line}\n" for line in b.assumed))
    names = [("in all", b.total)] + [("trained", b.trained)] * (b.trained < b.total) + b.applied()
    names += [("puzzle embeddings beside", b.table // 4)] * bool(b.table)
    print_rows("parameters", [""], [(name, f"{count:,}") for name, count in names])
    sizes = b.memory()
    sizes = {name: size for name, size in sizes.items() if size} | {"in all, at the worst moment": sum(sizes.values())}
    print()
    print_rows("memory per GPU", ["GiB"], [(name, f"{size / GIB:.3f}") for name, size in sizes.items()])
    print()
    print_compute(c, b, mfu)
    print()
    for name, size in CARDS.items():
        room = 0.95 * size - 1
        print(f"  {name} ({room:.1f} GiB of use): {b.advice(room)}")


def print_compute(c, b, mfu):
    flops, again = b.flops()
    seconds = (flops + again) * c.batch_size / (b.world * mfu * PEAK[b.dtype != torch.float32])
    if b.kind == "hrm":
        most = b.config.halt_max_steps
        rows = [("a puzzle's segment", f"{flops:.3g}"), (f"a puzzle, of at most {most} segments", f"{most * flops:.3g}")]
    else:
        rows = [("a token", f"{flops / b.tokens:.3g}")]
    rows += [("an optimizer step", f"{flops * c.batch_size:.3g}")]
    rows += [("recomputing, beside", f"{again * c.batch_size:.3g}")] * bool(again)
    rows += [("time of a step", in_words(seconds))]
    rows += [(f"max_steps {c.max_steps:,}", in_words(seconds * c.max_steps))] * (c.max_steps > 0)
    print_rows(f"FLOPs, forward and backward; time at MFU {mfu:g}", [""], rows)
    if b.config.n_embd < SLOW:
        print(f"  a model of width {b.config.n_embd} will not reach that MFU: its kernels are too small for an H100")
