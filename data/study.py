"""Networks that HRM is compared with: trained alike, in one table of exact accuracy against effective depth.

    for name, flags in variants("depth", config).items():   # config: an HRMConfig; flags: what differs, by field
        ...                                                 # train one (train.py --analysis depth does)
    print_study(results)

Effective depth is the number of blocks that a network applies one after another. Two studies:

    depth     the paper's figure 2: a plain transformer of D blocks; the same block applied D times (weight-tied, all
              of it with gradient); HRM, whose depth grows with its segments
    modules   HRM; the same with a single segment; one module with the blocks of both in place of H and L, as many
              blocks and segments; the same blocks once, which is the direct prediction by a transformer of that size

All have the same width, positions, loss, optimizer, data and number of steps. A step is one segment of a batch: where
puzzles take several segments, fewer of them are seen.
"""

from dataclasses import dataclass

from data.show import draw_lines, print_rows

STUDIES = ("depth", "modules")
DEPTHS = (2, 4, 8, 16)  # blocks of the plain and of the recurrent network


def one_module(n_layers, n_updates=1, grad_updates=0):
    """HRMConfig fields of a single module of n_layers blocks, applied n_updates times; grad_updates 0: all of them."""
    return dict(L_layers=0, H_layers=n_layers, H_cycles=n_updates, grad_updates=grad_updates or n_updates)


def variants(study, config):
    """Name of a network -> the flags in which it differs from HRM with this config: fields of HRMConfig and depths."""
    once = dict(halt_max_steps=1, depths="1")
    if study == "depth":
        return ({f"plain-{n}": one_module(n) | once for n in DEPTHS}
                | {f"recurrent-{n}": one_module(1, n) | once for n in DEPTHS} | {"hrm": {}})
    layers = config.H_layers + config.L_layers
    sizes = {"L": config.L_layers, "H": config.H_layers}
    trained = sum(sizes[level] for level in config.updates[-config.grad_updates :])
    single = one_module(layers, max(1, config.depth // layers), max(1, trained // layers))  # blocks, with gradient too
    return {"hrm": {}, "hrm-1-segment": once, "one-module": single, "direct": one_module(layers) | once}


@dataclass
class Result:
    """What one network of a study reached on the test split."""

    name: str
    parameters: int
    blocks: int  # that a segment applies
    scores: dict  # segments -> name -> (N,) scores, as Model.evaluate returns them

    def rows(self):
        """(segments, effective depth, name -> mean score) of each number of segments."""
        for segments, named in self.scores.items():
            yield segments, segments * self.blocks, {name: float(v.mean()) for name, v in named.items()}


def print_study(results, plot=""):
    """Print a line for each network and number of segments; plot: a .png file to draw to, "" for none.

    In the figure, networks whose names differ in a number alone ("plain-2") are one curve.
    """
    names = [name for name in next(results[0].rows())[-1] if name != "segments"]
    rows, curves = [], {}
    for result in results:
        family, _, number = result.name.rpartition("-")
        for segments, depth, scores in result.rows():
            rows.append((result.name, f"{result.parameters:,}", str(segments), str(depth), *map(scores.get, names)))
            curve = curves.setdefault(family if number.isdecimal() else result.name, [])
            curve.append((depth, scores["exact_accuracy"]))
    print()
    print_rows("network", ["parameters", "segments", "depth", *names], rows)
    if plot:
        draw_lines(plot, {name: (*zip(*points), "o-") for name, points in curves.items()}, base=2,
                   title="exact accuracy against effective depth", xlabel="blocks applied one after another",
                   ylabel="exact accuracy")
        print(f"wrote {plot}")
