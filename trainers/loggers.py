"""Loggers of a training by name: what each of them needs here, the run that it goes on with, and its plots."""

import csv
import json
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from secrets import token_hex
from typing import Any
from unittest.mock import patch

from huggingface_hub import get_token
from lightning.pytorch.loggers import CSVLogger, Logger, MLFlowLogger, TensorBoardLogger, WandbLogger

from ..modules import UserError
from ..modules.files.atomic_files import write_file
from ..modules.files.json_records import read_record
from ..modules.processes import Processes, local_rank

PROJECT, RUN_FILE = "draftsmith", "logger.json"  # Project of all runs, and the file of a training's ids by logger
MLFLOW_URI = "MLFLOW_TRACKING_URI"  # Variable of the environment with MLflow's server
BRIEF = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "20"}  # By default it tries for minutes
OFFLINE = {"wandb": "set WANDB_MODE=offline to log into the run's folder (wandb sync sends that later)",
           "mlflow": f"unset {MLFLOW_URI} to log into mlflow.db in the run's folder",
           "trackio": "unset TRACKIO_SPACE_ID and TRACKIO_SERVER_URL to log on this machine"}
"""Loggers that may need a service, and how to do without it."""


def require_logger(name: str) -> None:
    """Refuse a logger whose package or login is not here, before any work; nothing asks for a login later. Raises
    UserError."""
    if name in ("csv", "none"):
        return
    spec, login, server = find_spec(name), True, os.environ.get(MLFLOW_URI, "")
    # A folder of that name, such as W&B leaves in the working folder, is no package.
    if spec is None or spec.origin is None:
        raise UserError(f"train.logger is {name}, which is not installed: pip install {name}, or set train.logger to "
                        "csv or none")
    package = import_module(name)
    # A key may be malformed, and a server may not answer.
    with _explained(name), patch.dict(os.environ, {**BRIEF, **os.environ}):
        if name == "wandb" and package.setup().settings.mode in ("online", "shared"):
            try:
                login = package.login(prompt=False, verify=False)
            except TypeError:
                # Of a version that always asks.
                login = bool(package.api.api_key)
        elif name == "trackio" and os.environ.get("TRACKIO_SPACE_ID"):
            login = get_token() is not None
        elif name == "mlflow" and server.startswith("http"):
            package.MlflowClient(server).search_experiments(max_results=1)
    if not login:
        raise UserError(f"train.logger is {name}, and this machine has no login for it; call "
                        f"{'wandb login' if name == 'wandb' else 'hf auth login'}, or {OFFLINE[name]}")


@contextmanager
def _explained(name: str, *packages: str) -> Iterator[None]:
    """Context in which an error of these packages, of any without them, is a sentence on what may need a service."""
    try:
        yield
    except Exception as error:
        foreign = packages and type(error).__module__.partition(".")[0] not in packages
        if name not in OFFLINE or foreign or isinstance(error, UserError):
            raise
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"the logger {name} cannot be used ({reason}); {OFFLINE[name]}, or choose another train.logger."
                        " Finished work is kept, and the same command goes on from there") from error


class TrackioLogger(Logger):
    """Runs of Trackio, which brings no logger for Lightning; each is known by its name."""

    name, version = PROJECT, ""

    def __init__(self, run: str, facts: Mapping[str, Any]) -> None:
        super().__init__()
        self.run, self.version = import_module("trackio").init(
            project=PROJECT, name=run, resume="allow", config=dict(facts), embed=False), run

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Log figures, or media of Trackio."""
        self.run.log(dict(metrics), step=step)

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        """The run was started with them."""


@contextmanager
def logged(name: str, folder: Path, facts: Mapping[str, Any],
           reached: Callable[[], float] = lambda: math.inf) -> Iterator[Logger | None]:
    """Context in which the training in a folder is logged, in its former run if it had one; of several processes the
    first one logs. Steps after the one `reached` before will be logged anew. UserError if a service fails, with the way
    to do without."""
    if name == "none" or local_rank() or Processes.launched().rank:
        yield None
        return
    file, server, status = folder / RUN_FILE, os.environ.get(MLFLOW_URI), "failed"
    kept = read_record(dict[str, str], file, "delete it, and a new run is logged") if file.is_file() else {}
    with _explained(name, name):
        with _explained(name):
            logger = _logger(name, folder.resolve(), kept.get(name), facts, reached)
        if name in OFFLINE:
            write_file(file, json.dumps({**kept, name: logger.version}) + "\n")
        try:
            yield logger
            status = "success"
        finally:
            logger.finalize(status)
            if name == "mlflow":
                # The logger has set it for the whole process, and the next training has a folder of its own.
                import_module(name).set_tracking_uri(server)
            elif name in OFFLINE:
                import_module(name).finish(*[int(status == "failed")] * (name == "wandb"))


def _logger(name: str, folder: Path, run: str | None, facts: Mapping[str, Any],
            reached: Callable[[], float]) -> Logger:
    """The logger with the facts of the training in its run, an earlier one if it has an id."""
    title, server = folder.parent.name, os.environ.get(MLFLOW_URI)
    logger: Logger
    if name == "trackio":
        logger = TrackioLogger(run or f"{title}-{token_hex(3)}", facts)
    elif name == "mlflow":
        # Not before its import, which sets the level too.
        logging.getLogger(import_module(name).__name__).setLevel(logging.WARNING)
        logger = MLFlowLogger(os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT), run_name=title, run_id=run,
                              tracking_uri=server or f"sqlite:///{folder / 'mlflow.db'}",
                              artifact_location=None if server else (folder / "mlartifacts").as_uri())
    elif name == "wandb":
        # A bar that is rewritten in place would fill the service's copy of the terminal.
        made = import_module(name).init(
            project=os.environ.get("WANDB_PROJECT", PROJECT), name=title, dir=folder, id=run or token_hex(4),
            resume="allow", settings={"console": "off"})
        made.define_metric("trainer/global_step")
        made.define_metric("*", step_metric="trainer/global_step", step_sync=True)
        logger = WandbLogger(experiment=made)
    elif name == "csv":
        table, former, last = folder / "csv" / "metrics.csv", folder / "csv" / "metrics.former", reached()
        # It deletes its file when it starts: what an interrupted run has left waits in another one, also after a kill.
        if table.is_file() and not former.is_file():
            table.rename(former)
        logger = CSVLogger(folder, name="csv", version="", flush_logs_every_n_steps=1)
        # A last row without its end is torn.
        text = former.read_text("utf-8", "replace").rpartition("\n")[0] if former.is_file() else ""
        for row in csv.DictReader(text.replace("\0", "").splitlines()):
            whole = None not in [*row, *row.values()] and row.get("step", "").isdecimal()
            if whole and (step := int(row["step"])) <= last:
                logger.experiment.log_metrics({key: value for key, value in row.items() if value}, step)
        logger.experiment.save()
        former.unlink(missing_ok=True)
    else:
        logger = TensorBoardLogger(folder, name="tensorboard", version="", default_hp_metric=False)
        logger.experiment.add_text("training", f"```\n{json.dumps(facts, indent=2)}\n```")
    # MLflow refuses to change a parameter, such as minutes that are raised.
    if name != "mlflow" or run is None:
        logger.log_hyperparams(dict(facts))
    return logger


def log_plots(logger: Logger, plots: Mapping[str, Any], step: int) -> None:
    """Hand plots, pixels [height, width, RGB] by name, to a logger that shows pictures."""
    for name, pixels in plots.items():
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.add_image(name, pixels, step, dataformats="HWC")
        elif isinstance(logger, WandbLogger):
            logger.log_image(name, [pixels], step)
        elif isinstance(logger, MLFlowLogger):
            logger.experiment.log_image(logger.run_id, pixels, artifact_file=f"{name}.png")
        elif isinstance(logger, TrackioLogger):
            logger.log_metrics({name: import_module("trackio").Image(pixels)}, step)
