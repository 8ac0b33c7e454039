"""How fast is hrm.py? Against a plain implementation of the paper, on this machine, in one run. Not a test.

    python tests/bench_hrm.py                     minutes; run it alone
    python tests/bench_hrm.py --repeats 1 --layers 1 --batch 4 --threads 1      a quick look that it works

The plain one, below, is what one writes from the paper and its released code: every linear casts its float32 weight at
each call, F.scaled_dot_product_attention, float32 norms, stablemax in float64 by its definition, a Python loop over
tensors for Adam-atan2, and a second complete forward pass for the target of q_continue. Both get the same weights,
puzzles, sizes and dtype: bfloat16 where this CPU multiplies it natively, else float32.

It prints
    check   loss and gradient norm of both on one batch, in float32 and in that dtype; the script stops if they differ
    tables  training in puzzle-segments per second (forward, backward, optimizer step), solving in puzzles per second
            at 16 segments: medians of repeats that alternate between the two, and the ratio to the plain one
    shares  where the time of one nano training step goes, in percent
"""

import argparse
import dataclasses
import math
import os
import sys
import time

import torch
import torch.nn as nn
import torch.nn.functional as F

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import hrm  # noqa: E402  (after the path is set)
import train  # noqa: E402
from data import machine  # noqa: E402

# ---- the paper, written down plainly


class Linear(nn.Module):
    def __init__(self, n_in, n_out, bias=False):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_out, n_in))
        self.bias = nn.Parameter(torch.empty(n_out)) if bias else None

    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))


def rms_norm(x, eps=1e-5):
    y = x.to(torch.float32)
    return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def rotate(x, cos, sin):
    """x (B, T, nh, hd); cos, sin (T, hd) float32."""
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return (x * cos[:, None] + turned * sin[:, None]).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.n_head = c.n_head
        self.qkv_proj, self.o_proj = Linear(c.n_embd, 3 * c.n_embd), Linear(c.n_embd, c.n_embd)

    def forward(self, x, cos, sin):
        B, T, C = x.shape
        q, k, v = self.qkv_proj(x).view(B, T, 3, self.n_head, C // self.n_head).unbind(dim=2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return self.o_proj(y.transpose(1, 2).reshape(B, T, C))


class MLP(nn.Module):
    def __init__(self, c):
        super().__init__()
        width = math.ceil(round(c.expansion * c.n_embd * 2 / 3) / 256) * 256
        self.gate_up_proj, self.down_proj = Linear(c.n_embd, 2 * width), Linear(width, c.n_embd)

    def forward(self, x):
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.self_attn, self.mlp = Attention(c), MLP(c)

    def forward(self, x, cos, sin):
        x = rms_norm(x + self.self_attn(x, cos, sin))
        return rms_norm(x + self.mlp(x))


class Level(nn.Module):
    def __init__(self, c, n_layers):
        super().__init__()
        self.layers = nn.ModuleList([Block(c) for _ in range(n_layers)])

    def forward(self, z, injection, cos, sin):
        z = z + injection
        for layer in self.layers:
            z = layer(z, cos, sin)
        return z


class PlainHRM(nn.Module):
    """rope, no puzzle prefix. The names are those of hrm.py, so that weights can be exchanged."""

    def __init__(self, c, dtype):
        super().__init__()
        self.c, self.dtype = c, dtype
        self.embed_tokens = nn.Embedding(c.vocab_size, c.n_embd)
        self.lm_head, self.q_head = Linear(c.n_embd, c.vocab_size), Linear(c.n_embd, 2, bias=True)
        self.H_level, self.L_level = Level(c, c.H_layers), Level(c, c.L_layers)
        self.register_buffer("H_init", torch.empty(c.n_embd))
        self.register_buffer("L_init", torch.empty(c.n_embd))
        hd = c.n_embd // c.n_head
        angle = torch.outer(torch.arange(c.seq_len), 10000 ** (-torch.arange(0, hd, 2) / hd)).repeat(1, 2)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def segment(self, z_H, z_L, inputs):
        c, rotary = self.c, (self.cos, self.sin)
        x = (math.sqrt(c.n_embd) * self.embed_tokens(inputs)).to(self.dtype)
        with torch.no_grad():
            for i in range(c.H_cycles):
                for j in range(c.L_cycles):
                    if not (i == c.H_cycles - 1 and j == c.L_cycles - 1):
                        z_L = self.L_level(z_L, z_H + x, *rotary)
                if i < c.H_cycles - 1:
                    z_H = self.H_level(z_H, z_L, *rotary)
        z_L = self.L_level(z_L, z_H + x, *rotary)
        z_H = self.H_level(z_H, z_L, *rotary)
        return z_H.detach(), z_L.detach(), self.lm_head(z_H), self.q_head(z_H[:, 0]).float()

    def start(self, B):
        return [init.to(self.dtype).expand(B, self.c.seq_len, -1) for init in (self.H_init, self.L_init)]

    def loss(self, batch, carry):
        """One training segment with its loss. carry: (z_H, z_L, steps, halted, inputs, labels) or None."""
        c, B = self.c, len(batch["inputs"])
        if carry is None:
            zeros = torch.zeros(B, dtype=torch.int32)
            carry = (*self.start(B), zeros, zeros == 0, batch["inputs"], batch["labels"])
        z_H, z_L, steps, new, inputs, labels = carry
        z_H, z_L = (torch.where(new.view(-1, 1, 1), s, z) for s, z in zip(self.start(B), (z_H, z_L)))
        inputs = torch.where(new.view(-1, 1), batch["inputs"], inputs)
        labels = torch.where(new.view(-1, 1), batch["labels"], labels)
        steps = torch.where(new, 0, steps) + 1
        z_H, z_L, logits, q = self.segment(z_H, z_L, inputs)
        with torch.no_grad():
            last = steps >= c.halt_max_steps
            least = (torch.rand(B) < c.halt_exploration_prob) * torch.randint(2, c.halt_max_steps + 1, (B,))
            halted = last | ((q[:, 0] > q[:, 1]) & (steps >= least))
            _, _, _, next_q = self.segment(z_H, z_L, inputs)
            target = torch.where(last, next_q[:, 0], torch.maximum(next_q[:, 0], next_q[:, 1])).sigmoid()
            right = (logits.argmax(-1) == labels).all(dim=-1).float()
        loss = stablemax_cross_entropy(logits, labels).mean(dim=-1).sum()
        q_halt_loss = F.binary_cross_entropy_with_logits(q[:, 0], right, reduction="sum")
        q_continue_loss = F.binary_cross_entropy_with_logits(q[:, 1], target, reduction="sum")
        return (loss + 0.5 * (q_halt_loss + q_continue_loss)) / B, (z_H, z_L, steps, halted, inputs, labels)

    @torch.no_grad()
    def solve(self, inputs, segments):
        z_H, z_L = self.start(len(inputs))
        for _ in range(segments):
            z_H, z_L, logits, _ = self.segment(z_H, z_L, inputs)
        return logits.argmax(-1)


def stablemax_cross_entropy(logits, labels):
    x = logits.to(torch.float64)
    s = torch.where(x < 0, 1 / (1 - x + 1e-30), x + 1)
    log_p = torch.log(s / s.sum(dim=-1, keepdim=True))
    return -log_p.gather(-1, labels[..., None]).squeeze(-1)


class PlainAdamATan2(torch.optim.Optimizer):
    def __init__(self, params, lr, weight_decay, betas):
        super().__init__(params, dict(lr=lr, weight_decay=weight_decay, betas=betas))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(step=0, m=torch.zeros_like(p), v=torch.zeros_like(p))
                state["step"] += 1
                p.mul_(1 - group["lr"] * group["weight_decay"])
                state["m"].mul_(beta1).add_(p.grad, alpha=1 - beta1)
                state["v"].mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                root = (state["v"] / (1 - beta2 ** state["step"])).sqrt()
                p.sub_(torch.atan2(state["m"], root), alpha=group["lr"] / (1 - beta1 ** state["step"]))


# ---- the two side by side


def autocast(dtype):
    return torch.autocast("cpu", dtype, enabled=dtype != torch.float32)


def build(config, dtype):
    """(our model, the plain one) with the same weights."""
    torch.manual_seed(0)
    ours, plain = hrm.HRM(config), PlainHRM(config, dtype)
    nn.init.normal_(ours.q_head.weight, std=config.n_embd**-0.5)  # as after some training: rows halt at different times
    plain.load_state_dict(ours.state_dict())
    return ours.train(), plain.train()


def random_batch(config, B, seed=0):
    """Digits and blanks; labels all digits."""
    g = torch.Generator().manual_seed(seed)
    shape = (B, config.seq_len)
    return {"inputs": torch.randint(1, config.vocab_size, shape, generator=g),
            "labels": torch.randint(2, config.vocab_size, shape, generator=g)}


def trainers(config, dtype, B):
    """name -> a function that does one training step."""
    ours, plain = build(dataclasses.replace(config, q_target="bootstrap"), dtype)
    single, _ = build(dataclasses.replace(config, q_target="none"), dtype)
    batch, steps = random_batch(config, B), {}
    rates = dict(lr=1e-4, weight_decay=0.1, betas=(0.9, 0.95))

    def add(name, optimizers, forward):
        carry = None

        def step():
            nonlocal carry
            loss, carry = forward(carry)
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

        steps[name] = step

    def forward_of(model):
        def forward(carry):
            with autocast(dtype):
                loss, _, carry = model.step(batch, carry)
            return loss, carry

        return forward

    add("plain", [PlainAdamATan2(plain.parameters(), **rates)], lambda carry: plain.loss(batch, carry))
    add("hrm.py, bootstrap", ours.configure_optimizers(**rates), forward_of(ours))
    add("hrm.py, none", single.configure_optimizers(**rates), forward_of(single))
    return steps


def solvers(config, dtype, B, segments):
    ours, plain = build(config, dtype)
    inputs = random_batch(config, B)["inputs"]

    def solve():
        with autocast(dtype):
            ours.eval().solve(inputs, segments)

    return {"plain": lambda: plain.eval().solve(inputs, segments), "hrm.py": solve}


def check(config, dtype, B):
    """Both must give the same loss and gradient for the same puzzles, in float32 and in `dtype`."""
    config = dataclasses.replace(config, q_target="bootstrap")
    for used, close in ((torch.float32, 1e-5), (dtype, 1e-5 if dtype == torch.float32 else 2e-2)):
        models, batch, found = build(config, used), random_batch(config, B), []
        with autocast(used):
            loss = models[0].step(batch)[0]
        for model, loss in zip(models, (loss, models[1].loss(batch, None)[0])):
            loss.backward()
            found.append((loss.item(), nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()))
        (ours, norm), (plain, plain_norm) = found
        print(f"check   {str(used).removeprefix('torch.'):9} loss {ours:.6f}, plain {plain:.6f} | "
              f"gradient norm {norm:.6f}, plain {plain_norm:.6f}")
        assert abs(ours - plain) <= close * plain and abs(norm - plain_norm) <= close * plain_norm, "they differ"


def table(title, unit, functions, B, args):
    """Time the functions in turn and print a row for each: median rate, ratio to the first."""
    for function in functions.values():
        function()
    seconds = {name: [] for name in functions}
    for _ in range(args.repeats):
        for name, function in functions.items():
            start = args.clock()
            function()
            seconds[name].append(args.clock() - start)
    medians = {name: torch.tensor(s).quantile(0.5).item() for name, s in seconds.items()}
    first = next(iter(medians.values()))
    print(f"\n{title}\n  {'':22}{unit:>24} {'ms per call':>12} {'ratio':>7}")
    for name, median in medians.items():
        print(f"  {name:22}{B / median:>24,.1f} {1000 * median:>12,.1f} {first / median:>7.2f}")


# ---- where the time goes

KINDS = {  # kind -> words in an operation's name; the first kind that fits wins
    "optimizer": ("Optimizer.step",),
    "loss": ("act_loss", "loss", "LogSoftmax", "Nll", "Log1P", "Clamp", "Where", "BinaryCrossEntropy"),
    "attention: bmm, softmax": ("bmm", "Bmm", "softmax", "Softmax", "scaled_dot_product"),
    "matmul": ("mm", "Mm", "linear", "Linear"),
    "norms, elementwise, casts": ("aten::",),
    "other": ("",),
}


def kind_of(event):
    """The kind of a profiler event. Whatever runs inside the optimizer or the loss belongs to these."""
    names, above = [event.name], event.cpu_parent
    while above is not None:
        names.append(above.name)
        above = above.cpu_parent
    inside = {kind: names if kind in ("optimizer", "loss") else names[:1] for kind in KINDS}
    return next(kind for kind, words in KINDS.items() if any(word in name for word in words for name in inside[kind]))


def shares(title, step, rounds):
    """Print the percent of a step's time per kind of operation. other: Python, autograd, waiting."""
    plain_loss = hrm.act_loss

    def marked_loss(*arguments):
        with torch.profiler.record_function("act_loss"):
            return plain_loss(*arguments)

    hrm.act_loss = marked_loss
    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        with torch.profiler.record_function("everything"):
            for _ in range(rounds):
                step()
    hrm.act_loss = plain_loss
    totals, whole = dict.fromkeys(KINDS, 0.0), 0.0
    for event in profile.events():
        if event.name == "everything":
            whole = event.cpu_time_total
        else:
            totals[kind_of(event)] += event.self_cpu_time_total
    totals["other"] += max(whole - sum(totals.values()), 0)
    print(f"\nwhere the time of a step goes, {title}")
    for kind, total in totals.items():
        print(f"  {kind:28}{100 * total / sum(totals.values()):6.1f} %")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--repeats", type=int, default=7, help="times that each implementation runs")
    parser.add_argument("--nano_batch", type=int, default=64, help="puzzles per step of the nano size")
    parser.add_argument("--batch", type=int, default=16, help="puzzles per step of the width-512 size")
    parser.add_argument("--layers", type=int, default=4, help="layers per module of the width-512 size")
    parser.add_argument("--segments", type=int, default=16, help="segments when solving")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0 = PyTorch's default")
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16"])
    parser.add_argument("--cpu_time", action="store_true", help="count CPU seconds: for one thread on a busy machine")
    args = parser.parse_args()
    args.clock = time.process_time if args.cpu_time else time.perf_counter
    train.keep_freed_memory()
    if args.threads:
        torch.set_num_threads(args.threads)
    dtype, reason = machine.pick_dtype(args.dtype, torch.device("cpu"))
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {reason}")

    common = dict(pos_encodings="rope", loss="stablemax", halt_exploration_prob=0.1, puzzle_emb_ndim=0, grad_updates=2)
    nano = dataclasses.replace(hrm.PRESETS["nano"], **common)
    cycled = dataclasses.replace(nano, H_cycles=2, L_cycles=2)
    wide = dataclasses.replace(hrm.PRESETS["paper"], **common, H_layers=args.layers, L_layers=args.layers)
    n, layers = args.nano_batch, f"{args.layers}+{args.layers} layers"
    sizes = [(cycled, n, f"nano size, 2 x 2 cycles, batch {n}"),
             (nano, n, f"nano size, its {nano.H_cycles} x {nano.L_cycles} cycles, batch {n}"),
             (wide, args.batch, f"width 512, {layers}, 2 x 2 cycles, batch {args.batch}")]
    check(cycled, dtype, n)
    for config, B, title in sizes:
        table(f"training, {title}", "puzzle-segments/s", trainers(config, dtype, B), B, args)
    for name in ("hrm.py, bootstrap", "hrm.py, none"):
        shares(f"{name}, {sizes[0][2]}", trainers(cycled, dtype, n)[name], rounds=args.repeats)
    for config, B, title in sizes:
        functions = solvers(config, dtype, B, args.segments)
        table(f"solving, {args.segments} segments, {title}", "puzzles/s", functions, B, args)


if __name__ == "__main__":
    main()
