"""MoDr, a mixture of depth-recurrent branches: LoRA copies of a frozen Huginn's core, and a router that picks one.

"MoDr: Mixture-of-Depth-Recurrent Transformers", ICLR 2026, https://openreview.net/forum?id=9Pba4rcQbE. A Huginn thinks
in one way, by looping its core (huginn.py). Here the core has N branches, which share its frozen weights and differ by
updates of low rank, and each text, or each new token, loops through the one that a router chooses:

    y       = W x + lora_alpha / lora_rank * B_j A_j x      Wqkv and proj of every core layer, branch j; B starts at 0
    h       = adapter([s_0, e])                             Huginn's own frozen adapter, at the loop's start, per token
    r       = sigmoid(mean over tokens of router h)         a number per branch
    branch  = argmax(r + router_bias),   gate = r[branch]   the bias has no part in the gate
    s_i     = gate * core_branch(adapter([s_{i-1}, e]))     num_steps times, all with the same branch and gate

Only A, B and router are trained. The bias keeps branches in use without a loss: after each optimizer step

    router_bias += balance_rate * sign(mean(c) - c)         c: texts (or tokens) that each branch got, on all ranks

**The published way of pooling leaks the future.** `route_pool` says which tokens the mean is over:

    forward   all tokens of this forward pass, as published. In training, and within a prompt, there is one decision for
              the whole text, which has seen its end: logits of earlier tokens depend on later ones.
    context   the tokens so far: a running mean and a decision for each token. Nothing leaks. The default.

A loss in evaluation is always measured with `context`, or the leak would count as skill. Decoding routes each new token
anew in both ways: from that token alone, as no forward pass in training did, or from all tokens so far, as in training.

What the paper leaves open is settled as follows, by what README.md measures. The gate multiplies the core's output, not
that of each layer. With `gate` "preserve" its value is divided out, gate / gate.detach(), and its gradient remains:
then new branches reproduce the base, whose state a router at sigmoid(0) = 1/2 halves at first, and can be merged into
it. A starts normal with std 1 / sqrt(in), the router with std 1 / sqrt(C). Padding counts nowhere. One branch has no
router: that is LoRA tuning.

Shapes: B rows, T tokens, C = n_embd, N = num_branches.

    model = MoDr.load_pretrained("out/huginn-arith/best.pt", num_branches=4)  # new branches on that frozen Huginn
    logits, loss = model(tokens, targets, num_steps=8)                        # as huginn.py, also generate and evaluate
    model.load_state_dict(torch.load("branches.pt"))                          # state_dict() is what was trained alone
    plain = model.merged(2)                              # a Huginn with branch 2 in its weights; not with every gate

Size: 4 branches of rank 16 on the published Huginn are 8,131,200 parameters, 0.228 % of the whole, the router 0.0006 %.
The paper's "< 0.2 %" holds for 3 branches (0.171 %), for rank 14, or for the one branch of a text: 0.057 %.
"""

import contextlib
import hashlib
import math
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import huginn
from data.weights import read_run, run_weights
from huginn import Huginn, HuginnConfig, plain_names
from kernels import lora_linear, merge_lora


@dataclass
class MoDrConfig(HuginnConfig):
    # the frozen Huginn, whose sizes the fields above are
    base: str = ""  # its checkpoint or Hugging Face folder; a new run takes the one that it starts from
    base_hash: str = ""  # hash of its weights, by which another base is told; empty = not known yet
    base_dtype: Literal["float32", "bfloat16"] = "float32"  # that its weights are held in
    # branches
    num_branches: int = 4  # copies of the core (paper N); 1 = plain LoRA tuning, without a router
    lora_rank: int = 16  # rank of an update
    lora_alpha: float = 16.0  # an update is multiplied by this / lora_rank
    # routing
    routing: Literal["router", "random", "base"] = "router"  # who chooses a branch; base = none, the frozen model
    branch: int = -1  # a branch that everything goes through, whatever the router says; -1 = none
    route_pool: Literal["context", "forward"] = "context"  # tokens that a choice looks at; forward leaks, see the top
    gate: Literal["block", "layer", "preserve", "off"] = "block"  # multiplies the core's output, its layers'; see top
    balance_rate: float = 0.001  # step of the balancing bias (paper eta); 0 = no balancing
    router_lr: float = 0.1  # learning rate of the router, as a multiple of the branches'

    def __post_init__(self):
        super().__post_init__()
        for name, accepted in dict(num_branches=(1, 256), lora_rank=(1, 4096), lora_alpha=(0, 1e6),
                                   balance_rate=(0, 1), router_lr=(0, 1e3), branch=(-1, self.num_branches - 1)).items():
            if not accepted[0] <= getattr(self, name) <= accepted[1]:
                raise ValueError(f"{name} {getattr(self, name)}: give {accepted[0]} to {accepted[1]:g}")
        for name in ("routing", "route_pool", "gate", "base_dtype"):
            accepted = get_args(self.__dataclass_fields__[name].type)
            if getattr(self, name) not in accepted:
                raise ValueError(f"{name} {getattr(self, name)!r}: choose {', '.join(accepted)}")


# ---- branches and the choice of one


class BranchedLinear(nn.Module):
    """A frozen matrix with an update per branch. (..., in) -> (..., out).

    `branch` is set before each use: (B,) or (B, T) long, or None for the matrix alone.
    """

    def __init__(self, linear, config):
        super().__init__()
        (n_out, n_in), N, rank = linear.weight.shape, config.num_branches, config.lora_rank
        self.weight = linear.weight  # (out, in)
        device = linear.weight.device
        self.lora_A = nn.Parameter(torch.randn(N, rank, n_in, device=device) / math.sqrt(n_in))  # (N, rank, in)
        self.lora_B = nn.Parameter(torch.zeros(N, n_out, rank, device=device))  # (N, out, rank)
        self.scale, self.branch = config.lora_alpha / rank, None

    def forward(self, x):
        if self.branch is None:
            return F.linear(x, self.weight)
        return lora_linear(x, self.weight, self.lora_A, self.lora_B, self.scale, self.branch)


@dataclass
class Route:
    """A choice, made once per forward pass and kept for all steps of its loop, also when they are recomputed."""

    branch: torch.Tensor | None  # (B, 1), a text's, or (B, T), its tokens', long; None: the frozen model
    gate: torch.Tensor | None  # (B, 1, 1) or (B, T, 1) float32, what the state is multiplied by; None: nothing


def running_mean(u, cache=None):
    """Mean of u (B, T, N) over the text up to each token (B, T, N); with a cache, over what it holds, too."""
    if cache is None:
        return u.cumsum(dim=1) / torch.arange(1, u.shape[1] + 1, device=u.device)[:, None]
    if cache.scores is None:
        cache.scores = u.new_zeros(len(u), cache.k.shape[3], u.shape[2])
    cache.scores[cache.rows, cache.positions] = u.detach()  # at their positions, as keys and values: see KVCache
    sums = cache.scores[:, : cache.length].cumsum(dim=1)  # (B, S, N)
    return sums[cache.rows, cache.positions] / (cache.positions + 1)[..., None]


# ---- the model


class MoDr(Huginn):
    """A frozen Huginn whose core has branches. What is not here is huginn.py's, text for text."""

    fill = None  # a folder holds the frozen weights alone

    def __init__(self, config, base=None):
        """base: the Huginn to freeze, whose weights are shared, not copied; None: one with random weights."""
        with torch.device("meta") if base is not None else contextlib.nullcontext():
            super().__init__(config)
        if base is not None:
            self.load_state_dict(base.state_dict(), assign=True)
        self.requires_grad_(False)
        self.frozen = [name for name, _ in self.named_parameters()]
        for block in self.core_block:
            block.attn.Wqkv = BranchedLinear(block.attn.Wqkv, config)
            block.attn.proj = BranchedLinear(block.attn.proj, config)
        device, N = self.wte.weight.device, config.num_branches
        self.router = nn.Linear(config.n_embd, N, bias=False, device=device) if N > 1 else None
        if self.router is not None:
            nn.init.normal_(self.router.weight, std=config.n_embd**-0.5)
            self.router.requires_grad_(config.gate != "off")  # which is all that a gradient comes through
            self.bar = (*self.bar, "balance_entropy")
        self.register_buffer("router_bias", torch.zeros(N, device=device))
        self.counts = None  # (N,) of the last training forward: what each branch got
        self.written = None  # while answers are written: the branch of every token, a list of (B, T) long
        self.register_state_dict_post_hook(self._drop_frozen)
        self.register_load_state_dict_post_hook(self._excuse_frozen)

    @staticmethod
    def _drop_frozen(self, state, prefix, _):
        for name in self.frozen:
            state.pop(prefix + name, None)

    @staticmethod
    def _excuse_frozen(self, keys):
        keys.missing_keys[:] = [key for key in keys.missing_keys if not key.endswith(tuple(self.frozen))]

    def _apply(self, fn, recurse=True):
        """To another device or dtype; but the bias stays float32, as in bfloat16 0.5 + 0.001 is 0.5."""
        bias = self.router_bias
        super()._apply(fn, recurse)
        self.router_bias = self.router_bias.float() if bias.is_meta else bias.to(self.router_bias.device)
        return self

    def branched(self):
        """The matrices with branches."""
        return [linear for block in self.core_block for linear in (block.attn.Wqkv, block.attn.proj)]

    # ---- routing

    def ratings(self, s, e, cache=None, is_token=None, causal=False):
        """log r (B, 1, N), a text's, or (B, T, N), its tokens', float32; arguments as for route."""
        h = self.adapter(torch.cat([s, e], dim=-1)).float()  # (B, T, C)
        with torch.autocast(s.device.type, enabled=False):  # in float32: what decides is small differences
            u = F.linear(h, self.router.weight.float())  # (B, T, N)
        if causal or self.config.route_pool == "context":
            return F.logsigmoid(running_mean(u, cache))
        weight = torch.ones_like(u[..., :1]) if is_token is None else is_token[..., None].float()  # (B, T, 1)
        return F.logsigmoid((u * weight).sum(dim=1, keepdim=True) / weight.sum(dim=1, keepdim=True))

    def route(self, s, e, cache=None, is_token=None, causal=False):
        """The branch and gate of each text, or of each token, from s, the state its loop starts from, and e (B, T, C).

        is_token (B, T) bool is false for padding. causal: pool as `context`, whatever the config says. A cache holds
        what running means need of earlier tokens.
        """
        c, (B, T, _) = self.config, s.shape
        if c.routing == "base":
            return Route(None, None)
        if self.router is None:
            return Route(torch.zeros(B, 1, dtype=torch.long, device=s.device), None)
        log_r = self.ratings(s, e, cache, is_token, causal)
        r = log_r.exp()  # (B, 1 or T, N), from 0 to 1
        if c.branch >= 0:
            branch = torch.full(r.shape[:2], c.branch, device=r.device)
        elif c.routing == "random":
            branch = torch.randint(c.num_branches, r.shape[:2], device=r.device)
        else:
            branch = (r + self.router_bias).argmax(dim=-1)  # (B, 1) or (B, T)
        if self.training:
            chosen = F.one_hot(branch, c.num_branches)  # (B, 1 or T, N)
            per_token = is_token is not None and branch.shape[1] > 1
            self.counts = (chosen * is_token[..., None] if per_token else chosen).sum(dim=(0, 1))
        if self.written is not None:
            self.written.append(branch.expand(B, T))
        log_gate = log_r.gather(-1, branch[..., None])  # (B, 1 or T, 1)
        if c.gate == "preserve":  # gate / gate.detach(), in logarithms: a gate may be so small that it is 0
            gate = (log_gate - log_gate.detach()).exp() if log_gate.requires_grad else None
        else:
            gate = log_gate.exp()
        return Route(branch, None if c.gate == "off" else gate)

    def think(self, s, e, rotary, cache=None, step=0, route=None):
        """As in Huginn, through the branch of `route`, which is decided here if not given."""
        route = self.route(s, e, cache) if route is None else route
        for linear in self.branched():
            linear.branch = None if route.branch is None else route.branch.squeeze(1)
        x, last = self.adapter(torch.cat([s, e], dim=-1)), len(self.core_block) - 1
        for layer, block in enumerate(self.core_block):
            x = block(x, rotary, cache, cache.slot(step, layer) if cache else 0)
            if route.gate is not None and (layer == last or self.config.gate == "layer"):
                x = x * route.gate.to(x.dtype)
        return x

    # ---- training

    def step(self, batch, carry=None):
        """As in Huginn; the metric branch_j is (what branch j got, what all got): texts, or tokens with `context`."""
        loss, metrics, carry = super().step(batch, carry)
        if self.router is not None and self.config.routing != "base":
            total = self.counts.sum()
            metrics |= {f"branch_{j}": (count, total) for j, count in enumerate(self.counts)}
        return loss, metrics, carry

    @torch.no_grad()
    def finish_step(self, metrics):
        """Move the bias, once per optimizer step, by what its micro-batches sent to each branch, summed over ranks.

        metrics: those of `step`, added up. Returns balance_entropy, -sum(share log share) of the branches: log N when
        all get the same, 0 when one gets everything.
        """
        if "branch_0" not in metrics:
            return {}
        c = torch.stack([metrics[f"branch_{j}"][0] for j in range(self.config.num_branches)]).float()  # (N,)
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(c)
        self.router_bias += self.config.balance_rate * torch.sign(c.mean() - c)
        return {"balance_entropy": (torch.special.entr(c / c.sum()).sum(), 1)}

    def configure_optimizers(self, lr, weight_decay, betas):
        """[AdamW] over branches and router alone; ValueError if the forward pass does not use them.

        The router learns more slowly: at the branches' rate its scores soon saturate, and what is all 0 or all 1 leaves
        the choice to the balancing bias, which knows nothing of the text.
        """
        if self.config.routing == "base":
            raise ValueError("routing base is the frozen model: there is nothing to train; give router or random")
        router = [] if self.router is None else [self.router.weight]
        branches = [p for linear in self.branched() for p in (linear.lora_A, linear.lora_B)]
        groups = [dict(params=branches, lr=lr), dict(params=router, lr=lr * self.config.router_lr)]
        return [torch.optim.AdamW(groups, weight_decay=weight_decay, betas=betas, eps=1e-8, fused=True)]

    def flops(self, shape, without, with_grad):
        """As in Huginn. Backward a frozen matrix costs 2 per weight and token, for its input alone; an update 6."""
        c, (B, T) = self.config, shape
        block = 4 * c.n_embd**2 + 3 * c.n_embd * c.intermediate_size + c.n_embd * T  # the last: causal attention
        core = 2 * c.n_embd**2 + c.n_layers_in_recurrent_block * block
        updates = c.n_layers_in_recurrent_block * c.lora_rank * 6 * c.n_embd  # of one branch
        coda = c.n_layers_in_coda * block + c.vocab_size * c.n_embd
        looped = (without + 2 * with_grad) * core + (without + 4 * with_grad) * updates
        return 2 * B * T * (c.n_layers_in_prelude * block + looped + 2 * coda)

    # ---- inference

    def _write(self, prompts, **options):
        """As in Huginn, and branch_j, the share of the tokens of prompt and answer that went through branch j."""
        self.written = []
        answers, took = super()._write(prompts, **options)
        written, self.written = self.written, None
        if not written:  # no router
            return answers, took
        branch, T = torch.cat(written, dim=1).cpu(), written[0].shape[1]  # (B, T of the longest prompt + new tokens)
        column = torch.arange(branch.shape[1])
        length, new = (torch.tensor([len(row) for row in rows])[:, None] for rows in (prompts, answers))  # (B, 1) each
        read = (column < length) | (column >= T) & (column < T + new - 1)  # the last token of an answer is not read
        share = (F.one_hot(branch, self.config.num_branches) * read[..., None]).sum(dim=1) / read.sum(dim=1)[:, None]
        return answers, took | {f"branch_{j}": share[:, j] for j in range(self.config.num_branches)}

    def variants(self):
        """Iterate over other ways to route what was trained, by title; the model is set to each in turn."""
        kept = self.config
        routed = self.router is not None
        changes = {"base": dict(routing="base")} | ({"random": dict(routing="random", branch=-1)} if routed else {})
        changes |= {f"branch {j}": dict(routing="router", branch=j) for j in range(kept.num_branches) if routed}
        try:
            for title, change in changes.items():
                self.config = replace(kept, **change)
                yield title
        finally:
            self.config = kept

    def merged(self, branch):
        """A plain Huginn with the updates of a branch in its weights; ValueError where a gate would be lost."""
        c = self.config
        if not 0 <= branch < c.num_branches:
            raise ValueError(f"branch {branch}: say which branch to merge, 0 to {c.num_branches - 1}")
        if self.router is not None and c.gate in ("block", "layer"):
            raise ValueError(f"gate {c.gate!r} multiplies the state by a number that depends on the text, for which a "
                             "plain Huginn has no place; train with gate preserve, or give gate off to leave it out")
        weights = dict(self.named_parameters())
        state = {name: weights[name].detach() for name in self.frozen}
        for name, linear in self.named_modules():
            if isinstance(linear, BranchedLinear):
                A, B = linear.lora_A[branch].detach(), linear.lora_B[branch].detach()
                state[f"{name}.weight"] = merge_lora(linear.weight.detach(), A, B, linear.scale)
        with torch.device("meta"):
            model = Huginn(plain_config(c))
        model.load_state_dict(state, assign=True)
        return model.train(self.training)

    # ---- checkpoints

    @staticmethod
    def pretrained_config(path):
        """MoDrConfig fields, as a dict, of a checkpoint of a MoDr, or for new branches on a Huginn's."""
        try:
            return read_run(path, modr=MoDrConfig)["model_config"]
        except ValueError:  # then it must be a Huginn's
            return Huginn.pretrained_config(path) | {"base": path}

    @classmethod
    def load_pretrained(cls, path, dtype=None, **overrides):
        """A trained MoDr, or new branches on a Huginn, in evaluation mode.

        path: a checkpoint of train.py's of either, or a Hugging Face folder of a Huginn. overrides: MoDrConfig fields;
        dtype, of the frozen weights, stands for base_dtype. A MoDr's checkpoint has no frozen weights: they are read
        from `base`. Raises ValueError, one line, for what is neither, for a base that is gone, and for one with other
        weights than these branches were trained on.
        """
        fields = cls.pretrained_config(path)
        is_new = "base_hash" not in fields
        config = MoDrConfig(**fields | overrides)
        if is_new and config.base != path:
            raise ValueError(f"base {config.base}: new branches are put on the Huginn of init_from, {path}; to take "
                             "the other give it as init_from")
        for name in () if is_new else ("num_branches", "lora_rank"):
            if getattr(config, name) != fields[name]:
                raise ValueError(f"{name} {getattr(config, name)}: {path} was trained with {fields[name]}; give that")
        base = read_base(config, None if is_new else path, dtype or getattr(torch, config.base_dtype))
        found = weights_hash(base)
        if config.base_hash not in ("", found):
            raise ValueError(f"base {config.base} has other weights (hash {found}) than {path} was trained on (hash "
                             f"{config.base_hash}); give the path of those as base")
        model = cls(replace(config, base_hash=found), base)
        if not is_new:
            weights = plain_names(run_weights(path, modr=MoDrConfig), path)
            try:
                model.load_state_dict(weights)
            except RuntimeError as error:
                raise ValueError(f"{path}: {str(error).splitlines()[1].strip()} Give the settings it was trained "
                                 "with") from None
        return model.eval()


# ---- reading checkpoints


def plain_config(config):
    """The HuginnConfig of a MoDrConfig."""
    return HuginnConfig(**{name: getattr(config, name) for name in HuginnConfig.__dataclass_fields__})


def read_base(config, path, dtype):
    """The frozen Huginn that a config names; path: the checkpoint that needs it, None if it is for new branches."""
    try:
        return Huginn.load_pretrained(config.base, dtype, **vars(plain_config(config)))
    except ValueError as error:
        if path is None:
            raise
        raise ValueError(f"{path} needs the Huginn it was trained on, name it with --base: {error}") from None


def weights_hash(model):
    """Hash of a model's weights rounded to bfloat16, so that it is the same in whatever precision they are held."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)}".encode())
        digest.update(tensor.to("cpu", torch.bfloat16).contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()[:16]


PRESETS = {  # sizes of the Huginn they go on; trained parameters with 4 branches of rank 16
    "nano": MoDrConfig(**vars(huginn.PRESETS["nano"])),  # 49,664
    "small": MoDrConfig(**vars(huginn.PRESETS["small"])),
    "paper": MoDrConfig(**vars(huginn.PRESETS["paper"]), base_dtype="bfloat16"),  # 8,131,200
}
