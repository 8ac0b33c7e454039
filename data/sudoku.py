"""Sudoku puzzles to train on: generated, from the published Sudoku-Extreme set, or from your file.

    config = SudokuConfig(box="3x3", clues=0, guesses=22, num_train=1000)
    data = load(config)                                     # prepared once, then read from config.data_dir
    print("\n".join(data.summary()))
    batch = data.train_batch(index=0, batch_size=64, seed=0)
    batch["inputs"], batch["labels"]                        # (64, 81) int64: a random symmetry of each puzzle

Every puzzle has exactly one solution, and no two splits share a puzzle up to symmetry. For boards, difficulty and
symmetries see sudoku_solver.py, whose letters are used here. Tokens are those of the published set: 0 = pad (not used
here), 1 = blank, d + 1 = the digit d; T of them, row by row.

Published set: https://huggingface.co/datasets/sapientinc/sudoku-extreme, about 3.8 million training and 423,000 test
puzzles (terms of use: see there). Its rows are drawn at random and checked when drawn; of a file of yours every row is.
Written to data_dir: sudoku-<key>.npz, where the key hashes every setting that matters, and the downloads.
"""
import os
from dataclasses import dataclass
from typing import Literal

import numpy as np

from data.common import read_lines, report_bad_rows
from data.puzzles import (PuzzleData, PuzzleSplit, cache_path, divide, drop_equal, fetch_published, parse_table,
                          prepared, validate_numbers)
from data.sudoku_solver import augment, first_equal, generate, geometry, rate, solve

FORMAT = 2  # part of the cache key: raise it when the prepared files change
FEWEST_CLUES = {(2, 2): 4, (2, 3): 8, (3, 2): 8, (2, 4): 14, (4, 2): 14, (3, 3): 17}  # a unique puzzle has no fewer


@dataclass
class SudokuConfig:
    source: Literal["generate", "extreme-1k", "extreme"] = "generate"  # or published: train on 1,000, or on all
    box: str = "2x3"  # rows x columns of a box: 2x2 (4x4 board), 2x3 (6x6), 3x3 (9x9)
    clues: int = 14  # clues per generated puzzle; 0 = minimal puzzles (no clue can be removed)
    guesses: float = -1  # mean number of guesses of the generated puzzles (9x9 extreme: 22); -1 = whatever comes
    num_train: int = 20000  # puzzles to train on; of a file or published set at most so many, -1 = all there are
    num_val: int = 500  # puzzles to validate on
    num_test: int = 1000  # puzzles to test on; of the published set at most so many, -1 = all there are
    data_file: str = ""  # CSV or text file of puzzles to use instead of `source`
    test_file: str = ""  # CSV or text file whose puzzles are the test split, all of them; train and val avoid them
    bad_rows: Literal["error", "skip"] = "error"  # what a faulty row in a file is: an error, or skipped and reported
    augment: bool = True  # train on random symmetries of the puzzles (lines, digits, transposition)
    data_seed: int = 0  # seed of the generator and of the choice of splits
    data_dir: str = "data/cache"  # folder for prepared and downloaded files


def parse_box(text):
    """'2x3' -> (2, 3). ValueError, one line, unless both are at least 2 and the side is at most 9."""
    rows, _, columns = text.partition("x")
    if not (rows.isdecimal() and columns.isdecimal() and min(int(rows), int(columns)) >= 2
            and int(rows) * int(columns) <= 9):
        raise ValueError(f"box {text!r} is not a box shape: give rows x columns with a side up to 9, as in --box 2x2, "
                         "2x3 or 3x3")
    return int(rows), int(columns)


# ----------------------------------------------------------------------------------------------------------------------
# Checking: puzzles and answers from outside.

def misspelt(text, box, blanks=".0"):
    """Why a string is not a board of T digits or blanks, or ''."""
    g = geometry(box)
    if len(text) != g.cells:
        other = {16: "2x2", 36: "2x3", 64: "2x4", 81: "3x3"}.get(len(text))
        return f"has {len(text)} characters, not {g.cells}" + (f" (--box {other} takes {len(text)})" if other else "")
    wrong = sorted(set(text) - set("123456789"[:g.side] + blanks))
    accepted = f"digits 1 to {g.side}" + (", . or 0 for a blank" if blanks else "")
    return f"holds {wrong[0]!r}; accepted: {accepted}" if wrong else ""


def to_digits(texts, box):
    """Well-formed boards as strings -> (N, T) uint8 digits, 0 = blank."""
    codes = np.frombuffer("".join(texts).replace(".", "0").encode("ascii"), np.uint8)
    return codes.reshape(len(texts), geometry(box).cells) - np.uint8(ord("0"))


def clash(digits, box):
    """'row 3 holds 5 twice' for the first unit of a board (T,) that repeats a digit, 0s aside; '' if none does."""
    g = geometry(box)
    for unit in range(3 * g.side):
        counts = np.bincount(digits[g.unit_cells[:, unit]], minlength=g.side + 1)[1:]
        if counts.max() > 1:
            name = f"{('row', 'column', 'box')[unit // g.side]} {unit % g.side + 1}"
            return f"{name} holds {counts.argmax() + 1} {'twice' if counts.max() == 2 else 'more than twice'}"
    return ""


def fault(puzzle, count, box):
    """What is wrong with a puzzle (T,) that has `count` solutions (2 = several); '' if it has one."""
    if count == 0:
        broken = clash(puzzle, box)
        return f"the puzzle clashes: {broken}" if broken else "the puzzle has no solution"
    return "the puzzle has more than one solution" if count > 1 else ""


def place(cell, box):
    """'row 1 column 2' of a cell's number."""
    return f"row {cell // geometry(box).side + 1} column {cell % geometry(box).side + 1}"


def wrong_answer(puzzle, answer, solution, box):
    """How an answer (T,) differs from the only solution of a puzzle (T,); '' if it does not."""
    changed, wrong = np.flatnonzero((puzzle > 0) & (answer != puzzle)), np.flatnonzero(answer != solution)
    if changed.size:
        return f"the answer changes the clue at {place(changed[0], box)}"
    return f"the answer is wrong at {place(wrong[0], box)}" if wrong.size else ""


def check_rows(rows, box, path, bad_rows):
    """Check every Row and solve it. Returns (Split of the good ones, notes: a list with a line about what was skipped).

    A row is bad when its puzzle has the wrong length or characters, clashes, or has not exactly one solution, or when
    its answer, if given, is not that solution. ValueError as in report_bad_rows.
    """
    reasons = {}
    for i, row in enumerate(rows):
        if why := misspelt(row.puzzle, box):
            reasons[i] = f"the puzzle {why}"
        elif row.answer and (why := misspelt(row.answer, box, blanks="")):
            reasons[i] = f"the answer {why}"
    kept = np.array([i for i in range(len(rows)) if i not in reasons], int)
    puzzles = to_digits([rows[i].puzzle for i in kept], box)
    count, solutions, guesses = rate(puzzles, box)
    for k in np.flatnonzero(count != 1):
        reasons[kept[k]] = fault(puzzles[k], count[k], box)
    answered = np.array([k for k in np.flatnonzero(count == 1) if rows[kept[k]].answer], int)
    answers = to_digits([rows[kept[k]].answer for k in answered], box)
    for k, answer in zip(answered, answers):
        if why := wrong_answer(puzzles[k], answer, solutions[k], box):
            reasons[kept[k]] = why
    notes = report_bad_rows(reasons, rows, path, bad_rows)
    good = np.array([i not in reasons for i in kept], bool)
    sources = np.array([rows[i].source for i in kept[good]], str)
    return Split.of(puzzles[good], solutions[good], guesses[good], sources if any(sources) else None), notes


def read_puzzles(path, box, bad_rows="error"):
    """Read and check a file of puzzles (CSV or bare puzzles, .gz or not). Returns (Split, notes) as check_rows does."""
    return check_rows(parse_table(read_lines(path), path), box, path, bad_rows)


def published(name, number, box, config, rng):
    """`number` random rows (-1 = all) of the published train.csv or test.csv, checked, as a Split in random order."""
    path = fetch_published("sudoku-extreme", name, config.data_dir)
    lines = read_lines(path)
    order = 1 + rng.permutation(len(lines) - 1)[:number if number >= 0 else None]
    rows = parse_table(lines[:1] + [lines[i] for i in order], path)
    return check_rows(rows, box, path, config.bad_rows)


# ----------------------------------------------------------------------------------------------------------------------
# Splits: prepared once, cached.

@dataclass
class Split(PuzzleSplit):
    """inputs, labels (N, T) uint8 tokens; source (N,) str, or None where the file names none; guesses (N,) int64."""
    guesses: np.ndarray

    @classmethod
    def of(cls, puzzles, solutions, guesses, source=None):
        """From digits (N, T)."""
        return cls(puzzles + np.uint8(1), solutions + np.uint8(1), source, guesses)

    @property
    def digits(self):
        """(puzzles, solutions), (N, T) uint8 digits with 0 = blank."""
        return self.inputs - np.uint8(1), self.labels - np.uint8(1)


def validate(config):
    """The box of a config as a pair. ValueError, one line, for values that cannot be."""
    box = parse_box(config.box)
    fewest, cells = FEWEST_CLUES[box], geometry(box).cells
    generated = config.source == "generate" and not config.data_file
    if not generated and not config.data_file and box != (3, 3):
        raise ValueError(f"box {config.box} does not fit source {config.source}, whose boards are 9x9: add --box 3x3")
    if generated and config.clues and not fewest <= config.clues <= cells:
        raise ValueError(f"clues {config.clues} is not possible with box {config.box}: give {fewest} to {cells}, or 0 "
                         "for minimal puzzles")
    if config.guesses < 0 and config.guesses != -1:
        raise ValueError(f"guesses {config.guesses:g} is not a mean: give 0 or more, or -1 for whatever comes")
    validate_numbers(config)
    return box


def build(config, box):
    """Generate or read all puzzles and split them: ({"train": Split, "val": Split, "test": Split}, notes)."""
    rng = np.random.default_rng([config.data_seed, 1])
    test, notes = read_puzzles(config.test_file, box, config.bad_rows) if config.test_file else (None, [])
    num_train, num_val, num_test = config.num_train, config.num_val, config.num_test if test is None else 0
    more = []
    if config.data_file:
        pool, more = read_puzzles(config.data_file, box, config.bad_rows)
        pool = pool.take(rng.permutation(len(pool)))
    elif config.source == "generate":
        pool = Split.of(*generate(num_train + num_val + num_test, box, config.clues, config.guesses, config.data_seed,
                                  avoid=test.digits if test else None))
    else:
        if config.source == "extreme-1k":
            num_train = min(num_train, 1000) if num_train > 0 else 1000
        if test is None:
            test, notes = published("test", num_test, box, config, rng)
            num_test = 0
        spare = 200  # some puzzles may equal one of the test split
        pool, more = published("train", num_train + num_val + spare if num_train > 0 else -1, box, config, rng)
    pool, dropped = drop_equal(pool, test, lambda inputs, labels: first_equal(inputs - 1, labels - 1, box),
                               "{:,} equal to a test puzzle, {:,} equal to an earlier one")
    return divide(pool, num_test, num_val, num_train or -1, test), notes + more + dropped  # of a file, 0 is all, too


def load(config, prepare=True, saved=None):
    """Prepare the data of a SudokuConfig, or read it from the cache: SudokuData. ValueError, one line, for mistakes.

    prepare False: no splits, which is enough to parse, draw and judge puzzles. saved is not needed: see state().
    """
    if not prepare:
        return SudokuData(config)
    box = validate(config)
    path = cache_path(config, "sudoku", FORMAT, guesses=float(config.guesses))  # -1 and -1.0 are one setting
    title = f"sudoku puzzles ({config.data_file or config.source}, box {config.box})"
    return SudokuData(config, **prepared(path, title, lambda: build(config, box), Split))


class SudokuData(PuzzleData):
    """Sudoku for a training script, see PuzzleData; train, val and test are of class Split."""

    def __init__(self, config, **splits):
        super().__init__(config, **splits)
        self.box = parse_box(config.box)
        self.side, self.cells = geometry(self.box).side, geometry(self.box).cells
        self.vocab_size = self.side + 2  # pad, blank, digits

    @property
    def model_args(self):
        """What a model has to know."""
        return dict(vocab_size=self.vocab_size, seq_len=self.cells, num_puzzle_identifiers=1, box_rows=self.box[0],
                    box_cols=self.box[1])

    def origin(self):
        c = self.config
        origin = c.data_file or (f"generated, {c.clues or 'minimal'} clues" if c.source == "generate" else c.source)
        return f"sudoku: {origin}, box {c.box} ({self.side}x{self.side} boards)"

    def hardness(self, split):
        return (f"clues mean {np.count_nonzero(split.inputs > 1) / len(split):.1f} | guesses mean "
                f"{split.guesses.mean():.2f}, {100 * (split.guesses == 0).mean():.1f}% without any")

    def symmetric(self, inputs, labels, rng):
        return augment(inputs, labels, self.box, rng)

    def parse(self, text):
        """A puzzle as a string, or the path of a file of puzzles -> tokens (B, T) int64.

        ValueError, one line, for a wrong length or wrong characters. Puzzles that clash or cannot be solved pass:
        problem() names what is wrong with them.
        """
        rows = parse_table(read_lines(text), text) if os.path.isfile(text) else []
        named = [(f"{text}: line {row.line}: the puzzle", row.puzzle) for row in rows]
        if not os.path.isfile(text):
            named = [(f"{text!r} is not a file, and as a puzzle it", "".join(text.split()))]
        for name, puzzle in named:
            if why := misspelt(puzzle, self.box):
                raise ValueError(f"{name} {why}")
        if not named:
            raise ValueError(f"{text}: the file holds no puzzle; give one per line, {self.cells} characters each")
        return to_digits([puzzle for _, puzzle in named], self.box).astype(np.int64) + 1

    def problem(self, inputs):
        """What keeps a puzzle (T,) of tokens from having exactly one solution, as a line; '' if it is sound."""
        puzzle = np.asarray(inputs).reshape(-1) - 1
        return fault(puzzle, len(solve(puzzle, self.box)[0]), self.box)

    def verdict(self, inputs, answer):
        """(is an answer (T,) of tokens a legal solution that keeps the clues of the puzzle (T,), one line about it)."""
        puzzle, digits = (np.asarray(tokens).reshape(-1) - 1 for tokens in (inputs, answer))
        empty, changed = np.flatnonzero(digits < 1), np.flatnonzero((puzzle > 0) & (digits != puzzle))
        if empty.size:
            return False, f"the cell at {place(empty[0], self.box)} is not a digit ({empty.size} such cells)"
        if changed.size:
            cell = changed[0]
            return False, f"the clue at {place(cell, self.box)} was changed from {puzzle[cell]} to {digits[cell]}"
        broken = clash(digits, self.box)
        return not broken, broken or "a legal solution of the given clues"

    def draw(self, inputs, answer, label=None, color=True):
        """A board as text: clues bare (bold), filled cells as 5' (green), wrong ones as 5! (red), empty ones as a dot.

        inputs, answer, label: (T,) tokens. Wrong is what changes a clue, what differs from the label or, without one,
        what repeats a digit of its row, column or box.
        """
        (rows, columns), side = self.box, self.side
        puzzle, digits = (np.asarray(tokens).reshape(-1) - 1 for tokens in (inputs, answer))
        wrong = (puzzle > 0) & (digits != puzzle)
        wrong |= self._repeated(digits) if label is None else digits != np.asarray(label).reshape(-1) - 1
        cells = []
        for digit, given, bad in zip(digits, puzzle > 0, wrong):
            text = (f"{digit}" if digit > 0 else ".") + ("!" if bad else " " if given or digit < 1 else "'")
            cells.append(f"\033[{31 if bad else 1 if given else 32}m{text}\033[0m" if color else text)
        rule = "+".join(["", *["-" * (3 * columns + 1)] * rows, ""])
        lines = []
        for row in range(side):
            parts = [cells[start:start + columns] for start in range(row * side, row * side + side, columns)]
            lines += [rule] if row % rows == 0 else []
            lines.append("|".join(["", *(" " + " ".join(part) + " " for part in parts), ""]))
        return "\n".join(lines + [rule])

    def _repeated(self, digits):
        """(T,) digits -> (T,) bool: whether another cell of its row, column or box holds the same digit."""
        cell_units = geometry(self.box).cell_units  # (3, T)
        neighbours = (cell_units[:, :, None] == cell_units[:, None]).any(0)  # (T, T), each cell also of itself
        return ((digits[:, None] == digits) & neighbours).sum(0) * (digits > 0) > 1
