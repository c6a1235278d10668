"""The files of single experts: ``layer_L_expert_E_mp_rank_00_model_states.pt``.

AutoEP's layers are described in the model file. The files of DeepSpeed's own layers describe
themselves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from restride.checkpoint.catalog import Finding
from restride.checkpoint.values import StoredTensor
from restride.errors import CorruptError, UnsupportedError
from restride.formats.deepspeed._experts import ExpertParameter, read_experts
from restride.formats.deepspeed._native_experts import (
    NativeExpert,
    is_native,
    native_experts,
    said_rank_count,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from restride.formats.deepspeed._fields import Field
    from restride.formats.deepspeed._run import Run

__all__ = ["Expert", "ExpertFiles", "open_experts"]

Expert: TypeAlias = ExpertParameter | NativeExpert


def open_experts(run: Run) -> tuple[dict[str, Expert], ExpertFiles]:
    """Open the expert files of a run, and find out what they are the experts of.

    Args:
        run: The files. Findings are added to it.

    Returns:
        Tensors of experts by name, in the order of the model; and their files.

    Raises:
        CorruptError: Two files are of one expert, or what is said of them is wrong.
        FormatError: A file is none.
        UnsupportedError: Nothing describes the experts, or not in a way that is understood.
    """
    root = run.models[0].root
    layers = root.get("ds_autoep_layers") or root.get("autoep_layers")
    opened = _opened(run)
    experts: dict[str, Expert] = {**read_experts(layers)}
    if opened and not experts:
        if not is_native(opened) or root.get("num_experts") is None:
            raise UnsupportedError(
                f"has {run.folder.experts[0].name} and no ds_autoep_layers, and the names in it "
                "are not those of DeepSpeed's own MoE layer: nothing says what experts these are",
                where=str(run.folder.path),
                remedy="checkpoints of AutoEP and of deepspeed.moe.layer.MoE can be read",
            )
        experts |= native_experts(run, opened, _rank_count(run))
    return experts, ExpertFiles(run, experts, opened)


class ExpertFiles:
    """Weights of experts by layer and number.

    Args:
        run: The files. Findings are added to it.
        experts: Tensors of experts by name.
        opened: What the files hold, by layer and expert.

    Attributes:
        extras: By file, entries that are no weights of the described experts.
    """

    def __init__(
        self,
        run: Run,
        experts: Mapping[str, Expert],
        opened: Mapping[tuple[int, int], Field],
    ) -> None:
        self._run = run
        self._weights: dict[str, StoredTensor] = {}
        self.extras: dict[str, dict[str, Field]] = {}
        wanted = {
            name
            for expert in experts.values()
            for name in (
                [expert.name]
                if isinstance(expert, NativeExpert)
                else [f"{expert.name}.{number}" for number in range(expert.expert_count)]
            )
        }
        for content in opened.values():
            for key, entry in content.items():
                if key in wanted and isinstance(entry.value, StoredTensor):
                    self._weights[key] = entry.value
                else:
                    self.extras.setdefault(content.where, {})[key] = entry

    def weight(self, name: str) -> StoredTensor | None:
        """Return a tensor of one expert, such as ``...experts.w1.7``, or None."""
        return self._weights.get(name)

    def weights(self, expert: Expert) -> list[StoredTensor] | None:
        """Return the weight of each expert of a stack in order, or None where some are missing."""
        names = [expert.name]
        if isinstance(expert, ExpertParameter):
            names = [f"{expert.name}.{number}" for number in range(expert.expert_count)]
        missing = [name for name in names if name not in self._weights]
        if not missing:
            return [self._weights[name] for name in names]
        message = (
            f"{len(missing)} of {len(names)} experts of tensor {expert.name!r} are in no file "
            f"(the first is {missing[0]!r}, expected in a file layer_{expert.layer}_expert_*); its "
            "weights are left out"
        )
        if isinstance(expert, NativeExpert):
            message = (
                f"tensor {expert.name!r} is in no file (expected in "
                f"layer_{expert.layer}_expert_{expert.number}_mp_rank_00_model_states.pt); its "
                "weights are left out"
            )
        self._run.findings.append(
            Finding("error", "missing-file", message, f"tensor {expert.name!r}")
        )
        return None


def _opened(run: Run) -> dict[tuple[int, int], Field]:
    opened: dict[tuple[int, int], Field] = {}
    for file in run.folder.experts:
        if (file.layer, file.expert) in opened:
            raise CorruptError(
                f"layer {file.layer}, expert {file.expert} has two files, one is {file.name}",
                where=str(run.folder.path),
            )
        opened[file.layer, file.expert] = run.files.open(file.name)
    return opened


def _rank_count(run: Run) -> int | None:
    """Expert-parallel ranks of DeepSpeed's own layers: by the groups, or by the files of ranks."""
    said = said_rank_count(_param_groups(run))
    if said is None and run.folder.expert_optimizers:
        return 1 + max(run.folder.expert_optimizers)
    return said


def _param_groups(run: Run) -> Iterator[Field]:
    for zero in run.zeros.values():
        yield from zero.param_groups
    for model in run.models:
        if model.optimizer is not None and model.optimizer.is_mapping:
            groups = (model.optimizer.get("optimizer_state_dict") or model.optimizer).get(
                "param_groups"
            )
            yield from groups.elements() if groups else ()
