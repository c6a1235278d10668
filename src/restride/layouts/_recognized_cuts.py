"""Families that cut one dimension into whole rows: fused weights, heads, tables of blocks."""

from __future__ import annotations

from math import gcd, lcm
from typing import TYPE_CHECKING, Final

from restride.errors import LayoutError, RuleError
from restride.frozen import Frozen
from restride.layouts._size_rules import SizeRule, choose, divisors, shown, undecided
from restride.layouts.codegen import codegen_qkv
from restride.layouts.gathered import block_gather
from restride.layouts.replicated import replicated
from restride.layouts.segmented import segmented
from restride.layouts.yuan import yuan_output, yuan_value

if TYPE_CHECKING:
    from collections.abc import Iterator

    from restride.algebra.layout import Layout, Shape
    from restride.layouts._arguments import MeshAxis
    from restride.layouts._recognized import Numbers
    from restride.layouts._runs import RowCut

__all__ = ["Codegen", "Experts", "Segments", "Yuan"]

_MODEL_BLOCKS: Final = 4
_MATRIX: Final = 2
_CHATGLM_HEADS: Final = 2


class Segments(Frozen):
    """One dimension in segments, each cut by one rule of sizes or whole: most layouts there are."""

    shape: Shape
    dim: int
    segments: tuple[tuple[int, tuple[int, ...] | None], ...]
    rule: SizeRule

    @property
    def names(self) -> tuple[str, ...]:
        rows = [size for size, _ in self.segments]
        is_cut = [widths is not None for _, widths in self.segments]
        by_autotp = self.rule.name in {"near-even", "heads", "grain"} and self.dim == 0
        found: list[str] = []
        if is_cut == [True]:
            chunked = ["chunked"] if self.rule.name == "chunked" else []
            return (*chunked, "split", *(["bloom-qkv"] if by_autotp else []))
        if (
            is_cut == [True, True]
            and rows[0] == rows[1]
            and self.rule.name in {"near-even", "grain"}
        ):
            found.append("gate-up")
        if is_cut == [True] * 3 and rows[1] == rows[2] and by_autotp:
            if rows[0] == rows[1]:
                found += ["glm-qkv", "qwen-qkv"]
            found += ["phi3-qkv"] if len(self.shape) == _MATRIX and rows[0] >= rows[1] else []
            found += ["chatglm-qkv"] if _CHATGLM_HEADS in self.rule.possible else []
        if is_cut == [True, False] and by_autotp:
            found.append("bigcode-qkv")
        return (*found, *(["sub-params"] if all(is_cut) else []), "segmented")

    @property
    def text(self) -> str:
        rows = [f"{size}{'' if widths else ' whole'}" for size, widths in self.segments]
        parts = "" if len(rows) == 1 else f" in segments {', '.join(rows)}"
        possible = f": {shown(self.rule.possible)}" if self.rule.possible else ""
        name = {"near-even": "evenly", "listed": "with listed widths"}.get(
            self.rule.name, f"by {self.rule.name}"
        )
        if self.rule.name == "chunked":
            name = "rounded up"
        return f"{self.names[0]} of dimension {self.dim}{parts} {name}{possible}"

    @property
    def apart(self) -> str:
        return {
            "near-even": "told apart where it does not divide: the first ranks get one more",
            "heads": "told apart on other ranks: a head is never cut",
            "chunked": "told apart where it does not divide: the last ranks are short",
        }.get(self.rule.name, "told apart by the model only")

    @property
    def takes(self) -> str:
        return self.rule.name if self.rule.possible else ""

    def same(self, target: MeshAxis) -> Layout:
        return segmented(
            self.shape, mesh=target.mesh, segments=self.segments, dim=self.dim, axis=target.name
        )

    def on(self, target: MeshAxis, given: Numbers) -> Layout:
        if target.size == 1:
            return replicated(self.shape, mesh=target.mesh)
        totals = [size for size, widths in self.segments if widths is not None]
        widths = iter(self.rule.widths(totals, target.size, given.get(self.rule.name)))
        segments = [(size, None if cut is None else next(widths)) for size, cut in self.segments]
        return segmented(
            self.shape, mesh=target.mesh, segments=segments, dim=self.dim, axis=target.name
        )


class Codegen(Frozen):
    """CodeGen's permuted rows; all that is known of the heads is a number that divides them."""

    shape: Shape
    heads_unit: int

    @property
    def names(self) -> tuple[str, ...]:
        return ("codegen-qkv",)

    @property
    def text(self) -> str:
        return f"codegen-qkv with a multiple of {self.heads_unit} heads"

    @property
    def apart(self) -> str:
        return "told apart by the model only"

    @property
    def takes(self) -> str:
        return "heads"

    def same(self, target: MeshAxis) -> Layout:
        return codegen_qkv(self.shape, mesh=target.mesh, heads=self.heads_unit, axis=target.name)

    def on(self, target: MeshAxis, given: Numbers) -> Layout:
        if target.size == 1:
            return replicated(self.shape, mesh=target.mesh)
        needed, heads = _MODEL_BLOCKS * target.size, given.get("heads")
        if heads is None and self.heads_unit % needed:
            raise RuleError(
                f"heads is known to be a multiple of {self.heads_unit}, and {target.size} ranks "
                f"need a multiple of {needed}",
                remedy="pass heads= of the model",
            )
        if heads is not None and heads % self.heads_unit:
            raise RuleError(f"{heads} heads are no multiple of {self.heads_unit}, as here")
        count = lcm(self.heads_unit, needed) if heads is None else heads
        return codegen_qkv(self.shape, mesh=target.mesh, heads=count, axis=target.name)


class Yuan(Frozen):
    """Yuan's value heads, of the weight `v_proj` or the columns of `o_proj`."""

    shape: Shape
    dim: int
    possible: tuple[int, ...]

    @classmethod
    def candidates(cls, shape: Shape, cut: RowCut, ranks: int) -> Iterator[Yuan]:
        """The family with every head count that gives shards of this width."""
        if len(shape) > _MATRIX or cut.dim not in {0, 1} or any(len(r) != 2 for r in cut.runs):  # noqa: PLR2004
            return
        width = sum(count for _, count in cut.runs[0])
        fits = tuple(
            heads
            for heads in divisors(cut.rows)
            if heads % ranks == 0
            and 2 * ((heads // ranks + 1) // 2) * (cut.rows // heads) == width
            and 2 * ranks <= heads
        )
        if fits:
            yield cls(shape, cut.dim, fits)

    @property
    def names(self) -> tuple[str, ...]:
        return ("yuan-output" if self.dim else "yuan-value",)

    @property
    def text(self) -> str:
        return f"{self.names[0]} by heads: {shown(self.possible)}"

    @property
    def apart(self) -> str:
        return "told apart by the model only"

    @property
    def takes(self) -> str:
        return "heads"

    def same(self, target: MeshAxis) -> Layout:
        return self._with(target, self.possible[0])

    def on(self, target: MeshAxis, given: Numbers) -> Layout:
        if target.size == 1:
            return replicated(self.shape, mesh=target.mesh)
        found: dict[Layout, int] = {}
        refused: LayoutError | None = None
        heads = given.get("heads")
        for count in choose("heads", self.possible, heads):
            try:
                found[self._with(target, count)] = count
            except LayoutError as error:
                refused = error
        if len(found) > 1 or (found and refused and heads is None):
            raise undecided("heads", self.possible, target.size)
        if not found and refused:
            raise refused
        return next(iter(found))

    def _with(self, target: MeshAxis, heads: int) -> Layout:
        build = yuan_output if self.dim else yuan_value
        return build(self.shape, mesh=target.mesh, heads=heads, axis=target.name)


class Experts(Frozen):
    """Blocks of rows that are dealt out by a table."""

    shape: Shape
    block: int
    table: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, shape: Shape, cut: RowCut) -> Experts:
        """The table of a cut, in the largest blocks that there are."""
        block = gcd(cut.rows, *(bound for runs in cut.runs for run in runs for bound in run))
        if len(shape) > _MATRIX:
            block = 1  # stacked matrices: a row is an expert
        table = tuple(
            tuple(
                number
                for first, count in runs
                for number in range(first // block, (first + count) // block)
            )
            for runs in cut.runs
        )
        return cls(shape, block, table)

    @property
    def names(self) -> tuple[str, ...]:
        return ("experts", "block-gather") if self.block == 1 else ("block-gather",)

    @property
    def text(self) -> str:
        return f"{self.names[0]} of {self.shape[0] // self.block} blocks by a table"

    @property
    def apart(self) -> str:
        return "told apart on other ranks: a table says nothing of them"

    @property
    def takes(self) -> str:
        return ""

    def same(self, target: MeshAxis) -> Layout:
        return block_gather(
            self.shape,
            mesh=target.mesh,
            ids=self.table,
            block=self.block,
            allow_shared=True,
            axis=target.name,
        )

    def on(self, target: MeshAxis, given: Numbers) -> Layout:
        del given
        if target.size == 1:
            return replicated(self.shape, mesh=target.mesh)
        if target.size == len(self.table):
            return self.same(target)
        count = self.shape[0] // self.block
        each, left = divmod(count, target.size)
        in_order = tuple(number for held in self.table for number in held)
        if left or in_order != tuple(range(count)) or len({len(held) for held in self.table}) > 1:
            raise RuleError(
                f"a table of {count} blocks on {len(self.table)} ranks does not say how they are "
                f"placed on {target.size}",
                remedy="give the new table to experts(placement=) or block_gather(ids=)",
            )
        table = [range(rank * each, (rank + 1) * each) for rank in range(target.size)]
        return block_gather(
            self.shape, mesh=target.mesh, ids=table, block=self.block, axis=target.name
        )
