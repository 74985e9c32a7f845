# SPDX-License-Identifier: Apache-2.0
"""Writers and readers of the latent caches: the window, the compressed rows and the compressor's ring."""
