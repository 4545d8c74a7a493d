"""`normkit calibrate`: compute the statistics of a run's norms again."""

from pathlib import Path

from normkit.cli.folding import check_out
from normkit.cli.line import command, write


@command
def calibrate(run: Path, /, out: Path, batches: int | None = None) -> int:
    """Compute the running statistics of a run's norms again, from training batches.

    It helps if a model does well with the statistics of each batch and badly with its running statistics. The weights
    stay. The validation loss before and after is printed.

    Args:
        run: Folder of a run. Its data must be here.
        out: Folder for the calibrated run, which `normkit fold`, `pronounce --run` and `translate` take.
        batches: Training batches; the default is the number that training uses for its calibrated scores.
    """
    check_out(run, out, "calibration")
    from normkit.lab.train.calibrate_run import calibrate_run
    from normkit.lab.train.folder import load, save

    calibrated, report = calibrate_run(load(run), batches)
    save(out, calibrated)
    write(f"{report}\nsaved to {out}")
    return 0
