"""What a training run takes, before it is started: parameters, memory per GPU, FLOPs, hours, and what would fit.

    python train.py --model huginn --data text --preset paper --dry_run --world_size 8    # seconds, on any machine

    print_budget(configs, Model, world_size, mfu, parallel, offload)    # configs: train.py's, of training, model, ...

No data are read, and no memory is taken: steps are watched on fake tensors, see ledger.py.

    static = weights + gradients + optimizer states + EMA + puzzle embedding table + carry
    peak   = static + max(cast copies of weights + activations, temporaries of the optimizer's step)

    weights, gradients    float32, 4 bytes each; a frozen base as it is held (--base_dtype), and without gradients
    optimizer states      what they hold after a step: 8 bytes per trained weight, with either optimizer
    EMA                   a copy of the model, its frozen weights and its buffers too
    carry                 z_H, z_L and the puzzles of all rows of a GPU, whatever grad_accum is, old and new
    copies                autocast's: from a weight's use to the end of the forward pass or, if saved, to its gradient
    activations           what else is alive at the worst moment of the forward and backward pass of one part

    ddp      everything is held by each of W GPUs (the gradients in its buckets, once), the batch is split
    fsdp     (weights + gradients + states + EMA) / W, and instead of the copies, in the dtype of the forward pass
               gathered weights    what is in no block, or in one that is looped, for the whole step, and two others,
                                   the largest: while one computes, the next is gathered, in the backward pass as well
               unscattered         gradients of what is in no block and of one that is, those of a block once more in
                                   float32, as they are summed
    offload  of fsdp, on one GPU too: what is divided by W is in CPU memory, and so is what the optimizer's step takes.
             A single GPU fetches no block ahead, but has float32 weights while it casts them: about as much

    FLOPs  of a language model: its flops(), forward and backward, 6 per weight and token and the attention, for the
           mean of a Huginn's draws and a DND's k_target; of HRM: all matrix products of a step, counted. What is
           recomputed counts in the time, not in the FLOPs
    time   FLOPs / (W * mfu * 989e12), the H100's dense bfloat16 (67e12 with --dtype float32)

With grad_accum 1, gradients come as activations go: that takes less than this says. Left out: temporaries within a
kernel, --compile (which needs less), evaluation (--eval_batch_size rows without gradient), loading, the time of
communication and of what --offload moves. A card counts as full at 95 %, less 1 GiB for CUDA itself.
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
ALONE = "note: on one GPU --parallel fsdp has nothing to share; give --world_size, or --offload to use CPU memory"
STEPPING = "more in the optimizer's step"


# ---- the numbers


class Budget:
    """What a call of train.py takes. Sizes are bytes."""

    def __init__(self, configs, Model, world_size=1, parallel="none", offload=False):
        self.c, self.config, _, data_config = configs
        self.Model, self.world, self.offload = Model, world_size, offload
        self.parallel = "fsdp" if offload else parallel
        self.kind = "hrm" if hasattr(self.config, "halt_max_steps") else "lm"
        self.dtype = torch.float32 if self.c.dtype == "float32" else torch.float16
        self.assumed = []
        if self.kind == "hrm":
            self.config = dataclasses.replace(self.config, **self.puzzles(self.c.data, data_config))
            self.tokens = self.config.seq_len
        else:
            self.tokens = self.text(data_config)
        self.rows = self.split(self.c.grad_accum, world_size)
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
            return dict(vocab_size=rows * columns + 2, seq_len=(rows * columns)**2, num_puzzle_identifiers=1,
                        box_rows=rows, box_cols=columns)
        {"maze": maze, "arc": arc}[name].validate(data_config)
        side, vocab = (data_config.size, len(maze.TOKENS)) if name == "maze" else (data_config.board, arc.VOCAB)
        ids = self.config.num_puzzle_identifiers if name == "arc" else 1
        if name == "arc" and ids <= 1:
            ids = ARC_TASKS * (data_config.num_augments + 1)
            self.assumed.append(f"{ids:,} puzzle ids: {ARC_TASKS} tasks, {data_config.num_augments + 1:,} "
                                "transformations each; else give --num_puzzle_identifiers")
        return dict(vocab_size=vocab, seq_len=side**2, num_puzzle_identifiers=ids, box_rows=0, box_cols=0)

    def text(self, data_config):
        """Tokens of a row: as many as the flags allow."""
        most = {name: getattr(data_config, name, 0) for name in ("pack_to", "max_tokens")}
        name = next((name for name, value in most.items() if 0 < value < self.config.block_size), "block_size")
        tokens = most.get(name, self.config.block_size)
        self.assumed.append(f"rows of {tokens:,} tokens, as long as --{name} lets them be; a vocabulary of "
                            f"{self.config.vocab_size:,}, else give --vocab_size")
        return tokens

    def split(self, n, world):
        """Rows of each of n parts on a GPU (where there are fewer rows than parts: 1); or the parts of n rows each."""
        return -(-self.c.batch_size // (n * world))

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
        looped, blocks = self.model.looped_parts(), self.model.parts_to_compile()
        sizes = np.array([sum(p.numel() for p in block.parameters()) for block in blocks])
        trained = np.array([sum(p.numel() for p in block.parameters() if p.requires_grad) for block in blocks])
        once = np.array([block not in looped for block in blocks])
        self.gathered = int(self.total - sizes[once].sum() + 2 * max(sizes[once], default=0))
        self.unscattered = int(self.trained - trained.sum()), int(trained.max())

    def carry(self, rows, world):
        """The old carry of all rows of a GPU, and the new one but for the part at work, whose activations hold it."""
        if self.kind != "hrm":
            return 0
        C, positions = self.config.n_embd, self.config.seq_len + self.model.prefix_len
        row = 2 * positions * C * (4 if self.dtype == torch.float32 else 2) + 16 * self.config.seq_len + 17
        return row * (2 * -(-self.c.batch_size // world) - rows)

    def memory(self, rows=None, recomputes=None, parallel=None, world=None, offload=None):
        """Name -> bytes per GPU; what is not given is as asked for. rows: of a part."""
        rows, recomputes = rows or self.rows, self.recomputes if recomputes is None else recomputes
        world, offload = world or self.world, self.offload if offload is None else offload
        activations, copies, alone = self.line(rows, recomputes)
        passing = {"cast copies of weights": copies, "activations": activations}
        shared = offload or (parallel or self.parallel) == "fsdp" and world > 1
        held = dict.fromkeys(self.held(1), 0) if offload else self.held(world if shared else 1)
        if shared:
            size, (rest, block) = 4 if self.dtype == torch.float32 else 2, self.unscattered
            passing = {"gathered weights": size * self.gathered, "activations": alone,
                       "unscattered gradients": size * (rest + block) + 4 * block}
        held[STEPPING] = max(held[STEPPING] - sum(passing.values()), 0)
        return held | passing | {"puzzle embeddings": self.table, "carry": self.carry(rows, world)}

    def held(self, share):
        """Name -> bytes of what there is between steps, and more in the optimizer's; a share of it."""
        sizes = {"weights": self.weights, "gradients": self.gradients, "optimizer states": self.states,
                 "averaged weights (EMA)": self.ema, STEPPING: self.stepping}
        return {name: size / share for name, size in sizes.items()}

    def line(self, rows, recomputes):
        """activations, copies, alone of Watched; of other rows than asked for, by a straight line from one row."""
        def at(rows):
            seen = self.watched(rows, recomputes)
            return np.array([*seen.worst, seen.alone])

        if rows in (1, self.rows):
            return at(rows).tolist()
        most = max(self.rows, 2)
        return (at(1) + (rows - 1) / (most - 1) * (at(most) - at(1))).tolist()

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
        ways = [self.fewer_rows(room)]
        if not any(ways):
            ways = [self.fewer_rows(room, offload=True) if self.world == 1 and not self.offload else "",
                    self.more_gpus(room)]
        return "does not fit; " + (",\n    or ".join(filter(None, ways)) or "nor do 1,024 GPUs with fsdp")

    def fewer_rows(self, room, offload=False):
        """The fewest parts that fit, as flags, layers being recomputed only if that does not do; "" if none."""
        fewest, most = (max(1, min(parts, self.c.batch_size // self.world)) for parts in (self.c.grad_accum, 2**20))
        for recomputes in sorted({self.recomputes, bool(self.checkpoint)}):
            for parts in (n for n in range(fewest, most + 1) if self.c.batch_size % (n * self.world) == 0):
                rows = self.split(parts, self.world)
                if self.fits(room, rows=rows, recomputes=recomputes, offload=offload or self.offload):
                    flag = "--offload " * offload + f"--{self.checkpoint} " * (recomputes and not self.recomputes)
                    cpu = f", with {sum(self.held(self.world).values()) / GIB:,.0f} GiB of CPU memory" * offload
                    return f"{flag}--grad_accum {parts} would, {rows:,} row{'s' * (rows > 1)} at a time{cpu}"
        return ""

    def more_gpus(self, room):
        """The fewest GPUs, a power of two, that fit with fsdp, all rows at once or one at a time, as flags; or ""."""
        for world in (2**i for i in range(1, 11) if 2**i >= self.world):
            batch = -(-self.c.batch_size // world) * world
            for rows in sorted({1, batch // world}):
                how = dict(rows=rows, recomputes=bool(self.checkpoint), parallel="fsdp", world=world)
                if self.fits(room, **how):
                    flags = f" --{self.checkpoint}" * bool(self.checkpoint and not self.recomputes)
                    flags += f" --batch_size {batch}" * (batch != self.c.batch_size)
                    return (f"fsdp on {world:,} GPUs with{flags} --grad_accum {batch // world // rows} would, {rows:,} "
                            f"row{'s' * (rows > 1)} at a time")
        return ""


# ---- the table


def in_words(seconds):
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60), ("s", 1)):
        if seconds >= (1 if unit == "s" else 2 * size):
            return f"{seconds / size:,.1f} {unit}"
    return f"{1000 * seconds:,.4g} ms"


def check_budget(c, world_size, mfu):
    """ValueError, one line, for what cannot be, or what training would refuse."""
    if not 1 <= world_size <= 2**20:
        raise ValueError(f"--world_size {world_size}: give the number of GPUs, from 1")
    if not 0 < mfu <= 1:
        raise ValueError(f"--mfu {mfu:g}: give the share of the peak FLOP/s that is reached, above 0 and at most 1")
    whole = world_size * max(1, min(c.grad_accum, c.batch_size // world_size))
    if c.batch_size % whole:
        raise ValueError(f"--batch_size {c.batch_size} on --world_size {world_size}, each in --grad_accum "
                         f"{c.grad_accum} parts: give a multiple of {whole}")


def print_budget(configs, Model, world_size=1, mfu=0.4, parallel="none", offload=False):
    """The tables. parallel: none (with several GPUs, ddp), ddp or fsdp, which offload implies."""
    c, alone = configs[0], world_size == 1 and not offload
    check_budget(c, world_size, mfu)
    b = Budget(configs, Model, world_size, "none" if alone else "ddp" if parallel == "none" else parallel, offload)
    wide, parts = "puzzle" if b.kind == "hrm" else "row", b.split(b.rows, world_size)
    dtype = c.dtype if c.dtype == "float32" else f"{c.dtype.replace('auto', 'bfloat16')} autocast"
    print(f"budget of {c.model} on {c.data}, preset {c.preset} | {world_size:,} x H100, parallel {b.parallel}"
          f"{' with --offload' * offload}, {dtype} | nothing is trained, no data read\n"
          f"batch_size {c.batch_size:,}: on each GPU {parts:,} part{'s' * (parts > 1)} of {b.rows:,} {wide}"
          f"{'s' * (b.rows > 1)} of {b.tokens:,} {'cells' if b.kind == 'hrm' else 'tokens'}")
    notes = [f"assumed: {line}" for line in b.assumed] + [ALONE] * (alone and parallel == "fsdp")
    print("".join(f"{line}\n" for line in notes))
    names = [("in all", b.total)] + [("trained", b.trained)] * (b.trained < b.total) + b.applied()
    names += [("puzzle embeddings beside", b.table // 4)] * bool(b.table)
    print_rows("parameters", ["count"], [(name, f"{count:,}") for name, count in names])
    print_sizes("memory per GPU", b.memory())
    if offload:
        print_sizes("CPU memory per process", b.held(world_size))
    print_compute(c, b, mfu)
    print()
    for name, size in CARDS.items():
        room = 0.95 * size - 1
        print(f"  {name} ({room:.1f} GiB usable): {b.advice(room)}")


def print_sizes(title, sizes):
    sizes = {name: size for name, size in sizes.items() if size} | {"in all, at the worst moment": sum(sizes.values())}
    print()
    print_rows(title, ["GiB"], [(name, f"{size / GIB:.3f}") for name, size in sizes.items()])


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
    print()
    print_rows(f"work, and time at MFU {mfu:g}", ["forward and backward"], rows)
    if b.config.n_embd < SLOW:
        print(f"  a model of width {b.config.n_embd} will not reach that MFU: its kernels are too small for an H100")
