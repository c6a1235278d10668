"""A map lies: what the checkpoint says of how a parameter is cut."""

from __future__ import annotations

import pytest

from restride import api
from restride.testing.saved_values import edit_file

QKV = "transformer.h.0.attn.qkv_proj.weight"
UP = "model.layers.0.mlp.up_proj.weight"
MODELS = ("mp_rank_00_model_states.pt", "mp_rank_01_model_states.pt")


def map_of(root, name):
    maps = root["universal_checkpoint_info"]["affine_map"]["params"]
    escaped = name.replace(".", r"\.")
    return maps[f"^{escaped}$"]


def ranks_of(root, name):
    return {int(rank): entry for rank, entry in map_of(root, name)["ranks"].items()}


def lie(run, change, files=MODELS):
    for file in files:
        edit_file(run.file(file), change)


@pytest.mark.parametrize("checkpoint", ["codegen_fused_tp2_z1", "codegen_fused_tp2_z0"])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda root: ranks_of(root, QKV)[1]["pieces"].pop() and None, ("rank 1",)),
        (
            lambda root: ranks_of(root, QKV)[1]["pieces"][0]["source"].__setitem__(0, 0),
            (),
        ),
        (
            lambda root: ranks_of(root, QKV)[0]["pieces"][0]["dest"].__setitem__(0, 64),
            ("rank 0",),
        ),
        (
            lambda root: ranks_of(root, QKV)[0]["pieces"][0]["source"].__setitem__(0, 10**9),
            (),
        ),
        (lambda root: map_of(root, QKV).update(logical_shape=[200, 64]), ()),
        (lambda root: ranks_of(root, QKV)[0].update(shard_shape=[64, 96]), ()),
        (lambda root: map_of(root, QKV)["ranks"].pop(1) and None, ("1",)),
    ],
    ids=["hole", "twice", "overlap", "outside", "larger", "shard", "no-rank"],
)
def test_geometry_that_cannot_be_is_named(damaged, checkpoint, change, words):
    run = damaged(checkpoint)
    lie(run, change)

    # The pattern of the map is the escaped name.
    run.check_finds("qkv_proj", *words)
    run.convert_refuses()


def test_one_rank_says_something_else(damaged):
    """Each by itself is a sound cut of the same tensor."""
    run = damaged("llama_tp2_z1")

    def swap(root):
        first, second = (ranks_of(root, UP)[rank]["pieces"][0] for rank in range(2))
        first["source"], second["source"] = second["source"], first["source"]

    lie(run, swap, MODELS[1:])

    run.check_finds("mp_rank_01_model_states.pt", repr(UP), "is cut another way than")
    run.convert_refuses()


def test_a_stale_map_is_of_another_shape_than_the_shard_that_is_stored(damaged):
    """Of a model with half as many rows."""
    run = damaged("llama_tp2_z1")

    def halve(root):
        whole = map_of(root, UP)
        whole["logical_shape"] = [64, 64]
        for rank, entry in whole["ranks"].items():
            piece = entry["pieces"][0]
            entry["shard_shape"] = piece["shape"] = [32, 64]
            piece["source"] = [int(rank) * 32 * 64, [64, 1]]

    lie(run, halve)

    run.check_finds(repr(UP), "stores a shard of shape (64, 64)", "affine map is of shape (32, 64)")
    run.convert_refuses()


@pytest.mark.parametrize("version", [2, "1", -1])
def test_a_map_of_another_version(damaged, version):
    run = damaged("llama_tp2_z1")
    lie(run, lambda root: root["universal_checkpoint_info"]["affine_map"].update(version=version))

    run.check_finds("mp_rank_00_model_states.pt", "version")
    run.convert_refuses()


def test_a_map_without_a_parameter_leaves_the_categories_to_say_how_it_is_cut(damaged):
    """As older checkpoints do: what is in no category is cut along dimension 0."""
    run = damaged("llama_tp2_z1")

    def drop(root):
        maps = root["universal_checkpoint_info"]["affine_map"]["params"]
        del maps["^" + UP.replace(".", r"\.") + "$"]

    lie(run, drop)

    assert api.check(run.folder).verdict == "ok"
    assert api.convert(run.folder, run.folder.parent / "out").files


def test_a_parameter_that_two_patterns_match(damaged):
    run = damaged("llama_tp2_z1")

    def double(root):
        maps = root["universal_checkpoint_info"]["affine_map"]["params"]
        maps[r"^model\.layers\.\d+\.mlp\.up_proj\.weight$"] = map_of(root, UP)

    lie(run, double)

    run.check_finds(repr(UP), "matches 2 patterns")
    run.convert_refuses()
