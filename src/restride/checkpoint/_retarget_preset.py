"""What the preset of a model says, held against the checkpoint first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from restride.checkpoint._retarget_source import LayoutEquality, Source, tp_mesh, whole
from restride.checkpoint.catalog import Finding
from restride.errors import RuleError
from restride.frozen import Frozen
from restride.layouts.presets import (
    autotp_cuts,
    is_head,
    name_pattern,
    require_model_of,
    require_no_other_model,
)
from restride.layouts.recognition import recognize

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from restride.algebra.layout import Layout
    from restride.algebra.mesh import Mesh

__all__ = ["Preset", "deviation_findings", "deviations", "find_preset"]


class Preset(Frozen):
    """The layouts of one model on the old ranks and on the new ones.

    Attributes:
        name: For people.
        before: On the ranks that wrote the checkpoint, for what the preset speaks of.
        after: On the new ranks, likewise.
        mesh: The new ranks.
        is_without_plan: Whether transformers' plan was found not to have been followed, where it
            would have made a difference.
    """

    name: str
    before: Mapping[str, Layout]
    after: Mapping[str, Layout]
    mesh: Mesh
    is_without_plan: bool = False

    def old(self, source: Source) -> Layout:
        """What a parameter would be on its own ranks."""
        return self.before.get(source.name) or whole(source, source.layout.mesh)

    def new(self, source: Source) -> Layout:
        """What it is on the new ranks."""
        return self.after.get(source.name) or whole(source, self.mesh)


def find_preset(
    parameters: Sequence[Source],
    undecided: Sequence[Source],
    mesh: Mesh,
    config: Mapping[str, object],
    *,
    plan: bool | None,
    grains: tuple[int, int],
    same: LayoutEquality,
) -> Preset | RuleError:
    """Build the preset of a model on the old ranks and on the new ones.

    Where the user does not say whether transformers' plan is followed, the variant is taken that
    explains more of the checkpoint; where both explain as much, the engine's own choice.

    Args:
        parameters: All of the checkpoint.
        undecided: Those that the preset is wanted for.
        mesh: The new ranks.
        config: Content of the model's ``config.json``.
        plan: What the user says of the plan.
        grains: Of the run that wrote the checkpoint, and of the next one.
        same: Compares layouts.

    Returns:
        The preset; or why it says nothing of a checkpoint that was written by several ranks.

    Raises:
        RuleError: The preset refuses the new ranks, or the config is of another model: then its
            heads are not those of this one either.
    """
    shapes = {s.name: s.layout.full_shape for s in parameters if s.layout.unit_bits is None}
    require_no_other_model(config, shapes)
    old = tp_mesh(max(source.ranks for source in parameters))
    model = _Model(config, parameters, undecided)
    variants: dict[bool | None, Mapping[str, Layout]] = {}
    refused: RuleError | None = None
    for variant in (None, False) if plan is None else (plan,):
        try:
            variants[variant] = model.cuts(old, variant, grains[0])
        except RuleError as error:
            refused = refused or error
    if not variants:
        return refused or RuleError("the preset says nothing")
    name = f"preset {str(config.get('model_type')).lower()}"
    found = {variant: Preset(name, before, {}, mesh) for variant, before in variants.items()}
    chosen = min(found, key=lambda v: sum(1 for _ in deviations(undecided, found[v], same)))
    is_without = plan is None and chosen is False and variants.get(None) != variants[False]
    return Preset(
        name + (" without its plan" if is_without else ""),
        variants[chosen],
        model.cuts(mesh, chosen, grains[1]),
        mesh,
        is_without,
    )


def deviations(sources: Iterable[Source], preset: Preset, same: LayoutEquality) -> Iterable[Source]:
    """Yield the parameters that the checkpoint has cut otherwise than the preset says."""
    for source in sources:
        if source.ranks > 1 and not same(source.layout, preset.old(source)):
            yield source


def deviation_findings(
    sources: Iterable[Source], preset: Preset, *, is_kept: bool
) -> Iterable[Finding]:
    """Say once for each kind of parameter that the checkpoint is cut otherwise than its model."""
    kinds: dict[tuple[str, Layout], list[Source]] = {}
    for source in sources:
        kinds.setdefault((name_pattern(source.name), source.layout), []).append(source)
    for (pattern, layout), members in kinds.items():
        first = members[0]
        names = f"tensor {first.name!r}" + (
            f" and {len(members) - 1} more of {pattern!r}" if len(members) > 1 else ""
        )
        decision = (
            "the cut of the checkpoint is kept to; if the next run cuts as the preset, give "
            "--plan or --no-plan, or a rule"
            if is_kept
            else "the preset is followed, as was asked for"
        )
        yield Finding(
            "warning",
            "preset-differs",
            f"{names}: the run that wrote the checkpoint cut it as {_in_words(layout)}, the "
            f"{preset.name} says {_in_words(preset.old(first))}; {decision}",
            f"tensor {first.name!r}",
            {"pattern": pattern, "tensors": [member.name for member in members]},
        )


def _in_words(layout: Layout) -> str:
    found = recognize(layout)
    if not found:
        return "no family that is known"
    return "whole on every rank" if found[0].rule_layout == "whole" else found[0].text


class _Model:
    """One model and the parameters that it is asked about."""

    def __init__(
        self, config: Mapping[str, object], parameters: Sequence[Source], asked: Sequence[Source]
    ) -> None:
        self._config = dict(config)
        if not isinstance(config.get("tie_word_embeddings"), bool):
            # DeepSpeed goes by the config; where that is silent, by the model, which has a head of
            # its own or has not. Names that a rule has decided are not among those asked for.
            self._config["tie_word_embeddings"] = not any(is_head(s.name) for s in parameters)
        self._all = {s.name: s.layout.full_shape for s in parameters if s.layout.unit_bits is None}
        self._shapes = {s.name: s.layout.full_shape for s in asked if s.layout.unit_bits is None}
        self._is_known = False

    def cuts(self, mesh: Mesh, plan: bool | None, grain: int) -> Mapping[str, Layout]:  # noqa: FBT001
        """Layouts of what the preset speaks of."""
        if mesh.size > 1 and not self._is_known:
            require_model_of(self._config, self._all)
            self._is_known = True
        return autotp_cuts(self._config, self._shapes, mesh=mesh, grain=grain, plan=plan)
