"""Every tensor of a checkpoint as a catalog entry: parameters, experts, frozen ones, buffers."""

from __future__ import annotations

from itertools import chain
from math import prod
from typing import TYPE_CHECKING, Final

from restride.algebra.mesh import Mesh
from restride.checkpoint.catalog import Finding, StateEntry, TensorEntry
from restride.errors import CorruptError, UnsupportedError
from restride.formats.deepspeed._chunks import frozen_chunks
from restride.formats.deepspeed._experts.autoep import ExpertParameter, second_routers
from restride.formats.deepspeed._experts.native import NativeExpert, in_model_order
from restride.formats.deepspeed._experts.ranks import ExpertRanks
from restride.formats.deepspeed._model import configured_dtype
from restride.formats.deepspeed._placement import Placement
from restride.formats.deepspeed._states import (
    FlatLayouts,
    flat_states,
    group_states,
    replicas_of,
    stored_state,
    whole_states,
)
from restride.layouts.fused_names import find_wrong_cut
from restride.layouts.gathered import experts as experts_layout
from restride.layouts.lifting import repeated
from restride.layouts.replicated import replicated

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from restride.algebra.layout import Layout, Shape
    from restride.checkpoint.dtypes import DType
    from restride.checkpoint.values import StoredTensor
    from restride.formats.deepspeed._experts.files import Expert, ExpertFiles
    from restride.formats.deepspeed._model import ModelFile
    from restride.formats.deepspeed._partitions import FlatCut, Partitions
    from restride.formats.deepspeed._run import Run
    from restride.formats.deepspeed._whole.states import Whole
    from restride.formats.deepspeed.told_cut import ToldCut

__all__ = ["read_tensors"]

_MOST_NAMED: Final = 5
# What a module of PyTorch keeps beside its tensors.
_EXTRA_STATE: Final = "_extra_state']"


def read_tensors(
    run: Run,
    experts: Mapping[str, Expert],
    expert_files: ExpertFiles,
    partitions: Partitions,
    whole: Whole | None = None,
    told: ToldCut | None = None,
) -> Iterator[TensorEntry]:
    """Yield the tensors of a checkpoint in the order of the model.

    Args:
        run: The files. Findings are added to it.
        experts: Tensors of experts by name.
        expert_files: Their weights.
        partitions: What the optimizer files hold.
        whole: What the model files hold of the optimizer, without ZeRO.
        told: What a user tells of the cut of parameters of which the files say nothing.

    Raises:
        CorruptError: Files contradict each other.
        UnsupportedError: Nothing says how a parameter is cut.
        RuleError: What is told of a parameter makes no such shards.
    """
    yield from _Reader(run, experts, expert_files, partitions, whole, told).read()


class _Reader:
    def __init__(
        self,
        run: Run,
        experts: Mapping[str, Expert],
        expert_files: ExpertFiles,
        partitions: Partitions,
        whole: Whole | None,
        told: ToldCut | None,
    ) -> None:
        self._run = run
        self._experts = experts
        self._expert_files = expert_files
        self._partitions = partitions
        self._whole = whole
        self._tp_mesh = Mesh((("tp", run.tp_size),))
        self._told = told
        self._flat_layouts = FlatLayouts(run.mesh)
        self._placements = _placements(run, self._tp_mesh, told)
        self._ranks = ExpertRanks(run, experts)
        self._trained = dict.fromkeys(
            name
            for model in run.models
            for group in model.param_shapes or ()
            for name in self._ranks.full_names(group)
        )
        self._frozen = {
            name for model in run.models for name in self._ranks.full_names(model.frozen)
        }
        if whole is not None:
            self._trained |= dict.fromkeys(whole.trained)
            self._frozen |= whole.frozen
        self._buffers = run.models[0].buffer_names
        self._has_optimizer = bool(run.zeros) or (whole is not None and whole.problem is None)
        self._apart: dict[str, str] = {}
        self._aliases = self._find_aliases()
        self._scalars: dict[tuple[tuple[int, int], ...], dict[str, StateEntry]] = {}

    def read(self) -> Iterator[TensorEntry]:
        """Yield the tensors, each once and under its first name."""
        first = self._run.models[0]
        self._tell_of_values()
        experts: Mapping[str, Expert] = {} if self._run.is_partitioned else self._experts
        names = [*first.dtypes, *first.weights, *self._trained, *experts]
        natives = [name for name, own in experts.items() if isinstance(own, NativeExpert)]
        for name in in_model_order(names, natives) if natives else dict.fromkeys(names):
            expert = self._experts.get(name)
            if isinstance(expert, NativeExpert):
                yield self._native(expert)
            elif expert is not None:
                yield self._expert(expert)
            elif name in self._buffers:
                yield self._buffer(name)
            elif name in self._aliases:
                continue
            elif self._run.is_partitioned and self._shard_shape(first, name) is None:
                self._tell_of_nothing(name)
            else:
                yield self._parameter(name)

    def _tell_of_values(self) -> None:
        """Tell of entries of the module that are no tensors, but for those that never are."""
        for model in self._run.models:
            for entry in model.extras:
                if not entry.where.endswith(_EXTRA_STATE):
                    message = f"{entry.where} is no tensor: it is carried as a value"
                    self._run.findings.append(Finding("warning", "no-tensor", message, model.name))

    def _tell_of_nothing(self, name: str) -> None:
        """Tell of a name that ZeRO-3 stores nothing of. AutoEP names the router's weights twice."""
        for expert in self._experts.values():
            layer = expert.name.rsplit(".", 2)[0]
            rest = name.removeprefix(f"{layer}.").partition(".")[2]
            router = f"{layer}.router.{rest}"
            if name.startswith(f"{layer}.") and router in {*self._trained, *self._frozen}:
                message = f"tensor {name!r} is a second name of {router!r}, and stored under that"
                self._run.findings.append(
                    Finding("note", "second-name", message, f"tensor {name!r}")
                )
                return
        self._warn("no-weight", f"tensor {name!r} is named in the module, and no file has it", name)

    def _parameter(self, name: str) -> TensorEntry:
        run, where = self._run, f"tensor {name!r}"
        layout = self._layout(name)
        states: dict[str, StateEntry] = {}
        if all(name in model.weights for model in run.models):
            shards = [model.weights[name] for model in run.models]
            states["weight"] = self._stored_weight(name, layout, shards)
        elif run.is_partitioned and self._is_frozen(name):
            cut = frozen_chunks(run, name)
            if cut.is_whole and cut.holdings:
                states = flat_states(layout, cut, self._flat_layouts, run.files, where)
            self._tell_lost_chunks(name, cut)
            trained = self._trained_dtype(name)
            if not layout.full_numel and trained is not None:
                # No rank has a chunk of nothing, and all of it is there.
                states["weight"] = StateEntry(trained, layout, (None,) * layout.rank_count)
        states |= self._optimizer_states(name, layout)
        is_elsewhere = name in run.elsewhere or (run.is_partitioned and "fp32" in states)
        if "weight" not in states and not is_elsewhere:
            self._warn("no-weight", f"{where} is in no model file", name)
        is_known = name in self._trained or name in self._frozen or not self._has_optimizer
        is_untracked = not is_known and layout.full_numel > 0
        if is_untracked:
            message = (
                f"{where} is unknown to the optimizer: it is frozen, or stored a second time "
                "under another name"
            )
            run.findings.append(Finding("note", "untracked", message, where))
        wrong = find_wrong_cut(name, layout)
        if wrong is not None:
            only = f"its weights are right on {layout.rank_count} ranks that are cut this way only"
            self._warn("fused-cut", f"{where}: {wrong}; {only}", name)
        if self._placements[0].is_averaged(name):
            message = f"{where}: ranks hold copies that drift, DeepSpeed averages them on resume"
            run.findings.append(Finding("note", "averaged", message, where))
        return TensorEntry(
            name,
            "parameter",
            layout,
            states,
            is_frozen=layout.full_numel > 0 and (is_untracked or self._is_frozen(name)),
            aliases=tuple(alias for alias, target in self._aliases.items() if target == name),
            trained_dtype=self._trained_dtype(name),
        )

    def _stored_weight(
        self, name: str, layout: Layout, shards: Sequence[StoredTensor]
    ) -> StateEntry:
        """A weight, and the copies of it that other layers of the stage are tied to."""
        run, where = self._run, f"tensor {name!r}"
        weights = [shards, *run.copies.get(name, ())]
        entries = [stored_state(layout, weight, run.files, where) for weight in weights]
        return replicas_of(dict(enumerate(entries)), Mesh((("layer", len(entries)),)), where)

    def _tell_lost_chunks(self, name: str, cut: FlatCut) -> None:
        """Name the ranks whose files are there without their chunk of a frozen parameter.

        Where all of them lack it, the run was told to leave frozen parameters out.
        """
        run = self._run
        lost = [
            divmod(holding.rank, run.tp_size) for holding in cut.holdings if holding.group is None
        ]
        named = [f"dp {dp} tp {tp}" for dp, tp in lost if (dp, tp) in run.partitioned]
        if named and len(lost) < len(cut.holdings):
            more = ", ..." if named[_MOST_NAMED:] else ""
            message = (
                f"tensor {name!r} is frozen, and the model files of {len(named)} of "
                f"{run.mesh.size} ranks lack its chunk ({', '.join(named[:_MOST_NAMED])}{more}); "
                "nothing else has it"
            )
            run.findings.append(Finding("error", "frozen-missing", message, f"tensor {name!r}"))

    def _is_frozen(self, name: str) -> bool:
        """A rank whose shard is empty says so of a parameter that the other ranks train."""
        return name in self._frozen and name not in self._trained

    def _trained_dtype(self, name: str) -> DType | None:
        """What the empty tensor says that ZeRO-3 leaves of a parameter; else the configuration."""
        model = self._run.models[0]
        return model.dtypes.get(name) or configured_dtype(model.root)

    def _buffer(self, name: str) -> TensorEntry:
        """Buffers are saved by every rank as it has them."""
        shapes = self._shapes(name)
        if any(shape != shapes[0] for shape in shapes):
            raise UnsupportedError(
                f"nothing says how a buffer of shapes {', '.join(map(str, shapes))} is cut",
                where=f"tensor {name!r}",
            )
        run, where = self._run, f"tensor {name!r}"
        layout = replicated(shapes[0], mesh=self._tp_mesh)
        models, held = run.models, layout
        if len(run.partitioned) == run.mesh.size:
            # Under ZeRO-3 every data-parallel rank saves a copy of its own, and they may differ.
            models = tuple(run.partitioned[divmod(n, run.tp_size)] for n in range(run.mesh.size))
            held = replicated(shapes[0], mesh=run.mesh)
        shards = [self._buffer_of(model, name, shapes[0]) for model in models]
        entry = stored_state(held, shards, run.files, where)
        return TensorEntry(name, "buffer", layout, {"weight": entry})

    def _buffer_of(self, model: ModelFile, name: str, shape: Shape) -> StoredTensor:
        tensor = model.weights.get(name)
        if tensor is None or tensor.shape != shape:
            raise CorruptError(
                f"has {'no buffer' if tensor is None else f'shape {tensor.shape}'}, "
                f"{self._run.models[0].name} has shape {shape}",
                where=f"{model.name}: tensor {name!r}",
            )
        return tensor

    def _expert(self, expert: ExpertParameter) -> TensorEntry:
        run, where = self._run, f"tensor {expert.name!r}"
        shards = None if run.is_partitioned else self._expert_files.weights(expert)
        stored = self._shard_shape(run.models[0], expert.name)
        if stored is None and shards is None:
            raise CorruptError("is in no file", where=where)
        shape = shards[0].shape if stored is None and shards else (stored or ())[1:]
        held = len(expert.placement[0])
        if stored is not None and stored[:1] != (held,):
            raise CorruptError(
                f"has shape {stored} in param_shapes, rank 0 is said to hold {held} experts",
                where=f"{run.models[0].root.where}: {where}",
            )
        layout = expert.layout(shape)
        states: dict[str, StateEntry] = {}
        if shards is not None:
            for tensor in shards:
                if tensor.shape != shape:
                    raise CorruptError(
                        f"has shape {tensor.shape}, the other experts have {shape}",
                        where=f"{tensor.storage.file}: {where}",
                    )
            copies = self._expert_files.copies(expert)
            mesh = Mesh((("copy", len(copies)), ("expert", expert.expert_count)))
            if len(copies) == 1:
                mesh = Mesh((("expert", expert.expert_count),))
            by_file = experts_layout(layout.full_shape, mesh=mesh, axis="expert")
            states["weight"] = stored_state(by_file, [*chain(*copies)], run.files, where)
        states |= self._optimizer_states(expert.name, layout)
        return TensorEntry(
            expert.name,
            "parameter",
            layout,
            states,
            trained_dtype=self._trained_dtype(expert.name),
        )

    def _native(self, expert: NativeExpert) -> TensorEntry:
        """A tensor of one expert, which has a file and a rank of its own."""
        run, where = self._run, f"tensor {expert.name!r}"
        layout = expert.layout()
        weights = self._expert_files.weights(expert)
        states: dict[str, StateEntry] = {}
        if weights is not None:
            cut = expert.cut or replicated(expert.shape, mesh={"expert": 1})
            shards = weights if expert.cut is None else self._expert_files.shards(expert)
            states["weight"] = stored_state(cut, shards, run.files, where)
        states |= self._optimizer_states(expert.name, layout)
        is_known = expert.name in {*self._trained, *self._frozen} or not self._has_optimizer
        is_frozen = expert.name not in self._trained and self._has_optimizer
        if expert.is_buffer:
            return TensorEntry(expert.name, "buffer", layout, states)
        if not is_known:
            message = (
                f"{where} is unknown to the optimizer: it is frozen, or stored a second time "
                "under another name"
            )
            run.findings.append(Finding("note", "untracked", message, where))
        return TensorEntry(
            expert.name,
            "parameter",
            layout,
            states,
            is_frozen=is_frozen and layout.full_numel > 0,
            trained_dtype=self._trained_dtype(expert.name),
        )

    def _optimizer_states(self, name: str, layout: Layout) -> dict[str, StateEntry]:
        if self._whole is not None:
            return self._whole_states(self._whole, name, layout)
        run, cut = self._run, self._partitions.cuts.get(name)
        if cut is None or not cut.holdings or not cut.is_whole:
            return {}
        where = f"tensor {name!r}"
        states = flat_states(layout, cut, self._flat_layouts, run.files, where)
        whole = self._partitions.whole.get(name)
        if whole is not None and whole.holdings and whole.is_whole:
            states |= flat_states(layout, whole, self._flat_layouts, run.files, where)
        return states | self._group_states(name)

    def _whole_states(self, whole: Whole, name: str, layout: Layout) -> dict[str, StateEntry]:
        """States that each tensor-parallel or expert-parallel rank stores of its whole shard."""
        owned = {n: rank.owned[name] for n, rank in enumerate(whole.ranks) if name in rank.owned}
        layout = repeated(layout, whole.mesh)
        files, where = self._run.files, f"tensor {name!r}"
        arrays = {rank: own.arrays for rank, own in owned.items()}
        scalars = {rank: own.scalars for rank, own in owned.items()}
        shapes = [layout.shard_shape(rank) for rank in range(layout.rank_count)]
        return whole_states(layout, arrays, shapes, files, where) | group_states(
            scalars, whole.mesh, files, where
        )

    def _group_states(self, name: str) -> dict[str, StateEntry]:
        """States of the whole group: the same for all its parameters, so they are made once."""
        groups = self._partitions.groups[name]
        key = tuple((rank, id(group)) for rank, group in groups.items())
        if key not in self._scalars:
            run = self._run
            scalars = {rank: group.scalars for rank, group in groups.items()}
            self._scalars[key] = group_states(scalars, run.mesh, run.files, f"tensor {name!r}")
        return self._scalars[key]

    def _layout(self, name: str) -> Layout:
        shapes = self._shapes(name)
        known = self._apart.get(name, name)  # what is said of a tied weight is said of one name
        layout = self._placements[0].layout(known, shapes)
        weights = [model.weights.get(name) for model in self._run.models]
        shards = [weight for weight in weights if weight is not None]
        if self._told and known in self._told.layouts and len(shards) == len(weights):
            self._told.require_cut(known, shards)
        for placement, model in zip(self._placements[1:], self._run.all_models[1:], strict=True):
            if placement is not self._placements[0] and placement.layout(known, shapes) != layout:
                raise CorruptError(
                    f"is cut another way than {self._run.all_models[0].name} says",
                    where=f"{model.name}: tensor {name!r}",
                )
        return layout

    def _shapes(self, name: str) -> list[Shape]:
        """Shape of the shard on each tensor-parallel rank."""
        shapes: list[Shape] = []
        for model in self._run.models:
            shape = self._shard_shape(model, name)
            if shape is None:
                raise CorruptError(
                    f"is not there, {self._run.models[0].name} has it",
                    where=f"{model.name}: tensor {name!r}",
                )
            shapes.append(shape)
        return shapes

    def _shard_shape(self, model: ModelFile, name: str) -> Shape | None:
        weight = model.weights.get(name)
        if weight is not None:
            return weight.shape
        for group in model.param_shapes or ():
            if name in group:
                return group[name]
        return model.frozen.get(name)

    def _find_aliases(self) -> dict[str, str]:
        """Other names of parameters: those that the run knew of, and those that share their bytes.

        Only rank 0 knows of shared parameters, so its file speaks for all. A name that has bytes of
        its own is no other name: what it holds may be something else by now.
        """
        models = self._run.models
        said = {alias: name for model in models for alias, name in model.aliases.items()}
        if self._whole is not None:
            said |= self._whole.aliases
        for alias, name in said.items():
            if alias in self._trained or name not in {*self._trained, *models[0].weights}:
                problem = "has optimizer states" if alias in self._trained else "is not there"
                raise CorruptError(
                    f"{alias!r} is shared with {name!r}, and "
                    f"{alias if alias in self._trained else name!r} {problem}",
                    where=f"{models[0].root.where}: shared_params",
                )
        self._apart = {
            alias: name
            for alias, name in said.items()
            if any(
                model.weights.get(alias) not in (None, model.weights.get(name)) for model in models
            )
        }
        said = {alias: name for alias, name in said.items() if alias not in self._apart}
        # Nothing is said of a router's second name either; it is no parameter of its own.
        stacked = (name for name, own in self._experts.items() if isinstance(own, ExpertParameter))
        self._apart |= second_routers(stacked, [*models[0].dtypes, *models[0].weights])
        places = {
            tuple(model.weights.get(name) for model in models): name for name in self._trained
        }
        for name in models[0].weights:
            key = tuple(model.weights.get(name) for model in models)
            is_free = name not in self._trained and name not in self._buffers
            if is_free and name not in said and key in places and _is_stored(key):
                said[name] = places[key]
        return said

    def _warn(self, kind: str, message: str, name: str) -> None:
        self._run.findings.append(Finding("warning", kind, message, f"tensor {name!r}"))


def _is_stored(views: tuple[object, ...]) -> bool:
    return all(view is not None and prod(getattr(view, "shape", ())) for view in views)


def _placements(run: Run, mesh: Mesh, told: ToldCut | None) -> list[Placement]:
    """What each model file says of the layouts; equal metadata is read once."""
    found: list[Placement] = []
    first = run.all_models[0].root.get("universal_checkpoint_info")
    for model in run.all_models:
        info = model.root.get("universal_checkpoint_info")
        is_same = bool(found) and (
            info is None if first is None else info is not None and info.value == first.value
        )
        found.append(found[0] if is_same else Placement(info, mesh, model.root.where, told))
    return found
