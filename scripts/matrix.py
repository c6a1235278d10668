"""Convert what the real engine wrote, resume with the real engine, compare: the table in docs/.

For each source (a model, how it was cut, its ZeRO stage) the engine trains two steps, saves, and
trains two more. For each target the checkpoint is converted, an engine of that shape loads it,
saves at once, and trains the same two steps. A cell of the table says what was the same, bit for
bit:

    states     every tensor and optimizer state that the engine saved right after it had loaded
    peer       the losses, with those of an engine that loaded the peer's own universal folder
    universal  the losses, with those of an engine that loaded our universal folder
    unbroken   the losses, with those of the training that never stopped

Engines of other tensor-parallel sizes add in another order, and some of ZeRO-3 do too, so that
`unbroken` can only be asked where that is the source's; elsewhere the losses are within one percent
of it. Everything that can be asked is asked; a cell fails if one of it differs.

The stages of a pipeline (PP) are uniform. Without ZeRO its engine saves numbers, which are named
with what is said of tied layers, and no engine loads a universal folder.

Models with DeepSpeed's own layers of experts stand beside tensor-parallel ranks that cut the
experts where it says `cut_experts=True`; rules say so of parameters. With `layers_on` the layers of
the source are on as many ranks as it lists, and those of a target all on one number.

Sources with `muon` are trained by DeepSpeed's Muon, which takes other steps without ZeRO; what its
engine saves there is compared by number. Those with `elastic` have no hyperparameters: for ZeRO-0
and ZeRO-3 they are given, for the other stages the engine keeps its own.

    python scripts/matrix.py                     all of it, and write the table
    python scripts/matrix.py --only 'llama.*'    sources whose name matches; write nothing
    python scripts/matrix.py --keep FILE         keep rows, and do not run what is kept again
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from restride import api
from restride.errors import RestrideError
from restride.formats.opening import Told, open_catalog
from restride.testing.contents import file_content
from restride.testing.gather import gather_all

ROOT = Path(__file__).parent.parent
TABLE = ROOT / "docs" / "matrix.md"
# Trained by a loss on their parameters: see `deepspeed_jobs.py`.
WITHOUT_FORWARD = {"bloom", "falcon", "mpt"}
OWN = {"native_moe", "native_residual_moe"}
STEPS = 2
TRIES = 3
NEAR = 0.01


@dataclass(frozen=True)
class Shape:
    """How an engine cuts a model."""

    tp: int
    dp: int
    zero: int
    ep: int = 1
    pp: int | None = None

    @property
    def ranks(self) -> int:
        return self.tp * self.dp * (self.pp or 1)

    def __str__(self) -> str:
        stages = f"PP{self.pp} " if self.pp else ""
        experts = f" EP{self.ep}" if self.ep > 1 else ""
        return f"{stages}TP{self.tp} DP{self.dp}{experts} ZeRO-{self.zero}"


@dataclass(frozen=True)
class Source:
    """A checkpoint that the engine makes."""

    model: str
    shape: Shape
    dtype: str = "fp32"
    more: tuple[tuple[str, Any], ...] = ()
    replicas: str = "check"
    trained: str = ""

    @property
    def name(self) -> str:
        more = "".join(f" {key}={value}" for key, value in self.more)
        return f"{self.model} {self.shape} {self.dtype}{more} {self.trained}".rstrip()


DENSE = (
    Shape(1, 1, 1),
    Shape(1, 2, 2),
    Shape(1, 2, 3),
    Shape(2, 1, 1),
    Shape(2, 2, 1),
    Shape(2, 1, 3),
    Shape(4, 1, 2),
    Shape(1, 2, 0),
)
EXPERTS = (
    Shape(1, 2, 1),
    Shape(1, 2, 1, 2),
    Shape(1, 4, 1, 4),
    Shape(1, 4, 2, 2),
    Shape(1, 2, 3, 2),
)
# Expert-parallel ranks over tensor-parallel ones.
FOLDED = (
    Shape(2, 1, 1, 2),
    Shape(2, 2, 2, 2),
    Shape(2, 2, 1, 4),
    Shape(2, 1, 3, 2),
    Shape(1, 4, 1, 2),
    Shape(2, 1, 0, 2),
)
# DeepSpeed's own layers of experts, which it does not train with ZeRO-3.
OWN_EXPERTS = (
    Shape(1, 1, 1),
    Shape(1, 2, 1, 2),
    Shape(1, 4, 2, 2),
    Shape(1, 4, 1, 4),
    Shape(1, 2, 0, 2),
)
# The same beside tensor-parallel ranks, which hold experts whole, or cut them.
OWN_WHOLE = (
    Shape(1, 2, 1, 2),
    Shape(2, 1, 1, 2),
    Shape(2, 2, 2, 2),
    Shape(2, 2, 1, 4),
    Shape(4, 1, 2, 4),
    Shape(2, 1, 0, 2),
)
OWN_CUT = (
    Shape(1, 2, 2, 2),
    Shape(2, 1, 1),
    Shape(2, 2, 2, 2),
    Shape(2, 4, 1, 2),
    Shape(4, 1, 1),
    Shape(2, 2, 0, 2),
)
STAGES = (
    Shape(1, 2, 1, pp=1),
    Shape(1, 1, 1, pp=2),
    Shape(1, 3, 1, pp=2),
    Shape(1, 2, 1, pp=3),
    Shape(1, 1, 1, pp=4),
    Shape(2, 1, 1, pp=1),
    Shape(2, 1, 1, pp=2),
    Shape(1, 2, 0, pp=2),
)
WIDE_HEADS = (("heads", 16),)
# How the engine is configured for sources that are trained otherwise.
MUON = {"type": "Muon", "params": {"lr": 0.02, "momentum": 0.9, "torch_adam": True}}
TRAINED: dict[str, dict[str, Any]] = {
    "": {},
    "muon": {"optimizer": MUON, "zero_optimization": {"reduce_scatter": False}},
    "elastic": {"zero_optimization": {"elastic_checkpoint": True}},
    "data_first": {"use_data_before_expert_parallelism": True},
}
# How tensor-parallel ranks hold the parameters of models with DeepSpeed's own layers of experts.
RULES = """
format = "restride-rules/1"
rest = "whole"
[[rules]]
match = "**.up.{{weight,bias}}"
layout = "{up}"
[[rules]]
match = "**.down.weight"
layout = "{down}"
"""
CUT_EXPERTS = ("cut_experts", True)
WHOLE_EXPERTS = ("cut_experts", False)
# What an elastic checkpoint leaves out of the one group of `deepspeed_jobs.py`.
LEFT_OUT = [{"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}]
ELASTIC_STAGES = {1, 2}
# Layers of a pipeline (`record_pipeline_checkpoints.py`). The last of the tied ones uses the
# embedding of the first through a function, and has no file.
PIPELINES: dict[str, tuple[str, ...]] = {
    "pipeline": ("embed", "block", "block", "norm"),
    "pipeline_tied": ("embed_tied", "block", "function", "block", "norm", "embed_as_head"),
}
TIED = {"pipeline_tied": {"embed": [0, 5]}}
SOURCES = (
    *(Source("llama", Shape(2, 1, zero)) for zero in (0, 1, 2, 3)),
    *(Source("llama", Shape(1, 2, zero)) for zero in (0, 1, 2, 3)),
    Source("llama", Shape(2, 2, 1)),
    Source("llama", Shape(4, 1, 1)),
    Source("llama", Shape(2, 1, 1), "bf16"),
    Source("llama", Shape(1, 2, 3), "bf16"),
    Source("llama", Shape(2, 1, 1), more=(("hidden", 96), ("heads", 6), ("kv_heads", 3))),
    Source("llama", Shape(1, 2, 1), trained="muon"),
    Source("llama", Shape(2, 1, 2), trained="muon"),
    Source("llama", Shape(1, 2, 3), trained="muon"),
    Source("llama", Shape(1, 2, 1), trained="elastic"),
    Source("llama_tied", Shape(2, 1, 1)),
    Source("llama_tied", Shape(1, 2, 3)),
    Source("qwen2", Shape(2, 1, 1)),
    Source("codegen", Shape(2, 1, 1), more=WIDE_HEADS),
    Source("codegen", Shape(2, 1, 0), more=WIDE_HEADS),
    Source("codegen", Shape(2, 2, 1), "bf16", more=WIDE_HEADS),
    Source("gptbigcode", Shape(2, 1, 1), replicas="first"),
    Source("gpt2", Shape(1, 2, 1)),
    Source("gpt2", Shape(1, 2, 3)),
    Source("opt", Shape(2, 1, 1)),
    Source("bloom", Shape(2, 1, 1)),
    Source("falcon", Shape(2, 1, 1)),
    Source("gptneox", Shape(2, 1, 1)),
    Source("mpt", Shape(2, 1, 1)),
    Source("mixtral", Shape(2, 1, 1)),
    *(Source("mixtral", Shape(1, 2, zero, 2)) for zero in (1, 2, 3)),
    Source("qwen3moe", Shape(1, 4, 1, 4)),
    Source("mixtral", Shape(2, 1, 1, 2)),
    Source("mixtral", Shape(2, 2, 3, 2)),
    Source("mixtral", Shape(2, 1, 0, 2)),
    *(Source("native_residual_moe", Shape(1, 2, zero, 2)) for zero in (0, 1, 2)),
    Source("native_moe", Shape(1, 2, 1, 2), "bf16"),
    *(Source("native_moe", Shape(1, 4, zero, 4), more=(("layers_on", "2, 4"),)) for zero in (0, 1)),
    *(
        Source("native_residual_moe", Shape(tp, 2, zero, 2), more=(WHOLE_EXPERTS,))
        for tp, zero in ((1, 1), (2, 0), (2, 1))
    ),
    *(
        Source("native_residual_moe", Shape(tp, 2, zero, 2), more=(CUT_EXPERTS,))
        for tp, zero in ((1, 1), (2, 0), (2, 2))
    ),
    Source("native_moe", Shape(2, 2, 1), more=(CUT_EXPERTS,), trained="data_first"),
    Source("pipeline", Shape(1, 1, 1, pp=2)),
    Source("pipeline", Shape(1, 2, 1, pp=2), "bf16"),
    Source("pipeline", Shape(1, 2, 1, pp=1)),
    Source("pipeline", Shape(1, 1, 1, pp=4)),
    Source("pipeline", Shape(2, 1, 1, pp=2)),
    Source("pipeline_tied", Shape(1, 2, 1, pp=2)),
    Source("pipeline_tied", Shape(1, 2, 1, pp=2), "bf16"),
    Source("pipeline", Shape(1, 2, 0, pp=2)),
    Source("pipeline", Shape(2, 1, 0, pp=2)),
    Source("pipeline_tied", Shape(1, 2, 0, pp=2)),
    Source("pipeline", Shape(1, 1, 1, pp=2), trained="elastic"),
    Source("pipeline", Shape(1, 2, 1, pp=2), trained="muon"),
)


@dataclass
class Row:
    """What became of one source: by target what was the same, or what failed."""

    source: Source
    peer: str = ""
    cells: dict[str, str] = field(default_factory=dict)


class Engine:
    """The server of `deepspeed_jobs.py`."""

    def __init__(self, extensions: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, ROOT / "scripts" / "deepspeed_jobs.py"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            # The peer goes through sets, and speaks of what comes first.
            env={
                **os.environ,
                "TORCH_EXTENSIONS_DIR": str(extensions),
                "PYTHONHASHSEED": "0",
            },
        )

    def ask(self, **job: Any) -> dict[str, Any]:
        """Have a job done; again where a busy machine did not get to its end in time."""
        for _ in range(TRIES):
            answer = self._ask_once(job)
            if answer.get("error") != "timeout":
                break
        return answer

    def _ask_once(self, job: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def close(self) -> None:
        self._process.communicate()


def job_of(source: Source, shape: Shape) -> dict[str, Any]:
    if source.model in PIPELINES:
        config = {"bf16": {"enabled": True}} if source.dtype == "bf16" else {}
        if source.trained and shape.zero in ELASTIC_STAGES:
            config |= TRAINED[source.trained]
            zero = {"stage": shape.zero, **config["zero_optimization"]}
            config = {**config, "zero_optimization": zero}
        sizes = {"pp": shape.pp, "tp": shape.tp, "dp": shape.dp}
        layers = {"layers": PIPELINES[source.model], "config": config}
        return {"pipeline": {**layers, **sizes}, "world": shape.ranks, "zero": shape.zero}
    job = {
        "model": source.model,
        "world": shape.tp * shape.dp,
        "tp": shape.tp,
        "zero": shape.zero,
        "dtype": source.dtype,
        **dict(source.more),
    }
    if source.shape.ep > 1 or shape.ep > 1:
        job["ep"] = shape.ep
    if "layers_on" in job and shape is source.shape:
        job["ep"] = [int(number) for number in job["layers_on"].split(", ")]
    if source.model in OWN:
        return job | ({"config": TRAINED[source.trained]} if source.trained else {})
    if source.shape.ep > 1 and max(shape.tp, source.shape.tp) > 1:
        preset = {"preset_model": source.model}
        job["config"] = {"expert_parallel": preset}
        if shape.tp > 1:
            job["config"]["tensor_parallel"] = preset
    if source.trained and (source.trained != "elastic" or shape.zero in ELASTIC_STAGES):
        job["config"] = TRAINED[source.trained]
    return job


def stages_of(source: Source, shape: Shape) -> dict[str, Any]:
    """What is said of the stages of a target: the engine's are uniform."""
    if shape.pp in {None, source.shape.pp}:
        return {"pp": shape.pp, "pp_tied": ties_of(source)}
    count = len(PIPELINES[source.model])
    tied = TIED.get(source.model, ties_of(source))
    return {"pp": shape.pp, "pp_layers": f"uniform:{count}", "pp_tied": tied}


def ties_of(source: Source) -> dict[str, list[int]] | None:
    """What has to be said of tied layers: without ZeRO, whether there are any."""
    return TIED.get(source.model, {}) if source.shape.pp and source.shape.zero == 0 else None


class Case:
    """One source, and everything that is made of it."""

    def __init__(self, engine: Engine, source: Source, folder: Path) -> None:
        self._engine = engine
        self._source = source
        self._folder = folder
        self._at = folder / "source"
        self.row = Row(source)
        self._told: set[str] = set()

    def start(self) -> bool:
        """Train the source, and let the peer convert it."""
        answer = self._engine.ask(
            **job_of(self._source, self._source.shape),
            steps=STEPS,
            more=STEPS,
            save=str(self._at),
        )
        if not answer["ok"]:
            self.row.peer = f"the engine cannot train it: {short(answer['error'])}"
            return False
        self._unbroken = answer["losses"][STEPS:]
        peer = self._engine.ask(
            peer=[str(self._at / "step"), str(self._folder / "peer" / "step")], seconds=60
        )
        self._has_peer = peer["ok"]
        if peer.get("error") == "timeout":
            self.row.peer = "FAILED: the peer's converter does not end"
            return False
        said = short(peer.get("error", "").replace(f"{self._folder}/", ""))
        self.row.peer = "converts" if peer["ok"] else said
        report = api.convert(
            self._at,
            self._folder / "weights",
            states="all",
            replicas=self._source.replicas,
            pp_tied=ties_of(self._source),
        )
        self._states = gather_all(api.open(report.out))
        return True

    def resume(self, shape: Shape) -> None:
        """Try one target by each way there is."""
        same: list[str] = []
        try:
            losses = self._sharded(shape, same)
            self._compare_peer(shape, losses, same)
            self._compare_universal(shape, losses, same)
            if losses == self._unbroken:
                same.append("unbroken")
            elif self._adds_alike(shape):
                require_same("losses", losses, self._unbroken, "the training that never stopped")
            else:
                require_near(losses, self._unbroken)
        except (DifferentError, RestrideError) as error:
            self.row.cells[str(shape)] = f"FAILED: {short(str(error))}"
            return
        self.row.cells[str(shape)] = ", ".join(same) or "loads"

    def _adds_alike(self, shape: Shape) -> bool:
        """Whether an engine of that shape adds in the order of the source's."""
        mine = self._source.shape
        # Muon takes other steps without ZeRO, and its products round otherwise in other buffers.
        if self._source.trained == "muon" and (shape.zero == 0 or shape.dp != mine.dp):
            return False
        if mine.pp:  # what a stage adds up does not depend on the others
            return shape.tp == mine.tp
        # Without ZeRO gradients of folded experts are added in another order.
        folds = mine.ep > 1 and mine.tp > 1 and self._source.model not in OWN
        if folds and (shape.zero == 0) != (mine.zero == 0):
            return False
        return (shape.tp, shape.ep, shape.zero == 3) == (mine.tp, mine.ep, mine.zero == 3)

    def _sharded(self, shape: Shape, same: list[str]) -> list[str]:
        """Convert to the files of that shape, load them, and look at what the engine holds."""
        out, again = self._folder / "out", self._folder / "again"
        shutil.rmtree(again, ignore_errors=True)
        api.convert(
            self._at,
            out,
            to="deepspeed",
            tp=shape.tp,
            dp=shape.dp,
            zero=shape.zero,
            ep=shape.ep,
            **stages_of(self._source, shape),
            hyperparameters=self._hyperparameters(shape),
            rules=self._rules(),
            zero_init=False if self._source.trained == "muon" and shape.zero == 3 else None,
            plan=False if self._source.model == "codegen" else None,
            replicas=self._source.replicas,
            force=True,
        )
        losses = self._losses(shape, load=str(out), resave=str(again))
        if self._source.replicas == "check":
            if not shape.pp and is_unmatched(again):
                require_same_optimizers(out, again)
            else:
                self._compare_states(again)
            same.append("states")
        return losses

    def _hyperparameters(self, shape: Shape) -> Path | None:
        """A file of what the source lacks, where the engine of the target does not do without."""
        if self._source.trained != "elastic" or shape.zero in ELASTIC_STAGES:
            return None
        file = self._folder / "hyperparameters.json"
        rate = {"lr": 0.01} if self._source.shape.pp else {}
        file.write_text(json.dumps([{**LEFT_OUT[0], **rate}]), "utf-8")
        return file

    def _rules(self) -> Path | None:
        """A file that says how ranks hold what no preset knows."""
        is_cut = dict(self._source.more).get("cut_experts")
        if is_cut is None:
            return None
        file = self._folder / "rules.toml"
        layouts = ("column", "row") if is_cut else ("whole", "whole")
        file.write_text(RULES.format(up=layouts[0], down=layouts[1]), "utf-8")
        return file

    def _compare_states(self, again: Path) -> None:
        ties = TIED.get(self._source.model, {}) if self._source.shape.pp else {}
        tied = {key: tuple(numbers) for key, numbers in ties.items()}
        held = gather_all(open_catalog(again, told=Told(pp_tied=tied)))
        for key, expected in self._states.items():
            # The weights of a ZeRO-3 engine are its master copies; a tied one has several names.
            if key in held and held[key].tobytes() != expected.tobytes():
                raise DifferentError(f"{key} is not what was stored")
        moments = ("/exp_avg", "/exp_avg_sq", "/momentum_buffer")
        missing = {key for key in self._states.keys() - held.keys() if key.endswith(moments)}
        if missing:
            raise DifferentError(f"{min(missing)} and {len(missing) - 1} more were not loaded")

    def _compare_peer(self, shape: Shape, losses: list[str], same: list[str]) -> None:
        # Of DeepSpeed's own layers of experts, universal folders do not tell whose each one is.
        if not self._has_peer or self._is_miscounted(shape) or self._source.model in OWN:
            return
        answer = self._resumed(shape, load=str(self._folder / "peer"), universal=True)
        if answer["ok"]:
            require_same("losses", losses, answer["losses"], "the peer's universal folder")
            same.append("peer")

    def _compare_universal(self, shape: Shape, losses: list[str], same: list[str]) -> None:
        """Our own universal folder, in the shape that the target loads."""
        if shape.zero == 0:
            return
        if self._source.model in OWN and shape.ep > 1:
            same.append("(universal: for layers with ep_size=1)")
            return
        if dict(self._source.more).get("cut_experts") and shape.tp > 1:
            same.append("(universal: the engine takes even cuts alone)")
            return
        if not self._has_universal(shape):
            same.append("(no universal: the engine loads the states of Adam alone)")
            return
        if self._is_miscounted(shape):
            same.append("(universal: the engine counts a step once for each sub-group)")
            return
        out = self._universal(shape)
        answer = self._resumed(shape, load=str(out), universal=True)
        if answer["ok"]:
            require_same("losses", losses, answer["losses"], "our universal folder")
            same.append("universal")
        else:
            same.append(f"(no universal: {short(answer['error'])})")

    def _is_miscounted(self, shape: Shape) -> bool:
        """Whether an engine of ZeRO-3 counts wrongly from a universal folder, the peer's as well.

        Its sub-groups share the tensor of the step, and each counts it up: no oracle.
        """
        if shape.zero != 3 or not self._has_universal(shape):
            return False
        self._universal(shape)
        return "shared-step" in self._told

    def _has_universal(self, shape: Shape) -> bool:
        """Whether there is a universal folder for that stage."""
        return self._source.trained != "muon" or shape.zero != 3

    def _universal(self, shape: Shape) -> Path:
        """Convert to the universal folder for that stage, once."""
        out = self._folder / ("universal-3" if shape.zero == 3 else "universal")
        if not out.exists():
            report = api.convert(
                self._at,
                out,
                to="universal",
                stage=3 if shape.zero == 3 else 1,
                replicas=self._source.replicas,
                pp_tied=ties_of(self._source),
            )
            if shape.zero == 3:
                self._told = {finding.kind for finding in report.findings}
        return out

    def _losses(self, shape: Shape, **options: Any) -> list[str]:
        answer = self._resumed(shape, **options)
        if not answer["ok"]:
            raise DifferentError(f"the engine does not load it: {answer['error']}")
        losses: list[str] = answer["losses"]
        return losses

    def _resumed(self, shape: Shape, **options: Any) -> dict[str, Any]:
        job = job_of(self._source, shape)
        answer = self._engine.ask(**job, skip=STEPS, steps=STEPS, **options)
        if answer.get("error") == "timeout":  # which says nothing of what was asked
            raise DifferentError("the engine does not end")
        return answer


class DifferentError(Exception):
    """Something is not the same."""


def require_same(what: str, ours: list[str], theirs: list[str], whose: str) -> None:
    if ours != theirs:
        numbers = [[float.fromhex(text) for text in side] for side in (ours, theirs)]
        raise DifferentError(f"{what} {numbers[0]} are not those of {whose}, {numbers[1]}")


def is_unmatched(folder: Path) -> bool:
    """Whether an optimizer without ZeRO has numbers that nothing tells the names of."""
    return any(finding.kind == "unmatched-states" for finding in api.open(folder).findings)


def require_same_optimizers(ours: Path, theirs: Path) -> None:
    """Hold the states in the model file as they are: by number."""
    name = "step/mp_rank_00_model_states.pt"
    mine, other = (file_content(folder / name)["optimizer"]["state"] for folder in (ours, theirs))
    if mine != other:
        raise DifferentError("the optimizer's states are not what was stored")


def require_near(ours: list[str], theirs: list[str]) -> None:
    """Losses differ by no more than the order of additions explains."""
    pairs = [(float.fromhex(a), float.fromhex(b)) for a, b in zip(ours, theirs, strict=True)]
    if not all(abs(a - b) <= NEAR * abs(b) for a, b in pairs):
        raise DifferentError(f"losses and those of the training that never stopped are {pairs}")


def short(text: str) -> str:
    line = " ".join(text.split())
    return (line if len(line) < 160 else line[:157] + "...").replace("|", "/")


def targets_of(source: Source) -> tuple[Shape, ...]:
    if source.model in OWN:
        own = {None: OWN_EXPERTS, True: OWN_CUT, False: OWN_WHOLE}
        return own[dict(source.more).get("cut_experts")]
    if source.shape.ep > 1:
        return FOLDED if source.shape.tp > 1 else EXPERTS
    if source.model == "gpt2":  # the engine has no tensor parallelism for it
        return tuple(shape for shape in DENSE if shape.tp == 1)
    if source.model in PIPELINES:
        return tuple(shape for shape in STAGES if is_possible(source, shape))
    if source.model in WITHOUT_FORWARD:  # a loss on parameters needs them whole on every rank
        return tuple(shape for shape in DENSE if shape.zero < 3)
    return DENSE


COLUMNS = (DENSE, EXPERTS, FOLDED, OWN_EXPERTS, OWN_WHOLE, OWN_CUT, STAGES)


def columns_of(source: Source) -> tuple[Shape, ...]:
    """The table that a source is in: of its targets, or of some more that it has not."""
    targets = targets_of(source)
    if targets in COLUMNS:
        return targets
    return next(shapes for shapes in COLUMNS if {*targets} <= {*shapes})


def is_possible(source: Source, shape: Shape) -> bool:
    """Whether an engine of a pipeline loads such files, and the source says how it is cut."""
    if shape.zero == 0 and source.dtype == "bf16":
        return False
    # Muon updates no norm, and the last stage of many has nothing else.
    if source.trained == "muon" and ((shape.pp or 1) > 2 or shape.zero == 0):
        return False
    return shape.tp in {1, source.shape.tp}


def run(
    sources: list[Source], shapes: tuple[Shape, ...] | None = None, keep: Path | None = None
) -> list[Row]:
    """Run the cases of these sources, by default each with all its targets."""
    kept = json.loads(keep.read_text("utf-8")) if keep and keep.exists() else {}
    rows = []
    with tempfile.TemporaryDirectory() as extensions:
        engine = Engine(Path(extensions))
        for source in sources:
            if source.name in kept:
                rows.append(Row(source, **kept[source.name]))
                continue
            with tempfile.TemporaryDirectory() as folder:
                case = Case(engine, source, Path(folder))
                rows.append(case.row)
                print(source.name, flush=True)
                if not case.start():
                    print(f"  {case.row.peer}", flush=True)
                    continue
                for shape in shapes or targets_of(source):
                    started = time.perf_counter()
                    case.resume(shape)
                    seconds = time.perf_counter() - started
                    print(f"  {shape}: {case.row.cells[str(shape)]} ({seconds:.1f} s)", flush=True)
            kept[source.name] = {"peer": case.row.peer, "cells": case.row.cells}
            if keep:
                keep.write_text(json.dumps(kept, indent=1), "utf-8")
        engine.close()
    return rows


def table(rows: list[Row]) -> str:
    """The rows in Markdown, one table for each set of targets."""
    explained = (__doc__ or "").split("    python scripts")[0].partition("\n\n")[2].strip()
    parts = ["# What the real engine makes of every conversion", "", explained, ""]
    for shapes in COLUMNS:
        names = [str(shape) for shape in shapes]
        known = [row for row in rows if row.cells and columns_of(row.source) == shapes]
        if known:
            parts.append("| source | the peer's converter | " + " | ".join(names) + " |")
            parts.append("|" + "---|" * (len(names) + 2))
            parts += [
                f"| {row.source.name} | {row.peer} | "
                + " | ".join(row.cells.get(name, "-") for name in names)
                + " |"
                for row in known
            ]
            parts.append("")
    parts += [f"{row.source.name}: {row.peer}." for row in rows if not row.cells]
    return "\n".join(parts) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description="Resume with the real engine, and compare.")
    parser.add_argument("--only", metavar="PATTERN", help="sources whose name matches")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="rows that were run before")
    options = parser.parse_args()
    chosen = [s for s in SOURCES if not options.only or re.search(options.only, s.name)]
    rows = run(chosen, keep=options.keep)
    if not options.only:
        TABLE.write_text(table(rows), "utf-8")
    told = [text for row in rows for text in (row.peer, *row.cells.values())]
    failed = [text for text in told if text.startswith("FAILED")]
    print(f"{sum(len(row.cells) for row in rows)} cells, {len(failed)} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
