# matmix with the pinned set of packages, for NVIDIA GPUs or, with --build-arg DEVICE=cpu, for CPUs:
#
#     docker build --tag matmix .
#     docker run --rm --gpus all --ipc=host --volume "$PWD:/work" matmix train hydra_base_c4
#
# docs/install.md explains it. The packages make one layer, which stays while only matmix changes.
ARG DEVICE=cuda

FROM ubuntu:24.04 AS cpu
# The index of PyTorch's builds for CPUs, whose version numbers are higher, so that pip takes them before those for
# CUDA. Without it pip takes the latter, which run on CPUs, too, and are larger.
ARG TORCH_INDEX=
ENV PIP_EXTRA_INDEX_URL=$TORCH_INDEX

# The wheels bring CUDA's libraries; of the image only the settings for drivers are used.
FROM nvidia/cuda:13.0.2-base-ubuntu24.04 AS cuda

# hadolint ignore=DL3006
FROM ${DEVICE}
SHELL ["/bin/bash", "-o", "pipefail", "-c"]

# Triton and torch.compile call a C compiler while programs run.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends build-essential git python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

# Python 3.12. safe_path keeps folders named data or kernels, in which somebody may start it, off its path.
ENV PATH=/opt/matmix/bin:$PATH PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python3 -m venv /opt/matmix

# What matmix and two of its extras need, as pyproject.toml says; --use-pep517 because seqeval has no wheel.
COPY pyproject.toml constraints.txt /tmp/matmix/
WORKDIR /tmp/matmix
RUN python -c "import tomllib; project = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
extras = project['optional-dependencies']; print(*project['dependencies'], *extras['s3'], *extras['vision'], sep='\n')" \
    > needed.txt \
    && pip install --use-pep517 --constraint constraints.txt --requirement needed.txt \
    && rm needed.txt

# The project, by a wheel that is built beside the sources, which do not stay in the image.
RUN --mount=type=bind,target=/tmp/source,rw \
    pip install --no-deps --constraint /tmp/source/constraints.txt /tmp/source \
    && matmix --version

# Not root. Where files must belong to somebody else: docker run --user "$(id -u):$(id -g)" --env HOME=/tmp
RUN useradd --create-home --uid 10001 matmix && install --directory --owner=matmix --group=matmix /work
USER 10001
WORKDIR /work
ENTRYPOINT ["matmix"]
CMD ["--help"]
