"""Which parts of an output are written: blocks of regions, and the digest of each.

A region of a plan is counted in blocks of 4 MiB from its own start, the last one shorter. A block
is done when all its bytes were written; its digest is the sum of those of the pieces, which may
come in any order and size (see `restride.arrays.fingerprint`).
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from itertools import accumulate
from threading import Lock, local
from typing import TYPE_CHECKING, Final, NamedTuple

from restride.arrays.fingerprint import MODULUS, Digester
from restride.frozen import Frozen
from restride.planning.sharing import lanes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from restride.planning.plan import RegionPlan, Step

__all__ = ["BLOCK_NBYTES", "TABLE_NBYTES", "Block", "BlockPart", "BlockTable"]

BLOCK_NBYTES: Final = 4 << 20
# What the table takes for a block that is the only one of its region, as those of many ranks are,
# and of its file, as those of many tensors may be: five numbers, and a digest, which is two.
TABLE_NBYTES: Final = 64
_HALF: Final = (1 << 64) - 1


class Block(Frozen):
    """A block that is done.

    Attributes:
        region: Number of the region in the plan.
        number: Number of the block in the region.
        digest: Sum of the digests of its pieces, by their place in the region.
    """

    region: int
    number: int
    digest: int


class BlockPart(NamedTuple):
    """Bytes of one block.

    Attributes:
        region: Number of the region in the plan.
        block: Number of the block in the region.
        start: First byte, counted from the start of the region.
        nbytes: How many.
    """

    region: int
    block: int
    start: int
    nbytes: int


class BlockTable:
    """Counts what is written. Calls may come from any number of threads.

    Args:
        regions: Regions of the plan, in target order.
        digest_rows: Rows that a thread digests at one time; see `Digester`.
    """

    def __init__(self, regions: Sequence[RegionPlan], *, digest_rows: int) -> None:
        self.regions = regions
        self._rows = digest_rows
        # A region has the blocks from its first one to that of the next region.
        counts = (block_count(region.nbytes) for region in regions)
        self._first = array("q", accumulate(counts, initial=0))
        self._left = array("q", _sizes(regions))
        # Low and high half of each.
        self._digests = array("Q", bytes(16 * len(self._left)))
        # Regions without bytes may start where the next one does.
        self._numbers = array("q", (n for n, region in enumerate(regions) if region.nbytes))
        self._starts = array("q", (regions[n].target_start_nbytes for n in self._numbers))
        # A file has those from its first one to that of the next file.
        self._files = array("q")
        for place, number in enumerate(self._numbers):
            new = regions[number].target_file + 1 - len(self._files)
            self._files.extend([place] * new)
        self._files.append(len(self._numbers))
        self._lock = Lock()
        self._local = local()

    def set_done(self, block: Block) -> None:
        """Note that a block is done already."""
        place = self._first[block.region] + block.number
        self._set_digest(place, block.digest)
        self._left[place] = 0

    def add(self, file: int, start_nbytes: int, buffer: memoryview) -> list[Block]:
        """Count bytes that were written; return the blocks that are done with them.

        Each byte of a block that is not done may be counted once.
        """
        digester: Digester | None = getattr(self._local, "digester", None)
        if digester is None:
            digester = self._local.digester = Digester(self._rows)
        parts = self.parts(file, start_nbytes, buffer.nbytes)
        digests = [
            digester.digest(buffer[part.start - parts[0].start :][: part.nbytes], part.start)
            if self._left[self._first[part.region] + part.block]
            else 0
            for part in parts
        ]
        return self.count(parts, digests)

    def parts(self, file: int, start_nbytes: int, nbytes: int) -> list[BlockPart]:
        """Cut bytes of a region at the ends of its blocks."""
        low, high = self._files[file : file + 2]
        number = self._numbers[bisect_right(self._starts, start_nbytes, low, high) - 1]
        start = start_nbytes - self.regions[number].target_start_nbytes
        stop = start + nbytes
        found = []
        for block in range(start // BLOCK_NBYTES, block_count(stop)):
            first, last = max(start, block * BLOCK_NBYTES), min(stop, (block + 1) * BLOCK_NBYTES)
            found.append(BlockPart(number, block, first, last - first))
        return found

    def count(self, parts: Iterable[BlockPart], digests: Iterable[int]) -> list[Block]:
        """Count parts that were written, with their digests; return the blocks that are done.

        Each byte of a block that is not done may be counted once. What is of blocks that are done
        is not counted.
        """
        done: list[Block] = []
        with self._lock:
            for part, digest in zip(parts, digests, strict=True):
                place = self._first[part.region] + part.block
                if not self._left[place]:
                    continue
                total = (self._digest(place) + digest) % MODULUS
                self._set_digest(place, total)
                self._left[place] -= part.nbytes
                if not self._left[place]:
                    done.append(Block(part.region, part.block, total))
        return done

    def lanes(self) -> Iterator[Iterator[Sequence[Step]]]:
        """Bundles of steps that write into blocks that are not done, by target file."""
        return lanes(self.regions, self._steps)

    def _steps(self, number: int) -> Iterator[Step]:
        region, left = self.regions[number], self._left[self._places(number)]
        itemsize = region.target_dtype.itemsize_nbytes
        if all(left):
            return region.steps()
        blocks = [
            range(block * BLOCK_NBYTES // itemsize, -(-(block + 1) * BLOCK_NBYTES // itemsize))
            for block, nbytes in enumerate(left)
            if nbytes
        ]
        return region.steps(blocks)

    def digests(self, region: int) -> list[int]:
        """Digests of the blocks of one region, as far as they are done."""
        places = self._places(region)
        return [self._digest(place) for place in range(places.start, places.stop)]

    def of_file(self, file: int) -> Sequence[int]:
        """Numbers of the regions of one file that have bytes, in order."""
        return self._numbers[slice(*self._files[file : file + 2])] if self._has(file) else ()

    def find(self, file: int, start_nbytes: int) -> int | None:
        """Number of the region that starts at a byte of a file."""
        if not self._has(file):
            return None
        low, high = self._files[file : file + 2]
        place = bisect_left(self._starts, start_nbytes, low, high)
        is_there = place < high and self._starts[place] == start_nbytes
        return self._numbers[place] if is_there else None

    def _has(self, file: int) -> bool:
        """Whether there is a region in a file, or in one that comes later."""
        return file + 1 < len(self._files)

    def _digest(self, place: int) -> int:
        return self._digests[2 * place] | self._digests[2 * place + 1] << 64

    def _set_digest(self, place: int, digest: int) -> None:
        self._digests[2 * place] = digest & _HALF
        self._digests[2 * place + 1] = digest >> 64

    def _places(self, region: int) -> slice:
        return slice(self._first[region], self._first[region + 1])

    def left_nbytes(self) -> int:
        """Bytes of blocks that are not done."""
        return sum(
            nbytes for nbytes, left in zip(_sizes(self.regions), self._left, strict=True) if left
        )

    def nbytes(self, blocks: Iterable[Block]) -> int:
        """Size of some blocks together."""
        return sum(block_nbytes(self.regions[b.region].nbytes, b.number) for b in blocks)


def _sizes(regions: Sequence[RegionPlan]) -> Iterator[int]:
    """Bytes of all blocks, in order."""
    for region in regions:
        for number in range(block_count(region.nbytes)):
            yield block_nbytes(region.nbytes, number)


def block_count(nbytes: int) -> int:
    """Blocks of a region of so many bytes."""
    return -(-nbytes // BLOCK_NBYTES)


def block_nbytes(region_nbytes: int, number: int) -> int:
    """Size of one block of a region."""
    return min(BLOCK_NBYTES, region_nbytes - number * BLOCK_NBYTES)
