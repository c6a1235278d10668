"""Describe a checkpoint in DeepSpeed's own sharded form before it is written.

    latest                                                     the tag, as text
    TAG/mp_rank_TT_model_states.pt                             weights of a tensor-parallel rank,
                                                               and without ZeRO its optimizer
    TAG/zero_pp_rank_D_mp_rank_TT_model_states.pt              ZeRO-3: the same of a (dp, tp) rank
    TAG/[bf16_]zero_pp_rank_D_mp_rank_TT_optim_states.pt       optimizer of a (dp, tp) rank
    TAG/layer_L_expert_E_mp_rank_00_model_states.pt            an expert of AutoEP, but at ZeRO-3
    TAG/expp_rank_E_mp_rank_00_optim_states.pt                 without ZeRO: optimizer of its rank
    TAG/layer_LL[-model_TT]-model_states.pt                    weights of a layer of a pipeline

An engine with so many ranks and this ZeRO stage resumes from it with plain ``load_checkpoint``: no
universal folder in between.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from restride.checkpoint.selection import select_weights
from restride.errors import CorruptError, UnsupportedError
from restride.formats.deepspeed._writing.chunks import write_chunks
from restride.formats.deepspeed._writing.elastic import elastic_findings, require_elastic
from restride.formats.deepspeed._writing.expert_files import write_expert_files
from restride.formats.deepspeed._writing.experts import place_experts
from restride.formats.deepspeed._writing.findings import findings_of
from restride.formats.deepspeed._writing.model import write_models
from restride.formats.deepspeed._writing.muon_order import in_muon_order
from restride.formats.deepspeed._writing.partitions import write_partitions
from restride.formats.deepspeed._writing.pipeline import write_pipeline
from restride.formats.deepspeed._writing.whole import write_whole
from restride.formats.deepspeed._writing.writing import Writing
from restride.storage.torch_output import TorchOutput

if TYPE_CHECKING:
    from collections.abc import Mapping

    from restride.algebra.layout import Layout
    from restride.checkpoint.catalog import Catalog, Finding
    from restride.checkpoint.selection import Export
    from restride.checkpoint.training import Training
    from restride.formats.deepspeed.target import DeepSpeedTarget

__all__ = ["lay_out"]

_PARTITIONED_WEIGHTS = 3


def lay_out(
    catalog: Catalog, training: Training, target: DeepSpeedTarget, layouts: Mapping[str, Layout]
) -> Export:
    """Describe the files that an engine of the target resumes from.

    Args:
        catalog: What the checkpoint holds.
        training: What goes with the tensors.
        target: Ranks and ZeRO stage of the engine.
        layouts: For every tensor, how the tensor-parallel ranks of the target cut it: over
            `target.tp_mesh`.

    Returns:
        Files in the order of the ranks, with what the engine's configuration must change to.

    Raises:
        CorruptError: The checkpoint is not whole.
        CoverageError: A layout of the target has a hole or an overlap.
        UnsupportedError: A state is missing or has no place in this form.
        ExecutionError: The step of a parameter cannot be read.

    Cost:
        O(parameters * ranks). No tensor is read, but for the steps of the optimizer.
    """
    for finding in catalog.findings:
        if finding.severity == "error":
            raise CorruptError(
                f"the checkpoint is not whole: {finding.message}",
                where=catalog.root,
                remedy="`restride check` lists everything that is missing",
            )
    _require_stages(catalog, training, target)
    tensors = {tensor.name: tensor for tensor in catalog.tensors}
    placed = place_experts(catalog, training, target, layouts)
    if placed is not None:
        training, layouts = placed.retold(training), {**layouts, **placed.layouts}
        tensors = placed.without_second_names(tensors)
    orders: tuple[Finding, ...] = ()
    if training.pipeline is None:  # its stages sort what they have
        training, orders = in_muon_order(
            *(training, tensors, layouts), target=target, source=catalog.format
        )
    writing = Writing(
        catalog,
        training,
        target,
        layouts,
        weights={
            selected.tensor: selected
            for selected in select_weights(catalog)
            if selected.tensor in tensors
        },
        tensors=tensors,
        output=TorchOutput(catalog),
        experts=placed,
        findings=[*orders],
    )
    writing.require_known()
    if writing.is_elastic:
        require_elastic(writing)
        writing.findings.extend(elastic_findings(writing))
    chosen: list[int] | None = None
    if training.pipeline is not None:
        chosen = write_pipeline(writing, training.pipeline)
    elif target.zero == _PARTITIONED_WEIGHTS:
        write_chunks(writing)
    elif not target.zero:
        write_whole(writing)
    else:
        write_models(writing)
        write_partitions(writing)
    if placed is not None and target.zero != _PARTITIONED_WEIGHTS:
        write_expert_files(writing, placed)
    writing.output.add_file("latest", training.tag.encode())
    writing.findings.extend(findings_of(writing, chosen))
    return writing.output.finish(tuple(writing.findings))


def _require_stages(catalog: Catalog, training: Training, target: DeepSpeedTarget) -> None:
    """Layers of a pipeline are no modules of a model, and a model has no stages."""
    if training.pipeline is not None:
        if target.ep > 1:
            raise UnsupportedError(
                f"is of a pipeline, which has no experts for ep={target.ep}", where=catalog.root
            )
        return
    if target.pp > 1 or target.cut.is_said or target.cut.tied:
        raise UnsupportedError(
            "is of no pipeline, and has no layers that could be dealt out to stages",
            where=catalog.root,
            remedy="leave out --pp, --pp-layers and --pp-tied",
        )
