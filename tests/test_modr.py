"""MoDr against slow versions of its equations, against the Huginn it goes on, and against its claims.

    python -m pytest tests/test_modr.py -q
"""

import dataclasses
import os
import math

import pytest
import torch
import torch.distributed as dist
from torch.optim.swa_utils import AveragedModel

from huginn import IGNORE, Huginn, HuginnConfig
from modr import PRESETS, BranchedLinear, MoDr, MoDrConfig, weights_hash

TINY = HuginnConfig(vocab_size=50, block_size=64, n_embd=32, n_head=2, intermediate_size=48, n_layers_in_prelude=1,
                    n_layers_in_recurrent_block=2, n_layers_in_coda=1, mean_recurrence=4, mean_backprop_depth=2)


def stir(model, seed=0):
    """A small change of every trained weight: B is no longer 0 and branches differ."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += torch.randn(parameter.shape, generator=generator) * (0.3 if parameter.ndim == 1 else 0.1)
    return model


def base(seed=0, **fields):
    torch.manual_seed(seed)
    return stir(Huginn(dataclasses.replace(TINY, **fields)).eval(), seed)


def tiny(seed=0, stirred=True, **fields):
    """A small MoDr whose branches differ, and the Huginn that it goes on."""
    model = base(seed)
    torch.manual_seed(seed + 1)
    ours = dict(num_branches=3, lora_rank=4, lora_alpha=8.0, route_pool="forward", gate="preserve") | fields
    ours = MoDr(MoDrConfig(**vars(TINY) | ours), model).eval()
    return (stir(ours, seed + 1) if stirred else ours), model


def tokens_like(*shape, seed=0):
    return torch.randint(50, shape, generator=torch.Generator().manual_seed(seed))


def batch_like(B=4, T=12, seed=0):
    tokens = tokens_like(B, T, seed=seed)
    labels = tokens.roll(-1, 1)
    labels[:, :3] = IGNORE
    labels[0, 7:] = IGNORE  # the first row is shorter
    return {"inputs": tokens, "labels": labels}


def state_like(B, T, seed=0):
    return torch.randn(B, T, TINY.n_embd, generator=torch.Generator().manual_seed(seed))


# ---- the equations


def slow_forward(model, tokens, s, num_steps, pooled_over):
    """Logits (T, V) of one text, token by token through plain matrices; pooled_over: t -> the tokens of its mean."""
    c, T = model.config, tokens.shape[1]
    rotary = model.rotary(torch.arange(T))
    e = model.read(tokens, rotary)
    h = model.adapter(torch.cat([s, e], dim=-1))[0]  # (T, C)
    branches, gates = [], []
    for t in range(T):
        u = torch.stack([model.router.weight @ h[i] for i in pooled_over(t)]).mean(dim=0)
        r = 1 / (1 + torch.exp(-u))
        branches.append(int((r + model.router_bias).argmax()))
        gates.append(r[branches[-1]].item())

    def project(linear, x):  # (T, in) -> (T, out), each token with its own branch's merged matrix
        updated = [linear.weight + c.lora_alpha / c.lora_rank * linear.lora_B[j] @ linear.lora_A[j] for j in branches]
        return torch.stack([W @ row for W, row in zip(updated, x)])

    def attend(attn, x):
        nh = c.n_head
        q, k, v = project(attn.Wqkv, x).view(T, 3, nh, -1).unbind(1)  # (T, nh, hd) each
        q, k = q + attn.qk_bias[0, 0], k + attn.qk_bias[1, 0]
        out = torch.zeros(T, nh, c.n_embd // nh)
        for head in range(nh):
            turned = []
            for x in (q[:, head], k[:, head]):
                pairs = torch.view_as_complex(x.reshape(T, -1, 2).contiguous()) * rotary
                turned.append(torch.view_as_real(pairs).flatten(1))
            for t in range(T):
                scores = (turned[1][: t + 1] @ turned[0][t]) / math.sqrt(c.n_embd // nh)
                out[t, head] = scores.softmax(0) @ v[: t + 1, head]
        return project(attn.proj, out.flatten(1))

    for _ in range(num_steps):
        x = model.adapter(torch.cat([s, e], dim=-1))[0]
        for layer, block in enumerate(model.core_block):
            x = block.norm_2(x + attend(block.attn, block.norm_1(x)))
            x = block.norm_4(x + block.mlp(block.norm_3(x)))
            if c.gate == "layer" or c.gate == "block" and layer == len(model.core_block) - 1:
                x = x * torch.tensor(gates)[:, None]
        s = x[None]
    return model.head(model.speak(s, rotary))[0], branches


@pytest.mark.parametrize("gate", ["preserve", "block", "layer", "off"])
@pytest.mark.parametrize("pool", ["forward", "context"])
def test_forward_equals_a_slow_loop_over_the_equations(pool, gate):
    model, _ = tiny(route_pool=pool, gate=gate)
    model.router_bias += torch.tensor([0.02, -0.01, 0.0])
    tokens, s = tokens_like(3, 9), state_like(3, 9)
    with torch.no_grad():
        logits, _ = model(tokens, num_steps=3, state=s)
        every = []
        for row in range(3):
            over = (lambda t: range(9)) if pool == "forward" else (lambda t: range(t + 1))
            want, branches = slow_forward(model, tokens[row:row + 1], s[row:row + 1], 3, over)
            torch.testing.assert_close(logits[row], want, atol=2e-5, rtol=1e-5)
            every += branches
    assert len(set(every)) > 1, "else this test sees one branch alone"


def test_the_bias_chooses_but_has_no_part_in_the_gate():
    model, _ = tiny(gate="block")
    s, e = state_like(2, 6), state_like(2, 6, seed=1)
    before = model.route(s, e)
    model.router_bias[:] = torch.tensor([0.0, 9.0, 0.0])
    after = model.route(s, e)
    assert (after.branch == 1).all() and ((0 < after.gate) & (after.gate < 1)).all()
    model.router_bias.zero_()
    assert torch.equal(model.route(s, e).gate, before.gate)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fields", [{}, {"gate": "off"}, {"num_branches": 1}, {"route_pool": "context"}])
def test_new_branches_reproduce_the_base_to_the_last_bit(fields, dtype):
    model, frozen = tiny(stirred=False, **fields)
    tokens, s = tokens_like(3, 11), state_like(3, 11)
    with torch.no_grad(), torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        assert torch.equal(model(tokens, num_steps=4, state=s)[0], frozen(tokens, num_steps=4, state=s)[0])
        assert model.generate(tokens, 8) == frozen.generate(tokens, 8)


def test_routing_base_is_the_base_whatever_was_trained():
    model, frozen = tiny(routing="base")
    tokens, s = tokens_like(2, 7), state_like(2, 7)
    assert torch.equal(model(tokens, num_steps=4, state=s)[0], frozen(tokens, num_steps=4, state=s)[0])


# ---- what is trained


def test_the_backbone_gets_no_gradient_no_optimizer_state_and_no_decay():
    model, frozen = tiny(stirred=False)
    before = {name: tensor.clone() for name, tensor in frozen.state_dict().items()}
    (optimizer,) = model.train().configure_optimizers(1e-2, 0.5, (0.9, 0.95))
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for seed in range(3):
        loss, metrics, _ = model.step(batch_like(seed=seed))
        loss.backward()
        optimizer.step()
        model.finish_step(metrics)
    for name, parameter in model.named_parameters():
        is_new = "lora_" in name or name == "router.weight"
        assert parameter.requires_grad == is_new == (id(parameter) in held) == (parameter.grad is not None), name
        if not is_new:
            assert torch.equal(parameter, before[name]), name
    moved = dict(model.named_parameters())
    assert moved["core_block.0.attn.proj.lora_B"].abs().sum() > 0


@pytest.mark.parametrize("gate", ["preserve", "block", "layer"])
def test_the_router_learns_and_branches_without_texts_get_zeros(gate):
    model, _ = tiny(gate=gate)
    model.train()
    model.router_bias[:] = torch.tensor([0.0, 9.0, 0.0])
    model.step(batch_like())[0].backward()
    assert model.router.weight.grad[1].abs().sum() > 0
    for linear in model.branched():
        assert linear.lora_A.grad[1].abs().sum() > 0 and not linear.lora_A.grad[[0, 2]].any(), "zero, not None"
        assert linear.lora_B.grad[1].abs().sum() > 0 and not linear.lora_B.grad[[0, 2]].any()


@pytest.mark.parametrize("pool", ["forward", "context"])
def test_a_gate_that_is_0_in_float32_gives_no_nan(pool):
    model, _ = tiny(route_pool=pool)
    with torch.no_grad():
        model.router.weight.copy_(-1e4 * model.adapter(torch.cat([state_like(1, 1)] * 2, dim=-1))[0])  # u = -1e4 |h|^2
    tokens = tokens_like(1, 1)
    state = state_like(1, 1)
    route = model.route(state, state)
    assert route.gate.item() == 1 and model.ratings(state, state).exp().max() == 0
    model(tokens, tokens, state=state)[1].backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_sizes_are_those_of_the_docstring():
    with torch.device("meta"):
        counts = {name: [sum(p.numel() for p in MoDr(config).parameters() if p.requires_grad or every)
                         for every in (False, True)] for name, config in PRESETS.items()}
        three = sum(p.numel() for p in MoDr(dataclasses.replace(PRESETS["paper"], num_branches=3)).parameters()
                    if p.requires_grad)
    assert counts["nano"] == [49_664, 756_736] and counts["paper"] == [8_131_200, 3_564_976_800 + 8_131_200]
    assert counts["paper"][0] / counts["paper"][1] == pytest.approx(0.00228, abs=5e-6), "above the published 0.2 %"
    assert three / (three + 3_564_976_800) == pytest.approx(0.00171, abs=5e-6), "three branches are below"


def test_flops_are_counted_as_the_profiler_does():
    from torch.utils.flop_counter import FlopCounterMode

    def forward(x, W, A, *_, **__):
        return 2 * x[0] * W[0] * W[1] + 2 * x[0] * A[0] * A[1] * (W[0] + W[1])

    def backward(dy, x, A, *_, **__):
        return 4 * x[0] * A[0] * A[1] * (dy[1] + x[1])

    formulas = {torch.ops.kernels.lora_linear: forward, torch.ops.kernels.lora_grads: backward}
    model, _ = tiny(num_branches=1, random_recurrence=False)
    batch = batch_like(2, 16)
    batch["labels"] = batch["inputs"]
    model.train()
    with FlopCounterMode(display=False, custom_mapping=formulas) as counter:
        loss, metrics, _ = model.step(batch)
        loss.backward()
    assert metrics["flops"][0] == pytest.approx(counter.get_total_flops(), rel=0.1)


# ---- the future, and padding


def earlier_logits_change(model, evaluate=False):
    tokens, s = tokens_like(2, 14), state_like(2, 14)
    other = tokens.clone()
    other[:, -3:] = (other[:, -3:] + 7) % 50
    with torch.no_grad():
        first, second = (model(t, num_steps=3, state=s)[0][:, :-3] for t in (tokens, other))
    return (first - second).abs().max().item()


def test_forward_pooling_leaks_the_future_and_context_does_not():
    assert earlier_logits_change(tiny(route_pool="forward", gate="block")[0]) > 1e-3
    assert earlier_logits_change(tiny(route_pool="context", gate="block")[0]) < 1e-6
    changes = []
    for seed in range(6):  # with the gate's value divided out the leak is the choice of the branch
        model = tiny(seed, route_pool="forward")[0]
        changes.append(earlier_logits_change(model))
        assert earlier_logits_change(tiny(seed, route_pool="context")[0]) < 1e-6
    assert max(changes) > 1e-3


@pytest.mark.parametrize("gate", ["preserve", "block"])
def test_losses_in_evaluation_are_causal_with_both_kinds_of_pooling(gate):
    """The loss of the first labels is the same whatever follows them."""
    tokens = tokens_like(1, 14)
    losses = []
    for seed in range(4):
        model = tiny(route_pool="forward", gate=gate)[0]
        inputs, labels = tokens.clone(), torch.full_like(tokens, IGNORE)
        inputs[:, 6:] = tokens_like(1, 8, seed=seed)
        labels[:, 2:6] = tokens[:, 3:7]
        losses.append(model.evaluate([{"inputs": inputs, "labels": labels}], [3])[3]["loss"].item())
    assert max(losses) - min(losses) < 1e-6


def test_padding_has_no_part_in_a_choice():
    model, _ = tiny(gate="block")
    s, e = state_like(1, 10), state_like(1, 10, seed=1)
    is_token = torch.arange(10)[None] < 6
    short, padded = model.route(s[:, :6], e[:, :6]), model.route(s, e, is_token=is_token)
    torch.testing.assert_close(short.gate, padded.gate)
    model.train()
    model.config.route_pool = "context"
    model.route(s, e, is_token=is_token)
    assert model.counts.sum() == 6, "nor in the counts"


# ---- decoding


@pytest.mark.parametrize("fields", [{}, {"gate": "block"}, {"gate": "layer"}])
def test_decoding_with_context_equals_the_full_forward(fields):
    model, _ = tiny(route_pool="context", **fields)
    tokens, s = tokens_like(2, 12), state_like(2, 12)
    with torch.no_grad():
        full, _ = model(tokens, num_steps=4, state=s)
        cache = model.new_cache(2, 12, 4)
        parts = [model(tokens[:, a:b], num_steps=4, state=s[:, a:b], cache=cache)[0]
                 for a, b in ((0, 5), (5, 6), (6, 7), (7, 12))]
    torch.testing.assert_close(torch.cat(parts, dim=1), full, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("pool", ["forward", "context"])
@pytest.mark.parametrize("options", [{}, {"exit": "kl"}, {"cache_budget": 2}, {"warm_start": True}])
def test_a_row_does_not_depend_on_what_else_is_in_the_batch(pool, options):
    model, _ = tiny(route_pool=pool, gate="block")
    prompts = [tokens_like(n, seed=n).tolist() for n in (3, 9, 6)]
    together = model.generate(prompts, 8, num_steps=4, **options)
    assert together == [model.generate([prompt], 8, num_steps=4, **options)[0] for prompt in prompts]


@pytest.mark.parametrize("pool", ["forward", "context"])
def test_every_new_token_is_routed_anew(pool, monkeypatch):
    model, _ = tiny(route_pool=pool)
    seen, route = [], model.route
    monkeypatch.setattr(model, "route", lambda *args, **more: seen.append(route(*args, **more)) or seen[-1])
    model.generate([[1, 2, 3, 4]], 6, num_steps=5)
    assert len(seen) == 6, "once for the prompt and once for each token that is read, not at every step"
    assert [tuple(r.branch.shape) for r in seen[1:]] == [(1, 1)] * 5
    assert seen[0].branch.shape == (1, 1 if pool == "forward" else 4)


def test_routing_reads_the_state_that_the_loop_starts_from(monkeypatch):
    model, _ = tiny()
    read, steps, route, think = [], [], model.route, model.think
    monkeypatch.setattr(model, "route", lambda s, *a, **k: read.append(s) or route(s, *a, **k))
    monkeypatch.setattr(model, "think", lambda s, *a, **k: steps.append(s) or think(s, *a, **k))
    model.generate([[1, 2, 3]], 3, num_steps=2, warm_start=True)
    assert len(read) == 3 and len(steps) == 6
    assert all(torch.equal(s, t) for s, t in zip(read, steps[::2])), "with warm_start that is the last token's thought"


# ---- balance


def test_recomputation_uses_the_choice_that_was_made(monkeypatch):
    grads, calls = [], []
    for fields in ({}, dict(checkpoint_core=True), dict(checkpoint_core=True, selective_checkpoint=True)):
        model, _ = tiny(**fields, routing="random", random_recurrence=False)
        route = model.route
        monkeypatch.setattr(model, "route", lambda *a, route=route, **k: calls.append(1) or route(*a, **k))
        torch.manual_seed(3)
        loss, metrics, _ = model.train().step(batch_like())
        loss.backward()
        grads.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
        grads[-1]["counts"] = model.counts
        model.finish_step(metrics)
        grads[-1]["bias"] = model.router_bias
    assert len(calls) == 3
    for other in grads[1:]:
        for name in grads[0]:
            torch.testing.assert_close(grads[0][name], other[name], atol=1e-7, rtol=1e-6)


def test_the_bias_moves_once_per_optimizer_step_by_the_summed_counts():
    model, _ = tiny(balance_rate=0.001)
    model.train()
    summed = {}
    for seed in range(4):  # micro-batches
        for name, (total, count) in model.step(batch_like(seed=seed))[1].items():
            old = summed.get(name, (0, 0))
            summed[name] = old[0] + total, old[1] + count
    assert not model.router_bias.any()
    c = torch.tensor([float(summed[f"branch_{j}"][0]) for j in range(3)])
    assert c.sum() == 16 == summed["branch_0"][1]
    entropy, _ = model.finish_step(summed)["balance_entropy"]
    torch.testing.assert_close(model.router_bias, 0.001 * torch.sign(c.mean() - c))
    share = c / c.sum()
    assert entropy.item() == pytest.approx(-sum(s * math.log(s) for s in share.tolist() if s), abs=1e-6)


def test_the_bias_stays_in_evaluation_and_at_rate_0():
    model, _ = tiny()
    model.evaluate([batch_like()], [2])
    model(tokens_like(2, 5))
    assert not model.router_bias.any() and model.counts is None
    model.config.balance_rate = 0.0
    model.finish_step(model.train().step(batch_like())[1])
    assert not model.router_bias.any()


def test_the_bias_stays_float32_in_a_bfloat16_model():
    model, _ = tiny(num_branches=2)
    model.router_bias += 0.5
    model.to(torch.bfloat16)
    assert model.router.weight.dtype == torch.bfloat16 and model.router_bias.dtype == torch.float32
    for _ in range(100):
        model.finish_step({"branch_0": (torch.tensor(0), 1), "branch_1": (torch.tensor(4), 1)})
    torch.testing.assert_close(model.router_bias, torch.tensor([0.6, 0.4]))


def test_balancing_spreads_the_texts_over_the_branches():
    """A router that sends all to one branch: without balancing it stays so, with it each gets its share."""
    entropy = {}
    for rate in (0.0, 0.02):
        model, _ = tiny(seed=1, num_branches=4, balance_rate=rate)
        model.train()
        model.router_bias[0] = 1.0
        values = [model.finish_step(model.step(batch_like(16, 8, seed=seed))[1])["balance_entropy"][0].item()
                  for seed in range(60)]
        entropy[rate] = sum(values[-10:]) / 10
        assert values[0] == 0
    assert entropy[0.0] == 0 and entropy[0.02] > 0.7 * math.log(4), entropy


def train_on_ranks(rank, path, results):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    torch.set_num_threads(1)
    model, _ = tiny(random_recurrence=False, branch=2 * rank)  # every rank takes its own branch
    model.train()
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    (optimizer,) = model.configure_optimizers(1e-2, 0.0, (0.9, 0.95))
    for step in range(3):
        torch.manual_seed(step)
        batch = batch_like(seed=2 * step + rank)
        ddp(batch["inputs"], batch["labels"])[1].backward()
        optimizer.step()
        optimizer.zero_grad()
        model.finish_step({f"branch_{j}": (count, model.counts.sum()) for j, count in enumerate(model.counts)})
    torch.save(model.state_dict(), f"{results}{rank}")
    dist.destroy_process_group()


def test_ranks_with_different_branches_stay_equal_and_sum_their_counts(tmp_path):
    torch.multiprocessing.spawn(train_on_ranks, args=(tmp_path / "meet", str(tmp_path / "rank")), nprocs=2)
    a, b = (torch.load(f"{tmp_path / 'rank'}{rank}", weights_only=True) for rank in (0, 1))
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert a["router_bias"].tolist() == pytest.approx([-0.003, 0.003, -0.003]), "in every step two branches got 4 each"


def test_random_and_forced_routing():
    model, _ = tiny(num_branches=4, routing="random")
    branch = model.route(state_like(400, 2), state_like(400, 2, seed=1)).branch
    assert branch.unique(return_counts=True)[1].min() > 60
    model.config.branch = 2
    assert (model.route(state_like(5, 2), state_like(5, 2)).branch == 2).all()
    with torch.no_grad():
        titles = {title: model.route(state_like(5, 2), state_like(5, 2)).branch for title in model.variants()}
    assert list(titles) == ["base", "random", "branch 0", "branch 1", "branch 2", "branch 3"]
    assert titles["base"] is None and (titles["branch 3"] == 3).all() and model.config.branch == 2
    model.config.routing = "base"
    assert (dict((title, model.route(state_like(5, 2), state_like(5, 2)).branch) for title in model.variants())
            ["branch 3"] == 3).all()


def test_evaluation_tells_which_branches_read_a_row():
    model, _ = tiny(num_branches=3)
    batch = batch_like(4, 12)
    batch["prompt_lengths"] = torch.full((4,), 4)
    scores = model.evaluate([batch], [2], lambda labels, answers: torch.zeros(len(answers)))[2]
    shares = torch.stack([scores[f"branch_{j}"] for j in range(3)])
    torch.testing.assert_close(shares.sum(dim=0), torch.ones(4))
    assert list(scores)[0] == "exact_accuracy" and "loss" in scores
    for j in range(3):
        model.config.branch = j
        assert model.evaluate([batch], [2], lambda labels, answers: torch.zeros(4))[2][f"branch_{j}"].min() == 1


# ---- checkpoints


def save_run(model, path, **more):
    torch.save({"model_config": dataclasses.asdict(model.config), "model": model.state_dict()} | more, path)
    return str(path)


def saved_pair(tmp_path, **fields):
    frozen = base()
    path = save_run(frozen, tmp_path / "base.pt")
    torch.manual_seed(5)
    model = stir(MoDr.load_pretrained(path, num_branches=3, lora_rank=4, **fields), 5)
    model.router_bias += torch.tensor([0.1, 0.2, 0.3])
    return model, frozen, path, save_run(model, tmp_path / "modr.pt")


def test_a_checkpoint_holds_what_was_trained_and_finds_its_base(tmp_path):
    model, frozen, path, saved = saved_pair(tmp_path)
    state = torch.load(saved, weights_only=True)["model"]
    assert {name.split(".")[-1] if "lora" in name else name for name in state} == {"lora_A", "lora_B", "router.weight",
                                                                                   "router_bias"}
    assert os.path.getsize(saved) < os.path.getsize(path)
    again = MoDr.load_pretrained(saved)
    assert again.config == model.config and again.config.base == path
    tokens, s = tokens_like(3, 9), state_like(3, 9)
    assert torch.equal(again(tokens, state=s)[0], model(tokens, state=s)[0])
    averaged = AveragedModel(model)
    averaged.update_parameters(stir(model, 9))
    other = AveragedModel(again)
    other.load_state_dict(averaged.state_dict())
    assert torch.equal(other.module.router.weight, averaged.module.router.weight)
    assert not [name for name in averaged.state_dict() if "wte" in name]


def test_a_checkpoint_of_before_a_field_and_a_huginns_are_told_apart(tmp_path):
    model, frozen, path, saved = saved_pair(tmp_path)
    for name, file in (("modr", saved), ("huginn", path)):
        old = torch.load(file, weights_only=True) | {"config": {"model": name}}
        del old["model_config"]["selective_checkpoint"]
        torch.save(old, file)
    assert MoDr.load_pretrained(saved).config == model.config
    new = MoDr.pretrained_config(path)
    assert new["base"] == path and "num_branches" not in new and not new["selective_checkpoint"]


def test_another_base_is_an_error(tmp_path):
    model, frozen, path, saved = saved_pair(tmp_path)
    fails(lambda: MoDr.load_pretrained(saved, base=save_run(base(seed=7), tmp_path / "other.pt")),
          "other.pt", "other weights", model.config.base_hash, weights_hash(base(seed=7)))
    moved = save_run(frozen, tmp_path / "moved.pt")
    os.remove(path)
    fails(lambda: MoDr.load_pretrained(saved), "base.pt", "modr.pt needs the Huginn it was trained on")
    assert MoDr.load_pretrained(saved, base=moved).config.base == moved
    fails(lambda: MoDr.load_pretrained(moved, base=saved), "init_from")
    fails(lambda: MoDr.load_pretrained(saved, base=moved, num_branches=2), "num_branches 2", "modr.pt", "with 3")


def test_the_hash_is_that_of_the_weights_in_any_precision():
    assert weights_hash(base()) == weights_hash(base().to(torch.bfloat16)) != weights_hash(base(seed=1))


def test_the_frozen_weights_may_be_held_in_bfloat16(tmp_path):
    model, _, path, saved = saved_pair(tmp_path, base_dtype="bfloat16")
    again = MoDr.load_pretrained(saved)
    assert again.wte.weight.dtype == torch.bfloat16 and again.branched()[0].lora_A.dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        loss, *_ = again.train().step(batch_like())
        loss.backward()
        exact = MoDr.load_pretrained(saved, base_dtype="float32")
        want = exact.evaluate([batch_like()], [3])[3]["loss"]
        torch.testing.assert_close(again.eval().evaluate([batch_like()], [3])[3]["loss"], want, atol=0.05, rtol=0.02)
    assert all(p.grad is not None for p in again.parameters() if p.requires_grad)


def test_a_merged_branch_is_a_plain_huginn(tmp_path):
    model, frozen, path, saved = saved_pair(tmp_path, gate="preserve")
    tokens, s = tokens_like(3, 9), state_like(3, 9)
    for j in range(3):
        model.config.branch = j
        plain = model.merged(j)
        assert type(plain) is Huginn and not any(isinstance(m, BranchedLinear) for m in plain.modules())
        torch.testing.assert_close(plain(tokens, state=s)[0], model(tokens, state=s)[0], atol=1e-4, rtol=1e-4)
        exported = Huginn.load_pretrained(save_run(plain, tmp_path / f"{j}.pt"))
        assert torch.equal(exported(tokens, state=s)[0], plain(tokens, state=s)[0])
    for name, weight in frozen.state_dict().items():
        assert torch.equal(weight, dict(model.named_parameters())[name]), "the base itself is left alone"
    fails(lambda: model.merged(3), "branch 3", "0 to 2")
    gated, _ = tiny(gate="block")
    fails(lambda: gated.merged(0), "gate 'block'", "gate preserve", "gate off")


def fails(call, *words):
    with pytest.raises(ValueError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, (word, message)


@pytest.mark.parametrize("fields, words", [
    ({"num_branches": 0}, "num_branches 0"), ({"lora_rank": 0}, "lora_rank 0"), ({"branch": 4}, "branch 4"),
    ({"gate": "often"}, "often"), ({"route_pool": "all"}, "context"), ({"routing": "x"}, "random"),
    ({"balance_rate": -1}, "balance_rate"), ({"n_embd": 30}, "n_embd 30"),
    ({"lora_alpha": math.nan}, "lora_alpha nan")])
def test_mistakes_are_one_line(fields, words):
    fails(lambda: MoDrConfig(**vars(TINY) | fields), words)


def test_files_that_are_neither_are_one_line(tmp_path):
    (tmp_path / "x.pt").write_bytes(b"nothing")
    fails(lambda: MoDr.load_pretrained(str(tmp_path / "x.pt")), "x.pt", "not a readable checkpoint")
    torch.save({"model": {}}, tmp_path / "y.pt")
    fails(lambda: MoDr.load_pretrained(str(tmp_path / "y.pt")), "y.pt", "no checkpoint of a huginn")


# ---- it learns


def test_branches_learn_what_the_frozen_model_does_not_know():
    """A base that copies tokens learns to shift them by one, by its branches alone; the loss falls to half of its."""
    torch.manual_seed(0)
    frozen = Huginn(dataclasses.replace(TINY, vocab_size=12, mean_recurrence=2, mean_backprop_depth=2))
    torch.manual_seed(0)

    def batch(shift, seed):
        tokens = torch.randint(12, (16, 8), generator=torch.Generator().manual_seed(seed))
        return {"inputs": tokens, "labels": (tokens + shift) % 12}

    def fit(model, shift, steps, lr):
        (optimizer,) = model.train().configure_optimizers(lr, 0.0, (0.9, 0.95))
        for seed in range(steps):
            loss, metrics, _ = model.step(batch(shift, seed))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            model.finish_step(metrics)
        return model.eval().evaluate([batch(shift, 10_000)], [2])[2]["loss"].mean().item()

    assert fit(frozen, 0, 60, 1e-2) < 0.3
    config = MoDrConfig(**vars(frozen.config), num_branches=2, lora_rank=8, lora_alpha=8.0)
    model = MoDr(config, frozen)
    before = model.eval().evaluate([batch(1, 10_000)], [2])[2]["loss"].mean().item()
    after = fit(model, 1, 150, 2e-2)
    assert after < 0.5 * before, (before, after)
