"""Cost of branches: MoDr against one plain LoRA and against the frozen Huginn it goes on. Ratios within one run.

    python tests/bench_modr.py --repeats 20

A forward pass and a training step (forward, backward, optimizer) on the same rows, by turns; medians. The frozen Huginn
has no training step of its own; in its place stands one that trains all of its weights.
"""

import argparse
import dataclasses
import os
import statistics
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import torch  # noqa: E402

import modr  # noqa: E402
from huginn import Huginn  # noqa: E402
from modr import MoDr  # noqa: E402


def forward(model, batch, steps, _):
    with torch.no_grad():
        model.hidden_states(batch["inputs"], steps)


def train(model, batch, steps, optimizer):
    model.split_steps = lambda num_steps=None: steps  # the same number for all
    loss, metrics, _ = model.step(batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    model.finish_step(metrics)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="nano", choices=modr.PRESETS, help="size")
    parser.add_argument("--branches", type=int, default=4, help="branches of the MoDr")
    parser.add_argument("--batch_size", type=int, default=64, help="rows")
    parser.add_argument("--tokens", type=int, default=32, help="tokens of a row")
    parser.add_argument("--repeats", type=int, default=20, help="turns; the median counts")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"), help="of the forward pass")
    a = parser.parse_args()
    torch.manual_seed(0)
    config, dtype = modr.PRESETS[a.preset], getattr(torch, a.dtype)
    frozen = Huginn(modr.plain_config(config))
    one, many = (MoDr(dataclasses.replace(config, num_branches=n), frozen) for n in (1, a.branches))
    full = Huginn(frozen.config)
    names = {"frozen Huginn": full, "one LoRA": one, f"MoDr, {a.branches} branches": many,
             "the same, forward": MoDr(dataclasses.replace(many.config, route_pool="forward"), frozen)}
    tokens = torch.randint(config.vocab_size, (a.batch_size, a.tokens))
    batch = {"inputs": tokens, "labels": tokens}
    steps = (config.mean_recurrence + 1 - config.mean_backprop_depth, config.mean_backprop_depth)
    optimizers = {name: model.configure_optimizers(1e-3, 0.0, (0.9, 0.95))[0] for name, model in names.items()}
    print(f"{a.preset}, {a.batch_size} x {a.tokens} tokens, steps {steps}, {a.dtype}, {torch.get_num_threads()} "
          f"threads, torch {torch.__version__}")
    for what, call in (("forward", forward), ("training step", train)):
        seconds = {name: [] for name in names}
        for turn in range(a.repeats + 2):  # the first two warm up
            for name, model in names.items():
                started = time.perf_counter()
                with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
                    call(model.train(), batch, steps, optimizers[name])
                seconds[name].append(time.perf_counter() - started)
        medians = {name: statistics.median(times[2:]) for name, times in seconds.items()}
        for name, value in medians.items():
            label = "full Huginn" if name == "frozen Huginn" and call is train else name
            print(f"  {what:>13}, {label:18} {1e3 * value:8.1f} ms (least {1e3 * min(seconds[name]):.1f}), "
                  f"{value / medians['one LoRA']:.3f} of one LoRA")


if __name__ == "__main__":
    main()
