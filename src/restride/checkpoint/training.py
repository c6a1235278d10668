"""The training that a checkpoint stopped in: all that is no tensor, ready to be written again.

`Catalog.values` is for people and for JSON; it cannot be turned back. A writer whose files a
framework resumes from needs the values themselves: inert, with every object as it was spelled, and
with the tensors in them as places in the source files.

A reader of a format gives a `Training` beside its catalog, a writer takes both. Neither knows the
other: a universal folder and the sharded files of any ZeRO stage say the same here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from restride.frozen import Frozen

if TYPE_CHECKING:
    from collections.abc import Mapping

    from restride.checkpoint.dtypes import DType
    from restride.checkpoint.values import Value

__all__ = [
    "ModelRank",
    "ParameterGroup",
    "Pipeline",
    "PipelineLayer",
    "PipelineStage",
    "Training",
]


class ParameterGroup(Frozen):
    """Parameters that the optimizer treats alike.

    Attributes:
        names: Tensors of the catalog, in the order in which the model gives them to the optimizer.
            Without those that were frozen.
        settings: The group's own entries: learning rate, betas, weight decay, whatever else the
            optimizer keeps there. Never ``params``, which numbers what a format counts. Empty where
            the checkpoint leaves them out.
        numbers: States that all parameters of the group share and that are no arrays of the
            catalog, such as a ``step`` that the optimizer counts in a plain integer.
        listed: All that the script gave to the optimizer, frozen or not, in its order: `names` and
            what stands between them. None where the source does not tell.
    """

    names: tuple[str, ...]
    settings: Mapping[str, Value]
    numbers: Mapping[str, Value]
    listed: tuple[str, ...] | None = None


class ModelRank(Frozen):
    """What one model-parallel rank stored beside its tensors.

    Attributes:
        where: The file, for errors.
        values: Top-level entries that hold for the training, whatever the ranks: counters,
            schedulers, configuration, the client's own state. Geometry that a conversion makes
            anew (world sizes, shapes, maps) is not among them.
        module: Entries of the module that are no tensors of the catalog, by name: extra states.
        module_state: Attributes of the module's state dict, such as its ``_metadata``, or None.
    """

    where: str
    values: Mapping[str, Value]
    module: Mapping[str, Value]
    module_state: Value = None


class PipelineLayer(Frozen):
    """A layer of a pipeline that has a file of its own.

    Attributes:
        number: Its place among all layers of the pipeline.
        prefix: What its names begin with in the module: ``"3."``, or ``"tied_modules.embed."`` of
            one that shares its module with other layers.
        keys: Names in its file, in order. None where it has neither parameters nor buffers.
        stage: Stage of the source that stored it.
        state: Attributes of its state dict, such as the ``_metadata``, or None.
    """

    number: int
    prefix: str
    keys: tuple[str, ...]
    stage: int
    state: Value = None

    @property
    def names(self) -> tuple[str, ...]:
        """Names in the module."""
        return tuple(f"{self.prefix}{key}" for key in self.keys)


class PipelineStage(Frozen):
    """What one stage of a pipeline trains.

    Attributes:
        names: Trained parameters and buffers of its module, in order.
        groups: Its own parameter groups: a stage without a parameter of a group lacks the group.
    """

    names: tuple[str, ...]
    groups: tuple[ParameterGroup, ...]


class Pipeline(Frozen):
    """A model whose layers are dealt out to stages.

    Attributes:
        layers: Those with a file, by their numbers. Functions between them have none, and neither
            has a tied layer that uses its module through a function.
        stages: The stages of the source.
        names_ranks: Whether the files of layers name their tensor-parallel rank although there is
            only one.
        is_described: Whether there are no files of layers, and only names tell of them, as in a
            universal folder.
        lost: Buffers that were in such files and are in none.
        are_ties_known: Whether tied modules are named as such. Where an optimizer only has numbers,
            it may be proved whose they are, and not that no module is tied.
    """

    layers: tuple[PipelineLayer, ...]
    stages: tuple[PipelineStage, ...]
    names_ranks: bool = False
    is_described: bool = False
    lost: tuple[str, ...] = ()
    are_ties_known: bool = True


class Training(Frozen):
    """What goes with the tensors of a checkpoint.

    Attributes:
        tag: Name of the save, such as ``global_step10``.
        dtype: Type that the weights are trained in.
        order: Every name of the module in its order: parameters, buffers, second names of tied
            weights, extra states.
        groups: Of the optimizer. Empty where there is none.
        optimizer: State of the optimizer as a whole: loss scaler, overflow, gradient clipping.
        ranks: What ranks of the source stored of their own, in the order of a mesh ``dp, mp`` of
            `data_size` and the model-parallel ranks; at least one.
        data_size: Data-parallel ranks that stored something of their own; 1 where one speaks for
            all.
        described: What `universal_checkpoint_info` of the source says beside its maps, pattern
            lists and categories: version, original vocabulary size; empty where there is none.
        has_maps: Whether the source says in maps how parameters are cut, or not at all; a model
            that says it itself does so in lists of patterns.
        experts: One mapping for each layer of experts that AutoEP made, in the stored form; ranks
            and sizes in it are the source's.
        pipeline: The layers and stages where the source has files of layers, else None. Then
            `ranks` are those of all stages, one stage after another.
    """

    tag: str
    dtype: DType
    order: tuple[str, ...]
    groups: tuple[ParameterGroup, ...]
    optimizer: Mapping[str, Value]
    ranks: tuple[ModelRank, ...]
    described: Mapping[str, Value]
    experts: tuple[Mapping[str, Value], ...] = ()
    data_size: int = 1
    pipeline: Pipeline | None = None
    has_maps: bool = True

    @property
    def model_size(self) -> int:
        """Model-parallel ranks of the source."""
        return len(self.ranks) // self.data_size

    def number_of_rank(self, *, dp: int, dp_size: int, mp: int, mp_size: int) -> int:
        """Which of `ranks` speaks for a rank of another mesh: the one in its proportional place.

        Examples:
            >>> from restride.checkpoint.dtypes import DTYPES
            >>> ranks = tuple(ModelRank(f"mp {n}", {}, {}) for n in range(2))
            >>> training = Training("step", DTYPES["float32"], (), (), {}, ranks, {})
            >>> [training.number_of_rank(dp=0, dp_size=1, mp=mp, mp_size=4) for mp in range(4)]
            [0, 0, 1, 1]
        """
        data = dp * self.data_size // dp_size
        return data * self.model_size + mp * self.model_size // mp_size
