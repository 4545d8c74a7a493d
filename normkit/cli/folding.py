"""Commands on the norms of a saved model, a run's or a Hugging Face folder.

`audit` and `fold`.
"""

from pathlib import Path

from normkit.cli.line import check_writable, command, write


@command
def audit(model: Path, /) -> int:
    """Report for each norm of a saved model what folding can make of it; nothing changes.

    Args:
        model: Folder of a run, or of a Hugging Face model with safetensors.
    """
    from normkit.lab.pretrained import audit_dir, is_pretrained_dir

    if is_pretrained_dir(model):
        write(str(audit_dir(model)))
        return 0
    from normkit.lab.train.fold_run import audit_run
    from normkit.lab.train.run import load

    write(str(audit_run(load(model))))
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
    check_out(model, out, "folding")
    from normkit.lab.pretrained import fold_dir, is_pretrained_dir

    if is_pretrained_dir(model):
        report = fold_dir(model, out)
    else:
        from normkit.lab.train.fold_run import fold_run
        from normkit.lab.train.run import load, save

        folded, report = fold_run(load(model))
        save(out, folded)
    write(f"{report}\nsaved to {out}")
    return 0


def check_out(model: Path, out: Path, action: str) -> None:
    """Raise ValueError if `out` is the model itself, a trained run or a Hugging Face model."""
    from normkit.lab.pretrained import is_pretrained_dir
    from normkit.lab.report import results
    from normkit.lab.train import removal

    if out.resolve() == model.resolve():
        raise ValueError(f"--out {out} is the model itself, which is kept; name another folder")
    holds = ""
    if (out / results.FILE).is_file() or (out / "checkpoints").is_dir():
        holds = "a run that was trained"
    elif (out / removal.FILE).is_file():
        holds = "a finished removal"
    elif is_pretrained_dir(out) and not (out / "load.py").is_file():
        holds = "a Hugging Face model"
    if holds:
        raise ValueError(f"--out {out} holds {holds}, which {action} would overwrite; name another folder")
    check_writable(out)
