"""Write an output from end to end: take up what is there, the plan, the manifest, the name."""

from __future__ import annotations

from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Final

from msgspec.structs import asdict, replace

from restride.checkpoint.manifest import MANIFEST_NAME, spell_manifest
from restride.errors import (
    ExecutionError,
    ExistsError,
    FormatError,
    ReplicaError,
    RestrideError,
    StoppedError,
)
from restride.executors.blocks import BlockTable, block_nbytes
from restride.executors.drift import add_drift
from restride.executors.events import PlanStarted
from restride.executors.journaled import JournaledWriter
from restride.executors.leading import Host
from restride.executors.manifests import WrittenFiles, describe_files, fingerprints_of
from restride.executors.members import Ledger
from restride.executors.parts import Part, cut_parts
from restride.executors.resuming import noted_blocks, noted_drift, read_back
from restride.executors.stopping import StopsWith
from restride.executors.streaming import StreamingExecutor
from restride.executors.tasks import Task, plan_writing
from restride.formats.opening import open_catalog
from restride.frozen import Frozen
from restride.storage.companions import Team, journals_of, new_word
from restride.storage.journal import read_journal
from restride.storage.torch_zip import TorchFiles

if TYPE_CHECKING:
    from collections.abc import Sequence
    from threading import Event

    from restride.checkpoint.output import Output
    from restride.executors.drift import DriftTable
    from restride.executors.events import ReplicaDrift
    from restride.executors.leading import Lead
    from restride.executors.members import Member
    from restride.executors.progress import Continued
    from restride.executors.resuming import ReadBack
    from restride.executors.sources import CatalogReader
    from restride.planning.plan import Plan
    from restride.storage.joining import Joined
    from restride.storage.journal import Record
    from restride.storage.unfinished import Unfinished

__all__ = ["Task", "Written", "is_worth_resuming", "plan_writing", "write_output", "write_part"]

_ALL_DRIFT: Final = "all_drift"


class Written(Frozen):
    """What was done of an output.

    Attributes:
        read_nbytes: Bytes read from the sources.
        resumed_nbytes: Bytes of tensors that were there already.
        nbytes: Bytes of tensors that are there now.
    """

    read_nbytes: int
    resumed_nbytes: int
    nbytes: int


def write_output(
    task: Task,
    place: Unfinished,
    first: Record,
    reader: CatalogReader,
    table: DriftTable,
    progress: Continued,
    *,
    sync_nbytes: int,
    stop: Event | None = None,
    lead: Lead | None = None,
) -> Written:
    """Write what is not there yet, and publish the output with its manifest.

    Args:
        task: What to write.
        place: Where to.
        first: First record of the journal.
        reader: The sources.
        table: Observer of the run, and of what replicas drifted.
        progress: What `table` hands events to.
        sync_nbytes: Bytes after which they are made durable and noted.
        stop: When it is set, no further step is started.
        lead: Other processes that write a part of it.

    Returns:
        What was done, by all processes.

    Raises:
        StoppedError: `stop` was set before everything was written; nothing was published.
        ExecutionError: A file cannot be read or written, or a source changed.
        MissingProcessError: Another process is missing.
        ReplicaError: Replicas differ and the plan says to check.
    """
    if place.is_published:
        # An earlier run had done everything, but for cleaning up at the most.
        table.rows.update(_published_drift(place.records))
        return Written(0, task.plan.total_nbytes, task.plan.total_nbytes)
    writing = _Writing(task, place, first, reader, table, progress, sync_nbytes, StopsWith(stop))
    if lead is None:
        resumed, _ = writing.take_up()
        progress.start_from(resumed)
        read_nbytes = writing.write()
        told = None
    else:
        read_nbytes, resumed = writing.write_with_others(lead)
        told = {_ALL_DRIFT: [asdict(row) for row in table.rows.values()]}
    reader.require_unchanged()
    _add_manifest(place, task.output, writing.blocks, first)
    place.publish(told)
    return Written(read_nbytes, resumed, task.plan.total_nbytes)


def write_part(
    task: Task,
    joined: Joined,
    reader: CatalogReader,
    table: DriftTable,
    progress: Continued,
    *,
    sync_nbytes: int,
    stop: Event | None = None,
) -> Written:
    """Write the part of a process that another one leads, and note it.

    Args:
        task: What all processes write.
        joined: Which part, and where to.
        reader: The sources.
        table: Observer of the run, and of what replicas drifted in the part.
        progress: What `table` hands events to.
        sync_nbytes: Bytes after which they are made durable and noted.
        stop: When it is set, no further step is started.

    Returns:
        What was done of the part.

    Raises:
        StoppedError, ExecutionError, ReplicaError: As for `write_output`. Process 0 is told of it.
    """
    place = joined.place
    writing = _Writing(
        *(task, place, joined.head, reader, table, progress, sync_nbytes, StopsWith(stop))
    )
    try:
        resumed = writing.take_up_part(joined)
        progress.on_plan(PlanStarted(0, writing.part_nbytes, task.projected_nbytes))
        progress.start_from(resumed)
        read_nbytes = writing.write()
        reader.require_unchanged()
        last = {"word": joined.word, "read_nbytes": read_nbytes, "resumed_nbytes": resumed}
        place.note([{"finished": last}])
    except BaseException as error:
        with suppress(RestrideError):
            place.note([{"failed": {"word": joined.word, **_failure(error)}}])
        raise
    return Written(read_nbytes, resumed, writing.part_nbytes)


def is_worth_resuming(error: BaseException) -> bool:
    """Whether a run that ended so may get further when it is started again."""
    passing = ExecutionError, ExistsError, FormatError, StoppedError
    return isinstance(error, passing) or not isinstance(error, RestrideError)


class _Writing:
    """What the steps of writing an output, or a part of it, share."""

    def __init__(
        self,
        task: Task,
        place: Unfinished,
        first: Record,
        reader: CatalogReader,
        table: DriftTable,
        progress: Continued,
        sync_nbytes: int,
        stop: StopsWith,
    ) -> None:
        self.task = task
        self.place = place
        self.first = first
        self.reader = reader
        self.table = table
        self.progress = progress
        self.sync_nbytes = sync_nbytes
        self.stop = stop
        self.part: Part | None = None
        self.there: set[tuple[int, int]] = set()
        self.blocks = BlockTable(task.plan.regions, digest_rows=task.digest_rows)

    def take_up(self, lead: Lead | None = None) -> tuple[int, Team | None]:
        """Make the files, and find out what is there.

        Returns:
            How many bytes need not be written again; and the earlier processes, where the same
            number goes on with their parts.
        """
        place = self.place
        if not (place.is_resumed or lead):
            # Alone, names are durable soon enough when something is noted, and the first byte need
            # not wait for hundreds of files and folders.
            place.files.begin_creating(self.task.output)
        else:
            place.files.create(self.task.output, resume=place.is_resumed)
            place.files.sync_folders()  # somebody has noted what is in them, or will
        if not place.is_resumed:
            return 0, None
        found = place.team
        if found and lead and _may_go_on(found[1], lead, self.task.plan):
            resumed = self._go_on(*found)
            if resumed is not None:
                return resumed, found[1]
        with place.without_others() if found else nullcontext():
            others = journals_of(place.folder, found[1]) if found else ()
            back = self._read_back([place.records, *others])
            if found or not back.is_whole:
                place.begin([self.first, *back.records(self.blocks)], keeps=True)
        return self._take(back), None

    def _go_on(self, at: int, team: Team) -> int | None:
        """Take up what was before the team, and the part of this process; None after a damage."""
        place, records = self.place, self.place.records
        before = self._read_back([records[:at]])
        if not before.is_whole:
            return None
        own = self._read_back([records[at + 1 :]], Part(*team.cuts[:2]))
        if not own.is_whole:
            kept = records[: at + 1]
            place.begin([self.first, *kept, *own.records(self.blocks)], keeps=True)
        return self._take(before) + self._take(own)

    def take_up_part(self, joined: Joined) -> int:
        """Find out what is there of the part of this process."""
        place, regions = self.place, self.task.plan.regions
        self.part = Part(*joined.team.cuts[joined.number : joined.number + 2])
        place.files.adopt(self.task.output)
        for key, block in noted_blocks(joined.before, regions).items():
            if key in self.part:
                self.blocks.set_done(block)
        self.part.leave_others(self.blocks)
        back = self._read_back([place.records], self.part)
        if not back.is_whole:
            place.begin_part([joined.head, *back.records(self.blocks)], keeps=True)
        return self._take(back)

    @property
    def part_nbytes(self) -> int:
        """Bytes of the part."""
        regions = self.task.plan.regions
        places = self.part.blocks(regions) if self.part else ()
        return sum(block_nbytes(regions[region].nbytes, block) for region, block in places)

    def write(self) -> int:
        """Write what is left of the part; return how many bytes were read for it."""
        plan, blocks = self.task.plan, self.blocks
        lanes = blocks.lanes()
        if self.part is not None:
            lanes = self.part.clip(lanes, plan.regions)
        writer = JournaledWriter(
            *(self.place, self.task.output, blocks, self.table, self.reader.require_unchanged),
            sync_nbytes=self.sync_nbytes,
        )
        try:
            with writer:
                read_nbytes = StreamingExecutor().execute(
                    plan, self.reader, writer, self.table, lanes=lanes, stop=self.stop
                )
                is_whole = not blocks.left_nbytes()
                if is_whole:  # who stops does not wait for files that nobody is going to write to
                    self.place.files.finish_creating()
        except ReplicaError:
            # Replicas that are just being written to differ as well, and that is another story.
            self.reader.require_unchanged()
            raise
        finally:
            if self.place.files.cannot_be_created:
                # Nothing could be added to what is noted of the others.
                self.place.keeps = False
        if not is_whole:
            raise StoppedError("stopped")
        return read_nbytes

    def write_with_others(self, lead: Lead) -> tuple[int, int]:
        """Write the part of this process, and see to it that the others write theirs.

        Returns:
            Bytes read, and bytes that were there before, of all processes.
        """
        with Host(self.place, lead, self.progress, self.stop) as host:
            try:
                resumed, team = self.take_up(lead)
                self.progress.start_from(resumed)
                team = team or self._begin_team(lead)
                self.part = Part(*team.cuts[:2])
                self.part.leave_others(self.blocks, self.there)
                host.open(team, Ledger(self.blocks, self.there))
                read_nbytes = self._write_while(host)
                host.wait(self._read_back_of)
            except BaseException as error:
                if lead.start is not None or not is_worth_resuming(error):
                    host.dismiss()
                raise
        for member in host.members:
            for row in member.rows.values():
                add_drift(self.table.rows, row)
            read_nbytes += member.read_nbytes
            resumed += member.resumed_nbytes
        return read_nbytes, resumed

    def _begin_team(self, lead: Lead) -> Team:
        """Deal out what is left, and note who has what."""
        regions, is_led_only = self.task.plan.regions, lead.start is not None
        count = lead.count - is_led_only
        cuts = cut_parts(regions, lambda *block: block not in self.there, count)
        team = Team(new_word(), ((0, 0), *cuts) if is_led_only else cuts, is_led_only)
        self.place.note([team.record])
        return team

    def _write_while(self, host: Host) -> int:
        try:
            return self.write()
        except StoppedError:
            host.require_sound()  # if it was another process that made an end of it
            raise

    def _read_back_of(self, member: Member) -> ReadBack:
        records = read_journal(member.journal_path)[1:]
        return self._read_back([records], member.part, is_told=False)

    def _take(self, back: ReadBack) -> int:
        self.there.update((block.region, block.number) for block in back.blocks)
        return back.take(self.blocks, self.table)

    def _read_back(
        self,
        journals: Sequence[Sequence[Record]],
        part: Part | None = None,
        *,
        is_told: bool = True,
    ) -> ReadBack:
        def on_read(nbytes: int) -> None:
            if is_told:
                self.progress.skip(nbytes, "what is there already")
            if self.stop.is_set():
                raise StoppedError("stopped")

        return read_back(
            journals,
            self.place.files,
            self.task.output,
            self.task.plan.regions,
            part=part,
            workers=self.task.plan.workers,
            rows=self.task.digest_rows,
            on_read=on_read,
        )


def _may_go_on(team: Team, lead: Lead, plan: Plan) -> bool:
    """Whether the parts of an earlier team are those that the same number would have."""
    return (
        team.count == lead.count
        and team.is_led_only == (lead.start is not None)
        and (team.cuts[0], team.cuts[-1]) == ((0, 0), (len(plan.regions), 0))
    )


def _failure(error: BaseException) -> dict[str, object]:
    """What process 0 is told of an error."""
    told: dict[str, object] = {"text": str(error) or type(error).__name__}
    if isinstance(error, RestrideError):
        told |= {"problem": error.problem, "where": error.where, "remedy": error.remedy}
    return {**told, "is_final": not is_worth_resuming(error)}


def _published_drift(
    records: Sequence[Record],
) -> dict[tuple[str, str, tuple[int, int]], ReplicaDrift]:
    """Replicas that differ, as the journal of a finished output says: of all processes together."""
    found = records[-1].get(_ALL_DRIFT) if records else None
    if isinstance(found, list):
        records = [{"drift": row} for row in found]
    return noted_drift([records])


def _add_manifest(place: Unfinished, output: Output, blocks: BlockTable, first: Record) -> None:
    """Write the manifest among the files; fingerprints are under the names that a reader finds."""
    files = WrittenFiles(output, blocks)
    manifest = describe_files(files, first)
    # Most files have the header of another one, as it was written, and are not read for it again.
    # Of one that is copied from a source no byte is known.
    root = place.files.path
    headers = {
        f"{root}/{file.name}": (file.label, (file.nbytes, file.literals))
        for file in output.files
        if file.literals
    }
    try:
        catalog = open_catalog(root, TorchFiles(headers))
    except RestrideError:
        pass  # it is a form that is written but not read
    else:
        manifest = replace(manifest, tensors=fingerprints_of(catalog, files))
    place.files.preallocate(MANIFEST_NAME, 0, resume=True)
    at = 0
    for content in spell_manifest(manifest):
        place.files.write_exact(MANIFEST_NAME, at, content)
        at += len(content)
