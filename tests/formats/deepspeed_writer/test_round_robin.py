"""An order that only some classes of the engine know: it must survive those that do not."""

from __future__ import annotations

import pytest

from restride import api
from restride.formats.deepspeed.reader import read_catalog
from restride.formats.opening import open_training
from restride.testing.contents import file_content
from restride.testing.saved_values import edit_file
from restride.testing.zero_files import Parameter, ZeroRun, write_zero_run
from restride.testing.zero_runs import distinct

# With this one ZeRO-1 is BF16_Optimizer, which deals out nothing, and ZeRO-2 is the usual class.
CONFIG = {
    "bf16": {"enabled": True},
    "data_types": {"grad_accum_dtype": "fp32"},
    "zero_optimization": {"stage": 2, "round_robin_gradients": True},
}


@pytest.fixture
def source(tmp_path):
    """Five parameters of ZeRO-2 with round-robin gradients, in the order 0 2 4 1 3."""
    parameters = {
        f"{n}.w": Parameter(
            (n + 2, 3),
            {s: distinct((n + 2, 3), 100 * n + 1000 * k) for k, s in enumerate(("fp32", "exp_avg"))}
            | {"weight": distinct((n + 2, 3), 100 * n)},
        )
        for n in range(5)
    }
    run = ZeroRun(2, 1, parameters, is_round_robin=True, has_mappings=False)
    write_zero_run(tmp_path / "run", run)
    for path in sorted((tmp_path / "run" / "step").iterdir()):
        edit_file(path, lambda root: root.update(ds_config=CONFIG))
        if path.name.startswith("zero"):
            path.rename(path.with_name(f"bf16_{path.name}"))
    return tmp_path / "run"


def names_of(folder):
    return [group.names for group in open_training(read_catalog(folder)).groups]


def listed_in(folder):
    model = file_content(folder / "step/mp_rank_00_model_states.pt")
    return [shapes[3] for shapes in model["param_shapes"][1]]


def test_the_order_of_the_model_is_told_of_files_of_either_class(source, tmp_path):
    api.convert(source, tmp_path / "plain", to="deepspeed", zero=1)

    assert listed_in(source) == [["0.w", "2.w", "4.w", "1.w", "3.w"]]
    assert listed_in(tmp_path / "plain") == [["0.w", "1.w", "2.w", "3.w", "4.w"]]
    assert names_of(source) == names_of(tmp_path / "plain") == [tuple(f"{n}.w" for n in range(5))]


@pytest.mark.parametrize("through", [{"to": "deepspeed", "zero": 1}, {"to": "universal"}, None])
def test_through_an_optimizer_that_deals_out_nothing_and_back(source, tmp_path, through):
    api.convert(source, tmp_path / "same", to="deepspeed", zero=2)
    api.convert(source, tmp_path / "there", to="deepspeed", zero=1)
    if through:
        api.convert(tmp_path / "there", tmp_path / "further", **through)

    middle = tmp_path / ("further" if through else "there")
    api.convert(middle, tmp_path / "back", to="deepspeed", zero=2, tp=1, dp=2)

    files = sorted(path.name for path in (tmp_path / "same" / "step").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "back" / "step").iterdir())
    for name in files:
        found, expected = (
            file_content(tmp_path / folder / "step" / name) for folder in ("back", "same")
        )
        assert found == expected, name


def test_ranks_that_lack_a_parameter_deal_out_in_another_order(tmp_path):
    """Their lists contradict each other; what was dealt out does not."""
    arrays = {"weight": 0, "fp32": 0, "exp_avg": 1000}
    shapes = {"a": (5, 5), "b": (1, 6), "c": (1, 1), "d": (1,), "e": (3,)}
    cuts = {"b": (0, (1, 0, 0)), "d": (0, (1, 0, 0))}
    parameters = {
        name: Parameter(
            shape,
            {s: distinct(shape, first + 100 * ord(name)) for s, first in arrays.items()},
            cuts.get(name),
        )
        for name, shape in shapes.items()
    }
    write_zero_run(tmp_path / "run", ZeroRun(4, 3, parameters, is_round_robin=True))

    api.convert(tmp_path / "run", tmp_path / "universal", to="universal")

    found = open_training(api.open(tmp_path / "universal")).groups
    assert [group.names for group in found] == names_of(tmp_path / "run") == [tuple("abcde")]
