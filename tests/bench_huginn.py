"""Speed of decoding: the preallocated cache of huginn.py against a dictionary of tokens. Ratios within one run.

    python tests/bench_huginn.py --context 512 --num_steps 32 --repeats 5

The straightforward cache keeps a dictionary position -> (key, value) for every (step, layer) and stacks it anew
whenever a layer attends, as one writes it first: any number of steps per token is easy then. Weights, prompt and
everything else are the same on both sides, and so must be the tokens. Alternating repeats; medians.
"""

import argparse
import os
import statistics
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import torch  # noqa: E402

from huginn import Huginn, HuginnConfig, KVCache  # noqa: E402


class DictionaryCache(KVCache):
    """The same interface as KVCache; what was stored is stacked at every use."""

    def __init__(self, config, num_steps):
        self.steps, self.n_core = num_steps, config.n_layers_in_recurrent_block
        self.n_ends = config.n_layers_in_prelude + config.n_layers_in_coda
        self.slots, self.length, self.active, self.k = {}, 0, None, torch.empty(0)

    def update(self, slot, k, v):
        """Store k, v (B, nh, T, hd) token by token; stack all tokens so far."""
        tokens = self.slots.setdefault(slot, {})
        for i, position in enumerate(self.positions[0].tolist()):
            tokens[position] = k[:, :, i], v[:, :, i]
        k, v = (torch.stack([tokens[position][part] for position in range(self.length)], dim=2) for part in (0, 1))
        return k, v, self.mask

    def fill(self, steps_done):
        """Nothing to fill here: no token exits early."""


@torch.no_grad()
def decode(model, cache, prompt, new_tokens, num_steps):
    """Greedy tokens after a prompt (B, T), and the seconds that they took; reading the prompt is not counted."""
    B, T = prompt.shape
    noise = model.noise_table(T + new_tokens, 0)
    at = torch.arange(T).expand(B, T)
    logits, _, _ = model.advance(prompt, at, noise[at], cache, num_steps, at >= 0)
    tokens, started = [], time.perf_counter()
    for i in range(new_tokens):
        tokens.append(logits.argmax(dim=-1))
        at = torch.full((B, 1), T + i)
        logits, _, _ = model.advance(tokens[-1][:, None], at, noise[at], cache, num_steps, at >= 0)
    return torch.stack(tokens), time.perf_counter() - started


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=512, help="tokens of the prompt")
    parser.add_argument("--num_steps", type=int, default=32, help="steps of the core per token")
    parser.add_argument("--new_tokens", type=int, default=16, help="tokens to write in a repeat")
    parser.add_argument("--batch_size", type=int, default=1, help="rows")
    parser.add_argument("--n_embd", type=int, default=128, help="width of the model")
    parser.add_argument("--layers", type=int, default=1, help="layers of the core")
    parser.add_argument("--repeats", type=int, default=5, help="alternating repeats; the median counts")
    a = parser.parse_args()
    torch.manual_seed(0)
    config = HuginnConfig(vocab_size=257, block_size=a.context + a.new_tokens, n_embd=a.n_embd,
                          n_head=max(a.n_embd // 32, 1), intermediate_size=3 * a.n_embd, n_layers_in_prelude=1,
                          n_layers_in_recurrent_block=a.layers, n_layers_in_coda=1)
    model = Huginn(config).eval()
    prompt = torch.randint(257, (a.batch_size, a.context))
    seconds, tokens = {"dictionary": [], "preallocated": []}, {}
    for _ in range(a.repeats):
        for name in seconds:
            cache = (DictionaryCache(config, a.num_steps) if name == "dictionary" else
                     KVCache(config, a.batch_size, a.context + a.new_tokens, a.num_steps))
            tokens[name], time_taken = decode(model, cache, prompt, a.new_tokens, a.num_steps)
            seconds[name].append(time_taken)
    assert torch.equal(*tokens.values()), "the two caches must give the same tokens"
    print(f"{a.context} tokens of context, {a.num_steps} steps, width {a.n_embd}, {a.layers} core layers, batch "
          f"{a.batch_size}, float32, {torch.get_num_threads()} threads, torch {torch.__version__}")
    speed = {name: a.batch_size * a.new_tokens / statistics.median(times) for name, times in seconds.items()}
    for name, value in speed.items():
        spread = [a.batch_size * a.new_tokens / t for t in (max(seconds[name]), min(seconds[name]))]
        print(f"  {name:>12}: {value:8.1f} tokens/s ({spread[0]:.1f} to {spread[1]:.1f}), "
              f"{value / speed['dictionary']:.1f}x")


if __name__ == "__main__":
    main()
