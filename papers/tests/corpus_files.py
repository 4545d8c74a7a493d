"""A made parallel corpus: an invented language and its word-for-word translation.

It is a folder of text files.
"""

import random

from normkit._util import cache_folder
from normkit.kernels import build

WORDS = {"ka": "one", "lo": "two", "mi": "three", "ne": "four", "pu": "five", "so": "six", "tä": "seven", "wu": "eight"}


def sentences(count, seed, longest=6):
    draw = random.Random(seed)
    for _ in range(count):
        words = draw.choices(list(WORDS), k=draw.randint(1, longest))
        yield " ".join(words), " ".join(WORDS[word] for word in words)


def write_corpus(folder, train=300, valid=20, test=30, columns=False):
    folder.mkdir(parents=True, exist_ok=True)
    for seed, (split, count) in enumerate({"train": train, "valid": valid, "test": test}.items()):
        pairs = list(sentences(count, seed))
        if columns:
            (folder / f"{split}.tsv").write_text("".join(f"{a}\t{b}\n" for a, b in pairs), encoding="utf8")
            continue
        for side, at in (("source", 0), ("target", 1)):
            text = "".join(f"{pair[at]}\n" for pair in pairs)
            (folder / f"{split}.{side}").write_text(text, encoding="utf8")
    return folder


def write_pairs(folder, **files):
    """A folder with a few sequence pairs; `files` replaces the text of some, or leaves them out."""
    text = {"train_source": "a b\nb c\n", "train_target": "x\ny x\n", "valid_source": "a\n", "valid_target": "x\n",
            "test_source": "a z\nb\na z\n", "test_target": "x\ny\ny y\n", **files}  # fmt: skip
    folder.mkdir(exist_ok=True)
    for name, content in text.items():
        if content is not None:
            (folder / name.replace("_", ".")).write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


def cache_with_kernels(folder):
    """A cache folder without data, with the compiled kernels of the usual one."""
    folder.mkdir(parents=True)
    if build.is_loaded():
        (folder / "native").symlink_to(cache_folder() / "native")
    return folder


def write_text(folder, train=200, valid=20, test=20):
    folder.mkdir(parents=True, exist_ok=True)
    for seed, (split, count) in enumerate({"train": train, "valid": valid, "test": test}.items()):
        text = "".join(f"{source}\n" for source, _ in sentences(count, seed))
        (folder / f"{split}.txt").write_text(text, encoding="utf8")
    return folder
