r"""Word problems to fine-tune a language model on, and the sets to test it on: numbers and multiple choice.

    data = load(MathConfig(data_file="folder"))             # prepared once, then read from config.data_dir
    print("\n".join(data.summary()))
    batch = data.train_batch(index=0, batch_size=64, seed=0)
    print("\n".join(data.table({"SFT": scores, "MoDr": other_scores})))     # (N,) each, a value per test row

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

Most of addsub, multiarith and singleeq is in mawps's training file. So a test question that is in training, but for
case, spacing and punctuation, has the source "addsub (in training)" and the others "addsub"; table() has both means.
Reference answers are as published: some are wrong or rounded.

Local copies may be named SET.SPLIT.jsonl[.gz] or as in the repositories above. Where neither those nor the network has
aqua's training split, mathqa.dev stands in. Written to data_dir: math-<key>.npz; the key hashes the files and settings.
"""
import dataclasses
import json
import os
import re
from collections import Counter, namedtuple
from dataclasses import dataclass
from typing import Literal

import numpy as np

from data.common import atomic_write, content_hash, download, file_hash, read_lines
from data.prompts import IGNORE, PromptData, Rows, final_letter, final_number, same_answer
from data.tokenizer import Tokenizer, load_tokenizer

FORMAT = 1  # part of the cache key: raise it when the prepared files change
TRAINED, UNSEEN = ("gsm8k", "mawps", "aqua"), ("multiarith", "addsub", "singleeq")  # MoDr's six
SETS = (*TRAINED, *UNSEEN, "svamp", "mathqa")
SEEN = " (in training)"
GITHUB = "https://raw.githubusercontent.com/"
ADAPTERS = "AGI-Edgerunners/LLM-Adapters/main/dataset/"
PUBLISHED = {  # set.split -> path on GITHUB, of which local copies may have any number of the last parts
    "gsm8k.train": "openai/grade-school-math/master/grade_school_math/data/train.jsonl",
    "gsm8k.test": "openai/grade-school-math/master/grade_school_math/data/test.jsonl",
    "aqua.train": "google-deepmind/AQuA/master/train.json", "aqua.test": "google-deepmind/AQuA/master/test.json",
    "mawps.train": ADAPTERS + "mawps/trainset.json", "mawps.test": ADAPTERS + "mawps/testset.json",
    "multiarith.test": ADAPTERS + "MultiArith/test.json", "addsub.test": ADAPTERS + "AddSub/test.json",
    "singleeq.test": ADAPTERS + "SingleEq/test.json", "svamp.test": ADAPTERS + "SVAMP/test.json",
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
    data_seed: int = 0  # seed of the draws for validation and test
    data_dir: str = "data/cache"  # folder for downloaded and prepared files

    def __post_init__(self):
        for name, least in (("num_val", 0), ("num_test", -1), ("max_tokens", 16), ("data_seed", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} {getattr(self, name)}: give {least} or more")
        if "{question}" not in self.template:
            raise ValueError(f"template {self.template!r} has no place for the question: put {{question}} into it")
        for name, known in (("train_sets", (*TRAINED, "mathqa")), ("test_sets", SETS)):
            for word in (words := getattr(self, name).split(",")):
                if word not in known or words.count(word) > 1:
                    raise ValueError(f"{name} {getattr(self, name)!r}: {word!r} is not a set of its own here; give some "
                                     f"of {','.join(known)}, each once")


# ----------------------------------------------------------------------------------------------------------------------
# Files

def local_copy(folder, name):
    """The path of set.split `name` in a folder, or None."""
    parts = PUBLISHED.get(name, "").split("/")[3:]  # without owner, repository and branch
    tails = ["/".join(parts[i:]) for i in range(len(parts))]
    if "LLM-Adapters" in PUBLISHED.get(name, ""):
        tails.remove(parts[-1])  # test.json alone says nothing
        # the same set as instructions, in the same folder of the repository
        tails += [tail.replace("set.json", ".json") for tail in tails if tail.endswith("set.json")]
    else:
        tails += [f"{folder}/{parts[-1]}" for folder in ("gsm8k", "AQuA", "aqua") if name.startswith(folder.lower())]
    tails = [f"{name}.jsonl.gz", f"{name}.jsonl", f"{name}.json", *tails]
    return next((path for tail in tails if tail and os.path.isfile(path := os.path.join(folder, tail))), None)


def locate(config):
    """The files of a MathConfig, downloaded where there is no local copy: (set.split, path) pairs, training first.

    ValueError, one line, for what is neither here nor on the network.
    """
    folder, files = config.data_file, []
    if folder and not os.path.exists(folder):
        raise ValueError(f"data_file {folder} does not exist: name a folder with local copies, or a file to train on")
    wanted = [s + (".dev" if s == "mathqa" else ".train") for s in config.train_sets.split(",")]
    if os.path.isfile(folder):
        files, wanted = [(f"{os.path.basename(folder).split('.')[0]}.train", folder)], []
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
    where = f"name a folder that holds {name}.jsonl or the published file with --data_file, or leave the set out"
    if name not in PUBLISHED:
        raise ValueError(f"there is no download for {name}; {where}")
    address = GITHUB + PUBLISHED[name]
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
            raise ValueError(f"{path}: row {number} cannot be read ({type(error).__name__}: {error}); it needs question "
                             "and answer, the answer a number or a letter") from None
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
    options = [re.sub(r"^\(?([A-E])\s*\)\s*", r"\1) ", text.strip()) for text in options]
    letter = answer.upper() if answer.upper() in [text[:1] for text in options] else ""
    answer = letter or plain_number(answer)
    if not work and row.get("equation_ok", True) and not options:
        work = equation(first(row, "equation"), answer)
    if not question.strip():
        raise ValueError("no question")
    return Example(question.strip(), options, clean_work(work, answer), answer)


def plain_number(text):
    """A number as shortly as it can be written: '1,450' -> '1450', '12.0' -> '12', '$3.50' -> '3.50'."""
    value = final_number(text)
    if value is None:
        raise ValueError(f"answer {text!r} is neither a number nor the letter of an option")
    if value.denominator == 1:
        return str(value)
    return re.sub(r"[^\d./-]", "", text)


def equation(text, answer):
    """A set's equation as work: 'X=(22.0-14.0)' -> '(22-14) = 8'; one that is not solved for x stays: '70-x=27'."""
    text = re.sub(r"(\d)\.0\b", r"\1", text.strip())
    side = re.sub(r"^[A-Za-z]+\s*=\s*", "", text)
    return text if not side or re.search("[A-Za-z=]", side) else f"{side} = {answer}"


# How AQuA's rationales end: "Answer is A.", "Ans - b", "CORRECT OPTION:OPTION E", "answer : b ) 45", "Hence (A) is
# correct answer.", or the letter alone on a line or after a stop; and how solutions with a number do.
JOIN = r"[\s.,;:=>~({\[∴-]*(?:\b(?:so|hence|thus|therefore|and|imo)\b[\s,:]*)?"
ANSWER = r"(?:answer|ans|option|choice)\b"
NAMED = re.compile(rf"(?i){JOIN}(?:\b(?:the|my|correct|final|right|required)\s+)*\b{ANSWER}\W*(?:(?:is|would|should|"
                   rf"will|must|be|the|correct|option|choice|answer)\b\W*)*([a-e])\b(?:\s*\)[^\n]{{0,40}})?[^\w]*$")
NAMED_FIRST = re.compile(rf"(?i){JOIN}\b([a-e])\)?\s+is\s+(?:the\s+)?(?:correct|right)\s+{ANSWER}[^\w]*$")
ALONE = re.compile(r"(?i)(?:\n|[.:;]\s|\b(?:hence|thus|so)\b)\s*\(?([a-e])\)?[\s.]*$")
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
        if ending := pattern.search(work):
            if ending[1].upper() != answer:
                return work if pattern is ALONE else ""  # a letter alone may be a variable
            return work[:ending.start()].strip()
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
