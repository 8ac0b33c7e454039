"""Which tokens DND selects, and what that costs: the tables, texts and figure that follow a DND model's scores.

    print_selection(model, data, batches, autocast, base=plain_model, plot="selection.png")
    show_selected(model, tokenizer, tokenizer.encode("12+34="), autocast)       # of one text, whose tokens
    for length, formula, counted in added_flops(model, [1024, 4096]): ...       # per cent; the model may be on meta

B rows, T tokens, L nested layers, N tokens of all rows, padding left out. A batch is a dict of tensors: inputs, labels
(B, T) int64, labels IGNORE where not scored, perhaps prompt_lengths (B,). What follows a row's last label is padding.
Entropies are those of the next token's distribution, in nats. `autocast` is a function that makes the context in which
the model computes.

FLOPs are found in two ways. The formula is the model's own estimate. The count is what PyTorch counts of the products
in a forward pass, of a model without memory on the meta device; it has queries meet all keys, where the formula has
them meet the half that comes before them, and it takes the selected tokens as a whole number, which shows in short
texts. Neither includes the routers, which take as much as a norm.
"""
import copy
import dataclasses
import functools
import math
import shutil
import statistics
import time
import unicodedata

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from data.common import atomic_write
from data.show import PLAIN, check_plot, in_color, print_rows

IGNORE = -100  # the label of a token that is not scored
PAPER_RATIOS, PAPER_ADDED = (0.178, 0.242), 6.27  # share selected, least and most of all layers; per cent of FLOPs
BINS = 4096  # of the histograms of p, which may lie close together
CHUNK = 2**24  # logits that are held in float32 at once
TIMED = 2048  # tokens that are timed at once, about
LONGEST = 300  # tokens of an example that are shown
BRIGHTNESS = [f"\033[38;5;16;48;5;{color}m" for color in (230, 222, 214, 208)]  # black on ever deeper orange


# ---- one pass over the texts


@dataclasses.dataclass
class Selection:
    """What a pass over N tokens has found; all arrays are NumPy's."""

    ratio: np.ndarray  # (L,) float64, share of the tokens that each layer selected
    mean: np.ndarray  # (L,) float64, of p
    sd: np.ndarray  # (L,) float64, of p
    histogram: np.ndarray  # (L, BINS) int64, of p from 0 to 1
    count: np.ndarray  # (N,) int64, layers that selected the token
    scored: np.ndarray  # (N,) bool, whether the token has a label
    entropy: dict  # "base" (where there is one), "depth 1", "depth 2" -> (N,) float32
    rows: list  # a few texts, (n,) int64 tensors of their tokens
    batch: dict  # the first batch

    @property
    def before(self):
        """The names of what there was before the nested passes, the one that counts first."""
        return [name for name in self.entropy if name != "depth 2"]


def gather(model, batches, autocast, base=None):
    """Run the model, at both depths, and `base` over the batches -> Selection. ValueError if they hold no token."""
    parts, rows, first, moments, histogram = [], [], None, 0, 0
    for batch in batches:
        first = batch if first is None else first
        is_token = _is_token(batch["labels"])
        rows += [batch["inputs"][i][is_token[i]] for i in {0, len(is_token) // 2}]
        entropy, selected, p = _run(model, base, batch["inputs"], is_token, autocast)
        moments = moments + np.stack([selected.sum(axis=1), p.sum(axis=1), (p**2).sum(axis=1)])  # (3, L)
        histogram = histogram + np.stack([np.histogram(layer, BINS, (0, 1))[0] for layer in p])
        scored = (batch["labels"] != IGNORE)[is_token].cpu().numpy()
        parts.append({"count": selected.sum(axis=0), "scored": scored} | entropy)
    if not sum(len(part["count"]) for part in parts):
        raise ValueError("the texts hold no labelled token; give batches with labels")
    entropy = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    count, scored = entropy.pop("count"), entropy.pop("scored")
    ratio, mean, square = moments / len(count)
    rows = [row for row in rows if len(row)]
    chosen = sorted({*np.linspace(0, len(rows) - 1, 3).round().astype(int).tolist()})
    return Selection(ratio, mean, np.sqrt(np.maximum(square - mean**2, 0)), histogram, count, scored, entropy,
                     [rows[i] for i in chosen], first)


def _is_token(labels):
    """(B, T) bool: true up to a row's last label."""
    return (labels != IGNORE).flip(1).cumsum(dim=1).flip(1) > 0


@torch.no_grad()
def _run(model, base, inputs, is_token, autocast):
    """The n tokens of a batch: name -> entropies (n,) float32, selected (L, n) bool, p (L, n) float64."""
    entropy, trace = {}, []
    with autocast():
        if base is not None:
            entropy["base"] = _entropies(base, base.hidden_states(inputs)[is_token])
        entropy["depth 1"] = _entropies(model, model.hidden_states(inputs, depth=1)[is_token])
        hidden = model.hidden_states(inputs, depth=2, is_token=is_token, trace=trace)
        entropy["depth 2"] = _entropies(model, hidden[is_token])
    selected, p = (torch.stack(part)[:, is_token].cpu().numpy() for part in zip(*trace))
    return entropy, selected, p.astype(np.float64)


def _entropies(model, hidden):
    """Entropies (n,) float32 of the next token after hidden states (n, C); never are all logits in memory."""
    parts = []
    for part in hidden.split(max(1, CHUNK // model.config.vocab_size)):
        log_p = model.head(part).float().log_softmax(dim=-1)  # (part, V)
        parts.append(-(log_p.exp() * log_p).sum(dim=-1))
    return torch.cat(parts).cpu().numpy()


# ---- what it costs


def added_flops(model, lengths, ratios=None):
    """What the nested passes add to the FLOPs of a forward pass, in per cent -> [(length, formula, counted), ...].

    model: only its class and its config are used, so it may be on the meta device, and as large as one likes.
    lengths: of a text, in tokens, whatever block_size is. ratios: share of the tokens that is selected, in all nested
    layers or (L,) in each; default k_target.
    """
    layers = list(model.config.nested)
    ratios = np.broadcast_to(model.config.k_target if ratios is None else ratios, len(layers)).tolist()
    with torch.device("meta"):  # bfloat16 is the one type for which experts work there
        plain = type(model)(dataclasses.replace(model.config, block_size=max(lengths))).to(torch.bfloat16).eval()
    kinds = {plain.config.has_experts(layer): layer for layer in layers}  # layers of a kind cost the same
    count = functools.cache(lambda kind, k: _count_layer(plain, kinds[kind], k))
    rows = []
    for T in lengths:
        formula = sum(_formula(plain, layer, T, ratio) for layer, ratio in zip(layers, ratios))
        counted = sum(count(plain.config.has_experts(layer), round(ratio * T))
                      for layer, ratio in zip(layers, ratios))
        tokens = torch.zeros(1, T, dtype=torch.long, device="meta")
        rows.append((T, 300 * formula / plain.flops((1, T), 0),  # the formula is of a training step: three times that
                     100 * counted / _count(plain, tokens, depth=1)))
    return rows


def _formula(plain, layer, T, ratio):
    """Estimated FLOPs of one layer's nested pass over a text of T tokens, forward only."""
    one = copy.copy(plain)
    one.config = dataclasses.replace(plain.config, nested_first=layer, nested_last=layer)
    return (one.flops((1, T), ratio) - one.flops((1, T), 0)) / 3


def _count_layer(plain, layer, k):
    """Counted FLOPs of one layer over k tokens."""
    if k == 0:
        return 0
    x = torch.zeros(1, k, plain.config.n_embd, dtype=torch.bfloat16, device="meta")
    return _count(plain.layers[layer], x, plain.rotary(torch.arange(k, device="meta")))


@torch.no_grad()
def _count(module, *inputs, **options):
    """Counted FLOPs of module(*inputs), on the meta device."""
    missing = {torch.ops.aten._grouped_mm: _grouped_mm_flops}
    with FlopCounterMode(display=False, custom_mapping=missing) as counter:
        module(*inputs, **options)
    return counter.get_total_flops()


def _grouped_mm_flops(a, b, *_, **__):
    """The product of rows a (n, K) with, for each, one of the matrices b (E, K, M), by shapes."""
    return 2 * math.prod(a) * b[-1]


def throughput(model, batch, autocast, repeats=3, new_tokens=16):
    """Tokens per second: "forward" or "decoding" -> depth 1 or 2 -> the median of alternating repeats, after one more.

    batch: its first rows are used, about TIMED tokens, padding not counted. In decoding their prompts are continued,
    greedily, at most 8 at once; the time to read them does not count. nan where there is no room to write.
    """
    is_token = _is_token(batch["labels"])
    rows = int((is_token.sum(dim=1).cumsum(dim=0) <= TIMED).sum().clamp(min=1))
    width = int(is_token[:rows].sum(dim=1).max().clamp(min=1))  # other rows of the batch may be longer
    inputs, is_token = batch["inputs"][:rows, :width], is_token[:rows, :width]
    lengths = batch.get("prompt_lengths", torch.full((rows,), width // 2)).tolist()
    longest = max(1, model.config.block_size // 2)  # or there would be no room for new tokens
    prompts = [row[:min(max(n, 1), longest)].tolist() for row, n in zip(inputs[:8], lengths)]
    speeds = {"forward": {1: [], 2: []}, "decoding": {1: [], 2: []}}
    with torch.no_grad(), autocast():
        for _ in range(repeats + 1):
            for depth in (1, 2):
                speeds["forward"][depth].append(_forward_speed(model, inputs, is_token, depth))
                speeds["decoding"][depth].append(_decoding_speed(model, prompts, new_tokens, depth))
    return {name: {depth: statistics.median(values[1:]) for depth, values in by_depth.items()}
            for name, by_depth in speeds.items()}


def _forward_speed(model, inputs, is_token, depth):
    started = time.perf_counter()
    hidden = model.hidden_states(inputs, depth=depth, is_token=is_token).flatten(0, 1)
    for part in hidden.split(max(1, CHUNK // model.config.vocab_size)):
        logits = model.head(part)
    logits[0, 0].item()  # waits for the device
    return int(is_token.sum()) / (time.perf_counter() - started)


def _decoding_speed(model, prompts, new_tokens, depth):
    steps = model.stream(prompts, max_new_tokens=new_tokens + 1, depth=depth, temperature=0.0)
    next(steps)  # has read the prompts
    started = time.perf_counter()
    written = sum(int((ids >= 0).sum()) for ids, _ in steps)
    return written / (time.perf_counter() - started) if written else math.nan


# ---- what the selected tokens are like


def correlation(x, y):
    """(Pearson's, Spearman's) correlation of x, y (N,); nan where a column is constant."""
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    return _pearson(x, y), _pearson(_ranks(x), _ranks(y))


def _pearson(x, y):
    if len(x) == 0 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return math.nan
    x, y = ((values - values.mean()) / np.ptp(values) for values in (x, y))  # in units that cannot underflow
    return float(x @ y / np.sqrt((x @ x) * (y @ y)))


def _ranks(values):
    """(N,) -> places in ascending order, from 1; equal values share the mean of theirs."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[inverse]


def by_count(found, n_layers, most=8):
    """Tokens by how many layers selected them: [(label, mean count, tokens, *means), ...], empty lines left out.

    means: for each name in found.before, the entropy there and its change to depth 2. Counts above 0 are put together
    where there would be more than `most` lines of them.
    """
    rows = []
    for group in [[0], *np.array_split(np.arange(1, n_layers + 1), min(n_layers, most))]:
        inside = (found.count >= group[0]) & (found.count <= group[-1])
        if inside.any():
            after = found.entropy["depth 2"][inside].mean(dtype=np.float64)
            before = [found.entropy[name][inside].mean(dtype=np.float64) for name in found.before]
            means = [value for mean in before for value in (mean, after - mean)]
            rows.append((_span(group), found.count[inside].mean(), int(inside.sum()), *means))
    return rows


def _span(numbers):
    return f"{numbers[0]}-{numbers[-1]}" if numbers[0] != numbers[-1] else str(numbers[0])


# ---- texts with the selected tokens marked


@torch.no_grad()
def show_selected(model, tokenizer, ids, autocast, legend=True):
    """Print a text and which of its tokens were selected, a line for each of up to three groups of nested layers.

    ids: list of ints or (T,) integer tensor, 1 to block_size tokens. On a terminal the background of a token deepens
    with the share of the group's layers that selected it; elsewhere that number stands below it (9 for more). What
    cannot be printed, such as a part of a character, is shown as its escape. Raises ValueError for other lengths and
    for models without nested layers.
    """
    trace, tokens = [], torch.as_tensor(ids, dtype=torch.long, device=model.norm.weight.device)
    if not len(tokens) or not len(model.config.nested):
        raise ValueError("show_selected needs a text of at least one token, and a model with nested layers")
    with autocast():
        model.hidden_states(tokens[None], depth=2, trace=trace)
    selected = torch.cat([chosen for chosen, _ in trace]).cpu().numpy()  # (L, T)
    groups = [group for group in np.array_split(np.arange(len(selected)), 3) if len(group)]
    counts = {f"layers {_span(group + model.config.nested[0])}": (selected[group].sum(axis=0), len(group))
              for group in groups}
    if legend:
        print("  who was selected: a token's background deepens with the share of the layers" if in_color() else
              "  who was selected: below each token the number of layers that did, . for none")
    pieces, margin = [_piece(tokenizer, number) for number in tokens.tolist()], max(map(len, counts)) + 4
    for line in _wrapped(pieces, max(20, min(shutil.get_terminal_size((120, 24)).columns, 120) - margin)):
        _print_line(pieces[line], {label: (count[line], most) for label, (count, most) in counts.items()}, margin)
    print()


def _print_line(pieces, counts, margin):
    """One line of a text. counts: label -> (how many layers selected each, of how many)."""
    if not in_color():
        print(" " * margin + "".join(pieces))
    for label, (count, most) in counts.items():
        if in_color():
            marked = (f"{BRIGHTNESS[math.ceil(4 * n / most) - 1]}{piece}{PLAIN}" if n else piece
                      for piece, n in zip(pieces, count.tolist()))
        else:
            marked = ((str(min(n, 9)) if n else ".") * _width(piece) for piece, n in zip(pieces, count.tolist()))
        print(f"  {label:{margin - 2}}" + "".join(marked))


def _piece(tokenizer, number):
    """A token as it is shown: its text, with escapes for all that does not print by itself."""
    try:
        text = tokenizer.token_bytes(number).decode("utf-8", errors="backslashreplace")
    except ValueError:  # published vocabularies are padded: the id has no bytes
        return f"<{number}>"
    return "".join(c if c.isprintable() and not unicodedata.combining(c) else ascii(c)[1:-1] for c in text)


def _width(piece):
    """Columns that a piece takes on a terminal; East Asian characters take two."""
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in piece)


def _wrapped(pieces, width):
    """Slices of pieces that fit into lines."""
    start, used = 0, 0
    for i, piece in enumerate(pieces):
        if used + _width(piece) > width and i > start:
            yield slice(start, i)
            start, used = i, 0
        used += _width(piece)
    yield slice(start, len(pieces))


# ---- the figure


def draw(path, model, found, flops):
    """Write the figure of four panels. flops: "k_target" or "measured" (ratios) -> rows of added_flops."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 8), layout="constrained")
    (ratio, cost), (entropy, score) = figure.subplots(2, 2)
    _draw_ratio(ratio, model.config, found)
    _draw_cost(cost, flops)
    _draw_entropy(entropy, found)
    _draw_scores(score, model, found)
    for axes in (ratio, cost, entropy, score):
        axes.legend(fontsize="small")
    with atomic_write(path) as file:
        figure.savefig(file, format="png", dpi=120)


def _draw_ratio(axes, config, found):
    axes.bar(list(config.nested), found.ratio, color="C0")
    axes.axhline(config.k_target, color="black", linestyle="--", label="k_target")
    axes.axhspan(*PAPER_RATIOS, color="C1", alpha=0.25, label="paper, by layer")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set(title="share of the tokens selected", xlabel="layer")


def _draw_cost(axes, flops):
    for (name, rows), style in zip(flops.items(), ("s--", "o-")):
        lengths, formula, counted = zip(*rows)
        axes.plot(lengths, formula, style, color="C0", label=f"formula, {name}")
        axes.plot(lengths, counted, style, color="C1", label=f"counted, {name}")
    axes.axhline(PAPER_ADDED, color="gray", linewidth=1, label="paper")
    axes.set_xscale("log", base=2)
    axes.set(title="FLOPs added to a forward pass", xlabel="tokens of a text", ylabel="%", ylim=(0, None))


def _draw_entropy(axes, found):
    _, number, _, before, change, *_ = zip(*by_count(found, len(found.ratio)))
    axes.plot(number, before, "o-", label=f"before ({found.before[0]})")
    axes.plot(number, change, "o-", label="change by DND")
    axes.axhline(0, color="gray", linewidth=1)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set(title="entropy of the next token", xlabel="layers that selected the token", ylabel="nats")


def _draw_scores(axes, model, found):
    """Histograms of p of up to three layers, as many steps as fit, over the range that they take."""
    chosen = sorted({*np.linspace(0, len(found.ratio) - 1, 3).round().astype(int).tolist()})
    total = found.histogram[chosen].sum(axis=0).cumsum() / found.histogram[chosen].sum()
    first, last = np.searchsorted(total, [0.001, 0.999])  # a few far away would hide the others
    step = max(1, (last - first) // 60)
    edges = np.arange(first, last + step + 1, step)  # in bins
    for i, j in enumerate(chosen):
        sums = [found.histogram[j, a:b].sum() / len(found.count) for a, b in zip(edges, edges[1:])]
        axes.stairs(sums, edges / BINS, color=f"C{i}", label=f"layer {model.config.nested[j]}")
        axes.axvline(float(model.nesting.tau[j]), color=f"C{i}", linestyle="--")
    axes.set(title="scores p, and tau (dashed)", xlabel="p", ylabel="share of the tokens", yscale="log")


# ---- all of it


def print_selection(model, data, batches, autocast, base=None, plot=""):
    """Print which tokens a model selects in which layers, what it costs, and what these tokens are like.

    model: a DND. data: holds the tokenizer. batches: an iterable of batches on the model's device, or a function that
    makes one; they are gone through once. base: the plain model that the training of DND started from, None if it is
    gone. plot: a .png file to draw to, "" for none. Raises ValueError, one line, before anything else if that file
    cannot be written, and if there is no token in the batches.
    """
    if plot:
        check_plot(plot)
    if not len(model.config.nested):
        print("no nested layers: no token is selected")
        return
    found = gather(model, batches() if callable(batches) else batches, autocast, base)
    flops = _print_tables(model, found)
    _print_speed(throughput(model, found.batch, autocast))
    _print_entropy(found)
    for i, row in enumerate(found.rows):
        show_selected(model, data.tokenizer, row[:LONGEST], autocast, legend=i == 0)
    if plot:
        draw(plot, model, found, flops)
        print(f"wrote {plot}")


def _print_tables(model, found):
    """What each layer selects, and FLOPs. Returns the latter as `draw` takes them."""
    config, low, high = model.config, *PAPER_RATIOS
    tau, beta = (values.detach().float().cpu().numpy() for values in (model.nesting.tau, model.nesting.beta))
    columns = np.stack([found.ratio, tau, beta, found.mean, found.sd], axis=1)  # (L, 5)
    print(f"\nselection on {len(found.count):,} tokens, k_target {config.k_target:g} (paper: ratios {low} to {high})")
    rows = [(str(layer), *row) for layer, row in zip(config.nested, columns.tolist())]
    print_rows("layer", ["ratio", "tau", "beta", "mean p", "sd p"], rows + [("mean", *columns.mean(axis=0).tolist())])
    power = config.block_size.bit_length() - 1
    lengths = [2**n for n in range(max(0, power - 3), power + 1)]
    flops = {"k_target": added_flops(model, lengths), "measured": added_flops(model, lengths, found.ratio)}
    print(f"\nFLOPs that nested passes add to a forward pass, in % (paper: {PAPER_ADDED}, length not named), by the\n"
          "formula, where a query meets half of the keys, and counted, where it meets all")
    print_rows("tokens", [f"{way}, {name}" for name in flops for way in ("formula", "counted")],
               [(f"{a[0]:,}", *a[1:], *b[1:]) for a, b in zip(*flops.values())], digits=2)
    return flops


def _print_speed(speeds):
    print("\ntokens per second")
    print_rows("", ["depth 1", "depth 2", "depth 2 / depth 1"],
               [(name, f"{at[1]:,.0f}", f"{at[2]:,.0f}", at[2] / (at[1] or math.nan)) for name, at in speeds.items()])


def _print_entropy(found):
    """How often a token was selected, against its entropy."""
    print("\ncorrelation of the number of layers that select a token with the entropy of the next one")
    rows = []
    for name in found.before:
        entropy = found.entropy[name]
        change = found.entropy["depth 2"] - entropy
        for label, values in (f"entropy, {name}", entropy), (f"change, {name} to depth 2", change):
            rows.append((label, *correlation(found.count, values),
                         *correlation(found.count[found.scored], values[found.scored])))
    print_rows("", ["Pearson", "Spearman", "of labelled ones: Pearson", "Spearman"], rows)
    print("\nentropy by the number of layers that select a token")
    heads = [head for name in found.before for head in (f"entropy, {name}", "change")]
    print_rows("layers", ["tokens", "share", *heads],
               [(label, f"{tokens:,}", tokens / len(found.count), *means)
                for label, _, tokens, *means in by_count(found, len(found.ratio))])
    print()
