"""Files of fingerprints: read back as written, and refused where they say something else."""

from __future__ import annotations

import json

import pytest

from restride.checkpoint.fingerprints import fingerprints_from_json, fingerprints_to_json
from restride.errors import FormatError, UnsupportedError
from restride.storage.fingerprint_files import read_fingerprints

DIGITS = "0123456789abcdef" * 2


def test_a_file_is_read_as_it_was_written():
    found = {"h.0.w": {"weight": DIGITS, "fp32": DIGITS[::-1]}, "größe": {"weight": "0" * 32}}

    content = json.dumps(fingerprints_to_json(found), ensure_ascii=False).encode()

    assert fingerprints_from_json(content, where="f.json") == found


def test_that_of_many_tensors_is_read_as_well():
    """DeepSeek-V3 has 90,000, with four states each."""
    states = dict.fromkeys(("weight", "fp32", "exp_avg", "exp_avg_sq"), DIGITS)
    name = "model.layers.{}.mlp.experts.{}.down_proj.weight"
    found = {name.format(n // 256, n % 256): states for n in range(90_000)}

    content = json.dumps(fingerprints_to_json(found)).encode()

    assert len(content) > 16 << 20
    assert fingerprints_from_json(content, where="f.json") == found


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", r"^f.json: \$: this should be an object, it is a list"),
        ("null", r"^f.json: \$: this should be an object, it is null"),
        ("{", "it is no JSON"),
        ('{"tensors": {}}', r"^f.json: \$.format: it is no file of fingerprints"),
        ('{"format": "restride/1"}', "it is no file of fingerprints"),
        ('{"format": ["restride-fingerprint/2"]}', "it is no file of fingerprints"),
        ('{"format": "restride-fingerprint/2"}', r"\$.tensors: this should be an object"),
        ('{"format": "restride-fingerprint/2", "tensors": {}, "x": 1}', r"\$.x: .* not known"),
        ('{"format": "restride-fingerprint/2", "tensors": {"w": 3}}', r"\$.tensors.w: .* a number"),
        (
            '{"format": "restride-fingerprint/2", "tensors": {"w": {"s": "AB"}}}',
            r"\$.tensors.w.s: 'AB' is not 32 hexadecimal digits",
        ),
        (
            f'{{"format": "restride-fingerprint/2", "tensors": {{"w": {{"s": "{DIGITS}0"}}}}}}',
            "is not 32 hexadecimal digits",
        ),
        (
            '{"format": "restride-fingerprint/2", "tensors": {"w": {"s": null}}}',
            "null is not 32 hexadecimal digits",
        ),
        (
            '{"format": "restride-fingerprint/2", "tensors": {}, "tensors": {}}',
            "comes twice",
        ),
    ],
)
def test_what_is_no_file_of_fingerprints_is_refused_with_the_place(content, message):
    with pytest.raises(FormatError, match=message):
        fingerprints_from_json(content, where="f.json")


def test_a_later_version_is_refused_as_such():
    with pytest.raises(UnsupportedError, match="this version reads 'restride-fingerprint/2'"):
        fingerprints_from_json('{"format": "restride-fingerprint/1", "x": 1}', where="f.json")


@pytest.mark.parametrize("content", ["", "{}", '{"format": "restride/1"}'])
def test_who_names_another_file_is_told_what_has_fingerprints(tmp_path, content):
    (tmp_path / "f.json").write_text(content)

    with pytest.raises(FormatError, match="; name a file that `restride fingerprint -o` wrote, or"):
        read_fingerprints(tmp_path / "f.json")
