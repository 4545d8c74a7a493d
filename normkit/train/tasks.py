"""The table of tasks."""

from normkit.train.classification import Classification
from normkit.train.detection import Detection
from normkit.train.images import ImageClassification
from normkit.train.language import Language
from normkit.train.mt import MachineTranslation
from normkit.train.task import Task
from normkit.train.translation import Translation

TASKS: dict[str, type[Task]] = {
    "g2p": Translation,
    "mt": MachineTranslation,
    "lm": Language,
    "digits": Classification,
    "images": ImageClassification,
    "detection": Detection,
}
