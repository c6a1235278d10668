"""Targets of `fuzz.py`: files and documents, as bytes and as what these say."""

from __future__ import annotations

import json
import tempfile
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fuzz_choices import ByteRandom, changed, changed_bytes
from restride.algebra.canonical import canonicalize
from restride.algebra.compose import compose
from restride.algebra.coverage import prove
from restride.algebra.serial import MapFile, read_map, write_map
from restride.algebra.signature import same_layout, signature
from restride.api import check
from restride.checkpoint.fingerprints import fingerprints_from_json, fingerprints_to_json
from restride.checkpoint.manifest import manifest_to_json
from restride.deepspeed import from_affine_map, to_affine_map
from restride.errors import RestrideError
from restride.formats.safetensors import read_catalog
from restride.layouts import bigcode_qkv, codegen_qkv, padded, split
from restride.layouts.presets.autotp import autotp_layouts
from restride.layouts.presets.rule_file import read_rules, rule_layouts
from restride.storage.journal import read_journal
from restride.storage.model_files import read_model_config
from restride.storage.pickle_vm import Limits, read_pickle
from restride.storage.torch_zip import open_torch_zip
from restride.testing.contents import manifest_from_json, signed
from restride.testing.hostile import callers, hostile_pickles
from restride.testing.hostile_safetensors import (
    hostile_safetensors,
    safetensors_file,
    valid_safetensors,
)
from restride.testing.hostile_torch import hostile_torch_files, valid_torch_file
from restride.testing.torch_files import torch_file

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from restride.algebra.layout import Layout

__all__ = [
    "DOCUMENT_SEEDS",
    "changed_config",
    "changed_rules",
    "document",
    "pickle",
    "reader_seeds",
    "safetensors",
    "torch",
]

# Small, so that an input that reaches a limit does not slow down the others.
_LIMITS = Limits(work=20_000, expanded=20_000)


def pickle(content: bytes) -> str:
    read_pickle(content, limits=_LIMITS)
    return "read"


def torch(content: bytes) -> str:
    # Half of the inputs are pickles in a right file: no mutation gets through a zip file otherwise.
    whole = content[1:] if content[:1] == b"Z" else torch_file(content[1:], {"0": bytes(24)})
    with tempfile.NamedTemporaryFile(suffix=".pt") as file:
        file.write(whole)
        file.flush()
        opened = open_torch_zip(file.name, limits=_LIMITS)
        if any(s.start_nbytes + s.nbytes > len(whole) for s in opened.storages.values()):
            raise IndexError("a storage reaches out of its file")
    return "read"


def safetensors(content: bytes) -> str:
    """Read a file; every second one is a header that is cut or grown around data of 64 bytes."""
    whole = content[1:] if content[:1] == b"Z" else safetensors_file(content[1:], bytes(64))
    with tempfile.NamedTemporaryFile(suffix=".safetensors") as file:
        file.write(whole)
        file.flush()
        for tensor in read_catalog(file.name).tensors:
            for entry in tensor.states.values():
                width = entry.layout.full_numel * entry.dtype.itemsize_nbytes
                if any(r and r.start_nbytes + width > len(whole) for r in entry.regions):
                    raise IndexError("a tensor reaches out of its file")
        check(file.name, budget_nbytes=8 << 20)
    return "read"


def reader_seeds(reader: str) -> list[bytes]:
    """Inputs to start from: valid files, and everything that the test kit knows to be hostile."""
    pickles = [case.content for case in hostile_pickles()] + list(callers("true").values())
    if reader == "pickle":
        return pickles
    if reader == "torch":
        files = [valid_torch_file(), *(case.content for case in hostile_torch_files())]
        return [b"Z" + content for content in files] + [b"P" + content for content in pickles]
    files = [valid_safetensors(), *(case.content for case in hostile_safetensors())]
    header = {
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "F32", "shape": [2, 4], "data_offsets": [0, 32]},
        "b": {"dtype": "BF16", "shape": [16], "data_offsets": [32, 64]},
    }
    return [b"Z" + content for content in files] + [b"H" + json.dumps(header).encode()]


_LAYOUTS = {
    "qkv": codegen_qkv((48, 4), mesh={"tp": 2}, heads=8),
    "big": bigcode_qkv((24, 4), mesh={"tp": 2}, heads=4, hidden=16),
    "rows": split((5, 3), mesh={"tp": 2}, sizes=[3, 2]),
    "vocabulary": padded((5, 2), mesh={"tp": 2}, rows=6),
}
_SHAPES = {"wte.weight": (8, 4), "h.0.attn.qkv.weight": (24, 8), "h.0.mlp.up.weight": (16, 8)}
_LLAMA = {
    "model.embed_tokens.weight": (16, 8),
    **{f"model.layers.0.self_attn.{n}_proj.weight": (8, 8) for n in "qkvo"},
    "model.layers.0.mlp.gate_proj.weight": (12, 8),
    "model.layers.0.mlp.down_proj.weight": (8, 12),
}
_CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 8,
    "n_head": 4,
    "vocab_size": 16,
    "tie_word_embeddings": False,
}
_RULES = """format = "restride-rules/1"
rest = "whole"
[[rules]]
match = "**.attn.qkv.weight"
layout = "codegen-qkv"
heads = "config:n_head"
[[rules]]
match = "**.mlp.{up,gate}.{weight,bias}"
layout = "column"
[[rules]]
match = "wte.*"
layout = "sub-params"
sizes = [4, 2, 2]
"""
_HALVES = [
    {
        "shape": [2, 3],
        "source": [6 * n, [3, 1]],
        "dest": [0, [3, 1]],
        "locations": [n],
        "scale": 1.0,
    }
    for n in range(2)
]
_SHARD = {"start_nbytes": 8, "nbytes": 16, "blocks": ["2" * 32], "tensor": "t", "state": "weight"}
_MANIFEST = {
    "format": "restride-manifest/2",
    "version": "1",
    "job": "0" * 32,
    "block_nbytes": 16,
    "files": {
        "a": {
            "nbytes": 24,
            "parts": [
                {"start_nbytes": 0, "nbytes": 8, "blocks": ["1" * 32]},
                _SHARD,
            ],
        }
    },
    "tensors": {"t": {"weight": "3" * 32}},
}
_AFFINE = {
    "logical_shape": [4, 3],
    "ranks": {n: {"shard_shape": [2, 3], "pieces": [box]} for n, box in enumerate(_HALVES)},
}


def document(content: bytes) -> str:
    """Read a document in which some numbers, keys or bytes are wrong."""
    random = ByteRandom(content)
    return random.choice(_DOCUMENTS)(random)


def _json(random: Random, valid: Any) -> bytes:
    value = valid
    for _ in range(random.randrange(5)):
        value = changed(random, value, is_json=True)
    text = json.dumps(value, ensure_ascii=bool(random.randrange(2))).encode(errors="surrogatepass")
    for _ in range(random.choice((0, 0, 0, 1, 3))):
        text = changed_bytes(random, text)
    return text


def _use(layout: Layout) -> None:
    """Whatever may be asked of a layout that was read."""
    asked: list[Callable[[Layout], object]] = [prove, signature, canonicalize]
    # Thousands of pieces in one place, which no proof lets through, take minutes.
    if len(layout.all_pieces) <= _MOST_COMPOSED:
        asked.append(lambda one: compose(one, one))
    for ask in asked:
        try:
            ask(layout)
        except RestrideError as error:
            str(error)


def _map(random: Random) -> str:
    mesh = _LAYOUTS["qkv"].mesh
    content = read_map(_json(random, json.loads(write_map(MapFile(mesh, _LAYOUTS)))))
    again = read_map(write_map(content))
    assert again == content
    for layout in dict.fromkeys(content.tensors.values()):
        _use(layout)
    return "map"


def _affine(random: Random) -> str:
    text = _json(random, _AFFINE)
    try:
        value = json.loads(text)
    except ValueError:
        return "map that is no JSON"
    layout = from_affine_map(value)
    _use(layout)
    assert same_layout(from_affine_map(to_affine_map(layout)), layout)
    return "affine map"


def _manifest(random: Random) -> str:
    text = _json(random, _MANIFEST)
    try:
        value = json.loads(text)
        text = signed(value)
        if random.randrange(4) == 0:
            text = changed_bytes(random, text)
    except (ValueError, TypeError, AttributeError):
        pass
    manifest = manifest_from_json(text, where="M")
    assert manifest_from_json(bytes(manifest_to_json(manifest)), where="M") == manifest
    return "manifest"


def _fingerprints(random: Random) -> str:
    valid = fingerprints_to_json(manifest_from_json(signed(_MANIFEST), where="M").tensors)
    read = fingerprints_from_json(_json(random, valid), where="F")
    assert fingerprints_from_json(json.dumps(fingerprints_to_json(read)), where="F") == read
    return "fingerprints"


def _journal(random: Random) -> str:
    lines = []
    for record in ({"what": "a", "nbytes": 3, "job": "x"}, {"nbytes": 2, "file": 0}, {"a": [1]}):
        payload = _json(random, record)
        lines.append(b"%08x %b\n" % (zlib.crc32(payload), payload))
    text = b"".join(lines)
    if random.randrange(3) == 0:
        text = changed_bytes(random, text)
    return f"journal of {len(_in_file(text, '.journal', read_journal))}"


def changed_rules(random: Random) -> str:
    """A rule file in which some lines or bytes are wrong."""
    text = _RULES
    for _ in range(random.randrange(4)):
        lines = text.split("\n")
        place = random.randrange(len(lines))
        key, _, old = lines[place].partition(" = ")
        new = json.dumps(changed(random, [old, 4, [4, 2, 2], "config:n_head"], is_json=True))
        lines[place] = random.choice((f"{key} = {new}", old, lines[place] + "\n" + lines[place]))
        text = "\n".join(lines)
    if random.randrange(3) == 0:
        text = changed_bytes(random, text.encode(errors="replace")).decode(errors="replace")
    return text


def changed_config(random: Random) -> bytes:
    """A ``config.json`` in which some things are wrong."""
    return _json(random, _CONFIG)


def _rules(random: Random) -> str:
    rules = read_rules(changed_rules(random))
    config: Any = _CONFIG
    for _ in range(random.randrange(3)):
        config = changed(random, config, is_json=True)
    config = config if isinstance(config, dict) else {}
    mesh = {"tp": random.choice((1, 2, 3, 4))}
    for layout in rule_layouts(rules, _SHAPES, mesh=mesh, config=config).values():
        _use(layout)
    return "rules"


def _config(random: Random) -> str:
    config = _in_file(changed_config(random), ".json", read_model_config)
    mesh = {"tp": random.choice((1, 2, 3, 4))}
    grain = random.choice((1, 1, 4, 64))
    for layout in autotp_layouts(config, _LLAMA, mesh=mesh, grain=grain).values():
        _use(layout)
    return "config"


def _index(random: Random) -> str:
    """An index of safetensors beside a file that has what the index says, or has not."""
    valid = {"metadata": {"total_size": 64}, "weight_map": {"a": "a.safetensors"}}
    with tempfile.TemporaryDirectory() as folder:
        entry = {"dtype": "F32", "shape": [2, 4], "data_offsets": [0, 32]}
        Path(folder, "a.safetensors").write_bytes(safetensors_file({"a": entry}, bytes(32)))
        index = Path(folder, "model.safetensors.index.json")
        index.write_bytes(_json(random, valid))
        read_catalog(folder)
    return "index"


def _in_file(content: bytes, suffix: str, read: Callable[[Path], Any]) -> Any:
    with tempfile.NamedTemporaryFile(suffix=suffix) as file:
        file.write(content)
        file.flush()
        return read(Path(file.name))


_DOCUMENTS: tuple[Callable[[Random], str], ...] = (
    *(_map, _map, _map, _affine, _affine, _manifest, _fingerprints, _journal),
    *(_rules, _rules, _config, _config, _index),
)
_MOST_COMPOSED = 200
DOCUMENT_SEEDS = [bytes([kind, *[7 * kind + n] * 40]) for kind in range(16) for n in range(4)]
