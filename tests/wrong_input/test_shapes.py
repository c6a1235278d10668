"""`param_shapes` lie: the order and the shapes of what the flat buffers hold."""

from __future__ import annotations

import pytest

from restride.checkpoint.values import OrderedDictValue
from restride.testing.saved_values import edit_file

Q = "model.layers.0.self_attn.q_proj.weight"
O = "model.layers.0.self_attn.o_proj.weight"  # noqa: E741 - the projection is called so
K = "model.layers.0.self_attn.k_proj.weight"
UP = "model.layers.0.mlp.up_proj.weight"
EMBEDDING = "model.embed_tokens.weight"


def shapes_of(root):
    (shapes,) = root["param_shapes"]
    return shapes


def turn(name):
    """Swap the dimensions of one parameter."""

    def change(root):
        shapes = shapes_of(root)
        assert len(set(shapes[name])) == 2
        shapes[name] = type(shapes[name])(tuple(shapes[name])[::-1])

    return change


def reordered(shapes, first, second):
    """The same entries, with two names in each other's place."""
    names = {first: second, second: first}
    result = OrderedDictValue()
    for name in shapes:
        result[names.get(name, name)] = shapes[names.get(name, name)]
    return result


def test_a_parameter_has_another_shape_than_in_the_module(damaged):
    run = damaged("llama_tp2_z1")
    edit_file(run.file("mp_rank_01_model_states.pt"), turn(K))

    run.check_finds("mp_rank_01_model_states.pt: param_shapes[0]", f"{K!r} has shape")
    run.convert_refuses()


def test_one_rank_of_zero_3_gives_another_shape(damaged):
    """There is no weight in the module: the files of the other ranks say it."""
    run = damaged("llama_tp1dp2_z3")
    name = "zero_pp_rank_1_mp_rank_00_model_states.pt"
    edit_file(run.file(name), turn(EMBEDDING))

    run.check_finds(name, repr(EMBEDDING))
    run.convert_refuses()


def test_one_rank_of_zero_3_gives_a_shape_that_the_map_does_not_have(damaged):
    run = damaged("llama_tp2_z3")
    edit_file(run.file("mp_rank_01_model_states.pt"), turn(EMBEDDING))

    run.check_finds(repr(EMBEDDING), "tp rank 1 stores a shard of shape", "its affine map is of")
    run.convert_refuses()


def test_all_ranks_of_zero_3_give_a_shape_that_the_map_does_not_have(damaged):
    run = damaged("llama_tp2_z3")
    for tp in range(2):
        edit_file(run.file(f"mp_rank_{tp:02d}_model_states.pt"), turn(EMBEDDING))

    run.check_finds(repr(EMBEDDING), "tp rank 0", "affine map is of shape")
    run.convert_refuses()


def test_two_parameters_of_one_shape_have_changed_places(damaged):
    """The slice mappings still tell."""
    run = damaged("llama_tp1dp2_z1")

    def change(root):
        root["param_shapes"][0] = reordered(shapes_of(root), Q, O)

    edit_file(run.file("mp_rank_00_model_states.pt"), change)

    run.check_finds("zero_pp_rank_0_mp_rank_00_optim_states.pt", "param_slice_mappings says")
    run.convert_refuses()


def test_two_parameters_have_changed_places_in_every_entry_of_every_file(damaged):
    """All headers agree: only the weights are other numbers than their master copies."""
    run = damaged("llama_tp1dp2_z1")

    def change(root):
        root["param_shapes"][0] = reordered(shapes_of(root), Q, O)

    def change_mapping(root):
        mappings = root["optimizer_state_dict"]["param_slice_mappings"]
        if {Q, O} <= set(mappings[0]):
            mappings[0] = reordered(mappings[0], Q, O)
            mappings[0][Q], mappings[0][O] = mappings[0][O], mappings[0][Q]

    edit_file(run.file("mp_rank_00_model_states.pt"), change)
    for dp in range(2):
        edit_file(run.file(f"zero_pp_rank_{dp}_mp_rank_00_optim_states.pt"), change_mapping)

    run.check_finds("master-mismatch", repr(Q), "rank_00_optim_states.pt")
    run.convert_refuses(weights=False)


@pytest.mark.parametrize("checkpoint", ["llama_tp2_z1", "llama_tp2_z3"])
def test_a_parameter_is_left_out(damaged, checkpoint):
    run = damaged(checkpoint)
    edit_file(run.file("mp_rank_01_model_states.pt"), lambda root: shapes_of(root).pop(UP) and None)

    run.check_finds("mp_rank_01")
    run.convert_refuses()


def test_a_parameter_is_made_up(damaged):
    run = damaged("llama_tp2_z1")

    def change(root):
        shapes_of(root)["model.ghost.weight"] = shapes_of(root)[UP]

    edit_file(run.file("mp_rank_01_model_states.pt"), change)

    run.check_finds("mp_rank_01", "param_shapes")
    run.convert_refuses()


@pytest.mark.parametrize("size", [-1, 2**40, 10**30, 2.5, "64"])
def test_a_size_is_no_size(damaged, size):
    run = damaged("llama_tp2_z1")

    def change(root):
        shapes_of(root)[UP] = (size, 64)

    edit_file(run.file("mp_rank_00_model_states.pt"), change)

    run.check_finds("mp_rank_00_model_states.pt: param_shapes[0]", UP)
    run.convert_refuses()


def test_a_parameter_is_in_another_group_on_another_rank(damaged):
    run = damaged("llama_tp2_z1")

    def change(root):
        shapes = shapes_of(root)
        second = OrderedDictValue()
        second[UP] = shapes.pop(UP)
        root["param_shapes"].append(second)

    edit_file(run.file("mp_rank_01_model_states.pt"), change)

    run.check_finds("mp_rank_01_model_states.pt", "group")
    run.convert_refuses()
