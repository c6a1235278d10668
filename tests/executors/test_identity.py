"""Two conversions are the same where every byte of their outputs is, and only there."""

from __future__ import annotations

import os
from fractions import Fraction

import numpy as np
import pytest
from msgspec.structs import replace

from restride.algebra.copies import CopyAt
from restride.checkpoint.catalog import Catalog, Region
from restride.checkpoint.dtypes import DTYPES
from restride.checkpoint.output import Output, OutputFile
from restride.executors.identity import describe_job, job_digest
from restride.layouts import replicated, split
from restride.planning.fills import Pattern
from restride.planning.jobs import plan_conversion
from restride.testing.moving import MemoryFiles, job_between, store

FLOAT32 = DTYPES["float32"]
FULL = np.arange(24, dtype=np.uint32)


class Source:
    """A source of one tensor whose files are in a folder, and the plan to convert it."""

    def __init__(self, folder, layout, target):
        self.stored = store(layout, FLOAT32, FULL)
        for file, content in zip(self.stored.files, self.stored.contents, strict=True):
            (folder / file.name).write_bytes(content)
            os.utime(folder / file.name, ns=(1, 1))
        self.catalog = Catalog("test", str(folder), self.stored.files, layout.mesh, (), {})
        job, sizes = job_between(self.stored, target, FLOAT32, "first")
        files = [OutputFile(f"{rank}.bin", size + 8) for rank, size in enumerate(sizes)]
        self.output = Output(tuple(files))
        self.plan = plan_conversion([job], budget_nbytes=1 << 20, workers=2)

    def digest(self, *, plan=None, output=None, options=None):
        reader = MemoryFiles(self.stored.contents)
        plan, output = plan or self.plan, output or self.output
        return job_digest(describe_job(self.catalog, reader, output, plan, options or {}))

    def with_region(self, **changes):
        """The digest where the first region of the plan is another one."""
        first, *others = self.plan.regions
        of_array = {name: changes.pop(name) for name in [*changes] if hasattr(first.array, name)}
        changed = replace(first, array=replace(first.array, **of_array), **changes)
        return self.digest(plan=replace(self.plan, regions=(changed, *others)))

    def with_fill(self, **changes):
        """The digest where the first fill of the first region is another one."""
        first, *others = self.plan.regions[0].fills
        return self.with_region(pattern=Pattern.of((replace(first, **changes), *others)))


@pytest.fixture
def columns(tmp_path):
    """Two columns of a tensor of which two ranks have each: every region has two fills."""
    mesh = {"dp": 2, "tp": 2}
    return Source(
        tmp_path, split((4, 6), mesh=mesh, dim=1, axis="tp"), split((4, 6), mesh={"tp": 2}, dim=0)
    )


def test_a_job_is_known_again_whatever_memory_and_threads_it_has(columns):
    smaller = [replace(region, step_numel=1) for region in columns.plan.regions]
    other = replace(columns.plan, regions=tuple(smaller), buffer_nbytes=4096, workers=1)

    assert columns.plan.regions[0].step_numel != 1
    assert columns.digest(plan=other) == columns.digest()


@pytest.mark.parametrize(
    "changes",
    [
        {"tensor": "another"},
        {"state": "another"},
        {"target_rank": 1},
        {"target_file": 1},
        {"target_start_nbytes": 4},
        {"numel": 11},
        {"replicas": "mean"},
        {"replicas": CopyAt((("tp", 1),))},
        {"source_dtype": DTYPES["int32"]},
        {"target_dtype": DTYPES["int32"]},
        {"places": (Region(0, 24), Region(1, 28), Region(2, 24), Region(3, 24))},
        {"places": (Region(0, 24), Region(3, 24), Region(2, 24), Region(1, 24))},
    ],
    ids=str,
)
def test_what_decides_a_byte_of_a_region_makes_another_job(columns, changes):
    assert columns.with_region(**changes) != columns.digest()


def test_what_decides_an_element_makes_another_job(columns):
    fill = columns.plan.regions[0].fills[0]
    first, second = fill.sources
    (walk,) = first.walks
    moved = replace(first, walks=(type(walk)((0, 1), walk.digits),))
    digests = [
        columns.digest(),
        columns.with_fill(sources=(second, first)),
        columns.with_fill(sources=(first,)),
        columns.with_fill(sources=(moved, second)),
        columns.with_fill(agreeing=2),
        columns.with_fill(scale=Fraction(1, 2)),
        columns.with_fill(scale=Fraction(1, 4)),
    ]

    assert len(set(digests)) == len(digests)


def test_what_decides_bytes_that_are_no_tensor_makes_another_job(columns):
    first, *others = columns.output.files
    end = first.nbytes - 8
    digests = [columns.digest(), columns.digest(options={"dtype": "float32"})]
    digests += [
        columns.digest(output=replace(columns.output, files=(replace(first, **change), *others)))
        for change in (
            {"name": "another"},
            {"nbytes": first.nbytes + 1},
            {"literals": ((end, b"one"),)},
            {"literals": ((end, b"two"),)},
            {"literals": ((end + 1, b"two"),)},
            {"literals": ((end, b"tw"), (end + 2, b"o"))},
        )
    ]

    assert len(set(digests)) == len(digests)


def test_copies_that_ranks_hold_with_other_scales_make_another_job(tmp_path):
    """As when a rule says other numbers the next time: files and walks are the same."""
    digests = set()
    for scale in (Fraction(1), Fraction(1, 2), Fraction(1, 4)):
        layout = replicated((4, 6), mesh={"tp": 2}, scale=scale)
        source = Source(tmp_path, layout, replicated((4, 6), mesh={"tp": 1}))
        (fill,) = source.plan.regions[0].fills
        assert fill.scale == 1 / scale
        digests.add(source.digest())

    assert len(digests) == 3
