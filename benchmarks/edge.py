"""Transformers without norms on small devices.

These are Ethos-U (as Vela estimates), XNNPACK, and circuits of proofs (ezkl).

    python benchmarks/edge.py ethos   # needs benchmarks/edge-requirements.txt, in an environment of its own
    python benchmarks/edge.py xnnpack # needs pip install -e ".[vision,executorch]"
    python benchmarks/edge.py ezkl --rounds 3  # needs pip install -e ".[export]" ezkl==23.0.5; a proof takes 10 to 20 s

Each model has LayerNorm, `un`, or `un` folded. `two-blocks` is a tiny ViT of this project (width 64, 49 tokens, ReLU)
and `deit-tiny` that of timm, with random weights. `--layer` and `--un` name run folders of image classifiers; their
accuracy is measured before and after quantization. The runs of the page:

    normkit train cifar10_tiny_vit --steps 1500 --warmup 150 --out runs/layer --model.norm layer
    normkit train cifar10_tiny_vit --steps 1500 --warmup 150 --out runs/un --model.norm "un(warmup=450)"

Writes benchmarks/results/edge-TARGET.json, from which `python benchmarks/edge_page.py` fills docs/deploying.md.
"""

import argparse
import contextlib
import csv
import importlib.metadata
import io
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from normkit_papers.models.config import Model
from normkit_papers.models.torchvision_ops import load_torchvision
from normkit_papers.models.vit import TinyViT
from normkit_papers.timing import ROUNDS, measure
from normkit_papers.train.environment import environment
from torch import Tensor, nn

from normkit.files import write_whole
from normkit.fold import fold
from normkit.models import convert, export
from normkit.norms import Norm, StatNorm

RESULTS = Path(__file__).parent / "results"
NORMS = ("layer", "un", "folded")
CALIBRATION = 100  # images


class Case(NamedTuple):
    """A model with its norms, images to calibrate on, and test images with their classes.

    There are no test images for a model that is not trained.
    """

    name: str
    norms: str
    model: nn.Module
    calibration: Tensor
    images: Tensor
    classes: Tensor


# models


def randomize(model: nn.Module) -> nn.Module:
    """Draw gains, biases and statistics of norms, as training leaves them."""
    for module in model.modules():
        if isinstance(module, Norm):
            nn.init.uniform_(module.weight, 0.5, 2.0)
            nn.init.normal_(module.bias, std=0.5)
        if isinstance(module, StatNorm):
            module.running.uniform_(0.5, 2.0)
    return model.eval()


VITS = {  # tiny ViTs of this project: settings, size of images
    "two-blocks": (Model(width=64, hidden=128, depth=2, heads=4), 28),
    "one-head": (Model(width=64, hidden=128, depth=2, heads=1), 28),
    "one-block": (Model(width=16, hidden=32, depth=1, heads=2), 12),
    "width-8": (Model(width=8, hidden=16, depth=1, heads=1), 8),
}
MODELS = (*VITS, "deit-tiny")
PROVED = "width-8"  # the model that is small enough to be proved many times
LOGROWS = 12  # its circuit has 2^12 rows a column


def untrained(name: str) -> tuple[nn.Module, int]:
    """A model with LayerNorm and random weights, and the size of its images."""
    torch.manual_seed(0)
    if name in VITS:
        settings, size = VITS[name]
        return TinyViT(settings, size, 4, 3, 10), size
    load_torchvision()
    import timm

    return timm.create_model("deit_tiny_patch16_224"), 224


def random_cases(name: str) -> Iterator[Case]:
    """The three variants of a model with random weights."""
    layer, size = untrained(name)
    un = randomize(convert(layer, "un"))
    images, none = torch.randn(16, 3, size, size), torch.empty(0)
    folded, _ = fold(un, images[:2])
    for norms, model in zip(NORMS, (randomize(layer), un, folded), strict=True):
        yield Case(name, norms, model, images, none, none)


def trained_cases(folders: dict[str, Path], count: int) -> Iterator[Case]:
    """The three variants of trained image classifiers, with test images of their data set."""
    load_torchvision()
    from normkit_papers.data.images import read_images
    from normkit_papers.train.folder import load
    from normkit_papers.train.images import ImageAugmentation, ImageBatches

    for norms, folder in folders.items():
        run, model, _ = load(folder)
        data = read_images(run.data, held_out=run.images.held_out)
        augmentation = ImageAugmentation(run.images, data, run.model.image_size)
        calibration, _, _ = ImageBatches(data.train, augmentation, None)[0, range(CALIBRATION)]
        images, classes, _ = ImageBatches(data.test, augmentation, None)[0, range(count)]
        name = f"{run.data}, {run.model.depth} blocks"
        yield Case(name, norms, model, calibration, images, classes)
        if norms == "un":
            yield Case(name, "folded", fold(model, calibration[:2])[0], calibration, images, classes)


def cases(given: argparse.Namespace) -> Iterator[Case]:
    """All models that the command line names."""
    for name in given.models:
        yield from random_cases(name)
    folders = {"layer": given.layer, "un": given.un}
    if given.layer and given.un:
        yield from trained_cases(folders, given.test)


@torch.no_grad()
def accuracy(run: Any, images: Tensor, classes: Tensor, batch: int = 1) -> float | None:
    """Percentage of images whose largest logit is that of their class, or None."""
    if not len(classes):
        return None
    found = torch.cat([run(part).argmax(-1) for part in images.split(batch)])
    return round(100 * (found == classes).double().mean().item(), 2)


# Ethos-U


def write_int8(model: nn.Module, calibration: Tensor, path: Path) -> None:
    """Write a LiteRT file in which all is int8.

    PyTorch to LiteRT in float, then ai-edge-quantizer's static recipe.

    The PT2E quantizer of litert-torch keeps softmax and products of two activations in float; this one does not.
    """
    import litert_torch
    from ai_edge_quantizer import quantizer, recipe

    source = path.with_suffix(".float.tflite")
    litert_torch.convert(model, (calibration[:1],)).export(str(source))
    work = quantizer.Quantizer(str(source), recipe.static_wi8_ai8())
    feeds = [{"args_0": image[None].numpy()} for image in calibration]
    work.quantize(work.calibrate({"serving_default": feeds})).export_model(str(path), overwrite=True)


class LiteRT:
    """Run a LiteRT file with int8 input and output on a CPU.

    Its integer arithmetic is what the NPU's operations are specified to compute.
    """

    def __init__(self, path: Path):
        from ai_edge_litert.interpreter import Interpreter

        self.interpreter = Interpreter(str(path))
        self.interpreter.allocate_tensors()
        (self.input,), (self.output,) = self.interpreter.get_input_details(), self.interpreter.get_output_details()
        self.types = Counter(detail["dtype"].__name__ for detail in self.interpreter.get_tensor_details())
        self.operations = Counter(detail["op_name"] for detail in self.interpreter._get_ops_details())
        self.operations.pop("DELEGATE", None)

    def __call__(self, image: Tensor) -> Tensor:
        """Logits, up to scale and shift."""
        scale, zero = self.input["quantization"]
        whole = torch.round(image / scale + zero).clamp(-128, 127).to(torch.int8)
        self.interpreter.set_tensor(self.input["index"], whole.numpy())
        self.interpreter.invoke()
        return torch.from_numpy(self.interpreter.get_tensor(self.output["index"]))


def vela(path: Path, accelerator: str) -> dict[str, float]:
    """Compile a LiteRT file for an Ethos-U, and return what Vela counts and estimates."""
    command = [str(Path(sys.executable).parent / "vela"), str(path), "--accelerator-config", accelerator]
    done = subprocess.run(
        [*command, "--output-dir", str(path.parent)], capture_output=True, text=True, check=True
    ).stdout
    (table,) = path.parent.glob(f"{path.stem}_summary_*.csv")
    (row,) = csv.DictReader(table.open(encoding="utf8"))
    table.unlink()
    counts = {place: int(re.search(rf"{place} operators = (\d+)", done)[1]) for place in ("NPU", "CPU")}
    return {
        "npu": counts["NPU"], "cpu": counts["CPU"], "cycles": int(float(row["cycles_total"])),
        "sram_kib": float(row["sram_memory_used"]), "ms": round(1000 * float(row["inference_time"]), 3),
        "memory": f"{row['system_config']}, {row['memory_mode']}",
    }  # fmt: skip


def ethos(given: argparse.Namespace) -> Iterator[dict]:
    """Operations, cycles and memory on two NPUs, and accuracy in float and in int8."""
    with tempfile.TemporaryDirectory() as folder:
        for case in cases(given):
            path = Path(folder) / f"{case.norms}.tflite"
            with quiet():
                write_int8(case.model, case.calibration, path)
            run = LiteRT(path)
            found = {
                "model": case.name,
                "norms": case.norms,
                "types": dict(run.types),
                "operations": dict(run.operations),
                "float": accuracy(case.model, case.images, case.classes, batch=250),
                "int8": accuracy(run, case.images, case.classes),
                "images": len(case.classes),
            }
            for accelerator in given.accelerators:
                yield {**found, "accelerator": accelerator, **vela(path, accelerator)}


# zero-knowledge proofs


def ezkl(given: argparse.Namespace) -> Iterator[dict]:
    """Rows of the circuit; for the smallest model also seconds of proofs, by turns."""
    os.environ["RAYON_NUM_THREADS"] = "1"
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    import ezkl

    rows, provers = [], []
    with tempfile.TemporaryDirectory() as folder:
        for number, case in enumerate(cases(given)):
            place = Path(folder, str(number))
            place.mkdir()
            with contextlib.chdir(place), quiet():
                torch.onnx.export(case.model, (case.calibration[:1],), "model.onnx", opset_version=15, dynamo=False)
                ezkl.gen_settings("model.onnx", "settings.json", py_run_args=circuit(case.name))
            settings = json.loads((place / "settings.json").read_text(encoding="utf8"))
            rows.append({"model": case.name, "norms": case.norms, "rows": settings["num_rows"]})
            if case.name == PROVED:
                rows[-1]["seconds"] = []
                provers.append((rows[-1]["seconds"], prover(place, case.calibration[:1])))
        for _ in range(given.rounds if provers else 0):
            for seconds, prove in provers:
                start = time.perf_counter()
                prove()
                seconds.append(round(time.perf_counter() - start, 2))
        yield from rows


def circuit(name: str) -> Any:
    """Settings of a circuit: ezkl's own, but smaller tables for the model that is proved."""
    import ezkl

    settings = ezkl.PyRunArgs()
    if name == PROVED:
        settings.logrows, settings.lookup_range = LOGROWS, (-512, 512)
        settings.decomp_base, settings.decomp_legs = 1024, 3
        settings.input_scale = settings.param_scale = 5
    return settings


def prover(place: Path, image: Tensor) -> Callable[[], None]:
    """Set a circuit up, and return a call that proves one inference and checks the proof."""
    import ezkl

    (place / "input.json").write_text(json.dumps({"input_data": [image.flatten().tolist()]}), encoding="utf8")
    with contextlib.chdir(place):
        ezkl.compile_circuit("model.onnx", "circuit", "settings.json")
        ezkl.gen_srs("srs", LOGROWS)
        ezkl.setup("circuit", "vk", "pk", srs_path="srs")
        ezkl.gen_witness("input.json", "circuit", "witness.json")

    def prove() -> None:
        with contextlib.chdir(place):
            ezkl.prove("witness.json", "circuit", "pk", "proof.json", srs_path="srs")
            if not ezkl.verify("proof.json", "settings.json", "vk", srs_path="srs"):
                raise RuntimeError("the proof is wrong")

    return prove


# XNNPACK


class Program:
    """Run an ExecuTorch program."""

    def __init__(self, path: Path):
        from executorch.runtime import Runtime

        self.method = Runtime.get().load_program(path).load_method("forward")

    def __call__(self, image: Tensor) -> Tensor:
        """Logits."""
        return self.method.execute([image.contiguous()])[0]


def lowered(case: Case, numbers: str, path: Path) -> dict[str, Any]:
    """Write a program for XNNPACK, unless it is there, and measure all but its time."""
    notes = path.with_suffix(".json")
    if not notes.exists():
        int8 = {"int8": case.calibration.split(1)} if numbers == "int8" else {}
        done = export(case.model, path, case.calibration[:1], dynamic=False, **int8)
        pieces = done.operations["executorch_call_delegate"]
        row = {
            "model": case.name, "norms": case.norms, "numbers": numbers, "pieces": pieces,
            "outside": sum(done.operations.values()) - pieces, "operations": done.operations,
            "images": len(case.classes), "accuracy": accuracy(Program(path), case.images, case.classes),
        }  # fmt: skip
        notes.write_text(json.dumps(row), encoding="utf8")
    return json.loads(notes.read_text(encoding="utf8"))


def xnnpack(given: argparse.Namespace) -> Iterator[dict]:
    """Pieces that XNNPACK takes, operations outside, time of one image, and accuracy."""
    programs: dict[str, dict[str, tuple[dict, Any]]] = {}
    given.files.mkdir(parents=True, exist_ok=True)
    if given.rounds and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # also the threads that XNNPACK starts later
    for case in cases(given):
        for numbers in given.numbers:
            path = given.files / f"{case.name}-{case.norms}-{numbers}.pte"
            row = lowered(case, numbers, path)
            run = partial(Program(path), case.calibration[:1])
            programs.setdefault(case.name, {})[f"{case.norms} {numbers}"] = row, run
    if given.rounds == 0:
        return
    for found in programs.values():
        timings = measure({label: run for label, (_, run) in found.items()}, given.rounds)
        for label, (row, _) in found.items():
            yield row | {
                "ms": round(1000 * timings.median(label), 3),
                "to_layer": asdict(timings.ratio(label, f"layer {row['numbers']}")),
                "noise": timings.noise, "obstacle": timings.obstacle,
            }  # fmt: skip


# command line


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hold back the progress lines of converters."""
    warnings.simplefilter("ignore")
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


def show(row: dict) -> None:
    """Print a row of the result."""
    print({key: value for key, value in row.items() if key not in ("operations", "types", "memory")}, flush=True)


TARGETS: dict[str, tuple[Callable[[argparse.Namespace], Iterator[dict]], tuple[str, ...], list[str]]] = {
    "ethos": (ethos, ("litert-torch", "ai-edge-quantizer", "ethos-u-vela"), ["two-blocks", "deit-tiny"]),
    "xnnpack": (xnnpack, ("executorch", "torchao"), ["two-blocks", "deit-tiny"]),
    "ezkl": (ezkl, ("ezkl", "onnx"), ["two-blocks", "one-head", PROVED]),
}
"""Functions that measure, the packages whose versions the result names, and models."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("--models", nargs="*", choices=MODELS)
    parser.add_argument("--layer", type=Path, help="a run folder of a classifier trained with LayerNorm")
    parser.add_argument("--un", type=Path, help="the same trained with un")
    parser.add_argument("--test", type=int, default=10_000, help="test images")
    parser.add_argument("--accelerators", nargs="+", default=["ethos-u55-128", "ethos-u65-256"])
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of timing; 0 measures no time")
    parser.add_argument("--numbers", nargs="+", default=["float32"], choices=["float32", "int8"])
    parser.add_argument("--files", type=Path, default=Path("runs/edge"), help="folder of XNNPACK's programs")
    given = parser.parse_args()
    measured, packages, models = TARGETS[given.target]
    given.models = models if given.models is None else given.models
    torch.set_num_threads(1)
    command = shlex.join(["python", "benchmarks/edge.py", *map(tidy, sys.argv[1:])])
    versions = {name: importlib.metadata.version(name) for name in packages}
    rows = []
    for row in measured(given):
        show(row)
        rows.append(row)
        keep(RESULTS / f"edge-{given.target}.json", command, rows, environment("cpu") | versions)


def keep(path: Path, command: str, rows: list[dict], where: dict[str, object]) -> None:
    """Write a result file; rows of models that this command did not measure stay."""
    before = json.loads(path.read_text(encoding="utf8")) if path.exists() else {"commands": {}, "rows": []}
    models = {row["model"]: command for row in rows}
    result = {
        "commands": before["commands"] | models,
        "rows": [row for row in before["rows"] if row["model"] not in models] + rows,
        "where": where,
    }
    write_whole(path, (json.dumps(result, indent=1) + "\n").encode())


def tidy(argument: str) -> str:
    """Shorten the path of a run folder to its name, so that results name no machine's folders."""
    return f"runs/{Path(argument).name}" if "/" in argument else argument


if __name__ == "__main__":
    main()
