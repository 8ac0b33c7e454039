"""Sudoku data: python -m pytest tests/test_sudoku.py -q   (from the project's root; under a minute, no network)"""

import gzip
import io
import os
import urllib.error
import urllib.request

import numpy as np
import pytest

from data import common, puzzles, sudoku
from data.sudoku import SudokuConfig, load, read_puzzles
from data.sudoku_solver import (augment, canonical, fill, first_equal, generate, geometry, random_symmetries, rate,
                                signature, solve, transform)

BOXES = [(2, 2), (2, 3), (3, 3)]

# Real puzzles that circulate publicly: (puzzle, solution, guesses that an independent solver counted).
EASY = ("..3.2.6..9..3.5..1..18.64....81.29..7.......8..67.82....26.95..8..2.3..9..5.1.3..",
        "483921657967345821251876493548132976729564138136798245372689514814253769695417382", 0)
REAL = [EASY,
        (".6.5.4.3.1...9...8.........9...5...6.4.6.2.7.7...4...5.........4...8...1.5.2.3.4.",
         "869574132124396758375128694932857416541632879786941325217469583493785261658213947", 4),
        ("98.76......5..49.........3.5....28...24....7...81......5...84....93....6....1....",
         "983761542165234987472589631591472863624893175738156294357628419819345726246917358", 1542),
        (".........8..2..37.9.24....5..698.5..7...4.....3...6..4.........3..8.9.1...9.6.4..",
         "153678942864295371972431685416983527798542163235716894681324759347859216529167438", 40),
        (".....837..7.....2.461..........9..8..1...6..3635.8.........3..7...6....9.2..49...",
         "952468371378915624461237958247391586819526743635784192194853267583672419726149835", 52)]


def digits(text):
    return np.array([int(c) if c != "." else 0 for c in text], np.uint8)


def text(board):
    return "".join("." if d == 0 else str(d) for d in board)


def slow_count(board, box, limit=2):
    """Count solutions by trying digits cell by cell: shares nothing with the solver under test."""
    board, side = list(map(int, board)), box[0] * box[1]

    def fits(cell, digit):
        row, column = divmod(cell, side)
        for other in range(side * side):
            r, c = divmod(other, side)
            same_box = r // box[0] == row // box[0] and c // box[1] == column // box[1]
            if other != cell and board[other] == digit and (r == row or c == column or same_box):
                return False
        return True

    def count(need):
        options = [(sum(choices), cell, choices) for cell in range(side * side) if board[cell] == 0
                   for choices in [[fits(cell, d) for d in range(1, side + 1)]]]
        if not options:
            return 1
        _, cell, choices = min(options)
        total = 0
        for digit in [d for d in range(1, side + 1) if choices[d - 1]]:
            board[cell] = digit
            total += count(need - total)
            board[cell] = 0
            if total >= need:
                break
        return total

    clues = [cell for cell in range(side * side) if board[cell]]
    return count(limit) if all(fits(cell, board[cell]) for cell in clues) else 0


def is_legal(board, box):
    units = board[geometry(box).unit_cells]
    return (np.sort(units, axis=0) == np.arange(1, box[0] * box[1] + 1)[:, None]).all()


def config(tmp_path, **changes):
    return SudokuConfig(**{**dict(num_train=40, num_val=5, num_test=6, data_dir=str(tmp_path / "cache")), **changes})


def write(path, lines, encoding="utf-8", end="\n"):
    path.write_bytes((end.join(lines) + end).encode(encoding))
    return str(path)


def reject(function, *args):
    """The message of the ValueError that a call must raise: one line."""
    with pytest.raises(ValueError) as error:
        function(*args)
    assert "\n" not in str(error.value), error.value
    return str(error.value)


# ----------------------------------------------------------------------------------------------------------------------
# Solver and generator

@pytest.mark.parametrize("box", [(2, 2), (2, 3), (3, 2)])
def test_solver_agrees_with_slow_counter(box):
    rng, side = np.random.default_rng(0), box[0] * box[1]
    boards = fill(40, box, rng)
    boards[rng.random(boards.shape) < rng.uniform(0.2, 0.7, (40, 1))] = 0  # from one solution to many
    boards[:6, rng.integers(0, side * side)] = rng.integers(1, side + 1, 6)  # and some with none
    expected = [slow_count(board, box, limit=3) for board in boards]
    assert {0, 1, 2} < set(expected), "the boards should have 0, 1, 2 and more solutions"
    assert [min(len(solve(board, box, limit=3)[0]), 3) for board in boards] == expected
    assert rate(boards, box)[0].tolist() == [min(n, 2) for n in expected]


def test_all_solutions_are_found():
    solutions, _ = solve(np.zeros(16, int), (2, 2), limit=0)
    assert len(solutions) == len(np.unique(solutions, axis=0)) == 288, "there are 288 4x4 boards"
    assert all(is_legal(board, (2, 2)) for board in solutions)


@pytest.mark.parametrize("puzzle, solution, guesses", REAL)
def test_guesses_of_real_puzzles(puzzle, solution, guesses):
    solutions, counted = solve(digits(puzzle), (3, 3))
    assert [text(board) for board in solutions] == [solution]
    assert counted == guesses


def test_guesses_do_not_depend_on_the_batch():
    puzzles = np.stack([digits(puzzle) for puzzle, _, _ in REAL])
    assert rate(puzzles, (3, 3))[2].tolist() == [solve(puzzle, (3, 3))[1] for puzzle in puzzles]


@pytest.mark.parametrize("box, clues", [((2, 2), 6), ((2, 3), 14), ((2, 3), 0), ((3, 3), 40), ((3, 3), 30)])
def test_generated_puzzles_have_exactly_one_solution(box, clues):
    puzzles, solutions, _ = generate(12, box, clues, seed=1)
    assert puzzles.shape == solutions.shape == (12, geometry(box).cells)
    for puzzle, solution in zip(puzzles, solutions):
        assert is_legal(solution, box) and (solution[puzzle > 0] == puzzle[puzzle > 0]).all()
        assert slow_count(puzzle, box) == 1
        assert clues == 0 or np.count_nonzero(puzzle) == clues
    assert (first_equal(puzzles, solutions, box) == np.arange(12)).all()


def test_minimal_puzzles_need_every_clue():
    for puzzle in generate(6, (2, 3), clues=0)[0]:
        for cell in np.flatnonzero(puzzle):
            without = puzzle.copy()
            without[cell] = 0
            assert slow_count(without, (2, 3)) == 2


def test_seed_reproducibility():
    first, again, other = (generate(10, (2, 3), 12, seed=seed) for seed in (3, 3, 4))
    assert all((a == b).all() for a, b in zip(first, again))
    assert (first[0] != other[0]).any()
    assert common.content_hash(*first[:2])[:12] == "9e55fff50cde", "a seed should mean the same everywhere"


@pytest.mark.parametrize("box, clues, wanted", [((3, 3), 0, 8), ((3, 3), 0, 1), ((2, 3), 0, 2)])
def test_wanted_mean_of_guesses_is_reached(box, clues, wanted):
    puzzles, _, guesses = generate(24, box, clues, guesses=wanted)
    assert abs(guesses.mean() - wanted) < 0.15 * wanted
    assert (rate(puzzles, box)[2] == guesses).all()


def test_impossible_wishes_are_named():
    assert "36 of 200 essentially different" in reject(generate, 200, (2, 2), 0)
    assert "guesses 50 is out of reach" in reject(generate, 4, (2, 2), 6, 50)


# ----------------------------------------------------------------------------------------------------------------------
# Symmetries

@pytest.mark.parametrize("box", BOXES)
def test_symmetries_keep_clues_and_solutions_and_vary(box):
    puzzles, solutions, _ = generate(8, box, 6 if box == (2, 2) else 0)
    inputs, labels = (np.repeat(boards + 1, 20, axis=0) for boards in (puzzles, solutions))
    new_inputs, new_labels = augment(inputs, labels, box, np.random.default_rng(0))
    assert all(is_legal(board - 1, box) for board in new_labels)
    assert ((new_inputs == 1) | (new_inputs == new_labels)).all(), "clues should stay clues of the solution"
    assert ((new_inputs > 1).sum(1) == (inputs > 1).sum(1)).all()
    assert len(np.unique(new_inputs, axis=0)) > 0.9 * len(inputs), "symmetries should vary"
    assert (rate(new_inputs - 1, box)[0] == 1).all()


@pytest.mark.parametrize("box", BOXES)
def test_symmetries_are_bijections(box):
    cells, tokens = random_symmetries(50, box, np.random.default_rng(0))
    T = geometry(box).cells
    assert (np.sort(cells, axis=1) == np.arange(T)).all() and (tokens[:, :2] == [0, 1]).all()
    assert (np.sort(tokens, axis=1) == np.arange(box[0] * box[1] + 2)).all()
    board = np.random.default_rng(1).integers(0, tokens.shape[1], (50, T))
    back = transform(transform(board, cells, tokens), cells.argsort(axis=1), tokens.argsort(axis=1))
    assert (back == board).all()


def test_transposition_only_with_square_boxes():
    rows = geometry((2, 3)).cell_units[0]
    cells, _ = random_symmetries(50, (2, 3), np.random.default_rng(0))
    assert (np.ptp(rows[cells].reshape(50, 6, 6), axis=2) == 0).all(), "a row should come from a row"
    cells, _ = random_symmetries(50, (3, 3), np.random.default_rng(0))
    from_rows = (np.ptp(geometry((3, 3)).cell_units[0][cells].reshape(50, 81 // 9, 9), axis=2) == 0).all(1)
    assert 10 < from_rows.sum() < 40, "about half should be transposed"


@pytest.mark.parametrize("box", BOXES)
def test_canonical_form_is_the_same_exactly_for_symmetric_puzzles(box):
    puzzles, solutions, _ = generate(6, box, 6 if box == (2, 2) else 0, seed=2)
    forms = [canonical(puzzle, solution, box) for puzzle, solution in zip(puzzles, solutions)]
    assert len(set(forms)) == len(set(signature(puzzles, solutions, box).tolist())) == 6
    rng = np.random.default_rng(0)
    for _ in range(5):
        inputs, labels = augment(puzzles + 1, solutions + 1, box, rng)
        assert [canonical(*pair, box) for pair in zip(inputs - 1, labels - 1)] == forms
        assert (signature(inputs - 1, labels - 1, box) == signature(puzzles, solutions, box)).all()
    full = [canonical(board, board, box) for board in augment(solutions + 1, solutions + 1, box, rng)[0] - 1]
    assert full == [canonical(board, board, box) for board in solutions], "boards with many symmetries, too"


def test_canonical_forms_count_the_known_classes():
    boards = solve(np.zeros(16, int), (2, 2), limit=0)[0]
    assert len({canonical(board, board, (2, 2)) for board in boards}) == 2, "two 4x4 boards are essentially different"


# ----------------------------------------------------------------------------------------------------------------------
# Splits

def test_planted_symmetric_duplicates_are_dropped(tmp_path):
    puzzles, solutions, _ = generate(30, (2, 3), 12, seed=5)
    looks, _ = augment(puzzles[:8] + 1, solutions[:8] + 1, (2, 3), np.random.default_rng(0))
    test_file = write(tmp_path / "test.txt", [text(p) for p in looks[:5] - 1])
    data_file = write(tmp_path / "all.txt", [text(p) for p in puzzles] + [text(p) for p in looks[5:] - 1])
    data = load(config(tmp_path, data_file=data_file, test_file=test_file, num_train=-1, num_val=4))
    assert (len(data.train), len(data.val), len(data.test)) == (21, 4, 5)
    assert "5 equal to a test puzzle, 3 equal to an earlier one" in "\n".join(data.summary())
    everything = [np.concatenate(boards) for boards in zip(data.train.digits, data.val.digits, data.test.digits)]
    assert len({canonical(*pair, (2, 3)) for pair in zip(*everything)}) == 30
    assert (data.test.inputs == looks[:5]).all(), "a test file should be used whole and in order"


def test_generated_training_puzzles_avoid_a_test_file(tmp_path):
    options = dict(box="2x2", clues=5, num_train=10, num_val=2)
    train = load(config(tmp_path, **options)).train
    test_file = write(tmp_path / "t.csv", ["puzzle,source"] + [f"{text(p)},mine" for p in train.digits[0][:6]])
    data = load(config(tmp_path, test_file=test_file, **options))
    forms = [{canonical(*pair, (2, 2)) for pair in zip(*split.digits)} for split in (data.train, data.val, data.test)]
    assert [len(form) for form in forms] == [10, 2, 6] and len(set.union(*forms)) == 18
    assert data.test.source.tolist() == ["mine"] * 6 and data.train.source is None


def test_cache_is_used_and_keyed_by_what_matters(tmp_path, monkeypatch):
    first = load(config(tmp_path))
    monkeypatch.setattr(sudoku, "build", None)  # a call would fail
    again = load(config(tmp_path, augment=False))
    assert (again.train.inputs == first.train.inputs).all() and again.test.guesses.dtype == np.int64
    with pytest.raises(TypeError):
        load(config(tmp_path, clues=13))


def test_training_batches_are_pure_and_cover_each_epoch(tmp_path):
    data = load(config(tmp_path, augment=False))
    seen = np.concatenate([data.train_batch(i, 16, 7)["inputs"] for i in range(5)])  # 80 = 2 epochs of 40
    for epoch in (seen[:40], seen[40:]):
        assert sorted(map(bytes, epoch)) == sorted(map(bytes, data.train.inputs.astype(np.int64)))
    assert (seen[:40] != seen[40:]).any()
    data = load(config(tmp_path))
    batches = [data.train_batch(3, 100, 7) for _ in range(2)]
    assert all((batches[0][name] == batches[1][name]).all() for name in batches[0])
    assert (data.train_batch(3, 100, 8)["inputs"] != batches[0]["inputs"]).any()
    assert (data.train_batch(4, 100, 7)["inputs"] != batches[0]["inputs"]).any()
    assert {name: (batch.shape, batch.dtype) for name, batch in batches[0].items()} == {
        "inputs": ((100, 36), np.int64), "labels": ((100, 36), np.int64), "puzzle_identifiers": ((100,), np.int64)}
    assert all(is_legal(board - 1, (2, 3)) for board in batches[0]["labels"])


def test_evaluation_goes_in_order_without_augmentation(tmp_path):
    data = load(config(tmp_path))
    batches = list(data.eval_batches("test", 4))
    assert [len(batch["inputs"]) for batch in batches] == [4, 2]
    assert (np.concatenate([batch["labels"] for batch in batches]) == data.test.labels).all()
    assert data.model_args == dict(vocab_size=8, seq_len=36, num_puzzle_identifiers=1, box_rows=2, box_cols=3)


@pytest.mark.parametrize("changes, message", [
    (dict(box="3x4"), "box '3x4' is not a box shape"), (dict(box="six"), "box 'six'"),
    (dict(clues=7), "clues 7 is not possible with box 2x3: give 8 to 36"), (dict(guesses=-2), "guesses -2"),
    (dict(num_train=0), "num_train 0"), (dict(source="extreme"), "add --box 3x3"), (dict(data_seed=-1), "data_seed -1"),
    (dict(data_file="missing.csv"), "missing.csv")])
def test_mistaken_settings_are_named(tmp_path, changes, message):
    assert message in reject(load, config(tmp_path, **changes))


# ----------------------------------------------------------------------------------------------------------------------
# Files

def test_reader_accepts_all_the_usual_forms(tmp_path):
    puzzle, solution, _ = EASY
    zeros = puzzle.replace(".", "0")
    bare = ["# a comment", "", puzzle, "  " + zeros + " ", "", "#" + puzzle]
    ours = ["puzzle,solution,source,clues,guesses", f"{puzzle},{solution},a,32,0", f"{zeros},,b,32,0"]
    theirs = ["source,question,answer,rating", f'"a, quoted",{puzzle},{solution},7', f"b,{puzzle},{solution},7"]
    files = [write(tmp_path / "bare.txt", bare), write(tmp_path / "bom.txt", bare, "utf-8-sig", "\r\n"),
             write(tmp_path / "ours.csv", ours, "utf-8-sig", "\r\n"), write(tmp_path / "theirs.csv", theirs)]
    packed = tmp_path / "packed.csv.gz"
    packed.write_bytes(gzip.compress("\r\n".join(ours).encode("utf-8-sig")))
    for path in files + [str(packed)]:
        split, notes = read_puzzles(path, (3, 3))
        assert len(split) == 2 and not notes and [text(b) for b in split.labels - 1] == [solution] * 2, path
        assert (split.inputs - 1 == digits(puzzle)).all()
    assert read_puzzles(files[2], (3, 3))[0].source.tolist() == ["a", "b"]
    assert read_puzzles(files[3], (3, 3))[0].source.tolist() == ["a, quoted", "b"]
    assert read_puzzles(files[0], (3, 3))[0].source is None


def bad_file(tmp_path):
    """A CSV with three good rows and one of each kind of bad one, and what must be said about those."""
    puzzle, solution, _ = EASY
    broken_clue = solution[:2] + "4" + solution[3:]
    wrong = solution[:-2] + solution[-1] + solution[-2]
    rows = [("puzzle", "solution", None), (puzzle, solution, None),
            ("33" + puzzle[2:], solution, "the puzzle clashes: row 1 holds 3 more than twice"),
            (puzzle, broken_clue, "the answer changes the clue at row 1 column 3"),
            (puzzle.replace("9", "."), "", "more than one solution"),
            (puzzle[:-1], solution, "has 80 characters, not 81"),
            (puzzle, "", None), (puzzle.replace(".", "0"), solution, None), (puzzle[:-1] + "x", "", "holds 'x'"),
            (puzzle, wrong, "the answer is wrong at row 9 column 8"),
            (puzzle, solution[:-1] + ".", "the answer holds '.'"),
            ("1234567.." + "........8" + "." * 63, "", "the puzzle has no solution"),
            ("12345678." + "........9" + "." * 54 + "........9", "", "column 9 holds 9 twice")]
    path = write(tmp_path / "bad.csv", [f"{a},{b}" for a, b, _ in rows])
    return path, {line: why for line, (_, _, why) in enumerate(rows, 1) if why}


def test_every_bad_row_is_named_by_line_and_reason(tmp_path):
    path, reasons = bad_file(tmp_path)
    message = reject(read_puzzles, path, (3, 3))
    named = dict(part.split(": ", 1) for part in message.split("(", 1)[1].split("; ") if part.startswith("line "))
    assert {int(line.split()[1]) for line in named} == set(reasons)
    for line, why in reasons.items():
        assert why in named[f"line {line}"], (line, named)
    assert "9 of 12 rows bad" in message and "--bad_rows skip" in message


def test_skipping_bad_rows_keeps_the_good_ones_and_counts(tmp_path):
    split, notes = read_puzzles(bad_file(tmp_path)[0], (3, 3), "skip")
    assert len(split) == 3 and "skipped 9 of 12 rows" in notes[0] and "line 3: " in notes[0]


def test_nothing_left_is_an_error(tmp_path):
    only_bad = write(tmp_path / "bad.txt", ["123", "." * 81])
    assert "no puzzle is left: 2 of 2" in reject(read_puzzles, only_bad, (3, 3), "skip")
    assert "the file holds none" in reject(read_puzzles, write(tmp_path / "empty.txt", ["# nothing"]), (3, 3), "skip")
    assert "(--box 3x3 takes 81)" in reject(read_puzzles, write(tmp_path / "large.txt", [EASY[0]]), (2, 3))


def test_unreadable_files_are_one_line(tmp_path):
    (tmp_path / "latin.txt").write_bytes(b"\xe9")
    (tmp_path / "cut.gz").write_bytes(gzip.compress(os.urandom(99))[:-20])
    assert "UTF-8" in reject(read_puzzles, str(tmp_path / "latin.txt"), (3, 3))
    assert "cut.gz" in reject(read_puzzles, str(tmp_path / "cut.gz"), (3, 3))
    assert "none of the columns" in reject(read_puzzles, write(tmp_path / "x.csv", ["board,answer", "1,2"]), (3, 3))


def test_atomic_write_leaves_all_or_nothing(tmp_path):
    path = str(tmp_path / "deep" / "file.bin")
    for content in (b"first", b"second"):
        with common.atomic_write(path) as file:
            file.write(content)
    for error in (OSError, KeyboardInterrupt):
        with pytest.raises(error), common.atomic_write(path) as file:
            file.write(b"half of the thi")
            raise error
    assert os.listdir(tmp_path / "deep") == ["file.bin"] and open(path, "rb").read() == b"second"


def test_crash_while_preparing_leaves_no_cache(tmp_path, monkeypatch):
    def crash(file, **arrays):
        file.write(b"half")
        raise OSError("disk full")
    monkeypatch.setattr(sudoku.np, "savez", crash)
    with pytest.raises(OSError):
        load(config(tmp_path))
    assert os.listdir(tmp_path / "cache") == []


class Response(io.BytesIO):
    def __init__(self, content, length):
        super().__init__(content)
        self.headers = {"Content-Length": str(length)}


CSV = ("source,question,answer,rating\n" + "".join(f"real,{p},{s},{g}\n" for p, s, g in REAL)).encode()


@pytest.mark.parametrize("answer, reason", [
    (urllib.error.URLError("no route to host"), "no route to host"), (TimeoutError("timed out"), "timed out"),
    (Response(CSV, len(CSV) + 1), "bytes"), (Response(b"<html>log in</html>", 19), "begins with '<html>")])
def test_failed_download_names_the_way_out(tmp_path, monkeypatch, answer, reason):
    def urlopen(url, timeout):
        if isinstance(answer, Exception):
            raise answer
        return answer
    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    message = reject(load, config(tmp_path, source="extreme-1k", box="3x3"))
    assert reason in message and "--data_file" in message
    assert not (tmp_path / "cache").exists() or os.listdir(tmp_path / "cache") == []


def test_published_set_is_downloaded_once_and_split(tmp_path, monkeypatch):
    train, test = CSV, b"\n".join([CSV.split(b"\n")[0], CSV.split(b"\n")[2]])
    calls = []

    def urlopen(url, timeout):
        calls.append(url)
        content = test if "test.csv" in url else train
        return Response(content, len(content))
    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    for seed in (0, 1):
        data = load(config(tmp_path, source="extreme-1k", box="3x3", num_val=1, num_test=-1, data_seed=seed))
        assert (len(data.train), len(data.val), len(data.test)) == (len(REAL) - 2, 1, 1)
        assert "1 equal to a test puzzle" in "\n".join(data.summary()) and data.train.source[0] == "real"
    assert len(calls) == 2 and all(url.startswith("https://huggingface.co/datasets/sapientinc/") for url in calls)


# ----------------------------------------------------------------------------------------------------------------------
# Solving, drawing

@pytest.fixture(scope="module")
def nine(tmp_path_factory):
    return load(config(tmp_path_factory.mktemp("nine"), box="3x3", clues=40))


def test_parse_accepts_text_and_files_and_rejects_the_rest(nine, tmp_path):
    puzzle = EASY[0]
    path = write(tmp_path / "two.csv", ["question", puzzle, "11" + puzzle[2:]])
    assert nine.parse(puzzle).shape == (1, 81) and nine.parse(path).shape == (2, 81)
    assert nine.parse(puzzle).dtype == np.int64 and (nine.parse(puzzle)[0] == digits(puzzle) + 1).all()
    spaced = "\n".join(puzzle[i:i + 9] for i in range(0, 81, 9)).replace(".", "0")
    assert (nine.parse(spaced) == nine.parse(puzzle)).all()
    assert "80 characters, not 81" in reject(nine.parse, puzzle[1:])
    assert "holds 'a'; accepted: digits 1 to 9" in reject(nine.parse, "a" * 81)
    assert "line 1" in reject(nine.parse, write(tmp_path / "short.txt", ["123"]))


def test_problem_tells_unsound_puzzles(nine):
    def tell(puzzle):
        return nine.problem(nine.parse(puzzle)[0])
    assert tell(EASY[0]) == ""
    assert tell("." * 81) == "the puzzle has more than one solution"
    assert tell("11" + "." * 79) == "the puzzle clashes: row 1 holds 1 twice"
    assert tell("12345678." + "." * 17 + "9" + "." * 54) == "the puzzle has no solution"


def test_verdict_names_what_is_broken(nine):
    inputs, answer = digits(EASY[0]) + 1, digits(EASY[1]) + 1
    assert nine.verdict(inputs, answer) == (True, "a legal solution of the given clues")
    blank, clue, twice = (np.array(answer) for _ in range(3))
    blank[10] = 1
    clue[2] = 5 + 1
    twice[0] = 8 + 1  # row 1 reads 883...
    assert nine.verdict(inputs, blank) == (False, "the cell at row 2 column 2 is not a digit (1 such cells)")
    assert nine.verdict(inputs, clue) == (False, "the clue at row 1 column 3 was changed from 3 to 5")
    assert nine.verdict(inputs, twice) == (False, "row 1 holds 8 twice")


def test_drawing_is_aligned_and_marks_wrong_cells(nine):
    inputs, label = digits(EASY[0]) + 1, digits(EASY[1]) + 1
    answer = label.copy()
    answer[0], answer[1] = 8 + 1, 1  # a wrong digit and no digit
    plain = nine.draw(inputs, answer, label, color=False).split("\n")
    assert len(plain) == 13 and {len(line) for line in plain} == {34}
    assert plain[1] == "| 8! .! 3  | 9' 2  1' | 6  5' 7' |"
    assert nine.draw(inputs, label, color=False).count("!") == 0
    assert "8!" in nine.draw(inputs, answer, color=False).split("\n")[1], "without a label, repeated digits are wrong"
    assert "!" not in nine.draw(inputs, inputs, color=False), "an empty board is not wrong"
    colored = nine.draw(inputs, answer, label)
    assert "\033[31m8!" in colored and "\033[1m3 " in colored and "\033[32m9'" in colored


def test_a_quote_that_is_not_closed_swallows_no_row(tmp_path):
    lines = ['puzzle,source', '"' + "1" * 200_000, "....,a"]
    path = tmp_path / "x.csv"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    with pytest.raises(ValueError, match="line 2"):
        puzzles.parse_table(common.read_lines(path), path)
    path.write_text('puzzle,source\n"1..,a\n....,b\n', encoding="utf-8")
    assert [row.line for row in puzzles.parse_table(common.read_lines(path), path)] == [2, 3]
