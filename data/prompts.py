"""Prompts with answers as token rows: what language-model data sets with a right answer share.

    rows = Rows.of([(question, answer, family), ...], tokenizer)
    data = PromptData(name, tokenizer, train=rows, val=rows, test=rows, notes=[])
    batch = data.train_batch(index=0, batch_size=64, seed=0)
    batch["inputs"], batch["labels"]                        # (B, T) int64 each

A row is the prompt's tokens, the answer's, and the end-of-text token. Only the answer and the end are labelled, so the
loss does not train on the prompt; the labels are shifted: labels[t] is the token that follows inputs[t]. Rows of a
batch are padded at the right, with the end-of-text token, which is not labelled there.

The final number of an answer is the last number in it: digits with an optional sign, decimal point and commas in
between. An answer is right if its final number equals the reference's.
"""
import re
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import torch

from data.common import content_hash, epoch_rows

IGNORE = -100  # the label of a token that is not scored
GROUP = 16  # batches whose rows are sorted by length together, so that little of a batch is padding
NUMBER = re.compile(r"(?<![\d.])-?\d+(?:,\d{3})*(?:\.\d+)?")


def final_number(text):
    """The last number of a text as a Fraction, or None: '3-5=-2' -> -2, 'so 1,250.50 dollars.' -> 1250.5."""
    found = NUMBER.findall(text)
    return Fraction(found[-1].replace(",", "")) if found else None


@dataclass
class Rows:
    """N prompts with answers: tokens of all rows one after another, and where they begin."""

    tokens: np.ndarray  # (total,) uint16 or uint32
    answer: np.ndarray  # (total,) bool, the loss mask: tokens of the answer, its end among them
    starts: np.ndarray  # (N+1,) int64; row i is tokens[starts[i]:starts[i+1]]
    source: np.ndarray  # (N,) str, the family or set of each row

    @classmethod
    def of(cls, examples, tokenizer):
        """(prompt, answer, source) triples of str -> Rows."""
        dtype = np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32
        tokens, answer, starts = [], [], [0]
        for prompt, reply, _ in examples:
            ids = tokenizer.encode(prompt), tokenizer.encode(reply) + [tokenizer.eot]
            tokens += ids[0] + ids[1]
            answer += [False] * len(ids[0]) + [True] * len(ids[1])
            starts.append(len(tokens))
        return cls(np.array(tokens, dtype), np.array(answer, bool), np.array(starts, np.int64),
                   np.array([source for *_, source in examples], str))

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


class PromptData:
    """The splits train, val and test (Rows), and what a training script asks of a data set."""

    def __init__(self, name, tokenizer, train=None, val=None, test=None, notes=()):
        self.name, self.tokenizer, self.notes = name, tokenizer, list(notes)
        self.train, self.val, self.test = train, val, test

    @property
    def model_args(self):
        """What a model has to know."""
        return dict(vocab_size=self.tokenizer.vocab_size)

    @property
    def longest(self):
        """Tokens that a model must be able to read at once."""
        return max(int(np.diff(rows.starts).max(initial=1)) - 1 for rows in (self.train, self.val, self.test))

    def state(self):
        """What must travel with a model's weights."""
        return {"tokenizer": self.tokenizer.state()}

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

        Of GROUP batches in a row, the rows are sorted by length, and the batches taken in a random order.
        """
        group, place = divmod(index, GROUP)
        rows = epoch_rows(len(self.train), group, GROUP * batch_size, seed)
        rows = rows[np.argsort(self.train.lengths(rows), kind="stable")]
        place = np.random.default_rng([seed, 3, group]).permutation(GROUP)[place]
        return self.train.batch(rows[place * batch_size:(place + 1) * batch_size], self.tokenizer.eot)

    def eval_batches(self, split_name, batch_size):
        """Iterate over a split in order; the last batch may be short."""
        rows = getattr(self, split_name)
        for start in range(0, len(rows), batch_size):
            yield rows.batch(np.arange(start, min(start + batch_size, len(rows))), self.tokenizer.eot)

    def grade(self, labels, answers):
        """Whose final number is right? labels (B, T) integer, answers: B lists of token ids -> (B,) float32 0 or 1."""
        right = []
        for label, answer in zip(np.asarray(labels), answers):
            reference = final_number(self.tokenizer.decode(label[label != IGNORE].tolist()))
            given = final_number(self.tokenizer.decode(answer, strict=False))
            right.append(reference is not None and given == reference)
        return torch.tensor(right, dtype=torch.float32)

    def examples(self, split_name, number):
        """The prompts (str) of the first rows of each source, `number` of each."""
        rows, prompts = getattr(self, split_name), []
        for source in dict.fromkeys(rows.source.tolist()):
            for row in np.flatnonzero(rows.source == source)[:number]:
                tokens, answer = (a[rows.starts[row]:rows.starts[row + 1]] for a in (rows.tokens, rows.answer))
                prompts.append(self.tokenizer.decode(tokens[~answer].tolist()))
        return prompts
