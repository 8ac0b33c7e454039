r"""Any prompts with answers, and any chats, to fine-tune a language model on: JSON lines of your own.

    data = load(ChatConfig(data_file="chats.jsonl", tokenizer="FOLDER"))    # prepared once, then read from the cache
    print("\n".join(data.summary()))
    batch = data.train_batch(index=0, batch_size=64, seed=0)
    ids = data.encode("Who are you?")                       # a user's prompt, as the model has learned to read it

A line of the file (.gz too) is one of

    {"prompt": "...", "response": "..."}                    also instruction or question; completion, output or answer
    {"instruction": "...", "input": "...", "output": "..."} an input that is not empty follows after a blank line
    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}, ...]}
    {"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}, ...]}

Lines that begin with # are comments. In a chat a user speaks before the assistant does, and before that a system
may. Each message of the assistant becomes a row:
the prompt is everything before it. Chat templates write a message differently once it is past, as by leaving out what
was thought; so only a row for each shows the model, in training, what it sees when it answers.

The tokenizer's folder may hold a chat template, https://huggingface.co/docs/transformers/chat_templating: a program in
Jinja that writes a chat as one text. The prompt is then what it writes for the messages before the answer, to be gone
on with; the answer is what it writes for the answer itself, up to the token that ends a text. What a template puts
before the message on its own, such as the marks of an empty thought, belongs to the prompt if it ends with that, else
to the answer; where it ends with something else, as it asks for a thought and the answer has none, the answer begins a
line earlier. Special tokens count as such in what a template writes. A pair is a chat of two messages.

Without a template a pair is left as it stands, but for a line end before the answer if there is no space between the
two; a chat is written with a line for each message, and special tokens are text like any other:

    System: {message}
    User: {message}
    Assistant:                                              and the answer: a space and the message

The splits are drawn by line, so a chat is in one of them, with all of its rows. Rows for training whose prompt is also
in validation or test are left out. Answers of any kind cannot be graded: evaluation is by loss. Written to data_dir:
chat-<key>.npz; the key hashes the file's content, the tokenizer, the template and every setting that matters.
"""
import dataclasses
import datetime
import functools
import json
import os
import re
from collections import namedtuple
from dataclasses import dataclass
from typing import Literal

import numpy as np

from data.common import content_hash, file_hash, read_lines, report_bad_rows
from data.prompts import PromptData, Rows, prepared
from data.tokenizer import Tokenizer, chat_template, load_tokenizer

FORMAT = 1  # part of the cache key: raise it when the prepared files change
PROMPT_KEYS, ANSWER_KEYS = ("prompt", "instruction", "question"), ("response", "completion", "output", "answer")
CHAT_KEYS = ("messages", "conversations")
ROLES = {"system": "system", "user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant"}
PROBE = "\ue000answer\ue001"  # stands for an answer, to see what a template writes before it; no text has it


@dataclass
class ChatConfig:
    data_file: str = ""  # JSON lines to train on (.gz too): prompts with responses, or chats as messages
    tokenizer: str = "bytes"  # bytes, bpe:SIZE (trained on the training rows), or a Hugging Face folder
    chat_template: Literal["auto", "off"] = "auto"  # how chats are written: as the tokenizer's folder says, or plainly
    bad_rows: Literal["error", "skip"] = "error"  # what a faulty line is: an error, or skipped and reported
    val_fraction: float = 0.05  # share of the lines to validate on; 0 = none
    test_fraction: float = 0.05  # share of the lines to test on; 0 = none
    max_tokens: int = 1024  # longest row; longer ones are left out
    pack_to: int = 0  # tokens per row that the texts of a batch share; 0 = a row for each text
    data_seed: int = 0  # seed of the draws for validation and test
    data_dir: str = "data/cache"  # folder for prepared files

    def __post_init__(self):
        for name, least in (("max_tokens", 2), ("pack_to", 0), ("data_seed", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} {getattr(self, name)}: give {least} or more")
        for name in ("val_fraction", "test_fraction"):
            if not 0 <= getattr(self, name) < 1:  # nan too
                raise ValueError(f"{name} {getattr(self, name):g} is not a share of the lines: give 0 to below 1")


# ----------------------------------------------------------------------------------------------------------------------
# Templates

@functools.lru_cache(maxsize=4)
def compiled(template):
    """Jinja source -> its jinja2 Template. ValueError, one line, if it is not valid or jinja2 is missing."""
    try:
        import jinja2.ext
        import jinja2.sandbox
    except ImportError:
        raise ValueError("the tokenizer's chat template needs the package jinja2: pip install jinja2, or do without "
                         "the template by --chat_template off") from None

    def fail(message):
        raise jinja2.TemplateError(message)

    # the sandbox, since templates come with weights from anywhere
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                                               extensions=[jinja2.ext.loopcontrols])
    environment.globals |= {"raise_exception": fail, "strftime_now": lambda f: datetime.datetime.now().strftime(f)}
    # Jinja's own filter escapes for HTML
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    # a mark of what the assistant writes; what it encloses is what counts here
    source = re.sub(r"(\{%[-+]?\s*)(end)?generation(\s*[-+]?%\})",
                    lambda tag: tag[1] + ("endif" if tag[2] else "if true") + tag[3], template)
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise ValueError(f"the tokenizer's chat template is not valid ({_reason(error)}); mend it, or do without it by "
                         "--chat_template off") from None


def render(template, messages, ask):
    """Messages (dicts of role and content) as a template writes them -> str. ask: with the beginning of an answer."""
    chat = compiled(template)
    try:
        return chat.render(messages=messages, add_generation_prompt=ask, tools=None, documents=None)
    except Exception as error:  # it is a program, which may fail in any way
        raise ValueError(f"the chat template fails ({_reason(error)})") from None


def _reason(error):
    return (" ".join(str(error).split()) or type(error).__name__)[:200]


def by_template(template, messages, end):
    """Messages, the last an answer, as (prompt, answer) that a template writes. end: the text of the end token.

    ValueError if the template does not write the one before the other.
    """
    prompt, whole = render(template, messages[:-1], True), render(template, messages, False)
    before = prompt
    if not whole.startswith(prompt):  # the prompt may begin an answer in a way that a past one does not have
        probe = render(template, [*messages[:-1], messages[-1] | {"content": PROBE}], False)
        before = probe[:max(probe.rfind(PROBE), 0)]
        if not before or not prompt.startswith(before) or not whole.startswith(before):
            # or in one of several ways, as with or without a thought: the answer goes on from the lines they share
            common, past = os.path.commonprefix([prompt, whole]), render(template, messages[:-1], False)
            prompt = before = common[:common.rfind("\n") + 1]
            if not before.startswith(past):
                raise ValueError("the chat template does not write the messages before an answer as it does with it")
    answer = re.sub(rf"{re.escape(end)}\s*\Z", "", whole[len(before):])
    if not answer.strip() or messages[-1]["content"].split()[-1] not in prompt + answer:
        raise ValueError("the chat template leaves out the end of the answer")
    return prompt, answer


# ----------------------------------------------------------------------------------------------------------------------
# Lines

Chat = namedtuple("Chat", "line source pairs")  # its number; "pair" or "chat"; (prompt, answer) for each answer


def parse(row):
    """A line's JSON value -> (its source, messages as dicts of role and content). ValueError: why it is none."""
    if not isinstance(row, dict):
        raise ValueError("not a JSON object")
    key = next((key for key in CHAT_KEYS if key in row), None)
    if key:
        return "chat", parse_chat(row[key], key)
    keys = [next((key for key in names if key in row), None) for names in (PROMPT_KEYS, ANSWER_KEYS)]
    if None in keys:
        accepted = PROMPT_KEYS if keys[0] is None else ANSWER_KEYS
        raise ValueError(f"has none of the keys {', '.join(accepted)}, nor {' or '.join(CHAT_KEYS)}")
    prompt, answer = (_text(row[key], key) for key in keys)
    extra = row.get("input") or ""
    if not isinstance(extra, str):
        raise ValueError("input is not a string")
    prompt += f"\n\n{extra}" if extra.strip() else ""
    return "pair", [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]


def parse_chat(entries, key):
    """The list of a chat's entries -> messages as dicts of role and content, an empty system message left out."""
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ValueError(f"{key} is not a list of objects")
    messages = []
    for number, entry in enumerate(entries, 1):
        role = entry.get("role", entry.get("from"))
        if not isinstance(role, str) or role not in ROLES:
            raise ValueError(f"message {number} has the role {str(role)[:40]!r}, not {', '.join(ROLES)}")
        content = entry.get("content", entry.get("value"))
        if ROLES[role] != "system" or content != "":
            messages.append({"role": ROLES[role], "content": _text(content, f"the content of message {number}")})
    roles = [message["role"] for message in messages]
    if "assistant" not in roles:
        raise ValueError("no message is the assistant's")
    if "user" not in roles[:roles.index("assistant")]:
        raise ValueError("the assistant speaks before any user")
    return messages


def _text(value, name):
    if not isinstance(value, str):
        raise ValueError(f"{name} is not a string")
    if not value.strip():
        raise ValueError(f"{name} is empty")
    return value


def plainly(source, messages):
    """Messages, the last an answer, as (prompt, answer) without a template; see the top of this file."""
    *before, last = (message["content"] for message in messages)
    if source == "pair":
        return before[0], last if before[0][-1].isspace() or last[0].isspace() else "\n" + last
    return written_chat(messages[:-1]), " " + last


def written_chat(messages):
    """Messages as the plain text of a prompt, which the assistant is to go on with."""
    return "".join(f"{message['role'].capitalize()}: {message['content']}\n" for message in messages) + "Assistant:"


def read_chats(config, template, end):
    """The file of a ChatConfig -> (list of Chat, lines for the summary). ValueError, one line, as report_bad_rows."""
    chats, reasons = [], {}
    for i, (number, line) in enumerate(read_lines(config.data_file)):
        source, pairs = "", []
        try:
            source, messages = parse(_loads(line))
            answers = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
            pairs = [by_template(template, messages[:n + 1], end) if template else plainly(source, messages[:n + 1])
                     for n in answers]
        except ValueError as error:
            reasons[i] = str(error)
        chats.append(Chat(number, source, pairs))
    notes = report_bad_rows(reasons, chats, config.data_file, config.bad_rows, "chat")
    return [chat for i, chat in enumerate(chats) if i not in reasons], notes


def _loads(line):
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {_reason(error)}") from None


# ----------------------------------------------------------------------------------------------------------------------
# Splits: prepared once, cached.

def split(chats, config):
    """Draw the chats of each split: split -> (prompt, answer, source) triples; how many rows were left out of train.

    A fraction above 0 is one chat at least.
    """
    order = np.random.default_rng(config.data_seed).permutation(len(chats))
    num_val, num_test = (max(int(share * len(chats)), share > 0) for share in (config.val_fraction,
                                                                               config.test_fraction))
    if num_val + num_test >= len(chats):
        raise ValueError(f"nothing is left to train on: val_fraction {config.val_fraction:g} and test_fraction "
                         f"{config.test_fraction:g} take {num_val:d} and {num_test:d} of {len(chats)} lines; give more "
                         "lines, or smaller fractions")
    chosen = dict(val=order[:num_val], test=order[num_val:num_val + num_test], train=order[num_val + num_test:])
    triples = {name: [(*pair, chats[i].source) for i in sorted(rows) for pair in chats[i].pairs]
               for name, rows in chosen.items()}
    scored = {prompt for name in ("val", "test") for prompt, *_ in triples[name]}
    kept = [triple for triple in triples["train"] if triple[0] not in scored]
    return triples | {"train": kept}, len(triples["train"]) - len(kept)


def build(config, template, tokenizer=None):
    """Read, draw and encode: (split -> Rows, tokenizer, lines for the summary). tokenizer: None = train it."""
    end = tokenizer.decode([tokenizer.eot]) if tokenizer else ""  # a template has a tokenizer
    chats, notes = read_chats(config, template, end)
    triples, seen = split(chats, config)
    tokenizer = tokenizer or load_tokenizer(config.tokenizer, (prompt + reply for prompt, reply, _ in triples["train"]))
    splits, long = {}, 0
    for name in ("train", "val", "test"):
        rows = Rows.of(triples[name], tokenizer, special=bool(template))
        short = np.diff(rows.starts) <= config.max_tokens
        splits[name], long = rows.take(short), long + int((~short).sum())
        if not short.any() and (len(rows) or name == "train"):
            why = f"every row has more than {config.max_tokens} tokens; give a larger --max_tokens" if len(rows) else (
                "every prompt is also in val or test; give different ones")
            raise ValueError(f"{config.data_file}: nothing is left of {name}: {why}")
    left = [f"{seen:,} training rows whose prompt is in val or test"] * (seen > 0)
    left += [f"{long:,} rows of more than {config.max_tokens:,} tokens"] * (long > 0)
    how = "by the tokenizer's chat template" if template else "plainly, without a chat template"
    return splits, tokenizer, [f"{len(chats):,} lines, written {how}", f"left out: {', '.join(left) or 'nothing'}",
                               *notes]


def load(config, prepare=True, saved=None):
    """Prepare the data of a ChatConfig, or read it from the cache: ChatData. ValueError, one line, for mistakes.

    prepare False: no splits, and no tokenizer if it is to be trained (a checkpoint holds it); data_file is not needed.
    saved: what state() kept in a checkpoint, whose tokenizer and template are then used.
    """
    saved = saved or {}
    template = saved.get("template")  # None in a checkpoint of other data; then the tokenizer's folder may have one
    if template is None:
        named = config.tokenizer != "bytes" and os.path.exists(config.tokenizer)
        template = chat_template(config.tokenizer) if named else ""
    template = template if config.chat_template == "auto" else ""
    if saved:
        tokenizer = Tokenizer.from_state(saved["tokenizer"])
    else:
        tokenizer = None if config.tokenizer.startswith("bpe:") else load_tokenizer(config.tokenizer)
    if not prepare:
        return ChatData("chat", tokenizer, template, saved.get("plain", "pair"))
    if not config.data_file:
        raise ValueError("no chats to train on: name a file of JSON lines with --data_file")
    settings = dataclasses.replace(config, data_file="", data_dir="", tokenizer="", pack_to=0)
    key = content_hash(FORMAT, settings, tokenizer.fingerprint() if tokenizer else config.tokenizer, template,
                       config.data_file.endswith(".gz"), file_hash(config.data_file))[:16]
    path = os.path.join(config.data_dir, f"chat-{key}.npz")

    def make():
        print(f"preparing chats ({config.data_file}) -> {path}", flush=True)
        splits, used, notes = build(config, template, tokenizer)
        return splits, dict(tokenizer=used.state(), notes=notes)

    splits, about = prepared(path, make)
    return ChatData("chat", Tokenizer.from_state(about["tokenizer"]), template, notes=about["notes"],
                    pack_to=config.pack_to, **splits)


class Written(str):
    """A prompt that is written already, by a template or plainly: encode does not write it once more."""


class ChatData(PromptData):
    """PromptData with a chat template, Jinja source; "" = none."""

    grade = None  # there is no telling who is right

    def __init__(self, name, tokenizer, template="", plain="pair", **others):
        """plain: how prompts are written without a template, as most rows are: "pair", as they stand, or "chat"."""
        super().__init__(name, tokenizer, **others)
        self.template, self.plain = template, plain
        if self.train is not None:
            self.plain = "chat" if (self.train.source == "chat").mean() > 0.5 else "pair"
        if template:
            compiled(template)  # what is wrong with it is told now

    def state(self):
        """What must travel with a model's weights."""
        return super().state() | {"template": self.template, "plain": self.plain}

    def encode(self, text):
        """A user's message (str) -> the ids that a model is to go on from, written as the prompts it was trained on."""
        message = [{"role": "user", "content": text}]
        if self.template and not isinstance(text, Written):
            text = render(self.template, message, True)
        elif self.plain == "chat" and not isinstance(text, Written):
            text = written_chat(message)
        return self.tokenizer.encode(text, special=bool(self.template))

    def examples(self, split_name, number):
        """As in PromptData; encode takes these prompts as they are."""
        return [Written(prompt) for prompt in super().examples(split_name, number)]
