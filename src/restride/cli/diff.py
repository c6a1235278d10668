"""``restride diff``: do two checkpoints hold the same tensors?"""

from __future__ import annotations

from collections import Counter
from math import isfinite
from typing import TYPE_CHECKING, Final

import click

from restride import api
from restride.cli.contents import show_headline
from restride.cli.cut_options import source_options
from restride.cli.exits import concluded
from restride.cli.moves import moves_to_json, show_moves
from restride.cli.numbers import Number
from restride.cli.options import PathName, as_rules, json_option, memory_option, states_option
from restride.cli.output import Column, open_page, write_json
from restride.cli.picture import format_shape
from restride.cli.progress import open_progress
from restride.cli.sizes import format_count, format_size
from restride.cli.stage_options import tied_option
from restride.wording import which

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Literal

    from restride.api import ArrayDifference, DiffReport
    from restride.arrays.differences import Number as Value
    from restride.cli.output import Page

__all__ = ["command", "show_report"]

_EXAMPLES: Final = """\b
Examples:
  restride diff CKPT OUT --states weights       bit for bit
  restride diff A B --rtol 1e-2                 the same but for rounding
  restride diff A B --rename 'model\\.(.*)=\\1'   names that differ
"""

_MOST_SHOWN: Final = 20
_DRIFT: Final = "replica-drift"


@click.command("diff", epilog=_EXAMPLES)
@click.argument("a", type=PathName())
@click.argument("b", type=PathName())
@click.option(
    "--rtol",
    type=Number(min=0),
    default=0.0,
    metavar="NUMBER",
    help="Tolerance relative to the value in B. Default: 0, and with --atol 0 every bit counts.",
)
@click.option(
    "--atol",
    type=Number(min=0),
    default=0.0,
    metavar="NUMBER",
    help="Absolute tolerance. Default: 0.",
)
@states_option
@click.option(
    "--rename",
    metavar="OLD=NEW",
    multiple=True,
    callback=as_rules,
    help="Look for names of A that the regular expression OLD matches as a whole under NEW in B.",
)
@tied_option
@source_options
@memory_option("plan and buffers; the interpreter and the names and places of the checkpoints come")
@json_option
def command(
    a: str,
    b: str,
    *,
    rtol: float,
    atol: float,
    states: Literal["weights", "all"],
    rename: Sequence[tuple[str, str]],
    pp_tied: dict[str, tuple[int, ...]] | None,
    source_config: str | None,
    source_rules: str | None,
    memory: int,
    as_json: bool,
) -> int:
    r"""Do two checkpoints hold the same tensors?

    A and B may differ in format and sharding. Arrays are the same when shape, dtype and every bit
    are; with a tolerance, when |a - b| <= atol + rtol * |b| everywhere, whatever the dtypes.
    Says where they are the same rows or columns in another order, as after heads were swapped.
    Exits with 1 where something differs, or could not be read.

    Of several --rename rules the first that matches counts. The last = ends OLD; \1 in NEW is the
    first group: --rename 'module\.(.*)=\1'.
    """
    with open_progress("comparing") as observer:
        report = api.diff(
            a,
            b,
            rtol=rtol,
            atol=atol,
            states=states,
            rename=rename,
            budget_nbytes=memory,
            pp_tied=pp_tied,
            source_config=source_config,
            source_rules=source_rules,
            observer=observer,
        )
    code = concluded(is_fine=report.verdict == "same")
    if as_json:
        write_json(_to_json(report))
    else:
        show_report(open_page(), (a, b), report, is_exact=not (rtol or atol))
    return code


def show_report(
    page: Page, paths: tuple[str, str], report: DiffReport, *, is_exact: bool = True
) -> None:
    """Write what was compared, what is different, then the verdict."""
    for name, path, catalog in zip("AB", paths, (report.a, report.b), strict=True):
        show_headline(page, f"{name} {path}", catalog)
    for name, only in (("A", report.only_a), ("B", report.only_b)):
        lines = _only_in(only)
        for line in lines[:_MOST_SHOWN]:
            page.line(f"only in {name}: {line}", "warn")
        _more(page, len(lines))
    if report.differences:
        names = ("tensor", "state", "different", "first", "A", "B", "largest difference")
        columns = [Column(name, is_number=name in names[4:]) for name in names]
        page.table(columns, [_row(row) for row in report.differences[:_MOST_SHOWN]])
        _more(page, len(report.differences))
        show_moves(page, report.differences)
    unread = [own for own in report.unread if own[1].kind != _DRIFT]
    for name, finding in unread[:_MOST_SHOWN]:
        page.line(f"not compared, {name}: {finding.message} [{finding.kind}]", "bad")
    _more(page, len(unread))
    for name in "AB":
        drifted = [own for side, own in report.unread if side == name and own.kind == _DRIFT]
        if drifted:
            arrays = len({own.where for own in drifted})
            page.line(
                f"{name}: ranks hold different copies of {format_count(arrays, 'array')}, such as "
                f"{drifted[0].where}; those of the lowest ranks were compared, and `restride "
                f"check` shows all of them [{_DRIFT}]",
                "bad",
            )
    if report.verdict == "different":
        page.line(_difference_in_words(report), "bad")
        return
    what = "the same bits" if is_exact else "the same within the tolerance"
    widened = (
        f", {format_count(report.widened_count, 'array')} of them widened exactly from one dtype "
        "to the other"
        if report.widened_count
        else ""
    )
    compared = (
        f"{format_count(report.compared_count, 'array')}, {format_size(report.compared_nbytes)}, "
        f"{what}{widened}"
    )
    if report.verdict == "incomplete":
        advice = "; --states weights compares the weights alone" if unread else ""
        page.line(f"incomplete: {compared}{advice}", "bad")
    else:
        page.line(f"same: {compared}", "good")


def _only_in(only: Sequence[tuple[str, str]]) -> list[str]:
    """One line for each tensor with its states, or for all of them where they lack the same ones.

    Weights against a training checkpoint lack every optimizer state: that is one thing to say.
    """
    states: dict[str, list[str]] = {}
    for tensor, state in only:
        states.setdefault(tensor, []).append(state)
    together = Counter(map(tuple, states.values()))
    lines = [
        f"{', '.join(kinds)} of {format_count(count, 'tensor')}"
        for kinds, count in together.items()
        if count > 1 and "weight" not in kinds
    ]
    lines += [
        f"{tensor} ({', '.join(kinds)})"
        for tensor, kinds in states.items()
        if together[tuple(kinds)] == 1 or "weight" in kinds
    ]
    return lines


def _more(page: Page, count: int) -> None:
    if count > _MOST_SHOWN:
        page.line(f"... and {count - _MOST_SHOWN} more; --json lists all")


def _difference_in_words(report: DiffReport) -> str:
    count = len(report.differences)
    of_all = format_count(report.compared_count, "array")
    parts = [f"{count} of {of_all} {which(count, 'differs', 'differ')}"]
    for name, only in (("A", report.only_a), ("B", report.only_b)):
        if only:
            parts.append(f"{format_count(len(only), 'array')} only in {name}")
    advice = ""
    only = (*report.only_a, *report.only_b)
    if only and not report.differences and all(state != "weight" for _, state in only):
        advice = "; --states weights compares the weights alone"
    elif all(any(state == "weight" for _, state in o) for o in (report.only_a, report.only_b)):
        advice = "; --rename OLD=NEW compares those of A under the names of B"
    return f"different: {', '.join(parts)}{advice}"


def _row(row: ArrayDifference) -> list[str]:
    name = row.tensor if row.tensor == row.other_tensor else f"{row.tensor} = {row.other_tensor}"
    cells = [name, row.state, _what(row)]
    if row.first_coordinates is None or row.first_values is None or row.largest is None:
        return [*cells, "", "", "", ""]
    place = f"[{', '.join(map(str, row.first_coordinates))}]"
    values = [format_number(value) for value in (*row.first_values, row.largest)]
    return [*cells, place, *values]


def _what(row: ArrayDifference) -> str:
    shapes, dtypes = row.shapes, row.dtypes
    if shapes[0] != shapes[1]:
        return f"shape {' and '.join(format_shape(shape) for shape in shapes)}"
    if dtypes[0] == dtypes[1]:
        return f"{row.different_numel:,}"
    kinds = f"dtype {' and '.join(dtypes)}"
    if row.different_numel is None:
        return f"{kinds}, not comparable"
    if not row.different_numel:
        return f"{kinds}, values are equal"
    return f"{kinds}, {format_count(row.different_numel, 'value')}"


def format_number(value: Value) -> str:
    """Write a value with enough digits to see a difference.

    Examples:
        >>> format_number(0.1), format_number(7), format_number(1 + 2j)
        ('0.1', '7', '1+2j')
    """
    return f"{value:.9g}" if isinstance(value, float | complex) else str(value)


def _to_json(report: DiffReport) -> dict[str, object]:
    return {
        "verdict": report.verdict,
        "compared": report.compared_count,
        "compared_nbytes": report.compared_nbytes,
        "read_nbytes": report.read_nbytes,
        "widened": report.widened_count,
        "only_a": [list(array) for array in report.only_a],
        "only_b": [list(array) for array in report.only_b],
        "differences": [_row_to_json(row) for row in report.differences],
        "unread": [
            {"side": side, "kind": finding.kind, "message": finding.message}
            for side, finding in report.unread
        ],
        "seconds": report.seconds,
    }


def _row_to_json(row: ArrayDifference) -> dict[str, object]:
    return {
        "tensor": row.tensor,
        "other_tensor": row.other_tensor,
        "state": row.state,
        "shapes": [list(shape) for shape in row.shapes],
        "dtypes": list(row.dtypes),
        "different_numel": row.different_numel,
        "first_index": row.first_index,
        "first_coordinates": row.first_coordinates and list(row.first_coordinates),
        "first_values": row.first_values and [_json_number(value) for value in row.first_values],
        "largest": None if row.largest is None else _json_number(row.largest),
        "moves": row.moves and moves_to_json(row.moves),
    }


def _json_number(value: Value) -> object:
    """JSON has no infinity, no NaN and no complex numbers: they are written as text."""
    if isinstance(value, complex) or (isinstance(value, float) and not isfinite(value)):
        return format_number(value)
    return value
