"""HRM, the Hierarchical Reasoning Model: two recurrent modules that think in latent space before they answer.

"Hierarchical Reasoning Model", Wang et al. 2025, https://arxiv.org/abs/2506.21734. A puzzle goes in as tokens, its solution
comes out at the same positions. In between, a fast module L and a slow module H update two states for a while:

    x   = sqrt(C) * embed(inputs)                        input embedding, added at every update (section 2)
    z_L = L(z_L + z_H + x)                               L_cycles times (paper T), then
    z_H = H(z_H + z_L)                                   once; all of it H_cycles times (paper N): one *segment*
    logits = lm_head(z_H),  (q_halt, q_continue) = q_head(z_H at the first position)

One-step gradient: only the last update of each module is differentiated, so memory does not grow with the number of updates.
Deep supervision: after every segment there is a loss and an optimizer step, and the detached (z_H, z_L) start the next segment.
Adaptive computation time (ACT): Q-learning decides after each segment whether a puzzle is done or thinks on (section 2, "ACT").

    loss = lm_loss + 1/2 (BCE(q_halt, G_halt) + BCE(q_continue, G_continue))
    G_halt     = 1 if every labelled cell is right else 0
    G_continue = sigmoid(max(q_halt', q_continue')) of the next segment; sigmoid(q_halt') if this was the last allowed one

Shapes: B puzzles, T = seq_len cells, P prefix positions (puzzle embedding), C = n_embd, nh = n_head, hd = C / nh, V = vocab_size.

    model = HRM(PRESETS["nano"])
    carry = model.initial_carry(batch)                   # batch: inputs (B, T), labels (B, T), puzzle_identifiers (B,), all integer
    loss, metrics, carry = model.step(batch, carry)      # one segment; call again to think on, halted rows take the new batch's rows
    answer, segments = model.solve(inputs, 16)           # (B, T), (B,)

What the paper leaves open, settled as in its released code unless a field below says otherwise: norms have no gain; the loss is a
mean over the labelled cells of a puzzle, summed over puzzles, divided by the batch; Adam-atan2 corrects the first moment outside
the arctangent; evaluation runs all segments. Ours: `grad_updates`, `q_target` "none", softmax loss, "grid" positions.
"""

import math
import pickle
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn as nn
import torch.nn.functional as F

IGNORE = -100  # a label that is not scored


@dataclass
class HRMConfig:
    # what goes in and out; train.py sets these five from the data
    vocab_size: int = 11  # token ids: 0 is padding, the data module names the rest
    seq_len: int = 81  # cells per puzzle
    num_puzzle_identifiers: int = 1  # rows of the puzzle embedding
    box_rows: int = 0  # rows of a Sudoku box, for grid positions; 0 = the grid has no boxes
    box_cols: int = 0  # columns of a Sudoku box, for grid positions
    # size
    n_embd: int = 512  # width C
    n_head: int = 8  # attention heads
    H_layers: int = 4  # blocks in the slow module
    L_layers: int = 4  # blocks in the fast module
    expansion: float = 4.0  # SwiGLU width is 2/3 of this times n_embd, rounded up to 256
    pos_encodings: Literal["rope", "learned", "grid"] = "rope"  # grid = learned row + column + box
    puzzle_emb_ndim: int = 512  # size of a puzzle's own vector, put before the cells; 0 = no prefix
    # recurrence
    H_cycles: int = 2  # H updates per segment (paper N)
    L_cycles: int = 2  # L updates before each H update (paper T)
    grad_updates: int = 2  # last updates of a segment that carry gradient; 2 = the paper's one-step gradient
    # halting
    halt_max_steps: int = 16  # most segments per puzzle (paper M_max)
    halt_exploration_prob: float = 0.1  # chance that a puzzle must run a random minimum of segments
    q_target: Literal["bootstrap", "none"] = "bootstrap"  # none = halt when q_halt > 0, saves a forward pass
    # loss and optimizer
    loss: Literal["stablemax", "softmax"] = "stablemax"  # cell loss
    puzzle_emb_lr: float = 1e-4  # learning rate of the puzzle embedding's sign-SGD
    puzzle_emb_weight_decay: float = 1.0  # and its decay, scaled by that rate

    def __post_init__(self):
        if self.n_embd % self.n_head or self.n_embd // self.n_head % 2:
            raise ValueError(f"n_embd {self.n_embd} with n_head {self.n_head}: heads need an even whole size; change one of the two")
        updates = self.H_cycles * (self.L_cycles + 1)
        if not 1 <= self.grad_updates <= updates:
            raise ValueError(f"grad_updates {self.grad_updates}: a segment has 1 to {updates} updates; choose one of these")


def truncated_lecun_(weight, std):
    """Fill `weight` from a normal cut at two sigma whose std *after* the cut is `std` (LeCun: 1 / sqrt(fan_in))."""
    sigma = std / 0.87962566103423978  # std of a standard normal cut at +-2
    return nn.init.trunc_normal_(weight, std=sigma, a=-2 * sigma, b=2 * sigma)


def linear(n_in, n_out):
    layer = nn.Linear(n_in, n_out, bias=False)
    truncated_lecun_(layer.weight, n_in**-0.5)
    return layer


def rms_norm(x, eps=1e-5):
    """x / rms(x) over the last axis, in float32, without a gain. (..., C) -> (..., C) in x's dtype."""
    return F.rms_norm(x.float(), (x.shape[-1],), eps=eps).to(x.dtype)


def rotary_table(n_positions, head_dim, base=10000.0):
    """cos and sin of position * frequency, stacked: (2, n_positions, hd) float32; feature i pairs with i + hd/2."""
    freq = base ** (-torch.arange(0, head_dim, 2).float() / head_dim)
    angle = torch.outer(torch.arange(n_positions).float(), freq).repeat(1, 2)  # (n_positions, hd)
    return torch.stack([angle.cos(), angle.sin()])


def apply_rotary(x, rotary):
    """Rotate the feature pairs of x (B, nh, T, hd) by rotary (2, T, hd)."""
    cos, sin = rotary.to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def grid_relations(config, prefix_len):
    """How two cells of a square grid relate: 1 if in the same row + 2 same column + 4 same box. (P+T, P+T) int64 in 0..7."""
    side = math.isqrt(config.seq_len)
    if side * side != config.seq_len:
        raise ValueError(f"pos_encodings grid with seq_len {config.seq_len}: the grid must be square; choose rope or learned")
    cell = torch.arange(config.seq_len)
    row, col = cell // side, cell % side
    related = (row[:, None] == row).long() + 2 * (col[:, None] == col).long()  # (T, T)
    if config.box_rows:
        box = row // config.box_rows * config.box_rows + col // config.box_cols
        related += 4 * (box[:, None] == box).long()
    return F.pad(related, (prefix_len, 0, prefix_len, 0))  # the prefix shares nothing with any cell


class Attention(nn.Module):
    """Every position sees every position: a puzzle is read as a whole, not from left to right."""

    def __init__(self, config):
        super().__init__()
        self.n_head = config.n_head
        self.qkv_proj = linear(config.n_embd, 3 * config.n_embd)  # rows: all query heads, all key heads, all value heads
        self.o_proj = linear(config.n_embd, config.n_embd)
        grid = config.pos_encodings == "grid"
        self.grid_bias = nn.Parameter(0.35 * torch.randn(config.n_head, 8)) if grid else None

    def forward(self, x, pos):
        """x (B, T, C), pos: rotary table (2, T, hd), grid relations (T, T) or None -> (B, T, C)."""
        B, T, C = x.shape
        q, k, v = self.qkv_proj(x).view(B, T, 3, self.n_head, C // self.n_head).permute(2, 0, 3, 1, 4)  # (B, nh, T, hd) each
        bias = None
        if self.grid_bias is not None:  # strong from the start, so that heads begin with different parts of the board in view
            bias = (16 * self.grid_bias[:, pos]).to(x.dtype)  # (nh, T, T)
        elif pos is not None:
            q, k = apply_rotary(q, pos), apply_rotary(k, pos)
        if x.device.type == "cpu" and x.dtype == torch.bfloat16:
            scores = (q * q.shape[-1] ** -0.5) @ k.mT  # (B, nh, T, T); three times faster than SDPA for short rows here
            y = (scores if bias is None else scores + bias).softmax(dim=-1) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return self.o_proj(y.transpose(1, 2).reshape(B, T, C))


class SwiGLU(nn.Module):
    """down(silu(gate) * up), with gate and up in one matrix."""

    def __init__(self, config):
        super().__init__()
        width = -(-round(config.expansion * config.n_embd * 2 / 3) // 256) * 256  # rounded up to a multiple of 256
        self.gate_up_proj = linear(config.n_embd, 2 * width)
        self.down_proj = linear(width, config.n_embd)

    def forward(self, x):
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


class Block(nn.Module):
    """Post-norm transformer block: the residual sum itself is normalised, which keeps a recurrent state bounded."""

    def __init__(self, config):
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = SwiGLU(config)

    def forward(self, x, rotary):
        x = rms_norm(x + self.self_attn(x, rotary))
        return rms_norm(x + self.mlp(x))


class Level(nn.Module):
    """One of the two modules, H or L: adds what it is told to its state, then runs its blocks."""

    def __init__(self, config, n_layers):
        super().__init__()
        self.layers = nn.ModuleList(Block(config) for _ in range(n_layers))

    def forward(self, z, injection, rotary):
        """z (B, P+T, C), injection (B, P+T, C) -> new z."""
        z = z + injection
        for block in self.layers:
            z = block(z, rotary)
        return z


class PuzzleEmbedding(nn.Module):
    """One learned vector per puzzle id. A table of a million rows gets sparse gradients, so it is a buffer with its own SignSGD."""

    def __init__(self, config):
        super().__init__()
        self.register_buffer("weights", torch.zeros(config.num_puzzle_identifiers, config.puzzle_emb_ndim))

    def forward(self, ids):
        """ids (B,) -> (B, puzzle_emb_ndim)"""
        return F.embedding(ids, self.weights, sparse=True)


@dataclass
class Carry:
    """What survives a segment. All rows start halted: a halted row takes a new puzzle at the next call."""

    z_H: torch.Tensor  # (B, P+T, C)
    z_L: torch.Tensor  # (B, P+T, C)
    steps: torch.Tensor  # (B,) int32, segments done on the present puzzle
    halted: torch.Tensor  # (B,) bool
    data: dict  # the puzzles being worked on: inputs (B, T), puzzle_identifiers (B,) and, if given, labels (B, T)
    min_steps: torch.Tensor | int = 0  # (B,) int32, segments that the present puzzle must run in training


# ---- loss and optimizers


def cell_loss(logits, labels, kind="stablemax"):
    """Cross entropy of every cell. logits (..., V), labels (...) integer, IGNORE for cells that are not scored -> (...), 0 there.

    stablemax replaces exp(x) by s(x) = x + 1 for x >= 0, 1 / (1 - x) below, which cannot overflow. Since log s(x) is
    log1p(x) for x >= 0 and -log1p(-x) below, it is a softmax over squashed logits. Each branch sees clamped inputs: the one
    not taken would otherwise put 0 * inf into the gradient. float64 as in the released code, float32 on MPS, which has no float64.
    """
    if kind == "stablemax":
        x = logits.float() if logits.device.type == "mps" else logits.double()
        logits = torch.where(x < 0, -torch.log1p(-x.clamp(max=0)), torch.log1p(x.clamp(min=0)))
    else:
        logits = logits.float()
    loss = F.cross_entropy(logits.flatten(0, -2), labels.flatten().long(), ignore_index=IGNORE, reduction="none")
    return loss.view(labels.shape)


def act_loss(outputs, carry, kind="stablemax"):
    """Cell loss and Q losses of one segment, summed over the rows (section 2, equation for L_ACT).

    Per row the cell loss is a mean over its labelled cells. Returns (loss, metrics), metrics: name -> (total, count). Accuracies
    and segments are told of the rows that halted in this segment and have a label; losses of all rows.
    """
    labels, B = carry.data["labels"], len(carry.halted)
    labelled = labels != IGNORE
    n_labelled = labelled.sum(dim=1)  # (B,)
    right = ((outputs["logits"].argmax(dim=-1) == labels) & labelled).sum(dim=1)  # (B,)
    exact = right == n_labelled  # a row without labels counts as right here, and is left out of the metrics below
    lm_loss = (cell_loss(outputs["logits"], labels, kind).sum(dim=1) / n_labelled.clamp(min=1)).sum()
    q_halt_loss = F.binary_cross_entropy_with_logits(outputs["q_halt"], exact.float(), reduction="sum")
    loss = lm_loss + 0.5 * q_halt_loss
    done = carry.halted & (n_labelled > 0)
    metrics = {
        "exact_accuracy": ((exact & done).sum(), done.sum()),
        "accuracy": ((right / n_labelled.clamp(min=1) * done).sum(), done.sum()),
        "segments": ((carry.steps * done).sum(), done.sum()),
        "q_halt_accuracy": ((((outputs["q_halt"] >= 0) == exact) & done).sum(), done.sum()),
        "lm_loss": (lm_loss.detach(), B),
        "q_halt_loss": (q_halt_loss.detach(), B),
        "puzzles": (done.sum(), 1),
    }
    if "target_q_continue" in outputs:
        target = outputs["target_q_continue"]
        q_continue_loss = F.binary_cross_entropy_with_logits(outputs["q_continue"], target, reduction="sum")
        loss = loss + 0.5 * q_continue_loss
        metrics["q_continue_loss"] = (q_continue_loss.detach(), B)
    return loss, {"loss": (loss.detach(), B), **metrics}


class AdamATan2(torch.optim.Optimizer):
    """Adam with atan2 in place of the division: no epsilon, the update is bounded and does not depend on the loss's scale.

        p *= 1 - lr * weight_decay
        m  = beta1 m + (1 - beta1) g;   v = beta2 v + (1 - beta2) g^2
        p -= lr / (1 - beta1^t) * atan2(m, sqrt(v) / sqrt(1 - beta2^t))

    As in the package HRM uses (adam-atan2 0.0.3): the first-moment correction stands outside the arctangent.
    """

    def __init__(self, params, lr=1e-4, betas=(0.9, 0.95), weight_decay=1.0):
        super().__init__(params, dict(lr=lr, betas=betas, weight_decay=weight_decay, step=0))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if params:
                group["step"] += 1
                self._update(group, params, [p.grad for p in params])

    def _update(self, group, params, grads):
        """One step for all tensors of a group at once (foreach: one launch per operation, not per tensor)."""
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
    """w = w (1 - lr * weight_decay) - lr * sign(g), for the rows of a table that the batch used; g summed over equal ids."""

    def __init__(self, params, lr=1e-4, weight_decay=1.0):
        super().__init__(params, dict(lr=lr, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for table in (p for p in group["params"] if p.grad is not None):
                grad = table.grad.coalesce()  # sums the gradients of equal ids
                ids, lr = grad.indices()[0], group["lr"]
                table[ids] = table[ids] * (1 - lr * group["weight_decay"]) - lr * grad.values().sign()


class HRM(nn.Module):
    Carry = Carry  # train.py restores one from a checkpoint
    bar, rate = ("loss", "exact_accuracy", "accuracy", "segments"), "puzzles"  # metrics on the progress bar; the one per second

    def __init__(self, config):
        super().__init__()
        self.config = config
        C = config.n_embd
        self.prefix_len = -(-config.puzzle_emb_ndim // C)  # P
        self.embed_tokens = nn.Embedding(config.vocab_size, C)
        self.lm_head = linear(C, config.vocab_size)
        self.q_head = nn.Linear(C, 2)
        if config.puzzle_emb_ndim:
            self.puzzle_emb = PuzzleEmbedding(config)
        if config.pos_encodings == "learned":
            self.embed_pos = nn.Embedding(self.prefix_len + config.seq_len, C)
        self.H_level = Level(config, config.H_layers)
        self.L_level = Level(config, config.L_layers)
        self.register_buffer("H_init", truncated_lecun_(torch.empty(C), 1.0))  # start states, drawn once and never trained
        self.register_buffer("L_init", truncated_lecun_(torch.empty(C), 1.0))
        self.register_buffer("positions", self._positions(), persistent=False)

        truncated_lecun_(self.embed_tokens.weight, C**-0.5)  # times sqrt(C) in embed(): unit variance
        if config.pos_encodings == "learned":
            truncated_lecun_(self.embed_pos.weight, C**-0.5)
        nn.init.zeros_(self.q_head.weight)  # Q starts near sigmoid(-5) = 0, so that values grow from below
        nn.init.constant_(self.q_head.bias, -5.0)

    # ---- one segment

    def _positions(self):
        """What attention is told of positions: rotary table (2, P+T, hd), grid relations (P+T, P+T), or None."""
        c, n = self.config, self.prefix_len + self.config.seq_len
        if c.pos_encodings == "grid":
            return grid_relations(c, self.prefix_len)
        return rotary_table(n, c.n_embd // c.n_head) if c.pos_encodings == "rope" else None

    def compute_dtype(self):
        """The dtype of the states: autocast's where it is on, else the weights'."""
        device = self.H_init.device.type
        return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else self.lm_head.weight.dtype

    def embed(self, data):
        """inputs (B, T), puzzle_identifiers (B,) -> x (B, P+T, C)"""
        x = self.embed_tokens(data["inputs"])
        if self.prefix_len:
            prefix = self.puzzle_emb(data["puzzle_identifiers"])
            prefix = F.pad(prefix, (0, self.prefix_len * self.config.n_embd - prefix.shape[-1]))
            x = torch.cat([prefix.view(-1, self.prefix_len, self.config.n_embd), x], dim=1)
        if self.config.pos_encodings == "learned":
            x = (x + self.embed_pos.weight) * 0.5**0.5
        return (math.sqrt(self.config.n_embd) * x).to(self.compute_dtype())

    def segment(self, z_H, z_L, data):
        """H_cycles times {L_cycles updates of z_L, one of z_H} (section 2). The last `grad_updates` of these carry gradient.

        2 is the paper's one-step gradient: the last update of each module, constant memory. All of them is backpropagation
        through the segment: each step costs more time and memory and learns more (measured in the README).
        Returns z_H, z_L (B, P+T, C), logits (B, T, V) in the compute dtype, q (B, 2) float32.
        """
        c = self.config
        x = self.embed(data)
        updates = ("L" * c.L_cycles + "H") * c.H_cycles
        for i, level in enumerate(updates):
            with torch.set_grad_enabled(torch.is_grad_enabled() and i >= len(updates) - c.grad_updates):
                if level == "L":
                    z_L = self.L_level(z_L, z_H + x, self.positions)
                else:
                    z_H = self.H_level(z_H, z_L, self.positions)
        return z_H, z_L, self.lm_head(z_H[:, self.prefix_len :]), self.q_head(z_H[:, 0]).float()

    def start_states(self, batch_size):
        """H_init and L_init copied to every position: (B, P+T, C) each."""
        shape = (batch_size, self.prefix_len + self.config.seq_len, self.config.n_embd)
        dtype = self.compute_dtype()
        return self.H_init.to(dtype).expand(shape), self.L_init.to(dtype).expand(shape)

    # ---- adaptive computation time

    def initial_carry(self, batch):
        """A carry whose rows are all halted, so that the first call takes over `batch` (inputs (B, T), ...)."""
        self._check(batch)
        batch = self._with_ids(batch)
        B, device = batch["inputs"].shape[0], batch["inputs"].device
        steps = torch.zeros(B, dtype=torch.int32, device=device)
        return Carry(*self.start_states(B), steps, torch.ones(B, dtype=torch.bool, device=device), batch)

    def forward(self, carry, batch):
        """One segment for every row. Rows of `carry` that are halted start on the puzzle of `batch`; the others go on with theirs.

        Returns (carry, outputs): outputs logits (B, T, V), q_halt (B,), q_continue (B,) float32 logits and, in training with
        q_target "bootstrap", target_q_continue (B,) in (0, 1).
        """
        c, batch, new = self.config, self._with_ids(batch), carry.halted
        H_start, L_start = self.start_states(len(new))
        z_H = torch.where(new[:, None, None], H_start, carry.z_H.to(H_start.dtype))
        z_L = torch.where(new[:, None, None], L_start, carry.z_L.to(L_start.dtype))
        data = {k: torch.where(new.view(-1, *[1] * (v.ndim - 1)), batch[k], v) for k, v in carry.data.items()}
        z_H, z_L, logits, q = self.segment(z_H, z_L, data)
        outputs = {"logits": logits, "q_halt": q[:, 0], "q_continue": q[:, 1]}
        steps = torch.where(new, 0, carry.steps) + 1
        min_steps = torch.where(new, self._explore(new), carry.min_steps)
        carry = Carry(z_H.detach(), z_L.detach(), steps, self._halt(steps, min_steps, q.detach()), data, min_steps)
        if self.training and c.q_target == "bootstrap":
            with torch.no_grad():  # what the next segment would say of the same puzzles
                next_q = self.segment(carry.z_H, carry.z_L, data)[-1]  # (B, 2)
                best = torch.where(steps >= c.halt_max_steps, next_q[:, 0], next_q.amax(dim=1))
                outputs["target_q_continue"] = best.sigmoid()
        return carry, outputs

    def _explore(self, rows):
        """Segments that a new puzzle must run: now and then 2 to M_max of them, or Q would never see what more thinking brings.

        Drawn once per puzzle as in the paper's text; the released code draws again after every segment, so that a solved puzzle
        hardly ever reaches the deep ones, and running a small model on past its halting point then spoils its answers.
        """
        if not self.training or self.config.halt_max_steps < 2:
            return torch.zeros_like(rows, dtype=torch.int32)
        explores = torch.rand(rows.shape, device=rows.device) < self.config.halt_exploration_prob
        least = torch.randint(2, self.config.halt_max_steps + 1, rows.shape, dtype=torch.int32, device=rows.device)
        return torch.where(explores, least, 0)

    def _halt(self, steps, min_steps, q):
        """Which rows are done: at M_max always, in training also those that have had their least and want to halt. (B,) bool"""
        halted = steps >= self.config.halt_max_steps
        if self.training and self.config.halt_max_steps > 1:
            halted = halted | (self.wants_halt(q) & (steps >= min_steps))
        return halted

    def wants_halt(self, q):
        """q (B, 2) -> (B,) bool"""
        return q[:, 0] > (q[:, 1] if self.config.q_target == "bootstrap" else 0)

    def _with_ids(self, batch):
        """Puzzles without an id of their own all share id 0."""
        if "puzzle_identifiers" in batch:
            return batch
        return {**batch, "puzzle_identifiers": torch.zeros_like(batch["inputs"][:, 0])}

    def _check(self, batch):
        inputs = batch["inputs"]
        if inputs.ndim != 2 or inputs.shape[1] != self.config.seq_len:
            raise ValueError(f"inputs of shape {tuple(inputs.shape)}: this model takes (B, {self.config.seq_len}) tokens; "
                             "set seq_len to the puzzle's size")

    # ---- training

    def step(self, batch, carry=None):
        """One segment with its loss, for the training loop. The caller does the backward pass and the optimizer step.

        Returns (loss, metrics, carry). loss: scalar, the sum over rows divided by B. metrics: name -> (total, count), both
        scalar tensors: add them up over steps and ranks, then divide.
        """
        carry, outputs = self(carry or self.initial_carry(batch), batch)
        loss, metrics = act_loss(outputs, carry, self.config.loss)
        return loss / len(carry.halted), metrics, carry

    def parts_to_compile(self):
        """The modules worth compiling: all the work is in them, and their shapes never change in training."""
        return [self.H_level, self.L_level]

    def configure_optimizers(self, lr, weight_decay, betas):
        """Adam-atan2 for the weights, sign-SGD for the puzzle embedding. Returns a list of optimizers."""
        optimizers = [AdamATan2(self.parameters(), lr=lr, weight_decay=weight_decay, betas=betas)]
        if self.prefix_len:
            table = self.puzzle_emb.weights.requires_grad_()  # only now: before, the model may still move between devices
            optimizers.append(SignSGD([table], lr=self.config.puzzle_emb_lr, weight_decay=self.config.puzzle_emb_weight_decay))
        return optimizers

    # ---- inference

    @torch.no_grad()
    def solve(self, inputs, max_segments=None, act=False, trace=False, puzzle_identifiers=None):
        """Think for `max_segments` (halt_max_steps if None; more than in training is fine), then answer.

        inputs: (B, T) integer tokens. act: a row stops as soon as its q says so, and keeps that answer.
        Returns (answer (B, T) int64, segments (B,) int64) and with `trace` also answers (S, B, T), the answer after each
        segment, and p_halt (S, B), the halting confidence sigmoid(q_halt) in (0, 1).
        """
        batch = {"inputs": inputs} | ({} if puzzle_identifiers is None else {"puzzle_identifiers": puzzle_identifiers})
        self._check(batch)
        data = self._with_ids(batch)
        z_H, z_L = self.start_states(len(inputs))
        active = torch.ones(len(inputs), dtype=torch.bool, device=inputs.device)
        segments = torch.zeros(len(inputs), dtype=torch.int64, device=inputs.device)
        answer, answers, p_halt = torch.zeros_like(inputs, dtype=torch.int64), [], []
        for _ in range(max_segments or self.config.halt_max_steps):
            z_H, z_L, logits, q = self.segment(z_H, z_L, data)
            answer = torch.where(active[:, None], logits.argmax(dim=-1), answer)
            segments += active
            if act:
                active = active & ~self.wants_halt(q)
            answers.append(answer)
            p_halt.append(q[:, 0].sigmoid())
            if not active.any():
                break
        return (answer, segments, torch.stack(answers), torch.stack(p_halt)) if trace else (answer, segments)

    @torch.no_grad()
    def evaluate(self, batches, depths=None, act=False):
        """Score puzzles after given numbers of segments. batches: dicts as for `step`, with labels.

        Returns depth -> name -> (N,) float tensor on the CPU, one value per puzzle in order: exact_accuracy (the whole puzzle
        is right), accuracy (share of right cells), segments used. depths: default [halt_max_steps]. act: stop early by q.
        """
        depths = sorted(depths or [self.config.halt_max_steps])
        scores = {d: {"exact_accuracy": [], "accuracy": [], "segments": []} for d in depths}
        for batch in batches:
            ids = batch.get("puzzle_identifiers")
            _, segments, answers, _ = self.solve(batch["inputs"], depths[-1], act, trace=True, puzzle_identifiers=ids)
            labelled = batch["labels"] != IGNORE
            for d in depths:
                right = (answers[min(d, len(answers)) - 1] == batch["labels"]) & labelled  # (B, T)
                scores[d]["exact_accuracy"].append((right == labelled).all(dim=1).float().cpu())
                scores[d]["accuracy"].append((right.sum(dim=1) / labelled.sum(dim=1).clamp(min=1)).cpu())
                scores[d]["segments"].append(segments.clamp(max=d).float().cpu())
        return {d: {name: torch.cat(values) for name, values in named.items()} for d, named in scores.items()}

    # ---- checkpoints

    @staticmethod
    def pretrained_config(path):
        """HRMConfig fields, as a dict, of a checkpoint: a published one or one of train.py's. See load_pretrained."""
        return _read(path)[0]

    @classmethod
    def load_pretrained(cls, path, **overrides):
        """Read a published checkpoint, or one of train.py's, and return the model. `overrides` are HRMConfig fields.

        A published file is a state dict with the official names, behind any of the prefixes that compilation (_orig_mod.),
        the loss wrapper (model.) and the ACT wrapper (inner.) put there. Sizes are read from the shapes. What shapes cannot
        tell is the paper's unless overridden: heads of 64, 2 cycles of 2, seq_len 81 for the Sudoku vocabulary, else 900.
        Raises ValueError, in one line, for a file that is no such checkpoint or does not fit the overrides.
        """
        config, state = _read(path)
        model = cls(HRMConfig(**{**config, **overrides}))
        expected, found = ({k: tuple(v.shape) for k, v in s.items()} for s in (model.state_dict(), state))
        for name in sorted(expected.keys() | found.keys()):
            if expected.get(name) != found.get(name):
                raise ValueError(f"{path}: {name} is {found.get(name, 'missing')} in the file and "
                                 f"{expected.get(name, 'absent')} in the model; give the settings it was trained with")
        model.load_state_dict(state)
        return model


def _read(path):
    """Checkpoint file -> (HRMConfig fields as a dict, state dict in this file's names)."""
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, OSError, ValueError, pickle.UnpicklingError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{path}: not a readable checkpoint ({reason[:100]}); give a state dict saved by torch.save") from None
    if isinstance(saved, dict) and "model_config" in saved:  # train.py's: evaluate with the averaged weights if there are any
        weights = saved.get("ema") or saved["model"]
        return saved["model_config"], {_plain_name(k): v for k, v in weights.items() if k != "n_averaged"}
    state = {_plain_name(k): v for k, v in saved.items()} if isinstance(saved, dict) else {}
    needed = ("embed_tokens.weight", "H_level.layers.0.mlp.down_proj.weight", "L_level.layers.0.mlp.down_proj.weight")
    for name in needed:
        if name not in state:
            raise ValueError(f"{path}: holds no {name}, so it is no HRM checkpoint; give the path of one")
    V, C = state["embed_tokens.weight"].shape
    ids, ndim = state["puzzle_emb.weights"].shape if "puzzle_emb.weights" in state else (1, 0)
    layers = {x: 1 + max(int(k.split(".")[2]) for k in state if k.startswith(f"{x}_level.")) for x in "HL"}
    learned = "embed_pos.weight" in state
    seq_len = len(state["embed_pos.weight"]) - -(-ndim // C) if learned else {11: 81}.get(V, 900)
    return dict(vocab_size=V, seq_len=seq_len, num_puzzle_identifiers=ids, puzzle_emb_ndim=ndim, n_embd=C,
                n_head=max(C // 64, 1), H_layers=layers["H"], L_layers=layers["L"],
                expansion=state[needed[1]].shape[1] * 1.5 / C, pos_encodings="learned" if learned else "rope"), state


def _plain_name(key):
    """The name of a weight without the wrappers' prefixes, in this file's spelling."""
    while key.startswith(("_orig_mod.", "model.", "inner.", "module.")):
        key = key.split(".", 1)[1]
    return key.replace("_orig_mod.", "").replace("embedding_weight", "weight")


# name -> config; the parameter count is for Sudoku. train.py adds each preset's recipe.
PRESETS = {
    # 0.33M parameters: 9x9 boards in minutes on a CPU. One block per module, and all updates of a segment carry gradient
    "nano": HRMConfig(n_embd=128, n_head=4, H_layers=1, L_layers=1, expansion=2, pos_encodings="grid", puzzle_emb_ndim=0,
                      H_cycles=1, L_cycles=1, q_target="none", halt_exploration_prob=0.6, loss="softmax"),
    # the same for 6x6 boards
    "nano-6x6": HRMConfig(seq_len=36, n_embd=128, n_head=4, H_layers=1, L_layers=1, expansion=2, pos_encodings="grid",
                          puzzle_emb_ndim=0, H_cycles=1, L_cycles=1, q_target="none", halt_exploration_prob=0.6, loss="softmax"),
    # 27.3M parameters, as published: 27,275,266 for Sudoku
    "paper": HRMConfig(),
}
