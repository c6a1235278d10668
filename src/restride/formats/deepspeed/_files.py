"""Which files a DeepSpeed checkpoint folder has: the tag, and the ranks in the names.

    latest                                                  the tag, as text
    TAG/mp_rank_TT_model_states.pt                          weights of one tensor-parallel rank
    TAG/zero_pp_rank_D_mp_rank_TT_model_states.pt           ZeRO-3: the same of one (dp, tp) rank
    TAG/[bf16_|fp16_]zero_pp_rank_D_mp_rank_TT_optim_states.pt   optimizer of one (dp, tp) rank
    TAG/layer_L_expert_E_mp_rank_TT_model_states.pt         one expert of one layer
    TAG/expp_rank_E_mp_rank_TT_optim_states.pt              without ZeRO: optimizer of one (ep, tp)
    TAG/layer_LL[-model_TT]-model_states.pt                 one layer of a pipeline

The "pp_rank" in the names of ZeRO files is the data-parallel rank. In a pipeline, the ``mp_rank``
counts the tensor-parallel ranks of one stage after those of another. Old versions wrote
``TToptim_states.pt``, and the engine still reads it.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Final, TypeVar

from msgspec import field

from restride.errors import CorruptError, ExecutionError, FormatError, UnsupportedError
from restride.frozen import Frozen
from restride.storage.ranges import why_not_opened
from restride.wording import counted

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

__all__ = [
    "ExpertFile",
    "LayerFile",
    "OptimizerFile",
    "TagFolder",
    "find_tag",
    "is_below",
    "list_files",
]

_MODEL: Final = re.compile(r"mp_rank_(\d{1,6})_model_states\.pt")
_ZERO3_MODEL: Final = re.compile(r"zero_pp_rank_(\d{1,6})_mp_rank_(\d{1,6})_model_states\.pt")
_OPTIMIZER: Final = re.compile(
    r"(bf16_|fp16_|)zero_pp_rank_(\d{1,6})_mp_rank_(\d{1,6})_?optim_states\.pt"
)
_EXPERT: Final = re.compile(r"layer_(\d{1,6})_expert_(\d{1,6})_mp_rank_(\d{1,6})_model_states\.pt")
_EXPERT_OPTIMIZER: Final = re.compile(r"expp_rank_(\d{1,6})_mp_rank_(\d{1,6})_optim_states\.pt")
_LAYER: Final = re.compile(r"layer_(\d{1,6})(?:-model_(\d{1,6}))?-model_states\.pt")
_OTHER_LAYOUTS: Final = (
    (
        re.compile(r"layer_\d+-.*model_states\.pt"),
        "pipeline layers of ranks with axes of their own",
    ),
    (re.compile(r"expert_\d+_mp_rank_\d+_model_states\.pt"), "experts of an old DeepSpeed"),
)
_LATEST: Final = "latest"
_Rank = TypeVar("_Rank", int, tuple[int, int])
_LONGEST_TAG: Final = 1024
_MOST_NAMED: Final = 5


class OptimizerFile(Frozen):
    """The file of one (data-parallel, model-parallel) rank.

    Attributes:
        name: Name inside the tag folder.
        prefix: ``"bf16_"``, ``"fp16_"`` or ``""``.
        dp: Data-parallel rank.
        mp: Model-parallel rank: the tensor-parallel one, counted through the stages of a pipeline.
    """

    name: str
    prefix: str
    dp: int
    mp: int


class ExpertFile(Frozen):
    """The file of one expert of one layer."""

    name: str
    layer: int
    expert: int
    tp: int


class LayerFile(Frozen):
    """The file of one layer of a pipeline, on one tensor-parallel rank."""

    name: str
    layer: int
    tp: int


class TagFolder(Frozen):
    """The files of one tag, by what their names say.

    Attributes:
        path: The folder.
        below: Its name below the path that was opened, with a slash, or empty.
        models: Model files by model-parallel rank.
        partitioned: Model files of ZeRO-3 by (data-parallel, model-parallel) rank.
        optimizers: Optimizer files in the order of their names.
        experts: Expert files in the order of their names.
        expert_optimizers: Optimizer files by (expert-parallel, tensor-parallel) rank, without ZeRO.
        layers: Files of pipeline layers in the order of their names.
        unknown: Other ``.pt`` files.
    """

    path: Path
    below: str
    models: dict[int, str] = field(default_factory=dict)
    partitioned: dict[tuple[int, int], str] = field(default_factory=dict)
    optimizers: list[OptimizerFile] = field(default_factory=list)
    experts: list[ExpertFile] = field(default_factory=list)
    expert_optimizers: dict[tuple[int, int], str] = field(default_factory=dict)
    layers: list[LayerFile] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)


def find_tag(path: Path) -> tuple[Path, str]:
    """Return the tag folder of a checkpoint, and its name below `path` with a slash.

    A folder with model files is a tag itself. Otherwise ``latest`` decides, and where there is
    none, the only tag.

    Raises:
        FormatError: There is no tag, ``latest`` names none, several tags exist and nothing says
            which one is meant, or the tag is a universal folder.
    """
    if _has_states(path):
        return path, ""
    tags = _tags(path)
    latest = path / _LATEST
    if os.path.lexists(latest):
        tag = _read_latest(latest)
        if is_below(path, tag):
            if not _has_states(path / tag):
                raise _without_models(path / tag)
            return _sharded(path, tag)
        raise FormatError(
            f"names the tag {tag!r}, which is not there" if tag else "is empty: it names no tag",
            where=str(latest),
            remedy=_name_one(path, tags) if tags else "copy the folder of the tag beside it",
        )
    if not tags:
        raise _without_models(path)
    if len(tags) > 1:
        raise FormatError(
            f"has {len(tags)} tags and no file {_LATEST!r} that says which one is meant",
            where=str(path),
            remedy=_name_one(path, tags),
        )
    return _sharded(path, tags[0])


def is_below(path: Path, tag: str) -> bool:
    """Whether a tag is a folder in `path`, or as ``epoch1/step3`` one in a folder of it.

    Args:
        path: Where the file is that has the tag.
        tag: The tag, of which nothing is known.
    """
    if not {"", ".", ".."}.isdisjoint(tag.split("/")):
        return False
    return os.path.isdir(path / tag)  # noqa: PTH112 - the other one stops at a zero in the name


def _without_models(path: Path) -> FormatError:
    """What is wrong with a tag whose model files are elsewhere: copies begin with the others."""
    folders = [path, *(path / name for name in sorted(_folders(path)))]
    found = ((folder, sum(map(_is_optimizer, _names(folder)))) for folder in folders)
    folder, count = next((each for each in found if each[1]), (path, 0))
    has = f"has {counted(count, 'file')} of the optimizer and none" if count else "has no file"
    return FormatError(
        f"{has} of the model (*_model_states.pt)",
        where=str(folder),
        remedy="add them: a copy or a save was stopped, or each machine saved its own ranks on a "
        "disk of its own",
    )


def _sharded(path: Path, tag: str) -> tuple[Path, str]:
    """The folder of a tag. Of a universal one only the weights would be seen."""
    folder = path / tag
    if os.path.lexists(folder / "zero" / "optimizer_state.pt") and not any(
        map(_OPTIMIZER.fullmatch, _names(folder))
    ):
        raise FormatError(
            f"has the tag {tag!r}, which is a universal folder, and no file 'latest_universal' "
            "that names it",
            where=str(path),
            remedy=f"name the folder itself, as {str(folder)!r}",
        )
    return folder, f"{tag}/"


def _name_one(path: Path, tags: Sequence[str]) -> str:
    more = "..., " if tags[_MOST_NAMED:] else ""
    shown = more + ", ".join(tags[-_MOST_NAMED:])
    return f"tags here are {shown}: name the folder of one, as {str(path / tags[-1])!r}"


def list_files(path: Path, below: str) -> TagFolder:
    """Sort the files of a tag folder by what their names say.

    Raises:
        CorruptError: Two names are of one rank, or some are of ZeRO-3 and some are not.
        UnsupportedError: The names tell of something that cannot be read yet.
    """
    folder = TagFolder(path, below)
    for name in _names(path):
        if match := _MODEL.fullmatch(name):
            _add(
                folder.models, int(match[1]), name, f"model files of mp rank {int(match[1])}", path
            )
        elif match := _ZERO3_MODEL.fullmatch(name):
            dp, mp = int(match[1]), int(match[2])
            _add(
                folder.partitioned,
                (dp, mp),
                name,
                f"model files of dp rank {dp}, mp rank {mp}",
                path,
            )
        elif match := _OPTIMIZER.fullmatch(name):
            folder.optimizers.append(
                OptimizerFile(name, match[1], dp=int(match[2]), mp=int(match[3]))
            )
        elif match := _EXPERT.fullmatch(name):
            folder.experts.append(ExpertFile(name, int(match[1]), int(match[2]), tp=int(match[3])))
        elif match := _EXPERT_OPTIMIZER.fullmatch(name):
            ep, tp = int(match[1]), int(match[2])
            what = f"optimizer files of ep rank {ep}" + (f", tp rank {tp}" if tp else "")
            _add(folder.expert_optimizers, (ep, tp), name, what, path)
        elif match := _LAYER.fullmatch(name):
            folder.layers.append(LayerFile(name, int(match[1]), tp=int(match[2] or 0)))
        elif name.endswith(".pt"):
            _refuse_other(path, name)
            folder.unknown.append(name)
    if folder.models and folder.partitioned:
        raise CorruptError(
            f"has model files of ZeRO-3 and of another stage: "
            f"{next(iter(folder.partitioned.values()))} and {next(iter(folder.models.values()))}",
            where=str(path),
            remedy="put only the files of one save into the folder",
        )
    return folder


def _add(known: dict[_Rank, str], rank: _Rank, name: str, what: str, path: Path) -> None:
    if known.setdefault(rank, name) != name:
        raise CorruptError(f"has two {what}: {known[rank]} and {name}", where=str(path))


def _refuse_other(path: Path, name: str) -> None:
    for pattern, what in _OTHER_LAYOUTS:
        if pattern.fullmatch(name):
            raise UnsupportedError(
                f"has {what}: {name}",
                where=str(path),
                remedy="checkpoints of a PipelineModule, with AutoTP and with AutoEP can be read",
            )


def _names(path: Path) -> list[str]:
    """Names of the files in a folder, in natural order of the ranks; of broken links too."""
    try:
        names = [entry.name for entry in path.iterdir() if not entry.is_dir()]
    except OSError as error:
        raise ExecutionError(f"cannot be listed ({error.strerror})", where=str(path)) from error
    return sorted(names, key=_natural)


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part or 0), text) for text, part in re.findall(r"(\D*)(\d{0,9})", name)]


def _has_states(path: Path) -> bool:
    return any(
        name.endswith("_model_states.pt") and ("mp_rank_" in name or "layer_" in name)
        for name in _names(path)
    )


def _is_optimizer(name: str) -> bool:
    return bool(_OPTIMIZER.fullmatch(name) or _EXPERT_OPTIMIZER.fullmatch(name))


def _tags(path: Path) -> list[str]:
    return sorted(_tag_names(path), key=_natural)


def _tag_names(path: Path) -> Iterator[str]:
    for name in _folders(path):
        if _has_states(path / name):
            yield name


def _folders(path: Path) -> list[str]:
    try:
        return [entry.name for entry in path.iterdir() if entry.is_dir()]
    except OSError as error:
        raise ExecutionError(f"cannot be listed ({error.strerror})", where=str(path)) from error


def _read_latest(latest: Path) -> str:
    try:
        with latest.open("rb") as file:
            text = file.read(_LONGEST_TAG + 1)
    except OSError as error:
        why = why_not_opened(error, latest)
        raise ExecutionError(f"cannot be read ({why})", where=str(latest)) from error
    try:
        tag = text.decode().strip()
    except UnicodeDecodeError:
        raise FormatError("is not the name of a tag: no UTF-8 text", where=str(latest)) from None
    if len(text) > _LONGEST_TAG:
        raise FormatError(f"is no tag: longer than {_LONGEST_TAG} bytes", where=str(latest))
    return tag
