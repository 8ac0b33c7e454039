r"""Any text as a stream of tokens, to train a language model on: a UTF-8 file, or a folder of them.

    config = TextConfig(data_file="book.txt", tokenizer="bpe:1024", block_size=256)
    data = load(config)                                     # prepared once, then read from config.data_dir
    print("\n".join(data.summary()))
    batch = data.train_batch(index=0, batch_size=64, seed=0)
    batch["inputs"], batch["labels"]                        # (64, 256) int64 each; labels are inputs, one token on

A file is one document; in a folder each *.txt, *.md, *.txt.gz and *.md.gz is one (sub-folders too, in sorted order;
hidden ones are skipped). Every document ends with the end-of-text token, put in by its id: "<|endoftext|>" spelt out in
a text is text. Line ends stay as they are, \r\n included; a byte-order mark is dropped; otherwise bytes in, bytes out.

Splits: whole documents, drawn at random, if there are enough (fraction x documents of at least 1); else, as with a
single file, the end of each document: its last part is for testing, the part before that for validation. A trained
tokenizer sees the training part only.

Files may be larger than the memory. They are read a megabyte at a time and cut for the tokenizer after a line, or else
before the space between two words: no token of GPT-2's or Qwen's kind crosses such a place, so the tokens are those of
the whole text. Only where 4 million characters hold no such place may they differ.

Written to data_dir: text-<key>-train.npy, -val.npy, -test.npy, the tokens as uint16 or uint32, and text-<key>.json; the
key hashes the contents of the files and every setting that matters.
"""
import codecs
import contextlib
import gzip
import json
import os
import zlib
from dataclasses import dataclass

import numpy as np
from tqdm import tqdm

from data.common import atomic_write, content_hash, epoch_rows, file_hash
from data.tokenizer import Tokenizer, load_tokenizer

FORMAT = 1  # part of the cache key: raise it when the prepared files change
SPLITS = ("train", "val", "test")
ENDINGS = (".txt", ".md", ".txt.gz", ".md.gz")
PIECE = 1 << 20  # bytes read, and about the characters encoded, at a time


@dataclass
class TextConfig:
    data_file: str = ""  # text to train on: a UTF-8 file, or a folder of .txt and .md files (each may be .gz)
    tokenizer: str = "bytes"  # bytes, bpe:SIZE (trained on the text, as in bpe:1024), or a Hugging Face tokenizer.json
    block_size: int = 256  # tokens per row
    val_fraction: float = 0.05  # share of the text to validate on; 0 = none
    test_fraction: float = 0.05  # share of the text to test on; 0 = none
    data_seed: int = 0  # seed of the choice of documents for validation and test
    data_dir: str = "data/cache"  # folder for prepared files


def validate(config):
    """ValueError, one line, for settings that cannot be."""
    if not config.data_file:
        raise ValueError("no text to train on: name a file or a folder with --data_file")
    if os.path.exists(config.data_file) and not (os.path.isfile(config.data_file) or os.path.isdir(config.data_file)):
        raise ValueError(f"data_file {config.data_file} is neither a file nor a folder: name a UTF-8 text file")
    if not os.path.exists(config.data_file):
        raise ValueError(f"data_file {config.data_file} does not exist: name a UTF-8 text file or a folder of them")
    for name, smallest in (("block_size", 2), ("data_seed", 0)):
        if getattr(config, name) < smallest:
            raise ValueError(f"{name} {getattr(config, name)} is too small: give {smallest} or more")
    for name in ("val_fraction", "test_fraction"):
        if not 0 <= getattr(config, name) < 1:
            raise ValueError(f"{name} {getattr(config, name):g} is not a share of the text: give 0 to below 1")
    if config.val_fraction + config.test_fraction >= 1:
        raise ValueError(f"val_fraction {config.val_fraction:g} and test_fraction {config.test_fraction:g} leave "
                         "nothing to train on: their sum must be below 1")


# ----------------------------------------------------------------------------------------------------------------------
# Reading

def find_documents(path):
    """The paths of the documents of a file or folder, in an order that is the same everywhere.

    ValueError, one line, if a folder holds none or cannot be read.
    """
    if not os.path.isdir(path):
        return [path]

    def fail(error):
        raise ValueError(f"cannot read {error.filename}: {error.strerror}") from None

    found = []
    for folder, folders, files in os.walk(path, onerror=fail):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [os.path.join(folder, name) for name in files
                  if not name.startswith(".") and name.lower().endswith(ENDINGS)]
    if not found:
        raise ValueError(f"{path}: no file in this folder ends in {', '.join(ENDINGS)}; add some, or name a file")
    return sorted(found, key=lambda name: os.path.relpath(name, path).split(os.sep))


def _decoded(path):
    """Iterate over a UTF-8 file (.gz: unpacked) as strings of bounded size, without a byte-order mark."""
    decoder, position = codecs.getincrementaldecoder("utf-8")(), 0
    opener = gzip.open if path.lower().endswith(".gz") else open
    try:
        with opener(path, "rb") as file:  # binary: line ends must not be translated
            while True:
                block, pending = file.read(PIECE), len(decoder.getstate()[0])
                text = decoder.decode(block, final=not block)
                yield text.removeprefix("\ufeff") if position == 0 else text
                position += len(block)
                if not block:
                    return
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text (byte {position - pending + error.start:,}: {error.reason}); save "
                         "it as UTF-8") from None
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None


def safe_cut(text):
    """The last place in a text that no token crosses: after a line, or else before the space between two letters.

    0 if there is none. A line end counts if it is one \\n between no space and a letter or digit: what a pattern makes
    of a run of spaces (\\r\\n is one) depends on what follows it.
    """
    cut = text.rfind("\n", 1, -1)
    while cut > 0 and not (text[cut + 1].isalnum() and not text[cut - 1].isspace()):
        cut = text.rfind("\n", 1, cut)
    if cut > 0:
        return cut + 1
    cut = text.rfind(" ", 1, -1)
    while cut > 0 and not (text[cut - 1].isalpha() and text[cut + 1].isalpha()):
        cut = text.rfind(" ", 1, cut)
    return max(cut, 0)


def pieces(path):
    """Iterate over a document as strings of about PIECE characters, cut where it does not show."""
    rest = ""
    for text in _decoded(path):
        rest += text
        cut = safe_cut(rest) if len(rest) >= PIECE // 2 else 0
        cut = cut or (len(rest) if len(rest) > 4 * PIECE else 0)
        if cut:
            yield rest[:cut]
        rest = rest[cut:]
    if rest:
        yield rest


# ----------------------------------------------------------------------------------------------------------------------
# Splits: prepared once, cached.

def plan(sizes, config):
    """sizes: characters per document -> per document, where its training and its validation part end."""
    fractions = np.array([config.val_fraction, config.test_fraction])
    ends = np.array([[size - int(size * fractions.sum()), size - int(size * fractions[1])] for size in sizes])
    wanted = fractions * len(sizes)
    if ((wanted == 0) | (wanted >= 1)).all():  # enough documents to give whole ones
        num_val, num_test = wanted.astype(int)
        order = np.random.default_rng(config.data_seed).permutation(len(sizes))
        ends[:, 0] = ends[:, 1] = sizes
        ends[order[:num_val + num_test], 0] = 0
        ends[order[num_val:num_val + num_test], 1] = 0
    return ends.tolist()


def parts(path, ends):
    """Iterate over a document as (split, text, whether that split's part of it ends here); no text is empty.

    The parts end at a safe place, at most 1,000 characters before where `ends` (of train, of val) says.
    """
    split, start, held = 0, 0, None  # a piece is held until it is known whether its part goes on
    for piece in pieces(path):
        stop = start + len(piece)
        while split < 2 and stop > ends[split]:
            cut = max(ends[split] - start, 0)
            near = max(cut - 1000, 0)
            line = safe_cut(piece[near:cut + 1])
            cut = near + line if line else cut
            if held or cut:
                yield SPLITS[split], (held or "") + piece[:cut], True
            held, piece, start, split = None, piece[cut:], start + cut, split + 1
        if held:
            yield SPLITS[split], held, False
        start, held = stop, piece
    if held:
        yield SPLITS[split], held, True


def all_parts(documents, ends, total, name):
    """Iterate over the parts of all documents, with a progress bar if it takes long; total: characters in all."""
    with tqdm(total=total, unit="char", unit_scale=True, delay=2, desc=name) as bar:
        for document, end in zip(documents, ends):
            for part in parts(document, end):
                yield part
                bar.update(len(part[1]))


def _write_streams(files, stream, tokenizer):
    """Encode what all_parts gives into the open files {split: file}, each an .npy array (N,) of uint16 or uint32."""
    dtype = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
    counts = dict.fromkeys(SPLITS, 0)

    def write_header(split):  # numpy pads it, so that it can be written again when the length is known
        files[split].seek(0)
        header = dict(descr=np.lib.format.dtype_to_descr(dtype), fortran_order=False, shape=(counts[split],))
        np.lib.format.write_array_header_1_0(files[split], header)

    for split in SPLITS:
        write_header(split)
    starts = {split: files[split].tell() for split in SPLITS}
    for split, text, last in stream:
        tokens = np.array(tokenizer.encode(text) + [tokenizer.eot] * last, dtype)
        files[split].write(tokens.tobytes())
        counts[split] += len(tokens)
    for split in SPLITS:
        write_header(split)
        assert files[split].tell() == starts[split], "the header grew over the first tokens"


def build(config, documents, path, tokenizer=None):
    """Read, split, encode and write: `path`-train.npy, -val.npy, -test.npy and `path`.json, all or none.

    tokenizer: None if it is to be trained.
    """
    sizes = [sum(map(len, pieces(document))) for document in documents]
    if not sum(sizes):
        raise ValueError(f"{config.data_file} holds no text; give a file or a folder with some")
    empty = sizes.count(0)
    documents, sizes = zip(*[pair for pair in zip(documents, sizes) if pair[1]])
    ends = plan(sizes, config)
    if tokenizer is None:
        stream = all_parts(documents, ends, sum(sizes), "read to train the tokenizer")
        tokenizer = load_tokenizer(config.tokenizer, (text for split, text, _ in stream if split == "train"))
    with contextlib.ExitStack() as stack:
        about = stack.enter_context(atomic_write(f"{path}.json"))  # entered first: takes its name last
        files = {split: stack.enter_context(atomic_write(f"{path}-{split}.npy")) for split in SPLITS}
        _write_streams(files, all_parts(documents, ends, sum(sizes), "encode"), tokenizer)
        notes = [f"skipped {empty:,} empty file{'s' * (empty > 1)}"] if empty else []
        about.write(json.dumps(dict(tokenizer=tokenizer.state(), documents=len(documents), characters=sum(sizes),
                                    notes=notes)).encode("utf-8"))


def load(config, prepare=True, saved=None):
    """Prepare the data of a TextConfig, or read it from the cache: TextData. ValueError, one line, for mistakes.

    prepare False: no splits, and no tokenizer if it is to be trained (a checkpoint holds it). saved: what state() kept
    in a checkpoint, whose tokenizer is then used.
    """
    if prepare:
        validate(config)
    if saved:
        tokenizer = Tokenizer.from_state(saved["tokenizer"])
    else:
        tokenizer = None if config.tokenizer.startswith("bpe:") else load_tokenizer(config.tokenizer)
    if not prepare:
        return TextData(config, tokenizer)
    kind = tokenizer.fingerprint() if tokenizer else config.tokenizer
    documents = find_documents(config.data_file)
    settings = [kind, float(config.val_fraction), float(config.test_fraction), config.data_seed]
    key = content_hash(FORMAT, settings, [(name.lower().endswith(".gz"), file_hash(name)) for name in documents])[:16]
    path = os.path.join(config.data_dir, f"text-{key}")
    if not all(map(os.path.exists, [f"{path}.json", *(f"{path}-{split}.npy" for split in SPLITS)])):
        print(f"preparing text ({config.data_file}, tokenizer {config.tokenizer}) -> {path}", flush=True)
        build(config, documents, path, tokenizer)
    with open(f"{path}.json", encoding="utf-8") as file:
        about = json.load(file)
    splits = {split: Rows(np.load(f"{path}-{split}.npy", mmap_mode="r"), config.block_size) for split in SPLITS}
    for split, fraction in zip(SPLITS, (1, config.val_fraction, config.test_fraction)):
        if fraction and not len(splits[split]):
            raise ValueError(f"{config.data_file}: {split} has {len(splits[split].tokens):,} tokens, too few for a row "
                             f"of block_size {config.block_size} (it takes one more): give more text, a smaller "
                             "--block_size, or another --val_fraction and --test_fraction (0 = none)")
    return TextData(config, Tokenizer.from_state(about["tokenizer"]), about, **splits)


class Rows:
    """A stream of tokens (N,) cut into rows of block_size inputs; a row's last label is the next row's first input."""

    def __init__(self, tokens, block_size):
        self.tokens, self.block_size = tokens, block_size

    def __len__(self):
        return max(len(self.tokens) - 1, 0) // self.block_size

    def batch(self, rows, shifts=0):
        """Rows (B,), each begun `shifts` (B,) tokens later -> dict of inputs and labels (B, T) int64.

        Past the end it goes on at the beginning: the stream is a ring of documents.
        """
        starts = np.asarray(rows) * self.block_size + shifts
        places = starts[:, None] + np.arange(self.block_size + 1)  # (B, T + 1)
        tokens = np.asarray(self.tokens[places % len(self.tokens)], np.int64)
        return dict(inputs=tokens[:, :-1], labels=tokens[:, 1:])


class TextData:
    """The splits train, val and test (Rows), the tokenizer, and what a training script asks of a data set."""

    grade = None  # there is no right answer to grade

    def __init__(self, config, tokenizer, about=None, train=None, val=None, test=None):
        self.config, self.tokenizer, self.about = config, tokenizer, about
        self.train, self.val, self.test = train, val, test

    @property
    def model_args(self):
        """What a model has to know."""
        return dict(vocab_size=self.tokenizer.vocab_size, block_size=self.config.block_size)

    @property
    def longest(self):
        """Tokens that a model must be able to read at once."""
        return self.config.block_size

    def groups(self):
        """No parts of the test split are told apart."""
        return {}

    def state(self):
        """What must travel with a model's weights."""
        return {"tokenizer": self.tokenizer.state()}

    def encode(self, text):
        """A prompt as a user gives it (str) -> the list of ids that a model is to go on from."""
        return self.tokenizer.encode(text)

    def summary(self):
        """Readable lines: where the text comes from, the tokenizer, and how much there is (and a hash) per split."""
        c, about = self.config, self.about
        number = f"{about['documents']:,} document{'s' * (about['documents'] > 1)}"
        lines = [f"text: {c.data_file}, {number}, {about['characters']:,} characters",
                 f"tokenizer: {c.tokenizer}, vocabulary {self.tokenizer.vocab_size:,}, fingerprint "
                 f"{self.tokenizer.fingerprint()}"]
        for name in SPLITS:
            rows = getattr(self, name)
            hashed = [rows.tokens[start:start + (1 << 24)] for start in range(0, len(rows.tokens) or 1, 1 << 24)]
            lines.append(f"{name}: {len(rows.tokens):,} tokens, {len(rows):,} rows of {c.block_size} | sha256 "
                         f"{content_hash(*hashed)[:12]}")  # by parts: one at a time is in memory
        return lines + about["notes"]

    def train_batch(self, index, batch_size, seed):
        """Batch `index` of training: a dict of inputs, labels (B, T) int64, labels being inputs one token on.

        A pure function of its arguments, so that a resumed run needs only its step. Each epoch goes through all rows in
        a random order, and begins them all at its own random shift below block_size: cuts differ from epoch to epoch.
        """
        number = len(self.train)
        epochs = (index * batch_size + np.arange(batch_size)) // number
        first = epochs[0]
        shifts = np.array([np.random.default_rng([seed, 1, epoch]).integers(self.config.block_size)
                           for epoch in range(first, epochs[-1] + 1)])
        return self.train.batch(epoch_rows(number, index, batch_size, seed), shifts[epochs - first])

    def eval_batches(self, split_name, batch_size):
        """Iterate over a split, "train", "val" or "test", in order and not shifted; the last batch may be short.

        What is left after the last whole row, less than one, is left out.
        """
        rows = getattr(self, split_name)
        for start in range(0, len(rows), batch_size):
            yield rows.batch(np.arange(start, min(start + batch_size, len(rows))))

    def examples(self, split_name, number):
        """The beginnings of the first rows of a split as at most `number` strings, to show what a model makes of them.

        Each is a quarter of a row, 32 tokens at most, from the last end of a document on; a row may begin within a
        character, whose rest is left out.
        """
        rows, prompts = getattr(self, split_name), []
        for row in rows.batch(np.arange(min(number, len(rows))))["inputs"].tolist():
            row = row[:min(32, max(1, len(row) // 4))]
            while self.tokenizer.eot in row:
                row = row[row.index(self.tokenizer.eot) + 1:]
            prompts.append(self.tokenizer.decode(row).strip("\ufffd"))
        return [prompt for prompt in prompts if prompt]
