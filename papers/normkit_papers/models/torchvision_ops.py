"""Import torchvision, also beside a PyTorch for which its compiled operators were not built.

Then `import torchvision` fails for lack of `nms`, and detection for lack of `nms` and `roi_align`. These two are
registered here in plain PyTorch, where torchvision's own did not load.
"""

import functools
import importlib
import sys
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

SCHEMAS = {
    "nms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "roi_align": "(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width, "
    "int sampling_ratio, bool aligned) -> Tensor",
}
LIBRARY = torch.library.Library("torchvision", "FRAGMENT")


@functools.cache
def load_torchvision() -> ModuleType:
    """Return the package torchvision.

    Raises:
        ModuleNotFoundError: If torchvision is missing.
    """
    try:
        torchvision = importlib.import_module("torchvision")
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise
        _declare()
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]  # what the failure left half imported
        torchvision = importlib.import_module("torchvision")
    if not torchvision.extension._has_ops():  # other code may have declared them, which lets the import pass
        _declare()
        for key in ("CPU", "CUDA"):
            LIBRARY.impl("nms", nms, key)
        LIBRARY.impl("roi_align", roi_align, "CompositeImplicitAutograd")
        for name in ("torchvision.ops.boxes", "torchvision.ops.roi_align"):
            module: Any = importlib.import_module(name)
            module._has_ops, module._assert_has_ops = lambda: True, lambda: None
    return torchvision


def _declare() -> None:
    """Declare the operators that are not there."""
    for name, schema in SCHEMAS.items():
        if not hasattr(torch.ops.torchvision, name):
            LIBRARY.define(f"{name}{schema}")


def torchvision_operators() -> str:
    """Return the origin of `nms` and `roi_align`, for result files."""
    return "compiled, torchvision's" if load_torchvision().extension._has_ops() else "plain PyTorch, normkit's"


def nms(boxes: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    """Return the indices of the boxes that greedy non-maximum suppression keeps, best first.

    `boxes [boxes, 4]` are (x1, y1, x2, y2). A box is dropped where its overlap (IoU) with a better one that is kept
    exceeds the threshold. All boxes decide at once, again and again until nothing changes: after t rounds the t best
    are right (Zheng et al. 2021, Cluster-NMS, which proves it equal to the loop over boxes).

    >>> nms(torch.tensor([[0.0, 0, 2, 2], [0, 0, 2, 1.9], [5, 5, 6, 6]]), torch.tensor([0.5, 0.9, 0.1]), 0.5)
    tensor([1, 2])
    """
    order = scores.argsort(descending=True, stable=True)
    if not len(order):
        return order
    boxes = boxes[order].to(torch.promote_types(boxes.dtype, torch.float32))
    beats = (load_torchvision().ops.box_iou(boxes, boxes) > iou_threshold).triu(1)  # [better, worse]
    keep, before = torch.ones_like(scores, dtype=torch.bool), None
    while before is None or not torch.equal(keep, before):
        keep, before = ~(beats & keep[:, None]).any(0), keep
    return order[keep]


def roi_align(
    input: Tensor, rois: Tensor, spatial_scale: float, pooled_height: int, pooled_width: int, sampling_ratio: int,
    aligned: bool,
) -> Tensor:  # fmt: skip
    """Return the mean of bilinear samples in each cell of a grid over each box (He et al. 2017).

    Samples, and which of them are outside, separate into rows and columns, so that a box costs two matrix products.
    (torchvision's own version in PyTorch holds boxes x 784 x pixels numbers for masks: 30 GB for 128 boxes.)

    Args:
        input: Features, `[images, channels, height, width]`.
        rois: Number of the image, then (x1, y1, x2, y2) in its pixels, `[boxes, 5]`.
        spatial_scale: Pixels here for each of the image's.
        pooled_height: Cells of the grid.
        pooled_width: Cells of the grid.
        sampling_ratio: Samples along each side of a cell; 0 or less for as many as it has pixels.
        aligned: Pixels are centred at half numbers.

    Returns:
        `[boxes, channels, pooled_height, pooled_width]`.
    """
    wide = torch.promote_types(input.dtype, torch.float32)
    features, boxes = input.to(wide), rois[:, 1:].to(wide) * spatial_scale - (0.5 if aligned else 0.0)
    start, length = boxes[:, :2], boxes[:, 2:] - boxes[:, :2]
    length = length if aligned else length.clamp(min=1.0)
    rows = _weights(start[:, 1], length[:, 1], pooled_height, input.shape[-2], sampling_ratio)
    columns = _weights(start[:, 0], length[:, 0], pooled_width, input.shape[-1], sampling_ratio)
    out = features.new_zeros(len(rois), input.shape[1], pooled_height, pooled_width)
    for number, image in enumerate(features):
        own = (rois[:, 0] == number).nonzero()[:, 0]
        tall = torch.einsum("kph,chw->kcpw", rows[own], image)
        out = out.index_copy(0, own, torch.einsum("kcpw,kqw->kcpq", tall, columns[own]))
    return out.to(input.dtype)


def _weights(start: Tensor, length: Tensor, cells: int, size: int, samples: int) -> Tensor:
    """Return the weight of each of `size` pixels in each cell of each box, `[boxes, cells, size]`."""
    per_cell = torch.full_like(length, samples) if samples > 0 else (length / cells).ceil().clamp(min=0)
    step = torch.arange(int(per_cell.max()) if len(length) else 0, device=start.device)
    cell = torch.arange(cells, device=start.device)[:, None]
    within = (step + 0.5) / per_cell.clamp(min=1)[:, None, None]
    at = start[:, None, None] + (cell + within) * (length / cells)[:, None, None]  # [boxes, cells, samples]
    counts = ((step < per_cell[:, None, None]) & (at >= -1.0) & (at <= size)).to(at.dtype)
    at = at.clamp(0, size - 1)
    low = at.floor()
    share = (at - low) * counts
    out = at.new_zeros(len(start), cells, size)
    out.scatter_add_(2, low.long(), counts - share)
    out.scatter_add_(2, (low.long() + 1).clamp(max=size - 1), share)
    return out / per_cell.clamp(min=1)[:, None, None]
