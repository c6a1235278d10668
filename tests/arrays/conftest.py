"""The kernel as its source is now, whatever the installation was built from."""

from __future__ import annotations

import importlib.util
import os
import shutil
from contextlib import contextmanager
from pathlib import Path

import pytest

from restride.arrays import _kernel

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "src/restride/arrays").glob("_kernel*.c"))


@pytest.fixture(scope="session")
def hook():
    """The module that compiles the kernel."""
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def kernel_file(hook, tmp_path_factory):
    # Only where there is no compiler: a kernel that one refuses is a failure.
    if not (os.environ.get("CC") or any(map(shutil.which, ("cc", "gcc", "clang")))):
        pytest.skip("there is no C compiler here")
    built = tmp_path_factory.mktemp("kernel") / _kernel.FILE_NAME
    hook.compile_kernel(SOURCES, built)
    return built


@pytest.fixture(scope="session")
def kernels(kernel_file):
    """The kernel with vectors of each width that this machine has."""
    best = _kernel.load(kernel_file)
    return [best.at(level) for level in range(best.level + 1)]


@contextmanager
def using(kernel):
    """Have this kernel do the work, or NumPy where it is None."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_kernel, "KERNEL", kernel)
        yield


@pytest.fixture(scope="session")
def use():
    """`using`, for tests that say themselves which kernel they mean."""
    return using


@pytest.fixture(scope="session")
def each_way(kernels):
    """Calls a function once with NumPy, once with each kernel, and returns the results."""

    def call(function):
        results = []
        for kernel in (None, *kernels):
            with using(kernel):
                results.append(function())
        return results

    return call


@pytest.fixture(scope="module", params=["kernel", "NumPy"])
def both_ways(request):
    """Runs a module with the kernel and without."""
    if request.param == "NumPy":
        with using(None):
            yield
    else:
        with using(_kernel.load(request.getfixturevalue("kernel_file"))):
            assert _kernel.KERNEL is not None
            yield
