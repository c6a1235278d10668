"""What a conversion takes besides plan and buffers is counted, and is near what it really takes."""

from __future__ import annotations

import gc
import shutil
import threading
import tracemalloc

import pytest
from msgspec.structs import replace

from restride import api
from restride.arrays.fingerprint import scratch_nbytes
from restride.checkpoint.output import Output, OutputFile
from restride.errors import BudgetError, StoppedError
from restride.executors import blocks, tasks, writing
from restride.executors.events import NullObserver
from restride.executors.footprint import (
    catalog_nbytes,
    finishing_nbytes,
    opening_nbytes,
    output_nbytes,
    resuming_nbytes,
)
from restride.exports import Wanted, lay_out_export
from restride.preparation import prepare
from restride.storage.ranges import FilePool
from restride.testing.command_line import SAMPLE

RANKS = 16
MANY = {"to": "deepspeed", "tp": 1, "dp": RANKS, "zero": 3, "workers": 1, "durable": False}
WAYS = [
    Wanted("safetensors", states="all"),
    Wanted("universal"),
    Wanted("deepspeed", tp=1, dp=RANKS, zero=3),
]
# Bounds that are too high refuse what would do.
MOST = 4


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """A checkpoint of ZeRO-3 in 32 files."""
    return api.convert(SAMPLE, tmp_path_factory.mktemp("many") / "checkpoint", **MANY).out


def traced(make):
    """What is made, the memory that it takes, and the most that making it took."""
    make()  # what is imported and cached on the way is the program's
    gc.collect()
    tracemalloc.start()
    try:
        made = make()
        _, most = tracemalloc.get_traced_memory()
        gc.collect()
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return made, kept, most


def test_a_catalog_takes_what_it_is_said_to_take(many):
    for source in (SAMPLE, many):
        catalog, kept, most = traced(lambda source=source: api.open(source))

        # What is no tensor is as large as the files of the user make it.
        assert kept <= catalog_nbytes(catalog) + 60_000
        assert catalog_nbytes(catalog) <= MOST * kept
        assert most <= opening_nbytes(catalog) + 100_000
        assert opening_nbytes(catalog) <= MOST * most


def test_a_budget_that_opening_has_passed_is_refused_with_one_that_is_enough(
    many, monkeypatch, tmp_path
):
    monkeypatch.setattr(tasks, "opening_nbytes", lambda _: 1 << 30)
    options = many, tmp_path / "out", WAYS[0]
    for budget in (1, 1 << 29, (1 << 30) - 1):
        with pytest.raises(BudgetError) as refused:
            api.dry_run(*options, budget_nbytes=budget)

        assert refused.value.needed_nbytes == 1 << 30
    assert api.dry_run(*options, budget_nbytes=1 << 30).projected_nbytes == 1 << 30


def test_a_budget_that_is_too_small_for_any_rows_of_digests_is_refused_by_one_plan(
    many, monkeypatch, tmp_path
):
    budgets = []
    plan = tasks.plan_conversion

    def counted(jobs, *, budget_nbytes, workers):
        budgets.append(budget_nbytes)
        return plan(jobs, budget_nbytes=budget_nbytes, workers=workers)

    monkeypatch.setattr(tasks, "plan_conversion", counted)
    monkeypatch.setattr(tasks, "digest_rows", lambda *_: 128)
    with pytest.raises(BudgetError) as refused:
        api.dry_run(many, tmp_path / "out", WAYS[2], budget_nbytes=1 << 18)

    assert len(budgets) == 1
    enough = refused.value.needed_nbytes
    assert api.dry_run(many, tmp_path / "out", WAYS[2], budget_nbytes=enough)


@pytest.mark.parametrize("wanted", WAYS, ids=lambda wanted: wanted.to)
def test_the_description_of_an_output_takes_what_it_is_said_to_take(many, wanted):
    for source in (SAMPLE, many):
        catalog = api.open(source)
        export, kept, _ = traced(lambda catalog=catalog: lay_out_export(catalog, wanted))

        assert kept <= output_nbytes(export.output)
        assert output_nbytes(export.output) <= MOST * kept


@pytest.fixture
def measured(monkeypatch):
    """Names of functions of `writing` to the most that a call of them took, beside what it had."""
    found = {}

    def measure(name):
        function = getattr(writing, name)

        def measuring(*arguments, **options):
            gc.collect()
            before, _ = tracemalloc.get_traced_memory()
            tracemalloc.reset_peak()
            result = function(*arguments, **options)
            found[name] = tracemalloc.get_traced_memory()[1] - before
            return result

        monkeypatch.setattr(writing, name, measuring)

    for name in ("_add_manifest", "read_back"):
        measure(name)
    return found


def planned(source, wanted):
    """What is to be written, and the numbers of regions and blocks in its files."""
    with FilePool() as pool:
        task = prepare(source, wanted, pool, workers=1).task
    counts = [0] * len(task.output.files)
    for region in task.plan.regions:
        counts[region.target_file] += 1
    return task, {"region_counts": counts, "block_counts": counts}


def resuming(sizes):
    return resuming_nbytes(
        region_count=sum(sizes["region_counts"]), block_count=sum(sizes["block_counts"])
    )


@pytest.mark.parametrize("wanted", WAYS, ids=lambda wanted: wanted.to)
def test_a_manifest_takes_what_it_is_said_to_take(many, tmp_path, measured, wanted):
    options = {"to": wanted.to, "states": wanted.states, "workers": 1, "durable": False}
    options |= {"tp": wanted.tp, "dp": wanted.dp, "zero": wanted.zero, "force": True}
    for source in (SAMPLE, many):
        traced(lambda source=source: api.convert(source, tmp_path / "out", **options))
        task, sizes = planned(source, wanted)

        bound = finishing_nbytes(task.output, **sizes)

        assert measured["_add_manifest"] <= bound <= MOST * measured["_add_manifest"]


class Stops(NullObserver):
    """Asks to stop when so many steps are done."""

    def __init__(self, steps):
        self.stop, self.left = threading.Event(), steps

    def on_step(self, _event, /):
        self.left -= 1
        if not self.left:
            self.stop.set()


def test_records_of_an_earlier_run_take_what_they_are_said_to_take(tmp_path, measured):
    out = tmp_path / "out"

    def resumed():
        observer = Stops(500)
        with pytest.raises(StoppedError):
            api.convert(SAMPLE, out, observer=observer, stop=observer.stop, **MANY)
        report = api.convert(SAMPLE, out, resume=True, **MANY)
        shutil.rmtree(out)
        return report

    report, _, _ = traced(resumed)

    assert report.resumed_nbytes > 1000
    task, sizes = planned(SAMPLE, WAYS[2])
    kept, read_back = resuming(sizes)
    assert task.passing_nbytes >= finishing_nbytes(task.output, **sizes)
    assert measured["read_back"] <= kept + read_back + 2 * task.digest_nbytes


@pytest.mark.parametrize("resume", [False, True], ids=["anew", "resumed"])
@pytest.mark.parametrize("wanted", WAYS, ids=lambda wanted: wanted.to)
def test_the_budget_that_a_refusal_names_is_enough(many, tmp_path, wanted, resume):
    for source in (SAMPLE, many):

        def projected(budget, source=source):
            return api.dry_run(
                *(source, tmp_path / "out", wanted), budget_nbytes=budget, resume=resume, workers=12
            )

        with pytest.raises(BudgetError) as refused:
            projected(1)
        needed = refused.value.needed_nbytes

        assert projected(needed).projected_nbytes <= needed
        with pytest.raises(BudgetError) as again:
            projected(needed - 20_000)
        assert again.value.needed_nbytes <= needed


def test_who_may_meet_records_has_room_for_them(many, tmp_path):
    anew, resumed = (
        api.dry_run(many, tmp_path / "out", WAYS[2], resume=resume, workers=1).projected_nbytes
        for resume in (False, True)
    )
    _, sizes = planned(many, WAYS[2])

    assert resumed - anew == resuming(sizes)[0]


def test_reading_records_back_counts_where_it_takes_more_than_the_manifest(monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK_NBYTES", 16)
    with FilePool() as pool:
        anew, resumed = (
            prepare(SAMPLE, WAYS[0], pool, workers=3, has_records=has_records).task
            for has_records in (False, True)
        )
    regions = [r for tensor in resumed.output.tensors for r in tensor.regions if r is not None]
    block_count = sum(blocks.block_count(region.nbytes) for region in resumed.plan.regions)

    kept, read_back = resuming_nbytes(region_count=len(regions), block_count=block_count)

    assert resumed.kept_nbytes - anew.kept_nbytes == kept
    assert resumed.passing_nbytes == read_back + 2 * resumed.digest_nbytes > anew.passing_nbytes


def test_larger_digests_are_not_taken_where_there_is_no_room_for_them(monkeypatch, tmp_path):
    """Of many blocks it is the records that take most, and what looks at them besides."""
    monkeypatch.setattr(blocks, "BLOCK_NBYTES", 16)

    def projected(budget):
        return api.dry_run(
            SAMPLE, tmp_path / "out", WAYS[0], budget_nbytes=budget, resume=True, workers=1
        )

    with pytest.raises(BudgetError) as refused:
        projected(1)
    needed = refused.value.needed_nbytes

    assert projected(needed).projected_nbytes <= needed


def test_what_a_manifest_takes_goes_by_the_largest_file_and_not_by_all():
    files = tuple(OutputFile(f"f{number}", 10) for number in range(100))

    def counted(regions):
        return finishing_nbytes(Output(files), region_counts=regions, block_counts=regions)

    assert counted([50] * 100) < counted([50] * 99 + [5000]) / 2


def test_a_budget_with_room_for_no_more_than_one_row_of_digests_is_enough(monkeypatch, tmp_path):
    monkeypatch.setattr(tasks, "digest_rows", lambda *_: 128)

    def projected(budget):
        return api.dry_run(
            SAMPLE, tmp_path / "out", WAYS[0], budget_nbytes=budget, workers=12
        ).projected_nbytes

    with pytest.raises(BudgetError) as refused:
        projected(1)

    assert projected(refused.value.needed_nbytes) <= refused.value.needed_nbytes


def test_what_is_held_at_one_time_adds_up_and_what_is_not_does_not():
    with FilePool() as pool:
        task = prepare(SAMPLE, WAYS[0], pool, workers=3).task
    plan = task.plan
    held = task.kept_nbytes + plan.objects_nbytes - plan.steps_nbytes
    buffers = plan.projected_nbytes - plan.objects_nbytes + plan.steps_nbytes

    def projected(**sizes):
        return replace(task, passing_nbytes=0, opening_nbytes=0, **sizes).projected_nbytes

    assert task.kept_nbytes >= catalog_nbytes(api.open(SAMPLE)) + output_nbytes(task.output)
    assert task.digest_nbytes == 3 * scratch_nbytes(task.digest_rows)
    assert projected(digest_nbytes=1000) == held + buffers + 1000
    assert replace(task, passing_nbytes=1 << 40).projected_nbytes == held + (1 << 40)
    assert replace(task, opening_nbytes=1 << 40).projected_nbytes == 1 << 40
