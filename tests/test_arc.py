"""ARC data and votes: python -m pytest tests/test_arc.py -q   (from the project's root; seconds, no network)"""

import contextlib
import gzip
import io
import json
import os
import urllib.request
import zipfile

import numpy as np
import pytest
import torch

import hrm
import train
from data import arc, arc_vote
from data.arc import IGNORE, ArcConfig, load, overlaps, pair_key
from data.arc_grid import (END, PAD, SIDE, augmentations, color_order, count_transformations, decode, encode,
                           invert, transform, transformations)
from data.show import print_side_by_side

CELLS = SIDE * SIDE

def random_grid(rng, side=SIDE, colors=10):
    return rng.integers(0, colors, rng.integers(1, side + 1, 2)).astype(np.uint8)


def make_task(rng, train=3, test=1, colors=10):
    """A task as JSON: the output is the input mirrored, with a column of its own that no two tasks share."""
    def pair():
        grid = random_grid(rng, 9, colors)
        return {"input": grid.tolist(), "output": np.c_[grid[:, ::-1], grid[:, :1]].tolist()}
    return {"train": [pair() for _ in range(train)], "test": [pair() for _ in range(test)]}


def make_sets(seed=0):
    """file -> id -> task. Of 4 arc1 evaluation tasks two have 2 test pairs; arc2 repeats some of arc1."""
    rng = np.random.default_rng(seed)
    sets = {"arc1_training": {f"a{i:07}": make_task(rng) for i in range(6)},
            "arc1_evaluation": {f"e{i:07}": make_task(rng, test=1 + i % 2) for i in range(4)},
            "conceptarc_corpus": {f"Concept{i}": make_task(rng, 2, 3, colors=3) for i in range(2)},
            "arc2_training": {f"b{i:07}": make_task(rng) for i in range(3)},
            "arc2_evaluation": {f"f{i:07}": make_task(rng) for i in range(2)}}
    shared = sets["arc1_evaluation"]
    sets["arc2_training"]["e0000000"] = {part: pairs[::-1] for part, pairs in shared["e0000000"].items()}
    sets["arc2_training"]["e0000001"] = shared["e0000001"] | {"test": [make_task(rng)["test"][0]]}
    sets["arc1_training"]["a0000005"]["train"][1] = shared["e0000002"]["test"][0]  # gives an answer away
    return sets


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("compact")
    for i, (name, tasks) in enumerate(make_sets().items()):
        text = json.dumps(tasks).encode("utf-8")
        (path / f"{name}.json{'.gz' if i % 2 else ''}").write_bytes(gzip.compress(text) if i % 2 else text)
    return str(path)


def config(folder, **changes):
    return ArcConfig(**{**dict(sets="arc1,conceptarc", data_file=folder, num_augments=6, num_val=2), **changes})


@pytest.fixture
def data(folder):
    return load(config(folder))


def reject(function, *args):
    """The message of the ValueError that a call must raise: one line."""
    with pytest.raises(ValueError) as error:
        function(*args)
    assert "\n" not in str(error.value), error.value
    return str(error.value)


# ---- grids


def test_a_grid_survives_tokens_anywhere():
    rng = np.random.default_rng(0)
    for shape in [(1, 1), (30, 30), (1, 30), (30, 1), *rng.integers(1, 31, (200, 2))]:
        grid = rng.integers(0, 10, shape).astype(np.uint8)
        tokens = encode(grid)
        assert tokens.shape == (CELLS,) and tokens.dtype == np.uint8
        assert np.array_equal(decode(tokens), grid) and decode(tokens).dtype == np.uint8
        assert np.array_equal(decode(np.where(tokens == PAD, IGNORE, tokens.astype(int))), grid), "as a label"
        top, left = rng.integers(0, 31 - np.array(shape))
        board = encode(grid, top, left).reshape(SIDE, SIDE)
        assert np.array_equal(board[top : top + shape[0], left : left + shape[1]], grid + 2)
        h, w = shape
        ends = (w if top + h < SIDE else 0) + (h if left + w < SIDE else 0)
        assert (board == END).sum() == ends and (board == PAD).sum() == CELLS - h * w - ends


def test_end_markers_stand_below_and_right_of_the_grid():
    board = encode(np.array([[0, 9, 3], [1, 2, 4]], np.uint8)).reshape(SIDE, SIDE)
    assert board[:4, :5].tolist() == [[2, 11, 5, 1, 0], [3, 4, 6, 1, 0], [1, 1, 1, 0, 0], [0, 0, 0, 0, 0]]


@pytest.mark.parametrize("rows, expected", [
    (["123", "45", "678"], ["12", "45", "67"]), (["123", "4"], ["123"]), (["1", "234"], ["1", "2"]),
    ([" 12"], None), ([], None), (["1 2", "3 4"], ["1", "3"]), (["12345", "12", "12"], ["12"] * 3)])
def test_ragged_predictions_keep_the_largest_rectangle(rows, expected):
    board = np.full((SIDE, SIDE), END)
    for i, row in enumerate(rows):
        board[i, : len(row)] = [PAD if c == " " else int(c) + 2 for c in row]
    board[20:, 20:] = 7  # what lies outside does not matter
    grid = decode(board.reshape(-1))
    assert (grid is None) if expected is None else grid.tolist() == [[int(c) for c in row] for row in expected]


def test_a_full_board_of_anything_decodes():
    rng = np.random.default_rng(1)
    for _ in range(300):
        tokens = rng.choice(12, CELLS, p=[0.01, 0.01, *[0.098] * 10])
        grid = decode(tokens)
        assert grid is None or grid.max() <= 9 and (tokens.reshape(SIDE, SIDE)[: len(grid), : grid.shape[1]] >= 2).all()
    assert decode(np.full(CELLS, 11)).shape == (SIDE, SIDE)


@pytest.mark.parametrize("side", [1, 5, 8, 29])
def test_a_smaller_board_holds_every_grid_that_fits(side):
    rng = np.random.default_rng(3)
    for grid in [random_grid(rng, side) for _ in range(40)] + [np.ones((side, side), np.uint8)]:
        tokens = encode(grid, side=side)
        assert tokens.shape == (side * side,) and np.array_equal(decode(tokens), grid)


def test_transformation_and_inverse_are_exact_for_all_grids():
    rng = np.random.default_rng(2)
    for _ in range(400):
        grid, order = random_grid(rng, colors=rng.integers(1, 11)), rng.permutation(9) + 1
        numbers = rng.integers(0, count_transformations(9), 5)
        for dihedral, colors in zip(*transformations(numbers, order)):
            assert colors[0] == 0 and sorted(colors) == list(range(10))
            made = transform(grid, dihedral, colors)
            assert np.array_equal(invert(made, dihedral, colors), grid) and made.dtype == np.uint8
            assert ((made == 0).sum() == (grid == 0).sum()), "black stays"


def test_the_eight_symmetries_differ_and_keep_neighbours():
    grid = np.arange(6, dtype=np.uint8).reshape(2, 3)
    made = [transform(grid, d, np.arange(10, dtype=np.uint8)) for d in range(8)]
    assert len({(m.shape, m.tobytes()) for m in made}) == 8 and np.array_equal(made[0], grid)

    def neighbours(g):
        return {frozenset(p) for a in (g, g.T) for row in a.tolist() for p in zip(row, row[1:])}
    assert all(neighbours(m) == neighbours(grid) for m in made)


@pytest.mark.parametrize("held", [0, 1, 2, 3])
def test_every_number_means_something_else_to_a_task(held):
    grids = [np.array([[0, *[8, 3, 5][:held]]], np.uint8)]
    order, used = color_order(grids)
    total = count_transformations(used)
    assert used == held and total == 8 * [1, 9, 72, 504][held] and sorted(order) == list(range(1, 10))
    dihedral, colors = transformations(np.arange(total), order)
    assert len({(d, *c[grids[0][0]]) for d, c in zip(dihedral.tolist(), colors)}) == total
    assert dihedral[0] == 0 and colors[0].tolist() == list(range(10))
    drawn = augmentations(0, "x", used, 10_000)
    assert sorted(drawn) == list(range(total)) and drawn[0] == 0


def test_augmentations_are_pure_functions_without_repeats():
    many = augmentations(3, "arc1/x", 9, 5000)
    assert len(set(many.tolist())) == len(many) == 5001 and many[0] == 0
    assert np.array_equal(augmentations(3, "arc1/x", 9, 40), many[:41]), "the first do not depend on the number"
    assert not np.array_equal(augmentations(4, "arc1/x", 9, 40), many[:41])
    assert not np.array_equal(augmentations(3, "arc1/y", 9, 40), many[:41])
    assert len(augmentations(0, "x", 5, arc.MOST)) == arc.MOST + 1


# ---- protocol and ids


def undo(data, ids, tokens):
    """(task, untransformed grid) of tokens (900,), wherever on the board the grid stands, by its puzzle id."""
    task = int(np.searchsorted(data.first_id, ids, "right")) - 1
    board = np.asarray(tokens).reshape(SIDE, SIDE)
    rows, columns = (np.flatnonzero((board > END).any(axis)) for axis in (1, 0))
    grid = (board[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1] - 2).astype(np.uint8)
    dihedral, colors = transformations(data.numbers[[ids - 1]], data.orders[task])
    return task, invert(grid, dihedral[0], colors[0])


@pytest.mark.parametrize("sets", ["arc1,conceptarc", "arc1,arc2"])
def test_no_answer_of_an_evaluation_or_validation_task_is_trained_on(folder, sets):
    data = load(config(folder, sets=sets))
    held = {pair_key(data.pairs[i]) for i in np.r_[data.val[:, 0], data.test[:, 0]]}
    seen = {}
    for index in range(12):
        batch = data.train_batch(index, 16, seed=0)
        for ids, inputs, labels in zip(*(batch[k] for k in ("puzzle_identifiers", "inputs", "labels"))):
            (task, grid), (_, answer) = undo(data, ids, inputs), undo(data, ids, labels)
            assert pair_key((grid, answer)) not in held
            seen.setdefault(task, set()).add(pair_key((grid, answer)))
    for i, task in enumerate(data.tasks):  # and all of the rest is
        is_held = task.evaluates or i in data.pair_task[data.val[:, 0]]
        expected = {pair_key(pair) for pair in (task.train if is_held else task.pairs)}
        assert seen[i] == expected - held, task.name


def test_splits_are_the_official_ones(data):
    evaluation = make_sets()["arc1_evaluation"]
    assert [data.tasks[t].name for t in data.pair_task[data.test[:, 0]]] == [
        name for name, task in evaluation.items() for _ in task["test"]]
    val = {data.tasks[t].part for t in data.pair_task[data.val[:, 0]]}
    assert val <= {"training", "corpus"} and len(np.unique(data.pair_task[data.val[:, 0]])) == 2
    lines = "\n".join(data.summary())
    assert "6 tasks of arc1 training" in lines and "left out of training: 1 pairs" in lines
    assert "test: 6 pairs of 4 tasks" in lines and f"{data.num_ids} puzzle ids" in lines


def test_at_most_half_of_the_training_tasks_validate(folder):
    data = load(config(folder, num_val=50, tasks="2"))
    assert len(np.unique(data.pair_task[data.val[:, 0]])) == 2 and len(data.tasks) == 6


def test_overlap_is_dropped_or_kept_and_reported(folder):
    data = load(config(folder, sets="arc1,arc2"))
    assert "2 tasks that another part holds" in "\n".join(data.notes)
    assert [t.name for t in data.tasks if t.set == "arc2" and not t.evaluates] == [f"b{i:07}" for i in range(3)]
    kept = load(config(folder, sets="arc1,arc2", overlaps="keep"))
    assert len(kept.tasks) == len(data.tasks) + 2 and not kept.notes
    found = {(f.second, f.first): f for f in overlaps(kept.tasks)}
    both = found["arc1 evaluation", "arc2 training"]
    assert both.ids == ["e0000000", "e0000001"] and both.equal == ["e0000000"] and both.sharing == []
    assert found["arc1 evaluation", "arc1 training"].sharing == [("a0000005", "e0000002")] and len(found) == 2
    text = "\n".join(data.summary())
    assert "arc1 evaluation with arc2 training: 2 ids in common, 1 of them with the same pairs" in text
    assert "e0000002 shares a pair with a0000005" in text


def test_ids_are_one_per_task_and_transformation(data, folder):
    assert data.first_id[0] == 1 and data.num_ids == 1 + data.counts.sum() == data.model_args["num_puzzle_identifiers"]
    assert (data.counts == 7).all(), "6 and the identity"
    assert len(load(config(folder, num_augments=0)).tasks) == load(config(folder, num_augments=0)).num_ids - 1
    rows = data.vote
    batch = data.batch(rows)
    task = data.pair_task[rows[:, 0]]
    assert (batch["puzzle_identifiers"] == data.first_id[task] + rows[:, 1]).all()
    assert (batch["puzzle_identifiers"] < data.first_id[task + 1]).all()
    few = load(config(folder, num_augments=1000, sets="arc1,conceptarc"))
    concept = [i for i, t in enumerate(few.tasks) if t.set == "conceptarc"]
    assert (few.counts[concept] == 576).all(), "two colours besides black: 8 * 72 transformations"
    again = load(config(folder, num_augments=1000))
    assert again.state() == few.state() != data.state() and few.counts.max() == 1001
    assert np.array_equal(data.numbers[:7], few.numbers[:7]), "more augmentations do not change the first"
    assert load(config(folder, data_seed=1)).state() != data.state()


def test_ids_do_not_depend_on_the_answers_of_test_pairs(folder, tmp_path):
    sets = make_sets()
    for task in sets["arc1_evaluation"].values():
        for pair in task["test"]:
            pair["output"] = [[0]]
    for name in ("arc1_training", "arc1_evaluation", "conceptarc_corpus"):
        (tmp_path / f"{name}.json").write_text(json.dumps(sets[name]), encoding="utf-8")
    assert load(config(str(tmp_path))).state() == load(config(folder)).state()


def test_batches_are_pure_functions_of_their_place(data, folder):
    first = [data.train_batch(index, 10, 0) for index in range(9)]
    for index in (8, 2, 5):
        again = load(config(folder)).train_batch(index, 10, 0)
        assert all(np.array_equal(again[name], first[index][name]) for name in again)
    whole = data.train_batch(0, 90, 0)
    assert all(np.array_equal(whole[k], np.concatenate([b[k] for b in first])) for k in whole)
    assert not np.array_equal(data.train_batch(0, 10, 1)["inputs"], first[0]["inputs"])
    assert whole["inputs"].shape == whole["labels"].shape == (90, CELLS) and whole["inputs"].max() <= 11
    assert all(value.dtype == np.int64 for value in whole.values())
    assert set(np.unique(whole["labels"])) <= {IGNORE, *range(END, 12)}


def test_an_epoch_goes_task_by_task_and_moves_all_pairs_but_one(data, folder):
    rows, corners = data._epoch(0, 0)
    assert sorted(rows[:, 0]) == sorted(data.train[:, 0])
    tasks = data.pair_task[rows[:, 0]]
    assert len(np.flatnonzero(np.diff(tasks))) + 1 == len(data.tasks) == (corners == 0).all(1).sum()
    for task in range(len(data.tasks)):
        assert len(set(rows[tasks == task, 1])) == 1
    assert len({tuple(data._epoch(0, epoch)[0][:, 0]) for epoch in range(4)}) == 4
    still = load(config(folder, augment_translate=False))
    assert all(decode(tokens) is not None for tokens in still.train_batch(0, 60, 0)["inputs"])
    assert any(decode(tokens) is None for tokens in data.train_batch(0, 60, 0)["inputs"])


def test_input_and_label_move_together(data):
    rows = data.train
    batch = data.batch(rows, np.random.default_rng(0).random((len(rows), 2)))
    for name, side in (("inputs", 0), ("labels", 1)):
        for tokens, (pair, _), ids in zip(batch[name], rows, batch["puzzle_identifiers"]):
            assert np.array_equal(undo(data, ids, tokens)[1], data.pairs[pair][side])
    boards = [batch[name].reshape(-1, SIDE, SIDE) > END for name in ("inputs", "labels")]
    for one, other in zip(*boards):
        for axis in (0, 1):
            assert one.any(axis).argmax() == other.any(axis).argmax()


def test_evaluation_is_in_order_and_in_the_corner(data):
    for split in ("val", "test"):
        batches = list(data.eval_batches(split, 4))
        answers = [decode(tokens) for batch in batches for tokens in batch["labels"]]
        rows = getattr(data, split)[:, 0]
        assert len(answers) == len(rows)
        assert all(np.array_equal(grid, data.pairs[i][1]) for grid, i in zip(answers, rows))
    assert data.groups()["arc1"][0].shape == (6,)
    assert np.array_equal(data.vote[:6], data.test) and len(data.vote) == 7 * 6


# ---- votes


GRIDS = [np.full((i + 1, 2), i, np.uint8) for i in range(5)]


def test_votes_rank_by_count_then_by_mean_confidence_then_by_place():
    A, B, C, D, _ = GRIDS
    ranked = arc_vote.vote([(A, 0.9), (B, 0.1), (None, 1.0), (B, 0.2), (C, 0.95), (D, 0.9)])
    assert [(grid.shape[0], votes) for grid, votes, _ in ranked] == [(2, 2), (3, 1), (1, 1), (4, 1)]
    assert ranked[0][2] == pytest.approx(0.15) and arc_vote.vote([(None, 0.5)]) == []
    flat = [(np.zeros((2, 3), np.uint8), 0.5), (np.zeros((3, 2), np.uint8), 0.5)]
    assert len(arc_vote.vote(flat)) == 2, "the same bytes in another shape are another grid"


def candidates(data, places):
    """votes with the answer of every test pair at the given place (None = nowhere)."""
    wrong = [np.full((30, 30), i % 10, np.uint8) for i in range(9)] + [np.full((30, 29), i % 10, np.uint8)
                                                                      for i in range(9)]
    votes = {}
    for pair, place in zip(data.test[:, 0].tolist(), places):
        grids = wrong[:12] if place is None else wrong[:place] + [data.pairs[pair][1]]
        votes[pair] = [(grid, 1, 0.5) for grid in grids]
    return votes


def test_a_task_counts_when_all_its_pairs_are_right(data):
    assert [t.name for t in (data.tasks[i] for i in data.pair_task[data.test[:, 0]])] == [
        "e0000000", "e0000001", "e0000001", "e0000002", "e0000003", "e0000003"]
    scores = arc_vote.score(data, candidates(data, [0, 0, 1, 4, 0, None]))
    assert scores["tasks"] == {1: 0.25, 2: 0.5, 5: 0.75, 10: 0.75, 100: 0.75}
    assert scores["pairs"] == {1: 3 / 6, 2: 4 / 6, 5: 5 / 6, 10: 5 / 6, 100: 5 / 6}
    assert arc_vote.score(data, candidates(data, [0] * 5 + [11]))["tasks"] == {1: 0.75, 2: 0.75, 5: 0.75, 10: 0.75,
                                                                              100: 1.0}
    lines = arc_vote.score_lines(scores)
    assert "pass@100" in lines[0] and "0.2500" in lines[1] and len({len(line) for line in lines}) == 1


def test_submission_has_the_official_format(data, folder, tmp_path):
    votes = candidates(data, [0, 1, 2, 0, 0, 0])
    votes[int(data.test[5, 0])] = []
    [path] = arc_vote.write_submission(str(tmp_path), data, votes)
    with open(path, encoding="utf-8") as file:
        content = json.load(file)
    evaluation = make_sets()["arc1_evaluation"]
    assert os.path.basename(path) == "submission.json" and content.keys() == evaluation.keys()
    for name, task in evaluation.items():
        assert len(content[name]) == len(task["test"])
        assert all(entry.keys() == {"attempt_1", "attempt_2"} for entry in content[name])
    assert content["e0000000"][0]["attempt_1"] == evaluation["e0000000"]["test"][0]["output"]
    assert content["e0000000"][0]["attempt_2"] == content["e0000000"][0]["attempt_1"]
    assert content["e0000001"][0]["attempt_2"] == evaluation["e0000001"]["test"][0]["output"]
    assert content["e0000003"][1] == {"attempt_1": [[0]], "attempt_2": [[0]]}
    two = load(config(folder, sets="arc1,arc2"))
    paths = arc_vote.write_submission(str(tmp_path), two, {pair: [] for pair in two.test[:, 0].tolist()})
    assert [os.path.basename(path) for path in paths] == ["submission-arc1.json", "submission-arc2.json"]


class Oracle(torch.nn.Module):
    """Solves every `period`-th row of data.vote and says something else of the others; counts what it is asked."""

    def __init__(self, data, period=1, dies_at=None):
        super().__init__()
        self.weight, self.asked, self.dies_at = torch.nn.Parameter(torch.zeros(1)), 0, dies_at
        batch, self.answers = data.batch(data.vote), {}
        parts = (batch[name] for name in ("inputs", "puzzle_identifiers", "labels"))
        for row, (inputs, ids, label) in enumerate(zip(*parts)):
            board = np.where(label == IGNORE, 5, label)  # a model may put anything where nothing is scored
            wrong = np.full(CELLS, END if row % 2 else row % 10 + 2)
            self.answers[int(ids), inputs.tobytes()] = wrong if row % period else board

    def solve(self, inputs, max_segments=None, act_eval=False, trace=False, puzzle_identifiers=None):
        if self.dies_at is not None and self.asked >= self.dies_at:
            raise KeyboardInterrupt
        self.asked += len(inputs)
        answers = [self.answers[int(i), x.numpy().tobytes()] for i, x in zip(puzzle_identifiers, inputs)]
        answers = torch.as_tensor(np.stack(answers))
        return answers, None, answers[None], torch.full((1, len(inputs)), 0.25)


def evaluate(model, data, folder, batch_size=5, depth=4):
    return arc_vote.evaluate_votes(model, data, batch_size, contextlib.nullcontext, depth, str(folder))


def test_answers_of_variants_are_transformed_back_and_counted(data, tmp_path):
    scores = evaluate(Oracle(data), data, tmp_path)
    assert set(scores["tasks"].values()) == set(scores["pairs"].values()) == {1.0}
    votes = arc_vote.votes_by_pair(data, arc_vote.Predictions(str(tmp_path / "predictions.jsonl"), {
        **arc_vote.fingerprint(Oracle(data), data), "depth": 4}).rows)
    assert all([(n, c) for _, n, c in ranked] == [(7, 0.25)] for ranked in votes.values())


def test_an_evaluation_goes_on_after_a_kill(data, folder, tmp_path):
    whole, path = evaluate(Oracle(data, 3), data, tmp_path / "whole"), tmp_path / "cut" / "predictions.jsonl"
    with pytest.raises(KeyboardInterrupt):
        evaluate(Oracle(data, 3, dies_at=20), data, tmp_path / "cut")
    assert not os.path.exists(tmp_path / "cut" / "submission.json")
    content = path.read_bytes()
    path.write_bytes(content[:-7])  # the last of 4 batches was cut off while it was written
    model = Oracle(data, 3)
    assert evaluate(model, data, tmp_path / "cut", batch_size=4) == whole and model.asked == len(data.vote) - 15
    again = Oracle(data, 3)
    assert evaluate(again, data, tmp_path / "cut") == whole and again.asked == 0
    for name in ("whole", "cut"):
        assert b"\n" not in (tmp_path / name / "submission.json").read_bytes()
    for end in range(0, len(content), 331):  # wherever it is cut
        path.write_bytes(content[:end])
        assert evaluate(Oracle(data, 3), data, tmp_path / "cut", 50) == whole


def test_more_variants_go_on_from_fewer(folder, tmp_path):
    few, many = load(config(folder, arc_augments=3)), load(config(folder, arc_augments=1000))
    assert np.array_equal(few.vote, many.vote[: len(few.vote)]) and len(few.vote) == 18
    expected = evaluate(Oracle(few, 2), few, tmp_path / "few")
    model = Oracle(many, 2)
    evaluate(model, many, tmp_path / "few")
    assert model.asked == len(many.vote) - len(few.vote)
    assert evaluate(Oracle(few, 2), few, tmp_path / "few") == expected, "rows beyond do not count"


def test_hrm_is_scored_by_votes(folder, tmp_path):
    data = load(config(folder, tasks="1", num_augments=1))
    model = hrm.HRM(hrm.HRMConfig(n_embd=16, n_head=2, H_layers=1, L_layers=1, H_cycles=1, L_cycles=1,
                                  puzzle_emb_ndim=16, expansion=1, **data.model_args))
    scores = evaluate(model, data, tmp_path, depth=2)
    assert scores["tasks"].keys() == set(arc_vote.KS) and set(scores["pairs"].values()) <= {0.0, 1.0}
    rows = np.arange(len(data.vote))
    grids, confidences = arc_vote.predict(model, data, rows, contextlib.nullcontext, 2)
    saved = arc_vote.Predictions(str(tmp_path / "predictions.jsonl"), {**arc_vote.fingerprint(model, data), "depth": 2})
    for row, grid, confidence in zip(rows, grids, confidences):
        assert np.array_equal(saved.rows[row][0], grid) and saved.rows[row][1] == confidence


def test_train_py_trains_scores_and_solves(folder, tmp_path, capsys):
    sizes = ["--n_embd", "16", "--n_head", "2", "--puzzle_emb_ndim", "16", "--pos_encodings", "rope"]
    use = ["--model", "hrm", "--data", "arc", "--device", "cpu", "--dtype", "float32", "--depths", "1"]
    run = ["--out_dir", str(tmp_path / "run"), "--max_steps", "1", "--batch_size", "4", "--num_augments", "2"]
    flags = ["--data_file", folder, "--sets", "arc1", "--board", "30", "--tasks", "2", "--halt_max_steps", "2"]
    assert train.main([*use, *sizes, *run, *flags]) == 0, capsys.readouterr().err
    use += ["--init_from", str(tmp_path / "run")]
    assert train.main([*use, "--eval_only", "--arc_augments", "2"]) == 0
    assert "pass@2" in capsys.readouterr().out and (tmp_path / "run" / "votes" / "submission.json").exists()
    assert train.main([*use, "--solve", "e0000001"]) == 0
    assert "the answer of task e0000001" in capsys.readouterr().out
    assert train.main([*use, "--eval_only", "--num_augments", "3"]) == 2
    error = capsys.readouterr().err
    assert "trained with 13 puzzle ids, but this data has 17" in error and error.count("\n") == 1


def test_predictions_of_other_weights_are_refused(data, folder, tmp_path):
    evaluate(Oracle(data), data, tmp_path)
    other = Oracle(data)
    with torch.no_grad():
        other.weight += 1
    assert "predictions of other weights" in reject(evaluate, other, data, tmp_path)
    seeded = load(config(folder, data_seed=1))
    assert "predictions of other data" in reject(evaluate, Oracle(seeded), seeded, tmp_path)


# ---- files, mistakes, a user's view


def published(root):
    """The same tasks as clones of the repositories."""
    places = {"arc1_training": "ARC-AGI/data/training", "arc1_evaluation": "ARC-AGI/data/evaluation",
              "arc2_training": "ARC-AGI-2/data/training", "arc2_evaluation": "ARC-AGI-2/data/evaluation",
              "conceptarc_corpus": "ConceptARC/corpus"}
    for name, tasks in make_sets().items():
        for task_id, task in tasks.items():
            inside = root / places[name] / ("SomeConcept" if "concept" in name else "")
            inside.mkdir(parents=True, exist_ok=True)
            (inside / f"{task_id}.json").write_text(json.dumps(task | {"name": "x"}), encoding="utf-8")
    return root


def test_clones_and_compact_files_are_the_same_data(data, folder, tmp_path):
    clones = published(tmp_path)
    same = load(config(str(clones)))
    assert same.state() == data.state() and same.summary() == data.summary()
    alone = load(config(str(clones / "ARC-AGI"), sets="arc1"))
    assert alone.state() == load(config(folder, sets="arc1")).state()
    message = reject(load, config(str(clones / "ARC-AGI"), sets="arc1,arc2"))  # whose data/training it is, is unclear
    assert "has no arc1_training.json" in message and "leave arc1 out of --sets" in message


def archive(names):
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as file:
        for name, task in names.items():
            file.writestr(name, json.dumps(task))
    return content.getvalue()


class Response(io.BytesIO):
    headers = {}


def test_sets_are_downloaded_once(folder, tmp_path, monkeypatch):
    sets, calls = make_sets(), []
    files = {f"ARC-AGI-3990304/data/{part}/{name}.json": task for part in ("training", "evaluation")
             for name, task in sets[f"arc1_{part}"].items()}

    def urlopen(url, timeout):
        calls.append(url)
        return Response(archive(files))
    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    for _ in range(2):
        data = load(config("", sets="arc1", data_dir=str(tmp_path)))
        assert data.state() == load(config(folder, sets="arc1")).state()
    assert len(calls) == 1 and calls[0].startswith("https://codeload.github.com/fchollet/ARC-AGI/zip/3990304")


def test_a_failed_download_names_the_way_out(tmp_path, monkeypatch):
    monkeypatch.setattr(urllib.request, "urlopen", lambda url, timeout: Response(b"<html>log in</html>"))
    message = reject(load, config("", data_dir=str(tmp_path)))
    assert "no whole archive" in message and "--data_file" in message and os.listdir(tmp_path) == []


@pytest.mark.parametrize("changes, words", [
    (dict(sets="arc3"), ["arc3", "arc1, arc2, conceptarc, minimal"]), (dict(sets="arc1,arc1"), ["arc1", "twice"]),
    (dict(sets=""), ["unknown"]), (dict(sets="conceptarc"), ["no evaluation task", "add arc1"]),
    (dict(sets="minimal"), ["conceptarc_minimal.json", "MinimalTasks", "--sets"]),
    (dict(tasks="zzz"), ["'zzz'", "none of the sets"]), (dict(tasks="0"), ["no evaluation task"]),
    (dict(num_augments=10**6), ["--num_augments 1000000", "0 to 10000"]),
    (dict(arc_augments=0), ["--arc_augments 0", "1 to"]), (dict(num_val=-1), ["--num_val -1"]),
    (dict(data_file="nowhere"), ["nowhere", "not a folder"])])
def test_mistakes_are_told_in_one_line(folder, changes, words):
    message = reject(load, config(folder, **changes))
    assert all(word in message for word in words), message


@pytest.mark.parametrize("spoil, words", [
    (lambda t: t["train"][1].update(output=[[1, 2], [3]]), ["output 2 of 'train'", "rows of equal length"]),
    (lambda t: t["train"][0].update(input=[[10]]), ["input 1 of 'train'", "holds 10", "0 to 9"]),
    (lambda t: t["train"][0].update(input=[[-1]]), ["holds -1"]),
    (lambda t: t["train"][0].update(input=[[0] * 31]), ["not a grid", "1 to 30"]),
    (lambda t: t["train"][0].update(input=[]), ["not a grid"]),
    (lambda t: t["train"][0].update(input=[["a"]]), ["not a grid"]),
    (lambda t: t["train"][0].update(input=[[1.5]]), ["not a grid"]),
    (lambda t: t["train"][0].update(input=7), ["not a grid"]),
    (lambda t: t["test"][0].pop("output"), ["input and output", "'test'"]),
    (lambda t: t.pop("train"), ["no task", "'train'"]), (lambda t: t["test"].clear(), ["no pair under 'test'"])])
def test_spoilt_tasks_are_named(tmp_path, spoil, words):
    sets = make_sets()
    spoil(sets["arc1_training"]["a0000003"])
    for name in ("arc1_training", "arc1_evaluation"):
        (tmp_path / f"{name}.json").write_text(json.dumps(sets[name]), encoding="utf-8")
    message = reject(load, config(str(tmp_path), sets="arc1"))
    assert all(word in message for word in ["a0000003", *words]), message


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe", b""])
def test_files_that_are_no_json_are_named(tmp_path, content):
    for name in ("arc1_training.json", "arc1_training.json.gz"):
        (tmp_path / name).write_bytes(content)
        assert "arc1_training.json" in reject(load, config(str(tmp_path), sets="arc1"))
        os.remove(tmp_path / name)


def test_ids_of_a_checkpoint_must_be_those_of_the_data(data, folder):
    saved = json.loads(json.dumps(data.state()))
    assert load(config(folder), saved=saved).num_ids == data.num_ids and load(config(folder), saved={})
    message = reject(load, config(folder, num_augments=8), True, saved)
    assert f"{saved['num_ids']:,} puzzle ids" in message and f"has {data.num_ids + 2 * len(data.tasks)}" in message
    assert "do not mean" in reject(load, config(folder, data_seed=5), True, saved)


def test_tasks_chosen_by_number_or_id(folder):
    assert [t.name for t in load(config(folder, tasks="1")).tasks] == ["a0000000", "Concept0", "e0000000"]
    some = load(config(folder, tasks="e0000001, a0000002"))
    assert [t.name for t in some.tasks] == ["a0000002", "e0000001"]
    whole = load(config(folder))
    place = [t.name for t in whole.tasks].index("a0000002")
    first = whole.first_id[place] - 1
    assert np.array_equal(some.numbers[:7], whole.numbers[first : first + 7]), "transformations go with the task"


def test_a_smaller_board_leaves_larger_tasks_out(folder, tmp_path):
    whole, some = load(config(folder)), load(config(folder, board=9))
    small = {task.name for task in whole.tasks if all(max(g.shape) <= 9 for pair in task.pairs for g in pair)}
    assert {task.name for task in some.tasks} == small and 0 < len(small) < len(whole.tasks)
    assert "grids of up to 9x9" in some.summary()[0] and some.model_args["seq_len"] == 81
    for batch in (some.train_batch(0, 50, 0), *some.eval_batches("vote", 50)):
        assert batch["inputs"].shape[1:] == batch["labels"].shape[1:] == (81,)
    assert all(decode(tokens) is not None for tokens in some.batch(some.vote)["inputs"]), "nothing was cut off"
    large = next(task.name for task in whole.tasks if task.name not in small)
    assert f"{large} has grids" in reject(load, config(folder, board=9, tasks=large))
    for board in (31, 0, 1):  # no task is that small
        assert f"--board {board}" in reject(load, config(folder, board=board))
    path = tmp_path / "task.json"
    path.write_text(json.dumps({"test": [{"input": [[0] * 10]}]}), encoding="utf-8")
    assert "10 rows or columns, but --board is 9" in reject(some.parse, str(path))
    assert whole.parse(str(path)).shape == (1, CELLS)


def test_a_task_is_parsed_judged_and_drawn(data, tmp_path):
    task = make_sets()["arc1_evaluation"]["e0000001"]
    inputs = data.parse("e0000001")
    assert inputs.shape == (2, CELLS) and inputs.dtype == np.int64
    path = tmp_path / "task.json"
    for pair in task["test"]:
        del pair["output"]
    path.write_text(json.dumps(task), encoding="utf-8")
    assert np.array_equal(data.parse(str(path)), inputs)
    assert "neither the id" in reject(data.parse, "nothing")
    place = [t.name for t in data.tasks].index("e0000001")
    assert (data.identifiers(inputs) == data.first_id[place]).all() and data.problem(inputs[0]) == ""
    strange = encode(np.zeros((30, 30), np.uint8))
    assert data.identifiers(strange[None])[0] == 0 and "no task" in data.problem(strange)
    answers = [encode(pair[1]) for pair in data.tasks[place].test]
    assert data.verdict(inputs[0], answers[0])[0] and not data.verdict(inputs[0], answers[1])[0]
    assert data.verdict(inputs[0], np.zeros(CELLS, int)) == (False, "no grid in the top left corner")
    assert not data.verdict(strange, answers[0])[0]


def test_boards_of_any_size_stand_side_by_side(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "20")
    print_side_by_side([("one", "\033[1m1 \033[0m2 \n3 4 "), ("second", "5 "), ("third", "6 \n7 \n8 ")])
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines == ["one      second", "\033[1m1 \033[0m2      5", "3 4", "third", "6", "7", "8"]


def test_drawing_shows_answer_and_label_and_marks_what_differs(data):
    inputs, label = encode(np.array([[1]], np.uint8)), encode(np.array([[1, 2], [3, 0]], np.uint8))
    answer = encode(np.array([[1, 5, 5]], np.uint8))
    assert data.draw(inputs, answer, None, False) == "1 5 5 "
    assert data.draw(inputs, answer, label, False) == "1 5!5! | 1 2 \n       | 3 0 "
    assert data.draw(inputs, np.zeros(CELLS, int), label.astype(int), False) == ".  | 1 2 \n   | 3 0 "
    colored = data.draw(inputs, answer, label)
    assert "\033[38;5;231;48;5;27m1 \033[0m" in colored and colored.count("!") == 2
