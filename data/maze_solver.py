"""Mazes as grids: shortest paths, the rule that chooses one of them, the eight symmetries, and the generator.

    free, start, goal, styles = generate(1000, n=30, min_path=110, styles=["scatter", "rooms"], seed=0)
    path, moves = rule_path(free, start, goal)              # (1000, 30, 30) bool with S and G, (1000,)

N mazes of n x n cells are searched at once. Cells: free (N, n, n) bool, True where one can walk, or the same as bits:
(N, n) uint64, a word per row whose bit c is column c, so that one step of a search takes a few operations on words.
Places: start, goal (N,) int64, row * n + column. A move goes down, left, right or up; the outside is closed.

Many shortest paths may tie. The published set labels one of them by a rule, here `rule_path`: from the start, go to
the first of down, left, right, up that is one move nearer to the goal. The rule names directions, so a turned maze
must be labelled anew.
"""
import math

import numpy as np

LARGEST = 63  # columns that a word of 64 bits holds, with one to spare
MOVES = np.array([(1, 0), (0, -1), (0, 1), (-1, 0)])  # down, left, right, up: the order of the rule
TOKENS = "_# SGo"  # a character's place is its token; 0, the pad, has none
WALL, OPEN, START, GOAL, PATH = range(1, 6)
NAMES = {WALL: "wall", OPEN: "open cell", START: "S", GOAL: "G"}
PATIENCE = 5000  # layouts in a row without one that will do, after which the generator gives up


# ----------------------------------------------------------------------------------------------------------------------
# Searching.

def to_bits(cells):
    """(N, n, n) bool -> (N, n) uint64"""
    return (cells << np.arange(cells.shape[-1], dtype=np.uint64)).sum(axis=-1, dtype=np.uint64)


def to_cells(bits):
    """(N, n) uint64 -> (N, n, n) bool"""
    return (bits[..., None] >> np.arange(bits.shape[-1], dtype=np.uint64) & np.uint64(1)).astype(bool)


def one_cell(places, n):
    """(N,) places -> (N, n) bits with just that cell."""
    bits = np.zeros((len(places), n), np.uint64)
    bits[np.arange(len(places)), places // n] = np.uint64(1) << (places % n).astype(np.uint64)
    return bits


def flood(free, start):
    """Yield the cells that are 0, 1, 2, ... moves away from `start`, until there are none. All (N, n) bits."""
    one, left, layer = np.uint64(1), free & ~start, start
    while layer.any():
        yield layer
        near = layer << one | layer >> one
        near[:, 1:] |= layer[:, :-1]
        near[:, :-1] |= layer[:, 1:]
        layer = near & left
        left = left ^ layer


def count_moves(free, start, goal):
    """Moves of a shortest path within `free` (N, n, n) bool: (N,) int64, -1 where no path leads to the goal."""
    n = free.shape[-1]
    goal, moves = one_cell(goal, n), np.full(len(free), -1)
    for distance, layer in enumerate(flood(to_bits(free), one_cell(start, n))):
        moves[(layer & goal).any(axis=1)] = distance
        if (moves >= 0).all():
            break
    return moves


def rule_path(free, start, goal):
    """The shortest path that the rule chooses: (cells (N, n, n) bool, S and G among them, moves (N,) int64).

    Where no path leads to the goal, no cell and -1.
    """
    N, n, _ = free.shape
    layers, moves, start_bits = [], np.full(N, -1), one_cell(start, n)
    for distance, layer in enumerate(flood(to_bits(free), one_cell(goal, n))):
        layers.append(layer)
        moves[(layer & start_bits).any(axis=1)] = distance
        if (moves >= 0).all():
            break
    layers, rows = np.array(layers).reshape(len(layers), N, n), np.arange(N)  # (D, N, n): cells by moves to go
    place, path = np.stack([start // n, start % n], axis=1), np.zeros((N, n, n), bool)
    path[rows, place[:, 0], place[:, 1]] = moves >= 0
    for to_go in moves - 1 - np.arange(moves.max(initial=0))[:, None]:  # (N,) after each move
        rows = np.flatnonzero(to_go >= 0)
        near = place[rows, None] + MOVES  # (R, 4, 2)
        inside = ((near >= 0) & (near < n)).all(axis=-1)
        row, column = (near * inside[..., None]).transpose(2, 0, 1)
        nearer = layers[to_go[rows, None], rows[:, None], row] >> column.astype(np.uint64) & np.uint64(1)
        place[rows] += MOVES[(inside & (nearer == 1)).argmax(axis=1)]
        path[rows, place[rows, 0], place[rows, 1]] = True
    return path, moves


# ----------------------------------------------------------------------------------------------------------------------
# Tokens: mazes and their answers.

def to_tokens(texts, size):
    """Well-formed mazes as strings -> (N, T) uint8 tokens."""
    codes = np.zeros(128, np.uint8)
    codes[[ord(character) for character in TOKENS + "."]] = [*range(len(TOKENS)), OPEN]
    return codes[np.frombuffer("".join(texts).encode("ascii"), np.uint8)].reshape(len(texts), size * size)


def grids(tokens):
    """Tokens (N, T) -> free (N, n, n) bool, start, goal (N,) int64; a row must hold one S and one G."""
    n = math.isqrt(tokens.shape[1])
    return (tokens != WALL).reshape(-1, n, n), (tokens == START).argmax(axis=1), (tokens == GOAL).argmax(axis=1)


def label(inputs):
    """Mazes (N, T) tokens -> (labels (N, T) with the path that the rule chooses, moves (N,) int64, -1: no path)."""
    path, moves = rule_path(*grids(inputs))
    return np.where(path.reshape(inputs.shape) & (inputs == OPEN), inputs.dtype.type(PATH), inputs), moves


def marked(inputs, answers):
    """(cells that an answer changes in another way than open to path (N, T) bool; moves from S to G on its path, -1:
    none; cells that it marks beside those that so many moves need), (N,) int64."""
    n = math.isqrt(inputs.shape[1])
    changed = (answers != inputs) & ((answers != PATH) | (inputs != OPEN))
    on_path = (answers == PATH) | (inputs == START) | (inputs == GOAL)
    moves = count_moves(on_path.reshape(-1, n, n), *grids(inputs)[1:])
    return changed, moves, on_path.sum(axis=1) - 1 - moves


def shortest(inputs, labels, answers):
    """Is an answer a shortest path and nothing else? All (N, T) tokens; labels have some shortest path. (N,) bool."""
    changed, moves, stray = marked(inputs, answers)
    return ~changed.any(axis=1) & (moves == (labels == PATH).sum(axis=1) + 1) & (stray == 0)


def complaint(inputs, answer):
    """Why an answer (T,) marks no shortest path of a maze (T,), which has one; '' if it does."""
    size = math.isqrt(len(inputs))
    (changed,), (moves,), (stray,) = marked(inputs[None], answer[None])
    least = label(inputs[None])[1][0]
    if changed.any():
        cell = changed.argmax()
        return (f"the {NAMES[inputs[cell]]} at row {cell // size + 1} column {cell % size + 1} was changed "
                f"({changed.sum()} such cells)")
    if moves < 0:
        return "the marked cells do not lead from S to G"
    if moves > least:
        return f"the marked path takes {moves} moves, the shortest {least}"
    return f"{stray} marked cells are not on the path" if stray else ""


# ----------------------------------------------------------------------------------------------------------------------
# Symmetries.

def transform(cells, kind):
    """One of the eight symmetries, kind 0 (none) to 7, of grids (..., n, n): mirrored upside down, sideways, both."""
    cells = cells.swapaxes(-1, -2) if kind & 4 else cells
    return cells[..., ::-1 if kind & 1 else 1, ::-1 if kind & 2 else 1]


def random_symmetries(cells, rng):
    """A symmetry drawn anew for each of the grids (N, n, n) of any dtype."""
    kinds, moved = rng.integers(8, size=len(cells)), cells.copy()
    for kind in range(1, 8):
        moved[kinds == kind] = transform(cells[kinds == kind], kind)
    return moved


def canonical(free):
    """For each layout (N, n, n) bool, bytes that are the same for its eight symmetries and for no other layout."""
    flat = (len(free), free.shape[-1] ** 2)
    looks = [np.packbits(transform(free, kind).reshape(flat), axis=1) for kind in range(8)]
    return [min(look.tobytes() for look in eight) for eight in zip(*looks)]


# ----------------------------------------------------------------------------------------------------------------------
# Generating: layouts (number, n, n) bool of one style.

def scatter(number, n, rng):
    """Walls without a pattern, as in the published set: each cell is one with the maze's own chance."""
    chance = rng.uniform(0.32, 0.44, (number, 1, 1))
    return rng.integers(256, size=(number, n, n), dtype=np.uint8) >= 256 * chance


def _tree(n, newest, rng):
    """Corridors that join all cells with an even row and column in one way each: (n, n) bool.

    A tree grows from one of them. It goes on from its newest cell with the chance `newest`, else from any.
    """
    m = (n + 1) // 2
    free = np.zeros((n, n), bool)
    random = iter(rng.random(9 * m * m).tolist())  # a draw by itself costs more than the rest of a step
    cell = int(next(random) * m * m)
    seen, growing = {cell}, [cell]
    free[2 * (cell // m), 2 * (cell % m)] = True
    while growing:
        index = -1 if next(random) < newest else int(next(random) * len(growing))
        row, column = divmod(growing[index], m)
        near = [(row + a, column + b) for a, b in ((1, 0), (0, -1), (0, 1), (-1, 0))
                if 0 <= row + a < m and 0 <= column + b < m and (row + a) * m + column + b not in seen]
        if not near:
            growing.pop(index)
            continue
        r, c = near[int(next(random) * len(near))]
        seen.add(r * m + c)
        growing.append(r * m + c)
        free[2 * r, 2 * c] = free[row + r, column + c] = True
    return free


def _knock(free, share, rng):
    """Open up to a share of all cells at random, which makes loops; shift what an even n leaves at the edges."""
    free = free | (rng.random(free.shape) < rng.uniform(0, share, (len(free), 1, 1)))
    if free.shape[1] % 2 == 0:
        free = np.stack([np.roll(maze, rng.integers(2, size=2), axis=(0, 1)) for maze in free])
    return free


def corridors(number, n, rng):
    """Long winding corridors (depth-first carving) with a few loops."""
    return _knock(np.stack([_tree(n, 1.0, rng) for _ in range(number)]), 0.1, rng)


def branches(number, n, rng):
    """Many short dead ends (between depth-first and Prim's carving) with a few loops."""
    return _knock(np.stack([_tree(n, 0.5, rng) for _ in range(number)]), 0.03, rng)


def _divided(n, rng):
    """Rooms: an open square is cut in two by a wall with a door or two, and so are its parts. (n, n) bool.

    Walls stand in odd rows and columns and doors in even ones, so that no wall ends in front of a door.
    """
    free, parts, random = np.ones((n, n), bool), [(0, n, 0, n)], iter(rng.random(4 * n * n).tolist())
    while parts:
        top, bottom, left, right = parts.pop()
        height, width = bottom - top, right - left
        if min(height, width) < 3 or (max(height, width) <= 5 and next(random) < 0.2):
            continue
        lies = next(random) < height / (height + width)
        low, high, start, end = (top, bottom, left, right) if lies else (left, right, top, bottom)
        wall = low + 1 + 2 * int(next(random) * ((high - low - 1) // 2))
        doors = [start + 2 * int(next(random) * ((end - start + 1) // 2)) for _ in range(1 + (next(random) < 0.25))]
        if lies:
            free[wall, left:right], free[wall, doors] = False, True
            parts += [(top, wall, left, right), (wall + 1, bottom, left, right)]
        else:
            free[top:bottom, wall], free[doors, wall] = False, True
            parts += [(top, bottom, left, wall), (top, bottom, wall + 1, right)]
    return free


def rooms(number, n, rng):
    """Rooms with doors, some of them large and empty."""
    return np.stack([_divided(n, rng) for _ in range(number)])


STYLES = {style.__name__: style for style in (scatter, corridors, branches, rooms)}


def _pick(cells, rng):
    """A random one of the True cells of each grid (N, n, n) bool: its place (N,). Some place, where there is none."""
    flat = cells.reshape(len(cells), -1)
    return (rng.random(flat.shape, dtype=np.float32) * flat).argmax(axis=1)


def far_ends(free, min_path, rng):
    """Two places that are more than min_path moves apart, the same ones in either order: (start, goal, found), (N,).

    One is as far as can be from a random cell, the other a random one of those that are far enough from it. Long
    paths are rare, and two random cells would hardly ever have one.
    """
    n, bits = free.shape[1], to_bits(free)
    far = one_cell(_pick(free, rng), n)
    for layer in flood(bits, far):
        far = np.where(layer.any(axis=1)[:, None], layer, far)
    start = _pick(to_cells(far), rng)
    far = np.zeros_like(bits)
    for distance, layer in enumerate(flood(bits, one_cell(start, n))):
        far |= layer if distance > min_path else np.uint64(0)
    found = far.any(axis=1) & free.any(axis=(1, 2))
    goal, swap = _pick(to_cells(far), rng), rng.random(len(free)) < 0.5
    return np.where(swap, goal, start), np.where(swap, start, goal), found


def generate(number, n, min_path, styles, seed, avoid=()):
    """Different mazes whose shortest path takes more than min_path moves, as many of each style as of the others.

    styles: list of names in STYLES. avoid: canonical layouts that must not come up. No two mazes have the same walls,
    not even turned or mirrored. Returns (free (N, n, n) bool, start, goal (N,) int64, style (N,) str), mixed.
    ValueError, one line, if 5,000 layouts in a row will not do.
    """
    none = np.zeros(0, int)
    made, seen = [(np.zeros((0, n, n), bool), none, none, none.astype(str))], set(avoid)
    for index, style in enumerate(styles):
        rng, need, idle = np.random.default_rng([seed, 2, index]), len(range(index, number, len(styles))), 0
        while need:
            free = STYLES[style](min(32 + 2 * need, 2048), n, rng)
            start, goal, found = far_ends(free, min_path, rng)
            rows = np.flatnonzero(found)
            new = [row for row, form in zip(rows, canonical(free[rows])) if form not in seen and not seen.add(form)]
            made.append([part[new[:need]] for part in (free, start, goal, np.full(len(free), style))])
            need -= len(new[:need])
            idle = 0 if new else idle + len(free)
            if idle >= PATIENCE:
                raise ValueError(f"{n}x{n} mazes in style {style}: {idle:,} in a row had no shortest path of more than "
                                 f"{min_path} moves, or were not new; lower --min_path or --num_train, or leave "
                                 f"{style} out of --styles")
    order = np.random.default_rng([seed, 3]).permutation(number)
    return tuple(np.concatenate(parts)[order] for parts in zip(*made))
