"""Faster and Mask R-CNN with a feature pyramid on Swin, of torchvision's parts.

As Unified Normalization's COCO models (App. B.3, after Swin-Transformer-Object-Detection): only the backbone has norms,
one more of them on each of its four outputs.
"""

import collections
import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normkit._util import pick
from normkit.norms import StatNorm
from normkit_papers.models.blocks import place_norms
from normkit_papers.models.config import Model
from normkit_papers.models.torchvision_ops import load_torchvision


@dataclasses.dataclass(frozen=True, kw_only=True)
class Detector:
    """Sizes of a detector: by default those of Swin-T and of the papers."""

    masks: bool
    """Mask R-CNN; without, Faster R-CNN."""
    width: int = 96
    """Channels of Swin's first stage; each further one has twice as many."""
    depths: tuple[int, ...] = (2, 2, 6, 2)
    """Blocks of each stage."""
    heads: tuple[int, ...] = (3, 6, 12, 24)
    """Attention heads of each stage."""
    window: int = 7
    """Side of an attention window, in tokens."""
    pyramid: int = 256
    """Channels of the feature pyramid."""
    hidden: int = 1024
    """Width of the box head."""
    mask_layers: tuple[int, ...] = (256, 256, 256, 256)
    """Channels of the mask head's convolutions."""
    anchors: tuple[int, ...] = (32, 64, 128, 256, 512)
    """Side of the anchors of each level of the pyramid, in pixels."""
    sizes: tuple[int, ...] = (480, 512, 544, 576, 608, 640, 672, 704, 736, 768, 800)
    """Shorter sides that images are trained at; the last is that of inference."""
    longest: int = 1333
    """The longer side is not above this."""
    crop: tuple[int, int] | None = (384, 600)
    """Half of the training images are first cropped to sides between these, of an image 400 to 600 high."""
    proposals: int = 1000
    """Boxes that the region proposal network hands on, of twice as many."""
    samples: int = 512
    """Boxes of each image that the heads learn from."""


_POCKET = Detector(
    masks=True, width=32, depths=(1, 1, 2, 1), heads=(1, 2, 4, 8), pyramid=64, hidden=128, mask_layers=(64, 64),
    anchors=(16, 32, 64, 128, 256), sizes=(128, 144, 160, 176), longest=256, crop=None, proposals=200, samples=64,
)  # fmt: skip

DETECTORS: dict[str, Detector] = {
    "mask_rcnn_swin_t": Detector(masks=True),
    "faster_rcnn_swin_t": Detector(masks=False),
    "mask_rcnn_pocket": _POCKET,
    "faster_rcnn_pocket": dataclasses.replace(_POCKET, masks=False),
}
"""Sizes by `Model.arch`."""


class SwinMaps(nn.Module):
    """Swin's four stages with a norm on each output, `[batch, channels, height, width]`.

    Their strides are 4, 8, 16 and 32.

    Images of one batch have different sizes and are filled up with zeros. The fourth channel of `images` is 1 where an
    image is: a token is real that has such a pixel, and statistics are computed of real tokens alone. (As in the
    papers' models, attention reads the padding. What Swin itself pads, to whole windows, it pads behind the norm.)
    """

    def __init__(self, detector: Detector, drop_path: float):
        super().__init__()
        load_torchvision()
        from torchvision.models.swin_transformer import SwinTransformer

        swin = SwinTransformer(
            [4, 4], detector.width, list(detector.depths), list(detector.heads), [detector.window] * 2,
            stochastic_depth_prob=drop_path,
        )  # fmt: skip
        self.features = swin.features  # patches, then stage and merging by turns; named as torchvision's checkpoints
        self.channels = [detector.width * 2**stage for stage in range(len(detector.depths))]
        self.norms = nn.ModuleList(nn.LayerNorm(channels) for channels in self.channels)

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """Maps "0" to "3" of `images [B, 3 or 4, height, width]`."""
        x, real = images[:, :3], images[:, 3:]
        maps = collections.OrderedDict()
        for index, layer in enumerate(self.features):
            if index % 2 == 0:  # patches, mergings: fewer tokens
                side = 2 if index else 4
                real = F.max_pool2d(real, side, ceil_mode=True) if real.shape[1] else real
            stage = index // 2
            _mark(layer, real)
            x = layer(x)
            if index % 2 == 1:
                norm = self.norms[stage]
                _mark(norm, real)
                maps[str(stage)] = norm(x).movedim(-1, 1)
        return maps


def detector(config: Model, classes: int) -> nn.Module:
    """Build the detector that `config.arch` names, for `classes` categories and background.

    torchvision's `FasterRCNN` or `MaskRCNN`: while training it takes images and targets and returns losses, at
    inference boxes, labels, scores (and masks). `config.norm` and `norm_at` place the norms, `config.layer_drop` is the
    drop path. ValueError where there is no such row of DETECTORS.

    >>> model = detector(Model(arch="faster_rcnn_pocket", norm="un"), classes=1)
    >>> model.backbone.body.norms[0]
    UN(32, un)
    """
    sizes = pick(DETECTORS, config.arch, "detector")
    load_torchvision()
    from torchvision.models.detection import FasterRCNN, MaskRCNN
    from torchvision.models.detection.anchor_utils import AnchorGenerator
    from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
    from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
    from torchvision.ops.feature_pyramid_network import FeaturePyramidNetwork, LastLevelMaxPool

    body = SwinMaps(sizes, config.layer_drop)
    pyramid = FeaturePyramidNetwork(body.channels, sizes.pyramid, LastLevelMaxPool())
    backbone: Any = nn.Sequential(collections.OrderedDict(body=body, fpn=pyramid))
    backbone.out_channels = sizes.pyramid
    options: dict[str, Any] = {
        "min_size": sizes.sizes[-1],
        "max_size": sizes.longest,
        "rpn_anchor_generator": AnchorGenerator([(side,) for side in sizes.anchors], [(0.5, 1.0, 2.0)] * 5),
        "rpn_pre_nms_top_n_train": 2 * sizes.proposals,
        "rpn_pre_nms_top_n_test": sizes.proposals,
        "rpn_post_nms_top_n_train": sizes.proposals,
        "rpn_post_nms_top_n_test": sizes.proposals,
        "box_head": TwoMLPHead(sizes.pyramid * 7 * 7, sizes.hidden),
        "box_predictor": FastRCNNPredictor(sizes.hidden, classes + 1),
        "box_batch_size_per_image": sizes.samples,
        "_skip_resize": True,  # while training, augmentation has chosen the size
    }
    if sizes.masks:
        last = sizes.mask_layers[-1]
        options["mask_head"] = MaskRCNNHeads(sizes.pyramid, sizes.mask_layers, 1)
        options["mask_predictor"] = MaskRCNNPredictor(last, last, classes + 1)
    model = (MaskRCNN if sizes.masks else FasterRCNN)(backbone, **options)
    model.transform.register_forward_hook(_frame)
    place_norms(model, config)
    return model


def _frame(transform: nn.Module, args: tuple, output: Any) -> None:
    """Add a fourth channel to a batch that is 1 inside the images (a forward hook)."""
    images, _ = output
    real = images.tensors.new_zeros(len(images.tensors), 1, *images.tensors.shape[-2:])
    for image, (height, width) in zip(real, images.image_sizes, strict=True):
        image[:, :height, :width] = 1
    images.tensors = torch.cat([images.tensors, real], 1)


def _mark(layer: nn.Module, real: Tensor) -> None:
    """Set the mask of a layer's norms until the next forward, as recomputation needs it."""
    for module in layer.modules():
        if isinstance(module, StatNorm):
            module.mask = real[:, 0] > 0 if real.shape[1] else None
