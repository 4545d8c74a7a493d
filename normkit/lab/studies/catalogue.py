"""Tables of recipes and studies, by name."""

from collections.abc import Callable

from normkit.lab import recipes
from normkit.lab.papers.powernorm import language_models
from normkit.lab.papers.powernorm import recipes as power_recipes
from normkit.lab.papers.powernorm import tables as power
from normkit.lab.papers.tears import recipes as tears_recipes
from normkit.lab.papers.tears import tables as tears
from normkit.lab.papers.unified import detectors
from normkit.lab.papers.unified import recipes as unified_recipes
from normkit.lab.papers.unified import tables as unified
from normkit.lab.studies import bucketing, core, warmup
from normkit.lab.study import Study
from normkit.lab.train.config import Run
from normkit.text import align

RECIPES: dict[str, Callable[[], Run]] = {
    recipe.__name__: recipe
    for recipe in (
        recipes.g2p_cmudict,
        recipes.lm_pydoc,
        recipes.lm_wikitext2,
        recipes.vit_digits,
        recipes.cifar10_tiny_vit,
        recipes.mt_multi30k,
        recipes.mt_speedrun,
        power_recipes.mt_iwslt14,
        power_recipes.mt_iwslt14_gpu,
        power_recipes.mt_iwslt14_pocket,
        power_recipes.mt_wmt14_de,
        power_recipes.mt_scaling_nmt,
        power_recipes.lm_ptb_core1,
        power_recipes.lm_ptb_pocket,
        power_recipes.lm_wikitext103,
        *language_models.RECIPES,
        power_recipes.cifar10_resnet20_paper,
        power_recipes.cifar10_resnet20,
        power_recipes.cifar100_resnet20_paper,
        tears_recipes.mt_ted_gl,
        tears_recipes.mt_ted_gl_pocket,
        tears_recipes.mt_iwslt15_vi,
        unified_recipes.mt_wmt14_fr,
        unified_recipes.imagenet_t2t_vit_14,
        unified_recipes.imagenet_swin_t,
        unified_recipes.cifar10_t2t_vit_14_tuned,
        unified_recipes.cifar100_t2t_vit_14_tuned,
        unified_recipes.cifar10_swin_t_gpu,
        unified_recipes.cifar10_t2t_vit_14_gpu,
        unified_recipes.cifar10_t2t_vit_14_pocket,
        detectors.mask_rcnn_coco_36,
        detectors.mask_rcnn_coco_12,
        detectors.faster_rcnn_coco_36,
        detectors.faster_rcnn_coco_12,
        detectors.mask_rcnn_pennfudan,
        detectors.mask_rcnn_coco128,
    )
}

STUDIES: dict[str, Study] = {
    study.id: study
    for study in (
        power.TABLE1,
        power.TABLE2,
        power.TABLE3,
        power.TABLE4,
        power.FIGURE2,
        power.FIGURE3,
        power.FIGURE4,
        power.FIGURE5,
        power.FIGURE6,
        power.FIGURE7,
        tears.TABLE2,
        tears.TABLE3,
        tears.TABLE4,
        tears.TABLE5,
        tears.TABLE6,
        tears.TABLE7,
        tears.TABLE8,
        tears.FIGURE1,
        tears.FIGURE2,
        tears.FIGURE3,
        tears.FIGURE4,
        unified.TABLE1,
        unified.TABLE2,
        unified.TABLE3,
        unified.TABLE4,
        unified.TABLE5,
        unified.TABLE6,
        unified.TABLE7,
        unified.TABLE8,
        unified.TABLE9,
        unified.TABLE10,
        unified.FIGURE1,
        unified.FIGURE3,
        unified.FIGURE4,
        unified.FIGURE5,
        unified.FIGURE6,
        core.MULTI30K_CORE,
        core.MULTI30K_LONG,
        core.IWSLT14_CORE,
        core.GERMAN_LONG,
        core.PTB_CORE,
        core.WIKITEXT2_CORE,
        core.GALICIAN_CORE,
        core.GALICIAN_LONG,
        core.CMUDICT_CORE,
        core.CIFAR10_CORE,
        core.RESNET20_LONG,
        core.CIFAR10_SPEED,
        *warmup.WARMUPS,
        bucketing.MULTI30K_BUCKETING,
        bucketing.CMUDICT_BUCKETING,
        bucketing.CMUDICT_LENGTH,
        bucketing.MULTI30K_LENGTH,
        bucketing.IWSLT14_LENGTH,
    )
}


def listing() -> str:
    """List all studies, one a line, with the scales at which they can be run."""
    rows = [
        (name, f"{study.title} [{', '.join(study.scales) or 'not measured yet'}]") for name, study in STUDIES.items()
    ]
    return align(rows)
