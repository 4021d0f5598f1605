"""One run of vLLM, in an environment of its own: `python vllm_run.py JOB.json RESULT.json`.

The job has `model` (a folder), `speculative` (vLLM's configuration of drafts, or null for none), `loader` (its extra
settings for loading), `dtype` (the number format of passes), `prompts` (lists of token ids), `max_tokens`,
`batch_sizes`, and `context` in tokens. The result has the number format of the passes, the answers, and for each batch
size tokens, seconds and the counters of drafts. Greedy only: with a temperature vLLM 0.32 is wrong on a CPU
(`utils/cpu_triton_utils.py` leaves the expanded temperature of drafted tokens unset).
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1",
               "VLLM_NO_USAGE_STATS": "1", "VLLM_HOST_IP": "127.0.0.1", "VLLM_LOGGING_LEVEL": "ERROR"}
"""Settings of vLLM: one process, one GiB of cache, no network, errors alone."""

COUNTERS = {"vllm:spec_decode_num_drafts": "drafts", "vllm:spec_decode_num_draft_tokens": "drafted",
            "vllm:spec_decode_num_accepted_tokens": "accepted"}


def counters(engine: Any) -> dict[str, int]:
    """Drafts, drafted and accepted tokens since the engine started."""
    found = dict.fromkeys(COUNTERS.values(), 0)
    for metric in engine.get_metrics():
        if metric.name in COUNTERS:
            found[COUNTERS[metric.name]] += int(metric.value)
    return found


def timed(engine: Any, prompts: list[list[int]], sampling: Any, batch_size: int) -> dict[str, Any]:
    """Answers, seconds and counters of all prompts, so many at once."""
    before, started, answers = counters(engine), time.perf_counter(), []
    for first in range(0, len(prompts), batch_size):
        batch = [{"prompt_token_ids": prompt} for prompt in prompts[first : first + batch_size]]
        answers += [list(one.outputs[0].token_ids) for one in engine.generate(batch, sampling, use_tqdm=False)]
    seconds, after = time.perf_counter() - started, counters(engine)
    return {"batch_size": batch_size, "seconds": seconds, "tokens": sum(map(len, answers)), "answers": answers,
            **{name: after[name] - before[name] for name in after}}


def main(job: dict[str, Any]) -> dict[str, Any]:
    """The result of a job."""
    os.environ |= ENVIRONMENT
    import torch

    # vLLM chooses AMX kernels for int8 weights by the weights alone: they end with an error on the float32 inputs of a
    # run whose answers are to be compared.
    torch.cpu._is_amx_tile_supported = lambda: False
    from vllm import LLM, SamplingParams, __version__

    started = time.perf_counter()
    speculative = {"speculative_config": job["speculative"]} if job["speculative"] else {}
    engine = LLM(model=job["model"], skip_tokenizer_init=True, dtype=job["dtype"], max_model_len=job["context"],
                 enforce_eager=True, max_num_seqs=8, max_num_batched_tokens=max(256, job["context"]),
                 disable_log_stats=False, model_loader_extra_config=job["loader"], enable_prefix_caching=False,
                 **speculative)
    loaded = time.perf_counter() - started
    sampling = SamplingParams(temperature=0, max_tokens=job["max_tokens"], ignore_eos=True, detokenize=False)
    # The first pass of an engine is slow.
    engine.generate([{"prompt_token_ids": job["prompts"][0]}], sampling, use_tqdm=False)
    return {"engine": f"vLLM {__version__.split('+')[0]}", "load_seconds": loaded,
            "dtype": str(engine.model_config.dtype).removeprefix("torch."),
            "runs": [timed(engine, job["prompts"], sampling, size) for size in job["batch_sizes"]]}


if __name__ == "__main__":
    result = main(json.loads(Path(sys.argv[1]).read_text()))
    Path(sys.argv[2]).write_text(json.dumps(result))
