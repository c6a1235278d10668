"""The ranks and the ZeRO stage that a checkpoint is written for."""

from __future__ import annotations

from typing import Final

from msgspec import field

from restride.algebra.mesh import Mesh
from restride.errors import UnsupportedError
from restride.formats.deepspeed.stage_cut import StageCut
from restride.frozen import Frozen

__all__ = ["DeepSpeedTarget"]

_STAGES: Final = (0, 1, 2, 3)
_PARTITIONED_WEIGHTS: Final = 3
# Each rank has a file or two of its own; no run has so many.
_MOST_RANKS: Final = 1 << 16


class DeepSpeedTarget(Frozen):
    """How the engine that resumes will be run.

    Attributes:
        tp: Tensor-parallel ranks.
        dp: Data-parallel ranks: ranks in all, divided by `tp` and `pp`.
        zero: ZeRO stage; 0 without ZeRO.
        ep: Expert-parallel ranks, a part of the data-parallel ones, or with AutoEP of all ranks
            (they fold the tensor-parallel ones); 1 without experts. The largest number where layers
            are on several.
        pp: Stages of a pipeline, each with as many ranks; 1 without one.
        cut: How its layers are dealt out to the stages.
        zero_init: Whether its model is made under ``deepspeed.zero.Init``, where that is said.
        is_ep_kept: Whether each layer of experts keeps the number of ranks that it is on.

    Raises:
        UnsupportedError: A number is out of range, or the expert-parallel ranks do not fit into the
            others.

    Examples:
        >>> DeepSpeedTarget(tp=2, dp=3, zero=1).mesh.size
        6
    """

    tp: int
    dp: int
    zero: int
    ep: int = 1
    pp: int = 1
    cut: StageCut = field(default_factory=StageCut)
    zero_init: bool | None = None
    is_ep_kept: bool = False

    def __post_init__(self) -> None:
        axes = {"tp": self.tp, "dp": self.dp, "ep": self.ep, "pp": self.pp}
        for axis, size in axes.items():
            if not 1 <= size <= _MOST_RANKS:
                raise UnsupportedError(
                    f"a run has no {axis} of {size}", remedy=f"choose 1 to {_MOST_RANKS}"
                )
        if self.pp * self.tp * self.dp > _MOST_RANKS:
            stages = f"{self.pp} * " if self.pp > 1 else ""
            raise UnsupportedError(
                f"a run has no {stages}{self.tp} * {self.dp} ranks",
                remedy=f"choose at most {_MOST_RANKS}",
            )
        if self.zero not in _STAGES:
            raise UnsupportedError(
                f"ZeRO-{self.zero} cannot be written", remedy="choose --zero 0, 1, 2 or 3"
            )
        if self.zero_init is not None and self.zero != _PARTITIONED_WEIGHTS:
            raise UnsupportedError(
                f"models are made under deepspeed.zero.Init for ZeRO-3, not for ZeRO-{self.zero}",
                remedy="leave out --zero-init and --no-zero-init",
            )
        if self.dp * self.tp % self.ep:
            folded = f"dp={self.dp} times tp={self.tp}" if self.tp > 1 else f"dp={self.dp}"
            raise UnsupportedError(
                f"{folded} cannot be divided into groups of ep={self.ep}",
                remedy="choose --dp as a multiple of --ep",
            )

    @property
    def mesh(self) -> Mesh:
        """The ranks ``dp, tp`` of one stage; tensor parallelism is the fastest."""
        return Mesh((("dp", self.dp), ("tp", self.tp)))

    @property
    def tp_mesh(self) -> Mesh:
        """The tensor-parallel ranks alone, over which the parameters are cut."""
        return Mesh((("tp", self.tp),))

    def rank(self, dp: int, tp: int) -> int:
        """Rank on `mesh`."""
        return dp * self.tp + tp
