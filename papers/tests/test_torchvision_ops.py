"""`nms` and `roi_align` in plain PyTorch, against loops over boxes and pixels in NumPy."""

import importlib.util
import math

import numpy as np
import pytest
import torch
from normkit_papers.models.torchvision_ops import load_torchvision, nms, roi_align, torchvision_operators

pytest.importorskip("PIL")
if importlib.util.find_spec("torchvision") is None:
    pytest.skip("torchvision is not installed", allow_module_level=True)
load_torchvision()


def boxes(count: int, size: float = 20.0, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    corner, side = (
        size * torch.rand(count, 2, generator=generator),
        size / 2 * torch.rand(count, 2, generator=generator),
    )
    return torch.cat([corner, corner + side], 1)


def greedy(boxes: np.ndarray, scores: np.ndarray, threshold: float) -> list[int]:
    """The loop over boxes, best first."""
    kept: list[int] = []
    area = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    for i in np.argsort(-scores, kind="stable"):
        for j in kept:
            width = min(boxes[i, 2], boxes[j, 2]) - max(boxes[i, 0], boxes[j, 0])
            height = min(boxes[i, 3], boxes[j, 3]) - max(boxes[i, 1], boxes[j, 1])
            shared = max(width, 0.0) * max(height, 0.0)
            if shared > threshold * (area[i] + area[j] - shared):
                break
        else:
            kept.append(int(i))
    return kept


def sampled(x, roi, scale, out_h, out_w, samples, aligned) -> np.ndarray:
    """RoIAlign of one box, sample by sample."""
    picture, offset = x[int(roi[0])], 0.5 if aligned else 0.0
    x1, y1, x2, y2 = (float(v) * scale - offset for v in roi[1:])
    width, height = x2 - x1, y2 - y1
    if not aligned:
        width, height = max(width, 1.0), max(height, 1.0)
    down, right = (samples or math.ceil(side / n) for side, n in ((height, out_h), (width, out_w)))
    out = np.zeros((len(picture), out_h, out_w))
    for i in range(out_h):
        for j in range(out_w):
            for a in range(down):
                for b in range(right):
                    y = y1 + (i + (a + 0.5) / down) * height / out_h
                    z = x1 + (j + (b + 0.5) / right) * width / out_w
                    out[:, i, j] += bilinear(picture, y, z)
    return out / max(down * right, 1)


def bilinear(picture: np.ndarray, y: float, x: float) -> np.ndarray:
    _, height, width = picture.shape
    if y < -1 or y > height or x < -1 or x > width:
        return np.zeros(len(picture))
    y, x = min(max(y, 0.0), height - 1), min(max(x, 0.0), width - 1)
    total = np.zeros(len(picture))
    for row in {math.floor(y), min(math.floor(y) + 1, height - 1)}:
        for column in {math.floor(x), min(math.floor(x) + 1, width - 1)}:
            total += picture[:, row, column] * max(0.0, 1 - abs(y - row)) * max(0.0, 1 - abs(x - column))
    return total


@pytest.mark.parametrize("threshold", [0.0, 0.3, 0.5, 0.9])
@pytest.mark.parametrize("count", [0, 1, 40, 150])
def test_nms_equals_the_loop_over_boxes(count, threshold):
    b = boxes(count)
    scores = torch.rand(count, generator=torch.Generator().manual_seed(1)).round(decimals=1)  # with equal ones
    assert nms(b, scores, threshold).tolist() == greedy(b.double().numpy(), scores.numpy(), threshold)


@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("samples", [2, 1, 0])
def test_roi_align_is_the_mean_of_its_samples(samples, aligned):
    x = torch.randn(2, 3, 9, 11, dtype=torch.float64)
    rois = torch.cat([torch.tensor([[1.0], [0], [1], [0], [1]]), boxes(5, seed=2)], 1).double()
    rois[-1, 1:] = torch.tensor([-9.0, -3, 30, 40])  # far over the edges
    mine = roi_align(x, rois, 0.7, 3, 4, samples, aligned)
    theirs = np.stack([sampled(x.numpy(), roi, 0.7, 3, 4, samples, aligned) for roi in rois.numpy()])
    np.testing.assert_allclose(mine.numpy(), theirs, atol=1e-12)


def test_roi_align_has_the_gradient_of_its_samples():
    x = torch.randn(2, 2, 6, 7, dtype=torch.float64, requires_grad=True)
    rois = torch.tensor([[0.0, 1, 0.5, 4, 5], [1, 2, 2, 6.5, 3]], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: roi_align(x, rois, 1.0, 2, 3, 2, True), x)


def test_roi_align_of_no_boxes_and_of_halves():
    x = torch.randn(1, 2, 5, 5, requires_grad=True)
    empty = roi_align(x, torch.zeros(0, 5), 1.0, 2, 2, -1, False)
    assert empty.shape == (0, 2, 2, 2)
    (empty.sum() + x.sum()).backward()  # a step without boxes has a gradient
    roi = torch.tensor([[0.0, 0, 0, 4, 4]])
    half = roi_align(x.detach().bfloat16(), roi, 1.0, 2, 2, 2, False)
    assert half.dtype is torch.bfloat16
    torch.testing.assert_close(half.float(), roi_align(x.detach(), roi, 1.0, 2, 2, 2, False), rtol=0.02, atol=0.02)


def test_torchvision_calls_operators_that_work():
    """Whichever are in use; where they are ours, these very ones."""
    ops = importlib.import_module("torchvision.ops")
    b, scores = boxes(30), torch.rand(30)
    assert torch.equal(ops.nms(b, scores, 0.3), nms(b, scores, 0.3))
    assert torch.equal(torch.ops.torchvision.nms(b, scores, 0.3), nms(b, scores, 0.3))
    x = torch.randn(1, 2, 20, 20, requires_grad=True)
    out = ops.roi_align(x, [b], (3, 3), 0.5, 2, True)
    mine = roi_align(x, torch.cat([torch.zeros(30, 1), b], 1), 0.5, 3, 3, 2, True)
    torch.testing.assert_close(out, mine)
    seed = torch.randn_like(out)
    given, wanted = (torch.autograd.grad(y, x, seed, retain_graph=True)[0] for y in (out, mine))
    torch.testing.assert_close(given, wanted, rtol=1e-4, atol=1e-5)
    assert torchvision_operators() in ("compiled, torchvision's", "plain PyTorch, normkit's")
