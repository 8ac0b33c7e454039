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
import math
import os
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from data.common import read_lines, report_bad_rows
from data.maze_solver import (GOAL, LARGEST, OPEN, PATH, START, STYLES, TOKENS, WALL, canonical, complaint, count_moves,
                              generate, grids, label, random_symmetries, shortest, to_tokens)
from data.puzzles import (PuzzleData, PuzzleSplit, Row, cache_path, divide, drop_equal, fetch_published, parse_table,
                          prepared, validate_numbers)

FORMAT = 1  # part of the cache key: raise it when the prepared files change


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
        other = f" (--size {side} takes {side * side})" if side * side == len(text) and side > 3 else ""
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
    return Split(inputs[good], labels[good], sources if any(sources) else None, moves[good]), notes


def read_mazes(path, size, bad_rows="error"):
    """Read and check a file of mazes (see table; .gz or not). Returns (Split, notes) as check_rows does."""
    return check_rows(table(path, size), size, path, bad_rows)


def published(name, config):
    """The mazes of the published train.csv or test.csv, checked: (Split, notes)."""
    return read_mazes(fetch_published("maze-30x30-hard-1k", name, config.data_dir), config.size, config.bad_rows)


# ----------------------------------------------------------------------------------------------------------------------
# Splits: prepared once, cached.

@dataclass
class Split(PuzzleSplit):
    """inputs, labels (N, T) uint8 tokens; source (N,) str, or None where a file names none: of a generated maze its
    style; moves (N,) int64 of a shortest path."""
    moves: np.ndarray

    def layouts(self):
        """For each maze what its walls are, up to symmetry and whatever its S and G: a list of bytes."""
        return canonical(grids(self.inputs)[0])


def validate(config):
    """The styles of a config as a list. ValueError, one line, for values that cannot be."""
    if not 4 <= config.size <= LARGEST:
        raise ValueError(f"size {config.size}: give the rows of a square maze, 4 to {LARGEST}")
    if config.source == "hard-1k" and not config.data_file and config.size != 30:
        raise ValueError(f"size {config.size} does not fit source hard-1k, whose mazes are 30x30: add --size 30")
    if config.min_path < -1:
        raise ValueError(f"min_path {config.min_path} is not a number of moves: give 0 or more, or -1 for the default")
    styles = [style.strip() for style in config.styles.split(",")]
    for style in styles:
        if style not in STYLES or styles.count(style) > 1:
            what = "named twice" if style in STYLES else "unknown"
            raise ValueError(f"styles {config.styles!r}: {style!r} is {what}; give one or more of {', '.join(STYLES)}, "
                             "separated by commas")
    validate_numbers(config)
    return styles


def made(number, config, styles, seed, avoid):
    """`number` generated mazes whose layouts are none of `avoid`, as a Split."""
    free, start, goal, source = generate(number, config.size, least_path(config), styles, seed, avoid)
    inputs, rows = np.where(free, OPEN, WALL).astype(np.uint8).reshape(number, config.size**2), np.arange(number)
    inputs[rows, start], inputs[rows, goal] = START, GOAL
    labels, moves = label(inputs)
    return Split(inputs, labels, source, moves)


def first_equal(inputs, labels):
    """For each maze (N, T) the index of the first with the same walls, up to symmetry: (N,) int64."""
    first = {}
    return np.array([first.setdefault(walls, i) for i, walls in enumerate(canonical(grids(inputs)[0]))], np.int64)


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
    words = "{:,} with the walls of a test maze, {:,} with an earlier one's"
    pool, dropped = drop_equal(pool, test, first_equal, words)
    return divide(pool, num_test, num_val, num_train, test, val, kind="maze"), notes + more + dropped


def load(config, prepare=True, saved=None):
    """Prepare the data of a MazeConfig, or read it from the cache: MazeData. ValueError, one line, for mistakes.

    prepare False: no splits, which is enough to parse, draw and judge mazes. saved is not needed: see state().
    """
    styles = validate(config)
    if not prepare:
        return MazeData(config)
    path = cache_path(config, "maze", FORMAT, min_path=least_path(config), styles=styles)
    title = f"mazes ({config.data_file or config.source}, size {config.size})"
    return MazeData(config, **prepared(path, title, lambda: build(config, styles), Split))


class MazeData(PuzzleData):
    """Mazes for a training script, see PuzzleData; train, val and test are of class Split."""

    kind = "maze"

    def __init__(self, config, **splits):
        super().__init__(config, **splits)
        self.size = config.size

    @property
    def model_args(self):
        """What a model has to know."""
        return dict(vocab_size=len(TOKENS), seq_len=self.size**2, num_puzzle_identifiers=1, box_rows=0, box_cols=0)

    def origin(self):
        c = self.config
        origin = c.data_file or (f"generated in style {c.styles}, paths of more than {least_path(c)} moves"
                                 if c.source == "generate" else c.source)
        return f"maze: {origin}, size {c.size}x{c.size}"

    def hardness(self, split):
        return (f"walls {100 * (split.inputs == WALL).mean():.1f}% | shortest path {split.moves.min()} to "
                f"{split.moves.max()} moves, mean {split.moves.mean():.1f}")

    def symmetric(self, inputs, labels, rng):
        cells = random_symmetries(inputs.reshape(-1, self.size, self.size), rng)
        inputs = cells.reshape(inputs.shape)
        return inputs, label(inputs)[0]  # the rule chooses another path in a mirrored maze

    def grade(self, inputs, labels, answers):
        """Beside equality with the label: shortest_path, is the answer any shortest path? (B, T) tensors -> name ->
        (B,) float tensor."""
        right = shortest(*(tokens.numpy() for tokens in (inputs, labels, answers)))
        return {"shortest_path": torch.from_numpy(right).float()}

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
