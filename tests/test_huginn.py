"""Huginn against the reference numbers, against slow versions of its equations, and against its claims.

    python -m pytest tests/test_huginn.py -q
"""

import dataclasses
import json
import math

import golden
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from data.ledger import watch
from huginn import IGNORE, PRESETS, Exit, GenerateConfig, Huginn, HuginnConfig, KVCache, sample

TINY = HuginnConfig(vocab_size=50, block_size=64, n_embd=32, n_head=2, intermediate_size=48, n_layers_in_prelude=1,
                    n_layers_in_recurrent_block=2, n_layers_in_coda=1, mean_recurrence=4, mean_backprop_depth=2)


def tiny(seed=0, **fields):
    """A small model in which every part matters: gains and biases are not at their start values."""
    torch.manual_seed(seed)
    model = Huginn(dataclasses.replace(TINY, **fields)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn_like(parameter) * (0.3 if parameter.ndim != 2 else 0.1)
    return model


def tokens_like(*shape, seed=0, vocab_size=50):
    return torch.randint(vocab_size, shape, generator=torch.Generator().manual_seed(seed))


# ---- the reference numbers


def reference(name):
    """(model with the weights of a golden set, its settings)."""
    settings = golden.settings(name)
    theirs = settings["config"]
    fields = {f: theirs["n_heads" if f == "n_head" else f] for f in HuginnConfig.__dataclass_fields__
              if f in theirs or f == "n_head"}
    state = golden.arrays(f"{name}_state_1") | golden.arrays(f"{name}_state_2")
    model = Huginn(HuginnConfig(**fields)).eval()
    plain = {k.removeprefix("transformer."): v for k, v in state.items() if k not in ("freqs_cis", "lm_head.weight")}
    model.load_state_dict(plain)
    return model, settings


def close(ours, theirs, atol=1e-4):
    torch.testing.assert_close(ours, theirs, atol=atol, rtol=1e-4)


TINY_SETS = [name for name in golden.find("huginn_") if "exit" not in name and "sampler" not in name]


@pytest.mark.parametrize("name", TINY_SETS)
def test_logits_states_and_losses_equal_the_reference(name):
    model, settings = reference(name)
    want = golden.arrays(f"{name}_outputs")
    tokens, labels = want["input_ids"], want["labels"]
    rotary = model.rotary(torch.arange(tokens.shape[1]))
    e = model.read(tokens, rotary)
    close(e, want["prelude_out"])
    s = want["input_states"]
    for step in range(max(settings["num_steps_saved"])):
        s = model.think(s, e, rotary)
        if f"raw_state.step{step + 1}" in want:
            close(s, want[f"raw_state.step{step + 1}"])
        if step + 1 in settings["num_steps_saved"]:
            close(model.ln_f(s), want[f"latent_states.steps{step + 1}"])
    for n in settings["num_steps_saved"]:
        logits, loss = model(tokens, labels, num_steps=n, state=want["input_states"])
        close(logits, want[f"logits.steps{n}"])
        assert loss.item() == pytest.approx(settings["scalars"][f"loss.steps{n}"], abs=2e-5)


@pytest.mark.parametrize("name", TINY_SETS)
@pytest.mark.parametrize("checkpoint_core, selective", [(False, False), (True, False), (True, True)])
def test_gradients_equal_the_reference(name, checkpoint_core, selective):
    model, settings = reference(name)
    model.config.checkpoint_core, model.config.selective_checkpoint = checkpoint_core, selective
    inputs, want = golden.arrays(f"{name}_outputs"), golden.arrays(f"{name}_grads")
    run = settings["grad_run"]
    steps = (run["steps_without_gradient"], run["steps_with_gradient"])
    _, loss = model(inputs["input_ids"], inputs["labels"], steps, inputs["input_states"])
    loss.backward()
    assert loss.item() == pytest.approx(settings["scalars"]["grad_run_loss"], abs=2e-5)
    ours = dict(model.named_parameters())
    for key, gradient in golden.under(want, "grad.").items():
        close(ours[key.removeprefix("transformer.")].grad, gradient, atol=4e-5)
    norm = math.sqrt(sum(p.grad.square().sum().item() for p in ours.values()))
    assert norm == pytest.approx(settings["scalars"]["grad_norm_all_parameters"], rel=1e-4)


@pytest.mark.parametrize("name", TINY_SETS)
def test_decoding_equals_the_reference_in_chunks_and_greedily(name):
    model, settings = reference(name)
    want, decode = golden.arrays(f"{name}_decode"), settings["decode"]
    states, sequence = want["input_states"], want["greedy_sequence"]
    B, total = sequence.shape
    cache = KVCache(model.config, B, total, decode["num_steps"])
    got, start = [], 0
    for length in decode["chunk_lengths"]:
        chunk = slice(start, start + length)
        logits, _ = model(sequence[:, chunk], num_steps=decode["num_steps"], state=states[:, chunk], cache=cache)
        got.append(logits)
        start += length
    close(torch.cat(got, dim=1), want["incremental_logits"])
    full, _ = model(sequence[:, :start], num_steps=decode["num_steps"], state=states[:, :start])
    close(full, want["full_logits"])
    for i in range(decode["new_tokens"]):
        at = slice(start + i - 1, start + i)
        logits = got[-1] if i == 0 else model(sequence[:, at], num_steps=decode["num_steps"], state=states[:, at],
                                              cache=cache)[0]
        close(logits[:, -1], want["greedy_logits"][:, i])
        assert torch.equal(logits[:, -1].argmax(dim=-1), sequence[:, start + i]), f"greedy token {i}"


KINDS = {"kl": "kl", "latent": "latent_diff", "argmax": "argmax_stability"}


@pytest.mark.parametrize("name", golden.find("huginn_exit"))
@pytest.mark.parametrize("kind", KINDS)
def test_exit_values_equal_the_reference(name, kind):
    tiny_name = name.replace("exit", "tiny")
    model, _ = reference(tiny_name)
    inputs, want, settings = golden.arrays(f"{tiny_name}_outputs"), golden.arrays(name), golden.settings(name)
    tokens = inputs["input_ids"]
    rotary = model.rotary(torch.arange(tokens.shape[1]))
    e, s, exit = model.read(tokens, rotary), inputs["input_states"], Exit(kind)
    key = next(k for k in want if k.startswith(KINDS[kind].split("_")[0]) and "exit" not in k)
    values, passed = [], []
    for _ in range(len(want[key])):
        new = model.think(s, e, rotary)
        logits = model.head(model.speak(new, rotary))[:, -1]
        passed.append(exit.settled(s, new, logits, torch.ones_like(tokens, dtype=torch.bool)))
        values.append(exit.value)
        s = new
    values = torch.stack(values)  # (steps, B)
    torch.testing.assert_close(values, want[key].float(), atol=2e-5, rtol=1e-4)
    if kind == "kl":
        example = settings["kl"]
        below = (values < example["example_threshold"]).int().argmax(dim=0) + 1
        assert below.tolist() == example["first_exit_step_at_example_threshold"]


@pytest.mark.parametrize("name", golden.find("huginn_sampler"))
def test_drawn_steps_follow_the_reference_distribution(name):
    settings = golden.settings(name)
    for case in [settings["main"], *settings["extra"]]:
        model = tiny(mean_recurrence=case["mean_recurrence"], mean_backprop_depth=case["mean_backprop_depth"])
        torch.manual_seed(0)
        draws = torch.tensor([model.sample_num_steps() for _ in range(20000)])  # (N, 2)
        total, exact = draws.sum(dim=1).double(), case["exact_distribution_of_total_steps"]
        assert abs(total.mean() - exact["mean"]) < 4 * exact["std"] / math.sqrt(len(total))
        assert total.std() == pytest.approx(exact["std"], rel=0.05)
        assert total.min() >= 1 and (draws[:, 1] <= case["mean_backprop_depth"]).all()
        assert torch.equal(draws[:, 1], total.long().clamp(max=case["mean_backprop_depth"]))
        zero = (draws[:, 0] == 0).double().mean().item()
        p = exact["prob_no_gradient_steps_is_zero"]
        assert abs(zero - p) < 4 * math.sqrt(p * (1 - p) / len(total))
        for quantile, value in exact["quantiles"].items():
            assert total.quantile(float(quantile)) == pytest.approx(value, abs=max(1, 0.05 * value)), quantile


# ---- the equations


def test_sizes_are_the_published_ones():
    counts = {}
    for name, config in PRESETS.items():
        with torch.device("meta"):
            counts[name] = sum(p.numel() for p in Huginn(config).parameters())
    assert counts["paper"] == 3_564_976_800 and 0.9e8 < counts["small"] < 1.1e8 and counts["nano"] < 2e6


def test_start_values_follow_the_paper():
    torch.manual_seed(0)
    c = dataclasses.replace(TINY, n_embd=128, n_head=4, intermediate_size=256)
    model = Huginn(c)
    std, cut = math.sqrt(2 / (5 * 128)), 0.98658  # a normal cut at three sigma keeps 98.7 % of its std
    depth = 1 + 1 + 2 * 4
    for name, weight in model.named_parameters():
        if weight.ndim == 2:
            want = std / math.sqrt(2 * depth) if name.endswith("proj.weight") else std
            assert weight.std().item() == pytest.approx(want * cut, rel=0.03), name
            assert weight.abs().max() <= 3 * want
    s = model.initial_state(torch.empty(8, 64, 128))
    assert s.std().item() == pytest.approx(math.sqrt(2 / 5) * cut, rel=0.02) and s.abs().max() <= 3 * math.sqrt(2 / 5)
    assert not torch.equal(s, model.initial_state(s)), "fresh noise at every call"


def test_the_noise_of_a_position_depends_on_the_seed_alone():
    model = tiny()
    a, b = model.noise_table(7, 3), model.noise_table(500, 3)
    assert torch.equal(a, b[:7]) and not torch.equal(a, model.noise_table(7, 4))
    assert b.std().item() == pytest.approx(0.624, rel=0.02) and b.abs().max() <= 3 * math.sqrt(2 / 5) + 1e-6


def slow_forward(model, tokens, s, num_steps):
    """The equations, token by token and head by head, in float64."""
    w = {name: p.double() for name, p in model.named_parameters()}
    c, T = model.config, tokens.shape[1]
    hd = c.n_embd // c.n_head

    def norm(x, name):
        return x / (x.square().mean(dim=-1, keepdim=True) + 1e-6).sqrt() * w[name + ".weight"]

    def rotate(x, t):
        out = x.clone()
        for j in range(hd // 2):
            angle = t * c.rope_base ** (-2 * j / hd)
            (a, b), cos, sin = x[2 * j : 2 * j + 2], math.cos(angle), math.sin(angle)
            out[2 * j], out[2 * j + 1] = a * cos - b * sin, a * sin + b * cos
        return out

    def attention(x, name):
        qkv = x @ w[name + ".Wqkv.weight"].T
        out = torch.zeros_like(x)
        for h in range(c.n_head):
            at = [slice(part * c.n_embd + h * hd, part * c.n_embd + (h + 1) * hd) for part in range(3)]
            q, k = ([rotate(qkv[t, at[i]] + w[name + ".qk_bias"][i, 0, h], t) for t in range(T)] for i in (0, 1))
            for t in range(T):
                p = torch.stack([q[t] @ k[u] / math.sqrt(hd) for u in range(t + 1)]).softmax(dim=0)
                out[t, at[0]] = sum(p[u] * qkv[u, at[2]] for u in range(t + 1))
        return out @ w[name + ".proj.weight"].T

    def block(x, name):
        x = norm(x + attention(norm(x, name + ".norm_1"), name + ".attn"), name + ".norm_2")
        gate, up = (norm(x, name + ".norm_3") @ w[name + ".mlp.fc.weight"].T).chunk(2, dim=-1)
        return norm(x + (gate * gate.sigmoid() * up) @ w[name + ".mlp.proj.weight"].T, name + ".norm_4")

    rows = []
    for row, state in zip(tokens, s.double()):
        e = math.sqrt(c.n_embd) * w["wte.weight"][row]
        for i in range(c.n_layers_in_prelude):
            e = block(e, f"prelude.{i}")
        for _ in range(num_steps):
            state = torch.cat([state, e], dim=-1) @ w["adapter.weight"].T
            for i in range(c.n_layers_in_recurrent_block):
                state = block(state, f"core_block.{i}")
        x = norm(state, "ln_f")
        for i in range(c.n_layers_in_coda):
            x = block(x, f"coda.{i}")
        rows.append(norm(x, "ln_f") @ w["wte.weight"].T)
    return torch.stack(rows)


def test_forward_equals_a_slow_loop_over_the_equations():
    model, tokens = tiny(), tokens_like(2, 7)
    s = model.initial_state(torch.empty(2, 7, 32))
    with torch.no_grad():
        close(model(tokens, num_steps=3, state=s)[0].double(), slow_forward(model, tokens, s, 3))


def test_the_last_token_changes_no_earlier_logits():
    model, tokens = tiny(), tokens_like(2, 12)
    s = model.initial_state(torch.empty(2, 12, 32))
    changed = tokens.clone()
    changed[:, -1] = (tokens[:, -1] + 1) % 50
    with torch.no_grad():
        a, b = (model(t, num_steps=5, state=s)[0] for t in (tokens, changed))
    assert torch.equal(a[:, :-1], b[:, :-1]) and not torch.equal(a[:, -1], b[:, -1])


@pytest.mark.parametrize("length", [5, 140])
def test_bfloat16_on_a_cpu_takes_two_ways_that_agree(length):
    """Short texts have an explicit softmax there, long ones and all others scaled_dot_product_attention."""
    model = tiny(block_size=256)
    tokens = tokens_like(2, length)
    s = model.initial_state(torch.empty(2, length, 32))
    with torch.no_grad():
        want, _ = model(tokens, num_steps=2, state=s)
        with torch.autocast("cpu", torch.bfloat16):
            got, _ = model(tokens, num_steps=2, state=s)
    assert got.dtype == torch.bfloat16 and (got - want).abs().max() < 0.1 * want.abs().max()


def test_rotary_stays_float32_in_a_bfloat16_model():
    model = tiny().bfloat16()
    model(tokens_like(1, 4), num_steps=1)
    assert model.table.dtype == torch.complex64


# ---- training


def test_no_grad_steps_keep_nothing_for_the_backward_pass():
    """Memory is counted as the tensors that autograd saves, not by a clock or the process's size."""
    model, tokens = tiny().train(), tokens_like(2, 10)

    def saved(steps, checkpoint_core=False):
        model.config.checkpoint_core, sizes = checkpoint_core, {}
        def keep(tensor):
            sizes[id(tensor)] = tensor, tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            model(tokens, tokens, steps)
        return sum(size for _, size in sizes.values())

    assert saved((0, 2)) == saved((3, 2)) == saved((50, 2))
    assert saved((0, 8)) > saved((0, 4)) > saved((0, 2)), "each step with gradient keeps its activations"
    assert saved((0, 8), True) < saved((0, 8)) / 3, "checkpointing keeps the states only"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_selective_checkpointing_keeps_products_only(dtype):
    """The same gradients, hardly more products than without, and memory in between."""
    watched, grads, tokens = [], [], tokens_like(2, 32)
    for fields in ({}, dict(checkpoint_core=True, selective_checkpoint=True), dict(checkpoint_core=True)):
        model = tiny(random_recurrence=False, mean_recurrence=4, mean_backprop_depth=3, **fields).train()
        torch.manual_seed(1)
        watched.append(watch(model, dict(inputs=tokens, labels=tokens), dtype))
        grads.append([p.grad for p in model.parameters()])
    none, selective, full = watched
    assert full.held < selective.held < 0.8 * none.held
    assert none.flops == selective.flops < full.flops
    for a, b in zip(*grads[:2]):  # in bfloat16 each step casts the weights anew, whose gradients then add up in float32
        torch.testing.assert_close(b, a, atol=0 if dtype == torch.float32 else 0.02 * a.abs().max(), rtol=0)
    with pytest.raises(ValueError, match="give checkpoint_core too"):
        tiny(selective_checkpoint=True)


def test_only_the_last_steps_carry_gradient():
    """The gradient equals that of the last steps alone, from the state where the others ended."""
    model, tokens = tiny().train(), tokens_like(2, 6)
    s = model.initial_state(torch.empty(2, 6, 32))
    _, loss = model(tokens, tokens, (3, 2), s)
    loss.backward()
    got = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    rotary = model.rotary(torch.arange(6))
    with torch.no_grad():
        e = model.read(tokens, rotary)
        for _ in range(3):
            s = model.think(s, e, rotary)
    model(tokens, tokens, (0, 2), s)[1].backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, got[name], msg=name)


def test_an_int_is_split_and_training_draws_anew_each_time():
    model = tiny()
    with pytest.raises(ValueError, match="num_steps 0"):
        model.split_steps(0)
    assert model.split_steps(7) == (5, 2) and model.split_steps(1) == (0, 1) and model.split_steps() == (2, 2)
    model.train()
    torch.manual_seed(0)
    draws = [model.step(dict(inputs=tokens_like(1, 4), labels=tokens_like(1, 4)))[1]["num_steps"][0] for _ in range(20)]
    assert len(set(draws)) > 3
    state = torch.get_rng_state()
    first = model.split_steps()
    torch.set_rng_state(state)
    assert model.split_steps() == first, "the draw comes from the generator that checkpoints hold"
    model.config.random_recurrence = False
    assert model.split_steps() == (2, 2)


def draw_steps(rank, path, results):
    """One of two processes: its seed differs, its numbers of steps must not."""
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    model = tiny(seed=rank).train()
    results[rank] = [sum(model.split_steps()) for _ in range(5)]
    dist.destroy_process_group()


def test_all_ranks_draw_the_same_number_of_steps(tmp_path):
    context = torch.multiprocessing.get_context("spawn")
    with context.Manager() as manager:
        results = manager.dict()
        ranks = [context.Process(target=draw_steps, args=(rank, tmp_path / "meet", results)) for rank in (0, 1)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(60)
            assert process.exitcode == 0
        assert results[0] == results[1] and len(set(results[0])) > 1


def test_autocast_leaves_no_weight_without_gradient():
    """Steps without gradient come first: weights that autocast caches there must still get one."""
    model = tiny().train()
    with torch.autocast("cpu", torch.bfloat16):
        _, loss = model(tokens_like(2, 5), tokens_like(2, 5), (3, 2))
    loss.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


def test_ignored_targets_do_not_count_and_metrics_add_up():
    model = tiny(random_recurrence=False).train()
    inputs, labels = tokens_like(3, 8), tokens_like(3, 8, seed=1)
    labels[:, :5] = IGNORE
    torch.manual_seed(3)
    loss, metrics, _ = model.step(dict(inputs=inputs, labels=labels))
    torch.manual_seed(3)
    logits, _ = model(inputs)
    want = F.cross_entropy(logits[:, 5:].flatten(0, 1), labels[:, 5:].flatten())
    torch.testing.assert_close(loss, want)
    total, count = metrics["loss"]
    assert count == 9 and total.item() == pytest.approx(9 * want.item(), rel=1e-5)
    assert metrics["num_steps"] == (4, 1) and metrics["tokens"] == (24, 1)
    loss, metrics, _ = model.step(dict(inputs=inputs, labels=torch.full_like(labels, IGNORE)))
    loss.backward()
    assert loss.item() == 0 and metrics["loss"] == (0, 0), "nothing scored is no nan"


def test_only_matrices_decay():
    (optimizer,) = tiny().configure_optimizers(1e-3, 0.1, (0.9, 0.95))
    decayed, rest = optimizer.param_groups
    assert decayed["weight_decay"] == 0.1 and all(p.ndim == 2 for p in decayed["params"])
    assert rest["weight_decay"] == 0 and all(p.ndim != 2 for p in rest["params"])
    assert len(decayed["params"]) + len(rest["params"]) == len(list(tiny().parameters()))


def test_flops_are_counted_as_the_profiler_does():
    model = tiny().train()
    tokens = tokens_like(2, 16)
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        model(tokens, tokens, (3, 2))[1].backward()
    assert model.flops(tokens.shape, 3, 2) == pytest.approx(counter.get_total_flops(), rel=0.1)


# ---- inference


def test_decoding_with_a_cache_equals_the_full_forward():
    model, tokens = tiny(), tokens_like(3, 20)
    s = model.initial_state(torch.empty(3, 20, 32))
    cache = KVCache(model.config, 3, 20, 6)
    with torch.no_grad():
        full, _ = model(tokens, num_steps=6, state=s)
        parts = [model(tokens[:, a:b], num_steps=6, state=s[:, a:b], cache=cache)[0]
                 for a, b in [(0, 7), (7, 8), (8, 9), (9, 14), (14, 20)]]
    torch.testing.assert_close(torch.cat(parts, dim=1), full, atol=1e-5, rtol=1e-5)


PROMPTS = [[3, 1, 4], [1, 5, 9, 2, 6, 5, 3, 5, 8], [7], [9, 7, 9, 3, 2, 3]]
OPTIONS = [dict(), dict(exit="kl", exit_threshold=0.3), dict(exit="latent", exit_threshold=0.3),
           dict(exit="argmax", exit_threshold=1), dict(warm_start=True), dict(cache_budget=2),
           dict(exit="kl", exit_threshold=0.3, cache_budget=3, warm_start=True), dict(temperature=0.0, min_steps=3)]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_row_does_not_depend_on_what_else_is_in_the_batch(options):
    model = tiny()

    def run(prompts):
        steps = list(model.stream(prompts, num_steps=8, max_new_tokens=12, **options))
        return [[int(part[row]) for step in steps for part in step] for row in range(len(prompts))]

    together = run(PROMPTS)
    for prompt, got in zip(PROMPTS, together):
        assert run([prompt])[0] == got
    used = {n for row in together for n in row[1::2]}
    assert (len(used) > 2) if "exit" in options else used == {8}, "the rows were to exit at different steps"


def test_generation_equals_a_full_forward_per_token():
    model, prompt = tiny(), [3, 1, 4, 1, 5]
    got = model.generate([prompt], 10, num_steps=5)[0]
    noise = model.noise_table(15, 0)
    for i, token in enumerate(got):
        text = torch.tensor([prompt + got[:i]])
        with torch.no_grad():
            logits, _ = model(text, num_steps=5, state=noise[None, : text.shape[1]])
        assert logits[0, -1].argmax() == token, i


def test_an_exited_token_leaves_its_latest_entries_to_longer_loops():
    model = tiny()
    cache = KVCache(model.config, 1, 3, 6)
    noise = model.noise_table(3, 0)
    at = torch.tensor([[0, 1]])
    with torch.no_grad():
        *_, used = model.advance(tokens_like(1, 2), at, noise[at], cache, 6, at >= 0, Exit("latent", 1e9), min_steps=3)
    assert used.tolist() == [3]
    for layer in range(2):
        for step in range(3, 6):
            for store in (cache.k, cache.v):
                assert torch.equal(store[cache.slot(step, layer)], store[cache.slot(2, layer)])
                assert not torch.equal(store[cache.slot(1, layer)], store[cache.slot(2, layer)])


def test_min_steps_and_thresholds_hold():
    model = tiny()

    def used(**options):
        prompt, *steps = [int(n) for _, n in model.stream([[3, 1, 4]], num_steps=9, max_new_tokens=6, **options)]
        assert prompt == 9, "the prompt is read with all steps"
        return torch.tensor(steps)

    assert (used() == 9).all() and (used(exit="kl", exit_threshold=0) == 9).all()
    assert (used(exit="kl", exit_threshold=1e9) == 1).all()
    assert (used(exit="latent", exit_threshold=1e9, min_steps=4) == 4).all()
    assert (used(exit="argmax", exit_threshold=2) >= 3).all()


def test_a_budget_bounds_the_cache_and_steps_share_slots_in_turn():
    config = TINY
    full, capped = KVCache(config, 2, 10, 32), KVCache(config, 2, 10, 32, budget=4)
    per_slot = 2 * 2 * 10 * 32 * 4  # keys and values, rows, positions, width, bytes
    assert full.nbytes == (2 + 32 * 2) * per_slot and capped.nbytes == (2 + 4 * 2) * per_slot
    assert capped.slot(1, 0) == capped.slot(5, 0) == capped.slot(29, 0) != capped.slot(2, 0)
    assert KVCache(config, 2, 10, 3, budget=4).nbytes == KVCache(config, 2, 10, 3).nbytes
    model = tiny()
    same = [model.generate(PROMPTS, 8, num_steps=6, cache_budget=b) for b in (-1, 6, 99)]
    assert same[0] == same[1] == same[2]
    assert len(model.generate(PROMPTS, 8, num_steps=6, cache_budget=1)[0]) == 8


def test_warm_start_goes_on_from_the_last_state():
    model = tiny()
    cache, noise = KVCache(model.config, 1, 5, 4), model.noise_table(5, 0)
    at = torch.tensor([[0, 1, 2]])
    with torch.no_grad():
        logits, s, _ = model.advance(torch.tensor([[3, 1, 4]]), at, noise[at], cache, 4, at >= 0)
        first = logits.argmax(dim=-1)
        at = torch.tensor([[3]])
        logits, _, _ = model.advance(first[:, None], at, s[:, None], cache, 4, at >= 0)
    want = [first.item(), logits.argmax().item()]
    assert model.generate([[3, 1, 4]], 2, num_steps=4, warm_start=True)[0] == want


def test_stop_tokens_end_a_row_and_texts_end_with_the_context():
    model = tiny()
    free = model.generate(PROMPTS, 20, num_steps=2)
    stop = free[1][4]
    for row, ended in zip(free, model.generate(PROMPTS, 20, stop=[stop], num_steps=2)):
        assert ended == row[: row.index(stop) + 1] if stop in row else ended == row
    long = model.generate([[1] * 60, [1] * 3], 20, num_steps=1)
    assert [len(row) for row in long] == [5, 20], "block_size 64: the token after the last position is still predicted"


def test_sampling_is_seeded_and_keeps_to_top_k_and_top_p():
    model = tiny()
    a, b, c = (model.generate(PROMPTS, 10, seed=seed, num_steps=2, temperature=2.0) for seed in (1, 1, 2))
    assert a == b != c
    logits = torch.log(torch.tensor([[0.4, 0.3, 0.2, 0.1]])).repeat(4000, 1)
    generator = torch.Generator().manual_seed(0)
    share = torch.bincount(sample(logits, 1.0, generator=generator), minlength=4) / 4000
    torch.testing.assert_close(share, torch.tensor([0.4, 0.3, 0.2, 0.1]), atol=0.03, rtol=0)
    assert set(sample(logits, 1.0, top_k=2, generator=generator).tolist()) == {0, 1}
    assert set(sample(logits, 1.0, top_p=0.75, generator=generator).tolist()) == {0, 1, 2}
    assert set(sample(logits, 1.0, top_p=0.01, generator=generator).tolist()) == {0}
    cold = torch.bincount(sample(logits, 0.5, generator=generator), minlength=4) / 4000
    assert cold[0] == pytest.approx(0.16 / 0.30, abs=0.03)
    assert set(sample(logits, 0.0).tolist()) == set(sample(logits, 1e-40, generator=generator).tolist()) == {0}


@pytest.mark.parametrize("prompts,options,words", [
    ([[]], {}, ["empty prompt"]), ([], {}, ["list of lists"]), ([7, 8], {}, ["list of lists"]),
    ([[1], []], {}, ["empty prompt"]), ([[1] * 64], {}, ["64 tokens", "block_size"]),
    ([[50]], {}, ["token 50", "0 to 49"]), ([[-1]], {}, ["token -1"]), ([[1]], dict(stop=[50]), ["stop token 50"]),
    ([[1]], dict(temperature=-1.0), ["temperature -1"]), ([[1]], dict(top_p=0.0), ["top_p 0"]),
    ([[1]], dict(num_steps=0), ["num_steps 0"]), ([[1]], dict(num_steps=10**20), ["num_steps", "1"]),
    ([[1]], dict(exit="often"), ["often", "kl, latent, argmax"]), ([[1]], dict(temperature=float("inf")), ["inf"]),
    ([[1]], dict(top_p=float("nan")), ["top_p nan"])])
def test_mistakes_are_one_line(prompts, options, words):
    with pytest.raises(ValueError) as error:
        tiny().generate(prompts, 5, **options)
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value)


def test_a_text_longer_than_the_context_is_one_line():
    with pytest.raises(ValueError, match="65 tokens.*64"):
        tiny()(tokens_like(1, 65))
    with pytest.raises(ValueError, match="n_embd 30"):
        dataclasses.replace(TINY, n_embd=30)
    with pytest.raises(ValueError, match="exit_threshold"):
        GenerateConfig(exit_threshold=-2)


def test_evaluation_scores_loss_and_answers_at_each_depth():
    model = tiny()
    inputs, labels = tokens_like(4, 9), tokens_like(4, 9, seed=1)
    labels[:, :6] = IGNORE
    batch = dict(inputs=inputs, labels=labels, prompt_lengths=torch.tensor([3, 7, 7, 5]))
    seen = []

    def grade(labels, answers):
        seen.append(answers)
        return torch.tensor([float(len(answer) == 6) for answer in answers])

    scores = model.evaluate([batch, batch], [1, 4], grade, stop=[7])
    assert list(scores) == [1, 4] and list(scores[4]) == ["exact_accuracy", "loss"]
    assert scores[4]["loss"].shape == (8,) and torch.equal(scores[4]["loss"][:4], scores[4]["loss"][4:])
    state = model.noise_table(9, 0).expand(4, -1, -1)
    with torch.no_grad():
        logits, _ = model(inputs, num_steps=4, state=state)
    want = F.cross_entropy(logits.mT, labels, ignore_index=IGNORE, reduction="none").sum(dim=1) / 3
    torch.testing.assert_close(scores[4]["loss"][:4], want)
    prompts = [row[:n].tolist() for row, n in zip(inputs, [3, 7, 7, 5])]
    assert seen[1] == model.generate(prompts, 6, stop=[7], num_steps=4)
    assert list(model.evaluate([batch])[4]) == ["loss"]
    named = model.evaluate([batch], [6], grade, exit="kl", exit_threshold=1e9, min_steps=3)[6]
    assert list(named) == ["exact_accuracy", "steps", "loss"]
    assert named["steps"].tolist() == [(6 + 5 * 3) / 6] * 4, "the prompt takes all 6"


# ---- checkpoints


def folder_of(model, path, shards=1, tied="once", dtype=torch.float32):
    """A Hugging Face folder with the weights of a model."""
    save_file = pytest.importorskip("safetensors.torch").save_file
    c = model.config
    theirs = {("n_heads" if name == "n_head" else name): value for name, value in vars(c).items()}
    (path / "config.json").write_text(json.dumps(theirs | {"tie_embeddings": True, "qk_bias": True, "bias": False}))
    state = {"transformer." + name: p.detach().to(dtype).clone() for name, p in model.state_dict().items()}
    state["freqs_cis"] = torch.zeros(1, c.block_size, 1, 8, 2)
    if tied != "once":
        state["lm_head.weight"] = state["transformer.wte.weight"].clone()
    if tied == "head only":
        del state["transformer.wte.weight"]
    names = sorted(state)
    for i in range(shards):
        save_file({name: state[name] for name in names[i::shards]}, path / f"model-{i}.safetensors")
    return path


@pytest.mark.parametrize("shards,tied,dtype", [(1, "once", torch.float32), (3, "twice", torch.float32),
                                               (2, "head only", torch.bfloat16)])
def test_hugging_face_folders_are_read_however_they_are_split(tmp_path, shards, tied, dtype):
    model = tiny()
    loaded = Huginn.load_pretrained(folder_of(model, tmp_path, shards, tied, dtype))
    want = model.to(dtype).float()
    tokens, s = tokens_like(1, 5), model.initial_state(torch.empty(1, 5, 32))
    with torch.no_grad():
        assert torch.equal(loaded(tokens, num_steps=2, state=s)[0], want(tokens, num_steps=2, state=s)[0])
    assert all(p.requires_grad and p.dtype == torch.float32 for p in loaded.parameters())
    assert next(Huginn.load_pretrained(tmp_path, dtype=torch.bfloat16).parameters()).dtype == torch.bfloat16
    assert Huginn.load_pretrained(tmp_path, mean_recurrence=9).config.mean_recurrence == 9


def test_files_that_are_no_huginn_are_one_line(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    save_file, load_file = safetensors.save_file, safetensors.load_file

    def fails(path, *words, **overrides):
        with pytest.raises(ValueError) as error:
            Huginn.load_pretrained(path, **overrides)
        assert "\n" not in str(error.value) and all(word in str(error.value) for word in words), error.value

    fails(tmp_path, "config.json")
    folder = folder_of(tiny(), tmp_path)
    fails(folder, "adapter.weight", n_embd=64)
    weights = load_file(folder / "model-0.safetensors")
    save_file(weights | {"lm_head.weight": torch.ones(50, 32)}, folder / "model-0.safetensors")
    fails(folder, "ties them")
    save_file({"transformer.wte.weight": torch.zeros(50, 32)}, folder / "model-0.safetensors")
    fails(folder, "adapter.weight is missing")
    (folder / "model-0.safetensors").write_bytes(b"x" * 100)
    fails(folder, "not a readable safetensors")
    (folder / "model-0.safetensors").unlink()
    fails(folder, "holds no *.safetensors")
    save_file({"transformer.wte.weight": torch.zeros(50, 32)}, folder / "model-0.safetensors")
    shards = {"weight_map": {"a": "model-0.safetensors", "b": "model-1.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(shards))
    fails(folder, "holds no model-1.safetensors")
    (folder / "model.safetensors.index.json").unlink()
    (folder / "config.json").write_text('{"n_embd": 32}')
    fails(folder, "n_head")
    wrong = '{"n_embd": [32], "n_heads": 2, "n_layers_in_recurrent_block": 1}'
    for text, word in (("[]", "list"), (wrong, "n_embd [32]")):
        (folder / "config.json").write_text(text)
        fails(folder, word)
    (folder / "config.json").write_text("[")
    fails(folder, "config.json")
    (tmp_path / "x.pt").write_bytes(b"hello")
    fails(tmp_path / "x.pt", "not a readable checkpoint")
    torch.save({"model_config": {"a": 1}}, tmp_path / "y.pt")
    fails(tmp_path / "y.pt", "no checkpoint of a huginn")


def test_a_checkpoint_of_before_a_field_is_read_by_its_models_name(tmp_path):
    model, path = tiny(), tmp_path / "old.pt"
    fields = vars(model.config).copy()
    del fields["selective_checkpoint"]
    torch.save({"config": {"model": "huginn"}, "model_config": fields, "model": model.state_dict()}, path)
    loaded = Huginn.load_pretrained(path)
    assert loaded.config == model.config and torch.equal(loaded.wte.weight, model.wte.weight)
    for config, more in (({"model": "modr"}, {}), ({}, {}), ({"model": "huginn"}, {"unheard_of": 1})):
        torch.save({"config": config, "model_config": fields | more, "model": model.state_dict()}, path)
        with pytest.raises(ValueError, match="no checkpoint of a huginn"):
            Huginn.load_pretrained(path)


# ---- the claim


def test_a_tiny_model_learns_and_looping_it_helps():
    """Add two 3-digit numbers, most significant digit first: more steps, fewer mistakes."""
    torch.manual_seed(0)
    config = HuginnConfig(vocab_size=12, block_size=16, n_embd=64, n_head=4, intermediate_size=128,
                          n_layers_in_prelude=1, n_layers_in_recurrent_block=1, n_layers_in_coda=1, mean_recurrence=4,
                          mean_backprop_depth=2)
    model = Huginn(config)

    def batch(n, generator):
        a, b = torch.randint(1000, (2, n), generator=generator)
        digits = [torch.stack([x // 10**i % 10 for i in reversed(range(k))], dim=1)
                  for x, k in ((a, 3), (b, 3), (a + b, 4))]
        tokens = torch.cat([*digits[:2], torch.full((n, 1), 10), digits[2]], dim=1)  # (n, 11)
        labels = tokens[:, 1:].clone()
        labels[:, :6] = IGNORE
        return dict(inputs=tokens[:, :-1], labels=labels)

    (optimizer,) = model.configure_optimizers(3e-3, 0.1, (0.9, 0.95))
    generator = torch.Generator().manual_seed(1)
    losses = []
    for step in range(350):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1, step / 30) * (1 - step / 400)
        loss, metrics, _ = model.step(batch(64, generator))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    scores = model.eval().evaluate([batch(500, torch.Generator().manual_seed(2))], [1, 4, 8])
    loss = {depth: named["loss"].mean().item() for depth, named in scores.items()}
    assert sum(losses[-20:]) / 20 < 0.5 * losses[0], losses[-1]
    assert loss[4] < 0.9 * loss[1] and loss[8] < loss[4] + 0.05, loss
