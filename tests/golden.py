"""Find and read the golden sets: small inputs and outputs of the public reference implementations.

The folder is tests/golden, or the one that the environment variable GOLDEN_DIR names; every set found there is checked.
"""

import json
import os
from pathlib import Path

import numpy as np
import torch

FOLDER = Path(os.environ.get("GOLDEN_DIR") or Path(__file__).parent / "golden")


def find(prefix):
    """Names of the sets that begin with `prefix`: a JSON file with the settings, and one or more .npz beside it."""
    return sorted(path.stem for path in FOLDER.glob(f"{prefix}*.json"))


def folders(prefix):
    """Paths of the sets that begin with `prefix` and are a folder of files, expected.json among them."""
    return sorted(path.parent for path in FOLDER.glob(f"{prefix}*/expected.json"))


def settings(name):
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def arrays(name):
    """All arrays of an .npz as a dict of tensors, integers as int64; None if there is no such file."""
    path = FOLDER / f"{name}.npz"
    if not path.exists():
        return None
    with np.load(path, allow_pickle=False) as saved:
        tensors = {key: torch.from_numpy(saved[key]) for key in saved.files}
    return {key: t.long() if t.dtype == torch.int32 else t for key, t in tensors.items()}


def under(tensors, prefix):
    """The entries whose key begins with `prefix`, without it."""
    return {key.removeprefix(prefix): t for key, t in tensors.items() if key.startswith(prefix)}
