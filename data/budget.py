"""What a training run takes, before it is started: parameters, memory per GPU, FLOPs, hours, and what would fit.

    python train.py --model huginn --data text --preset paper --dry_run --world_size 8    # seconds, on any machine

    print_budget(configs, Model, world_size, mfu, parallel)     # configs: train.py's, of training, model, use and data

No data are read, and no memory is taken: steps are watched on fake tensors, see ledger.py.

    static = weights + gradients + optimizer states + EMA + puzzle embedding table + carry
    peak   = static + max(cast copies of weights + activations, temporaries of the optimizer's step)

    weights, gradients    float32, 4 bytes each; a frozen base as it is held (--base_dtype), and without gradients
    optimizer states      what they hold after a step: 8 bytes per trained weight, with either optimizer
    EMA                   a copy of the model, its frozen weights and its buffers too
    carry                 z_H, z_L and the puzzles of all rows of a GPU, whatever grad_accum is, old and new
    copies                autocast's: from a weight's use to the end of the forward pass or, if saved, to its gradient
    activations           what else is alive at the worst moment of the forward and backward pass of one part

    ddp    everything is held by each of W GPUs (the gradients in its buckets, once), the batch is split
    fsdp   (weights + gradients + states + EMA) / W; of the copies only those of the largest block, gathered at a time

    FLOPs  of a language model: its flops(), forward and backward, 6 per weight and token and the attention, for the
           mean of a Huginn's draws and a DND's k_target; of HRM: all matrix products of a step, counted. What is
           recomputed counts in the time, not in the FLOPs
    time   FLOPs / (W * mfu * 989e12), the H100's dense bfloat16 (67e12 with --dtype float32)

With grad_accum 1, gradients come as activations go: that takes less than this says. Left out: temporaries within a
kernel, gradients that fsdp has not scattered yet and what it gathers ahead, --compile (which needs
less), evaluation (--eval_batch_size rows without gradient), loading, communication. A card counts as full at 95 %, less
1 GiB for CUDA itself.
"""

import dataclasses
import functools
import math

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from data import arc, maze
from data.ledger import build, watch_optimizers, watch_some
from data.show import print_rows
from data.sudoku import parse_box

CARDS = {"H100, 80 GB": 81559 / 1024, "card of 24 GB": 24564 / 1024}  # GiB, as the driver tells
PEAK = {True: 989e12, False: 67e12}  # FLOP/s of an H100, dense, in bfloat16 or not
SLOW = 1024  # below this width, kernels are too small to keep an H100 busy
ARC_TASKS = 960  # arc1 and conceptarc, as the paper counts them
GIB = 2**30


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
        if name in ("maze", "arc"):
            {"maze": maze, "arc": arc}[name].validate(data_config)
        else:
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
        """Tokens of a row: as many as the flags allow."""
        most = {name: getattr(data_config, name, 0) for name in ("pack_to", "max_tokens")}
        name = next((name for name, value in most.items() if 0 < value < self.config.block_size), "block_size")
        tokens = most.get(name, self.config.block_size)
        self.assumed.append(f"rows of {tokens:,} tokens, as long as --{name} lets them be; a vocabulary of "
                            f"{self.config.vocab_size:,}, else give --vocab_size")
        return tokens

    def rows_of(self, parts, world):
        """Rows of a part on a GPU; where there are more parts than rows, there will be fewer parts."""
        return -(-self.c.batch_size // (parts * world))

    def _watched(self, rows, recomputes):
        changes = {self.checkpoint: recomputes} if self.checkpoint else {}
        return watch_some(self.Model, dataclasses.replace(self.config, **changes), rows, self.tokens, self.dtype)

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
        """Name -> bytes per GPU; what is not given is as asked for. rows: of a part."""
        rows, recomputes = rows or self.rows, self.recomputes if recomputes is None else recomputes
        parallel, world = parallel or self.parallel, world or self.world
        activations, copies, alone = self.line(rows, recomputes)
        parts = world if parallel == "fsdp" else 1
        if parts > 1:
            activations, copies = alone, min(copies, self.block)
        sizes = {"weights": self.weights / parts, "gradients": self.gradients / parts,
                 "optimizer states": self.states / parts, "averaged weights (EMA)": self.ema / parts,
                 "puzzle embeddings": self.table, "carry": self.carry(rows, world), "cast copies of weights": copies,
                 "activations": activations}
        more = self.stepping / parts - copies - activations
        return sizes | {"more in the optimizer's step": max(more, 0)}

    def line(self, rows, recomputes):
        """activations, copies, alone of Watched; of fewer rows than asked for, by a straight line from one row."""
        def at(rows):
            seen = self.watched(rows, recomputes)
            return np.array([*seen.worst, seen.alone])

        share = (rows - 1) / max(self.rows - 1, 1) if rows < self.rows else 1
        return (at(self.rows) if share == 1 else at(1) + share * (at(self.rows) - at(1))).tolist()

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
        if not self.recomputes or c.selective_checkpoint:  # which keeps the products of matrices
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
        if c.nested:
            applied = round(self.total - sum(idle) + c.k_target * again)
            found.append((f"applied per token, {c.k_target:.0%} pass twice", applied))
        return found

    # ---- what fits

    def fits(self, room, **how):
        return sum(self.memory(**how).values()) <= room * GIB

    def advice(self, room):
        """What fits into so many GiB, in words."""
        if self.fits(room):
            return "fits"
        found = self.fewer_rows(room, self.recomputes) or self.fewer_rows(room, bool(self.checkpoint))
        return f"does not fit; {found or self.more_gpus(room) or 'nor does one row on 1,024 GPUs with fsdp'}"

    def fewer_rows(self, room, recomputes):
        """The fewest parts that fit, as flags; "" if none."""
        flag = f"--{self.checkpoint} " if recomputes and not self.recomputes else ""
        for parts in range(self.c.grad_accum, self.c.batch_size + 1):
            rows = self.rows_of(parts, self.world)
            if self.c.batch_size % parts == 0 and self.fits(room, rows=rows, recomputes=recomputes):
                return f"{flag}--grad_accum {parts} would, {rows:,} row{'s' * (rows > 1)} at a time"
        return ""

    def more_gpus(self, room):
        """The fewest GPUs, a power of two, that fit with fsdp and one row at a time, as flags; "" if none."""
        how = dict(rows=1, recomputes=bool(self.checkpoint), parallel="fsdp")
        for world in (2**i for i in range(1, 11)):
            if world >= self.world and self.fits(room, world=world, **how):
                flag = f" and --{self.checkpoint}" if self.checkpoint else ""
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
    parallel = "none" if world_size == 1 else "ddp" if parallel == "none" else parallel
    c, b = configs[0], Budget(configs, Model, world_size, parallel)
    wide = "puzzle" if b.kind == "hrm" else "row"
    parts = -(-c.batch_size // (world_size * b.rows))
    print(f"budget of {c.model} on {c.data}, preset {c.preset} | {world_size:,} x H100, parallel {parallel}, "
          f"{'float32' if b.dtype == torch.float32 else 'bfloat16 autocast'} | nothing is trained, no data read\n"
          f"batch_size {c.batch_size:,}: on each GPU {parts:,} part{'s' * (parts > 1)} of {b.rows:,} {wide}"
          f"{'s' * (b.rows > 1)} of {b.tokens:,} {'cells' if b.kind == 'hrm' else 'tokens'}")
    print("".join(f"assumed: {line}\n" for line in b.assumed))
    names = [("in all", b.total)] + [("trained", b.trained)] * (b.trained < b.total) + b.applied()
    names += [("puzzle embeddings beside", b.table // 4)] * bool(b.table)
    print_rows("parameters", ["count"], [(name, f"{count:,}") for name, count in names])
    sizes = b.memory()
    sizes = {name: size for name, size in sizes.items() if size} | {"in all, at the worst moment": sum(sizes.values())}
    print()
    print_rows("memory per GPU", ["GiB"], [(name, f"{size / GIB:.3f}") for name, size in sizes.items()])
    print()
    print_compute(c, b, mfu)
    print()
    for name, size in CARDS.items():
        room = 0.95 * size - 1
        print(f"  {name} ({room:.1f} GiB usable): {b.advice(room)}")


def print_compute(c, b, mfu):
    flops, again = b.flops()
    seconds = (flops + again) * c.batch_size / (b.world * mfu * PEAK[b.dtype != torch.float32])
    works = [("a token", flops / b.tokens)]
    if b.kind == "hrm":
        most = b.config.halt_max_steps
        works = [("a puzzle's segment", flops), (f"a puzzle, of {most} segments", most * flops)]
    works += [("an optimizer step", flops * c.batch_size)]
    works += [("recomputing, beside", again * c.batch_size)] * bool(again)
    rows = [(name, f"{work:.3g} FLOPs") for name, work in works] + [("time of a step", in_words(seconds))]
    rows += [(f"max_steps {c.max_steps:,}", in_words(seconds * c.max_steps))] * (c.max_steps > 0)
    print_rows(f"work, and time at MFU {mfu:g}", ["forward and backward"], rows)
    if b.config.n_embd < SLOW:
        print(f"  a model of width {b.config.n_embd} will not reach that MFU: its kernels are too small for an H100")
