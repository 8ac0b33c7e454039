"""What the modules share: files that are whole or absent, checked downloads, lines and faults, hashes, epochs.

    with atomic_write("cache/x.npz") as file:       # "x.npz" appears only when the block ends without an error
        np.savez(file, a=a)
    path = download(url, "cache/train.csv", check=my_check, hint="name a local copy with --data_file")
"""
import contextlib
import functools
import gzip
import hashlib
import http.client
import os
import urllib.request
import zlib

import numpy as np
from tqdm import tqdm


class UserError(Exception):
    """A mistake of the user's, told in one line; train.py's exit code is then 2."""


@contextlib.contextmanager
def user_errors():
    """ValueErrors of the model and data modules are mistakes of the user's; so are folders that cannot be written."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        place = f"{error.filename}: {error.strerror}; name another file or folder" if error.filename else str(error)
        raise UserError(place) from None
    except ValueError as error:
        raise UserError(str(error)) from None


@contextlib.contextmanager
def atomic_write(path):
    """Open a binary file that takes the name `path` only once it is complete.

    It is written under a temporary name in the same folder (a rename across file systems is a copy, which can be
    interrupted), flushed to the disk, then renamed. If the block raises, the temporary file goes, `path` is untouched.
    """
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    temporary = f"{path}.{os.getpid()}.tmp"  # the process id keeps two runs that prepare the same file apart
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # without this a power cut can leave the new name on an empty file
        os.replace(temporary, path)
    except BaseException:  # also on Ctrl-C
        with contextlib.suppress(OSError):
            os.remove(temporary)
        raise


def download(url, path, check=None, hint="check the network and try again"):
    """Fetch `url` into `path` unless that file exists already; returns `path`.

    The file must have the length that the server announced, and `check(temporary_path)`, if given, must not raise
    ValueError. Otherwise ValueError, one line, which ends with `hint` (what to do instead), and nothing is left behind.
    """
    if os.path.exists(path):
        return path
    try:
        with urllib.request.urlopen(url, timeout=30) as response, atomic_write(path) as file:
            length = response.headers.get("Content-Length")
            with tqdm(total=int(length) if length else None, unit="B", unit_scale=True, delay=2,
                      desc=os.path.basename(path)) as bar:
                while block := response.read(1 << 20):
                    file.write(block)
                    bar.update(len(block))
            if length is not None and file.tell() != int(length):
                raise ValueError(f"got {file.tell():,} of {int(length):,} bytes")
            file.flush()  # so that `check`, which opens the file by name, sees all of it
            if check is not None:
                check(file.name)
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"could not download {url} ({reason}); {hint}") from None
    return path


def read_lines(path, raw=False):
    """List of (line number from 1, text) of the lines of a UTF-8 file (.gz too) that are neither blank nor comments.

    A byte-order mark and any kind of line end are accepted; a comment begins with #. raw: a line is all that stands
    before its end, blanks and # too, and only empty ones are left out. ValueError, one line, if the file cannot be
    read.
    """
    opener = gzip.open if str(path).endswith(".gz") else open
    try:
        with opener(path, "rt", encoding="utf-8-sig") as file:  # "t" turns \r\n and \r into \n, "-sig" drops the mark
            lines = [(number, line.rstrip("\n") if raw else line.strip()) for number, line in enumerate(file, 1)]
    except FileNotFoundError:
        raise ValueError(f"no such file: {path}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text (byte {error.start}); save it as UTF-8") from None
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"cannot read {path}: {error}") from None
    return [(number, line) for number, line in lines if line and (raw or not line.startswith("#"))]


def report_bad_rows(reasons, rows, path, bad_rows, kind="puzzle", most=20):
    """What is wrong with a file, as a list of lines for the log (empty: nothing).

    reasons: {index into rows: why that row is bad}; kind: what a row is called. ValueError, one line naming up to
    `most` rows by their line number, if bad_rows is "error", and in any case if no row is left.
    """
    named = [f"line {rows[i].line}: {reasons[i]}" for i in sorted(reasons)[:most]]
    named += [f"and {len(reasons) - most:,} more"] if len(reasons) > most else []
    what = f"{len(reasons):,} of {len(rows):,} rows bad ({'; '.join(named)})"
    if len(reasons) == len(rows):
        what = what if rows else "the file holds none"
        raise ValueError(f"{path}: no {kind} is left: {what}; give a file of {kind}s")
    if reasons and bad_rows == "error":
        raise ValueError(f"{path}: {what}; mend them, or leave them out with --bad_rows skip")
    return [f"{path}: skipped {what}"] if reasons else []


@functools.lru_cache(maxsize=4)  # a batch at the boundary of two epochs needs both orders
def _epoch_order(number, seed, epoch):
    """The order of one epoch, (number,)."""
    return np.random.default_rng([seed, 0, epoch]).permutation(number)


def epoch_rows(number, index, batch_size, seed):
    """Rows (batch_size,) of batch `index` when `number` rows are gone through in one random order after another.

    A pure function of its arguments; a batch may end one epoch and begin the next (or hold several, if rows are few).
    """
    epoch, start = divmod(index * batch_size, number)
    last = (index * batch_size + batch_size - 1) // number
    order = np.concatenate([_epoch_order(number, seed, e) for e in range(epoch, last + 1)])
    return order[start:start + batch_size]


def content_hash(*parts):
    """Hex sha256 of arrays (dtype, shape and bytes) and other values (their repr), in order."""
    digest = hashlib.sha256()
    for part in parts:
        if isinstance(part, np.ndarray):
            digest.update(f"{part.dtype.newbyteorder('<').str}{part.shape}".encode())
            digest.update(np.ascontiguousarray(part, part.dtype.newbyteorder("<")).tobytes())
        else:
            digest.update(repr(part).encode())
    return digest.hexdigest()


def file_hash(path):
    """Hex sha256 of a file's bytes; ValueError, one line, if it cannot be read."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None


def by_source(sources):
    """Groups of rows with the same source (N,) str, or none if sources is None."""
    return {} if sources is None else {name: [sources == name] for name in dict.fromkeys(sources.tolist())}
