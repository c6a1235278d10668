"""The layout of a parameter from the shapes of its shards, where only the model or a user knows it.

Shards look the same whether a tensor was cut, fused or replicated, so nothing is guessed here: a
preset or a rule says how full tensors are cut, and a full shape is looked for that it cuts into
these shards. There has to be exactly one answer.
"""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Final

from restride.errors import LayoutError, RuleError
from restride.layouts._arguments import find_mesh_axis
from restride.layouts.presets._config import Settings, read_settings
from restride.layouts.presets._models import find_family
from restride.layouts.presets._rules import build_rule
from restride.layouts.presets.autotp import autotp_cuts, is_head
from restride.layouts.presets.fitting import require_model_of
from restride.layouts.presets.rule_file import Matched, resolved_rules
from restride.layouts.replicated import replicated

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from restride.algebra.layout import Layout, Shape
    from restride.algebra.mesh import MeshLike
    from restride.layouts.presets._rules import Rule
    from restride.layouts.presets.rule_file import Rules

__all__ = ["ShardCuts"]

_WHOLE: Final = "whole"
# So many sizes are tried, where shards are neither whole nor side by side.
_MOST_SIZES: Final = 1 << 16


class ShardCuts:
    """What a preset, or rules in front of it, say of the shards of one model.

    Args:
        names: All parameters of the model.
        mesh: The ranks, of one axis.
        config: Content of the model's ``config.json``.
        rules: The user's own. What no rule matches is left to the preset of the config, if there is
            one, and to what the rules say of the rest.
        grain: DeepSpeed's `tp_grain_size`.

    Raises:
        RuleError: A rule matches nothing or asks for what the config does not say, or the config is
            of no model that is known, and nothing else is said.

    Examples:
        >>> from restride.layouts.presets import read_rules
        >>> rules = read_rules('''
        ... format = "restride-rules/1"
        ... rest = "whole"
        ... [[rules]]
        ... match = "h.*.attn.qkv.weight"
        ... layout = "column"
        ... ''')
        >>> cuts = ShardCuts(["h.0.attn.qkv.weight", "ln.weight"], mesh={"tp": 2}, rules=rules)
        >>> cuts.find("h.0.attn.qkv.weight", [(6, 4), (6, 4)]).layout.full_shape
        (12, 4)
        >>> cuts.find("ln.weight", [(4,), (4,)]).layout.full_shape
        (4,)
    """

    def __init__(
        self,
        names: Collection[str],
        *,
        mesh: MeshLike,
        config: Mapping[str, object] | None = None,
        rules: Rules | None = None,
        grain: int = 1,
    ) -> None:
        self._target = find_mesh_axis(mesh, None)
        self._grain = grain
        self._rules = rules
        self._resolved = () if rules is None else resolved_rules(rules, names, config)
        self._settings = read_settings(config, grain=grain) if config else Settings(grain=grain)
        self._config: dict[str, object] | None = None
        if config is not None and (rules is None or rules.rest != _WHOLE):
            self._config = dict(config)
            if not isinstance(config.get("tie_word_embeddings"), bool):
                self._config["tie_word_embeddings"] = not any(map(is_head, names))
            self._preset = f"preset {find_family(config, names).model_type}"
        self._known: dict[tuple[str | None, str, tuple[Shape, ...]], Matched] = {}

    def find(self, name: str, shapes: Sequence[Shape]) -> Matched:
        """Find the layout of one parameter, and what says it.

        Args:
            name: The parameter.
            shapes: Shape of the shard of each rank.

        Raises:
            RuleError: Nothing is said of it, or what is said makes no such shards; or, which a rule
                decides, several cuts make them.
        """
        rule = next((rule for rule in self._resolved if rule.pattern.matches(name)), None)
        # Layers repeat: what differs is the number of the layer, which a rule may go by.
        pattern = ".".join("#" if part.isdecimal() else part for part in name.split("."))
        key = None if rule is None else rule.pattern.text, pattern, tuple(shapes)
        if key not in self._known:
            self._known[key] = self._find(rule, name, tuple(shapes))
        return self._known[key]

    def require_model(self, layouts: Mapping[str, Layout]) -> None:
        """Hold the sizes in the config against the full tensors.

        Raises:
            RuleError: They are of another model, or of another size of it.
        """
        if self._config is not None:
            shapes = {name: layout.full_shape for name, layout in layouts.items()}
            require_model_of(self._config, shapes)

    def _find(self, rule: Rule | None, name: str, shapes: tuple[Shape, ...]) -> Matched:
        if rule is not None:
            return self._by_rule(rule, name, shapes)
        if self._config is not None:
            return self._by_preset(self._config, name, shapes)
        if self._rules is not None and self._rules.rest == _WHOLE:
            what = "whole, as the rules say of the rest"
            return Matched(what, self._one(what, name, shapes, [self._whole]))
        raise RuleError(
            f"no rule says how {self._target.size} ranks hold it",
            where=f"{self._rules.where}: parameter {name!r}" if self._rules else name,
            remedy='write one, or rest = "whole" if every rank holds what has none',
        )

    def _by_rule(self, rule: Rule, name: str, shapes: tuple[Shape, ...]) -> Matched:
        def cut(full: Shape) -> Layout:
            return build_rule(rule, name, full, self._target, self._settings)

        what = f'rule "{rule.pattern.text}"'
        return Matched(what, self._one(what, name, shapes, [cut]))

    def _by_preset(
        self, config: Mapping[str, object], name: str, shapes: tuple[Shape, ...]
    ) -> Matched:
        """By the preset; the shards may tell whether transformers' plan was followed."""

        def cut_by(plan: bool | None) -> Callable[[Shape], Layout]:  # noqa: FBT001
            def cut(full: Shape) -> Layout:
                mesh = self._target.mesh
                found = autotp_cuts(config, {name: full}, mesh=mesh, grain=self._grain, plan=plan)
                return found.get(name) or self._whole(full)

            return cut

        cuts = [cut_by(None), cut_by(False)]  # noqa: FBT003 - a plan, or none
        return Matched(self._preset, self._one(self._preset, name, shapes, cuts))

    def _of_vocabulary(self, name: str, found: list[Layout]) -> list[Layout]:
        """Of several layouts of an output head or embedding those that have the vocabulary."""
        config = self._config or {}
        family = find_family(config) if config else None
        embedding = family.embedding if family else None
        is_of_head = is_head(f"{name.rpartition('.')[0]}.weight")  # its bias is as long
        if not is_of_head and not (embedding and embedding.matches(name)):
            return found
        rows = config.get("vocab_size")
        return [layout for layout in found if layout.full_shape[0] == rows] or found

    def _whole(self, full: Shape) -> Layout:
        return replicated(full, mesh=self._target.mesh)

    def _one(
        self,
        what: str,
        name: str,
        shapes: tuple[Shape, ...],
        cuts: Sequence[Callable[[Shape], Layout]],
    ) -> Layout:
        """The one layout that has these shards."""
        found: list[Layout] = []
        problem = ""
        for candidates in (_full_shapes(shapes), _partly_whole(shapes)):
            for full, cut in product(candidates, cuts):
                try:
                    layout = cut(full)
                except (LayoutError, RuleError) as error:
                    problem = problem or f", or it refuses: {error.problem}"
                    continue
                ranks = range(layout.rank_count)
                if [layout.shard_shape(rank) for rank in ranks] == [*shapes]:
                    found += [] if layout in found else [layout]
            if found:
                break
        found = self._of_vocabulary(name, found)
        if len(found) == 1:
            return found[0]
        shown = ", ".join(map(str, shapes[:4])) + (", ..." if len(shapes) > 4 else "")  # noqa: PLR2004
        full_shapes = sorted({layout.full_shape for layout in found})
        ways = ", with transformers' plan and without"
        if len(full_shapes) > 1:
            ways = f", of tensors of shapes {', '.join(map(str, full_shapes[:4]))}"
        raise RuleError(
            f"{what} makes no shards of shapes {shown}{problem}"
            if not found
            else f"{what} makes shards of shapes {shown} in {len(found)} ways{ways}",
            where=f"parameter {name!r}",
            remedy="write a rule that says how the ranks that wrote it cut it (--source-rules)",
        )


def _full_shapes(shapes: tuple[Shape, ...]) -> Iterator[Shape]:
    """What shards may be of: each the whole, or side by side along one dimension."""
    if all(shape == shapes[0] for shape in shapes):
        yield shapes[0]
    for dim in _joints(shapes):
        yield _resized(shapes[0], dim, sum(shape[dim] for shape in shapes))


def _partly_whole(shapes: tuple[Shape, ...]) -> Iterator[Shape]:
    """What shards may be of that are cut in part, such as queries, and whole in part."""
    for dim in _joints(shapes):
        sizes = [shape[dim] for shape in shapes]
        if sum(sizes) - max(sizes) <= _MOST_SIZES:
            for size in range(max(sizes), sum(sizes)):
                yield _resized(shapes[0], dim, size)


def _joints(shapes: tuple[Shape, ...]) -> Iterator[int]:
    """Dimensions in which alone the shards may differ."""
    if len({len(shape) for shape in shapes}) == 1:
        for dim in range(len(shapes[0])):
            if len({_resized(shape, dim, 0) for shape in shapes}) == 1:
                yield dim


def _resized(shape: Shape, dim: int, size: int) -> Shape:
    return (*shape[:dim], size, *shape[dim + 1 :])
