"""Models of pictures by name: sizes, shapes, every norm by rule, drop path, folding."""

import pytest
import safetensors.torch
import torch
from normkit_papers.data.vocab import Vocab
from normkit_papers.models.classifiers import classifier
from normkit_papers.models.config import Model
from normkit_papers.models.resnet import ResNet20
from normkit_papers.models.t2t import Performer, T2TViT
from normkit_papers.train.config import ImageRun
from normkit_papers.train.fold_run import fold_run
from normkit_papers.train.folder import Loaded, load, save
from third_party_models import randomize
from torch import nn
from torch.testing import assert_close

from normkit.fold import fold
from normkit.models import find
from normkit.norms import Norm

ISSUE = ("layer", "batch", "mabn", "pnv", "power(groups=0)", "un", "un(outlier_filtration=True)")
FROZEN = ("batch", "mabn", "pnv", "power(groups=0)", "un")  # their statistics are constants at inference


def small_t2t(**settings) -> T2TViT:
    config = Model(image_size=32, **settings)
    return T2TViT(config, classes=5, width=12, depth=2, heads=2, ratio=2, token_width=8)


def small_resnet(**settings) -> ResNet20:
    return ResNet20(Model(**settings), classes=5)


MODELS = {"resnet20": small_resnet, "t2t_vit": small_t2t}


def images(rows: int = 4, size: int = 32, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, 3, size, size, generator=torch.Generator().manual_seed(seed))


def step(model: nn.Module, x: torch.Tensor) -> None:
    """Forward and backward with a random upstream gradient."""
    scores = model(x)
    scores.backward(torch.randn(scores.shape, generator=torch.Generator().manual_seed(1)))


# -- sizes ------------------------------------------------------------------------------------------------------------


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_resnet20_is_that_of_the_paper():
    """He et al.: 0.27 M; three times six convolutions behind the first, at 32.

    16 and 8 pixels a side.
    """
    model = ResNet20(Model(norm="batch"), classes=10)
    assert count(model) == 269_722
    assert len([m for m in model.modules() if isinstance(m, nn.Conv2d)]) == 19
    shapes = []
    for block in model.blocks:
        block.register_forward_hook(lambda module, args, out: shapes.append(tuple(out.shape[1:])))
    assert model(images(2)).shape == (2, 10)
    assert shapes == [(16, 32, 32)] * 3 + [(32, 16, 16)] * 3 + [(64, 8, 8)] * 3


def test_t2t_vit_14_is_that_of_the_paper():
    """Yuan et al.: 21.5 M parameters.

    224 pixels to 56, 28 and 14 tokens a side, 64 channels, then 384.
    """
    model = classifier(Model(arch="t2t_vit_14", image_size=224), 1000)
    assert round(count(model) / 1e6, 1) == 21.5
    shapes = []
    for part in (*model.performers, model.project, *model.layers):
        part.register_forward_hook(lambda module, args, out: shapes.append((tuple(args[0].shape), tuple(out.shape))))
    with torch.no_grad():
        assert model.eval()(images(1, 224)).shape == (1, 1000)
    first, second, projected, *layers = shapes
    assert first == ((1, 56 * 56, 3 * 7 * 7), (1, 56 * 56, 64))
    assert second == ((1, 28 * 28, 64 * 3 * 3), (1, 28 * 28, 64))
    assert projected == ((1, 14 * 14, 64 * 3 * 3), (1, 14 * 14, 384))
    assert layers == [((1, 14 * 14 + 1, 384),) * 2] * 14


def test_swin_takes_norms_by_rule_and_drop_path():
    config = Model(arch="swin_t", image_size=32, layer_drop=0.1, norm="un", norm_at={"norm": "layer"})
    model = classifier(config, 1000)
    assert count(model) == 28_288_354
    found = {name: type(model.get_submodule(name)).__name__ for name in find(model)}
    assert found.pop("norm") == "LayerNorm"
    assert list(found.values()) == ["UN"] * 28
    drops = [float(getattr(m, "p", getattr(m, "drop_prob", 0)) or 0) for m in model.modules()
             if type(m).__name__ in ("StochasticDepth", "DropPath")]  # fmt: skip
    assert max(drops) == pytest.approx(0.1)
    step(model, images(2))
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


# -- norms ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "spec", "action", "norms"),
    [*(("t2t_vit", spec, "folded", 9) for spec in FROZEN),
     ("resnet20", "batch", "folded back", 19)],
)  # fmt: skip
def test_all_norms_fold(name, spec, action, norms):
    """ResNet-20's go back into the convolution before, since a ReLU or a sum follows.

    T2T-ViT's into what reads them.

    Into the convolution behind the ReLU none can go.
    """
    torch.manual_seed(0)
    model = randomize(MODELS[name](norm=spec)).eval()
    folded, report = fold(model, images(2), other_shapes=False)
    assert (report.count(action), len(report.rows)) == (norms, norms)
    assert report.max_error < 1e-12
    assert not any(isinstance(module, Norm) for module in folded.modules())
    assert_close(folded(images(3, seed=7)), model(images(3, seed=7)), rtol=1e-4, atol=1e-4)


def test_folded_run_is_saved_with_new_biases(tmp_path):
    """ResNet-20's convolutions have none before."""
    torch.manual_seed(0)
    model = Model(arch="resnet20", image_size=16, norm="un")
    run = ImageRun(name="run", data="cifar10", steps=1, model=model)
    old = randomize(classifier(model, 5)).eval()
    folded, report = fold_run(Loaded(run, old, {"classes": Vocab("abcde")}))
    assert report.count("folded back") == 19
    save(tmp_path, folded)
    again = load(tmp_path)
    assert (again.run.model.norm, again.run.model.norm_at) == ("nonorm", {})
    assert again.model.conv.bias is not None
    assert_close(again.model(images(size=16)), old(images(size=16)), rtol=1e-4, atol=1e-4)
    saved = again.model.state_dict() | {"conv.more": torch.zeros(16)}
    safetensors.torch.save_file(saved, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"conv\.more"):
        load(tmp_path)


# -- T2T-ViT ----------------------------------------------------------------------------------------------------------


def test_performer_equals_attention_with_its_feature_kernel():
    """Against the sum over all pairs of tokens.

    The weights are exp(W q - |q|^2 / 2) . exp(W k - |k|^2 / 2).
    """
    torch.manual_seed(0)
    performer = Performer(10, 6).double().eval()
    key, query, value = torch.randn(3, 2, 7, 6, dtype=torch.float64)

    def f(x):
        return torch.exp(x @ performer.features.T - x.square().sum(-1, keepdim=True) / 2)

    weights = f(query) @ f(key).transpose(1, 2)
    assert_close(performer._mix(key, query, value), weights / weights.sum(-1, keepdim=True) @ value)
    assert performer._mix(100 * key, 100 * query, value).isfinite().all(), "exponents beyond those of float64"
    rows = performer.features
    assert_close(rows @ rows.T, rows.shape[0] * torch.eye(len(rows), dtype=torch.float64), atol=1e-5, rtol=0)
