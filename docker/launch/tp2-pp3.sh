#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Six cards of 64 GB, three stages of two: tp2-pp3.sh MODEL [arguments]. See container.sh.
# Refused today. The legal cuts leave layers 20-39 to two cards, which cannot hold them; a cut inside them waits for
# the relay. The container says so and ends with 1.
export PRESET="${PRESET:-ga100-64g-x6-tp2-pp3}"
exec "$(dirname "$0")/container.sh" "$@"
