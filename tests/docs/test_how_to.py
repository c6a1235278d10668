"""What the how-to pages show is what happens, with checkpoints that the real engine wrote."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import pytest

from restride import api
from restride.storage.torch_zip import open_torch_zip
from restride.testing.command_line import run
from restride.testing.documents import blocks_of, links_of, matches, sessions_of
from restride.testing.inert_values import save_value

if TYPE_CHECKING:
    from collections.abc import Callable

Copied: TypeAlias = "Callable[[Path, Path], Path]"

LLAMA = '{"model_type": "llama", "num_attention_heads": 8, "num_key_value_heads": 4}'
PAGES = Path(__file__).resolve().parents[2] / "docs" / "how-to"
DATA = Path(__file__).resolve().parents[1] / "data"
PIPELINE = DATA / "deepspeed_pipeline" / "tied_z1"
LORA = DATA / "deepspeed_lora" / "z2"


def as_it_is(copied: Copied, source: Path, folder: Path) -> None:
    copied(source, folder)


def as_the_trainer_leaves_it(copied: Copied, source: Path, folder: Path) -> None:
    copied(source / "step", folder / "global_step500")
    (folder / "latest").write_text("global_step500")
    (folder / "config.json").write_text(LLAMA)
    (folder / "trainer_state.json").write_text("{}")


def beside_a_config(copied: Copied, source: Path, folder: Path) -> None:
    copied(source, folder)
    (folder / "config.json").write_text(LLAMA)


def that_says_nothing_of_its_cut(copied: Copied, source: Path, folder: Path) -> None:
    beside_a_config(copied, source, folder)
    (folder / "config.json").write_text(LLAMA[:-1] + ', "vocab_size": 128}')
    for file in folder.rglob("*model_states.pt"):
        value = open_torch_zip(file).value
        assert isinstance(value, dict)
        del value["universal_checkpoint_info"]
        save_value(folder / "new", value)
        (folder / "new").replace(file)


def on_four_ranks(_copied: Copied, source: Path, folder: Path) -> None:
    api.convert(source, folder, to="deepspeed", tp=1, dp=4, ep=4, zero=1)


def beside_an_earlier_save(copied: Copied, source: Path, folder: Path) -> None:
    """The model file is of another run, which had the same model on other ranks."""
    other = folder.parent / "other"
    api.convert(source.parent / "llama_tp2_z1", other, to="deepspeed", tp=1, dp=2, zero=1)
    copied(source, folder.parent / "before")
    copied(source, folder)
    name = "step/mp_rank_00_model_states.pt"
    shutil.copy(other / name, folder / name)
    shutil.rmtree(other)


def of_two_stages(_copied: Copied, _source: Path, folder: Path) -> None:
    shutil.copytree(PIPELINE, folder, ignore=shutil.ignore_patterns("reference_*"))


def of_adapters(_copied: Copied, _source: Path, folder: Path) -> None:
    shutil.copytree(LORA, folder, ignore=shutil.ignore_patterns("reference"))


SETTINGS = {
    "safetensors.md": ("llama_tp1dp2_z3", "checkpoint-500", as_the_trainer_leaves_it),
    "fewer-gpus.md": ("llama_tp1dp2_z2", "checkpoint", as_it_is),
    "tensor-parallel.md": ("llama_tp2_z1", "checkpoint", beside_a_config),
    "experts.md": ("mixtral_ep2_z1", "checkpoint", on_four_ranks),
    "replicas.md": ("gptbigcode_tp2_z1", "checkpoint", as_it_is),
    "several-machines.md": ("llama_tp2_z1", "checkpoint", as_it_is),
    "pipeline-stages.md": ("", "checkpoint", of_two_stages),
    "silent-cut.md": ("llama_tp2_z1", "checkpoint", that_says_nothing_of_its_cut),
    "lora.md": ("", "checkpoint-500", of_adapters),
    "wrong-loss.md": ("llama_tp1dp2_z1", "checkpoint", beside_an_earlier_save),
}
# What a page shows that exits with 1.
FINDINGS = {
    ("replicas.md", "restride check checkpoint"),
    ("wrong-loss.md", "restride check checkpoint"),
    ("wrong-loss.md", "restride diff before checkpoint --states weights"),
}


@pytest.mark.parametrize("page", sorted(path.name for path in PAGES.iterdir()))
def test_every_command_of_a_page_writes_what_the_page_shows(
    page: str,
    shared: Path,
    tmp_path: Path,
    copied: Copied,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source, name, place = SETTINGS[page]
    place(copied, shared / "checkpoints" / source, tmp_path / name)
    monkeypatch.chdir(tmp_path)

    assert sessions_of(PAGES / page)
    for command, shown in sessions_of(PAGES / page):
        ran = run(*shlex.split(command)[1:])
        assert ran.code == ((page, command) in FINDINGS), ran.err
        assert matches(shown, ran.out), f"$ {command}\n{ran.out}"


@pytest.mark.parametrize("page", sorted(path.name for path in PAGES.iterdir()))
def test_every_link_of_a_page_to_a_file_resolves(page: str) -> None:
    for target in links_of(PAGES / page):
        assert (PAGES / target).exists(), target


@pytest.mark.interop
@pytest.mark.parametrize("options", [(), ("--max-shard-size", "100")])
def test_what_the_page_takes_out_of_adapters_is_what_peft_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
) -> None:
    library = pytest.importorskip("safetensors.torch")
    torch = pytest.importorskip("torch")
    (program,) = (
        block.text for block in blocks_of(PAGES / "lora.md") if block.language == "python"
    )
    monkeypatch.chdir(tmp_path)
    assert run("convert", str(LORA), "weights", *options).code == 0

    exec(program, {})  # noqa: S102 - the page says it

    made = library.load_file("adapter/adapter_model.safetensors")
    saved = library.load_file(LORA / "reference" / "adapter_model.safetensors")
    assert made.keys() == saved.keys()
    assert all(torch.equal(tensor, saved[name]) for name, tensor in made.items())
    assert len(made) == 4
    shown = re.search("`restride (diff [^`]*)`", (PAGES / "lora.md").read_text("utf-8"))
    assert shown is not None
    (tmp_path / "checkpoint-500").symlink_to(LORA)
    assert run(*shlex.split(shown[1])).code == 0
