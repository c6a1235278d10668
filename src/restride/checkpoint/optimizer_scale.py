"""An optimizer that goes on with a parameter kept as a multiple of itself.

With ``w' = s * w`` a gradient is ``g / s``, so the moments of Adam follow by the powers -1 and -2,
and its steps are `s` times as long, as they must be, with ``lr * s`` and ``eps / s``. These belong
to a group of parameters: they can follow where all of the group are scaled alike.

Other optimizers have moments of the same names and take other steps with them: RAdam leaves out the
division by the second at first, and Lamb's steps are as long as the parameter says. What tells them
apart are the settings of their groups.
"""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from restride.checkpoint.catalog import Finding
from restride.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from restride.algebra.layout import Layout
    from restride.checkpoint.catalog import Catalog, TensorEntry
    from restride.checkpoint.training import ParameterGroup, Training
    from restride.checkpoint.values import Value

__all__ = ["follow_scales"]

_LONGER: Final = ("lr", "initial_lr")
# Settings of Adam and AdamW: those of torch, and DeepSpeed's fused and CPU ones. Each of these has
# one of `_OWN`, and no other optimizer with its two moments has one of them and no more.
_OWN: Final = frozenset({"amsgrad", "bias_correction", "adam_w_mode"})
_KNOWN: Final = frozenset(
    {
        *(*_OWN, *_LONGER, "betas", "eps", "weight_decay", "decoupled_weight_decay"),
        *("maximize", "foreach", "capturable", "differentiable", "fused"),
    }
)


def follow_scales(
    training: Training, catalog: Catalog, layouts: Mapping[str, Layout]
) -> tuple[Training, tuple[Finding, ...]]:
    """Give every group of parameters the settings with which it takes the same steps.

    Args:
        training: That of the source.
        catalog: The source.
        layouts: How the target holds each tensor; those that it does not name are whole.

    Returns:
        The training of the target, a note for each group whose settings are others, and a warning
        where gradients are clipped. The moments themselves follow where they are copied.

    Raises:
        UnsupportedError: Parameters of one group are scaled by different factors, a setting is none
            that is known to follow, or a scheduler would set the learning rate again.
    """
    factors = {
        tensor.name: _factor(tensor.name, _kept_as(tensor), layouts.get(tensor.name))
        for tensor in catalog.tensors
    }
    groups: list[ParameterGroup] = []
    findings: list[Finding] = []
    for number, group in enumerate(training.groups):
        factor = _common_factor(number, group, factors)
        if factor == 1:
            groups.append(group)
            continue
        _require_no_scheduler(number, training)
        settings = _settings(f"parameter group {number}", group.settings, factor)
        groups.append(replace(group, settings=settings))
        changed = [
            f"{key} {group.settings[key]!r} to {value!r}"
            for key, value in settings.items()
            if value is not group.settings[key]
        ]
        message = f"parameter group {number} is stored {factor} times itself: {', '.join(changed)}"
        findings.append(Finding("note", "optimizer-transform", message))
    if findings and (clipping := _clipping(training)):
        message = (
            f"ds_config says gradient_clipping {clipping}: the norm of all gradients has those of "
            "scaled parameters in it, which are others now, so that clipped steps are not the same"
        )
        findings.append(Finding("warning", "optimizer-transform-clipping", message))
    return replace(training, groups=tuple(groups)), tuple(findings)


def _kept_as(tensor: TensorEntry) -> Layout:
    """The layout whose scale the optimizer of the source knows the tensor by.

    A universal folder has masters and moments whole, and weights in the files of ranks.
    """
    entry = tensor.states.get("fp32") or tensor.states.get("weight")
    return tensor.layout if entry is None else entry.layout


def _factor(name: str, source: Layout, target: Layout | None) -> Fraction:
    """By what a tensor changes: ``target == source * factor``."""
    scales = []
    for layout in (source, target):
        found = {piece.scale for piece in layout.all_pieces} if layout is not None else set()
        if len(found) > 1:
            raise UnsupportedError(
                f"is held with the factors {', '.join(map(str, sorted(found)))}, and no setting "
                "of an optimizer is right for all of them",
                where=f"tensor {name!r}",
                remedy="convert the weights alone",
            )
        scales.append(next(iter(found), Fraction(1)))
    return scales[1] / scales[0]


def _common_factor(number: int, group: ParameterGroup, factors: Mapping[str, Fraction]) -> Fraction:
    first: dict[Fraction, str] = {}
    for name in group.names:
        first.setdefault(factors.get(name, Fraction(1)), name)
    if len(first) > 1:
        said = " and ".join(f"{name!r} by {factor}" for factor, name in list(first.items())[:2])
        raise UnsupportedError(
            f"its parameters change by different factors, {said}, and it has one learning rate",
            where=f"parameter group {number}",
            remedy="convert the weights alone, or keep the number of ranks",
        )
    factor = next(iter(first), Fraction(1))
    if factor < 0:
        raise UnsupportedError(
            f"its parameters change by a factor of {factor}, and no learning rate is negative",
            where=f"parameter group {number}",
            remedy="convert the weights alone",
        )
    return factor


def _require_no_scheduler(number: int, training: Training) -> None:
    for rank in training.ranks:
        if rank.values.get("lr_scheduler") is not None:
            raise UnsupportedError(
                "a scheduler would set the learning rate again at its next step",
                where=f"{rank.where}: parameter group {number}",
                remedy="convert the weights alone, or keep the number of ranks",
            )


def _clipping(training: Training) -> float:
    """The norm that the configuration of the source clips at; 0 where it does not."""
    config = training.ranks[0].values.get("ds_config") if training.ranks else None
    norm = config.get("gradient_clipping") if isinstance(config, dict) else None
    return norm if isinstance(norm, (int, float)) else 0


def _settings(where: str, settings: Mapping[str, Value], factor: Fraction) -> Mapping[str, Value]:
    """The settings of Adam for parameters that are `factor` times themselves."""
    changed = dict(settings)
    _require_adam(where, settings)
    for key in _LONGER:
        if key in settings:
            changed[key] = _product(where, key, settings[key], factor)
    changed["eps"] = _product(where, "eps", settings["eps"], 1 / factor)
    decay = settings.get("weight_decay", 0)
    if decay:
        decoupled = settings.get("decoupled_weight_decay")
        if not isinstance(decoupled, bool):
            raise UnsupportedError(
                f"the group has a weight decay of {decay!r}, and does not say whether it is "
                "decoupled from the gradient",
                where=where,
                remedy="convert the weights alone",
            )
        # Decoupled it is multiplied by the learning rate, else it is a part of the gradient.
        power = 1 if decoupled else 2
        changed["weight_decay"] = _product(where, "weight_decay", decay, 1 / factor**power)
    return changed


def _require_adam(where: str, settings: Mapping[str, Value]) -> None:
    missing = next((key for key in ("lr", "eps") if key not in settings), None)
    strange = sorted(settings.keys() - _KNOWN)
    if missing is None and not strange and settings.keys() & _OWN:
        return
    why = f"has no {missing!r}" if missing else f"has {strange[0]!r}" if strange else ""
    why = why or f"has none of {', '.join(map(repr, sorted(_OWN)))}"
    raise UnsupportedError(
        f"the group {why}, so its optimizer is not known to be Adam, nor how it would take the "
        "same steps",
        where=where,
        remedy="convert the weights alone",
    )


def _product(where: str, key: str, value: Value, factor: Fraction) -> float:
    if type(value) not in {int, float}:
        raise UnsupportedError(
            f"{key} is no plain number", where=where, remedy="convert the weights alone"
        )
    return float(value) * factor.numerator / factor.denominator  # type: ignore[arg-type]
