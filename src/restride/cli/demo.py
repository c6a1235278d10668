"""``restride demo``: the story of one fused weight, told on a sample that ships inside."""

from __future__ import annotations

import hashlib
import json
import tempfile
from contextlib import ExitStack
from importlib.resources import as_file, files
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from restride import api
from restride.algebra.coverage import Covered, prove
from restride.algebra.coverage import explain as explain_verdict
from restride.cli import check, convert, info
from restride.cli.exits import ExitCode
from restride.cli.options import json_option
from restride.cli.output import open_page, write_json
from restride.cli.picture import draw_layout

if TYPE_CHECKING:
    from collections.abc import Iterator

    from restride.algebra.coverage import Verdict
    from restride.checkpoint.catalog import Catalog, TensorEntry
    from restride.cli.output import Page

__all__ = ["command"]

_EXAMPLES: Final = """\b
Example:
  restride demo
"""

_NAME, _OUT = "codegen-tp2-dp2", "converted"
_FUSED: Final = "transformer.h.0.attn.qkv_proj.weight"
_PROBLEM: Final = """\
The problem
  CodeGen keeps query, key and value in one fused weight. Tensor parallelism
  has to cut it by heads, so what a rank holds is a permutation of its rows:
  described with boxes, 11 of them on each of two ranks, 12 on each of four.
  ZeRO then cuts the optimizer states of the same weight once more, flat, over
  the data-parallel ranks. The sample is such a checkpoint, written by
  DeepSpeed itself."""
_NEXT: Final = """\
Your own data
  restride info CKPT                      what is in it, and how is it cut?
  restride check CKPT                     is it whole, are replicas the same?
  restride convert CKPT OUT               weights to safetensors, bit for bit
  restride convert CKPT OUT --states all  master weights and moments as well
  restride convert CKPT OUT --to deepspeed --dp 8 --tp 1
                                          for load_checkpoint on other ranks
  restride layouts                        the layouts that are known by name"""


@click.command("demo", epilog=_EXAMPLES)
@json_option
def command(*, as_json: bool) -> int:
    """All of it, on a sample that ships with the package.

    Reads, checks and converts a small DeepSpeed checkpoint of CodeGen, and compares the result with
    DeepSpeed's own conversion. Writes only into a temporary folder, which is removed at the end.
    """
    with ExitStack() as stack:
        sample = stack.enter_context(as_file(files("restride.cli").joinpath("sample")))
        out = Path(stack.enter_context(tempfile.TemporaryDirectory()), _OUT)
        checked = api.check(sample)
        fused = _find(checked.catalog, _FUSED)
        verdict = prove(fused.layout)
        converted = api.convert(sample, out, states="all")
        expected: dict[str, str] = json.loads((sample / "expected.json").read_text())["sha256"]
        found = dict(_digests(out))
        different = sorted(key for key, digest in expected.items() if found.get(key) != digest)
        is_fine = checked.verdict == "ok" and isinstance(verdict, Covered) and not different
        if as_json:
            write_json(
                {
                    "verdict": "ok" if is_fine else "findings",
                    "pieces": len(fused.layout.all_pieces),
                    "arrays": converted.tensor_count,
                    "compared": len(expected),
                    "different": different,
                }
            )
        else:
            page = open_page()
            _tell(page, checked, fused, verdict)
            _command(page, f"restride convert {_NAME} {_OUT} --states all")
            convert.show_report(page, converted, _OUT)
            _compare(page, len(expected), different)
            page.line()
            _paragraph(page, _NEXT)
    return ExitCode.OK if is_fine else ExitCode.FINDING


def _tell(page: Page, checked: api.CheckReport, fused: TensorEntry, verdict: Verdict) -> None:
    _paragraph(page, _PROBLEM)
    _command(page, f"restride info {_NAME}")
    info.show_catalog(page, _NAME, checked.catalog)
    _command(page, f"restride check {_NAME}")
    check.show_report(page, _NAME, checked)
    page.line()
    page.line(f"{fused.name}: one walk over the full tensor, the ranks and the shards", "bold")
    page.line()
    draw_layout(page, fused.layout)
    page.line()
    page.line(f"proof: {explain_verdict(verdict, fused.layout)}", "good")


def _compare(page: Page, count: int, different: list[str]) -> None:
    page.line()
    if not different:
        page.line(
            f"SHA-256 of all {count} weights, master weights and moments against DeepSpeed's own "
            "conversion: the same",
            "good",
        )
        return
    for key in different:
        page.line(f"{key} is not what DeepSpeed's own conversion makes of it", "bad")


def _paragraph(page: Page, text: str) -> None:
    first, *rest = text.splitlines()
    page.line(first, "bold")
    for line in rest:
        page.line(line)


def _command(page: Page, text: str) -> None:
    page.line()
    page.line(f"$ {text}", "bold")


def _find(catalog: Catalog, name: str) -> TensorEntry:
    return next(tensor for tensor in catalog.tensors if tensor.name == name)


def _digests(folder: Path) -> Iterator[tuple[str, str]]:
    """Read every array of a converted checkpoint, and yield ``TENSOR/STATE`` and its SHA-256."""
    catalog = api.open(folder)
    for tensor in catalog.tensors:
        for state, entry in tensor.states.items():
            region = entry.regions[0]
            if region is None:
                continue
            with (folder / catalog.files[region.file].name).open("rb") as file:
                file.seek(region.start_nbytes)
                content = file.read(entry.layout.full_numel * entry.dtype.itemsize_nbytes)
            yield f"{tensor.name}/{state}", hashlib.sha256(content).hexdigest()
