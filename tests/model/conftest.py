import pytest


@pytest.fixture(autouse=True, scope="package")
def _one_thread():
    import torch  # not above: this file is loaded where torch is missing, to skip the folder

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
