"""The compiled kernel: it does what NumPy does, and nothing depends on its being there."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from restride.arrays import _kernel, _without_kernel
from restride.arrays.fingerprint import MODULUS, Digester, block_weights, weights_of_run

ROOT = Path(__file__).resolve().parents[2]
BLOCK = 1 << 18


@st.composite
def runs(draw):
    """Bytes at any address, and where in an array they start."""
    nbytes = draw(st.one_of(st.integers(0, 3000), st.integers(0, 3 * BLOCK)))
    content = np.random.default_rng(draw(st.integers(0, 99))).integers(
        0, 256, nbytes + 64, dtype=np.uint8
    )
    if draw(st.booleans()):
        largest = draw(st.sampled_from([0x80000000, 0xFFFFFFFF]))
        content[: nbytes // 4 * 4].view("<u4")[:] = largest
    offset = draw(st.integers(0, 63))
    near_an_edge = st.builds(int.__add__, st.sampled_from([BLOCK, 1 << 40]), st.integers(-9, 9))
    start = draw(st.one_of(st.integers(0, 5000), near_an_edge, st.integers(0, 1 << 62)))
    return content[offset : offset + nbytes], start


def aligned(numbers):
    """The same numbers at an address that is a multiple of 64."""
    memory = np.empty(numbers.size + 8, numbers.dtype)
    start = -memory.ctypes.data % 64 // 8
    memory[start : start + numbers.size] = numbers
    return memory[start : start + numbers.size]


@given(run=runs())
def test_every_width_of_vectors_digests_as_numpy_does(each_way, run):
    content, start = run

    digests = each_way(lambda: Digester().digest(content, start))

    assert len(digests) > 1
    assert len(set(digests)) == 1


def test_the_largest_sums_that_there_can_be_are_exact(kernels, monkeypatch):
    content = np.full(BLOCK, 0xFF, np.uint8)
    word, row = 2**24 - 1, 2**54 - 1
    # Of one block, all of whose words and weights are as large as they can be.
    total = 256 * 4 * row * (256 * word * (2**32 - 1)) % MODULUS
    expected = total * sum(block_weights(0)) % MODULUS
    words, rows = aligned(np.full(1024, word, np.uint64)), aligned(np.full(2048, row, np.uint64))
    # Limbs of 12 and 14 bits, the last of which has what is left of 54.
    monkeypatch.setattr(_without_kernel, "_WORD_WEIGHTS", np.full((256, 8), 2.0**12 - 1))
    limbs = np.repeat([2.0**14 - 1] * 3 + [2.0**12 - 1], 2)
    monkeypatch.setattr(_without_kernel, "_ROW_WEIGHTS", np.tile(limbs, (1024, 1)))

    slow = _without_kernel.SlowDigester(7).digest(memoryview(content), 0)

    assert slow == expected
    for kernel in kernels:
        halves = (ctypes.c_uint64 * 2)()
        weights = weights_of_run(0, BLOCK)[2]
        kernel.digest(
            content.ctypes.data, BLOCK, 0, weights, words.ctypes.data, rows.ctypes.data, halves
        )
        assert halves[0] | halves[1] << 64 == expected


def test_bytes_around_a_run_are_not_read_into_its_digest(each_way):
    framed = np.full(5000, 0xAB, np.uint8)
    framed[100:4000] = 0
    content = framed[100:4000]

    assert set(each_way(lambda: Digester().digest(content, 700))) == {0}


def test_bytes_that_are_not_contiguous_are_refused_as_without_the_kernel(each_way):
    strewn = np.zeros(8192, np.uint8)[::2]

    def refused():
        with pytest.raises(ValueError, match="contiguous"):
            Digester().digest(strewn, 0)

    each_way(refused)


def test_the_source_has_the_version_that_the_loader_asks_for(kernel_file):
    assert _kernel.load(kernel_file) is not None


def test_a_library_that_is_missing_broken_foreign_or_of_another_version_is_not_used(
    hook, kernel_file, tmp_path
):
    broken = tmp_path / "broken.so"
    broken.write_bytes(kernel_file.read_bytes()[:500])
    foreign, other = tmp_path / "foreign.c", tmp_path / "other.c"
    foreign.write_text("int restride(void) { return 1; }\n")
    other.write_text("int restride_abi(void) { return -1; }\n")
    for source in (foreign, other):
        hook.compile_kernel([source], source.with_suffix(".so"))

    paths = [tmp_path / "missing.so", broken, foreign.with_suffix(".so"), other.with_suffix(".so")]

    assert [_kernel.load(path) for path in paths] == [None] * 4


@pytest.mark.usefixtures("kernel_file")
@pytest.mark.parametrize("flags", ["-Ofast", "-ffast-math"])
def test_a_compiler_that_changes_how_the_process_computes_is_refused(
    hook, tmp_path, monkeypatch, flags
):
    monkeypatch.setenv("CFLAGS", flags)

    with pytest.raises(OSError, match="would flush denormals in the whole process"):
        hook.compile_kernel(sorted((ROOT / "src/restride/arrays").glob("*.c")), tmp_path / "x.so")


def test_a_width_that_the_machine_does_not_have_is_refused(kernels):
    with pytest.raises(ValueError, match="is not one of 0 to"):
        kernels[-1].at(len(kernels))


def test_a_variable_switches_the_kernel_off():
    program = (
        "from restride.arrays import _kernel, fingerprint; import numpy;"
        "print(_kernel.is_available, fingerprint.Digester().digest(numpy.ones(9, numpy.uint8), 3))"
    )
    printed = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "RESTRIDE_KERNEL": "0", "PYTHONPATH": str(ROOT / "src")},
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()

    assert printed == ["False", str(Digester().digest(np.ones(9, np.uint8), 3))]


def build(target, folder, root=ROOT, **environment):
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", folder],
        cwd=root,
        env={**os.environ, **environment},
        check=True,
        capture_output=True,
        text=True,
    )
    return next(folder.iterdir()), done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.usefixtures("kernel_file")
def test_a_wheel_from_the_source_distribution_holds_the_kernel_and_names_its_platform(tmp_path):
    archive, _ = build("sdist", tmp_path / "sdist")
    subprocess.run(["tar", "xzf", archive, "-C", tmp_path], check=True)
    root = next(tmp_path.glob("restride-*"))

    assert not list(root.rglob("*.so"))

    wheel, _ = build("wheel", tmp_path / "wheel", root)
    with zipfile.ZipFile(wheel) as content:
        content.extractall(tmp_path / "installed")
        tag = content.read(next(n for n in content.namelist() if n.endswith("WHEEL"))).decode()

    assert "-py3-none-" in wheel.name
    assert "-any" not in wheel.name
    assert "Root-Is-Purelib: false" in tag
    arrays = tmp_path / "installed" / "restride" / "arrays"
    assert not [*arrays.glob("*.c"), *arrays.glob("*.h")]
    assert _kernel.load(arrays / _kernel.FILE_NAME) is not None


@pytest.mark.slow
@pytest.mark.parametrize("compiler", ["false", "there-is-no-such-compiler"])
def test_a_wheel_without_a_working_compiler_is_pure_and_says_why(tmp_path, compiler):
    wheel, said = build("wheel", tmp_path, CC=compiler)

    assert wheel.name.endswith("-py3-none-any.whl")
    assert "restride is built without its kernel: " in said
    with zipfile.ZipFile(wheel) as content:
        assert not [name for name in content.namelist() if name.endswith((".so", ".c", ".h"))]


@pytest.mark.usefixtures("kernel_file")
def test_an_editable_install_has_the_kernel_beside_its_source_or_none(hook, tmp_path, monkeypatch):
    arrays = tmp_path / "src" / "restride" / "arrays"
    arrays.mkdir(parents=True)
    for source in (ROOT / "src/restride/arrays").glob("*.[ch]"):
        arrays.joinpath(source.name).write_bytes(source.read_bytes())
    said = []
    app = SimpleNamespace(display_warning=said.append)
    made = hook.CustomBuildHook(str(tmp_path), {}, None, None, str(tmp_path), "wheel", app)
    data = {"pure_python": True, "force_include": {}}

    made.initialize("editable", data)
    made.finalize("editable", data, "")

    assert _kernel.load(arrays / _kernel.FILE_NAME) is not None
    assert data == {"pure_python": True, "force_include": {}}

    # A library of an older source must not outlive a build that fails.
    monkeypatch.setenv("CC", "false")
    made.initialize("editable", data)
    made.finalize("editable", data, "")

    assert len(said) == 1
    assert [path.suffix for path in arrays.iterdir() if path.suffix not in {".c", ".h"}] == []


AT_ONCE = """
import sys, threading
import numpy as np
from restride.arrays.fingerprint import Digester

sys.setswitchinterval(1e-6)
content = np.arange(1 << 16, dtype=np.uint32).view(np.uint8)
together = threading.Barrier(8)
found = set()

def digest():
    digester = Digester()
    together.wait()
    found.add(digester.digest(content, 0))

threads = [threading.Thread(target=digest) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(*found)
"""


def test_the_first_digests_of_a_process_are_right_in_all_threads_at_once():
    """Weights that each thread had made for itself were freed under the others."""
    expected = Digester().digest(np.arange(1 << 16, dtype=np.uint32).view(np.uint8), 0)
    for _ in range(4):
        printed = subprocess.run(
            [sys.executable, "-c", AT_ONCE],
            env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
            check=True,
            capture_output=True,
            text=True,
        ).stdout.split()

        assert printed == [str(expected)]
