#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# The entry point of the image. The folder of a model is served: doctor, plan, then vLLM, all by `vllm-ampere serve`. A
# command of vllm-ampere, or a program, is run as it is. Whatever runs takes this process's place, and so its signals.
set -eu

if [ $# = 0 ]; then
    set -- --help
fi
case $1 in
    serve | doctor | plan | patches | kernels | bench | profile | env | -*) set -- vllm-ampere "$@" ;;
    */*)
        if ! { [ -f "$1" ] && [ -x "$1" ]; }; then
            set -- vllm-ampere serve "$@"
        fi
        ;;
    *)
        if ! command -v "$1" >/dev/null; then
            echo "vllm-ampere image: $1 is neither a command nor a folder of a model" >&2
            echo "hint: name the folder as the container sees it, by its whole path; mount it with -v" >&2
            exit 2
        fi
        ;;
esac

if [ "$1 ${2:-}" = "vllm-ampere serve" ] && ! [ -w "$HOME" ]; then
    echo "vllm-ampere image: user $(id -u) cannot write $HOME, where compiled kernels are kept" >&2
    echo "hint: mount a volume there, or a folder that this user owns" >&2
    exit 1
fi
exec "$@"
