"""Two processes against one: the same losses, checkpoints that either goes on from, and what happens when one fails.

    python -m pytest tests/test_ranks.py -q
"""

import glob
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict

import pytest
import torch

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)

import dnd  # noqa: E402
import hrm  # noqa: E402
import huginn  # noqa: E402
import modr  # noqa: E402
import train  # noqa: E402
from data import checkpoint  # noqa: E402
from data.checkpoint import read_checkpoint, read_tensors  # noqa: E402
from data.common import UserError  # noqa: E402
from data.ranks import Ranks  # noqa: E402

HRM = ("--model hrm --data sudoku --preset nano-6x6 --box 2x2 --clues 6 --n_embd 32 --n_head 2 --num_train 64 "
       "--num_val 16 --num_test 16 --halt_max_steps 4 --depths 1,2,4 --halt_exploration_prob 0").split()
PAPER_LIKE = ("--q_target bootstrap --loss stablemax --pos_encodings rope --puzzle_emb_ndim 32 --H_cycles 2 "
              "--L_cycles 2 --grad_updates 2 --ema 0.9 --grad_accum 2 --grad_clip 1").split()
ARITH = "--data arith --num_train 256 --num_val 16 --num_test 18 --digits 3 --max_new_tokens 6 --ema 0".split()
TINY = "--preset nano --n_embd 32 --n_head 2 --intermediate_size 48".split()
HUGINN = ["--model", "huginn", *ARITH, *TINY, *"--mean_recurrence 2 --mean_backprop_depth 1 --depths 1,4".split()]
QWEN3 = ["--model", "qwen3", *ARITH, *TINY, *"--n_layer 4 --n_kv_head 1 --head_dim 8".split()]
DND = ["--init_from", "bases/qwen3/last.pt",
       *"--model dnd --data arith --nested_first 1 --nested_last 2 --max_new_tokens 6 --ema 0".split()]
MODR = "--model modr --data arith --num_branches 3 --lora_rank 4 --depths 1,4 --max_new_tokens 6".split()
RUNS = {  # flags; the bases that go before
    "hrm": HRM, "hrm, paper-like": [*HRM, *PAPER_LIKE], "huginn": HUGINN,
    "huginn, in parts": [*HUGINN, "--grad_accum", "2", "--checkpoint_core", "--ema", "0.9"], "qwen3": QWEN3,
    "qwen3, packed": [*QWEN3, "--pack_to", "64"],
    "dnd": [*DND, *"--alpha 0.003 --lr 0.01 --warmup_steps 0".split()],  # none are selected at first, then some
    "dnd, nothing selected": [*DND, "--k_target", "0.001", "--alpha", "0"],
    "modr": [*MODR, "--init_from", "bases/huginn/last.pt"]}
ALWAYS = "--batch_size 8 --eval_batch_size 6 --dtype float32 --device cpu --eval_interval 6 --data_dir cache".split()


def call(flags):
    """train.py in this process, with Huginn's noise left out: each rank draws its own, which no single process has."""
    huginn.Huginn.initial_state = lambda self, e: torch.zeros_like(e)
    return train.main(list(map(str, flags)))


def launch(folder, *runs, processes=2):
    """Runs of train.py one after another, on processes of torchrun's that are started once. -> (code, their output)"""
    path = os.path.join(folder, "runs.json")
    with open(path, "w", encoding="utf-8") as file:
        json.dump([list(map(str, flags)) for flags in runs], file)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(processes), "--standalone"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, __file__, path], cwd=folder, env=environment, capture_output=True, text=True,
                          timeout=600)
    return done.returncode, done.stdout + done.stderr


def log(folder):
    with open(os.path.join(folder, "log.jsonl"), encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def whole(path):
    """A checkpoint with the tensors that lie in a folder beside it."""
    return read_tensors(path, read_checkpoint(path))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with every run on one process, "one/NAME", and on two with DDP and FSDP."""
    folder, before = str(tmp_path_factory.mktemp("ranks")), os.getcwd()
    os.chdir(folder)
    try:
        for name, flags in (("qwen3", QWEN3), ("huginn", HUGINN)):
            assert call([*flags, *ALWAYS, "--max_steps", 3, "--out_dir", f"bases/{name}"]) == 0
        for name, flags in RUNS.items():
            assert call([*flags, *ALWAYS, "--max_steps", 12, "--out_dir", f"one/{name}"]) == 0, name
        code, out = launch(folder, *([*flags, *ALWAYS, "--max_steps", 12, "--out_dir", f"{kind}/{name}", "--parallel",
                                      kind] for name, flags in RUNS.items() for kind in ("ddp", "fsdp")))
        assert code == 0, out[-3000:]
        yield folder
    finally:
        os.chdir(before)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize("name", RUNS)
def test_two_processes_have_the_losses_of_one(folder, name, kind):
    one, two = log(f"one/{name}"), log(f"{kind}/{name}")
    assert len(one) == len(two)
    steps = [line for line in one if "loss" in line]
    assert len(steps) == 12 and steps[0]["loss"] != steps[-1]["loss"]
    for a, b in zip(one, two):  # validations and tests too
        ours = {"elapsed", "tokens", "flops", "puzzles", "boundary_1", "boundary_2"}  # means over ranks, not of all
        for key in a.keys() - ours:
            same = a[key] == b[key] or a[key] == pytest.approx(b[key], rel=2e-4, abs=2e-5)
            assert same, (a["step"], key, a[key], b[key])
    last = [whole(f"{where}/{name}/last.pt") for where in ("one", kind)]
    assert last[0]["model"].keys() == last[1]["model"].keys()
    for key, value in last[0]["model"].items():
        torch.testing.assert_close(value, last[1]["model"][key], rtol=2e-2, atol=2e-4, msg=key)


def test_ranks_may_select_and_route_quite_differently(folder):
    """The first of two processes selects no token, the second all; each sends all its texts to a branch of its own."""
    runs = {name: [*RUNS[name], *ALWAYS, "--max_steps", 5] for name in ("dnd", "modr")}
    for processes, kinds in ((1, ["ddp"]), (2, ["ddp", "fsdp"])):
        flags = [["differ", *flags, "--parallel", kind, "--out_dir", f"differ/{processes}-{kind}/{name}"]
                 for name, flags in runs.items() for kind in kinds]
        code, out = launch(folder, *flags, processes=processes)
        assert code == 0, out[-3000:]
    for name in runs:
        one, *two = ([line["loss"] for line in log(f"differ/{how}/{name}") if "loss" in line]
                     for how in ("1-ddp", "2-ddp", "2-fsdp"))
        assert len(one) == 5 and all(losses == pytest.approx(one, rel=2e-4) for losses in two), name
    weights = [whole(f"differ/{how}/modr/last.pt")["model"] for how in ("1-ddp", "2-ddp", "2-fsdp")]
    for key, value in weights[0].items():
        torch.testing.assert_close(value, weights[1][key], rtol=2e-2, atol=2e-4, msg=key)
        torch.testing.assert_close(value, weights[2][key], rtol=2e-2, atol=2e-4, msg=key)
    assert {line["branch_0"] for line in log("differ/2-ddp/modr") if "loss" in line} == {0.5}
    assert {line["branch_1"] for line in log("differ/2-ddp/modr") if "loss" in line} == {0.5}


def test_depths_and_selections_differ_between_steps(folder):
    """What is compared above is stochastic depth, and steps that select nothing, everything and some."""
    assert len({line["num_steps"] for line in log("one/huginn") if "loss" in line}) > 2
    ratios = [line["ratio"] for line in log("one/dnd") if "loss" in line]
    assert 0 in ratios and any(0 < ratio < 1 for ratio in ratios)
    assert {line["ratio"] for line in log("one/dnd, nothing selected") if "loss" in line} == {0}


@pytest.mark.parametrize("name", ["hrm, paper-like", "huginn", "dnd", "modr"])
def test_runs_go_on_on_any_number_of_processes(folder, resumed, name):
    """Of two processes on one, of one on two, of two on two: the losses are those of one that goes on."""
    expected = [line for line in log(f"resumed/one-on-one/{name}") if "loss" in line]
    assert [line["step"] for line in expected] == list(range(1, 16))
    for how in ("ddp-on-one", "fsdp-on-one", "one-on-fsdp", "fsdp-on-ddp"):
        lines = [line for line in log(f"resumed/{how}/{name}") if "loss" in line]
        assert [line["step"] for line in lines] == list(range(1, 16)), how
        for a, b in zip(expected[12:], lines[12:]):
            assert a["loss"] == pytest.approx(b["loss"], rel=2e-3), (how, a["step"])


@pytest.fixture(scope="module")
def resumed(folder):
    """Copies of some runs, gone on with for three steps, in folders BEFORE-on-AFTER/NAME."""
    on_two = []
    for how in ("one-on-one", "ddp-on-one", "fsdp-on-one", "one-on-fsdp", "fsdp-on-ddp"):
        before, after = how.split("-on-")
        for name in ("hrm, paper-like", "huginn", "dnd", "modr"):
            model, where = RUNS[name][1 + RUNS[name].index("--model")], f"resumed/{how}/{name}"
            shutil.copytree(f"{before}/{name}", where)
            flags = ["--model", model, "--init_from", "resume", "--out_dir", where, "--max_steps", 15]
            if after == "one":
                assert call(flags) == 0, where
            else:
                on_two.append([*flags, "--parallel", after])
    code, out = launch(folder, *on_two)
    assert code == 0, out[-3000:]


def test_checkpoints_are_written_while_training_goes_on(folder):
    code, out = launch(folder, ["writes slowly", *HRM, *ALWAYS, "--eval_interval", 3, "--max_steps", 12, "--out_dir",
                                "two/slowly"])
    assert code == 0, out[-3000:]
    steps = [json.loads(line) for line in open("two/slowly/writes.jsonl", encoding="utf-8")]
    assert any(after > before for before, after in steps), "steps at the beginning and at the end of a write"
    assert whole("two/slowly/last.pt")["step"] == 12
    assert sorted(glob.glob("two/slowly/*.parts"))[1:] == ["two/slowly/last-12.parts"], "with one of best.pt's"


def test_a_run_that_is_killed_while_it_writes_goes_on_from_the_checkpoint_before(folder):
    flags = [*HRM, *ALWAYS, "--eval_interval", 3, "--max_steps", 12, "--out_dir", "two/dies"]
    code, out = launch(folder, ["dies writing", *flags])
    assert code != 0 and os.path.exists("two/dies/last-6.parts"), out[-3000:]
    assert whole("two/dies/last.pt")["step"] == 3
    assert call(["--model", "hrm", "--init_from", "resume", "--out_dir", "two/dies"]) == 0
    assert [line["step"] for line in log("two/dies") if "loss" in line] == list(range(1, 13))
    assert not glob.glob("two/dies/last-*.parts"), "what was half-written is gone"


def test_what_several_processes_saved_becomes_one_file(folder, capfd):
    shutil.copytree("fsdp/huginn", "two/parts")
    shutil.copytree("fsdp/huginn", "two/without", ignore=shutil.ignore_patterns("*.parts"))
    best = whole("two/parts/best.pt")["model"]
    assert call(["--model", "huginn", "--out_dir", "two/parts", "--export", "two/plain.pt"]) == 0
    assert not glob.glob("two/parts/best-*.parts") and glob.glob("two/parts/last-*.parts")
    for path in ("two/plain.pt", "two/parts/best.pt"):
        plain = torch.load(path, weights_only=True)["model"]
        assert plain.keys() == best.keys() and all(plain[name].equal(value) for name, value in best.items())
    assert call(["--model", "huginn", "--init_from", "two/plain.pt", "--sample", "001+002="]) == 0
    capfd.readouterr()
    assert call(["--model", "huginn", "--init_from", "two/without", "--sample", "1"]) == 2
    err = capfd.readouterr().err
    assert len(err.splitlines()) == 1 and "best-" in err and "is missing; copy it" in err
    for Model, name in ((huginn.Huginn, "huginn"), (hrm.HRM, "hrm"), (dnd.DND, "qwen3")):
        with pytest.raises(ValueError, match="in (a|the) folder.*--export FILE"):
            Model.load_pretrained(f"fsdp/{name}/last.pt")


def test_a_checkpoint_that_is_saved_anew_meanwhile_is_kept(folder, monkeypatch):
    shutil.copytree("fsdp/huginn", "two/meanwhile")
    path = "two/meanwhile/best.pt"

    def read(path, saved, original=read_tensors):
        torch.save(saved | {"parts": "best-99.parts"}, path)
        return original(path, saved)

    monkeypatch.setattr(checkpoint, "read_tensors", read)
    with pytest.raises(UserError, match="saved it anew"):
        checkpoint.to_one_file(path)
    assert read_checkpoint(path)["parts"] == "best-99.parts" and glob.glob("two/meanwhile/best-*.parts")


def test_weights_may_stay_in_cpu_memory(folder):
    """FSDP on one process: the losses are its own without, to the bit."""
    names = ("huginn, in parts", "modr")
    runs = [[*RUNS[name], *ALWAYS, "--max_steps", 12, "--offload", "--out_dir", f"offload/{name}"] for name in names]
    use = ["--model", "huginn", "--offload", "--sample", "001+002=", "--out_dir", "one/huginn"]
    code, out = launch(folder, *runs, use, processes=1)
    assert code == 0 and out.count("tokens/s, cache") > 1, out[-3000:]
    for name in names:
        one, two = ([line["loss"] for line in log(f"{where}/{name}") if "loss" in line] for where in ("one", "offload"))
        assert one == two


@pytest.mark.parametrize("name, model, sizes", [
    ("experts", "dnd", dict(num_experts=5, num_experts_per_tok=2, moe_intermediate_size=24, tie_embeddings=False)),
    ("dense", "dnd", dict(intermediate_size=48)), ("huginn", "huginn", {})])
def test_each_process_reads_its_share_of_a_folder(folder, name, model, sizes):
    save_file = pytest.importorskip("safetensors.torch").save_file
    os.makedirs(f"folders/{name}")
    if model == "dnd":
        config = dnd.DNDConfig(vocab_size=257, block_size=64, n_embd=32, n_layer=3, n_head=2, n_kv_head=1, head_dim=16,
                               **sizes)
        whole = dnd.DND(config)
        theirs = dict(model_type="qwen3", hidden_size=32, num_hidden_layers=3, num_attention_heads=2, head_dim=16,
                      num_key_value_heads=1, max_position_embeddings=64, tie_word_embeddings=config.tie_embeddings,
                      rope_theta=1e6, vocab_size=257, intermediate_size=48) | sizes
        state = {theirs: weight[index].clone() for theirs, (weight, index) in dnd._places(whole).items()}
    else:
        config = huginn.HuginnConfig(vocab_size=257, block_size=64, n_embd=32, n_head=2, intermediate_size=48)
        whole, theirs = huginn.Huginn(config), asdict(config) | dict(n_heads=2)
        state = {f"transformer.{name}": value for name, value in whole.state_dict().items()}
    with open(f"folders/{name}/config.json", "w", encoding="utf-8") as file:
        json.dump(theirs, file)
    for i in range(3):
        save_file(dict(list(state.items())[i::3]), f"folders/{name}/model-{i}.safetensors")
    code, out = launch(folder, ["fills", model, f"folders/{name}"])
    assert code == 0, out[-3000:]
    total, read = sum(value.numel() for value in state.values()), []
    for rank in range(2):
        found = torch.load(f"folders/{name}/rank{rank}.pt")
        read.append(found["read"])
        for key, value in whole.state_dict().items():
            assert found["state"][key].equal(value), key
    assert sum(read) == total and max(read) < 0.75 * total


@pytest.mark.parametrize("what, word", [("fails", "ZeroDivisionError"), ("hangs", "imeout|imed out"),
                                        ("is killed", "SIGKILL|Signal 9")])
def test_a_rank_that_fails_ends_all(folder, what, word):
    started = time.monotonic()
    flags = [*HRM, *ALWAYS, "--max_steps", 12, "--out_dir", f"two/{what}", "--rank_timeout", "0.25"]
    code, out = launch(folder, [what, *flags])
    assert code != 0 and re.search(word, out) and time.monotonic() - started < 120, out[-3000:]
    assert not os.path.exists(f"two/{what}/last.pt"), "it happened before the first validation"


def test_rows_are_dealt_out_to_any_number_of_ranks_and_parts():
    rows = {"z": torch.arange(24).view(12, 2), "data": {"x": torch.arange(12)}, "least": 0}
    def cut(value, pieces):
        return [{"z": z, "data": {"x": x}, "least": 0}
                for z, x in zip(value["z"].tensor_split(pieces), value["data"]["x"].tensor_split(pieces))]
    for before, parts, size in ((1, 1, 2), (2, 1, 1), (1, 2, 3), (3, 2, 2)):
        dealt = [Ranks(rank, size).deal(cut(rows, before), parts) for rank in range(size)]
        assert torch.cat([dealt[rank][part]["z"] for part in range(parts) for rank in range(size)]).equal(rows["z"])
        for mine in sum(dealt, []):
            assert mine["z"][:, 0].equal(2 * mine["data"]["x"]) and mine["least"] == 0
    assert Ranks(0, 2).deal([None, None], 3) == [None] * 3


def test_portions_of_all_ranks_are_the_whole():
    for number, size in ((7, 3), (3, 3), (8, 2)):
        ends = [Ranks(rank, size).portion(number) for rank in range(size)]
        assert [i for first, end in ends for i in range(first, end)] == list(range(number))
        assert all(first < end for first, end in ends)
    assert [Ranks(rank, 3).portion(2) for rank in range(3)] == [(0, 2)] * 3


def test_shares_of_all_ranks_are_the_batch():
    batch = {"inputs": torch.arange(14).view(7, 2), "labels": torch.arange(14).view(7, 2)}
    parts = [list(Ranks(rank, 3).shares(batch, 2)) for rank in range(3)]
    mine = [part[i] for i in range(2) for part in parts]
    scored = [share for share in mine if (share["labels"] != -100).any()]
    assert torch.cat([share["inputs"] for share in scored]).equal(batch["inputs"]) and all(len(p) == 2 for p in parts)
    assert [len(list(Ranks().shares(batch, 9))), len(list(Ranks().shares(batch, 2)))] == [7, 2], "no part is empty"
    alone = list(Ranks(1, 2).shares({"inputs": torch.ones(1, 4), "labels": torch.ones(1, 4)}, 1))
    assert (alone[0]["labels"] == -100).all(), "a rank without a row takes one that is not scored"


def test_a_checkpoint_is_used_by_one_process(folder):
    code, out = launch(folder, ["--model", "hrm", "--eval_only", "--out_dir", "ddp/hrm"])
    assert code == 0 and out.count("test split") == 1, out[-3000:]


def test_batches_that_do_not_divide_are_a_mistake(folder):
    code, out = launch(folder, [*HRM, *ALWAYS, "--batch_size", 9, "--out_dir", "two/nine"])
    assert code != 0 and "--batch_size 9 on 2 processes" in out and "a multiple of 2" in out


def trouble(what):
    """Make the second step of the second process do something bad, or let checkpoints be written slowly, or not."""
    done = []

    def step(trainer, original=train.Trainer.one_step):
        if os.environ["RANK"] == "1" and trainer.step == 1:
            if what == "fails":
                1 / 0
            if what == "is killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if what == "hangs":
                signal.signal(signal.SIGTERM, signal.SIG_DFL)  # else torchrun waits half a minute before it kills
                time.sleep(100)
        done.append(time.sleep(0.02 if "writ" in what else 0))
        return original(trainer)

    def save(tensors, original=checkpoint.dcp.save, **options):
        folder, before = options["checkpoint_id"], len(done)
        if what == "dies writing" and folder.endswith("last-6.parts"):
            os.makedirs(folder, exist_ok=True)
            os.kill(os.getpid(), signal.SIGKILL)
        original(tensors, **options)
        if what == "writes slowly":
            time.sleep(0.3)
            if os.environ["RANK"] == "0":
                with open(os.path.join(os.path.dirname(folder), "writes.jsonl"), "a", encoding="utf-8") as file:
                    file.write(json.dumps([before, len(done)]) + "\n")

    train.Trainer.one_step, checkpoint.dcp.save = step, save


def differ():
    """Of each batch of all processes, let the second half of the rows be selected, and take branch 1 instead of 0."""
    def second(rows):
        alone = os.environ["WORLD_SIZE"] == "1"
        return torch.arange(rows) >= rows // 2 if alone else torch.full((rows,), os.environ["RANK"] == "1")

    def select(nesting, j, x_v, is_token=None, original=dnd.Nesting.select):
        p, selected = original(nesting, j, x_v, is_token)
        return p, is_token & second(len(p))[:, None] if nesting.training else selected

    def route(model, *args, original=modr.MoDr.route, **options):
        chosen = original(model, *args, **options)
        if model.training:
            branch = second(len(chosen.branch)).long()[:, None].expand_as(chosen.branch).contiguous()
            chosen.branch, model.counts = branch, torch.bincount(branch[:, 0], minlength=3) * branch.shape[1]
        return chosen

    dnd.Nesting.select, modr.MoDr.route = select, route


def fill(model, path):
    """Read a folder into a model that FSDP shards; keep all of it, and how many numbers this process has read."""
    from torch.distributed.checkpoint import HuggingFaceStorageReader
    read = []

    def count(reader, file, request, planner, original=HuggingFaceStorageReader._process_read_request):
        read.append(request.lengths.numel())
        return original(reader, file, request, planner)

    HuggingFaceStorageReader._process_read_request = count
    ranks, Model = Ranks.join(torch.device("cpu"), torch.float32, 1, "fsdp"), train.MODELS[model][0]
    config = (dnd.DNDConfig if model == "dnd" else huginn.HuginnConfig)(**Model.pretrained_config(path))
    with torch.device("meta"):
        sharded = ranks.shard(Model(config))
    sharded.fill(path)
    state = ranks.whole(sharded.state_dict())
    torch.save({"state": state, "read": sum(read)}, f"{path}/rank{ranks.rank}.pt")


if __name__ == "__main__":  # one of the processes that `launch` has started
    torch.set_num_threads(1)
    with open(sys.argv[1], encoding="utf-8") as file:
        for flags in json.load(file):
            if flags[0] == "fills":
                fill(*flags[1:])
                continue
            if flags[0] == "differ":
                differ()
                del flags[0]
            if not flags[0].startswith("-"):
                trouble(flags.pop(0))
            if code := call(flags):
                sys.exit(code)
