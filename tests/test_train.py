"""train.py as a user meets it: runs, resumes, signals, checkpoints, flags, solving.

    python -m pytest tests/test_train.py -q
"""

import json
import os
import pickle
import re
import signal
import subprocess
import sys
import time

import pytest
import torch

import train
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

    def call(*flags, tiny=True):
        code = train.main([*(TINY if tiny else []), "--data_dir", str(cache), *map(str, flags)])
        out, err = capsys.readouterr()
        lines = [line.strip() for line in re.split(r"[\r\n]+", err)]  # the progress bar's are left out
        return code, out, "\n".join(line for line in lines if line.startswith(("train.py", "warning", "Trace")))

    return call


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


# ---- runs


@pytest.mark.parametrize("flags", [["--dtype", "float32"], ["--ema", "0.9", "--dtype", "bfloat16"],
                                   [*PAPER_LIKE, "--ema", "0", "--dtype", "float32"], ["--dtype", "float16"]])
def test_40_steps_equal_20_and_a_resume_to_the_last_bit(run, flags):
    assert run(*flags, "--max_steps", 40, "--out_dir", "straight")[0] == 0
    assert run(*flags, "--max_steps", 20, "--out_dir", "halves")[0] == 0
    assert run("--init_from", "resume", "--max_steps", 40, "--out_dir", "halves", tiny=False)[0] == 0
    same(train.read_checkpoint("straight/last.pt"), train.read_checkpoint("halves/last.pt"))
    assert losses("straight") == losses("halves") and sorted(losses("halves")) == list(range(1, 41))


def test_a_run_says_what_it_does_and_exact_accuracy_comes_first(run):
    code, out, _ = run("--max_steps", 20)
    assert code == 0
    for words in ("preset nano-6x6", "parameters", "torch " + torch.__version__, "64 original puzzles", "sha256",
                  "run folder out/hrm-sudoku", "segment 1"):
        assert words in out, words
    table = out[out.index("test split, best"):]
    assert table.index("exact_accuracy") < table.index(" accuracy")
    assert [f"depth {d}" in table for d in (1, 2, 4)] == [True] * 3
    steps = [line for line in log("out/hrm-sudoku") if "loss" in line]
    keys = list(steps[0])
    assert keys.index("exact_accuracy") < keys.index("accuracy") and {"step", "elapsed", "lr"} <= set(keys)


def test_run_folders_are_never_mixed(run, tmp_path):
    assert run("--max_steps", 2)[0] == 0
    code, out, _ = run("--max_steps", 2)
    assert code == 0 and "out/hrm-sudoku holds a run already, so this one goes to out/hrm-sudoku-2" in out
    fails(run("--max_steps", 2, "--out_dir", "out/hrm-sudoku"), "not an empty folder", "--init_from resume")
    code, out, _ = run("--eval_only", tiny=False)
    assert code == 0 and "from out/hrm-sudoku-2/best.pt" in out
    code, out, _ = run("--eval_only", "--init_from", "out/hrm-sudoku", tiny=False)
    assert code == 0 and "from out/hrm-sudoku/best.pt" in out


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
    assert code == 0 and "depth 4" in out
    fails(run("--eval_only", "--init_from", "published.pt"), "published.pt", "seq_len 900", "16")


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
    fails(run("--max_steps", 60, "--out_dir", "a"), "loss of step 26 is nan", os.path.join("a", "last.pt"), "--lr")
    assert train.read_checkpoint("a/last.pt")["step"] == 20


# ---- checkpoints that are not


@pytest.mark.parametrize("kind", ["missing", "empty", "text", "truncated", "list", "other weights", "code"])
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


def test_a_checkpoint_must_fit_the_data(run):
    assert run("--max_steps", 1, "--out_dir", "a")[0] == 0
    fails(run("--init_from", "a", "--eval_only", "--box", "2x3", "--clues", 14, tiny=False), "vocab_size 6", "has 8")
    fails(run("--init_from", "a", "--eval_only", "--num_puzzle_identifiers", 7, tiny=False), "7", "1")
    fails(run("--init_from", "a", "--eval_only", "--n_embd", 64, tiny=False), "64", "32")


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
    deadline = time.time() + 60
    while time.time() < deadline and process.poll() is None:
        path = os.path.join(folder, "a", "log.jsonl")
        if os.path.exists(path) and os.path.getsize(path) > 5000:
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
    step = int(re.search(number.name + r": saved at step (\d+); go on with --init_from resume", out)[1])
    assert run("--init_from", "resume", "--out_dir", "a", "--max_steps", step + 2, tiny=False)[0] == 0
    assert sorted(losses("a")) == list(range(1, step + 3))


@pytest.mark.skipif(os.name != "posix", reason="sends POSIX signals")
def test_a_killed_run_goes_on_from_its_last_checkpoint(tmp_path, cache, run):
    process = start(tmp_path, cache, "--eval_interval", "2")
    time.sleep(0.37)
    process.kill()
    process.communicate(timeout=60)
    step = train.read_checkpoint("a/last.pt")["step"]
    assert run("--init_from", "resume", "--out_dir", "a", "--max_steps", step + 5, tiny=False)[0] == 0
    steps = [line["step"] for line in log("a") if "loss" in line]
    assert steps == list(range(1, step + 6))


# ---- flags


@pytest.mark.parametrize("flags,words", [
    (["--batchsize", "3"], ["--batchsize", "--batch_size"]), (["--lr", "fast"], ["--lr", "fast"]),
    (["--loss", "hinge"], ["hinge", "stablemax", "softmax"]), (["--preset", "huge"], ["huge", "nano", "paper"]),
    (["--device", "abacus"], ["abacus", "cpu"]), (["--depths", "0,x"], ["0,x", "1,2,4"]), (["stray"], ["stray"]),
    (["--n_head", "5"], ["n_embd 32", "n_head 5"]), (["--grad_updates", "9"], ["9", "2"]), (["--box", "4x9"], ["4x9"]),
    (["--compile", "perhaps"], ["perhaps"]), (["--batch_size", "0"], ["batch_size 0"]), (["--ema", "2"], ["ema 2"]),
    (["--num_val", "0"], ["--num_val"]), (["--halt_max_steps", "0"], ["halt_max_steps 0"]),
    (["--data", "chess"], ["chess", "sudoku"]), (["--model", "x"], ["hrm"]),
    (["--data_file", "nowhere.csv"], ["nowhere.csv"]), (["--eval_only"], ["no run of hrm on sudoku"]),
    (["--init_from", "resume"], ["no run"]), (["--solve", PUZZLE], ["no run"])])
def test_a_mistake_in_a_flag_is_one_line(run, flags, words):
    fails(run(*flags), *words)


def test_every_field_is_a_flag_and_help_shows_the_values_in_force(capsys):
    with pytest.raises(SystemExit) as ended:
        train.main(["--model", "hrm", "--data", "sudoku", "--preset", "nano-6x6", "--help"])
    text = capsys.readouterr().out
    assert ended.value.code == 0
    for config in (train.TrainConfig, *[c for _, c, _ in train.MODELS.values()], *[c for c, _ in train.DATA.values()]):
        assert all(f"--{name} " in text for name in config.__dataclass_fields__), config
    assert str(train.RECIPES["hrm", "nano-6x6"]["max_steps"]) in text and not torch.cuda.is_initialized()


def test_help_is_quick():
    started = time.time()
    result = subprocess.run([sys.executable, os.path.join(ROOT, "train.py"), "--help"], capture_output=True)
    assert result.returncode == 0 and time.time() - started < 20  # under 3 s on an idle machine


def test_no_arguments_show_four_examples(capsys):
    assert train.main([]) == 0
    assert capsys.readouterr().out.count("python train.py") == 4


def test_dashes_are_underscores(run):
    assert run("--max-steps", 1, "--out-dir", "a")[0] == 0 and os.path.exists("a/last.pt")


def test_every_preset_has_a_recipe_of_known_fields():
    for (model, preset), recipe in train.RECIPES.items():
        fields = set(train.TrainConfig.__dataclass_fields__) | set(train.DATA["sudoku"][0].__dataclass_fields__)
        assert preset in train.MODELS[model][2] and recipe.keys() <= fields
    assert {("hrm", preset) for preset in PRESETS} == set(train.RECIPES)


@pytest.mark.skipif(not os.path.exists(os.path.join(ROOT, "README.md")), reason="no README beside the tests")
def test_the_commands_of_the_readme_exist(capsys):
    with open(os.path.join(ROOT, "README.md"), encoding="utf-8") as file:
        commands = re.findall(r"^\s+python train\.py(.*?)(?:\s#.*)?$", file.read(), flags=re.MULTILINE)
    assert len(commands) >= 2
    for command in commands:
        words = [w for w in command.split() if not w.startswith("'")]
        flags = [w for w in words if w.startswith("--") and w not in ("--help", "--solve")]
        with pytest.raises(SystemExit):
            train.main(["--help"])
        text = capsys.readouterr().out
        assert all(f"  {flag} " in text for flag in flags), command


# ---- machine


def test_a_cpu_without_bfloat16_takes_float32(run, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {})
    code, out, _ = run("--max_steps", 1, "--out_dir", "a")
    assert code == 0 and "cpu in float32" in out


def test_a_card_without_bfloat16_takes_scaled_float16(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: False)
    for name in ("auto", "bfloat16"):
        dtype, reason = train.pick_dtype(name, torch.device("cuda"))
        assert dtype == torch.float16 and "float16 with loss scaling" in reason


@pytest.mark.parametrize("when", ["call", "first forward"])
def test_a_compiler_that_fails_only_costs_speed(run, monkeypatch, when):
    def fail(*args, **kwargs):
        raise RuntimeError("no linker found\nand more")

    def compile(self, *args, **kwargs):
        if when == "call":
            fail()
        self._compiled_call_impl = fail

    monkeypatch.setattr(torch.nn.Module, "compile", compile)
    code, _, err = run("--compile", "--max_steps", 3, "--out_dir", "a")
    assert code == 0 and err.count("warning: --compile failed (RuntimeError: no linker found)") == 1


def test_text_files_name_their_encoding(tmp_path):
    env = {**os.environ, "PYTHONWARNDEFAULTENCODING": "1", "OMP_NUM_THREADS": "1"}
    flags = ["--max_steps", "2", "--data_dir", str(tmp_path / "cache")]
    command = [sys.executable, os.path.join(ROOT, "train.py"), *TINY, *flags]
    result = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, encoding="utf-8")
    ours = re.findall(re.escape(ROOT) + r"/(?:data/)?\w+\.py:\d+: EncodingWarning", result.stderr)
    assert result.returncode == 0 and not ours, result.stderr


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


def test_results_are_told_by_source(run, tmp_path):
    assert run("--max_steps", 2, "--out_dir", "a")[0] == 0
    rows = [f"{PUZZLE},1234341221434321,easy", "..34341221434321,1234341221434321,harder"]
    (tmp_path / "mine.csv").write_text("puzzle,solution,source\n" + "\n".join(rows) + "\n", encoding="utf-8")
    code, out, _ = run("--eval_only", "--init_from", "a", "--test_file", "mine.csv", tiny=False)
    assert code == 0 and re.search(r"depth 4: easy +1 ", out) and re.search(r"depth 4: harder +1 ", out)
