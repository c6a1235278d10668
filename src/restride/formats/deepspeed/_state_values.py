"""What a checkpoint stores besides tensors, as JSON values, and where the ranks differ in it.

model        top-level entries of the first model file: steps, scheduler, configuration, client
optimizer    entries of the first optimizer file, or, without ZeRO, of the optimizer in the first
             model file: loss scaler, hyperparameters of the groups
other_files  by file: what the files of other ranks have that the first one has not
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from restride.checkpoint.catalog import Finding
from restride.formats.deepspeed import _model, _optimizer
from restride.formats.deepspeed._values import JsonWriter, read_bytes
from restride.formats.deepspeed._whole import file as _whole_file
from restride.storage.ranges import FilePool

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from restride.formats.deepspeed._fields import Field
    from restride.formats.deepspeed._optimizer import ZeroFile
    from restride.formats.deepspeed._run import Run
    from restride.formats.deepspeed._values import Json
    from restride.formats.deepspeed._whole.states import Whole, WholeRank

__all__ = ["read_values"]

# Geometry that has become layouts; it is by far the largest part of a file's metadata.
_MAP_KEYS: Final = frozenset({"affine_map", "affine_maps"})
_COUNTERS: Final = ("global_steps", "global_samples", "skipped_steps", "iteration")


def read_values(
    runs: Sequence[Run],
    members: Sequence[Sequence[Sequence[str]]],
    extras: Mapping[str, Mapping[str, Field]],
    wholes: Sequence[Whole | None] = (),
) -> dict[str, Json]:
    """Read everything in the files that is no tensor of the model or its optimizer.

    Args:
        runs: The files of each pipeline stage. Findings are added to them: steps that disagree,
            tensors left behind.
        members: For each of them the names of the parameters of each optimizer group, in flat
            order.
        extras: By file, entries of expert files that are no weights.
        wholes: The optimizer in the model files of each stage, without ZeRO.

    Raises:
        CorruptError: The values of a file unfold beyond any measure.
    """
    with FilePool() as pool:
        models = [
            (model.name, _entries(run, pool, _model_fields(model.root, model.extras)))
            for run in runs
            for model in run.all_models
        ]
        optimizers = [
            (zero.name, _entries(run, pool, _optimizer_fields(zero), members=names))
            for run, names in zip(runs, _joined(members), strict=True)
            for zero in run.zeros.values()
        ]
        optimizers += [
            (
                rank.file.where,
                _entries(runs[0], pool, _whole_fields(rank), members=_members(whole, rank)),
            )
            for whole in wholes
            if whole is not None
            for rank in whole.ranks
        ]
        others: dict[str, Json] = {
            name: _entries(runs[0], pool, fields) for name, fields in extras.items()
        }
        _compare_steps(runs, pool)
    _compare_counters(runs[0], models)
    values: dict[str, Json] = {"model": models[0][1]}
    if optimizers:
        values["optimizer"] = optimizers[0][1]
    for files in (models, optimizers):
        for name, entries in files[1:]:
            different = {
                key: value
                for key, value in entries.items()
                if key not in files[0][1] or files[0][1][key] != value
            }
            if different:
                others[name] = different
    values["other_files"] = others
    return values


def _joined(members: Sequence[Sequence[Sequence[str]]]) -> Sequence[Sequence[Sequence[str]]]:
    """Give the groups of all pipeline stages one list of names, where they are the same groups.

    Every stage has an optimizer of its own; they are made alike, of what each stage has.
    """
    if len({len(groups) for groups in members}) > 1:
        return members
    whole = [
        tuple(dict.fromkeys(name for names in group for name in names))
        for group in zip(*members, strict=True)
    ]
    return [whole] * len(members)


def _model_fields(root: Field, extras: Sequence[Field]) -> dict[str, Field]:
    fields = {key: entry for key, entry in root.items() if key not in _model.CONSUMED_KEYS}
    # State dicts may hold objects, such as the extra state of a module.
    return fields | {f"module{extra.where.split(': module', 1)[-1]}": extra for extra in extras}


def _optimizer_fields(zero: ZeroFile) -> dict[str, Field]:
    fields = {key: entry for key, entry in zero.root.items() if key != "optimizer_state_dict"}
    fields |= {
        key: entry for key, entry in zero.state.items() if key not in _optimizer.CONSUMED_KEYS
    }
    for number, group in enumerate(zero.groups):
        fields |= {f"state.{number}.{key}": entry for key, entry in group.others.items()}
    return fields | {
        f"param_groups.{number}": group for number, group in enumerate(zero.param_groups)
    }


def _whole_fields(rank: WholeRank) -> dict[str, Field]:
    state = rank.file.state
    fields = {key: entry for key, entry in state.items() if key not in _whole_file.CONSUMED_KEYS}
    group_of = {name: str(n) for n, names in enumerate(rank.members) for name in names}
    for name, owned in rank.owned.items():
        # A flat buffer has one state for its group, which is not carried for each member.
        owner = group_of[name] if rank.file.kind == "flat" else name
        fields |= {f"state.{owner}.{key}": entry for key, entry in owned.others.items()}
    return fields | {
        f"param_groups.{number}": group for number, group in enumerate(rank.file.settings)
    }


def _members(whole: Whole, rank: WholeRank) -> Sequence[Sequence[str | int]]:
    """Names of the parameters of each group, or their numbers where they have no names."""
    if whole.problem is None:
        return whole.members
    return [[entry.number for entry in group] for group in rank.file.groups]


def _entries(
    run: Run,
    pool: FilePool,
    fields: Mapping[str, Field],
    *,
    members: Sequence[Sequence[str | int]] | None = None,
) -> dict[str, Json]:
    """Write the values of one file; parameters of a group get their names instead of numbers."""
    writer = JsonWriter(partial(read_bytes, pool), skipped_keys=_MAP_KEYS)
    entries = writer.entries(fields)
    for where in writer.left_behind:
        message = f"{where} is too large for a value: only DeepSpeed's own forms carry it"
        run.findings.append(Finding("warning", "not-carried", message, where))
    if members is None:
        return entries
    groups: list[Json] = []
    for number, names in enumerate(members):
        group = entries.pop(f"param_groups.{number}", None)
        plain = group if isinstance(group, dict) else {}
        groups.append({**plain, "params": list(names)})
    return {**entries, "param_groups": groups}


def _compare_counters(run: Run, models: Sequence[tuple[str, Mapping[str, Json]]]) -> None:
    first_name, first = models[0]
    for name, entries in models[1:]:
        for key in _COUNTERS:
            if entries.get(key) != first.get(key):
                message = (
                    f"{key} is {entries.get(key)} in {name} and {first.get(key)} in {first_name}: "
                    "the files are of different saves"
                )
                run.findings.append(Finding("error", "step-mismatch", message, name))


def _compare_steps(runs: Sequence[Run], pool: FilePool) -> None:
    """Compare the optimizer's step of each group over the ranks: a few bytes of each file."""
    first: dict[int, tuple[str, bytes]] = {}
    for zero in (zero for run in runs for zero in run.zeros.values()):
        for number, group in enumerate(zero.groups):
            step = group.scalars.get("step")
            if step is None:
                continue
            content = read_bytes(pool, step)
            name, expected = first.setdefault(number, (zero.name, content))
            if content != expected:
                message = (
                    f"the optimizer step of group {number} in {zero.name} is not that in {name}: "
                    "the files are of different saves"
                )
                part = {} if zero.is_partitioned else {"part": "optimizer"}
                runs[0].findings.append(Finding("error", "step-mismatch", message, zero.name, part))
