"""A name is there, as a link, and no file behind it: as of data sets that were not fetched."""

from __future__ import annotations

import pytest

from restride import api
from restride.errors import RestrideError
from restride.storage.fingerprint_files import read_fingerprints

BROKEN = "a link to what is not there"


def break_link(path):
    if path.is_dir():
        path.rename(path.with_name(f"{path.name}.was"))
    else:
        path.unlink()
    path.symlink_to("nowhere")


@pytest.fixture
def universal(damaged, tmp_path):
    """A universal folder without the manifest, which would tell of everything."""
    api.convert(damaged("llama_tp2_z1").folder, tmp_path / "out", to="universal")
    (tmp_path / "out" / "restride.json").unlink()
    return tmp_path / "out"


def test_a_name_of_the_tag_that_is_a_broken_link_is_not_passed_over(damaged):
    """The only tag was read, which may be another one."""
    run = damaged("llama_tp2_z1")
    break_link(run.folder / "latest")

    with pytest.raises(RestrideError, match=f"latest: cannot be read .{BROKEN}"):
        api.check(run.folder)


def test_a_name_of_the_universal_folder_that_is_a_broken_link_is_said_to_be_one(universal):
    break_link(universal / "latest_universal")

    with pytest.raises(RestrideError, match=f"latest_universal: cannot be read .{BROKEN}"):
        api.check(universal)


def test_a_name_of_the_tag_that_is_a_folder_is_not_passed_over(damaged):
    run = damaged("llama_tp2_z1")
    (run.folder / "latest").unlink()
    (run.folder / "latest").mkdir()

    with pytest.raises(RestrideError, match="latest: cannot be read"):
        api.check(run.folder)


def test_optimizer_files_that_are_broken_links_are_not_taken_for_none(damaged):
    """Weights alone are a whole checkpoint, and `check` said ok of it."""
    run = damaged("llama_tp2_z1")
    for file in (run.folder / "step").glob("*optim_states.pt"):
        break_link(file)

    with pytest.raises(RestrideError, match=BROKEN):
        api.check(run.folder)


@pytest.mark.parametrize(
    "name",
    [
        "zero/optimizer_state.pt",
        "zero/model.norm.weight",
        "zero/model.norm.weight/step.pt",
        "zero/model.norm.weight/exp_avg.pt",
    ],
)
@pytest.mark.parametrize("has_models", [True, False])
@pytest.mark.parametrize("at", ["", "step_universal"])
def test_a_part_of_a_universal_folder_that_is_a_broken_link_is_an_error(
    universal, name, has_models, at
):
    """Without model files nothing else knows of the parameter."""
    folder = universal / "step_universal"
    for file in folder.glob("*_model_states.pt") if not has_models else ():
        file.unlink()
    break_link(folder / name)

    with pytest.raises(RestrideError, match=BROKEN):
        api.check(universal / at)


def test_a_manifest_that_is_a_broken_link_has_no_fingerprints(universal):
    (universal / "restride.json").symlink_to("nowhere")

    with pytest.raises(RestrideError, match=r"restride\.json"):
        read_fingerprints(universal)
