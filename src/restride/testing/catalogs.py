"""Catalogs without files: what a reader would say of tensors that are cut in a given way."""

from __future__ import annotations

from typing import TYPE_CHECKING

from restride.algebra.mesh import Mesh
from restride.checkpoint.catalog import Catalog, TensorEntry

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from restride.algebra.layout import Layout

__all__ = ["catalog_of"]


def catalog_of(
    layouts: Mapping[str, Layout],
    *,
    buffers: Collection[str] = (),
    aliases: Mapping[str, tuple[str, ...]] | None = None,
    values: Mapping[str, object] | None = None,
) -> Catalog:
    """Make a catalog of tensors that have a layout and no state."""
    tensors = tuple(
        TensorEntry(
            name,
            "buffer" if name in buffers else "parameter",
            layout,
            {},
            aliases=(aliases or {}).get(name, ()),
        )
        for name, layout in layouts.items()
    )
    mesh = tensors[0].layout.mesh if tensors else Mesh(())
    return Catalog("test", "CHECKPOINT", (), mesh, tensors, values or {})
