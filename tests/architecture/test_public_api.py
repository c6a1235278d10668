"""The public names and their signatures are written down, so that changing one is deliberate.

After a deliberate change: ``python tests/architecture/test_public_api.py > FILE`` with FILE
``tests/architecture/public_api.txt``.
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from types import FunctionType, ModuleType

import restride
from restride import api, cli, comparison
from restride.layouts import presets, recognition

RECORDED = Path(__file__).with_name("public_api.txt")


def describe(name: str, value: object) -> list[str]:
    if isinstance(value, ModuleType):
        return [f"{name} (module)"]
    if inspect.isclass(value) and value.__init__ is object.__init__:
        return [f"class {name}"]
    if inspect.isclass(value):
        methods = [
            f"{name}.{method}{inspect.signature(getattr(value, method))}"
            if callable(getattr(value, method))
            else f"{name}.{method}"
            for method, member in sorted(vars(value).items())
            if not method.startswith("_")
            and isinstance(member, FunctionType | classmethod | staticmethod | property)
        ]
        return [f"class {name}{inspect.signature(value)}", *methods]
    if callable(value):
        return [f"{name}{inspect.signature(value)}"]
    return [f"{name}: {type(value).__name__}"]


def public_api() -> str:
    lines: list[str] = []
    for module in (
        restride,
        restride.deepspeed,
        restride.layouts,
        presets,
        recognition,
        api,
        comparison,
        cli,
    ):
        for name in sorted(module.__all__):
            lines += describe(f"{module.__name__}.{name}", getattr(module, name))
    return "\n".join(lines) + "\n"


def test_the_public_api_is_the_recorded_one() -> None:
    assert public_api() == RECORDED.read_text()


def test_an_unknown_name_is_an_attribute_error_that_names_it() -> None:
    assert not hasattr(restride, "frobnicate")
    assert set(restride.__all__) <= set(dir(restride))


if __name__ == "__main__":
    sys.stdout.write(public_api())
