"""Every checkpoint that the real engine wrote, bit for bit.

Shared ones come with what DeepSpeed's `ds_to_universal` makes of them; the recorded ones
(scripts/record_deepspeed_checkpoints.py) with what the running engine gathered.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from recorded import DRIFTED, SHARED
from restride.algebra.coverage import Covered, prove
from restride.algebra.signature import same_layout
from restride.arrays.extract import extract
from restride.formats.deepspeed import read_catalog
from restride.layouts import codegen_qkv
from restride.testing.gather import gather, gather_all

RECORDED = Path(__file__).parents[1] / "data" / "deepspeed"
ALL = [*SHARED, *(f"recorded/{path.name}" for path in sorted(RECORDED.iterdir()))]
WHOLE = [name for name in ALL if name.endswith("_z0")]
PARTITIONED = [name for name in ALL if name.endswith("_z3")]

# Keys of a reference that are no state of a tensor: the peer takes what it finds in the model
# files and has no master weight for, and writes it as fp32.
UPCAST = {
    # Tied to the embedding. Its master weight is that of the embedding; the peer lost 16 bits.
    ("bloom_tp2_z1", "lm_head.weight/fp32"): "transformer.word_embeddings.weight",
    ("opt_tp2_z1", "lm_head.weight/fp32"): "model.decoder.embed_tokens.weight",
    # AutoEP registers the router a second time; the copy has no master weight of its own.
    ("mixtral_ep2_z1", "model.layers.0.mlp.gate.gate.weight/fp32"): (
        "model.layers.0.mlp.router.gate.weight"
    ),
    ("mixtral_ep2_z1", "model.layers.1.mlp.gate.gate.weight/fp32"): (
        "model.layers.1.mlp.router.gate.weight"
    ),
}


def folder_of(name: str, shared: Path) -> Path:
    if name.startswith("recorded/"):
        return RECORDED / name.removeprefix("recorded/")
    return shared / "checkpoints" / name


@cache
def catalog_of(path: Path):
    return read_catalog(path)


@cache
def states_of(path: Path):
    return gather_all(catalog_of(path))


@cache
def reference_of(path: Path) -> dict[str, np.ndarray]:
    file = path / "reference.safetensors"
    if not file.is_file():
        return {}
    with safe_open(file, "numpy") as reference:
        return {key: reference.get_tensor(key) for key in reference.keys()}  # noqa: SIM118


def rounded(master: np.ndarray) -> np.ndarray:
    """Bits of fp32 values rounded to bf16, to the nearest and ties to even."""
    bits = master.view(np.uint32)[..., 0].astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def upper_half(widened: np.ndarray) -> np.ndarray:
    """Bits of bf16 values that were widened to fp32."""
    bits = widened.view(np.uint32)
    assert not (bits & 0xFFFF).any()
    return (bits >> 16).astype(np.uint16)


def shard_bytes(catalog, entry, rank: int) -> np.ndarray:
    """The shard of one rank, which must be dense."""
    region = entry.regions[rank]
    nbytes = entry.layout.shard_numel(rank) * entry.dtype.itemsize_nbytes
    assert (region is None) == (nbytes == 0)
    if region is None:
        return np.zeros(0, np.uint8)
    content = Path(catalog.root, catalog.files[region.file].name).read_bytes()
    return np.frombuffer(content[region.start_nbytes :][:nbytes], np.uint8)


def is_agreed(catalog, entry) -> bool:
    """Whether all ranks that hold an element hold the same."""
    try:
        gather(catalog, entry)
    except AssertionError:
        return False
    return True


@pytest.mark.parametrize("name", [name for name in ALL if name != DRIFTED])
def test_every_state_is_the_reference_bit_for_bit(name, shared):
    path = folder_of(name, shared)
    states = states_of(path)
    upcast = {key for checkpoint, key in UPCAST if checkpoint == name}

    for key, expected in reference_of(path).items():
        tensor, _, state = key.rpartition("/")
        if key in upcast:
            continue
        if state == "weight" and key not in states:  # ZeRO-3 keeps none: it is the rounded master
            assert np.array_equal(rounded(states[f"{tensor}/fp32"]), upper_half(expected)), key
            continue
        found = states[key]
        if found.shape[-1] == 2:
            assert np.array_equal(found.view(np.uint16)[..., 0], upper_half(expected)), key
            continue
        # The peer writes flat tensors of ZeRO-3, where there is no tensor parallelism.
        assert expected.shape in {found.shape[:-1], (expected.size,)}
        assert np.array_equal(found.view(expected.dtype).ravel(), expected.ravel()), key
    if reference_of(path):
        optimized = {key for key in states if not key.endswith(("/weight", "/step"))}
        assert optimized == {
            key
            for key in reference_of(path)
            if key not in upcast and not key.endswith(("/weight", "/step"))
        }


@pytest.mark.parametrize(("name", "key"), UPCAST)
def test_what_the_peer_writes_of_a_second_name_is_the_rounded_master_weight(name, key, shared):
    path = folder_of(name, shared)
    states = states_of(path)
    master = states[f"{UPCAST[name, key]}/fp32"]
    written = reference_of(path)[key]

    assert key not in states
    assert np.array_equal(written.view(np.uint32) >> 16, rounded(master))
    assert not np.array_equal(written, master.view(np.float32)[..., 0])


@pytest.mark.parametrize("name", [n for n in ALL if n != DRIFTED and n not in PARTITIONED])
def test_weights_of_the_model_files_are_the_rounded_master_weights(name, shared):
    """For checkpoints without a reference this is the proof.

    The masters stand in other files than the weights, behind another cut. Were one fragment taken
    from the wrong place, hundreds of weights would differ. Moments stand behind the same cut: the
    next test says so.
    """
    states = states_of(folder_of(name, shared))
    checked = 0
    for key, weight in states.items():
        tensor, _, state = key.rpartition("/")
        master = states.get(f"{tensor}/fp32")
        if state == "weight" and master is not None:
            is_fp32 = weight.shape[-1] == 4
            stored = weight if is_fp32 else weight.view(np.uint16)[..., 0]
            assert np.array_equal(stored, master if is_fp32 else rounded(master)), key
            checked += 1

    assert checked == sum(key.endswith("/fp32") for key in states)
    assert checked >= 7


# Of its parameter groups, one is two partitions; it has a reference.
@pytest.mark.parametrize(
    "name", [name for name in ALL if name not in {*WHOLE, "recorded/partitioned_z3"}]
)
def test_moments_stand_where_the_master_weights_stand(name, shared):
    catalog = catalog_of(folder_of(name, shared))
    first_nbytes: dict[tuple[int, str, tuple[int, ...]], int] = {}
    for tensor in catalog.tensors:
        master = tensor.states.get("fp32")
        for state, entry in tensor.states.items():
            if state in {"weight", "step"} or master is None:
                continue
            assert entry.layout == master.layout
            # In every file the distance between a master and its moment is that of two buffers.
            for own, other in zip(entry.regions, master.regions, strict=True):
                assert (own is None) == (other is None)
                if own is not None and other is not None:
                    groups = catalog.values["optimizer"]["param_groups"]
                    number = next(n for n, g in enumerate(groups) if tensor.name in g["params"])
                    distance = own.start_nbytes - other.start_nbytes
                    key = (own.file, state, (number,))
                    assert first_nbytes.setdefault(key, distance) == distance


def test_zero_2_trains_the_same_states_as_zero_1(shared):
    """`llama_tp1dp2_z2` has no reference; the same run under ZeRO-1 has one."""
    assert reference_of(folder_of("llama_tp1dp2_z1", shared))
    one = states_of(folder_of("llama_tp1dp2_z1", shared))
    two = states_of(folder_of("llama_tp1dp2_z2", shared))

    assert one.keys() == two.keys()
    assert all(np.array_equal(one[key], two[key]) for key in one)


def test_multi_query_attention_has_drifted_and_each_rank_is_right_by_itself(shared):
    """`gptbigcode_tp2_z1` has no reference: the peer refuses it.

    Both ranks hold the keys and values whole, and trained them apart. Read as if only one rank
    were there, masters round to the weights of that rank; queries have one holder anyway.
    """
    catalog = catalog_of(folder_of(DRIFTED, shared))
    drifted = set()
    for tensor in catalog.tensors:
        shards = {
            (state, rank): shard_bytes(catalog, tensor.states[state], rank)
            for state in ("weight", "fp32")
            for rank in range(2)
        }
        for rank in range(2):
            master = shards["fp32", rank].reshape(-1, 4)
            assert np.array_equal(rounded(master), shards["weight", rank].view(np.uint16))
        if not is_agreed(catalog, tensor.states["fp32"]):
            drifted.add(tensor.name.partition(".h.")[2])

    assert {"0.attn.c_attn.weight", "1.attn.c_attn.weight"} <= drifted
    assert all(".c_attn." in name for name in drifted)


@pytest.mark.parametrize("name", ALL)
def test_every_layout_is_proved(name, shared):
    catalog = catalog_of(folder_of(name, shared))

    for tensor in catalog.tensors:
        assert isinstance(prove(tensor.layout), Covered)
        for entry in tensor.states.values():
            assert isinstance(prove(entry.layout, side="full"), Covered)
            assert len(entry.regions) == entry.layout.rank_count


def test_the_permuted_qkv_of_codegen_is_one_piece_for_all_ranks(shared):
    catalog = catalog_of(folder_of("codegen_fused_tp2dp2_z1", shared))
    fused = [tensor for tensor in catalog.tensors if "qkv_proj" in tensor.name]

    assert len(fused) == 2
    for tensor in fused:
        assert len(tensor.layout.all_pieces) == 1
        assert same_layout(tensor.layout, codegen_qkv((192, 64), mesh={"tp": 2}, heads=8))
    assert not catalog.findings


def test_a_fused_weight_that_is_cut_as_rows_is_warned_of(shared):
    catalog = catalog_of(folder_of("codegen_rowcut_tp2_z1", shared))

    assert [finding.kind for finding in catalog.findings] == ["fused-cut"] * 2
    assert all(finding.severity == "warning" for finding in catalog.findings)
    assert "qkv_proj" in catalog.findings[0].message
    assert "right on 2 ranks that are cut this way only" in catalog.findings[0].message


@pytest.mark.parametrize(
    ("name", "tensor", "alias"),
    [
        ("recorded/partitioned_z3", "embed.weight", "head.weight"),
        ("llama_tied_tp2_z1", "model.embed_tokens.weight", "lm_head.weight"),
        ("gpt2_tp1dp2_z1", "transformer.wte.weight", "lm_head.weight"),
        ("recorded/tied_frozen_z1", "embed.weight", "head.weight"),
    ],
)
def test_a_tied_parameter_is_one_tensor_with_two_names(name, tensor, alias, shared):
    catalog = catalog_of(folder_of(name, shared))
    entries = {entry.name: entry for entry in catalog.tensors}

    assert entries[tensor].aliases == (alias,)
    assert alias not in entries
    assert [e.name for e in catalog.tensors if e.aliases] == [tensor]


def test_experts_are_stacked_from_the_files_of_each(shared):
    catalog = catalog_of(folder_of("mixtral_ep2_z1", shared))
    entry = next(e for e in catalog.tensors if e.name == "model.layers.1.mlp.experts.w2")

    assert str(entry.layout.mesh) == "ep=2"
    assert entry.layout.full_shape == (4, 64, 64)
    files = [catalog.files[region.file].name for region in entry.states["weight"].regions]
    assert files == [f"step/layer_1_expert_{n}_mp_rank_00_model_states.pt" for n in range(4)]
    assert str(entry.states["exp_avg"].layout.mesh) == "dp=2,tp=1"


@pytest.mark.parametrize(
    ("name", "ranks"), [("experts_z1", (0, 2)), ("experts_data_first_z1", (0, 1))]
)
def test_ranks_with_the_same_experts_are_those_of_the_engines_groups(name, ranks, shared):
    """Which data-parallel ranks share experts depends on the order of the two parallelisms.

    That the order is right is proved by the weights, in the files of the experts: see above.
    """
    catalog = catalog_of(folder_of(f"recorded/{name}", shared))
    entry = next(e for e in catalog.tensors if e.name.endswith("experts.w2"))
    layout = entry.states["fp32"].layout
    first = {rank for rank in range(4) if any(p.full_base < 128 for p in layout.pieces(rank))}

    assert layout.full_shape == (4, 8, 8)
    assert first == set(ranks)


def test_frozen_parameters_have_weights_only_and_buffers_keep_their_dtype(shared):
    for name in ("aligned_frozen_z2", "tied_frozen_z1", "partitioned_z3"):
        catalog = catalog_of(folder_of(f"recorded/{name}", shared))
        entries = {entry.name: entry for entry in catalog.tensors}

        assert [e.name for e in catalog.tensors if e.is_frozen] == ["base.weight"]
        assert list(entries["base.weight"].states) == ["weight"]
        assert entries["positions"].kind == "buffer"
        assert entries["positions"].states["weight"].dtype.name == "int64"
        positions = gather(catalog, entries["positions"].states["weight"])
        assert positions.view(np.int64)[..., 0].tolist() == [0, 1, 2, 3, 4]


def test_a_parameter_without_elements_is_kept_and_stands_nowhere(shared):
    catalog = catalog_of(folder_of("recorded/aligned_frozen_z2", shared))
    entry = next(entry for entry in catalog.tensors if entry.name == "empty")

    assert entry.layout.full_shape == (0, 3)
    assert not entry.is_frozen
    assert entry.states["weight"].regions == (None,)


def test_states_are_called_what_the_optimizer_calls_them(shared):
    catalog = catalog_of(folder_of("recorded/momentum_z1", shared))
    entry = next(entry for entry in catalog.tensors if entry.name == "up.weight")

    assert list(entry.states) == ["weight", "fp32", "momentum_buffer"]


def test_a_mapping_in_the_order_before_the_round_robin_is_warned_of(shared):
    """The peer follows it: `ds_to_universal` makes `up.weight` out of four other parameters."""
    catalog = catalog_of(folder_of("recorded/round_robin_z2", shared))

    assert [finding.kind for finding in catalog.findings] == ["slice-mapping-order"]


@pytest.mark.parametrize(
    ("name", "format_name", "mesh"),
    [
        ("llama_tp1dp2_z2", "deepspeed zero-2", "dp=2,tp=1"),
        ("codegen_fused_tp2dp2_z1", "deepspeed zero-1", "dp=2,tp=2"),
        ("recorded/bf16_optimizer_z1", "deepspeed zero-1", "dp=2,tp=1"),
        ("recorded/tensor_parallel_z3", "deepspeed zero-3", "dp=2,tp=2"),
    ],
)
def test_a_catalog_names_its_format_and_its_ranks(name, format_name, mesh, shared):
    catalog = catalog_of(folder_of(name, shared))

    assert catalog.format == format_name
    assert str(catalog.mesh) == mesh


def test_the_folder_of_the_tag_can_be_opened_itself(shared):
    path = folder_of("llama_tp2_z1", shared)
    inside = read_catalog(path / "step")

    assert [file.name for file in inside.files] == [
        file.name.removeprefix("step/") for file in catalog_of(path).files
    ]
    assert inside.tensors == catalog_of(path).tensors


@pytest.mark.parametrize("rank", [0, 1])
def test_each_shard_is_that_which_the_engine_gathered_on_its_tensor_parallel_rank(rank, shared):
    """Data-parallel ranks cut the shards of tensor-parallel ones; the engine joins only the first.

    Three heads for keys and values on two ranks: the shards are uneven.
    """
    path = folder_of("recorded/tensor_parallel_z3", shared)
    catalog, states = catalog_of(path), states_of(path)
    with safe_open(path / f"reference_tp{rank}.safetensors", "numpy") as reference:
        shards = {key: reference.get_tensor(key) for key in reference.keys()}  # noqa: SIM118

    layouts = {tensor.name: tensor.layout for tensor in catalog.tensors}
    assert {key for key in states if not key.endswith("/step")} == {
        key for key in shards if not key.endswith("/weight")
    }
    for key, expected in shards.items():
        tensor, _, state = key.rpartition("/")
        full = states[f"{tensor}/fp32" if state == "weight" else key]
        shard = extract(layouts[tensor], full.view(np.float32)[..., 0], rank)
        if state == "weight":
            found, wanted = rounded(shard[..., None].view(np.uint8)), upper_half(expected)
        else:
            found, wanted = shard, expected
        assert found.shape == expected.shape
        assert np.array_equal(found, wanted), key
    assert {tensor.name for tensor in catalog.tensors if not is_even(tensor.layout)} == {
        f"model.layers.0.self_attn.{kind}_proj.weight" for kind in "qkvo"
    }


def is_even(layout) -> bool:
    return len({layout.shard_shape(rank) for rank in range(layout.rank_count)}) == 1


def test_experts_of_zero_3_are_cut_over_the_ranks_that_hold_them(shared):
    """Ranks 0 and 2 hold experts 0 and 1; the engine says so itself, and it is compared."""
    catalog = catalog_of(folder_of("recorded/experts_z3", shared))
    entry = next(e for e in catalog.tensors if e.name.endswith("experts.w2"))
    layout = entry.states["fp32"].layout

    assert layout.full_shape == (4, 8, 8)
    assert [layout.pieces(rank)[0].full_base for rank in range(4)] == [0, 128, 64, 192]
    assert entry.trained_dtype.name == "bfloat16"
    assert "weight" not in entry.states


def test_values_that_are_no_tensors_are_carried(shared):
    values = catalog_of(folder_of("recorded/aligned_frozen_z2", shared)).values

    assert values["model"]["global_steps"] == 2
    assert values["model"]["epoch"] == 3
    assert values["model"]["random"]["tensor"]["dtype"] == "uint8"
    assert len(values["model"]["random"]["tensor"]["data"]) == 32
    assert values["model"]["ds_config"]["zero_optimization"]["stage"] == 2
    optimizer = values["optimizer"]
    assert [group["lr"] for group in optimizer["param_groups"]] == [0.01, 0.02]
    assert optimizer["param_groups"][1]["params"][0] == "up.bias"
    state = optimizer["loss_scaler"]["object"]["state"]
    assert state == {"cur_scale": 1.0, "dynamic": False}
    assert values["other_files"] == {}
