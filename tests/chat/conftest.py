# SPDX-License-Identifier: Apache-2.0
"""Two scripted servers, one a version, kept for the whole session."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from .driver import MODES, ScriptedServer, write_model


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("chat") / "model")


@pytest.fixture(scope="session")
def servers(model, tmp_path_factory):
    """Both servers by version; they start side by side."""
    both = {version: ScriptedServer(version, model, tmp_path_factory.mktemp(f"server-{version}")) for version in MODES}
    with ThreadPoolExecutor() as pool:
        starts = [pool.submit(server.__enter__) for server in both.values()]
    try:
        for start in starts:
            start.result()
        yield both
    finally:
        for start in starts:
            if start.exception() is None:
                start.result().__exit__(None, None, None)


@pytest.fixture(params=MODES)
def version(request):
    """Each version in turn, "v4" and "v41"."""
    return request.param


@pytest.fixture
def server(servers, version):
    """The server of the version."""
    return servers[version]


@pytest.fixture(scope="session")
def tokenizers(model):
    """vLLM's tokenizer of each version, in this process."""
    from vllm.tokenizers.registry import cached_get_tokenizer

    return {version: cached_get_tokenizer(str(model), tokenizer_mode=mode) for version, mode in MODES.items()}
