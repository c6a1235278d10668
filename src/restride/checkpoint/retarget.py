"""How each tensor of a checkpoint is to be cut over another number of tensor-parallel ranks.

Several things may know it. The first of them that speaks of a tensor decides:

1. a rule that the user wrote;
2. the checkpoint itself, where the number of ranks stays: its cut is kept exactly;
3. one rank, which holds everything whole;
4. the preset of the model, from its ``config.json``;
5. the cut that the checkpoint has, where it is of a family that gives one answer on the new ranks.

A preset is held against the checkpoint first: it is built on the old ranks, and has to give what is
there. Where it does not, the run that wrote the checkpoint was cut otherwise, and its own family is
kept to. A user who says whether transformers' plan is followed says how the next run cuts: then the
preset decides whatever the checkpoint has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from restride.algebra._checks import require_int
from restride.checkpoint._retarget_family import Families, Numbers
from restride.checkpoint._retarget_preset import (
    Preset,
    deviation_findings,
    deviations,
    find_preset,
)
from restride.checkpoint._retarget_source import (
    LayoutEquality,
    Source,
    stated_grain,
    tp_mesh,
    whole,
)
from restride.checkpoint.catalog import Finding
from restride.checkpoint.fused_cuts import FUSED_CUT, wrong_cuts
from restride.errors import RuleError
from restride.frozen import Frozen
from restride.layouts.presets import (
    how_to_write,
    matched_layouts,
    name_pattern,
    nearest_models,
    read_settings,
)
from restride.wording import counted

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from restride.algebra.layout import Layout
    from restride.checkpoint.catalog import Catalog, TensorEntry
    from restride.layouts.presets import Rules

__all__ = ["Retargeted", "retarget", "stated_grain"]

_EP: Final = "ep"
_WHOLE: Final = "whole"
_KEPT: Final = "kept"
_PRESET: Final = "preset"
_MATRIX: Final = 2


class Retargeted(Frozen):
    """The target layout of every tensor.

    Attributes:
        layouts: By name, in the order of the catalog, over a mesh of the one axis ``tp``. Stacked
            experts that are placed over ``ep`` ranks keep that mesh.
        how: What decided, in a few words: ``"kept"``, ``"whole"``, ``"recognized as codegen-qkv"``,
            ``"preset llama"``, ``'rule "**.attn.qkv.weight"'``.
        findings: Where the checkpoint is cut otherwise than its model says, and what would train
            wrongly.
    """

    layouts: Mapping[str, Layout]
    how: Mapping[str, str]
    findings: tuple[Finding, ...] = ()


def retarget(
    catalog: Catalog,
    *,
    tp: int,
    config: Mapping[str, object] | None = None,
    rules: Rules | None = None,
    plan: bool | None = None,
    grain: int | None = None,
) -> Retargeted:
    """Find how every tensor of a checkpoint is cut over another number of tensor-parallel ranks.

    Args:
        catalog: The checkpoint.
        tp: Tensor-parallel ranks of the target.
        config: Content of the model's ``config.json``.
        rules: The user's own, as `read_rules` gives them.
        plan: Whether the target engine follows transformers' tensor-parallel plan. By default as
            the run did that wrote the checkpoint; where that cannot be told, as an engine does that
            is left alone.
        grain: DeepSpeed's `tp_grain_size` of the target engine; by default that of the
            configuration which the checkpoint carries, else 1.

    Returns:
        A layout for every tensor of the catalog.

    Raises:
        RuleError: Nothing says how a parameter is cut, or what says it leaves several answers; the
            preset is unknown or does not fit; a rule matches nothing, or its layout refuses.
        LayoutError: A number is none.

    Cost:
        Some milliseconds for each different layout. Never walks elements.
    """
    require_int("tp", tp, at_least=1)
    if grain is not None:
        require_int("grain", grain, at_least=1)
    if plan is not None and config is None:
        raise RuleError(
            f"{'--plan' if plan else '--no-plan'} says how the preset of a model is taken, and "
            "there is no model",
            remedy="give the config.json of the model with --config, or leave it out",
        )
    return _Retargeting(catalog, tp, config, rules, plan, grain).run()


class _Retargeting:
    def __init__(
        self,
        catalog: Catalog,
        tp: int,
        config: Mapping[str, object] | None,
        rules: Rules | None,
        plan: bool | None,  # noqa: FBT001 - not called from outside
        grain: int | None,
    ) -> None:
        stated = stated_grain(catalog.values)
        self._catalog = catalog
        self._mesh = tp_mesh(tp)
        self._config = config
        self._rules = rules
        self._plan = plan
        self._grains = stated or 1, grain or stated or 1
        self._decided: dict[str, tuple[Layout, str]] = {}
        self._findings: list[Finding] = []
        self._same = LayoutEquality()

    def run(self) -> Retargeted:
        placed = {t.name for t in self._catalog.tensors if self._keep_if_placed(t)}
        sources = [Source.of(t) for t in self._catalog.tensors if t.name not in placed]
        parameters = [source for source in sources if source.is_parameter]
        self._by_rules(parameters)
        self._without_model(sources)
        undecided = [source for source in parameters if source.name not in self._decided]
        if undecided:
            self._by_model(parameters, undecided)
        self._warn_of_fused(parameters)
        names = [tensor.name for tensor in self._catalog.tensors]
        return Retargeted(
            {name: self._decided[name][0] for name in names},
            {name: self._decided[name][1] for name in names},
            tuple(self._findings),
        )

    def _keep_if_placed(self, tensor: TensorEntry) -> bool:
        """Keep stacked experts over ranks of their own as they are: no other ranks cut them."""
        if all(name != _EP for name, _ in tensor.layout.mesh.axes):
            return False
        self._decided[tensor.name] = tensor.layout, _KEPT
        return True

    def _by_rules(self, parameters: Sequence[Source]) -> None:
        """Decide what a rule matches, under its own name or that of a tied weight."""
        rules = self._rules
        if rules is None:
            return
        shapes = {
            name: source.layout.full_shape for source in parameters for name in _names(source)
        }
        grain = self._grains[1]
        found = matched_layouts(rules, shapes, mesh=self._mesh, config=self._config, grain=grain)
        for source in parameters:
            matches = [(name, found[name]) for name in _names(source) if name in found]
            if not matches and rules.rest == _WHOLE:
                layout = whole(source, self._mesh)
                self._decided[source.name] = layout, "whole, as the rules say of the rest"
            for name, match in matches:
                first_name, first = matches[0]
                if not self._same(first.layout, match.layout):
                    raise RuleError(
                        f"the rule {match.pattern!r} cuts {name!r} otherwise than the rule "
                        f"{first.pattern!r} cuts {first_name!r}, and they are one tied weight",
                        where=rules.where,
                        remedy="give both names the same layout",
                    )
                self._decided[source.name] = first.layout, f'rule "{first.pattern}"'

    def _without_model(self, sources: Sequence[Source]) -> None:
        """Decide what needs no knowledge of the model: ranks that stay, one rank, buffers."""
        for source in sources:
            if source.name in self._decided:
                continue
            is_told = self._plan is not None or self._grains[0] != self._grains[1]
            is_recut = is_told and source.is_parameter and source.ranks > 1
            if source.ranks == self._mesh.size and not is_recut:
                self._decided[source.name] = source.layout, _KEPT
            elif self._mesh.size == 1 or not source.is_parameter:
                self._decided[source.name] = whole(source, self._mesh), _WHOLE

    def _by_model(self, parameters: Sequence[Source], undecided: Sequence[Source]) -> None:
        """Decide by the preset, and by the cut that there is where that does not decide."""
        preset = self._find_preset(parameters, undecided)
        if isinstance(preset, Preset):
            self._by_preset(preset, undecided)
        elif self._plan is not None and preset is not None:
            raise preset  # a plan is followed, or is not, by a preset alone
        families = Families(self._mesh, self._numbers(), self._same)
        for source in undecided:
            if source.name in self._decided:
                continue
            if source.ranks == 1:
                raise preset if isinstance(preset, RuleError) else self._nothing_said(undecided)
            found = families.rebuild(source)
            if found is not None:
                layout, name = found
                self._decided[source.name] = layout, f"recognized as {name}"
        self._require_answers(families, parameters, preset)

    def _by_preset(self, preset: Preset, undecided: Sequence[Source]) -> None:
        """Follow the preset where it explains the checkpoint, or where the user says so."""
        differing = list(deviations(undecided, preset, self._same))
        is_kept = self._plan is None
        self._findings += deviation_findings(differing, preset, is_kept=is_kept)
        if preset.is_without_plan:
            message = (
                "the run that wrote the checkpoint did not follow transformers' tensor-parallel "
                "plan of the model; the next one must not either"
            )
            self._findings.append(Finding("note", "without-plan", message))
        kept = {source.name for source in differing} if is_kept else set()
        for source in undecided:
            if source.name not in kept and source.layout.unit_bits is None:
                self._decided[source.name] = preset.new(source), preset.name

    def _find_preset(
        self, parameters: Sequence[Source], undecided: Sequence[Source]
    ) -> Preset | RuleError | None:
        if self._config is None:
            return None
        return find_preset(
            parameters,
            undecided,
            self._mesh,
            self._config,
            plan=self._plan,
            grains=self._grains,
            same=self._same,
        )

    def _numbers(self) -> Numbers:
        heads = None if self._config is None else read_settings(self._config).heads
        return Numbers(heads, *self._grains)

    def _nothing_said(self, undecided: Sequence[Source]) -> RuleError:
        names = [source.name for source in undecided]
        example = next((s.name for s in undecided if _is_layer(s)), names[0])
        return RuleError(
            "the tensors are whole, and nothing in the checkpoint says how "
            f"{counted(self._mesh.size, 'rank')} cut its {counted(len(names), 'parameter')}, such "
            "as "
            f"{example!r}",
            where=self._catalog.root,
            remedy=_give_config(names) or how_to_write(example, layout="column"),
        )

    def _require_answers(
        self, families: Families, parameters: Sequence[Source], preset: Preset | RuleError | None
    ) -> None:
        """Refuse what the cut that there is leaves open, and say why no preset decides it."""
        if isinstance(preset, RuleError):
            place = f"{preset.where}: " if preset.where else ""
            families.require_answers(why=f"the config does not decide it ({place}{preset.problem})")
        elif preset is not None:
            families.require_answers(why=f"the {preset.name} would have cut it otherwise")
        else:
            names = [source.name for source in parameters]
            families.require_answers(remedy=_give_config(names))

    def _warn_of_fused(self, parameters: Sequence[Source]) -> None:
        """Say once for each kind of fused weight that the target cuts it against its heads."""
        cut = {
            source.name: layout
            for source in parameters
            for layout, how in [self._decided[source.name]]
            if how != _KEPT
        }
        told: set[str] = set()
        for name, wrong in wrong_cuts(cut, self._config).items():
            pattern = name_pattern(name)
            if pattern not in told:
                told.add(pattern)
                where = f"tensor {name!r}"
                how = self._decided[name][1]
                message = f"{where}, as {how} cuts it for {self._mesh.size} ranks: {wrong}"
                if how.startswith(_PRESET):
                    message += (
                        "; an engine that does not follow transformers' plan does (--no-plan)"
                    )
                self._findings.append(
                    Finding("warning", FUSED_CUT, message, where, {"pattern": pattern})
                )


def _give_config(names: Sequence[str]) -> str:
    """What would decide where a preset knows the names; empty where none does."""
    return "give the config.json of the model with --config" if nearest_models(names) else ""


def _names(source: Source) -> tuple[str, ...]:
    """All names of a parameter: tied weights have several."""
    return source.name, *source.tensor.aliases


def _is_layer(source: Source) -> bool:
    """Whether a parameter is a matrix that every layer has, and so a good example."""
    is_matrix = len(source.layout.full_shape) == _MATRIX
    return is_matrix and name_pattern(source.name) != source.name
