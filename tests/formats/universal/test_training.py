"""A universal folder carries the training of its source: all that is no tensor."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from restride import api
from restride.checkpoint.dtypes import DTYPES
from restride.checkpoint.values import StoredTensor
from restride.errors import CorruptError, UnsupportedError
from restride.formats.deepspeed.training import read_training as read_source
from restride.formats.opening import open_training
from restride.formats.universal import read_training
from restride.testing.saved_values import edit_file, save_file
from restride.testing.zero_files import ZeroRun, write_zero_run
from restride.testing.zero_runs import parameter

OPTIMIZER_FILE = "step/zero_pp_rank_{}_mp_rank_{:02d}_optim_states.pt"


PARAMETERS = {
    "embed.weight": parameter(0, (6, 4), (0, (4, 2))),
    "norm.weight": parameter(9_000, (5,), group=1),
    "down.weight": parameter(5_000, (3, 8), (1, (4, 4))),
    "up.weight": parameter(3_000, (8, 3), (0, (4, 4))),
    "bias": parameter(7_000, (3,), group=1),
    "empty.on.rank.0": parameter(8_000, (2, 2), (0, (0, 2))),
}


def universal(folder, parameters=PARAMETERS, **options):
    options = {"dp": 2, "tp": 2, **options}
    write_zero_run(folder / "in", ZeroRun(parameters=dict(parameters), **options))
    api.convert(folder / "in", folder / "out", to="universal")
    return folder / "out"


def comparable(value):
    """What is the same in two files: tensors by dtype and shape, places nowhere."""
    match value:
        case StoredTensor():
            return value.storage.dtype, value.shape
        case dict():
            return {key: comparable(entry) for key, entry in value.items()}
        case list() | tuple():
            return [comparable(entry) for entry in value]
        case _:
            return value


def without_places(training):
    ranks = tuple(
        replace(rank, where="", values=comparable(rank.values)) for rank in training.ranks
    )
    return replace(training, ranks=ranks, optimizer=comparable(training.optimizer))


@pytest.mark.parametrize("options", [{}, {"is_round_robin": True}, {"dp": 3, "tp": 1}])
def test_it_is_the_training_of_the_source(tmp_path, options):
    options |= {"extra": {"iteration": 7, "lr_scheduler": {"last": 1}, "client": [1, (2,), None]}}
    if options.get("tp") == 1:
        options |= {"parameters": {n: replace(p, cut=None) for n, p in PARAMETERS.items()}}
    made = universal(tmp_path, **options)

    training = read_training(api.open(made))

    source = read_source(api.open(tmp_path / "in"))
    assert without_places(training) == without_places(source)
    assert training.tag == "step"
    assert training.dtype == DTYPES["float32"]
    trained = {name: parameter.group for name, parameter in PARAMETERS.items()}
    assert [group.names for group in training.groups] == [
        tuple(name for name, group in trained.items() if group == number) for number in range(2)
    ]
    assert [group.settings["lr"] for group in training.groups] == [0.5, 0.5]
    assert training.ranks[0].values["client"] == [1, (2,), None]


def test_the_registry_finds_it_by_the_format(tmp_path):
    catalog = api.open(universal(tmp_path))

    assert open_training(catalog) == read_training(catalog)


def test_safetensors_have_no_training(tmp_path):
    api.convert(universal(tmp_path), tmp_path / "weights")

    with pytest.raises(UnsupportedError, match="no training that could go on"):
        open_training(api.open(tmp_path / "weights"))


def plain_step(made, name, value):
    save_file(made / "step_universal" / "zero" / name / "step.pt", value)


def test_a_step_that_is_a_plain_number_is_one_of_the_group(tmp_path):
    made = universal(tmp_path)
    for name in PARAMETERS:
        plain_step(made, name, 7)

    training = read_training(api.open(made))

    assert [dict(group.numbers) for group in training.groups] == [{"step": 7}, {"step": 7}]


def test_steps_that_disagree_inside_a_group_are_refused(tmp_path):
    made = universal(tmp_path)
    for place, name in enumerate(PARAMETERS):
        plain_step(made, name, place)

    with pytest.raises(CorruptError, match=r"zero/down.weight/step.pt: the step is 2, .* is 0"):
        read_training(api.open(made))


def test_groups_that_the_model_files_do_not_count_are_refused(tmp_path):
    made = universal(tmp_path)
    edit_file(
        made / "step_universal" / "zero" / "optimizer_state.pt",
        lambda value: value["param_groups"].append({"lr": 1}),
    )

    with pytest.raises(CorruptError, match=r"counts 3 parameter groups, .* has 2"):
        read_training(api.open(made))


@pytest.mark.parametrize("missing", ["zero/optimizer_state.pt", "mp_rank_*"])
def test_without_its_files_there_is_no_training(tmp_path, missing):
    made = universal(tmp_path)
    for file in (made / "step_universal").glob(missing):
        file.unlink()

    with pytest.raises(UnsupportedError, match="a training does not go on without"):
        read_training(api.open(made))
