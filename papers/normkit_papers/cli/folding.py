"""Commands on the norms of a saved model: `audit`, `fold` and `calibrate`."""

import functools
import shutil
import sys
import textwrap
from pathlib import Path
from typing import Any

from normkit_papers.cli.line import check_writable, command, progress_console, write


@command
def audit(model: Path, /) -> int:
    """Report for each norm of a saved model what folding can make of it; nothing changes.

    Args:
        model: Folder of a run, or of a Hugging Face model with safetensors.
    """
    from normkit.fold.folders import audit_dir, is_pretrained_dir

    check_model(model)
    if is_pretrained_dir(model):
        found = audit_dir(model)
    else:
        from normkit_papers.train.fold_run import audit_run
        from normkit_papers.train.folder import load

        found = audit_run(load(model))
    write(fit_width(str(found), found.rows))
    return 0


@command
def fold(model: Path, /, out: Path) -> int:
    """Fold the norms of a saved model away, and verify that nothing changed.

    They become part of the layers beside them; the comparison is in float64.

    Args:
        model: Folder of a run, or of a Hugging Face model with safetensors.
        out: Folder for the folded model: a run that `normkit pronounce --run` and `translate` take like any other,
            or a Hugging Face folder with a load.py.
    """
    check_model(model)
    check_out(model, out, "folding")
    from normkit.fold.folders import fold_dir, is_pretrained_dir

    if is_pretrained_dir(model):
        report = fold_dir(model, out)
    else:
        from normkit_papers.train.fold_run import fold_run
        from normkit_papers.train.folder import load, save

        folded, report = fold_run(load(model))
        save(out, folded)
    write(f"{fit_width(str(report), report.rows)}\nsaved to {out}")
    return 0


@command
def calibrate(run: Path, /, out: Path, batches: int | None = None) -> int:
    """Compute the running statistics of a run's norms again, from training batches.

    It helps if a model does well with the statistics of each batch and badly with its running statistics. The weights
    stay. The validation loss before and after is printed.

    Args:
        run: Folder of a run. Its data must be here.
        out: Folder for the calibrated run, which `normkit fold`, `pronounce --run` and `translate` take.
        batches: Training batches, at most as many as the run had steps; the default is the number that training uses
            for its calibrated scores.
    """
    check_out(run, out, "calibration")
    from rich.progress import track

    from normkit_papers.train.calibrate_run import calibrate_run
    from normkit_papers.train.folder import load, save

    console = progress_console(stderr=True)
    bar = functools.partial(track, description="calibrating", console=console, disable=not console.is_terminal)
    calibrated, report = calibrate_run(load(run), batches, lambda read, total: bar(read, total=total))
    save(out, calibrated)
    write(f"{report}\nsaved to {out}")
    return 0


def fit_width(text: str, rows: Any) -> str:
    """Replace the table at the start of a report by indented lines in a narrow terminal."""
    lines, width = text.splitlines(), shutil.get_terminal_size().columns
    if not sys.stdout.isatty() or max(map(len, lines)) <= width:
        return text
    made = []
    for row in rows:
        made.append(f"{row.name or '(the model)'}: {row.norm}, {row.position}")
        what = f"{row.action}{' into ' if row.into else ''}{', '.join(row.into)}"
        made.append("  " + "; ".join([what, *([row.why] if row.why else []), f"{row.saved:,} parameters saved"]))
    rest = lines[len(rows) + 1 :]
    return "\n".join(
        textwrap.fill(line, width, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
        for line in [*made, "", *rest]
    )


def check_model(model: Path) -> None:
    """Raise ValueError if a folder holds neither a run nor a Hugging Face model."""
    from normkit.fold.folders import is_pretrained_dir
    from normkit_papers.train.folder import read_run

    if is_pretrained_dir(model):
        return
    try:
        read_run(model)
    except ValueError as error:
        if (model / "run.json").is_file():
            raise
        needs = "a Hugging Face model is a folder here that has a config.json with `architectures`, and safetensors"
        raise ValueError(f"{error}; {needs}") from None


def check_out(model: Path, out: Path, action: str) -> None:
    """Raise ValueError if `out` is the model itself, a trained run or a Hugging Face model."""
    from normkit.fold.folders import is_pretrained_dir
    from normkit_papers.report import results
    from normkit_papers.train import removal
    from normkit_papers.train.folder import foreign_files

    if out.resolve() == model.resolve():
        raise ValueError(f"--out {out} is the model itself, which is kept; name another folder")
    holds = ""
    if (out / "checkpoints").is_dir() or any((out / name).is_file() for name in (results.FILE, results.PROGRESS)):
        holds = "a run that was trained"
    elif (out / removal.FILE).is_file():
        holds = "a finished removal"
    elif action == "removal" and (out / removal.STATE).is_dir():
        holds = ""  # an interrupted removal, which may have saved its model and goes on with --resume
    elif is_pretrained_dir(out) and not ((out / "load.py").is_file() and is_pretrained_dir(model)):
        holds = "a Hugging Face model"
    elif not is_pretrained_dir(out) and (foreign := foreign_files(out)):
        holds = f"files of something else than a run ({foreign})"
    if holds:
        raise ValueError(f"--out {out} holds {holds}, which {action} would overwrite; name another folder")
    check_writable(out)
