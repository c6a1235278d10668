"""The files of single experts: ``layer_L_expert_E_mp_rank_00_model_states.pt``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from restride.checkpoint.catalog import Finding
from restride.checkpoint.values import StoredTensor
from restride.errors import CorruptError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from restride.formats.deepspeed._experts import ExpertParameter
    from restride.formats.deepspeed._fields import Field
    from restride.formats.deepspeed._run import Run

__all__ = ["ExpertFiles"]


class ExpertFiles:
    """Weights of experts by layer and number.

    Args:
        run: The files. Findings are added to it.
        experts: Stacked parameters by name.

    Attributes:
        extras: By file, entries that are no weights of the described experts.

    Raises:
        CorruptError: Two files are of one expert.
        FormatError: A file is none.
        UnsupportedError: There are expert files, and nothing describes the experts.
    """

    def __init__(self, run: Run, experts: Mapping[str, ExpertParameter]) -> None:
        self._run = run
        self._opened: dict[tuple[int, int], Field] = {}
        self._weights: dict[str, StoredTensor] = {}
        self.extras: dict[str, dict[str, Field]] = {}
        if run.folder.experts and not experts:
            raise UnsupportedError(
                f"has {run.folder.experts[0].name} and no ds_autoep_layers: experts of DeepSpeed's "
                "own MoE layer",
                where=str(run.folder.path),
                remedy="AutoEP checkpoints can be read",
            )
        wanted = {
            f"{expert.name}.{number}"
            for expert in experts.values()
            for number in range(expert.expert_count)
        }
        for file in run.folder.experts:
            if (file.layer, file.expert) in self._opened:
                raise CorruptError(
                    f"layer {file.layer}, expert {file.expert} has two files, one is {file.name}",
                    where=str(run.folder.path),
                )
            content = run.files.open(file.name)
            self._opened[file.layer, file.expert] = content
            for key, entry in content.items():
                if key in wanted and isinstance(entry.value, StoredTensor):
                    self._weights[key] = entry.value
                else:
                    self.extras.setdefault(content.where, {})[key] = entry

    def weight(self, name: str) -> StoredTensor | None:
        """Return the weight of one expert, such as ``...experts.w1.7``, or None."""
        return self._weights.get(name)

    def weights(self, expert: ExpertParameter) -> list[StoredTensor] | None:
        """Return the weight of each expert in order, or None where some are missing."""
        names = [f"{expert.name}.{number}" for number in range(expert.expert_count)]
        missing = [name for name in names if name not in self._weights]
        if not missing:
            return [self._weights[name] for name in names]
        message = (
            f"{len(missing)} of {len(names)} experts of tensor {expert.name!r} are in no file "
            f"(the first is {missing[0]!r}, expected in a file layer_{expert.layer}_expert_*); its "
            "weights are left out"
        )
        self._run.findings.append(
            Finding("error", "missing-file", message, f"tensor {expert.name!r}")
        )
        return None
