"""Analyses of a trained HRM, against slow computations of the same: python -m pytest tests/test_thinking.py -q"""

import contextlib
import copy
import dataclasses
import importlib.util
import json
import math

import numpy as np
import pytest
import torch

from data import arc, arc_grid, maze, sudoku, thinking
from data.show import side_by_side
from data.thinking import (ANALYSES, Moments, draw_terminal, first, palette, participation, print_analysis, residuals,
                           runs, savings, thinned, untrained, whole_segments)
from hrm import HRM, HRMConfig

DRAWN = importlib.util.find_spec("matplotlib")  # which is optional
TINY = dict(n_embd=16, n_head=2, H_layers=1, L_layers=2, expansion=1, puzzle_emb_ndim=16, H_cycles=2, L_cycles=2,
            halt_max_steps=2)


def BFLOAT16():
    return torch.autocast("cpu", torch.bfloat16)


def tiny(data=None, seed=0, **fields):
    """A small model, whose states vary; of 4x4 boards unless there is data."""
    fields = {**TINY, **(data.model_args if data else dict(seq_len=16, vocab_size=6)), **fields}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return HRM(HRMConfig(**fields))


def tasks():
    rng = np.random.default_rng(0)

    def pair():
        grid = rng.integers(0, 10, (3, 4))
        return {"input": grid.tolist(), "output": grid[:, ::-1].tolist()}
    return {"train": [pair(), pair()], "test": [pair(), pair()]}


@pytest.fixture(scope="module")
def all_data(tmp_path_factory):
    """Name -> data of a few puzzles."""
    folder = str(tmp_path_factory.mktemp("data"))
    sizes = dict(num_train=4, num_val=0, num_test=5, data_dir=folder)
    for part in ("training", "evaluation"):
        with open(f"{folder}/arc1_{part}.json", "w") as file:
            json.dump({f"{part[:4]}0000": tasks()}, file)
    return {"sudoku": sudoku.load(sudoku.SudokuConfig(box="2x2", clues=8, **sizes)),
            "maze": maze.load(maze.MazeConfig(size=5, min_path=2, styles="scatter", **sizes)),
            "arc": arc.load(arc.ArcConfig(sets="arc1", data_file=folder, num_augments=2, num_val=0))}


def batches_of(data, size=2):
    return lambda: ({name: torch.from_numpy(values) for name, values in batch.items()}
                    for batch in data.eval_batches("test", size))


def random_batches(*sizes, T=16, V=6):
    generator = torch.Generator().manual_seed(0)
    return [dict(inputs=torch.randint(1, V, (B, T), generator=generator),
                 puzzle_identifiers=torch.zeros(B, dtype=torch.long)) for B in sizes]


@torch.no_grad()
def slow_states(model, batch, segments):
    """The start states and all updates of each puzzle alone: [(level, blocks of an update, before, after (P+T, C))]."""
    c, found = model.config, []
    for i in range(len(batch["inputs"])):
        x = model.embed({name: values[i : i + 1] for name, values in batch.items()})
        z_H, z_L = model.start_states(1)
        rows = []
        for _ in range(segments * c.H_cycles):
            for _ in range(c.L_cycles if c.L_layers else 0):
                rows.append(("L", c.L_layers, z_L[0], (z_L := model.L_level(z_L, z_H + x, model.positions))[0]))
            told = z_L if c.L_layers else x
            rows.append(("H", c.H_layers, z_H[0], (z_H := model.H_level(z_H, told, model.positions))[0]))
        found.append(rows)
    return found


# ---- choosing


def test_thinning_keeps_first_and_last():
    for n in range(1, 70):
        for most in (2, 3, 8, 32):
            kept = thinned(list(range(n)), most)
            assert kept[0] == 0 and kept[-1] == n - 1 and len(kept) == min(n, most) == len(set(kept))
            assert not np.diff(kept).size or np.ptp(np.diff(kept)) <= 1, "evenly"


def test_rows_of_updates_come_by_whole_segments():
    rows = [(block, 1 + block // 6) for block in range(6 * 16)]
    kept = whole_segments(rows)
    assert len(kept) == 30 and kept[0] == rows[0] and kept[-1] == rows[-1]
    assert all([segment for _, segment in kept].count(segment) == 6 for _, segment in kept)
    assert whole_segments(rows[:32]) == rows[:32]
    many = [(block, 1 + block // 200) for block in range(600)]  # more in a segment than there is room for
    assert len(whole_segments(many)) == 32 and whole_segments(many)[-1] == many[-1]
    assert whole_segments(many[:100])[0] == many[0] and len(whole_segments(many[:100])) == 32


def test_first_puzzles():
    sizes = [len(batch["inputs"]) for batch in first(random_batches(3, 3, 3), 5)]
    assert sizes == [3, 2]
    assert [len(batch["inputs"]) for batch in first(random_batches(3, 3), 99)] == [3, 3]
    endless = iter(random_batches(3, 3))
    assert len(list(first(endless, 3))) == 1 and next(endless), "no more is asked for than needed"


# ---- forward residuals


@pytest.mark.parametrize("fields", [{}, dict(L_layers=0), dict(puzzle_emb_ndim=0)], ids=["two", "one", "no prefix"])
def test_residuals_match_a_slow_loop(fields):
    model, batches = tiny(**fields), random_batches(3, 2)
    found = residuals(model, batches, 3)
    puzzles = [rows for batch in batches for rows in slow_states(model, batch, 3)]
    assert len(found) == len(puzzles[0]) == 3 * len(model.config.updates)
    blocks = 0
    for i, (at, segment, level, value) in enumerate(found):
        of, added, _, _ = puzzles[0][i]
        blocks += added
        each = [float(np.mean([torch.dist(new, old) / new.norm() for old, new in zip(rows[i][2], rows[i][3])]))
                for rows in puzzles]
        assert (at, segment, level) == (blocks, i // len(model.config.updates) + 1, of)
        assert value == pytest.approx(np.mean(each), rel=1e-4)
    assert blocks == 3 * model.config.depth


def test_at_a_fixed_point_residuals_are_zero():
    model = tiny()
    with torch.no_grad():
        for name, weight in model.named_parameters():  # blocks that add nothing, states that are normalised already
            if "level" in name:
                weight.zero_()
        model.embed_tokens.weight.zero_()
        for init in (model.H_init, model.L_init):
            init.copy_(torch.ones(16))
    for _, _, _, value in residuals(model, random_batches(2), 2):
        assert value == pytest.approx(0, abs=1e-4)


def test_residuals_in_bfloat16():
    model, batches = tiny(), random_batches(3)
    exact = residuals(model, batches, 2)
    with BFLOAT16():
        rough = residuals(model, batches, 2)
    assert rough != exact and [row[:3] for row in rough] == [row[:3] for row in exact]
    assert [row[3] for row in rough] == pytest.approx([row[3] for row in exact], rel=0.1, abs=0.02)


# ---- participation ratios


def by_eigenvalues(vectors):
    values = np.linalg.eigvalsh(np.cov(np.asarray(vectors, np.float64).T, bias=True))
    return values.sum() ** 2 / (values**2).sum()


def ratio_of(*parts):
    moments = Moments()
    for part in parts:
        moments.add(torch.as_tensor(np.asarray(part)))
    return moments.participation_ratio()


def test_participation_ratio_matches_eigenvalues():
    vectors = 5 + np.random.default_rng(0).normal(size=(200, 12)) * np.arange(1, 13)
    assert ratio_of(vectors) == pytest.approx(by_eigenvalues(vectors), rel=1e-9)
    assert ratio_of(vectors[:7], vectors[7:].reshape(-1, 1, 12)) == pytest.approx(ratio_of(vectors), rel=1e-9)


def test_participation_ratio_of_known_cases():
    C = 8
    assert ratio_of(np.r_[np.eye(C), -np.eye(C)] + 3) == pytest.approx(C), "alike in all directions"
    assert ratio_of(np.outer(np.arange(9), np.arange(C)) + 3.0) == pytest.approx(1), "along one line"
    assert math.isnan(Moments().participation_ratio())


@pytest.mark.parametrize("autocast", [contextlib.nullcontext, BFLOAT16], ids=["float32", "bfloat16"])
def test_participation_of_growing_sets(autocast):
    model, batches = tiny(), random_batches(3, 4)
    with autocast():
        found = participation(model, batches, 2)
        puzzles = [rows for batch in batches for rows in slow_states(model, batch, 2)]
    assert [n for n, _, _ in found] == [1, 2, 4, 7]
    for n, *ratios in found:
        for level, ratio in zip("HL", ratios):
            states = [new[1:].float() for rows in puzzles[:n] for of, _, _, new in rows if of == level]  # no prefix
            tolerance = 1e-4 if autocast is contextlib.nullcontext else 0.1
            assert ratio == pytest.approx(by_eigenvalues(torch.cat(states)), rel=tolerance)


def test_one_module_has_no_z_L():
    found = participation(tiny(L_layers=0), random_batches(2), 1)
    assert all(H > 1 and math.isnan(L) for _, H, L in found)


def test_untrained_model_is_new_and_the_same_each_time():
    model, state = tiny(seed=5), torch.get_rng_state()
    one, two = untrained(model), untrained(model)
    assert torch.equal(torch.get_rng_state(), state) and one.config == model.config and not one.training
    for name, weight in model.state_dict().items():
        assert torch.equal(one.state_dict()[name], two.state_dict()[name])
        assert not name.endswith("proj.weight") or not torch.equal(weight, one.state_dict()[name])


# ---- scores


class Scored:
    """What print_segments and print_act ask of a model, with scores that are made up."""

    def __init__(self):
        self.config, self.training = HRMConfig(halt_max_steps=4), False

    def eval(self):
        return self

    def train(self, mode):
        return self

    def evaluate(self, batches, depths=None, grade=None, act_eval=False):
        exact = {2: [0, 1, 0, 0], 4: [1, 1, 0, 1], 8: [1, 1, 1, 1]}
        used = {2: [2, 1, 2, 2], 4: [3, 1, 4, 4], 8: [3, 1, 8, 8]}
        right = {depth: torch.tensor(exact[depth]).float() for depth in depths}
        if act_eval:
            right = {depth: values * torch.tensor([0.0, 1, 1, 1]) for depth, values in right.items()}
        return {depth: {"exact_accuracy": right[depth], "accuracy": right[depth] / 2,
                        "segments": torch.tensor(used[depth] if act_eval else [depth] * 4).float()} for depth in depths}


def lines_of(name, model, data, batches, capsys, depths, autocast=contextlib.nullcontext, **more):
    """The lines of a table, each in words."""
    print_analysis(name, model, data, batches, autocast, depths, **more)
    text = capsys.readouterr().out
    assert name == "answers" or max(map(len, text.splitlines())) <= 120
    return [line.split() for line in text.splitlines()]


def test_savings_are_told_right(capsys, all_data):
    fixed, act = (Scored().evaluate([], [2, 4, 8], act_eval=act) for act in (False, True))
    assert savings(fixed, act) == [(2, 0.25, 0.25, 1.75, 0.125), (4, 0.75, 0.5, 3.0, 0.25), (8, 1.0, 0.75, 5.0, 0.375)]
    lines = lines_of("act", Scored(), all_data["sudoku"], list, capsys, [2, 4, 8])
    assert lines[-2] == ["4", "0.7500", "0.5000", "-25.00", "pts", "3.00", "25.0%"]


def test_segments_mark_the_depth_of_training(capsys, all_data):
    lines = lines_of("segments", Scored(), all_data["sudoku"], list, capsys, [2, 4, 8])
    assert lines[2:] == [["segments", "exact_accuracy", "accuracy"], ["2", "0.2500", "0.1250"],
                         ["4", "(training)", "0.7500", "0.3750"], ["8", "1.0000", "0.5000"]]
    lines = lines_of("segments", Scored(), all_data["sudoku"], list, capsys, [2, 4])
    assert " ".join(lines[-1]) == "no more segments than in training: --depths 4,8,16 would go on"


# ---- all of it


@pytest.mark.parametrize("autocast", [contextlib.nullcontext, BFLOAT16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["sudoku", "maze", "arc"])
@pytest.mark.parametrize("name", ANALYSES)
def test_every_analysis_of_every_data(name, kind, autocast, all_data, capsys, tmp_path):
    data, plot = all_data[kind], tmp_path / "new" / "x.png"
    model = tiny(data).train()
    baseline = tiny(data, seed=1, L_layers=0, H_cycles=3) if name == "residual" else None
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    lines = lines_of(name, model, data, batches_of(data), capsys, [1, 2, 3], autocast, baseline=baseline,
                     plot=str(plot) if DRAWN else "")
    text = "\n".join(" ".join(line) for line in lines)
    assert "nan" not in text
    expected = {"segments": ["2 (training) 0.", "exact_accuracy accuracy" + " shortest_path" * (kind == "maze")],
                "act": ["at most fixed ACT", "+0.00 pts"], "residual": ["blocks segment L H recurrent", "30 3 - "],
                "participation": ["puzzles z_H z_L", "untrained", "of at most C = 16"],
                "answers": ["segment 1", "halting confidence", "3 segments"]}[name]
    assert all(part in text for part in expected)
    assert model.training and all(map(torch.equal, before.values(), model.state_dict().values()))
    assert torch.equal(torch.get_rng_state(), state)
    if DRAWN:
        assert plot.read_bytes().startswith(b"\x89PNG") and [file.name for file in plot.parent.iterdir()] == ["x.png"]
        assert lines[-1] == ["wrote", str(plot)]


def test_a_baseline_runs_for_about_as_many_blocks(all_data, capsys):
    data = all_data["sudoku"]
    for cycles, last in ((30, 30), (7, 28), (1, 30), (99, 99)):  # the model: 3 segments of 10 blocks
        lines = lines_of("residual", tiny(data), data, batches_of(data), capsys, [3],
                         baseline=tiny(data, L_layers=0, H_cycles=cycles, grad_updates=1))
        rows = [line for line in lines[4:] if line]
        assert max(int(row[0]) for row in rows if row[-1] != "-") == last and len(rows) <= 32
        assert rows[0][0] == "1" and int(rows[-1][0]) == max(last, 30)


def test_a_single_module_can_be_looked_at_too(all_data, capsys):
    data = all_data["sudoku"]
    for name in ("residual", "participation"):
        lines = lines_of(name, tiny(data, L_layers=0), data, batches_of(data), capsys, [2])[1:]
        assert "-" in lines[-1] if name == "participation" else lines[2] == ["blocks", "segment", "H"]


def test_what_cannot_be_analysed(all_data, tmp_path):
    data, model = all_data["sudoku"], tiny(all_data["sudoku"])
    one = tiny(data, L_layers=0)
    other = HRM(dataclasses.replace(one.config, seq_len=25))
    for name, baseline, plot, problem in [
            ("depth", None, "", "--analysis depth: give one of segments, act, residual, participation, answers"),
            ("residual", tiny(data), "", "give an HRM with --L_layers 0"),
            ("residual", other, "", "--baseline has seq_len 25, the model 16"),
            ("act", one, "", "--baseline goes with --analysis residual, not act"),
            ("act", None, str(tmp_path / "x.pdf"), "give the name of a .png file")]:
        with pytest.raises(ValueError) as error:  # before the batches, which would fail, are looked at
            print_analysis(name, model, data, None, contextlib.nullcontext, [1], baseline, plot)
        assert problem in str(error.value) and "\n" not in str(error.value)


# ---- drawings


def characters(text):
    """[(character, colour, background, bold), ...] of a line, through runs."""
    return [(c, *style) for _, part, *style in runs(text) for c in part]


def test_colours_of_boards_are_read():
    line = "| \033[1m5 \033[0m \033[31m4!\033[0m\033[2m#\033[0m\033[32mo\033[0m|"
    assert runs(line) == [(0, "| ", "black", None, False), (2, "5 ", "black", None, True),
                          (4, " ", "black", None, False), (5, "4!", "tab:red", None, False),
                          (7, "#", "gray", None, False), (8, "o", "tab:green", None, False),
                          (9, "|", "black", None, False)]
    assert palette(16) == (0, 0, 0) and palette(231) == (1, 1, 1) and palette(196) == (1, 0, 0)
    assert palette(27) == (0, 95 / 255, 1) and palette(245) == (138 / 255,) * 3


def test_colours_of_grids_are_read():
    grid = np.array([[0, 1], [5, 2]], np.uint8)
    lines = arc_grid.draw([grid, grid.T], True).splitlines()
    for line, plain, row in zip(lines, arc_grid.draw([grid, grid.T], False).splitlines(), grid):
        found = characters(line)
        assert "".join(c for c, *_ in found) == plain
        for i, color in enumerate(row):
            ink = (1, 1, 1) if color in arc_grid.DARK else (0, 0, 0)
            assert found[2 * i][1:] == (ink, palette(arc_grid.TINTS[color]), False)


@pytest.mark.parametrize("kind", ["sudoku", "maze", "arc"])
def test_no_character_of_a_board_is_lost(kind, all_data):
    data = all_data[kind]
    batch = next(data.eval_batches("test", 1))
    puzzle, label = batch["inputs"][0], batch["labels"][0]
    plain, colored = (data.draw(puzzle, puzzle, label, color).splitlines() for color in (False, True))
    assert ["".join(part for _, part, *_ in runs(line)) for line in colored] == plain
    for line in colored:
        assert all(column == len("".join(part for _, part, *_ in runs(line)[:i]))
                   for i, (column, *_) in enumerate(runs(line)))


def test_boards_side_by_side():
    boards = [("a", "\033[1m12\033[0m\n3"), ("b", "4"), ("c", "5")]
    assert side_by_side(boards, 100) == ["a    b    c ", "\033[1m12\033[0m   4    5 ", "3           "]
    assert side_by_side(boards, 7)[:3] == ["a    b ", "\033[1m12\033[0m   4 ", "3      "]
    assert len(side_by_side(boards, 1)) == 3 + 2 + 2


@pytest.mark.skipif(not DRAWN, reason="needs matplotlib")
def test_a_figure_shows_the_colours(tmp_path):
    from matplotlib.image import imread

    grid = "\033[38;5;231;48;5;160m  \033[0m\033[38;5;16;48;5;34m8 \033[0m"
    draw_terminal(tmp_path / "x.png", [grid, "", "\033[31m#"])
    pixels = imread(tmp_path / "x.png")[..., :3]
    for color in (palette(160), palette(34), (1, 1, 1), (0, 0, 0)):
        assert (abs(pixels - color).max(axis=-1) < 0.02).any(), color
    red = abs(pixels - (0.84, 0.15, 0.16)).max(axis=-1) < 0.02  # of the third line
    assert red.any() and red.nonzero()[0].min() > pixels.shape[0] / 2


def test_figures_leave_out_answers_in_between(monkeypatch, all_data, tmp_path, capsys):
    found, data = [], all_data["sudoku"]
    many = [("the puzzle", "x"), *((f"segment {n}", "x") for n in range(1, 41))]
    monkeypatch.setattr(thinking, "show_thinking", lambda *args: None)
    monkeypatch.setattr(thinking, "thinking_boards", lambda *args, color: [(many, "solved")] * 3)
    monkeypatch.setattr(thinking, "draw_terminal", lambda path, lines: found.extend(lines))
    thinking.print_answers(tiny(data), data, batches_of(data), contextlib.nullcontext, 40, "x.png")
    titles = found[0].split("   ")
    assert len(found) == 3 * 4 - 1 and found[2] == "solved" and len(titles) == 8
    assert [title.strip() for title in titles][:2] == ["the puzzle", "segment 1"] and titles[-1] == "segment 40"
