"""The machine that a run computes on: device, dtype, other processes; random states; signals.

    machine = Machine.of(config)                # of train.py's TrainConfig
    with machine.autocast():
        model(to_device(batch, machine.device))
"""

import contextlib
import ctypes
import os
import random
import signal
import sys
from dataclasses import dataclass

import numpy as np
import torch

from data.common import UserError
from data.ranks import Ranks


@dataclass
class Machine:
    """Where and in what precision the run computes."""

    device: torch.device
    dtype: torch.dtype
    reason: str  # the dtype in words
    ranks: Ranks

    @classmethod
    def of(cls, c, alone=False):
        """The machine that a TrainConfig asks for; joins the other processes, if torchrun started any, unless alone."""
        device = pick_device(c.device)
        several = int(os.environ.get("WORLD_SIZE", 1)) > 1 and not alone
        if (c.offload or several) and device.type not in ("cpu", "cuda"):
            raise UserError(f"--device {device.type}: several processes, or --offload, take cuda or cpu; name one")
        if several and c.device.startswith("cuda:"):
            raise UserError(f"--device {c.device}: would be the card of all processes; give cuda, for one each")
        if c.parallel == "fsdp" and not (several or c.offload or alone):
            print("note: --parallel fsdp has nothing to share in one process; start several with torchrun, or give "
                  "--offload")
        dtype, reason = pick_dtype(c.dtype, device)
        ranks = Ranks.join(device, dtype, c.rank_timeout, c.parallel, c.offload, alone)
        parts = parts_of(c, ranks)
        if c.batch_size % (ranks.size * parts):
            raise UserError(f"--batch_size {c.batch_size} on {ranks.size} processes, each in {parts} parts "
                            f"(--grad_accum): give a multiple of {ranks.size * parts}, or other numbers of these")
        if ranks.rank:  # the first one speaks
            sys.stdout = open(os.devnull, "w")
        return cls(device, dtype, reason, ranks)

    def autocast(self):
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)


def parts_of(c, ranks):
    """Parts that each process computes its rows in: as many as asked for, as long as there is a row for each."""
    return max(1, min(c.grad_accum, c.batch_size // ranks.size))


def device_name(name):
    """The device that a flag means; under torchrun, of several cards the one of this process."""
    if name in ("auto", "cuda") and torch.cuda.is_available() and "LOCAL_RANK" in os.environ:
        return f"cuda:{os.environ['LOCAL_RANK']}"
    if name != "auto":
        return name
    return "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"


def pick_device(name):
    """The torch.device that `auto` or a name means, tried out; UserError if it cannot be used."""
    name = device_name(name)
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0][:100]
        raise UserError(f"--device {name}: {reason}; use cpu, cuda, cuda:N, mps or auto") from None
    return device


def pick_dtype(name, device):
    """(dtype of the forward pass, the reason in words): bfloat16 where the hardware multiplies it natively."""
    if device.type == "cuda" and name in ("auto", "bfloat16"):
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return torch.bfloat16, "bfloat16"
        return torch.float16, "float16 with loss scaling, since this card has no bfloat16"
    if name != "auto":
        return getattr(torch, name), name
    can = torch.cpu.get_capabilities()
    if device.type == "cpu" and (can.get("avx512_bf16") or can.get("amx_bf16") or can.get("bf16")):
        return torch.bfloat16, "bfloat16, which this CPU multiplies natively"
    return torch.float32, "float32"


def keep_freed_memory():
    """Have glibc keep freed blocks: by default every large tensor on a CPU is mapped, cleared and unmapped anew."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # not every Linux has glibc; this only makes it faster
            libc = ctypes.CDLL("libc.so.6")
            libc.mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD
            libc.mallopt(-1, (1 << 31) - 1)  # M_TRIM_THRESHOLD


def to_device(value, device):
    """A tensor, an array or a dict of them -> tensors on the device."""
    if isinstance(value, dict):
        return {name: to_device(v, device) for name, v in value.items()}
    return torch.as_tensor(value).to(device)


def rng_state():
    kind, keys, *rest = np.random.get_state()
    state = {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": (kind, keys.tolist(), *rest)}
    return state | ({"cuda": torch.cuda.get_rng_state_all()} if torch.cuda.is_available() else {})


def set_rng_state(state):
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])


class StopSignal:
    """SIGINT and SIGTERM ask the loop to finish its step, save and end; a second one ends it at once."""

    def __init__(self):
        self.name = None
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.receive)

    def receive(self, number, frame):
        if self.name:
            raise KeyboardInterrupt
        self.name = signal.Signals(number).name
