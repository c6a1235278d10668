from __future__ import annotations

import inspect
from pathlib import Path

import pytest

import restride
from restride import api
from restride.errors import UnsupportedError
from restride.storage.paths import as_path
from restride.testing.command_line import SAMPLE, run

TILDE = "is no path: a shell alone knows what ~ is, and only where it is not quoted"
PATHS = [
    (name, parameter.name)
    for name in sorted({*api.__all__, *restride.__all__})
    if callable(function := getattr(api, name, getattr(restride, name, None)))
    for parameter in inspect.signature(function).parameters.values()
    if "PathLike" in str(parameter.annotation)
]


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """What each argument is, where it is not the one that is tried."""
    file = tmp_path_factory.mktemp("kept") / "fingerprints.json"
    assert run("fingerprint", SAMPLE, "-o", file).code == 0
    wanted = api.Wanted(to="deepspeed", tp=1)
    sources = dict.fromkeys(("path", "a", "b"), SAMPLE)
    return {**sources, "file": file, "out": "out", "to": "deepspeed", "wanted": wanted}


def test_every_function_for_checkpoints_takes_paths():
    assert {name for name, _ in PATHS} == {
        *("open", "check", "check_against", "convert", "diff", "dry_run", "fingerprint"),
        *("read_fingerprints", "Wanted"),
    }


@pytest.mark.parametrize(("name", "key"), PATHS)
def test_an_address_is_refused_by_every_function_and_makes_no_folder(
    name, key, given, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    function = getattr(api, name, getattr(restride, name, None))
    arguments = {k: given[k] for k in inspect.signature(function).parameters if k in given}
    for address in ("s3://bucket/x", Path("s3://bucket/x")):
        with pytest.raises(UnsupportedError) as caught:
            function(**{**arguments, key: address})

        assert str(caught.value) == (
            f"{str(address)!r} is an address, and no file or folder; mount it, or copy it here"
        )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("", "a path is empty; is a variable not set?"),
        ("a\0b", "'a\\x00b' is the name of no file"),
        ("file:///run/x", "'file:///run/x' is an address, and no file or folder; name '/run/x'"),
        ("~/x", f"'~/x' {TILDE}; name '/home/me/x'"),
        (
            "hdfs:/x",
            "'hdfs:/x' is an address, and no file or folder; mount it, or copy it here",
        ),
    ],
)
def test_what_is_no_path_is_refused_in_the_same_words_everywhere(
    path, sentence, tmp_path, monkeypatch
):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UnsupportedError) as caught:
        restride.convert(SAMPLE, path)
    ran = run("convert", SAMPLE, path)

    assert str(caught.value) == sentence
    assert ran.code == 2
    assert f"'OUT': {sentence}; see" in ran.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", ["a:b", "c:/x", "./s3:/x", "a~", "~x", "x/~", "..", "/"])
def test_names_that_only_look_like_one_are_paths(path):
    assert as_path(path) == path
