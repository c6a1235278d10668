"""Memory that a conversion takes besides plan and buffers, by what there is to be known of.

Python's objects of a checkpoint of many ranks take as much as the buffers, or more: hundreds of
megabytes where 512 ranks have a part of every state. How much was measured (tests/executors): the
numbers are bounds for what real checkpoints are like, a tenth to a half above what was found.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from restride.checkpoint.catalog import Regions
from restride.executors.journaled import MOST_WAITING, RECORDS_AT_ONE_TIME
from restride.executors.verifying import MOST_AT_ONE_TIME

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from restride.algebra.layout import Layout
    from restride.checkpoint.catalog import Catalog
    from restride.checkpoint.output import Output

__all__ = [
    "catalog_nbytes",
    "finishing_nbytes",
    "noting_nbytes",
    "opening_nbytes",
    "output_nbytes",
    "resuming_nbytes",
]

# A place of a shard: two numbers, in an array that grew.
_REGION_NBYTES: Final = 20
_STATE_NBYTES: Final = 896
_TENSOR_NBYTES: Final = 1024
# Of layouts, each once: tensors that are cut alike share them.
_PIECE_NBYTES: Final = 512
_AXIS_NBYTES: Final = 384
_RUN_NBYTES: Final = 192
# A source file with its name, and what tells that it has not changed.
_SOURCE_FILE_NBYTES: Final = 640
# While a catalog is made there is more: what each rank holds of each tensor, and what files hold.
_OPENING_SHARE: Final = 4
_OPENING_REGION_NBYTES: Final = 104
_PARSED_FILE_NBYTES: Final = 16384
# An array of the output with its name and with what it is read from; its files and fixed bytes.
_TARGET_NBYTES: Final = 512
_TARGET_FILE_NBYTES: Final = 640
_LITERAL_NBYTES: Final = 96
# A place where the name of a file stands in its fixed bytes: a number, and its slot in a tuple.
_PLACE_NBYTES: Final = 40
# At the end the output is opened as a checkpoint, and the manifest is made and spelled by file.
_PART_NBYTES: Final = 1536
_BLOCK_NBYTES: Final = 96
_OPENED_TENSOR_NBYTES: Final = 2560
_OPENED_FILE_NBYTES: Final = 8192
# Python's values of a byte that is fixed, of a header of JSON at the most.
_PARSED_NBYTES: Final = 16
# A record of a journal tells of a run of blocks of one region. What is noted is kept to the end;
# while it is read back there is more of each block.
_RECORD_NBYTES: Final = 640
_NOTED_NBYTES: Final = 192
_READ_BACK_NBYTES: Final = 320
_LOOKED_AT_NBYTES: Final = 2048
# Blocks that are done and not noted: a batch that is being noted while as many wait as may, and the
# records that are made of them at one time.
_WAITING_NBYTES: Final = 224
_MOST_NOT_NOTED: Final = 5 * MOST_WAITING // 2
_RECORD_NOTED_NBYTES: Final = 1200


def catalog_nbytes(catalog: Catalog) -> int:
    """Memory that a catalog takes, and what is known of its files.

    Cost:
        O(states + pieces).
    """
    states = [entry for tensor in catalog.tensors for entry in tensor.states.values()]
    return (
        _TENSOR_NBYTES * len(catalog.tensors)
        + _STATE_NBYTES * len(states)
        + _REGION_NBYTES * sum([len(entry.regions) for entry in states])
        + _layouts_nbytes([entry.layout for entry in states])
        + _SOURCE_FILE_NBYTES * len(catalog.files)
    )


def opening_nbytes(catalog: Catalog) -> int:
    """Memory that it took at most to open a checkpoint, the catalog itself included."""
    kept = catalog_nbytes(catalog)
    states = [entry for tensor in catalog.tensors for entry in tensor.states.values()]
    held = sum([Regions.of(entry.regions).held_count for entry in states])
    opened = _OPENING_REGION_NBYTES * held + _PARSED_FILE_NBYTES * len(catalog.files)
    return kept + kept // _OPENING_SHARE + opened


def output_nbytes(output: Output) -> int:
    """Memory that the description of an output takes, with what its arrays are read from.

    Cost:
        O(arrays + fixed parts).
    """
    return (
        _TARGET_NBYTES * len(output.tensors)
        + _REGION_NBYTES * sum([len(tensor.regions) for tensor in output.tensors])
        + _layouts_nbytes([tensor.layout for tensor in output.tensors])
        + _TARGET_FILE_NBYTES * len(output.files)
        + _LITERAL_NBYTES * _literal_count(output)
        + _PLACE_NBYTES * _place_count(output)
        + _fixed_nbytes(output)
    )


def finishing_nbytes(
    output: Output, *, region_counts: Sequence[int], block_counts: Sequence[int]
) -> int:
    """Memory that the manifest takes at most while it is made.

    Args:
        output: What it is of.
        region_counts: Regions of the plan in each file.
        block_counts: Blocks of them.
    """
    counts = zip(output.files, region_counts, block_counts, strict=True)
    largest = max(
        [
            _PART_NBYTES * (len(file.literals) + regions) + _BLOCK_NBYTES * blocks
            for file, regions, blocks in counts
        ],
        default=0,
    )
    return (
        largest
        + (_REGION_NBYTES + _OPENING_REGION_NBYTES) * sum(region_counts)
        + _OPENED_TENSOR_NBYTES * len(output.tensors)
        + _OPENED_FILE_NBYTES * len(output.files)
        + _PARSED_NBYTES * _fixed_nbytes(output)
    )


def noting_nbytes(block_count: int) -> int:
    """Memory of the blocks that are done and not in the journal yet, with the records of them."""
    return _WAITING_NBYTES * min(block_count, _MOST_NOT_NOTED) + _RECORD_NOTED_NBYTES * min(
        block_count, RECORDS_AT_ONE_TIME
    )


def resuming_nbytes(*, region_count: int, block_count: int) -> tuple[int, int]:
    """Memory that all records of a journal take, and what it takes more to read them back.

    Args:
        region_count: Regions of the plan.
        block_count: Blocks of them.
    """
    kept = _RECORD_NBYTES * region_count + _NOTED_NBYTES * block_count
    looked_at = min(block_count, MOST_AT_ONE_TIME)
    return kept, _READ_BACK_NBYTES * block_count + _LOOKED_AT_NBYTES * looked_at


def _layouts_nbytes(layouts: Iterable[Layout]) -> int:
    total = 0
    for layout in {id(layout): layout for layout in layouts}.values():
        axes = [walk.axes for walk in layout.all_pieces]
        axes += [walk.axes for walk in layout.padding]
        total += _PIECE_NBYTES * len(axes) + _RUN_NBYTES * len(layout.shard_shapes)
        total += _AXIS_NBYTES * sum(map(len, axes))
    return total


def _literal_count(output: Output) -> int:
    return sum([len(file.literals) for file in output.files])


def _fixed_nbytes(output: Output) -> int:
    """Bytes that are fixed; many files share theirs."""
    shared = {id(literal): literal for file in output.files for _, literal in file.literals}
    return sum(map(len, shared.values()))


def _place_count(output: Output) -> int:
    """Places of names in what is fixed, shared likewise."""
    shared = {id(file.label_places): file.label_places for file in output.files}
    return sum(len(places) for of_file in shared.values() for places in of_file)
