# SPDX-License-Identifier: Apache-2.0
"""Which layouts of a V4.1 fit a box of cards, what they hold, and what they cost per step.

Standard library and pydantic only; nothing here touches a card. `plan.make_plan` answers for one layout,
`search.search` for all of them, `presets` are layouts that come with the release.
"""
