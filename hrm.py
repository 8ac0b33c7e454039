"""HRM, the Hierarchical Reasoning Model: two recurrent modules that think in latent space before they answer.

"Hierarchical Reasoning Model", Wang et al. 2025, https://arxiv.org/abs/2506.21734. Section numbers are the paper's.
A puzzle goes in as tokens and its solution comes out at the same positions. In between, a fast module L and a slow
module H update two states (section 2); one round of this is a *segment*:

    x   = sqrt(C) * embed(inputs)                       the input, added at every update
    z_L = L(z_L + z_H + x)                              L_cycles times (paper T), then
    z_H = H(z_H + z_L)                                  once; all of it H_cycles times (paper N)
    logits = lm_head(z_H),   (q_halt, q_continue) = q_head(z_H at the first position)

One-step gradient: only the last update of each module is differentiated, so memory does not grow with the cycles.
Deep supervision: every segment has its loss and its optimizer step; the next one starts from the detached states.
Adaptive computation time (ACT): Q-learning decides after each segment whether a puzzle is done or thinks on.

    loss = lm_loss + 1/2 (BCE(q_halt, G_halt) + BCE(q_continue, G_continue))
    G_halt     = 1 if every labelled cell is right, else 0
    G_continue = sigmoid(max(q_halt', q_continue')) of the next segment; sigmoid(q_halt') if this was the last allowed

Shapes: B puzzles, T = seq_len cells, P prefix positions (the puzzle's own embedding), C = n_embd, nh = n_head,
hd = C / nh, V = vocab_size. A batch is a dict of integer tensors: inputs (B, T), labels (B, T) with -100 for a cell
that is not scored and, if puzzles have ids, puzzle_identifiers (B,).

    model = HRM(PRESETS["nano"])
    loss, metrics, carry = model.step(batch)            # one segment of new puzzles
    loss, metrics, carry = model.step(batch, carry)     # the next; rows that halted take the new batch's puzzles
    answer, segments = model.solve(inputs, 16)          # (B, T), (B,)

What the paper leaves open is settled as in its released code: norms without gain, the loss a mean over the labelled
cells of a puzzle, summed over puzzles, divided by the batch. Ours are `grad_updates`, q_target "none", the softmax
loss, "grid" positions, L_layers 0 (a single module, z_H = H(z_H + x), of which baselines are made) and, as the paper's
text has it but not its code, exploration drawn once per puzzle.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn as nn
import torch.nn.functional as F

IGNORE = -100  # the label of a cell that is not scored


@dataclass
class HRMConfig:
    # what goes in and out; train.py takes these from the data
    vocab_size: int = 11  # number of tokens; 0 is padding, the data names the others
    seq_len: int = 81  # cells per puzzle
    num_puzzle_identifiers: int = 1  # rows of the puzzle embedding
    box_rows: int = 0  # rows of a Sudoku box, for grid positions; 0 = a grid without boxes, whose neighbours count
    box_cols: int = 0  # columns of a Sudoku box, for grid positions
    # size
    n_embd: int = 512  # width C
    n_head: int = 8  # attention heads
    H_layers: int = 4  # blocks of the slow module
    L_layers: int = 4  # blocks of the fast module; 0 = none: one module, z_H = H(z_H + x), H_cycles times a segment
    expansion: float = 4.0  # SwiGLU width: 2/3 of this times n_embd, rounded up to a multiple of 256
    pos_encodings: Literal["rope", "learned", "grid"] = "rope"  # grid = bias for same row, column, box, or neighbours
    puzzle_emb_ndim: int = 512  # size of a puzzle's own vector, put before its cells; 0 = no prefix
    # recurrence
    H_cycles: int = 2  # H updates per segment (paper N)
    L_cycles: int = 2  # L updates before each H update (paper T)
    grad_updates: int = 2  # last updates of a segment that carry gradient; 2 = the paper's one-step gradient
    # halting
    halt_max_steps: int = 16  # most segments per puzzle (paper M_max)
    halt_exploration_prob: float = 0.1  # chance that a puzzle must run a random least number of segments
    q_target: Literal["bootstrap", "none"] = "bootstrap"  # none = halt when q_halt > 0, which saves a forward pass
    # loss and optimizer
    loss: Literal["stablemax", "softmax"] = "stablemax"  # loss of a cell
    puzzle_emb_lr: float = 1e-4  # learning rate of the puzzle embedding's sign-SGD
    puzzle_emb_weight_decay: float = 1.0  # its decay, scaled by that rate

    def __post_init__(self):
        for name in ("n_embd", "n_head", "H_layers", "H_cycles", "L_cycles", "halt_max_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)}: must be at least 1")
        if self.expansion <= 0 or self.puzzle_emb_ndim < 0 or self.L_layers < 0:
            raise ValueError(f"expansion {self.expansion} must be above 0, puzzle_emb_ndim {self.puzzle_emb_ndim} "
                             f"and L_layers {self.L_layers} at least 0")
        if self.n_embd % (2 * self.n_head):
            raise ValueError(f"n_embd {self.n_embd} with n_head {self.n_head}: heads must have a whole, even size; "
                             f"make n_embd a multiple of {2 * self.n_head}")
        updates = len(self.updates)
        if not 1 <= self.grad_updates <= updates:
            raise ValueError(f"grad_updates {self.grad_updates}: a segment has {updates} updates; choose 1..{updates}")

    @property
    def updates(self):
        """The updates of a segment in their order, as in "LLHLLH"."""
        return ("L" * self.L_cycles * (self.L_layers > 0) + "H") * self.H_cycles

    @property
    def depth(self):
        """Blocks that a segment applies one after another: the effective depth of a segment."""
        return sum(self.L_layers if level == "L" else self.H_layers for level in self.updates)


@dataclass
class SolveConfig:
    act_eval: bool = False  # stop each puzzle when its Q values say so; false = run all segments that are asked for


# ---- blocks


def truncated_lecun_(weight, std):
    """Fill from a normal cut at two sigma whose std *after* the cut is `std` (LeCun: 1 / sqrt(fan_in))."""
    sigma = std / 0.87962566103423978  # the std of a standard normal cut at +-2
    return nn.init.trunc_normal_(weight, std=sigma, a=-2 * sigma, b=2 * sigma)


def linear(n_in, n_out):
    """nn.Linear without bias, LeCun-initialised. (..., n_in) -> (..., n_out)."""
    layer = nn.Linear(n_in, n_out, bias=False)
    truncated_lecun_(layer.weight, n_in**-0.5)
    return layer


def rms_norm(x, eps=1e-5):
    """x / rms(x) over the last axis, in float32 and without a gain. (..., C) -> (..., C) in x's dtype."""
    return F.rms_norm(x.float(), (x.shape[-1],), eps=eps).to(x.dtype)


def rotary_table(n_positions, head_dim, base=10000.0):
    """cos and signed sin of position * frequency, (2, n_positions, 1, 1, hd) float32. Feature i pairs with i + hd/2."""
    freq = base ** (-torch.arange(0, head_dim, 2).float() / head_dim)
    angle = torch.outer(torch.arange(n_positions).float(), freq)[:, None, None]  # (n_positions, 1, 1, hd/2)
    cos, sin = angle.cos(), angle.sin()
    return torch.stack([torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)])


def apply_rotary(x, rotary):
    """Rotate the feature pairs of x (B, T, 2, nh, hd), queries and keys, by rotary (2, T, 1, 1, hd)."""
    cos, sin = rotary.to(x.dtype)
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)  # roll: the other feature of each pair


def grid_relations(config, prefix_len):
    """How two cells relate: 1 if in the same row + 2 same column + 4 same box. (P+T, P+T) int64 in 0..7.

    In a grid without boxes, as of a maze, 4 to 7 say instead that the second is next to the first: below it, left of
    it, right of it, above it.
    """
    side = math.isqrt(config.seq_len)
    if side * side != config.seq_len:
        raise ValueError(f"pos_encodings grid with seq_len {config.seq_len}: the grid must be square; choose rope")
    row, col = torch.arange(config.seq_len) // side, torch.arange(config.seq_len) % side
    units = [row, col]
    if config.box_rows:
        units.append(row // config.box_rows * side + col // config.box_cols)
    related = sum(2**i * (unit[:, None] == unit).long() for i, unit in enumerate(units))  # (T, T)
    for i, (down, right) in enumerate([] if config.box_rows else [(1, 0), (0, -1), (0, 1), (-1, 0)]):
        related[(row - row[:, None] == down) & (col - col[:, None] == right)] = 4 + i
    return F.pad(related, (prefix_len, 0, prefix_len, 0))  # the prefix shares nothing with any cell


class Attention(nn.Module):
    """Every position sees every other: a puzzle is read as a whole, not from left to right."""

    def __init__(self, config):
        super().__init__()
        self.n_head = config.n_head
        self.qkv_proj = linear(config.n_embd, 3 * config.n_embd)  # rows: all heads' queries, keys, values
        self.o_proj = linear(config.n_embd, config.n_embd)
        grid = config.pos_encodings == "grid"
        self.grid_bias = nn.Parameter(0.35 * torch.randn(config.n_head, 8)) if grid else None
        if grid and not config.box_rows:  # few heads would hardly draw all four neighbours, and mazes need each
            heads = torch.arange(config.n_head)
            self.grid_bias.data[heads, 4 + heads % 4] = 0.7

    def forward(self, x, pos):
        """x (B, T, C); pos: rotary table (2, T, 1, 1, hd), grid relations (T, T) or None -> (B, T, C)."""
        B, T, C = x.shape
        qk, v = self.qkv_proj(x).view(B, T, 3, self.n_head, -1).split([2, 1], dim=2)
        bias = None
        if self.grid_bias is not None:  # times 16: from the start, heads look at different parts of the board
            bias = (16 * self.grid_bias[:, pos]).to(x.dtype)  # (nh, T, T)
        elif pos is not None:
            qk = apply_rotary(qk, pos)
        q, k, v = (part.transpose(1, 2) for part in (*qk.unbind(2), v.squeeze(2)))  # (B, nh, T, hd) each
        if x.device.type == "cpu" and x.dtype == torch.bfloat16:  # for short rows three times faster than SDPA here
            scores = (q * q.shape[-1] ** -0.5) @ k.mT  # (B, nh, T, T)
            y = (scores if bias is None else scores + bias).softmax(dim=-1) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return self.o_proj(y.transpose(1, 2).reshape(B, T, C))


class SwiGLU(nn.Module):
    """down(silu(gate) * up), with gate and up in one matrix. (..., C) -> (..., C)."""

    def __init__(self, config):
        super().__init__()
        width = -(-round(config.expansion * config.n_embd * 2 / 3) // 256) * 256  # rounded up
        self.gate_up_proj = linear(config.n_embd, 2 * width)
        self.down_proj = linear(width, config.n_embd)

    def forward(self, x):
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


class Block(nn.Module):
    """Post-norm transformer block: the sum with the residual is normalised, which bounds a recurrent state."""

    def __init__(self, config):
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = SwiGLU(config)

    def forward(self, x, pos):
        """x (B, T, C) -> (B, T, C)"""
        x = rms_norm(x + self.self_attn(x, pos))
        return rms_norm(x + self.mlp(x))


class Level(nn.Module):
    """A module, H or L: adds what it is told to its state once, then runs its blocks."""

    def __init__(self, config, n_layers):
        super().__init__()
        self.layers = nn.ModuleList(Block(config) for _ in range(n_layers))

    def forward(self, z, injection, pos):
        """z (B, P+T, C), injection (B, P+T, C) -> the new z."""
        z = z + injection
        for block in self.layers:
            z = block(z, pos)
        return z


class PuzzleEmbedding(nn.Module):
    """One learned vector per puzzle id, for tasks that are told apart only by it (ARC).

    The table may have a million rows, of which a batch uses a few: its gradients are sparse and SignSGD updates it,
    so it is a buffer and not among the parameters. configure_optimizers makes it require grad.
    """

    def __init__(self, config):
        super().__init__()
        self.register_buffer("weights", torch.zeros(config.num_puzzle_identifiers, config.puzzle_emb_ndim))

    def forward(self, ids):
        """ids (B,) -> (B, puzzle_emb_ndim)"""
        return F.embedding(ids, self.weights, sparse=True)


@dataclass
class Carry:
    """What survives a segment. A halted row takes a new puzzle at the next call; at first all rows are halted."""

    z_H: torch.Tensor  # (B, P+T, C)
    z_L: torch.Tensor  # (B, P+T, C)
    steps: torch.Tensor  # (B,) int32, segments done on the present puzzle
    halted: torch.Tensor  # (B,) bool
    data: dict  # the puzzles in work: inputs (B, T), puzzle_identifiers (B,) and, if there are any, labels (B, T)
    min_steps: torch.Tensor | int = 0  # (B,) int32, segments that the present puzzle must run in training


# ---- losses and optimizers


def cell_loss(logits, labels, kind="stablemax"):
    """Cross entropy of every cell. logits (..., V), labels (...) integer -> (...), 0 where the label is IGNORE.

    stablemax has s(x) = x + 1 for x >= 0 and 1 / (1 - x) below in place of exp(x). As log s(x) is log1p(x) and
    -log1p(-x), that is a softmax over squashed logits. Both branches see clamped inputs, else the one that is not
    taken would put 0 * inf into the gradient. In float64 as in the released code; in float32 on MPS, which has none.
    """
    if kind == "stablemax":
        x = logits.float() if logits.device.type == "mps" else logits.double()
        logits = torch.where(x < 0, -torch.log1p(-x.clamp(max=0)), torch.log1p(x.clamp(min=0)))
    elif logits.dtype != torch.float64:
        logits = logits.float()
    loss = F.cross_entropy(logits.flatten(0, -2), labels.flatten().long(), ignore_index=IGNORE, reduction="none")
    return loss.view(labels.shape)


def act_loss(outputs, carry, kind="stablemax"):
    """Cell loss and Q losses of one segment, summed over rows -> (loss, metrics); metrics: name -> (total, count).

    A row's cell loss is the mean over its labelled cells. Losses are told of all rows; the other metrics of the rows
    that halted in this segment and have a label.
    """
    labels, B = carry.data["labels"], len(carry.halted)
    labelled = labels != IGNORE
    n_labelled = labelled.sum(dim=1)  # (B,)
    right = ((outputs["logits"].argmax(dim=-1) == labels) & labelled).sum(dim=1)  # (B,)
    exact = right == n_labelled  # a row without labels counts as right here, and is left out of the metrics
    lm_loss = (cell_loss(outputs["logits"], labels, kind).sum(dim=1) / n_labelled.clamp(min=1)).sum()
    q_halt_loss = F.binary_cross_entropy_with_logits(outputs["q_halt"], exact.float(), reduction="sum")
    loss, q_losses = lm_loss + 0.5 * q_halt_loss, {"q_halt_loss": (q_halt_loss.detach(), B)}
    if "target_q_continue" in outputs:
        target = outputs["target_q_continue"]
        q_continue_loss = F.binary_cross_entropy_with_logits(outputs["q_continue"], target, reduction="sum")
        loss, q_losses["q_continue_loss"] = loss + 0.5 * q_continue_loss, (q_continue_loss.detach(), B)
    done = carry.halted & (n_labelled > 0)
    return loss, {
        "loss": (loss.detach(), B),
        "exact_accuracy": ((exact & done).sum(), done.sum()),
        "accuracy": ((right / n_labelled.clamp(min=1) * done).sum(), done.sum()),
        "segments": ((carry.steps * done).sum(), done.sum()),
        "q_halt_accuracy": ((((outputs["q_halt"] >= 0) == exact) & done).sum(), done.sum()),
        "puzzles": (done.sum(), 1),
        "lm_loss": (lm_loss.detach(), B),
    } | q_losses


class AdamATan2(torch.optim.Optimizer):
    """Adam with atan2 in place of the division: no epsilon, bounded updates, indifferent to the scale of the loss.

        p *= 1 - lr * weight_decay
        m  = beta1 m + (1 - beta1) g;   v = beta2 v + (1 - beta2) g^2
        p -= lr / (1 - beta1^t) * atan2(m, sqrt(v) / sqrt(1 - beta2^t))

    As in the package that HRM uses (adam-atan2 0.0.3), the first moment's correction stands outside the arctangent.
    """

    def __init__(self, params, lr=1e-4, betas=(0.9, 0.95), weight_decay=1.0):
        super().__init__(params, dict(lr=lr, betas=betas, weight_decay=weight_decay, step=0))

    @torch.no_grad()
    def step(self, closure=None):
        """Update every parameter that has a gradient. closure: not used."""
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if params:
                group["step"] += 1
                self._update(group, params, [p.grad for p in params])

    def _update(self, group, params, grads):
        """One step of all tensors of a group together: a launch per operation, not per tensor."""
        for p in params:
            if not self.state[p]:
                self.state[p] = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
        m, v = ([self.state[p][name] for p in params] for name in ("exp_avg", "exp_avg_sq"))
        (beta1, beta2), lr, t = group["betas"], group["lr"], group["step"]
        torch._foreach_mul_(params, 1 - lr * group["weight_decay"])
        torch._foreach_lerp_(m, grads, 1 - beta1)
        torch._foreach_mul_(v, beta2)
        torch._foreach_addcmul_(v, grads, grads, 1 - beta2)
        denom = torch._foreach_sqrt(v)
        torch._foreach_div_(denom, math.sqrt(1 - beta2**t))
        update = [torch.atan2(a, b) for a, b in zip(m, denom)]  # torch has no foreach atan2
        torch._foreach_add_(params, update, alpha=-lr / (1 - beta1**t))


class SignSGD(torch.optim.Optimizer):
    """w = w (1 - lr * weight_decay) - lr * sign(g), for the table rows in the batch; g is summed over equal ids."""

    def __init__(self, params, lr=1e-4, weight_decay=1.0):
        super().__init__(params, dict(lr=lr, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure=None):
        """Update the rows that have a (sparse) gradient. closure: not used."""
        for group in self.param_groups:
            for table in (p for p in group["params"] if p.grad is not None):
                grad = table.grad.coalesce()  # sums the gradients of equal ids
                ids, lr = grad.indices()[0], group["lr"]
                table[ids] = table[ids] * (1 - lr * group["weight_decay"]) - lr * grad.values().sign()


# ---- the model


class HRM(nn.Module):
    """The two modules, their heads, ACT, training and inference. See the top of the file."""

    Carry = Carry  # train.py restores one from a checkpoint
    bar, rate = ("loss", "exact_accuracy", "accuracy", "segments"), "puzzles"  # metrics on the bar; the one per second

    def __init__(self, config):
        super().__init__()
        self.config, C = config, config.n_embd
        self.prefix_len = -(-config.puzzle_emb_ndim // C)  # P
        n_positions = self.prefix_len + config.seq_len
        self.embed_tokens = nn.Embedding(config.vocab_size, C)
        truncated_lecun_(self.embed_tokens.weight, C**-0.5)  # times sqrt(C) in embed(): unit variance
        self.lm_head = linear(C, config.vocab_size)
        self.q_head = nn.Linear(C, 2)
        nn.init.zeros_(self.q_head.weight)
        nn.init.constant_(self.q_head.bias, -5.0)  # both values start near sigmoid(-5) = 0 and grow from below
        if config.puzzle_emb_ndim:
            self.puzzle_emb = PuzzleEmbedding(config)
        positions = None
        if config.pos_encodings == "learned":
            self.embed_pos = nn.Embedding(n_positions, C)
            truncated_lecun_(self.embed_pos.weight, C**-0.5)
        elif config.pos_encodings == "grid":
            positions = grid_relations(config, self.prefix_len)
        else:
            positions = rotary_table(n_positions, C // config.n_head)
        self.register_buffer("positions", positions, persistent=False)  # what attention is told
        self.H_level = Level(config, config.H_layers)
        self.L_level = Level(config, config.L_layers)
        self.register_buffer("H_init", truncated_lecun_(torch.empty(C), 1.0))  # start states, never trained
        self.register_buffer("L_init", truncated_lecun_(torch.empty(C), 1.0))

    def compute_dtype(self):
        """The dtype of the states: autocast's where that is on, else the weights'."""
        device = self.H_init.device.type
        return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else self.lm_head.weight.dtype

    def embed(self, data):
        """inputs (B, T), puzzle_identifiers (B,) -> x (B, P+T, C)"""
        C, P = self.config.n_embd, self.prefix_len
        x = self.embed_tokens(data["inputs"])
        if P:
            prefix = self.puzzle_emb(data["puzzle_identifiers"])
            prefix = F.pad(prefix, (0, P * C - prefix.shape[-1])).view(-1, P, C)
            x = torch.cat([prefix, x], dim=1)
        if self.config.pos_encodings == "learned":
            x = (x + self.embed_pos.weight) * 0.5**0.5
        return (math.sqrt(C) * x).to(self.compute_dtype())

    def start_states(self, batch_size):
        """H_init and L_init, the same at every position: (B, P+T, C) each."""
        shape = (batch_size, self.prefix_len + self.config.seq_len, self.config.n_embd)
        return [init.to(self.compute_dtype()).expand(shape) for init in (self.H_init, self.L_init)]

    def updates(self, z_H, z_L, data):
        """One segment (section 2): H_cycles times {L_cycles updates of z_L, one of z_H}.

        The last `grad_updates` of these carry gradient. 2 is the paper's one-step gradient: the last update of each
        module, and memory for two however many there are. All of them is backpropagation through the segment: more
        time and memory per step, and a gradient that is exact within the segment.
        Yields ("L" or "H", z_H, z_L) after each update; the states are (B, P+T, C) in the compute dtype.
        """
        c, x = self.config, self.embed(data)
        for i, level in enumerate(c.updates):
            with torch.set_grad_enabled(torch.is_grad_enabled() and i >= len(c.updates) - c.grad_updates):
                if level == "L":
                    z_L = self.L_level(z_L, z_H + x, self.positions)
                else:
                    z_H = self.H_level(z_H, z_L if c.L_layers else x, self.positions)
            yield level, z_H, z_L

    def segment(self, z_H, z_L, data):
        """All updates of a segment -> z_H, z_L (B, P+T, C) and q (B, 2) float32: q_halt, q_continue."""
        for _, z_H, z_L in self.updates(z_H, z_L, data):
            pass
        return z_H, z_L, self.q_head(z_H[:, 0]).float()

    def answer(self, z_H):
        """z_H (B, P+T, C) -> logits (B, T, V)"""
        return self.lm_head(z_H[:, self.prefix_len :])

    # ---- adaptive computation time

    def initial_carry(self, batch):
        """A carry whose rows are all halted, so that the next call takes the puzzles of `batch`.

        Raises ValueError if inputs are not (B, seq_len).
        """
        batch = self._checked(batch)
        rows = batch["inputs"][:, 0]
        return Carry(*self.start_states(len(rows)), torch.zeros_like(rows, dtype=torch.int32),
                     torch.ones_like(rows, dtype=torch.bool), batch)

    def forward(self, carry, batch):
        """One segment. Rows of `carry` that are halted start on the puzzle of `batch`, the others go on with theirs.

        Returns (carry, outputs): logits (B, T, V), q_halt and q_continue (B,) float32, logits too, and in training
        with q_target "bootstrap" target_q_continue (B,) in (0, 1), which costs a second forward pass.
        """
        c, new, batch = self.config, carry.halted, self._checked(batch)
        states = zip(self.start_states(len(new)), (carry.z_H, carry.z_L))
        z_H, z_L = (torch.where(new[:, None, None], start, z.to(start.dtype)) for start, z in states)
        data = {k: torch.where(new.view(-1, *[1] * (v.ndim - 1)), batch[k], v) for k, v in carry.data.items()}
        z_H, z_L, q = self.segment(z_H, z_L, data)
        outputs = {"logits": self.answer(z_H), "q_halt": q[:, 0], "q_continue": q[:, 1]}
        steps = torch.where(new, 0, carry.steps) + 1
        min_steps = torch.where(new, self._explore(new), carry.min_steps)
        last = steps >= c.halt_max_steps
        halted = last
        if self.training and c.halt_max_steps > 1:
            halted = last | (self.wants_halt(q) & (steps >= min_steps))
        carry = Carry(z_H.detach(), z_L.detach(), steps, halted, data, min_steps)
        if self.training and c.q_target == "bootstrap":
            with torch.no_grad():
                next_q = self.segment(carry.z_H, carry.z_L, data)[-1]  # (B, 2)
            outputs["target_q_continue"] = torch.where(last, next_q[:, 0], next_q.amax(dim=1)).sigmoid()
        return carry, outputs

    def wants_halt(self, q):
        """Is halting worth more than going on? q (B, 2) -> (B,) bool"""
        return q[:, 0] > (q[:, 1] if self.config.q_target == "bootstrap" else 0)

    def _explore(self, rows):
        """The least segments of a new puzzle: at times 2 to M_max, or Q would not see what more thinking brings. (B,)

        Drawn once per puzzle. The released code draws again after each segment, so that solved puzzles hardly reach
        the deep ones; a small model then spoils its answers when it runs on past its halting point.
        """
        most = max(self.config.halt_max_steps, 2)
        least = torch.randint(2, most + 1, rows.shape, dtype=torch.int32, device=rows.device)
        explores = torch.rand(rows.shape, device=rows.device) < self.config.halt_exploration_prob
        return torch.where(explores, least, 0)

    def _checked(self, batch):
        """The batch, with id 0 for puzzles that have none of their own."""
        inputs = batch["inputs"]
        if inputs.ndim != 2 or inputs.shape[1] != self.config.seq_len:
            raise ValueError(f"inputs of shape {tuple(inputs.shape)}: this model takes (B, {self.config.seq_len}); "
                             "give whole puzzles, or set seq_len")
        return {"puzzle_identifiers": torch.zeros_like(inputs[:, 0]), **batch}

    # ---- training

    def step(self, batch, carry=None):
        """One segment and its loss; the backward pass and the optimizer step are the caller's.

        Returns (loss, metrics, carry). loss: scalar, the sum over rows divided by B. metrics: name -> (total, count),
        to be added up over steps and ranks and then divided.
        """
        carry, outputs = self(carry or self.initial_carry(batch), batch)
        loss, metrics = act_loss(outputs, carry, self.config.loss)
        return loss / len(carry.halted), metrics, carry

    def configure_optimizers(self, lr, weight_decay, betas):
        """[Adam-atan2 for the weights, sign-SGD for the puzzle embedding]. The model must be on its device already."""
        optimizers = [AdamATan2(self.parameters(), lr=lr, weight_decay=weight_decay, betas=betas)]
        if self.prefix_len:
            table, c = self.puzzle_emb.weights.requires_grad_(), self.config
            optimizers.append(SignSGD([table], lr=c.puzzle_emb_lr, weight_decay=c.puzzle_emb_weight_decay))
        return optimizers

    def finish_step(self, metrics):
        """Called once after each optimizer step with the step's metrics; returns more of them. Nothing here."""
        return {}

    def parts_to_compile(self):
        """The modules that do all the work; their shapes do not change in training."""
        return [self.H_level] + [self.L_level] * (self.config.L_layers > 0)

    def looped_parts(self):
        """Those of them that a segment goes through many times: FSDP need not gather them each time."""
        return self.parts_to_compile()

    # ---- inference

    @torch.no_grad()
    def solve(self, inputs, max_segments=None, act_eval=False, trace=False, puzzle_identifiers=None):
        """Think for `max_segments` (default halt_max_steps; more than in training is fine), then answer.

        inputs (B, T) integer. act_eval: a row stops as soon as its Q values say so, and keeps that answer.
        Returns (answer (B, T) int64, segments used (B,) int64) and with `trace` also answers (S, B, T), the answer
        after each segment, and p_halt (S, B), the confidence sigmoid(q_halt). Raises ValueError for other shapes.
        """
        ids = {} if puzzle_identifiers is None else {"puzzle_identifiers": puzzle_identifiers}
        data = self._checked({"inputs": inputs, **ids})
        z_H, z_L = self.start_states(len(inputs))
        active = torch.ones_like(inputs[:, 0], dtype=torch.bool)
        answer, segments, answers, p_halt = inputs.long(), active.long() * 0, [], []
        for _ in range(max_segments or self.config.halt_max_steps):
            z_H, z_L, q = self.segment(z_H, z_L, data)
            answer = torch.where(active[:, None], self.answer(z_H).argmax(dim=-1), answer)
            segments = segments + active
            if act_eval:
                active = active & ~self.wants_halt(q)
            answers.append(answer)
            p_halt.append(q[:, 0].sigmoid())
            if not active.any():
                break
        return (answer, segments, torch.stack(answers), torch.stack(p_halt)) if trace else (answer, segments)

    def evaluate(self, batches, depths=None, grade=None, act_eval=False):
        """Score labelled puzzles after given numbers of segments (default [halt_max_steps]). batches: as for step.

        Returns depth -> name -> (N,) float tensor on the CPU, a value per puzzle in order: exact_accuracy (is the
        whole puzzle right), accuracy (share of right cells), segments used. act_eval: stop each row by its Q values.
        grade: of puzzles with other right answers than the label, (inputs, labels, answers (B, T) on the CPU) -> more
        scores by name, (B,) each, told before the segments.
        """
        depths = sorted(depths or [self.config.halt_max_steps])
        scores = {depth: {} for depth in depths}
        for batch in batches:
            ids = batch.get("puzzle_identifiers")
            _, segments, answers, _ = self.solve(batch["inputs"], depths[-1], act_eval, True, puzzle_identifiers=ids)
            labelled = batch["labels"] != IGNORE
            for depth, named in scores.items():
                answer = answers[min(depth, len(answers)) - 1]
                right = (answer == batch["labels"]) & labelled  # (B, T)
                more = grade(*(t.cpu() for t in (batch["inputs"], batch["labels"], answer))) if grade else {}
                values = {"exact_accuracy": (right == labelled).all(dim=1).float(),
                          "accuracy": right.sum(dim=1) / labelled.sum(dim=1).clamp(min=1), **more,
                          "segments": segments.clamp(max=depth).float()}
                for name, value in values.items():
                    named.setdefault(name, []).append(value.cpu())
        return {depth: {name: torch.cat(parts) for name, parts in named.items()} for depth, named in scores.items()}

    # ---- checkpoints

    @staticmethod
    def pretrained_config(path):
        """HRMConfig fields, as a dict, of a checkpoint: a published one or one of train.py's."""
        return _read_checkpoint(path)[0]

    @classmethod
    def load_pretrained(cls, path, **overrides):
        """The model of a published checkpoint, or of one of train.py's. overrides: HRMConfig fields.

        A published file is a state dict with the official names, behind the prefixes that compilation (_orig_mod.),
        the loss wrapper (model.) and the ACT wrapper (inner.) may have put there. Sizes come from the shapes; what
        they cannot tell is the paper's unless overridden: heads of 64, 2 cycles of 2, 81 cells for the Sudoku
        vocabulary of 11, else 900. Raises ValueError, one line, if the file is no such checkpoint or does not fit.
        """
        config, state = _read_checkpoint(path)
        if any(weight.is_meta for weight in state.values()):
            raise ValueError(f"{path}: its weights are in a folder, where several processes saved them; put them into "
                             "one file with train.py --export FILE")
        model = cls(HRMConfig(**{**config, **overrides}))
        found, expected = ({k: tuple(v.shape) for k, v in s.items()} for s in (state, model.state_dict()))
        for name in sorted(found.keys() | expected.keys()):
            if found.get(name) != expected.get(name):
                raise ValueError(f"{path}: {name} is {found.get(name, 'missing')} in the file and "
                                 f"{expected.get(name, 'absent')} in the model; give the settings it was trained with")
        model.load_state_dict(state)
        return model


def _read_checkpoint(path):
    """Path -> (HRMConfig fields as a dict, state dict in this file's names)."""
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # foreign bytes break the reader in any way: KeyError, IndexError, struct.error
        kind = type(error).__name__
        raise ValueError(f"{path}: not a readable checkpoint ({kind}); give one saved by torch.save") from None
    weights = saved = saved if isinstance(saved, dict) else {}
    if isinstance(saved.get("model_config"), dict):  # train.py's; the averaged weights are the better ones
        weights = saved.get("ema") or saved.get("model") or {}
        if unknown := saved["model_config"].keys() - HRMConfig.__dataclass_fields__.keys():
            raise ValueError(f"{path}: has the setting {min(unknown)}, so it is no HRM checkpoint; give one")
    state = {_plain_name(str(k)): v for k, v in weights.items() if isinstance(v, torch.Tensor) and k != "n_averaged"}
    return saved.get("model_config") or _config_from_shapes(state, path), state


def _plain_name(key):
    """The name of a weight without wrappers' prefixes, in this file's spelling."""
    while key.startswith(("_orig_mod.", "model.", "inner.", "module.")):
        key = key.split(".", 1)[1]
    return key.replace("embedding_weight", "weight")


def _config_from_shapes(state, path):
    """HRMConfig fields of a published state dict."""
    down = "level.layers.0.mlp.down_proj.weight"
    for name in ("embed_tokens.weight", f"H_{down}", f"L_{down}"):
        if name not in state or state[name].ndim != 2:
            raise ValueError(f"{path}: holds no matrix {name}, so it is no HRM checkpoint; give the path of one")
    V, C = state["embed_tokens.weight"].shape
    ids, ndim = state["puzzle_emb.weights"].shape if "puzzle_emb.weights" in state else (1, 0)
    n_layers = {x: 1 + max(int(k.split(".")[2]) for k in state if k.startswith(f"{x}_level.")) for x in "HL"}
    learned, seq_len = "embed_pos.weight" in state, {11: 81}.get(V, 900)
    if learned:
        seq_len = len(state["embed_pos.weight"]) - -(-ndim // C)
    return dict(vocab_size=V, seq_len=seq_len, n_embd=C, n_head=max(C // 64, 1), H_layers=n_layers["H"],
                L_layers=n_layers["L"], expansion=state[f"H_{down}"].shape[1] * 1.5 / C, puzzle_emb_ndim=ndim,
                num_puzzle_identifiers=ids, pos_encodings="learned" if learned else "rope", box_rows=0, box_cols=0)


NANO = dict(n_embd=128, n_head=4, H_layers=1, L_layers=1, expansion=2, pos_encodings="grid", puzzle_emb_ndim=0,
            H_cycles=1, L_cycles=1, halt_exploration_prob=0.3, q_target="none", loss="softmax")

PRESETS = {  # parameters for Sudoku; train.py has the recipe that goes with each
    # 331 thousand: 9x9 boards in minutes on a CPU. One L and one H update per segment, both with gradient
    "nano": HRMConfig(box_rows=3, box_cols=3, **NANO),
    # 330 thousand: 6x6 boards
    "nano-6x6": HRMConfig(vocab_size=8, seq_len=36, box_rows=2, box_cols=3, **NANO),
    "paper": HRMConfig(),  # 27,275,266, as published
}
