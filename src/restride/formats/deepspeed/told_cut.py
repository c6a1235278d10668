"""How tensor-parallel ranks cut parameters of which the files say nothing: what a user tells of it.

DeepSpeed writes it down since 0.19, and where the engine itself cut the model. Checkpoints of older
engines, and of models that were cut by somebody else, hold shards and no more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from restride.checkpoint.catalog import Finding
from restride.checkpoint.retarget import stated_grain
from restride.errors import LayoutError, RuleError
from restride.formats.deepspeed._witness import Witness
from restride.layouts.presets import ShardCuts
from restride.storage.model_files import read_model_config, read_rules_file
from restride.storage.ranges import FilePool
from restride.wording import counted

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from os import PathLike

    from restride.algebra.layout import Layout, Shape
    from restride.algebra.mesh import Mesh
    from restride.checkpoint.values import StoredTensor

__all__ = ["ToldCut"]


class ToldCut:
    """What a user tells of the cut of a checkpoint.

    Args:
        config: File with the model's ``config.json``.
        rules: A rule file.

    Raises:
        RuleError, CorruptError, FormatError, ExecutionError: A file is none, or cannot be read.

    Attributes:
        layouts: The layouts that were asked for, by name.
    """

    def __init__(
        self, config: str | PathLike[str] | None, rules: str | PathLike[str] | None
    ) -> None:
        self._place = str(config) if config is not None else str(rules)
        self._config = None if config is None else read_model_config(config)
        self._rules = None if rules is None else read_rules_file(rules)
        self._cuts: ShardCuts | None = None
        self._names: Collection[str] = ()
        self._grain = 1
        self._how: dict[str, int] = {}
        self.layouts: dict[str, Layout] = {}

    def see(self, names: Collection[str], values: Mapping[str, object]) -> None:
        """Learn what there is in the checkpoint.

        Args:
            names: All parameters.
            values: As of the catalog: DeepSpeed's configuration may say its `tp_grain_size`.
        """
        self._names, self._grain = names, stated_grain(values) or 1

    def layout(self, name: str, shapes: Sequence[Shape], mesh: Mesh) -> Layout:
        """The layout of a parameter.

        Args:
            name: The parameter.
            shapes: Shape of its shard on each rank.
            mesh: The ranks.

        Raises:
            RuleError: Nothing is told of it, or what is told makes no such shards.
        """
        try:
            if self._cuts is None:
                self._cuts = ShardCuts(
                    self._names,
                    mesh=mesh,
                    config=self._config,
                    rules=self._rules,
                    grain=self._grain,
                )
            found = self._cuts.find(name, shapes)
        except (RuleError, LayoutError) as error:
            raise self._located(error) from None
        if name not in self.layouts:
            self.layouts[name] = found.layout
            self._how[found.pattern] = self._how.get(found.pattern, 0) + 1
        return found.layout

    def require_cut(self, name: str, shards: Sequence[StoredTensor]) -> None:
        """Refuse what was told of a parameter that nobody cut: its ranks hold copies.

        Shapes do not tell them apart. Copies of one value, as new biases are, say nothing.

        Raises:
            RuleError: A sample of all shards is the same.

        Cost:
            A few thousand elements of each shard are read.
        """
        layout = self.layouts[name]
        if layout.shard_numel(0) == layout.full_numel:
            return
        with FilePool() as pool:
            witness = Witness(pool)
            if len({witness.token(shard) for shard in shards}) > 1:
                return
            if not witness.is_varied(shards[0]):
                return
        raise RuleError(
            f"all {len(shards)} ranks hold the same: they have copies of a tensor of shape "
            f"{shards[0].shape}, and no shards of one of shape {layout.full_shape}, as was told",
            where=f"{self._place}: tensor {name!r}",
            remedy="nobody cut this model, if it is so with others; a rule of the layout whole "
            "says it of one",
        )

    def _located(self, error: LayoutError | RuleError) -> LayoutError | RuleError:
        """A rule says itself which file it is in."""
        is_said = self._rules is not None and error.where.startswith(self._rules.where)
        return error if is_said else error.located(self._place)

    def findings(self) -> tuple[Finding, ...]:
        """Hold what was told against all of it, and tell what it decided.

        Raises:
            RuleError: The config is of another model.
        """
        if self._cuts is None:
            return ()
        try:
            self._cuts.require_model(self.layouts)
        except RuleError as error:
            raise self._located(error) from None
        by = ", ".join(f"{count} by {how}" for how, count in self._how.items())
        message = (
            "nothing in the files says how tensor-parallel ranks cut "
            f"{counted(len(self.layouts), 'parameter')}: as was told, {by}. The shapes of the "
            "shards fit; nothing else proves it"
        )
        return (Finding("note", "told-cut", message, self._place),)
