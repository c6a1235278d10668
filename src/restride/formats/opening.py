"""Which format a path is in. Only the reader that is needed is imported."""

from __future__ import annotations

import os
import re
from fnmatch import fnmatchcase
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from msgspec.structs import replace

from restride.checkpoint.catalog import Finding
from restride.errors import ExecutionError, FormatError, RestrideError, UnsupportedError
from restride.frozen import Frozen
from restride.storage.paths import as_path, require_paths
from restride.wording import counted, which

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from os import PathLike

    from restride.checkpoint.catalog import Catalog
    from restride.checkpoint.training import Training
    from restride.storage.torch_zip import TorchFiles

__all__ = [
    "Format",
    "Told",
    "detect_format",
    "open_catalog",
    "open_catalogs",
    "open_training",
    "require_told_matters",
]

Format: TypeAlias = Literal["deepspeed", "safetensors", "universal"]

_SAFETENSORS: Final = (".safetensors", ".safetensors.index.json")
# A folder with files of the optimizer alone is one as well: its reader says what it lacks.
_DEEPSPEED_FILE: Final = re.compile(r".*(model|optim)_states\.pt")
_PARTS: Final = ("latest", "latest_universal", "restride.json")
_OTHERS: Final = {
    "*.distcp": "a checkpoint of PyTorch's DCP",
    "latest_checkpointed_iteration.txt": "a checkpoint of Megatron-LM",
    "pytorch_model*.bin": "a model as torch.save writes it",
}
_MOST_SHOWN: Final = 5
_MOST_LOOKED_INTO: Final = 1000
_LOOKED_FOR: Final = (
    "looked for: a DeepSpeed checkpoint (a folder with a 'latest' file, or a tag folder with "
    "*_model_states.pt files), a universal folder of it (with 'latest_universal', or with 'zero'), "
    "a *.safetensors file, or a folder of them"
)


class Told(Frozen):
    """What a user tells of a checkpoint where its files do not.

    Attributes:
        pp_tied: The layers of a pipeline that share a module.
        source_config: The ``config.json`` of the model, as AutoTP cut it.
        source_rules: A rule file that says how its tensor-parallel ranks cut it.
    """

    pp_tied: Mapping[str, Sequence[int]] | None = None
    source_config: str | PathLike[str] | None = None
    source_rules: str | PathLike[str] | None = None

    def __post_init__(self) -> None:
        require_paths(self.source_config, self.source_rules)

    @property
    def is_of_cut(self) -> bool:
        """Whether anything is told of the tensor-parallel cut."""
        return self.source_config is not None or self.source_rules is not None


_NOTHING: Final = Told()


def open_catalog(
    path: str | PathLike[str], opened: TorchFiles | None = None, told: Told = _NOTHING
) -> Catalog:
    """Find out what is in a checkpoint of any known format, without loading a tensor.

    Args:
        path: A file or a folder.
        opened: What its files are opened by, where others will ask for them again.
        told: What a user tells of it. Formats that do not need it do not ask, and their catalog
            does not have it.

    Raises:
        FormatError: It is no checkpoint that is known, or one that is damaged.
        UnsupportedError: It is one that cannot be read, or what is told is not so.
        RuleError: What is told of the cut is not so.
        ExecutionError: It is not there, or the system cannot read it.
    """
    name = detect_format(path)
    module = import_module(f"restride.formats.{name}")
    options: tuple[object, ...] = () if name == "safetensors" else (opened,)
    if name == "deepspeed" and told != _NOTHING:
        options = (opened, *_read_told(told))
    try:
        catalog: Catalog = module.read_catalog(path, *options)
    except FormatError as error:
        from restride.formats._damaged import tell_of_others  # noqa: PLC0415 - rarely said

        tell_of_others(error)
        root = str(Path(path))
        if root != "." and not error.where.startswith(root):
            error.located(root)  # which of two it is, where two are compared
        raise
    if name == "safetensors":
        catalog = replace(catalog, findings=(*catalog.findings, *_left(Path(path))))
    return catalog


def _read_told(told: Told) -> tuple[object, object]:
    """What is told, as the reader of DeepSpeed's files takes it."""
    from restride.formats.deepspeed.stage_cut import read_ties  # noqa: PLC0415 - rarely said
    from restride.formats.deepspeed.told_cut import ToldCut  # noqa: PLC0415 - likewise

    tied = None if told.pp_tied is None else read_ties(told.pp_tied)
    return tied, ToldCut(told.source_config, told.source_rules) if told.is_of_cut else None


def open_catalogs(*paths: str | PathLike[str], told: Told = _NOTHING) -> tuple[Catalog, ...]:
    """As `open_catalog`, of checkpoints that are only looked at: what is told has to matter.

    Raises:
        UnsupportedError: It matters to none of them, among others.
    """
    catalogs = tuple(open_catalog(path, None, told) for path in paths)
    require_told_matters(told, *catalogs)
    if told.pp_tied is not None and all(catalog.tied is None for catalog in catalogs):
        raise UnsupportedError(
            "no names depend on which layers are tied: only pipelines without ZeRO number their "
            "parameters",
            where=catalogs[0].root,
            remedy="leave --pp-tied out",
        )
    return catalogs


def require_told_matters(told: Told, *catalogs: Catalog) -> None:
    """Refuse what is told of a cut that the checkpoints say themselves.

    Raises:
        UnsupportedError: None of them needs it.
    """
    if told.is_of_cut and not any(catalog.is_cut_told for catalog in catalogs):
        raise UnsupportedError(
            "says itself how its ranks cut every parameter, or was written by one tensor-parallel "
            "rank: what is told of that would be passed over",
            where=catalogs[0].root,
            remedy="leave --source-config and --source-rules out",
        )


def open_training(catalog: Catalog, opened: TorchFiles | None = None) -> Training:
    """Read what goes with the tensors of a checkpoint, for a writer whose files are resumed from.

    Args:
        catalog: What `open_catalog` gave.
        opened: What its files were opened by; without it they are opened again.

    Raises:
        UnsupportedError: The format has no such thing, or this checkpoint lacks it.
        FormatError, CorruptError, ExecutionError: As for `open_catalog`.
    """
    family, _, variant = catalog.format.partition(" ")
    if family != "deepspeed":
        raise UnsupportedError(
            f"{catalog.format} has no training that could go on: no parameter groups, loss scaler "
            "and scheduler",
            where=catalog.root,
            remedy="convert the DeepSpeed checkpoint itself",
        )
    name = "universal" if variant.startswith("universal") else "deepspeed"
    module = import_module(f"restride.formats.{name}.training")
    training: Training = module.read_training(catalog, opened)
    return training


def detect_format(path: str | PathLike[str]) -> Format:
    """Tell the format of a file or folder by the names in it.

    Raises:
        FormatError: Nothing that is known was found; says what was looked for.
        UnsupportedError: It is an address or no path at all, or of a format that is not read.
        ExecutionError: The path is not there, or the system cannot read it.
    """
    place = Path(as_path(path))
    try:
        os.stat(place)  # noqa: PTH116
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ExecutionError("no such file or folder", where=str(place)) from error
    except OSError as error:  # a folder above it that may not be entered, say
        raise ExecutionError(f"cannot be looked at ({error.strerror})", where=str(place)) from error
    if not place.is_dir():
        if place.name.endswith(_SAFETENSORS):
            return "safetensors"
        is_part = place.suffix == ".pt" or place.name in _PARTS
        if is_part:
            problem, remedy = "is a part of a checkpoint", f"name its folder, {str(place.parent)!r}"
        else:
            problem, remedy = "is a file of no known format", _LOOKED_FOR
            if place.suffix == ".json":
                remedy = "name a checkpoint; `restride check CKPT --against` compares fingerprints"
        raise FormatError(problem, where=str(place), remedy=remedy)
    names = _names(place)
    if found := _format_in(place, names):
        return found
    if "optimizer_state.pt" in names:
        raise FormatError(
            "is a part of a universal folder",
            where=str(place),
            remedy=f"name the folder {str(place.resolve().parent)!r}",
        )
    if {"files", "journal"}.issubset(names):
        raise FormatError(
            "is the unfinished output of a conversion",
            where=str(place),
            remedy="run the same `restride convert` again with --resume, and name its output",
        )
    raise _unknown(place, names)


def _unknown(place: Path, names: Sequence[str]) -> FormatError | UnsupportedError:
    """Say of a folder that is no checkpoint what it holds, and what would be one."""
    remedy = _name_one(place, names)
    for pattern, what in _OTHERS.items():
        if not remedy and any(fnmatchcase(name, pattern) for name in names):
            return UnsupportedError(
                f"is {what}, which is not read",
                where=str(place),
                remedy="save it as safetensors where it can be loaded, or name a DeepSpeed save",
            )
    shown = ", ".join(names[:_MOST_SHOWN]) + (", ..." if names[_MOST_SHOWN:] else "")
    return FormatError(
        f"is a folder of no known format (it holds {shown or 'nothing'})",
        where=str(place),
        remedy=remedy or _LOOKED_FOR,
    )


def _format_in(folder: Path, names: list[str]) -> Format | None:
    if _is_universal(folder, names):
        return "universal"
    if "latest" in names or _has_states(names):
        return "deepspeed"
    if any(name.endswith(_SAFETENSORS) for name in names):
        return "safetensors"
    return "deepspeed" if _tags(folder) else None


def _name_one(place: Path, names: Sequence[str]) -> str:
    """Say that a folder holds checkpoints, as one of a run does with those of all its steps."""
    found = [name for name in names[:_MOST_LOOKED_INTO] if _is_checkpoint(place / name)]
    if not found:
        return ""
    # The newest by the time it was written: by its name, step 1000 comes before step 999.
    newest = max(found, key=lambda name: (place / name).stat().st_mtime_ns)
    return f"it has {counted(len(found), 'checkpoint')}: name one, as {str(place / newest)!r}"


def _is_checkpoint(folder: Path) -> bool:
    try:
        return folder.is_dir() and _format_in(folder, _names(folder)) is not None
    except (RestrideError, OSError):  # one that may not be looked into
        return False


def _is_universal(folder: Path, names: list[str]) -> bool:
    """A folder that has both was converted beside its source, and is the source."""
    if "latest" in names:
        return False
    return "latest_universal" in names or os.path.lexists(folder / "zero" / "optimizer_state.pt")


def _has_states(names: Iterable[str]) -> bool:
    return any(map(_DEEPSPEED_FILE.fullmatch, names))


def _tags(place: Path) -> list[str]:
    """Names of the folders in a folder that hold DeepSpeed checkpoints."""
    folders = [name for name in _names(place) if (place / name).is_dir()] if place.is_dir() else []
    return [name for name in folders if _has_states(_names(place / name))]


def _left(place: Path) -> list[Finding]:
    """Tell of DeepSpeed checkpoints beside safetensors: trainers save both, and ``latest``."""
    try:
        tags = _tags(place)
    except ExecutionError:  # a folder that may not be looked into is none that was meant
        return []
    if not tags:
        return []
    shown = ", ".join(tags[:_MOST_SHOWN]) + (", ..." if tags[_MOST_SHOWN:] else "")
    message = (
        f"the safetensors in {place} are read; {counted(len(tags), 'DeepSpeed checkpoint')} beside "
        f"them ({shown}) {which(len(tags), 'is', 'are')} not, as there is no file 'latest'; to "
        f"read {which(len(tags), 'it', 'one')}, name its folder, as {str(place / tags[0])!r}"
    )
    return [Finding("warning", "ignored-files", message, details={"folders": tags})]


def _names(folder: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in folder.iterdir())
    except OSError as error:
        raise ExecutionError(f"cannot be listed ({error.strerror})", where=str(folder)) from error
