"""The operations of kernels.py, on both paths: against float64, on odd shapes and layouts, and compiled for real GPUs.

    python -m pytest tests/test_kernels.py -q

Each test with `path` runs once with the PyTorch fallback and once with the Triton kernels. Without a GPU the kernels
need Triton's interpreter, which must be switched on before kernels.py is imported, so those cases are skipped here
and test_all_of_it_with_the_kernels_in_the_interpreter runs them in a process of its own:

    TRITON_INTERPRET=1 python -m pytest tests/test_kernels.py -q -k triton

There bf16 is left out: the interpreter keeps bf16 as 16-bit integers and its dot on them is wrong.
"""

import ast
import mmap
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import golden
import kernels
from kernels import lora_linear, merge_lora, pack, unpack_fuse

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}  # of the largest
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
BF16_IN_INTERPRETER = "Triton's interpreter computes bf16 dots wrongly"


@pytest.fixture(params=["pytorch", "triton"])
def path(request):
    if request.param == "triton":
        if kernels.triton is None:
            pytest.skip("Triton is not installed")
        if DEVICE == "cpu" and not kernels.INTERPRETED:
            pytest.skip("in a process of its own, see test_all_of_it_with_the_kernels_in_the_interpreter")
    kernels.use_triton(request.param == "triton")
    yield request.param
    kernels.use_triton(None)


@pytest.fixture(params=[False, True], ids=["addresses", "copy-engine"])
def tiles(request, monkeypatch):
    """The tiles and the kind of descriptors for GPUs without and with a copy engine (interpreter only)."""
    if DEVICE == "cpu":
        monkeypatch.setattr(kernels, "device_facts", lambda device: (3, request.param))


def skip_if_untestable(path, dtype):
    if path == "triton" and dtype == torch.bfloat16 and DEVICE == "cpu":
        pytest.skip(BF16_IN_INTERPRETER)
    if path == "triton" and dtype == torch.float64:
        pytest.skip("there is no float64 kernel: such inputs take the fallback")


def assert_near(got, want, dtype=None):
    """Largest error below the dtype's tolerance times the largest value."""
    assert got.shape == want.shape
    if want.numel():
        tolerance = TOLERANCE[dtype or got.dtype] * max(want.abs().max().item(), 1e-30)
        assert (got.double() - want.double()).abs().max().item() <= tolerance


def random(*shape, dtype=torch.float32, seed=0):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64)
    return values.to(DEVICE, dtype)


def problem(M, K, N, branches, rank, dtype=torch.float32):
    """x, W, A, B, branch with entries of a size that keeps sums near 1."""
    shapes = (M, K), (N, K), (branches, rank, K), (branches, N, rank)
    tensors = [random(*shape, dtype=dtype, seed=seed) for seed, shape in enumerate(shapes)]
    scaled = [t * t.shape[-1] ** -0.5 if i else t for i, t in enumerate(tensors)]
    return *scaled, torch.randint(branches, (M,), generator=torch.Generator().manual_seed(M)).to(DEVICE)


def slow_lora(x, W, A, B, scale, branch):
    """Row by row, from the formula."""
    rows = [x[i] @ W.T + scale * (x[i] @ A[j].T) @ B[j].T for i, j in enumerate(branch.tolist())]
    return torch.stack(rows) if rows else x.new_zeros(0, len(W))


def slow_unpack(x_v, x_d, p, beta, mask):
    """Token by token, from the formula."""
    out, i = x_v.clone(), 0
    for b, t in mask.nonzero().tolist():
        w = beta * p[b, t]
        out[b, t] = w * x_d[i] + (1 - w) * x_v[b, t]
        i += 1
    return out


def gradients(function, tensors, dy):
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    return torch.autograd.grad(function(*leaves), leaves, dy.to(leaves[0].dtype), materialize_grads=True)


# ---- golden sets (they have no .json)


@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("name", sorted(p.stem for p in golden.FOLDER.glob("lora_ops*.npz")))
def test_golden_lora(name, dtype, path):
    skip_if_untestable(path, dtype)
    want = {key: t.to(DEVICE) for key, t in golden.arrays(name).items()}
    tensors = [want[key].to(dtype) for key in ("x", "W", "A", "B")]
    scale = (want["alpha"] / want["r"]).item()
    run = lambda x, W, A, B: lora_linear(x, W, A, B, scale, want["branch"])  # noqa: E731
    assert_near(run(*tensors), want["y"])
    for got, key in zip(gradients(run, tensors, want["dy"]), ("dx", None, "dA", "dB")):
        if key:
            assert_near(got, want[key])


@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("case", ["", "b_", "c_"])
@pytest.mark.parametrize("name", sorted(p.stem for p in golden.FOLDER.glob("dnd_ops*.npz")))
def test_golden_pack_and_unpack(name, case, dtype, path):
    skip_if_untestable(path, dtype)
    want = {key: t.to(DEVICE) for key, t in golden.under(golden.arrays(name), case).items()}
    mask, x, p, beta = want["M"], *(want[key].to(dtype) for key in ("X", "p", "beta"))
    rows, cu_seqlens, positions = pack(x, mask)
    assert torch.equal(rows, want["packed"].to(dtype))
    assert torch.equal(cu_seqlens.long(), want["cu_seqlens"].long()) and cu_seqlens.dtype == torch.int32
    assert torch.equal(positions, want["positions"])
    assert cu_seqlens.diff().max() == want["max_seqlen"]
    one = torch.ones((), device=DEVICE)
    alone = unpack_fuse(torch.zeros_like(x), want["processed"].to(dtype), torch.ones_like(p), one, mask)
    assert_near(alone, want["unpacked"])

    def whole(x, p):
        return unpack_fuse(x, 2 * pack(x, mask)[0], p, beta, mask)  # the set's nested layer doubles

    assert_near(whole(x, p), want["fused"])
    for got, key in zip(gradients(whole, [x, p], want["d_fused"]), ("d_X", "d_p")):
        assert_near(got, want[key])


# ---- lora_linear against float64, output and every gradient by itself

SHAPES = [(64, 64, 64, 1, 16), (1, 1, 1, 1, 1), (5, 123, 41, 3, 5), (70, 41, 130, 2, 33), (130, 33, 68, 4, 16)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_lora_output(shape, dtype, path, tiles):
    skip_if_untestable(path, dtype)
    *tensors, branch = problem(*shape, dtype=dtype)
    want = slow_lora(*(t.double() for t in tensors), 0.7, branch)
    got = lora_linear(*tensors, 0.7, branch)
    assert got.dtype == dtype
    assert_near(got, want)


@pytest.mark.parametrize("which", range(4), ids=["dx", "dW", "dA", "dB"])
@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("shape", [SHAPES[0], *SHAPES[2:4]], ids=str)
def test_lora_gradient(shape, dtype, which, path):
    skip_if_untestable(path, dtype)
    *tensors, branch = problem(*shape, dtype=dtype)
    dy = random(shape[0], shape[2], seed=4)

    def only(*all_tensors):
        return lambda one: lora_linear(*all_tensors[:which], one, *all_tensors[which + 1:], 0.7, branch)

    got, = gradients(only(*tensors), [tensors[which]], dy)
    want = gradients(lambda *t: slow_lora(*t, 0.7, branch), [t.double() for t in tensors], dy.to(dtype))[which]
    assert got.dtype == dtype
    assert_near(got, want)


def test_lora_gradcheck(path):
    skip_if_untestable(path, torch.float64)
    *tensors, branch = problem(5, 4, 3, 3, 2, dtype=torch.float64)
    branch[:] = torch.tensor([2, 0, 2, 0, 0])  # branch 1 has no row
    leaves = [t.requires_grad_() for t in tensors]
    assert torch.autograd.gradcheck(lambda *t: lora_linear(*t, 0.7, branch), leaves)
    assert torch.autograd.gradcheck(lambda x, W, A, B: lora_linear(x, W, A[:1], B[:1], 0.7), leaves)


@pytest.mark.parametrize("sizes", [(1, 1), (1, 64), (4, 64), (8, 16), (16, 1), (9, 31)], ids=str)
def test_lora_ranks_and_branches(sizes, path, tiles):
    dtype = torch.float32 if path == "pytorch" else torch.float16  # fp32 kernels end at 64 columns
    *tensors, branch = problem(9, 20, 24, *sizes, dtype=dtype)
    assert_near(lora_linear(*tensors, 0.7, branch), slow_lora(*(t.double() for t in tensors), 0.7, branch))


def test_lora_branch_per_row_or_per_sequence(path):
    x, W, A, B, _ = problem(6, 8, 5, 3, 2)
    x, per_sequence = x.view(2, 3, 8), torch.tensor([2, 0], device=DEVICE)
    exact = [t.double() for t in (x.flatten(0, 1), W, A, B)]
    want = slow_lora(*exact, 0.7, per_sequence.repeat_interleave(3))
    for branch in (per_sequence, per_sequence[:, None].expand(2, 3), per_sequence.int(), per_sequence.to(torch.uint8)):
        assert_near(lora_linear(x, W, A, B, 0.7, branch), want.view(2, 3, 5))
    one = torch.tensor(1, device=DEVICE)
    assert_near(lora_linear(x, W, A, B, 0.7, one), lora_linear(x, W, A[1:2], B[1:2], 0.7))
    assert_near(lora_linear(x[0, 0], W, A, B, 0.7, one), lora_linear(x, W, A, B, 0.7, one)[0, 0])


@pytest.mark.parametrize("shape", [(0, 8, 5), (4, 8, 0), (4, 0, 5), (2, 0, 8, 5)], ids=str)
def test_lora_of_nothing(shape, path):
    *lead, K, N = shape
    x, W = random(*lead, K).requires_grad_(), random(N, K).requires_grad_()
    A, B = random(2, 3, K).requires_grad_(), random(2, N, 3).requires_grad_()
    y = lora_linear(x, W, A, B, 1.0, torch.zeros(lead, dtype=torch.long, device=DEVICE))
    assert y.shape == (*lead, N) and not y.any()
    for leaf, grad in zip((x, W, A, B), torch.autograd.grad(y.sum(), (x, W, A, B))):
        assert grad.shape == leaf.shape and not grad.any()


def test_a_branch_without_rows_gets_zero_gradients_and_does_not_leak(path):
    x, W, A, B, _ = problem(7, 8, 5, 3, 2)
    branch = torch.tensor([0, 2, 2, 0, 0, 2, 0], device=DEVICE)
    want = lora_linear(x, W, A, B, 0.7, branch)
    for bad in (float("nan"), float("inf"), 1e10):
        A[1], B[1] = bad, bad
        assert torch.equal(lora_linear(x, W, A, B, 0.7, branch), want)
        dx, _, dA, dB = gradients(lambda *t: lora_linear(*t, 0.7, branch), (x, W, A, B), torch.ones_like(want))
        assert torch.equal(dA[1], torch.zeros_like(A[1])) and torch.equal(dB[1], torch.zeros_like(B[1]))
        assert dx.isfinite().all() and dA.isfinite().all() and dB.isfinite().all() and dA[2].any() and dB[0].any()
    x[3] = float("nan")  # a row of branch 0: branch 1 still gets zeros
    dA, = gradients(lambda A: lora_linear(x, W, A, B, 0.7, branch), [A], torch.ones_like(want))
    assert torch.equal(dA[1], torch.zeros_like(A[1]))


LAYOUTS = {
    "every other column": lambda t: torch.stack([t, t], -1).flatten(-2)[..., ::2],
    "transposed": lambda t: t.mT.contiguous().mT,
    "padded": lambda t: F.pad(t, (3, 2))[..., 3:-2],
    "reversed copy": lambda t: t.flip(0).contiguous().flip(0),
    "row stride": lambda t: torch.cat([t, t], -2)[..., :t.shape[-2], :],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_lora_of_non_contiguous_inputs(layout, path, tiles):
    *tensors, branch = problem(9, 16, 24, 3, 2)
    views = [LAYOUTS[layout](t) for t in tensors]
    dy = random(9, 24)
    run = lambda *t: lora_linear(*t, 0.7, branch)  # noqa: E731
    assert_near(run(*views), slow_lora(*(t.double() for t in tensors), 0.7, branch))
    leaves = [t.requires_grad_() for t in views]
    got = torch.autograd.grad(run(*leaves), leaves, LAYOUTS[layout](dy))
    for one, want in zip(got, gradients(lambda *t: slow_lora(*t, 0.7, branch), [t.double() for t in tensors], dy)):
        assert_near(one, want)


@pytest.mark.parametrize("part", [slice(None), (slice(None), 0), 2], ids=["all", "column", "row"])
def test_lora_of_stride_0_gradients_and_inputs(part, path):
    *tensors, branch = problem(9, 16, 24, 3, 2)
    tensors[0] = tensors[0][:1].expand(9, 16)
    leaves, exact = ([t.to(dtype).detach().requires_grad_() for t in tensors] for dtype in DTYPES[1::-1])
    got = torch.autograd.grad(lora_linear(*leaves, 0.7, branch)[part].sum(), leaves)
    for one, want in zip(got, torch.autograd.grad(slow_lora(*exact, 0.7, branch)[part].sum(), exact)):
        assert_near(one, want)


def test_scale_is_alpha_over_rank_on_every_way(path):
    """Ones, rank 8, alpha 16, W zero: 2 * 4 * 8 = 64, and not 512."""
    x, W = torch.ones(1, 4, device=DEVICE), torch.zeros(3, 4, device=DEVICE)
    A, B = torch.ones(1, 8, 4, device=DEVICE), torch.ones(1, 3, 8, device=DEVICE)
    assert torch.equal(lora_linear(x, W, A, B, 16 / 8), torch.full((1, 3), 64.0, device=DEVICE))
    assert torch.equal(F.linear(x, merge_lora(W, A[0], B[0], 16 / 8)), torch.full((1, 3), 64.0, device=DEVICE))
    assert torch.equal(lora_linear(x, W + 1, A, 0 * B, 16 / 8), F.linear(x, W + 1))  # B starts at zero


@pytest.mark.parametrize("dtype", DTYPES)
def test_merged_weights_give_the_same(dtype):
    x, W, A, B, _ = problem(9, 16, 24, 2, 4, dtype=dtype)
    merged = merge_lora(W, A[1], B[1], 0.7)
    assert merged.dtype == dtype
    assert_near(merged, W.double() + 0.7 * B[1].double() @ A[1].double())
    with pytest.raises(ValueError, match=r"merge_lora: .*choose one branch first"):
        merge_lora(W, A, B, 0.7)


# ---- wrong inputs


@pytest.mark.parametrize("branch, says", [
    (torch.tensor([0, -1, 1, 1]), "branch -1 with 3 branches: accepted are 0..2"),
    (torch.tensor([0, 3, 1, 1]), "branch 3 with 3 branches: accepted are 0..2"),
    (torch.tensor([0, 2**32, 1, 1]), "branch 4294967296 with 3 branches"),
    (torch.tensor([0.0, 1.0, 1.0, 1.0]), "branch of dtype torch.float32: must be integers"),
    (torch.tensor([True, False, True, True]), "branch of dtype torch.bool: must be integers"),
    (torch.zeros(5, dtype=torch.long), r"branch \(5,\) .* its shape must be \(4,\)"),
    (torch.zeros(4, 1, dtype=torch.long), r"branch \(4, 1\) .* its shape must be \(4,\)"),
    (None, "branch None with 3 branches: give an integer per row"),
])
def test_a_bad_branch_is_refused_in_one_line(branch, says, path):
    x, W, A, B, _ = problem(4, 8, 5, 3, 2)
    with pytest.raises(ValueError, match=says) as caught:
        lora_linear(x, W, A, B, 1.0, None if branch is None else branch.to(DEVICE), check=True)
    assert "\n" not in str(caught.value)


def test_an_unchecked_bad_branch_is_nan_not_the_base_model(path, monkeypatch):
    monkeypatch.setattr(kernels, "check_branch", lambda *_: None)  # as on a GPU without check=True
    x, W, A, B, _ = problem(4, 8, 5, 3, 2)
    good = lora_linear(x, W, A, B, 1.0, torch.tensor([0, 1, 1, 2], device=DEVICE))
    for bad in (-1, 3, 40, 2**32, -2**40):
        y = lora_linear(x, W, A, B, 1.0, torch.tensor([0, bad, 1, 2], device=DEVICE))
        assert y[1].isnan().all() and torch.equal(y[[0, 2, 3]], good[[0, 2, 3]])


def test_bad_shapes_and_dtypes_are_refused_in_one_line():
    x, W, A, B, _ = problem(4, 8, 5, 3, 2)
    for wrong in ((x[:, 1:], W, A, B), (x, W[0], A, B), (x, W, A[0], B[0]), (x, W, A[:2], B),
                  (x, W, A[:, :0], B[..., :0])):
        with pytest.raises(ValueError, match=r"\(N, K\), \(branches, rank, K\)") as caught:
            lora_linear(*wrong, 1.0)
        assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="x torch.float32 with W torch.bfloat16: must be one floating dtype"):
        lora_linear(x, W.bfloat16(), A[:1], B[:1], 1.0)
    x, mask = random(2, 3, 4), torch.ones(2, 3, dtype=torch.bool, device=DEVICE)
    for wrong in (mask[:, 1:], mask.long(), mask[0]):
        with pytest.raises(ValueError, match=r"pack: mask .*must be bool \(B, T\)"):
            pack(x, wrong)
    with pytest.raises(ValueError, match="x_d has 5 rows for 6 selected tokens"):
        unpack_fuse(x, random(5, 4), random(2, 3), torch.tensor(0.1, device=DEVICE), mask, check=True)
    with pytest.raises(ValueError, match=r"p \(2, 2\)"):
        unpack_fuse(x, random(6, 4), random(2, 2), torch.tensor(0.1, device=DEVICE), mask)


def test_kernels_on_a_cpu_need_the_interpreter():
    if DEVICE != "cpu" or kernels.INTERPRETED or kernels.triton is None:
        pytest.skip("a GPU, or the interpreter, is there")
    kernels.use_triton(True)
    try:
        with pytest.raises(ValueError, match="set TRITON_INTERPRET=1 before importing"):
            pack(random(1, 2, 3), torch.ones(1, 2, dtype=torch.bool))
    finally:
        kernels.use_triton(None)


# ---- autocast


@pytest.mark.parametrize("auto", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("W_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("AB_dtype", [torch.float32, torch.bfloat16])
def test_lora_has_the_dtypes_of_linear_under_autocast(auto, x_dtype, W_dtype, AB_dtype, path):
    skip_if_untestable(path, auto or x_dtype)
    x, W, A, B, branch = problem(6, 8, 5, 3, 2)
    leaves = [t.to(d).requires_grad_() for t, d in ((x, x_dtype), (W, W_dtype), (A, AB_dtype), (B, AB_dtype))]
    with torch.autocast(DEVICE, dtype=auto or torch.bfloat16, enabled=auto is not None):
        if auto is None and x_dtype != W_dtype:
            with pytest.raises(ValueError, match="run under torch.autocast"):
                lora_linear(*leaves, 0.7, branch)
            return
        y = lora_linear(*leaves, 0.7, branch)
        assert y.dtype == F.linear(leaves[0], leaves[1]).dtype
    exact = [t.detach().double().requires_grad_() for t in leaves]
    want = slow_lora(*exact, 0.7, branch)
    coarse = torch.bfloat16 if torch.bfloat16 in (auto, x_dtype, W_dtype, AB_dtype) else y.dtype
    assert_near(y, want, coarse)
    grads = torch.autograd.grad(y, leaves, torch.ones_like(y))
    for leaf, got, one in zip(leaves, grads, torch.autograd.grad(want, exact, torch.ones_like(want))):
        assert got.dtype == leaf.dtype
        assert_near(got, one, coarse)


def test_backward_inside_autocast_keeps_float32(path):
    *tensors, branch = problem(6, 8, 5, 3, 2)
    leaves = [t.requires_grad_() for t in tensors]
    y = lora_linear(*leaves, 0.7, branch)
    want = torch.autograd.grad(y, leaves[2:], torch.ones_like(y), retain_graph=True)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        got = torch.autograd.grad(y, leaves[2:], torch.ones_like(y))
    assert all(torch.equal(g, w) for g, w in zip(got, want))


# ---- pack and unpack_fuse


def masks(B=4, T=37):
    some = torch.rand(B, T, generator=torch.Generator().manual_seed(0)) < 0.3
    some[1] = False  # unequal counts: none in this row, all in the next
    some[2] = True
    one = torch.zeros(B, T, dtype=torch.bool)
    one[2, 5] = True
    return {"some": some, "none": torch.zeros_like(one), "all": torch.ones_like(one), "one": one, "not one": ~one}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("selected", masks())
def test_pack_moves_rows_exactly(selected, dtype, path):
    skip_if_untestable(path, dtype)
    mask = masks()[selected].to(DEVICE)
    x = random(4, 37, 41, dtype=dtype).requires_grad_()
    rows, cu_seqlens, positions = pack(x, mask)
    assert torch.equal(rows, x[mask])
    assert cu_seqlens.tolist() == [0, *mask.sum(dim=1).cumsum(0).tolist()] and cu_seqlens.dtype == torch.int32
    assert positions.tolist() == mask.nonzero()[:, 1].tolist() and positions.dtype == torch.int64
    dx, = torch.autograd.grad(rows, x, 3 * rows)
    assert torch.equal(dx, (3 * x).where(mask[..., None], 0))


@pytest.mark.parametrize("C", [1, 41, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("selected", masks())
def test_unpack_fuse_and_each_gradient(selected, dtype, C, path):
    skip_if_untestable(path, dtype)
    mask = masks()[selected].to(DEVICE)
    x_v, x_d = random(4, 37, C, dtype=dtype), random(int(mask.sum()), C, dtype=dtype, seed=1)
    p, beta, g = random(4, 37).sigmoid(), torch.tensor(0.3, device=DEVICE), random(4, 37, C, dtype=dtype, seed=2)
    out = unpack_fuse(x_v, x_d, p, beta, mask)
    assert out.dtype == dtype and torch.equal(out[~mask], x_v[~mask])
    assert_near(out, slow_unpack(*(t.double() for t in (x_v, x_d, p, beta)), mask))
    got = gradients(lambda *t: unpack_fuse(*t, mask), (x_v, x_d, p, beta), g)
    want = gradients(lambda *t: slow_unpack(*t, mask), [t.double() for t in (x_v, x_d, p, beta)], g)
    for leaf, one, exact in zip((x_v, x_d, p, beta), got, want):
        assert one.dtype == leaf.dtype
        assert_near(one, exact)
    assert torch.equal(got[0][~mask], g[~mask]) and not got[2][~mask].any()


def test_unpack_fuse_of_rows_wider_than_a_block(path):
    test_unpack_fuse_and_each_gradient("some", torch.float32, 1500, path)
    x, mask = random(4, 37, 1500), masks()["some"].to(DEVICE)
    assert torch.equal(pack(x, mask)[0], x[mask])


def test_pack_and_unpack_gradcheck(path):
    skip_if_untestable(path, torch.float64)
    mask = torch.tensor([[True, False, True], [False, False, False]])
    x, x_d, p = (random(*s, dtype=torch.float64).requires_grad_() for s in ((2, 3, 4), (2, 4), (2, 3)))
    beta = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: pack(x, mask)[0], x)
    assert torch.autograd.gradcheck(lambda *t: unpack_fuse(*t, mask), (x, x_d, p, beta))
    assert torch.autograd.gradcheck(lambda x: unpack_fuse(x, 2 * pack(x, mask)[0], p, beta, mask), x)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e10])
def test_what_is_not_selected_does_not_leak(bad, path):
    mask = masks()["some"].to(DEVICE)
    p, beta = random(4, 37).sigmoid(), torch.tensor(0.3, device=DEVICE)
    x, x_d, g = random(4, 37, 9), random(int(mask.sum()), 9), random(4, 37, 9, seed=1)
    tensors = x, x_d, p, beta
    run = lambda *t: unpack_fuse(*t, mask)  # noqa: E731
    good, good_grads = run(*tensors), gradients(run, tensors, g)
    x[~mask], p[~mask] = bad, bad
    assert torch.equal(pack(x, mask)[0], x[mask]) and pack(x, mask)[0].isfinite().all()
    assert torch.equal(run(*tensors)[mask], good[mask])
    got = gradients(run, tensors, g.masked_fill(~mask[..., None], bad))
    assert torch.equal(got[0][mask], good_grads[0][mask])
    assert all(torch.equal(one, want) for one, want in zip(got[1:], good_grads[1:]))
    x_d[0] = bad  # one row of x_d reaches its own token only
    assert torch.equal(run(*tensors)[mask][1:], good[mask][1:])


@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 0, 4), (2, 3, 0)], ids=str)
def test_pack_and_unpack_of_nothing(shape, path):
    x, mask = random(*shape).requires_grad_(), torch.ones(shape[:2], dtype=torch.bool, device=DEVICE)
    rows, cu_seqlens, positions = pack(x, mask)
    assert rows.shape == (shape[0] * shape[1], shape[2]) and len(cu_seqlens) == shape[0] + 1
    p = random(*shape[:2])
    out = unpack_fuse(x, rows, p, torch.tensor(0.3, device=DEVICE), mask)
    assert torch.equal(torch.autograd.grad(out.sum(), x)[0], torch.ones_like(x))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pack_and_unpack_of_non_contiguous_inputs(layout, path):
    view, mask = LAYOUTS[layout], masks()["some"].to(DEVICE)
    x, x_d, p, g = random(4, 37, 10), random(int(mask.sum()), 10), random(4, 37).sigmoid(), random(4, 37, 10, seed=1)
    beta, views = torch.tensor(0.3, device=DEVICE), [view(t).requires_grad_() for t in (x, x_d, p)]
    strided = mask.mT.contiguous().mT
    rows = pack(views[0], strided)[0]
    assert torch.equal(rows, x[mask])
    assert torch.equal(torch.autograd.grad(rows, views[0], view(x_d))[0][mask], x_d)
    out = unpack_fuse(*views, beta, strided)
    got = torch.autograd.grad(out, views, view(g))
    want = gradients(lambda *t: slow_unpack(*t, beta.double(), mask), [t.double() for t in (x, x_d, p)], g)
    assert_near(out, slow_unpack(x.double(), x_d.double(), p.double(), beta.double(), mask))
    for one, exact in zip(got, want):
        assert_near(one, exact)
    ones = torch.autograd.grad(unpack_fuse(*views, beta, mask).sum(), views)  # arrives with stride 0
    doubles = [t.double() for t in (x, x_d, p)]
    exact = gradients(lambda *t: slow_unpack(*t, beta.double(), mask), doubles, torch.ones_like(x))
    for one, want in zip(ones, exact):
        assert_near(one, want)
    alike = x[:1].expand(4, 37, 10)
    assert torch.equal(pack(alike, mask)[0], alike[mask])


def test_unpack_fuse_with_too_few_rows_unchecked_is_nan(path, monkeypatch):
    monkeypatch.setattr(kernels, "check_count", lambda *_: None)  # as on a GPU without check=True
    if path == "pytorch":
        pytest.skip("the fallback raises by itself")
    mask = torch.ones(1, 3, dtype=torch.bool, device=DEVICE)
    out = unpack_fuse(random(1, 3, 4), random(2, 4), random(1, 3), torch.tensor(0.3, device=DEVICE), mask)
    assert out[0, :2].isfinite().all() and out[0, 2].isnan().all()


# ---- repeatable, 64-bit, whole graphs


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_two_runs_agree_to_the_bit(dtype, path):
    def everything():
        *tensors, branch = problem(70, 41, 66, 3, 5, dtype=dtype)
        mask = masks()["some"].to(DEVICE)
        x, p, beta = random(4, 37, 41, dtype=dtype), random(4, 37).sigmoid(), torch.tensor(0.3, device=DEVICE)
        y = lora_linear(*tensors, 0.7, branch)
        nested = lambda x, p, beta: unpack_fuse(x, 2 * pack(x, mask)[0], p, beta, mask)  # noqa: E731
        return [y, *gradients(lambda *t: lora_linear(*t, 0.7, branch), tensors, y), nested(x, p, beta),
                *gradients(nested, (x, p, beta), x)]

    assert all(torch.equal(a, b) for a, b in zip(everything(), everything()))


def test_nothing_uses_atomics():
    assert "atomic_" not in Path(kernels.__file__).read_text(encoding="utf-8")


def sparse(numel, dtype=torch.float16):
    """A tensor of zeros larger than the memory: pages that are never written take no room."""
    return torch.frombuffer(mmap.mmap(-1, numel * 2, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000), dtype=dtype)


def test_offsets_are_64_bit(path):
    if DEVICE != "cpu" or not sys.platform.startswith("linux"):
        pytest.skip("needs address space without memory behind it")
    C, rows = 4096, 530_000  # 2.17e9 elements, 4.3 GB that are not there
    x, mask = sparse(rows * C).view(1, rows, C), torch.zeros(1, rows, dtype=torch.bool)
    x[0, -1], mask[0, -1] = torch.arange(C).half(), True
    assert torch.equal(pack(x, mask)[0], x[0, -1:])
    x, W, A, B, branch = problem(3, 16, 3, 2, 2, dtype=torch.float16)
    for far in (0, 1):  # x and W as rows 2^30 + 8 elements apart: the third begins beyond 2^31
        spread = sparse(2**31 + 64).as_strided((3, 16), (2**30 + 8, 1))
        spread.copy_((x, W)[far])
        got = lora_linear(*((spread, W) if far == 0 else (x, spread)), A, B, 0.7, branch)
        assert torch.equal(got, lora_linear(x, W, A, B, 0.7, branch))


def test_compile_keeps_the_graph_whole(path):
    if path == "triton" and DEVICE == "cpu":
        pytest.skip("torch.compile refuses to run in Triton's interpreter")
    *tensors, branch = problem(6, 8, 8, 3, 2)
    beta = torch.tensor(0.3, device=DEVICE)

    def layer(x, W, A, B, branch):
        y = lora_linear(x, W, A, B, 0.7, branch).view(2, 3, 8)
        p = y.mean(-1).sigmoid()
        rows, cu_seqlens, positions = pack(y, p > 0.5)
        return unpack_fuse(y, rows * 2 + positions[:, None], p, beta, p > 0.5).sum() + cu_seqlens.sum()

    for auto in (False, True):
        with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=auto):
            leaves, same = ([t.detach().clone().requires_grad_() for t in tensors] for _ in range(2))
            got = torch.compile(layer, fullgraph=True, backend="aot_eager")(*leaves, branch)
            want = layer(*same, branch)
        assert_near(got, want)
        for one, other in zip(torch.autograd.grad(got, leaves), torch.autograd.grad(want, same)):
            assert_near(one, other)
    compiled = torch.compile(lambda x, b: lora_linear(x, *tensors[1:], 0.7, b), fullgraph=True, backend="aot_eager")
    with pytest.raises(ValueError, match="branch 7 with 3 branches"):
        compiled(tensors[0], torch.full_like(branch, 7))


def test_the_operators_pass_torchs_own_checks(path):
    if path == "triton" and DEVICE == "cpu":
        pytest.skip("torch.compile refuses to run in Triton's interpreter")
    *tensors, branch = problem(6, 8, 5, 3, 2)
    mask = torch.tensor([[True, False, True]], device=DEVICE)
    leaves = [t.requires_grad_() for t in tensors]
    x, x_d, p = (random(*s).requires_grad_() for s in ((1, 3, 4), (2, 4), (1, 3)))
    beta = torch.tensor(0.3, device=DEVICE, requires_grad=True)
    torch.library.opcheck(kernels.lora_op, (*leaves, branch, 0.7, False))
    torch.library.opcheck(kernels.pack_op, (x, mask))
    torch.library.opcheck(kernels.unpack_op, (x, x_d, p, beta, mask, False))


def test_training_is_the_same_with_and_without_kernels(path):
    """A few steps on A and B: a gradient that is a little wrong shows here."""
    if path == "pytorch":
        pytest.skip("this is what the kernels are compared with")

    def losses(on):
        kernels.use_triton(on)
        x, W, A, B, branch = problem(32, 16, 16, 3, 4)
        A, B = A.requires_grad_(), torch.zeros_like(B).requires_grad_()
        optimizer, history = torch.optim.SGD([A, B], lr=0.3), []
        for _ in range(8):
            loss = (lora_linear(x, W, A, B, 1.0, branch) - random(32, 16, seed=9)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            history.append(loss.item())
        return history

    plain = losses(False)
    assert losses(True) == pytest.approx(plain, rel=1e-5) and plain[-1] < plain[0]


# ---- which path, which programs, which imports


def test_the_path_is_said_once(capfd):
    kernels._said.clear()
    for _ in range(2):
        pack(random(1, 2, 3), torch.ones(1, 2, dtype=torch.bool, device=DEVICE))
    runs = "Triton" if DEVICE == "cuda" and kernels.triton else "PyTorch"
    assert capfd.readouterr().err == f"kernels: {runs} on {DEVICE} (chosen by device)\n"


def test_it_runs_on_plain_torch():
    code = ("import sys; sys.modules['triton'] = None; import torch, kernels as k\n"
            "y = k.lora_linear(torch.ones(2, 3), torch.ones(4, 3), torch.ones(1, 2, 3), torch.ones(1, 4, 2), 0.5)\n"
            "assert y.tolist() == [[6.0] * 4] * 2 and k.triton is None\n"
            "try: k.use_triton(True)\nexcept ValueError as e: print(e)")
    here = Path(kernels.__file__).parent
    run = subprocess.run([sys.executable, "-c", code], cwd=here, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "Triton is not installed; pip install triton" in run.stdout


def test_it_imports_torch_triton_and_the_standard_library_only():
    tree = ast.parse(Path(kernels.__file__).read_text(encoding="utf-8"))
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.split(".")[0] for name in names} - set(sys.stdlib_module_names) == {"torch", "triton"}


@pytest.mark.parametrize("M, N", [(1, 15840), (4096, 15840), (4096, 5280), (8192, 6144), (100_000, 77)])
def test_few_programs_compute_z_again(M, N):
    """On an H100: z costs at most a twentieth more where the product is large."""
    tile = kernels.lora_tile(M < 64, 64, torch.bfloat16, True)
    columns = -(-N // tile["BN"])
    slots = kernels.lora_slots(M, N, tile, 132)
    assert 1 <= slots <= columns
    if M == 4096 and N == 15840:
        assert slots * tile["WIDTH"] / N <= 0.05


def test_the_script_checks_and_prints_its_table(monkeypatch, capsys):
    monkeypatch.setattr(kernels, "LORA_SHAPES", {"odd": (123, 23, 41, 77, 3, 5)})
    monkeypatch.setattr(kernels, "PACK_SHAPES", {"odd": (3, 3, 23, 41, 0.5)})
    kernels.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("path: ") and lines[-1].startswith("all errors at most")
    ops = [line.split()[0] for line in lines if not line.startswith(" ")]
    assert ops[-4:-1] == ["lora_linear", "pack", "unpack_fuse"]
    monkeypatch.setattr(kernels, "TOLERANCE", {dtype: 0.0 for dtype in DTYPES})
    with pytest.raises(SystemExit, match="do not use this path here"):
        kernels.main()


# ---- compiled for GPUs that are not here


def resources(compiled, tmp_path):
    """Registers and spilled bytes or registers of a compiled kernel."""
    if "amdgcn" in compiled.asm:
        text = compiled.asm["amdgcn"]
        number = lambda key: int(re.search(rf"\.{key}:\s+(\d+)", text).group(1))  # noqa: E731
        return number("vgpr_count"), number("vgpr_spill_count") + number("sgpr_spill_count")
    (tmp_path / "kernel.cubin").write_bytes(compiled.asm["cubin"])
    tool = Path(kernels.triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    command = [tool, "--dump-resource-usage", tmp_path / "kernel.cubin"]
    text = subprocess.run(command, capture_output=True, text=True).stdout
    number = lambda key: int(re.search(rf"\b{key}:(\d+)", text).group(1))  # noqa: E731
    return number("REG"), number("STACK") + number("LOCAL")


def assert_wide_addresses(ttir):
    """Every block of a matrix is reached by 64-bit offsets of rows, none of them a 32-bit product widened too late."""
    narrow = set(re.findall(r"(%\S+) = arith.muli .* : (?:tensor<.*x)?i32", ttir))
    assert not narrow & set(re.findall(r"arith.extsi (%\S+) : tensor", ttir))
    offsets = re.findall(r"tt.addptr .* : tensor<\d+x\d+x!tt.ptr<\w+>>, tensor<\d+x\d+x(i\d+)>", ttir)
    assert "i64" in offsets and offsets.count("i32") <= offsets.count("i64")  # a column within the row may be 32-bit


@pytest.mark.parametrize("backend, arch, warp", [("cuda", 90, 32), ("hip", "gfx942", 64)], ids=["sm_90", "gfx942"])
def test_every_configuration_compiles_ahead_of_time_without_spills(backend, arch, warp, tmp_path):
    if kernels.triton is None or kernels.INTERPRETED:
        pytest.skip("needs Triton's compiler, not its interpreter")
    from triton.backends.compiler import GPUTarget

    compiled = list(kernels.compile_ahead(GPUTarget(backend, arch, warp)))
    for label, one in compiled:
        registers, spilled = resources(one, tmp_path)
        print(f"{label:<40} registers {registers:>3} spills {spilled} shared memory {one.metadata.shared:>6}")
        assert spilled == 0, label
        assert one.metadata.shared <= (232_448 if backend == "cuda" else 65_536), label
        if backend == "cuda" and label.startswith("lora bf16"):
            assert "wgmma.mma_async" in one.asm["ptx"] and "cp.async.bulk.tensor" in one.asm["ptx"], label
        if backend == "hip" or not label.startswith("lora"):
            assert_wide_addresses(one.asm["ttir"])
    assert len(compiled) == 20 + 12 if backend == "cuda" else 18 + 12


def test_all_of_it_with_the_kernels_in_the_interpreter():
    if kernels.triton is None or kernels.INTERPRETED or DEVICE != "cpu":
        pytest.skip("already there, or the kernels run on a GPU")
    command = [sys.executable, "-m", "pytest", __file__, "-q", "-k", "triton", "-p", "no:cacheprovider"]
    run = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    print(run.stdout[-3000:])
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-1000:]
    passed, skipped = (int(re.search(rf"(\d+) {word}", run.stdout).group(1)) for word in ("passed", "skipped"))
    assert passed > 100 and skipped < passed


# ---- what a new user ran into


def test_the_check_of_this_machine_sees_a_nan():
    good, bad = torch.ones(1), torch.full((1,), float("nan"))
    for got in ([good, bad], [bad, good]):
        wrong = kernels.error(got, [good, good])
        assert wrong != wrong, "nan"


def test_merging_is_in_float32_under_autocast():
    torch.manual_seed(0)
    W, A, B = torch.randn(20, 30), torch.randn(4, 30), torch.randn(20, 4)
    with torch.autocast("cpu", torch.bfloat16):
        got = kernels.merge_lora(W, A, B, 2.0)
    torch.testing.assert_close(got.double(), W.double() + 2 * B.double() @ A.double(), atol=1e-5, rtol=1e-5)


def test_strided_inputs_keep_what_the_compiler_was_told():
    x = torch.randn(3, 10).T.view(2, 5, 3).requires_grad_()
    mask, p = torch.zeros(2, 5, dtype=torch.bool), torch.rand(2, 5)
    mask[0, 1] = True
    out = kernels.unpack_fuse(x, torch.randn(1, 3), p, 0.5, mask)
    assert out.is_contiguous()
    args = (x.detach(), torch.randn(1, 3), p, torch.tensor(0.5), mask, False)
    if not kernels.INTERPRETED:
        torch.library.opcheck(torch.ops.kernels.unpack_fuse.default, args, test_utils="test_faketensor")


@pytest.mark.parametrize("change,word", [
    (dict(scale=torch.tensor(2.0)), "scale is a tensor"), (dict(branch=[0, 1]), "branch is a list"),
    (dict(x=torch.ones(2, 3, dtype=torch.long)), "floating"),
    (dict(A=torch.ones(2, 1, 3, device="meta")), "one device"),
    (dict(branch=torch.tensor([0, -1], dtype=torch.int8)), "branch -1")])
def test_more_mistakes_are_one_line(change, word):
    inputs = dict(x=torch.ones(2, 3), W=torch.ones(4, 3), A=torch.ones(2, 1, 3), B=torch.ones(2, 4, 1), scale=1.0,
                  branch=torch.tensor([0, 1])) | change
    with pytest.raises(ValueError, match=word), torch.autocast("cpu", torch.bfloat16):
        kernels.lora_linear(**inputs)


def test_many_branches_fit_narrow_indices():
    x, W = torch.ones(2, 3), torch.zeros(4, 3)
    A, B = torch.ones(200, 1, 3), torch.arange(200.0)[:, None, None].expand(200, 4, 1)
    y = kernels.lora_linear(x, W, A, B, 1.0, torch.tensor([7, 100], dtype=torch.int8))
    assert y[:, 0].tolist() == [21.0, 300.0]
