"""Chats: what a line may be, what a template makes of it, what is trained on, what is left out.

    python -m pytest tests/test_chat.py -q
"""

import dataclasses
import gzip
import json
import os
import re
import sys

import numpy as np
import pytest

from data import chat
from data.chat import ChatConfig, by_template, parse, render
from data.prompts import IGNORE
from data.tokenizer import BYTES, chat_template, huggingface_tokenizer
from test_text import one_line, write_huggingface

# Turns between marks; a thought is kept in the last turn alone, where an empty one stands for none.
THINKING = r"""
{%- set last = namespace(user=-1) %}
{%- for message in messages %}
    {%- if message.role == "user" %}
        {%- set last.user = loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set parts = message.content.split("</think>") %}
    {{- "<|im_start|>" + message.role + "\n" }}
    {%- if message.role == "assistant" and loop.index0 > last.user %}
        {{- "<think>\n" + (parts[0].replace("<think>", "").strip() if parts|length > 1 else "") + "\n</think>\n\n" }}
    {%- endif %}
    {{- parts[-1].strip() + "<|im_end|>\n" }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- "<|im_start|>assistant\n" }}
{%- endif %}
"""
PLAIN = r"""{% for m in messages %}<|im_start|>{{ m['role'] }}
{{ m['content'] }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
GENERATED{% endif %}"""
HI = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
LONG = [{"role": "system", "content": "Be kind."}, *HI, {"role": "user", "content": "Why?"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nSo."}, {"role": "user", "content": "Bye"}]


def write(path, rows):
    """rows: strings as they are, all else as JSON, a line each; .gz or not. Returns the path as str."""
    lines = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    with (gzip.open if path.suffix == ".gz" else open)(path, "wt", encoding="utf-8") as file:
        file.write(lines)
    return str(path)


def write_folder(folder, template=None, **config):
    """A tokenizer of single bytes with the special tokens of chats, and perhaps a template. Returns the path."""
    def change(data):
        data["added_tokens"] = [dict(id=256 + i, content=text, special=True) for i, text in
                                enumerate(("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>"))]

    path = write_huggingface(folder, BYTES, change=change)
    config = {"eos_token": "<|im_end|>"} | ({} if template is None else {"chat_template": template}) | config
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return path


def pairs(count):
    return [{"prompt": f"What is {n}?", "response": f"It is {n}."} for n in range(count)]


@pytest.fixture
def config(tmp_path):
    """config(rows, **fields) -> a ChatConfig of a file with these rows."""
    def make(rows, name="chats.jsonl", **fields):
        return ChatConfig(**{"data_file": write(tmp_path / name, rows), "data_dir": str(tmp_path / "cache")} | fields)

    return make


def texts(data, *splits):
    """(prompt, answer, source) of every row, as text."""
    found = []
    for split in splits or ("train", "val", "test"):
        rows, decode = getattr(data, split), data.tokenizer.decode
        for i in range(len(rows)):
            tokens, answer = (a[rows.starts[i]:rows.starts[i + 1]] for a in (rows.tokens, rows.answer))
            assert tokens[-1] == data.tokenizer.eot and answer[-1]
            found.append((decode(tokens[~answer].tolist()), decode(tokens[answer][:-1].tolist()), str(rows.source[i])))
    return found


# ---- lines


@pytest.mark.parametrize("row", [
    {"prompt": "Hi", "response": "Hello"}, {"instruction": "Hi", "output": "Hello", "input": ""},
    {"question": "Hi", "answer": "Hello", "id": 3}, {"prompt": "Hi", "completion": "Hello", "input": None},
    {"messages": HI}, {"messages": [{"role": "system", "content": ""}, *HI], "prompt": "Hi"},
    {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello", "weight": 1}]},
    {"conversations": HI}])
def test_every_kind_of_line_is_read(row):
    source, messages = parse(row)
    assert messages == HI and source == ("chat" if "messages" in row or "conversations" in row else "pair")


def test_an_input_follows_the_instruction():
    _, messages = parse({"instruction": "Add them.", "input": "1, 2", "output": "3"})
    assert messages[0]["content"] == "Add them.\n\n1, 2"


BAD = [
    ("{", "not JSON"), ("[1]", "not a JSON object"), ('"x"', "not a JSON object"), ({"a": 1}, "the keys prompt"),
    ({"prompt": "a"}, "none of the keys response, completion, output, answer"), ({"prompt": "", "answer": "b"},
     "prompt is empty"), ({"prompt": "a", "answer": " \n"}, "answer is empty"), ({"prompt": ["a"], "answer": "b"},
     "prompt is not a string"), ({"prompt": "a", "answer": 5}, "answer is not a string"),
    ({"prompt": "a", "answer": "b", "input": 5}, "input is not a string"),
    ({"messages": "Hi"}, "messages is not a list of objects"), ({"messages": ["Hi"]}, "not a list of objects"),
    ({"messages": []}, "no message is the assistant's"), ({"messages": HI[:1]}, "no message is the assistant's"),
    ({"messages": HI[1:]}, "the assistant speaks before any user"), ({"messages": [LONG[0], HI[1]]}, "before any user"),
    ({"messages": [*HI, {"role": "tool", "content": "5"}]}, "message 3 has the role 'tool', not system, user"),
    ({"messages": [{"content": "x"}]}, "message 1 has the role 'None'"),
    ({"messages": [{"role": ["user"], "content": "x"}]}, "message 1 has the role"),
    ({"messages": [HI[0], {"role": "assistant", "content": None}]}, "message 2 is not a string"),
    ({"messages": [HI[0], {"role": "assistant", "content": ""}]}, "message 2 is empty"),
    ("[" * 100_000, "not JSON")]


@pytest.mark.parametrize("row,reason", BAD, ids=[reason for _, reason in BAD])
def test_a_bad_line_is_named_by_its_number(config, row, reason):
    message = one_line(chat.load, config([*pairs(2), row, *pairs(2)]))
    assert "1 of 5 rows bad (line 3: " in message and reason in message and "--bad_rows skip" in message
    data = chat.load(config([*pairs(8), row], bad_rows="skip", val_fraction=0.1, test_fraction=0))
    assert len(texts(data)) == 8 and "skipped 1 of 9 rows bad (line 9: " in "\n".join(data.summary())


def test_many_bad_lines_are_counted_and_the_first_named(config):
    message = one_line(chat.load, config([*pairs(3), *[{"prompt": "a"}] * 30]))
    assert "30 of 33 rows bad" in message and "and 10 more" in message and message.count("line ") == 20
    for rows in ([{"x": 1}], []):
        assert "no chat is left" in one_line(chat.load, config(rows, bad_rows="skip"))


# ---- without a template


def test_a_pair_is_left_as_it_stands(config):
    rows = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "Q: ", "answer": "a"}, {"prompt": "Q", "answer": " a"},
            {"prompt": "<|endoftext|>", "answer": "x"}]
    data = chat.load(config(rows * 2, val_fraction=0.15, test_fraction=0))
    found = {prompt: answer for prompt, answer, _ in texts(data)}
    assert found == {"1+1=": "\n2", "Q: ": "a", "Q": " a", "<|endoftext|>": "\nx"}
    assert data.encode("1+1=") == data.tokenizer.encode("1+1=") and data.template == ""
    inside = data.train.tokens[data.train.answer == 0]
    assert 256 not in inside, "special tokens that a text spells out are text"


def test_a_chat_is_a_line_for_each_message(config):
    data = chat.load(config([{"messages": LONG}] + pairs(1), val_fraction=0, test_fraction=0))
    assert texts(data, "train")[:2] == [
        ("System: Be kind.\nUser: Hi\nAssistant:", " Hello", "chat"),
        ("System: Be kind.\nUser: Hi\nAssistant: Hello\nUser: Why?\nAssistant:", " <think>\nhm\n</think>\n\nSo.",
         "chat")]


# ---- templates


def test_each_answer_is_a_row_as_the_model_sees_it(config, tmp_path):
    folder = write_folder(tmp_path / "tok", THINKING)
    data = chat.load(config([{"messages": LONG}, *pairs(1)], tokenizer=folder, val_fraction=0, test_fraction=0))
    system = "<|im_start|>system\nBe kind.<|im_end|>\n"
    assert texts(data, "train") == [
        (f"{system}<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", "<think>\n\n</think>\n\nHello", "chat"),
        (f"{system}<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n"
         "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n", "<think>\nhm\n</think>\n\nSo.", "chat"),
        ("<|im_start|>user\nWhat is 0?<|im_end|>\n<|im_start|>assistant\n", "<think>\n\n</think>\n\nIt is 0.", "pair")]
    assert (data.train.tokens == 257).sum() == 4 + 6 - 2 + 2, "special tokens are parsed"
    row = data.train.batch(np.array([2]), data.tokenizer.eot)
    assert row["labels"][0, -1] == 258 and (row["labels"][0] == 258).sum() == 1, "one end, and it is learned"
    assert data.encode("What is 0?") == row["inputs"][0, :row["prompt_lengths"][0]].tolist()
    off = chat.load(config([{"messages": LONG}, *pairs(1)], tokenizer=folder, chat_template="off", val_fraction=0,
                           test_fraction=0))
    assert texts(off, "train")[2][:2] == ("What is 0?", "\nIt is 0.") and off.state()["template"] == ""


@pytest.mark.parametrize("begun", ["<think>\n\n</think>\n\n", "<think>", "\n", "<b", "<|im_start|>"])
@pytest.mark.parametrize("content", ["So.", "<b>So</b>", "<think>hm</think>So.", "\nSo"])
def test_what_the_prompt_begins_for_the_answer_stays_with_the_prompt(begun, content):
    template = PLAIN.replace("GENERATED", "{{ '" + begun.replace("\n", "\\n") + "' }}")
    messages = [HI[0], {"role": "assistant", "content": content}]
    prompt, answer = by_template(template, messages, "<|im_end|>")
    start = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert prompt == start + begun == render(template, messages[:1], True)
    given = begun and content.startswith(begun)  # then the data has it as well, and it is not said twice
    assert answer == (content.removeprefix(begun) if given else content)


def test_an_answer_may_begin_otherwise_than_the_prompt_does():
    """A template that asks for a thought, or that forbids it, and data that has none, or has it."""
    ask = "{% set content = m.content if '<think>' in m.content else '<think></think>' + m.content %}{{ content }}"
    template = PLAIN.replace("{{ m['content'] }}", "{% if m.role == 'user' %}{{ m.content }}{% else %}" + ask
                             + "{% endif %}").replace("GENERATED", "{{ '<think>\\n' }}")
    start = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert by_template(template, HI, "<|im_end|>") == (start, "<think></think>Hello")
    thought = [HI[0], {"role": "assistant", "content": "<think>\nhm\n</think>So."}]
    assert by_template(template, thought, "<|im_end|>") == (start + "<think>\n", "hm\n</think>So.")
    none = template.replace("{{ '<think>\\n' }}", "{{ '<think>\\n\\n</think>\\n' }}")
    assert by_template(none, thought, "<|im_end|>") == (start + "<think>\n", "hm\n</think>So.")


def test_a_template_that_tells_the_past_otherwise_is_a_bad_line(config, tmp_path):
    folder = write_folder(tmp_path / "tok", "{{ messages|length }}{{ messages[-1].content }}<|im_end|>")
    message = one_line(chat.load, config(pairs(3), tokenizer=folder))
    assert "line 1: the chat template does not write" in message


@pytest.mark.parametrize("template,reason", [
    ("{{ raise_exception('no  system\nplease') }}", "no system please"), ("{{ messages.x.y }}", "has no attribute"),
    ("{{ messages[0].content + 1 }}", "the chat template fails"), ("{% for i in range(10**9) %}{% endfor %}", "ange"),
    ("{{ messages.append(1) }}", "unsafe"), ("{{ ''.__class__.__mro__ }}", "unsafe"),
    ("{{ messages[0].content }}{% if not add_generation_prompt %}Yes<|im_end|>{% endif %}", "leaves out the end of"),
    ("{% if add_generation_prompt %}a{% else %}a<|im_end|>{% endif %}", "leaves out the end of the answer")])
def test_a_template_that_fails_on_a_row_makes_it_a_bad_line(config, tmp_path, template, reason):
    message = one_line(chat.load, config(pairs(3), tokenizer=write_folder(tmp_path / "tok", template)))
    assert "3 of 3 rows bad (line 1: " in message and reason in message


def test_a_template_that_is_not_valid_is_one_line(config, tmp_path, monkeypatch):
    made = config(pairs(3), tokenizer=write_folder(tmp_path / "tok", "{% if x %}"))
    assert "not valid" in one_line(chat.load, made, prepare=False)
    made = config(pairs(3), tokenizer=write_folder(tmp_path / "tok", "{{ messages[0].content }} "))
    monkeypatch.setitem(sys.modules, "jinja2", None)
    monkeypatch.setitem(sys.modules, "jinja2.ext", None)
    assert "pip install jinja2" in one_line(chat.load, made, prepare=False)
    assert chat.load(dataclasses.replace(made, chat_template="off")).template == "", "only a template needs it"


def test_templates_have_what_they_expect():
    def made(template, **message):
        return render(template, [{"role": "user", "content": "<é>"} | message], False)

    assert made("{{ messages | tojson }}") == '[{"role": "user", "content": "<é>"}]'
    assert made("{{ messages[0] | tojson(indent=1) }}") == '{\n "role": "user",\n "content": "<é>"\n}'
    assert re.fullmatch(r"\d{4}", made("{{ strftime_now('%Y') }}")) and made("{{ tools is none }}") == "True"
    assert made("{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "1"
    assert made("a\n  {% if true %}\nb\n  {% endif %}\nc") == "a\nb\nc", "blocks leave no space"
    assert made("a {%- generation -%} b {% endgeneration %} c") == "ab  c"


def test_templates_are_found(tmp_path):
    folder = tmp_path / "tok"
    assert chat_template(write_folder(folder)) == ""
    assert chat_template(write_folder(folder, "x")) == "x" == chat_template(str(folder / "tokenizer.json"))
    named = [dict(name="tools", template="t"), dict(name="default", template="d")]
    assert chat_template(write_folder(folder, named)) == "d" and chat_template(write_folder(folder, named[:1])) == "t"
    (folder / "chat_template.jinja").write_text("own\n", encoding="utf-8")
    assert chat_template(str(folder)) == "own\n"
    for wrong in ([{"name": "x"}], 5, {"a": 1}):
        write_folder(folder, wrong)
        os.path.exists(folder / "chat_template.jinja") and os.remove(folder / "chat_template.jinja")
        assert "mend chat_template" in one_line(chat_template, str(folder))


@pytest.mark.parametrize("bos", ["<s>", dict(content="<s>"), "it's \"é\\\U0001f98a", None])
def test_a_template_knows_its_tokens_without_its_folder(tmp_path, bos):
    source = ("  {% if true %}\n{{ bos_token }}|{{ eos_token }}{% endif %}\n"
              "{% macro m() %}{{ bos_token }}{% endmacro %}{{ m() }}")
    template = chat_template(write_folder(tmp_path / "tok", source, bos_token=bos))
    shown = bos["content"] if isinstance(bos, dict) else bos or ""
    assert render(template, HI, False) == f"{shown}|<|im_end|>{shown}"


# ---- splits and the cache


def test_a_chat_is_in_one_split_and_no_scored_prompt_is_trained_on(config):
    chats = [{"messages": [m for t in range(3) for m in ({"role": "user", "content": f"chat {n} turn {t}"}, HI[1])]}
             for n in range(40)]
    data = chat.load(config([*chats, *[pairs(1)[0]] * 40], val_fraction=0.1, test_fraction=0.2))
    seen = {split: {re.search(r"chat \d+ ", p)[0] for p, _, source in texts(data, split) if source == "chat"}
            for split in ("train", "val", "test")}
    assert not seen["train"] & seen["val"] and not seen["train"] & seen["test"] and not seen["val"] & seen["test"]
    assert sum(map(len, seen.values())) == 40 and seen["val"] and seen["test"]
    prompts = {split: {p for p, *_ in texts(data, split)} for split in seen}
    assert not prompts["train"] & (prompts["val"] | prompts["test"])
    twins = 40 - sum(source == "pair" for *_, source in texts(data))
    assert f"{twins} training rows whose prompt is in val or test" in "\n".join(data.summary()) and twins > 20
    assert len(data.val.source) + len(data.test.source) + len(data.train) == 160 - twins
    other = chat.load(config([*chats, *[pairs(1)[0]] * 40], val_fraction=0.1, test_fraction=0.2, data_seed=1))
    assert texts(other, "val") != texts(data, "val")


def test_small_files_have_every_split_and_the_least_is_told(config):
    data = chat.load(config(pairs(3)))
    assert [len(rows) for rows in (data.train, data.val, data.test)] == [1, 1, 1]
    assert "nothing is left to train on" in one_line(chat.load, config(pairs(2)))
    assert "every prompt is also in val or test" in one_line(chat.load, config(pairs(1) * 5))


def test_long_rows_are_left_out_and_counted(config):
    rows = [*pairs(9), {"prompt": "x" * 100, "answer": "y"}]
    data = chat.load(config(rows, max_tokens=60, val_fraction=0, test_fraction=0))
    assert len(data.train) == 9 and "1 rows of more than 60 tokens" in "\n".join(data.summary())
    assert "every row has more than 8 tokens" in one_line(chat.load, config(rows, max_tokens=8))


def test_the_cache_is_read_and_depends_on_what_matters(config, tmp_path, monkeypatch):
    folder = write_folder(tmp_path / "tok", THINKING)
    made = config(pairs(20), "a.jsonl.gz", tokenizer=folder)
    data = chat.load(made)
    config(pairs(21), "b.jsonl"), write_folder(tmp_path / "other", PLAIN)
    monkeypatch.setattr(chat, "build", None)  # not called
    again = chat.load(dataclasses.replace(made, pack_to=512))
    assert again.summary() == data.summary() and again.template == data.template
    assert again.train_batch(0, 8, 0)["positions"].shape == (1, 512)
    for change in (dict(data_seed=1), dict(max_tokens=99), dict(chat_template="off"), dict(tokenizer="bytes"),
                   dict(tokenizer=str(tmp_path / "other")), dict(data_file=str(tmp_path / "b.jsonl")),
                   dict(val_fraction=0.2), dict(bad_rows="skip")):
        with pytest.raises(TypeError):
            chat.load(dataclasses.replace(made, **change))


def test_a_checkpoint_keeps_tokenizer_and_template(config, tmp_path):
    made = config(pairs(20), tokenizer=write_folder(tmp_path / "tok", THINKING))
    data = chat.load(made)
    saved = json.loads(json.dumps(data.state()))
    elsewhere = ChatConfig()
    used = chat.load(elsewhere, prepare=False, saved=saved)
    assert used.encode("Hi") == data.encode("Hi") and used.template == data.template != ""
    assert chat.load(dataclasses.replace(made, tokenizer="bytes"), saved=saved).summary() == data.summary()
    plain = chat.load(elsewhere, prepare=False, saved={"tokenizer": saved["tokenizer"]})
    assert plain.template == "" and plain.encode("Hi") == [72, 105]
    assert chat.load(made, prepare=False, saved={"tokenizer": saved["tokenizer"]}).template == data.template
    trained = chat.load(config(pairs(40), tokenizer="bpe:270"))
    assert trained.model_args == {"vocab_size": 270} and trained.template == ""
    assert chat.load(ChatConfig(tokenizer="bpe:270"), prepare=False).tokenizer is None


def test_examples_are_prompts_that_are_not_written_twice(config, tmp_path):
    data = chat.load(config([*pairs(20), *[{"messages": LONG}] * 20], tokenizer=write_folder(tmp_path / "t", THINKING)))
    shown = data.examples("test", 1)
    sources = data.test.source.tolist()
    for prompt, row in zip(shown, map(sources.index, dict.fromkeys(sources)), strict=True):
        tokens = data.test.tokens[data.test.starts[row]:data.test.starts[row + 1]]
        assert data.encode(prompt) == tokens[:len(data.encode(prompt))].tolist() and "<|im_start|>user" in prompt
    assert data.grade is None and set(data.groups()) == set(data.test.source)


def test_only_answers_are_labelled(config):
    data = chat.load(config(pairs(20)))
    batch = data.train_batch(0, 4, 0)
    for labels in batch["labels"]:
        said = data.tokenizer.decode(labels[labels != IGNORE].tolist())
        assert re.fullmatch(r"\nIt is \d+\.<\|endoftext\|>", said)


@pytest.mark.parametrize("fields,word", [
    (dict(max_tokens=1), "max_tokens 1"), (dict(pack_to=-1), "pack_to -1"), (dict(val_fraction=1), "val_fraction 1"),
    (dict(test_fraction=-0.1), "test_fraction -0.1"), (dict(data_seed=-1), "data_seed -1")])
def test_settings_that_cannot_be_are_one_line(fields, word):
    assert word in one_line(ChatConfig, **fields)


def test_files_that_are_not_there_are_one_line(config, tmp_path):
    assert "--data_file" in one_line(chat.load, ChatConfig())
    assert "nowhere.jsonl" in one_line(chat.load, ChatConfig(data_file="nowhere.jsonl"))
    assert "--pack_to 19" in one_line(chat.load, config(pairs(9), pack_to=8))


def test_the_tokenizer_of_the_tests_is_one_of_chats(tmp_path):
    tokenizer = huggingface_tokenizer(write_folder(tmp_path / "tok"))
    assert tokenizer.decode([tokenizer.eot]) == "<|im_end|>" and tokenizer.encode("<s>", special=True) == [259]


def test_a_prompt_is_written_as_those_of_training(tmp_path):
    """Without a template: as it stands for pairs, as a user's line for chats; and so after a checkpoint."""
    for rows, want in (([{"prompt": f"{n}+1=", "response": f"{n + 1}"} for n in range(20)], "Hi"),
                       ([{"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": "Yes."}]}
                         for n in range(20)], "User: Hi\nAssistant:")):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        config = chat.ChatConfig(data_file=str(path), data_dir=str(tmp_path))
        data = chat.load(config)
        later = chat.load(chat.ChatConfig(), prepare=False, saved=data.state())
        for loaded in (data, later):
            assert loaded.tokenizer.decode(loaded.encode("Hi")) == want
        prompt = data.examples("train", 1)[0]
        assert data.tokenizer.decode(data.encode(prompt)) == prompt, "what is written already is left alone"
