"""Commands on the norms of a saved model, a run's or a Hugging Face folder.

`audit` and `fold`.
"""

from pathlib import Path

from normkit.cli.line import parse_arguments, write


def audit(arguments: list[str]) -> int:
    """Report for each norm of a saved model what folding can make of it."""
    from tyro.conf import Positional

    def parse(model: Positional[Path]) -> Path:
        """Report for each norm of a saved model what folding can make of it. Nothing changes.

        Args:
            model: Folder of a run, or of a Hugging Face model with safetensors.
        """
        return model

    folder = parse_arguments(parse, arguments, "audit")
    from normkit.lab.pretrained import audit_dir, is_pretrained_dir

    if is_pretrained_dir(folder):
        write(str(audit_dir(folder)))
        return 0
    from normkit.lab.train.fold_run import audit_run
    from normkit.lab.train.run import load

    write(str(audit_run(load(folder))))
    return 0


def fold(arguments: list[str]) -> int:
    """Fold the norms of a saved model away, and verify that nothing changed."""
    from tyro.conf import Positional

    def parse(model: Positional[Path], out: Path) -> tuple[Path, Path]:
        """Fold the norms of a saved model into the layers beside them, verified in float64.

        Args:
            model: Folder of a run, or of a Hugging Face model with safetensors.
            out: Folder for the folded model: a run that `normkit pronounce --run` and `translate` take like any other,
                or a Hugging Face folder with a load.py.
        """
        return model, out

    folder, out = parse_arguments(parse, arguments, "fold")
    check_out(folder, out, "folding")
    from normkit.lab.pretrained import fold_dir, is_pretrained_dir

    if is_pretrained_dir(folder):
        report = fold_dir(folder, out)
    else:
        from normkit.lab.train.fold_run import fold_run
        from normkit.lab.train.run import load, save

        folded, report = fold_run(load(folder))
        save(out, folded)
    write(f"{report}\nsaved to {out}")
    return 0


def check_out(model: Path, out: Path, action: str) -> None:
    """Raise ValueError if `out` is the model itself, a trained run or a Hugging Face model."""
    from normkit.lab.pretrained import is_pretrained_dir
    from normkit.lab.report import results

    if out.resolve() == model.resolve():
        raise ValueError(f"--out {out} is the model itself, which is kept; name another folder")
    holds = ""
    if (out / results.FILE).is_file() or (out / "checkpoints").is_dir():
        holds = "a run that was trained"
    elif is_pretrained_dir(out) and not (out / "load.py").is_file():
        holds = "a Hugging Face model"
    if holds:
        raise ValueError(f"--out {out} holds {holds}, which {action} would overwrite; name another folder")
