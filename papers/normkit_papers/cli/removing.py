"""`normkit remove-norms`: turn a trained model into one without norms."""

from pathlib import Path
from typing import Any, Literal

from normkit_papers.cli.folding import check_model, check_out
from normkit_papers.cli.line import command, complain, progress_console, write
from normkit_papers.cli.running import interruptible


@command
def remove_norms(
    model: Path,
    /,
    steps: int,
    out: Path,
    text: str | None = None,
    loss: Literal["outputs", "task"] = "outputs",
    to: str = "un(warmup=0)",
    statistics: Literal["frozen", "batches"] | None = None,
    lr: float | None = None,
    seed: int = 0,
    unfolded: bool = False,
    resume: bool = False,
) -> int:
    """Take the norms out of a trained model: fit, train a little, fold.

    Offline norms are fitted to its norms, trained and folded. Ends with a report: scores of the original, and of the
    model without norms, also of single tokens.

    Args:
        model: Folder of a run, or of a Hugging Face model with safetensors and a tokenizer.
        steps: Training steps; 300 are a good start.
        out: Folder for the model without norms.
        text: Text to train a Hugging Face model on: a file with one text a line, or a corpus such as wikitext-2.
        loss: outputs: no labels, the original's outputs and inner activations; task: the loss of the run's task.
        to: Spec of the offline norm that is folded.
        statistics: Statistics of the new norms while training: frozen, or those of the batches, calibrated at the
            end; batches with the loss of the task, else frozen.
        lr: Highest learning rate; a third of the run's, or 3e-4.
        seed: Seed of the order of batches and of dropout.
        unfolded: Also write the trained model before folding, to OUT/unfolded, to fold it with other options.
        resume: Continue an interrupted removal with the same settings.
    """
    check_model(model)
    check_out(model, out, "removal")
    from normkit_papers.studies.progress import Board
    from normkit_papers.train.removal import Removal
    from normkit_papers.train.removal import remove_norms as remove

    settings, stages = Removal(steps, to, loss, lr, text, statistics, seed, unfolded), ["without norms"]
    stages += ["original, trained likewise"] if settings.loss == "task" else []
    with interruptible() as signals, Board(progress_console(stderr=True), stages, settings.steps) as board:

        def on_progress(stage: str, progress: Any) -> bool:
            board.update(stage, progress)
            return bool(signals)

        try:
            removed = remove(model, out, settings, resume=resume, on_progress=on_progress)
        except KeyboardInterrupt:
            if not signals:
                raise
            complain("interrupted; the same command with --resume continues")
            return 128 + signals[0]
    write(f"{removed}\nsaved to {out}")
    return 0
