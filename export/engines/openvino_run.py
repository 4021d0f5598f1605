"""One run of OpenVINO GenAI, in an environment of its own: `python openvino_run.py JOB.json RESULT.json`.

The job has `model` (a folder), `draft` (a folder, or null for none), `draft_tokens`, `prompts` (lists of token ids) and
`max_tokens`. The result has the answers, and the numbers of drafts, drafted and accepted tokens; of the last two the
engine leaves out a draft that is cut short by the end of the answer. With DFlash it counts no drafted tokens: here they
are those of whole drafts, the last one's too. Greedy; numbers, keys and values are kept in float32.
"""

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__)
PRECISE = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
"""Number formats of passes, and of keys and values."""


def pipeline(job: dict[str, Any]) -> Any:
    """The engine with its models."""
    import openvino_genai as engine

    scheduler = engine.SchedulerConfig()
    scheduler.cache_size = 1
    scheduler.enable_prefix_caching = False
    draft = {"draft_model": engine.draft_model(job["draft"], "CPU", **PRECISE)} if job["draft"] else {}
    return engine.LLMPipeline(job["model"], "CPU", scheduler_config=scheduler, **draft, **PRECISE)


def main(job: dict[str, Any]) -> dict[str, Any]:
    """The result of a job."""
    import numpy
    import openvino
    import openvino_genai

    engine, config = pipeline(job), openvino_genai.GenerationConfig()
    config.max_new_tokens, config.ignore_eos, config.do_sample = job["max_tokens"], True, False
    if job["draft"]:
        config.num_assistant_tokens = job["draft_tokens"]
    counts, answers = dict.fromkeys(("drafts", "drafted", "accepted"), 0), []
    for prompt in job["prompts"]:
        ids = numpy.array([prompt])
        inputs = openvino_genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(numpy.ones_like(ids)))
        found = engine.generate(inputs, config)
        answers.append(list(found.tokens[0]))
        if job["draft"]:
            metrics = found.extended_perf_metrics
            # The first pass is the prompt's.
            drafts = len(metrics.main_model_metrics.raw_metrics.m_durations) - 1
            counts["drafts"] += drafts
            counts["drafted"] += metrics.get_num_draft_tokens() or drafts * job["draft_tokens"]
            counts["accepted"] += metrics.get_num_accepted_tokens()
    return {"engine": f"OpenVINO GenAI {'.'.join(version('openvino-genai').split('.')[:2])}", "answers": answers,
            **counts}


if __name__ == "__main__":
    result = main(json.loads(Path(sys.argv[1]).read_text()))
    Path(sys.argv[2]).write_text(json.dumps(result))
