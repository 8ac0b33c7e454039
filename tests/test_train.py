"""train.py as a user meets it: runs, resumes, signals, checkpoints, flags, solving.

    python -m pytest tests/test_train.py -q
"""

import contextlib
import importlib.util
import json
import os
import pickle
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time

import golden
import pytest
import torch

import dnd
import huginn
import train
from data import machine, sudoku
from data.show import write_text
from data.tokenizer import byte_tokenizer, huggingface_tokenizer
from hrm import HRM, PRESETS

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TINY = ("--model hrm --data sudoku --preset nano-6x6 --box 2x2 --clues 6 --n_embd 32 --n_head 2 --batch_size 8 "
        "--num_train 64 --num_val 16 --num_test 16 --halt_max_steps 4 --depths 1,2,4 --eval_interval 20").split()
PAPER_LIKE = ("--q_target bootstrap --loss stablemax --pos_encodings rope --puzzle_emb_ndim 32 --H_cycles 2 "
              "--L_cycles 2 --grad_updates 2").split()
PUZZLE = "1234" + "3412" + "2143" + "43.1"  # one blank left


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def run(tmp_path, cache, monkeypatch, capsys):
    """Call the script in an empty folder: run(*flags) -> (exit code, standard output, standard error)."""
    monkeypatch.chdir(tmp_path)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def call(*flags, tiny=True):
        code = train.main([*(TINY if tiny else []), "--data_dir", str(cache), *map(str, flags)])
        out, err = capsys.readouterr()
        lines = [line.strip() for line in re.split(r"(?:[\r\n]|\x1b\[A)+", err)]  # the progress bar's are left out
        return code, out, "\n".join(line for line in lines if line.startswith(("train.py", "warning", "Trace")))

    yield call
    for number, handler in handlers.items():  # a training sets its own
        signal.signal(number, handler)


def fails(result, *words):
    """The user's mistake ended in exit code 2 and one line that has these words."""
    code, _, err = result
    assert code == 2 and err.count("\n") == 0 and err.startswith("train.py: error: "), result
    for word in words:
        assert str(word) in err, err


def log(folder):
    with open(os.path.join(folder, "log.jsonl"), encoding="utf-8") as file:
        return [json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} in the log")) for line in file]


def losses(folder):
    return {line["step"]: line["loss"] for line in log(folder) if "loss" in line}


def same(a, b, where=""):
    """Equal to the last bit, through dicts and lists; times may differ."""
    if isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a.keys() - {"elapsed", "config"}:
            same(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b)):
            same(x, y, f"{where}[{i}]")
    else:
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b, where


# ---- analyses


STUDY = ("--max_steps", 2, "--analysis", "modules", "--dtype", "float32")


def test_a_study_trains_what_it_compares_once(run, monkeypatch):
    drawn = bool(importlib.util.find_spec("matplotlib"))  # which is optional
    code, out, err = run(*STUDY, *(("--plot", "new/study.png") if drawn else ()))
    assert code == 0 and os.path.exists("new/study.png") == drawn, err
    names = [line.split()[0] for line in out[out.index("  network"):].splitlines()[1:] if line.startswith("  ")]
    assert names == [*["hrm"] * 3, "hrm-1-segment", *["one-module"] * 3, "direct"]
    saved = {name: train.read_checkpoint(f"out/hrm-sudoku-modules/{name}/last.pt") for name in dict.fromkeys(names)}
    assert {name: c["step"] for name, c in saved.items()} == dict.fromkeys(saved, 2)
    assert saved["one-module"]["model_config"]["L_layers"] == 0
    assert saved["direct"]["model_config"]["halt_max_steps"] == 1
    again = run(*STUDY)
    assert again[0] == 0 and "network 1 of" not in again[1]
    assert again[1].strip() == out[out.index("  network"):].split("wrote")[0].strip()
    fails(run(*STUDY, "--seed", 1), "out/hrm-sudoku-modules/hrm/last.pt", "--seed 0, not 1", "--out_dir")
    fails(run(*STUDY, "--n_embd", 64), "--n_embd 32, not 64")
    fails(run(*STUDY, "--clues", 7), "--clues 6, not 7")


def test_a_study_goes_on_where_it_was_stopped(run, monkeypatch):
    step = train.Trainer.one_step

    def stopped_in_the_second(trainer):
        if trainer.folder.endswith("hrm-1-segment") and trainer.step == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(trainer)

    with monkeypatch.context() as patch:
        patch.setattr(train.Trainer, "one_step", stopped_in_the_second)
        code, out, _ = run(*STUDY, "--max_steps", 3, "--out_dir", "s")
    assert code == 0 and "SIGTERM: saved at step 2" in out and not os.path.exists("s/one-module")
    code, out, _ = run(*STUDY, "--max_steps", 3, "--out_dir", "s")
    assert code == 0 and "network 1 of" not in out and "going on at step 2" in out and "  network" in out


def test_a_study_that_was_killed_before_it_saved_begins_anew(run):
    os.makedirs("s/hrm")
    open("s/hrm/log.jsonl", "w").close()
    assert run(*STUDY, "--out_dir", "s")[0] == 0
    fails(run(*STUDY, "--out_dir", "s/hrm"), "s/hrm is the folder of a run")
    fails(run(*STUDY, "--init_from", "s/hrm"), "--init_from s/hrm", "from scratch")


def test_a_copied_run_uses_the_cache_of_where_it_is(run):
    assert run("--max_steps", 2, "--out_dir", "a", "--data_dir", "gone")[0] == 0
    assert train.main(["--eval_only", "--out_dir", "a"]) == 0 and not os.path.exists("data/cache")
    shutil.rmtree("gone")
    assert train.main(["--eval_only", "--out_dir", "a"]) == 0 and os.path.isdir("data/cache")
    assert not os.path.exists("gone")


def test_a_run_on_other_puzzles_is_told_at_once(run):
    assert run("--max_steps", 2, "--out_dir", "a")[0] == 0
    for flags in (["--eval_only"], ["--analysis", "act"], ["--solve", "x"]):
        fails(run("--data", "maze", "--out_dir", "a", *flags, tiny=False), "--data sudoku, not maze")


def test_analyses_of_a_run(run):
    assert run("--max_steps", 3, "--out_dir", "a")[0] == 0
    assert run("--max_steps", 3, "--out_dir", "r", *"--L_layers 0 --H_cycles 4 --grad_updates 4".split())[0] == 0
    for name in train.thinking.ANALYSES:
        code, out, err = run("--analysis", name, "--out_dir", "a", "--depths", "1,4", tiny=False)
        assert code == 0 and len(out.splitlines()) > 5, (name, err)
    code, out, err = run("--analysis", "residual", "--out_dir", "a", "--baseline", "r", tiny=False)
    assert code == 0 and "recurrent" in out, err
    fails(run("--analysis", "residual", "--out_dir", "a", "--baseline", "a/best.pt", tiny=False), "--L_layers 0")
    fails(run("--analysis", "residual", "--out_dir", "a", "--baseline", "nowhere.pt", tiny=False), "nowhere.pt")
    fails(run("--analysis", "act", "--out_dir", "a", "--baseline", "r/best.pt", tiny=False), "--analysis residual")
    fails(run("--analysis", "act", "--out_dir", "a", "--plot", "x.jpg", tiny=False), "x.jpg", ".png")
    fails(run("--analysis", "nothing", tiny=False), "nothing", "residual")
    fails(run("--analysis", "act", "--eval_only", "--out_dir", "a", tiny=False), "more than one")
    with pytest.raises(train.UserError, match="made for --model hrm"):
        train.check_uses(train.TrainConfig(model="huginn", analysis="act"), [])


# ---- runs


@pytest.mark.parametrize("flags", [["--dtype", "float32"], ["--ema", "0.9", "--dtype", "bfloat16"],
                                   [*PAPER_LIKE, "--ema", "0", "--dtype", "float32"], ["--dtype", "float16"]])
def test_40_steps_equal_20_and_a_resume_to_the_last_bit(run, flags):
    assert run(*flags, "--max_steps", 40, "--out_dir", "straight")[0] == 0
    assert run(*flags, "--max_steps", 20, "--out_dir", "halves")[0] == 0
    assert run("--init_from", "resume", "--max_steps", 40, "--out_dir", "halves", tiny=False)[0] == 0
    straight, halves = (train.read_checkpoint(f"{folder}/last.pt") for folder in ("straight", "halves"))
    same(straight, halves)
    assert losses("straight") == losses("halves") and sorted(losses("halves")) == list(range(1, 41))
    assert ("scale" in straight["scaler"]) == ("float16" in flags), "float16 needs the state of its loss scaling"


@pytest.mark.parametrize("old,new", [("float32", "float16"), ("float16", "float32"), ("bfloat16", "float16")])
def test_a_run_goes_on_in_another_precision(run, old, new):
    """A checkpoint goes from a card with bfloat16 to one without."""
    assert run("--max_steps", 3, "--dtype", old, "--out_dir", "a")[0] == 0
    assert run("--init_from", "resume", "--out_dir", "a", "--max_steps", 6, "--dtype", new, tiny=False)[0] == 0
    assert sorted(losses("a")) == list(range(1, 7))


def test_a_run_says_what_it_does_and_exact_accuracy_comes_first(run):
    code, out, _ = run("--max_steps", 20)
    assert code == 0
    for words in ("preset nano-6x6", "parameters", "torch " + torch.__version__, "64 original puzzles", "sha256",
                  "run folder out/hrm-sudoku", "segment 1"):
        assert words in out, words
    table = out[out.index("test split, best"):]
    assert table.index("exact_accuracy") < table.index(" accuracy")
    rows = re.findall(r"^ +(\d+)(?: +[\d.]+){3}$", table, re.MULTILINE)
    assert [int(depth) for depth in rows][:3] == [1, 2, 4]
    steps = [line for line in log("out/hrm-sudoku") if "loss" in line]
    keys = list(steps[0])
    assert keys.index("exact_accuracy") < keys.index("accuracy") and {"step", "elapsed", "lr"} <= set(keys)


def test_profile_writes_a_trace_of_so_many_steps(run):
    assert run("--max_steps", 14, "--profile", 2)[0] == 0
    with open("out/hrm-sudoku/trace.json", encoding="utf-8") as file:
        events = [event["name"] for event in json.load(file)["traceEvents"] if "name" in event]
    assert {name for name in events if name.startswith("ProfilerStep#")} == {"ProfilerStep#10", "ProfilerStep#11"}
    fails(run("--max_steps", 2, "--profile", -3), "--profile -3")


def test_run_folders_are_never_mixed(run, tmp_path):
    assert run("--max_steps", 2)[0] == 0
    code, out, _ = run("--max_steps", 2)
    assert code == 0 and "out/hrm-sudoku holds a run already, so this one goes to out/hrm-sudoku-2" in out
    fails(run("--max_steps", 2, "--out_dir", "out/hrm-sudoku"), "not an empty folder", "--init_from resume")
    code, out, _ = run("--eval_only", tiny=False)
    assert code == 0 and "from out/hrm-sudoku-2/best.pt" in out
    code, out, _ = run("--eval_only", "--init_from", "out/hrm-sudoku", tiny=False)
    assert code == 0 and "from out/hrm-sudoku/best.pt" in out
    code, out, _ = run("--init_from", "resume", "--max_steps", 3, tiny=False)
    assert code == 0 and "run folder out/hrm-sudoku-2, going on at step 2" in out
    (tmp_path / "empty").mkdir()
    assert run("--max_steps", 1, "--out_dir", "empty")[0] == 0


@pytest.mark.parametrize("use", [["--eval_only"], ["--solve", PUZZLE]])
def test_resume_may_be_said_where_weights_are_only_used(run, use):
    assert run("--max_steps", 2)[0] == 0
    code, out, err = run("--init_from", "resume", *use, tiny=False)
    assert code == 0 and "from out/hrm-sudoku/" in out, err


def test_running_out_of_memory_is_one_line(run, monkeypatch):
    def step(self, batch, carry=None):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB\nmore")

    monkeypatch.setattr(HRM, "step", step)
    fails(run("--max_steps", 1), "out of memory", "--batch_size")


def test_folders_that_cannot_be_made_are_one_line(run, tmp_path):
    (tmp_path / "file").write_text("", encoding="utf-8")
    fails(run("--max_steps", 1, "--out_dir", "file/x"), "file/x")
    fails(run("--max_steps", 1, "--data_dir", "file/x"), "file/x")


def test_training_starts_from_given_weights(run):
    assert run("--max_steps", 5, "--out_dir", "a")[0] == 0
    assert run("--init_from", "a/best.pt", "--max_steps", 1, "--lr", 0, "--ema", 0, "--out_dir", "b")[0] == 0
    old, new = (train.read_checkpoint(path)["model"] for path in ("a/best.pt", "b/last.pt"))
    same(old, new)
    fails(run("--init_from", "resume", "--out_dir", "c", tiny=False), "c")


def test_published_names_are_read(run):
    assert run("--max_steps", 2, *PAPER_LIKE, "--out_dir", "a", "--ema", 0)[0] == 0
    state = train.read_checkpoint("a/best.pt")["model"]
    theirs = {f"_orig_mod.model.inner.{k}".replace("embed_tokens.weight", "embed_tokens.embedding_weight"): v
              for k, v in state.items()}
    torch.save(theirs, "published.pt")
    code, out, _ = run(*PAPER_LIKE, "--seq_len", 16, "--eval_only", "--init_from", "published.pt")
    ours = run("--eval_only", "--init_from", "a", tiny=False)[1]
    table, ours = (text[text.index("\ntest split"):] for text in (out, ours))
    assert code == 0 and "exact_accuracy" in table and table == ours
    fails(run("--eval_only", "--init_from", "published.pt"), "published.pt", "seq_len 900", "16")


def test_a_published_file_is_used_with_the_papers_cycles_on_every_machine(run):
    """What its shapes cannot tell must not come from the preset of the machine: on a CPU that is nano, with 1 x 1."""
    model = HRM(train.dataclasses.replace(PRESETS["paper"], n_embd=64, H_layers=1, L_layers=1, puzzle_emb_ndim=64))
    torch.save({f"model.inner.{k}": v for k, v in model.state_dict().items()}, "published.pt")
    flags = ["--device", "cpu", "--init_from", "published.pt"]
    code, out, _ = run("--solve", "." * 81, "--box", "3x3", *flags, tiny=False)
    assert code == 0 and '"H_cycles": 2, "L_cycles": 2' in out and '"q_target": "bootstrap"' in out, out


def test_a_loss_that_is_not_finite_ends_the_run_and_keeps_the_checkpoint(run, monkeypatch):
    step = HRM.step

    def broken(self, batch, carry=None):
        loss, metrics, carry = step(self, batch, carry)
        broken.calls += 1
        if broken.calls > 25:
            metrics["loss"] = (metrics["loss"][0] * float("nan"), metrics["loss"][1])
        return loss, metrics, carry

    broken.calls = 0
    monkeypatch.setattr(HRM, "step", broken)
    broken_run = run("--max_steps", 60, "--out_dir", "a", "--eval_interval", 6)  # the next save would be at step 30
    fails(broken_run, "loss of step 26 is nan", os.path.join("a", "last.pt"), "--lr")
    assert train.read_checkpoint("a/last.pt")["step"] == 24
    monkeypatch.setattr(HRM, "step", step)
    assert run("--init_from", "resume", "--out_dir", "a", "--max_steps", 30, tiny=False)[0] == 0
    assert sorted(losses("a")) == list(range(1, 31))


def test_an_absurd_learning_rate_is_told(run):
    fails(run("--max_steps", 60, "--lr", 1e38, "--out_dir", "a"), "loss of step", "nothing was saved yet", "--lr")


# ---- checkpoints that are not


@pytest.mark.parametrize("kind", ["missing", "empty", "text", "truncated", "list", "other weights", "code",
                                  "saved code", "odd shapes", "settings alone"])
@pytest.mark.parametrize("flag", ["--eval_only", "--max_steps=1"])
def test_a_file_that_is_no_checkpoint_is_one_line(run, tmp_path, kind, flag):
    path = tmp_path / "x.pt"
    torch.save({"a": torch.zeros(9999)}, path)
    whole = path.read_bytes()
    if kind == "missing":
        path.unlink()
    elif kind in ("empty", "text", "truncated"):
        path.write_bytes({"empty": b"", "text": b"hello\n", "truncated": whole[: len(whole) // 2]}[kind])
    elif kind == "list":
        torch.save([1, 2], path)
    elif kind == "other weights":
        torch.save(torch.nn.Linear(2, 2).state_dict(), path)
    elif kind == "saved code":
        torch.save({"model": Harmful(str(tmp_path / "ran"))}, path)
    elif kind == "odd shapes":
        names = ("embed_tokens", "H_level.layers.0.mlp.down_proj", "L_level.layers.0.mlp.down_proj")
        torch.save({f"{name}.weight": torch.zeros(3) for name in names}, path)
    elif kind == "settings alone":
        torch.save({"model_config": {}}, path)
    else:
        path.write_bytes(pickle.dumps(Harmful(str(tmp_path / "ran")), protocol=2))
    fails(run(flag, "--init_from", path), path)
    assert not (tmp_path / "ran").exists()


class Harmful:
    """Unpickling this creates a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_a_truncated_run_is_one_line_wherever_it_ends(run, tmp_path):
    assert run("--max_steps", 1, "--out_dir", "a")[0] == 0
    path = os.path.join("a", "last.pt")
    whole = (tmp_path / path).read_bytes()
    for end in [*range(0, len(whole) - 1, len(whole) // 8), len(whole) - 1]:
        (tmp_path / path).write_bytes(whole[:end])
        fails(run("--init_from", "resume", "--out_dir", "a", tiny=False), path)


def test_a_folder_without_a_checkpoint_is_one_line(run, tmp_path):
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "last.pt.123.tmp").write_bytes(b"half")  # what a killed run may leave
    for flags in (["--eval_only", "--out_dir", "bare"], ["--solve", PUZZLE, "--out_dir", "bare"],
                  ["--init_from", "resume", "--out_dir", "bare"], ["--init_from", "resume", "--out_dir", "nowhere"],
                  ["--init_from", "bare"]):
        fails(run(*flags), flags[-1])


def test_a_checkpoint_must_fit_the_data(run):
    assert run("--max_steps", 1, "--out_dir", "a")[0] == 0
    fails(run("--init_from", "a", "--eval_only", "--box", "2x3", "--clues", 14, tiny=False), "vocab_size 6", "has 8")
    fails(run("--init_from", "a", "--eval_only", "--num_puzzle_identifiers", 7, tiny=False), "7", "1")
    fails(run("--init_from", "a", "--eval_only", "--n_embd", 64, tiny=False), "64", "32")


def test_a_checkpoint_must_fit_the_boxes(run):
    """2x3 and 3x2 have the same cells and digits, but other boxes."""
    six = ["--box", "2x3", "--clues", 20, "--num_test", 8]
    assert run(*six, "--max_steps", 1, "--out_dir", "a")[0] == 0
    fails(run("--init_from", "a", "--eval_only", "--box", "3x2", tiny=False), "2", "3", "--box")


def test_weights_alone_are_not_resumed(run):
    assert run("--max_steps", 1, "--out_dir", "a")[0] == 0
    os.replace("a/best.pt", "a/last.pt")
    fails(run("--init_from", "resume", "--out_dir", "a", tiny=False), "weights only", "--init_from a/last.pt")


# ---- signals


def start(folder, cache, *flags):
    """A training in a process of its own, running its steps."""
    command = [sys.executable, os.path.join(ROOT, "train.py"), *TINY, "--data_dir", str(cache), "--out_dir", "a",
               "--max_steps", "100000", *flags]
    heed = (lambda: signal.signal(signal.SIGINT, signal.default_int_handler)) if os.name == "posix" else None
    process = subprocess.Popen(command, cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               preexec_fn=heed, env={**os.environ, "OMP_NUM_THREADS": "1"})
    path, began = os.path.join(folder, "a", "log.jsonl"), time.time()
    while time.time() < began + 60 and process.poll() is None:
        if os.path.exists(path) and os.path.getsize(path) > 5000 and os.path.getmtime(path) > began:
            return process
        time.sleep(0.05)
    process.kill()
    pytest.fail(f"did not start: {process.communicate()}")


@pytest.mark.skipif(os.name != "posix", reason="sends POSIX signals")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_ends_with_0(tmp_path, cache, run, number):
    process = start(tmp_path, cache)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    step = int(re.search(number.name + r": saved at step (\d+); go on with --model hrm --init_from resume", out)[1])
    assert run("--init_from", "resume", "--out_dir", "a", "--max_steps", step + 2, tiny=False)[0] == 0
    assert sorted(losses("a")) == list(range(1, step + 3))


@pytest.mark.skipif(os.name != "posix", reason="sends POSIX signals")
def test_a_run_killed_twice_at_random_ends_with_the_weights_of_one_that_was_not(tmp_path, cache, run):
    for flags in ([], ["--init_from", "resume"]):
        process = start(tmp_path, cache, "--eval_interval", "2", *flags)
        delay = random.uniform(0, 0.5)
        print(f"killed {delay} s later")  # shown if the test fails
        time.sleep(delay)
        process.kill()
        process.communicate(timeout=60)
        step = train.read_checkpoint("a/last.pt")["step"]
    end = ["--max_steps", step + 5]
    assert run("--init_from", "resume", "--out_dir", "a", *end, tiny=False)[0] == 0
    assert [line["step"] for line in log("a") if "loss" in line] == list(range(1, step + 6))
    assert run(*end, "--out_dir", "b", "--eval_interval", 10000)[0] == 0
    killed, straight = (train.read_checkpoint(f"{folder}/last.pt") for folder in "ab")
    for name in ("model", "ema", "optimizers", "carries", "rng", "step"):
        same(killed[name], straight[name], name)


def on_step(monkeypatch, number, act):
    """Have `act` called right after the metrics of step `number` were looked at, or could have been."""
    def update(self, n=1):
        on_step.done += 1
        if on_step.done == number:
            act()

    on_step.done = 0
    monkeypatch.setattr(train.tqdm, "update", update)


@pytest.mark.parametrize("step", [10, 13])  # the metrics are looked at every 10 steps
def test_a_signal_at_any_moment_loses_no_line_of_the_log(run, monkeypatch, step):
    on_step(monkeypatch, step, lambda: signal.raise_signal(signal.SIGTERM))
    code, out, _ = run("--max_steps", 60, "--out_dir", "a")
    assert code == 0 and f"saved at step {step};" in out
    assert sorted(losses("a")) == list(range(1, step + 1))


def test_a_second_signal_ends_at_once(run, monkeypatch):
    on_step(monkeypatch, 3, lambda: [signal.raise_signal(signal.SIGINT) for _ in range(2)])
    fails(run("--max_steps", 60, "--out_dir", "a"), "interrupted")


def test_a_signal_in_the_final_evaluation_keeps_the_run(run, monkeypatch):
    monkeypatch.setattr(train.Trainer, "report", lambda self: signal.raise_signal(signal.SIGINT))
    code, out, _ = run("--max_steps", 2, "--out_dir", "a")
    assert code == 0 and "--eval_only --out_dir a" in out and train.read_checkpoint("a/last.pt")["step"] == 2


# ---- flags


@pytest.mark.parametrize("flags,words", [
    (["--batchsize", "3"], ["--batchsize", "--batch_size"]), (["--lr", "fast"], ["--lr", "fast"]),
    (["--loss", "hinge"], ["hinge", "stablemax", "softmax"]), (["--preset", "huge"], ["huge", "nano", "paper"]),
    (["--device", "abacus"], ["abacus", "cpu"]), (["--depths", "0,x"], ["0,x", "1,2,4"]), (["stray"], ["stray"]),
    (["--n_head", "5"], ["n_embd 32", "n_head 5"]), (["--grad_updates", "9"], ["9", "2"]), (["--box", "4x9"], ["4x9"]),
    (["--compile", "perhaps"], ["perhaps"]), (["--seed", str(2**32)], ["seed"]), (["--device", "meta"], ["meta"]),
    (["--weight_decay", "nan"], ["weight_decay nan"]), (["--max_steps", "-5"], ["max_steps -5"]),
    (["--time_limit", "nan"], ["time_limit nan"]), (["--solve", ""], ["--solve is empty"]),
    (["--batch_size", "0"], ["batch_size 0"]), (["--ema", "2"], ["ema 2"]),
    (["--num_val", "0"], ["--num_val"]), (["--halt_max_steps", "0"], ["halt_max_steps 0"]),
    (["--seed", "-1"], ["seed", "-1"]), (["--expansion", "0"], ["expansion", "0"]),
    (["--puzzle_emb_ndim", "-1"], ["puzzle_emb_ndim", "-1"]), (["--learning_rate", "1"], ["--learning_rate"]),
    (["--max_steps", "1.5"], ["--max_steps", "1.5"]), (["--lr"], ["--lr"]), (["--box", "3x3", "--clues", "99"], ["99"]),
    (["--dtype", "int8"], ["int8", "bfloat16"]),
    (["--data", "chess"], ["chess", "sudoku"]), (["--model", "x"], ["hrm"]),
    (["--data_file", "nowhere.csv"], ["nowhere.csv"]), (["--eval_only"], ["no run of hrm"]),
    (["--sample", "x"], ["no run"]),
    (["--init_from", "resume"], ["no run"]), (["--solve", PUZZLE], ["no run"])])
def test_a_mistake_in_a_flag_is_one_line(run, flags, words):
    fails(run(*flags), *words)


def test_every_field_is_a_flag_and_help_shows_the_values_in_force(capsys):
    with pytest.raises(SystemExit) as ended:
        train.main(["--model", "hrm", "--data", "sudoku", "--preset", "nano-6x6", "--help"])
    text = capsys.readouterr().out
    assert ended.value.code == 0
    for config in (train.TrainConfig, *train.MODELS["hrm"][1::2], train.DATA["sudoku"][0]):
        if isinstance(config, type):
            assert all(f"--{name} " in text for name in config.__dataclass_fields__), config
    assert str(train.RECIPES["hrm", "nano-6x6"]["max_steps"]) in text and not torch.cuda.is_initialized()


def test_help_leaves_a_gpu_alone_and_shows_its_preset(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in ("init", "_lazy_init"):
        monkeypatch.setattr(torch.cuda, name, lambda: pytest.fail("CUDA is initialised"))
    with pytest.raises(SystemExit) as ended:
        train.main(["--help"])
    assert ended.value.code == 0 and re.search(r"--preset STR\b.*?\(now:\s+paper\)", capsys.readouterr().out, re.DOTALL)


def test_help_is_quick():
    """Under 3 s of CPU time; three times that here, since other programs slow it down."""
    before = os.times()
    result = subprocess.run([sys.executable, os.path.join(ROOT, "train.py"), "--help"], capture_output=True)
    after = os.times()
    seconds = sum(getattr(after, name) - getattr(before, name) for name in ("children_user", "children_system"))
    print(f"{seconds:.1f} s of CPU time")
    assert result.returncode == 0 and seconds < 9


def test_no_arguments_show_examples(capsys):
    assert train.main([]) == 0
    assert capsys.readouterr().out.count("python train.py") == 8


def test_dashes_are_underscores(run):
    assert run("--max-steps", 1, "--out-dir", "a")[0] == 0 and os.path.exists("a/last.pt")


def test_every_preset_has_a_recipe_of_known_fields():
    for (model, preset), recipe in train.RECIPES.items():
        configs = [train.TrainConfig, train.MODELS[model][1], *(train.DATA[name][0] for name in train.USES[model])]
        fields = set().union(*(config.__dataclass_fields__ for config in configs))
        assert preset in train.MODELS[model][2] and recipe.keys() <= fields
    for (model, preset, data), recipe in train.DATA_RECIPES.items():
        configs = [train.TrainConfig, train.MODELS[model][1], train.DATA[data][0]]
        assert (model, preset) in train.RECIPES and data in train.USES[model]
        assert recipe.keys() <= set().union(*(config.__dataclass_fields__ for config in configs))
    presets = {model: names for model, (_, _, names, _) in train.MODELS.items()}
    assert {(model, preset) for model, names in presets.items() for preset in names} == set(train.RECIPES)
    assert all(name in presets[model] for model, name in train.ON_CUDA.items())


@pytest.mark.skipif(not os.path.exists(os.path.join(ROOT, "README.md")), reason="no README beside the tests")
def test_the_commands_of_the_readme_are_understood(monkeypatch):
    """Every flag and value; the files and runs that they name need not be here."""
    with open(os.path.join(ROOT, "README.md"), encoding="utf-8") as file:
        commands = re.findall(r"^(?:\s+\$? *|.*`)python train\.py +([^`\n]*)", file.read(), flags=re.MULTILINE)
        file.seek(0)
        launches = re.findall(r"^ +torchrun +(.*?) train\.py +(.*)$", file.read(), flags=re.MULTILINE)
    assert len(commands) >= 2 and len(launches) >= 2
    monkeypatch.setattr(train, "checkpoint_path", lambda known: None)
    for command in commands:
        words = shlex.split(command, comments=True)
        if "--help" not in words:
            train.parse(words)
    for launcher, command in launches:
        counts = dict(re.findall(r"--(nnodes|nproc_per_node) (\d+)", launcher))
        c, *_ = train.parse(shlex.split(command, comments=True))
        train.budget.check_budget(c, int(counts.get("nnodes", 1)) * int(counts["nproc_per_node"]), c.mfu)


def test_the_commands_of_the_usage_are_understood(monkeypatch):
    monkeypatch.setattr(train, "checkpoint_path", lambda known: None)
    for command in re.findall(r"^  python train\.py (.*?)(?:  .*)?$", train.USAGE, flags=re.MULTILINE):
        if "--help" not in command:
            train.parse(command.split())


# ---- machine


def test_a_cpu_without_bfloat16_takes_float32(run, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {})
    code, out, _ = run("--max_steps", 1, "--out_dir", "a")
    assert code == 0 and "cpu in float32" in out


def test_a_card_without_bfloat16_takes_scaled_float16(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: False)
    for name in ("auto", "bfloat16"):
        dtype, reason = machine.pick_dtype(name, torch.device("cuda"))
        assert dtype == torch.float16 and "float16 with loss scaling" in reason


class FailsBackward(torch.autograd.Function):
    """A compiled block whose backward pass cannot be built."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise RuntimeError("no linker found\nand more")


@pytest.mark.parametrize("when", ["call", "first forward", "first backward", "validation"])
def test_a_compiler_that_fails_only_costs_speed(run, monkeypatch, when):
    def fail(*args, **kwargs):
        raise RuntimeError("no linker found\nand more")

    def compile(self, *args, **kwargs):
        def compiled(*inputs):
            if when == "first backward":
                return FailsBackward.apply(self.forward(*inputs))
            return fail() if when == "first forward" or not self.training else self.forward(*inputs)

        if when == "call":
            fail()
        self._compiled_call_impl = compiled

    flags = ["--max_steps", 3, "--ema", 0, "--halt_exploration_prob", 0]
    monkeypatch.setattr(torch.nn.Module, "compile", compile)
    code, _, err = run(*flags, "--compile", "--out_dir", "a")
    assert code == 0 and err.count("warning: --compile failed (RuntimeError: no linker found)") == 1
    assert run(*flags, "--out_dir", "b")[0] == 0 and losses("a") == losses("b")


def test_a_run_saves_between_validations(run, monkeypatch):
    def step(trainer, original=train.Trainer.one_step):
        if trainer.step == 5:
            raise ZeroDivisionError
        return original(trainer)

    for name, minutes in (("a", 0), ("b", 30)):
        with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
            patch.setattr(train.Trainer, "one_step", step)
            run("--max_steps", 9, "--save_interval", minutes, "--out_dir", name)
    assert train.read_checkpoint("a/last.pt")["step"] == 5 and not os.path.exists("b/last.pt")
    code, out, _ = run("--init_from", "resume", "--out_dir", "a", "--grad_accum", 2)
    assert code == 0 and "going on at step 5" in out and len(losses("a")) == 9


def test_a_full_disk_loses_nothing(run, monkeypatch):
    assert run("--max_steps", 2, "--out_dir", "a")[0] == 0

    def save(content, file, original=torch.save):
        original(content, file)
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 449152 vs 449048\nframe #0")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", save)
        fails(run("--init_from", "resume", "--out_dir", "a", "--max_steps", 4), "could not write a/", "disk full")
    assert train.read_checkpoint("a/last.pt")["step"] == 2 and not [name for name in os.listdir("a") if "tmp" in name]


def test_a_trace_that_was_not_written_is_told(run):
    assert "--profile 3 wrote nothing; it takes 13 steps" in run("--max_steps", 4, "--profile", 3, "--out_dir", "a")[1]
    assert run("--max_steps", 14, "--profile", 3, "--out_dir", "b")[0] == 0 and os.path.exists("b/trace.json")


def test_text_files_name_their_encoding(tmp_path):
    env = {**os.environ, "PYTHONWARNDEFAULTENCODING": "1", "OMP_NUM_THREADS": "1"}
    flags = ["--max_steps", "2", "--data_dir", str(tmp_path / "cache")]
    command = [sys.executable, os.path.join(ROOT, "train.py"), *TINY, *flags]
    result = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, encoding="utf-8")
    ours = re.findall(re.escape(ROOT) + r"/(?:data/)?\w+\.py:\d+: EncodingWarning", result.stderr)
    assert result.returncode == 0 and not ours, result.stderr


# ---- language models

HUGINN = ("--model huginn --data arith --preset nano --n_embd 32 --n_head 2 --intermediate_size 48 --batch_size 8 "
          "--num_train 256 --num_val 16 --num_test 16 --depths 1,2,4 --eval_interval 20 --mean_recurrence 2 "
          "--mean_backprop_depth 1 --digits 3 --max_new_tokens 12 --ema 0").split()
TEXT = ("--model huginn --data text --preset nano --n_embd 32 --n_head 2 --intermediate_size 48 --batch_size 8 "
        "--block_size 64 --depths 1,2 --mean_recurrence 2 --mean_backprop_depth 1 --max_new_tokens 12").split()
SAMPLE = ["--model", "huginn", "--sample", "012+034="]


@pytest.fixture
def lm(run):
    """As run, for a tiny Huginn."""
    return lambda *flags: run(*HUGINN, *flags, tiny=False)


@pytest.mark.parametrize("flags", [["--dtype", "float32"], ["--dtype", "bfloat16", "--ema", "0.9"],
                                   ["--grad_accum", "4", "--checkpoint_core"], ["--dtype", "float16"]])
def test_40_steps_of_huginn_equal_20_and_a_resume_to_the_last_bit(lm, run, flags):
    """The number of steps and the noise of each are drawn: both must go on where they stopped."""
    assert lm(*flags, "--max_steps", 40, "--out_dir", "straight")[0] == 0
    assert lm(*flags, "--max_steps", 20, "--out_dir", "halves")[0] == 0
    resume = ["--model", "huginn", "--init_from", "resume", "--max_steps", 40, "--out_dir", "halves"]
    assert run(*resume, tiny=False)[0] == 0
    straight, halves = (train.read_checkpoint(f"{folder}/last.pt") for folder in ("straight", "halves"))
    same(straight, halves)
    assert losses("straight") == losses("halves") and sorted(losses("halves")) == list(range(1, 41))
    assert len({line["num_steps"] for line in log("straight") if "loss" in line}) > 2


def test_a_language_model_tells_answers_by_family_and_shows_samples(lm):
    code, out, _ = lm("--max_steps", 20)
    assert code == 0
    for words in ("huginn on arith, preset nano", "256 prompts", "sha256", "exact_accuracy at depth", "sum6 (2)",
                  "wording (1)", "steps each", "cache"):
        assert words in out, words
    assert re.search(r"^step 20 \| .* \| val exact_accuracy [\d.]+ \| val loss [\d.]+", out, re.MULTILINE)
    steps = [line for line in log("out/huginn-arith") if "loss" in line]
    assert {"step", "elapsed", "lr", "loss", "num_steps", "tokens", "flops"} <= set(steps[0])
    ends = [line for line in log("out/huginn-arith") if "test_loss_4" in line]
    assert ends and {"test_exact_accuracy_1", "test_loss_1"} <= set(ends[0])


@pytest.mark.parametrize("model", ["huginn", "qwen3"])
def test_parts_of_a_batch_weigh_by_their_labels(run, monkeypatch, model):
    """Four parts (fewer, where a packed batch has fewer rows) give the gradient of the whole, not the mean of means."""
    monkeypatch.setattr(huginn.Huginn, "initial_state", lambda self, e: torch.zeros_like(e))
    own = [*HUGINN, "--random_recurrence", "false"] if model == "huginn" else [*QWEN3, "--pack_to", 64]
    for parts in (1, 4):
        flags = ["--grad_accum", parts, "--dtype", "float32", "--lr", "1e-2", "--grad_clip", -1]
        assert run(*own, *flags, "--max_steps", 2, "--out_dir", f"{parts}", tiny=False)[0] == 0
    whole, parts = losses("1"), losses("4")
    assert whole[1] == pytest.approx(parts[1], rel=1e-6) and whole[2] == pytest.approx(parts[2], rel=1e-4)
    first = [{n: s["exp_avg"] for n, s in train.read_checkpoint(f"{k}/last.pt")["optimizers"][0]["state"].items()}
             for k in (1, 4)]
    for name in first[0]:
        torch.testing.assert_close(first[0][name], first[1][name], atol=1e-6, rtol=1e-3)


def test_a_prompt_is_continued_by_the_newest_run(lm, run):
    assert lm("--max_steps", 2)[0] == 0
    shown = [run(*SAMPLE, "--num_steps", 16, "--max_new_tokens", 8, *flags, tiny=False)[1]
             for flags in ([], [], ["--temperature", 1, "--seed", 1], ["--temperature", 1, "--seed", 2],
                           ["--exit", "kl", "--exit_threshold", 100, "--min_steps", 3], ["--cache_budget", 2],
                           ["--warm_start"])]
    texts = [out[out.index("\n012+034="):].rsplit("\n", 3)[0] for out in shown]
    assert texts[0] == texts[1] and texts[2] != texts[3]
    assert "16.0 steps each" in shown[0] and f"{(16 + 7 * 3) / 8:.1f} steps each" in shown[4]
    size = [float(re.search(r"cache ([\d.]+) MiB", out)[1]) for out in shown]
    assert size[0] >= size[5]
    fails(run("--model", "huginn", "--sample", "", tiny=False), "--sample is empty")
    fails(run("--model", "huginn", "--sample", "1" * 200, tiny=False), "200 tokens", "128", "block_size")
    fails(run(*SAMPLE, "--stop", "<|end|>", tiny=False), "--stop <|end|>", "<|endoftext|>")
    fails(run(*SAMPLE, "--temperature", "-1", tiny=False), "temperature -1")
    fails(run(*SAMPLE, "--exit", "often", tiny=False), "often", "kl")
    fails(run("--model", "huginn", "--solve", "1+1=", tiny=False), "--data arith cannot be solved", "--sample")
    fails(run("--model", "huginn", "--data", "sudoku", tiny=False), "sudoku", "arith, text, math")


def test_mistakes_are_told_before_the_work(lm, run, cache):
    fails(lm("--grad_accum", 3, "--max_steps", 1), "--grad_accum 3", "--batch_size 8")
    fails(lm("--stop", "<|end|>", "--max_steps", 1), "--stop <|end|>")
    fails(lm("--selective_checkpoint"), "selective_checkpoint", "give checkpoint_core")
    fails(lm("--checkpoint_core", "--selective_checkpoint", "--compile"), "--compile; leave one")
    fails(lm("--depths", "1,99999999", "--max_steps", 1), "1,99999999", "10000")
    assert not os.path.exists("out"), "and leave nothing behind"
    others = set(cache.glob("arith-*.npz"))
    assert lm("--max_steps", 1, "--data_seed", 7)[0] == 0
    (path,) = set(cache.glob("arith-*.npz")) - others
    path.write_bytes(path.read_bytes()[:100])
    fails(lm("--max_steps", 1, "--data_seed", 7), path, "damaged", "delete it")
    path.unlink()


def test_a_sample_shows_every_byte(capsys):
    """Bytes that are no text are marked, and what may become a character is only held back until it is one."""
    class Model:
        def stream(self, prompts, **options):
            for token in [0xC3, 0xA9, 65, 0xFF, 0xFF, 0xFF, 0xFF, 66, 0xE2, 0x82, 10]:
                yield torch.tensor([token]), torch.tensor([3])

    ids, steps = write_text(Model(), byte_tokenizer(), "p", {"stop": []}, contextlib.nullcontext)
    assert ids[:3] == [0xC3, 0xA9, 65] and len(ids) == 11
    assert capsys.readouterr().out == "p\u00e9A\ufffd\ufffd\ufffd\ufffdB\ufffd\n\n" and steps.tolist() == [3] * 11


def test_a_reader_that_stops_is_no_error(tmp_path, lm):
    assert lm("--max_steps", 1)[0] == 0
    command = [sys.executable, os.path.join(ROOT, "train.py"), "--model", "huginn", "--sample", "012+034="]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    assert process.wait(60) == 0 and process.stderr.read() == b""


def test_puzzles_cannot_be_sampled(run):
    assert run("--max_steps", 1)[0] == 0
    fails(run("--sample", "x", tiny=False), "--data sudoku cannot be sampled", "--solve")


def test_a_tokenizer_travels_with_its_weights(run, tmp_path):
    (tmp_path / "book.txt").write_text("the cat sat on the mat. the dog sat on the cat.\n" * 80, encoding="utf-8")
    flags = ["--data_file", "book.txt", "--tokenizer", "bpe:262", "--max_steps", 3]
    code, out, _ = run(*TEXT, *flags, tiny=False)
    assert code == 0 and "vocabulary 262" in out and "val loss" in out
    os.remove(tmp_path / "book.txt")
    code, out, err = run("--model", "huginn", "--sample", "the cat", "--data", "text", tiny=False)
    assert code == 0 and "the cat" in out, err
    code, out, err = run("--model", "huginn", "--sample", "the cat", "--init_from", "out/huginn-text", tiny=False)
    assert code == 0, "to sample, a checkpoint needs no --data"
    code, out, err = run(*HUGINN, "--init_from", "out/huginn-text", "--max_steps", 1, tiny=False)
    assert code == 0 and "tokenizer with 262" in out, "other data is tokenized with the tokenizer of the weights"
    fails(run(*HUGINN, "--init_from", "resume", "--out_dir", "out/huginn-text", tiny=False), "--data text, not arith")


def test_a_text_is_resumed_where_it_stopped(run, tmp_path):
    (tmp_path / "book.txt").write_text("".join(f"line {i} of the book\n" for i in range(300)), encoding="utf-8")
    flags = [*TEXT, "--data_file", "book.txt"]
    assert run(*flags, "--max_steps", 12, "--out_dir", "a", tiny=False)[0] == 0
    assert run(*flags, "--max_steps", 6, "--out_dir", "b", tiny=False)[0] == 0
    assert run("--model", "huginn", "--data", "text", "--init_from", "resume", "--out_dir", "b", "--max_steps", 12,
               tiny=False)[0] == 0
    same(train.read_checkpoint("a/last.pt"), train.read_checkpoint("b/last.pt"))
    fails(run("--model", "huginn", "--data", "text", "--init_from", "resume", "--out_dir", "b", "--max_steps", 15,
              "--batch_size", 4, tiny=False), "--batch_size 4", "8")


def test_texts_longer_than_the_context_are_told_before_training(lm):
    fails(lm("--block_size", 16, "--max_steps", 1), "tokens, but --block_size is 16")


def test_a_hugging_face_folder_is_sampled_and_tuned_with_its_tokenizer(run, tmp_path):
    save_file = pytest.importorskip("safetensors.torch").save_file
    tokenizer = next(iter(golden.folders("qwen_tok")), None)
    if tokenizer is None:
        pytest.skip("no golden tokenizer")
    folder = tmp_path / "hf"
    shutil.copytree(tokenizer, folder)
    vocab_size = huggingface_tokenizer(folder).vocab_size + 7  # padded, as published vocabularies are
    config = huginn.HuginnConfig(vocab_size=vocab_size, block_size=64, n_embd=32, n_head=2, intermediate_size=48,
                                 mean_recurrence=2)
    state = {f"transformer.{k}": v for k, v in huginn.Huginn(config).state_dict().items()}
    save_file(state, folder / "model.safetensors")
    theirs = {("n_heads" if k == "n_head" else k): v for k, v in vars(config).items()}
    (folder / "config.json").write_text(json.dumps(theirs), encoding="utf-8")
    flags = ["--model", "huginn", "--init_from", folder]
    code, out, err = run(*flags, "--sample", "Hello world", "--max_new_tokens", 4, tiny=False)
    assert code == 0 and "preset paper" in out and "Hello world" in out, err
    code, out, err = run(*flags, "--digits", 3, "--num_train", 16, "--num_val", 8, "--num_test", 8, "--batch_size", 4,
                         "--grad_accum", 2, "--max_steps", 1, "--depths", 1, "--max_new_tokens", 4, tiny=False)
    assert code == 0 and f"tokenizer with {vocab_size - 7}" in out, err
    code, out, err = run("--model", "modr", *flags[2:], "--digits", 3, "--num_train", 16, "--num_val", 8, "--num_test",
                         9, "--batch_size", 4, "--grad_accum", 2, "--max_steps", 1, "--depths", 1, tiny=False)
    assert code == 0 and "modr on arith, preset paper" in out and '"base_dtype": "bfloat16"' in out, err
    saved = train.read_checkpoint("out/modr-arith/last.pt")
    assert saved["model_config"]["base"] == str(folder) and "wte.weight" not in saved["model"]
    (folder / "chat_template.jinja").write_text("{{ raise_exception('said by the template') }}", encoding="utf-8")
    fails(run(*flags, "--data", "chat", "--sample", "Hello", tiny=False), "said by the template")
    off = ["--data", "chat", "--chat_template", "off", "--max_new_tokens", 4]
    assert run(*flags, *off, "--sample", "Hello world", tiny=False)[0] == 0
    os.remove(folder / "tokenizer.json")
    fails(run(*flags, "--sample", "Hello", tiny=False), "tokenizer.json")


@pytest.mark.parametrize("model,flags", [("huginn", []), ("qwen3", ["--pack_to", 64, "--grad_accum", 4])])
def test_chats_are_trained_on_resumed_and_sampled(run, tmp_path, model, flags):
    """Evaluation is by loss; a packed batch of few rows has fewer parts than grad_accum."""
    rows = [{"prompt": f"{n}+1=", "response": str(n + 1)} for n in range(60)]
    rows += [{"messages": [{"role": "user", "content": f"{n}"}, {"role": "assistant", "content": "yes"}]}
             for n in range(60)]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    command = (TEXT if model == "huginn" else QWEN3) + ["--data", "chat", "--data_file", "chats.jsonl", *flags]
    for name in ("--num_train", "--num_val", "--num_test", "--digits"):  # of arithmetic
        if name in command:
            del command[command.index(name):command.index(name) + 2]
    code, out, err = run(*command, "--max_steps", 6, "--out_dir", "a", tiny=False)
    assert code == 0 and "val loss" in out and "exact_accuracy" not in out and "120 lines, written plainly" in out, err
    assert run(*command, "--max_steps", 3, "--out_dir", "b", tiny=False)[0] == 0
    assert run("--model", model, "--init_from", "resume", "--out_dir", "b", "--max_steps", 6, tiny=False)[0] == 0
    same(train.read_checkpoint("a/last.pt"), train.read_checkpoint("b/last.pt"))
    os.remove("chats.jsonl")
    code, out, err = run("--model", model, "--init_from", "a", "--sample", "5+1=", tiny=False)
    assert code == 0 and "5+1=" in out, err


# ---- branches on a language model

MODR = "--model modr --data arith --num_branches 3 --lora_rank 4 --batch_size 8 --depths 1,4 --eval_interval 20".split()


@pytest.fixture
def branches(lm, run):
    """As run, for a tiny MoDr on a tiny Huginn that is there already."""
    assert lm("--max_steps", 3)[0] == 0
    return lambda *flags: run(*MODR, *flags, tiny=False)


def test_branches_go_on_the_newest_huginn_and_are_told_apart(branches, run):
    code, out, err = branches("--max_steps", 12)
    assert code == 0, err
    for words in ("2,400 of them trained", "from out/huginn-arith/best.pt", "share of tokens", "branch_2", "mean of"):
        assert words in out, words
    saved = train.read_checkpoint("out/modr-arith/last.pt")
    assert saved["model_config"]["base"] == "out/huginn-arith/best.pt" and len(saved["model_config"]["base_hash"]) == 16
    assert {name.split(".")[-1] for name in saved["model"]} == {"lora_A", "lora_B", "weight", "router_bias"}
    assert len(saved["optimizers"][0]["state"]) == 5, "two matrices with A and B, and the router"
    steps = [line for line in log("out/modr-arith") if "loss" in line]
    assert all(sum(line[f"branch_{j}"] for j in range(3)) == pytest.approx(1) for line in steps)
    assert all(0 <= line["balance_entropy"] <= 1.0987 for line in steps)
    code, out, err = run("--model", "modr", "--eval_only", tiny=False)
    assert code == 0, err
    assert re.search(r"by what is used +as it is +base +random +branch 0 +branch 1 +branch 2\n", out)
    code, out, err = run("--model", "modr", "--sample", "012+034=", "--max_new_tokens", 4, tiny=False)
    assert code == 0 and "2.0 steps each" in out, err
    fails(branches("--routing", "base", "--max_steps", 1), "routing base", "nothing to train")
    assert branches("--num_branches", 1, "--max_steps", 1)[0] == 0, "one branch has no router and no balance"


def test_word_problems_are_told_by_set_mean_and_branch(run, tmp_path):
    """In distribution, out of distribution, averages, with and without the overlap, and the share of each branch."""
    def write(name, count, first):
        rows = ({"question": f"Ann has {n} nuts and gets {n + 1} .", "answer": str(2 * n + 1)}
                for n in range(first, first + count))
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

    write("mawps.train.jsonl", 40, 0)
    for i, name in enumerate(("mawps", "multiarith", "addsub", "singleeq", "svamp")):
        write(f"{name}.test.jsonl", 4, 38 + 10 * i)
    flags = ["--data", "math", "--data_file", tmp_path, "--train_sets", "mawps", "--num_val", 8, "--depths", 2,
             "--test_sets", "mawps,multiarith,addsub,singleeq,svamp", "--max_new_tokens", 4]
    small = "--n_embd 32 --n_head 2 --intermediate_size 48 --mean_recurrence 2".split()
    assert run("--model", "huginn", *small, *flags, "--max_steps", 2, tiny=False)[0] == 0
    code, out, err = run("--model", "modr", *flags, "--num_branches", 2, "--max_steps", 2, tiny=False)
    assert code == 0, err
    code, out, err = run("--model", "modr", "--data", "math", "--eval_only", tiny=False)
    assert code == 0, err
    for table in ("exact_accuracy at depth", "share of tokens", "by what is used"):
        part = out[out.index(table):]
        for label in ("mawps (4)", "svamp (4)", "mean in distribution (4)", "mean out of distribution (12)",
                      "mean of the six (16)", "mawps, not in training (2)"):
            assert label in part, (table, label)


@pytest.mark.parametrize("flags", [["--dtype", "float32"], ["--grad_accum", "4", "--checkpoint_core"],
                                   ["--routing", "random", "--ema", "0.9"], ["--route_pool", "forward"]])
def test_40_steps_of_branches_equal_20_and_a_resume_to_the_last_bit(branches, run, flags):
    assert branches(*flags, "--max_steps", 40, "--out_dir", "straight")[0] == 0
    assert branches(*flags, "--max_steps", 20, "--out_dir", "halves")[0] == 0
    resume = ["--model", "modr", "--init_from", "resume", "--max_steps", 40, "--out_dir", "halves"]
    assert run(*resume, tiny=False)[0] == 0
    straight, halves = (train.read_checkpoint(f"{folder}/last.pt") for folder in ("straight", "halves"))
    same(straight, halves)
    bias = straight["model"]["router_bias"]
    assert bias.any() and bias.abs().max() <= 40 * 0.001 + 1e-6, "one step of the bias per optimizer step"


def test_without_a_huginn_one_is_trained_first(run, monkeypatch):
    for model in ("huginn", "modr"):
        monkeypatch.setitem(train.RECIPES, (model, "nano"), dict(max_steps=2, batch_size=8, depths="1"))
    small = ["--n_embd", 32, "--n_head", 2, "--intermediate_size", 48, "--digits", 3, "--num_train", 64, "--num_val", 8,
             "--num_test", 9]
    code, out, err = run("--model", "modr", *small, tiny=False)
    assert code == 0, err
    assert out.index("run of one under out") < out.index("huginn on arith") < out.index("modr on arith")
    assert train.read_checkpoint("out/huginn-arith/last.pt")["model_config"]["n_embd"] == 32
    assert train.read_checkpoint("out/modr-arith/last.pt")["data_config"]["digits"] == 3


def test_stopping_the_huginn_stops_before_the_branches(run, monkeypatch):
    for model in ("huginn", "modr"):
        monkeypatch.setitem(train.RECIPES, (model, "nano"), dict(max_steps=9, batch_size=8, depths="1"))
    on_step(monkeypatch, 3, lambda: os.kill(os.getpid(), signal.SIGINT))
    small = ["--n_embd", 32, "--n_head", 2, "--intermediate_size", 48, "--digits", 3, "--num_train", 64, "--num_val", 8,
             "--num_test", 9]
    code, out, _ = run("--model", "modr", *small, tiny=False)
    assert code == 0 and "SIGINT: saved at step 3; go on with --model huginn" in out
    fails(run("--model", "modr", *small, tiny=False), "out/huginn-arith", "before its first", "--model huginn")
    assert not os.path.exists("out/modr-arith")


def test_branches_keep_to_their_base(branches, lm, run):
    assert branches("--max_steps", 2)[0] == 0
    assert lm("--seed", 1, "--max_steps", 2)[0] == 0
    use = ["--model", "modr", "--sample", "1", "--max_new_tokens", 2]
    fails(run(*use, "--base", "out/huginn-arith-2/best.pt", tiny=False), "huginn-arith-2/best.pt", "other weights")
    shutil.move("out/huginn-arith", "moved")
    fails(run(*use, tiny=False), "out/huginn-arith/best.pt", "needs the Huginn it was trained on")
    code, _, err = run(*use, "--base", "moved/best.pt", tiny=False)
    assert code == 0, err
    resume = ["--model", "modr", "--init_from", "resume", "--base", "moved/best.pt"]
    code, _, err = run(*resume, "--max_steps", 4, tiny=False)
    assert code == 0, err
    fails(run(*resume, "--num_branches", 2, tiny=False), "num_branches 2", "trained with 3")
    fails(run(*use, "--base", "moved/best.pt", "--base_hash", "0123", tiny=False), "other weights", "0123")
    code, out, err = branches("--init_from", "out/modr-arith", "--base", "moved/best.pt", "--max_steps", 1)
    assert code == 0 and "goes to out/modr-arith-2" in out, "a new run from trained branches"
    fails(branches("--init_from", "moved", "--base", "other.pt"), "other.pt", "init_from")
    fails(branches("--init_from", "resume", "--out_dir", "moved"), "--model huginn, not modr")
    fails(run("--model", "huginn", "--init_from", "out/modr-arith", "--max_steps", 1, tiny=False), "--model modr")


def test_a_branch_is_exported_as_a_plain_huginn(branches, run):
    assert branches("--max_steps", 5, "--lr", "1e-1", "--dtype", "float32", "--gate", "preserve")[0] == 0
    use = ["--model", "modr", "--dtype", "float32"]
    code, out, err = run(*use, "--branch", 1, "--export", "one.pt", tiny=False)
    assert code == 0 and "36,992 parameters" in out, err
    fails(run(*use, "--branch", 1, "--export", "one.pt", tiny=False), "one.pt exists")
    fails(run(*use, "--export", "two.pt", tiny=False), "branch -1", "0 to 2")
    fails(run(*use, "--branch", 1, "--gate", "block", "--export", "two.pt", tiny=False), "gate 'block'", "gate off")
    fails(run(*use, "--branch", 1, "--export", "one.pt/x.pt", tiny=False), "one.pt")
    assert run("--model", "huginn", "--export", "plain.pt", tiny=False)[0] == 0, "of another model: its weights"
    code, out, _ = run("--model", "huginn", "--init_from", "plain.pt", "--eval_only", tiny=False)
    assert code == 0 and "test split" in out
    fails(run(*use, "--export", "", tiny=False), "--export is empty")
    fails(run(*use, "--export", "two.pt", "--branch", 1, "--sample", "1", tiny=False), "one at a time")
    asked = ["--sample", "012+034=", "--max_new_tokens", 8]
    merged = run("--model", "huginn", "--dtype", "float32", "--init_from", "one.pt", *asked, tiny=False)[1]
    forced = run(*use, "--branch", 1, *asked, tiny=False)[1]
    shown = [out[out.index("\n012+034="):].rsplit("\n", 3)[0] for out in (merged, forced)]
    assert shown[0] == shown[1]
    code, out, err = run("--model", "huginn", "--init_from", "one.pt", "--eval_only", tiny=False)
    assert code == 0 and "mean of the trained families" in out, err
    code, out, err = run(*MODR, "--init_from", "one.pt", "--max_steps", 1, "--out_dir", "on", tiny=False)
    assert code == 0 and "from one.pt" in out, "branches may go on a merged branch"
    assert run(*MODR, "--num_branches", 1, "--max_steps", 1, "--out_dir", "single", tiny=False)[0] == 0
    code, out, err = run("--model", "modr", "--out_dir", "single", "--export", "three.pt", tiny=False)
    assert code == 0 and os.path.exists("three.pt"), "of one branch no number is asked"


# ---- nested passes for a language model

QWEN3 = ("--model qwen3 --data arith --preset nano --n_embd 32 --n_layer 4 --n_head 2 --n_kv_head 1 --head_dim 8 "
         "--intermediate_size 48 --batch_size 8 --num_train 256 --num_val 16 --num_test 18 --eval_interval 20 "
         "--digits 3 --max_new_tokens 12 --ema 0").split()
DND = ("--model dnd --data arith --nested_first 1 --nested_last 2 --batch_size 8 --eval_interval 20 --alpha 0.1 "
       "--max_new_tokens 12 --ema 0").split()


@pytest.fixture
def nested(run):
    """As run, for a tiny DND on a tiny Qwen3 that is there already."""
    code, out, err = run(*QWEN3, "--max_steps", 3, tiny=False)
    assert code == 0 and "qwen3 on arith, preset nano" in out, err
    return lambda *flags: run(*DND, *flags, tiny=False)


def test_nested_passes_go_on_the_newest_qwen3(nested, run):
    code, out, err = nested("--max_steps", 12)
    assert code == 0, err
    for words in ("from out/qwen3-arith/best.pt", "exact_accuracy at depth", "mean of", "layers each"):
        assert words in out, words
    saved = train.read_checkpoint("out/dnd-arith/last.pt")
    assert saved["config"]["init_from"] == "out/qwen3-arith/best.pt" and saved["data_config"]["digits"] == 3
    steps = [line for line in log("out/dnd-arith") if "loss" in line]
    assert {"ce", "ratio", "ratio_1", "ratio_2", "boundary_1", "tau", "tokens", "flops"} <= set(steps[0])
    assert steps[0]["tau"] == pytest.approx(0.5 - 0.1 * 0.2), "moved once by alpha (0 - k_target)"
    assert len({line["ratio"] for line in steps}) > 1, "everything passes, then some"
    code, out, err = run("--model", "dnd", "--sample", "012+034=", "--max_new_tokens", 4, tiny=False)
    assert code == 0 and re.search(r"4 tokens, [4-6]\.\d layers each", out) and "who was selected" in out, err
    code, out, err = run("--model", "dnd", "--sample", "012+034=", "--max_new_tokens", 4, "--depth", 1, tiny=False)
    assert code == 0 and "4.0 layers each" in out and "who was selected" not in out, err
    drawn = bool(importlib.util.find_spec("matplotlib"))  # which is optional
    plot = ("--plot", "a/plot.png") if drawn else ()
    code, out, err = run("--model", "dnd", "--eval_only", *plot, tiny=False)
    assert code == 0 and "entropy, base" in out and "who was selected" in out, err
    assert os.path.exists("a/plot.png") == drawn
    fails(run("--model", "dnd", "--eval_only", "--plot", "plot.jpg", tiny=False), "plot.jpg", ".png")
    fails(nested("--plot", "plot.png", "--max_steps", 1), "--plot", "--eval_only")
    fails(nested("--nested_first", 3, "--max_steps", 1), "nested_first 3", "0 to 3")
    fails(nested("--k_target", 1.5, "--max_steps", 1), "k_target 1.5")
    shutil.rmtree("out/qwen3-arith")
    code, out, err = run("--model", "dnd", "--eval_only", tiny=False)
    assert code == 0 and "entropy, base" not in out and "entropy, depth 1" in out, err
    fails(run("--model", "dnd", "--sample", "1", "--depth", 3, tiny=False), "depth 3", "1 (the plain Qwen3) or 2")


def test_rows_may_hold_several_texts_where_the_model_keeps_them_apart(nested, lm):
    code, out, err = nested("--pack_to", 64, "--max_steps", 4, "--grad_accum", 2)
    assert code == 0, err
    assert {line["tokens"] % 32 for line in log("out/dnd-arith") if "loss" in line} == {0}, "a mean of two parts"
    fails(nested("--pack_to", 8, "--max_steps", 1), "pack_to 8", "longest")
    fails(nested("--pack_to", 4096, "--max_steps", 1), "--pack_to 4096, but --block_size is 128")
    fails(lm("--pack_to", 64, "--max_steps", 1), "--pack_to 64", "a huginn reads a row as one text", "dnd")


def test_without_nested_layers_it_is_plain_tuning(nested):
    code, out, err = nested("--nested_first", -1, "--nested_last", -1, "--max_steps", 4)
    assert code == 0 and "ratio" not in out, err
    assert "nesting.tau" not in train.read_checkpoint("out/dnd-arith/last.pt")["model"]


@pytest.mark.parametrize("flags", [["--dtype", "float32"], ["--grad_accum", "4", "--checkpoint_layers"],
                                   ["--ema", "0.9", "--sync_interval", "7"]])
def test_40_steps_of_nested_passes_equal_20_and_a_resume_to_the_last_bit(nested, run, flags):
    assert nested(*flags, "--max_steps", 40, "--out_dir", "straight")[0] == 0
    assert nested(*flags, "--max_steps", 20, "--out_dir", "halves")[0] == 0
    resume = ["--model", "dnd", "--init_from", "resume", "--max_steps", 40, "--out_dir", "halves"]
    assert run(*resume, tiny=False)[0] == 0
    straight, halves = (train.read_checkpoint(f"{folder}/last.pt") for folder in ("straight", "halves"))
    same(straight, halves)
    assert straight["model"]["nesting.steps"] == 40 and straight["config"]["init_from"].endswith("best.pt")


@pytest.mark.parametrize("preset", ["nano", "nano-moe"])
def test_without_a_qwen3_one_is_trained_first(run, monkeypatch, preset):
    for model in ("qwen3", "dnd"):
        monkeypatch.setitem(train.RECIPES, (model, preset), dict(max_steps=2, batch_size=8, depths="1"))
    small = ["--n_embd", 32, "--n_head", 2, "--n_kv_head", 1, "--digits", 3, "--num_train", 64, "--num_val", 8,
             "--num_test", 9]
    other = {"nano": "nano-moe", "nano-moe": "nano"}[preset]  # a run of another preset is no base
    assert run("--model", "qwen3", "--preset", other, *small, "--max_steps", 1, "--out_dir", "out/qwen3-arith-0",
               tiny=False)[0] == 0
    code, out, err = run("--model", "dnd", "--preset", preset, *small, tiny=False)
    assert code == 0, err
    assert out.index("run of one under out") < out.index("qwen3 on arith") < out.index("dnd on arith")
    base, saved = (train.read_checkpoint(f"out/{model}-arith/last.pt") for model in ("qwen3", "dnd"))
    assert saved["model_config"]["num_experts"] == base["model_config"]["num_experts"] == 8 * (preset == "nano-moe")
    assert saved["model_config"]["nested_first"] == 1 and "nested_first" not in base["model_config"]
    assert base["model_config"]["n_embd"] == saved["model_config"]["n_embd"] == 32


def test_a_base_that_was_stopped_is_told(nested, run):
    code, out, err = nested("--max_steps", 1)
    assert code == 0 and "was stopped" not in out, err
    saved = train.read_checkpoint("out/qwen3-arith/last.pt")
    saved["config"]["max_steps"] = 100
    torch.save(saved, "out/qwen3-arith/last.pt")
    code, out, err = nested("--max_steps", 1)
    assert code == 0 and "note: the run it goes on was stopped at step 3" in out, err
    for name in ("best.pt", "last.pt"):
        os.remove(f"out/dnd-arith/{name}")
    resume = ["--model", "dnd", "--init_from", "resume", "--out_dir", "out/dnd-arith"]
    fails(run(*resume, tiny=False), "was killed", "delete")
    fails(run("--model", "dnd", "--init_from", "nowhere", tiny=False), "nowhere: no such file or folder")


def test_a_large_base_is_not_trained_by_itself(run):
    fails(run("--model", "dnd", "--preset", "qwen3-1.7b", tiny=False), "qwen3-1.7b", "--init_from")


def test_a_hugging_face_qwen3_is_tuned_with_nested_passes(run, tmp_path):
    """Settings are those of the preset that is nearest; the learning rate falls from 5e-6 to 1e-6, as in the paper."""
    save_file = pytest.importorskip("safetensors.torch").save_file
    tokenizer = next(iter(golden.folders("qwen_tok")), None)
    if tokenizer is None:
        pytest.skip("no golden tokenizer")
    folder = tmp_path / "hf"
    shutil.copytree(tokenizer, folder)
    config = dnd.Qwen3Config(vocab_size=huggingface_tokenizer(folder).vocab_size + 7, block_size=64, n_embd=32,
                             n_layer=2, n_head=2, n_kv_head=1, head_dim=8, intermediate_size=48)
    save_file({f"model.{k}": v for k, v in dnd.DND(config).state_dict().items()}, folder / "model.safetensors")
    theirs = dict(model_type="qwen3", hidden_size=32, num_hidden_layers=2, num_attention_heads=2, rope_theta=1e6,
                  num_key_value_heads=1, max_position_embeddings=64, tie_word_embeddings=True)
    (folder / "config.json").write_text(json.dumps(vars(config) | theirs), encoding="utf-8")
    small = ["--digits", 3, "--num_train", 16, "--num_val", 8, "--num_test", 9, "--batch_size", 4, "--grad_accum", 2,
             "--max_new_tokens", 4, "--eval_batch_size", 4]
    code, out, err = run("--model", "dnd", "--init_from", folder, *small, "--nested_first", 0, "--nested_last", 1,
                         "--max_steps", 2, "--decay_steps", 2, "--warmup_steps", 0, tiny=False)
    assert code == 0 and "dnd on arith, preset qwen3-1.7b" in out, err
    steps = [line for line in log("out/dnd-arith") if "loss" in line]
    assert [line["lr"] for line in steps] == pytest.approx([5e-6, 3e-6])
    config = train.TrainConfig(lr=5e-6, last_lr=0.2, decay_steps=10, warmup_steps=0)
    assert config.lr * train.lr_factor(config, 10) == pytest.approx(1e-6)
    code, out, err = run("--model", "qwen3", "--init_from", folder, "--sample", "Hello", "--max_new_tokens", 4,
                         tiny=False)
    assert code == 0 and "Hello" in out, err


# ---- metrics and solving


def test_one_wrong_cell_in_one_of_two_puzzles(monkeypatch):
    labels = torch.randint(2, 6, (2, 16))
    answer = labels.clone()
    answer[0, 3] = 7 - answer[0, 3]
    model = HRM(train.dataclasses.replace(PRESETS["nano"], seq_len=16, vocab_size=6))
    trace = (answer, torch.tensor([1, 1]), answer[None], torch.zeros(1, 2))
    monkeypatch.setattr(model, "solve", lambda *args, **kwargs: trace)
    scores = train.means(model.evaluate([{"inputs": labels, "labels": labels}], [1])[1])
    assert scores["exact_accuracy"] == 0.5 and scores["accuracy"] == pytest.approx(31 / 32)


def test_the_table_tells_whole_puzzles_from_cells(run, cache, monkeypatch):
    assert run("--max_steps", 1, "--out_dir", "a")[0] == 0
    config = train.read_checkpoint("a/last.pt")["data_config"]
    labels = torch.from_numpy(sudoku.load(sudoku.SudokuConfig(**config)).test.labels).long()  # (16, 16)

    def solve(self, inputs, max_segments, act, trace, puzzle_identifiers=None):
        assert not act, "all segments should run"
        answer = labels.clone()
        answer[5, 3] = 7 - answer[5, 3]
        answers, p_halt = answer.expand(max_segments, -1, -1), torch.zeros(max_segments, 16)
        return answer, torch.full((16,), max_segments), answers, p_halt

    monkeypatch.setattr(HRM, "solve", solve)
    out = run("--eval_only", "--init_from", "a", tiny=False)[1]
    assert re.search(r"16 in all\n +depth +exact_accuracy +accuracy +segments\n", out), "exact accuracy comes first"
    for depth in (1, 2, 4):
        assert re.search(rf"^ +{depth} +{15 / 16:.4f} +{255 / 256:.4f} +{depth}\.0000$", out, re.MULTILINE), out


def test_exact_accuracy_comes_first_on_the_bar_and_in_validations(run):
    _, out, _ = run("--max_steps", 20)
    assert re.search(r"^step 20 \| .* \| val exact_accuracy [\d.]+ \| val accuracy [\d.]+", out, flags=re.MULTILINE)
    shown = [name for name in HRM.bar if "accuracy" in name]
    assert shown == ["exact_accuracy", "accuracy"]
    validation = [list(line) for line in log("out/hrm-sudoku") if "val_accuracy" in line]
    assert validation and all(k.index("val_exact_accuracy") < k.index("val_accuracy") for k in validation)


def test_a_solved_puzzle_is_told_from_one_that_is_not(run, monkeypatch):
    assert run("--max_steps", 1)[0] == 0
    right = torch.tensor([[int(digit) + 1 for digit in "1234341221434321"]])

    def solve(self, inputs, *args, **kwargs):
        return right, torch.tensor([1]), right[None], torch.full((1, 1), 0.75)

    monkeypatch.setattr(HRM, "solve", solve)
    _, out, _ = run("--solve", PUZZLE, tiny=False)
    assert re.search(r"^solved: a legal solution .* \| 1 segments, .* \| halting confidence 0\.750$", out, re.MULTILINE)
    assert "+-------+-------+" in out and "| 4  3  | 2' 1  |" in out and "note:" not in out
    _, out, _ = run("--solve", PUZZLE.replace("1234", "...3"), tiny=False)
    assert re.search(r"^not solved: the clue at row 1 column 4 was changed from 3 to 4", out, re.MULTILINE)


def test_puzzles_are_solved_from_a_string_or_a_file(run, tmp_path):
    assert run("--max_steps", 2, "--out_dir", "out/hrm-sudoku")[0] == 0
    code, out, _ = run("--solve", PUZZLE, tiny=False)
    assert code == 0 and "from out/hrm-sudoku/best.pt" in out
    assert re.search(r"solved: .* \| 4 segments, the last change in segment \d \| halting confidence 0\.\d+", out)
    (tmp_path / "p.txt").write_text(f"# two\n{PUZZLE}\n\n{PUZZLE.replace('.', '0')}\n", encoding="utf-8")
    assert run("--solve", "p.txt", tiny=False)[1].count("halting confidence") == 2
    assert "more than one solution" in run("--solve", "." * 16, tiny=False)[1]
    assert "1 twice" in run("--solve", "11" + "." * 14, tiny=False)[1]
    fails(run("--solve", PUZZLE[:-1], tiny=False), "15", "16")
    fails(run("--solve", PUZZLE.replace(".", "x"), tiny=False), "x")
    fails(run("--solve", "nowhere.txt", tiny=False), "nowhere.txt")
    (tmp_path / "bad.txt").write_text(f"{PUZZLE}\n{PUZZLE}1\n", encoding="utf-8")
    fails(run("--solve", "bad.txt", tiny=False), "bad.txt", "line 2", "17", "16")
    (tmp_path / "empty.txt").write_text("# nothing\n", encoding="utf-8")
    fails(run("--solve", "empty.txt", tiny=False), "empty.txt")


def test_results_are_told_by_source(run, tmp_path):
    assert run("--max_steps", 2, "--out_dir", "a")[0] == 0
    rows = [f"{PUZZLE},1234341221434321,easy", "..34341221434321,1234341221434321,harder"]
    (tmp_path / "mine.csv").write_text("puzzle,solution,source\n" + "\n".join(rows) + "\n", encoding="utf-8")
    code, out, _ = run("--eval_only", "--init_from", "a", "--test_file", "mine.csv", tiny=False)
    assert code == 0 and out.count("easy (1) ") == out.count("harder (1) ") == 2, "both accuracies at every depth"


def test_mazes_are_trained_on_scored_and_solved(run, tmp_path):
    tiny = [*TINY[:2], "--data", "maze", *TINY[10:], "--size", 6]
    code, out, err = run(*tiny, "--max_steps", 4, tiny=False)
    assert code == 0 and "maze: generated in style scatter,corridors" in out and "run folder out/hrm-maze" in out, err
    code, out, _ = run("--eval_only", "--data", "maze", tiny=False)
    assert code == 0 and re.search(r"depth +exact_accuracy +accuracy +shortest_path +segments\n", out)
    assert "shortest_path at depth" in out and "rooms (4) " in out, "told by style"
    lines = ["S...#.", ".##...", "....#.", ".#..#.", ".#.##.", "...#.G"]
    code, out, _ = run("--solve", "\n".join(lines), "--data", "maze", tiny=False)
    assert code == 0 and "|S   # |" in out and re.search("^(not )?solved: ", out, re.MULTILINE) and "note:" not in out
    lines[5] = "...##G"
    (tmp_path / "two.txt").write_text("\n".join([*lines[:4], ".#.###", lines[5]] * 2), encoding="utf-8")
    assert run("--solve", "two.txt", "--data", "maze", tiny=False)[1].count("halting confidence") == 2
    fails(run("--solve", "S" * 36, "--data", "maze", tiny=False), "36 S")
    fails(run("--eval_only", "--data", "maze", "--size", 7, tiny=False), "seq_len", "--size")
    fails(run("--eval_only", "--data", "maze", "--test_file", "two.txt", "--styles", "cave", tiny=False), "cave")
    code, out, _ = run(*tiny, "--max_steps", 6, "--init_from", "resume", tiny=False)
    assert code == 0 and "going on at step 4" in out


def test_a_finished_run_is_not_run_again(run):
    assert run("--max_steps", 3, "--out_dir", "a")[0] == 0
    before = log("a")
    again = run("--init_from", "resume", "--out_dir", "a", tiny=False)
    fails(again, "limit at step 3", "--max_steps (3)", "--eval_only")
    assert log("a") == before


def test_cells_decide_while_no_puzzle_is_right(run, monkeypatch):
    """Whole puzzles select the best weights; while none is right, the share of right cells does."""
    cells = iter([0.2, 0.4, 0.3])

    def evaluate(*args):
        return {4: {"exact_accuracy": torch.zeros(1), "accuracy": torch.tensor([next(cells, 0.0)])}}

    monkeypatch.setattr(train, "evaluate", evaluate)
    monkeypatch.setattr(train, "show_thinking", lambda *args: None)
    assert run("--max_steps", 3, "--eval_interval", 1, "--out_dir", "a")[0] == 0
    assert train.read_checkpoint("a/best.pt")["best"]["step"] == 2
