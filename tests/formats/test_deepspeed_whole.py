"""ZeRO-0: states inside the model files, numbered, get the right names or none."""

from __future__ import annotations

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import restride
from restride import api
from restride.cli import main
from restride.errors import CorruptError, FormatError
from restride.formats.deepspeed import read_catalog
from restride.formats.deepspeed._numbering import Candidate, Matched, Slot, Unmatched, match
from restride.testing.gather import gather, gather_all
from restride.testing.saved_values import Array, edit_file
from restride.testing.whole_files import rounded_run, write_whole_run
from restride.testing.zero_files import Parameter, ZeroRun, shard_of
from restride.testing.zero_runs import zero_runs

RECORDED = Path(__file__).parents[1] / "data" / "deepspeed"
KINDS = ("bare", "unfused", "flat")


def drawn(shape: tuple[int, ...], seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def parameter(shape, seed: int, *, group: int = 0, cut=None) -> Parameter:
    states = {state: drawn(shape, 10 * seed + n) for n, state in enumerate(["fp32", "exp_avg"])}
    return Parameter(shape, states, cut, group)


def written(folder: Path, parameters: dict[str, Parameter], kind, tp: int = 1, **how) -> ZeroRun:
    run = rounded_run(ZeroRun(1, tp, parameters), kind)
    write_whole_run(folder, run, kind, **how)
    return run


def file_of(folder: Path, tp: int = 0) -> Path:
    return folder / "step" / f"mp_rank_{tp:02d}_model_states.pt"


def kinds_of(catalog) -> list[tuple[str, str]]:
    return [(finding.severity, finding.kind) for finding in catalog.findings]


def message_of(catalog, kind: str) -> str:
    (finding,) = [finding for finding in catalog.findings if finding.kind == kind]
    return finding.message


def holds(catalog, run: ZeroRun) -> None:
    """Every state of every parameter is in the catalog, and is the right one."""
    found = gather_all(catalog)
    for name, expected in run.parameters.items():
        for state, values in expected.states.items():
            actual = found.pop(f"{name}/{state}")
            assert np.array_equal(actual.reshape(-1), values.reshape(-1).view(np.uint8)), name
        assert found.pop(f"{name}/step").view(np.float32) == 2
    assert not found


def holds_weights_only(catalog, run: ZeroRun) -> None:
    assert {state for tensor in catalog.tensors for state in tensor.states} == {"weight"}
    for name, actual in gather_all(catalog).items():
        values = run.parameters[name.removesuffix("/weight")].states["weight"]
        assert np.array_equal(actual.reshape(-1), values.reshape(-1).view(np.uint8))


# --- everything that is written is found -------------------------------------------------


@given(zero_runs(writers=["zero"]), st.sampled_from(KINDS))
@settings(max_examples=60)
def test_every_state_is_found_in_the_files_element_by_element(run, kind):
    run = rounded_run(run, kind)
    with TemporaryDirectory() as folder:
        write_whole_run(Path(folder) / "run", run, kind)

        catalog = read_catalog(Path(folder) / "run")

        assert catalog.format == "deepspeed zero-0"
        if all(finding.kind != "unmatched-states" for finding in catalog.findings):
            holds(catalog, run)
        else:  # two groups have shards that nothing tells apart
            looks = [
                (shard.shape, b"" if kind == "bare" else shard.tobytes())
                for tp in range(run.tp)
                for shard in (shard_of(run, name, "weight", tp) for name in run.parameters)
            ]
            assert len(set(looks)) < len(looks)
            assert "different groups" in message_of(catalog, "unmatched-states")
            holds_weights_only(catalog, run)


@pytest.mark.parametrize("kind", KINDS)
def test_tensor_parallel_ranks_are_matched_each_by_itself(tmp_path, kind):
    parameters = {
        "k_proj": parameter((4, 3), 1, cut=(0, (4, 0))),
        "up": parameter((6, 3), 2, cut=(0, (3, 3))),
        "down": parameter((3, 6), 3, cut=(1, (2, 4)), group=1),
        "norm": parameter((3,), 4, group=1),
    }
    run = written(tmp_path / "run", parameters, kind, tp=2)

    catalog = read_catalog(tmp_path / "run")

    holds(catalog, run)
    groups = catalog.values["optimizer"]["param_groups"]
    assert [(g["lr"], g["params"]) for g in groups] == [
        (0.5, ["k_proj", "up"]),
        (1.5, ["down", "norm"]),
    ]
    assert not catalog.findings


@pytest.mark.parametrize("kind", ["bare", "unfused"])
def test_names_that_the_optimizer_was_told_are_used_whatever_the_order(tmp_path, kind):
    parameters = {f"layer.{n}": parameter((3, 3), n, group=n % 2) for n in range(6)}
    order = [f"layer.{n}" for n in (4, 1, 0, 5, 2, 3)]
    run = written(tmp_path / "run", parameters, kind, order=order, has_names=True)

    catalog = read_catalog(tmp_path / "run")

    holds(catalog, run)
    assert not catalog.findings


def test_names_of_frozen_parameters_stay_in_a_wrapped_group(tmp_path):
    """`FP16_UnfusedOptimizer` takes them out of the group, and not out of its names."""
    parameters = {f"layer.{n}": parameter((3, 3), n) for n in range(4)}
    run = written(tmp_path / "run", parameters, "unfused", has_names=True)

    def freeze(root):
        base = root["optimizer"]["optimizer_state_dict"]
        del root["optimizer"]["fp32_groups"][0][2], base["state"][2]
        base["state"][2] = base["state"].pop(3)
        base["param_groups"][0]["params"] = [0, 1, 2]

    edit_file(file_of(tmp_path / "run"), freeze)
    catalog = read_catalog(tmp_path / "run")

    frozen = catalog.tensors[2]
    assert (frozen.name, frozen.is_frozen, list(frozen.states)) == ("layer.2", True, ["weight"])
    last = gather(catalog, catalog.tensors[3].states["fp32"])
    assert np.array_equal(last.view(np.float32)[..., 0], run.parameters["layer.3"].states["fp32"])


def test_names_are_believed_where_the_weights_were_averaged_before_saving(tmp_path):
    parameters = {f"layer.{n}": parameter((3, 3), n) for n in range(2)}
    run = written(tmp_path / "run", parameters, "unfused", has_names=True)

    def average(root):
        root["module"]["layer.0"] = Array("float16", (3, 3), b"\0" * 18)

    edit_file(file_of(tmp_path / "run"), average)
    catalog = read_catalog(tmp_path / "run")

    found = gather(catalog, catalog.tensors[0].states["exp_avg"]).view(np.float32)[..., 0]
    assert np.array_equal(found, run.parameters["layer.0"].states["exp_avg"])


@pytest.mark.parametrize("kind", ["unfused", "flat"])
def test_master_weights_tell_parameters_apart_in_any_order_and_group(tmp_path, kind):
    """A learning rate for every layer, in the order of a set: no rule of thumb helps."""
    parameters = {f"layer.{n}": parameter((3, 3), n, group=n % 3) for n in range(7)}
    order = [f"layer.{n}" for n in (5, 0, 6, 2, 1, 4, 3)]
    run = written(tmp_path / "run", parameters, kind, order=order)

    catalog = read_catalog(tmp_path / "run")

    holds(catalog, run)
    assert not catalog.findings


def test_parameters_that_only_their_order_tells_apart_are_named(tmp_path):
    parameters = {f"layer.{n}.weight": parameter((3, 3), n) for n in range(3)}
    written(tmp_path / "run", parameters, "bare")

    message = message_of(read_catalog(tmp_path / "run"), "numbered-states")

    assert "3 of 3 parameters share their shape with another one" in message


# --- what cannot be proved is left out, with the reason ----------------------------------


def test_shapes_that_two_groups_have_are_not_guessed_without_master_weights(tmp_path):
    parameters = {f"layer.{n}": parameter((3, 3), n, group=n // 2) for n in range(4)}
    run = written(tmp_path / "run", parameters, "bare")

    catalog = read_catalog(tmp_path / "run")

    assert kinds_of(catalog) == [("error", "unmatched-states")]
    message = message_of(catalog, "unmatched-states")
    assert "are in different groups, and nothing tells which is which of layer.0" in message
    assert "named_parameters()" in message
    holds_weights_only(catalog, run)
    assert catalog.values["optimizer"]["param_groups"][1] == {"lr": 1.5, "params": [2, 3]}


def test_frozen_parameters_of_the_shape_of_trained_ones_are_not_guessed(tmp_path):
    parameters = {f"layer.{n}": parameter((3, 3), n) for n in range(3)}
    run = written(tmp_path / "run", parameters, "bare")

    def leave_out(root):
        del root["optimizer"]["state"][2]
        root["optimizer"]["param_groups"][0]["params"] = [0, 1]

    edit_file(file_of(tmp_path / "run"), leave_out)
    catalog = read_catalog(tmp_path / "run")

    assert "fit 3 parameters: layer.0, layer.1 and layer.2" in message_of(
        catalog, "unmatched-states"
    )
    holds_weights_only(catalog, run)


def test_an_order_that_is_not_the_models_is_noticed_by_its_shapes(tmp_path):
    """Sorted names put layer 10 before layer 2."""
    parameters = {
        f"layer.{n}.{kind}": parameter(shape, 2 * n + place)
        for n in (1, 2, 10)
        for place, (kind, shape) in enumerate([("up", (4, 3)), ("down", (3, 4))])
    }
    run = written(tmp_path / "run", parameters, "bare", order=sorted(parameters))

    catalog = read_catalog(tmp_path / "run")

    assert "group 0 is not in the order of the model" in message_of(catalog, "unmatched-states")
    holds_weights_only(catalog, run)


@pytest.mark.parametrize("kind", ["unfused", "flat"])
def test_master_weights_of_other_weights_are_not_used(tmp_path, kind):
    """Weights that were averaged before saving, or a file of another run."""
    run = written(tmp_path / "run", {"a": parameter((3, 3), 1), "b": parameter((3,), 2)}, kind)

    def replace_weight(root):
        key = "fp32_groups_flat" if kind == "flat" else "fp32_groups"
        masters = root["optimizer"][key]
        if kind == "flat":
            masters[0] = Array("float32", (12,), drawn((12,), 77).tobytes())
        else:
            masters[0][0] = Array("float32", (3, 3), drawn((3, 3), 77).tobytes())

    edit_file(file_of(tmp_path / "run"), replace_weight)
    catalog = read_catalog(tmp_path / "run")

    message = message_of(catalog, "unmatched-states")
    assert "fits no parameters" in message
    assert kind == "flat" or "changed after the last step" in message
    holds_weights_only(catalog, run)


def test_weights_that_are_no_views_of_a_buffer_have_no_place_in_flat_states(tmp_path):
    run = written(tmp_path / "run", {"a": parameter((3, 3), 1), "b": parameter((3,), 2)}, "flat")

    def untie(root):
        weight = run.parameters["b"].states["weight"]
        root["module"]["b"] = Array("float16", (3,), weight.tobytes())

    edit_file(file_of(tmp_path / "run"), untie)
    catalog = read_catalog(tmp_path / "run")

    assert "the flat buffer of group 0 with 12 elements fits no" in message_of(
        catalog, "unmatched-states"
    )
    holds_weights_only(catalog, run)


@given(st.data())
@settings(max_examples=300)
def test_a_number_never_gets_a_wrong_name(data):
    """Scripts that list parameters in the order of the model are matched right, or not at all;
    any other order is noticed wherever tokens can tell."""
    count = data.draw(st.integers(1, 7))
    tokens = [data.draw(st.integers(0, 3)) for _ in range(count)]
    model = [Candidate(f"p{n}", tokens[n]) for n in range(count)]
    trained = [n for n in range(count) if data.draw(st.integers(0, 5))]
    group_of = {n: data.draw(st.integers(0, 1)) for n in trained}
    is_ordered = data.draw(st.booleans())
    listed = trained if is_ordered else data.draw(st.permutations(trained))
    truth = [[n for n in listed if group_of[n] == group] for group in range(2)]
    groups = [[Slot(str(n), frozenset({tokens[n]})) for n in own] for own in truth]

    found = match(model, groups, [None, None])

    if isinstance(found, Unmatched):
        assert len(set(tokens)) < count  # otherwise every number is known
        return
    for own, names in zip(truth, found.names, strict=True):
        for n, name in zip(own, names, strict=True):
            assert name is not None
            assert tokens[n] == tokens[int(name[1:])]
            assert name == f"p{n}" or (not is_ordered and name in found.by_order)


def test_a_group_out_of_order_casts_doubt_on_the_others():
    """Scripts that deal parameters out from a set do so for all groups."""
    model = [Candidate(name, name) for name in "abc"]
    model += [Candidate(f"norm.{n}", "norm") for n in range(2)]
    first = [Slot(name, frozenset({name})) for name in "cab"]
    second = [Slot(f"{n}", frozenset({"norm"})) for n in range(2)]

    found = match(model, [first, second], [None, None])

    assert found == Unmatched(
        "group 0 is not in the order of the model, and nothing else tells norm.0 and norm.1 apart"
    )
    assert isinstance(match(model[:3], [first], [None]), Matched)


@pytest.mark.parametrize("is_muon", [False, True])
def test_a_group_that_muon_has_sorted_by_size_is_in_an_order_that_is_known(tmp_path, is_muon):
    """Two layers of three shapes: the largest first, and of each shape the first layer."""
    shapes = {"up": (3, 4), "down": (4, 3), "q": (4, 4)}
    parameters = {
        f"layer.{n}.{kind}": parameter(shape, 3 * n + place)
        for n in range(2)
        for place, (kind, shape) in enumerate(shapes.items())
    }
    order = sorted(parameters, key=lambda name: parameters[name].shape, reverse=True)
    assert order[:3] == ["layer.0.q", "layer.1.q", "layer.0.down"]
    run = written(tmp_path / "run", parameters, "bare", order=order)

    def change(root):
        root["optimizer"]["param_groups"][0]["use_muon"] = is_muon

    edit_file(file_of(tmp_path / "run"), change)
    catalog = read_catalog(tmp_path / "run")

    if is_muon:
        assert kinds_of(catalog) == [("note", "numbered-states")]
        holds(catalog, run)
    else:
        assert "not in the order of the model" in message_of(catalog, "unmatched-states")
        holds_weights_only(catalog, run)


def test_muon_does_not_explain_an_order_that_is_neither_the_models_nor_that_of_sizes():
    model = [Candidate(f"{n}", (n % 2, 1), shape=(n % 2, 1)) for n in range(4)]
    slots = [Slot(f"{n}", frozenset({model[n].token})) for n in (1, 0, 3, 2)]

    assert isinstance(match(model, [slots], [None], [0]), Unmatched)
    slots = [Slot(f"{n}", frozenset({model[n].token})) for n in (1, 3, 0, 2)]
    assert match(model, [slots], [None], [0]).names == (("1", "3", "0", "2"),)


def test_a_group_in_order_without_doubles_is_matched_where_another_group_is_not():
    found = match(
        [Candidate("a", 1), Candidate("b", 2), Candidate("c", 2)],
        [[Slot("0", frozenset({1}))], [Slot("1", frozenset({2})), Slot("2", frozenset({2}))]],
        [None, None],
    )

    assert found == Matched((("a",), ("b", "c")), frozenset({"b", "c"}))


# --- files that lie ----------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path) -> Path:
    parameters = {
        "up": parameter((6, 3), 2, cut=(0, (3, 3))),
        "norm": parameter((3,), 4, group=1),
    }
    written(tmp_path / "run", parameters, "unfused", tp=2)
    return tmp_path / "run"


def of_optimizer(change):
    def edit(root):
        change(root["optimizer"])

    return edit


def of_base(change):
    return of_optimizer(lambda state: change(state["optimizer_state_dict"]))


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (
            lambda root: root.update(optimizer={"momentum": 1}),
            FormatError,
            "its keys are 'momentum'",
        ),
        (lambda root: root.update(optimizer=[1]), FormatError, "the state dict of an optimizer"),
        (
            of_optimizer(lambda state: state["fp32_groups"].pop()),
            CorruptError,
            "master weights of 1 group and 2 entries in param_groups",
        ),
        (
            of_optimizer(lambda state: state["fp32_groups"][0].pop()),
            CorruptError,
            "numbers 1 parameter, the master weights of the group are 0",
        ),
        (
            of_base(lambda base: base["param_groups"][1].update(params=[0])),
            CorruptError,
            "numbers a parameter twice",
        ),
        (
            of_base(lambda base: base["state"].update({9: {}})),
            CorruptError,
            "has states of parameters [9], which no group has",
        ),
        (
            of_base(lambda base: base["param_groups"][0].update(param_names=["up", "up"])),
            CorruptError,
            "names a parameter twice",
        ),
        (
            of_base(lambda base: base["param_groups"][0].update(param_names=[])),
            CorruptError,
            "names 0 parameters, the group has 1",
        ),
        (
            of_base(lambda base: base["param_groups"][0].update(params=["a"])),
            FormatError,
            "an integer",
        ),
        (
            of_base(lambda base: base["state"][0].pop("exp_avg")),
            CorruptError,
            "rank 0 has no state 'exp_avg', its weight has shape (3, 3)",
        ),
        (
            of_optimizer(
                lambda state: state["fp32_groups"][0].__setitem__(
                    0, Array("int64", (3, 3), b"\0" * 72)
                )
            ),
            FormatError,
            "a master weight of float32 is expected, found a tensor of shape (3, 3)",
        ),
        (lambda root: root.update(optimizer=None), CorruptError, "has the optimizer's state in it"),
    ],
)
def test_files_that_lie_are_refused_with_the_place(saved, change, error, words):
    edit_file(file_of(saved), change)

    with pytest.raises(error) as caught:
        read_catalog(saved)

    assert type(caught.value) is error
    assert words in str(caught.value)
    assert "_model_states.pt" in str(caught.value) or "tensor 'up'" in str(caught.value)


def test_ranks_that_put_a_parameter_into_different_groups_are_of_different_saves(saved):
    def swap(root):
        optimizer = root["optimizer"]
        optimizer["fp32_groups"].reverse()
        base = optimizer["optimizer_state_dict"]
        base["state"] = {0: base["state"][1], 1: base["state"][0]}

    edit_file(file_of(saved, 1), swap)

    with pytest.raises(CorruptError, match="has 'norm' in group 0, another rank in group 1"):
        read_catalog(saved)


def test_ranks_that_number_their_parameters_in_another_order_are_of_different_saves(tmp_path):
    parameters = {f"layer.{n}": parameter((4, 3), n, cut=(0, (2, 2))) for n in range(3)}
    written(tmp_path / "run", parameters, "unfused", tp=2)

    def turn(root):
        optimizer = root["optimizer"]
        optimizer["fp32_groups"][0].reverse()
        base = optimizer["optimizer_state_dict"]
        base["state"] = {n: base["state"][2 - n] for n in range(3)}

    edit_file(file_of(tmp_path / "run", 1), turn)

    with pytest.raises(CorruptError, match="in different orders"):
        read_catalog(tmp_path / "run")


def test_states_of_another_shape_are_told_of_and_carried(saved):
    def factor(root):
        for own in root["optimizer"]["optimizer_state_dict"]["state"].values():
            own["exp_avg_sq_row"] = Array("float32", (2,), b"\0" * 8)

    for tp in range(2):
        edit_file(file_of(saved, tp), factor)
    catalog = read_catalog(saved)

    told = message_of(catalog, "uncut-state")
    assert "a tensor of shape (2,) and dtype float32, and 'up' has another shape" in told
    assert "exp_avg_sq_row" not in catalog.tensors[0].states
    carried = catalog.values["optimizer"]["state.up.exp_avg_sq_row"]
    assert carried["tensor"]["shape"] == [2]


@pytest.mark.parametrize("state", ["exp_avg", "step"])
@pytest.mark.parametrize("lie", [dict.pop, lambda own, state: own.update({state: 64})])
def test_a_state_that_others_of_the_group_have_is_missed(tmp_path, lie, state):
    """A number in its place was carried as a value."""
    parameters = {"up": parameter((4, 3), 1), "down": parameter((3, 4), 2)}
    written(tmp_path / "run", parameters, "unfused")

    def change(root):
        lie(root["optimizer"]["optimizer_state_dict"]["state"][1], state)

    edit_file(file_of(tmp_path / "run"), change)

    message = message_of(read_catalog(tmp_path / "run"), "missing-state")
    assert f"the optimizer has no {state} of 'down', which it has of 'up' of the same" in message


@pytest.mark.parametrize("kind", ["bare", "unfused"])
def test_a_parameter_that_was_never_updated_lacks_nothing(tmp_path, kind):
    parameters = {"up": parameter((4, 3), 1), "down": parameter((3, 4), 2)}
    written(tmp_path / "run", parameters, kind)

    def forget(root):
        optimizer = root["optimizer"]
        optimizer.get("optimizer_state_dict", optimizer)["state"].pop(1)

    edit_file(file_of(tmp_path / "run"), forget)

    assert "missing-state" not in {f.kind for f in read_catalog(tmp_path / "run").findings}


def test_two_weights_that_share_their_bytes_are_one_parameter(tmp_path):
    """The optimizer numbers tied weights once."""
    run = written(tmp_path / "run", {"a": parameter((3, 3), 1), "b": parameter((3,), 2)}, "unfused")

    def tie(root):
        root["module"]["head"] = root["module"]["a"]

    edit_file(file_of(tmp_path / "run"), tie)
    catalog = read_catalog(tmp_path / "run")

    assert [(t.name, t.aliases) for t in catalog.tensors] == [("a", ("head",)), ("b", ())]
    holds(catalog, run)


def test_large_and_transposed_tensors_are_recognised_by_some_of_their_elements(tmp_path):
    parameters = {f"layer.{n}": parameter((90, 70), n, group=n) for n in range(2)}
    run = written(tmp_path / "run", parameters, "unfused")

    def transpose(root):
        weight = run.parameters["layer.0"].states["weight"]
        content = np.ascontiguousarray(weight.T).tobytes()
        root["module"]["layer.0"] = Array("float16", (90, 70), content, strides=(1, 90))

    edit_file(file_of(tmp_path / "run"), transpose)

    holds(read_catalog(tmp_path / "run"), run)


# --- experts -----------------------------------------------------------------------------


@pytest.fixture
def experts(tmp_path) -> Path:
    """Mixtral with two experts on each of two expert-parallel ranks, without ZeRO."""
    return Path(shutil.copytree(RECORDED / "experts_z0", tmp_path / "experts"))


def test_experts_have_their_states_in_the_file_of_their_rank(experts):
    """The router is numbered last and saved under two names; nothing is in the model's order."""
    catalog = read_catalog(experts)
    found = gather_all(catalog)

    assert kinds_of(catalog) == [("note", "untracked")]  # the second name of the router
    for tensor in catalog.tensors:
        if tensor.is_frozen:
            continue
        states = {"weight", "fp32", "exp_avg", "exp_avg_sq", "step"}
        assert set(tensor.states) == states, tensor.name
        masters = found[f"{tensor.name}/fp32"].view(np.uint32)[..., 0].astype(np.uint64)
        nearest = (masters + 0x7FFF + ((masters >> 16) & 1)) >> 16
        weights = found[f"{tensor.name}/weight"].view(np.uint16)[..., 0]
        assert np.array_equal(nearest, weights), tensor.name
    stack = catalog.tensors[-1]
    assert stack.name.endswith("experts.w3")
    layout = stack.states["exp_avg"].layout
    assert [layout.shard_shape(rank) for rank in range(2)] == [(2, 8, 8)] * 2
    groups = catalog.values["optimizer"]["param_groups"]
    assert [name.rsplit(".", 1)[1] for name in groups[1]["params"]] == ["w1", "w2", "w3"]


def test_moments_of_experts_are_those_of_the_same_training_with_zero_1(experts):
    states = [gather_all(read_catalog(path)) for path in (experts, RECORDED / "experts_z1")]
    names = [name for name in states[0] if "experts.w" in name and name.endswith("/exp_avg")]
    own, other = (
        {name: found[name].view(np.float32).ravel() for name in names} for found in states
    )

    assert len(names) == 3
    for name in names:
        angles = {known: cosine(own[name], other[known]) for known in names}
        assert max(angles, key=angles.__getitem__) == name
        assert angles[name] > 0.8


def test_a_missing_file_of_an_expert_rank_leaves_the_states_out(experts):
    (experts / "step" / "expp_rank_1_mp_rank_00_optim_states.pt").unlink()

    catalog = read_catalog(experts)

    assert ("error", "missing-file") in kinds_of(catalog)
    assert "expp_rank_1_mp_rank_00" in message_of(catalog, "missing-file")
    assert {state for tensor in catalog.tensors for state in tensor.states} == {"weight"}
    assert len(catalog.tensors) == 14


def test_files_of_more_expert_ranks_than_there_are_are_left_out(experts):
    name = "expp_rank_{}_mp_rank_00_optim_states.pt"
    shutil.copy(experts / "step" / name.format(1), experts / "step" / name.format(2))

    assert ("warning", "stale-file") in kinds_of(read_catalog(experts))


def test_optimizers_of_experts_with_and_without_zero_are_of_two_saves(experts):
    for file in (RECORDED / "experts_z1" / "step").glob("*zero_pp_rank*"):
        shutil.copy(file, experts / "step")

    with pytest.raises(CorruptError, match="put only the files of one save"):
        read_catalog(experts)


def test_optimizers_of_experts_that_are_nowhere_are_refused(tmp_path):
    written(tmp_path / "run", {"a": parameter((3, 3), 1)}, "unfused")
    name = "expp_rank_0_mp_rank_00_optim_states.pt"
    shutil.copy(RECORDED / "experts_z0" / "step" / name, tmp_path / "run" / "step")

    with pytest.raises(CorruptError, match="neither ds_autoep_layers nor files of experts"):
        read_catalog(tmp_path / "run")


# --- the real engine's files -------------------------------------------------------------


def test_the_wrapper_counts_the_step_that_it_made_before_the_training(shared):
    """`initialize_optimizer_states` steps once with zero gradients, so two steps are three."""
    catalog = read_catalog(shared / "checkpoints" / "codegen_fused_tp2_z0")

    assert gather(catalog, catalog.tensors[0].states["step"]).view(np.float32) == 3


def test_moments_are_those_of_the_same_training_with_zero_1(shared):
    """The first step has the same gradients and the second almost: every moment points where its
    namesake of ZeRO-1 points, and where no other one does."""
    states = [
        gather_all(read_catalog(shared / "checkpoints" / f"codegen_fused_tp2_{stage}"))
        for stage in ("z0", "z1")
    ]
    names = [name for name in states[0] if name.endswith("/exp_avg")]
    vectors = [{name: found[name].view(np.float32).ravel() for name in names} for found in states]

    for name, own in vectors[0].items():
        angles = {
            other: cosine(own, vector)
            for other, vector in vectors[1].items()
            if vector.size == own.size
        }
        assert max(angles, key=angles.__getitem__) == name
        assert angles[name] > 0.98


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


@pytest.mark.parametrize("name", ["numbered_groups_z0", "numbered_flat_z0", "numbered_fp32_z0"])
def test_states_do_not_depend_on_the_class_that_saved_them(name):
    """The three classes trained the same model with the same groups, two of them in bf16."""
    catalog = read_catalog(RECORDED / name)
    groups = catalog.values["optimizer"]["param_groups"]

    assert catalog.format == "deepspeed zero-0"
    trained = [member for group in groups for member in group["params"]]
    states = {t.name: set(t.states) - {"step"} for t in catalog.tensors if t.name in trained}
    assert all(own == {"weight", "fp32", "exp_avg", "exp_avg_sq"} for own in states.values())
    is_tied = name != "numbered_fp32_z0"
    assert ("head.weight" in trained, "base.weight" in trained) == (not is_tied, not is_tied)


def test_weights_of_zero_0_go_to_safetensors(shared, tmp_path):
    source = shared / "checkpoints" / "codegen_fused_tp2_z0"

    report = api.convert(source, tmp_path / "out", states="all")

    assert restride.diff(source, tmp_path / "out").verdict == "same"
    assert report.tensor_count == 105


def test_check_says_what_is_left_out_and_convert_still_gives_the_weights(tmp_path, capsys):
    parameters = {f"layer.{n}": parameter((3, 3), n, group=n // 2) for n in range(4)}
    written(tmp_path / "run", parameters, "bare")

    assert main(["check", str(tmp_path / "run")]) == 1
    assert "cannot be matched to the parameters" in capsys.readouterr().out.replace("\n", " ")
    assert main(["convert", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "model.safetensors").is_file()


@pytest.mark.parametrize("is_numbered", [True, False])
def test_names_that_are_told_are_of_all_numbers_or_of_what_the_optimizer_must_have(is_numbered):
    """Of two parameters of one shape in two groups nothing but the names can tell."""
    model = [Candidate("a", (2,)), Candidate("empty", (0,), is_owned=False), Candidate("b", (2,))]
    a, b = (Slot(label, frozenset({(2,)})) for label in "01")
    empty = Slot("2", frozenset({(0,)}))
    groups = [[empty, b] if is_numbered else [b], [a]]

    found = match(model, groups, [["empty", "b"], ["a"]])

    assert isinstance(found, Matched)
    assert found.names == ((("empty", "b") if is_numbered else ("b",)), ("a",))
    assert not found.by_order
