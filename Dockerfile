# For training on NVIDIA GPUs:
#   docker build -t snip-hf .
#   docker run --rm --gpus all --ipc=host -v "$PWD/runs:/workspace/runs" snip-hf \
#       accelerate launch --config_file recipes/accelerate/compile.yaml recipes/pretrain.py recipes/hopper.yaml
# The host needs NVIDIA's driver and container toolkit. The packages of torch bring CUDA's libraries.
FROM python:3.12-slim

# Triton and torch.compile build with the C compiler when they first run.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ git \
    && rm -rf /var/lib/apt/lists/*

ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility

WORKDIR /opt/snip-hf
COPY pyproject.toml setup.cfg setup.py README.md LICENSE ./
COPY src src
COPY recipes recipes
COPY eval eval
# torch 2.11 is the version that ran on GPUs.
RUN pip install --no-cache-dir ".[all]" 'torch==2.11.*'

WORKDIR /workspace
RUN snip-hf recipe copy
CMD ["snip-hf", "--help"]
