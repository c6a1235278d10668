"""Arguments from Python that are of another kind than the function takes."""

from __future__ import annotations

import pytest

import restride
from restride.errors import RestrideError
from restride.testing.command_line import SAMPLE


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"to": "deepspeed", "zero": "3"}, "zero must be an integer, got '3' (str)"),
        ({"to": "deepspeed", "tp": "4"}, "tp must be an integer, got '4' (str)"),
        ({"to": "deepspeed", "dp": True}, "dp must be an integer, got True (bool)"),
        ({"to": "universal", "stage": "3"}, "stage must be an integer, got '3' (str)"),
        ({"max_shard_nbytes": "5GB"}, "max_shard_nbytes must be an integer, got '5GB' (str)"),
        ({"workers": 2.0}, "workers must be an integer, got 2.0 (float)"),
        (
            {"replicas": {"*": "first"}},
            "replicas is {'*': 'first'}, and no list of pairs; write it as [('*.bias', 'mean')]",
        ),
        (
            {"replicas": ["first"]},
            "replicas is ['first'], and no list of pairs; write it as [('*.bias', 'mean')]",
        ),
        (
            {"to": "deepspeed", "pp_tied": "embed=0,8"},
            "'embed=0,8' does not say which layers are tied; write it as {'embed': [0, 8]}",
        ),
    ],
)
def test_an_argument_of_another_kind_is_refused_and_nothing_written(options, sentence, tmp_path):
    with pytest.raises(RestrideError) as caught:
        restride.convert(SAMPLE, tmp_path / "out", **options)

    assert str(caught.value) == sentence
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("rules", ["ab", ["ab"], {"ab": "x"}, [("a", "b", "c")], None])
def test_two_letters_are_no_rule_that_renames(rules):
    with pytest.raises(RestrideError, match=r"and no list of pairs; write it as \[\('old', 'new'"):
        restride.diff(SAMPLE, SAMPLE, rename=rules)
