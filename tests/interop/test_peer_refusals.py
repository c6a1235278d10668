"""What DeepSpeed 0.19.8 refuses to convert or converts wrongly, and the right behaviour.

The rest of the table: faults of the algebra are in test_peer_faults.py, optimizers in
test_optimizers.py, pipelines in test_pipeline.py. Where a later version of the peer mends a fault,
the half of the test that shows it fails, and the comparison has to be written again.
"""

from __future__ import annotations

import inspect
import shutil
from collections import OrderedDict
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from restride import api, extract, layouts, rebuild
from restride.algebra.coverage import Covered, prove
from restride.errors import CorruptError, LayoutError, ShapeMismatchError, UnsupportedError
from restride.testing.gather import gather, gather_all
from restride.testing.saved_values import Array, edit_file

torch = pytest.importorskip("torch")
pytest.importorskip("deepspeed")
pytestmark = pytest.mark.interop

RECORDED = Path(__file__).parents[1] / "data" / "deepspeed"
# Checkpoint, what the peer says of it, and what the user has to say here instead.
REFUSED = {
    "codegen_fused_tp2_z0": (("can't find *_optim_states.pt",), {}),
    "llama_tp1dp2_z1": (("Required universal_checkpoint_info state is missing",), {}),
    "llama_tp1dp2_z2": (("Required universal_checkpoint_info state is missing",), {}),
    "gpt2_tp1dp2_z1": (("Required universal_checkpoint_info state is missing",), {}),
    # Which of the two it is depends on what it comes to first.
    "gptbigcode_tp2_z1": (
        ("hold different data", "'NoneType' object is not iterable"),
        {"replicas": "tp=0"},
    ),
    "momentum_z1": (("exp_avg",), {}),
    "numbered_fp32_z0": (("can't find *_optim_states.pt",), {}),
}


def find(name, shared):
    folder = shared / "checkpoints" / name
    return folder if folder.is_dir() else RECORDED / name


@pytest.fixture(scope="module")
def said(convert_as_peer, shared, tmp_path_factory):
    out = tmp_path_factory.mktemp("peer")
    return {
        name: convert_as_peer(find(name, shared), out / name, inject=name == "momentum_z1")
        for name in REFUSED
    }


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_peer_refuses_is_converted_without_a_loss(name, said, shared, tmp_path):
    words, options = REFUSED[name]
    assert any(word in said[name] for word in words), said
    source = api.open(find(name, shared))

    report = api.convert(find(name, shared), tmp_path / "out", to="universal", **options)

    assert all(finding.severity != "error" for finding in report.findings)
    ours = {
        f"{tensor.name}/{state}": (catalog, entry)
        for catalog in [api.open(tmp_path / "out")]
        for tensor in catalog.tensors
        for state, entry in tensor.states.items()
    }
    compared = 0
    for tensor in source.tensors:
        drifted = options and "c_attn" in tensor.name
        for state, entry in tensor.states.items():
            if state in {"weight", "step"} or not entry.layout.full_numel or drifted:
                continue
            assert np.array_equal(gather(*ours[f"{tensor.name}/{state}"]), gather(source, entry))
            compared += 1
    assert compared > 5


def test_e2_moments_through_a_scale_are_refused_or_follow_it_and_are_never_multiplied_by_it():
    affine = pytest.importorskip("deepspeed.checkpoint.affine")
    peer = affine.replicated_map((4,), 2, scale=0.5)
    with pytest.raises(NotImplementedError):
        peer.extract(torch.ones(4), 0, -1)
    stage3 = inspect.getsource(pytest.importorskip("deepspeed.runtime.zero.stage3"))
    call = stage3[stage3.index("_resolve_autotp_partition(") :][:200]
    assert "state_key" not in call[: call.index(")")]  # so a moment is scaled like a weight

    layout = layouts.replicated((4,), mesh={"tp": 2}, scale=Fraction(1, 2))
    shards = {0: torch.ones(4), 1: torch.ones(4)}

    assert rebuild(layout, shards).tolist() == [2.0] * 4
    for state in ("exp_avg", "exp_avg_sq"):
        with pytest.raises(UnsupportedError):
            rebuild(layout, shards, state=state)
        with pytest.raises(UnsupportedError):
            extract(layout, torch.ones(4), 0, state=state)


def test_e4_the_bias_of_yuans_output_is_divided_and_odd_heads_are_shared():
    fused = pytest.importorskip("deepspeed.module_inject.fusedqkv_utils")
    layers = pytest.importorskip("deepspeed.module_inject.layers")
    meta = pytest.importorskip("deepspeed.module_inject.tp_shard").AutoTPMeta
    with pytest.raises(AttributeError, match="detach"):
        fused.shard_value_with_share_qk(
            torch.randn(8, 32), torch.randn(8), 0, 2, shard_value=False, meta=meta(num_kv_heads=8)
        )
    layer = layers.Yuan_LinearAllreduce(torch.nn.Linear(30, 6, bias=False), mp_group=None, name="o")
    layer.tp_world_size, layer.tp_meta = 2, meta(num_kv_heads=6)
    module = torch.nn.Module()
    module.o_proj = layer
    info = layers.collect_autotp_universal_checkpoint_info(module)
    assert info["autotp_unsupported_parameter_patterns"]

    bias = torch.arange(8.0)
    whole = layouts.yuan_output((8,), mesh={"tp": 2}, heads=8)
    assert extract(whole, bias, 1).tolist() == (bias / 2).tolist()
    shared_heads = layouts.yuan_output((6, 30), mesh={"tp": 2}, heads=6)
    full = torch.arange(180.0).view(6, 30)
    shards = {rank: extract(shared_heads, full, rank) for rank in range(2)}
    assert isinstance(prove(shared_heads), Covered)
    assert sum(shard.numel() for shard in shards.values()) > full.numel()
    assert torch.equal(rebuild(shared_heads, shards), full)
    shards[1] = shards[1] + 1
    with pytest.raises(ValueError, match="different copies"):
        rebuild(shared_heads, shards)
    assert torch.equal(rebuild(shared_heads, shards, replicas="tp=0")[:, :5], full[:, :5])


def test_e11_shapes_are_compared_and_a_rank_outside_the_layout_is_none():
    affine = pytest.importorskip("deepspeed.checkpoint.affine")
    constants = pytest.importorskip("deepspeed.checkpoint.constants")
    restore = pytest.importorskip("deepspeed.checkpoint.universal_checkpoint")
    fused = pytest.importorskip("deepspeed.module_inject.fusedqkv_utils")
    size, ids = fused.codegen_block_layout(24, 2, 8)
    stored = affine.block_gather_map((24, 8), ids, size, 0).to_dict()
    parameter = torch.nn.Parameter(torch.zeros(12, 8))
    meta = {"partition_dim": 0, "logical_shape": (24, 8), "conversion": {"affine_map": stored}}
    setattr(parameter, constants.DS_AUTOTP_UC_META, meta)
    full = torch.arange(192.0).view(24, 8)
    turned = full.t().contiguous()
    resolve = restore._resolve_autotp_partition
    assert resolve(parameter, {constants.PARAM: turned}, turned, 0, 2).numel() == 96
    assert resolve(parameter, {constants.PARAM: full}, full, 3, 4).numel() == 48

    layout = layouts.codegen_qkv((24, 8), mesh={"tp": 2}, heads=8)

    with pytest.raises(ShapeMismatchError):
        extract(layout, turned, 0)
    with pytest.raises(LayoutError):
        extract(layout, full, 3)


def cut_by_the_peer(kind, shape):
    """Shards of a Conv1D of the real layer, and the map that it publishes of them."""
    layers = pytest.importorskip("deepspeed.module_inject.layers")
    constants = pytest.importorskip("deepspeed.checkpoint.constants")
    meta = pytest.importorskip("deepspeed.module_inject.tp_shard").AutoTPMeta
    layers.TensorParallel_Layer.set_keep_module_on_host(True)
    cls, shards, published = getattr(layers, kind), [], None
    for rank in range(2):
        layer = cls.__new__(cls)
        torch.nn.Module.__init__(layer)
        layer.mp_group, layer.tp_world_size, layer.tp_index = None, 2, rank
        layer.tp_meta, layer.name, layer.is_tp_parallel = meta(), "c_fc", True
        layer.weight = torch.nn.Parameter(torch.arange(float(np.prod(shape))).view(shape))
        layer.bias = None
        layer._orig_weight_shape, layer._orig_bias_shape = tuple(shape), None
        dim = 1 if issubclass(cls, layers.LinearAllreduce) else 0
        layer._freeze_partition_sizes(shape[dim])
        layer._tp_partition([layer.weight, layer.bias])
        layer._mark_uc_metadata()
        shards.append(layer.weight.data.clone())
        published = getattr(layer.weight, constants.DS_AUTOTP_UC_META)["conversion"]["affine_map"]
    return shards, published


def test_e12_a_map_that_does_not_describe_the_shards_beside_it_is_refused(tmp_path, shared):
    """Layers of GPT-2 inherit the maps of linear ones, whose weights are turned."""
    shards, published = cut_by_the_peer("conv_LinearLayer", (8, 8))
    affine = pytest.importorskip("deepspeed.checkpoint.affine")
    full = torch.arange(64.0).view(8, 8)
    wrong = affine.ParamAffineMap.from_dict(published).rebuild(dict(enumerate(shards)))
    assert not torch.equal(wrong, full)

    shutil.copytree(shared / "checkpoints" / "llama_tp2_z1", tmp_path / "saved")
    for tp, shard in enumerate(shards):

        def replace(root, shard=shard):
            content = shard.contiguous().numpy().tobytes()
            root["module"]["conv"] = Array("float32", tuple(shard.shape), content)
            maps = root["universal_checkpoint_info"]["affine_map"]["params"]
            maps["^conv$"] = published

        edit_file(tmp_path / "saved" / "step" / f"mp_rank_{tp:02d}_model_states.pt", replace)

    with pytest.raises(CorruptError, match=r"'conv': tp rank 0 stores a shard of shape \(8, 4\)"):
        api.open(tmp_path / "saved")
    right = layouts.split((8, 8), mesh={"tp": 2}, dim=1)
    assert torch.equal(rebuild(right, dict(enumerate(shards))), full)


def test_e13_a_map_of_even_shards_is_refused_for_the_uneven_ones_that_a_grain_makes():
    fused = pytest.importorskip("deepspeed.module_inject.fusedqkv_utils")
    meta = pytest.importorskip("deepspeed.module_inject.tp_shard").AutoTPMeta
    grain = meta(num_kv_heads=16, n_embd=8, num_attention_heads=16, tp_grain_size=16)
    codegen = type("N", (torch.nn.Module,), {"__str__": lambda _: "CodeGenBlock"})()
    full = torch.arange(24.0).view(24, 1).repeat(1, 2)
    rows = [
        fused.prepare_tp_fused_qkvw(codegen, full.clone(), 2, rank, grain).shape[0]
        for rank in range(2)
    ]
    assert rows == [16, 8]
    assert fused.codegen_block_layout(24, 2, 16) is not None

    layout = layouts.codegen_qkv((24, 2), mesh={"tp": 2}, heads=8)
    with pytest.raises(ShapeMismatchError):
        rebuild(layout, {rank: torch.zeros(n, 2) for rank, n in enumerate(rows)})


FULL = {
    "embed_tokens.weight": np.arange(24, dtype=np.float32).reshape(6, 4),
    "embed_positions.weight": np.arange(40, dtype=np.float32).reshape(10, 4) + 100,
    "frozen.weight": np.arange(32, dtype=np.float32).reshape(8, 4) + 500,
}


@pytest.fixture(scope="module")
def frozen_and_vocabulary(convert_as_peer, tmp_path_factory):
    """A run of two tensor-parallel ranks as the engine lays it out, and the peer's folder of it."""
    affine = pytest.importorskip("deepspeed.checkpoint.affine")
    fragment = pytest.importorskip("deepspeed.utils.tensor_fragment").fragment_address
    folder = tmp_path_factory.mktemp("frozen")
    step = folder / "saved" / "step"
    step.mkdir(parents=True)
    tensors = {name: torch.from_numpy(array) for name, array in FULL.items()}
    patterns = {name: "^" + name.replace(".", r"\.") + "$" for name in tensors}
    info = {
        "universal_checkpoint_version": 0.4,
        "parameter_with_row_parallelism_patterns": [],
        "tp_replicated_parameter_patterns": [],
        "vocabulary_parameter_patterns": [patterns[n] for n in tensors if "embed" in n],
        "parameter_with_sub_params": [],
        "autotp_unsupported_parameter_patterns": {},
        "original_vocab_size": 6,
        "affine_map": {
            "version": 1,
            "params": {
                patterns[name]: affine.contiguous_split_map(
                    tensor.shape, [tensor.shape[0] // 2] * 2, 0
                ).to_dict()
                for name, tensor in tensors.items()
            },
        },
    }
    for tp in range(2):
        shards = {name: t.chunk(2, 0)[tp].contiguous() for name, t in tensors.items()}
        trained = [name for name in tensors if not name.startswith("frozen")]
        flat = torch.cat([shards[name].reshape(-1) for name in trained])
        start, maps, shapes = 0, OrderedDict(), OrderedDict()
        for name in trained:
            maps[name] = fragment(start=start, numel=shards[name].numel())
            shapes[name] = shards[name].shape
            start += shards[name].numel()
        model = {
            "module": {**shards, "positions": torch.arange(3)},
            "param_shapes": [shapes],
            "frozen_param_shapes": {"frozen.weight": shards["frozen.weight"].shape},
            "buffer_names": ["positions"],
            "iteration": 1,
            "universal_checkpoint_info": info,
            "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 2},
            "ds_config": {},
        }
        torch.save(model, step / f"mp_rank_{tp:02d}_model_states.pt")
        own = {"step": 3, "exp_avg": flat * 10, "exp_avg_sq": flat * 100}
        state = {
            "base_optimizer_state": {
                "state": {0: own},
                "param_groups": [{"lr": 1e-3, "params": [0]}],
            },
            "single_partition_of_fp32_groups": [flat],
            "zero_stage": 1,
            "group_paddings": [0],
            "partition_count": [1],
            "ds_version": "0.19.8",
            "param_slice_mappings": [maps],
        }
        torch.save(
            {"optimizer_state_dict": state},
            step / f"zero_pp_rank_0_mp_rank_{tp:02d}_optim_states.pt",
        )
    assert not convert_as_peer(folder / "saved", folder / "peer", inject=False)
    return folder


def test_e14_frozen_weights_are_whole_and_a_second_embedding_keeps_its_rows(
    frozen_and_vocabulary, tmp_path
):
    peer = frozen_and_vocabulary / "peer" / "step" / "zero"
    shapes = {
        name: tuple(torch.load(peer / name / "fp32.pt", weights_only=False)["param"].shape)
        for name in FULL
    }
    assert shapes["frozen.weight"] == (4, 4)
    assert shapes["embed_positions.weight"] == (6, 4)

    for options in ({"to": "safetensors", "states": "all"}, {"to": "universal"}):
        out = tmp_path / options["to"]
        api.convert(frozen_and_vocabulary / "saved", out, **options)
        found = gather_all(api.open(out))
        for name, array in FULL.items():
            key = next(k for k in (f"{name}/fp32", f"{name}/weight") if k in found)
            assert np.array_equal(found[key].reshape(-1).view(np.float32), array.reshape(-1)), key


def test_e14_buffers_keep_their_type(frozen_and_vocabulary, tmp_path):
    peer = frozen_and_vocabulary / "peer" / "step" / "zero"
    stored = torch.load(peer / "positions" / "fp32.pt", weights_only=False)["param"]
    assert stored.dtype != torch.int64

    api.convert(frozen_and_vocabulary / "saved", tmp_path / "out")

    (entry,) = [t for t in api.open(tmp_path / "out").tensors if t.name == "positions"]
    assert entry.states["weight"].dtype.name == "int64"


def test_e14_a_folder_of_the_peer_that_has_a_part_of_a_weight_is_not_read_as_the_weight(
    frozen_and_vocabulary,
):
    """Its model files have the shards of all ranks: what they say is larger than what is there."""
    report = api.check(frozen_and_vocabulary / "peer")

    found = {f.where: (f.severity, f.message) for f in report.findings}
    assert set(found) == {"tensor 'embed_positions.weight'", "tensor 'frozen.weight'"}
    severity, message = found["tensor 'embed_positions.weight'"]
    assert severity == "error"
    assert "the states have shape (6, 4), by the model files the parameter has (10, 4)" in message
    severity, message = found["tensor 'frozen.weight'"]
    assert severity == "warning"
    assert "fp32.pt has shape (4, 4), by the model files the parameter has (8, 4)" in message


def test_e16_parameter_groups_of_zero_3_keep_their_own_hyperparameters(tmp_path):
    stage3 = pytest.importorskip("deepspeed.runtime.zero.stage3").DeepSpeedZeroOptimizer_Stage3
    source = inspect.getsource(stage3.load_hp_checkpoint_state_from_checkpoint_dir_stage3)
    assert '["param_groups"][0]' in source.replace("'", '"')

    api.convert(RECORDED / "partitioned_z3", tmp_path / "universal", to="universal")
    api.convert(RECORDED / "partitioned_z3", tmp_path / "sharded", to="deepspeed", dp=1, zero=1)

    (state,) = tmp_path.glob("universal/**/optimizer_state.pt")
    stored = torch.load(state, weights_only=False)
    stored = stored if "param_groups" in stored else stored["optimizer_state_dict"]
    (file,) = tmp_path.glob("sharded/*/*optim_states.pt")
    sharded = torch.load(file, weights_only=False)["optimizer_state_dict"]["base_optimizer_state"]
    for found in (stored["param_groups"], sharded["param_groups"]):
        assert [(group["lr"], group["weight_decay"]) for group in found] == [(0.01, 0.1), (0.02, 0)]


def test_e18_a_parameter_that_zero_init_left_empty_is_what_the_run_trained(tmp_path, shared):
    layers = pytest.importorskip("deepspeed.module_inject.layers")
    module = torch.nn.Module()
    module.fc = layers.LinearLayer(torch.nn.Linear(8, 8), mp_group=None, name="fc")
    module.fc.tp_world_size = 2
    module.norm = torch.nn.LayerNorm(3, bias=False)
    module.norm.weight.ds_shape = torch.Size([3])
    module.norm.weight.data = torch.empty(0)
    published = layers.collect_autotp_universal_checkpoint_info(module)["affine_map"]["params"]
    empty = published[r"^norm\.weight$"]
    assert empty["logical_shape"] == [0]

    shutil.copytree(shared / "checkpoints" / "llama_tp2_z3", tmp_path / "saved")
    before = gather_all(api.open(tmp_path / "saved"))

    def lie(root):
        root["universal_checkpoint_info"]["affine_map"]["params"][r"^model\.norm\.weight$"] = empty

    for file in (tmp_path / "saved" / "step").glob("*_model_states.pt"):
        edit_file(file, lie)
    after = gather_all(api.open(tmp_path / "saved"))

    assert np.array_equal(before["model.norm.weight/fp32"], after["model.norm.weight/fp32"])


@pytest.mark.parametrize("states", ["weights", "all"])
def test_tied_weights_that_diverged_are_kept_apart(states, tmp_path, shared):
    """A name with bytes of its own is no second name of others, whatever the run says."""
    shutil.copytree(shared / "checkpoints" / "llama_tied_tp2_z1", tmp_path / "saved")
    for tp in range(2):

        def diverge(root, tp=tp):
            shard = np.full((64, 64), 0x3F80 + tp, np.uint16)
            root["module"]["lm_head.weight"] = Array("bfloat16", (64, 64), shard.tobytes())

        edit_file(tmp_path / "saved" / "step" / f"mp_rank_{tp:02d}_model_states.pt", diverge)

    api.convert(tmp_path / "saved", tmp_path / "out", states=states)

    found = gather_all(api.open(tmp_path / "out"))
    head = found["lm_head.weight/weight"].reshape(-1).view(np.uint16)
    wanted = np.concatenate([np.full(64 * 64, 0x3F80 + tp, np.uint16) for tp in range(2)])
    assert np.array_equal(head, wanted)
    untouched = gather_all(api.open(shared / "checkpoints" / "llama_tied_tp2_z1"))
    embedding = "model.embed_tokens.weight/weight"
    assert np.array_equal(found[embedding], untouched[embedding])


def test_heads_that_the_ranks_do_not_divide_are_whole(shared, tmp_path):
    """Three heads of keys and values on two ranks; the reference is the peer's own conversion."""
    source = shared / "checkpoints" / "llama_unevenkv_tp2_z1"
    api.convert(source, tmp_path / "out", states="all")
    ours, reference = (
        {key.removesuffix("/weight"): array for key, array in gather_all(api.open(path)).items()}
        for path in (tmp_path / "out", source / "reference.safetensors")
    )

    for state in ("fp32", "exp_avg", "exp_avg_sq"):
        key = f"model.layers.0.self_attn.k_proj.weight/{state}"
        assert ours[key].shape[0] % 3 == 0
        assert np.array_equal(ours[key], reference[key])
