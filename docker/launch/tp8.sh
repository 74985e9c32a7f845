#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Eight cards of 80 GB that NVLink joins: tp8.sh MODEL [arguments]. See container.sh.
export PRESET="${PRESET:-a100-80g-x8-tp8}"
exec "$(dirname "$0")/container.sh" "$@"
