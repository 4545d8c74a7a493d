"""Fold trained detectors, compare their scores, and draw what they detect.

    NORMKIT_DATA=FOLDER python benchmarks/detection.py fold RUN RUN ... --out results/detection/folded.json
    NORMKIT_DATA=FOLDER python benchmarks/detection.py picture RUN --out docs/pictures/detection.png
    python benchmarks/detection.py table results/detection/layer results/detection/un

`fold` scores each run's model on its whole test split, folds it, and scores what is left. `picture` shows scenes spread
evenly over the test split, above as they were outlined, below what the model finds with a score above a half. `table`
writes the table of docs/detection.md from result files.
"""

import argparse
import json
from pathlib import Path

import torch
from normkit_papers.models.torchvision_ops import load_torchvision
from normkit_papers.report import markdown
from normkit_papers.train.environment import environment
from normkit_papers.train.fold_run import fold_run
from normkit_papers.train.folder import load
from normkit_papers.train.pairs import spread
from normkit_papers.train.source import open_task

COLORS = ["#ff3b30", "#34c759", "#0a84ff", "#ffd60a", "#bf5af2", "#ff9f0a", "#64d2ff", "#ff375f"]
HEIGHT = 230  # of a scene in the picture


def folded(folders: list[Path]) -> dict[str, object]:
    """Scores of each run before and after folding."""
    rows = []
    for folder in folders:
        loaded = load(folder)
        after, report = fold_run(loaded)
        rows.append(
            {
                "norm": loaded.run.model.norm,
                "parameters": sum(p.numel() for p in loaded.model.parameters()),
                "norms": len(report),
                "outcomes": {action: report.count(action) for action in sorted({row.action for row in report})},
                "max_error": report.max_error,
                "before": open_task(loaded).score_test(),
                "after": open_task(after).score_test(),
            }
        )
        print(table(rows[-1:]))
    return {"where": environment(), "runs": [str(folder) for folder in folders], "rows": rows}


def table(rows: list[dict]) -> str:
    """Rows of the page's table."""
    lines = []
    for row in rows:
        scores = [f"{row[when][key]:.2f}" for key in ("box_ap", "mask_ap") for when in ("before", "after")]
        outcomes = ", ".join(f"{count} {action}" for action, count in row["outcomes"].items())
        lines.append(f"| {row['norm']} | {' | '.join(scores)} | {outcomes} | {row['max_error']:.0e} |")
    return "\n".join(lines)


HEAD = (
    "norm", "box AP", "AP50", "AP75", "mask AP", "AP50", "AP75", "AP calibrated", "loss, first 20 steps", "last 20",
    "test",
)  # fmt: skip


def results(folders: list[Path]) -> str:
    """The table of trained runs, a line a result file."""
    lines = []
    for folder in folders:
        result = json.loads((folder / "result.json").read_text())
        running, again = result["scores"]["running"], result["scores"].get("calibrated")
        scores = [f"{running[f'{of}_ap{at}']:.1f}" for of in ("box", "mask") for at in ("", "50", "75")]
        counted = f"{again['box_ap']:.1f}, {again['mask_ap']:.1f}" if again else "="
        last = result["curve"][-1]["step"]
        parts = [[p["train_loss"] for p in result["curve"] if low < p["step"] <= low + 20] for low in (0, last - 20)]
        ends = [f"{sum(part) / len(part):.2f}" for part in parts]
        lines.append([result["run"]["model"]["norm"], *scores, counted, *ends, f"{running['loss']:.2f}"])
    return markdown.table(HEAD, lines)


@torch.no_grad()
def picture(folder: Path, count: int, out: Path) -> None:
    """Scenes as they were outlined, and below as the model finds them."""
    load_torchvision()
    from PIL import Image
    from torchvision.utils import draw_bounding_boxes, draw_segmentation_masks

    task = open_task(load(folder))
    test, columns = task.data.test, []
    for at in spread(len(test), count):
        scene, pixels = test.scenes[at], test.image(at)
        (answer,) = task.model([pixels.float() / 255])
        sure = answer["scores"] > 0.5
        truth = (scene.boxes, test.masks(at).bool(), None)
        found = (
            answer["boxes"][sure],
            answer["masks"][sure, 0] > 0.5,
            [f"{score:.2f}" for score in answer["scores"][sure].tolist()],
        )
        column = []
        for boxes, masks, labels in (truth, found):
            colors = [COLORS[i % len(COLORS)] for i in range(len(boxes))]
            shown = pixels
            if len(boxes):
                for mask, color in zip(masks, colors, strict=True):  # of several at once, what overlaps would be black
                    shown = draw_segmentation_masks(shown, mask, alpha=0.5, colors=color)
                shown = draw_bounding_boxes(shown, boxes, labels=labels, colors=colors, width=2)
            column.append(shown)
        columns.append(torch.cat(column, 1))
    sized = []
    for column in columns:
        image = Image.fromarray(column.permute(1, 2, 0).numpy())
        sized.append(
            image.resize((round(image.width * 2 * HEIGHT / image.height), 2 * HEIGHT), Image.Resampling.LANCZOS)
        )
    sheet = Image.new("RGB", (sum(image.width + 4 for image in sized) - 4, 2 * HEIGHT), "white")
    left = 0
    for image in sized:
        sheet.paste(image, (left, 0))
        left += image.width + 4
    sheet.quantize(128).save(out, optimize=True)
    print(f"{out}: {sheet.width} x {sheet.height}, {out.stat().st_size / 1024:.0f} KB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("fold", "picture", "table"))
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--scenes", type=int, default=4)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.what == "table":
        print(results(given.runs))
        return
    if given.out is None:
        parser.error("--out is missing: where to write")
    if given.what == "picture":
        picture(given.runs[0], given.scenes, given.out)
        return
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(folded(given.runs), indent=1) + "\n")


if __name__ == "__main__":
    main()
