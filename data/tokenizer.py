"""Tokenizers: bytes, byte-level BPE trained on a text, or the tokenizer.json of a Hugging Face model; no network.

    tokenizer = load_tokenizer("bytes")                     # or "bpe:1024" with texts, or a folder, or a tokenizer.json
    ids = tokenizer.encode("any text")                      # special tokens in it are text like any other
    ids = tokenizer.encode("<|im_start|>user", special=True)
    tokenizer.decode(ids), tokenizer.vocab_size, tokenizer.eot
    torch.save({"tokenizer": tokenizer.state()}, path)      # plain values, which weights_only=True reads
    Tokenizer.from_state(state)                             # the same tokenizer, without its file or its text
    chat_template(folder)                                   # Jinja source, for data/chat.py

Byte-level BPE, https://arxiv.org/abs/1508.07909 on bytes: a regular expression cuts the text into pieces; each piece
begins as single bytes; then the pair of neighbours that was merged first in training is merged, the leftmost first,
until no pair is left. tiktoken does the work: an Encoding knows the bytes of each token and its rank, the place in the
order of merges. It has no Unicode normalisation, and its ranks are its ids, so both are added here.

A character that is no Unicode text by itself (half of a surrogate pair) is encoded as U+FFFD. Bytes that decode to no
text, as from a model that stops within a character, become U+FFFD as well; all else comes back as it was, except that
a tokenizer with NFC gives composed characters.
"""
import hashlib
import heapq
import json
import os
import re
import unicodedata
import warnings
from collections import Counter, defaultdict

import tiktoken

EOT = "<|endoftext|>"
BYTES = [bytes([value]) for value in range(256)]
# GPT-2's: a contraction; a word, a number or punctuation, each with the space before it; space but its last; space
PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
ANYTHING = r"[\s\S]"
LONGEST_SPACE = 100_000  # tiktoken's matcher aborts on about a million whitespace characters in a row


class Tokenizer:
    """A tiktoken Encoding with special tokens, ids of its own and an optional normalisation.

    tokens: list of bytes, in the order of their merges; ids: their ids (None = their places); unused: {bytes: id} of
    tokens that decode but that no text is encoded to; specials: {str: id}; eot: id of the special token that separates
    documents, ends answers and stops sampling; normalizer: "" or "NFC". vocab_size is the largest id + 1.
    """

    def __init__(self, tokens, pattern, specials, eot, normalizer="", ids=None, unused=None):
        self.tokens, self.pattern, self.specials, self.eot = list(tokens), pattern, dict(specials), eot
        self.normalizer, self.unused = normalizer, dict(unused or {})
        self.ids = list(range(len(self.tokens)) if ids is None else ids)
        pairs = [*zip(self.ids, self.tokens), *((number, token) for token, number in self.unused.items()),
                 *((number, text.encode("utf-8")) for text, number in self.specials.items())]
        self._bytes = dict(pairs)
        if len(self._bytes) < len(pairs) or len(self.ids) != len(self.tokens) or min(self._bytes) < 0:
            raise ValueError("two tokens share an id, or one has none or a negative one: make the tokenizer anew")
        self.vocab_size = max(self._bytes) + 1
        ascending = all(a < b for a, b in zip(self.ids, self.ids[1:]))
        self._id_of_rank = None if ascending else self.ids  # only the order of ranks counts: use ids where they have it
        ranks = dict(zip(self.tokens, self.ids if ascending else range(len(self.tokens))))
        self.encoding = tiktoken.Encoding("tokens", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
        # longest first, or a special token could hide one that it begins; the group keeps them in the split
        longest = sorted(map(re.escape, self.specials), key=len, reverse=True)
        self._special_split = re.compile(f"({'|'.join(longest)})") if longest else None

    def __repr__(self):
        return f"Tokenizer(vocab_size={self.vocab_size}, fingerprint={self.fingerprint()})"

    def encode(self, text, special=False):
        """Text -> list of ids. Special tokens in the text are ordinary text, unless special=True."""
        if not special or self._special_split is None:
            return self._encode_text(text)
        ids = []
        for number, part in enumerate(self._special_split.split(text)):  # text, special, text, special, ..., text
            ids += [self.specials[part]] if number % 2 else self._encode_text(part)
        return ids

    def _encode_text(self, text):
        """Encode text without special tokens."""
        text = unicodedata.normalize(self.normalizer, text) if self.normalizer else text
        ids = []
        for part in _cut_space(text):
            try:
                ids += self.encoding.encode_ordinary(part)
            except BaseException as error:  # tiktoken's matcher gives up with an exception of its own
                if type(error).__name__ != "PanicException":
                    raise
                raise ValueError(f"tiktoken cannot split {part[:20]!r}... ({len(part):,} characters) with its pattern; "
                                 "encode it in shorter parts") from None
        return ids if self._id_of_rank is None else [self._id_of_rank[rank] for rank in ids]

    def decode(self, ids, strict=True):
        """Ids (any iterable of integers, or a tensor) -> text. ValueError, one line, for an id that does not exist.

        strict False: such an id becomes U+FFFD. Models have some: published vocabularies are padded.
        """
        ids = ids.tolist() if hasattr(ids, "tolist") else ids
        get = self.token_bytes if strict else lambda number: self._bytes.get(number, "\ufffd".encode("utf-8"))
        return b"".join(map(get, ids)).decode("utf-8", errors="replace")

    def token_bytes(self, number):
        """The bytes of one token. ValueError, one line, for an id that does not exist."""
        try:
            return self._bytes[number]
        except (KeyError, TypeError):
            raise ValueError(f"token id {number!r} is not in the vocabulary: ids are 0 to {self.vocab_size - 1}, some "
                             "may be free") from None

    def state(self):
        """All of the tokenizer as a dict of plain values; bytes are written as text, one character (0 to 255) each."""
        return dict(format=1, pattern=self.pattern, normalizer=self.normalizer, eot=self.eot, ids=list(self.ids),
                    specials=dict(self.specials), tokens=[token.decode("latin-1") for token in self.tokens],
                    unused={token.decode("latin-1"): number for token, number in self.unused.items()})

    @classmethod
    def from_state(cls, state):
        """The tokenizer that state() described. ValueError, one line, if it is none."""
        try:
            if state["format"] != 1:
                raise ValueError(f"a tokenizer of format {state['format']!r} cannot be read; format 1 can")
            return cls([token.encode("latin-1") for token in state["tokens"]], state["pattern"], state["specials"],
                       state["eot"], state["normalizer"], state["ids"],
                       {token.encode("latin-1"): number for token, number in state["unused"].items()})
        except (KeyError, TypeError, AttributeError, UnicodeEncodeError) as error:
            raise ValueError(f"not the state of a tokenizer ({type(error).__name__}: {error}); use one that "
                             "Tokenizer.state() made") from None

    def fingerprint(self):
        """12 hex digits that differ when the state does: two runs with the same ones number their tokens alike."""
        return hashlib.sha256(json.dumps(self.state(), sort_keys=True).encode("utf-8")).hexdigest()[:12]


def _cut_space(text):
    """Text -> its parts, whitespace cut into lengths that can be matched; nearly always the whole text in one."""
    if len(text) <= LONGEST_SPACE:
        return [text]
    parts, start = [], 0
    for run in re.finditer(rf"(?<!\s)\s{{{LONGEST_SPACE},}}", text):
        for end in range(run.start() + LONGEST_SPACE, run.end() + 1, LONGEST_SPACE):
            parts.append(text[start:end])
            start = end
    return parts + [text[start:]]


def load_tokenizer(spec, texts=None):
    """The tokenizer that `spec` names: "bytes", "bpe:SIZE" (trained on `texts`, strings), or a Hugging Face path."""
    if spec == "bytes":
        return byte_tokenizer()
    if spec.startswith("bpe:"):
        size = spec.removeprefix("bpe:")
        if not (size.isascii() and size.isdecimal()):
            raise ValueError(f"tokenizer {spec!r} has no size: give the number of tokens, as in bpe:1024")
        if texts is None:
            raise ValueError(f"tokenizer {spec!r} is trained on a text: give one")
        return train_tokenizer(texts, int(size))
    if not os.path.exists(spec):
        raise ValueError(f"tokenizer {spec!r} is neither bytes, nor bpe:SIZE, nor a file or folder that exists")
    return huggingface_tokenizer(spec)


def byte_tokenizer():
    """256 bytes, ids 0 to 255, and <|endoftext|>, 256."""
    return Tokenizer(BYTES, ANYTHING + "{1,256}", {EOT: 256}, 256)


# ----------------------------------------------------------------------------------------------------------------------
# Training

def train_tokenizer(texts, vocab_size):
    """Byte-level BPE from a string or an iterable of them: 256 bytes, the merges, and <|endoftext|> as the last id.

    The most frequent pair of neighbours is merged next; among equals the one whose parts are older. ValueError, one
    line, if vocab_size is below 257 or the texts have too few pairs that occur twice.
    """
    if vocab_size < 257:
        raise ValueError(f"a BPE vocabulary of {vocab_size} is too small: give 257 (256 bytes, 1 end of text) or more")
    words, splitter = Counter(), _splitter(PATTERN)
    for text in [texts] if isinstance(texts, str) else texts:
        words.update(splitter.findall(text))
    tokens = _learn_merges([list(word.encode("utf-8", "replace")) for word in words], list(words.values()),
                           vocab_size - 1)
    if len(tokens) < vocab_size - 1:
        raise ValueError(f"the text is too short for a BPE vocabulary of {vocab_size}: it supports {len(tokens) + 1}; "
                         "give more text or a smaller size")
    return Tokenizer(tokens, PATTERN, {EOT: vocab_size - 1}, vocab_size - 1)


def _splitter(pattern):
    """A compiled pattern of the package regex, which tiktoken requires: Python's re knows no \\p{L}."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # in UTF-8 mode it asks for the locale's encoding, though it has no use for it
        import regex
        return regex.compile(pattern)


def _learn_merges(words, counts, number):
    """words: lists of byte values, changed in place; counts: how often each occurs -> at most `number` tokens."""
    tokens, pairs, places = list(BYTES), Counter(), defaultdict(set)
    for place, word in enumerate(words):
        for pair in zip(word, word[1:]):
            pairs[pair] += counts[place]
            places[pair].add(place)
    heap = [(-count, pair) for pair, count in pairs.items()]  # smallest first: frequent, then old
    heapq.heapify(heap)
    while len(tokens) < number and heap:
        count, pair = heapq.heappop(heap)
        if -count != pairs[pair]:
            continue  # the count has changed since; the pair was pushed again then
        if -count < 2:
            break
        changed = set()
        for place in places.pop(pair):  # a place may have lost the pair by now; then nothing changes
            old = words[place]
            words[place] = new = _merge(old, pair, len(tokens))
            for sign, word in ((-1, old), (1, new)):
                for neighbours in zip(word, word[1:]):
                    pairs[neighbours] += sign * counts[place]
                    places[neighbours].add(place)
                    changed.add(neighbours)
        for neighbours in changed:
            heapq.heappush(heap, (-pairs[neighbours], neighbours))
        tokens.append(tokens[pair[0]] + tokens[pair[1]])
    return tokens


def _merge(word, pair, new):
    """A word (list of token numbers) with each occurrence of the pair replaced, from the left."""
    merged, i = [], 0
    while i < len(word):
        found = i + 1 < len(word) and (word[i], word[i + 1]) == pair
        merged.append(new if found else word[i])
        i += 2 if found else 1
    return merged


# ----------------------------------------------------------------------------------------------------------------------
# Hugging Face's tokenizer.json

def _byte_alphabet():
    """{character: byte} of byte-level vocabularies: printable Latin-1 stands for itself, the rest for U+0100 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [value for value in range(256) if value not in printable]
    return {**{chr(value): value for value in printable}, **{chr(256 + i): value for i, value in enumerate(others)}}


ALPHABET = _byte_alphabet()


def _read_json(path):
    """A UTF-8 JSON file; ValueError, one line, if it cannot be read."""
    try:
        with open(path, encoding="utf-8-sig") as file:
            return json.load(file)
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None


def huggingface_tokenizer(path):
    """The tokenizer of a folder or tokenizer.json with a byte-level BPE: GPT-2's, Qwen's, Huginn's and their like.

    Its ids are Hugging Face's for add_special_tokens=False. All added tokens count as special. The end-of-text token is
    the eos_token of the tokenizer_config.json beside it, else <|endoftext|>, else the first added token. ValueError,
    one line that names it, for whatever a file holds that is not supported.
    """
    file = os.path.join(path, "tokenizer.json") if os.path.isdir(path) else str(path)
    config_file = os.path.join(os.path.dirname(file), "tokenizer_config.json")
    data, config = _read_json(file), _read_json(config_file) if os.path.exists(config_file) else {}
    try:
        _check_model(data["model"])
        specials = _added_tokens(data.get("added_tokens") or [])
        tokens, ids, unused = _merge_order(data["model"], specials)
        eos = config.get("eos_token")
        names = [eos["content"] if isinstance(eos, dict) else eos, EOT, *sorted(specials, key=specials.get)]
        eot = next((specials[name] for name in names if name in specials), None)
        if eot is None:
            raise ValueError("it has no added token that could end a text")
        return Tokenizer(tokens, _pattern(data.get("pre_tokenizer")), specials, eot, _normalizer(data), ids, unused)
    except ValueError as error:
        raise ValueError(f"{file}: {error}; give the file of a byte-level BPE, as GPT-2's or Qwen's") from None
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} is not a tokenizer.json ({type(error).__name__}: {error}); give one that Hugging "
                         "Face's tokenizers saved") from None


def chat_template(path):
    """The chat template of a Hugging Face folder (or of the tokenizer.json in it) as Jinja source; "" if it has none.

    It is the file chat_template.jinja, else the entry of tokenizer_config.json: a string, or a list of named ones, of
    which "default" counts, else the first. Lines put before it set the tokens that it may name, bos_token and
    eos_token, so that the source is all that is needed. ValueError, one line, for what cannot be read.
    """
    folder = path if os.path.isdir(path) else os.path.dirname(path)
    own, config_file = (os.path.join(folder, name) for name in ("chat_template.jinja", "tokenizer_config.json"))
    config = _read_json(config_file) if os.path.exists(config_file) else {}
    try:
        source = config.get("chat_template") or ""
        if isinstance(source, list):
            named = {entry["name"]: entry["template"] for entry in source}
            source = named.get("default", next(iter(named.values())))
        if os.path.exists(own):
            with open(own, encoding="utf-8", newline="") as file:
                source = file.read()
        tokens = {name: config.get(name) for name in ("bos_token", "eos_token")}
        tokens = {name: token["content"] if isinstance(token, dict) else token for name, token in tokens.items()}
        lines = [f"{{% set {name} = {ascii(token)} %}}\n" for name, token in tokens.items() if token and name in source]
        return "".join(lines) + source
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder} has a chat template that cannot be read ({type(error).__name__}: {error}); mend "
                         "chat_template in its tokenizer_config.json, or give a chat_template.jinja") from None


def _check_model(model):
    """ValueError for models other than plain BPE."""
    kind = model.get("type") or ("BPE" if "merges" in model else "unnamed")  # GPT-2's file does not name its type
    if kind != "BPE":
        raise ValueError(f"model type {kind} is not supported")
    for name in ("byte_fallback", "dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(name):
            raise ValueError(f"BPE with {name} {model[name]!r} is not supported")


def _added_tokens(entries):
    """{text: id} of the added tokens."""
    for entry in entries:
        for name in ("lstrip", "rstrip", "single_word"):
            if entry.get(name):
                raise ValueError(f"added token {entry['content']!r} with {name} is not supported")
    return {entry["content"]: entry["id"] for entry in entries if entry["content"]}


def _to_bytes(text):
    """A token as the file writes it -> bytes."""
    try:
        return bytes(ALPHABET[character] for character in text)
    except KeyError as error:
        raise ValueError(f"vocabulary entry {text!r} is not byte-level (it holds {error})") from None


def _merge_order(model, specials):
    """(tokens in the order of their merges, their ids, {token: id} of those that no text is encoded to)."""
    spelt = {text: _to_bytes(text) for text in model["vocab"] if text not in specials}
    vocab = {token: model["vocab"][text] for text, token in spelt.items()}
    never = (0xC0, 0xC1, *range(0xF5, 256))  # bytes that UTF-8 does not use
    lacking = [value for value in range(256) if value not in never and BYTES[value] not in vocab]
    if lacking:
        raise ValueError(f"the vocabulary lacks {len(lacking)} of the bytes of UTF-8, the first is {lacking[0]:#04x}")
    first, proper = {}, {}  # a token's first merge, and the first whose parts were made before it
    for place, merge in enumerate(model["merges"]):
        left, right = (spelt.get(part) for part in (merge.split(" ") if isinstance(merge, str) else merge))
        if left is None or right is None or left + right not in vocab:
            raise ValueError(f"merge {place} ({merge!r}) has a part or a result that the vocabulary lacks")
        first.setdefault(left + right, place)
        if all(len(part) == 1 or part in proper for part in (left, right)):
            proper.setdefault(left + right, place)
    rank = {**first, **proper}  # files made from tiktoken's list several merges for a token: the proper one counts
    single = sorted((token for token in vocab if len(token) == 1), key=vocab.get)
    tokens = single + sorted(rank, key=rank.get)
    unmade = sorted((token for token in vocab if len(token) != 1 and token not in rank), key=vocab.get)
    if model.get("ignore_merges"):  # a piece that is a token is that token, which is what tiktoken does in any case
        tokens, unmade = tokens + unmade, []
    return tokens, [vocab[token] for token in tokens], {token: vocab[token] for token in unmade}


def _normalizer(data):
    """ "" or "NFC"."""
    normalizer = data.get("normalizer") or {}
    kinds = normalizer["normalizers"] if normalizer.get("type") == "Sequence" else [normalizer] if normalizer else []
    for kind in kinds:
        if kind["type"] != "NFC":
            raise ValueError(f"normalizer {kind['type']} is not supported")
    return "NFC" if kinds else ""


def _pattern(pre_tokenizer):
    """The regular expression whose matches, one after another, are the pieces."""
    steps = pre_tokenizer["pretokenizers"] if pre_tokenizer and pre_tokenizer["type"] == "Sequence" else [pre_tokenizer]
    if not steps or not steps[-1] or steps[-1]["type"] != "ByteLevel":
        raise ValueError(f"pre-tokenizer {steps[-1]['type'] if steps and steps[-1] else None} is not supported")
    *splits, byte_level = steps
    if byte_level.get("add_prefix_space"):
        raise ValueError("add_prefix_space true is not supported")
    if byte_level.get("use_regex", True):
        splits = splits + [dict(type="Split", pattern=dict(Regex=PATTERN), behavior="Isolated", invert=False)]
    names = [step["type"] for step in splits]
    if len(splits) > 1 or any(name != "Split" for name in names):
        raise ValueError(f"pre-tokenizer steps {' + '.join(names)} are not supported")
    if not splits:
        return ANYTHING + "+"
    split, pattern = splits[0], splits[0]["pattern"]
    pattern = pattern["Regex"] if "Regex" in pattern else re.escape(pattern["String"])
    if split["behavior"] == "Removed" and split.get("invert"):
        return pattern  # what does not match is dropped, as by tiktoken
    if split["behavior"] != "Isolated":
        raise ValueError(f"pre-tokenizer Split with behavior {split['behavior']} is not supported")
    return f"(?:{pattern})|(?:(?!{pattern}){ANYTHING})+"  # what does not match is a piece, too
