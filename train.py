"""Train, evaluate and use every model of this project: one script, flags only.

    python train.py --model hrm --data sudoku                                a small HRM on 6x6 Sudoku, minutes on a laptop
    python train.py --model hrm --data sudoku --preset nano-9x9              9x9 boards, half an hour on two cores
    python train.py --model hrm --data sudoku --preset paper                 the paper's 27M model on extreme puzzles (CUDA)
    python train.py --model hrm --data sudoku --init_from resume             go on where the newest run stopped
    python train.py --model hrm --data sudoku --eval_only                    score the newest run on its test split
    python train.py --model hrm --data sudoku --solve 'PUZZLE or FILE'       solve a puzzle with the newest run

Flags are the fields of three dataclasses (TrainConfig here, the model's config, the data's config), in that order of help.
A value comes from the first of these that names it: the command line, the checkpoint (when a run is resumed, evaluated or
used), the preset, the dataclass. `--model hrm --data sudoku --help` shows the values in force.

The loop knows a model through one contract, the same for all of them:
    Model(config)                                build
    model.step(batch, carry)                     -> loss (scalar), metrics: name -> (total, count), carry
    model.configure_optimizers(lr, weight_decay, betas) -> list of optimizers
    model.evaluate(batches, depths)              -> depth -> name -> (N,) scores; the first name selects the best checkpoint
    Model.load_pretrained(path, **overrides)     published weights or a checkpoint of this script
and data through: load(config) -> summary(), model_args, train_batch(index, batch_size, seed), eval_batches(split, batch_size).
A train batch is a pure function of its index, so the data position of a run is its step number.
"""

import argparse
import contextlib
import ctypes
import dataclasses
import difflib
import glob
import inspect
import json
import math
import os
import pickle
import random
import re
import signal
import sys
import time
from dataclasses import dataclass
from typing import Literal, get_args, get_origin

import numpy as np
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from tqdm import tqdm

import hrm
from data import sudoku
from data.common import atomic_write


@dataclass
class TrainConfig:
    # what to run
    model: Literal["hrm"] = "hrm"  # the method
    data: Literal["sudoku"] = "sudoku"  # the task
    preset: str = ""  # named sizes and recipe of the model; "" = the one for this device
    init_from: str = "scratch"  # scratch, resume (go on with a run), or the path of a checkpoint to start from
    out_dir: str = ""  # folder of the run; "" = out/MODEL-DATA, numbered if taken
    eval_only: bool = False  # score a checkpoint on the test split and stop
    solve: str = ""  # a puzzle, or a file of puzzles, to solve with a checkpoint
    # machine
    device: str = "auto"  # auto, cpu, cuda, cuda:N or mps
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # of the forward pass; weights stay float32
    compile: bool = False  # torch.compile the blocks; takes a minute at the start and needs a C++ compiler on a CPU
    seed: int = 0  # weights, data order, exploration
    # optimization
    max_steps: int = -1  # optimizer steps; -1 = no limit
    time_limit: float = -1  # minutes of training, evaluations included; -1 = no limit
    batch_size: int = 64  # puzzles per step
    lr: float = 1e-3  # learning rate
    warmup_steps: int = 100  # steps of linear warm-up, after which lr is constant; 0 = none
    decay_steps: int = -1  # steps at which lr has fallen (cosine) to a tenth; -1 = constant
    weight_decay: float = 0.1  # decoupled, scaled by lr
    beta1: float = 0.9  # decay of the first moment
    beta2: float = 0.95  # decay of the second moment
    grad_clip: float = -1  # largest gradient norm; -1 = no clipping (Adam-atan2 is bounded anyway)
    ema: float = 0.0  # decay of the averaged weights that are evaluated; 0 = evaluate the raw ones
    # evaluation
    eval_interval: int = 500  # steps between validations, each of which also saves; -1 = only at the end
    eval_batch_size: int = 256  # puzzles at once in evaluation
    depths: str = "1,2,4,8,16"  # test depths of the last table; the checkpoint is selected at the deepest
    act_eval: bool = False  # let the model stop early in evaluation and with --solve


# model name -> class, config class, presets; data name -> config class, loader
MODELS = {"hrm": (hrm.HRM, hrm.HRMConfig, hrm.PRESETS)}
DATA = {"sudoku": (sudoku.SudokuConfig, sudoku.load)}
USES = {"hrm": ("sudoku",)}  # which data a model can learn from

# What a preset sets beside the model: training and data fields, by (model, preset).
RECIPES = {
    ("hrm", "nano"): dict(box="2x3", clues=14, max_steps=4000, time_limit=5),
    ("hrm", "nano-9x9"): dict(box="3x3", clues=40, max_steps=20000, time_limit=30),
    ("hrm", "paper"): dict(box="3x3", source="extreme-1k", batch_size=384, lr=7e-5, weight_decay=1.0, warmup_steps=2000,
                           max_steps=52000, eval_interval=2000),
}


# fields that belong to one call of the script, not to the run that a checkpoint saves
OF_THIS_CALL = ("init_from", "out_dir", "eval_only", "solve", "device", "dtype", "compile", "act_eval")


class UserError(Exception):
    """A mistake of the user's, told in one line; the exit code is 2."""


# ---- flags


def help_texts(config_class):
    """Field name -> the comment at the end of its line."""
    return dict(re.findall(r"^\s+(\w+):.*?#\s*(.*)$", inspect.getsource(config_class), flags=re.MULTILINE))


def boolean(text):
    if text.lower() not in ("true", "false", "1", "0", "yes", "no"):
        raise argparse.ArgumentTypeError(f"'{text}' is not true or false")
    return text.lower() in ("true", "1", "yes")


class Parser(argparse.ArgumentParser):
    """argparse with one-line errors that name the nearest flag."""

    def error(self, message):
        raise UserError(message)

    def parse_args(self, argv):
        values, rest = self.parse_known_args(argv)
        if rest:
            flag = rest[0].split("=")[0]
            near = difflib.get_close_matches(flag.replace("-", "_").replace("__", "--", 1), self._option_string_actions, n=1)
            raise UserError(f"unknown flag or stray word '{flag}'" + (f"; did you mean {near[0]}?" if near else "; see --help"))
        return values


def add_flags(parser, config_class, defaults):
    """A flag for every field of a dataclass, with the value in force as its default."""
    group, texts = parser.add_argument_group(config_class.__name__), help_texts(config_class)
    for field in dataclasses.fields(config_class):
        kind = {"default": defaults.get(field.name, field.default), "type": field.type}
        if get_origin(field.type) is Literal:
            kind |= {"choices": get_args(field.type), "type": str}
        elif field.type is bool:
            kind |= {"type": boolean, "nargs": "?", "const": True}
        text = texts.get(field.name, "").replace("%", "%%")
        group.add_argument(f"--{field.name}", help=f"{text} (now: %(default)s)", metavar=kind["type"].__name__.upper(), **kind)


def parse(argv):
    """Command line -> (TrainConfig, model config, data config, path of the checkpoint to start from or None)."""
    first = Parser(add_help=False, allow_abbrev=False)  # what decides about the defaults of the rest
    add_flags(first, TrainConfig, {})
    known, _ = first.parse_known_args([a for a in argv if a not in ("-h", "--help")])
    if known.data not in USES[known.model]:
        raise UserError(f"--model {known.model} cannot use --data {known.data}; it can use: {', '.join(USES[known.model])}")
    model_class, model_config, presets = MODELS[known.model]
    data_config, _ = DATA[known.data]

    path, saved = checkpoint_path(known), {}
    if path:
        saved = read_checkpoint(path)
        check_saved(saved, known, path)
    preset = known.preset or saved.get("config", {}).get("preset") or default_preset(known.device, presets)
    if preset not in presets:
        raise UserError(f"--preset {preset}: {known.model} has {', '.join(presets)}; choose one of these")
    defaults = dataclasses.asdict(presets[preset]) | RECIPES.get((known.model, preset), {}) | {"preset": preset}
    if path:
        with user_errors():
            defaults |= model_class.pretrained_config(path) | saved.get("data_config", {})
        # a run that goes on, or is only read, is as it was; a new one from old weights takes the preset's recipe
        if known.init_from == "resume" or known.eval_only or known.solve:
            defaults |= {k: v for k, v in saved.get("config", {}).items() if k not in OF_THIS_CALL}

    parser = Parser(description=__doc__.split("\n\n")[0], allow_abbrev=False, usage="train.py --model MODEL --data DATA [flags]")
    for config_class in (TrainConfig, model_config, data_config):
        add_flags(parser, config_class, defaults)
    values = vars(parser.parse_args(argv))
    configs = [c(**{f.name: values[f.name] for f in dataclasses.fields(c)}) for c in (TrainConfig, model_config, data_config)]
    return *configs, path


# ---- runs and checkpoints


def run_folders(model, data):
    """Folders under out/ that hold a run of this model and data, oldest first."""
    found = [os.path.dirname(p) for p in glob.glob(os.path.join("out", "*", "last.pt"))]
    kept = [f for f in found if re.fullmatch(rf"{model}-{data}(-\d+)?", os.path.basename(f))]
    return sorted(kept, key=lambda f: os.path.getmtime(os.path.join(f, "last.pt")))


def checkpoint_path(known):
    """The file that --init_from, --out_dir, --eval_only and --solve mean together; None for a run from scratch."""
    if known.init_from not in ("scratch", "resume"):
        return known.init_from
    reads = known.eval_only or known.solve
    if known.init_from == "scratch" and not reads:
        return None
    folders = [known.out_dir] if known.out_dir else run_folders(known.model, known.data)
    if not folders:
        raise UserError(f"no run of {known.model} on {known.data} under out/; train one first, or name a checkpoint with --init_from")
    names = ("best.pt", "last.pt") if reads else ("last.pt",)
    paths = [os.path.join(folders[-1], name) for name in names if os.path.exists(os.path.join(folders[-1], name))]
    if not paths:
        raise UserError(f"{folders[-1]}: no {' or '.join(names)} in it; name the folder of a run with --out_dir")
    return paths[0]


def new_folder(config):
    """The folder of a new run: out/MODEL-DATA or its next free sibling; --out_dir must be empty."""
    if config.out_dir:
        if os.path.isdir(config.out_dir) and os.listdir(config.out_dir):
            raise UserError(f"--out_dir {config.out_dir} is not empty; add --init_from resume to go on with its run, or name another")
        return config.out_dir
    folder, n = os.path.join("out", f"{config.model}-{config.data}"), 1
    while os.path.isdir(folder) and os.listdir(folder):
        n += 1
        folder = os.path.join("out", f"{config.model}-{config.data}-{n}")
    if n > 1:
        print(f"out/{config.model}-{config.data} holds a run already; this one goes to {folder}")
    return folder


def read_checkpoint(path):
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, pickle.UnpicklingError, OSError, ValueError, KeyError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"{path}: not a readable checkpoint ({reason[:100]}); give a file that train.py wrote") from None


def check_saved(saved, known, path):
    """A checkpoint of another model, or of weights alone where more is needed, is an error now rather than later."""
    if known.init_from == "resume" and "optimizers" not in saved:
        raise UserError(f"{path} holds weights only, which cannot be resumed; start a new run from them with --init_from {path}")
    for name in ("model", "data"):
        theirs = saved.get("config", {}).get(name, getattr(known, name))
        if theirs != getattr(known, name) and (name == "model" or known.init_from == "resume"):
            raise UserError(f"{path} is a run of --{name} {theirs}, not {getattr(known, name)}; give --{name} {theirs}")


def save(path, content):
    with atomic_write(path) as file:  # a temporary name, synced, renamed: a killed run leaves the old file or the new one
        torch.save(content, file)


class Log:
    """log.jsonl of a run: one line per step, the same numbers as the bar, and one per evaluation."""

    def __init__(self, folder, step):
        self.path = os.path.join(folder, "log.jsonl")
        lines = []
        if step and os.path.exists(self.path):
            with open(self.path, encoding="utf-8") as file:  # what was logged after the checkpoint is done again
                lines = [line for line in file if line.endswith("}\n") and json.loads(line)["step"] <= step]
        with atomic_write(self.path) as file:
            file.write("".join(lines).encode())

    def write(self, **values):
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(values) + "\n")


# ---- machine


def default_preset(device, presets):
    """A CPU or a Mac takes the first preset, a CUDA machine the last one that trains on a 24 GB card."""
    return list(presets)[-1] if pick_device(device).type == "cuda" else list(presets)[0]


def pick_device(name):
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"--device {name} cannot be used ({str(error).splitlines()[0]}); use cpu, cuda, cuda:N, mps or auto") from None
    return device


def pick_dtype(name, device):
    """The forward pass's dtype and why: bfloat16 where the hardware multiplies it natively."""
    if name != "auto":
        if name == "bfloat16" and device.type == "cuda" and not torch.cuda.is_bf16_supported():
            return torch.float16, "float16 with loss scaling, since this card has no bfloat16"
        return getattr(torch, name), name
    if device.type == "cuda":
        return pick_dtype("bfloat16", device)
    native = torch.cpu.get_capabilities().get("avx512_bf16") or torch.cpu.get_capabilities().get("amx_bf16")
    if device.type == "cpu" and native:
        return torch.bfloat16, "bfloat16, which this CPU multiplies natively"
    return torch.float32, "float32"


def keep_freed_memory():
    """Have glibc keep freed blocks: by default each large tensor on a CPU is mapped, cleared and unmapped again."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            libc = ctypes.CDLL("libc.so.6")
            libc.mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD
            libc.mallopt(-1, (1 << 31) - 1)  # M_TRIM_THRESHOLD


def rng_state():
    state = {"torch": torch.get_rng_state(), "python": random.getstate()}
    name, keys, *rest = np.random.get_state()
    state["numpy"] = [name, torch.from_numpy(keys.copy()), *rest]  # weights_only loading takes tensors, not arrays
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_rng_state(state):
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy(), *rest))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])


class StopSignal:
    """SIGINT and SIGTERM ask the loop to finish its step, save and end."""

    def __init__(self):
        self.name = None
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.receive)

    def receive(self, number, frame):
        if self.name:  # a second one means now
            raise KeyboardInterrupt
        self.name = signal.Signals(number).name


# ---- evaluation


def to_device(value, device):
    """A tensor, an array or a dict of them -> tensors on the device."""
    if isinstance(value, dict):
        return {name: to_device(v, device) for name, v in value.items()}
    return torch.as_tensor(value).to(device)


def batches(items, device):
    for batch in items:
        yield to_device(batch, device)


def evaluate(model, data, split, c, machine, depths=None):
    """Score a split at each depth -> depth -> name -> (N,) scores."""
    model.eval()
    with machine.autocast(), torch.no_grad():
        scores = model.evaluate(batches(data.eval_batches(split, c.eval_batch_size), machine.device), depths, c.act_eval)
    model.train()
    return scores


def parse_depths(text):
    try:
        depths = sorted({int(d) for d in text.split(",")})
    except ValueError:
        depths = [0]
    if depths[0] < 1:
        raise UserError(f"--depths {text}: give whole numbers from 1 up, separated by commas, as in 1,2,4,8,16")
    return depths


def print_scores(scores, groups=None, title=""):
    """A table: one row per depth and, if the split names a source for each puzzle, one row per source at the deepest."""
    names = list(next(iter(scores.values())))
    print(f"{title}\n  {'depth':>24} {'puzzles':>8}" + "".join(f"{name:>16}" for name in names))
    rows = [(str(depth), named, slice(None)) for depth, named in scores.items()]
    if groups is not None:
        deepest = scores[max(scores)]
        rows += [(f"{max(scores)}, {g}"[:24], deepest, torch.from_numpy(groups == g)) for g in sorted(set(groups))]
    for label, named, chosen in rows:
        values = [named[name][chosen] for name in names]
        print(f"  {label:>24} {len(values[0]):>8,}" + "".join(f"{v.mean().item():>16.4f}" for v in values))


def side_by_side(blocks, width=100):
    """Join multi-line blocks of text into rows of blocks, as many as fit in `width` columns."""
    plain = [max(len(re.sub(r"\033\[[0-9;]*m", "", line)) for line in block.splitlines()) for block in blocks]
    per_row = max(1, width // (max(plain) + 3))
    for start in range(0, len(blocks), per_row):
        yield "\n".join("   ".join(parts) for parts in zip(*(b.splitlines() for b in blocks[start : start + per_row])))


def show_thinking(model, data, inputs, c, machine, labels=None):
    """Draw each puzzle's answer after every segment that changed it, and the verdict on the last. inputs (B, T) integer."""
    color, depth = sys.stdout.isatty() and "NO_COLOR" not in os.environ, parse_depths(c.depths)[-1]
    model.eval()
    with machine.autocast():
        answer, segments, answers, p_halt = model.solve(torch.as_tensor(inputs).to(machine.device), depth, c.act_eval, trace=True)
    for i, puzzle in enumerate(inputs):
        path = [a[i].cpu().numpy() for a in answers[: segments[i]]]
        changed = [n for n in range(len(path)) if n == 0 or (path[n] != path[n - 1]).any()]
        label = None if labels is None else labels[i]
        blocks = [f"puzzle\n{data.draw(puzzle, puzzle, None, color)}"]
        blocks += [f"after segment {n + 1}\n{data.draw(puzzle, path[n], label, color)}" for n in changed]
        width = max(len(re.sub(r"\033\[[0-9;]*m", "", line)) for line in blocks[0].splitlines())
        for row in side_by_side([f"{b.splitlines()[0]:<{width}}\n" + "\n".join(b.splitlines()[1:]) for b in blocks]):
            print(row)
        print(f"{data.verdict(puzzle, path[-1])[1]}; {len(path)} segments, the last change in segment {changed[-1] + 1}, "
              f"halting confidence {p_halt[len(path) - 1, i]:.3f}\n")


# ---- training


@dataclass
class Machine:
    """Where and in what precision the run computes."""

    device: torch.device
    dtype: torch.dtype
    reason: str  # the dtype in words

    def autocast(self):
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)


def lr_factor(c, step):
    """Linear warm-up, then constant, or a cosine that reaches a tenth at decay_steps."""
    warm = min(1.0, (step + 1) / max(c.warmup_steps, 1))
    if c.decay_steps < 0:
        return warm
    return warm * (0.55 + 0.45 * math.cos(math.pi * min(step / max(c.decay_steps, 1), 1)))


def better(name, new, old):
    return old is None or (new > old if "accuracy" in name else new < old)


def clock(seconds):
    seconds = max(int(seconds), 0)
    return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}" if seconds >= 3600 else f"{seconds // 60}:{seconds % 60:02}"


class Trainer:
    """All that a run consists of, saved and restored together; `train` is the loop."""

    def __init__(self, configs, model, data, machine, folder, saved=None):
        self.configs, self.model, self.data, self.machine, self.folder = configs, model, data, machine, folder
        c = self.c = configs[0]
        self.optimizers = model.configure_optimizers(c.lr, c.weight_decay, (c.beta1, c.beta2))
        self.base_lr = [[group["lr"] for group in o.param_groups] for o in self.optimizers]
        self.averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(c.ema)) if c.ema else None
        self.scaler = torch.amp.GradScaler(machine.device.type, enabled=machine.dtype == torch.float16)
        self.step, self.elapsed, self.carry, self.best = 0, 0.0, None, None
        self.compiled = c.compile
        if c.compile:
            try:
                for part in model.parts_to_compile():
                    part.compile()
            except Exception as error:
                self.fall_back(error)
        if saved:
            self.restore(saved)
        self.evaluated = self.averaged.module if self.averaged else model  # the weights that count
        self.log = Log(folder, self.step)

    def restore(self, saved):
        self.model.load_state_dict(saved["model"])
        for optimizer, state in zip(self.optimizers, saved["optimizers"]):
            chosen = [{k: g[k] for k in ("betas", "weight_decay") if k in g} for g in optimizer.param_groups]
            optimizer.load_state_dict(state)
            for group, fresh in zip(optimizer.param_groups, chosen):
                group.update(fresh)  # a flag given now wins over the saved value
        if self.averaged and saved["ema"]:
            self.averaged.load_state_dict(saved["ema"])
        self.scaler.load_state_dict(saved["scaler"])
        self.step, self.elapsed, self.best = saved["step"], saved["elapsed"], saved["best"]
        if saved["carry"]:
            carry = {k: to_device(v, self.machine.device) for k, v in saved["carry"].items()}
            self.carry = self.model.Carry(**carry)
            rows = len(self.carry.halted)
            if rows != self.c.batch_size:
                raise UserError(f"--batch_size {self.c.batch_size}: this run was saved with {rows} puzzles in work; resume with that")
        set_rng_state(saved["rng"])

    def content(self):
        """The checkpoint of a run: everything that the next step depends on."""
        return {
            **self.config_content(), "model": self.model.state_dict(), "ema": self.averaged and self.averaged.state_dict(),
            "optimizers": [o.state_dict() for o in self.optimizers], "scaler": self.scaler.state_dict(),
            "carry": self.carry and vars(self.carry), "step": self.step, "elapsed": self.elapsed, "best": self.best,
            "rng": rng_state(),
        }

    def config_content(self):
        names = ("config", "model_config", "data_config")
        return {name: dataclasses.asdict(c) for name, c in zip(names, self.configs)}

    def save(self):
        save(os.path.join(self.folder, "last.pt"), self.content())

    def forward_backward(self, batch):
        with self.machine.autocast():
            loss, metrics, carry = self.model.step(batch, self.carry)
        self.scaler.scale(loss).backward()
        return metrics, carry

    def fall_back(self, error):
        """torch.compile is a speed-up: when it fails, say so and go on without it."""
        reason = (str(error).splitlines() or [""])[0][:200]
        tqdm.write(f"warning: --compile failed ({type(error).__name__}: {reason}); going on without it", file=sys.stderr)
        for module in self.model.modules():
            module._compiled_call_impl = None
        self.model.zero_grad()
        self.compiled = False

    def one_step(self):
        """Forward, backward, update. Returns the step's metrics: name -> (total, count), tensors."""
        c, machine = self.c, self.machine
        for optimizer, rates in zip(self.optimizers, self.base_lr):
            for group, lr in zip(optimizer.param_groups, rates):
                group["lr"] = lr * lr_factor(c, self.step)
        batch = to_device(self.data.train_batch(self.step, c.batch_size, c.seed), machine.device)
        try:
            metrics, self.carry = self.forward_backward(batch)
        except Exception as error:
            if not self.compiled:
                raise
            self.fall_back(error)
            metrics, self.carry = self.forward_backward(batch)
        self.compiled = False  # it has worked once: from here on an error is an error
        if c.grad_clip > 0:
            self.scaler.unscale_(self.optimizers[0])
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), c.grad_clip)
        for optimizer in self.optimizers:
            self.scaler.step(optimizer)
            optimizer.zero_grad()
        self.scaler.update()
        if self.averaged:
            self.averaged.update_parameters(self.model)
        self.step += 1
        return metrics

    def flush(self, pending):
        """Log the steps since the last flush; reading their tensors waits for the device, so not after every step."""
        for step, lr, metrics in pending:
            values = {name: float(total) / float(count) if float(count) else None for name, (total, count) in metrics.items()}
            if not math.isfinite(values["loss"]):
                kept = os.path.join(self.folder, "last.pt")
                where = f"the last good checkpoint is {kept}" if os.path.exists(kept) else "nothing was saved yet"
                raise UserError(f"loss is {values['loss']} at step {step}; {where}; try a lower --lr than {self.c.lr:g}")
            self.log.write(step=step, lr=lr, elapsed=round(self.elapsed, 2), **values)
        pending.clear()

    def validate(self):
        scores = evaluate(self.evaluated, self.data, "val", self.c, self.machine, [max(parse_depths(self.c.depths))])
        named = {name: values.mean().item() for name, values in next(iter(scores.values())).items()}
        name = next(iter(named))
        if better(name, named[name], self.best and self.best[name]):
            self.best = {"step": self.step, **named}
            weights = self.evaluated.state_dict()
            save(os.path.join(self.folder, "best.pt"), {**self.config_content(), "model": weights, "best": self.best})
        self.log.write(step=self.step, elapsed=round(self.elapsed, 2), **{f"val_{k}": v for k, v in named.items()})
        return named

    def time_left(self, started_at):
        c, limits = self.c, []
        if c.time_limit >= 0:
            limits.append(c.time_limit * 60 - self.elapsed)
        if c.max_steps >= 0 and self.step > started_at:
            limits.append((c.max_steps - self.step) * self.elapsed / self.step)  # evaluations so far are in `elapsed`
        return min(limits, default=math.inf)

    def finished(self):
        c = self.c
        return 0 <= c.max_steps <= self.step or 0 <= c.time_limit * 60 <= self.elapsed

    def train(self):
        """Steps until a limit or a signal. Returns the signal's name, or None."""
        c, stop, pending, sums = self.c, StopSignal(), [], {}
        started_at, clock_start = self.step, time.monotonic() - self.elapsed
        total = c.max_steps if c.max_steps >= 0 else None
        bar = tqdm(total=total, initial=self.step, unit="step", dynamic_ncols=True, bar_format="{n}/{total} {bar:10} {postfix}"
                   if total else "{n} {postfix}", mininterval=0.2 if sys.stderr.isatty() else 10)
        self.model.train()
        while not self.finished() and not stop.name:
            before = self.elapsed
            metrics = self.one_step()
            self.elapsed = time.monotonic() - clock_start
            pending.append((self.step, self.optimizers[0].param_groups[0]["lr"], metrics))
            if len(pending) == 10 or self.finished() or stop.name:
                for _, _, named in pending:  # averages that forget slowly, for the bar
                    for name, (value, count) in named.items():
                        old = sums.get(name, (0.0, 0.0))
                        sums[name] = (old[0] * 0.99 + float(value), old[1] * 0.99 + float(count))
                speed = sums[self.model.rate][0] / sums[self.model.rate][1] / max(self.elapsed - before, 1e-9)
                self.flush(pending)
                text = " | ".join(f"{n} {sums[n][0] / sums[n][1]:.4g}" for n in self.model.bar if sums[n][1])
                bar.set_postfix_str(f"{text} | {speed:,.0f} {self.model.rate}/s | {clock(self.time_left(started_at))} left", refresh=False)
            bar.update(1)
            if c.eval_interval > 0 and self.step % c.eval_interval == 0 and not self.finished():
                named = self.validate()
                self.elapsed = time.monotonic() - clock_start
                self.save()
                tqdm.write(f"step {self.step} | {clock(self.elapsed)} | " + " | ".join(f"val {k} {v:.4f}" for k, v in named.items()))
        self.flush(pending)
        if not stop.name:
            self.validate()
        self.save()
        bar.close()
        return stop.name


# ---- the script

USAGE = """train.py trains, evaluates and uses the models of this project. For example:
  python train.py --model hrm --data sudoku                      train a small HRM on 6x6 Sudoku, then show what it does
  python train.py --model hrm --data sudoku --preset nano-9x9    the same on 9x9 boards
  python train.py --model hrm --data sudoku --solve PUZZLE       solve a puzzle (digits and dots) with the newest run
  python train.py --model hrm --data sudoku --help               all flags and the values in force"""


@contextlib.contextmanager
def user_errors():
    """ValueErrors of the model and data modules are mistakes of the user's: one line each."""
    try:
        yield
    except ValueError as error:
        raise UserError(str(error)) from None


def describe(configs, model, data, machine, path):
    """The first lines of every run: what runs, on what, from what."""
    c, model_config, _ = configs
    count = sum(p.numel() for p in model.parameters())
    versions = f"torch {torch.__version__}, python {sys.version.split()[0]}, numpy {np.__version__}"
    print(f"{c.model} on {c.data}, preset {c.preset}, {count:,} parameters, {machine.device.type} in {machine.reason} ({versions})")
    print("model: " + json.dumps(dataclasses.asdict(model_config)))
    if path:
        print(f"from {path}")
    for line in data.summary():
        print(line)


def check_fit(model_config, args, path):
    """A checkpoint and the data must agree on tokens, cells and ids."""
    for name in ("vocab_size", "seq_len", "num_puzzle_identifiers"):
        ours = getattr(model_config, name, None)
        if name in args and ours != args[name]:
            raise UserError(f"{path} was trained with {name} {ours}, this data has {args[name]}; choose the data it was trained on "
                            "(for Sudoku see --box)")


def solve(c, model, data, machine):
    with user_errors():
        inputs = data.parse(c.solve)
    for row in inputs:
        problem = data.problem(row)
        if problem:
            print(problem)
        show_thinking(model, data, row[None], c, machine)


def report(trainer, Model):
    """Score the best and the last weights on the test split, once each, and show three test puzzles."""
    c, data, machine, depths = trainer.c, trainer.data, trainer.machine, parse_depths(trainer.c.depths)
    best = Model.load_pretrained(os.path.join(trainer.folder, "best.pt")).to(machine.device)
    kinds = [(f"best (step {trainer.best['step']})", best)]
    if trainer.best["step"] != trainer.step:
        kinds.append((f"last (step {trainer.step})", trainer.evaluated))
    for title, model in kinds:
        scores = evaluate(model, data, "test", c, machine, depths)
        print_scores(scores, data.test.source, f"test, {title}:")
        named = {f"test_{name}": values.mean().item() for name, values in scores[depths[-1]].items()}
        trainer.log.write(step=trainer.step, weights=title, **named)
    batch = next(iter(data.eval_batches("test", 3)))
    show_thinking(best, data, batch["inputs"], c, machine, batch["labels"])
    peak = f", peak GPU memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB" if machine.device.type == "cuda" else ""
    print(f"{trainer.step} steps in {clock(trainer.elapsed)}{peak}; the run is in {trainer.folder}")


def run(argv):
    c, model_config, data_config, path = parse(argv)
    configs = [c, model_config, data_config]
    Model, load = MODELS[c.model][0], DATA[c.data][1]
    device = pick_device(c.device)
    machine = Machine(device, *pick_dtype(c.dtype, device))
    keep_freed_memory()
    torch.manual_seed(c.seed)
    random.seed(c.seed)
    np.random.seed(c.seed)
    reads = bool(c.eval_only or c.solve)
    folder = None if reads else os.path.dirname(path) if c.init_from == "resume" else new_folder(c)
    parse_depths(c.depths)
    with user_errors():
        data = load(data_config)
        if path:
            check_fit(model_config, data.model_args, path)
            model = Model.load_pretrained(path, **dataclasses.asdict(model_config))
        else:
            configs[1] = dataclasses.replace(model_config, **data.model_args)
            model = Model(configs[1])
    model.to(device)
    describe(configs, model, data, machine, path)
    if c.solve:
        return solve(c, model, data, machine)
    if c.eval_only:
        scores = evaluate(model, data, "test", c, machine, parse_depths(c.depths))
        return print_scores(scores, data.test.source, "test:")
    trainer = Trainer(configs, model, data, machine, folder, read_checkpoint(path) if c.init_from == "resume" else None)
    print(f"run folder {folder}" + (f", going on at step {trainer.step}" if trainer.step else ""))
    stopped = trainer.train()
    if stopped:
        print(f"{stopped}: saved at step {trainer.step} in {folder}; go on with --init_from resume --out_dir {folder}")
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        report(trainer, Model)
    except KeyboardInterrupt:
        print(f"stopped during the final evaluation; the run is saved in {folder}, score it with --eval_only --out_dir {folder}")


def main(argv=None):
    """Exit code: 0, or 2 after a one-line message for a mistake of the user's."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv:
        print(USAGE)
        return 0
    try:
        run(argv)
    except UserError as error:
        print(f"train.py: error: {error}", file=sys.stderr)
        return 2
    except torch.OutOfMemoryError as error:
        print(f"train.py: error: out of memory ({str(error).splitlines()[0]}); try half the --batch_size", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted before anything was trained", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
