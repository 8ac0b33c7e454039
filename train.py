"""Train, evaluate and use every model of this project: one script, flags only.

    python train.py --model hrm --data sudoku                          a small HRM on 9x9 Sudoku, minutes on a laptop
    python train.py --model hrm --data sudoku --preset nano-6x6        6x6 boards, a minute or two
    python train.py --model hrm --data sudoku --preset paper           the paper's 27M model, extreme puzzles (CUDA)
    python train.py --model hrm --data sudoku --init_from resume       go on where the newest run stopped
    python train.py --model hrm --data sudoku --eval_only              score the newest run on its test split
    python train.py --model hrm --data sudoku --solve 'PUZZLE or FILE' solve puzzles with the newest run
    python train.py --model hrm --data sudoku --analysis residual      how the newest run thinks: a table of an analysis
    python train.py --model hrm --data sudoku --analysis depth         train networks to compare HRM with, and do so
    python train.py --model hrm --data maze                            a small HRM on mazes, minutes on a laptop
    python train.py --model hrm --data arc --data_file FOLDER          a small HRM on small tasks of ARC
    python train.py --model huginn --data arith                        a small Huginn on arithmetic, minutes on a laptop
    python train.py --model huginn --data text --data_file FILE        the same on any text
    python train.py --model huginn --data chat --data_file FILE        the same on prompts with answers, or chats
    python train.py --model huginn --sample 'PROMPT' --num_steps 16    write on from a prompt with the newest run
    python train.py --model huginn --sample 'PROMPT' --init_from DIR   the same with a Hugging Face copy of huginn-0125
    python train.py --model modr --data arith                          branches and a router on the newest Huginn
    python train.py --model modr --export FILE --branch 2 --gate off   one of its branches as a plain Huginn
    python train.py --model qwen3 --data arith                         a small Qwen3, as a base for DND
    python train.py --model dnd --data arith                           nested passes for the newest Qwen3
    python train.py --model dnd --data arith --init_from DIR           the same for a Hugging Face folder of a Qwen3
    torchrun --nproc_per_node 8 train.py ... --parallel fsdp           any of them on 8 GPUs of one machine
    python train.py --model huginn --data text --preset paper --dry_run    what that takes: memory, FLOPs, hours

Flags are the fields of four dataclasses: TrainConfig here, the model's config, how the model is used once it is
trained (to solve or to write), and the data's config. A value comes from the first of these that names it: the command
line; the checkpoint, when a run is resumed, scored or used; the preset; the dataclass. A field that two classes share
is one flag. `--model hrm --data sudoku --help` shows the values in force.

The loop knows a model through one contract, the same for all of them
    Model(config)                                         build
    model.step(batch, carry)                              -> loss, metrics: name -> (total, count), carry
    model.configure_optimizers(lr, weight_decay, betas)   -> list of optimizers
    model.finish_step(metrics)                            after an optimizer step, of the whole step -> more metrics
    model.evaluate(batches, depths, grade, **options)     -> depth -> name -> (N,) scores; the first name selects
    Model.load_pretrained(path, **overrides)              published weights, or a checkpoint of this script
    Model.pretrained_config(path)                         its config's fields, as a dict
    model.fill(folder)                                    of some: reads published weights into this process's share
    model.parts_to_compile(), model.looped_parts()        what --compile compiles and FSDP shards; what is used often
    model.variants(), model.merged(branch)                of a model with branches: other ways to use what was trained,
                                                          by title; the model that it goes on with a branch merged
    Model.Carry, model.bar, Model.rate, Model.unit        the carry's class; metrics on the bar; the one per second;
                                                          what its stream counts for each token
    Model.packs                                           it keeps texts apart that share a row, by their positions
where the count of the metric "loss" is what a loss is a mean over, and data through
    load(config, prepare, saved)                          saved: what a checkpoint kept of state()
    data.summary(), .model_args, .longest, .state()       lines for the log; what a model must know, and hold; to keep
    data.train_batch(index, batch_size, seed)             a pure function: a run's place in the data is its step
    data.eval_batches(split, batch_size), .grade          in order; who is right, where that takes more than tokens
    data.encode(text)                                     the ids of a prompt as a user gives it
    data.groups()                                         lines of the table of results: label -> masks of test rows
    data.identifiers(inputs), .vote                       of puzzles with ids: theirs; rows that are voted over (arc)
    data.tokenizer                                        of a text; None for puzzles, which are solved, not sampled
"""

import argparse
import dataclasses
import difflib
import glob
import inspect
import itertools
import json
import math
import os
import random
import re
import signal
import sys
import time
from collections import deque
from dataclasses import asdict, dataclass
from typing import Literal, get_args, get_origin

import numpy as np
import torch
from torch.optim.swa_utils import get_ema_multi_avg_fn
from tqdm import tqdm

import dnd
import hrm
import huginn
import modr
from data import arc, arc_vote, arith, budget, chat, maze, selection, study, sudoku, text, thinking
from data import math as math_sets
from data.checkpoint import Writer, read_checkpoint, read_tensors, to_one_file
from data.common import UserError, atomic_write, user_errors
from data.machine import (Machine, StopSignal, device_name, keep_freed_memory, parts_of, rng_state, set_rng_state,
                          to_device)
from data.ranks import Ranks
from data.show import check_plot, means, print_scores, print_table, show_thinking, write_text
from data.tokenizer import chat_template, huggingface_tokenizer


@dataclass
class TrainConfig:
    # what to run
    model: Literal["hrm", "huginn", "modr", "qwen3", "dnd"] = "hrm"  # the method
    data: Literal["", "sudoku", "maze", "arc", "arith", "text", "math", "chat"] = ""  # empty = the model's first
    preset: str = ""  # named sizes and recipe of the model; empty = the one for this device
    init_from: str = "scratch"  # scratch, resume (go on with a run), or a run or published checkpoint to start from
    out_dir: str = ""  # folder of the run; empty = out/MODEL-DATA, numbered if that is taken
    eval_only: bool = False  # score a checkpoint on the test split and stop
    solve: str = ""  # a puzzle, or a file of puzzles, to solve with a checkpoint
    sample: str = ""  # a text to write on from with a checkpoint
    export: str = ""  # a file to write a run's best weights to; of a modr its --branch, merged into the base
    analysis: Literal[("", *thinking.ANALYSES, *study.STUDIES)] = ""  # of a trained hrm; depth, modules: trained for it
    baseline: str = ""  # a run to compare with in --analysis residual: of a plain recurrent network (--L_layers 0)
    plot: str = ""  # a .png file to draw to, where --eval_only (dnd) or --analysis has something to draw
    dry_run: bool = False  # print what a training takes, memory, FLOPs and hours, and stop; reads no data
    world_size: int = 1  # GPUs of the training that --dry_run tells of; makes no difference elsewhere
    mfu: float = 0.4  # share of an H100's peak FLOP/s that --dry_run expects
    stop: str = ""  # special tokens that end a text, separated by commas; empty = the tokenizer's end of text
    # machine
    device: str = "auto"  # auto, cpu, cuda, cuda:N or mps
    parallel: Literal["ddp", "fsdp"] = "ddp"  # under torchrun: each process holds the model, or a share of it (FSDP2)
    offload: bool = False  # weights, gradients and optimizer states in CPU memory, on the GPU a block at a time (FSDP2)
    rank_timeout: float = 10.0  # minutes that a process waits for the others before it ends with an error
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # of the forward pass; the weights stay float32
    profile: int = -1  # steps to profile, after ten, of the first process into trace.json of the run folder; -1 = none
    compile: bool = False  # torch.compile the blocks; on a CPU this needs a C++ compiler
    seed: int = 0  # of weights, data order and exploration
    # optimization
    max_steps: int = -1  # optimizer steps; -1 = no limit
    time_limit: float = -1  # minutes of training, validations included; -1 = no limit
    batch_size: int = 64  # puzzles or texts per step
    grad_accum: int = 1  # parts that each process computes its rows in, one after another, to save memory
    lr: float = 1e-3  # learning rate
    warmup_steps: int = 100  # steps of linear warm-up; 0 = none
    decay_steps: int = -1  # step at which lr has fallen (cosine) to its last value; -1 = constant after the warm-up
    last_lr: float = 0.05  # that value, as a share of lr
    weight_decay: float = 0.1  # decoupled, scaled by lr
    beta1: float = 0.9  # decay of the first moment
    beta2: float = 0.95  # decay of the second moment
    grad_clip: float = -1  # largest gradient norm; -1 = no clipping
    ema: float = 0.0  # decay of the averaged weights, which are then the ones scored and kept as best; 0 = none
    # evaluation
    eval_interval: int = 500  # steps between validations, each of which also saves; -1 = only at the end
    save_interval: float = 30.0  # minutes after which a run that validates more seldom saves; -1 = never
    eval_batch_size: int = 250  # puzzles or texts at once
    depths: str = "1,2,4,8,16"  # segments or steps of the test table; the best weights are chosen at the deepest

    def __post_init__(self):
        limits = {"seed": (0, 2**32 - 1), "batch_size": (1, 2**20), "grad_accum": (1, 2**20),
                  "eval_batch_size": (1, 2**20), "lr": (0, 1e38),
                  "rank_timeout": (0.01, 1e4), "ema": (0, 0.99999), "beta1": (0, 0.99999), "beta2": (0, 0.99999),
                  "weight_decay": (0, 1e3),
                  "warmup_steps": (0, 2**40), "last_lr": (0, 1)}
        or_off = ("profile", "save_interval", "max_steps", "time_limit", "decay_steps", "grad_clip", "eval_interval")
        for name, (least, most) in limits.items():
            if not least <= getattr(self, name) <= most:  # nan too
                raise ValueError(f"--{name} {getattr(self, name)}: give {least} to {most:g}")
        for name in or_off:
            if not (getattr(self, name) == -1 or 0 <= getattr(self, name) <= 2**40):
                raise ValueError(f"--{name} {getattr(self, name)}: give 0 or more, or -1 for none")
        if self.batch_size % self.grad_accum:
            raise ValueError(f"--grad_accum {self.grad_accum}: does not divide --batch_size {self.batch_size}; give a "
                             "divisor of it")


MODELS = {"hrm": (hrm.HRM, hrm.HRMConfig, hrm.PRESETS, hrm.SolveConfig),
          "huginn": (huginn.Huginn, huginn.HuginnConfig, huginn.PRESETS, huginn.GenerateConfig),
          "modr": (modr.MoDr, modr.MoDrConfig, modr.PRESETS, huginn.GenerateConfig),
          "qwen3": (dnd.DND, dnd.Qwen3Config, dnd.PLAIN_PRESETS, dnd.NestedGenerateConfig),
          "dnd": (dnd.DND, dnd.DNDConfig, dnd.PRESETS, dnd.NestedGenerateConfig)}
MINUTES = {"huginn": "ten to fifteen minutes", "qwen3": "five to ten minutes"}
BASES = {"modr": "huginn", "dnd": "qwen3"}  # the trained model that it goes on
DATA = {"sudoku": (sudoku.SudokuConfig, sudoku.load), "maze": (maze.MazeConfig, maze.load),
        "arc": (arc.ArcConfig, arc.load), "arith": (arith.ArithConfig, arith.load),
        "text": (text.TextConfig, text.load), "math": (math_sets.MathConfig, math_sets.load),
        "chat": (chat.ChatConfig, chat.load)}
TEXTS = ("arith", "text", "math", "chat")
USES = {"hrm": ("sudoku", "maze", "arc")} | dict.fromkeys(("huginn", "modr", "qwen3", "dnd"), TEXTS)  # default first
ON_CUDA = {"hrm": "paper", "huginn": "small"}  # that trains on a 24 GB card; other models and on a CPU the first preset

# What a preset sets beside the model: fields of TrainConfig and of the data's config.
RECIPES = {
    ("hrm", "nano"): dict(box="3x3", clues=40, max_steps=5000, decay_steps=5000, time_limit=10, ema=0.995),
    ("hrm", "nano-6x6"): dict(box="2x3", clues=14, max_steps=4000, decay_steps=4000, time_limit=5, ema=0.995),
    ("hrm", "paper"): dict(box="3x3", source="extreme-1k", num_train=1000, num_test=-1, batch_size=384, lr=7e-5,
                           weight_decay=1.0, warmup_steps=2000, max_steps=52000, eval_interval=2000),
    ("huginn", "nano"): dict(lr=2e-3, max_steps=4500, decay_steps=4500, time_limit=15, grad_clip=1.0, ema=0.99,
                             eval_batch_size=400, depths="1,2,3,4,6,12"),
    ("huginn", "small"): dict(lr=4e-4, warmup_steps=1000, max_steps=20000, decay_steps=20000, batch_size=64,
                              grad_accum=8, grad_clip=1.0, eval_batch_size=8, depths="1,4,8,16,32,64"),
    ("huginn", "paper"): dict(lr=4e-4, warmup_steps=4096, batch_size=4096, grad_accum=4096, grad_clip=1.0,
                              eval_batch_size=1, checkpoint_core=True, depths="1,4,8,16,32,64"),
    ("modr", "nano"): dict(families="sum6,large,wording", lr=5e-3, weight_decay=0.0, max_steps=1000, decay_steps=1000,
                           time_limit=15, grad_clip=1.0, eval_batch_size=400, depths="1,2,3,4,6,12"),
    ("modr", "small"): dict(lr=5e-4, weight_decay=0.0, max_steps=1500, decay_steps=1500, batch_size=64, grad_accum=4,
                            grad_clip=1.0, eval_batch_size=16, depths="1,4,8,16,32"),
    ("modr", "paper"): dict(lr=1e-4, weight_decay=0.0, max_steps=1500, decay_steps=1500, batch_size=64, grad_accum=16,
                            grad_clip=1.0, eval_batch_size=4, checkpoint_core=True, depths="1,4,8,16,32"),
}
DATA_RECIPES = {  # what is different on other data than the model's first
    ("hrm", "nano", "maze"): dict(size=9, H_cycles=2, L_cycles=2, grad_updates=6, halt_max_steps=8, batch_size=32,
                                  max_steps=4500, decay_steps=4500),
    ("hrm", "paper", "maze"): dict(size=30, source="hard-1k", augment=False, lr=1e-4, batch_size=768, grad_accum=16,
                                   max_steps=26000),
    ("hrm", "nano", "arc"): dict(board=9, num_augments=30, puzzle_emb_ndim=128, puzzle_emb_lr=1e-2,
                                 puzzle_emb_weight_decay=0.1, pos_encodings="rope", halt_max_steps=4, depths="1,2,4",
                                 max_steps=3000, decay_steps=3000),
    ("hrm", "paper", "arc"): dict(puzzle_emb_lr=1e-2, puzzle_emb_weight_decay=0.1, lr=1e-4, weight_decay=0.1,
                                  batch_size=768, grad_accum=16, max_steps=500000, eval_interval=10000),
}
NANO = dict(time_limit=15, grad_clip=1.0, ema=0.99, eval_batch_size=400)
for size in dnd.PRESETS:
    RECIPES["qwen3", size], RECIPES["dnd", size] = dict(depths="1"), dict(depths="1,2")
    if size.startswith("nano"):
        RECIPES["qwen3", size] |= NANO | dict(lr=2e-3, max_steps=2000, decay_steps=2000)
        # no averaged weights: tau holds the scores of those that are trained
        RECIPES["dnd", size] |= NANO | dict(lr=1e-3, max_steps=1000, decay_steps=1000, ema=0.0)
TUNING = dict(batch_size=16, grad_accum=16, lr=1e-5, warmup_steps=50, max_steps=1000, decay_steps=1000,
              eval_batch_size=16)  # of a language model from a Hugging Face folder
TUNING_OF = {"dnd": dict(lr=5e-6, last_lr=0.2, grad_clip=1.0)}  # in which a model differs; these are the paper's
# fields that belong to one call and are not taken from a checkpoint
OF_THIS_CALL = ("init_from", "out_dir", "eval_only", "solve", "sample", "export", "analysis", "baseline", "plot",
                "stop", "device", "dry_run", "world_size", "mfu", "profile")
OF_THE_DATA = ("vocab_size", "seq_len", "num_puzzle_identifiers", "box_rows", "box_cols")  # model settings it decides
LOG_EVERY = 10  # steps between looks at the metrics: each look waits for the device


# ---- flags


class Parser(argparse.ArgumentParser):
    """argparse whose errors are one line and name the nearest flag."""

    def error(self, message):
        raise UserError(message)

    def parse_args(self, argv):
        values, rest = self.parse_known_args(argv)
        if rest:
            word = rest[0].split("=")[0]
            near = difflib.get_close_matches(word, self._option_string_actions, n=1)
            hint = f"did you mean {near[0]}?" if near else "see --help"
            raise UserError(f"unknown flag or stray word {word}; {hint}")
        return values


def boolean(text):
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return text.lower() == "true"


def add_flags(parser, config_class, defaults):
    """A flag for every field of a dataclass; its help is the comment at the end of the field's line."""
    group = parser.add_argument_group(config_class.__name__)
    source = "".join(inspect.getsource(part) for part in config_class.__mro__ if dataclasses.is_dataclass(part))
    texts = dict(re.findall(r"^    (\w+):.*?#\s*(.*)$", source, flags=re.MULTILINE))
    for field in dataclasses.fields(config_class):
        if f"--{field.name}" in parser._option_string_actions:
            continue
        if get_origin(field.type) is Literal:
            kind = dict(type=str, choices=get_args(field.type))
        elif field.type is bool:
            kind = dict(type=boolean, nargs="?", const=True, metavar="BOOL")
        else:
            kind = dict(type=field.type, metavar=field.type.__name__.upper())
        text = texts.get(field.name, "").replace("%", "%%") + " (now: %(default)s)"
        group.add_argument(f"--{field.name}", help=text, default=defaults.get(field.name, field.default), **kind)


def parse(argv):
    """Command line -> (TrainConfig, configs of model, use and data; path of the checkpoint to start from or None)."""
    # --max-steps means --max_steps
    argv = [re.sub(r"^--[\w-]+", lambda flag: "--" + flag[0][2:].replace("-", "_"), word) for word in argv]
    first = Parser(add_help=False, allow_abbrev=False)  # model, data, preset and checkpoint decide the other defaults
    add_flags(first, TrainConfig, {})
    known, _ = first.parse_known_args([word for word in argv if word not in ("-h", "--help")])
    path, saved = checkpoint_path(known), {}
    if path and not os.path.isdir(path):
        saved = read_checkpoint(path)
        check_saved(saved, known, path)
    known.data = known.data or saved.get("config", {}).get("data") or USES[known.model][0]
    if known.data not in USES[known.model]:
        can = ", ".join(USES[known.model])
        raise UserError(f"--model {known.model} cannot use --data {known.data}; it can use {can}")
    (model_class, model_config, presets, use_config), (data_config, _) = MODELS[known.model], DATA[known.data]
    preset = known.preset or saved.get("config", {}).get("preset")
    if not preset:  # published weights are of the largest, whatever this machine is
        published = path and "model_config" not in saved
        on_cuda = device_name(known.device).startswith("cuda")
        preset = ON_CUDA.get(known.model) if on_cuda else None
        preset = nearest_preset(path, known.model) if published else preset or list(presets)[0]
    if preset not in presets:
        raise UserError(f"--preset {preset}: {known.model} has {', '.join(presets)}; choose one of these")
    recipe = RECIPES.get((known.model, preset), {}) | DATA_RECIPES.get((known.model, preset, known.data), {})
    defaults = asdict(presets[preset]) | recipe
    defaults |= {"preset": preset, "model": known.model, "data": known.data}
    published = known.preset.startswith("qwen3-") and known.dry_run and not path  # what will be the start
    if published or path and os.path.isdir(path):  # published weights of this size are tuned, not trained as they were
        defaults |= TUNING | TUNING_OF.get(known.model, {})
    if path:
        with user_errors():
            defaults |= model_class.pretrained_config(path)
        if known.data == saved.get("config", {}).get("data"):
            on_base = BASES.get(known.model) == saved["config"]["model"]  # then what is learned is the recipe's choice
            theirs = dict(saved["data_config"])
            if not os.path.isdir(theirs.get("data_dir", "")):  # the run comes from elsewhere
                theirs.pop("data_dir", None)
            defaults |= theirs | (recipe if on_base else {})
        # else it is a new run, from old weights
        if known.init_from == "resume" or only_uses(known):
            defaults |= {name: value for name, value in saved.get("config", {}).items() if name not in OF_THIS_CALL}
            defaults |= {} if known.solve or known.sample else saved.get("use_config", {})
    usage = "train.py --model MODEL --data DATA [flags]"
    parser = Parser(description=__doc__.split("\n\n")[0], usage=usage, allow_abbrev=False)
    classes = (TrainConfig, model_config, use_config, data_config)
    for config_class in classes:
        add_flags(parser, config_class, defaults)
    values = vars(parser.parse_args(argv))
    with user_errors():
        return *(c(**{f.name: values[f.name] for f in dataclasses.fields(c)}) for c in classes), path


def nearest_preset(path, model):
    """The preset that shares most settings with published weights; of equals the largest."""
    Model, _, presets, _ = MODELS[model]
    with user_errors():
        theirs = Model.pretrained_config(path)
    return max(reversed(presets), key=lambda name: len(theirs.items() & asdict(presets[name]).items()))


def only_uses(c):
    """Whether a checkpoint is to be used rather than trained."""
    return bool(c.eval_only or c.solve or c.sample or c.export or c.analysis in thinking.ANALYSES)


def parse_depths(text):
    try:
        depths = sorted({int(depth) for depth in text.split(",")})
    except ValueError:
        depths = [0]
    if depths[0] < 1 or depths[-1] > 10_000:
        raise UserError(f"--depths {text}: give whole numbers from 1 to 10000, separated by commas, as in 1,2,4,8,16")
    return depths


# ---- runs and checkpoints


def checkpoint_path(known):
    """The file or folder that --init_from, --out_dir and a use of a run mean together; None for a run from scratch.

    What goes on another model starts from its newest run, with the same --preset if that is given, and on the same data
    if there is one.
    """
    reads, folder = only_uses(known), known.out_dir
    if known.init_from not in ("scratch", "resume"):
        if not os.path.isdir(known.init_from) or os.path.exists(os.path.join(known.init_from, "config.json")):
            return known.init_from
        folder, reads = known.init_from, True
    elif known.init_from == "scratch" and not reads:
        base = BASES.get(known.model)
        folder = base and (newest_run(base, known.data, known.preset) or newest_run(base, "", known.preset))
        reads = True
        if not folder:
            return None
        if not os.path.exists(os.path.join(folder, "best.pt")):
            raise UserError(f"the newest {base} run, {folder}, was stopped before its first validation; go on with it "
                            f"by --model {base} --init_from resume --out_dir {folder}, or name another by --init_from")
    if not folder:
        folder = newest_run(known.model, known.data)
        if not folder:
            what = known.model + (f" on {known.data}" if known.data else "")
            raise UserError(f"no run of {what} under out; train one, name a checkpoint with --init_from, or another "
                            f"model with --model {'|'.join(MODELS)}")
    for name in ("best.pt", "last.pt") if reads else ("last.pt",):
        if os.path.exists(os.path.join(folder, name)):
            return os.path.join(folder, name)
    if os.path.exists(os.path.join(folder, "log.jsonl")):
        raise UserError(f"{folder}: its run was killed before it saved anything; delete the folder and start anew")
    raise UserError(f"{folder}: holds no checkpoint of a run; name the folder of one")


def newest_run(model, data, preset=""):
    """The folder of the newest run under out of a model on data, with a preset ("": any); None if there is none."""
    runs = sorted(glob.glob(os.path.join("out", f"{model}-{data}*", "last.pt")), key=os.path.getmtime, reverse=True)
    return next((os.path.dirname(run) for run in runs
                 if not preset or read_checkpoint(run).get("config", {}).get("preset") == preset), None)


def unfinished(path):
    """The step at which the run of a checkpoint was stopped before its limit; None if it reached that."""
    last = read_checkpoint(os.path.join(os.path.dirname(path), "last.pt"))
    c, step, minutes = last["config"], last["step"], last["elapsed"] / 60
    return step if not (0 <= c["max_steps"] <= step or 0 <= c["time_limit"] <= minutes) else None


def new_folder(c):
    """The folder of a new run: --out_dir, which must be empty, or out/MODEL-DATA or its next free sibling."""
    first = folder = c.out_dir or os.path.join("out", f"{c.model}-{c.data}")
    number = 1
    while os.path.exists(folder) and (not os.path.isdir(folder) or os.listdir(folder)):
        if c.out_dir:
            raise UserError(f"--out_dir {folder} is not an empty folder; go on with its run, if it has saved one, by "
                            "--init_from resume, or name another")
        number += 1
        folder = f"{first}-{number}"
    if number > 1:
        print(f"{first} holds a run already, so this one goes to {folder}")
    return folder


def check_saved(saved, known, path):
    """A checkpoint of another model, or of weights alone where a run is to go on, is an error now rather than later."""
    goes_on = known.init_from == "resume" and not only_uses(known)
    texts = {known.data, saved.get("config", {}).get("data")} <= {"", None, *TEXTS}  # of which any will do
    if goes_on and "optimizers" not in saved:
        raise UserError(f"{path} holds weights only, which cannot be resumed; start a new run from them with "
                        f"--init_from {path}")
    for name in ("model", "data") if goes_on or not texts else ("model",):
        theirs = saved.get("config", {}).get(name, "")
        is_base = name == "model" and not goes_on and BASES.get(known.model) == theirs
        if theirs and getattr(known, name) not in ("", theirs) and not is_base:
            raise UserError(f"{path} is a run with --{name} {theirs}, not {getattr(known, name)}; "
                            f"give --{name} {theirs}")


def check_fit(model_config, data, path):
    """A checkpoint and the data must agree on tokens, cells and ids; a text's tokens may be fewer, its rows shorter."""
    for name in OF_THE_DATA:
        ours, theirs = getattr(model_config, name, None), data.model_args.get(name)
        fewer = name == "vocab_size" and data.tokenizer and theirs <= ours
        if name == "vocab_size" and os.path.isdir(path) and theirs > ours:
            raise UserError(f"{path}: its tokenizer.json has {theirs} tokens, but its model {ours}; give a folder "
                            "whose parts belong together")
        if ours and theirs is not None and ours != theirs and not fewer:  # no boxes: published weights know of none
            raise UserError(f"{path} was trained with {name} {ours}, but this data has {theirs}; choose the data "
                            "it was trained on (see --box for Sudoku, --size for mazes, --tokenizer for text)")


def check_rows(c, model, data):
    """Texts must fit into the context; rows that hold several are for models that keep them apart."""
    if getattr(data, "pack_to", 0) and not getattr(model, "packs", False):
        raise UserError(f"--pack_to {data.pack_to}: a {c.model} reads a row as one text; give 0, or --model qwen3 or "
                        "dnd")
    most = getattr(model.config, "block_size", None)
    if most and data.longest > most:
        if data.longest == getattr(data, "pack_to", 0):
            raise UserError(f"--pack_to {data.longest}, but --block_size is {most}; raise it, or pack to fewer tokens")
        raise UserError(f"the data has texts of {data.longest} tokens, but --block_size is {most}; raise it, or choose "
                        "shorter ones, for math and chat by --max_tokens")


class Log:
    """log.jsonl of a run: a line per step, and one per evaluation."""

    def __init__(self, folder, step):
        self.path, kept = os.path.join(folder, "log.jsonl"), []
        if step and os.path.exists(self.path):
            with open(self.path, encoding="utf-8") as file:  # what was logged after the checkpoint happens again
                kept = [line for line in file if line.endswith("}\n") and json.loads(line)["step"] <= step]
        with atomic_write(self.path) as file:
            file.write("".join(kept).encode("utf-8"))

    def write(self, lines):
        with open(self.path, "a", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)


# ---- evaluation


def evaluate(model, data, split, c, use, machine, depths):
    """Score a split at each depth: depth -> name -> (N,) scores."""
    total, ranks = -(-len(getattr(data, split)) // c.eval_batch_size), machine.ranks
    first, end = ranks.portion(total)
    items = itertools.islice(data.eval_batches(split, c.eval_batch_size), first, end)
    items = tqdm(items, split, end - first, leave=False, delay=5, disable=ranks.rank > 0)
    model.eval()
    with machine.autocast():
        batches = (to_device(batch, machine.device) for batch in items)
        scores = model.evaluate(batches, depths, data.grade, **use_options(c, use, data))
    model.train()
    parts = ranks.all_objects(scores) if end - first < total else [scores]
    return {depth: {name: torch.cat([part[depth][name] for part in parts]) for name in named}
            for depth, named in scores.items()}


def use_options(c, use, data):
    """How the model is to solve or to write: the fields of its use config and, for texts, the ids that end them."""
    options = asdict(use)
    if data.tokenizer:
        specials = data.tokenizer.specials
        for name in filter(None, c.stop.split(",")):
            if name not in specials:
                raise UserError(f"--stop {name}: the tokenizer has the special tokens {', '.join(specials)}; name one")
        stop = [specials[name] for name in filter(None, c.stop.split(","))]
        options |= {"stop": stop or [data.tokenizer.eot], "seed": c.seed}
    return options


# ---- training


def lr_factor(c, step):
    """Linear warm-up, then constant, or a cosine down to last_lr at decay_steps."""
    warm = min(1.0, (step + 1) / max(c.warmup_steps, 1))
    done = min(step / max(c.decay_steps, 1), 1.0) if c.decay_steps >= 0 else 0.0
    return warm * (c.last_lr + (1 - c.last_lr) * (0.5 + 0.5 * math.cos(math.pi * done)))


def clock(seconds):
    hours, seconds = divmod(max(int(seconds), 0), 3600)
    return f"{hours}:{seconds // 60:02}:{seconds % 60:02}" if hours else f"{seconds // 60}:{seconds % 60:02}"


class Trainer:
    """A run: everything that is saved and restored together, and the loop."""

    def __init__(self, configs, model, data, machine, folder, saved=None):
        self.configs, self.model, self.data, self.machine, self.folder = configs, model, data, machine, folder
        c, self.use = configs[0], configs[2]
        self.c, self.ranks = c, machine.ranks
        self.averaged = self.ranks.averaged(model, get_ema_multi_avg_fn(c.ema)) if c.ema else None
        self.scored = self.averaged.module if c.ema else model  # the weights that count
        with user_errors():
            self.optimizers = model.configure_optimizers(c.lr, c.weight_decay, (c.beta1, c.beta2))
        self.base_lr = [[group["lr"] for group in optimizer.param_groups] for optimizer in self.optimizers]
        self.scaler = torch.amp.GradScaler(machine.device.type, enabled=machine.dtype == torch.float16)
        self.step, self.elapsed, self.best, self.carries = 0, 0.0, None, [None] * parts_of(c, self.ranks)
        if saved:
            self.restore(saved)
        self.model_step = self.ranks.wrap(model)
        self.writer = Writer(folder, self.ranks)
        with user_errors():
            self.log = Log(folder, self.step) if self.ranks.rank == 0 else None
        self.saved_at = time.monotonic()
        self.compiled = self.unproven = c.compile  # unproven: compiled, but no step has worked yet
        if c.compile:
            try:
                # the blocks share their code, compiled for each kind of block, of gradient and of shape: 4 to 12 times
                torch._dynamo.config.recompile_limit = 32
                for part in model.parts_to_compile():
                    part.compile()
            except Exception as error:
                self.uncompile(error)

    def save(self):
        """Save all that the next step depends on, in types that torch.load takes with weights_only=True."""
        rng, *other_rngs = self.ranks.all_objects(rng_state())
        content = self.describe() | {
            "carries": [self.ranks.gather(vars(carry)) if carry else None for carry in self.carries],
            "scaler": self.scaler.state_dict(), "rng": rng, "other_rngs": other_rngs, "step": self.step,
            "elapsed": self.elapsed, "best": self.best}
        self.writer.save("last.pt", content, self.weights(), self.step)
        self.saved_at = time.monotonic()

    def describe(self):
        names = ("config", "model_config", "use_config", "data_config")
        return {name: asdict(config) for name, config in zip(names, self.configs)} | {"data": self.data.state()}

    def weights(self):
        return {"model": self.model.state_dict(), "ema": self.averaged.state_dict() if self.averaged else None,
                "optimizers": [optimizer.state_dict() for optimizer in self.optimizers]}

    def read(self, path, saved):
        """Weights of a checkpoint, a dict as of `weights`, as this process is to hold them."""
        ours = self.weights()
        params = [[p for group in o.param_groups for p in group["params"]] for o in self.optimizers]

        def like(where):
            _, kind, *names = where.split("/")
            if kind == "optimizers":  # number, "state", parameter, name
                return params[int(names[0])][int(names[2])]
            return (ours[kind] or {}).get(names[0])

        return read_tensors(path, saved, like)

    def restore(self, saved):
        path = os.path.join(self.folder, "last.pt")
        tensors = self.read(path, {name: saved.get(name) for name in (*self.weights(), "parts")})
        self.model.load_state_dict(tensors["model"])
        if self.averaged and tensors["ema"]:
            self.averaged.load_state_dict(tensors["ema"])
        for optimizer, state in zip(self.optimizers, tensors["optimizers"]):
            given = [{k: group[k] for k in ("betas", "weight_decay") if k in group} for group in optimizer.param_groups]
            optimizer.load_state_dict(state)
            for group, values in zip(optimizer.param_groups, given):
                group.update(values)  # a flag of this call wins over the saved value
        if saved["scaler"]:  # empty unless that run was in float16
            self.scaler.load_state_dict(saved["scaler"])
        self.step, self.elapsed, self.best = saved["step"], saved["elapsed"], saved["best"]
        self.c.init_from = saved["config"]["init_from"]
        if self.c.batch_size != saved["config"]["batch_size"]:
            raise UserError(f"--batch_size {self.c.batch_size}: this run is at a place in the data that goes with "
                            f"{saved['config']['batch_size']}; resume with that, on as many processes as divide it, or "
                            "start a new run from its weights with --init_from PATH")
        device = self.machine.device
        self.carries = [carry and self.model.Carry(**to_device(carry, device))
                        for carry in self.ranks.deal(saved["carries"], len(self.carries))]
        rngs = [saved["rng"], *saved.get("other_rngs", [])]
        if self.ranks.rank < len(rngs):
            set_rng_state(rngs[self.ranks.rank])
        else:  # on more processes than before
            torch.manual_seed(self.c.seed + self.ranks.rank + self.step)

    def uncompile(self, error):
        """torch.compile only makes it faster: when it fails, say so and go on without it."""
        reason = (str(error).splitlines() or [""])[0][:200]
        tqdm.write(f"warning: --compile failed ({type(error).__name__}: {reason}); going on without it", sys.stderr)
        for module in self.model.modules():
            module._compiled_call_impl = None
        self.model.zero_grad()
        self.compiled = self.unproven = False

    def forward_backward(self, batch):
        """Leaves the gradient of the whole batch, computed in grad_accum parts -> metrics: name -> (total, count)."""
        metrics, carries, alone = {}, list(self.carries), len(self.carries) == self.ranks.size == 1
        parts = list(self.ranks.shares(batch, len(carries)))
        for i, part in enumerate(parts):
            with self.ranks.syncs(self.model_step, i == len(parts) - 1):
                with self.machine.autocast():
                    loss, named, carries[i] = self.model_step(to_device(part, self.machine.device), carries[i])
                count = named["loss"][1]  # a part's loss is a mean over so many
                self.scaler.scale(loss if alone else loss * count).backward()
            for name, (a, b) in named.items():
                total, number = metrics.get(name, (0, 0))
                metrics[name] = total + a, number + b
        if not alone:
            (count,) = self.ranks.sum([metrics["loss"][1]])
            params = [p for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"]]
            self.ranks.scale_gradients(params, 1 / max(count, 1))
        self.carries = carries  # only now: if a compiled part fails, the step is done again
        return metrics

    def one_step(self):
        """Forward, backward, update -> metrics: name -> (total, count), tensors or numbers."""
        c = self.c
        for optimizer, rates in zip(self.optimizers, self.base_lr):
            for group, lr in zip(optimizer.param_groups, rates):
                group["lr"] = lr * lr_factor(c, self.step)
        batch = to_device(self.data.train_batch(self.step, c.batch_size, c.seed), "cpu")
        before = rng_state() if self.unproven else None
        try:
            metrics = self.forward_backward(batch)
        except Exception as error:
            if not self.unproven:
                raise
            self.uncompile(error)
            set_rng_state(before)
            metrics = self.forward_backward(batch)
        self.unproven = False
        if c.grad_clip > 0:
            self.scaler.unscale_(self.optimizers[0])
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), c.grad_clip)
        for optimizer in self.optimizers:
            self.scaler.step(optimizer)
            optimizer.zero_grad()
        self.scaler.update()
        metrics |= self.model.finish_step(metrics)
        if self.averaged:
            self.averaged.update_parameters(self.model)
        self.step += 1
        return metrics

    def train(self):
        """Step until a limit or a signal. Returns the signal's name, or None."""
        stop, started, pending, recent = StopSignal(), time.monotonic() - self.elapsed, [], deque(maxlen=100)
        limit = self.c.max_steps if self.c.max_steps >= 0 else None
        bar = tqdm(total=limit, initial=self.step, mininterval=0.5 if sys.stderr.isatty() else 30,
                   bar_format="{n_fmt}/{total_fmt} {bar:10} {desc}" if limit else "{n_fmt} {desc}",
                   disable=self.ranks.rank > 0)
        self.model.train()
        done, profiler = self.finished(), self.profiler()
        while not (done or stop.name and self.ranks.size == 1):  # a signal may come at any moment
            metrics = self.one_step()
            profiler and profiler.step()
            self.writer.check()
            self.elapsed = time.monotonic() - started
            pending.append((self.step, self.elapsed, metrics))
            done, late = self.agree(stop)
            if len(pending) == LOG_EVERY or done:
                recent.extend(self.flush(pending))
                bar.set_description_str(self.progress(recent), refresh=False)
            bar.update()
            due = self.c.eval_interval > 0 and self.step % self.c.eval_interval == 0
            if (due or done or late) and not stop.name:
                recent.extend(self.flush(pending))  # a loss that is not finite must end the run before it is saved
                if due or done:
                    tqdm.write(f"step {self.step} | {clock(self.elapsed)} | {self.validate()}")
                    self.elapsed = time.monotonic() - started
                self.save()
                done, _ = self.agree(stop)
        if not stop.name and self.best is None:  # a limit of no steps at all
            self.validate()
        if stop.name or not self.step:
            self.flush(pending)  # the signal may have come after this step's look at them
            self.save()
        self.writer.wait()
        profiler and profiler.stop()
        if profiler and not os.path.exists(os.path.join(self.folder, "trace.json")):
            print(f"note: --profile {self.c.profile} wrote nothing; it takes {self.c.profile + 10} steps or more")
        bar.close()
        return stop.name

    def profiler(self):
        """A torch profiler that has started and is to be told of each step; None if none is asked for.

        Its trace can be looked at in Perfetto or chrome://tracing.
        """
        if self.c.profile <= 0 or self.ranks.rank:
            return None
        path = os.path.join(self.folder, "trace.json")
        steps = torch.profiler.schedule(wait=9, warmup=1, active=self.c.profile, repeat=1)
        profiler = torch.profiler.profile(schedule=steps, on_trace_ready=lambda p: p.export_chrome_trace(path))
        profiler.start()
        return profiler

    def agree(self, stop):
        """(whether a limit or a signal ends the run here, whether it is time to save), the same on all ranks."""
        late = 0 <= self.c.save_interval * 60 <= time.monotonic() - self.saved_at
        if self.ranks.size == 1:
            return self.finished() or bool(stop.name), late
        limits, signals, late = self.ranks.sum([self.finished(), bool(stop.name), late])
        stop.name = (stop.name or "SIGTERM") if signals else None
        return limits + signals > 0, late > 0

    def finished(self):
        return 0 <= self.c.max_steps <= self.step or 0 <= self.c.time_limit * 60 <= self.elapsed

    def flush(self, pending):
        """Log the steps in `pending` and empty it. Returns [(elapsed, name -> (total, count))], numbers."""
        values = iter(self.ranks.sum([value for _, _, named in pending for pair in named.values() for value in pair]))
        steps = [(step, t, {name: (next(values), next(values)) for name in named}) for step, t, named in pending]
        pending.clear()
        for step, _, named in steps:
            if not math.isfinite(named["loss"][0]):
                kept = os.path.join(self.folder, "last.pt")
                kept = f"the last good checkpoint is {kept}" if os.path.exists(kept) else "nothing was saved yet"
                raise UserError(f"the loss of step {step} is {named['loss'][0]}; {kept}; "
                                f"try a lower --lr than {self.c.lr:g}")
        self.write_log({"step": step, "elapsed": round(t, 3), "lr": self.c.lr * lr_factor(self.c, step - 1)}
                       | {name: a / b if b else None for name, (a, b) in named.items()} for step, t, named in steps)
        return [(t, named) for _, t, named in steps]

    def write_log(self, lines):
        if self.ranks.rank == 0:
            self.log.write(lines)

    def progress(self, recent):
        """The text of the bar: averages over the recent steps, speed, time left."""
        parts = []
        for name in self.model.bar:
            total, count = (sum(named[name][i] for _, named in recent) for i in (0, 1))
            parts.append(f"{name} {total / count:.4f}" if count else f"{name} -")
        seconds = recent[-1][0] - recent[0][0]
        done = sum(named[self.model.rate][0] for _, named in recent) - recent[0][1][self.model.rate][0]
        left = [self.c.time_limit * 60 - self.elapsed] if self.c.time_limit >= 0 else []
        if self.c.max_steps >= 0:  # at the pace so far, validations included
            left.append((self.c.max_steps - self.step) * self.elapsed / self.step)
        parts.append(f"{done / max(seconds, 1e-9):,.0f} {self.model.rate}/s")
        if "flops" in recent[0][1]:  # an estimate of the model's
            flops = sum(named["flops"][0] for _, named in recent) - recent[0][1]["flops"][0]
            parts.append(f"{flops / max(seconds, 1e-9) / 1e9:,.0f} GFLOP/s")
        return " | ".join(parts + ([f"{clock(min(left))} left"] if left else []))

    def evaluate(self, split, depths):
        """Score a split with the weights that count: depth -> name -> (N,) scores."""
        what = (self.scored, self.data, split, self.c, self.use, self.machine, depths)
        try:
            return evaluate(*what)
        except Exception as error:  # other shapes and no gradient: the blocks are compiled once more
            if not self.compiled:
                raise
            self.uncompile(error)
            return evaluate(*what)

    def validate(self):
        """Score the validation split at the deepest depth; keep the weights if they are the best so far."""
        ((_, named),) = self.evaluate("val", parse_depths(self.c.depths)[-1:]).items()
        named = means(named)
        first, sign = next(iter(named)), 1 if "accuracy" in next(iter(named)) else -1
        compared = [first] + [name for name in named if "accuracy" in name and name != first]  # the rest break ties
        if self.best is None or [sign * named[n] for n in compared] > [sign * self.best[n] for n in compared]:
            self.best = {"step": self.step, **named}
            weights = {"model": self.scored.state_dict()}
            self.writer.save("best.pt", self.describe() | {"best": self.best}, weights, self.step)
        line = {"step": self.step, "elapsed": round(self.elapsed, 3)}
        self.write_log([line | {f"val_{name}": value for name, value in named.items()}])
        return " | ".join(f"val {name} {value:.4f}" for name, value in named.items() if not name.startswith("branch_"))

    def report(self):
        """Score the best and the last weights on the test split, once each, and show a few examples of it."""
        depths, model = parse_depths(self.c.depths), self.scored
        results = {} if self.best["step"] == self.step else {f"last (step {self.step})": self.evaluate("test", depths)}
        path = os.path.join(self.folder, "best.pt")
        saved = read_checkpoint(path)
        model.load_state_dict(self.read(path, {"model": saved["model"], "parts": saved.get("parts")})["model"])
        results = {f"best on validation (step {self.best['step']})": self.evaluate("test", depths)} | results
        for title, scores in results.items():
            print_scores(f"test split, {title}", scores, self.data.groups())
            line = {f"test_{name}_{depth}": v for depth, named in scores.items() for name, v in means(named).items()}
            self.write_log([{"step": self.step, "weights": title} | line])
        if self.data.tokenizer:
            for prompt in self.data.examples("test", 1):
                write(self.c, self.use, model, self.data, self.machine, prompt)
        else:
            batch = next(iter(self.data.eval_batches("test", 3)))
            show_thinking(model, self.data, batch["inputs"], batch["labels"], depths[-1], self.use.act_eval,
                          self.machine.autocast)
        on_cuda = self.machine.device.type == "cuda"
        memory = f", peak GPU memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB" if on_cuda else ""
        print(f"{self.step} steps in {clock(self.elapsed)}{memory}; the run is in {self.folder}")


# ---- the script

USAGE = """train.py trains, evaluates and uses the models of this project. For example:
  python train.py --model hrm --data sudoku                      train a small HRM on Sudoku, then show what it does
  python train.py --model hrm --data sudoku --preset nano-6x6    the same on 6x6 boards, in a minute or two
  python train.py --model hrm --data sudoku --solve PUZZLE       solve a puzzle (digits and dots) with the newest run
  python train.py --model huginn --data arith                    train a small Huginn on arithmetic, then test it
  python train.py --model huginn --sample '00012+00345='         write on from a prompt with the newest run
  python train.py --model modr --data arith                      branches for the newest Huginn, and a router
  python train.py --model dnd --data arith                       nested passes for the newest Qwen3
  python train.py --model hrm --data sudoku --help               all flags and the values in force"""


def check_uses(c, argv):
    """Ways to use a checkpoint are given one at a time, and not empty."""
    for flag in ("solve", "sample", "export"):
        if not getattr(c, flag) and any(word.split("=")[0] == f"--{flag}" for word in argv):
            give = dict(solve="a puzzle, or a file of them", sample="the beginning of a text", export="a file's name")
            raise UserError(f"--{flag} is empty; give {give[flag]}")
    if c.analysis and not hasattr(MODELS[c.model][0], "updates"):
        raise UserError(f"--analysis {c.analysis}: is made for --model hrm; what there is of a {c.model}, --eval_only "
                        "tells")
    if c.analysis in study.STUDIES and c.init_from != "scratch":
        raise UserError(f"--analysis {c.analysis} trains from scratch; leave --init_from {c.init_from} out")
    if c.baseline and c.analysis != "residual":
        raise UserError(f"--baseline {c.baseline} goes with --analysis residual; add that")
    if c.plot:
        if not (c.eval_only or c.analysis):
            raise UserError(f"--plot {c.plot} goes with --eval_only or --analysis; add one")
        with user_errors():
            check_plot(c.plot)
    if sum(map(bool, (c.eval_only, c.solve, c.sample, c.export, c.analysis, c.dry_run))) > 1:
        raise UserError("more than one of --eval_only, --solve, --sample, --export, --analysis and --dry_run; give one "
                        "at a time")


def run(argv):
    """Do what the flags say. Returns the name of the signal that stopped a training, or None."""
    c, model_config, use, data_config, path = parse(argv)
    check_uses(c, argv)
    if c.compile and getattr(model_config, "selective_checkpoint", False):  # compiled code reuses what would be kept
        raise UserError("--selective_checkpoint does not work with --compile; leave one of them out")
    if only_uses(c) and os.environ.get("RANK", "0") != "0":  # of several processes, one is enough
        return None
    if c.dry_run:
        with user_errors():
            return budget.print_budget((c, model_config, use, data_config), MODELS[c.model][0], c.world_size, c.mfu,
                                       c.parallel, c.offload)
    if c.analysis in study.STUDIES:
        return compare(argv, c, model_config)
    if path is None and c.model in BASES:
        if stopped := train_base(c, model_config, data_config):
            return stopped
        c, model_config, use, data_config, path = parse(argv)
    configs = [c, model_config, use, data_config]
    machine = Machine.of(c, alone=only_uses(c))
    ranks = machine.ranks
    parse_depths(c.depths)
    starts = c.init_from != "resume" and not only_uses(c)
    folder = ranks.first_decides(lambda: new_folder(c)) if starts else os.path.dirname(path)
    keep_freed_memory()
    torch.manual_seed(c.seed)
    random.seed(c.seed)
    np.random.seed(c.seed)

    data, model = build(configs, path, machine)
    if ranks.rank:  # equal weights, but noise and exploration of each rank's own
        torch.manual_seed(c.seed + ranks.rank)
    introduce(configs, model, machine, path)
    if c.solve:
        return solve(c, use, model, data, machine)
    if c.sample:
        return write(c, use, model, data, machine, c.sample)
    if c.export:
        return export(configs, model, data)
    print("\n".join(data.summary()))
    check_data(c, use, model, data)
    if c.eval_only:
        return score(c, use, model, data, machine, path)
    if c.analysis:
        return analyse(c, model, data, machine)
    return train(configs, model, data, machine, folder, path)


def introduce(configs, model, machine, path):
    """Say what is run, where and in what precision, with all of the model's settings."""
    c = configs[0]
    print(f"{c.model} on {c.data}, preset {c.preset}, {count_parameters(model)} | {machine.device} in {machine.reason} "
          f"| torch {torch.__version__}, numpy {np.__version__}, python {sys.version.split()[0]}")
    step = path and os.path.isfile(path) and (read_checkpoint(path).get("best") or {}).get("step")
    print("model " + json.dumps(asdict(configs[1])) + (f", from {path}" if path else "")
          + (f", best at step {step}" if step else ""))
    if c.init_from == "scratch" and c.model in BASES and (stopped := unfinished(path)):
        print(f"note: the run it goes on was stopped at step {stopped}, before its limit; --init_from names another")


def check_data(c, use, model, data):
    """UserError for data that the work, whatever it is, would stumble over later."""
    for split in ("test",) if only_uses(c) else ("train", "val", "test"):
        if not len(getattr(data, split)):
            names = (f"num_{split}", f"{split}_fraction", "tasks")
            flags = ", ".join(f"--{name}" for name in names if hasattr(data.config, name))
            raise UserError(f"the {split} split is empty, but it is needed; see {flags}")
    check_rows(c, model, data)
    use_options(c, use, data)  # an unknown --stop is told before the work


def train(configs, model, data, machine, folder, path):
    """Train in a run folder, then report. Returns the name of the signal that stopped it, or None."""
    c, ranks = configs[0], machine.ranks
    with user_errors(), ranks.first_goes_ahead():
        os.makedirs(folder, exist_ok=True)
    c.init_from = c.init_from if c.init_from == "resume" else path or "scratch"  # a checkpoint tells what it began as
    trainer = Trainer(configs, model, data, machine, folder, read_checkpoint(path) if c.init_from == "resume" else None)
    if trainer.step and trainer.finished():
        raise UserError(f"the run in {folder} has reached its limit at step {trainer.step}; raise --max_steps "
                        f"({c.max_steps}) or --time_limit ({c.time_limit:g}), or score it with --eval_only")
    print(f"run folder {folder}" + (f", going on at step {trainer.step}" if trainer.step else ""), flush=True)
    if stopped := trainer.train():
        print(f"{stopped}: saved at step {trainer.step}; go on with --model {c.model} --init_from resume --out_dir "
              f"{folder}")
        return stopped
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        trainer.report()
    except KeyboardInterrupt:
        print(f"stopped in the final evaluation; the run is saved, score it with --eval_only --out_dir {folder}")
        return "SIGINT"


def train_base(c, model_config, data_config):
    """Train the model that another goes on, by its preset. Returns the signal that stopped it, or None."""
    base = BASES[c.model]
    if "max_steps" not in RECIPES.get((base, c.preset), {}):  # too large to be trained by the way
        raise UserError(f"--preset {c.preset} goes on a trained {base}; name one with --init_from, a run or a Hugging "
                        "Face folder")
    fields = {"device": c.device, "dtype": c.dtype, "seed": c.seed} | asdict(data_config)
    fields |= {name: getattr(model_config, name) for name in MODELS[base][1].__dataclass_fields__}
    fields = {name: value for name, value in fields.items() if name not in RECIPES[c.model, c.preset]}
    print(f"--model {c.model} goes on a trained {base}, and there is no {c.preset} run of one under out (--init_from "
          f"names one elsewhere): training one first, for nano {MINUTES[base]} on two cores\n", flush=True)
    flags = (word for name, value in fields.items() for word in (f"--{name}", str(value)))
    return run(["--model", base, "--data", c.data, "--preset", c.preset, *flags])


def count_parameters(model):
    count, trained = (sum(p.numel() for p in model.parameters() if p.requires_grad or every) for every in (True, False))
    part = f", {trained:,} of them trained ({trained / count:.3%})" if trained < count else ""
    return f"{count:,} parameters{part}"


def build(configs, path, machine):
    """Data and model of a call, the model from `path` if there is one; fills what the data knows into configs[1]."""
    c, model_config, _, data_config = configs
    Model, load = MODELS[c.model][0], DATA[c.data][1]
    resumes = c.init_from == "resume" and not only_uses(c)
    with user_errors():
        with machine.ranks.first_goes_ahead():
            if path and not (resumes and weights_come_later(model_config)):
                in_one_file(path)
            data = load(data_config, prepare=not (c.solve or c.sample or c.export), saved=saved_data(path))
        if bool(data.tokenizer) == bool(c.solve) and (c.solve or c.sample):
            raise UserError(f"--data {c.data} cannot be {'solved' if c.solve else 'sampled'}; use "
                            f"--{'sample PROMPT' if c.solve else 'solve PUZZLE'}")
        if path:
            check_fit(model_config, data, path)
        else:
            model_config = dataclasses.replace(model_config, **data.model_args)
        path = None if resumes and weights_come_later(model_config) else path
        model = build_model(Model, model_config, path, machine.ranks, resumes)
    configs[1] = model.config
    return data, model


def weights_come_later(config):
    """Whether a run that is resumed restores all of its model; not the frozen base of a MoDr."""
    return not hasattr(config, "base")


def build_model(Model, config, path, ranks, resumes):
    """The model of a config, with weights from `path` if there is one; sharded, if FSDP is to."""
    from_folder = path and os.path.isdir(path)
    if ranks.mesh is not None and getattr(Model, "fill", None) and (from_folder or resumes):
        with torch.device("meta"):  # no process ever holds the whole
            model = ranks.shard(Model(config))
        if from_folder:
            model.fill(path)
        return model
    return ranks.spread(lambda: Model.load_pretrained(path, **asdict(config)) if path else Model(config))


def in_one_file(path):
    """The path of a checkpoint; what several processes have saved is put into one file first."""
    if os.path.isfile(path) and to_one_file(path):
        print(f"{path}: put what several processes had saved into one file")
    return path


def saved_data(path):
    """What a checkpoint kept of its data: a tokenizer, a chat template; None if it kept nothing."""
    if path and os.path.isdir(path):
        return {"tokenizer": huggingface_tokenizer(path).state(), "template": chat_template(path)}
    return read_checkpoint(path).get("data") if path else None


def score(c, use, model, data, machine, path):
    """The tables of the test split, also of other ways to use what was trained, and of the tokens that DND selects."""
    groups, depths = data.groups(), parse_depths(c.depths)
    scores = evaluate(model, data, "test", c, use, machine, depths)
    print_scores("test split", scores, groups)
    if hasattr(data, "vote"):
        folder = os.path.join(os.path.dirname(path), "votes")
        with user_errors():
            votes = arc_vote.evaluate_votes(model, data, c.eval_batch_size, machine.autocast, depths[-1], folder)
        print("\n".join([f"votes over up to {data.config.arc_augments:,} variants, in {folder}",
                         *arc_vote.score_lines(votes)]))
    if hasattr(model, "variants"):
        name = next(iter(scores[depths[-1]]))  # the one that counts
        columns = {"as it is": scores[depths[-1]][name]}
        for title in model.variants():
            columns[title] = evaluate(model, data, "test", c, use, machine, depths[-1:])[depths[-1]][name]
        everything = {"all": [np.ones(len(data.test), bool)]}
        print_table(f"{name} at depth {depths[-1]}, by what is used", columns, groups | everything)
    if getattr(model.config, "nested", ()):
        batches = (to_device(batch, machine.device) for batch in data.eval_batches("test", c.eval_batch_size))
        with user_errors():
            base = model_before(c, path, machine)
            selection.print_selection(model.eval(), data, batches, machine.autocast, base, c.plot)


def analyse(c, model, data, machine):
    """The table, and with --plot the figure, of one analysis of a trained model."""
    def batches():
        return (to_device(batch, machine.device) for batch in data.eval_batches("test", c.eval_batch_size))

    with user_errors():
        path = os.path.join(c.baseline, "best.pt") if os.path.isdir(c.baseline) else c.baseline
        if path and not os.path.isfile(path):
            raise UserError(f"--baseline {c.baseline}: no such checkpoint; name a run's folder, or its best.pt")
        baseline = type(model).load_pretrained(in_one_file(path)).to(machine.device).eval() if path else None
        thinking.print_analysis(c.analysis, model.eval(), data, batches, machine.autocast, parse_depths(c.depths),
                                baseline, c.plot)


def compare(argv, c, model_config):
    """Train the networks that a study compares, as far as they are not trained yet, and print its table.

    Each is a run of this script with the flags of the call, in a folder of its own. Returns the signal that stopped one
    of them, or None.
    """
    folder = c.out_dir or os.path.join("out", f"{c.model}-{c.data}-{c.analysis}")
    if os.path.exists(os.path.join(folder, "last.pt")):
        raise UserError(f"--out_dir {folder} is the folder of a run; name another, for --analysis {c.analysis} to fill")
    results, networks = [], study.variants(c.analysis, model_config)
    for i, (name, fields) in enumerate(networks.items()):
        run_folder = os.path.join(folder, name)
        last = os.path.join(run_folder, "last.pt")
        flags = ["--time_limit", "-1", *argv, "--analysis", "", "--plot", "", "--out_dir", run_folder]  # equal steps
        flags += [word for field, value in fields.items() for word in (f"--{field}", str(value))]
        if os.path.exists(last):
            check_same(last, *parse(flags)[:-1])
        if not os.path.exists(last) or unfinished(last):
            print(f"\n{name}, network {i + 1} of {len(networks)}, in {run_folder}\n", flush=True)
            forget_unsaved(run_folder)
            how = "resume" if os.path.exists(last) else "scratch"
            if stopped := run([*flags, "--init_from", how]):
                print("to go on with all networks, give the same command again")
                return stopped
        *configs, path = parse([*flags, "--eval_only"])
        machine = Machine.of(configs[0], alone=only_uses(configs[0]))
        data, model = build(configs, path, machine)
        scores = evaluate(model, data, "test", configs[0], configs[2], machine, parse_depths(configs[0].depths))
        results.append(study.Result(name, sum(p.numel() for p in model.parameters()), model.config.depth, scores))
    study.print_study(results, c.plot)


def forget_unsaved(folder):
    """Remove what a run leaves that was killed before it saved anything: its log."""
    if os.environ.get("RANK", "0") == "0" and os.path.isdir(folder) and os.listdir(folder) == ["log.jsonl"]:
        os.remove(os.path.join(folder, "log.jsonl"))


def check_same(last, *configs):
    """UserError if a run was trained with other flags than those of this call."""
    saved = read_checkpoint(last)
    for name, config in zip(("config", "model_config", "use_config", "data_config"), configs):
        for field, value in asdict(config).items():
            if field not in (*OF_THIS_CALL, *OF_THE_DATA, "data_dir") and saved[name].get(field) != value:
                raise UserError(f"{last} was trained with --{field} {saved[name].get(field)}, not {value}; give that, "
                                "or another folder with --out_dir")


def model_before(c, path, machine):
    """What a run went on from, by its checkpoint; None if that is gone, or for published weights, which are no run."""
    before = read_checkpoint(path)["config"].get("init_from", "") if os.path.isfile(path) else ""
    if not os.path.exists(before):
        return None
    return MODELS[c.model][0].load_pretrained(in_one_file(before)).to(machine.device)


def export(configs, model, data):
    """Write the weights of a checkpoint as a file; of a MoDr, one branch as a checkpoint of the model it goes on."""
    c = configs[0]
    if os.path.exists(c.export):
        raise UserError(f"--export {c.export} exists; name a new file")
    with user_errors():
        merges = hasattr(model, "merged")
        plain = model.merged(0 if model.config.num_branches == 1 else model.config.branch) if merges else model
        name = BASES[c.model] if merges else c.model
        content = {name: asdict(config) for name, config in zip(("config", "use_config", "data_config"),
                                                                (c, configs[2], configs[3]))}
        content["config"] |= {"model": name}
        content |= {"model_config": asdict(plain.config), "model": plain.state_dict(), "data": data.state()}
        with atomic_write(c.export) as file:
            torch.save(content, file)
    print(f"wrote {c.export}, {count_parameters(plain)}; use it with --model {name} --init_from {c.export}")


def solve(c, use, model, data, machine):
    with user_errors():
        inputs = data.parse(c.solve)
    for puzzle in inputs:
        if problem := data.problem(puzzle):
            print(f"note: {problem}")
        show_thinking(model, data, puzzle[None], None, parse_depths(c.depths)[-1], use.act_eval, machine.autocast)


def write(c, use, model, data, machine, prompt):
    """Write on from a prompt, and say what it took."""
    started, options = time.monotonic(), use_options(c, use, data)
    with user_errors():
        ids = data.encode(prompt)
        written, steps = write_text(model.eval(), data.tokenizer, prompt, options, machine.autocast, ids)
    speed = len(steps) / (time.monotonic() - started)
    with machine.autocast():
        size = model.cache_size(len(ids), **options) / 2**20
    print(f"{len(steps)} tokens, {steps.mean():.1f} {model.unit} each, {speed:,.0f} tokens/s, cache {size:.1f} MiB\n")
    if getattr(model.config, "nested", ()) and use.depth == 2:
        selection.show_selected(model, data.tokenizer, (ids + written)[:model.config.block_size], machine.autocast)


def main(argv=None):
    """Exit code 0, or 2 after a one-line message for a mistake of the user's."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv:
        print(USAGE)
        return 0
    try:
        run(argv)
        sys.stdout.flush()
        return 0
    except UserError as error:
        message = str(error)
    except (torch.OutOfMemoryError, RuntimeError) as error:
        if not isinstance(error, torch.OutOfMemoryError) and "can't allocate memory" not in str(error):
            raise
        message = (f"out of memory: {str(error).splitlines()[0][:150]}; try half the --batch_size, or --grad_accum 2 "
                   "(4, 8)")
    except KeyboardInterrupt:
        message = "interrupted"
    except BrokenPipeError:  # `| head`: whoever read the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    print(f"train.py: error: {message}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    exit_code = main()
    Ranks.leave()
    sys.exit(exit_code)
