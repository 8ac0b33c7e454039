"""Cost of nested passes: DND against the plain Qwen3, in time and in FLOPs. Ratios within one run.

    python tests/bench_dnd.py --repeats 20
    python tests/bench_dnd.py --preset nano-moe

A forward pass and a training step (forward, backward, optimizer, thresholds) on the same rows, by turns; medians. The
routers are random and the thresholds such that k_target of the tokens pass. "Over FLOPs" is the ratio of times divided
by the ratio of FLOPs: 1 where a FLOP of the nested passes costs as much as any other.
"""

import argparse
import os
import statistics
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import torch  # noqa: E402

import dnd  # noqa: E402
from dnd import DND  # noqa: E402


def forward(model, batch, _):
    with torch.no_grad():
        model.hidden_states(batch["inputs"])


def train(model, batch, optimizer):
    loss, metrics, _ = model.step(batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    model.finish_step(metrics)


@torch.no_grad()
def let_pass(model, tokens):
    """Random routers, and thresholds that let k_target of the tokens pass: layer after layer."""
    model.nesting.router.normal_(std=0.02)
    model.nesting.tau.fill_(2.0)
    for layer in range(len(model.config.nested)):
        model.hidden_states(tokens, trace=(trace := []))
        model.nesting.tau[layer] = trace[layer][1].quantile(1 - model.config.k_target)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="nano", choices=dnd.PRESETS, help="size")
    parser.add_argument("--batch_size", type=int, default=64, help="rows")
    parser.add_argument("--tokens", type=int, default=32, help="tokens of a row")
    parser.add_argument("--repeats", type=int, default=20, help="turns; the median counts")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"), help="of the forward pass")
    a = parser.parse_args()
    torch.manual_seed(0)
    dtype, tokens = getattr(torch, a.dtype), torch.randint(256, (a.batch_size, a.tokens))
    names = {"plain": DND(dnd.PLAIN_PRESETS[a.preset]), "DND": DND(dnd.PRESETS[a.preset])}
    batch = {"inputs": tokens, "labels": tokens}
    autocast = torch.autocast("cpu", dtype, enabled=dtype != torch.float32)
    with autocast:
        let_pass(names["DND"], tokens)
        names["DND"].hidden_states(tokens, trace=(trace := []))
    ratio = sum(selected.float().mean().item() for selected, _ in trace) / len(trace)
    names["DND"].config.alpha = names["DND"].config.gamma = 0.0  # the thresholds are computed and stay
    flops = {name: model.flops(tokens.shape, ratio) for name, model in names.items()}
    optimizers = {name: model.configure_optimizers(0.0, 0.0, (0.9, 0.95))[0] for name, model in names.items()}
    more = flops["DND"] / flops["plain"]
    print(f"{a.preset}, {a.batch_size} x {a.tokens} tokens, {ratio:.3f} selected, FLOPs of DND over plain {more:.3f}, "
          f"{a.dtype}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    for what, call in (("forward", forward), ("training step", train)):
        seconds = {name: [] for name in names}
        for _ in range(a.repeats + 2):  # the first two warm up
            for name, model in names.items():
                started = time.perf_counter()
                with autocast:
                    call(model.train(), batch, optimizers[name])
                seconds[name].append(time.perf_counter() - started)
        medians = {name: statistics.median(times[2:]) for name, times in seconds.items()}
        over = medians["DND"] / medians["plain"]
        print(f"  {what:>13}: plain {1e3 * medians['plain']:.1f} ms, DND {1e3 * medians['DND']:.1f} ms, time "
              f"{over:.3f}, over FLOPs {over / more:.3f}")


if __name__ == "__main__":
    main()
