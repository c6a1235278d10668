"""Every error is one sentence on standard error, and the exit codes are what scripts rely on."""

from __future__ import annotations

import errno
import importlib
import os
import pwd
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest

from restride import __version__, api
from restride.arrays import _kernel
from restride.cli import _app
from restride.errors import CorruptError, ExecutionError
from restride.testing.command_line import SAMPLE, run


def assert_one_sentence(err: str) -> None:
    assert err.startswith("restride: ")
    assert err.endswith("\n")
    assert err.count("\n") == 1
    assert not err.rstrip("\n").endswith(".")
    assert "Traceback" not in err


def test_help_names_every_command_and_the_exit_codes() -> None:
    bare, asked = run(), run("--help")

    assert bare == asked
    assert bare.code == 0
    assert all(f"  {name} " in bare.out for name in ("info", "check", "convert", "layouts", "demo"))
    assert "0 fine, 1 a finding, 2 refused or failed, 130 stopped" in bare.out


@pytest.mark.parametrize(
    ("has_kernel", "words"),
    [(1, "C kernel in use"), (0, "no C kernel: NumPy instead, slower")],
)
def test_the_version_is_that_of_the_package_and_says_what_copies_the_bytes(
    monkeypatch: pytest.MonkeyPatch, has_kernel: int, words: str
) -> None:
    monkeypatch.setattr(_kernel, "is_available", has_kernel)

    assert run("--version").out == f"restride, version {__version__} ({words})\n"


@pytest.mark.parametrize("name", _app.COMMANDS)
def test_a_command_is_helped_in_the_words_of_the_list(name: str) -> None:
    command = importlib.import_module(f"restride.cli.{name}").command

    assert command.name == name
    assert command.help.split("\n\n")[0] == _app.COMMANDS[name]
    ran = run(name, "--help")
    assert ran.code == 0
    assert _app.COMMANDS[name] in ran.out
    assert "--json" in ran.out


@pytest.mark.parametrize("name", _app.COMMANDS)
def test_the_help_of_a_command_ends_with_examples_that_are_understood(name: str) -> None:
    _, _, examples = run(name, "--help").out.rpartition("\n\n")
    first, *lines = examples.splitlines()

    assert first.strip() == ("Examples:" if len(lines) > 1 else "Example:")
    for line in lines:
        spelled = re.fullmatch(r" +restride (.*?)(   .*)?", line)
        assert spelled is not None, line
        used, *words = shlex.split(spelled[1])
        command = _app._root.get_command(click.Context(_app._root), used)
        assert command is not None
        # Parsed to the end, without running.
        with command.make_context(used, words, help_option_names=["-h", "--help"]) as context:
            assert context.command is command


def test_the_help_of_a_conversion_has_every_option_once_under_a_heading() -> None:
    command = importlib.import_module("restride.cli.convert").command
    options = [option for option in command.params if isinstance(option, click.Option)]

    lines = run("convert", "--help").out.splitlines()
    lines = lines[lines.index("What is written:") :]

    starts = [line.split()[0] for line in lines if line.startswith("  --")]
    assert sorted(starts) == sorted(option.opts[0] for option in options)
    headings = [line for line in lines if line.endswith(":") and not line.startswith(" ")]
    assert headings == [
        "What is written:",
        "For which ranks (--to deepspeed):",
        "How it is written:",
        "By several processes:",
        "Options:",
    ]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["frob"], "no such command 'frob'; see restride --help"),
        (["info"], "info: missing argument 'CHECKPOINT'; see restride info --help"),
        (["info", "a", "b"], "info: got unexpected extra argument (b); see restride info --help"),
        (["check", "--frob", "a"], "check: no such option"),
        (["convert", "a", "b", "--to", "dcp"], "'dcp' is not"),
        (
            ["convert", "a", "b", "--memory", "lots"],
            "'lots' is no size; write it like 512MB or 2GiB",
        ),
        (["convert", "a", "b", "--max-shard-size", "0"], "less than one byte"),
        (["convert", "a", "b", "--wait", "nan"], "'--wait': 'nan' is no number"),
        (["convert", "a", "b", "--wait", "-1"], "'--wait': -1 is not at least 0"),
        (["convert", "a", "b", "--tp", "two"], "'--tp': 'two' is no whole number"),
        (
            ["convert", "a", "b", "--tp"],
            "convert: option '--tp' requires an argument; see restride convert --help",
        ),
        (["convert", "a", "b", "--tp", "1_0"], "'--tp': '1_0' is no whole number"),
        (["convert", "a", "b", "--tp", "9" * 5000], "is no whole number"),
        (["convert", "a", "b", "--zero", "4"], "'--zero': 4 is not from 0 to 3"),
        (["diff", "a", "b", "--rtol", "-1"], "'--rtol': -1 is not at least 0"),
        (
            ["convert", "a", "b", "--memory", "10g"],
            "'10g' may be 10GB (thousands) or 10GiB (1024s); write which one",
        ),
        (["covert"], "no such command 'covert' (did you mean convert?); see restride --help"),
        (
            ["convert", "a", "b", "--resum"],
            "no such option '--resum' (did you mean --resume",
        ),
        (["check", "x", "--to", "y"], "check: no such option '--to'; see restride check --help"),
        (["convert", "a", "b", "-f"], "no such option '-f' (did you mean --force?)"),
        (["layouts", "codegen_qkv"], "is called 'codegen_qkv' (did you mean codegen-qkv"),
        (["info", ""], "'CHECKPOINT': a path is empty; is a variable not set?"),
        (["convert", "a", ""], "'OUT': a path is empty; is a variable not set?"),
        (["diff", "a", ""], "'B': a path is empty"),
        (
            ["info", "s3://a/b"],
            "'CHECKPOINT': 's3://a/b' is an address, and no file or folder; mount it",
        ),
        (["convert", "a", "gs://a/b"], "'OUT': 'gs://a/b' is an address"),
        (["check", "a", "--against", ""], "'--against': a path is empty"),
        (["fingerprint", "a", "-o", ""], "a path is empty"),
        (["convert", "a", "b", "--config", ""], "'--config': a path is empty"),
        (
            ["layouts", "frob"],
            "layouts: no layout and no checkpoint is called 'frob'; see restride",
        ),
        (["layouts", "split", "--shape", "4x4"], "--mesh"),
        (["layouts", "codegen-qkv", "--shape", "48x2", "--mesh", "tp=2"], "--heads"),
    ],
)
def test_wrong_usage_is_one_sentence_with_a_way_out(arguments: list[str], words: str) -> None:
    ran = run(*arguments)

    assert ran.code == 2
    assert ran.out == ""
    assert words in ran.err
    assert_one_sentence(ran.err)


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("can't start new thread")])
def test_a_system_without_memory_or_threads_is_one_sentence_and_no_finding(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def exhausted(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(api, "open", exhausted)
    ran = run("info", "anything")

    assert ran.code == 2
    assert ran.err.startswith("restride: the system gives no more memory or threads; ")
    assert_one_sentence(ran.err)


def test_an_error_that_is_ours_to_mend_keeps_its_traceback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("dictionary changed size during iteration")

    monkeypatch.setattr(api, "open", broken)
    with pytest.raises(RuntimeError, match="changed size"):
        run("info", "anything")


@pytest.mark.parametrize("command", ["info", "check"])
def test_a_path_that_is_not_there_is_named(tmp_path: Path, command: str) -> None:
    ran = run(command, tmp_path / "gone")

    assert ran.code == 2
    assert str(tmp_path / "gone") in ran.err
    assert_one_sentence(ran.err)


@pytest.mark.parametrize("command", ["info", "check"])
def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path: Path, command: str) -> None:
    tmp_path.joinpath("notes.txt").write_text("hello")

    ran = run(command, tmp_path)

    assert ran.code == 2
    assert str(tmp_path) in ran.err
    assert_one_sentence(ran.err)


def test_an_error_of_the_library_is_shown_as_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    error = CorruptError("the header is longer than the file", where="x", remedy="copy it again")
    monkeypatch.setattr(api, "open", failing(error))

    ran = run("info", "x")

    assert ran.code == 2
    assert ran.err == f"restride: {error}\n"


def test_an_error_of_the_system_is_shown_with_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        api, "open", failing(PermissionError(errno.EACCES, os.strerror(errno.EACCES), "/a/b"))
    )

    assert run("info", "x").err == (
        f"restride: /a/b: permission denied; have its owner give {user()} access, or run this as "
        "somebody who has it\n"
    )


def user() -> str:
    return f"user {pwd.getpwuid(os.geteuid()).pw_name}"


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.EMFILE, errno.ELOOP])
def test_what_the_system_refuses_comes_with_what_would_work(
    monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    error = ExecutionError("cannot be opened (no)", where="/a/b")
    error.__cause__ = OSError(number, "no")
    monkeypatch.setattr(api, "open", failing(error))

    said = run("info", "x").err

    assert re.fullmatch(r"restride: /a/b: cannot be opened \(no\); \w.*\w\)?\n", said), said


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("checkpont-500", "did you mean 'checkpoint-500'?"),
        ("checkpont-500/step", "did you mean 'checkpoint-500/step'?"),
        ("../here/checkpont-500", "did you mean '../here/checkpoint-500'?"),
        ("{here}/checkpont-500", "did you mean '{here}/checkpoint-500'?"),
        (
            "converted",
            "it is not finished, in 'converted.partial': if that was stopped, --resume goes on",
        ),
        ("runs/7/checkpoint-500", "{here} is there, and has no 'runs'"),
        ("model", None),
    ],
)
def test_a_name_that_is_not_there_comes_with_what_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: str, says: str | None
) -> None:
    here = tmp_path / "here"
    for name in ("checkpoint-500", "converted.partial"):
        (here / name).mkdir(parents=True)
    monkeypatch.chdir(here)
    wrong = wrong.format(here=here)

    said = run("info", wrong)

    remedy = "" if says is None else f"; {says.format(here=here)}"
    assert (said.code, said.err) == (2, f"restride: {wrong}: no such file or folder{remedy}\n")


def test_a_broken_link_comes_with_where_it_leads_and_not_with_its_own_name(tmp_path: Path) -> None:
    shutil.copytree(SAMPLE, tmp_path / "run")
    file = tmp_path / "run/step/mp_rank_01_model_states.pt"
    file.unlink()
    file.symlink_to("/gone/x.pt")

    assert run("check", tmp_path / "run").err == (
        f"restride: {file}: cannot be opened (a link to what is not there); bring back "
        "'/gone/x.pt', to which it leads, or copy the file\n"
    )


def test_a_remedy_that_is_known_nearer_to_the_error_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    error = ExecutionError("cannot be opened (no)", where="/a/b", remedy="do it")
    error.__cause__ = OSError(errno.EACCES, "no")
    monkeypatch.setattr(api, "open", failing(error))

    assert run("info", "x").err == "restride: /a/b: cannot be opened (no); do it\n"


def test_an_interrupt_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "check", failing(KeyboardInterrupt()))

    ran = run("check", "x")

    assert ran.code == 130
    assert ran.err == "restride: interrupted\n"


def failing(error: BaseException) -> object:
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


@pytest.mark.parametrize("lines", [1, 100_000])
def test_a_reader_that_has_seen_enough_is_no_error(lines: int) -> None:
    # Many lines break the pipe while the command writes, few when it flushes at the end.
    program = (
        "import sys; from restride import api; from restride.checkpoint.catalog import Catalog, "
        "Finding; from restride.algebra.mesh import Mesh; from restride.cli import main;"
        f"found = tuple(Finding('note', 'x', 'y' * 80) for _ in range({lines}));"
        "api.open = lambda _, **__: Catalog('f', 'r', (), Mesh(()), (), {}, found);"
        "sys.exit(main(['info', 'x']))"
    )

    result = subprocess.run(
        ["bash", "-c", 'set -o pipefail; "$0" -c "$1" | true', sys.executable, program],
        env={**os.environ, "PYTHONPATH": str(Path(_app.__file__).parents[2])},
        capture_output=True,
        text=True,
        check=False,
    )

    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no device that is full")
def test_an_output_that_nobody_has_room_for_is_named() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "restride", "layouts"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )

    assert done.returncode == 2
    told = "restride: standard output: no space left on device; make room, or name another place "
    assert done.stderr == f"{told}(df -h and df -i tell which of both is full)\n"


@pytest.mark.parametrize("lines", [1, 100_000])
@pytest.mark.parametrize(("severity", "code"), [("error", 1), ("note", 0)])
def test_a_finding_is_one_also_where_its_reader_has_seen_enough(
    lines: int, severity: str, code: int
) -> None:
    program = (
        "import sys; from restride import api; from restride.checkpoint.catalog import Catalog, "
        "Finding; from restride.algebra.mesh import Mesh; from restride.cli import main;"
        f"found = tuple(Finding({severity!r}, 'x', 'y' * 80) for _ in range({lines}));"
        "catalog = Catalog('f', 'r', (), Mesh(()), (), {}, found);"
        "api.check = lambda _, **__: api.CheckReport(catalog, found, 0);"
        "sys.exit(main(['check', 'x']))"
    )

    result = subprocess.run(
        ["bash", "-c", 'set -o pipefail; "$0" -c "$1" | true', sys.executable, program],
        env={**os.environ, "PYTHONPATH": str(Path(_app.__file__).parents[2])},
        capture_output=True,
        text=True,
        check=False,
    )

    assert (result.returncode, result.stdout, result.stderr) == (code, "", "")


def test_only_the_command_of_a_process_makes_its_garbage_collector_wait():
    program = (
        "import gc, sys; from restride.cli import main; before = gc.get_threshold();"
        " main(['layouts', 'split']); same = gc.get_threshold() == before;"
        " sys.argv[1:] = ['layouts', 'split']; main(); waits = gc.get_threshold() > before;"
        " sys.stderr.write(f'{same} {waits} {gc.get_freeze_count() > 0}')"
    )

    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )

    assert result.stderr == "True True True"
