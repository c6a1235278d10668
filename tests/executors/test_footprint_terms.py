"""Each term of the memory that is said to be taken is near what a case of nothing else takes."""

from __future__ import annotations

import gc
import tracemalloc

from restride.arrays.fingerprint import Digester
from restride.checkpoint.catalog import Region, StateEntry
from restride.checkpoint.dtypes import DTYPES
from restride.checkpoint.output import Output, OutputFile, OutputTensor
from restride.checkpoint.selection import Selected
from restride.executors.footprint import (
    output_nbytes,
    resuming_nbytes,
)
from restride.executors.verifying import MOST_AT_ONE_TIME, Extent, find_damage
from restride.layouts.replicated import replicated
from restride.planning.jobs import whole_layout
from restride.storage.journal import Journal, read_journal

COUNT = 2000
FLOAT = DTYPES["float32"]
# Bounds that are too high refuse what would do.
MOST = 1.4


def traced(make):
    """What is made, the memory that it takes, and the most that making it took."""
    make()  # what is imported and cached on the way is the program's
    gc.collect()
    tracemalloc.start()
    try:
        made = make()
        _, most = tracemalloc.get_traced_memory()
        gc.collect()
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return made, kept, most


def require_near(taken, said):
    assert taken <= said <= MOST * taken


def test_arrays_of_an_output():
    layout = whole_layout((1,))
    entry = StateEntry(FLOAT, layout, (Region(0, 0),))

    def make():
        names = [f"model.layers.{number}.self_attn.q_proj.weight" for number in range(COUNT)]
        places = (Region(0, 4 * number) for number in range(COUNT))
        tensors = [
            OutputTensor(name, FLOAT, layout, (place,))
            for name, place in zip(names, places, strict=True)
        ]
        sources = [Selected(name, name, "weight", entry, FLOAT) for name in names]
        return Output((OutputFile("f", 4 * COUNT),), tuple(tensors)), sources

    (output, _), kept, _ = traced(make)

    require_near(kept, output_nbytes(output))


def test_fixed_parts_of_the_files_of_an_output():
    content = bytes(1)

    def make():
        literals = tuple((1000 + number, content) for number in range(COUNT))
        return Output((OutputFile("f", 1000 + COUNT, literals),))

    output, kept, _ = traced(make)

    require_near(kept, output_nbytes(output))


def test_places_of_the_shards_of_an_output():
    layout = replicated((1,), mesh={"dp": COUNT})
    files = tuple(OutputFile(f"f{number}", 4) for number in range(COUNT))

    def make():
        places = (Region(number, 0) for number in range(COUNT))
        return OutputTensor("t", FLOAT, layout, places)

    tensor, kept, _ = traced(make)
    without, with_places = output_nbytes(Output(files)), output_nbytes(Output(files, (tensor,)))

    require_near(kept, with_places - without)


def test_records_of_a_journal(tmp_path):
    path = tmp_path / "journal"
    records = [
        {"region": 1000 + number, "block": 0, "digests": [f"{number:032x}"], "nbytes": 1000}
        for number in range(COUNT)
    ]
    journal = Journal(path, durable=False)
    journal.append(records)
    journal.close()
    _, kept, _ = traced(lambda: read_journal(path))

    said, _ = resuming_nbytes(region_count=COUNT, block_count=COUNT)

    require_near(kept, said)


def test_blocks_that_are_looked_at(tmp_path):
    path, nbytes = tmp_path / "file", 1 << 17  # so large that each is looked at for itself
    path.write_bytes(bytes(nbytes))
    total = Digester().digest(bytes(nbytes), 0)

    def look(count):
        extents = (Extent(str(path), 0, nbytes, 0, total) for _ in range(count))
        return list(find_damage(extents, workers=1, rows=128, on_read=lambda _: None))

    _, _, least = traced(lambda: look(1))
    damaged, _, most = traced(lambda: look(MOST_AT_ONE_TIME))
    once, twice = (
        resuming_nbytes(region_count=0, block_count=times * MOST_AT_ONE_TIME)[1] for times in (1, 2)
    )

    assert not damaged
    require_near(most - least, once - (twice - once))
