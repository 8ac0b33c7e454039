"""The networks that HRM is compared with: what they are, the table, the figure. What train.py does is in test_train.py.

    python -m pytest tests/test_study.py -q
"""

import importlib.util

import pytest
import torch

from data.study import DEPTHS, STUDIES, Result, print_study, variants
from hrm import HRM, PRESETS, HRMConfig


def build(config, flags):
    """The model of a network of a study, from the flags that train.py would be given."""
    fields = {**vars(config), **flags}
    depths = fields.pop("depths", None)
    model = HRM(HRMConfig(**fields))
    assert depths in (None, str(model.config.halt_max_steps)), "a net is tested as it was trained"
    return model


def count(model):
    return sum(p.numel() for p in model.parameters())


def test_networks_of_the_depth_study_have_the_depth_in_their_name():
    config = PRESETS["nano-6x6"]
    models = {name: build(config, flags) for name, flags in variants("depth", config).items()}
    assert len(models) == 2 * len(DEPTHS) + 1 and vars(models.pop("hrm").config) == vars(config)
    for name, model in models.items():
        kind, depth = name.split("-")
        c = model.config
        assert c.depth == int(depth) and c.halt_max_steps == 1 and c.grad_updates == len(c.updates) == c.H_cycles
        assert len(model.H_level.layers) == (int(depth) if kind == "plain" else 1) and not len(model.L_level.layers)
    assert len({count(models[f"recurrent-{n}"]) for n in DEPTHS}) == 1, "weight-tied"
    sizes = [count(models[f"plain-{n}"]) for n in DEPTHS]
    assert sizes[3] - sizes[2] == 2 * (sizes[2] - sizes[1]) == 4 * (sizes[1] - sizes[0]), "a block for each"


@pytest.mark.parametrize("name, updates, trained", [("nano-6x6", 1, 1), ("paper", 3, 1)])
def test_one_module_has_the_blocks_of_both(name, updates, trained):
    config = PRESETS[name]
    with torch.device("meta"):
        models = {name: build(config, flags) for name, flags in variants("modules", config).items()}
    c, single, direct = (models[name].config for name in ("hrm", "one-module", "direct"))
    assert len({count(model) for model in models.values()}) == 1, "the same parameters"
    assert (single.depth, single.halt_max_steps) == (c.depth, c.halt_max_steps)
    assert (len(single.updates), single.grad_updates) == (updates, trained), "as many blocks, and with gradient"
    assert (direct.depth, direct.halt_max_steps) == (c.H_layers + c.L_layers, 1)
    once = models["hrm-1-segment"].config
    assert {**vars(once), "halt_max_steps": c.halt_max_steps} == vars(c) and once.halt_max_steps == 1


def results():
    def scores(right):
        return {"exact_accuracy": torch.tensor([1.0, right]), "accuracy": torch.ones(2), "segments": torch.ones(2)}
    return [Result("plain-2", 1000, 2, {1: scores(0.0)}), Result("plain-4", 2000, 4, {1: scores(1.0)}),
            Result("hrm", 1234567, 6, {1: scores(0.0), 16: scores(1.0)})]


def test_a_line_for_each_network_and_number_of_segments(capsys):
    print_study(results())
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line]
    assert lines == [["network", "parameters", "segments", "depth", "exact_accuracy", "accuracy"],
                     ["plain-2", "1,000", "1", "2", "0.5000", "1.0000"],
                     ["plain-4", "2,000", "1", "4", "1.0000", "1.0000"],
                     ["hrm", "1,234,567", "1", "6", "0.5000", "1.0000"],
                     ["hrm", "1,234,567", "16", "96", "1.0000", "1.0000"]]


@pytest.mark.skipif(not importlib.util.find_spec("matplotlib"), reason="matplotlib, which is optional, is missing")
def test_the_figure_is_a_png(tmp_path, capsys):
    print_study(results(), str(tmp_path / "x.png"))
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG") and "wrote" in capsys.readouterr().out


def test_studies_are_those_that_there_are():
    assert all(variants(study, PRESETS["nano"]) for study in STUDIES)
