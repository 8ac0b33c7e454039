"""Arithmetic to train a small language model on: sums and products in figures and in words, generated.

    data = load(ArithConfig())                              # prepared once, then read from config.data_dir
    print("\n".join(data.summary()))
    batch = data.train_batch(index=0, batch_size=64, seed=0)

Every example is a question, a worked answer and, at its end, the final number (the last number in the answer):

    family     question                                       answer
    sum2       04712+00595=                                   005307
    sum3       04712+00595+08021=                             013328
    sum4, sum5 and so on
    mul        04712*8=                                       037696
    word       Ann has 04712 nuts and gets 00595 more.\\n      04712+00595=005307
    test only, unless `families` names them
    sum6       six numbers: a longer chain
    large      sum3 with numbers of `digits` digits, one more than any number in training has
    wording    word, in sentences that training does not have

Numbers have a fixed width, with leading zeros, `digits` in a question and one more in a result, as in columns on
paper: a small model then learns in minutes where to look, and what remains is what takes thought. The answer is written
from its largest digit on, so a carry must be known before the digits that cause it are written: it has to be thought
through. Two thirds of the sums are made so that carries travel far: runs of columns that sum to 9, 19, ... or 8.

No question of the validation or test split is in training. Written to data_dir: arith-<key>.npz; the key hashes every
setting that matters.
"""
import dataclasses
import os
import random
from dataclasses import dataclass

from data.common import content_hash
from data.prompts import PromptData, Rows, prepared
from data.tokenizer import Tokenizer, byte_tokenizer

FORMAT = 1  # part of the cache key: raise it when the prepared files change
FAMILIES = ("sum2", "sum3", "sum4", "sum5", "mul", "word", "sum6", "large", "wording")

NAMES = "Ann Ben Eva Ida Jon Kim Leo Mia Ned Pia Sam Tom".split()
THINGS = "nuts pens eggs keys figs maps cups hats".split()
SENTENCES = [  # trained; a and b stand for the numbers
    ("+", "{name} has {a} {thing} and gets {b} more."), ("*", "{name} has {b} bags of {a} {thing}."),
    ("+", "{name} buys {a} {thing}, then {b}."), ("*", "{b} boxes, {a} {thing} in each."),
    ("+", "{a} {thing} and {b} {thing}: how many?"), ("*", "{a} {thing} a day, for {b} days."),
    ("+", "{a} {thing} here, {b} there."), ("*", "{name} buys {a} {thing} {b} times."),
    ("+", "To {a} {thing} {name} adds {b}."), ("*", "{b} sacks hold {a} {thing} each."),
    ("+", "{a} old {thing}, {b} new ones."), ("*", "Each of {b} carts has {a} {thing}."),
]
OTHER_SENTENCES = [
    ("+", "{name} finds {a} {thing}, then {b}."), ("*", "{b} trays of {a} {thing}."),
    ("+", "{a} {thing} on the left, {b} on the right."), ("*", "{name} has {a} {thing} a day for {b} days."),
]


@dataclass
class ArithConfig:
    digits: int = 5  # digits of a number in a question; the leading one is 0 but in the family large
    families: str = "sum2,sum3,sum4,sum5,mul,word"  # to train and validate on; the test split has all nine
    num_train: int = 200000  # examples to train on
    num_val: int = 500  # examples to validate on
    num_test: int = 1800  # examples to test on; a ninth for each of the nine families
    pack_to: int = 0  # tokens per row that the texts of a batch share; 0 = a row for each text
    data_seed: int = 0  # seed of the generator
    data_dir: str = "data/cache"  # folder for prepared files

    def __post_init__(self):
        if not 3 <= self.digits <= 15:
            raise ValueError(f"digits {self.digits}: give 3 to 15")
        names = self.families.split(",")
        for name in names:
            if name not in FAMILIES or names.count(name) > 1:
                raise ValueError(f"families {self.families}: {name!r} is unknown or named twice; choose of "
                                 f"{','.join(FAMILIES)}")
        for name in ("num_train", "num_val", "num_test", "pack_to", "data_seed"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} {getattr(self, name)}: give 0 or more")


def number(rng, most):
    """A number of 1 to `most` digits, each count as likely."""
    digits = rng.randint(1, most)
    least = 10 ** (digits - 1) if digits > 1 else 0
    return least + int(rng.random() * (10**digits - least))


def summands(rng, count, most):
    """`count` numbers of up to `most` digits; in two of three draws carries travel far."""
    if rng.random() < 1 / 3:
        return [number(rng, most) for _ in range(count)]
    width = rng.randint(2, most)
    columns = [rng.choices(range(10), k=count) for _ in range(width)]  # the largest digits first
    first, last = sorted(rng.choices(range(width), k=2))
    for column in columns[first:last + 1]:
        column[-1] = (rng.choice((9, 9, 9, 8)) - sum(column[:-1])) % 10
    return [int("".join(map(str, digits))) for digits in zip(*columns)]


def figures(rng, family, digits):
    """A question in figures: (question, its answer's number)."""
    if family == "mul":
        a, b = number(rng, digits - 1), rng.randint(2, 9)
        return f"{a:0{digits}}*{b}=", a * b
    if family == "large":
        numbers = [rng.randrange(10 ** (digits - 1), 10**digits) for _ in range(3)]
    else:
        numbers = summands(rng, int(family[-1]), digits - 1)
    return "+".join(f"{n:0{digits}}" for n in numbers) + "=", sum(numbers)


def example(rng, family, digits):
    """(question, worked answer) of a family."""
    if family not in ("word", "wording"):
        question, result = figures(rng, family, digits)
        return question, f"{result:0{digits + 1}}"
    sign, sentence = rng.choice(SENTENCES if family == "word" else OTHER_SENTENCES)
    problem, result = figures(rng, "sum2" if sign == "+" else "mul", digits)
    a, b = problem[:-1].split(sign)
    question = sentence.format(a=a, b=b, name=rng.choice(NAMES), thing=rng.choice(THINGS))
    return question + "\n", f"{problem}{result:0{digits + 1}}"


def draw(split, config, taken):
    """The (question, answer, family) triples of a split, the families in turn; no question is in `taken`, a set.

    Questions for validation and testing are put into it, so there each comes once.
    """
    families = FAMILIES if split == "test" else config.families.split(",")
    rng, examples = random.Random(f"arith {config.data_seed} {split}"), []
    count = tries = getattr(config, f"num_{split}")
    while len(examples) < count:
        family = families[len(examples) % len(families)]
        question, answer = example(rng, family, config.digits)
        if question not in taken:
            examples.append((question, answer, family))
            if split != "train":
                taken.add(question)
        elif (tries := tries + 1) > 2 * count + 100_000:
            raise ValueError(f"digits {config.digits} has too few questions for --num_{split} {count}; give more "
                             "digits or ask for fewer")
    return examples


def build(config, tokenizer):
    """Draw the splits, the test split first: split -> Rows."""
    taken = set()
    return {split: Rows.of(draw(split, config, taken), tokenizer) for split in ("test", "val", "train")}


def load(config, prepare=True, saved=None):
    """Prepare the data of an ArithConfig, or read it from the cache: PromptData. ValueError, one line, for mistakes.

    prepare False: no splits, only the tokenizer. saved: what state() kept in a checkpoint, whose tokenizer is used.
    """
    tokenizer = Tokenizer.from_state(saved["tokenizer"]) if saved else byte_tokenizer()
    if not prepare:
        return PromptData("arith", tokenizer)
    fields = {name: value for name, value in dataclasses.asdict(config).items() if name not in ("data_dir", "pack_to")}
    key = content_hash(FORMAT, sorted(fields.items()), tokenizer.fingerprint())[:16]
    path = os.path.join(config.data_dir, f"arith-{key}.npz")

    def make():
        print(f"preparing arithmetic ({config.num_train:,} examples to train on) -> {path}", flush=True)
        return build(config, tokenizer), {}

    splits, _ = prepared(path, make)
    note = f"arithmetic, numbers of {config.digits} digits, seed {config.data_seed}"
    trained = config.families.split(",")
    means = {"mean of the trained families": trained,
             "mean of the others": [name for name in FAMILIES if name not in trained]}
    return PromptData("arith", tokenizer, notes=[note], means=means, pack_to=config.pack_to, **splits)
