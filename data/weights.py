"""Weights as others have saved them: folders from Hugging Face, and checkpoints of train.py's.

    fields = read_config("Qwen3-1.7B")                              # what config.json says, a dict
    shapes = folder_shapes("Qwen3-1.7B")                            # name -> shape, of all .safetensors files
    read_folder("Qwen3-1.7B", {"model.norm.weight": tensor})        # fills tensors, of any dtype, sharded or not
    saved = read_run("out/qwen3-arith/best.pt", qwen3=Qwen3Config)  # a dict: model_config, model and what else there is

Reading .safetensors files takes a package: pip install safetensors. What is wrong with a file or folder is a
ValueError of one line.
"""

import json
import os
import warnings

import torch


# ---- checkpoints


def read_file(path, give):
    """What torch.save wrote into a file, on the CPU; `give` ends the message if it did not."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # foreign bytes break the reader in any way: KeyError, IndexError, struct.error
        raise ValueError(f"{path}: not a readable checkpoint ({type(error).__name__}); {give}") from None


def read_run(path, **kinds):
    """A checkpoint of train.py's -> its dict. kinds: a model's name and config class, as dnd=DNDConfig.

    A field of the config that came later than the file takes its default.
    """
    saved = read_file(path, "give one that train.py saved, or a folder with config.json and .safetensors files")
    fields = saved.get("model_config") if isinstance(saved, dict) else None
    for name, kind in kinds.items() if isinstance(fields, dict) else ():
        defaults, model = vars(kind()), saved.get("config", {}).get("model")
        # without the model's name a file must have all fields, which then tell its kind
        if fields.keys() == defaults.keys() and model is None or fields.keys() <= defaults.keys() and model == name:
            return saved | {"model_config": defaults | fields}
    raise ValueError(f"{path}: is no checkpoint of a {' or '.join(kinds)}; give one that train.py saved with "
                     f"--model {'|'.join(kinds)}")


def run_weights(path, **kinds):
    """The state dict in a checkpoint of train.py's: the averaged weights, where it has them. kinds: as of read_run."""
    saved = read_run(path, **kinds)
    if saved.get("parts"):
        raise ValueError(f"{path}: its weights are in the folder {saved['parts']}, where several processes saved them; "
                         "put them into one file with train.py --export FILE")
    return saved.get("ema") or saved["model"]


def check_shapes(path, found, expected):
    """Name -> shape, of a file and of the model: ValueError for the first that differs."""
    for name in sorted(found.keys() | expected.keys()):
        if found.get(name) != expected.get(name):
            raise ValueError(f"{path}: {name} is {found.get(name, 'missing')} in the file and "
                             f"{expected.get(name, 'absent')} in the model; give the settings it was trained with, or "
                             "a whole checkpoint")


# ---- folders


def read_config(folder):
    """The dict of a folder's config.json."""
    path = os.path.join(folder, "config.json")
    try:
        with open(path, encoding="utf-8") as file:
            theirs = json.load(file)
        if not isinstance(theirs, dict):
            raise ValueError(f"holds a {type(theirs).__name__}")
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: not a readable config ({error}); give a folder with config.json and .safetensors "
                         "files") from None
    return theirs


def folder_shapes(folder):
    """Name -> shape of every tensor in the .safetensors files of a folder, all of which must be there."""
    try:
        import safetensors  # noqa: F401
        from torch.distributed.checkpoint import HuggingFaceStorageReader
    except ImportError:
        raise ValueError(f"{folder}: reading .safetensors files needs a package; pip install safetensors") from None
    files = sorted(name for name in os.listdir(folder) if name.endswith(".safetensors"))
    index = os.path.join(folder, "model.safetensors.index.json")
    if os.path.exists(index):
        try:
            with open(index, encoding="utf-8") as file:
                files = sorted(set(json.load(file)["weight_map"].values()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{index}: not a readable index ({type(error).__name__}: {error}); download it "
                             "again") from None
    for name in files or ["*.safetensors"]:
        if not os.path.exists(os.path.join(folder, name)):
            raise ValueError(f"{folder}: holds no {name}; download the whole checkpoint")
    try:
        tensors = HuggingFaceStorageReader(folder).read_metadata().state_dict_metadata
    except Exception as error:  # SafetensorError is no public class in all versions
        raise ValueError(f"{folder}: not a readable safetensors file ({error}); download it again") from None
    return {name: tuple(tensor.size) for name, tensor in tensors.items()}


def read_folder(folder, tensors):
    """Read tensors of .safetensors files into those of a dict, name -> tensor; of a sharded one what is held here."""
    from torch.distributed.checkpoint import HuggingFaceStorageReader, load
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "assuming the intent is to load in a single process": so it is
        load(tensors, storage_reader=HuggingFaceStorageReader(folder), no_dist=True)


def held(tensor):
    """What this process holds of a tensor that FSDP may have sharded, by its rows."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
