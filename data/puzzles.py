"""What data sets of puzzles share: reading files of them, splitting them, and what a training script asks for.

    rows = parse_table(read_lines("puzzles.csv.gz"), "puzzles.csv.gz")      # list of Row
    pool, notes = drop_equal(pool, test, first_equal, "{:,} equal to a test puzzle, {:,} equal to an earlier one")
    splits = divide(pool, num_test=1000, num_val=500, num_train=-1)         # {"train": ..., "val": ..., "test": ...}

sudoku.py and maze.py say what a puzzle is: each has a Split and a data class that derive from those here.
"""
import csv
import dataclasses
import os
import zipfile
import zlib
from collections import namedtuple
from dataclasses import dataclass
from typing import Optional

import numpy as np

from data.common import atomic_write, by_source, content_hash, download, epoch_rows, file_hash

PUZZLE_COLUMNS, ANSWER_COLUMNS = ("puzzle", "question", "quizzes"), ("solution", "answer", "solutions")
Row = namedtuple("Row", "line puzzle answer source")  # answer and source are "" where the file has none


def parse_table(lines, path, raw=False):
    """(line number, text) pairs of a CSV with a header line, or of bare puzzles -> list of Row.

    Columns may be named as in the published sets (question, answer, source) or plainly (puzzle, solution, source);
    others are ignored. raw: blanks around a field belong to it. ValueError, one line, for a header that names no
    puzzle column.
    """
    header = [name.strip().lower() for name in lines[0][1].split(",")] if lines else []
    column = {kind: next((header.index(name) for name in names if name in header), None) for kind, names in
              (("puzzle", PUZZLE_COLUMNS), ("answer", ANSWER_COLUMNS), ("source", ("source",)))}
    if column["puzzle"] is None:
        if len(header) > 1 and any(name.isalpha() for name in header):
            raise ValueError(f"{path}: the header {lines[0][1]!r} has none of the columns {', '.join(PUZZLE_COLUMNS)}; "
                             "rename the one that holds the puzzles")
        return [Row(number, text, "", "") for number, text in lines]

    def field(fields, kind):
        text = fields[column[kind]] if column[kind] is not None and column[kind] < len(fields) else ""
        return text if raw else text.strip()

    table = []
    for number, text in lines[1:]:  # each line by itself, or an unbalanced quote would swallow the rows after it
        try:
            fields = next(csv.reader([text]))
        except csv.Error as error:
            raise ValueError(f"{path}: line {number}: {error}; give one puzzle per line") from None
        table.append(Row(number, *(field(fields, kind) for kind in column)))
    return table


def check_published(path):
    """ValueError unless a downloaded file begins like the published CSVs: a log-in page would be saved as well."""
    with open(path, encoding="utf-8") as file:
        header = file.readline().strip()
    if header != "source,question,answer,rating":
        raise ValueError(f"the file begins with {header[:40]!r}, not with the expected header")


def fetch_published(name, part, data_dir):
    """The path of the CSV with a part, "train" or "test", of a published set, which is downloaded once."""
    return download(f"https://huggingface.co/datasets/sapientinc/{name}/resolve/main/{part}.csv",
                    os.path.join(data_dir, f"{name}-{part}.csv"), check_published,
                    hint="fetch it elsewhere and name it with --data_file (and --test_file), or use --source generate")


# ---- splits, prepared once, cached


@dataclass
class PuzzleSplit:
    """inputs, labels (N, T) uint8 tokens; source (N,) str, or None where a file names none."""
    inputs: np.ndarray
    labels: np.ndarray
    source: Optional[np.ndarray]

    def __len__(self):
        return len(self.inputs)

    def take(self, rows):
        """The given rows (an index array or a slice) as a new Split."""
        return type(self)(**{name: part if part is None else part[rows] for name, part in vars(self).items()})


def validate_numbers(config):
    """ValueError, one line, for a number of puzzles or a seed that cannot be."""
    generated = config.source == "generate" and not config.data_file
    least = {"num_train": 1 if generated else -1, "num_val": 0, "data_seed": 0,
             "num_test": 0 if generated or config.data_file else -1}
    for name, smallest in least.items():
        if getattr(config, name) < smallest:
            raise ValueError(f"{name} {getattr(config, name)} is too small: give {smallest} or more")
        if name != "data_seed" and getattr(config, name) > 10**7:
            raise ValueError(f"{name} {getattr(config, name)} is too large: give at most {10**7:,}")


def drop_equal(pool, test, first_equal, words):
    """Drop from `pool` what equals, up to symmetry, a puzzle of `test` (Split or None) or an earlier one of its own.

    first_equal(inputs, labels): for each puzzle the index of the first that it equals, itself if none, (N,). words:
    what was dropped, with places for two numbers. Returns (pool, notes: a line about what was dropped, if anything).
    """
    parts = [pool] if test is None else [test, pool]
    inputs, labels = (np.concatenate([getattr(part, name) for part in parts]) for name in ("inputs", "labels"))
    num_test = len(inputs) - len(pool)
    first = first_equal(inputs, labels)[num_test:]
    in_test, keep = first < num_test, first == np.arange(num_test, len(inputs))
    notes = ["dropped up to symmetry: " + words.format(in_test.sum(), (~in_test & ~keep).sum())]
    return pool.take(keep), [] if keep.all() else notes


def divide(pool, num_test, num_val, num_train, test=None, val=None, kind="puzzle"):
    """Cut a Split, in order, into what is to test, validate and train on: {"train": Split, "val": ..., "test": ...}.

    num_train -1 = all the rest. test, val: Splits that come from elsewhere; their numbers are then 0. ValueError, one
    line, if nothing is left to train on.
    """
    ends = np.cumsum([num_test, num_val, num_train if num_train >= 0 else len(pool)])
    if len(pool) <= ends[1]:
        raise ValueError(f"{len(pool):,} different {kind}s are too few to test on {num_test:,}, validate on {num_val:,}"
                         " and train on the rest: lower --num_test and --num_val, or give a larger file")
    first, second, train = (pool.take(slice(start, end)) for start, end in zip([0, *ends], ends))
    return {"train": train, "val": second if val is None else val, "test": first if test is None else test}


def cache_path(config, kind, version, **changed):
    """Where the prepared splits of a config are: a name that hashes every setting that matters.

    changed: settings by another value than the config's. ValueError, one line, for files that cannot be read.
    """
    fields = dataclasses.asdict(config) | changed
    for name in ("data_dir", "augment", "data_file", "test_file"):  # files count by what is in them, not by their name
        del fields[name]
    files = [path and file_hash(path) for path in (config.data_file, config.test_file)]
    return os.path.join(config.data_dir, f"{kind}-{content_hash(version, sorted(fields.items()), files)[:16]}.npz")


def prepared(path, title, make, split_class):
    """The splits in the .npz at `path`, made first if it is not there: dict of train, val, test, and notes, a list.

    make() -> (splits by name, notes).
    """
    if not os.path.exists(path):
        print(f"preparing {title} -> {path}", flush=True)
        splits, notes = make()
        arrays = {f"{name}_{field}": array for name, split in splits.items() for field, array in vars(split).items()
                  if array is not None}
        with atomic_write(path) as file:
            np.savez(file, notes=np.array(notes, str), **arrays)
    try:
        with np.load(path, allow_pickle=False) as stored:
            stored = dict(stored)
    except (OSError, EOFError, ValueError, zipfile.BadZipFile, zlib.error):
        raise ValueError(f"{path}: the prepared file is damaged; delete it, and it will be made anew") from None
    splits = {name: split_class(*(stored.get(f"{name}_{field.name}") for field in dataclasses.fields(split_class)))
              for name in ("train", "val", "test")}
    return splits | {"notes": stored["notes"].tolist()}


# ---- batches


def _batch(inputs, labels):
    """Tokens (B, T) -> the dict that models take; the tasks of one puzzle kind share identifier 0."""
    return dict(inputs=inputs.astype(np.int64), labels=labels.astype(np.int64),
                puzzle_identifiers=np.zeros(len(inputs), np.int64))


class PuzzleData:
    """The splits train, val and test, and what a training script asks of a data set.

    A kind of puzzle adds
        model_args                          what a model has to know
        origin(), hardness(split)           for the summary, as text: where all come from, how hard a split is
        symmetric(inputs, labels, rng)      a random symmetry of each, tokens (B, T) -> the same
        parse, problem, verdict, draw       puzzles as a user gives and sees them
    """

    kind = "puzzle"  # what one is called
    tokenizer = grade = None  # puzzles are no text; an answer is right if it equals the label
    longest = 0  # all have seq_len cells

    def __init__(self, config, train=None, val=None, test=None, notes=()):
        self.config, self.train, self.val, self.test, self.notes = config, train, val, test, list(notes)

    def state(self):
        """What must travel with a model's weights: nothing, the tokens are fixed."""
        return {}

    def summary(self):
        """Readable lines: where the puzzles come from, and how many, how hard and which they are (a hash) per split."""
        c = self.config
        lines = [f"{self.origin()}, seed {c.data_seed}" + (f", test split from {c.test_file}" if c.test_file else "")]
        for name in ("train", "val", "test"):
            split = getattr(self, name)
            line = f"{name}: {len(split):,} original {self.kind}s"
            if name == "train":
                line += ", a random symmetry of each every epoch" if c.augment else ", not augmented"
            if len(split):
                line += f" | {self.hardness(split)}"
            lines.append(f"{line} | sha256 {content_hash(split.inputs, split.labels)[:12]}")
        return lines + self.notes

    def train_batch(self, index, batch_size, seed):
        """Batch `index` of training: a dict of inputs, labels (B, T) int64 and puzzle_identifiers (B,) int64, all 0.

        A pure function of its arguments, so that a resumed run needs only its step.
        """
        rows = epoch_rows(len(self.train), index, batch_size, seed)
        inputs, labels = self.train.inputs[rows], self.train.labels[rows]
        if self.config.augment:
            inputs, labels = self.symmetric(inputs, labels, np.random.default_rng([seed, 1, index]))
        return _batch(inputs, labels)

    def eval_batches(self, split_name, batch_size):
        """Iterate over a split, "train", "val" or "test", in order and not augmented; the last batch may be short."""
        split = getattr(self, split_name)
        for start in range(0, len(split), batch_size):
            yield _batch(split.inputs[start:start + batch_size], split.labels[start:start + batch_size])

    def groups(self):
        """The test rows by source, where there are any: label -> [mask (N,) bool]."""
        return by_source(self.test.source)
