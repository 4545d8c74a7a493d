"""Average precision of boxes and masks as COCO defines it, by pycocotools."""

import contextlib
import io
from collections.abc import Sequence
from typing import Any

from torch import Tensor

NAMES = ("ap", "ap50", "ap75", "ap_small", "ap_medium", "ap_large")
KEYS = {
    "bbox": ("image_id", "category_id", "bbox", "score"),
    "segm": ("image_id", "category_id", "segmentation", "score"),
}


def coco_results(number: int, categories: Sequence[int], detections: dict[str, Tensor]) -> list[dict[str, Any]]:
    """Return the detections of an image as rows of COCO's result format.

    Args:
        number: COCO's number of the image.
        categories: COCO's numbers of the labels 1, 2, ....
        detections: Output of a torchvision detector; boxes in pixels, masks as probabilities.
    """
    import numpy as np
    from pycocotools import mask

    rows = []
    boxes = detections["boxes"].double().cpu()
    boxes[:, 2:] -= boxes[:, :2]
    labels, scores = detections["labels"].tolist(), detections["scores"].tolist()
    for box, label, score in zip(boxes.tolist(), labels, scores, strict=True):
        rows.append({"image_id": number, "category_id": categories[label - 1], "bbox": box, "score": score})
    if "masks" in detections:
        solid = (detections["masks"][:, 0] > 0.5).byte().cpu().permute(1, 2, 0).numpy()
        for row, lengths in zip(rows, mask.encode(np.asfortranarray(solid)), strict=True):
            row["segmentation"] = lengths
    return rows


def average_precision(
    truth: dict[str, Any], rows: list[dict[str, Any]], masks: bool, images: Sequence[int] | None = None
) -> dict[str, float]:
    """Return average precision in percent: `box_ap`, `box_ap50`, ..., `mask_ap`, ....

    Small objects are below 32 x 32 pixels, large ones above 96 x 96; a size that the truth does not contain is left
    out.

    Args:
        truth: COCO's JSON of the scored images.
        rows: Rows of `coco_results`.
        masks: Score masks too.
        images: COCO's numbers of the images to score; by default all.
    """
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    out: dict[str, float] = {}
    with contextlib.redirect_stdout(io.StringIO()):  # pycocotools prints timings
        reference = COCO()
        reference.dataset = truth  # type: ignore[assignment]
        reference.createIndex()
        for kind, prefix in (("bbox", "box"), ("segm", "mask"))[: 1 + masks]:
            boxes = [{key: row[key] for key in row if key in KEYS[kind]} for row in rows]
            found = reference.loadRes(boxes) if rows else COCO()  # type: ignore[arg-type]
            evaluation = COCOeval(reference, found, kind)  # type: ignore[arg-type]
            if images is not None:
                evaluation.params.imgIds = list(images)
            evaluation.evaluate()
            evaluation.accumulate()
            evaluation.summarize()
            values = zip(NAMES, evaluation.stats[: len(NAMES)].tolist(), strict=True)
            out |= {f"{prefix}_{name}": 100 * value for name, value in values if value >= 0}
    return out
