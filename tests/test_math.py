"""Word problems: what is read from each layout, what counts as right, what is in training, what is scored.

    python -m pytest tests/test_math.py -q
    MATH_DIR=folder python -m pytest tests/test_math.py -q      with the sets themselves: gsm8k.train.jsonl.gz and so on
"""

import dataclasses
import gzip
import json
import os
import re
from fractions import Fraction

import numpy as np
import pytest
import torch

from data import math
from data.math import MathConfig, clean_work, equation, local_copy, plain, plain_number, read_examples
from data.prompts import Choices, continuation, final_letter, final_number, load_choices, same_answer
from data.show import print_table
from data.tokenizer import byte_tokenizer
from huginn import Huginn, HuginnConfig

MATH_DIR = os.environ.get("MATH_DIR", "")
with_the_sets = pytest.mark.skipif(not MATH_DIR, reason="MATH_DIR does not name a folder with the sets")


def write(path, rows, as_array=False):
    """rows: dicts, as JSON lines or an array, .gz or not."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(rows, indent=4) if as_array else "".join(json.dumps(row) + "\n" for row in rows)
    with (gzip.open if path.suffix == ".gz" else open)(path, "wt", encoding="utf-8") as file:
        file.write(text)
    return str(path)


def number_rows(name, count, first=0):
    return [{"question": f"{name} : Ann has {n} nuts and gets {n + 1} .", "answer": str(2 * n + 1),
             "equation": f"X=({n}.0+{n + 1}.0)"} for n in range(first, first + count)]


def choice_rows(name, count):
    return [{"question": f"{name}: what is {n}+1?", "options": [f"{c}){n + i}" for i, c in enumerate("ABCDE")],
             "answer": "B", "rationale": f"{n}+1={n + 1}\nAnswer: B"} for n in range(count)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """All sets, small: 3 of the 5 addsub questions and 1 of the 4 mawps ones are in mawps's training file."""
    path = tmp_path_factory.mktemp("sets")
    write(path / "gsm8k.train.jsonl.gz", [{"question": f"Q{n}: how many?", "answer": str(n), "rationale":
                                           f"It is <<{n}+0={n}>>{n}."} for n in range(30)])
    write(path / "gsm8k.test.jsonl.gz", [{"question": "T: how many?", "answer": "7", "rationale": "It is 7."}])
    shared = number_rows("old", 3)
    write(path / "mawps.train.jsonl", number_rows("mawps", 10) + shared + shared[:1])
    # the same but for case, spacing and punctuation
    again = shared[0] | {"question": "OLD: Ann has 0 nuts, and gets 1"}
    write(path / "mawps.test.jsonl", number_rows("new", 3) + [again])
    write(path / "addsub.test.jsonl", number_rows("other", 2) + shared)
    for name in ("multiarith", "singleeq", "svamp"):
        write(path / f"{name}.test.jsonl", number_rows(name, 2))
    write(path / "mathqa.dev.jsonl", choice_rows("mathqa", 12))
    write(path / "aqua.test.jsonl", choice_rows("aqua", 4))
    return path


@pytest.fixture(scope="module")
def config(folder, tmp_path_factory):
    return MathConfig(data_file=str(folder), num_val=8, data_dir=str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="module")
def data(config):
    return math.load(config)


def texts(data, split):
    """(prompt, answer, source) of every row, as text."""
    rows, decode = getattr(data, split), data.tokenizer.decode
    for i in range(len(rows)):
        tokens, answer = (a[rows.starts[i]:rows.starts[i + 1]] for a in (rows.tokens, rows.answer))
        assert tokens[-1] == data.tokenizer.eot and answer[-1]
        yield decode(tokens[~answer].tolist()), decode(tokens[answer][:-1].tolist()), str(rows.source[i])


# ---- answers


@pytest.mark.parametrize("text,number", [
    ("The answer is 1,234,567.", 1234567), ("He pays $1,250.50 in all", Fraction("1250.5")), ("it costs -$5", -5),
    ("it is $-5.", -5), ("it is \u22125", -5), ("so 3/4 of it", Fraction(3, 4)), ("1 / 3", Fraction(1, 3)),
    ("a gain of 60%", 60), ("The answer is 72 clips.", 72), ("Answer: 72.", 72), ("#### 1,450", 1450), ("72.00", 72),
    ("costs $.50", Fraction(1, 2)), ("= .25", Fraction(1, 4)), ("7/0", 7), ("10-$4", 4), ("5 km/h", 5), ("-1/2",
     Fraction(-1, 2)), ("The answer is 12 m2, seen 3 times.", 12), ("The answer is 2+3 = 5 in 2 hours.", 5),
    ("Answer: 3\nThe answer is 4.\nQuestion: 5?", 4), ("the answer is:\n**8**\nor 9", 8), ("9 is the answer is", 9),
    ("The final answer is $\\boxed{72}$", 72), ("1" * 5000, None), ("\u20ac 3,5", 5), ("", None)])
def test_the_number_that_a_text_ends_in(text, number):
    assert final_number(text) == number


@pytest.mark.parametrize("text,letter", [
    ("The answer is B.", "B"), ("ANSWER:B", "B"), ("answer : c .", "C"), ("ans - b", "B"), ("Ans. D", "D"),
    ("Correct answer - A", "A"), ("CORRECT OPTION:OPTION E", "E"), ("The correct option is (C) 15", "C"),
    ("answer is (d)", "D"), ("so the answer must be B", "B"), ("so C", "C"), ("B) 72", "B"), ("(E)", "E"), ("D", "D"),
    ("The answer is a prime number.", None), ("the answer is a", "A"), ("It is 72.", None), ("", None),
    ("Option A is too small. The answer is D.", "D"), ("The answer is A's", None), ("answer: F", None)])
def test_the_letter_that_a_text_chooses(text, letter):
    assert final_letter(text) == letter


@pytest.mark.parametrize("reference,given,right", [
    ("18\nThe answer is 18.", "The answer is $18.00.", True), ("The answer is 18.", "The answer is 18.5.", False),
    ("The answer is 0.333.", "1/3", True), ("The answer is 1.8333333333333335.", "The answer is 1.833 inches", True),
    ("The answer is 0.335.", "1/3", False), ("The answer is 70000.", "70,000", True), ("70000", "70001", False),
    ("The answer is -3.", "The answer is 3.", False), ("The answer is B.", "b = 3, Answer: B", True),
    ("The answer is B.", "The answer is C.", False), ("The answer is B.", "The answer is 7.", False),
    ("The answer is 7.", "The answer is B.", False), ("The answer is 7.", "", False), ("B", "(B)", True),
    ("no answer", "no answer", False)])
def test_right_is_by_value_or_by_letter(reference, given, right):
    assert same_answer(reference, given) is right


def test_grade_reads_up_to_the_end_of_text(data):
    batch = next(data.eval_batches("test", 100))
    wanted = [answer for _, answer, _ in texts(data, "test")]
    end = [data.tokenizer.eot]
    encode = data.tokenizer.encode
    answers = [encode(text) + end + encode("The answer is 99999.") for text in wanted]
    got = data.grade(batch["labels"], answers)
    assert got.dtype == torch.float32 and got.tolist() == [1] * len(wanted)
    wrong = [encode(" The answer is 99999.")] * len(wanted)
    assert data.grade(torch.from_numpy(batch["labels"]), wrong).sum() == 0


# ---- layouts


QUESTION = "How many?"
LAYOUTS = {
    "own": [{"question": QUESTION, "answer": "12", "rationale": "5+7"}],
    "gsm8k": [{"question": QUESTION, "answer": "5<<5+7=12>>+7\n#### 12"}],
    "instruction": [{"instruction": " How many? ", "input": "", "output": "5+7\nThe answer is 12.", "answer": "12.0"}],
    "instruction, list": [{"instruction": QUESTION, "answer": [12.0], "output": "5+7. So, the answer is 12 nuts."}],
    "equation": [{"original_text": QUESTION, "equation": "5+7", "ans": 12}],
}


@pytest.mark.parametrize("as_array", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_of_numbers_gives_the_same(tmp_path, layout, as_array):
    (example,) = read_examples(write(tmp_path / "x.json", LAYOUTS[layout], as_array))
    assert (example.question, example.options, example.answer) == (QUESTION, [], "12")
    assert example.work.rstrip(".") in ("5+7", "5+7 = 12")


@pytest.mark.parametrize("row", [
    {"question": "Who?", "options": ["A)2", "B) 3 m", "C)", "D)A)1", "E)5"], "rationale": "So.\nAnswer B",
     "correct": "B"},
    {"question": "Who?", "options": ["2", "3 m", "", "A)1", "5"], "rationale": "So. Ans: b", "answer": "b"},
    {"instruction": "Who? Answer Choices: (A) 2 (B) 3 m (C) (D) A)1 (E) 5", "answer": ["B"], "output":
     "So.The answer is (B)."}])
def test_every_layout_of_choices_gives_the_same(tmp_path, row):
    (example,) = read_examples(write(tmp_path / "x.jsonl.gz", [row]))
    assert example == ("Who?", ["A) 2", "B) 3 m", "C) ", "D) A)1", "E) 5"], "So", "B")


def test_solutions_with_another_answer_are_left_out(tmp_path):
    rows = [{"instruction": "Q", "answer": "118558.0", "output": "2+2 = 118548 houses. The answer is 118548."},
            {"question": "Q", "answer": "134", "equation": "x=34*4", "equation_ok": False}]
    assert [example.work for example in read_examples(write(tmp_path / "x.json", rows, True))] == ["", ""]


@pytest.mark.parametrize("text,work", [
    ("60 * 540 = 32400\nCorrect answer - B", "60 * 540 = 32400"), ("x = 250 m. Answer B", "x = 250 m"),
    ("pays $204\nCORRECT OPTION:OPTION B", "pays $204"), ("n = 3 ANS:B", "n = 3"), ("= 6\nOption: B", "= 6"),
    ("so 8 ways . answer : b .", "so 8 ways"), ("is 45 . answer : b ) 45", "is 45"), ("= 14=B", "= 14"),
    ("x = 5\nHence (B) is correct answer.", "x = 5"), ("x = 5\nB is the answer", "x = 5"),
    ("= 5 hours (ANSWER B)", "= 5 hours"), ("n=5\nThus B", "n=5"), ("9 % option b", "9 %"),
    ("so the answer must be B", ""), ("x is 5", "x is 5"), ("x = 3 C", "x = 3 C"), ("x = 3. The answer is C.", ""),
    ("see option B: x = 9", "see option B: x = 9")])
def test_the_naming_of_the_letter_is_cut_off(text, work):
    assert clean_work(text, "B") == work


def test_numbers_and_equations_are_written_shortly():
    for text, shown in {"1,450": "1450", "12.0": "12", "$3.50": "3.5", "3/4": "0.75", "-7": "-7", "0": "0",
                        "0.6666666666666666": "0.6666666666666666", "-0.211": "-0.211"}.items():
        assert plain_number(text) == shown
    assert equation("X=((22.0-14.0)/4.0)", "2") == "((22-14)/4) = 2" and equation("", "4") == ""
    assert equation("70-x=27", "43") == "70-x=27" and equation("miles=2.05*3.0", "6.15") == "2.05*3 = 6.15"


def test_local_copies_are_found_under_the_published_names(tmp_path):
    for name, path in {"gsm8k.train": "grade_school_math/data/train.jsonl", "gsm8k.test": "gsm8k/test.jsonl",
                       "aqua.train": "train.json", "aqua.test": "AQuA/test.json", "addsub.test": "AddSub/test.json",
                       "mawps.train": "dataset/mawps/trainset.json", "mawps.test": "mawps/test.json"}.items():
        assert local_copy(tmp_path, name) is None
        published = write(tmp_path / path, [])
        assert local_copy(tmp_path, name) == published
        other = write(tmp_path / f"{name}.jsonl.gz", [])
        assert local_copy(tmp_path, name) == other, "the set's own name comes first"
    assert local_copy(tmp_path, "svamp.test") is None and local_copy(tmp_path, "mathqa.dev") is None


# ---- rows


def test_rows_are_prompts_with_worked_answers(data):
    shown = {source: (prompt, answer) for prompt, answer, source in texts(data, "test")}
    assert shown["gsm8k"] == ("Question: T: how many?\nAnswer:", " It is 7.\nThe answer is 7.")
    assert shown["aqua"] == ("Question: aqua: what is 3+1?\nOptions: A) 3 B) 4 C) 5 D) 6 E) 7\nAnswer:",
                             " 3+1=4\nThe answer is B.")
    assert shown["addsub"][1] == " (1+2) = 3\nThe answer is 3."
    everything = [row for split in ("train", "val", "test") for row in texts(data, split)]
    assert not any("<<" in answer or "#" in answer for _, answer, _ in everything)
    assert all(final_number(a) is not None or final_letter(a) for _, a, _ in everything)


def test_sources_tell_which_test_questions_are_in_training(data):
    sources, counts = np.unique(data.test.source, return_counts=True)
    assert dict(zip(sources.tolist(), counts.tolist())) == {
        "gsm8k": 1, "mawps": 3, "mawps (in training)": 1, "aqua": 4, "addsub": 2, "addsub (in training)": 3,
        "multiarith": 2, "singleeq": 2, "svamp": 2}
    summary = "\n".join(data.summary())
    assert "mawps 1 of 4, aqua 0 of 4, multiarith 0 of 2, addsub 3 of 5" in summary
    assert "mathqa.dev stands in" in summary
    known = {plain(prompt) for split in ("train", "val") for prompt, *_ in texts(data, split)}
    for prompt, _, source in texts(data, "test"):
        assert (plain(prompt) in known) == ("(in training)" in source)


def test_overlap_can_be_dropped(config):
    data = math.load(dataclasses.replace(config, overlap="drop", num_test=1))
    assert not any("in training" in source for source in data.test.source)
    assert sum(source == "mawps" for split in (data.train, data.val) for source in split.source) == 10
    assert "4 training rows whose question is in a test set" in data.summary()[2]
    assert len(data.test) == 7, "a question of each set"
    assert not any(", not in training" in label for label in data.groups())


def test_training_and_validation_share_no_question(data):
    questions = {split: [prompt for prompt, *_ in texts(data, split)] for split in ("train", "val")}
    assert len(questions["val"]) == 8 == len(set(questions["val"]))
    assert not set(questions["val"]) & set(questions["train"])
    assert len(set(questions["train"] + questions["val"])) == 30 + 13 + 12


def test_long_rows_are_left_out_but_test_rows_lose_their_work_first(config, folder, tmp_path):
    for name in os.listdir(folder):
        os.symlink(folder / name, tmp_path / name)
    for name in ("gsm8k.train.jsonl.gz", "gsm8k.test.jsonl.gz"):
        os.remove(tmp_path / name)
    rows = [{"question": f"Q{n}", "answer": "1", "rationale": "x" * (n * 100)} for n in range(3)]
    write(tmp_path / "gsm8k.train.jsonl", rows)
    write(tmp_path / "gsm8k.test.jsonl", [dict(rows[2], question="T"), dict(rows[2], question="y" * 200)])
    data = math.load(dataclasses.replace(config, data_file=str(tmp_path), max_tokens=160, num_val=0))
    assert "1 training rows of more than 160 tokens, 1 works of test rows, too long, 1 test rows" in data.summary()[2]
    assert ("Question: T\nAnswer:", " The answer is 1.", "gsm8k") in texts(data, "test") and data.longest <= 159
    with pytest.raises(ValueError, match="nothing is left to train on: num_val 500 and max_tokens 1024"):
        math.load(dataclasses.replace(config, num_val=500))


def test_answers_alone_and_other_templates(config):
    data = math.load(dataclasses.replace(config, work=False, template=r"{question}\n=>", data_seed=1))
    prompt, answer, _ = next(texts(data, "test"))
    assert (prompt, answer) == ("T: how many?\n=>", " The answer is 7.")


def test_the_cache_is_read_and_depends_on_files_and_settings(config, data, monkeypatch):
    monkeypatch.setattr(math, "build", None)  # not called
    assert math.load(config).summary() == data.summary()
    packed = math.load(dataclasses.replace(config, pack_to=256))
    assert packed.train_batch(0, 8, 0)["positions"].shape[1] == 256
    with pytest.raises(TypeError):
        math.load(dataclasses.replace(config, data_seed=5))


def test_a_tokenizer_is_trained_and_travels_with_a_checkpoint(config):
    config = dataclasses.replace(config, tokenizer="bpe:300")
    data = math.load(config)
    assert data.model_args == {"vocab_size": 300} and "train: " in "\n".join(data.summary())
    saved = data.state()
    assert math.load(config, prepare=False).tokenizer is None
    assert math.load(config, prepare=False, saved=saved).tokenizer.fingerprint() == data.tokenizer.fingerprint()
    assert next(texts(math.load(config, saved=saved), "test")) == next(texts(data, "test"))
    assert data.examples("test", 1)[0] == "Question: T: how many?\nAnswer:"


def test_one_file_is_trained_on_with_the_test_sets_beside_it(config, folder, tmp_path):
    for name in os.listdir(folder):
        if ".test." in name:
            os.symlink(folder / name, tmp_path / name)
    path = write(tmp_path / "mine.jsonl", number_rows("mine", 20))
    data = math.load(dataclasses.replace(config, data_file=path))
    assert set(data.train.source) == {"mine"} and "addsub 0 of 5" in "\n".join(data.summary())


# ---- the table


def test_the_table_has_means_with_and_without_what_is_in_training(data, capsys):
    scores = torch.tensor([float("in training" in source) for source in data.test.source])
    print_table("accuracy", {"new": scores, "all": torch.ones(20)}, data.groups())
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["accuracy", "new", "all"]
    found = (re.fullmatch(r"  (.*) \((\d+)\) +([\d.]+) +([\d.]+)", line).groups() for line in lines[1:])
    values = {label: list(numbers) for label, *numbers in found}
    assert values["addsub"] == ["5", "0.6000", "1.0000"]
    assert values["addsub, not in training"] == ["2", "0.0000", "1.0000"]
    assert values["mawps"] == ["4", "0.2500", "1.0000"] and values["mawps, not in training"][:2] == ["3", "0.0000"]
    assert values["mean in distribution"] == ["9", "0.0833", "1.0000"], "of the sets, not of the rows"
    assert values["mean out of distribution"][:2] == ["9", "0.2000"] and values["svamp"][0] == "2"
    assert values["mean of the six"][:2] == ["18", f"{(0.25 + 0.6) / 6:.4f}"]
    assert values["mean of the six, not in training"][:2] == ["14", "0.0000"]
    assert "gsm8k, not in training" not in values


# ---- mistakes and downloads


@pytest.mark.parametrize("fields,word", [
    (dict(train_sets="gsm8k,svamp"), "'svamp' is no set"), (dict(test_sets="addsub,addsub"), "comes twice"),
    (dict(train_sets=""), "'' is no set"), (dict(template="Q:"), "put {question}"), (dict(num_test=-2), "num_test -2"),
    (dict(max_tokens=3), "max_tokens 3")])
def test_settings_that_cannot_be_are_one_line(fields, word):
    with pytest.raises(ValueError, match=word) as error:
        MathConfig(**fields)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text,word", [
    ('{"question": "Q"}', "row 1 cannot be read"), ('{"question": "Q", "answer": "none"}', "neither a number"),
    ('{"question": "Q", "answer": "1"}\n{"answer": "1"}', "row 2 cannot"), ("[1, 2]", "row 1"),
    ("[{]", "not a JSON array"), ("", "holds no questions"), ("x,y", "row 1"),
    ('{"question": 5, "answer": "1"}', "row 1")])
def test_files_that_cannot_be_read_are_one_line(tmp_path, text, word):
    (tmp_path / "x.jsonl").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=word) as error:
        read_examples(str(tmp_path / "x.jsonl"))
    assert "\n" not in str(error.value) and "x.jsonl" in str(error.value)


def test_a_file_of_another_set_is_refused(config, folder, tmp_path):
    for name in os.listdir(folder):
        os.symlink(folder / name, tmp_path / name)
    os.remove(tmp_path / "aqua.test.jsonl")
    write(tmp_path / "test.json", number_rows("x", 2), True)
    with pytest.raises(ValueError, match="test.json is not aqua, which is multiple choice"):
        math.load(dataclasses.replace(config, data_file=str(tmp_path)))


def test_what_is_not_here_is_downloaded_or_asked_for(config, tmp_path, monkeypatch):
    monkeypatch.setattr(math, "GITHUB", (tmp_path / "hub").as_uri() + "/")
    config = dataclasses.replace(config, data_file="", data_dir=str(tmp_path / "cache"), train_sets="mawps",
                                 test_sets="addsub", num_val=1)
    with pytest.raises(ValueError, match="not download .*trainset.json .*mawps.train.jsonl.*--data_file") as error:
        math.load(config)
    assert "\n" not in str(error.value)
    hub = tmp_path / "hub" / "AGI-Edgerunners" / "LLM-Adapters" / "main" / "dataset"
    rows = [{"original_text": f"Q{n}?", "ans": n, "equation": f"X={n}"} for n in range(5)]
    write(hub / "mawps" / "trainset.json", rows, True)
    write(hub / "AddSub" / "test.json", [{"instruction": "Q1 ?", "output": "", "answer": "1.0"}], True)
    data = math.load(config)
    assert data.test.source.tolist() == ["addsub (in training)"] and len(data.train) == 4
    with pytest.raises(ValueError, match="no download for mathqa.dev"):
        math.load(dataclasses.replace(config, train_sets="mathqa"))
    with pytest.raises(ValueError, match="nowhere does not exist"):
        math.load(dataclasses.replace(config, data_file="nowhere"))


# ---- multiple choice by likelihood


def test_choices_are_answers_fillings_or_endings():
    assert continuation("Why?", "so") == ("Question: Why?\nAnswer:", " so")
    assert continuation("The cat", "sat.") == ("The cat", " sat.")
    assert continuation("The _ is wet.", "cat") == ("The", " cat is wet.")
    assert continuation("___ is wet.", "It") == ("\n", "It is wet.")


def test_the_likeliest_choice_is_graded(tmp_path):
    path = write(tmp_path / "siqa.test200.jsonl", [{"question": "Why?", "choices": ["a", "bcd"], "answer": 1},
                                                   {"question": "Who", "choices": ["x", "y", "z"], "answer": 0}])
    write(tmp_path / "piqa.jsonl.gz", [{"question": "Go", "choices": ["on", "off"], "answer": 1}])
    tokenizer = byte_tokenizer()
    choices, both = load_choices(path, tokenizer), load_choices(str(tmp_path), tokenizer)
    assert both.source.tolist() == ["piqa", "siqa", "siqa"] and both.starts.tolist() == [0, 2, 4, 7]
    assert choices.rows.answer.sum() == 2 + 4 + 2 * 3, "a space and the choice; no end of text"
    losses = torch.tensor([1.0, 0.9, 2.0, 1.0, 3.0])
    assert choices.grade(losses).tolist() == [1, 0] and choices.grade(losses).dtype == torch.float32
    assert choices.grade(losses, "all").tolist() == [0, 0], "in total the longer one is less likely"
    wide = Choices.of([("Q?", ["\u20ac\u20ac", "ab"], 0, "x")], tokenizer)
    assert wide.grade([1.0, 1.0], "token").tolist() == [1] and wide.num_bytes.tolist() == [7, 3]
    with pytest.raises(ValueError, match="per 'word'"):
        choices.grade(losses, "word")
    for bad in ('{"question": "Q", "choices": ["a"], "answer": 1}', '{"question": "Q", "answer": 0}', "x", ""):
        (tmp_path / "bad.jsonl").write_text(bad, encoding="utf-8")
        with pytest.raises(ValueError, match="bad.jsonl"):
            load_choices(str(tmp_path / "bad.jsonl"), tokenizer)


def test_a_model_evaluates_test_rows_and_choices(data):
    torch.manual_seed(0)
    model = Huginn(HuginnConfig(vocab_size=257, block_size=256, n_embd=16, n_head=2, intermediate_size=16,
                                n_layers_in_prelude=1, n_layers_in_recurrent_block=1, n_layers_in_coda=1,
                                mean_recurrence=2)).eval()
    named = model.evaluate((to_tensors(b) for b in data.eval_batches("test", 20)), [1], data.grade, stop=[256],
                           max_new_tokens=4)[1]
    assert named["exact_accuracy"].shape == named["loss"].shape == (20,)
    choices = Choices.of([("Why?", ["a", "bcd"], 1, "x"), ("Go", ["on", "off"], 0, "x")], data.tokenizer)
    losses = model.evaluate((to_tensors(b) for b in choices.eval_batches(3)), [1])[1]["loss"]
    one = model.evaluate([to_tensors(choices.rows.batch(np.array([1]), 256))], [1])[1]["loss"]
    assert losses.shape == (4,) and torch.allclose(losses[1], one[0], atol=1e-5) and choices.grade(losses).shape == (2,)


def to_tensors(batch):
    return {name: torch.from_numpy(value) for name, value in batch.items()}


# ---- the sets themselves


@with_the_sets
def test_counts_of_the_sets(tmp_path):
    config = MathConfig(data_file=MATH_DIR, data_dir=str(tmp_path), max_tokens=4096)
    data = math.load(config)
    summary = "\n".join(data.summary())
    for count in ("multiarith 490 of 600", "addsub 327 of 395", "singleeq 436 of 508", "svamp 0 of 1,000",
                  "gsm8k 0 of 1,319", "aqua 0 of 254", "mawps 28 of 238", "left out: nothing"):
        assert count in summary, count
    assert len(data.test) == 1319 + 238 + 254 + 600 + 395 + 508 + 1000
    answers = [answer for *_, answer in (text[:2] for text in texts(data, "test"))]
    assert all(same_answer(answer, answer) for answer in answers)
    dropped = math.load(dataclasses.replace(config, overlap="drop", train_sets="mawps", num_val=0, num_test=20))
    assert len(dropped.train) == 663, "as many as have no also_in"


@with_the_sets
def test_letters_of_aqua_s_rationales_are_read():
    with gzip.open(os.path.join(MATH_DIR, "aqua.test.jsonl.gz"), "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    read = [final_letter(row["rationale"]) for row in rows]
    assert sum(letter == row["answer"] for letter, row in zip(read, rows)) >= 230, "the others name none at the end"
    assert sum(letter not in (None, row["answer"]) for letter, row in zip(read, rows)) <= 2
