"""Table of image data sets: sizes, folders, sources.

`NORMKIT_DATA` lists folders that contain a folder for each data set, as for the corpora. A path in place of a name is
such a folder, or a folder of your own images. `normkit_papers.data.images` reads them.
"""

import dataclasses
from pathlib import Path

from normkit._util import unknown
from normkit_papers.data.corpora import VARIABLE, data_roots

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageSet:
    """An image data set: folders, sizes, mean and standard deviation of channels, source."""

    name: str
    folders: tuple[str, ...]
    classes: int
    counts: dict[str, int]
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    origin: str


def _cifar(classes: int, mean: tuple[float, float, float], std: tuple[float, float, float]) -> ImageSet:
    archive = {10: "cifar-10-binary.tar.gz", 100: "cifar-100-binary.tar.gz"}[classes]
    return ImageSet(
        name=f"cifar{classes}",
        folders=(f"cifar{classes}", "cifar-10-batches-bin" if classes == 10 else "cifar-100-binary"),
        classes=classes,
        counts={"train": 50_000, "test": 10_000},
        mean=mean,
        std=std,
        origin=f"cs.toronto.edu/~kriz/cifar.html, the binary version ({archive}), unpacked",
    )


IMAGE_SETS: dict[str, ImageSet] = {
    row.name: row
    for row in (
        _cifar(10, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
        _cifar(100, (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
        ImageSet(
            name="imagenet",
            folders=("imagenet", "ILSVRC2012", "imagenet-1k"),
            classes=1000,
            counts={"train": 1_281_167, "test": 50_000},
            mean=IMAGENET_MEAN,
            std=IMAGENET_STD,
            origin="image-net.org (ILSVRC2012, train and val, val sorted into folders of classes), or as shards from "
            "huggingface.co/datasets/ILSVRC/imagenet-1k (Parquet) or timm/imagenet-1k-wds (WebDataset)",
        ),
    )
}
"""By name."""


def find_images(name: str) -> tuple[ImageSet | None, Path]:
    """Return the row and the folder of a data set, by its name or by the path of a folder.

    Raises:
        ValueError: If the name is unknown or the folder is missing; the message names the source.
    """
    if name in IMAGE_SETS:
        return IMAGE_SETS[name], _locate(name)
    if Path(name).is_dir():
        folder = Path(name).absolute()  # "." has no name
        known = [row for row in IMAGE_SETS.values() if folder.name in row.folders]
        return (known[0] if known else None), folder
    raise unknown(IMAGE_SETS, name, "image data set", ", or name a folder of images")


def _locate(name: str) -> Path:
    row = IMAGE_SETS[name]
    roots = data_roots()
    found = [root / folder for root in roots for folder in row.folders if (root / folder).is_dir()]
    if found:
        return found[0]
    where = (
        f"{' or '.join(map(str, roots))} has none of " if roots else f"{VARIABLE} is not set; set it to a folder with "
    )
    raise ValueError(f"{name} is not here: {where}{', '.join(f'{f}/' for f in row.folders)}. Get it from {row.origin}")
