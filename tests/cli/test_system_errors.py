"""What the system says is told with its place, where there is one."""

from __future__ import annotations

import errno
import os

import pytest

from restride.cli.system_errors import os_sentence


@pytest.mark.parametrize(
    ("number", "name", "place"),
    [
        (errno.ENOSPC, None, "standard output: "),  # files have their names
        (errno.ENOSPC, "a/b", "a/b: "),
        (errno.EINTR, None, ""),
    ],
)
def test_a_full_disk_without_a_name_is_that_of_standard_output(number, name, place):
    said = os.strerror(number)

    told = os_sentence(OSError(number, said, name))

    assert told.partition(";")[0] == f"{place}{said.lower()}"
