"""Layers of experts on different numbers of ranks: read in any order, and written in one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from restride import api
from restride.checkpoint.training import ParameterGroup
from restride.errors import UnsupportedError
from restride.formats.deepspeed import _hash_order as hash_order
from restride.formats.deepspeed import read_catalog
from restride.formats.deepspeed._experts.native_groups import ExpertOrder
from restride.testing.gather import gather_all

RECORDED = Path(__file__).parents[2] / "data" / "deepspeed_native_moe"
SERVER = Path(__file__).parents[3] / "scripts" / "deepspeed_jobs.py"
NAMES = ["several_z0", "several_z1"]
RULES = """
format = "restride-rules/1"
rest = "whole"
[[rules]]
match = "**.deepspeed_experts.*.up.{{weight,bias}}"
layout = "{layout}"
"""


def same_states(a: Path, b: Path) -> bool:
    ours, theirs = gather_all(api.open(a)), gather_all(api.open(b))
    return ours.keys() == theirs.keys() and all(
        np.array_equal(ours[key], theirs[key]) for key in ours
    )


@pytest.fixture
def fixed_hashes(monkeypatch) -> None:
    """As in a process that was started with ``PYTHONHASHSEED=0``, whatever its order is then."""
    flags = SimpleNamespace(hash_randomization=0)
    monkeypatch.setattr(hash_order, "sys", SimpleNamespace(flags=flags))
    monkeypatch.setattr(hash_order, "_set_of", lambda names: sorted(names, reverse=True))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("dp", "ep", "zero"), [(2, 2, 1), (3, 1, 0), (1, 1, 2)])
def test_all_layers_come_to_one_number_of_ranks(name, dp, ep, zero, tmp_path):
    report = api.convert(RECORDED / name, tmp_path / "out", to="deepspeed", dp=dp, ep=ep, zero=zero)

    assert same_states(RECORDED / name, tmp_path / "out")
    (note,) = (f for f in report.findings if f.kind == "config-ep")
    assert f"ep_size=2 or 4: resume with a model whose layers have ep_size={ep}" in note.message
    groups = read_catalog(tmp_path / "out").values["optimizer"]["param_groups"]
    assert [group["name"] for group in groups] == [
        *("matrices", "vectors", f"ep_size_{ep}", f"ep_size_{ep}")
    ]


@pytest.mark.parametrize("name", NAMES)
def test_other_formats_have_all_experts(name, tmp_path):
    api.convert(RECORDED / name, tmp_path / "folder", to="universal")
    api.convert(RECORDED / name, tmp_path / "tensors", states="all")

    for folder in ("folder", "tensors"):
        found = gather_all(api.open(tmp_path / folder))
        expected = gather_all(read_catalog(RECORDED / name))
        assert all(np.array_equal(found[key], expected[key]) for key in found)
        assert {key for key in expected if key.endswith("/fp32")} <= found.keys()


@pytest.mark.parametrize("name", NAMES)
def test_layers_that_keep_their_ranks_are_asked_for_the_hashes_of_the_next_run(name, tmp_path):
    with pytest.raises(UnsupportedError) as caught:
        api.convert(RECORDED / name, tmp_path / "out", to="deepspeed")

    assert "ep_size_2, ep_size_4" in str(caught.value)
    assert "run this with PYTHONHASHSEED=0, and the training that resumes" in str(caught.value)
    assert "or choose one --ep for all layers" in str(caught.value)


@pytest.mark.usefixtures("fixed_hashes")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("dp", "zero"), [(4, 1), (8, 2), (4, 0)])
def test_layers_keep_their_ranks_where_the_order_is_known(name, dp, zero, tmp_path):
    report = api.convert(RECORDED / name, tmp_path / "out", to="deepspeed", dp=dp, zero=zero)

    assert same_states(RECORDED / name, tmp_path / "out")
    (warning,) = (f for f in report.findings if f.kind == "hash-seed")
    assert warning.severity == "warning"
    assert "in the order ep_size_4, ep_size_2, which" in warning.message
    groups = read_catalog(tmp_path / "out").values["optimizer"]["param_groups"]
    assert [group["name"] for group in groups] == [
        *("matrices", "vectors", "ep_size_4", "ep_size_2", "ep_size_4", "ep_size_2")
    ]


@pytest.mark.usefixtures("fixed_hashes")
@pytest.mark.parametrize(("layout", "ranks"), [("column", "ep=4,tp=2"), ("whole", "ep=4")])
def test_they_keep_them_beside_tensor_parallel_ranks(layout, ranks, tmp_path):
    """Whole experts on two and on four of eight ranks, and experts that two ranks cut."""
    (tmp_path / "rules.toml").write_text(RULES.format(layout=layout), "utf-8")
    source, out = RECORDED / "several_z1", tmp_path / "out"

    api.convert(source, out, to="deepspeed", tp=2, dp=4, rules=tmp_path / "rules.toml")

    assert same_states(source, out)
    layouts = {tensor.name: str(tensor.layout.mesh) for tensor in read_catalog(out).tensors}
    expert = "moe.deepspeed_moe.experts.deepspeed_experts.1.up.weight"
    assert layouts[f"layers.1.{expert}"] == ranks
    assert layouts[f"layers.0.{expert}"] == ranks.replace("4", "2")


def test_processes_that_are_started_so_have_the_order_that_is_written():
    """Of many numbers of ranks at once."""
    names = [f"ep_size_{size}" for size in (1, 2, 4, 8)]
    code = (
        "from restride.formats.deepspeed._hash_order import set_order\n"
        f"print(*set_order({names}, ''))\n"
        f"print(*set({names}))\n"
    )

    said = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": "0"},
        capture_output=True,
        text=True,
        check=False,
    )

    # Or it depends on which comes first into the set, and is refused.
    lines = said.stdout.splitlines()
    assert (lines and lines[0] == lines[1]) or "which DeepSpeed comes upon first" in said.stderr


@pytest.mark.usefixtures("fixed_hashes")
def test_an_order_that_depends_on_what_comes_first_is_refused(monkeypatch):
    monkeypatch.setattr(hash_order, "_set_of", list)

    with pytest.raises(UnsupportedError, match="depends on which DeepSpeed comes upon first"):
        hash_order.set_order(["ep_size_1", "ep_size_2"], "here")
    assert hash_order.set_order(["ep_size_1"], "here") == ("ep_size_1",)


# Which groups the script gave as one.

LAYERS = ["a", "b"]


def named(layer: str, number: int, rest: str = "up") -> str:
    return f"{layer}.deepspeed_moe.experts.deepspeed_experts.{number}.{rest}"


def group(names: list[str], size: int | None, **settings: float) -> ParameterGroup:
    said = {"name": "dense"} if size is None else {"name": f"ep_size_{size}", "moe": True}
    return ParameterGroup(tuple(names), {**settings, **said}, {})


def order() -> ExpertOrder:
    """A layer of two experts on two ranks and one on one come to one rank."""
    prefixes = [named(layer, 0)[: -len(".0.up")] for layer in LAYERS]
    names = frozenset(
        named(layer, n, rest) for layer in LAYERS for n in range(2) for rest in ("up", "down")
    )
    counts = dict.fromkeys(prefixes, 2)
    ranks = dict(zip(prefixes, (2, 1), strict=True))
    return ExpertOrder(counts, names, ranks, dict.fromkeys(prefixes, 1), [1])


def retold(*groups: ParameterGroup) -> list[tuple[str, ...]]:
    sizes = dict.fromkeys(order().names, 1)
    return [own.names for own in order().retold(groups, sizes, [sizes])]


def both(layer: str, *rests: str) -> list[str]:
    return [named(layer, n, rest) for n in range(2) for rest in rests]


def test_layers_of_other_numbers_of_ranks_come_between_each_other_in_the_order_of_the_model():
    """A set had the second layer first."""
    assert retold(
        group(["x"], None), group(both("b", "up", "down"), 1), group(both("a", "up", "down"), 2)
    ) == [("x",), (*both("a", "up", "down"), *both("b", "up", "down"))]


def test_groups_of_a_script_are_told_by_their_settings_or_by_their_number():
    ups = [group(both("a", "up"), 2), group(both("b", "up"), 1)]
    downs = [group(both("a", "down"), 2), group(both("b", "down"), 1)]
    expected = [("x",), ("y",), (*both("a", "up"), *both("b", "up"))]
    expected.append((*both("a", "down"), *both("b", "down")))

    assert retold(group(["x"], None), group(["y"], None), *ups, *downs) == expected
    settings = [dict(own.settings) | {"lr": 2.0} for own in downs]
    downs = [ParameterGroup(d.names, s, {}) for d, s in zip(downs, settings, strict=True)]
    assert retold(group(["x"], None), group(["y"], None, lr=2.0), *ups, *downs) == expected


def test_groups_of_which_nothing_says_that_they_were_one_are_refused():
    """Two with the same settings: one may have had experts on two ranks alone."""
    with pytest.raises(UnsupportedError, match="nothing says which of them the script gave as one"):
        retold(
            group(["x"], None),
            group(["y"], None),
            group(both("a", "up"), 2),
            group(both("b", "up"), 1),
        )


def test_experts_in_another_order_than_the_layers_are_not_put_between_others():
    order_of_layers = [named("b", 0), named("b", 1), named("a", 0), named("a", 1)]
    counts = {named(layer, 0)[: -len(".0.up")]: 2 for layer in ("a", "b", "c")}
    names = frozenset(named(layer, n) for layer in ("a", "b", "c") for n in range(2))
    ranks = dict(zip(counts, (1, 1, 2), strict=True))
    order = ExpertOrder(counts, names, ranks, dict.fromkeys(counts, 1), [1])
    groups = [group(order_of_layers, 1), group([named("c", 0), named("c", 1)], 2)]

    with pytest.raises(UnsupportedError, match="in the order of the layers"):
        order.retold(groups, dict.fromkeys(names, 1), [dict.fromkeys(names, 1)])


@pytest.mark.interop
@settings(max_examples=40)
@given(st.data())
def test_groups_are_those_that_deepspeed_makes_of_what_a_script_gives(data):
    """Layers of four experts on one, two or four ranks come to others, in one or two groups."""
    torch = pytest.importorskip("torch")
    split = pytest.importorskip("deepspeed.moe.utils")
    count = data.draw(st.integers(1, 4), label="layers")
    prefixes = [f"l{n}.deepspeed_moe.experts.deepspeed_experts" for n in range(count)]
    ranks = st.lists(st.sampled_from([1, 2, 4]), min_size=count, max_size=count)
    before, after = (dict(zip(prefixes, data.draw(ranks), strict=True)) for _ in "ab")
    numels = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=2), label="numels")
    group_of = [data.draw(st.integers(0, 1)) for _ in numels]
    most = data.draw(st.integers(3, 40), label="most")

    def made(ranks_of: dict[str, int], rank: int) -> list[tuple[str, int, list[str]]]:
        """The groups of a rank: what DeepSpeed calls each, its setting, and its members."""
        names: dict[int, str] = {}
        given = [{"params": [], "name": f"g{n}", "lr": float(n)} for n in range(2)]
        for own in given:
            own["params"].append(torch.nn.Parameter(torch.zeros(1)))
        for prefix in prefixes:
            held = 4 // ranks_of[prefix]
            first = rank % ranks_of[prefix] * held
            for number in range(first, first + held):
                for place, numel in enumerate(numels):
                    param = torch.nn.Parameter(torch.zeros(numel))
                    param.allreduce, param.group_name = False, f"ep_size_{ranks_of[prefix]}"
                    names[id(param)] = f"{prefix}.{number}.p{place}"
                    given[group_of[place]]["params"].append(param)
        parts = split.split_params_into_different_moe_groups_for_optimizer(given, most)
        return [
            (own["name"], own["lr"], [names[id(param)] for param in own["params"]])
            for own in parts
            if own.get("moe") and own["params"]
        ]

    order = ExpertOrder(
        dict.fromkeys(prefixes, 4),
        frozenset(f"{p}.{n}.p{k}" for p in prefixes for n in range(4) for k in range(len(numels))),
        before,
        after,
        list(dict.fromkeys(int(name.split("_")[-1]) for name, _, _ in made(after, 0))),
    )
    dense = [group([f"x{n}"], None, lr=float(n)) for n in range(2)]
    experts = [
        group(list(order.everywhere(names, before)), int(name.split("_")[-1]), lr=lr)
        for name, lr, names in made(before, 0)
    ]
    sizes = {name: numels[int(name[-1])] for name in order.names}

    found = order.retold([*dense, *experts], sizes, [sizes], most=most)[2:]

    for rank in range(4):
        own = [
            (
                str(g.settings["name"]),
                g.settings["lr"],
                [n for n in g.names if here(n, after, rank)],
            )
            for g in found
        ]
        assert own == made(after, rank)


def here(name: str, ranks: dict[str, int], rank: int) -> bool:
    """Whether a rank has an expert of a layer of four."""
    prefix, number, _ = name.rsplit(".", 2)
    return int(number) // (4 // ranks[prefix]) == rank % ranks[prefix]


# The real engine.


@pytest.mark.interop
@pytest.mark.thorough
def test_training_goes_on_bit_for_bit_with_all_layers_on_one_number_of_ranks(
    engine, require_saved_again, tmp_path: Path
) -> None:
    model = {"model": "native_moe", "dtype": "fp32"}
    job = {**model, "world": 4, "ep": [2, 4], "zero": 1}
    never_stopped = engine(**job, steps=1, save=tmp_path / "source", more=1)

    api.convert(tmp_path / "source", tmp_path / "out", to="deepspeed", dp=2, ep=2, zero=2)

    job = {**model, "world": 2, "ep": 2, "zero": 2, "skip": 1, "steps": 1}
    later = engine(**job, load=tmp_path / "out", resave=tmp_path / "again")
    assert [*never_stopped[:1], *later] == never_stopped
    require_saved_again(tmp_path / "out", tmp_path / "again")


@pytest.mark.interop
@pytest.mark.thorough
def test_training_goes_on_bit_for_bit_where_all_processes_hash_alike(
    require_saved_again, tmp_path: Path
) -> None:
    """The engine and the conversion are started with the same hashes."""
    pytest.importorskip("deepspeed")
    env = {**os.environ, "PYTHONHASHSEED": "0"}
    server = subprocess.Popen(
        [sys.executable, SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=env,
    )

    def engine(**job: object) -> list[str]:
        print(json.dumps(job, default=str), file=server.stdin, flush=True)
        answer = json.loads(server.stdout.readline())
        assert answer["ok"], answer["error"]
        return answer["losses"]

    job = {"model": "native_moe", "dtype": "fp32", "ep": [2, 4], "world": 4}
    with server:
        never_stopped = engine(**job, zero=1, steps=1, save=tmp_path / "source", more=2)
        losses = never_stopped[:1]
        for number, zero in enumerate((2, 0), 1):
            out, again = tmp_path / f"out {zero}", tmp_path / f"again {zero}"
            command = [sys.executable, "-m", "restride", "convert", tmp_path / "source", out]
            options = ["--to", "deepspeed", "--zero", str(zero)]
            subprocess.run([*command, *options], env=env, capture_output=True, check=True)
            later = tmp_path / f"later {zero}"
            losses += engine(
                **job, zero=zero, skip=number, steps=1, load=out, resave=again, save=later
            )
            require_saved_again(out, again)
            (tmp_path / "source").rename(tmp_path / f"source {zero}")
            later.rename(tmp_path / "source")
        server.stdin.close()

    assert losses == never_stopped
