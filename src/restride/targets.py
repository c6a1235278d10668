"""How a checkpoint will be cut: what the user says of it, and what lies beside the checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from restride.algebra.coverage import require_covered
from restride.checkpoint.catalog import Finding
from restride.checkpoint.retarget import Retargeted, retarget, stated_grain
from restride.errors import CoverageError, RuleError
from restride.formats.deepspeed._experts.native_cut import on_tensor_ranks, require_said
from restride.frozen import Frozen
from restride.storage.model_files import find_model_config, read_model_config, read_rules_file

if TYPE_CHECKING:
    from collections.abc import Mapping
    from os import PathLike

    from restride.algebra.layout import Layout
    from restride.checkpoint.catalog import Catalog

__all__ = ["Cut", "find_config", "find_cut"]


class Cut(Frozen):
    """What a user says of the tensor-parallel ranks of the next run.

    Attributes:
        tp: How many there are.
        config: The model's ``config.json``; by default the one in or beside the checkpoint.
        rules: A rule file.
        plan: Whether transformers' tensor-parallel plan is followed; by default as by the run that
            wrote the checkpoint.
        grain: DeepSpeed's `tp_grain_size`; by default what the checkpoint's own configuration says.
    """

    tp: int
    config: str | PathLike[str] | None = None
    rules: str | PathLike[str] | None = None
    plan: bool | None = None
    grain: int | None = None


def find_cut(catalog: Catalog, cut: Cut) -> Retargeted:
    """Find how every tensor of a checkpoint is cut for the next run.

    Args:
        catalog: The checkpoint.
        cut: What the user says.

    Returns:
        A layout for every tensor, each proved, and in the findings which ``config.json`` was taken.

    Raises:
        CoverageError: A layout leaves a hole or writes an address twice.
        RuleError, LayoutError, UnsupportedError: As for `retarget`.
        FormatError, ExecutionError: A file that the user names, or the ``config.json`` that is
            found where one is needed, cannot be read.
    """
    catalog = on_tensor_ranks(catalog)
    rules = None if cut.rules is None else read_rules_file(cut.rules)
    findings: tuple[Finding, ...] = ()
    config = None if cut.config is None else read_model_config(cut.config)
    place = "" if cut.config is None else str(cut.config)
    told = _of_grain(catalog, cut)
    is_asked = rules is not None or cut.plan is not None or bool(told)
    if config is None and (is_asked or _is_recut(catalog, cut.tp)):
        config, findings = find_config(catalog)
        place = findings[0].where if findings else ""
    try:
        found = retarget(
            catalog, tp=cut.tp, config=config, rules=rules, plan=cut.plan, grain=cut.grain
        )
    except RuleError as error:
        if error.where or config is None:
            raise
        raise error.located(place) from None  # nobody may have named it
    require_said(found.how, found.how)
    proved: set[Layout] = set()
    for name, layout in found.layouts.items():
        if layout not in proved:
            try:
                require_covered(layout)
            except CoverageError as error:
                raise error.located(f"tensor {name!r}, as {found.how[name]} cuts it") from None
            proved.add(layout)
    return replace(found, findings=(*findings, *told, *found.findings))


def _of_grain(catalog: Catalog, cut: Cut) -> tuple[Finding, ...]:
    """What the configuration that goes along says otherwise."""
    stated = stated_grain(catalog.values)
    if cut.tp == 1 or cut.grain in {None, stated or 1}:
        return ()
    says = "no tp_grain_size" if stated is None else f"tp_grain_size {stated}"
    message = (
        f"ds_config in the files says {says}, as the source was trained: resume with {cut.grain}"
    )
    return (Finding("note", "config-grain", message),)


def _is_recut(catalog: Catalog, tp: int) -> bool:
    """Whether anything has to be known that the checkpoint may not say."""
    return tp > 1 and any(
        tensor.layout.rank_count != tp for tensor in catalog.tensors if tensor.kind == "parameter"
    )


def find_config(catalog: Catalog) -> tuple[Mapping[str, object] | None, tuple[Finding, ...]]:
    """Read the ``config.json`` in or beside a checkpoint, if it is that of a model.

    Returns:
        Its content, or None; and a note which file was taken, or was not.

    Raises:
        FormatError, ExecutionError: There is one, and it cannot be read.
    """
    path = find_model_config(catalog.root)
    if path is None:
        return None, ()
    config = read_model_config(path)
    if isinstance(config.get("model_type"), str):
        message = f"the model is taken from {path}: {config['model_type']}"
        return config, (Finding("note", "model-config", message, str(path)),)
    # DeepSpeed's own configuration often has this name.
    message = f"{path} has no 'model_type' and is not the config of a model: it is not used"
    return None, (Finding("note", "model-config", message, str(path)),)
