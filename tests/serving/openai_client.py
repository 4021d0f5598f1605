"""Questions to a server in the environment of vLLM: `python openai_client.py JOB.json RESULT.json`.

The job has `address`, `prompts` (lists of token ids), `max_tokens`, and a `model` where it is not the server's first.
The result has the answers, and the numbers of
drafts, drafted and accepted tokens.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any
from urllib.request import urlopen

SCRIPT = Path(__file__)
COUNTERS = {"drafts": "num_drafts", "drafted": "num_draft_tokens", "accepted": "num_accepted_tokens"}
"""Counters of drafts by vLLM's names."""


def main(job: dict[str, Any]) -> dict[str, Any]:
    """The result of a job."""
    from openai import OpenAI

    client = OpenAI(base_url=f"{job['address']}/v1", api_key="none")
    model = job.get("model") or client.models.list().data[0].id
    answers = [client.completions.create(model=model, prompt=prompt, max_tokens=job["max_tokens"], temperature=0,
                                         extra_body={"ignore_eos": True, "return_token_ids": True}).choices[0].token_ids
               for prompt in job["prompts"]]
    metrics = urlopen(f"{job['address']}/metrics").read().decode()
    counts = {name: sum(int(float(value)) for value in re.findall(
        rf"^vllm:spec_decode_{counter}_total\{{.*\}} (\S+)$", metrics, flags=re.MULTILINE))
        for name, counter in COUNTERS.items()}
    return {"answers": answers, **counts}


if __name__ == "__main__":
    result = main(json.loads(Path(sys.argv[1]).read_text()))
    Path(sys.argv[2]).write_text(json.dumps(result))
