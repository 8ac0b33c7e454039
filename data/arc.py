"""ARC tasks to train on: ARC-AGI-1, ARC-AGI-2 and ConceptARC, downloaded or from your folder.

    config = ArcConfig(sets="arc1,conceptarc", data_file="FOLDER", num_augments=1000)
    data = load(config)                                     # a second or two; no augmented task is stored
    print("\n".join(data.summary()))
    batch = data.train_batch(index=0, batch_size=64, seed=0)
    batch["inputs"], batch["labels"]                        # (64, T) int64; see arc_grid.py for the T = 900 tokens
    batch["puzzle_identifiers"]                             # (64,) int64: which task in which transformation

A task has a few demonstration pairs of grids and one or more test pairs. HRM is not shown the demonstrations of a task
that it solves: it has trained on them, and knows the task by its puzzle id. So there is an id for every task in every
transformation that is trained (0 is no task's), and this protocol:

    trained on      demonstrations of all tasks, test pairs of training tasks
    val             test pairs of `num_val` training tasks, which are not trained on; they choose the weights
    test            test pairs of evaluation tasks, never trained on; under the ids of their demonstrations

Transformations are those of arc_grid.py. In training a grid pair is also moved about on the 30x30 board, but for one
pair of each task; in validation and test it stands in the corner. An epoch goes through the tasks in random order, the
pairs of a task one after another, all in one transformation. Cells that hold neither a colour nor an end marker are
not scored. arc_vote.py scores a model by a vote over the transformations of each test input.

Training pairs that equal a val or test pair of another set or task are left out (--overlaps keep: trained on, as
published), and so are training tasks that another set holds under the same id. summary() says what was found.

With a `board` of fewer than 30x30 cells, for a CPU, tasks that have a larger grid anywhere are left out.

data_file is a folder that holds clones of the repositories below (or is the one that is needed), or files such as
arc1_training.json.gz: {task id: {"train": [{"input": rows, "output": rows}, ...], "test": ...}}, packed or not.
Sources: https://github.com/fchollet/ARC-AGI and https://github.com/arcprize/ARC-AGI-2 (Apache-2.0),
https://github.com/victorvikram/ConceptARC (MIT), at the commits that the HRM repository names.
"""
import functools
import glob
import gzip
import json
import os
import zipfile
import zlib
from dataclasses import dataclass
from typing import Literal

import numpy as np

from data.arc_grid import (MOST, PAD, SIDE, VOCAB, augmentations, color_order, decode, draw, encode, to_grid,
                           transform, transformations)
from data.common import by_source, content_hash, download

IGNORE = -100  # the label of a cell that is not scored
ARC_PARTS = {"training": "data/training", "evaluation": "data/evaluation"}
REPOSITORIES = {  # set -> (repository, commit, part -> folder)
    "arc1": ("fchollet/ARC-AGI", "399030444e0ab0cc8b4e199870fb20b863846f34", ARC_PARTS),
    "arc2": ("arcprize/ARC-AGI-2", "f3283f727488ad98fe575ea6a5ac981e4a188e49", ARC_PARTS),
    "conceptarc": ("victorvikram/ConceptARC", "b22ef526b4656679816b7811e78f55cc24d736d7", {"corpus": "corpus"}),
    "minimal": ("victorvikram/ConceptARC", "b22ef526b4656679816b7811e78f55cc24d736d7", {"minimal": "MinimalTasks"}),
}


@dataclass
class ArcConfig:
    sets: str = "arc1,conceptarc"  # of arc1, arc2, conceptarc, minimal (ConceptARC's simplest), separated by commas
    data_file: str = ""  # folder with the sets, as repositories or files like arc1_training.json.gz; empty = download
    tasks: str = ""  # ids, separated by commas, or a number: the first so many of each part; empty = all
    board: int = 30  # rows and columns of the board; a smaller one leaves tasks with larger grids out
    num_augments: int = 1000  # transformations to train each task in besides as it is, each with a puzzle id
    augment_translate: bool = True  # move training examples about on the board
    arc_augments: int = 1000  # variants of a test input that are voted over; no more than are trained
    num_val: int = 50  # training tasks whose test pairs validate instead of training; at most half of them
    overlaps: Literal["drop", "keep"] = "drop"  # training pairs that give a test answer away: leave out, or train on
    data_seed: int = 0  # seed of the transformations and of the choice of validation tasks
    data_dir: str = "data/cache"  # folder for downloaded files


# ---- reading tasks


@dataclass
class Task:
    """train, test: lists of (input, output) grids, (h, w) uint8; name: its id in its set; part: of the set."""

    name: str
    set: str
    part: str
    train: list
    test: list

    @property
    def evaluates(self):
        return self.part == "evaluation"

    @property
    def pairs(self):
        return self.train + self.test


def to_pairs(task, kind, where, answers=True):
    """The pairs of "train" or "test" of a task as JSON -> list of (input, output); output None without `answers`."""
    pairs = task.get(kind) if isinstance(task, dict) else None
    sides = ("input", "output") if answers else ("input",)
    if not isinstance(pairs, list) or not all(isinstance(pair, dict) and pair.keys() >= {*sides} for pair in pairs):
        raise ValueError(f"{where} is no task; give a list of pairs of {' and '.join(sides)} under {kind!r}")
    if not pairs:
        raise ValueError(f"{where}: has no pair under {kind!r}; give at least one")
    grids = [[to_grid(pair[side], f"{where}: {side} {i + 1} of {kind!r}") for side in sides]
             for i, pair in enumerate(pairs)]
    return [(grid, *rest) if rest else (grid, None) for grid, *rest in grids]


def read_json(path):
    """What a JSON file, .gz or not, holds. ValueError, one line, if it cannot be read."""
    try:
        with (gzip.open if path.endswith(".gz") else open)(path, "rt", encoding="utf-8") as file:
            return json.load(file)
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise ValueError(f"cannot read {path} as JSON ({error}); give a whole file") from None


def find_part(config, name, part):
    """The tasks of a part of a set as JSON: (path, id -> task). ValueError, one line, if it is not to be found."""
    repository, _, folders = REPOSITORIES[name]
    file = f"{'conceptarc' if name == 'minimal' else name}_{part}.json"
    for path in (os.path.join(config.data_file, file + end) for end in ("", ".gz")):
        if os.path.exists(path):
            return path, read_json(path)
    clone = os.path.basename(repository)
    inside = [os.path.join(config.data_file, clone, folders[part]), os.path.join(config.data_file, folders[part])]
    if {"arc1", "arc2"} <= set(config.sets.split(",")):
        del inside[1]  # it could be either's
    for folder in inside:
        if files := sorted(glob.glob(os.path.join(glob.escape(folder), "**", "*.json"), recursive=True)):
            return folder, {os.path.basename(path)[: -len(".json")]: read_json(path) for path in files}
    raise ValueError(f"--data_file {config.data_file}: has no {file}, {file}.gz or folder {' or '.join(inside)} with "
                     f"tasks; put one there, leave {name} out of --sets, or leave --data_file out to download it")


def fetch_part(config, name, part):
    """As find_part, from the repository's archive, which is downloaded once."""
    repository, commit, folders = REPOSITORIES[name]
    path = os.path.join(config.data_dir, f"{os.path.basename(repository)}-{commit[:7]}.zip")

    def read(path):
        try:
            with zipfile.ZipFile(path) as archive:
                names = [n for n in archive.namelist() if f"/{folders[part]}/" in n and n.endswith(".json")]
                return {os.path.basename(n)[: -len(".json")]: json.loads(archive.read(n)) for n in sorted(names)}
        except (zipfile.BadZipFile, zlib.error) as error:
            raise ValueError(f"{path} is no whole archive: {error}; delete it") from None

    download(f"https://codeload.github.com/{repository}/zip/{commit}", path, read,
             hint="clone it elsewhere and name the folder that holds the clone with --data_file")
    return path, read(path)


def read_tasks(config):
    """All tasks of the sets, as list of Task: the training parts of all first, then those to evaluate on."""
    if config.data_file and not os.path.isdir(config.data_file):
        raise ValueError(f"--data_file {config.data_file} is not a folder; name the one that holds the sets")
    tasks = []
    for name in config.sets.split(","):
        for part in REPOSITORIES[name][2]:
            path, raw = (find_part if config.data_file else fetch_part)(config, name, part)
            for task_id, task in sorted(raw.items()):
                where = f"{path}: {task_id}"
                tasks.append(Task(task_id, name, part, to_pairs(task, "train", where), to_pairs(task, "test", where)))
    return sorted(tasks, key=lambda task: task.evaluates)  # stable


def side(task):
    """The most rows or columns that a grid of a task has."""
    return max(max(grid.shape) for pair in task.pairs for grid in pair)


def choose(tasks, wanted, board):
    """The tasks that fit on the board and that --tasks names: ids, or a number of them in each part."""
    names = [name.strip() for name in wanted.split(",")]
    for task in tasks:
        if task.name in names and side(task) > board:
            raise ValueError(f"--tasks {wanted}: {task.name} has grids of {side(task)}x{side(task)}, but --board is "
                             f"{board}; raise it, or leave the task out")
    tasks = [task for task in tasks if side(task) <= board]
    if not wanted:
        return tasks
    if wanted.isdecimal() and len(wanted) < 6:  # ids have 8 characters
        seen, kept = {}, []
        for task in tasks:
            place = seen[task.set, task.part] = seen.get((task.set, task.part), 0) + 1
            kept += [task] * (place <= int(wanted))
        return kept
    if unknown := [name for name in names if name not in {task.name for task in tasks}]:
        raise ValueError(f"--tasks {wanted}: {unknown[0]!r} is in none of the sets; give ids that are, or a number")
    return [task for task in tasks if task.name in names]


# ---- who may train on what


def pair_key(pair):
    """A hashable of both grids of a pair."""
    return tuple((grid.shape, grid.tobytes()) for grid in pair)


@dataclass
class Overlap:
    """What two parts have in common."""

    first: str  # as in "arc1 evaluation"
    second: str
    ids: list  # of tasks in both
    equal: list  # those of them with the same pairs, in any order
    sharing: list  # (id in the first, id in the second) of other tasks that share a pair


def overlaps(tasks):
    """What each evaluation part has in common with the other parts: list of Overlap, those with nothing left out."""
    parts, found = {}, []
    for task in tasks:
        parts.setdefault(f"{task.set} {task.part}", {})[task.name] = {pair_key(pair) for pair in task.pairs}
    names = sorted(parts, key=lambda name: name.endswith("evaluation"))
    for i, second in enumerate(names):
        for first in names[:i] if second.endswith("evaluation") else ():
            ours, theirs = parts[first], parts[second]
            owners = {key: name for name, keys in ours.items() for key in keys}
            ids = [name for name in theirs if name in ours]
            sharing = sorted({(owners[key], name) for name, keys in theirs.items() if name not in ours
                              for key in keys if key in owners})
            if ids or sharing:
                found.append(Overlap(first, second, ids, [name for name in ids if ours[name] == theirs[name]], sharing))
    return found


def without_repeats(tasks):
    """(tasks without those of training parts whose id an earlier set or an evaluation part has too, a note or '')."""
    seen, kept = {task.name for task in tasks if task.evaluates}, []
    for task in tasks:
        if task.evaluates or task.name not in seen:
            kept.append(task)
        seen.add(task.name)
    dropped = len(tasks) - len(kept)
    return kept, f"left out of training: {dropped:,} tasks that another part holds under the same id" * (dropped > 0)


def validate(config):
    """ValueError, one line, for values that cannot be."""
    for name in config.sets.split(","):
        if name not in REPOSITORIES or config.sets.split(",").count(name) > 1:
            raise ValueError(f"--sets {config.sets}: {name!r} is unknown or there twice; give some of "
                             f"{', '.join(REPOSITORIES)}, separated by commas")
    if not 1 <= config.board <= SIDE:
        raise ValueError(f"--board {config.board}: give 1 to {SIDE} rows of cells")
    for name, least in {"num_augments": 0, "arc_augments": 1, "num_val": 0, "data_seed": 0}.items():
        most = MOST if name.endswith("augments") else 2**32
        if not least <= getattr(config, name) <= most:
            raise ValueError(f"--{name} {getattr(config, name)}: give {least} to {most}")


def load(config, prepare=True, saved=None):
    """Read the tasks of an ArcConfig: ArcData. ValueError, one line, for mistakes.

    prepare makes no difference: to solve a task takes its puzzle id. saved: what a checkpoint kept of state(); its ids
    must be those of this data.
    """
    validate(config)
    tasks = choose(read_tasks(config), config.tasks, config.board)
    if not any(task.evaluates for task in tasks):
        raise ValueError(f"--sets {config.sets} --tasks {config.tasks or 'all'} --board {config.board}: there is no "
                         "evaluation task among them; add arc1 or arc2, the id of one, or a larger board")
    data = ArcData(config, tasks)
    theirs, ours = saved or {}, data.state()
    if theirs.get("num_ids", ours["num_ids"]) != ours["num_ids"]:
        raise ValueError(f"the checkpoint was trained with {theirs['num_ids']:,} puzzle ids, but this data has "
                         f"{ours['num_ids']:,}; give the --sets, --tasks and --num_augments that it was trained with")
    if theirs.get("ids", ours["ids"]) != ours["ids"]:
        raise ValueError(f"the {ours['num_ids']:,} puzzle ids of this data do not mean what those of the checkpoint "
                         "mean; give the --sets, --tasks, --data_seed and files that it was trained with")
    return data


class ArcData:
    """Tasks, their puzzle ids and splits, and what a training script asks of a data set.

    The splits train, val and test and `vote`, all variants of the test inputs, are arrays (N, 2) int64 of rows: the
    pair, an index into `pairs`, and its transformation, counted from 0 within its task.
    """

    tokenizer = grade = None  # grids are no text, and a pair has one answer
    longest = 0  # all have 900 cells

    def __init__(self, config, tasks):
        self.config, self.found = config, overlaps(tasks)
        self.tasks, note = without_repeats(tasks) if config.overlaps == "drop" else (tasks, "")
        self.notes = [note] if note else []
        self.pairs = [pair for task in self.tasks for pair in task.pairs]
        self.pair_task = np.repeat(np.arange(len(self.tasks)), [len(task.pairs) for task in self.tasks])  # (P,)
        self.numbers, self.orders, self.counts = self._number()
        self.first_id = 1 + np.r_[0, self.counts.cumsum()]  # (tasks + 1,); id 0 is no task's
        self.num_ids = int(self.first_id[-1])
        self._split()
        self._epoch = functools.lru_cache(maxsize=2)(self._epoch)  # a batch may end one and begin the next

    def _number(self):
        """Draw the transformations: their numbers, of all tasks in a row; color orders (tasks, 9); counts (tasks,).

        Colours are looked up without the answers of test pairs, which a solver could not know.
        """
        numbers, orders = [], []
        for task in self.tasks:
            order, used = color_order([grid for pair in task.train for grid in pair] + [pair[0] for pair in task.test])
            name = f"{task.set}/{task.name}"
            numbers.append(augmentations(self.config.data_seed, name, used, self.config.num_augments))
            orders.append(order)
        return np.concatenate(numbers), np.stack(orders), np.array([len(of_task) for of_task in numbers])

    def _split(self):
        """Assign every pair to train, val or test, and drop from train what gives an answer of the others away."""
        c, P = self.config, len(self.pairs)
        is_test = np.concatenate([np.arange(len(t.pairs)) >= len(t.train) for t in self.tasks])
        evaluates = np.array([task.evaluates for task in self.tasks])
        trained = np.random.default_rng([c.data_seed, 1]).permutation(np.flatnonzero(~evaluates))
        validates = np.isin(np.arange(len(self.tasks)), trained[: min(c.num_val, len(trained) // 2)])
        test, val = is_test & evaluates[self.pair_task], is_test & validates[self.pair_task]
        train = ~(test | val)
        if c.overlaps == "drop":
            answers = {pair_key(self.pairs[i]) for i in np.flatnonzero(~train)}
            given_away = np.array([train[i] and pair_key(self.pairs[i]) in answers for i in range(P)])
            train &= ~given_away
            if given_away.any():
                self.notes.append(f"left out of training: {given_away.sum():,} pairs that equal a val or test pair")
        self.train, self.val, self.test = (np.stack([rows, 0 * rows], axis=1) for rows in
                                           map(np.flatnonzero, (train, val, test)))
        tests = self.test[:, 0]
        variants = np.minimum(self.counts[self.pair_task[tests]], c.arc_augments)
        number, place = np.nonzero(np.arange(variants.max())[:, None] < variants)  # so early stops leave whole votes
        self.vote = np.stack([tests[place], number], axis=1)

    @property
    def model_args(self):
        """What a model has to know."""
        return dict(vocab_size=VOCAB, seq_len=self.config.board**2, num_puzzle_identifiers=self.num_ids, box_rows=0,
                    box_cols=0)

    def state(self):
        """What must travel with a model's weights: how many puzzle ids there are, and a hash of what they mean."""
        names = [(task.set, task.part, task.name) for task in self.tasks]
        return {"num_ids": self.num_ids, "ids": content_hash(names, self.numbers, self.orders, self.counts)[:16]}

    def summary(self):
        """Readable lines: the sets, their sizes, ids and splits, overlaps, and a hash of all pairs."""
        c, parts = self.config, {}
        for task in self.tasks:
            parts[f"{task.set} {task.part}"] = parts.get(f"{task.set} {task.part}", 0) + 1
        sizes = ", ".join(f"{number:,} tasks of {name}" for name, number in parts.items())
        sizes += f" with grids of up to {c.board}x{c.board}" * (c.board < SIDE)
        lines = [f"arc: {sizes}, seed {c.data_seed}",
                 f"{self.num_ids:,} puzzle ids: 0, and each task as it is and in up to {c.num_augments:,} other "
                 "transformations"]
        for name in ("train", "val", "test"):
            pairs = getattr(self, name)[:, 0]
            lines.append(f"{name}: {len(pairs):,} pairs of {len(np.unique(self.pair_task[pairs])):,} tasks")
        lines[2] += ", a random transformation of each task every epoch" + ", moved about" * c.augment_translate
        lines[4] += f"; a vote is over {len(self.vote):,} variants"
        for found in self.found:
            facts = [f"{len(found.ids):,} ids in common, {len(found.equal):,} of them with the same pairs"]
            facts = facts * bool(found.ids) + [f"{b} shares a pair with {a}" for a, b in found.sharing]
            lines.append(f"overlap of {found.second} with {found.first}: {'; '.join(facts)}")
        return lines + self.notes + [f"sha256 of all pairs {self.hash[:12]}"]

    @functools.cached_property
    def hash(self):
        """Hex sha256 of all pairs."""
        return content_hash([*map(pair_key, self.pairs)])

    # ---- batches

    def transformations(self, rows):
        """Rows (N, 2) of a split -> (dihedral (N,) int64, colors (N, 10) uint8)."""
        tasks = self.pair_task[rows[:, 0]]
        return transformations(self.numbers[self.first_id[tasks] - 1 + rows[:, 1]], self.orders[tasks])

    def batch(self, rows, corners=None):
        """Rows (B, 2) -> dict of inputs, labels (B, T) and puzzle_identifiers (B,), int64.

        corners: (B, 2) in [0, 1), how far down and right of its room each pair stands; None = in the corner.
        """
        board = self.config.board
        tokens = np.empty((2, len(rows), board**2), np.int64)
        for i, (pair, dihedral, colors) in enumerate(zip(rows[:, 0], *self.transformations(rows))):
            grids = [transform(grid, dihedral, colors) for grid in self.pairs[pair]]
            room = 1 + board - np.maximum(grids[0].shape, grids[1].shape)
            corner = (0, 0) if corners is None else (corners[i] * room).astype(int)
            tokens[:, i] = [encode(grid, *corner, board) for grid in grids]
        ids = self.first_id[self.pair_task[rows[:, 0]]] + rows[:, 1]
        return dict(inputs=tokens[0], labels=np.where(tokens[1] == PAD, IGNORE, tokens[1]), puzzle_identifiers=ids)

    def _epoch(self, seed, epoch):
        """One epoch's rows (N, 2) and corners (N, 2): task by task, each in one transformation."""
        rng, pairs = np.random.default_rng([seed, 0, epoch]), self.train[:, 0]
        place, number = rng.permutation(len(self.tasks)), rng.integers(0, self.counts)  # of each task
        pairs = pairs[np.lexsort((rng.random(len(pairs)), place[self.pair_task[pairs]]))]
        tasks, corners = self.pair_task[pairs], rng.random((len(pairs), 2))
        corners[np.diff(tasks, prepend=-1) != 0] = 0  # one pair of each task stands as in a test
        return np.stack([pairs, number[tasks]], axis=1), corners * self.config.augment_translate

    def train_batch(self, index, batch_size, seed):
        """Batch `index` of training, as batch() returns it: a pure function of its arguments and the data."""
        epochs, places = np.divmod(np.arange(index * batch_size, (index + 1) * batch_size), len(self.train))
        parts = [[part[places[epochs == epoch]] for part in self._epoch(seed, int(epoch))]
                 for epoch in np.unique(epochs)]
        return self.batch(*map(np.concatenate, zip(*parts)))

    def eval_batches(self, split, batch_size):
        """Iterate over "train", "val", "test" or "vote" in order, not moved about; the last batch may be short."""
        rows = getattr(self, split)
        for start in range(0, len(rows), batch_size):
            yield self.batch(rows[start : start + batch_size])

    def groups(self):
        """The test rows by set: label -> [mask (N,) bool]."""
        return by_source(np.array([self.tasks[task].set for task in self.pair_task[self.test[:, 0]]]))

    # ---- one task, for a user

    @functools.cached_property
    def _known(self):
        """Tokens of an input, as bytes -> index of its pair; of a test pair, if several have it."""
        order = np.argsort(np.isin(np.arange(len(self.pairs)), self.test[:, 0]), kind="stable")
        return {encode(self.pairs[i][0], side=self.config.board).tobytes(): i for i in order}

    def _pair(self, inputs):
        """Tokens (T,) of an untransformed input -> index of its pair, or None."""
        return self._known.get(np.asarray(inputs, np.uint8).tobytes())

    def identifiers(self, inputs):
        """Puzzle ids (B,) int64 of untransformed inputs (B, T), 0 for an input of no known task."""
        pairs = [self._pair(tokens) for tokens in np.asarray(inputs)]
        return np.array([0 if i is None else self.first_id[self.pair_task[i]] for i in pairs], np.int64)

    def parse(self, text):
        """The id of a task, or the path of a JSON file of one -> tokens (B, T) int64 of its test inputs."""
        tests = next((task.test for task in reversed(self.tasks) if task.name == text), None)
        if os.path.isfile(text):
            tests = to_pairs(read_json(text), "test", text, answers=False)
        if tests is None:
            some = f" --tasks {self.config.tasks}" * bool(self.config.tasks)
            raise ValueError(f"{text!r} is neither the id of a task in --sets {self.config.sets}{some} nor a file; "
                             "give one")
        if (most := max(max(pair[0].shape) for pair in tests)) > self.config.board:
            raise ValueError(f"{text}: has an input of {most} rows or columns, but --board is {self.config.board}; "
                             "give a smaller one, or a model that was trained on a larger board")
        return np.stack([encode(pair[0], side=self.config.board) for pair in tests]).astype(np.int64)

    def problem(self, inputs):
        """A line about an input (T,) that belongs to no task of this data; '' if it does."""
        return "" if self._pair(inputs) is not None else ("the input is of no task that was trained on, so it goes in "
                                                          "without a puzzle id; do not expect much")

    def verdict(self, inputs, answer):
        """(is the answer (T,) of an input (T,) right, one line about it)."""
        pair, grid = self._pair(inputs), decode(answer)
        if grid is None:
            return False, "no grid in the top left corner"
        shape = "{}x{} grid".format(*grid.shape)
        if pair is None:
            return False, f"a {shape}, of a task whose answer is not known here"
        right = np.array_equal(grid, self.pairs[pair][1])
        return right, f"a {shape}, {'' if right else 'not '}the answer of task {self.tasks[self.pair_task[pair]].name}"

    def draw(self, inputs, answer, label=None, color=True):
        """An answer as text, a digit per cell, and right of it the label's grid if there is one; wrong cells have a !.

        inputs, not drawn, answer and label: (T,) tokens. An answer that is no grid is drawn as one dot.
        """
        grids = [decode(answer)] if label is None else [decode(answer), decode(label)]
        return draw(grids, color)
