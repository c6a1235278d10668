"""What `check` says that it compared."""

from __future__ import annotations

import pytest

from restride import api
from restride.algebra.coverage import holders


@pytest.mark.parametrize("name", ["gptbigcode_tp2_z1", "llama_tp2_z1", "llama_tp1dp2_z2"])
def test_of_a_tensor_of_which_ranks_share_a_part_that_part_is_counted(name, shared):
    report = api.check(shared / "checkpoints" / name)

    held = [
        (one.numel * entry.dtype.itemsize_nbytes, len(one.ranks))
        for tensor in report.catalog.tensors
        for entry in tensor.states.values()
        for one in holders(entry.layout)
    ]
    assert report.compared_nbytes == sum(nbytes for nbytes, ranks in held if ranks > 1) > 0
