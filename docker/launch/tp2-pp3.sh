#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Six cards of 64 GB, three stages of two: tp2-pp3.sh MODEL [arguments]. See container.sh.
export PRESET="${PRESET:-ga100-64g-x6-tp2-pp3}"
exec "$(dirname "$0")/container.sh" "$@"
