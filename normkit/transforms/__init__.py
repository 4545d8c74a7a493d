"""Transforms of models that somebody else wrote; none changes the model that it is given, unless asked."""

from normkit.transforms.calibrate import calibrate
from normkit.transforms.convert import convert, find, unreadable

__all__ = ["calibrate", "convert", "find", "unreadable"]
