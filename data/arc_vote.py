"""Scoring a model on ARC: every test input in many transformations, a vote on the answers, the best few of them count.

    scores = evaluate_votes(model, data, 250, torch.no_grad, depth=16, folder="out/hrm-arc/votes")
    print("\n".join(score_lines(scores)))

Each variant of a test input (a row of data.vote) is solved under its own puzzle id, its answer read off the board and
transformed back. Grids are ranked by how many variants gave them, then by the mean confidence sigmoid(q_halt) of
those, then by which came first. An answer that is no grid has no vote. pass@k: a test pair is right if its answer is
among the first k grids; a task counts if all its test pairs are right. The official measure is pass@2.

Written to the folder, which is made if need be:
    predictions.jsonl   a line of JSON about weights, data and depth, then one per batch: its rows, grids, confidences.
                        A later call, also with more variants, goes on after the last whole line; a line that was
                        cut off is dropped.
    submission.json     {task id: [{"attempt_1": grid, "attempt_2": grid} per test input]}, the official format; with
                        several sets to evaluate one file for each, submission-arc1.json and so on
"""
import json
import os

import numpy as np
import torch
from tqdm import tqdm

from data.arc_grid import decode, invert
from data.common import atomic_write, content_hash

KS = (1, 2, 5, 10, 100)


def vote(predictions):
    """(grid (h, w) or None, confidence) pairs -> list of (grid, votes, mean confidence), the most voted for first."""
    ballots = {}
    for grid, confidence in predictions:
        if grid is not None:
            ballots.setdefault((grid.shape, grid.tobytes()), [grid, []])[1].append(confidence)
    ranked = [(grid, len(given), sum(given) / len(given)) for grid, given in ballots.values()]
    return sorted(ranked, key=lambda entry: entry[1:], reverse=True)  # stable: of equals the first stays first


def votes_by_pair(data, predictions):
    """From row of data.vote -> (grid or None, confidence) to test pair, an index into data.pairs -> as vote() ranks.

    Rows that data.vote does not have were predicted for a larger --arc_augments; they are left out.
    """
    by_pair = {pair: [] for pair in data.test[:, 0].tolist()}
    for row in sorted(row for row in predictions if row < len(data.vote)):  # ties do not depend on the order of work
        by_pair[int(data.vote[row, 0])].append(predictions[row])
    return {pair: vote(given) for pair, given in by_pair.items()}


def score(data, votes):
    """votes of every test pair -> {"tasks": {k: share of tasks with all pairs right}, "pairs": {k: share of pairs}}."""
    pairs = data.test[:, 0]
    tasks = data.pair_task[pairs]
    ranks = [next((i for i, entry in enumerate(votes[pair]) if np.array_equal(entry[0], data.pairs[pair][1])), np.inf)
             for pair in pairs.tolist()]
    worst = np.full(len(data.tasks), -1.0)
    np.maximum.at(worst, tasks, ranks)  # a task is as good as its worst pair
    worst = worst[np.unique(tasks)]
    return {name: {k: float((np.asarray(places) < k).mean()) for k in KS}
            for name, places in (("tasks", worst), ("pairs", ranks))}


def score_lines(scores):
    """What score() returned, as a table."""
    head = "  " + f"{'':24}" + "".join(f"{f'pass@{k}':>10}" for k in KS)
    names = {"tasks": "tasks, all pairs right", "pairs": "test pairs"}
    return [head] + [f"  {label:24}" + "".join(f"{share:>10.4f}" for share in scores[name].values())
                     for name, label in names.items()]


def submissions(data, votes):
    """The two best grids of every test pair in the official format: set -> {task id: [{"attempt_1", "attempt_2"}]}.

    Where there was only one candidate it is given twice, where none a single black cell.
    """
    found = {}
    for pair in data.test[:, 0].tolist():
        task, ranked = data.tasks[data.pair_task[pair]], [grid.tolist() for grid, *_ in votes[pair][:2]] or [[[0]]]
        attempts = {"attempt_1": ranked[0], "attempt_2": ranked[-1]}
        found.setdefault(task.set, {}).setdefault(task.name, []).append(attempts)
    return found


def write_submission(folder, data, votes):
    """Write submission.json, or one per set, into a folder. Returns the paths."""
    found, paths = submissions(data, votes), []
    for name, content in found.items():
        paths.append(os.path.join(folder, "submission.json" if len(found) == 1 else f"submission-{name}.json"))
        with atomic_write(paths[-1]) as file:
            file.write(json.dumps(content).encode("utf-8"))
    return paths


# ---- predictions that outlive a kill


def pack(grid):
    """A grid as text, "012/345"; None stays None."""
    return None if grid is None else "/".join("".join(map(str, row)) for row in grid.tolist())


def unpack(text):
    """What pack was given."""
    return None if text is None else np.array([[*map(int, row)] for row in text.split("/")], np.uint8)


def whole_lines(path):
    """Iterate over (length in bytes, dict) of the lines of a file up to the first that is not a whole JSON object."""
    with open(path, "rb") as file:
        for line in file:
            try:
                content = json.loads(line) if line.endswith(b"\n") else None
            except ValueError:
                return
            if not isinstance(content, dict):
                return
            yield len(line), content


class Predictions:
    """A file of predictions that is appended to after each batch. `rows`: row -> (grid or None, confidence)."""

    def __init__(self, path, about):
        """Open a file or go on with it; about: a dict, which its first line must hold, else ValueError, one line."""
        self.path, self.rows = path, {}
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        whole = self._read(about) if os.path.exists(path) else 0
        with open(path, "ab") as file:
            file.truncate(whole)  # a line that was cut off would spoil the next
        if not whole:
            self._append(about)

    def _read(self, about):
        """Take in all whole lines. Returns their length in bytes."""
        whole = 0
        for length, content in whole_lines(self.path):
            if whole:
                self._take(**content)
            elif content != about:
                other = next((name for name in about if content.get(name) != about[name]), "things")
                raise ValueError(f"{self.path} holds predictions of other {other} ({content.get(other)}, not "
                                 f"{about.get(other)}); delete it, or move it away")
            whole += length
        return whole

    def _take(self, rows, grids, confidences):
        self.rows.update(zip(rows, zip(map(unpack, grids), confidences)))

    def _append(self, content):
        with open(self.path, "ab") as file:
            file.write(json.dumps(content).encode("utf-8") + b"\n")

    def add(self, rows, grids, confidences):
        """Record a batch: rows (B,) of data.vote, B grids or Nones, confidences (B,)."""
        rows, confidences = np.asarray(rows).tolist(), np.asarray(confidences, np.float64).tolist()
        self.rows.update(zip(rows, zip(grids, confidences)))
        self._append({"rows": rows, "grids": list(map(pack, grids)), "confidences": confidences})


# ---- the evaluation


def fingerprint(model, data):
    """Hashes that tell weights and data apart: a dict of strings. The puzzle embedding is too large to be hashed.

    How many variants are voted over does not count: the rows of fewer are the first ones of more.
    """
    weights = [parameter.detach().float().cpu().numpy() for parameter in model.parameters()]
    return {"weights": content_hash(*weights)[:16], "data": content_hash(data.state(), data.hash, data.test)[:16]}


@torch.no_grad()
def predict(model, data, rows, autocast, depth):
    """Solve rows (B,) of data.vote. Returns (B grids or Nones, transformed back; confidences (B,) float64)."""
    device, variants = next(model.parameters()).device, data.vote[rows]
    batch = {name: torch.as_tensor(value).to(device) for name, value in data.batch(variants).items()}
    with autocast():
        tokens, _, _, p_halt = model.solve(batch["inputs"], depth, trace=True,
                                           puzzle_identifiers=batch["puzzle_identifiers"])
    grids = []
    for answer, dihedral, colors in zip(tokens.cpu().numpy(), *data.transformations(variants)):
        grid = decode(answer)
        grids.append(None if grid is None else invert(grid, dihedral, colors))
    return grids, p_halt[-1].double().cpu().numpy()


def evaluate_votes(model, data, batch_size, autocast, depth, folder):
    """Score a model by votes over data.vote, going on with what the folder holds. Returns what score() returns.

    model: has solve as hrm.HRM does; data: ArcData; autocast: makes the context to solve in; depth: segments. Writes
    predictions.jsonl and the submission. ValueError, one line, if the folder holds predictions of something else.
    """
    model.eval()
    done = Predictions(os.path.join(folder, "predictions.jsonl"), {**fingerprint(model, data), "depth": depth})
    left = np.array([row for row in range(len(data.vote)) if row not in done.rows], np.int64)
    for start in tqdm(range(0, len(left), batch_size), "vote", leave=False, delay=5):
        rows = left[start : start + batch_size]
        done.add(rows, *predict(model, data, rows, autocast, depth))
    votes = votes_by_pair(data, done.rows)
    write_submission(folder, data, votes)
    return score(data, votes)
