"""Formats refuse an artifact by shapes alone, so that a command can say it before the target is read."""

from dataclasses import replace
from pathlib import Path

import pytest
from draftsmith.export import Artifact, ExportSettings, load_artifact, save_artifact
from draftsmith.export.layouts.registry import EXPORT_FORMATS, writer_of
from draftsmith.modules import Adapter, Target, TargetConfig, Topology, UserError
from draftsmith.modules.target.loading.loading import sketch_target
from support.families import CASES, randomised


def refusals(artifact: Artifact) -> dict[str, str]:
    """The sentence of each format that cannot hold an artifact; empty for those that can."""
    found = dict[str, str]()
    for chosen in EXPORT_FORMATS:
        try:
            writer_of(chosen, artifact, artifact.target, ExportSettings())
            found[chosen.name] = ""
        except UserError as error:
            found[chosen.name] = str(error)
    return found


@pytest.mark.parametrize("name", CASES)
def test_a_sketch_is_refused_as_the_artifact_is(name: str, tiny_target: Target, tmp_path: Path) -> None:
    case, folder = CASES[name], tmp_path / "artifact"
    save_artifact(folder, randomised(case.make(tiny_target)), tiny_target.identity, {}, Topology.chain(1),
                  case.change(tiny_target))
    whole, sketch = (load_artifact(folder, target) for target in (
        tiny_target, sketch_target(TargetConfig(name="tiny-random"))))
    found = refusals(whole)
    assert any(found.values())
    assert refusals(replace(sketch, adapter=whole.adapter and Adapter({}, 1.0))) == found
