"""Drawn runs, converted to other ranks, beside what a slow writer writes for these ranks."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from restride.formats.deepspeed.reader import read_catalog
from restride.formats.deepspeed.target import DeepSpeedTarget
from restride.formats.deepspeed.training import read_training
from restride.formats.deepspeed.writer import lay_out
from restride.layouts.replicated import replicated
from restride.storage.torch_zip import open_torch_zip
from restride.testing.contents import content_of
from restride.testing.exporting import write_export
from restride.testing.zero_files import write_zero_run
from restride.testing.zero_runs import muon_runs, zero_runs

ALIGNED = 4  # DeepSpeed aligns to 16 bytes, and the drawn weights are of 4


def _target_run(run, target):
    """The same parameters, as an engine of the target with the same configuration has them."""
    parameters = {
        name: replace(parameter, cut=parameter.cut if target.tp == run.tp else None)
        for name, parameter in run.parameters.items()
    }
    return replace(
        run,
        dp=target.dp,
        tp=target.tp,
        parameters=parameters,
        writer="zero" if run.writer == "bf16_optimizer" and target.zero == 2 else run.writer,
        alignment=ALIGNED if run.alignment > 1 else 1,
        has_mappings=True,
    )


def _converted(source, target, out):
    layouts = {
        tensor.name: tensor.layout
        if tensor.layout.rank_count == target.tp
        else replicated(tensor.layout.full_shape, mesh=target.tp_mesh)
        for tensor in source.tensors
    }
    write_export(source, lay_out(source, read_training(source), target, layouts), out)


def _compared(path, run, zero):
    """What both writers write, without what the slow one leaves out or gets wrong on purpose."""
    value = open_torch_zip(path).value
    if "module" in value:
        shapes = [
            [(name, tuple(shape)) for name, shape in g.items()] for g in value["param_shapes"]
        ]
        keys = ("module", "buffer_names", "optimizer", "global_steps", "dp_world_size")
        return [shapes, *(content_of(value[key]) for key in (*keys, "mp_world_size"))]
    state = dict(value["optimizer_state_dict"])
    if run.writer == "elastic":  # the engine asks for it; the slow writer is of torch's optimizers
        assert state.pop("base_optimizer_state_step", 2) == 2
    if run.is_round_robin:  # here the slow writer has DeepSpeed's fault
        del state["param_slice_mappings"]
    if "zero_stage" in state and zero != 1:
        state["zero_stage"] = replace(state["zero_stage"], args=(zero,))
    return content_of(state)


@given(zero_runs() | muon_runs(), st.data())
@settings(max_examples=80, phases=(Phase.explicit, Phase.generate))  # shrinking takes minutes
def test_files_are_those_that_the_ranks_of_the_target_would_have_written(run, data):
    tp = data.draw(st.sampled_from([1, run.tp]), "tp")
    target = DeepSpeedTarget(tp, data.draw(st.integers(1, 4), "dp"), data.draw(st.integers(1, 2)))
    expected_run = _target_run(run, target)
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_zero_run(folder / "source", run)
        write_zero_run(folder / "expected", expected_run)

        _converted(read_catalog(folder / "source"), target, folder / "out")

        prefix = "bf16_" if run.writer == "bf16_optimizer" else ""
        for path in (folder / "expected" / "step").iterdir():
            name = path.name if path.name.startswith("mp_rank") else prefix + path.name
            found = _compared(folder / "out" / "step" / name, expected_run, 1)
            assert found == _compared(path, expected_run, target.zero)


@given(zero_runs(writers=("zero",)))
@settings(max_examples=20)
def test_members_of_a_group_are_told_in_the_order_of_the_optimizer(run):
    with TemporaryDirectory() as name:
        write_zero_run(Path(name) / "source", run)

        training = read_training(read_catalog(Path(name) / "source"))

    expected = [
        tuple(name for name, parameter in run.parameters.items() if parameter.group == number)
        for number in range(len(training.groups))
    ]
    assert [group.names for group in training.groups] == expected
