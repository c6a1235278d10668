"""What the real engine saves again, beside what it had loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from restride.testing.contents import file_content

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture(scope="session")
def require_saved_again() -> Callable[..., None]:
    """Hold a checkpoint against what an engine saves that has loaded it, before its first step.

    They are the very same files. Not the same are the engine's own configuration, what other stages
    keep of the optimizer, the class of shapes, which are plain tuples in the files of AutoEP, the
    versions of modules, which files that a test has changed do not have, and the entries that are
    named.
    """

    def require(ours: Path, theirs: Path, *left_out: str) -> None:
        names = sorted(path.name for path in (ours / "step").iterdir())
        assert names == sorted(path.name for path in (theirs / "step").iterdir())
        for name in names:
            saved, again = (_comparable(own / "step" / name, left_out) for own in (ours, theirs))
            assert saved == again, name

    return require


def _comparable(path: Path, left_out: tuple[str, ...]) -> Any:
    content = file_content(path)
    if not isinstance(content, dict):  # a layer of a pipeline
        return content
    for key in ("ds_config", *left_out):
        content.pop(key, None)
    for key in ("clip_grad", "ds_version"):
        content.get("optimizer_state_dict", {}).pop(key, None)
    if "module" in content:
        content["module"] = content["module"][1]
    if content.get("param_shapes", (None, None))[1] is not None:
        content["param_shapes"] = [_plain(group) for group in content["param_shapes"][1]]
    if content.get("frozen_param_shapes", (None, None))[1] is not None:
        content["frozen_param_shapes"] = _plain(content["frozen_param_shapes"])
    return content


def _plain(shapes: Any) -> dict[str, Any]:
    return {name: numbers for name, (_, numbers) in shapes[1].items()}
