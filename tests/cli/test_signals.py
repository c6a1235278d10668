"""^C, SIGTERM and readers that go away end a command in a sentence, with the code of the page."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from restride import api
from restride.cli import _app
from restride.testing.command_line import run

SOURCE = str(Path(_app.__file__).parents[2])
INTERRUPTED_IMPORT = """
import os, signal, sys

# What is started in the background of a script ignores interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)

class Interrupts:
    def find_spec(self, name, *_):
        if name == "restride.cli._app":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupts())
from restride.cli import main
sys.exit(main(["info", "x"]))
"""
STOPPED = """
import os, signal, sys, time
from restride.cli.signals import stop_on_signals

with stop_on_signals(lambda: True) as stop:
    for number in map(int, sys.argv[1:]):
        os.kill(os.getpid(), number)
print("told" if stop.is_set() else "not told")
"""
TOLD = """
import sys
from restride.cli.output import tell

tell("twice")
tell("twice")
print("done")
"""
BROKEN_ELSEWHERE = """
import sys
from restride import api
from restride.cli import main

def check(*_, **__):
    raise BrokenPipeError(32, "Broken pipe")

api.check = check
sys.exit(main(["check", "x"]))
"""


PREPARING = """
import os, signal, sys
from restride import preparation
from restride.cli import main

# What is started in the background of a script ignores interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)

def open_catalog(*_):
    os.kill(os.getpid(), int(sys.argv[1]))
    raise AssertionError("it goes on")

preparation.open_catalog = open_catalog
sys.exit(main(["convert", "x", "out", *sys.argv[2:]]))
"""


def ran(program: str, *words: object, is_read: bool = True) -> tuple[int, str, str]:
    """Code, output and errors of a program, with its errors in a pipe that is read or closed."""
    inner, outer = os.pipe()
    if not is_read:
        os.close(inner)
    with subprocess.Popen(
        [sys.executable, "-c", program, *map(str, words)],
        env={**os.environ, "PYTHONPATH": SOURCE},
        stdout=subprocess.PIPE,
        stderr=outer,
        text=True,
    ) as process:
        os.close(outer)
        told = ""
        if is_read:
            with os.fdopen(inner, encoding="utf-8") as stream:
                told = stream.read()
        out, _ = process.communicate(timeout=60)
    return process.returncode, out, told


def test_an_interrupt_while_the_program_is_loaded_is_no_traceback() -> None:
    assert ran(INTERRUPTED_IMPORT) == (130, "", "restride: interrupted\n")


def test_sigterm_ends_what_has_no_steps_to_keep_like_an_interrupt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(api, "check", lambda *_, **__: os.kill(os.getpid(), signal.SIGTERM))

    ended = run("check", "x")

    assert (ended.code, ended.err) == (130, "restride: interrupted\n")
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_told_and_the_second_ends_at_once_with_what_to_do(
    number: signal.Signals,
) -> None:
    first = "restride: stopping at the end of a step; once more to end at once\n"
    second = "restride: ended at once; run it again with --resume\n"

    assert ran(STOPPED, number.value) == (0, "told\n", first)
    assert ran(STOPPED, number.value, number.value) == (-number, "", first + second)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("process", [(), ("--process=1/2",)], ids=["alone", "led"])
def test_a_signal_ends_a_conversion_at_once_while_there_is_nothing_to_keep(
    number: signal.Signals, process: tuple[str, ...]
) -> None:
    code, out, told = ran(PREPARING, number.value, *process)

    assert (code, out) == (130, "")
    assert told == "restride: interrupted\n"


def test_a_terminal_gets_its_line_and_its_cursor_back() -> None:
    inner, outer = os.openpty()
    program = (sys.executable, "-c", STOPPED, *[str(signal.SIGINT.value)] * 2)
    env = {**os.environ, "PYTHONPATH": SOURCE}
    subprocess.run(program, env=env, stderr=outer, check=False)
    os.close(outer)
    told = os.read(inner, 1000).decode()
    os.close(inner)

    first, second = (f"\r\x1b[K{ahead}restride: " for ahead in ("", "\x1b[?25h"))
    assert re.fullmatch(rf"{re.escape(first)}stopping .*\r\n{re.escape(second)}ended .*\r\n", told)


def test_a_stop_is_heard_where_nobody_reads_that_it_was() -> None:
    # As in `restride convert A B 2>&1 | tee log`, of which ^C ends `tee` first.
    assert ran(STOPPED, signal.SIGINT.value, is_read=False) == (0, "told\n", "")


def test_progress_that_nobody_reads_ends_no_work_and_changes_no_exit_code() -> None:
    assert ran(TOLD) == (0, "done\n", "restride: twice\n" * 2)
    assert ran(TOLD, is_read=False) == (0, "done\n", "")


def test_a_pipe_that_broke_elsewhere_is_not_taken_for_a_reader_that_has_seen_enough() -> None:
    reason = os.strerror(errno.EPIPE).lower()

    assert ran(BROKEN_ELSEWHERE) == (2, "", f"restride: {reason}\n")
