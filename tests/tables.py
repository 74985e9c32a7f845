# SPDX-License-Identifier: Apache-2.0
"""Tables of figures that tests leave and the run prints at its end, from whichever process ran them."""

import pytest

# Title, label, figure.
Tables = dict[str, dict[str, float]]
TABLES = pytest.StashKey[Tables]()


def add(tables: Tables, others: Tables) -> None:
    """Figures of a label that both have are added: it is seconds where two processes have one."""
    for title, figures in others.items():
        table = tables.setdefault(title, {})
        for label, figure in figures.items():
            table[label] = table.get(label, 0.0) + figure
