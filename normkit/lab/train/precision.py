"""Average precision of boxes and masks, as COCO counts it, by pycocotools."""

import contextlib
import io
from collections.abc import Sequence
from typing import Any

from torch import Tensor

NAMES = ("ap", "ap50", "ap75", "ap_small", "ap_medium", "ap_large")


def found(number: int, kinds: Sequence[int], detections: dict[str, Tensor]) -> list[dict[str, Any]]:
    """The detections of picture `number` as rows of COCO's result form; `kinds` are COCO's numbers of the labels.

    Boxes are (x, y, width, height) in pixels of the picture; masks are above one half.
    """
    import numpy as np
    from pycocotools import mask

    rows = []
    boxes = detections["boxes"].double().cpu()
    boxes[:, 2:] -= boxes[:, :2]
    labels, scores = detections["labels"].tolist(), detections["scores"].tolist()
    for box, label, score in zip(boxes.tolist(), labels, scores, strict=True):
        rows.append({"image_id": number, "category_id": kinds[label - 1], "bbox": box, "score": score})
    if "masks" in detections:
        solid = (detections["masks"][:, 0] > 0.5).byte().cpu().permute(1, 2, 0).numpy()
        for row, lengths in zip(rows, mask.encode(np.asfortranarray(solid)), strict=True):
            row["segmentation"] = lengths
    return rows


def average_precision(truth: dict[str, Any], rows: list[dict[str, Any]], masks: bool) -> dict[str, float]:
    """AP in percent, of boxes and, with `masks`, of masks: `box_ap`, `box_ap50`, ..., `mask_ap`, ....

    `truth` is COCO's JSON of the pictures that were looked at. Small things are below 32 x 32 pixels, large ones above
    96 x 96; where the truth has none of a size, that entry is missing.
    """
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    out: dict[str, float] = {}
    with contextlib.redirect_stdout(io.StringIO()):  # pycocotools tells how long it took
        known = COCO()
        known.dataset = truth  # type: ignore[assignment]
        known.createIndex()
        for kind, prefix in (("bbox", "box"), ("segm", "mask"))[: 1 + masks]:
            if not rows:
                out |= {f"{prefix}_{name}": 0.0 for name in NAMES}
                continue
            plain = [{key: row[key] for key in row if key in _KEYS[kind]} for row in rows]
            scored = COCOeval(known, known.loadRes(plain), kind)  # type: ignore[arg-type]
            scored.evaluate()
            scored.accumulate()
            scored.summarize()
            values = zip(NAMES, scored.stats[: len(NAMES)].tolist(), strict=True)
            out |= {f"{prefix}_{name}": 100 * value for name, value in values if value >= 0}
    return out


_KEYS = {
    "bbox": ("image_id", "category_id", "bbox", "score"),
    "segm": ("image_id", "category_id", "segmentation", "score"),
}
