"""Maze data: python -m pytest tests/test_maze.py -q   (from the project's root; under a minute, no network)"""

import gzip
import io
import os
import urllib.request
from collections import deque

import golden
import numpy as np
import pytest
import torch

from data import maze, maze_solver
from data.maze import MazeConfig, load, read_mazes
from data.maze_solver import (GOAL, OPEN, PATH, START, STYLES, TOKENS, WALL, canonical, count_moves, generate, grids,
                              label, random_symmetries, rule_path, shortest, to_bits, to_cells, transform)
from hrm import HRM, HRMConfig

REAL = golden.FOLDER / "maze_hard_20.csv.gz"
SMALL = ("S..#", ".#..", "...#", "#.#G")  # no way to G
OPEN4 = ("S...", ".#..", "..#.", "...G")  # several shortest paths of 6 moves
RULE4 = ("S...", "o#..", "o.#.", "oooG")  # down as long as that is nearer


def text(tokens):
    return "".join(TOKENS[t] for t in tokens)


def tokens(rows):
    return maze_solver.to_tokens(["".join(rows)], len(rows))


def slow_distances(free, start):
    """Moves from a place to each cell, a dict, by a queue: shares nothing with the search under test."""
    n, distance, queue = len(free), {divmod(int(start), len(free)): 0}, deque([divmod(int(start), len(free))])
    while queue:
        row, column = queue.popleft()
        for cell in ((row + 1, column), (row - 1, column), (row, column + 1), (row, column - 1)):
            if cell not in distance and 0 <= min(cell) and max(cell) < n and free[cell]:
                distance[cell] = distance[row, column] + 1
                queue.append(cell)
    return distance


def slow_rule(free, start, goal):
    """Cells of the path that the rule chooses, in order; [] if there is none."""
    to_goal, cell = slow_distances(free, goal), divmod(int(start), len(free))
    path = [cell] if cell in to_goal else []
    while path and to_goal[cell]:
        row, column = cell
        order = ((row + 1, column), (row, column - 1), (row, column + 1), (row - 1, column))
        cell = next(c for c in order if to_goal.get(c) == to_goal[cell] - 1)
        path.append(cell)
    return path


def random_mazes(number, n, seed, walls=0.35):
    """Random layouts with S and G anywhere on open cells; some have no path. (N, T) uint8 tokens"""
    rng = np.random.default_rng(seed)
    inputs = np.where(rng.random((number, n * n)) < walls, WALL, OPEN).astype(np.uint8)
    for row in inputs:
        start, goal = rng.choice(n * n, 2, replace=False)
        row[start], row[goal] = START, GOAL
    return inputs


def config(tmp_path, **changes):
    small = dict(size=8, num_train=40, num_val=5, num_test=6, data_dir=str(tmp_path / "cache"))
    return MazeConfig(**{**small, **changes})


def write(path, lines, end="\n"):
    path.write_bytes((end.join(lines) + end).encode("utf-8"))
    return str(path)


def reject(function, *args):
    """The message of the ValueError that a call must raise: one line."""
    with pytest.raises(ValueError) as error:
        function(*args)
    assert "\n" not in str(error.value), error.value
    return str(error.value)


# ----------------------------------------------------------------------------------------------------------------------
# Searching and the rule

@pytest.mark.parametrize("n", [4, 7, 13, 33, 63])
def test_search_agrees_with_a_queue(n):
    inputs = random_mazes(20 if n < 20 else 5, n, seed=n)
    free, start, goal = grids(inputs)
    path, moves = rule_path(free, start, goal)
    assert (count_moves(free, start, goal) == moves).all() and (to_cells(to_bits(free)) == free).all()
    for i in range(len(free)):
        want = slow_rule(free[i], start[i], goal[i])
        assert moves[i] == len(want) - 1
        assert sorted(zip(*np.nonzero(path[i]))) == sorted(want)


def test_the_rule_gives_the_published_labels():
    split, notes = read_mazes(str(REAL), 30)
    with gzip.open(REAL, "rt", encoding="utf-8", newline="") as file:
        rows = [line.rstrip("\n").split(",") for line in file][1:]
    assert len(split) == 20 and not notes
    assert [text(t) for t in split.inputs] == [row[0] for row in rows]
    assert [text(t) for t in split.labels] == [row[1] for row in rows]
    assert split.moves.tolist() == [int(row[2]) for row in rows] and split.moves.min() >= 109
    for i in range(3):
        free, start, goal = (part[0] for part in grids(split.inputs[i:i + 1]))
        assert len(slow_rule(free, start, goal)) - 1 == split.moves[i]


def test_moves_are_tried_down_left_right_up():
    (got,), (moves,) = label(tokens(OPEN4))
    assert text(got) == text(tokens(RULE4)[0]) and moves == 6
    corner = label(tokens(("...G", "....", "....", "S...")))[0][0]  # left never helps, right goes before up
    assert text(corner) == text(tokens(("...G", "...o", "...o", "Sooo"))[0])
    corner = label(tokens(("G...", "....", "....", "...S")))[0][0]
    assert text(corner) == text(tokens(("G...", "o...", "o...", "oooS"))[0])
    same, (none,) = label(tokens(SMALL))
    assert (same == tokens(SMALL)).all() and none == -1
    assert [part.shape for part in label(tokens(OPEN4)[:0])] == [(0, 16), (0,)]


# ----------------------------------------------------------------------------------------------------------------------
# Symmetries

def test_there_are_eight_symmetries_and_one_canonical_form():
    rng = np.random.default_rng(0)
    free = rng.random((5, 6, 6)) < 0.6
    looks = [transform(free, kind) for kind in range(8)]
    for i in range(5):
        assert len({look[i].tobytes() for look in looks}) == 8
        turned, want = free[i], set()
        for _ in range(4):
            turned = np.rot90(turned)
            want |= {turned.tobytes(), turned[:, ::-1].tobytes()}
        assert {look[i].tobytes() for look in looks} == want
    assert len({form for look in looks for form in canonical(look)}) == 5
    assert canonical(free)[0] != canonical(free ^ (np.arange(36).reshape(6, 6) == 7))[0]
    moved = random_symmetries(np.repeat(free[:1], 400, axis=0), rng)
    counts = np.unique(moved.reshape(400, -1), axis=0, return_counts=True)[1]
    assert len(counts) == 8 and counts.min() > 25, "each about 50 times"


def test_augmented_labels_follow_the_rule(tmp_path):
    data = load(config(tmp_path))
    batch = data.train_batch(0, 200, seed=3)
    free, start, goal = grids(batch["inputs"])
    forms, stale = set(canonical(grids(data.train.inputs)[0])), 0
    for i in range(200):
        want = {row * 8 + column for row, column in slow_rule(free[i], start[i], goal[i])[1:-1]}
        assert set(np.flatnonzero(batch["labels"][i] == PATH)) == want
    assert set(canonical(free)) <= forms and len(np.unique(batch["inputs"], axis=0)) > 100
    grid = data.train.labels.reshape(-1, 8, 8)
    for kind in range(1, 8):
        turned = transform(grid, kind).reshape(len(grid), -1)
        stale += (label(np.where(turned == PATH, OPEN, turned))[0] != turned).any(axis=1).sum()
    assert stale > 0, "turning the label with the maze would break the rule"


# ----------------------------------------------------------------------------------------------------------------------
# Generator

@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("n, min_path", [(10, 21), (11, 24)])
def test_generated_mazes_have_long_shortest_paths(style, n, min_path):
    free, start, goal, styles = generate(12, n, min_path, [style], seed=1)
    assert free.shape == (12, n, n) and set(styles) == {style} and len(set(canonical(free))) == 12
    for i in range(12):
        assert free[i].flat[start[i]] and free[i].flat[goal[i]]
        assert slow_distances(free[i], start[i])[divmod(int(goal[i]), n)] > min_path


@pytest.mark.parametrize("style", ["corridors", "branches", "rooms"])
@pytest.mark.parametrize("n", [9, 10])
def test_built_mazes_hang_together(style, n, monkeypatch):
    monkeypatch.setattr(maze_solver, "_knock", lambda free, share, rng: free)  # no loops
    for free in STYLES[style](10, n, np.random.default_rng(0)):
        reached = slow_distances(free, np.flatnonzero(free)[0])
        assert len(reached) == free.sum()
        walks = (free[1:] & free[:-1]).sum() + (free[:, 1:] & free[:, :-1]).sum()
        assert walks == free.sum() - 1 or style == "rooms", "a tree: one way between any two cells"


def test_styles_are_mixed_in_equal_shares_and_seeded():
    first = generate(30, 8, 12, list(STYLES), seed=4)
    again, other = generate(30, 8, 12, list(STYLES), seed=4), generate(30, 8, 12, list(STYLES), seed=5)
    assert all((a == b).all() for a, b in zip(first, again)) and (first[0] != other[0]).any()
    assert sorted(np.unique(first[3], return_counts=True)[1]) == [7, 7, 8, 8]
    assert len(set(first[3][:10])) > 2, "the styles should be mixed"
    avoid = canonical(first[0])
    assert not set(avoid) & set(canonical(generate(30, 8, 12, list(STYLES), seed=4, avoid=avoid)[0]))
    assert [len(part) for part in generate(0, 8, 12, list(STYLES), seed=4)] == [0] * 4


def test_a_path_that_is_too_long_is_told(tmp_path):
    message = reject(load, config(tmp_path, size=6, min_path=30, styles="rooms"))
    assert "6x6 mazes in style rooms" in message and "--min_path" in message and "--styles" in message


# ----------------------------------------------------------------------------------------------------------------------
# Splits and cache

def test_splits_share_no_walls_even_turned(tmp_path):
    data = load(config(tmp_path, size=5, min_path=5, num_train=60, num_val=20, num_test=20))
    forms = [split.layouts() for split in (data.train, data.val, data.test)]
    assert len(set().union(*forms)) == 100
    for split in (data.train, data.val, data.test):
        assert (label(split.inputs)[0] == split.labels).all() and split.moves.min() > 5
        assert (label(split.inputs)[1] == split.moves).all()


def test_planted_symmetric_duplicates_are_dropped(tmp_path):
    split = load(config(tmp_path)).train
    turned = [text(transform(grid, 5).flat) for grid in split.inputs[:8].reshape(-1, 8, 8)]
    swapped = text(split.inputs[5]).translate(str.maketrans("SG", "GS"))
    test_file = write(tmp_path / "test.txt", turned[:5])
    data_file = write(tmp_path / "all.txt", [text(t) for t in split.inputs[:30]] + turned[6:] + [swapped])
    data = load(config(tmp_path, data_file=data_file, test_file=test_file, num_train=-1, num_val=4))
    assert (len(data.train), len(data.val), len(data.test)) == (21, 4, 5)
    assert "5 with the walls of a test maze, 3 with an earlier one's" in "\n".join(data.summary())
    assert [text(t) for t in data.test.inputs] == turned[:5], "a test file should be used whole and in order"
    made = load(config(tmp_path, test_file=test_file))
    assert not set(made.train.layouts() + made.val.layouts()) & set(made.test.layouts()) and len(made.train) == 40
    assert "too few" in reject(load, config(tmp_path, data_file=test_file, num_val=4, num_test=2))


def test_cache_is_used_and_keyed_by_what_matters(tmp_path, monkeypatch):
    first = load(config(tmp_path))
    monkeypatch.setattr(maze, "build", None)  # a call would fail
    again = load(config(tmp_path, augment=False, min_path=15))
    assert (again.train.inputs == first.train.inputs).all() and (again.test.source == first.test.source).all()
    assert again.test.moves.dtype == np.int64 and again.summary()[1:] != first.summary()[1:], "it names augmentation"
    for changes in (dict(min_path=14), dict(styles="rooms"), dict(data_seed=1)):
        with pytest.raises(TypeError):
            load(config(tmp_path, **changes))


def test_crash_while_preparing_leaves_no_cache(tmp_path, monkeypatch):
    def crash(file, **arrays):
        file.write(b"half")
        raise OSError("disk full")
    monkeypatch.setattr(maze.np, "savez", crash)
    with pytest.raises(OSError):
        load(config(tmp_path))
    assert os.listdir(tmp_path / "cache") == []


def test_batches_are_pure_and_evaluation_goes_in_order(tmp_path):
    data = load(config(tmp_path))
    one, same, other = data.train_batch(2, 16, 7), data.train_batch(2, 16, 7), data.train_batch(3, 16, 7)
    assert all((one[name] == same[name]).all() for name in one) and (one["inputs"] != other["inputs"]).any()
    assert {name: (batch.shape, batch.dtype) for name, batch in one.items()} == {
        "inputs": ((16, 64), np.int64), "labels": ((16, 64), np.int64), "puzzle_identifiers": ((16,), np.int64)}
    plain = load(config(tmp_path, augment=False))
    seen = np.concatenate([plain.train_batch(i, 20, 7)["labels"] for i in range(2)])
    assert sorted(map(bytes, seen)) == sorted(map(bytes, data.train.labels.astype(np.int64)))
    batches = list(data.eval_batches("test", 4))
    assert [len(batch["inputs"]) for batch in batches] == [4, 2]
    assert (np.concatenate([batch["labels"] for batch in batches]) == data.test.labels).all()
    assert data.model_args == dict(vocab_size=6, seq_len=64, num_puzzle_identifiers=1, box_rows=0, box_cols=0)
    assert set(data.groups()) == set(STYLES) and sum(masks[0].sum() for masks in data.groups().values()) == 6
    assert data.tokenizer is None and data.state() == {} and data.longest == 0


@pytest.mark.parametrize("changes, message", [
    (dict(size=3), "size 3: give"), (dict(size=64), "size 64"), (dict(min_path=-2), "min_path -2"),
    (dict(styles="rooms,cave"), "'cave' is unknown; give one or more of scatter,"),
    (dict(styles="rooms,rooms"), "'rooms' is named twice"), (dict(styles=""), "'' is unknown"),
    (dict(num_train=0), "num_train 0"), (dict(num_train=10**12), "at most 10,000,000"),
    (dict(source="hard-1k"), "add --size 30"), (dict(data_seed=-1), "data_seed -1"),
    (dict(data_file="missing.csv"), "missing.csv")])
def test_mistaken_settings_are_named(tmp_path, changes, message):
    assert message in reject(load, config(tmp_path, **changes))


# ----------------------------------------------------------------------------------------------------------------------
# Scores

def test_exact_is_told_from_valid_and_shortest():
    inputs, right = tokens(OPEN4), label(tokens(OPEN4))[0]
    cases = {("Sooo", ".#.o", "..#o", "...G"): True, RULE4: True, ("S...", "o#..", "oo#.", ".ooG"): True,
             ("S...", "o#..", "oo#.", "oooG"): False,  # a cell too many
             ("S...", "o#..", "o.#.", "oo.G"): False,  # a gap
             ("Sooo", "o#.o", "o.#o", "oooG"): False,  # two paths
             ("Soo.", ".oo.", "..oo", "...G"): False,  # through walls
             ("S...", "o...", "o.#.", "oooG"): False,  # a wall taken away
             ("Go..", "o#..", "o.#.", "oooS"): False, OPEN4: False}
    answers = np.concatenate([tokens(rows) for rows in cases])
    many, rights = (np.repeat(part, len(cases), axis=0) for part in (inputs, right))
    assert shortest(many, rights, answers).tolist() == list(cases.values())
    data = maze.MazeData(MazeConfig(size=4))
    scores = data.grade(*(torch.from_numpy(part).long() for part in (many, rights, answers)))
    assert list(scores) == ["shortest_path"] and scores["shortest_path"].dtype == torch.float32
    assert scores["shortest_path"].tolist() == [float(value) for value in cases.values()]
    assert [data.verdict(inputs[0], answer)[0] for answer in answers] == list(cases.values())


def test_a_detour_and_padding_are_not_shortest():
    inputs = tokens(("S.G", "...", "..."))
    right, detour = label(inputs)[0], tokens(("S.G", "ooo", "..."))
    assert shortest(inputs, right, right).all() and not shortest(inputs, right, detour).any()
    assert not shortest(inputs, right, right * 0).any() and not shortest(inputs, right, right * 0 + PATH).any()
    next_door = tokens(("SG", ".."))
    assert shortest(next_door, next_door, next_door).all()


def test_hrm_tells_the_score_of_the_data_beside_its_own(monkeypatch):
    inputs = torch.from_numpy(np.repeat(tokens(OPEN4), 3, axis=0)).long()
    labels = torch.from_numpy(np.repeat(tokens(RULE4), 3, axis=0)).long()
    answers = torch.from_numpy(np.concatenate([tokens(rows) for rows in (
        RULE4, ("Sooo", ".#.o", "..#o", "...G"), OPEN4)])).long()
    model = HRM(HRMConfig(n_embd=16, n_head=2, vocab_size=6, seq_len=16, puzzle_emb_ndim=0))
    trace = (answers, torch.tensor([1, 1, 1]), answers[None], torch.zeros(1, 3))
    monkeypatch.setattr(model, "solve", lambda *args, **kwargs: trace)
    batches, data = [{"inputs": inputs, "labels": labels}] * 2, maze.MazeData(MazeConfig(size=4))
    named = model.evaluate(batches, [1, 2], data.grade)[2]
    assert list(named) == ["exact_accuracy", "accuracy", "shortest_path", "segments"]
    assert named["exact_accuracy"].tolist() == [1, 0, 0] * 2 and named["shortest_path"].tolist() == [1, 1, 0] * 2
    assert list(model.evaluate(batches, [1])[1]) == ["exact_accuracy", "accuracy", "segments"]


# ----------------------------------------------------------------------------------------------------------------------
# Files

def test_reader_accepts_all_the_usual_forms(tmp_path):
    flat = ["".join(OPEN4), "".join(OPEN4).replace(".", " ")]
    answer = "".join(RULE4).replace(".", " ")
    files = [write(tmp_path / "flat.txt", flat), write(tmp_path / "blocks.txt", [*OPEN4, "", *OPEN4, ""], "\r\n"),
             write(tmp_path / "cut.txt", [line.replace(".", " ").rstrip() for line in OPEN4] * 2),
             write(tmp_path / "ours.csv", ["question,answer,steps", *(f"{m},{answer},6" for m in flat)]),
             write(tmp_path / "theirs.csv", ["source,question,answer,rating", *(f"a,{m},{answer},6" for m in flat)])]
    packed = tmp_path / "packed.csv.gz"
    packed.write_bytes(gzip.compress(open(files[3], "rb").read()))
    for path in files + [str(packed)]:
        split, notes = read_mazes(path, 4)
        assert len(split) == 2 and not notes and split.moves.tolist() == [6, 6], path
        assert (split.inputs == tokens(OPEN4)).all() and (split.labels == tokens(RULE4)).all()
    assert read_mazes(files[4], 4)[0].source.tolist() == ["a", "a"] and read_mazes(files[3], 4)[0].source is None


def test_walls_and_blanks_at_the_ends_of_a_line_are_kept(tmp_path):
    inputs = ("  # ", "#S #", "#G##", "#   ")
    path = write(tmp_path / "a.txt", ["".join(inputs)] * 2)
    assert [text(t) for t in read_mazes(path, 4)[0].inputs] == ["".join(inputs)] * 2
    assert [text(t) for t in read_mazes(write(tmp_path / "b.txt", inputs), 4)[0].inputs] == ["".join(inputs)]


def test_another_shortest_path_is_relabelled_and_told(tmp_path):
    path = write(tmp_path / "a.csv", ["question,answer", "".join(OPEN4) + "," + "Sooo.#.o..#o...G"])
    split, notes = read_mazes(path, 4)
    assert (split.labels == tokens(RULE4)).all() and "1 answers mark another shortest path" in notes[0]


def bad_file(tmp_path):
    """A CSV with two good rows and one of each kind of bad one, and what must be said about those."""
    good, answer = "".join(OPEN4), "".join(RULE4)
    rows = [("question", "answer", None), (good, answer, None), (good[:-1], answer, "the maze has 15 characters"),
            (good.replace("#", "x"), "", "the maze holds 'x'; accepted: # for a wall"),
            (answer, answer, "the maze holds 'o'"),
            (good.replace("G", "."), "", "the maze has 0 G, not one"), (good.replace("#", "S"), "", "has 3 S, not one"),
            ("".join(SMALL), "", "no path leads from S to G"),
            (good, good, "as to the answer, the marked cells do not lead from S to G"),
            (good, answer[:-2] + ".G", "the marked cells do not lead"),
            (good, "Sooo.#oo.o#o..oG", "as to the answer, 3 marked cells are not on the path"),
            (good, "Sooooo.oo.#oooo.", "the answer has 0 G, not one"),
            (good, "Sooo.o.o..#o...G", "as to the answer, the wall at row 2 column 2 was changed (1 such cells)"),
            ("S.G.............", "SoGo............", "as to the answer, 1 marked cells are not on the path"),
            ("S.G.............", "S.G.ooo.........", "the marked path takes 4 moves, the shortest 2"), (good, "", None)]
    path = write(tmp_path / "bad.csv", [f"{a},{b}" for a, b, _ in rows])
    return path, {line: why for line, (_, _, why) in enumerate(rows, 1) if why}


def test_every_bad_row_is_named_by_line_and_reason(tmp_path):
    path, reasons = bad_file(tmp_path)
    message = reject(read_mazes, path, 4)
    named = dict(part.split(": ", 1) for part in message.split("rows bad (", 1)[1].split("; line "))
    named = {int(line.removeprefix("line ")): why for line, why in named.items()}
    assert set(named) == set(reasons)
    for line, why in reasons.items():
        assert why in named[line], (line, named)
    assert f"{len(reasons)} of {len(reasons) + 2} rows bad" in message and "--bad_rows skip" in message
    split, notes = read_mazes(path, 4, "skip")
    assert len(split) == 2 and "skipped" in notes[0]


def test_nothing_left_is_an_error(tmp_path):
    message = reject(read_mazes, write(tmp_path / "bad.txt", ["S" * 25, "x"]), 4, "skip")
    assert "no maze is left: 2 of 2" in message and "(--size 5 takes 25)" in message
    assert "the file holds none" in reject(read_mazes, write(tmp_path / "empty.txt", []), 4, "skip")


class Response(io.BytesIO):
    def __init__(self, content):
        super().__init__(content)
        self.headers = {"Content-Length": str(len(content))}


def test_published_set_is_downloaded_once_and_used_whole(tmp_path, monkeypatch):
    with gzip.open(REAL, "rt", encoding="utf-8") as file:
        rows = [line.rstrip("\n").split(",") for line in file][1:]
    lines = ["source,question,answer,rating"] + [f"maze,{q},{a},{steps}" for q, a, steps in rows]
    files = {"train": lines[:1] + lines[1:9] + lines[13:14], "test": lines[:1] + lines[13:]}  # one is in both
    calls = []

    def urlopen(url, timeout):
        calls.append(url)
        return Response("\n".join(files["test" if "test.csv" in url else "train"]).encode())
    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    monkeypatch.setattr(maze, "least_path", lambda config: 40)  # quickly made
    options = dict(source="hard-1k", size=30, num_train=-1, num_val=3)
    data = load(config(tmp_path, num_test=-1, **options))
    assert (len(data.train), len(data.val), len(data.test)) == (8, 3, 8)
    assert "1 with the walls of a test maze" in "\n".join(data.summary()) and set(data.val.source) == {"scatter"}
    assert len(load(config(tmp_path, num_test=5, **options)).test) == 5
    assert not len(load(config(tmp_path, **options | {"num_val": 0})).val)
    assert len(calls) == 2 and all(url.startswith("https://huggingface.co/datasets/sapientinc/maze-") for url in calls)
    monkeypatch.setattr(urllib.request, "urlopen", lambda url, timeout: Response(b"<html>log in</html>"))
    message = reject(load, config(tmp_path, data_dir=str(tmp_path / "other"), **options))
    assert "begins with '<html>" in message and "--data_file" in message


def test_a_damaged_cache_is_named(tmp_path):
    load(config(tmp_path))
    (path,) = (path for path in os.listdir(tmp_path / "cache") if path.endswith(".npz"))
    with open(tmp_path / "cache" / path, "r+b") as file:
        file.truncate(300)
    assert f"{path}: the prepared file is damaged; delete it" in reject(load, config(tmp_path))


# ----------------------------------------------------------------------------------------------------------------------
# Solving, drawing

@pytest.fixture(scope="module")
def four():
    return load(MazeConfig(size=4), prepare=False)


def test_parse_accepts_text_and_files_and_rejects_the_rest(four, tmp_path):
    flat = "".join(OPEN4)
    lines = "\n".join(line.replace(".", " ").rstrip() for line in OPEN4) + "\n"
    for form in (flat, lines, "\n".join(OPEN4), write(tmp_path / "a.txt", OPEN4)):
        assert (four.parse(form) == tokens(OPEN4)).all() and four.parse(form).dtype == np.int64
    assert four.parse(write(tmp_path / "two.csv", ["question,answer", flat + ",", flat + ","])).shape == (2, 16)
    assert "15 characters, not 16" in reject(four.parse, flat[1:])
    assert "holds 'a'" in reject(four.parse, "a" * 16)
    assert "has 2 S" in reject(four.parse, flat.replace("G", "S"))
    assert "line 2: the maze has 15" in reject(four.parse, write(tmp_path / "bad.txt", [flat, flat[:-1]]))
    assert "holds no maze" in reject(four.parse, write(tmp_path / "none.txt", [""]))


def test_problem_and_verdict(four):
    inputs, sealed = tokens(OPEN4)[0], tokens(SMALL)[0]
    assert four.problem(inputs) == "" and four.problem(sealed) == "no path leads from S to G"
    assert four.verdict(inputs, tokens(RULE4)[0]) == (True, "a shortest path of 6 moves, the one that is the label")
    other = tokens(("Sooo", ".#.o", "..#o", "...G"))[0]
    assert four.verdict(inputs, other) == (True, "a shortest path of 6 moves, another than the label")
    assert four.verdict(inputs, inputs) == (False, "the marked cells do not lead from S to G")
    assert four.verdict(sealed, sealed) == (False, "no path leads from S to G")
    other[0] = OPEN
    assert four.verdict(inputs, other) == (False, "the S at row 1 column 1 was changed (1 such cells)")


def test_drawing_is_aligned_and_marks_wrong_cells(four):
    inputs, right = tokens(OPEN4)[0], tokens(RULE4)[0]
    wrong = tokens(("S.o.", "oo..", "o.#.", ".ooG"))[0]
    wrong[10] = OPEN
    assert four.draw(inputs, wrong, right, color=False).split("\n") == [
        "+----+", "|S x |", "|ox  |", "|o ! |", "|-ooG|", "+----+"]
    assert four.draw(inputs, right, right, color=False).split("\n")[1:5] == ["|S   |", "|o#  |", "|o # |", "|oooG|"]
    assert four.draw(inputs, inputs, color=False).split("\n")[1:5] == ["|S   |", "| #  |", "|  # |", "|   G|"]
    other = tokens(("Sooo", ".#.o", "..#o", "...G"))[0]
    assert "x" not in four.draw(inputs, other, color=False), "without a label, any shortest path is right"
    assert four.draw(inputs, other, right, color=False).count("x") == 5
    assert "x" in four.draw(tokens(SMALL)[0], tokens(("So.#", ".#..", "...#", "#.#G"))[0], color=False)
    colored = four.draw(inputs, wrong, right)
    assert "\033[31mx" in colored and "\033[32mo" in colored and "\033[31m-" in colored and "\033[31m!" in colored
