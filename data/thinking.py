"""How an HRM thinks: the tables and figures of five analyses of a trained model.

    print_analysis("segments", model, data, batches, autocast, [1, 2, 4, 8, 16, 32], plot="segments.png")
    print_analysis("residual", model, data, batches, autocast, [16], baseline=recurrent_model)

    segments       scores after more and more segments, also more than in training (inference-time scaling)
    act            what the Q values save when they halt puzzles (adaptive computation), and what that costs
    residual       how far each update moves its state
    participation  how many dimensions the states of H and of L take
    answers        the answers of a few puzzles as they form

B puzzles, T cells, P prefix positions, C = n_embd; z_H, z_L (B, P+T, C) are the states, of which a segment makes some
updates. A batch is a dict of tensors on the model's device, as for HRM.step. `batches` is a function that makes an
iterable of the test split's, `autocast` one that makes the context in which the model computes.

Forward residual: |z_new - z_old| / |z_new| of an update, with the L2 norm over C, averaged over all positions and
puzzles. It is shown against effective depth, the number of blocks applied so far. Rounding to bfloat16 alone makes
about 0.01 of it, which float32 does not. The paper's claim (section on hierarchical convergence): in a plain recurrent
net the residual soon dies out, while H converges steadily, and L within each of H's cycles, after which H resets it and
its residual jumps. That net is here an HRM with L_layers 0, whose one module is updated by z_H = H(z_H + x).

Participation ratio: (sum of the eigenvalues)^2 / (sum of their squares) of the covariance of state vectors; C if they
vary alike in all directions, 1 if along one line. The vectors are those of all cells, without the prefix, after all
updates of a module. The paper's claim (section on brain correspondence): of 512, on Sudoku-Extreme, trained, 89.95 for
z_H and 30.22 for z_L, of which only z_H's grows with the number of trajectories.

residual and participation look at the first MOST puzzles. No analysis changes the model or the global random state.
"""
import functools
import re

import numpy as np
import torch

from data.common import atomic_write
from data.show import check_plot, draw_lines, print_rows, show_thinking, side_by_side, thinking_boards

ANALYSES = ("segments", "act", "residual", "participation", "answers")
MOST = 256  # puzzles whose states are looked at
ROWS = 32  # lines of a table of updates
SHOWN, BOARDS = 3, 8  # puzzles that are drawn; boards of one in the figure
PAPER_RATIOS = 89.95, 30.22, 512  # participation ratios of z_H and z_L, and the most that they could be
ESCAPE = re.compile("\033\\[([0-9;]*)m")  # a change of colour on a terminal
TINTS = {"2": "gray", "31": "tab:red", "32": "tab:green"}  # its codes, beside those of a palette
FONT = {"family": "DejaVu Sans Mono"}  # of a figure of text; comes with matplotlib
ADVANCE, LINE = 0.602, 1.204  # width and height of its characters, in units of its size


def print_analysis(name, model, data, batches, autocast, depths, baseline=None, plot=""):
    """Print the table of one of ANALYSES, or its drawings, and write its figure.

    model: an HRM. data: holds grade, draw and verdict, and identifiers where puzzles have their own. depths: ascending
    numbers of segments; those of segments and act are all tried, the others take the last. baseline: of residual, an
    HRM with L_layers 0 to compare with. plot: a .png file to draw to, "" for none. Raises ValueError, one line, before
    the work, for another name, a baseline that does not fit, and a file that cannot be written.
    """
    if name not in ANALYSES:
        raise ValueError(f"--analysis {name}: give one of {', '.join(ANALYSES)}")
    if baseline is not None:
        check_baseline(name, model.config, baseline.config)
    if plot:
        check_plot(plot)
    was_training = model.training
    model.eval()
    try:
        if name == "segments":
            print_segments(model, data, batches, autocast, depths, plot)
        elif name == "act":
            print_act(model, batches, autocast, depths, plot)
        elif name == "residual":
            print_residuals(model, batches, autocast, depths[-1], baseline, plot)
        elif name == "participation":
            print_participation(model, batches, autocast, depths[-1], plot)
        else:
            print_answers(model, data, batches, autocast, depths[-1], plot)
    finally:
        model.train(was_training)
    if plot:
        print(f"wrote {plot}")


def check_baseline(name, config, other):
    """ValueError, one line, unless analysis `name` of a model of `config` takes a baseline of the config `other`."""
    if name != "residual":
        raise ValueError(f"--baseline goes with --analysis residual, not {name}; leave it out")
    for field in ("seq_len", "vocab_size", "num_puzzle_identifiers"):
        if getattr(other, field) != getattr(config, field):
            raise ValueError(f"--baseline has {field} {getattr(other, field)}, the model {getattr(config, field)}; "
                             "give one that was trained on the same data")
    if other.L_layers:
        raise ValueError(f"--baseline has two modules (L_layers {other.L_layers}); give an HRM with --L_layers 0")


def thinned(items, most):
    """At most `most` (2 or more) of a list, evenly spaced, its first and last among them."""
    places = range(len(items)) if len(items) <= most else np.linspace(0, len(items) - 1, most).round().astype(int)
    return [items[i] for i in places]


def first(batches, most):
    """The first `most` puzzles: batches, the last of which may be cut."""
    for batch in batches:
        yield {name: values[:most] for name, values in batch.items()}
        most -= len(batch["inputs"])
        if most <= 0:
            return


# ---- scores by the number of segments


def print_segments(model, data, batches, autocast, depths, plot=""):
    """Scores of the test split after each number of segments. Arguments as for print_analysis."""
    with autocast():
        scores = model.evaluate(batches(), depths, data.grade)
    names = [name for name in scores[depths[-1]] if name != "segments"]
    means = {name: [named[name].mean().item() for named in scores.values()] for name in names}
    trained = model.config.halt_max_steps
    labels = [f"{depth} (training)" if depth == trained else str(depth) for depth in scores]
    print(f"\nscores of {len(scores[depths[-1]][names[0]]):,} test puzzles by segments (M_max); {trained} in training")
    print_rows("segments", names, list(zip(labels, *means.values())))
    if depths[-1] <= trained:
        print(f"  no more segments than in training: --depths {trained},{2 * trained},{4 * trained} would go on")
    if plot:
        draw_lines(plot, {name: (list(scores), values, "o-") for name, values in means.items()}, mark=trained, base=2,
                   title="more segments at test than in training", xlabel="segments", ylabel="share of the test split")


def print_act(model, batches, autocast, depths, plot=""):
    """What halting by the Q values saves at each largest number of segments. Arguments as for print_analysis."""
    with autocast():
        fixed, act = (model.evaluate(batches(), depths, act_eval=act_eval) for act_eval in (False, True))
    rows = savings(fixed, act)
    print("\nexact accuracy when all segments are run (fixed), and when each puzzle halts by its Q values (ACT)\n"
          f"trained with at most {model.config.halt_max_steps} segments")
    print_rows("at most", ["fixed", "ACT", "difference", "segments", "saved"],
               [(str(depth), all_run, halted, f"{100 * (halted - all_run):+.2f} pts", f"{used:.2f}", f"{saved:.1%}")
                for depth, all_run, halted, used, saved in rows])
    if plot:
        depth, all_run, halted, used, _ = zip(*rows)
        draw_lines(plot, {"fixed": (depth, all_run, "o-"), "ACT": (used, halted, "o-")}, base=2,
                   title="adaptive computation", xlabel="mean segments used", ylabel="exact accuracy")


def savings(fixed, act):
    """[(depth, exact accuracy of fixed, of act, mean segments of act, share of the segments saved), ...].

    fixed, act: depth -> name -> (N,) scores, as HRM.evaluate returns them.
    """
    rows = []
    for depth, named in act.items():
        used = named["segments"].mean().item()
        exact = [scores[depth]["exact_accuracy"].mean().item() for scores in (fixed, act)]
        rows.append((depth, *exact, used, 1 - used / depth))
    return rows


# ---- what the states do


@torch.no_grad()
def trajectory(model, batch, segments):
    """Yields ("L" or "H", its state before, its state after), (B, P+T, C) each, of every update of `segments` segments.

    To be gone through in the context in which the model computes.
    """
    start = model.initial_carry(batch)
    states = {"H": start.z_H, "L": start.z_L}
    for _ in range(segments):
        for level, z_H, z_L in model.updates(states["H"], states["L"], start.data):
            before, states = states, {"H": z_H, "L": z_L}
            yield level, before[level], states[level]


def residuals(model, batches, segments):
    """Forward residuals (see the top of the file): [(blocks applied so far, segment from 1, "L" or "H", mean), ...]."""
    sums, puzzles, c = 0, 0, model.config
    for batch in batches:
        sums = sums + np.array([_moved(old.float(), new.float()) for _, old, new in trajectory(model, batch, segments)])
        puzzles += len(batch["inputs"])
    levels = c.updates * segments
    blocks = np.cumsum([c.L_layers if level == "L" else c.H_layers for level in levels]).tolist()
    segment = (1 + np.arange(len(levels)) // len(c.updates)).tolist()
    return list(zip(blocks, segment, levels, (sums / puzzles).tolist()))


def _moved(old, new):
    """States (B, P+T, C) before and after an update -> its residual, a sum over puzzles of means over positions."""
    return ((new - old).norm(dim=-1) / new.norm(dim=-1)).mean(dim=1).sum().item()


def print_residuals(model, batches, autocast, segments, baseline=None, plot=""):
    """Forward residuals along `segments` segments, and of a baseline over about as many blocks."""
    puzzles, depth = list(first(batches(), MOST)), model.config.depth
    with autocast():
        found = residuals(model, puzzles, segments)
        values = {level: {blocks: value for blocks, _, of, value in found if of == level}
                  for level in "LH" if level in model.config.updates}
        if baseline is not None:
            rounds = max(1, round(segments * depth / baseline.config.depth))  # its segments may be few and long
            values["recurrent"] = {blocks: value for blocks, _, _, value in residuals(baseline, puzzles, rounds)}
        dtype = str(model.compute_dtype()).removeprefix("torch.")
    rows = [(blocks, -(-blocks // depth), *(of.get(blocks, np.nan) for of in values.values()))
            for blocks in sorted({blocks for of in values.values() for blocks in of})]
    number = sum(len(batch["inputs"]) for batch in puzzles)
    print(f"\nforward residuals |z_new - z_old| / |z_new|, mean over positions and {number:,} puzzles, in {dtype}\n"
          f"a segment applies {depth} blocks"
          + "; rounding makes about 0.01 of each, --dtype float32 does not" * (dtype != "float32"))
    print_rows("blocks", ["segment", *values],
               [(str(blocks), str(segment), *rest) for blocks, segment, *rest in whole_segments(rows)])
    if plot:
        lines = {name: (list(of), list(of.values()), ".-") for name, of in values.items()}
        draw_lines(plot, lines, title="forward residuals", xlabel="effective depth (blocks applied)", yscale="log",
                   ylabel="|z_new - z_old| / |z_new|")


def whole_segments(rows):
    """At most ROWS of the rows (blocks, segment, ...), of evenly spaced segments, which are whole if they fit."""
    segments = sorted({row[1] for row in rows})
    kept = thinned(segments, max(2, ROWS * len(segments) // len(rows)))
    return thinned([row for row in rows if row[1] in kept], ROWS)


class Moments:
    """Number, sum and second moments of vectors, in float64: all that the participation ratio takes."""

    def __init__(self):
        self.number, self.sum, self.second = 0, 0, 0

    def add(self, vectors):
        """vectors (..., C)"""
        vectors = vectors.flatten(0, -2)
        vectors = (vectors.cpu() if vectors.device.type == "mps" else vectors).double()  # there is no float64 on MPS
        self.number += len(vectors)
        self.sum = self.sum + vectors.sum(dim=0)
        self.second = self.second + vectors.T @ vectors

    def participation_ratio(self):
        """trace(S)^2 / trace(S S) of the covariance S, which is what the eigenvalues give; nan without vectors."""
        if not self.number:
            return np.nan
        mean = self.sum / self.number
        S = self.second / self.number - torch.outer(mean, mean)  # (C, C)
        return (S.trace() ** 2 / S.square().sum()).item()


def participation(model, batches, segments):
    """Participation ratios of the first n puzzles: [(n, z_H's, z_L's), ...] for n = 1, 2, 4, ... and all of them."""
    moments, found, prefix = {"H": Moments(), "L": Moments()}, {}, model.prefix_len
    for n, batch in _doublings(batches):
        for level, _, state in trajectory(model, batch, segments):
            moments[level].add(state[:, prefix:])
        found[n] = [of.participation_ratio() for of in moments.values()]
    return [(n, *ratios) for n, ratios in found.items() if n & (n - 1) == 0 or n == max(found)]


def _doublings(batches):
    """(puzzles so far, batch), where batches are cut after 1, 2, 4, 8, ... puzzles."""
    n = 0
    for batch in batches:
        rest = len(batch["inputs"])
        while rest:
            size, start = min(rest, (1 << n.bit_length()) - n), len(batch["inputs"]) - rest
            n, rest = n + size, rest - size
            yield n, {name: values[start : start + size] for name, values in batch.items()}


def untrained(model, seed=0):
    """A model of the same config as it is before training, on the same device, from a seed of its own."""
    with torch.random.fork_rng(devices=[]):  # no device's: only the CPU's is seeded, where the weights are drawn
        torch.default_generator.manual_seed(seed)
        new = type(model)(model.config)
    return new.to(next(model.parameters())).eval()


def print_participation(model, batches, autocast, segments, plot=""):
    """Participation ratios of the states along `segments` segments, of the model and of an untrained one."""
    puzzles = list(first(batches(), MOST))
    with autocast():
        rows, before = (participation(of, puzzles, segments) for of in (model, untrained(model)))
    print(f"\nparticipation ratios of the states over {segments} segments, of at most C = {model.config.n_embd}\n"
          "(paper, trained on Sudoku-Extreme: z_H {}, z_L {} of {})".format(*PAPER_RATIOS))
    print_rows("puzzles", ["z_H", "z_L", "z_H / z_L", "untrained: z_H", "z_L", "z_H / z_L"],
               [(str(n), H, L, H / L, H0, L0, H0 / L0) for (n, H, L), (_, H0, L0) in zip(rows, before)], digits=2)
    if plot:
        lines = {}
        for suffix, found, style in (("", rows, "o-"), (", untrained", before, "s--")):
            n, *ratios = zip(*found)
            lines |= {f"{state}{suffix}": (n, values, color + style)
                      for state, values, color in zip(("z_H", "z_L"), ratios, ("C0", "C1"))
                      if values[0] == values[0]}  # one module has no z_L
        draw_lines(plot, lines, base=2, title=f"participation ratio, of at most {model.config.n_embd}",
                   xlabel="puzzles whose trajectories are taken", ylim=(0, None))


# ---- answers


def print_answers(model, data, batches, autocast, segments, plot=""):
    """Draw the first puzzles and every new answer to them; the figure has at most BOARDS of each puzzle's."""
    puzzles = list(first(batches(), SHOWN))
    inputs, labels = (torch.cat([batch[name] for batch in puzzles]).cpu().numpy() for name in ("inputs", "labels"))
    print()
    show_thinking(model, data, inputs, labels, segments, False, autocast)
    if plot:
        lines = []
        for boards, verdict in thinking_boards(model, data, inputs, labels, segments, False, autocast, color=True):
            boards = boards[:1] + thinned(boards[1:], BOARDS - 1)  # the puzzle, answers
            lines += [*side_by_side(boards, columns=10**6), verdict, ""]
        draw_terminal(plot, lines[:-1])


def runs(line):
    """A line for a terminal -> [(column, text, colour, background or None, bold), ...], each in one style."""
    found, column, codes = [], 0, ""
    for i, part in enumerate(ESCAPE.split(line)):  # texts and, between them, the codes of escapes
        if i % 2:
            codes = part
        elif part:
            of_palette = {kind: palette(int(number)) for kind, number in re.findall(r"\b([34]8);5;(\d+)", codes)}
            color = of_palette.get("38") or TINTS.get(codes, "black")
            found.append((column, part, color, of_palette.get("48"), codes == "1"))
            column += len(part)
    return found


def palette(number):
    """Colour 16 to 255 of a terminal's 256: (red, green, blue) in 0..1."""
    if number >= 232:
        return ((8 + 10 * (number - 232)) / 255,) * 3
    levels = (0, 95, 135, 175, 215, 255)  # of a cube of 6 x 6 x 6
    return tuple(levels[(number - 16) // place % 6] / 255 for place in (36, 6, 1))


# ---- drawing


def draw_terminal(path, lines):
    """Write what a terminal would show of lines with colours as a figure."""
    from matplotlib.collections import PathCollection
    from matplotlib.figure import Figure
    from matplotlib.path import Path
    from matplotlib.textpath import TextPath

    glyphs = functools.cache(lambda text, bold: TextPath((0, 0), text, 1, prop=FONT | {"weight": 400 + 300 * bold}))
    width, height = ADVANCE * max(len(ESCAPE.sub("", line)) for line in lines), LINE * len(lines)
    scale = min(0.14, 48 / max(width, height))  # inches for a unit of the font's size
    figure = Figure(figsize=(scale * (width + 2), scale * (height + 2)))
    axes = figure.add_axes((0, 0, 1, 1), xlim=(-1, width + 1), ylim=(-height - 1, 1))
    axes.set_axis_off()
    cells, texts = [], []  # (path, colour) of each
    for row, line in enumerate(lines):
        for column, text, color, background, bold in runs(line):
            x, y = ADVANCE * column, -LINE * (row + 1)
            if background is not None:
                corner = np.array([ADVANCE * len(text), LINE])
                cells.append((Path(Path.unit_rectangle().vertices * corner + (x, y)), background))
            if text.strip():  # or there would be no path
                glyph = glyphs(text, bold)
                texts.append((Path(glyph.vertices + (x, y + LINE / 4), glyph.codes), color))
    for paths in filter(None, (cells, texts)):
        shapes, colors = zip(*paths)
        axes.add_collection(PathCollection(shapes, facecolors=colors, linewidths=0), autolim=False)
    with atomic_write(path) as file:
        figure.savefig(file, format="png", dpi=120)
