"""The public names and their signatures are written down, so that changing one is deliberate.

After a deliberate change: ``python tests/architecture/test_public_api.py > FILE`` with FILE
``tests/architecture/public_api.txt``.
"""

from __future__ import annotations

import ast
import inspect
import sys
from pathlib import Path
from types import FunctionType, ModuleType

import pytest

import restride
from restride import api, cli
from restride.layouts import presets, recognition

RECORDED = Path(__file__).with_name("public_api.txt")


def describe(name: str, value: object) -> list[str]:
    if isinstance(value, ModuleType):
        return [f"{name} (module)"]
    has_fields = hasattr(value, "__struct_fields__")
    if inspect.isclass(value) and value.__init__ is object.__init__ and not has_fields:
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


@pytest.mark.parametrize("name", restride.__all__)
def test_every_public_name_is_there_after_the_package_alone_is_imported(name: str) -> None:
    """Another module may have been imported here before, which is an attribute since then."""
    restride.__dict__.pop(name, None)

    assert getattr(restride, name) is not None


@pytest.mark.parametrize("module", [restride, api])
def test_a_type_checker_knows_no_name_that_is_not_there(module: ModuleType) -> None:
    """A module with `__getattr__` has every name, to a checker: ours is not shown to one."""
    tree = ast.parse(Path(inspect.getfile(module)).read_text())
    shown = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}

    assert "__getattr__" not in shown
    assert not hasattr(module, "frobnicate")


if __name__ == "__main__":
    sys.stdout.write(public_api())
