"""Prompts with answers as token rows: what language-model data sets with a right answer share.

    rows = Rows.of([(question, answer, family), ...], tokenizer)
    data = PromptData(name, tokenizer, train=rows, val=rows, test=rows, notes=[])
    batch = data.train_batch(index=0, batch_size=64, seed=0)
    batch["inputs"], batch["labels"]                        # (B, T) int64 each

A row is the prompt's tokens, the answer's, and the end-of-text token. Only the answer and the end are labelled, so the
loss does not train on the prompt; the labels are shifted: labels[t] is the token that follows inputs[t]. Rows of a
batch are padded at the right, with the end-of-text token, which is not labelled there. With pack_to, the texts of a
training batch share rows instead: a model must then be told the tokens' positions, which begin anew with each text.

Answers are compared by what they end in. Reference and answer are numbers: the values must agree to 1e-3, in absolute
terms, so that rounded decimals count and neighbouring integers do not. The reference is a letter of a multiple choice:
the letters must be the same. final_number and final_letter say what is read from a text.
"""
import functools
import dataclasses
import json
import os
import re
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import torch

from data.common import atomic_write, by_source, content_hash, epoch_rows, read_lines

IGNORE = -100  # the label of a token that is not scored
GROUP = 16  # batches whose rows are sorted by length together, so that little of a batch is padding
TOLERANCE = Fraction(1, 1000)  # between two numbers that count as the same
DIGITS = r"\d+(?:,\d{3})*(?:\.\d+)?"
NUMBER = re.compile(rf"(?<![\d.])(-?)(?:[$€£] ?)?(-?)({DIGITS}|(?<![^\s$€£(=-])\.\d+)(?: ?/ ?({DIGITS}))?")
SAID = re.compile(r"(?i)\banswer(?: is| would be| should be| ?:)|####")  # what follows is the answer
# also "ans - b", "(the) correct option is (C)"; a small letter must end its phrase, since "a" is a word, too
LETTER = re.compile(r"(?i:\b(?:answer|ans|option|choice)\b\W*(?:(?:is|be|would|should|must|the|correct|option|choice)"
                    r"\b\W*)*)([A-E]\b(?!['’])|[a-e]\b(?=\s*(?:[^\w\s]|$)))")
LONE_LETTER = re.compile(r"^\s*\(?([A-E])[).:]|(?:^|[\s(.,:=])([A-E])\)?[\s.]*$")


def numbers(text):
    """All numbers of a text as Fractions; currency and units are passed over: '$1,250.50', '-3', '.5 m', '3/4', '60%'.

    A fraction of figures is one number; a per cent is read as it stands (60), and 1 1/2 as two numbers.
    """
    found = []
    for sign, inner, figure, divisor in NUMBER.findall(text.replace("\u2212", "-")):  # the typographic minus
        if len(figure + divisor) > 1000:  # a model that does not stop; Python refuses to read long ones
            continue
        value = Fraction(figure.replace(",", "")) * (-1 if sign or inner else 1)
        divisor = Fraction(divisor.replace(",", "") or 1)
        found.append(value / divisor if divisor else value)
    return found


def final_number(text):
    """The number that a text ends in, a Fraction, or None: '3-5=-2' -> -2, 'so 1,250.50 dollars.' -> 1250.5.

    That is the last one; but if the text says "the answer is", "answer:" or "####", the first one that follows the last
    of these on its line, after the last = if there is one: 'The answer is 2+3 = 5 m, in 2 hours.' -> 5.
    """
    said = [match.end() for match in SAID.finditer(text)]
    line = text[said[-1]:].lstrip(" \n:*").split("\n")[0] if said else ""
    after = numbers(line.rpartition("=")[2]) or numbers(line)
    found = after[:1] or numbers(text)[-1:]
    return found[0] if found else None


def final_letter(text):
    """The letter A to E that a text chooses, or None: 'The answer is B.', 'ANSWER:B', 'ans - b', 'option (B)', 'B) 72'.

    The last that is called the answer, option or choice; else one that the text begins with, as a label, or ends with.
    """
    found = [match[1] for match in LETTER.finditer(text)]
    if not found:
        found = [match[1] or match[2] for match in LONE_LETTER.finditer(text)]
    return found[-1].upper() if found else None


def same_answer(reference, given):
    """Does the text `given` end in the answer that the text `reference` ends in? See the top of this file."""
    choice = re.search(r"(?:^|answer is )([A-E])\.?$", reference.strip())
    if choice:
        return final_letter(given) == choice[1]
    expected, number = final_number(reference), final_number(given)
    return expected is not None and number is not None and abs(expected - number) <= TOLERANCE


@dataclass
class Rows:
    """N prompts with answers: tokens of all rows one after another, and where they begin."""

    tokens: np.ndarray  # (total,) uint16 or uint32
    answer: np.ndarray  # (total,) bool, the loss mask: tokens of the answer, its end among them
    starts: np.ndarray  # (N+1,) int64; row i is tokens[starts[i]:starts[i+1]]
    source: np.ndarray  # (N,) str, the family or set of each row

    @classmethod
    def of(cls, examples, tokenizer, end=True, special=False):
        """(prompt, answer, source) triples of str -> Rows. end: whether the end-of-text token follows the answer.

        special: whether special tokens that prompts and answers spell out become their ids, or are text like any other.
        """
        encode = functools.partial(tokenizer.encode, special=True) if special else tokenizer.encode
        dtype = np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32
        tokens, answer, ending = [np.empty(0, dtype)], [np.empty(0, bool)], [tokenizer.eot] * end
        for prompt, reply, _ in examples:
            ids = encode(prompt), encode(reply) + ending
            tokens.append(np.array(ids[0] + ids[1], dtype))  # arrays: lists of many long rows would fill the memory
            answer.append(np.arange(len(tokens[-1])) >= len(ids[0]))
        starts = np.cumsum([len(row) for row in tokens], dtype=np.int64)
        return cls(np.concatenate(tokens), np.concatenate(answer), starts,
                   np.array([source for *_, source in examples], str))

    def take(self, chosen):
        """The rows where chosen (N,) bool is true, in order: Rows."""
        inside, lengths = np.repeat(chosen, np.diff(self.starts)), np.diff(self.starts)[chosen]
        return Rows(self.tokens[inside], self.answer[inside], np.concatenate([[0], np.cumsum(lengths)]),
                    self.source[chosen])

    def __len__(self):
        return len(self.starts) - 1

    def lengths(self, rows):
        return self.starts[rows + 1] - self.starts[rows]

    def batch(self, rows, pad):
        """Rows by number (B,) -> dict: inputs, labels (B, T) int64, prompt_lengths (B,) int64."""
        lengths = self.lengths(rows)
        columns = np.arange(lengths.max())
        inside = columns < lengths[:, None]  # (B, T+1)
        at = np.where(inside, self.starts[rows][:, None] + columns, 0)
        tokens, answer = self.tokens[at].astype(np.int64), self.answer[at] & inside
        tokens[~inside] = pad
        return dict(inputs=tokens[:, :-1], labels=np.where(answer, tokens, IGNORE)[:, 1:],
                    prompt_lengths=lengths - answer.sum(axis=1))

    def pack(self, rows, pad, size):
        """Texts by number (B,), in as few rows of `size` tokens as first-fit finds, the longest text first.

        -> dict of (R, size) int64, R as it comes: inputs; labels; positions, the place of each token in its own text. A
        text has the inputs and labels that batch gives it, so no label reaches into the next. What is left of a row is
        a text of `pad` without labels. No text may have more than `size` inputs.
        """
        lengths, free, places = self.lengths(rows) - 1, [], []
        for i in np.argsort(-lengths, kind="stable"):
            row = next((row for row, left in enumerate(free) if left >= lengths[i]), len(free))
            free += [size] if row == len(free) else []
            places.append((rows[i], row, size - free[row]))
            free[row] -= lengths[i]
        inputs, positions = np.full((len(free), size), pad, np.int64), np.zeros((len(free), size), np.int64)
        labels = np.full_like(inputs, IGNORE)
        for number, row, begin in places:
            start, end = self.starts[number:number + 2]
            here, tokens = (row, slice(begin, begin + end - start - 1)), self.tokens[start:end].astype(np.int64)
            inputs[here], positions[here] = tokens[:-1], np.arange(end - start - 1)
            labels[here] = np.where(self.answer[start + 1:end], tokens[1:], IGNORE)
        for row, left in enumerate(free):
            positions[row, size - left:] = np.arange(left)
        return dict(inputs=inputs, labels=labels, positions=positions)


def prepared(path, make):
    """The splits and the dict about them in the .npz at `path`, which is made first if it is not there.

    make: -> split -> Rows for train, val and test, and a dict for JSON. ValueError, one line, for a damaged file.
    """
    if not os.path.exists(path):
        splits, about = make()
        arrays = {f"{name}_{field}": value for name, rows in splits.items() for field, value in vars(rows).items()}
        with atomic_write(path) as file:
            np.savez(file, about=np.array(json.dumps(about)), **arrays)
    try:
        with np.load(path, allow_pickle=False) as stored:
            splits = {name: Rows(*(stored[f"{name}_{field.name}"] for field in dataclasses.fields(Rows)))
                      for name in ("train", "val", "test")}
            return splits, json.loads(str(stored["about"])) if "about" in stored else {}
    except Exception as error:  # damaged bytes break the reader in any way
        raise ValueError(f"{path} is damaged ({type(error).__name__}); delete it, and it is prepared again") from None


class PromptData:
    """The splits train, val and test (Rows), and what a training script asks of a data set."""

    def __init__(self, name, tokenizer, train=None, val=None, test=None, notes=(), means=None, pack_to=0):
        """means: title -> the sources that the table of results has a mean over.

        pack_to: tokens of the rows that the texts of a training batch share; 0 = a row for each text. ValueError, one
        line, if a text to train on has more.
        """
        longest = int(np.diff(train.starts).max(initial=1)) - 1 if train is not None else 0
        if pack_to and longest > pack_to:
            raise ValueError(f"pack_to {pack_to:,} is too short: the longest text to train on has {longest:,} tokens; "
                             f"give --pack_to {longest} or more, or 0 for a row per text")
        self.pack_to = pack_to
        self.name, self.tokenizer, self.notes, self.means = name, tokenizer, list(notes), means or {}
        self.train, self.val, self.test = train, val, test

    @property
    def model_args(self):
        """What a model has to know."""
        return dict(vocab_size=self.tokenizer.vocab_size)

    @property
    def longest(self):
        """Tokens that a model must be able to read at once; with pack_to a row of them, as what pads it may fill it."""
        rows = (self.train, self.val, self.test)
        return max(self.pack_to, *(int(np.diff(split.starts).max(initial=1)) - 1 for split in rows))

    def state(self):
        """What must travel with a model's weights."""
        return {"tokenizer": self.tokenizer.state()}

    def encode(self, text):
        """A prompt as a user gives it (str) -> the list of ids that a model is to go on from."""
        return self.tokenizer.encode(text)

    def summary(self):
        """Readable lines: the tokenizer, and per split the rows, tokens, families and a hash."""
        lines = [f"{self.name}: tokenizer with {self.tokenizer.vocab_size:,} tokens", *self.notes]
        for name in ("train", "val", "test"):
            rows = getattr(self, name)
            sources = ", ".join(f"{s} {n:,}" for s, n in zip(*np.unique(rows.source, return_counts=True)))
            digest = content_hash(rows.tokens, rows.starts)[:12]
            lines.append(f"{name}: {len(rows):,} prompts ({sources}), {len(rows.tokens):,} tokens, "
                         f"{rows.answer.sum():,} of them answers | sha256 {digest}")
        return lines

    def train_batch(self, index, batch_size, seed):
        """Batch `index` of training, a pure function of its arguments; every row once per epoch.

        Of GROUP batches in a row, the rows are sorted by length, and the batches taken in a random order. -> a dict as
        Rows.batch makes it, or with pack_to as Rows.pack does, from the same texts.
        """
        group, place = divmod(index, GROUP)
        rows = epoch_rows(len(self.train), group, GROUP * batch_size, seed)
        rows = rows[np.argsort(self.train.lengths(rows), kind="stable")]
        place = np.random.default_rng([seed, 3, group]).permutation(GROUP)[place]
        rows = rows[place * batch_size:(place + 1) * batch_size]
        if self.pack_to:
            return self.train.pack(rows, self.tokenizer.eot, self.pack_to)
        return self.train.batch(rows, self.tokenizer.eot)

    def eval_batches(self, split_name, batch_size):
        """Iterate over a split in order; the last batch may be short."""
        rows = getattr(self, split_name)
        for start in range(0, len(rows), batch_size):
            yield rows.batch(np.arange(start, min(start + batch_size, len(rows))), self.tokenizer.eot)

    def groups(self):
        """The lines of a table of results: label -> list of masks (N,) bool over the test rows; means are averaged."""
        groups = by_source(self.test.source)
        means = {title: [groups[name][0] for name in names if name in groups] for title, names in self.means.items()}
        return groups | {title: masks for title, masks in means.items() if masks}

    def grade(self, labels, answers):
        """Whose answer is right? labels (B, T) integer, answers: B lists of token ids -> (B,) float32 0 or 1."""
        right = []
        for label, answer in zip(np.asarray(labels), answers):
            texts = (self.tokenizer.decode(self._before_end(ids), strict=False)
                     for ids in (label[label != IGNORE].tolist(), answer))
            right.append(same_answer(*texts))
        return torch.tensor(right, dtype=torch.float32)

    def _before_end(self, ids):
        ids = list(ids)
        return ids[:ids.index(self.tokenizer.eot)] if self.tokenizer.eot in ids else ids

    def examples(self, split_name, number):
        """The prompts (str) of the first rows of each source, `number` of each."""
        rows, prompts = getattr(self, split_name), []
        for source in dict.fromkeys(rows.source.tolist()):
            for row in np.flatnonzero(rows.source == source)[:number]:
                tokens, answer = (a[rows.starts[row]:rows.starts[row + 1]] for a in (rows.tokens, rows.answer))
                prompts.append(self.tokenizer.decode(tokens[~answer].tolist()))
        return prompts


# ---- multiple choice by likelihood


def continuation(question, choice):
    """(prompt, what is to follow it): what makes one text of a question and a choice.

    A blank _ is filled, and what follows it belongs to the choice; a question with its mark is asked; all else is a
    text to go on with.
    """
    if "_" in question:
        before, after = re.split("_+", question, maxsplit=1)
        return before.rstrip() or "\n", " " * (before != before.rstrip()) + choice + after
    return f"Question: {question}\nAnswer:" if question.endswith("?") else question, " " + choice


@dataclass
class Choices:
    """Q questions with choices, a row for each choice, R in all, of which a model gives the loss.

    scores = model.evaluate(choices.eval_batches(64), depths)                       # depth -> "loss" -> (R,)
    choices.grade(scores[depth]["loss"])                                            # (Q,), choices.source (Q,) its sets
    """

    rows: Rows  # no end of text follows the choices
    starts: np.ndarray  # (Q+1,) int64; question i has the rows starts[i] to starts[i+1]
    right: np.ndarray  # (Q,) int64, the right choice, from 0
    source: np.ndarray  # (Q,) str
    num_bytes: np.ndarray  # (R,) int64, bytes of the text that is scored
    pad: int  # the id that rows are padded with

    @classmethod
    def of(cls, items, tokenizer):
        """(question, list of choices, index of the right one, source) -> Choices."""
        pairs = [(*continuation(question, choice), source) for question, choices, _, source in items
                 for choice in choices]
        starts = np.cumsum([0, *(len(choices) for _, choices, *_ in items)])
        return cls(Rows.of(pairs, tokenizer, end=False), starts, np.array([item[2] for item in items], np.int64),
                   np.array([item[3] for item in items], str),
                   np.array([len(text.encode("utf-8")) for _, text, _ in pairs], np.int64), tokenizer.eot)

    def eval_batches(self, batch_size):
        """Iterate over the rows in order; the last batch may be short."""
        for start in range(0, len(self.rows), batch_size):
            yield self.rows.batch(np.arange(start, min(start + batch_size, len(self.rows))), self.pad)

    def grade(self, losses, per="byte"):
        """Is the choice with the lowest loss the right one? losses (R,), means per labelled token -> (Q,) float32 0, 1.

        per: what a choice's total is divided by, its "byte"s (the choices differ in length; the same for every
        tokenizer), its "token"s, or "all" for nothing, the likelihood itself. Of equal ones the first is chosen.
        """
        if per not in ("byte", "token", "all"):
            raise ValueError(f"per {per!r}: give byte, token or all")
        tokens = np.add.reduceat(self.rows.answer.astype(np.int64), self.rows.starts[:-1])
        scores = np.asarray(losses, np.float64) * {"byte": tokens / self.num_bytes, "token": 1, "all": tokens}[per]
        best = [int(scores[a:b].argmin()) for a, b in zip(self.starts, self.starts[1:])]
        return torch.from_numpy((np.array(best) == self.right).astype(np.float32))


def load_choices(path, tokenizer):
    """Choices of a file of JSON lines (.gz too), or of all in a folder: question, choices (strings), answer (index).

    The set's name is the file's up to its first dot. ValueError, one line, for what cannot be read.
    """
    files = [path] if not os.path.isdir(path) else [os.path.join(path, name) for name in sorted(os.listdir(path))
                                                    if name.endswith((".jsonl", ".jsonl.gz"))]
    items = []
    for file in files:
        for number, line in read_lines(file):
            try:
                row = json.loads(line)
                choices, right = [choice.strip() for choice in row["choices"]], row["answer"]
                if right not in range(len(choices)):
                    raise IndexError(f"answer {right!r}, but {len(choices)} choices")
                items.append((row["question"].strip(), choices, right, os.path.basename(file).split(".")[0]))
            except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
                raise ValueError(f"{file}: line {number} cannot be read ({type(error).__name__}: {error}); give a JSON "
                                 "object with question, choices and answer, the right one's index") from None
    if not items:
        raise ValueError(f"{path} holds no questions; give JSON lines with question, choices and answer")
    return Choices.of(items, tokenizer)
