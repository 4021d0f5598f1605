"""Loggers: what reaches each of them over two starts of one training, and what is refused before any work."""

import csv
import dataclasses
import json
import os
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy
import pytest
from draftsmith.modules import Medusa, Target, UserError
from draftsmith.trainers import draft_module, fit, loggers
from draftsmith.trainers.loggers import log_plots, logged, require_logger
from support.cases import CycleData, cycle_target, interrupted
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from .test_fitting import SETTINGS

FACTS = {"recipe": {"family": "medusa", "train": {"lr": 0.01}}, "hashes": {"target": "abc"}}
MEASURED = [0, 2, 4, 6, 7]  # Steps of the accepted length
Figures = list[tuple[int, dict[str, Any]]]


@dataclasses.dataclass
class Run:
    """A run of a service, as it keeps it over the starts of a training."""

    id: str
    facts: dict[str, Any]
    figures: Figures = dataclasses.field(default_factory=list)
    ends: list[Any] = dataclasses.field(default_factory=list)

    def log(self, figures: dict[str, Any], step: int | None = None) -> None:
        self.figures.append((figures.pop("trainer/global_step", step), figures))


class Service(dict[str, Run]):
    """The runs of a service by their ids, and the fake packages that reach it."""

    failure: Exception | None = None

    def started(self, run: str, facts: dict[str, Any]) -> Run:
        if self.failure is not None:
            raise self.failure
        return self.setdefault(run, Run(run, facts))

    def wandb(self) -> dict[str, Any]:
        def init(**given: Any) -> Any:
            assert given["resume"] == "allow"
            run = self.started(given["id"], {})
            return SimpleNamespace(id=run.id, log=run.log, define_metric=lambda *_, **__: None, config=SimpleNamespace(
                update=lambda facts, **_: run.facts.update(facts)))

        def setup() -> Any:
            return SimpleNamespace(settings=SimpleNamespace(mode=os.environ.get("WANDB_MODE", "online")))

        def login(prompt: bool, verify: bool) -> bool:
            if os.environ.get("WANDB_API_KEY") == "short":
                raise ValueError("API key must have 40+ characters")
            return "WANDB_API_KEY" in os.environ and not prompt and not verify

        return {"wandb": {"init": init, "run": None, "setup": setup, "Image": lambda pixels: pixels.shape,
                          "finish": lambda code: [*self.values()][-1].ends.append(code),
                          "login": login},
                "wandb.sdk": {}, "wandb.sdk.lib": {"RunDisabled": Run}, "wandb.wandb_run": {"Run": Run}}

    def trackio(self) -> dict[str, Any]:
        def init(**given: Any) -> Any:
            assert given["resume"] == "allow"
            run = self.started(given["name"], given["config"])
            self["now"] = run
            return SimpleNamespace(name=run.id, log=run.log)

        return {"trackio": {"init": init, "Image": lambda pixels: pixels.shape,
                            "finish": lambda: self.pop("now").ends.append(0)}}

    def mlflow(self) -> dict[str, Any]:
        service = self

        class MlflowError(Exception):
            __module__ = "mlflow.exceptions"

        class Client:
            def __init__(self, uri: str) -> None:
                self.uri = uri

            def search_experiments(self, max_results: int) -> None:
                raise MlflowError(f"no answer of {self.uri} after {os.environ['MLFLOW_HTTP_REQUEST_MAX_RETRIES']} try")

            def get_run(self, run: str) -> Any:
                return SimpleNamespace(info=SimpleNamespace(run_id=run, experiment_id="1"))

            def get_experiment_by_name(self, name: str) -> None:
                assert name == "draftsmith"

            def create_experiment(self, name: str, artifact_location: str) -> str:
                assert artifact_location.startswith("file:///")
                return "1"

            def create_run(self, experiment_id: str, tags: Any) -> Any:
                return self.get_run(service.started("run-1", {}).id)

            def log_batch(self, run_id: str, params: Any = (), metrics: Any = ()) -> None:
                if service.failure is not None:
                    raise service.failure
                service[run_id].facts.update({one.key: one.value for one in params})
                service[run_id].figures.extend((one.step, {one.key: one.value}) for one in metrics)

            def log_image(self, run_id: str, pixels: Any, artifact_file: str) -> None:
                service[run_id].log({artifact_file.removesuffix(".png"): pixels.shape}, 7)

            def set_terminated(self, run_id: str, status: str) -> None:
                service[run_id].ends.append(status)

        def entity(**given: Any) -> Any:
            return SimpleNamespace(**given)

        return {"mlflow": {"MlflowClient": Client, "set_tracking_uri": lambda uri: None},
                "mlflow.exceptions": {"MlflowException": MlflowError},
                "mlflow.tracking": {"MlflowClient": Client, "context": SimpleNamespace(resolve_tags=None)},
                "mlflow.tracking.context": {"resolve_tags": lambda tags: tags},
                "mlflow.entities": {"Metric": entity, "Param": entity},
                "mlflow.utils": {}, "mlflow.utils.mlflow_tags": {"MLFLOW_RUN_NAME": "mlflow.runName"}}


@pytest.fixture
def service(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Service:
    """A service whose package looks installed; nothing in the environment names a server or a key."""
    for name in ("WANDB_API_KEY", "WANDB_MODE", "MLFLOW_TRACKING_URI", "TRACKIO_SPACE_ID"):
        monkeypatch.delenv(name, raising=False)
    found, kind = Service(), request.getfixturevalue("kind")
    for name, content in getattr(found, kind, dict)().items():
        module = ModuleType(name)
        module.__spec__, module.__path__ = ModuleSpec(name, None, origin="fake"), []
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("wandb", "mlflow"):
        monkeypatch.setattr(f"lightning.pytorch.loggers.{name}._{name.upper()}_AVAILABLE", True)
    return found


def read_back(kind: str, folder: Path, service: Service) -> tuple[str, Figures, set[str]]:
    """(the facts as text, the figures by step, names of the plots) that a logger has."""
    if kind == "tensorboard":
        events = EventAccumulator(str(folder / kind)).Reload()
        figures = [(event.step, {name: event.value}) for name in events.Tags()["scalars"]
                   for event in events.Scalars(name)]
        [text] = events.Tensors("training/text_summary")[0].tensor_proto.string_val
        return text.decode(), figures, set(events.Tags()["images"])
    if kind == "csv":
        with (folder / "csv" / "metrics.csv").open() as file:
            rows = [(int(row.pop("step")), {name: value for name, value in row.items() if value})
                    for row in csv.DictReader(file)]
        return (folder / "csv" / "hparams.yaml").read_text(), rows, set()
    [run] = service.values()
    plots = {name for _, figures in run.figures for name, value in figures.items() if name.startswith("report/")}
    assert json.loads((folder / "logger.json").read_text()) == {kind: run.id}
    assert run.ends == {"wandb": [1, 0, 0], "trackio": [0, 0, 0], "mlflow": [
        "FAILED", "FAILED", "FINISHED", "FINISHED", "FINISHED"]}[kind]
    return json.dumps(run.facts), run.figures, plots


@pytest.fixture(scope="module")
def target() -> Target:
    return cycle_target()


@pytest.fixture(scope="module")
def unlogged(target: Target, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The weights of a training that nothing logs."""
    out = tmp_path_factory.mktemp("unlogged")
    fit(draft_module(Medusa)(target, dataclasses.replace(SETTINGS, logger="none")), CycleData(), out, progress=False)
    assert sorted(file.name for file in out.iterdir()) == ["best.safetensors", "last.ckpt"]
    return (out / "best.safetensors").read_bytes()


@pytest.mark.parametrize("kind", ["tensorboard", "csv", "wandb", "mlflow", "trackio"])
def test_a_killed_training_goes_on_in_its_run_with_the_same_bytes(
    kind: Any, target: Target, service: Service, unlogged: bytes, tmp_path: Path
) -> None:
    settings, folder = dataclasses.replace(SETTINGS, logger=kind), tmp_path / "train"
    with interrupted(draft_module(Medusa), 4):
        fit(draft_module(Medusa)(target, settings), CycleData(), folder, progress=False, facts=FACTS)
    fit(draft_module(Medusa)(target, settings), CycleData(), folder, progress=False, facts=FACTS)
    assert (folder / "best.safetensors").read_bytes() == unlogged
    with logged(kind, folder, FACTS) as logger:
        assert logger is not None
        logger.log_metrics({"evaluation/medusa/accepted_length": 1.5}, 7)
        log_plots(logger, {"report/speeds": numpy.zeros((4, 6, 3), numpy.uint8)}, 7)
    facts, figures, plots = read_back(kind, folder, service)
    if kind == "csv":
        assert [step for step, one in figures if "loss" in one] == [*range(1, 8)], "a step is there twice"
    assert all(word in facts for word in ("medusa", "0.01", "abc"))
    steps = {name: sorted({step for step, one in figures if name in one}) for name in (
        "accepted_length", "accepted/position1", "loss", "head1/top1", "evaluation/medusa/accepted_length")}
    assert [*steps.values()] == [MEASURED, MEASURED, [*range(1, 8)], [*range(1, 8)], [7]]
    assert plots == (set() if kind == "csv" else {"report/speeds"})


ROW = "0.5,4,0.25\r\n"


@pytest.mark.parametrize(("table", "steps"), [
    (f"loss,step,time\r\n{ROW}0.5,5,1\r\n0.5,17", [4]),
    (f"loss,step,time\r\n{ROW}0.5,3\r\n0.5,xx,1\r\n0.5,1.0,1\r\n0.5,,1\r\n0.5,2,1,1\r\n", [4]),
    (f"loss,step,time\r\n0.5,2,\xff\r\n{ROW}\0\0", [2, 4]),
    (f"loss,number,time\r\n{ROW}", []),
    ("", []),
])
def test_a_damaged_table_keeps_its_whole_rows_up_to_the_checkpoint_and_outlives_a_kill(
    table: str, steps: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "csv" / "metrics.csv"
    file.parent.mkdir()
    file.write_bytes(table.encode("latin-1"))
    with monkeypatch.context() as killed:
        killed.setattr(loggers.CSVLogger, "experiment", property(lambda _: 1 / 0))
        with pytest.raises(ZeroDivisionError), logged("csv", tmp_path, FACTS, lambda: 4):
            pass
    with logged("csv", tmp_path, FACTS, lambda: 4):
        pass
    assert steps == ([int(row["step"]) for row in csv.DictReader(file.open())] if file.exists() else [])


@pytest.mark.parametrize(("kind", "environment", "message"), [
    ("wandb", {}, "no login for it; call wandb login, or set WANDB_MODE=offline"),
    ("wandb", {"WANDB_MODE": "offline"}, ""),
    ("wandb", {"WANDB_API_KEY": "key"}, ""),
    ("wandb", {"WANDB_API_KEY": "short"}, r"wandb cannot be used \(API key must have 40\+.*\); set WANDB_MODE"),
    ("trackio", {"TRACKIO_SPACE_ID": "me/space"}, "call hf auth login, or unset TRACKIO_SPACE_ID"),
    ("trackio", {}, ""),
    ("mlflow", {"MLFLOW_TRACKING_URI": "http://there"}, r"\(no answer of http://there after 1 try\); unset MLFLOW_TRA"),
    ("mlflow", {}, ""),
])
def test_a_service_without_login_or_answer_is_refused_with_the_way_to_do_without(
    kind: str, environment: dict[str, str], message: str, request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch
) -> None:
    request.getfixturevalue("service")
    monkeypatch.setattr(loggers, "get_token", lambda: None)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if not message:
        require_logger(kind)
        return
    with pytest.raises(UserError, match=message):
        require_logger(kind)


@pytest.mark.parametrize("kind", ["wandb", "mlflow", "trackio", "tensorboard"])
def test_what_is_not_installed_is_refused_with_the_line_that_installs_it(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that W&B has left in the working folder is not taken for its package."""
    (tmp_path / kind).mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    for name in [name for name in sys.modules if name.partition(".")[0] == kind]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(UserError, match=rf"train.logger is {kind}, which is not installed: pip install {kind}, or set"):
        require_logger(kind)
    require_logger("csv")
    require_logger("none")


@pytest.mark.parametrize("kind", ["mlflow", "trackio"])
def test_a_service_that_fails_is_a_sentence_and_another_error_is_not(
    kind: Any, target: Target, service: Service, tmp_path: Path
) -> None:
    settings = dataclasses.replace(SETTINGS, logger=kind)
    service.failure = ValueError("no\n token")
    with pytest.raises(UserError, match=rf"the logger {kind} cannot be used \(no token\); unset .*goes on from"):
        fit(draft_module(Medusa)(target, settings), CycleData(), tmp_path, progress=False, facts=FACTS)
    service.failure = None
    with pytest.raises(ValueError, match="of the training"), logged(kind, tmp_path, FACTS):
        raise ValueError("of the training")
    if kind == "mlflow":
        gone = sys.modules["mlflow.exceptions"].MlflowException("gone")  # type: ignore[attr-defined]
        with pytest.raises(UserError, match=r"mlflow cannot be used \(gone\)"), logged(kind, tmp_path, {}):
            raise gone


def test_only_the_first_process_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    with logged("csv", tmp_path, FACTS) as logger:
        assert logger is None
    assert not any(tmp_path.iterdir())
