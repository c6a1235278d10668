"""States that are no array of each parameter: no rank is given those of another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from restride import api
from restride.errors import UnsupportedError
from restride.testing.saved_values import Array, edit_file
from restride.testing.zero_files import ZeroRun, write_zero_run
from restride.testing.zero_runs import parameter

if TYPE_CHECKING:
    from pathlib import Path

_PARAMETERS = {"up": parameter(0, (4, 3)), "down": parameter(1_000, (3, 4))}
_MATRIX = Array("float32", (2, 2), bytes(16))
# A scale of each block of a quantized state, and what Shampoo and SOAP keep.
_STATES = {"array": _MATRIX, "list": [_MATRIX], "dict": {"left": (_MATRIX, None)}}


def _saved(folder: Path, zero: int, state: object) -> Path:
    """A run of two data-parallel ranks, each of which has the state."""
    write_zero_run(folder / "run", ZeroRun(2, 1, dict(_PARAMETERS)))
    made = folder / "run"
    if zero != 1:
        made = folder / "made"
        api.convert(folder / "run", made, to="deepspeed", zero=zero)
    pattern = "mp_rank_*" if not zero else "*_optim_states.pt"
    for file in made.glob(f"*/{pattern}"):
        edit_file(file, lambda root: _add(root, state))
    return made


def _add(root: dict[str, Any], state: object) -> None:
    while "state" not in root:
        inner = ("optimizer", "optimizer_state_dict", "base_optimizer_state")
        root = next(root[key] for key in inner if isinstance(root.get(key), dict))
    for own in root["state"].values():
        own["GG"] = state


@pytest.mark.parametrize("zero", [0, 1, 3])
@pytest.mark.parametrize("state", _STATES.values(), ids=_STATES)
def test_a_state_with_tensors_that_are_of_no_parameter_is_told_of(
    tmp_path: Path, zero: int, state: object
) -> None:
    """Of those in a list nothing was said."""
    catalog = api.open(_saved(tmp_path, zero, state))

    told = [finding for finding in catalog.findings if finding.kind == "uncut-state"]
    assert [finding.severity for finding in told] == ["warning"]
    assert "['GG'] is a" in told[0].message


@pytest.mark.parametrize("to", ["deepspeed", "universal"])
@pytest.mark.parametrize("zero", [0, 1, 3])
@pytest.mark.parametrize("state", _STATES.values(), ids=_STATES)
def test_no_rank_is_given_tensors_of_another(
    tmp_path: Path, zero: int, state: object, to: str
) -> None:
    """All ranks got the first one's list, whatever they were; a universal folder lost an array."""
    source = _saved(tmp_path, zero, state)

    with pytest.raises(UnsupportedError, match=r"state 'GG' of parameter group 0 is a .*not known"):
        api.convert(source, tmp_path / "out", to=to)

    assert not (tmp_path / "out").exists()


def test_the_weights_of_such_a_run_are_converted(tmp_path: Path) -> None:
    report = api.convert(_saved(tmp_path, 1, [_MATRIX]), tmp_path / "out")

    assert report.files == ("model.safetensors",)
