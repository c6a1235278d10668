"""Whether a checkpoint may be converted, after what its reader noticed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from restride.errors import CorruptError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from restride.checkpoint.catalog import Finding

__all__ = ["errors_in", "require_sound"]

_OPTIMIZER: Final = "optimizer"
_SAVE: Final = "put all files of one save, and only those, into the folder, under their own names"


def errors_in(findings: Iterable[Finding], *, only_weights: bool) -> list[Finding]:
    """Errors that say that something is not there, or not what it should be.

    Args:
        findings: What the reader noticed.
        only_weights: Whether nothing of the optimizer is asked for. Then errors do not count whose
            details say that they are of the optimizer alone (``"part": "optimizer"``).
    """
    return [
        finding
        for finding in findings
        if finding.severity == "error"
        and not (only_weights and finding.details.get("part") == _OPTIMIZER)
    ]


def require_sound(findings: Iterable[Finding], *, only_weights: bool) -> None:
    """Refuse what an error was found in: files that are missing, or of another save.

    Args:
        findings: What the reader noticed.
        only_weights: As for `errors_in`: whether nothing of the optimizer goes out.

    Raises:
        CorruptError: With the first error, and how many more there are.
    """
    errors = errors_in(findings, only_weights=False)
    counted = errors_in(errors, only_weights=only_weights)
    if not counted:
        return
    more = f" (and {len(counted) - 1} more, see `restride check`)" if counted[1:] else ""
    is_rescuable = all(error.details.get("part") == _OPTIMIZER for error in errors)
    raise CorruptError(
        f"{counted[0].message}{more}",
        remedy=f"{_SAVE}, or convert the weights alone" if is_rescuable else _SAVE,
    )
