"""Mazes to train on: generated in several styles, from the published Maze-Hard set, or from your file.

    config = MazeConfig(size=30, num_train=1000)            # shortest paths of more than 110 moves
    data = load(config)                                     # prepared once, then read from config.data_dir
    print("\n".join(data.summary()))
    batch = data.train_batch(index=0, batch_size=64, seed=0)
    batch["inputs"], batch["labels"]                        # (64, 900) int64: a random symmetry of each maze

The answer to a maze is the maze with a shortest path from S to G marked. Of the shortest paths, often millions, the
label is the one that the published set's rule chooses (maze_solver.py), of which an answer may differ and still be
right: it is exact if it equals the label, and valid and shortest ("shortest_path") if it marks any shortest path.
Tokens are those of the published set: 0 = pad (not used here), then the characters # (wall), blank (open), S, G and
o (path), 1 to 5; T = size * size of them, row by row.

Measured at 30x30 on 1,500 published mazes and 400 generated ones of each style (paths of more than 110 moves; the
published ones start at 109), means unless it says median; ties are the shortest paths of one maze:

    style       walls            moves, most   rows + columns, S to G   open neighbours   ties, median   no tie
    published   37 % (28 to 45)  113.9, 146    19.9                       2.43              10^6.5         0 %
    scatter     37 % (31 to 45)  113.4, 135    19.9                       2.43              10^6.6         0 %
    corridors   48 %             142.6, 296    24.5                       2.06              2              35 %
    branches    50 %             119.2, 157    20.0                       2.02              1              59 %
    rooms       42 %             122.6, 187    30.5                       2.28              40             6 %

A thousand of all styles take 3 s of one core, a thousand of scatter 7 s. Style scatter is the one to test a model of
the published set on; the others have fewer ties, so that exact answers and shortest paths differ less.

Published set: https://huggingface.co/datasets/sapientinc/maze-30x30-hard-1k, 1,000 training and 1,000 test mazes
(terms of use: see there). All of them are used, so those to validate on are generated, in style scatter.
Written to data_dir: maze-<key>.npz, where the key hashes every setting that matters, and the downloads.
"""
import dataclasses
import math
import os
from dataclasses import dataclass
from typing import Literal, Optional

import numpy as np
import torch

from data.common import (Row, atomic_write, by_source, check_published, content_hash, download, epoch_rows, file_hash,
                         parse_table, read_lines, report_bad_rows)
from data.maze_solver import (GOAL, LARGEST, OPEN, PATH, START, STYLES, TOKENS, WALL, canonical, complaint, count_moves,
                              generate, grids, label, random_symmetries, shortest, to_tokens)

FORMAT = 1  # part of the cache key: raise it when the prepared files change
PUBLISHED = "https://huggingface.co/datasets/sapientinc/maze-30x30-hard-1k/resolve/main/"


@dataclass
class MazeConfig:
    source: Literal["generate", "hard-1k"] = "generate"  # or published: 30x30, 1,000 to train on and 1,000 to test on
    size: int = 11  # rows and columns of a maze
    min_path: int = -1  # a generated maze's shortest path takes more moves than this; -1 = 110 at size 30, 24 at 11
    styles: str = "scatter,corridors,branches,rooms"  # of the generated mazes, as many of each; the first as published
    num_train: int = 10000  # mazes to train on; of a file or the published set at most so many, -1 = all there are
    num_val: int = 500  # mazes to validate on
    num_test: int = 1000  # mazes to test on; of the published set at most so many, -1 = all there are
    data_file: str = ""  # CSV or text file of mazes to use instead of `source`
    test_file: str = ""  # CSV or text file whose mazes are the test split, all of them; train and val avoid them
    bad_rows: Literal["error", "skip"] = "error"  # what a faulty row in a file is: an error, or skipped and reported
    augment: bool = True  # train on random symmetries of the mazes (turned, mirrored), labelled anew by the rule
    data_seed: int = 0  # seed of the generator and of the choice of splits
    data_dir: str = "data/cache"  # folder for prepared and downloaded files


def least_path(config):
    """min_path, or for -1 what is about as hard to find at this size as 110 moves at 30x30."""
    return config.min_path if config.min_path >= 0 else round(110 * (config.size / 30) ** 1.5)


# ----------------------------------------------------------------------------------------------------------------------
# Checking mazes and answers from outside.

def misspelt(text, size, answer=False):
    """Why a string is not a maze of size x size cells with one S and one G, or ''. answer: it may hold o, the path."""
    if len(text) != size * size:
        side = math.isqrt(len(text))
        other = f" (--size {side} takes {side * side})" if side * side == len(text) and side > 1 else ""
        return f"has {len(text)} characters, not {size * size}{other}"
    accepted = TOKENS[1:] + "." if answer else TOKENS[1:-1] + "."
    if wrong := sorted(set(text) - set(accepted)):
        return f"holds {wrong[0]!r}; accepted: # for a wall, blank or . for an open cell, S, G" + ", o" * answer
    for letter in "SG":
        if text.count(letter) != 1:
            return f"has {text.count(letter)} {letter}, not one"
    return ""


def table(path, size):
    """The rows of a file as a list of Row: a CSV, or bare mazes, on one line each or on `size` lines of `size` cells.

    In the last form, blanks at the end of a line may be missing, and empty lines are skipped.
    """
    lines = read_lines(path, raw=True)
    if not lines or "," in lines[0][1] or max(len(text) for _, text in lines) > size:
        return parse_table(lines, path, raw=True)
    blocks = [lines[start:start + size] for start in range(0, len(lines), size)]
    return [Row(block[0][0], "".join(text.ljust(size) for _, text in block), "", "") for block in blocks]


def check_rows(rows, size, path, bad_rows):
    """Check every Row and label it. Returns (Split of the good ones, notes: lines about what was skipped or changed).

    A row is bad when its maze has the wrong length or characters, not exactly one S and one G, or no path between
    them, or when its answer, if given, marks no shortest path. Another shortest path than the rule's is no fault, but
    the label is the rule's. ValueError as in report_bad_rows.
    """
    reasons = {}
    for i, row in enumerate(rows):
        if why := misspelt(row.puzzle, size):
            reasons[i] = f"the maze {why}"
        elif row.answer and (why := misspelt(row.answer, size, answer=True)):
            reasons[i] = f"the answer {why}"
    kept = np.array([i for i in range(len(rows)) if i not in reasons], int)
    inputs = to_tokens([rows[i].puzzle for i in kept], size)
    labels, moves = label(inputs)
    reasons |= {kept[k]: "no path leads from S to G" for k in np.flatnonzero(moves < 0)}
    answered = np.array([k for k in np.flatnonzero(moves > 0) if rows[kept[k]].answer], int)
    answers = to_tokens([rows[kept[k]].answer for k in answered], size)
    right = shortest(inputs[answered], labels[answered], answers)
    reasons |= {kept[k]: f"as to the answer, {complaint(inputs[k], answer)}"
                for k, answer in zip(answered[~right], answers[~right])}
    notes = report_bad_rows(reasons, rows, path, bad_rows, kind="maze")
    other = int((answers != labels[answered]).any(axis=1)[right].sum())
    if other:
        notes.append(f"{path}: {other:,} answers mark another shortest path than the rule's, which is the label here")
    good = np.array([i not in reasons for i in kept], bool)
    sources = np.array([rows[i].source for i in kept[good]], str)
    return Split(inputs[good], labels[good], moves[good], sources if any(sources) else None), notes


def read_mazes(path, size, bad_rows="error"):
    """Read and check a file of mazes (see table; .gz or not). Returns (Split, notes) as check_rows does."""
    return check_rows(table(path, size), size, path, bad_rows)


def published(name, config):
    """The mazes of the published train.csv or test.csv, checked: (Split, notes)."""
    path = os.path.join(config.data_dir, f"maze-30x30-hard-1k-{name}.csv")
    download(f"{PUBLISHED}{name}.csv", path, check_published,
             hint="fetch it elsewhere and name it with --data_file (and --test_file), or use --source generate")
    return read_mazes(path, config.size, config.bad_rows)


# ----------------------------------------------------------------------------------------------------------------------
# Splits: prepared once, cached.

@dataclass
class Split:
    """inputs, labels (N, T) uint8 tokens; moves (N,) int64 of a shortest path; source (N,) str, or None where a file
    names none. The source of a generated maze is its style."""
    inputs: np.ndarray
    labels: np.ndarray
    moves: np.ndarray
    source: Optional[np.ndarray]

    def __len__(self):
        return len(self.inputs)

    def take(self, rows):
        """The given rows (an index array or a slice) as a new Split."""
        return Split(self.inputs[rows], self.labels[rows], self.moves[rows],
                     None if self.source is None else self.source[rows])

    def layouts(self):
        """For each maze what its walls are, up to symmetry and whatever its S and G: a list of bytes."""
        return canonical(grids(self.inputs)[0])


def validate(config):
    """The styles of a config as a list. ValueError, one line, for values that cannot be."""
    generated, published_set = config.source == "generate" and not config.data_file, config.source == "hard-1k"
    if not 4 <= config.size <= LARGEST:
        raise ValueError(f"size {config.size}: give the rows of a square maze, 4 to {LARGEST}")
    if published_set and not config.data_file and config.size != 30:
        raise ValueError(f"size {config.size} does not fit source hard-1k, whose mazes are 30x30: add --size 30")
    if config.min_path < -1:
        raise ValueError(f"min_path {config.min_path} is not a number of moves: give 0 or more, or -1 for the default")
    styles = [style.strip() for style in config.styles.split(",")]
    for style in styles:
        if style not in STYLES or styles.count(style) > 1:
            what = "named twice" if style in STYLES else "unknown"
            raise ValueError(f"styles {config.styles!r}: {style!r} is {what}; give one or more of {', '.join(STYLES)}, "
                             "separated by commas")
    least = {"num_train": 1 if generated else -1, "num_val": 0, "data_seed": 0,
             "num_test": 0 if generated or config.data_file else -1}
    for name, smallest in least.items():
        if getattr(config, name) < smallest:
            raise ValueError(f"{name} {getattr(config, name)} is too small: give {smallest} or more")
    return styles


def made(number, config, styles, seed, avoid):
    """`number` generated mazes whose layouts are none of `avoid`, as a Split."""
    free, start, goal, source = generate(number, config.size, least_path(config), styles, seed, avoid)
    inputs, rows = np.where(free, OPEN, WALL).astype(np.uint8).reshape(number, -1), np.arange(number)
    inputs[rows, start], inputs[rows, goal] = START, GOAL
    return Split(inputs, *label(inputs), source)


def build(config, styles):
    """Generate or read all mazes and split them: ({"train": Split, "val": Split, "test": Split}, notes)."""
    rng = np.random.default_rng([config.data_seed, 1])
    test, notes = read_mazes(config.test_file, config.size, config.bad_rows) if config.test_file else (None, [])
    num_train, num_val, num_test = config.num_train, config.num_val, config.num_test if test is None else 0
    more, val = [], None
    if config.data_file:
        pool, more = read_mazes(config.data_file, config.size, config.bad_rows)
    elif config.source == "generate":
        pool = made(num_train + num_val + num_test, config, styles, config.data_seed, test.layouts() if test else ())
    else:
        if test is None:
            test, notes = published("test", config)
            test, num_test = test.take(slice(num_test if num_test >= 0 else None)), 0
        pool, more = published("train", config)
        val = made(num_val, config, ["scatter"], config.data_seed, pool.layouts() + test.layouts())
        num_val = 0
    if config.data_file or config.source != "generate":
        pool = pool.take(rng.permutation(len(pool)))
    pool, dropped = drop_equal(pool, test)
    ends = np.cumsum([num_test, num_val, num_train if num_train >= 0 else len(pool)])
    if len(pool) <= ends[1]:
        raise ValueError(f"{len(pool):,} different mazes are too few to test on {num_test:,}, validate on {num_val:,}"
                         " and train on the rest: lower --num_test and --num_val, or give a larger file")
    first, second, train = (pool.take(slice(start, end)) for start, end in zip([0, *ends], ends))
    splits = {"train": train, "val": second if val is None else val, "test": first if test is None else test}
    return splits, notes + more + dropped


def drop_equal(pool, test):
    """Drop from `pool` what has the walls, up to symmetry, of a maze of `test` (Split or None) or an earlier one.

    Returns (pool, notes: a line about what was dropped, if anything).
    """
    tested, seen, keep, in_test = set(test.layouts() if test else ()), set(), [], 0
    for row, layout in enumerate(pool.layouts()):
        in_test += layout in tested
        if layout not in tested and layout not in seen:
            keep.append(row)
        seen.add(layout)
    repeated = len(pool) - len(keep) - in_test
    notes = [f"dropped up to symmetry: {in_test:,} with the walls of a test maze, {repeated:,} with an earlier one's"]
    return pool.take(np.array(keep, int)), notes if len(keep) < len(pool) else []


def load(config, prepare=True, saved=None):
    """Prepare the data of a MazeConfig, or read it from the cache: MazeData. ValueError, one line, for mistakes.

    prepare False: no splits, which is enough to parse, draw and judge mazes. saved is not needed: see state().
    """
    styles = validate(config)
    if not prepare:
        return MazeData(config)
    fields = dataclasses.asdict(config) | {"min_path": least_path(config), "styles": styles}
    for name in ("data_dir", "augment", "data_file", "test_file"):  # files count by what is in them, not by their name
        del fields[name]
    files = [path and file_hash(path) for path in (config.data_file, config.test_file)]
    key = content_hash(FORMAT, sorted(fields.items()), files)[:16]
    path = os.path.join(config.data_dir, f"maze-{key}.npz")
    if not os.path.exists(path):
        print(f"preparing mazes ({config.data_file or config.source}, size {config.size}) -> {path}", flush=True)
        splits, notes = build(config, styles)
        arrays = {f"{name}_{field.name}": getattr(split, field.name) for name, split in splits.items()
                  for field in dataclasses.fields(Split) if getattr(split, field.name) is not None}
        with atomic_write(path) as file:
            np.savez(file, notes=np.array(notes, str), **arrays)
    with np.load(path, allow_pickle=False) as stored:
        splits = {name: Split(*(stored.get(f"{name}_{field.name}") for field in dataclasses.fields(Split)))
                  for name in ("train", "val", "test")}
        return MazeData(config, notes=stored["notes"].tolist(), **splits)


def _batch(inputs, labels):
    """Tokens (B, T) -> the dict that models take; the tasks of one puzzle kind share identifier 0."""
    return dict(inputs=inputs.astype(np.int64), labels=labels.astype(np.int64),
                puzzle_identifiers=np.zeros(len(inputs), np.int64))


class MazeData:
    """The splits train, val and test (Split), and what a training script asks of a data set."""

    tokenizer = None  # mazes are no text
    longest = 0  # all have seq_len cells

    def __init__(self, config, train=None, val=None, test=None, notes=()):
        self.config, self.train, self.val, self.test, self.notes = config, train, val, test, list(notes)
        self.size = config.size

    @property
    def model_args(self):
        """What a model has to know."""
        return dict(vocab_size=len(TOKENS), seq_len=self.size**2, num_puzzle_identifiers=1, box_rows=0, box_cols=0)

    def state(self):
        """What must travel with a model's weights: nothing, the tokens are fixed."""
        return {}

    def summary(self):
        """Readable lines: where the mazes come from, and how many, how hard and which they are (a hash) per split."""
        c = self.config
        origin = c.data_file or (f"generated in style {c.styles}, paths of more than {least_path(c)} moves"
                                 if c.source == "generate" else c.source)
        lines = [f"maze: {origin}, size {c.size}x{c.size}, seed {c.data_seed}"
                 + (f", test split from {c.test_file}" if c.test_file else "")]
        for name in ("train", "val", "test"):
            split = getattr(self, name)
            line = f"{name}: {len(split):,} original mazes"
            if name == "train":
                line += ", a random symmetry of each every epoch" if c.augment else ", not augmented"
            if len(split):
                line += (f" | walls {100 * (split.inputs == WALL).mean():.1f}% | shortest path {split.moves.min()} to "
                         f"{split.moves.max()} moves, mean {split.moves.mean():.1f}")
            lines.append(f"{line} | sha256 {content_hash(split.inputs, split.labels)[:12]}")
        return lines + self.notes

    def train_batch(self, index, batch_size, seed):
        """Batch `index` of training: a dict of inputs, labels (B, T) int64 and puzzle_identifiers (B,) int64, all 0.

        A pure function of its arguments, so that a resumed run needs only its step.
        """
        rows = epoch_rows(len(self.train), index, batch_size, seed)
        inputs, labels = self.train.inputs[rows], self.train.labels[rows]
        if self.config.augment:
            cells = inputs.reshape(-1, self.size, self.size)
            inputs = random_symmetries(cells, np.random.default_rng([seed, 1, index])).reshape(inputs.shape)
            labels = label(inputs)[0]
        return _batch(inputs, labels)

    def eval_batches(self, split_name, batch_size):
        """Iterate over a split, "train", "val" or "test", in order and not augmented; the last batch may be short."""
        split = getattr(self, split_name)
        for start in range(0, len(split), batch_size):
            yield _batch(split.inputs[start:start + batch_size], split.labels[start:start + batch_size])

    def grade(self, inputs, labels, answers):
        """Beside equality with the label: shortest_path, is the answer any shortest path? (B, T) tensors -> name ->
        (B,) float tensor."""
        right = shortest(*(tokens.numpy() for tokens in (inputs, labels, answers)))
        return {"shortest_path": torch.from_numpy(right).float()}

    def groups(self):
        """The test rows by style, or by the source that a file names: label -> [mask (N,) bool]."""
        return by_source(self.test.source)

    def parse(self, text):
        """A maze as a string, on one line or several, or the path of a file of mazes -> tokens (B, T) int64.

        ValueError, one line, for a wrong length, wrong characters, or not one S and one G.
        """
        if os.path.isfile(text):
            named = [(f"{text}: line {row.line}: the maze", row.puzzle) for row in table(text, self.size)]
        else:
            lines = [line for line in text.splitlines() if line]
            maze = "".join(line.ljust(self.size) for line in lines) if len(lines) > 1 else text.strip("\r\n")
            named = [(f"{text[:40]!r} is not a file, and as a maze it", maze)]
        for name, maze in named:
            if why := misspelt(maze, self.size):
                raise ValueError(f"{name} {why}")
        if not named:
            raise ValueError(f"{text}: the file holds no maze; give one per line, {self.size**2} characters each, or "
                             f"{self.size} lines of {self.size}")
        return to_tokens([maze for _, maze in named], self.size).astype(np.int64)

    def problem(self, inputs):
        """What keeps a maze (T,) of tokens from having an answer, as a line; '' if it has one."""
        return "no path leads from S to G" if label(np.asarray(inputs)[None])[1][0] < 0 else ""

    def verdict(self, inputs, answer):
        """(does an answer (T,) of tokens mark a shortest path of the maze (T,), one line about it)."""
        inputs, answer = (np.asarray(tokens).reshape(-1) for tokens in (inputs, answer))
        (chosen,), (moves,) = label(inputs[None])
        if moves < 0:
            return False, "no path leads from S to G"
        if why := complaint(inputs, answer):
            return False, why
        which = "the one that is the label" if (answer == chosen).all() else "another than the label"
        return True, f"a shortest path of {moves} moves, {which}"

    def draw(self, inputs, answer, label=None, color=True):
        """A maze as text in a frame: o = path (green), x = path where there should be none (red), - = path that is
        missing (red), ! = a cell that is no path but was changed (red).

        inputs, answer, label: (T,) tokens. Without a label, path belongs where some shortest path runs, and none is
        missing.
        """
        inputs, answer = (np.asarray(tokens).reshape(-1) for tokens in (inputs, answer))
        belongs = self._on_shortest(inputs) if label is None else np.asarray(label).reshape(-1) == PATH
        text = np.array(list(TOKENS))[inputs]
        text[(answer != inputs) & (answer != PATH)] = "!"
        text[(answer == PATH) & belongs], text[(answer == PATH) & ~belongs] = "o", "x"
        if label is not None:
            text[belongs & (answer != PATH)] = "-"
        if color:
            tints = {"o": 32, "x": 31, "-": 31, "!": 31, "#": 2, "S": 1, "G": 1}
            text = [f"\033[{tints[mark]}m{mark}\033[0m" if mark in tints else mark for mark in text]
        rows = ["".join(text[start:start + self.size]) for start in range(0, self.size**2, self.size)]
        rule = f"+{'-' * self.size}+"
        return "\n".join([rule, *(f"|{row}|" for row in rows), rule])

    def _on_shortest(self, inputs):
        """(T,) tokens -> (T,) bool: the open cells that lie on some shortest path."""
        free, start, goal = grids(inputs[None])
        cells = np.flatnonzero(inputs == OPEN)
        free = np.repeat(free, len(cells), axis=0)
        there, back = (count_moves(free, np.repeat(end, len(cells)), cells) for end in (start, goal))
        on = (there >= 0) & (there + back == label(inputs[None])[1][0])
        return np.isin(np.arange(len(inputs)), cells[on])
