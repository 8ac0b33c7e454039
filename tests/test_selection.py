"""What is printed of DND's selection, against slow computations of the same.

    python -m pytest tests/test_selection.py -q
"""

import builtins
import contextlib
import dataclasses
import importlib.util
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from data import selection
from data.selection import (PLAIN, added_flops, by_count, correlation, gather, print_selection, show_selected,
                            throughput)
from data.show import check_plot
from data.tokenizer import byte_tokenizer
from dnd import DND, IGNORE, PRESETS, DNDConfig

TINY = DNDConfig(vocab_size=257, block_size=64, n_embd=32, n_layer=5, n_head=4, n_kv_head=2, head_dim=6,
                 intermediate_size=40, nested_first=1, nested_last=3)
MOE = dict(num_experts=5, num_experts_per_tok=2, moe_intermediate_size=24, mlp_only_layers="0", tie_embeddings=False)
DATA = SimpleNamespace(tokenizer=byte_tokenizer())


def tiny(seed=0, **fields):
    """A small model whose routers select about half of the tokens."""
    torch.manual_seed(seed)
    model = DND(dataclasses.replace(TINY, **fields)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter += torch.randn_like(parameter) * (0.3 if parameter.ndim != 2 else 0.1)
    return model


def batches_like(*shapes):
    """Batches of random tokens; row i is unlabelled over its first third and its last i places."""
    batches = []
    for seed, (B, T) in enumerate(shapes):
        tokens = torch.randint(257, (B, T + 1), generator=torch.Generator().manual_seed(seed))
        labels = tokens[:, 1:].clone()
        labels[:, : T // 3] = IGNORE
        for i in range(B):
            labels[i, T - i :] = IGNORE
        batches.append(dict(inputs=tokens[:, :-1], labels=labels, prompt_lengths=torch.full((B,), T // 3 + 1)))
    return batches


@torch.no_grad()
def slow(model, base, batches):
    """Token by token, each row alone and without its padding: counts, p (N, L), scored, entropies by name."""
    counts, scores, scored, entropy = [], [], [], {"base": [], "depth 1": [], "depth 2": []}
    for batch in batches:
        for row, labels in zip(batch["inputs"], batch["labels"]):
            n, trace = int((labels != IGNORE).nonzero().max()) + 1, []
            logits = {"base": base(row[None, :n])[0], "depth 1": model(row[None, :n], depth=1)[0],
                      "depth 2": model(row[None, :n], trace=trace)[0]}
            for t in range(n):
                counts.append(sum(int(selected[0, t]) for selected, _ in trace))
                scores.append([float(p[0, t]) for _, p in trace])
                scored.append(bool(labels[t] != IGNORE))
                for name, values in logits.items():
                    entropy[name].append(float(torch.distributions.Categorical(logits=values[0, t]).entropy()))
    return np.array(counts), np.array(scores), np.array(scored), entropy


# ---- one pass over the texts


@pytest.mark.parametrize("fields", [{}, MOE], ids=["dense", "moe"])
def test_one_pass_matches_slow_rows(fields, monkeypatch):
    monkeypatch.setattr(selection, "CHUNK", 5 * 257)  # so that logits come in parts
    model, base = tiny(**fields), tiny(1, nested_first=-1, nested_last=-1, **fields)
    batches = batches_like((4, 12), (2, 20))
    found = gather(model, iter(batches), contextlib.nullcontext, base)
    counts, p, scored, entropy = slow(model, base, batches)
    tau = model.nesting.tau.numpy()
    assert (found.count == counts).all() and (found.scored == scored).all() and 0 < counts.mean() < 3
    np.testing.assert_allclose(found.ratio, (p > tau).mean(axis=0))
    np.testing.assert_allclose(found.mean, p.mean(axis=0), atol=1e-5)
    np.testing.assert_allclose(found.sd, p.std(axis=0), atol=1e-4)
    assert (found.histogram.sum(axis=1) == len(counts)).all()
    for name, values in entropy.items():
        assert found.entropy[name].dtype == np.float32
        np.testing.assert_allclose(found.entropy[name], values, atol=1e-4)
    assert 1 <= len(found.rows) <= 3 and found.batch is batches[0]


def test_without_base_and_in_bfloat16():
    found = gather(tiny(), batches_like((3, 12)), lambda: torch.autocast("cpu", torch.bfloat16))
    assert found.before == ["depth 1"] and found.entropy["depth 2"].dtype == np.float32


def test_no_labelled_token_is_an_error():
    batch = dict(inputs=torch.zeros(2, 5, dtype=torch.long), labels=torch.full((2, 5), IGNORE))
    with pytest.raises(ValueError, match="no labelled token"):
        gather(tiny(), [batch], contextlib.nullcontext)


# ---- what it costs


@pytest.mark.parametrize("fields", [{}, MOE, dict(nested_positions="original")], ids=["dense", "moe", "original"])
def test_counted_flops_are_the_formula_with_all_keys(fields):
    model, T, ratios = tiny(**fields), 100, [0.1, 0.5, 0.32]
    ((length, formula, counted),) = added_flops(model, [T], ratios)
    c, heads = model.config, 24
    plain = (model.flops((1, T), 0) / 3) - 2 * 3 * c.n_embd * T  # without the routers, which are not counted
    added = sum((one(c, layer, T, ratio) - one(c, layer, T, 0)) / 3 for layer, ratio in zip(c.nested, ratios))
    assert length == T and formula == pytest.approx(100 * added / (model.flops((1, T), 0) / 3))
    halves = sum(2 * heads * (ratio * T) ** 2 for ratio in ratios)  # of the keys
    assert counted == pytest.approx(100 * (added + halves) / (plain + c.n_layer * 2 * heads * T**2))


def one(config, layer, T, ratio):
    """The formula of a model in which only `layer` is nested."""
    with torch.device("meta"):
        return DND(dataclasses.replace(config, nested_first=layer, nested_last=layer)).flops((1, T), ratio)


def test_nothing_selected_adds_nothing():
    assert added_flops(tiny(), [16, 256], 0.0) == [(16, 0, 0), (256, 0, 0)]  # longer than block_size, too


def test_flops_of_a_large_model_take_no_memory():
    config = dataclasses.replace(PRESETS["qwen3-30b-a3b"], n_layer=6, nested_first=2, nested_last=4)
    with torch.device("meta"):
        (_, formula, counted), (_, long, _) = added_flops(DND(config), [1024, 131072])
    assert formula == pytest.approx(counted, rel=0.1) and long < formula


@pytest.mark.parametrize("with_prompts", [True, False])
def test_throughput_is_of_both_depths(with_prompts):
    (batch,) = batches_like((3, 64))  # as long as the model reads: room to write must be left
    if not with_prompts:
        del batch["prompt_lengths"]
    speeds = throughput(tiny(), batch, contextlib.nullcontext, repeats=1, new_tokens=3)
    assert set(speeds) == {"forward", "decoding"} and all(speed > 0 for at in speeds.values() for speed in at.values())


# ---- what the selected tokens are like


def test_correlation_matches_numpy():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=50), rng.normal(size=50)
    pearson, spearman = correlation(x, x + y)
    assert pearson == pytest.approx(np.corrcoef(x, x + y)[0, 1])
    ranks = (np.argsort(np.argsort(values)) for values in (x, x + y))
    assert spearman == pytest.approx(np.corrcoef(*ranks)[0, 1])


def test_ties_share_their_rank():
    x, y = [3, 1, 1, 2, 2, 2], [10, 20, 30, 30, 5, 5]
    ranks = [6, 1.5, 1.5, 4, 4, 4], [3, 4, 5.5, 5.5, 1.5, 1.5]
    assert correlation(x, y)[1] == pytest.approx(np.corrcoef(*ranks)[0, 1])


@pytest.mark.parametrize("x, y", [([1, 1, 1], [1, 2, 3]), ([0.1, 0.2, 0.3], [0.7] * 3), ([], [])])
def test_constant_columns_have_no_correlation(x, y):
    assert all(map(math.isnan, correlation(x, y)))


@pytest.mark.parametrize("n_layers", [3, 20])
def test_entropies_by_count(n_layers):
    rng = np.random.default_rng(0)
    count = rng.integers(0, n_layers + 1, 200)
    entropy = {name: rng.random(200).astype(np.float32) for name in ("base", "depth 1", "depth 2")}
    found = SimpleNamespace(count=count, entropy=entropy, before=["base", "depth 1"])
    rows = by_count(found, n_layers)
    assert len(rows) == (4 if n_layers == 3 else 9) and sum(row[2] for row in rows) == 200
    label, number, tokens, before, change, *_ = rows[-1]
    inside = count >= int(label.split("-")[0])
    assert number == count[inside].mean() and tokens == inside.sum()
    assert before == pytest.approx(entropy["base"][inside].mean(), rel=1e-5)
    assert change == pytest.approx((entropy["depth 2"] - entropy["base"])[inside].mean(), rel=1e-4)


# ---- texts


TEXT = "aé日\n=\x1b"  # bytes of two characters stand alone; an escape must not reach the terminal


def shown(capsys, model, ids, monkeypatch, color):
    monkeypatch.setattr(selection, "in_color", lambda: color)
    show_selected(model, DATA.tokenizer, ids, contextlib.nullcontext)
    return capsys.readouterr().out.splitlines()


def test_counts_stand_below_the_text(capsys, monkeypatch):
    model, ids, trace = tiny(), DATA.tokenizer.encode(TEXT), []
    with torch.no_grad():
        model(torch.tensor([ids]), trace=trace)
    legend, text, *lines = shown(capsys, model, ids, monkeypatch, color=False)
    pieces = ["a", r"\xc3", r"\xa9", r"\xe6", r"\x97", r"\xa5", r"\n", "=", r"\x1b"]
    assert text.strip() == "".join(pieces) and "below each token" in legend
    for line, layer, (selected, _) in zip(lines, (1, 2, 3), trace):
        marks = "".join(("1" if chosen else ".") * len(piece) for piece, chosen in zip(pieces, selected[0]))
        assert line == f"  layers {layer}  {marks}"
    assert any("1" in line for line in lines) and any("." in line for line in lines)


def test_layers_are_in_three_groups(capsys, monkeypatch):
    lines = shown(capsys, tiny(nested_last=4), [5, 6, 7], monkeypatch, color=False)
    assert [line.split()[1] for line in lines if line.startswith("  layers")] == ["1-2", "3", "4"]


def test_brightness_shows_the_share(capsys, monkeypatch):
    model, ids = tiny(nested_first=2, nested_last=2), DATA.tokenizer.encode("12+34=46")
    model.nesting.tau.fill_(-1)  # all
    _, line, _ = shown(capsys, model, ids, monkeypatch, color=True)
    assert line == "  layers 2  " + "".join(f"{selection.BRIGHTNESS[-1]}{c}{PLAIN}" for c in "12+34=46")
    model.nesting.tau.fill_(2)  # none
    _, line, _ = shown(capsys, model, ids, monkeypatch, color=True)
    assert line == "  layers 2  12+34=46"


def test_wide_characters_and_long_texts(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")

    class Characters:  # a tokenizer with a token for a whole character, and an id that has no bytes
        def token_bytes(self, number):
            if number == 99:
                raise ValueError("no such id")
            return "日e\u0301"[number].encode()

    monkeypatch.setattr(selection, "in_color", lambda: False)
    model = tiny(nested_first=1, nested_last=1)
    model.nesting.tau.fill_(-1)
    show_selected(model, Characters(), [0, 1, 2, 99] * 5, contextlib.nullcontext, legend=False)
    lines = capsys.readouterr().out.splitlines()[:-1]
    assert lines[0].strip() == r"日e\u0301<99>日e\u0301<99>日" and lines[1] == "  layers 1  " + "1" * 28
    assert len(lines) == 6 and all(selection._width(line) <= 40 for line in lines)


def test_what_cannot_be_shown():
    for model, ids in ((tiny(), []), (tiny(nested_first=-1, nested_last=-1), [1])):
        with pytest.raises(ValueError, match="at least one token"):
            show_selected(model, DATA.tokenizer, ids, contextlib.nullcontext)


# ---- all of it


@pytest.mark.parametrize("case", ["some", "none", "moe"])
def test_tables_are_complete_and_the_figure_is_written(case, capsys, tmp_path):
    model, base = tiny(**(MOE if case == "moe" else {})), tiny(1, nested_first=-1, nested_last=-1)
    if case == "none":
        model.nesting.tau.fill_(1)
    plot = tmp_path / "new" / "x.png"
    drawn = case != "moe" and importlib.util.find_spec("matplotlib")  # which is optional
    print_selection(model, DATA, lambda: iter(batches_like((4, 12), (2, 20))), contextlib.nullcontext,
                    base if case != "moe" else None, str(plot) if drawn else "")
    out = capsys.readouterr().out
    for text in ("k_target 0.2", "tokens per second", "6.27", "0.178", "who was selected", "depth 2 / depth 1"):
        assert text in out
    assert ("entropy, base" in out) == (case != "moe") and "nan" not in out and max(map(len, out.splitlines())) <= 120
    if case == "none":
        line = next(line for line in out.splitlines() if "entropy, base " in line)
        assert line.split()[2:] == ["-"] * 4
    if not drawn:
        return
    assert plot.read_bytes().startswith(b"\x89PNG") and [file.name for file in plot.parent.iterdir()] == ["x.png"]


def test_a_plain_model_has_nothing_to_show(capsys):
    print_selection(tiny(nested_first=-1, nested_last=-1), DATA, [], contextlib.nullcontext)
    assert capsys.readouterr().out == "no nested layers: no token is selected\n"


def test_figures_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "folder.png").mkdir()
    for path, problem in (("file/x.png", "cannot be written"), ("folder.png", "it is a folder"), ("x.pdf", ".png")):
        with pytest.raises(ValueError, match=problem):  # before the batches, which would fail, are looked at
            print_selection(tiny(), DATA, None, contextlib.nullcontext, plot=str(tmp_path / path))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["file", "folder.png"]


def test_missing_matplotlib_is_named(monkeypatch, tmp_path):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ValueError, match="--plot needs matplotlib: pip install matplotlib"):
        check_plot(str(tmp_path / "x.png"))
