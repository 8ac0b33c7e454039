"""What a step of a model holds and multiplies, watched without holding it: on tensors that have no bytes.

    watched = watch_some(Model, config, rows, tokens, torch.float16)   # seconds, also for a model of 30 billion weights
    watched.activations, watched.copies, watched.flops                 # bytes at the worst moment; of matrix products

The model's own step, backward pass and optimizer run on torch's fake tensors (FakeTensorMode), which have shapes,
dtypes and storages but no contents, while `Ledger` adds up the storages that are alive. It counts true tensors on a CPU
in the same way; tests/test_budget.py compares the two. Temporaries within one operation are not seen.

Float16 is to stand in for a GPU's bfloat16: on a CPU, which fake tensors are said to be on, the models have ways of
their own for the latter. All tokens are taken to be scored, and in DND to be selected, as in the second step, when all
scores are still equal. A Huginn is watched with mean_backprop_depth steps with gradient, and one without.
"""

import dataclasses
import functools
import math
import types
import warnings
import weakref
from dataclasses import dataclass

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from kernels import unpack_fuse

FEW = 8  # layers, up to which all of them are watched
aten = torch.ops.aten
UNKNOWN = (aten._local_scalar_dense.default, aten.index.Tensor, aten._grouped_mm.default)  # see Ledger.answer
FLOPS = flop_registry | {  # of the attention that a CPU has, and a GPU has under another name
    aten._scaled_dot_product_flash_attention_for_cpu:
        lambda q, k, v, *_, **__: sdpa_flop_count(q.shape, k.shape, v.shape),
    aten._scaled_dot_product_flash_attention_for_cpu_backward:
        lambda g, q, k, v, *_, **__: sdpa_backward_flop_count(g.shape, q.shape, k.shape, v.shape)}


# ---- watching


class Ledger(TorchDispatchMode):
    """Counts the bytes of storages that operations make, while they live, and the FLOPs of matrix products.

    own: tensors that do not count. weights: of those, whose casts are told apart as copies. With fake tensors, numbers
    that only data could tell are 0 or False, and a mask in brackets selects everything.
    """

    def __init__(self, own=(), weights=()):
        super().__init__()
        self.own, self.weights = ({t.untyped_storage()._cdata for t in tensors} for tensors in (own, weights))
        self.alive, self.flops = {}, 0  # address of a storage -> (weak reference, bytes, whether it is a copy)
        self.now = self.peak = (0, 0)  # bytes of activations, of copies
        self.alone = 0  # the most bytes of activations, whatever the copies

    def __torch_dispatch__(self, func, _, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:  # most calls are this one
            return func(*args, **kwargs)
        out = self.answer(func, args, kwargs) if func in UNKNOWN and isinstance(args[0], FakeTensor) else None
        out = func(*args, **kwargs) if out is None else out
        is_copy = func is aten._to_copy.default and args[0].untyped_storage()._cdata in self.weights
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided:
                self.enter(tensor.untyped_storage(), is_copy)
        if func._overloadpacket in FLOPS:
            self.flops += FLOPS[func._overloadpacket](*args, **kwargs, out_val=out)
        return out

    def answer(self, func, args, kwargs):
        """What fake tensors cannot tell, by shapes; None: they can."""
        if func is aten._local_scalar_dense.default:
            return False if args[0].dtype is torch.bool else 0
        if func is aten.index.Tensor and args[1][0] is not None and args[1][0].dtype is torch.bool:
            everything = [torch.zeros(args[1][0].numel(), dtype=torch.long) for _ in args[1][0].shape]
            return func(args[0], everything + list(args[1][1:]))
        if func is aten._grouped_mm.default:  # torch tells its shape in bfloat16 only
            (a, b), ends = args[:2], args[2] if len(args) > 2 else kwargs["offs"]
            return a.new_empty(len(a), b.shape[-1]) if b.ndim == 3 else a.new_empty(len(ends), len(a), b.shape[-1])

    def enter(self, storage, is_copy):
        key, size = storage._cdata, storage.nbytes()
        if key not in self.own and key not in self.alive:
            self.alive[key] = weakref.ref(storage, functools.partial(self.leave, key)), size, is_copy
            self.add(size, is_copy)
            self.peak, self.alone = max(self.peak, self.now, key=sum), max(self.alone, self.now[0])

    def leave(self, key, _):
        _, size, is_copy = self.alive.pop(key)
        self.add(-size, is_copy)

    def add(self, size, is_copy):
        self.now = self.now[0] + size * (not is_copy), self.now[1] + size * is_copy


@dataclass
class Watched:
    """Bytes of one part's forward and backward pass."""

    forward: float  # activations at the worst moment of the forward pass
    forward_copies: float  # then, of weights that were cast
    backward: float  # the same of the backward pass
    backward_copies: float
    alone: float  # of activations at their own worst moment
    held: float  # of both, between the forward and the backward pass
    flops: float  # of the matrix products

    @property
    def worst(self):
        """(activations, copies) at the worst moment of all."""
        return max((self.forward, self.forward_copies), (self.backward, self.backward_copies), key=sum)

    @property
    def activations(self):
        return self.worst[0]

    @property
    def copies(self):
        return self.worst[1]


def watch(model, batch, dtype, carry=None):
    """Run a step and its backward pass, gradients being there already as with grad_accum -> Watched.

    model, batch, carry: of fake tensors, or of true ones on a CPU. dtype: of autocast; float32 = none.
    """
    for p in model.parameters():
        p.grad = torch.zeros_like(p) if p.requires_grad else None
    weights = list(model.parameters())
    own = [*weights, *model.buffers(), *batch.values(), *(p.grad for p in weights if p.grad is not None)]
    own += [t for t in tree_leaves(vars(carry)) if isinstance(t, torch.Tensor)] if carry else []
    with Ledger(own, weights) as ledger:
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            loss, _, carry = model.step(batch, carry)
        held, forward, ledger.peak = sum(ledger.now), ledger.peak, ledger.now
        loss.backward()
    return Watched(*forward, *ledger.peak, ledger.alone, held, ledger.flops)


def watch_optimizers(model):
    """Gradients must be there -> bytes of the optimizers' states after a step, and of the most it holds beside."""
    own = [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters() if p.grad is not None)]
    optimizers = model.configure_optimizers(1e-3, 0.1, (0.9, 0.95))
    with Ledger(own) as ledger:
        for optimizer in optimizers:
            optimizer.step()
    tensors = [t for o in optimizers for s in o.state.values() for t in s.values() if isinstance(t, torch.Tensor)]
    states = sum(t.nbytes for t in tensors)
    return states, sum(ledger.peak) - states


# ---- the models, of fake tensors


def build(Model, config):
    """A model in training; call it within FakeTensorMode. Of a frozen base the weights are in base_dtype."""
    with Ledger():
        model = Model(config)
    if getattr(config, "base_dtype", "float32") == "bfloat16":
        for name, parameter in model.named_parameters():
            if name in model.frozen:
                parameter.data = parameter.data.bfloat16()
    if hasattr(config, "mean_recurrence"):
        steps = math.inf if config.random_recurrence else config.mean_recurrence
        with_grad = min(steps, config.mean_backprop_depth)
        model.split_steps = lambda _=None: (int(steps > with_grad), with_grad)  # without: more would hold no more
    if getattr(config, "nested", ()):
        model.nested_pass = types.MethodType(nested_pass, model)
    return model.train()


def nested_pass(self, layer, j, x_v, p, selected, *_):
    """As DND's, with all tokens selected, but without a look at which these are."""
    B, T, C = x_v.shape
    x_d = layer(x_v.clone(), self.rotary(torch.arange(T).expand(B, T)))
    return unpack_fuse(x_v, x_d.view(B * T, C), p, self.nesting.beta[j], selected)


def batch_of(config, rows, tokens):
    inputs = torch.zeros(rows, tokens, dtype=torch.long)
    batch = dict(inputs=inputs, labels=torch.zeros_like(inputs))
    return batch | (dict(puzzle_identifiers=inputs[:, 0].clone()) if hasattr(config, "halt_max_steps") else {})


def watch_fake(Model, config, rows, tokens, dtype):
    """Watched, of a step on `rows` rows of as many tokens."""
    with FakeTensorMode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, batch = build(Model, config), batch_of(config, rows, tokens)
        for parameter in model.parameters():  # of a frozen base, which is not cast where it is in the dtype already
            if parameter.dtype == torch.bfloat16 and dtype == torch.float16:
                parameter.data = parameter.data.half()
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            carry = model.initial_carry(batch) if hasattr(model, "initial_carry") else None
        return watch(model, batch, dtype, carry)


def watch_some(Model, config, rows, tokens, dtype):
    """watch_fake; but what many equal layers or steps take is told from few, by what one more of them adds."""

    def some(**fields):
        one = watch_fake(Model, dataclasses.replace(config, **fields), rows, tokens, dtype)
        return np.array(dataclasses.astuple(one))

    def layers(plain, nested):
        fields = dict(nested_first=plain, nested_last=plain + nested - 1) if config.nested else {}
        return some(n_layer=plain + nested, **fields)

    steps, nested = getattr(config, "mean_backprop_depth", 0), len(getattr(config, "nested", ()))
    if 3 < steps <= getattr(config, "mean_recurrence", 0):  # a single one may have its worst moment elsewhere
        first = some(mean_backprop_depth=2)
        total = first + (steps - 2) * (some(mean_backprop_depth=3) - first)
    elif getattr(config, "n_layer", 0) > FEW and len({config.has_experts(i) for i in range(config.n_layer)}) == 1:
        first = layers(2, min(nested, 1))
        total = first + (config.n_layer - nested - 2) * (layers(3, min(nested, 1)) - first)
        total = total + (nested - 1) * (layers(2, 2) - first) if nested > 1 else total
    else:
        total = some()
    return Watched(*total.tolist())
