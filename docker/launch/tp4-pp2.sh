#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Eight cards of 80 GB over PCIe, a pipeline stage on each socket: tp4-pp2.sh MODEL [arguments]. See container.sh.
# PRESET=a6000-48g-x8-tp4-pp2 serves on eight RTX A6000.
export PRESET="${PRESET:-a800-80g-x8-tp4-pp2}"
exec "$(dirname "$0")/container.sh" "$@"
