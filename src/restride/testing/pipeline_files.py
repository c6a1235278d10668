"""A slow writer of pipeline checkpoints: the oracle for the reader.

Every stage is a run of its own. Its files are written as those of one, and then become those of a
stage: the model-parallel ranks are counted on, and the weights go into layer files.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st
from msgspec.structs import replace

from restride.checkpoint.values import OrderedDictValue
from restride.frozen import Frozen
from restride.storage.torch_zip import open_torch_zip
from restride.testing.saved_values import save_file
from restride.testing.zero_files import Parameter, ZeroRun, write_zero_run
from restride.testing.zero_runs import distinct, zero_runs

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hypothesis.strategies import DrawFn

__all__ = ["StageRun", "pipelines", "write_pipeline"]

_TIED = "tied_modules.table."


class StageRun(Frozen):
    """One stage of what is to be written.

    Attributes:
        run: Its parameters, and how its ranks cut them.
        layers: What its layers are called in the names of the parameters, by number.
    """

    run: ZeroRun
    layers: Mapping[int, str]


def write_pipeline(folder: Path, stages: Sequence[StageRun], *, has_shapes: bool = True) -> None:
    """Write a checkpoint with one tag.

    Args:
        folder: Where.
        stages: The stages, with the same ranks.
        has_shapes: Whether the model files have the shapes of what was trained; BF16_Optimizer
            without ZeRO leaves them out.
    """
    tag = folder / "step"
    tag.mkdir(parents=True)
    (folder / "latest").write_text("step")
    for number, stage in enumerate(stages):
        with TemporaryDirectory() as other:
            write_zero_run(Path(other) / "run", stage.run)
            for file in sorted((Path(other) / "run" / "step").iterdir()):
                tp = int(file.name.partition("mp_rank_")[2][:2])
                mp = number * stage.run.tp + tp
                name = file.name.replace(f"mp_rank_{tp:02d}", f"mp_rank_{mp:02d}")
                value: Any = open_torch_zip(file).value
                if "module" in value:
                    _write_layers(tag, stage, tp, value["module"])
                    value = _of_stage(value, stage.run.tp, len(stages), has_shapes=has_shapes)
                save_file(tag / name, value)


def _of_stage(value: Any, tp: int, stages: int, *, has_shapes: bool) -> Any:
    dimensions = {"pp_degree": stages, "tp_degree": tp}
    changed = {
        "module": None,
        "mp_world_size": stages * tp,
        "checkpoint_parallel_dimensions": dimensions,
    }
    return {**value, **changed, **({} if has_shapes else {"param_shapes": None})}


def _write_layers(tag: Path, stage: StageRun, tp: int, module: Mapping[Any, Any]) -> None:
    rank = f"-model_{tp:02d}" if stage.run.tp > 1 else ""
    for number, prefix in stage.layers.items():
        content = OrderedDictValue()
        for name, tensor in module.items():
            if name.startswith(prefix):
                content[name.removeprefix(prefix)] = tensor
        save_file(tag / f"layer_{number:02d}{rank}-model_states.pt", content)


@st.composite
def pipelines(draw: DrawFn) -> list[StageRun]:
    """Draw pipelines of up to 3 stages, with a module that some of them are tied to."""
    base = draw(zero_runs())
    count = draw(st.integers(1, 3))
    tied = draw(st.sets(st.integers(0, count - 1)))
    stored = draw(st.sets(st.sampled_from(sorted(tied)), min_size=1)) if tied else set()
    names = [name for name in base.parameters if name.startswith("layer.")]
    table = _whole((5, 3), 200_000)
    stages: list[StageRun] = []
    layer = 0
    for number in range(count):
        parameters = {f"{_TIED}weight": table} if number in tied else {}
        layers: dict[int, str] = {}
        is_first = draw(st.booleans())
        if number in stored and is_first:
            layers[layer] = _TIED
            layer += 1
        for name in names[number::count]:
            layers[layer] = f"{layer}."
            parameters[f"{layer}.inner.weight"] = replace(base.parameters[name], group=0)
            layer += 1
        layers[layer] = f"{layer}."
        parameters[f"{layer}.weight"] = _whole((3,), 90_000 + 10 * number)
        layer += 1 + draw(st.integers(0, 1))  # functions have no file
        if number in stored and not is_first:
            layers[layer] = _TIED
            layer += 1
        stages.append(StageRun(replace(base, parameters=parameters), layers))
    return stages


def _whole(shape: tuple[int, ...], first: int) -> Parameter:
    states = ("weight", "fp32", "exp_avg", "exp_avg_sq")
    return Parameter(shape, {s: distinct(shape, first + 100 * n) for n, s in enumerate(states)})
