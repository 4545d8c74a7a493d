"""Import torchvision, also if its compiled operators do not load.

A torchvision built for CUDA does not find its operators beside a PyTorch for CPUs.

Then `import torchvision` fails for lack of `nms`, and detection for lack of `nms` and `roi_align`. No maintained
library offers these two without a compiled part. torchvision's own `roi_align` in PyTorch, unless it is compiled, holds
boxes x 784 x pixels numbers for masks: 30 GB for 128 boxes in an image of 320 x 240. So both are written here, and
registered under torchvision's names where its own did not load. `torchvision_operators()` names those in use.
"""

import functools
import importlib
import logging
import sys
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

BOX_ROWS = 1024  # boxes whose overlaps with all others are computed at once
SCHEMAS = {
    "nms": "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "roi_align": "roi_align(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width, "
    "int sampling_ratio, bool aligned) -> Tensor",
}


@functools.cache
def load_torchvision() -> ModuleType:
    """The package torchvision.

    Where its compiled operators do not load, those of this file replace them, with one warning.

    Raises:
        ModuleNotFoundError: If torchvision is missing; the message names what to install.
    """
    try:
        torchvision = importlib.import_module("torchvision")
    except ModuleNotFoundError as error:
        if error.name != "torchvision":
            raise
        raise ModuleNotFoundError("this needs torchvision: pip install 'normkit[vision]'", name=error.name) from None
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise
        _define()
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]  # what the failure left half imported
        torchvision = importlib.import_module("torchvision")
    if not torchvision.extension._has_ops():
        _stand_in()
    return torchvision


def torchvision_operators() -> str:
    """The origin of `nms` and `roi_align`, for result files."""
    compiled = load_torchvision().extension._has_ops()
    return "compiled, torchvision's" if compiled else "plain PyTorch, normkit's"


def nms(boxes: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    """Indices of the boxes that greedy non-maximum suppression keeps, best first.

    `boxes [N, 4]` are (x1, y1, x2, y2). A box is dropped where its overlap (IoU) with a better one that is kept exceeds
    the threshold. All boxes decide at once, again and again until nothing changes: after t rounds the t best are right
    (Zheng et al. 2021, Cluster-NMS, which proves it equal to the loop over boxes).

    >>> nms(torch.tensor([[0.0, 0, 2, 2], [0, 0, 2, 1.9], [5, 5, 6, 6]]), torch.tensor([0.5, 0.9, 0.1]), 0.5)
    tensor([1, 2])
    """
    order = scores.argsort(descending=True, stable=True)
    boxes = boxes[order].to(torch.promote_types(boxes.dtype, torch.float32))
    overlap = load_torchvision().ops.box_iou
    rows = [overlap(part, boxes) > iou_threshold for part in boxes.split(BOX_ROWS)]
    if not rows:
        return order
    beats = torch.cat(rows).triu(1)  # [better, worse]
    keep = torch.ones_like(scores, dtype=torch.bool)
    while True:
        now = ~(beats & keep[:, None]).any(0)
        if torch.equal(now, keep):
            return order[keep]
        keep = now


def roi_align(
    input: Tensor,
    rois: Tensor,
    spatial_scale: float,
    pooled_height: int,
    pooled_width: int,
    sampling_ratio: int,
    aligned: bool,
) -> Tensor:
    """Mean of bilinear samples in each cell of a grid over each box: `[K, C, height, width]`.

    `input [N, C, H, W]`; `rois [K, 5]`: number of the image, then (x1, y1, x2, y2) in its pixels, which are
    `spatial_scale` times as many here. A cell has `sampling_ratio` samples along each side, or, where that is not above
    0, as many as it has pixels. Samples, and which of them are outside, separate into rows and columns, so that a box
    costs two matrix products, `Y F X^T`. Differentiable in `input`. He et al. 2017.
    """
    wide = torch.promote_types(input.dtype, torch.float32)
    features, boxes = input.to(wide), rois[:, 1:].to(wide) * spatial_scale - (0.5 if aligned else 0.0)
    start, length = boxes[:, :2], boxes[:, 2:] - boxes[:, :2]
    length = length if aligned else length.clamp(min=1.0)
    height, width = input.shape[-2:]
    rows = _weights(start[:, 1], length[:, 1], pooled_height, height, sampling_ratio)
    columns = _weights(start[:, 0], length[:, 0], pooled_width, width, sampling_ratio)
    out = features.new_zeros(len(rois), input.shape[1], pooled_height, pooled_width)
    for number, image in enumerate(features):
        own = (rois[:, 0] == number).nonzero()[:, 0]
        if len(own):
            tall = torch.einsum("kph,chw->kcpw", rows[own], image)
            out = out.index_copy(0, own, torch.einsum("kcpw,kqw->kcpq", tall, columns[own]))
    return out.to(input.dtype)


def _weights(start: Tensor, length: Tensor, cells: int, size: int, samples: int) -> Tensor:
    """Return the weight of each of `size` pixels in each cell of each box, `[k, cells, size]`."""
    per_cell = torch.full_like(length, samples) if samples > 0 else (length / cells).ceil().clamp(min=0)
    most = int(per_cell.max()) if len(length) else 0
    step = torch.arange(most, device=start.device)
    cell = torch.arange(cells, device=start.device)[:, None]
    within = (step + 0.5) / per_cell.clamp(min=1)[:, None, None]
    at = start[:, None, None] + (cell + within) * (length / cells)[:, None, None]  # [K, cells, samples]
    counts = ((step < per_cell[:, None, None]) & (at >= -1.0) & (at <= size)).to(at.dtype)
    at = at.clamp(0, size - 1)
    low = at.floor()
    share = (at - low) * counts
    out = at.new_zeros(len(start), cells, size)
    out.scatter_add_(2, low.long(), counts - share)
    out.scatter_add_(2, (low.long() + 1).clamp(max=size - 1), share)
    return out / per_cell.clamp(min=1)[:, None, None]


_libraries: list[torch.library.Library] = []  # an operator lives as long as its library


def _define() -> None:
    """Declare the operators that are missing."""
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name, schema in SCHEMAS.items():
        if not hasattr(torch.ops.torchvision, name):
            library.define(schema)
    _libraries.append(library)


def _stand_in() -> None:
    """Let torchvision call the operators of this file."""
    _define()
    for key in ("CPU", "CUDA"):
        _libraries[-1].impl("nms", nms, key)
    _libraries[-1].impl("roi_align", roi_align, "CompositeImplicitAutograd")
    for name in ("torchvision.ops.boxes", "torchvision.ops.roi_align"):
        module: Any = importlib.import_module(name)
        module._has_ops, module._assert_has_ops = lambda: True, lambda: None
    logging.getLogger("normkit").info("torchvision has no compiled operators here: nms and roi_align in plain PyTorch")
