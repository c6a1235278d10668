"""A file ends before it should."""

from __future__ import annotations

import pytest

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
