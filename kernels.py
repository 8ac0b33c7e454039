"""Fused multi-branch LoRA, and packing of selected tokens: Triton kernels, each with its PyTorch fallback and backward.

    lora_linear     y = x W^T + scale * (x A_j^T) B_j^T,   j = branch[row]
    merge_lora      W + scale * B_j A_j
    pack            rows = x[mask], in order;   cu_seqlens = where each sequence's rows begin;   positions = their t
    unpack_fuse     out[mask] = w * x_d + (1 - w) * x_v[mask],   w = beta * p[mask];   out = x_v elsewhere

Shapes: M rows, K features in, N out, R = branches * rank; B sequences, T tokens, C features, k selected tokens.
x (..., K), W (N, K), A (branches, rank, K), B (branches, N, rank); x, x_v (B, T, C), x_d (k, C), mask, p (B, T).

    y = lora_linear(x, W, A, B, alpha / rank, branch)          # x (B, T, K), branch (B,) or (B, T) -> (B, T, N)
    rows, cu_seqlens, positions = pack(x, p > tau)              # (k, C), (B + 1,) int32, (k,) int64
    x = unpack_fuse(x, layer(rows), p, beta, p > tau)           # (B, T, C)

On a GPU with Triton the kernels run; else (CPU, no Triton, float64, R > 256, in float32 R > 64) the PyTorch reference
that stands above each kernel and is its definition. use_triton(True / False / None) overrides; standard error says once
which path runs. All are torch.library ops with gradients: torch.compile keeps its graph whole. Nothing is summed in
an order left to chance, so two runs agree to the bit. Copy this file out with tests/test_kernels.py.

On paper, H100 (989 TFLOP/s in bf16, 3.35 TB/s, 132 multiprocessors with 65536 registers, 227 KiB); not measured:
    lora_linear, Huginn's qkv: M 4096, K 5280, N 15840, R 4 * 16
        2 M N K = 685 GFLOP = 0.69 ms; x, W, y = 340 MB = 0.10 ms: bound by arithmetic
        128 programs (one round), each 128 rows by 16 blocks of 256 columns; z once per program costs 1.6 %, the product
        with B 1.2 %; 2.8 % above x W^T in the same blocks. Computed for each block anew z would cost 25 %.
        dx (N 5280): 6 blocks per program, 4.8 % + 0.4 %. dA and dB: 2 * 2 M R (N + K) = 22 GFLOP, 3 %
    the same, decoding, M 8: W's 167 MB = 50 us; 124 programs, A is read from the L2 cache
    pack 2 k C elements, its backward (k + M) C, unpack_fuse (2 M + k) C, its backward (2 M + 3 k) C; no arithmetic to
        speak of. M 32768, C 2048, k 20 %: 54, 161, 295, 349 MB = 16, 48, 88, 104 us
    Compiled for sm_90, without spills: large block 186 registers in 256 threads, 208 KiB: 1 program per multiprocessor,
        which the asynchronous copies and products of 3 stages keep busy; small block 106 registers in 128 threads,
        72 KiB: 3 programs. Pack family: 30 to 78 registers in 128 threads: 6 to 16 programs, 24 to 64 of 64 warps.
"""

import math
import statistics
import sys
import time
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import custom_op

try:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # no wheel for macOS and Windows
    triton, tl = None, SimpleNamespace(constexpr=None)

INTERPRETED = triton is not None and triton.knobs.runtime.interpret  # TRITON_INTERPRET=1 when this file was imported
TRITON_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MAX_WIDTH = {4: 64, 2: 256}  # bytes of an element -> most stacked rows of A that a program can hold


# ---- which path runs

_override, _said = None, set()


def use_triton(on=None):
    """True: Triton (on a CPU only with TRITON_INTERPRET=1 set before the import). False: PyTorch. None: by device."""
    global _override
    if on and triton is None:
        raise ValueError("use_triton(True): Triton is not installed; pip install triton, or use_triton(None)")
    _override = on


def triton_runs(x, width=0):
    """Whether ops on x take the kernels; says so on standard error, once per device and reason."""
    on = triton is not None and (x.is_cuda if _override is None else _override)
    why = "chosen by device" if _override is None else f"use_triton({_override})"
    if on and not x.is_cuda and not INTERPRETED:
        raise ValueError(f"use_triton(True) with tensors on {x.device.type}: set TRITON_INTERPRET=1 before importing "
                         "kernels, or call use_triton(None)")
    if on and x.dtype not in TRITON_DTYPES:
        on, why = False, f"no kernel for {x.dtype}"
    if on and width > MAX_WIDTH[x.element_size()]:
        on, why = False, f"branches * rank {width} is above {MAX_WIDTH[x.element_size()]} in {x.dtype}"
    line = f"kernels: {'Triton' if on else 'PyTorch'} on {x.device.type} ({why})"
    if line not in _said:
        _said.add(line)
        print(line, file=sys.stderr, flush=True)
    return on


def jit(**options):
    """triton.jit, or nothing where Triton is missing."""
    return triton.jit(**options) if triton is not None else lambda kernel: kernel


@jit()
def offset(index, stride):
    """index * stride in 64 bits: widened before the product, which 32 bits hold only up to 2^31 elements."""
    return index.to(tl.int64) * stride


# ---- lora_linear: y = x W^T + scale * (x A_j^T) B_j^T
#
# Rows of different branches share one product: the A of all branches are stacked to (R, K), the columns of z = x A^T
# that belong to another branch than the row's are set to zero, and the stacked B (N, R) does the rest. Sequences with a
# branch each need no stack in PyTorch: a batched product takes each one's own matrices.


def own_columns(z, branch, branches, unknown=0.0):
    """z (M, R), 0 where a stacked column is of another branch than the row's. branch (n,), n divides M -> (M, R).

    A row whose branch does not exist is `unknown`.
    """
    j = branch.repeat_interleave(len(z) // max(len(branch), 1))  # (M,)
    own = j[:, None] == torch.arange(branches, device=branch.device)  # (M, branches)
    other = z.new_zeros(len(z)).masked_fill_(~own.any(dim=1), unknown)  # (M,)
    return z.unflatten(1, (branches, -1)).where(own[..., None], other[:, None, None]).flatten(1)


def used_branches(branch, branches):
    """Which branches some row chose, (branches,) bool. As 0 * NaN is NaN, B of the others is left out of the sums."""
    return (branch.flatten() == torch.arange(branches, device=branch.device)[:, None]).any(dim=1)


def lora_reference(x, W, A, B, branch, scale):
    """x (M, K), W (N, K), A (branches, rank, K), B (branches, N, rank), branch (n,) -> (M, N)."""
    M, n = len(x), max(len(branch), 1)
    if M // n >= A.shape[1]:  # long sequences: a copy of A_j and B_j for each is smaller than x and y, no work is lost
        j = branch.long().clamp(0, len(A) - 1)  # (n,)
        y = (x @ W.mT).view(n, M // n, -1)  # (n, T, N)
        z = torch.bmm(x.reshape(n, M // n, -1), A[j].mT) * scale  # (n, T, rank)
        return y.baddbmm_(z.masked_fill((j != branch)[:, None, None], math.nan), B[j].mT).view(M, -1)
    # a branch that does not exist gives NaN, not silently the base model
    z = own_columns(x @ A.flatten(0, 1).mT * scale, branch, len(A), unknown=math.nan)  # (M, R)
    B = B.where(used_branches(branch, len(B))[:, None, None], 0)
    stacked = B.transpose(0, 1).flatten(1)  # (N, R)
    return (x @ W.mT).addmm_(z, stacked.mT)


@jit(do_not_specialize=["M", "rows_per_index", "slots"])
def lora_kernel(x, W, A, B, y, branch, scale, M, N, K, R, rank, rows_per_index, slots, x_m, W_row, A_c, B_c, y_m,
                BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr,
                W_BY_K: tl.constexpr, DESCRIPTORS: tl.constexpr, PRECISION: tl.constexpr):
    """One program: BM rows of y, at every slots-th block of BN columns. A is stacked to (R, K), B to (R, N).

    Beside the first block, in the same K loop, it accumulates z = x A^T for all branches, masks it by the rows'
    branches, and keeps it for its other blocks. Sums are fp32 since they have thousands of terms; z is rounded to x's
    dtype once, for the last dot. Blocks come by tensor descriptors: 64-bit addresses, zeros beyond the edge, and on
    Hopper one instruction of its copy engine per block instead of registers full of addresses. Only y is overwritten.
    """
    if not DESCRIPTORS:  # no copy engine: x ... y are addresses, and what is made here turns into masked loads
        x = tl.make_tensor_descriptor(x, [M, K], [x_m, 1], [BM, BK])
        if W_BY_K:
            W = tl.make_tensor_descriptor(W, [K, N], [W_row, 1], [BK, BN])
        else:
            W = tl.make_tensor_descriptor(W, [N, K], [W_row, 1], [BN, BK])
        A = tl.make_tensor_descriptor(A, [R, K], [A_c, 1], [WIDTH, BK])
        B = tl.make_tensor_descriptor(B, [R, N], [B_c, 1], [WIDTH, BN])
        y = tl.make_tensor_descriptor(y, [M, N], [y_m, 1], [BM, BN])
    # programs that run together share rows and columns: GROUP blocks of rows by as many slots as fit, for the L2 cache
    first = tl.program_id(0) // (GROUP * slots) * GROUP
    size = tl.minimum(tl.cdiv(M, BM) - first, GROUP)
    within = tl.program_id(0) % (GROUP * slots)
    row, column = (first + within % size) * BM, within // size * BN

    acc, z = tl.zeros((BM, BN), dtype=tl.float32), tl.zeros((BM, WIDTH), dtype=tl.float32)
    for k in range(0, K, BK):
        xs = x.load([row, k])  # (BM, BK)
        Ws = W.load([k, column]) if W_BY_K else W.load([column, k]).T  # (BK, BN)
        As = A.load([0, k]).T  # (BK, WIDTH)
        acc = tl.dot(xs, Ws, acc, input_precision=PRECISION)
        z = tl.dot(xs, As, z, input_precision=PRECISION)

    m, c = row + tl.arange(0, BM), tl.arange(0, WIDTH)
    own = rank * tl.load(branch + m // rows_per_index, mask=m < M, other=-1)  # (BM,) first column of the row's branch
    known = (own >= 0) & (own < R)
    chosen = known[:, None] & (c[None, :] >= own[:, None]) & (c[None, :] < (own + rank)[:, None])  # (BM, WIDTH)
    Bs = B.load([0, column])  # (WIDTH, BN)
    z = tl.where(chosen, z * scale, tl.where(known, 0.0, float("nan"))[:, None]).to(Bs.dtype)
    acc = tl.dot(z, Bs, acc, input_precision=PRECISION)
    y.store([row, column], acc.to(z.dtype))  # (BM, BN)
    for column in range(column + slots * BN, N, slots * BN):
        acc = tl.zeros((BM, BN), dtype=tl.float32)
        for k in range(0, K, BK):
            xs = x.load([row, k])  # (BM, BK)
            Ws = W.load([k, column]) if W_BY_K else W.load([column, k]).T  # (BK, BN)
            acc = tl.dot(xs, Ws, acc, input_precision=PRECISION)
        acc = tl.dot(z, B.load([0, column]), acc, input_precision=PRECISION)  # (WIDTH, BN)
        y.store([row, column], acc.to(z.dtype))  # (BM, BN)


def lora_tile(small, width, dtype, roomy):
    """Block sizes and launch options: a short fixed list, so that no shape is tuned at run time.

    WIDTH is 64 or 256: below 64 columns the tensor cores of a Hopper wait for x anyway, so they cost the same.
    roomy: a GPU with the copy engine and 227 KiB of shared memory (H100, H200, B200).
    """
    WIDTH, stages = 64 if width <= 64 else 256, 3 if roomy else 2
    if dtype == torch.float32:
        sizes = dict(BM=64, BN=64, BK=32, num_warps=4)
    elif small:
        sizes = dict(BM=64, BN=64, BK=64, num_warps=4 if WIDTH == 64 else 8)
    elif WIDTH == 64:
        sizes = dict(BM=128, BN=256, BK=64, num_warps=8) if roomy else dict(BM=128, BN=128, BK=32, num_warps=8)
    else:
        sizes = dict(BM=128, BN=128, BK=64, num_warps=8) if roomy else dict(BM=64, BN=64, BK=32, num_warps=8)
    return dict(sizes, WIDTH=WIDTH, GROUP=8, DESCRIPTORS=roomy, num_stages=stages)


def lora_slots(M, N, tile, processors):
    """How many programs share the blocks of BM rows; each takes its blocks one after another.

    Time goes in rounds: a program needs its blocks and, once, z (WIDTH / BN of a block); as many programs run at a time
    as there are processors. Few long programs compute z rarely, many short ones leave no processor idle.
    """
    rows, columns = -(-M // tile["BM"]), -(-N // tile["BN"])
    cost = {}
    for blocks in range(1, 17):
        slots = -(-columns // blocks)
        cost[slots] = -(-rows * slots // processors) * (-(-columns // slots) + tile["WIDTH"] / tile["BN"])
    return min(cost, key=cost.get)


def fp32_precision():
    """How kernels multiply fp32: in tf32 if torch may, else as three tf32 products, nearly exact (AMD: in fp32)."""
    if torch.version.hip is not None:
        return "ieee"
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "tf32x3"


def device_facts(device):
    """Number of multiprocessors; whether it has the room and the copy engine for the large tiles."""
    if device.type != "cuda":
        return 1, False
    facts = torch.cuda.get_device_properties(device)
    room = getattr(facts, "shared_memory_per_block_optin", 0) >= 220_000
    return facts.multi_processor_count, room and torch.version.hip is None


def copy_engine(device):
    """Whether descriptors come from the host: compute capability 9.0 and up."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device)[0] >= 9


def aligned(t):
    """A matrix as descriptors read it, last stride 1 and rows on 16-byte boundaries: itself, or a padded copy."""
    step = 16 // t.element_size()
    if t.stride(1) == 1 and t.stride(0) % step == 0 and t.stride(0) >= t.shape[1] and t.data_ptr() % 16 == 0:
        return t
    return t.new_empty(t.shape[0], -(-t.shape[1] // step) * step)[:, :t.shape[1]].copy_(t)


def lora_triton(x, W, A, B, branch, scale):
    """As lora_reference, by the kernel."""
    (M, K), N, (branches, rank, _) = x.shape, W.shape[0], A.shape
    if M * N * K == 0:
        return x.new_zeros(M, N)
    processors, roomy = device_facts(x.device)
    small = 2 * -(-M // 128) * -(-N // 256) < processors or M <= 64  # large blocks would leave half of them idle
    tile = lora_tile(small, branches * rank, x.dtype, roomy)
    tile["DESCRIPTORS"] |= copy_engine(x.device)  # made in the kernel, they would need scratch memory there
    slots = lora_slots(M, N, tile, processors)
    by_k = W.stride(1) != 1 and W.stride(0) == 1  # a transposed view, as in the backward, is read as it lies
    y = x.new_empty(M, -(-N * x.element_size() // 16) * 16 // x.element_size())[:, :N]
    B = B.mT if branches == 1 else B.mT.where(used_branches(branch, branches)[:, None, None], 0)
    matrices = [aligned(t) for t in (x, W.mT if by_k else W, A.flatten(0, 1), B.flatten(0, 1))] + [y]
    strides = [t.stride(0) for t in matrices]
    if tile["DESCRIPTORS"]:
        BM, BN, BK, WIDTH = (tile[name] for name in ("BM", "BN", "BK", "WIDTH"))
        shapes = [BM, BK], [BK, BN] if by_k else [BN, BK], [WIDTH, BK], [WIDTH, BN], [BM, BN]
        matrices = [TensorDescriptor.from_tensor(t, shape) for t, shape in zip(matrices, shapes)]
    branch = branch.long().clamp(-1, branches).int()  # an index that int32 cannot hold must not become a good one
    with torch.cuda.device_of(x):
        lora_kernel[(-(-M // tile["BM"]) * slots,)](
            *matrices, branch.contiguous(), scale, M, N, K, branches * rank, rank, M // len(branch), slots, *strides,
            W_BY_K=by_k, PRECISION=fp32_precision() if x.dtype == torch.float32 else "ieee", **tile)
    return y.contiguous()


def check_branch(branch, branches):
    """ValueError for an index out of range; looks at the numbers, so a GPU is waited for."""
    branch = branch.long()  # in int8 200 branches would wrap around
    bad = branch[(branch < 0) | (branch >= branches)]
    if bad.numel():
        raise ValueError(f"lora_linear: branch {int(bad[0])} with {branches} branches: accepted are 0..{branches - 1}; "
                         "correct the index (for the plain base model call F.linear)")


@custom_op("kernels::lora_linear", mutates_args=())
def lora_op(x: Tensor, W: Tensor, A: Tensor, B: Tensor, branch: Tensor, scale: float, check: bool) -> Tensor:
    if check or branch.device.type == "cpu":
        check_branch(branch, len(A))
    with torch.autocast(x.device.type, enabled=False):  # lora_linear has cast already; float32 here is meant
        run = lora_triton if triton_runs(x, A.shape[0] * A.shape[1]) else lora_reference
        return run(x, W, A, B, branch, scale)


@lora_op.register_fake
def _(x, W, A, B, branch, scale, check):
    return x.new_empty(x.shape[0], W.shape[0])


@custom_op("kernels::lora_grads", mutates_args=())
def lora_grads_op(dy: Tensor, x: Tensor, A: Tensor, B: Tensor, branch: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """dA_j = scale * sum over j's rows of (dy B_j)^T x;   dB_j = scale * sum over j's rows of dy^T (x A_j^T).

    Plain products on both paths: the same masked stacks, summed over rows by the library's GEMM, which splits long sums
    well and in a fixed order. A kernel of ours would need atomics, or a second pass, to do the same.
    """
    with torch.autocast(x.device.type, enabled=False):
        (branches, rank, K), N = A.shape, dy.shape[1]
        used = used_branches(branch, branches)[:, None, None]  # without rows: zeros, also where x or dy hold NaN
        u = own_columns(dy @ B.transpose(0, 1).flatten(1) * scale, branch, branches)  # (M, R)
        z = own_columns(x @ A.flatten(0, 1).mT * scale, branch, branches)  # (M, R)
        dA = (u.mT @ x).view(branches, rank, K).where(used, 0)
        dB = (z.mT @ dy).view(branches, rank, N).where(used, 0)
        return dA, dB.mT.contiguous()


@lora_grads_op.register_fake
def _(dy, x, A, B, branch, scale):
    return A.new_empty(A.shape), B.new_empty(B.shape)


def lora_setup(ctx, inputs, output):
    x, W, A, B, branch, ctx.scale, _ = inputs
    ctx.save_for_backward(x, W, A, B, branch)


def lora_backward(ctx, dy):
    """dx = dy W + scale * (dy B_j) A_j is lora_linear again, of transposed views; dW = dy^T x if W asks for it."""
    x, W, A, B, branch = ctx.saved_tensors
    needs = ctx.needs_input_grad
    dx = lora_op(dy, W.mT, B.mT, A.mT, branch, ctx.scale, False) if needs[0] else None
    dW = dy.mT @ x if needs[1] else None
    dA, dB = lora_grads_op(dy, x, A, B, branch, ctx.scale) if needs[2] or needs[3] else (None, None)
    return dx, dW, dA if needs[2] else None, dB if needs[3] else None, None, None, None


lora_op.register_autograd(lora_backward, setup_context=lora_setup)


def check_lora(x, W, A, B, branch):
    """One-line ValueErrors for what can be seen without looking at the numbers."""
    shapes = f"x {tuple(x.shape)}, W {tuple(W.shape)}, A {tuple(A.shape)}, B {tuple(B.shape)}"
    if W.ndim != 2 or A.ndim != 3 or B.ndim != 3 or x.ndim < 1 or not x.shape[-1] == W.shape[1] == A.shape[2] or \
            tuple(B.shape) != (A.shape[0], W.shape[0], A.shape[1]) or 0 in A.shape[:2]:
        raise ValueError(f"lora_linear: {shapes}: must be (..., K), (N, K), (branches, rank, K), (branches, N, rank); "
                         "give a single adapter a first axis of 1")
    if len({x.device, W.device, A.device, B.device}) > 1:
        raise ValueError(f"lora_linear: x on {x.device}, W on {W.device}, A on {A.device}, B on {B.device}: must be on "
                         "one device; move them")
    if branch is None:
        if len(A) > 1:
            raise ValueError(f"lora_linear: branch None with {len(A)} branches: give an integer per row of x")
        return
    if not isinstance(branch, Tensor):
        raise ValueError(f"lora_linear: branch is a {type(branch).__name__}: must be a tensor of integers")
    if branch.dtype not in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64):
        raise ValueError(f"lora_linear: branch of dtype {branch.dtype}: must be integers; convert with .long()")
    if branch.shape != x.shape[:branch.ndim] or branch.ndim >= x.ndim or branch.device != x.device:
        raise ValueError(f"lora_linear: branch {tuple(branch.shape)} on {branch.device} for x {tuple(x.shape)} on "
                         f"{x.device}: its shape must be {tuple(x.shape[:-1])} or begin it; expand or move it")


def autocast(*tensors):
    """The tensors as F.linear would take them: in autocast's dtype if it is on (float64 stays as it is)."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    return [t if t.dtype == torch.float64 else t.to(torch.get_autocast_dtype(device)) for t in tensors]


def lora_linear(x, W, A, B, scale, branch=None, check=False):
    """x W^T + scale * (x A_j^T) B_j^T, j the branch of the row. -> (..., N), in the dtype that F.linear(x, W) has.

    x (..., K), W (N, K), A (branches, rank, K), B (branches, N, rank); scale a number: alpha / rank, not alpha.
    branch: integers, one per row (x.shape[:-1]) or per leading index, e.g. (B,) for x (B, T, K); not needed if there is
    one branch. A and B are cast to x's dtype, gradients come in their own. An index out of range is a ValueError on a
    CPU; on a GPU too with check=True, which waits for the device, else that row is NaN. What is inf or NaN in a branch
    that some row uses, or in a row, reaches others through 0 * inf. Under autocast each call casts W anew; hold W in
    autocast's dtype where that costs too much memory.
    """
    check_lora(x, W, A, B, branch)
    if isinstance(scale, Tensor):
        raise ValueError("lora_linear: scale is a tensor, which would get no gradient; give a number, alpha / rank")
    floating = x.is_floating_point()  # before autocast makes it so
    x, W, A, B = autocast(x, W, A, B)
    if x.dtype != W.dtype or not floating:
        raise ValueError(f"lora_linear: x {x.dtype} with W {W.dtype}: must be one floating dtype; cast one of them, or "
                         "run under torch.autocast")
    if branch is None:
        branch = torch.zeros(1, dtype=torch.int32, device=x.device)
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])  # (M, K)
    y = lora_op(rows, W, A.to(x.dtype), B.to(x.dtype), branch.reshape(-1), float(scale), check)
    return y.view(*x.shape[:-1], W.shape[0])


def merge_lora(W, A_j, B_j, scale):
    """W + scale * B_j A_j, computed in float32 at least. W (N, K), A_j (rank, K), B_j (N, rank) -> (N, K) as W."""
    if A_j.ndim != 2 or B_j.ndim != 2 or tuple(W.shape) != (len(B_j), A_j.shape[1]) or len(A_j) != B_j.shape[1]:
        raise ValueError(f"merge_lora: W {tuple(W.shape)}, A_j {tuple(A_j.shape)}, B_j {tuple(B_j.shape)}: must be "
                         "(N, K), (rank, K), (N, rank); choose one branch first, A[j] and B[j]")
    wide = torch.promote_types(W.dtype, torch.float32)
    with torch.autocast(W.device.type, enabled=False):
        return (W.to(wide) + scale * (B_j.to(wide) @ A_j.to(wide))).to(W.dtype)


# ---- pack: rows[i] = x[the i-th selected token]; backward: dx = d_rows there, 0 elsewhere


def pack_reference(x, flat):
    """x (M, C), flat (k,) int64 row numbers -> (k, C)."""
    return x.index_select(0, flat)


def spread_reference(rows, slot):
    """rows (k, C), slot (M,): number of the row that a token takes, -1 = none -> (M, C), zeros where none."""
    out = rows.new_zeros(len(slot), rows.shape[1])
    return out.index_copy_(0, (slot >= 0).nonzero().squeeze(1), rows)


@jit(do_not_specialize=["M"])
def take_kernel(source, index, out, M, C, ROWS: tl.constexpr, COLS: tl.constexpr):
    """One program: ROWS of the M rows of out, COLS columns: source[index], or zeros where index is -1.

    It serves both ways: pack takes tokens by their number, its backward takes rows by their slot and writes the zeros
    between them in the same pass. Every element is moved once, nothing is computed.
    """
    blocks = tl.cdiv(C, COLS)
    row = tl.program_id(0) // blocks * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(0) % blocks * COLS + tl.arange(0, COLS)
    i = tl.load(index + row, mask=row < M, other=-1)  # (ROWS,)
    ok = (i >= 0)[:, None] & (c < C)[None, :]
    moved = tl.load(source + offset(i, C)[:, None] + c[None, :], mask=ok, other=0)  # (ROWS, COLS)
    tl.store(out + offset(row, C)[:, None] + c[None, :], moved, mask=(row < M)[:, None] & (c < C)[None, :])


def move_tile(C, elements=4096):
    """Rows and columns of a block of about `elements`: 32 per thread, four 16-byte loads in flight in bf16."""
    COLS = min(1 << max(C - 1, 0).bit_length(), 1024)
    return dict(ROWS=max(1, min(128, elements // COLS)), COLS=COLS, num_warps=4)


def launch(kernel, tensors, M, C, *sizes, elements=4096, whole_rows=False):
    """Run a kernel of this family over M rows of C columns."""
    tile = move_tile(C, elements)
    blocks = 1 if whole_rows else -(-C // tile["COLS"])
    if M * C:
        with torch.cuda.device_of(tensors[0]):
            kernel[(-(-M // tile["ROWS"]) * blocks,)](*(t.contiguous() for t in tensors), M, *sizes, C, **tile)


def slots_of(mask):
    """mask (B, T) -> (B * T,) int32: number of a selected token in order, -1 for the others."""
    flat = mask.flatten()
    return torch.where(flat, flat.cumsum(0, dtype=torch.int32) - 1, -1).int()


@custom_op("kernels::pack", mutates_args=())
def pack_op(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """x (B, T, C), mask (B, T) -> rows (k, C), their numbers (k,) int64 in the flat (B * T)."""
    flat = mask.flatten().nonzero().squeeze(1)  # (k,); k is known on the host from here on: a GPU is waited for
    x = x.flatten(0, 1)  # (M, C)
    if not triton_runs(x):
        return pack_reference(x, flat), flat
    rows = x.new_empty(len(flat), x.shape[1])
    launch(take_kernel, (x, flat, rows), *rows.shape)
    return rows, flat


@pack_op.register_fake
def _(x, mask):
    k = torch.library.get_ctx().new_dynamic_size()
    return x.new_empty(k, x.shape[2]), mask.new_empty(k, dtype=torch.int64)


@custom_op("kernels::spread", mutates_args=())
def spread_op(rows: Tensor, mask: Tensor) -> Tensor:
    """rows (k, C), mask (B, T) -> (B, T, C), zeros where not selected."""
    slot, C = slots_of(mask), rows.shape[1]
    if not triton_runs(rows):
        return spread_reference(rows, slot).view(*mask.shape, C)
    out = rows.new_empty(*mask.shape, C)
    launch(take_kernel, (rows, slot, out), len(slot), C)
    return out


@spread_op.register_fake
def _(rows, mask):
    return rows.new_empty(*mask.shape, rows.shape[1])


def pack_setup(ctx, inputs, output):
    ctx.save_for_backward(inputs[1])
    ctx.mark_non_differentiable(output[1])


def pack_backward(ctx, d_rows, _):
    return spread_op(d_rows, *ctx.saved_tensors), None


pack_op.register_autograd(pack_backward, setup_context=pack_setup)


def check_mask(name, x, mask):
    if mask.dtype != torch.bool or x.ndim != 3 or mask.shape != x.shape[:2] or mask.device != x.device:
        raise ValueError(f"{name}: mask {mask.dtype} {tuple(mask.shape)} on {mask.device} with x {tuple(x.shape)} on "
                         f"{x.device}: must be bool (B, T) for x (B, T, C); make it by a comparison, p > tau")


def pack(x, mask):
    """The selected tokens of all sequences, one after another. x (B, T, C), mask (B, T) bool -> three tensors:

    rows (k, C); cu_seqlens (B + 1,) int32, where each sequence's rows begin, and k; positions (k,) int64, their t.
    """
    check_mask("pack", x, mask)
    rows, flat = pack_op(x, mask)
    cu_seqlens = F.pad(mask.sum(dim=1).cumsum(0), (1, 0)).int()  # (B + 1,)
    return rows, cu_seqlens, flat % max(mask.shape[1], 1)


# ---- unpack_fuse: out = w x_d[slot] + (1 - w) x_v with w = beta p where selected; x_v, to the bit, elsewhere
#
# Backward, g = d_out: d_x_v = (1 - w) g, d_x_d = w g, d_w = sum over C of g (x_d - x_v); d_p = beta d_w and
# d_beta = sum of p d_w. Where not selected d_x_v = g and d_w = 0.


def unpack_reference(x_v, x_d, p, beta, slot):
    """x_v (M, C), x_d (k, C), p (M,), beta (), slot (M,) -> (M, C)."""
    flat = (slot >= 0).nonzero().squeeze(1)  # (k,)
    wide = torch.promote_types(x_v.dtype, torch.float32)
    w = (beta.to(wide) * p[flat].to(wide))[:, None]  # (k, 1)
    fused = w * x_d.to(wide) + (1 - w) * x_v[flat].to(wide)
    return x_v.clone(memory_format=torch.contiguous_format).index_copy_(0, flat, fused.to(x_v.dtype))


def unpack_grads_reference(g, x_v, x_d, p, beta, slot):
    """-> d_x_v (M, C), d_x_d (k, C), d_w (M,) float32 or float64."""
    flat = (slot >= 0).nonzero().squeeze(1)  # (k,)
    wide = torch.promote_types(x_v.dtype, torch.float32)
    w, gs = (beta.to(wide) * p[flat].to(wide))[:, None], g[flat].to(wide)  # (k, 1), (k, C)
    d_x_v = g.clone(memory_format=torch.contiguous_format).index_copy_(0, flat, ((1 - w) * gs).to(g.dtype))
    d_w = torch.zeros(len(p), dtype=wide, device=p.device)
    d_w.index_copy_(0, flat, (gs * (x_d.to(wide) - x_v[flat].to(wide))).sum(dim=1))
    return d_x_v, (w * gs).to(x_d.dtype), d_w


@jit(do_not_specialize=["M", "k"])
def unpack_kernel(x_v, x_d, p, beta, slot, out, M, k, C, ROWS: tl.constexpr, COLS: tl.constexpr):
    """One program: ROWS tokens, COLS columns. The blend is fp32: in bf16, 1 - w loses the small w in it."""
    blocks = tl.cdiv(C, COLS)
    row = tl.program_id(0) // blocks * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(0) % blocks * COLS + tl.arange(0, COLS)
    ok = (row < M)[:, None] & (c < C)[None, :]
    source = tl.load(slot + row, mask=row < M, other=-1)  # (ROWS,)
    chosen = source >= 0
    w = (tl.load(beta).to(tl.float32) * tl.load(p + row, mask=chosen, other=0).to(tl.float32))[:, None]  # (ROWS, 1)
    at = offset(row, C)[:, None] + c[None, :]
    v = tl.load(x_v + at, mask=ok)  # (ROWS, COLS)
    d = tl.load(x_d + offset(source, C)[:, None] + c[None, :], mask=ok & (chosen & (source < k))[:, None],
                other=float("nan"))  # (ROWS, COLS); a row that x_d lacks shows up as NaN
    fused = w * d.to(tl.float32) + (1 - w) * v.to(tl.float32)
    tl.store(out + at, tl.where(chosen[:, None], fused.to(v.dtype), v), mask=ok)


@jit(do_not_specialize=["M", "k"])
def unpack_grads_kernel(g, x_v, x_d, p, beta, slot, d_x_v, d_x_d, d_w, M, k, C,
                        ROWS: tl.constexpr, COLS: tl.constexpr):
    """One program: ROWS tokens, whole rows, so that it alone sums each d_w: no atomics. Sums in fp32."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    source = tl.load(slot + row, mask=row < M, other=-1)  # (ROWS,)
    chosen = (source >= 0) & (source < k)
    w = (tl.load(beta).to(tl.float32) * tl.load(p + row, mask=chosen, other=0).to(tl.float32))[:, None]  # (ROWS, 1)
    total = tl.zeros((ROWS, COLS), dtype=tl.float32)
    for start in range(0, C, COLS):
        c = start + tl.arange(0, COLS)
        ok = (row < M)[:, None] & (c < C)[None, :]
        both = ok & chosen[:, None]
        at, at_d = offset(row, C)[:, None] + c[None, :], offset(source, C)[:, None] + c[None, :]
        gs = tl.load(g + at, mask=ok, other=0)  # (ROWS, COLS)
        v = tl.load(x_v + at, mask=both, other=0).to(tl.float32)  # (ROWS, COLS)
        d = tl.load(x_d + at_d, mask=both, other=0).to(tl.float32)  # (ROWS, COLS)
        wide = gs.to(tl.float32)
        total += tl.where(both, wide * (d - v), 0.0)
        tl.store(d_x_v + at, tl.where(chosen[:, None], ((1 - w) * wide).to(gs.dtype), gs), mask=ok)
        tl.store(d_x_d + at_d, (w * wide).to(d_x_d.dtype.element_ty), mask=both)
    tl.store(d_w + row, tl.sum(total, axis=1), mask=row < M)


@custom_op("kernels::unpack_fuse", mutates_args=())
def unpack_op(x_v: Tensor, x_d: Tensor, p: Tensor, beta: Tensor, mask: Tensor, check: bool) -> Tensor:
    if check or mask.device.type == "cpu":
        check_count(x_d, mask)
    slot, (M, C) = slots_of(mask), (mask.numel(), x_v.shape[2])
    v, p, beta = x_v.flatten(0, 1), p.flatten(), beta.reshape(())
    if not triton_runs(v):
        return unpack_reference(v, x_d, p, beta, slot).view(x_v.shape)
    out = x_v.new_empty(x_v.shape)
    launch(unpack_kernel, (v, x_d, p, beta, slot, out), M, C, len(x_d))
    return out


@unpack_op.register_fake
def _(x_v, x_d, p, beta, mask, check):
    return x_v.new_empty(x_v.shape)


@custom_op("kernels::unpack_fuse_grads", mutates_args=())
def unpack_grads_op(g: Tensor, x_v: Tensor, x_d: Tensor, p: Tensor, beta: Tensor, mask: Tensor) -> \
        tuple[Tensor, Tensor, Tensor, Tensor]:
    slot, (M, C) = slots_of(mask), (mask.numel(), x_v.shape[2])
    flat = (g.flatten(0, 1), x_v.flatten(0, 1), x_d, p.flatten(), beta.reshape(()), slot)
    if triton_runs(x_v):
        d_x_v, d_x_d = x_v.new_empty(M, C), x_d.new_zeros(x_d.shape)  # zeros: x_d may have rows too many
        d_w = torch.zeros(M, dtype=torch.float32, device=p.device)
        launch(unpack_grads_kernel, (*flat, d_x_v, d_x_d, d_w), M, C, len(x_d), elements=2048, whole_rows=True)
    else:
        d_x_v, d_x_d, d_w = unpack_grads_reference(*flat)
    d_w = d_w.view(mask.shape)
    d_p = beta.to(d_w.dtype) * d_w
    d_beta = (p.to(d_w.dtype).where(mask, 0) * d_w).sum()
    return d_x_v.view(x_v.shape), d_x_d, d_p.to(p.dtype), d_beta.to(beta.dtype).reshape(beta.shape)


@unpack_grads_op.register_fake
def _(g, x_v, x_d, p, beta, mask):
    return x_v.new_empty(x_v.shape), x_d.new_empty(x_d.shape), p.new_empty(p.shape), beta.new_empty(beta.shape)


def unpack_setup(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:5])


def unpack_backward(ctx, g):
    return *unpack_grads_op(g, *ctx.saved_tensors), None, None


unpack_op.register_autograd(unpack_backward, setup_context=unpack_setup)


def check_count(x_d, mask):
    if len(x_d) != mask.sum():
        raise ValueError(f"unpack_fuse: x_d has {len(x_d)} rows for {int(mask.sum())} selected tokens; use "
                         "the mask that x_d was packed with")


def unpack_fuse(x_v, x_d, p, beta, mask, check=False):
    """Put the packed rows back, blended: beta p x_d + (1 - beta p) x_v where mask, x_v elsewhere. -> (B, T, C) as x_v.

    x_v (B, T, C), x_d (k, C), p (B, T), beta a number or a tensor of one, mask (B, T) bool with k True. dtypes may
    differ. Another number of rows is a ValueError on a CPU; on a GPU too with check=True, which waits for the device.
    """
    check_mask("unpack_fuse", x_v, mask)
    if not isinstance(beta, Tensor):
        beta = torch.tensor(float(beta), device=x_v.device)
    if p.shape != mask.shape or x_d.ndim != 2 or x_d.shape[1] != x_v.shape[2] or beta.numel() != 1:
        raise ValueError(f"unpack_fuse: x_v {tuple(x_v.shape)}, x_d {tuple(x_d.shape)}, p {tuple(p.shape)}, beta "
                         f"{tuple(beta.shape)}: must be (B, T, C), (k, C), (B, T) and one element; reshape them")
    return unpack_op(x_v, x_d, p, beta, mask, check)


# ---- every configuration, compiled ahead of time: no GPU needed


def compile_one(kernel, types, constants, target, options):
    """Compile as a launch would: `types` of the tensors and numbers that are no constants; other arguments are int32.

    Addresses and the sizes of rows are told to be multiples of 16, as those of real models are.
    """
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
    even = ("N", "K", "C", "R", "rank", "x_m", "W_row", "A_c", "B_c", "y_m")
    attributes = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names)
                  if signature[name][0] == "*" or name in even}
    source = triton.compiler.ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=target, options=options)


def lora_configurations(target):
    """(label, types, constants, launch options) of lora_kernel for every dtype, tile, layout of W and precision."""
    hopper = target.backend == "cuda" and target.arch >= 90
    cases = [(dtype, small, width) for dtype in ("bf16", "fp16") for small in (False, True) for width in (64, 256)]
    for dtype, small, width in cases + [("fp32", True, 64)]:
        tile = lora_tile(small, width, torch.float32 if dtype == "fp32" else torch.bfloat16, hopper)
        options = {name: tile.pop(name) for name in ("num_warps", "num_stages")}
        BM, BN, BK, WIDTH = (tile[name] for name in ("BM", "BN", "BK", "WIDTH"))
        fp32 = ("tf32", "tf32x3") if target.backend == "cuda" else ("ieee",)
        for by_k, precision in ((by_k, p) for by_k in (False, True) for p in (fp32 if dtype == "fp32" else ("ieee",))):
            shapes = dict(x=(BM, BK), W=(BK, BN) if by_k else (BN, BK), A=(WIDTH, BK), B=(WIDTH, BN), y=(BM, BN))
            types = {t: f"tensordesc<{dtype}[{i}, {j}]>" if hopper else f"*{dtype}" for t, (i, j) in shapes.items()}
            label = f"lora {dtype} {BM}x{BN}x{BK}+{WIDTH} {'dx' if by_k else 'y'} {precision}"
            constants = dict(tile, W_BY_K=by_k, PRECISION=precision)
            yield label, types | dict(branch="*i32", scale="fp32"), constants, options


def move_configurations():
    """(label, kernel, types, constants, launch options) of the pack family, for every dtype and kind of index."""
    types = dict(slot="*i32", p="*fp32", beta="*fp32", d_w="*fp32")
    cases = ((take_kernel, 4096, "*i64"), (take_kernel, 4096, "*i32"), (unpack_kernel, 4096, ""),
             (unpack_grads_kernel, 2048, ""))
    for dtype in ("bf16", "fp16", "fp32"):
        for kernel, elements, index in cases:
            tile = move_tile(2048, elements)
            tensors = [name for name in kernel.arg_names if name not in ("M", "k", "C", *tile)]
            options = {"num_warps": tile.pop("num_warps")}
            types_here = {name: f"*{dtype}" for name in tensors} | types | dict(index=index)
            yield f"{kernel.fn.__name__} {dtype} {index[1:]}", kernel, types_here, tile, options


def compile_ahead(target):
    """Compile all for GPUTarget("cuda", 90, 32), GPUTarget("hip", "gfx942", 64), ...; yields (label, compiled)."""
    for label, types, constants, options in lora_configurations(target):
        yield label, compile_one(lora_kernel, types, constants, target, options)
    for label, kernel, types, constants, options in move_configurations():
        yield label, compile_one(kernel, types, constants, target, options)


# ---- python kernels.py: check every operation on this machine, then time it

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}  # largest error / largest value
LORA_SHAPES = {  # name: M on a GPU, M on a CPU, K, N, branches, rank
    "odd": (123, 123, 41, 77, 3, 5),
    "Qwen3-1.7B up": (8192, 64, 2048, 6144, 1, 16),
    "Huginn qkv": (4096, 32, 5280, 3 * 5280, 4, 16),
    "Huginn proj": (4096, 64, 5280, 5280, 4, 16),
    "Huginn qkv, decoding": (8, 8, 5280, 3 * 5280, 4, 16),
}
PACK_SHAPES = {  # name: B on a GPU, B on a CPU, T, C, share selected
    "odd": (3, 3, 123, 41, 0.5),
    "Qwen3-1.7B, 20 %": (8, 1, 4096, 2048, 0.2),
    "Qwen3-1.7B, all": (8, 1, 4096, 2048, 1.0),
}


def timed(run, device):
    """Median seconds of a call; on a GPU with a cold L2 cache, as in a model."""
    if device == "cuda" and triton is not None:
        return triton.testing.do_bench(run, return_mode="median") / 1000
    run()
    times = []
    while len(times) < 3 or (sum(times) < 0.3 and len(times) < 50):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def error(got, want):
    """Largest error relative to the largest value, over pairs of tensors."""
    pairs = [(g.double(), w.double()) for g, w in zip(got, want) if w.numel()]
    errors = [(g - w).abs().max() / w.abs().max().clamp(min=1e-30) for g, w in pairs]
    return torch.stack(errors).max().item()  # unlike Python's max, this keeps a nan


def compare(run, inputs, which, exact):
    """run(*inputs) and its gradients for the inputs in `which`, against the same of `exact` in float64.

    -> (output, its gradient, errors of output and gradients).
    """
    def all_of(function, tensors):
        leaves = [t.requires_grad_(i in which) if t.is_floating_point() else t for i, t in enumerate(tensors)]
        y = function(*leaves)
        dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y)
        return y, dy, torch.autograd.grad(y, [leaves[i] for i in which], dy, retain_graph=True)

    y, dy, grads = all_of(run, inputs)
    y64, _, grads64 = all_of(exact, [t.detach().double() if t.is_floating_point() else t for t in inputs])
    return y, dy, (error([y.detach()], [y64.detach()]), error(grads, grads64))


def exact_lora(x, W, A, B, branch, scale):
    """Branch by branch, without stacking."""
    y = x @ W.mT
    for j in range(len(A)):
        y = y + (branch == j)[:, None] * (scale * (x @ A[j].mT) @ B[j].mT)
    return y


def exact_unpack(x_v, x_d, p, beta, mask):
    rows = torch.zeros_like(x_v).masked_scatter(mask[..., None], x_d)
    w = torch.where(mask, beta * p, 0)[..., None]
    return w * rows + (1 - w) * x_v


def lora_rows(device, dtype, peak):
    """Yields rows of the table: op, shape, error, seconds, rate, ratios and share of the roofline."""
    for name, (M_gpu, M_cpu, K, N, branches, rank) in LORA_SHAPES.items():
        M = M_gpu if device == "cuda" else M_cpu
        make = torch.Generator(device).manual_seed(0)
        x, W, A, B = (torch.randn(shape, generator=make, device=device, dtype=dtype) * shape[-1] ** -0.5
                      for shape in ((M, K), (N, K), (branches, rank, K), (branches, N, rank)))
        branch = torch.randint(branches, (M,), generator=make, device=device)
        y, dy, errors = compare(lambda *t: lora_linear(*t, 2.0, branch), [x, W, A, B], (0, 2, 3),
                                lambda *t: exact_lora(*t, branch, 2.0))
        x, W, A, B = (t.detach() for t in (x, W, A, B))
        flops, size = 2 * M * N * K + 2 * M * rank * (N + K), sum(t.numel() for t in (x, W, A, B, y)) * x.element_size()
        best = max(flops / peak[0], size / peak[1]) if peak else None
        plain = timed(lambda: F.linear(x, W), device)
        unfused = timed(lambda: lora_reference(x, W, A, B, branch, 2.0), device)
        seconds = timed(lambda: lora_linear(x, W, A, B, 2.0, branch), device)
        shape = f"{name} {M}x{K}->{N}, {branches}x{rank}"
        yield ("lora_linear", shape, errors[0], seconds, f"{flops / seconds / 1e12:.3g} TFLOP/s", unfused / seconds,
               plain / seconds, best and best / seconds)
        seconds = timed(lambda: lora_op(dy, W.mT, B.mT, A.mT, branch, 2.0, False), device)
        unfused = timed(lambda: lora_reference(dy, W.mT, B.mT, A.mT, branch, 2.0), device)
        yield ("  dx", shape, errors[1], seconds, f"{flops / seconds / 1e12:.3g} TFLOP/s", unfused / seconds,
               timed(lambda: dy @ W, device) / seconds, best and best / seconds)
        seconds = timed(lambda: lora_grads_op(dy, x, A, B, branch, 2.0), device)
        flops = 4 * M * rank * branches * (N + K)
        rate = f"{flops / seconds / 1e12:.3g} TFLOP/s"
        yield "  dA, dB", shape, errors[1], seconds, rate, 1.0, plain / seconds, None


def pack_rows(device, dtype, peak):
    for name, (B_gpu, B_cpu, T, C, share) in PACK_SHAPES.items():
        B = B_gpu if device == "cuda" else B_cpu
        make = torch.Generator(device).manual_seed(0)
        x = torch.randn(B, T, C, generator=make, device=device, dtype=dtype)
        p = torch.rand(B, T, generator=make, device=device)
        mask, beta = p <= share, torch.tensor(0.1, device=device)
        rows, drows, errors = compare(lambda x: pack(x, mask)[0], [x], (0,), lambda x: x[mask])
        x, rows = x.detach(), rows.detach()
        out, g, fused = compare(lambda *t: unpack_fuse(*t, mask), [x, rows * 2, p, beta], (0, 1, 2, 3),
                                lambda *t: exact_unpack(*t, mask))
        x, p, beta = x.detach(), p.detach(), beta.detach()
        flat, slot, e = mask.flatten().nonzero().squeeze(1), slots_of(mask), x.element_size()
        k, M = len(rows), B * T
        v, q, gs = x.flatten(0, 1), p.flatten(), g.flatten(0, 1)
        cases = (
            ("pack", errors[0], 2 * k, lambda: pack_op(x, mask), lambda: pack_reference(v, flat)),
            ("  dx", errors[1], k + M, lambda: spread_op(drows, mask), lambda: spread_reference(drows, slot)),
            ("unpack_fuse", fused[0], 2 * M + k, lambda: unpack_op(x, rows, p, beta, mask, False),
             lambda: unpack_reference(v, rows, q, beta, slot)),
            ("  gradients", fused[1], 2 * M + 3 * k, lambda: unpack_grads_op(g, x, rows, p, beta, mask),
             lambda: unpack_grads_reference(gs, v, rows, q, beta, slot)),
        )
        for op, wrong, moved, run, fallback in cases:
            seconds = timed(run, device)
            yield (op, f"{name} {B}x{T}x{C}, k {k}", wrong, seconds, f"{moved * C * e / seconds / 1e9:.3g} GB/s",
                   timed(fallback, device) / seconds, None, peak and moved * C * e / peak[1] / seconds)


def measured_peak(dtype):
    """FLOP/s of a large product and bytes/s of a large copy on this GPU: what the shares of the roofline refer to."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=dtype) for _ in range(2))
    big = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    other = torch.empty_like(big)
    return 2 * 8192**3 / timed(lambda: a @ b, "cuda"), 2 * 2**30 / timed(lambda: other.copy_(big), "cuda")


def main():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    runs = "Triton kernels" if device == "cuda" and triton is not None else "PyTorch fallback (the kernels need a GPU)"
    name = torch.cuda.get_device_name() if device == "cuda" else f"cpu, {torch.get_num_threads()} threads"
    print(f"path: {runs} on {name}, {dtype}; torch {torch.__version__}, triton {triton and triton.__version__}")
    peak = measured_peak(dtype) if device == "cuda" else None
    if peak:
        print(f"measured here: product {peak[0] / 1e12:.0f} TFLOP/s, copy {peak[1] / 1e9:.0f} GB/s")
    print("error: largest / largest value, against float64; x fallback, linear: its time / ours (linear: x W^T alone)")
    print(f"{'op':<12} {'shape':<47} {'error':>8} {'ms':>9} {'rate':>14} x fallback x linear roofline")
    worst = 0
    for rows in (lora_rows, pack_rows):
        for op, shape, wrong, seconds, rate, fallback, linear, share in rows(device, dtype, peak):
            worst = wrong if not wrong <= worst else worst  # a nan stays
            linear, share = "" if linear is None else f"{linear:.2f}", "" if share is None else f"{share:.0%}"
            print(f"{op:<12} {shape:<47} {wrong:>8.1e} {seconds * 1e3:>9.3f} {rate:>14} {fallback:>10.2f} {linear:>8} "
                  f"{share:>8}", flush=True)
    if not worst <= TOLERANCE[dtype]:
        sys.exit(f"an error of {worst:.1e} is above {TOLERANCE[dtype]:.0e} for {dtype}: do not use this path here")
    print(f"all errors at most {TOLERANCE[dtype]:.0e}")


if __name__ == "__main__":
    main()
