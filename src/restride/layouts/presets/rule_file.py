"""Rule files: a user's own table of parameters and layouts, in TOML.

::

    format = "restride-rules/1"
    rest = "whole"                  # or "refuse", the default: nothing is guessed

    [[rules]]
    match = "**.attn.qkv.weight"    # '*' one part, '**' any number of them, {a,b} one of several
    layout = "codegen-qkv"          # any of `restride layouts`, or column, row, whole
    heads = "config:n_head"         # a number, or where it is in the model's config.json

    [[rules]]
    match = "**.mlp.{up,gate}.{weight,bias}"
    layout = "column"

The first rule that matches is taken. Parameters of a layout are written as in TOML or as on the
command line: ``sizes = [4, 2, 2]`` or ``sizes = "4,2,2"``. Heads, hidden size and grain that a rule
does not give are taken from the config, where there is one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from restride.errors import LayoutError, RuleError
from restride.frozen import Frozen
from restride.layouts._arguments import as_shape, find_mesh_axis
from restride.layouts.presets._config import Settings, read_settings
from restride.layouts.presets._match import NamePattern
from restride.layouts.presets._rules import (
    SETTINGS,
    Rule,
    build_rule,
    check_rule,
    parameters_of,
)
from restride.layouts.replicated import replicated
from restride.wording import counted

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from restride.algebra.layout import Layout
    from restride.algebra.mesh import MeshLike
    from restride.layouts.catalogue import Parameter

__all__ = [
    "RULES_FORMAT",
    "Matched",
    "Rules",
    "matched_layouts",
    "read_rules",
    "resolved_rules",
    "rule_layouts",
]

RULES_FORMAT: Final = "restride-rules/1"
"""What a rule file calls itself."""

_RESTS: Final = ("refuse", "whole")
_CONFIG: Final = "config:"


class Rules(Frozen):
    """The rules of one file.

    Attributes:
        rules: In the order of the file.
        rest: What becomes of a parameter without a rule: ``"refuse"`` or ``"whole"``.
        where: Name of the file, for errors.
    """

    rules: tuple[Rule, ...]
    rest: str
    where: str


class Matched(Frozen):
    """The layout of one parameter, and the rule that gave it.

    Attributes:
        pattern: Of the rule.
        layout: What the rule made.
    """

    pattern: str
    layout: Layout


def read_rules(text: str, *, where: str = "rules") -> Rules:
    """Read the text of a rule file.

    Args:
        text: Content of the file.
        where: Its name, for errors.

    Raises:
        RuleError: The text is no TOML, has an unknown key, or a rule that is none; the error names
            line and table.

    Examples:
        >>> rules = read_rules('''
        ... format = "restride-rules/1"
        ... [[rules]]
        ... match = "*.weight"
        ... layout = "sub-params"
        ... sizes = [4, 2, 2]
        ... ''')
        >>> rule_layouts(rules, {"qkv.weight": (8, 2)}, mesh={"tp": 2})["qkv.weight"].shard_shape(0)
        (4, 2)
    """
    import tomllib  # noqa: PLC0415 - most conversions have no such file

    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        # The message of the parser ends with line and column.
        raise RuleError(f"is no TOML: {error}", where=where) from None
    _refuse_unknown(document, {"format", "rest", "rules"}, where)
    if document.get("format") != RULES_FORMAT:
        named = repr(document["format"]) if "format" in document else "nothing"
        raise RuleError(
            f"names {named} as its format",
            where=where,
            remedy=f'begin with: format = "{RULES_FORMAT}"',
        )
    rest = document.get("rest", _RESTS[0])
    if rest not in _RESTS:
        raise RuleError(
            f"says {rest!r} becomes of the rest", where=where, remedy='write "refuse" or "whole"'
        )
    tables = document.get("rules", [])
    if not isinstance(tables, list) or not tables:
        raise RuleError("has no rules", where=where, remedy='write tables "[[rules]]"')
    lines = _header_lines(text)
    rules: list[Rule] = []
    for number, table in enumerate(tables):
        line = f" (line {lines[number]})" if len(lines) == len(tables) else ""
        place = f"{where}: rule {number + 1}{line}"
        try:
            rules.append(_read_rule(table, place))
        except LayoutError as error:
            raise error.located(place) from None
    return Rules(tuple(rules), rest, where)


def rule_layouts(
    rules: Rules,
    shapes: Mapping[str, Sequence[int]],
    *,
    mesh: MeshLike,
    axis: str | None = None,
    config: Mapping[str, object] | None = None,
    grain: int = 1,
) -> dict[str, Layout]:
    """Find the layout of every parameter by rules.

    Args:
        rules: As `read_rules` gives them.
        shapes: Shape of each full parameter, by name.
        mesh: The ranks.
        axis: Mesh axis that is cut, by default the only one.
        config: Content of the model's ``config.json``, where rules ask for it.
        grain: DeepSpeed's `tp_grain_size`.

    Returns:
        A layout for every name of `shapes`, in its order.

    Raises:
        RuleError: A parameter has no rule and the rest is refused, a rule matches nothing, a rule
            asks for what the config does not say, or a layout refuses.
        LayoutError: A shape or a number is none.
    """
    target = find_mesh_axis(mesh, axis)
    matched = matched_layouts(rules, shapes, mesh=mesh, axis=axis, config=config, grain=grain)
    for name in shapes:
        if name not in matched and rules.rest == _RESTS[0]:
            raise RuleError(
                f"parameter {name!r} has no rule",
                where=rules.where,
                remedy='write one, or rest = "whole" if every rank holds what has none',
            )
    return {
        name: matched[name].layout if name in matched else replicated(shape, mesh=target.mesh)
        for name, shape in shapes.items()
    }


def matched_layouts(
    rules: Rules,
    shapes: Mapping[str, Sequence[int]],
    *,
    mesh: MeshLike,
    axis: str | None = None,
    config: Mapping[str, object] | None = None,
    grain: int = 1,
) -> dict[str, Matched]:
    """Find the layouts of those parameters that a rule matches, as `rule_layouts` does.

    Raises:
        RuleError, LayoutError: As for `rule_layouts`, but for parameters without a rule.
    """
    target = find_mesh_axis(mesh, axis)
    settings = read_settings(config, grain=grain) if config else Settings(grain=grain)
    resolved = resolved_rules(rules, shapes, config)
    found: dict[str, Matched] = {}
    for name, shape in shapes.items():
        first = next((rule for rule in resolved if rule.pattern.matches(name)), None)
        if first is not None:
            layout = build_rule(first, name, as_shape(shape), target, settings)
            found[name] = Matched(first.pattern.text, layout)
    return found


def resolved_rules(
    rules: Rules, names: Collection[str], config: Mapping[str, object] | None
) -> tuple[Rule, ...]:
    """Rules with the numbers that they take from a config, of which each matches something.

    Raises:
        RuleError: A rule matches none of the names, or asks for what the config does not say.
    """
    resolved = tuple(_resolve(rule, config) for rule in rules.rules)
    for rule in resolved:
        if names and not any(rule.pattern.matches(name) for name in names):
            raise RuleError(
                f"{rule.pattern.text!r} matches none of {counted(len(names), 'parameter')}",
                where=rule.where,
                remedy=f"they have names such as {next(iter(names))!r}",
            )
    return resolved


class _InConfig(Frozen):
    """A number that stands in the config."""

    key: str


def _read_rule(table: object, where: str) -> Rule:
    if not isinstance(table, Mapping):
        raise RuleError(f"is {table!r}, a table is expected")
    arguments = dict(table)
    match, layout = arguments.pop("match", None), arguments.pop("layout", None)
    for key, value in (("match", match), ("layout", layout)):
        if type(value) is not str:
            what = f"{key} is {value!r}" if key in table else f"has no {key}"
            raise RuleError(f"{what}, a text is expected")
    check_rule(str(layout), arguments)
    known = parameters_of(str(layout))
    read = {key: _read_value(known[key], value) for key, value in arguments.items()}
    for parameter in known.values():
        # What the config may give is looked for when it is known.
        if parameter.is_required and parameter.name not in {*read, *SETTINGS}:
            raise RuleError(f"{layout} needs {parameter.name}: {parameter.help}")
    return Rule(NamePattern(str(match)), str(layout), read, where)


def _read_value(parameter: Parameter, value: object) -> object:
    """Take a value as TOML has it, or the text of the command line."""
    kind = parameter.kind
    match value:
        case str() if value.startswith(_CONFIG) and kind == "int":
            return _InConfig(value.removeprefix(_CONFIG))
        case str():
            return parameter.parse(value)
        case bool():
            if kind == "flag":
                return value
        case int():
            if kind in {"int", "fraction"}:
                return value
        case list():
            if kind == "ints" and all(type(entry) is int for entry in value):
                return tuple(value)
            if kind == "table" and all(isinstance(entry, list) for entry in value):
                return tuple(tuple(entry) for entry in value)
        case _:
            pass
    raise RuleError(
        f"{parameter.name} is {value!r}: {parameter.help}",
        remedy=f'write a whole number, or "{_CONFIG}NAME" for one of the config.json'
        if kind == "int"
        else "write it as TOML has it, or as a text like the command line does",
    )


def _resolve(rule: Rule, config: Mapping[str, object] | None) -> Rule:
    """Put the numbers of the config where a rule points to them."""
    arguments = dict(rule.arguments)
    for key, value in arguments.items():
        if not isinstance(value, _InConfig):
            continue
        found = None if config is None else config.get(value.key)
        if type(found) is not int:
            says = "has none" if found is None else f"says {found!r}"
            what = "no config is given" if config is None else f"the config {says}"
            raise RuleError(
                f"{key} is looked for under {value.key!r}, and {what}",
                where=rule.where,
                remedy="give the config.json of the model, or write the number",
            )
        arguments[key] = found
    return replace(rule, arguments=arguments)


def _refuse_unknown(table: Mapping[str, object], known: set[str], where: str) -> None:
    for key in table:
        if key not in known:
            raise RuleError(
                f"has an unknown key {key!r}", where=where, remedy=f"known are {sorted(known)}"
            )


def _header_lines(text: str) -> list[int]:
    """Lines of the headers of the rules, as far as lines tell."""
    return [
        number
        for number, line in enumerate(text.splitlines(), 1)
        if line.partition("#")[0].strip() == "[[rules]]"
    ]
