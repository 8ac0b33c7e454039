"""HRM against the reference numbers, against slow loops written from the paper, and as a learner.

    python -m pytest tests/test_hrm.py -q
"""

import pytest
import torch

import golden
from hrm import HRM, PRESETS, AdamATan2, Carry, HRMConfig, SignSGD, cell_loss, _plain_name

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
    return [(name, key.removesuffix(".loss_total")) for name, want in sets for key in want or () if key.endswith(".loss_total")]


@pytest.mark.parametrize("name,case", golden_cases())
def test_training_segment_matches_the_reference(name, case, tmp_path):
    """Logits, q values, the bootstrap target, each loss term and metric, the new carry, the gradients, the puzzle embedding."""
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
    for theirs, ours in {"steps": "segments"}.items() | {k: k for k in metrics if k not in ("loss", "segments", "puzzles")}.items():
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
