"""Tokenizers and text data: python -m pytest tests/test_text.py -q   (from the project's root; seconds, no network)"""

import gzip
import itertools
import json
import os
import random
import socket
import subprocess
import sys
import unicodedata
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import regex
import tiktoken.load
import torch

import golden
from data import text as text_module
from data.text import Rows, TextConfig, find_documents, load, pieces, safe_cut
from data.tokenizer import (ALPHABET, EOT, PATTERN, Tokenizer, byte_tokenizer, huggingface_tokenizer, load_tokenizer,
                            train_tokenizer)

ROOT = Path(__file__).parent.parent
STORY = "".join(f"Once the {a} fox, it's said, met {b} hares\nand {a} of them couldn't run 12{b} miles.\n\n"
                for a in ("red", "old", "sly", "grey") for b in ("two", "ten", "many", "few"))
TRICKY = ["", " ", "caf\u00e9 na\u00efve", "\U0001f98a\U0001f468\u200d\U0001f469\u200d\U0001f467 fox", "\ufeffmark",
          "a\r\nb\r\n\r\nc\n", f"before{EOT}after {EOT}", "\x00\x1c\x85", "\u6df1\u5ea6 \u0e20\u0e32\u0e29\u0e32",
          "  \t\n  x", "'s don't"]


def one_line(function, *args, **kwargs):
    """The message of the ValueError that a call must raise."""
    with pytest.raises(ValueError) as caught:
        function(*args, **kwargs)
    message = str(caught.value)
    assert message and "\n" not in message
    return message


def random_texts(number, seed=0):
    """Strings of letters, spaces, digits, marks and characters from all over Unicode."""
    rng = random.Random(seed)
    groups = ["abcdefgh ABC", "  \n\r\t\u00a0", "0129,.!?'\"<|>", "e\u0301o\u0323\u0302\u1112\u1161\u11ab", None]
    for _ in range(number):
        choice = [rng.choice(groups) for _ in range(rng.randrange(40))]
        yield "".join(rng.choice(group) if group else chr(rng.choice([*range(0xD800), *range(0xE000, 0x110000, 97)]))
                      for group in choice)


# ----------------------------------------------------------------------------------------------------------------------
# A slow BPE, and files as Hugging Face writes them

def slow_pairs(tokens):
    """The pair of token bytes that makes each token of a trained vocabulary, in order."""
    pairs = []
    for place in range(256, len(tokens)):
        pairs.append(tuple(slow_merges(tokens[place], pairs)))
    return pairs


def slow_merges(piece, pairs):
    """Bytes -> list of tokens: merge by merge in their order, from the left."""
    parts = [bytes([value]) for value in piece]
    for pair in pairs:
        i = 0
        while i + 1 < len(parts):
            if (parts[i], parts[i + 1]) == pair:
                parts[i:i + 2] = [parts[i] + parts[i + 1]]
            i += 1
    return parts


def slow_train(text, number):
    """Merges by recounting everything each time."""
    tokens = [bytes([value]) for value in range(256)]
    words = [list(word.encode()) for word in regex.findall(PATTERN, text)]
    while len(tokens) < number:
        counts = Counter(pair for word in words for pair in zip(word, word[1:]))
        best = min(counts, key=lambda pair: (-counts[pair], pair))
        for word in words:
            i = 0
            while i + 1 < len(word):
                if (word[i], word[i + 1]) == best:
                    word[i:i + 2] = [len(tokens)]
                i += 1
        tokens.append(tokens[best[0]] + tokens[best[1]])
    return tokens


SPELL = {value: character for character, value in ALPHABET.items()}


def spell(token):
    return "".join(SPELL[value] for value in token)


def write_huggingface(folder, tokens, ids=None, eos=None, change=None, spaced=False):
    """Write a tokenizer.json (with eos, a config, too) for trained tokens; `change` edits it. Returns the folder."""
    ids = range(len(tokens)) if ids is None else ids
    merges = [[spell(left), spell(right)] for left, right in slow_pairs(tokens)]
    split = dict(type="Split", pattern=dict(Regex=PATTERN), behavior="Isolated", invert=False)
    level = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=False, use_regex=False)
    data = dict(added_tokens=[dict(id=len(tokens) + 5, content=EOT, special=True),
                              dict(id=len(tokens) + 2, content="<|end|>", special=False)],
                normalizer=None, pre_tokenizer=dict(type="Sequence", pretokenizers=[split, level]),
                model=dict(type="BPE", vocab={spell(token): number for token, number in zip(tokens, ids)},
                           merges=[" ".join(pair) for pair in merges] if spaced else merges))
    if change:
        change(data)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(data), encoding="utf-8")
    if eos is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(dict(eos_token=eos)), encoding="utf-8")
    return str(folder)


@pytest.fixture(scope="module")
def trained():
    return train_tokenizer([STORY], 300)


@pytest.fixture(scope="module")
def kinds(trained, tmp_path_factory):
    """One tokenizer of each kind, without normalisation."""
    folder = write_huggingface(tmp_path_factory.mktemp("tokens"), trained.tokens)
    return [byte_tokenizer(), trained, huggingface_tokenizer(folder)]


# ----------------------------------------------------------------------------------------------------------------------
# Tokenizers

def test_ids_that_do_not_exist_are_an_error_or_a_mark():
    tokenizer = byte_tokenizer()
    with pytest.raises(ValueError, match="token id 300"):
        tokenizer.decode([72, 300])
    assert tokenizer.decode([72, 300, 105], strict=False) == "H\ufffdi"


def test_any_text_comes_back_as_it_was(kinds):
    for tokenizer in kinds:
        for text in [*TRICKY, STORY, *random_texts(60)]:
            ids = tokenizer.encode(text)
            assert tokenizer.decode(ids) == text, ascii(text)
            assert tokenizer.decode(tokenizer.encode(text, special=True)) == text, ascii(text)
            assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()


def test_any_ids_decode(kinds):
    rng = random.Random(1)
    for tokenizer in kinds:
        known = [number for number in range(tokenizer.vocab_size) if number in tokenizer._bytes]
        for _ in range(50):
            ids = rng.choices(known, k=rng.randrange(20))
            raw = b"".join(map(tokenizer.token_bytes, ids))
            assert tokenizer.decode(ids) == raw.decode("utf-8", "replace")
            assert tokenizer.decode(torch.tensor(ids)) == tokenizer.decode(np.array(ids, int)) == tokenizer.decode(ids)


def test_half_a_surrogate_pair_becomes_the_replacement_character(kinds):
    for tokenizer in kinds:
        assert tokenizer.decode(tokenizer.encode("a\ud83db")) == "a\ufffdb"
        assert tokenizer.decode(tokenizer.encode("\ud83d\ude00")) == "\U0001f600", "two halves are a whole"


def test_special_tokens_are_text_unless_asked_for(kinds):
    for tokenizer in kinds:
        text, one, two = f"one{EOT}two", tokenizer.encode("one"), tokenizer.encode("two")
        assert tokenizer.eot not in tokenizer.encode(text)
        assert tokenizer.encode(text, special=True) == one + [tokenizer.eot] + two
        assert tokenizer.specials[EOT] == tokenizer.eot and tokenizer.decode([tokenizer.eot]) == EOT


def test_the_longer_special_token_wins():
    tokenizer = Tokenizer(byte_tokenizer().tokens, ".", {"<a>": 256, "<a>b": 257, "a": 258}, 256)
    assert tokenizer.encode("<a>bxa", special=True) == [257, ord("x"), 258]


def test_unknown_ids_are_one_line(kinds):
    for tokenizer in kinds:
        for number in (-1, tokenizer.vocab_size, 10 ** 9, "a", None, []):
            assert f"token id {number!r} is not in the vocabulary" in one_line(tokenizer.decode, [0, number])
    assert "token id 300 " in one_line(kinds[2].decode, [300]), "ids between the tokens may be free"


def test_long_runs_do_not_stop_the_matcher(kinds):
    text = "x" + " " * 1_200_000 + "\n" * 250_001 + "y" * 200_000
    for tokenizer in kinds:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_matcher_that_gives_up_is_one_line(monkeypatch):
    class PanicException(BaseException):
        """As tiktoken's, which has no importable name."""

    class Encoding:
        def encode_ordinary(self, text):
            raise PanicException("StackOverflow")
    tokenizer = byte_tokenizer()
    tokenizer.encoding = Encoding()
    assert "encode it in shorter parts" in one_line(tokenizer.encode, "text")
    monkeypatch.setattr(Encoding, "encode_ordinary", lambda self, text: (_ for _ in ()).throw(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        tokenizer.encode("text")


@pytest.mark.parametrize("folder", golden.folders("qwen_tok"), ids=lambda path: path.name)
def test_ids_equal_the_reference(folder):
    expected = json.loads((folder / "expected.json").read_text(encoding="utf-8"))
    tokenizer = huggingface_tokenizer(folder)
    assert (tokenizer.vocab_size, tokenizer.specials) == (expected["n_vocab"], expected["special_tokens"])
    for case in expected["cases"] + expected.get("edge_cases", []):
        assert tokenizer.encode(case["text"], special=True) == case["ids"], ascii(case["text"])
        assert "decoded" not in case or tokenizer.decode(case["ids"]) == case["decoded"]
        assert tokenizer.normalizer in ("", "NFC")
        normal = unicodedata.normalize("NFC", case["text"]) if tokenizer.normalizer else case["text"]
        assert tokenizer.decode(tokenizer.encode(case["text"])) == normal, "special tokens are text here"


def test_training_equals_a_slow_loop_and_repeats(trained):
    assert trained.tokens == slow_train(STORY, 299)
    half = STORY.index("\nand", len(STORY) // 2) + 1
    again = train_tokenizer(iter([STORY[half:], STORY[:half]]), 300)
    assert again.fingerprint() == trained.fingerprint(), "the order of texts has no effect"
    assert trained.vocab_size == 300
    repeats = train_tokenizer(["aaaaaaa aaa aaaa bababab " * 3], 264)
    assert repeats.tokens == slow_train("aaaaaaa aaa aaaa bababab " * 3, 263)


def test_encoding_equals_a_slow_loop_of_merges(trained):
    pairs = slow_pairs(trained.tokens)
    for text in [STORY[:500], *TRICKY, *random_texts(100, seed=2)]:
        slow = [token for piece in regex.findall(PATTERN, text) for token in slow_merges(piece.encode(), pairs)]
        assert list(map(trained.token_bytes, trained.encode(text))) == slow, ascii(text)


@pytest.mark.parametrize("size, message", [(256, "256 is too small: give 257"), (5000, "the text is too short")])
def test_impossible_vocabularies_are_one_line(size, message):
    assert message in one_line(train_tokenizer, [STORY], size)


def test_state_survives_a_checkpoint(kinds, tmp_path):
    for tokenizer in [*kinds, *map(huggingface_tokenizer, golden.folders("qwen_tok"))]:
        torch.save(dict(tokenizer=tokenizer.state()), tmp_path / "ckpt.pt")
        again = Tokenizer.from_state(torch.load(tmp_path / "ckpt.pt", weights_only=True)["tokenizer"])
        assert again.fingerprint() == tokenizer.fingerprint() and again.state() == tokenizer.state()
        assert Tokenizer.from_state(json.loads(json.dumps(tokenizer.state()))).fingerprint() == tokenizer.fingerprint()
        for text in [STORY[:300], *TRICKY]:
            assert again.encode(text, special=True) == tokenizer.encode(text, special=True)
    assert len({tokenizer.fingerprint() for tokenizer in kinds}) == 3


@pytest.mark.parametrize("damage", [
    lambda s: s.pop("tokens"), lambda s: s.update(format=2), lambda s: s.update(ids=[1]),
    lambda s: s.update(tokens=["\u20ac"]), lambda s: s.update(specials={EOT: 0})])
def test_damaged_states_are_one_line(damage):
    state = byte_tokenizer().state()
    damage(state)
    one_line(Tokenizer.from_state, state)
    one_line(Tokenizer.from_state, None)


def test_nothing_is_downloaded(kinds, tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("no network")
    for module, name in ((socket, "socket"), (socket, "create_connection"), (tiktoken.load, "read_file")):
        monkeypatch.setattr(module, name, refuse)
    (tmp_path / "a.txt").write_text(STORY * 3, encoding="utf-8")
    folder = write_huggingface(tmp_path / "hf", kinds[1].tokens)
    for spec in ("bytes", "bpe:280", folder):
        load(TextConfig(data_file=str(tmp_path / "a.txt"), tokenizer=spec, block_size=8, data_dir=str(tmp_path / "c")))


# ----------------------------------------------------------------------------------------------------------------------
# Hugging Face files

def test_both_spellings_of_merges_and_a_plain_file_are_read(trained, tmp_path):
    folders = [write_huggingface(tmp_path / str(spaced), trained.tokens, spaced=spaced) for spaced in (False, True)]
    first, second = map(huggingface_tokenizer, folders)
    assert first.fingerprint() == second.fingerprint() == huggingface_tokenizer(
        os.path.join(folders[0], "tokenizer.json")).fingerprint()
    assert first.encode(STORY) == trained.encode(STORY) and first.vocab_size == 299 + 6


def test_ids_are_those_of_the_file_whatever_the_order_of_merges(trained, tmp_path):
    ids = np.random.default_rng(0).permutation(len(trained.tokens)).tolist()
    tokenizer = huggingface_tokenizer(write_huggingface(tmp_path, trained.tokens, ids))
    assert tokenizer._id_of_rank is not None
    for text in [STORY, *TRICKY]:
        assert tokenizer.encode(text) == [ids[number] for number in trained.encode(text)]
        assert tokenizer.decode(tokenizer.encode(text)) == text
    again = Tokenizer.from_state(tokenizer.state())
    assert again.encode(STORY) == tokenizer.encode(STORY)


def gpt2_file(data):
    """As old files are: no model type, the end of text also in the vocabulary, the pattern implied."""
    del data["model"]["type"]
    data["model"]["vocab"][EOT] = data["added_tokens"][0]["id"]
    data["pre_tokenizer"] = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True)


def from_tiktoken(data):
    """As files made from tiktoken's are: every split of a token is a merge, in the order of tokens; others dropped."""
    vocab = data["model"]["vocab"]  # in the order of ids
    data["model"].update(ignore_merges=True, merges=[
        [token[:i], token[i:]] for token in vocab for i in range(1, len(token))
        if token[:i] in vocab and token[i:] in vocab])
    data["pre_tokenizer"]["pretokenizers"][0].update(behavior="Removed", invert=True)


@pytest.mark.parametrize("change", [gpt2_file, from_tiktoken])
def test_older_and_converted_files_give_the_same_ids(trained, tmp_path, change):
    tokenizer = huggingface_tokenizer(write_huggingface(tmp_path, trained.tokens, change=change))
    for text in [STORY, *TRICKY]:
        assert tokenizer.encode(text) == trained.encode(text)


def test_text_outside_of_the_pattern_is_kept_unless_it_is_removed(trained, tmp_path):
    for behavior, kept in (("Isolated", "ab--12"), ("Removed", "ab12")):
        def change(data):
            data["pre_tokenizer"]["pretokenizers"][0].update(pattern=dict(Regex=r"\w\w"), behavior=behavior,
                                                             invert=behavior == "Removed")
        tokenizer = huggingface_tokenizer(write_huggingface(tmp_path, trained.tokens, change=change))
        assert tokenizer.decode(tokenizer.encode("ab--12")) == kept


@pytest.mark.parametrize("merges, text, expected", [
    ("a bc,a b,c y,ab c,b c", "abcy", ["ab", "cy"]),  # abc counts from "ab c" on, which comes after "c y"
    ("a bc,b c", "xabc", ["x", "abc"])])  # its parts come later, but it is made
def test_merges_listed_before_those_of_their_parts(tmp_path, merges, text, expected):
    def change(data):
        pairs = [merge.split(" ") for merge in merges.split(",")]
        vocab = [*map(spell, byte_tokenizer().tokens), *dict.fromkeys(map("".join, pairs))]
        data["model"].update(merges=pairs, vocab={token: number for number, token in enumerate(vocab)})
        data.update(added_tokens=[dict(id=300, content=EOT)])
    tokenizer = huggingface_tokenizer(write_huggingface(tmp_path, byte_tokenizer().tokens, change=change))
    assert [tokenizer.decode([number]) for number in tokenizer.encode(text)] == expected


def test_tokens_that_no_merge_makes_are_only_decoded(trained, tmp_path):
    for ignore_merges, expected in ((False, [ord("q"), ord("q"), ord("z")]), (True, [900])):
        def change(data):
            data["model"]["vocab"]["qqz"] = 900
            data["model"]["ignore_merges"] = ignore_merges
        tokenizer = huggingface_tokenizer(write_huggingface(tmp_path, trained.tokens, change=change))
        assert tokenizer.encode("qqz") == expected and tokenizer.decode([900]) == "qqz"
        assert tokenizer.vocab_size == 901 and tokenizer.encode("qqzq")[-1] == ord("q")
        assert Tokenizer.from_state(tokenizer.state()).decode([900]) == "qqz"


@pytest.mark.parametrize("eos, change, expected", [
    ("<|end|>", None, "<|end|>"), (dict(content="<|end|>"), None, "<|end|>"), (None, None, EOT), ("</s>", None, EOT),
    ("</s>", lambda data: data["added_tokens"].pop(0), "<|end|>")])
def test_end_of_text_is_found(trained, tmp_path, eos, change, expected):
    tokenizer = huggingface_tokenizer(write_huggingface(tmp_path, trained.tokens, eos=eos, change=change))
    assert tokenizer.eot == tokenizer.specials[expected]


def pre_tokenizer(**changes):
    return lambda data: data["pre_tokenizer"]["pretokenizers"][-1].update(changes)


@pytest.mark.parametrize("change, message", [
    (lambda d: d["model"].update(type="WordPiece"), "model type WordPiece"),
    (lambda d: d["model"].update(type="Unigram"), "model type Unigram"),
    (lambda d: d["model"].update(byte_fallback=True), "byte_fallback"),
    (lambda d: d["model"]["vocab"].update({"\u2581a": 700}), "vocabulary entry '\u2581a' is not byte-level"),
    (lambda d: d["model"]["vocab"].pop("a"), "lacks 1 of the bytes"),
    (lambda d: d["model"]["merges"].append(["a", "zzz"]), "'zzz'"),
    (lambda d: d.update(normalizer=dict(type="NFKC")), "normalizer NFKC"),
    (lambda d: d.update(normalizer=dict(type="Sequence", normalizers=[dict(type="NFC"), dict(type="Lowercase")])),
     "normalizer Lowercase"),
    (lambda d: d.update(pre_tokenizer=dict(type="Metaspace")), "pre-tokenizer Metaspace"),
    (lambda d: d.update(pre_tokenizer=None), "pre-tokenizer None"),
    (pre_tokenizer(add_prefix_space=True), "add_prefix_space"), (pre_tokenizer(use_regex=True), "Split + Split"),
    (lambda d: d["pre_tokenizer"]["pretokenizers"][0].update(behavior="MergedWithNext"), "MergedWithNext"),
    (lambda d: d["pre_tokenizer"]["pretokenizers"].insert(0, dict(type="Digits")), "Digits + Split"),
    (lambda d: d["pre_tokenizer"]["pretokenizers"][0].update(pattern=dict(Regex="(a")), "tokenizer.json"),
    (lambda d: d["added_tokens"][0].update(lstrip=True), "lstrip"),
    (lambda d: d.update(added_tokens=[]), "no added token"),
    (lambda d: d["added_tokens"][0].update(id=3), "two tokens share an id"),
    (lambda d: d.pop("model"), "is not a tokenizer.json"),
    (lambda d: d["model"].update(merges=[["a"]]), "tokenizer.json")])
def test_what_is_not_supported_is_named(trained, tmp_path, change, message):
    assert message in one_line(huggingface_tokenizer, write_huggingface(tmp_path, trained.tokens, change=change))


def test_mistaken_tokenizers_are_one_line(tmp_path):
    (tmp_path / "broken.json").write_text("{", encoding="utf-8")
    for spec, message in (("gpt2", "'gpt2' is neither bytes, nor bpe:SIZE"), ("bpe:", "has no size"),
                          ("bpe:1k", "no size"), ("bpe:\u0663\u0660\u0660", "no size"), ("bpe:300", "give one"),
                          (str(tmp_path), "cannot read"), (str(tmp_path / "broken.json"), "cannot read")):
        assert message in one_line(load_tokenizer, spec)


# ----------------------------------------------------------------------------------------------------------------------
# Text

def config(tmp_path, content=STORY * 4, **changes):
    path = tmp_path / "story.txt"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    options = dict(data_file=str(path), block_size=16, val_fraction=0.1, test_fraction=0.1,
                   data_dir=str(tmp_path / "cache"))
    return TextConfig(**{**options, **changes})


def write_folder(folder, texts):
    """Documents in a folder: {relative name: text}; .gz names are packed."""
    for name, text in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return str(folder)


def documents(rows, tokenizer):
    """The texts of a split."""
    ids, texts, start = rows.tokens.tolist(), [], 0
    for end in [i for i, number in enumerate(ids) if number == tokenizer.eot]:
        texts.append(tokenizer.decode(ids[start:end]))
        start = end + 1
    assert start == len(ids), "every document ends"
    return texts


@pytest.mark.parametrize("spec", ["bytes", "bpe:290"])
def test_a_file_is_split_at_its_end_and_loses_nothing(tmp_path, spec):
    content = "caf\u00e9 \U0001f98a\r\n" + EOT + STORY * 4 + "last\r\n"
    data = load(config(tmp_path, content, tokenizer=spec))
    texts = [documents(getattr(data, split), data.tokenizer) for split in ("train", "val", "test")]
    assert [len(split) for split in texts] == [1, 1, 1] and "".join(sum(texts, [])) == content
    shares = [len(split[0]) / len(content) for split in texts]
    assert np.allclose(shares, [0.8, 0.1, 0.1], atol=0.03), shares
    assert data.model_args == dict(vocab_size=257 if spec == "bytes" else 290, block_size=16)
    assert data.train.tokens.dtype == np.uint16 and isinstance(data.train.tokens, np.memmap)
    assert data.grade is None


def test_bpe_is_trained_on_the_training_part(tmp_path):
    data = load(config(tmp_path, STORY * 8 + "zqzqzqzqzq " * 100, tokenizer="bpe:290"))
    text = documents(data.train, data.tokenizer)[0]
    assert "zq" not in text and data.tokenizer.tokens == train_tokenizer([text], 290).tokens


def test_a_folder_is_read_in_order_and_split_by_whole_documents(tmp_path):
    texts = {f"{'sub/' * (i % 2)}{i:02}.{('txt', 'md', 'txt.gz')[i % 3]}": f"document {i} {STORY[:200 + i]}"
             for i in range(30)}
    others = {".hidden/a.txt": "x", "sub/.b.txt": "x", "c.csv": "x", "image.gz": "x", "empty.txt": ""}
    folder = write_folder(tmp_path / "docs", {**texts, **others})
    data = load(config(tmp_path, data_file=folder))
    splits = [documents(rows, data.tokenizer) for rows in (data.train, data.val, data.test)]
    assert [len(split) for split in splits] == [24, 3, 3] and sorted(sum(splits, [])) == sorted(texts.values())
    ordered = [texts[name] for name in sorted(texts, key=lambda name: name.split("/"))]
    assert splits[0] == [text for text in ordered if text in splits[0]]
    other = load(config(tmp_path, data_file=folder, data_seed=1))
    assert documents(other.test, other.tokenizer) != splits[2]
    assert "30 documents" in data.summary()[0] and "skipped 1 empty file" in data.summary()[-1]


def test_few_documents_give_their_ends(tmp_path):
    texts = {"a.txt": "A" + STORY, "b.txt": "B" + STORY, "c.md": "C" + STORY}
    data = load(config(tmp_path, data_file=write_folder(tmp_path / "docs", texts)))
    parts = zip(*(documents(rows, data.tokenizer) for rows in (data.train, data.val, data.test)))
    assert ["".join(part) for part in parts] == list(texts.values())


def test_a_byte_order_mark_is_dropped_and_a_packed_file_is_the_same(tmp_path):
    plain = load(config(tmp_path, tokenizer="bytes"))
    marked = load(config(tmp_path, ("\ufeff" + STORY * 4).encode()))
    packed = load(config(tmp_path, data_file=write_folder(tmp_path / "gz", {"s.txt.gz": STORY * 4})))
    for other in (marked, packed):
        assert all((getattr(other, split).tokens == getattr(plain, split).tokens).all() for split in text_module.SPLITS)


def test_cuts_between_pieces_do_not_show(tmp_path, monkeypatch, trained):
    monkeypatch.setattr(text_module, "PIECE", 64)
    tokenizers = [trained, *map(huggingface_tokenizer, golden.folders("qwen_tok"))]
    pairs = [bytes(pair) for pair in itertools.product(b" \n\r.'a1", repeat=2)]  # each a token: any wrong cut shows
    tokenizers += [Tokenizer(byte_tokenizer().tokens + pairs, tokenizer.pattern, {}, 0) for tokenizer in tokenizers]
    rng = random.Random(3)
    dense = ["".join(rng.choices(" \n\r.'a1", k=30)) for _ in range(300)]
    for number, text in enumerate([STORY, STORY.replace("\n", "\r\n"), " some words\n".join(random_texts(40)),
                                   "a\na".join(dense), "a a".join(dense).replace("\n", " ")]):
        path = tmp_path / f"{number}.txt"
        path.write_bytes(text.encode())
        cut = list(pieces(str(path)))
        assert "".join(cut) == text and len(cut) > 3 and max(map(len, cut)) <= 5 * 64
        assert all(safe_cut(part + following[:2]) for part, following in zip(cut, cut[1:])), "each at a safe place"
        for tokenizer in tokenizers:
            assert sum(map(tokenizer.encode, cut), []) == tokenizer.encode(text)


def test_texts_without_a_place_to_cut_are_cut_anywhere(tmp_path, monkeypatch):
    monkeypatch.setattr(text_module, "PIECE", 64)
    content = "\u6df1\u5ea6\U0001f98a" * 500
    data = load(config(tmp_path, content))
    assert "".join(documents(rows, data.tokenizer)[0] for rows in (data.train, data.val, data.test)) == content


def test_small_pieces_give_the_same_stream(tmp_path, monkeypatch):
    folder = write_folder(tmp_path / "docs", {"a.txt": STORY * 2, "b.txt": "x", "c.txt": "word " * 500})
    whole = load(config(tmp_path, data_file=folder, tokenizer="bpe:290"))
    monkeypatch.setattr(text_module, "PIECE", 100)
    cut = load(config(tmp_path, data_file=folder, tokenizer="bpe:290", data_dir=str(tmp_path / "other")))
    for split in text_module.SPLITS:
        texts = [documents(getattr(data, split), data.tokenizer) for data in (whole, cut)]
        assert [len(text) for text in texts[0]] == pytest.approx([len(text) for text in texts[1]], abs=100)
    assert whole.tokenizer.vocab_size == cut.tokenizer.vocab_size == 290


def test_an_epoch_covers_every_row_once(tmp_path):
    data = load(config(tmp_path))
    number, size, T = len(data.train), len(data.train.tokens), data.config.block_size
    tokens = np.asarray(data.train.tokens, np.int64)
    starts = set()
    for epoch in range(3):
        rows = np.concatenate([data.train_batch(epoch * number + i, 1, 7)["inputs"] for i in range(number)])
        fits = [shift for shift in range(T) if sorted(rows.tolist()) == sorted(
            np.take(tokens, np.arange(shift, shift + number * T), mode="wrap").reshape(number, T).tolist())]
        assert len(fits) == 1 and number == (size - 1) // T
        starts.add(fits[0])
    assert len(starts) > 1, "the cuts differ from epoch to epoch"


def test_batches_are_pure_and_labels_are_inputs_one_on(tmp_path):
    data = load(config(tmp_path))
    batch, again = (data.train_batch(5, 100, 3) for _ in range(2))
    assert {name: (part.shape, part.dtype) for name, part in batch.items()} == {
        "inputs": ((100, 16), np.int64), "labels": ((100, 16), np.int64)}
    assert all((batch[name] == again[name]).all() for name in batch)
    assert (batch["inputs"][:, 1:] == batch["labels"][:, :-1]).all()
    assert (data.train_batch(5, 100, 4)["inputs"] != batch["inputs"]).any()
    halves = np.concatenate([data.train_batch(index, 50, 3)["inputs"] for index in (10, 11)])
    assert (halves == batch["inputs"]).all(), "the order of rows does not depend on the batch size"
    torch.from_numpy(batch["labels"])


def test_evaluation_goes_in_order(tmp_path):
    data = load(config(tmp_path))
    batches, tokens = list(data.eval_batches("val", 7)), np.asarray(data.val.tokens, np.int64)
    sizes = [len(batch["inputs"]) for batch in batches]
    assert sizes[:-1] == [7] * (len(sizes) - 1) and 0 < sizes[-1] <= 7
    inputs, labels = (np.concatenate([batch[name] for batch in batches]).ravel() for name in ("inputs", "labels"))
    assert len(inputs) == 16 * len(data.val)
    assert (inputs == tokens[:len(inputs)]).all() and (labels == tokens[1:len(inputs) + 1]).all()
    assert len(Rows(tokens[:16], 16)) == 0 and len(Rows(tokens[:17], 16)) == 1


def test_examples_are_beginnings_of_rows(tmp_path):
    data = load(config(tmp_path, "\U0001f98a" + STORY * 4))
    prompts = data.examples("train", 3)
    assert len(prompts) == 3 and prompts[0] == "\U0001f98a" and (STORY * 4)[12:16] == prompts[1]
    assert len(data.examples("val", 10 ** 6)) == len(data.val)
    assert not any(EOT in text for text in data.examples("test", 10 ** 6))


def test_the_cache_is_used_and_keyed_by_what_matters(tmp_path, monkeypatch):
    first = load(config(tmp_path))
    monkeypatch.setattr(text_module, "build", None)  # a call would fail
    again = load(config(tmp_path, block_size=8))
    assert (again.train.tokens == first.train.tokens).all() and len(again.train) > len(first.train)
    assert [line.split()[-1] for line in again.summary()[2:5]] == [line.split()[-1] for line in first.summary()[2:5]]
    for changes in (dict(content=STORY * 5), dict(tokenizer="bpe:300"), dict(val_fraction=0.2), dict(data_seed=1)):
        with pytest.raises(TypeError):
            load(config(tmp_path, **changes))


def test_a_crash_while_preparing_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(text_module, "PIECE", 200)
    real, calls = Tokenizer.encode, []

    def crash(self, text):
        calls.append(text)
        if len(calls) > 9:
            raise OSError("disk full")
        return real(self, text)
    monkeypatch.setattr(Tokenizer, "encode", crash)
    with pytest.raises(OSError, match="disk full"):
        load(config(tmp_path))
    assert os.listdir(tmp_path / "cache") == []
    monkeypatch.setattr(Tokenizer, "encode", real)
    load(config(tmp_path))
    assert len(os.listdir(tmp_path / "cache")) == 4


def test_large_vocabularies_take_32_bits(tmp_path, trained):
    def change(data):
        data["added_tokens"].append(dict(id=70_000, content="<|far|>"))
    folder = write_huggingface(tmp_path / "tok", trained.tokens, eos="<|far|>", change=change)
    data = load(config(tmp_path, tokenizer=folder))
    assert data.train.tokens.dtype == np.uint32 and data.train.tokens[-1] == 70_000 == data.model_args["vocab_size"] - 1


def test_without_preparing_there_is_a_tokenizer_only(tmp_path):
    assert load(TextConfig(), prepare=False).tokenizer.vocab_size == 257
    assert load(TextConfig(tokenizer="bpe:1024"), prepare=False).tokenizer is None


@pytest.mark.parametrize("changes, message", [
    (dict(data_file=""), "--data_file"), (dict(data_file="missing.txt"), "missing.txt does not exist"),
    (dict(block_size=0), "block_size 0"), (dict(data_seed=-1), "data_seed -1"),
    (dict(val_fraction=-0.1), "val_fraction -0.1"), (dict(test_fraction=1), "test_fraction 1"),
    (dict(val_fraction=float("nan")), "val_fraction nan"),
    (dict(val_fraction=0.5, test_fraction=0.5), "leave nothing to train on"), (dict(tokenizer="words"), "'words'"),
    (dict(tokenizer="bpe:100"), "100 is too small"), (dict(tokenizer="bpe:9999"), "too short for a BPE"),
    (dict(block_size=10 ** 6), "train has"), (dict(block_size=1000), "val has"), (dict(content=""), "holds no text"),
    (dict(content=b"\xef\xbb\xbf"), "holds no text"), (dict(content="x"), "too few for a row"),
    (dict(content=b"\xff\xfea\x00"), "is not UTF-8 text (byte 0"), (dict(content=b"\xef\xbb\xbfab\xe9 "), "(byte 5"),
    (dict(content="\u00e9".encode() * 600_000 + b"\xc3"), "(byte 1,200,000"),
    (dict(content=b"a" * (1 << 20) + b"\xc3" * 2), "(byte 1,048,576"),
    (dict(content=b"a" * 5 + b"\xf0\x9f\xa6"), "(byte 5")])
def test_mistakes_are_one_line(tmp_path, changes, message):
    assert message in one_line(load, config(tmp_path, **changes))


def test_unreadable_files_and_folders_are_one_line(tmp_path):
    (tmp_path / "cut.txt.gz").write_bytes(gzip.compress(os.urandom(5000))[:-2000])
    (tmp_path / "not.gz").write_bytes(b"plain")
    (tmp_path / "empty").mkdir()
    for name in ("cut.txt.gz", "not.gz"):
        assert f"cannot read {tmp_path / name}" in one_line(load, config(tmp_path, data_file=str(tmp_path / name)))
    assert "no file in this folder ends in .txt, .md" in one_line(find_documents, str(tmp_path / "empty"))


def test_a_prompt_s_ids_are_its_text_s(tmp_path):
    data = load(config(tmp_path))
    assert data.encode(f"Once {EOT}") == data.tokenizer.encode(f"Once {EOT}")


def test_no_split_is_needed_but_train(tmp_path):
    data = load(config(tmp_path, val_fraction=0, test_fraction=0))
    assert (len(data.val), len(data.test)) == (0, 0) and list(data.eval_batches("val", 4)) == []
    assert documents(data.train, data.tokenizer) == [STORY * 4] and len(data.summary()) == 5


@pytest.mark.parametrize("locale", ["C", "en_US.UTF-8"])
def test_every_file_is_opened_with_an_encoding(tmp_path, trained, locale):
    folder = write_huggingface(tmp_path / "tok", trained.tokens, eos=EOT)
    code = ("import sys; from data.text import *\n"
            "for spec in ('bytes', 'bpe:270', sys.argv[3]):\n"
            "    data = load(TextConfig(data_file=sys.argv[1], tokenizer=spec, block_size=8, data_dir=sys.argv[2]))\n"
            "    ids = sum((getattr(data, split).tokens.tolist() for split in SPLITS), [])\n"
            "    raw = b''.join(data.tokenizer.token_bytes(i) for i in ids if i != data.tokenizer.eot)\n"
            "    assert raw == open(sys.argv[1], 'rb').read()\n"
            "    print(*data.summary(), sep='\\n')\n")
    path = config(tmp_path, "caf\u00e9 \U0001f98a\r\n" * 200 + STORY).data_file
    environment = {**os.environ, "PYTHONWARNDEFAULTENCODING": "1", "LC_ALL": locale, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "error::EncodingWarning", "-c", code, path, str(tmp_path / "cache"), folder]
    run = subprocess.run(command, env=environment, capture_output=True, encoding="utf-8")
    assert run.returncode == 0 and run.stdout.count("test: ") == 3, run.stderr


def test_rows_that_hold_the_end_of_a_text_alone_give_no_prompt(tmp_path):
    for i in range(40):
        (tmp_path / f"{i:02}.txt").write_text("x" * 7, encoding="utf-8")
    small = TextConfig(data_file=str(tmp_path), block_size=32, val_fraction=0.3, test_fraction=0.3,
                        data_dir=str(tmp_path / "cache"))
    assert all(load(small).examples("test", 5))
