import pytest


@pytest.fixture(autouse=True, scope="package")
def _one_thread():
    import torch  # not above: this file is loaded where torch is missing, to skip the folder

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def library():
    """The compiled kernels."""
    from qwen3_asgi.model.cpu.library import kernel_library

    found, reason = kernel_library()
    if found is None:
        pytest.skip(f"no kernels on this machine: {reason}")
    return found
