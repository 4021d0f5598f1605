"""Sets by name without a network: rows of a set's own shape in a cache like the Hub's."""

import json
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub.constants
import pyarrow
import pyarrow.parquet
import pytest
from datasets.utils.file_utils import hash_url_to_filename
from draftsmith.data.prompts.named_sets import table

ROWS: dict[str, list[dict[str, Any]]] = {
    "mt_bench": [{"prompt_id": n, "category": ("math", "writing")[n % 2], "prompt": [f"say {n} things", "and more"],
                  "reference": []} for n in range(6)],
    "humaneval": [{"task_id": "HumanEval/0", "prompt": "def add(a, b):\n", "test": "assert add(1, 2) == 3"}],
    "gsm8k": [{"question": "What is 2 + 3?", "answer": "#### 5"}],
    "math500": [{"problem": f"Find {n}.", "subject": "math", "level": 1, "answer": str(n)} for n in range(3)],
    "spec_bench": [{"question_id": 81, "category": "writing", "turns": ["Compose a blog post.", "Shorten it."]}],
    "alpaca": [{"instruction": "Translate.", "input": "Hallo", "output": "Hello"},
               {"instruction": "Say hi.", "input": "", "output": "Hi"}],
    "cnn_dailymail": [{"article": "It rained.", "highlights": "Rain.", "id": "a"}],
    "livecodebench": [{"question_content": "Add two numbers.", "starter_code": "", "difficulty": "easy",
                       "private_test_cases": "x"},
                      {"question_content": "Add them.", "starter_code": "class Solution:", "difficulty": "hard"}],
    "swe_bench": [{"repo": "django/django", "problem_statement": "It fails.", "patch": "-"}],
    "speed_bench": [{"category": "qa", "turns": ["Who?"]},
                    {"category": "qa", "turns": [table()["speed_bench"].placeholder, "And then?"]}],
}


def cache_sets(place: Path, patch: pytest.MonkeyPatch, **changed: list[dict[str, Any]]) -> None:
    """Make `place` the cache, with the rows of every set, some of them `changed`; an empty list leaves a set out."""
    patch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(place))
    patch.setattr(datasets.config, "DOWNLOADED_DATASETS_PATH", place)
    for name, rows in (ROWS | changed).items():
        one = table()[name]
        if not rows:
            continue
        file = place / f"datasets--{one.source.replace('/', '--')}" / "snapshots" / one.revision / one.files.replace(
            "*", "00000-of-00001")
        if one.source.startswith("https://"):
            file = place / hash_url_to_filename(one.source, etag=None)
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.suffix == ".parquet":
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
        else:
            file.write_text("".join(json.dumps(row) + "\n" for row in rows))
