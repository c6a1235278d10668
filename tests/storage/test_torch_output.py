"""Files that say the same hold one copy of it: a run may have thousands of them."""

from __future__ import annotations

from restride.storage.torch_output import FileDraft, TorchOutput
from restride.testing.catalogs import catalog_of


def test_files_that_say_the_same_share_it():
    output = TorchOutput(catalog_of({}))

    for name, value in (("a", 1), ("b", 1), ("c", 2)):
        output.add(FileDraft(name), {"long" * 1000: value})

    a, b, c = (file.literals[0][1] for file in output.finish().output.files)
    assert a is b
    assert a != c
