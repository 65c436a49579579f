#!/bin/bash
# One to three nodes of eight GPUs without a scheduler. Start it on every node with the same HEAD, JOB and RUN:
#   HEAD=node1 JOB=first RUN=/shared/runs/first bash torchrun.sh
set -euo pipefail

export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=540

exec torchrun \
    --nnodes 1:3 \
    --nproc-per-node 8 \
    --rdzv-backend c10d \
    --rdzv-endpoint "$HEAD:29400" \
    --rdzv-id "$JOB" \
    --max-restarts 3 \
    -m tfive train "${PRESET:-qwen3.5-9b}" --set run.checkpoint_phases=true --out "$RUN"
