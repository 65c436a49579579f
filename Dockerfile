# tfive in a container. On a CPU:   docker build -t tfive .
# On a GPU (docker run --gpus all): docker build -t tfive --build-arg BASE=nvidia/cuda:12.8.1-base-ubuntu24.04 .
# torch brings the CUDA libraries it was built with; the base adds what fused kernels are compiled with when they are first used.
ARG BASE=python:3.12-slim
FROM ${BASE}

ARG EXTRAS=gguf,parquet,zstd,hub,eval,figures
# Further options of pip, such as an index with smaller wheels of torch for CPUs.
ARG PIP_OPTIONS=""

RUN command -v python3 > /dev/null || { \
      apt-get update && \
      apt-get install --yes --no-install-recommends python3 python3-venv python3-dev gcc libc6-dev && \
      rm -rf /var/lib/apt/lists/*; \
    }
RUN python3 -m venv /opt/tfive
ENV PATH=/opt/tfive/bin:$PATH

WORKDIR /source
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src ./src
RUN pip install --no-cache-dir --constraint constraints.txt ${PIP_OPTIONS} ".[${EXTRAS}]"

RUN useradd --create-home --shell /bin/bash tfive && install --directory --owner=tfive /work
USER tfive
WORKDIR /work
ENTRYPOINT ["tfive"]
CMD ["--help"]
