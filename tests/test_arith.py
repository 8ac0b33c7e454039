"""Arithmetic and prompts with answers: what is generated, what is scored, what is read.

    python -m pytest tests/test_arith.py -q
"""

import dataclasses
import os
import re
from fractions import Fraction

import numpy as np
import pytest
import torch

from data import arith, prompts
from data.arith import FAMILIES, ArithConfig
from data.prompts import IGNORE, PromptData, Rows, final_number
from data.tokenizer import byte_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tmp_path_factory.mktemp("arith"))


@pytest.fixture(scope="module")
def data(folder):
    return arith.load(ArithConfig(num_train=4000, num_val=200, num_test=400, data_dir=folder))


def texts(data, split):
    """(question, answer, family) of every row, as text."""
    rows, decode = getattr(data, split), data.tokenizer.decode
    for i in range(len(rows)):
        at = slice(rows.starts[i], rows.starts[i + 1])
        tokens, answer = rows.tokens[at], rows.answer[at]
        assert tokens[-1] == data.tokenizer.eot and answer[-1], "the end is labelled"
        yield decode(tokens[~answer].tolist()), decode(tokens[answer][:-1].tolist()), str(rows.source[i])


def value(expression):
    """An expression of figures, +, and * -> its value, by another way than the generator's."""
    assert re.fullmatch(r"[\d+*]+", expression), expression
    return sum(np.prod([int(n) for n in term.split("*")], dtype=object) for term in expression.split("+"))


@pytest.mark.parametrize("split", ["train", "val", "test"])
def test_every_answer_is_right_and_in_its_family_s_form(data, split):
    counts = {}
    for question, answer, family in texts(data, split):
        counts[family] = counts.get(family, 0) + 1
        expression, _, result = answer.rpartition("=") if "\n" in question else (question[:-1], "", answer)
        assert int(result) == value(expression) and len(result) == 6
        numbers = re.findall(r"\d+", expression)
        if family == "large":
            assert all(len(n) == 5 and n[0] != "0" for n in numbers) and len(numbers) == 3
        elif "*" in expression:
            assert len(numbers[0]) == 5 and numbers[0][0] == "0" and len(numbers[1]) == 1
        else:
            assert all(len(n) == 5 and n[0] == "0" for n in numbers), "a number in training has one digit less"
            if family.startswith("sum"):
                assert len(numbers) == int(family[-1])
        if "\n" in question:
            assert sorted(re.findall(r"\d+", question)) == sorted(numbers), "the words hold the numbers"
    assert set(counts) == set(FAMILIES if split == "test" else ("sum2", "sum3", "sum4", "sum5", "mul", "word"))
    assert max(counts.values()) - min(counts.values()) <= 1


def test_no_test_question_is_in_training(data):
    questions = {split: [q for q, *_ in texts(data, split)] for split in ("train", "val", "test")}
    test, val = set(questions["test"]), set(questions["val"])
    assert len(test) == len(questions["test"]) and len(val) == len(questions["val"])
    assert not test & set(questions["train"]) and not val & set(questions["train"]) and not test & val


def test_new_wordings_are_new():
    assert not set(arith.SENTENCES) & set(arith.OTHER_SENTENCES)
    for sentences in (arith.SENTENCES, arith.OTHER_SENTENCES):
        assert {sign for sign, _ in sentences} == {"+", "*"}


def test_in_half_of_the_sums_carries_travel(data):
    """A column that sums to 9 (or 19, ...) passes a carry on: such runs are far more frequent than by chance."""
    def longest_run(question):
        columns = zip(*question[:-1].split("+"))
        runs = "".join("9" if sum(map(int, c)) % 10 == 9 else " " for c in columns).split()
        return max(map(len, runs), default=0)

    sums = [longest_run(q) for q, _, family in texts(data, "train") if family == "sum3"]
    assert np.mean(np.array(sums) >= 2) > 0.12, "0.03 by chance"


def test_the_same_seed_gives_the_same_data_everywhere(data, folder, tmp_path):
    config = ArithConfig(num_train=4000, num_val=200, num_test=400, data_dir=folder)
    again = arith.load(dataclasses.replace(config, data_dir=str(tmp_path)))
    assert again.summary() == data.summary()
    assert next(texts(again, "train"))[0] == "00079+01239=", "the generator is pinned: raise FORMAT when it changes"
    other = arith.load(ArithConfig(num_train=100, num_val=20, num_test=16, data_seed=1, data_dir=str(tmp_path)))
    assert next(texts(other, "train"))[0] != "00079+01239="
    assert arith.load(config).summary() == data.summary()


def test_preparation_is_whole_or_absent(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise OSError("disk full")

    monkeypatch.setattr(np, "savez", fail)
    with pytest.raises(OSError):
        arith.load(ArithConfig(num_train=10, num_val=5, num_test=8, data_dir=str(tmp_path)))
    assert os.listdir(tmp_path) == []


def test_settings_that_cannot_be_are_one_line(tmp_path):
    for fields, word in ((dict(digits=2), "digits 2"), (dict(num_train=-1), "num_train -1")):
        with pytest.raises(ValueError, match=word):
            ArithConfig(**fields)
    with pytest.raises(ValueError, match="too few questions"):
        arith.load(ArithConfig(digits=3, num_test=100_000, data_dir=str(tmp_path)))


# ---- batches


def test_labels_are_the_answers_shifted_by_one(data):
    batch = data.train_batch(0, 8, 0)
    inputs, labels = batch["inputs"], batch["labels"]
    assert inputs.dtype == labels.dtype == np.int64 and inputs.shape == labels.shape
    for row, label, length in zip(inputs, labels, batch["prompt_lengths"]):
        answer = label[label != IGNORE]
        assert (label[: length - 1] == IGNORE).all() and label[length - 1] == answer[0], "after the prompt"
        assert answer[-1] == data.tokenizer.eot and (answer[:-1] == row[length : length + len(answer) - 1]).all()
        assert (label[length - 1 + len(answer) :] == IGNORE).all(), "padding is not scored"


def test_an_epoch_takes_every_row_once_and_a_batch_is_a_pure_function(data):
    size = 4000 // prompts.GROUP // 2  # two groups of batches are one epoch
    seen = []
    for index in range(2 * prompts.GROUP):
        batch = data.train_batch(index, size, 3)
        again = data.train_batch(index, size, 3)
        assert all((batch[k] == again[k]).all() for k in batch)
        seen += [tuple(row[row != 256]) for row in batch["inputs"]]
    want = [tuple(data.train.tokens[a : b - 1]) for a, b in zip(data.train.starts, data.train.starts[1:])]
    assert sorted(seen) == sorted(want)
    assert not (data.train_batch(0, size, 4)["inputs"].shape == batch["inputs"].shape
                and (data.train_batch(0, size, 4)["inputs"] == batch["inputs"]).all())


def test_little_of_a_batch_is_padding(data):
    share = [(data.train_batch(i, 16, 0)["inputs"] != 256).mean() for i in range(32)]
    assert np.mean(share) > 0.9


def test_a_prompt_s_ids_are_its_text_s(data):
    assert data.encode("1<|endoftext|>") == data.tokenizer.encode("1<|endoftext|>")


def cut_at_starts(batch):
    """The texts of a packed batch: (inputs, labels) tuples, cut where a position is 0; without those of padding."""
    found = []
    for inputs, labels, positions in zip(batch["inputs"], batch["labels"], batch["positions"]):
        starts = np.flatnonzero(positions == 0)
        assert starts[0] == 0
        for a, b in zip(starts, [*starts[1:], len(positions)]):
            assert (positions[a:b] == np.arange(b - a)).all(), "the positions of a text are 0, 1, 2 and so on"
            found.append((tuple(inputs[a:b].tolist()), tuple(labels[a:b].tolist())))
    for inputs, labels in found:
        if set(labels) == {IGNORE}:
            assert set(inputs) == {256}, "only padding has no labels"
    return [text for text in found if set(text[1]) != {IGNORE}]


@pytest.mark.parametrize("size", [0, 64, 200, 1024])
@pytest.mark.parametrize("batch_size", [1, 7, 64])
def test_a_packed_batch_holds_the_texts_of_the_padded_one(data, size, batch_size):
    size = size or int(np.diff(data.train.starts).max()) - 1  # the least that there can be
    packed = PromptData("arith", data.tokenizer, data.train, data.val, data.test, pack_to=size)
    for index in (0, 1, 57):
        one, other = data.train_batch(index, batch_size, 3), packed.train_batch(index, batch_size, 3)
        assert set(other) == {"inputs", "labels", "positions"}
        assert all(a.dtype == np.int64 and a.shape == (len(other["inputs"]), size) for a in other.values())
        padded = [(tuple(row[row != 256].tolist()), tuple(label[:(row != 256).sum()].tolist()))
                  for row, label in zip(one["inputs"], one["labels"])]
        assert sorted(padded) == sorted(cut_at_starts(other)), "each text as often, with its labels"
        tokens = sum(len(inputs) for inputs, _ in padded)
        assert len(other["inputs"]) <= -(-tokens // size) + 1 or size < 200, "a row more than the least, at most"
        assert all((other[k] == packed.train_batch(index, batch_size, 3)[k]).all() for k in other)


def test_the_evaluation_is_not_packed(data):
    packed = PromptData("arith", data.tokenizer, data.train, data.val, data.test, pack_to=64)
    for one, other in zip(data.eval_batches("val", 64), packed.eval_batches("val", 64)):
        assert all((one[k] == other[k]).all() for k in ("inputs", "labels", "prompt_lengths"))


def test_texts_fill_rows_the_longest_first():
    lengths, tokenizer = [3, 5, 2, 4, 0], byte_tokenizer()
    rows = Rows.of([("", "x" * n, "a") for n in lengths], tokenizer)  # n inputs each: the end is a label alone
    batch = rows.pack(np.arange(5), 256, 7)
    x, end = ord("x"), 256
    assert batch["inputs"].tolist() == [[x] * 7, [x] * 7]
    assert batch["positions"].tolist() == [[0, 1, 2, 3, 4, 0, 1], [0, 1, 2, 3, 0, 1, 2]]
    assert batch["labels"].tolist() == [[x] * 4 + [end, x, end], [x] * 3 + [end, x, x, end]]
    alone = rows.pack(np.array([2]), 256, 5)
    assert alone["inputs"].tolist() == [[x, x, 256, 256, 256]] and alone["positions"].tolist() == [[0, 1, 0, 1, 2]]
    assert alone["labels"].tolist() == [[x, end] + [IGNORE] * 3]


def test_a_text_that_does_not_fit_a_row_is_told_at_once(data, folder, monkeypatch):
    least = int(np.diff(data.train.starts).max()) - 1
    config = ArithConfig(num_train=4000, num_val=200, num_test=400, pack_to=least, data_dir=folder)
    assert PromptData("arith", data.tokenizer, data.train, data.val, data.test, pack_to=500).longest == 500
    monkeypatch.setattr(arith, "build", None)  # not called: how rows are laid out is no part of the cache's key
    assert arith.load(config).train_batch(0, 8, 0)["inputs"].shape[1] == least
    message = f"pack_to {least - 1} is too short.*{least} tokens.*--pack_to {least}"
    with pytest.raises(ValueError, match=message) as error:
        arith.load(dataclasses.replace(config, pack_to=least - 1))
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="pack_to -1"):
        ArithConfig(pack_to=-1)


def test_eval_batches_hold_the_split_in_order(data):
    batches = list(data.eval_batches("test", 150))
    assert [len(b["inputs"]) for b in batches] == [150, 150, 100]
    first = batches[0]["inputs"][0]
    assert data.tokenizer.decode(first[: batches[0]["prompt_lengths"][0]]) == next(texts(data, "test"))[0]


# ---- grading


@pytest.mark.parametrize("text,number", [
    ("005307", 5307), ("04712+00595=005307", 5307), ("3-5=-2", -2), ("so 1,250.50 dollars.", Fraction("1250.5")),
    ("no number", None), ("", None), ("7 and 8.", 8), ("x=-3.", -3), ("10-4", 4), ("1.5.", Fraction(3, 2)),
    ("1,2", 2), ("3,000", 3000), ("-0", 0)])
def test_the_final_number_is_the_last_one(text, number):
    assert final_number(text) == number


def test_grades_are_of_the_final_number_alone(data):
    tokenizer = byte_tokenizer()
    references = ["1+2=3", "007", "none", "5"]
    labels = np.full((4, 10), IGNORE)
    for i, text in enumerate(references):
        ids = tokenizer.encode(text) + [tokenizer.eot]
        labels[i, 2 : 2 + len(ids)] = ids
    answers = [tokenizer.encode(text) + [tokenizer.eot] for text in ("3", "7", "none", "5 or 6")]
    got = data.grade(torch.from_numpy(labels), answers)
    assert got.tolist() == [1, 1, 0, 0] and got.dtype == torch.float32


def test_rows_of_a_large_vocabulary_are_uint32():
    class Wide:
        vocab_size, eot = 100_000, 99_999

        def encode(self, text):
            return [70_000 + ord(c) for c in text]

    rows = Rows.of([("ab", "c", "x"), ("d", "", "y")], Wide())
    assert rows.tokens.dtype == np.uint32 and rows.tokens.tolist() == [70097, 70098, 70099, 99999, 70100, 99999]
    assert rows.answer.tolist() == [False, False, True, True, False, True]
    data = PromptData("x", Wide(), rows, rows, rows)
    assert data.longest == 3 and data.model_args == {"vocab_size": 100_000}


def test_examples_show_each_family(data):
    shown = data.examples("test", 1)
    assert len(shown) == 9 and shown[0] == next(texts(data, "test"))[0]


def test_families_are_chosen_for_training_and_the_means_follow(folder):
    config = ArithConfig(families="sum6,wording", num_train=40, num_val=20, num_test=90, data_dir=folder)
    data = arith.load(config)
    assert set(data.train.source.tolist()) == set(data.val.source.tolist()) == {"sum6", "wording"}
    groups = data.groups()
    assert {name: int(groups[name][0].sum()) for name in FAMILIES} == dict.fromkeys(FAMILIES, 10)
    assert len(groups["mean of the trained families"]) == 2 and len(groups["mean of the others"]) == 7
    for families in ("sum6,sum6", "sum7", ""):
        with pytest.raises(ValueError, match="families .*choose of sum2"):
            ArithConfig(families=families)
