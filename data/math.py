r"""Word problems to fine-tune a language model on, and the sets to test it on: numbers and multiple choice.

    data = load(MathConfig(data_file="folder"))             # prepared once, then read from config.data_dir
    print("\n".join(data.summary()))
    batch = data.train_batch(index=0, batch_size=64, seed=0)
    print_table("accuracy", {"SFT": scores}, data.groups()) # of data.show; scores (N,), a value per test row

    set         train   test   answer   read from                                  licence
    gsm8k       7,473  1,319   number   openai/grade-school-math                   MIT
    mawps       1,898    238   number   AGI-Edgerunners/LLM-Adapters               ODC-By 1.0
    aqua       97,467    254   letter   google-deepmind/AQuA                       Apache-2.0
    mathqa      4,432  2,954   letter   a local copy only: mathqa.dev.jsonl[.gz]   none stated
    test only (out of distribution)
    multiarith, addsub, singleeq (600, 395, 508), svamp (1,000): numbers, read from AGI-Edgerunners/LLM-Adapters

A row, by default:

    Question: {question}                                    and for multiple choice a line: Options: A) 5 B) 10 ...
    Answer: {the work, where the set has it; else the equation}
    The answer is 72.                                       or a letter: The answer is B.

GSM8K's calculator marks <<48/2=24>> are stripped, and the many ways in which AQuA's rationales name their letter at the
end. Work that ends in another answer than the reference is left out, as it occurs in machine-written solutions.

Most of addsub, multiarith and singleeq is in mawps's training file. So a test question that is also in training (or
validation), but for case, spacing and punctuation, has the source "addsub (in training)" and the others "addsub", and
groups() has the means with and without. Reference answers are as published: some are wrong or rounded.

Local copies may be named SET.SPLIT.jsonl[.gz] or as in the repositories above. Where a folder has mathqa.dev but not
aqua's training split, the one stands in for the other. Written to data_dir: math-<key>.npz; the key hashes the contents
of the files and every setting that matters.
"""
import dataclasses
import json
import os
import re
from collections import Counter, namedtuple
from dataclasses import dataclass
from typing import Literal

import numpy as np

from data.common import content_hash, download, file_hash, read_lines
from data.prompts import PromptData, Rows, final_number, prepared, same_answer
from data.tokenizer import Tokenizer, load_tokenizer

FORMAT = 1  # part of the cache key: raise it when the prepared files change
TRAINED, UNSEEN = ("gsm8k", "mawps", "aqua"), ("multiarith", "addsub", "singleeq")  # MoDr's six
SETS = (*TRAINED, *UNSEEN, "svamp", "mathqa")
CHOICES = ("aqua", "mathqa")  # multiple choice
SEEN = " (in training)"
GITHUB = "https://raw.githubusercontent.com/"
ADAPTERS = "AGI-Edgerunners/LLM-Adapters/main/dataset/"
PUBLISHED = {  # set -> path on GITHUB, {} being the split, and the folders that local copies of it may be in
    "gsm8k": ("openai/grade-school-math/master/grade_school_math/data/{}.jsonl",
              ("grade_school_math/data", "data", "gsm8k", "")),
    "aqua": ("google-deepmind/AQuA/master/{}.json", ("AQuA", "aqua", "")),
    "mawps": (ADAPTERS + "mawps/{}set.json", ("dataset/mawps", "mawps")),
    "multiarith": (ADAPTERS + "MultiArith/{}.json", ("dataset/MultiArith", "MultiArith")),
    "addsub": (ADAPTERS + "AddSub/{}.json", ("dataset/AddSub", "AddSub")),
    "singleeq": (ADAPTERS + "SingleEq/{}.json", ("dataset/SingleEq", "SingleEq")),
    "svamp": (ADAPTERS + "SVAMP/{}.json", ("dataset/SVAMP", "SVAMP")),
}


@dataclass
class MathConfig:
    data_file: str = ""  # folder with local copies of the sets, or one file to train on with the test sets beside it
    train_sets: str = "gsm8k,mawps,aqua"  # sets to train on, of gsm8k, mawps, aqua and mathqa
    test_sets: str = "gsm8k,mawps,aqua,multiarith,addsub,singleeq,svamp"  # sets to test on
    overlap: Literal["keep", "drop"] = "keep"  # what to do with training rows whose question is in a test set
    num_val: int = 500  # training rows to validate on instead
    num_test: int = -1  # questions per test set, drawn at random; -1 = all
    tokenizer: str = "bytes"  # bytes, bpe:SIZE (trained on the training rows), or a Hugging Face tokenizer.json
    template: str = r"Question: {question}\nAnswer:"  # prompt; \n is a line end
    work: bool = True  # answers show how they are reached; false = the final answer alone
    max_tokens: int = 1024  # longest row; longer ones are left out, in the test split only if the work is not the cause
    pack_to: int = 0  # tokens per row that the texts of a batch share; 0 = a row for each text
    data_seed: int = 0  # seed of the draws for validation and test
    data_dir: str = "data/cache"  # folder for downloaded and prepared files

    def __post_init__(self):
        for name, least in (("num_val", 0), ("num_test", -1), ("max_tokens", 16), ("pack_to", 0), ("data_seed", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} {getattr(self, name)}: give {least} or more")
        if "{question}" not in self.template:
            raise ValueError(f"template {self.template!r} has no place for the question: put {{question}} into it")
        for name, known in (("train_sets", (*TRAINED, "mathqa")), ("test_sets", SETS)):
            for word in (words := getattr(self, name).split(",")):
                if word not in known or words.count(word) > 1:
                    raise ValueError(f"{name} {getattr(self, name)!r}: {word!r} is no set or comes twice; give some of "
                                     f"{','.join(known)}, each once")


# ----------------------------------------------------------------------------------------------------------------------
# Files

def local_copy(folder, name):
    """The path of set.split `name` in a folder, or None."""
    which, split = name.split(".")
    address, folders = PUBLISHED.get(which, ("", ()))
    files = (os.path.basename(address).format(split), split + os.path.splitext(address)[1])  # mawps has both
    tails = [name + ending for ending in (".jsonl.gz", ".jsonl", ".json")]
    tails += [os.path.join(inner, file) for inner in folders for file in files]
    return next((path for tail in tails if os.path.isfile(path := os.path.join(folder, tail))), None)


def locate(config):
    """The files of a MathConfig, downloaded where there is no local copy: (set.split, path) pairs, training first.

    ValueError, one line, for what is neither here nor on the network.
    """
    folder, files = config.data_file, []
    if folder and not os.path.exists(folder):
        raise ValueError(f"data_file {folder} does not exist: name a folder with local copies, or a file to train on")
    wanted = [s + (".dev" if s == "mathqa" else ".train") for s in config.train_sets.split(",")]
    if os.path.isfile(folder):
        files, wanted = [(f"{os.path.basename(folder).split('.')[0] or 'own'}.train", folder)], []
        folder = os.path.dirname(folder) or "."
    for name in [*wanted, *(f"{s}.test" for s in config.test_sets.split(","))]:
        path = local_copy(folder, name) if folder else None
        if not path and name == "aqua.train" and folder and local_copy(folder, "mathqa.dev"):
            if "mathqa.dev" in wanted:
                continue
            name, path = "mathqa.dev", local_copy(folder, "mathqa.dev")
        files.append((name, path or fetch(name, config.data_dir)))
    return files


def fetch(name, data_dir):
    """Download set.split `name` -> its path. ValueError, one line, without a network."""
    which, split = name.split(".")
    where = f"name a folder that holds {name}.jsonl or the published file with --data_file, or leave the set out"
    if which not in PUBLISHED:
        raise ValueError(f"there is no download for {name}; {where}")
    address = GITHUB + PUBLISHED[which][0].format(split)
    return download(address, os.path.join(data_dir, "math", name + os.path.splitext(address)[1]), read_examples, where)


Example = namedtuple("Example", "question options work answer")  # str, list of str, str, str: a number or a letter


def read_examples(path):
    """The Examples of a file: JSON lines or a JSON array, .gz or not, in any of the published layouts.

    ValueError, one line, for a row that cannot be read.
    """
    lines, examples = read_lines(path), []
    if lines and lines[0][1].startswith("["):
        try:
            lines = list(enumerate(json.loads("\n".join(line for _, line in lines)), 1))
        except ValueError as error:
            raise ValueError(f"{path} is not a JSON array ({error}); give one, or a JSON object per line") from None
    for number, line in lines:
        try:
            examples.append(parse(json.loads(line) if isinstance(line, str) else line))
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise ValueError(f"{path}: row {number} cannot be read ({type(error).__name__}: {error}); give it a "
                             "question and an answer, which is a number or the letter of an option") from None
    if not examples:
        raise ValueError(f"{path} holds no questions; give JSON lines with question and answer")
    return examples


def first(row, *names):
    """The value of the first of these keys that a row has, without the list that one value may be in, or ""."""
    value = next((row[name] for name in names if row.get(name) not in (None, "", [])), "")
    return value[0] if isinstance(value, list) else value


def parse(row):
    """A row of any layout, a dict -> Example. Raises ValueError and others for what is no such row."""
    question = first(row, "question", "instruction", "original_text").strip()
    answer = str(first(row, "correct", "answer", "ans")).strip()
    options, work = row.get("options") or [], first(row, "rationale", "output")
    if "####" in answer:  # GSM8K has both in one
        work, _, answer = answer.rpartition("####")
    if "Answer Choices:" in question:  # LLM-Adapters has AQuA's options in the question
        question, _, listed = question.rpartition("Answer Choices:")
        options = [text.strip() for text in re.split(r"(?=\([A-E]\))", listed) if text.strip()]
    options = [f"{letter}) " + re.sub(rf"^\(?{letter}\s*\)", "", text.strip()).strip()
               for letter, text in zip("ABCDE", options)]
    answer = answer.upper() if answer.upper() in [text[0] for text in options] else plain_number(answer)
    if not work and row.get("equation_ok", True):
        work = equation(first(row, "equation"), answer)
    if not question.strip():
        raise ValueError("no question")
    return Example(question.strip(), options, clean_work(work, answer), answer)


def plain_number(text):
    """A number as shortly as it can be written: '1,450' -> '1450', '12.0' -> '12', '$3.5' -> '3.5', '3/4' -> '0.75'."""
    value = final_number(text)
    if value is None:
        raise ValueError(f"answer {text!r} is neither a number nor the letter of an option")
    return str(value) if value.denominator == 1 else np.format_float_positional(float(value), trim="-")


def equation(text, answer):
    """A set's equation as work: 'X=(22.0-14.0)' -> '(22-14) = 8'; one that is not solved for x stays: '70-x=27'."""
    text = re.sub(r"(\d)\.0\b", r"\1", text.strip())
    side = re.sub(r"^[A-Za-z]+\s*=\s*", "", text)
    return text if not side or re.search("[A-Za-z=]", side) else f"{side} = {answer}"


# How AQuA's rationales end: "Answer is A.", "Ans - b", "CORRECT OPTION:OPTION E", "answer : b ) 45", "Hence (A) is
# correct.", or the letter alone, as in "= 14 C"; and how solutions with a number do.
JOIN = r"[\s.,;:=>~({\[∴-]*(?:\b(?:so|hence|thus|therefore|and|imo)\b[\s,:]*)?"
ANSWER = r"(?:answer|ans|option|choice)\b"
NAMED = re.compile(rf"(?i){JOIN}(?:\b(?:the|my|correct|final|right|required)\s+)*\b{ANSWER}\W*(?:(?:is|would|should|"
                   rf"will|must|be|the|correct|option|choice|answer)\b\W*)*([a-e])\b(?:\s*\)[^\n]{{0,40}})?[^\w]*$")
NAMED_FIRST = re.compile(rf"(?i){JOIN}\(?\b([a-e])\)?\s+is\s+(?:the\s+)?"
                         rf"(?:(?:correct|right)\s+)?(?:{ANSWER}|correct)\W*$")
ALONE = re.compile(r"(?i)[\s.:;,=>-]*(?:\b(?:hence|thus|so)\b\s*)?(?<!\w)\(?([a-e])\)?[\s.]*$")
NUMBER_NAMED = re.compile(r"(?i)(?:\bso,?\s+)?\bthe (?:final )?answer is[^\n]*$")


def clean_work(work, answer):
    """Work without marks and without the ending that names the answer; "" if that is another answer."""
    work = re.sub(r"<<[^<>]*>>", "", work).strip()
    if not answer.isalpha():
        ending = NUMBER_NAMED.search(work)
        if ending and not same_answer(answer, ending[0]):
            return ""
        return work[:ending.start()].strip() if ending else work
    for pattern in (NAMED, NAMED_FIRST, ALONE):
        if ending := pattern.search(work, max(len(work) - 200, 0)):
            if ending[1].upper() == answer:
                return work[:ending.start()].strip()
            return work if pattern is ALONE else ""  # a letter alone may be a variable
    return work


# ----------------------------------------------------------------------------------------------------------------------
# Rows

def plain(question):
    """A question as it is compared: letters and digits alone, in lower case."""
    return "".join(re.findall(r"[^\W_]+", question.lower()))


def triple(config, source, example, work=True):
    """(prompt, answer, source) of an Example."""
    question = "\nOptions: ".join(filter(None, (example.question, " ".join(example.options))))
    shown = f" {example.work}\n" if work and config.work and example.work else " "
    prompt = config.template.replace("\\n", "\n").replace("{question}", question)
    return prompt, f"{shown}The answer is {example.answer}.", source


def read_sets(files, split):
    """The (set, Example) pairs of a split, "train" (mathqa.dev too) or "test". ValueError for a file of another set."""
    pairs = []
    for name, path in files:
        which, part = name.split(".")
        if (part == "test") != (split == "test"):
            continue
        examples = read_examples(path)
        if which in SETS and any(bool(example.options) != (which in CHOICES) for example in examples):
            kind = "multiple choice" if which in CHOICES else "problems whose answer is a number"
            raise ValueError(f"{path} is not {which}, which is {kind}: give another file, or name it after its set")
        pairs += [(which, example) for example in examples]
    return pairs


def draw_tests(pairs, config):
    """num_test pairs of each set, in their order."""
    if config.num_test < 0:
        return pairs
    rng, sets, kept = np.random.default_rng([config.data_seed, 1]), np.array([which for which, _ in pairs]), []
    for which in dict.fromkeys(sets.tolist()):
        kept += sorted(rng.permutation(np.flatnonzero(sets == which))[:config.num_test].tolist())
    return [pairs[i] for i in kept]


def split_training(rows, questions, config):
    """Draw num_val rows with different questions -> (training, validation) masks (N,) bool; they share no question."""
    numbers = {}
    keys = np.array([numbers.setdefault(question, len(numbers)) for question in questions], np.int64)
    order = np.random.default_rng([config.data_seed, 0]).permutation(len(rows))
    chosen = order[np.sort(np.unique(keys[order], return_index=True)[1])[:config.num_val]]
    validation = np.isin(np.arange(len(rows)), chosen)
    return ~np.isin(keys, keys[chosen]), validation


def build(config, files, tokenizer=None):
    """Read, compare and encode: (split -> Rows, tokenizer, lines for the summary). tokenizer: None = train it."""
    train, test, left_out = read_sets(files, "train"), read_sets(files, "test"), Counter()
    if config.overlap == "drop":  # with what is in the whole sets, so that training does not depend on num_test
        tested = {plain(example.question) for _, example in test}
        number, train = len(train), [pair for pair in train if plain(pair[1].question) not in tested]
        left_out["training rows whose question is in a test set"] = number - len(train)
    triples = [triple(config, *pair) for pair in train]
    tokenizer = tokenizer or load_tokenizer(config.tokenizer, (prompt + reply for prompt, reply, _ in triples))
    rows = Rows.of(triples, tokenizer)
    short = np.diff(rows.starts) <= config.max_tokens
    left_out[f"training rows of more than {config.max_tokens:,} tokens"] = int((~short).sum())
    rows, train = rows.take(short), [pair for pair, kept in zip(train, short) if kept]
    questions = [plain(example.question) for _, example in train]
    masks = split_training(rows, questions, config)
    if not masks[0].any():
        raise ValueError(f"nothing is left to train on: num_val {config.num_val} and max_tokens {config.max_tokens} "
                         f"leave none of {len(short):,} rows; give fewer to validate on, or a larger --max_tokens")
    tests, seen = encode_tests(draw_tests(test, config), set(questions), config, tokenizer, left_out)
    splits = dict(train=rows.take(masks[0]), val=rows.take(masks[1]), test=tests)
    notes = [f"left out: {', '.join(f'{n:,} {what}' for what, n in left_out.items() if n) or 'nothing'}",
             f"test questions that are in training: {seen}"]
    if any(name == "mathqa.dev" for name, _ in files) and "mathqa" not in config.train_sets:
        notes.insert(0, "mathqa.dev stands in for the training split of aqua, which is not there")
    return splits, tokenizer, notes


def encode_tests(pairs, trained, config, tokenizer, left_out):
    """Test rows, the source telling which are in `trained`, a set of questions: (Rows, counts per set as text)."""
    inside = [plain(example.question) in trained for _, example in pairs]
    triples = [triple(config, which + SEEN * old, example) for (which, example), old in zip(pairs, inside)]
    long = np.diff(Rows.of(triples, tokenizer).starts) > config.max_tokens
    for i in np.flatnonzero(long):  # the final answer can be scored without the work
        triples[i] = triple(config, triples[i][2], pairs[i][1], work=False)
    rows = Rows.of(triples, tokenizer)
    short = np.diff(rows.starts) <= config.max_tokens
    left_out["works of test rows, too long"] = int((long & short).sum())
    left_out[f"test rows of more than {config.max_tokens:,} tokens"] = int((~short).sum())
    total = Counter(which for (which, _), kept in zip(pairs, short) if kept)
    seen = Counter(which for (which, _), old, kept in zip(pairs, inside, short) if old and kept)
    return rows.take(short), ", ".join(f"{which} {seen[which]:,} of {n:,}" for which, n in total.items())


def load(config, prepare=True, saved=None):
    """Prepare the data of a MathConfig, or read it from the cache: MathData. ValueError, one line, for mistakes.

    prepare False: no splits, and no tokenizer if it is to be trained (a checkpoint holds it). saved: what state() kept
    in a checkpoint, whose tokenizer is then used.
    """
    if saved:
        tokenizer = Tokenizer.from_state(saved["tokenizer"])
    else:
        tokenizer = None if config.tokenizer.startswith("bpe:") else load_tokenizer(config.tokenizer)
    if not prepare:
        return MathData("math", tokenizer)
    files = locate(config)
    # where the files lie and how a batch is laid out does not matter
    settings = dataclasses.replace(config, data_file="", data_dir="", pack_to=0)
    key = content_hash(FORMAT, settings, tokenizer.fingerprint() if tokenizer else config.tokenizer,
                       [(name, path.endswith(".gz"), file_hash(path)) for name, path in files])[:16]
    path = os.path.join(config.data_dir, f"math-{key}.npz")

    def make():
        print(f"preparing word problems ({', '.join(name for name, _ in files)}) -> {path}", flush=True)
        splits, used, notes = build(config, files, tokenizer)
        return splits, dict(tokenizer=used.state(), notes=notes)

    splits, about = prepared(path, make)
    return MathData("math", Tokenizer.from_state(about["tokenizer"]), notes=about["notes"], pack_to=config.pack_to,
                    **splits)


class MathData(PromptData):
    """PromptData whose test rows have the source SET or "SET (in training)"."""

    def groups(self):
        """As in PromptData.

        The sets; the means of those trained on, of the others in MoDr's tables, and of all six; svamp and mathqa apart;
        then the same without the questions that are in training, where any are.
        """
        sets, seen = (np.char.replace(self.test.source, SEEN, ""), np.char.endswith(self.test.source, SEEN))
        groups = {}
        for ending, rows in (("", np.ones_like(seen)), (", not in training", ~seen))[:1 + seen.any()]:
            masks = {name: (sets == name) & rows for name in SETS if ((sets == name) & rows).any()}
            for title, members in (("in distribution", TRAINED), ("out of distribution", UNSEEN), ("", SETS[6:])):
                groups |= {name + ending: [masks[name]] for name in members
                           if name in masks and (not ending or (seen & (sets == name)).any())}
                if title:
                    groups[f"mean {title}{ending}"] = [masks[name] for name in members if name in masks]
            groups[f"mean of the six{ending}"] = [masks[name] for name in SETS[:6] if name in masks]
        return {label: masks for label, masks in groups.items() if masks}
