"""What files say, in a form that can be compared: tensors by their elements, not their places."""

from __future__ import annotations

import json
from contextlib import nullcontext
from functools import partial
from hashlib import blake2b
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from restride.checkpoint.manifest import (
    MANIFEST_NAME,
    Manifest,
    ManifestFile,
    ManifestPart,
    compact_json,
    manifest_to_json,
)
from restride.checkpoint.manifest_reading import manifest_of
from restride.checkpoint.values import Constructed, OrderedDictValue, StoredTensor
from restride.storage.torch_zip import open_torch_zip

if TYPE_CHECKING:
    from collections.abc import Mapping
from restride.checkpoint.values import Value

__all__ = ["content_of", "file_content", "manifest_from_json", "sign", "signed", "tree"]


def tree(folder: Path) -> dict[str, bytes]:
    """All files below a folder, by their paths in it."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def sign(folder: Path) -> None:
    """Add a manifest by which restride wrote all that is in a folder; its digests are none."""
    sizes = {
        path.relative_to(folder).as_posix(): path.stat().st_size
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path != folder / MANIFEST_NAME
    }
    block_nbytes = max((1, *sizes.values()))
    files = {
        name: ManifestFile(nbytes, (ManifestPart(0, nbytes, (0,)),) if nbytes else ())
        for name, nbytes in sizes.items()
    }
    manifest = Manifest("0", "0" * 32, block_nbytes, files, {})
    (folder / MANIFEST_NAME).write_bytes(manifest_to_json(manifest))


def manifest_from_json(content: bytes, *, where: str) -> Manifest:
    """Read a manifest that is in memory."""
    return manifest_of(partial(nullcontext, _Kept(content)), where=where)


class _Kept:
    """A text that is in memory."""

    def __init__(self, content: bytes) -> None:
        self.nbytes = len(content)
        self._content = content

    def read(self, start_nbytes: int, nbytes: int, /) -> bytes:
        return self._content[start_nbytes : start_nbytes + nbytes]


def signed(manifest: Mapping[str, object]) -> bytes:
    """The text of a manifest as restride writes it, with the digest of what it says by now."""
    said = {key: value for key, value in manifest.items() if key != "digest"}
    digest = blake2b(compact_json(said).encode(), digest_size=16).hexdigest()
    return json.dumps({**said, "digest": digest}, indent=1).encode() + b"\n"


def file_content(path: Path) -> Any:
    """Everything that a file of ``torch.save`` holds; see `content_of`."""
    return content_of(open_torch_zip(path).value)


def content_of(value: Value) -> Any:
    """Plain Python values that are equal where the loaded ones would be, classes included."""
    match value:
        case StoredTensor():
            return "tensor", value.storage.dtype.name, value.shape, _elements(value)
        case OrderedDictValue():
            # Flat buffers are in the order of one.
            return "ordered", _pairs(value), content_of(value.state), [*value]
        case dict():
            return _pairs(value)
        case list() | tuple():
            return type(value).__name__, [content_of(item) for item in value]
        case Constructed():
            parts = (value.constructor, value.args, value.kwargs, value.state, value.items)
            pairs = [(content_of(key), content_of(entry)) for key, entry in value.pairs]
            return "object", [content_of(part) for part in parts], pairs
        case _:
            return type(value).__name__, value


def _pairs(value: dict[Any, Any]) -> dict[Any, Any]:
    return {key: content_of(entry) for key, entry in value.items()}


def _elements(tensor: StoredTensor) -> bytes:
    """The elements in row-major order."""
    itemsize = tensor.storage.dtype.itemsize_nbytes
    places = np.zeros((), np.int64)
    for size, stride in zip(tensor.shape, tensor.strides, strict=True):
        places = places[..., None] + np.arange(size) * stride
    if not prod(tensor.shape):
        return b""
    with Path(tensor.storage.file).open("rb") as file:
        file.seek(tensor.start_nbytes)
        content = file.read((int(places.max()) + 1) * itemsize)
    return np.frombuffer(content, np.uint8).reshape(-1, itemsize)[places.ravel()].tobytes()
