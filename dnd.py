"""DND, dynamic nested depth: a Qwen3 in which some layers send the tokens that need it through themselves once more.

"DND: Boosting Large Language Models with Dynamic Nested Depth", Chen et al. 2025, https://arxiv.org/abs/2510.11001.
In the layers nested_first .. nested_last of a trained Qwen3, dense or MoE, each with its own weights,

    x_v  = layer(x)                                     as ever, all tokens
    p    = sigmoid(router x_v)                          a score per token; router starts at 0, so p at 1/2
    x_d  = layer(x_v[p > tau])                          those tokens alone, as a short text of their own
    x    = beta p x_d + (1 - beta p) x_v  if p > tau,  x_v  if not          beta is learned

Each token is chosen by its own score, and the chosen ones see only those before them, so nothing leaks from the
future. All of it is trained, with

    loss = CE + lambda_sd L_sd + lambda_dp L_dp
    L_sd = -sum q log q,  q = p / sum p of a text       score dispersion: minimised, so scores spread
    L_dp = mean (p - 1/2)^2                             distribution preservation: where the sigmoid responds

while tau, a number per nested layer, follows the share of the tokens that it lets pass, and is fixed after training:

    tau += alpha (ratio - k_target) n                   after every optimizer step
    tau  = (1 - gamma) tau + gamma tau_bar              after every sync_interval of them

with n the step's tokens over the mean of the last sync_interval steps, and tau_bar the mean, over those, of the highest
score that is not among the k_target highest, steps weighing by their tokens.
At the start all scores are equal and nothing passes. The first update puts tau below 1/2, everything passes, CE tells
the router who gained by it, and scores part.

Shapes: B rows, T tokens, C = n_embd, nh = n_head, G = n_kv_head, hd = head_dim, V = vocab_size, E = num_experts, L
nested layers, k selected tokens of all rows together.

    model = DND.load_pretrained("Qwen3-1.7B", nested_first=4, nested_last=23)   # a Hugging Face folder
    logits, loss = model(tokens, targets)               # (B, T, V), CE; targets are the tokens shifted by one
    model(tokens, depth=1)                              # the plain Qwen3: nobody passes twice
    model(tokens, trace=(trace := []))                  # also who was selected, and p, of each nested layer
    model.generate([[72, 105]], max_new_tokens=20, temperature=0.0)

The authors' code is not out. What the paper leaves open is settled as follows. Router (no bias: tau is one), beta and
tau are one per nested layer; scores and tau are float32. L_sd is a mean over texts, L_dp over tokens, both over nested
layers; padding counts nowhere. The published text can be read as if L_sd were maximised, which makes all scores equal.
With micro-batches or ranks, ratio is that of all their tokens, tau_bar the mean of theirs, and L_sd and L_dp weigh, as
CE does, by labelled tokens. Tokens of the short text are at 0, 1, ... (`nested_positions`). Experts get no balancing
loss.

The constants are ours, from nano on arithmetic. What counts is the share selected, by layer, on 500 new texts with tau
fixed: in 1,000 steps after 2,000 plain ones 0.175 to 0.214 (three seeds, README). In 500 steps, seed 0:

    as they are                          0.195 to 0.222
    both lambdas 3e-3                    0.194 to 0.237
    alpha 0.03                           0.199 to 0.238     tau follows single steps' texts
    router_lr 1                          0.036 to 0.052     scores are near 0 but for a few; no threshold holds those

Accuracy differed by no more than chance. Averaged weights (--ema) do not fit tau, which follows the trained ones: 0.128
instead of 0.226 in one layer. lambda_dp below 2 lambda_sd lets scores spread from 1/2 by themselves; CE spreads them in
any case, and without both losses the share held as well.

In bfloat16 a score near tau may fall on either side of it, as a batch or the cache rounds otherwise.
"""

import os
import re
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from data.weights import check_shapes, folder_shapes, held, read_config, read_folder, read_run, run_weights
from kernels import pack, unpack_fuse

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:
    varlen_attn = None

IGNORE = -100  # the target of a token that is not scored


@dataclass
class Qwen3Config:
    # what goes in and out; train.py takes these from the data
    vocab_size: int = 151936  # tokens, padded as the checkpoint has it
    block_size: int = 40960  # longest text, in tokens
    # size; the defaults are Qwen3-1.7B's
    n_embd: int = 2048  # width C
    n_layer: int = 28  # transformer layers
    n_head: int = 16  # heads of queries
    n_kv_head: int = 8  # heads of keys and values, each shared by n_head / n_kv_head heads of queries
    head_dim: int = 128  # size of a head, whatever n_embd is
    intermediate_size: int = 6144  # width of the gated MLP
    rope_base: float = 1e6  # base of the rotary frequencies
    rms_norm_eps: float = 1e-6  # added to the mean square
    tie_embeddings: bool = True  # the head is the embedding matrix
    # mixture of experts
    num_experts: int = 0  # gated MLPs to choose from in a layer; 0 = one MLP for all tokens
    num_experts_per_tok: int = 8  # experts that a token goes through
    moe_intermediate_size: int = 768  # width of an expert
    norm_topk_prob: bool = True  # the weights of a token's experts sum to 1
    decoder_sparse_step: int = 1  # every so many layers one has experts, the others an MLP
    mlp_only_layers: str = ""  # layers that have an MLP all the same, as "0,3"
    # memory
    checkpoint_layers: bool = False  # recompute every layer in the backward pass: less memory, more time
    selective_checkpoint: bool = False  # with it, keep products of matrices and attention: cheaper, saves less

    nested = range(0)  # the layers that have a nested pass
    limits = dict(rope_base=(1, 1e12), rms_norm_eps=(0, 1), num_experts=(0, 2**16))

    def __post_init__(self):
        for name, field in self.__dataclass_fields__.items():
            value, (least, most) = getattr(self, name), self.limits.get(name, (1, 2**31))
            if field.type in (int, float) and not (isinstance(value, (int, field.type)) and least <= value <= most):
                kind = "whole number" if field.type is int else "number"
                raise ValueError(f"{name} {value!r}: give a {kind} from {least:,} to {most:,}")
        if self.selective_checkpoint and not self.checkpoint_layers:
            raise ValueError("selective_checkpoint says what checkpoint_layers recomputes; give checkpoint_layers too")
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim}: rotary turns pairs of features; give an even number")
        if self.n_head % self.n_kv_head:
            raise ValueError(f"n_head {self.n_head} with n_kv_head {self.n_kv_head}: each head of keys serves as many "
                             "heads of queries; make n_head a multiple")
        if self.num_experts and self.num_experts_per_tok > self.num_experts:
            raise ValueError(f"num_experts_per_tok {self.num_experts_per_tok}: give 1 to num_experts, "
                             f"{self.num_experts}")
        if not re.fullmatch(r"(\d+(,\d+)*)?", self.mlp_only_layers):
            raise ValueError(f"mlp_only_layers {self.mlp_only_layers!r}: give layers as 0,3 or nothing")

    def has_experts(self, layer):
        """Whether a layer, from 0, has experts rather than an MLP."""
        return (self.num_experts > 0 and (layer + 1) % self.decoder_sparse_step == 0
                and str(layer) not in self.mlp_only_layers.split(","))


@dataclass
class DNDConfig(Qwen3Config):
    # nested passes
    nested_first: int = -1  # first layer that may take a token twice; -1 = none: the plain Qwen3
    nested_last: int = -1  # last one
    nested_positions: Literal["compact", "original"] = "compact"  # rotary positions in it: 0, 1, ... or the text's
    k_target: float = 0.2  # share of the tokens to select
    beta_init: float = 0.1  # where beta starts
    tau_init: float = 0.5  # where tau starts; with alpha 0 give less than the 1/2 that all scores start at
    # what holds the selection; see the top of dnd.py
    router_lr: float = 0.1  # learning rate of the routers, as a share of that of all else
    lambda_sd: float = 1e-3  # weight of L_sd, which spreads the scores
    lambda_dp: float = 1e-3  # weight of L_dp, which draws them to 1/2
    lambda_z: float = 0.0  # weight of the mean square of the score before its sigmoid, another way to bound it
    alpha: float = 0.003  # how fast tau follows the share selected; 0 = not at all
    gamma: float = 0.1  # how far tau is drawn to the scores' own quantile; 0 = not at all
    sync_interval: int = 50  # steps between two times that it is

    limits = Qwen3Config.limits | dict(
        nested_first=(-1, 2**16), nested_last=(-1, 2**16), k_target=(0, 1), beta_init=(-10, 10), tau_init=(-1, 2),
        sync_interval=(1, 10**5), lambda_sd=(0, 1e6), lambda_dp=(0, 1e6), lambda_z=(0, 1e6), router_lr=(0, 1e3),
        alpha=(0, 1), gamma=(0, 1))

    def __post_init__(self):
        super().__post_init__()
        if self.nested_positions not in ("compact", "original"):
            raise ValueError(f"nested_positions {self.nested_positions!r}: choose compact or original")
        first, last = self.nested_first, self.nested_last
        if (first, last) != (-1, -1) and not 0 <= first <= last < self.n_layer:
            raise ValueError(f"nested_first {first}, nested_last {last}: give the first and the last of the layers 0 "
                             f"to {self.n_layer - 1}, or -1 for both")

    @property
    def nested(self):
        """The layers that have a nested pass."""
        off = self.nested_first == self.nested_last == -1
        return range(0) if off else range(self.nested_first, self.nested_last + 1)


@dataclass
class NestedGenerateConfig:
    # how to write text, and how to answer in evaluation
    depth: int = 2  # passes of a selected token; 1 = as the plain Qwen3; evaluation takes --depths instead
    max_new_tokens: int = 200  # tokens to write, at most
    temperature: float = 0.0  # of the next token's distribution; 0 = always the likeliest token
    top_k: int = -1  # choose among the k likeliest tokens; -1 = all
    top_p: float = 1.0  # choose among the likeliest tokens that together have this probability

    def __post_init__(self):
        check_depth(self.depth)
        limits = dict(top_k=(1, 2**31), max_new_tokens=(1, 2**31), temperature=(0, 1e9), top_p=(1e-9, 1))
        for name, (least, most) in limits.items():
            off = getattr(self, name) == -1 and name == "top_k"
            if not (off or least <= getattr(self, name) <= most):  # nan too
                raise ValueError(f"{name} {getattr(self, name)}: give {least} to {most:g}")


def check_depth(depth):
    if depth not in (1, 2):
        raise ValueError(f"depth {depth}: a token passes a layer once or twice; choose 1 (the plain Qwen3) or 2 (DND)")


# ---- blocks


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last axis, in float32. (..., C) -> (..., C) in x's dtype."""

    def __init__(self, width, eps=1e-6):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(x.dtype)


def rotary_waves(n_positions, head_dim, base, device=None):
    """cos and sin of position * frequency, (n_positions, 2, hd/2) float32. Feature i is paired with i + hd/2."""
    freq = 1 / base ** (torch.arange(0, head_dim, 2, device=device).float() / head_dim)
    angle = torch.outer(torch.arange(n_positions, device=device).float(), freq)
    return torch.stack([angle.cos(), angle.sin()], dim=1)


def rotate_halves(x, rotary):
    """Rotate the feature pairs of x (..., heads, hd) by rotary (..., 2, hd/2), in float32."""
    cos, sin = rotary.unsqueeze(-3).unbind(-2)  # (..., 1, hd/2) each
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


def causal_mask(positions, n_keys, dtype):
    """What is added to scores so that queries at positions (B, T) see keys 0 to their own -> (B, 1, T, n_keys)."""
    hidden = (torch.arange(n_keys, device=positions.device) > positions[..., None])[:, None]
    return torch.zeros_like(hidden, dtype=dtype).masked_fill_(hidden, -torch.inf)


def causal_attention(q, k, v, mask=None):
    """q (B, T, nh, hd), k, v (B, S, G, hd) -> (B, T, nh, hd). mask: see causal_mask; None, with S = T: in order."""
    (B, T, nh, hd), (S, G) = q.shape, k.shape[1:3]
    q, k, v = (part.transpose(1, 2) for part in (q, k, v))  # (B, nh or G, T or S, hd)
    if q.device.type == "cpu" and T * S <= {torch.bfloat16: 128, torch.float32: 64}.get(q.dtype, 0) ** 2:
        # SDPA is slower for short texts: forward and backward in bfloat16 3 to 8 times, in float32 up to 1.4 times
        more = -S % (32 if q.dtype == torch.bfloat16 else 16)  # hidden keys: softmax likes multiples, 4 times faster
        k, v = F.pad(k, (0, 0, 0, more)), F.pad(v, (0, 0, 0, more))
        if mask is None:
            mask = torch.full((T, S + more), -torch.inf, dtype=q.dtype).triu(1)
        else:
            mask = F.pad(mask, (0, more), value=-torch.inf)[:, :, None]
        q = (q * hd**-0.5).reshape(B, G, nh // G * T, hd)  # heads that share keys become more queries
        scores = (q @ k.mT).view(B, G, nh // G, T, S + more) + mask
        y = (scores.softmax(dim=-1).view(B, G, nh // G * T, S + more) @ v).view(B, nh, T, hd)
    else:
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=G != nh)
    return y.transpose(1, 2)


class GroupedAttention(nn.Module):
    """Queries, keys and values; who sees whom is up to `attend`. Heads are normed before they are rotated."""

    def __init__(self, config):
        super().__init__()
        C, self.head_dim = config.n_embd, config.head_dim
        self.q_proj = nn.Linear(C, config.n_head * self.head_dim, bias=False)
        self.k_proj = nn.Linear(C, config.n_kv_head * self.head_dim, bias=False)
        self.v_proj = nn.Linear(C, config.n_kv_head * self.head_dim, bias=False)
        self.o_proj = nn.Linear(config.n_head * self.head_dim, C, bias=False)
        self.q_norm, self.k_norm = (RMSNorm(self.head_dim, config.rms_norm_eps) for _ in range(2))

    def forward(self, x, rotary, attend):
        """x (..., C), rotary (..., 2, hd/2) of its tokens -> (..., C)."""
        heads = (-1, self.head_dim)
        q = rotate_halves(self.q_norm(self.q_proj(x).unflatten(-1, heads)), rotary)  # (..., nh, hd)
        k = rotate_halves(self.k_norm(self.k_proj(x).unflatten(-1, heads)), rotary)  # (..., G, hd)
        return self.o_proj(attend(q, k, self.v_proj(x).unflatten(-1, heads)).flatten(-2))


class SplitGatedMLP(nn.Module):
    """down(silu(gate) * up). (..., C) -> (..., C)."""

    def __init__(self, config):
        super().__init__()
        self.gate_proj = nn.Linear(config.n_embd, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.n_embd, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.n_embd, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Experts(nn.Module):
    """Each token goes through the num_experts_per_tok gated MLPs that `gate` likes best. (..., C) -> (..., C).

    Tokens are sorted by expert, so that one grouped product serves all experts, those without tokens too.
    """

    def __init__(self, config):
        super().__init__()
        C, width, self.config = config.n_embd, config.moe_intermediate_size, config
        self.gate = nn.Linear(C, config.num_experts, bias=False)
        self.gate_up_proj = nn.Parameter(torch.empty(config.num_experts, 2 * width, C))
        self.down_proj = nn.Parameter(torch.empty(config.num_experts, C, width))

    def choose(self, x):
        """x (..., C) -> weights (..., k) float32, experts (..., k) int64, with k = num_experts_per_tok."""
        weight, expert = self.gate(x).float().softmax(dim=-1).topk(self.config.num_experts_per_tok, dim=-1)
        return weight / weight.sum(dim=-1, keepdim=True) if self.config.norm_topk_prob else weight, expert

    def forward(self, x):
        weight, expert = self.choose(x)
        k = expert.shape[-1]
        sorted_expert, order = expert.flatten().sort(stable=True)  # (tokens * k,): pairs of token and expert
        every = torch.arange(self.config.num_experts, device=x.device)
        ends = torch.searchsorted(sorted_expert, every, right=True).int()  # (E,): where each expert's pairs end
        rows = x.flatten(0, -2)[order // k]  # (tokens * k, C)
        gate, up = F.grouped_mm(rows, self.gate_up_proj.to(x.dtype).mT, offs=ends).chunk(2, dim=-1)
        rows = F.grouped_mm(F.silu(gate) * up, self.down_proj.to(x.dtype).mT, offs=ends)
        back = torch.empty_like(order).index_copy_(0, order, torch.arange(len(order), device=order.device))
        return (rows[back].view(*weight.shape, x.shape[-1]) * weight[..., None].to(x.dtype)).sum(dim=-2)


class Layer(nn.Module):
    """Transformer layer with a norm before each part."""

    def __init__(self, config, index):
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = (
            RMSNorm(config.n_embd, config.rms_norm_eps) for _ in range(2))
        self.self_attn = GroupedAttention(config)
        self.mlp = Experts(config) if config.has_experts(index) else SplitGatedMLP(config)

    def forward(self, x, rotary, attend=causal_attention):
        """x (..., C), rotary (..., 2, hd/2) -> (..., C): texts (B, T, C), or packed rows (k, C) with their `attend`."""
        x = x + self.self_attn(self.input_layernorm(x), rotary, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


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


# ---- the nested pass: what DND adds


class Packed:
    """Tokens selected from several texts, one text after another: where each is among those of its own.

    cu_seqlens (B + 1,) int32 says where each text's begin. before (B,): how many a cache holds of each already.
    """

    def __init__(self, n_rows, cu_seqlens, before=None):
        lengths = cu_seqlens.diff()  # (B,)
        before = torch.zeros_like(lengths) if before is None else before
        self.cu_seqlens, self.lengths = cu_seqlens, lengths
        self.row = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths,
                                           output_size=n_rows)  # (k,) the text of each
        self.index = torch.arange(n_rows, device=lengths.device) - cu_seqlens[self.row]  # (k,) among the new ones
        self.place = self.index + before[self.row]  # (k,) among all
        self.max_seqlen, self.longest = torch.stack([lengths.max(), (lengths + before).max()]).tolist()

    @classmethod
    def at(cls, positions):
        """All tokens of rows (B, T), each of which begins with a text; those at position 0 begin one."""
        begins = (positions.flatten() == 0).nonzero()[:, 0]
        return cls(positions.numel(), F.pad(begins, (0, 1), value=positions.numel()).int())

    def pad(self, x):
        """x (k, ...) -> (B, max_seqlen, ...), zeros where a text has fewer."""
        padded = x.new_zeros(len(self.lengths), self.max_seqlen, *x.shape[1:])
        return padded.index_put((self.row, self.index), x)

    def attend(self, q, k, v):
        """Each row sees those of its text up to itself. q (k, nh, hd), k, v (k, G, hd) -> (k, nh, hd)."""
        if q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) and varlen_attn is not None and len(q):
            ends, most = self.cu_seqlens, self.max_seqlen
            return varlen_attn(q, k, v, ends, ends, most, most, window_size=(-1, 0), enable_gqa=True)
        # padding is at the right, where nobody but padding looks
        return causal_attention(self.pad(q), self.pad(k), self.pad(v))[self.row, self.index]

    def attend_rows(self, q, k, v):
        """The same for all tokens of rows that hold several texts. q (B, T, nh, hd), k, v (B, T, G, hd) -> as q."""
        return self.attend(*(part.flatten(0, 1) for part in (q, k, v))).view_as(q)


class Nesting(nn.Module):
    """Routers, blend weights and thresholds of the nested layers, and what holds the thresholds."""

    def __init__(self, config):
        super().__init__()
        n, self.config = len(config.nested), config
        self.router = nn.Parameter(torch.empty(n, config.n_embd))
        self.beta = nn.Parameter(torch.empty(n))
        self.register_buffer("tau", torch.empty(n))
        self.register_buffer("boundaries", torch.empty(config.sync_interval, n))  # of the last steps, times tokens
        self.register_buffer("tokens", torch.empty(config.sync_interval))  # of the last steps, in turn
        self.register_buffer("steps", torch.empty((), dtype=torch.int64))  # optimizer steps so far
        self.init_weights()

    @torch.no_grad()
    def init_weights(self):
        """Start values: all scores are equal."""
        self.beta.fill_(self.config.beta_init)
        self.tau.fill_(self.config.tau_init)
        for tensor in (self.router, self.boundaries, self.tokens, self.steps):
            tensor.zero_()

    def _apply(self, fn, recurse=True):
        """To another device or dtype; but what moves in small steps stays float32: in bfloat16 0.5 + 0.001 is 0.5."""
        kept = {name: getattr(self, name) for name in ("tau", "boundaries", "tokens")}
        super()._apply(fn, recurse)
        for name, value in kept.items():
            new = getattr(self, name)
            setattr(self, name, new.float() if value.is_meta else value.to(new.device))
        return self

    def select(self, j, x_v, is_token=None):
        """Scores of the j-th nested layer, p (B, T) float32 in (0, 1), and which tokens pass, (B, T) bool.

        is_token (B, T) bool is false for padding, which never passes.
        """
        with torch.autocast(x_v.device.type, enabled=False):  # in float32: what decides is small differences
            p = (x_v.float() @ self.router[j].float()).sigmoid()
        selected = p > self.tau[j]
        return p, selected if is_token is None else selected & is_token

    def losses(self, trace, is_token, texts=None):
        """The weighted sum of L_sd, L_dp and L_z, each the mean over nested layers, and metrics of each layer.

        trace: [(selected, p)] as forward leaves it. texts: a Packed of all, default a text per row. L_sd is the mean
        over texts of their entropies, the others are means over tokens.
        """
        c, weight = self.config, is_token.float()  # (B, T)
        selected, p = (torch.stack(part) for part in zip(*trace))  # (L, B, T) each
        n = weight.sum()

        def per_text(values):  # (..., B, T) -> (..., number of texts): sums over tokens
            if texts is None:
                return (values * weight).sum(dim=-1)
            sums = values.new_zeros(*values.shape[:-2], len(texts.lengths))
            return sums.index_add(-1, texts.row, (values * weight).flatten(-2))

        total, has_tokens = per_text(p).clamp(min=1e-30), (per_text(weight) > 0).float()
        entropy = total.log() - per_text(p * p.clamp(min=1e-30).log()) / total  # (L, number of texts)
        L_sd = (entropy * has_tokens).sum(dim=-1) / has_tokens.sum().clamp(min=1)  # (L,)
        L_dp, L_z = ((part**2 * weight).sum(dim=(1, 2)) / n.clamp(min=1) for part in (p - 0.5, p.logit(eps=1e-6)))
        loss = (c.lambda_sd * L_sd + c.lambda_dp * L_dp + c.lambda_z * L_z).mean()
        counts, boundary = selected.sum(dim=(1, 2)), self.boundary(p.detach(), is_token)  # (L,) each
        metrics = {"ratio": (counts.sum(), n * len(counts))}
        for layer, count, score in zip(c.nested, counts, boundary):
            metrics |= {f"ratio_{layer}": (count, n), f"boundary_{layer}": (score * n, n)}
        return loss, metrics

    def boundary(self, p, is_token):
        """The highest score below the k_target highest, p (L, B, T) -> (L,); 0 where all are among them."""
        scores = F.pad(p.masked_fill(~is_token, 0).flatten(1).sort(dim=1, descending=True).values, (0, 1))
        k = (self.config.k_target * is_token.sum()).round().long()
        return scores.index_select(1, k.view(1)).squeeze(1)

    @torch.no_grad()
    def move_tau(self, metrics):
        """Once per optimizer step, by its metrics: those of `losses`, added up over micro-batches, here over ranks."""
        c, names = self.config, [(f"ratio_{layer}", f"boundary_{layer}") for layer in self.config.nested]
        sums = torch.stack([torch.stack([metrics[ratio][0], metrics[score][0], metrics[score][1]]).float()
                            for ratio, score in names])  # (L, 3): selected, boundary * tokens, tokens
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(sums)
        counts, scores, n = sums.unbind(dim=1)
        place = self.steps % c.sync_interval
        self.boundaries[place], self.tokens[place] = scores, n[0]
        self.steps += 1
        total = self.tokens.sum().clamp(min=1)
        self.tau += c.alpha * (counts - c.k_target * n) / total * self.steps.clamp(max=c.sync_interval)
        self.tau.lerp_(self.boundaries.sum(dim=0) / total, c.gamma * (self.steps % c.sync_interval == 0))


# ---- what is kept between tokens


class NestedKVCache:
    """Keys and values of every layer, and of every nested pass those of the tokens that were selected.

    A token's entries lie at its position, whatever the row's length, so rows of different lengths need no padding at
    the left and no shifting; in a nested pass they lie at its place among the selected, and there is room for as many
    as came so far. No gradient flows through it. `model.new_cache` makes one in the dtype that the model computes in.
    """

    def __init__(self, config, batch_size, max_length, dtype=torch.float32, device="cpu"):
        heads, n = (config.n_kv_head, config.head_dim), len(config.nested)
        # zeros, not empty: what is masked is multiplied by 0, and garbage may be nan
        self.kv = torch.zeros(2, config.n_layer, batch_size, max_length, *heads, dtype=dtype, device=device)
        self.nested = [torch.zeros(2, batch_size, 0, *heads, dtype=dtype, device=device) for _ in range(n)]
        self.counts = torch.zeros(n, batch_size, dtype=torch.int64, device=device)  # tokens selected so far
        self.length = 0  # tokens so far, of the longest row

    @property
    def nbytes(self):
        return self.kv.nbytes + sum(kv.nbytes for kv in self.nested)

    def begin(self, positions):
        """Announce the tokens of a forward pass by their positions (B, T); each attends to positions up to its own."""
        self.length = max(self.length, int(positions.max()) + 1)
        self.positions, self.rows = positions, torch.arange(len(positions), device=positions.device)[:, None]  # (B, 1)
        self.mask = causal_mask(positions, self.length, self.kv.dtype)

    def attend(self, layer, q, k, v):
        """Store k, v (B, T, G, hd) of the announced tokens; q (B, T, nh, hd) sees all so far -> (B, T, nh, hd)."""
        for store, new in zip(self.kv[:, layer], (k, v)):
            store[self.rows, self.positions] = new.detach()
        return causal_attention(q, *self.kv[:, layer, :, : self.length], self.mask)

    def attend_nested(self, j, packed, q, k, v):
        """The same among the tokens selected in the j-th nested layer, as Packed.attend. -> (k, nh, hd)"""
        room = self.nested[j].shape[2]
        if packed.longest > room:
            self.nested[j] = F.pad(self.nested[j], (0, 0, 0, 0, 0, packed.longest * 5 // 4 - room))
        for store, new in zip(self.nested[j], (k, v)):
            store[packed.row, packed.place] = new.detach()
        self.counts[j] += packed.lengths
        keys, values = self.nested[j][:, :, : packed.longest]
        mask = causal_mask(packed.pad(packed.place), packed.longest, keys.dtype)
        return causal_attention(packed.pad(q), keys, values, mask)[packed.row, packed.index]


# ---- loss and choice of the next token


def mean_loss(logits, targets):
    """Cross entropy of logits (N, V), targets (N,), in float32; the mean where not IGNORE, 0 where there is none."""
    loss = F.cross_entropy(logits.float(), targets, ignore_index=IGNORE, reduction="sum")
    return loss / (targets != IGNORE).sum().clamp(min=1)


def not_padding(labels):
    """labels (B, T) -> (B, T) bool: true up to a row's last label."""
    return (labels != IGNORE).flip(1).cumsum(dim=1).flip(1) > 0


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


class DND(nn.Module):
    """A Qwen3 with nested passes; with a Qwen3Config, or without nested layers, the plain one."""

    rate = "tokens"  # the metric that train.py's progress bar also counts per second
    unit = "layers"  # what stream counts for each token
    Carry = None  # nothing survives a training step
    packs = True  # a row of a batch may hold several texts

    def __init__(self, config):
        super().__init__()
        self.config, C = config, config.n_embd
        self.embed_tokens = nn.Embedding(config.vocab_size, C)
        self.layers = nn.ModuleList(Layer(config, index) for index in range(config.n_layer))
        self.norm = RMSNorm(C, config.rms_norm_eps)
        self.lm_head = None if config.tie_embeddings else nn.Linear(C, config.vocab_size, bias=False)
        self.nesting = Nesting(config) if config.nested else None
        self.table = None
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1 and not name.startswith("nesting."):
                nn.init.normal_(parameter, std=C**-0.5)  # about Qwen3's initializer_range, 0.02, at its width

    @property
    def bar(self):
        """Metrics on train.py's progress bar."""
        return ("loss", "ratio") if self.config.nested else ("loss",)

    def rotary(self, positions):
        """Rows of the rotary table (..., 2, hd/2), no buffer, so that it stays float32 in a bfloat16 model."""
        if self.table is None or self.table.device != positions.device:
            c = self.config
            self.table = rotary_waves(c.block_size, c.head_dim, c.rope_base, positions.device)
        return self.table[positions]

    def head(self, hidden):
        """hidden (..., C) -> logits (..., V)"""
        return F.linear(hidden, (self.embed_tokens if self.lm_head is None else self.lm_head).weight)

    # ---- forward

    def forward(self, tokens, targets=None, **options):
        """tokens (B, T) integer -> logits (B, T, V), loss (CE, float32 scalar, or None without targets).

        targets: (B, T) integer, shifted already, IGNORE where not scored. options: as in hidden_states.
        """
        logits = self.head(self.hidden_states(tokens, **options))
        return logits, None if targets is None else mean_loss(logits.flatten(0, 1), targets.flatten())

    def hidden_states(self, tokens, depth=2, cache=None, positions=None, is_token=None, trace=None, texts=None):
        """tokens (B, T) integer -> what `head` turns into logits (B, T, C).

        depth: 2, or 1 for the plain Qwen3. cache: a NestedKVCache that the tokens go on from; positions (B, T): where
        in the text the tokens are, default 0, 1, ... or on from the cache. texts: a Packed of all B * T tokens, if rows
        hold several texts, which do not see each other; not with a cache. is_token (B, T) bool: false for padding, at
        the right. trace: a list to which each nested layer appends (selected (B, T) bool, p (B, T) float32). Raises
        ValueError for texts that are longer than block_size and for other depths.
        """
        check_depth(depth)
        start = 0 if cache is None else cache.length
        positions = positions if texts is None else texts.place.view(tokens.shape)
        length = start + tokens.shape[1] if positions is None else int(positions.max()) + 1
        if length > self.config.block_size:
            raise ValueError(f"a text of {length} tokens: this model reads at most {self.config.block_size} "
                             "(block_size); give a shorter one")
        if positions is None:
            positions = torch.arange(start, length, device=tokens.device).expand(tokens.shape)
        if cache is not None:
            cache.begin(positions)
        x, rotary = self.embed_tokens(tokens), self.rotary(positions)
        kind = x.device.type
        if kind != "meta" and torch.is_autocast_enabled(kind):  # the residual stream too is in autocast's dtype
            x = x.to(torch.get_autocast_dtype(kind))
        for index, layer in enumerate(self.layers):
            attend = causal_attention if texts is None else texts.attend_rows
            attend = attend if cache is None else partial(cache.attend, index)
            x = self.run(layer, x, rotary, attend)
            if depth == 2 and index in self.config.nested:
                j = index - self.config.nested_first
                p, selected = self.nesting.select(j, x, is_token)
                if trace is not None:
                    trace.append((selected, p))
                # selected is an argument, so that the backward pass cannot come to select others
                x = self.run(self.nested_pass, layer, j, x, p, selected, positions, cache, texts)
        return self.norm(x)

    def run(self, part, *inputs):
        """part(*inputs), which the backward pass computes again if config.checkpoint_layers."""
        if self.config.checkpoint_layers and torch.is_grad_enabled():
            return recomputed(part, *inputs, selective=self.config.selective_checkpoint)
        return part(*inputs)

    def nested_pass(self, layer, j, x_v, p, selected, positions, cache=None, texts=None):
        """Take the selected tokens through their layer once more: x_v (B, T, C), p, selected (B, T) -> (B, T, C)."""
        x_s, cu_seqlens, _ = pack(x_v, selected)  # (k, C), (B + 1,)
        if not len(x_s) and not torch.is_grad_enabled():  # with it, beta and the router need their gradients, of zeros
            return x_v
        if texts is not None:  # of the selected, too, each sees those of its own text, not of its row
            counts = torch.bincount(texts.row[selected.flatten()], minlength=len(texts.lengths))
            cu_seqlens = F.pad(counts.cumsum(dim=0), (1, 0)).int()
        packed = Packed(len(x_s), cu_seqlens, None if cache is None else cache.counts[j])
        compact = self.config.nested_positions == "compact"
        rotary = self.rotary(packed.place if compact else positions[selected])  # (k, 2, hd/2)
        x_d = layer(x_s, rotary, packed.attend if cache is None else partial(cache.attend_nested, j, packed))
        return unpack_fuse(x_v, x_d, p, self.nesting.beta[j], selected)

    # ---- training

    def step(self, batch, carry=None):
        """Loss of a micro-batch: inputs, labels (B, T); the backward pass and the optimizer step are the caller's.

        Rows may hold several texts: then the batch has positions (B, T), where each token is in its text, from 0.
        Returns (loss, metrics, None). loss: CE, the mean over labelled tokens, and the weighted losses of the scores.
        metrics: name -> (total, count), to be added up over steps and ranks and then divided; the count of "loss" is
        what the loss is a mean over. ratio: share of the tokens that were selected, of each nested layer ratio_LAYER.
        """
        inputs, labels, trace = batch["inputs"], batch["labels"], []
        texts = Packed.at(batch["positions"]) if "positions" in batch else None
        scored, is_token = labels != IGNORE, not_padding(labels)  # (B, T); the head is only computed where it counts
        hidden = self.hidden_states(inputs, texts=texts, is_token=is_token, trace=trace)
        ce, count = mean_loss(self.head(hidden[scored]), labels[scored]), scored.sum()
        control, metrics, share = 0.0, {}, 0  # share: of all tokens, padding too
        if trace:
            control, metrics = self.nesting.losses(trace, is_token, texts)
            share = metrics["ratio"][0] / (inputs.numel() * len(trace))
        loss = ce + control
        return loss, {"loss": (loss.detach() * count, count), "ce": (ce.detach() * count, count), **metrics,
                      "tokens": (inputs.numel(), 1), "flops": (self.flops(inputs.shape, share), 1)}, None

    def finish_step(self, metrics):
        """Move the thresholds, once per optimizer step; metrics: those of `step`, added up. Returns tau, the mean."""
        if self.nesting is None:
            return {}
        self.nesting.move_tau(metrics)
        return {"tau": (self.nesting.tau.sum(), len(self.nesting.tau))}

    def flops(self, shape, ratio=None):
        """Estimated FLOPs of a training step on tokens (B, T) = shape: 2 per weight and token forward, 4 backward.

        The head counts for all of them, though a step computes it for labelled ones only.

        ratio: share of the tokens that is selected in each nested layer, default k_target; 0 = the plain Qwen3.
        """
        c, (B, T) = self.config, shape
        if ratio is None:
            ratio = c.k_target if c.nested else 0
        heads = c.n_head * c.head_dim
        attention = 2 * c.n_embd * (heads + c.n_kv_head * c.head_dim)
        experts = c.n_embd * (c.num_experts + 3 * c.moe_intermediate_size * c.num_experts_per_tok)
        total = c.vocab_size * c.n_embd * T
        for layer in range(c.n_layer):
            weights = attention + (experts if c.has_experts(layer) else 3 * c.n_embd * c.intermediate_size)
            for n in (T, ratio * T if layer in c.nested else 0):  # the second pass is over fewer, and so are its keys
                total = total + n * (weights + heads * n)  # half of the keys, twice
        return 6 * B * (total + len(c.nested) * c.n_embd * T)

    def configure_optimizers(self, lr, weight_decay, betas):
        """[AdamW]; only matrices decay, among them the embedding, not gains, nor beta and the routers."""
        groups = {True: [], False: []}
        for name, parameter in self.named_parameters():
            if name != "nesting.router":
                groups[parameter.ndim > 1].append(parameter)
        groups = [dict(params=groups[True], weight_decay=weight_decay), dict(params=groups[False], weight_decay=0.0)]
        if self.nesting is not None:
            groups.append(dict(params=[self.nesting.router], weight_decay=0.0, lr=lr * self.config.router_lr))
        return [torch.optim.AdamW(groups, lr=lr, betas=betas, eps=1e-8, fused=True)]

    def parts_to_compile(self):
        """The layers."""
        return list(self.layers)

    def looped_parts(self):
        """Those of them that FSDP is to keep gathered between uses: none, the nested layers are most of the model."""
        return []

    # ---- inference

    def new_cache(self, batch_size, length, device=None):
        """A NestedKVCache for texts of up to `length` tokens, or block_size, in the dtype the model computes in."""
        device = device or self.norm.weight.device
        kind = self.norm.weight.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else self.norm.weight.dtype
        return NestedKVCache(self.config, batch_size, min(length, self.config.block_size), dtype, device)

    def cache_size(self, length, max_new_tokens=200, depth=2, **_):
        """Bytes of the cache that stream takes for a prompt of `length` tokens if k_target of them are selected."""
        plain = self.new_cache(1, length + max_new_tokens, "meta").nbytes
        if depth == 1 or not self.config.nested:
            return plain
        return plain + int(self.config.k_target * len(self.config.nested) / self.config.n_layer * plain)

    @torch.no_grad()
    def stream(self, prompts, stop=(), seed=0, **options):
        """Write on from prompts, a token of every row at a time. options: fields of NestedGenerateConfig.

        prompts: a list of B lists of token ids, which may differ in length, or (B, T) integer. stop: ids that end a
        row.
        Yields (next ids (B,) int64, layers that the token before each passed, nested passes included (B,) int64), on
        the CPU, until every row has met a stop id, max_new_tokens or block_size; a row that has ended is -1 from then
        on. Raises ValueError for prompts that are empty, not shorter than block_size or outside of the vocabulary, and
        for stop ids outside of it. With a temperature all rows draw from one generator.
        """
        o, device = NestedGenerateConfig(**options), self.norm.weight.device
        lengths, tokens = self._padded(prompts, stop)
        cache = self.new_cache(len(lengths), int(lengths.max()) + o.max_new_tokens, device)
        most, generator = cache.kv.shape[3], torch.Generator(device).manual_seed(seed)
        positions = torch.arange(tokens.shape[1], device=device).expand(tokens.shape)  # (B, T)
        is_token, rows = positions < lengths[:, None], torch.arange(len(lengths), device=device)
        last, ended = lengths - 1, torch.zeros_like(lengths, dtype=torch.bool)
        stop = torch.tensor(list(stop), dtype=torch.long, device=device)
        for _ in range(o.max_new_tokens):
            trace = []
            with torch.compiler.set_stance("force_eager"):  # or each part of the cache would be compiled anew
                hidden = self.hidden_states(tokens, o.depth, cache, positions, is_token, trace)
            ids = sample(self.head(hidden[rows, last]), o.temperature, o.top_k, o.top_p, generator)
            passed = len(self.layers) + sum((selected[rows, last] for selected, _ in trace), torch.zeros_like(last))
            yield ids.where(~ended, -1).cpu(), passed.cpu()
            ended |= torch.isin(ids, stop) | (lengths >= most)
            if ended.all():
                return
            positions = lengths.clamp(max=most - 1)[:, None]  # (B, 1)
            tokens, lengths, is_token, last = ids[:, None], lengths + 1, ~ended[:, None], torch.zeros_like(last)

    def generate(self, prompts, max_new_tokens, stop=(), seed=0, **options):
        """As stream, to the end -> a list of B lists of new token ids, each with the stop id that ended it, if any."""
        steps = self.stream(prompts, max_new_tokens=max_new_tokens, stop=stop, seed=seed, **options)
        ids = torch.stack([ids for ids, _ in steps], dim=1)  # (B, new tokens)
        return [row[row >= 0].tolist() for row in ids]

    def _padded(self, prompts, stop):
        """Prompts as in stream -> lengths (B,), tokens (B, T) padded at the right."""
        V, most = self.config.vocab_size, self.config.block_size
        rows = [torch.as_tensor(prompt, dtype=torch.long, device=self.norm.weight.device) for prompt in prompts]
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
        lengths = torch.tensor([len(row) for row in rows], device=self.norm.weight.device)
        return lengths, nn.utils.rnn.pad_sequence(rows, batch_first=True)

    @torch.no_grad()
    def evaluate(self, batches, depths=None, grade=None, **options):
        """Score rows at depths 1, the plain Qwen3, and 2, with the nested passes (default [2]). batches: as for step.

        Returns depth -> name -> (N,) float tensor on the CPU, a value per row in order. loss: the mean over the row's
        labelled tokens. selected, of a model with nested layers: the share of the row's tokens that were selected, mean
        over those layers. With `grade` and batches that hold prompt_lengths (B,), first of all exact_accuracy: the
        rows' first tokens are continued, by default greedily, options as in stream, and grade(labels (B, T), list of B
        lists of new ids) -> (B,) says which answers are right; an answer may be twice as long as the longest label.
        """
        scores = {depth: {} for depth in sorted(depths or [2])}
        for batch in batches:
            for depth, named in scores.items():
                graded = {} if grade is None else self._graded(batch, depth, grade, options)
                for name, values in (graded | self._losses(batch, depth)).items():
                    named.setdefault(name, []).append(values.cpu())
        return {depth: {name: torch.cat(parts) for name, parts in named.items()} for depth, named in scores.items()}

    def _graded(self, batch, depth, grade, options):
        """exact_accuracy (B,) of the answers to a batch."""
        longest = int((batch["labels"] != IGNORE).sum(dim=1).max())
        limit = min(2 * longest, options.get("max_new_tokens", 2 * longest))
        prompts = [row[:n] for row, n in zip(batch["inputs"], batch["prompt_lengths"].tolist())]
        answers = self.generate(prompts, **options | {"depth": depth, "max_new_tokens": limit})
        return {"exact_accuracy": grade(batch["labels"].cpu(), answers)}

    def _losses(self, batch, depth):
        """loss (B,) and, with nested layers, selected (B,) of each row."""
        labels, trace = batch["labels"], []
        scored, is_token = labels != IGNORE, not_padding(labels)
        hidden = self.hidden_states(batch["inputs"], depth, is_token=is_token, trace=trace)
        loss = F.cross_entropy(self.head(hidden[scored]).float(), labels[scored], reduction="none")  # (scored tokens,)
        total = torch.zeros(len(labels), device=labels.device).index_add_(0, scored.nonzero()[:, 0], loss)  # (B,)
        named = {"loss": total / scored.sum(dim=1).clamp(min=1)}
        if self.nesting is not None:
            counts = sum((selected.sum(dim=1) for selected, _ in trace), torch.zeros_like(total))  # (B,)
            named["selected"] = counts / (len(self.config.nested) * is_token.sum(dim=1).clamp(min=1))
        return named

    # ---- checkpoints

    @staticmethod
    def pretrained_config(path):
        """Config fields, as a dict, of a Hugging Face folder of a Qwen3 or of a checkpoint of train.py's."""
        return _qwen3_config(path) if os.path.isdir(path) else read_run(path, **KINDS)["model_config"]

    @classmethod
    def load_pretrained(cls, path, dtype=torch.float32, **overrides):
        """The model of a Hugging Face folder of a Qwen3, or of a checkpoint of train.py's, in evaluation mode.

        path: a folder with config.json and .safetensors files, one or many, or a checkpoint file. dtype: of the
        weights. overrides: DNDConfig fields; with nested layers where the file has none, those start as new ones do.
        A folder is read tensor by tensor: memory is that of the model and of a file, while it is mapped. Raises
        ValueError, one line, for what is no such checkpoint or does not fit.
        """
        config = cls.pretrained_config(path) | overrides
        with torch.device("meta"):  # no memory until the weights arrive
            model = cls((DNDConfig if "nested_first" in config else Qwen3Config)(**config)).to(dtype)
        if os.path.isdir(path):
            model.to_empty(device="cpu").fill(path)
        else:
            model.load_state_dict(_run_state(path, model, dtype), assign=True)
        return model.eval()

    @torch.no_grad()
    def fill(self, folder):
        """Read the weights of a Hugging Face folder of a Qwen3 into this model's; what DND adds starts as in a new one.

        Of a model that FSDP has sharded, each process reads what it holds and no more. Raises ValueError, one line, for
        a folder that does not fit.
        """
        if self.nesting is not None:
            self.nesting.init_weights()
        shapes, places = folder_shapes(folder), _places(self)
        embedding, head = "model.embed_tokens.weight", "lm_head.weight"
        if self.lm_head is None and head in shapes:  # of a tied model: a second copy, or the only one
            places[head] = (torch.empty_like(self.embed_tokens.weight) if embedding in shapes else
                            places.pop(embedding)[0]), ()
        check_shapes(folder, shapes, {name: tuple(torch.empty(weight.shape, device="meta")[index].shape)
                                      for name, (weight, index) in places.items()})
        read_folder(folder, {name: weight for name, (weight, index) in places.items() if not index} | _experts(places))
        if head in places and embedding in places and self.lm_head is None and not torch.equal(
                *(held(places[name][0]) for name in (head, embedding))):
            raise ValueError(f"{folder}: lm_head.weight differs from the embedding, but config.json ties them; set "
                             "tie_word_embeddings to false there")


# ---- reading checkpoints

KINDS = dict(dnd=DNDConfig, qwen3=Qwen3Config)


def _run_state(path, model, dtype):
    """The weights in a file of train.py's, the averaged ones where it has them, without wrappers' prefixes."""
    state = {}
    for key, value in run_weights(path, **KINDS).items():
        if key != "n_averaged":
            state[re.sub(r"_orig_mod\.|module\.", "", key)] = value
    if "nesting.tau" not in state and model.nesting is not None:
        new = Nesting(model.config).to(dtype).state_dict()
        state |= {f"nesting.{name}": value for name, value in new.items()}
    check_shapes(path, *({k: tuple(v.shape) for k, v in s.items()} for s in (state, model.state_dict())))
    for name, _ in model.named_parameters():
        state[name] = state[name].to(dtype)  # one at a time: never two copies of the whole
    return state


def _qwen3_config(folder):
    """Qwen3Config fields of a Hugging Face config.json, in either of its spellings."""
    path, theirs = os.path.join(folder, "config.json"), read_config(folder)
    rope, dense = theirs.get("rope_parameters") or theirs.get("rope_scaling") or {}, theirs.get("mlp_only_layers") or []
    if not isinstance(rope, dict) or not isinstance(dense, list):
        raise ValueError(f"{path}: rope_scaling is {rope!r} and mlp_only_layers {dense!r}; give an object and a list")
    names = dict(n_embd="hidden_size", n_layer="num_hidden_layers", n_head="num_attention_heads",
                 n_kv_head="num_key_value_heads", block_size="max_position_embeddings",
                 tie_embeddings="tie_word_embeddings", rope_base="rope_theta")
    theirs = {"rope_theta": rope.get("rope_theta"), "tie_word_embeddings": False,
              "num_experts": theirs.get("num_local_experts", 0)} | theirs
    fields = {name: theirs.get(names.get(name, name)) for name in Qwen3Config.__dataclass_fields__}
    fields["mlp_only_layers"] = ",".join(map(str, dense))
    for name in (*names, "head_dim", "intermediate_size", "vocab_size"):
        if fields[name] is None:
            raise ValueError(f"{path}: has no {names.get(name, name)}, so it is no Qwen3; give a folder of one, dense "
                             "or MoE")
    only = dict(model_type=("qwen3", "qwen3_moe"), hidden_act=("silu",), attention_bias=(False,),
                use_sliding_window=(False,))
    for name, ours in only.items():
        if theirs.get(name, ours[0]) not in ours:
            raise ValueError(f"{path}: {name} is {theirs[name]!r}; this model is built with "
                             f"{' or '.join(map(str, ours))} only")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise ValueError(f"{path}: rope_type is {kind!r}; this model rotates as trained, without scaling; remove it")
    return {name: value for name, value in fields.items() if value is not None}


def _places(model):
    """Hugging Face's name of every tensor of a Qwen3 -> (our parameter, where in it: a tuple of indices)."""
    places, width = {}, model.config.moe_intermediate_size
    for name, parameter in model.named_parameters():
        (layer_mlp, _, last), ours = name.rpartition("."), parameter.detach()
        if ours.ndim < 3 and not name.startswith("nesting."):
            places[name if name == "lm_head.weight" else f"model.{name}"] = ours, ()
        if ours.ndim == 3:  # stacked, theirs are apart
            parts = {"down": slice(None)}
            if last == "gate_up_proj":
                parts = {"gate": slice(width), "up": slice(width, None)}
            places |= {f"model.{layer_mlp}.experts.{expert}.{part}_proj.weight": (ours, (expert, rows))
                       for expert in range(len(ours)) for part, rows in parts.items()}
    return places


def _experts(places):
    """Name -> its part of a stacked parameter, for the experts that this process holds."""
    ours, found = {}, {}  # ours: a parameter's id -> numbers of experts
    for name, (stacked, index) in places.items():
        if index and id(stacked) not in ours:
            numbers = torch.arange(len(stacked))
            if hasattr(stacked, "to_local"):  # numbered as the stack is sharded
                from torch.distributed.tensor import distribute_tensor
                numbers = distribute_tensor(numbers, stacked.device_mesh, stacked.placements, src_data_rank=None)
            ours[id(stacked)] = held(numbers).tolist()
        if index and index[0] in ours[id(stacked)]:
            found[name] = held(stacked)[ours[id(stacked)].index(index[0]), index[1]]
    return found


PRESETS = {  # parameters, nested layers included; train.py has the recipe that goes with each
    "nano": DNDConfig(vocab_size=257, block_size=128, n_embd=128, n_layer=6, n_head=4, n_kv_head=2, head_dim=32,
                      intermediate_size=384, nested_first=1, nested_last=4),  # 1,215,108
    "nano-moe": DNDConfig(vocab_size=257, block_size=128, n_embd=128, n_layer=6, n_head=4, n_kv_head=2, head_dim=32,
                          num_experts=8, num_experts_per_tok=2, moe_intermediate_size=192, nested_first=1,
                          nested_last=4),  # 3,875,460, of which 1,221,252 active
    # a step moves a score by about lr router_lr C; with lr 5e-6 that is what it is for nano
    "qwen3-1.7b": DNDConfig(nested_first=4, nested_last=23, router_lr=1.0),  # 1,720,615,956
    "qwen3-30b-a3b": DNDConfig(n_layer=48, n_head=32, n_kv_head=4, num_experts=128, tie_embeddings=False,
                               nested_first=4, nested_last=43, router_lr=1.0),  # 30,532,204,584; 3,353,114,664 active
}
PLAIN_PRESETS = {name: Qwen3Config(**{field: getattr(config, field) for field in Qwen3Config.__dataclass_fields__})
                 for name, config in PRESETS.items()}  # of what DND goes on
