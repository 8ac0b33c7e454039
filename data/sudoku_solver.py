"""Sudoku boards: solver, difficulty, generator, symmetries. Boxes may be of any shape with a side up to 9; numpy only.

    solutions, guesses = solve(puzzle, (3, 3))              # puzzle: 81 digits, 0 = blank
    puzzles, solutions, guesses = generate(1000, (3, 3), clues=0, guesses=22, seed=0)
    canonical(puzzle, solution, (3, 3))                     # bytes, the same for puzzles that differ only in looks

A box has rows x columns cells: box = (2, 3) makes a 6x6 board. side = rows * columns, T = side * side cells; every
unit (row, column, box) holds each of the digits 1..side once. A band is a row of boxes, a stack a column of boxes. A
board is an array of T digits, row by row, 0 = blank; N boards are (N, T).

Difficulty is counted in guesses: the trial placements of a backtracking search that fills in every cell with one
candidate left (naked single) and every digit with one place left in a unit (hidden single), as long as there are any,
and else tries each candidate of the first cell with the fewest, until the solution is found and proved to be the only
one. 0 guesses: singles are enough. Random minimal 9x9 puzzles need 4 on average; Sudoku-Extreme is published at 22.
"""
import functools
import itertools
from collections import namedtuple

import numpy as np
from tqdm import tqdm


# ----------------------------------------------------------------------------------------------------------------------
# The board. Units are numbered: rows 0..side-1, then columns, then boxes.

Geometry = namedtuple("Geometry", "side cells all_digits unit_cells cell_units")


@functools.lru_cache
def geometry(box):
    """side; cells = T; all_digits = the mask with every digit; unit_cells (side, 3 side): the k-th cell of each unit;
    cell_units (3, T): the row, the column and the box of each cell."""
    side = box[0] * box[1]
    row, column = np.divmod(np.arange(side * side), side)
    cell_units = np.stack([row, side + column, 2 * side + row // box[0] * box[0] + column // box[1]])
    unit_cells = np.stack([np.flatnonzero((cell_units == unit).any(0)) for unit in range(3 * side)], axis=1)
    return Geometry(side, side * side, (1 << side) - 1, unit_cells, cell_units)


# ----------------------------------------------------------------------------------------------------------------------
# The solver. A state is one mask per cell: bit d-1 is set while digit d is still possible. Many states are worked on at
# once, as an array (T, M): the last axis is contiguous, so each step of the loops below is one fast pass over M states.

NUM_BITS = np.array([bin(mask).count("1") for mask in range(1 << 9)], np.uint8)


def to_masks(digits, box):
    """Digits (N, T), 0 = blank -> masks (T, N) uint16."""
    bits = np.array([geometry(box).all_digits] + [1 << d for d in range(geometry(box).side)], np.uint16)
    return np.ascontiguousarray(bits[digits].T)


def _sweep(masks, box):
    """Apply naked and hidden singles once, everywhere: masks (T, M) -> new masks, dead (M,) bool: a contradiction."""
    g = geometry(box)
    naked = masks * (masks & (masks - 1) == 0)  # x & (x - 1) is 0 for a single bit (products beat np.where by far)
    both = np.stack([masks, naked])  # of each unit: which digits are possible somewhere, and which are placed
    once = np.zeros((2, 3 * g.side, masks.shape[1]), np.uint16)  # in at least one cell of the unit
    twice = np.zeros_like(once)  # in at least two
    for k in range(g.side):
        seen = both.take(g.unit_cells[k], axis=1)
        twice |= once & seen
        once |= seen
    dead = (once[0] != g.all_digits).any(0) | (twice[1] != 0).any(0) | (masks == 0).any(0)
    placed = np.bitwise_or.reduce(once[1][g.cell_units])  # (3, T, M) -> (T, M), digits placed in the cell's units
    only_here = np.bitwise_or.reduce((once[0] & ~twice[0])[g.cell_units])
    masks = masks & ~placed | naked
    only_here &= masks
    # Two digits that both fit only here are a contradiction: keeping one leaves the other no place, seen next time.
    return (only_here & -only_here) | masks * (only_here == 0), dead


def to_digits(masks):
    """Masks (T, N) of solved boards -> digits (N, T) uint8."""
    return NUM_BITS[masks - 1].T + np.uint8(1)  # the bit of d is 1 << d - 1; that less one has d - 1 bits set


def _pop(stack, chunk):
    """Take the topmost `chunk` states, or fewer, off a list of blocks (states (T, M), owner (M,))."""
    states, owners, room = [], [], chunk
    while stack and room:
        state, owner = stack.pop()
        if len(owner) > room:
            stack.append((state[:, :-room], owner[:-room]))
        states.append(state[:, -room:])
        owners.append(owner[-room:])
        room -= len(owners[-1])
    return np.concatenate(states, axis=1), np.concatenate(owners)


def _split(states):
    """One child per candidate of the first cell with the fewest: states (T, M) -> parent (K,), children (T, K)."""
    count = NUM_BITS[states]
    cell = np.where(count == 1, 99, count).argmin(0)  # 99: cells that are filled in already do not compete
    possible = states[cell, np.arange(len(cell))] >> np.arange(9)[:, None] & 1  # (9, M)
    digit, parent = np.nonzero(possible)
    # First choices come last, on top of the stack: with a limit, the others of a state may never be needed.
    order = np.argsort(-possible.cumsum(0, dtype=np.int64)[digit, parent], kind="stable")
    digit, parent = digit[order], parent[order]
    children = states[:, parent]
    children[cell[parent], np.arange(len(parent))] = 1 << digit
    return parent, children


def search(masks, box, limit=0, chunk=512):
    """Solve N puzzles, given as masks (T, N) uint16, at once.

    Returns owner (K,) and solutions (K, T) uint8: the solutions found, each with the puzzle it belongs to; and guesses
    (N,) int64. With a limit, a puzzle is given up once it has that many solutions (a few more may be returned); 0 =
    find all. A puzzle that is not given up is searched to the end: its guesses do not depend on the search's order.

    One pool of states holds all puzzles at all depths. Each round takes `chunk` of them (more would leave the cache of
    the processor), sweeps once, drops the dead, books the solved, and splits those that singles no longer change.
    """
    g, N = geometry(box), masks.shape[1]
    found, guesses = np.zeros(N, np.int64), np.zeros(N, np.int64)
    owners, solutions = [np.zeros(0, np.int64)], [np.zeros((0, g.cells), np.uint8)]
    stack = [(masks, np.arange(N))]
    while stack:
        state, owner = _pop(stack, chunk)
        wanted = found[owner] < (limit or np.inf)
        state, owner = state[:, wanted], owner[wanted]
        swept, dead = _sweep(state, box)
        still = (swept == state).all(0) & ~dead
        solved = still & (NUM_BITS[swept] == 1).all(0)
        owners.append(owner[solved])
        solutions.append(to_digits(swept[:, solved]))
        found += np.bincount(owner[solved], minlength=N)
        stuck, moving = still & ~solved, ~still & ~dead
        parent, child = _split(swept[:, stuck])
        guesses += np.bincount(owner[stuck][parent], minlength=N)
        blocks = [(child, owner[stuck][parent]), (swept[:, moving], owner[moving])]
        stack += [block for block in blocks if block[1].size]
    return np.concatenate(owners), np.concatenate(solutions), guesses


def solve(puzzle, box, limit=2):
    """Solve one puzzle, (T,) digits with 0 = blank. Returns (solutions (K, T) uint8, guesses int).

    The search ends once `limit` solutions are known (0 = find all). A guess is a trial placement as defined at the top;
    with one solution (or none) they are counted to the very end, as the proof that there is no other takes some too.
    """
    _, solutions, guesses = search(to_masks(np.asarray(puzzle)[None], box), box, limit)
    return solutions[:limit or None], int(guesses[0])


def rate(puzzles, box):
    """Solve puzzles (N, T): number of solutions (N,), 2 = several; one solution (N, T) uint8 or 0s; guesses (N,)."""
    count, solutions = np.zeros(len(puzzles), np.int64), np.zeros(puzzles.shape, np.uint8)
    guesses, slices = np.zeros(len(puzzles), np.int64), range(0, len(puzzles), 4096)
    for i in tqdm(slices, desc="solve", unit="block of 4096", delay=3, leave=False):
        part = slice(i, i + 4096)
        owner, found, guesses[part] = search(to_masks(puzzles[part], box), box, limit=2)
        solutions[part][owner] = found
        count[part] = np.minimum(np.bincount(owner, minlength=len(count[part])), 2)
    return count, solutions, guesses


# ----------------------------------------------------------------------------------------------------------------------
# The generator: fill boards at random, remove clues while the solution stays unique, choose by difficulty.

def fill(number, box, rng):
    """`number` random full boards, (number, T) uint8: random digits go into random cells with the fewest candidates."""
    g = geometry(box)
    boards, owner = np.zeros((number, g.cells), np.uint8), np.arange(number)
    state = np.full((g.cells, number), g.all_digits, np.uint16)
    while owner.size:
        swept, dead = _sweep(state, box)
        swept[:, dead] = g.all_digits  # a dead end starts over: it happens seldom enough
        still = (swept == state).all(0)
        full = still & (NUM_BITS[swept] == 1).all(0)
        boards[owner[full]] = to_digits(swept[:, full])
        state, owner, still = swept[:, ~full], owner[~full], np.flatnonzero(still[~full])
        count = NUM_BITS[state[:, still]]
        cell = (np.where(count == 1, 99, count) + rng.random(count.shape)).argmin(0)
        possible = state[cell, still] >> np.arange(g.side)[:, None] & 1  # (side, M)
        state[cell, still] = 1 << (rng.random(possible.shape) * possible).argmax(0)
    return boards


def dig(boards, box, clues, rng):
    """Remove digits of full boards (N, T) in random order, but none that uniqueness needs, until `clues` are left.

    Returns puzzles (N, T); they may keep more than `clues` (0 makes them minimal).
    """
    puzzles, g = boards.copy(), geometry(box)
    order = rng.random(puzzles.shape).argsort(axis=1)
    for k in range(g.cells):
        todo = np.flatnonzero(np.count_nonzero(puzzles, axis=1) > clues)
        todo = todo[puzzles[todo, order[todo, k]] > 0]
        cell = order[todo, k]
        # The clue can go exactly when no solution has another digit in its cell: quicker than counting to two.
        masks = to_masks(puzzles[todo], box)
        masks[cell, np.arange(len(todo))] = g.all_digits & ~masks[cell, np.arange(len(todo))]
        needed, _, _ = search(masks, box, limit=1)
        free = np.setdiff1d(np.arange(len(todo)), needed)
        puzzles[todo[free], cell[free]] = 0
    return puzzles


def choose(ratings, number, wanted):
    """Rows of `number` puzzles whose mean rating is `wanted` (-1: any), or None if the pool cannot give that yet."""
    if len(ratings) < number or wanted == -1:
        return np.arange(number) if len(ratings) >= number else None
    order = ratings.argsort(kind="stable")
    sums = np.append(0, ratings[order].cumsum())
    means = (sums[number:] - sums[:-number]) / number  # of every run of neighbours in that order
    start = np.abs(means - wanted).argmin()
    return order[start:start + number] if means[0] <= wanted <= means[-1] else None


def generate(number, box, clues=0, guesses=-1, seed=0, avoid=None, most=100):
    """Random puzzles with exactly one solution, no two of them equal up to symmetry.

    clues: how many each has, 0 = minimal; guesses: their mean, -1 = whatever comes; avoid: (puzzles, solutions) that
    they must not equal up to symmetry. Returns puzzles (number, T) uint8 with 0 = blank, solutions (number, T) uint8,
    guesses (number,) int64. The same arguments give the same puzzles everywhere.

    The wanted mean is reached by choice: random puzzles are added to a pool until its hardest (or easiest) have it. So
    every puzzle comes from a board of its own and none is a neighbour of another, as they would be if hard puzzles were
    made by changing hard puzzles; and it is quicker. ValueError if `most` times `number` candidates will not do, or if
    hardly any new ones turn up.
    """
    rng, pool, ratings = np.random.default_rng([seed, 0]), [], np.zeros(0, np.int64)
    seen = set(signature(*avoid, box).tolist()) if avoid is not None else set()
    ask, tried, bar = number, 0, tqdm(desc="generate puzzles", unit="", delay=3, leave=False)
    while (chosen := choose(ratings, number, guesses)) is None:
        solutions = fill(min(ask, 2048), box, rng)
        puzzles = dig(solutions, box, clues, rng)
        names = signature(puzzles, solutions, box).tolist()
        fresh = [i for i, name in enumerate(names) if np.count_nonzero(puzzles[i]) == clues or not clues
                 if name not in seen and not seen.add(name)]
        pool.append((puzzles[fresh], solutions[fresh]))
        ratings = np.append(ratings, rate(puzzles[fresh], box)[2])
        tried += len(puzzles)
        if len(ratings) < number and len(ratings) < 0.01 * tried and tried > 2000:
            raise ValueError(f"only {len(ratings):,} of {number:,} essentially different puzzles with clues {clues} "
                             f"and box {box[0]}x{box[1]} turned up: raise --clues (0 = minimal) or lower --num_train")
        if tried > most * number + 5000 and len(ratings) >= number:
            raise ValueError(f"guesses {guesses:g} is out of reach: {len(ratings):,} random puzzles have a mean of "
                             f"{ratings.mean():.2f}; set --guesses nearer to that, or change --clues")
        missing = number - len(ratings) if len(ratings) < number else number  # the whole again: for a harder choice
        ask = max(32, missing * tried // max(len(ratings), 1) + 1)
        bar.update(len(fresh))
    bar.close()
    chosen = rng.permutation(chosen)  # choose() sorts by difficulty; splits are cut in order
    puzzles, solutions = (np.concatenate(arrays)[chosen] for arrays in zip(*pool))
    return puzzles, solutions, ratings[chosen]


# ----------------------------------------------------------------------------------------------------------------------
# Symmetries: what turns a puzzle into one that is the same but for its looks.

def random_symmetries(number, box, rng):
    """Draw symmetries: cells (number, T): where each cell comes from; tokens (number, side + 2): what becomes of each.

    Bands, rows in them, stacks, columns in them and digits are permuted; if boxes are square, half are transposed.
    """
    side = box[0] * box[1]

    def lines(groups, size):
        """Permuted groups (bands or stacks) of permuted lines: (number, side)."""
        group = rng.random((number, groups, 1)).argsort(axis=1)
        return (group * size + rng.random((number, groups, size)).argsort(axis=2)).reshape(number, side)

    cells = lines(box[1], box[0])[:, :, None] * side + lines(box[0], box[1])[:, None, :]  # row * side + column
    if box[0] == box[1]:
        cells = np.where(rng.random((number, 1, 1)) < 0.5, cells, cells.transpose(0, 2, 1))
    digits = rng.random((number, side)).argsort(axis=1) + 2  # token of digit d is d + 1
    pad_and_blank = np.broadcast_to([0, 1], (number, 2))
    return cells.reshape(number, side * side), np.concatenate([pad_and_blank, digits], axis=1)


def transform(boards, cells, tokens):
    """Apply symmetries to boards of tokens, (B, T) integer; returns (B, T) int64. A bijection that keeps solutions."""
    return np.take_along_axis(tokens, np.take_along_axis(boards, cells, axis=1).astype(np.int64), axis=1)


def augment(inputs, labels, box, rng):
    """A random symmetry of each puzzle and the same one of its solution: tokens (B, T) -> two arrays (B, T) int64."""
    cells, tokens = random_symmetries(len(inputs), box, rng)
    return transform(inputs, cells, tokens), transform(labels, cells, tokens)


@functools.lru_cache
def _column_orders(box):
    """All orders of the columns that keep the stacks together, (P, side)."""
    inside = list(itertools.permutations(range(box[1])))
    return np.array([[stack * box[1] + column for stack, columns in zip(stacks, choice) for column in columns]
                     for stacks in itertools.permutations(range(box[0]))
                     for choice in itertools.product(inside, repeat=box[0])])


def canonical(puzzle, solution, box):
    """bytes that are equal exactly for puzzles that are equal up to symmetry. puzzle, solution: (T,) digits, 0 = blank.

    Every column order and every row put first gives one candidate: digits are renamed so that the first row reads 1, 2,
    3..., rows and bands are sorted by their first digit, blanks are marked by adding `side`. The smallest one wins. The
    solution is part of it because all its digits tell the rows apart (the puzzle's own, with blanks, might not).
    """
    side, orders = box[0] * box[1], _column_orders(box)
    boards = np.stack([np.reshape(solution, (side, side)), np.reshape(puzzle, (side, side)) == 0])
    best = []
    for digit, blank in [boards, boards.transpose(0, 2, 1)][:1 + (box[0] == box[1])]:
        pattern = blank[:, orders] @ (1 << np.arange(side)[::-1])  # (side, P): blanks of the row, the first counts most
        row, order = np.nonzero(pattern == pattern.min())  # a first row with more early blanks cannot win
        digit, blank = digit[:, orders[order]].swapaxes(0, 1), blank[:, orders[order]].swapaxes(0, 1)  # (K, side, side)
        rename, k = np.zeros((len(row), side + 1), np.int64), np.arange(len(row))
        np.put_along_axis(rename, digit[k, row], np.arange(1, side + 1)[None], axis=1)
        digit = rename[k[:, None, None], digit]
        head = digit[:, :, 0]  # renamed first digits: all different, 1 in the row put first
        band_head = head.reshape(-1, box[1], box[0]).min(2).repeat(box[0], axis=1)
        rows = (band_head * (side + 1) + head).argsort(axis=1)
        candidates = np.take_along_axis(digit + side * blank, rows[:, :, None], axis=1).astype(np.uint8)
        best.append(min(candidate.tobytes() for candidate in candidates))
    return min(best)


def _mix(x):
    """Scramble uint64 values: the finaliser of splitmix64."""
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return x ^ x >> np.uint64(31)


def signature(puzzles, solutions, box, block=1 << 14):
    """(N, T) digits twice -> (N,) uint64, equal for puzzles that are equal up to symmetry, else almost surely not.

    Every cell starts from "clue or not" and repeatedly mixes in the sums over its row, column, box and digit. Lines up
    and across are treated alike, because transposition swaps them.
    """
    g, result = geometry(box), np.zeros(len(puzzles), np.uint64)
    for i in range(0, len(puzzles), block):  # blocks bound the memory: codes are 8 bytes per cell
        clue, solution = puzzles[i:i + block] > 0, solutions[i:i + block]
        by_digit = solution.argsort(axis=1, kind="stable")
        code = _mix(clue + np.uint64(1))
        for _ in range(4):
            units = sum(code[:, cells] for cells in g.unit_cells)  # (N, 3 side)
            digits = np.take_along_axis(code, by_digit, axis=1).reshape(-1, g.side, g.side).sum(2)
            rows, columns, boxes = (units[:, numbers] for numbers in g.cell_units)
            digits = np.take_along_axis(digits, solution - np.intp(1), axis=1)
            code = _mix(code + _mix(rows) + _mix(columns) + _mix(boxes + np.uint64(1)) + _mix(digits + np.uint64(2)))
        result[i:i + block] = _mix(code.sum(1))
    return result


def first_equal(puzzles, solutions, box):
    """(N, T) digits twice -> (N,): the index of the first puzzle equal to this one up to symmetry (its own if none)."""
    _, group, size = np.unique(signature(puzzles, solutions, box), return_inverse=True, return_counts=True)
    result, seen, known = np.arange(len(puzzles)), {}, {}
    for i in np.flatnonzero(size[group] > 1):  # equal signatures: the exact forms decide (ms each, so only here)
        text = puzzles[i].tobytes()
        if text not in known:
            known[text] = canonical(puzzles[i], solutions[i], box)
        result[i] = seen.setdefault(known[text], i)
    return result
