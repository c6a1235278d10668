"""What happens before the first byte of a tensor moves: nothing is read or spelled out twice."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest

from restride import api, preparation
from restride.errors import PlanError
from restride.executors.events import NullObserver
from restride.exports import Wanted
from restride.preparation import prepare
from restride.storage import torch_output, torch_zip
from restride.storage.machine import peak_nbytes
from restride.storage.ranges import FilePool, RangeFile
from restride.storage.torch_output import FileDraft, TorchOutput
from restride.testing.command_line import SAMPLE

if TYPE_CHECKING:
    from pathlib import Path

    from restride.checkpoint.catalog import Finding
    from restride.checkpoint.output import Output
    from restride.checkpoint.values import Value
    from restride.executors.events import Notice, PlanStarted
    from restride.storage.torch_file import TorchContent

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


def _output(source: Path, wanted: Wanted) -> Output:
    with FilePool() as pool:
        return prepare(source, wanted, pool).export.output


@pytest.mark.parametrize("wanted", _WAYS, ids=str)
def test_files_that_are_alike_are_those_that_are_laid_out_alone(
    wanted: Wanted, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = _output(SAMPLE, wanted)
    add = TorchOutput.add

    def add_alone(
        self: TorchOutput, draft: FileDraft, value: Value, *, alike: object = None
    ) -> None:
        del alike
        add(self, draft, value)

    monkeypatch.setattr(TorchOutput, "add", add_alone)

    assert together == _output(SAMPLE, wanted)


@pytest.mark.parametrize(
    ("wanted", "most"),
    # Per rank of the source (two shapes of the padding at most) one file of each kind; and of a
    # universal folder one for each shape, beside the model files, the optimizer and the step.
    [(Wanted("deepspeed", dp=64, zero=3), 8), (Wanted("universal"), 16)],
    ids=str,
)
def test_what_is_the_same_in_many_files_is_spelled_out_once(
    wanted: Wanted, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    spelled: list[str] = []
    spell = torch_output.torch_content

    def counted(name: str, value: Value) -> TorchContent:
        spelled.append(name)
        return spell(name, value)

    monkeypatch.setattr(torch_output, "torch_content", counted)
    files = _output(SAMPLE, wanted).files

    assert len(spelled) <= most < len(files) / 3


@pytest.mark.parametrize("workers", [0, -1])
def test_threads_that_are_none_are_refused(tmp_path: Path, workers: int) -> None:
    with pytest.raises(PlanError, match=f"{workers} threads write nothing; give 1 or more"):
        api.convert(SAMPLE, tmp_path / "out", workers=workers)

    assert not list(tmp_path.iterdir())


class Hears(NullObserver):
    """Keeps what is told at once."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def on_notice(self, event: Notice, /) -> None:
        assert not self.is_begun
        self.told.append(event.message)

    is_begun = False

    def on_plan(self, _event: PlanStarted, /) -> None:
        self.is_begun = True


@pytest.mark.parametrize("more", [0, 1])
def test_opening_that_took_more_than_the_budget_is_told_before_the_first_byte(
    more: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    budget = 100_000_000

    def run(way: str) -> tuple[Finding, ...]:
        peaks = iter([1 << 30, (1 << 30) + (64 << 20) + budget + more])
        monkeypatch.setattr(preparation, "peak_nbytes", lambda: next(peaks))
        out = tmp_path / way
        if way == "projected":
            return api.dry_run(SAMPLE, out, Wanted("safetensors"), budget_nbytes=budget).findings
        return api.convert(SAMPLE, out, budget_nbytes=budget, observer=observer).findings

    observer = Hears()
    found = [
        finding.message
        for way in ("projected", "converted")
        for finding in run(way)
        if finding.kind == "memory-of-opening"
    ]

    assert len(found) == 2 * more
    assert observer.told == found[more:]
    for message in found:
        assert message.startswith(
            "reading headers and planning took 167 MB of memory, more than the"
        )


def test_the_memory_of_this_process_is_measured() -> None:
    block = bytearray(b"x") * (64 << 20)
    before = peak_nbytes()
    more = bytearray(b"x") * (2 * before)

    assert len(block) < before < len(more) < peak_nbytes()
