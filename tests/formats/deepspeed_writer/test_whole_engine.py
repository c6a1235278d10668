"""The real engine goes on without ZeRO where it trained with it, and the other way round."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from restride import api
from restride.testing.contents import file_content

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.interop

# The wrapper of the fused Adam adds the norm of the gradients up in another order than ZeRO. The
# operator is compiled first, which takes a minute.
FUSED = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "gradient_clipping": 0.0}


def require_saved_again(ours: Path, theirs: Path) -> None:
    """What an engine saves before its first step is what it loaded, but for its configuration."""
    names = sorted(path.name for path in (ours / "step").iterdir())
    assert names == sorted(path.name for path in (theirs / "step").iterdir())
    for name in names:
        found, expected = (file_content(folder / "step" / name) for folder in (ours, theirs))
        for content in (found, expected):
            content.pop("ds_config")
        assert found == expected, name


@pytest.mark.parametrize(
    ("job", "zero"),
    [
        pytest.param(
            {"model": "llama", "world": 2, "tp": 2, "dtype": "fp32", "config": FUSED},
            1,
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            {"model": "llama", "world": 2, "tp": 2, "config": FUSED},
            2,
            marks=pytest.mark.thorough,
        ),
        pytest.param({"model": "gpt2", "world": 2}, 3, marks=pytest.mark.slow),
    ],
    ids=["the optimizer itself", "flat buffers", "a master copy for each parameter"],
)
def test_training_goes_on_without_zero_and_with_it_again(
    engine, tmp_path: Path, job: dict, zero: int
) -> None:
    engine(**job, zero=zero, steps=2, save=tmp_path / "source")
    # The fused Adam does not go on as it would have; what counts is how it resumes by itself.
    resumed = engine(**job, zero=zero, skip=2, steps=2, load=tmp_path / "source")
    tp = job.get("tp", 1)
    dp = job["world"] // tp

    api.convert(tmp_path / "source", tmp_path / "whole", to="deepspeed", zero=0, tp=tp, dp=dp)

    assert not list((tmp_path / "whole").rglob("*optim_states*"))
    without = engine(
        **job,
        zero=0,
        skip=2,
        steps=1,
        load=tmp_path / "whole",
        resave=tmp_path / "again",
        save=tmp_path / "later",
    )
    assert without == resumed[:1]
    require_saved_again(tmp_path / "whole", tmp_path / "again")
    api.convert(tmp_path / "later", tmp_path / "cut", to="deepspeed", zero=zero, tp=tp, dp=dp)
    assert engine(**job, zero=zero, skip=3, steps=1, load=tmp_path / "cut") == resumed[1:]
