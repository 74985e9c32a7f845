#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Serve a checkpoint in a container of this project's image:
#
#   container.sh MODEL [arguments of `vllm-ampere serve`]
#
# MODEL is the checkpoint's folder on this host. From the environment:
#   PRESET     a name from `vllm-ampere plan --presets`; the scripts beside this one set it
#   IMAGE      the image                                          (vllm-ampere)
#   CACHE      volume, or folder of the server's user, that keeps compiled kernels   (vllm-ampere-cache)
#   GPUS       which cards, as docker's --gpus takes them         (all)
#   ADDRESS    where this host listens; others need a key then    (127.0.0.1)
#   PORT       the port there                                     (8000)
#   SHM_SIZE   a /dev/shm of the container's own, as 256g, in place of the host's
#   NODE_RANK, MASTER_ADDR   one of several nodes: its number, and the address of node 0. The container then has the
#              host's network, and ADDRESS and PORT go unused: write -- --host and --port at the end
#   NCCL_*, VLLM_*, GLOO_SOCKET_IFNAME   are handed on
set -euo pipefail

fail() {
    echo "error: $1" >&2
    echo "hint: $2" >&2
    exit 2
}

[[ $# -gt 0 && $1 != -* ]] || fail "no checkpoint is named" "write $0 MODEL [arguments of vllm-ampere serve]"
[[ -d $1 ]] || fail "$1 is not a folder" "name the folder that holds config.json and the *.safetensors files"
command -v docker >/dev/null || fail "docker is not installed" "install it, with the NVIDIA Container Toolkit"
model=$(realpath "$1")
shift
outside=$(find "$model" -maxdepth 1 -type l -exec realpath {} + | grep -vF "$model/" | head -n 1 || true)
[[ -z $outside ]] || fail "the folder holds links to $outside, which the container does not see" \
    "download with --local-dir, which writes the files themselves"

options=(--rm --gpus "${GPUS:-all}" --ulimit memlock=-1 --ulimit stack=67108864)
# vLLM's processes and NCCL meet in /dev/shm; with data parallelism the engram tables lie there too. Docker gives 64 MiB.
if [[ -n ${SHM_SIZE:-} ]]; then
    options+=(--shm-size "$SHM_SIZE")
else
    options+=(--ipc=host)
fi
options+=(--mount "type=bind,source=$model,target=/model,readonly" --volume "${CACHE:-vllm-ampere-cache}:/cache")
for name in $(compgen -e); do
    case $name in
        NCCL_* | VLLM_* | GLOO_SOCKET_IFNAME) options+=(--env "$name") ;;
    esac
done

words=(serve /model)
if [[ -n ${PRESET:-} ]]; then
    words+=(--preset "$PRESET")
fi
if [[ -n ${NODE_RANK:-} ]]; then
    options+=(--network host)
    if [[ -e /dev/infiniband ]]; then
        options+=(--device /dev/infiniband)
    fi
    words+=(--node-rank "$NODE_RANK" --master-addr "${MASTER_ADDR:-}")
else
    options+=(--publish "${ADDRESS:-127.0.0.1}:${PORT:-8000}:8000")
fi

exec docker run "${options[@]}" "${IMAGE:-vllm-ampere}" "${words[@]}" "$@"
