"""Targets of `fuzz.py`: outputs and folders of files, and whether a wrong byte is noticed."""

from __future__ import annotations

import json
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fuzz_arrays import CODES, SHAPES, Stored, some_array, write_file
from fuzz_checkpoints import made_once, scratch, tree
from fuzz_choices import ByteRandom, changed, changed_bytes
from restride import api
from restride.checkpoint.dtypes import DTYPES
from restride.checkpoint.fingerprints import fingerprints_from_json, fingerprints_to_json
from restride.checkpoint.manifest import MANIFEST_NAME
from restride.comparison import check_against, fingerprint
from restride.errors import RestrideError
from restride.testing.command_line import SAMPLE
from restride.testing.contents import manifest_from_json, signed
from restride.testing.gather import gather

if TYPE_CHECKING:
    from collections.abc import Iterator
    from random import Random

__all__ = ["file_seeds", "kept", "sharded"]


def file_seeds() -> list[bytes]:
    """Inputs of many lengths; what they decide has no seeds that are better than others."""
    return [bytes((n * 73 + at * 41) & 255 for at in range(4 << n % 8)) for n in range(48)]


# What was written.

_WAYS: tuple[dict[str, Any], ...] = (
    {},
    {"states": "all", "max_shard_nbytes": 30_000},
    {"to": "universal"},
    {"to": "deepspeed", "tp": 1, "dp": 3},
)


@dataclass(frozen=True)
class _Kept:
    """An output of a conversion, and what was kept of it elsewhere."""

    root: Path
    files: dict[str, bytes]
    fingerprints: dict[str, dict[str, str]]


@made_once
def _outputs() -> tuple[_Kept, ...]:
    found = []
    for number, options in enumerate(_WAYS):
        root = scratch() / "kept" / f"whole{number}"
        api.convert(SAMPLE, root, **options)
        found.append(_Kept(root, tree(root), fingerprint(root)))
    return tuple(found)


def kept(content: bytes) -> str:
    """Spoil an output, its manifest, or a file of fingerprints: `check` finds every wrong byte."""
    random = ByteRandom(content)
    case = random.choice(_outputs())
    place = Path(tempfile.mkdtemp(dir=scratch()))
    try:
        root = place / "out"
        shutil.copytree(case.root, root)
        kind = random.randrange(4)
        if kind == 0:
            return _against(random, case, root)
        for _ in range(random.choice((0, 1, 1, 2))):
            _hurt(random, root)
        if kind == 1:
            _hurt_manifest(random, root)
        return _require_found(case, root)
    finally:
        shutil.rmtree(place)


def _hurt(random: Random, root: Path) -> None:
    files = sorted(path for path in root.rglob("*") if path.is_file())
    path, other = random.choice(files), random.choice(files)
    old = path.read_bytes()
    kind = random.randrange(9)
    if kind == 0:
        path.unlink()
    elif kind == 1:
        path.write_bytes(changed_bytes(random, old))
    elif kind in {2, 6, 7, 8} and old:
        flipped = bytearray(old)
        flipped[random.randrange(len(old))] ^= 1 << random.randrange(8)
        path.write_bytes(flipped)
    elif kind == 3:
        path.write_bytes(other.read_bytes())
        other.write_bytes(old)
    elif kind == 4:
        path.write_bytes(old + random.choice((b"\0", b"x" * 5000)))
    else:
        (root / random.choice(("stranger", "x.safetensors", "config.json"))).write_bytes(b"x")


def _hurt_manifest(random: Random, root: Path) -> None:
    """A manifest that says something else, mostly with a digest that is right for it."""
    path = root / MANIFEST_NAME
    if not path.is_file():
        return
    try:
        value = json.loads(path.read_bytes())
        if random.randrange(4):
            value = changed(random, value, is_json=True)
        if isinstance(value, dict) and random.randrange(4):
            path.write_bytes(signed(value))
        else:
            path.write_text(json.dumps(value, indent=1) + "\n")
    except (ValueError, TypeError, OverflowError, KeyError):
        path.write_bytes(changed_bytes(random, path.read_bytes()))


def _require_found(case: _Kept, root: Path) -> str:
    now = tree(root)
    try:
        report = api.check(root)
    except RestrideError:
        if now == case.files:
            raise AssertionError("what is right is refused") from None
        return "refused"
    is_known = now.get(MANIFEST_NAME) == case.files[MANIFEST_NAME]
    wrong = sorted(name for name, right in case.files.items() if now.get(name) != right)
    if report.verdict == "ok":
        assert not (is_known and wrong), f"{wrong} are other files, and nothing says so"
        return "ok"
    strangers = now.keys() - case.files.keys()
    assert strangers or now != case.files, f"findings of what is right: {report.findings}"
    return "found"


def _against(random: Random, case: _Kept, root: Path) -> str:
    """Hold a checkpoint against a file of fingerprints that is wrong somewhere."""
    if random.randrange(3) == 0:
        file = root / MANIFEST_NAME
        _hurt_manifest(random, root)
    else:
        file = root.parent / "kept.json"
        value: Any = fingerprints_to_json(case.fingerprints)
        for _ in range(random.randrange(3)):
            value = {**value, "tensors": _exchanged(random, value["tensors"])}
        if random.randrange(3) == 0:
            value = changed(random, value, is_json=True)
        try:
            file.write_text(json.dumps(value))
        except (ValueError, TypeError):
            return "cannot be spelled"
    try:
        found = check_against(case.root, file)
    except RestrideError as error:
        str(error)
        return "refused fingerprints"
    read = (
        manifest_from_json(file.read_bytes(), where="M").tensors
        if file.name == MANIFEST_NAME
        else fingerprints_from_json(file.read_bytes(), where="F")
    )
    wrong = {
        (name, state)
        for name, states in read.items()
        for state, digits in states.items()
        if case.fingerprints.get(name, {}).get(state) != digits
    }
    told = {(f.details["tensor"], f.details["state"]) for f in found if f.severity == "error"}
    assert told == wrong, (told, wrong)
    fewer = sum(map(len, case.fingerprints.values())) > sum(map(len, read.values()))
    assert not fewer or any(f.kind == "fingerprint-unknown" for f in found) or wrong
    return "against: " + ("found" if wrong else "ok")


def _exchanged(random: Random, tensors: dict[str, dict[str, str]]) -> dict[str, dict[str, str]]:
    """Two tensors have each other's fingerprints, or one has another, one more or none."""
    one, two = random.choice(sorted(tensors)), random.choice(sorted(tensors))
    digits = f"{random.getrandbits(128):032x}"
    state = random.choice(("weight", "fp32", "x"))
    return random.choice(
        (
            {**tensors, one: tensors[two], two: tensors[one]},
            {**tensors, one: {**tensors[one], state: digits}},
            {**tensors, f"{one}x": tensors[one]},
            {name: states for name, states in tensors.items() if name != one},
        )
    )


# Files with an index.


def sharded(content: bytes) -> str:
    """Read a folder of safetensors with or without an index; what is read is what stands there."""
    random = ByteRandom(content)
    place = Path(tempfile.mkdtemp(dir=scratch()))
    try:
        root = place / "in"
        count = random.choice((1, 1, 2, 3))
        stem = random.choice(("model", "model", "pytorch", "optimizer"))
        names = [f"{stem}-{n + 1:05d}-of-{count:05d}.safetensors" for n in range(count)]
        if count == 1 and random.randrange(2):
            names = [f"{stem}.safetensors"]
        placed: dict[str, dict[str, Stored]] = {name: {} for name in names}
        for n in range(random.randrange(1, 7)):
            key = random.choice(("a", "b", "c.weight", "c.weight/exp_avg", "d/fp32", f"x{n}"))
            dtype = DTYPES[random.choice(sorted(CODES))]
            shape = random.choice(SHAPES[:6])
            placed[random.choice(names)][key] = some_array(random, dtype, shape)
        for name, arrays in placed.items():
            write_file(root / name, arrays, random.sample(sorted(arrays), len(arrays)))
        if random.randrange(2):
            index: Any = _index_of(placed)
            for _ in range(random.randrange(2)):
                index = changed(random, index, is_json=True)
            try:
                text = json.dumps(index)
                (root / f"{stem}.safetensors.index.json").write_text(text)
            except (ValueError, TypeError, UnicodeEncodeError):
                return "cannot be spelled"
        if random.randrange(4) == 0:
            path = root / random.choice(names)
            path.rename(path.with_name(random.choice((*names, "other.safetensors"))))
        return _require_read(random, root, place / "out")
    finally:
        shutil.rmtree(place)


def _index_of(placed: dict[str, dict[str, Stored]]) -> dict[str, Any]:
    size = sum(len(a.content) for arrays in placed.values() for a in arrays.values())
    places = {key: name for name, arrays in placed.items() for key in arrays}
    return {"metadata": {"total_size": size}, "weight_map": places}


def _stored(root: Path) -> Iterator[tuple[str, str, str, bytes]]:
    """File, key, dtype with shape, and bytes of everything in the files of a folder."""
    for path in sorted(root.glob("*.safetensors")):
        whole = path.read_bytes()
        start = 8 + int.from_bytes(whole[:8], "little")
        for key, entry in json.loads(whole[8:start]).items():
            if key != "__metadata__":
                first, last = entry["data_offsets"]
                kind = f"{entry['dtype']} {entry['shape']}"
                yield path.name, key, kind, whole[start + first : start + last]


def _require_read(random: Random, root: Path, out: Path) -> str:
    there = [*_stored(root)]
    try:
        catalog = api.open(root)
    except RestrideError as error:
        str(error)
        return "refused"
    read_from = {file.name for file in catalog.files}
    right: dict[str, tuple[str, bytes]] = {}
    for name, key, kind, data in there:
        if name in read_from:
            assert key not in right, f"{key} is there twice, and one was taken"
            right[key] = (kind, data)
    told = {n for f in catalog.findings if f.kind == "ignored-files" for n in f.details["files"]}
    assert {name for name, *_ in there} <= read_from | told, "a file is left out without a word"
    found: dict[str, tuple[str, bytes]] = {}
    for tensor in catalog.tensors:
        for state, entry in tensor.states.items():
            key = tensor.name if state == "weight" else f"{tensor.name}/{state}"
            kind = f"{CODES[entry.dtype.name]} {list(entry.layout.full_shape)}"
            found[key] = (
                kind,
                gather(catalog, entry).tobytes() if entry.layout.full_numel else b"",
            )
    assert found == right
    size = random.choice((None, 1, 40, 4000))
    try:
        api.convert(root, out, states="all", max_shard_nbytes=size, budget_nbytes=1 << 22)
    except RestrideError as error:
        str(error)
        assert not out.exists(), "after an error there is something under the final name"
        return "read, not converted"
    again = {key: (kind, data) for _, key, kind, data in _stored(out)}
    # Of a master copy without a weight, a weight is made.
    made = {key: right[f"{key}/fp32"] for key in again.keys() - right.keys()}
    assert again == right | made, "what was written is not what stood there"
    return "converted"
