"""--compile: the blocks are compiled for a few kinds of input, not for each number of steps or of selected tokens.

    pytest tests/test_compile.py                     a minute; no C++ compiler is needed
"""

import random

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from dnd import DND, DNDConfig
from hrm import HRM, HRMConfig
from huginn import Huginn, HuginnConfig
from modr import MoDr, MoDrConfig

LIMIT = 32  # train.py's recompile_limit, beyond which what is new runs without the compiler
V = 50
SIZES = dict(vocab_size=V, block_size=128, n_embd=32, n_head=4, intermediate_size=48)
LOOP = dict(**SIZES, n_layers_in_prelude=2, n_layers_in_recurrent_block=2, n_layers_in_coda=1, mean_recurrence=6,
            mean_backprop_depth=3)
NEST = dict(**SIZES, n_layer=4, n_kv_head=2, head_dim=8, nested_first=1, nested_last=2)
MOE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
MODELS = {  # name -> (model, what is compiled in all, at most)
    "huginn": (lambda: Huginn(HuginnConfig(**LOOP)), 5),
    "huginn, recomputed": (lambda: Huginn(HuginnConfig(**LOOP, checkpoint_core=True)), 5),
    "modr": (lambda: MoDr(MoDrConfig(**LOOP)), 12),
    "dnd": (lambda: DND(DNDConfig(**NEST)), 9),
    "dnd, packed": (lambda: DND(DNDConfig(**NEST, checkpoint_layers=True)), 10),
    "dnd, experts": (lambda: DND(DNDConfig(**NEST, **MOE)), 10),
    "hrm": (lambda: HRM(HRMConfig(vocab_size=11, seq_len=16, n_embd=32, n_head=2, H_layers=1, L_layers=1)), 4),
}


@pytest.fixture(autouse=True)
def afresh():
    torch.manual_seed(0)
    random.seed(0)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=LIMIT):
        yield
    torch._dynamo.reset()


def batch_like(rows, length, packed=False):
    """Rows of tokens to be scored up to some place, packed from several texts or not."""
    inputs = torch.randint(V, (rows, length))
    labels = inputs.clone()
    labels[0, random.randint(1, length) :] = -100
    positions = torch.arange(length).repeat(rows, 1)
    for row in positions:
        for start in sorted(random.sample(range(1, length), random.randint(0, 3))):
            row[start:] = torch.arange(length - start)
    return dict(inputs=inputs, labels=labels) | (dict(positions=positions) if packed else {})


def select(model, share):
    """Let a nested layer's router pass about that share of the tokens."""
    model.nesting.router.data.normal_(0, 0.3)
    model.nesting.tau.fill_({0: 2.0, 1: -1.0}.get(share, 0.5))


def train(model, length, packed):
    with torch.autocast("cpu", torch.bfloat16, enabled=getattr(model.config, "num_experts", 0) > 0):
        loss, metrics, _ = model.train().step(batch_like(3, length, packed))
    loss.backward()
    return metrics


def score(model, length):
    with torch.autocast("cpu", torch.bfloat16, enabled=getattr(model.config, "num_experts", 0) > 0):
        model.eval().evaluate([batch_like(5, length)])
        model.generate([[1] * length, [2] * (length + 2)], 4)


@pytest.mark.parametrize("name", [name for name in MODELS if name != "hrm"])
def test_nothing_is_compiled_per_number_of_steps_or_of_selected_tokens(name):
    make, most = MODELS[name]
    model, counter = make(), CompileCounterWithBackend("eager")
    for part in model.parts_to_compile():
        part.compile(backend=counter)

    def run(lengths):
        seen = set()
        for i, length in enumerate(lengths):
            if isinstance(model, DND):
                select(model, i % 3 if i % 3 < 2 else 0.5)
            metrics = train(model, length, "packed" in name)
            seen.add(float(metrics["num_steps"][0] if "num_steps" in metrics else metrics["ratio"][0]))
        for length in (16, 20):
            score(model, length)
        return seen

    run([16, 16, 16, 24, 70, 90])
    warm = counter.frame_count
    seen = run([16] * 3 + [random.randint(8, 100) for _ in range(9)])
    print(f"{name}: {warm} compiled, {counter.frame_count} after {sorted(seen)}")
    assert len(seen) >= 5
    assert counter.frame_count == warm <= most < LIMIT


def test_hrm_is_compiled_once_per_level_and_kind_of_gradient():
    make, most = MODELS["hrm"]
    model, counter, carry = make(), CompileCounterWithBackend("eager"), None
    for part in model.parts_to_compile():
        part.compile(backend=counter)
    for _ in range(20):
        inputs = torch.randint(11, (4, 16))
        loss, _, carry = model.train().step(dict(inputs=inputs, labels=inputs), carry)
        loss.backward()
    for rows in (3, 5):
        model.eval().evaluate([dict(inputs=torch.randint(11, (rows, 16)), labels=torch.randint(11, (rows, 16)))])
    assert counter.frame_count <= most


@pytest.mark.parametrize("name", ["huginn", "modr", "dnd"])
def test_compiled_blocks_compute_the_same(name):
    losses = []
    for compiled in (False, True):
        torch.manual_seed(0)
        random.seed(0)
        model = MODELS[name][0]()
        for part in model.parts_to_compile() if compiled else ():
            part.compile(backend="eager")
        if isinstance(model, DND):
            select(model, 0.5)
        torch.manual_seed(1)
        losses.append([model.train().step(batch_like(3, length))[0].item() for length in (16, 20, 70)])
        losses[-1] += model.generate([[1, 2, 3]], 5)
    assert losses[0] == losses[1]
