#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Two nodes of eight cards of 40 GB, a pipeline stage on each. The same on both, but for NODE_RANK:
#   NODE_RANK=0 MASTER_ADDR=<address of the first> tp8-pp2-two-node.sh MODEL [arguments]. See container.sh.
if [ -z "${NODE_RANK:-}" ] || [ -z "${MASTER_ADDR:-}" ]; then
    echo "error: NODE_RANK and MASTER_ADDR are needed" >&2
    echo "hint: NODE_RANK is 0 on the first node and 1 on the second, MASTER_ADDR the address of the first on both" >&2
    exit 2
fi
export PRESET="${PRESET:-a800-40g-x16-tp8-pp2}"
exec "$(dirname "$0")/container.sh" "$@"
