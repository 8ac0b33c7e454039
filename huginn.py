"""Huginn, the depth-recurrent language model: one block of layers, looped as often as the text deserves.

"Scaling up Test-Time Compute with Latent Reasoning: A Recurrent Depth Approach", Geiping et al. 2025,
https://arxiv.org/abs/2502.05171. Section numbers are the paper's. Instead of writing out its thoughts, the model
iterates on a latent state before it says the next token; how often is an argument, also after training (section 3):

    e   = prelude(sqrt(C) * embed(tokens))              read the text once
    s_0 ~ truncated normal, std sqrt(2/5)               start anywhere
    s_i = core(adapter([s_{i-1}, e]))                   think: num_steps times (paper r)
    logits = head(ln_f(coda(ln_f(s_r))))                speak; the head is the embedding matrix, ln_f is used twice

Every block is a sandwich: x = norm_2(x + attention(norm_1(x))), x = norm_4(x + mlp(norm_3(x))). The outer norms keep
the state bounded however long the loop.

Training (section 3.3) draws num_steps anew for each micro-batch from a long-tailed distribution around
`mean_recurrence` and backpropagates through the last `mean_backprop_depth` of them only, so memory does not grow with
the others:

    rate ~ LogNormal(log(mean_recurrence) - 1/8, 1/2),  num_steps ~ Poisson(rate) + 1

Shapes: B rows, T tokens, C = n_embd, nh = n_head, hd = C / nh, V = vocab_size.

    model = Huginn(PRESETS["nano"])
    logits, loss = model(tokens, targets, num_steps=8)  # (B, T, V), scalar; targets are the tokens shifted by one
    model.generate([[72, 105]], max_new_tokens=20, num_steps=8, temperature=0.0)

At inference (section 5) nothing is retrained for: tokens may stop looping one by one once their prediction has settled
(`exit`), loops may share cache slots (`cache_budget`), and a token may go on from the last one's thought
(`warm_start`).

What is left open is settled as in the released code, whose checkpoints `Huginn.load_pretrained` reads, but for two
points. A single number as num_steps still backpropagates through the last `mean_backprop_depth` steps, where the
released code would not at all. And `generate` and `evaluate` draw s_0 per position from a seed rather than per call,
so that a greedy answer does not depend on what else is in the batch.
"""

import math
import os
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from data.weights import check_shapes, folder_shapes, held, read_config, read_folder, read_run, run_weights

IGNORE = -100  # the target of a token that is not scored


@dataclass
class HuginnConfig:
    # what goes in and out; train.py takes these from the data
    vocab_size: int = 65536  # tokens, padded as the checkpoint has it
    block_size: int = 4096  # longest text, in tokens
    # size
    n_embd: int = 5280  # width C
    n_head: int = 55  # attention heads
    intermediate_size: int = 17920  # width of the gated MLP
    n_layers_in_prelude: int = 2  # blocks that read the text
    n_layers_in_recurrent_block: int = 4  # blocks of the core, which is looped
    n_layers_in_coda: int = 2  # blocks that turn the state into a prediction
    rope_base: float = 50000.0  # base of the rotary frequencies
    # recurrence
    # drawn in training are, on average, this or mean_backprop_depth, whichever is larger, + 1; the default elsewhere
    mean_recurrence: int = 32  # mean number of steps of the core (paper r)
    mean_backprop_depth: int = 8  # last steps that carry gradient, at most (paper k)
    random_recurrence: bool = True  # draw the steps of each micro-batch; false = always mean_recurrence
    checkpoint_core: bool = False  # recompute every step of the core in the backward pass: less memory, more time
    selective_checkpoint: bool = False  # with it, keep products of matrices and attention: cheaper, saves less

    def __post_init__(self):
        for name in HuginnConfig.__dataclass_fields__:
            value = getattr(self, name)
            if isinstance(value, bool):
                continue
            least = 0 if name in ("n_layers_in_prelude", "n_layers_in_coda") else 1
            if not isinstance(value, int if name != "rope_base" else (int, float)) or not least <= value <= 2**40:
                raise ValueError(f"{name} {value!r}: give a number from {least} up")
        if self.selective_checkpoint and not self.checkpoint_core:
            raise ValueError("selective_checkpoint says what checkpoint_core recomputes; give checkpoint_core too")
        if self.n_embd % (2 * self.n_head):
            raise ValueError(f"n_embd {self.n_embd} with n_head {self.n_head}: heads must have a whole, even size; "
                             f"make n_embd a multiple of {2 * self.n_head}")


@dataclass
class GenerateConfig:
    # how to write text, and how to answer in evaluation
    num_steps: int = -1  # steps of the core per token; -1 = mean_recurrence; evaluation takes --depths instead
    max_new_tokens: int = 200  # tokens to write, at most
    temperature: float = 0.0  # of the next token's distribution; 0 = always the likeliest token
    top_k: int = -1  # choose among the k likeliest tokens; -1 = all
    top_p: float = 1.0  # choose among the likeliest tokens that together have this probability
    exit: Literal["none", "kl", "latent", "argmax"] = "none"  # a token stops looping once this has settled
    exit_threshold: float = -1  # when it has: kl below 5e-4, latent below 0.03, argmax the same 5 times (-1 = these)
    min_steps: int = 1  # steps before a token may stop looping
    warm_start: bool = False  # a new token's loop starts from the last token's final state, not from noise
    cache_budget: int = -1  # steps whose keys and values are kept; later steps share them in turn; -1 = all

    def __post_init__(self):
        if self.exit not in ("none", *Exit.THRESHOLDS):
            raise ValueError(f"exit {self.exit!r}: choose none, {', '.join(Exit.THRESHOLDS)}")
        limits = dict(num_steps=(1, 2**20), top_k=(1, 2**31), exit_threshold=(0, 1e9), cache_budget=(1, 2**20),
                      max_new_tokens=(1, 2**31), temperature=(0, 1e9), min_steps=(1, 2**20), top_p=(1e-9, 1))
        for name, (least, most) in limits.items():
            off = getattr(self, name) == -1 and name in ("num_steps", "top_k", "exit_threshold", "cache_budget")
            if not (off or least <= getattr(self, name) <= most):  # nan too
                raise ValueError(f"{name} {getattr(self, name)}: give {least} to {most:g}")


# ---- blocks


def truncated_normal_(tensor, std):
    """Fill from a normal of std `std` cut at three of it."""
    return nn.init.trunc_normal_(tensor, std=std, a=-3 * std, b=3 * std)


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last axis, in float32. (..., C) -> (..., C) in x's dtype."""

    def __init__(self, width, eps=1e-6):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(x.dtype)


def rotary_phases(n_positions, head_dim, base, device=None):
    """exp(i * position * frequency), (n_positions, hd/2) complex64. Feature 2j is paired with 2j + 1."""
    freq = base ** (-torch.arange(0, head_dim, 2, device=device).float() / head_dim)
    angle = torch.outer(torch.arange(n_positions, device=device).float(), freq)
    return torch.polar(torch.ones_like(angle), angle)


def rotate_pairs(x, rotary):
    """Rotate the adjacent feature pairs of x (B, T, n, nh, hd) by rotary (T, hd/2) or (B, T, hd/2), in float32."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))  # (B, T, n, nh, hd/2)
    return torch.view_as_real(pairs * rotary[..., None, None, :]).flatten(-2).to(x.dtype)


class CausalAttention(nn.Module):
    """Each token sees itself and those before it. Queries and keys get a learned bias before they are rotated."""

    def __init__(self, config):
        super().__init__()
        C, self.n_head = config.n_embd, config.n_head
        self.Wqkv = nn.Linear(C, 3 * C, bias=False)  # rows: all heads' queries, then keys, then values
        self.qk_bias = nn.Parameter(torch.zeros(2, 1, config.n_head, C // config.n_head))
        self.proj = nn.Linear(C, C, bias=False)

    def forward(self, x, rotary, cache=None, slot=0):
        """x (B, T, C), rotary as in rotate_pairs; with a cache, T tokens that go on from it -> (B, T, C)."""
        B, T, C = x.shape
        qkv, mask = self.Wqkv(x).view(B, T, 3, self.n_head, -1), None  # (B, T, 3, nh, hd)
        q, k = rotate_pairs(qkv[:, :, :2] + self.qk_bias[:, 0].to(x.dtype), rotary).unbind(2)  # (B, T, nh, hd) each
        v = qkv[:, :, 2]
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))  # (B, nh, T, hd)
        if cache is not None:
            k, v, mask = cache.update(slot, k, v)  # (B, nh, S, hd) each: all tokens so far
        if x.device.type == "cpu" and x.dtype == torch.bfloat16 and T * k.shape[2] <= 128**2:
            # for short texts the backward pass of SDPA is three times slower than this one
            mask = torch.full((T, T), -torch.inf, dtype=x.dtype).triu(1) if mask is None else mask
            y = ((q * q.shape[-1] ** -0.5) @ k.mT + mask).softmax(dim=-1) @ v  # scores are (B, nh, T, S)
        else:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=cache is None)
        return self.proj(y.transpose(1, 2).reshape(B, T, C))


class GatedMLP(nn.Module):
    """proj(silu(gate) * up), with gate and up in one matrix. (..., C) -> (..., C)."""

    def __init__(self, config):
        super().__init__()
        self.fc = nn.Linear(config.n_embd, 2 * config.intermediate_size, bias=False)
        self.proj = nn.Linear(config.intermediate_size, config.n_embd, bias=False)

    def forward(self, x):
        gate, up = self.fc(x).chunk(2, dim=-1)
        return self.proj(F.silu(gate) * up)


class SandwichBlock(nn.Module):
    """Transformer block with norms before each part and on its sum with the residual."""

    def __init__(self, config):
        super().__init__()
        self.norm_1, self.norm_2, self.norm_3, self.norm_4 = (RMSNorm(config.n_embd) for _ in range(4))
        self.attn = CausalAttention(config)
        self.mlp = GatedMLP(config)

    def forward(self, x, rotary, cache=None, slot=0):
        """x (B, T, C) -> (B, T, C)"""
        x = self.norm_2(x + self.attn(self.norm_1(x), rotary, cache, slot))
        return self.norm_4(x + self.mlp(self.norm_3(x)))


def keeps(context, op, *args, **kwargs):
    """Selective checkpointing: whether to keep what op returns, a product of matrices or attention, of any backend."""
    return any(name in str(op) for name in ("mm", "attention", "attn", "lora_linear"))


def recomputed(part, *inputs, selective=False):
    """part(*inputs), computed again in the backward pass; selective: but for products of matrices and attention.

    Compiled code must not be selective: it writes over what would be kept.
    """
    if not selective:
        return checkpoint(part, *inputs, use_reentrant=False)
    torch.clear_autocast_cache()  # weights are cast here as they will be then: operations are told by their order
    contexts = partial(create_selective_checkpoint_contexts, keeps)
    return checkpoint(part, *inputs, use_reentrant=False, context_fn=contexts)


# ---- what is kept between tokens


class KVCache:
    """Keys and values of every (step, layer) in two tensors that are allocated once.

    A token's entries lie at its position, whatever the row's length, so rows of different lengths need no padding at
    the left and no shifting. With a `budget`, step i uses the slots of step i mod budget: a token then sees, of each
    earlier token, the last step that wrote there. Memory: 2 * slots * B * max_length * C numbers (`nbytes`).
    No gradient flows through it. `model.new_cache` makes one in the dtype that the model computes in.
    """

    def __init__(self, config, batch_size, max_length, num_steps, budget=-1, dtype=torch.float32, device="cpu"):
        self.steps = num_steps if budget == -1 else min(num_steps, budget)
        self.n_core = config.n_layers_in_recurrent_block
        self.n_ends = config.n_layers_in_prelude + config.n_layers_in_coda
        shape = (self.n_ends + self.steps * self.n_core, batch_size, config.n_head, max_length,
                 config.n_embd // config.n_head)
        # zeros, not empty: what is masked is multiplied by 0, and garbage may be nan
        self.k, self.v = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))  # (slots, B, nh, S_max, hd)
        self.length = 0  # tokens so far, of the longest row
        self.scores = None  # (B, S_max, branches) of a router, see modr.py
        self.active = None  # (B,) bool: rows that may be written to; None = all

    @property
    def nbytes(self):
        return self.k.nbytes + self.v.nbytes

    def slot(self, step, layer):
        """The slot of a core layer at a step from 0; those of the prelude and the coda come first."""
        return self.n_ends + step % self.steps * self.n_core + layer

    def begin(self, positions):
        """Announce the tokens of a forward pass by their positions (B, T); each attends to positions up to its own."""
        self.length = max(self.length, int(positions.max()) + 1)
        self.positions, self.rows = positions, torch.arange(len(positions), device=positions.device)[:, None]  # (B, 1)
        keys = torch.arange(self.length, device=positions.device)
        later = (keys > positions[..., None])[:, None]  # (B, 1, T, S)
        self.mask = torch.zeros_like(later, dtype=self.k.dtype).masked_fill_(later, -torch.inf)  # added to the scores

    def update(self, slot, k, v):
        """Store k, v (B, nh, T, hd) of the announced tokens -> all so far (B, nh, S, hd) each, and the mask."""
        for store, new in ((self.k[slot], k), (self.v[slot], v)):
            new = new.detach().transpose(1, 2)  # (B, T, nh, hd), as what is indexed below
            if self.active is not None:
                new = torch.where(self.active[:, None, None, None], new, store[self.rows, :, self.positions])
            store[self.rows, :, self.positions] = new
        return self.k[slot, :, :, : self.length], self.v[slot, :, :, : self.length], self.mask

    def fill(self, steps_done):
        """Later tokens may loop longer than these did: give them the latest entries. steps_done (B,) of the rows."""
        for store in (self.k, self.v):
            core = store[self.n_ends :].unflatten(0, (self.steps, self.n_core)).transpose(3, 4)
            ours = core[:, :, self.rows, self.positions]  # of core (steps, layers, B, S_max, nh, hd): S_max becomes T
            step = torch.arange(self.steps, device=steps_done.device)[:, None]
            latest = torch.where(step < steps_done, step, steps_done - 1).clamp(max=self.steps - 1)  # (steps, B)
            rows = torch.arange(len(steps_done), device=steps_done.device)
            core[:, :, self.rows, self.positions] = ours[latest, :, rows].movedim(2, 1)


class Exit:
    """Has a row's loop settled? Compared after every step, over the tokens of a forward pass (section 5.1).

    kl: KL(previous || present) of the last token's predictions; before the first step they are uniform.
    latent: |s - s_prev| / |s|, the mean over the row's tokens. argmax: steps in a row with the same likeliest token.
    """

    THRESHOLDS = {"kl": 5e-4, "latent": 0.03, "argmax": 5}

    def __init__(self, kind, threshold=-1):
        self.kind = kind
        self.threshold = self.THRESHOLDS[kind] if threshold == -1 else threshold
        self.before, self.value = None, None

    def settled(self, s_prev, s, logits, is_token):
        """s_prev, s (B, T, C), logits (B, V) of the last token (not for latent), is_token (B, T) bool -> (B,) bool.

        Leaves the measure itself, (B,) float32, in self.value.
        """
        if self.kind == "latent":
            change = (s - s_prev).float().norm(dim=-1) / s.float().norm(dim=-1)  # (B, T)
            self.value = (change * is_token).sum(dim=1) / is_token.sum(dim=1)
            return self.value < self.threshold
        if self.kind == "kl":
            now = logits.float().log_softmax(dim=-1)  # (B, V)
            before = torch.full_like(now, -math.log(now.shape[-1])) if self.before is None else self.before
            self.before, self.value = now, (before.exp() * (before - now)).sum(dim=-1)
            return self.value < self.threshold
        now = logits.argmax(dim=-1)  # (B,)
        same = torch.zeros_like(now) if self.before is None else (self.value.long() + 1) * (now == self.before)
        self.before, self.value = now, same.float()
        return self.value >= self.threshold


# ---- loss and choice of the next token


def mean_loss(logits, targets):
    """Cross entropy of logits (N, V), targets (N,), in float32; the mean where not IGNORE, 0 where there is none."""
    loss = F.cross_entropy(logits.float(), targets, ignore_index=IGNORE, reduction="sum")
    return loss / (targets != IGNORE).sum().clamp(min=1)


def sample(logits, temperature, top_k=-1, top_p=1.0, generator=None):
    """logits (B, V) -> the next token (B,) int64, among the top_k likeliest, within the top_p likeliest; 0 = greedy."""
    if temperature == 0:
        return logits.argmax(dim=-1)
    ordered, ids = logits.float().sort(dim=-1, descending=True)
    p = ((ordered - ordered[:, :1]) / max(temperature, 1e-30)).softmax(dim=-1)  # the largest is 0: nothing overflows
    p = p.masked_fill(p.cumsum(dim=-1) - p >= top_p, 0.0)  # the likeliest always stays
    if top_k != -1:
        p[:, top_k:] = 0.0
    return ids.gather(1, torch.multinomial(p, 1, generator=generator)).squeeze(1)


# ---- the model


class Huginn(nn.Module):
    bar = ("loss", "num_steps")  # metrics on train.py's progress bar
    rate = "tokens"  # the metric that the bar also counts per second
    unit = "steps"  # what stream counts for each token
    Carry = None  # nothing survives a training step

    def __init__(self, config):
        super().__init__()
        self.config, C = config, config.n_embd
        self.wte = nn.Embedding(config.vocab_size, C)  # also the head
        self.prelude = nn.ModuleList(SandwichBlock(config) for _ in range(config.n_layers_in_prelude))
        self.adapter = nn.Linear(2 * C, C, bias=False)
        self.core_block = nn.ModuleList(SandwichBlock(config) for _ in range(config.n_layers_in_recurrent_block))
        self.coda = nn.ModuleList(SandwichBlock(config) for _ in range(config.n_layers_in_coda))
        self.ln_f = RMSNorm(C)
        self.table = None
        self.init_weights()

    @torch.no_grad()
    def init_weights(self):
        """Truncated normal, std sqrt(2 / 5C); projections back to the residual are divided by sqrt(2 * depth)."""
        c = self.config
        std = math.sqrt(2 / (5 * c.n_embd))
        depth = c.n_layers_in_prelude + c.n_layers_in_coda + c.n_layers_in_recurrent_block * c.mean_recurrence
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                truncated_normal_(parameter, std / math.sqrt(2 * depth) if name.endswith("proj.weight") else std)

    # ---- the three parts

    def rotary(self, positions):
        """Rows of the rotary table (..., hd/2), which is not a buffer so that it stays float32 in a bfloat16 model."""
        if self.table is None or self.table.device != positions.device:
            c = self.config
            self.table = rotary_phases(c.block_size, c.n_embd // c.n_head, c.rope_base, positions.device)
        return self.table[positions]

    def read(self, tokens, rotary, cache=None):
        """tokens (B, T) -> e (B, T, C)"""
        x = math.sqrt(self.config.n_embd) * self.wte(tokens)
        kind = x.device.type
        if kind != "meta" and torch.is_autocast_enabled(kind):  # the state too is in the dtype that autocast takes
            x = x.to(torch.get_autocast_dtype(kind))
        for layer, block in enumerate(self.prelude):
            x = block(x, rotary, cache, layer)
        return x

    def route(self, s, e, cache=None, is_token=None, causal=False):
        """What every step of a forward pass is told beside the state; nothing here, but see modr.py."""

    def think(self, s, e, rotary, cache=None, step=0, route=None):
        """One step of the core: s, e (B, T, C) -> s. `step`, from 0, only matters to the cache."""
        x = self.adapter(torch.cat([s, e], dim=-1))
        for layer, block in enumerate(self.core_block):
            x = block(x, rotary, cache, cache.slot(step, layer) if cache else 0)
        return x

    def speak(self, s, rotary, cache=None):
        """s (B, T, C) -> hidden (B, T, C), which `head` turns into logits"""
        x = self.ln_f(s)
        for layer, block in enumerate(self.coda):
            x = block(x, rotary, cache, len(self.prelude) + layer)
        return self.ln_f(x)

    def head(self, hidden):
        """hidden (..., C) -> logits (..., V)"""
        return F.linear(hidden, self.wte.weight)

    def initial_state(self, e):
        """s_0 of the shape, dtype and device of e: truncated normal noise, std sqrt(2/5), from the global generator."""
        return truncated_normal_(torch.empty_like(e, dtype=torch.float32), math.sqrt(2 / 5)).to(e.dtype)

    def noise_table(self, length, seed):
        """An s_0 for every position (length, C) float32, which depends on seed and position only, not on the length."""
        generator = torch.Generator().manual_seed(seed)
        u = 2 * torch.rand(length, self.config.n_embd, generator=generator) - 1
        noise = math.sqrt(2) * torch.erfinv(u * math.erf(3 / math.sqrt(2)))  # a normal cut at 3, by its inverse
        return (math.sqrt(2 / 5) * noise).to(self.wte.weight.device)

    # ---- training

    def forward(self, tokens, targets=None, num_steps=None, state=None, cache=None, positions=None):
        """tokens (B, T) integer -> logits (B, T, V), loss (float32 scalar, or None without targets).

        targets: (B, T) integer, shifted already, IGNORE where not scored. The rest as in hidden_states.
        """
        logits = self.head(self.hidden_states(tokens, num_steps, state, cache, positions))
        return logits, None if targets is None else mean_loss(logits.flatten(0, 1), targets.flatten())

    def hidden_states(self, tokens, num_steps=None, state=None, cache=None, positions=None, is_token=None):
        """tokens (B, T) integer -> what `head` turns into logits (B, T, C).

        num_steps: how often to loop, or a pair (without, with) gradient; default: drawn in training, else
        mean_recurrence. state: s_0 (B, T, C); default: noise. cache: a KVCache that the tokens go on from; positions
        (B, T): where in the text the tokens are, default 0, 1, ... or on from the cache. is_token (B, T) bool: false
        for padding, at the right, which only `route` must know. Raises ValueError for texts that are longer than
        block_size.
        """
        start = 0 if cache is None else cache.length
        length = start + tokens.shape[1] if positions is None else int(positions.max()) + 1
        if length > self.config.block_size:
            raise ValueError(f"a text of {length} tokens: this model reads at most {self.config.block_size} "
                             "(block_size); give a shorter one")
        if positions is None:
            positions = torch.arange(start, length, device=tokens.device).expand(tokens.shape)
        if cache is not None:
            cache.begin(positions)
        rotary = self.rotary(positions)
        without, with_grad = self.split_steps(num_steps)
        e = self.read(tokens, rotary, cache)
        s = self.initial_state(e) if state is None else state.to(e.dtype)
        route = self.route(s, e, cache, is_token)
        with torch.no_grad():
            for step in range(without):
                s = self.think(s, e, rotary, cache, step, route)
        for step in range(without, without + with_grad):
            if self.config.checkpoint_core and torch.is_grad_enabled():
                inputs = (s, e, rotary, cache, step, route)
                s = recomputed(self.think, *inputs, selective=self.config.selective_checkpoint)
            else:
                s = self.think(s, e, rotary, cache, step, route)
        return self.speak(s, rotary, cache)

    def sample_num_steps(self):
        """(steps without gradient, steps with): a draw of section 3.3, the same on every rank."""
        c = self.config
        target = max(c.mean_recurrence, c.mean_backprop_depth)
        rate = torch.empty(1).log_normal_(math.log(target) - 1 / 8, 1 / 2)
        total = torch.poisson(rate) + 1
        if dist.is_available() and dist.is_initialized():
            device = "cuda" if dist.get_backend() == "nccl" else "cpu"
            total = total.to(device)
            dist.broadcast(total, 0)
        return self.split_steps(int(total))

    def split_steps(self, num_steps=None):
        """num_steps as in forward -> (steps without gradient, steps with)."""
        c = self.config
        if num_steps is None:
            if self.training and c.random_recurrence:
                return self.sample_num_steps()
            num_steps = c.mean_recurrence
        if not isinstance(num_steps, tuple):
            if num_steps < 1:
                raise ValueError(f"num_steps {num_steps}: give 1 or more, or a pair (without, with) gradient")
            num_steps = int(num_steps)
            num_steps = (max(num_steps - c.mean_backprop_depth, 0), min(num_steps, c.mean_backprop_depth))
        return num_steps

    def step(self, batch, carry=None):
        """Loss of a micro-batch: inputs, labels (B, T); the backward pass and the optimizer step are the caller's.

        Returns (loss, metrics, None). loss: the mean over labelled tokens. metrics: name -> (total, count), to be added
        up over steps and ranks and then divided; the count of "loss" is what the loss is a mean over.
        """
        inputs, labels = batch["inputs"], batch["labels"]
        steps, scored = self.split_steps(), labels != IGNORE  # (B, T); the head is only computed where it counts
        is_token = scored.flip(1).cumsum(dim=1).flip(1) > 0  # up to the row's last label
        loss = mean_loss(self.head(self.hidden_states(inputs, steps, is_token=is_token)[scored]), labels[scored])
        count = scored.sum()
        return loss, {"loss": (loss.detach() * count, count), "num_steps": (sum(steps), 1),
                      "tokens": (inputs.numel(), 1), "flops": (self.flops(inputs.shape, *steps), 1)}, None

    def finish_step(self, metrics):
        """Called once after each optimizer step with the step's metrics; returns more of them. Nothing here."""
        return {}

    def flops(self, shape, without, with_grad):
        """Estimated FLOPs of a training step on tokens (B, T) = shape: 2 per weight and token forward, 4 backward."""
        c, (B, T) = self.config, shape
        block = 4 * c.n_embd**2 + 3 * c.n_embd * c.intermediate_size + c.n_embd * T  # the last: causal attention
        core = 2 * c.n_embd**2 + c.n_layers_in_recurrent_block * block
        ends = (c.n_layers_in_prelude + c.n_layers_in_coda) * block + c.vocab_size * c.n_embd
        return 2 * B * T * (3 * (ends + with_grad * core) + without * core)

    def configure_optimizers(self, lr, weight_decay, betas):
        """[AdamW]; only matrices decay, among them the embedding, not gains and biases."""
        matrices, rest = ([p for p in self.parameters() if (p.ndim == 2) == is_matrix] for is_matrix in (True, False))
        groups = [dict(params=matrices, weight_decay=weight_decay), dict(params=rest, weight_decay=0.0)]
        return [torch.optim.AdamW(groups, lr=lr, betas=betas, eps=1e-8, fused=True)]

    def parts_to_compile(self):
        """The blocks: their code is shared by all steps, so the number of steps does not matter to the compiler."""
        return [*self.prelude, *self.core_block, *self.coda]

    def looped_parts(self):
        """Those of them that a forward pass goes through many times: FSDP need not gather them each time."""
        return list(self.core_block)

    # ---- inference

    def advance(self, tokens, positions, s, cache, num_steps, is_token, exit=None, min_steps=1):
        """Read tokens (B, T) at positions (B, T) from start states s (B, T, C), each row until its loop has settled.

        Prompts and single tokens take the same way. is_token (B, T) bool is false for padding, which is at the right.
        A row whose loop has settled (`exit`, an Exit) keeps its state and its cache entries whatever the others do;
        time is saved once all have.
        Returns logits (B, V) of each row's last token, its final state (B, C), and the steps used (B,).
        """
        cache.begin(positions)
        rotary, last = self.rotary(positions), is_token.sum(dim=1) - 1
        rows = torch.arange(len(tokens), device=tokens.device)
        e = self.read(tokens, rotary, cache)
        s, used, active = s.to(e.dtype), torch.zeros_like(last), torch.ones_like(last, dtype=torch.bool)
        route = self.route(s, e, cache, is_token)
        for step in range(num_steps):
            cache.active = active if exit else None
            new = self.think(s, e, rotary, cache, step, route)
            used += active
            if exit is None:
                s = new
                continue
            s_prev, s = s, torch.where(active[:, None, None], new, s)
            logits = None if exit.kind == "latent" else self.head(self.speak(s, rotary, cache)[rows, last])
            active = active & ~(exit.settled(s_prev, s, logits, is_token) & (used >= min_steps))
            if not active.any():
                break
        cache.active = None
        if exit:
            cache.fill(used)
        return self.head(self.speak(s, rotary, cache)[rows, last]), s[rows, last], used

    def new_cache(self, batch_size, length, num_steps, budget=-1, device=None):
        """A KVCache for texts of up to `length` tokens, or block_size, in the dtype that the model computes in."""
        device = device or self.wte.weight.device
        kind = self.wte.weight.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else self.wte.weight.dtype
        length = min(length, self.config.block_size)
        return KVCache(self.config, batch_size, length, num_steps, budget, dtype, device)

    def cache_size(self, length, num_steps=-1, max_new_tokens=200, cache_budget=-1, **_):
        """Bytes of the cache that stream takes for a prompt of `length` tokens; nothing is allocated."""
        num_steps = self.config.mean_recurrence if num_steps == -1 else num_steps
        return self.new_cache(1, length + max_new_tokens, num_steps, cache_budget, "meta").nbytes

    @torch.no_grad()
    def stream(self, prompts, stop=(), seed=0, **options):
        """Write on from prompts, a token of every row at a time. options: fields of GenerateConfig.

        prompts: a list of B lists of token ids, which may differ in length, or (B, T) integer. stop: ids that end a
        row.
        Yields (next ids (B,) int64, steps of the core that each took (B,)), on the CPU, until every row has met a stop
        id, max_new_tokens or block_size; a row that has ended is -1 from then on. Raises ValueError for prompts that
        are empty, not shorter than block_size or outside of the vocabulary, and for stop ids outside of it. With a
        temperature all rows draw from one generator.
        """
        o, device = GenerateConfig(**options), self.wte.weight.device
        lengths, tokens = self._padded(prompts, stop)
        num_steps = self.config.mean_recurrence if o.num_steps == -1 else o.num_steps
        cache = self.new_cache(len(lengths), int(lengths.max()) + o.max_new_tokens, num_steps, o.cache_budget, device)
        most = cache.k.shape[3]
        noise, generator = self.noise_table(most, seed), torch.Generator(device).manual_seed(seed)
        positions = torch.arange(tokens.shape[1], device=device).expand(tokens.shape)  # (B, T)
        s, is_token = noise[positions], positions < lengths[:, None]
        ended = torch.zeros_like(lengths, dtype=torch.bool)
        stop = torch.tensor(list(stop), dtype=torch.long, device=device)
        for i in range(o.max_new_tokens):
            # the prompt is read with all steps: that its last prediction has settled says little of what later tokens
            # will look up in it
            exit = Exit(o.exit, o.exit_threshold) if i and o.exit != "none" else None
            with torch.compiler.set_stance("force_eager"):  # or each slot of the cache would be compiled anew
                logits, last_s, used = self.advance(tokens, positions, s, cache, num_steps, is_token, exit, o.min_steps)
            ids = sample(logits, o.temperature, o.top_k, o.top_p, generator)
            yield ids.where(~ended, -1).cpu(), used.cpu()
            ended |= torch.isin(ids, stop) | (lengths >= most)
            if ended.all():
                return
            positions = lengths.clamp(max=most - 1)[:, None]  # (B, 1)
            tokens, lengths, is_token = ids[:, None], lengths + 1, torch.ones_like(positions, dtype=torch.bool)
            s = last_s[:, None] if o.warm_start else noise[positions]

    def generate(self, prompts, max_new_tokens, stop=(), seed=0, **options):
        """As stream, to the end -> a list of B lists of new token ids, each with the stop id that ended it, if any."""
        return self._write(prompts, max_new_tokens=max_new_tokens, stop=stop, seed=seed, **options)[0]

    def _write(self, prompts, **options):
        """As generate, and what it took: name -> (B,) float32; steps is the mean over the row's tokens."""
        ids, used = (torch.stack(part, dim=1) for part in zip(*self.stream(prompts, **options)))  # (B, new tokens) each
        written = ids >= 0
        return [row[row >= 0].tolist() for row in ids], {"steps": (used * written).sum(dim=1) / written.sum(dim=1)}

    def _padded(self, prompts, stop):
        """Prompts as in stream -> lengths (B,), tokens (B, T) padded at the right."""
        V, most = self.config.vocab_size, self.config.block_size
        rows = [torch.as_tensor(prompt, dtype=torch.long, device=self.wte.weight.device) for prompt in prompts]
        if not rows or any(row.ndim != 1 for row in rows):
            raise ValueError("prompts must be a list of lists of token ids, one for each text, as in [[72, 105]]")
        for row in rows:
            if not len(row):
                raise ValueError("an empty prompt: give at least one token")
            if len(row) >= most:
                raise ValueError(f"a prompt of {len(row)} tokens: this model has room for {most} (block_size), one of "
                                 f"them new; give up to {most - 1}")
            if row.min() < 0 or row.max() >= V:
                raise ValueError(f"token {int(row.max() if row.max() >= V else row.min())} in a prompt: this model has "
                                 f"the tokens 0 to {V - 1}; use the tokenizer it was trained with")
        for token in stop:
            if not 0 <= token < V:
                raise ValueError(f"stop token {token}: this model has the tokens 0 to {V - 1}")
        lengths = torch.tensor([len(row) for row in rows], device=self.wte.weight.device)
        return lengths, nn.utils.rnn.pad_sequence(rows, batch_first=True)

    @torch.no_grad()
    def evaluate(self, batches, depths=None, grade=None, **options):
        """Score rows after given numbers of steps (default [mean_recurrence]). batches: as for step.

        Returns depth -> name -> (N,) float tensor on the CPU, a value per row in order. loss: the mean over the row's
        labelled tokens. With `grade` and batches that hold prompt_lengths (B,), first of all exact_accuracy: the rows'
        first tokens are continued, by default greedily, options as in stream, and grade(labels (B, T), list of B lists
        of new ids) -> (B,) says which answers are right; an answer may be twice as long as the longest label. With an
        exit, also the mean steps of an answer's tokens.
        """
        depths = sorted(depths or [self.config.mean_recurrence])
        scores = {depth: {} for depth in depths}
        for batch in batches:
            losses = self._losses(batch, depths)
            for depth, named in scores.items():
                graded = {} if grade is None else self._graded(batch, depth, grade, options)
                for name, values in (graded | {"loss": losses[depth].cpu()}).items():
                    named.setdefault(name, []).append(values)
        return {depth: {name: torch.cat(parts) for name, parts in named.items()} for depth, named in scores.items()}

    def _graded(self, batch, depth, grade, options):
        """Answers of a batch at a depth: exact_accuracy (B,), with an exit steps (B,), and what else _write tells."""
        longest = int((batch["labels"] != IGNORE).sum(dim=1).max())
        limit = min(2 * longest, options.get("max_new_tokens", 2 * longest))
        prompts = [row[:n] for row, n in zip(batch["inputs"], batch["prompt_lengths"].tolist())]
        answers, took = self._write(prompts, **options | {"num_steps": depth, "max_new_tokens": limit})
        if options.get("exit", "none") == "none":
            del took["steps"]
        return {"exact_accuracy": grade(batch["labels"].cpu(), answers)} | took

    def _losses(self, batch, depths):
        """depth -> loss of each row (B,), from one loop through all depths."""
        positions = torch.arange(batch["inputs"].shape[1], device=batch["inputs"].device)
        rotary, labels, losses = self.rotary(positions), batch["labels"], {}
        scored = labels != IGNORE
        row = scored.nonzero()[:, 0]  # of each scored token
        e = self.read(batch["inputs"], rotary)
        s = self.noise_table(len(positions), 0).to(e.dtype).expand_as(e)
        route = self.route(s, e, causal=True)
        for step in range(depths[-1]):
            s = self.think(s, e, rotary, route=route)
            if step + 1 in depths:
                logits = self.head(self.speak(s, rotary)[scored]).float()  # (scored tokens, V)
                loss = F.cross_entropy(logits, labels[scored], reduction="none")
                total = torch.zeros(len(labels), device=labels.device).index_add_(0, row, loss)  # (B,)
                losses[step + 1] = total / scored.sum(dim=1).clamp(min=1)
        return losses

    # ---- checkpoints

    @staticmethod
    def pretrained_config(path):
        """HuginnConfig fields, as a dict, of a Hugging Face folder or of a checkpoint of train.py's."""
        return _folder_config(path) if os.path.isdir(path) else read_run(path, huginn=HuginnConfig)["model_config"]

    @classmethod
    def load_pretrained(cls, path, dtype=torch.float32, **overrides):
        """The model of a Hugging Face copy of huginn-0125, or of a checkpoint of train.py's, in evaluation mode.

        path: a folder with config.json and .safetensors files, one or many, or a checkpoint file. dtype: of the
        weights. overrides: HuginnConfig fields. The embedding may be stored once or twice; the rotary table is ignored,
        it is computed here. Raises ValueError, one line, for what is no such checkpoint or does not fit.
        """
        config = cls.pretrained_config(path) | overrides
        with torch.device("meta"):  # no memory until the weights arrive
            model = cls(HuginnConfig(**config)).to(dtype)
        if os.path.isdir(path):
            model.to_empty(device="cpu").fill(path)
        else:
            state = plain_names(run_weights(path, huginn=HuginnConfig), path)
            check_shapes(path, *({k: tuple(v.shape) for k, v in s.items()} for s in (state, model.state_dict())))
            for name in state:
                state[name] = state[name].to(dtype)  # one at a time: never two copies of the whole
            model.load_state_dict(state, assign=True)
        return model.eval()

    @torch.no_grad()
    def fill(self, folder):
        """Read the weights of a Hugging Face copy of huginn-0125 into this model's.

        Of a model that FSDP has sharded, each process reads what it holds and no more. Raises ValueError, one line, for
        a folder that does not fit.
        """
        shapes, params = folder_shapes(folder), dict(self.named_parameters())
        names = {name: plain_name(name) for name in shapes if plain_name(name) not in NOT_WEIGHTS}
        head = next((name for name, plain in names.items() if plain == "lm_head.weight"), None)
        second = None
        if head and "wte.weight" in names.values():  # the embedding's second copy
            second = params["lm_head.weight"] = torch.empty_like(self.wte.weight)
        elif head:
            names[head] = "wte.weight"
        check_shapes(folder, {plain: shapes[name] for name, plain in names.items()},
                     {plain: tuple(parameter.shape) for plain, parameter in params.items()})
        read_folder(folder, {name: params[plain].detach() for name, plain in names.items()})
        if second is not None and not torch.equal(held(second), held(self.wte.weight)):
            raise ValueError(UNTIED.format(folder))


# ---- reading checkpoints


NOT_WEIGHTS = ("freqs_cis", "n_averaged")  # the rotary table, which is computed here; how often was averaged
UNTIED = ("{}: lm_head.weight differs from wte.weight, but this model ties them; give a checkpoint with tied "
          "embeddings")


def plain_name(key):
    """A weight's name in this file's spelling: without wrappers' prefixes."""
    while key.startswith(("_orig_mod.", "module.", "model.", "transformer.")):
        key = key.split(".", 1)[1]
    return key


def plain_names(state, path):
    """A state dict in this file's names: without prefixes, rotary table and second copy of the embedding."""
    plain = {plain_name(key): value for key, value in state.items() if plain_name(key) not in NOT_WEIGHTS}
    head = plain.pop("lm_head.weight", None)
    if head is not None and not torch.equal(plain.setdefault("wte.weight", head), head):
        raise ValueError(UNTIED.format(path))
    return plain


def _folder_config(folder):
    """HuginnConfig fields of a Hugging Face config.json."""
    path, theirs = os.path.join(folder, "config.json"), read_config(folder)
    fields = {name: theirs.get("n_heads" if name == "n_head" else name) for name in HuginnConfig.__dataclass_fields__}
    missing = [name for name in ("n_embd", "n_head", "n_layers_in_recurrent_block") if fields[name] is None]
    if missing:
        raise ValueError(f"{path}: has no {missing[0]}, so it is no Huginn; give a copy of huginn-0125")
    for name, ours in dict(tie_embeddings=True, qk_bias=True, bias=False).items():
        if theirs.get(name, ours) != ours:
            raise ValueError(f"{path}: {name} is {theirs[name]}; this model is built with {name} {ours} only")
    fields["vocab_size"] = theirs.get("padded_vocab_size") or fields["vocab_size"]
    return {name: value for name, value in fields.items() if value is not None}


PRESETS = {  # parameters; train.py has the recipe that goes with each
    "nano": HuginnConfig(vocab_size=257, block_size=128, n_embd=128, n_head=4, intermediate_size=384,
                         n_layers_in_prelude=1, n_layers_in_recurrent_block=1, n_layers_in_coda=1,
                         mean_recurrence=6, mean_backprop_depth=3),
    "small": HuginnConfig(block_size=1024, n_embd=768, n_head=12, intermediate_size=2048),
    "paper": HuginnConfig(),
}
