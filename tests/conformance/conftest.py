from tests.model.conftest import _one_thread as _one_thread
