"""One run of llama.cpp's server, in an environment of its own: `python llama_cpp_run.py JOB.json RESULT.json`.

The job has `model` (a GGUF file), `draft` (a GGUF file, or null for none), `method` (the server's name of the kind of
draft), `draft_tokens`, `prompts` (lists of token ids), `max_tokens`, and `context` in tokens. The result has the
answers, and the numbers of drafts, drafted and accepted tokens. Greedy; keys and values are kept in float32, since in
float16 the answers of a random model can differ from one batch to another.
"""

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

SCRIPT = Path(__file__)
PACKAGE = "xllamacpp"
"""The Python package with llama.cpp's server, whose version ends with the number of llama.cpp's build."""
COUNTERS = {"draft_n": "drafted", "draft_n_accepted": "accepted"}  # Counters of a reply, by the server's names


def settings(job: dict[str, Any]) -> Any:
    """The server's settings."""
    import xllamacpp as engine

    params = engine.CommonParams()
    params.model.path = job["model"]
    params.n_ctx, params.n_parallel, params.port, params.fit_params = job["context"], 1, 0, False
    params.warmup, params.ui, params.verbosity = False, False, 0
    params.cache_type_k = params.cache_type_v = engine.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = engine.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = job.get("threads", 1)
    if job["draft"]:
        draft = params.speculative.draft
        draft.mparams.path, draft.n_max = job["draft"], job["draft_tokens"]
        draft.cache_type_k = draft.cache_type_v = engine.ggml_type.GGML_TYPE_F32
        name = f"COMMON_SPECULATIVE_TYPE_{job['method'].replace('-', '_').upper()}"
        params.speculative.types = [getattr(engine.common_speculative_type, name)]
    return params


def answer(address: str, prompt: list[int], max_tokens: int) -> dict[str, Any]:
    """The server's reply to a prompt of token ids."""
    asked = {"prompt": prompt, "n_predict": max_tokens, "temperature": 0, "ignore_eos": True, "return_tokens": True,
             "cache_prompt": False}
    request = Request(f"{address}/completion", json.dumps(asked).encode(), {"Content-Type": "application/json"})
    with urlopen(request) as reply:
        found: dict[str, Any] = json.loads(reply.read())
    return found


def main(job: dict[str, Any]) -> dict[str, Any]:
    """The result of a job."""
    import xllamacpp

    server = xllamacpp.Server(settings(job))
    replies = [answer(server.listening_address, prompt, job["max_tokens"]) for prompt in job["prompts"]]
    counts = [{key: one["timings"].get(key, 0) for key in COUNTERS} for one in replies]
    return {"engine": f"llama.cpp b{version(PACKAGE).split('.')[-1]}", "answers": [one["tokens"] for one in replies],
            **{name: sum(one[key] for one in counts) for key, name in COUNTERS.items()}}


if __name__ == "__main__":
    result = main(json.loads(Path(sys.argv[1]).read_text()))
    Path(sys.argv[2]).write_text(json.dumps(result))
