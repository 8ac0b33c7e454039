"""ARC grids as tokens, and the transformations of a task: pure functions of arrays.

A grid is an (h, w) uint8 array of colours 0..9, 1x1 to 30x30. As tokens it is a board of 30x30 = 900 cells, row by
row, as in the released HRM code: 0 = pad, 1 = end marker, c + 2 = colour c. End markers stand in the row below the
grid and in the column right of it, as long as it is, where the board has room for them. A board may be smaller, for
small grids: side cells each way, T = side * side.

    tokens = encode(grid)                                   # (900,) uint8, the grid in the top left corner
    decode(tokens)                                          # the grid again
    order, used = color_order(grids)                        # of all grids of a task
    numbers = augmentations(0, "arc1/007bbfb7", used, 1000) # (up to 1001,) int32; the first is 0, the identity
    dihedral, colors = transformations(numbers, order)      # (N,), (N, 10)
    invert(transform(grid, dihedral[5], colors[5]), dihedral[5], colors[5])     # the grid again

A transformation is one of the 8 symmetries of the square and a permutation of the colours that keeps 0 (black). Two
permutations that differ only in colours that a task does not have are the same to it. So with m colours besides black
a task has 8 * 9! / (9 - m)! transformations, numbered from 0 (the identity); numbers are drawn without repeats.
Two of them can still show the same grids where a task looks like itself, turned or recoloured; so do 2% of those of
ARC-1 and ConceptARC. They keep an id each: to find them would take minutes at every start.
"""
import math
import zlib

import numpy as np

SIDE = 30  # most rows and columns of a grid, and of the board
PAD, END, FIRST = 0, 1, 2  # FIRST is colour 0
VOCAB = FIRST + 10
TINTS = (16, 27, 160, 34, 220, 245, 201, 208, 117, 88)  # of a terminal with 256, for colours 0 to 9
DARK = (0, 1, 2, 6, 9)  # colours that white digits can be read on
MOST = 10_000  # augmentations of a task; far fewer than a task of five colours has, which is where drawing changes


def to_grid(rows, where):
    """A list of rows -> (h, w) uint8. ValueError, one line, if it is no grid; `where` names it."""
    try:
        grid = np.array(rows)
    except (ValueError, TypeError, OverflowError):  # ragged, or no numbers at all
        grid = np.zeros(0)
    if grid.ndim != 2 or grid.dtype.kind != "i" or not 1 <= min(grid.shape) <= max(grid.shape) <= SIDE:
        raise ValueError(f"{where} is not a grid; give 1 to {SIDE} rows of equal length, of 1 to {SIDE} whole numbers")
    if grid.min() < 0 or grid.max() > 9:
        raise ValueError(f"{where} holds {grid.min() if grid.min() < 0 else grid.max()}; colours are 0 to 9")
    return grid.astype(np.uint8)


def encode(grid, top=0, left=0, side=SIDE):
    """A grid (h, w) -> tokens (side * side,) uint8, with its first cell at row `top`, column `left` of the board."""
    bottom, right = top + grid.shape[0], left + grid.shape[1]
    board = np.full((side, side), PAD, np.uint8)
    board[top:bottom, left:right] = grid + np.uint8(FIRST)
    board[bottom : bottom + 1, left:right] = END  # an empty slice if the grid ends with the board
    board[top:bottom, right : right + 1] = END
    return board.reshape(-1)


def decode(tokens):
    """Tokens (T,) of any integer dtype -> the grid in the top left corner, (h, w) uint8, or None if there is none.

    Only the largest rectangle of colours from that corner counts (of equal ones the flattest); what lies beyond it may
    be anything, since pad cells are not scored in training. So ragged rows are cut to the shape that keeps most
    cells, and no grid is found only if the corner itself holds no colour.
    """
    side = math.isqrt(len(tokens))
    board = np.asarray(tokens).reshape(side, side)
    is_color = (board >= FIRST) & (board < VOCAB)
    widths = np.logical_and.accumulate(is_color, axis=1).sum(axis=1)  # colours that each row begins with
    widths = np.minimum.accumulate(widths)  # of a rectangle from the top down to each row
    height = int((widths * np.arange(1, side + 1)).argmax()) + 1
    grid = board[:height, : widths[height - 1]] - FIRST
    return grid.astype(np.uint8) if grid.size else None


def transform(grid, dihedral, colors):
    """Recolour a grid by colors (10,) uint8, transpose it if dihedral is 4..7, and turn it dihedral % 4 times."""
    grid = colors[grid]
    return np.rot90(grid.T if dihedral >= 4 else grid, dihedral % 4)


def invert(grid, dihedral, colors):
    """What transform made this grid of."""
    grid = np.rot90(grid, -(dihedral % 4))
    return np.argsort(colors).astype(np.uint8)[grid.T if dihedral >= 4 else grid]


def color_order(grids):
    """(colours 1..9 in the order that numbers a task's permutations (9,), how many of them its grids hold)."""
    seen = np.zeros(10, bool)
    for grid in grids:
        seen[grid] = True
    return np.r_[1:10][np.argsort(~seen[1:], kind="stable")], int(seen[1:].sum())  # those it holds come first


def count_transformations(used):
    """How many different transformations a task of `used` colours besides black has."""
    return 8 * math.perm(9, used)


def augmentations(seed, name, used, number):
    """The numbers of a task's transformations, (n,) int32 without repeats: 0, then up to `number` others at random.

    A pure function of the seed and the task's name, and the first ones do not depend on how many are asked for. A task
    of few colours may have fewer. number: at most MOST.
    """
    total, rng = count_transformations(used), np.random.default_rng([seed, zlib.crc32(name.encode())])
    if total <= 2**15:
        drawn = 1 + rng.permutation(total - 1)
    else:  # repeats are so rare that twice as many are always enough
        drawn = rng.integers(1, total, size=2 * number + 64)
        drawn = drawn[np.sort(np.unique(drawn, return_index=True)[1])]
    return np.r_[0, drawn[:number]].astype(np.int32)


def transformations(numbers, orders):
    """Numbers (N,) with the color_order (9,) or (N, 9) of their tasks -> (dihedral (N,) int64, colors (N, 10) uint8).

    The permutation is read digit by digit: the i-th colour of the order becomes the digit-th of those that are left.
    The digits of colours that the task does not hold are 0, and so are all digits of the identity.
    """
    rest, dihedral = np.divmod(np.asarray(numbers, np.int64), 8)
    left = orders = np.broadcast_to(orders, (len(rest), 9))
    colors, rows = np.zeros((len(rest), 10), np.uint8), np.arange(len(rest))
    for i in range(9):
        rest, digit = np.divmod(rest, 9 - i)
        colors[rows, orders[:, i]] = left[rows, digit]
        left = np.where(np.arange(8 - i) >= digit[:, None], left[:, 1:], left[:, :-1])  # without the one taken
    return dihedral, colors


def draw(grids, color=True):
    """[a grid] or [an answer's grid, the label's], each possibly None, as text: lines of equal width.

    A cell is its digit; in an answer, a ! follows where the label has another colour or no cell. None is a dot.
    """
    panels = [_lines(grid, grids[-1] if i == 0 else grid, color) for i, grid in enumerate(grids)]
    height = max(map(len, panels))
    blank = [" " * (2 if grid is None else 2 * grid.shape[1]) for grid in grids]
    columns = [panel + [space] * (height - len(panel)) for panel, space in zip(panels, blank)]
    return "\n".join(" | ".join(line) for line in zip(*columns))


def _lines(grid, target, color):
    """A grid (h, w) or None as lines of 2 w characters; a ! after cells that differ from the target (h', w')."""
    if grid is None:
        return [". "]
    wrong = np.ones(grid.shape, bool)
    if target is not None:
        h, w = np.minimum(grid.shape, target.shape)
        wrong[:h, :w] = grid[:h, :w] != target[:h, :w]

    def cell(digit, bad):
        text = f"{digit}{'!' if bad else ' '}"
        return f"\033[38;5;{231 if digit in DARK else 16};48;5;{TINTS[digit]}m{text}\033[0m" if color else text

    return ["".join(map(cell, *row)) for row in zip(grid.tolist(), wrong)]
