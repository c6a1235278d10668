"""What happens before the first byte of a tensor moves: each source file is read once."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest

from restride import api
from restride.exports import Wanted
from restride.preparation import prepare
from restride.storage import torch_zip
from restride.storage.ranges import FilePool, RangeFile
from restride.testing.command_line import SAMPLE

if TYPE_CHECKING:
    from pathlib import Path

_WAYS = [
    Wanted("safetensors"),
    Wanted("safetensors", "all"),
    Wanted("universal"),
    Wanted("universal", stage=3),
    Wanted("deepspeed", dp=3, zero=1),
    Wanted("deepspeed", dp=1, zero=3),
]


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often the structure of each file was read."""
    found: Counter[str] = Counter()

    def opened(path: str) -> RangeFile:
        found[str(path)] += 1
        return RangeFile(path)

    monkeypatch.setattr(torch_zip, "RangeFile", opened)
    return found


@pytest.mark.parametrize("wanted", _WAYS, ids=str)
def test_each_file_of_a_sharded_checkpoint_is_parsed_once(
    wanted: Wanted, parsed: Counter[str]
) -> None:
    with FilePool() as pool:
        prepared = prepare(SAMPLE, wanted, pool)

    assert parsed == Counter({str(SAMPLE / file.name): 1 for file in prepared.catalog.files})


@pytest.mark.parametrize("wanted", _WAYS, ids=str)
def test_each_file_of_a_universal_folder_is_parsed_once(
    wanted: Wanted, parsed: Counter[str], tmp_path: Path
) -> None:
    folder = api.convert(SAMPLE, tmp_path / "universal", to="universal").out
    parsed.clear()

    with FilePool() as pool:
        prepared = prepare(folder, wanted, pool)

    assert parsed == Counter({str(folder / file.name): 1 for file in prepared.catalog.files})
