"""Process 0 waits for the others, whatever they do while it looks elsewhere."""

from __future__ import annotations

from types import SimpleNamespace

from restride.executors.leading import Host, Lead


def test_a_process_that_is_done_while_the_first_looks_elsewhere_is_waited_for_no_more(tmp_path):
    """A thread sees what others do, at any moment between two looks of the one that waits."""
    member = SimpleNamespace(
        number=1,
        is_done=False,
        is_complete=False,
        is_sound=True,
        is_missing=False,
        failed_for_good=False,
    )
    told = []

    def is_set():
        member.is_done = True
        return False

    host = Host(
        SimpleNamespace(folder=tmp_path),
        Lead(2, "job", 30.0),
        SimpleNamespace(skip=lambda _, text: told.append(text)),
        SimpleNamespace(is_set=is_set),
    )
    host._members = [member]

    host.wait(lambda _: None)

    assert told == ["(waiting for process 1 of 2)"]
