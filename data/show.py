"""What a user sees of a model's work: tables, curves, boards side by side, texts as they are written."""
import contextlib
import itertools
import os
import re
import shutil
import sys
import tempfile

import numpy as np
import torch

from data.common import atomic_write

TINT, DIM, PLAIN = "\033[32m", "\033[2m", "\033[0m"


def in_color():
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ


def means(named):
    """name -> (N,) scores -> name -> their mean."""
    return {name: values.mean().item() for name, values in named.items()}


def print_scores(title, scores, groups):
    """Tables of depth -> name -> (N,) scores: of all by depth; of each group, as for print_table, where there are any.

    Names that begin with branch_ are shares of a row's tokens, which do not depend on the depth.
    """
    names, deepest = list(next(iter(scores.values()))), max(scores)
    shares = {name: scores[deepest][name] for name in names if name.startswith("branch_")}
    names = [name for name in names if name not in shares]
    print(f"{title}, {len(scores[deepest][names[0]]):,} in all\n  {'depth':>7}" + "".join(f"{n:>16}" for n in names))
    for depth, named in scores.items():
        print(f"  {depth:>7}" + "".join(f"{named[name].mean():>16.4f}" for name in names))
    for name in names:
        if name not in ("segments", "steps") and len(groups) > 1:
            print_table(f"{name} at depth", {depth: named[name] for depth, named in scores.items()}, groups)
    if shares:
        everything = [np.ones(len(next(iter(shares.values()))), bool)]
        print_table("share of tokens", shares, groups | {"all": everything})


def print_table(title, columns, groups):
    """A line per group, with its number of rows and, for each column, the mean over its masks of their means.

    columns: head -> (N,) scores. groups: label -> list of masks (N,) bool, one for a set, several for a mean of sets.
    """
    columns = {str(head): np.asarray(values, np.float64) for head, values in columns.items()}
    labels = [f"{label} ({sum(int(mask.sum()) for mask in masks):,})" for label, masks in groups.items()]
    width, wide = max(map(len, [title, *labels])), max(8, *(len(head) + 2 for head in columns))
    print(f"  {title:{width}}" + "".join(f"{head:>{wide}}" for head in columns))
    for label, masks in zip(labels, groups.values()):
        means = (np.mean([values[mask].mean() for mask in masks]) for values in columns.values())
        print(f"  {label:{width}}" + "".join(f"{mean:>{wide}.4f}" for mean in means))


def print_rows(title, heads, rows, digits=4):
    """A table: a line per row (label, *values), numbers with `digits` decimals, - for nan, texts as they are."""
    cells = [["-" if value != value else value if isinstance(value, str) else f"{value:.{digits}f}"
              for value in values] for _, *values in rows]
    width = max(len(title), *(len(label) for label, *_ in rows))
    wide = [max(8, *(len(row[i]) for row in [heads, *cells])) + 2 for i in range(len(heads))]
    print(f"  {title:{width}}" + "".join(f"{head:>{w}}" for head, w in zip(heads, wide)))
    for (label, *_), row in zip(rows, cells):
        print(f"  {label:{width}}" + "".join(f"{cell:>{w}}" for cell, w in zip(row, wide)))


def check_plot(path):
    """ValueError, one line, if a figure cannot be written to `path` or not be drawn: to know before the long work."""
    if not path.endswith(".png"):
        raise ValueError(f"--plot {path}: give the name of a .png file")
    folder = os.path.dirname(os.path.abspath(path))
    try:
        os.makedirs(folder, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
        if os.path.isdir(path):
            raise IsADirectoryError(None, "it is a folder")
    except OSError as error:
        raise ValueError(f"--plot {path}: cannot be written ({error.strerror}); name a file elsewhere") from None
    try:
        import matplotlib.figure  # noqa: F401  (drawing is optional, so is the package)
    except ImportError:
        raise ValueError("--plot needs matplotlib: pip install matplotlib") from None


def draw_lines(path, lines, mark=None, base=None, **labels):
    """Write a figure of lines, label -> (x values, y values, style).

    mark: an x at which training is. base: of the logarithm that x is shown by. labels: what else axes are to be told.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for label, (x, y, style) in lines.items():
        axes.plot(x, y, style, label=label)
    if mark is not None:
        axes.axvline(mark, color="gray", linestyle="--", label="in training")
    if base is not None:
        axes.set_xscale("log", base=base)
        axes.xaxis.set_major_formatter("{x:g}")
    axes.set(**labels)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    with atomic_write(path) as file:
        figure.savefig(file, format="png", dpi=120)


# ---- puzzles


def show_thinking(model, data, inputs, labels, depth, act_eval, autocast):
    """Draw each puzzle's answer after every segment that changed it, and the verdict. inputs, labels (B, T) integer."""
    for boards, verdict in thinking_boards(model, data, inputs, labels, depth, act_eval, autocast, in_color()):
        print_side_by_side(boards)
        print(f"{verdict}\n")


def thinking_boards(model, data, inputs, labels, depth, act_eval, autocast, color):
    """For each puzzle ([(title, board as text) of the puzzle and of every answer that is new], the verdict's line)."""
    with autocast():
        tokens = torch.as_tensor(inputs).to(next(model.parameters()).device)
        ids = data.identifiers(inputs) if hasattr(data, "identifiers") else None  # of puzzles that have their own
        ids = None if ids is None else torch.as_tensor(ids).to(tokens.device)
        _, segments, answers, p_halt = model.eval().solve(tokens, depth, act_eval, True, ids)
    answers, segments = answers.cpu().numpy(), segments.tolist()  # (S, B, T)
    for i, puzzle in enumerate(inputs):
        path = answers[: segments[i], i]
        changed = [n for n in range(len(path)) if n == 0 or (path[n] != path[n - 1]).any()]
        boards = [("the puzzle", data.draw(puzzle, puzzle, None, color))]
        label = None if labels is None else labels[i]
        boards += [(f"segment {n + 1}", data.draw(puzzle, path[n], label, color)) for n in changed]
        legal, verdict = data.verdict(puzzle, path[-1])
        yield boards, (f"{'solved' if legal else 'not solved'}: {verdict} | {len(path)} segments, the last change in "
                       f"segment {changed[-1] + 1} | halting confidence {p_halt[len(path) - 1, i]:.3f}")


def print_side_by_side(boards):
    """boards: (title, text) pairs, of any size and maybe coloured; as many per row as the terminal holds."""
    print("\n".join(side_by_side(boards, shutil.get_terminal_size((120, 24)).columns)))


def side_by_side(boards, columns):
    """Boards, as for print_side_by_side, in lines of at most `columns` characters, or of one board."""
    boards = [[title, *text.splitlines()] for title, text in boards]
    seen = [[len(re.sub("\033\\[[0-9;]*m", "", line)) for line in board] for board in boards]  # widths to the eye
    width = max(map(max, seen))
    boards = [[line + " " * (width - n) for line, n in zip(*both)] for both in zip(boards, seen)]
    per_row, lines = max(1, (columns + 3) // (width + 3)), []
    for start in range(0, len(boards), per_row):
        rows = itertools.zip_longest(*boards[start : start + per_row], fillvalue=" " * width)
        lines += ["   ".join(parts) for parts in rows]
    return lines


# ---- texts


def write_text(model, tokenizer, prompt, options, autocast, ids=None):
    """Print a prompt and, as it is written, what the model makes of it.

    Returns the new ids, without the one that ends a text, and what stream counts per token, (n,) int64. ids: the
    prompt's, where they are not those of its text alone. What is not printable, as in a model's first attempts, is
    printed as its escape, line ends as they are.
    """
    read, ids, shown, steps = tokenizer.encode(prompt) if ids is None else ids, [], "", []
    color = in_color()
    with contextlib.ExitStack() as stack:
        stack.callback(print, PLAIN * color, flush=True)
        stack.enter_context(autocast())
        for token, used in model.stream([read], **options):
            if not steps:  # not before: reading the prompt may have something to say
                print(f"{DIM * color}{prompt}{PLAIN * color}{TINT * color}", end="", flush=True)
            steps.append(int(used))
            if int(token) in options["stop"]:
                break
            ids.append(int(token))
            text = tokenizer.decode(ids, strict=False)
            whole = text[:-3] + text[-3:].rstrip("\ufffd")  # a character whose bytes are not all there yet must wait
            print(_printable(whole[len(shown):]), end="", flush=True)
            shown = whole if len(whole) > len(shown) else shown
        print(_printable(tokenizer.decode(ids, strict=False)[len(shown):]), end="")
    return ids, np.array(steps)


def _printable(text):
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)
