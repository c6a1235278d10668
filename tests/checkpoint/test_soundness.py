"""What may be converted after what was found."""

from __future__ import annotations

import pytest

from restride.checkpoint.catalog import Finding
from restride.checkpoint.soundness import require_sound
from restride.errors import CorruptError

GONE = Finding(
    "error", "missing-file", "1 of 2 optimizer files are missing", "x", {"part": "optimizer"}
)
MIXED = Finding("error", "step-mismatch", "global_steps is 7 in b.pt and 2 in a.pt", "b.pt")
HARMLESS = [Finding("warning", "no-weight", "w"), Finding("note", "untracked", "n")]


@pytest.mark.parametrize("only_weights", [True, False])
def test_warnings_and_notes_keep_nothing_from_being_converted(only_weights):
    require_sound(HARMLESS, only_weights=only_weights)


def test_an_error_is_refused_with_its_message_and_what_to_do():
    with pytest.raises(CorruptError) as error:
        require_sound([*HARMLESS, MIXED], only_weights=True)

    assert str(error.value) == (
        "global_steps is 7 in b.pt and 2 in a.pt; put all files of one save, and only those, into "
        "the folder, under their own names"
    )


def test_what_only_the_optimizer_needs_does_not_keep_the_weights():
    require_sound([GONE], only_weights=True)

    with pytest.raises(CorruptError, match=r"their own names, or convert the weights alone$"):
        require_sound([GONE], only_weights=False)


def test_further_errors_are_counted():
    with pytest.raises(
        CorruptError, match=r"missing \(and 2 more, see `restride check`\); put"
    ) as e:
        require_sound([GONE, MIXED, MIXED], only_weights=False)

    assert "alone" not in str(e.value)
    with pytest.raises(CorruptError, match=r"global_steps .* \(and 1 more"):
        require_sound([GONE, MIXED, MIXED], only_weights=True)
