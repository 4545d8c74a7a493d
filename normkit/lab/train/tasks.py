"""The table of tasks."""

from normkit.lab.train.classification import Classification
from normkit.lab.train.detection import Detection
from normkit.lab.train.images import ImageClassification
from normkit.lab.train.language import Language
from normkit.lab.train.mt import MachineTranslation
from normkit.lab.train.task import Task
from normkit.lab.train.translation import Translation

TASKS: dict[str, type[Task]] = {
    "g2p": Translation,
    "mt": MachineTranslation,
    "lm": Language,
    "digits": Classification,
    "images": ImageClassification,
    "detection": Detection,
}
