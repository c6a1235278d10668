"""An optimizer goes on with a parameter that is kept as a multiple of itself, or says why not."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from restride.api import convert
from restride.api import open as open_checkpoint
from restride.checkpoint.dtypes import DTYPES
from restride.checkpoint.optimizer_scale import follow_scales
from restride.checkpoint.training import ModelRank, ParameterGroup, Training
from restride.comparison import diff
from restride.errors import UnsupportedError
from restride.formats.opening import open_training
from restride.layouts import replicated, split
from restride.testing.catalogs import catalog_of
from restride.testing.zero_files import Parameter, ZeroRun, box_map, write_zero_run

ADAM = {"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0, "amsgrad": False}
# What groups have of optimizers with Adam's two moments, or with an epsilon, that are not Adam.
OTHERS = {
    "RAdam": ({"amsgrad": None}, "has none of 'adam_w_mode', 'amsgrad', 'bias_correction'"),
    "NAdam": ({"amsgrad": None, "momentum_decay": 0.004}, "has 'momentum_decay'"),
    "RMSprop": ({"amsgrad": None, "alpha": 0.99}, "has 'alpha'"),
    "Lamb": ({"amsgrad": None, "bias_correction": True, "max_coeff": 10.0}, "has 'max_coeff'"),
}


def training(*groups, scheduler=None, **more):
    rank = ModelRank("mp_rank_00", {"lr_scheduler": scheduler}, {})
    made = tuple(ParameterGroup(names, ADAM | more, {}) for names in groups)
    return Training("step", DTYPES["float32"], (), made, {}, (rank,), {})


def halved(scale=Fraction(1, 2)):
    """A bias that two ranks hold halved, beside a weight that they cut, and what a rank holds."""
    source = {
        "bias": replicated((4,), mesh={"tp": 2}, scale=scale),
        "weight": split((4, 4), mesh={"tp": 2}),
    }
    target = {
        "bias": replicated((4,), mesh={"tp": 1}),
        "weight": replicated((4, 4), mesh={"tp": 1}),
    }
    return catalog_of(source), target


def test_a_group_that_is_scaled_as_one_gets_settings_of_its_own():
    catalog, target = halved()
    source = training(("weight",), ("bias",), initial_lr=0.02)

    found, (note,) = follow_scales(source, catalog, target)

    assert found.groups[0] is source.groups[0]
    assert found.groups[1].settings == ADAM | {"lr": 0.02, "initial_lr": 0.04, "eps": 5e-9}
    assert (note.severity, note.kind) == ("note", "optimizer-transform")
    assert "parameter group 1 is stored 2 times itself: lr 0.01 to 0.02" in note.message
    assert "weight_decay" not in note.message


def test_nothing_changes_where_no_scale_does():
    catalog, _ = halved()
    kept = {tensor.name: tensor.layout for tensor in catalog.tensors}
    source = training(("weight", "bias"), scheduler={"last_step": 3})

    assert follow_scales(source, catalog, kept) == (source, ())


@pytest.mark.parametrize(("norm", "is_told"), [(1.0, True), (0.0, False), ("auto", False)])
def test_clipping_by_a_norm_that_changes_is_told_of(norm, is_told):
    catalog, target = halved()
    source = training(("weight",), ("bias",))
    source.ranks[0].values["ds_config"] = {"gradient_clipping": norm}

    for layouts in (target, {tensor.name: tensor.layout for tensor in catalog.tensors}):
        _, findings = follow_scales(source, catalog, layouts)
        kinds = [f.kind for f in findings if f.severity == "warning"]
        assert kinds == ["optimizer-transform-clipping"] * (is_told and layouts is target)


@pytest.mark.parametrize(("decoupled", "expected"), [(True, 0.05), (False, 0.025)])
def test_weight_decay_follows_where_it_says_how_it_is_applied(decoupled, expected):
    catalog, target = halved()
    source = training(("bias",), weight_decay=0.1, decoupled_weight_decay=decoupled)

    found, _ = follow_scales(source, catalog, target)

    assert found.groups[0].settings["weight_decay"] == expected


@pytest.mark.parametrize(
    ("groups", "more", "words"),
    [
        (
            (("weight", "bias"),),
            {},
            "group 0: its parameters change by different factors, 'weight' by 1 and 'bias' by 2",
        ),
        (
            (("bias",),),
            {"scheduler": {"last_step": 3}},
            "mp_rank_00: parameter group 0: a scheduler",
        ),
        ((("bias",),), {"weight_decay": 0.1}, "a weight decay of 0.1, and does not say whether"),
        ((("bias",),), {"lr": None}, "lr is no plain number"),
    ],
)
def test_what_cannot_follow_is_refused(groups, more, words):
    catalog, target = halved()

    with pytest.raises(UnsupportedError) as caught:
        follow_scales(training(*groups, **more), catalog, target)
    assert words in str(caught.value)


def test_an_optimizer_that_is_not_adam_and_a_negative_factor_are_refused():
    catalog, target = halved()
    sgd = ParameterGroup(("bias",), {"lr": 0.1, "momentum": 0.9}, {})
    source = training(("bias",))

    with pytest.raises(UnsupportedError, match="has no 'eps', so its optimizer is not known to be"):
        follow_scales(
            Training("step", source.dtype, (), (sgd,), {}, source.ranks, {}), catalog, target
        )
    turned, _ = halved(Fraction(-1, 2))
    with pytest.raises(UnsupportedError, match="factor of -2, and no learning rate is negative"):
        follow_scales(source, turned, target)


@pytest.mark.parametrize("name", OTHERS)
def test_an_optimizer_that_only_looks_like_adam_is_refused(name):
    """With a gradient of a half, Lamb's steps are as long, and RAdam's first ones half as long."""
    more, words = OTHERS[name]
    catalog, target = halved()
    settings = {key: value for key, value in (ADAM | more).items() if value is not None}
    group = ParameterGroup(("bias",), settings, {})
    source = training(("bias",))

    with pytest.raises(UnsupportedError, match=words):
        follow_scales(
            Training("step", source.dtype, (), (group,), {}, source.ranks, {}), catalog, target
        )


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_torch_takes_the_same_steps_with_what_has_followed(name, decay):
    """Bit for bit, since the factor is a power of two."""
    torch = pytest.importorskip("torch")
    catalog, target = halved()
    generator = torch.Generator().manual_seed(0)
    states = {}

    def steps(factor, settings, count):
        parameter = torch.nn.Parameter(start * factor)
        optimizer = getattr(torch.optim, name)([parameter], weight_decay=decay)
        optimizer.param_groups[0].update(settings)
        if states:
            optimizer.state[parameter] = {
                "step": states["step"].clone(),
                "exp_avg": states["exp_avg"] / factor,
                "exp_avg_sq": states["exp_avg_sq"] / factor**2,
            }
        for gradient in gradients[:count]:
            parameter.grad = gradient / factor
            optimizer.step()
        return parameter.detach() / factor, optimizer

    start = torch.randn(4, generator=generator)
    gradients = torch.randn(3, 4, generator=generator)
    start, optimizer = steps(1, {}, 2)
    states.update(optimizer.state[optimizer.param_groups[0]["params"][0]])
    settings = {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}
    group = ParameterGroup(("bias",), settings, {})
    source = training(("bias",))
    source = Training("step", source.dtype, (), (group,), {}, source.ranks, {})

    found, _ = follow_scales(source, catalog, target)

    followed = dict(found.groups[0].settings)
    assert followed["lr"] == 2 * settings["lr"]
    assert torch.equal(steps(2, followed, 3)[0], steps(1, settings, 3)[0])
    assert not torch.equal(steps(2, settings, 3)[0], steps(1, settings, 3)[0])


def run(states, scale):
    parameters = {
        "o_proj.weight": Parameter((4, 4), {s: np.ones((4, 4), np.float32) for s in states}),
        "o_proj.bias": Parameter((12,), states, group=1),
    }
    plain = ZeroRun(1, 2, parameters, settings=ADAM)
    maps = {f"^{name.replace('.', chr(92) + '.')}$": box_map(plain, name) for name in parameters}
    for entry in maps[r"^o_proj\.bias$"]["ranks"].values():
        entry["pieces"][0]["scale"] = scale
    info = {"affine_map": {"version": 1, "params": maps}}
    return ZeroRun(1, 2, parameters, extra={"universal_checkpoint_info": info}, settings=ADAM)


@pytest.fixture
def checkpoint(tmp_path):
    """Two ranks that hold the bias of one of two groups halved, with its moments."""
    bias = np.random.default_rng(3).standard_normal(12).astype(np.float32)
    moments = {"exp_avg": bias * 2, "exp_avg_sq": bias * bias * 4}
    write_zero_run(tmp_path / "halves", run({"weight": bias / 2, "fp32": bias / 2} | moments, 0.5))
    return tmp_path / "halves"


@pytest.mark.parametrize("to", ["deepspeed", "universal"])
def test_a_conversion_goes_on_with_moments_and_settings_or_not_at_all(checkpoint, tmp_path, to):
    more = {"tp": 1, "dp": 1, "zero": 1} if to == "deepspeed" else {}

    with pytest.raises(UnsupportedError, match=r"lr \* \(2\) and eps / \(2\)"):
        convert(checkpoint, tmp_path / "refused", to=to, **more)
    report = convert(checkpoint, tmp_path / "out", to=to, optimizer_transform=True, **more)

    assert not (tmp_path / "refused").exists()
    assert "optimizer-transform" in {finding.kind for finding in report.findings}
    written = open_training(open_checkpoint(tmp_path / "out"))
    settings = [{key: group.settings[key] for key in ("lr", "eps")} for group in written.groups]
    assert settings == [{"lr": 0.01, "eps": 1e-8}, {"lr": 0.02, "eps": 5e-9}]
    # Every state is read in the coordinates of the full tensor, so both hold the same.
    assert diff(checkpoint, tmp_path / "out").verdict == "same"


def test_weights_alone_take_no_transform(checkpoint, tmp_path):
    with pytest.raises(UnsupportedError, match="safetensors takes no --optimizer-transform"):
        convert(checkpoint, tmp_path / "out", optimizer_transform=True)
