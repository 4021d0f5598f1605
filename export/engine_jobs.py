"""Jobs in an environment with an engine, whose names they have: `python engine_jobs.py JOB.json RESULT.json`.

An engine answers `prompts` (lists of token ids) greedily, with `max_tokens` each, by `model` and with `draft_tokens` of
`draft` (null for none). The result has its name and version, the answers, and the numbers of drafts, drafted and
accepted tokens. This file imports nothing of the project, which is not in that environment."""

import json
import os
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

# vLLM -----------------------------------------------------------------------------------------------------------------

VLLM_SETTINGS = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1",
                 "VLLM_NO_USAGE_STATS": "1", "VLLM_HOST_IP": "127.0.0.1", "VLLM_LOGGING_LEVEL": "ERROR"}
"""One process, one GiB of cache, no network, errors alone."""
VLLM_COUNTERS = {"vllm:spec_decode_num_drafts": "drafts", "vllm:spec_decode_num_draft_tokens": "drafted",
                 "vllm:spec_decode_num_accepted_tokens": "accepted"}


def run_vllm(job: dict[str, Any]) -> dict[str, Any]:
    """The answers for each of `batch_sizes`, with tokens, seconds (the mean of those to the first token too)
    and counters of each.

    The job has `speculative` (vLLM's configuration of drafts, null for none), `loader` (its extra settings for
    loading), `dtype` (the number format of passes) and `context` in tokens. Greedy only: with a temperature vLLM 0.32
    is wrong on a CPU (`utils/cpu_triton_utils.py` leaves the expanded temperature of drafted tokens unset)."""
    os.environ |= VLLM_SETTINGS
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
    runs = []
    for size in job["batch_sizes"]:
        before, started, found = vllm_counters(engine), time.perf_counter(), []
        for first in range(0, len(job["prompts"]), size):
            batch = [{"prompt_token_ids": prompt} for prompt in job["prompts"][first : first + size]]
            found += engine.generate(batch, sampling, use_tqdm=False)
        seconds, after = time.perf_counter() - started, vllm_counters(engine)
        answers = [list(one.outputs[0].token_ids) for one in found]
        runs.append({"batch_size": size, "seconds": seconds, "tokens": sum(map(len, answers)), "answers": answers,
                     "first_token": sum(one.metrics.first_token_latency for one in found) / len(found),
                     **{name: after[name] - before[name] for name in after}})
    return {"engine": f"vLLM {__version__.split('+')[0]}", "load_seconds": loaded, "runs": runs,
            "dtype": str(engine.model_config.dtype).removeprefix("torch.")}


def vllm_counters(engine: Any) -> dict[str, int]:
    """Drafts, drafted and accepted tokens since the engine started."""
    held = {one.name: one for one in engine.get_metrics()}
    return {name: int(held[key].value) if key in held else 0 for key, name in VLLM_COUNTERS.items()}


# llama.cpp ------------------------------------------------------------------------------------------------------------

LLAMA_COUNTERS = {"draft_n": "drafted", "draft_n_accepted": "accepted"}  # Counters of a reply, by the server's names


def run_llama_cpp(job: dict[str, Any]) -> dict[str, Any]:
    """The answers of its server with GGUF files, by the Python package xllamacpp, whose version ends with the number of
    llama.cpp's build. The job has `method` (the server's name of the kind of draft) and `context` in tokens. Keys and
    values are kept in float32: in float16 the answers of a random model can differ from one batch to another."""
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
    server, replies = engine.Server(params), []
    for prompt in job["prompts"]:
        asked = {"prompt": prompt, "n_predict": job["max_tokens"], "temperature": 0, "ignore_eos": True,
                 "return_tokens": True, "cache_prompt": False}
        request = Request(f"{server.listening_address}/completion", json.dumps(asked).encode(),
                          {"Content-Type": "application/json"})
        with urlopen(request) as reply:
            replies.append(json.loads(reply.read()))
    return {"engine": f"llama.cpp b{version('xllamacpp').split('.')[-1]}",
            "answers": [one["tokens"] for one in replies],
            **{name: sum(one["timings"].get(key, 0) for one in replies) for key, name in LLAMA_COUNTERS.items()}}


# OpenVINO -------------------------------------------------------------------------------------------------------------

OPENVINO_MODEL = "openvino_model.xml"  # The file of a converted model's graph; its weights are in the .bin next to it
PRECISE = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
"""Number formats of passes, and of keys and values."""


def run_openvino(job: dict[str, Any]) -> dict[str, Any]:
    """The answers of OpenVINO GenAI with converted folders. Of drafted and accepted tokens it leaves out a draft that
    the end of the answer cuts short. With DFlash it counts no drafted tokens: here they are those of whole drafts."""
    import numpy
    import openvino
    import openvino_genai

    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size, scheduler.enable_prefix_caching = 1, False
    draft = {"draft_model": openvino_genai.draft_model(job["draft"], "CPU", **PRECISE)} if job["draft"] else {}
    engine = openvino_genai.LLMPipeline(job["model"], "CPU", scheduler_config=scheduler, **draft, **PRECISE)
    config = openvino_genai.GenerationConfig()
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


def convert(job: dict[str, Any]) -> dict[str, Any]:
    """The version of optimum-intel, which has converted `source` (a Hugging Face folder, or an EAGLE-3 or DFlash
    drafter in its official layout, with `own_code` true) into the folder `out`.

    `layers` are the tapped layers of an EAGLE-3 drafter by their outputs, from 0, or null. OpenVINO GenAI reads them
    from the model; without them it takes the official ones of another numbering. Those of DFlash are in its
    configuration."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    from optimum.exporters.openvino import main_export
    from optimum.intel import OVConfig

    source, out = Path(job["source"]), Path(job["out"])
    # EAGLE-3 and DFlash are models of optimum-intel's own code, which counts as remote.
    main_export(str(source), out, task="text-generation-with-past", library_name="transformers",
                trust_remote_code=job["own_code"], ov_config=OVConfig(dtype="fp32"),
                convert_tokenizer=(source / "tokenizer_config.json").exists())
    if job["layers"] is not None:
        import openvino

        file, written = out / OPENVINO_MODEL, out / f"with_layers_{OPENVINO_MODEL}"
        model = openvino.Core().read_model(file)
        model.set_rt_info(job["layers"], ["hidden_layers_list"])
        # Under another name first: the weights are still read from the former files.
        openvino.save_model(model, written, compress_to_fp16=False)
        for suffix in (".xml", ".bin"):
            written.with_suffix(suffix).replace(file.with_suffix(suffix))
    return {"version": version("optimum-intel")}


if __name__ == "__main__":
    asked = json.loads(Path(sys.argv[1]).read_text())
    jobs = {"vLLM": run_vllm, "llama.cpp": run_llama_cpp, "OpenVINO": run_openvino, "optimum-intel": convert}
    Path(sys.argv[2]).write_text(json.dumps(jobs[asked["engine"]](asked)))
