"""Files that are laid out once for several ranks are those that each rank would get by itself."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from restride import exports
from restride.errors import RestrideError
from restride.exports import Wanted
from restride.formats.opening import open_catalog, open_training
from restride.storage.torch_file import lay_out_torch_file
from restride.storage.torch_output import TorchOutput
from restride.storage.torch_zip import TorchFiles

DATA = Path(__file__).parents[2] / "data" / "deepspeed"
# Every parameter in columns: three ranks get other shapes each, and all have one if it is whole.
RULES = {
    "columns": '[[rules]]\nmatch = "**"\nlayout = "column"\n',
    "biases": 'rest = "whole"\n[[rules]]\nmatch = "**.bias"\nlayout = "column"\n',
    "whole": '[[rules]]\nmatch = "**"\nlayout = "whole"\n',
}
RANKS = [(2, 1, 1), (3, 2, 1), (4, 1, 2), (2, 2, 3)]
SHARDED = [{"to": "deepspeed", "tp": tp, "dp": dp, "zero": zero} for tp, dp, zero in RANKS]
SOURCES = [
    "aligned_frozen_z2",
    "bf16_optimizer_z1",
    "experts_folded_z1",
    "experts_z1",
    "momentum_z1",
    "numbered_groups_z0",
    "round_robin_z2",
    "tensor_parallel_z3",
    "tied_frozen_z1",
]
RECORDED = ["gptbigcode_tp2_z1", "llama_unevenkv_tp2_z1"]


def differing(catalog, opened):
    """The training of a checkpoint, in which every rank says something of its own."""
    training = open_training(catalog, opened)
    ranks = [
        replace(rank, values={**rank.values, "ds_config": {**rank.values["ds_config"], "who": who}})
        for who, rank in enumerate(training.ranks)
    ]
    return replace(training, ranks=tuple(ranks))


def of_names(who, rank):
    return {"values": {**rank.values, f"from_{who}": None}}


def of_the_module(who, rank):
    return {"module": {**rank.module, "said": who}}


def of_names_in_the_module(who, rank):
    return {"module": {**rank.module, f"said_{who % 2}": None}}


def of_attributes(who, _):
    return {"module_state": {"who": who}}


def alone(_, draft, value, __):
    return lay_out_torch_file(draft.name, value)


def require_alike(source, wanteds, monkeypatch):
    """Lay out, with and without what is known of files that are alike; return how many did."""
    opened = TorchFiles()
    catalog = open_catalog(source, opened)
    done = 0
    for wanted in wanteds:
        for training in (open_training, differing):
            with monkeypatch.context() as patched:
                patched.setattr(exports, "open_training", training)
                try:
                    output = exports.lay_out_export(catalog, Wanted(**wanted), opened).output
                except RestrideError:
                    continue
                patched.setattr(TorchOutput, "_laid_out", alone)
                assert output == exports.lay_out_export(catalog, Wanted(**wanted), opened).output
                done += 1
    return done


@pytest.mark.parametrize("name", SOURCES)
def test_each_file_is_what_it_would_be_by_itself(name, tmp_path, monkeypatch):
    assert require_alike(DATA / name, ruled(tmp_path), monkeypatch)


@pytest.mark.parametrize("name", RECORDED)
def test_so_is_each_file_of_a_real_model(name, shared, tmp_path, monkeypatch):
    assert require_alike(shared / "checkpoints" / name, ruled(tmp_path), monkeypatch)


def ruled(folder):
    """All targets, by each file of rules; and universal folders."""
    yield from ({"to": "universal", "stage": stage} for stage in (1, 3))
    for name, rules in RULES.items():
        path = folder / f"{name}.toml"
        path.write_text('format = "restride-rules/1"\n' + rules)
        yield from ({**target, "rules": path} for target in SHARDED)


@pytest.mark.parametrize("cut", ["columns", "whole"])
@pytest.mark.parametrize("say", [of_names, of_the_module, of_names_in_the_module, of_attributes])
def test_ranks_that_say_something_of_their_own_have_files_of_their_own(
    say, cut, tmp_path, monkeypatch
):
    def saying(catalog, opened):
        training = open_training(catalog, opened)
        first = training.ranks[0]  # everything else is the very same
        ranks = tuple(replace(first, **say(who, first)) for who in range(len(training.ranks)))
        order = (*training.order, "said", "said_0", "said_1")
        return replace(training, ranks=ranks, order=order)

    monkeypatch.setitem(globals(), "differing", saying)
    path = tmp_path / "rules.toml"
    path.write_text('format = "restride-rules/1"\n' + RULES[cut])

    targets = [{**target, "rules": path} for target in SHARDED]
    assert require_alike(DATA / "tensor_parallel_z3", targets, monkeypatch) == 2 * len(SHARDED)
