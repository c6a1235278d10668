"""A process is let in by process 0 alone, and by the one that lives now."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from threading import Event

from restride.storage import companions, joining
from restride.storage.companions import Team
from restride.storage.journal import Journal, read_journal
from restride.storage.locks import locked
from restride.storage.unfinished import Purpose, partial_folder

TEAM = Team("run", ((0, 0), (1, 0), (2, 0)))


def test_a_process_that_was_answered_and_is_kept_out_by_a_new_leader_asks_that_one(
    tmp_path, monkeypatch
):
    """The first leader answered and died; the next one reads back what there is, and then deals."""
    monkeypatch.setattr(joining, "LOCK_SECONDS", 0.05)
    out = tmp_path / "out"
    folder = partial_folder(out)
    (folder / "files").mkdir(parents=True)
    journal = Journal(folder / "journal", durable=False)
    journal.append([{"what": "it"}, TEAM.record])
    journal.close()
    purpose = Purpose({"what": "it"}, lambda _: "", lambda _: False)
    words = []

    def joins():
        with joining.joined_output(
            *(out, purpose, "job", 1, 2), stop=Event(), wait_seconds=30, resume=True
        ) as joined:
            return joined.word, joined.place.is_durable

    def answers_until(condition):
        deadline = time.monotonic() + 30
        while not condition() and time.monotonic() < deadline:
            for hello in read_journal(folder / "hello.1"):
                if hello["word"] not in words:
                    words.append(hello["word"])
                    answer = {"word": words[-1], "run": "run", "durable": False}
                    companions.put_record(folder / "welcome.1", answer)
            time.sleep(0.01)

    with ThreadPoolExecutor(1) as pool, locked(folder / "lock", what="out"):
        with locked(folder / "members", what="out"):
            found = pool.submit(joins)
            answers_until(lambda: len(words) > 1)
            assert not found.done()
        answers_until(found.done)

        assert found.result() == (words[-1], False)
    assert len(words) > 1
