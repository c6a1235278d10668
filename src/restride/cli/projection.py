"""What ``restride convert --dry-run`` writes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from restride.cli.findings import finding_to_json, show_findings
from restride.cli.output import open_page, write_json
from restride.cli.sizes import format_count, format_duration, format_rate, format_size

if TYPE_CHECKING:
    from restride.api import ConvertProjection
    from restride.cli.output import Page

__all__ = ["show_projection"]

_MOST_SHOWN: Final = 12
_HARDLY: Final = 0.01


def show_projection(projection: ConvertProjection, out: str, *, as_json: bool) -> None:
    """Write what a conversion would do; `out` is the folder as the user called it."""
    if as_json:
        write_json(_to_json(projection))
        return
    page = open_page()
    show_findings(page, projection.findings)
    page.line(
        f"{out}: {format_count(projection.tensor_count, 'array')} in "
        f"{format_count(len(projection.files), 'file')} of {format_size(projection.nbytes)}; "
        "nothing was written",
        "bold",
    )
    for name, nbytes in projection.files[:_MOST_SHOWN]:
        page.line(f"  {name}, {format_size(nbytes)}")
    if len(projection.files) > _MOST_SHOWN:
        page.line(f"  ... and {len(projection.files) - _MOST_SHOWN} more")
    _show_work(page, projection)


def _show_work(page: Page, projection: ConvertProjection) -> None:
    moved = projection.moved
    about = "" if moved.is_exact else "about "
    page.line(
        f"read: {about}{format_size(moved.read_nbytes)} in {format_count(moved.read_count, 'read')}"
    )
    page.line(
        f"write: {format_size(moved.written_nbytes)} in {format_count(moved.write_count, 'write')}"
    )
    page.line(
        f"memory: below {format_size(projection.projected_nbytes)} with "
        f"{format_count(projection.workers, 'thread')}, the interpreter on top"
    )
    if projection.seconds is not None and projection.rate is not None:
        takes = f"at least {format_duration(projection.seconds)}"
        if projection.seconds < _HARDLY:
            takes = f"less than {_HARDLY:.2f} s for the bytes"
        page.line(
            f"time: {takes}, at "
            f"{format_rate(round(projection.rate), 1)} a thread as measured just now without the "
            "disk"
        )
    is_full = projection.free_nbytes < projection.nbytes
    page.line(
        f"disk: {format_size(projection.nbytes)} needed, "
        f"{format_size(projection.free_nbytes)} free{', which is not enough' if is_full else ''}",
        "bad" if is_full else "",
    )


def _to_json(projection: ConvertProjection) -> dict[str, object]:
    moved = projection.moved
    return {
        "out": str(projection.out),
        "files": dict(projection.files),
        "tensors": projection.tensor_count,
        "read_nbytes": moved.read_nbytes,
        "read_count": moved.read_count,
        "written_nbytes": moved.written_nbytes,
        "write_count": moved.write_count,
        "is_exact": moved.is_exact,
        "projected_nbytes": projection.projected_nbytes,
        "workers": projection.workers,
        "rate_nbytes": projection.rate,
        "seconds": projection.seconds,
        "free_nbytes": projection.free_nbytes,
        "findings": [finding_to_json(finding) for finding in projection.findings],
    }
