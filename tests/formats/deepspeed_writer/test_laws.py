"""Laws of the sharded form: what is written is what was there, bit for bit, however it is cut."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from recorded import AUTO_EP, DRIFTED, WITHOUT_ZERO, shared_but
from restride.formats.deepspeed.reader import read_catalog
from restride.formats.deepspeed.target import DeepSpeedTarget
from restride.formats.deepspeed.training import read_training
from restride.formats.deepspeed.writer import lay_out
from restride.layouts.replicated import replicated
from restride.testing.exporting import write_export
from restride.testing.gather import gather_all

if TYPE_CHECKING:
    from pathlib import Path

    from restride.algebra.layout import Layout
    from restride.checkpoint.catalog import Catalog

_CHECKPOINTS = shared_but(WITHOUT_ZERO, DRIFTED, *AUTO_EP)


def _layouts(catalog: Catalog, target: DeepSpeedTarget) -> dict[str, Layout]:
    """The tensors' own layouts, or none of them cut."""
    return {
        tensor.name: tensor.layout
        if tensor.layout.rank_count == target.tp
        else replicated(tensor.layout.full_shape, mesh=target.tp_mesh)
        for tensor in catalog.tensors
    }


def _written(source: Catalog, target: DeepSpeedTarget, out: Path) -> Catalog:
    export = lay_out(source, read_training(source), target, _layouts(source, target))
    write_export(source, export, out)
    return read_catalog(out)


@pytest.mark.parametrize("name", _CHECKPOINTS)
@pytest.mark.parametrize(("dp", "zero"), [(2, 1), (3, 2)])
@pytest.mark.parametrize("is_joined", [False, True], ids=["tp", "tp1"])
def test_every_state_is_read_back_bit_for_bit(
    name: str, dp: int, zero: int, *, is_joined: bool, shared: Path, tmp_path: Path
) -> None:
    source = read_catalog(shared / "checkpoints" / name)
    target = DeepSpeedTarget(1 if is_joined else source.mesh.axis_size("tp"), dp, zero)

    again = _written(source, target, tmp_path / "out")

    assert again.format == f"deepspeed zero-{zero}"
    assert again.mesh == target.mesh
    known = {finding.kind for finding in source.findings}
    assert not [finding for finding in again.findings if finding.kind not in known]
    expected, found = gather_all(source), gather_all(again)
    weights = {f"{tensor.name}/weight" for tensor in source.tensors}
    assert expected.keys() | weights == found.keys()
    for key, array in expected.items():
        np.testing.assert_array_equal(found[key], array, err_msg=key)
