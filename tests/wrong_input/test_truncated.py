"""A file ends before it should."""

from __future__ import annotations

import pytest

from restride import api
from restride.errors import FormatError

FILES = {
    "model": ("llama_tp2_z1", "mp_rank_01_model_states.pt"),
    "optimizer": ("llama_tp1dp2_z1", "zero_pp_rank_1_mp_rank_00_optim_states.pt"),
    "partition": ("llama_tp1dp2_z3", "zero_pp_rank_0_mp_rank_00_optim_states.pt"),
    "expert": ("mixtral_ep2_z1", "layer_0_expert_3_mp_rank_00_model_states.pt"),
}


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("kept", [0, 1, 22, 4096, 0.25, 0.5, 0.9, -4096, -22, -1])
def test_a_file_is_cut_off_anywhere(damaged, kind, kept):
    checkpoint, name = FILES[kind]
    run = damaged(checkpoint)
    path = run.file(name)
    content = path.read_bytes()
    stop = int(len(content) * kept) if isinstance(kept, float) else kept
    path.write_bytes(content[:stop])

    run.check_finds(name)
    run.convert_refuses()


def test_all_files_that_are_cut_off_are_named_at_once(damaged):
    run = damaged("llama_tp1dp2_z1")
    names = [f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(2)]
    for name in names:
        run.file(name).write_bytes(run.file(name).read_bytes()[:1000])

    run.check_finds(*names, "1 other file is damaged as well", "copy them again")


def test_one_file_that_is_cut_off_is_the_only_one_that_is_named(damaged):
    run = damaged("llama_tp1dp2_z1")
    run.file("mp_rank_00_model_states.pt").write_bytes(b"")

    with pytest.raises(FormatError, match="a copy that failed; copy it again, or take an earlier"):
        api.open(run.folder)


@pytest.mark.parametrize(
    ("target", "cut"),
    [
        ({"to": "universal"}, ["lm_head.weight/fp32.pt", "model.norm.weight/exp_avg.pt"]),
        ({"max_shard_nbytes": 50_000}, ["model-00001-of", "model-00003-of"]),
    ],
)
def test_so_are_those_of_other_formats(damaged, tmp_path, target, cut):
    api.convert(damaged("llama_tp1dp2_z1").folder, tmp_path / "other", **target)
    for path in (tmp_path / "other").rglob("*"):
        if any(name in str(path) for name in cut):
            path.write_bytes(path.read_bytes()[:100])

    with pytest.raises(FormatError, match="1 other file is damaged as well") as error:
        api.open(tmp_path / "other")
    assert all(name in str(error.value) for name in cut)
