#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Build the image with docker, or with buildah where no docker engine answers. Arguments go to the builder.
# IMAGE is its name; pip's PIP_INDEX_URL and PIP_EXTRA_INDEX_URL are handed on.
set -eu
cd "$(dirname "$0")/.."

if docker info >/dev/null 2>&1; then
    export DOCKER_BUILDKIT=1
    set -- docker build "$@"
elif command -v buildah >/dev/null; then
    # The OCI format has no health check.
    set -- buildah bud --format docker "$@"
else
    echo "make image: no docker engine answers, and there is no buildah" >&2
    echo "hint: install one of them, or start docker" >&2
    exit 1
fi
version=$(sed -n 's/^__version__ = "\(.*\)"/\1/p' vllm/ampere/__init__.py)
exec "$@" --tag "${IMAGE:-vllm-ampere}" --file docker/Dockerfile \
    --build-arg VERSION="$version" --build-arg REVISION="$(git rev-parse HEAD 2>/dev/null || true)" \
    --build-arg PIP_INDEX_URL --build-arg PIP_EXTRA_INDEX_URL .
