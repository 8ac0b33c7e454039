"""The budget that --dry_run prints: against true steps on a CPU, and as a user sees it.

    pytest tests/test_budget.py                      three minutes
"""

import dataclasses

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import dnd
import hrm
import huginn
import modr
import train
from data.budget import Budget, print_budget
from data.ledger import Ledger, batch_of, build, watch, watch_fake, watch_some

SIZES = dict(vocab_size=1000, block_size=160)
MODELS = {  # name -> (class, config, rows, tokens)
    "hrm": (hrm.HRM, hrm.PRESETS["nano"], 4, 81),
    "hrm-256": (hrm.HRM, hrm.HRMConfig(n_embd=256, n_head=4, H_layers=2, L_layers=2, puzzle_emb_ndim=256,
                                       num_puzzle_identifiers=50), 6, 81),
    "huginn": (huginn.Huginn, huginn.PRESETS["nano"], 4, 64),
    "huginn-256": (huginn.Huginn, huginn.HuginnConfig(**SIZES, n_embd=256, n_head=4, intermediate_size=640,
                                                      n_layers_in_recurrent_block=2, mean_recurrence=8,
                                                      mean_backprop_depth=4), 3, 160),
    "modr": (modr.MoDr, modr.PRESETS["nano"], 4, 64),
    "modr-256": (modr.MoDr, modr.MoDrConfig(**SIZES, n_embd=256, n_head=4, intermediate_size=640, num_branches=3,
                                            n_layers_in_recurrent_block=2, base_dtype="bfloat16", mean_recurrence=8,
                                            mean_backprop_depth=4), 3, 160),
    "qwen3": (dnd.DND, dnd.PLAIN_PRESETS["nano"], 4, 64),
    "dnd": (dnd.DND, dnd.PRESETS["nano"], 4, 64),
    "dnd-moe": (dnd.DND, dnd.PRESETS["nano-moe"], 4, 64),
    "dnd-256": (dnd.DND, dnd.DNDConfig(**SIZES, n_embd=256, n_layer=4, n_head=4, n_kv_head=2, head_dim=64,
                                       intermediate_size=640, tie_embeddings=False, nested_first=1, nested_last=2),
                3, 160),
}


def true_model(Model, config):
    """As build makes of fake tensors, of true ones."""
    torch.manual_seed(0)
    if getattr(config, "base_dtype", "") == "bfloat16":
        model = modr.MoDr(config, huginn.Huginn(modr.plain_config(config)).bfloat16())
    else:
        model = Model(config)
    if hasattr(config, "mean_recurrence"):
        model.split_steps = lambda _=None: (1, config.mean_backprop_depth)
    if getattr(config, "nested", ()):
        model.nesting.tau.fill_(-1.0)  # all are selected
    return model.train()


def saved_bytes(model, batch, dtype, carry):
    """Bytes of the distinct storages that a true step saves for its backward pass, but for those that are there."""
    there = [*model.parameters(), *model.buffers(), *batch.values()]
    there += [carry.z_H, carry.z_L, *carry.data.values()] if carry else []
    there, saved = {t.untyped_storage().data_ptr() for t in there}, {}

    def pack(t):
        saved[t.untyped_storage().data_ptr()] = t  # kept, so that no address comes twice
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            model.step(batch, carry)
    return sum(t.untyped_storage().nbytes() for address, t in saved.items() if address not in there)


def true_inputs(model, config, rows, tokens, dtype):
    batch = batch_of(config, rows, tokens)
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        return batch, model.initial_carry(batch) if isinstance(model, hrm.HRM) else None


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("name", MODELS)
def test_activations_are_those_of_a_true_step(name, dtype):
    Model, config, rows, tokens = MODELS[name]
    model = true_model(Model, config)
    batch, carry = true_inputs(model, config, rows, tokens, dtype)
    saved = saved_bytes(model, batch, dtype, carry)
    true, fake = watch(model, batch, dtype, carry), watch_fake(Model, config, rows, tokens, dtype)
    print(f"{name} {dtype}: saved {saved:,}, held {true.held:,} fake {fake.held:,}; peak "
          f"{true.activations + true.copies:,} fake {fake.activations + fake.copies:,}")
    assert fake.held == pytest.approx(saved, rel=0.1)
    assert fake.activations + fake.copies == pytest.approx(true.activations + true.copies, rel=0.02)
    assert fake.copies == pytest.approx(true.copies, rel=0.02)
    if getattr(config, "base_dtype", "float32") == "float32":
        assert (fake.copies > 0) == (dtype != torch.float32)


@pytest.mark.parametrize("name", ("hrm", "huginn", "modr", "dnd"))
def test_float16_stands_in_for_a_gpu(name):
    """Without the ways that a CPU has for bfloat16: no scores of attention are kept."""
    Model, config, rows, tokens = MODELS[name]
    model = true_model(Model, config)
    batch, carry = true_inputs(model, config, rows, tokens, torch.float16)
    true, fake = watch(model, batch, torch.float16, carry), watch_fake(Model, config, rows, tokens, torch.float16)
    assert fake.activations + fake.copies == pytest.approx(true.activations + true.copies, rel=0.02)
    if name != "hrm":  # whose nano has a bias for attention
        assert fake.activations < watch_fake(Model, config, rows, tokens, torch.bfloat16).activations * 1.02


@pytest.mark.parametrize("model, config", (
    ("huginn", dataclasses.replace(MODELS["huginn-256"][1], checkpoint_core=True)),
    ("dnd", dataclasses.replace(MODELS["dnd-256"][1], checkpoint_layers=True))))
@pytest.mark.parametrize("selective", (False, True))
def test_recomputed_steps_are_watched(model, config, selective):
    Model, config = train.MODELS[model][0], dataclasses.replace(config, selective_checkpoint=selective)
    true = watch(true_model(Model, config), batch_of(config, 3, 160), torch.bfloat16)
    fake = watch_fake(Model, config, 3, 160, torch.bfloat16)
    assert fake.activations + fake.copies == pytest.approx(true.activations + true.copies, rel=0.1)
    off = {"checkpoint_core" if model == "huginn" else "checkpoint_layers": False, "selective_checkpoint": False}
    kept = watch_fake(Model, dataclasses.replace(config, **off), 3, 160, torch.bfloat16)
    assert fake.activations < 0.8 * kept.activations


@pytest.mark.parametrize("model, config", (
    ("huginn", MODELS["huginn-256"][1]), ("modr", MODELS["modr-256"][1]),
    ("huginn", dataclasses.replace(MODELS["huginn-256"][1], checkpoint_core=True)),
    ("qwen3", dataclasses.replace(dnd.PLAIN_PRESETS["nano"], n_layer=10)),
    ("dnd", dataclasses.replace(dnd.PRESETS["nano"], n_layer=12, nested_last=8)),
    ("dnd", dataclasses.replace(dnd.PRESETS["nano-moe"], n_layer=10, nested_last=6, checkpoint_layers=True))))
def test_few_layers_tell_what_many_take(model, config):
    Model = train.MODELS[model][0]
    some, every = (f(Model, config, 4, 64, torch.float16) for f in (watch_some, watch_fake))
    for name in ("activations", "copies", "alone", "held", "flops"):
        assert getattr(some, name) == pytest.approx(getattr(every, name), rel=0.05), name


def budget_of(words, **options):
    *configs, _ = train.parse(words.split())
    return Budget(configs, train.MODELS[configs[0].model][0], **options)


@pytest.mark.parametrize("words", (
    "--model hrm", "--model hrm --data arc --num_puzzle_identifiers 77 --n_embd 256 --board 8", "--model huginn",
    "--model modr", "--model qwen3", "--model dnd --preset nano-moe"))
def test_weights_gradients_and_states_are_those_of_a_true_step(words, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # where there are no runs to start from
    budget = budget_of(f"{words} --ema 0.9")
    model = true_model(budget.Model, budget.config)
    optimizers = model.configure_optimizers(1e-3, 0.1, (0.9, 0.95))
    batch, carry = true_inputs(model, budget.config, budget.rows, budget.tokens, torch.float32)
    loss, _, carry = model.step(batch, carry)
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    states = [t.nbytes for o in optimizers for s in o.state.values() for t in s.values() if torch.is_tensor(t)]
    tables = [b for n, b in model.named_buffers() if n == "puzzle_emb.weights"]
    assert budget.table == sum(t.nbytes for t in tables)
    assert budget.gradients == sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
    assert budget.states == sum(states)
    copied = torch.optim.swa_utils.AveragedModel(model)
    held = sum(t.nbytes for t in [*copied.module.parameters(), *copied.module.buffers()])
    assert budget.memory()["averaged weights (EMA)"] == held == budget.weights + budget.table
    if carry:
        tensors = [carry.z_H, carry.z_L, carry.steps, carry.halted, carry.min_steps, *carry.data.values()]
        true = sum(t.nbytes for t in tensors) / budget.rows
        assert dataclasses.replace(budget.c, dtype="float32") and budget.dtype == torch.float16
        budget.dtype = torch.float32
        assert budget.carry(budget.rows, 1) == pytest.approx(true * budget.rows, rel=0.02)


def test_the_optimizers_own_temporaries_count():
    """Those of HRM's Adam, two more copies of the weights, where the batch is small."""
    budget = budget_of("--model hrm --preset paper --batch_size 1 --dtype float32")
    model = true_model(budget.Model, budget.config)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizers = model.configure_optimizers(1e-3, 0.1, (0.9, 0.95))
    optimizers[0].step()
    with Ledger([*model.parameters(), *(p.grad for p in model.parameters())]) as ledger:
        optimizers[0].step()
    assert budget.stepping == pytest.approx(sum(ledger.peak), rel=0.1) and budget.stepping > 1.9 * budget.gradients


@pytest.mark.parametrize("words, total, more", (
    ("--model hrm --preset paper", 27_275_266, []),
    ("--model huginn --preset paper --data text", 3_564_976_800, []),
    ("--model modr --preset paper --data text", 3_564_976_800 + 8_131_200, []),
    ("--model dnd --preset nano-moe", 3_875_460, [1_221_252]),
    ("--model dnd --preset qwen3-1.7b", 1_720_615_956, []),
    ("--model dnd --preset qwen3-30b-a3b", 30_532_204_584, [3_353_114_664])))
def test_counts_are_the_published_ones(words, total, more, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    budget = budget_of(words)
    assert budget.total == total
    assert [count for name, count in budget.applied() if name.startswith("active")] == more
    assert budget.trained == (8_131_200 if "modr" in words else total)


def test_counted_flops_are_near_the_formulas():
    """Which take half of the attention; HRM's is of README.md."""
    for name in ("huginn-256", "dnd-256"):
        Model, config, rows, tokens = MODELS[name]
        with FakeTensorMode():
            model = build(Model, config)
        formula = model.flops((rows, tokens), *((1, 4) if name[0] == "h" else (1.0,)))
        assert watch_fake(Model, config, rows, tokens, torch.float16).flops == pytest.approx(formula, rel=0.15), name
    budget, config = budget_of("--model hrm --preset paper"), hrm.PRESETS["paper"]
    C, T, W = config.n_embd, config.seq_len + 1, 1536
    update = config.H_layers * (2 * (4 * C**2 + 3 * C * W) * T + 4 * C * T**2)
    formula = update * (4 + 3 * 2 + 6)  # four updates without gradient, two with it, and the bootstrap's six
    assert budget.flops()[0] == pytest.approx(formula, rel=0.03)


def test_gpus_share_what_they_can():
    words = "--model huginn --preset small --data text --batch_size 8 --grad_accum 1"
    one = budget_of(words).memory()
    ddp, fsdp = (budget_of(words, world_size=8, parallel=parallel).memory() for parallel in ("ddp", "fsdp"))
    for name in ("weights", "gradients", "optimizer states"):
        assert ddp[name] == one[name] and fsdp[name] == pytest.approx(one[name] / 8)
    assert ddp["activations"] == pytest.approx(one["activations"] / 8, rel=0.02)
    config = huginn.PRESETS["small"]
    C, block = config.n_embd, 4 * config.n_embd**2 + 3 * config.n_embd * config.intermediate_size
    rest = config.vocab_size * C + 2 * C**2
    core = config.n_layers_in_recurrent_block * block  # which is looped, and stays
    assert fsdp["gathered weights"] == pytest.approx(2 * (rest + core + 2 * block), rel=0.01)
    assert fsdp["unscattered gradients"] == pytest.approx(2 * (rest + block) + 4 * block, rel=0.01)
    assert "cast copies of weights" not in fsdp and fsdp["averaged weights (EMA)"] == 0
    true = budget_of(words + " --dtype float32", world_size=8, parallel="fsdp").memory()
    assert true["gathered weights"] == 2 * fsdp["gathered weights"]
    parts = budget_of(words.replace("_accum 1", "_accum 8"), world_size=2, parallel="fsdp").memory()  # 4 on each
    assert parts["gradients"] == one["gradients"] / 2 and parts["weights"] == one["weights"] / 2
    config = dnd.PRESETS["qwen3-30b-a3b"]
    with torch.device("meta"):
        model = dnd.DND(config)
    block, rest = (sum(p.numel() for p in part) for part in (
        model.layers[0].parameters(), (p for name, p in model.named_parameters() if not name.startswith("layers."))))
    sizes = budget_of("--model dnd --preset qwen3-30b-a3b --data chat --block_size 512 --batch_size 64 --dry_run",
                      world_size=64, parallel="fsdp").memory()
    assert sizes["gathered weights"] == 2 * (rest + 2 * block)


def test_gathered_weights_are_not_cast_once_more():
    """As they come in the dtype of the forward pass, the experts' too, which are cast in each pass if they do not."""
    config = dnd.PRESETS["nano-moe"]
    with FakeTensorMode():
        model = build(dnd.DND, config)
        for parameter in model.parameters():
            parameter.data = parameter.data.half()
        gathered = watch(model, batch_of(config, 4, 64), torch.float16)
    assert gathered.copies < 1e5  # of the norms, which compute in float32
    budget = budget_of("--model dnd --preset nano-moe --batch_size 32", world_size=8, parallel="fsdp")
    budget.tokens = 64
    cast = budget.memory(parallel="ddp")
    assert cast["cast copies of weights"] > 2 * budget.total  # bytes; each nested pass of a layer has copies of its own
    assert budget.memory()["activations"] == pytest.approx(gathered.activations, rel=0.05)


@pytest.mark.parametrize("words", ("--model modr --preset paper --data math",
                                   "--model dnd --preset qwen3-1.7b --data chat --dry_run --ema 0.9"))
def test_offloaded_is_on_the_cpu(words, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    budget = budget_of(words)
    one, off = budget.memory(), budget.memory(offload=True)
    held = ("weights", "gradients", "optimizer states", "averaged weights (EMA)")
    assert not any(off[name] for name in held) and off["gathered weights"] > 0
    assert sum(budget.held(1).values()) - budget.stepping == pytest.approx(sum(one[name] for name in held))
    two = budget_of(words, world_size=2, offload=True)
    assert two.parallel == "fsdp" and two.memory()["gathered weights"] == off["gathered weights"]
    assert sum(off.values()) < sum(one.values())
    if "modr" in words:
        assert off["unscattered gradients"] < 1e8  # of the branches alone


def test_advice_fits():
    """What is advised for too small a card is within it when it is asked for."""
    words = "--model huginn --preset small --data text"
    budget = budget_of(words)
    assert budget.advice(100) == "fits"
    for room, with_flag in ((12, False), (3.5, True)):
        said = budget.advice(room)
        flags = said.split("does not fit; ")[1].split(" would")[0]
        assert ("--checkpoint_core" in flags) == with_flag and "--grad_accum" in flags
        assert budget_of(f"{words} {flags}").fits(room), said
    flags = budget.advice(1.5).split("fsdp on 8 GPUs with ")[1].split(" would")[0]
    assert budget_of(f"{words} {flags}", world_size=8, parallel="fsdp").fits(1.5)
    assert "nor do" in budget.advice(0.01)


@pytest.mark.parametrize("words, room", (("--model dnd --preset qwen3-1.7b --data chat --dry_run", 21.8),
                                         ("--model huginn --preset small --data text", 1.8)))
def test_advice_to_offload_fits(words, room, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    budget = budget_of(words)
    said = budget.advice(room)
    assert "--offload" in said and "GiB of CPU memory" in said
    flags = said.split("does not fit; ")[1].split(" would")[0]
    asked = budget_of(f"{words} {flags.replace('--offload', '')}", offload=True)
    assert asked.fits(room), said
    assert "--offload" not in asked.advice(room / 4)


def test_what_is_said_of_the_way(capsys, monkeypatch, tmp_path):
    """Of dtype, one GPU and --offload, which is a flag of train.py's."""
    monkeypatch.chdir(tmp_path)
    for flags, said in ((" --dtype float16", "none, float16 autocast |"), ("", "none, bfloat16 autocast |"),
                        (" --dtype float32 --parallel fsdp", "none, float32 |")):
        assert train.main(f"--model huginn --dry_run{flags}".split()) == 0
        out = capsys.readouterr().out
        assert said in out and ("nothing to share" in out) == ("fsdp" in flags)
    *configs, _ = train.parse("--model huginn --dry_run".split())
    print_budget(configs, huginn.Huginn, offload=True)
    out = capsys.readouterr().out
    assert "1 x H100, parallel fsdp with --offload, bfloat16" in out and "CPU memory per process" in out


@pytest.mark.parametrize("words", ("--model hrm", "--model hrm --data maze --preset paper", "--model hrm --data arc",
                                   "--model huginn", "--model modr --data math", "--model qwen3 --data chat",
                                   "--model dnd --preset nano-moe --world_size 8"))
def test_dry_run_reads_and_writes_nothing(words, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train, "build", lambda *_: pytest.fail("data or a model is made"))
    assert train.main([*words.split(), "--dry_run"]) == 0
    out = capsys.readouterr().out
    assert "in all, at the worst moment" in out and "time of a step" in out and "H100, 80 GB" in out
    assert max(map(len, out.splitlines())) < 180 and not list(tmp_path.iterdir())
    assert ("29,760 puzzle ids" in out) == ("arc" in words)


def test_the_largest_takes_seconds(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert train.main("--model dnd --preset qwen3-30b-a3b --data text --block_size 4096 --dry_run".split()) == 0
    out = capsys.readouterr().out
    assert "30,532,204,584" in out and "fsdp on 8 GPUs" in out and "max_steps 1,000" in out


@pytest.mark.parametrize("words, message", (
    ("--world_size 0", "--world_size 0: give"), ("--mfu 2", "--mfu 2: give"), ("--mfu nan", "--mfu nan: give"),
    ("--batch_size 9 --world_size 2", "--batch_size 9 on --world_size 2, each in --grad_accum 1 parts: give a"),
    ("--batch_size 60 --grad_accum 15 --world_size 8", "multiple of 56"), ("--world_size 128", "multiple of 128"),
    ("--box 99", "box '99' is not"), ("--data maze --size 3", "size 3: give"),
    ("--model huginn --eval_only", "more than one of")))
def test_mistakes_are_told_in_one_line(words, message, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    if "eval_only" in words:
        monkeypatch.setattr(train, "checkpoint_path", lambda _: None)
    assert train.main([*words.split(), "--dry_run"]) == 2
    error = capsys.readouterr().err.splitlines()
    assert len(error) == 1 and message in error[0]
