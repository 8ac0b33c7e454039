"""HRM against the reference numbers, against slow loops written from the paper, and as a learner.

    python -m pytest tests/test_hrm.py -q
"""

import dataclasses
import math
import os
import pickle

import pytest
import torch

import golden
from data import sudoku
from hrm import (HRM, IGNORE, PRESETS, AdamATan2, Carry, HRMConfig, SignSGD, cell_loss, truncated_lecun_,
                 _plain_name)

# Tolerances from the golden sets' README: float32 noise of the reference, times ten.
STATES, LOSSES, GRADS = dict(rtol=1e-4, atol=2e-4), dict(rtol=1e-4, atol=2e-5), dict(rtol=1e-4, atol=2e-5)


# ---- golden sets


def golden_config(name):
    """The reference's settings in this project's spelling."""
    theirs = golden.settings(name)["config"]
    renamed = {"hidden_size": "n_embd", "num_heads": "n_head"}
    ours = {renamed.get(k, k): v for k, v in theirs.items()}
    cycles = {"grad_updates": 2, "loss": "softmax" if "softmax" in theirs.get("loss_type", "") else "stablemax"}
    return {k: v for k, v in {**ours, **cycles}.items() if k in HRMConfig.__dataclass_fields__}


def golden_model(name, tmp_path, prefix=""):
    state = golden.arrays(f"{name}_state")
    torch.save({prefix + k: v for k, v in state.items()}, tmp_path / "published.pt")
    return HRM.load_pretrained(tmp_path / "published.pt", **golden_config(name))


def assert_state(carry, want, prefix=""):
    assert torch.equal(carry.steps.long(), want[f"{prefix}steps"])
    assert torch.equal(carry.halted, want[f"{prefix}halted"])
    for key in ("z_H", "z_L"):
        if prefix + key in want:
            torch.testing.assert_close(getattr(carry, key), want[prefix + key], **STATES)


def assert_outputs(outputs, want):
    torch.testing.assert_close(outputs["logits"], want["logits"], **STATES)
    torch.testing.assert_close(outputs["q_halt"], want["q_halt_logits"], **STATES)
    torch.testing.assert_close(outputs["q_continue"], want["q_continue_logits"], **STATES)


@pytest.mark.parametrize("prefix", ["", "model.", "_orig_mod.model."])
@pytest.mark.parametrize("name", golden.find("hrm_"))
def test_segments_match_the_reference_in_evaluation(name, prefix, tmp_path):
    model = golden_model(name, tmp_path, prefix).eval()
    want = golden.arrays(f"{name}_eval")
    first, second = golden.under(want, "batch1."), golden.under(want, "batch2.")
    carry, n = model.initial_carry(first), 1
    with torch.no_grad():
        while f"seg{n}.logits" in want:
            # the second batch comes one call early, when no row has halted yet and it must be ignored
            carry, outputs = model(carry, first if n < model.config.halt_max_steps else second)
            assert_outputs(outputs, golden.under(want, f"seg{n}."))
            assert_state(carry, golden.under(want, f"seg{n}."))
            n += 1
    assert n > model.config.halt_max_steps, f"{name}: the set stops before any row is halted"


def golden_cases():
    sets = ((name, golden.arrays(f"{name}_train")) for name in golden.find("hrm_"))
    keys = ((name, key) for name, want in sets for key in want or ())
    return [(name, key.removesuffix(".loss_total")) for name, key in keys if key.endswith(".loss_total")]


@pytest.mark.parametrize("name,case", golden_cases())
def test_training_segment_matches_the_reference(name, case, tmp_path):
    """Logits, q values, bootstrap target, each loss term and metric, the new carry, gradients, the puzzle embedding."""
    model = golden_model(name, tmp_path).train()
    train = golden.arrays(f"{name}_train")
    batch, want = golden.under(train, "batch."), golden.under(train, f"{case}.")
    carry = model.initial_carry(batch)
    if f"{case}.carry.z_H" in train:
        saved = golden.under(want, "carry.")
        states = [saved.pop(key) for key in ("z_H", "z_L", "steps", "halted")]
        carry = Carry(*states, data=saved)
    rates = golden.settings(name).get("signsgd", {"lr": 0.01, "weight_decay": 0.1})
    optimizers = model.configure_optimizers(lr=1e-3, weight_decay=0.1, betas=(0.9, 0.95))
    _, outputs = model(carry, batch)
    assert_outputs(outputs, want)
    if "target_q_continue" in want:
        torch.testing.assert_close(outputs["target_q_continue"], want["target_q_continue"], **STATES)
        assert not outputs["target_q_continue"].requires_grad

    loss, metrics, carry = model.step(batch, carry)
    B = len(carry.halted)
    torch.testing.assert_close((loss * B).double(), want["loss_total"].double(), **LOSSES)
    assert int(metrics["exact_accuracy"][1]) == int(want["metrics.count"])
    same = metrics.keys() - {"loss", "segments", "puzzles"}
    for theirs, ours in [("steps", "segments"), *zip(same, same)]:
        torch.testing.assert_close(metrics[ours][0].double(), want[f"metrics.{theirs}"].double(), **LOSSES)
    assert_state(carry, golden.under(want, "new_"))
    for key, value in carry.data.items():
        assert torch.equal(value, want[f"new_{key}"]), key

    (loss * B).backward()
    ours = dict(model.named_parameters())
    for key, grad in golden.under(want, "grad.").items():
        torch.testing.assert_close(ours[_plain_name(key)].grad, grad, msg=lambda text: f"{key}: {text}", **GRADS)
    if "puzzle_emb.local_grad" in want:
        table = model.puzzle_emb.weights
        torch.testing.assert_close(table.grad._values(), want["puzzle_emb.local_grad"], **GRADS)
        optimizers[1].param_groups[0].update(lr=rates["lr"], weight_decay=rates["weight_decay"])
        optimizers[1].step()
        torch.testing.assert_close(table.detach(), want["puzzle_emb.weights_after_signsgd"], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", golden.find("stablemax"))
def test_stablemax_matches_the_reference(name):
    want = golden.arrays(name)
    logits = want["logits"].double().requires_grad_()
    loss = cell_loss(logits, want["labels"], "stablemax")
    loss.sum().backward()
    torch.testing.assert_close(loss, want["token_loss"], rtol=0, atol=1e-9)
    torch.testing.assert_close(logits.grad.float(), want["grad_logits"], rtol=0, atol=1e-6)
    labelled = (want["labels"] != -100).sum(-1).clamp(min=1)
    torch.testing.assert_close(loss.sum(-1) / labelled, want["per_sequence_mean"], rtol=0, atol=1e-9)
    softmax = cell_loss(want["logits"], want["labels"], "softmax")
    torch.testing.assert_close(softmax, want["softmax_token_loss"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype,atol", [(torch.float64, 1e-12), (torch.float32, 2e-6)])
@pytest.mark.parametrize("name", golden.find("adam_atan2"))
def test_adam_atan2_matches_the_official_package(name, dtype, atol):
    want, h = golden.arrays(name), golden.settings(name)["hyperparameters"]
    for key, decay in (("params", h["weight_decay"]), ("params_official_no_decay", 0.0)):
        p = torch.nn.Parameter(want["param_init"].to(dtype, copy=True))
        optimizer = AdamATan2([p], lr=h["lr"], betas=(h["beta1"], h["beta2"]), weight_decay=decay)
        for grad, after, m, v in zip(want["grads"], want[key], want["exp_avg"], want["exp_avg_sq"]):
            p.grad = grad.to(dtype)
            optimizer.step()
            torch.testing.assert_close(p.detach(), after.to(dtype), rtol=0, atol=atol)
        torch.testing.assert_close(optimizer.state[p]["exp_avg"], m.to(dtype), rtol=1e-6, atol=0)
        torch.testing.assert_close(optimizer.state[p]["exp_avg_sq"], v.to(dtype), rtol=1e-6, atol=0)


# ---- helpers


def small(seed=0, **fields):
    """A small model whose every part matters: what starts at zero (Q head, puzzle embedding) is drawn at random too."""
    torch.manual_seed(seed)
    base = dict(vocab_size=6, seq_len=16, num_puzzle_identifiers=3, n_embd=16, n_head=2, H_layers=1, L_layers=1,
                expansion=1, puzzle_emb_ndim=0, halt_max_steps=4, halt_exploration_prob=0.0)
    model = HRM(HRMConfig(**{**base, **fields}))
    torch.nn.init.normal_(model.q_head.weight)
    torch.nn.init.normal_(model.q_head.bias)
    if model.prefix_len:
        torch.nn.init.normal_(model.puzzle_emb.weights)
        model.puzzle_emb.weights.requires_grad_()
    return model


def random_batch(B=4, config=None, seed=1):
    """Random tokens, labels with holes, ids."""
    T, V, ids = (config.seq_len, config.vocab_size, config.num_puzzle_identifiers) if config else (16, 6, 3)
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(1, V, (B, T), generator=g)
    labels[torch.rand(B, T, generator=g) < 0.3] = IGNORE
    return {"inputs": torch.randint(0, V, (B, T), generator=g), "labels": labels,
            "puzzle_identifiers": torch.randint(0, ids, (B,), generator=g)}


def random_carry(model, batch, steps, halted):
    """A carry in the middle of things."""
    shape = (len(steps), model.prefix_len + model.config.seq_len, model.config.n_embd)
    g = torch.Generator().manual_seed(2)
    states = [torch.randn(shape, generator=g) for _ in range(2)]
    return Carry(*states, torch.tensor(steps, dtype=torch.int32), torch.tensor(halted), batch)


def gradients(model, loss):
    """Name -> dense gradient, the puzzle embedding's included."""
    tables = {"puzzle_emb": model.puzzle_emb.weights} if model.prefix_len else {}
    named = {**dict(model.named_parameters()), **tables}
    grads = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return {name: None if g is None else g.to_dense() for name, g in zip(named, grads)}


def script(monkeypatch, model, qs, answers=None):
    """Segments that say what the test wants: the n-th gives qs[n] (B, 2) and answers[n] (B, T), or the last ones.

    Returns a list that grows by an entry per call: was grad on?
    """
    calls = []

    def segment(z_H, z_L, data):
        calls.append(torch.is_grad_enabled())
        return z_H + 1, z_L + 1, 1 * qs[min(len(calls), len(qs)) - 1]

    def answer(z_H):
        return as_logits(answers[min(len(calls), len(answers)) - 1], model.config)

    monkeypatch.setattr(model, "segment", segment)
    if answers is not None:
        monkeypatch.setattr(model, "answer", answer)
    return calls


def as_logits(answers, config):
    """Logits (B, T, V) whose argmax are the answers (B, T)."""
    return 5 * torch.nn.functional.one_hot(answers, config.vocab_size).float()


def one_line(error):
    text = str(error.value)
    assert "\n" not in text and text, text
    return text


# ---- the segment against a slow loop written from the paper


def slow_rms(x):
    return x / (x.square().mean(dim=-1, keepdim=True) + 1e-5).sqrt()


def slow_rotate(x):
    """x (n, hd): features i and i + hd/2 of position t are a complex number, turned by t * 10000^(-2i/hd)."""
    n, hd = x.shape
    angle = torch.tensor([[t * 10000 ** (-2 * i / hd) for i in range(hd // 2)] for t in range(n)]).to(x.dtype)
    turned = torch.complex(x[:, : hd // 2], x[:, hd // 2 :]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([turned.real, turned.imag], dim=1)


def slow_bias(table, c, prefix):
    """(n, n) score bias of one head from its 8 numbers: same row 1, same column 2, same box 4; none with the prefix.

    Without boxes, a cell next to the first: below 4, left 5, right 6, above 7.
    """
    side, n, entries = int(c.seq_len**0.5), prefix + c.seq_len, []
    for i in range(-prefix, c.seq_len):
        for j in range(-prefix, c.seq_len):
            (row, col), (row_2, col_2) = divmod(i, side), divmod(j, side)
            relation = (row == row_2) + 2 * (col == col_2)
            if c.box_rows and row // c.box_rows == row_2 // c.box_rows and col // c.box_cols == col_2 // c.box_cols:
                relation += 4
            if not c.box_rows and abs(row - row_2) + abs(col - col_2) == 1:
                relation = 4 if row_2 > row else 5 if col_2 < col else 6 if col_2 > col else 7
            entries.append(16 * table[relation if min(i, j) >= 0 else 0])
    return torch.stack(entries).view(n, n)


def slow_attention(w, name, x, c, prefix):
    """x (n, C), one puzzle: every head, every query position on its own."""
    C, hd = c.n_embd, c.n_embd // c.n_head
    heads = []
    for h in range(c.n_head):
        q, k, v = (x @ w[f"{name}.qkv_proj.weight"][part * C + h * hd : part * C + (h + 1) * hd].T for part in range(3))
        if c.pos_encodings == "rope":
            q, k = slow_rotate(q), slow_rotate(k)
        bias = torch.zeros(len(x), len(x))
        if c.pos_encodings == "grid":
            bias = slow_bias(w[f"{name}.grid_bias"][h], c, prefix)
        rows = []
        for i in range(len(x)):
            weight = torch.stack([q[i] @ k[j] / hd**0.5 + bias[i, j] for j in range(len(x))]).exp()
            rows.append((weight / weight.sum()) @ v)
        heads.append(torch.stack(rows))
    return torch.cat(heads, dim=1) @ w[f"{name}.o_proj.weight"].T


def slow_level(w, level, n_layers, z, c, prefix):
    for i in range(n_layers):
        name = f"{level}_level.layers.{i}"
        z = slow_rms(z + slow_attention(w, f"{name}.self_attn", z, c, prefix))
        gate, up = (z @ w[f"{name}.mlp.gate_up_proj.weight"].T).tensor_split(2, dim=1)
        z = slow_rms(z + (gate / (1 + (-gate).exp()) * up) @ w[f"{name}.mlp.down_proj.weight"].T)
    return z


def slow_embed(w, tokens, puzzle_id, c):
    """One puzzle: the zero-padded puzzle vector in rows of C, then the tokens -> (P+T, C), P"""
    x, prefix = w["embed_tokens.weight"][tokens], 0
    if c.puzzle_emb_ndim:
        prefix = (c.puzzle_emb_ndim + c.n_embd - 1) // c.n_embd
        vector = torch.cat([w["puzzle_emb.weights"][puzzle_id], torch.zeros(prefix * c.n_embd - c.puzzle_emb_ndim)])
        x = torch.cat([vector.view(prefix, c.n_embd), x])
    if c.pos_encodings == "learned":
        x = (x + w["embed_pos.weight"]) / 2**0.5
    return c.n_embd**0.5 * x, prefix


def slow_segment(w, c, z_H, z_L, tokens, puzzle_id, grad_updates):
    """One puzzle: N times (T times L, then H). Whatever came before the last `grad_updates` updates is a constant.

    Without L layers N times H, which then is told the input.
    """
    x, prefix = slow_embed(w, tokens, puzzle_id, c)
    L_cycles = c.L_cycles if c.L_layers else 0
    left = c.H_cycles * (L_cycles + 1)
    for _ in range(c.H_cycles):
        for _ in range(L_cycles):
            if left == grad_updates:
                z_H, z_L = z_H.detach(), z_L.detach()
            z_L, left = slow_level(w, "L", c.L_layers, z_L + z_H + x, c, prefix), left - 1
        if left == grad_updates:
            z_H, z_L = z_H.detach(), z_L.detach()
        z_H, left = slow_level(w, "H", c.H_layers, z_H + (z_L if c.L_layers else x), c, prefix), left - 1
    return z_H, z_L, z_H[prefix:] @ w["lm_head.weight"].T, w["q_head.weight"] @ z_H[0] + w["q_head.bias"]


SHAPES = {  # every kind of position, 0, 1 and 2 prefix positions, several layers, cycles and depths of gradient
    "rope": dict(H_cycles=2, L_cycles=1, L_layers=2),
    "rope, 2 prefix positions": dict(puzzle_emb_ndim=21, H_cycles=1, L_cycles=2, grad_updates=3),
    "learned, 1 prefix position": dict(pos_encodings="learned", puzzle_emb_ndim=16, H_cycles=2, L_cycles=2),
    "learned, 2 prefix positions": dict(pos_encodings="learned", puzzle_emb_ndim=30, H_layers=2, H_cycles=1,
                                        L_cycles=1),
    "grid": dict(pos_encodings="grid", box_rows=2, box_cols=2, H_cycles=2, L_cycles=1, grad_updates=4),
    "grid 6x6, 1 prefix position": dict(pos_encodings="grid", seq_len=36, vocab_size=8, box_rows=2, box_cols=3,
                                        puzzle_emb_ndim=9, H_cycles=1, L_cycles=1),
    "grid without boxes": dict(pos_encodings="grid", seq_len=9, n_head=4, H_cycles=1, L_cycles=2, grad_updates=1),
    "one module": dict(L_layers=0, H_layers=2, H_cycles=3, grad_updates=2),
}


@pytest.mark.parametrize("fields", SHAPES.values(), ids=SHAPES)
def test_segment_and_its_gradient_equal_a_slow_loop_from_the_paper(fields):
    """States, logits, q and every gradient, in float32 against float64."""
    model = small(**fields)
    c, batch = model.config, random_batch(2, model.config)
    carry = random_carry(model, batch, [1, 1], [False, False])
    z_H, z_L, q = model.segment(carry.z_H, carry.z_L, batch)
    outputs = (z_H, z_L, model.answer(z_H), q)
    torch.set_default_dtype(torch.float64)
    try:
        weights = {k: v.detach().double().requires_grad_() for k, v in model.state_dict().items()}
        slow = [slow_segment(weights, c, carry.z_H[b].double(), carry.z_L[b].double(), batch["inputs"][b],
                             batch["puzzle_identifiers"][b], c.grad_updates) for b in range(2)]
        wanted = [torch.stack(values) for values in zip(*slow)]
    finally:
        torch.set_default_dtype(torch.float32)
    for got, want in zip(outputs, wanted):
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)

    mix = [torch.randn(o.shape, generator=torch.Generator().manual_seed(n)) for n, o in enumerate(outputs)]
    got = gradients(model, sum((o * m).sum() for o, m in zip(outputs, mix)))
    sum((o * m).sum() for o, m in zip(wanted, mix)).backward()
    for name, grad in got.items():
        want = weights["puzzle_emb.weights" if name == "puzzle_emb" else name].grad
        assert (grad is None) == (want is None), name
        if want is not None:
            assert want.abs().max() > 0, name
            torch.testing.assert_close(grad.double(), want, rtol=1e-3, atol=1e-4 * want.abs().max().item(), msg=name)


def saved_tensors(**fields):
    """Number and bytes of the tensors that a training segment keeps for its backward pass."""
    model, sizes = small(puzzle_emb_ndim=16, q_target="none", **fields), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (sizes.append(t.nbytes), t)[1], lambda t: t):
        model.step(random_batch())
    return len(sizes), sum(sizes)


def test_memory_of_the_one_step_gradient_does_not_grow_with_the_cycles():
    once = saved_tensors(H_cycles=1, L_cycles=1)
    assert saved_tensors(H_cycles=2, L_cycles=2) == once
    assert saved_tensors(H_cycles=3, L_cycles=5) == once
    assert saved_tensors(H_cycles=2, L_cycles=2, grad_updates=6)[1] > 2 * once[1]


def test_heads_and_grad_updates_that_cannot_be_are_refused_in_one_line():
    for fields in (dict(n_embd=10, n_head=4), dict(n_embd=6, n_head=2), dict(grad_updates=7), dict(grad_updates=0)):
        with pytest.raises(ValueError) as error:
            HRMConfig(**fields)
        assert str([*fields.values()][0]) in one_line(error)


def test_grid_positions_refuse_what_is_no_square():
    with pytest.raises(ValueError) as error:
        small(pos_encodings="grid", seq_len=15)
    assert "15" in one_line(error) and "rope" in one_line(error)


def test_without_boxes_heads_begin_with_the_four_neighbours():
    model = small(pos_encodings="grid", seq_len=9, n_embd=32, n_head=4)
    attention, relation = model.L_level.layers[0].self_attn, model.positions[-9:, -9:]
    middle = [(relation[4] == 4 + i).nonzero().flatten().tolist() for i in range(4)]
    assert middle == [[7], [3], [5], [1]], "below, left, right, above"
    assert (relation[0] == torch.tensor([3, 6, 1, 4, 0, 0, 2, 0, 0])).all(), "a corner has two"
    assert (attention.grid_bias.diagonal(4) == attention.grid_bias[0, 4]).all()


def test_grid_logits_move_with_rows_bands_columns_and_stacks():
    """A symmetry of the board permutes the logits; rope has no such symmetry."""
    cell = torch.arange(36).view(6, 6)
    order = cell[[3, 2, 5, 4, 0, 1]][:, [4, 3, 5, 1, 2, 0]].flatten()  # boxes of 2 rows and 3 columns stay together
    broken = cell[[0, 2, 1, 3, 4, 5]].flatten()  # rows of two bands exchanged: no symmetry
    fields = dict(seq_len=36, vocab_size=8, box_rows=2, box_cols=3, H_cycles=2, L_cycles=2)
    batch = random_batch(3, HRMConfig(seq_len=36, vocab_size=8))

    def difference(pos_encodings, order):
        model = small(pos_encodings=pos_encodings, **fields)
        with torch.no_grad():
            states = model.start_states(3)
            plain = model.answer(model.segment(*states, batch)[0])
            moved = model.answer(model.segment(*states, {**batch, "inputs": batch["inputs"][:, order]})[0])
        return (moved - plain[:, order]).abs().max()

    assert difference("grid", order) < 1e-4
    assert difference("grid", broken) > 1e-2
    assert difference("rope", order) > 1e-2


# ---- carry


def test_states_are_detached_between_segments():
    model = small(puzzle_emb_ndim=16)
    batch = random_batch()
    loss, _, first = model.step(batch)
    assert not first.z_H.requires_grad and not first.z_L.requires_grad
    loss.backward()
    again, _, second = model.step(batch, first)
    again.backward()  # would fail if it reached into the first segment's freed graph
    assert not second.z_H.requires_grad


def everything(carry, outputs):
    """All tensors (B, ...) of a carry and its outputs, by name."""
    tensors = {**vars(carry), **carry.data, **outputs}
    return {name: t for name, t in tensors.items() if isinstance(t, torch.Tensor)}


def test_rows_in_work_ignore_the_batch_and_their_neighbours():
    """Bit for bit: outputs, states and data of rows that go on, whatever the batch brings and the halted rows held."""
    model = small(puzzle_emb_ndim=21, q_target="bootstrap")
    old, halted = random_batch(6, seed=3), [True, False, True, False, False, True]
    goes_on = ~torch.tensor(halted)
    runs = []
    for seed in (4, 5):
        carry = random_carry(model, {k: v.clone() for k, v in old.items()}, [1, 2, 0, 1, 3, 2], halted)
        noise = torch.randn(carry.z_H.shape, generator=torch.Generator().manual_seed(seed))
        carry.z_H[~goes_on], carry.z_L[~goes_on] = noise[~goes_on], -noise[~goes_on]
        runs.append(model(carry, random_batch(6, seed=seed)))
    (first, first_out), (second, second_out) = runs
    for key, value in everything(first, first_out).items():
        assert torch.equal(everything(second, second_out)[key][goes_on], value[goes_on]), key
    for key, value in old.items():
        assert torch.equal(first.data[key][goes_on], value[goes_on]), key
    assert first.steps[goes_on].tolist() == [3, 2, 4] and first.halted[4]
    assert not torch.equal(first_out["logits"][~goes_on], second_out["logits"][~goes_on])


def test_halted_rows_start_afresh_on_the_batch():
    """Bit for bit what a new carry gives, in training and evaluation."""
    model = small(puzzle_emb_ndim=16)
    batch, halted = random_batch(6, seed=4), [True, False, True, False, False, True]
    new = torch.tensor(halted)
    for mode in (True, False):
        model.train(mode)
        carry, out = model(random_carry(model, random_batch(6, seed=3), [4, 2, 4, 1, 3, 4], halted), batch)
        fresh, fresh_out = model(model.initial_carry(batch), batch)
        for key, value in everything(fresh, fresh_out).items():
            assert torch.equal(everything(carry, out)[key][new], value[new]), key
        assert carry.steps.tolist() == [1, 3, 1, 2, 4, 1] and carry.steps.dtype == torch.int32


# ---- Q-learning (questions B5, B6 of the field)


def test_q_targets_are_what_the_next_segment_says(monkeypatch):
    """Row 0 is not at its last step, row 1 is; only the first of the two forward passes has a gradient."""
    model = small(q_target="bootstrap", halt_max_steps=4).train()
    batch = random_batch(2)
    batch["labels"] = torch.full((2, 16), 3)
    answers = batch["labels"].clone()
    answers[1, 7] = 2  # one wrong cell in row 1: its halt label is 0
    q = torch.tensor([[0.5, -1.0], [2.0, 1.0]], requires_grad=True)
    next_q = torch.tensor([[-0.7, 0.9], [-0.3, 4.0]], requires_grad=True)
    carry = random_carry(model, batch, [1, 3], [False, False])
    calls = script(monkeypatch, model, [q, next_q], [answers])
    _, outputs = model(carry, batch)
    assert calls == [True, False]
    target = outputs["target_q_continue"]
    torch.testing.assert_close(target, torch.tensor([0.9, -0.3]).sigmoid(), rtol=0, atol=1e-7)
    assert not target.requires_grad

    calls.clear()
    loss, metrics, _ = model.step(batch, carry)
    loss.backward()
    right, error = torch.tensor([1.0, 0.0]), q.detach().sigmoid()
    torch.testing.assert_close(q.grad, 0.5 / 2 * torch.stack([error[:, 0] - right, error[:, 1] - target], dim=1))
    assert next_q.grad is None
    bce = -(right * error[:, 0].log() + (1 - right) * (1 - error[:, 0]).log()).sum()
    torch.testing.assert_close(metrics["q_halt_loss"][0], bce)
    bce = -(target * error[:, 1].log() + (1 - target) * (1 - error[:, 1]).log()).sum()
    torch.testing.assert_close(metrics["q_continue_loss"][0], bce)
    cells = cell_loss(as_logits(answers, model.config), batch["labels"]).mean(dim=1).sum()
    q_losses = metrics["q_halt_loss"][0] + metrics["q_continue_loss"][0]
    torch.testing.assert_close(loss * 2, cells + 0.5 * q_losses.double())


def test_bootstrap_target_is_the_q_of_the_next_segment():
    """Without scripts: what evaluating the next segment gives."""
    model = small(puzzle_emb_ndim=16, q_target="bootstrap").train()
    batch = random_batch()
    carry, outputs = model(model.initial_carry(batch), batch)
    with torch.no_grad():
        q = model.segment(carry.z_H, carry.z_L, carry.data)[-1]
    torch.testing.assert_close(outputs["target_q_continue"], q.amax(dim=1).sigmoid(), rtol=0, atol=1e-6)


def test_q_target_none_runs_one_forward_and_has_no_continue_loss(monkeypatch):
    model = small(q_target="none").train()
    batch = random_batch(3)
    loss, metrics, carry = model.step(batch)
    loss.backward()
    assert "q_continue_loss" not in metrics
    assert model.q_head.weight.grad[0].abs().max() > 0 and not model.q_head.weight.grad[1].any()
    calls = script(monkeypatch, model, [torch.tensor([[0.1, 9.0], [0.0, -9.0], [-0.1, -9.0]])])
    carry, outputs = model(model.initial_carry(batch), batch)
    assert calls == [True] and "target_q_continue" not in outputs
    assert carry.halted.tolist() == [True, False, False]  # q_halt > 0, whatever q_continue is
    model.config.q_target = "bootstrap"
    carry, _ = model(model.initial_carry(batch), batch)
    assert carry.halted.tolist() == [False, True, True]  # q_halt > q_continue


def halting_steps(monkeypatch, B, M, prob):
    """Segments that B first puzzles run in training when every one wants to halt at once. (B,)"""
    model = small(n_embd=4, seq_len=1, q_target="none", halt_max_steps=M, halt_exploration_prob=prob).train()
    batch = random_batch(B, model.config)
    script(monkeypatch, model, [torch.tensor([[3.0, -3.0]]).expand(B, 2)])
    carry, ran = model.initial_carry(batch), torch.zeros(B, dtype=torch.int64)
    for _ in range(M):
        carry, _ = model(carry, batch)
        ran = torch.where((ran == 0) & carry.halted, carry.steps.long(), ran)
    return ran


def test_exploration_keeps_puzzles_for_a_minimum_uniform_from_2_to_the_limit(monkeypatch):
    ran = halting_steps(monkeypatch, B=6000, M=5, prob=1.0)
    assert ran.min() == 2 and ran.max() == 5
    share = torch.bincount(ran, minlength=6)[2:] / 6000
    torch.testing.assert_close(share, torch.full((4,), 0.25), rtol=0, atol=4 * (0.25 * 0.75 / 6000) ** 0.5)
    assert (halting_steps(monkeypatch, B=100, M=5, prob=0.0) == 1).all()
    assert (halting_steps(monkeypatch, B=100, M=1, prob=1.0) == 1).all()
    share = (halting_steps(monkeypatch, B=6000, M=5, prob=0.3) == 1).float().mean()
    assert abs(share - 0.7) < 4 * (0.7 * 0.3 / 6000) ** 0.5


def test_evaluation_never_halts_before_the_limit(monkeypatch):
    model = small(halt_max_steps=3, halt_exploration_prob=1.0).eval()
    batch = random_batch(2)
    script(monkeypatch, model, [torch.tensor([[9.0, -9.0], [-9.0, 9.0]])])
    carry = model.initial_carry(batch)
    for step in range(1, 7):
        carry, _ = model(carry, batch)
        assert carry.steps.tolist() == [(step - 1) % 3 + 1] * 2 and carry.halted.tolist() == [step % 3 == 0] * 2


def train_a_little(seed, steps=3):
    model = small(seed, puzzle_emb_ndim=16, halt_exploration_prob=0.5)
    optimizers = model.configure_optimizers(1e-2, 0.1, (0.9, 0.95))
    torch.manual_seed(seed)
    carry, losses = None, []
    for n in range(steps):
        loss, _, carry = model.step(random_batch(8, seed=n), carry)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses, carry, model.state_dict()


def test_seed_reproducibility():
    (losses, carry, state), (again, carry_2, state_2), (other, *_) = (train_a_little(seed) for seed in (0, 0, 1))
    assert losses == again and losses != other
    assert torch.equal(carry.halted, carry_2.halted) and torch.equal(carry.z_L, carry_2.z_L)
    assert all(torch.equal(state[k], state_2[k]) for k in state)


# ---- losses and metrics (questions B2, C6 of the field)


def test_loss_is_a_mean_in_a_puzzle_a_sum_over_puzzles_divided_by_the_batch():
    """By hand from the logits; one row has no label at all."""
    model = small(q_target="none", loss="softmax")
    batch = random_batch(3)
    batch["labels"][1] = IGNORE
    _, outputs = model(model.initial_carry(batch), batch)
    loss, metrics, _ = model.step(batch)
    logp, total = outputs["logits"].log_softmax(dim=-1), 0
    for row in (0, 2):
        cells = [-logp[row, t, label] for t, label in enumerate(batch["labels"][row].tolist()) if label != IGNORE]
        total += sum(cells) / len(cells)
    torch.testing.assert_close(metrics["lm_loss"][0], total, check_dtype=False)
    torch.testing.assert_close(loss, (total + 0.5 * metrics["q_halt_loss"][0]) / 3)


@pytest.mark.parametrize("kind", ["stablemax", "softmax"])
def test_parts_of_a_batch_add_up_to_the_whole(kind):
    """Two halves with 3 and many labels, one all-ignored row; and 8 rows as 6 and a short last batch of 2."""
    model = small(puzzle_emb_ndim=21, loss=kind)
    batch = random_batch(8)
    batch["labels"][:4, 3:] = IGNORE
    batch["labels"][5] = IGNORE
    whole, *_ = model.step(batch)
    want = gradients(model, whole)
    for cut in (4, 6):
        parts = [{k: v[rows] for k, v in batch.items()} for rows in (slice(None, cut), slice(cut, None))]
        loss = sum(model.step(part)[0] * len(part["inputs"]) / 8 for part in parts)
        torch.testing.assert_close(loss, whole, rtol=1e-6, atol=1e-6)
        for name, grad in gradients(model, loss).items():
            torch.testing.assert_close(grad, want[name], rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("kind", ["stablemax", "softmax"])
def test_a_batch_without_labels_costs_nothing_and_counts_nothing(kind):
    model = small(puzzle_emb_ndim=16, loss=kind, halt_max_steps=1)
    batch = random_batch()
    batch["labels"][:] = IGNORE
    loss, metrics, carry = model.step(batch)
    assert metrics["lm_loss"][0] == 0 and torch.isfinite(loss) and carry.halted.all()
    grads = gradients(model, loss)
    assert not grads["lm_head.weight"].any() and all(torch.isfinite(g).all() for g in grads.values())
    for name in ("exact_accuracy", "accuracy", "segments", "q_halt_accuracy", "puzzles"):
        assert metrics[name][0] == 0, name
    assert metrics["exact_accuracy"][1] == 0


def test_one_wrong_cell_costs_one_puzzle_and_one_cell(monkeypatch):
    """A 9x9 board with a wrong cell and a perfect one: exact 1/2, cells 161/162, in training and evaluation."""
    model = small(seq_len=81, vocab_size=11, halt_max_steps=2, q_target="none")
    labels = torch.randint(2, 11, (2, 81), generator=torch.Generator().manual_seed(0))
    answers = labels.clone()
    answers[0, 40] = labels[0, 40] % 9 + 2
    assert (answers != labels).sum() == 1
    batch = {"inputs": torch.ones_like(labels), "labels": labels}
    script(monkeypatch, model, [torch.tensor([[-1.0, 0.0], [1.0, 0.0]])], [answers])
    _, metrics, carry = model.step(batch)
    assert carry.halted.tolist() == [False, True]  # row 0 is not done: told of row 1 only
    assert metrics["exact_accuracy"] == (1, 1) and metrics["accuracy"] == (1, 1) and metrics["puzzles"] == (1, 1)
    carry = random_carry(model, batch, [1, 1], [False, False])
    _, metrics, _ = model.step(batch, carry)
    assert metrics["exact_accuracy"] == (1, 2) and metrics["segments"] == (4, 2)
    assert metrics["accuracy"][0] / metrics["accuracy"][1] == pytest.approx(161 / 162, abs=1e-7)
    assert metrics["q_halt_accuracy"] == (2, 2)
    scores = model.eval().evaluate([batch])[2]
    assert next(iter(scores)) == "exact_accuracy" and scores["exact_accuracy"].tolist() == [0, 1]
    assert scores["accuracy"].mean().item() == pytest.approx(161 / 162, abs=1e-7)
    labels[0, 40] = IGNORE  # the wrong cell is not scored any more
    scores = model.evaluate([batch])[2]
    assert scores["exact_accuracy"].tolist() == [1, 1] and scores["accuracy"].tolist() == [1, 1]


def hard_logits(dtype):
    special = [1.0, 0.0, -0.0, -1.0, 1e-30, -1e-30, 1e4, -1e4, 1e30, -1e30]
    rows = [[a, b, 0.5] for a in special for b in special]
    return torch.tensor(rows, dtype=dtype), torch.arange(len(rows)) % 3


def test_stablemax_equals_its_definition():
    g = torch.Generator().manual_seed(0)
    logits = torch.cat([10 * torch.randn(50, 7, generator=g, dtype=torch.float64), torch.zeros(1, 7), torch.ones(1, 7)])
    labels = torch.randint(0, 7, (52,), generator=g)
    for row, label, loss in zip(logits.tolist(), labels.tolist(), cell_loss(logits, labels).tolist()):
        s = [x + 1 if x >= 0 else 1 / (1 - x) for x in row]
        assert loss == pytest.approx(-math.log(s[label] / sum(s)), rel=1e-12)


@pytest.mark.parametrize("computed_in", ["float64", "float32"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_stablemax_gradients_are_finite_at_the_extremes(dtype, computed_in, monkeypatch):
    """Also when computed in float32, as on MPS, where the naive form gives NaN at a logit of exactly 1."""
    if computed_in == "float32":
        monkeypatch.setattr(torch.Tensor, "double", torch.Tensor.float)
    logits, labels = hard_logits(dtype)
    logits.requires_grad_()
    loss = cell_loss(logits, labels)
    loss.sum().backward()
    assert torch.isfinite(loss).all() and torch.isfinite(logits.grad).all()
    s = torch.where(logits.double() < 0, 1 / (1 - logits.double()), logits.double() + 1).detach()
    want = -(s / s.sum(dim=-1, keepdim=True)).gather(1, labels[:, None])[:, 0].log()
    torch.testing.assert_close(loss.double(), want.double(), rtol=1e-5, atol=1e-5)


def test_stablemax_gradient_equals_finite_differences():
    """gradcheck away from 0; at 0, where the two branches meet with the same slope, from either side."""
    logits = torch.tensor([[0.3, -0.4, 2.0, 1.0], [-3.0, 5.0, -0.1, 0.1]], dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([1, 3])
    assert torch.autograd.gradcheck(lambda x: cell_loss(x, labels), logits)
    for zero in (0.0, -0.0):
        x = torch.tensor([[zero, 0.7, -0.2]], dtype=torch.float64, requires_grad=True)
        for label in (0, 1):
            loss = cell_loss(x, torch.tensor([label]))
            (grad,) = torch.autograd.grad(loss.sum(), x)
            for h in (1e-6, -1e-6):
                moved = cell_loss(x.detach() + torch.tensor([h, 0, 0]), torch.tensor([label]))
                assert grad[0, 0].item() == pytest.approx(((moved - loss) / h).item(), abs=1e-5)


# ---- optimizers


def random_tensors(seed, shapes=((3, 4), (7,), (1,), (2, 3, 5), (40, 9))):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=g) for shape in shapes]


def adam_steps(params, optimizers, seeds):
    for seed in seeds:
        for p, grad in zip(params, random_tensors(100 + seed)):
            p.grad = grad
        for optimizer in optimizers:
            optimizer.step()


def parameters():
    return [torch.nn.Parameter(t) for t in random_tensors(0)]


@pytest.mark.parametrize("name", golden.find("adam_atan2"))
def test_adam_atan2_is_not_the_textbook_form(name):
    """The textbook corrects the first moment inside the arctangent."""
    want, h = golden.arrays(name), golden.settings(name)["hyperparameters"]
    p = torch.nn.Parameter(want["param_init"].clone())
    optimizer = AdamATan2([p], lr=h["lr"], betas=(h["beta1"], h["beta2"]), weight_decay=h["weight_decay"])
    p.grad = want["grads"][0]
    optimizer.step()
    assert (p - want["params"][0]).abs().max() < 1e-12
    assert (p - want["params_textbook_a1"][0]).abs().max() > 0.2 * h["lr"]


def test_adam_atan2_decays_what_has_no_gradient_and_steps_by_at_most_the_learning_rate():
    p = torch.nn.Parameter(torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64))
    optimizer, want = AdamATan2([p], lr=0.1, weight_decay=0.5), 1.0
    for scale in (1e-20, 1e20, 1.0):
        p.grad = torch.tensor([0.0, scale, -scale], dtype=torch.float64)
        before = p.detach().clone()
        optimizer.step()
        want *= 1 - 0.1 * 0.5
        assert p[0].item() == pytest.approx(want, rel=1e-14)
        step = p.detach() - before * (1 - 0.1 * 0.5)
        assert step[1] < 0 < step[2] and step.abs().max() < 0.1 * math.pi / 2 / (1 - 0.9)


def test_adam_atan2_goes_on_bit_for_bit_from_its_state_dict(tmp_path):
    straight = parameters()
    adam_steps(straight, [AdamATan2(straight, lr=0.01, weight_decay=0.1)], range(6))
    params = parameters()
    optimizer = AdamATan2(params, lr=0.01, weight_decay=0.1)
    adam_steps(params, [optimizer], range(3))
    torch.save({"optimizer": optimizer.state_dict(), "params": [p.data for p in params]}, tmp_path / "half.pt")
    saved = torch.load(tmp_path / "half.pt", weights_only=True)
    resumed = [torch.nn.Parameter(t) for t in saved["params"]]
    optimizer = AdamATan2(resumed, lr=1.0, weight_decay=0.0)
    optimizer.load_state_dict(saved["optimizer"])
    adam_steps(resumed, [optimizer], range(3, 6))
    assert all(torch.equal(a, b) for a, b in zip(straight, resumed))


def test_adam_atan2_treats_every_tensor_as_if_alone():
    together, alone = parameters(), parameters()
    adam_steps(together, [AdamATan2(together, lr=0.01, weight_decay=0.1)], range(4))
    adam_steps(alone, [AdamATan2([p], lr=0.01, weight_decay=0.1) for p in alone], range(4))
    assert all(torch.equal(a, b) for a, b in zip(together, alone))


def test_adam_atan2_leaves_parameters_without_gradient_alone():
    params = parameters()
    optimizer = AdamATan2(params, lr=0.01, weight_decay=0.1)
    optimizer.step()
    for p in params[1:]:
        p.grad = torch.ones_like(p)
    optimizer.step()
    before = random_tensors(0)
    assert torch.equal(params[0], before[0]) and not optimizer.state[params[0]]
    assert not any(torch.equal(p, b) for p, b in zip(params[1:], before[1:]))


def test_sign_sgd_sums_equal_ids_before_the_sign_and_touches_no_other_row():
    table = torch.nn.Parameter(random_tensors(0, [(6, 2)])[0])
    before = table.detach().clone()
    ids = torch.tensor([4, 1, 4, 1, 3])
    grads = torch.tensor([[2.0, -1.0], [0.5, 3.0], [-2.0, -5.0], [-0.75, 3.0], [1e-12, 0.0]])
    looked_up = torch.nn.functional.embedding(ids, table, sparse=True)
    (looked_up * grads).sum().backward()
    SignSGD([table], lr=0.1, weight_decay=0.5).step()
    signs = {1: [-1.0, 1.0], 3: [1.0, 0.0], 4: [0.0, -1.0]}  # 2 - 2 = 0: that element only decays
    for row, old in enumerate(before):
        want = old * (1 - 0.1 * 0.5) - 0.1 * torch.tensor(signs[row]) if row in signs else old
        assert torch.equal(table[row], want), row


def test_model_trains_its_puzzle_table_with_sign_sgd():
    model = small(puzzle_emb_ndim=16, num_puzzle_identifiers=5)
    adam, sign_sgd = model.configure_optimizers(1e-2, 0.1, (0.9, 0.95))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    batch = random_batch()
    batch["puzzle_identifiers"] = torch.tensor([1, 3, 1, 3])
    model.step(batch)[0].backward()
    assert len(model.puzzle_emb.weights.grad._values()) <= 4  # sparse: no dense gradient of a long table
    adam.step()
    sign_sgd.step()
    after = model.state_dict()
    assert {k for k in before if torch.equal(before[k], after[k])} == {"H_init", "L_init"}
    moved = (after["puzzle_emb.weights"] - before["puzzle_emb.weights"]).any(dim=1)
    assert moved.tolist() == [False, True, False, True, False]


# ---- initialisation and size


def test_lecun_initialisation_is_truncated_and_has_its_std_after_the_cut():
    torch.manual_seed(0)
    std = 1 / math.sqrt(700)
    weight = truncated_lecun_(torch.empty(700, 1000), std)
    assert weight.std().item() == pytest.approx(std, rel=0.005)
    assert weight.abs().max() <= 2 * std / 0.8796 and weight.abs().max() > 1.99 * std / 0.8797
    model = HRM(HRMConfig(n_embd=256, n_head=4, H_layers=1, L_layers=1, vocab_size=300, pos_encodings="learned"))
    for name, p in model.named_parameters():
        if p.ndim == 2 and name != "q_head.weight":
            assert p.std().item() == pytest.approx(p.shape[1] ** -0.5, rel=0.02), name
            assert p.abs().max() <= 2 * p.shape[1] ** -0.5 / 0.8796, name
    x = model.embed({"inputs": torch.arange(81)[None], "puzzle_identifiers": torch.zeros(1, dtype=torch.int64)})
    assert x[:, model.prefix_len :].std().item() == pytest.approx(1, rel=0.02)
    for start in (model.H_init, model.L_init):
        assert start.std().item() == pytest.approx(1, rel=0.15) and start.abs().max() <= 2 / 0.8796


def test_q_starts_at_minus_five_and_the_puzzle_table_at_zero():
    model = HRM(HRMConfig(n_embd=16, n_head=2, puzzle_emb_ndim=16, seq_len=16, num_puzzle_identifiers=3))
    assert not model.q_head.weight.any() and (model.q_head.bias == -5).all() and not model.puzzle_emb.weights.any()
    _, outputs = model(model.initial_carry(random_batch()), random_batch())
    assert (outputs["q_halt"] == -5).all() and (outputs["q_continue"] == -5).all()


def test_start_states_are_saved_but_never_trained():
    model = small(puzzle_emb_ndim=16)
    names = {name for name, _ in model.named_parameters()}
    assert {"H_init", "L_init"} <= set(model.state_dict()) and not {"H_init", "L_init"} & names
    assert "positions" not in model.state_dict() and "puzzle_emb.weights" not in names
    model.step(random_batch())[0].backward()
    assert model.H_init.grad is None and model.L_init.grad is None
    z_H, z_L = model.start_states(2)
    assert (z_H == model.H_init).all() and (z_L == model.L_init).all() and z_H.shape == (2, 17, 16)


def test_paper_preset_has_the_published_number_of_parameters():
    """On the meta device, where nothing is allocated."""
    with torch.device("meta"):
        model = HRM(PRESETS["paper"])
    assert sum(p.numel() for p in model.parameters()) == 27_275_266
    assert all(t.is_meta for t in [*model.parameters(), *model.buffers()])
    for config in PRESETS.values():
        with torch.device("meta"):
            HRM(config)


# ---- precision


def test_low_precision_segments_stay_close_to_float32_and_give_float32_gradients():
    """The no-gradient updates come first: weights that autocast cached there must not cut off the gradient."""
    for fields in (dict(puzzle_emb_ndim=16, q_target="bootstrap"), dict(pos_encodings="grid", box_rows=2, box_cols=2)):
        model = small(n_embd=32, **fields)
        batch = random_batch()
        loss, _, _ = model.step(batch)
        want = gradients(model, loss)
        for dtype, close in ((torch.bfloat16, 0.1), (torch.float16, 0.03)):
            with torch.autocast("cpu", dtype):
                low, _, carry = model.step(batch)
                again, _, carry_2 = model.step(batch, random_carry(model, batch, [1] * 4, [False] * 4))  # float32 carry
                assert model(carry, batch)[1]["q_halt"].dtype == torch.float32
            assert torch.isfinite(low) and torch.isfinite(again)
            assert carry.z_H.dtype == carry.z_L.dtype == carry_2.z_H.dtype == dtype
            assert low.item() == pytest.approx(loss.item(), rel=close)
            for name, grad in gradients(model, low).items():
                assert grad.dtype == torch.float32
                assert (grad - want[name]).norm() <= close * want[name].norm(), (name, dtype)
        loss, _, carry = model.step(batch, carry_2)  # and back
        assert carry.z_H.dtype == torch.float32 and torch.isfinite(loss)


# ---- solving


def test_solve_runs_any_number_of_segments_past_the_training_limit():
    """Depths 1 to 32 of a model that trains with 4, in one run or apart; the default is the limit."""
    model = small(puzzle_emb_ndim=16, halt_max_steps=4).eval()
    batch, depths = random_batch(), [1, 2, 4, 8, 16, 32]
    _, segments, answers, p_halt = model.solve(batch["inputs"], 32, trace=True)
    assert answers.shape == (32, 4, 16) and p_halt.shape == (32, 4) and segments.tolist() == [32] * 4
    assert ((p_halt > 0) & (p_halt < 1)).all()
    for depth in depths:
        answer, segments = model.solve(batch["inputs"], depth)
        assert torch.equal(answer, answers[depth - 1]) and segments.tolist() == [depth] * 4
        assert answer.dtype == segments.dtype == torch.int64
    assert torch.equal(model.solve(batch["inputs"])[0], answers[3])
    batch["puzzle_identifiers"][:] = 0  # what solve takes when no id is given
    scores = model.evaluate([batch, batch], depths)
    assert list(scores) == depths
    for depth, named in scores.items():
        right = (answers[depth - 1] == batch["labels"]).sum(dim=1) / (batch["labels"] != IGNORE).sum(dim=1)
        torch.testing.assert_close(named["accuracy"], torch.cat([right, right]))
        assert named["segments"].tolist() == [depth] * 8


def test_solve_goes_on_from_segment_to_segment_as_training_does():
    """Also with ids of the user's; without, id 0."""
    model = small(puzzle_emb_ndim=21, halt_max_steps=8).eval()
    batch = random_batch()
    answers, carry = [], model.initial_carry(batch)
    with torch.no_grad():
        for _ in range(3):
            carry, outputs = model(carry, batch)
            answers.append(outputs["logits"].argmax(dim=-1))
    traced = model.solve(batch["inputs"], 3, trace=True, puzzle_identifiers=batch["puzzle_identifiers"])[2]
    assert torch.equal(traced, torch.stack(answers))
    zeros = model.solve(batch["inputs"], 3, trace=True, puzzle_identifiers=torch.zeros(4, dtype=torch.int64))
    for a, b in zip(zeros, model.solve(batch["inputs"], 3, trace=True)):
        assert torch.equal(a, b)


def test_act_keeps_the_answer_that_a_row_stopped_with(monkeypatch):
    """Scripted: rows stop after segments 2, 1 and never; the answer of segment n is n everywhere."""
    model = small(q_target="none").eval()
    q_halt = torch.tensor([[-1.0, 1.0, -1.0], [1.0, -9.0, -1.0], [1.0, 9.0, -1.0], [-1.0, 9.0, 0.0]])
    qs = [torch.stack([q, torch.zeros(3)], dim=1) for q in q_halt]
    script(monkeypatch, model, qs, [torch.full((3, 16), n) for n in (1, 2, 3, 4)])
    answer, segments, answers, p_halt = model.solve(random_batch(3)["inputs"], 4, act_eval=True, trace=True)
    assert segments.tolist() == [2, 1, 4] and answer[:, 0].tolist() == [2, 1, 4]
    assert answers[:, :, 0].tolist() == [[1, 1, 1], [2, 1, 2], [2, 1, 3], [2, 1, 4]]
    assert torch.equal(answers[-1], answer) and (answer == answer[:, :1]).all() and len(p_halt) == 4


def test_act_solves_a_batch_as_it_solves_each_row():
    model = small(n_embd=32, q_target="bootstrap", H_cycles=1, L_cycles=1).eval()
    model.q_head.bias.data = torch.tensor([-0.5, 0.5])  # so that rows go on for a while
    inputs = random_batch(12)["inputs"]
    answer, segments = model.solve(inputs, 8, act_eval=True)
    assert len(segments.unique()) > 2, segments  # else this shows little
    for i in range(12):
        alone, n = model.solve(inputs[i : i + 1], 8, act_eval=True)
        assert torch.equal(alone[0], answer[i]) and n == segments[i]
    _, plain = model.solve(inputs, 8)
    assert plain.tolist() == [8] * 12


def test_solve_leaves_no_gradient_and_stops_when_all_rows_have(monkeypatch):
    model = small(q_target="none")
    calls = script(monkeypatch, model, [torch.tensor([[1.0, 0.0]] * 4)])
    answer, segments = model.solve(random_batch()["inputs"], 8, act_eval=True)
    assert calls == [False] and segments.tolist() == [1] * 4


@pytest.mark.parametrize("shape", [(81,), (2, 15), (2, 4, 4)])
def test_inputs_of_the_wrong_shape_are_refused_in_one_line(shape):
    model = small()
    inputs = torch.zeros(shape, dtype=torch.int64)
    for call in (model.solve, lambda x: model.step({"inputs": x, "labels": x})):
        with pytest.raises(ValueError) as error:
            call(inputs)
        assert str(tuple(shape)) in one_line(error) and "16" in one_line(error)


# ---- checkpoints (question E4 of the field)


def published(model, prefix="_orig_mod.model.inner."):
    """The state dict of a model, spelt as the official code saves it when compiled."""
    official = {f"{name}.weight": f"{name}.embedding_weight" for name in ("embed_tokens", "embed_pos")}
    return {prefix + official.get(k, k): v.detach().clone() for k, v in model.state_dict().items()}


@pytest.mark.parametrize("fields", [dict(pos_encodings="rope", n_embd=128, seq_len=900),
                                    dict(pos_encodings="rope", n_embd=64, seq_len=81, vocab_size=11),
                                    dict(pos_encodings="learned", n_embd=64),
                                    dict(pos_encodings="learned", n_embd=64, puzzle_emb_ndim=0, seq_len=25)])
def test_published_files_are_read_without_settings(fields, tmp_path):
    """Sizes come from the shapes. Saved compiled, loaded plain; the answers are the same."""
    model = small(**{**dict(puzzle_emb_ndim=100, H_layers=2, n_head=fields["n_embd"] // 64), **fields}).eval()
    torch.save(published(model), tmp_path / "step_100")
    config = HRM.pretrained_config(tmp_path / "step_100")
    names = ["vocab_size", "seq_len", "n_embd", "n_head", "H_layers", "L_layers", "pos_encodings", "puzzle_emb_ndim"]
    for name in names + ["num_puzzle_identifiers"] * (model.prefix_len > 0):
        assert config[name] == getattr(model.config, name), name
    loaded = HRM.load_pretrained(tmp_path / "step_100").eval()
    batch = random_batch(2, model.config)
    for a, b in zip(model.solve(batch["inputs"], 2, trace=True), loaded.solve(batch["inputs"], 2, trace=True)):
        assert torch.equal(a, b)


def test_another_number_of_puzzle_ids_is_one_line_with_both_numbers(tmp_path):
    torch.save(published(small(puzzle_emb_ndim=16, num_puzzle_identifiers=1045)), tmp_path / "arc.pt")
    with pytest.raises(ValueError) as error:
        HRM.load_pretrained(tmp_path / "arc.pt", num_puzzle_identifiers=1921, n_head=2, seq_len=16)
    assert "1045" in one_line(error) and "1921" in one_line(error) and "puzzle_emb" in one_line(error)


def test_other_settings_than_the_file_has_are_one_line(tmp_path):
    torch.save(published(small(pos_encodings="learned")), tmp_path / "a.pt")
    others = dict(H_layers=2, pos_encodings="rope", seq_len=25, puzzle_emb_ndim=16, expansion=30).items()
    for name, value in others:
        with pytest.raises(ValueError) as error:
            HRM.load_pretrained(tmp_path / "a.pt", n_head=2, **{name: value})
        assert "a.pt" in one_line(error)


JUNK = {
    "empty": b"",
    "text": b"hello, this is no checkpoint\n",
    "json": b'{"a": 1}',
    "published puzzles": b"source,question,answer,rating\n",
    "broken zip": b"PK\x03\x04" + b"\0" * 60,
    "pickle that would run code": pickle.dumps(os.system, protocol=2),
    "noise": bytes(range(256)),
}


@pytest.mark.parametrize("content", JUNK.values(), ids=JUNK)
def test_unreadable_files_are_one_line(content, tmp_path):
    (tmp_path / "file.pt").write_bytes(content)
    with pytest.raises(ValueError) as error:
        HRM.load_pretrained(tmp_path / "file.pt")
    assert "file.pt" in one_line(error)


def test_missing_and_foreign_files_are_one_line(tmp_path):
    with pytest.raises(ValueError) as error:
        HRM.load_pretrained(tmp_path / "nowhere.pt")
    assert "nowhere.pt" in one_line(error)
    with pytest.raises(ValueError) as error:
        HRM.load_pretrained(tmp_path)  # a folder
    one_line(error)
    state = published(small())
    runs = [{"model_config": {"n_layer": 3}, "model": state}, {"model_config": {"n_embd": 16}, "model": {}}]
    for value in [{"weight": torch.zeros(2)}, [1, 2], torch.zeros(3), {}, {1: 2}, {k: 0 for k in state}, *runs]:
        torch.save(value, tmp_path / "foreign.pt")
        with pytest.raises(ValueError) as error:
            HRM.load_pretrained(tmp_path / "foreign.pt")
        assert "foreign.pt" in one_line(error), value
    torch.save(published(small()), tmp_path / "whole.pt")
    (tmp_path / "half.pt").write_bytes((tmp_path / "whole.pt").read_bytes()[:5000])
    with pytest.raises(ValueError) as error:
        HRM.load_pretrained(tmp_path / "half.pt")
    one_line(error)


# ---- learning


def learn(model, batch_of, steps, lr, weight_decay):
    """Train on the batches batch_of(0), batch_of(1), ...; the rate rises for 20 steps and falls in the last quarter."""
    optimizers = model.train().configure_optimizers(lr, weight_decay, (0.9, 0.95))
    carry, losses = None, []
    for n in range(steps):
        optimizers[0].param_groups[0]["lr"] = lr * min(1, (n + 1) / 20, 4 * (1 - n / steps))
        loss, _, carry = model.step({k: torch.as_tensor(v) for k, v in batch_of(n).items()}, carry)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_a_tiny_model_learns_4x4_sudoku_and_thinking_longer_helps(tmp_path):
    """Most test boards are right after 8 segments, far fewer after one; q_halt tells right answers from wrong ones."""
    board = sudoku.SudokuConfig(box="2x2", clues=6, num_train=200, num_val=0, num_test=120, data_dir=str(tmp_path))
    data = sudoku.load(board)
    torch.manual_seed(0)
    model = HRM(dataclasses.replace(PRESETS["nano"], **data.model_args, n_embd=64, halt_max_steps=8))
    losses = learn(model, lambda n: data.train_batch(n, 64, 0), steps=250, lr=2e-3, weight_decay=0.1)
    assert sum(losses[-20:]) < 0.5 * sum(losses[:20])
    (batch,) = ({k: torch.as_tensor(v) for k, v in b.items()} for b in data.eval_batches("test", 120))
    scores = model.eval().evaluate([batch], [1, 8, 16])
    exact = {depth: named["exact_accuracy"].mean().item() for depth, named in scores.items()}
    assert exact[8] > 0.8 and exact[8] > exact[1] + 0.25 and exact[16] > 0.8, exact
    _, _, answers, p_halt = model.solve(batch["inputs"], 8, trace=True)
    right = (answers == batch["labels"]).all(dim=2)  # (S, B)
    confidence = p_halt[right].mean().item(), p_halt[~right].mean().item()
    assert confidence[0] > 0.6 and confidence[0] > confidence[1] + 0.1, confidence
    answer, segments = model.solve(batch["inputs"], 8, act_eval=True)
    assert (answer == batch["labels"]).all(dim=1).float().mean() > exact[1] + 0.1
    assert 1 < segments.float().mean() < 8


def test_the_papers_settings_overfit_one_batch_exactly():
    """Stablemax, bootstrap, one-step gradient, 2 x 2 cycles, rope, prefix. Each row halts by itself, and is right."""
    tiny = dict(vocab_size=6, seq_len=16, n_embd=64, n_head=2, H_layers=1, L_layers=1, expansion=2, puzzle_emb_ndim=64)
    torch.manual_seed(0)
    model = HRM(dataclasses.replace(PRESETS["paper"], **tiny, halt_max_steps=4))
    batch = random_batch(8, model.config)
    losses = learn(model, lambda n: batch, steps=300, lr=1e-3, weight_decay=1.0)
    assert losses[-1] < 0.5
    answer, segments, _, p_halt = model.eval().solve(batch["inputs"], act_eval=True, trace=True)
    assert torch.equal(answer == batch["labels"], batch["labels"] != IGNORE)
    assert segments.max() < 4 and (p_halt[segments - 1, torch.arange(8)] > 0.5).all()
