"""Table 8 of Unified Normalization, from the files that `benchmarks/swin.py` writes."""

import json
from pathlib import Path
from typing import Any

import normkit

FOLDER = Path(normkit.__file__).parents[1] / "benchmarks" / "results"  # in a clone
SCRIPT = "python benchmarks/swin.py"
MODELS = ("swin_t", "mask_rcnn")  # the table's ImageNet and COCO
NORMS = ("layer", "folded")  # its rows


def table8(scale: str) -> dict[tuple[int, int], list[dict[str, Any]]]:
    """Read memory and images a second of eager models in float32, as the paper counts.

    Args:
        scale: "gpu" reads files of GPUs, which have memory, "pocket" those of CPUs; of several files the newest counts.

    Returns:
        Measurements by row and column, in the form of a table's runs; empty without a file.
    """
    files = [(json.loads(path.read_text(encoding="utf8")), path) for path in sorted(FOLDER.glob("swin-*.json"))]
    of_scale = {"gpu": True, "pocket": False}
    files = [(made, path) for made, path in files if of_scale.get(scale) is any(r["peak_mb"] for r in made["rows"])]
    if not files:
        return {}
    made, path = max(files, key=lambda each: each[0]["where"]["time"])
    found: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for row in made["rows"]:
        if (row["runtime"], row["precision"]) == ("eager", "fp32") and row["model"] in MODELS and row["norm"] in NORMS:
            place = NORMS.index(row["norm"]), 2 * MODELS.index(row["model"])
            for column, key in enumerate(("peak_mb", "images_per_s")):
                if row[key] is not None:
                    found[place[0], place[1] + column] = [_record(row, row[key], made["where"], path)]
    return found


def _record(row: dict[str, Any], value: float, where: dict[str, Any], path: Path) -> dict[str, Any]:
    options = f"--models {row['model']} --precisions {row['precision']} --batch {row['batch']}"
    return {
        "seed": None,
        "folder": path.relative_to(FOLDER.parents[1]).as_posix(),
        "value": value,
        "error": None,
        "status": "done",
        "seconds": None,
        "command": f"{SCRIPT} {options} --rounds {row['rounds']} --threads {where['threads']}",
        "data": f"{row['batch']} images of {row['size']} at a time, random weights",
        **{name: where[name] for name in ("commit", "dirty", "device", "threads", "torch", "time")},
    }
