# SPDX-License-Identifier: Apache-2.0
"""Index scores of compressed rows, and the selection of the rows that attention reads."""
